"""Truncated importance sampling against TRL. The other scripts have grpo.py's text, see test_shared_blocks.py."""

import json
from pathlib import Path

import pytest
import torch
from test_grpo import assert_close

from algorithms import grpo

VECTORS = json.loads((Path(__file__).parent / "reference" / "sampling_correction.json").read_text())["vectors"]
BY_ID = {vector["id"]: vector for vector in VECTORS}


@pytest.mark.parametrize("vector", VECTORS, ids=BY_ID)
def test_reference_correction_loss_and_gradient(vector):
    params, outputs = vector["params"], vector["outputs"]
    inputs = BY_ID[vector["inputs"].get("same_as", vector["id"])]["inputs"]
    counts = torch.tensor(inputs["mask"]).bool()  # (B,T)
    rows = counts.nonzero()[:, 0]  # (N,)
    cap = params["vllm_importance_sampling_clip_max"]
    old, sampled = (torch.tensor(inputs[f"logps_{name}"])[counts] for name in ("old", "sampled"))
    correction = grpo.sampling_correction(old, sampled, cap)
    assert_close(correction, torch.tensor(outputs["importance_sampling_ratio"])[counts], 1e-6)

    logprobs = torch.tensor(inputs["logps_new"], requires_grad=True)
    reference = torch.tensor(inputs["logps_ref"])[counts] if params["beta"] else None
    options = {"epsilon": params["epsilon"], "beta": params["beta"], "ref_logprobs": reference}
    advantages = torch.tensor(inputs["advantages"])[rows]
    losses, clipped = grpo.policy_loss(logprobs[counts], old, advantages, correction=correction, **options)
    weights = grpo.token_weights(
        counts.sum(1),
        params["loss_type"],
        num_rows=len(counts),
        num_tokens=params["num_items_in_batch"],
        max_completion_length=params["max_completion_length"],
    )
    loss = (losses * weights[rows]).sum()
    loss.backward()
    assert_close(losses, torch.tensor(outputs["per_token_loss"])[counts], 1e-5)
    assert_close(loss, outputs["loss"], 1e-5)
    assert_close(logprobs.grad, outputs["grad_wrt_logps_new"], 1e-6)
    assert_close(clipped.float().mean(), outputs["clip_ratio"], 1e-6)

    # bf16, because with vLLM such large differences end the run
    metrics = grpo.sampling_metrics(old - sampled, cap, grpo.Args(bf16=True))
    tags = {
        "sampling/logprob_difference/mean": "sampling_logp_difference_mean",
        "sampling/logprob_difference/max": "sampling_logp_difference_max",
        "sampling/importance_sampling_ratio/mean": "importance_sampling_ratio_mean",
    }
    for tag, name in tags.items():
        assert metrics[tag] == pytest.approx(outputs[name], abs=1e-5)


def test_metrics_are_of_the_tokens_of_all_processes(monkeypatch):
    """Two processes with different numbers of tokens find what one process with all of them finds."""
    log_ratios = torch.randn(8, generator=torch.Generator().manual_seed(0)) * 0.3
    args = grpo.Args(bf16=True)
    expected = grpo.sampling_metrics(log_ratios, 1.2, args)
    sent = []
    monkeypatch.setattr(grpo, "gather", lambda rows: sent.extend(rows) or rows)
    for part in log_ratios.split([5, 3]):
        grpo.sampling_metrics(part, 1.2, args)
    monkeypatch.setattr(grpo, "gather", lambda rows: sent)
    found = grpo.sampling_metrics(log_ratios[5:], 1.2, args)
    assert found == pytest.approx(expected) and 0 < found["sampling/importance_sampling_ratio/truncated"] < 1
