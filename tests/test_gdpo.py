"""GDPO: the numbers of other people's code and of the paper, the claims of the paper that are exact, properties."""

import itertools
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from algorithms import gdpo
from algorithms.gdpo import (
    Args,
    Batch,
    Progress,
    batch_metrics,
    batch_normalize,
    compute_advantages,
    condition_rewards,
    decoupled_advantages,
    group_advantages,
    policy_loss,
    rollout,
    total_rewards,
)
from benchmarks import bandit_gdpo

VECTORS = json.loads((Path(__file__).parent / "reference" / "gdpo.json").read_text())["vectors"]
BY_ID = {vector["id"]: vector for vector in VECTORS}
LOSSES = json.loads((Path(__file__).parent / "reference" / "grpo.json").read_text())["vectors"]
LOSSES = {vector["id"]: vector for vector in LOSSES if vector["id"].startswith("loss/no_empty_row/trl")}
NAN = math.nan


def tensor(values, dtype=torch.float32) -> torch.Tensor:
    """A tensor of nested lists in which None is NaN."""

    def numbers(value):
        return [numbers(item) for item in value] if isinstance(value, list) else NAN if value is None else value

    return torch.tensor(numbers(values), dtype=dtype)


def assert_close(actual, expected, tolerance: float = 2e-5) -> None:
    expected = expected if isinstance(expected, torch.Tensor) else tensor(expected)
    torch.testing.assert_close(actual.to(expected.dtype), expected, rtol=tolerance, atol=tolerance)


def random_rewards(groups: int = 6, generations: int = 4, columns: int = 3) -> torch.Tensor:
    """(B,K) in float64, one column of two values as a format reward has."""
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(groups * generations, columns, dtype=torch.float64, generator=generator)
    rewards[:, 0] = (rewards[:, 0] > 0).double()
    return rewards


# --- Reference: the output of other people's code -----------------------------------------------------------------

ENVIRONMENT_VECTORS = {"tool_correctness": 8, "tool_score": 5, "gsm8k_rewards": 8}  # tests of envs/ take these
DECOUPLED = {"gdpo", "gdpo_after_batch_norm_one_group_batch", "trl_1.16_normalize_then_sum", "trl_1.16", "nvlabs_trl"}
SUMS = {"gdpo_before_batch_norm", "pre_bn", "gdpo_sum", "gdpo_sum_with_weights_1_0.5"}  # eq. 5, before eq. 6
TOKEN_LEVEL = {"advantages_per_sequence", "nvlabs_verl"}  # verl: batch statistics over tokens, epsilon 1e-6
GRPO = {"grpo", "grpo_without_std"}


def reference_cases() -> list:
    """(vector, name of an output) for every advantage in the file."""
    known = {*DECOUPLED, *SUMS, *TOKEN_LEVEL, *GRPO, "advantages", "advantages_tokens", "per_reward_advantages"}
    cases = [(vector, name) for vector in VECTORS for name in vector["outputs"] if name in known]
    return [pytest.param(vector, name, id=f"{vector['id']}:{name}") for vector, name in cases]


def reference_rewards(vector: dict) -> tuple[torch.Tensor, dict]:
    """Rewards (B,K) and the inputs of a vector, or of the one that it refers to."""
    inputs = vector["inputs"]
    inputs = BY_ID[inputs["same_as"]]["inputs"] | inputs if "same_as" in inputs else inputs
    if "correctness" in inputs:
        return tensor([list(pair) for pair in zip(inputs["correctness"], inputs["format"])]), inputs
    if "rewards" in inputs:
        return tensor(inputs["rewards"])[:, None], inputs
    return tensor(inputs["rewards_per_rollout"]), inputs


def test_reference_file_is_whole():
    kinds = Counter(vector["id"].split("/")[0].split("_G4")[0] for vector in VECTORS)
    assert kinds == ENVIRONMENT_VECTORS | {
        **{"toy": 9, "paper_claim": 1, "three_rewards_constant_sum": 1, "random_3groups": 8, "tool_rewards": 4},
        **{"single_reward": 2, "nan": 1, "zero_variance_everywhere": 1, "one_informative_group_among_eight": 1},
        **{"distinct_advantage_groups": 1, "conditioned_length_reward": 1},
    }
    assert len(BY_ID) == len(VECTORS) == 51 and len(reference_cases()) == 64
    taken = {case.values[0]["id"] for case in reference_cases()}
    left = {name.split("/")[0] for name in BY_ID.keys() - taken} - ENVIRONMENT_VECTORS.keys()
    assert left == {"distinct_advantage_groups", "conditioned_length_reward"}, "a vector that no test takes"


