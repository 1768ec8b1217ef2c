"""Exact solutions of two small games: Kuhn poker (best responses, NashConv) and tic-tac-toe (minimax).

For tests and evaluation; nothing here is sampled. A Kuhn policy is the probability of betting or calling at each of
the 12 information sets of the standard game (the only one meant here): a dict by name, or rows in the order of
KUHN_INFOSETS, shape (12,) or (12,2) for (check or fold, bet or call). Names are OpenSpiel's: the card (0 is J, 1 Q,
2 K) and what was done since, p for check or fold, b for bet or call; "1pb" is player 0 with Q who checked and faces a
bet. A tic-tac-toe board has nine characters, a dot where a cell is free. The tests compare with OpenSpiel.
"""

import itertools
import random
from collections.abc import Mapping, Sequence
from functools import cache

from envs.text_games import KuhnPoker, TicTacToe

KUHN_INFOSETS = ("0", "1", "2", "0pb", "1pb", "2pb", "0p", "1p", "2p", "0b", "1b", "2b")
DEALS = tuple(itertools.permutations(range(3), 2))  # player 0's and player 1's card, one in six each
LETTERS = {"[check]": "p", "[fold]": "p", "[bet]": "b", "[call]": "b"}


# --- Kuhn poker ---------------------------------------------------------------------------------------------------


def kuhn_infoset(game: KuhnPoker) -> str:
    """Name of the information set of the player whose turn it is."""
    return str("JQK".index(game.deals[0][game.player])) + "".join(LETTERS[action] for _, action in game.hands[0])


def kuhn_decision_points(**options) -> list[tuple[str, KuhnPoker]]:
    """Every information set with a game in it, to read out a policy with `game.prompt(game.player)`. Its legal actions
    are (pass, bet) in this order; the other player's card differs between the games of a set, their prompts do not."""
    points = []
    for name in KUHN_INFOSETS:
        own, other = "JQK"[int(name[0])], "JQK"[(int(name[0]) + 1) % 3]
        first = len(name) != 2  # player 0 decides at the start and after pb
        game = KuhnPoker(cards=(own + other if first else other + own,), **options)
        game.reset(random.Random(0))
        for letter in name[1:]:
            game.step(game.legal_actions()["pb".index(letter)])
        points.append((name, game))
    return points


def kuhn_policy(policy: Mapping | Sequence) -> dict[str, float]:
    """Any of the forms above as {information set: probability of betting or calling}."""
    rows = policy if isinstance(policy, Mapping) else dict(zip(KUHN_INFOSETS, policy))
    if len(policy) != len(KUHN_INFOSETS) or set(rows) != set(KUHN_INFOSETS):
        raise ValueError(f"a Kuhn policy needs the 12 information sets {', '.join(KUHN_INFOSETS)}")
    bets = {}
    for name in KUHN_INFOSETS:
        row = [float(number) for number in (rows[name] if hasattr(rows[name], "__len__") else [rows[name]])]
        probabilities = row if len(row) == 2 else [1.0 - row[-1], row[-1]]
        if len(row) > 2 or min(probabilities) < -1e-6 or abs(sum(probabilities) - 1.0) > 1e-5:
            raise ValueError(f"information set {name}: {row} is neither a probability nor a pair that sums to 1")
        bets[name] = probabilities[1]
    return bets


def kuhn_return(deal: tuple[int, int], history: str) -> int | None:
    """Chips that player 0 wins, None where somebody must act."""
    higher = 1 if deal[0] > deal[1] else -1
    return {"pp": higher, "bp": 1, "bb": 2 * higher, "pbp": -1, "pbb": 2 * higher}.get(history)


def tree_value(deal: tuple[int, int], history: str, policies: Sequence[Mapping[str, float]]) -> float:
    """Expected return of player 0 from a node on."""
    end = kuhn_return(deal, history)
    if end is not None:
        return end
    bet = policies[len(history) % 2][f"{deal[len(history) % 2]}{history}"]
    values = [
        tree_value(deal, history + letter, policies) if weight else 0.0
        for letter, weight in (("p", 1 - bet), ("b", bet))
    ]
    return (1 - bet) * values[0] + bet * values[1]


