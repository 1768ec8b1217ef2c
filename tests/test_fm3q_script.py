"""FM3Q as people run it: files, logs, crashes, every learner, mixer and game, flags, exploiters, learning."""

import json
import math
import re
import shutil
import signal
from functools import partial

import pytest
import torch
from control_runs import assert_same_run, column, refusal, saved, stop_and_resume, train
from processes import ROOT, as_flags, fork
from run_folders import documented_tags, table, tag_matches

from algorithms import fm3q
from algorithms.fm3q import Args, Learner, make_game, train_exploiter
from envs.pong import Pong

SCRIPT = ROOT / "algorithms" / "fm3q.py"
PAGE = (ROOT / "algorithms" / "fm3q.md").read_text(encoding="utf-8")
SMALL = {"total_timesteps": 320, "num_envs": 32, "learning_starts": 64, "hidden_size": 16, "embed_dim": 8}
SMALL |= {"batch_size": 32, "target_network_frequency": 2, "eval_steps": 0}  # 10 pieces of the run, 8 updates
LONG = SMALL | {"total_timesteps": 1600, "buffer_size": 500, "save_steps": 320, "eval_steps": 640}  # 50 pieces
PONG = SMALL | {"env_id": "pong", "num_pro": 1, "num_envs": 8, "total_timesteps": 400, "buffer_size": 150}
PONG |= {"save_steps": 80, "updates_per_step": 0.7}  # 50 pieces of a step each


class Tracker:
    """Networks, so to say, that play as the scripted tracker does."""

    @staticmethod
    def greedy(observations, state):
        apart = observations[..., -3] - observations[..., 0]  # the ball's height less one's own
        return torch.where(apart.abs() <= 0.045, 0, torch.where(apart < 0, 1, 2))


@pytest.fixture
def short_rallies(monkeypatch):
    """Pong that is cut off after 40 steps: a ninth of the time for an evaluation."""
    monkeypatch.setattr(fm3q, "Pong", partial(Pong, horizon=40))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder and process of an uninterrupted run."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    process = fork(SCRIPT, *as_flags(LONG), "--output-dir", run_dir)
    assert process.returncode == 0, process.stderr
    return run_dir, process


@pytest.fixture(scope="module")
def ten_pieces(tmp_path_factory):
    """Metrics of a short run; what switches are compared with."""
    return train(fm3q, tmp_path_factory.mktemp("runs") / "ten", **SMALL)


@pytest.fixture(scope="module")
def pong(tmp_path_factory):
    """Folder of a run of pong, one against two."""
    run_dir = tmp_path_factory.mktemp("runs") / "pong"
    train(fm3q, run_dir, **PONG)
    return run_dir


# --- The command and what it leaves ----------------------------------------------------------------------------------


def test_command_and_its_files(whole):
    run_dir, process = whole
    assert not re.search("warning|traceback|error", process.stderr, re.IGNORECASE), process.stderr
    progress = [line for line in process.stdout.splitlines() if line.startswith("step")]
    assert len(progress) == 50 and max(map(len, progress)) <= 80
    metrics, perf = table(run_dir), table(run_dir, "perf.csv")
    assert {step for step, tag in metrics if tag.startswith("eval/")} == {0, 640, 1280, 1600}
    pieces = [32 * i for i in range(1, 51)]
    assert [step for step, tag in metrics if tag == "losses/td_loss"] == [step for step in pieces if step > 64]
    assert [step for step, tag in metrics if tag == "charts/reward"] == pieces
    assert [step for step, tag in perf if tag == "charts/SPS"] == pieces
    assert all(map(math.isfinite, [*metrics.values(), *perf.values()]))
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == ["step_000000001280.pt", "step_000000001600.pt"]
    flags = json.loads((run_dir / "args.json").read_text())
    assert {name: flags[name] for name in LONG} == LONG and flags.keys() == Args.__dataclass_fields__.keys()
    learner = saved(run_dir)["learner"]  # an update for each step of all games; the replay holds the newest
    assert learner["updates"] == 48 and len(learner["buffer"]["columns"]["rewards"]) == 500
    epsilon = [1.0] * 2 + [max(1 - 0.9 * 32 * i / 800, 0.1) for i in range(2, 50)]  # random play first
    assert column(metrics, "charts/epsilon") == pytest.approx(epsilon)


def test_tags_are_those_of_the_page(whole, tmp_path, short_rallies):
    values = PONG | {"eval_steps": 10**6, "eval_games": 4, "exploiter_steps": 64, "learner": "iql"}
    metrics = train(fm3q, tmp_path / "run", **values)
    logged = {tag for _, tag in [*metrics, *table(whole[0]), *table(whole[0], "perf.csv")]}
    documented = documented_tags(PAGE)
    assert {tag for tag in logged if not any(tag_matches(row, tag) for row in documented)} == set()
    shapes = {re.sub("(tracker|wanderer)/(left|right)", "<>/<>", tag) for tag in logged}
    assert {row for row in documented if row not in shapes} == set()
    assert {step for step, tag in metrics if tag.startswith("eval/")} == {0, 400}
    assert {step for step, tag in metrics if "exploit" in tag} == {400}
    for opponent in ("tracker", "wanderer"):
        for side in ("left", "right"):
            scores = [metrics[400, f"eval/{opponent}/{side}/{name}"] for name in ("win", "draw", "loss")]
            assert sum(scores) == pytest.approx(1) and all(4 * score % 1 == 0 for score in scores)
    gains = [metrics[400, f"eval/exploiter_{side}"] for side in ("pro", "ant")]
    assert metrics[400, "eval/exploitability"] == pytest.approx(sum(gains)) and max(map(abs, gains)) <= 1


