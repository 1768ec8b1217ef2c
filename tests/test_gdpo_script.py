"""GDPO as people run it: two rewards of their own, one of them conditioned, its resume and its processes."""

import math

import language_runs
import pytest
import torch
from language_runs import completions, kill_and_resume, numbers, spy, train, two_processes_equal_one
from run_folders import assert_tags_of_pages, tags

from algorithms import gdpo
from algorithms.gdpo import condition_rewards, decoupled_advantages

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SMALL = language_runs.SMALL | {"max_completion_length": 48}
LONG = SMALL | {"max_steps": 2, "save_steps": 1, "eval_steps": 2, "beta": 0.04, "reward_weights": (1.0, 0.5)}
LONG |= {"conditioned_rewards": ("brevity",)}
REWARDS = """\
def calls(problem, completion):
    return float("<tool_call>" in completion and len(completion) % 2 == 0)

def brevity(problem, completion):
    return -len(completion) / 50
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Flags and folder of two uninterrupted steps with two own rewards of different size, the second only where the
    first is 1; and what the updates were given."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "own.py").write_text(REWARDS)
    values = LONG | {"reward": (f"{folder}/own.py:calls", f"{folder}/own.py:brevity")}
    with spy(gdpo) as given:
        train(gdpo, folder / "whole", **values)
    return values, folder / "whole", given


@pytest.mark.quick
def test_what_the_update_gets_is_gdpos(whole):
    _, run_dir, given = whole
    found = numbers(run_dir)
    rows = completions(run_dir)
    assert len(rows) == 2 * 8, "both groups of both steps"
    for step in (1, 2):
        rewards = torch.tensor([list(row["rewards"].values()) for row in rows if row["step"] == step])
        counted = condition_rewards(rewards, torch.tensor([False, True]))
        expected = decoupled_advantages(counted, 4, [1.0, 0.5])
        torch.testing.assert_close(given[step - 1][4], expected)
        assert expected.abs().max() > 0.5 and (counted != rewards).any()
        for name, mean in zip(("calls", "brevity"), rewards.mean(0).tolist()):
            assert found[step, f"train/rewards/{name}/mean"] == pytest.approx(mean, abs=1e-6)
        assert found[step, "train/reward"] == pytest.approx(float((rewards @ torch.tensor([1, 0.5])).mean()), abs=1e-6)
        assert found[step, "train/frac_reward_zero_std"] == float((expected.view(2, 4) == 0).all(1).float().mean())
    assert found[2, "eval/rewards/calls"] == found[2, "eval/greedy"] and found[2, "eval/rewards/brevity"] < 0
    assert all(map(math.isfinite, found.values()))
    assert_tags_of_pages(tags(run_dir), "gdpo", "grpo")


def test_a_killed_run_continues(whole, tmp_path):
    values, run_dir, _ = whole
    kill_and_resume(gdpo, run_dir, tmp_path, 2, **values)


def test_two_processes_equal_one(tmp_path):
    """The batch norm is over the answers of both."""
    two_processes_equal_one(gdpo, tmp_path, **SMALL, max_steps=2)
