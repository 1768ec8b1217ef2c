# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "imageio>=2.37", "tyro>=1.0", "tensorboard>=2.18"]
# ///
"""FM3Q: minimax Q-learning for two teams, whose joint value rises in the protagonists' utilities and falls in the
antagonists', so that every agent's own greedy action belongs to the minimax joint action.

Hu et al., FM3Q: Factorized Multi-Agent MiniMax Q-Learning for Two-Team Zero-Sum Markov Game, arXiv 2402.00738.

Differs from the paper in:
1. the paper's text was not available: the mixing network is QMIX's (arXiv 1803.11485) fed with utilities that carry the
   sign of their team, which is our reading of its condition (IGMM); `--mixer twin` and `vdn` are two others
2. the released code has no mixing network at all: `--mixer pairwise`, one value for each pair of opponents
3. games: tables that can be solved exactly, and pong of two teams; the paper's are Wimblepong, MPE and RoboMaster
4. the target network is copied every `--target-network-frequency` updates; the released code copies it after every
   update of each fifth iteration

    python algorithms/fm3q.py                                              # a Markov game, solved exactly, CPU, 1 min
    python algorithms/fm3q.py --env-id pong --gamma 0.99 --num-envs 256 --updates-per-step 4 --total-timesteps 1000000
    python algorithms/fm3q.py --learner selfplay_qmix                      # control: two cooperative teams in self-play

E games, B transitions of a batch, n protagonists, m antagonists, N = n + m agents, A actions of an agent, O numbers of
an observation, S of a state or the number of states. Joint actions of a team are numbered: A^n and A^m of them."""

import contextlib
import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
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
from envs.pong import Pong, tracker, wanderer
from envs.two_team import (
    MATRIX_GAMES,
    TabularGame,
    arat_game,
    best_response,
    joint_actions,
    matrix_game,
    minimax_values,
)

# === 2 Args ===========================================================================================================


@dataclass
class Args:
    env_id: Literal[
        "arat", "arat_large", "pong", "additive", "product", "climbing", "pennies", "rock_paper_scissors", "saddle"
    ] = "arat"
    """game: additive Markov games with 3 or 50 states, pong, or a matrix game (ours)"""
    num_pro: int = 2
    """pong: n, paddles of the protagonists (ours)"""
    num_ant: int = 2
    """pong: m, paddles of the antagonists (ours)"""
    learner: Literal["fm3q", "selfplay_vdn", "selfplay_qmix", "iql", "joint_minimax"] = "fm3q"
    """fm3q: the method; controls: two cooperative teams, every agent alone, or minimax over all joint actions (ours)"""
    mixer: Literal["qmix", "twin", "vdn", "pairwise"] = "qmix"
    """fm3q: one monotone network, one for each team, signed sums, or pairs of opponents (ours; FM3Q code: pairwise)"""
    share_network: bool = True
    """one utility network for all agents, with the agent's number as an input, or one for each team (FM3Q code: yes)"""
    hidden_size: int = 64
    """width of the two hidden layers of the utility network (ours; FM3Q code: 128)"""
    embed_dim: int = 32
    """width of the mixing network (QMIX; FM3Q code: 32, unused)"""
    total_timesteps: int = 60_000
    """steps of all games together, rounded up to fifty equal pieces (ours)"""
    num_envs: int = 32
    """E, games that are stepped together (ours; FM3Q code: 16)"""
    updates_per_step: float = 1.0
    """gradient steps for each step of the E games (ours)"""
    buffer_size: int = 100_000
    """transitions that are kept (ours; FM3Q code: 4000000)"""
    batch_size: int = 256
    """B, transitions of a gradient step (ours; FM3Q code: 2000)"""
    learning_starts: int = 2_000
    """steps of random play before learning begins (ours)"""
    learning_rate: float = 1e-3
    """Adam's learning rate at the beginning (ours; FM3Q code: RMSprop 5e-4)"""
    anneal_lr: bool = True
    """lower the learning rate to 0 along a line (ours; FM3Q code: no)"""
    gamma: float = 0.9
    """discount (ours, of the additive games; FM3Q code: 0.99)"""
    target_network_frequency: int = 25
    """gradient steps between copies to the target networks (ours; FM3Q code: every fifth iteration)"""
    tau: float = 1.0
    """share of the online network that a copy takes (FM3Q code: 1)"""
    start_e: float = 1.0
    """chance of a random action at the beginning (ours; FM3Q code: 0.2)"""
    end_e: float = 0.1
    """chance of a random action in the end (FM3Q code)"""
    exploration_fraction: float = 0.5
    """share of the steps over which it falls from one to the other (CleanRL)"""
    max_grad_norm: float = 10.0
    """gradients are scaled down to this norm (FM3Q code)"""
    seed: int = 1
    """seed of games, networks and exploration (FM3Q code: 123)"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU if there is one (ours)"""
    num_threads: int = 1
    """threads of torch on the CPU; more of them slow small networks down (ours)"""
    eval_steps: int = 6_000
    """steps between evaluations, which also come first and last; 0 is never (ours)"""
    eval_games: int = 256
    """pong: games against each scripted opponent, from each side (ours)"""
    exploiter_steps: int = 0
    """pong: steps that fresh opponents of each side train against the final teams; 0 is none (ours)"""
    save_steps: int = 20_000
    """steps between checkpoints: this many, or a fiftieth of the run, are repeated after a crash at most (ours)"""
    output_dir: str | None = None
    """run folder; None is runs/<script>__<env>__<seed>__<time> (ours)"""
    resume: str | None = None
    """run folder to continue, with the flags it was started with (ours)"""
    evaluate: str | None = None
    """run folder whose teams are scored, without training (ours)"""
    video: bool = False
    """with --evaluate of pong: write a game to episode.gif in the run folder (ours)"""


