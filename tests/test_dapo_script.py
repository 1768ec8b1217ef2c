"""DAPO as people run it: dynamic sampling, its resume and its processes, and the overlong penalty."""

import math
from functools import partial

import pytest
from language_runs import completions, kill_and_resume, numbers, train, two_processes_equal_one
from run_folders import assert_tags_of_pages, tags

from algorithms import dapo

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SMALL = {"num_prompts_per_step": 4, "num_generations": 4, "max_completion_length": 24}
SMALL |= {"eval_problems": 4, "num_generations_eval": 2, "eval_steps": 0, "save_steps": 0}
LONG = SMALL | {"max_steps": 3, "save_steps": 2, "eval_steps": 3, "beta": 0.04}
train_here = partial(train, dapo, **SMALL)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder of three uninterrupted steps."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    train(dapo, run_dir, **LONG)
    return run_dir


def test_dynamic_sampling_trains_on_groups_with_right_and_wrong_answers(whole):
    assert_tags_of_pages(tags(whole), "dapo", "grpo")
    found = numbers(whole)
    assert all(map(math.isfinite, found.values()))
    assert max(found[step, "train/dynamic_sampling/rounds"] for step in (1, 2, 3)) > 1
    rows = completions(whole)
    for group in (rows[i : i + 4] for i in range(0, len(rows), 4)):
        assert {row["rewards"]["correctness"] for row in group} == {0.0, 1.0}


def test_a_resume_draws_the_prompts_that_come_next(whole, tmp_path):
    kill_and_resume(dapo, whole, tmp_path, 3, **LONG)


def test_two_processes_equal_one(tmp_path):
    two_processes_equal_one(dapo, tmp_path, **SMALL, max_steps=2, micro_batch_size=3)


@pytest.mark.quick
def test_overlong_penalty_lowers_the_reward(tmp_path):
    found = train_here(tmp_path / "with", dynamic_sampling=False)
    without = train_here(tmp_path / "without", dynamic_sampling=False, overlong_buffer_len=0)
    assert -1 < found[1, "train/reward"] - without[1, "train/reward"] < 0
    assert found[1, "train/num_tokens"] == without[1, "train/num_tokens"]
    assert found[1, "train/dynamic_sampling/rounds"] == 1
    assert found[1, "train/dynamic_sampling/frac_useful"] < 1


def test_groups_that_only_fill_the_batch_add_no_gradient(tmp_path):
    """No answer is right, so no group is useful; the length penalty alone still tells them apart."""
    (tmp_path / "wrong.py").write_text("def score(problem, completion):\n    return 0.0\n")
    values = {"reward": (f"{tmp_path}/wrong.py:score",), "overlong_buffer_len": 23, "num_prompts_per_step": 2}
    filled = train_here(tmp_path / "filled", **values)
    assert filled[1, "train/dynamic_sampling/rounds"] == 10
    assert filled[1, "train/grad_norm"] == 0
    plain = train_here(tmp_path / "plain", **values, dynamic_sampling=False)
    assert plain[1, "train/grad_norm"] > 0
