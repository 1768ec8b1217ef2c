"""PPO with the unimodal Poisson policy: the numbers of other people's code, closed forms, and small probing tasks."""

import json
import math
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
    action_distribution,
    atom_metrics,
    collect,
    environment_actions,
    gae,
    load_run,
    make_buffer,
    minibatch_loss,
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
    return torch.tensor(np.array(values, dtype=object).astype(np.float64), dtype=dtype)


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


# --- Reference: the output of other people's code --------------------------------------------------------------------

# Every number is from one of the sources that its case names in the file: udprl at 4d734da5db61 (the paper's code, run
# in float32), onpolicybaselines at 58d401622b38 (the ordinal policy's authors) and torchrl 0.14.1.
LOGITS, PROBABILITIES, GRADIENTS = 2e-4, 1e-5, 1e-3  # what their float32 is good for; the last is relative


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
    single = rate.float().requires_grad_()  # as in a training: both of them round
    final = poisson_repo_logits(single, num_atoms, temperature)
    assert_close(final, outputs["official_final_logits_B_A_K"], 2 * LOGITS)
    over_atoms(final).log_prob(torch.tensor(outputs["actions_B_A"])).sum().backward()
    assert single.grad.isfinite().all(), "also where the released code gives NaN"


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
    names = "h_last_two_atoms", "softmax_last_two", "final_logit_last_two"
    theirs, whole = [tensor(outputs[name]) for name in names], inputs["K"] < 35
    for dtype in (torch.float32, torch.float64):
        rate = torch.tensor([[inputs["lambda"]]], dtype=dtype)
        pmf = poisson_logits(rate, inputs["K"], 1.0)[0, 0, -2:]
        plain = poisson_logits(rate, inputs["K"], inputs["tau"]).softmax(-1)[0, 0, -2:]
        final = poisson_repo_logits(rate, inputs["K"], inputs["tau"])[0, 0, -2:]
        assert theirs[0].isinf().tolist() == [False, not whole]
        assert_close(pmf[: 1 + whole], theirs[0][: 1 + whole], LOGITS)
        if whole:
            assert_close(plain, theirs[1], PROBABILITIES)
            assert_close(final, theirs[2], LOGITS)
        else:  # atom 34 stands for the count 35: ln(17^35 e^-17 / 35!) and so on
            assert pmf[1].item() == pytest.approx(35 * math.log(17) - 17 - math.lgamma(36), abs=1e-4)
            assert (plain[1] / plain[0]).item() == pytest.approx((17 / 35) ** (1 / 2.5), abs=1e-5)
            assert final[1].item() > -10 > theirs[2][1].item()


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


# --- Properties of the policies ----------------------------------------------------------------------------------------


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
    rates = torch.logspace(-4, 4, 3000)[:, None]
    for num_atoms, temperature in ((2, 1.0), (11, 2.5), (40, 2.5)):  # what a training logs, in float32
        p = poisson_logits(rates, num_atoms, temperature).softmax(-1)
        assert atom_metrics(p)["frac_multimodal"] == 0


MODES = [(11, 2.5, {0, 9, 10}), (11, 1.0, {0, 1, 9, 10}), (15, 2.5, {0, 13, 14})]


@pytest.mark.parametrize("num_atoms, temperature, modes", MODES)
def test_atoms_that_can_be_the_mode(num_atoms, temperature, modes):
    """Those in the middle never are in the released code's policy; in `poisson` each of them can be."""
    rates = torch.logspace(-4, 5, 4000, dtype=torch.float64)
    assert set(poisson_repo_logits(rates, num_atoms, temperature).argmax(-1).tolist()) == modes
    assert set(poisson_logits(rates, num_atoms, temperature).argmax(-1).tolist()) == set(range(num_atoms))


# --- Acting ----------------------------------------------------------------------------------------------------------

LOW, HIGH = torch.tensor([-1.0, -3.0]), torch.tensor([1.0, 5.0])
SPACE = gym.spaces.Box(LOW.numpy(), HIGH.numpy())


def agent_of(policy: str, **values) -> Agent:
    """An agent for three observed numbers and two action dimensions, always the same."""
    torch.manual_seed(0)
    return Agent(3, SPACE, Args(policy=policy, **values))


