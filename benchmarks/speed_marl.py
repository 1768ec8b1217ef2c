r"""How many environment steps a second algorithms/fm3q.py makes next to CleanMARL's vdn.py and qmix.py.

    git clone https://github.com/AmineAndam04/cleanmarl
    python benchmarks/speed_marl.py --cleanmarl cleanmarl       # half an hour on a slow core

The checkout is all that is needed: the packages of its own environments (pettingzoo, smaclite, lbforaging) are not.

Both sides play the additive game with 50 states, three against three and 4 actions, cut off after 20 steps, and learn
from it: here --mixer vdn or qmix, one loss over six signed utilities, there vdn.py or qmix.py, one loss over six
agents. CleanMARL takes every agent for a friend, so it learns something else, at the same cost. Equal are: layers of
utility and mixing networks and their inputs, transitions in the replay and in a batch (qmix.py samples 10 whole
episodes, this side 200 transitions), Adam, clipping, a soft copy to the target networks after every update, the chance
of random actions (there all agents' at once, here each agent's), and gradient steps for each environment step, of which
every row of the CSV has the count. Not equal is what the comparison is about: CleanMARL plays one game at a time, this
side --games of them in one batch, and then makes all the updates that are due for their steps, so with many games they
come in long bursts.

CleanMARL plays class OneGame, the same tables in NumPy, which is faster for one game than the batched game is (`fm3q`
with one game is the other way). A copy of its file gets the edits below, for running it without packages that are not
used, without TensorBoard, and with marks of time. Evaluation, logging and checkpoints are off on both sides.

Every run is a process of its own; the sides take turns, in an order that changes from repeat to repeat. Counted is what
follows the first 4,096 steps. Runs of part `stepping` act, step and fill the replay without learning. Runs of part
`whole` learn once in `every` steps from `batch` transitions; what they spend on updates (sampling, loss, optimizer
step, target networks) is also in columns of its own. Of these, the first of each file are CleanMARL's own: vdn.py
learns from 32 transitions once in 5 steps, qmix.py from 10 episodes after each. The project's goal is judged there.
The others are fm3q.py's default, 256 transitions once in 32 steps, and rare updates, to show what is left when stepping
is most of the work.

The CSV has one row a run. A ratio is that of two runs of the same repeat; shown are medians, lowest and highest. CPU
time says more than time where the machine has other work.
"""

import csv
import functools
import hashlib
import multiprocessing
import os
import platform
import runpy
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from algorithms import fm3q
from envs.two_team import arat_game

ROOT = Path(__file__).resolve().parents[1]
HORIZON, WARM_UP, LEARNING_STARTS = 20, 4_096, 2_048
REPLAY, NEVER = 20_000, 10**9  # transitions, and more steps than any run has
RATES = {  # environment steps for each update and transitions in its batch; CleanMARL's own first
    "vdn": ((5, 32), (32, 256), (200, 32)),
    "qmix": ((20, 200), (200, 200)),
}
CASES = [(mixer, *rate) for mixer, rates in RATES.items() for rate in ((0, 0), *rates)]  # 0: stepping, no learning
GOAL = 10  # times CleanMARL's steps a second at its own rate of updates
# Edits of CleanMARL's files: old text, new text. These take away packages that are not needed: runpy gives the scripts
# OneGame by the name of LBFWrapper, and a writer that writes nothing, because logging is not compared.
SHARED_EDITS = (
    ("from env.pettingzoo_wrapper import PettingZooWrapper\n", ""),
    ("from env.smaclite_wrapper import SMACliteWrapper\n", ""),
    ("from env.lbf import LBFWrapper\n", ""),
    ("from torch.utils.tensorboard import SummaryWriter\n", ""),
)
# These tell the clock when a step or an episode begins, when an update begins and ends, and when the run is over.
EDITS = {
    "vdn": (
        ("range(args.total_timesteps):\n", "range(args.total_timesteps):\n        clock.at(step)\n"),
        ("    writer.close()\n", "    clock.end(step + 1)\n    writer.close()\n"),
        (
            "            if step % args.train_freq == 0:\n",
            "            if step % args.train_freq == 0:\n                clock.updating()\n",
        ),
        (
            "utility_net=utility_network,\n                    polyak=args.polyak,\n                )\n",
            "utility_net=utility_network,\n                    polyak=args.polyak,\n                )\n"
            "                clock.updated(1)\n",
        ),
    ),
    "qmix": (
        ("while step < args.total_timesteps:\n", "while step < args.total_timesteps:\n        clock.at(step)\n"),
        ("    writer.close()\n", "    clock.end(step)\n    writer.close()\n"),
        (
            "            if num_episode % args.train_freq == 0:\n",
            "            if num_episode % args.train_freq == 0:\n                clock.updating()\n",
        ),
        (
            "target_net=target_mixer, utility_net=mixer, polyak=args.polyak\n                )\n",
            "target_net=target_mixer, utility_net=mixer, polyak=args.polyak\n                )\n"
            "                clock.updated(1)\n",
        ),
    ),
}
COLUMNS = "mixer side games part every batch repeat steps updates seconds cpu_seconds update_seconds update_cpu_seconds"
COLUMNS = f"{COLUMNS} steps_per_second steps_per_cpu_second updates_per_second updates_per_cpu_second threads load"
COLUMNS = f"{COLUMNS} torch numpy python device cleanmarl commit command".split()


