"""SeqWM: numbers of the released code, who depends on whom, one agent as a plain planner, the batched game against MPE."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from algorithms import seqwm
from algorithms.seqwm import (
    Args,
    WorldModel,
    estimate_value,
    mppi_refit,
    plan,
    simnorm,
    twohot_decode,
    twohot_encode,
)
from envs.simple_spread import SimpleSpread

REFERENCE = Path(__file__).parent / "reference/seqwm.json"
CASES = json.loads(REFERENCE.read_text())
MODELS = {"seq": "seq", "cen": "joint", "dec": "independent"}  # names of the released code
pytestmark = pytest.mark.quick


def cases(kind: str) -> list:
    """Cases whose name begins like this."""
    return [pytest.param(case, id=case["case"]) for case in CASES if case["case"].startswith(kind)]


def close(found, expected, tolerance=2e-6):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    found = torch.as_tensor(found).detach().double().view(expected.shape)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


# --- Numbers of the released code ---


KINDS = ("simnorm", "twohot", "policy_logprob", "toy_weights", "estimate_value", "mppi_refit")


def test_reference_of_another_kind():
    others = [case["case"] for case in CASES if not case["case"].startswith(KINDS)]
    if others:
        pytest.skip(f"nothing here compares {others}: write their tests")


@pytest.mark.parametrize("case", cases("simnorm"))
def test_reference_simnorm(case):
    group = int(re.search(r"SimNorm\((\d+)\)", case["source"])[1])
    close(simnorm(torch.tensor(case["x"]), group), case["y"])


@pytest.mark.parametrize("case", cases("twohot"))
def test_reference_twohot(case):
    """Weights of both bins, what they decode to, decoded logits and the loss."""
    values = torch.tensor(case["values"])[:, 0]
    weights = twohot_encode(values)
    for row, nonzero in zip(weights, case["nonzero"], strict=True):
        expected = torch.zeros(101)
        for place, weight in nonzero:
            expected[place] = weight
        close(row, expected, 1e-5)
    close(twohot_decode(weights.log()), case["decode_of_log_encoding"], 1e-5)
    torch.manual_seed(0)
    torch.randn(2, 8)
    logits = torch.randn(8, 101)
    close(logits[0], case["logits_row0"])
    close(twohot_decode(logits), case["decoded"], 1e-5)
    close(seqwm.twohot_loss(logits, values), case["loss"], 1e-5)


@pytest.mark.parametrize("case", cases("policy_logprob"))
def test_reference_log_density(case):
    noise, log_std = torch.tensor(case["eps"]), torch.tensor(case["log_std"])
    close(seqwm.gaussian_log_density(noise, log_std, "released"), case["gaussian_logprob"])
    close(seqwm.gaussian_log_density(noise, log_std), case["correct_gaussian_logprob"])
    close(seqwm.squash_term(torch.tensor(case["pi"])), case["squash_term"])
    close(seqwm.bounded_log_std(torch.tensor(case["log_std_raw"])), case["log_std_mapped"])


class Toy:
    """The single layers of the case toy_weights, with the script's rule of who sees whom."""

    def __init__(self, case: dict, model: str):
        self.layers = {name: [torch.tensor(part) for part in layer] for name, layer in case["weights"].items()}
        self.num_agents = sum(name.startswith("enc") for name in self.layers)
        self.sees = seqwm.who_sees_whom(model, self.num_agents)
        self.group = int(re.search(r"SimNorm\((\d+)\)", case["description"])[1])

    def apply(self, name: str, x):
        """(N,R,I) -> (N,R,O)"""
        return torch.stack([F.linear(own, *self.layers[f"{name}{agent}"]) for agent, own in enumerate(x)])

    def inputs(self, latents, actions):
        return torch.cat([latents, seqwm.visible(actions, self.sees)], -1)

    def dynamics(self, inputs):
        return simnorm(self.apply("dyn", inputs), self.group)

    def reward(self, inputs):
        return self.apply("rew", inputs)

    def sample_actions(self, latents):
        return self.apply("act", latents).tanh()

    def values(self, latents, actions):
        everything = torch.cat([seqwm.together(latents), seqwm.together(actions)], -1)
        return torch.stack([F.linear(everything, *self.layers[name]) for name in ("critic1", "critic2")])