def kuhn_best_response(policy, player: int) -> tuple[float, dict[str, float]]:
    """Value to `player` of its best answer to `policy`, and that answer, pure (the other's sets as they are)."""
    answer = kuhn_policy(policy)
    policies = [answer, answer]
    own = [name for name in KUHN_INFOSETS if (len(name) - 1) % 2 == player]
    for name in sorted(own, key=len, reverse=True):  # from the last decision back: the own later ones are settled
        values = []
        for letter in "pb":
            value = 0.0
            for deal in DEALS:
                if str(deal[player]) == name[0]:
                    reach = other_reach(deal, name[1:], player, answer)
                    value += reach * tree_value(deal, name[1:] + letter, policies) if reach else 0.0
            values.append(value if player == 0 else -value)
        answer[name] = float(values[1] > values[0])
    value = sum(tree_value(deal, "", policies) for deal in DEALS) / len(DEALS)
    return (value if player == 0 else -value), answer


def other_reach(deal: tuple[int, int], history: str, player: int, policy: Mapping[str, float]) -> float:
    """Probability that the other player plays its part of the history."""
    reach = 1.0
    for i in range(1 - player, len(history), 2):
        bet = policy[f"{deal[1 - player]}{history[:i]}"]
        reach *= bet if history[i] == "b" else 1 - bet
    return reach


def kuhn_nash_conv(policy) -> float:
    """What both players together could gain by answering the policy best: 0 at an equilibrium.

    Twice the exploitability. The values on the policy cancel in a zero-sum game: the best responses' values remain.
    """
    return sum(kuhn_best_response(policy, player)[0] for player in (0, 1))


def kuhn_average(policies: Sequence[Sequence[float]]) -> list[float]:
    """The policy that plays like one of the policies, drawn anew for every hand. (M,12) -> (12,)

    Where a player has checked before (0pb, 1pb, 2pb), a policy counts as often as it checks there: one that never
    checks with a card says nothing about what comes after that. Where none ever checks, all count the same.
    """
    average = []
    for number, name in enumerate(KUHN_INFOSETS):
        weights = [1.0] * len(policies)
        if len(name) == 3:
            weights = [1.0 - policy[KUHN_INFOSETS.index(name[0])] for policy in policies]
        weights = weights if sum(weights) > 0 else [1.0] * len(policies)
        bets = sum(weight * policy[number] for weight, policy in zip(weights, policies))
        average.append(bets / sum(weights))
    return average


# --- Tic-tac-toe --------------------------------------------------------------------------------------------------


@cache
def tictactoe_result(board: str) -> int | None:
    """1 if player 0 (O) has a line, -1 if player 1 (X) has one, 0 for a full board, None where somebody must move."""
    for mark, result in (("O", 1), ("X", -1)):
        if any(all(board[i] == mark for i in line) for line in TicTacToe.LINES):
            return result
    return None if "." in board else 0


def free_cells(board: str) -> list[int]:
    return [cell for cell, mark in enumerate(board) if mark == "."]


def after(board: str, cell: int) -> str:
    """The board when the player whose turn it is has marked a cell."""
    return board[:cell] + "OX"[board.count(".") % 2 == 0] + board[cell + 1 :]


@cache
def minimax_value(board: str) -> int:
    """Result, to player 0, if both play best from here."""
    result = tictactoe_result(board)
    if result is not None:
        return result
    best = max if board.count(".") % 2 else min  # an odd number of free cells: player 0 moves
    return best(minimax_value(after(board, cell)) for cell in free_cells(board))


def optimal_cells(board: str) -> list[int]:
    """The moves that keep the value of the board; a slow win counts as much as a fast one."""
    return [cell for cell in free_cells(board) if minimax_value(after(board, cell)) == minimax_value(board)]


def minimax_action(board: str, generator: random.Random) -> str:
    """An optimal action, each with the same probability."""
    return f"[{generator.choice(optimal_cells(board))}]"
