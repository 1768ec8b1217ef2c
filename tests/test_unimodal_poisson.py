"""PPO with the unimodal Poisson policy: other people's numbers, closed forms, probing tasks."""

import json
import math
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch.distributions import Beta, Categorical, Independent, Normal
from torch.nn import functional as F

from algorithms import unimodal_poisson
from algorithms.unimodal_poisson import Args, poisson_logits, poisson_repo_logits, ppo_loss

ATOMS = ["poisson", "poisson_repo", "categorical", "ordinal"]  # policies over atoms
REFERENCE = Path(__file__).parent / "reference" / "unimodal_poisson.json"
CASES = json.loads(REFERENCE.read_text())["cases"]
BY_NAME = {case["name"]: case for case in CASES}


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


def head_of(policy: str, **values):
    """The head of a policy for two action dimensions."""
    return unimodal_poisson.HEADS[policy](LOW, HIGH, Args(policy=policy, **values))


LOW, HIGH = torch.tensor([-1.0, -3.0]), torch.tensor([1.0, 5.0])

# Every number is from one of the sources that its case names in the file: udprl at 4d734da5db61 (the paper's code, run
# in float32), onpolicybaselines at 58d401622b38 (the ordinal policy's authors) and torchrl 0.14.1.
LOGITS, PROBABILITIES, GRADIENTS = 2e-4, 1e-5, 1e-3  # what their float32 is good for; the last is relative


@cases("poisson_head")
def test_reference_head(case):
    """Log-PMF and softmax(log-PMF / temperature), which is `poisson`, and the released code's final logits."""
    inputs, outputs = case["inputs"], case["outputs"]
    rate, num_atoms, temperature = tensor(inputs["lambda_B_A"]), inputs["K"], inputs["tau"]
    log_pmf = poisson_logits(rate, num_atoms, 1.0) - rate[..., None]  # the constant that cancels
    assert poisson_logits(0 * rate, num_atoms, 1.0).isfinite().all()  # where softplus underflows
    assert_close(log_pmf, outputs["h_logpmf_k1_to_K_B_A_K"], LOGITS)
    plain = poisson_logits(rate, num_atoms, temperature).softmax(-1)
    assert_close(plain, outputs["softmax_h_over_tau_B_A_K"], PROBABILITIES)
    head = head_of("poisson", num_atoms=num_atoms, temperature=temperature)
    assert_close(head.logits(inverse_softplus(rate)[..., None]).softmax(-1), plain, 1e-9)
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
    head = head_of("poisson_repo", num_atoms=num_atoms, temperature=temperature)
    network = inverse_softplus(rate)[..., None]  # (B,A,1), what the network would say
    assert_close(head.entropy(network), outputs["entropy_sum_over_dims_B"], PROBABILITIES)
    negated = -head.log_prob(network, actions)
    assert_close(negated, outputs["neglogp_sum_over_dims_B"], LOGITS, 1e-5)
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
        pmf = poisson_logits(rate, inputs["K"], 1.0)[0, 0, -2:] - inputs["lambda"]
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


def test_reference_ordinal_is_that_of_the_paper():
    """(c) torchrl computes eq. 4 of arXiv 1901.10500, as we do. The authors' own code (a) and udprl's copy (b) sum over
    another axis, which no argument of ours expresses; here (K - i) ln s_i + i ln(1 - s_i) shows that it is theirs."""
    case = BY_NAME["ordinal_logits_three_codes"]
    scores, outputs = tensor(case["inputs"]["m_pre_sigmoid_B_A_K"]), case["outputs"]
    assert_close(unimodal_poisson.ordinal_logits(scores), outputs["c_paper_eq4_via_torchrl_logits"], LOGITS)
    below = torch.arange(5, dtype=torch.float64)
    slipped = (5 - below) * F.logsigmoid(scores) + below * F.logsigmoid(-scores)
    for name in ("a_tang_agrawal_code_logits", "b_udprl_code_logits"):
        assert_close(slipped, outputs[name], LOGITS)
        difference = unimodal_poisson.ordinal_logits(scores).softmax(-1) - tensor(outputs[name]).softmax(-1)
        assert difference.abs().max() > 0.1


