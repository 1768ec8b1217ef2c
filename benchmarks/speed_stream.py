"""Environment steps per second of CPU time of algorithms/stream_x.py next to a plain eager loop of stream AC.

    python benchmarks/speed_stream.py      # two minutes on one core

The plain loop makes two passes of the policy (to act, to learn) and two for the values, and its optimizer goes from
tensor to tensor. The loops take turns in one process; the clock is its CPU time.
"""

import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pandas as pd
import torch
import tyro
from torch.distributions import Categorical, Normal
from torch.nn.functional import softplus

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from algorithms import stream_x
from benchmarks.about import RESULTS, about


class Normalized(gym.Wrapper):
    """Normalized observations with the time, and scaled rewards."""

    def __init__(self, env):
        super().__init__(gym.wrappers.RecordEpisodeStatistics(env))
        self.stats, self.scale = stream_x.RunningMeanVar(), stream_x.ScaleReward(0.99)

    def observe(self, observation):
        self.stats.update(observation)
        self.clock += 1 / self.spec.max_episode_steps
        return np.append((observation - self.stats.mean) / np.sqrt(self.stats.var + 1e-8), self.clock)

    def reset(self, **options):
        self.clock = -0.5
        return self.observe(self.env.reset(**options)[0])

    def step(self, action):
        observation, reward, terminated, truncated, _ = self.env.step(action)
        return self.observe(observation), self.scale(reward, terminated or truncated), terminated or truncated


def plain_update(network, traces, objective, kappa, delta, reset):
    network.zero_grad()
    objective.backward()
    norm = 0.0
    for param in network.parameters():
        trace = traces[param]
        trace.mul_(0.99 * 0.8).add_(param.grad)
        norm += trace.abs().sum().item()
    step_size = 1 / max(kappa * max(abs(delta), 1.0) * norm, 1.0)
    for param in network.parameters():
        param.data.add_(delta * traces[param], alpha=step_size)
        if reset:
            traces[param].zero_()


def policy(outputs, space):
    if isinstance(space, gym.spaces.Discrete):
        return Categorical(torch.softmax(outputs, -1))
    mean, spread = outputs.chunk(2)
    return Normal(mean, softplus(spread))


def plain_loop(env, agent, traces, num_steps):
    state = torch.tensor(env.reset(seed=0), dtype=torch.float32)
    for _ in range(num_steps):
        action = policy(agent.actor(state), env.action_space).sample()
        observation, reward, done = env.step(action.numpy())
        next_state = torch.tensor(observation, dtype=torch.float32)
        value = agent.critic(state)
        delta = (reward + 0.99 * agent.critic(next_state) * (1 - done) - value).detach()
        chosen = policy(agent.actor(state), env.action_space)
        objective = chosen.log_prob(action).sum() + 0.01 * torch.sign(delta) * chosen.entropy().sum()
        plain_update(agent.actor, traces, objective, 3.0, delta.item(), done)
        plain_update(agent.critic, traces, value, 2.0, delta.item(), done)
        state = torch.tensor(env.reset(), dtype=torch.float32) if done else next_state


def our_loop(stream, agent, num_steps):
    observation = stream.reset(0)
    for step in range(num_steps):
        observation, reward, done = stream.step(agent.act(observation, 0.0))
        agent.learn(reward, observation, done)
        observation = stream.reset(step) if done else observation


def speed(loop, *words):
    began = time.process_time()
    loop(*words)
    return words[-1] / (time.process_time() - began)


def main(csv: str = str(RESULTS / "speed_stream.csv"), steps: int = 250, turns: int = 40):
    """Alternate turns of so many steps on two tasks; low and high are the 10 % and 90 % quantiles."""
    torch.set_num_threads(1)
    rows = []
    for env_id in ("CartPole-v1", "Hopper-v5"):
        stream = stream_x.Stream(stream_x.Args(env_id=env_id))
        agents = [stream_x.Agent(stream, stream_x.Args()) for _ in range(2)]
        env, speeds = Normalized(stream.env), []
        traces = {param: torch.zeros_like(param) for net in (agents[0].actor, agents[0].critic) for param in net.parameters()}
        for _ in range(turns + 1):
            plain = speed(plain_loop, env, agents[0], traces, steps)
            speeds.append((plain, speed(our_loop, stream, agents[1], steps)))
        plain, ours = np.array(speeds[1:]).T
        medians = {"plain": float(np.median(plain)), "ours": float(np.median(ours))}
        ratios = np.percentile(ours / plain, (10, 50, 90)).tolist()
        rows.append({"task": env_id} | medians | dict(zip(("low", "ratio", "high"), ratios)))
        print(rows[-1], flush=True)
    table = pd.DataFrame(rows).round(2).assign(turns=turns, **about("torch", "gymnasium"))
    table.to_csv(csv, index=False, lineterminator="\n")


if __name__ == "__main__":
    tyro.cli(main)
