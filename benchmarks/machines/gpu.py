"""What the scripts do on a GPU: run this on yours, part by part; a part ends within nine minutes.

    python benchmarks/machines/gpu.py --part short      # what matters most; begin with it
    python benchmarks/machines/gpu.py --part defaults   # language scripts: default flags, few steps
    python benchmarks/machines/gpu.py --part control    # control scripts: default flags, few steps
    python benchmarks/machines/gpu.py --part whole      # language scripts: the whole default run, and its last score
    python benchmarks/machines/gpu.py --part models     # GRPO on models of 0.5B and 1.5B, random weights
    python benchmarks/machines/gpu.py --part two        # two GPUs, also with --fsdp
    python benchmarks/machines/gpu.py --part lora       # adapters: language scripts, models of 0.5B and 1.5B
    python benchmarks/machines/gpu.py --part vllm       # the same with --vllm, where it is installed
    python benchmarks/machines/gpu.py --part trl        # GRPO on a model of 0.5B next to TRL, both with vLLM and without

    python benchmarks/machines/gpu.py --part short --device cpu --small     # does this program work?

Every run is a process of its own, with a row in results/gpu_<name of the GPU>.csv, which may be an
error; a repeated run replaces its row. What runs when the time of a part is over is stopped, and the
rest is skipped, without a row. With --jobs several runs share the GPU, to see whether they work: their
rows have no speeds.

Times are from metrics.csv, medians of all steps but the first. Tokens are those of all completions:
decoding takes seconds/rollout, the update the rest of seconds/step, with the transfer of weights. In
default runs the update leaves out rows without advantage, so its speed is too high. Control scripts:
steps a second of all games, median of the second half. Peak memory is of torch's tensors
on the GPU (on a CPU: of the process); it may count vLLM's share as if it never slept. Beside it is
what memory.py computes of those tensors. The gap is train/sampling/logprob_difference/mean, the
largest of all steps; a run whose gap is too large has an error.

The part `short` goes from decoding and the update (gpu_short.py) over steps beside TRL to the last four
runs, which share the GPU: SmolLM2-135M as README trains it, three seeds, if the folder smollm2 is there
(else the default run), and 7B with adapters. Steps with vLLM come last, where it is installed. Curves
of whole runs go to gpu_<name of the GPU>_curves.csv.
"""

import json
import os
import re
import resource
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import Literal

import pandas as pd
import torch
import transformers
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from algorithms import grpo  # noqa: E402
from benchmarks.about import RESULTS, ROOT, about  # noqa: E402
from benchmarks.machines.memory import PUBLIC_MODELS, Model, memory_model  # noqa: E402

SHAPES = {
    "0.5B": PUBLIC_MODELS["Qwen2.5-0.5B-Instruct"],
    "1.5B": PUBLIC_MODELS["Qwen2.5-1.5B-Instruct"],
    "7B": PUBLIC_MODELS["Qwen2.5-7B-Instruct"],
    "small": Model(2, 64, 128, 2, 1, 32, 2048, True, "qwen2"),
}
LANGUAGE = ("grpo", "dapo", "gdpo", "nash_preference", "hpt", "ampo", "opd", "unlikeliness", "dr_mas", "igpo", "empg", "arpo")
LANGUAGE += ("critic_search", "spiral_rae", "advantage_alignment", "pi_play")
CONTROL = ("unimodal_poisson", "fm3q", "arac", "mdpo", "seqwm")
BARE = "--eval-steps 0 --save-steps 0"
LARGEST_GAP = 0.02  # nats between log-probabilities of sampler and learner, mean of a step
SMOLLM2 = """--model-name-or-path smollm2 --env reasoning_gym --task chain_sum
    --task-config '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}'
    --system-prompt "Think briefly, then end with the answer."
    --num-prompts-per-step 8 --max-completion-length 48 --micro-batch-size 16
    --learning-rate 2e-5 --max-steps 40 --eval-steps 20 --eval-problems 100 --num-generations-eval 2"""  # of algorithms/README.md
