"""Text games: parsing, transcripts and forfeits of SPIRAL's code, hostile text, exact solutions, the demonstrations."""

import copy
import itertools
import json
import random
import re
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from envs import game_solvers as solvers
from envs.game import parse_action
from envs.game_demonstrations import ILLEGAL, SHARES, demonstration, observations, random_action
from envs.game_solvers import KUHN_INFOSETS
from envs.text_games import GAMES, KuhnPoker, Negotiation, TicTacToe, make_game

REFERENCE = json.loads((Path(__file__).parent / "reference" / "spiral_rae.json").read_text())
KUHN, EXACT = REFERENCE["kuhn_openspiel"], REFERENCE["kuhn_exact"]
SPIRAL, TEXTARENA = REFERENCE["kuhn_spiral_env"], REFERENCE["kuhn_textarena_0_7_4"]
BOARD = REFERENCE["tictactoe"]["exact"]
ILLEGAL_TEXT = "\\boxed{nothing}"


def begun(name: str, **options):
    game = make_game(name, **options)
    game.reset(random.Random(0))
    return game


def play(game, texts):
    """Every text in turn; the game must not be over before the last one."""
    for text in texts:
        assert not game.done
        game.step(text)
    return game


def random_game(name: str, generator: random.Random, **options):
    game = make_game(name, **options)
    game.reset(generator)
    while not game.done:
        game.step(f"\\boxed{{{random_action(game, generator)}}}")
    return game


# --- From text to action ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", REFERENCE["action_extraction"]["cases"], ids=lambda case: repr(case["text"]))
def test_reference_action_extraction(case):
    assert parse_action(case["text"], case["legal"]) == (None if case["result"] == "<INVALID>" else case["result"])


@pytest.mark.parametrize(
    "text, action",
    [
        ("<think>[4] or [0]? \\boxed{0}</think>\\boxed{[4]}", "[4]"),  # the last box counts
        ("\\boxed{[4]} \\boxed{", None),  # never closed
        ("\\boxed{[4]} \\boxed", None),
        ("\\boxed{\\text{[4]}}", "[4]"),
        ("\\boxed{\\text{4}} I am sure.", "[4]"),
        ("\\boxed{\\text{\\text{4}}}", None),  # one \text{} only
        ("\\boxed{\\text{4}", None),
        ("\\boxed{[4] }", "[4]"),  # outer white space goes when there are brackets
        ("\n [4]\t", "[4]"),
        ("  4 ", "[4]"),
        ("\\fbox{4}", None),
        ("\\boxed {4}", None),
        ("[4", None),
        ("<think>so</think>[4]", None),  # without a box the whole text counts, thoughts included
        ("[[4]]", None),
        ("4.", None),
        ("\u0664", None),
        ("", ""),
        (" ", None),
    ],
)
def test_action_extraction(text, action):
    """Checked against the official function, which agrees on 400,000 random strings too."""
    assert parse_action(text, ["[0]", "[4]", "[8]"]) == action


def test_only_five_words_get_brackets():
    assert parse_action("a b c d e", ["[a b c d e]"]) == "[a b c d e]"
    assert parse_action("a b c d e f", ["[a b c d e f]"]) is None
    assert parse_action("a  b\nc", ["[a b c]"]) == "[a b c]"


@pytest.mark.parametrize("name", GAMES)
def test_hostile_text_neither_hangs_nor_raises_nor_runs(name, hostile_strings, nothing_executes, time_limit):
    game, slowest = begun(name), 0.0
    strings = [text for text in hostile_strings if "\\boxed" in text or len(text) < 100][:4000]
    strings += [
        "\\boxed{[Offer:" + text + "]}" for text in (" " * 50_000, "1 Wood," * 9000, " and " * 9000, "->" * 9000)
    ]
    strings += [
        "[Offer:" * 9000,
        "[Offer: I give " + "I give " * 9000 + "]",
        "\\boxed{[Offer: 1 Wood -> " + "9" * 5000 + " Gold]}",
    ]
    with nothing_executes():
        for text in strings:
            state = copy.copy(game)
            if name == "negotiation":
                state.reset(random.Random(0))  # its lists would be shared
            start = time.process_time()
            action = state.step(text)
            slowest = max(slowest, time.process_time() - start)
            if name != "negotiation":
                assert action in (None, "", *game.legal_actions())
                assert state.rewards == {None: [-1.5, 0.5], "": [-1.0, 0.0]}.get(action, [0.0, 0.0])
    assert slowest < 0.5, "parsing is not linear in the length of the text"


