# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.6", "numpy>=2.0", "tyro>=1.0", "tensorboard>=2.18"]
# ///
"""FM3Q: minimax Q-learning for two teams in a zero-sum game. Hu et al., arXiv 2402.00738.

The joint value Q_tot rises in the utilities of the protagonists, who want the reward, and falls in
those of the antagonists, who want its negative. Then everybody's own best action is the minimax:

    Q_tot(s, a, b) = mixer(Q_1(s, a_1) .. Q_n(s, a_n), Q_n+1(s, b_1) .. Q_n+m(s, b_m); s)
    target         = r + gamma (1 - d) Q_tot'(s', everybody's best action)  ' is the target network
    loss           = (Q_tot(s, a, b) - target)^2                            d is 1 if terminated

Differs from the paper, whose text was not available:
1. The mixing network is QMIX's (arXiv 1803.11485), fed with utilities that carry the sign of their
   team. This is our reading of the paper's condition. `--mixer vdn` and `twin` are two others.
2. The released code has no mixing network; it pairs agents, as `--mixer pairwise` does. It copies
   the target network after nearly every update of each fifth iteration, and never in the others;
   here the copy comes every `--target-network-frequency` updates.
3. The games are ours: tables that can be solved exactly, and pong of two teams. Environments of
   PettingZoo work too. The paper has Wimblepong, MPE and RoboMaster.

    python algorithms/fm3q.py                                     # a Markov game, solved exactly
    python algorithms/fm3q.py --env-id mpe2.simple_tag_v3 --eval-steps 0   # pip install mpe2
    python algorithms/fm3q.py --env-id pong --gamma 0.99 --num-envs 256 --updates-per-step 4 \
        --total-timesteps 1000000 --learning-rate 3e-3 --save-steps 1000000
    python algorithms/fm3q.py --learner selfplay_qmix             # control: two teams in self-play

Your own game: `--env-id FILE.py:function`; the function makes a PettingZoo parallel environment.
PettingZooGame says who is in which team, and what the reward is. Such games need this file alone;
the others are in the folder envs/ of the repository.

Letters in shapes: E games at once, B transitions of a batch, n protagonists, m antagonists,
N = n + m agents, A actions of an agent, O numbers of an observation, H hidden units, S numbers of a
state (in games of tables, states).
"""

from __future__ import annotations

import atexit
import importlib
import json
import math
import os
import random
import runpy
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.tensorboard import SummaryWriter

# The repository root, for envs/.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

MATRIX_GAMES = "additive product climbing pennies rock_paper_scissors saddle".split()
SOLVED_GAMES = ["arat", "arat_large", "arat_random", *MATRIX_GAMES]  # by tables
LOGS = 50  # log points of a run
MOST_STEPS = 10_000  # of a game in an evaluation; it may have no end
EXPLOITER_EVALUATIONS = 8  # evaluations during an exploiter's training
# Flags that cannot change when a run is resumed.
FIXED = "seed env_id num_pro num_ant num_states game_seed learner mixer hidden_size embed_dim"
FIXED += " gamma num_envs buffer_size save_steps output_dir"
SILENT = "resume evaluate opponent"  # flags whose change is not announced


@dataclass(frozen=True)
class Args:
    # game
    env_id: str = "arat"
    """arat (3 states), arat_large (50), arat_random; a matrix game (additive, product, climbing,
    pennies, rock_paper_scissors, saddle); pong; a PettingZoo module such as mpe2.simple_tag_v3; or
    FILE.py:function, which makes a parallel environment"""
    num_pro: int = 2
    """n, protagonists of pong and arat_random"""
    num_ant: int = 2
    """m, antagonists of pong and arat_random"""
    num_states: int = 50
    """states of arat_random"""
    game_seed: int = 0
    """arat_random: which game"""
    # method
    learner: Literal["fm3q", "selfplay_vdn", "selfplay_qmix", "iql"] = "fm3q"
    """fm3q, or a control: two cooperative teams in self-play, or every agent alone"""
    mixer: Literal["qmix", "twin", "vdn", "pairwise"] = "qmix"
    """fm3q: one monotone network, one for each team, signed sums, or pairs of opponents"""
    hidden_size: int = 64
    """width of the two hidden layers of the utility network"""
    embed_dim: int = 32
    """width of the mixing network"""
    gamma: float = 0.9
    """discount"""
    target_network_frequency: int = 25
    """gradient steps between copies to the target network"""
    tau: float = 1.0
    """share of the online network that a copy takes"""
    # data and optimizer
    total_timesteps: int = 60_000
    """steps of all games together, rounded up; learning rate and exploration follow them"""
    num_envs: int = 32
    """E, games that are stepped together"""
    updates_per_step: float = 1.0
    """gradient steps for each step of the E games"""
    buffer_size: int = 100_000
    """transitions that are kept"""
    batch_size: int = 256
    """B, transitions of a gradient step"""
    learning_starts: int = 2_000
    """steps of random play before learning begins"""
    learning_rate: float = 1e-3
    """of Adam, at the beginning; it falls linearly to 0"""
    max_grad_norm: float = 10.0
    """clip the gradient norm at this value; 0 does not clip"""
    start_e: float = 1.0
    """chance of a random action at the beginning, each agent by itself"""
    end_e: float = 0.1
    """chance of a random action in the end"""
    exploration_fraction: float = 0.5
    """share of the steps over which it falls from one to the other"""
    # evaluation
    eval_games: int = 256
    """games against each opponent from each side, where the game cannot be solved exactly"""
    exploiter_steps: int = 0
    """steps that opponents of each side train against the final teams; 0 is no exploiter"""
    exploiter_learning_rate: float = 1e-3
    """learning rate of these opponents, the same whatever the teams learned with"""
    # bookkeeping
    seed: int = 1
    """seed of environments, networks and sampling"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU if there is one"""
    eval_steps: int = 6_000
    """steps between evaluations, 1/50 of the run at least; 0 evaluates at the end only"""
    save_steps: int = 20_000
    """steps between checkpoints, 1/50 of the run at least; 0 keeps none, nor the trained teams.
    Games start anew at each of them: let it be many times --num-envs times the length of a game"""
    output_dir: str | None = None
    """run folder; None is runs/<script>__<game>__<seed>__<time>_<process>"""
    resume: str | None = None
    """run folder to continue; its flags are used unless given anew"""
    evaluate: str | None = None
    """run folder to score instead of training; its flags are used unless given anew, so exploiters
    are trained again unless --exploiter-steps is 0"""
    opponent: str | None = None
    """with --evaluate: run folder of teams to play against, from both sides"""


