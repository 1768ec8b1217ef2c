"""OPD: the numbers of the authors' code, exact properties of its loss, and the update against one written out."""

import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_grpo import G, Recorder, flat, relative, tiny_model
from test_grpo import some_batch as grpo_batch

from algorithms import opd
from algorithms.opd import Args, first_occurrence_mask, most_likely, policy_loss, topk_losses

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


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


STUDENT, TEACHER = tensor(INPUTS["student_logits"]), tensor(INPUTS["teacher_logits"])  # (2,5,12)
SAMPLED, MASK = torch.tensor(INPUTS["response_token_ids"]), tensor(INPUTS["response_mask"])  # (2,5)


@pytest.mark.parametrize("case", SUPPORTS, ids=ids)
def test_reference_losses_and_gradients(case):
    settings, scale = case["settings"], case.get("logit_scale", 1)
    logits = (scale * STUDENT).requires_grad_()
    losses = topk_losses(
        logits,
        scale * TEACHER,
        SAMPLED,
        top_k=settings["K"],
        source=SOURCES[settings["kl_topk_source"]],
        normalize=settings["norm_to_one_for_kl"],
        tail=settings["use_tail_sampling"],
        clip_log_ratio=settings["clip_log_ratio"],
    )
    expected = tensor(case["per_token_head_L1"]) + tensor(case.get("per_token_tail_L2", 0.0))
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-9)
    loss = (losses * MASK).sum() / (MASK.sum() + 1e-8)
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
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_the_whole_vocabulary_is_the_reverse_kl(source, tail, normalize):
    ours, plain = STUDENT.clone().requires_grad_(), STUDENT.clone().requires_grad_()
    losses = topk_losses(
        ours, TEACHER, SAMPLED, top_k=12, source=source, normalize=normalize, tail=tail
    )
    expected = F.kl_div(
        TEACHER.log_softmax(-1), plain.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-9)
    losses.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad, rtol=0, atol=1e-9)


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
            losses = gap * chosen
        else:
            width = args.top_k if args.divergence == "top_k" else 64
            losses = topk_losses(
                student, taught, tokens, top_k=width, source=args.support, tail=args.tail
            )
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
    other, _ = updated(
        model, teacher, batch, replace(args, micro_batch_size=None, micro_batch_tokens=5000)
    )
    assert relative(other, expected) < 1e-5


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
