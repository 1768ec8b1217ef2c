"""GRPO: the numbers of other people's code, closed forms, properties, and the model code against naive loops."""

import copy
import itertools
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from algorithms import grpo
from algorithms.grpo import (
    Args,
    Batch,
    Progress,
    apply_gradients,
    compute_advantages,
    generate,
    group_advantages,
    kl_estimate,
    pack,
    policy_loss,
    sample_tokens,
    soft_overlong_penalty,
    token_logprobs,
    total_rewards,
    update,
)

LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo"]
VECTORS = json.loads((Path(__file__).parent / "reference" / "grpo.json").read_text())["vectors"]
BY_ID = {vector["id"]: vector for vector in VECTORS}


def vectors(*outputs: str):
    """Parametrise a test by the reference vectors that have one of these outputs."""
    found = [vector for vector in VECTORS if set(outputs) & set(vector["outputs"])]
    return pytest.mark.parametrize("vector", found, ids=[vector["id"] for vector in found])


def tensor(values) -> torch.Tensor:
    """A float32 tensor of nested lists in which None is NaN."""

    def numbers(value):
        return [numbers(item) for item in value] if isinstance(value, list) else math.nan if value is None else value

    return torch.tensor(numbers(values), dtype=torch.float32)


def assert_close(actual, expected, tolerance: float = 2e-5) -> None:
    expected = expected if isinstance(expected, torch.Tensor) else tensor(expected)
    torch.testing.assert_close(actual.detach().to(expected.dtype), expected, rtol=tolerance, atol=tolerance)


# --- Reference: the output of other people's code -----------------------------------------------------------------

# Left out of the file, because no argument expresses them: verl's raw reward for a group of one, and KL estimators
# other than k3.


def test_reference_file_is_whole():
    kinds = Counter(vector["id"].split("/")[0] for vector in VECTORS)
    assert kinds == {"adv": 36, "loss": 53, "kl": 2, "reward": 1}
    assert len(BY_ID) == 92
    used = ["advantages", "advantages_per_sequence", "normalized_step_rewards", "loss", "value", "penalty"]
    assert all(len(set(used) & set(vector["outputs"])) == 1 for vector in VECTORS), "a vector that no test takes"


@vectors("advantages", "advantages_per_sequence")
def test_reference_advantages(vector):
    params, outputs = vector["params"], vector["outputs"]
    if "rewards_per_func" in vector["inputs"]:
        args = Args(reward_weights=tuple(map(float, params["reward_weights"])))
        rewards, num_generations = total_rewards(tensor(vector["inputs"]["rewards_per_func"]), args), 4
    else:
        numpy = vector["source"].startswith("policy-gradient/GRPO-Zero")  # and so float64
        grouped = torch.tensor(vector["inputs"]["rewards"], dtype=torch.float64 if numpy else torch.float32)
        rewards, num_generations = grouped.flatten(), grouped.size(1)
    options = {"ddof": params.get("ddof", 1)}
    if params.get("eps_added_to_std"):
        options["std_epsilon"] = params["eps_added_to_std"]
    unscaled = params.get("norm_adv_by_std_in_grpo") is False or params.get("critic_type") == "drgrpo"
    options["scale_rewards"] = "none" if unscaled else params.get("scale_rewards", "group")
    advantages = group_advantages(rewards, num_generations, **options)
    assert_close(advantages, tensor(outputs.get("advantages", outputs.get("advantages_per_sequence"))).flatten())


@vectors("normalized_step_rewards")
def test_reference_process_supervision(vector):
    """All step rewards of a group are normalised as one group; later steps are added up to give (B,T) advantages."""
    steps = [len(rewards) for rewards in vector["inputs"]["step_rewards"]]
    rewards = tensor(sum(vector["inputs"]["step_rewards"], []))
    normalised = group_advantages(rewards, num_generations=len(rewards), std_epsilon=0.0).split(steps)
    for row, value in enumerate(normalised):
        assert_close(value, vector["outputs"]["normalized_step_rewards"][row])
        assert_close(value.flip(0).cumsum(0).flip(0), vector["outputs"]["advantage_for_tokens_in_step"][row])


VERL_MODES = {  # the sequence modes leave rows without a token out of the mean
    "token-mean": ({"loss_type": "dapo"}, False),
    "token-sum": ({"loss_type": "dapo", "num_tokens": 1}, False),
    "seq-mean-token-mean": ({"loss_type": "grpo"}, True),
    "seq-mean-token-sum": ({"loss_type": "dr_grpo", "max_completion_length": 1}, True),
    "seq-mean-token-sum-norm": ({"loss_type": "dr_grpo", "max_completion_length": 8}, True),
}


def loss_options(params: dict) -> tuple[dict, bool]:
    """Arguments of policy_loss for a vector's params, and whether rows without a token are left out."""
    if "kl_weight" in params:  # tiny-grpo
        return {"loss_type": "grpo", "epsilon": params["clip_eps"], "beta": params["kl_weight"]}, False
    if "loss_agg_mode" in params:  # verl
        options, drop_empty = VERL_MODES[params["loss_agg_mode"]]
        assert params.get("loss_scale_factor", 8) == 8
        low, high = (params.get(f"clip_ratio_{side}", params.get("clip_ratio")) for side in ("low", "high"))
        return {**options, "epsilon": low, "epsilon_high": high, "delta": params["clip_ratio_c"]}, drop_empty
    names = ["loss_type", "epsilon", "epsilon_high", "delta", "beta", "use_bias_correction_kl", "max_completion_length"]
    options = {name: params[name] for name in names if name in params}
    if "num_items_in_batch" in params:
        options["num_tokens"] = params["num_items_in_batch"]
    return options, False


