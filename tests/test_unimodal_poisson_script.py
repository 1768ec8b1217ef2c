"""PPO with the unimodal Poisson policy as people run it."""

import json
import math

import gymnasium as gym
import numpy as np
import pytest
from control_runs import assert_same_run, column, command, kill_and_resume, refusal, results, train
from processes import ROOT, as_flags
from run_folders import assert_tags_of_pages, begin, tags
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from algorithms import unimodal_poisson

SMALL = {"env_id": "Pendulum-v1", "num_envs": 2, "num_steps": 128, "num_minibatches": 4}
SMALL |= {"update_epochs": 2, "eval_episodes": 1, "total_timesteps": 256}
LONG = SMALL | {"total_timesteps": 256 * 8, "save_steps": 256, "eval_steps": 1024}
CARTPOLE = {"env_id": "CartPole-v1", "num_envs": 8, "num_steps": 32, "num_minibatches": 4, "update_epochs": 4}
CARTPOLE |= {"learning_rate": 3e-3, "total_timesteps": 32_768, "save_steps": 1024, "eval_episodes": 5}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder and output of eight uninterrupted rollouts."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    return run_dir, begin(unimodal_poisson, run_dir, **LONG)


def test_command_and_its_files(whole):
    run_dir, output = whole
    progress = [line for line in output.splitlines() if line.startswith("step")]
    assert len(progress) == 8 and max(map(len, progress)) <= 80
    metrics = results(run_dir)
    assert {step for step, tag in metrics if tag.startswith("eval/")} == {1024, 2048}
    steps = [256 * i for i in range(1, 9)]
    for tag in ("losses/policy_loss", "losses/grad_norm", "train/extreme_mass"):
        assert [step for step, name in metrics if name == tag] == steps
    assert all(map(math.isfinite, metrics.values()))
    # Pendulum's episodes have 200 steps, and start anew at checkpoints, every 256 steps
    assert [step for step, tag in metrics if tag == "charts/episodic_length"] == steps[1::2]
    assert set(column(metrics, "charts/episodic_length")) == {200.0}
    assert all(-200 * 17 < value < 0 for value in column(metrics, "charts/episodic_return"))
    assert set(column(metrics, "train/frac_multimodal")) == {0.0}
    rates = [3e-4 * (1 - i / 8) for i in range(8)]
    assert column(metrics, "charts/learning_rate") == pytest.approx(rates)
    saved = json.loads((run_dir / "args.json").read_text())
    assert {name: saved[name] for name in LONG} == LONG


def test_tags_are_those_of_the_page(whole):
    assert_tags_of_pages(tags(whole[0]), "unimodal_poisson")


def test_evaluation_of_a_run(whole, monkeypatch, capsys):
    """The same episodes as at the end of training give the same scores; more episodes by a flag."""
    expected = {tag: value for (step, tag), value in results(whole[0]).items() if step == 2048}
    command(unimodal_poisson, monkeypatch, "--evaluate", whole[0])
    score = f"sampled: {expected['eval/sampled/return_mean']:.1f} +- "
    assert score in capsys.readouterr().out
    command(unimodal_poisson, monkeypatch, "--evaluate", whole[0], "--eval-episodes", 3)
    printed = capsys.readouterr().out
    assert "--eval-episodes 3: the run began with 1" in printed and "return_std 0.0" not in printed


@pytest.mark.parametrize("number", [2, 4])
def test_kill_and_resume(number, whole, tmp_path, monkeypatch):
    """Before the first checkpoint, when the run begins anew, and after it."""
    kill_and_resume(unimodal_poisson, number, whole[0], tmp_path / "run", monkeypatch, LONG)


TWO = SMALL | {"total_timesteps": 512, "eval_episodes": 0}
SWITCHES = [{name: False} for name in ("norm_adv", "clip_vloss", "norm_obs", "norm_reward", "bootstrap_truncation")]
SWITCHES += [{"policy": "poisson_repo"}, {"policy": "categorical"}]


@pytest.fixture(scope="module")
def default(tmp_path_factory):
    """Metrics of two rollouts without a switch."""
    return train(unimodal_poisson, tmp_path_factory.mktemp("runs") / "default", **TWO)


@pytest.mark.parametrize("values", SWITCHES, ids=str)
def test_switches_change_the_run(values, default, tmp_path):
    found = train(unimodal_poisson, tmp_path, **TWO | values)
    assert column(found, "losses/value_loss") + column(found, "losses/policy_loss") != (
        column(default, "losses/value_loss") + column(default, "losses/policy_loss")
    )
    assert all(map(math.isfinite, found.values()))


def test_compiled(default, tmp_path):
    """The same run but for rounding."""
    found = train(unimodal_poisson, tmp_path, **TWO, compile=True)
    assert found == pytest.approx(default, rel=1e-3, abs=1e-5)


@pytest.mark.quick
def test_own_vector_environment(tmp_path):
    env_id = f"{ROOT}/envs/examples/carts.py:make"
    metrics = train(unimodal_poisson, tmp_path / "run", **SMALL | {"env_id": env_id})
    assert {(256, "charts/episodic_return"), (256, "eval/sampled/return_mean")} <= metrics.keys()


