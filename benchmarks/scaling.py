r"""How the cost of a step grows, measured in small.

    python benchmarks/scaling.py                               # 15 minutes on one core; nothing else should run
    python benchmarks/scaling.py --points 'grpo.py/size/*'     # some points: script/axis/value, as --list prints them

A point is a run of the script itself, as a user starts it, in a process of its own and on one thread, so that its peak
memory is its own. One row of results/scaling.csv is a point. Points that the CSV has are skipped, so the program can be
stopped and started again. Its rows were measured at commit ddff464, with the scripts of then.

language: grpo.py and dr_mas.py with random weights (the models of CPU_MODELS, Qwen3, with the tokenizer of the shipped
one). Their end token is outside the vocabulary, so that every completion has exactly T tokens, and all are trained on
(grpo.py: --advantage none with a reward of 1; dr_mas.py: rewards at random): the work depends on the flags alone.
The first step of a run does not count, of the others the median does. The process is killed behind its last step: what
it would save then is no part of a step.
control: unimodal_poisson.py, fm3q.py and arac.py; the first half of a run, with all that happens once, does not count.
limit: the floating-point operations a second of torch.matmul, which is what a language model is compared with.
"""

import csv
import os
import platform
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.memory import Model, parameters  # noqa: E402

# Nothing heavy is imported here: Linux counts the memory of the process that starts another one as the other's peak.
TOKENIZER = ROOT / "envs/tiny_lm/countdown"
COLUMNS = "part script axis value on parameters tokens rollout_seconds update_seconds step_seconds".split()
COLUMNS += "rollout_tokens_per_second update_tokens_per_second steps_per_second updates_per_second".split()
COLUMNS += "flops_per_second peak_memory_gb steps minutes threads load device".split()
COLUMNS += "torch transformers gymnasium numpy python commit command".split()
KEY = ("part", "script", "axis", "value", "on")
CPU_MODELS = {
    "0.8M": Model(4, 128, 384, 4, 2, 32),  # the shape of the shipped model
    "5M": Model(6, 256, 768, 4, 2, 64),
    "25M": Model(8, 512, 1536, 8, 4, 64),
    "120M": Model(10, 1024, 2816, 16, 8, 64),
    "500M": Model(18, 1536, 4608, 24, 8, 64),
}


@dataclass
class Args:
    parts: tuple[Literal["limit", "language", "control"], ...] = ("limit", "language", "control")
    """what to measure"""
    points: tuple[str, ...] = ("*",)
    """patterns of script/axis/value"""
    csv: str = "benchmarks/results/scaling.csv"
    """CSV to which rows are appended"""
    list: bool = False
    """print the points that would be run"""


# --- Points -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """One run."""

    part: str
    script: str  # file in algorithms/, or what is measured here
    axis: str
    value: str
    flags: str = ""
    model: str = ""  # of CPU_MODELS, random weights
    steps: int = 0  # language: steps of the run
    on: str = "cpu"

    @property
    def name(self) -> str:
        """For --points."""
        return f"{self.script}/{self.axis}/{self.value}"


def language_flags(prompts: int, group: int, length: int) -> str:
    """P prompts, G completions of each, T tokens of each."""
    return f"--num-prompts-per-step {prompts} --num-generations {group} --max-completion-length {length}"