@vectors("loss")
def test_reference_loss_and_gradient(vector):
    inputs, outputs = vector["inputs"], vector["outputs"]
    inputs = BY_ID[inputs["same_as"]]["inputs"] if "same_as" in inputs else inputs
    logprobs, advantages = tensor(inputs["logps_new"]).requires_grad_(), tensor(inputs["advantages"])
    on_policy = isinstance(inputs["logps_old"], str)
    old_logprobs = logprobs.detach().clone() if on_policy else tensor(inputs["logps_old"])
    mask, options = tensor(inputs["completion_mask"]).bool(), loss_options(vector["params"])
    options, rows = options[0], mask.any(1) if options[1] else torch.ones(len(mask), dtype=torch.bool)
    if options.get("beta"):
        options["ref_logprobs"] = tensor(inputs["logps_ref"])[rows]
    ratios = (logprobs - old_logprobs).exp().detach()[mask & (advantages < 0)[:, None]]
    deltas = {options.pop("delta", None)} | ({None} if ratios.max() < 3 else set())  # verl's 3 where it does not bite
    for delta in deltas:
        logprobs.grad = None
        data = (logprobs[rows], old_logprobs[rows], advantages[rows], mask[rows])
        loss, metrics = policy_loss(*data, delta=delta, **options)
        loss.backward()
        assert_close(loss, outputs["loss"])
        assert_close(logprobs.grad, outputs["grad_wrt_logps_new"])
        assert (logprobs.grad[~mask] == 0).all()
        for name in ("clip_ratio_region_mean", "actor/pg_clipfrac"):
            if name in outputs:
                assert_close(metrics["clip_ratio/region_mean"], outputs[name])
        if outputs.get("kl") is not None and not options["use_bias_correction_kl"]:  # else TRL logs ratio * k3
            assert_close(metrics["kl"], outputs["kl"])


@vectors("value")
def test_reference_kl_estimate(vector):
    """verl clamps k3 at 10, we do not: the entries below the clamp agree, value and gradient."""
    value, gradient = (tensor(vector["outputs"][name]) for name in ("value", "grad_wrt_logprob"))
    below = value < 10
    assert below.sum() == 4
    logprobs = tensor(vector["inputs"]["logprob"])[None].requires_grad_()
    estimate = kl_estimate(logprobs, tensor(vector["inputs"]["ref_logprob"])[None])
    estimate[0, below].sum().backward()
    assert_close(estimate[0, below], value[below])
    assert_close(logprobs.grad[0, below], gradient[below])


@vectors("penalty")
def test_reference_soft_overlong_penalty(vector):
    params, lengths = vector["params"], torch.tensor(vector["inputs"]["length"])
    penalty = soft_overlong_penalty(lengths, params["max_resp_len"], params["overlong_buffer_len"])
    assert_close(penalty, vector["outputs"]["penalty"], 1e-7)


def test_reference_worked_numbers():
    """The numbers that pages and papers quote: binary groups, pairs, four rewards, DAPO's lengths."""
    exact = {"std_epsilon": 0.0}
    assert_close(group_advantages(tensor([1, 0, 0, 1]), 4, **exact), tensor([1, -1, -1, 1]) * 0.8660254, 1e-6)
    assert_close(group_advantages(tensor([0.2, 1.7, -0.4, 0.9]), 4), [-0.4417, 1.2147, -1.1043, 0.3313], 1e-4)
    assert_close(group_advantages(tensor([0, 1, 0, 2, 1, 2]), 2, **exact), tensor([-1, 1] * 3) * 0.70710678, 1e-6)
    for epsilon, last in {1e-4: 0.0715, 1e-6: 1.2503, 1e-8: 1.4970}.items():
        assert group_advantages(tensor([0.5, 0.5, 0.5, 0.50001]), 4, std_epsilon=epsilon)[3].item() == pytest.approx(
            last, abs=1e-4
        )
    lengths = torch.tensor([1, 16384, 18432, 20480, 30000])
    assert soft_overlong_penalty(lengths, 20480, 4096).tolist() == [0, 0, -0.5, -1, -1]


# --- Closed forms -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_generations", [2, 4, 8, 16])
def test_binary_rewards_closed_form(num_generations):
    """k of G right: A+ = sqrt((G-1)/G) sqrt((1-p)/p), A- = -sqrt((G-1)/G) sqrt(p/(1-p)) with p = k/G."""
    for right in range(1, num_generations):
        rewards = (torch.arange(num_generations) < right).double()
        advantages = group_advantages(rewards, num_generations, std_epsilon=0.0)
        p, factor = right / num_generations, math.sqrt((num_generations - 1) / num_generations)
        expected = torch.where(rewards == 1, factor * math.sqrt((1 - p) / p), -factor * math.sqrt(p / (1 - p)))
        assert_close(advantages, expected, 1e-12)
        population = group_advantages(rewards, num_generations, std_epsilon=0.0, ddof=0)
        assert_close(population * factor, advantages, 1e-12)


