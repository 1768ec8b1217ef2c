"""FM3Q: one step of the released learner, QMIX's mixer with signs, games with exact answers, and their limits."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from algorithms import fm3q
from algorithms.fm3q import Args, Mixer, Networks, make_game, nash_conv, td_loss, train_exploiter
from envs.two_team import MATRIX_GAMES, arat_game, joint_actions, matrix_game, minimax_values

REFERENCE = Path(__file__).parent / "reference/fm3q.json"
CASES = {case["case"]: case for case in json.loads(REFERENCE.read_text())}
NAMES = ("additive", "product", "climbing", "pennies", "rock_paper_scissors", "saddle")
GAMES = dict(zip(NAMES, CASES["matrix_games"]["games"]))
ARAT = CASES["ARAT_markov_game_2v2"]


def close(found, expected, tolerance=1e-6):
    expected = torch.tensor(expected, dtype=torch.float64)
    found = torch.as_tensor(found).detach().double()
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def released_network(params: dict) -> nn.Sequential:
    """The released code's MLP, with a case's weights."""
    layers = [nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)]
    for number, layer in zip((1, 2, 3), layers[::2]):
        layer.weight.data = torch.tensor(params[f"fc{number}.weight"])
        layer.bias.data = torch.tensor(params[f"fc{number}.bias"])
    return nn.Sequential(*layers)


def test_reference_step_of_the_released_learner():
    """bithgz/fm3q at 9e598d6, FM3Q.train_q: values, targets, loss, gradient norm, new weights."""
    case = CASES["official_pairwise_update"]
    online = released_network(case["eval_params"])
    target = released_network(case["target_params"])
    batch = {name: torch.tensor(values) for name, values in case["batch"].items()}
    q, next_q = online(batch["o"]), target(batch["o_next"])
    close(q, case["q_eval_all"])
    chosen = q.gather(2, batch["u"])[..., 0]
    values = chosen[:, :2] - chosen[:, 2:]
    outcome = batch["r"][:, 0], batch["terminated"][:, 0], next_q[:, :2], next_q[:, 2:]
    targets = fm3q.pairwise_targets(*outcome, 0.99)
    close(values, case["q_total_eval"])
    close(targets, case["targets"])
    loss = td_loss(values, targets)
    close(loss, case["loss"], 1e-5)
    loss.backward()
    assert all(parameter.grad is None for parameter in target.parameters())
    norm = nn.utils.clip_grad_norm_(online.parameters(), 10)
    close(norm, case["grad_norm_before_clip"], 1e-5)
    torch.optim.RMSprop(online.parameters(), 5e-4).step()
    after = released_network(case["eval_params_after"])
    for found, expected in zip(online.parameters(), after.parameters()):
        close(found, expected.tolist())


def test_reference_sums_of_teams():
    """The same batch with signed sums (closed form): `--mixer vdn`."""
    pairs, case = CASES["official_pairwise_update"], CASES["team_sum_variant_same_inputs"]
    batch = {name: torch.tensor(values) for name, values in pairs["batch"].items()}
    next_q = torch.tensor(pairs["q_target_next_all"])
    mixer, state = Mixer("vdn", 2, 2, 1), torch.zeros(4, 1)
    outcome = batch["r"][:, 0], batch["terminated"][:, 0], next_q[:, :2], next_q[:, 2:]
    targets = fm3q.minimax_targets(*outcome, state, mixer, 0.99)
    close(targets, case["targets"], 1e-5)
    chosen = torch.tensor(pairs["q_eval_all"]).gather(2, batch["u"])[..., 0]
    values = mixer(chosen[:, :2], chosen[:, 2:], state)
    close(values, case["q_tot"], 1e-5)
    close(td_loss(values, targets), case["loss"], 1e-4)


def signed_mixer() -> Mixer:
    mixer, case = Mixer("qmix", 2, 2, 3, embed_dim=2), CASES["signed_monotone_mixer"]
    mixer.load_state_dict({name: torch.tensor(x) for name, x in case["params"].items()})
    return mixer


def test_reference_mixer_of_pymarl():
    """oxwhirl/pymarl QMixer fed with signed utilities: values and gradients."""
    case = CASES["signed_monotone_mixer"]
    q = torch.tensor(case["q_individual"], requires_grad=True)
    values = signed_mixer()(q[:, :2], q[:, 2:], torch.tensor(case["states"]))
    close(values, case["q_tot"])
    values.sum().backward()
    close(q.grad, case["dqtot_dq"], 1e-5)


def enumerate_joint(mixer: Mixer, pro, ant, state) -> torch.Tensor:
    """Joint values (A^n,A^m) of utilities (n,A) and (m,A) in one state."""
    rows = torch.cartesian_prod(*pro).view(-1, len(pro))  # (A^n,n)
    columns = torch.cartesian_prod(*ant).view(-1, len(ant))  # (A^m,m)
    a, b = len(rows), len(columns)
    states = state.expand(a * b, -1)
    return mixer(rows.repeat_interleave(b, 0), columns.repeat(a, 1), states).view(a, b)


def test_reference_enumeration_of_the_mixer():
    """All 81 joint actions: min max = max min = the value at everybody's own best action."""
    found = CASES["signed_monotone_mixer"]["enumeration"]
    states = torch.tensor(CASES["signed_monotone_mixer"]["states"])
    utilities, state = torch.tensor(found["utilities"]), states[found["state_index"]]
    table = enumerate_joint(signed_mixer(), utilities[:2], utilities[2:], state)
    close(table.amax(0).amin(), found["minmax"])
    close(table.amin(1).amax(), found["minmax"])
    assert utilities.argmax(1).tolist() == found["individual_greedy"]
    best = utilities.amax(1)[None]
    close(signed_mixer()(best[:, :2], best[:, 2:], state[None])[0], found["q_tot_at_greedy"])


