"""Games of two teams: pong against a plain game of its own, tables, and PettingZoo's environments."""

import importlib
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from algorithms import fm3q
from algorithms.fm3q import PettingZooGame, observed
from envs.pong import DOWN, STAY, UP, Pong, tracker
from envs.two_team import TabularGame, arat_game, random_arat_game

PARTS = ("paddles", "ball", "velocity", "pace", "clock")

def mixed_play(game: Pong, generator: torch.Generator) -> torch.Tensor:
    """Every paddle follows the ball a third of the time, else it moves at random. (E,N)"""
    random = torch.randint(3, game.paddles.shape, generator=generator)
    follow = torch.rand(game.paddles.shape, generator=generator) < 0.35
    return torch.where(follow, tracker(game), random)


class PlainPong:
    """One game in Python's own numbers, written after the rules of Wimblepong."""

    def __init__(self, game: Pong, number: int):
        self.teams = game.teams
        for name in PARTS:
            setattr(self, name, getattr(game, name)[number].tolist())

    def strip(self, player: int) -> tuple[float, float]:
        """The lowest and the highest that the middle of a paddle goes."""
        n, m = self.teams
        place, size = (player, n) if player < n else (player - n, m)
        return 200 / size * place + 10, 200 / size * (place + 1) - 10

    def frame(self, actions: list[int], playing: bool) -> int:
        for player, action in enumerate(actions):
            low, high = self.strip(player)
            moved = self.paddles[player] + {STAY: 0, UP: -3, DOWN: 3}[action]
            self.paddles[player] = min(max(moved, low), high)
        if not playing:
            return 0
        x, y = self.ball[0] + self.velocity[0], self.ball[1] + self.velocity[1]
        if y < 2.5 or y > 197.5:
            self.velocity[1] = -self.velocity[1]
            y = 2.5 if y < 2.5 else 197.5
        self.ball = [x, y]
        if self.velocity[0] < 0 and x <= 10:
            self.strike(self.paddles[: self.teams[0]], 1)
        elif self.velocity[0] > 0 and x >= 190:
            self.strike(self.paddles[self.teams[0] :], -1)
        return 1 if x >= 200 else -1 if x <= 0 else 0

    def strike(self, paddles: list[float], direction: int) -> None:
        offset = min((self.ball[1] - paddle for paddle in paddles), key=abs)
        if abs(offset) <= 12.5:
            angle = math.radians(65) * max(-1, min(1, offset / 10))
            self.pace += 0.005
            along, across = direction * 3 * (math.cos(angle) + 1), 8 * math.sin(angle)
            self.velocity = [along * self.pace, across * self.pace]

    def step(self, actions: list[int]) -> int:
        """The reward; the state stays as it is before a new rally."""
        self.before, reward = self.ball, 0
        for _ in range(3):
            reward += self.frame(actions, playing=reward == 0)
        self.clock += 1
        return reward

    def observations(self) -> list[float]:
        """What every player sees, one behind the other."""
        n, numbers = self.teams[0], []
        for player in range(sum(self.teams)):
            is_left = player < n
            team = [i for i in range(sum(self.teams)) if (i < n) == is_left]
            others = [i for i in range(sum(self.teams)) if (i < n) != is_left]
            order = [player, *(mate for mate in team if mate != player), *others]
            ball = [*self.ball, *self.before]
            ball = [x if is_left or i % 2 else 200 - x for i, x in enumerate(ball)]
            numbers += [x / 100 - 1 for x in [*(self.paddles[i] for i in order), *ball]]
        return numbers


