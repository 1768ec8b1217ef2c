"""Pong of two teams, batched in torch: Wimblepong's court and speeds, several paddles a side.

Protagonists are on the left, antagonists on the right; each paddle moves in its own strip of the court, from top to
bottom. Reward 1 when the antagonists miss the ball, -1 when the protagonists do (Wimblepong: 10), and the game ends.
The constants are those of github.com/aalto-intelligent-robotics/wimblepong, which is played one against one.
"""

import math

import torch
from torch import Tensor

COURT, PADDLE, BALL, MARGIN = 200.0, 20.0, 5.0, 10.0  # length of a paddle; distance of paddles from the wall
SPEED, FRAMES = 3.0, 3  # of a paddle in a frame; frames of a step
STAY, UP, DOWN = 0, 1, 2


class Pong:
    """E games of n against m paddles. Players see their own side as the left one."""

    num_actions = 3

    def __init__(self, teams: tuple[int, int], num_envs: int, seed: int, device, horizon: int = 300):
        """`horizon`: steps after which a rally is cut off; the reward is 0 then."""
        self.teams, self.num_envs, self.device, self.horizon = teams, num_envs, torch.device(device), horizon
        self.observation_dim = self.state_dim = sum(teams) + 4
        self.generator = torch.Generator(device).manual_seed(seed)
        strips = [(COURT / count * i, COURT / count * (i + 1)) for count in teams for i in range(count)]
        self.low, self.high = (torch.tensor(side, device=device) for side in zip(*strips))  # (n+m,) each
        self.paddles = torch.zeros(num_envs, sum(teams), device=device)  # (E,n+m) height of the middle
        self.ball = torch.zeros(num_envs, 2, device=device)  # (E,2)
        self.before, self.velocity = self.ball.clone(), self.ball.clone()  # (E,2) each
        self.pace = torch.ones(num_envs, device=device)  # (E,) grows with every hit
        self.clock = torch.zeros(num_envs, dtype=torch.long, device=device)  # (E,)
        self.begin(torch.ones(num_envs, dtype=torch.bool, device=device))

    def begin(self, anew: Tensor) -> None:
        """New rallies where `anew` (E,) says so: the ball starts in the middle, to a random side, up to 40 degrees."""
        side, angle = torch.rand(2, self.num_envs, generator=self.generator, device=self.device)  # (E,) each
        side, angle = (side < 0.5).float() * 2 - 1, (angle * 2 - 1) * math.radians(40)
        velocity = torch.stack([side * 3 * (angle.cos() + 1), 6 * angle.sin()], 1) * 0.42  # (E,2)
        where = anew[:, None]  # (E,1)
        self.paddles = torch.where(where, (self.low + self.high) / 2, self.paddles)
        self.ball = torch.where(where, COURT / 2, self.ball)
        self.before = torch.where(where, self.ball, self.before)
        self.velocity = torch.where(where, velocity, self.velocity)
        self.pace, self.clock = self.pace.masked_fill(anew, 0.42), self.clock.masked_fill(anew, 0)

    def observe(self) -> tuple[Tensor, Tensor]:
        """What players see (E,n+m,n+m+4) and the state (E,n+m+4), all in [-1,1] while the ball is in the court.

        Players: own paddle, the others of the team, the opponents, the ball now and a step before, with the own side on
        the left. State: the paddles in order and the ball, as protagonists see it.
        """
        (n, m), rows = self.teams, []
        heights, places = self.paddles / (COURT / 2) - 1, torch.cat([self.ball, self.before], 1) / (COURT / 2) - 1
        mirrored = places * torch.tensor([-1.0, 1, -1, 1], device=self.device)  # (E,4)
        for player in range(n + m):
            team, other = (range(n), range(n, n + m)) if player < n else (range(n, n + m), range(n))
            order = [player, *(mate for mate in team if mate != player), *other]
            rows.append(torch.cat([heights[:, order], places if player < n else mirrored], 1))
        return torch.stack(rows, 1), torch.cat([heights, places], 1)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """actions (E,n+m) -> rewards (E,), ends (E,), and what observe() would have said before new rallies began."""
        n, half = self.teams[0], PADDLE / 2
        moves = ((actions == DOWN).float() - (actions == UP).float()) * SPEED  # (E,n+m)
        rewards, self.before = torch.zeros(self.num_envs, device=self.device), self.ball  # (E,), (E,2)
        for _ in range(FRAMES):
            self.paddles = (self.paddles + moves).clamp(self.low + half, self.high - half)  # (E,n+m)
            playing = rewards == 0  # (E,)
            ball = self.ball + self.velocity * playing[:, None]  # (E,2)
            height = ball[:, 1]
            bounce = (height < BALL / 2) | (height > COURT - BALL / 2)  # (E,) off the walls at top and bottom
            self.velocity = torch.where(
                bounce[:, None], self.velocity * self.velocity.new_tensor([1, -1]), self.velocity
            )
            self.ball = torch.stack([ball[:, 0], height.clamp(BALL / 2, COURT - BALL / 2)], 1)  # (E,2)
            for side, paddles in ((-1, self.paddles[:, :n]), (1, self.paddles[:, n:])):
                line = MARGIN if side < 0 else COURT - MARGIN
                reached = playing & ((self.ball[:, 0] - line) * side >= 0) & (self.velocity[:, 0] * side > 0)  # (E,)
                offsets = self.ball[:, 1:] - paddles  # (E,n) or (E,m)
                nearest = offsets.gather(1, offsets.abs().argmin(1, keepdim=True))[:, 0]  # (E,)
                hit = reached & (nearest.abs() <= half + BALL / 2)  # (E,)
                angle = math.radians(65) * (nearest / half).clamp(-1, 1)  # (E,)
                self.pace = torch.where(hit, self.pace + 0.005, self.pace)
                back = torch.stack([-side * 3 * (angle.cos() + 1), 8 * angle.sin()], 1) * self.pace[:, None]  # (E,2)
                self.velocity = torch.where(hit[:, None], back, self.velocity)
                missed = (self.ball[:, 0] * side >= (COURT if side > 0 else 0)) & playing  # (E,)
                rewards = rewards + side * missed  # the side that missed loses
        self.clock = self.clock + 1
        last, ends = self.observe(), rewards != 0  # (E,)
        self.begin(ends | (self.clock >= self.horizon))
        return rewards, ends, last

    def picture(self, number: int = 0) -> Tensor:
        """Game `number` as bytes (200,200,3): court black, protagonists blue, antagonists orange, ball white."""
        picture = torch.zeros(int(COURT), int(COURT), 3, dtype=torch.uint8)
        for player, height in enumerate(self.paddles[number].tolist()):
            left, colour = (5, (80, 160, 255)) if player < self.teams[0] else (int(COURT) - 10, (255, 160, 60))
            picture[max(0, int(height - PADDLE / 2)) : int(height + PADDLE / 2), left : left + 5] = torch.tensor(
                colour
            ).byte()
        x, y = (int(value) for value in self.ball[number].clamp(3, COURT - 3))
        picture[y - 2 : y + 3, x - 2 : x + 3] = 255
        return picture

    def state_dict(self) -> dict:
        """What the next step depends on."""
        kept = {name: getattr(self, name) for name in ("paddles", "ball", "before", "velocity", "pace", "clock")}
        return kept | {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict) -> None:
        """Continue where state_dict was taken."""
        self.generator.set_state(state["generator"].cpu())
        for name in state.keys() - {"generator"}:
            setattr(self, name, state[name].to(self.device))


def tracker(game: Pong, error: float = 0.0) -> Tensor:
    """Scripted players: every paddle follows the ball's height, and with chance `error` it moves at random. (E,n+m)"""
    apart = game.ball[:, 1:] - game.paddles  # (E,n+m)
    follow = torch.where(apart.abs() <= SPEED * FRAMES / 2, STAY, torch.where(apart < 0, UP, DOWN))
    shape = {"size": follow.shape, "generator": game.generator, "device": game.device}
    return torch.where(torch.rand(**shape) < error, torch.randint(3, **shape), follow)


def wanderer(game: Pong) -> Tensor:
    """Scripted players that move at random. (E,n+m)"""
    return torch.randint(3, game.paddles.shape, generator=game.generator, device=game.device)