# --- How a game ends ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, variant", SHARES)
def test_every_end_of_a_forfeit(name, variant):
    if name == "negotiation":
        return  # any text is a message
    options = {"variant": variant} if variant else {}
    for choice, rewards in (
        ({}, [-1.5, 0.5]),
        ({"zero_sum_forfeits": True}, [-1.0, 1.0]),
        ({"forfeit_rewards": (-3.0, 0.25)}, [-3.0, 0.25]),
    ):
        game = begun(name, **options, **choice)
        offender = game.player
        assert game.step(ILLEGAL_TEXT) is None and game.done and game.reason == "forfeit" and game.turns == 1
        assert game.rewards == (rewards if offender == 0 else rewards[::-1])
        game = begun(name, **options, **choice)
        play(game, [game.legal_actions()[0], ILLEGAL_TEXT])
        assert game.rewards == (rewards if offender == 1 else rewards[::-1])


def test_an_empty_text_is_rejected_by_the_game_and_costs_less_than_a_forfeit():
    """Card, 2.7: it is not the official invalid-action sentinel."""
    for name in ("tictactoe", "kuhn"):
        game = play(begun(name), [begun(name).legal_actions()[0], ""])
        assert (game.rewards, game.reason) == ([0.0, -1.0], "rejected")
        assert play(begun(name, zero_sum_forfeits=True), [""]).rewards == [-1.0, 1.0]


def test_the_turn_limit_is_a_draw():
    game = play(begun("tictactoe", max_turns=3), ["[0]", "[1]", "[2]"])
    assert (game.done, game.rewards, game.reason) == (True, [0.0, 0.0], "turn limit")
    game = play(begun("tictactoe", max_turns=5), ["[0]", "[3]", "[1]", "[4]", "[2]"])
    assert (game.rewards, game.reason) == ([1.0, -1.0], "win")  # a win on the last turn stays one
    assert play(begun("kuhn", variant="spiral", max_turns=2), ["[check]", "[check]"]).reason == "turn limit"
    assert make_game("kuhn").max_turns == 50


@pytest.mark.parametrize(
    "name, texts, options, plain",
    [
        ("kuhn", ["[bet]", "[call]"], {"cards": ("KJ",)}, [2.0, -2.0]),
        ("kuhn", ["[bet]", "[fold]"], {"cards": ("JK",)}, [1.0, -1.0]),
        ("kuhn", [ILLEGAL_TEXT], {}, [-1.5, 0.5]),
        ("kuhn", ["[bet]", ILLEGAL_TEXT], {}, [0.5, -1.5]),
        ("kuhn", [""], {}, [-1.0, 0.0]),
        ("tictactoe", ["[0]", "[1]"], {"max_turns": 2}, [0.0, 0.0]),
        ("negotiation", ["[Offer: 11 Wood -> 1 Gold]"], {}, [-1.0, 0.0]),
    ],
)
def test_the_handicap_moves_reward_from_seat_1_to_seat_0(name, texts, options, plain):
    assert play(begun(name, **options), texts).rewards == plain
    assert play(begun(name, handicap=3.0, **options), texts).rewards == [plain[0] + 3.0, plain[1] - 3.0]
    assert play(begun(name, handicap=-0.5, **options), texts).rewards == [plain[0] - 0.5, plain[1] + 0.5]


