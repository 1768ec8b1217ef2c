# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.6", "numpy>=2.0", "gymnasium[mujoco]>=1.1", "tyro>=1.0", "tensorboard>=2.18",
# ]
# ///
"""Stream AC(lambda) and stream Q(lambda): deep reinforcement learning from one transition at a
time. There is no replay buffer, no batch and no target network.

Elsayed, Vasan & Mahmood, Streaming Deep Reinforcement Learning Finally Works, arXiv 2410.14606.

Four parts are meant to keep this from diverging: an optimizer that bounds its step (ObGD), sparse
initial weights (sparse_init_), layer normalization (Network), and running normalization of
observations and rewards (Stream). There is no loss: Agent.learn raises an objective, whose gradient
ObGD.step multiplies by the TD error. For another distribution of actions change Agent.policy.

Differs from the authors' code:
1. The policy acts and learns with one forward pass, and both values of a transition are computed
   in one. In a bounded Box, -1 and 1 of the Gaussian are the ends of an action.
2. Each episode starts from a seed made of --seed and the step, so that a resumed run is the same.
3. At the end, the policy is evaluated with frozen statistics of observations.
4. Discrete tasks keep their own time limit (authors: 10,000 steps).

    python algorithms/stream_x.py                                    # Hopper-v5, CPU, a minute
    python algorithms/stream_x.py --algorithm q --env-id CartPole-v1 --hidden-size 32
    python algorithms/stream_x.py --optimizer sgd --lr 1e-3          # the same without the bound

It runs on one CPU core. In shapes, O is the size of an observation plus 1, for the time.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import SyncVectorEnv, VectorEnv
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.tensorboard import SummaryWriter

# Flags that can change when a run is resumed.
FREE = "total_timesteps save_steps eval_steps eval_episodes resume evaluate".split()
SPACES = (gym.spaces.Box, gym.spaces.Discrete)  # of actions
USED = ("args.json", "checkpoint.pt", "final.pt")  # what a run folder holds
MOST_STEPS = 20_000  # of an episode in an evaluation; where there is no time limit, it may not end


@dataclass
class Args:
    env_id: str = "Hopper-v5"
    """gymnasium task; my_tasks:Reach-v0 imports my_tasks first"""
    env_kwargs: str = "{}"
    """what gymnasium.make passes on to the task, as JSON"""
    algorithm: Literal["ac", "q"] = "ac"
    """ac: stream AC(lambda), Box or discrete actions; q: stream Q(lambda), discrete ones only"""
    total_timesteps: int = 50_000
    """environment steps (authors: 2,000,000 for MuJoCo)"""
    lr: float = 1.0
    """alpha, the step size; it cancels while the bound is active"""
    gamma: float = 0.99
    """discount"""
    lamda: float = 0.8
    """lambda: the traces decay by gamma x lambda"""
    kappa_policy: float = 3.0
    """bounds the step of the policy; more is stricter"""
    kappa_value: float = 2.0
    """bounds the step of the values; more is stricter"""
    entropy_coef: float = 0.01
    """ac: weight of the entropy"""
    end_e: float = 0.01
    """q: probability of a random action at the end; it begins with 1"""
    exploration_fraction: float = 0.05
    """q: share of the steps in which that probability falls"""
    hidden_size: int = 128
    """width of the two hidden layers (paper: 32 for small tasks with discrete actions)"""
    optimizer: Literal["obgd", "adaptive_obgd", "sgd"] = "obgd"
    """sgd is the control: traces without a bound, which needs a small --lr"""
    layer_norm: bool = True
    """normalize the hidden layers"""
    sparse_init: bool = True
    """start with nine of ten weights at zero; without it, with PyTorch's weights"""
    seed: int = 1
    """seed of environment, networks and sampling"""
    save_steps: int = 2_000
    """steps between rows of metrics and checkpoints, at ends of episodes; 0: no checkpoints"""
    eval_steps: int = 0
    """steps between evaluations, at ends of episodes; 0 evaluates at the end only"""
    eval_episodes: int = 10
    """episodes of an evaluation, with the likeliest and with sampled actions; 0 disables them"""
    output_dir: str | None = None
    """run folder; None is runs/<script>__<task>__<seed>__<time>"""
    resume: str | None = None
    """run folder to continue; --total-timesteps, --save-steps and --eval-... can be given anew"""
    evaluate: str | None = None
    """run folder to score instead of training, with its flags; it can run code, so trust it"""


