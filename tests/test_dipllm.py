"""DipLLM: reference numbers of soft backups, piKL-Hedge and scores, exact properties, labels, the update written out."""

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_grpo import Recorder, flat, relative, tensor

from algorithms import dipllm
from algorithms.dipllm import (
    Args,
    Seat,
    exploitability,
    joint_policy,
    order_weights,
    pikl_hedge,
    regularised_objective,
    state_value,
    sum_of_squares,
    unit_policies,
)
from envs.blotto import Blotto

pytestmark = pytest.mark.quick
CASES = json.loads((Path(__file__).parent / "reference" / "dipllm.json").read_text())["cases"]
TREES = CASES["factorisation"]["items"]
TINY = Args(anchor_temperature=10.0)
ids = lambda case: case["name"]  # noqa: E731


def close(found, expected, absolute: float = 1e-6) -> None:
    torch.testing.assert_close(
        tensor(found) if not torch.is_tensor(found) else found,
        tensor(expected),
        rtol=0,
        atol=absolute,
    )


def product_anchor(case) -> torch.Tensor:
    return joint_policy(tensor(case["anchor"]))


@pytest.mark.parametrize("case", TREES, ids=ids)
def test_reference_backups(case):
    q, anchors = tensor(case["q_joint"]), tensor(case["anchor"])
    for backup in ("soft", "mean"):
        unit_q, policies = unit_policies(q, anchors, case["lam"], backup)
        for entry in case["unit_q"]:
            prefix = tuple(entry["prefix"])
            close(unit_q[len(prefix)][prefix], entry[backup])
        close(joint_policy(policies), case[f"product_of_{backup}"])


@pytest.mark.parametrize("case", TREES, ids=ids)
def test_reference_objectives_and_weights(case):
    q, anchor, lamb = tensor(case["q_joint"]), product_anchor(case), case["lam"]
    value = state_value(q, anchor, lamb)
    close(value, case["value"])
    close((anchor.log() + q / lamb).softmax(0), case["joint"])
    close(order_weights(q, value, lamb), case["weight_by_value"], 1e-5)
    joint = {
        backup: joint_policy(unit_policies(q, tensor(case["anchor"]), lamb, backup)[1])
        for backup in ("soft", "mean")
    }
    close(regularised_objective(joint["soft"], q, anchor, lamb), case["objective_joint"])
    close(regularised_objective(joint["mean"], q, anchor, lamb), case["objective_mean"])
    best = list(itertools.product(range(case["orders"]), repeat=case["units"]))[
        joint["soft"].argmax()
    ]
    assert list(best) == case["argmax_label"]


@pytest.mark.parametrize("case", CASES["pikl_hedge"]["items"], ids=ids)
def test_reference_pikl_hedge(case):
    anchors = tensor(case["anchor_x"]), tensor(case["anchor_y"])
    for iterate in case["iterates"]:
        found = pikl_hedge(tensor(case["payoff"]), *anchors, case["lam"], case["eta"], iterate["t"])
        for name, policy in zip(("x", "y", "x_average", "y_average"), found):
            close(policy, iterate[name], 1e-8)


@pytest.mark.parametrize("case", CASES["weighted_loss"]["items"], ids=ids)
def test_reference_weighted_losses(case):
    """A query of one play: weights by the largest Q, and by the value, under which their mean is 1."""
    q, logprobs = tensor(case["q"]), tensor(case["logprobs"])
    even = torch.full_like(q, 1 / len(q))
    for name, value in (("max", q.max()), ("mean", state_value(q, even, case["lam"]))):
        weights = order_weights(q, value, case["lam"])
        close(weights, case[f"weights_{name}_is_one"])
        losses = dipllm.unit_loss(logprobs[:, None], weights[:, None])
        close(losses.mean(), case[f"loss_{name}"])


