"""What two-player text games share: how an action is read, the two seats, how a game ends.

The games are in `envs/text_games.py`. A game of your own (envs/examples/nim.py is one) subclasses
Game and has four methods:

    start(generator)     set the game up; chance comes from this random.Random alone
    legal_actions()      what the player whose turn it is (self.player) may do, each in square
                         brackets, as in ["[0]", "[4]"]
    observation(player)  what a player sees, its role in the first line
    play(action)         carry a legal action out, give the turn on (self.player) and call self.end
                         when the game is over. Return True, or False to reject the action; reject
                         "", which stands for an empty text

Where any text is a move, override parse(text), as envs/negotiation.py does, and take out control
tokens (envs/control_tokens.py), which the other player must not read.
Without Game, a class needs reset(generator), step(text), prompt(player), legal_actions() and the
attributes player, turns, done, rewards, reason, handicap, all as they are here.

Parsing and rewards follow SPIRAL's code (spiral-rl/spiral at a02d0ed with TextArena 0.6.4). No
dependencies, importable alone.
"""

import random
import re
import sys

REQUEST = "Think inside <think> </think>, then give your action inside \\boxed{}."


def spoken(text: str) -> str:
    """A text without its thoughts, also without one that has no end."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def boxed(text: str) -> str | None:
    """What the last \\boxed{} holds, without one \\text{} around it; None without a closed box."""
    start = text.rfind("\\boxed{")
    if start < 0 or text.rfind("\\boxed") > start:
        return None
    depth = 0
    for brace in re.finditer("[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            content = text[start + len("\\boxed{") : start + brace.start()]
            is_text = content.startswith("\\text{") and content.endswith("}")
            return content[len("\\text{") : -1] if is_text else content
    return None


def parse_action(text: str, legal: list[str]) -> str | None:
    """The legal action that a text names, None if it names none, "" for an empty text.

    As SPIRAL's `extract_action`: the last \\boxed{} counts, even in a thought; without a box the
    whole text. Five words at most get square brackets if there are none, white space is collapsed,
    and what results must be a legal action to the letter.
    """
    if not text:
        return ""
    content = boxed(text)
    content = text.strip() if content is None else content
    if "[" not in content and "]" not in content and len(content.split()) <= 5:
        content = f"[{content}]"
    action = " ".join(content.split())
    return action if action in legal else None


class Game:
    """What the games share: two seats, forfeits, the turn limit, the prompt.

    forfeit_rewards: for the player whose text names no legal action, and for the other one; not
        zero-sum.
    zero_sum_forfeits: both get -1 and +1 instead, also where the game itself rejects an action,
        which otherwise gives -1 and 0.
    max_turns: of both players together; then the game is a draw.
    handicap: added to player 0's result and subtracted from player 1's, however the game ends.
    """

    def __init__(
        self, *, forfeit_rewards=(-1.5, 0.5), zero_sum_forfeits=False, max_turns=50, handicap=0.0
    ):
        if len(forfeit_rewards) != 2 or max_turns < 1:
            message = "two forfeit_rewards (the offender's, the other's) and max_turns >= 1"
            raise ValueError(f"a text game needs {message}")
        self.forfeit_rewards = (-1.0, 1.0) if zero_sum_forfeits else tuple(forfeit_rewards)
        self.rejected_rewards = (-1.0, 1.0) if zero_sum_forfeits else (-1.0, 0.0)
        self.max_turns = max_turns
        self.handicap = handicap
        self.done = True  # until it is begun by reset

    def reset(self, generator: random.Random) -> None:
        self.player = 0
        self.turns = 0
        self.done = False
        self.rewards = [0.0, 0.0]
        self.reason = ""
        self.start(generator)

    def step(self, text: str) -> str | None:
        """A turn. Returns the action that the text names, None if the player forfeits."""
        if self.done:
            raise ValueError("the game is over or was never begun: call reset() first")
        offender = self.player
        action = self.parse(text)
        self.turns += 1
        if action is None:
            self.end(offender, *self.forfeit_rewards, "forfeit")
        elif not (accepted := self.play(action)):
            if accepted is None:
                words = "expected True, or False to reject the action"
                sys.exit(f"{type(self).__name__}.play: returned {accepted}, {words}")
            self.end(offender, *self.rejected_rewards, "rejected")
        elif not self.done and self.turns >= self.max_turns:
            self.end(0, 0.0, 0.0, "turn limit")
        return action

    def parse(self, text: str) -> str | None:
        return parse_action(text, self.legal_actions())

    def end(self, player: int, reward: float, other: float, reason: str) -> None:
        """The game is over with these rewards for `player` and for the other one."""
        first, second = (reward, other) if player == 0 else (other, reward)
        self.done = True
        self.rewards = [first + self.handicap, second - self.handicap]
        self.reason = reason

    def prompt(self, player: int) -> list[dict]:
        """Chat messages for the player whose turn it is."""
        text = f"This is a two-player zero-sum game.\n{self.observation(player)}\n{REQUEST}"
        return [{"role": "user", "content": text}]

    def available(self) -> str:
        return f"Available actions: {', '.join(self.legal_actions())}. Choose your next action."
