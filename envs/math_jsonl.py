"""Questions with a checkable answer from any data file (GSM8K, MATH, your own), graded by rule.

In a row the question is under `prompt`, `question` or `problem`, the answer under `answer` or `solution`: the
result, or a solution that ends in GSM8K's `#### 72`, `\\boxed{72}` or `<answer>72</answer>`. A broken line raises a
ValueError of one sentence. What a model writes is compared, never executed. The style gsm8k has the stricter prompt and
rewards of GDPO's GSM8K demo (arXiv 2601.05242, official code).
"""

import hashlib
import random
import re
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction

# 72 | 1,000 | .5 | 1.5e-3, ASCII digits only; the exponent has at most two digits because 10**(10**9) would not return
DIGITS = r"((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?(?:e[-+]?[0-9]{1,2})?|\.[0-9]+)"
NUMBER = re.compile(rf"\$?([-+]?) ?\$?{DIGITS}(?: ?/ ?{DIGITS})? ?%?")
RULES = {
    "solver": "Reason step by step, then give the final answer inside <answer> </answer>.",
    "verifier": "Check every step, then end with <verdict>approve</verdict> or <verdict>reject</verdict>.",
    "gsm8k": "Reason step by step inside <think> </think>, then, on a new line, give the final answer, an integer, "
    "inside <answer> </answer>. Write nothing else.",
}
LATEX_FRACTION = re.compile(r"(?<![0-9])\\[dt]?frac\{(-?[0-9.,]+)\}\{([0-9.,]+)\}")


@dataclass(frozen=True)
class Problem:
    question: str
    answer: str  # the final answer alone
    demonstration: str | list[str] | None = None  # the text of a right answer, or several, for scripts that learn from it


def extract_answer(text: str) -> str | None:
    """The last <answer> </answer> block, or the \\boxed{ } in it; without one the last \\boxed{ }, else the line after
    the last ####, else None."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    has_tags = end >= 0 and start >= 0
    if has_tags:
        text = text[start + len("<answer>") : end]
    if (start := text.rfind("\\boxed{")) >= 0:
        start, depth = start + len("\\boxed{"), 1
        for brace in re.compile("[{}]").finditer(text, start):
            depth += 1 if brace.group() == "{" else -1
            if depth == 0:
                return text[start : brace.start()].strip()
    if has_tags:
        return text.strip()
    _, mark, rest = text.rpartition("####")
    return rest.strip().split("\n", 1)[0].strip() if mark else None


def canonical(text: str) -> Fraction | str:
    """The exact value if the text is one number, else the text in lower case with single spaces.

    `1,000`, `$72`, `3/4`, `\\frac{3}{4}`, `0.5`, `-2.` and `1e3` are numbers. Dollar and percent signs are dropped:
    `50%` equals 50, not 1/2, because data sets that ask "what percent" store 50. Other units stay: `5 km` is text.
    """
    text = " ".join(text.lower().replace("\u2212", "-").replace("\\$", "$").replace("\\%", "%").split()).rstrip(" .")
    if len(text) > 1 and text[0] == text[-1] == "$":  # LaTeX mathematics
        text = text[1:-1].strip(" .")
    match = NUMBER.fullmatch(LATEX_FRACTION.sub(r"\1/\2", text[:100]))
    if len(text) > 100 or not match:  # no number is that long: hostile digits stay cheap
        return text
    sign, top, bottom = match.groups(default="1")
    top, bottom = Fraction(top.replace(",", "")), Fraction(bottom.replace(",", ""))
    return text if bottom == 0 else (-top if sign == "-" else top) / bottom


def correctness(problem: Problem, completion: str) -> float:
    """1.0 if the completion's final answer equals the problem's, as a number or as text, else 0.0."""
    return float(canonical(extract_answer(completion) or "") == canonical(problem.answer))


def format(problem: Problem, completion: str) -> float:
    """1.0 if the completion ends with its only <answer> </answer> pair and this holds some text."""
    once = completion.count("<answer>") == completion.count("</answer>") == 1
    return float(once and completion.rstrip().endswith("</answer>") and bool(extract_answer(completion)))


def length(problem: Problem, completion: str, limit: int = 1000) -> float:
    """1.0 if the text before the answer has at most `limit` characters (about 250 tokens), else 0.0."""
    return float(len(completion.split("<answer>", 1)[0].strip()) <= limit)


def gsm8k_answer(completion: str) -> str:
    """What follows the last <answer>, up to </answer>, without outer spaces; without tags the whole text."""
    return completion.split("<answer>")[-1].split("</answer>")[0].strip()


def gsm8k_correctness(problem: Problem, completion: str) -> float:
    """1.0 if the answer is the problem's, character for character, else 0.0."""
    return float(gsm8k_answer(completion) == problem.answer)


def gsm8k_integer(problem: Problem, completion: str) -> float:
    """1.0 if the answer is all digits (so neither -2 nor 1,000), else 0.0."""
    return float(gsm8k_answer(completion).isdigit())


