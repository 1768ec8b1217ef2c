"""Does a method for control learn what its paper says: every arm on every task, several seeds, raw rows in CSVs.

    python benchmarks/control.py --study unimodal_poisson --jobs 2     # hours on 2 cores; takes up where it stopped
    python benchmarks/control.py --study unimodal_poisson --seeds 1 --arms poisson gaussian --tasks Hopper-v5
    python benchmarks/control.py --study fm3q                          # two teams: FM3Q and its controls on three games
    python benchmarks/control.py --study arac                          # a team on a graph: weights of the reference
    python benchmarks/make_tables.py                                   # redraws tables and figures from the CSVs

The learning rate of an arm is the best of Study.rates on one task, with a seed of its own (SWEEP_SEED), by the score
Study.best. An arm or a task may have a fixed rate instead: ARAC's arms, FM3Q's arat and pong have the script's default,
which was not tuned for any of them. Then all arms run on all tasks seed by seed, so that there is a table early; arms
and tasks marked `late` come after everything else. One process a run, one thread a process. Runs that the CSV has are
skipped, so the program can be stopped at any time and started again.

Two files are written. results/<study>_runs.csv has one row a run, with its Study.scores: functions of all that it
logged, empty where that says nothing. train_return is the mean of the returns logged over the last tenth of its steps
(of a run of the sweep, the last fifth), every logged row counting the same; the two other returns are those of the
evaluation at the end. results/<study>_curves.csv has at most 50 rows a run, each the mean of what was logged over a
fiftieth of it, and one more for what was logged before the first step; a value is missing where nothing was logged, as
a return where no episode ended.
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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from threading import Lock

import tyro

ROOT = Path(__file__).resolve().parents[1]
RETURN = "charts/episodic_return"
SWEEP_SEED, SWEEP_TAIL, FINAL_TAIL, BINS = 100, 0.2, 0.1, 50


# --- Scores: functions of the rows of metrics.csv, and of the share of the steps that a mean is over ------------------


def logged(metrics: list[dict], tag: str) -> list[tuple[int, float]]:
    """Steps and values of a metric."""
    return [(int(row["step"]), float(row["value"])) for row in metrics if row["tag"] == tag]


def tail(metrics: list[dict], tag: str, share: float) -> float | None:
    """Mean of a metric over the last share of the steps; its last value if none was logged there, None if never."""
    rows, begin = logged(metrics, tag), (1 - share) * max(int(row["step"]) for row in metrics)
    late = [value for step, value in rows if step > begin] or [value for _, value in rows[-1:]]
    return statistics.mean(late) if late else None


def head(metrics: list[dict], tag: str, share: float) -> float | None:
    """Mean of a metric over the first share of the steps; None if it was not logged there."""
    end = share * max(int(row["step"]) for row in metrics)
    early = [value for step, value in logged(metrics, tag) if step <= end]
    return statistics.mean(early) if early else None


def last(metrics: list[dict], tags: tuple[str, ...], share: float) -> float | None:
    """Last value of a metric, the mean of several metrics' last values; None if one of them was never logged."""
    found = [value for tag in tags for _, value in logged(metrics, tag)[-1:]]
    return statistics.mean(found) if len(found) == len(tags) else None


def reached(metrics: list[dict], tag: str, level: float, share: float) -> int | None:
    """First step at which a metric is below a level; None if it never is."""
    return min((step for step, value in logged(metrics, tag) if value < level), default=None)


def settled(metrics: list[dict], tag: str, level: float, share: float) -> int | None:
    """First step at which a metric is below a level and stays there until the end; None if it does not."""
    first = None
    for step, value in logged(metrics, tag):
        first = None if not value < level else step if first is None else first
    return first


# --- Studies ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """One row of a table."""

    flags: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    rate: str = ""  # a fixed learning rate; empty is the arm's own sweep
    common: tuple[str, ...] | None = None  # flags in place of the study's; () is the script's defaults
    steps: int = 0  # of every task in place of its own
    late: bool = False  # runs after all other arms


@dataclass(frozen=True)
class Task:
    """What arms are compared on."""

    steps: int
    flags: str = ""  # empty is --env-id and the name
    seeds: dict[str, tuple[int, ...]] | None = None  # of the arms that run here, in place of their own
    rate: str = ""  # a fixed learning rate for all arms
    late: bool = False  # runs after all other tasks


