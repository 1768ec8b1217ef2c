r"""How the cost of a step grows, measured in small; and how much memory a large model takes, computed.

    python benchmarks/scaling.py                               # 15 minutes on one core; nothing else should run
    python benchmarks/scaling.py --points 'grpo.py/size/*'     # some points: script/axis/value, as --list prints them
    python benchmarks/scaling.py --memory                      # writes the computed table into benchmarks/scale.md

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

The memory of a large model is that of `memory_model`, for grpo.py and dapo.py. What it says was compared with the bytes
of all tensors of small models on CPUs: on one process test_scaling.py does it, under FSDP2 it was done by hand.
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
from math import ceil, prod
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import tyro

# Nothing heavy is imported here: Linux counts the memory of the process that starts another one as the other's peak.

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "benchmarks/scale.md"
TOKENIZER = ROOT / "envs/tiny_lm/countdown"
LOGITS_AT_ONCE, PACKED_LENGTH = 2**26, 4096  # of grpo.py
COLUMNS = "part script axis value on parameters tokens rollout_seconds update_seconds step_seconds".split()
COLUMNS += "rollout_tokens_per_second update_tokens_per_second steps_per_second updates_per_second".split()
COLUMNS += "flops_per_second peak_memory_gb steps minutes threads load device".split()
COLUMNS += "torch transformers gymnasium numpy python commit command".split()
KEY = ("part", "script", "axis", "value", "on")


@dataclass(frozen=True)
class Model:
    """The shape of a Llama, or of one of its kin with biases (Qwen2.5) or with norms of queries and keys (Qwen3)."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int = 416
    tied: bool = True  # the head is the embedding
    kind: Literal["llama", "qwen2", "qwen3"] = "qwen3"


