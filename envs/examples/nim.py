"""A game of one's own, complete: Nim. `--games envs/examples/nim.py:Nim`."""

import random

from envs.game import Game


class Nim(Game):
    """Players take one to three of a pile of stones in turn; who takes the last one wins.

    The pile has `pile` stones, at random 5 to 20 if it is None. Whoever must move at a multiple of four loses to
    perfect play.
    """

    def __init__(self, *, pile: int | None = None, **options):
        super().__init__(**options)
        self.pile = pile

    def start(self, generator: random.Random) -> None:
        self.stones = self.pile or generator.randint(5, 20)

    def legal_actions(self) -> list[str]:
        return [f"[{number}]" for number in (1, 2, 3) if number <= self.stones]

    def observation(self, player: int) -> str:
        role = f"You are Player {player} in Nim, who takes the last stone wins."
        return f"{role}\nThere are {self.stones} stones.\n{self.available()}"

    def play(self, action: str) -> bool:
        if not action:
            return False
        self.stones -= int(action[1])
        if self.stones == 0:
            self.end(self.player, 1.0, -1.0, "win")
        self.player = 1 - self.player
        return True