def test_evaluation_of_a_run(whole, pong, short_rallies, capsys):
    """The scores at the end of the training; pong is also shown."""
    capsys.readouterr()
    scores = fm3q.train(Args(evaluate=str(whole[0])))
    assert len(scores) == 3
    assert scores == {tag: value for (step, tag), value in table(whole[0]).items() if step == 1600 and tag in scores}
    assert f"eval/nash_conv_mean {scores['eval/nash_conv_mean']:.3f}" in capsys.readouterr().out
    scores = fm3q.train(Args(evaluate=str(pong), video=True, eval_games=3))
    assert len(scores) == 12 and f"{pong}/episode.gif" in capsys.readouterr().out
    assert (pong / "episode.gif").read_bytes()[:4] == b"GIF8"
    assert scores == fm3q.train(Args(evaluate=str(pong), eval_games=3)), "the same games"


def test_scripted_opponents_sit_on_the_other_side(short_rallies):
    """Networks that play as the tracker does win against the wanderer, from both sides."""
    args = Args(env_id="pong", num_pro=1, eval_games=16)
    scores = fm3q.play_scripted(Tracker, args, "cpu")
    for side in ("left", "right"):
        assert scores[f"eval/wanderer/{side}/win"] > 2 * scores[f"eval/wanderer/{side}/loss"] + 0.2, scores


# --- Determinism and resuming ----------------------------------------------------------------------------------------


def test_same_seed_same_run_other_seed_another(whole, ten_pieces, tmp_path, capsys):
    """Here, not in a process of its own, and with fewer evaluations, which must not disturb the training."""
    again = train(fm3q, tmp_path / "again", **LONG | {"eval_steps": 10**6})
    expected = table(whole[0])
    assert again.keys() < expected.keys() and all(expected[key] == value for key, value in again.items())
    other = train(fm3q, tmp_path / "other", **SMALL | {"seed": 2})
    assert other[320, "losses/td_loss"] != ten_pieces[320, "losses/td_loss"]
    assert "holds a run already" in refusal(fm3q, capsys, 2, **SMALL, output_dir=str(tmp_path / "other"))
    assert table(tmp_path / "other") == other


@pytest.mark.parametrize("number, step", [(signal.SIGKILL, 32), (signal.SIGKILL, 672), (signal.SIGTERM, 672)])
def test_stop_and_resume(number, step, whole, tmp_path, capsys):
    """Without a checkpoint yet the run begins anew."""
    stop_and_resume(fm3q, number, step, whole[0], tmp_path / "run", capsys, LONG)


def test_stop_and_resume_of_pong(pong, tmp_path, capsys):
    """In the middle of rallies, with a full replay and a fraction of an update owed."""
    stop_and_resume(fm3q, signal.SIGKILL, 200, pong, tmp_path / "run", capsys, PONG)
    state = saved(pong)
    assert state["game"]["clock"].max() > 0 and 0 < state["learner"]["owed"] < 1
    assert state["learner"]["updates"] == int(0.7 * 42) and state["learner"]["buffer"]["count"] == 400


def test_a_run_goes_on_with_its_own_flags(whole, capsys):
    for flag in ("resume", "evaluate"):
        errors = refusal(fm3q, capsys, 2, **{flag: str(whole[0])}, learning_rate=0.5)
        assert f"{whole[0]}: the run began with --learning-rate {Args.learning_rate}, not 0.5" in errors


def test_damaged_checkpoint(whole, tmp_path, capsys):
    """It is named, and nothing is destroyed; without it the run goes on from the one before."""
    run_dir, newest = tmp_path / "run", tmp_path / "run" / "checkpoints" / "step_000000001600.pt"
    shutil.copytree(whole[0], run_dir)
    newest.write_bytes(newest.read_bytes()[:10_000])
    assert f"{newest}: damaged" in refusal(fm3q, capsys, 1, resume=str(run_dir))
    newest.unlink()
    fm3q.train(Args(resume=str(run_dir)))
    assert_same_run(run_dir, whole[0])


def test_a_loss_that_is_not_a_number(tmp_path, capsys):
    errors = refusal(fm3q, capsys, 1, **SMALL | {"learning_rate": 2e9}, output_dir=str(tmp_path / "run"))
    assert "not a number" in errors and not [*(tmp_path / "run" / "checkpoints").iterdir()]


# --- Learners, mixers, games and flags -------------------------------------------------------------------------------


