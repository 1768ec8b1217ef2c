"""Variance of the policy gradient under each policy over atoms, as atoms get more: results/variance_poisson.csv.

    python benchmarks/variance_poisson.py        # two minutes on one core
    python benchmarks/make_tables.py             # redraws the table and the figure

One step: a state, an action of 6 dimensions in [-1, 1], the reward -|a - best(s)|^2. The network is one linear layer
over 16 fixed random features and a constant, the same features for every policy; what it says goes through the
script's own action_distribution and sample_actions. A sample of the gradient is that of REINFORCE with the exact
expected reward of the state as baseline, (r - b(s)) d log pi(a|s), for one action; all 256 states come equally often.
For every number of atoms K all policies are fitted to the same target: a Gaussian on the atoms whose mean is linear in
the features (standard deviation over states 0.3) and whose standard deviation is 0.4. best(s) is another such mean, so
that there is something to learn.

Arms: poisson with the temperature fitted along with the weights, poisson_2.5 and poisson_repo with the released code's
2.5, categorical, ordinal. One rate sets mean and width at once, so poisson can be matched in the mean, and in the
standard deviation on average; poisson_2.5 is as wide as it is; poisson_repo can be matched in neither. The columns
mean_error and std_error (root mean square over states and dimensions), std, and kl (from target to policy, mean of a
dimension) say how well each was matched.

What a row says (variance: trace of the covariance; mean: of the gradient):
  weights_var, weights_relative   by the weights of the layer, over states and actions; and that over |mean|^2
  head_var, head_relative         by what the layer says, over actions, mean of the states; and over mean |mean|^2
  action_relative   variance over |mean|^2 of what a small step along the gradient does to the mean action of 16 states
  along_relative    variance of the part of the gradient by the weights along its mean, over |mean|^2
  score, score_exact   E |d log pi / d head|^2, mean of a dimension: sampled, and in closed form. With rate l and
                    temperature t: Var(k) ((1 - exp(-l)) / (t l))^2 for poisson; 1 - sum of p^2 for categorical; sum
                    over atoms j of P(i >= j) P(i < j) for ordinal; none is given for poisson_repo
The bare variances are in the units of each policy's own parameters: where these do little to the action, the gradient
is small, and so is its mean. The ratios have no unit, but one that counts all parameters counts K directions of noise
for categorical and ordinal and one for poisson. action_relative alone has the same coordinates, the action, for all.
"""

import csv
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
import tyro
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from algorithms.unimodal_poisson import action_distribution, action_logits, sample_actions

ROOT = Path(__file__).resolve().parents[1]
ATOMS = (5, 7, 11, 15, 31)
ARMS = ("poisson", "poisson_2.5", "poisson_repo", "categorical", "ordinal")
DIMENSIONS, FEATURES, STATES, PROBES = 6, 16, 256, 16
STD, SPREAD = 0.4, 0.3  # of the target policy's actions, and of its mean over states
NUMBERS = ["temperature", "mean_error", "std", "std_error", "kl", "weights_var", "weights_relative", "head_var"]
NUMBERS += ["head_relative", "action_relative", "along_relative", "score", "score_exact"]


@dataclass
class Args:
    seeds: int = 5
    """seeds 1, 2, ...: features, target, best actions and samples"""
    samples: int = 25_600
    """samples of the gradient for each row, of 256 states equally many"""
    out: str = "benchmarks/results/variance_poisson.csv"
    """CSV to write"""


@dataclass
class Policy:
    """A linear layer and what its output means."""

    kind: str  # --policy of the script
    num_atoms: int
    temperature: Tensor  # scalar
    weights: Tensor  # (A,C,F+1) of C numbers a dimension

    def head(self, features: Tensor) -> Tensor:
        """What action_distribution takes, at features (B,F+1): (B,A) or (B,A,K)"""
        head = torch.einsum("acf,bf->bac", self.weights, features)
        return head[..., 0] if self.kind.startswith("poisson") else head

    def probabilities(self, head: Tensor) -> Tensor:
        """(B,A) or (B,A,K) -> (B,A,K)"""
        return action_logits(head, self.kind, self.num_atoms, self.temperature).softmax(-1)


