"""PPO with the unimodal Poisson policy: the numbers of other people's code, closed forms, and small probing tasks."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch.distributions import Categorical, Independent
from torch.nn import functional as F

from algorithms import unimodal_poisson
from algorithms.unimodal_poisson import (
    Agent,
    Args,
    Environments,
    RunningMeanStd,
    action_distribution,
    atom_metrics,
    collect,
    environment_actions,
    gae,
    load_run,
    logprob_and_entropy,
    minibatch_loss,
    normalise,
    ordinal_logits,
    poisson_logits,
    poisson_repo_logits,
    ppo_loss,
    sample_actions,
    update,
)

POLICIES = ["poisson", "poisson_repo", "gaussian", "tanh_gaussian", "beta", "categorical", "ordinal", "bang_bang"]
ATOMS = ["poisson", "poisson_repo", "categorical", "ordinal", "bang_bang"]  # the policies over atoms
CASES = json.loads((Path(__file__).parent / "reference" / "unimodal_poisson.json").read_text())["cases"]
BY_NAME = {case["name"]: case for case in CASES}
LN2 = math.log(2)


def cases(start: str):
    """Parametrise a test by the reference cases whose name begins like this."""
    found = [case for case in CASES if case["name"].startswith(start)]
    return pytest.mark.parametrize("case", found, ids=[case["name"] for case in found])


def tensor(values, dtype=torch.float64) -> torch.Tensor:
    """A tensor of nested lists in which None is NaN and "-inf" is minus infinity."""

    def numbers(value):
        if isinstance(value, list):
            return [numbers(item) for item in value]
        return math.nan if value is None else float(value)

    return torch.tensor(numbers(values), dtype=dtype)


def assert_close(actual, expected, absolute: float = 1e-9, relative: float = 0.0) -> None:
    """NaN in `expected` is left out; there `actual` must be finite."""
    expected = expected if isinstance(expected, torch.Tensor) else tensor(expected)
    actual, known = actual.detach().to(expected.dtype), ~expected.isnan()
    assert actual.shape == expected.shape and actual.isfinite().all()
    torch.testing.assert_close(actual[known], expected[known], rtol=relative, atol=absolute)


def inverse_softplus(rate: torch.Tensor) -> torch.Tensor:
    """What softplus makes `rate` of: ln(e^rate - 1)."""
    return rate + (-torch.expm1(-rate)).log()


def over_atoms(logits: torch.Tensor) -> Independent:
    """The distribution of actions (B,A) with these logits (B,A,K)."""
    return Independent(Categorical(logits=logits), 1)


def rates_between(low: float, high: float, count: int) -> torch.Tensor:
    """Rates (count,) evenly spaced by their logarithm."""
    return torch.logspace(math.log10(low), math.log10(high), count, dtype=torch.float64)


def local_maxima(probabilities: torch.Tensor) -> torch.Tensor:
    """How many atoms are more likely than both neighbours. (...,K) -> (...)"""
    up = probabilities.diff(dim=-1) > 0  # (...,K-1)
    return up[..., -1].long() + (~up[..., 0]).long() + (up[..., :-1] & ~up[..., 1:]).sum(-1)


# --- Reference: the output of other people's code --------------------------------------------------------------------

# Every number is from one of the sources that its case names in the file: udprl at 4d734da5db61 (the paper's code, run
# in float32), onpolicybaselines at 58d401622b38 (the ordinal policy's authors) and torchrl 0.14.1.
LOGITS, PROBABILITIES, GRADIENTS = 2e-4, 1e-5, 1e-3  # what their float32 is good for; the last is relative


def test_reference_file_is_whole():
    kinds = ["poisson_head"] * 7 + ["float32_factorial_overflow_probe"] * 2 + ["learned_tau_variant"]
    kinds += ["ordinal_logits_three_codes"] + ["discretizing_wrapper"] * 3 + ["gae_returns"]
    assert len(CASES) == len(kinds) and all(case["name"].startswith(kind) for case, kind in zip(CASES, kinds))
    assert all(case["source"].startswith(("udprl ", "(a) onpolicybaselines ")) for case in CASES)


@cases("poisson_head")
def test_reference_head(case):
    """Log-PMF and softmax(log-PMF / temperature), which is `poisson`, and the released code's final logits."""
    inputs, outputs = case["inputs"], case["outputs"]
    rate, num_atoms, temperature = tensor(inputs["lambda_B_A"]), inputs["K"], inputs["tau"]
    assert_close(poisson_logits(rate, num_atoms, 1.0), outputs["h_logpmf_k1_to_K_B_A_K"], LOGITS)
    plain = poisson_logits(rate, num_atoms, temperature).softmax(-1)
    assert_close(plain, outputs["softmax_h_over_tau_B_A_K"], PROBABILITIES)
    policy = action_distribution(inverse_softplus(rate), "poisson", num_atoms, temperature)
    assert_close(policy.base_dist.probs, plain, 1e-9)
    final = poisson_repo_logits(rate, num_atoms, temperature)
    assert_close(final, outputs["official_final_logits_B_A_K"], LOGITS)
    assert_close(final.softmax(-1), outputs["official_action_probs_B_A_K"], PROBABILITIES)


@cases("poisson_head")
def test_reference_head_in_single_precision(case):
    """The numbers of a training; where the released code gives NaN, ours are finite, gradients too."""
    inputs, outputs = case["inputs"], case["outputs"]
    rate = tensor(inputs["lambda_B_A"], torch.float32).requires_grad_()
    final = poisson_repo_logits(rate, inputs["K"], inputs["tau"])
    assert_close(final, outputs["official_final_logits_B_A_K"], 2 * LOGITS)  # both of them round
    over_atoms(final).log_prob(torch.tensor(outputs["actions_B_A"])).sum().backward()
    assert rate.grad.isfinite().all()


@cases("poisson_head")
def test_reference_head_distribution(case):
    """Entropy and log-probability of `poisson_repo`, summed over action dimensions, and the gradient by the rate."""
    outputs, num_atoms, temperature = case["outputs"], case["inputs"]["K"], case["inputs"]["tau"]
    rate, actions = tensor(case["inputs"]["lambda_B_A"]), torch.tensor(outputs["actions_B_A"])
    distribution = action_distribution(inverse_softplus(rate), "poisson_repo", num_atoms, temperature)
    assert_close(distribution.entropy(), outputs["entropy_sum_over_dims_B"], PROBABILITIES)
    assert_close(-distribution.log_prob(actions), outputs["neglogp_sum_over_dims_B"], LOGITS, 1e-5)
    rate.requires_grad_()
    negated = -over_atoms(poisson_repo_logits(rate, num_atoms, temperature)).log_prob(actions)
    (found,) = torch.autograd.grad(negated.sum(), rate)
    p = poisson_logits(rate.detach(), num_atoms, temperature).softmax(-1)
    rounding = 1.2e-7 / (1 - p.max(-1).values)  # relative error of ln(1 - p) in float32, most of it at rate 1e-6
    expected = tensor(outputs["dneglogp_dlambda_B_A"])
    assert found.isfinite().all() and (rounding < GRADIENTS).sum() >= 11, "of 14"
    assert not ((found - expected).abs() > 1e-6 + (GRADIENTS + rounding) * expected.abs()).any()


