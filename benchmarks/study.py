"""A queue of runs: every arm of a study on its seeds, two at a time, one thread each.

    python benchmarks/study.py grpo            # continues where it was stopped

A finished run is a row of results/<study>_runs.csv (arm, seed, learning rate, scores, minutes,
command, commit, versions) and its evaluations go to results/<study>_curves.csv. Arms first sweep
their learning rate on seed 1; then the best rate runs on the other seeds. A best rate at the edge
of its sweep is said at the end: widen its rates and start again.
"""

import csv
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
COLUMNS = (
    "arm seed learning_rate first_greedy first_mean_at_8 first_pass_at_8 greedy mean_at_8 pass_at_8 "
    "num_tokens minutes device torch transformers python commit command"
).split()
lock = Lock()


@dataclass(frozen=True)
class Arm:
    """A command without its learning rate and seed."""

    command: str
    rates: tuple[str, ...]  # of the sweep on seed 1
    seeds: tuple[int, ...]  # of the best rate


SHORT = "algorithms/grpo.py --max-steps 60 --eval-steps 20"
SEEDS = (2, 3, 4, 5, 6)
STUDIES = {
    "grpo": {
        "grpo": Arm(SHORT, ("5e-5", "1e-4", "2e-4", "4e-4"), SEEDS),
        "no_baseline": Arm(f"{SHORT} --advantage none", ("5e-5", "1e-4", "2e-4", "4e-4"), SEEDS),
        "shuffled": Arm(f"{SHORT} --advantage shuffled", ("2e-4",), SEEDS),
    },
}


def read(path: Path) -> list[dict]:
    """Rows of a CSV; none if there is no file."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def append(path: Path, columns: list[str], rows: list[dict]) -> None:
    """Add rows to a CSV, with a header if it is new."""
    new = not path.exists()
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def run(study: str, arm: str, rate: str, seed: int) -> None:
    """One run, unless its row is there already."""
    path = RESULTS / f"{study}_runs.csv"
    with lock:
        for row in read(path):
            if (row["arm"], row["learning_rate"], row["seed"]) == (arm, rate, str(seed)):
                return
    command = f"{STUDIES[study][arm].command} --learning-rate {rate} --seed {seed} --save-steps 0"
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, *shlex.split(command), "--output-dir", f"{folder}/run"]
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=one_thread)
        metrics = read(Path(folder, "run", "metrics.csv"))
    minutes = (time.perf_counter() - started) / 60
    evaluations = [row for row in metrics if row["tag"].startswith("eval/")]
    row = {
        "arm": arm,
        "seed": seed,
        "learning_rate": rate,
        "minutes": f"{minutes:.2f}",
        "device": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": subprocess.getoutput("git rev-parse --short HEAD"),
        "command": f"python {command}",
    }
    for entry in reversed(evaluations):
        row["first_" + entry["tag"].removeprefix("eval/")] = entry["value"]
    for entry in evaluations:
        row[entry["tag"].removeprefix("eval/")] = entry["value"]
    row["num_tokens"] = [m["value"] for m in metrics if m["tag"] == "train/num_tokens"][-1]
    curve = [{"arm": arm, "learning_rate": rate, "seed": seed, **entry} for entry in evaluations]
    with lock:
        append(path, COLUMNS, [row])
        columns = ["arm", "learning_rate", "seed", "step", "tag", "value"]
        append(RESULTS / f"{study}_curves.csv", columns, curve)
        score = f"{float(row['first_mean_at_8']):.3f} -> {float(row['mean_at_8']):.3f}"
        print(f"{arm} {rate} seed {seed}: mean_at_8 {score}, {minutes:.1f} min", flush=True)


def best_rate(study: str, arm: str) -> str:
    """The learning rate with the best mean_at_8 on seed 1."""
    rows = [row for row in read(RESULTS / f"{study}_runs.csv") if row["arm"] == arm]
    sweep = [row for row in rows if row["seed"] == "1"]
    return max(sweep, key=lambda row: float(row["mean_at_8"]))["learning_rate"]


def main(study: str) -> None:
    """The sweeps, then the seeds."""
    arms = STUDIES[study]
    with ThreadPoolExecutor(2) as pool:
        sweep = [(arm, rate, 1) for arm in arms for rate in arms[arm].rates]
        list(pool.map(lambda job: run(study, *job), sweep))
        seeds = [(arm, best_rate(study, arm), seed) for arm in arms for seed in arms[arm].seeds]
        list(pool.map(lambda job: run(study, *job), sorted(seeds, key=lambda job: job[2])))
    for arm in arms:
        rate = best_rate(study, arm)
        edges = (arms[arm].rates[0], arms[arm].rates[-1])
        if rate in edges and len(arms[arm].rates) > 1:
            print(f"{arm}: the best rate, {rate}, is at the edge of its sweep")


if __name__ == "__main__":
    main(sys.argv[1])