# --- The method ---------------------------------------------------------------------------------


class ObGD:
    """Overshooting-bounded gradient descent with eligibility traces.

    .grad of each parameter is the gradient of an objective to be raised: V, Q, or ln pi and
    entropy. A step adds delta z to the weights, times lr / max(M, 1) with
    M = lr kappa max(|delta|, 1) ||z||_1, the norm over the traces z of all parameters. So the
    absolute changes add up to 1 / kappa at most. With kappa = 0 this is SGD with traces, known as
    TD(lambda). Adaptive: z is divided by sqrt(v + 1e-8), v being Adam's mean of (delta z)^2.
    """

    power = 1.0  # 0.999 to the power of the number of steps

    def __init__(self, params, lr=1.0, gamma=0.99, lamda=0.8, kappa=2.0, adaptive=False):
        self.adaptive = adaptive
        self.params = list(params)
        self.weights = parameters_to_vector(self.params).detach()
        vector_to_parameters(self.weights, self.params)  # from now on, they are views of it
        self.trace = torch.zeros_like(self.weights)  # z, the eligibility trace
        self.square = torch.zeros_like(self.weights)  # v
        self.lr = lr
        self.decay = gamma * lamda
        self.kappa = kappa

    def step(self, delta, reset):
        """Add step size x delta x z to the weights; then empty z if reset. -> step size"""
        self.trace *= self.decay
        self.trace += torch.cat([param.grad.flatten() for param in self.params])
        direction = self.trace
        if self.adaptive:
            self.power *= 0.999
            self.square = 0.999 * self.square + 0.001 * (delta * self.trace) ** 2
            direction = self.trace / (self.square / (1 - self.power) + 1e-8) ** 0.5
        bound = self.lr * self.kappa * max(abs(delta), 1) * direction.abs().sum().item()
        step_size = self.lr / max(bound, 1)
        self.weights.add_(direction, alpha=step_size * delta)  # eq. 2 of stream_x.md
        if reset:
            self.trace.zero_()
        return step_size


AdaptiveObGD = partial(ObGD, adaptive=True)


def sparse_init_(weight, sparsity=0.9):
    """Uniform weights, but each output unit has ceil(sparsity x inputs) zeros. (outputs,...)

    So a layer with fewer than 10 inputs starts at zero, as in the authors' code.
    """
    rows = weight.data.flatten(1)  # a view; each channel of a convolution is a row
    num_inputs = rows.shape[1]
    bound = num_inputs**-0.5
    rows.uniform_(-bound, bound)
    rows[torch.rand_like(rows).argsort(1) < math.ceil(sparsity * num_inputs)] = 0


class RunningMeanVar:
    """Mean and sample variance of all x so far; after one x the variance is 1. Welford, float64."""

    count = 0
    mean = 0.0
    squares = 0.0
    var = 1.0

    def update(self, x):
        """x: a number or an array"""
        x = np.float64(x)
        self.count += 1
        difference = x - self.mean
        self.mean += difference / self.count
        self.squares += difference * (x - self.mean)
        if self.count > 1:
            self.var = self.squares / (self.count - 1)


class ScaleReward(RunningMeanVar):
    """Divides rewards by the std of their discounted sum. The mean is not subtracted."""

    sum = 0.0

    def __init__(self, gamma):
        self.gamma = gamma

    def __call__(self, reward, done):
        """done: the last reward begins the next sum, as in the authors' code"""
        self.sum = self.gamma * (1 - done) * self.sum + reward
        self.update(self.sum)
        return reward / math.sqrt(self.var + 1e-8)


