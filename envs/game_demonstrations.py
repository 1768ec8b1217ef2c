"""What an imperfect player of `envs/text_games.py` writes, in every game and both seats: data of its tiny base model.

A game is played by such players first, then one of its turns is the demonstration, so that all positions occur. Moves
are drawn about uniformly from the legal ones, after a short thought that says something of what the player sees and
what it does. Slips: an illegal move, a lost tag.
"""

import random
import re

from envs.game import Game
from envs.negotiation import Negotiation
from envs.text_games import KuhnPoker, TicTacToe, make_game

SHARES = {  # of the demonstrations; the two long variants of Kuhn poker cost more and matter less
    ("tictactoe", None): 0.5,
    ("kuhn", "standard"): 0.2,
    ("kuhn", "spiral"): 0.05,
    ("kuhn", "textarena"): 0.05,
    ("negotiation", None): 0.2,
}
ILLEGAL, LOST_TAG, LINES, FOLLOWED = 0.04, 0.02, 0.5, 0.15  # chances
TALK = ("I want more Gold.", "I want more Wood.", "No deal.", "Make me an offer.", "Let us trade.", "That is too much.")


def demonstration(generator: random.Random) -> tuple[list[dict], str]:
    """One (chat messages, completion): a turn of a game that such players played."""
    name, variant = generator.choices(list(SHARES), list(SHARES.values()))[0]
    game = make_game(name, **({"variant": variant} if variant else {}))
    game.reset(generator)
    turns = []
    while not game.done:
        action = random_action(game, generator)
        turns.append((game.prompt(game.player), completion(game, generator)))
        game.step(f"\\boxed{{{action}}}")
    messages, text = generator.choice(turns)
    if generator.random() < LOST_TAG:
        text = text.replace(generator.choice(["<think>", "</think>", "\\boxed{", "]", "}"]), "", 1)
    return messages, text


def random_action(game: Game, generator: random.Random) -> str:
    """A legal action, uniformly; in the negotiation the kind of message first, then the goods, then the amounts."""
    if not isinstance(game, Negotiation):
        return generator.choice(game.legal_actions())
    answers = game.answers(game.player)
    kind = generator.choices(["answer", "offer", "talk"], [0.4 if answers else 0.0, 0.45, 0.15])[0]
    if kind == "answer":
        return generator.choice(answers)
    own, other = game.goods[game.player], game.goods[1 - game.player]
    give, take = generator.sample(["Wood", "Gold"], 2)
    if kind == "talk" or not own[give] or not other[take]:
        return generator.choice(TALK)
    return f"[Offer: {generator.randint(1, own[give])} {give} -> {generator.randint(1, other[take])} {take}]"


def illegal_action(game: Game, generator: random.Random) -> str:
    """An action of the right kind that costs the game now."""
    if isinstance(game, TicTacToe):
        return f"[{generator.choice([cell for cell in range(9) if game.board[cell] != '.'] or [9])}]"
    if isinstance(game, KuhnPoker):
        actions = ["[check]", "[bet]", "[call]", "[fold]"]
        return generator.choice([action for action in actions if action not in game.legal_actions()])
    give, take = generator.sample(["Wood", "Gold"], 2)
    return (
        f"[Offer: {game.goods[game.player][give] + generator.randint(1, 5)} {give} -> {generator.randint(1, 9)} {take}]"
    )


def completion(game: Game, generator: random.Random) -> str:
    """A thought of none to three observations and the decision, then the boxed action.

    The observations are true, but a move follows from them only with probability FOLLOWED: what there is to learn is to
    look and to act on what one sees. In tic-tac-toe a share LINES of the thoughts is about wins and threats.
    """
    seen, better = observations(game)
    chosen = sorted(generator.sample(range(len(seen)), min(len(seen), generator.choice([0, 1, 1, 2, 3]))))
    if isinstance(game, TicTacToe) and generator.random() < LINES:
        chosen = [3, 4]
    action = random_action(game, generator)
    if generator.random() < FOLLOWED:
        action = next((generator.choice(better[i]) for i in chosen if i in better), action)
    if generator.random() < ILLEGAL:
        action = illegal_action(game, generator)
    word = re.match(r"\[?(\w+)", action)[1].lower()
    decision = f"I take {word}." if isinstance(game, TicTacToe) else f"I {word}."
    if isinstance(game, Negotiation) and action[0] != "[":
        decision = "I talk."
    return f"<think>{' '.join([*(seen[i] for i in chosen), decision])}</think>\\boxed{{{action}}}"


def observations(game: Game) -> tuple[list[str], dict[int, list[str]]]:
    """True sentences about the position, and for some of them, by index, the actions that they speak for."""
    if isinstance(game, TicTacToe):
        mine, theirs = "OX"[game.player], "XO"[game.player]
        sets = [[i for i in range(9) if game.board[i] == mark] for mark in (".", mine, theirs)]
        sets += [winning_cells(game.board, mark) for mark in (mine, theirs)]
        names = ("Free", "Mine", "Theirs", "Wins", "Threats")
        seen = [f"{name}: {''.join(map(str, cells)) or 'none'}." for name, cells in zip(names, sets)]
        return seen, {i: [f"[{cell}]" for cell in sets[i]] for i in (3, 4) if sets[i]}
    if isinstance(game, KuhnPoker):
        card = game.deals[len(game.hands) - 1][game.player]
        others = " or ".join(sorted(set("JQK") - {card}, key="JQK".index))
        said = f"They {game.hands[-1][-1][1].strip('[]')}." if game.hands[-1] else "I begin."
        return [f"I have {card}.", f"They have {others}.", said], {}
    goods = game.goods[game.player]
    seen = [f"I have {goods['Wood']} Wood and {goods['Gold']} Gold.", f"I like {('Gold', 'Wood')[game.player]}."]
    if not game.offer or game.offer[0] == game.player:
        return [*seen, "No offer."], {}
    get, give = (sum(side.values()) for side in game.offer[1:])
    return [*seen, f"I get {get}, they get {give}."], {}


def winning_cells(board: str, mark: str) -> list[int]:
    """The free cells that complete a line of `mark`."""
    lines = [[board[i] for i in line] for line in TicTacToe.LINES]
    found = [
        line[marks.index(".")]
        for line, marks in zip(TicTacToe.LINES, lines)
        if sorted(marks) == sorted(f".{mark}{mark}")
    ]
    return sorted(set(found))
