r"""What the scripts do on a GPU: run this on yours, part by part; a part ends within nine minutes.

    python benchmarks/gpu.py --part defaults   # language scripts: default flags, few steps
    python benchmarks/gpu.py --part bf16       # the same with --bf16
    python benchmarks/gpu.py --part control    # control scripts: default flags
    python benchmarks/gpu.py --part models     # GRPO on models of 0.5B and 1.5B, random weights
    python benchmarks/gpu.py --part games      # control scripts: 256 to 65,536 games at once
    python benchmarks/gpu.py --part two        # two GPUs, also with --fsdp
    python benchmarks/make_tables.py           # draws the table from the CSV

    python benchmarks/gpu.py --part models --device cpu --small    # does this program work?

Every run is a script in a process of its own. As soon as it ends, its row is in
results/gpu_<name of the GPU>.csv; a run that is repeated replaces its row. A run that fails has the
error in its row, and the part goes on. When the time of a part is over, what still runs is stopped
and the rest is skipped, which their rows say. tyro may be missing; cli below takes its place.

tokens a second     of completions, by the seconds/rollout and the rest of seconds/step in
                    metrics.csv: median of all steps but the first
steps a second      of all games, median of the second half of the run
peak memory         of torch's tensors on the GPU (on a CPU: of the process), the largest of all
                    processes
share of the limit  Decoding cannot be faster than reading weights and cache once for each token, at
                    the speed of a large copy. The update cannot be faster than 6 operations a
                    parameter and token, at the speed of a large product of bfloat16 matrices.
                    Both speeds are measured before each part. Prompts are left out.
"""

import argparse
import csv
import json
import os
import platform
import re
import resource
import runpy
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import types
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.memory import PUBLIC_MODELS, Model, parameters  # noqa: E402


def cli(args_class, default=None):
    """tyro.cli as far as the scripts need it: a flag for each field of a dataclass."""
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    hints = get_type_hints(args_class)
    for field in fields(args_class):
        hint = hints[field.name]
        flag = "--" + field.name.replace("_", "-")
        kind = next((kind for kind in (int, float) if kind in (hint, *get_args(hint))), str)
        if hint is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction)
        elif get_origin(hint) is tuple:
            parser.add_argument(flag, nargs="*", type=kind)
        else:
            parser.add_argument(flag, type=kind)
    given = vars(parser.parse_args())
    given = {name: tuple(x) if isinstance(x, list) else x for name, x in given.items()}
    return replace(default or args_class(), **given)


try:
    import tyro  # noqa: F401
except ImportError:
    conf = types.SimpleNamespace(arg=lambda **options: None)
    sys.modules["tyro"] = types.SimpleNamespace(cli=cli, conf=conf)

PART_SECONDS = 500  # of 540: what is stopped may take half a minute to end
PARTS = ("defaults", "bf16", "control", "models", "games", "two")
COLUMNS = """part run device torch transformers python commit command bytes_per_second
flops_per_second seconds decode_tokens_per_second update_tokens_per_second steps_per_second
peak_memory_gb limit_share_decode limit_share_update error""".split()
SHOWN = COLUMNS[COLUMNS.index("seconds") :]
SHAPES = {
    "0.5B": PUBLIC_MODELS["Qwen2.5-0.5B-Instruct"],
    "1.5B": PUBLIC_MODELS["Qwen2.5-1.5B-Instruct"],
    "small": Model(2, 64, 128, 4, 2, 16, 2048, True, "qwen2"),
}
LANGUAGE = ("grpo", "dapo", "gdpo", "dr_mas", "igpo", "spiral_rae", "pi_play")
CONTROL = ("unimodal_poisson", "fm3q", "arac")
GAMES = {  # a task, and steps of every game
    "unimodal_poisson": (
        "--env-id envs/examples/carts.py:make --num-steps 16 --eval-episodes 0",
        160,
    ),
    "fm3q": ("--env-id pong", 500),
    "arac": ("", 500),
}
BARE = "--eval-steps 0 --save-steps 0"
FOUND = "gpu.py found "  # begins the line that `child` prints last


