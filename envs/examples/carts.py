"""A vector environment of your own for unimodal_poisson.py, in NumPy:

python algorithms/unimodal_poisson.py --env-id envs/examples/carts.py:make --num-envs 256 --num-steps 64
"""

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv


class Carts(VectorEnv):
    """Push every cart to the origin; the time limit is 50 steps."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
    single_observation_space = gym.spaces.Box(-np.inf, np.inf, (2,))
    single_action_space = gym.spaces.Box(-1, 1, (1,))

    def __init__(self, num_envs):
        self.num_envs = num_envs

    def reset(self, *, seed=None, options=None):
        self.random = np.random.default_rng(seed)
        self.state = self.random.uniform(-1, 1, (self.num_envs, 2))  # position, speed
        self.steps = np.zeros(self.num_envs, int)
        return self.state.copy(), {}

    def step(self, actions):
        self.state[:, 1] += 0.1 * actions[:, 0]
        self.state[:, 0] += 0.1 * self.state[:, 1]
        rewards = -np.abs(self.state[:, 0])
        self.steps += 1
        truncated = self.steps == 50
        info = {"final_obs": self.state.copy()}
        self.state[truncated] = self.random.uniform(-1, 1, (truncated.sum(), 2))
        self.steps[truncated] = 0
        return self.state.copy(), rewards, truncated & False, truncated, info


def make(num_envs):
    return Carts(num_envs)