@cases("discretizing_wrapper")
def test_reference_action_values(case):
    """The value of every atom: evenly spaced over the task's own range, both ends among them."""
    low, high, num_atoms = tensor(case["inputs"]["low"]), tensor(case["inputs"]["high"]), case["inputs"]["K"]
    indices = torch.arange(num_atoms)[:, None].expand(-1, len(low))  # (K,A)
    head = unimodal_poisson.HEADS["poisson"](low, high, Args(num_atoms=num_atoms))
    assert_close(head.to_env(indices), case["outputs"]["action_for_index_K_A"], 1e-6)


def test_reference_gae():
    """udprl's Runner; its returns and advantages are flattened environment by environment."""
    case = BY_NAME["gae_returns"]
    inputs, outputs = case["inputs"], case["outputs"]
    names = ("rewards_T_N", "dones_after_step_T_N", "values_T_N", "last_values_N")
    found = unimodal_poisson.gae(*(tensor(inputs[name]) for name in names), inputs["gamma"], inputs["lam"])
    for ours, name in zip(found, ("advantages_envmajor_NT", "returns_envmajor_NT")):
        assert_close(ours.T.flatten(), outputs[name], 2e-6)


def outputs_of(policy: str, count: int = 1) -> torch.Tensor:
    """What a network may say about two action dimensions, the same for `count` states."""
    generator = torch.Generator().manual_seed(1)
    size = head_of(policy).num_outputs
    outputs = torch.randn(2, size, generator=generator)
    if policy.startswith("poisson"):
        outputs = torch.tensor([[0.3], [4.0]])  # a rate of 0.85 and one of 4.02
    return outputs.expand(count, 2, size)


@pytest.mark.parametrize("policy", ATOMS)
def test_samples_have_the_probabilities_of_the_policy(policy):
    """40,000 actions of each dimension: every atom's share within five standard deviations."""
    torch.manual_seed(0)
    count = 40_000
    head = head_of(policy, temperature=1.7)
    actions = head.sample(outputs_of(policy, count))
    p = head.logits(outputs_of(policy)).softmax(-1)[0].double()  # (A,K)
    shares = F.one_hot(actions, 11).double().mean(0)
    assert ((shares - p).abs() <= 5 * (p * (1 - p) / count).sqrt() + 1e-6).all(), (shares, p)
    first, second = (actions.double() - actions.double().mean(0)).T
    limit = 5 * first.std() * second.std() / count**0.5
    assert (first * second).mean().abs() < limit, "dimensions are independent"


def test_samples_of_a_gaussian():
    torch.manual_seed(0)
    head = head_of("gaussian")
    head.log_std.data = torch.tensor([-1.0, 0.5])
    samples = head.sample(outputs_of("gaussian", 40_000))
    assert_close(samples.mean(0), outputs_of("gaussian")[0, :, 0], 0.05)
    assert_close(samples.std(0), head.log_std.exp(), 0.05)


@pytest.mark.parametrize("policy", unimodal_poisson.HEADS)
def test_log_prob_and_entropy(policy):
    """Against torch.distributions."""
    torch.manual_seed(0)
    head = head_of(policy)
    outputs = outputs_of(policy, 5)
    if policy == "gaussian":
        head.log_std.data = torch.tensor([-1.0, 0.5])
        expected = Normal(outputs[..., 0], head.log_std.exp().expand(5, 2))
    elif policy == "beta":
        expected = Beta(*(F.softplus(outputs) + 1).unbind(-1))
    else:
        expected = Categorical(logits=head.logits(outputs))
    expected = Independent(expected, 1)
    actions = head.sample(outputs)
    assert_close(head.log_prob(outputs, actions), expected.log_prob(actions).detach(), 1e-5)
    assert_close(head.entropy(outputs), expected.entropy().detach(), 1e-5)


