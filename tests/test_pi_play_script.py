"""pi-Play as people run it: rounds, resume, two processes, controls, questions from a file."""

import json
import math
from pathlib import Path

import pytest
from processes import ROOT, as_flags, fork, kill_at, train_by_two
from run_folders import assert_close, documented_tags, metrics, tag_matches
from safetensors.torch import load_file

from algorithms import pi_play
from algorithms.pi_play import Args, load_task
from envs import search_qa

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SMALL = {"num_prompts_per_step": 2, "num_generations": 4, "num_documents_per_step": 8, "num_answers": 2}
SMALL |= {"max_completion_length": 32, "eval_problems": 4, "num_generations_eval": 2, "eval_steps": 0}
SMALL |= {"examiner_steps": 1, "student_steps": 1, "save_steps": 0}
LONG = SMALL | {"max_steps": 6, "student_steps": 2, "save_steps": 1, "eval_steps": 3, "lambda_schedule": (0.5, 0.25)}
EXAMINER, STUDENT = (1, 4), (2, 3, 5, 6)  # steps of the two policies in LONG
FINAL = ("final/model.safetensors", "examiner/final/model.safetensors")


def numbers(run_dir) -> dict[tuple[int, str], float]:
    return {key: float(value) for key, value in metrics(run_dir).items()}


def train_here(run_dir, **values) -> dict[tuple[int, str], float]:
    """A step of each policy in this process, or more; its metrics."""
    pi_play.train(Args(**SMALL | {"max_steps": 2} | values, output_dir=str(run_dir)))
    return numbers(run_dir)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder of two uninterrupted rounds of one step of the examiner and two of the student."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    process = fork(ROOT / "algorithms" / "pi_play.py", *as_flags(LONG), "--output-dir", run_dir)
    assert process.returncode == 0, process.stderr
    return run_dir


def test_command_and_its_files(whole):
    found = numbers(whole)
    assert all(map(math.isfinite, found.values()))
    steps = {tag: tuple(step for step, name in found if name == tag) for _, tag in found}
    assert steps["train/pi_play/divergence"] == steps["train/reward"] == STUDENT
    assert steps["train/pi_play/examiner/reward"] == steps["train/pi_play/examiner/pass_rate"] == EXAMINER
    assert [found[step, "train/pi_play/lambda"] for step in STUDENT] == [0.5, 0.5, 0.25, 0.25]
    assert steps["eval/pi_play/gate_with"] == (0,) and steps["eval/greedy"] == (0, 3, 6)
    rows = [json.loads(line) for line in open(whole / "completions.jsonl")]
    assert {row["step"] for row in rows if row["role"] == "examiner"} == set(EXAMINER)
    assert all(row["teacher_prompt"] != row["prompt"] and row["turns"] for row in rows)


def test_one_policy_learns_and_the_other_rests(monkeypatch, tmp_path):
    """The teacher follows the student's steps alone, all three from the same weights."""
    followed, original = [], pi_play.update_teacher

    def spy(teacher, student, tau):
        before = [parameter.clone() for parameter in teacher.parameters()]
        original(teacher, student, tau)
        followed.append(tau)
        moved = zip(before, student.parameters(), teacher.parameters(), strict=True)
        assert all((0.95 * old + 0.05 * new - now).abs().max() < 1e-6 for old, new, now in moved)

    monkeypatch.setattr(pi_play, "update_teacher", spy)
    weights = [load_file(ROOT / "envs/tiny_lm/search_qa/model.safetensors")] * 2
    for steps, expected in ((1, (False, True)), (2, (True, False))):
        train_here(tmp_path / str(steps), max_steps=steps, save_steps=1)
        found = [load_file(tmp_path / str(steps) / name) for name in FINAL]
        for before, after, moves in zip(weights, found, expected):
            assert any((before[name] != after[name]).any() for name in before) == moves
        weights = found
    assert followed == [0.05]


@pytest.mark.parametrize("step", [2, 4])
def test_a_killed_run_continues(whole, tmp_path, step):
    """To the bit, the examiner and its optimizer too."""
    run_dir = tmp_path / "run"
    kill_at(tmp_path, "pi_play", "report", step, *as_flags(LONG), "--output-dir", run_dir)
    process = fork(ROOT / "algorithms" / "pi_play.py", "--resume", run_dir)
    assert process.returncode == 0, process.stderr
    assert metrics(run_dir) == metrics(whole)
    assert all(Path(run_dir, name).read_bytes() == Path(whole, name).read_bytes() for name in FINAL)


def test_two_processes_equal_one(tmp_path):
    """Hops are compared over both, and a question that one of them has left out changes nothing else."""
    values = SMALL | {"max_steps": 2, "loss_type": "grpo", "hops": (1, 3)}
    train_by_two(tmp_path, "pi_play", [values | {"output_dir": str(tmp_path / "two")}])
    assert (tmp_path / "two" / "final").exists(), (tmp_path / "stderr").read_text()
    expected = train_here(tmp_path / "one", **values)
    assert_close(numbers(tmp_path / "two"), expected, relative=1e-3)


