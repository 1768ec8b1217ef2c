"""HPT and SRFT: what hpt.py has beside grpo.py, whose tests hold for the functions that both share."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_grpo import (
    PROMPTS,
    G,
    Recorder,
    T,
    assert_close,
    flat,
    plain_logprobs,
    relative,
    some_batch,
    tiny_model,
)

from algorithms import grpo, hpt
from algorithms.hpt import Args, Completion, assign, group_advantages, hpt_loss, route, srft_loss

REFERENCE = Path(__file__).parent / "reference"
HPT = json.loads((REFERENCE / "hpt.json").read_text())
SRFT = json.loads((REFERENCE / "srft.json").read_text())["vectors"]

# --- Reference: the output of other people's code ---------------------------------------------------------------------


@pytest.mark.parametrize("vector", HPT["gate_vectors"], ids=str)
def test_reference_gate(vector):
    """mix_trainer.py of TsinghuaC3I/Unify-Post-Training."""
    dropped, _, kind = vector["on_remove_add_off"]
    solved = torch.tensor([vector["n_solved"]])
    assert route(solved, vector["switch_gate"], vector["switch_gate_off"]).tolist() == [kind]
    assert (kind == 0) == (dropped == 0)
    if vector["switch_gate"] == vector["switch_gate_off"]:
        assert route(solved, vector["switch_gate"]).tolist() == [kind]


def test_reference_advantages_of_rollouts():
    """Its groups beside demonstrations: only rollouts count."""
    (vector,) = HPT["split_advantage_vectors"]
    scores = torch.tensor(vector["scores"], dtype=torch.float32)
    assert_close(group_advantages(scores[:4], 4, std_epsilon=1e-6), vector["advantage"][:4], 1e-6)
    assert group_advantages(scores[5:8], 3).tolist() == vector["advantage"][5:8] == [0, 0, 0]


def tensors(vector, first: dict):
    """Leaf logits, (B,T) log-probabilities, entropy, advantages and mask, (B,) demonstrations."""
    inputs = vector["inputs"]
    if isinstance(inputs["logits"], list):
        first[vector["case"]] = inputs["logits"]
    logits = torch.tensor(first[vector["case"]], requires_grad=True)
    logprobs = logits.log_softmax(2)
    entropy = -(logprobs.exp() * logprobs).sum(2)
    chosen = logprobs.gather(2, torch.tensor(inputs["token_ids"])[:, :, None])[:, :, 0]
    scores = torch.tensor(inputs["sequence_scores"], dtype=torch.float32)
    scale = "group" if vector["options"]["use_std"] else "none"
    advantages = []
    for group in torch.tensor(inputs["group_index"]).unique():
        rewards = scores[torch.tensor(inputs["group_index"]) == group]
        alone = len(rewards) == 1  # its code takes 0 and 1 for mean and std
        one = rewards / (1 + 1e-6 * (scale == "group"))
        advantages.append(one if alone else group_advantages(rewards, len(rewards), scale, 1e-6))
    advantages = torch.cat(advantages)
    assert_close(advantages, vector["outputs"]["advantage_row"], 1e-6)
    advantages = advantages[:, None].expand(chosen.shape)
    is_demonstration = torch.tensor(inputs["demo_mask"])[:, 0].bool()
    return logits, chosen, entropy, advantages, torch.tensor(inputs["mask"]), is_demonstration


def cases(vectors):
    """Each with the logits of the first vector of every case, which the others share."""
    first, found = {}, []
    for vector in vectors:
        tensors(vector, first)
        names = [f"{name}={value}" for name, value in vector["options"].items()]
        found.append(pytest.param(vector, first, id=" ".join([vector["case"], *names[:3]])))
    return found


def normalizer(vector) -> str:
    return "length" if vector["options"]["loss_remove_token_mean"] else "tokens"


def assert_gradient(logits, loss, expected):
    """The norm of every row."""
    loss.backward()
    assert_close(logits.grad.flatten(1).norm(dim=1), expected, 1e-6)


@pytest.mark.parametrize("vector, first", cases(HPT["loss_vectors"]))
def test_reference_hpt_loss(vector, first):
    """Loss and gradient. Where the official code has NaN, the term without tokens is 0."""
    logits, logprobs, _, advantages, mask, is_demonstration = tensors(vector, first)
    old_logprobs = torch.tensor(vector["inputs"]["old_log_prob"])
    coef, outputs = vector["options"]["sft_loss_coef"], vector["outputs"]
    kind = normalizer(vector)
    words = (logprobs, old_logprobs, advantages, mask, is_demonstration)
    loss = hpt_loss(*words, sft_coef=coef, normalizer=kind)
    clipped = vector["options"]["loss_remove_clip"] is False
    assert clipped == (kind == "tokens"), "hpt_loss relies on that"
    expected = (outputs["pg_loss"] or 0.0) + coef * (outputs["sft_loss"] or 0.0)
    assert_close(loss, expected, 1e-6)
    if outputs["pg_loss"] is not None:
        assert_gradient(logits, loss, outputs["grad_logits_row_l2"])


@pytest.mark.parametrize("vector, first", cases(SRFT))
def test_reference_srft_loss(vector, first):
    """Loss, and gradient with the entropy bonus that hpt.py leaves out."""
    logits, logprobs, entropy, advantages, mask, is_demonstration = tensors(vector, first)
    options, outputs = vector["options"], vector["outputs"]
    assert options["srft_type"] == "paper"
    loss = srft_loss(
        logprobs,
        advantages,
        entropy,
        mask,
        is_demonstration,
        normalizer=normalizer(vector),
        off_policy_reshape=options["off_policy_reshape"],
    )
    assert_close(loss, outputs["total_without_entropy"], 2e-6)
    bonus = options["entropy_coeff"] * (entropy * mask).sum() / mask.sum()
    assert_gradient(logits, loss - bonus, outputs["grad_logits_row_l2"])


@pytest.mark.parametrize("entropy, sft, rl", [(0, 0.5, 0.1), (math.log(5) / 2, 0.2236, 0.2236), (math.log(10), 0.05, 1)])
def test_reference_srft_weights(entropy, sft, rl):
    """Closed form: 0.5 exp(-H) of the demonstration, 0.1 exp(H) of a right rollout, 1 of a wrong one."""
    logprobs = torch.tensor([[-2.0], [-2.0], [-2.0]], requires_grad=True)
    advantages = torch.tensor([[0.0], [0.25], [-0.25]])  # without its RL term
    entropies = torch.full((3, 1), float(entropy), requires_grad=True)
    is_demonstration = torch.tensor([True, False, False])
    loss = srft_loss(logprobs, advantages, entropies, torch.ones(3, 1), is_demonstration)
    loss.backward()
    assert_close(logprobs.grad[:, 0], [-sft, -rl, 1.0], 1e-4)
    assert entropies.grad is None or entropies.grad.abs().max() == 0


# --- Properties -------------------------------------------------------------------------------------------------------

SOLVED = [0, 1, 4, 0, 2, 3]  # right rollouts of each question


def rewards() -> tuple[torch.Tensor, torch.Tensor]:
    """(B,) and (P,G): a right answer has 1, and all have something beside it."""
    solved = torch.tensor([[g < count for g in range(G)] for count in SOLVED])
    extra = torch.rand(solved.shape, generator=torch.Generator().manual_seed(3))
    return (solved + 0.3 * extra).flatten(), solved


# --- The update -------------------------------------------------------------------------------------------------------

BASE = Args(temperature=0.9, num_generations=G, num_prompts_per_step=6, max_completion_length=T, max_grad_norm=math.inf)


@pytest.fixture(scope="module")
def model():
    model = tiny_model(0)
    hpt.add_methods(model)
    return model


@pytest.fixture(scope="module")
def rows(model):
    """Of each of six questions the rollouts, then the demonstration."""
    generator = torch.Generator().manual_seed(8)
    rollouts, rows = some_batch(model), []
    for i, prompt in enumerate([*PROMPTS, PROMPTS[3], [30, 31]]):
        length = int(torch.randint(2, 11, (), generator=generator))
        ids = torch.randint(6, 64, (length,), generator=generator).tolist()
        rows += [*rollouts[i * G : (i + 1) * G], Completion(prompt, ids, [math.nan] * length, True)]
    return rows


def updated_gradient(model, rows, args: Args):
    """Gradient that `update` gives to the optimizer, and its metrics."""
    recorder = Recorder(model)
    metrics = hpt.update(model, None, recorder, rows, assign(*rewards(), args).flatten(1), args)
    return recorder.gradient, metrics


def padded(model, rows):
    """Log-probabilities, entropies and mask of plain forward passes, (B,T)."""
    found = torch.zeros(3, len(rows), T)
    for row, completion in enumerate(rows):
        logprobs = plain_logprobs(model, completion, BASE.temperature)
        length = len(completion.ids)
        found[0, row, :length] = logprobs.gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
        found[1, row, :length] = -(logprobs.exp() * logprobs).sum(1)
        found[2, row, :length] = 1
    return found


@pytest.mark.parametrize("method", ["hpt", "srft"])
@pytest.mark.parametrize("normalizer", ["tokens", "length"])
def test_update_has_the_gradient_of_the_loss_of_the_whole_batch(model, rows, method, normalizer, monkeypatch):
    compared = []  # numbers of tokens in the metrics of the sampler
    measure = hpt.sampling_metrics
    monkeypatch.setattr(hpt, "sampling_metrics", lambda log_ratios, *rest: compared.append(len(log_ratios)) or measure(log_ratios, *rest))
    args = replace(BASE, method=method, normalizer=normalizer, gate=1, sft_coef=0.7)
    logprobs, entropy, mask = padded(model, rows)
    is_demonstration = torch.arange(len(rows)) % (G + 1) == G
    if method == "srft":
        scores = torch.cat([rewards()[1].float(), torch.ones(6, 1)], 1)
        advantages = (scores - scores.mean(1, keepdim=True)).view(-1, 1)
        expected = srft_loss(logprobs, advantages, entropy, mask, is_demonstration, normalizer=normalizer)
    else:
        totals = rewards()[0].view(6, G)
        advantages = torch.cat([totals - totals.mean(1, keepdim=True), torch.zeros(6, 1)], 1).flatten()
        taught = (torch.tensor(SOLVED) <= 1)[:, None]  # three of six
        used = torch.cat([~taught.expand(6, G), taught], 1).flatten()
        words = (logprobs, logprobs.detach(), advantages[:, None], mask * used[:, None], is_demonstration)
        share = 0.5 if normalizer == "tokens" else 1.0
        expected = share * hpt_loss(*words, sft_coef=0.7, normalizer=normalizer)
    gradient = flat(torch.autograd.grad(expected, list(model.parameters())))
    for micro_batch in (1, 5, 64):
        found, metrics = updated_gradient(model, rows, replace(args, micro_batch_size=micro_batch))
        assert relative(found, gradient) < 1e-5, micro_batch
        assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-5)
    used = torch.ones_like(is_demonstration) if method == "srft" else used & (is_demonstration | (advantages != 0))
    used[0] = True  # a row is always computed
    assert metrics["num_sft_tokens"] == mask[is_demonstration & used].sum()
    assert compared[-1] == mask[~is_demonstration & used].sum(), "tokens of demonstrations were not sampled"
    assert metrics["sampling/logprob_difference/max"] < 1e-4, "demonstrations were not sampled"


def written_out(model, reference, rows, old, args: Args) -> tuple[torch.Tensor, ...]:
    """Loss, mean of the KL over RL tokens, mean loss of the demonstrations; with gate 1 three of six questions use them."""
    logprobs, _, mask = padded(model, rows)
    old = logprobs.detach() if old is None else old
    totals = rewards()[0].view(6, G)
    advantages = torch.cat([totals - totals.mean(1, keepdim=True), torch.zeros(6, 1)], 1).view(-1, 1)
    taught = (torch.tensor(SOLVED) <= 1)[:, None]
    in_rl = mask * torch.cat([~taught.expand(6, G), torch.zeros(6, 1, dtype=bool)], 1).view(-1, 1)
    in_sft = mask * torch.cat([torch.zeros(6, G, dtype=bool), taught], 1).view(-1, 1)
    ratio = (logprobs - old).exp()
    gain = torch.min(ratio * advantages, ratio.clamp(1 - args.epsilon, 1 + args.epsilon) * advantages)
    away = padded(reference, rows)[0].detach() - logprobs
    kl = away.exp() - away - 1
    rl = ((args.beta * kl - gain) * in_rl).sum() / in_rl.sum()
    sft = -(logprobs * in_sft).sum() / in_sft.sum()
    return (rl + args.sft_coef * sft) / 2, (kl * in_rl).sum() / in_rl.sum(), sft, old


def test_two_iterations_with_a_kl_penalty(rows):
    """Old log-probabilities stay those of the first; demonstrations have no penalty; metrics are means of both."""
    args = replace(BASE, gate=1, sft_coef=0.7, num_iterations=2, beta=0.2, epsilon=0.05)
    policies, reference = [tiny_model(0) for _ in range(2)], tiny_model(1)
    for one in (policies[0], reference):
        hpt.add_methods(one)
    optimizer = torch.optim.SGD(policies[0].parameters(), lr=0.03)
    metrics = hpt.update(policies[0], reference, optimizer, rows, assign(*rewards(), args).flatten(1), args)
    plain = torch.optim.SGD(policies[1].parameters(), lr=0.03)
    found, old = [], None
    for _ in range(2):
        plain.zero_grad()
        *values, old = written_out(policies[1], reference, rows, old, args)
        values[0].backward()
        plain.step()
        found.append(torch.stack(values).detach())
    assert_close(flat(policies[0].parameters()), flat(policies[1].parameters()), 1e-4)
    means = torch.stack(found).mean(0).tolist()
    assert [metrics[name] for name in ("loss", "kl", "sft_loss")] == pytest.approx(means, rel=1e-4)


def test_a_demonstration_that_becomes_much_likelier_keeps_the_gradient_finite():
    """Its ratio overflows, and does not count."""
    logprobs = torch.tensor([[-1.0], [-2.0]], requires_grad=True)
    old = torch.tensor([[-1.0], [-120.0]])
    ones = torch.ones(2, 1)
    loss = hpt_loss(logprobs, old, ones, ones, torch.tensor([False, True]), normalizer="tokens")
    loss.backward()
    assert_close(logprobs.grad, [[-1.0], [-1.0]])
    assert_close(loss, -1.0 + 2.0)


@pytest.mark.parametrize("gate", [G, G + 1])
def test_a_gate_that_all_questions_pass_gets_one_sentence(gate, tmp_path):
    with pytest.raises(SystemExit, match=f"^--gate {gate}: all questions would use their demonstrations"):
        hpt.setup(Args(num_generations=G, gate=gate, output_dir=str(tmp_path)))
    assert hpt.setup(Args(num_generations=G, gate=G - 1, output_dir=str(tmp_path)))[1] == 1


@pytest.mark.parametrize("scale", ["group", "none"])
def test_gate_minus_one_is_grpo(model, rows, scale):
    values = {"scale_rewards": scale, "temperature": 0.9, "num_generations": G}
    recorder = Recorder(model)
    advantages = grpo.group_advantages(rewards()[0], G, scale)
    plain = grpo.Args(**values, loss_type="dapo", max_grad_norm=math.inf)
    grpo.add_methods(model)
    grpo.update(model, None, recorder, some_batch(model), advantages, plain)
    hpt.add_methods(model)
    args = replace(BASE, scale_rewards=scale)
    found, _ = updated_gradient(model, rows, replace(args, gate=-1))
    assert relative(found, recorder.gradient) < 1e-6
    control, _ = updated_gradient(model, rows, replace(args, method="grpo", gate=5))
    assert torch.equal(control, found)