def test_mode_of_a_beta_that_is_uniform():
    """Both parameters are 1 in float32; elsewhere the mode is the closed form."""
    found = head_of("beta").mode(torch.tensor([[[-200.0, -200.0], [2.0, 1.0]]]))
    u, v = F.softplus(torch.tensor([2.0, 1.0])).tolist()
    assert_close(found, [[0.5, u / (u + v)]], 1e-6)


def test_a_large_rate_does_not_overflow():
    """The ratio of neighbours is e^u / k, also where e^u is more than float32 holds."""
    for policy in ("poisson", "poisson_repo"):
        head = head_of(policy, rate_link="exp", temperature=100.0)
        logits = head.logits(torch.tensor([[[100.0], [-120.0]]]))
        assert logits.isfinite().all()
    expected = torch.tensor([100.0, -120.0])[:, None] - torch.arange(2, 12).log()
    logits = head_of("poisson", rate_link="exp").logits(torch.tensor([[[100.0], [-120.0]]]))
    assert_close(logits[0].diff()[:, :10], expected[:, :10], 1e-3)


RATES = [({}, 6.0), ({"rate_link": "exp", "rate_init": 2.0}, 2.0), ({"policy": "poisson_repo"}, 0.693)]


@pytest.mark.parametrize("values, rate", RATES)
def test_first_rate(values, rate):
    agent = agent_of(**values)
    found = agent.outputs(torch.randn(20, 3))[..., 0]
    found = found.exp() if values.get("rate_link") == "exp" else F.softplus(found)
    assert_close(found, torch.full((20, 2), rate), 0.05 * rate)


def test_second_activation():
    agent = agent_of(second_activation="softplus")
    x = torch.randn(4, 3)
    actor = agent.actor
    expected = actor.last(F.softplus(actor.second(actor.first(x).tanh())))
    assert_close(agent.outputs(x)[..., 0], expected.detach(), 1e-6)


def plain_loss(row, advantage, clip_coef, ent_coef, vf_coef, clip_vloss) -> tuple[torch.Tensor, bool]:
    """The loss of one row as PPO's paper and CleanRL have it, and whether its ratio is out of range."""
    logprob, old_logprob, value, old_value, target, entropy = row
    ratio = (logprob - old_logprob).exp()
    gain = torch.min(ratio * advantage, ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantage)
    error = (value - target).square()
    if clip_vloss:
        clipped = old_value + (value - old_value).clamp(-clip_coef, clip_coef)
        error = torch.max(error, (clipped - target).square())
    return -gain + vf_coef * error / 2 - ent_coef * entropy, (ratio - 1).abs() > clip_coef


