"""SPIRAL as people run it: files, logs, crashes, opponents, several processes, every switch, bad input, learning."""

import json
import math
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
import tyro
from processes import ROOT, as_flags, begin_and_interrupt, fork, train_by_two
from run_folders import (
    assert_close,
    assert_same_run,
    documented_tags,
    events,
    last,
    table,
    tag_matches,
)
from safetensors.torch import load_file

from algorithms import spiral_rae
from algorithms.spiral_rae import Args
from envs.game_solvers import kuhn_nash_conv

SCRIPT, PAGE = ROOT / "algorithms" / "spiral_rae.py", ROOT / "algorithms" / "spiral_rae.md"
GAMES = ("tictactoe", "kuhn", "negotiation")
SMALL = {"games": GAMES, "num_prompts_per_step": 3, "num_generations": 2, "max_completion_length": 32}
SMALL |= {"eval_games": 1, "eval_thoughts": 2, "device": "cpu"}
LONG = SMALL | {"games": GAMES[:2], "num_prompts_per_step": 2, "max_steps": 4, "save_steps": 2, "eval_steps": 4}
RATE = Args.learning_rate


# --- Means -----------------------------------------------------------------------------------------------------------


def train_here(run_dir, **values) -> dict[tuple[int, str], float]:
    """train() in this process with small settings; its metrics."""
    spiral_rae.train(Args(**{**SMALL, "max_steps": 1, "output_dir": str(run_dir), **values}))
    return table(run_dir)


def refusal(capsys, code: int = 2, **values) -> str:
    """The one sentence with which train() refuses these flags."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        spiral_rae.train(Args(**{**SMALL, "max_steps": 1, **values}))
    errors = capsys.readouterr().err
    assert stopped.value.code == code and errors.startswith("error: ") and errors.count("\n") == 1, errors
    return errors


def assert_nearly_same_weights(run_dir, other) -> None:
    """As in run_folders.py: where the gradient is rounding noise AdamW's first step may go either way."""
    ours, theirs = (load_file(Path(folder, "final", "model.safetensors")) for folder in (run_dir, other))
    assert ours.keys() == theirs.keys()
    difference = torch.cat([(ours[name] - theirs[name]).abs().flatten() for name in ours])
    assert difference.max() <= 4 * RATE and difference.mean() < 1e-7, (difference.max(), difference.mean())