@pytest.mark.parametrize("num_generations", [2, 5, 8])
def test_dr_grpo_is_leave_one_out(num_generations):
    """Without the standard deviation, G/(G-1) times the advantage is the reward minus the mean of the others."""
    rewards = torch.randn(3, num_generations, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    others = (rewards.sum(1, keepdim=True) - rewards) / (num_generations - 1)
    advantages = group_advantages(rewards.flatten(), num_generations, "none").view_as(rewards)
    assert_close(advantages * num_generations / (num_generations - 1), rewards - others, 1e-12)


def test_batch_scale_closed_form():
    """`batch`: centred on the group, divided by the standard deviation of all rewards that are known."""
    rewards = torch.tensor([1.0, 0, 2, 5, 5, math.nan], dtype=torch.float64)
    std = torch.tensor([1.0, 0, 2, 5, 5], dtype=torch.float64).std() + 1e-4
    assert_close(group_advantages(rewards, 3, "batch"), torch.tensor([0, -1, 1, 0, 0, 0]).double() / std, 1e-12)


def enumerated_gradient(logits: torch.Tensor, loss_of_tokens) -> torch.Tensor:
    """E_policy[gradient] of a loss of sampled log-probabilities, summing over the vocabulary with its probabilities."""
    logits = logits.clone().requires_grad_()
    logprobs = logits.log_softmax(0)  # (V,)
    leaf = logprobs.detach()[:, None].requires_grad_()  # (V,1) every token as one row of one token
    (slope,) = torch.autograd.grad(loss_of_tokens(leaf), leaf)
    return torch.autograd.grad((logprobs.detach().exp() * slope[:, 0] * logprobs).sum(), logits)[0]


def test_kl_identities_by_enumeration():
    """E[k3] = KL(policy || reference); its gradient is that of the other direction, unless it carries the ratio."""
    logits, reference = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    reference, ones = reference.log_softmax(0)[:, None], torch.ones(6, 1, dtype=torch.bool)  # (V,1)

    def kl(p, q):
        return (p.exp() * (p - q)).sum()

    def gradient_of(direction):
        leaf = logits.clone().requires_grad_()
        policy = leaf.log_softmax(0)[:, None]
        return torch.autograd.grad(kl(policy, reference) if direction == "forward" else kl(reference, policy), leaf)[0]

    def penalty(corrected):
        options = {"beta": 1.0, "ref_logprobs": reference, "num_tokens": 1, "use_bias_correction_kl": corrected}
        return lambda x: policy_loss(x, x.detach(), torch.zeros(6), ones, **options)[0]

    policy = logits.log_softmax(0)[:, None]
    assert_close((policy.exp() * kl_estimate(policy, reference)).sum(), kl(policy, reference), 1e-12)
    k3 = enumerated_gradient(logits, lambda x: kl_estimate(x, reference).sum())
    assert_close(k3, gradient_of("reverse"), 1e-12)
    assert_close(enumerated_gradient(logits, penalty(False)), gradient_of("reverse"), 1e-12)
    assert_close(enumerated_gradient(logits, penalty(True)), gradient_of("forward"), 1e-12)
    assert (gradient_of("forward") - gradient_of("reverse")).norm() > 0.1


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_one_token_answers_closed_form(loss_type):
    """k of G say the right token, the others another: the right logit's gradient is -sqrt((G-1)/G) sqrt(p(1-p))."""
    G, right, logits = 8, 3, torch.linspace(-1, 1, 5, dtype=torch.float64).requires_grad_()
    tokens = torch.tensor([2] * right + [4] * (G - right))
    advantages = group_advantages((tokens == 2).double(), G, std_epsilon=0.0)
    logprobs = logits.log_softmax(0)[tokens][:, None]  # (G,1)
    loss, _ = policy_loss(logprobs, logprobs.detach(), advantages, torch.ones(G, 1), loss_type=loss_type)
    loss.backward()
    slope = math.sqrt((G - 1) / G) * math.sqrt(right / G * (1 - right / G))
    assert_close(logits.grad, torch.tensor([0, 0, -slope, 0, slope], dtype=torch.float64), 1e-12)


# --- Properties ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_shift_scale_and_permutation(scale):
    rewards = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def advantages(values, epsilon=0.0):
        return group_advantages(values.flatten(), 4, scale, std_epsilon=epsilon).view_as(values)

    expected = advantages(rewards)
    assert_close(expected.sum(1), torch.zeros(6, dtype=torch.float64), 1e-12)
    shifts = rewards.mean() + 3 if scale == "batch" else torch.arange(6)[:, None] * 3.0
    assert_close(advantages(rewards + shifts), expected, 1e-12)
    assert_close(advantages(rewards * 7), expected * (7 if scale == "none" else 1), 1e-12)
    assert_close(advantages(rewards * 7e6, 1e-4), expected * (7e6 if scale == "none" else 1), 1e-6)
    within, groups = torch.tensor([2, 0, 3, 1]), torch.tensor([5, 3, 0, 1, 4, 2])
    assert_close(advantages(rewards[:, within]), expected[:, within], 1e-12)
    assert_close(advantages(rewards[groups]), expected[groups], 1e-12)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_groups_get_exactly_zero(scale):
    thousandths = torch.arange(1, 1000) / 1000
    for num_generations in range(2, 17):
        rewards = thousandths.repeat_interleave(num_generations)
        other = torch.arange(num_generations).float()  # one group that is not equal
        advantages = group_advantages(torch.cat([rewards, other]), num_generations, scale)
        assert (advantages[:-num_generations] == 0).all() and (advantages[-num_generations:] != 0).any()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_nan_rewards_stay_out(scale):
    nan = math.nan
    advantages = group_advantages(tensor([nan, nan, nan, 1, 0, nan, 0.3, nan, nan, 2, 2, nan]), 3, scale)
    assert (advantages[[0, 1, 2, 5, 6, 7, 8, 9, 10, 11]] == 0).all()
    assert advantages[3] > 0 and advantages[3] == -advantages[4]
    if scale == "group":
        assert_close(advantages[3:5], group_advantages(tensor([1, 0]), 2))


def test_integer_rewards_and_a_group_of_one():
    assert_close(group_advantages(torch.tensor([1, 0, 0, 1]), 4), [0.865875, -0.865875, -0.865875, 0.865875])
    for scale in ("group", "batch", "none"):
        assert group_advantages(tensor([0.7, 1.0]), 1, scale).tolist() == [0, 0]


def test_advantage_controls():
    """`none` is the bare reward, `shuffled` deals the rewards out anew; the overlong penalty has weight 1."""
    rewards = torch.tensor([[1, 0.5, -0.5], [0, math.nan, -1], [1, 1, 0], [math.nan] * 3])
    batch = Batch([[1]] * 4, *torch.zeros(3, 4, 2).unbind(), rewards)
    args = Args(num_generations=2, reward_weights=(1.0, 0.5), scale_rewards="none")
    assert total_rewards(rewards, args)[:3].tolist() == [0.75, -1, 1.5] and total_rewards(rewards, args)[3].isnan()
    assert compute_advantages(batch, args, Progress(step=0)).tolist() == [0.875, -0.875, 0, 0]
    assert compute_advantages(batch, replace(args, advantage="none"), Progress(step=0)).tolist() == [0.75, -1, 1.5, 0]
    many = replace(batch, rewards=torch.arange(64.0)[:, None], prompts=[[1]] * 64)
    shuffled = replace(args, advantage="shuffled", reward_weights=(1.0,), num_generations=64)
    first, again = (compute_advantages(many, shuffled, Progress(step=0)) for _ in range(2))
    assert torch.equal(first, again) and not torch.equal(first, first.sort().values)
    assert_close(first.sort().values, torch.arange(64.0) - 31.5)
    assert not torch.equal(first, compute_advantages(many, shuffled, Progress(step=1)))


def loss_case(dtype=torch.float64) -> dict[str, torch.Tensor]:
    """Rows of 0 to 6 tokens with holes; every log-ratio is inside or outside the clip range, none near its border."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0], [1, 0, 1, 1, 0, 1], [0] * 6, [0, 0, 1, 0, 0, 0]]).bool()
    old_logprobs = -torch.rand(5, 6, dtype=dtype, generator=generator) * 2
    log_ratios = torch.tensor([-1.3, -0.5, -0.1, 0.0, 0.05, 0.15, 0.4, 1.6], dtype=dtype)
    log_ratios = log_ratios[torch.randint(8, (5, 6), generator=generator)]
    ref_logprobs = old_logprobs + torch.randn(5, 6, dtype=dtype, generator=generator) / 2
    advantages = torch.tensor([1.2, -0.8, -1.5, 0.7, 0.5], dtype=dtype)
    case = {"logprobs": old_logprobs + log_ratios, "old_logprobs": old_logprobs, "advantages": advantages}
    return case | {"mask": mask, "ref_logprobs": ref_logprobs}


def loss_and_gradient(case: dict, **options) -> tuple[torch.Tensor, torch.Tensor, dict]:
    case = dict(case)
    logprobs = case.pop("logprobs").clone().requires_grad_()
    loss, metrics = policy_loss(logprobs, **case, **options)
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0], metrics


OPTIONS = [
    {},
    {"epsilon_high": 0.28, "delta": 3.0},
    {"beta": 0.04},
    {"beta": 0.5, "use_bias_correction_kl": True, "delta": 1.5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_gradient_is_the_finite_difference(loss_type, options):
    case = loss_case()

    def loss(logprobs):
        return policy_loss(**(case | {"logprobs": logprobs}), loss_type=loss_type, **options)[0]

    assert torch.autograd.gradcheck(loss, case["logprobs"].clone().requires_grad_(), eps=1e-6, atol=1e-8)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_masked_positions_have_no_influence(loss_type, options):
    case, options = loss_case(), options | {"loss_type": loss_type}
    case["advantages"] = case["advantages"][:, None].expand(5, 6).clone()
    loss, gradient, metrics = loss_and_gradient(case, **options)
    assert (gradient[~case["mask"]] == 0).all() and (gradient[case["mask"]] != 0).any()
    for bad in (math.nan, math.inf, -math.inf, 1e30):
        names = [name for name in case if name != "mask"]
        spoilt = case | {name: case[name].masked_fill(~case["mask"], bad) for name in names}
        again, gradient_again, metrics_again = loss_and_gradient(spoilt, **options)
        assert torch.equal(again, loss) and torch.equal(gradient_again, gradient)
        assert metrics_again == metrics


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_more_padding_changes_nothing(loss_type):
    case, options = loss_case(), {"loss_type": loss_type, "beta": 0.1, "max_completion_length": 8}
    loss, gradient, metrics = loss_and_gradient(case, **options)
    padded = {name: x if x.dim() == 1 else torch.nn.functional.pad(x, (0, 5)) for name, x in case.items()}
    again, gradient_again, metrics_again = loss_and_gradient(padded, **options)
    assert_close(again, loss, 1e-14)
    assert_close(gradient_again[:, :6], gradient, 1e-14)
    assert (gradient_again[:, 6:] == 0).all()
    assert_close(torch.stack(list(metrics_again.values())), torch.stack(list(metrics.values())), 1e-6)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_normalisers(loss_type):
    """What each loss type divides by, on a policy that has not moved, so that a token's gradient is -A / normaliser."""
    case = loss_case()
    case["logprobs"] = case["old_logprobs"]
    _, gradient, _ = loss_and_gradient(case, loss_type=loss_type, max_completion_length=9, num_tokens=70)
    mask, advantages = case["mask"], case["advantages"][:, None]
    per_row = 5 * mask.sum(1, keepdim=True).clamp(min=1)  # every row counts, also one without a token
    normaliser = {"grpo": per_row, "bnpo": mask.sum(), "dapo": 70, "dr_grpo": 5 * 9}[loss_type]
    assert_close(gradient, -advantages * mask / normaliser, 1e-14)
    defaults = {"grpo": per_row, "bnpo": mask.sum(), "dapo": mask.sum(), "dr_grpo": 5 * 6}[loss_type]
    assert_close(loss_and_gradient(case, loss_type=loss_type)[1], -advantages * mask / defaults, 1e-14)


def test_clip_boundaries():
    """Gradient exactly 0 where the ratio has left the range in the direction that pays, -ratio A elsewhere."""
    ratios = torch.tensor([0.3, 0.79, 0.81, 1.0, 1.19, 1.21, 1.27, 1.29, 2.9, 3.1], dtype=torch.float64)
    for high, delta, sign in itertools.product((None, 0.28), (None, 3.0), (1.0, -1.0)):
        case = {"logprobs": ratios.log()[None], "old_logprobs": torch.zeros(1, 10, dtype=torch.float64)}
        case |= {"advantages": torch.tensor([sign * 1.7], dtype=torch.float64), "mask": torch.ones(1, 10)}
        loss, gradient, metrics = loss_and_gradient(case, epsilon_high=high, delta=delta, num_tokens=1)
        outside = ratios > 1 + (high or 0.2) if sign > 0 else (ratios < 0.8) | (ratios > (delta or math.inf))
        assert (gradient[0, outside] == 0).all()
        assert_close(gradient[0, ~outside], -sign * 1.7 * ratios[~outside], 1e-12)
        capped = ratios.clamp(max=1 + (high or 0.2)) if sign > 0 else ratios.clamp(min=0.8, max=delta)
        assert_close(loss, -(sign * 1.7 * capped).sum(), 1e-12)
        share = {"low": (ratios < 0.8).double().mean() * (sign < 0)}
        share["high"] = (ratios > 1 + (high or 0.2)).double().mean() * (sign > 0)
        for side in ("low", "high"):
            assert metrics[f"clip_ratio/{side}_mean"].item() == pytest.approx(share[side].item())
        assert metrics["clip_ratio/region_mean"].item() == pytest.approx((share["low"] + share["high"]).item())


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_advantages_of_rows_equal_those_of_tokens(loss_type):
    case = loss_case()
    tokens = case | {"advantages": case["advantages"][:, None].expand(5, 6)}
    one, two = (loss_and_gradient(x, loss_type=loss_type) for x in (case, tokens))
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])
    per_token = torch.arange(30.0, dtype=torch.float64).view(5, 6) - 15
    case = case | {"advantages": per_token, "logprobs": case["old_logprobs"]}
    assert_close(loss_and_gradient(case, num_tokens=1)[1], -per_token * case["mask"], 1e-12)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_on_policy_loss_is_zero_and_its_gradient_is_not(loss_type):
    advantages = group_advantages(tensor([1, 0, 0, 1, 0, 1, 1, 1]), 4)
    logprobs = -torch.rand(8, 5, generator=torch.Generator().manual_seed(4))
    case = {"logprobs": logprobs, "old_logprobs": logprobs, "advantages": advantages, "mask": torch.ones(8, 5)}
    loss, gradient, metrics = loss_and_gradient(case, loss_type=loss_type)
    assert abs(loss.item()) < 1e-6 and gradient.abs().min() > 1e-3
    assert_close(gradient, -advantages[:, None].expand(8, 5) / 40)
    assert metrics["clip_ratio/region_mean"] == 0


