"""Countdown: combine the given numbers, each exactly once, with + - * / and parentheses to reach a target.

The task of TinyZero, nano-aha-moment and GRPO-Zero (data set Jiayi-Pan/Countdown-Tasks-3to4). The model writes its
tries and then one expression inside <answer> </answer>; a rule grades it. A second role, the verifier, recomputes a
solution and ends with <verdict>approve</verdict> or <verdict>reject</verdict> (teams of agents need it).

What a model writes is parsed by a small grammar with exact rational arithmetic; it is never executed.
Every random choice comes from the `random.Random` that is passed in. No dependencies, importable alone.
"""

import random
import zlib
from dataclasses import dataclass
from fractions import Fraction

MAX_EXPRESSION_CHARS = 100  # longer than any sensible answer, short enough that hostile numbers stay small
MAX_EXPRESSION_DEPTH = 12  # nested parentheses and signs
EVALUATION_SHARE = 16  # one problem in 16 is reserved for evaluation


@dataclass(frozen=True)
class Problem:
    numbers: tuple[int, ...]  # in the order shown to the model
    target: int

    @property
    def held_out(self) -> bool:
        """True if the problem belongs to evaluation: decided by a hash of (sorted numbers, target), so that neither
        pretraining nor training can meet an evaluation problem, whatever their seeds and flags."""
        return zlib.crc32(f"{sorted(self.numbers)}{self.target}".encode()) % EVALUATION_SHARE == 0


# --- Grading -----------------------------------------------------------------------------------------------------


def evaluate_expression(text: str) -> tuple[Fraction, list[int]]:
    """Exact value of an arithmetic expression and the integers in it, in order.

    Grammar: sum = term {(+|-) term}; term = factor {(*|/) factor}; factor = integer | (sum) | -factor.
    Raises ValueError for anything else, for division by zero and beyond the caps on length and depth.
    """
    if len(text) > MAX_EXPRESSION_CHARS:
        raise ValueError(f"expression longer than {MAX_EXPRESSION_CHARS} characters")
    text, position, numbers = text.replace(" ", ""), 0, []

    def peek() -> str:
        return text[position] if position < len(text) else ""

    def parse_sum(depth: int) -> Fraction:
        nonlocal position
        value = parse_term(depth)
        while peek() in ("+", "-"):
            position += 1
            value = value + parse_term(depth) if text[position - 1] == "+" else value - parse_term(depth)
        return value

    def parse_term(depth: int) -> Fraction:
        nonlocal position
        value = parse_factor(depth)
        while peek() in ("*", "/"):
            position += 1
            times, factor = text[position - 1] == "*", parse_factor(depth)
            if not times and factor == 0:
                raise ValueError("division by zero")
            value = value * factor if times else value / factor
        return value

    def parse_factor(depth: int) -> Fraction:
        nonlocal position
        if depth > MAX_EXPRESSION_DEPTH:
            raise ValueError(f"expression nested deeper than {MAX_EXPRESSION_DEPTH}")
        start = position
        while peek() in tuple("0123456789"):
            position += 1
        if position > start:
            numbers.append(int(text[start:position]))
            return Fraction(numbers[-1])
        position += 1
        if text[start : start + 1] == "-":
            return -parse_factor(depth + 1)
        if text[start : start + 1] == "(":
            value = parse_sum(depth + 1)
            position += 1
            if text[position - 1 : position] == ")":
                return value
        raise ValueError(f"unexpected text at character {start}")

    value = parse_sum(0)
    if position < len(text):
        raise ValueError(f"unexpected text at character {position}")
    return value, numbers


def extract_answer(completion: str) -> str | None:
    """Text inside the last <answer> </answer> pair, or None. Linear in the length of the completion."""
    end = completion.rfind("</answer>")
    start = completion.rfind("<answer>", 0, max(end, 0))
    return None if end < 0 or start < 0 else completion[start + len("<answer>") : end]


def correctness(problem: Problem, completion: str) -> float:
    """1.0 if the last answer uses each number exactly once and equals the target, else 0.0."""
    try:
        value, numbers = evaluate_expression(extract_answer(completion) or "")
    except ValueError:
        return 0.0
    return float(value == problem.target and sorted(numbers) == sorted(problem.numbers))


def format(problem: Problem, completion: str) -> float:
    """1.0 if the completion ends with its only <answer> </answer> pair and this holds an arithmetic expression."""
    once = completion.count("<answer>") == completion.count("</answer>") == 1
    try:
        evaluate_expression(extract_answer(completion) or "")
    except ValueError:
        return 0.0
    return float(once and completion.rstrip().endswith("</answer>"))


def length(problem: Problem, completion: str, limit: int = 40) -> float:
    """1.0 if the text before the answer has at most `limit` characters (about two tries), else 0.0."""
    return float(len(completion.split("<answer>")[0].strip()) <= limit)