# === 3 The method =====================================================================================================


class UtilityNet(nn.Module):
    """Utilities of all actions of every agent, from its observation and its number. (B,N,O) -> (B,N,A)"""

    def __init__(self, observation_dim: int, num_agents: int, num_actions: int, hidden_size: int):
        super().__init__()
        self.register_buffer("numbers", torch.eye(num_agents), persistent=False)  # (N,N)
        first, second = nn.Linear(observation_dim + num_agents, hidden_size), nn.Linear(hidden_size, hidden_size)
        self.layers = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(hidden_size, num_actions))

    def forward(self, observations: Tensor) -> Tensor:
        """(B,N,O) -> (B,N,A)"""
        return self.layers(torch.cat([observations, self.numbers.expand(len(observations), -1, -1)], -1))


class Mixer(nn.Module):
    """Joint value that rises in protagonists' and falls in antagonists' utilities. (B,n), (B,m), (B,S) -> (B,)

    vdn: sum of the protagonists' less sum of the antagonists'. qmix: a network with one hidden layer whose weights are
    absolute values of linear functions of the state, over the signed utilities (QMIX, arXiv 1803.11485). twin: such a
    network for each team, and their difference: it fits what one network over both, being convex, cannot.
    """

    def __init__(self, kind: str, num_pro: int, num_ant: int, state_dim: int, embed_dim: int = 32):
        super().__init__()
        self.kind, self.size = kind, (num_pro + num_ant, embed_dim)
        if kind == "twin":
            self.pro = Mixer("qmix", num_pro, 0, state_dim, embed_dim)
            self.ant = Mixer("qmix", num_ant, 0, state_dim, embed_dim)
        if kind == "qmix":  # PyMARL's names
            self.hyper_w_1 = nn.Linear(state_dim, embed_dim * (num_pro + num_ant))
            self.hyper_w_final, self.hyper_b_1 = nn.Linear(state_dim, embed_dim), nn.Linear(state_dim, embed_dim)
            self.V = nn.Sequential(nn.Linear(state_dim, embed_dim), nn.ReLU(), nn.Linear(embed_dim, 1))

    def forward(self, pro_q: Tensor, ant_q: Tensor, state: Tensor) -> Tensor:
        """(B,n), (B,m), (B,S) -> (B,)"""
        if self.kind == "vdn":
            return pro_q.sum(1) - ant_q.sum(1)
        if self.kind == "twin":
            return self.pro(pro_q, pro_q[:, :0], state) - self.ant(ant_q, ant_q[:, :0], state)
        signed = torch.cat([pro_q, -ant_q], 1)[:, None]  # (B,1,n+m)
        inner = self.hyper_w_1(state).abs().view(-1, *self.size)  # (B,n+m,embed)
        hidden = F.elu(signed @ inner + self.hyper_b_1(state)[:, None])  # (B,1,embed)
        outer = self.hyper_w_final(state).abs()[:, :, None]  # (B,embed,1)
        return (hidden @ outer)[:, 0, 0] + self.V(state)[:, 0]  # (B,)


