"""JSON-lines questions: graders on answer formats and hostile text, the sentence of a broken line, the two sides."""

import json
import random
import time
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
    "text, value",
    [
        ("72", 72),
        (" 72. ", 72),
        ("007", 7),
        ("1,000", 1000),
        ("1,234,567.50", Fraction(2469135, 2)),
        ("$72", 72),
        ("-$72", -72),
        ("$-72", -72),
        ("\\$72", 72),
        ("$72$", 72),
        ("$\\frac{3}{4}$", Fraction(3, 4)),
        ("-\\dfrac{3}{4}", Fraction(-3, 4)),
        ("3/4", Fraction(3, 4)),
        ("6 / 8", Fraction(3, 4)),
        ("0.75", Fraction(3, 4)),
        (".5", Fraction(1, 2)),
        ("+5", 5),
        ("\u22125", -5),
        ("-0", 0),
        ("0.1", Fraction(1, 10)),
        ("50%", 50),
        ("50\\%", 50),
        ("1e3", 1000),
        ("1.5E-1", Fraction(3, 20)),
        ("3/0", "3/0"),
        ("1,00", "1,00"),
        ("1_000", "1_000"),
        ("1 000", "1 000"),
        ("5 km", "5 km"),
        ("1e999999999", "1e999999999"),
        ("\u0663", "\u0663"),
        ("nan", "nan"),
        ("Blue  Whale.", "blue whale"),
        ("9" * 101, "9" * 101),
    ],
)
def test_canonical_form(text, value):
    assert math_jsonl.canonical(text) == value and type(math_jsonl.canonical(text)) in (Fraction, str)


@pytest.mark.parametrize(
    "gold, completion, correct, well_formed",
    [
        ("1000", "so <answer>1,000</answer>", 1, 1),
        ("0.5", "<answer>1/2</answer>", 1, 1),
        ("50", "<answer>50%</answer>", 1, 1),
        ("0.5", "<answer>50%</answer>", 0, 1),
        ("72", "<answer>$72.00</answer>", 1, 1),
        ("72", "<answer>72.001</answer>", 0, 1),
        ("0.1", "<answer>0.1000000000000000055511151231257827</answer>", 0, 1),  # equal as floats
        ("Paris", "<answer> paris. </answer>", 1, 1),
        ("Paris", "<answer>Paris, France</answer>", 0, 1),
        ("72", "<answer>71</answer> no <answer>72</answer>", 1, 0),  # the last answer counts
        ("72", "<answer>72</answer> no <answer>71</answer>", 0, 0),
        ("72", "<answer>72</answer> is my answer", 1, 0),
        ("72", "\\boxed{71} <answer>72</answer>", 1, 1),  # tags before boxes
        ("72", "<answer>71</answer> \\boxed{72}", 0, 0),
        ("72", "so \\boxed{71}, no, \\boxed{72}.", 1, 0),
        ("3/4", "\\boxed{\\frac{3}{4}}", 1, 0),  # nested braces
        ("\\frac{\\sqrt{3}}{2}", "\\boxed{\\frac{\\sqrt{3}}{2}}", 1, 0),
        ("72", "\\boxed{72", 0, 0),  # cut off
        ("72", "so\n#### 72", 1, 0),
        ("72", "#### 72\nDone.", 1, 0),
        ("72", "\\boxed{72} #### 71", 1, 0),  # boxes before ####
        ("72", "the answer is 72", 0, 0),
        ("72", "72", 0, 0),
        ("72", "<answer>72", 0, 0),
        ("72", "72</answer>", 0, 0),
        ("72", "<answer></answer>", 0, 0),
        ("72", "", 0, 0),
    ],
)
def test_grades(gold, completion, correct, well_formed):
    assert math_jsonl.correctness(Problem("?", gold), completion) == correct
    assert math_jsonl.format(Problem("?", gold), completion) == well_formed


def test_length_counts_only_the_text_before_the_answer():
    assert math_jsonl.length(Problem("?", "1"), "x" * 1000 + "<answer>" + "1" * 5000 + "</answer>") == 1
    assert math_jsonl.length(Problem("?", "1"), "x" * 1001 + "<answer>1</answer>") == 0