# --- The method ---------------------------------------------------------------------------------


class UtilityNet(nn.Module):
    """Utilities of all actions of every agent: one network, which also sees the agent's number."""

    def __init__(self, observation_dim: int, num_agents: int, num_actions: int, hidden_size: int):
        super().__init__()
        self.observation = nn.Linear(observation_dim, hidden_size, bias=False)
        self.biases = nn.Parameter(0.2 * torch.randn(num_agents, hidden_size))  # one an agent
        self.layers = nn.Sequential(
            nn.Linear(hidden_size, hidden_size),
            nn.ReLU(inplace=True),
            nn.Linear(hidden_size, num_actions),
        )

    def forward(self, observations: Tensor) -> Tensor:
        """(B,N,O) -> (B,N,A); also (B,1,O), if all agents see the same."""
        hidden = (self.observation(observations) + self.biases).relu_()  # (B,N,H)
        q = self.layers(hidden.flatten(0, 1))  # in two dimensions, which is faster
        return q.view(*hidden.shape[:2], -1)


class Mixer(nn.Module):
    """Joint value, rising in protagonists' and falling in antagonists' utilities.

    qmix: a network with one hidden layer over the signed utilities, whose weights are absolute
    values of linear functions of the state. twin: such a network for each team, and their
    difference. vdn: sum of the protagonists' minus sum of the antagonists'. pairwise: the mean of
    the differences between agent i and opponent i; in training each difference learns by itself.
    """

    def __init__(self, kind: str, num_pro: int, num_ant: int, state_dim: int, embed_dim: int = 32):
        super().__init__()
        self.kind = kind
        self.embed_dim = embed_dim
        if kind == "twin":
            self.pro = Mixer("qmix", num_pro, 0, state_dim, embed_dim)
            self.ant = Mixer("qmix", num_ant, 0, state_dim, embed_dim)
        if kind == "qmix":  # PyMARL's names
            self.hyper_w_1 = nn.Linear(state_dim, embed_dim * (num_pro + num_ant))
            self.hyper_w_final = nn.Linear(state_dim, embed_dim)
            self.hyper_b_1 = nn.Linear(state_dim, embed_dim)
            self.V = nn.Sequential(
                nn.Linear(state_dim, embed_dim), nn.ReLU(), nn.Linear(embed_dim, 1)
            )

    def forward(self, pro_q: Tensor, ant_q: Tensor, state: Tensor) -> Tensor:
        """(B,n), (B,m), (B,S) -> (B,)"""
        if self.kind == "vdn":
            return pro_q.sum(1) - ant_q.sum(1)
        if self.kind == "pairwise":
            return (pro_q - ant_q).mean(1)
        if self.kind == "twin":
            nobody = pro_q[:, :0]
            return self.pro(pro_q, nobody, state) - self.ant(ant_q, nobody, state)
        signed = torch.cat([pro_q, -ant_q], 1)  # (B,N)
        w_1 = self.hyper_w_1(state).abs().view(*signed.shape, self.embed_dim)  # (B,N,embed)
        w_final = self.hyper_w_final(state).abs()  # (B,embed)
        hidden = F.elu((signed[:, :, None] * w_1).sum(1) + self.hyper_b_1(state))  # (B,embed)
        return (hidden * w_final).sum(1) + self.V(state).squeeze(1)  # eq. 1 of fm3q.md


def minimax_targets(
    rewards: Tensor,
    dones: Tensor,
    next_pro_q: Tensor,
    next_ant_q: Tensor,
    next_state: Tensor,
    mixer,
    gamma: float,
) -> Tensor:
    """r + gamma (1 - d) min_b max_a Q_tot(s', a, b), at everybody's own best action. -> (B,)

    (B,), (B,), (B,n,A), (B,m,A), (B,S). Antagonists take their maximum, too: the sign is in the
    mixer.
    """
    values = mixer(next_pro_q.amax(-1), next_ant_q.amax(-1), next_state)  # eq. 2 of fm3q.md
    return rewards + gamma * (1 - dones.to(values.dtype)) * values  # eq. 3 of fm3q.md


