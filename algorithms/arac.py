# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "imageio>=2.37", "tyro>=1.0", "tensorboard>=2.18"]
# ///
"""ARAC: soft actor-critic for a team on a graph, pulled towards an imperfect reference policy by a divergence whose
weight adapts: strong while nothing is known, gone when the reference would hold the team back.

Shi et al., ARAC: Adaptive Regularized Multi-Agent Soft Actor-Critic in Graph-Structured Adversarial Games,
arXiv 2511.08412. Network and losses: EPG, arXiv 2511.00811, by the same group, whose code is public.

A reconstruction: neither the paper's text nor its code was available. Differs from the paper in:
1. the rule that adapts the weight is ours (`--beta-mode dual`: a multiplier with a target for the divergence, never
   above its first value); `performance` and `linear` are two others, `fixed` is EPG's, `none` is the control
2. network, pointer and losses are EPG's, but its critic mixes up agents and their neighbours, see arac.md; agents know
   their number and act at the same time, in training and in play
3. E_pi[min(Q1, Q2)] over joint actions is replaced by min(E_pi[Q1], E_pi[Q2]), which needs no table of K^m entries:
   the critics are sums over agents; `--joint-table` is EPG's exact form
4. the rules of confrontation are ours; those of pursuit are EPG's

    python algorithms/arac.py                                                       # pursuit on a cycle, CPU, 2 min
    python algorithms/arac.py --graph grid_10x10 --asynchronous --evader dp         # harder
    python algorithms/arac.py --beta-mode none                                      # control: no reference

E games, B transitions of a batch, n nodes, K slots (a node's closed neighbourhood), N agents of the learning team,
P players of both teams, d width."""

import contextlib
import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Literal, get_args

import imageio
import torch
import tyro
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # the repository root, for envs/
from envs.graph_games import GraphConfrontation, GraphGame, GraphPursuit
from envs.graphs import Graph, capture_tables, make_graph

# === 2 Args ===========================================================================================================


@dataclass
class Args:
    env_id: Literal["graph_pursuit", "graph_confrontation"] = "graph_pursuit"
    """game: catch an evader, or outnumber another team (EPG; ours)"""
    graph: str = "cycle_8"
    """cycle_N, path_N, complete_N, grid_RxC, petersen, city_N or city_N_SEED (ours)"""
    num_agents: int = 2
    """N, pursuers, or agents of each team (EPG: 2)"""
    num_captors: int = 1
    """pursuit: pursuers who must be on or next to the evader's node (EPG: 1 of 2)"""
    evader: Literal["dp", "maxdist", "random", "stay", "learned"] = "maxdist"
    """pursuit: perfect play, away from the nearest pursuer, random, none, or a learner of its own (EPG: dp)"""
    asynchronous: bool = False
    """pursuit: the scripted evader sees the pursuers' new nodes before it moves (EPG: both)"""
    start: Literal["same", "independent", "far"] = "same"
    """pursuit: pursuers begin on one node, anywhere, or on one node far from the evader (EPG: far)"""
    opponent: Literal["shortest", "random", "self"] = "shortest"
    """confrontation: the other team goes for the nearest opponent, anywhere, or learns too, in self-play (ours)"""
    horizon: int = 16
    """steps after which a game is cut off (EPG: 128)"""
    reference: Literal["shortest", "dp", "noisy", "none"] = "shortest"
    """policy to be pulled towards: shortest path, perfect play, that with random moves, or none (EPG: dp)"""
    beta_mode: Literal["dual", "performance", "linear", "fixed", "none"] = "dual"
    """how the weight of the divergence changes: by its target, by success, by time, or not at all (ours; EPG: fixed)"""
    beta: float = 0.2
    """first weight of the divergence, and its highest (ours; EPG: 0.1 at 30 times the reward)"""
    beta_target: float = 1.0
    """dual: divergence to hold, in units of that of the uniform policy, N ln K (ours)"""
    beta_lr: float = 5e-3
    """dual: Adam's learning rate of the logarithm of the weight (ours; EPG's unused one: 1e-4)"""
    alpha: float | None = None
    """first temperature; None: half of (1 - gamma) / (N ln K), from where on not to win pays best (ours; EPG: 0.14)"""
    autotune: bool = True
    """adapt the temperature to --target-entropy (EPG)"""
    alpha_lr: float = 1e-3
    """Adam's learning rate of the logarithm of the temperature (ours; EPG: 1e-4)"""
    target_entropy: float = 0.05
    """entropy to hold, in units of N ln K (EPG)"""
    joint_table: bool = False
    """expectations over all K^N joint actions, as EPG, instead of sums over agents (ours; EPG: yes)"""
    embed_dim: int = 32
    """d, width of the networks (ours; EPG: 128)"""
    num_heads: int = 4
    """heads of an attention (ours; EPG: 8)"""
    num_layers: int = 1
    """layers of the encoder (ours; EPG: 6)"""
    total_timesteps: int = 60_000
    """steps of all games together, rounded up to fifty equal pieces (ours)"""
    num_envs: int = 32
    """E, games that are stepped together (EPG)"""
    updates_per_step: float = 1.0
    """gradient steps for each step of the E games (ours; EPG: 8 for each episode)"""
    buffer_size: int = 100_000
    """transitions that are kept (ours; EPG: 10000)"""
    batch_size: int = 128
    """B, transitions of a gradient step (EPG)"""
    learning_starts: int = 2_000
    """steps of play before learning begins (EPG)"""
    learning_rate: float = 3e-4
    """Adam's learning rate of the networks (ours; EPG: 1e-5)"""
    gamma: float = 0.99
    """discount (EPG)"""
    target_network_frequency: int = 16
    """gradient steps between copies to the target networks (ours; EPG: 64)"""
    tau: float = 1.0
    """share of the online network that a copy takes (EPG)"""
    max_grad_norm: float = 10.0
    """gradients of the policy and of the critics are scaled down to this norm (ours; EPG: 100 and 20000)"""
    seed: int = 1
    """seed of games, networks and sampling (ours)"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU if there is one (ours)"""
    num_threads: int = 1
    """threads of torch on the CPU; more of them slow small networks down (ours)"""
    eval_steps: int = 12_000
    """steps between evaluations, which also come first and last; 0 is never (ours)"""
    eval_episodes: int = 512
    """starts that an evaluation plays at most, evenly chosen from all (ours)"""
    save_steps: int = 20_000
    """steps between checkpoints: this many, or a fiftieth of the run, are repeated after a crash at most (ours)"""
    output_dir: str | None = None
    """run folder; None is runs/<script>__<env>__<seed>__<time> (ours)"""
    resume: str | None = None
    """run folder to continue, with the flags it was started with (ours)"""
    evaluate: str | None = None
    """run folder whose policy is scored, without training; --graph and other flags of the game may differ (ours)"""
    video: bool = False
    """with --evaluate: write a game to episode.gif in the run folder (ours)"""