def gsm8k_format(problem: Problem, completion: str) -> float:
    """1.0 if the completion is a think block, a new line and the only answer block, and nothing else, else 0.0."""
    once = completion.count("<answer>") == completion.count("</answer>") == 1  # this also keeps the search linear
    return float(once and bool(re.search(r"^<think>.*?</think>\n<answer>.*?</answer>$", completion, re.DOTALL)))


def read_line(row: dict, where: str) -> Problem:
    """One row of the file as a problem; a ValueError of one sentence if it is broken."""

    def check(condition: bool, found: str, expected: str):
        if not condition:
            raise ValueError(f"{where}: found {found}, expected {expected}")

    texts = []
    numbers = (str, int, Decimal, float)  # floats of tables
    for keys, types in ((("prompt", "question", "problem"), (str,)), (("answer", "solution"), numbers)):
        key = next((key for key in keys if row.get(key) is not None), None)
        check(key is not None, f"no {keys[0]}", f"a key {' or '.join(keys)}")
        kind = type(row[key])  # not isinstance: True would pass for an int
        check(kind is str or row[key] == row[key], f"{key} NaN", "a number")
        check(kind in types, f"{key} of type {kind.__name__}", "a string or a number" if int in types else "a string")
        gold = extract_answer(str(row[key])) if int in types else None
        texts.append(str(row[key]).strip() if gold is None else gold)
        check(canonical(texts[-1]) != "", f"an empty {key}", "some text")
        half = re.search("[\ud800-\udfff]", texts[-1])  # legal JSON, but no tokenizer takes it
        check(not half, f"half a surrogate pair in {key}", "whole characters")
    return Problem(*texts, row.get("demonstration"))


class MathJsonl:
    """The task of one file, with the interface of `Countdown`. A hash of the question decides its side, training or
    evaluation: no seed and no order of lines changes the split, and copies of a question fall on the same side."""

    def __init__(self, path: str | None, style: str = "plain", evaluation_share: float = 1 / 16):
        if path is None:
            raise ValueError("--env gsm8k needs --dataset, such as hub:openai/gsm8k:main:train, or a file")
        if not 0 < evaluation_share < 1:
            raise ValueError(f"evaluation_share is {evaluation_share}, expected a number between 0 and 1")
        from envs.data_files import read_rows

        rows = [read_line(row, place) for place, row in read_rows(path, Decimal)]  # which keeps 0.10 as written
        if style == "gsm8k":  # its rewards ask for an integer without commas
            rows = [replace(row, answer=row.answer.replace(",", "")) for row in rows]
        self.rows = rows  # all, in the order of the file
        by_hash = {}  # in [0, 1): the rows that share a question
        for row in rows:
            digest = hashlib.sha256(" ".join(row.question.lower().split()).encode()).digest()
            by_hash.setdefault(int.from_bytes(digest[:8], "big") / 2**64, []).append(row)
        if len(by_hash) < 2:
            raise ValueError(f"{path}: found {len(by_hash)} different questions, expected at least 2")
        ranked = sorted(by_hash)
        cut = min(max(sum(value < evaluation_share for value in ranked), 1), len(ranked) - 1)  # neither side is empty
        self.evaluation_rows = [by_hash[value][0] for value in ranked[:cut]]
        self.train_rows = [row for value in ranked[cut:] for row in by_hash[value]]
        self.reward_functions = {"correctness": correctness, "format": format, "length": length}
        self.reward_weights, self.style = (1.0, 0.1, 0.0), style
        if style == "gsm8k":
            functions = (gsm8k_correctness, gsm8k_integer, gsm8k_format)
            self.reward_functions = dict(zip(("correctness", "integer", "format"), functions))
            self.reward_weights = (1.0, 1.0, 1.0)
        self._order_of, self._order = None, []

    def sample(self, generator: random.Random, held_out: bool = False) -> Problem:
        """A random row of the training side, or of the evaluation side."""
        return generator.choice(self.evaluation_rows if held_out else self.train_rows)

    def train_problem(self, index: int, seed: int) -> Problem:
        """Row `index` of endless epochs, each a permutation fixed by `seed`: same on all ranks and after a resume."""
        epoch, position = divmod(index, len(self.train_rows))
        if self._order_of != (seed, epoch):
            self._order_of, self._order = (seed, epoch), list(self.train_rows)
            random.Random(f"train {seed} {epoch}").shuffle(self._order)
        return self._order[position]

    def evaluation_problems(self, count: int) -> list[Problem]:
        """The first `count` held-out questions in a fixed order, or all when the file has fewer."""
        return self.evaluation_rows[:count]

    def prompt(self, problem: Problem, role: str = "solver", teammates: tuple = ()) -> list[dict]:
        """Chat messages for `role` (solver or verifier); `teammates` are earlier (name, output) pairs."""
        lines = [problem.question, *(f"{name}: {output}" for name, output in teammates)]
        return [{"role": "user", "content": "\n".join([*lines, RULES["gsm8k" if self.style == "gsm8k" else role]])}]