def minimax_targets(
    rewards: Tensor, dones: Tensor, next_pro_q: Tensor, next_ant_q: Tensor, next_state: Tensor, mixer, gamma: float
) -> Tensor:
    """r + gamma min_b max_a Q_tot(s', a, b), which is the value at everybody's own best action. -> (B,)

    (B,), (B,), (B,n,A), (B,m,A), (B,S). Every agent takes its maximum, antagonists too: the sign is in the mixer.
    """
    values = mixer(next_pro_q.amax(-1), next_ant_q.amax(-1), next_state)  # (B,)
    return rewards + gamma * (1 - dones.to(values.dtype)) * values


def pairwise_targets(rewards: Tensor, dones: Tensor, next_pro_q: Tensor, next_ant_q: Tensor, gamma: float) -> Tensor:
    """The released code: agent i plays a game of its own against opponent i. (B,), (B,), (B,n,A) twice -> (B,n)"""
    values = next_pro_q.amax(-1) - next_ant_q.amax(-1)  # (B,n)
    return rewards[:, None] + gamma * (1 - dones.to(values.dtype))[:, None] * values


def td_loss(values: Tensor, targets: Tensor) -> Tensor:
    """Mean squared minimax Bellman error. (B,) or (B,n) twice -> scalar; targets are constants"""
    return (values - targets.detach()).square().mean()


def nash_conv(rewards: Tensor, transitions: Tensor, gamma: float, pro_actions: Tensor, ant_actions: Tensor) -> Tensor:
    """What both teams together could gain by answering best, from each state; 0 at an equilibrium. -> (S,)

    (S,A^n,A^m), (S,A^n,A^m,S), and numbers of joint actions (S,) twice. max over pro of V(pro, ant) - min over ant.
    """
    states = torch.arange(len(rewards), device=rewards.device)  # (S,)
    pro = best_response(rewards[states, :, ant_actions], transitions[states, :, ant_actions], gamma)  # (S,)
    ant = best_response(-rewards[states, pro_actions], transitions[states, pro_actions], gamma)  # (S,)
    return pro + ant


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


def make_game(args: Args, num_envs: int, seed: int, device) -> TabularGame | Pong:
    """The game of --env-id, `num_envs` copies."""
    if args.env_id == "pong":
        return Pong((args.num_pro, args.num_ant), num_envs, seed, device)
    return TabularGame(*game_tables(args.env_id), num_envs, seed, device)