def epsilon_schedule(step, start, end, fraction, total_steps):
    """Linear from start to end in this fraction of the steps, which are counted from 1."""
    return max(start + (end - start) / (fraction * total_steps or 1) * step, end)


# --- Training -----------------------------------------------------------------------------------


def train(args):
    """Train as the flags say, and evaluate."""
    lowest = {"lr": 0, "hidden_size": 1, "kappa_policy": 0, "kappa_value": 0, "save_steps": 0}
    lowest |= {"total_timesteps": 0, "eval_steps": 0, "eval_episodes": 1 if args.evaluate else 0}
    for name, least in lowest.items():
        if not getattr(args, name) >= least:
            sys.exit(f"--{name.replace('_', '-')}: must be at least {least}")
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    stream = Stream(args)
    envs = SyncVectorEnv([lambda: stream.env])  # kept: older versions close tasks with it
    check_envs(envs, args.env_id)  # resets the task, and takes a step
    agent = Agent(stream, args)
    if args.evaluate:
        agent, stream.stats = load(args.evaluate)[1:3]
        return evaluate(stream, agent, args)
    task = Path(args.env_id).name.replace(":", "_")
    new_dir = f"runs/stream_x__{task}__{args.seed}__{time.time():.3f}"
    run_dir = args.resume or args.output_dir or new_dir
    if not args.resume and any(Path(run_dir, name).exists() for name in USED):
        sys.exit(f"--output-dir {run_dir}: holds a run; continue it with --resume {run_dir}")
    try:
        os.makedirs(run_dir, exist_ok=True)
    except OSError as error:
        sys.exit(f"--output-dir {run_dir}: cannot be made ({error.strerror})")
    metrics = Path(run_dir, "metrics.csv")
    if metrics.exists():  # its last row may be cut off
        os.truncate(metrics, metrics.read_bytes().rfind(b"\n") + 1)
    step = 0
    if Path(run_dir, "checkpoint.pt").exists():
        step, agent, stream.stats, stream.scale_reward = load(run_dir, ["checkpoint"])
    board = SummaryWriter(run_dir, purge_step=step + 1)
    board.add_text("hyperparameters", f"```\n{json.dumps(vars(args), indent=1)}\n```")
    Path(run_dir, "args.tmp").write_text(json.dumps(vars(args) | {"resume": None}))
    os.replace(f"{run_dir}/args.tmp", f"{run_dir}/args.json")
    print(f"{run_dir}: stream {args.algorithm}, {args.optimizer}, from step {step}")
    if args.resume and step >= args.total_timesteps:
        print(f"{run_dir}: has {step} steps already; a larger --total-timesteps goes on")

    def log(values):  # a step may be repeated after a resume: its last rows count
        with open(f"{run_dir}/metrics.csv", "a", encoding="utf-8") as file:
            if file.tell() == 0:
                file.write("step,tag,value\n")
            for tag, value in values.items():
                file.write(f"{step},{tag},{value}\n")
                board.add_scalar(tag, value, step)
        board.flush()

    def save(path):
        if args.save_steps:
            torch.save((step, agent, stream.stats, stream.scale_reward), f"{path}.tmp")
            os.replace(f"{path}.tmp", f"{path}.pt")

    if stream.time_limit == math.inf:
        print("no time limit: rows and checkpoints are written where episodes end, if they end")
    done = is_window_over = True
    evaluated = step
    while step < args.total_timesteps:
        if is_window_over:
            sums = Counter()
            returns = []
            window = 0
            began = time.perf_counter()
        if done:
            observation = stream.reset((args.seed + 10_000 * step) % 2**31)
        step += 1
        window += 1

        # 1. act
        fraction = args.exploration_fraction
        epsilon = epsilon_schedule(step, 1, args.end_e, fraction, args.total_timesteps)
        observation, reward, done = stream.step(agent.act(observation, epsilon))

        # 2. learn from this one transition, and forget it; Counter.update adds
        sums.update(agent.learn(reward, observation, done))
        if not math.isfinite(sum(sums.values())):
            sys.exit("error or step size not finite: try a lower --lr; checkpoints are kept")

        # 3. evaluate, log and save where an episode has ended
        if done:
            returns.append(stream.episodic_return)
        if done and step < args.total_timesteps and is_due(args.eval_steps, step, step - evaluated):
            paused = time.perf_counter()
            log(evaluate(stream, agent, args))
            began += time.perf_counter() - paused
            evaluated = step
        is_window_over = done and window >= (args.save_steps or 2_000)
        if is_window_over or (returns and step == args.total_timesteps):
            metrics = {tag: value / window for tag, value in sums.items()}
            metrics["charts/episodic_return"] = np.mean(returns)
            metrics["charts/SPS"] = window / (time.perf_counter() - began)
            log(metrics)
            line = f"step {step:>9,}/{args.total_timesteps:,}  return {np.mean(returns):9.1f}"
            print(f"{line}  {metrics['charts/SPS']:6,.0f} steps/s", flush=True)
        if is_window_over:
            save(f"{run_dir}/checkpoint")
    save(f"{run_dir}/final")
    log(evaluate(stream, agent, args))


