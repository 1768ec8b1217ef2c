"""Tool calls: read a query and a list of tools, think, then write the calls that answer it as JSON.

Task and rewards of ToolRL and GDPO (arXiv 2601.05242, official code). The problems are invented, or JSON lines: query
under `query`, `question`, `input`, gold text with its tags under `answer`, `output`, what precedes the query under
`tools`, `system`, `instruction` (as in rlla_4k). What a model writes is never executed. Importable alone.
"""

import json
import random
import re
import zlib
from collections import Counter
from dataclasses import dataclass

TOWNS = "London Oslo Lima Cairo Tokyo Paris Delhi Quito Accra Bern".split()
VALUES = {"city": TOWNS, "origin": TOWNS[:5], "goal": TOWNS[5:], "source": "Dollar Euro Peso Rupee".split()}
VALUES |= {"day": "Monday Tuesday Wednesday Thursday Friday Sunday".split(), "target": "Yen Franc Pound Krona".split()}
VALUES |= {"artist": "Mozart Bach Bowie Prince Adele Nina".split(), "person": "Anna Ben Carla Dan Eve Finn".split()}
VALUES |= {"minutes": range(1, 60), "amount": range(1, 100), "nights": range(1, 15), "hour": range(1, 13)}
TOOLS = {  # parameters, two ways to ask
    "weather": ("city day", "What is the weather in {city} on {day}?", "Will it rain in {city} on {day}?"),
    "timer": ("minutes", "Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes."),
    "play": ("artist", "Play something by {artist}.", "I want to hear {artist}."),
    "convert": ("amount source target", "Convert {amount} {source} to {target}.", "{amount} {source} in {target}?"),
    "flight": ("origin goal day", "Fly from {origin} to {goal} on {day}.", "On {day} I go from {origin} to {goal}."),
    "hotel": ("city nights", "Book {nights} nights in {city}.", "I stay in {city} for {nights} nights."),
    "remind": ("person hour", "Remind {person} at {hour}.", "At {hour}, tell {person} to go."),
}
RULE = "Think inside <think> </think>, then call tools inside <tool_call> </tool_call>, one JSON object with name and"
RULE += " parameters a line. If no tool fits, write a <response> </response>."
SLIPS = (("</think>\n", "</think>"), ("<tool_call>\n", "<tool_call>"), ("<think>.*</think>\n", ""), ("$", "\nDone."))
SLIPS += ((r"\s*</\w+>$", ""), (r"(</\w+>)$", r"\1\n\1"), ("}}\n", "}\n"))  # of a careless writer


@dataclass(frozen=True)
class Problem:
    answer: str  # gold text: rewards use its tags and calls, demonstrations its calls
    query: str = ""
    tools: str = ""  # shown before the query

    @property
    def plain_query(self) -> str:
        """The same for copies that differ in case and spaces."""
        return " ".join(self.query.lower().split())

    @property
    def held_out(self) -> bool:
        """One query in 16 belongs to evaluation, by a hash, so that neither pretraining nor training can meet it."""
        return zlib.crc32(self.plain_query.encode()) % 16 == 0


def parse_calls(text: str) -> list | None:
    """The JSON values, one a line, of the first tool_call block; None without both tags or if a line is not JSON."""
    try:
        lines = text.split("<tool_call>")[1].split("</tool_call>")[0].strip().split("\n")
        return [json.loads(line) for line in lines] if "</tool_call>" in text else None
    except (IndexError, ValueError, RecursionError):
        return None


def jaccard(a: list, b: list) -> float:
    """Size of the intersection over size of the union, as multisets; 1 for equal lists, empty ones too."""
    both = (Counter(a) & Counter(b)).total()
    return 1.0 if a == b else both / (len(a) + len(b) - both)


