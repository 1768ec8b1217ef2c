"""Runs of an older script that are killed by SIGKILL again and again, at random moments: results/kill_and_resume.csv.

    python benchmarks/kill_and_resume.py --script fm3q --kills 20    # minutes; replaces the rows of this script

First one run without a kill. Then the same run in a folder of its own: it is started, killed after a random time, and
continued with `--resume`, until it has been killed often enough; a run that ends before its kill is compared, and the
next one begins. At the end the last one is finished. Each must equal the first to the bit in metrics.csv and in its
weights (language scripts: of the final policy; control scripts: of networks and optimizer in the newest checkpoint).
Steps are those of the script: batches of completions, or steps of the environments. Moments are drawn evenly from the
time that the first run took, so that some kills meet a process that is still importing.
"""

import csv
import os
import platform
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
FLAGS = {  # a few seconds of steps, many of them and many checkpoints, so that kills meet every part of a run
    "unimodal_poisson": "--env-id Pendulum-v1 --num-envs 4 --num-steps 128 --num-minibatches 8 --update-epochs 4 "
    "--eval-episodes 2 --total-timesteps 51200 --save-steps 2048 --eval-steps 8192",
    "fm3q": "--total-timesteps 32000 --hidden-size 32 --embed-dim 8 --batch-size 64 --learning-starts 640 "
    "--eval-steps 3200 --save-steps 1920 --device cpu",
    "arac": "--total-timesteps 9600 --embed-dim 16 --batch-size 32 --learning-starts 640 --eval-steps 1600 "
    "--save-steps 960 --device cpu",
}
COLUMNS = (
    "script run kill moment_seconds step_reached step_saved steps_repeated equal torch python device commit command"
)


@dataclass
class Args:
    script: str = "fm3q"
    """script in algorithms/ without .py"""
    kills: int = 20
    """kills, over as many runs as it takes"""
    seed: int = 1
    """seed of the moments; the runs have the script's own"""
    flags: str | None = None
    """flags of the runs; None is FLAGS, or the script's defaults"""
    csv: str = "benchmarks/results/kill_and_resume.csv"
    """CSV to write"""


def start(script: str, words: list[str], seconds: float | None) -> bool:
    """Run the script; False if it was killed after so many seconds."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "algorithms" / f"{script}.py"), *words]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        try:
            errors = process.communicate(timeout=seconds)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return False
    if process.returncode != 0:
        raise SystemExit(f"error: {shlex.join(command)}: ended with {process.returncode}: {errors}")
    return True


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.stem.split("_")[1])


def reached(run_dir: Path) -> tuple[int, int]:
    """The last step whose rows are in metrics.csv, and that of the newest checkpoint; 0 where there is none."""
    text = (run_dir / "metrics.csv").read_text() if (run_dir / "metrics.csv").exists() else ""
    whole = [line for line in text.splitlines(keepends=True)[1:] if line.endswith("\n")]  # the last may be cut
    saved = max(map(step_of, (run_dir / "checkpoints").glob("step_*.pt")), default=0)
    return max([int(line.split(",")[0]) for line in whole], default=0), saved


def same(ours, theirs) -> bool:
    """Whether two nested state_dicts are the same to the bit. A simulator's bytes have addresses and times in them."""
    import torch

    if isinstance(ours, dict):
        keys = ours.keys() - {"mujoco"}
        return keys == theirs.keys() - {"mujoco"} and all(same(ours[key], theirs[key]) for key in keys)
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(ours, torch.Tensor):
        return (
            ours.dtype == theirs.dtype
            and ours.shape == theirs.shape
            and ours.numpy().tobytes() == (theirs.numpy().tobytes())
        )
    return ours == theirs


def equal(run_dir: Path, other: Path) -> bool:
    """Whether two finished runs have the same metrics and the same weights, to the bit."""
    if (run_dir / "metrics.csv").read_bytes() != (other / "metrics.csv").read_bytes():
        return False
    weights = [sorted(folder.glob("final/**/*.safetensors")) for folder in (run_dir, other)]
    if weights[0] or weights[1]:
        return len(weights[0]) == len(weights[1]) and all(a.read_bytes() == b.read_bytes() for a, b in zip(*weights))
    import torch

    newest = [max((folder / "checkpoints").glob("step_*.pt"), key=step_of) for folder in (run_dir, other)]
    return newest[0].name == newest[1].name and same(*map(torch.load, newest))


def kill_and_resume(
    script: str, words: list[str], kills: int, seed: int, folder: Path, start: Callable = start
) -> list[dict]:
    """A row for each kill. `start` runs the script, and says whether it ended by itself."""
    generator, whole = random.Random(f"kills {seed}"), folder / "whole"
    began = time.perf_counter()
    start(script, [*words, "--output-dir", str(whole)], None)
    duration, rows, run = time.perf_counter() - began, [], 0
    while len(rows) < kills:
        run += 1
        run_dir, ended, mine = folder / f"run_{run}", False, []
        while not ended:
            begun = (run_dir / "args.json").exists()
            now = ["--resume", str(run_dir)] if begun else [*words, "--output-dir", str(run_dir)]
            left = len(rows) + len(mine) < kills
            moment = generator.uniform(0, duration) if left else None  # after the last kill it may finish
            ended = start(script, now, moment)
            if not ended:
                last, saved = reached(run_dir)
                mine.append({"run": run, "kill": len(rows) + len(mine) + 1, "moment_seconds": f"{moment:.2f}"})
                mine[-1] |= {"step_reached": last, "step_saved": saved, "steps_repeated": max(0, last - saved)}
        result = "yes" if equal(run_dir, whole) else "no"
        rows += [{"script": script} | row | {"equal": result} for row in mine]
        print(f"run {run}: {len(mine)} kills, equal: {result}; {len(rows)} of {kills} kills", flush=True)
        shutil.rmtree(run_dir)
    return rows


def provenance(args: Args, words: list[str]) -> dict[str, str]:
    """How the rows were made."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    commit = git("rev-parse", "--short", "HEAD") + ("-modified" if git("status", "--porcelain", "algorithms") else "")
    how = {"torch": version("torch"), "python": platform.python_version(), "device": f"CPU, {os.cpu_count()} cores"}
    return how | {"commit": commit, "command": f"python algorithms/{args.script}.py {shlex.join(words)}"}


def main(args: Args) -> None:
    words = shlex.split(FLAGS.get(args.script, "") if args.flags is None else args.flags)
    how, path = provenance(args, words), Path(args.csv)
    with tempfile.TemporaryDirectory() as folder:
        rows = kill_and_resume(args.script, words, args.kills, args.seed, Path(folder))
    with path.open(newline="") if path.exists() else open(os.devnull, newline="") as file:
        others = [row for row in csv.DictReader(file) if row["script"] != args.script]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS.split(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(others + [row | how for row in rows], key=lambda row: row["script"]))  # keeps order
    if any(row["equal"] == "no" for row in rows):
        raise SystemExit("error: a killed run differs from the uninterrupted one")


if __name__ == "__main__":
    main(tyro.cli(Args))
