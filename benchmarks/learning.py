"""Does a method learn what its paper says, at a size that a laptop reruns: every arm, several seeds, raw rows in CSVs.

    python benchmarks/learning.py --study gdpo --jobs 2      # takes up where it stopped
    python benchmarks/learning.py --study dr_mas --jobs 2
    python benchmarks/learning.py --study igpo --jobs 2
    python benchmarks/learning.py --study pi_play --jobs 2
    python benchmarks/learning.py --study spiral_rae --jobs 2         # tic-tac-toe
    python benchmarks/learning.py --study spiral_kuhn --jobs 2        # Kuhn poker
    python benchmarks/learning.py --study spiral_games --keep runs/spiral_games      # for head_to_head_spiral.py
    python benchmarks/make_tables.py                         # redraws tables and figures from the CSVs

A sweep with a seed of its own (SWEEP_SEED) chooses the learning rate of an arm: the one with the best final score, see
`Study.best`. An arm may take the rate of another arm's sweep, or a fixed one. Then every arm runs on its seeds, one
process a run, one thread a process. Two files are written: results/<study>_runs.csv has one row a run (command, commit,
versions, device, minutes, memory, final scores), results/<study>_curves.csv evaluations and some training metrics as
they were logged (run, step, tag, value). GRPO's study is study.py's.
"""

import csv
import os
import platform
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from threading import Lock

import tyro

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
COLUMNS = "minutes peak_memory_gb device threads torch transformers python commit command".split()
AGENT_COLUMNS = ("norm_mean", "norm_p99", "norm_max", "inflation", "calls")
RATES = ("1e-4", "2e-4", "4e-4")
SWEEP_SEED = 100
SCALED = (  # a driver in place of the script: the correctness reward of tool_calls, times a factor
    "import tyro; from algorithms import {script} as script; from envs.tool_calls import ToolCalls; "
    "functions = ToolCalls.reward_functions; "
    "original = functions['correctness']; functions['correctness'] = lambda *x: {scale} * original(*x); "
    "script.train(tyro.cli(script.Args))"
)


@dataclass(frozen=True)
class Arm:
    """One row of a table."""

    flags: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (1, 2, 3)
    rate: str = ""  # arm whose sweep gives the learning rate, or a learning rate; empty is the arm's own sweep
    scale: float = 1.0  # of the reward `correctness`
    common: tuple[str, ...] = ()  # flags in place of the study's


@dataclass(frozen=True)
class Study:
    """A program, flags for all runs, and what is noted of a run."""

    script: str  # path
    common: tuple[str, ...]
    arms: dict[str, Arm]
    scores: dict[str, str | dict[str, float]]  # column: tag of the last evaluation, or tags and their weights in a sum
    tags: tuple[str, ...]  # training metrics for the curves
    rates: tuple[str, ...] = RATES  # of the sweep
    best: str = "mean_at_8"  # column of scores by which the sweep chooses
    lowest: bool = False  # it is a loss: the lowest is best
    fast: str = ""  # tag of a training reward: steps until it reaches 0.9 are noted
    agents: tuple[str, ...] = ()  # of a team: gradient norms and inflation factors of their models are noted
    first: tuple[str, ...] = field(default=("mean_at_8",))  # columns whose first evaluation is noted too

    @property
    def columns(self) -> list[str]:
        """Header of results/<study>_runs.csv."""
        fast = ["steps_to_90", "converged"] if self.fast else []
        start = ["run", "arm", "stage", "seed", "learning_rate", *self.scores]
        fast += [f"{agent}_{column}" for agent in self.agents for column in AGENT_COLUMNS]
        return [*start, *(f"first_{name}" for name in self.first), *fast, *COLUMNS]


