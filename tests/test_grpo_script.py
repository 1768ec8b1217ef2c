"""GRPO as people run it: files, crashes, several processes, own data and rewards, bad input, and that it learns."""

import json
import math
import re
import shutil
from functools import partial
from pathlib import Path

import language_runs
import pytest
import torch
from language_runs import completions, numbers, train
from processes import ROOT, as_flags, fork, kill_at, train_by_two
from run_folders import (
    assert_close,
    assert_same_weights,
    assert_tags_of_pages,
    begin,
    command,
    events,
    refusal,
    tags,
)
from safetensors.torch import load_file
from test_problems import write

from algorithms import grpo

SCRIPT = ROOT / "algorithms" / "grpo.py"
TINY_MODEL = ROOT / "envs" / "tiny_lm" / "countdown"
SMALL = {"num_prompts_per_step": 4, "num_generations": 4, "max_completion_length": 24}
SMALL |= {"eval_problems": 4, "num_generations_eval": 2}
LONG = SMALL | {"max_steps": 6, "save_steps": 2, "eval_steps": 3, "beta": 0.04}
train_here = partial(train, grpo, **SMALL, eval_steps=0, save_steps=0)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder and output of six uninterrupted steps."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    return run_dir, begin(grpo, run_dir, **LONG)


def test_command_and_its_files(whole):
    run_dir, output = whole
    steps = [line for line in output.splitlines() if line.startswith("step ")]
    assert len(steps) == 6 and max(map(len, steps)) < 80
    found = numbers(run_dir)
    assert {step for step, tag in found if tag.startswith("eval/")} == {0, 3, 6}
    assert [step for step, tag in found if tag == "train/loss"] == [1, 2, 3, 4, 5, 6]
    assert all(map(math.isfinite, found.values()))
    assert_tags_of_pages(tags(run_dir), "grpo")
    board = events(run_dir)
    assert {key: board[key] for key in found} == pytest.approx(found)
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == ["step_00000004", "step_00000006"], "the newest two are kept"


def test_completions_can_be_read(whole):
    rows = completions(whole[0])
    assert [row["step"] for row in rows] == [step for step in range(1, 7) for _ in range(8)]
    for group in (rows[i : i + 4] for i in range(0, len(rows), 4)):
        assert len({row["prompt"] for row in group}) == 1
        assert sum(row["advantage"] for row in group) == pytest.approx(0, abs=1e-4)
        assert all(row["completion"] and len(row["rewards"]) == 3 for row in group)
    assert rows[0]["prompt"].startswith("<|user|>Numbers: ")


def test_final_model_scores_the_same(whole, tmp_path, monkeypatch):
    run_dir, _ = whole
    flags = as_flags(LONG | {"max_steps": 0, "model_name_or_path": run_dir / "final"})
    scores = command(grpo, monkeypatch, *flags, "--output-dir", tmp_path / "run")
    expected = numbers(run_dir)
    assert scores == {tag: expected[6, tag] for tag in scores} and len(scores) == 3
    files = sorted(path.name for path in tmp_path.glob("run/*") if "events" not in path.name)
    assert files == ["args.json", "completions.jsonl", "metrics.csv"]


def test_killed_again_and_again(whole, tmp_path):
    """Before the first checkpoint, between two, right after a resume, and while one is written."""
    run_dir = tmp_path / "run"
    kill_at(tmp_path, "grpo", "report", 1, *as_flags(LONG), "--output-dir", run_dir)
    assert not (run_dir / "checkpoints").exists()
    kill_at(tmp_path, "grpo", "report", 3, "--resume", run_dir)
    assert [path.parent.name for path in run_dir.rglob(".metadata")] == ["step_00000002"]
    kill_at(tmp_path, "grpo", "refresh", 1, "--resume", run_dir)
    kill_at(tmp_path, "grpo", "finish", 1, "--resume", run_dir)  # which would write .metadata
    unfinished = run_dir / "checkpoints" / "step_00000004"
    assert unfinished.exists() and not (unfinished / ".metadata").exists()
    process = fork(SCRIPT, "--resume", run_dir)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("\nstep ") == 4, "it goes on behind step 2"
    language_runs.assert_same_run(run_dir, whole[0])


OTHERS = [("--seed", 7), ("--env", "gsm8k"), ("--model-name-or-path", "x"), ("--num-prompts-per-step", 8), ("--reward", "x.py:f")]


@pytest.mark.parametrize("flag, value", OTHERS)
def test_resume_refuses_another_run(whole, monkeypatch, flag, value):
    before = (whole[0] / "args.json").read_bytes()
    sentence = refusal(grpo, monkeypatch, "--resume", whole[0], flag, value)
    assert sentence.startswith(f"{flag} ") and str(value) in sentence and sentence.endswith("which cannot change")
    assert (whole[0] / "args.json").read_bytes() == before


