"""SPIRAL: numbers of the official code, gradient variance of Kuhn poker by enumeration, games as
rows of a batch, the read-out."""

import json
import random
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
import torch

from algorithms import spiral_rae
from algorithms.spiral_rae import (
    Args,
    RoleBaseline,
    evaluate_kuhn,
    game_advantages,
    play,
    training_match,
)
from envs.game_solvers import DEALS, KUHN_INFOSETS, kuhn_nash_conv, kuhn_return
from envs.text_games import make_game

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = json.loads((ROOT / "tests" / "reference" / "spiral_rae.json").read_text())
ARGS = Args(games=("tictactoe", "kuhn", "negotiation"), max_completion_length=40, decode_batch_size=5)


def assert_close(actual, expected, tolerance: float = 1e-9) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    actual = torch.as_tensor(actual).detach().double()
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def a_result(name: str, rewards, roles=(0, 1), learns=(True, True)) -> spiral_rae.Result:
    return spiral_rae.Result(name, list(learns), list(rewards), list(roles), len(roles), False, False)


@pytest.mark.parametrize("handicap", [0, 3])
@pytest.mark.parametrize("name", ["no_baseline", "perfect_role_baseline"])
def test_reference_gradient_variance_of_handicap_kuhn(name, handicap):
    """All hands by the uniform policy; the gradient of a decision is the role's advantage times (bet or not, less 1/2)."""
    hands = [(deal, end) for deal in DEALS for end in ("pp", "pbp", "pbb", "bp", "bb")]
    chances = torch.tensor([0.5 ** len(end) / len(DEALS) for _, end in hands], dtype=torch.float64)
    chips = torch.tensor([kuhn_return(*hand) + handicap for hand in hands]).double()
    returns = torch.stack([chips, -chips], 1)
    baseline = chances @ returns if name == "perfect_role_baseline" else torch.zeros(2).double()
    gradients = torch.zeros(len(hands), len(KUHN_INFOSETS)).double()
    for hand, (deal, end) in enumerate(hands):
        for turn, done in enumerate(end):
            role = turn % 2
            where = KUHN_INFOSETS.index(f"{deal[role]}{end[:turn]}")
            gradients[hand, where] = (returns[hand, role] - baseline[role]) * ((done == "b") - 0.5)
    reference = REFERENCE["kuhn_exact"]["handicap_kuhn_gradient_moments"]
    assert_close(chances @ gradients, reference["expected_gradient"], 1e-8)
    moment = chances @ gradients.square().sum(1)
    assert_close(moment, reference[f"c{handicap}_{name}"]["E_g2"], 1e-8)
    assert_close(moment - (chances @ gradients).square().sum(), reference[f"c{handicap}_{name}"]["trace_cov"], 1e-8)


ORDERS = {False: "advantage_official_pre_update", True: "advantage_paper_post_update"}


@pytest.mark.parametrize("update_first", ORDERS, ids=lambda x: "paper" if x else "code")
@pytest.mark.parametrize("case", REFERENCE["rae_ema"]["cases"])
def test_reference_moving_average(case, update_first):
    baseline = RoleBaseline(case["decay"], update_first)
    found = []
    for reward, after in zip(case["rewards"], case["baseline_after_each"]):
        found.append(baseline.advantage("kuhn", 1, reward))
        assert baseline.values == {("kuhn", 1): pytest.approx(after, abs=1e-9)}
    assert found == pytest.approx(case[ORDERS[update_first]], abs=1e-9)


CASES = REFERENCE["rae_prepare_trajectories"]["cases"]


