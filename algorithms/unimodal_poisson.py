# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.6", "numpy>=2.0", "gymnasium[mujoco]>=1.1", "imageio>=2.37",
#     "tyro>=1.0", "tensorboard>=2.18",
# ]
# ///
"""PPO with the unimodal Poisson policy. Each action dimension is cut into K ordered values, called
atoms, and the network gives one number for it: the rate of a Poisson distribution that is truncated
to K counts. Probabilities fall from the likeliest atom towards both ends: there is one peak.

Zhu et al., Discretizing Continuous Action Space with Unimodal Probability Distributions for
On-Policy Reinforcement Learning, arXiv 2408.00309. PPO: Schulman et al., arXiv 1707.06347, with
the details of CleanRL's ppo_continuous_action.py.

The method is poisson_logits and the class PoissonHead. Other policies are heads beside it; PPO is
in gae, ppo_loss and update. By default, discrete actions get a softmax over them.

Differs from the authors' released code (of the paper we could read only the abstract):
1. The policy is softmax(log-PMF / temperature), which is unimodal as the title says. The code puts
   it through another transform, after which it is not unimodal: that is --policy poisson_repo.
2. The temperature is 1 and the first rate (K + 1) / 2, so that actions start in the middle. With
   the code's 2.5 and ln 2, this policy starts near the lowest atom.
3. Network and learning rate are the same for all policies, and are CleanRL's.
4. The value of the last state is added where the time limit cut off an episode.
Differs from CleanRL: point 4, 8 environments, statistics that are updated after each rollout, a
sum of rewards that begins anew also at time limits, advantages divided by the population's standard
deviation, and a Gaussian whose -1 and 1 are the ends of a bounded action.

    python algorithms/unimodal_poisson.py                           # HalfCheetah-v5, CPU, 1 minute
    python algorithms/unimodal_poisson.py --env-id Humanoid-v5 --total-timesteps 3000000
    python algorithms/unimodal_poisson.py --env-id CartPole-v1      # discrete actions
    python algorithms/unimodal_poisson.py --evaluate runs/<run> --video

Shapes: T steps, N environments, B rows, O numbers observed, A action dimensions, K atoms.
"""

from __future__ import annotations

import contextlib
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
import imageio
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

with contextlib.suppress(ImportError):  # models in gymnasium make MuJoCo print and log warnings
    import mujoco

    mujoco.set_mju_user_warning(
        lambda text: None if "deprecated" in text else print(text, file=sys.stderr)
    )

# Flags that cannot change when a run is resumed.
FIXED = "env_id env_kwargs policy num_atoms temperature rate_init rate_link second_activation"
FIXED += " hidden_size num_envs num_steps gamma norm_obs norm_reward seed save_steps output_dir"
SILENT = "resume evaluate video"  # flags whose change is not announced
POLICIES = Literal["poisson", "poisson_repo", "categorical", "ordinal", "gaussian", "beta"]
SPACES = (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)
MOST_STEPS = 20_000  # of an episode in an evaluation; where there is no time limit, it may not end


