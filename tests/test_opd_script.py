"""OPD as people run it: it learns from its teacher, goes on after a kill, by two processes, with wrong teachers."""

import math
import os
import shutil

import language_runs
import pytest
from language_runs import completions, kill_and_resume, numbers, train, two_processes_equal_one
from processes import ROOT
from run_folders import assert_tags_of_pages, command, refusal, tags

from algorithms import opd

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TINY = ROOT / "envs" / "tiny_lm"
SMALL = language_runs.SMALL
LONG = SMALL | {"max_steps": 2, "save_steps": 1, "eval_steps": 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    train(opd, run_dir, **LONG)
    return run_dir


def test_metrics_and_completions(whole):
    found = numbers(whole)
    assert all(map(math.isfinite, found.values()))
    assert found[1, "train/opd/divergence"] > 0
    assert found[1, "train/loss"] == pytest.approx(found[1, "train/opd/divergence"], rel=0.5), "another mean of the same losses"
    assert_tags_of_pages(tags(whole), "opd", "grpo")
    assert len(completions(whole)) == 2 * 8 and all(row["completion"] for row in completions(whole))


def test_goes_on_after_a_kill(whole, tmp_path):
    kill_and_resume(opd, whole, tmp_path, 2, **LONG)


@pytest.mark.parametrize("kind", [{}, {"divergence": "full", "num_prompts_per_step": 4, "num_minibatches": 2}])
def test_two_processes_equal_one(kind, tmp_path):
    two_processes_equal_one(opd, tmp_path, **SMALL | kind | {"max_steps": 1})


def test_a_teacher_that_is_the_student_teaches_nothing(tmp_path, capsys):
    values = SMALL | {"teacher": os.path.relpath(TINY / "countdown"), "max_steps": 1}
    found = train(opd, tmp_path / "copy", **values)
    assert "--teacher: the student begins as this model" in capsys.readouterr().out
    assert found[1, "train/loss"] == 0 and found[1, "train/grad_norm"] < 1e-6
    found = train(opd, tmp_path / "lora", **values, lora_rank=4)
    assert found[1, "train/loss"] == 0, "and with adapters the student without them is the teacher"


def test_learning(tmp_path):
    values = SMALL | {"num_prompts_per_step": 8, "max_completion_length": 64, "max_steps": 12, "warmup_steps": 1}
    found = train(opd, tmp_path, **values)
    gaps = [found[step, "train/opd/sampled_kl"] for step in range(1, 13)]
    assert sum(gaps[-3:]) < 0.7 * sum(gaps[:3]), gaps


def test_wrong_teachers_and_flags(monkeypatch, tmp_path):
    assert refusal(opd, monkeypatch, "--env", "tool_calls").startswith("--teacher: expected a model")
    other = refusal(opd, monkeypatch, "--teacher", TINY / "search_qa")
    assert other.startswith(f"--teacher {TINY / 'search_qa'}: its tokenizer is not that of the student")
    assert "--masked-tokens x1y2: not a token" in refusal(opd, monkeypatch, "--masked-tokens", "x1y2")
    assert refusal(opd, monkeypatch, "--top-p", "0").startswith("--top-p 0")
    assert refusal(opd, monkeypatch, "--top-k", "0").startswith("--top-k 0")
    assert refusal(opd, monkeypatch, "--top-k", "1") == "--top-k 1: teaches nothing; take 2 or more, or --tail"
    for words in (["full", "--tail"], ["full", "--no-renormalize"], ["sampled", "--top-k", "1"], ["sampled", "--support", "student"]):
        assert refusal(opd, monkeypatch, "--divergence", *words).endswith(": needs --divergence top_k")
    assert refusal(opd, monkeypatch, "--epsilon", "0.3") == "--epsilon: needs --divergence sampled"
    missing = refusal(opd, monkeypatch, "--teacher", tmp_path / "none")
    assert missing.startswith(f"--teacher {tmp_path / 'none'}: cannot be loaded")


@pytest.mark.parametrize("values", [{"tail": True}, {"renormalize": False}])
def test_one_token_is_enough_where_it_teaches(values, tmp_path):
    assert train(opd, tmp_path, **SMALL, **values, top_k=1)[1, "train/grad_norm"] > 1e-3


def test_an_evaluation_needs_no_teacher(monkeypatch, tmp_path):
    words = ["--max-steps", 0, "--eval-problems", 2, "--num-generations-eval", 0, "--output-dir", tmp_path / "run"]
    assert "eval/greedy" in command(opd, monkeypatch, *words, "--teacher", tmp_path / "none")


def test_a_larger_vocabulary_of_the_teacher(tmp_path):
    """Models pad their vocabularies by different amounts."""
    shutil.copytree(TINY / "countdown_grpo", tmp_path / "teacher")
    model = opd.transformers.AutoModelForCausalLM.from_pretrained(TINY / "countdown_grpo")
    model.resize_token_embeddings(448)
    model.save_pretrained(tmp_path / "teacher")
    found = train(opd, tmp_path / "run", **SMALL, teacher=str(tmp_path / "teacher"))
    assert found[1, "train/opd/divergence"] > 0
