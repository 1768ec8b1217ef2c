"""Runs the studies of studies.py: a queue of training runs, two at a time with one thread each.

    python benchmarks/study.py            # every study: runs that are done, left, hours of a thread
    python benchmarks/study.py fm3q_games          # runs it; continues where it was stopped
    python benchmarks/study.py defaults --arms fm3q arac --seeds 2 3
    python benchmarks/study.py --repeat 10 --results FOLDER    # the ten claims that are cheapest to repeat

A finished run is a row of results/<study>.csv: task, arm, seed, learning rate, scores, minutes,
device, versions, commit and command. Its metrics go to results/<study>_curves.csv. A run
that was stopped starts again. --keep keeps the folders of runs, with their last checkpoints.

An arm with rates sweeps its learning rate first, on seed 1 and on each task by itself: three rates,
and more as long as the best one is at the edge. Its other seeds run at the best rate. Seeds go first
and arms second, so that the arms can be compared as soon as one seed is through.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import pandas as pd
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import verdicts  # noqa: E402
from benchmarks.about import RESULTS, ROOT, about  # noqa: E402
from benchmarks.studies import STUDIES, SWEEP_SEED  # noqa: E402

POINTS = 50  # of a curve that is kept


@dataclass
class Args:
    study: tyro.conf.Positional[str] = ""
    """which study to run; none lists them all"""
    arms: tuple[str, ...] = ()
    """arms to run; none means all"""
    tasks: tuple[str, ...] = ()
    """tasks to run; none means all"""
    seeds: tuple[int, ...] = ()
    """seeds to run; none means those of each arm"""
    jobs: int = 2
    """runs at the same time, one thread each"""
    keep: str = ""
    """folder in which the runs of a study stay with their last checkpoints, as TASK_ARM_SEED_RATE"""
    repeat: int = 0
    """in place of a study: run so many claims of claims.csv again, the cheapest ones, and compare"""
    extra: str = ""
    """further flags for every run, to try the program: --extra="--max-steps 1" --results FOLDER"""
    results: str = str(RESULTS)
    """folder of the CSVs"""


@dataclass(frozen=True)
class Run:
    """What tells a run of a study from its others."""

    task: str
    arm: str
    seed: int
    learning_rate: str = ""  # empty: the default, or what the flags say


lock = Lock()  # of the CSVs and of what is printed


def score(metrics: pd.DataFrame, tag: str, which: str) -> float:
    """First or last value of a tag, or its mean over the first or last tenth of the steps, or NaN.
    `at 12` is the value at step 12. `mean`, `max`, `first 3`, `last 10`: mean or largest of all, or mean
    of so many values. `reach 0.8`: first step whose last five have this mean; `below 0.05`: first
    step with a lower value, the last step if there is none."""
    rows = metrics[metrics.tag == tag]
    end = metrics.step.max()
    if which.startswith("reach"):
        return rows.step[rows.value.rolling(5).mean() >= float(which.split()[1])].min()
    if which.startswith("below"):
        return min(rows.step[rows.value < float(which.split()[1])], default=end)
    if which.startswith("at"):
        return rows.value[rows.step == int(which.split()[1])].mean()
    if which == "max":
        return rows.value.max()
    word, _, count = which.partition(" ")
    chosen = {
        "first": rows.head(int(count or 1)),
        "last": rows.tail(int(count or 1)),
        "mean": rows,
        "early": rows[rows.step <= 0.1 * end],
        "late": rows[rows.step > 0.9 * end],
    }
    return chosen[word].value.mean()


def thin(metrics: pd.DataFrame) -> pd.DataFrame:
    """Rows (step, tag, value), at most 50 of a tag: means over equal parts of the run, at the last logged step of each."""
    rows = metrics[["step", "tag", "value"]]
    if rows.empty or rows.tag.value_counts().max() <= POINTS:
        return rows
    width = rows.step.max() / POINTS
    parts = rows.groupby([rows.tag, ((rows.step - 1) // width).clip(upper=POINTS - 1)], sort=False)
    thinned = parts.agg(step=("step", "last"), tag=("tag", "first"), value=("value", "mean"))
    is_long = rows.tag.map(rows.tag.value_counts()) > POINTS
    return pd.concat([rows[~is_long], thinned[thinned.tag.isin(rows.tag[is_long])]])


def finished(args: Args) -> pd.DataFrame:
    """Rows of the study's CSV, as text."""
    path = Path(args.results, f"{args.study}.csv")
    if not path.exists():
        return pd.DataFrame(columns=["task", "arm", "seed", "learning_rate"])
    with lock:
        return pd.read_csv(path, dtype=str, keep_default_na=False)


