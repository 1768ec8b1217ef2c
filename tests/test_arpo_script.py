"""ARPO as people run it: what its update gets, GRPO as its special case, resume, processes and own tools."""

import math
from functools import partial

import language_runs
import pytest
import torch
from language_runs import completions, kill_and_resume, numbers, train, two_processes_equal_one
from run_folders import assert_tags_of_pages, tags

from algorithms import arpo, empg
from algorithms.arpo import group_advantages, prefix_owners, shared_advantages

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SMALL = language_runs.SMALL
LONG = SMALL | {"max_steps": 2, "save_steps": 1, "eval_steps": 2, "beta": 0.04}
BRANCHES = {"initial_rollouts": 1, "branch_probability": 0.8, "hops": (1, 3)}
train_here = partial(train, arpo, **SMALL)
whole = language_runs.whole_run(arpo, LONG)


@pytest.mark.quick
def test_what_the_update_gets_is_what_completions_show(whole):
    run_dir, given = whole
    found, rows = numbers(run_dir), completions(run_dir)
    assert all(map(math.isfinite, found.values()))
    assert_tags_of_pages(tags(run_dir), "arpo", "grpo")
    assert len(rows) == 2 * 8, "both groups of both steps"
    tokens = 0
    for step in (1, 2):
        batch = [row for row in rows if row["step"] == step]
        expected = group_advantages(torch.tensor([row["rewards"]["outcome"] for row in batch]), 4)
        for row, episode, own, advantage in zip(batch, given[step - 1][3], given[step - 1][4], expected):
            turns = len(row["entropies"])
            assert len(row["turns"]) == 2 * turns - 1
            assert row["advantages"] == own[:turns].tolist() == pytest.approx([advantage.item()] * turns)
            assert (row["parent"], row["shared_turns"]) == (episode.parent, episode.shared_turns)
        assert found[step, "train/arpo/turns"] == pytest.approx(sum(len(row["entropies"]) for row in batch) / 8)
        calls = sum(len(row["turns"]) // 2 - row["shared_turns"] for row in batch)
        assert found[step, "train/arpo/tool_calls"] == calls
        assert found[step, "train/arpo/branched"] == sum(row["parent"] >= 0 for row in batch) / 8
        changes = [after - row["entropies"][0] for row in batch for after in row["entropies"][1:]]
        change = sum(changes) / len(changes)
        assert found[step, "train/arpo/entropy_change"] == pytest.approx(change, abs=1e-3)
        tokens += found[step, "train/arpo/sampled_tokens"]
        assert found[step, "train/num_tokens"] == tokens
    assert any(row["parent"] >= 0 for row in rows)


@pytest.mark.quick
def test_a_negative_weight_is_a_flag_that_runs(monkeypatch):
    """It branches where the model has become surer."""
    monkeypatch.setattr("sys.argv", ["arpo.py", "--entropy-weight", "-0.2"])
    arpo.check_flags(arpo.parse_args())


def test_hard_advantages(tmp_path):
    """The same episodes; where they are shared, the mean of their advantages."""
    flags = BRANCHES | {"temperature": 1.3, "num_generations": 8}
    train_here(tmp_path / "soft", **flags)
    train_here(tmp_path / "hard", **flags, advantage="hard")
    soft, hard = completions(tmp_path / "soft"), completions(tmp_path / "hard")
    assert [row["turns"] for row in soft] == [row["turns"] for row in hard]
    owners = prefix_owners([row["parent"] for row in hard], [row["shared_turns"] for row in hard], 8, 5)
    expected = shared_advantages(torch.tensor([row["advantages"][-1] for row in soft]), owners)
    for row, values in zip(hard, expected):
        assert row["advantages"] == pytest.approx(values[: len(row["advantages"])].tolist(), abs=1e-6)
    assert [row["advantages"] for row in soft] != [row["advantages"] for row in hard]


def test_without_branches_it_is_grpo_to_the_bit(tmp_path):
    """empg.py --advantage grpo: igpo.py divides by the population's standard deviation, so it differs by rounding."""
    flags = SMALL | {"max_steps": 3, "eval_steps": 3, "loss_type": "dapo", "hops": (1, 2, 3)}
    found = train(arpo, tmp_path / "arpo", **flags, initial_rollouts=4)
    expected = train(empg, tmp_path / "grpo", **flags, advantage="grpo")
    common = found.keys() & expected.keys() - {(step, "train/entropy") for step in (1, 2, 3)}  # an estimate here
    assert len(common) > 30 and {key: found[key] for key in common} == {key: expected[key] for key in common}
    for step in (1, 2, 3):
        assert found[step, "train/arpo/sampled_tokens"] == 8 * found[step, "train/completions/mean_length"]


def test_a_killed_run_continues(whole, tmp_path):
    kill_and_resume(arpo, whole[0], tmp_path, 2, **LONG)


def test_two_processes_equal_one(tmp_path):
    """Parents are numbered in their groups, which lie at other places of a process."""
    two_processes_equal_one(arpo, tmp_path, **SMALL | BRANCHES, max_steps=2, advantage="hard")
