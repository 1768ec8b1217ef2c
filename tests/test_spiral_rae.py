"""SPIRAL: numbers of the official code, gradient variance of Kuhn poker by enumeration, games as rows, the read-out."""

import io
import itertools
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from algorithms import spiral_rae
from algorithms.spiral_rae import (
    Args,
    Batch,
    Progress,
    RoleBaseline,
    Samples,
    batch_metrics,
    compute_advantages,
    encode,
    evaluate,
    kuhn_readout,
    kuhn_scores,
    load_model,
    load_tokenizer,
    mars_advantages,
    match_options,
    policy_loss,
    rollout,
    update,
)
from envs.game_solvers import (
    DEALS,
    KUHN_INFOSETS,
    kuhn_decision_points,
    kuhn_infoset,
    kuhn_nash_conv,
    kuhn_return,
)
from envs.matches import OPPONENTS
from envs.text_games import make_game

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = json.loads((ROOT / "tests" / "reference" / "spiral_rae.json").read_text())
GAMES = ("tictactoe", "kuhn", "negotiation")
ARGS = Args(num_prompts_per_step=6, num_generations=3, max_completion_length=40, games=GAMES, device="cpu")


def assert_close(actual, expected, tolerance: float = 1e-9) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(torch.as_tensor(actual).detach().double(), expected, rtol=tolerance, atol=tolerance)


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).double()


def games_as_batch(games: list[dict]) -> tuple[Batch, torch.Tensor]:
    """Rows and results of games: {game, movers (who had the turns, in order), rewards, learns}, doubles throughout."""
    rows = [(i, role) for i, game in enumerate(games) for role in game["movers"] if game["learns"][role]]
    match, role = (torch.tensor(column, dtype=torch.long) for column in (zip(*rows) if rows else ((), ())))
    left = torch.tensor([rows[i + 1 :].count(row) for i, row in enumerate(rows)], dtype=torch.long)
    table = [[g["game"], *g["rewards"], *g["learns"], len(g["movers"]), 0, 0] for g in games]
    results = torch.tensor(table, dtype=torch.float64)
    rewards = results[match, 1 + role][:, None]
    info = {"match": match, "role": role, "left": left, "game": results[match, 0]}
    ids = torch.ones(len(rows), 1, dtype=torch.long)
    return Batch([[0, 1]] * len(rows), ids, ids.bool(), torch.zeros(len(rows), 1), rewards, info), results


def reference_games(case: dict) -> list[dict]:
    """Games of the reference, rewards scaled; without the fixed opponent both roles learn."""
    config = case["config"]
    learns = [not config["fixed_opponent"] or role == config["online_model_player"] for role in (0, 1)]
    scale = config["reward_scaling"]
    return [
        {
            "game": 0,
            "movers": [player for player, _ in game["turns_player_ntokens"]],
            "rewards": [scale * reward for reward in game["rewards"]],
            "learns": learns,
        }
        for game in case["games_in_order"]
    ]


class Bigram(torch.nn.Module):
    """The policy of the reference as a language model: logits behind a token are a row of W (the head is W')."""

    def __init__(self, weights: torch.Tensor):
        super().__init__()
        self.head = torch.nn.Linear(*weights.shape, bias=False, dtype=weights.dtype)
        self.head.weight.data.copy_(weights.T)
        self.config, self.device = SimpleNamespace(vocab_size=len(weights)), torch.device("cpu")

    def base_model(self, input_ids, **options):
        hidden = torch.nn.functional.one_hot(input_ids, self.config.vocab_size).to(self.head.weight.dtype)
        return SimpleNamespace(last_hidden_state=hidden)

    def get_output_embeddings(self):
        return self.head


# --- Reference: the baseline -----------------------------------------------------------------------------------------


def test_reference_file_is_whole():
    counts = {"rae_ema": 1, "rae_prepare_trajectories": 4, "rae_order_variant_unstable_baselines": 2}
    assert {name: len(REFERENCE[name]["cases"]) for name in counts} == counts
    assert len(REFERENCE["pg_learning_step"]["cases"]) == 2


ORDERS = {False: "advantage_official_pre_update", True: "advantage_paper_post_update"}


@pytest.mark.parametrize("update_first", ORDERS, ids=lambda x: "paper" if x else "code")
@pytest.mark.parametrize("case", REFERENCE["rae_ema"]["cases"], ids=lambda case: f"decay {case['decay']}")
def test_reference_moving_average(case, update_first):
    baseline, found = RoleBaseline(case["decay"], update_first), []
    for reward, before, after in zip(case["rewards"], case["baseline_before_each"], case["baseline_after_each"]):
        assert baseline.values.get(("kuhn", 1), 0.0) == pytest.approx(before, abs=1e-9)
        found.append(baseline.advantage("kuhn", 1, reward))
        assert baseline.values == {("kuhn", 1): pytest.approx(after, abs=1e-9)}
    assert found == pytest.approx(case[ORDERS[update_first]], abs=1e-9)


CASES = REFERENCE["rae_prepare_trajectories"]["cases"]


@pytest.mark.parametrize("case", CASES, ids=["code", "without filter", "one seat learns", "discount, other decay"])
def test_reference_games_in_order(monkeypatch, case):
    """Advantages of all turns and the averages after each game; and which turns `update` leaves out. The official
    emission order, all turns of player 0 first, is not kept: rows stand in the order they were played."""
    config, games = case["config"], reference_games(case)
    args = Args(games=("kuhn",), gamma=config["gamma"], baseline_decay=config["decay"])
    args = replace(args, skip_equal_groups=config["filter_zero_adv"])
    baseline, found, passed = RoleBaseline(config["decay"]), [], []
    monkeypatch.setattr(spiral_rae, "pack", lambda batch, rows, args: passed.append(rows) or [])
    monkeypatch.setattr(spiral_rae, "apply_gradients", lambda *values: 0.0)
    monkeypatch.setattr(spiral_rae, "gather", lambda values: (values, slice(None)))
    for game, official in zip(games, case["games_in_order"]):
        batch, results = games_as_batch([game])
        advantages = compute_advantages(batch, results, args, baseline)
        found.append(advantages)
        for role in (0, 1):
            after = baseline.values.get(("kuhn", role), 0.0)
            assert after == pytest.approx(official["baseline_after"][role], abs=1e-9)
        model = torch.nn.Linear(1, 1)
        update(model, torch.optim.SGD(model.parameters(), 1.0), batch, advantages, args)
        turns = [i for i, player in enumerate(game["movers"]) if game["learns"][player]]  # numbers of the rows' turns
        emitted = {turns[row]: advantages[row].item() for row in passed.pop()}
        expected = {row["turn"]: row["turn_advantage"] for row in official["emitted"]}
        assert emitted.keys() == expected.keys()
        assert emitted == pytest.approx(expected, abs=1e-6)  # advantages are single precision
        assert all(game["movers"][row["turn"]] == row["player"] for row in official["emitted"])
    whole = RoleBaseline(config["decay"])
    assert torch.equal(compute_advantages(*games_as_batch(games), args, whole), torch.cat(found)), "one batch or many"
    assert whole.values == baseline.values