SHARED = SMALL | {"max_steps": 2, "save_steps": 1, "eval_steps": 1, "num_iterations": 2}
SHARED |= {"beta": 0.04, "scale_rewards": "batch", "epsilon": 0.01, "micro_batch_size": 3}
ONE_STEP = {"max_steps": 1, "eval_steps": 0, "save_steps": 0, "fsdp": True}
TWO = {
    "plain": SHARED,
    "fsdp": SHARED | {"fsdp": True},
    "fsdp_equal": SHARED | ONE_STEP | {"beta": 0.0, "reward_weights": (0.0, 0.0, 0.0)},  # no row has an advantage
    "fsdp_bf16": SHARED | ONE_STEP | {"bf16": True, "gradient_checkpointing": True},
}


@pytest.fixture(scope="module")
def by_two(tmp_path_factory):
    """Folder with the runs of TWO by two processes, whose rows differ in length and number."""
    folder = tmp_path_factory.mktemp("two")
    runs = [values | {"output_dir": str(folder / name)} for name, values in TWO.items()]
    train_by_two(folder, "grpo", runs)
    for name in TWO:
        assert (folder / name / "final").exists(), (folder / "stderr").read_text()
    return folder


@pytest.fixture(scope="module")
def by_one(tmp_path_factory):
    """Folder of three steps by one process."""
    run_dir = tmp_path_factory.mktemp("one")
    train_here(run_dir, **SHARED | {"max_steps": 3})
    return run_dir


@pytest.mark.parametrize("name", ["plain", "fsdp"])
def test_two_processes_equal_one_and_one_continues(by_two, by_one, name, tmp_path, monkeypatch):
    """The first two steps are made by two processes, the third by one that resumes."""
    shutil.copytree(by_two / name, tmp_path / "run")
    command(grpo, monkeypatch, "--resume", tmp_path / "run", "--max-steps", "3", "--no-fsdp")
    expected = numbers(by_one)
    assert_close(numbers(tmp_path / "run"), expected, relative=1e-3)
    assert_same_weights(tmp_path / "run", by_one)
    assert expected[2, "train/clip_ratio"] > 0
    assert expected[2, "train/kl"] > 0


def test_fsdp_where_no_row_has_an_advantage(by_two):
    found = numbers(by_two / "fsdp_equal")
    assert found[1, "train/grad_norm"] == 0
    assert found[1, "train/frac_reward_zero_std"] == 1


def test_fsdp_in_bfloat16(by_two, by_one):
    found = numbers(by_two / "fsdp_bf16")
    assert all(map(math.isfinite, found.values()))
    assert 0 < found[1, "train/sampling/logprob_difference/max"] < 0.5
    # Other texts are sampled, so the gradient is only of the same order.
    assert 0.3 < found[1, "train/grad_norm"] / numbers(by_one)[1, "train/grad_norm"] < 3


def test_memory_flags_change_nothing(tmp_path):
    expected = train_here(tmp_path / "one", eval_steps=1)
    saving = {"decode_batch_size": 5, "micro_batch_size": 3, "gradient_checkpointing": True}
    assert_close(train_here(tmp_path / "two", eval_steps=1, **saving), expected)
    assert_same_weights(tmp_path / "two", tmp_path / "one")


def test_bfloat16_and_the_dtype_of_the_final_model(tmp_path):
    """The final model has the dtype of the one that training began with."""
    shutil.copytree(TINY_MODEL, tmp_path / "model")
    model = grpo.transformers.AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    path = str(tmp_path / "model")
    found = train_here(tmp_path / "run", bf16=True, model_name_or_path=path, max_steps=2)
    assert all(map(math.isfinite, found.values()))
    assert 0 < found[2, "train/sampling/logprob_difference/max"] < 0.5
    ours = load_file(tmp_path / "run" / "final" / "model.safetensors")
    before = load_file(tmp_path / "model" / "model.safetensors")
    assert ours.keys() == before.keys()
    assert {weight.dtype for weight in ours.values()} == {torch.bfloat16}
    assert any(not torch.equal(ours[name], before[name]) for name in ours)


def test_controls(tmp_path):
    """Bare rewards, also for one completion a prompt."""
    train_here(tmp_path / "none", advantage="none", num_generations=1)
    for row in completions(tmp_path / "none"):
        total = sum(weight * row["rewards"][name] for name, weight in WEIGHTS.items())
        assert row["advantage"] == pytest.approx(total)
    values = {"scale_rewards": "none", "num_prompts_per_step": 2}
    train_here(tmp_path / "group", **values)
    train_here(tmp_path / "bare", **values, advantage="none")
    group, none = completions(tmp_path / "group"), completions(tmp_path / "bare")
    assert [row["completion"] for row in group] == [row["completion"] for row in none]
    assert [row["advantage"] for row in group] != [row["advantage"] for row in none]


WEIGHTS = {"correctness": 1.0, "format": 0.1, "length": 0.0}


