# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.6", "numpy>=2.0", "gymnasium[mujoco]>=1.1", "mujoco>=3.1", "imageio>=2.37",
#     "tyro>=1.0", "tensorboard>=2.18",
# ]
# ///
"""PPO with the unimodal Poisson policy: every action dimension is cut into K ordered atoms, and one number, the rate of
a right-truncated Poisson distribution, says which of them are likely.

Zhu et al., Discretizing Continuous Action Space with Unimodal Probability Distributions for On-Policy Reinforcement
Learning, arXiv 2408.00309. PPO: Schulman et al., arXiv 1707.06347, with the details of CleanRL.

Differs from the paper in:
1. `--policy poisson` samples from softmax(log-PMF / temperature), which is unimodal as the paper's title says; the
   authors' released code weights it once more and is not: that is `--policy poisson_repo`, see unimodal_poisson.md
2. network, learning rate and rollout are CleanRL's for every policy; in the released code they differ by policy
3. the value of the last state is added where an episode was cut off by the time limit (`--no-bootstrap-truncation`)
4. the paper's learned temperature is not offered: in the released code its gradient is zero

    python algorithms/unimodal_poisson.py                                                    # CPU, about 2 min
    python algorithms/unimodal_poisson.py --env-id Humanoid-v5 --total-timesteps 3000000     # real size, still a CPU
    python algorithms/unimodal_poisson.py --evaluate runs/<run> --video                      # scores, and an episode

T steps, N environments, B rows of a minibatch, O numbers of an observation, A action dimensions, K atoms."""

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

import gymnasium as gym
import imageio
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode
from torch import Tensor, nn
from torch.distributions import Beta, Categorical, Distribution, Independent, Normal
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # the repository root, for envs/
from envs.simulators import LeanVectorEnv, restore_simulator, simulator_state

LONGEST_EPISODE = 100_000  # steps of an evaluation, which waits for the end

# === 2 Args ===========================================================================================================


@dataclass
class Args:
    env_id: str = "HalfCheetah-v5"
    """gymnasium task with continuous actions; module:Name-v0 imports a module first (CleanRL: HalfCheetah-v4)"""
    policy: Literal[
        "poisson", "poisson_repo", "gaussian", "tanh_gaussian", "beta", "categorical", "ordinal", "bang_bang"
    ] = "poisson"
    """distribution of an action: the method, the released code's version of it, and the controls (ours)"""
    num_atoms: int = 11
    """K, values that an action dimension is cut into, for policies over atoms; bang_bang has 2 (Udprl code)"""
    temperature: float = 2.5
    """poisson: the log-PMF is divided by this before the softmax (Udprl code)"""
    rate_init: float | None = None
    """poisson: first rate; (K + 1) / 2 begins in the middle; None is ln 2, near the lowest atom (Udprl code: None)"""
    hidden_size: int = 64
    """width of the two hidden layers of the policy and of the value network (CleanRL; Udprl code: 128)"""
    total_timesteps: int = 120_000
    """steps of all environments together (ours; CleanRL: 1000000)"""
    learning_rate: float = 3e-4
    """Adam's learning rate at the beginning (CleanRL)"""
    anneal_lr: bool = True
    """lower the learning rate to 0 along a line (CleanRL; Udprl code: no)"""
    num_envs: int = 8
    """N, environments that are stepped together (ours: faster; CleanRL: 1)"""
    num_steps: int = 256
    """T, steps of each environment between two updates (ours: the same batch T N; CleanRL: 2048)"""
    gamma: float = 0.99
    """discount (CleanRL)"""
    gae_lambda: float = 0.95
    """lambda of generalised advantage estimation (CleanRL)"""
    num_minibatches: int = 32
    """minibatches that the T N transitions are dealt into (CleanRL)"""
    update_epochs: int = 10
    """times that each transition is learned from (CleanRL)"""
    norm_adv: bool = True
    """advantages get mean 0 and standard deviation 1 in every minibatch (CleanRL)"""
    clip_coef: float = 0.2
    """clip range of the probability ratio, and of the change of a value (CleanRL)"""
    clip_vloss: bool = True
    """clip the change of a value in the value loss (CleanRL)"""
    ent_coef: float = 0.0
    """weight of the entropy bonus (CleanRL)"""
    vf_coef: float = 0.5
    """weight of the value loss (CleanRL)"""
    max_grad_norm: float = 0.5
    """gradients are scaled down to this norm (CleanRL)"""
    target_kl: float | None = None
    """end the update after an epoch whose approximate KL is above this (CleanRL)"""
    norm_obs: bool = True
    """observations get mean 0 and standard deviation 1, and are clipped to +-10 (CleanRL)"""
    norm_reward: bool = True
    """rewards are divided by the standard deviation of the discounted return, and clipped to +-10 (CleanRL)"""
    bootstrap_truncation: bool = True
    """add the value of the last state where the time limit ended an episode (ours; CleanRL: no)"""
    seed: int = 1
    """seed of environments, networks and sampling (CleanRL)"""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """device of the networks; these are too small to gain from a GPU, auto takes one if there is one (ours)"""
    num_threads: int = 1
    """threads of torch on the CPU; more of them slow small networks down (ours)"""
    compile: bool = False
    """compile the loss and its gradient: needs a C++ compiler, a minute to start; CUDA graphs on a GPU (ours)"""
    eval_episodes: int = 10
    """episodes of an evaluation, once with the likeliest and once with sampled actions; 0 is none (ours)"""
    eval_steps: int = 0
    """environment steps between evaluations; 0 is at the end only (ours)"""
    save_steps: int = 20_480
    """environment steps between checkpoints: at most this many are repeated after a crash (ours)"""
    output_dir: str | None = None
    """run folder; None is runs/<script>__<env>__<seed>__<time> (ours)"""
    resume: str | None = None
    """run folder to continue, with the flags it was started with (ours)"""
    evaluate: str | None = None
    """run folder whose policy is scored, without training (ours)"""
    video: bool = False
    """with --evaluate: write an episode to episode.gif in the run folder (ours)"""


