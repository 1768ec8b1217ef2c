"""GDPO and its controls on a bandit with an easy and a hard reward: results/bandit_gdpo.csv.

    python benchmarks/bandit_gdpo.py             # under a minute on one core

Each of 64 contexts has an easy choice (1 of 4 is right) and a hard one (1 of 32), with logits of
their own that start at 0. A step samples G = 4 pairs of choices in 16 contexts, takes one reward for
each choice (the hard one times `scale`) and makes a step of plain gradient ascent. The advantages
are those of algorithms/gdpo.py. Reported: probability of the right choice after 200 steps.

Studies: `equal` (learning rate 0.5 for all), `sweep` (seven rates, a seed of its own), `best` (each
arm and scale at its best rate), `weights` (weight of the easy reward, plain, or counted only where
the hard choice is right).
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
import tyro
from torch import Tensor
from torch.nn.functional import one_hot

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from algorithms import gdpo  # noqa: E402
from benchmarks.about import RESULTS, about  # noqa: E402

CONTEXTS = 64
DRAWN = 16  # of them in each step
GENERATIONS = 4
CHOICES = (4, 32)  # easy, hard
ARMS = ("grpo", "grpo_no_std", "grpo_batch_norm", "gdpo_no_batch_norm", "gdpo")
SCALES = (1.0, 0.1, 3.0)
RATES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
SWEEP_SEED = 100


@dataclass
class Args:
    seeds: int = 20
    """seeds 1, 2, ... of every row of the tables"""
    steps: int = 200
    """gradient steps"""
    out: str = str(RESULTS / "bandit_gdpo.csv")
    """CSV to write"""


@dataclass(frozen=True)
class Run:
    """One run; all runs of an arm, a weight and a kind of reward are computed at once."""

    seed: int
    scale: float = 1.0
    learning_rate: float = 0.5


def policy_gradient(probs: Tensor, chosen: Tensor, advantages: Tensor) -> Tensor:
    """Gradient by the logits of the group's mean of advantage times log-probability.

    probs (...,A), chosen (...,G), advantages (...,G) -> (...,A)
    """
    score = one_hot(chosen, probs.size(-1)) - probs[..., None, :]  # (...,G,A)
    return (advantages[..., None] * score).mean(-2)


def simulate(arm: str, runs: list[Run], steps: int, weight=1.0, conditioned=False) -> Tensor:
    """Probability of the right easy and hard choice after training, (R,2).

    A run depends on its own seed alone.
    """
    seeds = sorted({run.seed for run in runs})
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    which = torch.tensor([seeds.index(run.seed) for run in runs])  # (R,)
    rates = torch.tensor([run.learning_rate for run in runs])[:, None, None]  # (R,1,1)
    scales = torch.tensor([[1.0, run.scale] for run in runs])[:, None]  # (R,1,2)
    logits = [torch.zeros(len(runs), CONTEXTS, count) for count in CHOICES]  # (R,C,A) each
    rows = torch.arange(len(runs))[:, None]  # (R,1)
    args = gdpo.Args(num_generations=GENERATIONS, advantage=arm)
    for _ in range(steps):
        contexts = [torch.randperm(CONTEXTS, generator=g)[:DRAWN] for g in generators]
        contexts = torch.stack(contexts)[which]  # (R,D)
        uniform = [torch.rand(2, DRAWN, GENERATIONS, generator=g) for g in generators]
        uniform = torch.stack(uniform)[which]  # (R,2,D,G)
        probs = [table[rows, contexts].softmax(-1) for table in logits]  # (R,D,A) each
        chosen = []
        for k, count in enumerate(CHOICES):
            choice = torch.searchsorted(probs[k].cumsum(-1), uniform[:, k].contiguous())
            chosen.append(choice.clamp(max=count - 1))  # (R,D,G)
        rewards = torch.stack([(choice == 0).float() for choice in chosen], -1)
        rewards = rewards.view(len(runs), -1, 2)  # (R,D*G,2)
        if conditioned:
            hard_first = rewards.view(-1, 2).flip(1)
            hard_first = gdpo.condition_rewards(hard_first, torch.tensor([False, True]))
            rewards = hard_first.flip(1).view_as(rewards)
        advantages = torch.vmap(lambda x: gdpo.compute_advantages(x, (weight, 1.0), args))
        found = advantages(rewards * scales)  # (R,D*G)
        for table, p, choice in zip(logits, probs, chosen):
            table[rows, contexts] += rates * policy_gradient(p, choice, found.view(choice.shape))
    return torch.stack([table.softmax(-1)[..., 0].mean(1) for table in logits], 1)


def main(args: Args) -> None:
    torch.set_num_threads(1)
    start = time.perf_counter()
    rows = []

    def study(name: str, arm: str, runs: list[Run], weight=1.0, conditioned=False) -> None:
        probs = simulate(arm, runs, args.steps, weight, conditioned).tolist()
        for run, (easy, hard) in zip(runs, probs):
            row = {"study": name, "arm": arm, "weight": weight, "conditioned": int(conditioned)}
            rows.append(row | vars(run) | {"easy": easy, "hard": hard, "steps": args.steps})

    seeds = range(1, args.seeds + 1)
    for arm in ARMS:
        study("equal", arm, [Run(seed, scale) for scale in SCALES for seed in seeds])
        study("sweep", arm, [Run(SWEEP_SEED, scale, rate) for scale in SCALES for rate in RATES])
        for scale in SCALES:
            swept = [r for r in rows if (r["study"], r["arm"], r["scale"]) == ("sweep", arm, scale)]
            best = max(swept, key=lambda row: row["hard"])["learning_rate"]
            study("best", arm, [Run(seed, scale, best) for seed in seeds])
    for arm in ("grpo", "gdpo"):
        for weight in (1.0, 0.5, 0.25):
            for conditioned in (False, True):
                study("weights", arm, [Run(seed) for seed in seeds], weight, conditioned)
    how = {"seconds": round(time.perf_counter() - start)} | about("torch")
    pd.DataFrame(rows).round(4).assign(**how).to_csv(args.out, index=False, lineterminator="\n")
    print(f"{len(rows)} runs in {how['seconds']} s: {args.out}")


if __name__ == "__main__":
    main(tyro.cli(Args))