@pytest.mark.parametrize("case", CASES["sum_of_squares"]["items"], ids=ids)
def test_reference_scores(case):
    found = {}
    for game in case["games"]:
        shares = dict(zip(game["centres"], sum_of_squares(game["centres"].values())))
        found.setdefault(game["power"], []).append(shares[game["power"]])
    for power, scores in case["score"].items():
        close(found[power], scores)


def random_board(seed: int, widths=(3, 2, 4)):
    """Q, conditional anchors and lambda, with units that have different numbers of orders."""
    torch.manual_seed(seed)
    anchors = [torch.randn(*widths[: unit + 1]).double().softmax(-1) for unit in range(len(widths))]
    return torch.randn(math.prod(widths)).double(), anchors, 0.1 + torch.rand(()).item()


@pytest.mark.parametrize("seed", range(5))
def test_the_product_is_the_joint_policy(seed):
    """Also with anchors that depend on earlier orders; the policy is the best of all, and misses V by lambda * KL."""
    q, anchors, lamb = random_board(seed)
    anchor = joint_policy(anchors)
    best = (anchor.log() + q / lamb).softmax(0)
    _, policies = unit_policies(q, anchors, lamb)
    close(joint_policy(policies), best.tolist(), 1e-12)
    value = state_value(q, anchor, lamb)
    close(regularised_objective(best, q, anchor, lamb), value.item(), 1e-12)
    mean = joint_policy(unit_policies(q, anchors, lamb, "mean")[1])
    hard = torch.nn.functional.one_hot(best.argmax(), len(q)).double()
    other = torch.randn(len(q)).double().softmax(0)
    for policy in (mean, hard, other, anchor):
        divergence = (torch.xlogy(policy, policy) - policy * best.log()).sum()
        close(
            regularised_objective(policy, q, anchor, lamb),
            (value - lamb * divergence).item(),
            1e-10,
        )
        assert regularised_objective(policy, q, anchor, lamb) < value
    shifted = unit_policies(q + 7, anchors, lamb)[1]
    close(joint_policy(shifted), best.tolist(), 1e-12)


def board_search(seed: int, lamb: float, steps: int = 2000) -> dipllm.Position:
    args = replace(TINY, anchor="uniform", lamb=lamb, search_steps=steps, seed=seed, num_boards=0)
    return dipllm.collect(None, FakeTokenizer(), [f"{seed}"], [f"{seed}"], args)[0]


class FakeTokenizer:
    def apply_chat_template(self, messages, **_):
        return {"input_ids": [1, 2, 3]}


@pytest.mark.parametrize("seed", range(2))
def test_pikl_hedge_reaches_its_fixed_point_and_hedge_the_equilibrium(seed):
    """The value of the game is that of a linear program."""
    linprog = pytest.importorskip("scipy.optimize").linprog
    position = board_search(seed, 0.1)
    payoff, (first, second) = position.payoff, position.seats
    x, y = pikl_hedge(payoff, first.anchor, second.anchor, 0.1, 10.0, 4000)[2:]
    close(x, (first.anchor.log() + payoff @ y / 0.1).softmax(0).tolist(), 3e-3)
    x, y = pikl_hedge(payoff, first.anchor, second.anchor, 0.0, 1.0, 20000)[2:]
    rows, columns = payoff.shape
    A_ub = torch.cat([-payoff.T, torch.ones(columns, 1)], 1).numpy()
    program = linprog(
        [0] * rows + [-1],
        A_ub=A_ub,
        b_ub=[0] * columns,
        A_eq=[[1] * rows + [0]],
        b_eq=[1],
        bounds=[(0, None)] * rows + [(None, None)],
    )
    equilibrium = tensor(program.x[:-1])
    assert (equilibrium @ payoff).min() == pytest.approx(-program.fun, abs=1e-9)
    assert (x @ payoff @ y).item() == pytest.approx(-program.fun, abs=0.02)
    assert 0 <= exploitability(payoff, x, y) < 0.02
    pennies, heads = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), torch.tensor([1.0, 0.0])
    assert exploitability(pennies, heads, heads) == 1  # the loser could gain 2, the winner nothing


