"""Countdown answers that are preferred in a circle: no reward can order them.

The kind of an answer is the first sign of its expression: a sum, a difference or a product. A product is always preferred
to a sum, a difference always to a product, and a sum to a difference in three of four comparisons. All three are
preferred to `other`: an expression that starts with a division or does not use each number once, or no expression.
Whether the target is met does not count. No policy beats 40 % sums, 40 % differences and 20 % products (the Nash policy).
"""

import re

from envs.countdown import Countdown, Problem, evaluate_expression, extract_answer

KINDS = {"+": "sum", "-": "difference", "*": "product"}
PREFERENCES = {("product", "sum"): 1.0, ("sum", "difference"): 0.75, ("difference", "product"): 1.0}


def kind(problem: Problem, completion: str) -> str:
    """sum, difference, product or other."""
    answer = extract_answer(completion) or ""
    try:
        _, numbers = evaluate_expression(answer)
    except ValueError:
        return "other"
    if sorted(numbers) != sorted(problem.numbers):
        return "other"
    return KINDS.get(re.search(r"[-+*/]", answer)[0], "other")


def preference(problem: Problem, a: str, b: str) -> float:
    """Probability that completion `a` is preferred to `b`."""
    first, second = kind(problem, a), kind(problem, b)
    if first == second:
        return 0.5
    if "other" in (first, second):
        return float(second == "other")
    if (first, second) in PREFERENCES:
        return PREFERENCES[first, second]
    return 1.0 - PREFERENCES[second, first]


class SignCycle(Countdown):
    """Problems and prompts of Countdown; answers are compared by `preference`."""

    preference = staticmethod(preference)
    kind = staticmethod(kind)