@cases("float32_factorial_overflow_probe")
def test_reference_many_atoms(case):
    """35! is more than float32 holds: the released code loses the last of 35 atoms; with lgamma it is there."""
    inputs, outputs = case["inputs"], case["outputs"]
    for dtype in (torch.float32, torch.float64):
        rate = torch.tensor([[inputs["lambda"]]], dtype=dtype)
        pmf = poisson_logits(rate, inputs["K"], 1.0)[0, 0, -2:]
        plain = poisson_logits(rate, inputs["K"], inputs["tau"]).softmax(-1)[0, 0, -2:]
        final = poisson_repo_logits(rate, inputs["K"], inputs["tau"])[0, 0, -2:]
        found = [tensor(outputs[f"{name}_last_two{end}"]) for name, end in (("h", "_atoms"), ("softmax", ""))]
        found.append(tensor(outputs["final_logit_last_two"]))
        overflow = inputs["K"] == 35
        assert found[0].isinf().tolist() == [False, overflow]
        assert_close(pmf[: 2 - overflow], found[0][: 2 - overflow], LOGITS)
        if not overflow:
            assert_close(plain, found[1], PROBABILITIES)
            assert_close(final, found[2], LOGITS)
        else:  # atom 34 stands for the count 35: ln(17^35 e^-17 / 35!) and so on
            expected = 35 * math.log(17) - 17 - math.lgamma(36)
            assert pmf[1].item() == pytest.approx(expected, abs=1e-4)
            assert (plain[1] / plain[0]).item() == pytest.approx((17 / 35) ** (1 / 2.5), abs=1e-5)
            assert final[1].item() > -10 > found[2][1].item()


def test_reference_learned_temperature():
    """The released code's other variant has a temperature for each state, clipped to [2, 2.5]; the head is the same."""
    case = BY_NAME["learned_tau_variant"]
    rates, expected = tensor(case["inputs"]["lambda_B_A"]), tensor(case["outputs"]["official_final_logits_B_A_K"])
    for rate, (learned,), logits in zip(rates, case["inputs"]["tau_after_softplus_before_clip_B_1"], expected):
        found = poisson_repo_logits(rate[None], case["inputs"]["K"], min(max(learned, 2.0), 2.5))
        assert_close(found[0], logits, LOGITS)


def test_reference_ordinal_is_that_of_the_paper():
    """(c) torchrl computes eq. 4 of arXiv 1901.10500, as we do. The authors' own code (a) and udprl's copy (b) sum over
    another axis, which no argument of ours expresses; here (K - i) ln s_i + i ln(1 - s_i) shows that it is theirs."""
    case = BY_NAME["ordinal_logits_three_codes"]
    scores, outputs = tensor(case["inputs"]["m_pre_sigmoid_B_A_K"]), case["outputs"]
    assert_close(ordinal_logits(scores), outputs["c_paper_eq4_via_torchrl_logits"], LOGITS)
    below = torch.arange(5, dtype=torch.float64)
    slipped = (5 - below) * F.logsigmoid(scores) + below * F.logsigmoid(-scores)
    for name in ("a_tang_agrawal_code_logits", "b_udprl_code_logits"):
        assert_close(slipped, outputs[name], LOGITS)
        difference = ordinal_logits(scores).softmax(-1) - tensor(outputs[name]).softmax(-1)
        assert difference.abs().max() > 0.1


@cases("discretizing_wrapper")
def test_reference_action_values(case):
    """The value of every atom: evenly spaced over the task's own range, both ends among them."""
    low, high, num_atoms = tensor(case["inputs"]["low"]), tensor(case["inputs"]["high"]), case["inputs"]["K"]
    indices = torch.arange(num_atoms)[:, None].expand(-1, len(low))  # (K,A)
    for policy in ATOMS:
        found = environment_actions(indices, low, high, policy, num_atoms)
        assert_close(found, case["outputs"]["action_for_index_K_A"], 1e-6)


def test_reference_gae():
    """udprl's Runner; its returns and advantages are flattened environment by environment."""
    case = BY_NAME["gae_returns"]
    inputs, outputs = case["inputs"], case["outputs"]
    names = ("rewards_T_N", "dones_after_step_T_N", "values_T_N", "last_values_N")
    found = gae(*(tensor(inputs[name]) for name in names), inputs["gamma"], inputs["lam"])
    for ours, name in zip(found, ("advantages_envmajor_NT", "returns_envmajor_NT")):
        assert_close(ours.T.flatten(), outputs[name], 2e-6)


# --- The Poisson policies against closed forms -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "temperature, plain, repo",
    [
        (1.0, [0.095541, 0.191083, 0.254777, 0.254777, 0.203822], [0.000067, 0.009060, 0.077156, 0.225682, 0.688035]),
        (2.5, [0.150730, 0.198889, 0.223145, 0.223145, 0.204091], [0.000687, 0.011066, 0.059195, 0.206081, 0.722971]),
    ],
)
def test_five_atoms_at_rate_4(temperature, plain, repo):
    """Ours, from the formulas by hand: 4^k / k! for k = 1..5 is 4, 8, 10.67, 10.67, 8.53, divided by their sum."""
    rate = torch.full((1, 1), 4.0, dtype=torch.float64)
    assert_close(poisson_logits(rate, 5, temperature).softmax(-1)[0, 0], plain, 1e-6)
    assert_close(poisson_repo_logits(rate, 5, temperature).softmax(-1)[0, 0], repo, 1e-6)
    if temperature == 1:
        weights = tensor([4.0, 8.0, 32 / 3, 32 / 3, 128 / 15])
        assert_close(poisson_logits(rate, 5, 1.0).softmax(-1)[0, 0], weights / weights.sum(), 1e-12)


MOMENTS = [  # rate, temperature, mean and standard deviation of the action in [-1, 1], 11 atoms
    (LN2, 1.0, -0.923, 0.130),
    (LN2, 2.5, -0.780, 0.263),
    (6.0, 1.0, -0.025, 0.451),
    (6.0, 2.5, -0.005, 0.551),
    (11.0, 1.0, 0.547, 0.379),
    (11.0, 2.5, 0.345, 0.507),
]


@pytest.mark.parametrize("rate, temperature, mean, std", MOMENTS)
def test_mean_action_of_a_rate(rate, temperature, mean, std):
    """By hand in float64. The first rate, ln 2, is near the lowest atom; (K + 1) / 2 = 6 is in the middle."""
    values = torch.linspace(-1, 1, 11, dtype=torch.float64)
    weights = tensor([rate**k / math.factorial(k) for k in range(1, 12)]) ** (1 / temperature)
    weights = weights / weights.sum()
    found = poisson_logits(torch.tensor([[rate]], dtype=torch.float64), 11, temperature).softmax(-1)[0, 0]
    assert_close(found, weights, 1e-12)
    assert (found * values).sum().item() == pytest.approx(mean, abs=6e-4)
    assert ((found * values**2).sum() - (found * values).sum() ** 2).sqrt().item() == pytest.approx(std, abs=6e-4)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
