"""GDPO and its controls on a bandit with an easy and a hard reward, in seconds: results/bandit_gdpo.csv.

    python benchmarks/bandit_gdpo.py             # under a minute on one core
    python benchmarks/make_tables.py             # redraws the tables

Each of 64 contexts has two independent choices: an easy one (1 of 4 is right) and a hard one (1 of 32), each with
logits of its own that start at 0. A step samples G = 4 pairs of choices in 16 contexts, takes one reward for each
choice (the hard one times `scale`), and makes a step of plain gradient ascent. The advantages are those of the
function that algorithms/gdpo.py trains with. Reported: probability of the right choice after 200 steps, mean over
contexts.

Studies: `equal` (learning rate 0.5 for all), `sweep` (five rates, a seed of its own), `best` (each arm and scale with
its best rate of the sweep), `weights` (weight of the easy reward, plain or counted only where the hard one is right).
"""

import csv
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor
from torch.nn.functional import one_hot

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from algorithms import gdpo

ROOT = Path(__file__).resolve().parents[1]
CONTEXTS, DRAWN, GENERATIONS, CHOICES = 64, 16, 4, (4, 32)
ARMS = ("grpo", "grpo_no_std", "grpo_batch_norm", "gdpo_no_batch_norm", "gdpo")
SCALES, RATES, WEIGHTS, RATE, SWEEP_SEED = (1.0, 0.1, 3.0), (0.25, 0.5, 1.0, 2.0, 4.0), (1.0, 0.5, 0.25), 0.5, 100
COLUMNS = "study arm scale weight conditioned learning_rate seed easy hard steps seconds torch python device commit"


@dataclass
class Args:
    seeds: int = 20
    """seeds 1, 2, ... of every row of the tables"""
    steps: int = 200
    """gradient steps"""
    out: str = "benchmarks/results/bandit_gdpo.csv"
    """CSV to write"""


@dataclass(frozen=True)
class Run:
    """One run; all runs of an arm, a weight and a kind of reward are computed at once."""

    seed: int
    scale: float = 1.0
    learning_rate: float = RATE


def policy_gradient(probs: Tensor, chosen: Tensor, advantages: Tensor) -> Tensor:
    """Gradient, by the logits, of the sum over contexts of the group's mean of advantage times log-probability.

    probs (...,A), chosen (...,G), advantages (...,G) -> (...,A)
    """
    score = one_hot(chosen, probs.size(-1)) - probs[..., None, :]  # (...,G,A)
    return (advantages[..., None] * score).mean(-2)


def simulate(arm: str, runs: list[Run], steps: int, weight: float = 1.0, conditioned: bool = False) -> Tensor:
    """Probability of the right easy and hard choice after training. Runs depend on their own seed alone. -> (R,2)"""
    seeds = sorted({run.seed for run in runs})
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    which = torch.tensor([seeds.index(run.seed) for run in runs])  # (R,)
    rates = torch.tensor([run.learning_rate for run in runs])[:, None, None]  # (R,1,1)
    scales = torch.tensor([[1.0, run.scale] for run in runs])[:, None]  # (R,1,2)
    logits = [torch.zeros(len(runs), CONTEXTS, count) for count in CHOICES]  # (R,C,A) each
    rows = torch.arange(len(runs))[:, None]  # (R,1)
    args = gdpo.Args(num_generations=GENERATIONS, advantage=arm)
    for _ in range(steps):
        contexts = torch.stack([torch.randperm(CONTEXTS, generator=g)[:DRAWN] for g in generators])[which]  # (R,D)
        uniform = torch.stack([torch.rand(2, DRAWN, GENERATIONS, generator=g) for g in generators])[which]  # (R,2,D,G)
        probs = [x[rows, contexts].softmax(-1) for x in logits]  # (R,D,A) each
        chosen = [torch.searchsorted(p.cumsum(-1), uniform[:, k].contiguous()) for k, p in enumerate(probs)]  # (R,D,G)
        chosen = [x.clamp(max=count - 1) for x, count in zip(chosen, CHOICES)]
        rewards = torch.stack([(x == 0).float() for x in chosen], -1).view(len(runs), -1, 2)  # (R,D*G,2) 0 is right
        if conditioned:
            hard_first = rewards.view(-1, 2).flip(1)
            rewards = gdpo.condition_rewards(hard_first, torch.tensor([False, True])).flip(1).view_as(rewards)
        found = torch.vmap(lambda x: gdpo.compute_advantages(x, (weight, 1.0), args))(rewards * scales)  # (R,D*G)
        for x, p, choice in zip(logits, probs, chosen):
            x[rows, contexts] += rates * policy_gradient(p, choice, found.view(choice.shape))
    return torch.stack([x.softmax(-1)[..., 0].mean(1) for x in logits], 1)


def main(args: Args) -> None:
    torch.set_num_threads(1)
    start, rows = time.perf_counter(), []

    def study(name: str, arm: str, runs: list[Run], weight: float = 1.0, conditioned: bool = False) -> None:
        probs = simulate(arm, runs, args.steps, weight, conditioned).tolist()
        for run, (easy, hard) in zip(runs, probs):
            row = {"study": name, "arm": arm, "weight": weight, "conditioned": int(conditioned), "steps": args.steps}
            rows.append(row | vars(run) | {"easy": f"{easy:.4f}", "hard": f"{hard:.4f}"})

    seeds = range(1, args.seeds + 1)
    for arm in ARMS:
        study("equal", arm, [Run(seed, scale) for scale in SCALES for seed in seeds])
        study("sweep", arm, [Run(SWEEP_SEED, scale, rate) for scale in SCALES for rate in RATES])
        swept = [row for row in rows if row["study"] == "sweep" and row["arm"] == arm]
        best = [max((r for r in swept if r["scale"] == scale), key=lambda r: float(r["hard"])) for scale in SCALES]
        study("best", arm, [Run(seed, r["scale"], r["learning_rate"]) for r in best for seed in seeds])
    for arm in ("grpo", "gdpo"):
        for weight in WEIGHTS:
            for conditioned in (False, True):
                study("weights", arm, [Run(seed) for seed in seeds], weight, conditioned)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    how = {"seconds": round(time.perf_counter() - start), "torch": torch.__version__, "commit": commit.strip()}
    how |= {"python": platform.python_version(), "device": f"CPU, 1 thread ({platform.machine()})"}
    with (ROOT / args.out).open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS.split(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | how for row in rows)
    print(f"{len(rows)} runs in {how['seconds']} s: {args.out}")


if __name__ == "__main__":
    main(tyro.cli(Args))