def test_hostile_text_neither_hangs_nor_raises_nor_runs(hostile_strings, nothing_executes, time_limit, task):
    problem, slowest = Problem("?", "123456789"), 0.0
    with nothing_executes():
        for text in hostile_strings:
            start = time.process_time()
            values = [function(problem, text) for function in task.reward_functions.values()]
            math_jsonl.correctness(Problem("?", text), text)  # a file may be hostile, too
            slowest = max(slowest, time.process_time() - start)
            assert values[0] == 0.0 and set(values) <= {0.0, 1.0}
    assert slowest < 0.5, "grading is not linear in the length of the text"


# --- The style of GDPO's GSM8K demo ------------------------------------------------------------------------------


@pytest.fixture
def gsm8k(tmp_path) -> MathJsonl:
    rows = [{"question": f"{i}+1?", "answer": f"One more.\n#### {i + 1}"} for i in range(50)]
    return MathJsonl(write(tmp_path / "gsm8k.jsonl", rows), "gsm8k")


def gsm8k_scores(answer: str, completion: str) -> tuple:
    problem = Problem("?", answer)
    functions = (math_jsonl.gsm8k_correctness, math_jsonl.gsm8k_integer, math_jsonl.gsm8k_format)
    return tuple(function(problem, completion) for function in functions)


@pytest.mark.parametrize("vector", GSM8K, ids=lambda vector: vector["id"])
def test_gsm8k_rewards_reference(vector):
    scores = gsm8k_scores(vector["inputs"]["answer"], vector["inputs"]["response"])
    assert scores == tuple(vector["outputs"][name] for name in ("correct", "integer", "format"))


def test_the_file_has_gsm8k_vectors():
    assert len(GSM8K) == 8


@pytest.mark.parametrize(
    "answer, completion, correct, integer, well_formed",
    [
        ("2", "<think>a\nb</think>\n<answer>\n2\n</answer>", 1, 1, 1),
        ("2", "<think>a</think>\n<answer>2</answer>\n", 1, 1, 1),  # as the pattern of the official code
        ("2", " <think>a</think>\n<answer>2</answer>", 1, 1, 0),
        ("2", "<think>a</think> <think>b</think>\n<answer>2</answer>", 1, 1, 1),  # think tags are not counted
        ("2", "<think>a</think>\n\n<answer>2</answer>", 1, 1, 0),
        ("2", "<think>a\n<answer>2</answer>", 1, 1, 0),
        ("2", "<answer>2", 1, 1, 0),  # an open tag is enough for the answer, but not for the format
        ("2", "2</answer> is it", 1, 1, 0),
        ("1,000", "<think>a</think>\n<answer>1,000</answer>", 1, 0, 1),
        ("1000", "<think>a</think>\n<answer>1,000</answer>", 0, 0, 1),  # no number is recognised
        ("2", "<think>a</think>\n<answer>02</answer>", 0, 1, 1),
        ("2", "<think>a</think>\n<answer></answer>", 0, 0, 1),
        ("\u00b2", "<think>a</think>\n<answer>\u00b2</answer>", 1, 1, 1),  # str.isdigit, as in the official code
        ("2", "", 0, 0, 0),
    ],
)
def test_gsm8k_grades(answer, completion, correct, integer, well_formed):
    assert gsm8k_scores(answer, completion) == (correct, integer, well_formed)


def test_gsm8k_style(gsm8k, task):
    assert list(gsm8k.reward_functions) == ["correctness", "integer", "format"]
    assert gsm8k.reward_weights == (1.0, 1.0, 1.0) and task.reward_weights == (1.0, 0.1, 0.0)
    problem = gsm8k.train_problem(0, seed=0)
    (message,) = gsm8k.prompt(problem)
    assert message["content"].startswith(problem.question)
    assert all(tag in message["content"] for tag in ("<think> </think>", "<answer> </answer>"))
    right = f"<think>One more.</think>\n<answer>{problem.answer}</answer>"
    assert [function(problem, right) for function in gsm8k.reward_functions.values()] == [1.0, 1.0, 1.0]


def test_gsm8k_needs_a_file():
    with pytest.raises(ValueError, match=r"^--env gsm8k needs --dataset FILE, "):
        MathJsonl(None, "gsm8k")