@pytest.mark.parametrize("vector, name", reference_cases())
def test_reference_advantages(vector, name):
    """GDPO of NVlabs' forks of TRL and verl, of TRL 1.16 and of verl 0.9.1; GRPO of the same programs."""
    rewards, inputs = reference_rewards(vector)
    params, expected = vector["params"], tensor(vector["outputs"][name])
    G, weights = params.get("G", 2 if vector["id"].startswith("toy") else 4), params.get("weights")
    weights = [1, 0.5] if name == "gdpo_sum_with_weights_1_0.5" else weights
    totals = (rewards * torch.tensor([1.0] * rewards.size(1) if weights is None else weights)).nansum(1)
    sum_first = "sum_then_normalize" in params.values() or vector["id"] == "single_reward/nvlabs_trl"
    if name in GRPO or sum_first:  # with one reward NVlabs' fork of TRL falls back to GRPO
        found = group_advantages(totals, G, "none" if name == "grpo_without_std" else "group")
    elif name == "per_reward_advantages":
        found = torch.stack([group_advantages(column, G) for column in rewards.unbind(1)], 1)
    elif name in SUMS:
        found = decoupled_advantages(rewards, G, weights, batch_norm=False)
    elif name in TOKEN_LEVEL or name == "advantages_tokens":
        lengths = torch.tensor(inputs.get("response_lengths", [4] * len(rewards)))
        found = decoupled_advantages(rewards, G, weights, tokens=lengths, std_epsilon=1e-6)
        if name == "advantages_tokens":
            found = found[:, None] * (torch.arange(expected.size(1)) < lengths[:, None])
    else:
        found = decoupled_advantages(rewards, G, weights)
    assert len(found) == len(expected) or vector["id"].startswith("one_informative"), "the file has the first five"
    assert_close(found[: len(expected)], expected)


def test_reference_conditioned_length_reward():
    """Equation 8 with threshold 1: the length reward counts only where the answer is right."""
    inputs, outputs = (BY_ID["conditioned_length_reward"][key] for key in ("inputs", "outputs"))
    rewards = torch.stack([tensor(inputs["correct"]), tensor(inputs["length_ok"])], 1)
    assert_close(condition_rewards(rewards, [1])[:, 1], outputs["conditioned_length"], 0)
    assert_close(condition_rewards(rewards.flip(1), [0], on=1)[:, 0], outputs["conditioned_length"], 0)


@pytest.mark.parametrize("name", LOSSES)
def test_reference_loss_and_gradient(name):
    """TRL 1.16's clipped loss, which GDPO shares: every loss type, with and without the KL penalty."""
    vector = LOSSES[name]
    inputs, outputs, options = (vector[key] for key in ("inputs", "outputs", "params"))
    inputs = LOSSES[inputs["same_as"]]["inputs"] if "same_as" in inputs else inputs
    names = ("logps_new", "logps_old", "advantages", "completion_mask", "logps_ref")
    logprobs, *others, ref_logprobs = (tensor(inputs[key]) for key in names)
    options = {key: value for key, value in options.items() if key not in ("num_items_in_batch", "grad_accum")}
    options |= {"ref_logprobs": ref_logprobs, "num_tokens": vector["params"]["num_items_in_batch"]}
    loss, metrics = policy_loss(logprobs.requires_grad_(), *others, **options)
    assert_close(loss, outputs["loss"])
    assert_close(torch.autograd.grad(loss, logprobs)[0], outputs["grad_wrt_logps_new"])
    assert_close(metrics["clip_ratio/region_mean"], outputs["clip_ratio_region_mean"])


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_reference_loss_by_hand(loss_type):
    """DeepSeekMath eq. 3, to be minimised: min(ratio A, clip(ratio, 0.8, 1.2) A) with its sign turned."""
    logprobs = tensor([[0.5, 1.1, 1.5]] * 2, torch.float64).log().requires_grad_()  # the old ones are 0
    objective, slope = [[0.5, 1.1, 1.2], [-1.6, -2.2, -3.0]], [[0.5, 1.1, 0.0], [0.0, -2.2, -3.0]]  # A is 1, then -2
    loss, _ = policy_loss(logprobs, torch.zeros(2, 3), tensor([1, -2]), torch.ones(2, 3), loss_type=loss_type)
    assert_close(loss, -tensor(objective, torch.float64).mean(), 1e-12)
    assert_close(torch.autograd.grad(loss, logprobs)[0], -tensor(slope, torch.float64) / 6, 1e-12)


