# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.6", "numpy>=2.0", "gymnasium[mujoco]>=1.1", "tyro>=1.0", "tensorboard>=2.18",
# ]
# ///
"""MDPO, mirror descent policy optimization. Each iteration raises the advantage and pays for the KL
divergence from the policy that gathered the data, by several gradient steps. No ratio is clipped:
the divergence keeps the new policy near the old one.

Tomar, Shani, Efroni & Ghavamzadeh, Mirror Descent Policy Optimization, arXiv 2005.09814, after the
authors' code; the text was not available.

On-policy, rollout_loss joins mdpo_loss and gaussian_kl. Off-policy it is SAC with a network for V,
a fixed weight of the entropy, and one more term in actor_loss; the old policy is a copy that is
replaced every m steps. For another divergence change kl in rollout_loss, or off-policy squashed_log
and the old policy's term in actor_loss.

Differs from the authors' code:
1. Off-policy training acts with sampled actions. Their loop takes the likeliest one, without noise.
2. 1e-8 is added to the std of the advantages, which may be 0.
3. The value of the last state is added where the time limit cut off an episode.
4. N is 8. Off-policy, T steps of all N are followed by N T gradient steps.
5. Off-policy networks begin with orthogonal weights, and the first 10,240 actions are those of the
   first policy, tanh of nearly a standard normal. Theirs are uniform.
6. On-policy, Adam begins at 3e-3, not 3e-4, and where an action is bounded, -1 and 1 of the
   Gaussian are its ends. mdpo.md lists smaller differences.
The rollout and its normalization are those of unimodal_poisson.py, our PPO.

    python algorithms/mdpo.py                                # HalfCheetah-v5, CPU, 1 minute
    python algorithms/mdpo.py --sgd-steps 1                  # the policy gradient
    python algorithms/mdpo.py --method off_policy --total-timesteps 50000
    python algorithms/mdpo.py --method off_policy --kl-coef 0.2       # SAC with one Q

Shapes: T steps, N environments, B rows of a batch, O numbers observed, A action dimensions.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import random
import runpy
import sys
import time
import traceback
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers.utils import RunningMeanStd
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

with contextlib.suppress(ImportError):  # models in gymnasium make MuJoCo print and log warnings
    import mujoco

    mujoco.set_mju_user_warning(
        lambda text: None if "deprecated" in text else print(text, file=sys.stderr)
    )

# Flags that cannot change when a run is resumed.
FIXED = "env_id env_kwargs method tsallis_q gamma num_envs num_steps seed save_steps output_dir"
SILENT = "resume evaluate"  # flags whose change is not announced
SPACES = (gym.spaces.Box,)  # of actions
MOST_STEPS = 20_000  # of an episode in an evaluation; where there is no time limit, it may not end


@dataclass
class Args:
    env_id: str = "HalfCheetah-v5"
    """gymnasium task, or FILE.py:make, where make(num_envs) returns a vector environment"""
    env_kwargs: str = "{}"
    """what gymnasium.make passes on to the task, as JSON"""
    method: Literal["on_policy", "off_policy"] = "on_policy"
    """learn from the newest rollout, or as SAC does (bounded actions only)"""
    sgd_steps: int | None = None
    """m, gradient steps until the old policy is replaced; None is 10, or 1000 off-policy"""
    tsallis_q: float = 1.0
    """1 is the KL divergence; above 1, up to 2, the authors' Tsallis form, see mdpo.md"""
    kl_coef: float = 1.0
    """off-policy: c, the weight of log pi; it is --ent-coef + 1 / t for the step size t of mirror
    descent. At --ent-coef, the least, this is SAC's actor loss. Rewards are not normalized: where
    they are ten times as large, multiply --kl-coef and --ent-coef by ten"""
    ent_coef: float = 0.2
    """off-policy: lambda, weight of the entropy"""
    total_timesteps: int = 500_000
    """environment steps, rounded down to whole rollouts (authors: 10,000,000)"""
    num_envs: int = 8
    """N, environments that are stepped together (authors: 1)"""
    num_steps: int | None = None
    """T, steps of each environment in a rollout; None is 256, or 16 off-policy"""
    learning_rate: float | None = None
    """Adam's; None is 3e-3, which falls nearly to 0 as the step size t does, or 3e-4 off-policy
    (authors: 3e-4 for both)"""
    learning_starts: int = 10_000
    """off-policy: rollouts that begin earlier are only stored"""
    gamma: float = 0.99
    """discount"""
    gae_lambda: float = 0.95
    """on-policy: lambda of generalized advantage estimation"""
    # bookkeeping
    seed: int = 1
    """seed of environments, networks and sampling"""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """device of the networks and the replay buffer; auto takes a GPU if there is one"""
    eval_steps: int = 0
    """environment steps between evaluations; 0 evaluates at the end only"""
    eval_episodes: int = 10
    """episodes of an evaluation, with the likeliest and with sampled actions; 0 disables them"""
    save_steps: int = 5_120
    """steps of each environment between checkpoints; 0 keeps none, nor the trained policy. All
    episodes start anew at each of them, so let it be several times the length of an episode"""
    output_dir: str | None = None
    """run folder; None is runs/<script>__<task>__<seed>__<time>_<process>"""
    resume: str | None = None
    """run folder to continue; its flags are used unless given anew"""
    evaluate: str | None = None
    """run folder to score instead of training; its flags are used unless given anew"""