def test_gsm8k_hostile_text_neither_hangs_nor_raises_nor_runs(hostile_strings, nothing_executes, time_limit, gsm8k):
    problem, slowest = Problem("?", "123456789"), 0.0
    attacks = ["<think>" * 15_000, "<think></think>\n" * 6000, "<think></think>\n<answer>" * 4000 + "</answer>"]
    with nothing_executes():
        for text in hostile_strings + attacks + [f"{text}<answer>1</answer>x" for text in attacks]:
            start = time.process_time()
            values = [function(problem, text) for function in gsm8k.reward_functions.values()]
            slowest = max(slowest, time.process_time() - start)
            assert values[0] == 0.0 and set(values) <= {0.0, 1.0}
    assert slowest < 0.5, "grading is not linear in the length of the text"


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
        (b"question,answer", "found text that is not valid JSON, expected one JSON object"),
        (b"[" * 100_000, "found text that is not valid JSON, expected one JSON object"),
        (b'{"answer": ' + b"1" * 9999 + b"}", "found text that is not valid JSON, expected one JSON object"),
        (b'{"question": "caf\xe9", "answer": "1"}', "found bytes that are not UTF-8, expected UTF-8 text"),
        (b'["q", "1"]', "found JSON of type list, expected an object with a question and an answer"),
        (b"null", "found JSON of type NoneType, expected an object with a question and an answer"),
        (b'{"answer": "1"}', "found no question, expected a key question or problem or prompt"),
        (b'{"question": "q"}', "found no answer, expected a key answer or solution"),
        (b'{"question": 5, "answer": "1"}', "found question of type int, expected a string"),
        (b'{"prompt": [{"role": "user"}], "answer": "1"}', "found prompt of type list, expected a string"),
        (b'{"question": " ", "answer": "1"}', "found an empty question, expected some text"),
        (b'{"question": "q", "answer": null}', "found answer of type NoneType, expected a string or a number"),
        (b'{"question": "q", "answer": true}', "found answer of type bool, expected a string or a number"),
        (b'{"question": "q", "answer": NaN}', "found answer of type float, expected a string or a number"),
        (b'{"question": "q", "solution": ["1"]}', "found solution of type list, expected a string or a number"),
        (b'{"question": "q", "answer": ""}', "found an empty answer, expected some text"),
        (b'{"question": "q", "answer": "<answer> </answer>"}', "found an empty answer, expected some text"),
        (b'{"prompt": "\\ud83d", "answer": "1"}', "found half a surrogate pair in prompt, expected whole characters"),
    ],
)
def test_a_broken_line_gives_its_sentence(tmp_path, line, sentence):
    path = tmp_path / "broken.jsonl"
    path.write_bytes(b'{"question": "first", "answer": "1"}\n\n' + line + b'\n{"question": "last", "answer": "2"}\n')
    with pytest.raises(ValueError) as error:
        MathJsonl(str(path))
    assert str(error.value) == f"{path}, line 3: {sentence}"


def test_files_without_two_questions_give_a_sentence(tmp_path):
    row = {"question": "q", "answer": "1"}
    for name, rows, count in (("empty", [], 0), ("blank", ["", "  "], 0), ("one", [row], 1), ("copies", [row, row], 1)):
        path = write(tmp_path / f"{name}.jsonl", rows)
        with pytest.raises(ValueError) as error:
            MathJsonl(path)
        assert str(error.value) == f"{path}: found {count} different questions, expected at least 2"
    for path in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(ValueError, match=r"cannot be read \(.+\), expected a JSON-lines file$"):
            MathJsonl(str(path))


@pytest.mark.parametrize("share", [0, 1, -0.1, 2, float("nan")])
def test_impossible_shares_are_refused(tmp_path, share):
    path = write(tmp_path / "data.jsonl", [{"question": q, "answer": "1"} for q in "ab"])
    with pytest.raises(ValueError, match="expected a number between 0 and 1"):
        MathJsonl(path, evaluation_share=share)


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
    assert len(task.train_rows) == 3 * len(training) and len(evaluation) == len(set(evaluation))
    assert not training & set(evaluation) and len(training) + len(evaluation) == 100


@pytest.mark.parametrize("share", [1e-9, 1 - 1e-9])
def test_a_small_file_has_both_sides(tmp_path, share):
    path = write(tmp_path / "two.jsonl", [{"question": q, "answer": "1"} for q in "ab"])
    task = MathJsonl(path, evaluation_share=share)
    assert len(task.train_rows) == len(task.evaluation_problems(100)) == 1
    assert task.train_problem(10**9, seed=0) == task.train_rows[0]


def test_interface_of_countdown(task):
    assert list(task.reward_functions) == ["correctness", "format", "length"]
    problem = task.train_problem(0, seed=0)
    messages = task.prompt(problem)
    assert [message["role"] for message in messages] == ["user"]
    assert messages[0]["content"].startswith(problem.question) and "<answer> </answer>" in messages[0]["content"]
