"""Questions with a checkable answer from any data file (GSM8K, MATH, your own), graded by rule.

In a row the question, a text or chat messages, is under `prompt`, `question` or `problem`, the answer under `answer`,
`solution` or verl's `reward_model`: the result, or a solution that ends in GSM8K's `#### 72`, `\\boxed{72}` or
`<answer>72</answer>`. A broken line raises a ValueError of one sentence. What a model writes is compared, never
executed: rules bring both answers into one form, and math-verify (github.com/huggingface/Math-Verify) decides about
expressions. The style gsm8k has the stricter prompt and rewards of GDPO's GSM8K demo (arXiv 2601.05242, official code)
and needs no package. Importable alone.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import threading
import unicodedata
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

PACKAGE = "math-verify[antlr4_13_2]==0.9.0"
TIME_LIMIT = 4  # seconds of a core that math-verify has for one comparison
MAX_LENGTH = 400  # characters; longer answers are compared letter by letter
ROLES = ("system", "developer", "user", "assistant", "tool")
RULES = {
    "solver": "Reason step by step, then give the final answer inside <answer> </answer>.",
    "verifier": "Check every step, then end with <verdict>approve</verdict> or <verdict>reject</verdict>.",
    "gsm8k": "Reason step by step inside <think> </think>, then, on a new line, give the final answer, an integer, "
    "inside <answer> </answer>. Write nothing else.",
}


@dataclass(frozen=True)
class Problem:
    question: str
    answer: str  # the final answer alone
    demonstration: str | list[str] | None = None  # the text of a right answer, or several, for scripts that learn from it
    where: str = field(default="", compare=False, repr=False)  # file and line
    earlier: tuple[dict, ...] = field(default=(), hash=False)  # chat messages before the question


# --- Rewards ------------------------------------------------------------------------------------


def correctness(problem: Problem, completion: str) -> float:
    """1.0 if the completion's final answer is the problem's: as a number, as mathematics or as text. Else 0.0."""
    answer = extract_answer(completion)
    if answer is None:
        bold = BOLD.findall(spoken(completion))
        answer = bold[-1] if bold else ""
    return float(same_answer(problem.answer, answer))


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


def read_chat(row: dict, check) -> tuple[tuple[dict, ...], dict]:
    """The messages before the question, and the row with the question and the answer as texts.

    A file for verl has chat messages under prompt, and the answer as ground_truth in reward_model.
    """
    judge = row.get("reward_model")
    if isinstance(judge, dict):
        row = row | {"ground_truth": judge.get("ground_truth")}
    key = next((key for key in ("prompt", "question", "problem") if row.get(key) is not None), None)
    messages = row.get(key)
    if not isinstance(messages, list):
        return (), row
    for message in messages:
        is_message = isinstance(message, dict) and message.get("role") in ROLES
        check(is_message and isinstance(message.get("content"), str), f"{message!r:.80}", f"a text or messages as {key}")
    asks = bool(messages) and messages[-1]["role"] == "user"
    check(asks, f"{messages!r:.80}", f"a user's message at the end of {key}")
    # Tables have a null where a message lacks what others have.
    earlier = [{name: value for name, value in message.items() if value is not None} for message in messages[:-1]]
    return tuple(earlier), row | {key: messages[-1]["content"]}


def read_line(row: dict, where: str) -> Problem:
    """One row of the file as a problem; a ValueError of one sentence if it is broken."""

    def check(condition: bool, found: str, expected: str):
        if not condition:
            raise ValueError(f"{where}: found {found}, expected {expected}")

    earlier, row = read_chat(row, check)
    texts = []
    filled = ", ".join(key for key in row if row[key] is not None)
    numbers = (str, int, Decimal, float)  # floats of tables
    for keys, types in ((("prompt", "question", "problem"), (str,)), (("answer", "solution", "ground_truth"), numbers)):
        key = next((key for key in keys if row.get(key) is not None), None)
        check(key is not None, f"no {keys[0]} among the keys {filled:.80}", f"a key {' or '.join(keys)}" + ", or --reward" * (int in types))
        kind = type(row[key])  # not isinstance: True would pass for an int
        check(kind is str or row[key] == row[key], f"{key} NaN", "a number")
        check(kind in types, f"{key} of type {kind.__name__}", "a string or a number" if int in types else "a string")
        text = str(row[key])
        if int in types:
            gold = extract_answer(text)
            text = spoken(text) if gold is None else gold
        texts.append(text.strip())
        check((normal(texts[-1]) if int in types else texts[-1]) != "", f"an empty {key}", "some text")
        half = re.search("[\ud800-\udfff]", texts[-1])  # legal JSON, but no tokenizer takes it
        check(not half, f"half a surrogate pair in {key}", "whole characters")
    return Problem(*texts, row.get("demonstration"), where, earlier)


def report(path: str, rows: list[Problem], style: str) -> None:
    """Print what kinds of answers a file has, and which lines have prose, that only the same prose equals.

    ValueError of one sentence if math-verify is missing.
    """
    if style != "gsm8k" and importlib.util.find_spec("math_verify") is None:
        raise ValueError(f"{path}: answers are compared by math-verify, pip install '{PACKAGE}'")
    if os.environ.get("RANK", "0") != "0":
        return
    kinds = [kind_of(normal(row.answer)) for row in rows]
    if style == "gsm8k":  # compares characters, and asks for an integer
        kinds = ["number" if re.fullmatch(r"-?\d+", row.answer) else "text" for row in rows]
    counts = ", ".join(f"{kinds.count(name)} {name}s" for name in ("number", "expression", "text"))
    print(f"{path}: the answers are {counts}")
    texts = [row for row, name in zip(rows, kinds) if name == "text"]
    prose = [row.where for row in texts if len(row.answer) > 100 or row.answer.count(" ") > 3 or style == "gsm8k"]
    if prose:
        more = f" and {len(prose) - 5} more" if len(prose) > 5 else ""
        reason = "is prose without a mark (####, \\boxed{}, <answer>), which only the same words equal"
        if style == "gsm8k":
            reason = "is no integer, so no answer earns its reward; leave out --env gsm8k"
        print(f"{', '.join(prose[:5])}{more}: the answer {reason}")


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
            text = " ".join([*(message["content"] for message in row.earlier), row.question])
            digest = hashlib.sha256(" ".join(text.lower().split()).encode()).digest()
            by_hash.setdefault(int.from_bytes(digest[:8], "big") / 2**64, []).append(row)
        if len(by_hash) < 2:
            raise ValueError(f"{path}: found {len(by_hash)} different questions, expected at least 2")
        ranked = sorted(by_hash)
        cut = min(max(sum(value < evaluation_share for value in ranked), 1), len(ranked) - 1)  # neither side is empty
        self.evaluation_rows = [row for value in ranked[:cut] for row in by_hash[value]]
        self.train_rows = [row for value in ranked[cut:] for row in by_hash[value]]
        self.reward_functions = {"correctness": correctness, "format": format, "length": length}
        self.reward_weights, self.style = (1.0, 0.1, 0.0), style
        if style == "gsm8k":
            functions = (gsm8k_correctness, gsm8k_integer, gsm8k_format)
            self.reward_functions = dict(zip(("correctness", "integer", "format"), functions))
            self.reward_weights = (1.0, 1.0, 1.0)
        self._order_of, self._order = None, []
        report(path, rows, style)

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
        """The first `count` held-out rows in a fixed order, copies too, or all when the file has fewer."""
        return self.evaluation_rows[:count]

    def prompt(self, problem: Problem, role: str = "solver", teammates: tuple = ()) -> list[dict]:
        """Chat messages for `role` (solver or verifier); `teammates` are earlier (name, output) pairs."""
        lines = [problem.question, *(f"{name}: {output}" for name, output in teammates)]
        content = "\n".join([*lines, RULES["gsm8k" if self.style == "gsm8k" else role]])
        return [*problem.earlier, {"role": "user", "content": content}]


# --- Where the answer stands --------------------------------------------------------------------

BLOCK = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.IGNORECASE | re.DOTALL)
BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=[^\s}])")
UNBRACED = re.compile(r"\$?[^\s$]*")  # \boxed 72
SPACE = r"(?:[\s$]|\\[()\[\],; ]|\\q?quad(?![a-z]))*"
BETWEEN = re.compile(  # $\boxed{1}$ and $\boxed{2}$ | \boxed{1} \quad \text{or} \quad x = \boxed{2}
    rf"{SPACE}(?:,|;|,?\s*(?:and|or)|\\text\{{,?\s*(?:and|or)\s*\}}){SPACE}(?:\w+\s*=\s*)?"
)
MARK = re.compile(  # ####, Answer:, or a heading with something below it
    r"####|\bans(?:wer)?(?:\s+is)?[\s*]*[:：]|答案\s*[是为:：]|^[#* \t]*(?:the\s+)?(?:final\s+)?answer[* \t]*$(?=\s*\S)",
    re.IGNORECASE | re.MULTILINE,
)
WEAK_MARK = re.compile(  # if there is no MARK; but not: the answer is rounded, a wrong answer is
    r"(?:(?<!whether )\b(?:the|our|my)\s+(?:(?:final|correct|right)\s+)?answer\s+is\b"
    r"|^[#* \t]*(?:final\s+)?answer\s+is\b|\banswer[\s*]*(?:=>?|→))"
    r"(?:\s+(?:therefore|thus|then|simply|just)\b,?)?"
    r"(?=\s*(?-i:(?:yes|no|true|false|none|minus|negative|option|choice)\b|(?!\s|[a-z]{2}|a\s)))",
    re.IGNORECASE | re.MULTILINE,
)
DISPLAY = re.compile(r"(?:\$\$|\\\[)((?:(?!\$\$|\\\]).)+)(?:\$\$|\\\])[.,]?[ \t]*(?:\n|$)", re.DOTALL)
SENTENCE = re.compile(  # The largest n is 34; but no other value beside it
    r"^(?!.*\b(?:[Nn]ot?|or|and)\b)[A-Z][^.,]{0,99}? is (?=(?:\$[^$]+\$|\\\(.+\\\)|[-\d(]\S*)\W*$)"
)
NEXT_SENTENCE = re.compile(  # The answer is 12. I hope it is correct.
    r"(?:(?<=[\d)\]}$*%])|(?<=[a-z]{3}))\.\s+"
    r"(?:I hope|So|Therefore|Thus|Hence|Because|Since|This means|Note|Explanation)\b.*"
    r"|(?<=[\d)\]}$*%]),? \(?(?:since|because)\b.*"
)
BOLD = re.compile(r"(?<![\w)\]}*])\*\*(?=\S)([^*\n]+)(?<=\S)\*\*(?![\w(*])")  # but not in x**2 + y**2
PREFIX = re.compile(
    r"(?:\\text\{ ?)?(?:(?:so|thus|hence|therefore),? )?(?:the )?(?:(?:final|correct) )?"
    r"(?:(?:answer|result)\b[*\s]*(?:(?:is|are)\b|[:=：]|(?=[\d$\\(-])|\n|$)"
    r"|(?:option|choice)(?: is)?(?=[ (]+[A-J]\b))[\s*]*[:=：]?[\s*]*\}?",
    re.IGNORECASE,
)
BRACE = re.compile(r"(?<!\\)[{}]")


def closing_brace(text: str, start: int) -> int:
    """Where the brace that opens at `start` is closed; -1 if it is not."""
    depth = 0
    for brace in BRACE.finditer(text, start):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return brace.start()
    return -1


def last_box(text: str) -> str | None:
    """What is in the last \\boxed{ }; of several with only a comma or `and` between them, all."""
    contents = []
    following = None  # where the box after this one begins
    for box in reversed(list(BOX.finditer(text))):
        start = box.end()
        is_braced = text[start] == "{"
        end = closing_brace(text, start) if is_braced else UNBRACED.match(text, start).end()
        is_next = following and following - end < 40 and BETWEEN.fullmatch(text, end + 1, following)
        if end < 0 or (contents and not is_next):
            break
        contents.append(text[start + is_braced : end].strip())
        following = box.start()
    return ", ".join(dict.fromkeys(reversed(contents))) if contents else None


def spoken(text: str) -> str:
    """A text without its thoughts, also without one that has no end."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def extract_answer(text: str) -> str | None:
    """The final answer in a text, None without a mark. What comes before </think> does not count, and
    of a thought that was cut off only <answer> </answer>.

    The last <answer> </answer>, or the \\boxed{ } in it; else the last \\boxed{ } or \\fbox{ }; else
    the line or display after the last ####, `Answer:`, a heading `Answer`, or `the answer is`.
    """
    text = text.rpartition("</think>")[2]
    blocks = BLOCK.findall(text)
    text = blocks[-1] if blocks else text
    text = text if blocks else spoken(text)
    box = last_box(text)
    if box is not None:
        return box
    if blocks:
        return text.strip()
    marks = list(MARK.finditer(text)) or list(WEAK_MARK.finditer(text))
    if not marks:
        return None
    rest = text[marks[-1].end() :].lstrip(" *}\n")
    rest = PREFIX.sub("", rest, count=1) if PREFIX.match(rest) else rest  # #### Final Answer
    rest = rest.lstrip()
    display = DISPLAY.match(rest)
    if display and not DISPLAY.search(rest, display.end()):
        return display[1].strip()
    lines = [line for line in rest.split("\n") if re.search(r"\w", line)]
    line = NEXT_SENTENCE.sub("", lines[0]) if lines else ""
    bold = BOLD.findall(line)
    if len(bold) == 1:
        return bold[0]
    return SENTENCE.sub("", line, count=1).lstrip(" *").rstrip(" *").removesuffix("**.")


