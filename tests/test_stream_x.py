"""Stream AC(lambda) and stream Q(lambda): numbers of the authors' code, closed forms, properties."""

import json
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.distributions import Normal
from torch.nn import functional as F

from algorithms.stream_x import (
    AdaptiveObGD,
    Agent,
    Args,
    ObGD,
    Stream,
    epsilon_schedule,
    sparse_init_,
)

FILE = Path(__file__).parent / "reference" / "stream_x.json"
BY_NAME = {case["case"]: case for case in json.loads(FILE.read_text())["vectors"]}
OBGD = [name for name in BY_NAME if name.startswith("obgd")]


def parameters(seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(3, 2, requires_grad=True), torch.randn(3, requires_grad=True)]


def set_gradients(params, scale: float = 1.0) -> None:
    for param in params:
        param.grad = scale * torch.randn_like(param)


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten().clone() for tensor in tensors])


# --- Reference: the output of the authors' code ------------------------------------------------------------------------


@pytest.mark.parametrize("name", OBGD)
def test_reference_obgd(name):
    """Its gradients are those of the negated objective."""
    case = BY_NAME[name]
    params = [torch.tensor(values, requires_grad=True) for values in case["params0"]]
    optimizer = ObGD(params, **case["config"])
    for step in case["steps"]:
        before = flat(params)
        for param, gradient in zip(params, step["grads"]):
            param.grad = -torch.tensor(gradient)
        optimizer.step(step["delta"], step["reset"])
        torch.testing.assert_close(flat(params), flat(map(torch.tensor, step["params"])), rtol=0, atol=2e-6)
        assert (flat(params) - before).abs().sum().item() == pytest.approx(step["update_l1"], abs=3e-6)
        trace = torch.zeros_like(before) if step["reset"] else optimizer.trace
        torch.testing.assert_close(-trace, flat(map(torch.tensor, step["trace_after"])), rtol=0, atol=2e-6)


def test_reference_sparse_init():
    case = BY_NAME["sparse_init_counts"]
    for layer in case["linear"]:
        weight = torch.empty(50, layer["fan_in"])
        sparse_init_(weight)
        assert set((weight == 0).sum(1).tolist()) == set(layer["zeros_per_row"])
        assert weight.abs().max() <= layer["bound"]
        if layer["max_abs"]:
            assert weight.abs().max() > 0.8 * layer["bound"]
    weight = torch.empty(case["conv"]["shape"])
    sparse_init_(weight)
    assert (weight == 0).flatten(1).sum(1).tolist() == case["conv"]["zeros_per_out_channel"]


class Script(gym.Env):
    """Gives the rows of the reference."""

    action_space = gym.spaces.Box(-1, 1, (1,))
    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    rows = BY_NAME["observation_reward_time_wrappers"]["rows"]

    def reset(self, *, seed=None, options=None):
        return np.array(next(self.left)["raw_obs"]), {}

    def step(self, action):
        row = next(self.left)
        return np.array(row["raw_obs"]), row["raw_reward"], row["terminated"], False, {}


gym.register("test/Script-v0", Script, max_episode_steps=10)  # the clock advances by 0.1


def test_reference_observations_rewards_and_time():
    stream = Stream(Args(env_id="test/Script-v0"))
    stream.env.unwrapped.left = iter(Script.rows)
    for row in Script.rows:
        if row["call"] == "reset":
            observation = stream.reset(0)
        else:
            observation, reward, done = stream.step(np.zeros(1))
            assert reward == pytest.approx(row["out_reward"], abs=1e-9)
            assert stream.scale_reward.sum == pytest.approx(row["reward_trace"], abs=1e-9)
            assert stream.scale_reward.var == pytest.approx(row["reward_var"], abs=1e-9)
            assert done == row["terminated"]
        assert observation[0].tolist() == pytest.approx(row["out_obs"], abs=1e-6)


def test_reference_epsilon():
    for step, value in BY_NAME["epsilon_schedule"]["values"]:
        assert epsilon_schedule(step, 1.0, 0.01, 0.05, 500_000) == pytest.approx(value, abs=1e-12)


class Given(gym.Env):
    """Has the sizes of the reference's networks; the third observation is the time."""

    action_space = gym.spaces.Box(-9, 9, (2,))
    observation_space = gym.spaces.Box(-9, 9, (2,))