# === 3 The method =====================================================================================================


def poisson_logits(rate: Tensor, num_atoms: int, temperature: float) -> Tensor:
    """Logits of the unimodal policy: the log-PMF of a Poisson distribution over temperature. (B,A) -> (B,A,K)

    Atom i stands for the count k = i + 1. The softmax over K atoms is the truncation to the right. One mode for every
    rate and temperature, at the count floor(rate), because the ratio of neighbours, rate / k, falls with k.
    """
    counts = torch.arange(1, num_atoms + 1, device=rate.device, dtype=rate.dtype)  # (K,)
    rate = rate.clamp(min=1e-30)[..., None]  # (B,A,1) softplus underflows to 0
    return (counts * rate.log() - rate - torch.lgamma(counts + 1)) / temperature  # (B,A,K)


def poisson_repo_logits(rate: Tensor, num_atoms: int, temperature: float) -> Tensor:
    """Logits of the released code: it puts the probabilities p of poisson_logits through one more step. -> (B,A,K)

    (K - i) ln(p_i + 1e-8) + i ln(1 - p_i + 1e-8) for atom i = 0..K-1, a slip of an axis in the ordinal transform that
    it was copied from. The result is not unimodal: at rate ln 2 nearly all mass is at the two ends.
    """
    probabilities = poisson_logits(rate, num_atoms, temperature).softmax(-1)  # (B,A,K)
    below = torch.arange(num_atoms, device=rate.device, dtype=rate.dtype)  # (K,)
    rest = (1 - probabilities).clamp(min=0)  # (B,A,K) a softmax in float32 may exceed 1
    return (num_atoms - below) * (probabilities + 1e-8).log() + below * (rest + 1e-8).log()  # (B,A,K)


def ordinal_logits(scores: Tensor) -> Tensor:
    """Logits of the ordinal policy: atom i says yes to scores 0..i and no to the rest. (B,A,K) -> (B,A,K)

    Tang & Agrawal, arXiv 1901.10500, eq. 4: the sum of ln sigmoid(s_j) over j <= i and of ln(1 - sigmoid(s_j)) over
    j > i.
    """
    yes, no = F.logsigmoid(scores), F.logsigmoid(-scores)  # (B,A,K)
    return yes.cumsum(-1) + no.sum(-1, keepdim=True) - no.cumsum(-1)  # (B,A,K)


def action_logits(head: Tensor, policy: str, num_atoms: int, temperature: float) -> Tensor:
    """Logits of a policy over atoms, from what action_distribution takes. (B,A) or (B,A,K) -> (B,A,K)"""
    if policy in ("poisson", "poisson_repo"):
        logits = poisson_logits if policy == "poisson" else poisson_repo_logits
        return logits(F.softplus(head), num_atoms, temperature)
    return ordinal_logits(head) if policy == "ordinal" else head  # categorical, bang_bang


def action_distribution(head: Tensor, policy: str, num_atoms: int, temperature: float) -> Distribution:
    """Distribution of actions (B,A), independent over the A dimensions; log_prob and entropy are (B,).

    head: what the network says. poisson, poisson_repo: (B,A), softplus makes it the rate. categorical, ordinal:
    (B,A,K). bang_bang: (B,A,2). gaussian, tanh_gaussian: (B,A,2), mean (tanh of it) and log standard deviation. beta:
    (B,A,2), softplus + 1 makes them alpha and beta. Actions are atom numbers, or in [0, 1] for beta, or real numbers.
    """
    if policy in ("gaussian", "tanh_gaussian"):
        mean, log_std = head.unbind(-1)  # (B,A) each
        base = Normal(mean.tanh() if policy == "tanh_gaussian" else mean, log_std.exp(), validate_args=False)
    elif policy == "beta":
        base = Beta(*(F.softplus(head) + 1).unbind(-1), validate_args=False)
    else:
        base = Categorical(logits=action_logits(head, policy, num_atoms, temperature), validate_args=False)
    return Independent(base, 1, validate_args=False)


