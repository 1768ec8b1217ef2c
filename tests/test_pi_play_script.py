"""pi-Play as people run it: rounds, resume, two processes, controls, questions from a file."""

import math
import re
from functools import partial

import language_runs
import pytest
from language_runs import completions, kill_and_resume, numbers, train, two_processes_equal_one
from processes import ROOT, as_flags
from run_folders import assert_close, assert_tags_of_pages, command, tags
from safetensors.torch import load_file
from test_alone import OWN

from algorithms import pi_play

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SMALL = {"num_prompts_per_step": 2, "num_generations": 4, "num_documents_per_step": 8, "num_answers": 2}
SMALL |= {"max_completion_length": 32, "eval_problems": 4, "num_generations_eval": 2, "eval_steps": 0}
SMALL |= {"examiner_steps": 1, "student_steps": 1, "save_steps": 0, "max_steps": 2}  # one step of each policy
LONG = SMALL | {"max_steps": 5, "student_steps": 2, "save_steps": 1, "eval_steps": 5, "lambda_schedule": (0.5, 0.25)}
LONG |= {"beta": 0.04}
EXAMINER, STUDENT = (1, 4), (2, 3, 5)  # steps of the two policies in LONG
train_here = partial(train, pi_play, **SMALL)
whole = language_runs.whole_run(pi_play, LONG)  # one step of the examiner, two of the student, one of the examiner, one more


def assert_logged_means(found, step: int, episodes, advantages: list[float]) -> None:
    """Entropy is a mean over tokens; who was not asked has no pass rate; each policy warms up by its own steps."""
    name = "train/pi_play/examiner" if step in EXAMINER else "train"
    tokens = [logprob for episode in episodes for logprob in episode.logprobs]
    assert found[step, f"{name}/entropy"] == pytest.approx(-sum(tokens) / len(tokens))
    unequal = {e.pool for e, advantage in zip(episodes, advantages) if advantage != 0}
    equal = sum(e.pool not in unequal for e in episodes) / len(episodes)
    assert found[step, f"{name}/frac_reward_zero_std"] == equal
    role_step = (EXAMINER if step in EXAMINER else STUDENT).index(step) + 1
    assert found[step, f"{name}/learning_rate"] == pytest.approx(2e-4 * role_step / 5)
    if step in STUDENT:
        assert found[step, "train/pi_play/questions"] == len({e.pool for e in episodes})
        return
    rates = [e.info["pi_play/pass_rate"] for e in episodes if e.info["pi_play/well_formed"]]
    assert found[step, f"{name}/pass_rate"] == pytest.approx(sum(rates) / len(rates))


def test_command_and_its_files(whole):
    run_dir, given = whole
    found = numbers(run_dir)
    assert all(map(math.isfinite, found.values()))
    steps = {tag: tuple(step for step, name in found if name == tag) for _, tag in found}
    assert steps["train/pi_play/divergence"] == steps["train/reward"] == STUDENT
    assert steps["train/pi_play/examiner/reward"] == steps["train/pi_play/examiner/pass_rate"] == EXAMINER
    assert [found[step, "train/pi_play/lambda"] for step in STUDENT] == [0.5, 0.5, 0.25]
    assert steps["eval/pi_play/gate_with"] == (0,) and steps["eval/greedy"] == (0, 5)
    rows = completions(run_dir)
    assert {row["step"] for row in rows if row["role"] == "examiner"} == set(EXAMINER)
    for step, (*_, episodes, advantages, weight, _) in enumerate(given, start=1):
        shown = [row for row in rows if row["step"] == step]
        assert [(row["turns"], row["advantage"]) for row in shown] == [
            (episode.texts, advantage) for episode, advantage in zip(episodes, advantages.tolist())
        ]
        assert weight == (found[step, "train/pi_play/lambda"] if step in STUDENT else 0)
        assert_logged_means(found, step, episodes, advantages.tolist())
    assert all(row["teacher_prompt"] != row["prompt"] and row["turns"] for row in rows)
    # An examiner's step logs what a student's does, and more.
    logged = {re.sub(r"pi_play/examiner/(?=\w+/)", "", tag) for tag in tags(run_dir)}
    assert_tags_of_pages(logged, "pi_play", "grpo")


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
    begun = [*as_flags(SMALL | {"max_steps": 1, "save_steps": 1}), "--output-dir", tmp_path]
    continued = ["--resume", tmp_path, "--max-steps", 2]
    for words, expected in ((begun, (False, True)), (continued, (True, False))):
        command(pi_play, monkeypatch, *words)
        finals = (tmp_path / folder / "final" / "model.safetensors" for folder in ("", "examiner"))
        found = [load_file(path) for path in finals]
        for before, after, moves in zip(weights, found, expected):
            assert any((before[name] != after[name]).any() for name in before) == moves
        weights = found
    assert followed == [0.05]


