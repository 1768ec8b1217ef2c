"""MDPO as people run it."""

import json
import math
import shutil

import numpy as np
import pytest
from control_runs import assert_same_run, column, command, kill_and_resume, refusal, results, train
from processes import ROOT, as_flags
from run_folders import assert_tags_of_pages, begin, tags

from algorithms import mdpo

SMALL = {"env_id": "Pendulum-v1", "num_envs": 2, "num_steps": 128, "total_timesteps": 256, "eval_episodes": 1}
LONG = SMALL | {"total_timesteps": 256 * 8, "save_steps": 256}
OFF = {"method": "off_policy", "num_steps": 16, "learning_starts": 64, "sgd_steps": 48, "total_timesteps": 192}
OFF = SMALL | OFF | {"save_steps": 32}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    return run_dir, begin(mdpo, run_dir, **LONG)


@pytest.fixture(scope="module")
def off_policy(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "off_policy"
    train(mdpo, run_dir, **OFF)
    return run_dir


def test_command_and_its_files(whole):
    run_dir, output = whole
    progress = [line for line in output.splitlines() if line.startswith("step")]
    assert len(progress) == 8 and max(map(len, progress)) <= 80
    metrics = results(run_dir)
    steps = [256 * i for i in range(1, 9)]
    for tag in ("losses/policy_loss", "losses/kl", "losses/value_loss"):
        assert [step for step, name in metrics if name == tag] == steps
    assert all(map(math.isfinite, metrics.values()))
    assert set(column(metrics, "charts/episodic_length")) == {200.0}
    assert all(-200 * 17 < value < 0 for value in column(metrics, "charts/episodic_return"))
    saved = json.loads((run_dir / "args.json").read_text())
    assert saved | LONG | {"sgd_steps": 10, "learning_rate": 3e-3} == saved


def test_tags_are_those_of_the_page(whole, off_policy):
    assert_tags_of_pages(tags(whole[0]) | tags(off_policy), "mdpo")


@pytest.mark.parametrize("number", [1, 4])
def test_kill_and_resume(number, whole, tmp_path, monkeypatch):
    """Before the first checkpoint, when the run begins anew, and after it."""
    kill_and_resume(mdpo, number, whole[0], tmp_path / "run", monkeypatch, LONG)


def test_kill_and_resume_off_policy(off_policy, tmp_path, monkeypatch):
    """With its replay buffer, the old policy and the target. It learns after its first steps."""
    assert [step for step, tag in results(off_policy) if tag == "losses/kl"] == [96, 128, 160, 192]
    kill_and_resume(mdpo, 4, off_policy, tmp_path / "run", monkeypatch, OFF)
    command(mdpo, monkeypatch, "--resume", tmp_path / "run")  # of a finished run: only the evaluation again
    assert_same_run(tmp_path / "run", off_policy)


@pytest.mark.parametrize("name", ["whole", "off_policy"])
def test_evaluations_change_nothing_and_repeat(name, request, tmp_path, monkeypatch):
    run_dir = request.getfixturevalue(name)
    run_dir, values, every = (run_dir[0], LONG, 512) if name == "whole" else (run_dir, OFF, 64)
    expected = results(run_dir)
    found = train(mdpo, tmp_path / "run", **values | {"eval_steps": every})
    assert len(column(found, "eval/sampled/return_mean")) == values["total_timesteps"] // every
    assert {key: found[key] for key in expected} == expected
    scores = command(mdpo, monkeypatch, "--evaluate", run_dir)
    last = values["total_timesteps"]
    assert scores == {tag: value for (step, tag), value in expected.items() if step == last and "eval/" in tag}


ON_SWITCHES = [{"sgd_steps": 1}, {"tsallis_q": 1.5}, {"gamma": 0.9}, {"gae_lambda": 0.5}]
OFF_SWITCHES = [{"kl_coef": 0.3}, {"ent_coef": 0.0}, {"tsallis_q": 1.4}, {"sgd_steps": 3}]


@pytest.mark.parametrize("values", ON_SWITCHES + [OFF | values for values in OFF_SWITCHES], ids=str)
def test_switches_change_the_run(values, whole, off_policy, tmp_path):
    expected = results(off_policy if "method" in values else whole[0])
    found = train(mdpo, tmp_path, **SMALL | {"total_timesteps": 512} | values | {"eval_episodes": 0})
    step = max(step for step, _ in found)
    assert found[step, "losses/policy_loss"] != expected[step, "losses/policy_loss"]
    assert all(map(math.isfinite, found.values()))


@pytest.mark.quick
@pytest.mark.parametrize("values", [SMALL, OFF], ids=["on_policy", "off_policy"])
def test_own_vector_environment(values, tmp_path):
    metrics = train(mdpo, tmp_path / "run", **values | {"env_id": f"{ROOT}/envs/examples/carts.py:make", "save_steps": 0})
    assert {"charts/episodic_return", "eval/deterministic/return_mean"} <= {tag for _, tag in metrics}


def test_what_cannot_be_run(whole, tmp_path, monkeypatch):
    assert "--seed 2: cannot change" in refusal(mdpo, monkeypatch, "--resume", whole[0], "--seed", 2)
    both = refusal(mdpo, monkeypatch, "--resume", whole[0], "--evaluate", whole[0])
    assert both == "--resume and --evaluate: give one of them"
    assert "holds a run" in refusal(mdpo, monkeypatch, *as_flags(SMALL), "--output-dir", whole[0])
    assert "fewer than the 2048 steps" in refusal(mdpo, monkeypatch, *as_flags({"total_timesteps": 100}))
    said = refusal(mdpo, monkeypatch, "--evaluate", whole[0], "--method", "off_policy")
    assert "its networks are not those of these flags" in said
    values = as_flags(SMALL | {"learning_rate": 1e30, "total_timesteps": 1024})
    assert "not finite" in refusal(mdpo, monkeypatch, *values, "--output-dir", tmp_path)


def test_learning(tmp_path):
    """Balancing a pole from 7 steps to hundreds."""
    values = {"env_id": "InvertedPendulum-v5", "num_envs": 8, "num_steps": 64, "learning_rate": 1e-2}
    values |= {"total_timesteps": 25_600, "save_steps": 0, "eval_episodes": 5}
    metrics = train(mdpo, tmp_path / "run", **values)
    assert metrics[512, "charts/episodic_return"] < 20
    assert np.mean(column(metrics, "charts/episodic_return")[-5:]) > 100
    assert metrics[25_600, "eval/deterministic/return_mean"] > 400


def test_a_learning_rate_given_anew_on_resume(off_policy, tmp_path, monkeypatch, capsys):
    """It acts from the checkpoint on, off-policy too, where no schedule sets it."""
    folders = {}
    for rate in (None, 1e-2):
        folders[rate] = tmp_path / str(rate)
        shutil.copytree(off_policy, folders[rate])
        (folders[rate] / "checkpoints" / "step_000000000192.pt").unlink()
        words = ["--learning-rate", rate] if rate else []
        command(mdpo, monkeypatch, "--resume", folders[rate], *words)
    as_before, changed = (results(folder) for folder in folders.values())
    assert as_before == results(off_policy)
    with pytest.MonkeyPatch.context() as patch:
        command(mdpo, patch, "--resume", folders[None], "--total-timesteps", 96)
    assert f"{folders[None]}: has 192 steps already; a larger --total-timesteps goes on" in capsys.readouterr().out
    key = 192, "losses/policy_loss"
    assert changed[key] != as_before[key]


def test_a_run_too_short_to_learn_says_so(tmp_path, capsys):
    train(mdpo, tmp_path / "a", **OFF | {"learning_starts": 10_000, "eval_episodes": 0})
    assert "--learning-starts 10000: the run ends before it learns anything" in capsys.readouterr().out
    train(mdpo, tmp_path / "b", **OFF | {"eval_episodes": 0})
    assert "learns anything" not in capsys.readouterr().out