@pytest.mark.parametrize("case", CASES)
def test_reference_games_in_order(case):
    """Advantages of all turns, and the averages after each game. The discount of the official code
    is not in the script: it is 1 in the paper, and taken out of the numbers here."""
    config = case["config"]
    learns = [not config["fixed_opponent"] or i == config["online_model_player"] for i in (0, 1)]
    baseline = RoleBaseline(config["decay"])
    for game in case["games_in_order"]:
        movers = [player for player, _ in game["turns_player_ntokens"]]
        rewards = [config["reward_scaling"] * reward for reward in game["rewards"]]
        pair = game_advantages([a_result("kuhn", rewards, movers, learns)], baseline, "role")[0]
        after = [baseline.values.get(("kuhn", role), 0.0) for role in (0, 1)]
        assert after == pytest.approx(game["baseline_after"], abs=1e-9)
        for row in game["emitted"]:
            left = movers[row["turn"] + 1 :].count(row["player"])
            expected = row["turn_advantage"] / config["gamma"] ** left
            assert pair[row["player"]] == pytest.approx(expected, abs=1e-9)
        if config["filter_zero_adv"]:
            emitted = {row["player"] for row in game["emitted"]}
            assert emitted == {i for i in set(movers) if learns[i] and pair[i] != 0}


@pytest.mark.parametrize("case", REFERENCE["rae_order_variant_unstable_baselines"]["cases"])
def test_reference_unstable_baselines(case):
    """The authors' other library: several games, the average moves first."""
    baseline = RoleBaseline(case["alpha"], update_first=True)
    for row in case["rows"]:
        found = baseline.advantage(row["env"], row["player"], row["reward"])
        assert found == pytest.approx(row["advantage"], abs=1e-9)


def test_reference_role_mean():
    """MARSHAL's formula where only the end is rewarded. Each turn of the reference, with a return of its own, is a game here."""
    data = REFERENCE["mars_advantage"]["data"]
    turns = data["paper_formula_turn_returns"]
    results = []
    for name, returns in zip(data["input"]["group_ids"], turns):
        role = int(name[-1])
        for value in returns:
            results.append(a_result("kuhn", [value, value], [role], [role == 0, role == 1]))
    pairs = game_advantages(results, RoleBaseline(), "role_mean")
    expected = data["paper_formula_advantages"]
    expected = [value for number in range(len(turns)) for value in expected[str(number)]]
    assert [sum(pair) for pair in pairs] == pytest.approx(expected, abs=1e-8)


BY_HAND = {  # advantages of both roles in three games
    "none": [(1, -1), (-1, 1), (2, -2)],
    "role": [(1, -1), (-1, 1), (2 - 0.05, -2 + 0.05)],
    "global": [(1, -1.05), (-1, 1.05), (2.0025, -2.097625)],
    "role_mean": [(1 - 5 / 3, 0.5), (0, 0), (2 - 5 / 3, -0.5)],  # turns count, of which role 0 has one and two
}


@pytest.mark.parametrize("kind", BY_HAND)
def test_baselines_of_mixed_games(kind):
    games = [("kuhn", [1, -1], (0, 1)), ("tictactoe", [-1, 1], (0, 1)), ("kuhn", [2, -2], (0, 1, 0))]
    pairs = game_advantages([a_result(*game) for game in games], RoleBaseline(), kind)
    assert sum(map(list, pairs), []) == pytest.approx(sum(map(list, BY_HAND[kind]), []), abs=1e-12)
    results = [a_result(*game, learns=(False, True)) for game in games]
    pairs = game_advantages(results, RoleBaseline(), kind)
    assert [pair[0] for pair in pairs] == [0, 0, 0], "the opponent's"
    if kind != "global":
        assert [pair[1] for pair in pairs] == pytest.approx([pair[1] for pair in BY_HAND[kind]])


class Bigram(torch.nn.Module):
    """The policy of the reference: the logits behind a token are a row of W."""

    device = torch.device("cpu")

    def __init__(self, weights):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(weights))

    def token_logprobs(self, packed, args):
        inputs = packed.input_ids.flatten()[packed.predicting]
        logprobs = (self.weight[inputs] / args.temperature).log_softmax(1)
        return logprobs.gather(1, packed.targets[:, None])[:, 0]


