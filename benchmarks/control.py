"""Does a method for control learn what its paper says: every arm on every task, several seeds, raw rows in CSVs.

    python benchmarks/control.py --study unimodal_poisson --jobs 2     # hours on 2 cores; takes up where it stopped
    python benchmarks/control.py --study unimodal_poisson --seeds 1 --arms poisson gaussian --tasks Hopper-v5
    python benchmarks/make_tables.py                                   # redraws tables and figures from the CSVs

The learning rate of an arm is the best of Study.rates on one task, with a seed of its own (SWEEP_SEED): the highest
return in training. An arm may have a fixed rate instead. Then all arms run on all tasks seed by seed, so that there is
a table early; arms marked `late` come after everything else. One process a run, one thread a process. Runs that the
CSV has are skipped, so the program can be stopped at any time and started again.

Two files are written. results/<study>_runs.csv has one row a run: train_return is the mean of the returns logged over
the last tenth of its steps (of a run of the sweep, the last fifth), every logged row counting the same; the two other
returns are those of the evaluation at the end. results/<study>_curves.csv has at most 50 rows a run, each the mean of
what was logged over a fiftieth of it; a return is missing where no episode ended.
"""

import csv
import math
import os
import platform
import shlex
import signal
import statistics
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
RETURN = "charts/episodic_return"
SWEEP_SEED, SWEEP_TAIL, FINAL_TAIL, BINS = 100, 0.2, 0.1, 50
SCORES = ("train_return", "eval_deterministic", "eval_sampled")
COLUMNS = ["run", "stage", "policy", "env", "seed", "learning_rate", *SCORES, "steps", "steps_per_second", "minutes"]
COLUMNS += "peak_memory_gb device threads torch gymnasium mujoco numpy python commit command".split()


@dataclass(frozen=True)
class Arm:
    """One row of a table."""

    flags: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    rate: str = ""  # a fixed learning rate; empty is the arm's own sweep
    common: tuple[str, ...] | None = None  # flags in place of the study's; () is the script's defaults
    steps: int = 0  # of every task in place of the study's
    late: bool = False  # runs after all other arms


@dataclass(frozen=True)
class Study:
    """A script, flags for all runs, tasks, and what is noted of a run."""

    script: str  # path
    common: tuple[str, ...]
    arms: dict[str, Arm]
    tasks: dict[str, int]  # environment: steps
    sweep: tuple[str, int]  # environment and steps
    tags: dict[str, str]  # column of the curves: tag
    rates: tuple[str, ...] = ("1e-4", "3e-4", "1e-3")


POLICIES = ("poisson", "poisson_repo", "gaussian", "beta", "categorical", "ordinal", "bang_bang")
STUDIES = {
    "unimodal_poisson": Study(
        script="algorithms/unimodal_poisson.py",
        common=("--num-envs", "8", "--num-steps", "256"),  # as many steps a batch as by default, and faster
        arms={name: Arm(("--policy", name)) for name in POLICIES}
        | {"gaussian_1m": Arm(("--policy", "gaussian"), (1, 2, 3), "3e-4", (), 1_000_000, late=True)},
        tasks={"InvertedPendulum-v5": 100_000, "Hopper-v5": 300_000, "HalfCheetah-v5": 300_000},
        sweep=("Hopper-v5", 102_400),
        tags={"return": RETURN, "entropy": "losses/entropy"}
        | {name: f"train/unimodal_poisson/{name}" for name in ("extreme_mass", "frac_multimodal")},
    ),
}


@dataclass
class Args:
    study: str = "unimodal_poisson"
    """which study to run: unimodal_poisson"""
    jobs: int = 2
    """runs at the same time, one thread each"""
    arms: tuple[str, ...] = ()
    """arms to run; none means all"""
    tasks: tuple[str, ...] = ()
    """tasks to run; none means all (the sweep has its own)"""
    seeds: tuple[int, ...] = ()
    """seeds to run; none means all of every arm"""
    extra: str = ""
    """further flags for every run, as in --extra="--total-timesteps 8192" to try the program; a row has its command"""
    results: str = "benchmarks/results"
    """folder of the CSVs"""