def cpu_points() -> list[Point]:
    """The cheapest first in each axis."""
    found = [Point("limit", "torch.matmul", "size", str(size)) for size in (512, 1024, 2048)]

    def grpo(axis: str, value, prompts: int, group: int, length: int, model: str = "0.8M", steps: int = 4) -> Point:
        flags = language_flags(prompts, group, length)
        return Point("language", "grpo.py", axis, str(value), flags, model, steps)

    found += [grpo("prompts", n, n, 8, 64) for n in (4, 8, 16, 32, 64)]
    found += [grpo("group", n, 8, n, 64) for n in (2, 4, 8, 16, 32)]
    found += [grpo("length", n, 4, 8, n, steps=4 if n < 512 else 2) for n in (32, 64, 128, 256, 512)]
    found += [grpo("size", name, 1, 8, 32, name, 2 if name == "500M" else 3) for name in CPU_MODELS]
    teams = {1: "countdown --share-model", 2: "countdown", 3: "search_qa --missing-verdict reject --max-rounds 2"}
    for models, team in teams.items():
        flags = f"--env {team} {language_flags(1, 2, 32)}"
        found.append(Point("language", "dr_mas.py", "models", str(models), flags, "25M", 2))
    for rounds in (1, 2, 3, 4):  # no text of a random model is a verdict, and the last solution is never judged
        flags = f"--env countdown --missing-verdict reject --max-rounds {rounds} {language_flags(8, 8, 64)}"
        found.append(Point("language", "dr_mas.py", "calls", str(2 * rounds - 1), flags, "0.8M", 3))
    for n in (1, 2, 4, 8, 16, 32):
        flags = f"--num-envs {n} --num-steps {2048 // n} --total-timesteps 6144 --eval-episodes 0"
        found.append(Point("control", "unimodal_poisson.py", "num_envs", str(n), flags))
    for script, task in (("fm3q.py", "--env-id arat_large"), ("arac.py", "--graph cycle_12")):
        for n in (1, 8, 32, 256, 2048):
            found.append(Point("control", script, "num_envs", str(n), f"{task} {steps_flags(n)}"))
    for n in (1, 2, 4):
        flags = f"--env-id pong --num-pro {n} --num-ant {n} {steps_flags(32)}"
        found.append(Point("control", "fm3q.py", "agents", str(2 * n), flags))
    for n in (1, 2, 4):
        found.append(
            Point("control", "arac.py", "agents", str(n), f"--graph cycle_12 --num-agents {n} {steps_flags(32)}")
        )
    for n in (8, 16, 32, 64):
        found.append(Point("control", "arac.py", "nodes", str(n), f"--graph cycle_{n} {steps_flags(32)}"))
    return found


def steps_flags(num_envs: int) -> str:
    """Flags of fm3q.py and arac.py: a gradient step for each step of all games, 60 of these, 200 steps at least."""
    total = max(200, 60 * num_envs)
    return f"--num-envs {num_envs} --total-timesteps {total} --learning-starts {total // 4} --eval-steps 0"


def command(point: Point, model: str) -> list[str]:
    """Words behind `python`; `model` is the name of the model, or the folder that it lies in."""
    words = [f"algorithms/{point.script}", *point.flags.split()]
    if point.part != "language":
        return words if point.part == "control" else ["benchmarks/scaling.py", "--points", point.name]
    words += ["--model-name-or-path", model, "--max-steps", str(point.steps), "--eval-steps", "0"]
    if point.script == "grpo.py":
        return [*words, "--advantage", "none", "--reward", "benchmarks/scaling.py:one"]
    return [*words, "--reward", "benchmarks/scaling.py:at_random"]


def one(problem, completion: str) -> float:
    """The reward of grpo.py's points: with it and without a baseline, all rows are trained on."""
    return 1.0


def at_random(problem, answer: str) -> float:
    """The reward of dr_mas.py's points: scores that differ, so that all rows are trained on."""
    return random.random()


# --- In processes of their own ----------------------------------------------------------------------------------------


def make_model(name: str, folder: str) -> None:
    """Save one of CPU_MODELS with random weights, whose end token is one that it cannot write, and a tokenizer."""
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    model, tokenizer = CPU_MODELS[name], transformers.AutoTokenizer.from_pretrained(TOKENIZER)
    end = tokenizer.eos_token_id
    if model.vocab < 1000:  # a real vocabulary is so large that an end by chance is rare
        tokenizer.add_tokens([f"<|unused {number}|>" for number in range(model.vocab - len(tokenizer))])
        tokenizer.eos_token, end = None, model.vocab
    options = {"hidden_size": model.hidden, "intermediate_size": model.intermediate, "vocab_size": model.vocab}
    options |= {"num_hidden_layers": model.layers, "num_attention_heads": model.heads}
    options |= {"num_key_value_heads": model.kv_heads, "tie_word_embeddings": model.tied}
    options |= {"head_dim": model.head_dim}
    config = transformers.Qwen3Config(**options, max_position_embeddings=4096, bos_token_id=None, pad_token_id=0)
    network = transformers.AutoModelForCausalLM.from_config(config)
    network.generation_config.eos_token_id = end
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def matmul(size: int, seconds: float = 3.0) -> float:
    """Floating-point operations a second of the product of two square float32 matrices, the fastest of many."""
    import torch

    torch.set_num_threads(1)
    a, b = torch.randn(2, size, size)
    times, end = [], time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        began = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - began)
    return 2 * size**3 / min(times)