def fit(arm: str, target: Tensor, features: Tensor) -> Policy:
    """The policy that is nearest to the target (S,A,K) by Kullback-Leibler divergence; from several starts the best."""
    num_atoms, kind = target.shape[-1], arm.removesuffix("_2.5")
    found = []
    for rate in (0.0, 1.0, num_atoms / 4, num_atoms / 2, num_atoms) if kind.startswith("poisson") else (0.0,):
        outputs = 1 if kind.startswith("poisson") else num_atoms
        weights, log_temperature = torch.zeros(DIMENSIONS, outputs, FEATURES + 1), torch.tensor(2.5).log()
        weights[..., -1] = rate  # softplus is near the identity there; only a start
        free = [weights, log_temperature] if arm == "poisson" else [weights]
        optimizer = torch.optim.LBFGS([x.requires_grad_() for x in free], max_iter=300, line_search_fn="strong_wolfe")

        def divergence(weights=weights, log_temperature=log_temperature, optimizer=optimizer) -> Tensor:
            optimizer.zero_grad()
            policy = Policy(kind, num_atoms, log_temperature.exp(), weights)
            logits = action_logits(policy.head(features), kind, num_atoms, policy.temperature)
            loss = F.kl_div(logits.log_softmax(-1), target, reduction="sum") / target[..., 0].numel()
            loss.backward()
            return loss

        optimizer.step(divergence)
        loss = divergence().item()
        found.append((loss, Policy(kind, num_atoms, log_temperature.detach().exp(), weights.detach())))
    return min(found, key=lambda one: one[0])[1]


def exact_score(policy: Policy, head: Tensor, p: Tensor) -> Tensor | None:
    """E |d log pi / d head|^2 in closed form. (S,A) or (S,A,K), probabilities (S,A,K) -> (S,A)"""
    if policy.kind == "poisson":
        counts, rate = torch.arange(1, policy.num_atoms + 1), F.softplus(head)
        variance = (p * counts**2).sum(-1) - (p * counts).sum(-1) ** 2
        return variance * (-torch.expm1(-rate) / (policy.temperature * rate)) ** 2
    if policy.kind == "categorical":
        return 1 - (p * p).sum(-1)
    below = p.cumsum(-1) - p  # P(i < j)
    return (below * (1 - below)).sum(-1) if policy.kind == "ordinal" else None


def relative(samples: Tensor) -> float:
    """Trace of the covariance of samples (B,...) over the squared norm of their mean, less what is noise in it."""
    samples = samples.flatten(1)
    variance = samples.var(0).sum().item()
    return variance / (samples.mean(0).square().sum().item() - variance / len(samples))