def test_reference_games_hold_the_cases_that_matter():
    games = [game for game in CASES[0]["games_in_order"]]
    assert any({player for player, _ in game["turns_player_ntokens"]} == {1} for game in games), "a role never moved"
    assert any(not game["emitted"] for game in games), "advantages that are exactly 0"
    assert any(sum(game["rewards"]) != 0 for game in games), "a forfeit"


@pytest.mark.parametrize(
    "case", REFERENCE["rae_order_variant_unstable_baselines"]["cases"], ids=lambda c: str(c["tau"])
)
def test_reference_unstable_baselines(case):
    """The authors' other library: several games, the average moves first."""
    baseline = RoleBaseline(case["alpha"], update_first=True)
    for row in case["rows"]:
        found = baseline.advantage(row["env"], row["player"], row["reward"])
        assert found == pytest.approx(row["advantage"], abs=1e-9)


def test_reference_worked_example():
    """The numbers of the card, which the page repeats."""
    returns = [0, 1, -1.5, 0.5, 1], [0, -1, 0.5, -1.5, -1]
    expected = [0, 1, -1.55, 0.5275, 1.001125], [0, -1, 0.55, -1.4775, -0.903625]
    after = [0, 0.05, -0.0275, -0.001125, 0.048931], [0, -0.05, -0.0225, -0.096375, -0.141556]
    baseline, page = RoleBaseline(), " ".join((ROOT / "algorithms" / "spiral_rae.md").read_text().split())
    for i in range(5):
        for role in (0, 1):
            found = baseline.advantage("kuhn", role, returns[role][i])
            assert found == pytest.approx(expected[role][i], abs=1e-9)
            assert baseline.values["kuhn", role] == pytest.approx(after[role][i], abs=5e-7)
    for numbers in (*returns, *expected):
        assert ", ".join(map(str, numbers)) in page


def test_reference_mars():
    """The paper's formula, from what follows each turn."""
    data = REFERENCE["mars_advantage"]["data"]
    turns, names = data["paper_formula_turn_returns"], data["input"]["group_ids"]
    roles = torch.tensor([int(name[-1]) for name, row in zip(names, turns) for _ in row])
    returns = torch.tensor([x for row in turns for x in row], dtype=torch.float64)
    expected = [x for i in range(len(turns)) for x in data["paper_formula_advantages"][str(i)]]
    assert_close(mars_advantages(returns, roles), expected, 1e-8)
    for role, mean in data["paper_formula_means"].items():
        assert returns[roles == int(role)].mean().item() == pytest.approx(mean, abs=1e-9)
    assert_close(mars_advantages(returns, 7 * roles - 3), expected, 1e-8)  # roles are names


# --- Reference: the learner ------------------------------------------------------------------------------------------

# Not expressed, and not in the file: oat's reinforce_update (no ratio at all) and sample masks between 0 and 1; a mask
# of 0 would be an advantage of 0. The clip fraction of the official code is a mean over samples, here it is one over
# tokens: both are checked, the official one from the log-probabilities.


def learning_step(case: dict, dtype) -> tuple[Batch, Args]:
    ids, attention = torch.tensor(case["input_ids"]), torch.tensor(case["attention_mask"]).bool()
    prompts = [row[:size] for row, size in zip(case["input_ids"], case["prompt_lens"])]
    longest = ids.size(1) - min(case["prompt_lens"])
    completions, mask = torch.zeros(len(ids), longest).long(), torch.zeros(len(ids), longest).bool()
    for i, size in enumerate(case["prompt_lens"]):
        completions[i, : ids.size(1) - size], mask[i, : ids.size(1) - size] = ids[i, size:], attention[i, size:]
    config = case["config"]
    args = Args(num_iterations=config["epochs"], epsilon=config["cliprange"], temperature=config["temperature"])
    args = replace(args, max_completion_length=config["normaliser_generate_max_length"], max_grad_norm=1e9)
    batch = Batch(prompts, completions * mask, mask, torch.zeros(mask.shape, dtype=dtype), torch.zeros(len(ids), 1))
    return batch, args