@dataclass
class Run:
    """A script with its flags."""

    name: str
    script: str
    flags: str
    shape: str | None = None  # of SHAPES
    rows: int = 0  # completions decoded at once by each process
    length: int = 0  # tokens of each
    processes: int = 1


def model_run(shape: str, rows: int, length: int, more: str = "", processes: int = 1) -> Run:
    """GRPO on random weights: groups of 8, no completion ends early, all are trained on."""
    flags = f"--num-prompts-per-step {rows // 8} --decode-batch-size {rows} --bf16 --max-steps 3"
    flags += f" --max-completion-length {length} --micro-batch-size {max(1, 4096 // length)}"
    flags += f" --advantage none --reward benchmarks/gpu.py:one {BARE} {more}"
    name = f"{shape}, {rows} x {length} {more}".strip()
    return Run(name, "grpo", flags, shape, rows // processes, length, processes)


def game_run(script: str, games: int, device: str) -> Run:
    """Many games at once."""
    flags, steps = GAMES[script]
    flags += f" --num-envs {games} --total-timesteps {games * steps} {BARE} --device {device}"
    return Run(f"{script}, {games} games", script, flags)


def runs_of(part: str, device: str) -> list[Run]:
    """The runs of a part, the most important first."""
    if part == "defaults":
        return [Run(script, script, "--max-steps 8") for script in LANGUAGE]
    if part == "bf16":
        return [Run(script, script, f"--max-steps 8 --bf16 {BARE}") for script in LANGUAGE]
    if part == "control":
        flags = f"--total-timesteps 40960 --device {device}"
        return [Run(script, script, flags) for script in CONTROL]
    if part == "games":
        sizes = (256, 4096, 65536)
        return [game_run(script, games, device) for games in sizes for script in CONTROL]
    if part == "models":
        return [
            model_run("0.5B", 256, 256),
            model_run("1.5B", 256, 256),
            model_run("1.5B", 256, 256, "--gradient-checkpointing"),
            model_run("0.5B", 64, 1024),
        ]
    return [
        model_run("0.5B", 256, 256, processes=2),
        model_run("0.5B", 256, 256, "--fsdp", processes=2),
        model_run("1.5B", 256, 256, "--fsdp", processes=2),
    ]


def small_runs(part: str, device: str) -> list[Run]:
    """Runs that only show that this program works."""
    if part == "models":
        return [model_run("small", 16, 16)]
    if part == "two":
        return [model_run("small", 16, 16, more, processes=2) for more in ("", "--fsdp")]
    few = "--max-steps 2 --eval-steps 0"
    if part in ("control", "games"):
        few = "--total-timesteps 8192"
    runs = [replace(run, flags=f"{run.flags} {few}") for run in runs_of(part, device)]
    return runs[: len(CONTROL)] if part == "games" else runs


def one(problem, completion: str) -> float:
    """The reward of all completions in model_run."""
    return 1.0


# --- In processes of their own ------------------------------------------------------------------


def fastest(function, device: str) -> float:
    """Seconds of the fastest of ten calls."""
    import torch

    times = []
    for _ in range(10):
        began = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)


def limits(device: str) -> dict[str, float]:
    """Speed of a large copy, counting what is read and what is written, and of a large product."""
    import torch

    source = torch.zeros(2**29 if device == "cuda" else 2**24, device=device)
    target = torch.zeros_like(source)
    copying = fastest(lambda: target.copy_(source), device)
    size = 8192 if device == "cuda" else 512
    a, b = torch.randn(2, size, size, device=device, dtype=torch.bfloat16)
    multiplying = fastest(lambda: a @ b, device)
    return {
        "bytes_per_second": 2 * source.nbytes / copying,
        "flops_per_second": 2 * size**3 / multiplying,
    }