@pytest.mark.parametrize("case", cases("estimate_value"))
def test_reference_values_of_plans(case):
    """Of every agent's model, and their mean, by which the planner ranks: without the last reward, as in that code."""
    toy_case = next(other for other in CASES if other["case"].startswith("toy_weights"))
    toy = Toy(toy_case, MODELS[case["case"].split("_")[2]])
    limit = float(re.search(r"bins \d+ on \[-(\d+),", toy_case["description"])[1])
    latents = torch.tensor(case["zs"]).flatten(1, 2)  # (N,E,S,Z) -> (N,R,Z)
    actions = torch.tensor(case["actions"]).transpose(0, 1).flatten(2, 3)  # (N,H,E,S,A) -> (H,N,R,A)
    found = estimate_value(toy, latents, actions, case["gamma"], "released", limit)
    close(found, case["values_per_agent"], 1e-5)
    close(found.mean(0), case["score_used_by_planner"], 1e-5)


@pytest.mark.parametrize("case", cases("mppi_refit"))
def test_reference_refit(case):
    values, actions = torch.tensor(case["values"]), torch.tensor(case["actions"])
    mean, std, weights, elites = mppi_refit(values, actions, case["num_elites"], case["temperature"])
    close(weights, case["score"])
    close(mean, case["mean"])
    close(std, case["std"])
    assert values.gather(1, elites).min() >= values.sort(1, descending=True).values[:, case["num_elites"] - 1].min()


# --- Properties ---


def test_policy_samples_from_its_density():
    """Actions of an actor have the density that it says, up to the 1e-6 in the slope of tanh."""
    world, game, _ = small_world()
    latents = world.encode(game.observations)[1]
    mean, log_std = world.actors[1](latents).chunk(2, -1)
    torch.manual_seed(5)
    actions, density = world.policy(1, latents)
    policy = TransformedDistribution(Normal(mean, seqwm.bounded_log_std(log_std).exp()), TanhTransform())
    close(density, policy.log_prob(actions).sum(-1), 2e-3)


def small_world(model="seq", message="plan", agents=3, **values):
    args = Args(model=model, message=message, num_agents=agents, latent_dim=16, hidden_dim=8, **values)
    torch.manual_seed(1)
    game = SimpleSpread(4, 0, "cpu", agents)
    world = WorldModel(game, args)
    for layer in (world.reward[-1], world.critics[-1]):
        torch.nn.init.normal_(layer.weight)
    return world, game, args


@pytest.mark.parametrize("message", ["plan", "actions"])
@pytest.mark.parametrize("model", ["seq", "joint", "independent"])
def test_who_depends_on_whom(model, message):
    """What predicted rewards and next latents after two steps change with: all agents' first actions and, where messages
    hold them, latents. No gradient passes through messages."""
    world, game, _ = small_world(model, message)
    torch.manual_seed(2)
    latents = world.encode(game.observations).detach().requires_grad_()
    first, second = torch.rand(2, 3, 4, 5)
    expected = {"seq": torch.ones(3, 3).tril(), "joint": torch.ones(3, 3), "independent": torch.eye(3)}[model]

    def two_steps(latents, first):
        inputs = world.inputs(world.dynamics(world.inputs(latents, first)), second)
        return world.dynamics(inputs), world.reward(inputs)

    def changed(*given):  # whose outputs are others
        return [(a != b).flatten(1).any(1).float() for a, b in zip(two_steps(*given), two_steps(latents, first))]

    for agent in range(3):
        other = torch.arange(3)[:, None, None] == agent
        by_action = changed(latents, torch.where(other, -first, first))
        by_latent = changed(torch.where(other, latents.flip(2), latents), first)
        for part in (0, 1):
            assert torch.equal(by_action[part], expected[:, agent])
            assert torch.equal(by_latent[part], (expected if message == "plan" else torch.eye(3))[:, agent])
    for output in two_steps(latents, first):
        rows = [torch.autograd.grad(output[agent].square().sum(), latents, retain_graph=True)[0] for agent in range(3)]
        assert torch.equal((torch.stack(rows).abs().sum((2, 3)) > 0).float(), torch.eye(3))


