"""The exact state of a gymnasium environment, so that an interrupted run continues to the bit; quiet MuJoCo.

MuJoCo continues to the bit from the whole of its data only: positions and velocities are not enough, nor is what it
calls the integration state. Nothing of a saved state is executed when it is read.
"""

import contextlib
import sys

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv


def quiet_mujoco() -> None:
    """Without this, deprecated attributes in gymnasium's own models print warnings and write MUJOCO_LOG.TXT."""
    with contextlib.suppress(ImportError):
        import mujoco

        mujoco.set_mju_user_warning(lambda text: None if "deprecated" in text else print(text, file=sys.stderr))


class LeanVectorEnv(SyncVectorEnv):
    """SyncVectorEnv with a plain loop: of small environments, its bookkeeping takes as long as some of the physics.

    Only for AutoresetMode.SAME_STEP and observations that are arrays. Observations and ends that `step` returns are
    overwritten by the next step; its info has nothing but final_obs, by number of the environment.
    """

    def __init__(self, *args, **kwargs):
        quiet_mujoco()
        super().__init__(*args, **kwargs)

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        """Actions (N,A) -> observations (N,O), rewards, terminations, truncations (N,) each, and last observations."""
        last = {}
        for n, (env, action) in enumerate(zip(self.envs, actions)):
            observation, self._rewards[n], terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                last[n], observation = observation, env.reset()[0]
            self._observations[n], self._terminations[n], self._truncations[n] = observation, terminated, truncated
        return self._observations, self._rewards.copy(), self._terminations, self._truncations, {"final_obs": last}


def layers(env: gym.Env) -> list:
    """The wrappers of an environment from the outside, then itself."""
    return [env, *layers(env.env)] if isinstance(env, gym.Wrapper) else [env]


def simulator_state(env: gym.Env) -> dict:
    """Generator, MuJoCo's data, and every number and array that the environment or a wrapper holds, as safe types."""
    held, arrays = [], []
    for values in map(vars, layers(env)):
        held.append({name: value for name, value in values.items() if type(value) in (bool, int, float)})
        found = {name: np.array(value) for name, value in values.items() if isinstance(value, np.ndarray | np.number)}
        arrays.append({name: torch.from_numpy(array) for name, array in found.items() if array.dtype.kind in "biuf"})
    data = getattr(env.unwrapped, "data", None)
    data = data.__getstate__() if type(data).__name__ == "MjData" else None
    return {"random": env.unwrapped.np_random.bit_generator.state, "held": held, "arrays": arrays, "mujoco": data}


def restore_simulator(env: gym.Env, state: dict) -> None:
    """Put what simulator_state took into a copy of the environment. Tasks that keep other things continue roughly."""
    for layer, held, arrays in zip(layers(env), state["held"], state["arrays"]):
        vars(layer).update(held | {name: array.numpy()[()] for name, array in arrays.items()})
    env.unwrapped.np_random.bit_generator.state = state["random"]
    if state["mujoco"] is not None:
        import mujoco

        data = mujoco.MjData.__new__(mujoco.MjData)
        data.__setstate__(state["mujoco"])
        mujoco.mj_copyData(env.unwrapped.data, env.unwrapped.model, data)
