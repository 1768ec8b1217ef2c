"""Search questions: who is the rival of the teacher of Midra Oslen? The model searches turn by turn, then answers.

A turn is `<think>..</think><search>query</search>` or `<think>..</think><answer>..</answer>`; a search is answered by a
user message `<result>..</result>`. Questions of 1 to 4 hops come from an invented world, or from a data file that
comes with documents or a retrieval server. Roles: answerer (one agent), router, searcher and responder (a team),
examiner (writes questions). Rewards compare texts by rule. Every random choice comes from the `random.Random` that is passed in. No dependencies.
"""

import random
import re
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from envs import search_text
from envs.control_tokens import CONTROL, without_control
from envs.retriever import RELATIONS, HttpRetriever, World, read_documents
from envs.search_problems import Problem, Request, read_questions
from envs.search_text import (
    exact_match,
    examiner_format,
    extract_answer,
    format,
    parse_question,
    parse_turn,
)

KNOWN = "I know the answer."  # the thought before an answer
TAGS = ("think", "search", "result", "verify", "question", "answer")
# What a retrieved text must not contain: our tags, what search_text.balanced counts, control tokens.
OURS = "|".join((*TAGS, "code", "tool_call", "tool_response"))
MARKUP = re.compile(rf"</?(?:{OURS})>|{CONTROL}", re.IGNORECASE)
THINK = "Think inside <think> </think>, then"
INSTRUCTIONS = {
    "answerer": f"{THINK} either search inside <search> </search> or give the answer inside <answer> </answer>.",
    "router": f"Do the results suffice? {THINK} end with <verify>yes</verify> or <verify>no</verify>.",
    "searcher": f"{THINK} write the next query inside <search> </search>.",
    "responder": f"{THINK} give the answer inside <answer> </answer>.",
    "examiner": f"Search along a chain of facts. {THINK} write one query inside <search> </search>, or in the end a "
    "question about the chain inside <question> </question> and its answer inside <answer> </answer>.",
}


class Turn(NamedTuple):
    thought: str
    tag: str  # search or answer
    content: str
    result: str = ""

    @property
    def text(self) -> str:
        return f"<think>{self.thought}</think><{self.tag}>{self.content}</{self.tag}>"


def f1(problem: Problem, completion: str, invalid: float = 0.0) -> float:
    """Word F1 of an episode's last answer, the one that exact_match takes; `invalid` if the format is wrong."""
    return search_text.f1(problem, completion, invalid, last=True)


@lru_cache(maxsize=1)
def world() -> World:
    return World()


def question_text(person: str, relations: list[str]) -> str:
    return f"Who is the {' of the '.join(relations[::-1])} of {person}?"


def render(steps: tuple[tuple[str, str], ...]) -> str:
    """(query, result) pairs as a text: a team's history, and the construction path of an examiner's question."""
    return "\n".join(f"<search>{query}</search><result>{result}</result>" for query, result in steps)


