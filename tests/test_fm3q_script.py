"""FM3Q as people run it: files, logs, crashes, every learner, mixer and game, bad input, learning."""

import math
import re
import shutil
from functools import partial

import pytest
import torch
from control_runs import checkpoints, column, command, kill_and_resume, refusal, results, train
from processes import as_flags
from run_folders import assert_tags_of_pages, begin, tags

from algorithms import fm3q
from algorithms.fm3q import Args
from envs.pong import Pong, tracker

SMALL = {"total_timesteps": 320, "num_envs": 32, "learning_starts": 64, "hidden_size": 16}
SMALL |= {"embed_dim": 8, "batch_size": 32, "target_network_frequency": 2, "eval_games": 4}
LONG = SMALL | {"total_timesteps": 1600, "buffer_size": 500, "save_steps": 320, "eval_steps": 640}
PONG = SMALL | {"env_id": "pong", "num_pro": 1, "num_envs": 8, "total_timesteps": 400}
PONG |= {"buffer_size": 150, "save_steps": 80, "updates_per_step": 0.7, "eval_steps": 0}


@pytest.fixture(autouse=True)
def short_rallies(monkeypatch):
    """Pong that is cut off after 40 steps: a ninth of the time for an evaluation."""
    monkeypatch.setattr("envs.pong.Pong", partial(Pong, horizon=40))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder of a run that is not stopped, its metrics, and what it printed."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    output = begin(fm3q, run_dir, **LONG)
    return run_dir, results(run_dir), output


@pytest.fixture(scope="module")
def pong(tmp_path_factory):
    """Folder of a run of pong, one against two."""
    run_dir = tmp_path_factory.mktemp("runs") / "pong"
    train(fm3q, run_dir, **PONG)
    return run_dir


def test_command_and_its_files(whole):
    run_dir, found, output = whole
    assert "replay ratio 1" in output
    progress = [line for line in output.splitlines() if line.startswith("step")]
    assert len(progress) == 50 and max(map(len, progress)) <= 80
    assert {step for step, tag in found if tag.startswith("eval/")} == {0, 640, 1280, 1600}
    pieces = [32 * i for i in range(1, 51)]
    learned = [step for step, tag in found if tag == "losses/td_loss"]
    assert learned == [step for step in pieces if step > 64]
    assert all(map(math.isfinite, found.values()))
    names = [path.name for path in checkpoints(run_dir)]
    assert names == ["step_000000001280.pt", "step_000000001600.pt"]
    state = torch.load(checkpoints(run_dir)[-1])
    assert state["count"] == 1600 and len(state["columns"]["rewards"]) == 500
    epsilon = [1.0] * 2 + [max(1 - 0.9 * 32 * i / 800, 0.1) for i in range(2, 50)]
    assert column(found, "charts/epsilon") == pytest.approx(epsilon), "random play first"
    rates = [1e-3 * (1 - 32 * i / 1600) for i in range(50)]
    assert column(found, "charts/learning_rate") == pytest.approx(rates)


def test_tags_are_those_of_the_page(whole, pong, tmp_path):
    train(fm3q, tmp_path, **PONG | {"exploiter_steps": 72, "total_timesteps": 80})
    assert_tags_of_pages(tags(whole[0]) | tags(pong) | tags(tmp_path), "fm3q")


def test_kill_and_resume(whole, tmp_path, monkeypatch):
    kill_and_resume(fm3q, 23, whole[0], tmp_path / "run", monkeypatch, LONG)


def test_kill_and_resume_of_pong(tmp_path, monkeypatch):
    """With a full replay and a fraction of an update after each step."""
    monkeypatch.undo()  # rallies of full length, as in the process that is killed
    values = PONG | {"eval_games": 1}
    train(fm3q, tmp_path / "whole", **values)
    kill_and_resume(fm3q, 25, tmp_path / "whole", tmp_path / "run", monkeypatch, values)


def test_evaluations_and_their_number_do_not_change_a_run(whole, tmp_path):
    found = train(fm3q, tmp_path / "run", **LONG | {"eval_steps": 0})
    assert found.keys() < whole[1].keys()
    assert all(whole[1][key] == value for key, value in found.items())


def test_evaluation_of_runs(whole, pong, tmp_path, monkeypatch, capsys):
    """The scores at the end of the training; teams of two runs against each other."""
    scores = fm3q.train(fm3q.Args(**LONG, evaluate=str(whole[0])))
    expected = {tag: value for (step, tag), value in whole[1].items() if (step, tag[:5]) == (1600, "eval/")}
    assert scores == expected and len(scores) == 3
    other = tmp_path / "other"
    train(fm3q, other, **PONG | {"seed": 2})
    capsys.readouterr()
    command(fm3q, monkeypatch, "--evaluate", pong, "--eval-games", 3, "--opponent", other)
    shown = dict(re.findall(r"(\S+) (-?\d\.\d+)\n", capsys.readouterr().out))
    assert len(shown) == 18
    shares = [float(value) for tag, value in shown.items() if tag.endswith(("win", "loss"))]
    assert all(min(abs(share - x / 3) for x in range(4)) < 1e-3 for share in shares)
    args, cpu = Args(**PONG | {"eval_games": 3}), torch.device("cpu")
    ours, theirs = (fm3q.player(fm3q.load_teams(run, args, cpu)) for run in (pong, other))
    for tag, value in fm3q.match("opponent", ours, theirs, args, cpu).items():
        assert shown[tag] == f"{value:.3f}"