# --- The method ---------------------------------------------------------------------------------


def mdpo_loss(ratio, advantages, kl, step_size):
    """On-policy loss, the negated objective of an iteration. (B,) each, and a number -> scalar

    ratio is the action's probability, new over old; kl is KL(new || old). At the old policy the
    ratio is 1 and the gradient of a KL is 0: the first step follows the policy gradient.
    """
    return kl.mean() / step_size - (ratio * advantages).mean()  # eq. 1 of mdpo.md


def gaussian_kl(mean, log_std, old_mean, old_log_std):
    """KL(new || old) of Gaussians with independent dimensions. (B,A) -> (B,)"""
    squares = (2 * log_std).exp() + (mean - old_mean).square()
    in_old_variances = squares * (-2 * old_log_std).exp()
    return (old_log_std - log_std + 0.5 * in_old_variances - 0.5).sum(-1)


def tsallis_log(x, q):
    """log_q(x) = (x^(1 - q) - 1) / (1 - q); q = 1 is ln(x). An x below 1e-6 counts as 1e-6."""
    x = x.clamp(min=1e-6)
    if q == 1:
        return x.log()
    return (x ** (1 - q) - 1) / (1 - q)


def actor_loss(log_probs, old_log_probs, q_values, kl_coef, ent_coef, tsallis_q):
    """Off-policy loss of actions that the policy sampled. (B,) each -> scalar

    With kl_coef = ent_coef + 1 / t it is ent_coef log pi + (log pi - log pi_old) / t - Q. The
    authors' code also multiplies the old policy's term by tsallis_q.
    """
    penalty = kl_coef * log_probs + tsallis_q * (ent_coef - kl_coef) * old_log_probs
    return (penalty - q_values).mean()  # eq. 2 of mdpo.md


def log_density(x, mean, log_std):
    """Of a Gaussian, in each dimension. (B,A) each -> (B,A)"""
    errors = (x - mean) * (-log_std).exp()  # in stds
    return -0.5 * errors.square() - log_std - 0.5 * math.log(2 * math.pi)


def squashed_log(x, mean, log_std, tsallis_q):
    """Sum over dimensions of log_(2 - tsallis_q) of the density of tanh(x). -> (B,)"""
    log_slope = (1 - x.tanh().square() + 1e-6).log()
    density = (log_density(x, mean, log_std) - log_slope).exp()
    return tsallis_log(density, 2 - tsallis_q).sum(-1)


