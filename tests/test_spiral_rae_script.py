"""SPIRAL as people run it: files, resume, two processes, games of one's own, bad input, learning."""

import json
import math
from pathlib import Path

import pytest
from processes import ROOT, as_flags, fork, kill_at, train_by_two
from run_folders import assert_close, assert_same_weights, documented_tags, metrics, tag_matches

from algorithms import spiral_rae
from algorithms.spiral_rae import Args

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SCRIPT = ROOT / "algorithms" / "spiral_rae.py"
SMALL = {"games": ("kuhn",), "num_games_per_step": 6, "max_completion_length": 32}
SMALL |= {"eval_steps": 0, "eval_games": 1, "eval_samples": 2, "save_steps": 0}
LONG = SMALL | {"games": ("tictactoe", "kuhn"), "num_games_per_step": 4}
LONG |= {"max_steps": 4, "save_steps": 2, "eval_steps": 2}
NIM = f"{ROOT}/envs/examples/nim.py:Nim"


def numbers(run_dir) -> dict[tuple[int, str], float]:
    return {key: float(value) for key, value in metrics(run_dir).items()}


def train_here(run_dir, **values) -> dict[tuple[int, str], float]:
    """One small step in this process, or more; its metrics."""
    spiral_rae.train(Args(**SMALL | {"max_steps": 1} | values, output_dir=str(run_dir)))
    return numbers(run_dir)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder of four uninterrupted steps."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    process = fork(SCRIPT, *as_flags(LONG), "--output-dir", run_dir)
    assert process.returncode == 0, process.stderr
    assert max(map(len, process.stdout.splitlines()[-30:])) < 200
    return run_dir


def test_command_and_its_files(whole):
    found = numbers(whole)
    assert all(map(math.isfinite, found.values()))
    assert (whole / "final" / "model.safetensors").exists()
    rows = [json.loads(line) for line in open(whole / "completions.jsonl")]
    assert [row["game"] for row in rows[:4]] == ["tictactoe", "kuhn"] * 2
    # The first games of a run are compared with averages of 0: advantages are the results.
    assert rows[0]["advantages"] == rows[0]["rewards"]
    assert rows[1]["advantages"] == rows[1]["rewards"]


def test_averages_are_those_of_the_returns(whole):
    """Two games of each kind a step: either of two returns may have come first."""
    found = numbers(whole)
    for game in LONG["games"]:
        for role in (0, 1):
            average = 0.0
            for step in range(1, 5):
                returns = found[step, f"train/spiral_rae/{game}/return_{role}"]
                expected = 0.95**2 * average + (1 - 0.95**2) * returns
                average = found[step, f"train/spiral_rae/{game}/baseline_{role}"]
                assert average == pytest.approx(expected, abs=0.05**2 * 2)
    assert any(value for (_, tag), value in found.items() if "baseline" in tag)


def test_a_resume_continues_averages_and_read_outs(whole, tmp_path):
    run_dir = tmp_path / "run"
    kill_at(tmp_path, "spiral_rae", "report", 3, *as_flags(LONG), "--output-dir", run_dir)
    process = fork(SCRIPT, "--resume", run_dir)
    assert process.returncode == 0, process.stderr
    assert metrics(run_dir) == metrics(whole)
    name = "final/model.safetensors"
    assert Path(run_dir, name).read_bytes() == Path(whole, name).read_bytes()


def test_two_processes_equal_one(tmp_path):
    """They play different numbers of turns, so one of them idles under FSDP."""
    shared = SMALL | {"num_games_per_step": 4, "max_steps": 2, "micro_batch_size": 1, "beta": 1.0}
    shared |= {"eval_steps": 2, "eval_opponents": ("start",)}
    runs = [shared | {"output_dir": str(tmp_path / "plain")}]
    runs += [shared | {"output_dir": str(tmp_path / "fsdp"), "fsdp": True}]
    train_by_two(tmp_path, "spiral_rae", runs)
    expected = train_here(tmp_path / "one", **shared)
    for name in ("plain", "fsdp"):
        assert (tmp_path / name / "final").exists(), (tmp_path / "stderr").read_text()
        found = numbers(tmp_path / name)
        assert_close(found, expected, relative=1e-3)
        for key, value in expected.items():
            if "baseline" in key[1]:
                assert found[key] == value
        assert_same_weights(tmp_path / name, tmp_path / "one")


def test_a_game_of_ones_own_against_an_opponent(tmp_path):
    values = {"games": (NIM,), "game_options": json.dumps({NIM: {"pile": 5}})}
    found = train_here(
        tmp_path, **values, opponent="start", eval_steps=1, eval_opponents=("random",)
    )
    assert found[1, f"train/spiral_rae/{NIM}/turns"] >= 1
    assert f"eval/{NIM}/random/second/win" in {tag for _, tag in found}
    rows = [json.loads(line) for line in open(tmp_path / "completions.jsonl")]
    assert "There are 5 stones." in rows[0]["first_prompt"]
    assert rows[0]["advantages"][1] == 0 and rows[1]["advantages"][0] == 0


def test_tags_are_those_of_the_page(tmp_path):
    values = {"games": ("tictactoe", "kuhn"), "beta": 0.04, "eval_steps": 1, "bf16": True}
    logged = {line.split(",")[1] for line in logged_lines(tmp_path, **values)}
    documented = documented_tags((ROOT / "algorithms" / "spiral_rae.md").read_text())
    assert [tag for tag in logged if not any(tag_matches(row, tag) for row in documented)] == []
    assert [row for row in documented if not any(tag_matches(row, tag) for tag in logged)] == []


def logged_lines(run_dir, **values) -> list[str]:
    train_here(run_dir, **values)
    return (run_dir / "metrics.csv").read_text().splitlines()[1:]


BAD = [
    ({"games": ("chess",)}, "--games: there is no text game chess"),
    ({"games": ("no.py:Chess",)}, "--games: text game no.py:Chess: there is no file"),
    ({"game_options": '{"kuhn": {"rounds": 3}}'}, "--games: kuhn has no option rounds"),
    ({"game_options": "rounds=3"}, "--game-options: expected JSON"),
    ({"max_prompt_length": 10}, "--max-prompt-length: kuhn begins with"),
]


@pytest.mark.parametrize("values, sentence", BAD, ids=lambda value: " ".join(value))
def test_bad_input_gets_one_sentence(values, sentence, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        train_here(tmp_path / "run", **values)
    assert str(stopped.value).startswith(sentence) and not (tmp_path / "run").exists()


def test_learning(tmp_path):
    """A short run on tic-tac-toe: wins against random rise in both roles."""
    values = {"games": ("tictactoe",), "num_games_per_step": 32, "learning_rate": 8e-4}
    values |= {"max_completion_length": 40, "max_steps": 3, "eval_steps": 3, "eval_games": 32}
    found = train_here(tmp_path, **values, eval_opponents=("random",))
    for seat in ("first", "second"):
        before, after = (found[step, f"eval/tictactoe/random/{seat}/win"] for step in (0, 3))
        assert after > before