# === 3 The method =====================================================================================================


def forward_kl(log_probs: Tensor, reference_actions: Tensor) -> Tensor:
    """KL(reference | policy) for a deterministic reference: -sum_i log pi_i(a_ref_i). (B,N,K), (B,N) -> (B,)"""
    return -log_probs.gather(2, reference_actions[..., None]).sum((1, 2))


def joint_sums(values: Tensor) -> Tensor:
    """Sums over agents for all joint actions, whose number is sum_i a_i K^i. (B,N,K) -> (B,K^N)"""
    total = values[:, 0]  # (B,K)
    for number in range(1, values.size(1)):
        total = (values[:, number, :, None] + total[:, None]).flatten(1)  # (B,K^(number+1))
    return total


def soft_value(log_probs: Tensor, q1: Tensor, q2: Tensor, alpha: Tensor | float) -> Tensor:
    """E_pi[min(Q1, Q2) - alpha log pi], what a state is worth. (B,N,K) and the critics -> (B,)

    Critics (B,K^N), by number of the joint action: the exact form. Critics (B,N,K) that are summed over agents: the
    smaller of the two expectations, which is never below it. A padded slot has log-probability -1e8, so it drops out.
    """
    if q1.dim() == 2:
        log_probs = joint_sums(log_probs)  # (B,K^N)
        return (log_probs.exp() * (torch.min(q1, q2) - alpha * log_probs)).sum(1)
    probs = log_probs.exp()  # (B,N,K)
    return torch.min((probs * q1).sum((1, 2)), (probs * q2).sum((1, 2))) - alpha * (probs * log_probs).sum((1, 2))


def actor_loss(
    log_probs: Tensor, q1: Tensor, q2: Tensor, alpha: Tensor | float, beta: Tensor | float, reference: Tensor | None
) -> Tensor:
    """-E_pi[min(Q1, Q2) - alpha log pi] + beta KL(reference | pi), mean over the batch -> scalar

    log_probs (B,N,K), critics as in soft_value, reference actions (B,N) or None for none. EPG, R2PS eq. 8.
    """
    loss = -soft_value(log_probs, q1, q2, alpha).mean()
    return loss if reference is None else loss + beta * forward_kl(log_probs, reference).mean()


def critic_targets(
    rewards: Tensor, dones: Tensor, log_probs: Tensor, q1: Tensor, q2: Tensor, alpha: Tensor | float, gamma: float
) -> Tensor:
    """r + gamma (1 - d) E_pi[min(Q1', Q2') - alpha log pi], at the next state. (B,), (B,), (B,N,K), .. -> (B,)

    The divergence is not in it: the critics judge the task alone.
    """
    return rewards + gamma * (1 - dones.to(rewards.dtype)) * soft_value(log_probs, q1, q2, alpha)


def temperature_loss(log_alpha: Tensor, entropy: Tensor, target: float) -> Tensor:
    """log_alpha rises while the entropy (B,) is below its target. -> scalar; its gradient is entropy - target"""
    return (log_alpha * (entropy.detach() - target)).mean()


def coefficient_loss(log_beta: Tensor, kl: Tensor, target: float) -> Tensor:
    """log_beta rises while the divergence (B,) is above its target. -> scalar; its gradient is target - divergence"""
    return -(log_beta * (kl.detach() - target)).mean()


# === 4 Model and tokenizer ============================================================================================


