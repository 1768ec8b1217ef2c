"""Teams of language-model agents: who writes next, what it sees, when the episode is over. The two teams of Dr. MAS.

A team is a state machine: `start(problem)` gives an episode; while `episode.agent` is not None, the agent of that name
is shown `prompt(episode)`; `advance` takes what the agents of several episodes wrote. Reward functions grade
`episode.answer`. A new orchestration is a class with these three methods and the names of its `agents`.
"""

from dataclasses import dataclass, field

from envs.search_text import project_action, project_verdict


@dataclass
class Episode:
    problem: object
    agent: str | None  # who writes next; None: the episode is over
    calls: list[tuple[str, str]] = field(default_factory=list)  # (agent, text), in order
    answer: str = ""  # what the reward functions grade
    round: int = 1  # loops (solver and verifier) or steps (search) so far
    history: tuple[tuple[str, str], ...] = ()  # search: queries and what they found

    def rewards(self, task) -> list[float]:
        """One value for each reward function of the task, NaN where it has no opinion."""
        values = [function(self.problem, self.answer) for function in task.reward_functions.values()]
        return [float("nan") if value is None else value for value in values]

    def transcript(self, task) -> str:
        """The problem and what every agent wrote."""
        problem = task.prompt(self.problem)[-1]["content"].split("\n")[0]
        return "\n".join([problem, *(f"{agent} >>> {text}" for agent, text in self.calls)])


def verdict(text: str, yes: str, no: str, tag: str, missing: bool) -> bool:
    """True for <tag>yes</tag>, which wins over a no beside it; `missing` if there is neither. Case counts."""
    found = {word: f"<{tag}>{word}</{tag}>" in text for word in (yes, no)}
    return found[yes] or (missing and not found[no])


class SolverVerifier:
    """The solver writes a solution, the verifier approves or rejects it, the solver tries again: `max_rounds` solutions
    at most. The last one is the answer, and is never judged. Everybody sees all that was written before."""

    agents = ("solver", "verifier")

    def __init__(self, task, max_rounds: int | None = None, missing_verdict: str = "approve"):
        self.task, self.max_rounds, self.missing = task, max_rounds or 2, missing_verdict == "approve"

    def start(self, problem) -> Episode:
        return Episode(problem, "solver")

    def prompt(self, episode: Episode) -> list[dict]:
        teammates = tuple((name.capitalize(), text) for name, text in episode.calls)
        return self.task.prompt(episode.problem, episode.agent, teammates=teammates)

    def advance(self, episodes: list[Episode], texts: list[str]) -> list[bool]:
        """Enter what the agents wrote. Returns which outputs are valid: an answer tag, or a verdict tag."""
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
                episode.agent, episode.round = (None if approved else "solver"), episode.round + 1
        return valid


class RouterSearcherResponder:
    """At each of `max_rounds` steps the router says whether the results suffice. If so, the responder answers; if not,
    the searcher, who sees the router's text, writes a query, except at the last step: then nobody answers."""

    agents = ("router", "searcher", "responder")

    def __init__(self, task, max_rounds: int | None = None, missing_verdict: str = "approve"):
        self.task, self.max_rounds, self.missing = task, max_rounds or 4, missing_verdict == "approve"

    def start(self, problem) -> Episode:
        return Episode(problem, "router")

    def prompt(self, episode: Episode) -> list[dict]:
        teammates = (("Router", episode.calls[-1][1]),) if episode.agent == "searcher" else ()
        return self.task.prompt(episode.problem, episode.agent, history=episode.history, teammates=teammates)

    def advance(self, episodes: list[Episode], texts: list[str]) -> list[bool]:
        """Enter what the agents wrote and run all searches at once. Returns which outputs are valid. A searcher or
        responder without its tag has done nothing: the next step begins."""
        valid, queries = [], []
        for episode, text in zip(episodes, texts):
            if episode.agent == "router":
                text, good = project_verdict(text, check_think=True)
                enough = verdict(text.lower(), "yes", "no", "verify", self.missing)
                agent = "responder" if enough else "searcher" if episode.round < self.max_rounds else None
            else:
                text, good = project_action(text, "search" if episode.agent == "searcher" else "answer")
                if text and episode.agent == "searcher":
                    queries.append((episode, text.removeprefix("<search>").removesuffix("</search>")))
                episode.answer = text if episode.agent == "responder" else ""
                episode.round += 1
                agent = None if episode.answer or episode.round > self.max_rounds else "router"
            episode.calls.append((episode.agent, text))
            episode.agent = agent
            valid.append(good)
        for (episode, query), result in zip(
            queries, self.task.search([query for _, query in queries]) if queries else []
        ):
            episode.history += ((query, result),)
        return valid