COMMON_TAGS = ("train/reward", "train/rewards/correctness/mean", "train/frac_reward_zero_std", "train/grad_norm")
COMMON_TAGS += ("train/completions/mean_length",)
PASS = {"pass_at_1": "eval/pass_at_1", "mean_at_8": "eval/mean_at_8", "pass_at_8": "eval/pass_at_8"}
SHORT = ("--max-steps", "60", "--num-prompts-per-step", "16", "--eval-steps", "30")
TOOL_CALLS = ("--env", "tool_calls", *SHORT)
COUNTDOWN = ("--env", "countdown", *SHORT)
CONDITIONED = ("--conditioned-rewards", "length")
IGPO = ("--max-steps", "40", "--num-prompts-per-step", "16", "--eval-steps", "20", "--eval-problems", "64")
SEATS = [("random", "first"), ("random", "second"), ("minimax", "first"), ("minimax", "second")]
TICTACTOE = {
    f"{who}_{seat}_{x}": f"eval/tictactoe/{who}/{seat}/{x}" for who, seat in SEATS for x in ("win", "draw", "loss")
}
POINTS = {TICTACTOE[f"random_{seat}_{x}"]: w for seat in ("first", "second") for x, w in (("win", 0.5), ("draw", 0.25))}
KUHN = {"nash_conv_last": "eval/kuhn/nash_conv_last", "nash_conv_average": "eval/kuhn/nash_conv_average"}
SPIRAL_TICTACTOE = ("--num-games-per-step", "32", "--max-steps", "16", "--eval-steps", "8", "--eval-games", "128")
SPIRAL_TICTACTOE += ("--eval-opponents", "random", "minimax")
SPIRAL_KUHN = ("--games", "kuhn", "--num-games-per-step", "64", "--max-steps", "25", "--eval-steps", "5")
SPIRAL_KUHN += ("--eval-games", "1")
HANDICAP = ("--game-options", '{"kuhn": {"handicap": 3}}')
SPIRAL_GAMES = ("--num-games-per-step", "24", "--max-steps", "20", "--eval-steps", "0")
STUDIES = {
    "gdpo": Study(
        script="algorithms/gdpo.py",
        common=TOOL_CALLS,
        arms={
            "gdpo": Arm(seeds=(1, 2, 3, 4, 5)),
            "grpo": Arm(("--advantage", "grpo"), (1, 2, 3, 4, 5)),
            "grpo_batch_norm": Arm(("--advantage", "grpo_batch_norm"), (1, 2, 3, 4, 5)),
            "grpo_no_std": Arm(("--advantage", "grpo_no_std")),
            **{
                f"{name}_scale_{scale}": Arm(("--advantage", name), (1,), name, scale)
                for name in ("gdpo", "grpo")
                for scale in (0.1, 3.0)
            },
            **{
                f"{kind}_weight_{weight}": Arm(
                    ("--reward-weights", "1", "0", weight, *(CONDITIONED if kind == "conditioned" else ())),
                    (1,),
                    "2e-4",  # the default, for all: nothing is compared but the weights
                    common=COUNTDOWN,
                )
                for kind in ("plain", "conditioned")
                for weight in ("1", "0.5", "0.25")
            },
        },
        scores=PASS
        | {"pass_at_1": "eval/greedy"}
        | {name: f"eval/rewards/{name}" for name in ("correctness", "format", "length")},
        tags=(*COMMON_TAGS, *(f"train/rewards/{name}/mean" for name in ("exact", "format", "length"))),
        rates=(*RATES, "8e-4"),
        fast="train/rewards/format/mean",
        first=("mean_at_8", "correctness", "format", "length"),
    ),
    "dr_mas": Study(
        script="benchmarks/refiner_team.py",
        common=("--max-steps", "40", "--num-prompts-per-step", "16", "--eval-steps", "20", "--eval-problems", "64"),
        arms={
            "agent": Arm(seeds=(1, 2, 3, 4, 5)),
            "global": Arm(("--normalization", "global"), (1, 2, 3, 4, 5)),
            "agent_mean": Arm(("--normalization", "agent_mean"), (1,), "agent"),
            "agent_std": Arm(("--normalization", "agent_std"), (1,), "agent"),
            "call": Arm(("--normalization", "call"), (1,), "agent"),
        },
        scores=PASS | {"pass_at_1": "eval/greedy"},
        tags=("train/reward", "train/frac_reward_zero_std"),
        agents=("router", "searcher", "refiner", "responder"),
    ),
    "igpo": Study(
        script="algorithms/igpo.py",
        common=IGPO,
        arms={
            "f1ig": Arm(seeds=(1, 2, 3, 4, 5)),
            "f1": Arm(("--advantage", "f1"), (1, 2, 3, 4, 5)),
            "ig": Arm(("--advantage", "ig"), rate="f1ig"),
            "prob_joint": Arm(("--information-gain", "prob", "--normalization", "joint"), rate="f1ig"),
            "prob_separate": Arm(("--information-gain", "prob"), rate="f1ig"),
            "log_joint": Arm(("--normalization", "joint"), rate="f1ig"),
        },
        scores={"pass_at_1": "eval/greedy", "mean_at_8": PASS["mean_at_8"]}
        | {"f1_mean_at_8": "eval/rewards/f1", "turns": "eval/turns"},
        tags=("train/rewards/f1/mean", "train/frac_reward_zero_std", "train/num_tokens")
        + tuple(f"train/igpo/{name}" for name in ("frac_no_signal", "turns", "gain")),
        first=("pass_at_1", "mean_at_8", "f1_mean_at_8", "turns"),
    ),
    "pi_play": Study(
        script="algorithms/pi_play.py",
        common=("--max-steps", "60", "--eval-steps", "5"),  # the default, evaluated more often
        arms={
            "qcp": Arm(seeds=(1, 2, 3, 4, 5)),
            "none": Arm(("--privileged-context", "none"), (1, 2, 3, 4, 5)),
            "partial": Arm(("--privileged-context", "partial"), rate="qcp"),
            "answer": Arm(("--privileged-context", "answer"), rate="qcp"),
            "one_hop_qcp": Arm(("--hops", "1"), rate="qcp"),
            "one_hop_none": Arm(("--hops", "1", "--privileged-context", "none"), rate="none"),
            "lambda_fixed": Arm(("--lambda-schedule", "1"), rate="qcp"),
            "lambda_paper": Arm(("--lambda-schedule", "0.03", "0.003", "0.002"), rate="qcp"),
            "forward_kl": Arm(("--divergence", "forward_kl"), rate="qcp"),
            "examiner_frozen": Arm(("--examiner-steps", "0", "--max-steps", "45"), rate="qcp"),
        },
        scores={"pass_at_1": "eval/greedy", "mean_at_8": PASS["mean_at_8"], "turns": "eval/turns"},
        tags=("train/reward", "train/frac_reward_zero_std", "train/num_tokens", "train/entropy")
        + tuple(f"train/pi_play/{name}" for name in ("divergence", "searches", "repeated_searches"))
        + tuple(f"train/pi_play/examiner/{name}" for name in ("reward", "format", "pass_rate", "num_tokens")),
        first=("pass_at_1", "mean_at_8", "turns"),
    ),
    "spiral_rae": Study(
        script="algorithms/spiral_rae.py",
        common=SPIRAL_TICTACTOE,
        arms={
            "role": Arm(),
            "none": Arm(("--baseline", "none")),
            "global": Arm(("--baseline", "global"), rate="role"),
            "long": Arm(("--max-steps", "120", "--eval-steps", "20"), (1,), "4e-4"),
        },
        scores={"points": POINTS, **TICTACTOE},
        tags=("train/grad_norm", "train/completions/mean_length", "train/entropy")
        + tuple(f"train/spiral_rae/tictactoe/{name}" for name in ("forfeits", "draws", "return_0", "return_1")),
        rates=("2e-4", "4e-4", "8e-4"),
        best="points",
        first=("points", *TICTACTOE),
    ),
    "spiral_kuhn": Study(
        script="algorithms/spiral_rae.py",
        common=(*SPIRAL_KUHN, *HANDICAP),
        arms={
            "role": Arm(),
            "none": Arm(("--baseline", "none")),
            "global": Arm(("--baseline", "global"), rate="role"),
            "standard_role": Arm(rate="role", common=SPIRAL_KUHN),
            "standard_none": Arm(("--baseline", "none"), rate="role", common=SPIRAL_KUHN),
            "fast_role": Arm(rate="4e-4"),  # too fast: what falls apart
            "fast_none": Arm(("--baseline", "none"), rate="4e-4"),
            "fast_global": Arm(("--baseline", "global"), rate="4e-4"),
        },
        scores=KUHN | {"illegal": "eval/kuhn/illegal"},
        tags=("train/grad_norm", "train/completions/mean_length", "train/entropy")
        + tuple(f"train/spiral_rae/kuhn/{name}" for name in ("forfeits", "return_0", "return_1")),
        rates=("3e-5", "6e-5", "1.2e-4"),
        best="nash_conv_average",
        lowest=True,
        first=("nash_conv_last", "illegal"),
    ),
    "spiral_games": Study(  # its policies meet in head_to_head_spiral.py
        script="algorithms/spiral_rae.py",
        common=SPIRAL_GAMES,
        arms={
            "all": Arm(("--games", "tictactoe", "kuhn", "negotiation"), (1,), "4e-4"),
            **{game: Arm(("--games", game), (1,), "4e-4") for game in ("tictactoe", "kuhn", "negotiation")},
        },
        scores={},
        tags=("train/grad_norm", "train/completions/mean_length"),
        first=(),
    ),
}