def gae(rewards, dones, values, last_values, gamma, gae_lambda) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation, arXiv 1506.02438 eq. 16. -> advantages and returns (T,N)

    rewards, dones, values (T,N), last_values (N,). dones[t] says that step t ended an episode, so
    that nothing after it counts.
    """
    alive = 1 - dones.to(values.dtype)
    next_values = torch.cat([values[1:], last_values[None]])
    deltas = rewards + gamma * alive * next_values - values
    decay = gamma * gae_lambda * alive
    advantages = torch.empty_like(deltas)
    advantage = torch.zeros_like(last_values)
    for t in reversed(range(len(deltas))):
        advantage = torch.addcmul(deltas[t], decay[t], advantage)
        advantages[t] = advantage
    return advantages, advantages + values


# --- Training -----------------------------------------------------------------------------------


def train(args):
    """Train as the flags say."""
    lowest = {"num_envs": 1, "num_steps": 1, "sgd_steps": 1}
    lowest |= {"save_steps": 0, "eval_steps": 0, "learning_rate": 0}
    device = setup(args, eval_episodes=1 if args.evaluate else 0, **lowest)
    off_policy = args.method == "off_policy"
    if off_policy and args.kl_coef < args.ent_coef:
        sys.exit(f"--kl-coef {args.kl_coef:g}: must be at least --ent-coef, {args.ent_coef:g}")
    is_given = (args.kl_coef, args.ent_coef) != (Args.kl_coef, Args.ent_coef)
    is_new = not (args.resume or args.evaluate)
    if is_new and is_given and not off_policy:
        sys.exit("--kl-coef, --ent-coef: act with --method off_policy alone")
    if not 1 <= args.tsallis_q <= 2:
        sys.exit(f"--tsallis-q {args.tsallis_q:g}: must be from 1 to 2")
    args.sgd_steps = args.sgd_steps or (1000 if off_policy else 10)
    args.num_steps = args.num_steps or (16 if off_policy else 256)
    if args.learning_rate is None:
        args.learning_rate = 3e-4 if off_policy else 3e-3
    rollout_size = args.num_envs * args.num_steps
    last_step = args.total_timesteps // rollout_size * rollout_size
    if last_step <= 0:
        sys.exit(f"--total-timesteps: fewer than the {rollout_size} steps of one rollout")
    torch.manual_seed(args.seed)
    envs = make_envs(args, args.num_envs)
    agent = Agent(envs, args).to(device)
    run_dir = args.evaluate or open_run(args, Path(args.env_id).name.replace(":", "_"))
    state = load_checkpoint(run_dir, device)  # None in a new run
    if args.evaluate and state is None:
        sys.exit(f"{run_dir}: no checkpoint; --save-steps 0 keeps none, or it is too early")
    if state is not None:
        try:
            agent.load_state_dict(state["agent"])
        except RuntimeError:
            sys.exit(f"{run_dir}: its networks are not those of these flags")
    if args.evaluate:
        return evaluate(agent, args)
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)
    step = 0
    replay = {}  # off-policy: columns (total_timesteps,...), filled up to the step
    if state is not None:
        step = state["step"]
        optimizer.load_state_dict(state["optimizer"])
        optimizer.param_groups[0]["lr"] = args.learning_rate  # a flag that may have changed
        store(replay, 0, state["replay"], args)
        if step >= last_step:
            print(f"{run_dir}: has {step} steps already; a larger --total-timesteps goes on")
    board = SummaryWriter(run_dir, purge_step=step + 1)
    board.add_text("hyperparameters", f"```\n{json.dumps(asdict(args), indent=1)}\n```")
    size = f"{args.num_envs} x {args.num_steps}"
    print(f"{run_dir}: {args.method}, {size} steps on {device}, from step {step}")
    if off_policy and last_step - rollout_size < args.learning_starts:
        print(f"--learning-starts {args.learning_starts}: the run ends before it learns anything")

    unfinished = None
    while True:
        eval_due = step > 0 and is_due(args.eval_steps, step, rollout_size)
        last = step >= last_step
        if args.eval_episodes and (last or eval_due):
            log(run_dir, board, step, evaluate(agent, args))
        if last:
            break
        if not unfinished:  # at the beginning and after each checkpoint, see save_checkpoint
            torch.manual_seed(random_seed(args.seed, step))
            unfinished = Unfinished(envs, random_seed(args.seed, "episodes", step) % 2**31)

        # 1. act
        began = time.perf_counter()
        rollout, episodes = act(envs, agent, unfinished, args)

        # 2. learn on-policy from this rollout: first the policy, then the values
        losses = {}
        if not off_policy:
            # t_k = 1 - (k - 1) / K, as in the authors' code, in iteration k of 0, ..., K - 1
            step_size = 1 - (step - rollout_size) / last_step
            batch = learning_batch(rollout, agent, unfinished, args)
            # After it, so that observations are normalized as they were for the policy that acted.
            agent.observation_stats.update(np.concatenate(rollout[0]))
            optimizer.param_groups[0]["lr"] = args.learning_rate * step_size
            losses = update_on_policy(agent, optimizer, batch, step_size, args)

        # 3. or off-policy from all transitions so far, with a gradient step for each new one
        else:
            num_filled = step + rollout_size
            store(replay, step, transitions(rollout, device), args)
            for i in range(step, num_filled):
                if step >= args.learning_starts:
                    rows = torch.randint(num_filled, (256,), device=device)
                    batch = {name: column[rows] for name, column in replay.items()}
                    losses = update_off_policy(agent, optimizer, batch, args)
                if i % args.sgd_steps == 0:
                    update_target(agent.old_actor, agent.actor, 1.0)

        # 4. log and save
        step += rollout_size
        metrics = {f"losses/{name}": value.item() for name, value in losses.items()}
        if not math.isfinite(sum(metrics.values())):
            sys.exit("a loss is not finite: try a lower --learning-rate; checkpoints are kept")
        if episodes:
            returns, lengths = np.mean(episodes, 0)
            metrics["charts/episodic_return"] = returns
            metrics["charts/episodic_length"] = lengths
        metrics["charts/SPS"] = rollout_size / (time.perf_counter() - began)
        log(run_dir, board, step, metrics)
        report(step, last_step, metrics)
        save_due = is_due(args.save_steps * args.num_envs, step, rollout_size)
        if args.save_steps and (step == last_step or save_due):
            state = {"step": step, "agent": agent.state_dict(), "optimizer": optimizer.state_dict()}
            state["replay"] = {name: column[:step].clone() for name, column in replay.items()}
            save_checkpoint(run_dir, step, state)
            unfinished = None


def rollout_loss(agent, batch, step_size, args):
    """On-policy loss of a whole rollout, and the mean divergence from the policy that acted."""
    new = agent.gaussian(batch["observations"])
    old = batch["mean"], batch["log_std"]
    actions = batch["actions"]
    logprobs = log_density(actions, *new).sum(-1)
    old_logprobs = log_density(actions, *old).sum(-1)
    if args.tsallis_q == 1:
        kl = gaussian_kl(*new, *old)
    else:  # this is no divergence, see mdpo.md
        q = 2 - args.tsallis_q
        kl = tsallis_log(logprobs.exp(), q) - tsallis_log(old_logprobs.exp(), q)
    ratio = (logprobs - old_logprobs).exp()
    return mdpo_loss(ratio, batch["advantages"], kl, step_size), kl.mean()


def update_on_policy(agent, optimizer, batch, step_size, args):
    """m gradient steps of the policy with the whole rollout, then five epochs of the values.

    Value minibatches have 128 rows. -> metrics; the value loss is that of the last minibatch
    """
    for _ in range(args.sgd_steps):
        loss, _ = rollout_loss(agent, batch, step_size, args)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
    policy_loss, kl = rollout_loss(agent, batch, step_size, args)  # after the last step

    clip = 0.2 * step_size
    for _ in range(5):
        for rows in torch.randperm(len(batch["values"]), device=agent.device).split(128):
            values = agent.values(batch["observations"][rows])
            old_values = batch["values"][rows]
            returns = batch["returns"][rows]
            clipped = old_values + (values - old_values).clamp(-clip, clip)
            loss = torch.max((values - returns).square(), (clipped - returns).square()).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return {"policy_loss": policy_loss, "kl": kl, "value_loss": loss}


@torch.no_grad()
def update_target(target: nn.Module, online: nn.Module, tau: float) -> None:
    """target <- (1 - tau) target + tau online, in place."""
    torch._foreach_lerp_([*target.parameters()], [*online.parameters()], tau)


def update_off_policy(agent, optimizer, batch, args):
    """One gradient step of all networks with rows of the replay buffer. -> metrics"""
    observations = batch["observations"]

    # the policy, with one Q; gradients also reach the actions through Q and the old policy
    mean, log_std = agent.gaussian(observations)
    x = mean + log_std.exp() * torch.randn_like(mean)
    log_probs = squashed_log(x, mean, log_std, args.tsallis_q)
    old = agent.gaussian(observations, agent.old_actor)
    old_log_probs = squashed_log(x, *old, args.tsallis_q)
    q_values = agent.q_values(observations, x.tanh())
    coefficients = args.kl_coef, args.ent_coef, args.tsallis_q
    policy_loss = actor_loss(log_probs, old_log_probs, q_values[0], *coefficients)
    # not the method: the authors keep means and log-stds small
    policy_loss += 1e-3 * (mean.square() + log_std.square()).mean()

    # the values
    with torch.no_grad():
        next_values = agent.target_critic(batch["next_observations"])[..., 0]
        q_targets = batch["rewards"] + args.gamma * (1 - batch["terminated"]) * next_values  # (B,)
        value_targets = torch.minimum(*q_values) - args.ent_coef * log_probs
    q_errors = torch.stack(agent.q_values(observations, batch["actions"])) - q_targets  # (2,B)
    v_errors = agent.values(observations) - value_targets  # (B,)
    value_loss = 0.5 * (q_errors.square().sum(0) + v_errors.square()).mean()

    optimizer.zero_grad()
    policy_loss.backward(inputs=list(agent.actor.parameters()))
    value_loss.backward()
    optimizer.step()
    update_target(agent.target_critic, agent.critic, 0.005)
    kl = (log_probs - old_log_probs).mean()
    return {"policy_loss": policy_loss, "kl": kl, "value_loss": value_loss}


def evaluate(agent, args):
    """Returns of whole episodes in the task's own unit, one in each environment."""
    envs = make_envs(args, args.eval_episodes)
    scores = {}
    devices = [agent.device] if agent.device.type == "cuda" else []
    with torch.random.fork_rng(devices):  # evaluations do not change the training
        for name, is_sampled in (("deterministic", False), ("sampled", True)):
            torch.manual_seed(args.seed)
            observations, _ = envs.reset(seed=args.seed + 10_000)
            returns = np.zeros(envs.num_envs)
            running = np.full(envs.num_envs, True)
            for _ in range(MOST_STEPS):
                actions = agent.to_env(agent.choose(observations, is_sampled))
                observations, rewards, terminated, truncated, _ = envs.step(actions)
                returns[running] += rewards[running]
                running &= ~(terminated | truncated)
                if not running.any():
                    break
            if running.any():
                print(f"{running.sum()} episodes did not end in {MOST_STEPS} steps; they count too")
            check_finite(args.env_id, returns=returns)
            mean, std = returns.mean(), returns.std()
            print(f"{len(returns)} episodes, {name}: {mean:.1f} +- {std:.1f}", flush=True)
            scores[f"eval/{name}/return_mean"] = mean
            scores[f"eval/{name}/return_std"] = std
    envs.close()
    return scores


