"""Advantage Alignment as people run it: files, resume, two processes, a game of one's own, mistakes, learning."""

import json
import math
import shlex
from functools import partial

import pytest
from language_runs import (
    assert_same_run,
    completions,
    kill_and_resume,
    numbers,
    spy,
    train,
    two_processes_equal_one,
    whole_run,
)
from processes import ROOT
from run_folders import assert_tags_of_pages, refusal, tags

from algorithms import advantage_alignment, spiral_rae

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SMALL = {"num_games_per_step": 4, "max_completion_length": 12, "game_options": '{"ipd": {"rounds": 3}}'}
SMALL |= {"eval_steps": 0, "eval_games": 2, "eval_samples": 2, "save_steps": 0}
LONG = SMALL | {"games": ("ipd", "coins"), "max_steps": 2, "save_steps": 1, "eval_steps": 2, "beta": 0.04}
COMMONS = f"{ROOT}/envs/examples/commons.py:Commons"
train_here = partial(train, advantage_alignment, **SMALL)
whole = whole_run(advantage_alignment, LONG)


def test_every_turn_is_updated_with_the_credit_of_its_round_and_player(whole):
    run_dir, given = whole
    assert all(map(math.isfinite, numbers(run_dir).values()))
    assert_tags_of_pages(tags(run_dir), "advantage_alignment")
    rows = completions(run_dir)
    assert [row["game"] for row in rows] == ["ipd", "coins"] * 4
    for step in range(2):
        expected, texts = [], []
        for row in rows[4 * step : 4 * step + 4]:
            for text in row["turns"]:
                place, _, said = text.partition(": ")
                turn, player = [int(word) for word in place.replace(",", "").split() if word.isdigit()]
                expected.append(row["advantages"][turn - 1][player])
                texts.append(said.partition(" (illegal")[0])
        _, _, _, written, advantages, _ = given[step]
        assert texts == [completion.text for completion in written]
        assert advantages.tolist() == pytest.approx(expected, abs=1e-6)
    for row in rows:  # what the game gave, divided by its scale, less the cost of illegal turns
        illegal = [text for text in row["turns"] if "(illegal" in text]
        scale = {"ipd": 5, "coins": 1}[row["game"]]
        points, rewards = (sum(map(sum, row[name])) for name in ("points", "rewards"))
        assert rewards == pytest.approx(points / scale - len(illegal))


def test_players_do_not_see_the_move_of_the_round(whole):
    """Both prompts of a first round are the same."""
    _, _, _, written, _, _ = whole[1][0]
    assert written[0].prompt == written[1].prompt


def test_goes_on_after_a_kill(whole, tmp_path):
    kill_and_resume(advantage_alignment, whole[0], tmp_path, 2, **LONG)


def test_two_processes_equal_one(tmp_path):
    shared = SMALL | {"games": (COMMONS,), "game_options": "{}", "max_steps": 1, "micro_batch_size": 2, "beta": 1.0}
    two_processes_equal_one(advantage_alignment, tmp_path, **shared | {"eval_steps": 1, "eval_opponents": ("self", "random")})


@pytest.mark.quick
def test_beta_zero_is_the_naive_run_to_the_bit(tmp_path):
    train_here(tmp_path / "zero", alignment_beta=0.0)
    naive = train_here(tmp_path / "naive", advantage="naive")
    assert_same_run(tmp_path / "zero", tmp_path / "naive")
    assert train_here(tmp_path / "one") != naive


@pytest.mark.quick
@pytest.mark.parametrize("arm", ["marshal", "marshal_released", "sum", "no_baseline"])
def test_the_split_with_every_other_arm(arm, tmp_path):
    values = {"games": ("split",), "game_options": "{}", "advantage": arm, "length_reward": 0.5}
    found = train_here(tmp_path, **values, max_completion_length=30, num_games_per_step=2)
    assert found[1, "train/advantage_alignment/advantage_std"] > 0
    assert all(len(row["turns"]) == 10 for row in completions(tmp_path))


