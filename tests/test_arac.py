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
    SoftActorCritic,
    actor_loss,
    critic_targets,
    evaluate,
    forward_kl,
    joint_sums,
    make_graph_game,
    play_from_starts,
    play_piece,
    soft_value,
    temperature_loss,
)
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


def test_reference_attention():
    """EPG_code, model.py MultiHeadAttention; our masks are (Q,M), so that one sample is taken at a time."""
    case, attention = CASES["multi_head_attention"], Attention(4, 2)
    for name, values in case["params"].items():
        getattr(attention, name[2:]).weight.data = linear_weight(name, torch.tensor(values))
    for sample in range(2):
        query, memory = (torch.tensor(case[name])[sample][None] for name in ("query", "memory"))
        mask = -1e8 * torch.tensor(case["key_padding_mask"])[sample].float().expand(3, 5)
        close(attention(query, memory, mask)[0], case["output"][sample], 1e-5)
    x, mask = torch.tensor(case["self_x"]), -1e8 * torch.tensor(case["self_attn_mask"])[0].float()
    close(attention(x, x, mask), case["self_output"], 1e-5)  # one row is masked altogether


def test_reference_pointer():
    """SingleHeadAttention of the same file. The layer before the pointer passes on what the agents see."""
    case, policy = CASES["pointer_log_policy"], GraphPolicy(3, 1, 4, 2, 1, 16)
    query, keys, mask = (torch.tensor(case[name]) for name in ("query", "keys", "mask"))
    policy.encode = lambda positions, graph: (None, torch.randn_like(query), query)
    policy.neighbours = lambda nodes, positions, graph: keys[:, None]
    policy.current.weight.data, policy.current.bias.data = torch.eye(4, 8), torch.zeros(4)
    for name, layer in (("w_query", policy.query), ("w_key", policy.key)):
        layer.weight.data = torch.tensor(case["params"][name]).T
    found = policy(torch.arange(3)[:, None], SimpleNamespace(slot_mask=mask[:, 0] > 0))
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
        assert joint_sums(chosen).argmax(1).tolist() == SAC[wanted]
    values = torch.randn(5, 3, 4)
    for number in range(64):
        digits = number % 4, number // 4 % 4, number // 16
        close(joint_sums(values)[:, number], sum(values[:, i, a] for i, a in enumerate(digits)))


# --- Expectations over agents and over joint actions -----------------------------------------------------------------


def test_sums_over_agents_are_never_below_the_joint_form():
    """min_k E[Q_k] >= E[min_k Q_k] in 200 random cases with a padded slot; equal where one critic is below."""
    generator = torch.Generator().manual_seed(0)
    draws = 2 * torch.randn(3, 200, 3, 3, generator=generator, dtype=torch.float64)
    logits, q1, q2 = draws  # (200,N,K) each
    logits[:, 0, 2] = -1e8
    log_probs = logits.log_softmax(-1)
    for other, equal in ((q2, False), (q1 + draws[2].abs(), True)):
        joint = soft_value(log_probs, joint_sums(q1), joint_sums(other), 0.3)
        gaps = soft_value(log_probs, q1, other, 0.3) - joint
        assert gaps.min() > -1e-9
        assert gaps.max() < 1e-9 if equal else (gaps > 0.01).double().mean() > 0.5


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


# --- Networks --------------------------------------------------------------------------------------------------------


def test_two_agents_on_one_node_can_part():
    """They start with the same policy, of which one gradient step makes two, thanks to their numbers."""
    learner, game, _ = made(play=6)
    together = torch.tensor([[0, 4, 4], [1, 6, 6]])
    before = learner.policy(together, game.graph)
    learner.gradient_step(learner.buffer.sample(32), game.graph, 0.2)
    after = learner.policy(together, game.graph)
    assert torch.equal(before[:, 0], before[:, 1])
    assert (after[:, 0] - after[:, 1]).abs().amax(1).min() > 1e-6


def test_removed_players_are_no_part_of_the_learning():
    """One slot of probability 1: log-probability, entropy and divergence 0, and no gradient."""
    learner, game, _ = made(**DUEL)
    positions = torch.tensor([[0, 8, 3, 4], [0, -1, -1, 4], [0, 8, -1, -1], [-1, -1, 3, -1]])
    reference = game.scripted("shortest", torch.cat(positions.split(2, 1)[::-1], 1))
    gone = positions[:, 2:] < 0
    log_probs = learner.policy(positions, game.graph)
    close(log_probs[gone][:, 0], torch.zeros(4), 0)
    entropy, divergence = -(log_probs.exp() * log_probs).sum(2), forward_kl(log_probs, reference)
    assert (entropy[gone] == 0).all() and (entropy[~gone] > 0).all()
    assert divergence[2] == 0 and (divergence[[0, 1, 3]] > 0).all()
    q = [critic(positions, game.graph).detach() for critic in learner.critics]
    loss = actor_loss(log_probs[2:3], q[0][2:3], q[1][2:3], 0.1, 0.2, reference[2:3])  # nobody is left
    for gradient in torch.autograd.grad(loss, learner.policy.parameters(), allow_unused=True):
        assert gradient is None or (gradient == 0).all()
    batch = {"positions": positions, "actions": reference, "reference": reference, "next_positions": positions}
    learner.gradient_step(batch | {"rewards": torch.ones(4), "dones": gone[:, 0]}, game.graph, 0.2)
    assert weights(learner.policy).isfinite().all() and weights(learner.critics).isfinite().all()