@pytest.mark.parametrize("teams", [(2, 2), (3, 2)])
def test_a_step_of_pong_is_that_of_a_plain_game(teams):
    """Three games side by side: state, rewards, ends, observations, and how rallies begin."""
    game, generator = Pong(teams, 3, 5, "cpu", horizon=60), torch.Generator().manual_seed(1)
    results, hits = [], 0
    for _ in range(200):
        actions, paces = mixed_play(game, generator), game.pace
        plain = [PlainPong(game, number) for number in range(3)]
        expected = [one.step(row) for one, row in zip(plain, actions.tolist())]
        rewards, dones, over, state = game.step(actions)
        assert rewards.tolist() == expected and dones.tolist() == [x != 0 for x in expected]
        assert over.tolist() == [x != 0 or one.clock >= 60 for x, one in zip(expected, plain)]
        seen = game.observations(state).flatten(1)
        for number, one in enumerate(plain):
            assert seen[number].tolist() == pytest.approx(one.observations(), abs=2e-5)
            if not over[number]:
                for name in PARTS:
                    found = getattr(game, name)[number].tolist()
                    assert found == pytest.approx(getattr(one, name), abs=2e-3), name
                continue
            middle = [sum(one.strip(player)) / 2 for player in range(sum(teams))]
            assert game.paddles[number].tolist() == pytest.approx(middle, abs=1e-4)
            assert game.ball[number].tolist() == [100, 100] and game.clock[number] == 0
            x, y = game.velocity[number].tolist()
            assert abs(x) == pytest.approx(3 * (math.cos(math.asin(y / 6 / 0.42)) + 1) * 0.42)
        current = torch.cat([game.paddles, game.ball], 1) / 100 - 1
        torch.testing.assert_close(game.state[:, :-2], current)
        results += expected
        hits += int(((game.pace > paces) & ~over).sum())
    assert min(results.count(1), results.count(-1)) > 0 and hits > 9


def test_rallies_begin_to_both_sides():
    velocity = Pong((2, 2), 4000, 0, "cpu").velocity
    assert (velocity[:, 0] > 0).float().mean() == pytest.approx(0.5, abs=0.03)
    angles = (velocity[:, 1] / 6 / 0.42).asin().rad2deg()
    assert angles.abs().max() == pytest.approx(40, abs=0.1)
    assert angles.std() == pytest.approx(80 / 12**0.5, abs=0.5)


def cycle(horizon: int) -> TabularGame:
    """State s is followed by s + 1 of 5; reward 10 s + 2 a + b; 4 ends with joint action (1, 1)."""
    rewards = (10 * torch.arange(5).view(5, 1, 1) + torch.tensor([[0, 1], [2, 3]])).double()
    transitions = torch.eye(5).roll(1, 1).double()[:, None, None].repeat(1, 2, 2, 1)
    transitions[4, 1, 1] = 0
    return TabularGame(rewards, transitions, (1, 1), 400, 0, "cpu", horizon)


def test_cuts_are_staggered_and_no_ends():
    game, actions = cycle(20), torch.tensor([[0, 1]]).expand(400, -1)
    for _ in range(45):
        before = game.numbers
        rewards, dones, over, state = game.step(actions)
        assert not dones.any() and torch.equal(rewards, 10 * before + 1.0)
        assert torch.equal(state.argmax(1), (before + 1) % 5), "as before new games"
        assert over.sum() == 20, "a twentieth of the games in every step"
        assert torch.equal(game.state[~over], state[~over])
        assert len(game.numbers[over].unique()) > 2
        assert torch.equal(game.state.argmax(1), game.numbers)


def test_ends_begin_a_new_game():
    game = cycle(10**6)
    actions = torch.arange(800).view(400, 2) // torch.tensor([4, 2]) % 2
    for _ in range(5):
        before = game.numbers
        rewards, dones, over, _ = game.step(actions)
        assert torch.equal(dones, (actions.prod(1) == 1) & (before == 4)) and dones.any()
        assert torch.equal(over, dones) and len(game.numbers[dones].unique()) > 3
        assert torch.equal(rewards, (10 * before + 2 * actions[:, 0] + actions[:, 1]).float())


def test_tabular_game_moves_as_its_tables_say():
    rewards, transitions, teams = arat_game("small")
    game = TabularGame(rewards, transitions, teams, 4096, 0, "cpu")
    actions, counts, drawn = torch.tensor([[1, 0, 0, 1]]).expand(4096, -1), torch.zeros(3), 0
    for _ in range(10):
        before = game.numbers
        found, _, _, state = game.step(actions)
        torch.testing.assert_close(found, rewards[before, 2, 1].float())
        counts, drawn = counts + state[before == 0].sum(0), drawn + (before == 0).sum()
    torch.testing.assert_close(counts / drawn, transitions[0, 2, 1].float(), atol=0.02, rtol=0)


def test_random_additive_games():
    """The same for the same seed; every player matters, and none depends on another."""
    assert all(map(torch.equal, arat_game("large")[:2], random_arat_game(50, (3, 3), 0)[:2]))
    rewards, transitions, _ = random_arat_game(5, (1, 2), 1)
    assert not torch.equal(random_arat_game(5, (1, 2), 2)[0], rewards)
    torch.testing.assert_close(transitions.sum(-1), torch.ones_like(rewards))
    for table in (rewards.view(5, 4, 4, 4), transitions[..., 0].view(5, 4, 4, 4)):
        for player in (1, 2, 3):
            change = table.diff(dim=player)
            assert change.abs().max() > 0.01
            for rival in {1, 2, 3} - {player}:
                assert change.diff(dim=rival).abs().max() < 1e-9