@pytest.mark.parametrize("micro_batch", [1, 8])
@pytest.mark.parametrize("case", REFERENCE["pg_learning_step"]["cases"], ids=lambda c: f"{c['config']['epochs']} steps")
def test_reference_learning_step(monkeypatch, case, micro_batch):
    """`update` with plain SGD: the gradient of every step, the weights after it, the mean loss."""
    batch, args = learning_step(case, torch.float32)
    args = replace(args, per_device_train_batch_size=micro_batch)
    assert case["loss_masks"] == [1.0] * 4 and not case["config"]["reinforce_update"]
    model = Bigram(torch.tensor(case["W0"]))
    optimizer, seen = torch.optim.SGD(model.parameters(), case["config"]["sgd_lr"]), []
    step = optimizer.step

    def spy():
        step()
        seen.append((model.head.weight.grad.T.clone(), model.head.weight.detach().T.clone()))

    monkeypatch.setattr(optimizer, "step", spy)
    metrics = update(model, optimizer, batch, torch.tensor(case["turn_advantages"]), args)
    assert len(seen) == case["config"]["epochs"]
    for (gradient, weights), *expected in zip(seen, case["grad_W_per_epoch"], case["W_after_each_epoch"]):
        assert_close(gradient, expected[0], 1e-6)
        assert_close(weights, expected[1], 2e-6)
    losses = case["mean_pg_loss_per_epoch"]
    assert metrics["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-6)
    assert (metrics["clip_ratio/region_mean"] > 0) == (case["pg_clipfrac_all"] > 0)


@pytest.mark.parametrize("case", REFERENCE["pg_learning_step"]["cases"], ids=lambda c: f"{c['config']['epochs']} steps")
def test_reference_policy_loss(case):
    """The same by policy_loss alone, in double precision, with the official share of clipped tokens."""
    ids, attention = torch.tensor(case["input_ids"]), torch.tensor(case["attention_mask"]).bool()
    mask = attention[:, 1:] & (torch.arange(1, ids.size(1)) >= torch.tensor(case["prompt_lens"])[:, None])
    weights = torch.tensor(case["W0"], dtype=torch.float64).requires_grad_()
    advantages, old, shares = torch.tensor(case["turn_advantages"], dtype=torch.float64), None, []
    options = {"loss_type": "dr_grpo", "max_completion_length": case["config"]["normaliser_generate_max_length"]}
    for gradient, after in zip(case["grad_W_per_epoch"], case["W_after_each_epoch"]):
        logits = weights[ids[:, :-1]] / case["config"]["temperature"]
        logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        old = logprobs.detach() if old is None else old
        loss, metrics = policy_loss(logprobs, old, advantages, mask, **options)
        (found,) = torch.autograd.grad(loss, weights)
        assert_close(found, gradient, 1e-6)
        rows = [policy_loss(*(x[i : i + 1] for x in (logprobs, old, advantages, mask)))[1] for i in range(len(ids))]
        shares += [row["clip_ratio/region_mean"].item() for row in rows]
        weights = (weights - case["config"]["sgd_lr"] * found).detach().requires_grad_()
        assert_close(weights, after, 2e-6)
    assert sum(shares) / len(shares) == pytest.approx(case["pg_clipfrac_all"], abs=1e-6)


# --- Reference: variance in handicap Kuhn, exactly -------------------------------------------------------------------


def kuhn_games(handicap: float) -> list[tuple[float, dict, list[tuple[str, int]]]]:
    """All 30 games: probability under the uniform policy, the game as in games_as_batch, its decisions."""
    found = []
    for deal, actions in itertools.product(DEALS, ("pp", "bp", "bb", "pbp", "pbb")):
        cards, decisions, movers = "".join("JQK"[card] for card in deal), [], []
        game = make_game("kuhn", cards=(cards,), handicap=handicap)
        game.reset(random.Random(0))
        for letter in actions:
            decisions.append((kuhn_infoset(game), "pb".index(letter)))
            movers.append(game.player)
            game.step(f"\\boxed{{{game.legal_actions()['pb'.index(letter)]}}}")
        assert game.done and game.rewards[0] == kuhn_return(deal, actions) + handicap
        row = {"game": 0, "movers": movers, "rewards": game.rewards, "learns": (1, 1)}
        found.append((0.5 ** len(actions) / 6, row, decisions))
    return found


def gradient_moments(handicap: float, kind: str) -> tuple[torch.Tensor, float, float]:
    """Expected gradient (12,), mean squared norm, trace of the covariance, of a game's gradient through
    compute_advantages and policy_loss. The averages stand still (decay 1) at the roles' exact means."""
    games = kuhn_games(handicap)
    assert sum(weight for weight, *_ in games) == pytest.approx(1.0)
    means = [sum(weight * row["rewards"][role] for weight, row, _ in games) for role in (0, 1)]
    values = {("kuhn", 0): means[0], ("kuhn", 1): means[1], ("kuhn", -1): sum(means) / 2}
    mean, square, args = torch.zeros(12, dtype=torch.float64), 0.0, Args(games=("kuhn",), baseline=kind)
    for weight, row, decisions in games:
        baseline = RoleBaseline(decay=1.0)
        baseline.load_state_dict({"values": values})
        advantages = compute_advantages(*games_as_batch([row]), args, baseline)
        logits = torch.zeros(12, 2, dtype=torch.float64, requires_grad=True)
        logprobs = torch.stack([logits[KUHN_INFOSETS.index(name)].log_softmax(0)[bet] for name, bet in decisions])
        one = torch.ones(len(decisions), 1).bool()
        loss, _ = policy_loss(logprobs[:, None], logprobs.detach()[:, None], advantages, one, loss_type="dr_grpo")
        gradient = -len(decisions) * torch.autograd.grad(loss, logits)[0][:, 1]  # of the logit of betting
        mean, square = mean + weight * gradient, square + weight * gradient.square().sum().item()
    return mean, square, square - mean.square().sum().item()


MOMENTS = REFERENCE["kuhn_exact"]["handicap_kuhn_gradient_moments"]


@pytest.mark.parametrize("kind", ["none", "global", "role"])
@pytest.mark.parametrize("handicap", [0, 3])
def test_reference_gradient_variance_of_handicap_kuhn(handicap, kind):
    """6.43186 without a baseline, 1.18283 with the role's; an average over both roles is 0 and does nothing."""
    name = f"c{handicap}_{'perfect_role_baseline' if kind == 'role' else 'no_baseline'}"
    mean, square, variance = gradient_moments(handicap, kind)
    assert square == pytest.approx(MOMENTS[name]["E_g2"], abs=1e-6)
    assert variance == pytest.approx(MOMENTS[name]["trace_cov"], abs=1e-6)
    assert list(KUHN_INFOSETS) == MOMENTS["expected_gradient_order"]
    assert_close(mean, MOMENTS["expected_gradient"], 1e-7)  # whatever the baseline


def test_cost_of_the_moving_average():
    """Second moment of the advantage: (1 + 0.05 / 1.95) times the variance, however large the mean."""
    generator, baseline = random.Random(0), RoleBaseline()
    returns = [3 + generator.gauss(0, 1) for _ in range(100_000)]
    found = [baseline.advantage("kuhn", 0, reward) for reward in returns][1000:]
    assert sum(x * x for x in found) / len(found) == pytest.approx(1 + 0.05 / 1.95, abs=0.012)


# --- Properties of the advantages ------------------------------------------------------------------------------------


def some_games(count: int = 12, learns=(1, 1), seed: int = 0) -> list[dict]:
    generator = random.Random(seed)
    return [
        {
            "game": generator.randrange(3),
            "movers": [role for role in (0, 1) for _ in range(generator.randrange(1, 4))],
            "rewards": generator.choice([[1, -1], [-1, 1], [0, 0], [-1.5, 0.5], [2, -2]]),
            "learns": learns,
        }
        for _ in range(count)
    ]


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95])
def test_orders_differ_by_a_factor(decay):
    games = games_as_batch(some_games())
    code, paper = (compute_advantages(*games, ARGS, RoleBaseline(decay, first)) for first in (False, True))
    assert_close(paper, decay * code, 1e-6)
    assert code.ne(0).any()