def evaluate(stream, agent, args):
    """Returns of whole episodes with the likeliest actions, and with actions as in training."""
    stream.frozen = True  # an evaluation leaves the statistics alone
    scores = {}
    for name, is_sampled in (("deterministic", False), ("sampled", True)):
        returns = []
        for episode in range(args.eval_episodes):
            observation = stream.reset(10_000 + episode)
            done = False
            while not done and stream.length < MOST_STEPS:
                action = agent.act(observation, args.end_e * is_sampled, is_sampled)
                observation, _, done = stream.step(action)
            if not done:
                print(f"an episode did not end in {MOST_STEPS} steps, and counts so far")
            returns.append(stream.episodic_return)
        if returns:
            mean, std = np.mean(returns), np.std(returns)
            print(f"{len(returns)} episodes, {name}: {mean:.1f} +- {std:.1f}")
            scores[f"eval/{name}/return_mean"] = mean
            scores[f"eval/{name}/return_std"] = std
    stream.frozen = False
    return scores


# ================================================================================================
# Below: what the method stands on, networks, environments, checkpoints and logs.
# ================================================================================================


# --- Networks -----------------------------------------------------------------------------------


class Network(nn.Module):
    """Two hidden layers, with the optimizer of their weights."""

    def __init__(self, inputs, outputs, kappa, args):
        super().__init__()
        self.layer_norm = args.layer_norm
        widths = [inputs, args.hidden_size, args.hidden_size, outputs]
        self.layers = nn.ModuleList(map(nn.Linear, widths, widths[1:]))
        for layer in self.layers:
            nn.init.zeros_(layer.bias)
            if args.sparse_init:
                sparse_init_(layer.weight)
        if args.optimizer == "sgd":
            kappa = 0
        optimizer = AdaptiveObGD if args.optimizer == "adaptive_obgd" else ObGD
        self.optimizer = optimizer(self.parameters(), args.lr, args.gamma, args.lamda, kappa)

    def forward(self, x):
        """(...,inputs) -> (...,outputs)"""
        *hidden, output = self.layers
        for layer in hidden:  # calling nn.Linear takes longer than so small a product
            x = nn.functional.linear(x, layer.weight, layer.bias)
            if self.layer_norm:
                x = nn.functional.layer_norm(x, x.shape[-1:])
            x = nn.functional.leaky_relu(x)
        return nn.functional.linear(x, output.weight, output.bias)