def fail(message: str, code: int = 2) -> None:
    """Stop with one sentence: code 2 for what the user can mend, 1 for a run that went wrong."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(code)


@contextlib.contextmanager
def or_fail(message: str, code: int = 2):
    """What goes wrong inside the with-block stops the program with this sentence."""
    try:
        yield
    except Exception as error:  # torch, safetensors, templates and file systems raise dozens of types
        fail(f"{message} ({error!r:.300})", code)


def setup(args: Args) -> torch.device:
    """Device, threads and seed."""
    if args.device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: this machine, or this build of torch, has no CUDA device; use --device auto or cpu")
    torch.set_num_threads(args.num_threads)
    torch.manual_seed(args.seed)
    return torch.device("cuda" if torch.cuda.is_available() and args.device != "cpu" else "cpu")


def linear_schedule(start_e: float, end_e: float, duration: float, t: float) -> float:
    """From start_e at t = 0 along a line to end_e at t = duration, then constant."""
    return start_e + (end_e - start_e) * min(t / duration, 1.0)


class Attention(nn.Module):
    """Attention with several heads and no biases. (B,Q,d), (B,M,d) -> (B,Q,d); mask (Q,M) is -1e8 where forbidden."""

    def __init__(self, embed_dim: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.out = (nn.Linear(embed_dim, embed_dim, bias=False) for _ in range(4))

    def forward(self, query: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        """-> (B,Q,d)"""
        parts = self.query(query), self.key(memory), self.value(memory)  # (B,.,d) each
        heads = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in parts)  # (B,heads,.,d/heads) each
        return self.out(F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention, then a feed-forward network, both behind a layer norm and added to what came in."""

    def __init__(self, embed_dim: int, num_heads: int, ff_dim: int):
        super().__init__()
        self.attention = Attention(embed_dim, num_heads)
        self.norm1, self.norm2 = nn.LayerNorm(embed_dim), nn.LayerNorm(embed_dim)
        self.ff = nn.Sequential(nn.Linear(embed_dim, ff_dim), nn.ReLU(), nn.Linear(ff_dim, embed_dim))

    def forward(self, query: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B,Q,d), (B,M,d) -> (B,Q,d)"""
        hidden = query + self.attention(self.norm1(query), self.norm1(memory), mask)  # (B,Q,d)
        return hidden + self.ff(self.norm2(hidden))


class GraphEncoder(nn.Module):
    """What nodes and agents are like: every node attends to its neighbours, then every agent to all nodes."""

    def __init__(self, num_players: int, num_agents: int, embed_dim: int, num_heads: int, num_layers: int, ff_dim: int):
        super().__init__()
        self.num_agents, sizes = num_agents, (embed_dim, num_heads, ff_dim)
        self.embed = nn.Linear(num_players, embed_dim)
        self.encoder = nn.ModuleList(Layer(*sizes) for _ in range(num_layers))
        self.decoder = Layer(*sizes)
        self.number = nn.Parameter(torch.zeros(num_agents, embed_dim))  # tells agents on one node apart

    def encode(self, positions: Tensor, graph: Graph) -> tuple[Tensor, Tensor, Tensor]:
        """(B,P), own team last -> features of nodes (B,n,d), of the agents' own nodes and of what they see (B,N,d)"""
        nodes = self.embed(graph.features(positions))  # (B,n,d)
        mask = graph.edge_mask * -1e8  # (n,n)
        for layer in self.encoder:
            nodes = layer(nodes, nodes, mask)  # (B,n,d)
        places = positions[:, -self.num_agents :].clamp(min=0)  # (B,N) any node will do for removed players
        own = nodes.gather(1, places[..., None].expand(-1, -1, nodes.size(2)))  # (B,N,d)
        return nodes, own, self.decoder(own + self.number, nodes)

    def neighbours(self, nodes: Tensor, positions: Tensor, graph: Graph) -> Tensor:
        """Features of the nodes that agents can go to. (B,n,d) -> (B,N,K,d)"""
        slots = graph.slots[positions[:, -self.num_agents :]].clamp(min=0)  # (B,N,K)
        index = slots.flatten(1)[..., None].expand(-1, -1, nodes.size(2))  # (B,N K,d)
        return nodes.gather(1, index).unflatten(1, slots.shape[1:])


class GraphPolicy(GraphEncoder):
    """Log-probabilities of every agent's slots, -1e8 where padded: it points at a neighbour. (B,P) -> (B,N,K)"""

    def __init__(self, *sizes: int):
        super().__init__(*sizes)
        d = self.embed.out_features
        self.current = nn.Linear(2 * d, d)
        self.query, self.key = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)

    def forward(self, positions: Tensor, graph: Graph) -> Tensor:
        """-> (B,N,K)"""
        nodes, own, seen = self.encode(positions, graph)
        query = self.query(self.current(torch.cat([seen, own], -1)))  # (B,N,d)
        keys = self.key(self.neighbours(nodes, positions, graph))  # (B,N,K,d)
        scores = 10 * ((keys @ query[..., None])[..., 0] / math.sqrt(query.size(-1))).tanh()  # (B,N,K)
        return scores.masked_fill(graph.slot_mask[positions[:, -self.num_agents :]], -1e8).log_softmax(-1)