def test_reference_worked_example():
    """The paper's sec. 2, 3.1 and fig. 2: two binary rewards, two rollouts, by their totals. So ddof is 1."""
    totals = {  # rewards of the two rollouts: advantages of the second under GRPO, without std, GDPO before batch norm
        (0, 0): ([[0, 0], [0, 0]], 0, 0, 0),
        (1, 1): ([[0, 1], [0, 1]], 0, 0, 0),
        (1, 1, "by different rewards"): ([[1, 0], [0, 1]], 0, 0, 0),
        (2, 2): ([[1, 1], [1, 1]], 0, 0, 0),
        (0, 1): ([[0, 0], [0, 1]], 0.7071, 0.5, 0.7071),
        (1, 2): ([[0, 1], [1, 1]], 0.7071, 0.5, 0.7071),
        (0, 2): ([[0, 0], [1, 1]], 0.7071, 1.0, 1.4142),
    }
    rewards = torch.cat([tensor(rows) for rows, *_ in totals.values()])  # (14,2)
    found = [group_advantages(rewards.sum(1), 2, scale, std_epsilon=0.0) for scale in ("group", "none")]
    found.append(decoupled_advantages(rewards, 2, batch_norm=False, std_epsilon=0.0))
    for column, advantages, distinct in zip(zip(*[row[1:] for row in totals.values()]), found, (2, 3, 3)):
        expected = torch.tensor(column)[:, None] * torch.tensor([-1.0, 1.0])  # (7,2)
        assert_close(advantages.view(7, 2), expected, 5e-5)
        assert len({round(value, 4) for value in advantages.abs().tolist()}) == distinct


def test_reference_worked_example_after_batch_norm():
    """Across groups the ratio of 2 between (0,2) and (0,1) stays; in a batch of one group it is lost."""
    one, two = tensor([[0, 0], [0, 1]]), tensor([[0, 0], [1, 1]])
    assert_close(decoupled_advantages(torch.cat([one, two]), 2), [-0.5477, 0.5477, -1.0954, 1.0954], 1e-4)
    assert_close(group_advantages(torch.cat([one, two]).sum(1), 2), [-0.7071, 0.7071] * 2, 1e-4)
    for rewards in (one, two):
        assert_close(decoupled_advantages(rewards, 2), [-0.7071, 0.7071], 1e-4)


def all_groups(num_generations: int, num_rewards: int) -> torch.Tensor:
    """Every multiset of G completions with K binary rewards each, stacked as groups: (groups * G, K) in float64."""
    kinds = torch.tensor(list(itertools.product([0.0, 1.0], repeat=num_rewards)), dtype=torch.float64)  # (2^K,K)
    picked = itertools.combinations_with_replacement(range(len(kinds)), num_generations)
    return kinds[torch.tensor(list(picked)).flatten()]


def count_distinct(advantages: torch.Tensor, num_generations: int) -> int:
    """Number of groups that differ in their advantages, whatever the order of rows."""
    ordered = advantages.view(-1, num_generations).sort(1).values
    return len(((ordered * 1e6).round() + 0.0).unique(dim=0))  # + 0.0: no -0.0


COUNTS = BY_ID["distinct_advantage_groups"]["outputs"]
SIZES = [(int(G), 2) for G in COUNTS["two_rewards_by_G"]] + [(4, n) for n in (3, 4, 5)]


@pytest.mark.parametrize("num_generations, num_rewards", SIZES)
def test_reference_number_of_distinct_groups(num_generations, num_rewards):
    """Figure 3: how many groups an algorithm can tell apart, by enumeration."""
    table = COUNTS["two_rewards_by_G"] if num_rewards == 2 else COUNTS["four_rollouts_by_n"]
    expected = table[str(num_generations if num_rewards == 2 else num_rewards)]
    rewards = all_groups(num_generations, num_rewards)
    grpo, nostd = (group_advantages(rewards.sum(1), num_generations, s, 0.0) for s in ("group", "none"))
    decoupled = decoupled_advantages(rewards, num_generations, batch_norm=False, std_epsilon=0.0)
    found = {name: count_distinct(x, num_generations) for name, x in zip(expected, (grpo, nostd, decoupled))}
    assert list(expected) == ["grpo", "nostd", "gdpo"] and found == expected
    if num_rewards == 2:
        G = num_generations
        assert found["grpo"] == 1 + G * (G - 1) // 2 and found["nostd"] == G * (G + 1) // 2


