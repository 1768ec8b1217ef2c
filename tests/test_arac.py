"""ARAC: attention, pointer, networks and losses against released code, closed forms, one update by hand, replay."""

import copy
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from algorithms.arac import (
    Args,
    Attention,
    GraphCritic,
    GraphPolicy,
    ReplayBuffer,
    SoftActorCritic,
    actor_loss,
    coefficient_loss,
    critic_targets,
    evaluate,
    forward_kl,
    joint_sums,
    linear_schedule,
    make_graph_game,
    play_from_starts,
    play_piece,
    soft_value,
    temperature_loss,
    update_target,
)
from envs.graph_games import GraphPursuit
from envs.graphs import make_graph

CASES = {case["case"]: case for case in json.loads((Path(__file__).parent / "reference/arac.json").read_text())}
SAC = CASES["sac_losses_with_reference_term"]
CLOSED = CASES["regularised_policy_closed_form"]
FLAGS = {"embed_dim": 8, "num_heads": 2, "num_envs": 8, "batch_size": 32, "buffer_size": 400, "horizon": 5}
FLAGS |= {"learning_starts": 10**6, "device": "cpu"}
DUEL = {"env_id": "graph_confrontation", "graph": "grid_3x3"}


def close(found, expected, tolerance=1e-6):
    found = torch.as_tensor(found).detach().double()
    torch.testing.assert_close(found, torch.as_tensor(expected).double(), atol=tolerance, rtol=tolerance)


def made(play: int = 0, seed: int = 0, **flags) -> tuple[SoftActorCritic, object, Args]:
    """A small learner, its games, and flags; `play`: steps of all games that it has in its replay."""
    args = Args(**FLAGS | flags)
    torch.manual_seed(seed)
    game = make_graph_game(args, args.num_envs, args.seed, "cpu")
    learner = SoftActorCritic(game, args, 0, "cpu")
    if play:
        play_piece([learner], game, args, 0, play * args.num_envs)
    return learner, game, args


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


# --- Output of other people's code -----------------------------------------------------------------------------------


def linear_weight(name: str, values: torch.Tensor) -> torch.Tensor:
    """Weights of nn.Linear (d,d) from the released (heads,d,d/heads) or, for w_out, (heads,d/heads,d)."""
    return values.flatten(0, 1).T if name == "w_out" else values.transpose(1, 2).flatten(0, 1)


def released_attention() -> Attention:
    attention = Attention(4, 2)
    for name, values in CASES["multi_head_attention"]["params"].items():
        getattr(attention, name[2:]).weight.data = linear_weight(name, torch.tensor(values))
    return attention


def test_reference_attention_with_padded_memory():
    """EPG_code, model.py MultiHeadAttention; our masks are (Q,M), so that one sample is taken at a time."""
    case, attention = CASES["multi_head_attention"], released_attention()
    for sample in range(2):
        query, memory = (torch.tensor(case[name])[sample][None] for name in ("query", "memory"))
        mask = -1e8 * torch.tensor(case["key_padding_mask"])[sample].float().expand(3, 5)
        close(attention(query, memory, mask)[0], case["output"][sample], 1e-5)
        assert not torch.allclose(attention(query, memory)[0], torch.tensor(case["output"][sample]), atol=0.01)


def test_reference_attention_with_a_fully_masked_row():
    case, attention = CASES["multi_head_attention"], released_attention()
    x, mask = torch.tensor(case["self_x"]), -1e8 * torch.tensor(case["self_attn_mask"])[0].float()
    found = attention(x, x, mask)
    close(found, case["self_output"], 1e-5)
    close(found[0, 3], attention.out(attention.value(x).mean(1))[0], 1e-5)  # uniform attention


class Pointer(GraphPolicy):
    """A policy whose agents see and whose neighbours are what a case says."""

    def encode(self, positions, graph):
        return None, torch.randn_like(graph.query), graph.query

    def neighbours(self, nodes, positions, graph):
        return graph.keys


def test_reference_pointer():
    """SingleHeadAttention of the same file. The layer before the pointer passes on what the agents see."""
    case = CASES["pointer_log_policy"]
    policy = Pointer(3, 1, 4, 2, 1, 16)
    policy.current.weight.data, policy.current.bias.data = torch.eye(4, 8), torch.zeros(4)
    for name, layer in (("w_query", policy.query), ("w_key", policy.key)):
        layer.weight.data = torch.tensor(case["params"][name]).T
    inputs = {name: torch.tensor(case[name]) for name in ("query", "keys", "mask")}
    graph = SimpleNamespace(query=inputs["query"], keys=inputs["keys"][:, None], slot_mask=inputs["mask"][:, 0] > 0)
    found = policy(torch.arange(3)[:, None], graph)
    close(found, case["log_prob"], 1e-5)


def released_parameters(fill: dict) -> dict[str, torch.Tensor]:
    """Our parameters by name from the rule of the case, which counts scalars in the released order and shapes."""
    found, first = {}, 0
    ours = {"initial_embedding": "embed", "current_embedding": "current", "action_embedding": "action"}
    ours |= {"linear_layer": "out", "feedForward": "ff", "multiHeadAttention": "attention", "encoder.layers": "encoder"}
    ours |= {"decoder.layers.0": "decoder", "pointer.": ""}
    for name, shape in fill["order"]:
        k = torch.arange(first, first := first + math.prod(shape), dtype=torch.float64)
        values = (fill["scale"] * torch.sin(fill["phase"] + 1.7 * k + 0.01 * k * k)).view(shape).float()
        last = name.rpartition(".")[2]
        for theirs, other in ours.items():
            name = name.replace(theirs, other)
        if last.startswith("w_"):
            name = name.replace(last, last[2:] + ".weight")
            values = linear_weight(last, values) if values.dim() == 3 else values.T
        if "q_values" not in name:  # is counted, but not used by the released code
            found[name] = values
    return found


def fill(network: nn.Module, rule: dict) -> nn.Module:
    """Every parameter but the layer norms and the agents' numbers, which the released code does not have."""
    missing, unexpected = network.load_state_dict(released_parameters(rule), strict=False)
    assert not unexpected and all("norm" in name or name == "number" for name in missing), (missing, unexpected)
    assert network.number.abs().max() == 0
    return network