def sample_actions(head: Tensor, noise: Tensor, policy: str, num_atoms: int, temperature: float) -> Tensor:
    """A sample of action_distribution from noise drawn beforehand, with fewer operations. -> (B,A)

    noise: (B,A,K) Gumbel for policies over atoms, whose argmax after adding is a sample; (B,A) normal for Gaussians.
    """
    if policy in ("gaussian", "tanh_gaussian"):
        mean, log_std = head.unbind(-1)  # (B,A) each
        return (mean.tanh() if policy == "tanh_gaussian" else mean) + log_std.exp() * noise  # (B,A)
    if policy == "beta":
        return action_distribution(head, policy, num_atoms, temperature).sample()  # (B,A)
    return (action_logits(head, policy, num_atoms, temperature) + noise).argmax(-1)  # (B,A)


def logprob_and_entropy(head: Tensor, actions: Tensor, policy: str, num_atoms: int, temperature: float) -> tuple:
    """log_prob and entropy of action_distribution with half of the operations. -> (B,), (B,)"""
    if policy == "beta":
        return (beta := action_distribution(head, policy, num_atoms, temperature)).log_prob(actions), beta.entropy()
    if policy in ("gaussian", "tanh_gaussian"):
        mean, log_std = head.unbind(-1)  # (B,A) each
        apart = (actions - (mean.tanh() if policy == "tanh_gaussian" else mean)) * (-log_std).exp()  # (B,A)
        entropy = (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)  # (B,)
        return 0.5 * (1 - apart.square()).sum(-1) - entropy, entropy  # (B,) each
    logprobs = action_logits(head, policy, num_atoms, temperature).log_softmax(-1)  # (B,A,K)
    entropy = -(logprobs.exp() * logprobs).sum((-2, -1))  # (B,)
    return logprobs.gather(-1, actions[..., None])[..., 0].sum(-1), entropy  # (B,) each


def environment_actions(actions: Tensor, low: Tensor, high: Tensor, policy: str, num_atoms: int) -> Tensor:
    """What the environment gets: atoms are evenly spaced from the lowest to the highest value. (B,A) -> (B,A)

    A Gaussian is in the environment's units and clipped; tanh_gaussian is in [-1, 1] and clipped before it is scaled.
    """
    if policy == "gaussian":
        return actions.clamp(low, high)
    if policy == "tanh_gaussian":
        actions = (actions.clamp(-1, 1) + 1) / 2  # (B,A)
    elif policy != "beta":
        actions = actions / (num_atoms - 1)  # (B,A)
    return low + (high - low) * actions


def gae(rewards: Tensor, dones: Tensor, values: Tensor, last_values: Tensor, gamma: float, gae_lambda: float) -> tuple:
    """Generalised advantage estimation, arXiv 1506.02438 eq. 16. (T,N), (T,N), (T,N), (N,) -> advantages, returns (T,N)

    dones[t] says that step t ended an episode, so nothing after it counts.
    """
    alive = 1 - dones.to(values.dtype)  # (T,N)
    deltas = rewards + gamma * alive * torch.cat([values[1:], last_values[None]]) - values  # (T,N)
    advantages, last = [], torch.zeros_like(last_values)  # (N,)
    for delta, decay in zip(deltas.flip(0).unbind(), (gamma * gae_lambda * alive).flip(0).unbind()):
        last = torch.addcmul(delta, decay, last)  # (N,)
        advantages.append(last)
    advantages = torch.stack(advantages[::-1])  # (T,N)
    return advantages, advantages + values


# fmt: off
def ppo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, values: Tensor, old_values: Tensor, returns: Tensor,
    entropy: Tensor, *, clip_coef: float, ent_coef: float, vf_coef: float, norm_adv: bool = True,
    clip_vloss: bool = True,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: on
    """Clipped loss of PPO, arXiv 1707.06347 eq. 7 and 9, to be minimised, and metrics. All (B,) -> scalar

    Advantages are normalised here, with the population's standard deviation. The value may move by clip_coef.
    """
    if norm_adv:
        std, mean = torch.std_mean(advantages, correction=0)  # scalars
        advantages = (advantages - mean) / (std + 1e-8)  # (B,)
    log_ratio = logprobs - old_logprobs  # (B,)
    ratio = log_ratio.exp()  # (B,)
    policy_loss = -torch.min(advantages * ratio, advantages * ratio.clamp(1 - clip_coef, 1 + clip_coef)).mean()
    value_loss = (values - returns).square()  # (B,)
    if clip_vloss:
        clipped = old_values + (values - old_values).clamp(-clip_coef, clip_coef)  # (B,)
        value_loss = torch.max(value_loss, (clipped - returns).square())  # (B,)
    value_loss, entropy = 0.5 * value_loss.mean(), entropy.mean()  # scalars
    with torch.no_grad():  # k3 and its name are CleanRL's
        metrics = {"approx_kl": (ratio - 1 - log_ratio).mean()}  # scalars
        metrics["clipfrac"] = ((ratio - 1).abs() > clip_coef).to(ratio.dtype).mean()
    metrics |= {"policy_loss": policy_loss.detach(), "value_loss": value_loss.detach(), "entropy": entropy.detach()}
    return policy_loss - ent_coef * entropy + vf_coef * value_loss, metrics


