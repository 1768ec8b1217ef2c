"""DipLLM as people run it: it learns, goes on after a kill, by two processes, on boards of their own, with mistakes."""

import json
import math
import re

import pytest
import torch
from language_runs import (
    completions,
    evaluation_answers,
    kill_and_resume,
    numbers,
    train,
    two_processes_equal_one,
)
from processes import ROOT
from run_folders import assert_tags_of_pages, refusal, tags

from algorithms import dipllm
from algorithms.dipllm import Args

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SMALL = {
    "num_games_per_step": 2,
    "num_plays": 2,
    "eval_games": 2,
    "search_steps": 50,
    "eval_steps": 0,
    "save_steps": 0,
    "num_iterations": 1,
}
SMALL |= {"game_options": '{"num_units": 2}'}
LONG = SMALL | {"max_steps": 2, "save_steps": 1, "eval_steps": 2}
OWN = '''\
class Duel:
    """One turn: player 0 wants to match both units of player 1, one of which has a single order."""

    def __init__(self, centres=1):
        self.most = centres

    def reset(self, generator):
        self.done = False

    def legal_orders(self, player):
        return [["left", "right", "stay"], ["wait"]]

    def prompt(self, player, orders):
        return [{"role": "user", "content": f"Player {player} ordered {orders}."}]

    def after(self, orders):
        return (self.most, 0) if orders[0] == orders[1] else (0, self.most)

    def play(self, orders):
        self.done = True


class NoPlay:
    play = None

    def reset(self, generator):
        self.done = False


class Numbers(Duel):
    def legal_orders(self, player):
        return [[1, 2]]


class Twice(Duel):
    def legal_orders(self, player):
        return [["left", "left"]]


class Text(Duel):
    def prompt(self, player, orders):
        return "Which?"


class Shares(Duel):
    def after(self, orders):
        return (-1, 1)


class Endless(Duel):
    def play(self, orders):
        pass


class Moves(Duel):
    turn = 0

    def legal_orders(self, player):
        return [["left", f"right {self.turn}"]]

    def after(self, orders):
        self.turn += 1
        return (1, 1)


class Hides(Moves):
    """What changes is seen by player 1 alone, in its prompt."""

    def legal_orders(self, player):
        return [["left", "right"]]

    def prompt(self, player, orders):
        return [{"role": "user", "content": f"Turn {self.turn * player}."}]


class Method(Duel):
    def reset(self, generator):
        pass

    def done(self):
        return False


class Nobody(Duel):
    def legal_orders(self, player):
        return []


class Loses(Duel):
    """Player 1 has no units at the second turn."""

    def reset(self, generator):
        self.turn = 0

    @property
    def done(self):
        return self.turn == 2

    def legal_orders(self, player):
        return [] if player == self.turn == 1 else super().legal_orders(player)

    def play(self, orders):
        self.turn += 1


class Broken(Duel):
    def after(self, orders):
        raise IndexError("no such field")
'''
NOTHING = ("--max-steps", "0", "--eval-steps", "0")  # what is not refused ends soon
MISTAKES = {
    "NoSuch": "the file does not define 'NoSuch'",
    "NoPlay": "has no legal_orders, prompt, after, see envs/blotto.py",
    "Numbers": "legal_orders: returned [[1, 2]], expected for each unit a list of different texts",
    "Twice": "legal_orders: returned [['left', 'left']]",
    "Text": "prompt: returned 'Which?', expected a list of messages",
    "Shares": "after: returned (-1, 1), expected two counts of centres",
    "Endless": "play: the game is not done after 1000 turns",
    "Moves": "after: changed the board, which only play may do",
    "Hides": "after: changed the board, which only play may do",
    "Method": "done: found <bound method Method.done of ",
    "Nobody": "legal_orders: player 0 has no units after reset",
}
FLAGS = {
    ("--env", "chess"): "--env chess: expected blotto or FILE.py:Class",
    ("--game-options", '{"num_fields": 2}'): "--game-options: blotto needs 3 to 10 num_fields",
    ("--game-options", '{"size": 2}'): "--game-options: ",
    ("--game-options", "[]"): "--game-options: expected JSON in braces",
    ("--lamb", "0"): "--lamb: must be above 0",
    ("--explore-eps", "2"): "--explore-eps 2.0: a probability is at most 1",
    ("--weight-cap", "5"): "--weight-cap: needs --label weighted",
    ("--num-plays", "0"): "--num-plays 0: expected a finite number from 1",
    ("--max-prompt-length", "20"): "--max-prompt-length 20: a prompt has 6",
    ("--max-prompt-length", "2047"): "--max-prompt-length: with an order up to 2051 tokens, more than",
    ("--max-prompt-length", "3000"): "--max-prompt-length: with an order up to 3004 tokens, more than",
    ("--anchor", "uniform", "--anchor-temperature", "5"): "--anchor-temperature: is of --anchor model",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    train(dipllm, run_dir, **LONG)
    return run_dir


@pytest.fixture
def own(tmp_path):
    (tmp_path / "duel.py").write_text(OWN)
    return f"{tmp_path}/duel.py"


def test_lines_of_the_page_load_a_policy_and_act(whole):
    page = (ROOT / "algorithms/dipllm.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"## A trained policy\n\n```python\n(.*?)```", page, re.S)
    names = {}
    exec(lines.replace("import random, dipllm", "import random, algorithms.dipllm as dipllm").replace("RUN", str(whole)), names)
    assert len(names["orders"]) == len(names["board"].legal_orders(0))


def test_metrics_and_completions(whole):
    found = numbers(whole)
    assert all(map(math.isfinite, found.values()))
    assert_tags_of_pages(tags(whole), "dipllm", "grpo")
    assert found[2, "eval/objective"] < found[2, "eval/search/objective"], "the search is best"
    assert found[2, "eval/anchor/objective"] < found[2, "eval/search/objective"]
    assert (
        found[2, "eval/anchor/score"] == pytest.approx(0.5, abs=0.2)
        and found[0, "eval/search/objective"] == found[2, "eval/search/objective"]
    )
    assert found[2, "train/num_positions"] == 2 * 2 * 2, "steps, games, turns"
    for row in completions(whole):
        assert set(row["label"]) <= {"H", "- A", "- B", "- C", "- D"} and len(row["label"]) == 3
    assert len(evaluation_answers(whole)) == 2 * 2 * 2 * 2, "two evaluations, games, turns, seats"


def test_goes_on_after_a_kill(whole, tmp_path):
    kill_and_resume(dipllm, whole, tmp_path, 2, **LONG)


def test_two_processes_equal_one(tmp_path):
    values = SMALL | {"num_games_per_step": 4, "eval_steps": 1, "max_steps": 1, "num_iterations": 2}
    two_processes_equal_one(dipllm, tmp_path, ("plain",), **values)


def test_the_anchor_is_the_model_without_adapters(tmp_path):
    """So the search of the second step is that of a run that trains nothing."""
    values = LONG | {"lora_rank": 4, "learning_rate": 1e-2}
    found = train(dipllm, tmp_path / "lora", **values)
    still = train(dipllm, tmp_path / "still", **LONG | {"learning_rate": 0.0})
    for tag in ("train/dipllm/search_gain", "eval/search/objective", "eval/anchor/exploitability"):
        assert found[2, tag] == pytest.approx(still[2, tag], rel=1e-5)
    assert found[2, "eval/objective"] != still[2, "eval/objective"]


def test_it_learns_and_its_control_does_not_mix(tmp_path):
    """Objectives of one board of one turn: soft labels lead to that of the search, arg-max labels cannot."""
    values = SMALL | {
        "num_games_per_step": 1,
        "num_plays": 6,
        "num_iterations": 8,
        "eval_games": 1,
        "warmup_steps": 1,
    }
    values |= {"game_options": '{"num_units": 2, "num_turns": 1}'}
    missing = {}
    for label, steps in (("soft", 14), ("argmax", 6)):
        flags = {"label": label, "max_steps": steps, "eval_steps": steps}
        found = train(dipllm, tmp_path / label, **values | flags)
        missing[label] = found[steps, "eval/search/objective"] - found[steps, "eval/objective"]
        assert found[steps, "train/dipllm/label_kl"] < 0.2 * found[1, "train/dipllm/label_kl"]
        assert found[1, "train/dipllm/search_gain"] > 0
    assert missing["soft"] < 0.02 and missing["argmax"] > 0.05, missing


def test_other_paths(tmp_path):
    """Candidates in place of all joint orders, a uniform anchor, boards without an end, bfloat16."""
    values = SMALL | {
        "max_joint_orders": 8,
        "num_candidates": 5,
        "num_samples": 20,
        "num_boards": 0,
        "eval_steps": 1,
    }
    found = train(dipllm, tmp_path / "drawn", **values)
    assert found[1, "eval/objective"] <= found[1, "eval/search/objective"]
    found = train(
        dipllm,
        tmp_path / "even",
        **SMALL | {"anchor": "uniform", "bf16": True, "gradient_checkpointing": True},
    )
    assert math.isfinite(found[1, "train/loss"]) and found[1, "train/dipllm/search_gain"] > 0


def test_candidates_are_among_the_joint_orders(tmp_path):
    args = Args(**SMALL, anchor_temperature=10.0, num_candidates=4, num_samples=40)
    model, tokenizer = dipllm.load_model(args)
    board = dipllm.new_board(args)
    board.reset(dipllm.random.Random(1))
    every = dipllm.list_candidates(model, tokenizer, board, 0, None, args)
    assert len(every) == 9
    some = dipllm.list_candidates(
        model,
        tokenizer,
        board,
        0,
        dipllm.random.Random(0),
        dipllm.replace(args, max_joint_orders=8),
    )
    assert len(some) == 4 and set(some) < set(every)
    (position, *_) = dipllm.collect(
        model, tokenizer, ["1"], ["1"], dipllm.replace(args, max_joint_orders=8, eta=10.0)
    )
    for seat in position.seats:
        torch.testing.assert_close(dipllm.joint_probabilities(seat.unit_policies, seat), seat.policy)
        torch.testing.assert_close(seat.policy.sum(), torch.tensor(1.0, dtype=torch.float64))


def test_own_board(own, tmp_path):
    values = SMALL | {
        "env": f"{own}:Duel",
        "game_options": '{"centres": 3}',
        "num_games_per_step": 1,
        "max_steps": 1,
        "eval_steps": 1,
    }
    found = train(dipllm, tmp_path / "run", **values)
    assert found[1, "train/num_positions"] == 1
    assert list(completions(tmp_path / "run")[0]["label"]) == ["left", "right", "stay"]
    assert found[1, "eval/search/exploitability"] < found[1, "eval/anchor/exploitability"]


@pytest.mark.quick
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_own_boards_get_one_sentence(own, monkeypatch, name, tmp_path):
    words = ("--env", f"{own}:{name}", "--output-dir", tmp_path / "run", *NOTHING)
    found = refusal(dipllm, monkeypatch, *words)
    assert MISTAKES[name] in found


@pytest.mark.quick
def test_options_that_an_own_board_does_not_take_get_one_sentence(own, monkeypatch, tmp_path):
    words = ("--env", f"{own}:Duel", "--game-options", '{"size": 2}', "--output-dir", tmp_path / "run")
    found = refusal(dipllm, monkeypatch, *words)
    assert found.startswith('--game-options {"size": 2}: ') and "unexpected keyword argument 'size'" in found


def test_a_player_may_lose_all_units(own, tmp_path):
    """It has one joint order, no query, and no answer to show."""
    found = train(dipllm, tmp_path / "run", **SMALL | {"env": f"{own}:Loses", "game_options": "{}", "eval_steps": 1})
    assert found[1, "train/num_positions"] == 2 * 2
    assert all(map(math.isfinite, found.values()))
    assert len(evaluation_answers(tmp_path / "run")) == 2 * 2 * 3, "evaluations, games, seats with units"


@pytest.mark.quick
def test_an_error_in_an_own_board_keeps_its_traceback(own, tmp_path):
    with pytest.raises(IndexError, match="no such field"):
        dipllm.train(Args(env=f"{own}:Broken", output_dir=str(tmp_path / "run")))


@pytest.mark.quick
@pytest.mark.parametrize("words", FLAGS, ids=" ".join)
def test_wrong_flags_get_one_sentence(words, monkeypatch, tmp_path):
    found = refusal(dipllm, monkeypatch, *words, "--output-dir", tmp_path / "run", *NOTHING)
    assert found.startswith(FLAGS[words])


def test_boards_of_a_seed():
    assert [dipllm.board_seed(game, Args(num_boards=2)) for game in range(3)] == [
        "1 0",
        "1 1",
        "1 0",
    ]
    assert dipllm.board_seed(5, Args(num_boards=0, seed=3)) == "3 5"
    assert json.loads(Args().game_options) == {}
