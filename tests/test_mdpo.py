"""MDPO: numbers of the authors' code, exact reductions, a probing task."""

import json
import math
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Independent, Normal, kl_divergence

from algorithms import mdpo
from algorithms.mdpo import Agent, Args, actor_loss, gaussian_kl, log_density, mdpo_loss, squashed_log, tsallis_log

FILE = Path(__file__).parent / "reference" / "mdpo.json"
CASES = json.loads(FILE.read_text())["vectors"]


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def cases(start: str):
    """Parametrise a test by the reference cases whose name begins like this, with their lists as tensors."""
    found = [case for case in CASES if case["case"].startswith(start)]
    rows = [{k: tensor(v) if isinstance(v, list) else v for k, v in case.items()} for case in found]
    return pytest.mark.parametrize("case", rows, ids=[case["case"] for case in found])


def assert_close(found, expected, absolute=2e-8) -> None:
    torch.testing.assert_close(found.detach(), expected.to(found.dtype), rtol=1e-6, atol=absolute)


# --- Reference: manantomar/Mirror-Descent-Policy-Optimization @c9bd3ba ------------------------------------------------


@cases("gae")
def test_reference_gae(case):
    """Its advantages, and how learning_batch standardizes them. An episode starts where the one before ended."""
    ends = torch.cat([case["episode_starts"][1:], tensor([0.0])])
    columns = case["rewards"], ends, case["vpred"]
    advantages, returns = mdpo.gae(
        *(column[:, None] for column in columns), tensor([case["nextvpred"]]), case["gamma"], case["lam"]
    )
    assert_close(advantages[:, 0], case["adv"])
    assert_close(returns[:, 0], case["tdlamret"])


@cases("on_policy_loss")
def test_reference_on_policy_loss(case):
    """Of the function that the script runs on a rollout, with the authors' numbers in place of its network's."""
    mean = case["mean"].requires_grad_()
    log_std = case["logstd"][0].requires_grad_()
    agent = type("Given", (), {"actor": None, "gaussian": lambda self, *_: (mean, log_std.expand_as(mean))})()
    batch = {"observations": None, "actions": case["actions"], "advantages": case["adv"]}
    batch |= {"mean": case["old_mean"], "log_std": case["old_logstd"].expand_as(mean)}
    loss, kl = mdpo.rollout_loss(agent, batch, case["t_k"], Args(tsallis_q=case["tsallis"]))
    assert_close(loss, tensor(case["loss"]))
    assert_close(kl, tensor(case["meankl"]))
    grad_mean, grad_log_std = torch.autograd.grad(loss, (mean, log_std))
    assert_close(grad_mean, case["grad_mean"])
    assert_close(grad_log_std, case["grad_logstd"][0])
    found = mdpo.clipped_value_loss(case["value"], case["old_value"], case["ret"], case["vf_clip"])
    assert_close(found, tensor(case["vf_loss"]))


@cases("off_policy_loss")
def test_reference_off_policy_loss(case):
    mu, log_std = case["mu"].requires_grad_(), case["log_std"].requires_grad_()
    x, q, lam = mu + log_std.exp() * case["noise"], case["tsallis"], case["lam"]
    log_probs = squashed_log(x, mu, log_std, q)
    old_log_probs = squashed_log(x, case["old_mu"], case["old_log_std"], q)
    assert_close(log_probs, case["qlog_pi"], 1e-4)
    assert_close(old_log_probs, case["qlog_pi_old"], 1e-4)
    q1 = x.tanh() @ case["W"]
    assert_close(q1, case["q1_pi"])
    loss = actor_loss(log_probs, old_log_probs, q1, case["kl_coef"], lam, q)


