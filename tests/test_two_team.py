"""Games of two teams: pong against a plain game of its own, symmetry, rebounds and ends; tables, cuts and values."""

import math

import pytest
import torch

from envs.pong import DOWN, STAY, UP, Pong, tracker, wanderer
from envs.two_team import TabularGame, arat_game, joint_actions, matrix_game, minimax_values

TEAMS = [(2, 2), (1, 2), (3, 2)]
PARTS = ("paddles", "ball", "before", "velocity", "pace", "clock")
STARTED = 3 * (1 + math.cos(math.radians(40))) * 0.42  # the slowest that a ball begins, along the court

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


def still(game: Pong) -> torch.Tensor:
    return torch.full(game.paddles.shape, STAY)


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
            self.velocity = [
                direction * 3 * (math.cos(angle) + 1) * self.pace,
                8 * math.sin(angle) * self.pace,
            ]

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
                assert abs(x) == pytest.approx(3 * (math.cos(angle) + 1) * 0.42) and abs(x) >= STARTED - 1e-4
            else:
                for name in PARTS:
                    assert getattr(game, name)[number].tolist() == pytest.approx(after[name], abs=2e-3), name
            results.append(reward)
            hits += int(not anew and game.pace[number] > paces[number])
    assert min(results.count(1), results.count(-1)) > 0 and hits > 9, "both sides miss, and both kinds of ends come"


@pytest.mark.parametrize("teams", TEAMS[1:])
def test_left_and_right_are_alike(teams):
    """The mirrored court with teams and actions exchanged: opposite rewards, and everybody sees the same."""
    game, other = Pong(teams, 16, 1, "cpu"), Pong(teams[::-1], 16, 2, "cpu")
    swap = [*range(teams[0], sum(teams)), *range(teams[0])]  # players of `other` as those of `game`
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


@pytest.mark.parametrize("teams", TEAMS[::2])
def test_observations_are_in_range_and_paddles_in_their_strips(teams):
    """A missed ball is up to a frame behind the wall: 0.03 beyond 1."""
    game, generator = Pong(teams, 32, 3, "cpu"), torch.Generator().manual_seed(4)
    low = torch.cat([torch.arange(k) * 200 / k for k in teams])
    high = low + torch.cat([torch.full((k,), 200 / k) for k in teams])
    lowest, highest = game.paddles.clone(), game.paddles.clone()
    for step in range(60):
        actions = mixed_play(game, generator) if step < 30 else still(game) + 1 + step // 15 % 2
        _, _, seen = game.step(actions)
        for values in (*seen, *game.observe()):
            assert values.abs().max() < 1.03
        lowest, highest = torch.minimum(lowest, game.paddles), torch.maximum(highest, game.paddles)
    assert (lowest >= low + 10 - 1e-3).all() and (highest <= high - 10 + 1e-3).all()
    torch.testing.assert_close(lowest.amin(0), low + 10, atol=1e-3, rtol=0)
    torch.testing.assert_close(highest.amax(0), high - 10, atol=1e-3, rtol=0)


# --- Pong: one thing at a time ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [-12, -10, -5, 0, 5, 10, 12])
@pytest.mark.parametrize("side", [-1, 1])
def test_rebound(side, offset):
    """65 degrees times the offset in half paddles, a bit faster each time."""
    game = place(Pong((2, 2), 1, 0, "cpu"), paddles=[50, 150] * 2, ball=[100 + 88 * side, 50.0 + offset])
    place(game, velocity=[2.5 * side, 0])
    rewards, ends, _ = game.step(still(game))
    angle = math.radians(65) * max(-1, min(1, offset / 10))
    speed = [-side * 3 * (math.cos(angle) + 1) * 0.425, 8 * math.sin(angle) * 0.425]
    assert game.velocity[0].tolist() == pytest.approx(speed, abs=1e-5) and not ends and rewards == 0
    place(game, ball=[100 + 88 * side, 50], velocity=[2.5 * side, 0]).step(still(game))
    assert game.pace[0] == pytest.approx(0.43) and abs(game.velocity[0, 0]) == pytest.approx(6 * 0.43)


