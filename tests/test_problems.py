"""Problems of the language tasks: two streams that never meet, invented or from a file, and broken lines of files."""

import json
import random
import re
from functools import partial

import pytest

from envs.countdown import Countdown
from envs.examples.calculator import Calculator
from envs.math_jsonl import MathJsonl
from envs.reasoning_gym import ReasoningGym
from envs.search_qa import SearchQA
from envs.tool_calls import ToolCalls

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
DIGITS = {"min_terms": 1, "max_terms": 1, "max_digits": 1}
INVENTED = {
    "countdown": Countdown,
    "countdown of 4": partial(Countdown, num_numbers=4),
    "tool_calls": ToolCalls,
    "search_qa": SearchQA,
    "reasoning_gym": partial(ReasoningGym, "chain_sum", SUMS),
}
FEW = [partial(Countdown, num_numbers=2), partial(ReasoningGym, "chain_sum", DIGITS)]
FROM_FILES = {
    "math_jsonl": MathJsonl,
    "tool_calls": ToolCalls,
    "search_qa": lambda path: SearchQA(path, "http://127.0.0.1:1/retrieve"),
}


def key(problem) -> str:
    """What makes a problem; numbers in another order make the same one."""
    if hasattr(problem, "numbers"):
        return repr((sorted(problem.numbers), problem.target))
    return problem["question"] if isinstance(problem, dict) else question(problem)


def question(problem) -> str:
    return getattr(problem, "question", None) or problem.query


@pytest.mark.parametrize("name", INVENTED)
def test_the_evaluation_set_is_fixed_and_never_trained_on(name):
    task = INVENTED[name]()
    problems = list(map(key, task.evaluation_problems(512)))
    assert len(set(problems)) > 150
    assert problems[:64] == list(map(key, INVENTED[name]().evaluation_problems(64)))
    drawn = {key(task.train_problem(index, seed)) for seed in range(3) for index in range(1000)}
    if hasattr(task, "sample"):  # pretraining
        drawn |= {key(task.sample(random.Random(index))) for index in range(1000)}
    assert len(drawn) > 500 and not drawn & set(problems)


def test_the_evaluation_set_is_that_of_the_studies():
    assert key(Countdown().evaluation_problems(128)[127]) == "([3, 3, 7], 7)"
    last = SearchQA().evaluation_problems(512)[511]
    assert last.question == "Who is the neighbour of the mother of the rival of Altta Tamer?"


@pytest.mark.parametrize("make", FEW)
def test_the_evaluation_set_ends_with_what_there_is(make):
    assert 0 < len(make().evaluation_problems(32)) < 32


@pytest.mark.parametrize("name", INVENTED)
def test_a_problem_depends_on_its_number_and_the_seed_alone(name):
    one, other = INVENTED[name](), INVENTED[name]()
    first = [key(one.train_problem(index, 3)) for index in range(50)]
    one.evaluation_problems(2)
    again = [key(other.train_problem(index, 3)) for index in reversed(range(50))]
    assert again[::-1] == first and len(set(first)) > 40
    assert first != [key(one.train_problem(index, 4)) for index in range(50)]


def write(path, rows) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


