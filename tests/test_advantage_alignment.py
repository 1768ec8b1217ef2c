"""Advantage Alignment and MARSHAL: numbers of the official codes, exact reductions, the games."""

import json
import random
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from algorithms import advantage_alignment
from algorithms.advantage_alignment import (
    Args,
    Completion,
    Result,
    alignment_credits,
    discounted_returns,
    evaluate,
    first_matches,
    first_prompt,
    game_advantages,
    game_metrics,
    leave_one_out,
    length_reward,
    marshal_advantages,
    new_match,
    normalised,
    pack,
    policy_loss,
)
from envs.dilemma import DEFECTS, make_game, memory_one_payoffs

REFERENCE = Path(__file__).parent / "reference"
ALIGNMENT, MARSHAL = (
    json.loads((REFERENCE / f"{name}.json").read_text())["cases"] for name in ("advantage_alignment", "mars")
)
OPTIONS = json.loads((REFERENCE / "advantage_alignment_options.json").read_text())["items"]
CREDITS = "exclude_now discount_t sign by_time first_one mean_at_step whiten whiten_at_step".split()
RELEASED = "reward_norm by_role whiten_rewards advantage_norm whiten_advantages".split()
pytestmark = pytest.mark.quick


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_close(found, expected, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(torch.as_tensor(found).double(), torch.as_tensor(expected).double(), rtol=tolerance, atol=tolerance)


def assert_rows(found: list, expected: list, tolerance: float = 1e-6) -> None:
    assert [len(row) for row in found] == [len(row) for row in expected]
    assert sum(found, []) == pytest.approx(sum(expected, []), abs=tolerance)


def cases(groups: dict, name: str):
    return pytest.mark.parametrize("case", groups[name]["items"], ids=lambda case: case["name"])


def test_every_group_of_the_reference_files_has_a_test():
    assert set(ALIGNMENT) == set("credits leave_one_out returns gae visitation integrated_n_agents separate_loss".split())
    assert set(MARSHAL) == set("turn_masks released_chain unique_values paper_form length_reward".split())


@cases({"all": {"items": ALIGNMENT["credits"]["items"] + OPTIONS}}, "all")
def test_reference_credits(case):
    own, other = tensor(case["own"]), tensor(case["other"])
    options = {name: case[name] for name in CREDITS}
    found = alignment_credits(own, other, beta=case["beta"], gamma=case["gamma"], **options)
    assert_close(found, case["credits"])
    plain = {"beta": 1.0, "gamma": case["gamma"]} | {name: case[name] for name in ("exclude_now", "discount_t")}
    weights = alignment_credits(own, torch.ones_like(own), **plain) - own
    extra = case["gamma"] if case["exclude_now"] else 1.0  # weights were printed before that factor
    assert_close(weights, tensor(case["weights"]) * extra)
    if case["name"] == "beta_zero_is_plain":
        assert torch.equal(found, own)


@cases(ALIGNMENT, "leave_one_out")
def test_reference_leave_one_out(case):
    returns = tensor(case["returns"])
    assert_close(leave_one_out(returns), case["credits"])
    assert_close(returns - leave_one_out(returns), case["baseline"])


def test_equal_returns_have_no_advantage_by_rounding():
    assert not leave_one_out(tensor([[0.1, 0.7]] * 7)).any()


@cases(ALIGNMENT, "returns")
def test_reference_returns(case):
    assert_close(discounted_returns(tensor(case["rewards"]), case["gamma"]), case["returns"])


@cases(ALIGNMENT, "gae")
def test_reference_gae(case):
    """GAE is the return, discounted by gamma * lambda, of what each round brought beyond the values."""
    rewards, values = tensor(case["rewards"]), tensor(case["values"])
    surprises = rewards + case["gamma"] * values[:, 1:] - values[:, :-1]
    assert_close(discounted_returns(surprises, case["gamma"] * case["lam"]), case["advantages"])


@cases(ALIGNMENT, "visitation")
def test_reference_visitation(case):
    credits = tensor(case["credits"])
    found = alignment_credits(credits, credits, beta=0.0, gamma=case["gamma"], discount_time=True)
    assert_close(found, case["result"])


def shaping(advantages: torch.Tensor, player: int) -> torch.Tensor:
    """The term with the other one's advantage of a game (2,T), without discount. -> (T,)"""
    own, other = advantages[player, None], advantages[1 - player, None]
    return (alignment_credits(own, other, beta=1.0, gamma=1.0) - own)[0]


@cases(ALIGNMENT, "integrated_n_agents")
def test_reference_integrated(case):
    """The first paper's code begins with the second round, and divides by the number of rounds before."""
    rows = tensor(case["rows_agent_minor"])
    for number, expected in enumerate(case["terms"]):
        game = rows[number // 2 * 2 :][:2]
        terms = shaping(game, number % 2)[1:] / torch.arange(1, rows.size(1))
        assert_close(terms, expected)


@cases(ALIGNMENT, "separate_loss")
def test_reference_separate_loss(case):
    """Of the second round on, discounted from there; clipped as by policy_loss where it is proximal."""
    logprobs, old = tensor(case["logprobs"]), tensor(case["old_logprobs"])
    for player, expected in enumerate(case["objective_by_agent"]):
        terms = shaping(tensor(case["advantages"]), player)[None, 1:]
        terms = alignment_credits(terms, terms, beta=0.0, gamma=case["gamma"], discount_time=True)[0]
        objective = terms * logprobs[player, 1:]
        if case["proximal"]:
            objective = -policy_loss(logprobs[player, 1:], old[player, 1:], terms, epsilon=case["clip"])[0]
        assert objective.mean().item() == pytest.approx(expected, abs=1e-6)


@cases(MARSHAL, "turn_masks")
def test_reference_turn_masks(case):
    """A turn is a row of the batch, so that learned tokens are what pack predicts. 1 3 begins what the model
    writes, 2 ends it. Where nothing was written the official mask has the start, and there is no row here."""
    ids = case["ids"]
    starts = [at + 2 for at in range(len(ids) - 1) if ids[at : at + 2] == [1, 3]]
    ends = [ids.index(2, start) + 1 for start in starts]
    rows = [Completion(ids[:start], ids[start:end], [0.0] * (end - start), True) for start, end in zip(starts, ends)]
    packed = pack(rows, [[row] for row in range(len(rows))], "cpu")
    learned = packed.position_ids.flatten()[packed.predicting] + 1  # where the predicted tokens stand
    mask = [int(at in learned.tolist()) for at in range(len(ids))]
    if ids[-1] == 1:  # cut off before the turn began
        assert case["learn_mask"][-1] == 1 and mask[-1] == 0
        mask[-1] = 1
        ends = [*ends, len(ids)]
    assert mask == case["learn_mask"]
    rewards = case["turn_rewards"]
    if not case["use_turn_scores"]:
        rewards = [0.0] * (len(rewards) - 1) + [sum(rewards)]
    scores = {end - 1: reward for end, reward in zip(ends, rewards)}
    assert [scores.get(at, 0.0) for at in range(len(ids))] == pytest.approx(case["score_at_token"], abs=1e-6)
    assert sum(case["turn_end"]) == (len(ends) if case["use_turn_scores"] else 1)


@cases(MARSHAL, "released_chain")
def test_reference_released_chain(case):
    rewards = [[turn["reward"] for turn in row] for row in case["turns"]]
    tokens = [[turn["tokens"] for turn in row] for row in case["turns"]]
    settings = {name: case[name] for name in RELEASED}
    found = marshal_advantages(rewards, case["roles"], case["games"], "released", tokens=tokens, **settings)
    assert_rows(found, case["turn_advantages"], 2e-6)


@cases(MARSHAL, "unique_values")
def test_reference_unique_values(case):
    assert_rows(normalised([case["values"]], [0], case["mode"], different=True), [case["result"]], 2e-6)


@cases(MARSHAL, "paper_form")
def test_reference_paper_form(case):
    rewards, roles, games = case["turn_rewards"], case["roles"], case["games"]
    assert_rows(marshal_advantages(rewards, roles, games), case["turn_level_by_role"])
    assert_rows(marshal_advantages(rewards, roles, games, by_role=False), case["turn_level_one_pool"])
    assert_rows([discounted_returns(tensor(row), 1.0).tolist() for row in rewards], case["returns"])
    totals = tensor([sum(row) for row in rewards])
    one_turn = marshal_advantages([[total] for total in totals.tolist()], [0] * len(rewards), ["one"] * len(rewards))
    assert_close(tensor(one_turn)[:, 0] / totals.std(), case["trajectory_grpo"], 1e-5)


@cases(MARSHAL, "length_reward")
def test_reference_length_reward(case):
    options = {name: case[name] for name in ("l_min", "l_max", "alpha")}
    assert length_reward(case["tokens"], **options) == pytest.approx(case["reward"], abs=1e-9)
    assert length_reward(1, **options) == case["alpha"], "the most there is"


# --- Reductions -----------------------------------------------------------------------------------------------------


def some_results(games: int = 5, rounds: int = 4, name: str = "ipd") -> list[Result]:
    generator = random.Random(3)
    turns = [(turn, player, 3) for turn in range(rounds) for player in (0, 1)]
    return [
        Result(name, [[generator.random(), generator.random()] for _ in range(rounds)], [], turns, 0, 0)
        for _ in range(games)
    ]


def test_arms_by_hand():
    """Two games of two rounds, gamma 1: G of player 0 is (3, 2) and (1, 1), of player 1 (1, 1) and (5, 1)."""
    results = [Result("ipd", [[1, 0], [2, 1]], [], [], 0, 0), Result("ipd", [[0, 4], [1, 1]], [], [], 0, 0)]
    args = Args(gamma=1.0, alignment_beta=0.5)
    found = {arm: game_advantages(results, replace(args, advantage=arm)) for arm in ("naive", "alignment", "sum", "no_baseline")}
    assert found["naive"][0].tolist() == [[2, -4], [1, 0]]
    assert found["alignment"][0].tolist() == [[2, -4], [1 + 0.5 * 2 * 0, 0 + 0.5 * -4 * 1]]
    assert found["sum"][0].tolist() == [[-2, -2], [1, 1]]
    assert found["no_baseline"][0].tolist() == [[3, 1], [2 + 0.5 * 3 * 1, 1 + 0.5 * 1 * 2]]


@pytest.mark.parametrize("exclude_now", [True, False])
def test_discounted_credits_written_out(exclude_now):
    gamma, beta = 0.5, 0.3
    results = some_results(2, 3)
    found = game_advantages(results, Args(gamma=gamma, alignment_beta=beta, exclude_now=exclude_now))
    returns = [[[sum(gamma ** (k - t) * game.rewards[k][p] for k in range(t, 3)) for t in range(3)] for p in (0, 1)] for game in results]
    for game in (0, 1):
        gains = [[own - other for own, other in zip(returns[game][p], returns[1 - game][p])] for p in (0, 1)]
        for p, t in product((0, 1), range(3)):
            past = sum(gamma ** (t - k) * gains[p][k] for k in range(t + (not exclude_now)))
            weight = beta * past * (gamma if exclude_now else 1)
            assert found[game][t, p].item() == pytest.approx(gains[p][t] + weight * gains[1 - p][t])


def test_games_of_another_kind_are_not_compared():
    results = some_results(3)
    alone = game_advantages(results, Args())
    together = game_advantages([*results, *some_results(2, 6, "coins")], Args())
    assert all(torch.equal(a, b) for a, b in zip(alone, together))


def test_marshal_counts_rewards_between_own_turns():
    """Players take turns: what comes while the other one writes belongs to the own turn before it."""
    turns = [(0, 0, 2), (1, 1, 2), (2, 0, 2), (3, 1, 2)]
    results = [Result("split", [[1, 0], [2, 0], [4, 0], [8, 16]], [], turns, 0, 0)]
    advantages = game_advantages(results, Args(advantage="marshal"))[0]
    assert advantages[:, 0].tolist() == [1.5, 0, -1.5, 0]  # of 15 and 12
    assert advantages[:, 1].tolist() == [0, 0, 0, 0]  # of 16 and 16
    results[0].rewards[0][1] = 9  # before its first turn
    assert torch.equal(game_advantages(results, Args(advantage="marshal"))[0], advantages)


def test_marshal_as_released_is_given_the_tokens_of_each_turn():
    turns = [(0, 0, 2), (0, 1, 5), (1, 0, 3), (1, 1, 1)]
    results = [Result("ipd", rewards, [], turns, 0, 0) for rewards in ([[1, 0], [2, 1]], [[0, 4], [1, 3]])]
    found = game_advantages(results, Args(advantage="marshal_released"))
    rows, tokens = [[1, 2], [0, 1], [0, 1], [4, 3]], [[2, 3], [5, 1]] * 2
    expected = marshal_advantages(rows, [0, 1, 0, 1], ["ipd"] * 4, "released", tokens=tokens)
    assert [game[:, player].tolist() for game in found for player in (0, 1)] == expected


# --- Games ----------------------------------------------------------------------------------------------------------


def test_exact_payoffs_of_memory_one_policies():
    ipd = make_game("ipd")
    cooperates = dict.fromkeys(DEFECTS, 1.0)
    repeats = {"start": 1.0, "AA": 1.0, "AB": 0.0, "BA": 1.0, "BB": 0.0}
    assert memory_one_payoffs(ipd, cooperates, cooperates) == [3, 3]
    assert memory_one_payoffs(ipd, cooperates, DEFECTS) == [0, 5]
    assert memory_one_payoffs(ipd, repeats, DEFECTS) == pytest.approx([0.9, 1.4])
    generator = random.Random(0)
    first = {name: generator.random() for name in DEFECTS}
    second = {name: generator.random() for name in DEFECTS}
    totals = [0.0, 0.0]
    for _ in range(4000):
        state = ipd.start(generator)
        for _ in range(ipd.rounds):
            chances = [first[state[-1]], second[state[-1][::-1]]] if state else [first["start"], second["start"]]
            state = ipd.play(state, ["[A]" if generator.random() < chance else "[B]" for chance in chances])
            totals = [total + reward for total, reward in zip(totals, ipd.rewards(state))]
    found = [total / 4000 / ipd.rounds for total in totals]
    assert found == pytest.approx(memory_one_payoffs(ipd, first, second), abs=0.05)


def test_read_out_of_answers():
    ipd = make_game("ipd")
    expected = {"[A]": (1.0, [3, 0, 5]), "[B]": (0.0, [1, 1, 1]), None: (0.5, [2.25, 0.5, 3])}
    for action, (chance, payoffs) in expected.items():
        answers = [(situation, action) for situation in DEFECTS]
        found = ipd.read_out(answers)
        assert [found[f"exact/{name}"] for name in ("self", "defect", "defect_gets")] == pytest.approx(payoffs)
        chances = {f"chance_of_A/{situation}": chance for situation in DEFECTS}
        chances["illegal"] = float(action is None)
        assert chances.items() <= found.items()
        assert make_game("ipd", history=2).read_out(answers) == chances, "more situations, so no payoffs"
    found = ipd.read_out([*answers, ("AB", "[A]")])
    assert (found["chance_of_A/AB"], found["illegal"]) == (0.75, 5 / 6)


def test_metrics_of_games():
    turns = [(turn, player, 1) for turn in (0, 1) for player in (0, 1)]
    results = [Result("ipd", [], [[1.0, 2.0], [3.0, 6.0]], turns, 1, 2), Result("ipd", [], [[2.0, 4.0]] * 2, turns, 2, 0)]
    found = {tag.rpartition("/")[2]: value for tag, value in game_metrics(results).items()}
    assert found == pytest.approx({"payoff_0": 2, "payoff_1": 4, "illegal": 3 / 8, "cut": 2 / 10})


def test_evaluation_tells_the_policy_from_the_other(monkeypatch):
    """The policy gets 3 from others in either role, and 4 and 2 from itself."""

    def play(sampler, tokenizer, matches, args):
        for match in matches:
            others = [3.0 if player == "policy" else 1.0 for player in match.players]
            match.points = [[4.0, 2.0] if match.players == ("policy", "policy") else others]
            match.turns = [None] * match.players.count("policy")
            match.illegal, match.cut = 1, len(match.turns)

    monkeypatch.setattr(advantage_alignment, "play", play)
    scores, _ = evaluate(None, None, Args(eval_games=2, eval_opponents=("self", "defect")), 0, 1)
    assert scores == {
        **{"eval/ipd/self/payoff": 3, "eval/ipd/self/illegal": 3 / 4},
        **{"eval/ipd/defect/payoff": 3, "eval/ipd/defect/other": 1, "eval/ipd/defect/illegal": 1},
    }


def test_prompts_of_the_read_out_are_checked(monkeypatch):
    monkeypatch.setattr(advantage_alignment, "encode", lambda _, match, *rest: [0] * (60 if match.state else 10))
    args = Args(max_prompt_length=50)
    with pytest.raises(SystemExit, match="--max-prompt-length: ipd needs 60 tokens or more"):
        first_prompt(None, first_matches(args), args)
    args = replace(args, eval_samples=0)
    assert len(first_prompt(None, first_matches(args), args)) == 10


def test_prisoners_see_the_last_round_from_their_side():
    ipd = make_game("ipd")
    state = ipd.play(ipd.play(ipd.start(None), ["[A]", "[A]"]), ["[A]", "[B]"])
    assert ipd.rewards(state) == [0, 5]
    texts = [ipd.prompt(state, player)[0]["content"] for player in (0, 1)]
    assert "Last round: you A, they B." in texts[0] and "Last round: you B, they A." in texts[1]
    assert "you A, they A" not in texts[0]
    both = make_game("ipd", history=2).prompt(state, 0)[0]["content"]
    assert "you A, they A.\nLast round: you A, they B." in both
    swapped = {"AA": "AA", "AB": "BA", "BA": "AB", "BB": "BB", "start": "start"}
    for name, state in ipd.situations().items():
        assert ipd.prompt(state, 0) == ipd.prompt(ipd.situations()[swapped[name]], 1)


def test_the_prompt_of_coins_names_all_rewards():
    coins = make_game("coins")
    text = coins.prompt(coins.start(random.Random(0)), 0)[0]["content"]
    assert "1 point, or half of it if both take it" in text and "you lose 2" in text


@pytest.mark.parametrize(
    "owner, actions, expected",
    [(0, "take leave", [1, 0]), (0, "take take", [0.5 - 2, 0.5]), (1, "take leave", [1, -2]), (1, "leave leave", [0, 0])],
)
def test_coins(owner, actions, expected):
    coins = make_game("coins")
    state = coins.play(([owner], []), [f"[{action}]" for action in actions.split()])
    assert coins.rewards(state) == expected


def test_the_split_pays_both():
    split = make_game("split")
    state = split.start(random.Random(0))
    assert split.movers(state) == (0,)
    assert split.parse(state, 0, "\\boxed{[Offer: 11 Wood -> 1 Gold]}") is None, "more than it has"
    for player, text in enumerate(["[Offer: 10 Wood -> 10 Gold]", "[Accept]"]):
        prompt = split.prompt(state, player)[0]["content"]
        assert "Your own gain counts" in prompt and "zero-sum" not in prompt
        action = split.parse(state, player, f"\\boxed{{{text}}}")
        state = split.play(state, [action, ""] if player == 0 else ["", action])
        assert split.rewards(state) == ([0, 0] if player == 0 else [100, 100])


@pytest.mark.parametrize("name, action", [("ipd", "[A]"), ("split", "[Offer: 2 Wood -> 1 Gold]")])
def test_thoughts_are_no_action(name, action):
    """Nor is what a thought without an end holds, as of a turn that was cut off."""
    game = make_game(name)
    state = game.start(random.Random(0))
    boxed = f"\\boxed{{{action}}}"
    for text in (action, boxed, f"<think>so</think>{action}", f"<think>not [B]</think>{boxed}"):
        assert game.parse(state, 0, text) == action
    for text in (f"<think>{action}", f"<think>perhaps {boxed}, or", f"<think>{boxed}</think>", f"<think>a</think><think>{boxed}"):
        assert game.parse(state, 0, text) is None


def test_an_illegal_text_costs_something_and_a_random_action_is_played():
    args = Args(illegal_cost=0.7, length_reward=0.5, max_completion_length=21)
    match = new_match("ipd", ("policy", "policy"), "0", args)
    texts = ["nonsense", "\\boxed{[B]}"]
    actions = []
    for player, text in enumerate(texts):
        completion = Completion([], [0] * 16, [0.0] * 16, True)
        completion.text = text
        actions.append(match.written_action(player, completion, args))
    assert actions[0] in ("[A]", "[B]") and actions[1] == "[B]" and match.illegal == 1
    match.end_round(actions)
    first, second = match.points[0]
    assert match.rewards[0] == pytest.approx([first / 5 - 0.7 + 0.25, second / 5 + 0.25])
    assert match.extras == [0, 0]