@cache
def game_tables(env_id: str) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Rewards (S,A^n,A^m), transitions (S,A^n,A^m,S) and team sizes of a game that is not pong."""
    if env_id in MATRIX_GAMES:
        return matrix_game(env_id)
    return arat_game("large" if env_id == "arat_large" else "small")


@cache
def true_values(env_id: str, gamma: float) -> Tensor:
    """Value of each state when both teams play at their best. -> (S,)"""
    return minimax_values(*game_tables(env_id)[:2], gamma)


class Networks(nn.Module):
    """Everything that a learner trains: utilities and mixers, or the table of joint_minimax."""

    def __init__(self, game: TabularGame | Pong, args: Args):
        super().__init__()
        (n, m), A, S = game.teams, game.num_actions, game.state_dim
        self.teams, self.num_actions, self.learner, self.mixer = game.teams, A, args.learner, args.mixer
        counts = [n + m] if args.share_network else [n, m]
        self.nets = nn.ModuleList(UtilityNet(game.observation_dim, k, A, args.hidden_size) for k in counts)
        if args.learner == "fm3q" and args.mixer != "pairwise":
            self.joint = Mixer(args.mixer, n, m, S, args.embed_dim)
        if args.learner.startswith("selfplay"):
            kind = args.learner.removeprefix("selfplay_")
            self.sides = nn.ModuleList(Mixer(kind, size, 0, S, args.embed_dim) for size in (n, m))
        if args.learner == "joint_minimax":
            width = args.hidden_size
            layers = nn.Linear(S, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, A ** (n + m))
            self.nets = nn.Sequential(*layers, nn.Unflatten(1, (A**n, A**m)))

    def utilities(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """(B,N,O) -> (B,n,A), (B,m,A)"""
        if len(self.nets) == 1:
            return self.nets[0](observations).split(self.teams, 1)
        return tuple(net(part) for net, part in zip(self.nets, observations.split(self.teams, 1)))

    def greedy(self, observations: Tensor, state: Tensor) -> Tensor:
        """Everybody's best actions (B,N)."""
        if self.learner != "joint_minimax":
            return torch.cat(self.utilities(observations), 1).argmax(-1)
        table, digits = self.nets(state), []  # (B,A^n,A^m)
        for number, size in zip((table.amin(2).argmax(1), table.amax(1).argmin(1)), self.teams):
            digits += [number // self.num_actions**place % self.num_actions for place in reversed(range(size))]
        return torch.stack(digits, 1)

    def value(self, observations: Tensor, state: Tensor) -> Tensor | None:
        """What the learner believes that a state is worth to the protagonists (B,); None if it has no such number."""
        if self.learner == "joint_minimax":
            return self.nets(state).amax(1).amin(1)
        pro, ant = (q.amax(-1) for q in self.utilities(observations))  # (B,n), (B,m)
        if self.learner == "fm3q":
            return (pro - ant).sum(1) if self.mixer == "pairwise" else self.joint(pro, ant, state)
        return None if self.learner == "iql" else self.sides[0](pro, pro[:, :0], state)


# === 5 Rollout ========================================================================================================


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


def learner_loss(online: Networks, target: Networks, batch: dict[str, Tensor], args: Args) -> Tensor:
    """Squared error of a batch for the method and its controls. Columns (B,...) -> scalar"""
    rewards, dones = batch["rewards"], batch["dones"]  # (B,) each
    state, next_state = batch["state"], batch["next_state"]  # (B,S) each
    alive = 1 - dones.float()  # (B,)
    if args.learner == "joint_minimax":
        places = torch.arange(len(rewards), device=rewards.device)  # (B,)
        values = online.nets(state)[places, *joint_actions(batch["actions"], online.teams, online.num_actions)]  # (B,)
        return td_loss(values, rewards + args.gamma * alive * target.value(batch["next_observations"], next_state))
    chosen = batch["actions"][..., None]  # (B,N,1)
    pro, ant = torch.cat(online.utilities(batch["observations"]), 1).gather(2, chosen)[..., 0].split(online.teams, 1)
    with torch.no_grad():
        next_pro, next_ant = target.utilities(batch["next_observations"])  # (B,n,A), (B,m,A)
    if args.learner == "fm3q" and args.mixer == "pairwise":
        return td_loss(pro - ant, pairwise_targets(rewards, dones, next_pro, next_ant, args.gamma))
    if args.learner == "fm3q":
        targets = minimax_targets(rewards, dones, next_pro, next_ant, next_state, target.joint, args.gamma)  # (B,)
        return td_loss(online.joint(pro, ant, state), targets)
    loss = 0.0  # two teams, or N agents, that maximise their own reward and take the others for a part of the game
    for side, (q, after) in enumerate(((pro, next_pro), (ant, next_ant))):
        own, best = (rewards, -rewards)[side], after.amax(-1)  # (B,), (B,n) or (B,m)
        if args.learner == "iql":
            loss = loss + td_loss(q, own[:, None] + args.gamma * alive[:, None] * best)
        else:
            with torch.no_grad():
                future = target.sides[side](best, best[:, :0], next_state)  # (B,)
            loss = loss + td_loss(online.sides[side](q, q[:, :0], state), own + args.gamma * alive * future)
    return loss


class Learner:
    """Networks, replay and optimizer: what acts and learns."""

    def __init__(self, game: TabularGame | Pong, args: Args, device):
        self.args, self.updates, self.owed = args, 0, 0.0
        self.online, self.target = Networks(game, args).to(device), Networks(game, args).to(device)
        self.target.load_state_dict(self.online.state_dict())
        self.optimizer = torch.optim.Adam(self.online.parameters(), args.learning_rate, fused=True)
        self.buffer = ReplayBuffer(args.buffer_size, device)

    @torch.no_grad()
    def act(self, game: TabularGame | Pong, epsilon: float) -> Tensor:
        """Actions (E,N): everybody's best one, or with chance epsilon, each agent by itself, a random one."""
        best = self.online.greedy(*game.observe())  # (E,N)
        explore = torch.rand(best.shape, device=best.device) < epsilon  # (E,N)
        return torch.where(explore, torch.randint_like(best, game.num_actions), best)

    def play(self, game: TabularGame | Pong, actions: Tensor) -> tuple[Tensor, Tensor]:
        """One step of all games, kept for learning. Rewards and ends (E,)."""
        observations, state = game.observe()
        rewards, ends, (next_observations, next_state) = game.step(actions)
        rows = {"observations": observations, "state": state, "actions": actions, "rewards": rewards, "dones": ends}
        self.buffer.add(**rows, next_observations=next_observations, next_state=next_state)
        return rewards, ends

    def learn(self) -> dict[str, float]:
        """As many gradient steps as are due after a step of the games. Means of the metrics; nothing if none is."""
        self.owed += self.args.updates_per_step
        sums, count = 0.0, int(self.owed)
        self.owed -= count
        for _ in range(count):
            loss = learner_loss(self.online, self.target, self.buffer.sample(self.args.batch_size), self.args)
            self.optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.online.parameters(), self.args.max_grad_norm, foreach=True)
            self.optimizer.step()
            self.updates += 1
            if self.updates % self.args.target_network_frequency == 0:
                update_target(self.target, self.online, self.args.tau)
            sums = sums + torch.stack([loss.detach(), norm])
        return dict(zip(("losses/td_loss", "losses/grad_norm"), sums / count)) if count else {}

    def state_dict(self) -> dict:
        """Everything but the game."""
        parts = {name: getattr(self, name).state_dict() for name in ("online", "target", "optimizer", "buffer")}
        return parts | {"updates": self.updates, "owed": self.owed}

    def load_state_dict(self, state: dict) -> None:
        """Continue where state_dict was taken."""
        for name in ("online", "target", "optimizer", "buffer"):
            getattr(self, name).load_state_dict(state[name])
        self.updates, self.owed = state["updates"], state["owed"]


