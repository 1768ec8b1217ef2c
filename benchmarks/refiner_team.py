"""Dr. MAS where its lemma says it matters: easy questions, and an agent that acts mainly after a failure.

    python benchmarks/refiner_team.py --max-steps 40 --normalization global      # any flag of algorithms/dr_mas.py

The search team of `envs/teams.py` on questions of one hop, with a fourth agent: the searcher writes the first query,
the refiner all later ones. Where most first queries are right, most calls of the refiner are in episodes that fail.
Everything else is `algorithms/dr_mas.py`, whose team is replaced.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from algorithms import dr_mas
from algorithms.dr_mas import Args
from envs.search_qa import SearchQA
from envs.teams import Episode, RouterSearcherResponder


class RefinerTeam(RouterSearcherResponder):
    """The search team whose second and later queries are another agent's."""

    agents = ("router", "searcher", "refiner", "responder")

    def prompt(self, episode: Episode) -> list[dict]:
        """A refiner sees what a searcher would."""
        name, episode.agent = episode.agent, episode.agent.replace("refiner", "searcher")
        messages = super().prompt(episode)
        episode.agent = name
        return messages

    def advance(self, episodes: list[Episode], texts: list[str]) -> list[bool]:
        """As the search team, except for the name of who writes a later query."""
        names = [episode.agent for episode in episodes]
        for episode in episodes:
            episode.agent = episode.agent.replace("refiner", "searcher")
        valid = super().advance(episodes, texts)
        for episode, name in zip(episodes, names):
            episode.calls[-1] = (name, episode.calls[-1][1])
            if episode.agent == "searcher" and any(agent == "searcher" for agent, _ in episode.calls):
                episode.agent = "refiner"
        return valid


def load_team(args: Args, dataset: str | None) -> RefinerTeam:
    """In place of the script's own."""
    return RefinerTeam(SearchQA(hops=HOPS), args.max_rounds, args.missing_verdict)


HOPS = (1,)

if __name__ == "__main__":
    dr_mas.load_team = load_team
    dr_mas.train(dr_mas.parse_args())