def heads(policy: str, count: int = 1) -> torch.Tensor:
    """What a network may say about two action dimensions, the same for `count` states."""
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(2, 11 if policy in ("categorical", "ordinal") else 2, generator=generator)
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
    assert p.shape == (2, 2 if policy == "bang_bang" else 11)
    shares = F.one_hot(actions, p.shape[1]).double().mean(0)
    assert ((shares - p).abs() <= 5 * (p * (1 - p) / count).sqrt() + 1e-6).all(), (shares, p)
    first, second = (actions.double() - actions.double().mean(0)).T
    limit = 5 * first.std() * second.std() / count**0.5
    assert (first * second).mean().abs() < limit, "dimensions are independent"


IN_UNITS = [  # policy, sampled action, what the task gets
    ("poisson", [1, 9], [-0.8, 4.2]),
    ("bang_bang", [0, 1], [-1.0, 5.0]),
    ("gaussian", [0.3, 4.5], [0.3, 4.5]),
    ("gaussian", [-7.0, 7.0], [-1.0, 5.0]),
    ("tanh_gaussian", [0.5, 0.5], [0.5, 3.0]),
    ("tanh_gaussian", [-1.5, 1.5], [-1.0, 5.0]),
    ("beta", [0.5, 0.25], [0.0, -1.0]),
]


@pytest.mark.parametrize("policy, actions, expected", IN_UNITS)
def test_actions_in_the_environments_units(policy, actions, expected):
    found = agent_of(policy).to_environment(torch.tensor([actions]))
    assert_close(torch.tensor(found), torch.tensor([expected]), 1e-6)


def test_first_rate():
    found = F.softplus(agent_of("poisson", rate_init=6.0).head(torch.randn(20, 3)))
    assert_close(found, torch.full((20, 2), 6.0), 0.3)


# --- Advantages and loss ---------------------------------------------------------------------------------------------


def loss_of(ratios, advantages, values=0.0, old_values=0.0, returns=0.0, entropy=0.0, **options):
    """ppo_loss for these ratios, its metrics, and its gradient by log-probability, value and entropy."""
    ratios = tensor(ratios)
    columns = advantages, values, old_values, returns, entropy
    columns = [torch.as_tensor(x, dtype=torch.float64).expand_as(ratios).clone() for x in columns]
    advantages, values, old_values, returns, entropy = columns
    old = torch.full_like(ratios, 0.7)
    leaves = [x.requires_grad_() for x in (old + ratios.log(), values, entropy)]
    options = {"clip_coef": 0.2, "ent_coef": 0.0, "vf_coef": 0.0, "norm_adv": False} | options
    loss, metrics = ppo_loss(leaves[0], old, advantages, values, old_values, returns, entropy, **options)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return loss.item(), {name: value.item() for name, value in metrics.items()}, gradients


BRANCHES = [  # ratio, advantage, loss, gradient by the log-probability
    (1.5, 2.0, -2.4, 0.0),  # too far already in the good direction: 1.2 counts
    (1.5, -2.0, 3.0, 3.0),  # the wrong direction: nothing is clipped
    (0.5, 2.0, -1.0, -1.0),
    (0.5, -2.0, 1.6, 0.0),  # 0.8 counts
    (1.1, 2.0, -2.2, -2.2),  # between 0.8 and 1.2
    (0.9, -2.0, 1.8, 1.8),
]


def test_policy_loss_by_hand():
    ratios, advantages, losses, gradients = (tensor(list(column)) for column in zip(*BRANCHES))
    found, metrics, (by_logprob, *_) = loss_of(ratios.tolist(), advantages)
    assert found == pytest.approx(losses.mean().item()) and metrics["policy_loss"] == pytest.approx(found)
    assert_close(by_logprob, gradients / 6, 1e-9)
    assert metrics["clipfrac"] == pytest.approx(4 / 6)
    assert metrics["approx_kl"] == pytest.approx((ratios - 1 - ratios.log()).mean().item())