# --- One form for what means the same -----------------------------------------------------------

SYMBOLS = {
    "−‐‑–—－": "-", "×": r"\times ", "·⋅": r"\cdot ", "÷／": "/", "＋": "+", "＝": "=", "±": r"\pm ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "π": r"\pi ", "θ": r"\theta ",
    "∞": r"\infty ", "∪": r"\cup ", "∈": r"\in ", "°º": r"^\circ ", "％": "%", "＄": "$", "¢": r"\text{ cents}",
    "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "，": ",", "：": ":", "．。": ".",
    "（": "(", "）": ")", "’": "'", "“”": '"', "\u00a0\u2007\u2009\u202f\u3000": " ",
}  # fmt: skip
SYMBOLS = {ord(symbol): text for symbols, text in SYMBOLS.items() for symbol in symbols}
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
FUNCTIONS = (
    r"(?<![\\a-zA-Z])(sqrt|sinh?|cosh?|tanh?|cot|sec|csc|arc(?:sin|cos|tan)|ln|log|exp|pi|infty)"
    r"(?![a-zA-Z])"
)
REWRITES = (  # in this order
    (BOLD, r"\1"),  # **Answer:** 12
    (r"[⁰¹²³⁴-⁹⁻]+", lambda match: f"^{{{match.group().translate(SUPERSCRIPTS)}}}"),
    (r"\d", lambda match: str(unicodedata.decimal(match.group()))),  # of any script
    (r"\\!\s*", ""),
    (r"\\varnothing|∅", r"\\emptyset"),
    (r"(?<!\\)\\(?:[,;: ()\[\]]|q?quad(?![a-z]))|~|\s+", " "),
    (r"\{ ?, ?\}", ","),
    (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![a-zA-Z])", ""),
    (r"\\(?:text(?:bf|it|rm|normal)|math(?:rm|bf|it)|mbox|operatorname) ?(?=\{)", r"\\text"),
    (r"\\text\{ ?([:.,]) ?\}", r"\1"),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\frac ?(\d) ?(?=[\d{])", r"\\frac{\1}"),
    (r"\\frac ?\{([^{}]*)\} ?(\d)", r"\\frac{\1}{\2}"),
    (r"\\frac ?\{([^{}]*)\} ?\{", r"\\frac{\1}{"),
    (r"√ ?(\w+)", r"\\sqrt{\1}"),
    (r"(?:√|(?<![a-zA-Z\\])sqrt) ?\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\\sqrt ?(\d)(?!\d)", r"\\sqrt{\1}"),
    (r"(?<=[\w)}]) ?\*\* ?(\w+)", r"^{\1}"),  # x**2
    (r"([_^])\{ ?(\w) ?\}", r"\1\2"),
    (r"\\([lgn]e)q(?![a-zA-Z])", r"\\\1"),
    (r"\\lt(?![a-zA-Z])", "<"),
    (r"\\gt(?![a-zA-Z])", ">"),
    (r" !=", r"\\ne "),
    (r"<=", r"\\le "),
    (r">=", r"\\ge "),
    (r"\\degree(?![a-z])|\^ ?\{? ?\\circ ?\}?", r"^\\circ "),
    (r"\\%", "%"),
    (r"\^\{? ?\\text\{ ?(st|nd|rd|th) ?\}\}?", r"\\text{\1}"),
    (r"\b([AaPp])\. ?[Mm]\b\.?", r"\1m"),
    (r"(?i)\b(?:minus|negative) (?=[\d$\\.])", "-"),
    (r"(?<=[\d})i]) ?\\approx.*", ""),
    (r",? ?(?:\\text\{,? ?(?:and|or),? ?\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])) ?,?", ","),
    (r"(?<![\w\\])(USD|EUR|GBP|INR|Rs)\.? ?(?=\d)", lambda match: UNITS[match[1].lower()]),
)
AFTER_WRAPPERS = (  # once nothing stands around the answer; last, spaces that mean nothing
    (r"(?<![a-zA-Z\\])(?<![a-zA-Z] )(?:(?i:infinity|inf)|oo)(?! ?[a-zA-Z])", r"\\infty "),
    (r"(?<=[)\]]) ?U ?(?=[(\[])", r"\\cup "),
    (r"\\mathbb ?R(?![a-zA-Z])|ℝ|\(-\\infty ?, ?\+?\\infty ?\)", r"\\mathbb{R}"),
    (r"(?i)(?:^|(?<==)) ?(?:all |the )?real(?:s| numbers)$", r"\\mathbb{R}"),
    (r" ?([^\w\\ ])(?:(?<!\d[)}]) | (?![a-zA-Z]{3}))?", r"\1"),  # but \frac{3}{4} cup, (5) men
    (r" (?=\\)|(?<=\\\\) ", ""),
    (r"(\\[a-zA-Z]+) (?![a-zA-Z])", r"\1"),
)
REWRITES = [(re.compile(pattern), text) for pattern, text in REWRITES]
AFTER_WRAPPERS = [(re.compile(pattern), text) for pattern, text in AFTER_WRAPPERS]
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:([, '])\d{3})(?:\1\d{3})*(?![\d/]|,\d)")  # 1,000 or 1 000
PARENTHESES = re.compile(r"(?:\(|(?=[A-J]\)))([^(),;]*)\)")  # (5), (B), B)


def unwrap(text: str) -> str:
    """An answer without what stands around it: boxes, `The answer is`, quotes, ( ), a full stop."""
    before = None
    while text != before:
        before = text
        text = re.sub(r"(?<![.,;:])[.,;:]$", "", text.strip())
        for opening in ("\\boxed{", "\\fbox{", "\\text{", "{"):
            start = len(opening) - 1
            if text.startswith(opening) and closing_brace(text, start) == len(text) - 1:
                text = text[start + 1 : -1]
        text = re.sub(r"^(?:#{2,}|=) ?", "", text)
        if PREFIX.match(text):
            text = PREFIX.sub("", text, count=1) or text
        if len(text) > 2 and text[0] == text[-1] and text[0] in "\"'`*_":
            text = text[1:-1]
        inside = PARENTHESES.fullmatch(text)
        text = inside[1] if inside else text
    return text


def normal(text: str) -> str:
    """One form for symbols, spaces, wrappers and separators of thousands that are written in several ways."""
    if len(text) > MAX_LENGTH:
        return " ".join(text.split())
    text = text.translate(SYMBOLS)
    dollars = re.compile(r"(?<!\\)\$")
    if len(dollars.findall(text)) % 2 == 0:
        text = dollars.sub(" ", text)  # $mathematics$; a single one is a currency
    text = text.replace("\\$", "$")
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    text = unwrap(text)
    if not re.search(r"[(\[]|\\\{", text):  # (100,200) is a pair
        text = THOUSANDS.sub(lambda match: re.sub("[, ']", "", match.group()), text)
    for pattern, replacement in AFTER_WRAPPERS:
        text = pattern.sub(replacement, text)
    return unwrap(text)


# --- Numbers and units --------------------------------------------------------------------------

DIGITS = r"(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?"
NUMBER = re.compile(rf"([-+]?) ?(?:(\d+) )?(-?{DIGITS})(?:/(-?{DIGITS}))?")  # -2 | 2 3/4 | .5/3 | 3e8
FRACTION = re.compile(rf"\\frac\{{(-?{DIGITS})\}}\{{(-?{DIGITS})\}}$")
POWER_OF_TEN = re.compile(r"(?:(?<=\d) ?(?:\\times|\\cdot|\*|x) ?|(?<![\w.}]))10\^\{?([-+]?\d{1,3})\}?$")
REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\{?(\d+)\}?")
UNITS = {  # each with its other names
    "cm": "centimeter centimetre", "mm": "millimeter millimetre", "km": "kilometer kilometre",
    "m": "meter metre", "in": "inch inche", "ft": "foot feet", "yd": "yard", "mi": "mile", "hr": "h hour",
    "min": "minute", "s": "sec second", "kg": "kilogram", "g": "gram", "ml": "milliliter",
    "l": "liter litre", "lb": "pound", "$": "dollar usd", "€": "euro eur", "£": "gbp", "yen": "jpy",
    "₹": "rupee inr rs", "%": "percent percentage pct", "°": "degree deg", "°c": "celsius", "°f": "fahrenheit",
    "unit": "", "mi/hr": "mph", "km/hr": "kph kmh", "oz": "ounce",
    "mg": "milligram", "rad": "radian", "am": "", "pm": "", "th": "st nd rd", "sq": "square", "cu": "cubic",
}  # fmt: skip
UNITS = {name: unit for unit, names in UNITS.items() for name in [unit, *names.split()]}
ALIKE = ({"£", "lb"}, {"¥", "yen"}, {"¥", "yuan"})  # pounds are money or a weight
NOT_UNITS = set(
    "and or not to than then if when where is are for more less least most hundred thousand dozen gross lakh crore "
    "grand half halves third quarter fourth fifth sixth seventh eighth ninth tenth eleventh twelfth hundredth "
    "thousandth millionth billionth sqrt root radical mod over times plus minus squared cubed doubled tripled pair "
    "base below above zero sin cos tan log ln factorial infinity choose wrong pi theta alpha beta abc xyz k K M B x y "
    "ten score scores basis mega giga mil mill mille millier mio tausend milhões milhão permille promille cot "
    "exp".split()
)
NOT_A_UNIT = re.compile(  # million, millones, Milliarden, sixteenths, 半
    r"(?:(?:m|b|tr|quadr|quint|sext)ill?i?[oó]n|mill?iard|\w+illion)(?:e?s|en?|i)?|\w+(?:teen|tie)ths?|.*[半倍割成折打双之].*",
    re.IGNORECASE,
)
WITH_CURRENCY = re.compile(r"([-+]?)(?:US)?([$€£¥₹]?)([-+]?[^$€£¥₹]*\d[^$€£¥₹]*?) ?([$€£¥₹]?)")
WITH_DEGREES = re.compile(r"(.*[\d})])\^\\circ ?(?:\\text\{)?([CF]?)\}?")
WITH_UNIT = re.compile(
    r"(.*(?:[\d})]|\\pi(?![a-zA-Z])))"
    r"(?: ?\\text\{([^{}]+)\}|( ?[a-zA-ZÀ-ſ][a-zA-ZÀ-ſ/. ]*| ?[一-鿿]+))(?:\^([23]))?"
)


def value(text: str) -> Fraction | None:
    """The exact value of one number: `72`, `-.5`, `3/4`, `\\frac{3}{4}`, `2 3/4`, `3e8`, `3\\times10^8`."""
    repeating = REPEATING.fullmatch(text)
    if repeating:
        start, middle, period = repeating.groups()
        whole = int(start + middle + period) - int("0" + start + middle)
        return Fraction(whole, 10 ** len(middle) * (10 ** len(period) - 1))
    text = POWER_OF_TEN.sub(lambda match: ("e" if match.start() else "1e") + match[1], text)
    match = NUMBER.fullmatch(FRACTION.sub(r" \1/\2", text).strip())
    if not match:
        return None
    sign, whole, top, bottom = match.groups()
    is_mixed = whole is not None
    if (is_mixed and (bottom is None or top[0] == "-")) or Fraction(bottom or 1) == 0:
        return None
    size = Fraction(whole or 0) + Fraction(top) / Fraction(bottom or 1)
    return -size if sign == "-" else size


def singular_of(word: str) -> str:
    word = word.lower()
    return word if word in UNITS else re.sub(r"(?<=\w\w)s$", "", word)


def one_name(word: str) -> str:
    """The same for meter, metres and m. The case counts in mW and MW, and in Mb and MB."""
    if re.fullmatch("(?i:m(?:hz|[bwgjvanl]|pa|ev))", word):
        return word[0] + (word[1] if word[1] in "bB" else word[1:].lower())
    return UNITS.get(singular_of(word), singular_of(word))


def unit_name(words: str, power: str, is_bare: bool) -> str | None:
    """One name for a unit, None for what is none. A bare letter is a variable: 2k is not 2."""
    min_length = 3 if words.startswith(" ") else 4  # of bare words
    words = words.replace(".", " ").split()
    singular = [word.lower().removesuffix("s") for word in words]
    if not 0 < len(words) <= 4 or NOT_UNITS & {*words, *map(str.lower, words), *singular}:
        return None
    if any(NOT_A_UNIT.fullmatch(word) or any(unicodedata.numeric(c, 0) > 9 for c in word) for word in words):
        return None
    is_chinese = "一" <= words[0] <= "鿿"
    if words[0] not in "mshglLNJWVACF" and len(words[0]) == 1 and not is_chinese:
        return None
    words = re.sub(r"(?i)(?<=\w) per (?=\w)", "/", " ".join(words)).split()
    parts = [singular_of(part) for part in words[0].split("/")]
    first = parts[0]
    is_long = is_chinese or (len(first) >= min_length and re.search("[aeiouy]", first))
    is_rate = len(parts) == 2 and all(part in UNITS for part in parts)  # m/s
    if is_bare and not is_rate and not is_long and (len(first) < 2 or first not in UNITS):
        return None
    names = ["/".join(map(one_name, word.split("/"))) for word in words]
    if names[0] in ("sq", "cu", "°") and len(names) > 1:
        power = {"sq": "2", "cu": "3", "°": power}[names[0]]
        names = names[1:]
    return " ".join(names) + power


def split_unit(text: str) -> tuple[str, str]:
    """An answer without its unit, and the unit: `$18` is 18 and $, `90^\\circ` is 90 and °."""
    if text.endswith("%"):
        return text[:-1], "%"
    match = WITH_CURRENCY.fullmatch(text)
    if match and (match[2] or match[4]):
        return split_unit(match[1] + match[3])[0], match[2] or match[4]
    match = WITH_DEGREES.fullmatch(text)
    if match:
        return match[1], "°" + match[2].lower()
    match = WITH_UNIT.fullmatch(text)
    unit = match and unit_name(match[2] or match[3], match[4] or "", is_bare=bool(match[3]))
    return (match[1], unit) if unit else (text, "")


def letter_unit(text: str, unit: str, other: str) -> tuple[str, str]:
    """An answer and its unit, also `12 m` where the other one's unit is meters. Else m is a variable."""
    match = re.fullmatch(r"(.*[\d}]) ?([a-zL])(?:\^([23]))?", text) if other and not unit else None
    return (match[1], other) if match and UNITS.get(match[2].lower(), "") + (match[3] or "") == other else (text, unit)


# --- Are two answers the same? ------------------------------------------------------------------

POINTS = r"[A-Z]+(?:_\w|_\{\w+\})?"
NAME = re.compile(  # x= | x_1= | f(2)= | (x,y)= | \text{Area}= | |AB|= | AB:CD= | \frac{AB}{CD}= | \angle ABC= | x\in
    r"(?:\\?[a-zA-Z]+(?:_\w|_\{\w+\}|\^\{-1\})?(?:\([\w,]+\))?|\([a-z](?:,[a-z])+\)|\\text\{[^{}]*\}"
    rf"|\|{POINTS}\||{POINTS}:{POINTS}|\\frac\{{{POINTS}\}}\{{{POINTS}\}}|\\(?:angle|triangle|overline|vec|sin|cos|tan) ?{POINTS})="
    r"|[a-z]\\in(?![a-zA-Z])"
)
CHOICE = re.compile(r"(?:\\text\{)?\(?([A-J])(?:[).:]| -).+")  # C. 18 eggs
WORD = re.compile(r"\b(?:[a-zA-Z]{4,}|[A-Z]?[a-z]{2,}|YES|NO|No|N/A)\b")
AMOUNT = r"[$€£¥₹]?\d+(?:\.\d+)?%?"
RANGE = re.compile(rf"{AMOUNT}(?:-{AMOUNT})+|\d+/\d+/\d+")  # 10-20 | 3-2 | 2024-01-05 | 1/10/2024
LATEX = re.compile(r"\\(?:begin|end)\{\w+\}|\\(?!text)[a-zA-Z]+|\\text")
RELATION = re.compile(r"[<>=]|\\(?:le|ge|ne|in)(?![a-zA-Z])")
NUMBERS = re.compile(r"(?:[^a-zA-Z\\]|\\(?:times|cdot|div|frac|sqrt))*")  # 48 + 24 = 72
BRACKET = re.compile(r"\\\\|\\?[{}]|[()\[\],;]|[^\\{}()\[\],;]+|\\")


def kind_of(text: str) -> str:
    """What an answer in normal form is: a number, an expression or a text."""
    if len(text) > MAX_LENGTH:
        return "text"
    if value(split_unit(text)[0]) is not None:
        return "number"
    letters = re.sub(FUNCTIONS, " ", LATEX.sub(" ", text))
    words = [word for word in re.findall("[a-zA-Z]{2,}", letters) if re.search("[aeiouAEIOU]", word)]
    only_letters = re.fullmatch(r"[a-zA-Z '\-]+", text)
    is_text = any(len(word) > 3 or only_letters for word in words) or ":" in text
    return "text" if is_text else "expression"


def as_text(text: str) -> str:
    """A text with its words in lower case, but no symbols (x, AB) and nothing in LaTeX."""
    text = " ".join(re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).split())
    return text if "\\" in text else WORD.sub(lambda match: match.group().lower(), text)


def split_list(text: str) -> list[str]:
    """The pieces between commas outside of brackets; no pieces if a bracket is not closed."""
    depth = 0
    pieces = [""]
    for mark in BRACKET.findall(text):
        depth += (mark[-1] in "{([") - (mark[-1] in "})]")
        if depth < 0:
            return []
        if depth == 0 and mark in ",;":
            pieces.append("")
        else:
            pieces[-1] += mark
    return pieces if depth == 0 else []


def elements(text: str) -> tuple[str, list[str]]:
    """The brackets of a tuple, set or interval, "" for a bare list, and its elements, one if it is no list."""
    brackets = re.fullmatch(r"(\(|\[|\\\{)(.+)(\)|\]|\\\})", text)
    inside = split_list(brackets[2]) if brackets else []
    if len(inside) > 1 or (inside and brackets[1] == "\\{"):
        return brackets[1] + brackets[3], inside
    return "", split_list(text) or [text]


def same_elements(golds: list[str], answers: list[str], is_ordered: bool) -> bool:
    """Are two lists of at most 20 elements the same, one by one or in any order?"""
    if len(golds) != len(answers) or len(golds) > 20:
        return False
    if is_ordered:
        return all(map(same, golds, answers))
    rest = list(answers)
    for gold in golds:
        equal = [i for i, answer in enumerate(rest) if same(gold, answer)]
        if not equal:
            return False
        del rest[equal[0]]
    return True


def same_lists(gold: str, answer: str) -> bool | None:
    """Are two lists the same? None if neither is one, or if one may be the solution of the other, x < 3."""
    gold_brackets, golds = elements(gold)
    answer_brackets, answers = elements(answer)
    kinds = {gold_brackets, answer_brackets}
    is_ordered = bool(kinds - {"", "\\{\\}"})
    if not is_ordered:
        golds, answers = map(both_signs, (golds, answers))
    lengths = {len(golds), len(answers)}
    if lengths == {1} or (1 in lengths and RELATION.search(gold + answer)):
        return None
    if len(kinds - {""}) > 1 or ("" in kinds and kinds & {"[]", "[)", "(]"}):
        return False  # a set and a pair, an interval and two numbers
    return same_elements(golds, answers, is_ordered)


def both_signs(pieces: list[str]) -> list[str]:
    """Elements, two for one with \\pm."""
    found = []
    for piece in pieces:
        signs = "+-" if len(re.findall(r"\\pm(?![a-zA-Z])", piece)) == 1 else ["\\pm"]
        found += [piece.replace("\\pm", sign) for sign in signs]
    return found


def without_names(gold: str, answer: str) -> list[str]:
    """Both without a name that only one has: x = 5 and 5, C. 18 eggs and C."""
    sides = [gold, answer]
    for side, other in ((0, 1), (1, 0)):
        choice = CHOICE.fullmatch(sides[side])
        name = NAME.match(sides[side])
        if choice and len(sides[other]) == 1:
            sides[side] = choice[1]
        elif (name or side == 1) and not re.search(r"=|\\in(?![a-zA-Z])", sides[other]):
            sides[side] = sides[side].replace(name.group(), "") if name else sides[side]
            *before, last = sides[side].split("=")
            is_result = name or value(split_unit(last)[0]) is not None
            if is_result and "," not in sides[side] and all(same(last, part) for part in before):
                sides[side] = last  # of x = 4 + 1 = 5, and of an answer 4 + 1 = 5
    return sides


def same(gold: str, answer: str) -> bool:
    """Do two answers in normal form mean the same?"""
    if as_text(gold) == as_text(answer):
        return gold != ""
    if max(len(gold), len(answer)) > MAX_LENGTH:
        return False
    (gold, gold_unit), (answer, answer_unit) = map(split_unit, without_names(gold, answer))
    gold, gold_unit = letter_unit(gold, gold_unit, answer_unit)
    answer, answer_unit = letter_unit(answer, answer_unit, gold_unit)
    values = [value(gold), value(answer)]
    units = {gold_unit, answer_unit} - {""}
    if units in ({"$", "cent"}, {"€", "cent"}) and None not in values:
        return values[0] * (gold_unit == "cent" or 100) == values[1] * (answer_unit == "cent" or 100)
    if len(units) > 1 and units not in ALIKE:
        return False
    if None not in values or gold == answer:
        return values[0] == values[1]
    lists = same_lists(gold, answer)
    if lists is not None:
        return lists
    return comparable(gold, answer) and math_verify_says_yes(gold, answer)


def comparable(gold: str, answer: str) -> bool:
    """Vetoes: False for what is not mathematics, and where math-verify calls different things equal."""
    both = gold + answer
    if "text" in (kind_of(gold), kind_of(answer)) or len(both) > MAX_LENGTH:
        return False
    if any(closing_brace(f"{{{text}}}", 0) != len(text) + 1 for text in (gold, answer)):
        return False
    related = [bool(RELATION.search(text)) for text in (gold, answer)]
    if ("=" in gold) != ("=" in answer) or (related[0] != related[1] and not re.search(r"[(\[]", both)):
        return False
    if "=" in gold and NUMBERS.fullmatch(gold):  # math-verify calls all of these equal
        parts = [text.split("=") for text in (gold, answer)]
        return len(parts[0]) == len(parts[1]) and all(map(same, *parts))
    bases = [re.findall(r"(?<=\d)_\w", text) for text in (gold, answer)]  # of 1000_2
    symbols = set(re.findall(r"\\[a-zA-Z]+|[a-zA-Z]", both))
    return bases[0] == bases[1] and len(symbols) == len({symbol.lower() for symbol in symbols})


@lru_cache(4096)  # a group often has the same answer several times
def same_answer(gold: str, answer: str) -> bool:
    """Are two final answers the same: as numbers, as mathematics, or letter by letter?"""
    texts = [normal(gold), normal(answer)]
    if RANGE.fullmatch(split_unit(texts[0][:MAX_LENGTH])[0]) and not re.search(r"\s[-−–—]\s", gold):
        golds, answers = [re.split(r"(?<=[\d%])([-/])", text.replace(" to ", "-")) for text in texts]
        return len(golds) == len(answers) and all(map(same, golds, answers))
    return same(*texts)


# --- math-verify, in processes of its own -------------------------------------------------------

workers = {}  # by process id, so that a fork starts its own: those that wait for a pair
turns = threading.Semaphore(os.cpu_count() or 1)  # more workers than cores would only be slower


def math_verify_says_yes(gold: str, answer: str) -> bool:
    """What math-verify says of two expressions; False if that takes more than TIME_LIMIT seconds of a core.

    A worker, a fresh interpreter without torch and CUDA, serves one thread at a time, so `--reward-threads 8` starts
    up to eight. It ends when its time is over, and with this process. RuntimeError if it does not start.
    """
    with turns:
        idle = workers.setdefault(os.getpid(), [])
        worker = None
        with contextlib.suppress(IndexError):  # not `if idle`: another thread may take the last one
            worker = idle.pop()
        if worker is None or worker.poll() is not None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
            worker = subprocess.Popen([sys.executable, "-P", __file__], **pipes)
            if worker.stdout.readline().strip() != b"ready":
                raise RuntimeError(f"math-verify does not start: pip install '{PACKAGE}'")
        try:
            worker.stdin.write(json.dumps([gold, answer]).encode() + b"\n")
            reply = worker.stdout.readline()
        except BrokenPipeError:
            reply = b""
        if reply:
            idle.append(worker)
        else:  # it has ended itself
            worker.wait()
    return reply.strip() == b"True"


def exact(text: str) -> str:
    """LaTeX without decimals, which math-verify would round, and without mixed numbers."""
    text = re.sub(FUNCTIONS, r"\\\1 ", text)
    text = re.sub(r"(?<![\d.])(\d+) ?(\\frac\{\d+\}\{\d+\})", r"(\1+\2)", text)
    decimal = re.compile(r"(\d*)\.(\d+)")
    return decimal.sub(lambda d: rf"\frac{{{int(d[1] + d[2])}}}{{{10 ** len(d[2])}}}", text)


def serve() -> None:
    """Answer pairs of expressions, a JSON list a line on standard input, until this is closed."""
    import logging
    import signal

    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import I

    logging.disable(logging.WARNING)  # it warns that it has no time limit of its own
    normalization = NormalizationConfig(boxed="none", malformed_operators=True)
    latex = LatexExtractionConfig(normalization_config=normalization, boxed_match_priority=-1)

    @lru_cache(1000)
    def read(text: str) -> list:
        found = parse(f"${exact(text)}$", [latex], "no_fallback", parsing_timeout=None)
        units = [{x: I for x in one.free_symbols if x.name == "i"} for one in found]
        return [one.subs(unit) if unit else one for one, unit in zip(found, units)]

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C is for the training
    print("ready", flush=True)
    with contextlib.redirect_stdout(sys.stderr):
        for line in sys.stdin:
            # Ends this process after so much time of a core, whatever else the machine does, and even within the
            # computation of a power of a million digits.
            signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT)
            try:
                gold, answer = map(read, json.loads(line))
                equal = verify(gold, answer, timeout_seconds=None, allow_set_relation_comp=True)
            except Exception:  # what it cannot read is not equal
                equal = False
            signal.setitimer(signal.ITIMER_PROF, 0)
            print(equal, file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    serve()