class Space:
    def __init__(self, n: int):
        self.n = n


class Duel:
    """PettingZoo's interface. Runner 1 is terminated in step 2, everybody is truncated in step 3.

    If all agents choose their last action in step 1, the game is terminated.
    """

    possible_agents = ["adversary_0", "runner_0", "runner_1"]

    def action_space(self, agent: str) -> Space:
        return Space(3 if agent == "adversary_0" else 2)

    def see(self, agent: str):
        if agent == "adversary_0":
            return {"observation": np.full((2, 2), self.clock), "action_mask": [1, 0, 1]}
        return np.full(2, self.clock + 0.5)

    def reset(self, seed=None):
        self.agents, self.clock, self.seed = list(self.possible_agents), 0, seed
        return {agent: self.see(agent) for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions: dict):
        assert actions.keys() == set(self.agents)
        self.clock += 1
        last = {"adversary_0": 2, "runner_0": 1, "runner_1": 1}
        won = self.clock == 1 and all(actions[agent] == last[agent] for agent in self.agents)
        rewards = {"adversary_0": 1.0, "runner_0": 2.0, "runner_1": 6.0}
        rewards = {agent: rewards[agent] for agent in self.agents}
        ended = {agent: won or (agent == "runner_1" and self.clock == 2) for agent in self.agents}
        cut = {agent: self.clock == 3 for agent in self.agents}
        seen, infos = {agent: self.see(agent) for agent in self.agents}, {agent: {} for agent in self.agents}
        self.agents = [agent for agent in self.agents if not ended[agent] and not cut[agent]]
        return seen, rewards, ended, cut, infos


@pytest.fixture
def duel(tmp_path):
    (tmp_path / "duel.py").write_text("from tests.test_two_team import Duel\n\ndef make():\n    return Duel()\n")
    return f"{tmp_path / 'duel.py'}:make"


def test_observations_in_parts():
    """Of plain dictionaries in the order of their names; a mask beside the observation is no part of it."""
    parts = {"b": 3, "a": {"y": np.ones((2, 2)), "x": (5.0, [6.0])}}
    numbers, mask = observed("adversary_0", {"adversary_0": parts}, {})
    assert numbers.tolist() == [5, 6, 1, 1, 1, 1, 3] and mask == 1
    numbers, mask = observed("adversary_0", {"adversary_0": {"observation": parts, "action_mask": [0, 1]}}, {})
    assert len(numbers) == 7 and mask == [0, 1]


def run_of(folder, change: str, **flags) -> dict:
    """Scores of a short run of a duel that was changed."""
    (folder / "own.py").write_text(f"import numpy as np\nfrom tests.test_two_team import Duel\nclass Own(Duel):\n{change}\n")
    flags = {"total_timesteps": 48, "num_envs": 2, "learning_starts": 8, "hidden_size": 8, "embed_dim": 4, "batch_size": 4} | flags
    env_id = f"{folder / 'own.py'}:Own"
    return fm3q.train(fm3q.Args(env_id=env_id, eval_games=3, save_steps=0, output_dir=str(folder / "run"), **flags))


