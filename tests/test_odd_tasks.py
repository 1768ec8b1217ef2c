"""Tasks as people bring them to the scripts for gymnasium: every space of actions and observations, broken rewards,
broken vector environments. Each trains, with actions that its space contains, or ends in one sentence."""

import json
import re

import gymnasium as gym
import numpy as np
import pytest
import torch
from control_runs import results, train
from gymnasium import spaces
from processes import ROOT, as_flags, fork

from algorithms import arac, fm3q, mdpo, meta_dt, stream_x, unimodal_poisson

ROW = np.arange(3, dtype=np.float32)
ACTIONS = {
    "plain": spaces.Box(-1, 1, (1,), np.float32),
    "double": spaces.Box(np.array([-0.1, 0.3]), np.array([0.1, 0.7]), dtype=np.float64),  # 0.1 in float32 is above 0.1
    "row": spaces.Box(-ROW[None] - 1, ROW[None] + 1),
    "single": spaces.Box(0, 100, (), np.float32),
    "half": spaces.Box(0, np.inf, (2,), np.float32),
    "unbounded": spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "whole": spaces.Box(0, 5, (2,), np.int64),
    "number": spaces.Discrete(3, start=1),
    "numbers": spaces.MultiDiscrete([[3, 2]], start=[[4, 0]]),
    "bits": spaces.MultiBinary(3),
    "tuple": spaces.Tuple([spaces.Discrete(2), spaces.Discrete(2)]),
}
OBSERVATIONS = {
    "table": spaces.Box(-1, 1, (2, 3), np.float32),
    "named": spaces.Dict(a=spaces.Box(-1, 1, (2,)), b=spaces.Discrete(3)),
    "number seen": spaces.Discrete(4),
    "picture": spaces.Box(0, 255, (8, 8, 3), np.uint8),
    "text": spaces.Text(5),
}
REWARDS = {"nan": float("nan"), "row of one": np.ones(1), "later nan": 1.0, "later nan seen": 1.0, "no pair": 1.0}


class Odd(gym.Env):
    """Refuses actions that are not in its space; 20 steps an episode."""

    def __init__(self, kind="plain"):
        self.kind = kind
        self.action_space = ACTIONS.get(kind, ACTIONS["plain"])
        self.observation_space = OBSERVATIONS.get(kind, spaces.Box(-1, 1, (2,), np.float32))

    def see(self):
        if self.kind == "later nan seen" and self.clock == 7:
            return np.full(2, np.nan, np.float32)
        if self.kind == "nan seen at the end" and self.clock == 20:
            return np.full(2, np.nan, np.float32)
        return self.observation_space.sample()

    def reset(self, *, seed=None, options=None):
        self.clock = 0
        return self.see() if self.kind == "no pair" else (self.see(), {})

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.clock += 1
        reward = float("nan") if self.kind == "later nan" and self.clock == 7 else REWARDS.get(self.kind, 1.0)
        return self.see(), reward, False, self.clock == 20, {}