# ================================================================================================
# Below: what the method stands on, networks, environments, checkpoints and logs.
# ================================================================================================


# --- Networks -----------------------------------------------------------------------------------


def mlp(inputs, outputs, off_policy, last_gain=1.0):
    """Two hidden layers; orthogonal weights, zero biases."""
    hidden, activation = (256, nn.ReLU) if off_policy else (64, nn.Tanh)
    first, second, last = map(nn.Linear, (inputs, hidden, hidden), (hidden, hidden, outputs))
    for layer in (first, second, last):
        nn.init.orthogonal_(layer.weight, 2**0.5)
        nn.init.zeros_(layer.bias)
    nn.init.orthogonal_(last.weight, last_gain)
    return nn.Sequential(first, activation(), second, activation(), last)


class Agent(nn.Module):
    """Policy, value networks, and the statistics that normalize observations and rewards.

    An action is a sample of a Gaussian, off-policy tanh of it, stretched as action_ends says.
    """

    def __init__(self, envs, args):
        super().__init__()
        self.space = envs.single_action_space
        low, high, is_bounded = action_ends(self.space)
        self.low = torch.from_numpy(low)  # (A,)
        self.width = torch.from_numpy(high - low)
        self.off_policy = args.method == "off_policy"
        if self.off_policy and not is_bounded:
            sys.exit(f"--method off_policy: actions are unbounded, {self.space}; use on_policy")
        num_inputs = envs.single_observation_space.shape[0]
        num_actions = len(low)
        self.statistics = RunningMeanStd(shape=num_inputs), RunningMeanStd()
        self.observation_stats, self.return_stats = self.statistics
        self.actor = mlp(num_inputs, num_actions * (1 + self.off_policy), self.off_policy, 0.01)
        self.critic = mlp(num_inputs, 1, self.off_policy)
        if self.off_policy:
            pair = (mlp(num_inputs + num_actions, 1, True) for _ in range(2))
            self.q_networks = nn.ModuleList(pair)
            self.old_actor = copy.deepcopy(self.actor)
            self.target_critic = copy.deepcopy(self.critic)
        else:
            self.log_std = nn.Parameter(torch.zeros(num_actions))

    @property
    def device(self) -> torch.device:
        return self.actor[0].weight.device

    def normalize(self, observations):
        """(...,O) of the environment -> (...,O) on the device"""
        if not self.off_policy:
            stats = self.observation_stats
            observations = (observations - stats.mean) / np.sqrt(stats.var + 1e-8)
            observations = observations.clip(-10, 10)
        return torch.from_numpy(np.float32(observations)).to(self.device)

    def gaussian(self, observations, actor=None):
        """Mean and log-std of the policy, or of the old actor. (...,O) -> (...,A) each"""
        outputs = (actor or self.actor)(observations)
        if not self.off_policy:
            return outputs, self.log_std.expand_as(outputs)
        mean, log_std = outputs.chunk(2, -1)
        return mean, log_std.clamp(-20, 2)

    @torch.no_grad()
    def choose(self, observations, is_sampled=True):
        """Actions before clipping or tanh, sampled or the mean. (N,O) of the task -> (N,A), CPU"""
        mean, log_std = self.gaussian(self.normalize(observations))
        return (mean + is_sampled * log_std.exp() * torch.randn_like(mean)).cpu()

    def values(self, observations):
        """(...,O) -> (...)"""
        return self.critic(observations)[..., 0]

    def q_values(self, observations, actions):
        """Of both networks; actions in [-1, 1]. (B,O), (B,A) -> list of two (B,)"""
        inputs = torch.cat([observations, actions], -1)
        return [network(inputs)[..., 0] for network in self.q_networks]

    def to_env(self, actions):
        """(N,A) -> what the environments' step() takes"""
        if self.off_policy:
            actions = self.low + self.width * (actions.tanh() + 1) / 2
        else:
            actions = self.low + self.width / 2 + self.width / 2 * actions
        return as_actions(actions.numpy(), self.space)

    def get_extra_state(self):
        """The part of state_dict() that holds the statistics: mean, var, count of each by name."""
        columns = [vars(stats).items() for stats in self.statistics]
        return [{name: np.float64(value).tolist() for name, value in column} for column in columns]

    def set_extra_state(self, state):
        for stats, saved in zip(self.statistics, state):
            vars(stats).update({name: np.array(value) for name, value in saved.items()})