def plain_planner(world, observations, horizon, args):
    """MPPI for one agent and one game after the other, as in TD-MPC2, with the draws of the script's planner."""
    E, S, P, A, H = len(observations), args.num_samples, args.num_policy_samples, 5, horizon
    latents = world.encode(observations)[0]  # (E,Z)

    def step(z, a):
        x = torch.cat([z, a], -1)[None]
        return twohot_decode(world.reward(x))[0], world.dynamics(x)[0]

    here, proposals = latents.repeat_interleave(P, 0), []
    for _ in range(H):
        actions, _ = world.policy(0, here)
        proposals.append(actions.view(E, P, A))
        here = step(here, actions)[1]
    mean, std = torch.zeros(H, E, A), torch.full((H, E, A), 2.0)
    for _ in range(args.iterations):
        noise = torch.randn(H, E, S - P, A)
        plans = torch.cat([torch.stack(proposals), (mean[:, :, None] + std[:, :, None] * noise).clamp(-1, 1)], 2)
        z, value = latents.repeat_interleave(S, 0), 0
        for t in range(H):
            reward, z = step(z, plans[t].flatten(0, 1))
            value = value + args.gamma**t * reward
        last, _ = world.policy(0, z)
        q = twohot_decode(world.critics(torch.cat([z, last], -1).expand(2, -1, -1)))
        value = (value + args.gamma**H * (q[0] + q[1]) / 2).view(E, S)
        mean, std = torch.zeros(H, E, A), torch.zeros(H, E, A)
        chosen, shares = [], []
        for game in range(E):
            best = value[game].argsort(descending=True)[: args.num_elites]
            share = torch.softmax(args.mppi_temperature * value[game][best], 0)
            kept = plans[:, game, best]  # (H,K,A)
            mean[:, game] = torch.einsum("k,hka->ha", share, kept)
            variance = torch.einsum("k,hka->ha", share, (kept - mean[:, game, None]) ** 2)
            std[:, game] = (variance + 1e-6).sqrt().clamp(0.05, 2)
            chosen.append(kept[0])
            shares.append(share)
    draws = (torch.stack(shares)[:, None] / torch.empty(E, 1, args.num_elites).exponential_()).argmax(-1)[:, 0]
    actions = torch.stack([kept[draw] for kept, draw in zip(chosen, draws)])
    return (actions + std[0] * torch.randn_like(actions)).clamp(-1, 1), mean


@pytest.mark.parametrize("model", ["seq", "joint", "independent"])
def test_one_agent_is_a_plain_planner(model):
    """With one agent there is nobody to see: the same plans as of a planner that knows no agents."""
    world, game, args = small_world(model, agents=1)
    with torch.no_grad():
        torch.manual_seed(2)
        actions, mean = plan(world, world.encode(game.observations), seqwm.first_mean(game, args), args, explore=True)
        torch.manual_seed(2)
        expected, expected_mean = plain_planner(world, game.observations, args.horizon, args)
    close(actions[0], expected, 1e-5)
    close(mean[:, 0], expected_mean, 1e-5)


class Known:
    """Models whose rewards fall with the distance of each agent's own action from a goal, and nothing follows."""

    goal = torch.linspace(-0.8, 0.8, 15).view(3, 1, 5)

    def inputs(self, latents, actions):
        return latents, actions

    def dynamics(self, inputs):
        return inputs[0]

    def reward(self, inputs):
        distances = (inputs[1] - self.goal).square().sum(2)  # (N,R)
        return twohot_encode(-3 * distances).log()

    def sample_actions(self, latents):
        return torch.zeros(3, latents.size(1), 5)

    def values(self, latents, actions):
        return twohot_encode(torch.zeros(2, latents.size(1))).log()


@pytest.mark.parametrize("form", ["true", "released"])
def test_planner_finds_the_best_actions(form):
    """Of both steps of a plan; the released form does not see the last one."""
    args = Args(num_samples=512, num_policy_samples=8, num_elites=16, iterations=16, mppi_temperature=5.0, horizon=2, plan_value=form)
    torch.manual_seed(0)
    _, mean = plan(Known(), torch.zeros(3, 4, 8), torch.zeros(2, 3, 4, 5), args, explore=False)
    errors = (mean - Known.goal).abs().mean((1, 2, 3))
    assert errors[0] < 0.15
    assert (errors[1] < 0.15) == (form == "true")


def test_warm_start():
    mean = torch.arange(12.0).view(3, 2, 2, 1)  # (H,N,E,A)
    found = seqwm.shifted(mean, torch.tensor([False, True]))
    assert found[:, :, 1].abs().max() == 0
    assert found[:, :, 0, 0].tolist() == [[4.0, 6.0], [8.0, 10.0], [0.0, 0.0]]


def test_sequences_follow_one_game():
    """Also around the end of the buffer, and steps of the next game have no weight."""
    args = Args(num_envs=2, horizon=3, batch_size=400)
    buffer = seqwm.ReplayBuffer(20)
    for t in range(17):
        over = torch.tensor([t % 5 == 4, t % 7 == 6])
        now = 100.0 * torch.arange(2) + t
        buffer.add(rewards=now, over=over)
        if t < 3:
            continue
        batch = seqwm.sample_sequences(buffer, args)
        rewards, weights = batch["rewards"], batch["weights"]
        assert (rewards[1:] - rewards[:-1] == 1).all()
        assert set(rewards[0].tolist()) == {100.0 * e + s for e in (0, 1) for s in range(max(0, t - 9), t - 1)}
        ends = (rewards % 100 % torch.where(rewards < 100, 5, 7)) == torch.where(rewards < 100, 4, 6)
        for k in range(3):
            going = ~ends[:k].any(0)
            assert torch.equal(weights[k], going * 0.5**k)