@dataclass
class Args:
    cleanmarl: str
    """checkout of CleanMARL; its cleanmarl/vdn.py and cleanmarl/qmix.py are run"""
    steps: int = 6_144
    """environment steps that are counted in a run; more where these are less than 100 updates, or 50 steps of a game"""
    repeats: int = 3
    """times that every arm is run"""
    games: tuple[int, ...] = (1, 8, 32, 256, 2048)
    """games of fm3q.py that are stepped together"""
    whole: tuple[int, ...] = (1, 32, 2048)
    """those of them with which it also learns"""
    csv: str = "benchmarks/results/speed_marl.csv"
    """CSV to write"""


# --- What both sides share -------------------------------------------------------------------------------------------


class Clock:
    """Time and CPU time of a run after its warm-up, and of the updates in it."""

    def __init__(self):
        self.began, self.first, self.updates, self.spent = None, 0, 0, np.zeros(2)

    @staticmethod
    def now() -> np.ndarray:
        return np.array([time.perf_counter(), time.process_time()])

    def at(self, step: int) -> None:
        """Before an environment step, or the first step of an episode."""
        if self.began is None and step >= WARM_UP:
            self.began, self.first = self.now(), step

    def updating(self) -> None:
        self.update_began = self.now()

    def updated(self, count: int) -> None:
        if self.began is not None:
            self.spent, self.updates = self.spent + self.now() - self.update_began, self.updates + count

    def end(self, step: int) -> None:
        self.total, self.steps = self.now() - self.began, step - self.first

    def columns(self) -> dict[str, float]:
        names = "steps updates seconds cpu_seconds update_seconds update_cpu_seconds".split()
        seconds = np.concatenate([self.total, self.spent]).round(4).tolist()
        return dict(zip(names, (self.steps, self.updates, *seconds)))


@functools.cache
def tables() -> tuple[np.ndarray, np.ndarray]:
    """Rewards (S,A^n,A^m) and cumulative transitions (S,A^n,A^m,S)."""
    rewards, transitions, _ = arat_game("large")
    return rewards.float().numpy(), transitions.cumsum(-1).float().numpy()


class OneGame:
    """One copy of the large additive game, with the interface of CleanMARL's environments."""

    def __init__(self, map_name: str = "arat_large", agent_ids: bool = True):
        """What agents see is looked up, not built: nothing here should slow CleanMARL down."""
        self.rewards, self.ladders = tables()
        self.n_agents, self.actions, self.size = 6, 4, len(self.rewards)
        self.states = np.eye(self.size, dtype=np.float32)  # (S,S)
        ids = np.eye(self.n_agents, dtype=np.float32) if agent_ids else np.zeros((self.n_agents, 0), np.float32)
        self.views = [np.concatenate([np.tile(row, (self.n_agents, 1)), ids], 1) for row in self.states]  # S of (N,O)
        self.available, self.random = np.ones((self.n_agents, self.actions), bool), np.random.default_rng(1)
        self.reset()

    def reset(self, seed: int | None = None):
        self.state, self.clock = int(self.random.integers(self.size)), 0
        return self.views[self.state], {}

    def step(self, actions: torch.Tensor):
        """(N,) -> observations (N,O), reward, ended, cut off, nothing."""
        a, b, c, d, e, f = actions.tolist()
        place = self.state, (a * 4 + b) * 4 + c, (d * 4 + e) * 4 + f
        self.state = min(int(self.ladders[place].searchsorted(self.random.random(dtype=np.float32))), self.size - 1)
        self.clock += 1
        return self.views[self.state], self.rewards[place], False, self.clock == HORIZON, {}

    def sample(self) -> torch.Tensor:
        return torch.randint(self.actions, (self.n_agents,))

    def get_avail_actions(self) -> np.ndarray:
        return self.available

    def get_state(self) -> np.ndarray:
        return self.states[self.state]

    def get_state_size(self) -> int:
        return self.size

    def get_obs_size(self) -> int:
        return self.views[0].shape[1]

    def get_action_size(self) -> int:
        return self.actions

    def close(self) -> None:
        pass