def test_reference_fixed_point_of_the_released_loss():
    """Least squares on pairwise_targets of uniformly random play of the small ARAT game, until nothing changes."""
    case = ARAT["official_pairwise_fixed_point_uniform_data"]
    rewards, transitions, _ = arat_game("small")
    pro, ant = torch.zeros(2, 3, 2, 2, dtype=torch.float64)  # (S,2,K) each
    zeros = torch.zeros(3, dtype=torch.float64)
    for _ in range(300):
        later = fm3q.pairwise_targets(zeros, zeros, pro, ant, 0.9)  # (S,2)
        targets = (rewards[..., None] + transitions @ later).view(3, 2, 2, 2, 2, 2)  # s, a, a, b, b, pair
        first, second = targets[..., 0].mean((2, 4)), targets[..., 1].mean((1, 3))  # (S,K,K): a_i, b_i
        tables = torch.stack([first, second], 1)
        pro = tables.mean(3)
        ant = tables.mean((2, 3))[..., None] - tables.mean(2)
    best = pro.amax(2), ant.amax(2)
    close(best[0] - best[1], case["V_pair_state_by_pair"], 1e-7)
    close(Mixer("pairwise", 2, 2, 3)(*best, torch.eye(3)), torch.tensor(case["V_pair_state_by_pair"]).mean(1).tolist())
    assert torch.cat([pro, ant], 1).argmax(2).tolist() == case["greedy_actions_a1_a2_b1_b2"]