def pairwise_targets(
    rewards: Tensor, dones: Tensor, next_pro_q: Tensor, next_ant_q: Tensor, gamma: float
) -> Tensor:
    """The released code: agent i plays against opponent i alone.

    (B,), (B,), (B,n,A) twice -> (B,n)
    """
    values = next_pro_q.amax(-1) - next_ant_q.amax(-1)
    return rewards[:, None] + gamma * (1 - dones.to(values.dtype))[:, None] * values


def td_loss(values: Tensor, targets: Tensor) -> Tensor:
    """Mean squared Bellman error. (B,) or (B,n) twice -> scalar; targets are constants."""
    return F.mse_loss(values, targets.detach())


def nash_conv(
    rewards: Tensor, transitions: Tensor, gamma: float, pro_actions: Tensor, ant_actions: Tensor
) -> Tensor:
    """What both teams could gain by answering best, from each state; 0 at an equilibrium. -> (S,)

    Tables (S,A^n,A^m) and (S,A^n,A^m,S), indices of joint actions (S,) twice.
    """
    from envs.two_team import best_response

    states = torch.arange(len(rewards), device=rewards.device)
    given_ant = states, slice(None), ant_actions
    given_pro = states, pro_actions
    against_ant = best_response(rewards[given_ant], transitions[given_ant], gamma)
    against_pro = best_response(-rewards[given_pro], transitions[given_pro], gamma)
    return against_ant + against_pro


# --- Training -----------------------------------------------------------------------------------


def train(args: Args) -> dict[str, float]:
    """Train as the flags say. Returns the scores of the last evaluation."""
    names = "num_envs num_pro num_ant num_states hidden_size embed_dim eval_games batch_size"
    lowest = dict.fromkeys(f"{names} total_timesteps target_network_frequency".split(), 1)
    lowest |= dict.fromkeys("learning_rate exploiter_learning_rate max_grad_norm".split(), 0)
    device = setup(args, buffer_size=args.num_envs, **lowest)
    if args.env_id.startswith("arat") and not 0 <= args.gamma < 1:
        sys.exit(f"--gamma {args.gamma:g}: must be from 0 to below 1, as this game does not end")
    if args.env_id in [*SOLVED_GAMES, "pong"] and find_spec("envs") is None:
        sys.exit(
            f"--env-id {args.env_id}: needs the folder envs/ of the repository beside this script; "
            "without it, --env-id takes a module of PettingZoo such as mpe2.simple_tag_v3 "
            "(pip install mpe2), or FILE.py:function"
        )
    if args.exploiter_steps and args.env_id in SOLVED_GAMES:
        sys.exit(f"--env-id {args.env_id} is solved exactly; it takes no --exploiter-steps")
    if 0 < args.exploiter_steps <= args.learning_starts:
        sys.exit(f"--exploiter-steps: exploiters learn after {args.learning_starts} steps only")
    if args.opponent and not args.evaluate:
        sys.exit("--opponent: goes with --evaluate RUN, the folder of the teams it plays against")
    if args.evaluate:
        return score_run(args, device)
    torch.manual_seed(args.seed)
    game = make_game(args, args.num_envs, args.seed, device)
    n, m = game.teams
    if args.learner == "fm3q" and args.mixer == "pairwise" and n != m:
        sys.exit(f"--mixer pairwise: pairs opponents, but the game has {n} against {m}")
    learner = Learner(Networks(game, args), Networks(game, args), args)
    run_dir = open_run(args, Path(args.env_id).name.replace(":", "_"))
    parts = {"online": learner.online, "target": learner.target, "optimizer": learner.optimizer}
    step = 0
    state = load_checkpoint(run_dir, device) if args.resume else None
    if state is not None:
        for name, part in parts.items():
            part.load_state_dict(state[name])
        learner.buffer.columns = state["columns"]
        learner.buffer.count = state["count"]
        step = state["step"]
    board = SummaryWriter(run_dir, purge_step=step + 1)
    board.add_text("hyperparameters", f"```\n{json.dumps(asdict(args), indent=1)}\n```")
    ratio = args.updates_per_step * args.batch_size / args.num_envs
    print(f"{run_dir}: {args.learner}, {args.num_envs} games on {device}, replay ratio {ratio:.2g}")
    if isinstance(game, PettingZooGame):
        agents = list(game.sizes)
        print("protagonists", *agents[:n], "against antagonists", *agents[n:])

    # The steps between two log points, and all steps: whole numbers of steps of all games. The
    # learning rate is 0 from --total-timesteps to the end of the run.
    interval = math.ceil(args.total_timesteps / LOGS / args.num_envs) * args.num_envs
    end = math.ceil(args.total_timesteps / interval) * interval
    if end <= args.learning_starts:
        print(f"--learning-starts {args.learning_starts}: the run ends before it learns anything")
    if args.resume and step >= end:
        print(f"{run_dir}: has {step} steps already; a larger --total-timesteps goes on")
    begin_anew = True
    scores = {}
    while True:
        last = step >= end
        if begin_anew:
            torch.manual_seed(random_seed(args.seed, step))
            game.reset(random_seed(args.seed, "games", step))
            results = torch.zeros(2, device=device)  # returns and number of games that ended
            returns = torch.zeros(args.num_envs, device=device)  # of games that go on
            begin_anew = False
        if last or is_due(args.eval_steps, step, interval):
            scores = evaluate(learner.online, args, device)
            if last and args.exploiter_steps:
                scores |= exploit(learner.online, args, device)
            log(run_dir, board, step, scores)
            shown = list(scores.items())[: None if last else 3]
            print("  ".join(f"{tag} {value:.3f}" for tag, value in shown))
        if last:
            break

        began = time.perf_counter()
        learned = []
        for now in range(step, step + interval, args.num_envs):
            # 1. act
            epsilon = exploration(args, now)
            rewards, over = learner.collect(game, act(learner.online, game, epsilon))
            returns += rewards
            results += torch.stack([(returns * over).sum(), over.sum()])
            returns.masked_fill_(over, 0)

            # 2. learn
            rate = linear_schedule(args.learning_rate, 0.0, args.total_timesteps, now)
            learner.optimizer.param_groups[0]["lr"] = rate
            for update in updates_due(args, now):
                batch = learner.buffer.sample(args.batch_size)
                loss = learner_loss(learner.online, learner.target, batch, args)
                learned.append(learner.gradient_step(loss, update))

        # 3. log and save
        step += interval
        total, games = results.tolist()  # waits for the device
        speed = interval / (time.perf_counter() - began)
        metrics = {"charts/epsilon": epsilon, "charts/learning_rate": rate, "charts/SPS": speed}
        line = f"step {step:>9,}/{end:,}  {speed:7,.0f} steps/s"
        if games:
            metrics["charts/episodic_return"] = total / games
            results.zero_()
        if learned:
            loss, norm = torch.stack(learned).mean(0).tolist()
            metrics |= {"losses/td_loss": loss, "losses/grad_norm": norm}
            line += f"  loss {loss:9.4f}"
            if not math.isfinite(loss + norm):
                sys.exit("a loss is not finite: try a lower --learning-rate; checkpoints are kept")
        log(run_dir, board, step, metrics)
        left = round(max(0, end - step) / speed)
        print(f"{line}  {left // 60:.0f}:{left % 60:02.0f} left", flush=True)
        if args.save_steps and (step >= end or is_due(args.save_steps, step, interval)):
            state = {name: part.state_dict() for name, part in parts.items()}
            state |= {"columns": learner.buffer.columns, "count": learner.buffer.count}
            save_checkpoint(run_dir, step, state | {"step": step})
            begin_anew = True
    return scores