@pytest.mark.quick
def test_a_game_of_ones_own(tmp_path):
    values = {"games": (COMMONS,), "game_options": "{}", "eval_steps": 1, "eval_opponents": ("self", "random")}
    found = train_here(tmp_path, **values)
    assert "eval/commons.py:Commons/random/other" in {tag for _, tag in found}
    assert not any("/ipd/" in tag for _, tag in found)
    assert "grows by a half" in completions(tmp_path)[0]["first_prompt"]


@pytest.mark.quick
def test_a_prompt_that_is_too_long_is_a_random_action(tmp_path):
    values = {"game_options": '{"ipd": {"rounds": 4, "history": 4}}', "max_prompt_length": 55}
    found = train_here(tmp_path, **values)
    assert 0 < found[1, "train/advantage_alignment/ipd/cut"] < 1


OWN_GAME = """
from envs.examples.commons import Commons

class OneNumber(Commons):
    def rewards(self, state):
        return 1.0

class NotANumber(Commons):
    def rewards(self, state):
        return [1.0, None]

class NoState(Commons):
    def play(self, state, actions):
        state.append((0, 0))

class NoBrackets(Commons):
    def legal_actions(self, state, player):
        return ["1"]

class Broken(Commons):
    def rewards(self, state):
        raise KeyError("the purse is lost")

class Bare:
    rounds = 2
    scale = 1.0

class NoScale(Commons):
    scale = 0

class ListsOpponents(Commons):
    def opponents(self):
        return ["random"]

class Strange(Commons):
    def opponents(self):
        return {"stranger": lambda state, player, generator: "nothing"}

class NamedSelf(Commons):
    def opponents(self):
        return super().opponents() | {"self": self.random_action}

class Late(Commons):
    calls = 0

    def rewards(self, state):
        Late.calls += 1
        return [1.0, float("nan" if Late.calls > 7 else 1)]

class Uneven(Commons):
    starts = 0

    def start(self, generator):
        Uneven.starts += 1
        self.rounds = 2 + Uneven.starts % 2
        return []
"""
MISTAKES = {
    "OneNumber": "rewards: returned 1.0 after a round, expected two numbers",
    "NotANumber": "rewards: returned [1.0, None] after a round",
    "NoState": "play: returned None, expected the new state",
    "NoBrackets": "legal_actions: lists '1', which parse does not read",
    "NoScale": "scale: found 0, expected a number above 0",
    "ListsOpponents": "opponents: returned ['random'], expected a dictionary of functions",
    "NamedSelf": "opponents: self and policy mean the policy",
    "Strange": "opponents: stranger plays 'nothing', expected what parse returns",
    "Bare": "has no start, movers, prompt, legal_actions, parse, play, rewards, opponents, see envs/dilemma.py",
}


@pytest.mark.quick
def test_mistakes_in_a_game_of_ones_own_are_one_sentence(monkeypatch, tmp_path):
    (tmp_path / "odd_dilemmas.py").write_text(OWN_GAME)
    for name, sentence in MISTAKES.items():
        words = ["--games", f"{tmp_path}/odd_dilemmas.py:{name}", "--output-dir", tmp_path / name, "--max-steps", "0"]
        found = refusal(advantage_alignment, monkeypatch, *words)
        assert sentence in found, name
    ends = {  # while games are played
        "Broken": (KeyError, "the purse is lost"),
        "Late": (SystemExit, r"--games odd_dilemmas.py:Late: the rewards of round 3 are \[1.0, nan\]"),
        "Uneven": (SystemExit, "--games odd_dilemmas.py:Uneven: all games need the same number of rounds"),
    }
    for name, (error, sentence) in ends.items():
        with pytest.raises(error, match=sentence):
            train_here(tmp_path / name, games=(f"{tmp_path}/odd_dilemmas.py:{name}",), game_options="{}", decode_batch_size=2)