def train_exploiter(team: Networks, side: int, args: Args, device) -> float:
    """Mean result in a game of a fresh team that trained for `--exploiter-steps` steps against the frozen one.

    side: 0 if the fresh team are the protagonists. It is a cooperative learner (VDN) of the same size and flags.
    """
    flags = replace(args, learner="selfplay_vdn", total_timesteps=args.exploiter_steps)
    game = make_game(flags, args.num_envs, args.seed + 1000 + side, device)
    learner, mine = Learner(game, flags, device), torch.arange(sum(game.teams), device=device) < game.teams[0]  # (N,)
    mine, results = mine == (side == 0), []  # (N,)
    for step in range(0, args.exploiter_steps, args.num_envs):
        late = step >= 0.8 * args.exploiter_steps  # the last fifth, played greedily, is the score
        epsilon = 0.0 if late else linear_schedule(args.start_e, args.end_e, 0.5 * args.exploiter_steps, step)
        with torch.no_grad():
            frozen = team.greedy(*game.observe())  # (E,N)
        rewards, _ = learner.play(game, torch.where(mine, learner.act(game, epsilon), frozen))
        if late:
            results.append(torch.stack([rewards.sum(), (game.clock == 0).sum()]))  # a rally cut off is a draw
        elif learner.buffer.count > args.learning_starts:
            learner.learn()
    total, games = torch.stack(results).sum(0).tolist()
    return (total if side == 0 else -total) / max(games, 1)


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