class Networks(nn.Module):
    """Utilities of all agents, and what mixes them."""

    def __init__(self, game, args: Args):
        super().__init__()
        n, m = game.teams
        self.game = game
        self.utility = UtilityNet(game.observation_dim, n + m, game.num_actions, args.hidden_size)
        if args.learner == "fm3q":
            self.mixer = Mixer(args.mixer, n, m, game.state_dim, args.embed_dim)
        if args.learner.startswith("selfplay"):
            kind = args.learner.removeprefix("selfplay_")
            mixers = [Mixer(kind, size, 0, game.state_dim, args.embed_dim) for size in (n, m)]
            self.team_mixers = nn.ModuleList(mixers)
        self.to(game.device)

    def utilities(self, state: Tensor) -> Tensor:
        """(B,S) -> (B,N,A); -inf for actions that are not legal."""
        observations = self.game.observations(state)  # (B,N,O)
        q = self.utility(observations)
        if self.game.masked:
            q = q.masked_fill(observations[..., -q.size(-1) :] == 0, -torch.inf)
        return q

    @torch.no_grad()
    def greedy(self, state: Tensor) -> Tensor:
        """Everybody's best actions. (B,S) -> (B,N)"""
        return self.utilities(state).argmax(-1)

    def value(self, state: Tensor) -> Tensor:
        """FM3Q's value of a state, at everybody's best actions. (B,S) -> (B,)"""
        pro_q, ant_q = self.utilities(state).amax(-1).split(self.game.teams, 1)
        return self.mixer(pro_q, ant_q, state)


def learner_loss(
    online: Networks, target: Networks, batch: dict[str, Tensor], args: Args
) -> Tensor:
    """The loss of FM3Q, or of a control. Columns (B,...) -> scalar"""
    state, next_state = batch["state"], batch["next_state"]
    rewards, dones = batch["rewards"], batch["dones"]
    chosen = batch["actions"][..., None]  # (B,N,1)
    q = online.utilities(state).gather(2, chosen).squeeze(2)  # (B,N)
    pro_q, ant_q = q.split(online.game.teams, 1)  # (B,n), (B,m)
    next_pro_q, next_ant_q = target.utilities(next_state).split(online.game.teams, 1)

    if args.learner == "fm3q" and args.mixer == "pairwise":
        targets = pairwise_targets(rewards, dones, next_pro_q, next_ant_q, args.gamma)
        return td_loss(pro_q - ant_q, targets)
    if args.learner == "fm3q":
        values = online.mixer(pro_q, ant_q, state)
        targets = minimax_targets(
            rewards, dones, next_pro_q, next_ant_q, next_state, target.mixer, args.gamma
        )
        return td_loss(values, targets)

    # Controls: both teams, or with iql all agents, maximise their own reward.
    loss = 0.0
    sides = [(0, pro_q, next_pro_q, rewards), (1, ant_q, next_ant_q, -rewards)]
    for side, own_q, next_q, gains in sides:
        if side != getattr(online, "side", side):
            continue  # the frozen team of an exploiter learns nothing
        if args.learner == "iql":
            zeros = torch.zeros_like(next_q)  # opponents worth 0 leave plain Q-learning
            targets = pairwise_targets(gains, dones, next_q, zeros, args.gamma)
            loss = loss + td_loss(own_q, targets)
        else:
            values = online.team_mixers[side](own_q, own_q[:, :0], state)
            mixer = target.team_mixers[side]
            nobody = next_q[:, :0]  # the mixer of one team has no opponents
            targets = minimax_targets(gains, dones, next_q, nobody, next_state, mixer, args.gamma)
            loss = loss + td_loss(values, targets)
    return loss


