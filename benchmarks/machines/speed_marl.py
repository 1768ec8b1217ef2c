"""Environment steps a second of fm3q.py next to CleanMARL's vdn.py and qmix.py.

    git clone https://github.com/AmineAndam04/cleanmarl
    python benchmarks/machines/speed_marl.py --cleanmarl cleanmarl       # half an hour on a slow core

Both sides play the additive game with 50 states, three against three, cut off after 20 steps, and
learn from it: here one loss over six signed utilities, there one over six agents who are all friends,
at the same cost. Equal are networks, replay and batch, Adam, clipping, a soft target copy after every
update, and gradient steps for each environment step. CleanMARL plays one game at a time (OneGame, the
same tables in NumPy), this side --games of them in one batch. A copy of CleanMARL's file gets EDITS.

Every run is a process of its own; the sides take turns. Counted is what follows the first 4,096
steps. The first rate of each file is CleanMARL's own. make_tables.py takes ratios within a repeat.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.about import RESULTS, ROOT, about, edited, timed_lines  # noqa: E402
from envs.two_team import arat_game  # noqa: E402

HORIZON = 20
WARM_UP = 4096
LEARNING_STARTS = 2048
REPLAY = 20_000  # transitions
NEVER = 10**9  # more steps than any run has
RATES = {  # environment steps for each update, and transitions in its batch; CleanMARL's own first
    "vdn": ((5, 32), (32, 256), (200, 32)),
    "qmix": ((20, 200), (200, 200)),
}
EDITS = {  # old text: new text
    "from env.pettingzoo_wrapper import PettingZooWrapper\n": "",
    "from env.smaclite_wrapper import SMACliteWrapper\n": "",
    "from env.lbf import LBFWrapper\n": (
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from benchmarks.machines.speed_marl import OneGame as LBFWrapper, Quiet as SummaryWriter, mark\n"
    ),
    "from torch.utils.tensorboard import SummaryWriter\n": "",
}
marked = [0]  # steps that mark has printed
LOOPS = {"vdn": "range(args.total_timesteps):\n", "qmix": "while step < args.total_timesteps:\n"}


@dataclass
class Args:
    cleanmarl: str = ""
    """checkout of CleanMARL; without one, only this side is timed"""
    steps: int = 6144
    """environment steps that are counted; more where these are less than 100 updates"""
    repeats: int = 3
    """times that every arm is run"""
    games: tuple[int, ...] = (1, 32, 2048)
    """games of fm3q.py that are stepped together"""
    mixers: tuple[str, ...] = ("vdn", "qmix")
    """programs of CleanMARL to compare with"""
    csv: str = str(RESULTS / "speed_marl.csv")
    """CSV to write"""


# --- CleanMARL's side -----------------------------------------------------------------------------


class OneGame:
    """One copy of the large additive game, with the interface of CleanMARL's environments.

    What agents see is looked up, not built: nothing here should slow CleanMARL down.
    """

    def __init__(self, map_name: str = "arat_large", agent_ids: bool = True):
        rewards, transitions, _ = arat_game("large")
        self.rewards = rewards.float().numpy()  # (S,A^n,A^m)
        self.ladders = transitions.cumsum(-1).float().numpy()  # (S,A^n,A^m,S)
        self.n_agents, self.actions, self.size = 6, 4, len(self.rewards)
        self.states = np.eye(self.size, dtype=np.float32)
        ids = np.eye(6, dtype=np.float32)[:, : 6 * agent_ids]
        self.views = [np.concatenate([np.tile(row, (6, 1)), ids], 1) for row in self.states]
        self.available = np.ones((6, self.actions), bool)
        self.random = np.random.default_rng(1)
        self.reset()

    def reset(self, seed: int | None = None):
        self.state = int(self.random.integers(self.size))
        self.clock = 0
        return self.views[self.state], {}

    def step(self, actions: torch.Tensor):
        """(N,) -> observations (N,O), reward, ended, cut off, nothing."""
        a, b, c, d, e, f = actions.tolist()
        place = self.state, (a * 4 + b) * 4 + c, (d * 4 + e) * 4 + f
        state = int(self.ladders[place].searchsorted(self.random.random(dtype=np.float32)))
        self.state = min(state, self.size - 1)
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

    def __init__(self, *words, **options):
        pass

    add_scalar = add_text = close = __init__


def mark(step: int) -> None:
    """Print about one step in 512, for timed_lines."""
    if step >= marked[-1] + 512:
        print(f"step {step}", flush=True)
        marked.append(step)


# --- Runs -----------------------------------------------------------------------------------------


def command(mixer: str, every: int, batch: int, games: int, steps: int) -> list[str]:
    """Words behind `python`; no games: CleanMARL."""
    flags = f"--total-timesteps {WARM_UP + steps} --learning-rate 5e-4 --gamma 0.9"
    flags += " --start-e 0.05 --end-e 0.05"
    if games:
        flags += f" --env-id arat_large --mixer {mixer} --num-envs {games} --device cpu"
        flags += f" --updates-per-step {games / every} --target-network-frequency 1 --tau 0.01"
        flags += f" --buffer-size {REPLAY} --batch-size {batch} --eval-steps 0 --save-steps 0"
        flags += f" --learning-starts {LEARNING_STARTS} --hidden-size 64 --embed-dim 32"
        return f"{ROOT}/algorithms/fm3q.py {flags} --max-grad-norm 10".split()
    unit = HORIZON if mixer == "qmix" else 1  # qmix.py counts in episodes
    flags += " --env-type lbf --env-name arat_large --hidden-dim 64 --num-layers 1"
    flags += f" --clip-gradients 10 --polyak 0.01 --eval-steps {NEVER}"
    flags += f" --buffer-size {REPLAY // unit} --batch-size {batch // unit}"
    flags += f" --train-freq {every // unit} --target-network-update-freq {every // unit}"
    flags += f" --learning-starts {LEARNING_STARTS}" if mixer == "vdn" else " --hyper-dim 32"
    return f"{mixer}.py {flags}".split()


def run(mixer: str, every: int, batch: int, games: int, steps: int, text: str) -> dict:
    """A run in a process of its own, as a row of the CSV."""
    steps = max(steps, 100 * every, 50 * games)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, f"{mixer}.py").write_text(text)
        lines = timed_lines(command(mixer, every, batch, games, steps), folder, "step ")
    steps = [int(line.split()[1].partition("/")[0].replace(",", "")) for line, _, _ in lines]
    marks = [(step, *times) for step, (_, *times) in zip(steps, lines) if step >= WARM_UP]
    (first, began, cpu_began), (last, ended, cpu_ended) = marks[0], marks[-1]
    row = {"mixer": mixer, "side": "fm3q" if games else "cleanmarl", "games": games or 1}
    row |= {"every": every, "batch": batch, "steps_per_second": (last - first) / (ended - began)}
    return row | {"steps_per_cpu_second": (last - first) / (cpu_ended - cpu_began)}


def main(args: Args) -> None:
    how = about("torch", "numpy")
    texts = dict.fromkeys(args.mixers, "")
    sides = list(args.games)
    if args.cleanmarl:
        for mixer in args.mixers:
            path = Path(args.cleanmarl, "cleanmarl", f"{mixer}.py")
            loop = {LOOPS[mixer]: f"{LOOPS[mixer]}        mark(step)\n"}
            texts[mixer], how[mixer] = edited(path, EDITS | loop)
        sides.insert(0, 0)
    rows = []
    for repeat in range(1, args.repeats + 1):
        for mixer in args.mixers:
            for every, batch in RATES[mixer]:
                for games in sides[:: 1 if repeat % 2 else -1]:
                    row = run(mixer, every, batch, games, args.steps, texts[mixer])
                    rows.append({"repeat": repeat} | row)
                    print(row, flush=True)
    pd.DataFrame(rows).round(1).assign(**how).to_csv(args.csv, index=False, lineterminator="\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
