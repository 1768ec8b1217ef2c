"""INPO, Nash-MP and SPO: official code, closed forms, exact games, and the update against the loss written out."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from test_grpo import (
    assert_close,
    flat,
    nearby_model,
    plain_chosen,
    relative,
    some_batch,
    tensor,
    tiny_model,
)

from algorithms import nash_preference
from algorithms.nash_preference import (
    Args,
    group_losses,
    inpo_loss,
    nash_mp_target,
    policy_loss,
    regularised_nash,
    win_rates,
)
from envs import sign_cycle

VECTORS = json.loads((Path(__file__).parent / "reference" / "nash_preference.json").read_text())[
    "vectors"
]
BY_ID = {vector["id"]: vector for vector in VECTORS}
LEFT_OUT = {"official/trl_nash_md"}  # another method


def vectors(*starts: str):
    chosen = [
        vector
        for vector in VECTORS
        if vector["id"].startswith(starts) and vector["id"] not in LEFT_OUT
    ]
    return pytest.mark.parametrize("vector", chosen, ids=lambda vector: vector["id"])


def kl(p: torch.Tensor, log_q: torch.Tensor) -> float:
    return (p * (p.log() - log_q)).sum().item()


def inpo_step(log_pi, P, log_ref, tau: float, ratio: float) -> torch.Tensor:
    """The closed form: Nash-MP's half step."""
    return nash_mp_target(log_pi, log_ref, P @ log_pi.exp(), tau, ratio / (1 - ratio)).log_softmax(
        0
    )


