"""FM3Q as people run it: files, logs, crashes, every learner, mixer, game and flag, bad input, learning."""

import json
import math
import os
import re
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from processes import ROOT, as_flags, begin_and_interrupt, fork
from run_folders import documented_tags, events, table, tag_matches

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
TAGS = ["losses/td_loss", "losses/grad_norm", "charts/epsilon", "charts/reward"]


# --- Means -----------------------------------------------------------------------------------------------------------


def train_here(run_dir, **values) -> dict[tuple[int, str], float]:
    """train() in this process with small settings; its metrics."""
    fm3q.train(Args(**{**SMALL, "output_dir": str(run_dir), **values}))
    return table(run_dir)


def refusal(capsys, code: int = 2, **values) -> str:
    """The one sentence with which train() refuses these flags."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        fm3q.train(Args(**values))
    errors = capsys.readouterr().err
    assert stopped.value.code == code and errors.startswith("error: ") and errors.count("\n") == 1, errors
    return errors


def column(metrics: dict, tag: str) -> list[float]:
    """Values of a tag, in the order of steps."""
    return [value for (_, name), value in metrics.items() if name == tag]


def saved(run_dir) -> dict:
    """The newest checkpoint."""
    return torch.load(max(Path(run_dir, "checkpoints").glob("*.pt")))


def assert_same(ours, theirs) -> None:
    """Two nested state_dicts are the same to the bit."""
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
    if isinstance(ours, dict | list):
        for key in ours if isinstance(ours, dict) else range(len(theirs)):
            assert_same(ours[key], theirs[key])
    else:
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


def assert_same_run(run_dir, other) -> None:
    """The same metrics, networks, optimizer, replay, games and random numbers to come, to the bit."""
    assert Path(run_dir, "metrics.csv").read_bytes() == Path(other, "metrics.csv").read_bytes()
    assert table(run_dir, "perf.csv").keys() == table(other, "perf.csv").keys()
    ours, theirs = saved(run_dir), saved(other)
    assert ours.keys() == {"learner", "game", "progress", "random", "random_cuda"}
    assert ours["learner"].keys() == {"online", "target", "optimizer", "buffer", "updates", "owed"}
    assert_same(ours, theirs)


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
    return train_here(tmp_path_factory.mktemp("runs") / "ten")


@pytest.fixture(scope="module")
def pong(tmp_path_factory):
    """Folder of a run of pong, one against two."""
    run_dir = tmp_path_factory.mktemp("runs") / "pong"
    train_here(run_dir, **PONG)
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
    board = events(run_dir)
    logged = {(event.step, tag): event.value for tag in board.Tags()["scalars"] for event in board.Scalars(tag)}
    assert logged.keys() == (metrics | perf).keys()
    for key, value in (metrics | perf).items():
        assert logged[key] == pytest.approx(value, rel=1e-6), key
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == ["step_000000001280.pt", "step_000000001600.pt"]
    flags = json.loads((run_dir / "args.json").read_text())
    assert {name: flags[name] for name in LONG} == LONG and flags.keys() == Args.__dataclass_fields__.keys()


def test_what_a_run_counts(whole):
    """Random play first, then an update for each step of all games; the replay holds the newest."""
    learner = saved(whole[0])["learner"]
    assert learner["updates"] == 48 and learner["owed"] == 0
    assert learner["buffer"]["count"] == 1600 and len(learner["buffer"]["columns"]["rewards"]) == 500
    expected = [1.0] * 2 + [max(1 - 0.9 * 32 * i / 800, 0.1) for i in range(2, 50)]
    assert column(table(whole[0]), "charts/epsilon") == pytest.approx(expected)


def test_tags_are_those_of_the_page(whole, tmp_path, short_rallies):
    values = PONG | {"eval_steps": 10**6, "eval_games": 4, "exploiter_steps": 64, "learner": "iql"}
    metrics = train_here(tmp_path / "run", **values)
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


def test_same_seed_same_run_other_seed_another(whole, ten_pieces, tmp_path):
    """Here, not in a process of its own, and with fewer evaluations, which must not disturb the training."""
    train_here(tmp_path / "again", **LONG | {"eval_steps": 10**6})
    lines = (whole[0] / "metrics.csv").read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if b",eval/" not in line or line.startswith((b"0,", b"1600,"))]
    assert len(lines) == len(kept) + 6
    assert (tmp_path / "again" / "metrics.csv").read_bytes() == b"".join(kept)
    other = train_here(tmp_path / "other", seed=2)
    assert other[320, "losses/td_loss"] != ten_pieces[320, "losses/td_loss"]


def test_kill_9_and_resume(whole, tmp_path, capsys):
    run_dir = tmp_path / "run"
    assert begin_and_interrupt(signal.SIGKILL, "step       672/", SCRIPT, run_dir, **LONG)[0] == -signal.SIGKILL
    newest = max(int(path.stem[5:]) for path in (run_dir / "checkpoints").glob("*.pt"))
    assert 640 <= newest < 1600
    (run_dir / "checkpoints" / "step_000000001600.pt.tmp").write_bytes(b"half a checkpoint")
    with open(run_dir / "metrics.csv", "a") as file:
        file.write("1600,losses/td")  # half a row
    capsys.readouterr()
    fm3q.train(Args(resume=str(run_dir)))
    assert len(re.findall("^step ", capsys.readouterr().out, re.MULTILINE)) == (1600 - newest) / 32, "none is repeated"
    assert_same_run(run_dir, whole[0])
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == ["step_000000001280.pt", "step_000000001600.pt"]


def test_kill_9_and_resume_of_pong(pong, tmp_path):
    """In the middle of rallies, with a full replay and a fraction of an update owed."""
    status, _ = begin_and_interrupt(signal.SIGKILL, "step       200/", SCRIPT, tmp_path / "run", **LONG | PONG)
    assert status == -signal.SIGKILL
    fm3q.train(Args(resume=str(tmp_path / "run")))
    assert_same_run(tmp_path / "run", pong)
    state = saved(pong)
    assert state["game"]["clock"].max() > 0 and 0 < state["learner"]["owed"] < 1
    assert state["learner"]["updates"] == int(0.7 * 42) and state["learner"]["buffer"]["count"] == 400


def test_terminate_saves_and_resumes(whole, tmp_path, monkeypatch, capsys):
    """The piece in which the signal comes is finished and saved."""
    advance = fm3q.advance

    def terminate(*inputs, times=[]):  # noqa: B006
        times.append(None)
        if len(times) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return advance(*inputs)

    monkeypatch.setattr(fm3q, "advance", terminate)
    run_dir = tmp_path / "run"
    errors = refusal(capsys, 128 + signal.SIGTERM, **LONG | {"save_steps": 10**6}, output_dir=str(run_dir))
    assert errors == f"error: stopped after step 160; continue with --resume {run_dir}\n"
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_000000000160.pt"]
    fm3q.train(Args(resume=str(run_dir)))
    assert_same_run(run_dir, whole[0])


def test_resume_before_a_checkpoint(pong, tmp_path, monkeypatch):
    """A crash in the second piece leaves a run without a checkpoint, which begins anew."""
    advance, left = fm3q.advance, [None]
    monkeypatch.setattr(fm3q, "advance", lambda *inputs: left.pop() or advance(*inputs))
    with pytest.raises(IndexError):
        fm3q.train(Args(**PONG, output_dir=str(tmp_path / "run")))
    assert not [*(tmp_path / "run" / "checkpoints").iterdir()]
    monkeypatch.setattr(fm3q, "advance", advance)
    fm3q.train(Args(resume=str(tmp_path / "run")))
    assert_same_run(tmp_path / "run", pong)


def test_resume_of_a_finished_run_changes_nothing(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "run")
    fm3q.train(Args(resume=str(tmp_path / "run")))
    assert_same_run(tmp_path / "run", whole[0])


def test_damaged_checkpoint(whole, tmp_path, capsys):
    run_dir, newest = tmp_path / "run", tmp_path / "run" / "checkpoints" / "step_000000001600.pt"
    shutil.copytree(whole[0], run_dir)
    with open(newest, "r+b") as file:
        file.truncate(10_000)
    for flag in ("resume", "evaluate"):
        assert f"{newest}: damaged" in refusal(capsys, code=1, **{flag: str(run_dir)})
    newest.write_bytes(b"")
    assert f"{newest}: damaged" in refusal(capsys, code=1, resume=str(run_dir))
    torch.save({"weights": torch.zeros(3)}, newest)
    assert "of another script" in refusal(capsys, code=1, resume=str(run_dir))
    assert (run_dir / "metrics.csv").read_bytes() == (whole[0] / "metrics.csv").read_bytes(), "nothing is destroyed"
    newest.unlink()
    fm3q.train(Args(resume=str(run_dir)))  # from step 1280
    assert_same_run(run_dir, whole[0])


CHANGED = [{"learning_rate": 0.5}, {"seed": 7}, {"mixer": "vdn"}, {"hidden_size": 32}, {"total_timesteps": 3200}]


def test_resume_refuses_changed_flags(whole, capsys):
    before = (whole[0] / "metrics.csv").read_bytes()
    for values in [*CHANGED, {"env_id": "pong"}, {"output_dir": "elsewhere"}, {"eval_games": 3}]:
        ((name, value),) = values.items()
        errors = refusal(capsys, resume=str(whole[0]), **values)
        assert f"--{name.replace('_', '-')} " in errors and str(value) in errors
    assert (whole[0] / "metrics.csv").read_bytes() == before


def test_evaluation_refuses_changed_flags(whole, capsys):
    """They would do nothing; --eval-games and --device may differ."""
    for values in CHANGED:
        ((name, value),) = values.items()
        assert f"--{name.replace('_', '-')} {LONG.get(name, getattr(Args, name))}, not {value}" in refusal(
            capsys, evaluate=str(whole[0]), eval_games=1, **values
        )


# --- Learners, mixers, games and flags -------------------------------------------------------------------------------

GAMES = ["additive", "product", "climbing", "pennies", "rock_paper_scissors", "saddle"]


@pytest.mark.parametrize("mixer", ["twin", "vdn", "pairwise"])
def test_every_mixer_runs(mixer, ten_pieces, tmp_path):
    metrics = train_here(tmp_path / "run", mixer=mixer, eval_steps=10**6)
    assert all(map(math.isfinite, metrics.values())) and (320, "eval/value_error_max") in metrics
    assert column(metrics, "losses/td_loss") != column(ten_pieces, "losses/td_loss")


@pytest.mark.parametrize("learner", ["selfplay_vdn", "selfplay_qmix", "iql", "joint_minimax"])
def test_every_learner_runs(learner, ten_pieces, tmp_path):
    metrics = train_here(tmp_path / "run", learner=learner, eval_steps=10**6)
    assert all(map(math.isfinite, metrics.values()))
    assert ((320, "eval/value_error_max") in metrics) == (learner != "iql")
    assert column(metrics, "losses/td_loss") != column(ten_pieces, "losses/td_loss")


def test_every_game_runs(tmp_path):
    seen = set()
    for game in GAMES:
        metrics = train_here(tmp_path / game, env_id=game, eval_steps=10**6, total_timesteps=128)
        assert all(map(math.isfinite, metrics.values()))
        assert column(metrics, "charts/episodic_return") == column(metrics, "charts/reward"), "a step is a game"
        seen.add(metrics[64, "losses/td_loss"] if (64, "losses/td_loss") in metrics else metrics[96, "losses/td_loss"])
    assert len(seen) == len(GAMES)
    metrics = train_here(tmp_path / "large", env_id="arat_large", total_timesteps=128)
    assert all(map(math.isfinite, metrics.values())) and "charts/episodic_return" not in {tag for _, tag in metrics}


SWITCHES = [
    {"share_network": False},
    {"hidden_size": 8},
    {"embed_dim": 4},
    {"updates_per_step": 2.0},
    {"updates_per_step": 0.4},  # some pieces of the run have no update
    {"buffer_size": 50},
    {"batch_size": 16},
    {"learning_rate": 1e-2},
    {"gamma": 0.5},
    {"target_network_frequency": 3},
    {"tau": 0.5},
    {"start_e": 0.2},
    {"end_e": 0.9},
    {"exploration_fraction": 1.0},
    {"exploration_fraction": 0.0},
    {"max_grad_norm": 0.01},
    {"learning_starts": 128},
]


@pytest.mark.parametrize("values", SWITCHES, ids=lambda values: " ".join(as_flags(values)))
def test_switches_change_the_run(values, ten_pieces, tmp_path):
    """Every one of them does something, and leaves finite numbers."""
    metrics = train_here(tmp_path / "run", **values)
    assert all(map(math.isfinite, metrics.values()))
    assert column(metrics, "losses/td_loss") != column(ten_pieces, "losses/td_loss")
    if values.keys() & {"start_e", "end_e", "exploration_fraction"}:
        flags = {"start_e": 1.0, "end_e": 0.1, "exploration_fraction": 0.5} | values
        duration = flags["exploration_fraction"] * 320
        shares = [min(32 * i / duration, 1) if duration else 1 for i in range(10)]
        expected = [flags["start_e"] + (flags["end_e"] - flags["start_e"]) * share for share in shares]
        assert column(metrics, "charts/epsilon")[2:] == pytest.approx(expected[2:])
    if "updates_per_step" in values:
        assert saved(tmp_path / "run")["learner"]["updates"] == int(8 * values["updates_per_step"])
    if values == {"learning_starts": 128}:
        assert min(step for step, tag in metrics if tag == "losses/td_loss") == 160
        assert column(metrics, "charts/epsilon")[:4] == [1.0] * 4 and column(metrics, "charts/epsilon")[4] < 1


def test_teams_of_pong(pong, tmp_path):
    metrics = table(pong)
    assert saved(pong)["learner"]["buffer"]["columns"]["observations"].shape == (150, 3, 7)
    returns = [(step, value) for (step, tag), value in metrics.items() if tag == "charts/episodic_return"]
    assert 0 < len(returns) < 50 and all(-1 <= value <= 1 for _, value in returns), "absent where no game ended"
    values = PONG | {"total_timesteps": 160, "num_pro": 2, "num_ant": 2}
    for learner, mixer in (("fm3q", "pairwise"), ("iql", "qmix"), ("selfplay_qmix", "qmix")):
        found = train_here(tmp_path / f"{learner}_{mixer}", **values, learner=learner, mixer=mixer)
        assert all(map(math.isfinite, found.values()))


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


# --- Bad input -------------------------------------------------------------------------------------------------------

BAD_FLAGS = [  # flags, parts of the sentence
    *(({name: -0.1}, [f"--{name.replace('_', '-')} -0.1", "0 to 1"]) for name in ("gamma", "tau", "start_e", "end_e")),
    *(({name: 1.1}, [f"--{name.replace('_', '-')} 1.1", "0 to 1"]) for name in ("gamma", "exploration_fraction")),
    *(({name: 0}, [f"--{name.replace('_', '-')} 0", "from 1 to"]) for name in ("num_envs", "hidden_size", "embed_dim")),
    *(({name: 0}, [f"--{name.replace('_', '-')} 0", "from 1 to"]) for name in ("total_timesteps", "buffer_size")),
    *(({name: 0}, [f"--{name.replace('_', '-')} 0", "from 1 to"]) for name in ("batch_size", "learning_starts")),
    *(({name: 0}, [f"--{name.replace('_', '-')} 0", "from 1 to"]) for name in ("save_steps", "num_threads")),
    *(({name: 0}, [f"--{name.replace('_', '-')} 0", "from 1 to"]) for name in ("eval_games", "num_pro", "num_ant")),
    ({"target_network_frequency": 0}, ["--target-network-frequency 0"]),
    ({"updates_per_step": -1.0}, ["--updates-per-step -1.0", "from 0 to"]),
    ({"learning_rate": math.nan}, ["--learning-rate nan"]),
    ({"learning_rate": math.inf}, ["--learning-rate inf"]),
    ({"max_grad_norm": -1.0}, ["--max-grad-norm -1.0", "from 0 to"]),
    ({"eval_steps": -1}, ["--eval-steps -1", "from 0 to"]),
    ({"exploiter_steps": -1}, ["--exploiter-steps -1", "from 0 to"]),
    ({"seed": -1}, ["--seed -1", "from 0 to"]),
    ({"num_pro": 1}, ["--num-pro", "pong", "arat"]),
    ({"num_ant": 3, "env_id": "pennies"}, ["--num-ant", "pong", "pennies"]),
    ({"exploiter_steps": 1000}, ["--exploiter-steps", "pong", "arat"]),
    ({"exploiter_steps": 100, "env_id": "pong"}, ["--exploiter-steps 100"]),  # too few for a score
    ({"buffer_size": 31}, ["--buffer-size 31", "--num-envs 32"]),
    ({"mixer": "pairwise", "env_id": "pong", "num_pro": 1}, ["--mixer pairwise", "--num-pro 1", "--num-ant 2"]),
    ({"mixer": "vdn", "learner": "iql"}, ["--mixer vdn", "iql"]),
    ({"mixer": "pairwise", "learner": "joint_minimax"}, ["--mixer pairwise", "joint_minimax"]),
    ({"gamma": 1.0}, ["--gamma 1", "arat"]),
    ({"gamma": 1.0, "env_id": "arat_large"}, ["--gamma 1", "arat_large"]),
    ({"video": True}, ["--video"]),
    ({"video": True, "env_id": "pong"}, ["--video", "--evaluate"]),
]


@pytest.mark.parametrize("values, words", BAD_FLAGS, ids=lambda value: " ".join(map(str, value)))
def test_bad_flags_get_one_sentence(values, words, capsys, tmp_path):
    errors = refusal(capsys, **SMALL | {"output_dir": str(tmp_path / "run")} | values)
    assert all(word in errors for word in words), errors
    assert not (tmp_path / "run").exists(), "nothing is left of a run that never began"


def test_what_only_pong_has_is_refused_for_a_run_of_another_game(whole, capsys):
    for values in ({"video": True}, {"exploiter_steps": 1000}):
        errors = refusal(capsys, evaluate=str(whole[0]), **values)
        assert "--video" in errors and "pong" in errors and "arat" in errors


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_missing_device(capsys, tmp_path):
    errors = refusal(capsys, **SMALL, device="cuda", output_dir=str(tmp_path / "run"))
    assert "--device cuda" in errors and not (tmp_path / "run").exists()


def test_bad_commands_exit_with_2():
    process = fork(SCRIPT, "--gamma", "2")
    assert process.returncode == 2 and process.stdout == "" and process.stderr.count("\n") == 1
    assert process.stderr.startswith("error: --gamma 2.0: expected a number from 0 to 1")
    process = fork(SCRIPT, "--learner", "selfplay")
    assert process.returncode == 2
    assert "selfplay_qmix" in process.stderr, "tyro names the choices"


def test_folders_that_are_no_runs(whole, tmp_path, capsys):
    for flag in ("resume", "evaluate"):
        for text in (None, "not JSON", "[]", "null", '{"model_name_or_path": null, "top_p": 1.0}'):
            if text is not None:
                (tmp_path / "args.json").write_text(text)
            assert f"{tmp_path}: not a run folder" in refusal(capsys, **{flag: str(tmp_path)})
        (tmp_path / "args.json").unlink()
    before = (whole[0] / "metrics.csv").read_bytes()
    assert f"--output-dir {whole[0]}: holds a run already" in refusal(capsys, **SMALL, output_dir=str(whole[0]))
    assert (whole[0] / "metrics.csv").read_bytes() == before
    shutil.copy(whole[0] / "args.json", tmp_path)
    assert f"--resume {tmp_path}" in refusal(capsys, evaluate=str(tmp_path)), "no checkpoint yet"


def test_a_loss_that_is_not_a_number(tmp_path, capsys):
    errors = refusal(capsys, code=1, **SMALL, learning_rate=2e9, output_dir=str(tmp_path / "run"))
    assert "not a number" in errors and not [*(tmp_path / "run" / "checkpoints").iterdir()]


# --- Learning --------------------------------------------------------------------------------------------------------


def test_learning(tmp_path):
    """The default game in a tenth of its steps."""
    values = {"total_timesteps": 6400, "num_envs": 16, "learning_starts": 640, "hidden_size": 32, "batch_size": 128}
    values |= {"learning_rate": 3e-3, "target_network_frequency": 10, "eval_steps": 10**6, "save_steps": 10**6}
    metrics = train_here(tmp_path / "run", **values)
    assert metrics[0, "eval/nash_conv_mean"] > 5
    # Seeds 1, 2, 3: from 22.9, 22.9, 32.1 to 0, 0.15, 0.15, where one of twelve actions is wrong by a hair.
    assert metrics[6400, "eval/nash_conv_mean"] < 0.2