class GraphCritic(GraphEncoder):
    """Values of every agent's slots; that of a joint action is their sum. (B,P) -> (B,N,K)"""

    def __init__(self, num_slots: int, *sizes: int):
        super().__init__(*sizes)
        width = self.num_agents * num_slots
        self.shape = (self.num_agents, num_slots)
        self.action, self.out = nn.Linear(3 * self.embed.out_features, width), nn.Linear(width * width, width)

    def forward(self, positions: Tensor, graph: Graph) -> Tensor:
        """-> (B,N,K)"""
        nodes, own, seen = self.encode(positions, graph)
        neighbours = self.neighbours(nodes, positions, graph)  # (B,N,K,d)
        both = torch.cat([seen, own], -1)[:, :, None].expand(-1, -1, neighbours.size(2), -1)  # (B,N,K,2d)
        return self.out(self.action(torch.cat([both, neighbours], -1)).flatten(1)).unflatten(1, self.shape)


# === 5 Rollout ========================================================================================================


def make_graph_game(args: Args, num_envs: int, seed: int, device) -> GraphGame:
    """The game of --env-id, `num_envs` copies."""
    with or_fail(f"--env-id {args.env_id} --graph {args.graph}: no such game"):
        graph = make_graph(args.graph)
        if args.env_id == "graph_confrontation":
            script = "shortest" if args.opponent == "self" else args.opponent
            options = {"team_size": args.num_agents, "opponent": script, "horizon": args.horizon}
            return GraphConfrontation(graph, num_envs, seed, device, **options)
        options = {"num_pursuers": args.num_agents, "num_captors": args.num_captors, "evader": args.evader}
        options |= {"asynchronous": args.asynchronous, "start": args.start, "horizon": args.horizon}
        if args.evader in ("dp", "learned") or args.reference in ("dp", "noisy"):
            capture_tables(graph, args.num_agents, args.num_captors)  # too many states are refused now, not in the run
        return GraphPursuit(graph, num_envs, seed, device, **options)


class ReplayBuffer:
    """The last `size` transitions: columns of tensors (size,...) on the device, made when the first row comes."""

    def __init__(self, size: int, device):
        self.size, self.device, self.columns, self.count = size, device, {}, 0

    def add(self, **rows: Tensor) -> None:
        """Add E rows, (E,...) each, over the oldest ones."""
        first = next(iter(rows.values()))
        if not self.columns:
            empty = {name: x.new_zeros(self.size, *x.shape[1:]) for name, x in rows.items()}
            self.columns = {name: column.to(self.device) for name, column in empty.items()}
        places = (self.count + torch.arange(len(first), device=self.device)) % self.size  # (E,)
        for name, values in rows.items():
            self.columns[name][places] = values
        self.count += len(first)

    def sample(self, batch_size: int) -> dict[str, Tensor]:
        """B random rows, with replacement."""
        rows = torch.randint(min(self.count, self.size), (batch_size,), device=self.device)  # (B,)
        return {name: column[rows] for name, column in self.columns.items()}

    def state_dict(self) -> dict:
        """The filled part."""
        return {"count": self.count, "columns": {name: x[: self.count].clone() for name, x in self.columns.items()}}

    def load_state_dict(self, state: dict) -> None:
        """Continue with the rows of state_dict."""
        self.columns, self.count = {}, 0
        if state["count"]:
            self.add(**{name: x.to(self.device) for name, x in state["columns"].items()})
        self.count = state["count"]


def update_target(target: nn.Module, online: nn.Module, tau: float) -> None:
    """target <- (1 - tau) target + tau online, in place."""
    with torch.no_grad():
        for old, new in zip(target.parameters(), online.parameters()):
            old.lerp_(new, tau)


