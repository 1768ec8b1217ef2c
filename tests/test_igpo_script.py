"""IGPO as people run it: its resume and its processes, controls, a search server and rewards of their own."""

import json
import math
from functools import partial

import language_runs
import pytest
import torch
from language_runs import completions, kill_and_resume, numbers, train, two_processes_equal_one
from run_folders import assert_tags_of_pages, tags

from algorithms import igpo
from algorithms.igpo import turn_advantages

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SMALL, CALCULATOR = language_runs.SMALL, language_runs.CALCULATOR
LONG = SMALL | {"max_steps": 2, "save_steps": 1, "eval_steps": 2, "beta": 0.04}
train_here = partial(train, igpo, **SMALL)
whole = language_runs.whole_run(igpo, LONG)


@pytest.mark.quick
def test_what_the_update_gets_is_what_completions_show(whole):
    """IGPO's advantages of the episodes."""
    run_dir, given = whole
    found, rows = numbers(run_dir), completions(run_dir)
    assert all(map(math.isfinite, found.values()))
    assert_tags_of_pages(tags(run_dir), "igpo", "grpo")
    assert len(rows) == 2 * 8, "both groups of both steps"
    for step in (1, 2):
        batch = [row for row in rows if row["step"] == step]
        gains = [torch.tensor(row["gains"]) for row in batch]
        outcomes = torch.tensor([row["rewards"]["outcome"] for row in batch])
        expected = turn_advantages(gains, outcomes, torch.arange(8) // 4)
        for row, advantages, own in zip(batch, expected, given[step - 1][4]):
            assert len(row["turns"]) == 2 * len(advantages) - 1
            torch.testing.assert_close(own[: len(advantages)], advantages)
            torch.testing.assert_close(torch.tensor(row["advantages"]), advantages)
        assert found[step, "train/reward"] == pytest.approx(outcomes.mean().item(), abs=1e-6)
        assert found[step, "train/igpo/gain"] == pytest.approx(torch.cat(gains).sum().item() / 8, abs=1e-5)
        assert found[step, "train/igpo/turns"] == pytest.approx(1 + sum(map(len, gains)) / 8)


def test_a_killed_run_continues(whole, tmp_path):
    kill_and_resume(igpo, whole[0], tmp_path, 2, **LONG)


def test_two_processes_equal_one(tmp_path):
    """They play episodes of other lengths, and different numbers of turns."""
    two_processes_equal_one(igpo, tmp_path, **SMALL, max_steps=2, hops=(1, 3))


def test_controls_see_the_same_episodes_and_have_advantages_of_their_own(tmp_path):
    flags = [{}, {"advantage": "f1"}, {"advantage": "ig"}, {"information_gain": "prob"}, {"normalization": "joint"}]
    flags += [{"gamma": 0.5}, {"format_penalty": 0.0}]
    runs = []
    for number, values in enumerate(flags):
        train_here(tmp_path / str(number), **values, num_generations=8, hops=(1, 2, 3), temperature=1.3)
        runs.append(completions(tmp_path / str(number)))
    assert len({json.dumps([row["turns"] for row in rows]) for rows in runs}) == 1
    assert len({json.dumps([row["advantages"] for row in rows]) for rows in runs[:6]}) == 6
    assert [min(row["rewards"]["outcome"] for row in runs[number]) for number in (0, 6)] == [-2, 0]
    assert all(len(set(row["advantages"])) == 1 for row in runs[1]), "GRPO: one advantage for a whole episode"


def test_own_questions_search_server_and_reward(tmp_path, monkeypatch):
    """Of the evaluation file all lines are scored, and the reward sees the whole episode."""
    files = language_runs.question_files(tmp_path, monkeypatch)
    (tmp_path / "own.py").write_text("def searches(problem, text):\n    return text.count('<result>')\n")
    reward = {"reward": (str(tmp_path / "own.py:searches"),)}
    found = train_here(tmp_path / "run", **files, **reward, eval_steps=1)
    assert found[1, "train/reward"] == found[1, "train/igpo/turns"] - 1
    assert found[1, "eval/greedy"] == pytest.approx(found[1, "eval/turns"] - 1)
    assert 5 * found[1, "eval/turns"] == pytest.approx(round(5 * found[1, "eval/turns"])), "a mean of five"