@pytest.mark.parametrize("kind", ["vdn", "qmix", "twin", "pairwise"])
def test_own_best_actions_are_the_minimax(kind):
    """IGMM by enumeration, for 100 random mixers and utilities; and the signs of derivatives."""
    for trial in range(100):
        torch.manual_seed(trial)
        n, m = torch.randint(1, 3, (2,)).tolist()
        m = n if kind == "pairwise" else m
        mixer, state = Mixer(kind, n, m, 3, 4), 2 * torch.randn(3)
        pro, ant = 2 * torch.randn(n, 3), 2 * torch.randn(m, 3)
        table = enumerate_joint(mixer, pro, ant, state)
        own = mixer(pro.amax(1)[None], ant.amax(1)[None], state[None])[0]
        torch.testing.assert_close(table.amax(0).amin(), own, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(table.amin(1).amax(), own, atol=1e-5, rtol=1e-5)
        pro_q, ant_q = pro[None, :, 0].requires_grad_(), ant[None, :, 0].requires_grad_()
        mixer(pro_q, ant_q, state[None]).sum().backward()
        assert (pro_q.grad >= 0).all() and (ant_q.grad <= 0).all()


@pytest.mark.parametrize("name", sorted(MATRIX_GAMES))
def test_reference_matrix_games(name):
    """Payoffs, pure values, payoff and NashConv of the additive class's greedy actions."""
    case, (rewards, transitions, teams) = GAMES[name], matrix_game(name)
    payoff, expected = rewards[0], case["additive_least_squares"]
    close(payoff.flatten(), torch.tensor(case["payoff"]).flatten().tolist())
    close(payoff.amax(0).amin(), case["pure_minmax"])
    close(payoff.amin(1).amax(), case["pure_maxmin"])
    greedy = torch.tensor([expected["individual_greedy"]])
    pro, ant = joint_actions(greedy, teams, round(len(payoff) ** (1 / teams[0])))
    close(payoff[pro, ant][0], expected["true_payoff_at_greedy"])
    close(nash_conv(rewards, transitions, 0.9, pro, ant)[0], expected["nashconv_at_greedy"])


def test_reference_arat():
    """Values, joint values, value iterates and greedy actions (value iteration, Shapley)."""
    rewards, transitions, _ = arat_game("small")
    values = minimax_values(rewards, transitions, 0.9)
    close(values, ARAT["V_star"], 1e-7)
    close((rewards + 0.9 * transitions @ values).view(3, 2, 2, 2, 2), ARAT["Q_star"], 1e-7)
    values = torch.zeros(3, dtype=torch.float64)
    for expected in ARAT["minimax_value_iterates_from_zero"]:
        values = (rewards + 0.9 * transitions @ values).amax(1).amin(1)
        close(values, expected, 1e-7)
    greedy = joint_actions(torch.tensor(ARAT["greedy_actions_a1_a2_b1_b2"]), (2, 2), 2)
    assert nash_conv(rewards, transitions, 0.9, *greedy).abs().max() < 1e-9


@pytest.mark.parametrize("number", range(len(ARAT["policy_evaluation_cases"])))
def test_reference_nash_conv(number):
    case = ARAT["policy_evaluation_cases"][number]
    rewards, transitions, _ = arat_game("small")
    actions = joint_actions(torch.tensor(case["actions_per_state"]), (2, 2), 2)
    close(nash_conv(rewards, transitions, 0.9, *actions), case["nashconv"], 1e-7)


def fit(name: str, kind: str, steps: int) -> tuple[float, float]:
    """Free utilities and a mixer fitted to a matrix game: mean squared error, NashConv."""
    torch.manual_seed(0)
    rewards, transitions, (n, m) = matrix_game(name)
    size = round(rewards.size(1) ** (1 / n))
    mixer = Mixer(kind, n, m, 1)
    utilities = nn.Parameter(0.1 * torch.randn(n + m, size))
    bias = nn.Parameter(torch.zeros(()))
    joint = torch.cartesian_prod(*[torch.arange(size)] * (n + m))  # all joint actions
    optimizer = torch.optim.Adam([*mixer.parameters(), utilities, bias], 0.05, fused=True)
    agents, state, payoff = torch.arange(n + m), torch.ones(len(joint), 1), rewards.flatten().float()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / steps)
        q = utilities[agents, joint]
        loss = td_loss(mixer(q[:, :n], q[:, n:], state) + bias, payoff)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    greedy = joint_actions(utilities.argmax(1)[None], (n, m), size)
    return loss.item(), nash_conv(rewards, transitions, 0.9, *greedy)[0].item()


