"""Dr. MAS and its controls on a simulated team of three: results/simulate_dr_mas.csv.

    python benchmarks/simulate_dr_mas.py         # 1 to 2 minutes on one core

Solver, verifier and refiner share a reward of 1 for a right final answer. The solver is right with
probability `first_try` at first. The verifier rejects 5 % of the right and 90 % of the wrong answers;
then the refiner answers again, right with 0.3 (0.2 where first_try is 0.9). Policies are tables of
logits for 16 problems and 8 answers. A step samples 8 episodes of 8 problems and makes one step of
gradient ascent for each agent, clipped to norm 1, on the advantages of algorithms/dr_mas.py (rate 0
in the study `fixed`). Reported of the refiner: its gradient norm before clipping, and the norm and the
inflation factor (lemma 4.2) of groups in which its calls have unequal rewards.
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
from algorithms.dr_mas import agent_advantages, inflation_factor  # noqa: E402
from benchmarks.about import RESULTS, about  # noqa: E402

PROBLEMS = 16
DRAWN = EPISODES = ANSWERS = 8  # problems of a step, episodes of each, answers
ARMS = ("agent", "global", "agent_mean", "agent_std", "call")
FIRST_TRY = (0.3, 0.5, 0.7, 0.9)
RATES = {"fixed": 0.0, "learning": 1.0}


@dataclass
class Args:
    seeds: int = 20
    """seeds 1, 2, ... of every row of the tables"""
    steps: int = 200
    """gradient steps"""
    out: str = str(RESULTS / "simulate_dr_mas.csv")
    """CSV to write"""


def table_of(right: Tensor) -> Tensor:
    """Logits that give answer 0 this probability. (R,) -> (R,C,A)"""
    logits = torch.zeros(len(right), PROBLEMS, ANSWERS)
    logits[..., 0] = (right.logit() + torch.tensor(ANSWERS - 1.0).log())[:, None]
    return logits


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Choices of an answer. probs (...,A), uniform (...,N) -> (...,N)"""
    choice = torch.searchsorted(probs.cumsum(-1), uniform.contiguous(), right=True)
    return choice.clamp(max=ANSWERS - 1)


def success(solver: Tensor, verifier: Tensor, refiner: Tensor) -> Tensor:
    """Exact probability of a right final answer, mean over problems. -> (R,)"""
    first, again = (table.softmax(-1)[..., 0] for table in (solver, refiner))  # (R,C) each
    reject = verifier.softmax(-1)[..., 1:]  # (R,2,1): of a wrong answer, of a right one
    rejected = first * reject[:, 1] + (1 - first) * reject[:, 0]
    return (first * (1 - reject[:, 1]) + rejected * again).mean(1)