def test_reference_networks():
    """PolicyNet and QNet on a path of 5 nodes. The case's sixth, padded node is left out: nobody attends to it."""
    case, graph = CASES["policy_and_q_network_forward"], make_graph("path_5", num_slots=3)
    sizes, positions = (3, 2, 8, 8, 6, 512), torch.tensor([[4, *case["current_nodes"]]])  # evader, pursuers 0 and 1
    close(graph.features(positions)[0], case["node_inputs"][:5])
    assert torch.equal(graph.slot_mask[[0, 2]].int(), torch.tensor(case["neighbour_mask"]))
    log_probs = fill(GraphPolicy(*sizes), case["policy_fill"])(positions, graph)
    close(log_probs[0, 0], case["log_prob_pursuer0"][0], 1e-5)
    close(log_probs[0, 1], case["log_prob_pursuer1"][0], 1e-5)
    critic = fill(GraphCritic(3, *sizes), case["q_fill"])
    rows = critic.action.register_forward_pre_hook(as_released)
    q = critic(positions, graph)
    # Theirs flatten as x * K + y with x of the first block; actions are a_0 + K a_1: blocks and agents are swapped
    close(q[0, 0, :, None] + q[0, 1], torch.tensor(case["q_values_joint"][0]).view(3, 3), 1e-5)
    close(joint_sums(q.flip(1)), case["q_values_joint"], 1e-5)
    rows.remove()
    inputs, (nodes, own, seen) = [], critic.encode(positions, graph)
    critic.action.register_forward_pre_hook(lambda layer, given: inputs.extend(given))
    critic(positions, graph)
    for agent, slots in enumerate(case["neighbour_slots"]):
        for number, node in enumerate(slots):
            close(inputs[0][0, agent, number], torch.cat([seen[0, agent], own[0, agent], nodes[0, node]]), 0)