gym.register("test/Odd-v0", Odd, max_episode_steps=50)
SMALL = {"env_id": "test/Odd-v0", "eval_episodes": 1, "save_steps": 0, "total_timesteps": 64}
VECTOR = SMALL | {"num_envs": 2, "num_steps": 32}
RUNS = {
    "poisson": (unimodal_poisson, VECTOR | {"num_minibatches": 2, "update_epochs": 1}),
    "gaussian": (unimodal_poisson, VECTOR | {"num_minibatches": 2, "update_epochs": 1, "policy": "gaussian"}),
    "mdpo": (mdpo, VECTOR | {"sgd_steps": 1}),
    "off": (mdpo, VECTOR | {"method": "off_policy", "learning_starts": 0}),
    "stream": (stream_x, SMALL | {"hidden_size": 8}),
    "q": (stream_x, SMALL | {"hidden_size": 8, "algorithm": "q"}),
}
NOT_DISCRETE, NOT_BOX, ENDLESS = "actions must be Box", "actions are ", "actions are unbounded"
REFUSED = {  # kind: the runs that refuse it, and what they say; all others train
    "plain": {"q": "not discrete"},
    "double": {"q": "not discrete"},
    "row": {"q": "not discrete"},
    "single": {"q": "not discrete"},
    "half": {"poisson": ENDLESS, "off": ENDLESS, "q": "not discrete"},
    "unbounded": {"poisson": ENDLESS, "off": ENDLESS, "q": "not discrete"},
    "whole": dict.fromkeys(RUNS, "a Box of floats"),
    "number": {"gaussian": "use categorical", "mdpo": NOT_DISCRETE, "off": NOT_DISCRETE},
    "numbers": {"gaussian": "use categorical"} | dict.fromkeys(["mdpo", "off", "stream", "q"], NOT_DISCRETE),
    "bits": {"gaussian": "use categorical"} | dict.fromkeys(["mdpo", "off", "stream", "q"], NOT_DISCRETE),
    "tuple": dict.fromkeys(RUNS, NOT_DISCRETE),
    "table": {"q": "not discrete"},
    "named": {"q": "not discrete"},
    "number seen": {"q": "not discrete"},
    "picture": dict.fromkeys(RUNS, "expected vectors as observations"),
    "nan": dict.fromkeys(RUNS, "its rewards are not finite numbers"),
    "row of one": dict.fromkeys(RUNS, "its reset or its first step fails"),
    "nan seen at the end": dict.fromkeys(RUNS, "its observations are not finite numbers") | {"q": "not discrete"},
    "later nan": dict.fromkeys(RUNS, "its rewards are not finite numbers") | {"q": "not discrete"},
    "later nan seen": dict.fromkeys(RUNS, "its observations are not finite numbers") | {"q": "not discrete"},
    "no pair": dict.fromkeys(RUNS, "its reset or its first step fails"),
}


def sentence(script, run_dir, values: dict) -> str:
    """The one sentence that a run ends in; empty if it trains."""
    try:
        found = train(script, run_dir, **values)
    except SystemExit as stop:
        assert isinstance(stop.code, str) and "\n" not in stop.code
        return stop.code
    assert not found or np.isfinite(list(found.values())).all()
    return ""


@pytest.mark.parametrize("kind", REFUSED)
def test_every_space_trains_or_is_one_sentence(kind, tmp_path):
    for name, (script, values) in RUNS.items():
        said = sentence(script, tmp_path / name, values | {"env_kwargs": json.dumps({"kind": kind})})
        expected = REFUSED[kind].get(name, "")
        assert (expected in said) and bool(said) == bool(expected), (name, said)


def test_arguments_of_a_task(tmp_path):
    for words, said in (("{kind", "Expecting property name"), ('{"colour": 1}', "unexpected keyword argument 'colour'"), ("3", "'int'")):
        for name in ("poisson", "stream"):
            script, values = RUNS[name]
            found = sentence(script, tmp_path / "run", values | {"env_kwargs": words})
            assert "--env-kwargs" in found and said in found


class Wrong(Odd):
    """Says (2,) and gives (3,); at the end of an episode truncated is no bool."""

    def __init__(self, kind="shape", file=None):
        super().__init__(kind)
        if file:
            open(file)

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        observation = np.zeros(3, np.float32) if self.kind == "shape" else observation
        return observation, reward, terminated, truncated or None, info


gym.register("test/Wrong-v0", Wrong, max_episode_steps=50)


def test_mistakes_in_own_tasks(tmp_path):
    for name in ("poisson", "mdpo", "stream"):
        script, values = RUNS[name]
        values = values | {"env_id": "test/Wrong-v0"}
        assert "its reset or its first step fails (ValueError" in sentence(script, tmp_path / name, values)
        values["env_kwargs"] = '{"file": "no/such/file"}'
        assert re.match("--env-kwargs .* No such file", sentence(script, tmp_path / name, values))
    values["env_kwargs"] = '{"kind": "plain"}'
    assert sentence(script, tmp_path / "none", values) == ""


def test_numbers_that_train_nothing_or_the_wrong_way(tmp_path):
    rows = ("mdpo", {"kl_coef": 0.3}, "--kl-coef, --ent-coef: act with --method off_policy"), ("mdpo", {"learning_rate": float("nan")}, "--learning-rate nan: must be at least 0")
    rows += ("poisson", {"max_grad_norm": -1.0}, "--max-grad-norm -1.0: must be"), ("poisson", {"hidden_size": 0}, "--hidden-size 0: must be")
    rows += ("stream", {"lr": float("nan")}, "--lr: must be at least 0"), ("off", {"learning_rate": -1e-3}, "--learning-rate -0.001: must be")
    for name, changed, said in rows:
        script, values = RUNS[name]
        assert sentence(script, tmp_path / "run", values | changed).startswith(said)


