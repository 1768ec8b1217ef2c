"""What a model wrote in a search task, read and graded by rule: turns, verdicts, exact match, word F1, format.

Two normalisations, as their sources have them: exact match is SQuAD's (Search-R1, Dr. MAS, Dr. Zero), word F1 and the
format check are IGPO's. Everything is linear in the length of the text. No dependencies, importable alone.
"""

import re
import string

SPACES = str.maketrans(dict.fromkeys(string.punctuation, " "))
NOTHING = str.maketrans("", "", string.punctuation)


# --- Reading what a model wrote ----------------------------------------------------------------------------------


def block(text: str, tag: str) -> tuple[int, str] | None:
    """Where the first <tag> </tag> begins, and its stripped content. Linear in the length of the text."""
    start = text.find(f"<{tag}>")
    end = text.find(f"</{tag}>", start)
    return None if start < 0 or end < 0 else (start, text[start + len(tag) + 2 : end].strip())


def parse_turn(text: str) -> tuple[str | None, str]:
    """("search", query) or ("answer", answer), whichever comes first; (None, "") without either."""
    found = [(place[0], tag, place[1]) for tag in ("search", "answer") if (place := block(text, tag))]
    return min(found)[1:] if found else (None, "")


def extract_answer(text: str, tag: str = "answer") -> str | None:
    """Text inside the last <answer> </answer> pair, or None."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return None if end < 0 or start < 0 else text[start + len(tag) + 2 : end]


def parse_question(text: str) -> tuple[str, str] | None:
    """The question and the answer that an examiner wrote; None if one is missing or empty."""
    question, answer = ((extract_answer(text, tag) or "").strip() for tag in ("question", "answer"))
    return (question, answer) if question and answer else None


def project_action(text: str, tag: str) -> tuple[str, bool]:
    """What the team takes from a searcher or responder, and whether it is valid (Dr. MAS, general_projection).

    The first tag and what is in it; valid with exactly one <think> </think> and without Chinese characters.
    """
    start, end = text.find(f"<{tag}>"), text.find(f"</{tag}>")
    if start < 0 or end < 0:
        return "", False
    return f"<{tag}>{text[start + len(tag) + 2 : end].strip()}</{tag}>", thinks_once(text) and not chinese(text)


def project_verdict(text: str, check_think: bool = False) -> tuple[str, bool]:
    """The router's text with its verdict stripped of spaces, and whether there is one (Dr. MAS, general_projection).

    Dr. MAS asks its search router for one <think> </think> as well: `check_think`.
    """
    start, end = text.find("<verify>"), text.find("</verify>")
    valid = start >= 0 and end >= 0 and not chinese(text) and (thinks_once(text) or not check_think)
    if start >= 0 and end >= 0:
        start += len("<verify>")
        text = text[:start] + text[start:end].strip() + text[end:]
    return text, valid


def thinks_once(text: str) -> bool:
    once = text.count("<think>") == text.count("</think>") == 1
    return once and text.find("<think>") < text.find("</think>")


def chinese(text: str) -> bool:
    return re.search("[\u4e00-\u9fff]", text) is not None


# --- Rewards -----------------------------------------------------------------------------------------------------


def normalize_answer(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces: SQuAD's rule, as Search-R1, Dr. MAS and Dr. Zero."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(NOTHING)).split())


def exact_match_text(prediction: str, golds: tuple[str, ...]) -> float:
    """1.0 if a text equals one of the golds after normalisation, else 0.0. A gold of which nothing is left then, "A" or
    "+", is compared with its articles, or as it is: an empty answer is not right."""
    rules = (normalize_answer, lambda text: text.lower().translate(NOTHING).strip(), lambda text: text.lower().strip())
    for gold in golds:
        rule = next((rule for rule in rules if rule(gold)), rules[-1])
        if rule(prediction) == rule(gold):
            return 1.0
    return 0.0


def word_f1_text(prediction: str, golds: tuple[str, ...]) -> float:
    """IGPO's F1 of the sets of words, the best over the golds. Punctuation separates words, articles count."""
    words, best = set(prediction.lower().translate(SPACES).split()), 0.0
    for gold in golds:
        expected = set(gold.lower().translate(SPACES).split())
        if common := len(words & expected):
            best = max(best, 2 * common / (len(words) + len(expected)))
    return best


def balanced(text: str) -> bool:
    """Every tag opens as often as it closes and closes after it opens; there is an answer (IGPO's format check)."""
    text = text.lower()
    for tag in ("code", "tool_call", "think", "answer", "search"):
        if text.count(f"<{tag}>") != text.count(f"</{tag}>"):
            return False
        last = -1
        while (start := text.find(f"<{tag}>", last + 1)) >= 0:
            if (last := text.find(f"</{tag}>", start)) < 0:
                return False
    return block(text, "answer") is not None


def exact_match(problem, completion: str) -> float:
    """1.0 if the last answer equals one of the accepted ones after normalisation, else 0.0."""
    answer = extract_answer(completion)
    return 0.0 if answer is None else exact_match_text(answer, problem.answers)


def format(problem, completion: str) -> float:
    """1.0 if all tags are balanced and there is an answer, else 0.0."""
    return float(balanced(completion))


def f1(problem, completion: str, invalid: float = 0.0, last: bool = False) -> float:
    """Word F1 of the first answer, as IGPO's code, or the last; `invalid` if the format is wrong: 0 in IGPO's evaluation,
    -2 in its training."""
    if not balanced(completion):
        return invalid
    text = completion.lower()
    answer = extract_answer(text) if last else block(text, "answer")[1]
    return word_f1_text(answer or "", problem.answers)


def examiner_format(document: str, hops: int, texts: list[str], results: list[str]) -> float:
    """How well an examiner keeps its format, from 0 to 1: Dr. Zero's rule, of which pi-Play adds half to the reward.

    `texts` are its turns, `results` what its searches found. 0 without a question and an answer, or if the question
    tells the answer; else the mean of 1, the share of turns that begin with a thought, searches against hops, and a
    short answer that the documents contain.
    """
    written = parse_question(texts[-1]) if texts else None
    question, answer = map(normalize_answer, written or ("", ""))
    if not written or answer in question:
        return 0.0
    thoughts = sum(text.lstrip().startswith("<think>") and "</think>" in text for text in texts) / len(texts)
    searches = sum(parse_turn(text)[0] == "search" for text in texts)
    counted = searches == len(results) > 0
    read = normalize_answer("\n\n".join([document, *(results if counted else [])]))
    grounded, words = answer in ("yes", "no") or answer in read, len(answer.split())
    brevity = (1.0 if words <= 5 else 0.5 if words <= 10 else 0.0) if grounded else 0.0
    searched = min((1 + searches) / hops, 1.0) if counted else float(hops == 1)
    return (1 + thoughts + searched + brevity) / 4