NUMBERS = "a reward or an observation is not a finite number"
TEAMS, FIVE = "give the environment `teams`, two lists", "step() must return five dicts"
STEP = "    def step(self, actions):\n        seen, rewards, ended, cut, infos = super().step(actions)\n"
ODD = {
    "nan": (STEP + "        return seen, dict.fromkeys(rewards, np.nan), ended, cut, infos", NUMBERS),
    "row of one": (STEP + "        return seen, {a: np.array([r]) for a, r in rewards.items()}, ended, cut, infos", ""),
    "named": ("    def see(self, agent): return {'b': 1, 'a': np.zeros(2)}", ""),
    "no infos": ("    def reset(self, seed=None): return super().reset(seed)[0]", "reset() must return observations and infos"),
    "grows": ("    def see(self, agent): return np.ones(2 + self.clock)", "observes 3 numbers, in the first game at most 2"),
    "four": (STEP + "        return seen, rewards, ended, infos", FIVE),
    "one reward": (STEP + "        return seen, 1.0, ended, cut, infos", FIVE),
    "nobody": ("    possible_agents = property()", "has no possible_agents"),
    "no teams": ("    teams = None", TEAMS),
    "three teams": ("    teams = ['adversary_0'], ['runner_0'], ['runner_1']", TEAMS),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_environments_train_or_are_one_sentence(kind, tmp_path):
    change, said = ODD[kind]
    if said:
        with pytest.raises(SystemExit) as stop:
            run_of(tmp_path, change)
        assert said in stop.value.code and "\n" not in stop.value.code
    else:
        assert np.isfinite(list(run_of(tmp_path, change).values())).all()


def test_evaluations_share_their_games_and_end(tmp_path, monkeypatch, capsys):
    """Of a game without an end; environments are made once, and closed when Python ends."""
    monkeypatch.setattr(fm3q, "MOST_STEPS", 20)
    made, closed, at_exit = [], [], []
    shared = importlib.import_module("tests.test_two_team").Duel  # what the file imports
    monkeypatch.setattr(shared, "__init__", lambda self: made.append(self))
    monkeypatch.setattr(shared, "close", lambda self: closed.append(self), raising=False)
    monkeypatch.setattr(fm3q.atexit, "register", at_exit.append)
    change = STEP + "        self.clock = 0\n        self.agents = list(self.possible_agents)\n"
    change += "        return seen, rewards, dict.fromkeys(seen, False), dict.fromkeys(seen, False), infos"
    scores = run_of(tmp_path, change, eval_steps=16)
    assert "3 games did not end in 20 steps" in capsys.readouterr().out
    assert scores["eval/wanderer/pro/return"] == pytest.approx(20 * (8 / 2 - 1))
    assert len(made) == 2 + 3
    for close in at_exit:
        close()
    assert len(closed) == 5


def test_a_long_evaluation_says_so(duel, monkeypatch, capsys):
    game = PettingZooGame(duel, 3, 0, "cpu")
    game.step = lambda actions: (torch.zeros(3), None, torch.tensor([True, False, False]), None)
    monkeypatch.setattr(fm3q, "evaluation_game", lambda args, device: game)
    monkeypatch.setattr(fm3q, "MOST_STEPS", 1001)
    fm3q.play_games(fm3q.wanderer, fm3q.wanderer, fm3q.Args(eval_games=3), 0, "cpu")
    assert "2 games go on after 1,000 steps: give the game a time limit, or take fewer --eval-games" in capsys.readouterr().out


def test_antagonists_have_adversary_in_their_name():
    env = SimpleNamespace(possible_agents=["leadadversary_0", "agent_0", "Adversary_1", "adversary_2"])
    assert fm3q.find_teams(env) == (["agent_0"], ["leadadversary_0", "Adversary_1", "adversary_2"])


def test_any_parallel_environment_is_a_game(duel):
    """Teams, padding, masks, rewards; the end of one agent, an end of all and a cut."""
    game = PettingZooGame(duel, 2, 0, "cpu")
    assert game.teams == (2, 1) and game.num_actions == 3 and game.observation_dim == 4 + 3
    begun = [[0.5, 0.5, 0, 0, 1, 1, 0]] * 2 + [[0, 0, 0, 0, 1, 0, 1]]
    assert game.observations(game.state).tolist() == [begun, begun]
    for _ in range(20):
        random = game.random_actions()
        assert (random[:, :2] < 2).all() and (random[:, 2] != 1).all()
    old = game.state
    rewards, dones, over, state = game.step(torch.tensor([[1, 1, 2], [0, 1, 2]]))
    assert rewards.tolist() == [4 - 1, 4 - 1], "the mean over a team, less that over the other"
    assert dones.tolist() == over.tolist() == [True, False]
    assert game.observations(game.state)[0].tolist() == begun
    assert torch.equal(game.state[1], state[1]) and not torch.equal(old[1], state[1])
    game.step(torch.tensor([[0, 0, 0], [0, 0, 0]]))
    gone = game.observations(game.state)[1, 1].tolist()
    assert gone == [0, 0, 0, 0, 1, 0, 0], "runner 1 has left game 1"
    rewards, dones, over, state = game.step(torch.tensor([[0, 0, 0], [0, 0, 0]]))
    assert rewards.tolist() == [3, 2 / 2 - 1] and dones.tolist() == [False, False]
    assert over.tolist() == [False, True], "a cut, after which the value of what was seen counts"
    assert game.observations(state)[1, 0].tolist() == [3.5, 3.5, 0, 0, 1, 1, 0]