class SoftActorCritic:
    """Policy, two critics, temperature, and weight of the divergence of one team: what acts and learns."""

    PARTS = ("policy", "critics", "targets", "optimizer", "buffer")

    def __init__(self, game: GraphGame, args: Args, side: int, device):
        size, graph = game.teams[side], game.graph
        self.args, self.side, self.updates, self.owed = args, side, 0, 0.0
        self.uniform = size * math.log(graph.num_slots)  # N ln K, entropy and divergence of the uniform policy
        shape = (game.num_players, size, args.embed_dim, args.num_heads, args.num_layers, 4 * args.embed_dim)
        self.policy = GraphPolicy(*shape).to(device)
        pairs = (nn.ModuleList(GraphCritic(graph.num_slots, *shape) for _ in range(2)) for _ in range(2))
        self.critics, self.targets = (pair.to(device) for pair in pairs)
        self.targets.load_state_dict(self.critics.state_dict())
        alpha = (1 - args.gamma) / self.uniform / 2 if args.alpha is None else args.alpha
        self.log_alpha, self.log_beta = (torch.tensor(math.log(x), device=device) for x in (alpha, args.beta))
        self.success = torch.zeros((), device=device)  # moving share of games won
        groups = [{"params": [*self.policy.parameters(), *self.critics.parameters()]}]
        groups += [{"params": [self.log_alpha.requires_grad_()], "lr": args.alpha_lr}]
        groups += [{"params": [self.log_beta.requires_grad_()], "lr": args.beta_lr}]
        self.optimizer = torch.optim.Adam(groups, args.learning_rate, fused=True)
        self.buffer = ReplayBuffer(args.buffer_size, device)
        evader = side and args.env_id == "graph_pursuit"
        self.reference = "none" if evader or args.beta_mode == "none" else args.reference

    @torch.no_grad()
    def act(self, game: GraphGame, side: int, greedy: bool = False) -> Tensor:
        """Slots (E,N) of a side, sampled or the likeliest."""
        log_probs = self.policy(game.view(game.positions, side), game.graph)  # (E,N,K)
        return (log_probs if greedy else log_probs - torch.empty_like(log_probs).exponential_().log()).argmax(-1)

    def beta(self, step: int) -> Tensor | float:
        """Weight of the divergence after `step` steps."""
        if self.reference == "none":
            return 0.0
        if self.args.beta_mode == "dual":
            return self.log_beta.detach().exp()
        if self.args.beta_mode == "performance":
            return self.args.beta * (1 - self.success).square()
        end = 0.0 if self.args.beta_mode == "linear" else self.args.beta
        return linear_schedule(self.args.beta, end, self.args.total_timesteps / 2, step)

    def remember(self, game: GraphGame, side: int, before: Tensor, actions: Tensor, found: tuple) -> None:
        """Keep a step of all games as `side` saw it. (E,P), (E,N), what game.step returned"""
        rewards, terminated, truncated, last = found
        reference = actions if self.reference == "none" else game.scripted(self.reference, before, side)  # (E,N)
        rows = {"positions": game.view(before, side), "actions": actions, "reference": reference}
        rows |= {"rewards": -rewards if side else rewards, "dones": terminated}
        self.buffer.add(**rows, next_positions=game.view(last, side))
        if side == self.side:
            won, ended = (rows["rewards"] > 0).sum(), (terminated | truncated).sum()
            self.success += (0.01 * ended).clamp(max=1) * (won / ended.clamp(min=1) - self.success)

    def learn(self, graph: Graph, step: int) -> dict[str, Tensor]:
        """As many gradient steps as are due after a step of the games. Means of the metrics; nothing if none is."""
        self.owed += self.args.updates_per_step
        sums, count = 0.0, int(self.owed)
        self.owed -= count
        for _ in range(count):
            metrics = self.gradient_step(self.buffer.sample(self.args.batch_size), graph, self.beta(step))
            sums = sums + torch.stack(list(metrics.values()))
        return dict(zip(metrics, sums / count)) | {"train/arac/beta": torch.as_tensor(self.beta(step))} if count else {}

    def gradient_step(self, batch: dict[str, Tensor], graph: Graph, beta: Tensor | float) -> dict[str, Tensor]:
        """One Adam step on everything. Columns (B,...)."""
        args, alpha = self.args, self.log_alpha.detach().exp()
        form = joint_sums if args.joint_table else nn.Identity()
        log_probs = self.policy(batch["positions"], graph)  # (B,N,K)
        values = [critic(batch["positions"], graph) for critic in self.critics]  # (B,N,K) each
        with torch.no_grad():
            after = [form(critic(batch["next_positions"], graph)) for critic in self.targets]  # (B,N,K) or (B,K^N) each
            next_log_probs = self.policy(batch["next_positions"], graph)  # (B,N,K)
            rewards, dones = batch["rewards"], batch["dones"]  # (B,) each
            targets = critic_targets(rewards, dones, next_log_probs, *after, alpha, args.gamma)  # (B,)
            entropy = -(log_probs.exp() * log_probs).sum((1, 2))  # (B,)
            divergence = forward_kl(log_probs, batch["reference"])  # (B,)
        chosen = [q.gather(2, batch["actions"][..., None]).sum((1, 2)) for q in values]  # (B,) each
        critic_loss = sum((q - targets).square().mean() for q in chosen)
        reference = None if self.reference == "none" else batch["reference"]  # (B,N), not the own actions kept there
        policy_loss = actor_loss(log_probs, *(form(q.detach()) for q in values), alpha, beta, reference)
        loss = policy_loss + critic_loss
        if args.autotune:
            loss = loss + temperature_loss(self.log_alpha, entropy, args.target_entropy * self.uniform)
        if args.beta_mode == "dual" and reference is not None:
            loss = loss + coefficient_loss(self.log_beta, divergence, args.beta_target * self.uniform)
        self.optimizer.zero_grad()
        loss.backward()
        clip = [net.parameters() for net in (self.policy, self.critics)]
        norms = [nn.utils.clip_grad_norm_(part, args.max_grad_norm, foreach=True) for part in clip]
        self.optimizer.step()
        self.log_beta.data.clamp_(max=math.log(args.beta))  # the pull can only be weaker than at the beginning
        self.updates += 1
        if self.updates % args.target_network_frequency == 0:
            update_target(self.targets, self.critics, args.tau)
        metrics = {"losses/actor_loss": policy_loss.detach(), "losses/qf_loss": critic_loss.detach()}
        metrics |= {"losses/actor_grad_norm": norms[0], "losses/qf_grad_norm": norms[1]}
        metrics |= {"losses/qf_values": chosen[0].detach().mean(), "losses/entropy": entropy.mean()}
        metrics |= {"train/arac/alpha": alpha}
        return metrics if reference is None else metrics | {"train/arac/divergence": divergence.mean()}

    def state_dict(self) -> dict:
        """Everything but the game."""
        scalars = {name: getattr(self, name).detach().clone() for name in ("log_alpha", "log_beta", "success")}
        parts = {name: getattr(self, name).state_dict() for name in self.PARTS}
        return parts | scalars | {"updates": self.updates, "owed": self.owed}

    def load_state_dict(self, state: dict) -> None:
        """Continue where state_dict was taken."""
        for name in self.PARTS:
            getattr(self, name).load_state_dict(state[name])
        for name in ("log_alpha", "log_beta", "success"):
            getattr(self, name).data.copy_(state[name])
        self.updates, self.owed = state["updates"], state["owed"]


