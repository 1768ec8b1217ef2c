"""DAPO: what dapo.py has beside grpo.py, whose tests hold for the functions that both share."""

import copy
from dataclasses import replace

import pytest
import test_grpo
import torch
from test_grpo import ADVANTAGES, Recorder, assert_close, flat, relative, written_out_loss

from algorithms.dapo import Args, kl_estimate, soft_overlong_penalty, update

BASE = Args(num_generations=test_grpo.G, max_completion_length=12, max_grad_norm=1e9, temperature=0.9)


def test_reference_soft_overlong_penalty():
    vector = test_grpo.BY_ID["reward/dapo_soft_overlong"]
    lengths = torch.tensor(vector["inputs"]["length"])
    params = vector["params"]
    found = soft_overlong_penalty(lengths, params["max_resp_len"], params["overlong_buffer_len"])
    assert_close(found, vector["outputs"]["penalty"], 1e-7)


@pytest.fixture(scope="module")
def model():
    return test_grpo.tiny_model(0)


@pytest.fixture(scope="module")
def truncated(model):
    """A batch in which every third completion has no end token."""
    batch = test_grpo.some_batch(model)
    for completion in batch[::3]:
        completion.ended = False
    return batch


def updated(model, batch, args: Args, reference=None):
    recorder = Recorder(model)
    metrics = update(model, reference, recorder, batch, ADVANTAGES, args)
    return recorder.gradient, metrics


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_masked_completions_do_not_count(model, truncated, beta):
    """Neither as tokens of the mean nor in gradient and metrics."""
    args = replace(BASE, mask_truncated_completions=True, num_iterations=1, beta=beta)
    reference = test_grpo.nearby_model() if beta else None
    kept = [row for row, completion in enumerate(truncated) if completion.ended]
    rows = [truncated[row] for row in kept]
    plain = copy.deepcopy(model)
    loss, _ = written_out_loss(plain, rows, args, reference=reference, advantages=ADVANTAGES[kept])
    loss.backward()
    gradient, metrics = updated(model, truncated, args, reference)
    assert relative(gradient, flat(parameter.grad for parameter in plain.parameters())) < 1e-5
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    if beta:
        pairs = [[test_grpo.plain_chosen(one, row, 0.9) for row in rows] for one in (model, reference)]
        mean = kl_estimate(*map(torch.cat, pairs)).mean().item()
        assert metrics["kl"] == pytest.approx(mean, rel=1e-4)


def test_a_batch_without_any_end_teaches_nothing(model, truncated):
    batch = [replace(completion, ended=False) for completion in truncated]
    gradient, metrics = updated(model, batch, replace(BASE, mask_truncated_completions=True))
    assert (gradient == 0).all() and metrics["loss"] == metrics["clip_ratio"] == 0