# --- One update ------------------------------------------------------------------------------------------------------


def expected_losses(learner: SoftActorCritic, batch: dict, graph, beta: float, args: Args) -> dict:
    """Losses of a batch, from the functions that the reference numbers hold."""
    alpha, form = learner.log_alpha.detach().exp(), joint_sums if args.joint_table else torch.clone
    log_probs = learner.policy(batch["positions"], graph)
    q = [critic(batch["positions"], graph) for critic in learner.critics]
    with torch.no_grad():
        later = learner.policy(batch["next_positions"], graph)
        after = [form(critic(batch["next_positions"], graph)) for critic in learner.targets]
        targets = critic_targets(batch["rewards"], batch["dones"], later, *after, alpha, args.gamma)
    rows, agents = torch.arange(len(targets))[:, None], torch.arange(log_probs.size(1))
    errors = [x[rows, agents, batch["actions"]].sum(1) - targets for x in q]
    reference = None if learner.reference == "none" else batch["reference"]
    policy = actor_loss(log_probs, *(form(x.detach()) for x in q), alpha, beta, reference)
    entropy = -(log_probs.exp() * log_probs).sum((1, 2)).mean()
    losses = {"losses/qf_loss": sum(error.square().mean() for error in errors), "losses/actor_loss": policy}
    losses["losses/entropy"] = entropy.detach()
    if reference is not None:
        losses["train/arac/divergence"] = forward_kl(log_probs, reference).mean().detach()
    return losses


@pytest.mark.parametrize(
    "flags",
    [{}, {"joint_table": True}, {"beta_mode": "none"}, {"max_grad_norm": 0.01, "gamma": 0.8}, {"autotune": False}, DUEL],
    ids=["sums", "joint", "none", "clipped", "autotune", "duel"],
)
def test_update_is_what_the_losses_say(flags):
    """Metrics and gradients of gradient_step; what Adam moves, and by how much."""
    learner, game, args = made(play=20, seed=4, **{"alpha": 0.05, "beta": 0.3} | flags)
    graph, batch = game.graph, learner.buffer.sample(12)
    batch["dones"][:3], batch["rewards"][:3] = True, 1.0
    for target in learner.targets.parameters():  # targets that are not the critics, or their use would not show
        target.data += 0.05 * torch.randn_like(target)
    twin = copy.deepcopy(learner)
    found = learner.gradient_step(batch, graph, 0.3)
    expected = expected_losses(twin, batch, graph, 0.3, args)
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
    if args.autotune:  # it falls while the entropy is above its target
        close(learner.log_alpha.grad, found["losses/entropy"] - 0.05 * uniform, 1e-5)
        close(twin.log_alpha - learner.log_alpha, 1e-3 * learner.log_alpha.grad.sign(), 1e-6)
    else:
        assert learner.log_alpha == twin.log_alpha
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


def test_first_temperature_pays_for_winning():
    """Half of what makes never winning as good as winning at once: alpha N ln K / (1 - gamma) = 1/2."""
    for flags, uniform in (({}, 2 * math.log(3)), ({"num_agents": 3, "graph": "grid_3x3"}, 3 * math.log(5))):
        learner, _, args = made(**flags)
        close(learner.uniform, uniform)
        close(learner.log_alpha.exp() * uniform / (1 - args.gamma), 0.5, 1e-5)
    close(made(alpha=0.3)[0].log_alpha.exp(), 0.3)


def test_targets_are_copied_after_so_many_updates():
    learner, game, _ = made(play=4, target_network_frequency=3, tau=0.25)
    assert torch.equal(weights(learner.targets), weights(learner.critics))
    assert not torch.equal(weights(learner.critics[0]), weights(learner.critics[1])), "two critics, not one twice"
    for number in range(1, 7):
        before = weights(learner.targets)
        learner.gradient_step(learner.buffer.sample(16), game.graph, 0.2)
        online = weights(learner.critics)
        close(weights(learner.targets), before.lerp(online, 0.25) if number % 3 == 0 else before, 1e-6)