def test_splitting_a_batch_adds_up_for_global_normalisers():
    """dapo and dr_grpo: the losses of micro-batches add up to that of the batch; bnpo's do not."""
    case = loss_case()
    parts = [{name: x[rows] for name, x in case.items()} for rows in (slice(0, 2), slice(2, 5))]
    for loss_type in LOSS_TYPES:
        options = {"loss_type": loss_type, "num_tokens": case["mask"].sum()}
        whole = loss_and_gradient(case, **options)[1]
        weights = [1, 1] if loss_type == "dapo" else [2 / 5, 3 / 5]
        pieces = torch.cat([loss_and_gradient(x, **options)[1] * w for x, w in zip(parts, weights)])
        assert torch.allclose(pieces, whole, atol=1e-12) == (loss_type != "bnpo")


# --- A tiny model -------------------------------------------------------------------------------------------------

END = 5
PROMPTS = [[7, 8, 9], [10, 11, 12, 13, 14, 15, 16, 17, 18], [20], [21, 22, 23, 24, 25, 26]]


def tiny_model(seed: int):
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.15,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=END,
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    model.lm_head.weight.data[END] *= 2.5  # its logit varies most, so that rows end at different times
    model.generation_config.eos_token_id = [END]
    return model


@pytest.fixture(scope="module")
def model():
    return tiny_model(0)