@pytest.mark.parametrize(
    "name, kind, error, exploitability",
    [
        ("additive", "vdn", 0, 0),
        ("product", "vdn", 1.0625, 0),
        ("product", "qmix", 0.0625, 0),  # t^2 / 16: one convex network cannot fit - h1 h2
        ("product", "twin", 0, 0),
        ("climbing", "vdn", 101.136, 16),  # the limit of the class
        ("pennies", "vdn", 1, 2),  # no pure saddle point
    ],
)
def test_reference_limits_of_the_mixers(name, kind, error, exploitability):
    """Closed forms."""
    found, conv = fit(name, kind, 300 if kind == "vdn" else 600)
    assert found == pytest.approx(error, abs=2e-3 if kind == "vdn" else 0.02)
    assert conv == pytest.approx(exploitability, abs=1e-9)


def uniform_learner(**flags):
    """A learner with 20,000 transitions of random play of the small ARAT game."""
    sizes = {"num_envs": 500, "buffer_size": 20_000, "hidden_size": 32, "batch_size": 128}
    args = Args(**sizes | flags)
    torch.manual_seed(args.seed)
    game = make_game(args, args.num_envs, args.seed, "cpu")
    learner = fm3q.Learner(Networks(game, args), Networks(game, args), args)
    for _ in range(40):
        learner.collect(game, game.random_actions())
    return learner, args


def update(learner: fm3q.Learner, args: Args, number: int) -> None:
    batch = learner.buffer.sample(args.batch_size)
    learner.gradient_step(fm3q.learner_loss(learner.online, learner.target, batch, args), number)


@pytest.mark.parametrize("tau", [1.0, 0.25])
def test_targets_follow_after_so_many_updates(tau):
    learner, args = uniform_learner(target_network_frequency=4, tau=tau)
    before = [parameter.clone() for parameter in learner.target.parameters()]
    for number in range(1, 5):
        assert all(map(torch.equal, before, learner.target.parameters())), number
        update(learner, args, number)
    new = learner.online.parameters()
    for old, found, online in zip(before, learner.target.parameters(), new):
        torch.testing.assert_close(found, (1 - tau) * old + tau * online)


def test_exploration_is_every_agent_by_itself():
    learner, args = uniform_learner()
    game = make_game(args, 20_000, 0, "cpu")
    best = learner.online.greedy(game.state)
    assert torch.equal(fm3q.act(learner.online, game, 0.0), best)
    other = fm3q.act(learner.online, game, 0.4) != best  # half of the random actions are the best ones
    assert other.float().mean(0).tolist() == pytest.approx([0.2] * 4, abs=0.02)
    assert (other[:, 0] & other[:, 2]).float().mean() == pytest.approx(0.04, abs=0.01)


def test_the_value_of_a_state_is_what_its_targets_have_in_the_mean():
    """Of pairs: each learns the team's whole reward, so a state is worth their mean and not their sum."""
    args = Args(env_id="arat_random", num_pro=2, num_ant=2, num_states=5, mixer="pairwise", hidden_size=8)
    networks = Networks(make_game(args, 4, 0, "cpu"), args)
    pro_q, ant_q = networks.utilities(networks.game.state).split(2, 1)
    targets = fm3q.pairwise_targets(torch.zeros(4), torch.zeros(4), pro_q, ant_q, 1.0)
    torch.testing.assert_close(networks.value(networks.game.state), targets.mean(1))