# === 6 Checkpoint =====================================================================================================


class Progress(dict):
    """Counters that a resumed run continues."""

    state_dict, load_state_dict = dict.copy, dict.update


def checkpoints(run_dir: str) -> list[str]:
    """Checkpoint files of a run, oldest first."""
    return sorted(map(str, Path(run_dir, "checkpoints").glob("step_*[0-9].pt")))


def save_checkpoint(run_dir: str, step: int, state: dict, keep: int = 2) -> None:
    """Write state (name -> object with a state_dict). A crash leaves either the old files or the new one."""
    payload = {name: thing.state_dict() for name, thing in state.items()}
    payload |= {"random": torch.get_rng_state(), "random_cuda": torch.cuda.get_rng_state_all()}
    path = os.path.join(run_dir, "checkpoints", f"step_{step:012d}.pt")
    with or_fail(f"{path}: cannot be written; the checkpoints before it are kept", 1):
        torch.save(payload, path + ".tmp")
        os.replace(path + ".tmp", path)
    for old in checkpoints(run_dir)[:-keep]:
        os.remove(old)


def load_checkpoint(run_dir: str, state: dict) -> bool:
    """Restore the newest checkpoint into the objects of state; False if the run was stopped before its first."""
    for path in checkpoints(run_dir)[-1:]:
        with or_fail(f"{path}: damaged, or of another script; delete it to continue from the one before", 1):
            payload = torch.load(path, map_location="cpu", weights_only=True)
            for name, thing in state.items():
                thing.load_state_dict(payload[name])
            torch.set_rng_state(payload["random"])
            torch.cuda.set_rng_state_all(payload["random_cuda"][: torch.cuda.device_count()])
    return bool(checkpoints(run_dir))


def run_args(args: Args) -> Args:
    """The flags of the run to continue or to score. A flag given now must agree, unless the training ignores it."""
    if args.evaluate and args.resume:
        fail("--evaluate and --resume: one of them, please; a finished run is scored, an unfinished one is continued")
    run_dir = args.evaluate or args.resume
    with or_fail(f"{run_dir}: not a run folder of this script"):
        saved = Args(**json.loads(Path(run_dir, "args.json").read_text()))
    free = ("resume", "evaluate", "video", "save_steps", "device", "num_threads", "compile", "eval_episodes")
    # a flag on the command line counts as given with its default value, too
    words = {w.split("=")[0].replace("_", "-").replace("--no-", "--") for w in sys.argv if __name__ == "__main__"}
    given = {x: now for x, now in vars(args).items() if now != getattr(Args, x) or f"--{x.replace('_', '-')}" in words}
    for name, now in given.items():
        if now != (before := getattr(saved, name)) and name not in free:
            fail(f"{run_dir}: the run began with --{name.replace('_', '-')} {before}, not {now}")
    return replace(saved, **given | {"output_dir": run_dir})


class Logger:
    """metrics.csv (the same for the same seed), perf.csv (time, speed, memory) and TensorBoard in the run folder."""

    def __init__(self, run_dir: str, args: Args, step: int):
        """`step` is the last one whose rows stay when a run is resumed; -1 for a new run."""
        with or_fail(f"{run_dir}: cannot be used as a run folder"):
            os.makedirs(os.path.join(run_dir, "checkpoints"), exist_ok=True)
            Path(run_dir, "args.tmp").write_text(json.dumps(asdict(replace(args, resume=None)), indent=1))
            os.replace(os.path.join(run_dir, "args.tmp"), os.path.join(run_dir, "args.json"))
            self.files = {x: open(os.path.join(run_dir, x), "a+", 1, newline="") for x in ("metrics.csv", "perf.csv")}
            for file in self.files.values():
                file.seek(0)  # what is cut off, a line half written too, is what the resumed run writes again
                kept = [x for x in file if x[-1] == "\n" and (x[0] == "s" or int(x.split(",")[0]) <= step)]
                file.truncate(sum(map(len, kept)))
                file.write("" if kept else "step,tag,value\n")
            self.board = SummaryWriter(run_dir, purge_step=step + 1)

    def scalars(self, step: int, values: dict[str, float], file: str = "metrics.csv") -> None:
        """Write tag -> value."""
        self.files[file].writelines(f"{step},{tag},{value}\n" for tag, value in values.items())
        for tag, value in values.items():
            self.board.add_scalar(tag, value, step)
        self.board.flush()


# === 7 Evaluation =====================================================================================================


