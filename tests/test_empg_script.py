"""EMPG as people run it: what its update gets, its controls, resume and processes."""

import json
import math
from functools import partial

import language_runs
import pytest
import torch
from language_runs import completions, kill_and_resume, numbers, train, two_processes_equal_one
from run_folders import assert_tags_of_pages, tags

from algorithms import empg
from algorithms.empg import group_advantages, modulate_advantages

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SMALL = language_runs.SMALL
LONG = SMALL | {"max_steps": 2, "save_steps": 1, "eval_steps": 2, "beta": 0.04}
train_here = partial(train, empg, **SMALL)
whole = language_runs.whole_run(empg, LONG)


@pytest.mark.quick
def test_what_the_update_gets_is_what_completions_show(whole):
    run_dir, given = whole
    found, rows = numbers(run_dir), completions(run_dir)
    assert all(map(math.isfinite, found.values()))
    assert_tags_of_pages(tags(run_dir), "empg", "grpo")
    assert len(rows) == 2 * 8, "both groups of both steps"
    for step in (1, 2):
        batch = [row for row in rows if row["step"] == step]
        entropy = torch.tensor([value for row in batch for value in row["entropies"]])
        outcomes = torch.tensor([row["rewards"]["outcome"] for row in batch])
        trajectory = torch.tensor([i for i, row in enumerate(batch) for _ in row["entropies"]])
        expected = modulate_advantages(group_advantages(outcomes, 4), entropy, trajectory)
        shown = torch.tensor([value for row in batch for value in row["advantages"]])
        torch.testing.assert_close(shown, expected)
        for row, own in zip(batch, given[step - 1][4]):
            assert len(row["turns"]) == 2 * len(row["entropies"]) - 1
            assert own[: len(row["advantages"])].tolist() == pytest.approx(row["advantages"])
        assert found[step, "train/empg/turns"] == pytest.approx(len(entropy) / 8)
        assert found[step, "train/empg/entropy/mean"] == pytest.approx(entropy.mean().item(), rel=1e-4)
        assert found[step, "train/empg/entropy/max"] == pytest.approx(entropy.max().item())
        assert found[step, "train/empg/entropy/min"] == pytest.approx(entropy.min().item())


def test_a_killed_run_continues(whole, tmp_path):
    kill_and_resume(empg, whole[0], tmp_path, 2, **LONG)


def test_two_processes_equal_one(tmp_path):
    """Minimum, maximum and means go over the turns of both."""
    two_processes_equal_one(empg, tmp_path, **SMALL, max_steps=2, hops=(1, 3))


def test_controls_see_the_same_episodes_and_have_advantages_of_their_own(tmp_path):
    flags = [{}, {"advantage": "grpo"}, {"zeta": 0.0}, {"k": 0.0}, {"k_future": 2.0}]
    runs = []
    for number, values in enumerate(flags):
        train_here(tmp_path / str(number), **values, num_generations=8, hops=(1, 2, 3), temperature=1.3)
        runs.append(completions(tmp_path / str(number)))
    assert len({json.dumps([row["turns"] for row in rows]) for rows in runs}) == 1
    assert len({json.dumps([row["advantages"] for row in rows]) for rows in runs}) == 5
    assert all(len(set(row["advantages"])) == 1 for row in runs[1]), "GRPO: one advantage for a whole episode"