def test_an_error_of_the_task_keeps_its_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr(Odd, "step", lambda self, action: {}["height"])
    for script, values in RUNS.values():
        if values.get("algorithm") != "q":
            with pytest.raises(KeyError, match="height"):
                train(script, tmp_path / "run", **values)


MAKERS = '''\
from functools import partial

import gymnasium as gym
import numpy as np
from envs.examples.carts import Carts


class Broken(Carts):
    def step(self, actions):
        observations, rewards, terminated, truncated, info = super().step(actions)
        return observations, self.broken(rewards), terminated, truncated, info

class Silent(Carts):
    def step(self, actions):
        return *super().step(actions)[:4], {}

class Columns(Broken):
    def broken(self, rewards): return rewards[:, None]

class Nothing(Broken):
    def broken(self, rewards): return [None] * self.num_envs

class Late(Broken):
    def broken(self, rewards): return rewards + (np.nan if self.steps[0] == 9 else 0)

class Numbers(Carts):
    def step(self, actions):
        observations, rewards, terminated, truncated, info = super().step(actions)
        return observations, rewards, terminated.astype(int), truncated, info

class Lists(Carts):
    def step(self, actions):
        observations, *rest, info = super().step(actions)
        return observations, *[list(values) for values in rest], info

def one(num_envs): return gym.make("Pendulum-v1")
def fewer(num_envs): return Carts(1)
def several(num_envs):
    make = partial(gym.make, "Pendulum-v1")
    return gym.vector.AsyncVectorEnv([make] * num_envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
'''
MADE = {
    "Silent": "an episode ended without info['final_obs']",
    "Columns": "observations and rewards are ((2, 2), (2, 1)), expected ((2, 2), (2,))",
    "Nothing": "its rewards are not finite numbers",
    "Late": "its rewards are not finite numbers",
    "Numbers": "terminated and truncated must be NumPy arrays of bool",
    "Lists": "terminated and truncated must be NumPy arrays of bool",
    "one": "expected a VectorEnv of 2",
    "fewer": "expected a VectorEnv of 2",
    "several": "",
}


@pytest.mark.parametrize("maker", MADE)
def test_own_vector_environments(maker, tmp_path):
    (tmp_path / "own.py").write_text(MAKERS)
    for name in ("poisson", "mdpo"):
        script, values = RUNS[name]
        values = values | {"env_id": f"{tmp_path / 'own.py'}:{maker}", "total_timesteps": 128, "num_steps": 64}
        said = sentence(script, tmp_path / name, values)
        assert MADE[maker] in said and bool(said) == bool(MADE[maker]), said


def test_an_own_vector_environment_takes_no_arguments(tmp_path):
    (tmp_path / "own.py").write_text(MAKERS)
    for name in ("poisson", "mdpo"):
        script, values = RUNS[name]
        values = values | {"env_id": f"{tmp_path / 'own.py'}:several", "env_kwargs": '{"g": 1}'}
        assert "--env-kwargs: not with FILE.py:make" in sentence(script, tmp_path / name, values)


def test_stretching_changes_nothing_from_minus_one_to_one():
    """Bit by bit what clipping alone gives; elsewhere -1 and 1 are the ends."""
    args = unimodal_poisson.Args(policy="gaussian")
    actions = 2 * torch.randn(1000, 2)
    low, high = torch.tensor([[-1.0, -1.0], [1.0, 1.0]])
    found = unimodal_poisson.GaussianHead(low, high, args).to_env(actions)
    assert torch.equal(found, actions)
    agent = mdpo.Agent(mdpo.make_envs(mdpo.Args(env_id="test/Odd-v0"), 1), mdpo.Args())
    assert np.array_equal(agent.to_env(actions[:, :1]), actions[:, :1].clamp(-1, 1).numpy())
    low, high = torch.tensor([[0.0, -0.4], [100.0, 0.4]])
    found = unimodal_poisson.GaussianHead(low, high, args).to_env(torch.tensor([[-1.0] * 2, [0.0] * 2, [1.0] * 2]))
    torch.testing.assert_close(found, torch.tensor([[0.0, -0.4], [50.0, 0.0], [100.0, 0.4]]))