def test_a_finished_game_and_one_not_begun_refuse_a_step():
    for game in (make_game("tictactoe"), play(begun("kuhn"), [ILLEGAL_TEXT])):
        with pytest.raises(ValueError, match="reset"):
            game.step("[0]")


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("chess", {}, "no text game chess, expected one of tictactoe, kuhn, negotiation"),
        ("tictactoe", {"variant": "spiral"}, "tictactoe has no option variant, expected one of forfeit_rewards"),
        ("kuhn", {"handikap": 3}, "kuhn has no option handikap, expected one of variant, cards"),
        ("kuhn", {"options": {}}, "kuhn has no option options"),
        ("kuhn", {"variant": "leduc"}, "kuhn has no variant leduc, expected one of standard, spiral, textarena"),
        ("kuhn", {"cards": ("JJ",)}, "needs cards for 1 hands, each like JK"),
        ("kuhn", {"cards": ("JK", "QK")}, "needs cards for 1 hands"),
        ("kuhn", {"cards": "JK"}, "needs cards for 1 hands"),
        ("kuhn", {"variant": "spiral", "cards": ("JK",)}, "needs cards for 5 hands"),
        ("tictactoe", {"max_turns": 0}, "max_turns >= 1"),
        ("tictactoe", {"forfeit_rewards": (1.0,)}, "two forfeit_rewards"),
    ],
)
def test_user_errors_are_one_sentence(name, options, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        make_game(name, **options)
    assert "\n" not in str(error.value)


def test_games_are_seeded_and_cheap(time_limit):
    for name, variant in SHARES:
        options = {"variant": variant} if variant else {}
        games = [random_game(name, random.Random(seed), **options) for seed in [*range(200), *range(200)]]
        states = [(game.rewards, game.turns, game.prompt(0)) for game in games]
        assert states[:200] == states[200:] and len({repr(state) for state in states}) > 10
    start = time.process_time()
    for seed in range(1000):
        random_game("tictactoe", random.Random(seed))
    assert time.process_time() - start < 2.0


# --- Observations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, variant", SHARES)
def test_prompts_say_who_plays_and_what_is_possible(name, variant):
    generator = random.Random(1)
    game = make_game(name, **({"variant": variant} if variant else {}))
    seats = set()
    for _ in range(20):
        game.reset(generator)
        while not game.done:
            (message,) = game.prompt(game.player)
            lines = message["content"].split("\n")
            assert message["role"] == "user" and "two-player zero-sum game" in lines[0]
            assert lines[1].startswith(f"You are Player {game.player} in ")
            assert "Available actions: " in lines[-2] and lines[-2].endswith("Choose your next action.")
            assert "<think> </think>" in lines[-1] and "\\boxed{}" in lines[-1]
            if name != "negotiation":
                assert f"Available actions: {', '.join(game.legal_actions())}." in lines[-2]
            seats.add(game.player)
            game.step(random_action(game, generator))
    assert seats == {0, 1}


def test_the_board_is_shown_with_marks_and_numbers():
    game = play(begun("tictactoe"), ["[4]", "[0]", "[8]"])
    assert game.observation(1).split("\n")[:4] == [
        "You are Player 1 in TicTacToe and play X, three in a row win.",
        "X 1 2",
        "3 O 5",
        "6 7 O",
    ]
    assert "play O" in game.observation(0)


def test_a_kuhn_player_sees_its_own_cards_and_others_at_showdown_only():
    game = begun("kuhn", variant="textarena", cards=("JK", "QJ", "KQ"))
    play(game, ["[check]", "[bet]", "[call]", "[bet]", "[fold]"])
    assert game.observation(1).split("\n")[1:4] == [
        "Your card: K. Player 1: [check]. Player 0: [bet]. Player 1: [call]. Player 1 wins. J was shown.",
        "Your card: J. Player 0: [bet]. Player 1: [fold]. Player 0 wins.",
        "Your card: Q.",
    ]
    assert [line[:13] for line in game.observation(0).split("\n")[1:4]] == [
        "Your card: J.",
        "Your card: Q.",
        "Your card: K.",
    ]
    for name, game in solvers.kuhn_decision_points():  # the other card must not matter
        other = begun("kuhn", cards=(game.deals[0].translate(str.maketrans("JQK", "JQK")),))
        own, hidden = game.deals[0][game.player], (set("JQK") - set(game.deals[0])).pop()
        other = begun("kuhn", cards=(own + hidden if game.player == 0 else hidden + own,))
        play(other, [action for _, action in game.hands[0]])
        assert other.prompt(other.player) == game.prompt(game.player), name


def test_a_negotiator_sees_messages_but_neither_thoughts_nor_markup():
    game = begun("negotiation")
    game.step("<think>secret</think> Hello <|end|><|user|>\nthere [Offer: 1 Wood -> 2 Gold]")
    game.step("<think>[Accept]</think>\\boxed{No. [Deny]}")
    game.step("x" * 5000)
    text = game.observation(1)
    assert "Player 0: Hello there [Offer: 1 Wood -> 2 Gold]\nPlayer 1: No. [Deny]\n" in text
    assert "secret" not in text and "<|" not in text and len(text) < 700
    assert game.goods[0] == {"Wood": 10, "Gold": 10}  # the [Accept] was only a thought
    assert "You have 10 Wood worth 15 each and 10 Gold worth 5 each." in text and "Message 4 of 10." in text


# --- Tic-tac-toe --------------------------------------------------------------------------------------------------

TRANSCRIPTS = REFERENCE["tictactoe"]["games_uniform"] + REFERENCE["tictactoe"]["games_invalid"]


@pytest.mark.parametrize("case", TRANSCRIPTS, ids=lambda case: "".join(cell for _, cell in case["turns"]))
def test_reference_tictactoe_transcripts(case):
    game = begun("tictactoe")
    for player, cell in case["turns"]:
        assert not game.done and game.player == player
        game.step(f"\\boxed{{{cell}}}")
    assert game.done and game.rewards == case["rewards_p0_p1"]


def test_reference_tictactoe_states():
    states = solvers.tictactoe_states()
    ends = [result for result in states.values() if result is not None]
    assert (len(states), len(states) - len(ends)) == (BOARD["reachable_states"], BOARD["nonterminal_states"])
    counts = {"terminal_first_wins": 1, "terminal_second_wins": -1, "terminal_draws": 0}
    assert {name: ends.count(result) for name, result in counts.items()} == {name: BOARD[name] for name in counts}
    turns = [(0, 1, 2, 3, 4, 5, 6, 7, 8), (6, 3, 0, 7, 4, 1, 8, 5, 2)]
    flip = (2, 1, 0, 5, 4, 3, 8, 7, 6)

    def canonical(board):
        images = [board]
        for _ in range(3):
            images.append("".join(images[-1][i] for i in turns[1]))
        return min(images + ["".join(image[i] for i in flip) for image in images])

    assert len({canonical(board) for board in states}) == BOARD["states_up_to_symmetry"]
    ended = {canonical(board) for board, result in states.items() if result is not None}
    assert len(ended) == BOARD["terminal_up_to_symmetry"]


def test_reference_tictactoe_games():
    """Games are paths from the empty board; counted board by board through the environment itself."""
    paths, games, nodes = {"." * 9: 1}, {1: 0, -1: 0, 0: 0}, 0
    while paths:
        ahead = {}
        for board, count in paths.items():
            nodes += count
            game = begun("tictactoe")
            game.board, game.player = board, board.count(".") % 2 == 0
            for action in game.legal_actions():
                child = copy.copy(game)
                child.step(action)
                if child.done:
                    games[int(child.rewards[0])] += count
                    nodes += count
                else:
                    ahead[child.board] = ahead.get(child.board, 0) + count
        paths = ahead
    assert [games[1], games[-1], games[0]] == [BOARD[f"games_{name}"] for name in ("first_wins", "second_wins", "draw")]
    assert sum(games.values()) == BOARD["games"] and nodes == BOARD["tree_nodes"]


def test_reference_tictactoe_minimax():
    empty = "." * 9
    assert solvers.minimax_value(empty) == BOARD["value"]
    assert [solvers.minimax_value(solvers.after(empty, cell)) for cell in range(9)] == BOARD["value_after_first_move"]
    for name, cell in (("corner0", 0), ("edge1", 1), ("centre", 4)):
        assert solvers.optimal_cells(solvers.after(empty, cell)) == BOARD[f"non_losing_replies_to_{name}"]


def test_reference_tictactoe_exact_rates():
    random_rates = solvers.tictactoe_outcomes(solvers.random_player, solvers.random_player)
    expected = BOARD["random_vs_random"]
    for name in ("first_win", "second_win", "draw"):
        assert random_rates[name] == pytest.approx(expected[name], abs=1e-9)
    assert random_rates["turns"] == pytest.approx(expected["mean_length"], abs=1e-8)
    assert random_rates["first_win"] == pytest.approx(737 / 1260) and random_rates["draw"] == pytest.approx(8 / 63)
    nash_conv = 0.0
    for name, player in (
        ("best_response_vs_random", None),
        ("minimax_uniform_tiebreak_vs_random", solvers.minimax_player),
    ):
        for seat in ("first", "second"):
            pair = (player, solvers.random_player) if seat == "first" else (solvers.random_player, player)
            rates = solvers.tictactoe_outcomes(*pair)
            other = "second_win" if seat == "first" else "first_win"
            for key, found in (("win", rates[f"{seat}_win"]), ("draw", rates["draw"]), ("loss", rates[other])):
                assert found == pytest.approx(BOARD[name][seat][key], abs=1e-9)
            nash_conv += (rates[f"{seat}_win"] - rates[other]) if player is None else 0.0
    assert nash_conv == pytest.approx(BOARD["nash_conv_uniform_policy"], abs=1e-9)
    assert solvers.tictactoe_outcomes(solvers.minimax_player, None)["draw"] == pytest.approx(1.0)
    assert solvers.tictactoe_outcomes(None, solvers.minimax_player)["draw"] == pytest.approx(1.0)


def test_reference_tictactoe_rates_of_the_environment():
    """Within four standard errors of 3,000 games, as the official environment's own 3,000 are."""
    expected, measured = BOARD["random_vs_random"], REFERENCE["tictactoe"]["uniform_stats_env"]
    ends = [random_game("tictactoe", random.Random(seed)).rewards[0] for seed in range(3000)]
    for name, official, result in (("first_win", "p0_win", 1.0), ("second_win", "p1_win", -1.0), ("draw", "draw", 0.0)):
        assert ends.count(result) / 3000 == pytest.approx(expected[name], abs=0.036)
        assert measured[official] == pytest.approx(expected[name], abs=0.036)


def test_minimax_never_loses_and_varies():
    generator, openings = random.Random(0), set()
    for index in range(300):
        game = begun("tictactoe")
        while not game.done:
            best = game.player == index % 2
            action = solvers.minimax_action(game.board, generator) if best else random_action(game, generator)
            openings |= {action} if best and game.turns == 0 else set()
            game.step(action)
        assert game.rewards[index % 2] >= 0.0
    assert len(openings) == 9  # every first move keeps the draw


# --- Kuhn poker: the environment ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", KUHN["terminal_histories"], ids=lambda case: case["cards_p0_p1"] + case["actions"])
def test_reference_kuhn_returns(case):
    game = begun("kuhn", cards=(case["cards_p0_p1"],))
    for number, letter in enumerate(case["actions"]):
        assert not game.done and game.player == number % 2
        game.step(game.legal_actions()["pb".index(letter)])
    assert (game.done, game.rewards, game.reason) == (True, case["returns"], "win")
    deal = tuple("JQK".index(card) for card in case["cards_p0_p1"])
    assert solvers.kuhn_return(deal, case["actions"]) == case["returns"][0]


def replay(variant: str, case: dict) -> KuhnPoker:
    deals = {number: cards for number, cards, *_ in case["turns"]}
    hands = KuhnPoker.HANDS[variant]
    game = begun("kuhn", variant=variant, cards=tuple(deals.get(i, "JK") for i in range(1, hands + 1)))
    for number, cards, player, action, *pot in case["turns"]:
        assert not game.done and (len(game.hands), game.player) == (number, player)
        assert game.deals[number - 1] == cards and pot in ([], [game.pot])
        game.step(ILLEGAL_TEXT if action == "<INVALID>" else f"\\boxed{{[{action}]}}")
    return game


SPIRAL_GAMES = [(name, case) for name, cases in SPIRAL.items() if isinstance(cases, list) for case in cases]


@pytest.mark.parametrize("name, case", SPIRAL_GAMES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(SPIRAL_GAMES)])
def test_reference_kuhn_of_spiral(name, case):
    game = replay("spiral", case)
    assert game.done and game.rewards == case["rewards_p0_p1"]
    assert game.chips == case["final_chips_p0_p1"]
    if game.reason == "forfeit":
        assert game.pot == case["final_pot"]


