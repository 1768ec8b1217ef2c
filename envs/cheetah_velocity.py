"""HalfCheetah at a velocity that it is not told: a task family for meta_dt.py, and a program that makes its offline data.

    python algorithms/unimodal_poisson.py --total-timesteps 300000 --output-dir runs/fast
    python algorithms/unimodal_poisson.py --total-timesteps 50000 --output-dir runs/slow
    python envs/cheetah_velocity.py runs/fast runs/slow --output-dir data/cheetah
    python algorithms/meta_dt.py --data data/cheetah --env-id cheetah_velocity

The reward is -|velocity - target| - 0.05 |action|^2, in episodes of 200 steps. The data are episodes of policies that
unimodal_poisson.py has saved, of several qualities and so of several velocities; actions are
sampled. Each task draws from these episodes and computes their rewards anew from its target, so that tasks differ in the
reward and in nothing else. Targets are uniform from 0 to 3, those of training and the new ones alike.
"""

import json
import sys
from pathlib import Path

import gymnasium as gym
import mujoco
import numpy as np
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from envs.point_robot import check_empty, save_data  # noqa: E402

NUM_STEPS = 200
# Models in gymnasium make MuJoCo print a warning for each environment.
mujoco.set_mju_user_warning(lambda text: None if "deprecated" in text else print(text, file=sys.stderr))


class CheetahVelocity:
    """N cheetahs, each with a target velocity of its own. targets (N,1)"""

    def __init__(self, targets: np.ndarray):
        self.targets = np.asarray(targets, np.float64).reshape(-1)
        makers = [lambda: gym.make("HalfCheetah-v5", max_episode_steps=10**6)] * len(self.targets)
        self.envs = gym.vector.SyncVectorEnv(makers)

    def reset(self, seed: int) -> np.ndarray:
        """Observations (N,17)"""
        return self.envs.reset(seed=seed)[0]

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Actions (N,6) -> observations (N,17), rewards (N,), and whether episodes have ended (N,): never."""
        actions = np.clip(actions, -1, 1).astype(np.float32)
        observations, *_, info = self.envs.step(actions)
        self.velocities = info["x_velocity"]
        return observations, velocity_rewards(self.velocities, actions, self.targets), np.zeros(len(actions), bool)


def velocity_rewards(velocities: np.ndarray, actions: np.ndarray, targets) -> np.ndarray:
    """(...), (...,6), and targets that fit (...) -> (...)"""
    return -np.abs(velocities - targets) - 0.05 * np.square(actions).sum(-1)


def load_policy(run_dir: str) -> torch.nn.Module:
    """The agent of a run of unimodal_poisson.py. Exit if the folder holds none."""
    from algorithms import unimodal_poisson as ppo

    path = Path(run_dir, "args.json")
    if not path.is_file():
        sys.exit(f"{run_dir}: no args.json, so not a run folder")
    try:
        args = ppo.Args(**json.loads(path.read_text()))
    except TypeError:
        sys.exit(f"{run_dir}: not a run of unimodal_poisson.py, or of another version of it")
    if args.env_id != "HalfCheetah-v5":
        sys.exit(f"{run_dir}: its task is {args.env_id}, expected HalfCheetah-v5")
    state = ppo.load_checkpoint(run_dir, torch.device("cpu"))
    if state is None:
        sys.exit(f"{run_dir}: no checkpoint; --save-steps 0 keeps none, or too early")
    agent = ppo.Agent(ppo.make_envs(args, 1), args).requires_grad_(False)
    agent.load_state_dict(state["agent"])
    return agent


def record(agent: torch.nn.Module, num_episodes: int, seed: int) -> dict[str, np.ndarray]:
    """Episodes of a policy with sampled actions, without rewards: arrays (E,T,...), and velocities (E,T)."""
    torch.manual_seed(seed)
    envs = CheetahVelocity(np.zeros((num_episodes, 1)))
    observations = envs.reset(seed)
    steps = []
    for _ in range(NUM_STEPS):
        outputs = agent.outputs(agent.normalize(observations))
        actions = np.asarray(agent.to_env(agent.head.sample(outputs)), np.float32).clip(-1, 1)
        following, *_ = envs.step(actions)
        steps.append((observations, actions, following, envs.velocities))
        observations = following
    names = "observations actions next_observations velocities".split()
    return {name: np.stack(values, 1) for name, values in zip(names, zip(*steps))}


def main(
    runs: tyro.conf.Positional[list[str]],
    output_dir: str,
    seed: int = 1,
    num_train: int = 45,
    num_new: int = 5,
    num_episodes: int = 60,
) -> None:
    """Make data of HalfCheetah at target velocities.

    Args:
        runs: run folders of unimodal_poisson.py on HalfCheetah-v5; their policies act equally often
        output_dir: folder of the data, for meta_dt.py --data
        seed: seed of targets and episodes
        num_train: targets to train on
        num_new: other targets, to evaluate on
        num_episodes: episodes of each target, drawn from twice as many
    """
    check_empty(output_dir)
    agents = [load_policy(run) for run in runs]
    random = np.random.default_rng(seed)
    each = -(-2 * num_episodes // len(runs))
    # gymnasium seeds the episodes of a policy with seed, seed + 1, ...: no two start alike
    parts = [record(agent, each, seed + i * each) for i, agent in enumerate(agents)]
    pool = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    velocities = pool.pop("velocities")
    dones = np.zeros((num_episodes, NUM_STEPS), bool)
    dones[:, -1] = True
    tasks = []
    for target in random.uniform(0, 3, num_train + num_new):
        rows = random.choice(len(velocities), num_episodes, replace=False)
        steps = {name: values[rows] for name, values in pool.items()}
        steps["rewards"] = velocity_rewards(velocities[rows], steps["actions"], target)
        steps["dones"] = dones
        flat = {name: values.reshape(-1, *values.shape[2:]) for name, values in steps.items()}
        tasks.append({"task": np.array([target])} | flat)
    save_data({"train": tasks[:num_train], "new": tasks[num_train:]}, output_dir)


if __name__ == "__main__":
    tyro.cli(main)
