"""JSON-lines questions: graders on answer formats and hostile text, reading a file, the two sides."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import ROOT
from test_problems import write

from envs import math_jsonl
from envs.math_jsonl import MathJsonl, Problem

REFERENCE = json.loads((Path(__file__).parent / "reference/gdpo.json").read_text())["vectors"]
GSM8K = [vector for vector in REFERENCE if vector["id"].startswith("gsm8k_rewards/")]


PAIRS = json.loads((Path(__file__).parent / "answer_pairs.json").read_text())  # kind, gold, completion, verdict


@pytest.mark.parametrize("kind", dict.fromkeys(pair[0] for pair in PAIRS))
def test_a_mathematician_agrees(kind):
    """Right and wrong answers of every kind, judged by hand."""
    pairs = [pair[1:] for pair in PAIRS if pair[0] == kind]
    verdicts = [[gold, text, math_jsonl.correctness(Problem("?", gold), text) == 1] for gold, text, _ in pairs]
    assert verdicts == pairs


def test_plain_answers_need_no_other_process(monkeypatch):
    monkeypatch.setattr(math_jsonl, "math_verify_says_yes", None)
    same = [("72", "$72.00"), ("\\frac{3}{4}", "0.75"), ("x^2 + 1", "x^2+1"), ("(3,4)", "(3, 4)"), ("Paris", "paris")]
    other = [("72", "71 eggs"), ("18", "18 eggs and 3 hens"), ("Paris", "London"), ("3:2", "3/2"), ("1", "7" * 5000)]
    assert [math_jsonl.same_answer(*pair) for pair in same + other] == [True] * 5 + [False] * 5


def test_training_imports_neither_sympy_nor_math_verify():
    code = "import sys; from envs.math_jsonl import same_answer; print(same_answer('x+1', '1+x'), 'sympy' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout == "True False\n" and run.stderr == ""


def test_a_hostile_answer_takes_a_bounded_time():
    """Its worker ends, is wrong, and the next one answers."""
    assert math_jsonl.same_answer("a+b", "b+a")
    worker = math_jsonl.workers[os.getpid()][-1]
    began = time.monotonic()
    assert not math_jsonl.same_answer("1", "10^{10^{10}}")
    assert time.monotonic() - began < math_jsonl.TIME_LIMIT + 10
    assert worker.poll() is not None
    assert math_jsonl.same_answer("a+c", "c+a") and worker not in math_jsonl.workers[os.getpid()]
    began = time.monotonic()
    for text in ("\n", "\n#", "$$x ", "A. ", "A is 1 ", "**a ", "the answer is "):
        math_jsonl.correctness(Problem("?", "1"), f"Answer: {5000 * text}")
        math_jsonl.correctness(Problem("?", "1"), 5000 * text)
    assert time.monotonic() - began < 2


def test_no_worker_is_left_by_a_killed_run():
    code = "from envs import math_jsonl as m; import os; m.same_answer('a+b', 'b+a'); "
    code += "print(m.workers[os.getpid()][0].pid, flush=True); m.same_answer('1', '10^{10^{10}}')"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        pid = int(run.stdout.readline())
        time.sleep(0.5)  # by now it computes
        run.kill()
    end = time.monotonic() + math_jsonl.TIME_LIMIT + 10
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_threads_and_forks_have_workers_of_their_own(monkeypatch):
    """One for each thread that asks at the same time, if there is a core for it, and one for a single thread."""
    monkeypatch.setattr(math_jsonl, "workers", {})
    pairs = [(f"{n}x+y", f"y+{n + n % 2}x") for n in range(40)]
    expected = [n % 2 == 0 for n in range(40)]
    for threads in (1, 3):
        with ThreadPoolExecutor(threads) as pool:
            assert list(pool.map(lambda pair: math_jsonl.math_verify_says_yes(*pair), pairs)) == expected
        [idle] = math_jsonl.workers.values()
        assert 1 <= len(idle) <= min(threads, os.cpu_count())
    child = os.fork()
    if child == 0:
        is_right = math_jsonl.same_answer("x+2y", "2y+x") and not {*idle} & {*math_jsonl.workers[os.getpid()]}
        os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_answers_of_a_file_are_counted_and_prose_is_named(tmp_path, capsys, monkeypatch):
    prose = "She begins with 3 apples and then buys 2 more of them at the market. So she has five apples in total, which is it."
    short = "She has 0 apples and buys 2 more. So she has 0 + 2 = 2 apples in total."
    answers = ["5", "$1,000", "x^2+1", "\\text{Evelyn}", prose, f"{prose}\n#### 5", "\\sqrt{2}", short]
    path = write(tmp_path / "data.jsonl", [{"question": f"{i}?", "answer": text} for i, text in enumerate(answers)])
    MathJsonl(path)
    counts, named = capsys.readouterr().out.splitlines()
    assert counts == f"{path}: the answers are 3 numbers, 2 expressions, 3 texts"
    assert named.startswith(f"{path}, line 5, {path}, line 8: the answer is prose without a mark")
    monkeypatch.setenv("RANK", "1")
    MathJsonl(path)
    assert capsys.readouterr().out == ""


def test_without_math_verify_there_is_one_sentence(tmp_path, monkeypatch):
    path = write(tmp_path / "data.jsonl", [{"question": f"{i}?", "answer": "1"} for i in range(3)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    MathJsonl(path, "gsm8k")  # its rewards compare character for character
    with pytest.raises(ValueError, match="math-verify, pip install"):
        MathJsonl(path)


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
        ("72", "72 is what it is", 0, 0),
        ("72", "<answer>72", 0, 0),
    ],
)
def test_grades(gold, completion, correct, well_formed):
    assert math_jsonl.correctness(Problem("?", gold), completion) == correct
    assert math_jsonl.format(Problem("?", gold), completion) == well_formed


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
        ({"question": "q", "answer": "<think>I add.</think>\n13"}, "13"),
    ],
)
def test_gold_answers(tmp_path, row, gold):
    path = write(tmp_path / "data.jsonl", [row, "", '{"question": "other", "answer": "1"}', ""])
    task = MathJsonl(path)
    assert Problem("q", gold) in task.train_rows + task.evaluation_rows


def test_gsm8k_names_golds_that_are_no_integers(tmp_path, capsys):
    rows = [{"question": f"q{n}", "answer": f"so\n#### {gold}"} for n, gold in enumerate(["72", "1,234", "$84.00", "-5"])]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    MathJsonl(str(tmp_path / "a.jsonl"), "gsm8k")
    printed = capsys.readouterr().out
    assert "3 numbers, 0 expressions, 1 texts" in printed and "a.jsonl, line 3: the answer is no integer" in printed
