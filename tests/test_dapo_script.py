"""DAPO as people run it: dynamic sampling, its resume and its processes, and the overlong penalty."""

import json
import math
from pathlib import Path

import pytest
from processes import ROOT, as_flags, fork, kill_at, train_by_two
from run_folders import assert_close, assert_same_weights, documented_tags, metrics, tag_matches

from algorithms import dapo
from algorithms.dapo import Args

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SCRIPT = ROOT / "algorithms" / "dapo.py"
SMALL = {"num_prompts_per_step": 4, "num_generations": 4, "max_completion_length": 24}
SMALL |= {"eval_problems": 4, "num_generations_eval": 2, "eval_steps": 0, "save_steps": 0}
LONG = SMALL | {"max_steps": 4, "save_steps": 2, "eval_steps": 2}
SHARED = SMALL | {"max_steps": 2, "micro_batch_size": 3}


def numbers(run_dir) -> dict[tuple[int, str], float]:
    return {key: float(value) for key, value in metrics(run_dir).items()}


def train_here(run_dir, **values) -> dict[tuple[int, str], float]:
    """One small step in this process, or more; its metrics."""
    dapo.train(Args(**SMALL | {"max_steps": 1} | values, output_dir=str(run_dir)))
    return numbers(run_dir)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder of four uninterrupted steps."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    process = fork(SCRIPT, *as_flags(LONG), "--output-dir", run_dir)
    assert process.returncode == 0, process.stderr
    return run_dir


def test_command_and_its_files(whole):
    found = numbers(whole)
    assert all(map(math.isfinite, found.values()))
    assert (whole / "final" / "model.safetensors").exists()
    assert max(found[step, "train/dynamic_sampling/rounds"] for step in range(1, 5)) > 1


def test_dynamic_sampling_trains_on_groups_with_right_and_wrong_answers(whole, tmp_path):
    rows = [json.loads(line) for line in open(whole / "completions.jsonl")]
    for group in (rows[i : i + 4] for i in range(0, len(rows), 4)):
        assert {row["rewards"]["correctness"] for row in group} == {0.0, 1.0}
    off = train_here(tmp_path, dynamic_sampling=False)
    assert off[1, "train/dynamic_sampling/rounds"] == 1
    assert off[1, "train/dynamic_sampling/frac_useful"] < 1


def test_a_resume_draws_the_prompts_that_come_next(whole, tmp_path):
    run_dir = tmp_path / "run"
    kill_at(tmp_path, "dapo", "report", 3, *as_flags(LONG), "--output-dir", run_dir)
    process = fork(SCRIPT, "--resume", run_dir)
    assert process.returncode == 0, process.stderr
    assert metrics(run_dir) == metrics(whole)
    name = "final/model.safetensors"
    assert Path(run_dir, name).read_bytes() == Path(whole, name).read_bytes()


def test_two_processes_equal_one(tmp_path):
    runs = [SHARED | {"output_dir": str(tmp_path / "plain")}]
    runs += [SHARED | {"output_dir": str(tmp_path / "fsdp"), "fsdp": True}]
    train_by_two(tmp_path, "dapo", runs)
    expected = train_here(tmp_path / "one", **SHARED)
    for name in ("plain", "fsdp"):
        assert (tmp_path / name / "final").exists(), (tmp_path / "stderr").read_text()
        assert_close(numbers(tmp_path / name), expected, relative=1e-3)
        assert_same_weights(tmp_path / name, tmp_path / "one")


def test_overlong_penalty_lowers_the_reward(tmp_path):
    found = train_here(tmp_path / "with", overlong_buffer_len=16)
    without = train_here(tmp_path / "without", overlong_buffer_len=0)
    assert -1 < found[1, "train/reward"] - without[1, "train/reward"] < 0
    assert found[1, "train/num_tokens"] == without[1, "train/num_tokens"]


def test_groups_that_only_fill_the_batch_add_no_gradient(tmp_path):
    """No answer is right, so no group is useful; the length penalty alone still tells them apart."""
    (tmp_path / "wrong.py").write_text("def score(problem, completion):\n    return 0.0\n")
    values = {"reward": (f"{tmp_path}/wrong.py:score",), "overlong_buffer_len": 23}
    filled = train_here(tmp_path / "filled", **values)
    assert filled[1, "train/dynamic_sampling/rounds"] == 10
    assert filled[1, "train/grad_norm"] == 0
    plain = train_here(tmp_path / "plain", **values, dynamic_sampling=False)
    assert plain[1, "train/grad_norm"] > 0


def test_tags_are_those_of_the_page(tmp_path):
    train_here(tmp_path, beta=0.04, eval_steps=1, num_generations_eval=8)
    lines = (tmp_path / "metrics.csv").read_text().splitlines()[1:]
    logged = {line.split(",")[1] for line in lines}
    pages = [(ROOT / "algorithms" / name).read_text() for name in ("grpo.md", "dapo.md")]
    documented = [tag for page in pages for tag in documented_tags(page)]
    assert [tag for tag in logged if not any(tag_matches(row, tag) for row in documented)] == []
    assert [row for row in documented if not any(tag_matches(row, tag) for tag in logged)] == []


def test_a_group_of_one_is_refused():
    with pytest.raises(SystemExit, match="--num-generations: "):
        dapo.train(Args(num_generations=1))
