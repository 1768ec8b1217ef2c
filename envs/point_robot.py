"""Point-Robot, the task family of meta_dt.py's default run, and its offline data: NumPy only.

    python envs/point_robot.py --output-dir data/points    # as meta_dt.py makes it in memory

A point starts at (0, 0) and moves by an action of at most 0.1 along each axis. The reward is minus the distance to a
goal in [-1, 1]^2 that it does not see. Episodes have 20 steps; the state is the position.

The data come from a scripted controller that knows the goal. Each episode draws a quality from 0 to 1 and a detour of 0
to 10 steps: in each step, with the probability of its quality, the robot walks to its aim (as fast as each axis allows,
with noise of up to 0.01), else its action is uniform. The aim is another random point during the detour, then the goal.
So data go from random walks to nearly perfect ones, and where a robot went first does not give away its goal. (The
authors' data, from SAC, were not at hand.)
"""

import sys
from pathlib import Path

import numpy as np
import tyro

NUM_STEPS = 20


class PointRobot:
    """N robots at once, each with a goal of its own. goals (N,2)"""

    def __init__(self, goals: np.ndarray):
        self.goals = np.asarray(goals, np.float64)

    def reset(self, seed: int) -> np.ndarray:
        """Positions (N,2). All robots start at (0, 0), whatever the seed."""
        self.positions = np.zeros_like(self.goals)
        return self.positions.copy()

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Actions (N,2) -> positions (N,2), rewards (N,), and whether episodes have ended (N,): never."""
        self.positions += np.clip(actions, -0.1, 0.1)
        rewards = -np.linalg.norm(self.positions - self.goals, axis=1)
        return self.positions.copy(), rewards, np.zeros(len(rewards), bool)

    def best_returns(self) -> np.ndarray:
        """Returns (N,) of the best policy: along each axis as fast as it can, as that axis alone decides its distance."""
        steps = 0.1 * np.arange(1, NUM_STEPS + 1)[:, None, None]
        left = np.maximum(np.abs(self.goals) - steps, 0)  # (T,N,2)
        return -np.linalg.norm(left, axis=-1).sum(0)


def record(goal: np.ndarray, num_episodes: int, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Data of one task in meta_dt.py's form: arrays of all steps, one episode after the other."""
    quality = random.uniform(0, 1, (num_episodes, 1))
    detour = random.integers(0, 11, (num_episodes, 1))  # steps
    elsewhere = random.uniform(-1, 1, (num_episodes, 2))
    envs = PointRobot(np.tile(goal, (num_episodes, 1)))
    states = [envs.reset(0)]
    actions, rewards = [], []
    for t in range(NUM_STEPS):
        aims = np.where(t < detour, elsewhere, goal)
        noise = random.uniform(-0.1, 0.1, (num_episodes, 2))
        is_good = random.uniform(size=(num_episodes, 1)) < quality
        chosen = np.where(is_good, aims - states[-1] + 0.1 * noise, noise)
        actions.append(np.clip(chosen, -0.1, 0.1))
        state, reward, _ = envs.step(actions[-1])
        states.append(state)
        rewards.append(reward)
    dones = np.zeros((num_episodes, NUM_STEPS), bool)
    dones[:, -1] = True
    steps = {
        "observations": np.stack(states[:-1], 1),
        "actions": np.stack(actions, 1),
        "rewards": np.stack(rewards, 1),
        "next_observations": np.stack(states[1:], 1),
        "dones": dones,
    }
    return {"task": goal} | {name: values.reshape(-1, *values.shape[2:]) for name, values in steps.items()}


def make_data(seed: int, num_train: int = 45, num_new: int = 5, num_episodes: int = 60) -> dict[str, list[dict]]:
    """Data of training goals and of new ones, drawn from the seed."""
    random = np.random.default_rng(seed)
    goals = random.uniform(-1, 1, (num_train + num_new, 2))
    tasks = [record(goal, num_episodes, random) for goal in goals]
    return {"train": tasks[:num_train], "new": tasks[num_train:]}


def check_empty(output_dir: str) -> None:
    """Exit if the folder holds data."""
    for part in ("train", "new"):
        if any(Path(output_dir, part).glob("*.npz")):
            sys.exit(f"--output-dir: {Path(output_dir, part)} holds data; take another folder")


def save_data(data: dict[str, list[dict]], output_dir: str) -> None:
    """One file a task: OUTPUT_DIR/train/000.npz, ..., OUTPUT_DIR/new/000.npz, ..."""
    check_empty(output_dir)
    for part, tasks in data.items():
        folder = Path(output_dir, part)
        folder.mkdir(parents=True, exist_ok=True)
        for i, task in enumerate(tasks):
            np.savez_compressed(folder / f"{i:03d}.npz", **task)


def main(output_dir: str, seed: int = 1, num_train: int = 45, num_new: int = 5, num_episodes: int = 60) -> None:
    """Make data of Point-Robot.

    Args:
        output_dir: folder of the data, for meta_dt.py --data
        seed: seed of goals and episodes
        num_train: goals to train on
        num_new: other goals, to evaluate on
        num_episodes: episodes of each goal
    """
    save_data(make_data(seed, num_train, num_new, num_episodes), output_dir)


if __name__ == "__main__":
    tyro.cli(main)
