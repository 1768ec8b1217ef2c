"""GDPO as people run it: two rewards of their own, one of them conditioned, its resume and its processes."""

import math
from functools import partial

import pytest
import torch
from language_runs import completions, kill_and_resume, numbers, train, two_processes_equal_one
from processes import as_flags
from run_folders import assert_tags_of_pages, command, tags

from algorithms import gdpo
from algorithms.gdpo import condition_rewards, decoupled_advantages

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SMALL = {"num_prompts_per_step": 2, "num_generations": 4, "max_completion_length": 48}
SMALL |= {"eval_problems": 4, "num_generations_eval": 2, "eval_steps": 0, "save_steps": 0}
train_here = partial(train, gdpo, **SMALL)
REWARDS = """\
def calls(problem, completion):
    return float("<tool_call>" in completion and len(completion) % 2 == 0)

def brevity(problem, completion):
    return -len(completion) / 50
"""


@pytest.mark.quick
def test_command_and_its_files(tmp_path, monkeypatch):
    """Two own rewards of different size, the second only where the first is 1: what the update gets is GDPO's."""
    (tmp_path / "own.py").write_text(REWARDS)
    given, update = [], gdpo.update
    monkeypatch.setattr(gdpo, "update", lambda *words: given.append(words[4]) or update(*words))
    words = [*as_flags(SMALL | {"max_steps": 2, "eval_steps": 2}), "--output-dir", tmp_path / "run"]
    words += ["--reward", tmp_path / "own.py:calls", tmp_path / "own.py:brevity"]
    words += ["--reward-weights", 1, 0.5, "--conditioned-rewards", "brevity"]
    command(gdpo, monkeypatch, *words)
    found = numbers(tmp_path / "run")
    rows = completions(tmp_path / "run")
    assert len(rows) == 2 * 8, "both groups of both steps"
    for step in (1, 2):
        rewards = torch.tensor([list(row["rewards"].values()) for row in rows if row["step"] == step])
        counted = condition_rewards(rewards, torch.tensor([False, True]))
        expected = decoupled_advantages(counted, 4, [1.0, 0.5])
        torch.testing.assert_close(given[step - 1], expected)
        assert expected.abs().max() > 0.5 and (counted != rewards).any()
        for name, mean in zip(("calls", "brevity"), counted.mean(0).tolist()):
            assert found[step, f"train/rewards/{name}/mean"] == pytest.approx(mean, abs=1e-6)
        assert found[step, "train/reward"] == pytest.approx(float((counted @ torch.tensor([1, 0.5])).mean()), abs=1e-6)
        assert found[step, "train/frac_reward_zero_std"] == float((expected.view(2, 4) == 0).all(1).float().mean())
    assert found[2, "eval/rewards/calls"] == found[2, "eval/greedy"] and found[2, "eval/rewards/brevity"] < 0
    assert all(map(math.isfinite, found.values()))


def test_a_killed_run_continues(tmp_path):
    values = SMALL | {"max_steps": 2, "save_steps": 1, "eval_steps": 2, "conditioned_rewards": ("length",)}
    train(gdpo, tmp_path / "whole", **values)
    kill_and_resume(gdpo, tmp_path / "whole", tmp_path, 2, **values)


def test_two_processes_equal_one(tmp_path):
    """The batch norm is over the answers of both."""
    two_processes_equal_one(gdpo, tmp_path, **SMALL, max_steps=2)


def test_tags_are_those_of_the_page(tmp_path):
    train_here(tmp_path, beta=0.04, eval_steps=1, num_generations_eval=8)
    assert_tags_of_pages(tags(tmp_path), "gdpo", "grpo")