PACKAGES = {"lora": "peft", "vllm": "vllm peft", "trl": "trl vllm", "control": "gymnasium mujoco"}
PACKAGES["short"] = "trl vllm peft"
WRITING = Lock()
FOUND = "gpu.py found "  # begins the line that `child` prints last


@dataclass
class Args:
    part: Literal["short", "defaults", "control", "whole", "models", "two", "lora", "vllm", "trl"]
    """what to run"""
    jobs: int = 1
    """runs at a time"""
    seconds: float = 500.0
    """after which the runs of the part are stopped; that may take half a minute"""
    only: str = ""
    """only runs whose name contains this"""
    device: Literal["cuda", "cpu"] = "cuda"
    """cpu tries this program"""
    small: bool = False
    """tiny runs that measure nothing"""
    csv: str = ""
    """file of the rows; default results/gpu_<name>.csv"""


@dataclass
class Run:
    """A script with its flags."""

    name: str
    script: str  # in algorithms, if this is no path
    flags: str
    shape: str = ""  # of SHAPES
    processes: int = 1
    jobs: int = 0  # runs at a time; 0: as --jobs says
    writes_rows: bool = False  # gets the CSV, to which it writes rows itself
    saved: bool = True  # the random weights are a folder; else gpu_short.py makes them on the device
    curve: bool = False  # keep its metrics
    reserve: float = 0.0  # seconds of the part that it leaves to the runs after it
    largest_gap: float = LARGEST_GAP


