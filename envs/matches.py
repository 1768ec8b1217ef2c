"""Matches of `envs/text_games.py`: a game, who sits where, what was written; and opponents that are no model."""

import random
from dataclasses import dataclass, field

from envs.game import Game
from envs.game_demonstrations import random_action
from envs.game_solvers import minimax_action
from envs.text_games import make_game

OPPONENTS = {  # (game, random.Random) -> what is written
    "random": lambda game, generator: f"\\boxed{{{random_action(game, generator)}}}",
    "minimax": lambda game, generator: f"\\boxed{{{minimax_action(game.board, generator)}}}",  # tictactoe only
}


@dataclass
class Match:
    name: str  # of the game
    game: Game
    seats: tuple[str, str]  # names of the players
    seed: str  # of what is sampled in it
    texts: list[str] = field(default_factory=list)

    @property
    def seat(self) -> str:
        """Whose turn it is, "" when the game is over."""
        return "" if self.game.done else self.seats[self.game.player]

    def move(self, text: str) -> None:
        self.texts.append(f"Player {self.game.player}, {self.seat}: {text}")
        self.game.step(text)

    def gain(self, role: int) -> float:
        """The role's result without the handicap."""
        return self.game.rewards[role] - (1 - 2 * role) * self.game.handicap

    def row(self, learner: str) -> list[float]:
        """Both results, which of the roles the learner has, turns, whether it was a draw, and a forfeit."""
        ends = self.game.turns, self.gain(0) == self.gain(1), self.game.reason in ("forfeit", "rejected")
        return [float(x) for x in (*self.game.rewards, *(seat == learner for seat in self.seats), *ends)]


def new_match(name: str, seats: tuple[str, str], seed: str, deal: str, **options) -> Match:
    """A match whose chance moves, the cards, are those of the seed `deal`."""
    match = Match(name, make_game(name, **options), seats, seed)
    match.game.reset(random.Random(deal))
    return match