def state(run_dir) -> dict:
    """The newest checkpoint of a run."""
    return torch.load(max(Path(run_dir, "checkpoints").glob("*.pt")), weights_only=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder and process of four uninterrupted steps."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    process = fork(SCRIPT, *as_flags(LONG), "--output-dir", run_dir)
    assert process.returncode == 0, process.stderr
    return run_dir, process


@pytest.fixture(scope="module")
def one_step(tmp_path_factory):
    """Folder of one step of one process; what variants are compared with."""
    run_dir = tmp_path_factory.mktemp("runs") / "one"
    train_here(run_dir, eval_steps=0)
    return run_dir


# --- The command and what it leaves ----------------------------------------------------------------------------------


def test_command_and_its_files(whole):
    run_dir, process = whole
    assert not re.search("warning|traceback|error", process.stderr, re.IGNORECASE), process.stderr
    progress = [line for line in process.stdout.splitlines() if line.startswith("step")]
    assert len(progress) == 4 and max(map(len, progress)) <= 80
    for game in LONG["games"]:  # a game of each kind is shown first and last
        assert process.stdout.count(f"\n{game}:\nPlayer 0, policy: ") == 2
    metrics, perf = table(run_dir), table(run_dir, "perf.csv")
    assert {step for step, tag in metrics if tag.startswith("eval/")} == {0, 4}
    names = [f"train/spiral_rae/{game}/baseline_{role}" for game in LONG["games"] for role in (0, 1)]
    for tag in ("train/reward", "train/grad_norm", "train/spiral_rae/advantage_std", *names):
        assert [step for step, name in metrics if name == tag] == [*range(1, 5)]
    assert all(math.isfinite(value) for value in metrics.values())
    assert not [tag for _, tag in metrics if tag.startswith("perf/")], "times differ from run to run"
    board = events(run_dir)
    logged = {(event.step, tag): event.value for tag in board.Tags()["scalars"] for event in board.Scalars(tag)}
    assert_close(logged, metrics | perf, relative=1e-6)
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == ["step_00000002.pt", "step_00000004.pt"]
    before = load_file(Path(spiral_rae.TINY_MODELS, "text_games", "model.safetensors"))
    after = load_file(run_dir / "final" / "model.safetensors")
    assert max((before[name] - after[name]).abs().max() for name in after) > 1e-4


def test_averages_are_those_of_the_returns(whole):
    """The logged averages follow from the logged returns: two games of each kind a step, both roles learn."""
    metrics = table(whole[0])
    for game in LONG["games"]:
        for role in (0, 1):
            before = 0.0
            for step in range(1, 5):
                mean = metrics[step, f"train/spiral_rae/{game}/return_{role}"]
                after = metrics[step, f"train/spiral_rae/{game}/baseline_{role}"]
                expected = 0.95**2 * before + (1 - 0.95**2) * mean  # either of two returns may have come first:
                assert after == pytest.approx(expected, abs=0.05**2 * 2)  # they are at most 4 apart
                before = after
    assert any(value != 0 for (_, tag), value in metrics.items() if "baseline" in tag)


def test_kuhn_average_is_the_mean_of_the_readouts(whole):
    progress = state(whole[0])["progress"]
    assert progress["readouts"] == 2 and progress["step"] == 4
    bets = [bet / 2 for bet in progress["bets"]]
    assert table(whole[0])[4, "eval/kuhn/nash_conv_average"] == pytest.approx(kuhn_nash_conv(bets), abs=1e-6)
    assert table(whole[0])[0, "eval/kuhn/nash_conv_average"] == table(whole[0])[0, "eval/kuhn/nash_conv_last"]


def test_final_policy_scores_the_same(whole, tmp_path):
    """--max-steps 0 scores a policy: what was logged last, but for the opponent that is the first policy."""
    values = {"model_name_or_path": str(whole[0] / "final"), "max_steps": 0}
    values |= {"eval_opponents": ("random", "minimax"), "games": LONG["games"]}
    metrics = train_here(tmp_path / "run", **values)
    expected = {tag: value for (step, tag), value in table(whole[0]).items() if step == 4 and tag.startswith("eval")}
    assert {step for step, _ in metrics} == {0} and len(metrics) == 3 * 6 + 4
    for (_, tag), value in metrics.items():
        assert "average" in tag or value == expected[tag], tag
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()


def test_tags_are_those_of_the_page(tmp_path):
    metrics = train_here(tmp_path / "run", beta=0.04)
    texts = [tag.removesuffix("/text_summary") for tag in events(tmp_path / "run").Tags()["tensors"]]
    logged = {tag for _, tag in [*metrics, *table(tmp_path / "run", "perf.csv")]} | set(texts)
    documented = documented_tags(PAGE.read_text())
    assert {tag for tag in logged if not any(tag_matches(row, tag) for row in documented)} == set()
    assert {row for row in documented if not any(tag_matches(row, tag) for tag in logged)} == set()


# --- Determinism and resuming ----------------------------------------------------------------------------------------


def test_same_seed_same_run_other_seed_another(whole, tmp_path):
    again = train_here(tmp_path / "again", **LONG | {"max_steps": 1})  # here, not in a process of its own
    expected = table(whole[0])
    same = {key for key in expected if key[0] == 0 or key[0] == 1 and key[1].startswith("train/")}
    assert {key: again[key] for key in same} == {key: expected[key] for key in same} and len(same) > 40
    other = train_here(tmp_path / "other", **LONG | {"max_steps": 1, "eval_steps": 0}, seed=2)
    assert other[1, "train/num_tokens"] != table(whole[0])[1, "train/num_tokens"]


def test_kill_9_and_resume(whole, tmp_path):
    """The averages of the roles and of Kuhn's policies continue: the tags of both are in the metrics."""
    run_dir = tmp_path / "run"
    assert begin_and_interrupt(signal.SIGKILL, "step    3/", SCRIPT, run_dir, **LONG)[0] == -signal.SIGKILL
    saved = state(run_dir)
    assert saved["progress"]["readouts"] >= 1 and len(saved["baseline"]["values"]) == 4
    spiral_rae.train(Args(resume=str(run_dir), device="cpu"))
    assert_same_run(run_dir, whole[0])
    assert state(run_dir)["baseline"] == state(whole[0])["baseline"]


def test_resume_with_a_past_opponent(tmp_path, capsys):
    """The opponent of step 5 is the policy of step 3: neither the newest nor the first."""
    values = SMALL | {
        "max_steps": 6,
        "save_steps": 2,
        "opponent": "past",
        "opponent_lag": 3,
        "eval_steps": 0,
        "games": ("kuhn",),
    }
    train_here(tmp_path / "run", **values)
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    (tmp_path / "again" / "checkpoints" / "step_00000006.pt").unlink()
    saved, first = state(tmp_path / "again"), load_file(Path(spiral_rae.TINY_MODELS, "text_games", "model.safetensors"))
    later = state(tmp_path / "run")["past"]
    assert all(torch.equal(weight, later[name]) for name, weight in saved["past"].items()), "of step 3, in step 6 too"
    for other in (saved["policy"]["model_state_dict"], first):
        assert max((saved["past"][name] - weight).abs().max() for name, weight in other.items()) > 1e-5
    sentence = refusal(capsys, **values | {"baseline": "none"}, resume=str(tmp_path / "again"))
    assert "the run began with --baseline role, not none" in sentence
    spiral_rae.train(Args(resume=str(tmp_path / "again"), device="cpu"))  # from step 4
    assert_same_run(tmp_path / "again", tmp_path / "run")


# --- Several processes -----------------------------------------------------------------------------------------------

BOTH = {"num_prompts_per_step": 6, "games": ("tictactoe", "kuhn"), "eval_thoughts": 1}
VARIANTS = {  # trained by two processes, and by one
    "plain": BOTH | {"max_steps": 2, "eval_steps": 0},
    "random": BOTH | {"opponent": "random", "num_prompts_per_step": 2, "eval_steps": 0, "games": ("kuhn",)},
    "mars": BOTH | {"baseline": "mars", "eval_steps": 0, "games": ("kuhn",)},
    "fsdp": BOTH | {"fsdp": True, "eval_opponents": ("random",), "games": ("kuhn",)},
}


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Folder with the runs of VARIANTS by two processes."""
    folder = tmp_path_factory.mktemp("two")
    runs = [{**SMALL, "max_steps": 1, "output_dir": str(folder / name), **VARIANTS[name]} for name in VARIANTS]
    train_by_two(folder, "spiral_rae", runs)
    return folder


@pytest.mark.parametrize("name", VARIANTS)
def test_two_processes_equal_one(two_processes, name, tmp_path):
    """The averages are equal to the bit: every process moves them by all games in the same order."""
    assert (two_processes / name / "final").exists(), (two_processes / "stderr").read_text()
    expected, found = train_here(tmp_path / "one", **VARIANTS[name] | {"fsdp": False}), table(two_processes / name)
    assert_close(found, expected, relative=1e-3 if "fsdp" in name else 1e-4)
    exact = ("baseline", "reward", "num_tokens", "return", "turns", "forfeits", "draws", "max_length")
    for (step, tag), value in expected.items():
        if step == 1 and any(word in tag for word in exact):
            assert found[step, tag] == pytest.approx(value, abs=1e-6 if "baseline" not in tag else 0), tag
    assert_nearly_same_weights(two_processes / name, tmp_path / "one")
    if name != "mars":
        assert state(two_processes / name)["baseline"] == state(tmp_path / "one")["baseline"] != {"values": {}}


# --- Switches --------------------------------------------------------------------------------------------------------


def first_step(monkeypatch, run_dir, **values) -> tuple[list[float], dict]:
    """Advantages of the turns of the first step, and its metrics."""
    found = []

    def spy(model, optimizer, batch, advantages, args, reference=None):
        found.extend(advantages.tolist())
        return {"grad_norm": 0.0}

    with monkeypatch.context() as patch:
        patch.setattr(spiral_rae, "update", spy)
        return found, train_here(run_dir, **values, eval_steps=0)


METHODS = [
    {},
    {"baseline": "global"},
    {"baseline": "none"},
    {"baseline": "mars"},
    {"baseline_decay": 0.5},
    {"update_first": True},
    {"gamma": 0.5},
    {"handicap": 3.0},
    {"zero_sum_forfeits": True},
]


def test_each_method_has_advantages_of_its_own(monkeypatch, tmp_path):
    """The games are the same."""
    found, counts = [], []
    for i, values in enumerate(METHODS):
        advantages, metrics = first_step(monkeypatch, tmp_path / str(i), **values)
        found.append(advantages)
        counts.append(metrics[1, "train/num_tokens"])
    assert len({len(row) for row in found}) == 1 == len(set(counts)), "the same games"
    assert len({json.dumps(row) for row in found}) == len(METHODS)


HANDS = {"games": ("kuhn",), "num_prompts_per_step": 2}  # the shortest game, once from either seat
SWITCHES = [
    HANDS | {"opponent": "random"},
    HANDS | {"opponent": "fixed", "num_generations": 1},
    HANDS | {"opponent": "past", "opponent_lag": 1, "max_steps": 2},
    HANDS | {"kuhn_variant": "spiral", "eval_steps": 9},
    HANDS | {"kuhn_variant": "textarena", "baseline": "global"},
    HANDS | {"eval_thoughts": 0, "eval_steps": 9, "eval_opponents": ("minimax",)},
    {"max_completion_length": 2},  # too short for a move
    HANDS | {"beta": 0.04, "loss_type": "dapo", "epsilon_high": 0.28, "num_iterations": 1},
    HANDS | {"gradient_checkpointing": True, "bf16": True, "baseline": "mars", "loss_type": "grpo"},
]


@pytest.mark.parametrize("values", SWITCHES, ids=lambda values: " ".join(as_flags(values)))
def test_switches_log_finite_metrics(values, tmp_path, recwarn):
    metrics = train_here(tmp_path / "run", **{"eval_steps": 0} | values)
    assert all(math.isfinite(value) for value in metrics.values()), metrics
    assert not [str(warning.message) for warning in recwarn if issubclass(warning.category, UserWarning)]
    evaluated = {tag for _, tag in metrics if tag.startswith("eval/")}
    if "max_completion_length" in values:
        assert last(metrics, "train/spiral_rae/tictactoe/forfeits") == 1
        assert last(metrics, "train/spiral_rae/tictactoe/turns") == 1
        assert last(metrics, "train/completions/clipped_ratio") > 0.5
    else:
        assert last(metrics, "train/grad_norm") > 0
    if values.get("kuhn_variant") == "spiral":
        assert not [tag for tag in evaluated if "nash_conv" in tag], "the solver knows the game of one hand only"
        assert "eval/kuhn/random/first/win" in evaluated
    if "eval_thoughts" in values:
        assert evaluated == {f"eval/kuhn/{x}" for x in ("nash_conv_last", "nash_conv_average", "illegal", "thoughts")}
        # 0.89 before and 0.90 after the step: the model never saw an action without a thought
        assert last(metrics, "eval/kuhn/thoughts") == 0 and last(metrics, "eval/kuhn/illegal") < 0.97
    baselines = {tag.rpartition("_")[2] for _, tag in metrics if "/baseline_" in tag}
    assert baselines == ({"global": {"-1"}, "mars": set()}.get(values.get("baseline"), {"0", "1"}))


NEUTRAL = [{"per_device_train_batch_size": 1}, {"max_packed_length": 64}, {"skip_equal_groups": False}]


@pytest.mark.parametrize("values", NEUTRAL, ids=lambda values: " ".join(as_flags(values)))
def test_switches_that_change_nothing(values, one_step, tmp_path):
    metrics = [train_here(tmp_path / "run", **values, eval_steps=0), table(one_step)]
    if "skip_equal_groups" in values:  # which this tag is about
        metrics = [{key: x for key, x in found.items() if "frac_tokens" not in key[1]} for found in metrics]
    assert_close(*metrics, 1e-4, 1e-5)
    assert_nearly_same_weights(tmp_path / "run", one_step)


# --- Bad input -------------------------------------------------------------------------------------------------------

BAD_FLAGS = [  # flags, parts of the sentence
    ({"games": ()}, ["--games ()", "a name"]),
    ({"baseline_decay": 1.0}, ["--baseline-decay 1.0", "below 1"]),
    ({"baseline_decay": -0.1}, ["--baseline-decay -0.1", "0 or more"]),
    ({"handicap": math.nan}, ["--handicap nan"]),
    ({"num_generations": 0}, ["--num-generations 0", "1 or more"]),
    ({"num_prompts_per_step": 0}, ["--num-prompts-per-step 0", "1 or more"]),
    ({"opponent_lag": 0}, ["--opponent-lag 0", "1 or more"]),
    ({"eval_games": 0}, ["--eval-games 0", "1 or more"]),
    ({"eval_thoughts": -1}, ["--eval-thoughts -1", "0 or more"]),
    ({"temperature": 0.0}, ["--temperature 0.0"]),
    ({"gamma": -1.0}, ["--gamma -1.0", "0 or more"]),
    ({"num_generations": 3, "per_device_train_batch_size": 4}, ["--per-device-train-batch-size 4", "divisor"]),
    ({"fsdp": True}, ["--fsdp", "torchrun"]),
    ({"model_name_or_path": "no/such/folder"}, ["no/such/folder", "not found"]),
]


@pytest.mark.parametrize("values, words", BAD_FLAGS, ids=lambda value: " ".join(value))
def test_bad_flags_get_one_sentence(values, words, capsys, tmp_path):
    errors = refusal(capsys, output_dir=str(tmp_path / "run"), **values)
    assert all(word in errors for word in words), errors
    assert not (tmp_path / "run").exists(), "nothing is left of a run that never began"


def test_flags_that_do_not_go_with_several_processes(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--num-prompts-per-step 3: not divisible by the 2 processes" in refusal(capsys)
    errors = refusal(capsys, num_prompts_per_step=2, fsdp=True, opponent="past")
    assert "--fsdp" in errors and "--opponent past" in errors


def test_unknown_words_and_folders(capsys, tmp_path, whole):
    with pytest.raises(SystemExit) as stopped:
        tyro.cli(Args, args=["--opponent", "gemini"])
    assert stopped.value.code == 2 and "gemini" in capsys.readouterr().err
    (tmp_path / "args.json").write_text(json.dumps({"model_name_or_path": None, "top_p": 1.0}))
    assert f"{tmp_path}: not a run folder of this script" in refusal(capsys, resume=str(tmp_path))
    assert "holds a run already" in refusal(capsys, output_dir=str(whole[0]))


# --- Learning --------------------------------------------------------------------------------------------------------


def test_learning(tmp_path):
    """A short run on tic-tac-toe: wins against random rise in both seats together."""
    values = {"games": ("tictactoe",), "num_prompts_per_step": 4, "num_generations": 8, "learning_rate": 8e-4}
    values |= {"max_completion_length": 40, "max_steps": 3, "eval_steps": 3, "eval_games": 32}
    metrics = train_here(tmp_path / "run", **values, eval_opponents=("random",))
    wins = [[metrics[step, f"eval/tictactoe/random/{seat}/win"] for seat in ("first", "second")] for step in (0, 3)]
    # Seeds 1 to 3: +0.125, 0.156, 0.234 from 0.297, each seat 0.094 or more; negated: -0.188, -0.297, -0.172.
    assert all(after > before for before, after in zip(*wins)) and (sum(wins[1]) - sum(wins[0])) / 2 > 0.08