@pytest.fixture(scope="module")
def other_model():
    """Near the model, as the reference of a KL penalty is."""
    other, direction = tiny_model(0), tiny_model(1)
    with torch.no_grad():
        for parameter, change in zip(other.parameters(), direction.parameters()):
            parameter.add_(change, alpha=0.05)
    return other


@pytest.fixture
def compactions(monkeypatch) -> list[int]:
    """Number of rows kept by every compaction of a cache while the test runs."""
    kept, original = [], transformers.DynamicCache.batch_select_indices

    def spy(cache, indices):
        kept.append(len(indices))
        return original(cache, indices)

    monkeypatch.setattr(transformers.DynamicCache, "batch_select_indices", spy)
    return kept


def generators(seeds) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def teacher_forced(model, prompt, completion, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies (n,) of a completion: one row, without padding, packing or cache."""
    logits = model(torch.tensor([prompt + completion]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    distribution = (logits / temperature).log_softmax(1)
    chosen = distribution.gather(1, torch.tensor(completion)[:, None])[:, 0]
    return chosen, -(distribution.exp() * distribution).sum(1)


# --- Rollout ------------------------------------------------------------------------------------------------------


def test_greedy_generation_equals_transformers(model, compactions):
    args, G = Args(max_completion_length=24), 3
    samples = generate(model, PROMPTS, G, args, None)
    lengths = samples.mask.sum(1)
    assert compactions and len(lengths.unique()) > 1 and samples.ended.any(), "nothing was compacted"
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    expected = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=24, pad_token_id=0)[:, width:]
    expected = torch.nn.functional.pad(expected, (0, 24 - expected.size(1))).repeat_interleave(G, 0)
    assert torch.equal(samples.completion_ids, expected)
    assert torch.equal(samples.ended, (expected == END).any(1))
    ends = torch.where(samples.ended, (expected == END).int().argmax(1) + 1, 24)
    assert torch.equal(lengths, ends) and torch.equal(samples.mask, torch.arange(24) < ends[:, None])


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.7, 1.0), (1.3, 0.9)])
def test_recorded_logprobs_equal_teacher_forcing(model, compactions, temperature, top_p):
    args = Args(max_completion_length=24, temperature=temperature, top_p=top_p)
    samples = generate(model, PROMPTS, 8, args, generators(range(4)))
    assert compactions
    gaps, entropy_gaps = [], []
    with torch.no_grad():
        for row, length in enumerate(samples.mask.sum(1).tolist()):
            completion = samples.completion_ids[row, :length].tolist()
            assert END not in completion[:-1] and (completion[-1] == END) == samples.ended[row].item()
            logprobs, entropy = teacher_forced(model, PROMPTS[row // 8], completion, temperature)
            gaps.append((samples.logprobs[row, :length] - logprobs).abs())
            entropy_gaps.append((samples.entropy[row, :length] - entropy).abs())
            for x in (samples.completion_ids, samples.logprobs, samples.entropy):
                assert (x[row, length:] == 0).all()
    for gap in (torch.cat(gaps), torch.cat(entropy_gaps)):
        assert gap.quantile(0.999) < 1e-5 and gap.max() < 1e-4


def test_compaction_changes_nothing(model, compactions, monkeypatch):
    """Rows decoded one at a time, where no row is ever dropped, from the same random numbers."""
    args, G, T = Args(max_completion_length=24), 4, 24
    joint = generate(model, PROMPTS, G, args, generators([11, 12, 13, 14]))
    assert len(compactions) > 1 and min(compactions) < 0.5 * len(PROMPTS) * G

    def refuse(cache, indices):
        raise AssertionError("a lone row was compacted")

    monkeypatch.setattr(transformers.DynamicCache, "batch_select_indices", refuse)
    for row in range(len(PROMPTS) * G):
        (generator,) = generators([11 + row // G])
        uniform = torch.rand(G, T, generator=generators([11 + row // G])[0])
        for _ in range(row % G):  # random numbers of the rows before it in the group
            torch.rand(1, T, generator=generator)
        state = generator.get_state()
        assert torch.equal(torch.rand(1, T, generator=generator)[0], uniform[row % G])
        alone = generate(model, [PROMPTS[row // G]], 1, args, [generator.set_state(state)])
        for name in ("completion_ids", "mask", "ended"):
            assert torch.equal(getattr(alone, name)[0], getattr(joint, name)[row]), (row, name)
        assert_close(alone.logprobs[0], joint.logprobs[row], 1e-5)


def test_samples_follow_the_generators(model):
    """A prompt's samples depend on its own generator alone, not on its neighbours or its place."""
    args = Args(max_completion_length=16)
    one = generate(model, PROMPTS, 4, args, generators([1, 2, 3, 4]))
    two = generate(model, PROMPTS[::-1], 4, args, generators([4, 3, 2, 9]))
    blocks, reverse = one.completion_ids.view(4, 4, -1), two.completion_ids.view(4, 4, -1).flip(0)
    assert torch.equal(blocks[1:], reverse[1:]) and not torch.equal(blocks[0], reverse[0])
    assert len({tuple(row) for row in blocks[0].tolist()}) > 1


def test_sample_tokens_has_exact_frequencies():
    probs, count = torch.tensor([0, 0.25, 0.05, 0, 0, 0.4, 0.1, 0.2, 0]), 20_000
    uniform = (torch.arange(count) + 0.5) / count
    drawn = sample_tokens(probs.log().expand(count, -1), uniform, 1.0)
    counts = torch.bincount(drawn, minlength=9)
    assert (counts - count * probs).abs().max() <= 1
    assert (counts[probs == 0] == 0).all()


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.6, 0.75, 0.9, 0.97])
def test_sample_tokens_top_p(top_p):
    """The smallest set of most probable tokens that holds top_p, with their probabilities renormalised."""
    probs, count = torch.tensor([0.05, 0.5, 0.1, 0, 0.2, 0.15]), 10_000
    uniform = (torch.arange(count) + 0.5) / count
    counts = torch.bincount(sample_tokens(probs.log().expand(count, -1), uniform, top_p), minlength=6)
    kept, mass = [], 0.0
    for token in probs.argsort(descending=True).tolist():
        if mass < top_p:
            kept, mass = [*kept, token], mass + probs[token].item()
    expected = torch.zeros(6).index_copy(0, torch.tensor(kept), probs[kept] / mass)
    assert (counts - count * expected).abs().max() <= 1


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_sample_tokens_at_the_ends_of_the_uniform(top_p):
    """Also for the smallest and largest uniform number there is, no token without probability is drawn."""
    logits = torch.randn(2000, 300, generator=torch.Generator().manual_seed(5)) * 3
    logits[:, :5], logits[:, -5:] = -math.inf, -math.inf
    logprobs = logits.log_softmax(1)
    for number in (0.0, 2.0**-24, 0.5, 1 - 2.0**-23, 1 - 2.0**-24):
        tokens = sample_tokens(logprobs, torch.full((2000,), number), top_p)
        assert (tokens >= 5).all() and (tokens < 295).all()
        assert logprobs.gather(1, tokens[:, None]).isfinite().all()