# --- Environments and rollout -------------------------------------------------------------------


def make_envs(args: Args, num_envs: int, **options) -> VectorEnv:
    """Copies of the task in this process: pipes between processes cost more than MuJoCo's steps."""
    if ".py:" in args.env_id:
        if args.env_kwargs != "{}":
            sys.exit("--env-kwargs: not with FILE.py:make, which takes the number of copies alone")
        envs = load_function(args.env_id)(num_envs)
        if not isinstance(envs, VectorEnv) or envs.num_envs != num_envs:
            sys.exit(f"--env-id {args.env_id}: expected a VectorEnv of {num_envs}, not {envs}")
    else:
        makers = [partial(make_env, args, **options)] * num_envs
        envs = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    if envs.metadata.get("autoreset_mode") != AutoresetMode.SAME_STEP:
        sys.exit(f"--env-id {args.env_id}: its metadata needs autoreset_mode SAME_STEP")
    check_envs(envs, args.env_id)
    return envs


def check_envs(envs: VectorEnv, env_id: str) -> None:
    """Exit if nobody can act in these spaces, or learn from what a first random step gives."""
    space, seen = envs.single_action_space, envs.single_observation_space
    is_whole = isinstance(space, gym.spaces.Box) and space.dtype.kind != "f"
    if is_whole or not isinstance(space, SPACES):
        names = " or ".join(kind.__name__ for kind in SPACES)
        sys.exit(f"--env-id {env_id}: actions must be {names}, a Box of floats, not {space}")
    if not isinstance(seen, gym.spaces.Box) or len(seen.shape) != 1:
        sys.exit(f"--env-id {env_id}: expected vectors as observations, not {seen}; flatten them")
    try:
        observations, _ = envs.reset(seed=0)
        _, rewards, *ends, _ = envs.step(np.array([space.sample() for _ in range(envs.num_envs)]))
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
        libraries = "site-packages", os.path.dirname(os.__file__)
        if not all(any(place in frame.filename for place in libraries) for frame in frames):
            raise  # an error in the task
        sys.exit(f"--env-id {env_id}: its reset or its first step fails ({error!r:.200})")
    found = np.shape(observations), np.shape(rewards)
    expected = (envs.num_envs, *seen.shape), (envs.num_envs,)
    if found != expected:
        sys.exit(f"--env-id {env_id}: observations and rewards are {found}, expected {expected}")
    if any(getattr(end, "dtype", None) != np.dtype(bool) for end in ends):
        sys.exit(f"--env-id {env_id}: terminated and truncated must be NumPy arrays of bool")
    check_finite(env_id, observations=observations, rewards=rewards)