VALUES = [  # value, old value, return, half of the squared error that counts, gradient by the value
    (1.0, 0.0, 2.0, 0.5 * 1.8**2, 0.0),  # towards the return, but more than 0.2: the clipped value 0.2 counts
    (1.0, 0.0, -1.0, 0.5 * 2.0**2, 2.0),  # away from it: as it is
    (0.1, 0.0, 2.0, 0.5 * 1.9**2, -1.9),  # less than 0.2
    (-1.0, 0.0, -2.0, 0.5 * 1.8**2, 0.0),
    (-1.0, 0.0, 1.0, 0.5 * 2.0**2, -2.0),
    (3.0, 1.0, 2.0, 0.5 * 1.0**2, 1.0),  # beyond the return: |3 - 2| = 1 is more than |1.2 - 2|
]


def test_value_loss_by_hand():
    value, old, target, losses, gradients = (tensor(list(column)) for column in zip(*VALUES))
    found, metrics, (_, by_value, _) = loss_of([1.0] * 6, 0.0, value, old, target, vf_coef=0.5)
    assert metrics["value_loss"] == pytest.approx(losses.mean().item()) == pytest.approx(2 * found)
    assert_close(by_value, 0.5 * gradients / 6, 1e-9)
    plain = loss_of([1.0] * 6, 0.0, value, old, target, vf_coef=0.5, clip_vloss=False)
    assert plain[0] == pytest.approx(0.25 * (value - target).square().mean().item())
    assert_close(plain[2][1], 0.5 * (value - target) / 6, 1e-9)


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


@pytest.mark.parametrize("policy, ent_coef", [("poisson", 0.05), ("gaussian", 0.0)])
def test_minibatch_loss(policy, ent_coef):
    """What it hands to ppo_loss: everything in its place, coefficients of Args."""
    agent = agent_of(policy)
    batch = batch_of(agent)
    for name in ("logprobs", "values"):
        batch[name] = batch[name] + 0.4 * torch.randn(16)
    flags = {"clip_coef": 0.3, "ent_coef": ent_coef, "vf_coef": 0.7, "norm_adv": False, "clip_vloss": True}
    loss, metrics = minibatch_loss(agent, batch, Args(policy=policy, **flags))
    distribution, values = agent.distribution(batch["observations"]), agent.values(batch["observations"])
    new, entropy = distribution.log_prob(batch["actions"]), distribution.entropy()
    old = [batch[name] for name in ("logprobs", "advantages", "values", "returns")]
    expected = ppo_loss(new, old[0], old[1], values, old[2], old[3], entropy, **flags)[0]
    assert_close(loss, expected, 1e-6)
    assert metrics["entropy"].item() == pytest.approx(entropy.mean().item())
    for ours, theirs in zip(*(torch.autograd.grad(x, [*agent.parameters()]) for x in (loss, expected))):
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
    """Episodes of one step, in which 0.6 times the sign that is seen is best; or, endless, a reward of 1 every step."""

    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, endless: bool):
        self.endless = endless

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.sign = 0.0 if self.endless else float(self.np_random.choice([-1, 1]))
        return np.array([self.sign], np.float32), {}

    def step(self, action):
        reward = 1.0 if self.endless else -float((action[0] - 0.6 * self.sign) ** 2)
        return np.array([self.sign], np.float32), reward, not self.endless, False, {}


gym.register("test/Walk-v0", Walk, max_episode_steps=6)
gym.register("test/sign-v0", Probe, kwargs={"endless": False})
gym.register("test/endless-v0", Probe, kwargs={"endless": True}, max_episode_steps=5)

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


