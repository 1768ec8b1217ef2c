# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.6", "tyro>=1.0", "tensorboard>=2.18"]
# ///
"""ARAC: soft actor-critic for a team on a graph, pulled towards an imperfect reference policy by a
divergence whose weight beta adapts. Shi et al., arXiv 2511.08412.

    critics    y = r + gamma (1 - d) E_pi[min(Q1', Q2') - alpha log pi]    at the next state
    policy     -E_pi[min(Q1, Q2) - alpha log pi] + beta KL(reference | pi)
    beta       rises while the divergence is above its target, else falls; never above its start

Q' are copies of the critics, renewed now and then; d is 1 where a game was decided, 0 where it was
cut off. The losses are the critics' squared error to critic_targets, actor_loss, temperature_loss
(of alpha) and coefficient_loss (of beta). update adds them up, and current_beta gives beta.

A reconstruction: neither the paper's text nor its code was available. Network, pointer and losses
are those of EPG (arXiv 2511.00811), public code by the same group. Our choices:
1. The rule that adapts beta is ours: `--beta-mode dual`. To compare with: `exp` lets beta fall by
   time, `fixed` is EPG's, `none` drops it.
2. All agents act at the same time, and each has a learned vector of its own. In EPG's code they
   act one after another in play, but training treats them as simultaneous.
3. Critics are sums over agents, so E_pi[min(Q1, Q2)] over joint actions is replaced by
   min(E_pi[Q1], E_pi[Q2]), a sum over N K terms. `--joint-table` is EPG's form with K^N terms.
4. The rules of confrontation are ours, those of pursuit are EPG's.

    python algorithms/arac.py                                     # a cycle of 8 nodes
    python algorithms/arac.py --graph grid_10x10 --evader dp --start far --horizon 128
    python algorithms/arac.py --graph town.graphml --horizon 64   # your own graph
    python algorithms/arac.py --beta-mode none                    # control: no reference

Copied elsewhere, the script plays pursuit on GraphML files (pip install networkx). Graphs by name,
perfect play and confrontation are in envs/. For another reward change GraphPursuit.outcome, which
sees the positions after a step, and also rules out starts. A reward above 0 counts as a game won,
so give none before the end; the first --alpha takes a win to be worth 1. Perfect play knows only
the rule of capture: for another rule change capture_times in envs/graph_games.py, too, or do
without dp and noisy.

Letters in shapes: E games, B transitions of a batch, n nodes, K slots (an agent stays, or goes to a
neighbour), N agents of the learning team, P players of both teams, m pursuers, d width, h heads. A
game lists team 0 first; networks and batches list the learning team last (GraphGame.view). A
removed player has position -1.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import random
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository root, for envs/

NUM_HEADS = 4  # EPG: 8
ALPHA_LR = 1e-3  # EPG: 1e-4
MAX_GRAD_NORM = 10.0  # of the policy and of the critics (EPG: 100 and 20,000)
LOGS = 50  # log points of a run
MOST_NODES = 10_000  # of a graph, because distances are a matrix
MOST_LISTED = 10**6  # starts are chosen from all placements of the players, if these are no more
DRAWN_STARTS = 10_000  # else from so many random placements
EVAL_EPISODES = 512  # starts that an evaluation plays at most on each graph
# Flags that cannot change when a run is resumed.
FIXED = "seed env_id graph num_agents num_captors num_envs evader asynchronous opponent reference"
FIXED += " beta_mode alpha beta beta_lr joint_table learning_rate embed_dim num_layers buffer_size"
FIXED += " eval_graphs start horizon gamma save_steps output_dir"
SILENT = "resume evaluate"  # flags whose change is not announced


@dataclass
class Args:
    # game
    env_id: Literal["graph_pursuit", "graph_confrontation"] = "graph_pursuit"
    """game: catch an evader (EPG), or outnumber another team"""
    graph: tuple[str, ...] = ("cycle_8",)
    """cycle_N, path_N, complete_N, grid_RxC, petersen, city_N, city_N_SEED or FILE.graphml; several
    take turns"""
    eval_graphs: tuple[str, ...] = ()
    """further graphs to evaluate on, which the training does not see"""
    num_agents: int = 2
    """N, pursuers, or agents of each team"""
    num_captors: int = 1
    """pursuit: pursuers who must be on or next to the evader's node"""
    evader: Literal["dp", "maxdist", "random", "stay", "learned"] = "maxdist"
    """pursuit: perfect play, away from the nearest pursuer, random, none, or a second learner,
    which evaluations replace by perfect play"""
    asynchronous: bool = False
    """pursuit: the scripted evader sees the pursuers' new nodes before it moves"""
    start: Literal["same", "independent", "far"] = "same"
    """pursuit: pursuers begin on one node, anywhere, or on one node far from the evader"""
    opponent: Literal["shortest", "random", "self"] = "shortest"
    """confrontation: the other team goes for its nearest opponent, moves at random, or learns too
    (self-play; evaluations play against shortest)"""
    horizon: int = 16
    """steps after which a game is cut off"""
    # method
    reference: Literal["shortest", "dp", "noisy"] = "shortest"
    """policy to be pulled towards: shortest path; dp, perfect play (pursuit); noisy, perfect play
    (confrontation: the shortest path), each move random with chance 1/2 (nobody can imitate random
    moves, so the divergence stays high: raise --beta-target); another one needs a name here and in
    GraphPursuit.PURSUERS, and a branch of GraphPursuit.scripted"""
    beta_mode: Literal["dual", "exp", "fixed", "none"] = "dual"
    """how beta changes: by the divergence, by time, not at all; none is learning without a
    reference"""
    beta: float = 0.2
    """first weight of the divergence, and its highest (EPG: 0.1, with rewards of 30)"""
    beta_target: float = 0.5
    """dual: divergence to hold, in units of that of the uniform policy"""
    beta_lr: float = 5e-3
    """step size of log beta: in dual it is Adam's learning rate; in exp log beta falls by this with
    each update"""
    alpha: float | None = None
    """first temperature; None is half of the value at which the entropy bonus of endless random
    play equals the reward of a win"""
    target_entropy: float = 0.05
    """entropy to hold by adapting alpha, in units of that of the uniform policy"""
    joint_table: bool = False
    """expectations over all K^N joint actions (EPG) instead of sums over agents"""
    # networks and training
    embed_dim: int = 32
    """d, width of the networks, a multiple of 4 (EPG: 128)"""
    num_layers: int = 1
    """layers of the encoder (EPG: 6)"""
    total_timesteps: int = 60_000
    """steps of all games together"""
    num_envs: int = 32
    """E, games that are stepped together"""
    updates_per_step: int = 1
    """gradient steps for each step of the E games"""
    buffer_size: int = 100_000
    """transitions that are kept"""
    batch_size: int = 128
    """B, transitions of a gradient step"""
    learning_starts: int = 2_000
    """steps of play before learning begins"""
    learning_rate: float = 3e-4
    """Adam's learning rate of the networks (EPG: 1e-5)"""
    gamma: float = 0.99
    """discount"""
    target_network_frequency: int = 16
    """gradient steps between copies of the critics to their targets (EPG: 64)"""
    # bookkeeping
    seed: int = 1
    """seed of environments, networks and sampling"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU if there is one"""
    eval_steps: int = 12_000
    """steps between evaluations; 0 evaluates at the end only"""
    save_steps: int = 20_000
    """steps between checkpoints; 0 keeps none, nor the trained policy. Games start anew at each of
    them, so let it be many times num_envs x horizon x number of graphs, which take turns"""
    output_dir: str | None = None
    """run folder; None is runs/<script>__<game>__<seed>__<time>_<process>"""
    resume: str | None = None
    """run folder to continue; its flags are used unless given anew"""
    evaluate: str | None = None
    """run folder to score instead of training; its flags are used unless given anew"""

    def __post_init__(self):
        self.graph = tuple(self.graph)  # args.json has lists
        self.eval_graphs = tuple(self.eval_graphs)