@pytest.mark.parametrize("learner", ["fm3q", "pairwise", "selfplay_vdn", "selfplay_qmix", "iql"])
def test_loss_of_every_learner(learner):
    """Row by row in plain loops: whose action, whose reward, whose future, none after an end."""
    flags = {"learner": learner} if learner != "pairwise" else {"mixer": learner, "num_ant": 1}
    args = Args(env_id="pong", num_pro=1, hidden_size=8, embed_dim=4, **flags)
    players, rows, errors = 1 + args.num_ant, 6, []
    torch.manual_seed(0)
    game = make_game(args, 1, 0, "cpu")
    online, target = Networks(game, args), Networks(game, args).requires_grad_(False)
    batch = {name: torch.randn(rows, players + 4) for name in ("state", "next_state")}
    batch |= {"rewards": torch.randn(rows), "dones": torch.tensor([0, 1, 0, 0, 1, 0]) > 0}
    batch |= {"actions": torch.randint(3, (rows, players))}
    for row in range(rows):
        one = {name: values[row : row + 1] for name, values in batch.items()}
        reward, over = one["rewards"][0], one["dones"][0]
        q = online.utilities(one["state"])[0]
        after = target.utilities(one["next_state"])[0]
        chosen = torch.stack([q[i, action] for i, action in enumerate(one["actions"][0])])
        best = after.amax(1)
        if learner == "pairwise":
            errors.append(chosen[0] - chosen[1] - reward - 0.9 * (best[0] - best[1]) * ~over)
        elif learner == "iql":
            for sign, player in ((1, 0), (-1, 1), (-1, 2)):
                weight = 1 if player == 0 else 0.5**0.5  # the mean over a team
                errors.append(weight * (chosen[player] - sign * reward - 0.9 * best[player] * ~over))
        elif learner == "fm3q":
            future = target.mixer(best[None, :1], best[None, 1:], one["next_state"])[0]
            value = online.mixer(chosen[None, :1], chosen[None, 1:], one["state"])[0]
            errors.append(value - reward - 0.9 * future * ~over)
        else:
            for side, sign, own in ((0, 1, slice(0, 1)), (1, -1, slice(1, 3))):
                nobody = best[None, :0]
                future = target.team_mixers[side](best[None, own], nobody, one["next_state"])[0]
                value = online.team_mixers[side](chosen[None, own], nobody, one["state"])[0]
                errors.append(value - sign * reward - 0.9 * future * ~over)
    expected = sum(error.square().sum() for error in errors) / rows
    found = fm3q.learner_loss(online, target, batch, args)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    found.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in online.parameters())


class Masked:
    """Two agents that see two numbers and which of three actions are legal."""

    teams, num_actions, observation_dim, state_dim, masked, device = (1, 1), 3, 5, 10, True, "cpu"

    def observations(self, state):
        return state.view(-1, 2, 5)


def test_illegal_actions_are_neither_chosen_nor_counted_on():
    torch.manual_seed(0)
    networks = Networks(Masked(), Args(hidden_size=8))
    state = torch.randn(500, 2, 5)
    state[..., 2:] = torch.tensor([[1, 0, 1], [0, 1, 1]])
    state = state.flatten(1)
    q, greedy = networks.utilities(state), networks.greedy(state)
    assert (greedy[:, 0] != 1).all() and (greedy[:, 1] != 0).all()
    assert (q[:, 0, 1] == -torch.inf).all() and q[:, 0, [0, 2]].isfinite().all()
    batch = {"state": state, "next_state": state, "actions": greedy}
    batch |= {"rewards": torch.zeros(500), "dones": torch.zeros(500, dtype=torch.bool)}
    loss = fm3q.learner_loss(networks, networks, batch, Args(gamma=1.0))
    assert loss == 0, "the best legal actions were chosen, and their value is that of the target"


EXPLOITER = {"batch_size": 32, "learning_starts": 64, "num_envs": 32, "eval_games": 32}
EXPLOITER |= {"hidden_size": 16, "exploiter_learning_rate": 1e-2, "target_network_frequency": 2}