def atom_metrics(probabilities: Tensor) -> dict[str, Tensor]:
    """How policies over atoms look: mass on both ends, share with more than one local maximum. (B,A,K) -> scalars"""
    steps = probabilities.diff()  # (B,A,K-1)
    again = ((steps > 0) & ((steps < 0).cumsum(-1) > 0)).any(-1)  # (B,A) rises again after a fall
    return {"extreme_mass": probabilities[..., [0, -1]].sum(-1).mean(), "frac_multimodal": again.to(steps.dtype).mean()}


class RunningMeanStd:
    """Mean and population variance of all rows seen so far. Rows are (B,...), statistics (...); Chan's formula."""

    def __init__(self, shape: tuple[int, ...] = ()):
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4  # as baselines and gymnasium begin

    def update(self, rows: np.ndarray) -> None:
        """Take in rows (B,...)."""
        size, total, apart = len(rows), self.count + len(rows), rows - self.mean  # (B,...)
        delta = apart.sum(0) / size  # (...)
        spread = self.var * self.count + (apart * apart).sum(0) - delta * delta * (size * size / total)  # (...)
        self.mean, self.var, self.count = self.mean + delta * (size / total), spread / total, total

    def state_dict(self) -> dict:
        """The statistics as tensors."""
        return {"mean": torch.tensor(self.mean), "var": torch.tensor(self.var), "count": self.count}

    def load_state_dict(self, state: dict) -> None:
        """Continue with the statistics of state_dict."""
        self.mean, self.var, self.count = state["mean"].numpy(), state["var"].numpy(), state["count"]


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


def mlp(inputs: int, hidden: int, outputs: int, gain: float) -> nn.Sequential:
    """Two hidden layers with tanh; orthogonal weights, zero biases. `gain` is that of the last layer."""
    linear = [nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)]
    for layer, scale in zip(linear, (math.sqrt(2), math.sqrt(2), gain)):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(linear[0], nn.Tanh(), linear[1], nn.Tanh(), linear[2])


class Agent(nn.Module):
    """Policy and value network over normalised observations (B,O)."""

    def __init__(self, observation_size: int, action_space: gym.spaces.Box, args: Args):
        super().__init__()
        size, atoms = len(action_space.low), 2 if args.policy == "bang_bang" else args.num_atoms
        self.shape = (args.policy, atoms, args.temperature)  # what the functions of section 3 take
        # numbers for each action dimension
        self.outputs = dict(poisson=1, poisson_repo=1, gaussian=1, tanh_gaussian=1, beta=2).get(args.policy, atoms)
        self.actor = mlp(observation_size, args.hidden_size, size * self.outputs, 0.01)
        self.critic = mlp(observation_size, args.hidden_size, 1, 1.0)
        self.log_std = nn.Parameter(torch.zeros(size)) if args.policy.endswith("gaussian") else None
        if args.rate_init is not None:
            nn.init.constant_(self.actor[-1].bias, args.rate_init + math.log(-math.expm1(-args.rate_init)))
        self.register_buffer("low", torch.tensor(action_space.low, dtype=torch.float32), persistent=False)
        self.register_buffer("high", torch.tensor(action_space.high, dtype=torch.float32), persistent=False)

    def head(self, observations: Tensor) -> Tensor:
        """What action_distribution takes, at observations (B,O)."""
        head = self.actor(observations)  # (B,A outputs)
        if self.log_std is not None:
            return torch.stack([head, self.log_std.expand_as(head)], -1)  # (B,A,2)
        return head if self.outputs == 1 else head.view(len(head), -1, self.outputs)  # (B,A) or (B,A,outputs)

    def distribution(self, observations: Tensor) -> Distribution:
        """Of the actions at observations (B,O)."""
        return action_distribution(self.head(observations), *self.shape)

    def noise(self, *shape: int) -> Tensor:
        """For sample_actions, (...,A,K) or (...,A)."""
        noise = torch.empty(*shape, len(self.low), self.shape[1], device=self.low.device)
        return noise[..., 0].normal_() if self.log_std is not None else noise.exponential_().log_().neg_()

    def values(self, observations: Tensor) -> Tensor:
        """(...,O) -> (...)"""
        return self.critic(observations)[..., 0]

    def to_environment(self, actions: Tensor) -> np.ndarray:
        """Sampled actions (B,A) in the environment's units (B,A)."""
        return environment_actions(actions, self.low, self.high, *self.shape[:2]).cpu().numpy()