@pytest.mark.parametrize("rate, counts", [(1.0, [1, 1, 1]), (0.4, [0, 0, 1, 0, 1]), (2.5, [2, 3])])
def test_updates_that_are_due(rate, counts):
    learner, game, args = made(play=4, updates_per_step=rate)
    for count in counts:
        before = learner.updates
        metrics = learner.learn(game.graph, 0)
        assert learner.updates - before == count and bool(metrics) == (count > 0)


# --- The weight of the divergence ------------------------------------------------------------------------------------


def test_dual_weight_falls_below_the_target_and_rises_above_it():
    """It never exceeds its first value, however long the divergence is above its target."""
    learner, game, _ = made(play=6, beta=0.2, beta_lr=0.1)
    found = [0.2]
    for target, count in ((5.0, 15), (1e-3, 25)):
        learner.args.beta_target, learner.optimizer.state = target, type(learner.optimizer.state)(dict)
        for _ in range(count):
            learner.gradient_step(learner.buffer.sample(32), game.graph, learner.beta(0))
            found.append(float(learner.beta(0)))
    falling, rising = found[:16], found[15:]
    assert falling == sorted(falling, reverse=True) and falling[-1] < 0.1
    assert rising == sorted(rising) and rising[-1] == pytest.approx(0.2)


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


# --- Play and replay -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        {"evader": "learned"},
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
    one, twins = SoftActorCritic(game, args, 0, "cpu"), args.opponent == "self"
    sides = [one, SoftActorCritic(game, args, 1, "cpu")] if args.evader == "learned" else [one]
    sides = [one, one] if twins else sides
    metrics = play_piece(sides, game, args, 0, 12 * 8)
    seen = [{name: column[: x.buffer.count] for name, column in x.buffer.columns.items()} for x in sides]
    won, ended, cut, average = 0, 0, 0, 0.0
    for step in range(12):
        before, kept = again.positions.clone(), []
        for side, rows in enumerate(seen):
            first = (2 * step + side) * 8 if twins else step * 8  # self-play has both sides in one buffer
            kept.append({name: column[first : first + 8] for name, column in rows.items()})
        rewards, terminated, truncated, last = again.step(*(rows["actions"] for rows in kept))
        for side, rows in enumerate(kept):
            for name, places in (("positions", before), ("next_positions", last)):
                mine, theirs = places.split(again.teams, 1)[:: 1 - 2 * side]
                assert torch.equal(rows[name], torch.cat([theirs, mine], 1))
            assert torch.equal(rows["rewards"], (1 - 2 * side) * rewards)
            assert torch.equal(rows["dones"], terminated)
            evader = args.evader == "learned" and side  # has no reference
            wanted = rows["actions"] if evader else again.scripted(args.reference, before, side)
            assert torch.equal(rows["reference"], wanted)
        now = (terminated | truncated).sum()
        won, ended, cut = won + (rewards > 0).sum(), ended + now, cut + truncated.sum()
        if now:
            average += min(0.01 * now, 1) * ((rewards > 0).sum() / now - average)
    assert cut > 0 and ended > cut, "some games end, others are cut off"
    close(metrics["charts/success"], won / ended)
    close(metrics["charts/episodic_length"], 96 / ended)
    close(one.success, average)


# --- Evaluation ------------------------------------------------------------------------------------------------------


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
    found = [
        play_from_starts(Args(graph="grid_4x4", horizon=40, evader=evader), "cpu", scripted("shortest"))[1]
        for evader in ("learned", "dp")
    ]
    assert torch.equal(*found), "a learned evader is replaced by perfect play"


def test_evaluation_plays_at_most_so_many_games_and_leaves_random_numbers_alone():
    for most, played in ((40, 40), (39, 20), (13, 10), (1, 1)):
        assert len(play_from_starts(Args(eval_episodes=most), "cpu", scripted("dp"))[0]) == played
    learner, _, args = made()
    before = torch.get_rng_state()
    evaluate(learner, args, "cpu")
    assert torch.equal(torch.get_rng_state(), before)


def scripted(kind: str):
    return lambda game: game.scripted(kind, game.positions, 0)


def test_evaluation_scores_likeliest_and_sampled_actions_and_the_reference():
    """Of a learner that plays one script, and another when it samples."""
    kinds = {True: "dp", False: "shortest"}
    act = lambda game, side, greedy=False: game.scripted(kinds[greedy], game.positions, side)  # noqa: E731
    scores = evaluate(SimpleNamespace(act=act), Args(reference="dp", horizon=16), "cpu")
    won = {f"eval/{name}/success": 1.0 for name in ("greedy", "reference")} | {"eval/sampled/success": 0.0}
    assert scores == won | {f"eval/{name}/steps": 3.0 for name in ("greedy", "reference")}
    learner, _, args = made(**DUEL | {"horizon": 30, "eval_episodes": 200})
    scores = evaluate(learner, args, "cpu")
    assert scores["eval/sampled/loss"] > scores["eval/sampled/success"], "an untrained team loses to shortest paths"