class Quiet:
    """A TensorBoard writer that writes nothing."""

    def __init__(self, folder: str):
        pass

    def add_scalar(self, *row) -> None:
        pass

    add_text = close = add_scalar


# --- Runs ------------------------------------------------------------------------------------------------------------


def edited(path: Path) -> str:
    """A script of CleanMARL with the edits."""
    try:
        text = path.read_text()
    except OSError:
        sys.exit(f"error: --cleanmarl: {path} cannot be read; expected a checkout of github.com/AmineAndam04/cleanmarl")
    for old, new in (*SHARED_EDITS, *EDITS[path.stem]):
        if text.count(old) != 1:
            sys.exit(f"error: {path}: the text to be edited is not there once: {old.strip().splitlines()[0]}")
        text = text.replace(old, new)
    return text


def words(mixer: str, every: int, batch: int, games: int, steps: int) -> list[str]:
    """Words behind `python`. games: 0 is CleanMARL; every: environment steps for each update, 0 is no learning."""
    batch = batch or RATES[mixer][0][1]
    flags = {"total-timesteps": WARM_UP + steps, "learning-rate": 5e-4, "gamma": 0.9, "start-e": 0.05, "end-e": 0.05}
    if games:
        flags |= {"env-id": "arat_large", "mixer": mixer, "num-envs": games, "device": "cpu"}
        flags |= {"updates-per-step": games / every if every else 0.0, "target-network-frequency": 1, "tau": 0.01}
        flags |= {"buffer-size": REPLAY, "batch-size": batch, "learning-starts": LEARNING_STARTS}
        flags |= {"hidden-size": 64, "embed-dim": 32, "max-grad-norm": 10.0, "eval-steps": 0}
    else:
        unit = HORIZON if mixer == "qmix" else 1  # qmix.py counts replay, batch and updates in episodes
        flags |= {"env-type": "lbf", "env-name": "arat_large", "hidden-dim": 64, "num-layers": 1, "clip-gradients": 10}
        flags |= {"buffer-size": REPLAY // unit, "batch-size": batch // unit, "polyak": 0.01}
        flags |= dict.fromkeys(("train-freq", "target-network-update-freq"), every // unit if every else NEVER)
        flags |= {"learning-starts": LEARNING_STARTS if every else NEVER} if mixer == "vdn" else {"hyper-dim": 32}
        flags |= {"eval-steps": NEVER}
    program = "algorithms/fm3q.py" if games else f"cleanmarl/{mixer}.py"
    return [program, *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]


def run_cleanmarl(line: list[str], text: str) -> dict[str, float]:
    """A run of CleanMARL's edited script, in this process."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, Path(line[0]).name)
        path.write_text(text)
        sys.argv = [str(path), *line[1:]]
        names = {"clock": clock, "LBFWrapper": OneGame, "SummaryWriter": Quiet}
        runpy.run_path(str(path), names, "__main__")
    return clock.columns()


def run_ours(line: list[str]) -> dict[str, float]:
    """The steps 1 and 2 of fm3q.py's loop, in this process."""
    clock, args = Clock(), tyro.cli(fm3q.Args, args=line[1:])
    device = fm3q.setup(args)
    torch.manual_seed(args.seed)
    game = fm3q.make_game(args, args.num_envs, args.seed, device)
    networks, target = fm3q.Networks(game, args), fm3q.Networks(game, args)
    learner = fm3q.Learner(networks, target, args)
    for step in range(0, args.total_timesteps, args.num_envs):
        clock.at(step)
        epsilon = fm3q.exploration(args, step)
        learner.collect(game, fm3q.act(learner.online, game, epsilon))
        clock.updating()
        due = fm3q.updates_due(args, step)
        for update in due:
            batch = learner.buffer.sample(args.batch_size)
            loss = fm3q.learner_loss(learner.online, learner.target, batch, args)
            learner.gradient_step(loss, update)
        clock.updated(len(due))
    clock.end(args.total_timesteps)
    return clock.columns()


def run(mixer: str, every: int, batch: int, games: int, steps: int, text: str) -> dict:
    """A run in a process of its own, as a row of the CSV."""
    steps = max(steps, 100 * every if every else 50 * games)
    line = words(mixer, every, batch, games, -(-steps // (games or 1)) * (games or 1))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        found = pool.submit(*((run_ours, line) if games else (run_cleanmarl, line, text))).result()
    if every and abs(found["updates"] * every / found["steps"] - 1) > 0.05:
        sys.exit(f"error: {found['updates']} updates in {found['steps']} steps, expected one in {every}: {line}")
    row = {"mixer": mixer, "side": "fm3q" if games else "cleanmarl", "games": games or 1}
    row |= {"part": "whole" if every else "stepping", "every": every or "", "batch": batch or ""} | found
    for kind in ("", "cpu_"):
        row[f"steps_per_{kind}second"] = round(found["steps"] / found[f"{kind}seconds"], 1)
        updating = found[f"update_{kind}seconds"]
        row[f"updates_per_{kind}second"] = round(found["updates"] / updating, 1) if updating else ""
    return row | {"command": f"python {shlex.join(line)}"}


# --- Summary ---------------------------------------------------------------------------------------------------------


def middle(values: list[float], sign: str = "") -> str:
    """Median (lowest-highest)."""
    places = ",.0f" if min(values) >= 100 else ".2f"
    return f"{sign}{statistics.median(values):{places}} ({min(values):{places}}-{max(values):{places}})"


def summary(rows: list[dict]) -> None:
    """Medians, ratios to CleanMARL and the goal, on the screen."""
    for mixer, every, batch in CASES:
        here = [r for r in rows if (r["mixer"], r["every"] or 0, r["batch"] or 0) == (mixer, every, batch)]
        peers = [r for r in here if r["side"] == "cleanmarl"]
        print(f"\n{mixer}, " + (f"{batch} transitions every {every} steps" if every else "stepping without learning"))
        for side, games in dict.fromkeys((r["side"], r["games"]) for r in sorted(here, key=lambda r: r["games"])):
            runs = [r for r in here if (r["side"], r["games"]) == (side, games)]
            text = f"  {side:>9} {games:>4} games  {middle([r['steps_per_cpu_second'] for r in runs])} steps/CPU s"
            if every:
                text += f", {middle([r['updates_per_cpu_second'] for r in runs])} updates/CPU s"
                share = statistics.median(r["update_cpu_seconds"] / r["cpu_seconds"] for r in runs)
                text += f" for {share:.0%} of it"
            if side == "fm3q":
                for name, kind in (("CPU time", "cpu_"), ("time", "")):
                    ratios = [a[f"steps_per_{kind}second"] / b[f"steps_per_{kind}second"] for a, b in zip(runs, peers)]
                    text += f"; {middle(ratios, 'x')} of {name}"
                    if kind and every == RATES[mixer][0][0]:
                        text += f", goal {GOAL} {'reached' if statistics.median(ratios) >= GOAL else 'missed'}"
            print(text)


def commit_of(folder: str | Path) -> str:
    """Short hash of a checkout's commit; empty if it is no checkout."""
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def version_of(checkout: str) -> str:
    """Commit of CleanMARL, and a digest of the files that are run."""
    commit = commit_of(checkout)
    parts = [hashlib.sha256(Path(checkout, f"cleanmarl/{name}.py").read_bytes()).hexdigest()[:12] for name in RATES]
    return f"{commit or 'no commit'}, sha256 {' '.join(parts)}, edited"


def main(args: Args) -> None:
    texts = {mixer: edited(Path(args.cleanmarl, f"cleanmarl/{mixer}.py")) for mixer in RATES}
    how = {"commit": commit_of(ROOT), "cleanmarl": version_of(args.cleanmarl)}
    how |= {"torch": torch.__version__, "numpy": version("numpy"), "python": platform.python_version(), "threads": 1}
    how |= {"device": f"CPU ({os.cpu_count()} cores, {platform.machine()})"}
    rows = []
    for repeat in range(args.repeats):
        for mixer, every, batch in CASES:
            arms = [0, *(args.whole if every else args.games)]
            for games in arms if repeat % 2 == 0 else arms[::-1]:
                load = os.getloadavg()[0]
                row = run(mixer, every, batch, games, args.steps, texts[mixer])
                rows.append(row | how | {"repeat": repeat + 1, "load": f"{load:.2f}"})
                text = f"{repeat + 1}  {mixer} {row['part']} {every} {row['side']} x{row['games']}"
                print(f"{text}: {row['steps_per_cpu_second']:,.0f} steps/CPU s, load {load:.1f}", flush=True)
        with (ROOT / args.csv).open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    summary(rows)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(tyro.cli(Args))
