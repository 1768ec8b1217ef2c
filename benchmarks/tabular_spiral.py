"""SPIRAL's role baseline with tables of logits on Kuhn poker: results/tabular_spiral_*.csv.

    python benchmarks/tabular_spiral.py          # 2 to 5 minutes on one core

One logit (of betting or calling) for each of Kuhn's 12 information sets plays both seats. A step
plays 16 hands and makes one step of gradient descent on `policy_loss` of algorithms/spiral_rae.py,
with the advantages of its `RoleBaseline`. Arms: `role` (a moving average for each role), `global`
(one for both), `none`. In every hand player 1 pays player 0 a handicap. Reported: squared gradient
norm of the first 100 steps, NashConv of the mean of all policies, and, exactly, the variance of one
hand's gradient by the uniform policy.
"""

import sys
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pandas as pd
import torch
import tyro
from torch import Tensor
from torch.nn.functional import logsigmoid

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from algorithms.spiral_rae import RoleBaseline, policy_loss  # noqa: E402
from benchmarks.about import RESULTS, about  # noqa: E402
from envs.game_solvers import DEALS, KUHN_INFOSETS, kuhn_nash_conv, kuhn_return  # noqa: E402

DECAY = 0.95
HANDS = 16
ARMS = ("role", "global", "none")
STUDIES = [("small", 0, 0.3), ("handicap", 3, 0.3)]  # name, handicap, learning rate
STUDIES += [("rates", h, rate) for h in (0, 3) for rate in (0.1, 0.2, 0.3, 0.5, 0.8, 1.3, 2.0)]
ENDS = {(0, 0): ("pp", "pp"), (0, 1): ("pbp", "pbb"), (1, 0): ("bp", "bp"), (1, 1): ("bb", "bb")}
RETURNS = [kuhn_return(deal, end) for deal in DEALS for ends in ENDS.values() for end in ends]
RETURNS = torch.tensor(RETURNS).double().view(6, 2, 2, 2)  # by deal and three decisions
CARDS = torch.tensor(DEALS)  # (6,2)
FIRST, CALL = (KUHN_INFOSETS.index(name) for name in ("0", "0pb"))  # of the lowest card
SECOND = torch.tensor([KUHN_INFOSETS.index(name) for name in ("0p", "0b")])


@dataclass
class Args:
    seeds: int = 20
    """seeds 1, 2, ... of every row of the tables"""
    steps: int = 2000
    """gradient steps"""
    out: str = str(RESULTS / "tabular_spiral")
    """CSVs to write: this with _variance.csv and _runs.csv"""


