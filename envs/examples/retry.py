"""A team of one's own, complete: if the solver is wrong, a critic says why, and a refiner answers again.

python algorithms/dr_mas.py --env envs/examples/retry.py:Retry --model-name-or-path ... --max-completion-length 32

The right answer decides whether they write, also in evaluations. Needs the package reasoning-gym.
"""

from envs.control_tokens import without_control
from envs.reasoning_gym import ReasoningGym
from envs.teams import Episode

PRODUCTS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


class Retry:
    agents = ("solver", "critic", "refiner")

    def __init__(self, dataset: str | None = None, max_rounds: int | None = None, missing_verdict: str = ""):
        self.task = ReasoningGym("products", PRODUCTS)  # its problems and their rewards

    def start(self, problem: dict) -> Episode:
        return Episode(problem, "solver")

    def prompt(self, episode: Episode) -> list[dict]:
        messages = self.task.prompt(episode.problem)
        texts = [without_control(text) for _, text in episode.calls]
        said = [{"role": "assistant", "content": text} for text in texts]
        if episode.agent == "critic":
            messages += [said[0], {"role": "user", "content": "This is wrong. Why?"}]
        if episode.agent == "refiner":
            messages += [said[0], {"role": "user", "content": f"This is wrong: {texts[1]} Try again."}]
        return messages

    def advance(self, episodes: list[Episode], texts: list[str]) -> list[bool]:
        for episode, text in zip(episodes, texts):
            agent = episode.agent
            episode.calls.append((agent, text))
            if agent == "critic":
                episode.agent = "refiner"
                continue
            episode.answer = text
            is_wrong = self.task.correctness(episode.problem, text) == 0
            episode.agent = "critic" if agent == "solver" and is_wrong else None
        return [True] * len(texts)  # no role has tags of its own
