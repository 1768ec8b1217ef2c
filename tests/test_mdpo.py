"""MDPO: numbers of the authors' code (manantomar/Mirror-Descent-Policy-Optimization @c9bd3ba), exact reductions."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.distributions import Normal, kl_divergence

from algorithms import mdpo
from algorithms.mdpo import Agent, Args, tsallis_log

CASES = json.loads((Path(__file__).parent / "reference" / "mdpo.json").read_text())["vectors"]


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def nothing(*_) -> None:
    pass


IDLE = SimpleNamespace(zero_grad=nothing, step=nothing)  # an optimizer


def cases(start: str):
    """Parametrise a test by the reference cases whose name begins like this, with their lists as tensors."""
    found = [case for case in CASES if case["case"].startswith(start)]
    rows = [{k: tensor(v) if isinstance(v, list) else v for k, v in case.items()} for case in found]
    return pytest.mark.parametrize("case", rows, ids=[case["case"] for case in found])


def assert_close(found, expected, absolute=2e-8) -> None:
    expected = torch.as_tensor(expected, dtype=found.dtype)
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=0, atol=absolute)


@cases("gae")
def test_reference_gae(case):
    """An episode starts where the one before ended."""
    ends = torch.cat([case["episode_starts"][1:], tensor([0.0])])
    columns = (column[:, None] for column in (case["rewards"], ends, case["vpred"]))
    advantages, returns = mdpo.gae(*columns, tensor([case["nextvpred"]]), case["gamma"], case["lam"])
    assert_close(advantages[:, 0], case["adv"], 2e-7)
    assert_close(returns[:, 0], case["tdlamret"], 2e-7)


@cases("on_policy_loss")
def test_reference_on_policy_loss(case):
    """Loss and gradients of the function that the script runs, with the authors' numbers in place of its network's."""
    mean, log_std = case["mean"].requires_grad_(), case["logstd"][0].requires_grad_()
    agent = SimpleNamespace(actor=None, gaussian=lambda *_: (mean, log_std.expand_as(mean)))
    batch = {"observations": None, "actions": case["actions"], "advantages": case["adv"]}
    batch |= {"mean": case["old_mean"], "log_std": case["old_logstd"].expand_as(mean)}
    loss, kl = mdpo.rollout_loss(agent, batch, case["t_k"], Args(tsallis_q=case["tsallis"]))
    loss.backward()
    for found, name in ((loss, "loss"), (kl, "meankl"), (mean.grad, "grad_mean")):
        assert_close(found, case[name])
    assert_close(log_std.grad, case["grad_logstd"][0])

    # the values, in a minibatch of all rows; the optimizer does nothing
    agent.device, agent.values = "cpu", lambda rows: case["value"].requires_grad_()[rows]
    batch |= {"observations": torch.arange(6), "values": case["old_value"], "returns": case["ret"]}
    metrics = mdpo.update_on_policy(agent, IDLE, batch, case["vf_clip"] / 0.2, Args(sgd_steps=0))
    assert_close(metrics["value_loss"], case["vf_loss"])


@cases("off_policy_loss")
def test_reference_off_policy_step(case, monkeypatch):
    """A step of the script: loss, gradients, and the targets of V and Q. The authors add 1e-6 to the std. Its networks
    say what the reference's said; for the actions of the buffer both Q say 1 too much, which adds 1 to the loss."""
    mu, log_std = leaves = [case["mu"].requires_grad_(), case["log_std"].requires_grad_()]
    agent = SimpleNamespace(critic=None)
    agent.actor, agent.old_actor = SimpleNamespace(parameters=lambda: leaves), "old"
    agent.gaussian = lambda _, actor=None: (case["old_mu"], case["old_log_std"]) if actor == "old" else leaves
    agent.values = lambda _: case["value_fn"].clone().requires_grad_()
    agent.target_critic = lambda _: case["v_target_next"][:, None]
    sampled = lambda actions: torch.stack([actions @ case["W"], case["q2_pi"]])  # noqa: E731
    agent.q_values = lambda _, x: sampled(x) if x.requires_grad else [case["q_backup"] + 1] * 2
    monkeypatch.setattr(torch, "randn_like", lambda _: case["noise"])
    monkeypatch.setattr(mdpo, "update_target", nothing)
    ends = case["terminals"]
    rows = {"observations": None, "actions": ends, "rewards": case["rewards"], "terminated": ends, "next_observations": None}
    args = Args(kl_coef=case["kl_coef"], ent_coef=case["lam"], tsallis_q=case["tsallis"])
    metrics = mdpo.update_off_policy(agent, IDLE, rows, args)
    assert_close(metrics["policy_loss"], case["policy_loss"], 3e-6)
    assert_close(metrics["value_loss"], case["value_loss"] + 1, 3e-6)
    assert_close(mu.grad, case["grad_mu"], 1e-5)
    assert_close(log_std.grad, case["grad_log_std"], 1e-5)
    x = mu + log_std.exp() * case["noise"]
    gaussians = (mu, log_std), (case["old_mu"], case["old_log_std"])
    logs = [mdpo.squashed_log(x, *gaussian, case["tsallis"]) for gaussian in gaussians]
    for found, name in zip(logs, ("qlog_pi", "qlog_pi_old")):
        assert_close(found, case[name], 2e-5)