def test_zero_sum_results_have_opposite_averages():
    games = [game | {"rewards": [x, -x]} for x, game in enumerate(some_games())]
    baseline = RoleBaseline()
    compute_advantages(*games_as_batch(games), ARGS, baseline)
    assert {role for _, role in baseline.values} == {0, 1} and len(baseline.values) == 6
    assert all(baseline.values[game, 0] == -baseline.values[game, 1] for game in GAMES)


def by_hand(games: list[dict], kind: str) -> list[float]:
    """Advantages of the turns with a dict of averages."""
    averages, found = {}, []
    for game in games:
        gains = {}
        for role in (0, 1):
            if game["learns"][role]:
                key = {"role": (game["game"], role), "global": game["game"], "none": None}[kind]
                gains[role] = game["rewards"][role] - averages.get(key, 0.0)
                if kind != "none":
                    averages[key] = 0.95 * averages.get(key, 0.0) + 0.05 * game["rewards"][role]
        found += [gains[role] for role in game["movers"] if game["learns"][role]]
    return found


@pytest.mark.parametrize("learns", [(1, 1), (0, 1)], ids=["self", "one seat"])
@pytest.mark.parametrize("kind", ["role", "global", "none"])
def test_baselines_of_mixed_games(kind, learns):
    """Every game and role has its own average, `global` one a game under the role -1, `none` none."""
    games, baseline = some_games(learns=learns), RoleBaseline()
    found = compute_advantages(*games_as_batch(games), replace(ARGS, baseline=kind), baseline)
    assert_close(found, by_hand(games, kind), 1e-6)
    played, roles = {GAMES[game["game"]] for game in games}, [role for role in (0, 1) if learns[role]]
    expected = {"role": {(game, role) for game in played for role in roles}, "none": set()}
    assert baseline.values.keys() == expected.get(kind, {(game, -1) for game in played}) and len(played) == 3


def test_mars_of_mixed_games():
    """The mean over all turns of a role of a game; nothing is kept."""
    batch, results = games_as_batch(some_games())
    baseline = RoleBaseline()
    found = compute_advantages(batch, results, replace(ARGS, baseline="mars"), baseline)
    keys = list(zip(batch.info["game"].tolist(), batch.info["role"].tolist()))
    returns, pools = batch.rewards[:, 0].tolist(), {}
    for key, value in zip(keys, returns):
        pools.setdefault(key, []).append(value)
    assert_close(found, [x - sum(pools[key]) / len(pools[key]) for key, x in zip(keys, returns)], 1e-12)
    assert len(pools) == 6 and baseline.values == {}


def test_discount_counts_the_player_s_own_turns():
    game = {"game": 1, "movers": [0, 1, 0, 0, 1], "rewards": [2, -2], "learns": (1, 1)}
    found = compute_advantages(*games_as_batch([game]), replace(ARGS, gamma=0.5), RoleBaseline())
    assert found.tolist() == [0.5, -1.0, 1.0, 2.0, -2.0]


def test_baseline_survives_a_checkpoint():
    baseline, file = RoleBaseline(), io.BytesIO()
    for game, role, reward in [("kuhn", 0, 1.0), ("kuhn", 1, -2.0), ("tictactoe", 0, 0.5), ("kuhn", -1, 1 / 3)]:
        baseline.advantage(game, role, reward)
    torch.save({"baseline": baseline.state_dict()}, file)
    file.seek(0)
    again = RoleBaseline()
    again.load_state_dict(torch.load(file, weights_only=True)["baseline"])
    assert again.values == baseline.values and len(again.values) == 4
    again.advantage("kuhn", 0, 5.0)
    assert again.values != baseline.values, "a copy"
    assert RoleBaseline(0.9).advantage("kuhn", 0, 1.0) == 1.0


# --- Games as rows ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ARGS)


@pytest.fixture(scope="module")
def model(tokenizer):
    return load_model(ARGS, tokenizer, torch.device("cpu"))


@pytest.fixture
def begun(monkeypatch) -> list[tuple]:
    """(match, seed of its cards) of every match that is begun."""
    found, begin = [], spiral_rae.new_match

    def spy(name, seats, seed, deal, **options):
        found.append((begin(name, seats, seed, deal, **options), deal))
        return found[-1][0]

    monkeypatch.setattr(spiral_rae, "new_match", spy)
    return found


def played_again(match, deal: str, args: Args) -> tuple[list[tuple[int, str, list, str]], list[float]]:
    """(seat, player, messages, text) of every turn, stepping a fresh game through the texts, and its results."""
    game, turns = make_game(match.name, **match_options(match.name, args)), []
    game.reset(random.Random(deal))
    for line in match.texts:
        seat, player, text = re.fullmatch(r"Player ([01]), (\w+): (.*)", line, re.DOTALL).groups()
        assert not game.done and int(seat) == game.player and match.seats[game.player] == player
        turns.append((game.player, player, game.prompt(game.player), text))
        game.step(text)
    assert game.done and game.rewards == match.game.rewards
    return turns, game.rewards