def test_a_side_without_a_bound():
    """A unit of the task begins at the other bound, however far it is from 0; bounds that no action reaches are none."""
    low, high = [5.0, -np.inf, -np.inf, -3e38, 0.0], [np.inf, -7.0, np.inf, 3e38, 3e38]
    space = spaces.Box(np.array([low, low]), np.array([high, high]), dtype=np.float64)
    *ends, is_bounded = mdpo.action_ends(space)
    assert [end.tolist() for end in ends] == [[5, -9, -1, -1, 0] * 2, [7, -7, 1, 1, 2] * 2] and not is_bounded
    assert mdpo.action_ends(ACTIONS["row"])[2]


class Once(Odd):
    """The first episode has 5 or 15 steps; rewards of later ones are NaN."""

    def reset(self, *, seed=None, options=None):
        self.length = None if seed is None else 5 + 10 * (seed % 2)
        return super().reset(seed=seed)

    def step(self, action):
        observation, *_ = super().step(action)
        return observation, 1.0 if self.length else np.nan, self.clock == (self.length or 20), False, {}


gym.register("test/Once-v0", Once)


@pytest.mark.parametrize("script", [unimodal_poisson, mdpo], ids=["ppo", "mdpo"])
def test_what_follows_an_evaluated_episode_does_not_count(script):
    args = script.Args(env_id="test/Once-v0", eval_episodes=2)
    agent = script.Agent(script.make_envs(args, 2), args)
    scores = script.evaluate(agent, args)
    assert scores["eval/deterministic/return_mean"] == scores["eval/sampled/return_mean"] == 10


@pytest.mark.parametrize("script", [unimodal_poisson, mdpo, stream_x, fm3q, arac, meta_dt])
def test_a_folder_that_lost_its_flags(script, tmp_path):
    """Its checkpoints are those of another run: nothing is trained on top of them."""
    (tmp_path / "checkpoints").mkdir()
    for name in ("checkpoint.pt", "checkpoints/step_000000000064.pt"):
        (tmp_path / name).write_bytes(b"")
    values = {"env_id": "CartPole-v1"} if script in (unimodal_poisson, stream_x) else {}
    with pytest.raises(SystemExit, match="holds a run"):
        script.train(script.Args(**values, output_dir=str(tmp_path)))


class Reach(gym.Env):
    """One step; 70 of 100 is best."""

    action_space = spaces.Box(0, 100, (1,), np.float32)
    observation_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), -abs(float(action[0]) - 70) / 50, True, False, {}


class Lock(Reach):
    """One step; the combination 2, 0, 1 of dials of unequal sizes is best."""

    action_space = spaces.MultiDiscrete([3, 5, 2])

    def step(self, action):
        return np.zeros(1, np.float32), float((action == [2, 0, 1]).sum()), True, False, {}


gym.register("test/Reach-v0", Reach)
gym.register("test/Lock-v0", Lock)
PROBE = {"num_envs": 8, "num_steps": 16, "eval_episodes": 4, "save_steps": 0, "total_timesteps": 128 * 30}
PPO = PROBE | {"num_minibatches": 1, "learning_rate": 1e-2, "anneal_lr": False, "norm_obs": False}


@pytest.mark.parametrize("script, values", [(unimodal_poisson, PPO | {"policy": "gaussian"}), (mdpo, PROBE | {"learning_rate": 1e-2})], ids=["ppo", "mdpo"])
def test_a_gaussian_learns_in_the_units_of_the_task(script, values, tmp_path):
    """Without the stretch it stays near 0, a return of -1.4."""
    found = train(script, tmp_path, **values | {"env_id": "test/Reach-v0"})
    assert found[128 * 30, "eval/deterministic/return_mean"] > -0.15


