"""Questions of the search task, and how they are read from a data file."""

import ast
import json
import re
import zlib
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class Problem:
    question: str
    answers: tuple[str, ...]  # any of them is right
    hops: int = field(default=0, compare=False)  # 0: unknown
    path: tuple[tuple[str, str, str], ...] = field(default=(), compare=False)  # facts, for demonstrations only
    steps: tuple[tuple[str, str], ...] = field(default=(), compare=False)  # (query, result) of its examiner
    privileged: str = field(default="", compare=False)  # what stands before the question for a teacher only

    @property
    def place(self) -> tuple[int, str]:
        """A hash of the question and the question: equal for copies, whatever the order of lines."""
        key = " ".join(self.question.lower().split()).rstrip(" .?!") + "?"
        return zlib.crc32(key.encode("utf-8", "replace")), key

    @property
    def held_out(self) -> bool:
        """One in 16 belongs to evaluation, and training never meets it."""
        return self.place[0] < 2**28


class Request(NamedTuple):
    """What an examiner is asked for: a question about a chain of `hops` searches that begins in a document."""

    document: str
    hops: int


def read_questions(path: str) -> tuple[list[Problem], list[Problem]]:
    """The training and the evaluation side of a file. A hash of the question decides, neither is empty.
    Copies of a question stay, on the same side."""
    from envs.data_files import read_rows

    rows = [read_line(row, place) for place, row in read_rows(path)]
    problems = sorted(rows, key=lambda row: (row.place, row.question, row.answers))
    places = sorted({row.place for row in rows})
    if len(places) < 2:
        raise ValueError(f"{path}: found {len(places)} different questions, expected at least 2")
    held_out = {row.place for row in rows if row.held_out} or {places[0]}
    if len(held_out) == len(places):
        held_out.remove(places[-1])
    return [row for row in problems if row.place not in held_out], [row for row in problems if row.place in held_out]


QUOTED = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""


def read_list(cell: str) -> list | None:
    """The list in a cell of .csv: of JSON, of Python (pandas writes ['a', 'b']) or of numpy (['a' 'b'])."""
    try:
        return json.loads(cell)
    except ValueError:
        is_list = re.fullmatch(rf"\[\s*(?:{QUOTED}[\s,]*)+\]\s*", cell)
    try:
        return [ast.literal_eval(text) for text in re.findall(QUOTED, cell)] if is_list else None
    except (SyntaxError, ValueError):  # a line break, or a backslash that begins no letter
        return None


def read_line(row: dict, where: str) -> Problem:
    """One row of the file as a problem; a ValueError of one sentence if it is broken."""

    def check(condition: bool, found: str, expected: str):
        if not condition:
            raise ValueError(f"{where}: found {found}, expected {expected}")

    keys = f"among the keys {', '.join(row):.80}"
    check("question" in row, f"no question {keys}", "a key question")
    key = next((key for key in ("golden_answers", "answers", "answer") if key in row), None)
    check(key is not None, f"no answer {keys}", "a key golden_answers or answers or answer")
    answers = row[key] if isinstance(row[key], list) else [row[key]]
    if isinstance(row[key], str) and re.match(r"\[\s*['\"]", row[key]):
        answers = read_list(row[key])
        check(answers is not None, f"{key} {row[key]:.60}", "a list of texts in quotes")
    check(len(answers) > 0, f"an empty {key}", "at least one answer")
    for name, text in [("question", row["question"]), *((key, answer) for answer in answers)]:
        check(isinstance(text, str), f"{name} of type {type(text).__name__}", "a string")
        check(text.strip() != "", f"an empty {name}", "some text")
        check(not re.search("[\ud800-\udfff]", text), f"half a surrogate pair in {name}", "whole characters")
    return Problem(row["question"].strip(), tuple(answer.strip() for answer in answers))
