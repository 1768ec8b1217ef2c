# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.6", "numpy>=2.0", "gymnasium>=1.0", "tyro>=1.0", "tensorboard>=2.18"]
# ///
"""SeqWM: sequential world models, and planning with them. Zhao et al., arXiv 2509.13095.

Each agent of a team has a world model of its own. The agents have an order: what the model of agent
i predicts depends on agent i and on the agents before it, whose plan is passed on as a message.

    z_i   = encoder_i(o_i)                       a latent, with simplicial normalization
    z_i'  = dynamics_i(z_i, a_i, message_i)      a step later; message: actions, latents of j < i
    r_i   = reward_i(z_i, a_i, message_i)        the team's reward
    Q     = critics(z_1 .. z_n, a_1 .. a_n)      two, for all agents
    value = sum_t gamma^t r_i(t) + gamma^H Q     of a plan of H steps; mean over agents

    model   20 mean (z_i' - encoder_i(o_i'))^2 + 0.1 CE(r_i, r)
            + 0.1 CE(Q, r + gamma (1 - d) min Q_slow)
    actors  alpha log pi_i - Q / S, one agent after the other in random order
    acting  MPPI: sample joint plans, keep those of highest value, draw around them, repeat

CE is the cross-entropy of two-hot distributions over symlog values, Q_slow a slow copy of the
critics, d whether the game ended, S the spread of Q. Terms with i are summed over the agents, that
of Q is the mean of both critics. Each predicted step has half the weight of the one before.

Differs from the released code (zhaozijie2022/seqwm-marl at da9f316):
1. There, a message has the predecessors' actions alone: `--message actions`. The paper's message
   has the whole predicted plan. Here (`--message plan`) the message at step t has the predecessors'
   latents and actions of step t, without rewards. As in the paper no gradient passes through it.
2. Two lines of the released code do not compute what they should: the last predicted reward of a
   plan is lost, with H = 1 the only one (`--plan-value released` does the same), and a policy's
   log-density multiplies its residuals by the number of actions (`--log-density released`).
3. There, the critics have a dropout of 0.01 that is never switched off; here none. Activations are
   SiLU, not Mish, which has nearly the same shape and takes a CPU ten times as long. Gradients are
   clipped for each kind of network, not for each network. The entropy has a larger weight.
4. There, a sequence repeats the last step of a game that ends; here, what follows it has weight 0.
   There, next observations are what step() returns, here those before a reset; the reward is that
   of the first agent, here the mean; and 2,500 updates follow the random actions, here none.
5. Shared with it: all agents' k-th samples make one joint plan, but in the end every agent draws
   its own among the best. `--mppi-temperature` multiplies values, so a higher one is greedier.
   Critics are common, and an actor sees its own latent only. The paper differs, as far as we know.
6. Left out: models in a random order (its mode `ran`); and what it leaves out itself: messages
   dropped at random in training, and for robots low-pass noise, early stop, cached messages.

    python algorithms/seqwm.py                                  # two agents cover two landmarks
    python algorithms/seqwm.py --model independent              # control: models see nobody else
    python algorithms/seqwm.py --model joint                    # control: models see everybody
    python algorithms/seqwm.py --planner none                   # control: actors alone
    python algorithms/seqwm.py --env-id mpe2.simple_spread_v3 \
        --env-kwargs '{"continuous_actions": true}'             # pip install pettingzoo mpe2

Your own task: `--env-id FILE.py:function`; the function makes a PettingZoo parallel environment
whose agents have Box actions. PettingZooTeam says what the team's reward is. Such tasks need this
file alone; simple_spread is in the folder envs/ of the repository.

Letters in shapes: E games at once, N agents, O numbers of an observation, A of an action, Z of a
latent, H steps of a plan, S samples of plans, P of them by actors, K of them kept, B sequences of a
batch, R rows (such as E S or H B). Actions are from -1 to 1.
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
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

# The repository root, for envs/.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

BINS = 101  # of two-hot distributions
LIMIT = 10.0  # symlog values are from -LIMIT to LIMIT
GROUP = 8  # numbers of a latent that sum to 1
DYNAMICS_COEF, REWARD_COEF, VALUE_COEF = 20.0, 0.1, 0.1
RHO = 0.5  # weight of a predicted step, relative to the one before
ENCODER_LR = 0.3  # relative to the other networks
MAX_GRAD_NORM = 20.0
FIRST_STD, LEAST_STD, MOST_STD = 2.0, 0.05, 2.0  # of sampled plans
LOGS = 50  # log points of a run
MOST_STEPS = 10_000  # of a game in an evaluation; it may have no end
# Flags that cannot change when a run is resumed.
FIXED = "seed env_id env_kwargs num_agents model message latent_dim hidden_dim horizon num_envs"
FIXED += " buffer_size save_steps output_dir planner num_samples num_policy_samples num_elites"
FIXED += " iterations mppi_temperature log_density plan_value gamma"
SILENT = "resume evaluate"  # flags whose change is not announced


@dataclass(frozen=True)
class Args:
    # task
    env_id: str = "simple_spread"
    """simple_spread (MPE's, batched); a PettingZoo module such as mpe2.simple_spread_v3; or
    FILE.py:function, which makes a parallel environment"""
    env_kwargs: str = "{}"
    """what a PettingZoo environment is made with, as JSON; those of MPE need
    {"continuous_actions": true}, and take "N", the number of agents"""
    num_agents: int = 2
    """N, agents of simple_spread, and its landmarks (MPE: 3); without effect on other tasks"""
    # method
    model: Literal["seq", "joint", "independent"] = "seq"
    """whom an agent's model sees: its predecessors, or as a control all agents, or none; critics
    and the ranking of plans are common to the team in all three"""
    message: Literal["plan", "actions"] = "plan"
    """what it sees of others, if any: latents and actions, or actions alone (released code)"""
    planner: Literal["mppi", "none"] = "mppi"
    """how to act: by plans, or as a control by the actors alone; then --num-samples to
    --mppi-temperature and --plan-value have no effect"""
    horizon: int = 2
    """H, steps of a plan, and of the sequences that the model learns from"""
    num_samples: int = 24
    """S, plans in an iteration"""
    num_policy_samples: int = 8
    """those of them that the actors make"""
    num_elites: int = 8
    """K, plans that are kept"""
    iterations: int = 2
    """rounds of sampling"""
    mppi_temperature: float = 0.5
    """multiplies values when kept plans are weighed, so a higher one is greedier; with rewards 100
    times larger, a hundredth of it does the same"""
    entropy_coef: float = 3e-3
    """weight of the entropy in the actors' loss (released: 1e-4)"""
    log_density: Literal["true", "released"] = "true"
    """of the policy's Gaussian, in the actors' loss and in losses/entropy; see difference 2"""
    plan_value: Literal["true", "released"] = "true"
    """whether the last reward of a plan counts; see difference 2"""
    latent_dim: int = 32
    """Z, a multiple of 8"""
    hidden_dim: int = 64
    """width of actors and critics; dynamics and rewards have twice Z"""
    gamma: float = 0.9
    """discount"""
    tau: float = 0.02
    """share of the critics that their slow copy takes after each update"""
    # data and optimizers
    total_timesteps: int = 32_000
    """steps of all games together, rounded up"""
    num_envs: int = 32
    """E, games that are stepped together"""
    updates_per_step: float = 4.0
    """updates each time that all E games make a step"""
    buffer_size: int = 100_000
    """steps that are kept, rounded down to whole steps of the E games"""
    batch_size: int = 256
    """B, sequences of an update"""
    learning_starts: int = 2_000
    """steps of random actions before learning begins"""
    learning_rate: float = 1e-3
    """of Adam"""
    # evaluation
    eval_episodes: int = 64
    """games of an evaluation"""
    # bookkeeping
    seed: int = 1
    """seed of environments, networks and sampling"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU if there is one"""
    eval_steps: int = 4_000
    """steps between evaluations, 1/50 of the run at least; 0 evaluates at the end only"""
    save_steps: int = 16_000
    """steps between checkpoints, 1/50 of the run at least; 0 keeps none, nor the trained team.
    Games start anew at each, so let it be many times --num-envs times the length of a game"""
    output_dir: str | None = None
    """run folder; None is runs/<script>__<game>__<seed>__<time>_<process>"""
    resume: str | None = None
    """run folder to continue; its flags are used unless given anew"""
    evaluate: str | None = None
    """run folder to score instead of training; its flags are used unless given anew"""


# --- The method ---------------------------------------------------------------------------------


def simnorm(x: Tensor, groups: int) -> Tensor:
    """Simplicial normalization: softmax in groups of size `groups`. (...,Z) -> (...,Z)"""
    grouped = x.unflatten(-1, (-1, groups))
    weights = (grouped - grouped.amax(-1, keepdim=True)).exp()
    # .softmax(-1) of so few numbers takes a CPU five times as long
    return (weights / weights.sum(-1, keepdim=True)).flatten(-2)


def twohot_encode(x: Tensor) -> Tensor:
    """symlog(x) as weights of the two bins next to it. (...) -> (...,bins)

    Bins go from -LIMIT to LIMIT; a value beyond them counts as the last bin.
    """
    symlog = x.sign() * x.abs().log1p()
    place = (symlog.clamp(-LIMIT, LIMIT) + LIMIT) / (2 * LIMIT) * (BINS - 1)
    bins = torch.arange(BINS, device=x.device)
    return (1 - (place[..., None] - bins).abs()).relu()


def twohot_decode(logits: Tensor, limit: float = LIMIT) -> Tensor:
    """symexp of the mean of the distribution. (...,bins) -> (...)"""
    bins = torch.linspace(-limit, limit, logits.size(-1), device=logits.device)
    mean = logits.softmax(-1) @ bins
    return mean.sign() * mean.abs().expm1()


def twohot_loss(logits: Tensor, x: Tensor) -> Tensor:
    """Cross-entropy to the two-hot target of x. (...,bins), (...) -> (...)"""
    return -(twohot_encode(x) * logits.log_softmax(-1)).sum(-1)


def who_sees_whom(model: str, num_agents: int) -> Tensor:
    """Row i: whose actions are an input of agent i's model. -> (N,N) of 0 and 1"""
    everybody = torch.ones(num_agents, num_agents)
    if model == "joint":
        return everybody
    itself = torch.eye(num_agents)
    return itself if model == "independent" else everybody.tril()


def visible(x: Tensor, sees: Tensor) -> Tensor:
    """What each agent sees of all agents, zeros for the others. (N,R,D), (N,N) -> (N,R,N D)"""
    columns = x.transpose(0, 1)  # (R,N,D)
    return (sees[:, None, :, None] * columns).flatten(2)


def together(x: Tensor) -> Tensor:
    """What a critic sees: all agents side by side. (N,R,D) -> (R,N D)"""
    return x.transpose(0, 1).flatten(1)


def bounded_log_std(x: Tensor) -> Tensor:
    """From -10 to 2."""
    return -10 + 6 * (x.tanh() + 1)


def gaussian_log_density(noise: Tensor, log_std: Tensor, form: str = "true") -> Tensor:
    """Of mean + std noise, (...,A) twice -> (...). `released` is the code's, see the essay."""
    residual = (-0.5 * noise.square() - log_std).sum(-1)
    constant = 0.5 * math.log(2 * math.pi)
    if form == "released":
        return (residual - constant) * noise.size(-1)
    return residual - constant * noise.size(-1)


def squash_term(actions: Tensor) -> Tensor:
    """Log of the slope of tanh, which is subtracted from the density. (...,A) -> (...)"""
    return ((1 - actions.square()).relu() + 1e-6).log().sum(-1)


def estimate_value(
    world, latents: Tensor, actions: Tensor, gamma: float, form: str = "true", limit: float = LIMIT
) -> Tensor:
    """Value of plans in the model of each agent. (N,R,Z), (H,N,R,A) -> (N,R)

    The rewards are those that the agent's own model predicts; what comes after the plan is the mean
    of both critics, with actions of the actors. `released` leaves out the last reward.
    """
    value = torch.zeros_like(latents[..., 0])
    num_rewards = len(actions) - (form == "released")
    for t, step_actions in enumerate(actions):
        inputs = world.inputs(latents, step_actions)
        if t < num_rewards:
            value = value + gamma**t * twohot_decode(world.reward(inputs), limit)
        latents = world.dynamics(inputs)
    q = twohot_decode(world.values(latents, world.sample_actions(latents)), limit)  # (2,R)
    return value + gamma ** len(actions) * q.mean(0)  # eq. 2 of seqwm.md


def mppi_refit(
    values: Tensor, actions: Tensor, num_elites: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The plans of highest value, and the Gaussian around them. values (E,S), actions (...,E,S,A)

    -> mean and std of the next samples (...,E,A), and weights and indices (E,K) of the plans kept.
    """
    best, elites = values.topk(num_elites, -1)
    weights = (temperature * best).softmax(-1)  # eq. 3 of seqwm.md
    index = elites[..., None].expand(*actions.shape[:-2], num_elites, actions.size(-1))
    kept = actions.gather(-2, index)  # (...,E,K,A)
    shares = weights[..., None]
    mean = (shares * kept).sum(-2)
    variance = (shares * (kept - mean.unsqueeze(-2)).square()).sum(-2)
    std = (variance + 1e-6).sqrt().clamp(LEAST_STD, MOST_STD)
    return mean, std, weights, elites


@torch.no_grad()
def plan(world, latents: Tensor, mean: Tensor, args: Args, explore: bool) -> tuple[Tensor, Tensor]:
    """MPPI. latents (N,E,Z) and the mean of the first samples (H,N,E,A) -> actions (N,E,A), and the
    mean fitted to the plans kept (H,N,E,A), where the search of the next step begins."""
    H, N, E, A = mean.shape
    num_drawn = args.num_samples - args.num_policy_samples
    here = latents.repeat_interleave(args.num_policy_samples, 1)
    proposals = []
    for _ in range(H):
        actions = world.sample_actions(here)
        proposals.append(actions.view(N, E, -1, A))
        here = world.dynamics(world.inputs(here, actions))
    proposals = torch.stack(proposals)  # (H,N,E,P,A)

    start = latents.repeat_interleave(args.num_samples, 1)  # (N,E S,Z)
    std = torch.full_like(mean, FIRST_STD)
    for _ in range(args.iterations):
        noise = torch.randn(H, N, E, num_drawn, A, device=mean.device)
        drawn = mean.unsqueeze(3) + std.unsqueeze(3) * noise
        plans = torch.cat([proposals, drawn.clamp(-1, 1)], 3)  # (H,N,E,S,A)
        values = estimate_value(world, start, plans.flatten(2, 3), args.gamma, args.plan_value)
        # (N,E S) -> (E,S): the k-th samples of all agents form one joint plan
        team_values = values.mean(0).view(E, -1)
        mean, std, weights, elites = mppi_refit(
            team_values, plans, args.num_elites, args.mppi_temperature
        )

    # Every agent draws one of the plans kept, and does its first action. The largest quotient is a
    # draw with these chances; torch.multinomial would wait for the device.
    races = torch.empty(E, N, args.num_elites, device=mean.device).exponential_()
    draws = (weights[:, None] / races).argmax(-1)  # (E,N)
    chosen = elites.gather(1, draws).T  # (N,E), indices of plans
    actions = plans[0].take_along_dim(chosen[..., None, None], 2).squeeze(2)  # (N,E,A)
    if explore:
        actions = (actions + std[0] * torch.randn_like(actions)).clamp(-1, 1)
    return actions, mean


class WorldModel(nn.Module):
    """Encoder, dynamics, rewards and actor of every agent, and the critics of the team."""

    def __init__(self, game, args: Args):
        super().__init__()
        N, Z, A = game.num_agents, args.latent_dim, game.action_dim
        sees = who_sees_whom(args.model, N)
        sees_latents = (1 - torch.eye(N)) * sees  # its own latent is an input anyway
        self.hears_latents = args.message == "plan" and bool(sees_latents.any())
        self.register_buffer("sees", sees)
        self.register_buffer("sees_latents", sees_latents)
        self.log_density = args.log_density
        width = Z + N * A + self.hears_latents * N * Z
        self.encoder = network(N, game.observation_dim, [Z], Z, simplicial=True)
        self.dynamics = network(N, width, [2 * Z], Z, simplicial=True)
        self.reward = network(N, width, [2 * Z], BINS)
        self.critics = network(2, N * (Z + A), [args.hidden_dim] * 2, BINS)
        self.actors = nn.ModuleList(actor_network(Z, args.hidden_dim, A) for _ in range(N))
        self.to(game.device)

    def encode(self, observations: Tensor) -> Tensor:
        """(R,N,O) -> (N,R,Z)"""
        return self.encoder(observations.transpose(0, 1))

    def inputs(self, latents: Tensor, actions: Tensor) -> Tensor:
        """What dynamics and rewards depend on. (N,R,Z), (N,R,A) -> (N,R,...)"""
        parts = [latents, visible(actions, self.sees)]
        if self.hears_latents:
            parts.append(visible(latents.detach(), self.sees_latents))
        return torch.cat(parts, -1)  # eq. 1 of seqwm.md

    def values(self, latents: Tensor, actions: Tensor) -> Tensor:
        """Logits of both critics. (N,R,Z), (N,R,A) -> (2,R,bins)"""
        everything = torch.cat([together(latents), together(actions)], -1)
        return self.critics(everything.expand(2, -1, -1))

    def policy(self, agent: int, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Actions that one agent samples, and their log-densities. (R,Z) -> (R,A), (R,)"""
        mean, log_std = self.actors[agent](latents).chunk(2, -1)
        log_std = bounded_log_std(log_std)
        noise = torch.randn_like(mean)
        actions = (mean + log_std.exp() * noise).tanh()
        log_density = gaussian_log_density(noise, log_std, self.log_density)
        return actions, log_density - squash_term(actions)

    @torch.no_grad()
    def sample_actions(self, latents: Tensor) -> Tensor:
        """Actions that all agents sample. (N,R,Z) -> (N,R,A)"""
        return torch.stack([self.policy(agent, own)[0] for agent, own in enumerate(latents)])

    @torch.no_grad()
    def mean_actions(self, latents: Tensor) -> Tensor:
        """The middle of all agents' policies. (N,R,Z) -> (N,R,A)"""
        outputs = [actor(own) for actor, own in zip(self.actors, latents)]
        return torch.stack(outputs).chunk(2, -1)[0].tanh()


# --- Training -----------------------------------------------------------------------------------


def train(args: Args) -> dict[str, float]:
    """Train as the flags say. Returns the scores of the last evaluation."""
    lowest = {"num_envs": 1, "num_agents": 1, "horizon": 1, "batch_size": 1, "eval_episodes": 1}
    lowest |= {"iterations": 1, "num_elites": 1, "num_policy_samples": 0, "total_timesteps": 1}
    lowest |= {"hidden_dim": 1, "mppi_temperature": 0, "eval_steps": 0, "save_steps": 0}
    device = setup(args, **lowest)
    for name in ("learning_rate", "updates_per_step", "tau"):
        if not getattr(args, name) > 0:  # also if it is NaN
            sys.exit(f"--{name.replace('_', '-')} {getattr(args, name)}: must be above 0")
    for name in ("gamma", "tau"):
        if not 0 <= getattr(args, name) <= 1:
            sys.exit(f"--{name} {getattr(args, name)}: must be from 0 to 1")
    if args.num_samples < max(args.num_elites, args.num_policy_samples):
        sys.exit(f"--num-samples {args.num_samples}: elites and those of the actors are among them")
    first_sequences = args.num_envs * args.horizon  # steps that hold one of each game
    for name in ("learning_starts", "buffer_size"):
        steps = getattr(args, name)
        if steps < first_sequences and not args.evaluate:
            flag = f"--{name.replace('_', '-')} {steps}"
            sys.exit(f"{flag}: must be at least --num-envs x --horizon, {first_sequences}")
    if args.latent_dim < 1 or args.latent_dim % GROUP:
        sys.exit(f"--latent-dim {args.latent_dim}: must be a multiple of {GROUP}")
    if args.evaluate:
        return score_run(args, device)
    torch.manual_seed(args.seed)
    game = make_game(args, args.num_envs, args.seed, device)
    learner = Learner(WorldModel(game, args), WorldModel(game, args), args)
    run_dir = open_run(args, Path(args.env_id).name.replace(":", "_"))
    step = 0
    state = load_checkpoint(run_dir, device) if args.resume else None
    if state is not None:
        learner.load(state["learner"])
        step = state["step"]
    board = SummaryWriter(run_dir, purge_step=step + 1)
    board.add_text("hyperparameters", f"```\n{json.dumps(asdict(args), indent=1)}\n```")
    print(f"{run_dir}: {args.model}, {args.num_envs} games of {game.num_agents} agents on {device}")

    # Steps from one log point to the next, and in all; both are multiples of --num-envs.
    interval = math.ceil(args.total_timesteps / LOGS / args.num_envs) * args.num_envs
    end = math.ceil(args.total_timesteps / interval) * interval
    if end <= args.learning_starts:
        print(f"--learning-starts {args.learning_starts}: the run ends before it learns anything")
    if args.resume and step >= end:
        print(f"{run_dir}: has {step} steps already; a larger --total-timesteps goes on")
    begin_anew = True
    num_ended = 0  # games since the last checkpoint
    scores = {}
    while True:
        last = step >= end
        if begin_anew:
            torch.manual_seed(random_seed(args.seed, step))
            game.reset(random_seed(args.seed, "games", step))
            mean = first_mean(game, args)  # of sampled plans
            results = torch.zeros(2, device=device)  # returns and number of games that ended
            returns = torch.zeros(args.num_envs, device=device)  # of games that go on
            begin_anew = False
        if last or is_due(args.eval_steps, step, interval):
            scores = evaluate(learner.world, args, device)
            log(run_dir, board, step, scores)
            print("  ".join(f"{tag} {value:.2f}" for tag, value in scores.items()), flush=True)
        if last:
            break

        began = time.perf_counter()
        learned = []
        for now in range(step, step + interval, args.num_envs):
            # 1. act: at random, then by plans, or the actors alone
            if now < args.learning_starts:
                actions = 2 * torch.rand_like(mean[0]) - 1
            else:
                actions, mean = act(learner.world, game.observations, mean, args, explore=True)
            rewards, over = learner.collect(game, actions.transpose(0, 1))
            mean = shifted(mean, over)
            returns += rewards
            results += torch.stack([(returns * over).sum(), over.sum()])
            returns.masked_fill_(over, 0)

            # 2. learn the model, then one actor after the other
            for update in updates_due(args, now):
                batch = sample_sequences(learner.buffer, args)
                latents, losses = update_model(learner, batch, args)
                actor_losses = update_actors(learner, latents, batch["weights"], update, args)
                update_target(learner.target.critics, learner.world.critics, args.tau)
                learned.append(torch.stack([*losses, *actor_losses]))

        # 3. log and save
        step += interval
        total, games = results.tolist()  # waits for the device
        speed = interval / (time.perf_counter() - began)
        metrics = {"charts/SPS": speed}
        line = f"step {step:>9,}/{end:,}  {speed:5,.0f} steps/s"
        num_ended += games
        if games:
            metrics["charts/episodic_return"] = total / games
            line += f"  return {total / games:7.1f}"
            results.zero_()
        if learned:
            values = torch.stack(learned).mean(0).tolist()
            metrics |= dict(zip(LEARNED, values))
            if not math.isfinite(sum(values)):
                sys.exit("a loss is not finite: try a lower --learning-rate; checkpoints are kept")
        log(run_dir, board, step, metrics)
        left = round(max(0, end - step) / speed)
        print(f"{line}  {left // 60:.0f}:{left % 60:02.0f} left", flush=True)
        if args.save_steps and (step >= end or is_due(args.save_steps, step, interval)):
            if not num_ended and step < end:
                print("games start anew at checkpoints, none ended: more --save-steps in a new run")
            num_ended = 0
            # Games start anew: no sequence may go on over this place.
            learner.buffer.columns["over"][learner.newest_rows()] = True
            save_checkpoint(run_dir, step, {"step": step, "learner": learner.saved()})
            begin_anew = True
    return scores


LEARNED = ("losses/dynamics_loss", "losses/reward_loss", "losses/qf_loss", "losses/grad_norm")
LEARNED += ("losses/actor_loss", "losses/entropy", "losses/qf_values", "train/seqwm/scale")


def update_model(learner: Learner, batch: dict[str, Tensor], args: Args):
    """One step of encoders, dynamics, rewards and critics, through H predicted steps.

    -> predicted latents (N,H B,Z), detached, and the first four metrics of LEARNED.
    """
    world = learner.world
    H, B = batch["rewards"].shape
    N = world.sees.size(0)
    rewards = batch["rewards"].flatten()  # (H B,)
    with torch.no_grad():
        next_latents = world.encode(batch["next_observations"].flatten(0, 1))  # (N,H B,Z)
        next_logits = learner.target.values(next_latents, world.sample_actions(next_latents))
        next_values = twohot_decode(next_logits).amin(0)  # (H B,)
        targets = rewards + args.gamma * (1 - batch["terminated"].flatten().float()) * next_values

    actions = batch["actions"].permute(0, 2, 1, 3)  # (H,N,B,A)
    latents = [world.encode(batch["observations"][0])]
    inputs = []
    for t in range(H):
        inputs.append(world.inputs(latents[t], actions[t]))
        latents.append(world.dynamics(inputs[t]))
    predicted = torch.cat(latents[1:], 1)  # (N,H B,Z)
    rolled = torch.cat(latents[:-1], 1)  # (N,H B,Z): where the actions were taken
    joint_actions = actions.transpose(0, 1).flatten(1, 2)  # (N,H B,A)

    # eq. 4 of seqwm.md; sums over agents
    weights = batch["weights"].flatten() / H  # (H B,)
    errors = (predicted - next_latents).square().mean(-1).sum(0)
    dynamics_loss = (weights * errors).sum() / B
    reward_logits = world.reward(torch.cat(inputs, 1))  # (N,H B,bins)
    reward_loss = (weights * twohot_loss(reward_logits, rewards).sum(0)).sum() / B
    q_logits = world.values(rolled, joint_actions)  # (2,H B,bins)
    value_loss = (weights * twohot_loss(q_logits, targets).mean(0)).sum() / B
    loss = DYNAMICS_COEF * dynamics_loss + REWARD_COEF * reward_loss + VALUE_COEF * value_loss

    learner.optimizer.zero_grad()
    loss.backward()
    norms = []
    for group in learner.optimizer.param_groups:
        norms.append(nn.utils.clip_grad_norm_(group["params"], MAX_GRAD_NORM))
    learner.optimizer.step()
    norm = torch.stack(norms).norm()
    metrics = dynamics_loss / N, reward_loss / N, value_loss, norm
    return rolled.detach(), [value.detach() for value in metrics]


def update_actors(
    learner: Learner, latents: Tensor, weights: Tensor, update: int, args: Args
) -> list[Tensor]:
    """One step of each actor, in random order: who comes later sees new actions of the earlier.

    latents (N,H B,Z), weights (H,B), number of the update, which gives the order -> the last four
    metrics of LEARNED, means over agents.
    """
    world = learner.world
    N = len(latents)
    order = random.Random(random_seed(args.seed, "order", update)).sample(range(N), N)
    H, B = weights.shape
    shares = weights.flatten() / weights.sum()  # for metrics
    weights = weights.flatten() / (H * B)
    actions = world.sample_actions(latents)  # (N,H B,A)
    rows = []
    for agent in order:
        actor = world.actors[agent]
        own, log_density = world.policy(agent, latents[agent])
        joint_actions = torch.cat([actions[:agent], own[None], actions[agent + 1 :]])
        q = twohot_decode(world.values(latents, joint_actions)).mean(0)  # (H B,)
        learner.scale = running_scale(learner.scale, q.detach()[:B])  # N times, as released
        losses = args.entropy_coef * log_density - q / learner.scale  # eq. 5 of seqwm.md
        loss = (weights * losses).sum()
        optimizer = learner.actor_optimizers[agent]
        optimizer.zero_grad()
        loss.backward(inputs=list(actor.parameters()))
        optimizer.step()
        with torch.no_grad():
            actions[agent] = world.policy(agent, latents[agent])[0]
        entropy = -(shares * log_density).sum()
        rows.append(torch.stack([loss, entropy, (shares * q).sum(), learner.scale]).detach())
    return list(torch.stack(rows).mean(0))


def running_scale(scale: Tensor, q: Tensor, rate: float = 0.01) -> Tensor:
    """The scale, moved towards the spread of values (B,), from the 5th to the 95th percentile; a
    spread below 1 counts as 1."""
    spread = (q.quantile(0.95) - q.quantile(0.05)).clamp(min=1.0)
    return scale.lerp(spread, rate)


@torch.no_grad()
def update_target(target: nn.Module, online: nn.Module, tau: float) -> None:
    """target <- (1 - tau) target + tau online, in place."""
    torch._foreach_lerp_([*target.parameters()], [*online.parameters()], tau)


def updates_due(args: Args, step: int) -> range:
    """Numbers (1, 2, ...) of the gradient steps that are due when all games have made this step."""
    before = max(0, step - args.learning_starts)
    after = max(0, step + args.num_envs - args.learning_starts)
    rate = args.updates_per_step / args.num_envs
    return range(int(before * rate) + 1, int(after * rate) + 1)


def first_mean(game, args: Args) -> Tensor:
    """The mean of the first samples in a new game. (H,N,E,A)"""
    size = (args.horizon, game.num_agents, game.num_envs, game.action_dim)
    return torch.zeros(size, device=game.device)


def shifted(mean: Tensor, over: Tensor) -> Tensor:
    """Where the next plans begin: the last ones, a step later; nothing in new games. (H,N,E,A)"""
    later = torch.cat([mean[1:], torch.zeros_like(mean[:1])])
    return later.masked_fill(over[:, None], 0)


def act(world: WorldModel, observations: Tensor, mean: Tensor, args: Args, explore: bool):
    """Actions (N,E,A), and the mean as plan returns it. observations (E,N,O), mean (H,N,E,A)"""
    with torch.no_grad():
        latents = world.encode(observations)
    if args.planner == "mppi":
        return plan(world, latents, mean, args, explore)
    return (world.sample_actions(latents) if explore else world.mean_actions(latents)), mean


def evaluate(world: WorldModel, args: Args, device: torch.device) -> dict[str, float]:
    """Returns of whole games, by plans if there are any, and by the actors alone."""
    scores = play_games(world, args, device)
    tags = {"eval/return_mean": scores.mean(), "eval/return_std": scores.std(correction=0)}
    if args.planner != "none":
        scores = play_games(world, replace(args, planner="none"), device)
        tags["eval/actor/return_mean"] = scores.mean()
    return {tag: value.item() for tag, value in tags.items()}


@torch.no_grad()
def play_games(world: WorldModel, args: Args, device: torch.device) -> Tensor:
    """Return of one game in each environment. (eval_episodes,)

    Nobody adds noise: actors play their means, but each agent draws one of the plans kept.
    """
    game = evaluation_game(replace(args, planner="none"), device)  # the same for plans
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):  # evaluations do not change the training
        torch.manual_seed(args.seed)
        game.reset(random_seed(args.seed, "evaluation"))
        mean = first_mean(game, args)
        returns = torch.zeros(game.num_envs, device=device)
        playing = torch.ones(game.num_envs, dtype=torch.bool, device=device)
        for step in range(MOST_STEPS):
            if step == 1000:
                advice = "give the game a time limit, or take fewer --eval-episodes"
                print(f"{playing.sum()} games go on after 1,000 steps: {advice}", flush=True)
            actions, mean = act(world, game.observations, mean, args, explore=False)
            rewards, _, over, _ = game.step(actions.transpose(0, 1))
            mean = shifted(mean, over)
            returns += rewards * playing
            playing &= ~over
            if not playing.any():
                return returns
    print(f"{playing.sum()} games did not end in {MOST_STEPS} steps, and count so far", flush=True)
    return returns


# ================================================================================================
# Below: what the method stands on, networks, environments, checkpoints and logs.
# ================================================================================================


# --- Networks and learner -----------------------------------------------------------------------


class Linear(nn.Module):
    """Linear layers side by side. (copies,R,inputs) -> (copies,R,outputs)"""

    def __init__(self, copies: int, inputs: int, outputs: int):
        super().__init__()
        bound = inputs**-0.5  # as in nn.Linear
        self.weight = nn.Parameter(torch.empty(copies, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(copies, 1, outputs).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


class LayerNorm(nn.Module):
    """nn.LayerNorm, with weights for each copy. (copies,R,size) -> (copies,R,size)"""

    def __init__(self, copies: int, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(copies, 1, size))
        self.bias = nn.Parameter(torch.zeros(copies, 1, size))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:]) * self.weight + self.bias


class SimNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return simnorm(x, GROUP)


def network(copies: int, inputs: int, hidden: list[int], outputs: int, simplicial: bool = False):
    """Networks side by side. Those that are not simplicial give logits, and their last weights
    (not the biases) start at 0."""
    layers = []
    for width in hidden:
        layers += [Linear(copies, inputs, width), LayerNorm(copies, width), nn.SiLU()]
        inputs = width
    last = Linear(copies, inputs, outputs)
    if simplicial:
        return nn.Sequential(*layers, last, LayerNorm(copies, outputs), SimNorm())
    nn.init.zeros_(last.weight)
    return nn.Sequential(*layers, last)


def actor_network(latent_dim: int, hidden_dim: int, action_dim: int) -> nn.Module:
    """Means and log-stds of one agent. An actor is a network of its own, because they learn one
    after the other. (R,Z) -> (R,2A)"""
    return nn.Sequential(
        nn.Linear(latent_dim, hidden_dim),
        nn.LayerNorm(hidden_dim),
        nn.SiLU(),
        nn.Linear(hidden_dim, hidden_dim),  # no activation after it, as in the released code
        nn.Linear(hidden_dim, 2 * action_dim),
    )


class Learner:
    """The world model, a slow copy of its critics, optimizers and replay."""

    def __init__(self, world: WorldModel, target: WorldModel, args: Args):
        self.world = world
        self.target = target.requires_grad_(False)  # only its critics are used
        self.target.critics.load_state_dict(world.critics.state_dict())
        rate = args.learning_rate
        kinds = {"encoder": rate * ENCODER_LR, "dynamics": rate, "reward": rate, "critics": rate}
        groups = [
            {"params": list(getattr(world, kind).parameters()), "lr": lr}
            for kind, lr in kinds.items()
        ]
        self.optimizer = torch.optim.Adam(groups, fused=True)
        self.actor_optimizers = [
            torch.optim.Adam(actor.parameters(), rate, fused=True) for actor in world.actors
        ]
        self.scale = torch.ones((), device=world.sees.device)
        self.buffer = ReplayBuffer(args.buffer_size // args.num_envs * args.num_envs)
        self.num_envs = args.num_envs

    def collect(self, game, actions: Tensor) -> tuple[Tensor, Tensor]:
        """A step of all games, kept for learning. actions (E,N,A) -> rewards, which games are over,
        (E,) each"""
        observations = game.observations
        # next_observations are before a reset; over counts time limits, terminated does not
        rewards, terminated, over, next_observations = game.step(actions)
        self.buffer.add(
            observations=observations,
            actions=actions,
            rewards=rewards,
            terminated=terminated,
            over=over,
            next_observations=next_observations,
        )
        return rewards, over

    def newest_rows(self) -> Tensor:
        """Where the buffer has the last step of all games. (E,)"""
        rows = torch.arange(self.buffer.count - self.num_envs, self.buffer.count)
        return rows % self.buffer.size

    def saved(self) -> dict:
        """What a checkpoint holds."""
        return {
            "world": self.world.state_dict(),
            "target": self.target.critics.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "actor_optimizers": [optimizer.state_dict() for optimizer in self.actor_optimizers],
            "scale": self.scale,
            "columns": self.buffer.columns,
            "count": self.buffer.count,
        }

    def load(self, saved: dict) -> None:
        load_weights(self.world, saved["world"])
        self.target.critics.load_state_dict(saved["target"])
        states = [saved["optimizer"], *saved["actor_optimizers"]]
        for optimizer, state in zip([self.optimizer, *self.actor_optimizers], states):
            rates = [group["lr"] for group in optimizer.param_groups]
            optimizer.load_state_dict(state)
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate  # of the flags, which may have changed
        self.scale = saved["scale"]
        self.buffer.columns = saved["columns"]
        self.buffer.count = saved["count"]


# --- Games and replay buffer --------------------------------------------------------------------


def make_game(args: Args, num_envs: int, seed: int, device):
    """`num_envs` copies of the task."""
    if args.env_id == "simple_spread":
        try:
            from envs.simple_spread import SimpleSpread
        except ImportError:
            sys.exit(
                "--env-id simple_spread: needs the folder envs/ of the repository; without it, "
                "--env-id takes a module of PettingZoo such as mpe2.simple_spread_v3 "
                "(pip install pettingzoo mpe2), or FILE.py:function"
            )
        if args.env_kwargs != "{}":
            sys.exit("--env-kwargs: is for tasks of PettingZoo; simple_spread has --num-agents")
        return SimpleSpread(num_envs, seed, device, args.num_agents)
    return PettingZooTeam(args, num_envs, seed, device)


@cache
def evaluation_game(args: Args, device):
    """Games for all evaluations: hundreds of environments take long to make."""
    return make_game(args, args.eval_episodes, 0, device)


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


def sample_sequences(buffer: ReplayBuffer, args: Args) -> dict[str, Tensor]:
    """B random sequences of H steps, with replacement: columns (H,B,...).

    `weights` (H,B) are RHO^t, and 0 for steps of the next game. Rows r and r + E of the buffer are
    successive steps of a game.
    """
    device = buffer.columns["rewards"].device
    E = args.num_envs
    filled = min(buffer.count, buffer.size)
    starts = torch.randint(filled - (args.horizon - 1) * E, (args.batch_size,), device=device)
    steps = torch.arange(args.horizon, device=device)[:, None]
    rows = (buffer.count - filled + starts + steps * E) % buffer.size  # (H,B)
    batch = {name: column[rows] for name, column in buffer.columns.items()}
    going = (~batch["over"]).cumprod(0).roll(1, 0).float()  # 0 after the last step of a game
    going[0] = 1
    batch["weights"] = RHO**steps * going
    return batch


# --- PettingZoo tasks ---------------------------------------------------------------------------


class PettingZooTeam:
    """E copies of a parallel environment of PettingZoo, stepped one after the other.

    The team's reward is the mean over the agents' rewards. Observations are made vectors and padded
    with zeros to the longest. Actions from -1 to 1 are stretched as action_ends says. An agent that
    has left the game has reward 0 and observes zeros. Where one terminates, zeros take the place of
    what it observes last.
    """

    def __init__(self, args: Args, num_envs: int, seed: int, device):
        env_id = args.env_id
        self.env_id = env_id
        make = find_maker(env_id)
        try:
            kwargs = json.loads(args.env_kwargs)
            self.envs = [make(**kwargs) for _ in range(num_envs)]
        except (ValueError, TypeError) as error:
            if args.env_kwargs == "{}":
                raise  # an error in the task, or an argument that it needs
            sys.exit(f"--env-kwargs {args.env_kwargs} --env-id {env_id}: {error}")
        atexit.register(self.close)
        env = self.envs[0]
        self.num_envs = num_envs
        self.device = torch.device(device)
        self.agents = list(getattr(env, "possible_agents", []))
        if not self.agents:
            sys.exit(f"--env-id {env_id}: has no possible_agents, so is no parallel environment")
        self.num_agents = len(self.agents)
        self.spaces = {agent: env.action_space(agent) for agent in self.agents}
        for agent, space in self.spaces.items():
            if not isinstance(space, gym.spaces.Box) or space.dtype.kind != "f":
                sys.exit(
                    f"--env-id {env_id}: actions of {agent} must be Box (of real numbers), not "
                    f"{space}; games of MPE take --env-kwargs '{{\"continuous_actions\": true}}'"
                )
        sizes = {agent: math.prod(space.shape) for agent, space in self.spaces.items()}
        if len(set(sizes.values())) > 1:
            sys.exit(f"--env-id {env_id}: all agents need actions of one size, not {sizes}")
        self.action_dim = max(sizes.values())
        self.ends = {agent: action_ends(space)[:2] for agent, space in self.spaces.items()}
        begun = env.reset(seed=seed % 2**31)
        if not isinstance(begun, tuple) or len(begun) != 2:
            sys.exit(f"--env-id {env_id}: reset() must return observations and infos, two dicts")
        if not hasattr(env, "agents"):
            sys.exit(f"--env-id {env_id}: has no agents, a list of those who act now")
        missing = [agent for agent in self.agents if agent not in begun[0]]
        if missing:
            sys.exit(f"--env-id {env_id}: reset() gives no observation of {missing[0]}")
        self.observation_dim = max(len(as_vector(begun[0][agent])) for agent in self.agents)
        self.reset(seed)

    def close(self) -> None:
        for env in self.envs:
            if hasattr(env, "close"):
                env.close()

    def reset(self, seed: int) -> None:
        """New games."""
        self.random = np.random.default_rng(seed % 2**63)
        begun = np.stack([self.begin(env) for env in self.envs])
        self.observations = self.to_device(begun)  # (E,N,O)

    def begin(self, env) -> np.ndarray:
        """What all agents see in a new game. (N,O)"""
        observations, _ = env.reset(seed=int(self.random.integers(2**31)))
        found = self.describe(observations)
        check_finite(self.env_id, observations=found)
        return found

    def describe(self, observations: dict) -> np.ndarray:
        """What all agents see. (N,O)"""
        rows = np.zeros((self.num_agents, self.observation_dim), np.float32)
        for row, agent in zip(rows, self.agents):
            if agent in observations:
                numbers = as_vector(observations[agent])
                if len(numbers) > len(row):
                    sizes = f"{len(numbers)} numbers, in the first game at most {len(row)}"
                    sys.exit(f"--env-id {self.env_id}: {agent} observes {sizes}")
                row[: len(numbers)] = numbers
        return rows

    def to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def to_env(self, agent: str, action: np.ndarray) -> np.ndarray:
        """From -1 to 1, (A,), -> what step() takes."""
        low, high = self.ends[agent]
        return as_actions((low + (high - low) * (action + 1) / 2)[None], self.spaces[agent])[0]

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """actions (E,N,A) -> rewards, whether the game ended, and whether it is over, ended or cut
        off, (E,) each; and what agents see before new games begin (E,N,O)."""
        rewards = np.zeros(self.num_envs, np.float32)
        ended = np.zeros(self.num_envs, bool)
        over = np.zeros(self.num_envs, bool)
        following = np.zeros(self.observations.shape, np.float32)
        current = np.zeros_like(following)  # with new games in place of those that are over
        rows = actions.cpu().numpy()
        if not np.isfinite(rows).all():
            sys.exit("an action is not finite: try a lower --learning-rate; checkpoints are kept")
        for game, (env, row) in enumerate(zip(self.envs, rows)):
            moves = dict(zip(self.agents, row))
            chosen = {agent: self.to_env(agent, moves[agent]) for agent in env.agents}
            found = env.step(chosen)
            if len(found) != 5 or not all(isinstance(part, dict) for part in found[:4]):
                wanted = "observations, rewards, terminations, truncations and infos of each agent"
                sys.exit(f"--env-id {self.env_id}: step() must return five dicts, {wanted}")
            observations, gains, terminated, truncated, _ = found
            rewards[game] = sum(np.float64(gain).sum() for gain in gains.values()) / self.num_agents
            try:
                ended[game] = all(terminated[agent] for agent in chosen)
                over[game] = all(terminated[agent] or truncated[agent] for agent in chosen)
                present = {agent: observations[agent] for agent in chosen if not terminated[agent]}
            except KeyError as error:
                words = "what it returns must name all agents that have acted"
                sys.exit(f"--env-id {self.env_id}: step() leaves out {error}; {words}")
            following[game] = self.describe(present)
            current[game] = self.begin(env) if over[game] else following[game]
        check_finite(self.env_id, observations=following, rewards=rewards)
        self.observations = self.to_device(current)
        return tuple(map(self.to_device, (rewards, ended, over, following)))


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


def as_vector(observation) -> np.ndarray:
    """All numbers of an observation: of a dictionary in the order of its names."""
    if isinstance(observation, dict):
        observation = tuple(observation[name] for name in sorted(observation))
    if isinstance(observation, tuple):
        return np.concatenate([as_vector(part) for part in observation])
    return np.ravel(observation)


def action_ends(space: gym.spaces.Box) -> tuple[np.ndarray, np.ndarray, bool]:
    """Actions that -1 and 1 stand for, (A,) each, and whether all of them are bounds of the space.

    Where there is no bound, or one of 1e18 and more, it is 2 away from the other; or -1 and 1.
    """
    low, high = space.low.ravel(), space.high.ravel()
    has_low, has_high = low > -1e18, high < 1e18
    low = np.where(has_low, low, np.where(has_high, high - 2, -1))
    high = np.where(has_high, high, low + 2)
    return np.float32(low), np.float32(high), bool(np.all(has_low & has_high))


def as_actions(values: np.ndarray, space: gym.Space) -> np.ndarray:
    """Rows (N,A) in the shape and type of the space, clipped to it. Discrete ones count from 0."""
    values = values.reshape(len(values), *space.shape).astype(space.dtype, copy=False)
    if isinstance(space, gym.spaces.Box):
        return np.minimum(np.maximum(values, space.low), space.high)
    return values + getattr(space, "start", 0)


def check_finite(env_id: str, **arrays) -> None:
    """Exit if a task gives NaN, infinity or None."""
    for name, values in arrays.items():
        if not np.isfinite(np.asarray(values, np.float64)).all():
            sys.exit(f"--env-id {env_id}: its {name} are not finite numbers; mend the task")


def score_run(args: Args, device) -> dict[str, float]:
    """--evaluate: scores of the newest checkpoint of a run."""
    saved = json.loads(Path(args.evaluate, "args.json").read_text())
    for name in ("env_id", "num_agents", "model", "message", "latent_dim", "hidden_dim"):
        if getattr(args, name) != saved[name]:
            flag = f"--{name.replace('_', '-')} {getattr(args, name)}"
            sys.exit(f"{flag}: cannot change with --evaluate, the run began with {saved[name]}")
    world = load_world(args.evaluate, args, device)
    scores = evaluate(world, args, device)
    for tag, value in scores.items():
        print(f"{tag} {value:.3f}")
    return scores


def load_world(run_dir: str, args: Args, device) -> WorldModel:
    """The newest world model of a run with these flags."""
    world = WorldModel(make_game(args, 1, 0, device), args)
    state = load_checkpoint(run_dir, device)
    if state is None:
        sys.exit(f"{run_dir}: no checkpoint; --save-steps 0 keeps none, or it is too early")
    load_weights(world, state["learner"]["world"])
    return world


def load_weights(world: WorldModel, weights: dict[str, Tensor]) -> None:
    """Exit if the task has other sizes than the one of these weights."""
    try:
        world.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        sys.exit(f"the networks of this run do not fit the task; has it changed? ({reason:.200})")


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