KINDS = [{"mixer": kind} for kind in ("twin", "vdn", "pairwise")] + [{"env_id": "pong", "mixer": "pairwise"}]
KINDS += [{"learner": kind} for kind in ("selfplay_vdn", "selfplay_qmix", "iql", "joint_minimax")]
KINDS += [{"env_id": "pong", "learner": kind} for kind in ("selfplay_qmix", "iql")]


@pytest.mark.parametrize("values", KINDS, ids=lambda values: " ".join(as_flags(values)))
def test_every_learner_and_mixer_runs(values, tmp_path):
    solved = values.get("env_id") != "pong"
    metrics = train(fm3q, tmp_path / "run", **SMALL | {"eval_steps": solved * 10**6} | values)
    assert all(map(math.isfinite, metrics.values())) and len(column(metrics, "losses/td_loss")) == 8
    assert ((320, "eval/value_error_max") in metrics) == (solved and values.get("learner") != "iql")


@pytest.mark.parametrize("game", ["additive", "product", "climbing", "pennies", "rock_paper_scissors", "saddle", "arat_large"])
def test_every_game_runs(game, tmp_path):
    values = {"env_id": game, "eval_steps": 10**6, "total_timesteps": 128}
    metrics = train(fm3q, tmp_path / "run", **SMALL | values)
    assert all(map(math.isfinite, metrics.values())) and (128, "eval/nash_conv_mean") in metrics
    returns = column(metrics, "charts/episodic_return")  # a step of a matrix game is a game
    assert returns == ([] if game == "arat_large" else column(metrics, "charts/reward"))


SWITCHES = [{"share_network": False}, {"hidden_size": 8}, {"embed_dim": 4}, {"updates_per_step": 2.0}, {"gamma": 0.5}]
SWITCHES += [{"buffer_size": 50}, {"batch_size": 16}, {"learning_rate": 1e-2}, {"max_grad_norm": 0.01}, {"tau": 0.5}]
SWITCHES += [{"start_e": 0.2}, {"end_e": 0.9}, {"exploration_fraction": 1.0}, {"exploration_fraction": 0.0}]
SWITCHES += [{"learning_starts": 128}, {"updates_per_step": 0.4}]  # with which some pieces of the run have no update


@pytest.mark.parametrize("values", SWITCHES, ids=lambda values: " ".join(as_flags(values)))
def test_switches_change_the_run(values, ten_pieces, tmp_path):
    """Every one of them does something, and leaves finite numbers."""
    metrics = train(fm3q, tmp_path / "run", **SMALL | values)
    assert all(map(math.isfinite, metrics.values()))
    assert column(metrics, "losses/td_loss") != column(ten_pieces, "losses/td_loss")
    if "updates_per_step" in values:
        assert saved(tmp_path / "run")["learner"]["updates"] == int(8 * values["updates_per_step"])


def test_teams_of_pong(pong):
    assert saved(pong)["learner"]["buffer"]["columns"]["observations"].shape == (150, 3, 7)
    returns = column(table(pong), "charts/episodic_return")
    assert 0 < len(returns) < 50 and all(-1 <= value <= 1 for value in returns), "absent where no game ended"


# --- Exploiters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("game", ["pennies", "saddle"])
def test_exploiters_find_the_best_answers(game):
    """Matrix games, in which NashConv is known: each side's gain, and its sign."""
    values = {"hidden_size": 16, "batch_size": 32, "learning_starts": 64, "num_envs": 32, "learning_rate": 1e-2}
    args = Args(env_id=game, **values, target_network_frequency=2, exploiter_steps=2560)
    torch.manual_seed(3)
    made = make_game(args, 1, 0, "cpu")
    team = Learner(made, args, "cpu").online
    pro, ant = team.greedy(*made.observe())[0].tolist()
    payoff = made.rewards[0]
    gains = [train_exploiter(team, side, args, "cpu") for side in (0, 1)]
    assert gains == pytest.approx([payoff[:, ant].max().item(), -payoff[pro].min().item()], abs=1e-6)


def test_exploiters_draw_where_a_rally_is_cut_off(monkeypatch):
    """The ball needs 14 steps or more: most rallies have no result yet, the others are lost by who never learned."""
    monkeypatch.setattr(fm3q, "Pong", partial(Pong, horizon=15))
    args = Args(env_id="pong", hidden_size=8, num_envs=64, exploiter_steps=64 * 150, learning_starts=10**6)
    for side in (0, 1):
        assert -0.9 < train_exploiter(Tracker, side, args, "cpu") < -0.1


# --- Learning --------------------------------------------------------------------------------------------------------


def test_learning(tmp_path):
    """The default game in a tenth of its steps."""
    values = {"total_timesteps": 6400, "num_envs": 16, "learning_starts": 640, "hidden_size": 32, "batch_size": 128}
    values |= {"learning_rate": 3e-3, "target_network_frequency": 10, "eval_steps": 10**6, "save_steps": 10**6}
    metrics = train(fm3q, tmp_path / "run", **SMALL | values)
    assert metrics[0, "eval/nash_conv_mean"] > 5
    # Seeds 1, 2, 3: from 22.9, 22.9, 32.1 to 0, 0.15, 0.15, where one of twelve actions is wrong by a hair.
    assert metrics[6400, "eval/nash_conv_mean"] < 0.2
