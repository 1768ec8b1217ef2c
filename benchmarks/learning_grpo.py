"""What the group baseline of GRPO buys, at a size that a laptop reruns: every arm, several seeds, raw rows in CSVs.

    python benchmarks/learning_grpo.py --jobs 2              # about half an hour on 2 cores; takes up where it stopped
    python benchmarks/make_tables.py                         # redraws tables and figures from the CSVs

A sweep with a seed of its own (SWEEP_SEED) chooses the learning rates of `dapo_loss` and `reinforce`: the best final
eval/mean_at_8. The other arms take that of `dapo_loss`. Then every arm runs on its seeds, one process a run, one thread
a process. Two files are written: results/grpo_runs.csv has one row a run (command, commit, versions, device, minutes,
memory, final scores), results/grpo_curves.csv has evaluations and some training metrics (run, step, tag, value).
"""

import csv
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from threading import Lock

import tyro

ROOT = Path(__file__).resolve().parents[1]
RUNS, CURVES = ROOT / "benchmarks/results/grpo_runs.csv", ROOT / "benchmarks/results/grpo_curves.csv"
COLUMNS = "run arm stage seed learning_rate pass_at_1 mean_at_8 pass_at_8 first_mean_at_8 minutes peak_memory_gb device"
COLUMNS = [*COLUMNS.split(), "threads", "torch", "transformers", "python", "commit", "command"]
TAGS = "train/reward train/rewards/correctness/mean train/frac_reward_zero_std train/entropy train/grad_norm".split()
TAGS += ["train/completions/mean_length", "train/num_tokens"]
COMMON = ("--max-steps", "100")  # two thirds of the default run
RATES = ("1e-4", "2e-4", "4e-4")
SWEEP_SEED = 100
DAPO = ("--loss-type", "dapo")
ARMS = {  # name: (flags, seeds of the comparison, arm whose sweep gives the learning rate)
    "grpo": (("--loss-type", "grpo"), (1, 2, 3), "dapo_loss"),
    "dapo_loss": (DAPO, (1, 2, 3), "dapo_loss"),
    "reinforce": ((*DAPO, "--advantage", "none"), (1, 2, 3), "reinforce"),
    "shuffled": ((*DAPO, "--advantage", "shuffled"), (1, 2, 3), "dapo_loss"),
    "dr_grpo": (("--loss-type", "dr_grpo", "--scale-rewards", "none"), (1, 2, 3), "dapo_loss"),
}


@dataclass
class Args:
    jobs: int = 2
    """runs at the same time, one thread each"""
    arms: tuple[str, ...] = tuple(ARMS)
    """arms to run, in this order"""
    extra: str = ""
    """further flags for every run, e.g. "--max-steps 20" to try the program; such rows are marked by their command"""


def read(path: Path) -> list[dict]:
    """Rows of a CSV, none if it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append(path: Path, columns: list[str], rows: list[dict]) -> None:
    """Add rows to a CSV, with a header if it is new."""
    new = not path.exists()
    path.parent.mkdir(exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def run_once(arm: str, stage: str, seed: int, rate: str, extra: str, lock: Lock) -> None:
    """One training run in a process of its own; its rows are added when it has finished."""
    run = f"{arm}-{stage}-{rate}-{seed}"
    with lock:
        if any(row["run"] == run for row in read(RUNS)):
            return
    flags = [*COMMON, *ARMS[arm][0], "--learning-rate", rate, "--seed", str(seed), *extra.split()]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        command = [sys.executable, "algorithms/grpo.py", *flags, "--device", "cpu", "--output-dir", f"{folder}/run"]
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
        )
        minutes = (time.perf_counter() - start) / 60
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
        metrics, perf = read(Path(folder, "run/metrics.csv")), read(Path(folder, "run/perf.csv"))
    evaluations = [row for row in metrics if row["tag"].startswith("eval/")]
    last = {row["tag"]: row["value"] for row in evaluations}
    first = {row["tag"]: row["value"] for row in reversed(evaluations)}
    row = {"run": run, "arm": arm, "stage": stage, "seed": seed, "learning_rate": rate}
    row |= {name: f"{float(last[f'eval/{name}']):.4f}" for name in ("pass_at_1", "mean_at_8", "pass_at_8")}
    row |= {"first_mean_at_8": f"{float(first['eval/mean_at_8']):.4f}", "minutes": f"{minutes:.2f}", "threads": 1}
    row |= {"peak_memory_gb": f"{max(float(r['value']) for r in perf if r['tag'].endswith('memory_gb')):.2f}"}
    row |= {"device": f"CPU ({os.cpu_count()} cores, {platform.machine()})", "python": platform.python_version()}
    row |= {"torch": version("torch"), "transformers": version("transformers"), "commit": commit.strip()}
    row |= {"command": f"python algorithms/grpo.py {' '.join(flags)}"}
    curves = [{"run": run, **r} for r in metrics if r["tag"].startswith("eval/") or r["tag"] in TAGS]
    curves = [r | {"value": f"{float(r['value']):.6g}"} for r in curves]
    with lock:
        append(RUNS, COLUMNS, [row])
        append(CURVES, ["run", "step", "tag", "value"], curves)
        print(f"{run}: pass@1 {row['pass_at_1']}  mean@8 {row['mean_at_8']}  {row['minutes']} min", flush=True)


def best_rate(arm: str) -> str:
    """The learning rate with the best final eval/mean_at_8 in the sweep."""
    sweep = [row for row in read(RUNS) if row["arm"] == ARMS[arm][2] and row["stage"] == "sweep"]
    return max(sweep, key=lambda row: float(row["mean_at_8"]))["learning_rate"]


def main(args: Args) -> None:
    lock = Lock()
    with ThreadPoolExecutor(args.jobs) as pool:
        sweep = [(arm, "sweep", SWEEP_SEED, rate) for arm in args.arms for rate in RATES if ARMS[arm][2] == arm]
        list(pool.map(lambda job: run_once(*job, args.extra, lock), sweep))
        final = [(seed, arm) for arm in args.arms for seed in ARMS[arm][1]]  # seed by seed: a table exists early
        list(
            pool.map(lambda job: run_once(job[1], "final", job[0], best_rate(job[1]), args.extra, lock), sorted(final))
        )


if __name__ == "__main__":
    main(tyro.cli(Args))
