"""Blotto on a small map, in the notation of Diplomacy: two players order all their units at once.

    board = Blotto()
    board.reset(random.Random(0))
    while not board.done:
        board.play([choose(board, 0), choose(board, 1)])  # a tuple of texts each, one for each unit
    board.centres  # of player 0 and of player 1

The fields A, B, C lie on a ring and have different values. A unit holds ("H") or goes to a
neighbouring field ("- B"). Who has more units on a field takes it; if both have as many, it stays
with its owner. A field counts as many supply centres as its value.

This is the form that dipllm.py wants of a board: a class of yours with reset, legal_orders, prompt,
after, play and done is played in its place, `dipllm.py --env FILE.py:Class`. No dependencies.
"""

import random

NAMES = "ABCDEFGHIJ"
MINE = {0: "mine", 1: "theirs", None: "free"}


class Blotto:
    """One game. Its beginning, values and first places, is drawn; then nothing is random.

    num_fields: 3 to 10; on 3 a unit can reach all of them.
    num_units: of each player; a player has 3 ** num_units joint orders.
    num_turns: after which the game is over.
    """

    def __init__(self, *, num_fields: int = 4, num_units: int = 3, num_turns: int = 2):
        whole = all(isinstance(number, int) for number in (num_fields, num_units, num_turns))
        if not whole or not 3 <= num_fields <= len(NAMES) or num_units < 1 or num_turns < 1:
            words = "3 to 10 num_fields, and whole numbers from 1 as num_units and num_turns"
            raise ValueError(f"blotto needs {words}")
        self.num_fields = num_fields
        self.num_units = num_units
        self.num_turns = num_turns

    def reset(self, generator: random.Random) -> None:
        """Begin a game; all chance comes from the generator."""
        self.values = [generator.randint(1, 5) for _ in range(self.num_fields)]
        self.owners = [None] * self.num_fields  # a player, or nobody
        self.places = []  # of each player's units
        for _ in range(2):
            fields = [generator.randrange(self.num_fields) for _ in range(self.num_units)]
            self.places.append(sorted(fields))
        self.turn = 0

    @property
    def done(self) -> bool:
        return self.turn == self.num_turns

    @property
    def centres(self) -> tuple[int, int]:
        """Supply centres of player 0 and of player 1."""
        return self.count(self.owners)

    def count(self, owners: list) -> tuple[int, int]:
        held = [0, 0]
        for owner, value in zip(owners, self.values):
            if owner is not None:
                held[owner] += value
        return tuple(held)

    def legal_orders(self, player: int) -> list[list[str]]:
        """For each unit of the player the texts of its legal orders."""
        return [["H", *(f"- {NAMES[f]}" for f in self.next_to(p))] for p in self.places[player]]

    def next_to(self, field: int) -> list[int]:
        return sorted({(field - 1) % self.num_fields, (field + 1) % self.num_fields})

    def prompt(self, player: int, orders: tuple[str, ...]) -> list[dict]:
        """Chat messages for the player: the board, what it has ordered, and whose order is next."""
        fields = []
        for name, value, owner in zip(NAMES, self.values, self.owners):
            seen = owner if owner is None or player == 0 else 1 - owner
            fields.append(f"{name} {value} {MINE[seen]}")
        mine = [NAMES[field] for field in self.places[player]]
        theirs = [NAMES[field] for field in self.places[1 - player]]
        given = [f"{place} {order}" for place, order in zip(mine, orders)]
        lines = [
            f"Turn {self.turn + 1} of {self.num_turns}. {', '.join(fields)}.",
            f"Mine {' '.join(mine)}, theirs {' '.join(theirs)}.",
            f"Orders: {', '.join(given) or 'none'}. {mine[len(orders)]}",
        ]
        return [{"role": "user", "content": "\n".join(lines)}]

    def after(self, orders: tuple) -> tuple[int, int]:
        """The centres of both if they gave these orders now; the board stays as it is."""
        return self.count(self.outcome(orders)[0])

    def play(self, orders: tuple) -> None:
        """Carry out the orders of both, a tuple of texts for each player."""
        self.owners, self.places = self.outcome(orders)
        self.turn += 1

    def outcome(self, orders: tuple) -> tuple[list, list]:
        """Owners and places after these orders."""
        places = []
        for before, texts in zip(self.places, orders):
            moved = [
                field if text == "H" else NAMES.index(text[-1])
                for field, text in zip(before, texts)
            ]
            places.append(sorted(moved))
        owners = list(self.owners)
        for field in range(self.num_fields):
            difference = places[0].count(field) - places[1].count(field)
            if difference != 0:
                owners[field] = 0 if difference > 0 else 1
        return owners, places
