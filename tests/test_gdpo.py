"""GDPO: what gdpo.py has beside grpo.py, whose tests hold for the functions that both share."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from test_grpo import assert_close

from algorithms import gdpo
from algorithms.gdpo import Args, decoupled_advantages, group_advantages

VECTORS = json.loads((Path(__file__).parent / "reference" / "gdpo.json").read_text())["vectors"]
BY_ID = {vector["id"]: vector for vector in VECTORS}

KINDS = {  # --advantage: the outputs that are of its kind
    "gdpo": "gdpo gdpo_after_batch_norm_one_group_batch trl_1.16_normalize_then_sum trl_1.16 nvlabs_trl advantages",
    "gdpo_no_batch_norm": "gdpo_before_batch_norm pre_bn gdpo_sum gdpo_sum_with_weights_1_0.5",
    "grpo": "grpo",
    "grpo_no_std": "grpo_without_std",
    "over tokens": "advantages_per_sequence nvlabs_verl",  # verl's batch norm
}
KINDS = {name: kind for kind, names in KINDS.items() for name in names.split()}


def cases():
    """(vector, name of an output, its kind) for every advantage in the file."""
    for vector in VECTORS:
        for name in [name for name in vector["outputs"] if name in KINDS]:
            sums_first = "grpo" in vector["id"] or vector["id"] == "single_reward/nvlabs_trl"
            kind = "grpo" if name == "advantages" and sums_first else KINDS[name]
            if not vector["id"].startswith("nan"):  # rewards are numbers
                yield pytest.param(vector, name, kind, id=f"{vector['id']}:{name}")


def test_reference_vectors_are_all_accounted_for():
    used = {case.values[0]["id"] for case in cases()}
    left = sorted({name.split("/")[0] for name in BY_ID.keys() - used})
    rewards = ["gsm8k_rewards", "tool_correctness", "tool_score"]  # in the tests of envs/
    assert left == ["conditioned_length_reward", "distinct_advantage_groups", rewards[0], "nan", *rewards[1:]]
    assert len(VECTORS) == len(BY_ID) == 51 and len(list(cases())) == 60


@pytest.mark.parametrize("vector, name, kind", list(cases()))
def test_reference_advantages(vector, name, kind):
    """GDPO of its authors' forks of TRL and verl, of TRL 1.16 and verl 0.9.1; GRPO of the same programs."""
    params, expected = vector["params"], vector["outputs"][name]
    inputs = BY_ID[vector["inputs"].get("same_as", vector["id"])]["inputs"] | vector["inputs"]
    columns = [inputs[name] for name in ("correctness", "format", "rewards") if name in inputs]
    rewards = torch.tensor(columns or inputs["rewards_per_rollout"], dtype=torch.float32)
    rewards = rewards.T if columns else rewards  # (B,K)
    G = params.get("G", 2 if vector["id"].startswith("toy") else 4)
    weights = params.get("weights", [1.0] * rewards.size(1))
    weights = [1.0, 0.5] if name.endswith("weights_1_0.5") else [float(weight) for weight in weights]
    if kind == "over tokens":  # eq. 6 and gdpo.py count an answer once, verl as often as it has tokens
        found = decoupled_advantages(rewards, G, weights, batch_norm=False, std_epsilon=1e-6)
        tokens = found.repeat_interleave(torch.tensor(inputs.get("response_lengths", [4] * len(rewards))))
        found = (found - tokens.mean()) * (tokens.var() + 1e-8).rsqrt()
    else:
        found = gdpo.compute_advantages(rewards, weights, Args(num_generations=G, advantage=kind))
    assert_close(found[: len(expected)], expected)  # of one vector, the file has the first five


def test_reference_conditioned_length_reward():
    """Eq. 8 with threshold 1: the length reward counts only where the answer is right."""
    inputs, outputs = (BY_ID["conditioned_length_reward"][key] for key in ("inputs", "outputs"))
    rewards = torch.tensor([inputs["correct"], inputs["length_ok"]]).T.float()
    found = gdpo.condition_rewards(rewards, torch.tensor([False, True]))
    assert_close(found, torch.tensor([inputs["correct"], outputs["conditioned_length"]]).T.float(), 0)
    assert gdpo.condition_rewards(torch.tensor([[0.5, 1.0]]), torch.tensor([False, True])).tolist() == [[0.5, 0]]


COUNTS = BY_ID["distinct_advantage_groups"]["outputs"]
SIZES = [(int(G), 2, found) for G, found in COUNTS["two_rewards_by_G"].items()]
SIZES += [(4, K, COUNTS["four_rollouts_by_n"][str(K)]) for K in (3, 4, 5)]


@pytest.mark.parametrize("G, K, expected", SIZES)
def test_reference_number_of_distinct_groups(G, K, expected):
    """Fig. 3: how many groups of G answers with K binary rewards an algorithm can tell apart, by enumeration."""
    answers = torch.tensor(list(itertools.product([0.0, 1.0], repeat=K)), dtype=torch.float64)
    groups = torch.tensor(list(itertools.combinations_with_replacement(range(2**K), G)))
    rewards = answers[groups.flatten()]  # (groups * G,K)
    found = {
        "grpo": group_advantages(rewards.sum(1), G, std_epsilon=0.0),
        "nostd": group_advantages(rewards.sum(1), G, "none"),
        "gdpo": decoupled_advantages(rewards, G, batch_norm=False, std_epsilon=0.0),
    }
    for name, advantages in found.items():
        ordered = advantages.view(-1, G).sort(1).values
        assert len(((ordered * 1e6).round() + 0.0).unique(dim=0)) == expected[name]  # + 0.0: no -0.0


def random_rewards(columns: int = 3) -> torch.Tensor:
    """Six groups of four, one column of two values as a format reward has."""
    rewards = torch.randn(24, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rewards[:, 0] = (rewards[:, 0] > 0).double()
    return rewards


def test_grpo_with_batch_norm():
    """The control that no other code has: GRPO's advantages over their standard deviation."""
    rewards, args = random_rewards().float(), Args(num_generations=4, advantage="grpo_batch_norm")
    grpo = group_advantages(rewards @ torch.tensor([1.0, 0.5, 2.0]), 4)
    assert_close(gdpo.compute_advantages(rewards, (1.0, 0.5, 2.0), args), grpo / (grpo.std() + 1e-4), 1e-6)