@dataclass(frozen=True)
class Study:
    """A script, flags for all runs, tasks, and what is noted of a run."""

    script: str  # path
    common: tuple[str, ...]
    arms: dict[str, Arm]
    tasks: dict[str, Task]
    tags: dict[str, str]  # column of the curves: tag
    scores: dict[str, Callable[..., float | int | None]]  # column of the runs: function of metrics and share
    sweep: tuple[str, int] = ("", 0)  # task and steps
    sweep_flags: tuple[str, ...] = ()
    rates: tuple[str, ...] = ("1e-4", "3e-4", "1e-3")
    best: str = "train_return"  # score that the sweep goes by
    lowest: bool = False  # whether the best is the lowest
    digits: str = ".5g"  # of scores
    packages: tuple[str, ...] = ("torch",)  # whose versions are noted

    @property
    def columns(self) -> list[str]:
        """Of the runs: `policy` is the arm and `env` the task."""
        names = ["run", "stage", "policy", "env", "seed", "learning_rate", *self.scores, "steps", "steps_per_second"]
        names += ["minutes", "peak_memory_gb", "device", "threads", *self.packages, "python", "commit", "command"]
        return names


ONE, THREE, FIVE = (1,), (1, 2, 3), (1, 2, 3, 4, 5)
POLICIES = ("poisson", "poisson_repo", "gaussian", "beta", "categorical", "ordinal")
TWO_ENDS = ("--policy", "categorical", "--num-atoms", "2")
NARROW = ("--temperature", "0.5", "--rate-init", "6")  # begins in the middle of the range, and can stay there
FM3Q = {name: Arm(("--mixer", name)) for name in ("qmix", "twin", "vdn", "pairwise")}
FM3Q |= {name: Arm(("--learner", name)) for name in ("selfplay_vdn", "selfplay_qmix", "iql")}
PONG = "--env-id pong --gamma 0.99 --num-envs 256 --updates-per-step 4 --exploiter-steps 400000 --eval-steps 250000"
BETA_MODES = ("dual", "performance", "linear", "exp", "fixed", "none")
ADAPTIVE = dict.fromkeys(("dual", "fixed", "none"), THREE)
CYCLE = "--graph cycle_12 --horizon 24 --eval-steps 20000"
STUDIES = {
    "unimodal_poisson": Study(
        script="algorithms/unimodal_poisson.py",
        common=("--num-envs", "8", "--num-steps", "256"),  # as many steps a batch as by default, and faster
        arms={name: Arm(("--policy", name)) for name in POLICIES}
        | {"bang_bang": Arm(TWO_ENDS)}
        | {"poisson_narrow": Arm(("--policy", "poisson", *NARROW), THREE, late=True)}
        | {"gaussian_1m": Arm(("--policy", "gaussian"), THREE, "3e-4", (), 1_000_000, late=True)},
        tasks={"InvertedPendulum-v5": Task(100_000), "Hopper-v5": Task(300_000), "HalfCheetah-v5": Task(300_000)}
        | {name: Task(300_000, "", dict.fromkeys(POLICIES, ONE), late=True) for name in ("Walker2d-v5", "Humanoid-v5")},
        tags={"return": RETURN, "entropy": "losses/entropy"}
        | {name: f"train/{name}" for name in ("extreme_mass", "frac_multimodal")},
        scores={"train_return": partial(tail, tag=RETURN)}
        | {f"eval_{x}": partial(last, tags=(f"eval/{x}/return_mean",)) for x in ("deterministic", "sampled")},
        sweep=("Hopper-v5", 102_400),
        sweep_flags=("--eval-episodes", "0"),  # it goes by returns in training
        digits=".2f",
        packages=("torch", "gymnasium", "mujoco", "numpy"),
    ),
    "poisson_start": Study(  # the default start, in the middle of the range
        script="algorithms/unimodal_poisson.py",
        common=(),
        arms={"poisson": Arm((), THREE, "3e-4")},
        tasks={"Hopper-v5": Task(300_000)},
        tags={"return": RETURN, "entropy": "losses/entropy"},
        scores={"train_return": partial(tail, tag=RETURN)}
        | {f"eval_{x}": partial(last, tags=(f"eval/{x}/return_mean",)) for x in ("deterministic", "sampled")},
        digits=".2f",
        packages=("torch", "gymnasium", "mujoco", "numpy"),
    ),
    "fm3q": Study(
        script="algorithms/fm3q.py",
        common=(),
        arms=FM3Q,
        tasks={
            "arat": Task(40_000, "--env-id arat --eval-steps 1000", rate="1e-3"),
            "arat_large": Task(100_000, "--env-id arat_large --eval-steps 4000"),
            "pong": Task(1_000_000, PONG, dict.fromkeys(("qmix", "vdn", "selfplay_qmix", "iql"), THREE), "1e-3", True),
        },
        tags={x: f"eval/{x}" for x in ("nash_conv_mean", "nash_conv_max")} | {"td_loss": "losses/td_loss"},
        scores={
            "samples_to_equilibrium": partial(settled, tag="eval/nash_conv_max", level=0.05),
            "samples_to_first": partial(reached, tag="eval/nash_conv_max", level=0.05),
            "late_nash_conv": partial(tail, tag="eval/nash_conv_mean"),
        }
        | {name: partial(last, tags=(f"eval/{name}",)) for name in ("nash_conv_mean", "nash_conv_max")}
        | {
            f"{outcome}_{name}": partial(last, tags=tuple(f"eval/{name}/{x}/{outcome}" for x in ("pro", "ant")))
            for outcome in ("win", "loss")
            for name in ("tracker", "wanderer")
        }
        | {"exploitability": partial(last, tags=("eval/exploitability",))},
        sweep=("arat_large", 50_000),
        rates=("1e-3", "3e-3", "1e-2"),
        best="nash_conv_mean",
        lowest=True,
    ),
    "arac": Study(
        script="algorithms/arac.py",
        common=(),
        arms={name: Arm(("--beta-mode", name), rate="3e-4") for name in BETA_MODES},
        tasks={
            "cycle_12": Task(
                100_000, CYCLE, dict.fromkeys(BETA_MODES, THREE) | dict.fromkeys(("dual", "fixed", "none"), FIVE)
            ),
            "grid_6x6": Task(
                50_000, "--graph grid_6x6 --evader dp --start independent --horizon 32 --eval-steps 10000", ADAPTIVE
            ),
            "confrontation": Task(
                60_000, "--env-id graph_confrontation --graph grid_5x5 --horizon 32 --eval-steps 12000", ADAPTIVE
            ),
        }
        | {
            f"cycle_12_m{m}": Task(100_000, f"{CYCLE} --num-agents {m}", dict.fromkeys(("dual", "none"), ONE))
            for m in (3, 4)
        },
        tags={"success": "charts/success", "sampled": "eval/sampled/success", "greedy": "eval/greedy/success"}
        | {"beta": "train/arac/beta", "divergence": "train/arac/divergence"},
        scores={
            "early_success": partial(head, tag="charts/success"),
            "late_success": partial(tail, tag="charts/success"),
        }
        | {f"{x}_success": partial(last, tags=(f"eval/{x}/success",)) for x in ("sampled", "greedy", "reference")}
        | {"beta": partial(last, tags=("train/arac/beta",))},  # of the arm `none` a number that nothing is weighed by
    ),
}