def solve(networks: Networks, args: Args, device) -> dict[str, float]:
    """A game of tables: what both teams could gain against the greedy ones, and how far values are from the truth."""
    rewards, transitions, teams = game_tables(args.env_id)
    game = TabularGame(rewards, transitions, teams, len(rewards), 0, device)
    game.states = torch.arange(len(rewards), device=device)  # (S,)
    with torch.no_grad():
        observations, state = game.observe()
        actions, values = networks.greedy(observations, state), networks.value(observations, state)
    found = nash_conv(rewards, transitions, args.gamma, *joint_actions(actions.cpu(), teams, game.num_actions))  # (S,)
    scores = {"eval/nash_conv_mean": found.mean().item(), "eval/nash_conv_max": found.max().item()}
    if values is not None:
        errors = values.cpu() - true_values(args.env_id, args.gamma)  # (S,)
        scores["eval/value_error_max"] = errors.abs().max().item()
    return scores


@torch.no_grad()
def play_scripted(networks: Networks, args: Args, device) -> dict[str, float]:
    """Pong: share of games won, drawn (cut off) and lost against scripted teams, from both sides."""
    scores, n = {}, args.num_pro
    for name, script in (("tracker", tracker), ("wanderer", wanderer)):
        for side in ("left", "right"):
            game = Pong((n, args.num_ant), args.eval_games, args.seed + 5000, device)
            open_games = torch.ones(args.eval_games, dtype=torch.bool, device=device)
            results = torch.zeros(args.eval_games, device=device)  # of the first game of each
            for _ in range(game.horizon):
                own, other = networks.greedy(*game.observe()), script(game)  # (E,N) each
                pair = (own, other) if side == "left" else (other, own)
                rewards, ends, _ = game.step(torch.cat([pair[0][:, :n], pair[1][:, n:]], 1))
                results += rewards * open_games * (1 if side == "left" else -1)
                open_games &= ~ends
            for outcome, test in (("win", results > 0), ("draw", results == 0), ("loss", results < 0)):
                scores[f"eval/{name}/{side}/{outcome}"] = test.float().mean().item()
    return scores


def evaluate(networks: Networks, args: Args, device) -> dict[str, float]:
    """Exactly where the game can be solved, else against scripted teams."""
    return play_scripted(networks, args, device) if args.env_id == "pong" else solve(networks, args, device)


def exploit(networks: Networks, args: Args, device) -> dict[str, float]:
    """Pong: what freshly trained opponents of each side get against the teams; the sum is a lower bound of NashConv."""
    gains = [train_exploiter(networks, side, args, device) for side in (0, 1)]
    return {"eval/exploiter_pro": gains[0], "eval/exploiter_ant": gains[1], "eval/exploitability": sum(gains)}