@torch.no_grad()
def update_target(target: nn.Module, online: nn.Module, tau: float) -> None:
    """target <- (1 - tau) target + tau online, in place."""
    torch._foreach_lerp_([*target.parameters()], [*online.parameters()], tau)


class Learner:
    """Networks, a slow copy of them, their optimizer and their replay."""

    def __init__(self, online: Networks, target: Networks, args: Args):
        self.args = args
        self.online = online
        self.target = target.requires_grad_(False)
        self.target.load_state_dict(online.state_dict())
        # All parameters become views of one vector: a step of Adam is one operation for all.
        self.parameters = list(self.online.parameters())
        self.weights = nn.Parameter(parameters_to_vector(self.parameters).detach())
        vector_to_parameters(self.weights.data, self.parameters)
        self.optimizer = torch.optim.Adam([self.weights], args.learning_rate, fused=True)
        self.buffer = ReplayBuffer(args.buffer_size)

    def collect(self, game, actions: Tensor) -> tuple[Tensor, Tensor]:
        """A step of all games, kept for learning. Rewards, and which games are over. (E,) twice"""
        state = game.state
        # next_state is before a reset; dones are ends of the game, over counts time limits too
        rewards, dones, over, next_state = game.step(actions)
        self.buffer.add(
            state=state, actions=actions, rewards=rewards, dones=dones, next_state=next_state
        )
        return rewards, over

    def gradient_step(self, loss: Tensor, number: int) -> Tensor:
        """Step `number` of Adam, and from time to time a copy to the target. Loss and gradient
        norm (2,); nothing waits for the device."""
        gradients = torch.autograd.grad(loss, self.parameters, materialize_grads=True)
        self.weights.grad = parameters_to_vector(gradients)
        norm = nn.utils.clip_grad_norm_(self.weights, self.args.max_grad_norm or math.inf)
        self.optimizer.step()
        if number % self.args.target_network_frequency == 0:
            update_target(self.target, self.online, self.args.tau)
        return torch.stack([loss.detach(), norm])


def act(networks: Networks, game, epsilon: float) -> Tensor:
    """Best actions, or with chance epsilon, each agent by itself, random ones. (E,N)"""
    best = networks.greedy(game.state)
    explore = torch.rand(best.shape, device=best.device) < epsilon
    return torch.where(explore, game.random_actions(), best)


def exploration(args: Args, step: int) -> float:
    """Chance of a random action."""
    if step < args.learning_starts:
        return 1.0
    duration = max(1, args.exploration_fraction * args.total_timesteps)
    return linear_schedule(args.start_e, args.end_e, duration, step)


def updates_due(args: Args, step: int) -> range:
    """Numbers (1, 2, ...) of the gradient steps that are due when all games have made this step."""
    before = max(0, step - args.learning_starts)
    after = max(0, step + args.num_envs - args.learning_starts)
    rate = args.updates_per_step / args.num_envs
    return range(int(before * rate) + 1, int(after * rate) + 1)


def evaluate(networks, args: Args, device) -> dict[str, float]:
    """Exactly, where the game can be solved; else against players that need no training."""
    if args.env_id in SOLVED_GAMES:
        return solve(networks, args)
    scores = match("wanderer", player(networks), wanderer, args, device)
    if args.env_id == "pong":
        from envs.pong import tracker

        scores |= match("tracker", player(networks), tracker, args, device)
    return scores


# ================================================================================================
# Below: what the method stands on, networks, environments, checkpoints and logs.
# ================================================================================================


# --- Games and replay buffer --------------------------------------------------------------------