@dataclass
class Args:
    study: str = "unimodal_poisson"
    """which study to run: unimodal_poisson, poisson_start, fm3q or arac"""
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


def curves(metrics: list[dict], tags: dict[str, str]) -> list[dict]:
    """A row for step 0 and at most BINS more: the step where a bin ends, and the mean of each metric in it, or None."""
    width = max(int(row["step"]) for row in metrics) / BINS
    names, bins = {tag: name for name, tag in tags.items()}, {}
    for row in metrics:
        if row["tag"] in names:
            number = math.ceil(int(row["step"]) / width)
            bins.setdefault(number, {}).setdefault(names[row["tag"]], []).append(float(row["value"]))
    found = [{"step": round(number * width), **bins[number]} for number in sorted(bins)]
    return [row | {name: statistics.mean(row[name]) if name in row else None for name in tags} for row in found]


def words(study: Study, job: Job, extra: str) -> list[str]:
    """Words of the command behind `python`."""
    arm, task = study.arms[job.arm], study.tasks[job.env]
    flags = [*(study.common if arm.common is None else arm.common), *arm.flags]
    flags += (task.flags or f"--env-id {job.env}").split()
    flags += ["--total-timesteps", str(job.steps), "--learning-rate", job.rate, "--seed", str(job.seed)]
    flags += study.sweep_flags if job.stage == "sweep" else ()
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
        command = [sys.executable, str(ROOT / arm[0]), *arm[1:], "--device", "cpu", "--output-dir", f"{folder}/run", "--save-steps", "0"]
        options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, **options) as process:
            RUNNING.add(process)
            errors = process.communicate()[1]
            RUNNING.discard(process)
        minutes = (time.perf_counter() - start) / 60
        if process.returncode:
            print(f"{shlex.join(['python', *arm])} failed:\n{errors}", file=sys.stderr, flush=True)
            return False
        metrics = read(Path(folder, "run/metrics.csv"))
    speed = [float(row["value"]) for row in metrics if row["tag"] == "charts/SPS"]
    share = SWEEP_TAIL if job.stage == "sweep" else FINAL_TAIL
    scores = {name: score(metrics, share=share) for name, score in study.scores.items()}
    row = {"run": job.name, "stage": job.stage, "policy": job.arm, "env": job.env, "seed": job.seed}
    row |= {"learning_rate": job.rate, "steps": max(int(r["step"]) for r in metrics), "minutes": f"{minutes:.2f}"}
    row |= {name: f"{score:{study.digits}}" if isinstance(score, float) else score for name, score in scores.items()}
    row |= {"steps_per_second": f"{statistics.median(speed):.0f}", "peak_memory_gb": ""}  # of older scripts
    row |= {"device": f"CPU ({os.cpu_count()} cores, {platform.machine()}), {args.jobs} runs at a time", "threads": 1}
    row |= {name: version(name) for name in study.packages}
    row |= {"python": platform.python_version(), "commit": made, "command": f"python {shlex.join(arm)}"}
    points = [{"run": job.name, **point} for point in curves(metrics, study.tags)]
    points = [{k: f"{v:.5g}" if isinstance(v, float) else v for k, v in point.items()} for point in points]
    with LOCK:  # the curves first: a run counts as done when it has its row
        if job.stage == "final":
            append(Path(args.results, f"{args.study}_curves.csv"), ["run", "step", *study.tags], points)
        append(runs, study.columns, [row])
        shown = [f"{name} {row[name]}" for name, score in scores.items() if score is not None]
        print(f"{job.name}: {'  '.join(shown)}  {row['minutes']} min", flush=True)
    return True