def advantages_of(arm: str, rewards: Tensor, rejected: Tensor) -> Tensor:
    """Of the calls of the three agents; 0 for a refiner not called. (R,D,N) twice -> (3,R,D,N)"""
    every = torch.arange(rewards.numel())
    refined = rejected.flatten().nonzero()[:, 0]
    trajectories = torch.cat([every, every, refined])  # (calls,)
    sizes = torch.tensor([len(every), len(every), len(refined)])
    agents = torch.arange(3).repeat_interleave(sizes)  # (calls,)
    scores = rewards.flatten()[trajectories]
    found = agent_advantages(scores, trajectories // EPISODES, agents, trajectories, arm)
    solver, verifier, refiner = found.split(sizes.tolist())
    refiner = torch.zeros_like(solver).index_copy(0, refined, refiner)
    return torch.stack([solver, verifier, refiner]).view(3, *rewards.shape)


def refiner_factors(rewards: Tensor, rejected: Tensor) -> Tensor:
    """NaN in a group without calls of unequal rewards. (R,D,N) twice -> (R,D)"""
    count = rejected.sum(-1)
    mean = rewards.mean(-1)
    own = (rejected * rewards).sum(-1) / count
    std = torch.sqrt(mean * (1 - mean))
    factor = inflation_factor(own, torch.sqrt(own * (1 - own)), mean, std)
    return factor.masked_fill(own * (1 - own) == 0, torch.nan)


def simulate(arm: str, seeds: int, rate: float, steps: int) -> pd.DataFrame:
    """Train all seeds and values of first_try at once."""
    first_try = torch.tensor(FIRST_TRY).repeat_interleave(seeds)  # (R,)
    seed = torch.arange(seeds).repeat(len(FIRST_TRY))
    generators = [torch.Generator().manual_seed(1 + number) for number in range(seeds)]
    solver = table_of(first_try)  # (R,C,A)
    refiner = table_of(torch.where(first_try > 0.8, 0.2, 0.3))  # (R,C,A)
    verifier = torch.tensor([[0.1, 0.9], [0.95, 0.05]]).log().repeat(len(seed), 1, 1)  # (R,2,2)
    tables = (solver, verifier, refiner)
    rows = torch.arange(len(seed))[:, None]
    norms, unequal_norms, factors = [], [], []
    for _ in range(steps):
        problems = [torch.randperm(PROBLEMS, generator=g)[:DRAWN] for g in generators]
        problems = torch.stack(problems)[seed]  # (R,D)
        uniform = torch.stack([torch.rand(3, DRAWN, EPISODES, generator=g) for g in generators])
        uniform = uniform[seed]  # (R,3,D,N)
        solve = solver[rows, problems].softmax(-1)  # (R,D,A)
        refine = refiner[rows, problems].softmax(-1)
        first = draw(solve, uniform[:, 0])  # (R,D,N)
        again = draw(refine, uniform[:, 2])
        saw = (first == 0).long()
        judge = verifier.softmax(-1)[rows[:, :, None], saw]  # (R,D,N,2)
        rejected = uniform[:, 1] < judge[..., 1]
        rewards = torch.where(rejected, again == 0, first == 0).float()
        calls = torch.stack([torch.ones_like(rewards)] * 2 + [rejected.float()])  # (3,R,D,N)
        weights = advantages_of(arm, rewards, rejected)
        weights = weights / calls.sum((2, 3), keepdim=True).clamp(min=1)  # (3,R,D,N)
        gradients = [torch.zeros_like(table) for table in tables]
        for agent, choice, probs in ((0, first, solve), (2, again, refine)):
            score = one_hot(choice, ANSWERS) - probs[..., None, :]  # (R,D,N,A)
            parts = (weights[agent, ..., None] * score).sum(2)  # (R,D,A)
            gradients[agent][rows, problems] = parts
        right = (rejected * rewards).sum(2, keepdim=True)  # (R,D,1)
        unequal = (right > 0) & (right < rejected.sum(2, keepdim=True))
        unequal_norms.append((parts * unequal).flatten(1).norm(dim=1))
        score = weights[1, ..., None] * (one_hot(rejected.long(), 2) - judge)  # (R,D,N,2)
        for right in (0, 1):
            gradients[1][:, right] = (score * (saw == right)[..., None]).sum((1, 2))
        for table, gradient in zip(tables, gradients):
            norm = gradient.flatten(1).norm(dim=1)  # (R,)
            table += (rate / norm.clamp(min=1))[:, None, None] * gradient
        norms.append(norm.masked_fill(calls[2].sum((1, 2)) == 0, torch.nan))  # the refiner's
        factors.append(refiner_factors(rewards, rejected))
    found = {"first_try": first_try, "seed": seed + 1, "success": success(*tables)}
    found["refiner_factor_mean"] = torch.cat(factors, 1).nanmean(1)
    found["refiner_norm_mean"] = torch.stack(norms, 1).nanmean(1)
    found["refiner_norm_unequal"] = torch.stack(unequal_norms, 1).mean(1)
    return pd.DataFrame({name: values.double().numpy() for name, values in found.items()})


def main(args: Args) -> None:
    torch.set_num_threads(1)
    start = time.perf_counter()
    tables = []
    for study, rate in RATES.items():
        for arm in ARMS:
            table = simulate(arm, args.seeds, rate, args.steps)
            tables.append(table.assign(study=study, arm=arm, learning_rate=rate))
    how = {"seconds": round(time.perf_counter() - start)} | about("torch")
    table = pd.concat(tables).round(4).astype({"seed": int}).assign(**how)
    table.to_csv(args.out, index=False, lineterminator="\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
