"""OPD: the numbers of the authors' code, exact properties of its loss, and the update against one written out."""

import copy
import gc
import json
import math
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_grpo import G, Recorder, flat, relative, tensor, tiny_model
from test_grpo import some_batch as grpo_batch

from algorithms import opd
from algorithms.opd import (
    Args,
    first_occurrence_mask,
    most_likely,
    policy_loss,
    topk_losses,
    topk_terms,
)

pytestmark = pytest.mark.quick
FILE = json.loads((Path(__file__).parent / "reference" / "opd_topk.json").read_text())
INPUTS = FILE["inputs"]
SUPPORTS = [case for case in FILE["cases"] if "K" in case.get("settings", {})]
ADVANTAGES = [
    case for case in FILE["cases"] if "advantage" in case and not case["settings"]["use_topk_kl"]
]
MASKS = [case for case in FILE["cases"] if "masked_ids" in case]
SOURCES = {"ref": "teacher", "actor": "student"}
ids = lambda case: case["name"]  # noqa: E731


STUDENT, TEACHER = tensor(INPUTS["student_logits"]), tensor(INPUTS["teacher_logits"])  # (2,5,12)
SAMPLED, MASK = torch.tensor(INPUTS["response_token_ids"]), tensor(INPUTS["response_mask"])  # (2,5)