@cache
def game_tables(args: Args) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Rewards (S,A^n,A^m), transitions (S,A^n,A^m,S) and team sizes of a game of tables."""
    from envs.two_team import arat_game, matrix_game, random_arat_game

    if args.env_id in MATRIX_GAMES:
        return matrix_game(args.env_id)
    if args.env_id == "arat_random":
        return random_arat_game(args.num_states, (args.num_pro, args.num_ant), args.game_seed)
    return arat_game("small" if args.env_id == "arat" else "large")


@cache
def true_values(args: Args) -> Tensor:
    """Value of each state of a game of tables if both teams play their best. -> (S,)"""
    from envs.two_team import minimax_values

    rewards, transitions, _ = game_tables(args)
    return minimax_values(rewards, transitions, args.gamma)


def make_game(args: Args, num_envs: int, seed: int, device):
    """`num_envs` copies of the game."""
    if args.env_id in SOLVED_GAMES:
        from envs.two_team import TabularGame

        return TabularGame(*game_tables(args), num_envs, seed, device)
    if args.env_id == "pong":
        from envs.pong import Pong

        return Pong((args.num_pro, args.num_ant), num_envs, seed, device)
    return PettingZooGame(args.env_id, num_envs, seed, device)


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


# --- PettingZoo games ---------------------------------------------------------------------------


class PettingZooGame:
    """E copies of a parallel environment of PettingZoo, stepped one after the other.

    Agents with adversary in their name are the antagonists and all others the protagonists, unless
    the environment has an attribute `teams`: the protagonists' names, the antagonists' names. The
    reward of a step is the mean over the protagonists' rewards minus that over the antagonists'.

    An agent sees its observation, padded with zeros to the longest, and which of the A actions are
    legal; the state is what all agents see. An agent that has left the game has reward 0, observes
    zeros, and its one legal action is 0; so is that of an agent whose mask allows none. Games
    always bootstrap at time limits: if the clock is observed, take the end as a termination.
    """

    masked = True  # the last A numbers of an observation say which actions are legal

    def __init__(self, env_id: str, num_envs: int, seed: int, device):
        make = find_maker(env_id)
        self.envs = [make() for _ in range(num_envs)]
        self.num_envs = num_envs
        self.device = torch.device(device)
        env = self.envs[0]
        pro, ant = find_teams(env)
        self.teams = (len(pro), len(ant))
        self.weights = dict.fromkeys(pro, 1 / len(pro)) | dict.fromkeys(ant, -1 / len(ant))
        atexit.register(self.close)
        self.sizes = {}  # number of actions of each agent, in the order of all tensors
        for agent in pro + ant:
            space = env.action_space(agent)
            if not hasattr(space, "n") or getattr(space, "shape", ()) or getattr(space, "start", 0):
                sys.exit(f"--env-id {env_id}: {agent} has actions {space}; expected Discrete(A)")
            self.sizes[agent] = int(space.n)
        self.num_actions = max(self.sizes.values())
        begun = env.reset(seed=seed % 2**31)
        if not isinstance(begun, tuple) or len(begun) != 2:
            sys.exit(f"--env-id {env_id}: reset() must return observations and infos, two dicts")
        observations, infos = begun
        missing = [agent for agent in self.sizes if agent not in observations]
        if missing:
            sys.exit(f"--env-id {env_id}: reset() gives no observation of {missing[0]}")
        lengths = [len(observed(agent, observations, infos)[0]) for agent in self.sizes]
        self.observation_dim = max(lengths) + self.num_actions
        self.state_dim = len(self.sizes) * self.observation_dim
        self.reset(seed)

    def close(self) -> None:
        for env in self.envs:
            if hasattr(env, "close"):
                env.close()

    def reset(self, seed: int) -> None:
        """New games."""
        self.random = np.random.default_rng(seed)
        self.now = np.stack([self.begin(env) for env in self.envs])  # (E,N,O)
        self.state = self.to_device(self.now).flatten(1)  # (E,S)

    def begin(self, env) -> np.ndarray:
        """What all agents see in a new game. (N,O)"""
        return self.describe(*env.reset(seed=int(self.random.integers(2**31))))

    def describe(self, observations: dict, infos: dict) -> np.ndarray:
        """What all agents see. (N,O)"""
        rows = np.zeros((len(self.sizes), self.observation_dim), np.float32)
        for row, (agent, size) in zip(rows, self.sizes.items()):
            legal = row[-self.num_actions :][:size]  # a view of the row
            if agent in observations:
                numbers, mask = observed(agent, observations, infos)
                count, most = len(numbers), len(row) - self.num_actions
                if count > most:
                    sys.exit(f"{agent} observes {count} numbers, in the first game at most {most}")
                row[:count] = numbers
                legal[:] = mask
            if not legal.any():
                legal[0] = 1
        return rows

    def to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def observations(self, state: Tensor) -> Tensor:
        """(B,S) -> (B,N,O)"""
        return state.view(len(state), len(self.sizes), -1)

    def random_actions(self) -> Tensor:
        """Legal ones (E,N)."""
        legal = self.now[..., -self.num_actions :]
        chances = self.random.random(legal.shape) * legal
        return torch.from_numpy(chances.argmax(-1)).to(self.device)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """actions (E,N) -> rewards, whether the game ended, and whether it is over, ended or cut
        off, (E,) each; and the state before new games begin (E,S)."""
        rewards = np.zeros(self.num_envs, np.float32)
        dones = np.zeros(self.num_envs, bool)
        over = np.zeros(self.num_envs, bool)
        following = np.zeros_like(self.now)  # what all agents see before new games begin
        now = np.zeros_like(self.now)
        for game, (env, row) in enumerate(zip(self.envs, actions.tolist())):
            action_of = dict(zip(self.sizes, row))
            chosen = {agent: action_of[agent] for agent in env.agents}
            found = env.step(chosen)
            if len(found) != 5 or not all(isinstance(part, dict) for part in found[:4]):
                sys.exit("step() must return five dicts, as PettingZoo's parallel environments do")
            observations, gains, terminated, truncated, infos = found
            for agent, gain in gains.items():  # None becomes NaN, found below
                rewards[game] += self.weights[agent] * np.float64(gain).sum()
            dones[game] = all(terminated[agent] for agent in chosen)
            over[game] = all(terminated[agent] or truncated[agent] for agent in chosen)
            present = {agent: observations[agent] for agent in chosen if not terminated[agent]}
            following[game] = self.describe(present, infos)
            now[game] = self.begin(env) if over[game] else following[game]
        if not np.isfinite(rewards).all() or not np.isfinite(following).all():
            sys.exit("a reward or an observation is not a finite number: mend the environment")
        self.now = now
        self.state = self.to_device(now).flatten(1)
        next_state = self.to_device(following).flatten(1)
        return self.to_device(rewards), self.to_device(dones), self.to_device(over), next_state


def find_maker(env_id: str):
    """The function that makes an environment: FILE.py:function, or a module's parallel_env."""
    path, _, name = env_id.rpartition(":")
    if os.path.isfile(path):
        sys.path.append(os.path.dirname(path))  # so that the file can import its neighbours
        names = runpy.run_path(path)
        if not callable(names.get(name)):
            sys.exit(f"--env-id {env_id}: the file has no function {name!r}")
        return names[name]
    if path:
        sys.exit(f"--env-id {env_id}: expected FILE.py:function, but there is no file {path!r}")
    try:
        if env_id[:1] in ("", "."):
            raise ImportError("a file needs :function behind it")
        return importlib.import_module(env_id).parallel_env
    except (ImportError, AttributeError) as error:
        sys.exit(
            f"--env-id {env_id}: {error}; expected a game of this script, FILE.py:function, or a "
            "module of PettingZoo, see --help (pip install pettingzoo mpe2)"
        )