@dataclass
class Args:
    env_id: str = "HalfCheetah-v5"
    """gymnasium task, or FILE.py:make, where make(num_envs) returns a vector environment"""
    env_kwargs: str = "{}"
    """what gymnasium.make passes on to the task, as JSON"""
    policy: POLICIES | None = None
    """distribution of actions; None is poisson, or categorical where actions are discrete"""
    num_atoms: int = 11
    """K, values of each continuous dimension; categorical with 2 is a bang-bang policy"""
    temperature: float | None = None
    """poisson: divides the log-PMF; None is 1, or 2.5 for poisson_repo"""
    rate_init: float | None = None
    """poisson: rate before training; None is (K + 1) / 2, or ln 2 for poisson_repo"""
    rate_link: Literal["softplus", "exp"] = "softplus"
    """poisson: maps the network's output to the rate"""
    second_activation: Literal["tanh", "softplus"] = "tanh"
    """after the policy's second hidden layer; the released code has softplus"""
    hidden_size: int = 64
    """width of the two hidden layers of the policy and of the value network"""
    # PPO; defaults are CleanRL's where no other is named
    total_timesteps: int = 120_000
    """environment steps, rounded down to whole rollouts (CleanRL: 1,000,000)"""
    num_envs: int = 8
    """N, environments that are stepped together (CleanRL: 1)"""
    num_steps: int = 256
    """T, steps of each environment in a rollout (CleanRL: 2048)"""
    learning_rate: float = 3e-4
    """Adam's learning rate at the start"""
    anneal_lr: bool = True
    """lower the learning rate linearly to 0"""
    gamma: float = 0.99
    """discount"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""
    num_minibatches: int = 32
    """minibatches of a rollout"""
    update_epochs: int = 10
    """passes over each rollout"""
    norm_adv: bool = True
    """normalize the advantages of each minibatch"""
    clip_coef: float = 0.2
    """clip range of the probability ratio and of the change of values"""
    clip_vloss: bool = True
    """clip the change of values in the value loss"""
    ent_coef: float = 0.0
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    target_kl: float | None = None
    """end an update after the epoch whose last minibatch has a larger approx_kl"""
    max_grad_norm: float = 0.5
    """clip the gradient norm at this value; 0 does not clip"""
    norm_obs: bool = True
    """normalize observations by running statistics, and clip them to +-10"""
    norm_reward: bool = True
    """divide rewards by the running std of the discounted return, and clip them to +-10"""
    bootstrap_truncation: bool = True
    """add the value of the last state where the time limit cut off an episode (CleanRL: no)"""
    # bookkeeping
    seed: int = 1
    """seed of environments, networks and sampling"""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """device of the networks, which are too small to gain from a GPU; auto takes one if it can"""
    compile: bool = False
    """compile the loss and its gradient; CPU only, takes a minute and needs a C++ compiler"""
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
    video: bool = False
    """with --evaluate: write the first 600 steps of an episode to episode.gif in the run folder"""


# --- The method ---------------------------------------------------------------------------------


def poisson_logits(rate: Tensor, num_atoms: int, temperature: float, is_log=False) -> Tensor:
    """Unimodal policy: log-PMF of a Poisson distribution over temperature. (B,A) -> (B,A,K)

    With is_log, the first argument is the logarithm of the rate. Atom i stands for the count
    k = i + 1. The softmax over K atoms truncates the distribution, and cancels the PMF's constant
    term -rate, which is left out. The ratio of neighbouring probabilities P(k) / P(k - 1) is
    (rate / k) ** (1 / temperature). It falls with k, so there is one mode, floor(rate) clipped to
    1..K; at a whole rate the count below it is as likely.
    """
    counts = torch.arange(1, num_atoms + 1, device=rate.device, dtype=rate.dtype)  # (K,)
    log_rate = rate if is_log else rate.clamp(min=1e-30).log()  # softplus underflows to 0
    log_pmf = counts * log_rate[..., None] - torch.lgamma(counts + 1)
    return log_pmf / temperature  # eq. 1 of unimodal_poisson.md


def poisson_repo_logits(rate: Tensor, num_atoms: int, temperature: float, is_log=False) -> Tensor:
    """Policy of the released code, which is not unimodal. (B,A) -> (B,A,K)

    With the probabilities p of poisson_logits it is (K - i) ln(p_i + 1e-8) + i ln(1 - p_i + 1e-8)
    for atoms i = 0..K-1. It looks like ordinal_logits with two axes swapped. At rate ln 2, 11 atoms
    and temperature 2.5, either end has half of the mass; at temperature 1 the first atom has all.
    """
    probabilities = poisson_logits(rate, num_atoms, temperature, is_log).softmax(-1)
    rest = (1 - probabilities).clamp(min=0)  # a softmax in float32 may exceed 1
    index = torch.arange(num_atoms, device=rate.device, dtype=rate.dtype)
    return (num_atoms - index) * (probabilities + 1e-8).log() + index * (rest + 1e-8).log()


def ordinal_logits(scores: Tensor) -> Tensor:
    """Ordinal policy, Tang & Agrawal, arXiv 1901.10500, eq. 4. (B,A,K) -> (B,A,K)

    Atom i is the sum of ln sigmoid(s_j) over j <= i and of ln(1 - sigmoid(s_j)) over j > i.
    """
    yes = F.logsigmoid(scores)
    no = F.logsigmoid(-scores)
    return yes.cumsum(-1) + no.sum(-1, keepdim=True) - no.cumsum(-1)


class Head(nn.Module):
    """Base class of policies. To add one, subclass it and add it to HEADS and Args.policy.

    The network gives num_outputs numbers for each action dimension; first_bias starts the last
    layer's bias. mode and sample turn these outputs (B,A,num_outputs) into actions (B,A); log_prob
    and entropy are summed over dimensions, (B,). to_env gives the environment's units. sizes (A,):
    atoms of each dimension, K at most; only discrete ones have fewer.
    """

    num_outputs = 1  # for each action dimension

    def __init__(self, low: Tensor, high: Tensor, args: Args, sizes=None):
        super().__init__()
        self.args = args
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)
        self.register_buffer("width", high - low, persistent=False)
        if sizes is None:
            sizes = torch.full_like(low, args.num_atoms)
        missing = torch.arange(args.num_atoms) >= sizes[:, None]  # (A,K)
        self.register_buffer("missing", missing if missing.any() else None, persistent=False)

    def first_bias(self, num_atoms: int) -> float:
        return 0.0


class CategoricalHead(Head):
    """A softmax over K atoms for each action dimension; an action is an atom's number."""

    @property
    def num_outputs(self) -> int:
        return self.args.num_atoms

    def all_logits(self, outputs: Tensor) -> Tensor:
        """-> (B,A,K)"""
        return outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """The same without the atoms that a dimension lacks. -> (B,A,K)"""
        logits = self.all_logits(outputs)
        return logits if self.missing is None else logits.masked_fill(self.missing, -1e8)

    def mode(self, outputs: Tensor) -> Tensor:
        return self.logits(outputs).argmax(-1)

    def sample(self, outputs: Tensor) -> Tensor:
        logits = self.logits(outputs)  # the Gumbel trick: -log of exponential noise is Gumbel noise
        return (logits - torch.empty_like(logits).exponential_().log_()).argmax(-1)

    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        logprobs = self.logits(outputs).log_softmax(-1)
        return logprobs.gather(-1, actions[..., None]).sum((-2, -1))

    def entropy(self, outputs: Tensor) -> Tensor:
        logprobs = self.logits(outputs).log_softmax(-1)
        return -(logprobs.exp() * logprobs).sum((-2, -1))

    def to_env(self, actions: Tensor) -> Tensor:
        """Atoms are evenly spaced from the lowest to the highest value. (B,A) -> (B,A)"""
        return self.low + self.width * actions / (self.args.num_atoms - 1)