@dataclass
class Args:
    study: str = "gdpo"
    """which study to run: gdpo, dr_mas, igpo, pi_play, spiral_rae, spiral_kuhn or spiral_games"""
    jobs: int = 2
    """runs at the same time, one thread each"""
    arms: tuple[str, ...] = ()
    """arms to run, in this order; none means all"""
    extra: str = ""
    """further flags for every run, as in --extra="--max-steps 20" to try the program; a row has its whole command"""
    keep: str = ""
    """folder for the trained policies, one folder a run; empty keeps none"""


def runs_file(study: str) -> Path:
    """One row a run."""
    return RESULTS / f"{study}_runs.csv"


def read(path: Path) -> list[dict]:
    """Rows of a CSV, none if it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append(path: Path, columns: list[str], rows: list[dict]) -> None:
    """Add rows to a CSV, with a header if it is new."""
    new = not path.exists()
    path.parent.mkdir(exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def steps_to(values: list[float], level: float = 0.9, window: int = 5) -> int | None:
    """First step (from 1) at which the mean of the last `window` values reaches the level; None if it never does."""
    steps = range(window, len(values) + 1)
    return next((step for step in steps if statistics.mean(values[step - window : step]) >= level), None)


def program(study: Study, arm: Arm) -> list[str]:
    """Words of the command behind `python`: the script, or the driver that scales a reward and then calls it."""
    if arm.scale == 1:
        return [study.script]
    return ["-c", SCALED.format(script=Path(study.script).stem, scale=arm.scale)]


def scores(study: Study, arm: Arm, metrics: list[dict]) -> dict[str, str]:
    """What is noted of a run, from its metrics. Scaled rewards are given in their own unit."""

    def value(evaluation: dict[str, float], name: str) -> str:
        tags = study.scores[name]
        weights = tags if isinstance(tags, dict) else {tags: 1 / unit.get(name, 1)}
        return f"{sum(weight * evaluation[tag] for tag, weight in weights.items()):.4f}"

    evaluations = [row for row in metrics if row["tag"].startswith("eval/")]
    last = {row["tag"]: float(row["value"]) for row in evaluations}
    first = {row["tag"]: float(row["value"]) for row in reversed(evaluations)}
    unit = {"correctness": arm.scale}
    row = {name: value(last, name) for name in study.scores}
    row |= {f"first_{name}": value(first, name) for name in study.first}
    if study.fast:
        step = steps_to([float(row["value"]) for row in metrics if row["tag"] == study.fast])
        row |= {"steps_to_90": step or "", "converged": int(step is not None)}
    for agent in study.agents:
        found = {name: [] for name in ("grad_norm", "inflation_factor", "calls")}
        for name, values in found.items():
            values += [float(r["value"]) for r in metrics if r["tag"] == f"train/dr_mas/{agent}/{name}"]
        norms = sorted(found["grad_norm"])
        inflation = [value for value in found["inflation_factor"] if value == value]  # NaN: no group to tell from
        numbers = [statistics.mean(norms), norms[min(len(norms) - 1, int(0.99 * len(norms)))], norms[-1]]
        numbers += [statistics.mean(inflation), statistics.mean(found["calls"][-5:])]
        row |= {f"{agent}_{column}": f"{number:.4f}" for column, number in zip(AGENT_COLUMNS, numbers)}
    return row


def run_once(args: Args, arm_name: str, stage: str, seed: int, rate: str, lock: Lock) -> None:
    """One training run in a process of its own; its rows are added when it has finished."""
    name, study, run = args.study, STUDIES[args.study], f"{arm_name}-{stage}-{rate}-{seed}"
    arm = study.arms[arm_name]
    with lock:
        if any(row["run"] == run for row in read(runs_file(name))):
            return
    flags = [*(arm.common or study.common), *arm.flags, "--learning-rate", rate, "--seed", str(seed)]
    words = [*program(study, arm), *flags, *args.extra.split()]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        command = [sys.executable, *words, "--output-dir", f"{folder}/run"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        minutes = (time.perf_counter() - start) / 60
        if done.returncode:
            raise SystemExit(f"{shlex.join(command)} failed:\n{done.stderr}")
        metrics, perf = read(Path(folder, "run/metrics.csv")), read(Path(folder, "run/perf.csv"))
        if not perf:  # a newer script logs no memory: the largest of all runs so far, Linux counts in KB
            memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
            perf = [{"tag": "memory_gb", "value": memory}]
        if args.keep:
            shutil.copytree(f"{folder}/run/final", Path(args.keep, run))
    row = {"run": run, "arm": arm_name, "stage": stage, "seed": seed, "learning_rate": rate}
    row |= scores(study, arm, metrics) | {"minutes": f"{minutes:.2f}", "threads": 1}
    row |= {"peak_memory_gb": f"{max(float(r['value']) for r in perf if r['tag'].endswith('memory_gb')):.2f}"}
    row |= {"device": f"CPU ({os.cpu_count()} cores, {platform.machine()})", "python": platform.python_version()}
    row |= {"torch": version("torch"), "transformers": version("transformers"), "commit": commit.strip()}
    row |= {"command": f"python {shlex.join(words)}"}
    curves = [{"run": run, **r} for r in metrics if r["tag"].startswith("eval/") or r["tag"] in study.tags]
    curves = [r | {"value": f"{float(r['value']):.6g}"} for r in curves]
    with lock:
        append(runs_file(name), study.columns, [row])
        append(RESULTS / f"{name}_curves.csv", ["run", "step", "tag", "value"], curves)
        shown = "  ".join(f"{score} {row[score]}" for score in list(study.scores)[:3])
        print(f"{run}: {shown}  {row['minutes']} min", flush=True)


def learning_rate(name: str, arm_name: str) -> str:
    """The arm's fixed rate, or the one with the best final score in the sweep that it goes by."""
    study, rate = STUDIES[name], STUDIES[name].arms[arm_name].rate or arm_name
    if rate not in study.arms:
        return rate
    sweep = [row for row in read(runs_file(name)) if row["arm"] == rate and row["stage"] == "sweep"]
    best = min if study.lowest else max
    return best(sweep, key=lambda row: float(row[study.best]))["learning_rate"]


def main(args: Args) -> None:
    if args.study not in STUDIES or set(args.arms) - set(STUDIES[args.study].arms):
        sys.exit(
            f"--study {args.study} --arms {' '.join(args.arms)}: expected one of {', '.join(STUDIES)} and its arms"
        )
    study, lock = STUDIES[args.study], Lock()
    arms = args.arms or tuple(study.arms)
    with ThreadPoolExecutor(args.jobs) as pool:
        sweep = [(arm, "sweep", SWEEP_SEED, rate) for arm in arms for rate in study.rates if not study.arms[arm].rate]
        list(pool.map(lambda job: run_once(args, *job, lock), sweep))
        final = sorted((seed, arms.index(arm), arm) for arm in arms for seed in study.arms[arm].seeds)  # a table early
        final = [(arm, "final", seed, learning_rate(args.study, arm)) for seed, _, arm in final]
        list(pool.map(lambda job: run_once(args, *job, lock), final))


if __name__ == "__main__":
    main(tyro.cli(Args))