# --- Update -------------------------------------------------------------------------------------------------------

G = 4


def some_batch(model) -> Batch:
    """Six groups of four. Prompts of 1 to 9 tokens, one of them twice in a row; rows of 1 to 10 tokens, some with
    holes; rows without a token at the start, in the middle and at the end of a group, and a whole group of them."""
    generator = torch.Generator().manual_seed(6)
    prompts = [prompt for prompt in [*PROMPTS, PROMPTS[3], [30, 31]] for _ in range(G)]
    size = len(prompts)
    completion_ids = torch.randint(6, 64, (size, 10), generator=generator)
    mask = torch.arange(10) < torch.randint(1, 11, (size, 1), generator=generator)
    mask[2, 1:3], mask[5, 0], mask[9, 4:9], mask[10] = False, False, False, True
    mask[9, 9], mask[10, ::2] = True, False
    for row in (0, 6, 11, 20, 21, 22, 23):
        mask[row] = False
    logprobs = torch.zeros(size, 10)
    with torch.no_grad():
        for row in range(size):
            logprobs[row] = teacher_forced(model, prompts[row], completion_ids[row].tolist())[0]
    rewards = torch.tensor([1.0, 0, 1, 0] * 2 + [1.0] * 4 + [0, 0, 0, 1] + [0.0] * 4 + [1, 0, 0, 0])[:, None]
    return Batch(prompts, completion_ids, mask, logprobs * mask, rewards)


@pytest.fixture(scope="module")
def batch(model) -> Batch:
    return some_batch(model)


BASE = Args(num_generations=G, max_completion_length=12, reward_weights=(1.0,), max_grad_norm=1e9)


def naive_logprobs(model, batch: Batch, temperature: float = 1.0) -> torch.Tensor:
    """(B,T) row by row; where nothing counts the value is arbitrary, so it is noise that must not matter."""
    rows = [
        teacher_forced(model, p, ids, temperature)[0] for p, ids in zip(batch.prompts, batch.completion_ids.tolist())
    ]
    return torch.stack(rows)


