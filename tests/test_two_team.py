"""Games of two teams: pong against a plain game of its own, symmetry, rebounds and ends; tables, cuts and values."""

import math

import pytest
import torch

from envs.pong import DOWN, STAY, UP, Pong, tracker, wanderer
from envs.two_team import TabularGame, arat_game, joint_actions, matrix_game, minimax_values

TEAMS = [(2, 2), (3, 2)]
PARTS = ("paddles", "ball", "before", "velocity", "pace", "clock")

# --- Means -----------------------------------------------------------------------------------------------------------


def mixed_play(game: Pong, generator: torch.Generator) -> torch.Tensor:
    """Every paddle follows the ball a third of the time, else it moves at random: long rallies and misses. (E,n+m)"""
    random = torch.randint(3, game.paddles.shape, generator=generator)
    return torch.where(torch.rand(game.paddles.shape, generator=generator) < 0.35, tracker(game), random)


def place(game: Pong, **values) -> Pong:
    """The same state in all copies: a list for each of paddles, ball, velocity."""
    for name, value in values.items():
        old = getattr(game, name)
        setattr(game, name, torch.tensor(value, dtype=old.dtype).expand_as(old).clone())
    return game


class PlainPong:
    """One game in Python's own numbers, written after the rules of Wimblepong."""

    def __init__(self, teams: tuple[int, int], horizon: int):
        self.teams, self.horizon = teams, horizon

    def copy(self, game: Pong, number: int) -> None:
        """The state of one of many games."""
        for name in PARTS:
            setattr(self, name, getattr(game, name)[number].tolist())

    def strip(self, player: int) -> tuple[float, float]:
        """The lowest and the highest that the middle of a paddle goes."""
        n, m = self.teams
        place, size = (player, n) if player < n else (player - n, m)
        return 200 / size * place + 10, 200 / size * (place + 1) - 10

    def frame(self, actions: list[int]) -> int:
        for player, action in enumerate(actions):
            low, high = self.strip(player)
            moved = self.paddles[player] + {STAY: 0, UP: -3, DOWN: 3}[action]
            self.paddles[player] = min(max(moved, low), high)
        self.ball = [self.ball[0] + self.velocity[0], self.ball[1] + self.velocity[1]]
        if self.ball[1] < 2.5 or self.ball[1] > 197.5:
            self.velocity[1] = -self.velocity[1]
            self.ball[1] = 2.5 if self.ball[1] < 2.5 else 197.5
        x, y = self.ball
        if self.velocity[0] < 0 and x <= 10:
            self.strike(self.paddles[: self.teams[0]], y, 1)
        elif self.velocity[0] > 0 and x >= 190:
            self.strike(self.paddles[self.teams[0] :], y, -1)
        return 1 if x >= 200 else -1 if x <= 0 else 0

    def strike(self, paddles: list[float], y: float, direction: int) -> None:
        offset = min((y - paddle for paddle in paddles), key=abs)
        if abs(offset) <= 12.5:
            angle = math.radians(65) * max(-1, min(1, offset / 10))
            self.pace += 0.005
            along, across = direction * 3 * (math.cos(angle) + 1), 8 * math.sin(angle)
            self.velocity = [along * self.pace, across * self.pace]

    def step(self, actions: list[int]) -> tuple[int, bool]:
        """Reward, and whether a new rally begins; the state stays as it is before that."""
        self.before, reward = self.ball, 0
        for _ in range(3):
            if not reward:
                reward = self.frame(actions)
            else:  # the ball lies where it is, paddles finish the step
                x, y = self.ball
                self.velocity, ball = [0.0, 0.0], (x, y)
                self.frame(actions)
                self.ball = list(ball)
        self.clock += 1
        return reward, reward != 0 or self.clock >= self.horizon

    def observation(self) -> list[list[float]]:
        """What every player sees."""
        (n, m), rows = self.teams, []
        for player in range(n + m):
            left = player < n
            team, others = (range(n), range(n, n + m)) if left else (range(n, n + m), range(n))
            order = [player] + [mate for mate in team if mate != player] + list(others)
            ball = [x if left or i % 2 else 200 - x for i, x in enumerate([*self.ball, *self.before])]
            rows.append([value / 100 - 1 for value in [*(self.paddles[i] for i in order), *ball]])
        return rows