def test_a_killed_run_continues(whole, tmp_path):
    """To the bit, the examiner and its optimizer too, whose second step is the next."""
    kill_and_resume(pi_play, whole[0], tmp_path, 4, **LONG)


def test_two_processes_equal_one(tmp_path):
    """Hops are compared over both, and a question that one of them has left out changes nothing else."""
    two_processes_equal_one(pi_play, tmp_path, ("plain",), **SMALL, loss_type="grpo", hops=(1, 3))


def test_each_control_sees_the_same_episodes_and_takes_another_step(tmp_path):
    """A step of the student alone."""
    flags = [{}, {"privileged_context": "none"}, {"privileged_context": "partial"}, {"privileged_context": "answer"}]
    flags += [{"divergence": "forward_kl"}, {"distill_top_k": 8}, {"lambda_schedule": (0.1,)}]
    flags += [{"micro_batch_size": 3, "decode_batch_size": 3, "gradient_checkpointing": True}]
    runs = []
    for number, values in enumerate(flags):
        runs.append(train_here(tmp_path / str(number), **values, examiner_steps=0, max_steps=1))
    assert len({run[1, "train/num_tokens"] for run in runs}) == 1
    norms = [run[1, "train/grad_norm"] for run in runs]
    assert len(set(norms[:7])) == 7
    assert (1, "train/pi_play/divergence") not in runs[1]
    assert_close(runs[7], runs[0], 1e-3, 1e-4)


@pytest.mark.quick
def test_questions_from_a_file_in_bfloat16(tmp_path, monkeypatch):
    """They are evaluated and find the examiner's documents, but are not trained on."""
    files = language_runs.question_files(tmp_path, monkeypatch)
    found = train_here(tmp_path / "run", **files, eval_steps=2, bf16=True)
    assert 1e-4 < found[2, "train/sampling/logprob_difference/max"] < 0.5
    assert 5 * found[2, "eval/greedy"] == pytest.approx(round(5 * found[2, "eval/greedy"])), "a mean of five"
    assert (0, "eval/pi_play/gate_with") in found, "asked questions of the examiner"
    file = (tmp_path / "train.jsonl").read_text()
    rows = [row for row in completions(tmp_path / "run") if row["role"] == "student"]
    asked = [row["prompt"].partition("Question: ")[2].partition("?")[0] for row in rows]
    assert any(question not in file for question in asked), "the examiner may hit on one of the file"


def test_learning(tmp_path):
    """A step of the examiner and three of the student: right answers become more, by the teacher."""
    values = {"num_prompts_per_step": 6, "max_completion_length": 48, "learning_rate": 8e-4, "warmup_steps": 0}
    values |= {"eval_problems": 24, "num_generations_eval": 4, "hops": (1, 2)}
    found = train_here(tmp_path, **values, student_steps=3, max_steps=4, eval_steps=4)
    assert found[4, "eval/mean_at_4"] - found[0, "eval/mean_at_4"] > 0.2
    assert found[4, "train/pi_play/divergence"] < 0.5 * found[2, "train/pi_play/divergence"]


MISTAKES = """
class NoHops(Quiz):
    def request(self, generator):
        return SimpleNamespace(text="Ask.")

class OneNumber(Quiz):
    def examined(self, request, texts):
        return 1.0

class NoList(Quiz):
    def traced_problems(self, count):
        return None

class Wordless(Quiz):
    traced_problems = Quiz.evaluation_problems
    def with_privilege(self, question, kind, seed):
        return SimpleNamespace(text=None)
"""


@pytest.mark.quick
@pytest.mark.parametrize(
    "name, words",
    [
        ("Sums", "has no request, examined, with_privilege, traced_problems, step, see envs/README.md"),
        ("NoHops", "request: what it returned: has no hops"),
        ("OneNumber", "examined: returned 1.0, expected a format score and a question or None"),
        ("NoList", "traced_problems: returned None, expected a list of problems"),
        ("Wordless", "prompt of with_privilege: returned [{'role': 'user', 'content': None}]"),
    ],
)
def test_a_mistake_in_a_task_of_ones_own_ends_in_a_sentence(name, words, tmp_path):
    (tmp_path / "quizzes.py").write_text(OWN + MISTAKES)
    right = pi_play.load_task(pi_play.Args(env=f"{tmp_path}/quizzes.py:Quiz", max_turns=2))
    assert right[0].max_turns == 2
    with pytest.raises(SystemExit) as stopped:
        pi_play.load_task(pi_play.Args(env=f"{tmp_path}/quizzes.py:{name}"))
    assert words in stopped.value.code