@pytest.mark.parametrize("norm_adv, clip_vloss", [(False, True), (True, False)])
def test_loss_and_gradient_equal_those_of_a_plain_loop(norm_adv, clip_vloss):
    """Advantages are normalised by the standard deviation of the population."""
    rows = 0.4 * torch.randn(200, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows.requires_grad_()
    advantages = 3 + 2 * torch.randn(200, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = (advantages - advantages.mean()) / advantages.std(correction=0) if norm_adv else advantages
    options = {"clip_coef": 0.2, "ent_coef": 0.1, "vf_coef": 0.7, "clip_vloss": clip_vloss}
    new, old, value, old_value, target, entropy = rows.unbind(1)
    columns = new, old, advantages, value, old_value, target, entropy
    loss, metrics = ppo_loss(*columns, norm_adv=norm_adv, **options)
    losses, outside = zip(*(plain_loss(row, a, **options) for row, a in zip(rows, expected)))
    plain = torch.stack(losses).mean()
    assert_close(loss, plain.detach(), 1e-6)
    assert_close(torch.autograd.grad(loss, rows)[0], torch.autograd.grad(plain, rows)[0], 1e-8)
    assert metrics["clipfrac"].item() == pytest.approx(sum(outside).item() / 200)
    ratios = (new - old).exp()
    assert metrics["approx_kl"].item() == pytest.approx((ratios - 1 - ratios.log()).mean().item())


def batch_of(agent: unimodal_poisson.Agent, size: int = 16) -> dict[str, torch.Tensor]:
    """A batch as learning_batch leaves it, of random observations and rewards."""
    generator = torch.Generator().manual_seed(5)
    observations = torch.randn(size, 3, generator=generator)
    with torch.no_grad():
        outputs = agent.outputs(observations)
        actions = agent.head.sample(outputs)
        values = agent.values(observations)
        logprobs = agent.head.log_prob(outputs, actions)
        entropy = agent.head.entropy(outputs)
    advantages = torch.randn(size, generator=generator)
    batch = {"observations": observations, "actions": actions, "logprobs": logprobs, "entropy": entropy}
    return batch | {"values": values, "advantages": advantages, "returns": advantages + values}


@pytest.mark.parametrize("policy, ent_coef", [("poisson", 0.05), ("gaussian", 0.0)])
def test_minibatch_loss(policy, ent_coef):
    """What it hands to ppo_loss: everything in its place, coefficients of Args."""
    agent = agent_of(policy=policy)
    batch = batch_of(agent)
    for name in ("logprobs", "values"):
        batch[name] = batch[name] + 0.4 * torch.randn(16)
    flags = {"clip_coef": 0.3, "ent_coef": ent_coef, "vf_coef": 0.7, "norm_adv": False}
    loss, _ = unimodal_poisson.minibatch_loss(agent, batch, Args(policy=policy, **flags))
    outputs = agent.outputs(batch["observations"])
    new = agent.head.log_prob(outputs, batch["actions"])
    values = agent.values(batch["observations"])
    old = [batch[name] for name in ("logprobs", "advantages", "values", "returns")]
    entropy = agent.head.entropy(outputs)
    expected, _ = ppo_loss(new, old[0], old[1], values, old[2], old[3], entropy, **flags)
    assert_close(loss, expected.detach(), 1e-6)
    parameters = list(agent.parameters())
    ours = torch.autograd.grad(loss, parameters)
    for found, gradient in zip(ours, torch.autograd.grad(expected, parameters)):
        assert_close(found, gradient, 1e-6)


def test_update_takes_every_row_once_an_epoch():
    agent = agent_of()
    batch = batch_of(agent)
    batch["returns"] = torch.arange(16.0)
    seen = []

    def spy(agent, rows, args):
        seen.append(rows["returns"].tolist())
        for name in batch:
            assert torch.equal(rows[name], batch[name][rows["returns"].long()]), "rows stay together"
        return unimodal_poisson.minibatch_loss(agent, rows, args)

    args = Args(num_minibatches=4, update_epochs=3)
    vector = unimodal_poisson.as_vector(agent)
    unimodal_poisson.update(agent, vector, torch.optim.Adam([vector], 1e-3), batch, args, spy)
    assert [len(rows) for rows in seen] == [4] * 12
    epochs = [sum(seen[i : i + 4], []) for i in (0, 4, 8)]
    assert all(sorted(epoch) == batch["returns"].tolist() for epoch in epochs), "each row once"
    assert epochs[0] != sorted(epochs[0]) and epochs[0] != epochs[1], "in another order each time"


def test_update_is_that_of_parameters_one_by_one():
    """Four steps of Adam with PyTorch's own clipping, on parameters that are no views of a vector."""
    agent, other = agent_of(policy="gaussian"), agent_of(policy="gaussian")
    batch = batch_of(agent)
    args = Args(policy="gaussian", num_minibatches=1, update_epochs=4, max_grad_norm=0.1)
    vector = unimodal_poisson.as_vector(agent)
    optimizer = torch.optim.Adam([vector], 1e-2, eps=1e-5, fused=True)
    unimodal_poisson.update(agent, vector, optimizer, batch, args, unimodal_poisson.minibatch_loss)
    parameters = list(other.parameters())
    optimizer = torch.optim.Adam(parameters, 1e-2, eps=1e-5)
    for _ in range(4):
        loss, _ = unimodal_poisson.minibatch_loss(other, batch, args)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        optimizer.step()
    for ours, theirs in zip(agent.parameters(), parameters):
        assert_close(ours, theirs.detach(), 1e-5)


def test_zero_grad_in_the_loop_is_noticed():
    """Gradients would go somewhere else, and nothing would be learned."""
    agent = agent_of()
    vector = unimodal_poisson.as_vector(agent)

    def edited(*given):
        agent.zero_grad()
        return unimodal_poisson.minibatch_loss(*given)

    args = Args(num_minibatches=1, update_epochs=1)
    with pytest.raises(AssertionError, match="as_vector"):
        unimodal_poisson.update(agent, vector, torch.optim.Adam([vector]), batch_of(agent), args, edited)


@pytest.mark.parametrize("target_kl, epochs", [(None, 5), (1e-9, 2)])
def test_target_kl_ends_an_update(target_kl, epochs):
    """The first minibatch is that of the old policy, with a divergence of 0."""
    agent = agent_of()
    vector = unimodal_poisson.as_vector(agent)
    seen = []

    def spy(*given):
        seen.append(1)
        return unimodal_poisson.minibatch_loss(*given)

    args = Args(num_minibatches=1, update_epochs=5, target_kl=target_kl)
    unimodal_poisson.update(agent, vector, torch.optim.Adam([vector], 0.01), batch_of(agent), args, spy)
    assert len(seen) == epochs


class Walk(gym.Env):
    """Random observations and rewards; episodes end after 3 to 8 steps, or by the limit of 6."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gym.spaces.Box(LOW.numpy(), HIGH.numpy())

    def look(self) -> np.ndarray:
        return np.array([self.steps, 5 + self.np_random.normal(), self.total])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.total, self.length = 0, 0.0, int(self.np_random.integers(3, 9))
        return self.look(), {}

    def step(self, action):
        self.steps += 1
        self.total += float(action[0] + 0.1 * action[1])
        reward = float(self.np_random.normal()) + self.total
        return self.look(), reward, self.steps >= self.length, False, {}


gym.register("test/Walk-v0", Walk, max_episode_steps=6)


def agent_of(**values) -> unimodal_poisson.Agent:
    """An agent for three observed numbers and two action dimensions, or another task; always the same."""
    args = Args(**{"env_id": "test/Walk-v0", "policy": "poisson"} | values)
    torch.manual_seed(0)
    return unimodal_poisson.Agent(unimodal_poisson.make_envs(args, 1), args)


def test_running_statistics():
    """The same as the mean and variance of all rows at once."""
    rows = np.random.default_rng(0).normal(3, 2, (50, 4))
    stats = unimodal_poisson.RunningMeanStd((4,))
    for part in np.split(rows, [1, 7, 30]):
        stats.update(part)
    np.testing.assert_allclose(stats.mean, rows.mean(0), rtol=1e-4)
    np.testing.assert_allclose(stats.var, rows.var(0), rtol=1e-3)


@pytest.mark.parametrize("policy, bootstrap", [("poisson", True), ("gaussian", False)])
def test_act_and_learning_batch(policy, bootstrap):
    """Against bare environments that are given the same actions, and a plain loop over time."""
    flags = {"policy": policy, "num_steps": 40, "num_envs": 3, "gamma": 0.9, "gae_lambda": 0.8}
    flags |= {"norm_reward": False, "bootstrap_truncation": bootstrap}
    agent = agent_of(**flags)
    args = agent.args
    agent.observation_stats.update(np.random.default_rng(0).normal(2, 3, (100, 3)))
    envs = unimodal_poisson.make_envs(args, 3)
    envs.copy = False  # it uses its arrays again, as a fast simulator may
    unfinished = unimodal_poisson.Unfinished(envs, 4)
    rollout, episodes = unimodal_poisson.act(envs, agent, unfinished, args)
    normalized_observations, chosen, raw_observations, *_ = rollout
    bare = SyncVectorEnv([lambda: gym.make(args.env_id)] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
    observations, _ = bare.reset(seed=4)
    totals, expected, cut = np.zeros(3), [], 0
    rewards, alive = np.zeros((40, 3)), np.ones((40, 3))
    std = np.sqrt(agent.observation_stats.var + 1e-8)
    for t in range(40):
        normalized = ((observations - agent.observation_stats.mean) / std).clip(-10, 10)
        np.testing.assert_allclose(normalized_observations[t], normalized, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(raw_observations[t], observations, rtol=1e-5)
        actions = chosen[t].numpy()
        scaled = np.array([-1, -3]) + np.array([2, 8]) * actions / 10
        stretched = np.array([0, 1]) + np.array([1, 4]) * actions  # -1 and 1 are the ends of a range
        actions = scaled if policy == "poisson" else stretched.clip([-1, -3], [1, 5])
        observations, raw, terminated, truncated, info = bare.step(actions.astype(np.float32))
        rewards[t] = raw
        totals += raw
        for n in np.flatnonzero(terminated | truncated):
            expected.append(pytest.approx(totals[n], abs=1e-4))
            totals[n] = alive[t, n] = 0
            if truncated[n] and not terminated[n] and bootstrap:
                cut += 1
                last = agent.normalize(info["final_obs"][n])
                rewards[t, n] += 0.9 * agent.values(last).item()
    assert [total for total, _ in episodes] == expected and len(expected) > 10
    assert (cut > 3) == bootstrap

    with torch.no_grad():
        values = agent.values(normalized_observations)
        following = torch.cat([values, agent.values(agent.normalize(observations))[None]]).double()
    advantages = np.zeros((41, 3))
    for t in reversed(range(40)):
        delta = rewards[t] + 0.9 * alive[t] * following[t + 1].numpy() - values[t].numpy()
        advantages[t] = delta + 0.9 * 0.8 * alive[t] * advantages[t + 1]
    batch = unimodal_poisson.learning_batch(rollout, agent, unfinished, args)
    assert_close(batch["values"].view(40, 3), values, 1e-6)
    assert_close(batch["advantages"].view(40, 3), torch.from_numpy(advantages[:40]), 1e-4)
    assert_close(batch["returns"], batch["advantages"] + batch["values"], 1e-5)
    with torch.no_grad():
        outputs = agent.outputs(batch["observations"])
        logprobs = agent.head.log_prob(outputs, batch["actions"])
    assert_close(batch["logprobs"], logprobs, 1e-5)


def test_rewards_are_in_units_of_the_discounted_return():
    """As in gymnasium's NormalizeReward, but with all returns of a rollout at once."""
    agent = agent_of(num_envs=2, gamma=0.9)
    unfinished = unimodal_poisson.Unfinished(unimodal_poisson.make_envs(agent.args, 2), 1)
    rewards = np.random.default_rng(0).normal(1, 3, (30, 2))
    dones = np.random.default_rng(1).random((30, 2)) < 0.2
    found = unimodal_poisson.scale_rewards(rewards, dones, agent, unfinished, agent.args)
    sums, running = [], np.zeros(2)
    for t in range(30):
        running = 0.9 * running + rewards[t]
        sums.extend(running)
        running = np.where(dones[t], 0, running)
    np.testing.assert_allclose(found, (rewards / np.std(sums)).clip(-10, 10), rtol=1e-3)


@pytest.mark.parametrize("num_actions", [2, 17, 5000])
def test_the_number_of_an_action_is_not_rounded(num_actions):
    envs = unimodal_poisson.make_envs(Args(env_id="CartPole-v1"), 1)
    envs.single_action_space = gym.spaces.Discrete(num_actions, start=-7)
    agent = unimodal_poisson.Agent(envs, Args(policy="categorical"))
    found = agent.to_env(torch.arange(num_actions)[:, None])
    assert found.tolist() == list(range(-7, num_actions - 7))


def test_atom_metrics():
    """A policy of two peaks, and one with half of its mass at the ends."""
    agent = agent_of(policy="categorical", num_atoms=4)
    probabilities = torch.tensor([[[0.4, 0.1, 0.4, 0.1], [0.1, 0.4, 0.4, 0.1]]])
    agent.outputs = lambda observations: probabilities.log()
    found = unimodal_poisson.atom_metrics(agent, torch.zeros(1, 3))
    assert found["train/extreme_mass"] == pytest.approx(0.35)
    assert found["train/frac_multimodal"] == pytest.approx(0.5)