def check_rows(batch: Batch, results: torch.Tensor, begun: list, tokenizer, args: Args) -> None:
    """Every row is a turn of the policy, and every such turn is a row."""
    assert len(results) == len(begun) == args.num_prompts_per_step * args.num_generations
    for number, (match, deal) in enumerate(begun):
        turns, rewards = played_again(match, deal, args)
        gains = [rewards[0] - match.game.handicap, rewards[1] + match.game.handicap]
        learns = [seat == "policy" for seat in match.seats]
        forfeit = match.game.reason in ("forfeit", "rejected")
        expected = [args.games.index(match.name), *rewards, *learns, len(turns), gains[0] == gains[1], forfeit]
        assert_close(results[number], expected, 1e-6)
        rows = (batch.info["match"] == number).nonzero()[:, 0].tolist()
        own = [turn for turn in turns if turn[1] == "policy"]
        assert len(rows) == len(own)
        for i, (row, (seat, _, messages, text)) in enumerate(zip(rows, own)):
            ids = batch.completion_ids[row][batch.mask[row]]
            assert batch.prompts[row] == encode(tokenizer, messages)
            assert tokenizer.decode(ids, skip_special_tokens=True) == text
            assert batch.info["ended"][row] == (ids[-1] == tokenizer.eos_token_id)
            assert batch.info["role"][row] == seat and batch.info["game"][row] == args.games.index(match.name)
            assert batch.info["left"][row] == [turn[0] for turn in own[i + 1 :]].count(seat)
            assert batch.rewards[row].tolist() == pytest.approx([rewards[seat]])
    assert len(batch.prompts) == sum((batch.info["match"] == number).sum() for number in range(len(begun)))


@pytest.fixture(scope="module")
def one_rollout(model, tokenizer):
    """A step of self-play: batch, results, matches, progress, and what was asked of `generate`."""
    begun, asked = [], []
    with pytest.MonkeyPatch.context() as patch:
        begin, sample = spiral_rae.new_match, spiral_rae.generate

        def spy(name, seats, seed, deal, **options):
            begun.append((begin(name, seats, seed, deal, **options), deal))
            return begun[-1][0]

        def count(player, prompts, num_generations, *rest):
            asked.append((len(prompts), num_generations))
            return sample(player, prompts, num_generations, *rest)

        patch.setattr(spiral_rae, "new_match", spy)
        patch.setattr(spiral_rae, "generate", count)
        progress = Progress(problems=10, tokens=5)
        args = replace(ARGS, handicap=3.0)
        batch, results = rollout({"policy": model, **OPPONENTS}, tokenizer, args, progress)
    return batch, results, begun, progress, asked, args


def test_rows_are_the_turns_of_the_games(one_rollout, tokenizer):
    batch, results, begun, progress, _, args = one_rollout
    check_rows(batch, results, begun, tokenizer, args)
    assert progress["problems"] == 16 and results[:, 3:5].all()
    assert {match.game.handicap for match, _ in begun if match.name == "kuhn"} == {3.0}
    assert {match.game.handicap for match, _ in begun if match.name != "kuhn"} == {0.0}
    assert {match.name for match, _ in begun} == set(GAMES) and results[:, 5].max() > 3


def test_games_of_a_start_share_cards_and_first_prompt(one_rollout):
    batch, _, begun, _, asked, args = one_rollout
    first = [batch.prompts[(batch.info["match"] == number).nonzero()[0, 0]] for number in range(18)]
    for start in range(6):
        group = range(3 * start, 3 * start + 3)
        assert len({begun[i][1] for i in group}) == 1 == len({str(first[i]) for i in group})
        assert {begun[i][0].name for i in group} == {GAMES[(10 + start) % 3]}
        assert len({getattr(begun[i][0].game, "deals", None) and begun[i][0].game.deals[0] for i in group}) == 1
    assert len({deal for _, deal in begun}) == 6 and len({match.seed for match, _ in begun}) == 18
    assert asked[0] == (6, 3) and all(copies == 1 for _, copies in asked[1:]), "first prompts are computed once"
    texts = {tuple(match.texts) for match, _ in begun}
    assert len(texts) > 12, "the games of a start differ"


def test_sampled_logprobs_are_those_of_plain_passes(one_rollout, model):
    batch, *_ = one_rollout
    for row in range(0, len(batch.prompts), 5):
        ids = batch.completion_ids[row][batch.mask[row]].tolist()
        with torch.no_grad():
            logits = model(torch.tensor([batch.prompts[row] + ids])).logits[0]
        expected = logits.log_softmax(1)[len(batch.prompts[row]) - 1 : -1].gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert_close(batch.logprobs[row][batch.mask[row]], expected, 1e-4)
        assert (batch.logprobs[row][~batch.mask[row]] == 0).all() and batch.info["entropy"][row] > 0


def test_starts_differ_in_their_cards(model, tokenizer, begun):
    args = replace(ARGS, games=("kuhn",), num_prompts_per_step=12, num_generations=1)
    rollout({"policy": model}, tokenizer, args, Progress(problems=0))
    deals = [match.game.deals[0] for match, _ in begun]
    assert len(deals) == 12 and len(set(deals)) > 2
    rollout({"policy": model}, tokenizer, args, Progress(problems=0))
    assert [match.texts for match, _ in begun[12:]] == [match.texts for match, _ in begun[:12]], "seeded"
    rollout({"policy": model}, tokenizer, args, Progress(problems=12))
    assert [match.game.deals[0] for match, _ in begun[24:]] != deals, "another step, other cards"
    rollout({"policy": model}, tokenizer, replace(args, seed=2), Progress(problems=0))
    assert [match.game.deals[0] for match, _ in begun[36:]] != deals