@pytest.mark.parametrize("number", [27, 26, 9, 1])
def test_policies_of_units_are_shares_of_the_joint_policy(number, monkeypatch):
    """Of all candidates, and of some: legal orders that lead to none of them get 0."""
    whole = board_search(3, 0.2).seats[0]
    torch.manual_seed(number)
    anchors = {prefix: torch.rand(len(orders)).double().softmax(0) for prefix, orders in whole.options.items()}
    kept = sorted(torch.randperm(27)[:number].tolist())
    candidates = [whole.candidates[i] for i in kept]
    prefixes = {candidate[:unit] for candidate in candidates for unit in range(3)}
    seat = replace(whole, candidates=candidates, tree={*candidates, *prefixes}, q=whole.q[kept], unit_anchors=anchors)
    seat.options = {prefix: orders for prefix, orders in whole.options.items() if prefix in prefixes}
    anchor = []  # of a candidate, the product of what each unit does
    for orders in candidates:
        steps = [anchors[orders[:unit]][whole.options[orders[:unit]].index(orders[unit])] for unit in range(3)]
        anchor.append(math.prod(steps))
    anchor = torch.stack(anchor)
    close(dipllm.joint_probabilities(anchors, seat), (anchor / anchor.sum()).tolist())
    joint = (anchor.log() + seat.q / 0.2).softmax(0)
    policies = dipllm.by_prefix(seat, 0.2)
    for prefix, orders in seat.options.items():
        below = [sum(p for p, c in zip(joint, candidates) if c[: len(prefix) + 1] == (*prefix, order)) for order in orders]
        close(policies[prefix], [float(mass / sum(below)) for mass in below])
    close(dipllm.joint_probabilities(policies, seat), joint.tolist())
    generator = random.Random(0)
    assert {dipllm.draw(policies, seat, generator, 0.5) for _ in range(300)} <= set(candidates)
    soft_backup = dipllm.soft_backup
    monkeypatch.setattr(dipllm, "soft_backup", lambda values, anchor, lamb: soft_backup(values, anchor, 2 * lamb))
    for prefix, table in dipllm.by_prefix(seat, 0.1).items():  # one function, for boards of any size
        close(table, policies[prefix].tolist(), 1e-12)


def labels(kind: str, plays: int, **more) -> tuple[Seat, dict]:
    seat = board_search(3, 0.2).seats[0]
    args = replace(TINY, label=kind, num_plays=plays, lamb=0.2, weight_cap=0.0, **more)
    return seat, dipllm.make_labels(seat, args, random.Random(0))


def test_labels():
    seat, found = labels("argmax", 4)
    best = seat.candidates[seat.policy.argmax()]
    assert list(found) == [best[:unit] for unit in range(3)], (
        "the arg-max joint order, cut into units"
    )
    for unit, order in enumerate(best):
        assert found[best[:unit]].tolist() == [
            float(other == order) for other in seat.options[best[:unit]]
        ]
    seat, found = labels("soft", 3)
    close(found[()], seat.unit_policies[()].tolist())
    assert sum(label.sum() for label in found.values()) == pytest.approx(3), (
        "a share of 1 for each unit"
    )
    seat, found = labels("anchor", 3)
    close(found[()], [1 / 3] * 3)


@pytest.mark.parametrize("kind", ["soft", "weighted"])
def test_the_expected_label_is_the_policy_of_the_search(kind):
    """Of the second unit given the first order: a minimum of the loss is the normalised mean label."""
    seat, found = labels(kind, 6000)
    for prefix in [()] + [(order,) for order in seat.options[()]]:
        if found[prefix].sum() > 0.05:
            close(
                found[prefix] / found[prefix].sum(),
                seat.unit_policies[prefix].tolist(),
                1e-9 if kind == "soft" else 0.06,
            )
    assert found[()].sum() == pytest.approx(1, abs=0.1), "weights have a mean of 1 under the anchor"