class SearchQA:
    """Problems, searches, prompts. The number of hops is drawn uniformly from `hops`; (1, 1, 2) has twice as many of 1.

    With `dataset` (lines with `question` and `golden_answers`, `answers` or `answer`) the questions come from a file,
    and `documents` must name a file to search in, or `retriever_url` a server.
    """

    reward_functions = {"exact_match": exact_match, "f1": f1, "format": format}
    reward_weights = (1.0, 0.0, 0.0)

    def __init__(
        self,
        dataset: str | None = None,
        retriever_url: str | None = None,
        documents: str | None = None,
        top_k: int = 3,
        timeout: float = 60.0,
        hops: tuple[int, ...] = (1, 2, 3),
        max_turns: int = 5,
    ):
        if not hops or not set(hops) <= {1, 2, 3, 4} or top_k < 1 or max_turns < 1:
            raise ValueError("search_qa needs hops from 1 to 4, top_k >= 1 and max_turns >= 1")
        if documents and retriever_url:
            raise ValueError("--documents: searched in this process, so not with --retriever-url; give one of them")
        if (documents or retriever_url) and not dataset:
            raise ValueError("--documents, --retriever-url: need --dataset, questions that they answer")
        if dataset and not (documents or retriever_url):
            expected = "--documents, or a retrieval server, --retriever-url"
            raise ValueError(f"{dataset}: questions from a file need a file to search in, {expected}")
        self.hops, self.top_k, self.max_turns = tuple(hops), top_k, max_turns
        if documents:
            self.retriever = read_documents(documents)
        else:
            self.retriever = HttpRetriever(retriever_url, timeout) if retriever_url else world()
        self.train_rows, self.evaluation_rows = read_questions(dataset) if dataset else ([], [])
        self._order_of, self._order = None, []

    def sample(self, generator: random.Random, held_out: bool = False) -> Problem:
        """A random row of the file; without a file a chain of relations that meets nobody twice."""
        if self.train_rows:
            return generator.choice(self.evaluation_rows if held_out else self.train_rows)
        while True:
            person, hops = generator.choice(world().people), generator.choice(self.hops)
            problem = self.chain(person, [generator.choice(RELATIONS) for _ in range(hops)])
            if problem and problem.held_out == held_out:
                return problem

    def chain(self, person: str, relations: list[str]) -> Problem | None:
        """The question that starts from a person; None if the chain meets somebody twice."""
        path, people = [], [person]
        for relation in relations:
            people.append(world().facts[people[-1], relation])
            path.append((people[-2], relation, people[-1]))
        if len(set(people)) == len(people):
            return Problem(question_text(person, relations), (people[-1],), len(path), tuple(path))

    def train_problem(self, index: int, seed: int) -> Problem:
        """Problem number `index` of the training stream `seed`: the same on every rank and after a resume."""
        if not self.train_rows:
            return self.sample(random.Random(f"train {seed} {index}"))
        epoch, position = divmod(index, len(self.train_rows))
        if self._order_of != (seed, epoch):
            self._order_of, self._order = (seed, epoch), list(self.train_rows)
            random.Random(f"train {seed} {epoch}").shuffle(self._order)
        return self._order[position]

    def evaluation_problems(self, count: int) -> list[Problem]:
        """The fixed evaluation set: up to `count` distinct problems (fewer if there are not that many)."""
        if self.train_rows:
            return self.evaluation_rows[:count]
        generator, problems = random.Random("evaluation"), {}
        for _ in range(10 * count):
            if len(problems) < count:
                problems[self.sample(generator, held_out=True)] = None
        return list(problems)

    def search(self, queries: list[str]) -> list[str]:
        """What the model gets to read for each query: one document a line, without tags. An empty query finds nothing and
        is not sent. A server that fails ends the run with one sentence; its checkpoints stay."""
        asked = [query for query in queries if query.strip()]
        try:
            found = iter(self.retriever.search_batch(asked, self.top_k) if asked else [])
        except (ConnectionError, ValueError) as error:
            raise SystemExit(f"error: {error}") from None
        rows = [next(found) if query.strip() else [] for query in queries]
        return ["\n".join(" ".join(MARKUP.sub(" ", text).split()) for text in row) or "nothing found" for row in rows]

    def step(self, texts: list[str], turn: int, episodes=None) -> list[dict | None]:
        """The message that answers each text of turn number `turn` (from 1); None where the episode is over: an answer,
        even after a search, neither tag, or the last turn. One batch of searches."""
        actions = [parse_turn(text) for text in texts]
        answered = [bool((extract_answer(text) or "").strip()) for text in texts]
        rows = [i for i, (tag, _) in enumerate(actions) if tag == "search" and not answered[i] and turn < self.max_turns]
        results = dict(zip(rows, self.search([actions[i][1] for i in rows])))
        return [result_message(results[i]) if i in results else None for i in range(len(texts))]

    def prompt(self, problem, role: str = "answerer", history=(), teammates=()) -> list[dict]:
        """Chat messages for `role`, or for the examiner if `problem` is a Request. `history` holds (query, result)
        pairs, `teammates` (name, text) pairs."""
        if isinstance(problem, Request):
            text = f"Document: {problem.document}\nSearches: {problem.hops}\n{INSTRUCTIONS['examiner']}"
            return [{"role": "user", "content": text}]
        lines = [f"How the question was made:\n{problem.privileged}"] if problem.privileged else []
        lines += [f"Question: {problem.question}", *([render(history)] if history else [])]
        lines += [*(f"{name}: {text}" for name, text in teammates), INSTRUCTIONS[role]]
        return [{"role": "user", "content": "\n".join(lines)}]

    def right_answer(self, problem: Problem) -> tuple[str, str]:
        """What a model writes before the answer, and the answer itself."""
        return f"<think>{KNOWN}</think><answer>", problem.answers[0]

    def verdicts(self, problem: Problem, episode) -> list[float]:
        """For each search of an episode: 1.0 if what it found lies on the question's path and is new, else 0.0."""
        missing = {world().sentence(person, relation) for person, relation, _ in problem.path}
        good = []
        for result in episode.texts[1::2]:
            lines = result.removeprefix("<result>").removesuffix("</result>").split("\n")
            good.append(float(not missing.isdisjoint(lines)))
            missing.difference_update(lines)
        return good

    def examined(self, request: Request, texts: list[str]) -> tuple[float, Problem | None]:
        """What an examiner wrote and read, in turn: its format score, and its question with the searches that led to
        it, None where the score is 0."""
        written = [without_control(text) for text in texts[::2]]  # the student reads parts of them
        results = [text.removeprefix("<result>").removesuffix("</result>") for text in texts[1::2]]
        score = examiner_format(*request, written, results)
        if score == 0:
            return 0.0, None
        question, answer = parse_question(written[-1])
        steps = tuple(zip((parse_turn(text)[1] for text in written), results))
        return score, Problem(question, (answer,), request.hops, steps=steps)

    def document(self, generator: random.Random) -> str:
        """A random document for an examiner to begin with; from a server, one that a training question finds."""
        if not self.train_rows:
            return world().sentence(*generator.choice(world().order))
        return generator.choice(self.search([self.sample(generator).question])[0].split("\n"))

    def request(self, generator: random.Random) -> Request:
        """A document and a number of hops for an examiner."""
        return Request(self.document(generator), generator.choice(self.hops))

    def with_privilege(self, problem: Problem, kind: str, seed: str) -> Problem:
        """The problem as a teacher sees it: with the construction path of the question (`qcp`), with each of its steps
        kept with chance one half (`partial`), or with the `answer`."""
        if kind == "answer":
            return replace(problem, privileged=f"The answer is {problem.answers[0]}.")
        generator = random.Random(f"partial {seed}")
        chance = {"qcp": 1.0, "partial": 0.5, "none": 0.0}[kind]
        steps = tuple(step for step in problem.steps if generator.random() < chance)
        return replace(problem, privileged=render(steps))

    def traced_problems(self, count: int) -> list[Problem]:
        """Evaluation problems with the searches that answer them; none if the questions come from a file."""
        return [replace(p, steps=self.path_steps(p)) for p in self.evaluation_problems(count) if p.path]

    def path_steps(self, problem: Problem) -> tuple[tuple[str, str], ...]:
        """The searches that answer a question of the world, one a hop."""
        queries = [f"{relation} of {person}" for person, relation, _ in problem.path]
        return tuple(zip(queries, self.search(queries)))

    def qcp(self, problem: Problem) -> str:
        """The construction path of a question, as an examiner's searches would give it."""
        return render(self.path_steps(problem))


def result_message(result: str) -> dict:
    return {"role": "user", "content": f"<result>{result}</result>"}
