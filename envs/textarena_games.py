"""Two-player games of the optional package `textarena`, played like those of envs/text_games.py.

    game = make_game("textarena:TicTacToe-v0")

SPIRAL's three are TicTacToe-v0, KuhnPoker-v0 and SimpleNegotiation-v0 (Guertler et al., TextArena,
arXiv 2504.11442; checked with 0.7.4). The prompt is what TextArena's LLMObservationWrapper shows:
all that the player has seen so far. Where the game's last board lists the legal moves, the text
must name one of them, as in SPIRAL's code; elsewhere any text is a move, without its thoughts.
There is no second try: what TextArena rejects ends the game, as "rejected" in envs/game.py. Games
that draw from numpy (IteratedStagHunt) are not seeded.

TextArena's SimpleNegotiation has five goods in random amounts and lasts eleven messages, though it
says ten.

TextArena's Kuhn poker is not the standard game. It plays three hands, player 1 begins the first,
and whoever has more chips at the end gets 1, the other -1. A bet or a call moves no chips: a fold
costs as much as a lost call, so that folding never pays, and bluffing has no price. Use `kuhn` of
envs/text_games.py for anything that is compared with Kuhn poker's equilibrium.
"""

import contextlib
import random
import re

from envs.game import Game, boxed, parse_action, spoken
from envs.negotiation import MARKUP

LISTED = re.compile(r"(?:available|valid) (?:moves|actions)(?: are)?:(.*)", re.IGNORECASE)


def load_textarena():
    """The package. Importing it draws from Python's global generator, which is put back."""
    state = random.getstate()
    try:
        import textarena
    except ImportError:
        raise ValueError("textarena is not installed: pip install textarena") from None
    finally:
        random.setstate(state)
    return textarena


class TextArenaGame(Game):
    """A game by its name in TextArena; the options are those of Game."""

    def __init__(self, name: str, **options):
        super().__init__(**options)
        self.name = name
        self.textarena = load_textarena()
        if name not in self.textarena.envs.registration.ENV_REGISTRY:
            raise ValueError(f"textarena has no game {name}, expected a name like TicTacToe-v0")
        try:
            self.reset(random.Random(0))
        except Exception as error:  # not for two, its data missing, another version of Python
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ValueError(f"textarena's {name} cannot be played: {reason}") from None
        self.done = True  # until it is begun

    @contextlib.contextmanager
    def own_randomness(self):
        """TextArena draws from Python's global generator: lend it this game's state meanwhile."""
        outside = random.getstate()
        random.setstate(self.random_state)
        try:
            yield
        finally:
            self.random_state = random.getstate()
            random.setstate(outside)

    def start(self, generator: random.Random) -> None:
        seed = generator.getrandbits(32)
        self.random_state = random.Random(seed).getstate()
        with self.own_randomness():
            env = self.textarena.make(self.name)
            while isinstance(env, self.textarena.Wrapper):
                env = env.env
            self.env = self.textarena.wrappers.LLMObservationWrapper(env)
            self.env.reset(num_players=2, seed=seed)
        self.env.state.error_allowance = 0
        self.seen = ["", ""]
        self.observe()

    def observe(self) -> None:
        """Whose turn it is, and all that this player has seen."""
        self.player, text = self.env.get_observation()
        self.seen[self.player] = text.strip()

    def observation(self, player: int) -> str:
        """As of the player's last turn."""
        return self.seen[player]

    def listed_actions(self) -> list[str]:
        """The moves that the last board shown to the player lists, [] if it lists none."""
        board = self.textarena.ObservationType.GAME_BOARD
        seen = self.env.full_observations[self.player]
        boards = [message for _, message, kind in seen if kind == board]
        found = LISTED.search(boards[-1]) if boards else None
        return re.findall(r"\[[^\[\]]*\]", found[1]) if found else []

    def legal_actions(self) -> list[str]:
        """The listed moves; in SimpleNegotiation some examples, as any text is legal there."""
        listed = self.listed_actions()
        if listed:
            return listed
        goods = self.env.state.game_state.get("player_resources")
        if not goods:
            raise ValueError(f"textarena's {self.name} lists no moves that one could draw from")
        own, other = goods[self.player], goods[1 - self.player]
        actions = ["[Deny]"]
        offer = self.env.state.game_state["current_offer"]
        if offer and offer["to_player"] == self.player:
            wanted = offer["requested_resources"]
            if all(own[good] >= number for good, number in wanted.items()):
                actions.append("[Accept]")
        for give in own:
            for take in other:
                if give != take and own[give] and other[take]:
                    actions.append(f"[Offer: 1 {give} -> 1 {take}]")
        return actions

    def parse(self, text: str) -> str | None:
        listed = self.listed_actions()
        if listed:
            return parse_action(text, listed)
        content = boxed(text)
        message = spoken(text) if content is None else content
        return " ".join(MARKUP.sub(" ", message).split())

    def play(self, action: str) -> bool:
        mover = self.player
        with self.own_randomness():
            done, _ = self.env.step(action)
        rewards, info = self.env.close()
        if info[mover]["invalid_move"]:
            return False
        if done:
            reason = "draw" if rewards[0] == rewards[1] else "win"
            self.end(0, float(rewards[0]), float(rewards[1]), reason)
        else:
            self.observe()
        return True
