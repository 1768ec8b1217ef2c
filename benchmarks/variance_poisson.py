"""Variance of the policy gradient under policies over atoms: results/variance_poisson.csv.

    python benchmarks/variance_poisson.py        # a minute on one core

One step: a state, an action of 6 dimensions in [-1, 1], the reward -|a - best(s)|^2. The network is
one linear layer over 16 fixed random features; the heads are those of unimodal_poisson.py, fitted to
the same target: a Gaussian on the atoms. A sample is the REINFORCE gradient with the exact expected
reward of the state as baseline.

head_relative    variance by the layer's output, mean over states, over the squared mean gradient
action_relative  variance of what a small step along the gradient does to the mean action of 16
                 states, over the squared mean: the only coordinates that all heads share
"""

import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
import torch
import tyro
from torch import Tensor
from torch.distributions import Categorical
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from algorithms.unimodal_poisson import ordinal_logits, poisson_logits  # noqa: E402
from benchmarks.about import RESULTS, about  # noqa: E402

ATOMS = (5, 7, 11, 15, 31)
ARMS = ("poisson", "categorical", "ordinal")
DIMENSIONS = 6
FEATURES = PROBES = 16  # and states at which the effect on the action is measured
STATES = 256
STD, SPREAD = 0.4, 0.3  # of the target policy's actions, and of its means over states


@dataclass
class Args:
    seeds: int = 5
    """seeds 1, 2, ...: features, target, best actions and samples"""
    samples: int = 25_600
    """samples of the gradient for each row, of 256 states equally many"""
    atoms: tuple[int, ...] = ATOMS
    """numbers of atoms"""
    out: str = str(RESULTS / "variance_poisson.csv")
    """CSV to write"""


@dataclass
class Policy:
    """A linear layer and the head behind it."""

    arm: str
    num_atoms: int
    temperature: Tensor  # of poisson
    weights: Tensor  # (A,C,F+1)

    def outputs(self, features: Tensor) -> Tensor:
        """(B,F+1) -> (B,A,C)"""
        return torch.einsum("acf,bf->bac", self.weights, features)

    def logits(self, outputs: Tensor) -> Tensor:
        """(B,A,C) -> (B,A,K)"""
        if self.arm == "poisson":
            return poisson_logits(F.softplus(outputs[..., 0]), self.num_atoms, self.temperature)
        return ordinal_logits(outputs) if self.arm == "ordinal" else outputs


def divergence(policy: Policy, log_temperature: Tensor, optimizer, target, features) -> Tensor:
    """From target to policy, mean of a dimension; leaves its gradient."""
    optimizer.zero_grad()
    policy.temperature = log_temperature.exp()
    logprobs = policy.logits(policy.outputs(features)).log_softmax(-1)
    loss = F.kl_div(logprobs, target, reduction="sum") / target[..., 0].numel()
    loss.backward()
    return loss


def fit(arm: str, target: Tensor, features: Tensor) -> Policy:
    """The policy that is nearest to the target (S,A,K) by Kullback-Leibler divergence."""
    num_atoms = target.size(-1)
    is_poisson = arm == "poisson"
    found = []
    for rate in (0.0, 1.0, num_atoms / 4, num_atoms / 2, num_atoms) if is_poisson else (0.0,):
        weights = torch.zeros(DIMENSIONS, 1 if is_poisson else num_atoms, FEATURES + 1)
        weights[..., -1] = rate
        log_temperature = torch.tensor(2.5).log()
        free = [weights.requires_grad_()]
        if is_poisson:
            free.append(log_temperature.requires_grad_())
        policy = Policy(arm, num_atoms, log_temperature, weights)
        optimizer = torch.optim.LBFGS(free, max_iter=300, line_search_fn="strong_wolfe")
        closure = partial(divergence, policy, log_temperature, optimizer, target, features)
        optimizer.step(closure)
        loss = closure().item()
        policy.weights.requires_grad_(False)
        policy.temperature = policy.temperature.detach()
        found.append((loss, policy))
    return min(found, key=lambda one: one[0])[1]


def relative(samples: Tensor) -> Tensor:
    """Variance of samples (B,...) over the squared norm of their mean, less what is noise in it."""
    samples = samples.flatten(1)
    variance = samples.var(0).sum()
    return variance / (samples.mean(0).square().sum() - variance / len(samples))


def measure(policy: Policy, features: Tensor, best: Tensor, count: int) -> dict[str, float]:
    """Features (S,F+1), best actions (S,A), number of samples."""
    values = torch.linspace(-1, 1, policy.num_atoms)  # (K,)
    outputs = policy.outputs(features)  # (S,A,C)
    probs = policy.logits(outputs).softmax(-1)  # (S,A,K)
    rewards = -((values - best[..., None]) ** 2)  # (S,A,K): a dimension's part of the reward
    baseline = (probs * rewards).sum((1, 2))  # (S,)
    states = torch.arange(len(features)).repeat(count // len(features))  # (B,)
    sampled = outputs[states].requires_grad_()  # (B,A,C)
    distribution = Categorical(logits=policy.logits(sampled))
    actions = distribution.sample()  # (B,A)
    distribution.log_prob(actions).sum().backward()
    reward = rewards[states].gather(-1, actions[..., None]).sum((1, 2))  # (B,)
    gradient = (reward - baseline[states])[:, None, None] * sampled.grad  # (B,A,C)
    by_state = gradient.view(-1, len(features), *gradient.shape[1:])  # (B/S,S,A,C)
    variance = by_state.var(0).sum() / len(features)
    squared = by_state.mean(0).square().sum() / len(features) - variance / len(by_state)
    # A step along a sample moves the outputs at a probe by its features' product with the state's.
    probes = outputs[:PROBES].detach().requires_grad_()
    (policy.logits(probes).softmax(-1) * values).sum().backward()
    similar = features[states] @ features[:PROBES].T  # (B,P)
    moved = torch.einsum("bac,pac->bpa", gradient, probes.grad) * similar[..., None]
    head = variance / squared
    return {"head_relative": head.item(), "action_relative": relative(moved).item()}


def main(args: Args) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # rates and temperatures are fitted to the end
    start = time.perf_counter()
    rows = []
    for seed in range(1, args.seeds + 1):
        for num_atoms in args.atoms:
            torch.manual_seed(seed)  # the same features, target and best actions for every K
            features = torch.cat([torch.randn(STATES, FEATURES), torch.ones(STATES, 1)], 1)
            layers = torch.stack([torch.randn(FEATURES + 1, DIMENSIONS) for _ in range(2)])
            means, best = SPREAD * features @ layers / (FEATURES + 1) ** 0.5  # (S,A) each
            distance = torch.linspace(-1, 1, num_atoms) - means[..., None]  # (S,A,K)
            target = (-(distance**2) / (2 * STD**2)).softmax(-1)
            for arm in ARMS:
                torch.manual_seed(1000 * seed + num_atoms)
                found = measure(fit(arm, target, features), features, best, args.samples)
                rows.append({"arm": arm, "num_atoms": num_atoms, "seed": seed} | found)
    how = {"seconds": round(time.perf_counter() - start)} | about("torch")
    pd.DataFrame(rows).round(4).assign(**how).to_csv(args.out, index=False, lineterminator="\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