REWARDS = """\
def brief(problem, completion):
    return problem["value"] - len(completion)

def ones(problem, completion):
    return completion.count("1")

def given(problem, completion):
    return problem["value"]
"""


@pytest.fixture
def data(tmp_path) -> Path:
    """A folder with problems to train on, problems to evaluate on, and rewards."""
    rows = [{"question": f"What is {n} + {n}?", "value": 2 * n} for n in range(40)]
    write(tmp_path / "train.jsonl", rows)
    write(tmp_path / "test.jsonl", [{"prompt": f"Say {n}", "value": n} for n in range(7)])
    (tmp_path / "rewards.py").write_text(REWARDS)
    return tmp_path


@pytest.mark.quick
def test_own_data_and_rewards(data, tmp_path):
    rewards = (f"{data}/rewards.py:brief", f"{data}/rewards.py:ones")
    values = {"dataset": str(data / "train.jsonl"), "reward": rewards, "reward_weights": (0.5, 2.0)}
    found = train_here(tmp_path / "run", **values, eval_steps=1)
    means = [found[1, f"train/rewards/{name}/mean"] for name in ("brief", "ones")]
    assert found[1, "train/reward"] == pytest.approx(0.5 * means[0] + 2 * means[1], rel=1e-5)
    values = {row["question"]: row["value"] for row in map(json.loads, open(data / "train.jsonl"))}
    for row in completions(tmp_path / "run"):
        question = row["prompt"].removeprefix("<|user|>").partition("<|end|>")[0]
        text = row["completion"]
        expected = {"brief": values[question] - len(text), "ones": text.count("1")}
        assert row["rewards"] == expected


def test_evaluation_data_is_scored_whole(data, tmp_path):
    values = {"dataset": str(data / "train.jsonl"), "eval_dataset": str(data / "test.jsonl")}
    values |= {"reward": (f"{data}/rewards.py:given",), "eval_problems": 2, "eval_steps": 1}
    found = train_here(tmp_path / "run", **values, num_generations_eval=0)
    assert {tag for step, tag in found if step == 0} == {"eval/greedy"}
    assert found[0, "eval/greedy"] == found[1, "eval/greedy"] == 3  # the mean of 0 to 6


def test_system_prompt_and_template_settings(tmp_path):
    shutil.copytree(TINY_MODEL, tmp_path / "model")
    with open(tmp_path / "model" / "chat_template.jinja", "a") as file:
        file.write("{{ mark }}")
    values = {"model_name_or_path": str(tmp_path / "model"), "system_prompt": "Add the numbers."}
    train_here(tmp_path / "run", **values, chat_template_kwargs='{"mark": "now:"}')
    for row in completions(tmp_path / "run"):
        assert row["prompt"].startswith("<|system|>Add the numbers.<|end|><|user|>Numbers")
        assert row["prompt"].endswith("<|assistant|>now:")


def test_the_system_prompt_replaces_that_of_a_line(data, tmp_path):
    chat = [{"role": "system", "content": "Shout."}, {"role": "user", "content": "Say 1"}]
    write(data / "train.jsonl", [{"problem": "1", "prompt": chat}] * 20)
    values = {"dataset": str(data / "train.jsonl"), "eval_dataset": str(data / "test.jsonl")}
    values |= {"reward": (f"{data}/rewards.py:ones",), "system_prompt": "Whisper."}
    train_here(tmp_path / "run", **values)
    assert next(iter(completions(tmp_path / "run")))["prompt"] == "<|system|>Whisper.<|end|><|user|>Say 1<|end|><|assistant|>"


def test_long_prompts_are_left_out_and_counted(data, tmp_path, capsys):
    rows = [{"prompt": "Add 1. " * (40 if n % 3 == 0 else 1) + str(n)} for n in range(20)]
    write(data / "train.jsonl", rows)
    values = {"dataset": str(data / "train.jsonl"), "eval_dataset": str(data / "test.jsonl")}
    values |= {"reward": (f"{data}/rewards.py:ones",), "max_prompt_length": 60, "max_steps": 5}
    train_here(tmp_path / "run", **values)
    assert re.search("7 of 20 .*--max-prompt-length", capsys.readouterr().out)
    assert max(len(row["prompt"]) for row in completions(tmp_path / "run")) < 100


def test_learning(data, tmp_path):
    """To write more ones: with seeds 1, 2, 3 all of it is in the end; with the sign turned, none."""
    values = {"dataset": str(data / "train.jsonl"), "reward": (f"{data}/rewards.py:ones",)}
    values |= {"num_prompts_per_step": 8, "num_generations": 8, "max_completion_length": 16}
    values |= {"max_steps": 6, "learning_rate": 1e-3, "warmup_steps": 1}
    found = train_here(tmp_path / "run", **values)
    rewards = [found[step, "train/reward"] for step in range(1, 7)]
    assert rewards[-1] > rewards[0] + 5, rewards