def learning_rate(args: Args, study: Study, arm: str) -> str:
    """The arm's fixed rate, or the one with the best score in its sweep; "" if no run of the sweep has finished."""
    if study.arms[arm].rate:
        return study.arms[arm].rate
    rows = [row for row in read(Path(args.results, f"{args.study}_runs.csv")) if row[study.best]]
    sweep = [row for row in rows if row["policy"] == arm and row["stage"] == "sweep"]
    choose = min if study.lowest else max
    return choose(sweep, key=lambda row: float(row[study.best]))["learning_rate"] if sweep else ""


def final_jobs(args: Args, study: Study, arms: list[str]) -> list[Job]:
    """Runs of the comparison, seed by seed; late ones last."""
    jobs, rates = ([], []), {name: learning_rate(args, study, name) for name in arms}
    for seed in sorted(args.seeds) or range(1, 1 + max(max(study.arms[name].seeds) for name in arms)):
        for env, task in ((env, study.tasks[env]) for env in study.tasks if not args.tasks or env in args.tasks):
            for name, arm in ((name, study.arms[name]) for name in arms):
                rate, seeds = task.rate or rates[name], arm.seeds if task.seeds is None else task.seeds.get(name, ())
                if rate and seed in seeds:
                    job = Job("final", name, env, seed, rate, arm.steps or task.steps)
                    jobs[arm.late or task.late].append(job)
    return [*jobs[0], *jobs[1]]


def main(args: Args) -> None:
    study = STUDIES.get(args.study)
    if study is None or set(args.arms) - set(study.arms) or set(args.tasks) - set(study.tasks):
        known = f"its arms {', '.join(study.arms)}, its tasks {', '.join(study.tasks)}" if study else ", ".join(STUDIES)
        sys.exit(f"--study {args.study} --arms {args.arms} --tasks {args.tasks}: expected {known}")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: ([run.kill() for run in RUNNING], os._exit(128 + number)))
    arms = [name for name in study.arms if not args.arms or name in args.arms]
    free = any(not task.rate for env, task in study.tasks.items() if not args.tasks or env in args.tasks)
    swept = [name for name in arms if free and not study.arms[name].rate]
    env, steps = study.sweep
    with ThreadPoolExecutor(args.jobs) as pool:
        sweep = [Job("sweep", name, env, SWEEP_SEED, rate, steps) for name in swept for rate in study.rates]
        done = list(pool.map(lambda job: train(args, study, job), sweep))
        done += pool.map(lambda job: train(args, study, job), final_jobs(args, study, arms))
    sys.exit(int(not all(done)))


if __name__ == "__main__":
    main(tyro.cli(Args))
