"""Policies that were trained on one game or on all meet each other and the base model: results/spiral_head_to_head.csv.

    python benchmarks/learning.py --study spiral_games --keep runs/spiral_games
    python benchmarks/head_to_head_spiral.py --runs runs/spiral_games

Every pair plays every game in both seats, sampled at temperature 1. A row is a pair, a game and a seat of the first of
the two: how many of its games it won, drew and lost; a forfeit is a loss.
"""

import csv
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from itertools import combinations
from pathlib import Path

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from algorithms import spiral_rae

ROOT = Path(__file__).resolve().parents[1]
GAMES = ("tictactoe", "kuhn", "negotiation")


@dataclass
class Args:
    runs: str
    """folder with one policy a folder, named <arm>-..., as learning.py --keep leaves it"""
    games: int = 256
    """games of each pair, kind and seat"""
    out: str = "benchmarks/results/spiral_head_to_head.csv"
    """CSV to write"""


def main(args: Args) -> None:
    torch.set_num_threads(1)
    flags, players, start = spiral_rae.Args(), {}, time.perf_counter()
    folders = {"base": None, **{path.name: str(path) for path in sorted(Path(args.runs).iterdir())}}
    for name, path in folders.items():
        flags.model_name_or_path = path
        players[name], tokenizer = spiral_rae.load_model(flags)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    how = {"command": " ".join(["python benchmarks/head_to_head_spiral.py", *sys.argv[1:]]), "commit": commit.strip()}
    how |= {"torch": version("torch"), "transformers": version("transformers"), "python": platform.python_version()}
    how |= {"device": f"CPU ({os.cpu_count()} cores, {platform.machine()}), 1 thread"}
    rows = []
    for one, other in combinations(players, 2):
        for game in GAMES:
            for seat, seats in enumerate(((one, other), (other, one))):
                seeds = [f"head to head {game} {i}" for i in range(args.games)]
                matches = [spiral_rae.new_match(game, seats, seed, flags) for seed in seeds]
                spiral_rae.play(players, tokenizer, matches, flags)
                gains = [match.margin(seat) for match in matches]
                row = {"player": one, "opponent": other, "game": game, "seat": seat, "games": args.games}
                row |= {"win": sum(gain > 0 for gain in gains), "draw": sum(gain == 0 for gain in gains)}
                rows.append(row | {"loss": sum(gain < 0 for gain in gains)})
        print(f"{one} - {other}: {(time.perf_counter() - start) / 60:.1f} min", flush=True)
    how |= {"minutes": f"{(time.perf_counter() - start) / 60:.1f}"}
    with (ROOT / args.out).open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *how], lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | how for row in rows)


if __name__ == "__main__":
    main(tyro.cli(Args))