# --- The claims that are exact ------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_norm", [True, False])
def test_scale_and_shift_of_a_reward_do_not_matter(batch_norm):
    """With epsilon 0 to rounding, with the default nearly so; GRPO follows the reward whose scale is largest."""
    rewards = random_rewards()
    other = rewards * torch.tensor([100.0, 1.0, 0.3]) + torch.tensor([-7.0, 0.0, 40.0])
    for epsilon, tolerance in ((0.0, 1e-12), (1e-4, 2e-3)):
        found = [decoupled_advantages(x, 4, [1, 0.5, 2], batch_norm, std_epsilon=epsilon) for x in (rewards, other)]
        assert_close(found[1], found[0], tolerance)
    one, two = (group_advantages(x.sum(1), 4) for x in (rewards, other))
    assert (one - two).abs().max() > 0.5


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_one_reward_without_batch_norm_is_grpo(weight):
    rewards = random_rewards(columns=1)
    expected = weight * group_advantages(rewards[:, 0], 4)
    assert torch.equal(decoupled_advantages(rewards, 4, [weight], batch_norm=False), expected)
    whole = decoupled_advantages(rewards, 4, [weight])
    assert_close(whole, expected / expected.std(), 1e-3)  # with batch norm it is not GRPO, and the weight has no effect
    assert_close(whole, decoupled_advantages(rewards, 4), 1e-3)


def test_two_rewards_of_constant_sum_cancel():
    """Sec. 3.1 says that r1 = (1,1,0), r2 = (0,0,1) is told apart. Each reward is; their sum is 0 all the same."""
    first = random_rewards()[:, 1]
    pair = torch.stack([first, 5 - first], 1)
    assert decoupled_advantages(pair, 4, batch_norm=False).abs().max() < 1e-12
    assert decoupled_advantages(pair, 4).abs().max() < 1e-9, "batch norm does not blow rounding up"
    assert decoupled_advantages(pair, 4, [1, 0.5], batch_norm=False).abs().max() > 0.5
    triple = torch.eye(3, dtype=torch.float64)[[0, 1, 2, 0]]  # totals 1, 1, 1, 1
    assert (group_advantages(triple.sum(1), 4) == 0).all()
    found = decoupled_advantages(triple, 4, batch_norm=False, std_epsilon=0.0)
    assert_close(found, [-0.1339746, 0.1339746, 0.1339746, -0.1339746], 1e-6)


def test_batch_norm_inflates_a_lone_informative_group():
    """One group out of eight says something: 1.50 becomes 4.82, and the silent ones stay exactly 0."""
    rewards = torch.zeros(32, 2)
    rewards[0, 0] = 1
    assert_close(decoupled_advantages(rewards, 4, batch_norm=False)[:4], [1.4997, -0.4999, -0.4999, -0.4999], 1e-4)
    advantages = decoupled_advantages(rewards, 4)
    assert_close(advantages[:4], [4.8203, -1.6068, -1.6068, -1.6068], 1e-4)
    assert (advantages[4:] == 0).all()


def test_batch_norm_is_one_gain():
    """Every group's sum has mean 0, so eq. 6 only multiplies: by 1 over the standard deviation of the sums."""
    rewards = random_rewards()
    sums = decoupled_advantages(rewards, 4, batch_norm=False)
    assert_close(decoupled_advantages(rewards, 4), sums / (sums.std() + 1e-4), 1e-12)
    assert_close(sums.view(-1, 4).sum(1), torch.zeros(6, dtype=torch.float64), 1e-12)


def test_filter_must_look_at_the_components():
    """A group whose totals are equal has no advantage under GRPO and one under GDPO: leaving it out loses it."""
    rewards = torch.eye(3)[[0, 1, 2, 0]].repeat(2, 1)
    rewards[4:] = torch.tensor([1.0, 0, 0])
    batch, args = make_batch(rewards), Args(num_generations=4, reward_weights=(1.0, 1.0, 1.0))
    metrics = batch_metrics(batch, task_of("abc"), args, Progress(tokens=0))
    assert metrics["reward_std"] == 0 and metrics["frac_reward_zero_std"] == 0.5
    acts = compute_advantages(batch, args, Progress(step=0)).ne(0)
    assert acts.tolist() == [True] * 4 + [False] * 4