def in_child(expression: str) -> str:
    """Evaluate an expression with the names of this file in a process of its own; returns what it prints."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from benchmarks.scaling import *; print({expression})"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return done.stdout.strip().splitlines()[-1]


def perf_of(run_dir: Path) -> dict[int, dict[str, float]]:
    """Step -> tag -> value of metrics.csv, with tokens a second of language scripts."""
    found: dict[int, dict[str, float]] = {}
    with (run_dir / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            tag = row["tag"].removeprefix("train/")
            found.setdefault(int(row["step"]), {})[tag] = float(row["value"])
    before = 0.0
    for row in found.values():
        if "seconds/step" in row:
            row["step_seconds"], row["rollout_seconds"] = row["seconds/step"], row["seconds/rollout"]
            row["tokens_per_second"] = (row["num_tokens"] - before) / row["seconds/step"]
            before = row["num_tokens"]
    return found


def run_script(words: list[str], run_dir: Path, steps: int) -> dict[int, dict[str, float]]:
    """Run a script; with `steps` kill it as soon as it has printed so many lines of a step, each behind its row."""
    environment, lines, peak = os.environ | {"OMP_NUM_THREADS": "1"}, [], 0.0
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment, "cwd": ROOT}
    words = [sys.executable, "-u", *words, "--output-dir", str(run_dir)]
    with subprocess.Popen(words, **options) as process:
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step "):
                status = Path(f"/proc/{process.pid}/status").read_text()
                peak = int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) / 1e6
            if steps and sum(line.startswith("step ") for line in lines) == steps:
                process.kill()
                break
    if process.returncode and not steps or steps and sum(line.startswith("step ") for line in lines) < steps:
        raise RuntimeError("".join(lines[-20:]))
    perf = perf_of(run_dir)
    for row in perf.values():
        row["peak_memory_gb"] = peak
    return perf


def language_metrics(perf: dict[int, dict[str, float]], size: int) -> dict[str, float]:
    """Medians over steps, without the first; `size` parameters."""
    rows = list(perf.values())
    rows = rows[1:] or rows
    step, rollout = (statistics.median(row[f"{name}_seconds"] for row in rows) for name in ("step", "rollout"))
    update = statistics.median(row["step_seconds"] - row["rollout_seconds"] for row in rows)
    tokens = statistics.median(row["tokens_per_second"] * row["step_seconds"] for row in rows)
    found = {"parameters": size, "tokens": tokens, "rollout_seconds": rollout, "update_seconds": update}
    found |= {"step_seconds": step, "rollout_tokens_per_second": tokens / rollout}
    # 2 operations a parameter and token forwards, 6 with the way back; prompts are not counted, so this is a bit low
    return found | {"update_tokens_per_second": tokens / update, "flops_per_second": 8 * size * tokens / step}


def control_metrics(perf: dict[int, dict[str, float]], steps_per_update: float) -> dict[str, float]:
    """Steps and gradient steps a second over the second half of a run, all of whose rows are of equally many steps."""
    perf = {step: row for step, row in perf.items() if "charts/SPS" in row}
    rows = list(perf.values())[len(perf) // 2 :]
    speed = statistics.harmonic_mean([row["charts/SPS"] for row in rows])
    return {"steps_per_second": speed, "updates_per_second": speed / steps_per_update}


def measure(point: Point, models: str) -> dict:
    """The columns of a point that are measured; the folder `models` keeps models that several points have."""
    if point.part == "limit":
        return {"flops_per_second": float(in_child(f"matmul({point.value})"))}
    with tempfile.TemporaryDirectory() as folder:
        if point.model and not Path(models, point.model).exists():
            in_child(f"make_model({point.model!r}, {f'{models}/{point.model}'!r})")
        perf = run_script(command(point, f"{models}/{point.model}"), Path(folder, "run"), point.steps)
    rows = perf.values()
    found = {"steps": len(perf) if point.part == "language" else max(perf)}
    found["peak_memory_gb"] = max(row["peak_memory_gb"] for row in rows)  # of the process, from the kernel
    if point.part == "language":
        return found | language_metrics(perf, parameters(CPU_MODELS[point.model]))
    num_envs = float(re.search(r"--num-envs (\d+)", point.flags)[1])
    # 10 epochs of 32 minibatches for 2048 steps; the others make one gradient step for each step of all games
    return found | control_metrics(perf, 6.4 if point.script == "unimodal_poisson.py" else num_envs)


# --- Rows -------------------------------------------------------------------------------------------------------------


def key_of(row: dict) -> tuple[str, ...]:
    """What tells one point from another."""
    return tuple(str(row[name]) for name in KEY)


def read(path: Path) -> list[dict]:
    """Rows of the CSV, none if it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append(path: Path, row: dict) -> None:
    """Add a row, with the names of the columns before the first."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def short(value) -> str:
    """Four significant digits are more than these measurements have."""
    return f"{value:.4g}" if isinstance(value, float) and value < 1000 else f"{value:.0f}"


def due(args: Args) -> list[Point]:
    """The points that were asked for and that the CSV does not have."""
    done = {key_of(row) for row in read(ROOT / args.csv)}
    wanted = [p for p in cpu_points() if p.part in args.parts and any(fnmatch(p.name, x) for x in args.points)]
    return [point for point in wanted if key_of(vars(point)) not in done]


def how() -> dict[str, str | int]:
    """Columns that are the same for all points of a call."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    found = {name: version(name) for name in ("torch", "transformers", "gymnasium", "numpy")}
    found["device"] = f"CPU ({os.cpu_count()} cores, {platform.machine()})"
    return found | {"python": platform.python_version(), "commit": commit.strip(), "threads": 1, "on": "cpu"}