@pytest.mark.parametrize("num_atoms", [2, 11, 40])
def test_score_and_fisher_information(num_atoms, temperature):
    """d ln p(k) / d rate = (k - E k) / (temperature rate), so its variance is Var k / (temperature rate)^2."""
    rates = torch.rand(20, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 15 + 0.05
    counts = torch.arange(1, num_atoms + 1, dtype=torch.float64)

    def log_probabilities(rate):
        return poisson_logits(rate, num_atoms, temperature).log_softmax(-1)

    scores = torch.stack([torch.autograd.functional.jacobian(log_probabilities, rate[None])[0, :, 0] for rate in rates])
    p = log_probabilities(rates).exp()  # (20,K)
    mean = (p * counts).sum(-1, keepdim=True)
    assert_close(scores, (counts - mean) / (temperature * rates[:, None]), 1e-10, 1e-8)
    fisher, variance = (p * scores**2).sum(-1), (p * (counts - mean) ** 2).sum(-1)
    assert_close(fisher, variance / (temperature * rates) ** 2, 1e-12, 1e-8)


@pytest.mark.parametrize(
    "rate, poisson, gibbs", [(LN2, 0.221, 0.459), (2, 0.297, 0.748), (5, 0.18, 0.869), (11, 0.03, 0.837)]
)
def test_variance_of_the_score(rate, poisson, gibbs):
    """By the network's output, temperature 1, 11 atoms; a categorical policy with the same p has 1 - sum p^2."""
    head = inverse_softplus(torch.tensor([[rate]], dtype=torch.float64))
    p = action_distribution(head, "poisson", 11, 1.0).base_dist.probs[0, 0]

    def log_probabilities(head):
        return action_distribution(head, "poisson", 11, 1.0).base_dist.logits[0, 0]

    scores = torch.autograd.functional.jacobian(log_probabilities, head)[:, 0, 0]
    assert (p * scores**2).sum().item() == pytest.approx(poisson, abs=6e-4)
    logits = p.log()[None, None]
    scores = torch.autograd.functional.jacobian(
        lambda head: action_distribution(head, "categorical", 11, 1.0).base_dist.logits[0, 0], logits
    )[:, 0, 0]
    assert (p * scores.square().sum(-1)).sum().item() == pytest.approx(gibbs, abs=6e-4)


def test_poisson_is_unimodal_for_every_rate():
    """One local maximum, at the count floor(rate): what makes it the paper's policy."""
    generator = np.random.default_rng(0)
    for _ in range(400):
        rate, temperature = 10 ** generator.uniform(-4, 4), generator.uniform(0.1, 20)
        num_atoms = int(generator.integers(2, 201))
        logits = poisson_logits(torch.tensor([[rate]], dtype=torch.float64), num_atoms, temperature)[0, 0]
        mode = min(max(math.floor(rate), 1), num_atoms) - 1
        steps = logits.diff()
        assert (steps[:mode] > 0).all() and (steps[mode:] < 0).all(), (rate, temperature, num_atoms)


@pytest.mark.parametrize("rate", [2, 3, 7, 11])
def test_poisson_ties_at_whole_rates(rate):
    """At a whole rate the counts rate - 1 and rate are equally likely: a mode two atoms wide."""
    logits = poisson_logits(torch.tensor([[float(rate)]], dtype=torch.float64), 11, 2.5)[0, 0]
    assert logits[rate - 2].item() == pytest.approx(logits[rate - 1].item(), abs=1e-12)
    assert (logits[: rate - 2].diff() > 0).all() and (logits[rate - 1 :].diff() < 0).all()
    assert logits[rate - 1] == pytest.approx(logits.max().item(), abs=1e-12)


def test_poisson_is_unimodal_in_single_precision():
    """What the training logs as frac_multimodal is 0 for it."""
    rates = rates_between(1e-4, 1e4, 3000).float()[:, None]
    for num_atoms, temperature in ((2, 1.0), (5, 0.5), (11, 2.5), (15, 10.0), (40, 2.5)):
        p = poisson_logits(rates, num_atoms, temperature).softmax(-1)
        assert atom_metrics(p)["frac_multimodal"] == 0


def test_poisson_repo_has_two_modes_in_the_beginning():
    """The first rate of the released code is ln 2: nearly all mass on the lowest and on the highest atom."""
    p = poisson_repo_logits(torch.full((1, 1), LN2, dtype=torch.float64), 11, 2.5).softmax(-1)
    assert local_maxima(p).item() == 2
    assert p[0, 0, 0].item() == pytest.approx(0.488, abs=1e-3) and p[0, 0, -1].item() == pytest.approx(0.499, abs=1e-3)
    assert p[0, 0, 1].item() == pytest.approx(0.012, abs=1e-3) and p[0, 0, 2:-1].max() < 1e-3
    assert over_atoms(p.log()).entropy().item() == pytest.approx(0.754, abs=2e-3)
    found = atom_metrics(p)
    assert found["frac_multimodal"] == 1 and found["extreme_mass"].item() == pytest.approx(0.987, abs=2e-3)


MODES = [  # atoms, temperature, atoms that can be the mode of poisson_repo, highest rate with two local maxima
    (11, 2.5, {0, 9, 10}, 2.52),
    (11, 1.0, {0, 1, 9, 10}, 4.49),
    (11, 0.5, {0, 1, 2, 9, 10}, 6.11),
    (11, 10.0, {0, 9, 10}, 0.51),
    (7, 1.0, {0, 5, 6}, 2.80),
    (15, 2.5, {0, 13, 14}, 3.67),
]


@pytest.mark.parametrize("num_atoms, temperature, modes, highest", MODES)
def test_atoms_that_can_be_the_mode(num_atoms, temperature, modes, highest):
    """Those in the middle never are in the released code's policy; in `poisson` each of them can be."""
    rates = rates_between(1e-4, 1e5, 4000)
    repo = poisson_repo_logits(rates, num_atoms, temperature).softmax(-1)
    assert set(repo.argmax(-1).tolist()) == modes
    several = rates[local_maxima(repo) > 1]
    assert several.max().item() == pytest.approx(highest, abs=0.02)
    plain = poisson_logits(rates, num_atoms, temperature)
    assert set(plain.argmax(-1).tolist()) == set(range(num_atoms)) and (local_maxima(plain) == 1).all()


@pytest.mark.parametrize("policy", ["poisson", "poisson_repo"])
@pytest.mark.parametrize("num_atoms", [2, 11, 200])
def test_extreme_rates_stay_finite(policy, num_atoms):
    """Softplus gives 0 at -200; a rate of 1e5 is far beyond the last atom."""
    head = torch.tensor([[-200.0, -20.0, 0.0, 30.0, 1e5]], requires_grad=True)
    distribution = action_distribution(head, policy, num_atoms, 2.5)
    logits = distribution.base_dist.logits
    for atom in (0, num_atoms // 2, num_atoms - 1):
        (gradient,) = torch.autograd.grad(
            distribution.log_prob(torch.full((1, 5), atom)) + distribution.entropy(), head, retain_graph=True
        )
        assert gradient.isfinite().all() and logits.isfinite().all()
    assert distribution.mode[0, 0] == 0 and (policy == "poisson_repo" or distribution.mode[0, -1] == num_atoms - 1)


def test_the_rate_reacts_to_the_network():
    """Both Poisson policies take softplus of the head, which is not clamped in the range that matters."""
    head = torch.tensor([[-5.0, 0.0, 5.0]], dtype=torch.float64)
    rate = (1 + head.exp()).log()
    for policy, function in (("poisson", poisson_logits), ("poisson_repo", poisson_repo_logits)):
        found = action_distribution(head, policy, 11, 2.5).base_dist.logits
        assert_close(found, function(rate, 11, 2.5).log_softmax(-1), 1e-9)


def test_ordinal_against_a_loop():
    scores = torch.randn(4, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = ordinal_logits(scores)
    for b, a, i in itertools.product(range(4), range(3), range(6)):
        yes = [1 / (1 + math.exp(-score)) for score in scores[b, a].tolist()]
        expected = sum(math.log(yes[j]) if j <= i else math.log(1 - yes[j]) for j in range(6))
        assert found[b, a, i].item() == pytest.approx(expected, abs=1e-9)


def test_atom_metrics():
    p = tensor([[[0.5, 0.3, 0.2], [0.4, 0.2, 0.4]], [[0.1, 0.8, 0.1], [0.3, 0.4, 0.3]]])
    found = atom_metrics(p)
    assert found["extreme_mass"].item() == pytest.approx((0.7 + 0.8 + 0.2 + 0.6) / 4)
    assert found["frac_multimodal"].item() == 0.25
    plateaus = tensor([[[0.4, 0.4, 0.1, 0.1], [0.1, 0.4, 0.4, 0.1], [0.25] * 4, [0.1, 0.1, 0.4, 0.4]]])
    assert atom_metrics(plateaus)["frac_multimodal"] == 0, "neighbours that are equally likely are one mode"
    two = tensor([[[0.3, 0.3, 0.1, 0.3], [0.3, 0.1, 0.5, 0.1], [0.1, 0.2, 0.3, 0.4]]])
    assert atom_metrics(two)["frac_multimodal"].item() == pytest.approx(2 / 3)
    assert atom_metrics(tensor([[[0.5, 0.5]]])) == {"extreme_mass": 1, "frac_multimodal": 0}


# --- Acting ----------------------------------------------------------------------------------------------------------

LOW, HIGH = torch.tensor([-1.0, -3.0]), torch.tensor([1.0, 5.0])
SPACE = gym.spaces.Box(LOW.numpy(), HIGH.numpy())


def agent_of(policy: str, **values) -> Agent:
    """An agent for three observed numbers and two action dimensions, always the same."""
    torch.manual_seed(0)
    return Agent(3, SPACE, Args(policy=policy, **values))


def heads(policy: str, count: int = 1, num_atoms: int = 11) -> torch.Tensor:
    """What a network may say about two action dimensions, the same for `count` states."""
    generator = torch.Generator().manual_seed(1)
    shape = {"poisson": (2,), "poisson_repo": (2,), "categorical": (2, num_atoms), "ordinal": (2, num_atoms)}
    head = torch.randn(shape.get(policy, (2, 2)), generator=generator)
    if policy.startswith("poisson"):
        head = torch.tensor([0.3, 4.0])  # a rate of 0.85 and one of 4.02
    return head.expand(count, *head.shape)


@pytest.mark.parametrize("policy", ATOMS)
def test_samples_have_the_probabilities_of_the_distribution(policy):
    """40,000 actions of each dimension: every atom's share within five standard deviations."""
    agent, count = agent_of(policy, temperature=1.7), 40_000
    head = heads(policy, count)
    actions = sample_actions(head, agent.noise(count), *agent.shape)
    p = action_distribution(head[:1], *agent.shape).base_dist.probs[0].double()  # (A,K)
    assert actions.shape == (count, 2) and p.shape == (2, 2 if policy == "bang_bang" else 11)
    shares = F.one_hot(actions, p.shape[1]).double().mean(0)
    assert ((shares - p).abs() <= 5 * (p * (1 - p) / count).sqrt() + 1e-6).all(), (shares, p)
    together = (
        F.one_hot(actions[:, 0], p.shape[1])[..., None] * F.one_hot(actions[:, 1], p.shape[1])[:, None]
    ).double()
    independent = p[0, :, None] * p[1]
    gap = (together.mean(0) - independent).abs()
    assert (gap <= 5 * (independent * (1 - independent) / count).sqrt() + 1e-4).all(), "dimensions are independent"


@pytest.mark.parametrize("policy", ["gaussian", "tanh_gaussian", "beta"])
def test_samples_have_the_moments_of_the_distribution(policy):
    agent, count = agent_of(policy), 40_000
    head = heads(policy, count)
    actions = sample_actions(head, agent.noise(count), *agent.shape).double()
    mean, log_std = head[0].double().unbind(-1)
    std = log_std.exp()
    if policy == "tanh_gaussian":
        mean = mean.tanh()
    if policy == "beta":
        alpha, beta = (1 + head[0].double().exp()).log().add(1).unbind(-1)
        mean, std = alpha / (alpha + beta), (alpha * beta / (alpha + beta + 1)).sqrt() / (alpha + beta)
        assert actions.min() >= 0 and actions.max() <= 1
    assert actions.shape == (count, 2)
    assert ((actions.mean(0) - mean).abs() < 5 * std / count**0.5).all()
    assert (actions.std(0) / std - 1).abs().max() < 0.02
    base = action_distribution(head[:1], *agent.shape).base_dist
    assert_close(base.mean[0].double(), mean, 1e-5)
    assert_close(base.stddev[0].double(), std, 1e-5)


@pytest.mark.parametrize("policy", POLICIES)
def test_log_probability_and_entropy_are_sums_over_dimensions(policy):
    agent = agent_of(policy)
    head = heads(policy, 5) + 0.3 * torch.randn(5, *heads(policy).shape[1:])
    distribution = action_distribution(head, *agent.shape)
    actions = sample_actions(head, agent.noise(5), *agent.shape)
    alone = [action_distribution(head[:, a : a + 1], *agent.shape) for a in range(2)]
    assert distribution.log_prob(actions).shape == distribution.entropy().shape == (5,)
    logprobs = sum(one.log_prob(actions[:, a : a + 1]) for a, one in enumerate(alone))
    assert_close(distribution.log_prob(actions), logprobs, 1e-5)
    assert_close(distribution.entropy(), sum(one.entropy() for one in alone), 1e-5)
    if policy in ATOMS:
        p = distribution.base_dist.probs
        assert_close(distribution.log_prob(actions), p.gather(-1, actions[..., None])[..., 0].log().sum(-1), 1e-5)
        assert_close(distribution.entropy(), -(p * p.log()).nan_to_num(0).sum((1, 2)), 1e-5)


@pytest.mark.parametrize("policy", ["gaussian", "tanh_gaussian"])
def test_log_probability_of_gaussians(policy):
    """The density of the action before it is clipped and scaled, as in CleanRL."""
    head, actions = heads(policy), torch.tensor([[0.4, -2.0]])
    mean, std = head[0, :, 0], head[0, :, 1].exp()
    mean = mean.tanh() if policy == "tanh_gaussian" else mean
    expected = (-((actions[0] - mean) ** 2) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)).sum()
    assert_close(action_distribution(head, policy, 11, 2.5).log_prob(actions), expected[None], 1e-5)
    entropy = (std.log() + 0.5 + 0.5 * math.log(2 * math.pi)).sum()
    assert_close(action_distribution(head, policy, 11, 2.5).entropy(), entropy[None], 1e-5)


@pytest.mark.parametrize("policy", [policy for policy in ATOMS if policy != "bang_bang"])
def test_atoms_in_the_environments_units(policy):
    """Each dimension has its own range."""
    actions = torch.tensor([[0, 0], [10, 10], [5, 5], [1, 9]])
    expected = torch.tensor([[-1.0, -3.0], [1.0, 5.0], [0.0, 1.0], [-0.8, 4.2]])
    assert_close(environment_actions(actions, LOW, HIGH, policy, 11), expected, 1e-6)
    found = agent_of(policy).to_environment(actions)
    assert found.dtype == np.float32 and SPACE.contains(found[1])
    assert_close(torch.tensor(found), expected, 1e-6)


ELSEWHERE = [  # policy, sampled action, what the task gets
    ("bang_bang", [0, 1], [-1.0, 5.0]),
    ("bang_bang", [1, 0], [1.0, -3.0]),
    ("gaussian", [0.3, 4.5], [0.3, 4.5]),
    ("gaussian", [-7.0, 7.0], [-1.0, 5.0]),
    ("tanh_gaussian", [0.5, 0.5], [0.5, 3.0]),
    ("tanh_gaussian", [-1.5, 1.5], [-1.0, 5.0]),
    ("beta", [0.0, 1.0], [-1.0, 5.0]),
    ("beta", [0.5, 0.25], [0.0, -1.0]),
]


@pytest.mark.parametrize("policy, actions, expected", ELSEWHERE)
def test_other_actions_in_the_environments_units(policy, actions, expected):
    found = agent_of(policy).to_environment(torch.tensor([actions]))
    assert_close(torch.tensor(found), torch.tensor([expected]), 1e-6)


@pytest.mark.parametrize("policy", POLICIES)
def test_network(policy):
    """Its head has the shape that action_distribution takes; the first policy is nearly the same in every state."""
    agent = agent_of(policy)
    observations = 3 * torch.randn(50, 3)
    head = agent.head(observations)
    atoms = {"categorical": 11, "ordinal": 11}.get(policy, 2)
    assert head.shape == ((50, 2) if policy.startswith("poisson") else (50, 2, atoms))
    assert agent.values(observations).shape == (50,)
    linear = [module for module in agent.modules() if isinstance(module, torch.nn.Linear)]
    assert [tuple(module.weight.shape) for module in linear[:2]] == [(64, 3), (64, 64)]
    assert all((module.bias == 0).all() for module in linear)
    gram = linear[1].weight @ linear[1].weight.T
    assert_close(gram, 2 * torch.eye(64), 1e-4)  # orthogonal with gain sqrt 2
    assert head[..., 0].abs().max() < 0.2, "the last layer's gain is 0.01"
    if policy.startswith("poisson"):
        assert_close(F.softplus(head), torch.full((50, 2), LN2), 0.05)
    if "gaussian" in policy:
        assert agent.log_std.requires_grad and (head[..., 1] == 0).all()


@pytest.mark.parametrize("rate", [0.01, 6.0, 40.0])
def test_first_rate(rate):
    agent = agent_of("poisson", rate_init=rate)
    found = F.softplus(agent.head(torch.randn(20, 3)))
    assert_close(found, torch.full((20, 2), rate), 0.05 * rate)


# --- Advantages and loss ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma, gae_lambda", [(0.99, 0.95), (0.9, 1.0), (1.0, 0.0)])
def test_gae_against_a_loop(gamma, gae_lambda):
    generator = np.random.default_rng(0)
    rewards, values = generator.normal(size=(2, 30, 4))
    dones, last_values = generator.random((30, 4)) < 0.2, generator.normal(size=4)
    dones[-1] = [True, False, True, False]
    expected = np.zeros((30, 4))
    for n in range(4):
        advantage, following = 0.0, last_values[n]
        for t in reversed(range(30)):
            if dones[t, n]:
                advantage, following = 0.0, 0.0
            advantage = rewards[t, n] + gamma * following - values[t, n] + gamma * gae_lambda * advantage
            expected[t, n], following = advantage, values[t, n]
    inputs = map(torch.from_numpy, (rewards, dones, values, last_values))
    advantages, returns = gae(*inputs, gamma, gae_lambda)
    assert_close(advantages, torch.from_numpy(expected), 1e-12)
    assert_close(returns, torch.from_numpy(expected + values), 1e-12)


PLAIN = {"clip_coef": 0.2, "ent_coef": 0.0, "vf_coef": 0.0, "norm_adv": False}


def loss_of(ratios, advantages, values=0.0, old_values=0.0, returns=0.0, entropy=0.0, **options):
    """ppo_loss for these ratios, its metrics, and its gradient by log-probability, value and entropy."""
    ratios = tensor(ratios)
    columns = [torch.as_tensor(x, dtype=torch.float64).expand_as(ratios).clone() for x in (values, entropy)]
    logprobs, values, entropy = (x.requires_grad_() for x in ((0.7 * torch.ones_like(ratios) + ratios.log()), *columns))
    others = [torch.as_tensor(x, dtype=torch.float64).expand_as(ratios) for x in (advantages, old_values, returns)]
    old = 0.7 * torch.ones_like(ratios)
    loss, metrics = ppo_loss(logprobs, old, others[0], values, others[1], others[2], entropy, **PLAIN | options)
    gradients = torch.autograd.grad(loss, (logprobs, values, entropy), allow_unused=True)
    return loss.item(), {name: value.item() for name, value in metrics.items()}, gradients


BRANCHES = [  # ratio, advantage, loss, gradient by the log-probability
    (1.5, 2.0, -2.4, 0.0),  # too far already in the good direction: 1.2 counts
    (1.5, -2.0, 3.0, 3.0),  # the wrong direction: nothing is clipped
    (0.5, 2.0, -1.0, -1.0),
    (0.5, -2.0, 1.6, 0.0),  # 0.8 counts
    (1.1, 2.0, -2.2, -2.2),  # between 0.8 and 1.2
    (0.9, -2.0, 1.8, 1.8),
]


@pytest.mark.parametrize("ratio, advantage, loss, gradient", BRANCHES)
def test_policy_loss_by_hand(ratio, advantage, loss, gradient):
    found, metrics, (by_logprob, *_) = loss_of([ratio], advantage)
    assert found == pytest.approx(loss) and metrics["policy_loss"] == pytest.approx(loss)
    assert by_logprob.item() == pytest.approx(gradient)
    assert metrics["clipfrac"] == (abs(ratio - 1) > 0.2)
    assert metrics["approx_kl"] == pytest.approx(ratio - 1 - math.log(ratio))


def test_policy_loss_is_a_mean():
    ratios, advantages, losses = zip(*((ratio, advantage, loss) for ratio, advantage, loss, _ in BRANCHES))
    found, metrics, _ = loss_of(list(ratios), tensor(list(advantages)))
    assert found == pytest.approx(sum(losses) / 6)
    assert metrics["clipfrac"] == pytest.approx(4 / 6)
    assert metrics["approx_kl"] == pytest.approx(sum(ratio - 1 - math.log(ratio) for ratio in ratios) / 6)
    assert loss_of([1.5, 0.5], 1.0, clip_coef=0.6)[1]["clipfrac"] == 0


VALUES = [  # value, old value, return, half of the squared error that counts, gradient by the value
    (1.0, 0.0, 2.0, 0.5 * 1.8**2, 0.0),  # towards the return, but more than 0.2: the clipped value 0.2 counts
    (1.0, 0.0, -1.0, 0.5 * 2.0**2, 2.0),  # away from it: as it is
    (0.1, 0.0, 2.0, 0.5 * 1.9**2, -1.9),  # less than 0.2
    (-1.0, 0.0, -2.0, 0.5 * 1.8**2, 0.0),
    (-1.0, 0.0, 1.0, 0.5 * 2.0**2, -2.0),
    (3.0, 1.0, 2.0, 0.5 * 1.0**2, 1.0),  # beyond the return: |3 - 2| = 1 is more than |1.2 - 2|
]


@pytest.mark.parametrize("value, old, target, loss, gradient", VALUES)
def test_value_loss_by_hand(value, old, target, loss, gradient):
    found, metrics, (_, by_value, _) = loss_of([1.0], 0.0, value, old, target, vf_coef=0.5)
    assert found == pytest.approx(0.5 * loss) and metrics["value_loss"] == pytest.approx(loss)
    assert by_value.item() == pytest.approx(0.5 * gradient)
    found, metrics, (_, by_value, _) = loss_of([1.0], 0.0, value, old, target, vf_coef=0.5, clip_vloss=False)
    assert metrics["value_loss"] == pytest.approx(0.5 * (value - target) ** 2) and found == metrics["value_loss"] / 2
    assert by_value.item() == pytest.approx(0.5 * (value - target))


def test_value_loss_is_a_mean():
    value, old, target, losses = (tensor([row[i] for row in VALUES]) for i in range(4))
    _, metrics, _ = loss_of([1.0] * 6, 0.0, value, old, target)
    assert metrics["value_loss"] == pytest.approx(losses.mean().item())


def test_entropy_lowers_the_loss():
    found, metrics, (_, _, by_entropy) = loss_of([1.0, 1.0], 0.0, entropy=tensor([1.0, 2.0]), ent_coef=0.1)
    assert found == pytest.approx(-0.15) and metrics["entropy"] == pytest.approx(1.5)
    assert_close(by_entropy, [-0.05, -0.05], 1e-12)


def test_advantages_are_normalised_by_the_population():
    """Mean 3, squared deviations 4, 1, 1, 4: the standard deviation is sqrt(10 / 4)."""
    advantages = tensor([1.0, 2.0, 4.0, 5.0])
    _, _, (by_logprob, *_) = loss_of([1.0] * 4, advantages, norm_adv=True)
    assert_close(by_logprob, -(advantages - 3) / math.sqrt(2.5) / 4, 1e-8)
    _, _, (raw, *_) = loss_of([1.0] * 4, advantages)
    assert_close(raw, -advantages / 4, 1e-12)
    assert loss_of([1.0] * 3, 2.0, norm_adv=True)[0] == pytest.approx(0), "equal advantages do not divide by 0"


@pytest.mark.parametrize("norm_adv, clip_vloss", [(True, True), (False, False)])
def test_gradients_of_the_loss_by_finite_differences(norm_adv, clip_vloss):
    generator = torch.Generator().manual_seed(3)
    old, advantages, values, returns, entropy = torch.randn(5, 12, dtype=torch.float64, generator=generator)
    logprobs = old + 0.5 * torch.randn(12, dtype=torch.float64, generator=generator)
    old_values = values + 0.3 * torch.randn(12, dtype=torch.float64, generator=generator)
    for kink in (((logprobs - old).exp() - 1).abs() - 0.3, (values - old_values).abs() - 0.3):
        assert kink.abs().min() > 1e-3, "not at a kink"
    options = {"clip_coef": 0.3, "ent_coef": 0.01, "vf_coef": 0.5, "norm_adv": norm_adv, "clip_vloss": clip_vloss}

    def loss(logprobs, values, entropy):
        return ppo_loss(logprobs, old, advantages, values, old_values, returns, entropy, **options)[0]

    assert torch.autograd.gradcheck(loss, [x.clone().requires_grad_() for x in (logprobs, values, entropy)])


def batch_of(agent: Agent, size: int = 16) -> dict[str, torch.Tensor]:
    """A batch as collect would leave it, of random observations and rewards."""
    generator = torch.Generator().manual_seed(5)
    observations = torch.randn(size, 3, generator=generator)
    with torch.no_grad():
        actions = sample_actions(agent.head(observations), agent.noise(size), *agent.shape)
        logprobs = agent.distribution(observations).log_prob(actions)
        values = agent.values(observations)
    advantages = torch.randn(size, generator=generator)
    names = ("observations", "actions", "logprobs", "advantages", "values", "returns")
    return dict(zip(names, (observations, actions, logprobs, advantages, values, advantages + values)))


@pytest.mark.parametrize("policy", ["poisson", "gaussian"])
def test_minibatch_loss(policy):
    """What it hands to ppo_loss: everything in its place, coefficients of Args."""
    agent = agent_of(policy)
    batch = batch_of(agent)
    batch["logprobs"] = batch["logprobs"] + 0.4 * torch.randn(16)
    batch["values"] = batch["values"] + 0.4 * torch.randn(16)
    args = Args(policy=policy, clip_coef=0.3, ent_coef=0.05, vf_coef=0.7, norm_adv=False, clip_vloss=False)
    loss, metrics = minibatch_loss(agent, batch, args)
    distribution = agent.distribution(batch["observations"])
    ratio = (distribution.log_prob(batch["actions"]) - batch["logprobs"]).exp()
    clipped = torch.minimum(ratio * batch["advantages"], ratio.clamp(0.7, 1.3) * batch["advantages"])
    value_loss = 0.5 * (agent.values(batch["observations"]) - batch["returns"]).square().mean()
    expected = -clipped.mean() + 0.7 * value_loss - 0.05 * distribution.entropy().mean()
    assert_close(loss, expected, 1e-6)
    parameters = [*agent.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad(x, parameters, retain_graph=True) for x in (loss, expected))):
        assert_close(ours, theirs, 1e-6)
        assert ours.any(), "every weight learns"
    without = expected + 0.05 * distribution.entropy().mean()
    loss, metrics = minibatch_loss(agent, batch, replace(args, ent_coef=0.0))
    assert metrics["entropy"].item() == pytest.approx(distribution.entropy().mean().item())
    for ours, theirs in zip(*(torch.autograd.grad(x, parameters) for x in (loss, without))):
        assert_close(ours, theirs, 1e-6)


def test_update_takes_every_row_once_an_epoch():
    agent = agent_of("poisson")
    batch = batch_of(agent)
    batch["returns"] = torch.arange(16.0)
    seen = []

    def spy(agent, rows, args):
        seen.append(rows["returns"].tolist())
        assert all(torch.equal(rows[name], batch[name][rows["returns"].long()]) for name in batch), "rows stay together"
        return minibatch_loss(agent, rows, args)

    args = Args(num_minibatches=4, update_epochs=3)
    update(agent, torch.optim.Adam(agent.parameters(), 1e-3), batch, args, spy)
    assert [len(rows) for rows in seen] == [4] * 12
    epochs = [sum(seen[i : i + 4], []) for i in (0, 4, 8)]
    assert all(sorted(epoch) == batch["returns"].tolist() for epoch in epochs), "each row once"
    assert epochs[0] != sorted(epochs[0]) and epochs[0] != epochs[1], "in another order each time"


def test_update_by_hand():
    """Two epochs of one minibatch are two steps down the gradient, whose norm is limited; metrics are their means."""
    agent, other = agent_of("poisson"), agent_of("poisson")
    batch, args = batch_of(agent), Args(num_minibatches=1, update_epochs=2, max_grad_norm=0.01)
    metrics, expected = update(agent, torch.optim.SGD(agent.parameters(), 0.5), batch, args), []
    for _ in range(2):
        loss, found = minibatch_loss(other, batch, args)
        gradients = torch.autograd.grad(loss, [*other.parameters()])
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt().item()
        assert norm > 0.02, "limited"
        expected.append({name: value.item() for name, value in found.items()} | {"grad_norm": norm})
        with torch.no_grad():
            for weight, gradient in zip(other.parameters(), gradients):
                weight -= 0.5 * gradient * 0.01 / norm
    for ours, theirs in zip(agent.parameters(), other.parameters()):
        assert_close(ours, theirs.detach(), 1e-6)
    for name, value in metrics.items():
        assert value == pytest.approx((expected[0][name] + expected[1][name]) / 2, rel=1e-3, abs=1e-6), name


def test_target_kl_ends_the_update():
    agent = agent_of("poisson")
    batch, kls = batch_of(agent), iter([0.015, 0.015, 0.03, 0.03, 0.05, 0.05])

    def fixed(agent, rows, args):
        loss, metrics = minibatch_loss(agent, rows, args)
        return loss, metrics | {"approx_kl": torch.tensor(next(kls))}

    args = Args(num_minibatches=2, update_epochs=3, target_kl=0.02)
    found = update(agent, torch.optim.Adam(agent.parameters(), 1e-3), batch, args, fixed)
    assert found["approx_kl"] == pytest.approx(0.0225) and next(kls) == 0.05, "two epochs of two minibatches"


# --- Environments ----------------------------------------------------------------------------------------------------


class Walk(gym.Env):
    """Random observations and rewards; an episode ends by itself after 3 to 8 steps, or by the time limit of 6."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gym.spaces.Box(np.array([-1, -3], np.float32), np.array([1, 5], np.float32))

    def look(self) -> np.ndarray:
        return np.array([self.steps, 5 + self.np_random.normal(), self.total])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.total, self.length = 0, 0.0, int(self.np_random.integers(3, 9))
        return self.look(), {}

    def step(self, action):
        self.steps, self.total = self.steps + 1, self.total + float(action[0] + 0.1 * action[1])
        reward = float(self.np_random.normal()) + self.total
        return self.look(), reward, self.steps >= self.length, False, {}


class Probe(gym.Env):
    """A task whose right answer is known; `kind` says which."""

    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, kind: str):
        self.kind = kind

    def look(self) -> np.ndarray:
        observation = {"observation": self.sign, "delayed": self.steps, "both": self.sign}.get(self.kind, 0.0)
        return np.array([observation], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.sign = 0, float(self.np_random.choice([-1, 1]))
        return self.look(), {}

    def step(self, action):
        self.steps += 1
        reward, done = 1.0, self.kind != "endless"
        if self.kind == "observation":
            reward = self.sign
        if self.kind == "delayed":  # nothing, then 1
            reward, done = float(self.steps == 2), self.steps == 2
        if self.kind == "action":
            reward = -float((action[0] - 0.5) ** 2)
        if self.kind == "both":
            reward = -float((action[0] - 0.6 * self.sign) ** 2)
        return self.look(), reward, done, False, {}


gym.register("test/Walk-v0", Walk, max_episode_steps=6)
for kind in ("constant", "observation", "delayed", "action", "both"):
    gym.register(f"test/{kind}-v0", Probe, kwargs={"kind": kind})
gym.register("test/endless-v0", Probe, kwargs={"kind": "endless"}, max_episode_steps=5)

RAW = {"env_id": "test/Walk-v0", "num_envs": 3, "seed": 4, "norm_obs": False, "norm_reward": False}


def twin(args: Args) -> SyncVectorEnv:
    """The same environments, without what the script does about them."""
    make = [lambda: gym.make(args.env_id)] * args.num_envs
    return SyncVectorEnv(make, autoreset_mode=AutoresetMode.SAME_STEP)


def moments(rows: list) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of all rows, together with the 1e-4 of a row of mean 0 and variance 1 that it begins with."""
    rows = np.concatenate(rows)
    total = len(rows) + 1e-4
    mean = rows.sum(0) / total
    return mean, (((rows - mean) ** 2).sum(0) + 1e-4 * (1 + mean**2)) / total


def random_actions(steps: int, count: int = 3) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (steps, count, 2)).astype(np.float32)