@pytest.mark.parametrize("policy", [None, "poisson", "ordinal"])
def test_several_numbers_as_an_action(policy, tmp_path):
    """Atoms that a dial lacks are never chosen, and entropy is at most that of the dials."""
    found = train(unimodal_poisson, tmp_path, **PPO | {"env_id": "test/Lock-v0", "policy": policy, "temperature": 0.5})
    assert found[128 * 30, "eval/deterministic/return_mean"] == 3
    assert 0 < found[128, "losses/entropy"] <= np.log(3 * 5 * 2) + 1e-4
    args = unimodal_poisson.Args(env_id="test/Lock-v0", policy=policy)
    agent = unimodal_poisson.Agent(unimodal_poisson.make_envs(args, 1), args)
    p = agent.head.logits(agent.outputs(torch.zeros(1, 1))).softmax(-1)[0]  # (3,5)
    assert (p > 0).sum(-1).tolist() == [3, 5, 2]
    assert "poisson_repo: takes dimensions of one size" in sentence(
        unimodal_poisson, tmp_path / "repo", PPO | {"env_id": "test/Lock-v0", "policy": "poisson_repo"}
    )


def test_a_game_without_an_end_ends_its_evaluation(tmp_path, monkeypatch, capsys):
    gym.register("test/Endless2-v0", Odd)
    monkeypatch.setattr(Odd, "step", lambda self, action: (self.observation_space.sample(), 1.0, False, False, {}))
    for name in ("poisson", "mdpo", "stream"):
        script, values = RUNS[name]
        monkeypatch.setattr(script, "MOST_STEPS", 30)
        found = train(script, tmp_path / name, **values | {"env_id": "test/Endless2-v0"})
        assert found[64, "eval/sampled/return_mean"] == 30 and "did not end in 30 steps" in capsys.readouterr().out


@pytest.mark.parametrize("script", [unimodal_poisson, mdpo], ids=["ppo", "mdpo"])
def test_a_larger_number_of_steps_extends_a_run(script, tmp_path, monkeypatch):
    """Schedules follow the new length: of two rollouts, then of four."""
    values = (RUNS["poisson"] if script is unimodal_poisson else RUNS["off"])[1] | {"save_steps": 32}
    train(script, tmp_path, **values)
    script.train(script.Args(**values | {"total_timesteps": 256}, output_dir=str(tmp_path), resume=str(tmp_path)))
    found = results(tmp_path)
    assert {step for step, tag in found if tag == "losses/policy_loss"} >= {128, 192, 256}
    if script is unimodal_poisson:
        assert found[128, "charts/learning_rate"] == pytest.approx(3e-4 * (1 - 64 / 256))


LOADED = {
    "unimodal_poisson": VECTOR | {"env_id": "Pendulum-v1", "num_minibatches": 2},
    "mdpo": VECTOR | {"env_id": "Pendulum-v1"},
    "stream_x": SMALL | {"env_id": "Pendulum-v1", "hidden_size": 8, "total_timesteps": 250},
    "fm3q": {"total_timesteps": 96, "learning_starts": 32, "eval_steps": 0},
    "arac": {"total_timesteps": 96, "learning_starts": 32, "eval_steps": 0, "horizon": 4},
    "meta_dt": {"embed_dim": 8, "num_layers": 1, "world_model_steps": 8, "policy_steps": 8, "log_steps": 8, "eval_episodes": 1},
}


@pytest.mark.parametrize("name", LOADED)
def test_lines_of_the_page_load_a_policy_and_act(name, tmp_path):
    """In a process of their own, as the classes of a checkpoint of stream_x.py are those of the program."""
    words = as_flags(LOADED[name] | {"save_steps": 32})
    process = fork(ROOT / "algorithms" / f"{name}.py", *words, "--output-dir", tmp_path / "run")
    assert process.returncode == 0, process.stderr
    page = (ROOT / "algorithms" / f"{name}.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"## A trained policy\n\n```python\n(.*?)```", page, re.S)
    path = f"import sys\nsys.path[:0] = [{str(ROOT / 'algorithms')!r}, {str(ROOT)!r}]\n"
    (tmp_path / "act.py").write_text(path + lines.replace("RUN", str(tmp_path / "run")))
    process = fork(tmp_path / "act.py")
    assert process.returncode == 0 and len(lines.splitlines()) <= 8, process.stderr
