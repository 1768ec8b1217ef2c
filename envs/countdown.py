"""Countdown: combine the given numbers, each exactly once, with + - * / and parentheses to reach a target.

The task of TinyZero, nano-aha-moment and GRPO-Zero. The model writes its tries and then one expression inside <answer>
</answer>; a rule grades it: parsed by a small grammar with exact rational arithmetic, never executed. The second role,
a verifier, recomputes a solution and approves or rejects it (teams of agents need it). Every random choice comes from
the `random.Random` that is passed in. No dependencies, importable alone.
"""

import random
import re
import zlib
from dataclasses import dataclass, field
from fractions import Fraction

MAX_EXPRESSION_CHARS = 100  # longer than any sensible answer, short enough that hostile numbers stay small
MAX_EXPRESSION_DEPTH = 12  # nested parentheses and signs


@dataclass(frozen=True)
class Problem:
    numbers: tuple[int, ...]  # in the order shown to the model
    target: int
    solution: str = field(default="", compare=False)  # for demonstrations only: prompts and rewards never use it

    @property
    def demonstration(self) -> str:
        """A right answer, in the words of `Countdown.demonstration`."""
        return f"{self.solution}={self.target} yes\n<answer>{self.solution}</answer>"

    @property
    def demonstrations(self) -> list[str]:
        """Right answers of four teachers: after none, one and two wrong tries, and one without any working."""
        generator, wrong = random.Random(f"{self.numbers} {self.target}"), {}
        for _ in range(20):
            guess, value = random_expression(self.numbers, generator)
            if value != self.target:
                wrong[value] = f"{guess}={value} no\n"
        tries = list(wrong.values())
        worked = ["".join(tries[:count]) + self.demonstration for count in range(3)]
        return [*worked, f"<answer>{self.solution}</answer>"]

    @property
    def held_out(self) -> bool:
        """One in 16 belongs to evaluation, by a hash, so that neither pretraining nor training can ever meet it."""
        return zlib.crc32(f"{sorted(self.numbers)}{self.target}".encode()) % 16 == 0


RULE = "Use each number exactly once with + - * / and parentheses."
INSTRUCTIONS = {
    "solver": "Try a few combinations, then give the expression inside <answer> </answer>.",
    "verifier": "Recompute the answer, then end with <verdict>approve</verdict> or <verdict>reject</verdict>.",
}


def evaluate_expression(text: str) -> tuple[Fraction, list[int]]:
    """Exact value of an arithmetic expression, and the integers in it in order.

    sum = product {(+|-) product}; product = factor {(*|/) factor}; factor = integer | (sum) | -factor.
    ValueError for anything else, for division by zero and beyond the caps on length and depth.
    """
    if len(text) > MAX_EXPRESSION_CHARS:
        raise ValueError(f"expression longer than {MAX_EXPRESSION_CHARS} characters")
    tokens = [*re.findall(r"[0-9]+|\S", text), "end of text"]
    tokens.reverse()  # the next token is the last one
    numbers = []

    def parse_factor(depth: int) -> Fraction:
        token = tokens.pop()
        if depth > MAX_EXPRESSION_DEPTH:
            raise ValueError(f"expression nested deeper than {MAX_EXPRESSION_DEPTH}")
        if token[0] in "0123456789":
            numbers.append(int(token))
            return Fraction(numbers[-1])
        if token == "-":
            return -parse_factor(depth + 1)
        if token == "(":
            value = parse_sum(depth + 1)
            if tokens.pop() == ")":
                return value
        raise ValueError(f"unexpected or unclosed {token}")

    def parse_product(depth: int) -> Fraction:
        value = parse_factor(depth)
        while tokens[-1] in "*/":
            operator, factor = tokens.pop(), parse_factor(depth)
            if operator == "/" and factor == 0:
                raise ValueError("division by zero")
            value = value * factor if operator == "*" else value / factor
        return value

    def parse_sum(depth: int) -> Fraction:
        value = parse_product(depth)
        while tokens[-1] in "+-":
            sign = 1 if tokens.pop() == "+" else -1
            value += sign * parse_product(depth)
        return value

    value = parse_sum(0)
    if len(tokens) > 1:
        raise ValueError(f"unexpected {tokens[-1]}")
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
    try:
        evaluate_expression(extract_answer(completion) or "")
    except ValueError:
        return 0.0
    once = completion.count("<answer>") == completion.count("</answer>") == 1
    return float(once and completion.rstrip().endswith("</answer>"))


def length(problem: Problem, completion: str, limit: int = 40) -> float:
    """1.0 if the text before the answer has at most `limit` characters (about two tries), else 0.0."""
    return float(len(completion.split("<answer>")[0].strip()) <= limit)