@pytest.mark.parametrize("case", TEXTARENA["games"], ids=lambda case: f"seed{case['seed']}")
def test_reference_kuhn_of_textarena(case):
    game = replay("textarena", case)
    assert game.done and game.rewards == case["rewards_p0_p1"]
    assert [chips - 1 for chips in game.chips] == case["chips_after_phantom_ante"]  # its extra ante after the last hand


def test_reference_kuhn_of_textarena_invalid():
    game = begun("kuhn", variant="textarena", zero_sum_forfeits=True)
    game.step(ILLEGAL_TEXT)
    assert game.rewards == TEXTARENA["invalid_twice_in_a_row_by_player1_rewards_p0_p1"]


def test_reference_kuhn_of_spiral_means():
    """The last hand decides and player 1 begins it: exact means of uniform play, and of never folding against it."""
    means = {}
    for seat in (None, 0, 1):
        total = 0.0
        for deal in itertools.permutations("JQK", 2):
            game = begun("kuhn", variant="spiral", cards=("JK",) * 4 + ("".join(deal),))
            for _ in range(4):
                play(game, ["[check]", "[check]"])
            total += expected_last_hand(game, seat) / 6
        means[seat] = total
    assert means[None] == pytest.approx(SPIRAL["uniform_exact_mean_reward"]["player1"])
    wins = SPIRAL["always_bet_never_fold_vs_uniform"]
    assert (1 - means[0]) / 2 == pytest.approx(wins["never_fold_always_bet_as_player0_vs_uniform"]["exact"])
    assert (1 + means[1]) / 2 == pytest.approx(wins["never_fold_always_bet_as_player1_vs_uniform"]["exact"])