def make_env(args: Args, **options) -> gym.Env:
    """The task, whose observations become vectors."""
    try:
        options |= json.loads(args.env_kwargs)
        env = gym.make(args.env_id, disable_env_checker=True, **options)
    except (gym.error.Error, ImportError, ValueError, TypeError, OSError, KeyError) as error:
        is_found = not isinstance(error, gym.error.Error | ImportError)
        if is_found and args.env_kwargs == "{}" and not options:
            raise  # an error in the task
        flags = f"--env-kwargs {args.env_kwargs} " * (args.env_kwargs != "{}")
        sys.exit(f"{flags}--env-id {args.env_id}: {error}")
    is_picture = len(env.observation_space.shape or ()) > 2
    return env if is_picture else gym.wrappers.FlattenObservation(env)


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


def load_function(path: str):
    """The function of FILE.py:function."""
    file, name = path.rsplit(":", 1)
    if not os.path.isfile(file):
        sys.exit(f"{path}: there is no file {file}")
    sys.path.append(os.path.dirname(file))  # so that the file can import its neighbours
    names = runpy.run_path(file)
    if name not in names:
        sys.exit(f"{path}: the file has no function {name!r}")
    return names[name]


class Unfinished:
    """New episodes; then those that have not ended, which a rollout hands to the next one."""

    def __init__(self, envs: VectorEnv, seed: int):
        self.observations = np.array(envs.reset(seed=seed)[0])  # (N,O)
        self.returns, self.lengths = np.zeros((2, envs.num_envs))
        self.discounted = np.zeros(envs.num_envs)  # the sum whose std scales rewards