def test_steps_of_several_environments():
    """Against the bare environments and plain sums: observations, rewards, ends, last observations, finished episodes.

    The reward's unit is the standard deviation of the discounted sum of rewards, as in gymnasium's NormalizeReward,
    except that the sum begins at 0 after every end of an episode, not only where it ended by itself.
    """
    args = Args(**RAW | {"norm_obs": True, "norm_reward": True, "gamma": 0.9})
    ours, bare = Environments(args), twin(args)
    rows, sums, discounted = [bare.reset(seed=4)[0]], [], np.zeros(3)
    totals, lengths, kinds = np.zeros(3), np.zeros(3), set()
    for actions in random_actions(60):
        mean, var = moments(rows)
        rewards, ends, cut, episodes = ours.step(actions)
        observations, raw, terminated, truncated, info = bare.step(actions)
        discounted, totals, lengths = 0.9 * discounted + raw, totals + raw, lengths + 1
        sums.append(discounted.copy())
        np.testing.assert_allclose(rewards, np.clip(raw / np.sqrt(moments(sums)[1] + 1e-8), -10, 10), rtol=1e-9)
        assert ends.tolist() == (terminated | truncated).tolist()
        assert set(cut) == set(np.flatnonzero(truncated & ~terminated))
        for n, found in cut.items():  # not the next episode's
            last = (info["final_obs"][n] - mean) / np.sqrt(var + 1e-8)
            np.testing.assert_allclose(found, np.clip(last, -10, 10), rtol=1e-4, atol=1e-5)
        over = np.flatnonzero(ends)
        assert episodes == [(pytest.approx(totals[n]), lengths[n]) for n in over]
        kinds |= {(terminated[n], truncated[n]) for n in over}
        totals[over] = lengths[over] = discounted[over] = 0
        rows.append(observations)
        mean, var = moments(rows)
        expected = np.clip((observations - mean) / np.sqrt(var + 1e-8), -10, 10)
        np.testing.assert_allclose(ours.observations, expected, rtol=1e-4, atol=1e-5)
    assert len(kinds) == 3, "all kinds of ends were there"


@pytest.mark.parametrize("policy, bootstrap", [("poisson", True), ("gaussian", False)])
def test_collect(policy, bootstrap):
    """The whole buffer against bare environments that are given the same actions, and a plain loop over time."""
    flags = {"policy": policy, "num_steps": 40, "gamma": 0.9, "gae_lambda": 0.8, "bootstrap_truncation": bootstrap}
    args, agent = Args(**RAW | flags), agent_of(policy)
    envs = Environments(args)
    buffer = make_buffer(envs, agent)
    episodes = collect(envs, agent, buffer)
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


# --- Probing tasks, each with one thing to learn ---------------------------------------------------------------------

QUICK = {"num_envs": 8, "num_steps": 16, "num_minibatches": 1, "update_epochs": 8, "hidden_size": 16}
QUICK |= {"learning_rate": 1e-2, "anneal_lr": False, "clip_vloss": False, "norm_obs": False, "norm_reward": False}
QUICK |= {"eval_episodes": 0, "total_timesteps": 128 * 20}


@pytest.fixture
def learn(tmp_path):
    """Trains on a task with small settings, and returns the agent of its last checkpoint."""

    def trained(env_id: str, **values) -> Agent:
        run_dir = str(tmp_path / "run")
        unimodal_poisson.train(Args(**QUICK | {"env_id": env_id, "output_dir": run_dir} | values))
        return load_run(run_dir)[0]

    return trained


@pytest.mark.parametrize("bootstrap, value, allowed", [(True, 10, 0.7), (False, 2.63, 0.3)])
def test_probe_time_limit(learn, bootstrap, value, allowed):
    """1 at every step without an end is worth 1 / (1 - 0.9) = 10. The time limit of 5 steps is not the task's end; to
    who takes it for that, a state is worth what is left on average, (1 + 1.9 + 2.71 + 3.439 + 4.0951) / 5 = 2.63."""
    agent = learn("test/endless-v0", bootstrap_truncation=bootstrap, gamma=0.9)
    assert agent.values(torch.zeros(1, 1)).item() == pytest.approx(value, abs=allowed)


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "poisson_repo"])
def test_probe_action(learn, policy):
    """The best action depends on what is seen. (At the default temperature of 2.5 the Poisson policy cannot be narrow
    around an atom in the middle, where a rate of 6 begins; poisson_repo cannot be at any.)"""
    agent = learn("test/sign-v0", policy=policy, temperature=0.25, rate_init=6.0 if policy == "poisson" else None)
    best, allowed = (1.0, 0.05) if policy in ("bang_bang", "beta") else (0.6, 0.25)
    for sign in (-1.0, 1.0):  # beta's mean is near 0.7 sign, but of alpha and beta one is 1, so its mode is an end
        with torch.no_grad():
            actions = agent.distribution(torch.tensor([[sign]])).mode
        assert agent.to_environment(actions).item() == pytest.approx(best * sign, abs=allowed)