def nash_mp_steps(log_pi, P, log_ref, beta: float, eta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The half step and the whole one, both from log_pi."""
    half = nash_mp_target(log_pi, log_ref, P @ log_pi.exp(), beta, eta).log_softmax(0)
    return half, nash_mp_target(log_pi, log_ref, P @ half.exp(), beta, eta).log_softmax(0)


# --- Reference numbers ------------------------------------------------------------------------------------------------


def test_reference_vectors_are_all_accounted_for():
    starts = (
        "game/",
        "two_action/",
        "linear_utility",
        "dyn/",
        "local_rates/",
        "inpo_loss_identity",
        "spo_group",
    )
    starts += ("official/comal_inpo/", "official/mnpo/", "official/egpo_sim/")
    used = {vector["id"] for vector in VECTORS if vector["id"].startswith(starts)}
    assert BY_ID.keys() - used == LEFT_OUT and len(VECTORS) == 41


@vectors("game/")
def test_reference_regularised_nash(vector):
    P, outputs = tensor(vector["inputs"]["P"]), vector["outputs"]
    for row in outputs["regularised"]:
        found = regularised_nash(P, tensor(row["ref"]), row["beta"])
        assert_close(found, row["pi"], 1e-9)
        assert (P @ found).max().item() - 0.5 == pytest.approx(row["unregularised_gap"], abs=1e-9)
    uniform = torch.ones(len(P), dtype=torch.float64)
    hardly_regularised = regularised_nash(P, uniform / len(P), 2e-3)
    assert_close(hardly_regularised, outputs["nash"], 1e-2)


@vectors("two_action/")
def test_reference_two_actions(vector):
    inputs = vector["inputs"]
    P = tensor([[0.5, inputs["p"]], [1 - inputs["p"], 0.5]])
    assert_close(
        regularised_nash(P, tensor(inputs["ref"]), inputs["beta"]), vector["outputs"]["pi"], 1e-9
    )


@vectors("linear_utility_closed_form/")
def test_reference_linear_utility(vector):
    inputs = vector["inputs"]
    utility = tensor(inputs["u"])
    P = 0.5 + utility[:, None] - utility[None]
    assert_close(
        regularised_nash(P, tensor(inputs["ref"]), inputs["beta"]), vector["outputs"]["pi"], 1e-9
    )


@vectors("dyn/inpo/")
def test_reference_inpo(vector):
    inputs, outputs = vector["inputs"], vector["outputs"]
    P, log_ref = tensor(inputs["P"]), tensor(inputs["ref"]).log()
    star = regularised_nash(P, tensor(inputs["ref"]), inputs["tau"])
    assert_close(star, outputs["pi_star"], 1e-9)
    log_pi = tensor(inputs["pi0"]).log()
    for step in range(101):
        if step < len(outputs["pi_t_first"]):
            assert_close(log_pi.exp(), outputs["pi_t_first"][step], 1e-9)
        if str(step) in outputs["KL_star_to_pi_t"]:  # it circles, and does not come near
            assert kl(star, log_pi) == pytest.approx(
                outputs["KL_star_to_pi_t"][str(step)], rel=1e-5
            )
        log_pi = inpo_step(log_pi, P, log_ref, inputs["tau"], inputs["ratio_tau_over_eta"])


@vectors("dyn/nash_mp/")
def test_reference_nash_mp(vector):
    inputs, outputs = vector["inputs"], vector["outputs"]
    P, log_ref = tensor(inputs["P"]), tensor(inputs["ref"]).log()
    star = tensor(outputs["pi_star"])
    log_pi = log_ref
    start = kl(star, log_pi)
    for step in range(401):
        if str(step) in outputs["KL_star_to_pi_k"]:
            assert kl(star, log_pi) == pytest.approx(
                outputs["KL_star_to_pi_k"][str(step)], abs=1e-10
            )
        assert kl(star, log_pi) <= start * (1 + 2 * inputs["beta"]) ** -step + 1e-10, (
            "the paper's bound"
        )
        half, log_pi = nash_mp_steps(log_pi, P, log_ref, inputs["beta"], inputs["eta"])
        if step < len(outputs["first_steps"]):
            assert_close(half.exp(), outputs["first_steps"][step]["half"], 1e-9)
            assert_close(log_pi.exp(), outputs["first_steps"][step]["full"], 1e-9)


@vectors("dyn/td_mnpo/")
def test_reference_inpo_with_a_history(vector):
    """MNPO: the mean of two policies in place of the last one."""
    inputs, outputs = vector["inputs"], vector["outputs"]
    P, log_ref = tensor(inputs["P"]), tensor(inputs["ref"]).log()
    tau, ratio = inputs["ratio"] * inputs["eta"], inputs["ratio"]
    star = regularised_nash(P, tensor(inputs["ref"]), tau)
    assert tau == pytest.approx(outputs["fixed_point_beta_eq_ratio_times_eta"])
    before = log_pi = log_ref
    for step in range(1, 201):
        base = (log_pi + before) / 2
        before = log_pi
        log_pi = nash_mp_target(
            base, log_ref, P @ log_pi.exp(), tau, ratio / (1 - ratio)
        ).log_softmax(0)
        if step <= len(outputs["pi_first"]):
            assert_close(log_pi.exp(), outputs["pi_first"][step - 1], 1e-9)
        if str(step) in outputs["KL_star_to_pi_t"]:
            assert kl(star, log_pi) == pytest.approx(
                outputs["KL_star_to_pi_t"][str(step)], rel=1e-5, abs=1e-10
            )


@vectors("dyn/spo_hedge/")
def test_reference_spo_with_hedge(vector):
    """The natural policy gradient of SPO's loss is Hedge: the mean of the policies goes to Nash, the last one away."""
    inputs, outputs = vector["inputs"], vector["outputs"]
    P = tensor(inputs["P"])
    log_pi = tensor(inputs["pi0"]).log()
    total = torch.zeros(len(P), dtype=torch.float64)
    for step in range(1, 1001):
        total += log_pi.exp()
        logits = log_pi.clone().requires_grad_()
        advantages = P @ log_pi.exp() - 0.5
        losses, _ = policy_loss(logits.log_softmax(0), log_pi, advantages)
        (losses * log_pi.exp()).sum().backward()
        log_pi = (log_pi - inputs["lr"] * logits.grad / log_pi.exp()).log_softmax(0)
        if step <= 3:
            assert_close(log_pi.exp(), outputs["pi_first"][step - 1], 1e-9)
        if str(step) in outputs["by_T"]:
            expected = outputs["by_T"][str(step)]
            assert_close(total / step, expected["avg"], 1e-6)
            assert (P @ total).max().item() / step - 0.5 == pytest.approx(
                expected["gap_avg"], abs=1e-6
            )
            assert (P @ log_pi.exp()).max().item() - 0.5 == pytest.approx(
                expected["last_gap"], abs=1e-5
            )


def modulus(step, *words) -> float:
    """Largest eigenvalue, in absolute value, of a map of centred log-probabilities at the uniform
    policy of three."""
    uniform = torch.full((3,), -math.log(3), dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda x: step(x.log_softmax(0), *words), uniform)
    centre = torch.eye(3, dtype=torch.float64) - 1 / 3
    return torch.linalg.eigvals(centre @ jacobian @ centre).abs().max().item()


def whole_step(log_pi, P, log_ref, tau: float) -> torch.Tensor:
    return nash_mp_steps(log_pi, P, log_ref, tau, 2 * tau)[1]


def hedge(log_pi, P, rate: float) -> torch.Tensor:
    return nash_mp_target(log_pi, log_pi, P @ log_pi.exp(), 0.5 / rate, 1.0)


@vectors("local_rates/")
def test_reference_local_rates(vector):
    P = tensor(BY_ID["game/rps"]["inputs"]["P"])
    log_ref = torch.full((3,), -math.log(3), dtype=torch.float64)
    for row in vector["outputs"]["rows"]:
        tau = row["tau"]
        found = modulus(inpo_step, P, log_ref, tau, 1 / 3)
        assert found == pytest.approx(row["inpo_modulus_at_ratio_1_3"], rel=1e-9)
        found = modulus(inpo_step, P, log_ref, tau, row["inpo_best_ratio"])
        assert found == pytest.approx(row["inpo_best_modulus"], rel=1e-9)
        if row["inpo_max_stable_ratio"] < 1:
            found = modulus(inpo_step, P, log_ref, tau, row["inpo_max_stable_ratio"])
            assert found == pytest.approx(1)
        found = modulus(whole_step, P, log_ref, tau)
        assert found == pytest.approx(row["nash_mp_eta2beta_modulus"], rel=1e-9)
        assert found <= row["proved_bound_sqrt"] == pytest.approx((1 + 2 * tau) ** -0.5, rel=1e-9)
    for rate, expected in vector["outputs"]["hedge_modulus_lr"]:
        assert modulus(hedge, P, rate) == pytest.approx(expected, rel=1e-9)


@vectors("inpo_loss_identity")
def test_reference_inpo_loss_is_mirror_descent_up_to_a_constant(vector):
    """With both answers from the last policy and the winner by P, as group_losses weighs them."""
    inputs = {name: tensor(value) for name, value in vector["inputs"].items()}
    P, last = inputs["P"], inputs["pi_t"]
    eta, ratio = inputs["eta"].item(), inputs["ratio"].item()
    law = last[:, None] * last[None]  # of two answers
    for row in vector["outputs"]["rows"]:
        pairs = []
        for values in (tensor(row["pi"]).log(), inputs["ref"].log(), last.log()):
            pairs += [values[:, None], values[None]]
        sampled = (2 * law * P * inpo_loss(*pairs, eta=eta, tau_eta_ratio=ratio)).sum().item()
        assert sampled == pytest.approx(row["L_sampled_form"], rel=1e-9)
        target = nash_mp_target(
            last.log(), inputs["ref"].log(), P @ last, ratio * eta, ratio / (1 - ratio)
        )
        errors = tensor(row["pi"]).log() - target
        exact = (law * (errors[:, None] - errors[None]).square()).sum().item()
        assert exact == pytest.approx(row["L_exact"], rel=1e-8, abs=1e-12)


@vectors("spo_group")
def test_reference_win_rates_in_a_group(vector):
    found = win_rates(tensor(vector["inputs"]["P_group"]))
    assert_close(found, vector["outputs"]["reward"], 1e-9)
    assert_close(found - 0.5, vector["outputs"]["advantage_minus_half"], 1e-9)
    assert found.mean().item() == pytest.approx(vector["outputs"]["mean_reward"])


@vectors("official/comal_inpo/")
def test_reference_comal(vector):
    """yale-nlp/COMAL losses.py nash_loss."""
    inputs = {
        name: value for name, value in vector["inputs"].items() if not name.startswith("prev2")
    }
    words = {
        name: tensor(value) if isinstance(value, list) else value for name, value in inputs.items()
    }
    assert_close(inpo_loss(**words), vector["outputs"]["losses"], 1e-6)


@vectors("official/mnpo/")
def test_reference_mnpo(vector):
    """smiles724/MNPO, in float32: INPO whose last policy is the weighted mean of the history, or absent."""
    inputs = vector["inputs"]
    values = {
        name: tensor(value)
        for name, value in inputs.items()
        if name.endswith(("chosen", "rejected"))
    }
    weights = (
        inputs["weights"] if any(inputs["weights"]) else [1.0, 1.0]
    )  # its code falls back to these
    history = {"last": weights[0] / sum(weights), "prev2": weights[1] / sum(weights)}
    words = {name: value for name, value in values.items() if name.startswith(("policy", "ref"))}
    for end in ("chosen", "rejected"):
        mean = sum(weight * values[f"{name}_{end}"] for name, weight in history.items())
        words[f"last_{end}"] = mean if inputs["history_used"] else torch.zeros_like(mean)
    found = inpo_loss(**words, eta=inputs["eta"], tau_eta_ratio=inputs["ratio"])
    torch.testing.assert_close(found, tensor(vector["outputs"]["losses"]), rtol=1e-5, atol=1e-6)


@vectors("official/egpo_sim/")
def test_reference_egpo(vector):
    """zhourunlong/EGPO. Two of its losses compare win rates, and a step of SGD at rate lr is one of size alpha = 4 lr / N.
    The third is INPO's without the last policy, for pairs that the policy draws."""
    inputs, outputs = vector["inputs"], vector["outputs"]
    alpha, beta, total = inputs["lr"], inputs["beta"], 0.0
    own_pairs = vector["id"].endswith("IPO 2")
    for run, P in enumerate(map(tensor, inputs["P"])):
        theta, ref = tensor(inputs["theta"][run]).requires_grad_(), tensor(inputs["theta_ref"][run])
        last = theta.detach()
        rates = P @ last.softmax(0)
        if vector["id"].endswith("EGPO"):  # the opponent is a half step further
            rates = P @ nash_mp_target(last, ref, rates, beta, alpha / (1 - alpha)).softmax(0)
        if own_pairs:
            zeros = torch.zeros_like(P)
            pairs = [theta[:, None], theta[None], ref[:, None], ref[None], zeros, zeros]
            losses = (
                2
                * last.softmax(0)[:, None]
                * last.softmax(0)[None]
                * P
                * inpo_loss(*pairs, beta, 1.0)
            )
        else:
            errors = theta - nash_mp_target(last, ref, rates, beta, 1e12)
            losses = (errors[:, None] - errors[None]).square() / 16
            found = nash_mp_target(last, ref, rates, beta, alpha / (1 - alpha))
            expected = tensor(outputs["theta_after_sgd"][run])
            assert_close(found.log_softmax(0), expected.log_softmax(0), 1e-9)
        total += losses.sum()
        losses.sum().backward()
        assert_close(theta.grad, outputs["grad_theta"][run], 1e-8)
    assert own_pairs or total.item() == pytest.approx(outputs["loss"], rel=1e-8)


# --- Losses of groups -------------------------------------------------------------------------------------------------

INPO = Args(method="inpo", tau=0.3, alpha=0.2)


def random_group(groups: int = 3, size: int = 4):
    generator = torch.Generator().manual_seed(4)
    logprobs, last, ref = -5 * torch.rand(3, groups, size, generator=generator, dtype=torch.float64)
    P = torch.rand(groups, size, size, generator=generator, dtype=torch.float64)
    return logprobs.requires_grad_(), last, ref, (P + 1 - P.mT) / 2


@pytest.mark.parametrize("opponent", [False, True])
def test_group_losses_written_out(opponent):
    logprobs, last, ref, P = random_group()
    rates = P.mean(2) ** 2 if opponent else None
    found = group_losses(logprobs, last, ref, P, rates, INPO)
    for group, loss in enumerate(found.tolist()):
        total = 0.0
        for i in range(4):
            for j in range(4):
                gap = [x[group, i].item() - x[group, j].item() for x in (logprobs, ref, last)]
                h = gap[0] - 0.2 * gap[1] - 0.8 * gap[2]
                if opponent:
                    total += (h - 0.2 / 0.3 * (rates[group, i] - rates[group, j]).item()) ** 2
                else:
                    p = P[group, i, j].item()
                    total += p * (h - 0.2 / 0.6) ** 2 + (1 - p) * (h + 0.2 / 0.6) ** 2
        assert loss == pytest.approx(total / 16)


# --- Update -----------------------------------------------------------------------------------------------------------

BASE = Args(num_prompts_per_step=6, num_generations=4, temperature=0.9, max_grad_norm=0)
BASE = nash_preference.replace(BASE, tau=0.3, alpha=0.2, beta=0.3, num_iterations=1)


@pytest.fixture(scope="module")
def model():
    return tiny_model(0)


@pytest.fixture(scope="module")
def batch(model):
    return some_batch(model)


def comparisons() -> tuple[torch.Tensor, torch.Tensor]:
    """Preferences (6,4,4) and win rates (6,4) against somebody else."""
    P = random_group(6)[3].float()
    return P, P.mean(2) ** 2


def written_out(model, reference, batch, method: str, old=None):
    """Loss of a batch row by row in float64, and the log-probabilities of its tokens."""
    P, rates = comparisons()
    logprobs = [plain_chosen(model, completion, 0.9) for completion in batch]
    with torch.no_grad():
        refs = [plain_chosen(reference, completion, 0.9) for completion in batch]
    old = old or [x.detach() for x in logprobs]
    loss = 0.0
    if method == "spo":
        for row, (new, before, ref) in enumerate(zip(logprobs, old, refs)):
            advantage = (rates.flatten()[row] - rates[row // 4].mean()).item()
            ratio = (new - before).exp()
            losses = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            loss = loss + (losses + 0.3 * ((ref - new).exp() - (ref - new) - 1)).sum() / 24
        return loss, old
    sums = [torch.stack([x.sum() for x in values]).view(6, 4) for values in (logprobs, old, refs)]
    args = Args(method=method, tau=0.3, alpha=0.2)
    used = rates.double() if method == "nash_mp" else None
    return group_losses(*sums, P.double(), used, args).mean(), old


@pytest.mark.parametrize("method", ["inpo", "nash_mp", "spo"])
def test_two_steps_equal_those_of_the_loss_written_out(model, batch, method):
    """Whatever the micro-batches; in the second step the policy is not the last one any more."""
    reference = nearby_model()
    P, rates = comparisons()
    rate = {"inpo": 1e-3, "nash_mp": 1e-3, "spo": 0.1}[method]
    plain, exact_reference = copy.deepcopy(model).double(), copy.deepcopy(reference).double()
    old, norms = None, []
    for _ in range(2):
        plain.zero_grad()
        loss, old = written_out(plain, exact_reference, batch, method, old)
        loss.backward()
        norms.append(flat(parameter.grad for parameter in plain.parameters()).norm().item())
        for parameter in plain.parameters():
            parameter.data -= rate * parameter.grad
    start = flat(model.parameters())
    expected = flat(plain.parameters()) - start
    for micro_batch in (4, 8, 24):
        args = nash_preference.replace(
            BASE, method=method, num_iterations=2, micro_batch_size=micro_batch
        )
        learner = copy.deepcopy(model)
        optimizer = torch.optim.SGD(learner.parameters(), lr=rate)
        used = None if method == "inpo" else rates
        metrics = nash_preference.update(learner, reference, optimizer, batch, P, used, [], args)
        assert relative(flat(learner.parameters()) - start, expected) < 1e-3, micro_batch
        assert metrics["grad_norm"] == pytest.approx(norms[1], rel=1e-3)
        assert metrics["kl"] > 0 and metrics["sampling/logprob_difference/max"] < 1e-4
        assert ("clip_ratio" in metrics) == (method == "spo")
    assert norms[0] != pytest.approx(norms[1], rel=1e-2)


# --- The task ---------------------------------------------------------------------------------------------------------


def test_signs_are_preferred_in_a_circle():
    problem = sign_cycle.Problem((3, 9, 2), 3)
    texts = {"sum": "3+9*2", "difference": "9-(3+2)", "product": "(9*2)-3", "other": "9/3+2"}
    texts = {kind: f"tries\n<answer>{text}</answer>" for kind, text in texts.items()}
    for kind, text in texts.items():
        assert sign_cycle.kind(problem, text) == kind
    for text in (
        "<answer>3+9</answer>",
        "<answer>3+9*2*2</answer>",
        "3+9*2",
        "<answer>3+</answer>",
    ):
        assert sign_cycle.kind(problem, text) == "other"
    kinds = list(texts)
    P = tensor([[sign_cycle.preference(problem, texts[a], texts[b]) for b in kinds] for a in kinds])
    assert torch.equal(P + P.T, torch.ones_like(P))
    assert (P[:3, 3] == 1).all() and P.diagonal().tolist() == [0.5] * 4
    uniform = torch.full((4,), 0.25, dtype=torch.float64)
    assert_close(
        regularised_nash(P, uniform, 1e-3), [0.4, 0.4, 0.2, 0.0], 5e-3
    )  # as envs/sign_cycle.py says
