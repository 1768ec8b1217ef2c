"""Commands of the pages that train a public model: each names its GPU beside it, as `# one 24 GB GPU`
or `# 8 x 80 GB` at its end or on a line before it, or `# CPU`, and fits there by benchmarks/machines/memory.py.
A command that ends with ... is not complete, and is left out."""

import ast
import importlib
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import tyro

from benchmarks.machines.memory import SPARE, engine_rows, memory_model, shape_of

ROOT = Path(__file__).resolve().parents[1]
DEVICE = re.compile(r"# .*?(?:(?:(\d+) x )?(\d+) GB|(CPU))")  # number of GPUs, GB of each
CPU_GB = 16
SCRIPTS = "grpo|dapo|gdpo|nash_preference|hpt|ampo|opd|unlikeliness|dr_mas|igpo|critic_search|empg|arpo|spiral_rae|advantage_alignment|pi_play"
COMMAND = re.compile(rf"(python|torchrun|uv run) .*algorithms/({SCRIPTS})\.py .*--model-name-or-path [\w.-]+/")


def commands(path: Path) -> list[tuple[str, str]]:
    """Commands of a page or essay that run a public model, each with the comments beside it. A
    comment before several commands, with no other line between, is for all of them."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    lines = [line.strip() for line in re.sub(r" *\\\n\s*", " ", text).splitlines()]
    found = []
    above = ""
    for line in lines:
        command, _, comment = line.partition(" # ")
        if line.startswith("# "):
            above = line
        elif not COMMAND.match(command):
            above = ""
        elif not command.endswith("..."):
            found.append((command.strip(" `."), f"# {comment} {above}"))
    return found


PAGES = [ROOT / "README.md"]
for folder in ("algorithms/*.md", "algorithms/*.py", "benchmarks/*.md", "envs/*.md"):
    PAGES += sorted(ROOT.glob(folder))
COMMANDS = [(path.name, *found) for path in PAGES for found in commands(path)]


def problems(command: str, comment: str) -> list[str]:
    """What is wrong with a command."""
    words = shlex.split(command)
    script = re.search(rf"algorithms/({SCRIPTS})\.py", command)[1]
    module = importlib.import_module(f"algorithms.{script}")
    args = tyro.cli(module.Args, args=words[words.index(f"algorithms/{script}.py") + 1 :])
    processes = re.search(r"--nproc[_-]per[_-]node[ =](\d+)", command)
    processes = int(processes[1]) if processes else 1
    machines = re.search(r"--nnodes[ =](\d+)", command)
    machines = int(machines[1]) if machines else 1
    processes *= machines
    name = args.model_name_or_path or ""
    if "/" not in name or name.startswith(("runs/", "envs/", "RUN")):
        return []
    if shape_of(args.model_name_or_path) is None:
        return [f"{args.model_name_or_path} is not in PUBLIC_MODELS of benchmarks/machines/memory.py"]
    device = DEVICE.search(comment)
    if not device:
        return ["names no device: # one 24 GB GPU, # 8 x 80 GB or # CPU"]
    devices, size = (1, CPU_GB) if device[3] else (machines * int(device[1] or 1), int(device[2]))
    if device[3] and not args.micro_batch_tokens:
        args = replace(args, micro_batch_tokens=module.tokens_at_once(args, torch.device("cpu")))
    found = memory_model(args.model_name_or_path, args, processes, script, size)
    wrong = [f"{processes} processes on {devices} devices"] * (processes != devices)
    if found["peak"] > (1 - SPARE) * size:
        wrong.append(f"{found['peak']:.1f} GB on {size} GB: " + ", ".join(f"{k} {v:.1f}" for k, v in found.items()))
    rows = engine_rows(args.model_name_or_path, args, size)
    if args.vllm and rows < 1:
        wrong.append(f"--vllm-memory {args.vllm_memory}: cache for {rows:.1f} completions")
    for name in ("num_prompts_per_step", "num_games_per_step", "num_documents_per_step"):
        if getattr(args, name, 0) % processes:
            wrong.append(f"{processes} processes do not divide --{name.replace('_', '-')}")
    return wrong


@pytest.mark.parametrize("page, command, comment", COMMANDS, ids=[f"{page}-{n}" for n, (page, *_) in enumerate(COMMANDS)])
def test_commands_fit_the_gpu_beside_them(page, command, comment):
    assert not problems(command, comment)


def test_commands_are_found():
    pages = {f"{script}.md" for script in SCRIPTS.split("|")} | {"README.md", "scale.md"}
    assert pages <= {page for page, *_ in COMMANDS}