def find_teams(env) -> tuple[list[str], list[str]]:
    """Names of the protagonists and of the antagonists."""
    agents = getattr(env, "possible_agents", None)
    if not agents:
        sys.exit("--env-id: the environment has no possible_agents, so is no parallel one")
    ant = [agent for agent in agents if "adversary" in str(agent).lower()]
    pro = [agent for agent in agents if agent not in ant]
    try:
        pro, ant = map(list, getattr(env, "teams", (pro, ant)))
    except (TypeError, ValueError):  # other than two lists
        pro = []
    if not pro or not ant or sorted(pro + ant) != sorted(agents):
        sys.exit(f"agents {agents}: give the environment `teams`, two lists that share them out")
    return pro, ant


def observed(agent: str, observations: dict, infos: dict) -> tuple[np.ndarray, np.ndarray | int]:
    """The numbers that an agent observes, and which of its actions are legal; 1 is all."""
    observation = observations[agent]
    if isinstance(observation, dict) and "action_mask" in observation:
        return as_vector(observation["observation"]), observation["action_mask"]
    return as_vector(observation), infos.get(agent, {}).get("action_mask", 1)


def as_vector(observation) -> np.ndarray:
    """All numbers of an observation: of a dictionary in the order of its names."""
    if isinstance(observation, dict):
        observation = tuple(observation[name] for name in sorted(observation))
    if isinstance(observation, tuple):
        return np.concatenate([as_vector(part) for part in observation])
    return np.ravel(observation)


# --- Evaluation ---------------------------------------------------------------------------------


def solve(networks, args: Args) -> dict[str, float]:
    """A game of tables: what both teams could gain against the greedy ones, and for
    FM3Q how far its values of the states are from the truth."""
    from envs.two_team import joint_actions

    rewards, transitions, teams = game_tables(args)
    game = networks.game
    with torch.no_grad():
        numbers = joint_actions(networks.greedy(game.one_hot).cpu(), teams, game.num_actions)
        gains = nash_conv(rewards, transitions, args.gamma, *numbers)  # (S,)
        scores = {"eval/nash_conv_mean": gains.mean().item()}
        scores["eval/nash_conv_max"] = gains.max().item()
        if args.learner == "fm3q":
            errors = networks.value(game.one_hot).cpu() - true_values(args)  # (S,)
            scores["eval/value_error_max"] = errors.abs().max().item()
    return scores


def wanderer(game) -> Tensor:
    """A player that moves at random. (E,N)"""
    return game.random_actions()


def player(networks):
    """The teams of networks, playing greedily."""
    return lambda game: networks.greedy(game.state)


@torch.no_grad()
def play_games(pro, ant, args: Args, seed: int, device) -> Tensor:
    """Rewards that protagonists `pro` get from antagonists `ant` in a game each. (eval_games,)"""
    game = evaluation_game(args, device)
    game.reset(seed)
    returns = torch.zeros(args.eval_games, device=device)
    playing = torch.ones(args.eval_games, dtype=torch.bool, device=device)
    for step in range(MOST_STEPS):
        if step == 1000:
            advice = "give the game a time limit, or take fewer --eval-games"
            print(f"{playing.sum()} games go on after 1,000 steps: {advice}", flush=True)
        actions = both_teams(game, pro(game), ant(game))
        rewards, _, over, _ = game.step(actions)
        returns += rewards * playing
        playing &= ~over
        if not playing.any():
            return returns
    print(f"{playing.sum()} games did not end in {MOST_STEPS} steps, and count so far", flush=True)
    return returns


@cache
def evaluation_game(args: Args, device):
    """Games for all evaluations: hundreds of environments take long to make."""
    return make_game(args, args.eval_games, 0, device)


def both_teams(game, pro_actions: Tensor, ant_actions: Tensor) -> Tensor:
    """Protagonists' columns of one, antagonists' of the other. (E,N,...) twice -> (E,N,...)"""
    n = game.teams[0]
    return torch.cat([pro_actions[:, :n], ant_actions[:, n:]], 1)


def match(name: str, ours, opponent, args: Args, device) -> dict[str, float]:
    """Our games against an opponent, from both sides: mean return, shares above and below 0."""
    seed = random_seed(args.seed, "evaluation")
    returns = {
        "pro": play_games(ours, opponent, args, seed, device),
        "ant": -play_games(opponent, ours, args, seed, device),
    }
    scores = {}
    for side, values in returns.items():
        scores[f"eval/{name}/{side}/return"] = values.mean().item()
        scores[f"eval/{name}/{side}/win"] = (values > 0).float().mean().item()
        scores[f"eval/{name}/{side}/loss"] = (values < 0).float().mean().item()
    return scores