# --- Properties and edges -----------------------------------------------------------------------------------------


def test_permutation_of_rows_groups_and_rewards():
    rewards, weights = random_rewards(), torch.tensor([1.0, 0.5, 2.0])
    expected = decoupled_advantages(rewards, 4, weights.tolist()).view(6, 4)
    grouped, rows, groups = rewards.view(6, 4, 3), torch.tensor([2, 0, 3, 1]), torch.tensor([5, 3, 0, 1, 4, 2])
    for changed, wanted in ((grouped[:, rows], expected[:, rows]), (grouped[groups], expected[groups])):
        assert_close(decoupled_advantages(changed.reshape(24, 3), 4, weights.tolist()), wanted.flatten(), 1e-12)
    order = torch.tensor([2, 0, 1])
    assert_close(decoupled_advantages(rewards[:, order], 4, weights[order].tolist()), expected.flatten(), 1e-12)


def test_weights_act_on_normalised_advantages():
    """Equation 7. A weight of 0 is as if the reward were not there, and only ratios of weights matter."""
    rewards, columns = random_rewards(), []
    for column in rewards.unbind(1):
        centred = column.view(6, 4) - column.view(6, 4).mean(1, keepdim=True)
        columns.append((centred / (column.view(6, 4).std(1, keepdim=True) + 1e-4)).flatten())
    expected = 2 * columns[0] - 0.5 * columns[1] + 0.25 * columns[2]
    assert_close(decoupled_advantages(rewards, 4, [2, -0.5, 0.25], batch_norm=False), expected, 1e-12)
    assert_close(decoupled_advantages(rewards, 4, [2, -0.5, 0.25]), expected / (expected.std() + 1e-4), 1e-12)
    without = decoupled_advantages(rewards[:, :2], 4, [1, 3])
    assert_close(decoupled_advantages(rewards, 4, [1, 3, 0]), without, 1e-12)
    assert_close(decoupled_advantages(rewards, 4, [10, 30, 0]), without, 1e-3)


@pytest.mark.parametrize("batch_norm", [True, False])
def test_equal_groups_get_exactly_zero(batch_norm):
    """Beside a group that is not equal, whose statistics would otherwise leave rounding in the others."""
    for num_generations in range(2, 17):
        rewards = torch.stack([torch.arange(1, 500) / 1000, torch.arange(500, 999) / 7], 1)
        rewards = torch.cat([rewards.repeat_interleave(num_generations, 0), torch.rand(num_generations, 2)])
        lengths = torch.arange(len(rewards)) % 7 + 1
        for counts in (1, lengths):
            advantages = decoupled_advantages(rewards, num_generations, [1, 0.3], batch_norm, counts)
            assert (advantages[:-num_generations] == 0).all() and (advantages[-num_generations:] != 0).all()


@pytest.mark.parametrize("lengths", [1, torch.arange(1, 17)], ids=["response", "token"])
@pytest.mark.parametrize("batch_norm", [True, False])
def test_nan_rewards_stay_out(batch_norm, lengths):
    rewards = random_rewards(groups=4)
    rewards[0, 1] = rewards[5] = rewards[8:12, 2] = rewards[12:] = NAN  # an entry, a row, a group's column, a group
    found = decoupled_advantages(rewards, 4, None, batch_norm, lengths)
    assert found.isfinite().all() and (found[5] == 0) and (found[12:] == 0).all()
    columns = torch.stack([group_advantages(column, 4) for column in rewards.unbind(1)], 1)
    known = ~rewards.isnan()
    assert (columns[~known] == 0).all() and (columns[known][:5] != 0).any()
    row = columns[0, 0] + columns[0, 2]  # the entry that is missing adds nothing
    if batch_norm:
        counts = known.any(1) * lengths
        mean = (columns.sum(1) * counts).sum() / counts.sum()
        std = ((columns.sum(1) - mean).square() * counts).sum().div(counts.sum() - 1).sqrt()
        row = (row - mean) / (std + 1e-4)
    assert_close(found[0], row, 1e-12)
    group = torch.arange(16) != 5  # as if the row that is all missing were not there: a group of three
    three = decoupled_advantages(rewards[4:8][group[4:8]], 3, batch_norm=False)
    if not batch_norm:
        assert_close(found[4:8][group[4:8]], three, 1e-12)


