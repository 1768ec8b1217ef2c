"""JSON-lines questions: graders on answer formats and hostile text, reading a file, the two sides."""

import json
import random
from fractions import Fraction
from pathlib import Path

import pytest

from envs import math_jsonl
from envs.math_jsonl import MathJsonl, Problem

REFERENCE = json.loads((Path(__file__).parent / "reference/gdpo.json").read_text())["vectors"]
GSM8K = [vector for vector in REFERENCE if vector["id"].startswith("gsm8k_rewards/")]


def write(path, rows) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


@pytest.fixture
def task(tmp_path) -> MathJsonl:
    rows = [{"question": f"{i}+1?", "answer": f"#### {i + 1}"} for i in range(200)]
    return MathJsonl(write(tmp_path / "sums.jsonl", rows))


# --- Grading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, texts",
    [
        (72, ["72", " 72. ", "$72", "\\$72", "$72$", "072"]),
        (-72, ["-$72", "$-72", "\u221272"]),
        (1000, ["1,000", "1e3"]),
        (Fraction(2469135, 2), ["1,234,567.50"]),
        (Fraction(3, 4), ["$\\frac{3}{4}$", "3/4", "6 / 8", "0.75", ".75", "7.5E-1"]),
        (Fraction(-3, 4), ["-\\dfrac{3}{4}"]),
        (50, ["50%", "50\\%", "+50"]),
        ("blue whale", ["Blue  Whale."]),
    ],
)
def test_canonical_form(value, texts):
    assert [math_jsonl.canonical(text) for text in texts] == [value] * len(texts)


@pytest.mark.parametrize(
    "gold, completion, correct, well_formed",
    [
        ("1000", "so <answer>1,000</answer>", 1, 1),
        ("0.5", "<answer>1/2</answer>", 1, 1),
        ("50", "<answer>50%</answer>", 1, 1),
        ("72", "<answer>$72.00</answer>", 1, 1),
        ("0.1", "<answer>0.1000000000000000055511151231257827</answer>", 0, 1),  # equal as floats
        ("Paris", "<answer> paris. </answer>", 1, 1),
        ("72", "<answer>71</answer> no <answer>72</answer>", 1, 0),  # the last answer counts
        ("72", "<answer>72</answer> is my answer", 1, 0),
        ("72", "\\boxed{71} <answer>72</answer>", 1, 1),  # tags before boxes
        ("72", "so \\boxed{71}, no, \\boxed{72}.", 1, 0),
        ("3/4", "\\boxed{\\frac{3}{4}}", 1, 0),  # nested braces
        ("\\frac{\\sqrt{3}}{2}", "\\boxed{\\frac{\\sqrt{3}}{2}}", 1, 0),
        ("72", "\\boxed{72", 0, 0),  # cut off
        ("72", "so\n#### 72", 1, 0),
        ("72", "\\boxed{72} #### 71", 1, 0),  # boxes before ####
        ("72", "the answer is 72", 0, 0),
        ("72", "<answer>72", 0, 0),
        ("72", "<answer></answer>", 0, 0),
    ],
)
def test_grades(gold, completion, correct, well_formed):
    assert math_jsonl.correctness(Problem("?", gold), completion) == correct
    assert math_jsonl.format(Problem("?", gold), completion) == well_formed


@pytest.mark.parametrize("before, short", [(1000, 1), (1001, 0)])
def test_length_counts_only_the_text_before_the_answer(before, short):
    assert math_jsonl.length(Problem("?", "1"), "x" * before + "<answer>" + "1" * 5000 + "</answer>") == short


# --- The style of GDPO's GSM8K demo ------------------------------------------------------------------------------


def gsm8k_scores(answer: str, completion: str) -> tuple:
    problem = Problem("?", answer)
    functions = (math_jsonl.gsm8k_correctness, math_jsonl.gsm8k_integer, math_jsonl.gsm8k_format)
    return tuple(function(problem, completion) for function in functions)


@pytest.mark.parametrize("vector", GSM8K, ids=lambda vector: vector["id"])
def test_gsm8k_rewards_reference(vector):
    scores = gsm8k_scores(vector["inputs"]["answer"], vector["inputs"]["response"])
    assert scores == tuple(vector["outputs"][name] for name in ("correct", "integer", "format"))


@pytest.mark.parametrize(
    "answer, completion, correct, integer, well_formed",
    [
        ("2", "<think>a\nb</think>\n<answer>\n2\n</answer>", 1, 1, 1),
        ("2", " <think>a</think>\n<answer>2</answer>", 1, 1, 0),
        ("2", "<think>a</think>\n\n<answer>2</answer>", 1, 1, 0),
        ("2", "<think>a\n<answer>2</answer>", 1, 1, 0),
        ("2", "<answer>2", 1, 1, 0),  # an open tag is enough for the answer, but not for the format
        ("1,000", "<think>a</think>\n<answer>1,000</answer>", 1, 0, 1),
        ("1000", "<think>a</think>\n<answer>1,000</answer>", 0, 0, 1),  # no number is recognised
    ],
)
def test_gsm8k_grades(answer, completion, correct, integer, well_formed):
    assert gsm8k_scores(answer, completion) == (correct, integer, well_formed)