def score_run(args: Args) -> dict[str, float]:
    """--evaluate: scores of a run's teams, printed, and with --video a game of pong as a moving picture."""
    trained = run_args(replace(args, eval_games=Args.eval_games, exploiter_steps=0))
    flags = replace(trained, eval_games=args.eval_games, exploiter_steps=args.exploiter_steps)
    check_args(flags)
    device = setup(flags)
    learner = Learner(make_game(trained, 1, 0, device), trained, device)
    if not load_checkpoint(args.evaluate, {"learner": learner}):
        fail(f"{args.evaluate}: has no checkpoint yet; continue it with --resume {args.evaluate}")
    scores = evaluate(learner.online, flags, device)
    scores |= exploit(learner.online, flags, device) if args.exploiter_steps else {}
    print("  ".join(f"{tag} {value:.3f}" for tag, value in scores.items()))
    if args.video:
        game, frames = make_game(trained, 1, args.seed, device), []
        for _ in range(game.horizon):
            frames.append(game.picture().numpy())
            game.step(learner.act(game, 0.0))
        imageio.mimsave(path := os.path.join(args.evaluate, "episode.gif"), frames, duration=50, loop=0)
        print(path)
    return scores


# === 8 Training loop ==================================================================================================


def check_args(args: Args) -> None:
    """One sentence for every flag that cannot work."""
    least = {f.name: int(f.type is int) for f in fields(Args)} | {"exploiter_steps": 0, "eval_steps": 0, "seed": 0}
    for f in fields(Args):
        value, kinds = getattr(args, f.name), [getattr(x, "__name__", x) for x in get_args(f.type) or (f.type,)]
        highest = 1 if f.name in ("gamma", "tau", "start_e", "end_e", "exploration_fraction") else 2**31
        unfit = value not in kinds and not {*kinds, "int"} & {kind.__name__ for kind in type(value).__mro__}
        if value == "" or unfit or (isinstance(value, (int, float)) and not least[f.name] <= value <= highest):
            wanted = " or ".join(kinds) if unfit else f"a number from {least[f.name]} to {highest:,}"
            fail(f"--{f.name.replace('_', '-')} {value!r}: expected {'a name' if value == '' else wanted}")
    pong = args.env_id == "pong"
    if (args.exploiter_steps or args.video or (args.num_pro, args.num_ant) != (2, 2)) and not pong:
        fail(f"--exploiter-steps, --video, --num-pro and --num-ant are for --env-id pong, not {args.env_id}")
    if args.mixer == "pairwise" and pong and args.num_pro != args.num_ant:
        fail(
            f"--mixer pairwise: pairs opponents, so --num-pro {args.num_pro} and --num-ant {args.num_ant} must be equal"
        )
    if args.learner != "fm3q" and args.mixer != Args.mixer:
        fail(f"--mixer {args.mixer}: only --learner fm3q has one to choose, not {args.learner}")
    if args.gamma == 1 and args.env_id.startswith("arat"):
        fail(f"--gamma 1: --env-id {args.env_id} never ends, so its values would be infinite")
    if 0 < args.exploiter_steps < 5 * args.num_envs:
        fail(f"--exploiter-steps {args.exploiter_steps}: five steps of all --num-envs {args.num_envs} games at least")
    if args.buffer_size < args.num_envs:
        fail(f"--buffer-size {args.buffer_size}: less than one step of --num-envs {args.num_envs} games")
    if args.video and not args.evaluate:
        fail("--video: needs --evaluate RUN_DIR, the run whose teams are shown")


def advance(learner: Learner, game: TabularGame | Pong, args: Args, step: int, size: int) -> dict[str, float]:
    """`size` steps of all games together, from `step` on, and the learning that is due. Returns means."""
    sums, results = {}, torch.zeros(2, device=game.device)
    duration = args.exploration_fraction * args.total_timesteps or 1  # 0 is at once
    for now in range(step, step + size, args.num_envs):
        epsilon = linear_schedule(args.start_e, args.end_e, duration, now)
        epsilon = 1.0 if now < args.learning_starts else epsilon
        rate = linear_schedule(args.learning_rate, 0, args.total_timesteps if args.anneal_lr else math.inf, now)
        learner.optimizer.param_groups[0]["lr"] = rate
        rewards, ends = learner.play(game, learner.act(game, epsilon))  # 1. act
        results += torch.stack([rewards.sum(), ends.sum()])
        for tag, value in (learner.learn() if now >= args.learning_starts else {}).items():  # 2. learn
            sums.setdefault(tag, []).append(value)
    metrics = {tag: torch.stack(values).mean().item() for tag, values in sums.items()}
    metrics |= {"charts/epsilon": epsilon, "charts/learning_rate": rate, "charts/reward": results[0].item() / size}
    return metrics | ({"charts/episodic_return": (results[0] / results[1]).item()} if results[1] else {})


