"""A social dilemma of one's own, complete: a common purse. `--games envs/examples/commons.py:Commons`."""

import random

from envs.dilemma import Dilemma


class Commons(Dilemma):
    """Each has four points a round and puts 0 to 4 into a purse. It grows by a half, and is halved between the two.

    A state is the list of all rounds so far, as (what player 0 put in, what player 1 put in).
    """

    rounds = 5
    scale = 4.0

    def start(self, generator: random.Random) -> list:
        return []

    def legal_actions(self, state, player: int) -> list[str]:
        return [f"[{points}]" for points in range(5)]

    def observation(self, state, player: int) -> str:
        lines = ["Keep some of your 4 points, give the others into a purse that grows by a half and is shared."]
        lines += [f"You gave {pair[player]}, they gave {pair[1 - player]}." for pair in state[-1:]]
        return "\n".join(lines)

    def play(self, state, actions: list[str]) -> list:
        return [*state, (int(actions[0][1]), int(actions[1][1]))]

    def rewards(self, state) -> list[float]:
        share = 1.5 * sum(state[-1]) / 2
        return [4 - given + share for given in state[-1]]