# --- The method ---------------------------------------------------------------------------------


def forward_kl(log_probs: Tensor, reference_actions: Tensor) -> Tensor:
    """KL(reference | policy) of a deterministic reference: -sum_i log pi_i(a_ref_i).

    (B,N,K), (B,N) -> (B,)
    """
    return -log_probs.gather(2, reference_actions[..., None]).sum((1, 2))


def joint_sums(values: Tensor) -> Tensor:
    """Sums over agents for all joint actions, at index sum_i a_i K^i. (B,N,K) -> (B,K^N)"""
    total = values[:, 0]  # (B,K)
    for agent in range(1, values.size(1)):
        total = values[:, agent, :, None] + total[:, None]  # (B,K,K^agent)
        total = total.flatten(1)
    return total


def soft_value(log_probs: Tensor, q1: Tensor, q2: Tensor, alpha: Tensor | float) -> Tensor:
    """E_pi[min(Q1, Q2) - alpha log pi], what a state is worth. log_probs (B,N,K) -> (B,)

    With critics (B,K^N), one value for each joint action, this is exact. With critics (B,N,K),
    whose values are summed over agents, E_pi[min(Q1, Q2)] is replaced by min(E_pi[Q1], E_pi[Q2]),
    which is never smaller.
    A padded slot has log-probability -1e8, so it drops out.
    """
    if q1.dim() == 2:
        log_probs = joint_sums(log_probs)  # (B,K^N)
        return (log_probs.exp() * (torch.min(q1, q2) - alpha * log_probs)).sum(1)
    probs = log_probs.exp()  # (B,N,K)
    value1 = (probs * q1).sum((1, 2))  # (B,)
    value2 = (probs * q2).sum((1, 2))  # (B,)
    negative_entropy = (probs * log_probs).sum((1, 2))  # (B,)
    return torch.min(value1, value2) - alpha * negative_entropy  # eq. 1 of arac.md


def actor_loss(
    log_probs: Tensor,
    q1: Tensor,
    q2: Tensor,
    alpha: Tensor | float,
    beta: Tensor | float,
    reference: Tensor | None,
) -> Tensor:
    """-E_pi[min(Q1, Q2) - alpha log pi] + beta KL(reference | pi), mean over the batch -> scalar

    log_probs (B,N,K), critics as in soft_value, reference actions (B,N) or None. EPG's loss, which
    is also eq. 8 of R2PS, arXiv 2511.17367, by the same group.
    """
    loss = -soft_value(log_probs, q1, q2, alpha).mean()
    if reference is not None:
        loss = loss + beta * forward_kl(log_probs, reference).mean()  # eq. 2 of arac.md
    return loss


def critic_targets(
    rewards: Tensor,
    dones: Tensor,
    log_probs: Tensor,
    q1: Tensor,
    q2: Tensor,
    alpha: Tensor | float,
    gamma: float,
) -> Tensor:
    """r + gamma (1 - d) E_pi[min(Q1', Q2') - alpha log pi] with pi, Q' of the next state -> (B,)

    The divergence is not in it: the critics judge the task alone.
    """
    running = 1 - dones.to(rewards.dtype)  # (B,)
    return rewards + gamma * running * soft_value(log_probs, q1, q2, alpha)


def temperature_loss(log_alpha: Tensor, entropy: Tensor, target: Tensor | float) -> Tensor:
    """Its gradient is entropy - target: alpha rises while the entropy (B,) is below. -> scalar"""
    return (log_alpha * (entropy.detach() - target)).mean()  # eq. 3 of arac.md


def coefficient_loss(log_beta: Tensor, kl: Tensor, target: Tensor | float) -> Tensor:
    """Its gradient is target - kl: beta rises while the divergence (B,) is above. -> scalar"""
    return -(log_beta * (kl.detach() - target)).mean()  # eq. 3 of arac.md


# --- Training -----------------------------------------------------------------------------------