def test_columns_and_batches_without_any_reward():
    rewards = random_rewards()
    beside = torch.cat([rewards, torch.full((24, 1), NAN, dtype=torch.float64)], 1)
    for weights in (None, [1, 2, 3]):
        wanted = decoupled_advantages(rewards, 4, weights)
        assert torch.equal(decoupled_advantages(beside, 4, weights and [*weights, 4]), wanted)
    for batch_norm in (True, False):
        nothing = decoupled_advantages(torch.full((8, 2), NAN), 4, None, batch_norm)
        assert nothing.tolist() == [0.0] * 8
        assert decoupled_advantages(torch.full((8, 2), 0.7), 4, None, batch_norm).tolist() == [0.0] * 8
    one_known = torch.full((8, 2), NAN)
    one_known[3, 1] = 5.0
    assert decoupled_advantages(one_known, 4).tolist() == [0.0] * 8


def test_small_and_integer_batches():
    """One group, one reward, integers, a group of one."""
    assert_close(decoupled_advantages(torch.tensor([[1], [0]]), 2), [0.7070, -0.7070], 1e-3)
    integers = torch.tensor([[3, 1], [-3, 0], [1, 1], [2, 1]])
    assert torch.equal(decoupled_advantages(integers, 4), decoupled_advantages(integers.float(), 4))
    assert decoupled_advantages(torch.tensor([[1, 0], [4, 2]]), 1).tolist() == [0, 0]
    assert decoupled_advantages(torch.tensor([[1.0, 2.0]]), 1).tolist() == [0]
    assert_close(decoupled_advantages(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), 2), [0.7070, -0.7070], 1e-3)


def test_batch_normalize_by_counts():
    """A row that counts n times weighs as n rows; one that counts 0 times is not there and gets 0."""
    values, counts = torch.randn(8, generator=torch.Generator().manual_seed(1)), torch.tensor([1, 2, 0, 3, 1, 1, 5, 2])
    repeated = values.repeat_interleave(counts)
    expected = (values - repeated.mean()) / (repeated.std() + 1e-4)
    assert_close(batch_normalize(values, 4, counts), expected * (counts > 0), 1e-5)
    assert_close(batch_normalize(values, 4), (values - values.mean()) / (values.std() + 1e-4), 1e-5)
    assert_close(batch_normalize(values, 4, std_epsilon=1.0), (values - values.mean()) / (values.std() + 1), 1e-5)
    assert batch_normalize(torch.zeros(8), 4).tolist() == [0.0] * 8
    assert batch_normalize(torch.tensor([2.0, 3.0]), 2, torch.tensor([1, 0])).tolist() == [0, 0]
    beside = torch.cat([values, torch.zeros(4)])  # a group that is 0 throughout stays 0 but counts in the statistics
    assert_close(batch_normalize(beside, 4)[:8], (values - beside.mean()) / (beside.std() + 1e-4), 1e-5)
    assert (batch_normalize(beside, 4)[8:] == 0).all()


def test_condition_rewards():
    """Only the named columns, only where column `on` is below the threshold or unknown; the input stays as it is."""
    rewards = torch.tensor([[1.0, 5, 7], [0.5, 5, 7], [NAN, 5, 7], [2, NAN, 7]])
    before = rewards.clone()
    assert_close_nan(condition_rewards(rewards, [1]), [[1, 5, 7], [0.5, 0, 7], [NAN, 0, 7], [2, NAN, 7]])
    assert_close_nan(condition_rewards(rewards, [1, 2]), [[1, 5, 7], [0.5, 0, 0], [NAN, 0, 0], [2, NAN, 7]])
    assert_close_nan(condition_rewards(rewards, [1], threshold=0.5), [[1, 5, 7], [0.5, 5, 7], [NAN, 0, 7], [2, NAN, 7]])
    assert_close_nan(condition_rewards(rewards, []), before.tolist())
    assert_close_nan(rewards, before.tolist())


def assert_close_nan(found: torch.Tensor, expected: list) -> None:
    torch.testing.assert_close(found, tensor(expected), rtol=0, atol=0, equal_nan=True)


# --- What the script does with them -------------------------------------------------------------------------------