@pytest.mark.parametrize("opponent, name", [("random", "random"), ("fixed", "start"), ("past", "past")])
def test_opponents_sit_in_alternating_seats_and_are_not_learned_from(model, tokenizer, begun, opponent, name):
    args = replace(ARGS, opponent=opponent, games=("tictactoe", "kuhn"), num_generations=2, num_prompts_per_step=8)
    players = {"policy": model, **OPPONENTS, "start": model, "past": model}
    batch, results = rollout(players, tokenizer, args, Progress(problems=4))
    check_rows(batch, results, begun, tokenizer, args)
    seats = [match.seats for match, _ in begun]
    own = [seat.index("policy") for seat in seats]
    assert own == [start // 2 % 2 for start in range(8) for _ in range(2)], "in turn, in each game"
    assert {seat[1 - side] for seat, side in zip(seats, own)} == {name}
    assert results[:, 3].tolist() == [1 - side for side in own] and results[:, 4].tolist() == own
    assert batch.info["role"].tolist() == [own[number] for number in batch.info["match"].tolist()]
    baseline = RoleBaseline()
    advantages = compute_advantages(batch, results, args, baseline)
    averages, expected = {}, {}
    for number, (match, _) in enumerate(begun):
        key, reward = (match.name, own[number]), match.game.rewards[own[number]]
        expected[number] = reward - averages.get(key, 0.0)
        averages[key] = 0.95 * averages.get(key, 0.0) + 0.05 * reward
    assert_close(advantages, [expected[number] for number in batch.info["match"].tolist()], 1e-6)
    assert baseline.values == pytest.approx(averages) and len(averages) == 4


@pytest.mark.parametrize("baseline", ["role", "global", "none"])
def test_opponents_that_forfeit_before_the_policy_moves(model, tokenizer, baseline, begun):
    """Nothing to learn from: a row of theirs stands for the step, with advantage 0; the average moves."""

    class Silent(torch.nn.Module):
        device, config = model.device, model.config
        generation_config = model.generation_config

        def forward(self, ids, **options):
            out = model(ids, **options)
            out.logits[..., tokenizer.eos_token_id] = 1e4
            return out

    args = replace(ARGS, opponent="fixed", games=("kuhn",), num_prompts_per_step=1, num_generations=2)
    args = replace(args, baseline=baseline, zero_sum_forfeits=True)
    players = {"policy": model, "start": Silent()}
    batch, results = rollout(players, tokenizer, args, Progress(problems=1))  # the policy has seat 1
    assert [match.seats for match, _ in begun] == [("start", "policy")] * 2
    assert results[:, 1:5].tolist() == [[-1, 1, 0, 1]] * 2
    averages = RoleBaseline()
    advantages = compute_advantages(batch, results, args, averages)
    assert len(advantages) == 1 and advantages.eq(0).all()
    expected = {} if baseline == "none" else {("kuhn", 1 if baseline == "role" else -1): pytest.approx(0.0975)}
    assert averages.values == expected
    kept = [parameter.clone() for parameter in model.parameters()]
    metrics = update(model, torch.optim.SGD(model.parameters(), 1.0), batch, advantages, args)
    assert all(torch.equal(a, b) for a, b in zip(kept, model.parameters())) and metrics["grad_norm"] == 0


def test_two_processes_play_the_games_of_one(monkeypatch, one_rollout, model, tokenizer):
    """Rows, results and numbers of the games; together what one process has."""
    whole, results, _, _, _, args = one_rollout
    parts = []
    for rank in (0, 1):
        monkeypatch.setattr(spiral_rae, "rank_and_world_size", lambda found=(rank, 2): found)
        progress = Progress(problems=10)
        parts.append(rollout({"policy": model, **OPPONENTS}, tokenizer, args, progress))
        assert progress["problems"] == 16
    assert torch.equal(torch.cat([part[1] for part in parts]), results)

    def rows(batch):
        columns = [batch.info[name].tolist() for name in ("match", "role", "left", "game")]
        texts = [ids[kept].tolist() for ids, kept in zip(batch.completion_ids, batch.mask)]
        return sorted(zip(*columns, batch.prompts, texts, batch.rewards[:, 0].tolist()), key=str)

    assert rows(whole) == sorted(rows(parts[0][0]) + rows(parts[1][0]), key=str)
    assert parts[1][0].info["match"].min() == 9


def test_batch_metrics_by_hand():
    games = [
        {"game": 0, "movers": [0, 1, 0], "rewards": [1, -1], "learns": (1, 1)},
        {"game": 0, "movers": [0, 1], "rewards": [0.5, -1.5], "learns": (1, 1)},
        {"game": 2, "movers": [0], "rewards": [0, 0], "learns": (1, 1)},
    ]
    batch, results = games_as_batch(games)
    results[0, 7], results[1, 7], results[2, 6] = 0, 1, 1
    batch.mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1], [1, 0], [1, 1]]).bool()
    batch.info |= {"ended": torch.tensor([1, 1, 1, 1, 1, 0]), "entropy": torch.tensor([1.0, 0, 0, 2, 0, 2])}
    advantages, progress = torch.tensor([1.0, -1, 1, 1, -1, -1]), Progress(tokens=7)
    metrics = batch_metrics(batch, results, advantages, replace(ARGS, num_prompts_per_step=3), progress)
    assert metrics["reward"] == pytest.approx((1 - 1 + 1 + 0.5 - 1.5 + 0) / 6)
    assert metrics["num_tokens"] == progress["tokens"] == 17 and metrics["completions/mean_length"] == pytest.approx(
        10 / 6
    )
    assert metrics["completions/max_length"] == 2 and metrics["completions/clipped_ratio"] == pytest.approx(1 / 6)
    assert metrics["entropy"] == pytest.approx(0.5) and metrics["spiral_rae/advantage_std"] == pytest.approx(1.0)
    expected = {"return_0": 0.75, "return_1": -1.25, "turns": 2.5, "draws": 0.0, "forfeits": 0.5}
    assert {name: metrics[f"spiral_rae/tictactoe/{name}"] for name in expected} == expected
    assert metrics["spiral_rae/negotiation/draws"] == 1 and metrics["spiral_rae/negotiation/turns"] == 1
    assert metrics["spiral_rae/kuhn/turns"] != metrics["spiral_rae/kuhn/turns"], "not played: NaN"


# --- The update ------------------------------------------------------------------------------------------------------


def plain_logprobs(model, batch: Batch, row: int) -> torch.Tensor:
    """Log-probabilities of the tokens of a row by a pass of its own."""
    ids = batch.completion_ids[row][batch.mask[row]]
    logits = model(torch.tensor([batch.prompts[row] + ids.tolist()])).logits[0]
    return logits[len(batch.prompts[row]) - 1 : -1].log_softmax(1).gather(1, ids[:, None])[:, 0]


