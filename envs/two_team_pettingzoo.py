"""Any PettingZoo parallel environment as a zero-sum game of two teams.

Agents called adversary are the antagonists and all others the protagonists, unless the environment
has an attribute `teams`: the protagonists' names, the antagonists' names. The reward of a step is
the mean over the protagonists' rewards minus the mean over the antagonists'. An agent that has left
the game has reward 0, observes zeros, and its one legal action is 0; so is that of an agent whose
mask allows none.
"""

import importlib
import os
import runpy
import sys

import numpy as np
import torch
from torch import Tensor

HELP = "expected a game of this script, FILE.py:function, or a module of PettingZoo such as"
HELP += " mpe2.simple_tag_v3 (pip install pettingzoo mpe2)"


def find_maker(env_id: str):
    """The function that makes an environment: FILE.py:function, or a module's parallel_env."""
    path, _, name = env_id.rpartition(":")
    try:
        if path:
            sys.path.append(os.path.dirname(path))  # so that the file can import its neighbours
            return runpy.run_path(path)[name]
        return importlib.import_module(env_id).parallel_env
    except (ImportError, AttributeError, FileNotFoundError, KeyError) as error:
        sys.exit(f"--env-id {env_id}: {error}; {HELP}")


def find_teams(env) -> tuple[list[str], list[str]]:
    """Names of the protagonists and of the antagonists."""
    names = env.possible_agents
    ant = [name for name in names if name.startswith("adversary")]
    pro = [name for name in names if name not in ant]
    pro, ant = getattr(env, "teams", (pro, ant))
    if not pro or not ant:
        sys.exit(f"agents {names}: no adversary among them; give the environment `teams`")
    if sorted([*pro, *ant]) != sorted(names):
        sys.exit(f"agents {names}: each must be in one of the `teams` {pro} and {ant}")
    return list(pro), list(ant)


def split(seen, info: dict) -> tuple[np.ndarray, np.ndarray]:
    """The numbers that an agent observes, and which of its actions are legal."""
    if isinstance(seen, dict):
        return np.ravel(seen["observation"]), seen["action_mask"]
    return np.ravel(seen), info.get("action_mask", 1)


class PettingZooGame:
    """E copies, stepped one after the other. An agent sees its observation, padded with zeros to
    the longest, and which actions are legal; the state is what all agents see."""

    masked = True  # the last A numbers of an observation say which actions are legal

    def __init__(self, env_id: str, num_envs: int, seed: int, device):
        make = find_maker(env_id)
        self.envs = [make() for _ in range(num_envs)]
        env = self.envs[0]
        pro, ant = find_teams(env)
        self.agents = [*pro, *ant]
        self.teams = (len(pro), len(ant))
        self.num_envs = num_envs
        self.device = torch.device(device)
        weights = [1 / len(pro)] * len(pro) + [-1 / len(ant)] * len(ant)
        self.weights = dict(zip(self.agents, weights))  # of an agent's reward
        self.sizes = []  # number of actions of each agent
        self.first_actions = {}  # the number of its first one, usually 0
        for agent in self.agents:
            space = env.action_space(agent)
            if not hasattr(space, "n"):
                sys.exit(f"--env-id {env_id}: {agent} has actions {space}; they must be Discrete")
            self.sizes.append(int(space.n))
            self.first_actions[agent] = int(getattr(space, "start", 0))
        self.num_actions = max(self.sizes)
        observations, infos = env.reset(seed=seed % 2**31)
        lengths = [len(split(observations[name], infos.get(name, {}))[0]) for name in self.agents]
        self.observation_dim = max(lengths) + self.num_actions
        self.state_dim = len(self.agents) * self.observation_dim
        self.reset(seed)

    def reset(self, seed: int) -> None:
        """New games."""
        self.random = np.random.default_rng(seed)
        self.now = np.stack([self.begin(env) for env in self.envs])  # (E,N,O)
        self.state = self.to_device(self.now).flatten(1)  # (E,S)

    def begin(self, env) -> np.ndarray:
        """What all agents see in a new game. (N,O)"""
        return self.describe(*env.reset(seed=int(self.random.integers(2**31))))

    def describe(self, observations: dict, infos: dict) -> np.ndarray:
        """What all agents see. (N,O)"""
        rows = np.zeros((len(self.agents), self.observation_dim), np.float32)
        rows[:, -self.num_actions] = 1  # of those who have left the game
        for row, name, size in zip(rows, self.agents, self.sizes):
            if name in observations:
                numbers, legal = split(observations[name], infos.get(name, {}))
                row[: len(numbers)] = numbers
                legal = legal if np.any(legal) else [True] + [False] * (size - 1)
                row[-self.num_actions :][:size] = legal
        return rows

    def to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def observations(self, state: Tensor) -> Tensor:
        """(B,S) -> (B,N,O)"""
        return state.view(len(state), len(self.agents), -1)

    def random_actions(self) -> Tensor:
        """Legal ones (E,N)."""
        legal = self.now[..., -self.num_actions :]
        chances = self.random.random(legal.shape) * legal
        return torch.from_numpy(chances.argmax(-1)).to(self.device)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """actions (E,N) -> rewards, whether the game ended, and whether it is over, ended or cut
        off, (E,) each; and the state before new games begin (E,S)."""
        rewards = np.zeros(self.num_envs, np.float32)
        dones = np.zeros(self.num_envs, bool)
        over = np.zeros(self.num_envs, bool)
        following = []  # what all agents see before new games begin
        now = []
        for number, (env, row) in enumerate(zip(self.envs, actions.tolist())):
            chosen = {
                name: action + self.first_actions[name]
                for name, action in zip(self.agents, row)
                if name in env.agents
            }
            observations, gains, terminated, truncated, infos = env.step(chosen)
            rewards[number] = sum(self.weights[name] * gain for name, gain in gains.items())
            dones[number] = all(terminated[name] for name in chosen)
            over[number] = all(terminated[name] or truncated[name] for name in chosen)
            present = {name: observations[name] for name in chosen if not terminated[name]}
            following.append(self.describe(present, infos))
            now.append(self.begin(env) if over[number] else following[-1])
        self.now = np.stack(now)
        self.state = self.to_device(self.now).flatten(1)
        next_state = self.to_device(np.stack(following)).flatten(1)
        return self.to_device(rewards), self.to_device(dones), self.to_device(over), next_state