@torch.no_grad()
def play_from_starts(args: Args, device, choose) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A game from each start with choose(game) -> slots. Results of team 0 (G,), steps (G,), positions of the first."""
    args = replace(args, evader="dp" if args.evader == "learned" else args.evader)  # a learner is no yardstick
    starts = make_graph_game(args, 1, args.seed, device).starts()  # (all,P)
    starts = starts[:: -(-len(starts) // args.eval_episodes)]  # (G,P)
    game, path = make_graph_game(args, len(starts), args.seed + 10_000, device), [starts[0]]
    game.positions, running = starts.clone(), torch.ones(len(starts), dtype=torch.bool, device=device)  # (G,P), (G,)
    results, steps = torch.zeros(len(starts), device=device), torch.zeros(len(starts), device=device)  # (G,) each
    with torch.random.fork_rng(range(torch.cuda.device_count())):  # evaluating more often changes nothing in training
        torch.manual_seed(args.seed)
        for _ in range(args.horizon):
            rewards, terminated, _, last = game.step(choose(game))
            path += [last[0]] if running[0] else []
            results, steps = results + rewards * running, steps + running
            running &= ~terminated
    return results, steps, path


def evaluate(learner: SoftActorCritic, args: Args, device) -> dict[str, float]:
    """Share of games won and lost from all starts: likeliest actions, sampled ones, and those of the reference."""
    choices = {"greedy": lambda game: learner.act(game, 0, True), "sampled": lambda game: learner.act(game, 0)}
    if args.reference != "none":
        choices["reference"] = lambda game: game.scripted(args.reference, game.positions, 0)
    scores = {}
    for name, choose in choices.items():
        results, steps, _ = play_from_starts(args, device, choose)
        scores[f"eval/{name}/success"] = (won := results > 0).float().mean().item()
        scores |= {f"eval/{name}/steps": steps[won].mean().item()} if won.any() else {}
        scores |= {f"eval/{name}/loss": (results < 0).float().mean().item()} if args.env_id != "graph_pursuit" else {}
    return scores


def score_run(args: Args) -> dict[str, float]:
    """--evaluate: scores of a run's policy in its game or in another, and with --video a game as a moving picture."""
    tried = ("graph", "evader", "asynchronous", "start", "opponent", "horizon", "reference")
    trained = run_args(replace(args, **{name: getattr(Args, name) for name in tried}))
    check_args(trained)
    flags = replace(trained, **{x: getattr(args, x) for x in tried if getattr(args, x) != getattr(Args, x)})
    check_args(flags)
    device = setup(flags)
    learner = SoftActorCritic(make_graph_game(trained, 1, 0, device), trained, 0, device)
    if not load_checkpoint(args.evaluate, {"team_0": learner}):
        fail(f"{args.evaluate}: has no checkpoint yet; continue it with --resume {args.evaluate}")
    scores = evaluate(learner, flags, device)
    print("  ".join(f"{tag} {value:.3f}" for tag, value in scores.items()))
    if args.video:
        game = make_graph_game(flags, 1, 0, device)
        moves = play_from_starts(flags, device, lambda game: learner.act(game, 0))[2]  # (P,) each
        frames = [game.picture(positions).numpy() for positions in moves]
        imageio.mimsave(path := os.path.join(args.evaluate, "episode.gif"), frames, duration=500, loop=0)
        print(path)
    return scores


# === 8 Training loop ==================================================================================================


def check_args(args: Args) -> None:
    """One sentence for every flag that cannot work."""
    least = {f.name: int(f.type is int) for f in fields(Args)} | {"eval_steps": 0, "seed": 0, "learning_starts": 0}
    least |= {"alpha": 1e-12, "beta": 1e-12}
    for f in fields(Args):
        value, kinds = getattr(args, f.name), [getattr(x, "__name__", x) for x in get_args(f.type) or (f.type,)]
        highest = 1 if f.name in ("gamma", "tau") else 2**31
        unfit = value not in kinds and not {*kinds, "int"} & {kind.__name__ for kind in type(value).__mro__}
        if value == "" or unfit or (isinstance(value, (int, float)) and not least[f.name] <= value <= highest):
            wanted = " or ".join(kinds) if unfit else f"a number from {least[f.name]} to {highest:,}"
            fail(f"--{f.name.replace('_', '-')} {value!r}: expected {'a name' if value == '' else wanted}")
    pursuit, learned = args.env_id == "graph_pursuit", args.evader == "learned"
    if args.embed_dim % args.num_heads:
        fail(f"--embed-dim {args.embed_dim}: expected a multiple of --num-heads {args.num_heads}")
    if learned and args.asynchronous:
        fail("--asynchronous: a scripted evader's, --evader learned moves at the same time as the pursuers")
    if not pursuit and (args.evader, args.num_captors, args.start, args.asynchronous) != ("maxdist", 1, "same", False):
        fail("--evader, --num-captors, --start and --asynchronous are for --env-id graph_pursuit")
    if pursuit and args.opponent != Args.opponent:
        fail(f"--opponent {args.opponent}: for --env-id graph_confrontation")
    if not pursuit and args.reference == "dp":
        fail("--reference dp: only pursuit is solved; confrontation has shortest, noisy and none")
    if args.reference == "none" and args.beta_mode not in ("none", Args.beta_mode):
        fail(f"--beta-mode {args.beta_mode}: weighs the divergence from a reference, and --reference is none")
    if args.gamma == 1 and args.alpha is None:
        fail("--gamma 1: then every --alpha makes it pay best never to win; choose one yourself")
    if args.buffer_size < args.num_envs:
        fail(f"--buffer-size {args.buffer_size}: less than one step of --num-envs {args.num_envs} games")
    if args.video and not args.evaluate:
        fail("--video: needs --evaluate RUN_DIR, the run whose policy is shown")