@pytest.mark.quick
@pytest.mark.parametrize(
    "words, sentence",
    [
        ("--games chess", "--games: there is no game chess, expected one of ipd, coins, split"),
        ("""--game-options '{"ipd":{"hands":3}}'""", "--game-options: ipd has no option hands"),
        ("""--game-options '{"ipd":{"payoffs":3}}'""", "--game-options: ipd needs rounds and history as whole numbers"),
        ("--eval-opponents self stranger", "--eval-opponents stranger: expected some of cooperate"),
        ("--max-prompt-length 10", "--max-prompt-length: ipd needs"),
        ("--num-minibatches 129", "--num-games-per-step: at least one of each of --games in each of"),
        ("--advantage naive --alignment-beta 0.5", "--alignment-beta: --advantage naive does not use it"),
        ("--advantage marshal_released --gamma 1", "--gamma: --advantage marshal_released does not use it"),
        ("--gamma 1.5", "--gamma 1.5: expected a number from 0 to 1"),
        ("--games coins --eval-opponents self defect", "--eval-opponents defect: expected some of random, self"),
        (
            f"""--games {COMMONS} --game-options '{{"{COMMONS}":{{"rounds":8}}}}'""",
            f"--game-options: {COMMONS} got an unexpected keyword argument 'rounds'",
        ),
        ("--length-reward 0.5 --max-completion-length 8", "--length-reward: "),
    ],
)
def test_wrong_flags(words, sentence, monkeypatch, tmp_path):
    found = refusal(advantage_alignment, monkeypatch, *shlex.split(words), "--output-dir", tmp_path / "run")
    assert found.startswith(sentence)


@pytest.mark.quick
def test_games_are_looked_at_before_the_model(monkeypatch, tmp_path):
    words = "--games chess --model-name-or-path none".split()
    found = refusal(advantage_alignment, monkeypatch, *words, "--output-dir", tmp_path / "run")
    assert found.startswith("--games: there is no game chess")


@pytest.mark.quick
@pytest.mark.parametrize("script", [advantage_alignment, spiral_rae], ids=lambda s: s.__name__[11:])
def test_two_games_of_one_name_are_refused(script, monkeypatch, tmp_path):
    paths = [f"{tmp_path}/{folder}/purse.py:Commons" for folder in ("a", "b")]
    found = refusal(script, monkeypatch, "--games", *paths, "--output-dir", tmp_path / "run")
    assert found.startswith("--games: two of them have one name in the metrics")


@pytest.mark.quick
def test_whole_games_with_one_of_each_kind_are_in_a_part(tmp_path):
    with spy(advantage_alignment) as given:
        train_here(tmp_path, games=("ipd", "coins"), num_games_per_step=8, num_minibatches=2)
    parts = [part for part in (0, 1, 0, 1) for _ in range(2 * 3 + 2 * 10)]  # turns of both games
    assert [completion.part for completion in given[0][3]] == parts


@pytest.mark.quick
def test_spiral_names_this_script_and_goes_on_with_old_runs(monkeypatch, tmp_path):
    found = refusal(spiral_rae, monkeypatch, "--baseline", "mars")
    assert found.startswith("--baseline mars: is called role_mean") and "advantage_alignment.py" in found
    values = {"games": ("kuhn",), "num_games_per_step": 2, "max_completion_length": 8, "eval_steps": 0, "save_steps": 1}
    train(spiral_rae, tmp_path / "old", **values, baseline="role_mean")
    saved = json.loads((tmp_path / "old" / "args.json").read_text())
    (tmp_path / "old" / "args.json").write_text(json.dumps(saved | {"baseline": "mars"}))
    monkeypatch.setattr("sys.argv", ["spiral_rae.py", "--resume", str(tmp_path / "old"), "--max-steps", "2"])
    spiral_rae.train(spiral_rae.parse_args())
    expected = train(spiral_rae, tmp_path / "new", **values | {"max_steps": 2}, baseline="role_mean")
    assert numbers(tmp_path / "old") == expected


def test_learning(tmp_path):
    """The plain policy gradient learns to defect."""
    values = {"num_games_per_step": 32, "max_steps": 8, "advantage": "naive", "learning_rate": 1e-3}
    found = train_here(tmp_path, **values)
    payoffs = [found[step, "train/advantage_alignment/ipd/payoff_0"] for step in range(1, 9)]
    assert sum(payoffs[-2:]) < sum(payoffs[:2]) - 0.5, payoffs