def is_done(rows: pd.DataFrame, run: Run) -> bool:
    """Whether a run has its row."""
    key = {name: str(value) for name, value in vars(run).items()}
    return bool((rows[[*key]] == key).all(axis=1).any())


def append(path: Path, rows: pd.DataFrame) -> None:
    """Add rows to a CSV, with a header if it is new."""
    rows.to_csv(path, mode="a", header=not path.exists(), index=False, lineterminator="\n")


def commit() -> str:
    """The commit that is checked out; marked where the scripts or tasks differ from it."""
    changed = subprocess.getoutput(f"git -C {ROOT} status --porcelain algorithms envs")
    head = subprocess.getoutput(f"git -C {ROOT} rev-parse --short HEAD")
    return f"{head}-modified" if changed else head


def command_of(name: str, run: Run) -> str:
    """Script and flags of a run, without its seed."""
    study = STUDIES[name]
    command = f"{study.command} {study.arms[run.arm].flags} {study.tasks[run.task]}"
    if run.learning_rate:
        command += f" {study.rate_flag} {run.learning_rate}"
        command += f" {study.sweep}" if run.seed == SWEEP_SEED else ""
    return command.replace("{arm}", run.arm).replace("{seed}", str(run.seed))


def train(args: Args, run: Run) -> None:
    """One run in a process of its own, unless it has its row; adds its rows."""
    study = STUDIES[args.study]
    if is_done(finished(args), run):
        return
    words = shlex.split(command_of(args.study, run))
    kept = "2000" if "stream_x.py" in words[0] else "1000000000"  # there they are also the steps of a row
    words += ["--seed", str(run.seed), "--save-steps", kept if args.keep else "0"]
    words += shlex.split(args.extra)
    made = commit()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        name = "_".join(str(part) for part in vars(run).values() if part != "")
        folder = Path(args.keep or temporary, name).absolute()
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped
        command = [sys.executable, *words, "--output-dir", str(folder)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
        diverged = "not finite" in process.stderr  # a result: its scores are from before that
        if process.returncode and not diverged:
            sys.stderr.write(f"{shlex.join(words)} failed:\n{process.stderr}")
            return
        if (folder / "metrics.csv").exists():
            metrics = pd.read_csv(folder / "metrics.csv")
        else:  # it diverged before its first row
            metrics = pd.DataFrame({"step": [], "tag": [], "value": []})
    scores = {name: f"{score(metrics, *which):.5g}" for name, which in study.scores.items()}
    row = vars(run) | scores
    row["minutes"] = f"{(time.perf_counter() - start) / 60:.2f}"
    how = about("torch")
    if " on cuda" in process.stdout:
        how["device"] = torch.cuda.get_device_name()
    row |= {name: how[name] for name in ("device", "torch", "python")}
    row |= {"commit": made, "command": shlex.join(["python", *words])}
    curve = thin(metrics[metrics.tag.isin(study.curves)])
    curve = pd.DataFrame([vars(run)]).merge(curve, "cross")
    with lock:
        append(Path(args.results, f"{args.study}_curves.csv"), curve)
        append(Path(args.results, f"{args.study}.csv"), pd.DataFrame([row]))
        shown = "  ".join(f"{name} {row[name]}" for name in scores)
        print(f"{run.task} {run.arm} {run.learning_rate} seed {run.seed}:  {shown}", flush=True)


def sweep(args: Args, task: str, name: str) -> str:
    """The arm's best learning rate on a task, widening while it is at the edge of what was tried."""
    study = STUDIES[args.study]
    rates = study.arms[name].rates
    if not rates:
        return ""
    center = rates.index(study.arms[name].start)
    low, high = center - 1, center + 1
    while True:
        for rate in rates[low : high + 1]:
            train(args, Run(task, name, SWEEP_SEED, rate))
        rows = finished(args)
        rows = rows[(rows.task == task) & (rows.arm == name) & (rows.seed == str(SWEEP_SEED))]
        failed = set(rates[low : high + 1]) - set(rows.learning_rate)
        if failed:
            sys.exit(f"{name}: no run at {', '.join(failed)}, so the sweep has no best rate; start it again")
        scores = rows.set_index("learning_rate")[study.best].astype(float)
        best = rates.index(scores.idxmin() if study.lowest else scores.idxmax())
        if best <= low and low > 0:
            low = max(0, best - 1)
        elif best >= high and high < len(rates) - 1:
            high = min(len(rates) - 1, best + 1)
        else:
            return rates[best]


def chosen(args: Args) -> list[tuple[str, str]]:
    """Tasks and arms to run."""
    study = STUDIES[args.study]
    return [
        (task, name)
        for task in args.tasks or study.tasks
        for name in args.arms or study.arms
        if task in (study.arms[name].tasks or study.tasks)
    ]


def main(args: Args) -> None:
    """The sweeps, then the seeds."""
    if args.study not in STUDIES:
        sys.exit(f"no study {args.study}: expected one of {', '.join(STUDIES)}")
    if args.extra and args.results == str(RESULTS):
        sys.exit("--extra: give --results as well, or a trial counts as a run of the study")
    pairs = chosen(args)
    with ThreadPoolExecutor(args.jobs) as pool:
        rates = list(pool.map(lambda pair: sweep(args, *pair), pairs))
        runs = [
            Run(task, name, seed, rate)
            for (task, name), rate in zip(pairs, rates)
            for seed in args.seeds or STUDIES[args.study].arms[name].seeds
        ]
        runs.sort(key=lambda run: run.seed)
        begin = time.perf_counter()
        waiting = [run for run in runs if not is_done(finished(args), run)]
        for number, _ in enumerate(pool.map(lambda run: train(args, run), waiting), 1):
            left = (time.perf_counter() - begin) / number * (len(waiting) - number) / 60
            print(f"{number}/{len(waiting)} runs, {left:.0f} minutes left", flush=True)


def repeat(args: Args) -> None:
    """Run both sides of the cheapest claims again, at the same rates and seeds, and compare the differences."""
    if args.results == str(RESULTS):
        sys.exit("--repeat: give --results FOLDER as well, where the new runs go")
    plans = []  # minutes, claim, its runs
    for claim in verdicts.load_rows("claims.csv"):
        is_simple = " at " not in claim.other_column  # both scores are columns of the study's CSV
        if claim.study in STUDIES and is_simple and verdicts.judge(claim)[0]:
            rows = verdicts.final_runs(claim.study)
            rows = rows[(rows.task == claim.task) & rows.arm.isin([claim.ours, claim.theirs])]
            rows = rows[rows.seed.isin(args.seeds)] if args.seeds else rows
            if not rows.empty:
                plans.append((rows.minutes.sum(), claim, rows))
    plans.sort(key=lambda plan: plan[0])
    os.makedirs(args.results, exist_ok=True)
    for minutes, claim, rows in plans[: args.repeat]:
        print(f"{claim.name}: {claim.claim} ({claim.run}); {minutes:.0f} minutes of a thread", flush=True)
        args.study = claim.study
        runs = [Run(row.task, row.arm, row.seed, row.learning_rate) for row in rows.itertuples()]
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(lambda run: train(args, run), runs))
        again = pd.read_csv(Path(args.results, f"{args.study}.csv"))
        again = again[again.task.fillna("") == claim.task]
        for when, found in (("before", rows), ("again ", again)):
            ours = found[found.arm == claim.ours].set_index("seed")[claim.column]
            theirs = found[found.arm == claim.theirs].set_index("seed")[claim.other_column or claim.column]
            difference = verdicts.paired(ours, theirs)
            margin = verdicts.margin_of(claim, theirs)
            said = verdicts.verdict(difference, claim.better, margin, claim.asked)
            said += f" {margin:.3g}" * (said == verdicts.WORDS[claim.asked][2])
            low, high = (f"{x:.4g}" if x is not None else "-" for x in (difference.low, difference.high))
            print(f"  {when} {difference.mean:.4g} ({low} to {high}): {said}", flush=True)


def overview() -> None:
    """Runs that are done and left, and the hours that those need."""
    for name, study in STUDIES.items():
        args = Args(name)
        rows = finished(args)
        left = 0
        for task, name_of_arm in chosen(args):
            arm = study.arms[name_of_arm]
            own = rows[(rows.task == task) & (rows.arm == name_of_arm)]
            swept = own[(own.seed == str(SWEEP_SEED)) & (own.learning_rate != "")]
            left += len(set(map(str, arm.seeds)) - set(own.seed))
            left += max(0, 3 - len(swept)) * bool(arm.rates)
        hours = left * study.minutes / 60
        print(f"{name:18} {len(rows):3} runs done, {left:3} left, about {hours:.1f} hours")


if __name__ == "__main__":
    arguments = tyro.cli(Args)
    if arguments.repeat:
        repeat(arguments)
    elif arguments.study:
        main(arguments)
    else:
        overview()