def measure(policy: Policy, target: Tensor, features: Tensor, best: Tensor, count: int) -> dict[str, float]:
    """A row. target (S,A,K), features (S,F+1), best actions (S,A), number of samples"""
    values = torch.linspace(-1, 1, policy.num_atoms)  # (K,)
    shape = policy.kind, policy.num_atoms, policy.temperature
    heads = policy.head(features)  # (S,A) or (S,A,K)
    p = policy.probabilities(heads)  # (S,A,K)
    rewards = -((values - best[..., None]) ** 2)  # (S,A,K) a dimension's part of the reward
    baseline = (p * rewards).sum(-1).sum(-1)  # (S,)
    states = torch.arange(len(features)).repeat(count // len(features))  # (B,)
    count = len(states)
    head = heads[states].requires_grad_()  # (B,A) or (B,A,K)
    noise = -torch.empty(count, DIMENSIONS, policy.num_atoms).exponential_().log()  # (B,A,K) Gumbel
    actions = sample_actions(head.detach(), noise, *shape)  # (B,A)
    action_distribution(head, *shape).log_prob(actions).sum().backward()
    score = head.grad.view(count, DIMENSIONS, -1)  # (B,A,C)
    reward = rewards[states].gather(-1, actions[..., None]).sum((1, 2))  # (B,)
    by_head = (reward - baseline[states])[:, None, None] * score  # (B,A,C)
    phi = features[states]  # (B,F+1)
    # The gradient by the weights is the outer product of by_head and phi, so its norm and mean need no large tensor.
    mean = torch.einsum("bac,bf->acf", by_head, phi) / count  # (A,C,F+1)
    second = (by_head.square().sum((1, 2)) * phi.square().sum(1)).mean().item()
    weights_var = (second - mean.square().sum().item()) * count / (count - 1)
    squared = mean.square().sum().item() - weights_var / count
    along = torch.einsum("bac,acf,bf->b", by_head, mean / mean.norm(), phi)  # (B,)
    groups = by_head.view(-1, len(features), *score.shape[1:])  # (B/S,S,A,C)
    head_var = groups.var(0).sum().item() / len(features)
    head_squared = groups.mean(0).square().sum().item() / len(features) - head_var / len(groups)
    # What a step along a sample does to the mean action at PROBES states: by the chain rule through their heads.
    probes = heads[:PROBES].detach().requires_grad_()  # (P,A) or (P,A,K)
    (policy.probabilities(probes) * values).sum().backward()
    slopes = probes.grad.view(PROBES, DIMENSIONS, -1)  # (P,A,C)
    moved = torch.einsum("bac,pac->bpa", by_head, slopes) * (phi @ features[:PROBES].T)[..., None]  # (B,P,A)
    wanted, got = (target * values).sum(-1), (p * values).sum(-1)  # (S,A) means
    wanted_std, got_std = (
        ((q * values**2).sum(-1) - (q * values).sum(-1) ** 2).clamp(min=0).sqrt() for q in (target, p)
    )  # (S,A)
    row = {"temperature": policy.temperature.item() if policy.kind.startswith("poisson") else None}
    row |= {"mean_error": (got - wanted).square().mean().sqrt().item(), "std": got_std.mean().item()}
    row |= {"std_error": (got_std - wanted_std).square().mean().sqrt().item()}
    row |= {"kl": (target * (target.log() - p.clamp(min=1e-30).log())).sum(-1).mean().item()}
    row |= {"weights_var": weights_var, "weights_relative": weights_var / squared}
    row |= {"head_var": head_var, "head_relative": head_var / head_squared, "action_relative": relative(moved)}
    row |= {"along_relative": along.var().item() / squared, "score": score.square().sum(-1).mean().item()}
    exact = exact_score(policy, heads, p)
    return row | {"score_exact": None if exact is None else exact.mean().item()}


def main(args: Args) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # rates and temperatures are fitted to the end
    start, rows = time.perf_counter(), []
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    for seed in range(1, args.seeds + 1):
        for num_atoms in ATOMS:
            torch.manual_seed(seed)  # the same features, target and best actions for every K
            features = torch.cat([torch.randn(STATES, FEATURES), torch.ones(STATES, 1)], 1)  # (S,F+1)
            means, best = (
                SPREAD * features @ torch.randn(FEATURES + 1, DIMENSIONS) / (FEATURES + 1) ** 0.5 for _ in range(2)
            )  # (S,A) each
            values = torch.linspace(-1, 1, num_atoms)
            target = (-((values - means[..., None]) ** 2) / (2 * STD**2)).softmax(-1)  # (S,A,K)
            for arm in ARMS:
                torch.manual_seed(1000 * seed + num_atoms)
                found = measure(fit(arm, target, features), target, features, best, args.samples)
                rows.append({"arm": arm, "num_atoms": num_atoms, "seed": seed} | found)
        print(f"seed {seed}: {time.perf_counter() - start:.0f} s", flush=True)
    how = {"samples": args.samples, "command": " ".join(["python benchmarks/variance_poisson.py", *sys.argv[1:]])}
    how |= {"seconds": f"{time.perf_counter() - start:.0f}", "torch": version("torch")}
    how |= {"python": platform.python_version(), "commit": commit.strip()}
    how |= {"device": f"CPU ({os.cpu_count()} cores, {platform.machine()}), 1 thread"}
    with (ROOT / args.out).open("w", newline="") as file:
        writer = csv.DictWriter(file, ["arm", "num_atoms", "seed", *NUMBERS, *how], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            numbers = {name: "" if row[name] is None else f"{row[name]:.5g}" for name in NUMBERS}
            writer.writerow(row | numbers | how)


if __name__ == "__main__":
    main(tyro.cli(Args))