def play_piece(sides: list[SoftActorCritic], game: GraphGame, args: Args, step: int, size: int) -> dict[str, float]:
    """`size` steps of all games together, from `step` on, and the learning that is due. Returns means."""
    sums, results = {}, torch.zeros(2, device=game.device)
    for now in range(step, step + size, args.num_envs):
        before, actions = game.positions, [learner.act(game, side) for side, learner in enumerate(sides)]
        found = game.step(*actions)  # 1. act
        for side, learner in enumerate(sides):
            learner.remember(game, side, before, actions[side], found)
        results += torch.stack([(found[0] > 0).sum(), (found[1] | found[2]).sum()])
        for learner in dict.fromkeys(sides) if now >= args.learning_starts else ():  # 2. learn
            prefix = "evader/" if learner.side else ""
            for tag, value in learner.learn(game.graph, now).items():
                sums.setdefault(prefix + tag, []).append(value)
    metrics = {tag: torch.stack(values).mean().item() for tag, values in sums.items()}
    won, ended = results.tolist()
    return metrics | ({"charts/success": won / ended, "charts/episodic_length": size / ended} if ended else {})


def train(args: Args) -> dict[str, float]:
    """Train as the flags say. Returns the last evaluation. Steps as in arac.md."""
    if args.evaluate:
        return score_run(args)
    args = run_args(args) if args.resume else args
    check_args(args)
    device = setup(args)
    game = make_graph_game(args, args.num_envs, args.seed, device)
    sides, progress = [SoftActorCritic(game, args, 0, device)], Progress(step=0)
    if args.env_id == "graph_pursuit":
        sides += [SoftActorCritic(game, args, 1, device)] if args.evader == "learned" else []
    elif args.opponent == "self":
        sides += sides  # one learner plays both teams
    state = {f"team_{learner.side}": learner for learner in sides} | {"game": game, "progress": progress}
    run_dir = args.output_dir or f"runs/{Path(__file__).stem}__{args.graph}__{args.seed}__{time.time():.0f}"
    if not args.resume and any(os.path.exists(f"{run_dir}/{x}") for x in ("args.json", "metrics.csv")):
        fail(f"--output-dir {run_dir}: holds a run already; continue it with --resume {run_dir} or name another folder")
    loaded = progress["step"] if args.resume and load_checkpoint(run_dir, state) else -1
    logger = Logger(run_dir, args, loaded)
    print(f"{run_dir}: {args.env_id} on {args.graph}, {args.num_envs} games, {device}")
    signals = []  # the piece is finished and saved before the run leaves; a second signal leaves at once
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os._exit(128 + number) if signals else signals.append(number))
    size = -(-args.total_timesteps // 50 // args.num_envs) * args.num_envs  # a piece of the run
    start, first, scores, end = time.perf_counter(), progress["step"], {}, -(-args.total_timesteps // size) * size
    while True:
        step, last, stop = progress["step"], progress["step"] >= end, max(signals, default=0)
        scoring, saving = (n and step // n > (step - size) // n for n in (args.eval_steps, args.save_steps))
        if step != loaded and args.eval_steps and (last or scoring or step == 0):
            logger.scalars(step, scores := evaluate(sides[0], args, device))
            print("  ".join(f"{tag} {value:.2f}" for tag, value in scores.items() if "success" in tag), flush=True)
        if step not in (0, loaded) and (last or stop or saving):
            save_checkpoint(run_dir, step, state)
        if last or stop:
            break
        began, updates = time.perf_counter(), sides[0].updates
        metrics = play_piece(sides, game, args, step, size)  # 1. act, 2. learn
        now = time.perf_counter()  # 3. log; evaluate and save above
        progress["step"] = step = step + size
        logger.scalars(step, metrics)
        if not math.isfinite(sum(metrics.values())):
            fail("a loss is not a number any more; the last checkpoint is good, try a smaller --learning-rate", 1)
        memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else getrusage(RUSAGE_SELF).ru_maxrss * 1024
        seconds, updates = now - began, sides[0].updates - updates
        perf = {"charts/SPS": size / seconds, "perf/updates_per_second": updates / seconds}
        logger.scalars(step, perf | {"perf/peak_memory_gb": memory / 1e9}, "perf.csv")
        left, done = (now - start) / (step - first) * (end - step), f"step {step:>9,}/{end:,}"
        done += f"  success {won:4.0%}" if (won := metrics.get("charts/success")) is not None else "  no game ended"
        done += f"  beta {metrics['train/arac/beta']:.4f}" if "train/arac/beta" in metrics else f"  {'no update':>11}"
        print(f"{done}  {perf['charts/SPS']:7,.0f} steps/s  {left // 60:.0f}:{left % 60:02.0f} left", flush=True)
    if stop and not last:
        fail(f"stopped after step {step}; continue with --resume {run_dir}", 128 + stop)
    return scores


if __name__ == "__main__":
    train(tyro.cli(Args))