def play(bets: Tensor, deals: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities of betting (R,12), deals (R,H), uniform numbers (R,H,3) -> information sets and
    decisions (R,H,3), of which the third counts after a pass and a bet, chips of player 0 (R,H)."""
    cards = CARDS[deals]  # (R,H,2)
    bets = bets[:, None].expand(-1, cards.size(1), -1)  # (R,H,12)
    sets = torch.stack([FIRST + cards[..., 0]] * 2 + [CALL + cards[..., 0]], -1)
    bet = uniform < bets.gather(2, sets)
    sets[..., 1] = SECOND[bet[..., 0].long()] + cards[..., 1]
    acted = (uniform < bets.gather(2, sets)).long()
    return sets, acted, RETURNS[deals, *acted.unbind(-1)]


def advantages(arm: str, baseline: RoleBaseline, returns: list[list[float]]) -> list[list[float]]:
    """Of both roles in each hand, in the order in which algorithms/spiral_rae.py takes them."""
    if arm == "none":
        return returns
    keys = (0, 1) if arm == "role" else ("both", "both")
    return [[baseline.advantage("kuhn", k, x) for k, x in zip(keys, row)] for row in returns]


def gradient(logits: Tensor, sets: Tensor, acted: Tensor, found: Tensor) -> Tensor:
    """Of each run's loss. (R,12), (R,H,3) twice, advantages (R,H,2) -> (R,12)"""
    logits = logits.detach().requires_grad_()
    chosen = logits.gather(1, sets.flatten(1)).view_as(sets)  # (R,H,3)
    logprobs = logsigmoid(torch.where(acted == 1, chosen, -chosen)).flatten(0, 1)
    by_decision = found[..., [0, 1, 0]].flatten(0, 1)
    losses, _ = policy_loss(logprobs, logprobs.detach(), by_decision)  # (R*H,3)
    third = (acted[..., 0] == 0) & (acted[..., 1] == 1)
    played = torch.stack([torch.ones_like(third)] * 2 + [third], -1).flatten(0, 1)
    return torch.autograd.grad((losses * played).sum() / sets.size(1), logits)[0]


def simulate(handicap: int, rate: float, arm: str, seeds: int, steps: int) -> pd.DataFrame:
    """Train all seeds of an arm at once; a seed's run depends on nothing else."""
    generators = [torch.Generator().manual_seed(1 + seed) for seed in range(seeds)]
    baselines = [RoleBaseline(DECAY) for _ in range(seeds)]
    logits = torch.zeros(seeds, len(KUHN_INFOSETS)).double()  # (R,12)
    played, reached = torch.zeros(2, *logits.shape).double()  # for the average, see kuhn_average
    norms = []
    for _ in range(steps):
        deals = torch.stack([torch.randint(len(DEALS), (HANDS,), generator=g) for g in generators])
        uniform = torch.stack([torch.rand(HANDS, 3, generator=g) for g in generators])
        bets = logits.sigmoid()
        weights = torch.ones_like(bets)
        weights[:, 3:6] = 1 - bets[:, :3]  # where player 0 has checked
        played += weights * bets
        reached += weights
        sets, acted, chips = play(bets, deals, uniform)
        returns = torch.stack([chips + handicap, -chips - handicap], -1).tolist()  # (R,H,2)
        found = [advantages(arm, *row) for row in zip(baselines, returns)]
        step_down = gradient(logits, sets, acted, torch.tensor(found).double())
        logits = logits - rate * step_down
        norms.append(step_down.square().sum(1))
    found = {"seed": range(1, seeds + 1), "squared_norm": torch.stack(norms[:100]).mean(0)}
    found["nash_conv_average"] = [kuhn_nash_conv(table) for table in (played / reached).tolist()]
    return pd.DataFrame(found).assign(arm=arm, handicaps=handicap, learning_rate=rate)


def exact_variance(handicap: int) -> list[dict]:
    """Of one hand's gradient, for advantages scale * return - b with a random b of earlier hands. A
    moving average of returns with mean m and variance v has mean m and variance
    v (1 - decay) / (1 + decay). That of both roles has just taken in role 0's return of the same
    hand when role 1 is compared with it."""
    hands = list(product(range(len(DEALS)), *[(0.25, 0.75)] * 3))  # all equally likely
    deals = torch.tensor([hand[0] for hand in hands])[None]
    uniform = torch.tensor([hand[1:] for hand in hands])[None]
    sets, acted, chips = play(torch.full((1, 12), 0.5), deals, uniform)
    returns = torch.stack([chips + handicap, -chips - handicap], -1)[0]  # (H,2)
    mean = returns.mean(0)
    variance = returns.var(0, correction=0)
    off = 1 - DECAY
    factor = torch.tensor([1.0, DECAY]).double()
    both_mean = -off / (1 + DECAY) * mean[0] * factor
    both_variance = off**4 / (1 - DECAY**4) * variance[0] * factor**2
    one = torch.ones(2).double()
    cases = {  # scale, mean of b, variance of b
        "none": (one, 0 * mean, 0 * variance),
        "role": (one, mean, off / (1 + DECAY) * variance),
        "global": (torch.tensor([1.0, 1.0 + off]).double(), both_mean, both_variance),
    }
    logits = torch.zeros(len(hands), 12).double()
    each = (sets.transpose(0, 1), acted.transpose(0, 1))
    rows = []
    for name, (scale, b_mean, b_variance) in cases.items():
        signal = gradient(logits, *each, (scale * returns - b_mean)[:, None])  # (H,12)
        noise = gradient(logits, *each, b_variance.sqrt().expand_as(returns)[:, None])
        squared = (signal**2 + noise**2).sum(1).mean() - signal.mean(0).square().sum()
        rows.append({"baseline": name, "handicap": handicap, "variance": squared.item()})
    return rows


def main(args: Args) -> None:
    torch.set_num_threads(1)
    start = time.perf_counter()
    exact = pd.DataFrame(exact_variance(0) + exact_variance(3))
    runs = []
    for study, handicap, rate in STUDIES:
        for arm in ARMS:
            found = simulate(handicap, rate, arm, args.seeds, args.steps)
            runs.append(found.assign(study=study))
    how = {"seconds": round(time.perf_counter() - start)} | about("torch")
    for name, table in (("variance", exact), ("runs", pd.concat(runs))):
        path = f"{args.out}_{name}.csv"
        table.round(5).assign(**how).to_csv(path, index=False, lineterminator="\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
