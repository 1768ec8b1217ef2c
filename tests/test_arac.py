"""ARAC: attention, pointer, networks and losses against released code, closed forms, one update by
hand, beta, evaluation."""

import copy
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from algorithms import arac
from algorithms.arac import Args, actor_loss, forward_kl, joint_sums, make_games, make_graph, update

VECTORS = json.loads((Path(__file__).parent / "reference/arac.json").read_text())
CASES = {case["case"]: case for case in VECTORS}
SAC = CASES["sac_losses_with_reference_term"]
CLOSED = CASES["regularised_policy_closed_form"]
DUEL = {"env_id": "graph_confrontation", "graph": ("grid_3x3",)}


def close(found, expected, tolerance=1e-6):
    found = torch.as_tensor(found).detach().double()
    expected = torch.as_tensor(expected).double()
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def made(batch_size: int = 12, **flags):
    """A small learner, its game, a batch of random moves, and flags."""
    args = Args(**{"embed_dim": 8, "device": "cpu"} | flags)
    torch.manual_seed(0)
    (game,) = make_games(args, args.graph, "cpu")
    game.reset(batch_size, 3)
    learner = arac.Learner([game], 0, args)
    before = game.positions
    actions = game.random_slots(before[:, : args.num_agents])
    rewards, dones, _, after = game.step(actions)
    batch = {"positions": game.view(before, 0), "next_positions": game.view(after, 0)}
    batch["actions"] = actions
    if args.beta_mode != "none":
        batch["reference"] = game.scripted("shortest", before)
    batch |= {"rewards": rewards, "dones": dones}
    batch["rewards"][:3], batch["dones"][:3] = 1.0, True
    return learner, game, batch, args


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def linear_weight(name: str, values: torch.Tensor) -> torch.Tensor:
    """Weights of nn.Linear (d,d) from the released (heads,d,d/heads) or, for w_out, (heads,d/heads,d)."""
    return values.flatten(0, 1).T if name == "w_out" else values.transpose(1, 2).flatten(0, 1)


def test_reference_attention():
    """EPG_code, model.py MultiHeadAttention; our masks are (Q,M), so that one sample is taken at a time."""
    case, attention = CASES["multi_head_attention"], arac.Attention(4, 2)
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
    case, policy = CASES["pointer_log_policy"], arac.GraphPolicy(3, 1, 4, 2, 1, 16)
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
    log_probs = fill(arac.GraphPolicy(*sizes), case["policy_fill"])(positions, graph)
    close(log_probs[0, 0], case["log_prob_pursuer0"][0], 1e-5)
    close(log_probs[0, 1], case["log_prob_pursuer1"][0], 1e-5)
    critic = fill(arac.GraphCritic(3, *sizes), case["q_fill"])
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
    close(arac.soft_value(*after), SAC["soft_value_next"])
    targets = arac.critic_targets(sac("rewards"), torch.tensor(SAC["dones"]) > 0, *after, gamma)
    close(targets, SAC["target_q"])
    joint = torch.tensor(SAC["joint_action_index"])[:, None]
    for critic, loss in zip(critics, (SAC["q1_loss"], SAC["q2_loss"])):
        close((critic.gather(1, joint)[:, 0] - targets).square().mean(), loss)

    entropy = -(log_probs.exp() * log_probs).sum((1, 2))
    close(-entropy.mean(), SAC["negative_entropy"])
    target = SAC["config"]["entropy_target"]
    close(0.05 * 2 * math.log(3), target)
    log_alpha = torch.tensor(SAC["config"]["log_alpha"], dtype=torch.float64, requires_grad=True)
    loss = arac.temperature_loss(log_alpha, entropy, target)
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