def test_update_gradient_equals_the_naive_one(monkeypatch, one_rollout, model):
    """Tokens of a turn are added up, over max_completion_length; turns are averaged, those without advantage too."""
    batch, results, *_ = one_rollout
    args = replace(ARGS, num_iterations=1)
    advantages = compute_advantages(batch, results, args, RoleBaseline()).float()
    advantages[::4] = 0.0
    rows = len(batch.prompts)
    weights = list(model.parameters())
    expected = [torch.zeros_like(weight) for weight in weights]
    for row in range(rows):
        if advantages[row] != 0:
            loss = -advantages[row] * plain_logprobs(model, batch, row).sum() / args.max_completion_length / rows
            expected = [total + part for total, part in zip(expected, torch.autograd.grad(loss, weights))]
    seen = []
    monkeypatch.setattr(
        spiral_rae,
        "apply_gradients",
        lambda model, *_: seen.append([w.grad.clone() for w in model.parameters()]) or 0.0,
    )
    metrics = update(model, torch.optim.SGD(model.parameters(), 0.0), batch, advantages, args)
    difference = (flat(seen[0]) - flat(expected)).norm() / flat(expected).norm()
    assert difference < 1e-4 and flat(expected).norm() > 1e-3
    lengths = batch.mask.sum(1)
    assert metrics["loss"] == pytest.approx((-advantages * lengths).sum().item() / rows / 40, rel=1e-4, abs=1e-6)
    assert metrics["frac_tokens_trained"] == pytest.approx((lengths[advantages != 0].sum() / lengths.sum()).item())
    assert metrics["sampling/logprob_difference/max"] < 1e-4


def test_only_the_second_step_clips(one_rollout, tokenizer):
    batch, results, *_ = one_rollout
    clipped = []
    for iterations in (1, 2):
        model = load_model(ARGS, tokenizer, torch.device("cpu"))
        args = replace(ARGS, num_iterations=iterations, epsilon=0.01)
        advantages = compute_advantages(batch, results, args, RoleBaseline()).float()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        clipped.append(update(model, optimizer, batch, advantages, args)["clip_ratio/region_mean"])
    assert clipped[0] == 0 and clipped[1] > 0.05


# --- Evaluation ------------------------------------------------------------------------------------------------------


def forfeits(game, generator) -> str:
    """Forfeits; the negotiation takes any text for talk, but not every offer."""
    return "I would rather not say: \\boxed{[Offer: 11 Wood -> 1 Gold]}"


def scores_of(player, games=("tictactoe",), eval_games: int = 40, **options) -> dict[str, float]:
    """Scores of a scripted policy, and checks that hold for every one."""
    args = replace(ARGS, games=games, eval_games=eval_games, **options)
    scores, shown = evaluate({"policy": player, **OPPONENTS, "start": OPPONENTS["random"]}, None, args)
    triples = list(zip(*[iter(scores.items())] * 3))
    for triple in triples:
        assert [tag.split("/")[-1] for tag, _ in triple] == ["win", "draw", "loss"]
        assert len({tag.rsplit("/", 1)[0] for tag, _ in triple}) == 1
        assert sum(value for _, value in triple) == pytest.approx(1.0)
    assert "policy: " in shown or not triples
    return {tag.removeprefix("eval/"): value for tag, value in scores.items()}


def test_who_forfeits_loses_everything():
    scores = scores_of(forfeits, GAMES, 4, handicap=3.0, eval_opponents=("random", "minimax", "start"))
    kinds = [(game, who) for game in GAMES for who in ("random", "minimax", "start")]
    kinds = [kind for kind in kinds if kind[1] != "minimax" or kind[0] == "tictactoe"]
    names = [f"{game}/{who}/{seat}" for game, who in kinds for seat in ("first", "second")]
    assert scores == {f"{name}/{x}": float(x == "loss") for name in names for x in ("win", "draw", "loss")}


def test_minimax_as_the_policy():
    """Draws against itself; against random it never loses, and wins as often as the exact solution says."""
    scores = scores_of(OPPONENTS["minimax"], eval_games=200, eval_opponents=("random", "minimax"))
    assert [scores[f"tictactoe/minimax/{seat}/draw"] for seat in ("first", "second")] == [1.0, 1.0]
    for seat, expected in (("first", 0.96781), ("second", 0.77748)):
        assert scores[f"tictactoe/random/{seat}/loss"] == 0
        error = (expected * (1 - expected) / 200) ** 0.5
        assert scores[f"tictactoe/random/{seat}/win"] == pytest.approx(expected, abs=4 * error)


def test_seats_of_the_evaluation():
    """A policy that can play as player 0 only."""

    def half(game, generator):
        return OPPONENTS["minimax"](game, generator) if game.player == 0 else forfeits(game, generator)

    scores = scores_of(half, eval_opponents=("random",))
    assert scores["tictactoe/random/first/win"] > 0.8 and scores["tictactoe/random/second/loss"] == 1


@pytest.mark.parametrize("processes", [2, 5])
def test_games_of_the_evaluation_are_shared_out(monkeypatch, processes):
    """Each is counted once, also with more processes than games."""
    options = {"eval_opponents": ("random",), "eval_games": 1 if processes == 5 else 6, "games": ("kuhn",)}
    args, total = replace(ARGS, **options), []
    whole, shown = evaluate({"policy": OPPONENTS["random"], **OPPONENTS}, None, args)
    monkeypatch.setattr(spiral_rae, "gather", lambda values: total.append(values) or (values, slice(None)))
    for rank in range(processes):
        monkeypatch.setattr(spiral_rae, "rank_and_world_size", lambda found=(rank, processes): found)
        evaluate({"policy": OPPONENTS["random"], **OPPONENTS}, None, args)
    assert_close(sum(total)[0].flatten() / args.eval_games, list(whole.values()), 1e-6)
    assert shown.count("kuhn:") == 1 and shown.count("Player 0, policy: ") >= 1


def test_opponents_that_do_not_play_the_game():
    """No shares, no game to show: Kuhn poker against minimax only, or against nobody."""
    assert scores_of(forfeits, ("kuhn",), eval_opponents=("minimax",)) == {}
    assert scores_of(forfeits, eval_opponents=()) == {}