def make_model(name: str, folder: str, device: str) -> None:
    """Save random weights with the shipped tokenizer; the end token is one that never comes."""
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    shape = SHAPES[name]
    config = transformers.Qwen2Config(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocab,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = shape.vocab
    model.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "envs/tiny_lm/countdown")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)


def prepare(device: str, folder: str, *shapes: str) -> dict:
    """Before a part: what the device is, how fast it is, and models with random weights."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU; --device cpu --small only tries this program")
    found = {"device": f"CPU ({platform.machine()})", "count": 2} | limits(device)
    if device == "cuda":
        found["device"] = torch.cuda.get_device_name()
        found["count"] = torch.cuda.device_count()
    for shape in shapes:
        make_model(shape, f"{folder}/{shape}", device)
    return found


def peak_memory_gb() -> float:
    """Of this process so far."""
    torch = sys.modules.get("torch")  # a script that failed early has not imported it
    if torch and torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # Linux has KiB


def child(words: list[str]) -> None:
    """Run `prepare` or a script with these words. The last line is what was found, as JSON."""
    found = {"error": ""}
    try:
        if words[0] == "prepare":
            found |= prepare(*words[1:])
        else:
            sys.argv = words
            sys.path[0] = str(Path(words[0]).parent)
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as stop:
        found["error"] = str(stop.code or "")
    except Exception as failure:
        found["error"] = f"{type(failure).__name__}: {failure}"
    found["peak_memory_gb"] = peak_memory_gb()
    print(f"\n{FOUND}{json.dumps(found)}", flush=True)
    sys.exit(1 if found["error"] else 0)


def in_child(words: list[str], seconds: float, device: str, processes: int = 1) -> dict:
    """What `child` found, of several processes the largest memory; it is stopped when late."""
    command = [sys.executable]
    if processes > 1:
        command += f"-m torch.distributed.run --standalone --nproc_per_node {processes}".split()
    command += [__file__, "--child", *words]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
    late = ""
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        late = f"stopped after {seconds:.0f} s"
        process.terminate()  # torchrun ends its processes then
        output, errors = process.communicate()
    lines = [line for line in output.splitlines() if line.startswith(FOUND)]
    found = [json.loads(line.removeprefix(FOUND)) for line in lines]
    if not found:
        return {"error": late or last_line(errors) or f"exit status {process.returncode}"}
    peak = max(each["peak_memory_gb"] for each in found)
    error = max(each["error"] for each in found)  # of one process, the others have none
    return found[0] | {"peak_memory_gb": peak, "error": late or last_line(error)}


def last_line(text: str) -> str:
    """Of an error, where the message stands."""
    return (text.strip().splitlines() or [""])[-1]


# --- Rows ---------------------------------------------------------------------------------------


def read(path: Path) -> list[dict]:
    """Rows of a CSV; none if there is no file."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, row: dict) -> None:
    """Add a row to the CSV, in place of one of the same run."""
    key = (row["part"], row["run"])
    rows = [old for old in read(path) if (old["part"], old["run"]) != key]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    with open(unfinished, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*rows, row])
    os.replace(unfinished, path)


