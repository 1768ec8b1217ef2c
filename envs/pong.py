"""Pong of two teams, batched in torch: Wimblepong's court and speeds, several paddles a side.

Protagonists are on the left, antagonists on the right. Each paddle moves in its own strip of the
court. The reward is 1 when the antagonists miss the ball, -1 when the protagonists do (Wimblepong:
10), and the game ends. The constants are those of github.com/aalto-intelligent-robotics/wimblepong,
which is played one against one.
"""

import math
import sys

import torch
from torch import Tensor

COURT = 200.0
PADDLE = 20.0  # length
BALL = 5.0
MARGIN = 10.0  # distance of paddles from the wall behind them
SPEED = 3.0  # of a paddle in a frame
FRAMES = 3  # in a step
START_PACE = 0.42  # of the ball; 0.005 more with every hit
STAY, UP, DOWN = 0, 1, 2


class Pong:
    """E games of n against m paddles. A rally is cut off after `horizon` steps, with reward 0.

    The state holds the heights of the paddles, then the ball (x, y) now and a step before, all in
    [-1,1] while the ball is in the court. A game that is over begins anew in the same step.
    """

    num_actions = 3
    masked = False  # all actions are always legal

    def __init__(
        self, teams: tuple[int, int], num_envs: int, seed: int, device, horizon: int = 300
    ):
        n, m = teams
        if max(teams) * PADDLE > COURT:
            sys.exit(f"--num-pro, --num-ant: at most {COURT / PADDLE:.0f} paddles fit on a side")
        self.teams = teams
        self.num_envs = num_envs
        self.device = torch.device(device)
        self.horizon = horizon
        self.state_dim = n + m + 4
        self.observation_dim = n + m + 4
        low = [COURT / n * i for i in range(n)] + [COURT / m * j for j in range(m)]
        high = [COURT / n * (i + 1) for i in range(n)] + [COURT / m * (j + 1) for j in range(m)]
        self.low = torch.tensor(low, device=device) + PADDLE / 2  # (N,)
        self.high = torch.tensor(high, device=device) - PADDLE / 2  # (N,)
        self.sides = torch.tensor([-1.0] * n + [1.0] * m, device=device)  # (N,)
        # Players see themselves, their team, the others and the ball, with their side on the left.
        order = []
        for player in range(n + m):
            team = range(n) if player < n else range(n, n + m)
            mates = [mate for mate in team if mate != player]
            others = [other for other in range(n + m) if other not in team]
            order.append([player, *mates, *others, *range(n + m, n + m + 4)])
        self.order = torch.tensor(order, device=device).flatten()  # (N O,)
        self.mirror = torch.ones(n + m, n + m + 4, device=device)  # (N,O)
        self.mirror[n:, -4] = -1
        self.mirror[n:, -2] = -1
        self.generator = torch.Generator(device)
        self.reset(seed)

    def reset(self, seed: int) -> None:
        """New games."""
        self.generator.manual_seed(seed)
        self.paddles = ((self.low + self.high) / 2).repeat(self.num_envs, 1)  # (E,N)
        self.ball = torch.full((self.num_envs, 2), COURT / 2, device=self.device)
        self.velocity = self.start_velocity()  # (E,2)
        self.pace = torch.full((self.num_envs,), START_PACE, device=self.device)
        self.clock = torch.zeros(self.num_envs, dtype=torch.long, device=self.device)
        self.state = self.describe(self.ball)  # (E,S)
        self.start = self.state[:1], self.paddles[:1], self.ball[:1]

    def start_velocity(self) -> Tensor:
        """The ball leaves the middle to a random side at up to 40 degrees. (E,2)"""
        size = (2, self.num_envs)
        chance, turn = torch.rand(size, generator=self.generator, device=self.device)
        side = 1 - 2 * (chance < 0.5).float()
        angle = (2 * turn - 1) * math.radians(40)
        return START_PACE * torch.stack([side * 3 * (angle.cos() + 1), 6 * angle.sin()], 1)

    def describe(self, before: Tensor) -> Tensor:
        """The state (E,S); `before` (E,2) is where the ball was a step ago."""
        return torch.cat([self.paddles, self.ball, before], 1) / (COURT / 2) - 1

    def observations(self, state: Tensor) -> Tensor:
        """(B,S) -> (B,N,O)"""
        return state.index_select(1, self.order).view(-1, *self.mirror.shape) * self.mirror

    def random_actions(self) -> Tensor:
        """(E,N)"""
        size = self.paddles.shape
        return torch.randint(self.num_actions, size, generator=self.generator, device=self.device)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """actions (E,N) -> rewards, whether the game ended, and whether it is over, ended or cut
        off, (E,) each; and the state before new games begin (E,S)."""
        moves = SPEED * ((actions == DOWN).float() - (actions == UP).float())
        before = self.ball
        rewards = torch.zeros(self.num_envs, device=self.device)
        for _ in range(FRAMES):
            self.paddles = (self.paddles + moves).clamp(self.low, self.high)
            rewards = rewards + self.move_ball(rewards == 0)
        self.clock = self.clock + 1
        next_state = self.describe(before)

        dones = rewards != 0
        over = dones | (self.clock >= self.horizon)
        start_state, start_paddles, start_ball = self.start
        self.state = torch.where(over[:, None], start_state, next_state)
        self.paddles = torch.where(over[:, None], start_paddles, self.paddles)
        self.ball = torch.where(over[:, None], start_ball, self.ball)
        self.velocity = torch.where(over[:, None], self.start_velocity(), self.velocity)
        self.pace = self.pace.masked_fill(over, START_PACE)
        self.clock = self.clock.masked_fill(over, 0)
        return rewards, dones, over, next_state

    def move_ball(self, playing: Tensor) -> Tensor:
        """One frame of the games that are playing (E,): walls, paddles, misses. Rewards (E,)."""
        speed_x, speed_y = self.velocity.unbind(1)
        x, y = (self.ball + self.velocity * playing[:, None]).unbind(1)
        bounced = y.clamp(BALL / 2, COURT - BALL / 2)
        speed_y = torch.where(y == bounced, speed_y, -speed_y)

        side = speed_x.sign()  # where the ball flies to
        from_middle = (x - COURT / 2) * side
        reached = playing & (from_middle >= COURT / 2 - MARGIN)
        offsets = bounced[:, None] - self.paddles  # (E,N)
        offsets = torch.where(self.sides == side[:, None], offsets, COURT)
        nearest = offsets.gather(1, offsets.abs().argmin(1, keepdim=True))[:, 0]
        hit = reached & (nearest.abs() <= (PADDLE + BALL) / 2)
        self.pace = self.pace + 0.005 * hit
        angle = math.radians(65) * (2 / PADDLE * nearest).clamp(-1, 1)
        speed_x = torch.where(hit, -side * 3 * (angle.cos() + 1) * self.pace, speed_x)
        speed_y = torch.where(hit, 8 * angle.sin() * self.pace, speed_y)

        self.ball = torch.stack([x, bounced], 1)
        self.velocity = torch.stack([speed_x, speed_y], 1)
        missed = playing & (from_middle >= COURT / 2)
        return side * missed  # the side that missed loses

    def picture(self, number: int = 0) -> Tensor:
        """Game `number` as bytes (200,200,3): protagonists blue, antagonists orange, ball white."""
        size = int(COURT)
        picture = torch.zeros(size, size, 3, dtype=torch.uint8)
        for player, height in enumerate(self.paddles[number].tolist()):
            is_pro = player < self.teams[0]
            left = 5 if is_pro else size - 10
            colour = [80, 160, 255] if is_pro else [255, 160, 60]
            top = max(0, int(height - PADDLE / 2))
            bottom = int(height + PADDLE / 2)
            picture[top:bottom, left : left + 5] = torch.tensor(colour, dtype=torch.uint8)
        x, y = self.ball[number].clamp(3, COURT - 3).int().tolist()
        picture[y - 2 : y + 3, x - 2 : x + 3] = 255
        return picture


def tracker(game: Pong) -> Tensor:
    """Scripted players: every paddle follows the ball's height. (E,N)"""
    apart = game.ball[:, 1:] - game.paddles
    moving = torch.where(apart < 0, UP, DOWN)
    return torch.where(apart.abs() <= SPEED * FRAMES / 2, STAY, moving)
