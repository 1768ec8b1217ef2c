"""JSON-lines questions: graders on answer formats and hostile text, reading a file, the two sides."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
from test_problems import write

from envs import math_jsonl
from envs.math_jsonl import MathJsonl, Problem

REFERENCE = json.loads((Path(__file__).parent / "reference/gdpo.json").read_text())["vectors"]
GSM8K = [vector for vector in REFERENCE if vector["id"].startswith("gsm8k_rewards/")]


@pytest.mark.parametrize(
    "value, texts",
    [
        (72, ["72", " 72. ", "$72", "\\$72", "$72$", "072"]),
        (-72, ["-$72", "$-72", "\u221272"]),
        (1000, ["1,000", "1e3"]),
        (Fraction(2469135, 2), ["1,234,567.50"]),
        (Fraction(3, 4), ["$\\frac{3}{4}$", "3/4", "6 / 8", "0.75", ".75", "7.5E-1"]),
        (Fraction(-3, 4), ["-\\dfrac{3}{4}", "\\frac{-3}{4}"]),
        ("2\\frac{3}{4}", ["2\\frac{3}{4}"]),  # a mixed number is not 23/4
        (50, ["50%", "50\\%", "+50"]),
        ("blue whale", ["Blue  Whale."]),
    ],
)
def test_canonical_form(value, texts):
    assert [math_jsonl.canonical(text) for text in texts] == [value] * len(texts)


@pytest.mark.parametrize(
    "gold, completion, correct, well_formed",
    [
        ("0.5", "so <answer>1/2</answer>", 1, 1),
        ("72", "<answer>$72.00</answer>", 1, 1),
        ("Paris", "<answer> paris. </answer>", 1, 1),
        ("72", "<answer>71</answer> no <answer>72</answer>", 1, 0),  # the last answer counts
        ("72", "<answer>72</answer> is my answer", 1, 0),
        ("72", "\\boxed{71} <answer>72</answer>", 1, 1),  # tags before boxes
        ("72", "so \\boxed{71}, no, \\boxed{72}.", 1, 0),
        ("3/4", "\\boxed{\\frac{3}{4}}", 1, 0),  # nested braces
        ("72", "<answer>So it is $\\boxed{72}$.</answer>", 1, 1),
        ("\\frac{\\sqrt{3}}{2}", "\\boxed{\\frac{\\sqrt{3}}{2}}", 1, 0),
        ("72", "\\boxed{72", 0, 0),  # cut off
        ("72", "so\n#### 72", 1, 0),
        ("72", "\\boxed{72} #### 71", 1, 0),  # boxes before ####
        ("72", "the answer is 72", 0, 0),
        ("72", "<answer>72", 0, 0),
    ],
)
def test_grades(gold, completion, correct, well_formed):
    assert math_jsonl.correctness(Problem("?", gold), completion) == correct
    assert math_jsonl.format(Problem("?", gold), completion) == well_formed


@pytest.mark.parametrize("before, short", [(1000, 1), (1001, 0)])
def test_length_counts_only_the_text_before_the_answer(before, short):
    assert math_jsonl.length(Problem("?", "1"), "x" * before + "<answer>" + "1" * 5000 + "</answer>") == short


def test_commas_of_gsm8k(tmp_path):
    """Its rewards ask for digits only, so that is how the answers of the file are kept."""
    lines = [{"question": f"{n}?", "answer": f"so\n#### 1,00{n}"} for n in range(2)]
    (tmp_path / "file.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert {row.answer for row in MathJsonl(tmp_path / "file.jsonl", "gsm8k").rows} == {"1000", "1001"}


@pytest.mark.parametrize("vector", GSM8K, ids=lambda vector: vector["id"])
def test_reference_gsm8k_rewards(vector):
    problem = Problem("?", vector["inputs"]["answer"])
    functions = (math_jsonl.gsm8k_correctness, math_jsonl.gsm8k_integer, math_jsonl.gsm8k_format)
    scores = [function(problem, vector["inputs"]["response"]) for function in functions]
    assert scores == [vector["outputs"][name] for name in ("correct", "integer", "format")]


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