@dataclass
class Countdown:
    """Problems, prompts, demonstrations; `reward_functions` maps a name to f(problem, completion) -> float."""

    num_numbers: int = 3
    max_number: int = 10
    max_target: int = 99
    reward_weights = (1.0, 0.1, 0.0)  # of the reward functions, in their order

    def __post_init__(self):
        if not 2 <= self.num_numbers <= 6 or self.max_number < 2 or self.max_target < 1:
            raise ValueError("countdown needs 2 to 6 numbers, max_number >= 2 and max_target >= 1")
        self.sample(random.Random(0)), self.sample(random.Random(0), held_out=True)  # raise if the game is too small
        self.reward_functions = {"correctness": correctness, "format": format, "length": length}

    def sample(self, generator: random.Random, held_out: bool = False) -> Problem:
        """A solvable problem: numbers at random, target from a random expression over them."""
        for _ in range(100_000):
            numbers = tuple(generator.randint(1, self.max_number) for _ in range(self.num_numbers))
            problem = Problem(numbers, *random_expression(numbers, generator)[::-1])
            if 1 <= problem.target <= self.max_target and problem.held_out == held_out:
                return problem
        raise ValueError(f"countdown: no problem with {self.num_numbers} numbers up to {self.max_number} was found")

    def train_problem(self, index: int, seed: int) -> Problem:
        """Problem number `index` of the training stream `seed`: the same on every rank and after a resume."""
        return self.sample(random.Random(f"train {seed} {index}"))

    def evaluation_problems(self, count: int) -> list[Problem]:
        """The fixed evaluation set: up to `count` problems (fewer if the game is small), never in training. The same
        numbers in another order are another problem."""
        generator, problems = random.Random("evaluation"), {}
        for _ in range(50 * count):
            if len(problems) < count:
                problems[self.sample(generator, held_out=True)] = None
        return list(problems)

    def prompt(self, problem: Problem, role: str = "solver", teammates: tuple = ()) -> list[dict]:
        """Chat messages for `role` (solver or verifier); `teammates` are earlier (name, output) pairs."""
        text = f"Numbers: {', '.join(map(str, problem.numbers))}. Target: {problem.target}. {RULE}"
        lines = [text, *(f"{name}: {output}" for name, output in teammates), INSTRUCTIONS[role]]
        return [{"role": "user", "content": "\n".join(lines)}]

    def demonstration(self, problem: Problem, generator: random.Random, max_tries: int = 6, ideas: int = 6) -> str:
        """What an imperfect solver writes: a few combinations, each computed, until one hits or it gives up.

        A try is the closest to the target of `ideas` random expressions, and never a value that was tried before. The
        last try is the answer. Most give up early, so longer thinking is right more often.
        """
        lines, tried = [], set()
        for _ in range(1 + int(max_tries * generator.random() ** 3)):
            choices = [random_expression(problem.numbers, generator) for _ in range(ideas)]
            choices = [choice for choice in choices if choice[1] not in tried] or choices
            guess, value = min(choices, key=lambda choice: abs(choice[1] - problem.target))
            tried.add(value)
            lines.append(f"{guess}={value} {'yes' if value == problem.target else 'no'}")
            if value == problem.target:
                break
        return "\n".join(lines) + f"\n<answer>{guess}</answer>"

    def verifier_demonstration(self, problem: Problem, output: str, generator: random.Random, slip: float = 0.1) -> str:
        """What an imperfect verifier writes about a solver's output; with probability `slip` the verdict is wrong."""
        approve = correctness(problem, output) == 1.0
        answer = (extract_answer(output) or "").strip()
        try:
            check = f"{answer}={evaluate_expression(answer)[0]} {'yes' if approve else 'no'}"
        except ValueError:
            check = "no answer"
        return f"{check}\n<verdict>{'approve' if approve != (generator.random() < slip) else 'reject'}</verdict>"


def random_expression(numbers: tuple[int, ...], generator: random.Random) -> tuple[str, int]:
    """A random expression over all numbers with integer intermediate results, as (text, value)."""
    parts = [(str(number), number, 3) for number in numbers]  # text, value, binding strength of its outermost operator
    while len(parts) > 1:
        (a, x, p), (b, y, q) = [parts.pop(generator.randrange(len(parts))) for _ in range(2)]
        operator = generator.choice("+-*/" if y and x % y == 0 else "+-*")
        strength = 1 if operator in "+-" else 2
        a = f"({a})" if p < strength else a
        b = f"({b})" if q < strength or (q == strength and operator in "-/") else b
        values = {"+": x + y, "-": x - y, "*": x * y, "/": x // y if y else 0}
        parts.append((f"{a}{operator}{b}", values[operator], strength))
    return parts[0][:2]
