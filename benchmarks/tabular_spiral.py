"""SPIRAL's role baseline and its controls with tables of logits on Kuhn poker: results/tabular_spiral_*.csv.

    python benchmarks/tabular_spiral.py          # 2 to 5 minutes on one core
    python benchmarks/make_tables.py             # redraws the tables and the figure

The policy is one logit (of betting or calling) for each of Kuhn's 12 information sets, 0 at the start; it plays both
seats. A step plays a number of hands and makes one step of plain gradient descent on the loss that
algorithms/spiral_rae.py trains with: `policy_loss` with decisions in place of tokens, added up within a hand and averaged
over hands. Advantages are those of its
`RoleBaseline`. Arms: `role` (a moving average for each role), `global` (one for both), `none`. A handicap c is paid by
player 1 to player 0 in every hand; it changes no decision.

variance: exact, by enumerating all hands of the uniform policy: the sum of variances of the 12 components of one
    hand's gradient, without a baseline, with the exact mean of each role, and with the moving averages after many hands
standard: c = 0, 64 hands a step, learning rate 0.5, 3000 steps
small: c = 0, 16 hands a step, learning rate 0.3, 2000 steps
handicap: the same with c = 3
games: c = 3 and c = -3 as two games with tables of their own, drawn at random, 32 hands a step, learning rate 0.6: each
    game has the data and the steps of `handicap`. Arms: `role` (an average for each game and role), `role_only`, `none`
rates: `small` and `handicap` with other learning rates

Reported: squared gradient norm, mean over the first 100 steps; NashConv (what both players could gain; mean over games)
of the last policy and of the mean of all policies that have played; the averages after the last hand, in the order of
game and role. `cfr` is alternating CFR. All runs of a study are computed at once; `seconds` is the whole program.
"""

import csv
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path

import torch
import tyro
from torch import Tensor
from torch.nn.functional import logsigmoid

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from algorithms.spiral_rae import RoleBaseline, policy_loss
from envs.game_solvers import DEALS, KUHN_INFOSETS, kuhn_cfr, kuhn_nash_conv, kuhn_return

ROOT = Path(__file__).resolve().parents[1]
ARMS, GAME_ARMS, DECAY, FIRST = ("role", "global", "none"), ("role", "role_only", "none"), 0.95, 100
RATES = (0.1, 0.2, 0.3, 0.5, 0.8, 1.3, 2.0)
HOW = ["command", "seconds", "torch", "python", "device", "commit"]
COLUMNS = ["run", "study", "arm", "handicaps", "hands", "learning_rate", "steps", "seed", "squared_norm"]
COLUMNS += ["nash_conv_average", "nash_conv_last", "baselines", *HOW]
VARIANCE_COLUMNS = ["baseline", "handicap", "variance", "squared_mean", *HOW]


@dataclass
class Args:
    seeds: int = 20
    """seeds 1, 2, ... of every row of the tables"""
    out: str = "benchmarks/results/tabular_spiral"
    """CSVs to write: this with _variance.csv, _runs.csv and _curves.csv"""


@dataclass(frozen=True)
class Study:
    """Settings of the runs that are compared."""

    handicaps: tuple[float, ...]
    hands: int
    learning_rate: float
    steps: int
    arms: tuple[str, ...] = ARMS


STUDIES = {
    "standard": Study((0.0,), 64, 0.5, 3000),
    "small": Study((0.0,), 16, 0.3, 2000),
    "handicap": Study((3.0,), 16, 0.3, 2000),
    "games": Study((3.0, -3.0), 32, 0.6, 2000, GAME_ARMS),
}


def history(first: int, second: int, third: int) -> str:
    """What was done in a hand in which each decision, if it comes, is to pass (0) or to bet or call (1)."""
    return "".join("pb"[action] for action in (first, second, third)[: 3 if (first, second) == (0, 1) else 2])


LINES = [[[history(a, b, c) for c in (0, 1)] for b in (0, 1)] for a in (0, 1)]
RETURNS = torch.tensor([[[[kuhn_return(d, h) for h in x] for x in y] for y in LINES] for d in DEALS]).double()
CARDS = torch.tensor(DEALS)  # (6,2)
ROLES = torch.tensor([0, 1, 0])  # of the decisions of a hand
AFTER = torch.tensor([[KUHN_INFOSETS.index(f"0{name}") for name in names] for names in (("p", "b"), ("", "pb"))])


