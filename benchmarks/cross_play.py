"""Trained teams of pong against each other: every learner of the study against every other.

    python benchmarks/study.py fm3q_pong --keep runs/pong
    python benchmarks/cross_play.py runs/pong          # writes results/fm3q_cross_play.csv

Teams of the same seed meet. Scores are means over both sides; every pair is there from both views.
"""

import json
import sys
import time
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path

import pandas as pd
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from algorithms import fm3q  # noqa: E402
from benchmarks.about import RESULTS, about  # noqa: E402


@dataclass
class Args:
    runs: tyro.conf.Positional[str]
    """folder of the study's runs, each in LEARNER_SEED_RATE"""
    output: str = str(RESULTS / "fm3q_cross_play.csv")
    """CSV to write"""


def main(args: Args) -> None:
    """Play every pair, sweeps left out, and write the CSV anew."""
    start = time.perf_counter()
    teams = {}
    for path in sorted(Path(args.runs).iterdir()):
        learner, seed, _ = path.name.rsplit("_", 2)
        saved = fm3q.Args(**json.loads((path / "args.json").read_text()))
        teams[learner, int(seed)] = fm3q.load_teams(str(path), saved, "cpu"), replace(saved, eval_games=1000)
    rows = []
    for (learner, seed), (opponent, other) in permutations(teams, 2):
        if seed == other and seed > 1 and learner != opponent:
            ours, saved = teams[learner, seed]
            theirs = fm3q.player(teams[opponent, other][0])
            found = fm3q.match("opponent", fm3q.player(ours), theirs, saved, "cpu")
            row = {"task": opponent, "arm": learner, "seed": seed}
            for score in ("return", "win", "loss"):
                sides = [found[f"eval/opponent/{side}/{score}"] for side in ("pro", "ant")]
                row[score] = sum(sides) / 2
            rows.append(row)
    how = {"seconds": round(time.perf_counter() - start)} | about("torch")
    pd.DataFrame(rows).assign(**how).to_csv(args.output, index=False, lineterminator="\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