def speeds(run_dir: Path) -> dict[str, float]:
    """Columns that are made of a run's metrics.csv; none if it did not come so far."""
    steps = {}
    for row in read(run_dir / "metrics.csv"):
        steps.setdefault(int(row["step"]), {})[row["tag"]] = float(row["value"])
    games = [row["charts/SPS"] for row in steps.values() if "charts/SPS" in row]
    if games:
        return {"steps_per_second": statistics.median(games[len(games) // 2 :])}
    steps = [row for row in steps.values() if "train/seconds/step" in row]
    decode = []
    update = []
    for before, now in pairwise(steps):
        tokens = now["train/num_tokens"] - before["train/num_tokens"]
        rollout = now["train/seconds/rollout"]
        decode.append(tokens / rollout)
        update.append(tokens / (now["train/seconds/step"] - rollout))
    if not decode:
        return {}
    found = {"decode_tokens_per_second": statistics.median(decode)}
    return found | {"update_tokens_per_second": statistics.median(update)}


def limit_shares(run: Run, found: dict[str, float]) -> dict[str, float]:
    """How near the tokens a second of a model are to what memory and matrix products allow."""
    if run.shape is None or "decode_tokens_per_second" not in found:
        return {}
    shape = SHAPES[run.shape]
    weights = 2 * parameters(shape)  # bytes
    cell = 4 * shape.layers * shape.key  # of a token in the cache
    bytes_per_token = weights / run.rows + cell * run.length / 2  # the cache is half full
    decode_limit = run.processes * found["bytes_per_second"] / bytes_per_token
    update_limit = run.processes * found["flops_per_second"] / (6 * parameters(shape))
    return {
        "limit_share_decode": found["decode_tokens_per_second"] / decode_limit,
        "limit_share_update": found["update_tokens_per_second"] / update_limit,
    }


def measure(run: Run, folder: str, seconds: float, device: str, count: int) -> dict:
    """One run; returns its columns."""
    words = [f"algorithms/{run.script}.py", *run.flags.split()]
    shown = words
    if run.shape:
        shown = [*words, "--model-name-or-path", run.shape]
        words = [*words, "--model-name-or-path", f"{folder}/{run.shape}"]
    launcher = "python" if run.processes == 1 else f"torchrun --nproc_per_node {run.processes}"
    row = {"command": f"{launcher} {shlex.join(shown)}"}
    if run.processes > count:
        return row | {"error": f"skipped: needs {run.processes} GPUs, here is {count}"}
    if seconds < 30:
        return row | {"error": f"skipped: the {PART_SECONDS} s of a part are over"}
    with tempfile.TemporaryDirectory() as output:
        words = [*words, "--output-dir", f"{output}/run"]
        began = time.perf_counter()
        found = in_child(words, seconds, device, run.processes)
        row["seconds"] = time.perf_counter() - began
        return row | found | speeds(Path(output, "run"))


def run_part(args) -> None:
    """The runs of a part whose names contain --only."""
    end = time.perf_counter() + PART_SECONDS
    runs = (small_runs if args.small else runs_of)(args.part, args.device)
    runs = [run for run in runs if args.only in run.name]
    shapes = {run.shape for run in runs if run.shape}
    same = {name: version(name) for name in ("torch", "transformers")}
    same |= {"part": args.part, "python": platform.python_version()}
    git = ["git", "rev-parse", "--short", "HEAD"]
    same["commit"] = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        device = in_child(["prepare", args.device, folder, *shapes], PART_SECONDS, args.device)
        if device["error"]:
            sys.exit(device["error"])
        same |= {name: device[name] for name in ("device", "bytes_per_second", "flops_per_second")}
        name = re.sub(r"\W+", "_", device["device"].lower()).strip("_")
        path = ROOT / "benchmarks" / "results" / f"gpu_{name}.csv"
        if args.small:
            path = ROOT / "runs" / "gpu_small.csv"
        path = Path(args.csv or path)
        for run in runs:
            left = end - time.perf_counter()
            row = {"run": run.name} | same
            row |= measure(run, folder, left, args.device, device["count"])
            row |= limit_shares(run, row)
            texts = {name: f"{x:.4g}" if isinstance(x, float) else x for name, x in row.items()}
            write(path, {name: texts.get(name, "") for name in COLUMNS})
            shown = [f"{name} {texts[name]}" for name in SHOWN if texts.get(name)]
            print(f"{args.part}, {run.name}: {', '.join(shown)}", flush=True)
    print(f"{path}: {len(read(path))} rows")


def main(words: list[str]) -> None:
    if words[:1] == ["--child"]:
        child(words[1:])
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--only", default="", help="only runs whose name contains this")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny runs that measure nothing")
    parser.add_argument("--csv", help="file of the rows")
    run_part(parser.parse_args(words))


if __name__ == "__main__":
    main(sys.argv[1:])