def test_model_steps_down_the_weighted_sum(monkeypatch):
    """Gradients are those of 20 dynamics + 0.1 rewards + 0.1 values, sums over agents, with fixed targets and the
    weights of eq. 4; metrics are means over agents."""
    world, game, args = small_world(num_envs=4, horizon=2, batch_size=6)
    learner = seqwm.Learner(world, WorldModel(game, args), args)
    for _ in range(30):
        learner.collect(game, 2 * torch.rand(4, 3, 5) - 1)
    batch = seqwm.sample_sequences(learner.buffer, args)
    steps = []
    monkeypatch.setattr(learner.optimizer, "step", lambda: steps.append(1))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda parameters, bound: torch.zeros(()))
    assert seqwm.MAX_GRAD_NORM == 20 and seqwm.ENCODER_LR == 0.3
    torch.manual_seed(3)
    _, metrics = seqwm.update_model(learner, batch, args)
    found = {name: x.grad.clone() for name, x in world.named_parameters() if x.grad is not None}
    torch.manual_seed(3)
    with torch.no_grad():
        following = world.encode(batch["next_observations"].flatten(0, 1))
        q = twohot_decode(learner.target.values(following, world.sample_actions(following))).amin(0).view(2, 6)
        targets = batch["rewards"] + args.gamma * q
    world.zero_grad()
    z = world.encode(batch["observations"][0])
    losses = 0.0
    for t in range(2):
        a = batch["actions"][t].transpose(0, 1)
        logits, both = world.reward(world.inputs(z, a)), world.values(z, a)
        errors = [F.cross_entropy(own, twohot_encode(batch["rewards"][t]), reduction="none") for own in logits]
        values = [F.cross_entropy(own, twohot_encode(targets[t]), reduction="none") for own in both]
        z = world.dynamics(world.inputs(z, a))
        squares = (z - following.view(3, 2, 6, -1)[:, t]).square().mean(2).sum(0)
        losses += (batch["weights"][t] * torch.stack([squares, sum(errors), sum(values) / 2])).mean(1) / 2
    (losses * torch.tensor([20, 0.1, 0.1])).sum().backward()
    close(torch.stack(metrics[:3]), losses.detach() / torch.tensor([3, 3, 1]), 1e-4)
    assert steps == [1]
    assert found.keys() == {name for name, x in world.named_parameters() if x.grad is not None}
    for name, x in world.named_parameters():
        if name in found:
            close(found[name], x.grad.double(), 2e-5)


def test_an_end_counts_and_a_time_limit_does_not():
    """A game that ended has its reward as target; one that was cut off goes on."""
    world, game, args = small_world(num_envs=4, horizon=1, batch_size=8)
    learner = seqwm.Learner(world, WorldModel(game, args), args)
    for _ in range(30):
        learner.collect(game, 2 * torch.rand(4, 3, 5) - 1)
    batch = seqwm.sample_sequences(learner.buffer, args)
    learner.target.values = lambda latents, actions: twohot_encode(torch.full((2, 8), 100.0)).log()
    losses = []
    for ended in (False, True):
        world.critics[-1].bias.data = (twohot_encode(torch.tensor(-1.0)) + 1e-3).log().expand(2, 1, -1).clone()
        world.critics[-1].weight.data.zero_()
        batch["rewards"] = torch.full((1, 8), -1.0)
        batch["terminated"] = torch.full((1, 8), ended)
        losses.append(seqwm.update_model(learner, batch, args)[1][2])
    assert losses[1] < 1.5 < losses[0]


def test_actors_climb_the_critics_and_keep_their_entropy():
    """Where the critics pay for actions near -1, they go there; where critics see nothing, entropy rises."""
    bins = torch.linspace(-seqwm.LIMIT, seqwm.LIMIT, seqwm.BINS)
    for pay, coef in ((1.0, 0.0), (0.0, 1.0)):
        world, game, args = small_world(num_envs=4, horizon=1, learning_rate=3e-2, entropy_coef=coef)
        world.values = lambda z, a, pay=pay: -((bins + pay * a.sum((0, 2))[None, :, None]) ** 2)  # the mean is -pay * sum
        learner = seqwm.Learner(world, WorldModel(game, args), args)
        latents = world.encode(game.observations).detach()
        first = seqwm.update_actors(learner, latents, torch.ones(1, 4), 0, args)
        for update in range(1, 40):
            last = seqwm.update_actors(learner, latents, torch.ones(1, 4), update, args)
        if pay:
            assert world.mean_actions(latents).max() < -0.5 and last[2] > first[2] + 1
        else:
            assert last[1] > first[1] + 1