class OrdinalHead(CategoricalHead):
    """One score for each atom."""

    def all_logits(self, outputs: Tensor) -> Tensor:
        return ordinal_logits(outputs)


class PoissonHead(CategoricalHead):
    """The method: one number for each action dimension, which becomes the rate."""

    num_outputs = 1
    first_rate = None  # the middle of the range
    temperature = 1.0  # the Poisson distribution itself
    from_rate = staticmethod(poisson_logits)

    def __init__(self, low: Tensor, high: Tensor, args: Args, sizes=None):
        super().__init__(low, high, args, sizes)
        self.temperature = args.temperature or self.temperature
        self.first_rate = args.rate_init or self.first_rate

    def first_bias(self, num_atoms: int) -> float:
        rate = self.first_rate or (num_atoms + 1) / 2
        if self.args.rate_link == "exp":
            return math.log(rate)
        return rate + math.log(-math.expm1(-rate))  # the inverse of softplus

    def all_logits(self, outputs: Tensor) -> Tensor:
        u = outputs[..., 0]
        is_log = self.args.rate_link == "exp"
        rate = u if is_log else F.softplus(u)
        return self.from_rate(rate, self.args.num_atoms, self.temperature, is_log)


class PoissonRepoHead(PoissonHead):
    """The released code's version, with its first rate and temperature."""

    first_rate = math.log(2)
    temperature = 2.5
    from_rate = staticmethod(poisson_repo_logits)


