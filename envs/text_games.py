"""Tic-tac-toe, Kuhn poker and a negotiation as text games: SPIRAL's zero-sum games (2506.24119).

    game = make_game("kuhn")
    game.reset(random.Random(0))
    while not game.done:
        game.step(model(game.prompt(game.player)))
    game.rewards  # player 0's and player 1's
    game.reason  # win, draw, forfeit, rejected or turn limit

`step` takes what a model wrote, thoughts included, and reads the action from it as SPIRAL's code
does. Rules, texts and rewards follow that code too (spiral-rl/spiral at a02d0ed on TextArena
0.6.4), except that Kuhn poker is by default the standard game of one hand. Every random choice
comes from the `random.Random` that is passed in. No dependencies.

make_game also takes the games of the package textarena (envs/textarena_games.py); spiral_rae.py
loads your own (envs/game.py says what it needs, envs/examples/nim.py is one).
"""

import functools
import inspect
import random
from collections.abc import Callable

from envs.game import Game
from envs.negotiation import Negotiation


class TicTacToe(Game):
    """Cells 0 to 8 by rows; `board` has a dot where one is free. Player 0 plays O and begins."""

    LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))

    def start(self, generator: random.Random) -> None:
        self.board = "." * 9

    def legal_actions(self) -> list[str]:
        return [f"[{cell}]" for cell, mark in enumerate(self.board) if mark == "."]

    def observation(self, player: int) -> str:
        cells = [str(cell) if mark == "." else mark for cell, mark in enumerate(self.board)]
        rows = "\n".join(" ".join(cells[row : row + 3]) for row in (0, 3, 6))
        role = f"You are Player {player} in TicTacToe and play {'OX'[player]}, three in a row win."
        return f"{role}\n{rows}\n{self.available()}"

    def play(self, action: str) -> bool:
        if not action:
            return False
        cell, mark = int(action[1]), "OX"[self.player]
        self.board = self.board[:cell] + mark + self.board[cell + 1 :]
        if any(all(self.board[i] == mark for i in line) for line in self.LINES):
            self.end(self.player, 1.0, -1.0, "win")
        elif "." not in self.board:
            self.end(0, 0.0, 0.0, "draw")
        self.player = 1 - self.player
        return True


class KuhnPoker(Game):
    """Three cards J < Q < K, one each, an ante of 1, at most one bet of 1.

    A prompt shows the whole history.

    variant: `standard` is one hand, player 0 acts first, the rewards are chips (value -1/18 to
        player 0). In the two published ones player 1 acts first in the first hand, then the first
        move alternates, bets move no chips, and the winner gets 1: of the last of five hands in
        `spiral`, of more chips after three hands in `textarena`.
    cards: player 0's and player 1's card of each hand, as in ("JK", "QJ"), instead of random ones.
    """

    HANDS = {"standard": 1, "spiral": 5, "textarena": 3}
    RULES = {
        "standard": "One hand, ante 1, a bet adds 1.",
        "spiral": "5 hands, the winner of the last one wins.",
        "textarena": "3 hands, more chips win.",
    }

    def __init__(
        self, *, variant: str = "standard", cards: tuple[str, ...] | None = None, **options
    ):
        super().__init__(**options)
        if variant not in self.HANDS:
            names = ", ".join(self.HANDS)
            raise ValueError(f"kuhn has no variant {variant}, expected one of {names}")
        pairs = {a + b for a in "JQK" for b in "JQK" if a != b}
        hands = self.HANDS[variant]
        if cards is not None and (len(cards) != hands or not set(cards) <= pairs):
            raise ValueError(f"kuhn, {variant}, needs cards for {hands} hands, each like JK or QJ")
        self.variant = variant
        self.cards = cards

    def start(self, generator: random.Random) -> None:
        hands = range(self.HANDS[self.variant])
        self.deals = self.cards or ["".join(generator.sample("JQK", 2)) for _ in hands]
        self.chips = [0, 0]
        self.hands = []  # each a list of (player, action); the last one is being played
        self.winners = []  # of the hands before it
        self.begin_hand()

    def begin_hand(self) -> None:
        self.hands.append([])
        self.chips, self.pot = [self.chips[0] - 1, self.chips[1] - 1], 2
        self.player = 0 if self.variant == "standard" else len(self.hands) % 2

    def legal_actions(self) -> list[str]:
        bet = any(action == "[bet]" for _, action in self.hands[-1])
        return ["[fold]", "[call]"] if bet else ["[check]", "[bet]"]

    def observation(self, player: int) -> str:
        lines = [f"You are Player {player} in Kuhn poker, J < Q < K. {self.RULES[self.variant]}"]
        for number, (deal, hand) in enumerate(zip(self.deals, self.hands)):
            texts = [f"Your card: {deal[player]}."]
            texts += [f"Player {who}: {action}." for who, action in hand]
            if number < len(self.winners):
                shown = f" {deal[1 - player]} was shown." * (hand[-1][1] != "[fold]")
                texts.append(f"Player {self.winners[number]} wins.{shown}")
            lines.append(" ".join(texts))
        return "\n".join([*lines, self.available()])

    def play(self, action: str) -> bool:
        if not action:
            return False
        hand, deal = self.hands[-1], self.deals[len(self.hands) - 1]
        hand.append((self.player, action))
        if self.variant == "standard" and action in ("[bet]", "[call]"):
            self.chips[self.player], self.pot = self.chips[self.player] - 1, self.pot + 1
        if action == "[fold]":
            self.end_hand(1 - self.player)
        elif action == "[call]" or [action for _, action in hand] == ["[check]", "[check]"]:
            self.end_hand(0 if "JQK".index(deal[0]) > "JQK".index(deal[1]) else 1)
        else:
            self.player = 1 - self.player
        return True

    def end_hand(self, winner: int) -> None:
        self.chips[winner], self.pot = self.chips[winner] + self.pot, 0
        self.winners.append(winner)
        if len(self.hands) < self.HANDS[self.variant]:
            return self.begin_hand()
        if self.variant == "textarena":  # an odd number of hands, each worth one chip: no draw
            winner = 0 if self.chips[0] > self.chips[1] else 1
        stake = float(self.chips[winner]) if self.variant == "standard" else 1.0
        self.end(winner, stake, -stake, "win")


GAMES = {"tictactoe": TicTacToe, "kuhn": KuhnPoker, "negotiation": Negotiation}


def make_game(name: str, **options) -> Game:
    """A game by its name: one of GAMES, or `textarena:TicTacToe-v0`.

    The options are the keywords of its class and of Game.
    """
    game = game_class(name)
    parameters = inspect.signature(game).parameters
    known = [option for option, p in parameters.items() if p.kind is not p.VAR_KEYWORD]
    if len(known) < len(parameters):  # it hands what it does not know on to Game
        known += inspect.signature(Game).parameters
    for option in options:
        if option not in known:
            expected = ", ".join(known) or "none"
            raise ValueError(f"{name} has no option {option}, expected one of {expected}")
    return game(**options)


def game_class(name: str) -> Callable[..., Game]:
    """What makes the games of this name."""
    if name in GAMES:
        return GAMES[name]
    kind, _, rest = name.rpartition(":")
    if kind == "textarena":
        from envs.textarena_games import TextArenaGame

        return functools.partial(TextArenaGame, rest)
    expected = ", ".join([*GAMES, "textarena:NAME or (in spiral_rae.py) FILE.py:CLASS"])
    raise ValueError(f"there is no text game {name}, expected one of {expected}")