# === 5 Rollout ========================================================================================================


def make_envs(args: Args, count: int, **options) -> LeanVectorEnv:
    """`count` copies of the task in this process: one core steps MuJoCo faster than pipes carry its observations."""

    def make() -> gym.Env:
        env = gym.make(args.env_id, disable_env_checker=True, **options)
        return env if len(env.observation_space.shape or ()) == 1 else gym.wrappers.FlattenObservation(env)

    with or_fail(f"--env-id {args.env_id}: cannot be made"):
        envs = LeanVectorEnv([make] * count, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
    space = envs.single_action_space
    if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
        fail(f"--env-id {args.env_id}: its actions are {space}; expected a Box of one dimension")
    if args.policy != "gaussian" and not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        fail(f"--policy {args.policy}: needs bounded actions, --env-id {args.env_id} has {space}; use gaussian")
    return envs


class Environments:
    """The task's copies with what belongs to them: normalisation, unfinished episodes, and their exact state."""

    KEPT = ("discounted", "returns", "lengths", "observations")

    def __init__(self, args: Args):
        self.args, self.envs = args, make_envs(args, args.num_envs)
        self.observation_stats = RunningMeanStd(self.envs.single_observation_space.shape)
        self.return_stats = RunningMeanStd()
        # (N,) each, of unfinished episodes: `discounted` is the running sum that sets the reward's unit
        self.discounted, self.returns, self.lengths = np.zeros((3, args.num_envs))
        self.observations = self.take_in(self.envs.reset(seed=args.seed)[0])  # (N,O) normalised

    def take_in(self, observations: np.ndarray) -> np.ndarray:
        """Learn the statistics of observations (N,O), and normalise."""
        if self.args.norm_obs:
            self.observation_stats.update(observations)
        return normalise(observations, self.observation_stats, self.args)

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict, list]:
        """Actions (N,A) -> scaled rewards (N,), ends (N,), last observations by number where the time limit ended an
        episode, and (return, length) of finished episodes. self.observations are those to act on next."""
        observations, rewards, terminated, truncated, info = self.envs.step(actions)
        ends, cut, episodes = terminated | truncated, {}, []  # (N,)
        self.returns += rewards
        self.lengths += 1
        if self.args.norm_reward:
            self.discounted = self.discounted * self.args.gamma + rewards  # (N,)
            self.return_stats.update(self.discounted)
            rewards = (rewards / math.sqrt(self.return_stats.var + 1e-8)).clip(-10, 10)  # (N,)
        for n, last in info["final_obs"].items():
            episodes.append((float(self.returns[n]), int(self.lengths[n])))
            if truncated[n] and not terminated[n]:
                cut[n] = normalise(last, self.observation_stats, self.args)  # (O,)
            self.returns[n] = self.lengths[n] = self.discounted[n] = 0
        self.observations = self.take_in(observations)
        return rewards, ends, cut, episodes

    def state_dict(self) -> dict:
        """Everything that the next step depends on."""
        arrays = {name: torch.tensor(getattr(self, name)) for name in self.KEPT}
        return arrays | {"simulators": list(map(simulator_state, self.envs.envs))}

    def load_state_dict(self, state: dict) -> None:
        """Continue where state_dict was taken."""
        for name in self.KEPT:
            setattr(self, name, state[name].numpy())
        for env, simulator in zip(self.envs.envs, state["simulators"]):
            restore_simulator(env, simulator)


def normalise(observations: np.ndarray, stats: RunningMeanStd, args: Args) -> np.ndarray:
    """(...,O) -> (...,O) float32"""
    if args.norm_obs:
        observations = (observations - stats.mean) / np.sqrt(stats.var + 1e-8)
        observations = np.minimum(np.maximum(observations, -10), 10)  # faster than clip on small arrays
    return observations.astype(np.float32)