def naive_loss(model, batch: Batch, advantages, args: Args, old_logprobs=None, ref_logprobs=None):
    logprobs = naive_logprobs(model, batch, args.temperature)
    old_logprobs = logprobs.detach() if old_logprobs is None else old_logprobs
    names = ("loss_type", "epsilon", "epsilon_high", "delta", "beta", "use_bias_correction_kl", "max_completion_length")
    options = {name: getattr(args, name) for name in names} | {"ref_logprobs": ref_logprobs}
    return policy_loss(logprobs, old_logprobs, advantages, batch.mask, **options)


def flat(tensors) -> torch.Tensor:
    return torch.cat([x.detach().double().flatten() for x in tensors])


def naive_gradient(model, batch: Batch, advantages, args: Args, other_model=None):
    """Gradient in float64 and the loss, from padded log-probabilities computed row by row."""
    model = copy.deepcopy(model).double()
    with torch.no_grad():
        ref_logprobs = naive_logprobs(copy.deepcopy(other_model).double(), batch) if other_model else None
    loss, metrics = naive_loss(model, batch, advantages.double(), args, ref_logprobs=ref_logprobs)
    return flat(torch.autograd.grad(loss, list(model.parameters()))), loss.item(), metrics


def update_gradient(monkeypatch, model, batch: Batch, advantages, args: Args, reference=None):
    """Gradient that `update` hands to the optimizer, and its metrics."""
    captured = []

    def capture(model, optimizer, args):
        parameters = list(model.parameters())
        captured.append(flat(x.grad if x.grad is not None else torch.zeros_like(x) for x in parameters))
        return 0.0

    with monkeypatch.context() as patch:
        patch.setattr(grpo, "apply_gradients", capture)
        metrics = update(model, torch.optim.SGD(model.parameters(), lr=0.0), batch, advantages, args, reference)
    model.zero_grad(set_to_none=True)
    return captured[-1], metrics


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("longest", [4096, 30, 12, 1])
@pytest.mark.parametrize("micro_batch", [1, 2, 4, 8, 32])
def test_packed_logprobs_equal_teacher_forcing(model, batch, micro_batch, longest):
    args = replace(BASE, per_device_train_batch_size=micro_batch, max_packed_length=longest, temperature=0.8)
    with torch.no_grad():
        expected = naive_logprobs(model, batch, args.temperature)
        seen = []
        for packed in pack(batch, list(range(len(batch.mask))), args):
            logprobs, mask = token_logprobs(model, packed, args), batch.mask[packed.rows]
            assert logprobs.shape == mask.shape
            assert len(packed.rows) <= micro_batch or 16 in packed.rows  # two groups of one prompt count as one
            assert_close(logprobs[mask], expected[packed.rows][mask], 1e-5)
            lengths = [int(row.nonzero().max()) + 1 for row in mask]
            behind = torch.arange(10) >= torch.tensor(lengths)[:, None]
            assert (logprobs[behind] == 0).all()
            alone = max(len(batch.prompts[row]) + length for row, length in zip(packed.rows, lengths))
            assert packed.input_ids.size(1) <= max(longest, alone)
            seen += packed.rows
    assert sorted(seen) == batch.mask.any(1).nonzero()[:, 0].tolist(), "a row was lost or taken twice"


def test_packing_shares_the_prompt(batch):
    """Rows of a group share one copy of their prompt, and every packed row is one group."""
    (packed,) = pack(batch, [12, 13, 14, 15], replace(BASE, per_device_train_batch_size=4))
    lengths = [int(batch.mask[row].nonzero().max()) + 1 for row in (12, 13, 14, 15)]
    assert packed.input_ids.shape == (1, len(PROMPTS[3]) - 1 + sum(lengths))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_update_gradient_equals_the_naive_one(monkeypatch, model, batch, loss_type):
    args = replace(BASE, loss_type=loss_type, temperature=0.9)
    advantages = compute_advantages(batch, args, Progress(step=0))
    expected, loss, _ = naive_gradient(model, batch, advantages, args)
    assert expected.norm() > 0.01
    for micro_batch, skip in [(32, True), (32, False), (8, True), (4, False), (2, True), (1, False)]:
        changed = replace(args, per_device_train_batch_size=micro_batch, skip_equal_groups=skip)
        gradient, metrics = update_gradient(monkeypatch, model, batch, advantages, changed)
        assert relative(gradient, expected) < 1e-5, (micro_batch, skip)
        assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
        assert metrics["clip_ratio/region_mean"] == 0


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_update_gradient_with_kl(monkeypatch, model, other_model, batch, loss_type, corrected):
    args = replace(BASE, loss_type=loss_type, beta=0.3, use_bias_correction_kl=corrected, per_device_train_batch_size=8)
    advantages = compute_advantages(batch, args, Progress(step=0))
    expected, loss, metrics = naive_gradient(model, batch, advantages, args, other_model)
    gradient, learned = update_gradient(monkeypatch, model, batch, advantages, args, other_model)
    assert relative(gradient, expected) < 1e-5
    assert learned["loss"] == pytest.approx(loss, abs=1e-6)
    assert learned["kl"] == pytest.approx(metrics["kl"].item(), rel=1e-4) and learned["kl"] > 0.001
    without = naive_gradient(model, batch, advantages, replace(args, beta=0.0))[0]
    assert relative(without, expected) > 0.01, "the penalty is too weak to be seen"


def test_update_gradient_with_advantages_of_tokens(monkeypatch, model, batch):
    advantages = torch.randn(24, 10, generator=torch.Generator().manual_seed(7))
    advantages[4:8] = 0
    expected = naive_gradient(model, batch, advantages, BASE)[0]
    assert relative(update_gradient(monkeypatch, model, batch, advantages, BASE)[0], expected) < 1e-5


