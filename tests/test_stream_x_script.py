"""Stream AC(lambda) and stream Q(lambda) as people run them."""

import json
import math
import signal

import pytest
import torch
from control_runs import column, results, train
from processes import as_flags, fork
from run_folders import assert_tags_of_pages, begin, events, path_of, tags

from algorithms import stream_x

SCRIPT = path_of(stream_x)
KILLER = """\
import os, runpy, sys
number = int(sys.argv[1])
sys.argv[:2] = []
original, calls = os.replace, []
def deadly(*paths):
    calls.extend(path for path in paths if str(path).endswith("checkpoint.pt"))
    if len(calls) == number:
        os.kill(os.getpid(), 9)
    original(*paths)
os.replace = deadly
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SMALL = {"env_id": "CartPole-v1", "hidden_size": 16, "save_steps": 200, "eval_episodes": 2}
SMALL |= {"total_timesteps": 1200}
RUNS = {
    "ac": SMALL,
    "pendulum": SMALL | {"env_id": "Pendulum-v1", "optimizer": "adaptive_obgd"},
    "q": SMALL | {"algorithm": "q"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder of three runs that were not stopped, by their names; and what the first one printed."""
    folder = tmp_path_factory.mktemp("runs")
    output = begin(stream_x, folder / "ac", **RUNS["ac"])
    for name in ("pendulum", "q"):
        train(stream_x, folder / name, **RUNS[name])
    return folder, output


def test_command_and_its_files(runs):
    folder, output = runs
    progress = [line for line in output.splitlines() if line.startswith("step")]
    assert 3 <= len(progress) <= 6 and max(map(len, progress)) <= 80
    metrics = results(folder / "ac")
    assert all(map(math.isfinite, metrics.values()))
    board = events(folder / "ac")
    assert {key: board[key] for key in metrics} == pytest.approx(metrics)
    steps = [step for step, tag in metrics if tag == "charts/episodic_return"]
    assert len(steps) == len(progress)
    assert all(later - first >= 200 for first, later in zip([0, *steps], steps[:-1]))
    assert steps[-1] == SMALL["total_timesteps"], "the last row is of what is left"
    for name in ("policy", "value"):
        assert all(0 < size <= 1 for size in column(metrics, f"train/step_size_{name}"))
    assert 0 < column(metrics, "losses/entropy")[-1] <= math.log(2)
    saved = json.loads((folder / "ac" / "args.json").read_text())
    assert {name: saved[name] for name in SMALL} == SMALL


def test_tags_are_those_of_the_page(runs):
    assert_tags_of_pages(set().union(*(tags(runs[0] / name) for name in RUNS)), "stream_x")


@pytest.mark.parametrize("name, number", [("ac", 1), ("ac", 3), ("pendulum", 2), ("q", 2)])
def test_kill_and_resume(runs, name, number, tmp_path):
    """Killed while it puts down this checkpoint, a run goes on from the one before, to the bit."""
    (tmp_path / "killer.py").write_text(KILLER)
    words = [*as_flags(RUNS[name]), "--output-dir", tmp_path]
    process = fork(tmp_path / "killer.py", number, SCRIPT, *words)
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert (tmp_path / "checkpoint.tmp").exists() and (tmp_path / "checkpoint.pt").exists() == (number > 1)
    process = fork(SCRIPT, "--resume", tmp_path)
    assert process.returncode == 0, process.stderr
    whole = results(runs[0] / name)
    assert results(tmp_path) == whole
    trained = [line for line in process.stdout.splitlines() if line.startswith("step")]
    assert len(trained) == len(column(whole, "losses/td_error")) - number + 1


def test_a_finished_run_is_evaluated_again(tmp_path):
    """What is left of it after the last checkpoint is repeated."""
    process = fork(SCRIPT, *as_flags(SMALL), "--output-dir", tmp_path / "run")
    before = results(tmp_path / "run")
    again = fork(SCRIPT, "--resume", tmp_path / "run", "--eval-episodes", 4)
    assert "4 episodes, sampled: " in again.stdout, process.stderr + again.stderr
    assert (tmp_path / "run" / "final.pt").exists()
    assert results(tmp_path / "run").keys() == before.keys()