def expected_last_hand(game: KuhnPoker, stubborn: int | None) -> float:
    """Mean reward of player 1; `stubborn` always bets and calls, who is not plays uniformly."""
    if game.done:
        return game.rewards[1]
    actions = game.legal_actions()[1:] if game.player == stubborn else game.legal_actions()
    values = []
    for action in actions:
        child = copy.deepcopy(game)
        child.step(action)
        values.append(expected_last_hand(child, stubborn))
    return sum(values) / len(values)


@pytest.mark.parametrize("variant, official", [("spiral", SPIRAL), ("textarena", TEXTARENA)])
def test_reference_kuhn_statistics_of_uniform_play(variant, official):
    """Against the official environments' 3,000 games, within four standard errors."""
    games = [random_game("kuhn", random.Random(seed), variant=variant) for seed in range(3000)]
    first = sum(game.rewards == [1.0, -1.0] for game in games) / len(games)
    expected = official["uniform_stats"]
    official_first = expected["p0_win"] if variant == "textarena" else (1 - expected["mean_reward_player1"]) / 2
    assert first == pytest.approx(official_first, abs=0.05) and all(sum(game.rewards) == 0.0 for game in games)
    if variant == "spiral":
        fewer = sum((game.chips[0] - game.chips[1]) * game.rewards[0] < 0 for game in games) / len(games)
        assert fewer == pytest.approx(expected["fraction_winner_has_fewer_chips"], abs=0.045)
        assert sum(game.turns for game in games) / len(games) == pytest.approx(expected["mean_turns"], abs=0.15)