@pytest.mark.parametrize("case", SUPPORTS, ids=ids)
def test_reference_losses_and_gradients(case):
    settings, scale = case["settings"], case.get("logit_scale", 1)
    logits = (scale * STUDENT).requires_grad_()
    flags = {
        "top_k": settings["K"],
        "source": SOURCES[settings["kl_topk_source"]],
        "normalize": settings["norm_to_one_for_kl"],
        "tail": settings["use_tail_sampling"],
        "clip_log_ratio": settings["clip_log_ratio"],
    }
    heads, tails = topk_terms(logits, scale * TEACHER, SAMPLED, **flags)
    assert torch.equal(topk_losses(logits, scale * TEACHER, SAMPLED, **flags), heads + tails)
    expected = torch.stack([tensor(case["per_token_head_L1"]), torch.zeros(2, 5)])
    expected[1] += tensor(case.get("per_token_tail_L2", 0.0))
    if settings["norm_to_one_for_kl"]:  # theirs lists the written token apart, which joined the support
        expected = torch.stack([expected.sum(0), torch.zeros(2, 5)])
    torch.testing.assert_close(torch.stack([heads, tails]), expected, rtol=0, atol=1e-9)
    loss = ((heads + tails) * MASK).sum() / (MASK.sum() + 1e-8)
    assert loss.item() == pytest.approx(case["loss_token_mean"], abs=1e-9)
    loss.backward()
    torch.testing.assert_close(
        logits.grad, tensor(case["grad_wrt_student_logits"]), rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("case", ADVANTAGES, ids=ids)
def test_reference_advantages_of_sampled_tokens(case):
    """The gradient of our loss at the first step is minus the advantage; scores of outcomes are no part of it."""
    settings = case["settings"]
    old, taught = (
        tensor(case["student_logprob_of_sampled"]),
        tensor(case["teacher_logprob_of_sampled"]),
    )
    prompt = 3
    mask = tensor(case["attention_mask(prompt3+response)"])[:, prompt:]
    if settings["multi_turn"]:
        mask = tensor(case["loss_mask(prompt3+response; used when multi_turn)"])[:, prompt:]
    advantages = opd.sampled_advantages(old, taught, settings["clip_log_ratio"]) * mask
    outcomes = settings["reward_weight"] * tensor(case["token_level_scores"]) * mask
    torch.testing.assert_close(advantages + outcomes, tensor(case["advantage"]), rtol=0, atol=1e-9)
    logprobs = old.clone().requires_grad_()
    policy_loss(logprobs, old, advantages, 0.2).sum().backward()
    torch.testing.assert_close(logprobs.grad, -advantages)


@pytest.mark.parametrize("case", MASKS, ids=ids)
def test_reference_masks_of_special_tokens(case):
    counted = first_occurrence_mask(torch.tensor(case["responses"]), case["masked_ids"])
    assert (counted * tensor(case["response_mask"])).tolist() == case["kl_mask"]


def test_reference_cases_that_are_not_expressed():
    """Means over completions, the older loss with 1e-10 inside, masks by entropy, and the KL as an advantage."""
    rest = [case for case in FILE["cases"] if case not in [*SUPPORTS, *ADVANTAGES, *MASKS]]
    begin = ("aggregation", "legacy", "entropy", "derived", "OPD advantage: top-k KL")
    assert all(case["name"].startswith(begin) for case in rest)
    for case in FILE["cases"]:
        if case["name"].startswith("legacy"):  # ours without the 1e-10
            losses = topk_losses(STUDENT, TEACHER, SAMPLED, top_k=case["K"])
            torch.testing.assert_close(losses, tensor(case["per_token"]), rtol=0, atol=1e-7)


@pytest.mark.parametrize("source", ["teacher", "student"])
def test_without_renormalisation_the_tail_leaves_a_pull_out_of_the_support(source):
    """Over all written tokens the mean gradient is that of KL + P(support), so it is not 0 at p = q."""
    for start in (STUDENT[0, 0], TEACHER[0, 0]):
        logits, teacher = start.clone().requires_grad_(), TEACHER[0, 0]
        flags = {"top_k": 4, "source": source, "normalize": False, "tail": True}
        each = topk_losses(logits.expand(12, 12), teacher.expand(12, 12), torch.arange(12), **flags)
        (ours,) = torch.autograd.grad((logits.softmax(0).detach() * each).sum(), logits)
        p, support = logits.softmax(0), (teacher if source == "teacher" else logits).topk(4).indices
        plain = (p * (p.log() - teacher.log_softmax(0))).sum() + p[support].sum()
        torch.testing.assert_close(ours, *torch.autograd.grad(plain, logits), rtol=0, atol=1e-9)
        assert ours.norm() > 1e-3


def test_sampling_from_the_likeliest_tokens():
    logprobs = torch.tensor([[0.1, 0.5, 0.25, 0.15], [0.05, 0.05, 0.1, 0.8]]).log()
    kept = most_likely(logprobs, 0.7)
    assert kept.isfinite().tolist() == [[False, True, True, False], [False, False, False, True]]
    assert torch.equal(kept[kept.isfinite()], logprobs[kept.isfinite()])
    assert most_likely(logprobs, 1.0) is logprobs


BASE = Args(
    temperature=0.9,
    micro_batch_size=3,
    max_grad_norm=0,
    loss_type="token",
    top_k=5,
    num_generations=G,
)


class Vocabulary:
    """A tokenizer whose tokens are their numbers."""

    def convert_tokens_to_ids(self, tokens):
        return [int(token) for token in tokens]


def student_and_teacher():
    models = tiny_model(0), tiny_model(1)
    for model in models:
        opd.add_methods(model)
    return models


def some_batch(model):
    return [opd.Completion(c.prompt, c.ids, c.logprobs, c.ended) for c in grpo_batch(model)]


def updated(model, teacher, batch, args):
    recorder = Recorder(model)
    metrics = opd.update(model, teacher, Vocabulary(), recorder, batch, args)
    return recorder.gradient, metrics


def by_hand(model, teacher, batch, args, masked=()) -> torch.Tensor:
    """Gradient of the mean over tokens, each completion computed alone."""
    values, weights = [], []
    for number, completion in enumerate(batch):
        ids = torch.tensor([completion.prompt + completion.ids])
        place = slice(len(completion.prompt) - 1, -1)
        student = model(ids).logits[0, place] / args.temperature
        with torch.no_grad():
            taught = teacher(ids).logits[0, place] / args.temperature
        tokens = torch.tensor(completion.ids)
        if args.divergence == "sampled":
            chosen = student.log_softmax(1).gather(1, tokens[:, None])[:, 0]
            gap = chosen.detach() - taught.log_softmax(1).gather(1, tokens[:, None])[:, 0]
            heads, tails = 0.0, gap * chosen
        else:
            width = args.top_k if args.divergence == "top_k" else 64
            heads, tails = topk_terms(
                student,
                taught,
                tokens,
                top_k=width,
                source=args.support,
                normalize=args.renormalize,
                tail=args.tail,
                clip_log_ratio=args.clip_log_ratio,
            )
        if args.vllm:  # a written token counts by how likely it was to be sampled, at most twice
            chosen = student.detach().log_softmax(1).gather(1, tokens[:, None])[:, 0]
            tails = tails * (chosen - torch.tensor(completion.logprobs)).exp().clamp(max=2.0)
        losses = heads + tails
        seen = set()
        counted = [not (t in masked and t not in seen and not seen.add(t)) for t in completion.ids]
        values.append(losses[torch.tensor(counted)])
        weights.append(number // G)
    if args.loss_type == "token":
        torch.cat(values).mean().backward()
    else:
        groups = [
            torch.cat([v for v, w in zip(values, weights) if w == group]) for group in range(6)
        ]
        torch.stack([group.mean() for group in groups]).mean().backward()
    return flat(parameter.grad for parameter in model.parameters())


KINDS = {
    "top_k": {},
    "prompt": {"loss_type": "prompt"},
    "student": {"support": "student", "tail": True},
    "full": {"divergence": "full"},
    "sampled": {"divergence": "sampled"},
    "masked": {"masked_tokens": ("7", "20", "33")},
    "no_renormalize": {"renormalize": False},
    "ema_pg": {"renormalize": False, "tail": True},
    "clip_log_ratio": {"clip_log_ratio": True, "temperature": 0.1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_that_of_one_completion_after_the_other(kind, monkeypatch):
    monkeypatch.setattr(opd, "LOGITS_AT_ONCE", 64 * 7)  # several chunks of logits
    args = replace(BASE, **KINDS[kind])
    model, teacher = student_and_teacher()
    batch = some_batch(model)
    masked = [int(token) for token in args.masked_tokens]
    expected = by_hand(copy.deepcopy(model), teacher, batch, args, masked)
    gradient, metrics = updated(model, teacher, batch, args)
    assert relative(gradient, expected) < 1e-5
    assert math.isfinite(metrics["opd/sampled_kl"])
    make, empty = opd.micro_batches, [opd.pack([], [], "cpu")]  # FSDP has passes without tokens
    monkeypatch.setattr(opd, "micro_batches", lambda *rest: make(*rest) + empty)
    other, _ = updated(
        model, teacher, batch, replace(args, micro_batch_size=None, micro_batch_tokens=5000)
    )
    assert relative(other, expected) < 1e-5


@pytest.mark.parametrize("kind", ["student", "full", "sampled", "ema_pg"])
def test_the_correction_of_the_sampler_is_for_terms_of_written_tokens(kind):
    """A sum over a support has none, also where the written token joins it."""
    args = replace(BASE, **KINDS[kind], vllm=True)
    model, teacher = student_and_teacher()
    batch = some_batch(model)
    for number, completion in enumerate(batch):  # off by 1 nat here and there: on the mean by a half at most
        completion.logprobs = [x - (number + t) % 3 % 2 for t, x in enumerate(completion.logprobs)]
    expected = by_hand(copy.deepcopy(model), teacher, batch, args)
    plain = by_hand(copy.deepcopy(model), teacher, batch, replace(args, vllm=False))
    gradient, metrics = updated(model, teacher, batch, args)
    assert relative(gradient, expected) < 1e-5
    weighs = kind in ("sampled", "ema_pg")
    assert (relative(plain, expected) > 1e-3) == weighs
    assert ("sampling/importance_sampling_ratio/mean" in metrics) == weighs


def test_the_second_step_of_a_batch_has_ratios_to_the_first_model():
    """Two steps of plain gradient descent by the control, written out."""
    args = replace(BASE, divergence="sampled", num_iterations=2)
    model, teacher = student_and_teacher()
    batch, ours, first = some_batch(model), copy.deepcopy(model), copy.deepcopy(model)
    opd.add_methods(ours)
    opd.update(ours, teacher, Vocabulary(), torch.optim.SGD(ours.parameters(), 0.05), batch, args)

    def chosen(network, completion):
        place = slice(len(completion.prompt) - 1, -1)
        logits = network(torch.tensor([completion.prompt + completion.ids])).logits[0, place]
        return -F.cross_entropy(logits / args.temperature, torch.tensor(completion.ids), reduction="none")

    optimizer, ratios = torch.optim.SGD(model.parameters(), 0.05), None
    for _ in range(2):
        now = torch.cat([chosen(model, completion) for completion in batch])
        with torch.no_grad():
            old, taught = (torch.cat([chosen(x, c) for c in batch]) for x in (first, teacher))
        ratios, advantages = (now - old).exp(), taught - old
        gains = torch.min(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages)
        optimizer.zero_grad()
        (-gains.mean()).backward()
        optimizer.step()
    assert (ratios < 0.8).any() and (ratios > 1.2).any()
    moved, expected = (flat(x.parameters()) - flat(first.parameters()) for x in (ours, model))
    assert relative(moved, expected) < 1e-4


def test_with_lora_the_teacher_is_the_model_without_its_adapters():
    args = replace(BASE, lora_rank=4)
    model, _ = student_and_teacher()
    teacher, batch = opd.copy_model(model, torch.float32), some_batch(model)
    opd.add_adapters(model, args)
    for name, weight in model.named_parameters():
        if "lora_B" in name:  # as after some steps
            torch.nn.init.normal_(weight, std=0.1)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    found = []
    for other in (teacher, model):
        optimizer = torch.optim.SGD(trained, 0.0)
        found.append(opd.update(model, other, Vocabulary(), optimizer, batch, args))
    assert found[0]["opd/divergence"] > 1e-2
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize("bf16", [False, True])
def test_one_teacher_stays_in_memory(bf16, monkeypatch):
    """Frozen, and in 16 bits if wanted; what was loaded is not kept beside it by a cycle of references."""
    args, loaded, load = Args(bf16=bf16, max_completion_length=32), [], opd.load_model
    model, tokenizer = load(args)

    def load_model(args):
        teacher, tokenizer = load(args)
        loaded.extend(map(weakref.ref, [teacher, *(w.untyped_storage() for w in teacher.parameters())]))
        return teacher, tokenizer

    monkeypatch.setattr(opd, "load_model", load_model)
    gc.disable()
    try:
        teacher = opd.load_teacher(model, tokenizer, tokenizer.encode("What is 2?"), args)
        assert loaded[0]() is teacher
    finally:
        gc.enable()
    assert {w.dtype for w in teacher.parameters()} == {torch.bfloat16 if bf16 else torch.float32}
    assert not any(weight.requires_grad for weight in teacher.parameters())


def test_errors_of_the_teacher_say_so(monkeypatch):
    def check_model(model, *_):
        raise SystemExit(f"{type(model).__name__}: not supported")

    args = Args(max_completion_length=32)
    model, tokenizer = opd.load_model(args)
    monkeypatch.setattr(opd, "check_model", check_model)
    with pytest.raises(SystemExit, match=r"^--teacher .*countdown_grpo: \w+: not supported"):
        opd.load_teacher(model, tokenizer, [1, 2], args)


@pytest.mark.parametrize("iterations", [1, 2])
def test_hidden_states_of_the_teacher_go_after_their_last_use(iterations, monkeypatch):
    model, teacher = student_and_teacher()
    batches, held, make, values = [], [], opd.micro_batches, opd.token_logprobs

    def token_logprobs(model, batch, *rest):
        held.append(sum(one.teacher_hidden is not None for one in batches))
        return values(model, batch, *rest)

    monkeypatch.setattr(opd, "micro_batches", lambda *rest: batches.extend(make(*rest)) or batches)
    model.token_logprobs = lambda batch, *rest: token_logprobs(model, batch, *rest)
    updated(model, teacher, some_batch(model), replace(BASE, num_iterations=iterations))
    assert len(batches) > 2 and all(batch.teacher_hidden is None for batch in batches)
    assert held[-len(batches) :] == ([1] * len(batches) if iterations == 1 else [*range(len(batches), 0, -1)])


def test_memory_is_bounded_by_a_chunk(monkeypatch):
    """No tensor of the update holds the logits of more tokens than one chunk, at a vocabulary of 4,096."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, inputs=(), named=None):
            out = function(*inputs, **(named or {}))
            for found in out if isinstance(out, tuple | list) else [out]:
                if isinstance(found, torch.Tensor) and found.dim() >= 2 and found.size(-1) == 4096:
                    sizes.append(found.numel() // 4096)
            return out

    monkeypatch.setattr(opd, "LOGITS_AT_ONCE", 4096 * 16)
    models = student_and_teacher()
    for model in models:
        model.resize_token_embeddings(4096)
        opd.add_methods(model)
    batch = [opd.Completion([5, 6], list(range(7, 27)), [0.0] * 20, True) for _ in range(8)]
    for divergence in ("top_k", "full", "sampled"):
        sizes.clear()
        with Watch():
            opd.update(
                *models,
                Vocabulary(),
                Recorder(models[0]),
                batch,
                replace(BASE, divergence=divergence, num_generations=8),
            )
        assert sizes and max(sizes) <= 64, (
            "a chunk has 16 tokens; the weights of the head have 64 columns"
        )