gym.register("test/Given-v0", Given)


def layers(params: dict, network: str) -> list[torch.Tensor]:
    """A network of the reference; its two heads of the policy are one layer here."""
    found = {name: torch.tensor(values) for name, values in params.items()}
    heads = ["linear_mu", "linear_std"] if network == "policy_net" else ["linear_layer"]
    first = [found[f"{network}.{layer}.{kind}"] for layer in ("fc_layer", "hidden_layer") for kind in ("weight", "bias")]
    return first + [torch.cat([found[f"{network}.{head}.{kind}"] for head in heads]) for kind in ("weight", "bias")]


def test_reference_updates_of_actor_and_critic(monkeypatch):
    """Three whole updates of stream AC(lambda), the last one at the end of an episode."""
    case = BY_NAME["stream_ac_continuous_updates"]
    args = Args(env_id="test/Given-v0", hidden_size=4)
    agent = Agent(Stream(args), args)
    networks = {"policy_net": agent.actor, "value_net": agent.critic}
    with torch.no_grad():
        for name, network in networks.items():
            for param, values in zip(network.parameters(), layers(case["params0"], name)):
                param.copy_(values)
    for step in case["steps"]:
        state, next_state = torch.tensor([step["s"]]), torch.tensor([step["s_next"]])
        mean, spread = agent.actor(state).detach()[0].chunk(2)
        std = F.softplus(spread)
        torch.testing.assert_close(torch.stack([mean, std]), torch.tensor(step["policy_out"]), rtol=0, atol=5e-6)
        monkeypatch.setattr(Normal, "sample", lambda _, action=step["a"]: torch.tensor(action))
        assert agent.act(state, 0) == pytest.approx(step["a"], abs=1e-6)
        assert agent.critic(state).item() == pytest.approx(step["v"][0], abs=5e-6)
        agent.learn(step["r"], next_state, step["done"])
        for name, network in networks.items():
            torch.testing.assert_close(flat(network.parameters()), flat(layers(step["params"], name)), rtol=0, atol=1e-5)


# --- The optimizer -----------------------------------------------------------------------------------------------------


def test_adaptive_obgd_by_hand():
    """Two steps by the equations, in NumPy. The count of steps goes on after a reset."""
    params = parameters()
    optimizer = AdaptiveObGD(params, lr=1.0, kappa=3.0)
    weights, trace, square = flat(params).numpy().astype(np.float64), 0.0, 0.0
    for count, (delta, reset) in enumerate([(2.0, True), (-0.4, False), (0.7, False)], 1):
        set_gradients(params)
        trace = 0.99 * 0.8 * trace + torch.cat([param.grad.flatten() for param in params]).numpy()
        square = 0.999 * square + 0.001 * (delta * trace) ** 2
        direction = trace / np.sqrt(square / (1 - 0.999**count) + 1e-8)
        bound = 3 * max(abs(delta), 1) * np.abs(direction).sum()
        weights = weights + delta * direction / max(bound, 1)
        optimizer.step(delta, reset)
        trace = 0.0 if reset else trace
        np.testing.assert_allclose(flat(params).numpy(), weights, atol=1e-5)


# --- Statistics, policies, agent ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", [-1.0, 1.0])
def test_entropy_grows_whatever_the_sign_of_the_error(reward):
    """With a huge weight of the entropy, a step makes it larger after good and after bad surprises."""
    args = Args(env_id="test/Given-v0", hidden_size=16, entropy_coef=1e4)
    torch.manual_seed(0)
    agent = Agent(Stream(args), args)
    agent.act(torch.ones(1, 3), 0)
    before = agent.distribution.entropy().sum()
    agent.learn(reward, torch.ones(1, 3), True)
    assert agent.policy(torch.ones(1, 3)).entropy().sum() > before + 0.01


def test_without_an_error_entropy_adds_nothing_to_the_trace():
    traces = []
    for entropy_coef in (0.0, 1e4):
        args = Args(env_id="test/Given-v0", hidden_size=16, entropy_coef=entropy_coef)
        torch.manual_seed(0)
        agent = Agent(Stream(args), args)
        with torch.no_grad():
            for param in agent.critic.optimizer.params:  # every value is 0
                param.zero_()
        agent.act(torch.ones(1, 3), 0)
        agent.learn(0.0, torch.ones(1, 3), False)
        traces.append(agent.actor.optimizer.trace)
    assert traces[0].abs().max() > 0 and torch.equal(*traces)