def test_kuhn_deals_are_uniform():
    deals = [random_game("kuhn", random.Random(seed)).deals[0] for seed in range(6000)]
    assert all(abs(deals.count("".join(deal)) / 6000 - 1 / 6) < 0.02 for deal in itertools.permutations("JQK", 2))


# --- Kuhn poker: exact solutions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KUHN["policies"])
def test_reference_kuhn_nash_conv(name):
    case = KUHN["policies"][name]
    policy, value = case["p_bet"], case["value_p0"]
    assert solvers.kuhn_value(policy) == pytest.approx(value, abs=1e-8)
    assert solvers.kuhn_nash_conv(policy) == pytest.approx(case["nash_conv"], abs=1e-8)
    for player, improvement in enumerate(case["player_improvements"]):
        response, answer = solvers.kuhn_best_response(policy, player)
        assert response - (value if player == 0 else -value) == pytest.approx(improvement, abs=1e-8)
        pair = (answer, policy) if player == 0 else (policy, answer)
        assert solvers.kuhn_value(*pair) * (1 - 2 * player) == pytest.approx(response, abs=1e-12)
        assert set(answer) == set(KUHN_INFOSETS)


def test_reference_kuhn_values():
    assert KUHN["policies"]["uniform"]["nash_conv"] == pytest.approx(11 / 12)
    assert solvers.kuhn_nash_conv([0.5] * 12) == pytest.approx(11 / 12, abs=1e-12)
    assert solvers.kuhn_value([0.5] * 12) == pytest.approx(EXACT["uniform"]["value_p0"], abs=1e-12)
    assert solvers.KUHN_VALUE == pytest.approx(EXACT["value_player0"])
    for alpha in (0.0, 0.1, 1 / 6, 0.25, 1 / 3):
        first = {"0": alpha, "0pb": 0.0, "1": 0.0, "1pb": alpha + 1 / 3, "2": 3 * alpha, "2pb": 1.0}
        policy = first | {"0p": 1 / 3, "0b": 0.0, "1p": 0.0, "1b": 1 / 3, "2p": 1.0, "2b": 1.0}
        assert solvers.kuhn_nash_conv(policy) == pytest.approx(0.0, abs=1e-12)
        assert solvers.kuhn_value(policy) == pytest.approx(-1 / 18, abs=1e-12)
    assert list(KUHN_INFOSETS) == EXACT["handicap_kuhn_gradient_moments"]["expected_gradient_order"]


def test_reference_kuhn_second_moments():
    """Mean square of the return, from the environment: uniform play and three equilibria."""

    def second_moment(policy):
        total = 0.0
        for deal in itertools.permutations("JQK", 2):
            stack = [(1 / 6, begun("kuhn", cards=("".join(deal),)))]
            while stack:
                weight, game = stack.pop()
                if game.done:
                    total += weight * game.rewards[0] ** 2
                    continue
                bet = policy[solvers.kuhn_infoset(game)]
                for action, share in zip(game.legal_actions(), (1 - bet, bet)):
                    child = copy.deepcopy(game)
                    child.step(action)
                    stack.append((weight * share, child))
        return total

    assert second_moment(dict.fromkeys(KUHN_INFOSETS, 0.5)) == pytest.approx(EXACT["uniform"]["E_R2"])
    for name, value in EXACT["second_moment_of_return_at_equilibrium"].items():
        policy = KUHN["policies"][f"equilibrium_{name}"]["p_bet"]
        assert second_moment(policy) == pytest.approx(value, abs=1e-8)


CFR = {"alternating": {}, "simultaneous": {"alternating": False}, "plus": {"plus": True}}


@pytest.mark.parametrize("name", CFR)
def test_reference_kuhn_cfr_by_iteration(name):
    expected = {int(key): row for key, row in KUHN[f"cfr_{name}_by_iteration"].items() if int(key) <= 2000}
    for iteration, policy in enumerate(itertools.islice(solvers.kuhn_cfr(**CFR[name]), max(expected)), 1):
        if iteration in expected:
            assert solvers.kuhn_nash_conv(policy) == pytest.approx(expected[iteration]["nash_conv"], abs=1e-8)
            assert solvers.kuhn_value(policy) == pytest.approx(expected[iteration]["value_p0"], abs=1e-8)
    assert iteration == max(expected) >= 1000


def test_kuhn_policies_in_any_form():
    policy = KUHN["policies"]["random_seed0_3"]["p_bet"]
    rows = [policy[name] for name in KUHN_INFOSETS]
    pairs = [(1 - bet, bet) for bet in rows]
    for form in (rows, pairs, dict(zip(KUHN_INFOSETS, pairs)), dict(reversed(policy.items()))):
        assert solvers.kuhn_nash_conv(form) == solvers.kuhn_nash_conv(policy)
    for wrong in (
        rows[:-1],
        rows + [0.5],
        {**policy, "3": 0.5},
        {"0": 0.5},
        [1.5] + rows[1:],
        [(0.5, 0.6)] + pairs[1:],
    ):
        with pytest.raises(ValueError, match="Kuhn policy needs|neither a probability"):
            solvers.kuhn_nash_conv(wrong)