def train(args: Args) -> dict:
    """Train as the flags say. Returns the scores of the last evaluation."""
    lowest = {"num_agents": 1, "num_envs": 1, "horizon": 1, "batch_size": 1, "total_timesteps": 0}
    lowest |= {"target_network_frequency": 1, "embed_dim": 1, "learning_rate": 0}
    if not args.graph:
        sys.exit("--graph: expected at least one name")
    # every graph has a buffer, which must hold a step of all games
    device = setup(args, buffer_size=len(args.graph) * args.num_envs, **lowest)
    if args.embed_dim % NUM_HEADS:
        sys.exit(f"--embed-dim {args.embed_dim}: must be a multiple of {NUM_HEADS}")
    if args.beta <= 0:
        sys.exit(f"--beta {args.beta:g}: must be above 0; use --beta-mode none instead")
    if args.alpha is not None and args.alpha <= 0:
        sys.exit(f"--alpha {args.alpha:g}: must be above 0")
    if not 0 <= args.gamma <= 1:
        sys.exit(f"--gamma {args.gamma:g}: must be from 0 to 1")
    if args.gamma == 1 and args.alpha is None:
        sys.exit("--gamma 1: any entropy bonus makes endless play better than a win; set --alpha")
    if args.evaluate:
        return score_run(args, device)
    games = make_games(args, args.graph, device)
    unseen = make_games(args, args.eval_graphs, device)
    torch.manual_seed(args.seed)
    learners = [Learner(games, 0, args)]
    if args.env_id == "graph_pursuit" and args.evader == "learned":
        learners.append(Learner(games, 1, args))
    movers = learners  # who moves; a scripted team moves by itself
    if args.env_id == "graph_confrontation" and args.opponent == "self":
        movers = [learners[0], learners[0]]  # one learner plays both teams

    run_dir = open_run(args, games[0].graph.name)
    progress = {"step": 0, "updates": 0}
    state = load_checkpoint(run_dir, device) if args.resume else None
    if state is not None:
        progress = state["progress"]
        for number, learner in enumerate(learners):
            learner.load_state_dict(state["learners"][number])
            learner.optimizer.load_state_dict(state["optimizers"][number])
            for replay, content in zip(learner.replays, state["replays"][number]):
                vars(replay).update(content)
    step = progress["step"]
    logged = step
    board = SummaryWriter(run_dir, purge_step=step + 1)
    board.add_text("hyperparameters", f"```\n{json.dumps(asdict(args), indent=1)}\n```")
    print(f"{run_dir}: {args.env_id} on {' '.join(args.graph)}, {args.num_envs} games, {device}")
    if args.total_timesteps <= args.learning_starts:
        print(f"--learning-starts {args.learning_starts}: the run ends before it learns anything")
    if args.resume and step >= args.total_timesteps:
        print(f"{run_dir}: has {step} steps already; a larger --total-timesteps goes on")

    scores = {}
    tally = Tally(args.total_timesteps // args.num_envs + 2, args.horizon, len(games), device)
    began = time.perf_counter()
    starting = True
    while True:
        if starting:  # at first, and after each checkpoint
            torch.manual_seed(random_seed(args.seed, step))
            for game in games:
                game.reset(args.num_envs, random_seed(args.seed, step, game.graph.name))
            tally.counted = step // args.num_envs  # games of earlier rounds are logged or lost
            starting = False
        last = step >= args.total_timesteps
        if last or is_due(args.eval_steps, step, args.num_envs):
            paused = time.perf_counter()
            scores = evaluate(learners[0].policy, games, args)
            if unseen:
                scores |= evaluate(learners[0].policy, unseen, args, "eval/unseen_")
            log(run_dir, board, step, scores)
            shown = [f"{tag} {scores[tag]:.2f}" for tag in scores if "success" in tag]
            print("  ".join(shown), flush=True)
            began += time.perf_counter() - paused
        if last:
            break

        # 1. act: graphs take turns; every side keeps a step of all games as it saw it
        turn = step // args.num_envs % len(games)
        game = games[turn]
        before = game.positions  # (E,P)
        lengths = game.steps + 1  # (E,)
        actions = [act(learner.policy, game, side) for side, learner in enumerate(movers)]  # (E,N)
        rewards, terminated, truncated, after = game.step(*actions)
        for side, learner in enumerate(movers):
            rows = {
                "positions": game.view(before, side),
                "actions": actions[side],
                "rewards": -rewards if side else rewards,
                "dones": terminated,
                "next_positions": game.view(after, side),
            }
            if learner.has_reference:
                rows["reference"] = game.scripted(args.reference, before, side)
            learner.replays[turn].add(**rows)
        tally.add(step // args.num_envs, rewards > 0, terminated | truncated, lengths)

        # 2. learn from the same graph
        metrics = {}
        if step >= args.learning_starts:
            for _ in range(args.updates_per_step):
                for learner in learners:
                    batch = learner.replays[turn].sample(args.batch_size)
                    beta = current_beta(learner, progress["updates"], args)
                    found = update(learner, batch, game.graph, beta, args)
                    metrics |= {learner.prefix + tag: value for tag, value in found.items()}
                progress["updates"] += 1
                if progress["updates"] % args.target_network_frequency == 0:
                    for learner in learners:
                        update_target(learner.targets, learner.critics, tau=1.0)

        # 3. log and save
        step += args.num_envs
        progress["step"] = step
        saving = is_due(args.save_steps, step, args.num_envs) or step >= args.total_timesteps
        if saving or is_due(args.total_timesteps // LOGS, step, args.num_envs):
            if metrics:
                values = torch.stack([value.float() for value in metrics.values()]).tolist()
                metrics = dict(zip(metrics, values))
            if not all(map(math.isfinite, metrics.values())):
                sys.exit("a loss is not finite: try a lower --learning-rate; checkpoints are kept")
            won, num_games, num_steps = tally.take(step // args.num_envs)
            if num_games:
                metrics["charts/success"] = won / num_games
                metrics["charts/episodic_length"] = num_steps / num_games
            metrics["charts/SPS"] = (step - logged) / (time.perf_counter() - began)
            log(run_dir, board, step, metrics)
            report(step, metrics, args)
            logged = step
            began = time.perf_counter()
        if saving and args.save_steps:
            state = {
                "progress": progress,
                "policy": learners[0].policy.state_dict(),  # all that --evaluate needs
                "learners": [learner.state_dict() for learner in learners],
                "optimizers": [learner.optimizer.state_dict() for learner in learners],
                "replays": [[vars(x) for x in learner.replays] for learner in learners],
            }
            save_checkpoint(run_dir, step, state)
            starting = True
    board.close()
    return scores


def update(
    learner: Learner, batch: dict[str, Tensor], graph, beta: Tensor | float, args: Args
) -> dict[str, Tensor]:
    """One Adam step on everything; policy, critics, alpha and beta share no parameters.

    Columns of the batch are (B,...). Returns metrics.
    """
    positions = batch["positions"]  # (B,P)
    next_positions = batch["next_positions"]  # (B,P)
    chosen = batch["actions"][..., None]  # (B,N,1)
    reference = batch.get("reference")  # (B,N), or None without a reference
    alpha = learner.log_alpha.detach().exp()
    expand = joint_sums if args.joint_table else nn.Identity()  # critics as soft_value takes them

    q1, q2 = (critic(positions, graph) for critic in learner.critics)  # (B,N,K) each
    with torch.no_grad():
        next_log_probs = learner.policy(next_positions, graph)  # (B,N,K)
        next_q1, next_q2 = (expand(critic(next_positions, graph)) for critic in learner.targets)
        targets = critic_targets(
            batch["rewards"], batch["dones"], next_log_probs, next_q1, next_q2, alpha, args.gamma
        )  # (B,)
    value1 = q1.gather(2, chosen).sum((1, 2))  # (B,)
    value2 = q2.gather(2, chosen).sum((1, 2))  # (B,)
    critic_loss = F.mse_loss(value1, targets) + F.mse_loss(value2, targets)

    log_probs = learner.policy(positions, graph)  # (B,N,K)
    policy_loss = actor_loss(
        log_probs, expand(q1.detach()), expand(q2.detach()), alpha, beta, reference
    )

    # A policy that is uniform over the open slots has this entropy, and this divergence from any
    # reference; the targets are given as shares of it.
    places = positions[:, -learner.policy.num_agents :]  # (B,N)
    uniform = graph.log_slots[places].sum(1)  # (B,)
    entropy = -(log_probs.exp() * log_probs).sum((1, 2))  # (B,)
    alpha_loss = temperature_loss(learner.log_alpha, entropy, args.target_entropy * uniform)
    loss = critic_loss + policy_loss + alpha_loss
    metrics = {
        "losses/actor_loss": policy_loss,
        "losses/qf_loss": critic_loss,
        "losses/qf_values": value1.mean(),
        "losses/entropy": entropy.mean(),
        "train/arac/alpha": alpha,
    }
    if reference is not None:
        divergence = forward_kl(log_probs, reference)  # (B,)
        if args.beta_mode == "dual":
            target = args.beta_target * uniform
            loss = loss + coefficient_loss(learner.log_beta, divergence, target)
        metrics["train/arac/divergence"] = divergence.mean()
        metrics["train/arac/beta"] = beta + torch.zeros_like(alpha)  # always a tensor

    learner.optimizer.zero_grad()
    loss.backward()
    for name, network in (("actor", learner.policy), ("qf", learner.critics)):
        norm = nn.utils.clip_grad_norm_(network.parameters(), MAX_GRAD_NORM, foreach=True)
        metrics[f"losses/{name}_grad_norm"] = norm
    learner.optimizer.step()
    learner.log_beta.data.clamp_(max=math.log(args.beta))  # never above --beta
    return {tag: value.detach() for tag, value in metrics.items()}


class Tally:
    """Games won, games ended and their steps, by the round in which they began.

    A round is a step of E games; graphs take turns. Games that are won end early, so those that
    ended lately are a biased choice: a round counts when all of its games must be over. With one
    graph and a horizon of 6, games that began in round 10 end in round 15 at the latest, so after
    16 rounds (0 to 15) those up to round 10 are known; with two graphs those up to round 5.
    """

    def __init__(self, num_rounds: int, horizon: int, num_graphs: int, device):
        self.rows = torch.zeros(num_rounds, 3, device=device)
        self.num_graphs = num_graphs
        self.longest = (horizon - 1) * num_graphs  # rounds from the first to the last of a game
        self.counted = 0  # rounds that were taken

    def add(self, now: int, won: Tensor, ended: Tensor, lengths: Tensor) -> None:
        """What happened in round `now`, (E,) each."""
        began = now - (lengths - 1) * self.num_graphs
        self.rows.index_add_(0, began, torch.stack([won, ended, lengths * ended], 1).float())

    def take(self, num_rounds: int) -> list[float]:
        """Sums over the rounds that became known, when so many have been played."""
        known = max(self.counted, num_rounds - self.longest)
        sums = self.rows[self.counted : known].sum(0).tolist()
        self.counted = known
        return sums


class Learner(nn.Module):
    """What one team learns: policy, two critics with targets, log alpha, log beta."""

    def __init__(self, games: list, side: int, args: Args):
        super().__init__()
        sizes = network_sizes(games[0], side, args)
        num_slots = games[0].graph.num_slots
        self.policy = GraphPolicy(*sizes)
        self.critics = nn.ModuleList(GraphCritic(num_slots, *sizes) for _ in range(2))
        self.targets = copy.deepcopy(self.critics)
        alpha = first_alpha(games, side, args.gamma) if args.alpha is None else args.alpha
        self.log_alpha = nn.Parameter(torch.tensor(math.log(alpha)))
        self.log_beta = nn.Parameter(torch.tensor(math.log(args.beta)))
        self.to(games[0].device)
        groups = [
            {"params": [*self.policy.parameters(), *self.critics.parameters()]},
            {"params": [self.log_alpha], "lr": ALPHA_LR},
            {"params": [self.log_beta], "lr": args.beta_lr},
        ]
        self.optimizer = torch.optim.Adam(groups, args.learning_rate, fused=True)
        self.replays = [ReplayBuffer(args.buffer_size // len(games)) for _ in games]
        evader = side == 1 and args.env_id == "graph_pursuit"
        self.has_reference = not evader and args.beta_mode != "none"
        self.prefix = "evader/" if evader else ""  # of its metrics


def first_alpha(games: list, side: int, gamma: float) -> float:
    """Half the alpha at which endless uniform play, worth alpha H / (1 - gamma), equals a win,
    worth 1; H is the entropy of uniform play."""
    log_slots = torch.cat([game.graph.log_slots[:-1] for game in games])  # of all nodes
    uniform = games[0].teams[side] * log_slots.mean().item()
    return (1 - gamma) / uniform / 2


def current_beta(learner: Learner, num_updates: int, args: Args) -> Tensor | float:
    """The weight of the divergence now."""
    if args.beta_mode == "dual":
        return learner.log_beta.detach().exp()
    if args.beta_mode == "exp":
        return args.beta * math.exp(-args.beta_lr * num_updates)
    return args.beta


@torch.no_grad()
def update_target(target: nn.Module, online: nn.Module, tau: float) -> None:
    """target <- (1 - tau) target + tau online, in place."""
    torch._foreach_lerp_([*target.parameters()], [*online.parameters()], tau)


def evaluate(
    policy: GraphPolicy, games: list, args: Args, prefix: str = "eval/"
) -> dict[str, float]:
    """Shares of games won and lost with the likeliest actions, sampled ones and the reference's."""
    players = {
        "greedy": lambda game: act(policy, game, 0, greedy=True),
        "sampled": lambda game: act(policy, game, 0),
        "reference": lambda game: game.scripted(args.reference, game.positions),
    }
    scores = {}
    device = games[0].device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):  # leaves the training's random state as it is
        torch.manual_seed(args.seed)
        for name, choose in players.items():
            played = [play(game, choose, args.seed) for game in games]
            results = torch.cat([results for results, _, _ in played])
            steps = torch.cat([steps for _, steps, _ in played])
            scores[f"{prefix}{name}/success"] = (results > 0).float().mean().item()
            scores[f"{prefix}{name}/steps"] = steps.mean().item()
            if args.env_id == "graph_confrontation":
                scores[f"{prefix}{name}/loss"] = (results < 0).float().mean().item()
    return scores


def play(game, choose, seed: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A game from each start with choose(game) -> slots.

    Results of team 0 (G,), steps (G,), and the positions of the first game, (P,) each.
    """
    game = copy.copy(game)  # games of the training go on where they were
    starts = game.starts[:EVAL_EPISODES]  # (G,P)
    game.reset(len(starts), seed)
    game.positions = starts
    running = torch.ones(len(starts), dtype=torch.bool, device=game.device)
    results = torch.zeros(len(starts), device=game.device)
    steps = torch.zeros(len(starts), device=game.device)
    path = [starts[0]]
    while running.any() and len(path) <= game.horizon:
        rewards, terminated, _, last = game.step(choose(game))
        results += rewards * running
        steps += running
        running &= ~terminated
        path.append(last[0])
    return results, steps, path[: int(steps[0]) + 1]


def score_run(args: Args, device: torch.device) -> dict[str, dict[str, float]]:
    """--evaluate: scores of a run's policy on each graph."""
    state = load_checkpoint(args.evaluate, device)
    if state is None:
        sys.exit(f"{args.evaluate}: no checkpoint; --save-steps 0 keeps none, or it is too early")
    games = make_games(args, args.graph + args.eval_graphs, device)
    policy = GraphPolicy(*network_sizes(games[0], 0, args)).to(device)
    try:
        policy.load_state_dict(state["policy"])
    except RuntimeError:
        sys.exit(f"{args.evaluate}: its policy is for other teams or of another size")
    scores = {}
    for name, game in zip(args.graph + args.eval_graphs, games):  # two files may have one stem
        scores[name] = evaluate(policy, [game], args)
        print(name, *(f"{tag} {value:.3f}" for tag, value in scores[name].items()), sep="  ")
    return scores


# ================================================================================================
# Below: what the method stands on, networks, environments, checkpoints and logs.
# ================================================================================================


# --- Networks -----------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention with several heads and no biases.

    (B,Q,d), (B,M,d) -> (B,Q,d) for Q queries: each sees all M rows of the memory, or those K that
    its row of `slots` (Q,K) names. `mask` (Q,M) or (Q,K) is added to the scores: -1e8 where
    forbidden.
    """

    def __init__(self, embed_dim: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(embed_dim, embed_dim, bias=False)
        self.key = nn.Linear(embed_dim, embed_dim, bias=False)
        self.value = nn.Linear(embed_dim, embed_dim, bias=False)
        self.out = nn.Linear(embed_dim, embed_dim, bias=False)

    def forward(self, query: Tensor, memory: Tensor, mask=None, slots=None) -> Tensor:
        """-> (B,Q,d)"""
        heads = (self.num_heads, -1)
        queries = self.query(query).unflatten(-1, heads)[:, :, None]  # (B,Q,1,h,d/h)
        pairs = torch.stack([self.key(memory), self.value(memory)])  # (2,B,M,d)
        if slots is None:
            pairs = pairs[:, :, None]  # (2,B,1,M,d)
        else:
            pairs = pairs.index_select(2, slots.flatten()).unflatten(2, slots.shape)  # (2,B,Q,K,d)
        keys, values = pairs.unflatten(-1, heads)  # (B,Q,K,h,d/h) each, or (B,1,M,h,d/h)
        scores = (queries * keys).sum(-1) / math.sqrt(keys.size(-1))  # (B,Q,K,h)
        if mask is not None:
            scores = scores + mask[..., None]
        weights = scores.softmax(2)[..., None]  # (B,Q,K,h,1)
        return self.out((weights * values).sum(2).flatten(2))


class Layer(nn.Module):
    """Attention, then a feed-forward network, each after a layer norm and with a residual."""

    def __init__(self, embed_dim: int, num_heads: int, ff_dim: int):
        super().__init__()
        self.attention = Attention(embed_dim, num_heads)
        self.norm1 = nn.LayerNorm(embed_dim)
        self.norm2 = nn.LayerNorm(embed_dim)
        self.ff = nn.Sequential(
            nn.Linear(embed_dim, ff_dim), nn.ReLU(), nn.Linear(ff_dim, embed_dim)
        )

    def forward(self, query: Tensor, memory: Tensor, mask=None, slots=None) -> Tensor:
        """(B,Q,d), (B,M,d) -> (B,Q,d), as in Attention"""
        seen = self.attention(self.norm1(query), self.norm1(memory), mask, slots)
        hidden = query + seen  # (B,Q,d)
        return hidden + self.ff(self.norm2(hidden))


class GraphEncoder(nn.Module):
    """Features of nodes and agents: every node attends to its neighbours, then every agent to all
    nodes."""

    def __init__(self, num_players, num_agents, embed_dim, num_heads, num_layers, ff_dim):
        super().__init__()
        self.num_agents = num_agents
        self.embed = nn.Linear(num_players, embed_dim)
        layers = [Layer(embed_dim, num_heads, ff_dim) for _ in range(num_layers)]
        self.encoder = nn.ModuleList(layers)
        self.decoder = Layer(embed_dim, num_heads, ff_dim)
        # Agents on one node see the same; by their numbers they can part.
        self.number = nn.Parameter(torch.zeros(num_agents, embed_dim))

    def encode(self, positions: Tensor, graph) -> tuple[Tensor, Tensor, Tensor]:
        """(B,P), own team last -> features of all nodes (B,n,d), of the agents' own nodes (B,N,d),
        and of what the agents see (B,N,d)"""
        nodes = self.embed(graph.features(positions))  # (B,n,d)
        # The last row of a graph's tables is for removed players, whose position is -1.
        mask = graph.slot_mask[:-1] * -1e8  # (n,K), where padded
        for layer in self.encoder:
            nodes = layer(nodes, nodes, mask, graph.slots[:-1])
        places = positions[:, -self.num_agents :].clamp(min=0)  # (B,N), any node for the removed
        own = take(nodes, places)  # (B,N,d)
        seen = self.decoder(own + self.number, nodes)  # (B,N,d)
        return nodes, own, seen

    def neighbours(self, nodes: Tensor, positions: Tensor, graph) -> Tensor:
        """Features of the nodes that agents can go to. (B,n,d) -> (B,N,K,d)"""
        slots = graph.slots[positions[:, -self.num_agents :]].clamp(min=0)  # (B,N,K)
        return take(nodes, slots.flatten(1)).unflatten(1, slots.shape[1:])


def take(nodes: Tensor, places: Tensor) -> Tensor:
    """Features of some nodes. (B,n,d), (B,M) -> (B,M,d)"""
    return nodes.gather(1, places[..., None].expand(-1, -1, nodes.size(2)))


class GraphPolicy(GraphEncoder):
    """Each agent points at a neighbour: log-probabilities of its slots, -1e8 where padded."""

    def __init__(self, *sizes: int):
        super().__init__(*sizes)
        d = self.embed.out_features
        self.current = nn.Linear(2 * d, d)
        self.query = nn.Linear(d, d, bias=False)
        self.key = nn.Linear(d, d, bias=False)

    def forward(self, positions: Tensor, graph) -> Tensor:
        """(B,P), own team last -> (B,N,K)"""
        nodes, own, seen = self.encode(positions, graph)
        query = self.query(self.current(torch.cat([seen, own], -1)))  # (B,N,d)
        keys = self.key(self.neighbours(nodes, positions, graph))  # (B,N,K,d)
        scores = (keys @ query[..., None])[..., 0] / math.sqrt(query.size(-1))  # (B,N,K)
        closed = graph.slot_mask[positions[:, -self.num_agents :]]  # (B,N,K)
        # The scores lie between -10 and 10.
        return (10 * scores.tanh()).masked_fill(closed, -1e8).log_softmax(-1)


class GraphCritic(GraphEncoder):
    """Values of every agent's slots, summed for a joint action. The size depends on N and K."""

    def __init__(self, num_slots: int, *sizes: int):
        super().__init__(*sizes)
        width = self.num_agents * num_slots
        self.action = nn.Linear(3 * self.embed.out_features, width)
        self.out = nn.Linear(width * width, width)  # each value sees the slots of all agents

    def forward(self, positions: Tensor, graph) -> Tensor:
        """(B,P), own team last -> (B,N,K)"""
        nodes, own, seen = self.encode(positions, graph)
        neighbours = self.neighbours(nodes, positions, graph)  # (B,N,K,d)
        agents = torch.cat([seen, own], -1)[:, :, None]  # (B,N,1,2d)
        agents = agents.expand(-1, -1, neighbours.size(2), -1)  # (B,N,K,2d)
        rows = self.action(torch.cat([agents, neighbours], -1))  # (B,N,K,NK)
        return self.out(rows.flatten(1)).unflatten(1, neighbours.shape[1:3])


def network_sizes(game, side: int, args: Args) -> tuple[int, ...]:
    """Arguments of GraphEncoder."""
    d = args.embed_dim
    return (game.num_players, game.teams[side], d, NUM_HEADS, args.num_layers, 4 * d)


# --- Graphs and games ---------------------------------------------------------------------------


class Graph:
    """A connected graph as tables: slot k of node i leads to node slots[i, k].

    slots (n+1,K) are a node and its neighbours in increasing order; slot_mask (n+1,K) is True where
    padded; log_slots (n+1,) is the entropy of a uniform choice among the open slots; distances
    (n+1,n+1) are hops, 2 * diameter to a removed player. The last row, -1, is for removed players:
    one open slot, which leads to -1 again.
    """

    def __init__(self, name: str, edges: Tensor, coordinates: Tensor | None):
        """edges (M,2). coordinates (n,2), for pictures."""
        n = int(edges.max()) + 1
        near = [{node} for node in range(n)]  # a node is next to itself: players may stay
        for a, b in edges.tolist():
            near[a].add(b)
            near[b].add(a)
        sizes = torch.tensor([len(nodes) for nodes in near] + [1])  # (n+1,)
        K = int(sizes.max())
        rows = [sorted(nodes) + [node] * (K - len(nodes)) for node, nodes in enumerate(near)]
        self.name = name
        self.num_nodes = n
        self.num_slots = K
        self.edges = edges
        self.coordinates = coordinates
        self.slots = torch.tensor(rows + [[-1] * K])  # (n+1,K)
        self.slot_mask = torch.arange(K) >= sizes[:, None]  # (n+1,K)
        self.log_slots = sizes.log()  # (n+1,)
        hops = count_hops(self.slots[:n], name)  # (n,n)
        self.diameter = int(hops.max())
        self.distances = hops.new_full((n + 1, n + 1), 2 * self.diameter)  # (n+1,n+1)
        self.distances[:n, :n] = hops

    def to(self, device) -> Graph:
        """This graph, or a copy with its tables on another device."""
        if self.slots.device == torch.device(device):
            return self
        moved = copy.copy(self)
        for name in ("distances", "slots", "slot_mask", "log_slots"):
            setattr(moved, name, getattr(self, name).to(device))
        return moved

    def padded(self, num_slots: int) -> Graph:
        """A copy with K = num_slots, not below its own."""
        wider = copy.copy(self)
        extra = num_slots - self.num_slots
        own = torch.arange(self.num_nodes + 1)  # (n+1,)
        own[-1] = -1
        wider.num_slots = num_slots
        wider.slots = torch.cat([self.slots, own[:, None].expand(-1, extra)], 1)  # (n+1,K)
        wider.slot_mask = F.pad(self.slot_mask, (0, extra), value=True)  # (n+1,K)
        return wider

    def features(self, positions: Tensor) -> Tensor:
        """Hops from every node to every player over the diameter, 2 for removed players.

        (B,P) -> (B,n,P) float32
        """
        return self.distances[positions][..., :-1].transpose(1, 2) / self.diameter


def count_hops(slots: Tensor, name: str) -> Tensor:
    """Hops between all nodes, by a breadth-first search from all at once. (n,K) -> (n,n) int16"""
    reached = torch.eye(len(slots), dtype=torch.bool)  # (n,n)
    hops = torch.zeros(reached.shape, dtype=torch.int16)
    while not reached.all():
        hops += ~reached
        before = reached.clone()
        for column in slots.T:
            reached |= before[column]
        if torch.equal(before, reached):
            raise ValueError(f"{name} is not connected.")
    return hops


def read_graphml(path: str) -> tuple[Tensor, Tensor | None]:
    """Edges (M,2) of a GraphML file's largest connected component; directions and weights are
    ignored, nodes keep the order of the file.

    Also coordinates (n,2), if nodes have attributes x and y, as OSMnx writes them.
    """
    try:
        import networkx
    except ImportError:
        raise ValueError(f"{path}: GraphML needs networkx: pip install networkx") from None
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file")
    try:
        graph = networkx.Graph(networkx.read_graphml(path))
    except Exception as error:  # of the XML parser or of networkx
        raise ValueError(f"{path}: not a GraphML file ({error})") from None
    component = max(networkx.connected_components(graph), key=len, default=())
    nodes = [node for node in graph if node in component]
    if not 2 <= len(nodes) <= MOST_NODES:
        raise ValueError(f"{path}: {len(nodes)} connected nodes; 2 to {MOST_NODES} are possible")
    number = {node: i for i, node in enumerate(nodes)}
    edges = torch.tensor([[number[a], number[b]] for a, b in graph.edges(nodes)])  # (M,2)
    if not all("x" in graph.nodes[node] and "y" in graph.nodes[node] for node in nodes):
        return edges, None
    try:
        spots = [[float(graph.nodes[node][axis]) for axis in "xy"] for node in nodes]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: x and y of a node are no numbers ({error})") from None
    return edges, torch.tensor(spots, dtype=torch.float64) * torch.tensor([1.0, -1.0])


@functools.cache  # read or made once, with its tables of perfect play
def make_graph(name: str, num_slots: int = 0) -> Graph:
    """The graph of FILE.graphml, or the one that envs/graphs.py makes from a name.

    `num_slots`: K, to which slots are padded; 0 for as many as the graph needs.
    """
    if num_slots:
        return make_graph(name).padded(num_slots)
    if name.endswith(".graphml"):
        return Graph(Path(name).stem, *read_graphml(name))
    from envs.graphs import named_graph

    return Graph(name, *named_graph(name))


def least(hops: Tensor, axis: int) -> Tensor:
    """hops.amin(axis) for an axis of a few players, where torch's own is ten times slower."""
    return functools.reduce(torch.minimum, hops.unbind(axis))


class GraphGame:
    """What both games share: E games of two teams; a game that ends begins anew in the same step.

    A game adds find_starts, outcome, answer (of the scripted team 1) and scripted. `starts` (S,P)
    are all starts, or many random ones, in a random order that is always the same.
    """

    def __init__(self, graph: Graph, device, teams: tuple[int, int], horizon: int):
        """`horizon`: steps after which a game is cut off (truncated, not terminated)."""
        self.graph = graph  # on the CPU, where find_starts works
        self.teams = teams
        self.num_players = sum(teams)
        self.horizon = horizon
        generator = torch.Generator().manual_seed(0)
        starts = self.find_starts(generator)  # (S,P)
        order = torch.randperm(len(starts), generator=generator)  # (S,)
        self.starts = starts[order].to(device)
        self.device = self.starts.device
        self.graph = graph.to(self.device)

    def reset(self, num_envs: int, seed: int) -> None:
        """Begin E games anew."""
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.positions = self.draw_starts(num_envs)  # (E,P)
        self.steps = torch.zeros(num_envs, dtype=torch.long, device=self.device)  # (E,)

    def draw_starts(self, count: int) -> Tensor:
        """Random starts, all equally likely. -> (count,P)"""
        options = {"generator": self.generator, "device": self.device}
        return self.starts[torch.randint(len(self.starts), (count,), **options)]

    def view(self, positions: Tensor, side: int) -> Tensor:
        """Opponents of `side` first, then its own players, in their order. (B,P) -> (B,P)"""
        first, second = positions.split(self.teams, 1)
        return torch.cat([first, second] if side else [second, first], 1)

    def step(
        self, actions: Tensor, opponent_actions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Slots (E,size of team 0), (E,size of team 1)
        -> rewards (E,), terminated (E,), truncated (E,), last (E,P).

        Without `opponent_actions` team 1 follows its script. Rewards are those of team 0; `last`
        are the positions before new games began.
        """
        mine, theirs = self.positions.split(self.teams, 1)  # (E,size) each
        moved = self.graph.slots[mine, actions]  # (E,size of team 0)
        if opponent_actions is None:
            opponent_actions = self.answer(moved)
        last = self.settle(torch.cat([moved, self.graph.slots[theirs, opponent_actions]], 1))
        rewards, terminated = self.outcome(last)  # (E,) each
        self.steps = self.steps + 1
        truncated = (self.steps >= self.horizon) & ~terminated  # (E,)
        ended = terminated | truncated  # (E,)
        fresh = self.draw_starts(len(last))  # (E,P), for all games: choosing would wait for the GPU
        self.positions = torch.where(ended[:, None], fresh, last)
        self.steps = self.steps.masked_fill(ended, 0)
        return rewards, terminated, truncated, last

    def settle(self, positions: Tensor) -> Tensor:
        """What is left of the players after a move. (B,P) -> (B,P)"""
        return positions

    def random_slots(self, positions: Tensor) -> Tensor:
        """Uniform among the open slots, by the game's generator. (B,p) -> (B,p)"""
        uniform = torch.rand(positions.shape, generator=self.generator, device=self.device)
        num_open = (~self.graph.slot_mask[positions]).sum(-1)  # (B,p)
        return (uniform * num_open).long()

    def nearest_slots(self, positions: Tensor, targets: Tensor) -> Tensor:
        """One step on a shortest path to the nearest target that is not removed.

        (B,p), (B,q) -> (B,p)
        """
        nodes = self.graph.slots[positions]  # (B,p,K)
        hops = least(self.graph.distances[nodes[..., None], targets[:, None, None]], -1)  # (B,p,K)
        closed = self.graph.slot_mask[positions]  # (B,p,K)
        return hops.masked_fill(closed, 3 * self.graph.diameter).argmin(-1)

    def noisy(self, positions: Tensor, slots: Tensor) -> Tensor:
        """Every player takes a random slot with chance 1/2. (B,p), (B,p) -> (B,p)"""
        uniform = torch.rand(slots.shape, generator=self.generator, device=self.device)
        return torch.where(uniform < 0.5, slots, self.random_slots(positions))


class GraphPursuit(GraphGame):
    """Pursuers, team 0, win 1 when `num_captors` of them are on or next to the evader's node after
    a step. Rules of EPG and R2PS (github.com/Cahemgco/EPG_code; arXiv 2511.17367).

    evader: `dp` (most steps to capture against the pursuers' best reply), `maxdist` (most hops to
    the nearest pursuer), `random`, `stay`, or `learned` (actions come with step; without them it is
    `dp`). All move at once; `asynchronous` lets the scripted evader see the pursuers' new nodes.
    start: `same` node for all pursuers, `far` (the same, more than 5 hops from the evader or else
    the diameter), `independent` nodes. Nobody is captured at the start.
    """

    EVADERS = ("dp", "maxdist", "random", "stay")
    PURSUERS = ("shortest", "dp", "noisy", "random")

    def __init__(
        self,
        graph: Graph,
        device,
        *,
        num_pursuers: int = 2,
        num_captors: int = 1,
        evader: str = "maxdist",
        asynchronous: bool = False,
        start: str = "same",
        horizon: int = 128,
    ):
        if not 1 <= num_captors <= num_pursuers:
            raise ValueError(f"num_captors={num_captors}: from 1 to the {num_pursuers} pursuers")
        if evader == "learned" and asynchronous:
            raise ValueError("A learned evader moves at the same time as the pursuers.")
        self.num_captors = num_captors
        self.evader = evader
        self.asynchronous = asynchronous
        self.start = start
        super().__init__(graph, device, (num_pursuers, 1), horizon)

    def outcome(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rewards of the pursuers (B,), terminated (B,) of positions (B,P)."""
        near = self.graph.distances[positions[:, :-1], positions[:, -1:]] <= 1  # (B,m)
        captured = near.sum(1) >= self.num_captors  # (B,)
        return captured.float(), captured

    def find_starts(self, generator: torch.Generator) -> Tensor:
        """Placements that the rule allows: all, or random ones if all are too many. -> (S,P)"""
        n = self.graph.num_nodes
        m = self.teams[0]
        together = self.start != "independent"
        places = 2 if together else m + 1  # nodes to choose, that of the evader last
        if n**places <= MOST_LISTED:
            states = torch.cartesian_prod(*[torch.arange(n)] * places)  # (M,places)
        else:
            states = torch.randint(n, (DRAWN_STARTS, places), generator=generator)
        if together:
            states = states[:, [0] * m + [1]]  # (M,P)
        allowed = ~self.outcome(states)[1]  # (M,)
        if self.start == "far":
            hops = self.graph.distances[states[:, 0], states[:, -1]]  # (M,)
            allowed &= hops >= min(6, self.graph.diameter)
        if not allowed.any():
            wanted = f"no start at which the evader is not captured fits --start {self.start}"
            raise ValueError(f"{self.graph.name}: {wanted}")
        return states[allowed]

    def answer(self, moved: Tensor) -> Tensor:
        """Slots (E,1) of the scripted evader, when the pursuers move to `moved` (E,m)."""
        seen = moved if self.asynchronous else self.positions[:, :-1]  # (E,m)
        kind = "dp" if self.evader == "learned" else self.evader
        return self.scripted(kind, torch.cat([seen, self.positions[:, -1:]], 1), 1)

    def scripted(self, kind: str, positions: Tensor, side: int = 0) -> Tensor:
        """Slots of a script at positions (B,P) -> (B,m) or, for side 1, (B,1).

        side 0: `shortest` path to the evader, `dp` (joint argmin of the worst steps to capture),
        `noisy` (dp, random with chance 1/2), `random`. side 1: the evaders; in an asynchronous game
        pursuers stand on their new nodes.
        """
        if kind not in (self.EVADERS if side else self.PURSUERS):
            raise ValueError(f"Side {side} has no script {kind!r}.")
        own = positions.split(self.teams, 1)[side]  # (B,size)
        if kind == "random":
            return self.random_slots(own)
        if kind == "shortest":
            return self.nearest_slots(own, positions[:, -1:])
        if kind in ("dp", "noisy"):
            from envs.graph_games import perfect_slots

            captors = self.num_captors
            slots = perfect_slots(self.graph, positions, side, captors, self.asynchronous)
            return slots if kind == "dp" else self.noisy(own, slots)
        nodes = self.graph.slots[own[:, 0]]  # (B,K) that the evader can go to
        if kind == "stay":
            values = (nodes == own).float()  # (B,K)
        else:
            hops = self.graph.distances[nodes[:, None], positions[:, :-1, None]]  # (B,m,K)
            values = least(hops, 1)  # (B,K)
        closed = self.graph.slot_mask[own[:, 0]]  # (B,K)
        return values.masked_fill(closed, -1).argmax(1, keepdim=True)


def make_games(args: Args, names: tuple[str, ...], device) -> list:
    """The game of --env-id on each of the graphs, padded to the same number of slots."""
    games = []
    try:
        num_slots = max((make_graph(name).num_slots for name in names), default=0)
        for name in names:
            graph = make_graph(name, num_slots)
            if args.env_id == "graph_confrontation":
                from envs.graph_games import Confrontation

                class GraphConfrontation(Confrontation, GraphGame):
                    """The rules of the first on the graph of the second."""

                script = "shortest" if args.opponent == "self" else args.opponent
                game = GraphConfrontation(
                    graph, device, team_size=args.num_agents, opponent=script, horizon=args.horizon
                )
            else:
                game = GraphPursuit(
                    graph,
                    device,
                    num_pursuers=args.num_agents,
                    num_captors=args.num_captors,
                    evader=args.evader,
                    asynchronous=args.asynchronous,
                    start=args.start,
                    horizon=args.horizon,
                )
            game.reset(1, args.seed)
            # A trial step, so that what cannot work ends here.
            game.step(game.scripted(args.reference, game.positions))
            games.append(game)
    except ValueError as error:
        sys.exit(str(error))
    except ModuleNotFoundError:
        sys.exit(
            "arac.py: a graph by name, perfect play (dp, noisy) or confrontation needs the folder "
            "envs/ of the repository beside the script; a GraphML file alone does not"
        )
    return games


@torch.no_grad()
def act(policy: GraphPolicy, game, side: int, greedy: bool = False) -> Tensor:
    """Slots (E,N) of a side, sampled or the likeliest."""
    log_probs = policy(game.view(game.positions, side), game.graph)  # (E,N,K)
    if not greedy:  # the Gumbel trick, which does not wait for the device
        log_probs = log_probs - torch.empty_like(log_probs).exponential_().log()
    return log_probs.argmax(-1)


class ReplayBuffer:
    """The newest `size` transitions: tensors (size,...) on the device, made when the first come."""

    def __init__(self, size: int):
        self.size = size
        self.count = 0  # rows added so far
        self.columns: dict[str, Tensor] = {}

    def add(self, **rows: Tensor) -> None:
        """Add E rows, (E,...) each, over the oldest ones."""
        first = next(iter(rows.values()))
        places = torch.arange(self.count, self.count + len(first), device=first.device) % self.size
        for name, values in rows.items():
            if name not in self.columns:
                self.columns[name] = values.new_zeros(self.size, *values.shape[1:])
            self.columns[name][places] = values
        self.count += len(first)

    def sample(self, batch_size: int) -> dict[str, Tensor]:
        """B random rows, with replacement."""
        device = self.columns["rewards"].device
        rows = torch.randint(min(self.count, self.size), (batch_size,), device=device)
        return {name: column[rows] for name, column in self.columns.items()}


# --- Processes, checkpoints, logs ---------------------------------------------------------------


def setup(args: Args, **lowest: int) -> torch.device:
    """The device. Exit if a flag is below its lowest value.

    One thread: small networks are slower with more of them.
    """
    for name, least in lowest.items():
        value = getattr(args, name)
        if value is not None and not value >= least:  # also if it is NaN
            sys.exit(f"--{name.replace('_', '-')} {value}: must be at least {least}")
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: torch finds no CUDA device here; use --device auto or cpu")
    torch.set_num_threads(1)
    use_cuda = args.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if use_cuda else "cpu")


def random_seed(*names) -> int:
    """A seed made of names: the same in a run that was stopped and continued."""
    return random.Random(" ".join(map(str, names))).getrandbits(63)


def checkpoints(run_dir: str) -> list[Path]:
    """Checkpoint files, oldest first."""
    return sorted(Path(run_dir).glob("checkpoints/step_*.pt"))


def save_checkpoint(run_dir: str, step: int, state: dict) -> None:
    """Write a new file; the newest two are kept. A kill leaves no half file under a good name.

    Random states are not saved: after a checkpoint, games and random numbers start anew from a
    seed made of --seed and the step, in a run that goes on as in one that is resumed.
    """
    path = Path(run_dir, "checkpoints", f"step_{step:012d}.pt")
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    torch.save(state, unfinished)
    os.replace(unfinished, path)
    for old in checkpoints(run_dir)[:-2]:
        old.unlink()


def load_checkpoint(run_dir: str, device: torch.device) -> dict | None:
    """The newest checkpoint, or None if the run was stopped before its first."""
    found = checkpoints(run_dir)
    if not found:
        return None
    try:
        return torch.load(found[-1], map_location=device, weights_only=True)
    except Exception as error:  # of the disk, of zip files, of pickle
        rest = f"goes on from {found[-2].name}" if len(found) > 1 else "begins anew"
        sys.exit(f"{found[-1]}: damaged; delete it, and the run {rest} ({error!s:.200})")


def open_run(args: Args, game: str) -> str:
    """The run folder, made if it is new."""
    name = f"{Path(__file__).stem}__{game}__{args.seed}__{time.time():.0f}_{os.getpid()}"
    run_dir = args.resume or args.output_dir or f"runs/{name}"
    path = Path(run_dir, "args.json")
    if not args.resume and (path.exists() or checkpoints(run_dir)):
        sys.exit(f"--output-dir {run_dir}: holds a run; continue it with --resume {run_dir}")
    try:
        os.makedirs(run_dir, exist_ok=True)
    except OSError as error:
        sys.exit(f"--output-dir {run_dir}: cannot be made ({error.strerror})")
    if args.resume and not checkpoints(run_dir):
        print(f"--resume {run_dir}: has no checkpoint, so the run begins at step 0")
    metrics = Path(run_dir, "metrics.csv")
    if metrics.exists():  # its last row may be cut off
        os.truncate(metrics, metrics.read_bytes().rfind(b"\n") + 1)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(asdict(replace(args, resume=None)), indent=1))
    os.replace(unfinished, path)
    return run_dir


def log(run_dir: str, board: SummaryWriter, step: int, values: dict[str, float]) -> None:
    """Add to TensorBoard and metrics.csv. A resumed run may repeat steps: their last rows count."""
    with open(f"{run_dir}/metrics.csv", "a", encoding="utf-8") as file:
        if file.tell() == 0:
            file.write("step,tag,value\n")
        for tag, value in values.items():
            file.write(f"{step},{tag},{value}\n")
            board.add_scalar(tag, value, step)
    board.flush()


def is_due(every: int, step: int, size: int) -> bool:
    """Whether a multiple of `every`, also 0, lies in the last `size` steps; 0 is never."""
    return every > 0 and step // every > (step - size) // every


def report(step: int, metrics: dict[str, float], args: Args) -> None:
    """Print a summary of under 80 columns."""
    left = max(0, round((args.total_timesteps - step) / metrics["charts/SPS"]))
    line = f"step {step:>9,}/{args.total_timesteps:,}"
    if "charts/success" in metrics:
        line += f"  success {metrics['charts/success']:4.0%}"
    if "train/arac/beta" in metrics:
        line += f"  beta {metrics['train/arac/beta']:.4f}"
    line += f"  {metrics['charts/SPS']:,.0f} steps/s"
    print(f"{line}  {left // 60:.0f}:{left % 60:02.0f} left", flush=True)


# --- Command line -------------------------------------------------------------------------------


def parse_args() -> Args:
    """The command line; with --resume or --evaluate, the flags of that run are its defaults."""
    args = tyro.cli(Args)
    run_dir = args.resume or args.evaluate
    if not run_dir:
        return args
    if args.resume and args.evaluate:
        sys.exit("--resume and --evaluate: give one of them")
    try:
        saved = Args(**json.loads(Path(run_dir, "args.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        sys.exit(f"{run_dir}: no run folder, or of another version of this script ({error})")
    args = tyro.cli(Args, default=saved)
    for name, before in asdict(saved).items():
        now = getattr(args, name)
        flag = "--" + name.replace("_", "-")
        if now != before and args.resume and name in FIXED.split():
            sys.exit(f"{flag} {now}: cannot change on resume, the run began with {before}")
        if now != before and name not in SILENT.split():
            print(f"{flag} {now}: the run began with {before}", flush=True)
    return args


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a console may lack a letter
    try:
        train(parse_args())
    except Exception as error:  # checkpoints and logs can fail for lack of space
        reasons = ["No space left on device", "Disk quota exceeded", "File too large"]
        reasons += ["unexpected pos", "failed writing"]  # what torch.save says
        if any(reason in str(error) for reason in reasons):
            sys.exit(f"the disk is full ({error!s:.99}): make room, go on with --resume RUN_DIR")
        raise