@pytest.fixture(scope="module")
def loaded():
    args = replace(TINY, lamb=0.2, label="soft")
    model, tokenizer = dipllm.load_model(args)
    return model, tokenizer, args


def test_candidates_that_are_all_joint_orders_keep_their_order(loaded):
    """By all routes E[Q] is the same: unit by unit, and by the joint policy."""
    model, tokenizer, args = loaded
    options = '{"num_units": 2, "num_turns": 1}'
    args = replace(args, game_options=options, max_joint_orders=8, num_samples=400, num_candidates=9, search_steps=50)
    for seat in dipllm.collect(model, tokenizer, ["1"], ["1"], args)[0].seats:
        assert seat.candidates == list(itertools.product(*[seat.options[prefix] for prefix in [(), ("H",)]]))
        close(dipllm.joint_probabilities(seat.unit_policies, seat), seat.policy.tolist(), 1e-12)
        expected = 0.0
        for (first, second), q in zip(seat.candidates, seat.q.tolist()):
            one, two = seat.unit_policies[()], seat.unit_policies[(first,)]
            expected += one[seat.options[()].index(first)] * two[seat.options[(first,)].index(second)] * q
        close(expected, (seat.policy @ seat.q).item(), 1e-12)


@pytest.mark.parametrize("kind", ["weighted", "anchor"])
def test_expected_labels_among_some_candidates(loaded, kind):
    """At each prefix, the marginals of the joint policy that is taught: the search's, or the anchor's."""
    model, tokenizer, args = loaded
    options = '{"num_units": 2, "num_turns": 1}'
    args = replace(args, game_options=options, max_joint_orders=8, num_candidates=5, label=kind, num_plays=10000)
    args = replace(args, weight_cap=0.0, lamb=0.5)
    seat = dipllm.collect(model, tokenizer, ["1"], ["1"], args)[0].seats[1]
    assert len(seat.candidates) == 5 and len(seat.options) > 1
    joint = seat.policy if kind == "weighted" else seat.anchor
    found = dipllm.make_labels(seat, args, random.Random(0))
    for prefix, orders in seat.options.items():
        below = [sum(p for p, c in zip(joint, seat.candidates) if c[: len(prefix) + 1] == (*prefix, o)) for o in orders]
        close(found[prefix], [float(mass) for mass in below], 0.03)


def test_weights_are_capped():
    seat, found = labels("weighted", 200)
    args = replace(TINY, label="weighted", num_plays=200, lamb=0.2, weight_cap=0.5)
    capped = dipllm.make_labels(seat, args, random.Random(0))
    weights = ((seat.q - state_value(seat.q, seat.anchor, 0.2)) / 0.2).exp()
    assert weights.min() < 0.5 < weights.max()
    generator = random.Random(0)
    drawn = [seat.candidates.index(dipllm.draw(seat.unit_anchors, seat, generator)) for _ in range(200)]
    assert found[()].sum() == pytest.approx(weights[drawn].mean().item())
    assert capped[()].sum() == pytest.approx(weights[drawn].clamp(max=0.5).mean().item())


def test_exploring_units_take_any_order():
    seat = board_search(3, 0.2).seats[0]
    best = seat.candidates[7]
    tables = {prefix: torch.tensor([float(order == best[len(prefix)]) for order in orders]) for prefix, orders in seat.options.items()}
    generator = random.Random(0)
    assert {dipllm.draw(tables, seat, generator) for _ in range(50)} == {best}
    drawn = [dipllm.draw(tables, seat, generator, 0.5) for _ in range(3000)]
    for unit in range(3):
        share = sum(orders[unit] == best[unit] for orders in drawn) / 3000
        assert share == pytest.approx(0.5 + 0.5 / 3, abs=0.03)