@pytest.mark.parametrize("case", REFERENCE["pg_learning_step"]["cases"])
@pytest.mark.parametrize("micro_batch_size", [1, 8])
def test_reference_learning_step(monkeypatch, case, micro_batch_size):
    """`update` with plain SGD: the gradient of every step, the weights after it, the mean loss."""
    config = case["config"]
    args = Args(
        num_iterations=config["epochs"],
        epsilon=config["cliprange"],
        temperature=config["temperature"],
        max_completion_length=config["normaliser_generate_max_length"],
        max_grad_norm=1e9,
        micro_batch_size=micro_batch_size,
    )
    completions = []
    for row, attention, size in zip(case["input_ids"], case["attention_mask"], case["prompt_lens"]):
        ids = row[size : sum(attention)]
        completions.append(spiral_rae.Completion(row[:size], ids, [0.0] * len(ids), True))
    model = Bigram(case["W0"])
    optimizer = torch.optim.SGD(model.parameters(), config["sgd_lr"])
    seen = []
    step = optimizer.step

    def spy():
        step()
        seen.append((model.weight.grad.clone(), model.weight.detach().clone()))

    monkeypatch.setattr(optimizer, "step", spy)
    advantages = torch.tensor(case["turn_advantages"])
    metrics = spiral_rae.update(model, None, optimizer, completions, advantages, args)
    expected = list(zip(case["grad_W_per_epoch"], case["W_after_each_epoch"]))
    assert len(seen) == len(expected) == config["epochs"]
    for found, wanted in zip(seen, expected):
        assert_close(found[0], wanted[0], 1e-6)
        assert_close(found[1], wanted[1], 2e-6)
    assert metrics["loss"] == pytest.approx(mean(case["mean_pg_loss_per_epoch"]), abs=1e-6)
    assert (metrics["clip_ratio"] > 0) == (case["pg_clipfrac_all"] > 0)


def test_a_minibatch_has_the_turns_of_its_part(monkeypatch):
    """The first step is that of a batch without the other part's turns; for a part without turns there is none."""
    turns = [spiral_rae.Completion([0, 1], [2, number], [0.0, 0.0], True, part=number) for number in (1, 0, 0)]
    gradients = []
    for rows, parts in ((turns, 3), (turns[1:], 1)):
        model = Bigram(torch.arange(9.0).reshape(3, 3).tolist())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        monkeypatch.setattr(optimizer, "step", lambda model=model: gradients.append(model.weight.grad.clone()))
        advantages = torch.tensor([2.0, 1.0, -3.0])[-len(rows) :]
        args = Args(num_iterations=1, num_minibatches=parts, max_grad_norm=1e9, max_completion_length=4)
        spiral_rae.update(model, None, optimizer, rows, advantages, args)
    assert len(gradients) == 3 and gradients[0].any()
    assert_close(gradients[0], gradients[2])


@pytest.fixture(scope="module")
def model_and_tokenizer():
    return spiral_rae.load_model(ARGS)


def plain_logprobs(model, completion: spiral_rae.Completion) -> torch.Tensor:
    """Of the tokens of a turn, by a pass of its own."""
    ids = torch.tensor(completion.ids)
    logits = model(torch.tensor([completion.prompt + completion.ids])).logits[0]
    logprobs = logits[len(completion.prompt) - 1 : -1].log_softmax(1)
    return logprobs.gather(1, ids[:, None])[:, 0]