@torch.inference_mode()
def collect(envs: Environments, agent: Agent, buffer: dict[str, Tensor]) -> list[tuple[float, int]]:
    """T steps of N environments into the buffer, (T,N,...) each. Returns (return, length) of finished episodes.

    Only acting happens step by step; values, log-probabilities and advantages are computed for all steps at once.
    """
    args, device, seen, cut, episodes = envs.args, agent.low.device, [], [], []
    for t, noise in enumerate(agent.noise(args.num_steps, args.num_envs).unbind()):  # (N,A,K) or (N,A)
        observations = torch.from_numpy(envs.observations).to(device)  # (N,O)
        actions = sample_actions(agent.head(observations), noise, *agent.shape)  # (N,A)
        rewards, ends, last, finished = envs.step(agent.to_environment(actions))
        seen.append((observations, actions, torch.from_numpy(rewards), torch.from_numpy(ends)))
        cut += [(t, n, observation) for n, observation in last.items()]
        episodes += finished
    for name, rows in zip(("observations", "actions", "rewards", "dones"), zip(*seen)):
        buffer[name][:] = torch.stack(rows)  # (T,N,...)
    buffer["values"][:] = values = agent.values(buffer["observations"])  # (T,N)
    head, taken = agent.head(buffer["observations"].flatten(0, 1)), buffer["actions"].flatten(0, 1)  # (T N,...) each
    buffer["logprobs"].view(-1)[:] = logprob_and_entropy(head, taken, *agent.shape)[0]  # (T N,)
    if cut and args.bootstrap_truncation:
        steps, numbers, last = zip(*cut)
        cut_values = agent.values(torch.from_numpy(np.stack(last)).to(device)).cpu()  # one each
        buffer["rewards"][list(steps), list(numbers)] += args.gamma * cut_values
    last_values = agent.values(torch.from_numpy(envs.observations).to(device))  # (N,)
    found = gae(buffer["rewards"], buffer["dones"], values.cpu(), last_values.cpu(), args.gamma, args.gae_lambda)
    buffer["advantages"][:], buffer["returns"][:] = found  # (T,N) each
    return episodes


def minibatch_loss(agent: Agent, batch: dict[str, Tensor], args: Args) -> tuple[Tensor, dict[str, Tensor]]:
    """Forward pass and loss of one minibatch: (B,...) each."""
    logprobs, entropy = logprob_and_entropy(agent.head(batch["observations"]), batch["actions"], *agent.shape)  # (B,)
    old = batch["logprobs"], batch["advantages"], agent.values(batch["observations"]), batch["values"], batch["returns"]
    flags = {"clip_coef": args.clip_coef, "ent_coef": args.ent_coef, "vf_coef": args.vf_coef, "norm_adv": args.norm_adv}
    # the entropy is only logged where it has no weight
    return ppo_loss(logprobs, *old, entropy if args.ent_coef else entropy.detach(), clip_vloss=args.clip_vloss, **flags)