def readout_by_hand(model, tokenizer, args: Args, heads: list[list[str | None]]) -> torch.Tensor:
    """Probability of each action and the end behind a head and `\\boxed{[`, one plain pass for each. None: no box."""
    table = torch.zeros(12, 2, dtype=torch.float64)
    for i, (_, game) in enumerate(kuhn_decision_points()):
        prompt = encode(tokenizer, game.prompt(game.player))
        for head in heads[i]:
            for bet, action in enumerate(game.legal_actions()):
                if head is not None:
                    box, tail = "\\boxed{[", f"{action[1:]}}}{tokenizer.eos_token}"
                    given = prompt + tokenizer(head, add_special_tokens=False)["input_ids"]
                    whole = tokenizer(box + tail, add_special_tokens=False)["input_ids"]
                    (begin,) = tokenizer(box, add_special_tokens=False)["input_ids"]
                    assert whole[0] == begin
                    with torch.no_grad():
                        logits = model(torch.tensor([given + whole])).logits[0].double() / args.temperature
                    logprobs = logits.log_softmax(1)[len(given) : -1]  # of the tokens behind the box
                    steps = logprobs.gather(1, torch.tensor(whole[1:])[:, None])
                    table[i, bet] += steps.sum().exp() / len(heads[i])
    return table


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_readout_without_thoughts(model, tokenizer, temperature):
    args = replace(ARGS, eval_thoughts=0, temperature=temperature, handicap=3.0)
    found = kuhn_readout(model, tokenizer, args)
    assert_close(found, readout_by_hand(model, tokenizer, args, [[""]] * 12), 1e-5)
    assert found.shape == (12, 2) and (found.sum(1) <= 1 + 1e-5).all()
    # The model never saw an action without a thought. Legal at the first move: 0.32 to 0.42, at temperature 0.7 0.46 to
    # 0.58; hardly ever in answer to a bet.
    assert (found[:3].sum(1) > 0.15).all() and (found > 0).all()


def test_readout_with_thoughts(monkeypatch, model, tokenizer):
    """Three thoughts at each information set, of which two were changed: one has no box, one has two."""
    args, seen, sample = replace(ARGS, eval_thoughts=3), [], spiral_rae.generate
    changed = {4: "<think>I have Q.</think>[check]", 7: "<think>\\boxed{[bet]} or</think>\\boxed{[call]} it is"}

    def spy(model, prompts, count, args, generators):
        assert len(prompts) == len(generators) == 12 and count == 3
        samples = sample(model, prompts, count, args, generators)
        for row, text in changed.items():
            ids = torch.tensor(tokenizer(text + tokenizer.eos_token)["input_ids"])
            samples.completion_ids[row, : len(ids)], samples.mask[row] = ids, torch.arange(40) < len(ids)
        seen.extend(
            tokenizer.decode(ids[m], skip_special_tokens=True) for ids, m in zip(samples.completion_ids, samples.mask)
        )
        return samples

    monkeypatch.setattr(spiral_rae, "generate", spy)
    found = kuhn_readout(model, tokenizer, args)
    heads = [text[: text.rindex("\\boxed{")] if "\\boxed{" in text else None for text in seen]
    assert heads[4] is None and heads[7] == "<think>\\boxed{[bet]} or</think>" and len(set(heads)) > 20
    expected = readout_by_hand(model, tokenizer, args, [heads[i : i + 3] for i in range(0, 36, 3)])
    assert_close(found, expected, 1e-5)
    assert found[1].sum() < 0.7 and found.sum(1).mean() > 0.75  # 0.85; with 32 thoughts, none changed, 0.93
    for options in ({"max_packed_length": 64}, {"per_device_train_batch_size": 3}):
        seen.clear()
        assert_close(kuhn_readout(model, tokenizer, replace(args, num_generations=3, **options)), expected, 1e-5)


def test_readout_where_no_thought_has_a_box(monkeypatch, model, tokenizer):
    """All output is illegal; the policy counts as uniform, and nothing is NaN."""
    ids = torch.full((24, 4), tokenizer("1", add_special_tokens=False)["input_ids"][0])
    samples = Samples(ids, torch.ones(24, 4).bool(), torch.zeros(24, 4), torch.zeros(24, 4), torch.zeros(24).bool())
    monkeypatch.setattr(spiral_rae, "generate", lambda *values: samples)
    args, progress = replace(ARGS, eval_thoughts=2), Progress(readouts=0, bets=[0.0] * 12)
    assert (kuhn_readout(model, tokenizer, args) == 0).all()
    scores = kuhn_scores(model, tokenizer, args, progress)
    assert scores == {
        "eval/kuhn/nash_conv_last": pytest.approx(11 / 12),
        "eval/kuhn/nash_conv_average": pytest.approx(11 / 12),
        "eval/kuhn/illegal": 1.0,
        "eval/kuhn/thoughts": 24,
    }
    assert progress == {"readouts": 1, "bets": [0.5] * 12}


POLICIES = REFERENCE["kuhn_openspiel"]["policies"]


def test_reference_scores_of_known_policies(monkeypatch):
    """NashConv of each, whatever the share of illegal output, and of the mean of all read out so far."""
    progress, sums = Progress(readouts=0, bets=[0.0] * 12), torch.zeros(12, dtype=torch.float64)
    for count, (name, policy) in enumerate(POLICIES.items(), 1):
        bets = torch.tensor([policy["p_bet"][infoset] for infoset in KUHN_INFOSETS])
        table = torch.stack([1 - bets, bets], 1) * torch.linspace(0.5, 1, 12)[:, None]
        monkeypatch.setattr(spiral_rae, "kuhn_readout", lambda *_, table=table: table)
        progress = Progress(json.loads(json.dumps(progress)))  # as if the run had been resumed
        scores, sums = kuhn_scores(None, None, ARGS, progress), sums + bets
        assert scores["eval/kuhn/nash_conv_last"] == pytest.approx(policy["nash_conv"], abs=1e-5), name
        average = kuhn_nash_conv((sums / count).tolist())
        assert scores["eval/kuhn/nash_conv_average"] == pytest.approx(average, abs=1e-5)
        assert scores["eval/kuhn/illegal"] == pytest.approx(0.25, abs=1e-6)
        assert scores["eval/kuhn/thoughts"] == 12 * ARGS.eval_thoughts and progress["readouts"] == count
    assert len(POLICIES) == 18