def test_running_mean_and_std():
    """Those of numpy over all rows, however these were cut into batches."""
    rows = np.random.default_rng(0).normal(3, 2, (1000, 4))
    found = []
    for cuts in ([], [1], [500], [10, 20, 999], range(1, 1000)):
        stats = RunningMeanStd((4,))
        for piece in np.split(rows, cuts):
            stats.update(piece)
        np.testing.assert_allclose(stats.mean, rows.mean(0), rtol=1e-6)
        np.testing.assert_allclose(stats.var, rows.var(0), rtol=1e-5)
        found.append((stats.mean, stats.var))
        for ours, theirs in zip(found[-1], moments([rows])):
            np.testing.assert_allclose(ours, theirs, rtol=1e-12)
        assert stats.count == pytest.approx(1000.0001, rel=1e-12)
    copy = RunningMeanStd((4,))
    copy.load_state_dict(stats.state_dict())
    stats.update(rows[:7] + 1)
    assert np.array_equal(copy.mean, found[-1][0]) and np.array_equal(copy.var, found[-1][1]), "a copy of its own"
    copy.update(rows[:7] + 1)
    assert np.array_equal(copy.mean, stats.mean) and np.array_equal(copy.var, stats.var) and copy.count == stats.count


def test_running_std_of_large_numbers():
    """A mean of a million and a standard deviation of one: squares must not be subtracted from each other."""
    rows, stats = np.random.default_rng(0).normal(1e6, 1, (3000, 1)), RunningMeanStd((1,))
    for piece in np.split(rows, 300):
        stats.update(piece)
    np.testing.assert_allclose(stats.var, moments([rows])[1], rtol=1e-6)