@dataclass(frozen=True)
class Job:
    """One training run."""

    stage: str  # sweep or final
    arm: str
    env: str
    seed: int
    rate: str
    steps: int

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.env}-{self.stage}-{self.rate}-{self.seed}"


RUNNING: set[subprocess.Popen] = set()
LOCK = Lock()  # of the CSVs


def read(path: Path) -> list[dict]:
    """Rows of a CSV, none if it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append(path: Path, columns: list[str], rows: list[dict]) -> None:
    """Add rows to a CSV, with a header if it is new."""
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def tail(metrics: list[dict], tag: str, share: float) -> float | None:
    """Mean of a metric over the last share of the steps; its last value if none was logged there, None if never."""
    rows = [(int(row["step"]), float(row["value"])) for row in metrics if row["tag"] == tag]
    begin = (1 - share) * max(int(row["step"]) for row in metrics)
    late = [value for step, value in rows if step > begin] or [value for _, value in rows[-1:]]
    return statistics.mean(late) if late else None


def curves(metrics: list[dict], tags: dict[str, str]) -> list[dict]:
    """At most BINS rows: the step where a bin ends, and the mean of each metric in it, None where there was none."""
    width = max(int(row["step"]) for row in metrics) / BINS
    names, bins = {tag: name for name, tag in tags.items()}, {}
    for row in metrics:
        if row["tag"] in names:
            number = max(1, math.ceil(int(row["step"]) / width))
            bins.setdefault(number, {}).setdefault(names[row["tag"]], []).append(float(row["value"]))
    found = [{"step": round(number * width), **bins[number]} for number in sorted(bins)]
    return [row | {name: statistics.mean(row[name]) if name in row else None for name in tags} for row in found]


def words(study: Study, job: Job, extra: str) -> list[str]:
    """Words of the command behind `python`."""
    arm = study.arms[job.arm]
    flags = [*(study.common if arm.common is None else arm.common), *arm.flags, "--env-id", job.env]
    flags += ["--total-timesteps", str(job.steps), "--learning-rate", job.rate, "--seed", str(job.seed)]
    flags += ["--eval-episodes", "0"] if job.stage == "sweep" else []  # the sweep goes by returns in training
    return [study.script, *flags, *extra.split()]


def commit(script: str) -> str:
    """The commit that is checked out; marked where the script differs from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("-modified" if git("status", "--porcelain", script) else "")