def test_what_cannot_be_run(whole, monkeypatch, capsys):
    assert "--seed 2: cannot change" in refusal(unimodal_poisson, monkeypatch, "--resume", whole[0], "--seed", 2)
    assert "actions are unbounded" in refusal(unimodal_poisson, monkeypatch, "--env-id", "test/Unbounded-v0")


def test_another_network_than_that_of_the_run(whole, monkeypatch):
    said = refusal(unimodal_poisson, monkeypatch, "--evaluate", whole[0], "--policy", "gaussian")
    assert "its networks are not those of these flags" in said


def test_a_loss_that_is_not_finite(tmp_path, monkeypatch):
    values = SMALL | {"policy": "gaussian", "learning_rate": 2e9, "total_timesteps": 1024}
    found = refusal(unimodal_poisson, monkeypatch, *as_flags(values), "--output-dir", tmp_path)
    assert "not finite" in found


def test_video_of_a_run_whose_evaluation_failed(tmp_path, monkeypatch):
    with monkeypatch.context() as broken, pytest.raises(TypeError):
        broken.setattr(unimodal_poisson, "evaluate", None)
        train(unimodal_poisson, tmp_path, **SMALL | {"env_id": "test/Seen-v0", "eval_episodes": 1})
    command(unimodal_poisson, monkeypatch, "--evaluate", tmp_path, "--eval-episodes", 0, "--video")
    assert (tmp_path / "episode.gif").read_bytes()[:4] == b"GIF8"


def test_a_video_without_opengl_is_one_sentence(whole, monkeypatch):
    monkeypatch.setattr(gym.vector.SyncVectorEnv, "render", lambda _: 1 / 0)
    found = refusal(unimodal_poisson, monkeypatch, "--evaluate", whole[0], "--video")
    assert "MUJOCO_GL=egl" in found


def test_flags_are_text_in_tensorboard(whole):
    board = EventAccumulator(str(whole[0])).Reload()
    (event,) = board.Tensors("hyperparameters/text_summary")
    assert b'"num_minibatches": 4' in event.tensor_proto.string_val[0]


def test_learning(tmp_path):
    """Balancing a pole from 7 steps to hundreds, in 8,192 steps of eight environments."""
    values = {"env_id": "InvertedPendulum-v5", "num_envs": 8, "num_steps": 64, "update_epochs": 8}
    values |= {"learning_rate": 3e-3, "temperature": 0.5, "total_timesteps": 8192, "save_steps": 0}
    metrics = train(unimodal_poisson, tmp_path / "run", **SMALL | values | {"eval_episodes": 5})
    assert metrics[512, "charts/episodic_return"] < 20
    assert metrics[8192, "eval/deterministic/return_mean"] > 400
    assert metrics[8192, "eval/sampled/return_mean"] > 150


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory):
    """Folder of a run with discrete actions."""
    run_dir = tmp_path_factory.mktemp("runs") / "cartpole"
    train(unimodal_poisson, run_dir, **CARTPOLE)
    return run_dir


def test_discrete_actions(cartpole, monkeypatch, capsys):
    """CartPole: a pole that falls after 20 steps at first stands for hundreds; at most 500."""
    metrics = results(cartpole)
    assert metrics[256, "charts/episodic_return"] < 40
    scores = [metrics[32_768, f"eval/{kind}/return_mean"] for kind in ("deterministic", "sampled")]
    assert all(150 < score <= 500 for score in scores)
    assert not column(metrics, "train/extreme_mass"), "the actions have no order"
    assert 0 < metrics[32_768, "losses/entropy"] < metrics[256, "losses/entropy"] <= math.log(2) + 1e-6
    assert json.loads((cartpole / "args.json").read_text())["policy"] == "categorical"
    command(unimodal_poisson, monkeypatch, "--evaluate", cartpole)
    score = f"sampled: {scores[1]:.1f} +- "
    assert score in capsys.readouterr().out


def test_kill_and_resume_with_discrete_actions(cartpole, tmp_path, monkeypatch):
    kill_and_resume(unimodal_poisson, 70, cartpole, tmp_path / "run", monkeypatch, CARTPOLE)
    command(unimodal_poisson, monkeypatch, "--resume", tmp_path / "run")  # of a finished run: nothing
    assert_same_run(tmp_path / "run", cartpole)


class Seen(gym.Env):
    """A task that can be rendered without MuJoCo; episodes end after 50 steps."""

    metadata = {"render_modes": ["rgb_array"]}
    observation_space = gym.spaces.Dict(x=gym.spaces.Box(-1, 1, (1,)), n=gym.spaces.Discrete(3))
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        return {"x": np.zeros(1, np.float32), "n": 1}, {}

    def step(self, action):
        return {"x": np.float32(action), "n": 2}, float(action[0]), False, False, {}

    def render(self):
        return np.full((64, 48, 3), 200, np.uint8)


class Unbounded(Seen):
    action_space = gym.spaces.Box(-np.inf, np.inf, (1,))


gym.register("test/Seen-v0", Seen, max_episode_steps=50)
gym.register("test/Unbounded-v0", Unbounded, max_episode_steps=50)
