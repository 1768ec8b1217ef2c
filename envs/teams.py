"""Teams of language-model agents: who writes next, and what it sees. The two teams of Dr. MAS.

A team of your own is a class for `--env FILE.py:ClassName`. It is called with --dataset,
--max-rounds and --missing-verdict, in this order, and has

    agents             names, in the order in which they write when several episodes wait
    task               the problems: train_problem(index, seed), evaluation_problems(count), and
                       reward_functions, a dict of function(problem, answer) -> float, of which the
                       first is trained on and the others are logged; for --eval-dataset also
                       train_rows and evaluation_rows, lists of problems, which the script joins
                       into train_rows; train_problem then draws from these
    start(problem)     an Episode
    prompt(episode)    chat messages for the agent that writes next, `episode.agent`
    advance(episodes, texts)
                       enter what each agent wrote: set episode.agent, None at the end, and
                       episode.answer; return which texts have the tags of their role; the others
                       cost --invalid-penalty

In `prompt`, pass what agents wrote through envs.control_tokens.without_control, as here.
"""

from dataclasses import dataclass, field

from envs.control_tokens import without_control
from envs.search_text import project_action, project_verdict


@dataclass
class Episode:
    problem: object
    agent: str | None  # who writes next; None: the episode is over
    calls: list[tuple[str, str]] = field(default_factory=list)  # (agent, text), in order
    answer: str = ""  # what the reward functions grade
    round: int = 1  # loops (solver and verifier) or steps (search) so far
    history: tuple[tuple[str, str], ...] = ()  # search: queries and what they found
    # filled in by algorithms/dr_mas.py
    seed: int | None = None  # None: greedy
    completions: list = field(default_factory=list)  # what was written, as tokens
    rewards: tuple[float, ...] = ()
    cut: bool = False  # ended because a prompt was too long


def verdict(text: str, yes: str, no: str, tag: str, missing: bool) -> bool:
    """True for <tag>yes</tag>, also beside a no; `missing` if there is neither. Case counts."""
    if f"<{tag}>{yes}</{tag}>" in text:
        return True
    return missing and f"<{tag}>{no}</{tag}>" not in text


class SolverVerifier:
    """The solver writes a solution; the verifier approves it, or the solver tries again.

    There are at most `max_rounds` solutions. The last one is the answer and is never judged.
    Everybody sees all that was written before.
    """

    agents = ("solver", "verifier")

    def __init__(self, task, max_rounds: int | None = None, missing_verdict: str = "approve"):
        self.task = task
        self.max_rounds = max_rounds or 2
        self.missing = missing_verdict == "approve"

    def start(self, problem) -> Episode:
        return Episode(problem, "solver")

    def prompt(self, episode: Episode) -> list[dict]:
        teammates = tuple((name.capitalize(), without_control(text)) for name, text in episode.calls)
        return self.task.prompt(episode.problem, episode.agent, teammates=teammates)

    def advance(self, episodes: list[Episode], texts: list[str]) -> list[bool]:
        """Enter what the agents wrote. Returns which texts have an answer tag, or a verdict tag."""
        valid = []
        for episode, text in zip(episodes, texts):
            episode.calls.append((episode.agent, text))
            if episode.agent == "solver":
                valid.append("<answer>" in text and "</answer>" in text)
                episode.answer = text
                episode.agent = "verifier" if episode.round < self.max_rounds else None
            else:
                valid.append("<verdict>" in text and "</verdict>" in text)
                approved = verdict(text, "approve", "reject", "verdict", self.missing)
                episode.agent = None if approved else "solver"
                episode.round += 1
        return valid


class RouterSearcherResponder:
    """At each of `max_rounds` steps the router says whether the results suffice.

    If so, the responder answers. If not, the searcher, who sees the router's text, writes a query,
    except at the last step: then nobody answers.
    """

    agents = ("router", "searcher", "responder")

    def __init__(self, task, max_rounds: int | None = None, missing_verdict: str = "approve"):
        self.task = task
        self.max_rounds = max_rounds or 4
        self.missing = missing_verdict == "approve"

    def start(self, problem) -> Episode:
        return Episode(problem, "router")

    def prompt(self, episode: Episode) -> list[dict]:
        teammates = ()
        if episode.agent == "searcher":
            teammates = (("Router", without_control(episode.calls[-1][1])),)
        return self.task.prompt(
            episode.problem, episode.agent, history=episode.history, teammates=teammates
        )

    def advance(self, episodes: list[Episode], texts: list[str]) -> list[bool]:
        """Enter what the agents wrote and run all searches at once. Returns which are valid.

        A searcher or responder without its tag has done nothing: the next step begins.
        """
        valid = []
        searching = []  # episodes with a query
        queries = []
        for episode, text in zip(episodes, texts):
            agent = episode.agent
            if agent == "router":
                text, good = project_verdict(text, check_think=True)
                enough = verdict(text.lower(), "yes", "no", "verify", self.missing)
                if enough:
                    episode.agent = "responder"
                else:
                    episode.agent = "searcher" if episode.round < self.max_rounds else None
            else:
                text, good = project_action(text, "search" if agent == "searcher" else "answer")
                if agent == "searcher" and text:
                    searching.append(episode)
                    queries.append(text.removeprefix("<search>").removesuffix("</search>"))
                if agent == "responder":
                    episode.answer = text
                episode.round += 1
                over = episode.answer or episode.round > self.max_rounds
                episode.agent = None if over else "router"
            episode.calls.append((agent, text))
            valid.append(good)
        if queries:
            results = self.task.search(queries)
            for episode, query, result in zip(searching, queries, results):
                episode.history += ((without_control(query), result),)
        return valid