# --- Reading a file ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row, gold",
    [
        ({"question": "q", "answer": "48/2=<<48/2=24>>24\n#### 1,024"}, "1,024"),
        ({"problem": "q", "solution": "Hence \\boxed{\\frac{1}{2}}."}, "\\frac{1}{2}"),
        ({"prompt": "q", "answer": "<answer>x</answer>"}, "x"),
        ({"question": "q", "answer": " plain text "}, "plain text"),
        ({"question": "q", "answer": 72}, "72"),
        ('{"question": "q", "answer": 0.10}', "0.10"),
        ({"problem": "q", "solution": "long", "answer": "3", "level": 5}, "3"),
    ],
)
def test_gold_answers(tmp_path, row, gold):
    path = write(tmp_path / "data.jsonl", [row, "", '{"question": "other", "answer": "1"}', ""])
    task = MathJsonl(path)
    assert Problem("q", gold) in task.train_rows + task.evaluation_rows


def test_utf8_with_byte_order_mark_and_windows_line_ends(tmp_path):
    path = tmp_path / "data.jsonl"
    first = '{"question": "a\u00e9\u2028b", "answer": "1"}'  # U+2028 ends a line of text, but not one of JSON lines
    path.write_bytes(b"\xef\xbb\xbf" + first.encode() + b'\r\n{"question": "c", "answer": "2"}\r\n')
    task = MathJsonl(path)
    assert {row.question for row in task.train_rows + task.evaluation_rows} == {"a\u00e9\u2028b", "c"}


@pytest.mark.parametrize(
    "line, sentence",
    [
        (b'{"question": "q", "answer": "1"', "found text that is not valid JSON, expected one JSON object"),
        (b'{"question": "caf\xe9", "answer": "1"}', "found bytes that are not UTF-8, expected UTF-8 text"),
        (b'["q", "1"]', "found JSON of type list, expected an object with a question and an answer"),
        (b'{"answer": "1"}', "found no question, expected a key question or problem or prompt"),
        (b'{"question": "q", "answer": true}', "found answer of type bool, expected a string or a number"),
        (b'{"question": "q", "answer": "<answer> </answer>"}', "found an empty answer, expected some text"),
    ],
)
def test_a_broken_line_gives_its_sentence(tmp_path, line, sentence):
    path = tmp_path / "broken.jsonl"
    path.write_bytes(b'{"question": "first", "answer": "1"}\n\n' + line + b'\n{"question": "last", "answer": "2"}\n')
    with pytest.raises(ValueError) as error:
        MathJsonl(str(path))
    assert str(error.value) == f"{path}, line 3: {sentence}"


# --- The two sides -----------------------------------------------------------------------------------------------


def test_every_epoch_is_another_permutation_of_the_training_rows(task):
    size = len(task.train_rows)
    epochs = [[task.train_problem(size * epoch + i, seed=0) for i in range(size)] for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch, key=repr) == sorted(task.train_rows, key=repr)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != [task.train_problem(index, seed=1) for index in range(size)]
    backwards = [task.train_problem(index, seed=0) for index in reversed(range(3 * size))]
    assert backwards[::-1] == sum(epochs, [])  # a row depends on its number alone, not on earlier calls


def test_evaluation_is_disjoint_and_fixed(task, tmp_path):
    evaluation, training = task.evaluation_problems(1000), set(task.train_rows)
    assert len(evaluation) == 13 and len(training) == 187
    assert not set(evaluation) & training
    assert evaluation[0] == Problem("56+1?", "57") and task.evaluation_problems(3) == evaluation[:3]
    rows = [{"question": row.question, "answer": row.answer} for row in sorted(training | set(evaluation), key=repr)]
    random.Random(0).shuffle(rows)
    assert MathJsonl(write(tmp_path / "shuffled.jsonl", rows)).evaluation_problems(1000) == evaluation
    generator = random.Random(0)
    assert {task.sample(generator) for _ in range(500)} <= training
    assert {task.sample(generator, held_out=True) for _ in range(100)} <= set(evaluation)


def test_copies_of_a_question_fall_on_the_same_side(tmp_path):
    texts = [text for i in range(100) for text in (f"question {i}", f" Question   {i} ", f"QUESTION {i}")]
    rows = [{"question": text, "answer": number} for number, text in enumerate(texts)]
    task = MathJsonl(write(tmp_path / "copies.jsonl", rows), evaluation_share=0.3)
    training = {row.question.lower().split()[1] for row in task.train_rows}
    evaluation = [row.question.lower().split()[1] for row in task.evaluation_rows]
    assert not training & set(evaluation) and len(training) + len(evaluation) == 100