def make_batch(rewards: torch.Tensor, lengths: list[int] | None = None) -> Batch:
    """A batch with these rewards (B,K) and completions of these lengths."""
    size, lengths = len(rewards), lengths or [3] * len(rewards)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]  # (B,T)
    info = {"length": mask.sum(1), "ended": torch.ones(size, dtype=torch.bool), "entropy": torch.rand(size)}
    return Batch([[1]] * size, mask.long(), mask, torch.zeros(mask.shape), rewards.float(), info)


def task_of(names: str) -> SimpleNamespace:
    return SimpleNamespace(reward_functions=dict.fromkeys(names))


ADVANTAGES = ["gdpo", "grpo", "grpo_no_std", "grpo_batch_norm"]


@pytest.mark.parametrize("level", ["response", "token"])
@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_compute_advantages_calls_the_functions(advantage, level):
    rewards, lengths, weights = random_rewards().float(), [1, 2, 3, 9, 4, 4] * 4, (1.0, 0.5, 2.0)
    args = Args(num_generations=4, reward_weights=weights, advantage=advantage, batch_norm_level=level)
    found = compute_advantages(make_batch(rewards, lengths), args, Progress(step=0))
    counts = torch.tensor(lengths) if level == "token" else 1
    totals = rewards @ torch.tensor(weights)
    expected = {
        "gdpo": decoupled_advantages(rewards, 4, weights, True, counts),
        "grpo": group_advantages(totals, 4),
        "grpo_no_std": group_advantages(totals, 4, "none"),
        "grpo_batch_norm": batch_normalize(group_advantages(totals, 4), 4, counts),
    }
    assert_close(found, expected.pop(advantage), 1e-5)
    assert all((found - other).abs().max() > 0.05 for other in expected.values()), "the arms are told apart"
    raw = compute_advantages(make_batch(rewards, lengths), replace(args, batch_norm=False), Progress(step=0))
    assert_close(raw, decoupled_advantages(rewards, 4, weights, False) if advantage == "gdpo" else found, 1e-5)


def test_batch_norm_level_is_seen():
    """Rows of different lengths: the two levels give different advantages, equal lengths nearly the same."""
    rewards, args = random_rewards().float(), Args(num_generations=4, reward_weights=(1.0, 0.5, 2.0))
    for advantage in ("gdpo", "grpo_batch_norm"):
        for lengths, same in (([1, 2, 3, 9, 4, 4] * 4, False), ([5] * 24, True)):
            one, two = (
                compute_advantages(
                    make_batch(rewards, lengths), replace(args, advantage=advantage, batch_norm_level=level), Progress()
                )
                for level in ("response", "token")
            )
            assert ((one - two).abs().max() < 0.05) == same, (advantage, lengths)


def test_total_rewards():
    rewards = tensor([[1, 0.5], [None, 1], [None, None]])
    found = total_rewards(rewards, Args(reward_weights=(2.0, 4.0)))
    assert found[:2].tolist() == [4, 4] and found[2].isnan()


def test_rewards_are_conditioned_in_the_rollout(monkeypatch):
    rewards = torch.tensor([[1.0, 1, 1], [0, 1, 1], [1, 0, 0], [0, 0, 1]])
    monkeypatch.setattr(gdpo, "sample_batch", lambda *_: make_batch(rewards))
    for names, expected in {(): rewards[:, 2], ("length",): torch.tensor([1.0, 0, 0, 0])}.items():
        args = Args(num_generations=2, conditioned_rewards=names)
        task = SimpleNamespace(reward_functions=dict.fromkeys(["correctness", "format", "length"]))
        batch = rollout(None, None, task, args, Progress())
        assert torch.equal(batch.rewards[:, :2], rewards[:, :2]) and torch.equal(batch.rewards[:, 2], expected)


def test_metrics_say_which_reward_is_silent():
    """Four groups of two: the first reward differs in one group, the second in two, neither in one."""
    rewards = tensor([[1, 0], [0, 0], [1, 1], [1, 0], [1, 0], [1, 1], [0, 0], [0, 0]])
    args, progress = Args(num_generations=2, reward_weights=(1.0, 0.5)), Progress(tokens=100)
    metrics = batch_metrics(make_batch(rewards, [1, 2, 3, 4] * 2), task_of("ab"), args, progress)
    assert (metrics["gdpo/a/frac_zero_std"], metrics["gdpo/b/frac_zero_std"]) == (0.75, 0.5)
    assert metrics["frac_reward_zero_std"] == 0.25
    assert (metrics["rewards/a/mean"], metrics["rewards/b/mean"]) == (0.625, 0.25)
    assert metrics["reward"] == pytest.approx(0.625 + 0.125)
    pairs = [(1, 0), (1.5, 1), (1, 1.5), (0, 0)]
    assert metrics["reward_std"] == pytest.approx(sum(abs(x - y) for x, y in pairs) / math.sqrt(2) / 4)
    assert metrics["completions/mean_length"] == 2.5 and metrics["num_tokens"] == progress["tokens"] == 120