def test_kuhn_decision_points_cover_the_game():
    points = solvers.kuhn_decision_points(handicap=3.0)
    assert [name for name, _ in points] == list(KUHN_INFOSETS)
    for name, game in points:
        assert solvers.kuhn_infoset(game) == name and not game.done and game.handicap == 3.0
        assert (
            game.player == (len(name) == 2)
            and f"Your card: {'JQK'[int(name[0])]}." in game.prompt(game.player)[0]["content"]
        )
        assert game.legal_actions() == (["[fold]", "[call]"] if name.endswith("b") else ["[check]", "[bet]"])
    met = set()
    for seed in range(300):
        game = make_game("kuhn")
        game.reset(generator := random.Random(seed))
        while not game.done:
            met.add((solvers.kuhn_infoset(game), game.prompt(game.player)[0]["content"]))
            game.step(random_action(game, generator))
    assert met == {(name, game.prompt(game.player)[0]["content"]) for name, game in points}


# --- Negotiation --------------------------------------------------------------------------------------------------

NEGOTIATIONS = REFERENCE["negotiation_spiral_env"]["cases"]


@pytest.mark.parametrize("name", NEGOTIATIONS)
def test_reference_negotiation(name):
    case, game = NEGOTIATIONS[name], begun("negotiation")
    texts = case["actions"] + ["Let me think."] * (case["n_turns"] - len(case["actions"]))
    play(game, texts)
    assert game.done and game.turns == case["n_turns"] and game.rewards == case["rewards_p0_p1"]
    assert game.reason == ("rejected" if case["n_turns"] < 10 else "win" if any(case["rewards_p0_p1"]) else "draw")
    for player, inventory in case["inventory_value"].items():
        assert game.gain(int(player)) == inventory["change"]


@pytest.mark.parametrize(
    "texts, goods, reason",
    [
        (["[offer: i give 2 woods, 1 GOLD and 1 wood -> 3 golds!?]", "fine, [accept]"], (7, 12), ""),
        (["[Offer: 1 Wood -> 2 Gold] [Offer: 11 Wood -> 1 Gold]", "[Accept]"], (9, 12), ""),  # the first one counts
        (["[Offer: 1 Wood -> 2 Gold]", "[Accept] [Offer: 1 Gold -> 1 Wood]", "[Accept]"], (8, 13), ""),
        (["[Offer: 1 Wood -> 2 Gold]", "[Deny]", "hm", "[Accept]"], (10, 10), ""),  # nothing is open any more
        (["[Offer: 1 Wood -> 2 Gold]", "hm", "[Deny]", "[Accept]"], (9, 12), ""),  # one's own offer cannot be denied
        (["[Offer: 1 Wood -> 2 Gold]", "hm", "[Offer: 2 Wood -> 1 Gold]", "[Accept]"], (8, 11), ""),
        (["[Offer: 0 Wood -> 2 Gold]"], (10, 10), "rejected"),
        (["[Offer: 1 Iron -> 2 Gold]"], (10, 10), "rejected"),
        (["[Offer: 1 Wood -> 2 Gold -> 3 Wood]"], (10, 10), "rejected"),
        (["[Offer: 1 Wood]"], (10, 10), "rejected"),
        (["[Offer: 1 Wood, and 1 Gold -> 3 Gold]"], (10, 10), "rejected"),  # a comma or and
        (["[Offer: 6 Wood, 5 Wood -> 2 Gold]"], (10, 10), "rejected"),  # 11 together
        (["[Offer: -1 Wood -> 2 Gold]"], (10, 10), "rejected"),
        (["[Offer:]"], (10, 10), ""),  # not an offer at all
    ],
)
def test_negotiation_tokens(texts, goods, reason):
    game = play(begun("negotiation"), texts)
    assert tuple(game.goods[0].values()) == goods and game.reason == reason
    assert tuple(game.goods[1].values()) == (20 - goods[0], 20 - goods[1])


def test_legal_negotiation_tokens_are_legal():
    generator = random.Random(0)
    for _ in range(40):
        game = begun("negotiation")
        while not game.done:
            actions = game.legal_actions()
            assert ("[Deny]" in actions) == (game.offer is not None and game.offer[0] != game.player)
            assert len(actions) == len(set(actions))
            game.step(generator.choice([action for action in actions if action[1] != "O"] * 60 + actions))
        assert game.reason in ("win", "draw") and game.turns == Negotiation.MESSAGES
    game = play(begun("negotiation"), ["[Offer: 1 Wood -> 11 Gold]"])
    assert game.legal_actions()[0] == "[Deny]" and "[Accept]" not in game.observation(1).split("\n")[-1]


