"""Countdown: the grader against hand-made cases and an oracle."""

import random
import re
from fractions import Fraction

import pytest

from envs import countdown
from envs.countdown import Countdown, Problem

EIGHTS = Problem((8, 3, 8, 3), 24)


@pytest.mark.parametrize(
    "problem, completion, correct, well_formed",
    [
        (EIGHTS, "<answer>8/(3-8/3)</answer>", 1, 1),  # only exact rationals get this: 3-8/3 is 1/3
        (EIGHTS, "<answer> 8 / ( 3 - 8 / 3 ) </answer>\n", 1, 1),
        (EIGHTS, "3*8=24 yes\n<answer>8*3*(8-7)</answer>", 0, 1),  # a number that was not given
        (EIGHTS, "<answer>8*3</answer>", 0, 1),  # two numbers unused
        (EIGHTS, "<answer>8*3+8-8+3-3</answer>", 0, 1),  # numbers used twice
        (EIGHTS, "<answer>8+3+8+3</answer>", 0, 1),  # wrong value
        (EIGHTS, "8/(3-8/3)", 0, 0),  # no tags
        (EIGHTS, "<answer>8/(3-8/3)", 0, 0),
        (EIGHTS, "<answer></answer>", 0, 0),
        (EIGHTS, "<answer>8+3</answer><answer>8/(3-8/3)</answer>", 1, 0),  # the last answer counts
        (EIGHTS, "<answer>8/(3-8/3)</answer> is my answer", 1, 0),  # trailing text
        (EIGHTS, "<answer>8/(3-8/3)=24</answer>", 0, 0),  # an equation is no expression
        (Problem((2, 3, 5), 1), "<answer>-5+2*3</answer>", 1, 1),  # a sign is not a number
        (Problem((2, 3, 5), 1), "<answer>3*2-05</answer>", 1, 1),  # 05 is 5
        (Problem((2, 2, 5), 9), "<answer>2*2+5</answer>", 1, 1),  # given twice, used twice
        (Problem((2, 2, 5), 7), "<answer>2+5</answer>", 0, 1),  # given twice, used once
        (Problem((1, 2, 3), 1), "<answer>3/(2-1-1)</answer>", 0, 0),  # division by zero
        (Problem((7, 3), 2), "<answer>7/3</answer>", 0, 1),  # nothing is rounded
        (Problem((2, 3), 8), "<answer>2**3</answer>", 0, 0),
        (Problem((7, 2), 3), "<answer>7//2</answer>", 0, 0),
        (Problem((1, 2), 2), "<answer>(1)(2)</answer>", 0, 0),
        (Problem((1, 2), 3), "<answer>(1+2</answer>", 0, 0),
    ],
)
def test_grades(problem, completion, correct, well_formed):
    assert countdown.correctness(problem, completion) == correct
    assert countdown.format(problem, completion) == well_formed


def oracle(text: str) -> Fraction:
    """Python's own arithmetic on exact rationals. Only here: the strings are ours."""
    return eval(re.sub("([0-9]+)", r"Fraction('\1')", text), {"Fraction": Fraction})


def random_text(generator: random.Random, depth: int) -> str:
    """A valid expression with signs, spaces and redundant parentheses."""
    if depth == 0 or generator.random() < 0.2:
        return str(generator.randint(0, 20))
    space = generator.choice(["", "", " "])
    left, right = random_text(generator, depth - 1), random_text(generator, depth - 1)
    text = f"{left}{space}{generator.choice('+-*/')}{space}{right}"
    return generator.choice([text, f"({text})", f"-({text})", f"({left})", f"-{left}"])


def test_parser_equals_python_on_valid_expressions():
    generator, values = random.Random(0), 0
    for _ in range(4000):
        text = random_text(generator, depth=3)
        try:
            expected = oracle(text)
        except ZeroDivisionError:
            expected = None
        if len(text) > countdown.MAX_EXPRESSION_CHARS or expected is None:
            with pytest.raises(ValueError):
                countdown.evaluate_expression(text)
            continue
        value, numbers = countdown.evaluate_expression(text)
        assert value == expected and numbers == [int(digits) for digits in re.findall("[0-9]+", text)], text
        values += 1
    assert values > 3000


def test_problems_keep_the_flags_and_are_solvable():
    task = Countdown(num_numbers=4, max_number=9, max_target=30)
    for index in range(20):
        problem = task.train_problem(index, seed=0)
        assert len(problem.numbers) == 4 and all(1 <= number <= 9 for number in problem.numbers)
        assert 1 <= problem.target <= 30
        assert countdown.correctness(problem, f"<answer>{problem.solution}</answer>")