def main(args: Args) -> None:
    points = due(args)
    if args.list:
        print("\n".join(f"{point.part:<9} {point.name}" for point in points))
        return
    with tempfile.TemporaryDirectory() as models:
        failed = run_points(points, args, models)
    if failed:
        sys.exit(f"error: failed: {', '.join(failed)}")


def run_points(points: list[Point], args: Args, models: str) -> list[str]:
    """Append a row for each point; returns the names of those that failed."""
    same, failed = how() if points else {}, []
    for number, point in enumerate(points, 1):
        load, began = os.getloadavg()[0], time.perf_counter()
        try:
            found = measure(point, models)
        except RuntimeError as error:  # one point too many for the machine is no reason to lose the others
            print(f"{point.name}: failed\n{error}", file=sys.stderr, flush=True)
            failed.append(point.name)
            continue
        minutes = (time.perf_counter() - began) / 60
        row = {"part": point.part, "script": point.script, "axis": point.axis, "value": point.value}
        row |= same | {name: short(value) for name, value in found.items()}
        row |= {"minutes": f"{minutes:.2f}", "load": f"{load:.2f}"}
        append(ROOT / args.csv, row | {"command": f"python {shlex.join(command(point, point.model))}"})
        shown = {name: row[name] for name in COLUMNS if name in found and name not in ("steps", "parameters")}
        line = "  ".join(f"{name} {value}" for name, value in shown.items())
        print(f"{number}/{len(points)}  {minutes:.2f} min  {point.name}: {line}", flush=True)
    return failed


if __name__ == "__main__":
    main(tyro.cli(Args))