def test_actors_learn_one_after_the_other():
    """Each step changes one actor; who comes later sees the new actions of the earlier ones."""
    world, game, args = small_world(num_envs=4, horizon=2, learning_rate=1e-2)
    for actor in world.actors:  # with hardly any noise, so that actions say whose they are
        actor[-1].weight.data[5:] = 0
        actor[-1].bias.data[5:] = -20
    learner = seqwm.Learner(world, WorldModel(game, args), args)
    latents = world.encode(game.observations).detach().repeat(1, 2, 1)
    old = world.mean_actions(latents)
    seen, original = [], world.values
    world.values = lambda z, a: seen.append(a.detach().clone()) or original(z, a)
    before = [[x.clone() for x in actor.parameters()] for actor in world.actors]
    others = [x.clone() for x in [*world.critics.parameters(), *world.encoder.parameters()]]
    seqwm.update_actors(learner, latents, torch.ones(2, 4), 7, args)
    order = random.Random(seqwm.random_seed(args.seed, "order", 7)).sample(range(3), 3)
    assert len(seen) == 3
    new = world.mean_actions(latents)
    assert (new - old).abs().mean((1, 2)).min() > 3e-3
    for turn, actions in enumerate(seen):
        for place, agent in enumerate(order):
            close(actions[agent], (new if place < turn else old)[agent], 1e-3)
    assert all(any(not torch.equal(x, y) for x, y in zip(actor.parameters(), past)) for actor, past in zip(world.actors, before))
    assert all(torch.equal(x, y) for x, y in zip([*world.critics.parameters(), *world.encoder.parameters()], others))


def test_running_scale():
    """numpy's percentiles; a small spread counts as 1."""
    q = torch.randn(101) * 30
    spread = np.percentile(q.numpy(), 95) - np.percentile(q.numpy(), 5)
    close(seqwm.running_scale(torch.tensor(2.0), q), 0.99 * 2 + 0.01 * spread, 1e-5)
    close(seqwm.running_scale(torch.tensor(2.0), q * 1e-3), 0.99 * 2 + 0.01, 1e-5)


def test_a_long_evaluation_says_so(monkeypatch, capsys):
    world, game, args = small_world(planner="none")
    game.step = lambda actions: (torch.zeros(4), None, torch.tensor([True, False, False, False]), None)
    monkeypatch.setattr(seqwm, "evaluation_game", lambda args, device: game)
    monkeypatch.setattr(seqwm, "MOST_STEPS", 1001)
    seqwm.play_games(world, args, torch.device("cpu"))
    assert "3 games go on after 1,000 steps: give the game a time limit, or take fewer --eval-episodes" in capsys.readouterr().out


# --- The game ---


@pytest.mark.parametrize("agents", [1, 3])
def test_game_is_that_of_mpe(agents):
    """Positions, observations, rewards and collisions of mpe2.simple_spread_v3 in games of 25 steps."""
    spread = pytest.importorskip("mpe2.simple_spread_v3")
    game = SimpleSpread(6, 0, "cpu", agents)
    game.positions *= 0.3  # close to each other, so that they collide
    game.observations = game.describe()
    envs = [spread.parallel_env(N=agents, continuous_actions=True) for _ in range(6)]
    for number, env in enumerate(envs):
        env.reset(seed=0)
        world = env.unwrapped.world
        for who, agent in enumerate(world.agents):
            agent.state.p_pos = game.positions[number, who].double().numpy().copy()
            world.landmarks[who].state.p_pos = game.landmarks[number, who].double().numpy().copy()
    touched = 0
    for t in range(25):
        actions = 2 * torch.rand(6, agents, 5) - 1
        rewards, ended, over, seen = game.step(actions)
        for number, env in enumerate(envs):
            pushes = {name: ((actions[number, who] + 1) / 2).numpy() for who, name in enumerate(env.agents)}
            observations, gains, terminated, truncated, _ = env.step(pushes)
            close(seen[number], np.stack(list(observations.values())), 1e-3)
            close(rewards[number], np.mean(list(gains.values())), 1e-3)
            touched += min(gains.values()) < max(gains.values()) - 1e-9
            assert not ended[number] and not any(terminated.values())
            assert bool(over[number]) == all(truncated.values()) == (t == 24)
    assert touched or agents == 1
    assert game.clock == 0 and (game.velocities == 0).all() and not torch.equal(game.observations, seen)