class Agent:
    """Stream AC(lambda); or stream Q(lambda), with a value for each action and an unused actor."""

    chosen = 0  # column of the value to learn: stream Q's action, or the only one

    def __init__(self, stream, args):
        self.args = args
        self.is_q = args.algorithm == "q"
        space = stream.env.action_space
        self.is_discrete = isinstance(space, gym.spaces.Discrete)
        if self.is_q and not self.is_discrete:
            sys.exit(f"--algorithm q: the actions of {args.env_id} are not discrete: {space}")
        num_inputs = stream.env.observation_space.shape[0] + 1
        self.num_values = int(space.n) if self.is_q else 1
        num_outputs = int(space.n) if self.is_discrete else 2 * math.prod(space.shape)
        self.critic = Network(num_inputs, self.num_values, args.kappa_value, args)
        self.actor = Network(num_inputs, num_outputs, args.kappa_policy, args)

    def policy(self, observation):
        """Distribution of actions. (1,O) -> of a number, or of A numbers"""
        outputs = self.actor(observation)[0]
        if not math.isfinite(outputs.sum().item()):
            sys.exit("the policy is not finite: try a lower --lr; checkpoints are kept")
        if self.is_discrete:
            return Categorical(logits=outputs, validate_args=False)
        mean, spread = outputs.chunk(2)
        return Normal(mean, nn.functional.softplus(spread), validate_args=False)

    def act(self, observation, epsilon, is_sampled=True):
        """(1,O) -> action (), or (A,): sampled, or the likeliest"""
        self.observation = observation
        if not self.is_q:
            self.distribution = self.policy(observation)
            self.action = self.distribution.sample() if is_sampled else self.distribution.mode
            return self.action.detach().numpy()
        if torch.rand(1) < epsilon:
            self.chosen = torch.randint(self.num_values, ()).item()
        else:
            self.chosen = self.critic(observation).argmax().item()
        return np.array(self.chosen)

    def td_error(self, values, reward, done):
        """delta, of the values of this and of the next state (2,num_values)"""
        now, then = values.tolist()  # stream AC has one value each
        target = reward + self.args.gamma * (1 - done) * max(then)
        return target - now[self.chosen]  # eq. 1 of stream_x.md

    def learn(self, reward, next_observation, done):
        """One step of each network, for the last action. -> metrics

        Objectives are V(s) or Q(s, a), and ln pi(a|s) + c sign(delta) H(s) with the entropy H and
        c = --entropy-coef. ObGD multiplies gradients by delta: |delta| with the sign, so that good
        and bad surprises alike raise the entropy.
        """
        both = torch.cat([self.observation, next_observation])
        values = self.critic(both)
        delta = self.td_error(values, reward, done)
        metrics = {"losses/td_error": abs(delta)}
        # Stream Q also empties its trace after an action that was not the best one.
        reset = done or (self.is_q and values[0].argmax().item() != self.chosen)
        objective = values[0, self.chosen]  # not of row 1: next values get no gradient
        if not self.is_q:
            log_prob = self.distribution.log_prob(self.action).sum()
            entropy = self.distribution.entropy().sum()
            metrics["losses/entropy"] = entropy.item()
            sign = float(np.sign(delta))
            objective = objective + log_prob + sign * self.args.entropy_coef * entropy  # eq. 3
        for param in self.critic.optimizer.params + self.actor.optimizer.params:
            param.grad = None
        objective.backward()  # the two networks share no weights
        if not self.is_q:
            metrics["train/step_size_policy"] = self.actor.optimizer.step(delta, done)
        metrics["train/step_size_value"] = self.critic.optimizer.step(delta, reset)
        with torch.no_grad():  # did the step go too far, so that the error changed its sign?
            after = self.td_error(self.critic(both), reward, done)
        metrics["train/overshoot"] = float(after * delta < 0)
        return metrics


# --- Environment --------------------------------------------------------------------------------


