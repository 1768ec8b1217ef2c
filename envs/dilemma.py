"""Games of two who are neither opponents nor a team, as text, with rewards for both after every round.

    game = make_game("ipd")
    state = game.start(random.Random(0))
    for _ in range(game.rounds):
        actions = ["", ""]
        for player in game.movers(state):
            text = model(game.prompt(state, player))
            actions[player] = game.parse(state, player, text)  # None if it names no legal action
        state = game.play(state, actions)
        game.rewards(state)  # of this round, player 0's and player 1's

A game of your own subclasses Dilemma (envs/examples/commons.py is one). It has

    rounds                       how many there are, the same in every game
    start(generator)             the first state; chance comes from this random.Random alone
    legal_actions(state, player) a list of texts, each in square brackets
    observation(state, player)   what a player sees before the round
    play(state, actions)         a new state, after the actions of players 0 and 1; the old one stays
    rewards(state)               two numbers: what the last round brought player 0 and player 1

and, where they are not those of Dilemma, `movers`, `parse`, `scale` and `opponents`. No dependencies.
"""

import copy
import inspect
import random
from collections.abc import Callable
from statistics import mean

from envs.game import REQUEST, parse_action, spoken
from envs.negotiation import Negotiation


class Dilemma:
    """What the games share.

    rounds: of one game.
    scale: rewards are divided by it before anything is computed from them.
    """

    rounds = 10
    scale = 1.0

    def movers(self, state) -> tuple[int, ...]:
        """The players who write in this round. They do not see what the other one writes."""
        return 0, 1

    def parse(self, state, player: int, text: str) -> str | None:
        """The legal action that a text names after its thoughts, read as envs/game.py does; None if there is none."""
        return parse_action(spoken(text), self.legal_actions(state, player)) or None

    def prompt(self, state, player: int) -> list[dict]:
        """Chat messages for a player who writes now."""
        actions = ", ".join(self.legal_actions(state, player))
        text = f"{self.observation(state, player)}\nAvailable actions: {actions}.\n{REQUEST}"
        return [{"role": "user", "content": text}]

    def opponents(self) -> dict[str, Callable]:
        """Fixed players for evaluations: functions of (state, player, generator) that give an action."""
        return {"random": self.random_action}

    def random_action(self, state, player: int, generator: random.Random) -> str:
        return generator.choice(self.legal_actions(state, player))


class PrisonersDilemma(Dilemma):
    """Both choose [A] (cooperate) or [B] (defect) at once. A state is the list of all rounds so far, as "AB".

    history: rounds that a prompt shows. With 1 every policy has five situations: it is memory-one.
    payoffs: of one who plays A against A, A against B, B against A, B against B.
    """

    scale = 5.0  # as in the code of Advantage Alignment

    def __init__(self, *, rounds: int = 10, history: int = 1, payoffs=(3.0, 0.0, 5.0, 1.0)):
        whole = [isinstance(number, int) and number >= 1 for number in (rounds, history)]
        if not all(whole) or not isinstance(payoffs, list | tuple) or len(payoffs) != 4:
            message = "rounds and history as whole numbers from 1, and four payoffs, of AA AB BA BB"
            raise ValueError(f"ipd needs {message}")
        self.rounds = rounds
        self.history = history
        self.payoffs = dict(zip(("AA", "AB", "BA", "BB"), map(float, payoffs)))

    def start(self, generator: random.Random) -> list[str]:
        return []

    def legal_actions(self, state, player: int) -> list[str]:
        return ["[A]", "[B]"]

    def observation(self, state, player: int) -> str:
        points = ", ".join(f"{own} and {other} {n:g}" for (own, other), n in self.payoffs.items())
        lines = [f"You and they choose [A] or [B] at the same time. Your points: {points}."]
        shown = state[-self.history :]
        for ago, pair in zip(range(len(shown), 0, -1), shown):
            when = "Last round" if ago == 1 else f"{ago} rounds ago"
            lines.append(f"{when}: you {pair[player]}, they {pair[1 - player]}.")
        return "\n".join(lines if shown else [*lines, "This is the first round."])

    def play(self, state: list[str], actions: list[str]) -> list[str]:
        return [*state, actions[0][1] + actions[1][1]]

    def rewards(self, state: list[str]) -> list[float]:
        own, other = state[-1]
        return [self.payoffs[own + other], self.payoffs[other + own]]

    def opponents(self) -> dict[str, Callable]:
        def repeat(state, player, generator):
            return f"[{state[-1][1 - player]}]" if state else "[A]"

        fixed = {"cooperate": lambda *_: "[A]", "defect": lambda *_: "[B]", "tit_for_tat": repeat}
        return super().opponents() | fixed

    def situations(self) -> dict[str, list[str]]:
        """A state for each situation of player 0, to read out a memory-one policy: start, AA, AB, BA, BB."""
        return {"start": []} | {pair: [pair] for pair in self.payoffs}

    def read_out(self, answers: list[tuple[str, str | None]]) -> dict[str, float]:
        """What answers to prompts of the five situations say of a policy: chances of [A] and exact payoffs.

        answers: (situation, action); where the action is None, an illegal text, either is played, and illegal is
        their share. With a longer history there are more situations, so that the payoffs do not follow from these.
        """
        found = {situation: [] for situation in self.situations()}
        for situation, action in answers:
            found[situation].append({"[A]": 1.0, "[B]": 0.0, None: 0.5}[action])
        policy = {situation: mean(chances) for situation, chances in found.items()}
        scores = {f"chance_of_A/{situation}": chance for situation, chance in policy.items()}
        scores["illegal"] = mean(float(action is None) for _, action in answers)
        if self.history == 1:
            scores["exact/self"] = memory_one_payoffs(self, policy, policy)[0]
            scores["exact/defect"], scores["exact/defect_gets"] = memory_one_payoffs(self, policy, DEFECTS)
        return scores


