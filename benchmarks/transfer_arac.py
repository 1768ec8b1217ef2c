"""One trained ARAC policy on graphs that it has not seen: share of games won beside its reference's.

    python algorithms/arac.py --output-dir runs/cycle_8
    python benchmarks/transfer_arac.py --run runs/cycle_8     # a minute on one core; writes results/arac_transfer.csv

Every row is what `arac.py --evaluate RUN` prints with the flags of the row.
"""

import csv
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
FAR = "--evader dp --start independent --horizon"
GAMES = (
    *("", "--graph cycle_6", "--graph cycle_10 --horizon 20", "--graph cycle_12 --horizon 24"),
    *("--graph cycle_16 --horizon 32", "--graph path_8 --horizon 24", "--graph petersen"),
    *("--graph grid_4x4 --horizon 32", f"--graph grid_4x4 {FAR} 32", f"--graph grid_6x6 {FAR} 48"),
    *(f"--graph city_30 {FAR} 64", f"--graph grid_10x10 --asynchronous {FAR} 128"),
)


@dataclass
class Args:
    run: str
    """run folder of arac.py"""
    csv: str = "benchmarks/results/arac_transfer.csv"
    """CSV to write"""


def score(run: str, flags: str) -> dict[str, str]:
    """What --evaluate prints in its last line: graph, then player_success, player_steps."""
    command = [sys.executable, str(ROOT / "algorithms/arac.py"), "--evaluate", run, *shlex.split(flags)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    words = output.splitlines()[-1].split()[1:]
    return {tag.removeprefix("eval/").replace("/", "_"): value for tag, value in zip(words[::2], words[1::2])}


def main(args: Args) -> None:
    columns = [f"{player}_{what}" for player in ("greedy", "sampled", "reference") for what in ("success", "steps")]
    with Path(args.csv).open("w", newline="") as file:
        writer = csv.DictWriter(file, ["flags", *columns], lineterminator="\n")
        writer.writeheader()
        for flags in GAMES:
            writer.writerow({"flags": flags} | score(args.run, flags))
            print(flags or "its own", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args))