@pytest.mark.parametrize("side", [-1, 1])
def test_a_miss_ends_the_rally(side):
    game = place(Pong((2, 2), 1, 0, "cpu"), paddles=[60, 140] * 2, ball=[100 + 91 * side, 80], velocity=[2.5 * side, 0])
    outcomes = [game.step(still(game)) for _ in range(2)]  # 7.5 in the first step, and over the wall in the second
    assert [(rewards.item(), ends.item()) for rewards, ends, _ in outcomes] == [(0, False), (side, True)]
    _, state = outcomes[1][2]
    assert state[0, 4] == pytest.approx(side * 1.01) and state[0, 6] == pytest.approx(0.985 * side), "before it began"
    assert game.ball.tolist() == [[100, 100]] and game.clock.tolist() == [0] and game.pace[0] == pytest.approx(0.42)


def test_the_nearest_paddle_strikes():
    game = place(Pong((2, 2), 1, 0, "cpu"), paddles=[90, 110] * 2, ball=[12, 98], velocity=[-2.5, 0])
    game.step(still(game))
    assert game.velocity[0, 1] == pytest.approx(8 * math.sin(math.radians(65 * 0.8)) * 0.425)


def test_walls_reflect():
    for start, speed in ((4, -2), (196, 2)):
        game = place(Pong((2, 2), 1, 0, "cpu"), ball=[100, start], velocity=[2.5, speed])
        game.step(still(game))
        wall = 2.5 if start < 100 else 197.5
        assert game.velocity.tolist() == [[2.5, -speed]] and game.ball.tolist() == [[107.5, wall - 2 * speed]]


def test_a_cut_is_no_end():
    game = Pong((1, 1), 4, 0, "cpu", horizon=3)
    for step in range(1, 7):
        rewards, ends, (_, state) = game.step(still(game))
        assert (rewards == 0).all() and not ends.any() and (state[:, 2] != 0).all()
        assert game.clock.tolist() == [step % 3] * 4 and (game.ball[:, 0] == 100).all() == (step % 3 == 0)


def test_actions_move_paddles():
    game = Pong((1, 2), 1, 0, "cpu")
    game.step(torch.tensor([[UP, DOWN, STAY]]))
    assert game.paddles.tolist() == [[91, 59, 150]]


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
    shares = torch.bincount(tracker(game, error=1.0).flatten()) / 8000
    assert shares.tolist() == pytest.approx([1 / 3] * 3, abs=0.03)
    assert (torch.bincount(wanderer(game).flatten()) / 8000).tolist() == pytest.approx([1 / 3] * 3, abs=0.03)


def test_picture():
    game = place(Pong((1, 2), 2, 0, "cpu"), paddles=[100, 50, 150], ball=[30, 70])
    picture = game.picture(1)
    assert picture.shape == (200, 200, 3) and picture.dtype == torch.uint8
    assert [picture[y, 7].tolist() for y in (100, 89, 110)] == [[80, 160, 255], [0] * 3, [0] * 3]
    assert [picture[y, 192].tolist() for y in (50, 150, 100)] == [[255, 160, 60]] * 2 + [[0] * 3]
    white = (picture == 255).all(-1).nonzero()
    assert white.amin(0).tolist() == [68, 28] and white.amax(0).tolist() == [72, 32]
    for corner in (-3.0, 203.0):
        assert (place(game, ball=[corner, corner]).picture() == 255).all(-1).sum() == 25


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
    for _ in range(5):
        before = game.states
        actions = torch.arange(800).view(400, 2) // torch.tensor([4, 2]) % 2
        rewards, ends, _ = game.step(actions)
        both = actions[:, 0] * actions[:, 1] == 1
        assert torch.equal(ends, both & (before == 4)) and ends.any()
        assert torch.equal(rewards, (10 * before + 2 * actions[:, 0] + actions[:, 1]).float())
        assert (game.clock[ends] == 0).all() and (game.clock[~ends] > 0).all()
        assert len(game.states[ends].unique()) > 3 and torch.equal(game.states[~ends], (before[~ends] + 1) % 5)