def test_running_std_of_numbers():
    stats, rewards = RunningMeanStd(), np.array([1.0, 2.0, 6.0])
    stats.update(rewards)
    assert (stats.mean, stats.var) == (pytest.approx(3, rel=1e-4), pytest.approx(14 / 3, rel=1e-3))


def test_observations_are_normalised_and_clipped():
    stats, args = RunningMeanStd((2,)), Args()
    stats.mean, stats.var = np.array([1.0, -2.0]), np.array([4.0, 0.25])
    found = normalise(np.array([[3.0, -2.5], [1e6, -1e6], [1.0, -2.0]]), stats, args)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [[1, -1], [10, -10], [0, 0]], atol=1e-6)
    raw = normalise(np.array([[3.0, 1e6]]), stats, Args(norm_obs=False))
    assert raw.dtype == np.float32 and raw.tolist() == [[3.0, 1e6]]


def test_steps_of_several_environments():
    """Against the bare environments and plain sums: observations, rewards, ends, last observations, finished episodes.

    The reward's unit is the standard deviation of the discounted sum of rewards, as in gymnasium's NormalizeReward,
    except that the sum begins at 0 after every end of an episode, not only where it ended by itself.
    """
    args = Args(**RAW | {"norm_obs": True, "norm_reward": True, "gamma": 0.9})
    ours, bare = Environments(args), twin(args)
    rows, sums, discounted = [bare.reset(seed=4)[0]], [], np.zeros(3)
    totals, lengths, kinds = [0.0] * 3, [0] * 3, set()
    np.testing.assert_allclose(ours.observations, (rows[0] - moments(rows)[0]) / np.sqrt(moments(rows)[1] + 1e-8), 1e-4)
    for actions in random_actions(60):
        rewards, ends, cut, episodes = ours.step(actions)
        observations, raw, terminated, truncated, info = bare.step(actions)
        over = terminated | truncated
        discounted = 0.9 * discounted + raw
        sums.append(discounted.copy())
        np.testing.assert_allclose(rewards, np.clip(raw / np.sqrt(moments(sums)[1] + 1e-8), -10, 10), rtol=1e-9)
        assert ends.tolist() == over.tolist()
        mean, var = moments(rows)
        finished = []
        for n in range(3):
            totals[n], lengths[n] = totals[n] + raw[n], lengths[n] + 1
            assert (n in cut) == (truncated[n] and not terminated[n])
            if n in cut:
                last = (info["final_obs"][n] - mean) / np.sqrt(var + 1e-8)
                assert info["final_obs"][n][0] == 6 and observations[n][0] == 0, "not the next episode's"
                np.testing.assert_allclose(cut[n], np.clip(last, -10, 10), rtol=1e-4, atol=1e-5)
            if over[n]:
                finished.append((pytest.approx(totals[n]), lengths[n]))
                kinds.add((bool(terminated[n]), bool(truncated[n])))
                totals[n], lengths[n], discounted[n] = 0.0, 0, 0.0
        assert episodes == finished
        rows.append(observations)
        mean, var = moments(rows)
        expected = np.clip((observations - mean) / np.sqrt(var + 1e-8), -10, 10)
        np.testing.assert_allclose(ours.observations, expected, rtol=1e-4, atol=1e-5)
    assert kinds == {(True, False), (False, True), (True, True)}, "all kinds of ends were there"