def act(envs, agent, unfinished, args):
    """T steps of N environments with sampled actions.

    Returns what happened, (T,N,...) each, and (return, length) of each episode that ended. The
    next observation of an episode's last step is the one before the reset.
    """
    steps = []
    episodes = []
    for _ in range(args.num_steps):
        observations = unfinished.observations
        check_finite(args.env_id, observations=observations)
        actions = agent.choose(observations)
        following, rewards, terminated, truncated, info = envs.step(agent.to_env(actions))
        dones = terminated | truncated
        # Copies, because a simulator may use its arrays again.
        next_observations = np.array(following)
        unfinished.observations = np.array(following)
        unfinished.returns += rewards
        unfinished.lengths += 1
        if dones.any() and "final_obs" not in info:
            sys.exit(f"--env-id {args.env_id}: an episode ended without info['final_obs']")
        for n in np.flatnonzero(dones):
            next_observations[n] = info["final_obs"][n]
            episodes.append((unfinished.returns[n], unfinished.lengths[n]))
            unfinished.returns[n] = unfinished.lengths[n] = 0
        happened = observations, actions.numpy(), rewards, terminated, dones, next_observations
        steps.append([np.array(values) for values in happened])
    rollout = [np.stack(values) for values in zip(*steps)]
    check_finite(args.env_id, observations=rollout[-1], rewards=rollout[2])
    return rollout, episodes