def train(args: Args, study: Study, job: Job) -> bool:
    """One training run in a process of its own; its rows are added when it has finished. False if it failed."""
    runs, arm = Path(args.results, f"{args.study}_runs.csv"), words(study, job, args.extra)
    with LOCK:
        if any(row["run"] == job.name for row in read(runs)):
            return True
    with tempfile.TemporaryDirectory() as folder:  # MuJoCo writes its log file there too
        made, start = commit(study.script), time.perf_counter()
        command = [sys.executable, str(ROOT / arm[0]), *arm[1:], "--device", "cpu", "--output-dir", f"{folder}/run"]
        options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, **options) as process:
            RUNNING.add(process)
            errors = process.communicate()[1]
            RUNNING.discard(process)
        minutes = (time.perf_counter() - start) / 60
        if process.returncode:
            print(f"{shlex.join(['python', *arm])} failed:\n{errors}", file=sys.stderr, flush=True)
            return False
        metrics, perf = read(Path(folder, "run/metrics.csv")), read(Path(folder, "run/perf.csv"))
    speed, memory = (
        [float(row["value"]) for row in perf if row["tag"] == tag] for tag in ("charts/SPS", "perf/peak_memory_gb")
    )
    last = {row["tag"]: float(row["value"]) for row in metrics if row["tag"].startswith("eval/")}
    scores = [tail(metrics, RETURN, SWEEP_TAIL if job.stage == "sweep" else FINAL_TAIL)]
    scores += [last.get(f"eval/{name}/return_mean") for name in ("deterministic", "sampled")]
    row = {"run": job.name, "stage": job.stage, "policy": job.arm, "env": job.env, "seed": job.seed}
    row |= {"learning_rate": job.rate, "steps": max(int(r["step"]) for r in metrics), "minutes": f"{minutes:.2f}"}
    row |= {name: "" if score is None else f"{score:.2f}" for name, score in zip(SCORES, scores)}
    row |= {"steps_per_second": f"{statistics.median(speed):.0f}", "peak_memory_gb": f"{max(memory):.2f}"}
    row |= {"device": f"CPU ({os.cpu_count()} cores, {platform.machine()}), {args.jobs} runs at a time", "threads": 1}
    row |= {name: version(name) for name in ("torch", "gymnasium", "mujoco", "numpy")}
    row |= {"python": platform.python_version(), "commit": made, "command": f"python {shlex.join(arm)}"}
    points = [{"run": job.name, **point} for point in curves(metrics, study.tags)]
    points = [{k: f"{v:.5g}" if isinstance(v, float) else v for k, v in point.items()} for point in points]
    with LOCK:  # the curves first: a run counts as done when it has its row
        if job.stage == "final":
            append(Path(args.results, f"{args.study}_curves.csv"), ["run", "step", *study.tags], points)
        append(runs, COLUMNS, [row])
        print(f"{job.name}: {'  '.join(f'{s} {row[s]}' for s in SCORES if row[s])}  {row['minutes']} min", flush=True)
    return True


def learning_rate(args: Args, study: Study, arm: str) -> str:
    """The arm's fixed rate, or the one with the highest return in its sweep; "" if no run of the sweep has finished."""
    if study.arms[arm].rate:
        return study.arms[arm].rate
    rows = [row for row in read(Path(args.results, f"{args.study}_runs.csv")) if row["train_return"]]
    sweep = [row for row in rows if row["policy"] == arm and row["stage"] == "sweep"]
    return max(sweep, key=lambda row: float(row["train_return"]))["learning_rate"] if sweep else ""


def final_jobs(args: Args, study: Study, arms: list[str]) -> list[Job]:
    """Runs of the comparison, seed by seed; late arms last."""
    jobs, tasks = [], [env for env in study.tasks if not args.tasks or env in args.tasks]
    rates = {name: learning_rate(args, study, name) for name in arms}
    for late in (False, True):
        for seed in sorted({seed for name in arms for seed in study.arms[name].seeds}):
            for env in tasks if not args.seeds or seed in args.seeds else []:
                for name, arm in ((name, study.arms[name]) for name in arms if rates[name]):
                    if arm.late == late and seed in arm.seeds:
                        jobs.append(Job("final", name, env, seed, rates[name], arm.steps or study.tasks[env]))
    return jobs


def main(args: Args) -> None:
    study = STUDIES.get(args.study)
    if study is None or set(args.arms) - set(study.arms) or set(args.tasks) - set(study.tasks):
        known = f"its arms {', '.join(study.arms)}, its tasks {', '.join(study.tasks)}" if study else ", ".join(STUDIES)
        sys.exit(f"--study {args.study} --arms {args.arms} --tasks {args.tasks}: expected {known}")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: ([run.kill() for run in RUNNING], os._exit(128 + number)))
    arms = [name for name in study.arms if not args.arms or name in args.arms]
    swept = [name for name in arms if not study.arms[name].rate]
    env, steps = study.sweep
    with ThreadPoolExecutor(args.jobs) as pool:
        sweep = [Job("sweep", name, env, SWEEP_SEED, rate, steps) for name in swept for rate in study.rates]
        done = list(pool.map(lambda job: train(args, study, job), sweep))
        done += pool.map(lambda job: train(args, study, job), final_jobs(args, study, arms))
    sys.exit(int(not all(done)))


if __name__ == "__main__":
    main(tyro.cli(Args))