class Coins(Dilemma):
    """A coin lies there in every round, player 0's or player 1's. Both choose [take] or [leave] at once.

    Taking it brings 1 point, or each half if both take it; if the other one's was taken, its owner
    loses 2. So both do best if everybody takes the own coins alone. After the coin game of Lerer and
    Peysakhovich (arXiv 1707.01068), without the board. A state is (owners of all coins, rounds so far).
    """

    def start(self, generator: random.Random):
        return [generator.randrange(2) for _ in range(self.rounds)], []

    def legal_actions(self, state, player: int) -> list[str]:
        return ["[take]", "[leave]"]

    def observation(self, state, player: int) -> str:
        owners, played = state
        owner = "yours" if owners[len(played)] == player else "theirs"
        points = "Taking a coin brings 1 point, or half of it if both take it."
        lines = [f"{points} If they take yours, you lose 2; if you take theirs, they do."]
        if played:
            last = "yours" if owners[len(played) - 1] == player else "theirs"
            own, other = played[-1][player], played[-1][1 - player]
            lines.append(f"Last coin: {last}, you {own}, they {other}.")
        return "\n".join([*lines, f"This coin: {owner}."])

    def play(self, state, actions: list[str]):
        owners, played = state
        return owners, [*played, [action.strip("[]") for action in actions]]

    def rewards(self, state) -> list[float]:
        owners, played = state
        takes = [action == "take" for action in played[-1]]
        points = [take / max(1, sum(takes)) for take in takes]
        owner = owners[len(played) - 1]
        points[owner] -= 2.0 * takes[1 - owner]
        return points


class Split(Dilemma):
    """The negotiation of envs/negotiation.py with both payoffs: each gets what its own goods gained in worth.

    The players write in turn, ten messages. A state is (the negotiation, the gains before this message).
    """

    scale = 100.0
    rounds = Negotiation.MESSAGES

    def start(self, generator: random.Random):
        game = Negotiation()
        game.reset(generator)
        return game, [0, 0]

    def movers(self, state) -> tuple[int, ...]:
        return (state[0].player,)

    def legal_actions(self, state, player: int) -> list[str]:
        return state[0].legal_actions()

    def parse(self, state, player: int, text: str) -> str | None:
        message = state[0].parse(spoken(text))
        return message if message and copy.deepcopy(state[0]).play(message) else None

    def prompt(self, state, player: int) -> list[dict]:
        text = state[0].observation(player).replace("More gain wins.", "Your own gain counts.")
        return [{"role": "user", "content": f"{text}\n{REQUEST}"}]

    def play(self, state, actions: list[str]):
        game = copy.deepcopy(state[0])
        before = [game.gain(0), game.gain(1)]
        game.play(actions[game.player])
        return game, before

    def rewards(self, state) -> list[float]:
        game, before = state
        return [float(game.gain(player) - before[player]) for player in (0, 1)]


GAMES = {"ipd": PrisonersDilemma, "coins": Coins, "split": Split}


def make_game(name: str, **options) -> Dilemma:
    """A game of GAMES by its name; the options are the keywords of its class."""
    if name not in GAMES:
        expected = ", ".join([*GAMES, "FILE.py:CLASS"])
        raise ValueError(f"there is no game {name}, expected one of {expected}")
    known = inspect.signature(GAMES[name]).parameters
    for option in options:
        if option not in known:
            raise ValueError(f"{name} has no option {option}, expected {', '.join(known) or 'none'}")
    return GAMES[name](**options)


# --- Exact values ---------------------------------------------------------------------------------------------------

DEFECTS = {"start": 0.0, "AA": 0.0, "AB": 0.0, "BA": 0.0, "BB": 0.0}  # always; a memory-one policy


def memory_one_payoffs(game: PrisonersDilemma, first: dict[str, float], second: dict[str, float]) -> list[float]:
    """Mean payoff a round of two memory-one policies, player 0's and player 1's, without sampling.

    A policy is the probability of [A] in each situation, "AB" being own A and the other's B.
    """
    chances = {"start": 1.0}  # of what happened in the round before, as player 0 sees it
    totals = [0.0, 0.0]
    for _ in range(game.rounds):
        after = {"AA": 0.0, "AB": 0.0, "BA": 0.0, "BB": 0.0}
        for situation, chance in chances.items():
            seen = situation if situation == "start" else situation[::-1]  # by player 1
            for pair in after:
                own = first[situation] if pair[0] == "A" else 1 - first[situation]
                other = second[seen] if pair[1] == "A" else 1 - second[seen]
                after[pair] += chance * own * other
        chances = after
        for pair, chance in chances.items():
            totals[0] += chance * game.payoffs[pair]
            totals[1] += chance * game.payoffs[pair[::-1]]
    return [total / game.rounds for total in totals]