@pytest.mark.parametrize("game", ["pennies", "saddle"])
def test_exploiters_find_the_best_answers(game):
    """Matrix games, in which it is known what each side can gain."""
    args = Args(env_id=game, exploiter_steps=2560, **EXPLOITER)
    torch.manual_seed(3)
    team = Networks(make_game(args, 1, 0, "cpu"), args)
    pro, ant = team.greedy(team.game.state)[0].tolist()
    payoff = matrix_game(game)[0][0]
    gains = [train_exploiter(team, side, args, torch.device("cpu")) for side in (0, 1)]
    best = (payoff[:, ant].max() - payoff[pro, ant], payoff[pro, ant] - payoff[pro].min())
    assert gains == pytest.approx([x.item() for x in best], abs=1e-6) and max(gains) > 0


def test_a_time_limit_is_no_end_in_the_replay():
    args = Args(hidden_size=8, embed_dim=4, num_envs=2)
    game = fm3q.make_game(args, 2, 0, torch.device("cpu"))
    learner = fm3q.Learner(fm3q.Networks(game, args), fm3q.Networks(game, args), args)
    ends = torch.tensor([True, False]), torch.tensor([True, True])  # of the game, and with time limits
    game.step = lambda actions: (torch.zeros(2), *ends, game.state)
    _, over = learner.collect(game, fm3q.act(learner.online, game, 1.0))
    assert learner.buffer.columns["dones"][:2].tolist() == [True, False] and over.tolist() == [True, True]


@pytest.mark.parametrize("side", [0, 1])
def test_an_exploiter_changes_its_own_team_only(side):
    args = Args(env_id="pong", hidden_size=8)
    frozen = Networks(make_game(args, 1, 0, "cpu"), args)
    exploiter, state = fm3q.Exploiter(frozen, side, args), torch.randn(5, 8)
    before = frozen.utilities(state)
    assert torch.equal(exploiter.utilities(state), before), "it begins as a copy"
    for parameter in exploiter.parameters():
        parameter.data += torch.randn_like(parameter)
    assert torch.equal(frozen.utilities(state), before)
    changed = (exploiter.utilities(state) != before).flatten(2).any(2).any(0).tolist()
    assert changed == [side == 0] * 2 + [side == 1] * 2


def test_the_frozen_team_adds_nothing_to_the_loss():
    args = Args(learner="selfplay_qmix", num_envs=2)
    game = make_game(args, 2, 0, "cpu")
    exploiter = fm3q.Exploiter(Networks(game, args), 0, args)
    batch = {"state": game.state, "next_state": game.state, "actions": exploiter.greedy(game.state)}
    batch |= {"rewards": torch.ones(2), "dones": torch.zeros(2, dtype=torch.bool)}
    fm3q.learner_loss(exploiter, exploiter, batch, args).backward()
    learns = [mixer.V[0].weight.grad is not None for mixer in exploiter.team_mixers]
    assert learns == [True, False]


def test_a_gain_is_never_negative(monkeypatch):
    """A learning rate that ruins the exploiter: the team that it began as counts, or ball followers if they win."""
    args = Args(env_id="pong", exploiter_steps=256, **EXPLOITER | {"exploiter_learning_rate": 1e3})
    torch.manual_seed(0)
    team = Networks(make_game(args, 1, 0, "cpu"), args)
    before = [parameter.clone() for parameter in team.parameters()]
    assert train_exploiter(team, 0, args, torch.device("cpu")) > 0.5
    monkeypatch.setattr("envs.pong.tracker", fm3q.wanderer)
    assert train_exploiter(team, 0, args, torch.device("cpu")) == 0
    assert all(map(torch.equal, before, team.parameters())), "the frozen team stays"


def test_an_exploiter_is_scored_in_its_last_round_too(monkeypatch):
    """17 rounds: behind every third and the last; the frozen team and the ball followers before, two in the end."""
    calls = []
    monkeypatch.setattr(fm3q, "play_games", lambda *words: calls.append(words) or torch.zeros(32))
    args = Args(env_id="pong", exploiter_steps=17 * 32, **EXPLOITER)
    team = Networks(make_game(args, 1, 0, "cpu"), args)
    train_exploiter(team, 0, args, torch.device("cpu"))
    assert len(calls) == 2 + 6 + 2