def tool_call_correctness(gold_calls: list[dict], predicted: list[dict] | None) -> float:
    """-3..3: 6 * score / best score - 3. Score: Jaccard index of the names, plus the best match of each gold call, in
    order, among the unused calls with its name: Jaccard index of the parameter names + number of equal values."""
    try:
        if gold_calls == predicted:
            return 3.0
        score = jaccard([call["name"] for call in gold_calls], [call["name"] for call in predicted])
        best_score, unused = 1 + sum(1 + len(call["parameters"]) for call in gold_calls), predicted
        for call in gold_calls:
            gold, best, match = call["parameters"], 0.0, None
            for i, found in [(i, x["parameters"]) for i, x in enumerate(unused) if x["name"] == call["name"]]:
                total = jaccard(list(gold), list(found.keys())) + sum(k in found and found[k] == gold[k] for k in gold)
                best, match = (total, i) if total > best else (best, match)  # a sum of 0 uses no call up
            score, unused = score + best, [x for i, x in enumerate(unused) if i != match]
        return 6 * score / best_score - 3
    except (TypeError, KeyError, AttributeError, RecursionError):  # no list of calls
        return -3.0


def correctness(problem: Problem, completion: str) -> float:
    """-3..3; 0 if the gold text has no call, even if the completion has; -3 if the completion has no readable block."""
    gold = parse_calls(problem.answer)
    return 0.0 if gold is None else tool_call_correctness(gold, parse_calls(completion))


def format(problem: Problem, completion: str) -> float:
    """1.0 if the completion is a think block and then the blocks that the gold text has, each once, else 0.0."""
    text, insides = completion.strip(), {"tool_call": "\n.*?\n", "response": ".*?"}
    due = [tag for tag in insides if f"<{tag}>" in problem.answer]
    once = all(text.count(f"<{tag}>") == text.count(f"</{tag}>") == 1 for tag in due)  # also keeps the search linear
    pattern = "<think>.*?</think>" + "".join(f"\n<{tag}>{insides[tag]}</{tag}>" for tag in due)
    return float(once and re.fullmatch(pattern, text, re.DOTALL) is not None)


def length(problem: Problem, completion: str, limit: int = 28) -> float:
    """1.0 if the thinking has at most `limit` characters (the tools, hardly their values), else 0.0."""
    return float(len(completion.split("</think>", 1)[0].replace("<think>", "", 1).strip()) <= limit)


def exact(problem: Problem, completion: str) -> float:
    """1.0 if all calls are right; where none is due, if the completion is well-formed and has none."""
    silent = "<tool_call>" not in problem.answer + completion
    return float(correctness(problem, completion) == 3.0 or (silent and format(problem, completion) == 1.0))


def read_line(row: dict, where: str) -> Problem:
    """One row of the file as a problem; a ValueError of one sentence if it is broken."""
    keys = (("query", "question", "input", "instruction"), ("answer", "output"), ("tools", "system", "instruction"))
    query, answer, tools = (next((row[key] for key in names if row.get(key)), "") for names in keys)
    for text, names in zip((query, answer), keys):
        if not (isinstance(text, str) and text.strip()):
            raise ValueError(f"{where}: found no {names[0]}, expected text under {' or '.join(names)}")
    calls = parse_calls(answer) or []  # only a broken block scores -3 against itself with one call more
    if "<tool_call>" in answer and tool_call_correctness(calls, [*calls, {"name": "", "parameters": {}}]) == -3.0:
        raise ValueError(f"{where}: found a broken tool_call block, expected JSON with name and parameters a line")
    return Problem(answer, query, "" if tools == query else tools if isinstance(tools, str) else json.dumps(tools))


