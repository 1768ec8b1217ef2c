"""Dr. MAS and its controls on a simulated team of three, in seconds: results/simulate_dr_mas.csv.

    python benchmarks/simulate_dr_mas.py         # 1 to 2 minutes on one core
    python benchmarks/make_tables.py             # redraws the tables

Solver, verifier and refiner share a reward of 1 for a right final answer. The solver chooses one of 8 answers, right
with probability `first_try` at the start. The verifier, who can tell, rejects 5 % of the right and 90 % of the wrong
ones at the start; then the refiner chooses again, right with 0.3 (0.2 where first_try is 0.9). Policies are tables of
logits: a row for each of 16 problems, the verifier's for right and wrong. A step samples 8 episodes of 8 problems and
makes one step of gradient ascent for each agent, on the mean over its calls of advantage times log-probability, with
the norm clipped to 1. The advantages are those of the function that algorithms/dr_mas.py trains with.

Studies: `fixed` (learning rate 0: how large gradients are while the team stays as it is) and `learning`. Reported: the
inflation factor of lemma 4.2 of the refiner over groups with unequal rewards (it is 1 for the others, who act once an
episode), the share of these groups in which the refiner's own rewards differ, each agent's gradient norm before
clipping over the steps in which it acted, and the exact probability of success after the last step.
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
from algorithms.dr_mas import agent_advantages, inflation_factor

ROOT = Path(__file__).resolve().parents[1]
PROBLEMS, DRAWN, EPISODES, ANSWERS = 16, 8, 8, 8
AGENTS = ("solver", "verifier", "refiner")
ARMS = ("agent", "agent_lone_zero", "global", "agent_mean", "agent_std", "call")
FIRST_TRY, RATES, MAX_NORM = (0.3, 0.5, 0.7, 0.9), {"fixed": 0.0, "learning": 1.0}, 1.0
KINDS = ("mean", "q99", "max")
COLUMNS = ["study", "arm", "first_try", "learning_rate", "seed", "steps", "first_success", "success"]
COLUMNS += [f"refiner_factor_{kind}" for kind in KINDS] + ["refiner_varied"]
COLUMNS += [f"{agent}_{name}" for agent in AGENTS for name in ("right", *(f"norm_{kind}" for kind in KINDS))]
COLUMNS += ["seconds", "torch", "python", "device", "commit"]


@dataclass
class Args:
    seeds: int = 20
    """seeds 1, 2, ... of every row of the tables"""
    steps: int = 200
    """gradient steps"""
    out: str = "benchmarks/results/simulate_dr_mas.csv"
    """CSV to write"""


@dataclass(frozen=True)
class Run:
    """One run; all runs of an arm are computed at once."""

    seed: int
    first_try: float
    learning_rate: float


def table_of(right: Tensor) -> Tensor:
    """Logits of a table in which answer 0 has this probability and the others share the rest. (R,) -> (R,C,A)"""
    logits = torch.zeros(len(right), PROBLEMS, ANSWERS)
    logits[..., 0] = (right.logit() + torch.tensor(ANSWERS - 1.0).log())[:, None]
    return logits


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Choices by inverting the cumulative distribution. probs (...,A), uniform (...,N) -> (...,N)"""
    return torch.searchsorted(probs.cumsum(-1), uniform.contiguous(), right=True).clamp(max=probs.size(-1) - 1)


def success(solver: Tensor, verifier: Tensor, refiner: Tensor) -> Tensor:
    """Exact probability of a right final answer, mean over problems. -> (R,)"""
    first, again, reject = solver.softmax(-1)[..., 0], refiner.softmax(-1)[..., 0], verifier.softmax(-1)[..., 1:]
    rejected = first * reject[:, 1] + (1 - first) * reject[:, 0]  # (R,C)
    return (first * (1 - reject[:, 1]) + rejected * again).mean(1)


def advantages_of(arm: str, rewards: Tensor, rejected: Tensor) -> Tensor:
    """Advantages of the calls of the three agents, 0 for a refiner who was not called. (R,D,N) twice -> (3,R,D,N)"""
    trajectory = torch.arange(rewards.numel())
    refined = rejected.flatten().nonzero()[:, 0]
    trajectories = torch.cat([trajectory, trajectory, refined])  # (calls,)
    sizes = torch.tensor([len(trajectory), len(trajectory), len(refined)])
    agents = torch.arange(3).repeat_interleave(sizes)  # (calls,)
    ids = trajectories // EPISODES, agents, trajectories
    lone = "zero" if arm == "agent_lone_zero" else "raw"
    found = agent_advantages(rewards.flatten()[trajectories], *ids, arm.removesuffix("_lone_zero"), lone_call=lone)
    solver, verifier, refiner = found.split(sizes.tolist())
    every = torch.stack([solver, verifier, torch.zeros_like(solver).index_copy(0, refined, refiner)])
    return every.view(3, *rewards.shape)


