"""Text games: parsing, ends and transcripts of SPIRAL's code, OpenSpiel as the judge of rules and
solutions, games of the package textarena and of one's own."""

import copy
import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest

from envs import game_solvers as solvers
from envs.examples.nim import Nim
from envs.game import parse_action
from envs.game_demonstrations import random_action
from envs.game_solvers import KUHN_INFOSETS
from envs.text_games import make_game

ROOT = Path(__file__).parents[1]
REFERENCE = json.loads((ROOT / "tests" / "reference" / "spiral_rae.json").read_text())
SPIRAL = REFERENCE["kuhn_spiral_env"]
ILLEGAL = "\\boxed{nothing}"


def begun(name: str, seed: int = 0, **options):
    game = Nim(**options) if name == "nim" else make_game(name, **options)
    game.reset(random.Random(seed))
    return game


def play(game, texts):
    """Every text in turn; the game must not be over before the last one."""
    for text in texts:
        assert not game.done
        game.step(text)
    return game


def random_game(name: str, seed: int, **options):
    """A finished game and all its prompts."""
    generator = random.Random(seed)
    game = make_game(name, **options)
    game.reset(generator)
    prompts = []
    while not game.done:
        prompts += [(game.player, message["content"]) for message in game.prompt(game.player)]
        game.step(f"\\boxed{{{random_action(game, generator)}}}")
    return game, prompts


@pytest.mark.parametrize("case", REFERENCE["action_extraction"]["cases"], ids=repr)
def test_reference_action_extraction(case):
    expected = None if case["result"] == "<INVALID>" else case["result"]
    assert parse_action(case["text"], case["legal"]) == expected


def test_action_extraction():
    """Checked against the official function, which agrees on 400,000 random strings too."""
    actions = {
        "<think>[4] or [0]? \\boxed{0}</think>\\boxed{[4]}": "[4]",  # the last box counts
        "\\boxed{\\text{4}} I am sure.": "[4]",
        "\\boxed{\\text{\\text{4}}}": None,  # one \\text{} only
        "\\boxed{[4]} \\boxed{": None,  # never closed
        "\\boxed{[4]} \\boxed": None,
        "<think>so</think>[4]": None,  # without a box the whole text counts, thoughts included
        "\n [4]\t": "[4]",
        "\u0664": None,
    }
    assert {text: parse_action(text, ["[0]", "[4]", "[8]"]) for text in actions} == actions


@pytest.mark.parametrize(
    "name, texts, options, rewards, reason",
    [
        ("kuhn", ["[bet]", "[call]"], {"cards": ("KJ",)}, [2.0, -2.0], "win"),
        ("kuhn", ["[bet]", "[fold]"], {"cards": ("JK",)}, [1.0, -1.0], "win"),
        ("kuhn", ["[bet]", ILLEGAL], {}, [0.5, -1.5], "forfeit"),
        ("nim", [ILLEGAL], {"zero_sum_forfeits": True}, [-1.0, 1.0], "forfeit"),
        ("tictactoe", ["[0]", ILLEGAL], {"forfeit_rewards": (-3.0, 0.25)}, [0.25, -3.0], "forfeit"),
        ("kuhn", ["[bet]", ""], {}, [0.0, -1.0], "rejected"),  # not SPIRAL's sentinel
        ("kuhn", [""], {"zero_sum_forfeits": True}, [-1.0, 1.0], "rejected"),
        ("kuhn", ["[check]"] * 2, {"variant": "spiral", "max_turns": 2}, [0.0, 0.0], "turn limit"),
        ("tictactoe", ["[0]", "[1]"], {"max_turns": 2}, [0.0, 0.0], "turn limit"),
        ("tictactoe", ["[0]", "[3]", "[1]", "[4]", "[2]"], {"max_turns": 5}, [1.0, -1.0], "win"),
        ("negotiation", ["[Offer: 11 Wood -> 1 Gold]"], {}, [-1.0, 0.0], "rejected"),
    ],
)
def test_how_a_game_ends_and_the_handicap(name, texts, options, rewards, reason):
    """The handicap moves reward from seat 1 to seat 0, however the game ends."""
    for handicap in (0.0, 3.0, -0.5):
        game = play(begun(name, handicap=handicap, **options), texts)
        assert game.rewards == [rewards[0] + handicap, rewards[1] - handicap]
        assert game.done and game.reason == reason
    with pytest.raises(ValueError, match="reset"):
        game.step("[0]")


