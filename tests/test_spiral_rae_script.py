"""SPIRAL as people run it: files, resume, two processes, games of one's own, bad input, learning."""

import json
import math
from functools import partial

import language_runs
import pytest
from language_runs import completions, kill_and_resume, numbers, train, two_processes_equal_one
from processes import ROOT
from run_folders import assert_tags_of_pages, tags

from algorithms import spiral_rae

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SMALL = {"games": ("kuhn",), "num_games_per_step": 6, "max_completion_length": 32}
SMALL |= {"eval_steps": 0, "eval_games": 1, "eval_samples": 2, "save_steps": 0}
LONG = SMALL | {"games": ("tictactoe", "kuhn"), "num_games_per_step": 4, "beta": 0.04}
LONG |= {"max_steps": 2, "save_steps": 1, "eval_steps": 2}
NIM = f"{ROOT}/envs/examples/nim.py:Nim"
train_here = partial(train, spiral_rae, **SMALL)
whole = language_runs.whole_run(spiral_rae, LONG)


def test_every_turn_is_updated_with_the_advantage_of_its_role(whole):
    run_dir, given = whole
    assert all(map(math.isfinite, numbers(run_dir).values()))
    assert_tags_of_pages(tags(run_dir), "spiral_rae")
    rows = completions(run_dir)
    assert [row["game"] for row in rows] == ["tictactoe", "kuhn"] * 4
    for step in range(2):
        turns = [(row, text) for row in rows[4 * step : 4 * step + 4] for text in row["turns"]]
        _, _, _, written, advantages, _ = given[step]
        assert [text.partition(": ")[2] for _, text in turns] == [completion.text for completion in written]
        expected = [row["advantages"][int(text[len("Player ")])] for row, text in turns]
        assert advantages.tolist() == pytest.approx(expected)
    # The first games of a run are compared with averages of 0: advantages are the results.
    assert rows[0]["advantages"] == rows[0]["rewards"]
    assert rows[1]["advantages"] == rows[1]["rewards"]


def test_averages_are_those_of_the_returns(whole):
    """Two games of each kind a step: either of two returns may have come first."""
    found = numbers(whole[0])
    for game in LONG["games"]:
        for role in (0, 1):
            average = 0.0
            for step in range(1, 3):
                returns = found[step, f"train/spiral_rae/{game}/return_{role}"]
                expected = 0.95**2 * average + (1 - 0.95**2) * returns
                average = found[step, f"train/spiral_rae/{game}/baseline_{role}"]
                assert average == pytest.approx(expected, abs=0.05**2 * 2)
    assert any(value for (_, tag), value in found.items() if "baseline" in tag)


def test_a_resume_continues_averages_and_read_outs(whole, tmp_path):
    kill_and_resume(spiral_rae, whole[0], tmp_path, 2, **LONG)


def test_two_processes_equal_one(tmp_path):
    """They play different numbers of turns, so one of them idles under FSDP; two parts of two games each."""
    shared = SMALL | {"num_minibatches": 2} | {"games": (NIM,), "num_games_per_step": 4, "max_steps": 1, "micro_batch_size": 2, "beta": 1.0}
    shared |= {"eval_steps": 1, "eval_opponents": ("start",)}
    two_processes_equal_one(spiral_rae, tmp_path, **shared)
    baselines = [
        {key: value for key, value in numbers(tmp_path / name).items() if "baseline" in key[1]}
        for name in ("plain", "fsdp", "one")
    ]
    assert baselines[0] == baselines[1] == baselines[2] != {}
    turns = [len(row["turns"]) for row in completions(tmp_path / "one")]
    assert sum(turns[:2]) != sum(turns[2:]), "other numbers of turns"


@pytest.mark.quick
def test_a_game_of_ones_own_against_an_opponent(tmp_path):
    values = {"games": (NIM,), "game_options": json.dumps({NIM: {"pile": 5}})}
    found = train_here(tmp_path, **values, opponent="start", eval_steps=1, eval_opponents=("random",))
    assert found[1, "train/spiral_rae/nim.py:Nim/turns"] >= 1
    assert "eval/nim.py:Nim/random/second/win" in {tag for _, tag in found}
    rows = completions(tmp_path)
    assert "There are 5 stones." in rows[0]["first_prompt"]
    assert rows[0]["advantages"][1] == 0 and rows[1]["advantages"][0] == 0


@pytest.mark.quick
def test_evaluation_without_read_outs_and_with_an_opponent_twice(tmp_path):
    found = train_here(tmp_path, max_steps=0, eval_steps=1, eval_samples=0, eval_opponents=("random", "random"))
    shares = {tag: value for (_, tag), value in found.items() if tag.startswith("eval/")}
    assert len(shares) == 6 and sum(shares.values()) == 2  # win, draw and loss as first and as second
    with pytest.raises(SystemExit, match="--num-games-per-step 0: expected"):
        train_here(tmp_path / "no_games", num_games_per_step=0)


@pytest.mark.quick
def test_a_step_with_one_turn(tmp_path):
    """Two tokens name no action, so the game ends with the policy's first turn."""
    values = {"opponent": "random", "num_games_per_step": 1, "max_completion_length": 2}
    found = train_here(tmp_path, **values)
    assert len(completions(tmp_path)[0]["turns"]) == 1
    assert found[1, "train/spiral_rae/advantage_std"] == 0


def test_learning(tmp_path):
    """Nim, which the tiny model has never seen: it learns not to forfeit."""
    values = {"games": (NIM,), "game_options": json.dumps({NIM: {"pile": 5}}), "num_games_per_step": 32}
    values |= {"max_completion_length": 16, "learning_rate": 1e-3, "max_steps": 4, "seed": 2}
    found = train_here(tmp_path, **values)
    forfeits = [found[step, "train/spiral_rae/nim.py:Nim/forfeits"] for step in range(1, 5)]
    assert forfeits[0] > 0.7 and min(forfeits) < 0.3, forfeits