# --- Pong: all of it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("teams", TEAMS)
def test_a_step_is_that_of_a_plain_game(teams):
    """Three games side by side, 200 steps each: state, rewards, ends, observations, and how rallies begin."""
    game, generator, horizon = Pong(teams, 3, 5, "cpu", horizon=60), torch.Generator().manual_seed(1), 60
    plain, results, hits = PlainPong(teams, horizon), [], 0
    for _ in range(200):
        actions, expected = mixed_play(game, generator), []
        paces = game.pace.clone()
        for number in range(3):
            plain.copy(game, number)
            reward, anew = plain.step(actions[number].tolist())
            expected.append((reward, anew, plain.observation(), {name: getattr(plain, name) for name in PARTS}))
        rewards, ends, (observations, state) = game.step(actions)
        for number, (reward, anew, seen, after) in enumerate(expected):
            assert rewards[number] == reward and ends[number] == (reward != 0)
            assert observations[number].flatten().tolist() == pytest.approx(sum(seen, []), abs=2e-5)
            places = [x / 100 - 1 for x in (*after["paddles"], *after["ball"], *after["before"])]
            assert state[number].tolist() == pytest.approx(places, abs=2e-5)
            if anew:
                middle = [sum(plain.strip(player)) / 2 for player in range(sum(teams))]
                assert game.paddles[number].tolist() == pytest.approx(middle, abs=1e-4)
                assert game.ball[number].tolist() == game.before[number].tolist() == [100, 100]
                assert game.pace[number] == pytest.approx(0.42) and game.clock[number] == 0
                x, y = game.velocity[number].tolist()
                angle = math.asin(y / 6 / 0.42)
                assert abs(x) == pytest.approx(3 * (math.cos(angle) + 1) * 0.42)
            else:
                for name in PARTS:
                    assert getattr(game, name)[number].tolist() == pytest.approx(after[name], abs=2e-3), name
            results.append(reward)
            hits += int(not anew and game.pace[number] > paces[number])
    assert min(results.count(1), results.count(-1)) > 0 and hits > 9, "both sides miss, and both kinds of ends come"


def test_left_and_right_are_alike():
    """The mirrored court with teams and actions exchanged: opposite rewards, and everybody sees the same."""
    game, other = Pong((3, 2), 16, 1, "cpu"), Pong((2, 3), 16, 2, "cpu")
    swap = [3, 4, 0, 1, 2]  # players of `other` as those of `game`
    generator, found = torch.Generator().manual_seed(0), 0
    for _ in range(50):
        other.paddles, other.pace, other.clock = game.paddles[:, swap], game.pace, game.clock
        for name, place in (("ball", 200.0), ("before", 200.0), ("velocity", 0.0)):
            values = getattr(game, name)
            setattr(other, name, torch.stack([place - values[:, 0], values[:, 1]], 1))
        torch.testing.assert_close(other.observe()[0], game.observe()[0][:, swap], atol=1e-5, rtol=0)
        actions = mixed_play(game, generator)
        rewards, ends, (seen, _) = game.step(actions)
        rewards_there, ends_there, (seen_there, _) = other.step(actions[:, swap])
        assert torch.equal(rewards_there, -rewards) and torch.equal(ends_there, ends)
        torch.testing.assert_close(seen_there, seen[:, swap], atol=1e-5, rtol=0)
        found += ends.sum().item()
    assert found > 4


def test_rallies_begin_to_both_sides():
    velocity = Pong((2, 2), 4000, 0, "cpu").velocity
    assert (velocity[:, 0] > 0).float().mean() == pytest.approx(0.5, abs=0.03)
    angles = (velocity[:, 1] / 6 / 0.42).asin().rad2deg()
    assert angles.abs().max() == pytest.approx(40, abs=0.1) and angles.std() == pytest.approx(80 / 12**0.5, abs=0.5)


def test_tracker_beats_wanderer():
    """Of 32 games 26 are won in 120 steps and one is lost; `error` makes a wanderer of it."""
    for side in (0, 1):
        game, result, mine = Pong((2, 2), 32, 0, "cpu"), torch.zeros(32), torch.arange(4) // 2 == side
        for _ in range(120):
            rewards, _, _ = game.step(torch.where(mine, tracker(game), wanderer(game)))
            result = torch.where(result == 0, rewards, result)
        assert (result == (1, -1)[side]).sum() > 20 and (result == (-1, 1)[side]).sum() < 4
    game = place(Pong((2, 2), 2000, 0, "cpu"), ball=[100, 50])
    assert tracker(game).unique(dim=0).tolist() == [[STAY, UP] * 2]
    for actions in (tracker(game, error=1.0), wanderer(game)):
        assert (torch.bincount(actions.flatten()) / 8000).tolist() == pytest.approx([1 / 3] * 3, abs=0.03)