def test_raw_observations_and_rewards():
    args = Args(**RAW)
    ours, bare = Environments(args), twin(args)
    np.testing.assert_array_equal(ours.observations, bare.reset(seed=4)[0].astype(np.float32))
    for actions in random_actions(20):
        observations, raw, *_ = bare.step(actions)
        np.testing.assert_array_equal(ours.step(actions)[0], raw)
        np.testing.assert_array_equal(ours.observations, observations.astype(np.float32))


def test_scaled_rewards_are_clipped():
    ours = Environments(Args(**RAW | {"norm_reward": True}))
    ours.return_stats.var, ours.return_stats.count = 1e-12, 1e12
    rewards = np.concatenate([ours.step(actions)[0] for actions in random_actions(10)])
    assert set(np.abs(rewards)) == {10.0} and set(np.sign(rewards)) == {-1.0, 1.0}


def rollout(policy: str = "poisson", **values):
    """Environments, agent, the buffer that collect filled with 40 steps of three environments, and its episodes."""
    args = Args(**RAW | {"policy": policy, "num_steps": 40, "gamma": 0.9, "gae_lambda": 0.8} | values)
    envs, agent = Environments(args), agent_of(policy)
    zeros = {name: torch.zeros(40, 3) for name in ("logprobs", "advantages", "values", "returns", "rewards", "dones")}
    dtype = torch.int64 if policy in ATOMS else torch.float32
    buffer = zeros | {"observations": torch.zeros(40, 3, 3), "actions": torch.zeros(40, 3, 2, dtype=dtype)}
    return args, agent, buffer, collect(envs, agent, buffer), envs