def play(bets: Tensor, games: Tensor, deals: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Hands of R runs. Probabilities of betting (R,G,12), game and deal of each hand (R,H), three uniform numbers for
    the decisions (R,H,3) -> information set (R,H,3), whether a bet or call was made (R,H,3), chips of player 0 (R,H)"""
    runs, cards = torch.arange(len(bets))[:, None], CARDS[deals]  # (R,1), (R,H,2)
    sets, acted = [AFTER[1, 0] + cards[..., 0]], []  # (R,H) each
    for decision in range(3):
        acted.append((uniform[..., decision] < bets[runs, games, sets[decision]]).long())
        if decision == 0:
            sets.append(AFTER[0][acted[0]] + cards[..., 1])
        if decision == 1:  # counts only after a pass and a bet
            sets.append(AFTER[1, 1] + cards[..., 0])
    return torch.stack(sets, -1), torch.stack(acted, -1), RETURNS[deals, *acted]


def advantages(arm: str, baseline: RoleBaseline, games: list[int], returns: list[list[float]]) -> list[list[float]]:
    """Advantages of both roles in each hand, hands and then roles in order, as algorithms/spiral_rae.py takes them."""
    if arm == "none":
        return returns
    keys = {"role": lambda game, role: (game, role), "global": lambda game, role: (game, -1)}
    key = keys.get(arm, lambda game, role: ("any", role))
    return [[baseline.advantage(*key(game, role), row[role]) for role in (0, 1)] for game, row in zip(games, returns)]


def gradient(logits: Tensor, games: Tensor, sets: Tensor, acted: Tensor, found: Tensor) -> Tensor:
    """Gradient of the loss of each run by its logits. (R,G,12), (R,H), (R,H,3) twice, advantages (R,H,2) -> (R,G,12)"""
    logits = logits.detach().requires_grad_()
    chosen = logits[torch.arange(len(logits))[:, None, None], games[..., None], sets]  # (R,H,3)
    logprobs = logsigmoid(torch.where(acted == 1, chosen, -chosen)).flatten(0, 1)  # (R*H,3)
    mask = torch.ones_like(acted).bool()
    mask[..., 2] = (acted[..., 0] == 0) & (acted[..., 1] == 1)
    by_decision, mask = found[..., ROLES].flatten(0, 1), mask.flatten(0, 1)  # (R*H,3) each
    losses, _ = policy_loss(logprobs, logprobs.detach(), by_decision)  # (R*H,3)
    hands = games.size(1)
    return torch.autograd.grad((losses * mask).sum() / hands, logits)[0]


def shown(steps: int) -> list[int]:
    """Steps at which a run is measured: 1, 2, 3, 5, 10, 20, ... and the last."""
    return sorted({mark for power in range(5) for base in (1, 2, 3, 5) if (mark := base * 10**power) < steps} | {steps})


def simulate(study: Study, runs: list[tuple[str, int]]) -> list[tuple[dict, list[tuple[int, float, float]]]]:
    """Train (arm, seed) pairs, which depend on their own arm and seed alone. For each: results, and its curve: step,
    NashConv of the average and of the last policy."""
    seeds = sorted({seed for _, seed in runs})
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    which = torch.tensor([seeds.index(seed) for _, seed in runs])  # (R,)
    baselines, handicaps = [RoleBaseline(DECAY) for _ in runs], torch.tensor(study.handicaps).double()
    logits = torch.zeros(len(runs), len(handicaps), len(KUHN_INFOSETS)).double()  # (R,G,12)
    played, norms, curves, marks = torch.zeros_like(logits), [], [[] for _ in runs], set(shown(study.steps))
    size = (study.hands,)
    for step in range(1, study.steps + 1):
        games = torch.stack([torch.randint(len(handicaps), size, generator=g) for g in generators])[which]  # (R,H)
        deals = torch.stack([torch.randint(len(DEALS), size, generator=g) for g in generators])[which]  # (R,H)
        uniform = torch.stack([torch.rand(*size, 3, generator=g) for g in generators])[which]  # (R,H,3)
        played += (bets := logits.sigmoid())
        sets, acted, chips = play(bets, games, deals, uniform)
        chips = chips + handicaps[games]  # (R,H)
        returns = torch.stack([chips, -chips], -1).tolist()  # (R,H,2)
        found = [advantages(arm, *rest) for (arm, _), *rest in zip(runs, baselines, games.tolist(), returns)]
        step_down = gradient(logits, games, sets, acted, torch.tensor(found).double())  # (R,G,12)
        logits = logits - study.learning_rate * step_down
        norms.append(step_down.square().sum((1, 2)))
        if step in marks:
            for run, curve in enumerate(curves):
                tables = (played[run] / step).tolist(), logits[run].sigmoid().tolist()
                curve.append((step, *(sum(map(kuhn_nash_conv, x)) / len(handicaps) for x in tables)))
    norms, results = torch.stack(norms)[:FIRST].mean(0).tolist(), []  # (R,)
    for norm, baseline, curve in zip(norms, baselines, curves):
        values = [f"{value:.3f}" for _, value in sorted(baseline.values.items())]
        row = {"squared_norm": f"{norm:.4f}", "baselines": " ".join(values)}
        results.append((row | dict(zip(COLUMNS[9:11], (f"{value:.4f}" for value in curve[-1][1:]))), curve))
    return results


def exact_variance(handicap: float) -> Iterator[tuple[str, float, float]]:
    """Of one hand's gradient by the uniform policy, for each kind of baseline: its name, the sum of variances of the
    components, the squared norm of the mean.

    All are scale * return - b with a random b that does not depend on the hand. After many hands of independent returns
    of mean m and variance v, the moving average of a role has mean m and variance v (1 - decay) / (1 + decay). The one
    of both roles takes in every return with both signs, role 0 first: so role 1's own return is in it, too.
    """
    bets, hands = torch.full((1, 1, 12), 0.5).double(), list(product(range(len(DEALS)), *[(0.25, 0.75)] * 3))
    deals, uniform = torch.tensor([x[0] for x in hands])[None], torch.tensor([x[1:] for x in hands])[None]
    games = torch.zeros_like(deals)  # (1,H); all hands are equally likely
    sets, acted, chips = play(bets, games, deals, uniform)
    returns = torch.stack([chips + handicap, -chips - handicap], -1)[0]  # (H,2)
    mean, variance = returns.mean(0), returns.var(0, correction=0)  # (2,) each
    zero, one, off = torch.zeros(2).double(), torch.ones(2).double(), 1 - DECAY
    both = -off / (1 + DECAY) * mean[0], off**4 / (1 - DECAY**4) * variance[0]  # mean, variance when role 0 takes it
    factor = torch.tensor([1.0, DECAY]).double()  # when role 1 does, role 0's return is in it with weight off
    cases = {
        "none": (one, zero, zero),
        "mean": (one, mean, zero),
        "role": (one, mean, off / (1 + DECAY) * variance),
        "global": (torch.tensor([1.0, 1.0 + off]).double(), factor * both[0], factor**2 * both[1]),
    }
    logits, each = torch.zeros(len(hands), 1, 12).double(), [x.transpose(0, 1) for x in (games, sets, acted)]
    for name, (scale, b_mean, b_variance) in cases.items():
        one_hand = gradient(logits, *each, (scale * returns - b_mean)[:, None])[:, 0]  # (H,12)
        deviation = b_variance.sqrt().expand_as(returns)[:, None]  # (H,1,2) of b
        noise = gradient(logits, *each, deviation)[:, 0]  # (H,12)
        squared_mean = one_hand.mean(0).square().sum()
        yield name, ((one_hand**2 + noise**2).sum(1).mean() - squared_mean).item(), squared_mean.item()


def write(path: str, columns: list[str], rows: list[dict]) -> None:
    with (ROOT / path).open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main(args: Args) -> None:
    torch.set_num_threads(1)
    start, rows, curves, exact = time.perf_counter(), [], [], []
    for handicap in (0.0, 3.0):
        for name, variance, mean in exact_variance(handicap):
            row = {"baseline": name, "handicap": f"{handicap:g}", "variance": f"{variance:.5f}"}
            exact.append(row | {"squared_mean": f"{mean:.5f}"})
    same = [replace(STUDIES[name], learning_rate=rate) for name in ("small", "handicap") for rate in RATES]
    for name, study in [*STUDIES.items(), *(("rates", study) for study in same)]:
        runs = [(arm, seed) for arm in study.arms for seed in range(1, args.seeds + 1)]
        settings = {"handicaps": " ".join(f"{c:g}" for c in study.handicaps), "hands": study.hands}
        settings |= {"learning_rate": study.learning_rate, "steps": study.steps}
        where = f"{name}-{settings['handicaps']}-{study.learning_rate}" if name == "rates" else name
        for (arm, seed), (result, curve) in zip(runs, simulate(study, runs)):
            run = {"run": f"{where}-{arm}-{seed}"}
            rows.append(run | {"study": name, "arm": arm, "seed": seed} | settings | result)
            for step, *values in curve if name in STUDIES else []:
                for tag, value in zip(("nash_conv_average", "nash_conv_last"), values):
                    curves.append(run | {"step": step, "tag": tag, "value": f"{value:.4f}"})
    for step, policy in enumerate(islice(kuhn_cfr(), STUDIES["standard"].steps), 1):
        if step < 100 or step % 20 == 0:
            value = f"{kuhn_nash_conv(policy):.6f}"
            curves.append({"run": "cfr", "step": step, "tag": "nash_conv_average", "value": value})
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    how = {"command": " ".join(["python benchmarks/tabular_spiral.py", *sys.argv[1:]]), "commit": commit.strip()}
    how |= {"seconds": round(time.perf_counter() - start), "torch": torch.__version__}
    how |= {"python": platform.python_version(), "device": f"CPU, 1 thread ({platform.machine()})"}
    write(f"{args.out}_variance.csv", VARIANCE_COLUMNS, [row | how for row in exact])
    write(f"{args.out}_runs.csv", COLUMNS, [row | how for row in rows])
    write(f"{args.out}_curves.csv", ["run", "step", "tag", "value"], curves)
    print(f"{len(rows)} runs in {how['seconds']} s: {args.out}_*.csv")


if __name__ == "__main__":
    main(tyro.cli(Args))