def test_picture():
    game = place(Pong((1, 2), 2, 0, "cpu"), paddles=[100, 50, 150], ball=[30, 70])
    picture = game.picture(1)
    assert picture[100, 7].tolist() == [80, 160, 255] and picture[89, 7].tolist() == [0] * 3
    assert [picture[y, 192].tolist() for y in (50, 150, 100)] == [[255, 160, 60]] * 2 + [[0] * 3]
    white = (picture == 255).all(-1).nonzero()
    assert white.amin(0).tolist() == [68, 28] and white.amax(0).tolist() == [72, 32]


# --- Tables ----------------------------------------------------------------------------------------------------------


def cycle(horizon: int, num_envs: int) -> TabularGame:
    """State s is followed by s + 1 of 5, whatever is done; reward 10 s + 2 a + b; 4 ends with joint action (1, 1)."""
    rewards = (10 * torch.arange(5).view(5, 1, 1) + torch.tensor([[0, 1], [2, 3]])).double()  # (5,2,2)
    transitions = torch.eye(5).roll(1, 1).double()[:, None, None].repeat(1, 2, 2, 1)  # (5,2,2,5)
    transitions[4, 1, 1] = 0
    return TabularGame(rewards, transitions, (1, 1), num_envs, 0, "cpu", horizon)


def test_cuts_are_staggered_and_no_ends():
    game = cycle(20, 400)
    for _ in range(45):
        before, actions = game.states, torch.tensor([[0, 1]]).expand(400, -1)
        rewards, ends, (seen, last) = game.step(actions)
        assert not ends.any() and torch.equal(rewards, 10 * before + 1.0)
        assert torch.equal(last.argmax(1), (before + 1) % 5), "what there was before the new game"
        assert torch.equal(seen, last[:, None].expand(-1, 2, -1))
        new = game.clock == 0
        assert new.sum() == 20, "a twentieth of the games in every step"
        assert torch.equal(game.states[~new], last.argmax(1)[~new]) and len(game.states[new].unique()) > 2


def test_ends_begin_a_new_game():
    game = cycle(10**6, 400)
    actions = torch.arange(800).view(400, 2) // torch.tensor([4, 2]) % 2
    both = actions.prod(1) == 1
    for _ in range(5):
        before = game.states
        rewards, ends, _ = game.step(actions)
        assert torch.equal(ends, both & (before == 4)) and ends.any()
        assert torch.equal(rewards, (10 * before + 2 * actions[:, 0] + actions[:, 1]).float())
        assert (game.clock[ends] == 0).all() and len(game.states[ends].unique()) > 3
        assert torch.equal(game.states[~ends], (before[~ends] + 1) % 5)


def test_joint_actions():
    """The first player's digit stands in front, as in the flattened tables; teams need not be equal."""
    actions = torch.tensor([[1, 0, 2, 0, 1], [2, 2, 2, 2, 2]])
    pro, ant = joint_actions(actions, (2, 3), 3)
    assert pro.tolist() == [3, 8] and ant.tolist() == [19, 26]
    rewards, _, teams = arat_game("small")
    alone = torch.tensor([[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    gains = rewards[0][tuple(joint_actions(alone, teams, 2))] - rewards[0, 0, 0]
    assert gains.tolist() == [0, -1, 2, -1, 1], "state 0: what each player's second action changes"


def test_large_game():
    """The same for the same seed; every player matters, none depends on another, and so pure play has a saddle."""
    (rewards, transitions, teams), other = arat_game("large"), arat_game("large", 1)
    assert torch.equal(arat_game("large")[0], rewards) and not torch.equal(other[0], rewards) and teams == (3, 3)
    assert rewards.shape == (50, 64, 64) and transitions.min() >= 0
    torch.testing.assert_close(transitions.sum(-1), torch.ones_like(rewards))
    for table in (rewards.view(50, *[4] * 6), transitions[..., 0].view(50, *[4] * 6)):
        for player in range(1, 7):
            assert table.diff(dim=player).abs().max() > 0.01
            for rival in set(range(1, 7)) - {player}:
                assert table.diff(dim=player).diff(dim=rival).abs().max() < 1e-9
    stage = rewards + 0.9 * transitions @ torch.randn(50, dtype=torch.float64)
    torch.testing.assert_close(stage.amax(1).amin(1), stage.amin(2).amax(1))


def test_minimax_values():
    """Closed forms: the best answer is given by the protagonists, and a reward for ever is worth r / (1 - gamma)."""
    for name, value in (("pennies", 1), ("saddle", 1), ("climbing", 0), ("product", 5)):
        rewards, transitions, _ = matrix_game(name)
        for ends, gamma, length in ((transitions, 0.9, 1), (torch.ones_like(transitions), 0.999, 1000)):
            found = minimax_values(rewards, ends, gamma)
            assert found.item() == pytest.approx(value * length, rel=1e-6)