def refiner_factors(rewards: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
    """The refiner's inflation factor in each group, and whether its own rewards differ; NaN for both without a call or
    without unequal rewards. (R,D,N) twice -> (R,D) twice"""
    count, mean = rejected.sum(-1), rewards.mean(-1)  # (R,D) each
    own = (rejected * rewards).sum(-1) / count  # (R,D)
    std, own_std = (torch.sqrt(x * (1 - x)) for x in (mean, own))
    unknown = (std == 0) | (count == 0)
    values = inflation_factor(own, own_std, mean, std), (own_std > 0).float()
    return tuple(x.masked_fill(unknown, torch.nan) for x in values)


def summary(values: Tensor) -> dict[str, Tensor]:
    """Mean, 99th percentile and maximum over the last dimension, of what is known. (...,X) -> 3 x (...)"""
    return dict(zip(KINDS, (values.nanmean(-1), values.nanquantile(0.99, -1), values.nan_to_num(-1).amax(-1))))


def simulate(arm: str, runs: list[Run], steps: int) -> dict[str, Tensor]:
    """Train; column -> values (R,). Runs depend on their own seed alone."""
    size, seeds = len(runs), sorted({run.seed for run in runs})
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    which = torch.tensor([seeds.index(run.seed) for run in runs])  # (R,)
    rates = torch.tensor([run.learning_rate for run in runs])  # (R,)
    first_try = torch.tensor([run.first_try for run in runs])  # (R,)
    solver, refiner = table_of(first_try), table_of(torch.where(first_try > 0.8, 0.2, 0.3))  # (R,C,A) each
    verifier = torch.tensor([[0.1, 0.9], [0.95, 0.05]]).log().repeat(size, 1, 1)  # (R,2,2): saw wrong, right; rejects
    tables, rows = (solver, verifier, refiner), torch.arange(size)[:, None]
    started, norms, factors, varied = success(*tables), [], [], []
    for _ in range(steps):
        problems = torch.stack([torch.randperm(PROBLEMS, generator=g)[:DRAWN] for g in generators])[which]  # (R,D)
        uniform = torch.stack([torch.rand(3, DRAWN, EPISODES, generator=g) for g in generators])[which]  # (R,3,D,N)
        probs = [x[rows, problems].softmax(-1) for x in (solver, refiner)]  # (R,D,A) each
        first, again = (draw(p, uniform[:, k]) for p, k in zip(probs, (0, 2)))  # (R,D,N) each
        saw = (first == 0).long()  # (R,D,N)
        judge = verifier.softmax(-1)[rows[:, :, None], saw]  # (R,D,N,2)
        rejected = uniform[:, 1] < judge[..., 1]  # (R,D,N)
        rewards = torch.where(rejected, again == 0, first == 0).float()  # (R,D,N)
        calls = torch.stack([torch.ones_like(rewards), torch.ones_like(rewards), rejected.float()])  # (3,R,D,N)
        found = advantages_of(arm, rewards, rejected) / calls.sum((2, 3), keepdim=True).clamp(min=1)  # (3,R,D,N)
        gradients = [torch.zeros_like(x) for x in tables]
        for agent, chosen, p in ((0, first, probs[0]), (2, again, probs[1])):
            score = one_hot(chosen, ANSWERS) - p[..., None, :]  # (R,D,N,A)
            gradients[agent][rows, problems] = (found[agent, ..., None] * score).sum(2)
        score = found[1, ..., None] * (one_hot(rejected.long(), 2) - judge)  # (R,D,N,2)
        gradients[1] = torch.stack([(score * (saw == k)[..., None]).sum((1, 2)) for k in (0, 1)], 1)  # (R,2,2)
        norm = torch.stack([g.flatten(1).norm(dim=1) for g in gradients])  # (3,R)
        for table, gradient, length in zip(tables, gradients, norm):
            table += (rates / (length / MAX_NORM).clamp(min=1))[:, None, None] * gradient
        norms.append(norm.masked_fill(calls.sum((2, 3)) == 0, torch.nan))
        for values, history in zip(refiner_factors(rewards, rejected), (factors, varied)):
            history.append(values)
    result = {"first_success": started, "success": success(*tables)}
    result |= {f"refiner_factor_{kind}": x for kind, x in summary(torch.cat(factors, 1)).items()}
    result["refiner_varied"] = torch.cat(varied, 1).nanmean(1)
    judge = verifier.softmax(-1)
    right = [solver.softmax(-1)[..., 0], judge[:, [0, 1], [1, 0]], refiner.softmax(-1)[..., 0]]  # (R,C or 2)
    for agent, values, norm in zip(AGENTS, right, torch.stack(norms, -1)):  # norm (R,steps)
        result[f"{agent}_right"] = values.mean(1)
        result |= {f"{agent}_norm_{kind}": x for kind, x in summary(norm).items()}
    return result


def main(args: Args) -> None:
    torch.set_num_threads(1)
    start, rows = time.perf_counter(), []
    for study, rate in RATES.items():
        runs = [Run(seed, first_try, rate) for first_try in FIRST_TRY for seed in range(1, args.seeds + 1)]
        for arm in ARMS:
            found = {name: values.tolist() for name, values in simulate(arm, runs, args.steps).items()}
            for i, run in enumerate(runs):
                row = {"study": study, "arm": arm, "steps": args.steps} | vars(run)
                rows.append(row | {name: f"{values[i]:.4f}" for name, values in found.items()})
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    how = {"seconds": round(time.perf_counter() - start), "torch": torch.__version__, "commit": commit.strip()}
    how |= {"python": platform.python_version(), "device": f"CPU, 1 thread ({platform.machine()})"}
    with (ROOT / args.out).open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | how for row in rows)
    print(f"{len(rows)} runs in {how['seconds']} s: {args.out}")


if __name__ == "__main__":
    main(tyro.cli(Args))