@pytest.fixture(scope="module")
def matches(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    found = [training_match(number, ARGS) for number in range(12)]
    play({"policy": model}, tokenizer, found, ARGS)
    return found


def test_rows_are_the_turns_of_the_games(matches, model_and_tokenizer):
    """A fresh game that is stepped through the texts shows the same prompts, and the sampler's
    log-probabilities are those of a plain pass."""
    model, tokenizer = model_and_tokenizer
    for number, match in enumerate(matches):
        game = make_game(match.name)
        game.reset(random.Random(f"1 {number}"))
        assert match.name == ARGS.games[number % 3] and match.players == ("policy", "policy")
        for role, completion in match.turns:
            assert role == game.player
            assert completion.prompt == spiral_rae.encode(tokenizer, game, role, ARGS)
            with torch.no_grad():
                expected = plain_logprobs(model, completion)
            assert_close(completion.logprobs, expected, 1e-4)
            game.step(tokenizer.decode(completion.ids, skip_special_tokens=True))
        assert game.done and game.rewards == match.game.rewards
    assert max(len(match.turns) for match in matches) > 4


def test_a_game_ends_as_a_draw_when_its_prompt_gets_too_long(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    args = replace(ARGS, games=("negotiation",))
    match = training_match(0, replace(args, game_options='{"negotiation": {"handicap": 3}}'))
    longest = len(spiral_rae.encode(tokenizer, match.game, 0, args))
    play({"policy": model}, tokenizer, [match], replace(args, max_prompt_length=longest))
    result = match.result()
    assert len(match.turns) == 1 and result.draw and result.cut and result.rewards == [3, -3]
    match.game.reason, match.game.player, match.players = "forfeit", 1, ("policy", "start")
    assert not match.result().forfeit  # it is not the policy's


def test_evaluation_counts_wins_by_role_and_without_handicap(monkeypatch):
    """Role 0 wins a chip in every game; with the handicap it still has less in the end."""

    def role_0_wins(models, tokenizer, matches, args):
        for match in matches:
            match.game.end(0, 1.0, -1.0, "win")

    monkeypatch.setattr(spiral_rae, "play", role_0_wins)
    options = '{"kuhn": {"handicap": -3}}'
    args = Args(games=("kuhn",), game_options=options, eval_games=2)
    scores, _ = spiral_rae.evaluate({}, None, args, 0, 1)
    for opponent in ("random", "start"):
        assert scores[f"eval/kuhn/{opponent}/first/win"] == 1
        assert scores[f"eval/kuhn/{opponent}/second/loss"] == 1
    assert sum(scores.values()) == 4  # minimax does not play Kuhn poker
    assert spiral_rae.new_match("kuhn", ("policy", "random"), "0", args).game.handicap == -3


def test_rounding_of_a_handicap_makes_no_draw_a_win():
    options = '{"kuhn": {"forfeit_rewards": [-1, -1], "handicap": 0.1}}'
    match = spiral_rae.new_match("kuhn", ("policy", "policy"), "0", Args(games=("kuhn",), game_options=options))
    match.move("nothing legal")
    assert match.game.rewards == [-0.9, -1.1] and match.result().draw


def test_kuhn_read_out(model_and_tokenizer, monkeypatch):
    """Passing always, then betting always: NashConv 2 and 2/3 (OpenSpiel). In the average, who has
    checked folds, because only the first policy checks. One in four samples is illegal."""
    model, tokenizer = model_and_tokenizer
    progress = {"kuhn": []}
    scores = []
    for number in (0, 1):

        def write(sampler, contexts, args, seeds, number=number):
            texts = []
            for row, context in enumerate(map(tokenizer.decode, contexts)):
                actions = ["[fold]", "[call]"] if "[fold]" in context else ["[check]", "[bet]"]
                texts.append(f"\\boxed{{{'[raise]' if row % 4 == 3 else actions[number]}}}")
            ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
            return [spiral_rae.Completion([], row, [], True) for row in ids]

        monkeypatch.setattr(spiral_rae, "generate", write)
        scores.append(evaluate_kuhn(model, tokenizer, Args(eval_samples=4), progress, 0, 1))
    assert [x["eval/kuhn/nash_conv_last"] for x in scores] == pytest.approx([2, 2 / 3])
    average = [0.5] * 3 + [0.0] * 3 + [0.5] * 6
    assert scores[1]["eval/kuhn/nash_conv_average"] == pytest.approx(kuhn_nash_conv(average))
    assert scores[1]["eval/kuhn/illegal"] == pytest.approx(1 / 4)


@pytest.mark.quick
def test_a_process_whose_games_were_all_cut_joins_the_update(monkeypatch):
    model, _ = spiral_rae.load_model(ARGS)
    monkeypatch.setattr(spiral_rae, "gather", lambda items: items or [5])  # another process has a turn of 5 tokens
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    before = [parameter.clone() for parameter in model.parameters()]
    metrics = spiral_rae.update(model, None, optimizer, [], torch.zeros(0), ARGS)
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0
    assert all(map(torch.equal, before, model.parameters()))