def test_metrics_leave_out_rewards_without_weight():
    """A reward that is only reported keeps no group alive, and one without an opinion says nothing."""
    rewards = tensor([[1, 0, None], [0, 0, None], [1, 1, None], [0, 0, 1]])
    args = Args(num_generations=2, reward_weights=(0.0, 1.0, 1.0))
    batch = make_batch(rewards)
    metrics = batch_metrics(batch, task_of("abc"), args, Progress(tokens=0))
    shares = [metrics[f"gdpo/{name}/frac_zero_std"] for name in "abc"]
    assert shares == [0, 0.5, 1]
    acts = compute_advantages(batch, args, Progress(step=0)).view(2, 2).ne(0).any(1).float()
    assert metrics["frac_reward_zero_std"] == 1 - acts.mean() == 0.5


@pytest.mark.parametrize("level", ["response", "token"])
@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_rows_without_any_reward_are_not_trained(advantage, level):
    rewards = random_rewards().float()
    rewards[6] = NAN
    args = Args(num_generations=4, reward_weights=(1.0, 1.0, 1.0), advantage=advantage, batch_norm_level=level)
    found = compute_advantages(make_batch(rewards, [1, 2, 3, 9, 4, 4] * 4), args, Progress(step=0))
    assert found[6] == 0 and found.isfinite().all() and found.ne(0).sum() == 23


# --- The bandit of benchmarks/bandit_gdpo.py ----------------------------------------------------------------------


def test_bandit_gradient_is_that_of_autograd():
    """Sum over contexts of the group's mean of advantage times log-probability, as one step adds it to the logits."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 7, dtype=torch.float64, generator=generator).requires_grad_()  # (contexts,A)
    chosen, found = torch.randint(7, (5, 4), generator=generator), torch.randn(5, 4, generator=generator).double()
    objective = (found * logits.log_softmax(-1).gather(1, chosen)).mean(1).sum()
    (expected,) = torch.autograd.grad(objective, logits)
    assert_close(bandit_gdpo.policy_gradient(logits.detach().softmax(-1), chosen, found), expected, 1e-12)


def test_bandit_runs_do_not_depend_on_each_other():
    """Computed together or alone; without a step every choice is equally probable."""
    runs = [bandit_gdpo.Run(1), bandit_gdpo.Run(2, scale=0.1), bandit_gdpo.Run(2, learning_rate=2.0)]
    together = bandit_gdpo.simulate("grpo_batch_norm", runs, steps=30)
    alone = torch.cat([bandit_gdpo.simulate("grpo_batch_norm", [run], steps=30) for run in runs])
    assert_close(together, alone, 1e-4)
    assert len(together.unique()) == 6 and (together > torch.tensor([1 / 4, 1 / 32])).all()
    start = bandit_gdpo.simulate("gdpo", runs[:1], steps=0)
    assert_close(start, [[1 / 4, 1 / 32]])


def test_bandit_arms_are_those_of_the_script():
    """The program's advantages equal those that the flags of the script give."""
    rewards, args = random_rewards(columns=2).float(), Args(num_generations=4, reward_weights=(1.0, 0.5))
    for arm in bandit_gdpo.ARMS:
        flags = {"advantage": arm} if arm in ADVANTAGES else {"advantage": "gdpo", "batch_norm": False}
        expected = compute_advantages(make_batch(rewards), replace(args, **flags), Progress(step=0))
        assert_close(bandit_gdpo.advantages(arm, rewards, (1.0, 0.5)), expected, 1e-6)


def test_bandit_scale_of_a_reward():
    """GDPO ends the same whatever the scale of the hard reward, GRPO does not."""
    ends = {
        arm: bandit_gdpo.simulate(arm, [bandit_gdpo.Run(1), bandit_gdpo.Run(1, 0.1)], 100) for arm in ("gdpo", "grpo")
    }
    assert_close(ends["gdpo"][0], ends["gdpo"][1], 2e-2)
    assert ends["grpo"][0, 1] > 1.3 * ends["grpo"][1, 1]