@pytest.mark.parametrize("name", FROM_FILES)
def test_both_sides_of_a_file(name, tmp_path):
    """The sides do not depend on the order of the lines; every epoch is another permutation."""
    rows = [{"question": f"Question {i}?", "answer": f"<response>{i}</response>"} for i in range(200)]
    task = FROM_FILES[name](write(tmp_path / "rows.jsonl", rows))
    evaluation, training = task.evaluation_problems(1000), set(task.train_rows)
    assert 5 < len(evaluation) < 25 and len(evaluation) + len(training) == 200
    assert not training & set(evaluation) and evaluation[:3] == task.evaluation_problems(3)
    again = FROM_FILES[name](write(tmp_path / "rows.jsonl", rows[::-1]))
    assert again.evaluation_problems(1000) == evaluation
    generator = random.Random(0)
    assert {task.sample(generator) for _ in range(300)} <= training
    assert {task.sample(generator, held_out=True) for _ in range(50)} <= set(evaluation)
    size = len(training)
    epochs = [[task.train_problem(size * epoch + i, seed=0) for i in range(size)] for epoch in range(3)]
    assert all(set(epoch) == training for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != [task.train_problem(i, seed=1) for i in range(size)]
    assert epochs[1][5] == again.train_problem(size + 5, seed=0)


@pytest.mark.parametrize("name", FROM_FILES)
def test_copies_of_a_question_fall_on_the_same_side(name, tmp_path):
    texts = [text for i in range(100) for text in (f"question {i}?", f" Question   {i}? ", f"QUESTION {i}?")]
    rows = [{"question": text, "answer": f"<response>{number}</response>"} for number, text in enumerate(texts)]
    task = FROM_FILES[name](write(tmp_path / "rows.jsonl", rows))
    sides = [{question(row).lower().split()[1] for row in side} for side in (task.train_rows, task.evaluation_rows)]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 100


@pytest.mark.parametrize("name", FROM_FILES)
def test_copies_of_a_question_stay(name, tmp_path):
    """Five lines are five problems, on both sides of a file and when a file is evaluated in full."""
    rows = [{"question": f"question {number % 3}?", "answer": f"<response>{number // 4}</response>"} for number in range(5)]
    task = FROM_FILES[name](write(tmp_path / "rows.jsonl", rows))
    found = task.train_rows + task.evaluation_problems(99)
    assert sorted(map(question, found)) == sorted(row["question"] for row in rows)
    assert len(getattr(task, "rows", found)) == 5


BROKEN = {
    "math_jsonl": [
        ('{"answer": "1", "prompt": null, "text": "q"}', "found no prompt among the keys answer, text, expected a key prompt or"),
        ('{"question": "q", "answer": "<think>hm</think>"}', "found an empty answer, expected some text"),
        ('{"question": "q", "answer": NaN}', "found answer NaN, expected a number"),
    ],
    "tool_calls": [
        ('{"answer": "a"}', "found no query, expected text under query or question or input or instruction"),
        ('{"query": "q", "answer": 5}', "found no answer, expected text under answer or output"),
        ('{"query": "q", "answer": "<tool_call>{}</tool_call>"}', "found a broken tool_call block"),
    ],
    "search_qa": [
        ('{"answer": "1"}', "found no question among the keys answer, expected a key question"),
        ('{"question": "q"}', "found no answer among the keys question, expected a key golden_answers or answers or answer"),
        ('{"question": "q", "answers": "[\'a\', 5]"}', "found answers ['a', 5], expected a list of texts in quotes"),
        ('{"question": "q", "answer": 5}', "found answer of type int, expected a string"),
    ],
}


@pytest.mark.parametrize("name, line, sentence", [(name, *case) for name in BROKEN for case in BROKEN[name]])
def test_a_broken_line_gives_its_sentence(tmp_path, name, line, sentence):
    path = tmp_path / "broken.jsonl"
    path.write_text(f'{{"question": "first", "answer": "1"}}\n\n{line}\n')
    with pytest.raises(ValueError) as error:
        FROM_FILES[name](str(path))
    assert re.sub("^, |^: ", "", str(error.value).removeprefix(f"{path}, line 3")).startswith(sentence)


def test_the_calculator_never_trains_on_what_it_evaluates():
    task = Calculator()
    sums = [sum(map(int, re.findall("[0-9]+", task.train_problem(i, 1)["question"]))) for i in range(50)]
    held_out = [sum(map(int, re.findall("[0-9]+", row["question"]))) for row in task.evaluation_problems(20)]
    assert all(total % 16 for total in sums) and not any(total % 16 for total in held_out)