def verdict(completion: str) -> bool | None:
    """True for approve, False for reject, None without a verdict. Case sensitive, the last one counts."""
    approve, reject = completion.rfind("<verdict>approve</verdict>"), completion.rfind("<verdict>reject</verdict>")
    return None if approve == reject else approve > reject


# --- The task ----------------------------------------------------------------------------------------------------


@dataclass
class Countdown:
    """Problems, prompts, demonstrations; `reward_functions` maps a name to f(problem, completion) -> float or None."""

    num_numbers: int = 3
    max_number: int = 20
    max_target: int = 99

    def __post_init__(self):
        if not 2 <= self.num_numbers <= 6 or self.max_number < 2 or self.max_target < 1:
            raise ValueError("countdown needs 2 to 6 numbers, max_number >= 2 and max_target >= 1")
        self.reward_functions = {"correctness": correctness, "format": format, "length": length}

    def sample(self, generator: random.Random, held_out: bool = False) -> Problem:
        """A solvable problem: numbers at random, target from a random expression over them."""
        while True:
            numbers = tuple(generator.randint(1, self.max_number) for _ in range(self.num_numbers))
            problem = Problem(numbers, target=random_expression(numbers, generator)[1])
            if 1 <= problem.target <= self.max_target and problem.held_out == held_out:
                return problem

    def train_problem(self, index: int, seed: int) -> Problem:
        """Problem number `index` of the training stream `seed`: the same on every rank and after a resume."""
        return self.sample(random.Random(f"train {seed} {index}"))

    def evaluation_problems(self, count: int) -> list[Problem]:
        """The fixed evaluation set: distinct problems that `sample` never yields."""
        generator, problems = random.Random("evaluation"), {}
        while len(problems) < count:
            problem = self.sample(generator, held_out=True)
            problems.setdefault((tuple(sorted(problem.numbers)), problem.target), problem)
        return list(problems.values())

    def prompt(self, problem: Problem, role: str = "solver", teammates: tuple = ()) -> list[dict]:
        """Chat messages for `role` (solver or verifier); `teammates` are earlier (name, output) pairs."""
        numbers = ", ".join(map(str, problem.numbers))
        text = f"Numbers: {numbers}. Target: {problem.target}. Use each number exactly once with + - * / and parentheses."
        text += "".join(f"\n{name}: {output}" for name, output in teammates)
        text += {
            "solver": "\nTry a few combinations, then give the expression inside <answer> </answer>.",
            "verifier": "\nRecompute the answer, then end with <verdict>approve</verdict> or <verdict>reject</verdict>.",
        }[role]
        return [{"role": "user", "content": text}]

    def demonstration(self, problem: Problem, generator: random.Random, max_tries: int = 4) -> str:
        """What an imperfect solver writes: random combinations, each computed, until one hits or it is out of tries.

        The number of tries is drawn first, so that longer thinking is right more often; the last try is the answer.
        """
        lines = []
        for _ in range(generator.randint(1, max_tries)):
            guess, value = random_expression(problem.numbers, generator)
            lines.append(f"{guess}={value} {'yes' if value == problem.target else 'no'}")
            if value == problem.target:
                break
        return "\n".join(lines) + f"\n<answer>{guess}</answer>"

    def verifier_demonstration(self, problem: Problem, output: str, generator: random.Random, slip: float = 0.1) -> str:
        """What an imperfect verifier writes about a solver's output; with probability `slip` the verdict is wrong."""
        approve = correctness(problem, output) == 1.0
        try:
            answer = (extract_answer(output) or "").strip()
            check = f"{answer}={evaluate_expression(answer)[0]} {'yes' if approve else 'no'}"
        except ValueError:
            check = "no answer"
        word = "approve" if approve != (generator.random() < slip) else "reject"
        return f"{check}\n<verdict>{word}</verdict>"


def random_expression(numbers: tuple[int, ...], generator: random.Random) -> tuple[str, int]:
    """A random expression over all numbers with integer intermediate results, as (text, value)."""
    parts = [(str(number), number, 3) for number in numbers]  # text, value, binding strength of its outermost operator
    while len(parts) > 1:
        (a, x, p), (b, y, q) = [parts.pop(generator.randrange(len(parts))) for _ in range(2)]
        operator = generator.choice("+-*/" if y and x % y == 0 else "+-*")
        strength = 1 if operator in "+-" else 2
        a = f"({a})" if p < strength else a
        b = f"({b})" if q < strength or (q == strength and operator in "-/") else b
        value = {"+": x + y, "-": x - y, "*": x * y, "/": x // y if y else 0}[operator]
        parts.append((f"{a}{operator}{b}", value, strength))
    return parts[0][:2]