class GaussianHead(Head):
    """A Gaussian with std 1 at first, which does not depend on the state; see action_ends."""

    def __init__(self, low: Tensor, high: Tensor, args: Args, sizes=None):
        super().__init__(low, high, args)
        self.log_std = nn.Parameter(torch.zeros(len(low)))
        self.register_buffer("middle", (low + high) / 2, persistent=False)
        self.register_buffer("half_width", self.width / 2, persistent=False)

    def mode(self, outputs: Tensor) -> Tensor:
        return outputs[..., 0]

    def sample(self, outputs: Tensor) -> Tensor:
        mean = self.mode(outputs)
        return mean + self.log_std.exp() * torch.randn_like(mean)

    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        errors = (actions - self.mode(outputs)) * (-self.log_std).exp()  # (B,A), in stds
        normalizer = (self.log_std + 0.5 * math.log(2 * math.pi)).sum()
        return -0.5 * errors.square().sum(-1) - normalizer

    def entropy(self, outputs: Tensor) -> Tensor:
        return (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum().expand(len(outputs))

    def to_env(self, actions: Tensor) -> Tensor:
        return torch.addcmul(self.middle, self.half_width, actions)


class BetaHead(Head):
    """A beta distribution over the range [0, 1]."""

    num_outputs = 2

    def distribution(self, outputs: Tensor) -> torch.distributions.Beta:
        alpha, beta = (F.softplus(outputs) + 1).unbind(-1)  # above 1, so that there is one mode
        return torch.distributions.Beta(alpha, beta, validate_args=False)

    def mode(self, outputs: Tensor) -> Tensor:
        return self.distribution(outputs).mode.nan_to_num(0.5)  # where both are 1

    def sample(self, outputs: Tensor) -> Tensor:
        return self.distribution(outputs).sample()

    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        return self.distribution(outputs).log_prob(actions).sum(-1)

    def entropy(self, outputs: Tensor) -> Tensor:
        return self.distribution(outputs).entropy().sum(-1)

    def to_env(self, actions: Tensor) -> Tensor:
        return self.low + self.width * actions


HEADS = {
    "poisson": PoissonHead,
    "poisson_repo": PoissonRepoHead,
    "categorical": CategoricalHead,
    "ordinal": OrdinalHead,
    "gaussian": GaussianHead,
    "beta": BetaHead,
}


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


def ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    entropy: Tensor,
    *,
    clip_coef: float,
    ent_coef: float,
    vf_coef: float,
    norm_adv: bool = True,
    clip_vloss: bool = True,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of a minibatch, and metrics. All (B,) -> scalar

    Advantages are normalized by the population's std. A clipped value moves by clip_coef at most.
    https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/ explains the details.
    """
    if norm_adv:
        std, mean = torch.std_mean(advantages, correction=0)
        advantages = (advantages - mean) / (std + 1e-8)
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()  # arXiv 1707.06347 eq. 6
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    policy_loss = -torch.min(advantages * ratio, advantages * clipped_ratio).mean()  # eq. 7
    value_errors = (values - returns).square()
    if clip_vloss:
        clipped_values = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
        value_errors = torch.max(value_errors, (clipped_values - returns).square())
    value_loss = 0.5 * value_errors.mean()
    entropy = entropy.mean()
    loss = policy_loss - ent_coef * entropy + vf_coef * value_loss  # eq. 9
    with torch.no_grad():
        metrics = {
            "policy_loss": policy_loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy": entropy.detach(),
            "approx_kl": (ratio - 1 - log_ratio).mean(),  # as in CleanRL
            "clipfrac": (ratio != clipped_ratio).to(ratio.dtype).mean(),
        }
    return loss, metrics


# --- Training -----------------------------------------------------------------------------------


def train(args: Args) -> dict[str, float]:
    """Train as the flags say. Returns the scores of the last evaluation."""
    lowest = {"num_envs": 1, "num_steps": 1, "num_minibatches": 1, "update_epochs": 1}
    lowest |= {"hidden_size": 1, "learning_rate": 0, "max_grad_norm": 0, "rate_init": 1e-3}
    lowest |= {"save_steps": 0, "eval_steps": 0, "num_atoms": 2, "temperature": 1e-3}
    device = setup(args, eval_episodes=1 if args.evaluate and not args.video else 0, **lowest)
    if args.evaluate:
        return score_run(args, device)
    if args.video:
        sys.exit("--video: goes with --evaluate RUN, the folder of a run")
    rollout_size = args.num_envs * args.num_steps
    if rollout_size % args.num_minibatches:
        sys.exit(f"--num-minibatches: does not divide {rollout_size}, the steps of a rollout")
    if rollout_size == args.num_minibatches and args.norm_adv:
        sys.exit("--num-minibatches: normalized, the advantage of a single row is 0; take fewer")
    last_step = args.total_timesteps // rollout_size * rollout_size
    if last_step <= 0:
        sys.exit(f"--total-timesteps: fewer than the {rollout_size} steps of one rollout")
    torch.manual_seed(args.seed)
    envs = make_envs(args, args.num_envs)
    agent = Agent(envs, args).to(device)
    if args.policy == "poisson" and args.rate_init:
        factor = 9 ** (args.temperature or 1)  # outside, an atom has 9/10 of the probability
        least, most = 2 / factor, agent.head.args.num_atoms * factor
        if not least <= args.rate_init <= most:
            sys.exit(f"--rate-init: must be from {least:.2g} to {most:.4g}, else nothing is tried")
    vector = as_vector(agent)
    optimizer = torch.optim.Adam([vector], args.learning_rate, eps=1e-5, fused=True)
    loss_function = minibatch_loss
    if args.compile and device.type == "cuda":
        sys.exit("--compile: with --device cpu only")
    if args.compile:
        loss_function = torch.compile(minibatch_loss, mode="reduce-overhead")
    run_dir = open_run(args, Path(args.env_id).name.replace(":", "_"))
    step = 0
    state = load_checkpoint(run_dir, device) if args.resume else None
    if state is not None:
        step = state["step"]
        agent.load_state_dict(state["agent"])
        optimizer.load_state_dict(state["optimizer"])
        if step >= last_step:
            print(f"{run_dir}: has {step} steps already; a larger --total-timesteps goes on")
    board = SummaryWriter(run_dir, purge_step=step + 1)
    board.add_text("hyperparameters", f"```\n{json.dumps(asdict(args), indent=1)}\n```")
    size = f"{args.num_envs} x {args.num_steps}"
    print(f"{run_dir}: {args.policy}, {size} steps on {device}, from step {step}")

    scores = {}
    start_anew = True
    while True:
        last = step >= last_step
        due = step > 0 and is_due(args.eval_steps, step, rollout_size)
        if args.eval_episodes and (last or due):
            scores = evaluate(agent, args)
            log(run_dir, board, step, scores)
        if last:
            break
        if start_anew:  # at the beginning and after each checkpoint, see save_checkpoint
            torch.manual_seed(random_seed(args.seed, step))
            unfinished = Unfinished(envs, random_seed(args.seed, "episodes", step) % 2**31)
            start_anew = False

        # 1. act
        began = time.perf_counter()
        rollout, episodes = act(envs, agent, unfinished, args)
        acted = time.perf_counter()

        # 2. scale rewards, estimate advantages; then update the statistics of observations
        batch = learning_batch(rollout, agent, unfinished, args)
        if args.norm_obs:
            agent.observation_stats.update(np.concatenate(rollout[2]))

        # 3. several epochs of the clipped loss
        learning_rate = args.learning_rate
        if args.anneal_lr:
            learning_rate = args.learning_rate * (1 - step / last_step)
        optimizer.param_groups[0]["lr"] = learning_rate
        losses = update(agent, vector, optimizer, batch, args, loss_function)
        if not math.isfinite(sum(losses.values())):
            sys.exit("a loss is not finite: try a lower --learning-rate; checkpoints are kept")

        # 4. log and save
        step += rollout_size
        now = time.perf_counter()
        metrics = {f"losses/{name}": value for name, value in losses.items()}
        residuals = batch["returns"] - batch["values"]
        explained = 1 - (residuals.var() / batch["returns"].var()).item()
        metrics["losses/explained_variance"] = explained
        metrics["charts/learning_rate"] = learning_rate
        if episodes:
            returns, lengths = np.mean(episodes, 0).tolist()
            metrics["charts/episodic_return"] = returns
            metrics["charts/episodic_length"] = lengths
        if isinstance(agent.head, CategoricalHead) and not agent.is_discrete:
            metrics |= atom_metrics(agent, batch["observations"][: 16 * args.num_envs])
        metrics["charts/SPS"] = rollout_size / (now - began)
        metrics["seconds/rollout"] = acted - began
        metrics["seconds/update"] = now - acted
        log(run_dir, board, step, metrics)
        report(step, last_step, metrics)
        due = is_due(args.save_steps * args.num_envs, step, rollout_size)
        if args.save_steps and (step == last_step or due):
            state = {"step": step, "agent": agent.state_dict(), "optimizer": optimizer.state_dict()}
            save_checkpoint(run_dir, step, state)
            start_anew = True
    return scores


def update(agent: Agent, vector: Tensor, optimizer, batch: dict, args: Args, loss_function) -> dict:
    """Several epochs of Adam over a rollout (T N,...) in shuffled minibatches. -> mean metrics

    The optimizer has only the vector of parameters, see as_vector.
    """
    num_rows = len(batch["actions"])
    largest = args.max_grad_norm or math.inf
    first = next(agent.parameters())
    history = []
    for _ in range(args.update_epochs):
        order = torch.randperm(num_rows, device=agent.device).view(args.num_minibatches, -1)
        shuffled = {name: values[order] for name, values in batch.items()}
        for i in range(args.num_minibatches):
            minibatch = {name: values[i] for name, values in shuffled.items()}
            loss, metrics = loss_function(agent, minibatch, args)
            vector.grad.zero_()
            loss.backward()
            assert first.grad.data_ptr() == vector.grad.data_ptr(), "see as_vector: no zero_grad()"
            grad_norm = vector.grad.norm()
            vector.grad.mul_((largest / (grad_norm + 1e-6)).clamp(max=1))
            optimizer.step()
            metrics["grad_norm"] = grad_norm
            history.append(torch.stack(list(metrics.values())))
        if args.target_kl is not None and metrics["approx_kl"] > args.target_kl:
            break
    return dict(zip(metrics, torch.stack(history).mean(0).tolist()))


def minibatch_loss(agent: Agent, batch: dict[str, Tensor], args: Args):
    """The loss of a minibatch (B,...), and metrics."""
    outputs = agent.outputs(batch["observations"])
    is_only_logged = args.ent_coef == 0  # then that of the policy that acted is shown
    entropy = batch["entropy"] if is_only_logged else agent.head.entropy(outputs)
    return ppo_loss(
        agent.head.log_prob(outputs, batch["actions"]),
        batch["logprobs"],
        batch["advantages"],
        agent.values(batch["observations"]),
        batch["values"],
        batch["returns"],
        entropy,
        clip_coef=args.clip_coef,
        ent_coef=args.ent_coef,
        vf_coef=args.vf_coef,
        norm_adv=args.norm_adv,
        clip_vloss=args.clip_vloss,
    )


def as_vector(agent: Agent) -> Tensor:
    """All parameters (P,). They and their gradients become views of this vector and of its .grad,
    so that clipping and Adam are single operations and not one for each layer. zero_grad() would
    part them, and nothing would be learned: zero vector.grad instead."""
    parameters = list(agent.parameters())
    vector = torch.cat([parameter.detach().flatten() for parameter in parameters])
    vector.grad = torch.zeros_like(vector)
    sizes = [parameter.numel() for parameter in parameters]
    parts = zip(parameters, vector.split(sizes), vector.grad.split(sizes))
    for parameter, values, gradient in parts:
        parameter.data = values.view_as(parameter)
        parameter.grad = gradient.view_as(parameter)
    return vector


@torch.no_grad()
def atom_metrics(agent: Agent, observations: Tensor) -> dict[str, float]:
    """How a policy over atoms looks: mass at the two ends, share with more than one mode."""
    probabilities = agent.head.logits(agent.outputs(observations)).softmax(-1)  # (B,A,K)
    differences = probabilities.diff()
    has_fallen = (differences < 0).cumsum(-1) > 0
    rises_again = ((differences > 0) & has_fallen).any(-1)  # (B,A)
    return {
        "train/extreme_mass": (probabilities[..., 0] + probabilities[..., -1]).mean().item(),
        "train/frac_multimodal": rises_again.float().mean().item(),
    }


def evaluate(agent: Agent, args: Args) -> dict[str, float]:
    """Returns of whole episodes in the task's own unit."""
    envs = make_envs(args, args.eval_episodes)
    scores = {}
    for name, deterministic in (("deterministic", True), ("sampled", False)):
        returns, _ = play(envs, agent, args.seed + 10_000, deterministic)
        check_finite(args.env_id, returns=returns)
        mean, std = returns.mean().item(), returns.std().item()
        print(f"{len(returns)} episodes, {name}: {mean:.1f} +- {std:.1f}", flush=True)
        scores[f"eval/{name}/return_mean"] = mean
        scores[f"eval/{name}/return_std"] = std
    envs.close()
    return scores


@torch.no_grad()
def play(envs: VectorEnv, agent: Agent, seed: int, deterministic: bool, video: bool = False):
    """One episode in each environment. -> returns (N,), and pictures of the first one"""
    choose = agent.head.mode if deterministic else agent.head.sample
    observations, _ = envs.reset(seed=seed)
    returns = np.zeros(envs.num_envs)
    running = np.ones(envs.num_envs, dtype=bool)
    pictures = []
    devices = [agent.device] if agent.device.type == "cuda" else []
    with torch.random.fork_rng(devices):  # evaluations do not change the training
        torch.manual_seed(seed)
        for _ in range(600 if video else MOST_STEPS):
            if not running.any():
                break
            if video:
                pictures.append(envs.render()[0])
            actions = choose(agent.outputs(agent.normalize(observations)))
            observations, rewards, terminated, truncated, _ = envs.step(agent.to_env(actions))
            returns[running] += rewards[running]
            running &= ~(terminated | truncated)
    if running.any() and not video:
        print(f"{running.sum()} episodes did not end in {MOST_STEPS} steps; they count so far")
    return returns, pictures


def score_run(args: Args, device: torch.device) -> dict[str, float]:
    """--evaluate: scores of a run's policy, and with --video an episode of it."""
    state = load_checkpoint(args.evaluate, device)
    if state is None:
        sys.exit(f"{args.evaluate}: no checkpoint; --save-steps 0 keeps none, or it is too early")
    if args.video and ".py:" in args.env_id:
        sys.exit(f"--video: not with --env-id {args.env_id}")
    envs = make_envs(args, 1, **({"render_mode": "rgb_array"} if args.video else {}))
    agent = Agent(envs, args).to(device)
    try:
        agent.load_state_dict(state["agent"])
    except RuntimeError:
        sys.exit(f"{args.evaluate}: its networks are not those of these flags")
    scores = evaluate(agent, args) if args.eval_episodes else {}
    if args.video:
        try:
            _, pictures = play(envs, agent, args.seed + 10_000, deterministic=True, video=True)
            small = [picture[::2, ::2] for picture in pictures[::2]]
            path = f"{args.evaluate}/episode.gif"
            imageio.mimsave(path, small, duration=1000 / 30, loop=0)
        except Exception as error:  # of OpenGL, of many kinds
            sys.exit(f"--video: no picture ({error!s:.200}); without a screen, set MUJOCO_GL=egl")
        print(path)
    return scores


# ================================================================================================
# Below: what the method stands on, networks, environments, checkpoints and logs.
# ================================================================================================


# --- Networks -----------------------------------------------------------------------------------


class RunningMeanStd(nn.Module):
    """Mean and population variance, (...) each, of all rows (B,...) seen so far, in NumPy."""

    def __init__(self, shape: tuple[int, ...] = ()):
        super().__init__()
        self.mean = np.zeros(shape)
        self.var = np.ones(shape)
        self.count = 1e-4  # as in CleanRL

    def update(self, rows: np.ndarray) -> None:
        """Take in rows (B,...), by the parallel formula of Chan et al."""
        size = len(rows)
        total = self.count + size
        difference = rows.mean(0) - self.mean
        squares = self.var * self.count + rows.var(0) * size
        squares = squares + difference**2 * (self.count * size / total)
        self.mean = self.mean + difference * (size / total)
        self.var = squares / total
        self.count = total

    def get_extra_state(self) -> dict:
        """The part of the agent's state_dict() that holds these statistics."""
        return {"mean": self.mean.tolist(), "var": self.var.tolist(), "count": self.count}

    def set_extra_state(self, state: dict) -> None:
        self.mean, self.var = np.array(state["mean"]), np.array(state["var"])
        self.count = state["count"]


class MLP(nn.Module):
    """Two hidden layers, the first with tanh; orthogonal weights, zero biases."""

    def __init__(self, inputs: int, hidden: int, outputs: int, second_activation, last_gain: float):
        super().__init__()
        self.first = nn.Linear(inputs, hidden)
        self.second = nn.Linear(hidden, hidden)
        self.last = nn.Linear(hidden, outputs)
        self.second_activation = second_activation
        for layer, gain in ((self.first, 2**0.5), (self.second, 2**0.5), (self.last, last_gain)):
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(...,inputs) -> (...,outputs). Calling nn.Linear takes longer than so small a product."""
        first, second, last = self.first, self.second, self.last
        hidden = F.linear(x, first.weight, first.bias).tanh()
        hidden = self.second_activation(F.linear(hidden, second.weight, second.bias))
        return F.linear(hidden, last.weight, last.bias)


class Agent(nn.Module):
    """Policy, value network, and the statistics that normalize observations and rewards."""

    def __init__(self, envs: VectorEnv, args: Args):
        super().__init__()
        observation_size = envs.single_observation_space.shape[0]
        self.space = envs.single_action_space
        self.args = args
        sizes = num_actions(self.space)
        self.is_discrete = len(sizes) > 0
        args.policy = args.policy or ("categorical" if self.is_discrete else "poisson")
        if self.is_discrete:  # atoms are the actions
            args = replace(args, num_atoms=max(sizes))
            low, high, is_bounded = np.zeros(len(sizes)), np.array(sizes) - 1, True
        else:
            low, high, is_bounded = action_ends(self.space)
            sizes = [args.num_atoms] * len(low)
        if self.is_discrete and args.policy in ("gaussian", "beta"):
            sys.exit(f"--policy {args.policy}: actions are {self.space}; use categorical")
        if args.policy == "poisson_repo" and len(set(sizes)) > 1:
            sys.exit(f"--policy poisson_repo: takes dimensions of one size, not {self.space}")
        if args.policy != "gaussian" and not is_bounded:
            sys.exit(f"--policy {args.policy}: actions are unbounded, {self.space}; use gaussian")
        low = torch.tensor(low, dtype=torch.float32)
        high = torch.tensor(high, dtype=torch.float32)
        self.head = HEADS[args.policy](low, high, args, torch.tensor(sizes))
        second = F.softplus if args.second_activation == "softplus" else torch.tanh
        num_outputs = len(low) * self.head.num_outputs
        self.actor = MLP(observation_size, args.hidden_size, num_outputs, second, 0.01)
        self.critic = MLP(observation_size, args.hidden_size, 1, torch.tanh, 1.0)
        biases = torch.tensor([self.head.first_bias(size) for size in sizes])
        self.actor.last.bias.data = biases.repeat_interleave(self.head.num_outputs)
        self.observation_stats = RunningMeanStd((observation_size,))
        self.return_stats = RunningMeanStd()

    @property
    def device(self) -> torch.device:
        return self.head.low.device

    def normalize(self, observations: np.ndarray) -> Tensor:
        """(...,O) of the environment -> (...,O) on the device"""
        if self.args.norm_obs:
            stats = self.observation_stats
            observations = (observations - stats.mean) / np.sqrt(stats.var + 1e-8)
            observations = np.minimum(np.maximum(observations, -10), 10)  # faster than np.clip
        return torch.from_numpy(np.float32(observations)).to(self.device)

    def outputs(self, observations: Tensor) -> Tensor:
        """The head's input for normalized observations. (...,O) -> (...,A,num_outputs)"""
        return self.actor(observations).view(*observations.shape[:-1], -1, self.head.num_outputs)

    def values(self, observations: Tensor) -> Tensor:
        """(...,O) -> (...)"""
        return self.critic(observations)[..., 0]

    def to_env(self, actions: Tensor) -> np.ndarray:
        """(N,A) -> what the environments' step() takes"""
        values = actions if self.is_discrete else self.head.to_env(actions)
        return as_actions(values.cpu().numpy(), self.space)


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


def num_actions(space: gym.Space) -> list[int]:
    """Of each dimension of discrete actions; none for a Box."""
    if isinstance(space, gym.spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, gym.spaces.MultiDiscrete):
        return space.nvec.ravel().tolist()
    if isinstance(space, gym.spaces.MultiBinary):
        return [2] * int(np.prod(space.shape))
    return []


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


@torch.inference_mode()
def act(envs: VectorEnv, agent: Agent, unfinished: Unfinished, args: Args) -> tuple:
    """T steps of N environments with sampled actions.

    Returns what happened, (T,N,...) each, and (return, length) of each episode that ended. The
    next observation of an episode's last step is the one before the reset. Normalized observations
    and actions are on the device.
    """
    steps = []
    episodes = []
    for _ in range(args.num_steps):
        raw_observations = unfinished.observations
        check_finite(args.env_id, observations=raw_observations)
        observations = agent.normalize(raw_observations)
        actions = agent.head.sample(agent.outputs(observations))
        following, rewards, terminated, truncated, info = envs.step(agent.to_env(actions))
        dones = terminated | truncated
        # Copies, because a simulator may use its arrays again.
        unfinished.observations = np.array(following)
        next_observations = unfinished.observations
        unfinished.returns += rewards
        unfinished.lengths += 1
        cut = dones & ~terminated  # a time limit is not the end
        if dones.any():
            if "final_obs" not in info:
                sys.exit(f"--env-id {args.env_id}: an episode ended without info['final_obs']")
            next_observations = np.array(following)
            for n in np.flatnonzero(dones):
                next_observations[n] = info["final_obs"][n]
                episodes.append((unfinished.returns[n], unfinished.lengths[n]))
                unfinished.returns[n] = unfinished.lengths[n] = 0
        rewards = np.array(rewards, np.float64)
        happened = raw_observations, rewards, dones, cut, next_observations
        steps.append((observations, actions, *happened))
    observations, actions, *arrays = zip(*steps)
    arrays = [np.stack(array) for array in arrays]
    check_finite(args.env_id, observations=arrays[-1], rewards=arrays[1])
    return (torch.stack(observations), torch.stack(actions), *arrays), episodes


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
def learning_batch(rollout: tuple, agent: Agent, unfinished: Unfinished, args: Args) -> dict:
    """What update() needs of a rollout, as rows (T N,...), with advantages and returns."""
    observations, actions, _, rewards, dones, cut, next_observations = rollout
    if args.norm_reward:
        rewards = scale_rewards(rewards, dones, agent, unfinished, args)
    if args.bootstrap_truncation and cut.any():
        last = agent.normalize(next_observations[cut])
        rewards[cut] += args.gamma * agent.values(last).cpu().numpy()
    values = agent.values(observations)  # (T,N)
    next_values = agent.values(agent.normalize(unfinished.observations))  # (N,)
    given = {"rewards": torch.from_numpy(rewards).float(), "dones": torch.from_numpy(dones)}
    given |= {"values": values.cpu(), "last_values": next_values.cpu()}  # faster on the CPU
    advantages, returns = gae(**given, gamma=args.gamma, gae_lambda=args.gae_lambda)
    observations = observations.flatten(0, 1)
    actions = actions.flatten(0, 1)
    outputs = agent.outputs(observations)
    return {
        "observations": observations,
        "actions": actions,
        "logprobs": agent.head.log_prob(outputs, actions),
        "entropy": agent.head.entropy(outputs),
        "values": values.flatten(),
        "advantages": advantages.flatten().to(agent.device),
        "returns": returns.flatten().to(agent.device),
    }


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