def test_opponents_play_the_other_side():
    """The tracker wins against the wanderer from both sides."""
    args = Args(env_id="pong", num_pro=1, eval_games=16)
    scores = fm3q.match("wanderer", tracker, fm3q.wanderer, args, torch.device("cpu"))
    for side in ("pro", "ant"):
        won, lost = scores[f"eval/wanderer/{side}/win"], scores[f"eval/wanderer/{side}/loss"]
        assert won > 2 * lost + 0.2 and scores[f"eval/wanderer/{side}/return"] == won - lost


KINDS = [{"mixer": kind} for kind in ("twin", "vdn", "pairwise")]
KINDS += [{"learner": kind} for kind in ("selfplay_vdn", "selfplay_qmix", "iql")]
KINDS += [{"env_id": "pong", "mixer": "pairwise"}, {"env_id": "pong", "learner": "selfplay_qmix"}]
KINDS += [{"env_id": "climbing"}, {"env_id": "rock_paper_scissors"}, {"env_id": "arat_large"}]
KINDS += [{"env_id": "arat_random", "num_states": 4, "num_pro": 1, "num_ant": 3, "game_seed": 2}]


@pytest.mark.parametrize("values", KINDS, ids=lambda values: " ".join(as_flags(values)))
def test_every_learner_mixer_and_game_runs(values, tmp_path):
    found = train(fm3q, tmp_path / "run", **SMALL | {"eval_steps": 0} | values)
    assert all(map(math.isfinite, found.values())) and len(column(found, "losses/td_loss")) == 8
    assert ((320, "eval/nash_conv_mean") in found) == (values.get("env_id") != "pong")


@pytest.mark.quick
def test_own_environment(tmp_path, capsys):
    """A parallel environment of a file, with masks and agents that leave."""
    (tmp_path / "duel.py").write_text("from tests.test_two_team import Duel as make\n")
    values = SMALL | {"env_id": f"{tmp_path / 'duel.py'}:make", "num_envs": 4, "eval_steps": 0}
    found = train(fm3q, tmp_path / "run", **values)
    assert all(map(math.isfinite, found.values())) and (320, "eval/wanderer/pro/return") in found
    assert "protagonists runner_0 runner_1 against antagonists adversary_0\n" in capsys.readouterr().out
    assert 3 <= min(column(found, "charts/episodic_return")) <= max(column(found, "charts/episodic_return")) <= 6


SWITCHES = [{"embed_dim": 4}, {"updates_per_step": 2.0}, {"gamma": 0.5}, {"buffer_size": 50}]
SWITCHES += [{"batch_size": 16}, {"learning_rate": 1e-2}, {"max_grad_norm": 0.01}, {"tau": 0.5}]
SWITCHES += [{"end_e": 0.9}, {"exploration_fraction": 0.0}, {"learning_starts": 128}, {"seed": 2}]


@pytest.mark.parametrize("values", SWITCHES, ids=lambda values: " ".join(as_flags(values)))
def test_switches_change_the_run(values, whole, tmp_path):
    found = train(fm3q, tmp_path / "run", **LONG | {"eval_steps": 0} | values)
    assert all(map(math.isfinite, found.values()))
    assert column(found, "losses/td_loss") != column(whole[1], "losses/td_loss")


def test_what_cannot_be_run(whole, pong, tmp_path, monkeypatch):
    say = partial(refusal, fm3q, monkeypatch)
    for flag, value in (("max-grad-norm", -1.0), ("learning-rate", -3e-4), ("exploiter-learning-rate", -1.0), ("hidden-size", 0), ("embed-dim", 0), ("num-states", 0)):
        assert f"--{flag} {value}: must be at least" in say(f"--{flag}", value)
    for name in ("./games.py", ""):
        assert "expected a game of this script, FILE.py:function" in say("--env-id", name)
    assert "cannot change on resume" in say("--resume", whole[0], "--mixer", "vdn")
    assert "cannot change on resume" in say("--resume", whole[0], "--output-dir", tmp_path)
    assert "plays another game" in say("--evaluate", pong, "--opponent", whole[0])
    words = as_flags(SMALL | {"learning_rate": 1e30, "learning_starts": 0, "eval_steps": 10**6})
    assert "lower --learning-rate" in say(*words, "--output-dir", tmp_path / "run")
    assert not checkpoints(tmp_path / "run") and "no checkpoint" in say("--evaluate", tmp_path / "run")


def test_a_run_with_no_steps_left(whole, tmp_path, monkeypatch, capsys):
    shutil.copytree(whole[0], tmp_path / "run")
    command(fm3q, monkeypatch, "--resume", tmp_path / "run", "--total-timesteps", 320)
    assert "run: has 1600 steps already; a larger --total-timesteps goes on\n" in capsys.readouterr().out


def test_another_network_than_that_of_the_run(whole, monkeypatch, tmp_path):
    assert "its networks are not those of these flags" in refusal(fm3q, monkeypatch, "--evaluate", whole[0], "--hidden-size", 24)


def test_learning(tmp_path):
    """The default game in a tenth of its steps; one of twelve actions may be wrong by a hair."""
    values = {"total_timesteps": 6400, "num_envs": 16, "learning_starts": 640, "batch_size": 128}
    values |= {"learning_rate": 3e-3, "target_network_frequency": 10, "eval_steps": 6400}
    found = train(fm3q, tmp_path / "run", **values)
    assert found[0, "eval/nash_conv_mean"] > 5
    assert found[6400, "eval/nash_conv_mean"] < 0.2