def update(agent: Agent, optimizer, batch: dict[str, Tensor], args: Args, loss_function=minibatch_loss) -> dict:
    """Adam on all minibatches, several times. batch: (T N,...) each. Returns means of the metrics."""
    size, sums, count = len(batch["actions"]), 0.0, 0
    for _ in range(args.update_epochs):
        order, kl, before = torch.randperm(size, device=batch["actions"].device), 0.0, count
        pieces = {name: values[order].split(size // args.num_minibatches) for name, values in batch.items()}
        for rows in zip(*pieces.values()):
            loss, metrics = loss_function(agent, dict(zip(pieces, rows)), args)
            optimizer.zero_grad()
            loss.backward()
            metrics["grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm, foreach=True)
            optimizer.step()
            sums, kl, count = sums + torch.stack(list(metrics.values())), kl + metrics["approx_kl"], count + 1
        if args.target_kl is not None and kl / (count - before) > args.target_kl:
            break
    found = dict(zip(metrics, (sums / count).tolist()))
    if not math.isfinite(sum(found.values())):
        fail("a loss is not a number any more; the last checkpoint is good; lower --learning-rate, check rewards", 1)
    return found


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
def play(agent: Agent, stats: RunningMeanStd, args: Args, count: int, deterministic: bool, **options) -> tuple:
    """One episode in each of `count` fresh environments, all at once. -> returns (count,), frames of the first."""
    envs, returns, frames, steps = make_envs(args, count, **options), np.zeros(count), [], 0  # (count,)
    observations, running = envs.reset(seed=args.seed + 10_000)[0], np.ones(count, dtype=bool)  # (count,O), (count,)
    with torch.random.fork_rng(range(torch.cuda.device_count())):  # evaluating more often changes nothing in training
        torch.manual_seed(args.seed)
        while running.any():
            frames += [envs.envs[0].render()] if options else []
            policy = agent.distribution(torch.from_numpy(normalise(observations, stats, args)).to(agent.low.device))
            actions = policy.mode if deterministic else policy.sample()  # (count,A)
            observations, rewards, terminated, truncated, _ = envs.step(agent.to_environment(actions))
            returns += rewards * running
            running &= ~(terminated | truncated)
            if (steps := steps + 1) > LONGEST_EPISODE:
                fail(f"--env-id {args.env_id}: an episode did not end in {steps:,} steps; set its max_episode_steps", 1)
    envs.close()
    return returns, frames


def evaluate(agent: Agent, stats: RunningMeanStd, args: Args) -> dict[str, float]:
    """Returns of whole episodes in the task's own unit, with the likeliest and with sampled actions."""
    scores = {}
    for name, deterministic in (("deterministic", True), ("sampled", False)):
        returns = play(agent, stats, args, args.eval_episodes, deterministic)[0]  # (episodes,)
        scores |= {f"eval/{name}/return_mean": returns.mean().item(), f"eval/{name}/return_std": returns.std().item()}
    return scores


def load_run(run_dir: str) -> tuple[Agent, RunningMeanStd, Args]:
    """Networks and normalisation of a run's newest checkpoint, and its flags."""
    args = run_args(Args(evaluate=run_dir))
    envs = make_envs(args, 1)
    stats = RunningMeanStd(envs.single_observation_space.shape)
    agent = Agent(stats.mean.size, envs.single_action_space, args)
    if not load_checkpoint(run_dir, {"agent": agent, "observation_stats": stats}):
        fail(f"{run_dir}: has no checkpoint yet; continue it with --resume {run_dir}")
    return agent, stats, args


def load_policy(run_dir: str, deterministic: bool = True):
    """The policy of a run as a function: one observation (O,) of the task -> action (A,) of the task."""
    agent, stats, args = load_run(run_dir)

    @torch.no_grad()
    def act(observation: np.ndarray) -> np.ndarray:
        distribution = agent.distribution(torch.from_numpy(normalise(observation[None], stats, args)))
        return agent.to_environment(distribution.mode if deterministic else distribution.sample())[0]

    return act


def score_run(args: Args) -> dict[str, float]:
    """--evaluate: scores of a run's policy, printed, and with --video an episode as a moving picture."""
    agent, stats, trained = load_run(run_args(args).output_dir)  # other flags must be those of the run
    scores = evaluate(agent, stats, replace(trained, eval_episodes=args.eval_episodes)) if args.eval_episodes else {}
    print("  ".join(f"{tag} {value:.1f}" for tag, value in scores.items()))
    if args.video:
        with or_fail("--video: the task cannot be rendered here; without a screen try MUJOCO_GL=egl", 1):
            frames = [x[::2, ::2] for x in play(agent, stats, trained, 1, True, render_mode="rgb_array")[1][:600:2]]
        imageio.mimsave(path := os.path.join(args.evaluate, "episode.gif"), frames, duration=1000 / 30, loop=0)
        print(path)
    return scores


# === 8 Training loop ==================================================================================================


def check_args(args: Args) -> None:
    """One sentence for every flag that cannot work."""
    least = {f.name: int(f.type is int) for f in fields(Args)} | {"rate_init": 1e-6, "temperature": 1e-6}
    least |= {"seed": 0, "eval_episodes": 0, "eval_steps": 0, "num_atoms": 2}
    for f in fields(Args):
        value, kinds = getattr(args, f.name), [getattr(x, "__name__", x) for x in get_args(f.type) or (f.type,)]
        highest = 1 if f.name in ("gamma", "gae_lambda") else 2**31
        unfit = value not in kinds and not {*kinds, "int"} & {kind.__name__ for kind in type(value).__mro__}
        if value == "" or unfit or (isinstance(value, (int, float)) and not least[f.name] <= value <= highest):
            wanted = " or ".join(kinds) if unfit else f"a number from {least[f.name]} to {highest:,}"
            fail(f"--{f.name.replace('_', '-')} {value!r}: expected {'a name' if value == '' else wanted}")
    batch = args.num_envs * args.num_steps
    if batch % args.num_minibatches or batch == args.num_minibatches:
        fail(f"--num-minibatches {args.num_minibatches}: expected a divisor of --num-envs x --num-steps, {batch}")
    if args.total_timesteps < batch:
        fail(f"--total-timesteps {args.total_timesteps}: less than one batch of --num-envs x --num-steps, {batch}")
    if args.rate_init is not None and not args.policy.startswith("poisson"):
        fail(f"--rate-init {args.rate_init}: only the poisson policies have a rate, not --policy {args.policy}")
    if args.video and not args.evaluate:
        fail("--video: needs --evaluate RUN_DIR, the run whose policy is shown")


def make_buffer(envs: Environments, agent: Agent) -> dict[str, Tensor]:
    """Room for T steps of N environments, (T,N,...) each; what the simulator says stays on the CPU."""
    shape, device = (envs.args.num_steps, envs.args.num_envs), agent.low.device  # (T,N)
    kind = torch.float32 if envs.args.policy in ("gaussian", "tanh_gaussian", "beta") else torch.int64  # atom numbers
    buffer = {x: torch.zeros(shape, device=device) for x in ("logprobs", "advantages", "values", "returns")}
    buffer |= {"observations": torch.zeros(*shape, envs.observations.shape[1], device=device)}  # (T,N,O)
    buffer |= {"actions": torch.zeros(*shape, len(agent.low), dtype=kind, device=device)}  # (T,N,A)
    return buffer | {"rewards": torch.zeros(shape), "dones": torch.zeros(shape)}


def batch_metrics(agent: Agent, batch: dict[str, Tensor], episodes: list, args: Args) -> dict[str, float]:
    """What the steps of a batch say: finished episodes, the value network, and the look of policies over atoms."""
    out = {"losses/explained_variance": 1 - float((batch["returns"] - batch["values"]).var() / batch["returns"].var())}
    if episodes:
        out |= dict(zip(["charts/episodic_return", "charts/episodic_length"], np.mean(episodes, 0, float).tolist()))
    with torch.no_grad():
        base = agent.distribution(batch["observations"][: 16 * args.num_envs]).base_dist
    looks = atom_metrics(base.probs) if isinstance(base, Categorical) else {}
    return out | {f"train/unimodal_poisson/{name}": value.item() for name, value in looks.items()}


def train(args: Args) -> dict[str, float]:
    """Train as the flags say. Returns the last evaluation. Steps as in unimodal_poisson.md."""
    args = run_args(args) if args.resume and not args.evaluate else args
    check_args(args)
    device = setup(args)
    if args.evaluate:
        return score_run(args)
    envs = Environments(args)
    agent = Agent(envs.observations.shape[1], envs.envs.single_action_space, args).to(device)
    optimizer, progress = torch.optim.Adam(agent.parameters(), eps=1e-5, fused=True), Progress(step=0)
    state = {"agent": agent, "optimizer": optimizer, "progress": progress, "environments": envs}
    state |= {"observation_stats": envs.observation_stats, "return_stats": envs.return_stats}
    run_dir = args.output_dir or f"runs/{Path(__file__).stem}__{Path(args.env_id).name}__{args.seed}__{time.time():.0f}"
    if not args.resume and any(os.path.exists(f"{run_dir}/{x}") for x in ("args.json", "metrics.csv")):
        fail(f"--output-dir {run_dir}: holds a run already; continue it with --resume {run_dir} or name another folder")
    loaded = progress["step"] if args.resume and load_checkpoint(run_dir, state) else -1
    logger, buffer = Logger(run_dir, args, loaded), make_buffer(envs, agent)
    print(f"{run_dir}: {args.policy} policy, {args.num_envs} x {args.num_steps} steps a batch, {device}")
    loss_function = torch.compile(minibatch_loss, mode="reduce-overhead") if args.compile else minibatch_loss
    signals = []  # the batch is finished and saved before the run leaves; a second signal leaves at once
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os._exit(128 + number) if signals else signals.append(number))
    start, first, scores, size = time.perf_counter(), progress["step"], {}, args.num_envs * args.num_steps
    end = args.total_timesteps // size * size
    while True:
        step, last, stop = progress["step"], progress["step"] >= end, max(signals, default=0)
        scoring, saving = (n and step // n > (step - size) // n for n in (args.eval_steps, args.save_steps))
        if step != loaded and args.eval_episodes and (last or scoring):
            logger.scalars(step, scores := evaluate(agent, envs.observation_stats, args))
            print("  ".join(f"{tag} {value:.1f}" for tag, value in scores.items()), flush=True)
        if step not in (0, loaded) and (last or stop or saving):
            save_checkpoint(run_dir, step, state)
        if last or stop:
            break
        began = time.perf_counter()
        rate = linear_schedule(args.learning_rate, 0, end if args.anneal_lr else math.inf, step)
        optimizer.param_groups[0]["lr"] = rate
        episodes, acted = collect(envs, agent, buffer), time.perf_counter()  # 1. act; estimate advantages
        batch = {name: buffer[name].flatten(0, 1) for name in buffer.keys() - {"rewards", "dones"}}  # (T N,...) each
        metrics = update(agent, optimizer, batch, args, loss_function)  # 2. clipped loss, several epochs
        now = time.perf_counter()  # 3. log; evaluate and save above
        progress["step"] = step = step + size
        metrics = {f"losses/{name}": value for name, value in metrics.items()} | {"charts/learning_rate": rate}
        logger.scalars(step, metrics | (found := batch_metrics(agent, batch, episodes, args)))
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else getrusage(RUSAGE_SELF).ru_maxrss * 1024
        perf = {"charts/SPS": size / (now - began), "perf/rollout_seconds": acted - began}
        logger.scalars(step, perf | {"perf/update_seconds": now - acted, "perf/peak_memory_gb": peak / 1e9}, "perf.csv")
        left, done = (now - start) / (step - first) * (end - step), f"step {step:>9,}/{end:,}"
        done += f"  return {found['charts/episodic_return']:9.1f}" if episodes else f"  {'no episode ended':>16}"
        print(f"{done}  {perf['charts/SPS']:6,.0f} steps/s  {left // 60:.0f}:{left % 60:02.0f} left", flush=True)
    if stop and not last:
        fail(f"stopped after step {step}; continue with --resume {run_dir}", 128 + stop)
    return scores


if __name__ == "__main__":
    train(tyro.cli(Args))