def train(args: Args) -> dict[str, float]:
    """Train as the flags say. Returns the last evaluation. Steps as in fm3q.md."""
    if args.evaluate:
        return score_run(args)
    args = run_args(args) if args.resume else args
    check_args(args)
    device = setup(args)
    game = make_game(args, args.num_envs, args.seed, device)
    learner, progress = Learner(game, args, device), Progress(step=0)
    state = {"learner": learner, "game": game, "progress": progress}
    run_dir = args.output_dir or f"runs/{Path(__file__).stem}__{args.env_id}__{args.seed}__{time.time():.0f}"
    if not args.resume and any(os.path.exists(f"{run_dir}/{x}") for x in ("args.json", "metrics.csv")):
        fail(f"--output-dir {run_dir}: holds a run already; continue it with --resume {run_dir} or name another folder")
    loaded = progress["step"] if args.resume and load_checkpoint(run_dir, state) else -1
    logger = Logger(run_dir, args, loaded)
    print(f"{run_dir}: {args.learner}, {args.num_envs} games, {device}")
    signals = []  # the piece is finished and saved before the run leaves; a second signal leaves at once
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os._exit(128 + number) if signals else signals.append(number))
    size = -(-args.total_timesteps // 50 // args.num_envs) * args.num_envs  # a piece of the run
    start, first, scores, end = time.perf_counter(), progress["step"], {}, -(-args.total_timesteps // size) * size
    while True:
        step, last, stop = progress["step"], progress["step"] >= end, max(signals, default=0)
        scoring, saving = (n and step // n > (step - size) // n for n in (args.eval_steps, args.save_steps))
        if step != loaded and args.eval_steps and (last or scoring or step == 0):
            scores = evaluate(learner.online, args, device)
            scores |= exploit(learner.online, args, device) if last and args.exploiter_steps else {}
            logger.scalars(step, scores)
            print("  ".join(f"{tag} {value:.3f}" for tag, value in list(scores.items())[:3]), flush=True)
        if step not in (0, loaded) and (last or stop or saving):
            save_checkpoint(run_dir, step, state)
        if last or stop:
            break
        began, updates = time.perf_counter(), learner.updates
        metrics = advance(learner, game, args, step, size)  # 1. act, 2. learn
        now = time.perf_counter()  # 3. log; evaluate and save above
        progress["step"] = step = step + size
        logger.scalars(step, metrics)
        if not math.isfinite(sum(metrics.values())):
            fail("a loss is not a number any more; the last checkpoint is good, try a smaller --learning-rate", 1)
        memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else getrusage(RUSAGE_SELF).ru_maxrss * 1024
        seconds, updates = now - began, learner.updates - updates
        perf = {"charts/SPS": size / seconds, "perf/updates_per_second": updates / seconds}
        logger.scalars(step, perf | {"perf/peak_memory_gb": memory / 1e9}, "perf.csv")
        left, done = (now - start) / (step - first) * (end - step), f"step {step:>9,}/{end:,}"
        done += f"  loss {metrics['losses/td_loss']:9.4f}" if "losses/td_loss" in metrics else f"  {'no update':>14}"
        done += f"  {perf['charts/SPS']:7,.0f} steps/s"
        print(f"{done}  {left // 60:.0f}:{left % 60:02.0f} left", flush=True)
    if stop and not last:
        fail(f"stopped after step {step}; continue with --resume {run_dir}", 128 + stop)
    return scores


if __name__ == "__main__":
    train(tyro.cli(Args))