def test_update_gradient_with_checkpointing_and_a_chunked_head(monkeypatch, model, batch):
    """Neither recomputing activations nor applying the head in pieces changes log-probabilities or gradients."""
    advantages = compute_advantages(batch, BASE, Progress(step=0))
    packed = pack(batch, list(range(24)), BASE)[0]
    with torch.no_grad():
        whole = token_logprobs(model, packed, BASE)
    gradient, metrics = update_gradient(monkeypatch, model, batch, advantages, BASE)
    calls, functional = [], torch.nn.functional
    original = functional.cross_entropy
    monkeypatch.setattr(functional, "cross_entropy", lambda *xs, **options: calls.append(0) or original(*xs, **options))
    monkeypatch.setattr(grpo, "LOGITS_PER_CHUNK", 64 * 7)  # 7 tokens a piece
    with torch.no_grad():
        assert_close(token_logprobs(model, packed, BASE), whole, 1e-6)
    assert len(calls) == math.ceil(len(packed.targets) / 7) > 3
    recomputing = copy.deepcopy(model)
    recomputing.gradient_checkpointing_enable({"use_reentrant": False})
    args = replace(BASE, gradient_checkpointing=True)
    for changed, options in [(model, BASE), (recomputing, args)]:
        again, metrics_again = update_gradient(monkeypatch, changed, batch, advantages, options)
        assert relative(again, gradient) < 1e-6
        assert metrics_again == pytest.approx(metrics, abs=1e-6)


def test_second_iteration_moves_the_ratios(monkeypatch, model, batch):
    """num_iterations 2: the ratio is first exactly 1, then not, and the weights equal those of a naive loop."""
    args = replace(BASE, num_iterations=2, loss_type="grpo", per_device_train_batch_size=8, epsilon=0.02)
    advantages, rate, ratios = compute_advantages(batch, args, Progress(step=0)), 0.3, []

    def spy(logprobs, old_logprobs, advantages, mask, **options):
        ratios.append((logprobs.detach() - old_logprobs).exp()[mask])
        return policy_loss(logprobs, old_logprobs, advantages, mask, **options)

    monkeypatch.setattr(grpo, "policy_loss", spy)
    learner = copy.deepcopy(model)
    metrics = update(learner, torch.optim.SGD(learner.parameters(), lr=rate), batch, advantages, args)
    half = len(ratios) // 2
    assert half > 1 and (torch.cat(ratios[:half]) == 1).all()
    assert (torch.cat(ratios[half:]) - 1).abs().max() > 0.02

    naive, clipped = copy.deepcopy(model).double(), []
    old_logprobs = naive_logprobs(naive, batch).detach()
    for _ in range(2):
        loss, step_metrics = naive_loss(naive, batch, advantages.double(), args, old_logprobs)
        clipped.append(step_metrics["clip_ratio/region_mean"].item())
        for parameter, gradient in zip(naive.parameters(), torch.autograd.grad(loss, list(naive.parameters()))):
            parameter.data -= rate * gradient
    start = flat(model.parameters())
    assert relative(flat(learner.parameters()) - start, flat(naive.parameters()) - start) < 1e-4
    assert clipped[0] == 0 and clipped[1] > 0
    assert metrics["clip_ratio/region_mean"] == pytest.approx(sum(clipped) / 2, abs=1e-6)


def test_gap_between_sampler_and_learner(model, batch):
    """Near 0 for the policy that sampled; a log-probability that was recorded wrongly shows."""
    args, advantages = replace(BASE, skip_equal_groups=False), compute_advantages(batch, BASE, Progress(step=0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    metrics = update(model, optimizer, batch, advantages, args)
    assert metrics["sampling/logprob_difference/max"] < 1e-4
    assert batch.mask[1, 0]
    wrong = batch.logprobs.clone()
    wrong[1, 0] += 0.5
    metrics = update(model, optimizer, replace(batch, logprobs=wrong), advantages, args)
    assert metrics["sampling/logprob_difference/max"] == pytest.approx(0.5, abs=1e-4)
    assert metrics["sampling/logprob_difference/mean"] == pytest.approx(0.5 / batch.mask.sum().item(), rel=1e-2)
    model.zero_grad(set_to_none=True)


def momentum_step(model) -> torch.optim.AdamW:
    """An AdamW with momentum: one step along the parameters themselves."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


@pytest.mark.parametrize("nothing", ["gradient", "advantage", "token"])
def test_step_without_gradient_is_a_step_with_gradient_zero(model, batch, nothing):
    """When nothing acts AdamW still moves by its momentum, as it would if the groups had not been left out."""
    ours, explicit = copy.deepcopy(model), copy.deepcopy(model)
    optimizer, expected = momentum_step(ours), momentum_step(explicit)
    before = flat(ours.parameters())
    if nothing != "gradient":  # all groups equal, or all completions truncated and masked
        advantages = torch.zeros(24) if nothing == "advantage" else compute_advantages(batch, BASE, Progress(step=0))
        masked = replace(batch, mask=torch.zeros_like(batch.mask)) if nothing == "token" else batch
        metrics = update(ours, optimizer, masked, advantages, BASE)
        assert all(math.isfinite(value) for value in metrics.values()) and metrics["grad_norm"] == 0
    else:
        assert apply_gradients(ours, optimizer, BASE) == 0
    for parameter in explicit.parameters():
        parameter.grad = torch.zeros_like(parameter)
    expected.step()
    assert torch.equal(flat(ours.parameters()), flat(explicit.parameters()))
    assert not torch.equal(flat(ours.parameters()), before)


def test_gradients_are_clipped_after_their_norm_is_taken(model):
    learner = copy.deepcopy(model)
    for parameter in learner.parameters():
        parameter.grad = torch.ones_like(parameter)
    count, before = sum(parameter.numel() for parameter in learner.parameters()), flat(learner.parameters())
    optimizer = torch.optim.SGD(learner.parameters(), lr=1.0)
    assert apply_gradients(learner, optimizer, replace(BASE, max_grad_norm=0.5)) == pytest.approx(math.sqrt(count))
    assert (flat(learner.parameters()) - before).norm().item() == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_stops_the_run(model, value, capsys):
    learner = copy.deepcopy(model)
    next(learner.parameters()).grad = torch.full_like(next(learner.parameters()), value)
    before = flat(learner.parameters())
    with pytest.raises(SystemExit) as stop:
        apply_gradients(learner, torch.optim.SGD(learner.parameters(), lr=1.0), BASE)
    assert stop.value.code == 1 and "--learning-rate" in capsys.readouterr().err
    after = flat(learner.parameters())
    assert torch.equal(after, before), "the weights were stepped before the check"