def test_what_players_see():
    game = play(begun("tictactoe"), ["[4]", "[0]", "[8]"])
    assert "X in TicTacToe" not in game.observation(0) and "play O," in game.observation(0)
    assert "play X, three in a row win.\nX 1 2\n3 O 5\n6 7 O\n" in game.observation(1)
    game = begun("kuhn", variant="textarena", cards=("JK", "QJ", "KQ"))
    play(game, ["[check]", "[bet]", "[call]", "[bet]", "[fold]"])
    hand = "Your card: K. Player 1: [check]. Player 0: [bet]. Player 1: [call]. Player 1 wins."
    assert game.observation(1).split("\n")[1:4] == [
        f"{hand} J was shown.",
        "Your card: J. Player 0: [bet]. Player 1: [fold]. Player 0 wins.",
        "Your card: Q.",
    ]
    game = begun("negotiation")
    game.step("<think>secret</think> Hello <|end|><|user|></s><end_of_turn>[INST]\nthere [Offer: 1 Wood -> 2 Gold]")
    game.step("<think>[Accept]</think>\\boxed{No. [Deny]}")
    game.step("x" * 5000)
    text = game.observation(1)
    assert "Player 0: Hello there [Offer: 1 Wood -> 2 Gold]\nPlayer 1: No. [Deny]\n" in text
    assert "secret" not in text and "<|" not in text and len(text) < 700
    assert game.goods[0] == {"Wood": 10, "Gold": 10}  # the [Accept] was only a thought
    assert "10 Wood worth 15 each and 10 Gold worth 5 each." in text and "Message 4 of 10." in text


def test_a_thought_without_an_end_is_not_said():
    """As of a turn that was cut off."""
    game = play(begun("negotiation"), ["Hello [Offer: 1 Wood -> 2 Gold]", "<think>Yes.</think>Well <think>secret [Accept]"])
    assert "Player 1: Well\n" in game.observation(0) and "secret" not in game.observation(0)
    assert game.goods[0] == {"Wood": 10, "Gold": 10}


def test_an_offer_is_seen_even_behind_long_talk():
    game = begun("negotiation")
    game.step("I give you 10 Gold for 1 Wood. " + "talk " * 50 + "[Offer: 1 Wood -> 10 Gold]")
    assert "\nPlayer 0 offers 1 Wood for 10 Gold.\nMessage 2" in game.observation(1)
    game.step("[Deny] [Offer: 2 Gold -> 1 Wood]")
    assert "Player 1 offers" not in game.observation(0), "it stands in the message"


@pytest.fixture(scope="module")
def judge():
    return pytest.importorskip("pyspiel", reason="needs pip install open-spiel")


def test_reference_tictactoe_by_openspiel(judge):
    """All boards that can occur: legal moves, ends, minimax values and the moves that keep them."""
    values = {}

    def value(game, state) -> float:
        if game.board not in values:
            values[game.board] = state.returns()[0] if state.is_terminal() else compare(game, state)
            assert solvers.minimax_value(game.board) == values[game.board]
            assert game.done == state.is_terminal() and game.rewards == state.returns()
        return values[game.board]

    def compare(game, state) -> float:
        cells = state.legal_actions()
        assert game.legal_actions() == [f"[{cell}]" for cell in cells]
        assert game.player == state.current_player()
        ahead = []
        for cell in cells:
            after = copy.copy(game)
            after.step(f"[{cell}]")
            ahead.append(value(after, state.child(cell)))
        best = max(ahead) if game.player == 0 else min(ahead)
        optimal = [cell for cell, result in zip(cells, ahead) if result == best]
        assert solvers.optimal_cells(game.board) == optimal
        return best

    start = judge.load_game("tic_tac_toe").new_initial_state()
    assert value(begun("tictactoe"), start) == 0
    assert len(values) == REFERENCE["tictactoe"]["exact"]["reachable_states"]


@pytest.mark.parametrize("deal", list(itertools.permutations(range(3), 2)), ids=str)
def test_reference_kuhn_by_openspiel(judge, deal):
    """Every position: whose turn it is, the information set, the rewards."""
    start = judge.load_game("kuhn_poker").new_initial_state()
    positions = [("", start.child(deal[0]).child(deal[1]))]
    for letters, state in positions:  # grows on the way
        game = begun("kuhn", cards=("JQK"[deal[0]] + "JQK"[deal[1]],))
        for letter in letters:
            game.step(game.legal_actions()["pb".index(letter)])
        assert game.done == state.is_terminal() and game.rewards == state.returns()
        assert solvers.kuhn_return(deal, letters) == (state.returns()[0] if game.done else None)
        if not game.done:
            assert game.player == state.current_player()
            assert solvers.kuhn_infoset(game) == state.information_state_string()
            positions += [(letters + "pb"[a], state.child(a)) for a in state.legal_actions()]
    assert len(positions) == 9


def test_reference_kuhn_nash_conv_by_openspiel(judge):
    """Of 30 random policies, a third of them deterministic."""
    from open_spiel.python.algorithms import exploitability
    from open_spiel.python.policy import TabularPolicy

    game = judge.load_game("kuhn_poker")
    generator = np.random.default_rng(0)
    for number in range(30):
        bets = generator.random(12)
        bets = bets.round() if number % 3 == 0 else bets
        policy = dict(zip(KUHN_INFOSETS, bets))
        tabular = TabularPolicy(game)
        for name, row in tabular.state_lookup.items():
            tabular.action_probability_array[row] = 1 - policy[name], policy[name]
        nash_conv = pytest.approx(exploitability.nash_conv(game, tabular), abs=1e-12)
        for form in (policy, bets, list(zip(1 - bets, bets))):
            assert solvers.kuhn_nash_conv(form) == nash_conv


