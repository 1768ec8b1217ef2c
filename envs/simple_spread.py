"""Cooperative navigation, batched in torch: simple_spread_v3 of MPE2 with continuous actions.

N agents share the plane with N landmarks. They are rewarded for standing on all of them and pay for
collisions. Physics, observations and rewards are those of `mpe2.simple_spread_v3` (github.com/
Farama-Foundation/MPE2, version 1.1.1), where an agent has a reward of its own; here the team gets
the mean over agents. tests/test_seqwm.py plays the same game in both.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

STEP = 0.1  # seconds
DAMPING = 0.25  # share of the velocity that is lost in a step
SENSITIVITY = 5.0  # force of a full push
REACH = 0.3  # distance at which two agents touch: twice their radius
STIFFNESS = 100.0  # of the contact
SOFTNESS = 1e-3  # of the contact
LOCAL = 0.5  # share of an agent's own reward, its collisions; 1 - LOCAL of the common one


class SimpleSpread:
    """E games of N agents, which end after `max_steps` steps and begin anew in the same step.

    An action has five numbers from -1 to 1: nothing, left, right, down, up. An agent sees its
    velocity, its position, all landmarks and all other agents relative to itself, and 2 (N - 1)
    zeros, which are messages in other games of MPE.
    """

    action_dim = 5

    def __init__(self, num_envs: int, seed: int, device, num_agents: int = 3, max_steps: int = 25):
        n = num_agents
        self.num_envs = num_envs
        self.num_agents = n
        self.device = torch.device(device)
        self.max_steps = max_steps
        self.observation_dim = 4 + 2 * n + 4 * (n - 1)
        others = [[other for other in range(n) if other != agent] for agent in range(n)]
        self.others = torch.tensor(others, dtype=torch.long, device=device).view(n, n - 1)
        self.generator = torch.Generator(device)
        self.reset(seed)

    def reset(self, seed: int) -> None:
        """New games."""
        self.generator.manual_seed(seed)
        self.positions, self.landmarks = self.start()
        self.velocities = torch.zeros_like(self.positions)  # (E,N,2)
        self.clock = 0  # all games end together
        self.observations = self.describe()  # (E,N,O)

    def start(self) -> Tensor:
        """Positions of agents and of landmarks, uniform in a square. (2,E,N,2)"""
        size = (2, self.num_envs, self.num_agents, 2)
        return 2 * torch.rand(size, generator=self.generator, device=self.device) - 1

    def describe(self) -> Tensor:
        """What all agents see. (E,N,O)"""
        own = self.positions[:, :, None]  # (E,N,1,2)
        to_landmarks = (self.landmarks[:, None] - own).flatten(2)  # (E,N,2N)
        to_others = (self.positions[:, self.others] - own).flatten(2)  # (E,N,2(N-1))
        parts = [self.velocities, self.positions, to_landmarks, to_others]
        return torch.cat([*parts, torch.zeros_like(to_others)], 2)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """actions (E,N,5) -> rewards, whether the game ended by itself (never), and whether it is
        over, (E,) each; and what agents see before new games begin (E,N,O)."""
        pushes = (actions + 1) / 2  # from 0 to 1, as in MPE
        forces = SENSITIVITY * (pushes[..., 2::2] - pushes[..., 1::2])
        away, distances = self.pairs()
        contact = SOFTNESS * F.softplus((REACH - distances) / SOFTNESS)  # (E,N,N)
        forces = forces + (STIFFNESS * contact / distances)[..., None].mul(away).sum(2)
        self.positions = self.positions + STEP * self.velocities
        self.velocities = (1 - DAMPING) * self.velocities + STEP * forces

        to_landmarks = (self.landmarks[:, :, None] - self.positions[:, None]).norm(dim=3)
        common = -to_landmarks.amin(2).sum(1)  # (E,): of each landmark its nearest agent
        collisions = (self.pairs()[1] < REACH).float().sum(2).mean(1)  # (E,)
        rewards = (1 - LOCAL) * common - LOCAL * collisions

        next_observations = self.describe()
        self.clock += 1
        is_over = self.clock >= self.max_steps
        if is_over:
            self.positions, self.landmarks = self.start()
            self.velocities = torch.zeros_like(self.positions)
            self.clock = 0
        self.observations = self.describe() if is_over else next_observations
        never = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        return rewards, never, torch.full_like(never, is_over), next_observations

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Vectors from all agents to each, (E,N,N,2), and distances, far on the diagonal."""
        away = self.positions[:, :, None] - self.positions[:, None]
        itself = torch.eye(self.num_agents, device=self.device)
        return away, away.norm(dim=3) + 1e3 * itself