# --- Demonstrations -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demonstrations():
    generator = random.Random("demonstrations")
    return [demonstration(generator) for _ in range(4000)]


def kind_of(content: str) -> tuple[str, str | None]:
    for text, kind in (("TicTacToe", ("tictactoe", None)), ("negotiation", ("negotiation", None))):
        if text in content:
            return kind
    return "kuhn", next(name for name, rule in KuhnPoker.RULES.items() if rule in content)


def test_demonstrations_cover_games_and_seats(demonstrations):
    contents = [messages[0]["content"] for messages, _ in demonstrations]
    kinds = [kind_of(content) for content in contents]
    for kind, share in SHARES.items():
        assert kinds.count(kind) / len(kinds) == pytest.approx(share, abs=0.02)
        seats = [content for content, found in zip(contents, kinds) if found == kind]
        assert 0.35 < sum("You are Player 0 " in content for content in seats) / len(seats) < 0.65
    standard = {content for content, kind in zip(contents, kinds) if kind == ("kuhn", "standard")}
    assert standard == {game.prompt(game.player)[0]["content"] for _, game in solvers.kuhn_decision_points()}
    boards = {content for content, kind in zip(contents, kinds) if kind == ("tictactoe", None)}
    assert len(boards) > 600


def test_demonstrated_moves_are_mostly_legal_and_nearly_uniform(demonstrations):
    legal, moves, thoughts, lost = [], [], [], 0
    for messages, text in demonstrations:
        content = messages[0]["content"]
        lost += not re.fullmatch(r"<think>[^<>\\]+</think>\\boxed\{[^{}]+\}", text) or text[-2] not in "].!"
        if kind_of(content)[0] == "negotiation":
            continue
        available = re.findall(r"\[\w+\]", content.split("Available actions: ")[1])
        action = parse_action(text, available)
        legal.append(action in available)
        thoughts.append(len(text.split("\\boxed")[0].split()))
        if kind_of(content) == ("kuhn", "standard") and action:
            moves.append(available.index(action))
    assert 0.93 < sum(legal) / len(legal) < 0.97  # ILLEGAL and some of LOST_TAG
    assert 0.03 <= ILLEGAL <= 0.05 and 0.01 < lost / len(demonstrations) < 0.03
    assert sum(moves) / len(moves) == pytest.approx(0.5, abs=0.03)
    assert min(thoughts) <= 2 and max(thoughts) >= 8  # of any length


def test_what_demonstrations_observe_is_true():
    generator, seen_wins = random.Random(0), 0
    for _ in range(200):
        game = make_game("tictactoe")
        game.reset(generator)
        while not game.done:
            sentences, better = observations(game)
            for index, name in ((3, "Wins"), (4, "Threats")):
                cells = re.fullmatch(rf"{name}: (\d+|none)\.", sentences[index])[1]
                mover = copy.copy(game)
                mover.player = game.player if name == "Wins" else 1 - game.player
                truth = []
                for action in game.legal_actions():
                    child = copy.copy(mover)
                    child.step(action)
                    truth += [action] if child.reason == "win" else []
                assert cells == ("".join(action[1] for action in truth) or "none") and better.get(index, []) == truth
                seen_wins += bool(truth)
            game.step(random_action(game, generator))
    assert seen_wins > 100
    for _, game in solvers.kuhn_decision_points():
        card = game.deals[0][game.player]
        sentences, better = observations(game)
        assert sentences[0] == f"I have {card}." and card not in sentences[1] and better == {}
        assert ("bet" in sentences[2]) == (game.legal_actions() == ["[fold]", "[call]"])


def test_tictactoe_board_can_be_set():
    """Evaluations put a game at a board: board and player are all there is."""
    game = begun("tictactoe")
    game.board, game.player = "OO.XX....", 0
    game.step("[2]")
    assert isinstance(game, TicTacToe) and game.rewards == [1.0, -1.0]


def test_the_shipped_tokenizer_keeps_moves_and_marks_whole():
    """One token each, the same on the board, in the list of actions, in a thought and in the box."""
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[1] / "envs" / "tiny_lm" / "text_games")
    texts = {
        "4": ("3 4 5", "[3], [4], [5]", "Free: 345.", "\\boxed{[4]}"),
        "K": ("Your card: K.", "They have Q or K.", "K was shown"),
        "call": ("[fold], [call]", "I call.", "\\boxed{[call]}"),
        "Gold": ("2 Gold -> 3 Wood", "I like Gold.", "more Gold."),
    }
    for word, places in texts.items():
        (token,) = tokenizer.encode(word)
        for text in places:
            assert token in tokenizer.encode(text) and tokenizer.decode(tokenizer.encode(text)) == text
    for _, game in solvers.kuhn_decision_points():
        ids = tokenizer.apply_chat_template(game.prompt(game.player), add_generation_prompt=True, return_dict=True)
        assert len(ids["input_ids"]) <= 50