def model_run(
    shape: str, rows: int, length: int, more: str = "", processes: int = 1, steps: int = 3, at_once: int = 0
) -> Run:
    """GRPO on random weights: groups of 8, hardly any completion ends early, all are trained on."""
    at_once = at_once or max(1, 4096 // length)
    flags = f"--num-prompts-per-step {rows // 8} --decode-batch-size {rows} --bf16 --max-steps {steps}"
    flags += " --max-prompt-length 96"
    flags += f" --max-completion-length {length} --micro-batch-size {at_once}"
    flags += f" --advantage none --reward benchmarks/machines/gpu.py:one {BARE} {more}"
    name = f"{shape}, {rows} x {length} {more}".strip()
    return Run(name, "grpo", flags, shape, processes)


def runs_of(part: str, device: str, small: bool) -> list[Run]:
    """The runs of a part, the most important first; small ones show that this program works."""
    if part == "short":
        return short_runs(small)
    if part == "defaults":
        flags = f"--max-steps {2 if small else 8} {BARE}"
        both = ("", " --bf16")
        return [Run(f"{name}{bf16}", name, flags + bf16) for bf16 in both for name in LANGUAGE]
    if part == "whole":
        return [Run(name, name, "--max-steps 2" if small else "") for name in LANGUAGE]
    if part == "control":
        flags = f"--total-timesteps {8192 if small else 40960} --device {device}"
        off_policy = f"--total-timesteps {2048 if small else 20480} --device {device}"
        off_policy += " --method off_policy --learning-starts 1024"
        runs = [Run(script, script, flags) for script in CONTROL]
        offline = f"--policy-steps {100 if small else 500} --world-model-steps 500 --device {device}"
        return [*runs, Run("mdpo off-policy", "mdpo", off_policy), Run("meta_dt", "meta_dt", offline)]
    if part in ("lora", "vllm"):
        added = {"lora": "--lora-rank 16", "vllm": "--vllm"}[part]
        flags = f"--max-steps {2 if small else 4} {BARE} {added}" + " --vllm-memory 0.1" * (part == "vllm")
        runs = [model_run("small", 16, 16, added)]
        if not small:
            runs = [model_run("0.5B", 256, 256, added)]
            more = "--gradient-checkpointing --lora-rank 16" + " --vllm" * (part == "vllm")
            runs.append(model_run("1.5B", 256, 256, more))
        small_models = [Run(f"{name} {added}", name, f"{flags} --bf16") for name in LANGUAGE]
        return [*runs, Run(f"grpo, float32 {added}", "grpo", flags), *small_models]
    if part == "models" and small:
        return [model_run("small", 16, 16)]
    if part == "models":
        checkpointed = [model_run("1.5B", rows, 256, "--gradient-checkpointing") for rows in (64, 256)]
        return [model_run("0.5B", 256, 256), *checkpointed, model_run("0.5B", 64, 1024)]
    if part == "trl":
        ours = [model_run("small", 16, 16)]
        if not small:
            ours = [model_run("0.5B", 256, 256, vllm, steps=4) for vllm in ("--vllm", "")]
        theirs = [Run(f"TRL: {run.name}", "benchmarks/machines/trl_steps", run.flags, run.shape) for run in ours]
        return [run for pair in zip(ours, theirs) for run in pair]
    shape, *size = ("small", 16, 16) if small else ("0.5B", 256, 256)
    return [model_run(shape, *size, more, processes=2) for more in ("", "--fsdp")]


def short_runs(small: bool) -> list[Run]:
    """The part `short`. Runs that share the GPU have no speeds."""
    main, *others = ("small",) if small else ("0.5B", "1.5B")
    measured = [f"decode {shape}" for shape in (main, *others)] + [f"update {main}"]
    runs = [Run(name, "benchmarks/machines/gpu_short", name, writes_rows=True) for name in measured]
    step = ("small", 16, 16) if small else ("0.5B", 256, 256)
    steps = [model_run(*step, vllm, at_once=16 if small else 64) for vllm in ("", "--vllm")]
    theirs = [Run(f"TRL: {run.name}", "benchmarks/machines/trl_steps", run.flags, run.shape) for run in steps]
    has_trl = find_spec("trl") and find_spec("datasets")
    pairs = [[run, other] if has_trl else [run] for run, other in zip(steps, theirs)]
    has_model = Path(ROOT, "smollm2", "config.json").exists() and find_spec("reasoning_gym")
    name, flags = ("SmolLM2-135M", SMOLLM2) if has_model else ("grpo", "")
    if small:
        name, flags = "grpo", "--max-steps 2 --eval-steps 1 --eval-problems 8"
    whole = [Run(f"{name}, seed {seed}", "grpo", f"{flags} --seed {seed}", curve=True) for seed in (1, 2, 3)]
    size = ("small", 16, 16) if small else ("7B", 64, 256)
    large = model_run(*size, "--gradient-checkpointing --lora-rank 16", steps=2)
    large = replace(large, saved=False, largest_gap=0.05)  # 7B rounds more than the others
    together = [replace(run, jobs=4) for run in (*whole, large)]
    alone = [replace(run, jobs=1, reserve=150.0) for run in (*runs, *pairs[0])]
    last = [replace(run, jobs=1) for run in pairs[1]] if find_spec("vllm") else []
    return [*alone, *together, *last]


def one(problem, completion: str) -> float:
    """The reward of all completions in model_run."""
    return 1.0


# --- A run ----------------------------------------------------------------------------------------


def random_model(name: str, device: str | torch.device, dtype: torch.dtype):
    """Random weights of a shape, made on the device. The end token is the last of the vocabulary,
    which is rarely sampled; vLLM refuses one outside the vocabulary."""
    torch.manual_seed(0)
    shape = SHAPES[name]
    sizes = {"num_hidden_layers": shape.layers, "hidden_size": shape.hidden}
    sizes |= {"intermediate_size": shape.intermediate, "num_attention_heads": shape.heads}
    sizes |= {"num_key_value_heads": shape.kv_heads, "vocab_size": shape.vocab}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = transformers.Qwen2Config(**sizes, **ends, tie_word_embeddings=shape.tied)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = shape.vocab - 1
    return model


def tokenizer():
    """The shipped one, without an end token."""
    found = transformers.AutoTokenizer.from_pretrained(ROOT / "envs/tiny_lm/countdown")
    found.eos_token = None
    return found


def make_model(name: str, folder: str, device: str) -> None:
    """Save random weights with the tokenizer."""
    transformers.logging.disable_progress_bar()
    random_model(name, device, torch.bfloat16).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    if device == "cuda":
        torch.cuda.empty_cache()


def child(words: list[str]) -> None:
    """Run a script with these words, in this process. The last line is what was found, as JSON."""
    error = ""
    try:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as stop:
        error = str(stop.code or "")
    except Exception as failure:
        traceback.print_exc()
        error = f"{type(failure).__name__}: {failure}"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # Linux has KiB
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 1e9
    print(f"\n{FOUND}{json.dumps({'error': error[-300:], 'peak_memory_gb': peak})}", flush=True)
    sys.exit(bool(error))


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
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)
    late = ""
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        late = f"stopped after {seconds:.0f} s"
        process.terminate()  # torchrun ends its processes then
        try:
            output, errors = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its children too
            output, errors = process.communicate()
    lines = [line for line in output.splitlines() if line.startswith(FOUND)]
    found = [json.loads(line.removeprefix(FOUND)) for line in lines]
    if not found or process.returncode:
        print(output[-1000:], errors[-6000:], sep="\n", file=sys.stderr)
    if not found:
        last = (errors.strip().splitlines() or [""])[-1]
        return {"error": late or f"exit status {process.returncode} {last}".strip()}
    peak = max(each["peak_memory_gb"] for each in found)
    row = {"error": late or max(each["error"] for each in found), "peak_memory_gb": peak}
    notes = [line for line in output.splitlines() if line.startswith("decoding is not recorded")]
    return row | ({"note": notes[0][:200]} if notes else {})