def test_scores_are_finite_with_a_cold_anchor(loaded):
    """The anchor's probabilities of some joint orders round to 0, those of the model do not."""
    model, tokenizer, args = loaded
    args = replace(args, anchor_temperature=0.01, search_steps=20, game_options='{"num_turns": 1}')
    positions = dipllm.collect(model, tokenizer, ["1"], ["1"], args)
    scores, _ = dipllm.evaluate(model, tokenizer, positions, args)
    assert all(map(math.isfinite, scores.values())), scores


def test_score_is_the_share_against_the_anchor():
    """Summed over all games of one turn, in which the search plays either side."""
    position = board_search(3, 0.05)
    board = Blotto()
    board.reset(random.Random("3"))
    first, second = position.seats
    share = 0.0
    for (i, x), (j, y) in itertools.product(enumerate(first.candidates), enumerate(second.candidates)):
        mine, theirs = sum_of_squares(board.after((x, y)))
        share += first.policy[i] * second.anchor[j] * mine / 2 + first.anchor[i] * second.policy[j] * theirs / 2
    found = dipllm.position_scores(position, first.policy, second.policy, 0.05)["score"]
    assert found == pytest.approx(share.item()) and found > 0.55


def some_queries(loaded) -> list[dipllm.Query]:
    model, tokenizer, args = loaded
    seats = [seat for p in dipllm.collect(model, tokenizer, ["1"], ["1"], args) for seat in p.seats]
    return [
        dipllm.new_query(tokenizer, s, prefix, label)
        for s in seats
        for prefix, label in dipllm.make_labels(s, args, random.Random(0)).items()
    ]


def plain_loss(model, queries, num_units: int) -> torch.Tensor:
    """With a forward pass for each order, and nothing packed."""
    total = 0.0
    for query in queries:
        scores = []
        for order in query.orders:
            ids = torch.tensor([query.prompt + order])
            logprobs = model(ids).logits[0].log_softmax(-1)
            scores.append(
                sum(logprobs[len(query.prompt) - 1 + t, token] for t, token in enumerate(order))
            )
        total = total - (query.label.float() * torch.stack(scores).log_softmax(0)).sum()
    return total / num_units


@pytest.mark.parametrize("tokens", [64, 400])
def test_the_update_is_the_one_written_out(loaded, tokens):
    model, _, args = loaded
    queries = some_queries(loaded)[:9]
    recorder = Recorder(model)
    metrics = dipllm.update(
        model,
        recorder,
        queries,
        5,
        replace(args, micro_batch_tokens=tokens, max_grad_norm=0.0, num_iterations=1),
    )
    model.zero_grad()
    loss = plain_loss(model, queries, 5)
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    expected = flat([parameter.grad for parameter in model.parameters()])
    assert relative(recorder.gradient, expected) < 1e-5
    model.zero_grad()


def test_blotto():
    board = Blotto(num_fields=4, num_units=2, num_turns=2)
    board.reset(random.Random(0))
    board.values, board.places = [5, 1, 2, 3], [[0, 0], [0, 2]]
    assert board.legal_orders(0) == [["H", "- B", "- D"]] * 2
    assert board.after((("H", "- B"), ("H", "- D"))) == (1, 3), (
        "one unit each at A: nobody takes it"
    )
    assert board.after((("H", "H"), ("H", "H"))) == (5, 2)
    before = board.prompt(1, ("H",))
    board.play((("H", "- B"), ("H", "- D")))
    assert board.centres == (1, 3) and not board.done
    assert (
        before[0]["content"]
        == "Turn 1 of 2. A 5 free, B 1 free, C 2 free, D 3 free.\nMine A C, theirs A A.\nOrders: A H. C"
    )
    assert (
        "B 1 theirs" in board.prompt(1, ())[0]["content"]
        and "B 1 mine" in board.prompt(0, ())[0]["content"]
    )
    board.play((("- D", "- C"), ("H", "- C")))
    assert board.done and board.owners == [1, 0, None, 0], "C is left free by one unit each"
    with pytest.raises(ValueError, match="3 to 10 num_fields"):
        Blotto(num_fields=2)