def as_released(layer: nn.Module, inputs: tuple) -> tuple:
    """Rows (B,N,K,3d) as QNet has them: row j, a neighbour of agent j // K, has the other features of agent j % N.

    Theirs repeat the agents' features with repeat(1, K, 1), which counts agents first, over neighbours that count slots
    first. Ours give every neighbour those of its own agent.
    """
    (rows,) = inputs
    B, N, K, width = rows.shape
    agents = rows[:, :, 0, : 2 * width // 3].repeat(1, K, 1).view(B, N, K, -1)
    return (torch.cat([agents, rows[..., 2 * width // 3 :]], -1),)


def sac(name: str) -> torch.Tensor:
    return torch.tensor(SAC[name], dtype=torch.float64)


def policy_of(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (N,B,K) as in the case and log-probabilities (B,N,K)."""
    logits = sac(name).requires_grad_()
    return logits, logits.transpose(0, 1).log_softmax(-1)


def test_reference_losses():
    """EPG_code, driver.py main(): policy loss with and without reference, its gradient, targets, temperature."""
    alpha, beta, gamma = math.exp(SAC["config"]["log_alpha"]), SAC["config"]["beta"], SAC["config"]["gamma"]
    reference, (logits, log_probs) = torch.tensor(SAC["reference_actions"]), policy_of("policy_logits")
    close(-forward_kl(log_probs, reference), SAC["reference_log_prob"])
    critics = sac("q1"), sac("q2")
    close(actor_loss(log_probs, *critics, alpha, beta, None), SAC["sac_policy_loss_without_reference"])
    loss = actor_loss(log_probs, *critics, alpha, beta, reference)
    close(loss, SAC["policy_loss"])
    close(torch.autograd.grad(loss, logits, retain_graph=True)[0], SAC["policy_logit_grad"])

    after = policy_of("next_policy_logits")[1], sac("next_target_q1"), sac("next_target_q2"), alpha
    close(soft_value(*after), SAC["soft_value_next"])
    targets = critic_targets(sac("rewards"), torch.tensor(SAC["dones"]) > 0, *after, gamma)
    close(targets, SAC["target_q"])
    joint = torch.tensor(SAC["joint_action_index"])[:, None]
    for critic, loss in zip(critics, (SAC["q1_loss"], SAC["q2_loss"])):
        close((critic.gather(1, joint)[:, 0] - targets).square().mean(), loss)

    entropy = -(log_probs.exp() * log_probs).sum((1, 2))
    close(-entropy.mean(), SAC["negative_entropy"])
    target = SAC["config"]["entropy_target"]
    close(0.05 * 2 * math.log(3), target)
    log_alpha = torch.tensor(SAC["config"]["log_alpha"], dtype=torch.float64, requires_grad=True)
    loss = temperature_loss(log_alpha, entropy, target)
    close(loss, SAC["alpha_loss"])
    loss.backward()
    close(log_alpha.grad, SAC["alpha_loss_grad_wrt_log_alpha"])
    assert logits.grad is None  # the policy does not learn from the temperature


def test_reference_numbers_of_joint_actions():
    """a_0 + K a_1; and in general the sum of a_i K^i, here by counting."""
    for name, wanted in (("actions", "joint_action_index"), ("reference_actions", "joint_reference_index")):
        chosen = torch.nn.functional.one_hot(torch.tensor(SAC[name]), 3)  # (B,N,K) a joint action has the sum 2
        assert joint_sums(chosen).argmax(1).tolist() == SAC[wanted] and (joint_sums(chosen).amax(1) == 2).all()
    values = torch.randn(5, 3, 4)
    table = joint_sums(values)
    assert table.shape == (5, 64)
    for number in range(64):
        digits = number % 4, number // 4 % 4, number // 16
        close(table[:, number], sum(values[:, i, a] for i, a in enumerate(digits)))


# --- Expectations over agents and over joint actions -----------------------------------------------------------------


def drawn(seed: int, N: int = 2, K: int = 3, B: int = 4):
    """Log-probabilities and two additive critics (B,N,K), some slots padded."""
    generator = torch.Generator().manual_seed(seed)
    logits, q1, q2 = (2 * torch.randn(B, N, K, generator=generator, dtype=torch.float64) for _ in range(3))
    logits[0, 0, K - 1] = -1e8
    return logits.log_softmax(-1), q1, q2


def joint_value(log_probs, q1, q2, alpha) -> torch.Tensor:
    return soft_value(log_probs, joint_sums(q1), joint_sums(q2), alpha)


@pytest.mark.parametrize("N", [1, 2, 3])
def test_sums_over_agents_are_exact_where_one_critic_is_below(N):
    for seed in range(50):
        log_probs, q1, _ = drawn(seed, N)
        above = q1 + torch.rand(4, N, 1, dtype=torch.float64)
        for first, second in ((q1, q1), (q1, above), (above, q1)):
            close(soft_value(log_probs, first, second, 0.3), joint_value(log_probs, q1, q1, 0.3), 1e-9)
            close(joint_value(log_probs, first, second, 0.3), joint_value(log_probs, q1, q1, 0.3), 1e-9)


def test_sums_over_agents_are_never_below_the_joint_form():
    """min_k E[Q_k] >= E[min_k Q_k], 200 random cases; mostly they differ."""
    gaps = []
    for seed in range(200):
        log_probs, q1, q2 = drawn(seed)
        gaps.append(soft_value(log_probs, q1, q2, 0.3) - joint_value(log_probs, q1, q2, 0.3))
        expectations = [(log_probs.exp() * q).sum((1, 2)) for q in (q1, q2)]
        entropy = -(log_probs.exp() * log_probs).sum((1, 2))
        close(soft_value(log_probs, q1, q2, 0.3), torch.minimum(*expectations) + 0.3 * entropy, 1e-9)
    gaps = torch.stack(gaps)
    assert gaps.min() > -1e-9 and (gaps > 0.01).double().mean() > 0.5


def test_padded_slots_do_not_matter():
    log_probs, q1, q2 = drawn(0)
    worse = q1.clone()
    worse[0, 0, 2] = -1e4
    for value in (soft_value, joint_value):
        close(value(log_probs, worse, q2, 0.3), value(log_probs, q1, q2, 0.3), 1e-9)
        assert value(log_probs, q1, q2, 0.3).isfinite().all()


@pytest.mark.parametrize("joint", [False, True])
def test_gradient_of_the_actor_loss(joint):
    """Finite differences, with a temperature and a weight that are tensors too."""
    torch.manual_seed(3)
    logits = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    _, q1, q2 = drawn(1)
    critics = (joint_sums(q1), joint_sums(q2)) if joint else (q1, q2)
    reference = torch.randint(3, (4, 2))

    def loss(x, alpha, beta):
        return actor_loss(x.log_softmax(-1), *critics, alpha, beta, reference)

    scalars = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.3, 0.7))
    assert torch.autograd.gradcheck(loss, (logits, *scalars))


def test_divergence_from_the_reference():
    log_probs = torch.tensor([[[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]]).log()
    close(forward_kl(log_probs, torch.tensor([[0, 2]])), [-math.log(0.5 * 0.7)])
    close(forward_kl(log_probs, torch.tensor([[1, 0]])), [-math.log(0.25 * 0.1)])


# --- Regularised policies: closed forms, and what a fixed weight costs -----------------------------------------------


@pytest.mark.parametrize("case", CLOSED["cases"], ids=lambda case: f"{case['alpha']}-{case['beta']}")
def test_reference_regularised_policy(case):
    """A softmax policy of one agent trained on actor_loss, weighted by the chances of the reference's actions."""
    q, rho = torch.tensor(CLOSED["Q"]).double(), torch.tensor(CLOSED["rho"]).double()
    logits = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=200, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        rows = zip(logits.log_softmax(1)[:, None, None], q[:, None, None], rho)  # (1,1,K), (1,1,K), (K,)
        loss = sum(
            chance * actor_loss(log_probs, values, values, case["alpha"], case["beta"], torch.tensor([[action]]))
            for log_probs, values, chances in rows
            for action, chance in enumerate(chances)
        )
        loss.backward()
        return loss

    optimizer.step(closure)
    close(logits.softmax(1), case["forward_kl_pi"], 1e-3)


@pytest.mark.parametrize("case", CLOSED["cases"], ids=lambda case: f"{case['alpha']}-{case['beta']}")
def test_reference_reverse_divergence(case):
    """A check of the file: softmax((Q + beta log rho) / (alpha + beta)). The script trains on the other divergence."""
    q, rho = torch.tensor(CLOSED["Q"]).double(), torch.tensor(CLOSED["rho"]).double()
    weight, wanted = case["alpha"] + case["beta"], case["reverse_kl"]
    scores = (q + case["beta"] * rho.log()) / weight
    probs = scores.softmax(1)
    close(probs, wanted["pi"], 1e-4)
    close(weight * scores.logsumexp(1), wanted["value"], 1e-4)
    close(-(probs * scores.log_softmax(1)).sum(1), wanted["entropy"], 1e-4)
    close((probs * (scores.log_softmax(1) - rho.log())).sum(1), wanted["kl_pi_rho"], 1e-4)


def pulled_policy(q, reference, alpha: float, beta):
    """argmax over joint policies of E[Q] + alpha H + beta log pi(reference), by bisection. (..,S,A), (S,) -> log pi

    All actions but the reference's share what it leaves as a softmax of Q / alpha does; its log odds x solve
    Q_ref - alpha logsumexp(Q_others / alpha) - alpha x + beta (1 + exp(-x)) = 0.
    """
    taken = torch.nn.functional.one_hot(reference, q.size(-1)).bool().expand_as(q)  # (..,S,A)
    others = (q / alpha).masked_fill(taken, -math.inf)
    gain = q[taken].view(q.shape[:-1]) - alpha * others.logsumexp(-1)  # (..,S)
    low, high = torch.full_like(gain, -1e4), torch.full_like(gain, 1e5)
    for _ in range(50):
        x = (low + high) / 2
        rising = gain - alpha * x + beta * (1 + (-x).exp()) > 0
        low, high = torch.where(rising, x, low), torch.where(rising, high, x)
    log_sigmoid = torch.nn.functional.logsigmoid
    return torch.where(taken, log_sigmoid(x)[..., None], others.log_softmax(-1) + log_sigmoid(-x)[..., None])


def test_what_a_fixed_weight_costs():
    """Exact soft policy iteration on an 8-cycle, with the divergence that the script trains on.

    The numbers are ours: the case fixed_divergence_weight_sweep_cycle8 has them for the reverse divergence. A joint
    action counts as the action of one agent with nine slots. As in the script the values do not contain the divergence.
    """
    alpha, gamma, betas = 0.001, 0.99, torch.tensor([0, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 10], dtype=torch.float64)
    game = GraphPursuit(make_graph("cycle_8"), 1, 0, "cpu", start="same")
    states = torch.cartesian_prod(*[torch.arange(8)] * 3)  # (512,3) pursuers, evader
    evaders = game.graph.slots[states[:, 2:], game.scripted("maxdist", states, 1)]  # (512,1)
    moves = game.graph.slots[states[:, :2]]  # (512,2,3)
    joint = torch.cartesian_prod(torch.arange(3), torch.arange(3))  # (9,2)
    after = [moves[:, 0, joint[:, 0]], moves[:, 1, joint[:, 1]], evaders.expand(-1, 9)]  # (512,9) each
    following = after[0] * 64 + after[1] * 8 + after[2]
    reference = game.scripted("shortest", states) @ torch.tensor([3, 1])  # (512,) in the order of `joint`
    captured = game.outcome(states)[1]  # (512,)
    dones = captured[following]  # (512,9)
    values, weight = torch.zeros(8, 512, dtype=torch.float64), betas[:, None]
    for _ in range(150):
        q = dones + gamma * values[:, following] * ~dones  # (8,512,9)
        log_probs = pulled_policy(q, reference, alpha, weight)
        before, rows = values, [x.flatten(0, 1)[:, None] for x in (log_probs, q, q)]  # (8*512,1,9) each
        values = soft_value(*rows, alpha).view(8, 512)
    assert (values - before).abs().max() < 0.01
    # The policy is the optimum of the loss that the script descends
    logits = log_probs.clone().requires_grad_()
    losses = [
        actor_loss(x[:, None].log_softmax(-1), y[:, None], y[:, None], alpha, beta, reference[:, None])
        for x, y, beta in zip(logits, q, betas)
    ]
    assert torch.autograd.grad(sum(losses), logits)[0].abs().max() < 1e-8
    chances = torch.zeros(8, 512, dtype=torch.float64)
    starts = game.starts() @ torch.tensor([64, 8, 1])
    chances[:, starts] = 1 / len(starts)
    for _ in range(10):
        moved = (chances * ~captured)[..., None] * log_probs.exp()  # (8,512,9)
        chances = (chances * captured).index_add(1, following.flatten(), moved.flatten(1))
    success = (chances * captured).sum(1)
    close(success, [1, 1, 0.9918, 0.8604, 0.4749, 0.1623, 0, 0], 1e-4)
    assert (success.diff() < 0).all() and success[0] >= 0.99 and success[-1] < 0.3


# --- Networks --------------------------------------------------------------------------------------------------------


def test_two_agents_on_one_node_can_part():
    """They start with the same policy, of which one gradient step makes two, thanks to their numbers."""
    learner, game, args = made(play=6)
    together = torch.tensor([[0, 4, 4], [1, 6, 6]])
    before = learner.policy(together, game.graph)
    assert torch.equal(before[:, 0], before[:, 1])
    learner.gradient_step(learner.buffer.sample(32), game.graph, 0.2)
    after = learner.policy(together, game.graph)
    assert (after[:, 0] - after[:, 1]).abs().amax((1, 2) if after.dim() == 4 else 1).min() > 1e-6
    learner.policy.number.data.zero_()
    after = learner.policy(together, game.graph)
    assert torch.equal(after[:, 0], after[:, 1])


def test_agents_see_their_neighbours_only_but_all_nodes_at_the_end():
    """Through one layer of the encoder a node knows its neighbours; the decoder looks at every node."""
    graph = make_graph("path_5")
    policy = GraphPolicy(3, 2, 8, 2, 1, 32)
    seen = []
    policy.encoder[0].register_forward_hook(lambda *inputs: seen.append(inputs[-1]))
    nodes = torch.randn(1, 5, 8)
    other = nodes.clone()
    other[0, 4] += torch.randn(8)
    mask = graph.edge_mask * -1e8
    for x in (nodes, other):
        policy.encoder[0](x, x, mask)
    changed = (seen[0] - seen[1]).abs().amax(2)[0] > 1e-6
    assert changed.tolist() == [False, False, False, True, True]
    positions = torch.tensor([[4, 0, 2], [3, 0, 2]])
    hidden, own, decoded = policy.encode(positions, graph)
    close(own, torch.stack([hidden[0, [0, 2]], hidden[1, [0, 2]]]))
    kept = policy.neighbours(hidden, positions, graph)
    assert kept.shape == (2, 2, 3, 8)
    close(kept[1, 1], hidden[1, [1, 2, 3]])
    close(kept[1, 0, :2], hidden[1, [0, 1]])
    moved = policy.decoder(own, hidden + torch.tensor([0, 0, 0, 0, 1.0])[:, None] * torch.randn(8))
    assert (moved - decoded).abs().amax(2).min() > 1e-6


def test_removed_players_are_no_part_of_the_learning():
    """One slot of probability 1: log-probability, entropy, divergence 0, and no gradient, for all who are removed."""
    learner, game, _ = made(**DUEL)
    positions = torch.tensor([[0, 8, 3, 4], [0, -1, -1, 4], [0, 8, -1, -1], [-1, -1, 3, -1]])
    reference = game.scripted("shortest", torch.cat(positions.split(2, 1)[::-1], 1))
    gone = positions[:, 2:] < 0
    assert (reference[gone] == 0).all()
    log_probs = learner.policy(positions, game.graph)
    close(log_probs[gone][:, 0], torch.zeros(4), 0)
    assert (log_probs[gone][:, 1:] < -1e7).all() and log_probs.isfinite().all()
    entropy = -(log_probs.exp() * log_probs).sum(2)
    assert (entropy[gone] == 0).all() and (entropy[~gone] > 0).all()
    assert forward_kl(log_probs, reference)[2] == 0 and (forward_kl(log_probs, reference)[[0, 1, 3]] > 0).all()
    q = [critic(positions, game.graph) for critic in learner.critics]
    assert all(x.isfinite().all() for x in q)
    only = log_probs[2:3]
    loss = actor_loss(only, q[0][2:3].detach(), q[1][2:3].detach(), 0.1, 0.2, reference[2:3])
    for gradient in torch.autograd.grad(loss, learner.policy.parameters(), retain_graph=True, allow_unused=True):
        assert gradient is None or (gradient == 0).all()
    through = torch.autograd.grad(actor_loss(log_probs, *(x.detach() for x in q), 0.1, 0.2, reference), log_probs)[0]
    assert through.isfinite().all()
    batch = {"positions": positions, "actions": reference, "reference": reference, "next_positions": positions}
    metrics = learner.gradient_step(batch | {"rewards": torch.ones(4), "dones": gone[:, 0]}, game.graph, 0.2)
    assert all(value.isfinite() for value in metrics.values()) and weights(learner.policy).isfinite().all()


def test_actions_are_samples_or_the_likeliest():
    learner, game, args = made(num_envs=20_000, graph="path_4", start="independent")
    game.positions = torch.tensor([[0, 2, 3]]).repeat(20_000, 1)
    with torch.no_grad():
        learner.policy.query.weight.mul_(3)
        log_probs = learner.policy(game.view(game.positions, 0), game.graph)[0]  # (N,K)
    torch.manual_seed(0)
    actions = learner.act(game, 0)
    counts = torch.stack([torch.bincount(column, minlength=3) for column in actions.T])
    close(counts / 20_000, log_probs.exp(), 0.02)
    assert counts[0, 2] == 0, "node 0 has two slots"
    joint = (counts / 20_000)[0, 0] * (counts / 20_000)[1, 0]
    assert ((actions == 0).all(1).double().mean() - joint).abs() < 0.02, "agents act independently"
    assert torch.equal(learner.act(game, 0, True), log_probs.argmax(1).expand(20_000, 2))
    assert (learner.act(game, 0) != actions).any()


# --- One update ------------------------------------------------------------------------------------------------------


def loss_in_loops(learner: SoftActorCritic, batch: dict, graph, beta: float, args: Args) -> dict:
    """Losses of a batch, row by row and joint action by joint action."""
    alpha, K, rows = learner.log_alpha.detach().exp(), graph.num_slots, len(batch["rewards"])
    log_probs = learner.policy(batch["positions"], graph)
    q = [critic(batch["positions"], graph) for critic in learner.critics]

    def value(log_probs, q1, q2):
        pairs = [(a, b) for a in range(K) for b in range(K)]
        chances = [(log_probs[0, a] + log_probs[1, b]).exp() for a, b in pairs]
        sums = [[x[0, a] + x[1, b] for a, b in pairs] for x in (q1, q2)]
        entropy = -sum(p * (log_probs[0, a] + log_probs[1, b]) for p, (a, b) in zip(chances, pairs))
        if args.joint_table:
            return sum(p * torch.minimum(x, y) for p, x, y in zip(chances, *sums)) + alpha * entropy
        return torch.minimum(*(sum(p * x for p, x in zip(chances, row)) for row in sums)) + alpha * entropy

    with torch.no_grad():
        later = learner.policy(batch["next_positions"], graph)
        after = [critic(batch["next_positions"], graph) for critic in learner.targets]
        targets = [
            batch["rewards"][i] + (0 if batch["dones"][i] else args.gamma * value(later[i], after[0][i], after[1][i]))
            for i in range(rows)
        ]
    errors, policy, divergence, entropy = [], [], [], []
    for i in range(rows):
        a, b = batch["actions"][i]
        errors += [(x[i, 0, a] + x[i, 1, b] - targets[i]) ** 2 for x in q]
        policy.append(-value(log_probs[i], *(x[i].detach() for x in q)))
        a, b = batch["reference"][i]
        divergence.append(-log_probs[i, 0, a] - log_probs[i, 1, b])
        entropy.append(-(log_probs[i].exp() * log_probs[i]).sum())
    policy, divergence, entropy = (sum(x) / rows for x in (policy, divergence, entropy))
    losses = {"losses/qf_loss": sum(errors) / rows, "losses/entropy": entropy.detach()}
    if learner.reference == "none":
        return losses | {"losses/actor_loss": policy}
    return losses | {"losses/actor_loss": policy + beta * divergence, "train/arac/divergence": divergence.detach()}


@pytest.mark.parametrize(
    "flags",
    [{}, {"joint_table": True}, {"beta_mode": "none"}, {"max_grad_norm": 0.01, "gamma": 0.8}, DUEL],
    ids=["sums", "joint", "none", "clipped", "duel"],
)
def test_update_is_what_the_losses_say(flags):
    """Metrics and gradients of gradient_step against plain loops; what Adam moves, and by how much."""
    learner, game, args = made(play=20, seed=4, **{"alpha": 0.05, "beta": 0.3} | flags)
    graph, batch = game.graph, learner.buffer.sample(12)
    batch["dones"][:3], batch["rewards"][:3] = True, 1.0
    for target in learner.targets.parameters():  # targets that are not the critics, or their use would not show
        target.data += 0.05 * torch.randn_like(target)
    twin = copy.deepcopy(learner)
    found = learner.gradient_step(batch, graph, 0.3)
    expected = loss_in_loops(twin, batch, graph, 0.3, args)
    assert ("train/arac/divergence" in found) == ("train/arac/divergence" in expected)
    for tag, value in expected.items():
        close(found[tag], value, 1e-4)
    (expected["losses/actor_loss"] + expected["losses/qf_loss"]).backward()
    for name, norm in (("policy", "losses/actor_grad_norm"), ("critics", "losses/qf_grad_norm")):
        close(found[norm], nn.utils.clip_grad_norm_(getattr(twin, name).parameters(), args.max_grad_norm), 1e-3)
        for ours, theirs in zip(getattr(learner, name).parameters(), getattr(twin, name).parameters()):
            close(ours.grad, torch.zeros_like(theirs) if theirs.grad is None else theirs.grad, 1e-4)
    assert all(target.grad is None for target in learner.targets.parameters())
    close(found["train/arac/alpha"], 0.05)
    uniform = 2 * math.log(graph.num_slots)
    close(learner.log_alpha.grad, found["losses/entropy"] - 0.05 * uniform, 1e-5)
    close(twin.log_alpha - learner.log_alpha, 1e-3 * learner.log_alpha.grad.sign(), 1e-6)
    if args.beta_mode == "dual":
        close(learner.log_beta.grad, uniform - found["train/arac/divergence"], 1e-5)
    else:
        assert learner.log_beta.grad is None and learner.log_beta == twin.log_beta
    rates = [group["lr"] for group in learner.optimizer.param_groups]
    assert rates == [args.learning_rate, args.alpha_lr, args.beta_lr]
    if not flags:  # Adam's first step is a rate's length for every weight that has a gradient
        for name in ("policy", "critics"):
            moved = (weights(getattr(learner, name)) - weights(getattr(twin, name))).abs()
            assert 0.99 < moved.median() / 3e-4 < 1.01 and moved.max() < 3.1e-4


def test_without_autotune_the_temperature_stays():
    learner, game, args = made(play=4, autotune=False, alpha=0.02)
    for _ in range(3):
        learner.gradient_step(learner.buffer.sample(16), game.graph, 0.2)
    close(learner.log_alpha.exp(), 0.02)


@pytest.mark.parametrize("target, sign", [(0.999, 1), (0.001, -1)])
def test_temperature_seeks_its_entropy(target, sign):
    """Higher while the policy is too sure, lower while it is too random."""
    learner, game, args = made(play=4, target_entropy=target)
    before = learner.log_alpha.item()
    for _ in range(5):
        learner.gradient_step(learner.buffer.sample(16), game.graph, 0.2)
    assert sign * (learner.log_alpha.item() - before) > 3e-3


def test_first_temperature_pays_for_winning():
    """Half of what makes never winning as good as winning at once: alpha N ln K / (1 - gamma) = 1/2."""
    for flags, uniform in (({}, 2 * math.log(3)), ({"num_agents": 3, "graph": "grid_3x3"}, 3 * math.log(5))):
        learner, _, args = made(**flags)
        close(learner.uniform, uniform)
        close(learner.log_alpha.exp() * uniform / (1 - args.gamma), 0.5, 1e-5)
    close(made(alpha=0.3)[0].log_alpha.exp(), 0.3)


def test_targets_are_copied_after_so_many_updates():
    learner, game, args = made(play=4, target_network_frequency=3, tau=0.5)
    assert torch.equal(weights(learner.targets), weights(learner.critics))
    assert not torch.equal(weights(learner.critics[0]), weights(learner.critics[1])), "two critics, not one twice"
    for number in range(1, 7):
        before = weights(learner.targets)
        learner.gradient_step(learner.buffer.sample(16), game.graph, 0.2)
        expected = 0.5 * (before + weights(learner.critics)) if number % 3 == 0 else before
        close(weights(learner.targets), expected, 1e-6)
        assert learner.updates == number
    online, target = nn.Linear(2, 2), nn.Linear(2, 2)
    before = target.weight.clone()
    update_target(target, online, 0.25)
    close(target.weight, 0.75 * before + 0.25 * online.weight)


@pytest.mark.parametrize("rate, counts", [(1.0, [1, 1, 1]), (0.4, [0, 0, 1, 0, 1]), (2.5, [2, 3])])
def test_updates_that_are_due(rate, counts):
    learner, game, args = made(play=4, updates_per_step=rate)
    for count in counts:
        before = learner.updates
        metrics = learner.learn(game.graph, 0)
        assert learner.updates - before == count and bool(metrics) == (count > 0)


def test_metrics_of_several_updates_are_means():
    learner, game, args = made(play=4, updates_per_step=3.0)
    steps, original = [], learner.gradient_step
    learner.gradient_step = lambda *inputs: steps.append(original(*inputs)) or steps[-1]
    metrics = learner.learn(game.graph, 0)
    for tag in steps[0]:
        close(metrics[tag], sum(step[tag] for step in steps) / 3, 1e-5)
    assert metrics.keys() == steps[0].keys() | {"train/arac/beta"}
    close(metrics["train/arac/beta"], learner.log_beta.exp())


# --- The weight of the divergence ------------------------------------------------------------------------------------


def steps_of_beta(learner, game, count: int) -> list[float]:
    found = []
    for _ in range(count):
        learner.gradient_step(learner.buffer.sample(32), game.graph, learner.beta(0))
        found.append(float(learner.beta(0)))
    return found


def test_dual_weight_never_exceeds_its_first_value():
    """However long the divergence is above its target."""
    learner, game, args = made(play=6, beta=0.2, beta_target=1e-3, beta_lr=0.1)
    close(learner.beta(0), 0.2)
    found = steps_of_beta(learner, game, 30)
    assert learner.log_beta.grad < 0 and max(found) <= 0.2 * (1 + 1e-6) and found == pytest.approx([0.2] * 30)


def test_dual_weight_falls_below_the_target_and_rises_above_it():
    learner, game, args = made(play=6, beta=0.2, beta_target=5.0, beta_lr=0.1)
    close(learner.beta(0), 0.2)
    falling = steps_of_beta(learner, game, 15)
    assert all(x > y for x, y in zip([0.2, *falling], falling)) and falling[-1] < 0.1
    learner.args.beta_target, learner.optimizer.state = 1e-3, type(learner.optimizer.state)(dict)
    rising = steps_of_beta(learner, game, 8)
    assert all(x < y for x, y in zip([falling[-1], *rising], rising)) and rising[-1] < 0.2


def test_gradient_of_the_weight():
    """log_beta moves against target - divergence; the policy does not learn from it."""
    log_beta = torch.tensor(-1.6, requires_grad=True)
    kl = torch.tensor([1.0, 2.0, 6.0], requires_grad=True)
    for target in (2.0, 4.0):
        log_beta.grad = None
        coefficient_loss(log_beta, kl, target).backward()
        close(log_beta.grad, target - 3.0)
    assert kl.grad is None


def test_schedules_of_the_weight():
    learner, game, _ = made(play=4, beta_mode="performance", beta=0.4)
    for success, expected in ((0.0, 0.4), (0.5, 0.1), (0.9, 0.004), (1.0, 0.0)):
        learner.success.fill_(success)
        close(learner.beta(123), expected)
    learner, _, _ = made(beta_mode="linear", beta=0.4, total_timesteps=1000)
    assert [learner.beta(step) for step in (0, 125, 250, 500, 501, 1000)] == pytest.approx([0.4, 0.3, 0.2, 0, 0, 0])
    learner, game, _ = made(play=4, beta_mode="fixed", beta=0.4, total_timesteps=1000)
    assert steps_of_beta(learner, game, 3) == pytest.approx([0.4] * 3)
    assert [learner.beta(step) for step in (0, 250, 500, 1000)] == pytest.approx([0.4] * 4)
    assert [linear_schedule(1, 3, 10, t) for t in (0, 5, 10, 20)] == [1, 2, 3, 3]


def test_weight_of_now_is_what_the_policy_is_pulled_with():
    """The linear schedule at half time is an update without reference; in the middle it is another."""
    found = {}
    for mode, step in (("linear", 500), ("linear", 250), ("none", 250), ("fixed", 250)):
        learner, game, _ = made(play=6, beta_mode=mode, beta=5.0, total_timesteps=1000)
        learner.buffer.columns["reference"].zero_()
        torch.manual_seed(7)
        learner.learn(game.graph, step)
        found[mode, step] = learner.policy.query.weight.grad.clone()
    close(found["linear", 500], found["none", 250], 1e-5)
    gaps = [(found[key] - found["none", 250]).norm().item() for key in (("linear", 250), ("fixed", 250))]
    assert 0.01 < gaps[0] and gaps[0] == pytest.approx(gaps[1] / 2, rel=0.01)


@pytest.mark.parametrize("flags, used", [({"beta_mode": "none"}, False), ({"reference": "none"}, False), ({}, True)])
def test_control_never_uses_the_reference(flags, used):
    """The same policy to the bit, whatever the reference's actions are; otherwise they matter."""
    found = []
    for slot in (0, 2):
        learner, game, _ = made(play=6, **flags)
        learner.buffer.columns["reference"].fill_(slot)
        torch.manual_seed(7)
        for _ in range(3):
            learner.learn(game.graph, 0)
        found.append(torch.cat([weights(learner.policy), weights(learner.critics), learner.log_alpha.detach()[None]]))
    assert torch.equal(*found) == (not used)


def test_learned_evaders_have_no_reference():
    args = Args(**FLAGS, evader="learned")
    game = make_graph_game(args, 8, 1, "cpu")
    sides = [SoftActorCritic(game, args, side, "cpu") for side in (0, 1)]
    assert [side.reference for side in sides] == ["shortest", "none"]
    assert [len(side.policy.number) for side in sides] == [2, 1]


# --- Play and replay -------------------------------------------------------------------------------------------------


def rows_of(buffer: ReplayBuffer) -> dict:
    return {name: column[: buffer.count] for name, column in buffer.columns.items()}


@pytest.mark.parametrize(
    "flags",
    [
        {"evader": "learned"},
        {"reference": "dp"},
        {"reference": "noisy"},
        {"asynchronous": True, "evader": "dp", "start": "independent"},
        DUEL | {"opponent": "self", "reference": "shortest"},
        DUEL | {"opponent": "random", "reference": "noisy"},
    ],
    ids=lambda flags: " ".join(map(str, flags.values())),
)
def test_replay_holds_what_both_sides_saw(flags):
    """The games once more with the actions that were kept: views, rewards' signs, ends that are no cut-offs."""
    args = Args(**FLAGS | {"horizon": 3} | flags)
    torch.manual_seed(0)
    game, again = (make_graph_game(args, 8, 1, "cpu") for _ in range(2))
    one = SoftActorCritic(game, args, 0, "cpu")
    sides = [one, SoftActorCritic(game, args, 1, "cpu")] if args.evader == "learned" else [one]
    sides = [one, one] if args.opponent == "self" else sides
    metrics = play_piece(sides, game, args, 0, 12 * 8)
    assert not metrics.keys() - {"charts/success", "charts/episodic_length"}, "nothing is learned before its time"
    seen, won, ended, cut, average = [rows_of(side.buffer) for side in dict.fromkeys(sides)], 0, 0, 0, 0.0
    size = len(sides) * 8 if args.opponent == "self" else 8  # rows that a step adds to a buffer
    for step in range(12):
        before, kept = again.positions.clone(), []
        for side in range(len(sides)):
            rows, first = (seen[0], step * size + side * 8) if args.opponent == "self" else (seen[side], step * 8)
            kept.append({name: column[first : first + 8] for name, column in rows.items()})
        rewards, terminated, truncated, last = again.step(*(rows["actions"] for rows in kept))
        learning = [side for side in range(len(sides)) if not_evader(args, side)]
        wanted = [again.scripted(args.reference, before, side) for side in learning]  # after the step: noise is drawn
        for side, rows in enumerate(kept):
            own = again.teams[side]
            mine, theirs = before.split(again.teams, 1)[:: 1 - 2 * side]
            assert torch.equal(rows["positions"], torch.cat([theirs, mine], 1)) and rows["positions"].size(1) > own
            mine, theirs = last.split(again.teams, 1)[:: 1 - 2 * side]
            assert torch.equal(rows["next_positions"], torch.cat([theirs, mine], 1))
            assert torch.equal(rows["rewards"], (1 - 2 * side) * rewards)
            assert rows["dones"].dtype == torch.bool and torch.equal(rows["dones"], terminated)
            assert torch.equal(rows["reference"], wanted[side] if not_evader(args, side) else rows["actions"])
        won, ended = won + (rewards > 0).sum(), ended + (terminated | truncated).sum()
        cut += truncated.sum()
        if now := (terminated | truncated).sum():
            average += min(0.01 * now, 1) * ((rewards > 0).sum() / now - average)
    assert cut > 0 and ended > cut, "some games end, others are cut off"
    close(metrics["charts/success"], won / ended)
    close(metrics["charts/episodic_length"], 96 / ended)
    close(one.success, average)
    if len(set(sides)) > 1:
        assert 0 < sides[1].success < 0.5 or (seen[1]["rewards"] <= 0).all()
        assert torch.equal(seen[1]["rewards"], -seen[0]["rewards"]) and seen[0]["rewards"].sum() > 0


def not_evader(args: Args, side: int) -> bool:
    return not (args.evader == "learned" and side)


def test_success_is_a_moving_average():
    learner, game, _ = made(beta_mode="none")
    rows = torch.zeros(8, 3, dtype=torch.long), torch.zeros(8, 2, dtype=torch.long)

    def remember(won: int, lost: int, side: int = 0):
        rewards = torch.tensor([1.0] * won + [0.0] * (8 - won))
        truncated = torch.arange(8) >= 8 - lost
        learner.remember(game, side, *rows, (rewards, rewards > 0, truncated, rows[0]))
        return learner.success.item()

    assert remember(0, 0) == 0
    assert remember(2, 6) == pytest.approx(0.08 * 0.25)
    assert remember(0, 8) == pytest.approx(0.92 * 0.02)
    assert remember(3, 0) == pytest.approx(0.97 * 0.0184 + 0.03)
    assert remember(8, 0, side=1) == pytest.approx(0.97 * 0.0184 + 0.03), "the other team's games of self-play"


def test_replay_keeps_the_newest_and_samples_evenly():
    buffer = ReplayBuffer(10, "cpu")
    for start in range(0, 24, 4):
        buffer.add(values=torch.arange(start, start + 4))
    assert sorted(buffer.columns["values"].tolist()) == list(range(14, 24))
    torch.manual_seed(0)
    counts = torch.bincount(buffer.sample(10_000)["values"], minlength=24)
    assert (counts[:14] == 0).all() and counts[14:].min() > 850
    other = ReplayBuffer(10, "cpu")
    other.load_state_dict(buffer.state_dict())
    assert other.count == 24 and torch.equal(other.columns["values"], buffer.columns["values"])
    other.add(values=torch.arange(24, 28))
    assert sorted(other.columns["values"].tolist()) == list(range(18, 28))
    part = ReplayBuffer(10, "cpu")
    part.add(values=torch.arange(4))
    assert part.state_dict()["columns"]["values"].tolist() == [0, 1, 2, 3]
    assert part.sample(1000)["values"].unique().tolist() == [0, 1, 2, 3]


# --- Evaluation ------------------------------------------------------------------------------------------------------


def scripted(kind: str):
    return lambda game: game.scripted(kind, game.positions, 0)


def test_reference_scores_of_scripts():
    """Two pursuers on an 8-cycle: shortest paths fail from one node, perfect play takes 3 steps (our exact table)."""
    args = Args(horizon=128)
    results, steps, _ = play_from_starts(args, "cpu", scripted("shortest"))
    assert len(results) == 40 and results.sum() == 0 and (steps == 128).all()
    results, steps, path = play_from_starts(args, "cpu", scripted("dp"))
    assert results.tolist() == [1.0] * 40 and steps.mean() == 3
    assert len(path) == steps[0] + 1 and path[0].tolist() == [0, 0, 2]
    apart = Args(horizon=128, start="independent")
    results, steps, _ = play_from_starts(apart, "cpu", scripted("shortest"))
    assert results.mean().item() == pytest.approx(0.59, abs=0.005)
    assert steps[results > 0].mean().item() == pytest.approx(2.10, abs=0.01)
    found = {}
    for evader in ("learned", "dp", "maxdist"):
        found[evader] = play_from_starts(Args(graph="grid_4x4", horizon=40, evader=evader), "cpu", scripted("shortest"))
    assert torch.equal(found["learned"][1], found["dp"][1]), "a learned evader is replaced by perfect play"
    assert not torch.equal(found["learned"][1], found["maxdist"][1])


def test_evaluation_plays_at_most_so_many_games_and_leaves_random_numbers_alone():
    for most, played in ((40, 40), (39, 20), (13, 10), (1, 1)):
        assert len(play_from_starts(Args(eval_episodes=most), "cpu", scripted("dp"))[0]) == played
    learner, game, args = made()
    before = torch.get_rng_state()
    first = evaluate(learner, args, "cpu")
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert evaluate(learner, args, "cpu") == first


class Scripted:
    """A learner that plays a script, another when it samples."""

    def act(self, game, side, greedy=False):
        return game.scripted("dp" if greedy else "shortest", game.positions, side)


def test_evaluation_scores_likeliest_and_sampled_actions_and_the_reference():
    scores = evaluate(Scripted(), Args(reference="dp", horizon=16), "cpu")
    assert scores == {
        "eval/greedy/success": 1.0,
        "eval/greedy/steps": 3.0,
        "eval/sampled/success": 0.0,
        "eval/reference/success": 1.0,
        "eval/reference/steps": 3.0,
    }
    assert "eval/reference/success" not in evaluate(Scripted(), Args(reference="none", horizon=4), "cpu")
    learner, _, args = made(**DUEL | {"horizon": 30, "eval_episodes": 200})
    scores = evaluate(learner, args, "cpu")
    for name in ("greedy", "sampled", "reference"):
        won, lost = scores[f"eval/{name}/success"], scores[f"eval/{name}/loss"]
        assert 0 <= won <= 1 and 0 <= lost and won + lost <= 1
    assert scores["eval/sampled/loss"] > scores["eval/sampled/success"], "an untrained team loses to shortest paths"
