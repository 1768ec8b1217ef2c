"""GDPO as people run it: two rewards of their own, one of them conditioned, its resume and its processes."""

import json
import math
from pathlib import Path

import pytest
import torch
from processes import ROOT, as_flags, fork, kill_at, train_by_two
from run_folders import assert_close, assert_same_weights, documented_tags, metrics, tag_matches

from algorithms import gdpo
from algorithms.gdpo import Args, condition_rewards, decoupled_advantages

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SMALL = {"num_prompts_per_step": 2, "num_generations": 4, "max_completion_length": 48}
SMALL |= {"eval_problems": 4, "num_generations_eval": 2, "eval_steps": 0, "save_steps": 0}
REWARDS = """\
def calls(problem, completion):
    return float("<tool_call>" in completion and len(completion) % 2 == 0)

def brevity(problem, completion):
    return -len(completion) / 50
"""


def numbers(run_dir) -> dict[tuple[int, str], float]:
    return {key: float(value) for key, value in metrics(run_dir).items()}


def train_here(run_dir, **values) -> dict[tuple[int, str], float]:
    """One small step in this process, or more; its metrics."""
    gdpo.train(Args(**SMALL | {"max_steps": 1} | values, output_dir=str(run_dir)))
    return numbers(run_dir)


def test_command_and_its_files(tmp_path, monkeypatch):
    """Two own rewards of different size, the second only where the first is 1: what the update gets is GDPO's."""
    (tmp_path / "own.py").write_text(REWARDS)
    given, update = [], gdpo.update
    monkeypatch.setattr(gdpo, "update", lambda *words: given.append(words[4]) or update(*words))
    words = [*as_flags(SMALL | {"max_steps": 2, "eval_steps": 2}), "--output-dir", tmp_path / "run"]
    words += ["--reward", tmp_path / "own.py:calls", tmp_path / "own.py:brevity"]
    words += ["--reward-weights", 1, 0.5, "--conditioned-rewards", "brevity"]
    monkeypatch.setattr("sys.argv", ["gdpo.py", *map(str, words)])
    gdpo.train(gdpo.parse_args())
    found = numbers(tmp_path / "run")
    rows = [json.loads(line) for line in open(tmp_path / "run" / "completions.jsonl")]
    assert len(rows) == 2 * 8, "both groups of both steps"
    for step in (1, 2):
        rewards = torch.tensor([list(row["rewards"].values()) for row in rows if row["step"] == step])
        counted = condition_rewards(rewards, torch.tensor([False, True]))
        expected = decoupled_advantages(counted, 4, [1.0, 0.5])
        torch.testing.assert_close(given[step - 1], expected)
        assert expected.abs().max() > 0.5 and (counted != rewards).any()
        for name, mean in zip(("calls", "brevity"), counted.mean(0).tolist()):
            assert found[step, f"train/rewards/{name}/mean"] == pytest.approx(mean, abs=1e-6)
        assert found[step, "train/reward"] == pytest.approx(float((counted @ torch.tensor([1, 0.5])).mean()), abs=1e-6)
        assert found[step, "train/frac_reward_zero_std"] == float((expected.view(2, 4) == 0).all(1).float().mean())
    assert found[2, "eval/rewards/calls"] == found[2, "eval/greedy"] and found[2, "eval/rewards/brevity"] < 0
    assert all(map(math.isfinite, found.values()))
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()


def test_a_killed_run_continues(tmp_path):
    values = SMALL | {"max_steps": 3, "save_steps": 1, "eval_steps": 3, "conditioned_rewards": ("length",)}
    train_here(tmp_path / "whole", **values)
    kill_at(tmp_path, "gdpo", "report", 2, *as_flags(values), "--output-dir", tmp_path / "killed")
    process = fork(ROOT / "algorithms" / "gdpo.py", "--resume", tmp_path / "killed")
    assert process.returncode == 0, process.stderr
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
    final = [Path(tmp_path, name, "final/model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert final[0] == final[1]


def test_two_processes_equal_one(tmp_path):
    """The batch norm is over the answers of both."""
    values = SMALL | {"max_steps": 2}
    runs = {"plain": {}, "fsdp": {"fsdp": True}}
    train_by_two(tmp_path, "gdpo", [values | runs[name] | {"output_dir": str(tmp_path / name)} for name in runs])
    expected = train_here(tmp_path / "one", **values)
    for name in runs:
        assert (tmp_path / name / "final").exists(), (tmp_path / "stderr").read_text()
        assert_close(numbers(tmp_path / name), expected, relative=1e-3)
        assert_same_weights(tmp_path / name, tmp_path / "one")


def test_tags_are_those_of_the_page(tmp_path):
    train_here(tmp_path, beta=0.04, eval_steps=1, num_generations_eval=8)
    logged = {tag for _, tag in metrics(tmp_path)} | {"train/seconds/step", "train/seconds/rollout"}
    pages = [(ROOT / "algorithms" / name).read_text() for name in ("grpo.md", "gdpo.md")]
    documented = [tag for page in pages for tag in documented_tags(page)]
    assert [tag for tag in logged if not any(tag_matches(row, tag) for row in documented)] == []
    assert [row for row in documented if not any(tag_matches(row, tag) for tag in logged)] == []


@pytest.mark.parametrize("values", [{"conditioned_rewards": ("lenght",)}, {"num_generations": 1}])
def test_bad_flags_get_one_sentence(values):
    with pytest.raises(SystemExit, match=f"--{next(iter(values))}: ".replace("_", "-")):
        gdpo.train(Args(**SMALL | values))