class Stream:
    """A task with normalized observations, the elapsed time appended, and scaled rewards."""

    frozen = False  # True stops the statistics of observations and rewards

    def __init__(self, args):
        self.args = args
        self.env = make_env(args)
        space = self.env.action_space
        if isinstance(space, gym.spaces.Box):
            low, high, _ = action_ends(space)
            self.middle = (low + high) / 2
            self.half_width = (high - low) / 2
        self.time_limit = self.env.spec.max_episode_steps or math.inf
        self.stats = RunningMeanVar()
        self.scale_reward = ScaleReward(args.gamma)

    def observe(self, observation):
        """(O-1,) -> tensor (1,O)"""
        check_finite(self.args.env_id, observations=observation)
        if not self.frozen:
            self.stats.update(observation)
        normalized = (observation - self.stats.mean) / np.sqrt(self.stats.var + 1e-8)
        # The time is one step late, as in the authors' code.
        clock = max(self.length - 1, 0) / self.time_limit - 0.5
        return torch.from_numpy(np.float32([np.append(normalized, clock)]))

    def reset(self, seed):
        """Begin an episode; all that is random in it follows from the seed. -> observation (1,O)"""
        torch.manual_seed(seed)
        self.length = 0
        self.episodic_return = 0.0
        return self.observe(self.env.reset(seed=seed)[0])

    def step(self, action):
        """-> next observation (1,O), scaled reward, whether the episode ended"""
        if isinstance(self.env.action_space, gym.spaces.Box):
            action = self.middle + self.half_width * action
        (action,) = as_actions(action.reshape(1, -1), self.env.action_space)
        observation, reward, terminated, truncated, _ = self.env.step(action)
        check_finite(self.args.env_id, rewards=reward)
        reward = float(reward)
        done = bool(terminated or truncated)  # the time is observed, so its limit is an end, too
        self.length += 1
        self.episodic_return += reward
        if not self.frozen:
            reward = self.scale_reward(reward, done)
        return self.observe(observation), reward, done


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


# --- Processes, checkpoints, logs ---------------------------------------------------------------


def load(run_dir, names=("final", "checkpoint")):
    """Step, agent, statistics of observations and of rewards, of the latest of these files."""
    found = []
    for path in [Path(run_dir, f"{name}.pt") for name in names]:
        if path.exists():
            try:
                found.append(torch.load(path, weights_only=False))
            except Exception as error:  # of the disk, of zip files, of pickle
                sys.exit(f"{path}: damaged ({error!s:.200}); delete it")
    if not found:
        sys.exit(f"{run_dir}: no checkpoint; --save-steps 0 keeps none, or it is too early")
    return max(found, key=lambda state: state[0])


def is_due(every: int, step: int, size: int) -> bool:
    """Whether a multiple of `every`, also 0, lies in the last `size` steps; 0 is never."""
    return every > 0 and step // every > (step - size) // every


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a console may lack a letter
    args = tyro.cli(Args)
    if args.resume and args.evaluate:
        sys.exit("--resume and --evaluate: give one of them")
    run_dir = args.resume or args.evaluate
    if run_dir:  # the flags of that run are the defaults
        try:
            saved = Args(**json.loads(Path(run_dir, "args.json").read_text()))
        except (OSError, ValueError, TypeError) as error:
            sys.exit(f"{run_dir}: no run folder, or of another version of this script ({error})")
        args = tyro.cli(Args, default=saved)
        for name, before in vars(saved).items():
            now = getattr(args, name)
            if now != before and name not in FREE:
                flag = "--" + name.replace("_", "-")
                sys.exit(f"{flag} {now}: cannot change, the run began with {before}")
    try:
        train(args)
    except Exception as error:  # checkpoints and logs can fail for lack of space
        reasons = ["No space left on device", "Disk quota exceeded", "File too large"]
        reasons += ["unexpected pos", "failed writing"]  # what torch.save says
        if any(reason in str(error) for reason in reasons):
            sys.exit(f"the disk is full ({error!s:.99}): make room, go on with --resume RUN_DIR")
        raise