class Exploiter(Networks):
    """A copy of a frozen team that goes on learning, while the other team stays as it is."""

    def __init__(self, frozen: Networks, side: int, args: Args):
        super().__init__(frozen.game, args)
        self.load_state_dict(frozen.state_dict())
        self.frozen_utilities = frozen.utilities
        self.side = side  # 0: protagonists

    def utilities(self, state: Tensor) -> Tensor:
        """(B,S) -> (B,N,A)"""
        own = super().utilities(state)
        with torch.no_grad():
            others = self.frozen_utilities(state)
        teams = [others, others]
        teams[self.side] = own
        return both_teams(self.game, *teams)


def train_exploiter(frozen: Networks, side: int, args: Args, device) -> float:
    """What a team (0: protagonists) gains by training against the frozen team of the other side.
    A best response gains at least this, up to the noise of the games.

    It learns on FM3Q's loss, or the control's, in which the other team's utilities are constants,
    and explores with chance --end-e throughout. What counts is the best of its checkpoints and, in
    pong, of paddles that follow the ball, scored again in fresh games. The gain is never below 0,
    as a team can always play as the frozen one; where there is nothing to gain, the noise of the
    games makes it slightly positive.
    """
    seed = random_seed(args.seed, "exploiter", side)
    torch.manual_seed(seed)
    game = make_game(args, args.num_envs, seed, device)
    learner = Learner(Exploiter(frozen, side, args), Exploiter(frozen, side, args), args)
    itself = player(frozen)

    def result(team, label: str) -> float:
        """The team's mean reward against the frozen one; the label seeds the games."""
        teams = [itself, itself]
        teams[side] = team
        returns = play_games(*teams, args, random_seed(seed, label), device)
        return (1 - 2 * side) * returns.mean().item()

    candidates = [itself]
    if args.env_id == "pong":
        from envs.pong import tracker

        candidates.append(tracker)
    scores = [result(team, "before") for team in candidates]
    rounds = math.ceil(args.exploiter_steps / args.num_envs)
    for number in range(rounds):
        step = number * args.num_envs
        rate = linear_schedule(args.exploiter_learning_rate, 0.0, args.exploiter_steps, step)
        learner.optimizer.param_groups[0]["lr"] = rate
        teams = [frozen.greedy(game.state)] * 2
        teams[side] = act(learner.online, game, args.end_e)
        learner.collect(game, both_teams(game, *teams))
        for update in updates_due(args, step):
            batch = learner.buffer.sample(args.batch_size)
            loss = learner_loss(learner.online, learner.target, batch, args)
            learner.gradient_step(loss, update)
        is_last = number == rounds - 1
        if is_last or (number + 1) % math.ceil(rounds / EXPLOITER_EVALUATIONS) == 0:
            kept = Exploiter(frozen, side, args)
            kept.load_state_dict(learner.online.state_dict())
            candidates.append(player(kept))
            scores.append(result(candidates[-1], f"step {step}"))
    best = candidates[scores.index(max(scores))]
    return max(0.0, result(best, "final") - result(itself, "final"))


def exploit(networks, args: Args, device) -> dict[str, float]:
    """Gains of trained opponents of both sides, in rewards without discount, and their sum."""
    pro, ant = [train_exploiter(networks, side, args, device) for side in (0, 1)]
    return {"eval/exploiter_pro": pro, "eval/exploiter_ant": ant, "eval/exploitability": pro + ant}


def load_teams(run_dir: str, args: Args, device) -> Networks:
    """The newest networks of a run with these flags."""
    networks = Networks(make_game(args, 1, 0, device), args)
    state = load_checkpoint(run_dir, device)
    if state is None:
        sys.exit(f"{run_dir}: no checkpoint; --save-steps 0 keeps none, or it is too early")
    try:
        networks.load_state_dict(state["online"])
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        sys.exit(f"{run_dir}: its networks are not those of these flags ({reason:.150})")
    return networks


def score_run(args: Args, device) -> dict[str, float]:
    """--evaluate: scores of a run's teams, also against those of --opponent."""
    if args.env_id in SOLVED_GAMES and args.opponent:
        sys.exit(f"--env-id {args.env_id} is solved exactly; it takes no --opponent")
    networks = load_teams(args.evaluate, args, device)
    scores = evaluate(networks, args, device)
    if args.exploiter_steps:
        scores |= exploit(networks, args, device)
    if args.opponent:
        path = Path(args.opponent, "args.json")
        if not path.is_file():
            sys.exit(f"--opponent {args.opponent}: no args.json, so not a run folder")
        try:
            theirs = Args(**json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            sys.exit(f"{path}: cannot be read, perhaps of another script ({error})")
        if theirs.env_id != args.env_id:
            sys.exit(f"--opponent {args.opponent}: plays another game, {theirs.env_id}")
        other = load_teams(args.opponent, theirs, device)
        if other.game.teams != networks.game.teams:
            sys.exit(f"--opponent {args.opponent}: has teams of {other.game.teams}")
        scores |= match("opponent", player(networks), player(other), args, device)
    for tag, value in scores.items():
        print(f"{tag} {value:.3f}")
    return scores


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


def linear_schedule(start: float, end: float, duration: float, t: float) -> float:
    """From start at t = 0 along a line to end at t = duration, then constant."""
    return start + (end - start) * min(t / duration, 1.0)


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