def test_joint_actions():
    """The first player's digit stands in front, as in the flattened tables; teams need not be equal."""
    actions = torch.tensor([[1, 0, 2, 0, 1], [2, 2, 2, 2, 2]])
    pro, ant = joint_actions(actions, (2, 3), 3)
    assert pro.tolist() == [3, 8] and ant.tolist() == [19, 26]
    rewards, transitions, teams = arat_game("small")
    alone = torch.tensor([[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    place = tuple(joint_actions(alone, teams, 2))
    gains = rewards[0][place] - rewards[0, 0, 0]  # state 0: what each player's second action changes
    assert gains.tolist() == [0, -1, 2, -1, 1]
    moved = transitions[0][place] - transitions[0, 0, 0]
    shifts = [[0, 0, 0], [0.1, -0.1, 0], [0, 0.1, -0.1], [-0.1, 0, 0.1], [0, -0.1, 0.1]]
    torch.testing.assert_close(moved, torch.tensor(shifts, dtype=torch.float64))


def test_large_game():
    """The same for the same seed; every player matters, and none depends on another."""
    (rewards, transitions, teams), other = arat_game("large"), arat_game("large", 1)
    assert torch.equal(arat_game("large")[0], rewards) and not torch.equal(other[0], rewards) and teams == (3, 3)
    assert transitions.min() >= 0 and other[1].sum(-1).sub(1).abs().max() < 1e-9
    for table in (rewards.view(50, *[4] * 6), transitions[..., 0].view(50, *[4] * 6)):
        for player in range(1, 7):
            changes = table.diff(dim=player).flatten(1)
            assert changes.abs().max() > 0.01
            for rival in set(range(1, 7)) - {player}:
                assert table.diff(dim=player).diff(dim=rival).abs().max() < 1e-9


def test_minimax_values():
    """Closed forms: the best answer is given by the protagonists, and a reward for ever is worth r / (1 - gamma)."""
    for name, value in (("pennies", 1), ("saddle", 1), ("climbing", 0), ("product", 5)):
        rewards, transitions, _ = matrix_game(name)
        assert minimax_values(rewards, transitions, 0.9).tolist() == [value]
        for gamma in (0.9, 0.999):  # the same for ever
            found = minimax_values(rewards, torch.ones_like(transitions), gamma)
            assert found.item() == pytest.approx(value / (1 - gamma), rel=1e-6)
    rewards, transitions, _ = arat_game("small")
    values = minimax_values(rewards, transitions, 0.999)
    torch.testing.assert_close((rewards + 0.999 * transitions @ values).amax(1).amin(1), values, atol=1e-6, rtol=1e-6)


# --- Both ------------------------------------------------------------------------------------------------------------

GAMES = [
    lambda seed: Pong((1, 2), 6, seed, "cpu", horizon=30),
    lambda seed: TabularGame(*arat_game("small"), 6, seed, "cpu"),
]


@pytest.mark.parametrize("make", GAMES, ids=["pong", "tables"])
def test_a_state_that_was_kept_has_the_same_future(make):
    def play(game, seed: int, steps: int) -> list:
        generator, seen = torch.Generator().manual_seed(seed), []
        for _ in range(steps):
            actions = torch.randint(game.num_actions, (6, sum(game.teams)), generator=generator)
            rewards, ends, last = game.step(actions)
            seen += [rewards, ends, *last, *game.observe()]
        return seen

    game, other = make(1), make(2)
    play(game, 0, 9)
    kept = game.state_dict()
    future = play(game, 1, 35)
    assert not all(map(torch.equal, future, play(other, 1, 35))), "another seed is another game"
    other.load_state_dict(kept)
    assert all(map(torch.equal, future, play(other, 1, 35)))
    again = make(1)
    play(again, 0, 9)
    assert all(map(torch.equal, future, play(again, 1, 35))), "nothing but the seed matters"