def test_kuhn_decision_points():
    """Their prompts are those that are met in play, and say nothing of the other card."""
    points = solvers.kuhn_decision_points(handicap=3.0)
    assert [name for name, _ in points] == list(KUHN_INFOSETS)
    met = set()
    for seed in range(200):
        met |= set(random_game("kuhn", seed)[1])
    prompts = [game.prompt(game.player)[0]["content"] for _, game in points]
    assert met == {(game.player, prompt) for (_, game), prompt in zip(points, prompts)}
    for (name, game), prompt in zip(points, prompts):
        assert solvers.kuhn_infoset(game) == name and game.handicap == 3.0
        assert f"Your card: {'JQK'[int(name[0])]}." in prompt


@pytest.mark.parametrize("kind", [name for name in SPIRAL if isinstance(SPIRAL[name], list)])
def test_reference_kuhn_of_spiral(kind):
    for case in SPIRAL[kind]:
        deals = {number: cards for number, cards, *_ in case["turns"]}
        cards = tuple(deals.get(number, "JK") for number in range(1, 6))
        game = begun("kuhn", variant="spiral", cards=cards)
        for number, _, player, action, *pot in case["turns"]:
            assert not game.done and (len(game.hands), game.player) == (number, player)
            assert pot in ([], [game.pot])
            game.step(ILLEGAL if action == "<INVALID>" else f"\\boxed{{[{action}]}}")
        assert game.done and game.rewards == case["rewards_p0_p1"]
        assert game.chips == case["final_chips_p0_p1"]


@pytest.mark.parametrize("name", REFERENCE["negotiation_spiral_env"]["cases"])
def test_reference_negotiation(name):
    case = REFERENCE["negotiation_spiral_env"]["cases"][name]
    texts = case["actions"] + ["Let me think."] * (case["n_turns"] - len(case["actions"]))
    game = play(begun("negotiation"), texts)
    assert game.done and game.turns == case["n_turns"] and game.rewards == case["rewards_p0_p1"]
    end = "win" if any(case["rewards_p0_p1"]) else "draw"
    assert game.reason == ("rejected" if case["n_turns"] < 10 else end)
    for player, inventory in case["inventory_value"].items():
        assert game.gain(int(player)) == inventory["change"]


PAPER = ["textarena:TicTacToe-v0", "textarena:KuhnPoker-v0", "textarena:SimpleNegotiation-v0"]


@pytest.fixture(scope="module")
def textarena():
    return pytest.importorskip("textarena", reason="needs pip install textarena")


@pytest.mark.parametrize("name", PAPER)
def test_textarena_games_depend_on_their_generator_alone(textarena, name):
    random.seed(1)
    first = [random_game(name, seed)[1] for seed in range(20)]
    random.seed(2)
    state = random.getstate()
    assert [random_game(name, seed)[1] for seed in range(20)] == first
    assert random.getstate() == state and len({repr(prompts) for prompts in first}) > 10
    for player, content in itertools.chain(*first):
        start = f"This is a two-player zero-sum game.\n[GAME] You are Player {player} in "
        assert content.startswith(start) and content.endswith("inside \\boxed{}.")


def test_textarena_rules_are_those_of_our_games(textarena):
    """Its tic-tac-toe beside ours, and its Kuhn poker beside our variant of that name."""
    deals = set()
    for seed in range(40):
        generator = random.Random(seed)
        for name, ours in ((PAPER[0], "tictactoe"), (PAPER[1], "kuhn")):
            theirs = begun(name, seed, handicap=3.0)
            options = {"variant": "textarena"} if ours == "kuhn" else {}
            game = begun(ours, handicap=3.0, **options)
            while not theirs.done:
                if ours == "kuhn":
                    cards = theirs.env.state.game_state["player_cards"]
                    game.deals[len(game.hands) - 1] = "JQK"[cards[0]] + "JQK"[cards[1]]
                legal = theirs.legal_actions()
                assert set(legal) == set(game.legal_actions())
                assert theirs.player == game.player
                text = ILLEGAL if generator.random() < 0.03 else generator.choice(legal)
                assert theirs.step(text) == game.step(text)
            assert (theirs.rewards, theirs.turns) == (game.rewards, game.turns)
            assert theirs.reason == game.reason
        deals.add(tuple(game.deals[:2]))
    assert len(deals) > 12  # the second hand does not follow from the first: 6 then


def test_textarena_negotiation(textarena):
    game = begun(PAPER[2])
    assert game.step("<think>secret</think>Hello <|end|> [Offer: 1 Wood -> 2 Ore]") is not None
    text = game.prompt(1)[0]["content"]
    assert "\n[Player 0] Hello [Offer: 1 Wood -> 2 Ore]\n" in text and "secret" not in text
    assert "Requested items: 2 Ore" in text and "[Accept]" in game.legal_actions()
    game.step("<think>secret [Accept]")  # cut off
    assert "secret" not in game.prompt(0)[0]["content"]
    game.step("[Offer: 99 Wood -> 1 Ore]")  # there is no second try
    assert (game.done, game.rewards, game.reason) == (True, [-1.0, 0.0], "rejected")