@pytest.mark.parametrize("bootstrap", [True, False])
@pytest.mark.parametrize("policy", ["poisson", "gaussian"])
def test_collect(policy, bootstrap):
    """The whole buffer against bare environments that are given the same actions, and a plain loop over time."""
    args, agent, buffer, episodes, envs = rollout(policy, bootstrap_truncation=bootstrap)
    bare, totals, expected, cut = twin(args), np.zeros(3), [], 0
    observations, rewards, alive = bare.reset(seed=4)[0], np.zeros((40, 3)), np.ones((40, 3))
    for t in range(40):
        np.testing.assert_allclose(buffer["observations"][t], observations, rtol=1e-5, atol=1e-5)
        actions = buffer["actions"][t].numpy()
        scaled = np.array([-1, -3]) + np.array([2, 8]) * actions / 10
        actions = scaled if policy == "poisson" else actions.clip([-1, -3], [1, 5])
        observations, raw, terminated, truncated, info = bare.step(actions.astype(np.float32))
        rewards[t], totals = raw, totals + raw
        for n in np.flatnonzero(terminated | truncated):
            expected.append(pytest.approx(totals[n], abs=1e-4))
            totals[n], alive[t, n] = 0, 0
            if truncated[n] and not terminated[n] and bootstrap:
                cut += 1
                rewards[t, n] += 0.9 * agent.values(tensor(info["final_obs"][n].tolist(), torch.float32)).item()
    assert [total for total, _ in episodes] == expected and len(episodes) > 10 and (cut > 3) == bootstrap
    np.testing.assert_array_equal(buffer["dones"], 1 - alive)
    np.testing.assert_allclose(envs.observations, observations, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        values = agent.values(buffer["observations"])
        following = torch.cat([values, agent.values(tensor(observations.tolist(), torch.float32))[None]]).double()
        flat = buffer["observations"].flatten(0, 1), buffer["actions"].flatten(0, 1)
        logprobs = agent.distribution(flat[0]).log_prob(flat[1]).view(40, 3)
    assert_close(buffer["values"], values, 1e-6)
    assert_close(buffer["logprobs"], logprobs, 1e-5)
    advantages = np.zeros((41, 3))
    for t in reversed(range(40)):
        delta = rewards[t] + 0.9 * alive[t] * following[t + 1].numpy() - values[t].numpy()
        advantages[t] = delta + 0.9 * 0.8 * alive[t] * advantages[t + 1]
    assert_close(buffer["advantages"].double(), torch.from_numpy(advantages[:40]), 1e-4)
    assert_close(buffer["returns"], buffer["advantages"] + buffer["values"], 1e-5)


@pytest.mark.parametrize("policy", POLICIES)
def test_collect_samples_actions_of_the_policy(policy):
    """Buffered actions are samples in the policy's own range, no two environments alike."""
    _, agent, buffer, _, _ = rollout(policy)
    actions = buffer["actions"].double()
    assert not torch.equal(actions[:, 0], actions[:, 1]) and actions[..., 0].std() > 0.1
    limits = {"beta": (0, 1), "bang_bang": (0, 1)} | dict.fromkeys(("gaussian", "tanh_gaussian"), (-9, 9))
    low, high = limits.get(policy, (0, 10))
    assert actions.min() >= low and actions.max() <= high and buffer["logprobs"].isfinite().all()
    assert (actions.max() > 1) == (policy not in ("beta", "bang_bang"))


# --- Probing tasks, each with one thing to learn ---------------------------------------------------------------------

QUICK = {"num_envs": 8, "num_steps": 16, "num_minibatches": 1, "update_epochs": 8, "hidden_size": 16}
QUICK |= {"learning_rate": 1e-2, "anneal_lr": False, "clip_vloss": False, "norm_obs": False, "norm_reward": False}
QUICK |= {"eval_episodes": 0, "total_timesteps": 128 * 20}


@pytest.fixture
def learn(tmp_path, monkeypatch):
    """Trains on a task with small settings, and returns the agent of its last checkpoint."""
    monkeypatch.setattr(unimodal_poisson.signal, "signal", lambda number, handler: None)  # pytest keeps its own

    def trained(env_id: str, name: str = "run", **values) -> Agent:
        run_dir = str(tmp_path / name)
        unimodal_poisson.train(Args(**QUICK | {"env_id": env_id, "output_dir": run_dir} | values))
        return load_run(run_dir)[0]

    return trained


def value_at(agent: Agent, observation: float) -> float:
    return agent.values(torch.tensor([[observation]])).item()


@torch.no_grad()
def action_at(agent: Agent, observation: float) -> float:
    """The likeliest action in the environment's units."""
    return agent.to_environment(agent.distribution(torch.tensor([[observation]])).mode).item()


def test_probe_value_of_a_constant_reward(learn):
    assert value_at(learn("test/constant-v0", total_timesteps=128 * 10), 0.0) == pytest.approx(1, abs=0.05)


def test_probe_value_depends_on_the_observation(learn):
    agent = learn("test/observation-v0")
    assert value_at(agent, 1.0) == pytest.approx(1, abs=0.1) and value_at(agent, -1.0) == pytest.approx(-1, abs=0.1)


def test_probe_discounting(learn):
    """The reward comes at the second step: the first state is worth gamma."""
    agent = learn("test/delayed-v0", gamma=0.7)
    assert value_at(agent, 0.0) == pytest.approx(0.7, abs=0.05) and value_at(agent, 1.0) == pytest.approx(1, abs=0.05)


def test_probe_time_limit(learn):
    """1 at every step without an end is worth 1 / (1 - 0.9) = 10. The time limit of 5 steps is not the task's end; to
    who takes it for that, a state is worth what is left on average, (1 + 1.9 + 2.71 + 3.439 + 4.0951) / 5 = 2.63."""
    assert value_at(learn("test/endless-v0", gamma=0.9), 0.0) == pytest.approx(10, abs=0.7)
    without = learn("test/endless-v0", "without", bootstrap_truncation=False, gamma=0.9)
    assert value_at(without, 0.0) == pytest.approx(2.63, abs=0.3)


@pytest.mark.parametrize("policy", ["poisson", "gaussian", "tanh_gaussian", "beta", "categorical", "ordinal"])
def test_probe_action(learn, policy):
    """The reward is highest for the action 0.5, the same in every state. (At the default temperature of 2.5 the Poisson
    policy cannot be narrow around an atom in the middle; poisson_repo cannot be at any.)"""
    agent = learn("test/action-v0", policy=policy, temperature=0.25)
    assert action_at(agent, 0.0) == pytest.approx(0.5, abs=0.21)


def test_probe_bang_bang(learn):
    """Of the two ends, 1 is nearer to 0.5."""
    assert action_at(learn("test/action-v0", policy="bang_bang", total_timesteps=128 * 10), 0.0) == 1


@pytest.mark.parametrize("policy, rate_init", [("poisson", 6.0), ("gaussian", None)])
def test_probe_action_depends_on_the_observation(learn, policy, rate_init):
    """A rate of 6 begins in the middle of 11 atoms."""
    agent = learn("test/both-v0", policy=policy, temperature=0.25, rate_init=rate_init)
    for sign in (-1.0, 1.0):
        assert action_at(agent, sign) == pytest.approx(0.6 * sign, abs=0.25)


@pytest.mark.parametrize("policy", POLICIES)
def test_short_way_to_logprob_and_entropy(policy):
    """What the update uses is log_prob and entropy of action_distribution, with the same gradients."""
    torch.manual_seed(0)
    atoms = 2 if policy == "bang_bang" else 11
    last = {"poisson": (), "poisson_repo": (), "categorical": (atoms,), "ordinal": (atoms,)}.get(policy, (2,))
    head = torch.randn(6, 3, *last, dtype=torch.float64, requires_grad=True)
    distribution = action_distribution(head, policy, atoms, 2.5)
    actions = distribution.sample()
    short = logprob_and_entropy(head, actions, policy, atoms, 2.5)
    for found, expected in zip(short, (distribution.log_prob(actions), distribution.entropy())):
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(value.sum(), head, retain_graph=True)[0] for value in (found, expected)]
        torch.testing.assert_close(*gradients)
