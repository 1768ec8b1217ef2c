"""benchmarks/gpu.py in small on the CPU: its rows, runs that fail or hang, parsing without tyro."""

import importlib
import shlex
import subprocess
import sys
from dataclasses import fields

import pytest
import tyro

from benchmarks import gpu, tables_gpu

SCRIPTS = [*gpu.LANGUAGE, *gpu.CONTROL]


def run_part(path, *words):
    """A part as people start it."""
    command = [sys.executable, "benchmarks/gpu.py", "--device", "cpu", "--small"]
    command += ["--csv", str(path), *words]
    return subprocess.run(command, cwd=gpu.ROOT, capture_output=True, text=True)


def test_parts_without_tyro(tmp_path, monkeypatch):
    """A model, then a game whose row is there already."""
    (tmp_path / "tyro.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    path = tmp_path / "results" / "gpu_test.csv"
    assert run_part(path, "--part", "models").returncode == 0
    gpu.write(path, dict.fromkeys(gpu.COLUMNS, "") | {"part": "games", "run": "fm3q, 256 games"})
    assert run_part(path, "--part", "games", "--only", "fm3q").returncode == 0
    model, games = gpu.read(path)
    assert (model["part"], games["part"], model["error"], games["error"]) == (
        "models",
        "games",
        "",
        "",
    )
    for name in ("decode_tokens_per_second", "update_tokens_per_second", "peak_memory_gb"):
        assert float(model[name]) > 0
    for name in ("limit_share_decode", "limit_share_update"):
        assert 0 < float(model[name]) < 1
    assert float(games["steps_per_second"]) > 0
    assert "--model-name-or-path small" in model["command"]

    monkeypatch.setattr(tables_gpu, "RESULTS", path.parent)
    text = tables_gpu.gpu(lambda name: gpu.read(path.parent / name))
    assert "| games | fm3q, 256 games |" in text and "TFLOP/s; torch " in text


@pytest.mark.parametrize("script", SCRIPTS)
def test_cli_reads_what_tyro_reads(script, monkeypatch):
    """Every flag of these types."""
    args_class = importlib.import_module(f"algorithms.{script}").Args
    values = {bool: [], int: ["7"], float: ["0.125"]}
    values |= {int | None: ["8"], float | None: ["0.5"], str | None: ["a b"]}
    values |= {tuple[int, ...]: ["1", "3"], tuple[float, ...]: ["1", "0.5"], tuple[str, ...]: ["c"]}
    words = []
    for field in fields(args_class):
        if field.type in values:
            words += ["--" + field.name.replace("_", "-"), *values[field.type]]
    monkeypatch.setattr(sys, "argv", ["script.py", *words])
    assert gpu.cli(args_class) == tyro.cli(args_class, args=words)


def test_runs_without_a_result(tmp_path):
    """One fails, one hangs, for one there is no GPU, for one no time: all say so."""
    script = tmp_path / "script.py"
    script.write_text("import sys; sys.exit('first line\\nlast line')")
    assert gpu.in_child([str(script)], 60, "cpu")["error"] == "last line"
    script.write_text("import time; time.sleep(60)")
    assert gpu.in_child([str(script)], 2, "cpu")["error"] == "stopped after 2 s"
    run = gpu.runs_of("two", "cpu")[0]
    assert gpu.measure(run, "", 60, "cpu", count=1)["error"].startswith("skipped: needs 2 GPUs")
    assert gpu.measure(run, "", 5, "cpu", count=2)["error"].endswith("s of a part are over")


def test_shares_of_the_limit():
    """By hand: Qwen2.5-0.5B, 256 rows of 256 tokens, at 3 TB/s and 800 TFLOP/s.

    A step of decoding reads 2 x 494,032,768 bytes of weights and, of each row, 128 tokens of
    24 layers x 2 x 2 heads x 64 numbers of 2 bytes: 1.391 GB for 256 tokens, so 552,200 tokens/s.
    The update takes 6 x 494,032,768 operations a token: 269,890 tokens/s.
    """
    run = gpu.model_run("0.5B", 256, 256)
    found = {"bytes_per_second": 3e12, "flops_per_second": 8e14}
    found |= {"decode_tokens_per_second": 55_220.0, "update_tokens_per_second": 26_989.0}
    shares = gpu.limit_shares(run, found)
    assert shares["limit_share_decode"] == pytest.approx(0.1, rel=1e-3)
    assert shares["limit_share_update"] == pytest.approx(0.1, rel=1e-3)


def test_flags_of_all_runs_exist(monkeypatch):
    """No part would end with rows about unknown flags."""
    for part in gpu.PARTS:
        for run in gpu.runs_of(part, "cuda"):
            args_class = importlib.import_module(f"algorithms.{run.script}").Args
            args = tyro.cli(args_class, args=shlex.split(run.flags))
            if run.shape:
                assert args.num_prompts_per_step * args.num_generations == run.rows * run.processes
                assert args.max_completion_length == run.length