def test_sums_over_agents_are_never_below_the_joint_form():
    """min_k E[Q_k] >= E[min_k Q_k] in 200 random cases with a padded slot; equal where one critic is below."""
    draws = 2 * torch.randn(3, 200, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits, q1, q2 = draws  # (200,N,K) each
    logits[:, 0, 2] = -1e8
    log_probs = logits.log_softmax(-1)
    for other, equal in ((q2, False), (q1 + q2.abs(), True)):
        joint = arac.soft_value(log_probs, joint_sums(q1), joint_sums(other), 0.3)
        gaps = arac.soft_value(log_probs, q1, other, 0.3) - joint
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


@pytest.mark.parametrize("name", ["city_30", "grid_3x3"])
def test_attention_over_slots_is_masked_attention(name):
    """Of all n x n pairs, those that are no neighbours are masked; padded slots change nothing."""
    graph = make_graph(name, make_graph(name).num_slots + 2)
    attention, nodes = arac.Attention(8, 2), torch.randn(3, graph.num_nodes, 8)
    found = attention(nodes, nodes, graph.slot_mask[:-1] * -1e8, graph.slots[:-1])
    far = graph.distances[:-1, :-1] > 1
    close(found, attention(nodes, nodes, far * -1e8), 1e-5)


def test_two_agents_on_one_node_can_part():
    """They start with the same policy, of which one gradient step makes two, by their numbers."""
    learner, game, batch, args = made()
    together = torch.tensor([[0, 4, 4], [1, 6, 6]])
    before = learner.policy(together, game.graph)
    update(learner, batch, game.graph, 0.2, args)
    after = learner.policy(together, game.graph)
    assert torch.equal(before[:, 0], before[:, 1])
    assert (after[:, 0] - after[:, 1]).abs().amax(1).min() > 1e-6


def test_removed_players_are_no_part_of_the_learning():
    """One slot of probability 1: log-probability, entropy and divergence 0, and no gradient."""
    learner, game, _, args = made(**DUEL)
    positions = torch.tensor([[0, 8, 3, 4], [0, -1, -1, 4], [0, 8, -1, -1], [-1, -1, 3, -1]])
    reference = game.scripted("shortest", positions[:, [2, 3, 0, 1]])
    gone = positions[:, 2:] < 0
    log_probs = learner.policy(positions, game.graph)
    entropy = -(log_probs.exp() * log_probs).sum(2)
    assert (entropy[gone] == 0).all() and (entropy[~gone] > 0).all()
    divergence = forward_kl(log_probs, reference)
    assert divergence[2] == 0 and (divergence[[0, 1, 3]] > 0).all()
    batch = {"positions": positions, "next_positions": positions, "rewards": torch.zeros(4)}
    batch |= {"actions": reference, "reference": reference, "dones": torch.zeros(4).bool()}
    one = {name: column[2:3] for name, column in batch.items()}
    metrics = update(learner, one, game.graph, 0.2, args)
    assert metrics["losses/actor_grad_norm"] == 0, "nobody is left to learn"
    update(learner, batch, game.graph, 0.2, args)
    assert weights(learner.policy).isfinite().all() and weights(learner.critics).isfinite().all()


CHANGES = [{}, {"joint_table": True}, {"beta_mode": "none"}, {"gamma": 0.8}, DUEL]
CHANGES += [{"graph": ("city_12_3",), "beta_target": 0.3}]


@pytest.mark.parametrize("flags", CHANGES, ids=str)
def test_update_is_what_the_losses_say(flags):
    """Metrics and gradients, from the functions that the reference numbers hold."""
    learner, game, batch, args = made(**{"alpha": 0.05, "beta": 0.3} | flags)
    graph = game.graph
    for target in learner.targets.parameters():  # or it would not show which critics are used
        target.data += 0.05 * torch.randn_like(target)
    twin = copy.deepcopy(learner)
    found = update(learner, batch, graph, 0.3, args)

    form = joint_sums if args.joint_table else torch.clone
    rows, agents = torch.arange(12)[:, None], torch.arange(2)
    reference = batch.get("reference")
    log_probs = twin.policy(batch["positions"], graph)
    q = [critic(batch["positions"], graph) for critic in twin.critics]
    with torch.no_grad():
        later = twin.policy(batch["next_positions"], graph)
        after = [form(critic(batch["next_positions"], graph)) for critic in twin.targets]
        targets = arac.critic_targets(batch["rewards"], batch["dones"], later, *after, 0.05, args.gamma)
    errors = [x[rows, agents, batch["actions"]].sum(1) - targets for x in q]
    critic_loss = sum(error.square().mean() for error in errors)
    policy_loss = actor_loss(log_probs, *(form(x.detach()) for x in q), 0.05, 0.3, reference)
    (policy_loss + critic_loss).backward()
    close(found["losses/actor_loss"], policy_loss, 1e-5)
    close(found["losses/qf_loss"], critic_loss, 1e-5)
    for name in ("policy", "critics"):
        norm = nn.utils.clip_grad_norm_(getattr(twin, name).parameters(), arac.MAX_GRAD_NORM)
        close(found[f"losses/{'actor' if name == 'policy' else 'qf'}_grad_norm"], norm, 1e-4)
        for ours, theirs in zip(getattr(learner, name).parameters(), getattr(twin, name).parameters()):
            close(ours.grad, torch.zeros_like(theirs) if theirs.grad is None else theirs.grad, 1e-5)

    opened = (~graph.slot_mask[batch["positions"][:, -2:]]).sum(-1)  # (B,N)
    uniform = opened.log().sum(1).mean()
    entropy = -(log_probs.exp() * log_probs).sum((1, 2)).mean()
    close(learner.log_alpha.grad, entropy - 0.05 * uniform, 1e-5)
    if reference is None:
        assert learner.log_beta.grad is None and "train/arac/divergence" not in found
    else:
        divergence = forward_kl(log_probs, reference).mean()
        close(learner.log_beta.grad, args.beta_target * uniform - divergence, 1e-5)
        close(found["train/arac/divergence"], divergence, 1e-5)


def test_first_temperature():
    """Half of what makes never winning as good as winning at once: alpha H / (1 - gamma) = 1/2."""
    learner, _, _, _ = made(graph=("path_4",), num_agents=3)
    uniform = 3 * (2 * math.log(2) + 2 * math.log(3)) / 4
    close(learner.log_alpha.exp() * uniform / 0.01, 0.5, 1e-5)


def test_dual_weight_falls_below_the_target_and_rises_above_it():
    """It never exceeds its first value, however long the divergence is above its target."""
    learner, game, batch, args = made(beta_lr=0.1)
    found = [0.2]
    for target, count in ((5.0, 15), (1e-3, 25)):
        args.beta_target = target
        learner.optimizer.state.clear()
        for _ in range(count):
            update(learner, batch, game.graph, found[-1], args)
            found.append(float(arac.current_beta(learner, 0, args)))
    falling, rising = found[:16], found[15:]
    assert falling == sorted(falling, reverse=True) and falling[-1] < 0.1
    assert rising == sorted(rising) and rising[-1] == pytest.approx(0.2)


def test_weights_that_do_not_follow_the_divergence():
    """`exp` falls by a share of beta_lr with each update, `fixed` not at all."""
    for mode, value in {"exp": 0.2 * math.exp(-0.005 * 100), "fixed": 0.2}.items():
        assert arac.current_beta(None, 100, Args(beta_mode=mode)) == pytest.approx(value)


def test_reference_scores_of_scripts():
    """Two pursuers on an 8-cycle: shortest paths fail from one node, perfect play takes 3 steps."""
    players = {"shortest": ("dp", 0.0, 128.0), "dp": ("learned", 1.0, 3.0)}
    for kind, (evader, success, steps) in players.items():
        args = Args(horizon=128, reference=kind, evader=evader)
        (game,) = games = make_games(args, args.graph, "cpu")
        policy = arac.GraphPolicy(*arac.network_sizes(game, 0, args))
        before = torch.get_rng_state()
        scores = arac.evaluate(policy, games, args)
        assert torch.equal(torch.get_rng_state(), before), "training goes on as if nothing happened"
        assert scores["eval/reference/success"] == success
        assert scores["eval/reference/steps"] == steps
    _, _, path = arac.play(game, lambda game: game.scripted("dp", game.positions), 0)
    assert len(path) == 4 and torch.equal(path[0], game.starts[0])


def test_evaluation_scores_likeliest_and_sampled_actions(monkeypatch):
    """Of a learner that plays one script, and another when it samples; unsolved games have 0."""
    kinds = {True: "dp", False: "shortest"}
    plays = lambda policy, game, side, greedy=False: game.scripted(kinds[greedy], game.positions)  # noqa: E731
    monkeypatch.setattr(arac, "act", plays)
    args = Args()
    scores = arac.evaluate(None, make_games(args, ("cycle_8", "cycle_6"), "cpu"), args)
    assert (scores["eval/greedy/success"], scores["eval/sampled/success"]) == (1.0, 0.0)
    assert scores["eval/sampled/steps"] == args.horizon
    (game,) = make_games(Args(**DUEL, horizon=60), DUEL["graph"], "cpu")
    results, _, _ = arac.play(game, lambda game: game.scripted("random", game.positions), 0)
    assert results.abs().max() == 1, "only the first game from each start counts"
