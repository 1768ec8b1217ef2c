"""The programs that measure a GPU, everything tiny and on the CPU: there is little time on a machine that has one."""

import importlib
import shlex
from pathlib import Path

import pandas as pd
import pytest
import torch
import tyro

from algorithms import grpo
from benchmarks import about
from benchmarks.machines import gpu, gpu_short

ROOT = Path(__file__).resolve().parents[1]


def test_gpu_in_small(tmp_path):
    """A part on the CPU; a row that is repeated is replaced."""
    path = tmp_path / "gpu.csv"
    pd.DataFrame([{"part": "models", "run": "small, 16 x 16"}, {"part": "control"}]).to_csv(path)
    gpu.main(gpu.Args("models", device="cpu", small=True, csv=str(path)))
    control, model = pd.read_csv(path).to_dict("records")
    assert (control["part"], model["part"]) == ("control", "models") and pd.isna(model["error"])
    for name in ("decode_tokens_per_second", "update_tokens_per_second", "peak_memory_gb", "computed_gb", "gap"):
        assert model[name] > 0


def test_gpu_short(tmp_path):
    """Decoding beside the plain loop, each call a row; the update's columns; the pages' run, if its model is there."""
    gpu_short.main("decode", "small", str(tmp_path / "gpu.csv"))
    table = pd.read_csv(tmp_path / "gpu.csv")
    assert len(table) == 3 and set(table.part) == {"short"} and (table.ratio > 0).all()
    assert (table.same_tokens > 4).all(), "bfloat16 rounds otherwise where the cache has another width"
    assert (table.gap < 0.02).all() and (table.plain_length <= table.decode_tokens).all()
    completions = gpu_short.completions_of(16, 4, 2048)
    args = grpo.Args(advantage="none", micro_batch_tokens=128)
    found = gpu_short.update_columns(gpu_short.model_of("small", torch.float32), completions, args)
    assert found["tokens"] == 64 and found["update_tokens_per_second"] > 0
    page = (about.ROOT / "algorithms" / "README.md").read_text().replace("\\\n", "")
    assert gpu.SMOLLM2.split() == page.split("# CPU\n    python algorithms/grpo.py")[1].split("\n\n")[0].split()


@pytest.mark.parametrize("part", ["short", "defaults", "control", "whole", "models", "two", "lora", "vllm", "trl"])
def test_gpu_flags_exist(part):
    for run in gpu.runs_of(part, "cuda", False):
        if run.writes_rows:
            continue
        script = importlib.import_module(f"algorithms.{'grpo' if '/' in run.script else run.script}")
        assert tyro.cli(script.Args, args=shlex.split(run.flags))