def scale_rewards(rewards: np.ndarray, dones: np.ndarray, agent, unfinished, args: Args):
    """Update the running std of the discounted return, then divide rewards (T,N) by it."""
    rows = []
    for reward, done in zip(rewards, dones):
        unfinished.discounted = unfinished.discounted * args.gamma + reward
        rows.append(unfinished.discounted)
        unfinished.discounted = unfinished.discounted * ~done
    agent.return_stats.update(np.concatenate(rows))
    std = np.sqrt(agent.return_stats.var + 1e-8)
    return (rewards / std).clip(-10, 10)


@torch.no_grad()
def learning_batch(rollout, agent, unfinished, args):
    """What the on-policy updates need of a rollout, as rows (T N,...)."""
    observations, actions, rewards, terminated, dones, next_observations = rollout
    rewards = scale_rewards(rewards, dones, agent, unfinished, args)
    observations = agent.normalize(observations)  # (T,N,O)
    values = agent.values(observations).cpu()  # (T,N), where gae runs
    next_values = agent.values(agent.normalize(next_observations)).cpu()
    cut = dones & ~terminated  # a time limit is not the end
    rewards[cut] += args.gamma * next_values.double().numpy()[cut]
    given = torch.from_numpy(rewards).float(), torch.from_numpy(dones)
    advantages, returns = gae(*given, values, next_values[-1], args.gamma, args.gae_lambda)
    std, average = torch.std_mean(advantages, correction=0)
    mean, log_std = agent.gaussian(observations)
    rows = {
        "observations": observations,
        "actions": torch.from_numpy(actions),
        "mean": mean,
        "log_std": log_std.clone(),  # not a view of the parameter, which will move
        "values": values,
        "advantages": (advantages - average) / (std + 1e-8),
        "returns": returns,
    }
    return {name: values.flatten(0, 1).to(agent.device) for name, values in rows.items()}


def transitions(rollout, device):
    """Rows of the replay buffer, (T N,...) each."""
    names = "observations", "actions", "rewards", "terminated", "next_observations"
    observations, actions, rewards, terminated, _, next_observations = rollout
    columns = observations, np.tanh(actions), rewards, terminated, next_observations
    rows = [torch.from_numpy(np.float32(column)).flatten(0, 1).to(device) for column in columns]
    return dict(zip(names, rows))


def store(replay, first, rows, args):
    """Put rows (B,...) into the columns (total_timesteps,...) of the replay buffer."""
    for name, values in rows.items():
        if name not in replay:
            size = max(args.total_timesteps, len(values))
            replay[name] = values.new_zeros(size, *values.shape[1:])
        replay[name][first : first + len(values)] = values


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


def report(step: int, last_step: int, metrics: dict[str, float]) -> None:
    """Print a summary of under 80 columns."""
    episodes = "no episode ended"
    if "charts/episodic_return" in metrics:
        episodes = f"return {metrics['charts/episodic_return']:9.1f}"
    speed = metrics["charts/SPS"]
    left = round((last_step - step) / speed)
    line = f"step {step:>9,}/{last_step:,}  {episodes}  {speed:6,.0f} steps/s"
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