def test_evaluations_change_nothing_and_repeat(runs, tmp_path, capsys):
    """Every 300 steps; --evaluate of the folder gives the last scores again."""
    whole = results(runs[0] / "ac")
    found = train(stream_x, tmp_path, **RUNS["ac"], eval_steps=300)
    steps = [step for step, tag in found if tag == "eval/deterministic/return_mean"]
    assert len(steps) >= 3 and {key: found[key] for key in whole} == whole
    scores = stream_x.train(stream_x.Args(**RUNS["ac"], evaluate=str(tmp_path)))
    assert scores == {tag: value for (step, tag), value in found.items() if step == 1200 and "eval/" in tag}


@pytest.mark.quick
@pytest.mark.parametrize("optimizer", ["obgd", "sgd"])
@pytest.mark.parametrize("switches", [{}, {"layer_norm": False, "sparse_init": False}])
def test_switches_change_the_run(optimizer, switches, tmp_path):
    values = SMALL | {"lr": 1e-4 if optimizer == "sgd" else 1.0, "total_timesteps": 300}
    metrics = train(stream_x, tmp_path, **values | switches, optimizer=optimizer)
    errors = column(metrics, "losses/td_error")
    assert all(map(math.isfinite, errors))
    step_size = column(metrics, "train/step_size_value")[0]
    assert step_size == pytest.approx(1e-4) if optimizer == "sgd" else step_size < 0.9
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=False)
    first_layer = next(state[1].critic.parameters())
    assert state[1].critic.layer_norm == (not switches)
    assert first_layer.shape == (16, 5)


MISTAKES = {
    "--env-id Hoper-v5": "Did you mean: `Hopper`",
    "--env-id Pendulum-v1 --algorithm q": "actions of Pendulum-v1 are not discrete",
    "--resume nowhere": "nowhere: no run folder",
    "--algorithm dqn": "invalid choice",
    "--evaluate nowhere": "nowhere: no run folder",
    "--kappa-value -1": "--kappa-value: must be at least 0",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_named(words):
    process = fork(SCRIPT, *words.split())
    assert process.returncode != 0 and MISTAKES[words] in process.stderr, process.stderr


def test_a_run_folder_in_use(runs):
    process = fork(SCRIPT, *as_flags(SMALL), "--output-dir", runs[0] / "q")
    assert process.returncode == 1 and "holds a run; continue it with --resume" in process.stderr
    process = fork(SCRIPT, "--resume", runs[0] / "q", "--lr", 0.5)
    assert process.returncode == 1 and "--lr 0.5: cannot change, the run began with" in process.stderr
    process = fork(SCRIPT, "--evaluate", runs[0] / "q", "--eval-episodes", 0)
    assert process.returncode == 1 and "--eval-episodes: must be at least 1" in process.stderr


def test_a_run_that_diverges(tmp_path):
    values = RUNS["pendulum"] | {"optimizer": "sgd", "lr": 1e30}
    with pytest.raises(SystemExit, match="not finite: try a lower --lr; checkpoints are kept"):
        train(stream_x, tmp_path, **values)


def test_random_actions_become_rare(tmp_path, monkeypatch):
    """With stream Q, along a line to --end-e."""
    given = []
    act = stream_x.Agent.act
    monkeypatch.setattr(stream_x.Agent, "act", lambda self, seen, epsilon: given.append(epsilon) or act(self, seen, epsilon))
    values = {"env_id": "CartPole-v1", "algorithm": "q", "total_timesteps": 100, "exploration_fraction": 0.5, "end_e": 0.1}
    train(stream_x, tmp_path / "run", **values, hidden_size=8, eval_episodes=0)
    assert given[:100] == pytest.approx([max(0.1, 1 - 0.9 * step / 50) for step in range(1, 101)])


def test_learning(tmp_path):
    """Balancing a pole from 20 steps to hundreds, from single transitions."""
    values = {"env_id": "CartPole-v1", "hidden_size": 32, "save_steps": 1000}
    metrics = train(stream_x, tmp_path, **values, total_timesteps=5000, eval_episodes=0)
    returns = column(metrics, "charts/episodic_return")
    assert returns[0] < 100 and max(returns) > 150


def test_the_latest_of_two_files_is_scored(tmp_path):
    """A run that was extended and then stopped has an older final.pt beside a newer checkpoint."""
    torch.save((45, "old", None, None), tmp_path / "final.pt")
    torch.save((80, "new", None, None), tmp_path / "checkpoint.pt")
    assert stream_x.load(tmp_path)[:2] == (80, "new")