CPU_MODELS = {
    "0.8M": Model(4, 128, 384, 4, 2, 32),  # the shape of the shipped model
    "5M": Model(6, 256, 768, 4, 2, 64),
    "25M": Model(8, 512, 1536, 8, 4, 64),
    "120M": Model(10, 1024, 2816, 16, 8, 64),
    "500M": Model(18, 1536, 4608, 24, 8, 64),
}
PUBLIC_MODELS = {
    "Qwen2.5-0.5B-Instruct": Model(24, 896, 4864, 14, 2, 64, 151_936, True, "qwen2"),
    "Qwen2.5-1.5B-Instruct": Model(28, 1536, 8960, 12, 2, 128, 151_936, True, "qwen2"),
    "Qwen2.5-3B-Instruct": Model(36, 2048, 11008, 16, 2, 128, 151_936, True, "qwen2"),
    "Qwen2.5-7B-Instruct": Model(28, 3584, 18944, 28, 4, 128, 152_064, False, "qwen2"),
    "Qwen3-0.6B": Model(28, 1024, 3072, 16, 8, 128, 151_936, True, "qwen3"),
    "Qwen3-1.7B": Model(28, 2048, 6144, 16, 8, 128, 151_936, True, "qwen3"),
    "Qwen3-4B": Model(36, 2560, 9728, 32, 8, 128, 151_936, True, "qwen3"),
    "SmolLM2-135M-Instruct": Model(30, 576, 1536, 9, 3, 64, 49_152, True, "llama"),
    "SmolLM2-360M-Instruct": Model(32, 960, 2560, 15, 5, 64, 49_152, True, "llama"),
    "SmolLM2-1.7B-Instruct": Model(24, 2048, 8192, 32, 32, 64, 49_152, True, "llama"),
    "Llama-3.2-1B-Instruct": Model(16, 2048, 8192, 32, 8, 64, 128_256, True, "llama"),
    "Llama-3.2-3B-Instruct": Model(28, 3072, 8192, 24, 8, 128, 128_256, True, "llama"),
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
    memory: bool = False
    """only write the computed table of memory into benchmarks/scale.md"""


# --- Memory, computed -------------------------------------------------------------------------------------------------


def shape_of(name: str) -> Model | None:
    """The shape of a public model, given its name or a folder with that name; None if it is not known here."""
    name = Path(name).name.lower()
    return next((shape for known, shape in PUBLIC_MODELS.items() if known.lower() in (name, f"{name}-instruct")), None)


def layer_shapes(model: Model) -> dict[str, list[tuple[int, ...]]]:
    """Shapes of the parameters of one layer: of linear maps with their biases, and of norms."""
    hidden, query, key = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
    linear = [(query, hidden), (key, hidden), (key, hidden), (hidden, query)]
    linear += [(model.intermediate, hidden)] * 2 + [(hidden, model.intermediate)]
    linear += [(query,), (key,), (key,)] * (model.kind == "qwen2")  # biases
    return {"linear": linear, "norms": [(hidden,)] * 2 + [(model.head_dim,)] * 2 * (model.kind == "qwen3")}


def shapes(model: Model) -> list[tuple[int, ...]]:
    """Shapes of all parameters, a tied head counted once."""
    layer = [shape for kind in layer_shapes(model).values() for shape in kind]
    return layer * model.layers + [(model.hidden,)] + [(model.vocab, model.hidden)] * (1 if model.tied else 2)


def parameters(model: Model, processes: int = 1) -> int:
    """Number of parameters, or of those that the first of several processes keeps of them under FSDP2, which cuts every
    tensor along its first dimension into equal pieces, rounded up."""
    return sum(ceil(shape[0] / processes) * prod(shape[1:]) for shape in shapes(model))


def packed_shape(flags) -> tuple[int, int, int]:
    """R, L and N of the largest micro-batch: all prompts and completions as long as the flags allow, groups whole."""
    prompt, length = flags.max_prompt_length, flags.max_completion_length

    def parts(group: int) -> int:
        return min(group, ceil(group * length / max(1, PACKED_LENGTH - prompt)))

    groups, rest = divmod(flags.micro_batch_size, flags.num_generations)
    largest = flags.num_generations if groups else rest
    rows = groups * parts(flags.num_generations) + parts(rest)
    width = prompt - 1 + ceil(largest / parts(largest)) * length
    return rows, ceil(width / 8) * 8, flags.micro_batch_size * length


def memory_model(shape: Model | str, flags, world_size: int = 1) -> dict[str, float]:
    """GB (10^9 bytes) on each device of grpo.py or dapo.py: what is held all the time, what `rollout` (evaluation too) and
    `update` add at their worst moment, and the sums `start`, `rollout`, `update` and, with `runtime`, `peak`.

    flags: the Args of the script. Every prompt has --max-prompt-length tokens and every completion
    --max-completion-length. Left out are the fragments of the allocator.
    """
    shape = shape_of(shape) if isinstance(shape, str) else shape
    fsdp, bf16 = flags.fsdp and world_size > 1, flags.bf16
    whole, kept = parameters(shape), parameters(shape, world_size if fsdp else 1)
    compute = 2 if bf16 else 4  # bytes of what linear maps take and give
    parts = {
        "weights": 4 * kept,
        "gradients": 4 * kept,  # they stay through the rollout
        "moments": 8 * kept,
        "decoding copy": compute * whole * (bf16 or fsdp),  # whole on each process
        "reference": 4 * kept * (flags.beta > 0),
    }
    held = sum(parts.values())
    rollout = max(rollout_moments(shape, flags, compute), key=lambda moment: sum(moment.values()))
    update = max(update_moments(shape, flags, compute, world_size if fsdp else 1), key=lambda moment: sum(moment.values()))
    copies = 1 + (flags.beta > 0) + (bf16 or fsdp)  # in float32, before they are cast and cut
    sums = {"start": 4 * whole * copies, "rollout": held + sum(rollout.values()), "update": held + sum(update.values())}
    found = {name: value / 1e9 for name, value in {**parts, **rollout, **update, **sums}.items()}
    found["runtime"] = 1.0  # Python and torch, or CUDA with its libraries
    return found | {"peak": found["runtime"] + max(found[name] for name in sums)}


def rollout_moments(shape: Model, flags, compute: int) -> list[dict[str, float]]:
    """Bytes by part: of the last token, and of the forward pass of the prompts, in training and in evaluation."""
    S, T, G, size = flags.max_prompt_length, flags.max_completion_length, flags.num_generations, flags.decode_batch_size
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    cell = shape.layers * 2 * key * compute  # of a token in the cache
    groups = {G: max(1, size // G)}  # completions of a prompt: prompts
    if flags.eval_steps:
        groups |= {k: max(1, size // k) for k in (1, flags.num_generations_eval) if k}
    moments = []
    for group, prompts in groups.items():
        rows = prompts * group
        # one layer's keys are there twice while they grow; logits and three float32 tensors made of them
        cache = rows * (S + T) * cell * (1 + 0.5 / shape.layers)
        moments.append({"cache": cache, "sampling": rows * shape.vocab * (compute + 12)})
        mlp = 3 * shape.intermediate * compute + shape.hidden * (2 * compute + 4)
        attention = (6 * query + 2 * shape.hidden) * compute
        prefill = prompts * S * max(mlp, attention) + prompts * S * S * (2 + compute)
        moments.append({"cache": prompts * S * cell, "prefill": prefill})
    return moments


def update_moments(shape: Model, flags, compute: int, shards: int) -> list[dict[str, float]]:
    """Bytes by part, of the largest micro-batch: at the end of the forward pass; in the backward pass at its logits, in
    its last layer, and where the gradients of a tied head and the embedding meet."""
    R, L, N = packed_shape(flags)
    fsdp = shards > 1
    tokens, hidden, vocab, layers = R * L, shape.hidden, shape.vocab, shape.layers
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    linear = sum(map(prod, layer_shapes(shape)["linear"]))  # parameters of a layer
    head = vocab * hidden
    # Autocast leaves the residual stream in float32 and casts what it needs; FSDP's mixed precision casts the weights.
    autocast = compute == 2 and not fsdp
    stream = compute if fsdp else 4

    # What autograd keeps of a layer, for each token: of two norms their input and the normalised (float32 again); inputs
    # of linear maps (autocast makes one for each); gate, up, their product and the activation; query, key, value
    # (repeated for all heads), output; the logarithm of the softmax's sum.
    saved = hidden * (2 * (4 + stream) + (10 if autocast else 2 * compute))
    saved += 4 * compute * (shape.intermediate + query) + 4 * shape.heads
    if shape.kind == "qwen3":  # norms of queries and keys
        saved += (4 + compute) * (query + key)
    layer = tokens * saved

    inputs = tokens * hidden * stream * (layers + 3) + N * hidden * compute  # of layers, last norm and head
    activations = inputs if flags.gradient_checkpointing else inputs - tokens * hidden * stream * layers + layer * layers
    base = {"masks": R * L * L * (1 + compute), "activations": activations}
    chunk = min(N, max(1, LOGITS_AT_ONCE // vocab)) * vocab
    chunks = ceil(N * vocab / chunk)

    # Weights in bfloat16, with gradients: autocast keeps those of a forward pass until it ends, without checkpointing
    # until they are used again. FSDP has the head and embedding, the layer, and the next or last one, with gradients.
    gathered = compute * head * (1 if shape.tied else 2) * fsdp
    cast = 2 * linear * layers * autocast
    cast_later = 0 if flags.gradient_checkpointing else cast
    head_cast = 2 * head * autocast
    if chunks == 1:
        logits = 12 * chunk
    else:  # the sum of the head's gradients grows beside a chunk
        logits = max(12 * chunk + compute * head, 3 * compute * head)
    waiting = (compute if fsdp else 4) * head * shape.tied
    in_layer = layer if flags.gradient_checkpointing else tokens * shape.intermediate * compute
    in_layer += 2 * linear * autocast + (3 * compute + 4) * linear * fsdp
    if fsdp and shape.tied:  # what FSDP reduces is a float32 copy, made after it lets the weights go
        meeting = max(4 * compute, compute + 4 + 4 / shards) * head
    elif fsdp:
        meeting = (compute + 8 + 8 / shards) * head
    else:
        meeting = 12 * head * shape.tied
    return [
        base | {"cast weights": cast + head_cast + gathered + 2 * compute * linear * fsdp, "logits": 8 * chunk},
        base | {"cast weights": cast_later + head_cast + gathered, "logits": logits},
        base | {"cast weights": cast_later + gathered, "layer": in_layer, "head gradient": waiting},
        {"head gradient": meeting},
    ]


def memory_table() -> str:
    """GB a GPU of grpo.py with --bf16 and --gradient-checkpointing, for some models and numbers of GPUs."""
    given = {"max_prompt_length": 512, "max_completion_length": 1024, "num_generations": 8, "num_generations_eval": 8}
    given |= {"eval_steps": 25, "decode_batch_size": 128, "micro_batch_size": 8, "bf16": True, "beta": 0.0}
    names = ("weights", "gradients", "moments", "decoding copy", "start", "rollout", "update", "peak")
    rows = [["model", "GPUs", "parameters", *names], ["---"] * (3 + len(names))]
    for name in ("Qwen2.5-0.5B-Instruct", "Qwen2.5-1.5B-Instruct", "Qwen2.5-3B-Instruct", "Qwen2.5-7B-Instruct"):
        for processes in (1, 8):
            flags = SimpleNamespace(**given, gradient_checkpointing=True, fsdp=processes > 1)
            found = memory_model(name, flags, processes)
            cells = [f"{found[key]:.1f}" for key in names]
            rows.append([name, processes, f"{parameters(PUBLIC_MODELS[name]) / 1e9:.2f} billion", *cells])
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def page_with_memory(text: str) -> str:
    """The text of a page with the computed table in its place."""
    table = memory_table()
    return re.sub(r"(<!-- computed:memory -->\n).*?(<!-- end -->)", rf"\1{table}\n\2", text, flags=re.DOTALL)


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
    if args.memory:
        PAGE.write_text(page_with_memory(PAGE.read_text()))
        return
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