def test_each_control_sees_the_same_episodes_and_takes_another_step(tmp_path):
    flags = [{}, {"privileged_context": "none"}, {"privileged_context": "partial"}, {"privileged_context": "answer"}]
    flags += [{"divergence": "forward_kl"}, {"distill_top_k": 8}, {"lambda_schedule": (0.1,)}, {"beta": 0.04}]
    runs = [train_here(tmp_path / str(number), **values) for number, values in enumerate(flags)]
    assert len({run[2, "train/num_tokens"] for run in runs}) == 1
    norms = [run[2, "train/grad_norm"] for run in runs]
    assert len(set(norms[:-1])) == len(flags) - 1 and (2, "train/kl") in runs[-1]
    assert (2, "train/pi_play/divergence") not in runs[1]
    for number, values in enumerate([{"micro_batch_size": 3}, {"decode_batch_size": 3}, {"gradient_checkpointing": True}]):
        found = train_here(tmp_path / f"same {number}", **values)
        assert_close(found, runs[0], 1e-3, 1e-4)


def test_bfloat16(tmp_path):
    found = train_here(tmp_path, bf16=True)
    assert 1e-4 < found[2, "train/sampling/logprob_difference/max"] < 0.5


def test_questions_from_a_file(tmp_path, monkeypatch):
    """They are evaluated and find the examiner's documents, but are not trained on."""
    monkeypatch.setattr(search_qa, "HttpRetriever", lambda url: search_qa.world())
    task, _ = load_task(Args(hops=(1,)))
    for name, problems in (("train", range(12)), ("test", range(20, 25))):
        rows = [task.train_problem(index, 1) for index in problems]
        lines = [json.dumps({"question": row.question, "golden_answers": row.answers}) for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    files = {"dataset": str(tmp_path / "train.jsonl"), "eval_dataset": str(tmp_path / "test.jsonl")}
    found = train_here(tmp_path / "run", **files, retriever_url="http://127.0.0.1:1/retrieve", eval_steps=2)
    assert 5 * found[2, "eval/greedy"] == pytest.approx(round(5 * found[2, "eval/greedy"])), "a mean of five"
    assert (0, "eval/pi_play/gate_with") in found, "asked questions of the examiner"
    rows = [json.loads(line) for line in open(tmp_path / "run" / "completions.jsonl")]
    file = (tmp_path / "train.jsonl").read_text()
    asked = [row["prompt"].partition("Question: ")[2].partition("?")[0] for row in rows if row["role"] == "student"]
    assert any(question not in file for question in asked), "the examiner may hit on one of the file"


def test_tags_are_those_of_the_page(tmp_path):
    train_here(tmp_path, beta=0.04, eval_steps=1, num_generations_eval=8)
    logged = {line.split(",")[1] for line in (tmp_path / "metrics.csv").read_text().splitlines()[1:]}
    pages = [(ROOT / "algorithms" / name).read_text() for name in ("grpo.md", "pi_play.md")]
    documented = [tag for page in pages for tag in documented_tags(page)]
    for tag in logged:  # an examiner's step logs the same
        names = {tag, tag.replace("pi_play/examiner/", ""), tag.replace("examiner/", "")}
        assert any(tag_matches(row, name) for row in documented for name in names), tag
    own = documented_tags(pages[1])
    assert [row for row in own if not any(tag_matches(row, tag) for tag in logged)] == []


@pytest.mark.parametrize(
    "values, words",
    [
        ({"max_completion_length": 4, "examiner_steps": 0}, "no well-formed question in 31 draws"),
        ({"max_prompt_length": 1024}, "the teacher, who reads twice this length"),
        ({"dataset": "no/such.jsonl", "retriever_url": "http://127.0.0.1:1/x"}, "no/such.jsonl: cannot be read"),
        ({"hops": (5,)}, "hops from 1 to 4"),
    ],
)
def test_what_cannot_work_gets_one_sentence(values, words, tmp_path):
    with pytest.raises(SystemExit, match=words):
        train_here(tmp_path, **values)


def test_learning(tmp_path):
    """A step of the examiner and four of the student: right answers become many more, by the teacher."""
    values = {"num_prompts_per_step": 8, "max_completion_length": 64, "learning_rate": 8e-4, "warmup_steps": 0}
    values |= {"num_answers": 5, "eval_problems": 24, "num_generations_eval": 4, "hops": (1, 2)}
    found = train_here(tmp_path, **values, student_steps=4, max_steps=5, eval_steps=5)
    assert found[5, "eval/mean_at_4"] - found[0, "eval/mean_at_4"] > 0.35
    assert found[5, "train/pi_play/divergence"] < 0.5 * found[2, "train/pi_play/divergence"]