def q_agent(**values):
    args = Args(env_id="CartPole-v1", algorithm="q", hidden_size=16, sparse_init=False, **values)
    torch.manual_seed(0)
    return Agent(Stream(args), args)


def test_stream_q_learns_the_target():
    """Of a one-step task with reward 1, and with the next state's best value where the episode goes on."""
    agent = q_agent()
    state, end = torch.ones(1, 5), -torch.ones(1, 5)
    agent.act(state, 0.0)
    value, best = agent.critic(state).max().item(), agent.critic(end).max().item()
    assert agent.learn(1.0, end, True)["losses/td_error"] == pytest.approx(abs(1 - value), abs=1e-5)
    for _ in range(200):
        agent.act(state, 0.0)
        agent.learn(1.0, end, True)
    assert agent.critic(state).max().item() == pytest.approx(1.0, abs=0.05)
    agent = q_agent()
    agent.act(state, 0.0)
    expected = abs(1 + 0.99 * best - value)
    assert agent.learn(1.0, end, False)["losses/td_error"] == pytest.approx(expected, abs=1e-5)


def test_only_an_action_that_is_not_greedy_ends_the_trace():
    """Exploring may draw the greedy action, which keeps the trace."""
    agent = q_agent()
    state, kept = torch.ones(1, 5), {True: set(), False: set()}
    for _ in range(40):
        greedy = agent.critic(state).argmax().item()
        is_greedy = agent.act(state, 1.0) == greedy
        agent.learn(0.1, state, False)
        kept[bool(is_greedy)].add(bool(agent.critic.optimizer.trace.any()))
    assert kept == {True: {True}, False: {False}}


def test_frozen_statistics_do_not_move():
    stream = Stream(Args(env_id="CartPole-v1"))
    stream.reset(0)
    stream.step(np.array(0))
    stream.frozen = True
    mean = stream.stats.mean.copy()
    _, reward, _ = stream.step(np.array(0))
    assert (stream.stats.mean == mean).all() and stream.stats.count == 2
    assert reward == 1.0 and stream.scale_reward.count == 1


def test_overshoot_is_an_error_that_changes_its_sign():
    """Without the bound, a step along a long gradient goes past the target; with it, it does not."""
    found = []
    for optimizer, lr in (("sgd", 1.0), ("obgd", 1.0)):
        agent = q_agent(optimizer=optimizer, lr=lr)
        agent.act(torch.ones(1, 5), 0.0)
        found.append(agent.learn(1.0, torch.ones(1, 5), True)["train/overshoot"])
    assert found == [1.0, 0.0]


class Far(gym.Env):
    """Dimensions in units of its own, one of them without an end; actions start at 3 where they are numbers."""

    observation_space = gym.spaces.Box(-1, 1, (1,))

    def __init__(self, discrete=False):
        box = gym.spaces.Box(np.array([[0.0, -1.0, 0.0]]), np.array([[100.0, 1.0, np.inf]]), dtype=np.float64)
        self.action_space = gym.spaces.Discrete(2, start=3) if discrete else box

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.given = action
        return np.zeros(1, np.float32), 1.0, False, False, {}


gym.register("test/Far-v0", Far)


def test_actions_are_those_of_the_space():
    """A unit Gaussian reaches both ends of a bounded dimension, in the shape and type of the space."""
    stream = Stream(Args(env_id="test/Far-v0"))
    stream.reset(0)
    for unit, action in (([-1, -1, -1], [0, -1, 0]), ([0, 0, 0], [50, 0, 1]), ([0.5, 0.5, 9], [75, 0.5, 10]), ([7, 7, 7], [100, 1, 8])):
        stream.step(np.float32(unit))
        assert stream.env.unwrapped.given.tolist() == [action]
    stream = Stream(Args(env_id="test/Far-v0", env_kwargs='{"discrete": true}'))
    stream.reset(0)
    stream.step(np.array(1))
    assert stream.env.unwrapped.given == 4