class ToolCalls:
    """Problems, prompts, demonstrations; `reward_functions` maps a name to f(problem, completion) -> float."""

    reward_functions = {"exact": exact, "correctness": correctness, "format": format, "length": length}
    reward_weights = (0.0, 1.0, 1.0, 0.0)  # exact is only reported
    epoch = ""

    def __init__(self, dataset: str | None = None):
        from envs.data_files import read_rows

        rows = [read_line(row, place) for place, row in (read_rows(dataset) if dataset else ())]
        if rows and not any(tag in row.answer for row in rows for tag in ("<tool_call>", "<response>")):
            words = "expected the JSON of the calls inside <tool_call> </tool_call>"
            raise ValueError(f"{dataset}: found no <tool_call> and no <response> in any answer, {words}")
        rows = sorted(rows, key=lambda row: (not row.held_out, random.Random(repr(row)).random()))
        self.rows = rows
        first = [row for row in rows if row.plain_query == rows[0].plain_query]  # a row and its copies
        self.evaluation_rows = [row for row in rows if row.held_out] or first
        shown = {row.plain_query for row in self.evaluation_rows}
        self.train_rows = [row for row in rows if row.plain_query not in shown]
        if dataset and not self.train_rows:
            raise ValueError(f"{dataset}: found {len(rows)} problems, expected enough for training and evaluation")

    def random_call(self, name: str, generator: random.Random) -> dict:
        """A call of this tool with random values."""
        return {"name": name, "parameters": {key: generator.choice(VALUES[key]) for key in TOOLS[name][0].split()}}

    def write_completion(self, calls: list[dict], thorough: bool) -> str:
        """A well-formed completion; thorough thinking copies the values, too."""
        needs = [call["name"] + f" ({', '.join(map(str, call['parameters'].values()))})" * thorough for call in calls]
        lines = ["<tool_call>", *map(json.dumps, calls), "</tool_call>"]
        lines = lines if calls else ["<response>Sorry, no tool does that.</response>"]
        return "\n".join([f"<think>I need {' and '.join(needs) or 'no tool'}.</think>", *lines])

    def sample(self, generator: random.Random, held_out: bool = False) -> Problem:
        """A row of the file; else four tools and a query for one or two of them, or for a fifth that is not shown."""
        while not self.train_rows:
            names, count = generator.sample(list(TOOLS), 5), generator.choices((0, 1, 2), (10, 45, 45))[0]
            calls = [self.random_call(name, generator) for name in names[:count] or names[4:]]
            query = " ".join(generator.choice(TOOLS[c["name"]][1:]).format(**c["parameters"]) for c in calls)
            shown = [f"{name}({TOOLS[name][0].replace(' ', ', ')})" for name in generator.sample(names[:4], 4)]
            problem = Problem(self.write_completion(calls[:count], True), query, f"Tools: {', '.join(shown)}.")
            if problem.held_out == held_out:
                return problem
        return generator.choice(self.evaluation_rows if held_out else self.train_rows)

    def train_problem(self, index: int, seed: int) -> Problem:
        """Number `index` of stream `seed`, the same on every rank and after a resume; rows of a file in epochs."""
        rows, size = self.train_rows, len(self.train_rows) or 1
        epoch = f"train {seed} {index // size}"
        if rows and self.epoch != epoch:  # its order is drawn once
            self.epoch, self.order = epoch, random.Random(epoch).sample(rows, size)
        return self.order[index % size] if rows else self.sample(random.Random(epoch))

    def evaluation_problems(self, count: int) -> list[Problem]:
        """The fixed evaluation set: `count` distinct problems, or those that a file holds out, copies too."""
        if self.train_rows:
            return self.evaluation_rows[:count]
        generator, problems = random.Random("evaluation"), {}
        while len(problems) < count:
            problems[self.sample(generator, held_out=True)] = None
        return list(problems)[:count]

    def prompt(self, problem: Problem) -> list[dict]:
        """Chat messages: tools, query, and how to write calls."""
        return [{"role": "user", "content": "\n".join(filter(None, [problem.tools, problem.query, RULE]))}]

    def demonstration(self, problem: Problem, generator: random.Random) -> str:
        """What an imperfect caller writes, for invented problems: habitual values (the first of VALUES), something left
        out or put in, another tool, all less often after thorough thinking; and, apart from that, slips of format."""
        calls, shown = parse_calls(problem.answer) or [], [name for name in TOOLS if f"{name}(" in problem.tools]
        slip, chance = 0.2 if (thorough := generator.random() < 0.25) else 0.6, generator.random
        calls = [self.random_call(generator.choice(shown), generator)] if not calls and chance() < 0.5 else calls
        calls = calls[:1] if chance() < slip / 2 else calls
        for call in calls:
            call |= self.random_call(generator.choice(shown), generator) if chance() < slip / 8 else {}
            parameters, extra = call["parameters"], generator.choice(list(VALUES))
            parameters |= {key: VALUES[key][0] for key in parameters if chance() < slip}
            if len(parameters) > 1 and chance() < slip / 4:
                parameters.popitem()
            parameters |= {extra: VALUES[extra][0], **parameters} if chance() < slip / 8 else {}
        text = self.write_completion(calls, thorough)
        return re.sub(*generator.choice(SLIPS), text, count=1, flags=re.DOTALL) if chance() < 0.45 else text