def speeds(run_dir: Path) -> dict[str, float]:
    """Columns that are made of a run's metrics.csv; none if it did not come so far."""
    if not Path(run_dir, "metrics.csv").exists():
        return {}
    metrics = pd.read_csv(run_dir / "metrics.csv")
    metrics = metrics.pivot_table(index="step", columns="tag", values="value")
    if "charts/SPS" in metrics:
        games = metrics["charts/SPS"].dropna()
        return {"steps_per_second": games[len(games) // 2 :].median()}
    gaps = metrics.filter(regex="sampling/logprob_difference/mean$")  # a column for each model
    found = {"gap": gaps.max().max()} if len(gaps.columns) else {}
    for tag in metrics.filter(regex="eval/mean_at_"):
        scores = metrics[tag].dropna()
        name = tag.removeprefix("eval/")
        found |= {f"first_{name}": scores.iloc[0], name: scores.iloc[-1]}
    if "train/seconds/step" not in metrics:
        return found
    steps = metrics.dropna(subset="train/seconds/step")
    found["steps"] = len(steps)
    found["seconds_a_step"] = steps["train/seconds/step"].iloc[1:].median()
    if "train/seconds/rollout" not in steps:
        return found
    tokens = steps["train/num_tokens"].diff()  # nothing of the first step
    rollout = steps["train/seconds/rollout"]
    update = steps["train/seconds/step"] - rollout
    found["decode_tokens_per_second"] = (tokens / rollout).median()
    return found | {"update_tokens_per_second": (tokens / update).median()}


def keep_curve(name: str, run_dir: Path, path: Path) -> None:
    """Scores and rewards of a run, in place of those of an earlier one."""
    if not Path(run_dir, "metrics.csv").exists():
        return
    curve = pd.read_csv(run_dir / "metrics.csv")
    curve = curve[curve.tag.str.match("eval/|train/reward$|train/completions/mean_length")]
    curve.insert(0, "run", name)
    with WRITING:
        if path.exists():
            old = pd.read_csv(path)
            curve = pd.concat([old[old.run != name], curve])
        curve.to_csv(path, index=False, lineterminator="\n")


def measure(run: Run, folder: str, seconds: float, device: str, path: Path = RESULTS / "gpu.csv") -> dict:
    """One run; returns its columns. path: the CSV."""
    script = f"{run.script}.py" if "/" in run.script else f"algorithms/{run.script}.py"
    words = [script, *shlex.split(run.flags)]
    if run.shape:
        words += ["--model-name-or-path", f"{folder}/{run.shape}"]
    computed = {}
    if run.shape and run.script == "grpo" and "--vllm" not in words:
        flags = tyro.cli(grpo.Args, args=words[1:])
        moments = memory_model(SHAPES[run.shape], flags, run.processes)
        names = ("start", "rollout", "update") if run.saved else ("rollout", "update")
        computed["computed_gb"] = max(moments[name] for name in names)
    if not run.saved:
        words = ["benchmarks/machines/gpu_short.py", "train", *words[1:]]
    launcher = "python" if run.processes == 1 else f"torchrun --nproc_per_node {run.processes}"
    row = {"command": f"{launcher} {shlex.join(words).replace(f'{folder}/', '')}"}
    count = torch.cuda.device_count() if device == "cuda" else 2
    if run.processes > count:
        return row | {"error": f"skipped: needs {run.processes} GPUs, here is {count}"}
    if seconds < 30:
        return row | {"error": "skipped: the time of the part is over"}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as output:
        words += [str(path)] if run.writes_rows else ["--output-dir", f"{output}/run"]
        row |= in_child(words, seconds, device, run.processes) | computed
        row["seconds"] = time.perf_counter() - began
        row |= speeds(Path(output, "run"))
        if run.curve:
            keep_curve(run.name, Path(output, "run"), path.with_name(f"{path.stem}_curves.csv"))
    if "gap" in row and not row["gap"] < run.largest_gap:  # also if it is NaN
        row["error"] = row["error"] or f"sampler and learner are {row['gap']:.3f} nats apart"
    return row


def described(part: str, device: str) -> dict[str, str]:
    """Columns that all rows of a part have."""
    same = {"part": part} | about("torch", "transformers")
    for module in PACKAGES.get(part, "").split():
        for package in packages_distributions().get(module, []):
            same[package] = version(package)
    if device == "cuda":
        same["device"] = torch.cuda.get_device_name()
    return same


def write_row(path: Path, row: dict) -> None:
    """Add a row, in place of the one of this part and name."""
    with WRITING:
        table = pd.DataFrame([row])
        if path.exists():
            old = pd.read_csv(path)
            table = pd.concat([old[(old.part != row["part"]) | (old.run != row["run"])], table])
        table.to_csv(f"{path}.tmp", index=False, lineterminator="\n")
        os.replace(f"{path}.tmp", path)
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)


def main(args: Args) -> None:
    """The runs of a part whose names contain --only."""
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch finds no GPU; --device cpu --small only tries this program")
    end = time.perf_counter() + args.seconds
    runs = runs_of(args.part, args.device, args.small)
    runs = [run for run in runs if args.only in run.name]
    same = described(args.part, args.device)
    name = re.sub(r"\W+", "_", same["device"].lower()).strip("_")
    path = Path(args.csv or RESULTS / f"gpu_{name}.csv").resolve()

    def row_of(run: Run, folder: str, jobs: int) -> None:
        """Measure, and write the row."""
        reserve = run.reserve if any(other.reserve == 0 for other in runs) else 0.0
        left = end - time.perf_counter() - reserve
        try:
            row = {"run": run.name} | same | measure(run, folder, left, args.device, path)
        except Exception as failure:  # the others go on
            traceback.print_exc()
            row = {"run": run.name} | same | {"error": f"{type(failure).__name__}: {failure}"[:300]}
        if str(row.get("error")).startswith("skipped"):
            print(f"{run.name}: {row['error']}", flush=True)
            return
        if run.writes_rows and not row["error"]:
            print(f"{run.name}: its rows are in {path.name}", flush=True)
            return
        if jobs > 1:
            row = {name: value for name, value in row.items() if not name.endswith(("_second", "_a_step"))}
            row["jobs"] = jobs
        write_row(path, row)

    with tempfile.TemporaryDirectory() as folder:
        for jobs, group in groupby(runs, key=lambda run: run.jobs or args.jobs):
            group = list(group)
            for shape in {run.shape for run in group if run.shape and run.saved}:
                if not Path(folder, shape).exists():
                    make_model(shape, f"{folder}/{shape}", args.device)
            with ThreadPoolExecutor(jobs) as pool:
                list(pool.map(partial(row_of, folder=folder, jobs=jobs), group))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
    main(tyro.cli(Args))