@cases("tsallis_max")
def test_reference_tsallis_maximum(case):
    """What the best policy gains, with the Tsallis entropy -sum p log_q(p) on top; found by SciPy to some 1e-4."""
    for q, value, policy in zip(case["q"].tolist(), case["value"], case["policy"]):
        assert_close(policy @ (case["logits"] - tsallis_log(policy, q)), value, 1e-6)
    assert_close(tsallis_log(tensor([1e-9, 1e-6]), 1), tensor([1e-6, 1e-6]).log())  # tf_log_q has this floor


class Walk(gym.Env):
    """Counts its steps; ends after 7 of them if the last action is positive, else the time limit ends it. The reward is
    highest where the action is 0.6 times the second thing that is seen, which is -1 or 1."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,))
    action_space = gym.spaces.Box(np.float32([-2, -3]), np.float32([2, 4]))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seen = np.float32([0, self.np_random.choice([-1.0, 1.0])])
        return self.seen, {}

    def step(self, action):
        self.seen = self.seen + np.float32([1, 0])
        reward = -((action - 0.6 * self.seen[1]) ** 2).sum()
        return self.seen, float(reward), bool(self.seen[0] >= 7 and action[0] > 0), False, {}


gym.register("test/mdpo-sign-v0", Walk, max_episode_steps=1)
gym.register("test/mdpo-walk-v0", Walk, max_episode_steps=8)


def made(method="on_policy", **values):
    """Agent and flags, what a rollout of the walk was, its episodes, and those that go on; always the same."""
    args = Args(env_id="test/mdpo-walk-v0", method=method, num_envs=3, num_steps=40, **values)
    torch.manual_seed(0)
    envs = mdpo.make_envs(args, 3)
    agent, unfinished = Agent(envs, args), mdpo.Unfinished(envs, 4)
    return agent, args, *mdpo.act(envs, agent, unfinished, args), unfinished


def test_several_steps_leave_the_old_policy_where_it_was():
    """Four steps of a plain loop in which the old policy is a copy of the agent."""
    agent, args, rollout, _, unfinished = made(sgd_steps=4)
    batch = mdpo.learning_batch(rollout, agent, unfinished, args)
    old, plain = copy.deepcopy(agent), copy.deepcopy(agent)
    metrics = mdpo.update_on_policy(agent, torch.optim.Adam(agent.parameters(), 0.03), batch, 0.5, args)
    optimizer = torch.optim.Adam(plain.parameters(), 0.03)
    for _ in range(5):
        new, before = (Normal(some.actor(batch["observations"]), some.log_std.exp()) for some in (plain, old))
        ratio = (new.log_prob(batch["actions"]) - before.log_prob(batch["actions"])).sum(-1).exp()
        kl = kl_divergence(new, before).sum(-1).mean()
        loss = kl / 0.5 - (ratio * batch["advantages"]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
    assert_close(torch.stack([metrics["kl"], metrics["policy_loss"]]), torch.stack([kl, loss]), 1e-4 * kl.item())


def test_rollout_and_advantages():
    """The time limit cuts episodes off, and what would follow is worth V; a plain loop over time says the same."""
    agent, args, rollout, episodes, unfinished = made(gamma=0.9, gae_lambda=0.8)
    observations, actions, rewards, terminated, dones, following = rollout
    assert {length for _, length in episodes} >= {7, 8}
    np.testing.assert_array_equal(following, observations + [1, 0])  # also where an episode ends
    assert terminated.sum() > 3 and (dones & ~terminated).sum() > 0
    columns = {"observations": observations, "actions": np.tanh(actions), "rewards": rewards, "terminated": terminated}
    rows = mdpo.transitions(rollout, "cpu")
    for name, column in {**columns, "next_observations": following}.items():
        assert_close(rows.pop(name), torch.from_numpy(np.float32(column)).flatten(0, 1), 1e-6)
    assert not rows
    with torch.no_grad():
        values, next_values = (agent.values(agent.normalize(x)).numpy() for x in (observations, following))
    batch = mdpo.learning_batch(rollout, agent, unfinished, args)
    scaled = rewards / np.sqrt(agent.return_stats.var + 1e-8)
    expected, advantage = np.zeros((40, 3)), np.zeros(3)
    for t in reversed(range(40)):
        delta = scaled[t] + 0.9 * ~terminated[t] * next_values[t] - values[t]
        advantage = delta + 0.9 * 0.8 * ~dones[t] * advantage
        expected[t] = advantage
    assert_close(batch["returns"].view(40, 3), expected + values, 1e-4)
    assert_close(batch["advantages"].view(40, 3), (expected - expected.mean()) / expected.std(), 1e-4)
    following[:-1][~(dones & ~terminated)[:-1]] = np.nan  # these are not used
    assert mdpo.learning_batch(rollout, agent, unfinished, args)["advantages"].isfinite().all()
    batch = mdpo.learning_batch([np.zeros_like(x) for x in rollout], agent, unfinished, args)
    assert batch["advantages"].isfinite().all(), "where all are equal, the authors' code gives NaN"


def test_who_moves_in_an_off_policy_step():
    """The old policy stays, the target of V follows by 0.005; V, Q and the policy move."""
    agent, args, *_ = made("off_policy")
    before = {name: weight.clone() for name, weight in agent.named_parameters()}
    rows = {"observations": torch.randn(64, 2), "actions": torch.rand(64, 2), "rewards": torch.randn(64)}
    rows |= {"terminated": torch.zeros(64), "next_observations": torch.randn(64, 2)}
    mdpo.update_off_policy(agent, torch.optim.Adam(agent.parameters(), 1e-3), rows, args)
    after = dict(agent.named_parameters())
    moved = {name.split(".")[0] for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert moved == {"actor", "critic", "q_networks", "target_critic"}
    expected = 0.995 * before["target_critic.0.weight"] + 0.005 * after["critic.0.weight"]
    assert_close(after["target_critic.0.weight"], expected, 1e-7)


PROBE = {"total_timesteps": 128 * 60, "num_envs": 8, "num_steps": 16, "eval_episodes": 0}
OFF = {"learning_starts": 256, "total_timesteps": 640, "learning_rate": 3e-3, "sgd_steps": 50, "ent_coef": 0.05}


@pytest.mark.parametrize("values", [{"total_timesteps": 128 * 100}, {"method": "off_policy", **OFF}], ids=str)
def test_probe_action(values, tmp_path):
    """The best action depends on what is seen, in a range that is not symmetric."""
    args = Args(env_id="test/mdpo-sign-v0", output_dir=str(tmp_path), **PROBE | values)
    mdpo.train(args)
    agent = Agent(mdpo.make_envs(args, 1), args)
    agent.load_state_dict(torch.load(mdpo.checkpoints(tmp_path)[-1], weights_only=True)["agent"])
    with torch.no_grad():
        found = agent.to_env(agent.choose(np.float32([[0, -1], [0, 1]]), False))
    np.testing.assert_allclose(found, [[-0.6, -0.6], [0.6, 0.6]], atol=0.25)


def test_schedule(tmp_path, monkeypatch):
    """Step size and learning rate go from 1 + 1/N to 2/N of themselves."""
    seen = []
    monkeypatch.setattr(mdpo, "update_on_policy", lambda *given: seen.append((given[3], given[1])) or {})
    mdpo.train(Args(env_id="test/mdpo-walk-v0", output_dir=str(tmp_path), learning_rate=0.1, **PROBE))
    assert [step_size for step_size, _ in seen] == [pytest.approx(1 - (k - 1) / 60) for k in range(60)]
    assert seen[-1][1].param_groups[0]["lr"] == pytest.approx(0.1 * 2 / 60)
