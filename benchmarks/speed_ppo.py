r"""How many environment steps a second algorithms/unimodal_poisson.py makes next to CleanRL's ppo_continuous_action.py.

    git clone https://github.com/vwxyzjn/cleanrl
    python benchmarks/speed_ppo.py --cleanrl cleanrl             # 15 minutes on one core; nothing else should run
    python benchmarks/speed_ppo.py --cleanrl cleanrl --compile   # also with the loss compiled

HalfCheetah-v5, one thread, the same number of environments and of steps a batch; epochs, minibatches and networks of
2 x 64 are the same by default. Arms: `cleanrl` and `gaussian` (the same policy), `poisson`, `compile` (gaussian with
--compile). CleanRL does not run on gymnasium 1.x as it is, so a copy of its file gets three edits, EDITS below:
TransformObservation is given the observation space, SyncVectorEnv resets in the same step, as it used to, and returns
are read from where they are now. The program stops where the text to be edited is not found.

Every run is a process of its own, as a user starts it; the two sides take turns, and their order changes from repeat to
repeat. Both print a line at the end of every batch; this program notes the time and the CPU time of the process when it
reads that line. Counted is what lies between the line of the first batch and that of the last: neither imports nor the
first batch, with all compiling in it, but everything else that a run does, such as logs and our checkpoints. Our
evaluation is off (--eval-episodes 0); CleanRL has none.

The limit that physics sets is measured beside them: `simulator` makes random steps of the same vector of environments
without any learning, `mj_step` is MuJoCo alone with the task's frame skip and random controls.

The CSV has one row a run. A ratio is that of two runs of the same repeat; shown are medians, lowest and highest. CPU
time says more than time where the machine has other work. Goals are those of the project, printed as reached or not.
"""

import csv
import hashlib
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

ROOT = Path(__file__).resolve().parents[1]
ENV_ID, SCRIPT = "HalfCheetah-v5", "algorithms/unimodal_poisson.py"
CASES = {"1 x 2048": (1, 2048), "8 x 256": (8, 256)}
GOALS = {"1 x 2048": (2.5, 2.0), "8 x 256": (2.2, 1.5)}  # ratio to cleanrl of the same policy: goal, floor
LINES = {"cleanrl": "SPS: "}  # how the line at the end of a batch begins; ours begins with "step "
LIMITS = ("simulator", "mj_step")
EDITS = (  # to CleanRL's file: old text, new text
    (
        "TransformObservation(env, lambda obs: np.clip(obs, -10, 10))",
        "TransformObservation(env, lambda obs: np.clip(obs, -10, 10), env.observation_space)",
    ),
    (
        "for i in range(args.num_envs)]\n    )",
        "for i in range(args.num_envs)],\n        autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,\n    )",
    ),
    (
        """for info in infos["final_info"]:
                    if info and "episode" in info:
                        print(f"global_step={global_step}, episodic_return={info['episode']['r']}")
                        writer.add_scalar("charts/episodic_return", info["episode"]["r"], global_step)
                        writer.add_scalar("charts/episodic_length", info["episode"]["l"], global_step)""",
        """for i in np.flatnonzero(infos["_final_info"]):
                    episode = infos["final_info"]["episode"]
                    print(f"global_step={global_step}, episodic_return={episode['r'][i]}")
                    writer.add_scalar("charts/episodic_return", episode["r"][i], global_step)
                    writer.add_scalar("charts/episodic_length", episode["l"][i], global_step)""",
    ),
)
COLUMNS = "case arm repeat steps seconds cpu_seconds steps_per_second steps_per_cpu_second threads load".split()
COLUMNS += "torch gymnasium mujoco numpy python device cleanrl commit command".split()


@dataclass
class Args:
    cleanrl: str
    """checkout of CleanRL; its cleanrl/ppo_continuous_action.py is run"""
    steps: int = 40_960
    """environment steps of a run, 2048 a batch; the first batch is not counted"""
    repeats: int = 5
    """times that every arm is run"""
    arms: tuple[str, ...] = ("cleanrl", "gaussian", "poisson")
    """arms of training"""
    compile: bool = False
    """also time our gaussian with --compile; needs a C++ compiler"""
    csv: str = "benchmarks/results/speed_ppo.csv"
    """CSV to write"""


def edited(path: Path) -> str:
    """CleanRL's program with EDITS."""
    try:
        text = path.read_text()
    except OSError:
        sys.exit(f"error: --cleanrl: {path} cannot be read; expected a checkout of https://github.com/vwxyzjn/cleanrl")
    for old, new in EDITS:
        if text.count(old) != 1:
            sys.exit(f"error: {path}: the text to be edited is not there once: {old.splitlines()[0]}")
        text = text.replace(old, new)
    return text


def cpu_seconds(process: int) -> float:
    """CPU time of a running process so far, of all its threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def command(arm: str, case: str, steps: int) -> list[str]:
    """Words behind `python`."""
    num_envs, num_steps = CASES[case]
    flags = ["--env-id", ENV_ID, "--num-envs", str(num_envs), "--num-steps", str(num_steps)]
    flags += ["--total-timesteps", str(steps)]
    if arm == "cleanrl":
        return ["ppo_continuous_action.py", *flags, "--no-cuda"]
    flags += ["--policy", "gaussian" if arm == "compile" else arm, "--eval-episodes", "0", "--save-steps", "0"]
    return [SCRIPT, *flags, *(["--compile"] if arm == "compile" else [])]


def run(arm: str, case: str, steps: int, text: str) -> tuple[float, float, int]:
    """Seconds, CPU seconds and steps of a run of training after its first batch."""
    words, marks, others = command(arm, case, steps), [], []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "ppo_continuous_action.py").write_text(text)
        program = words[0] if arm == "cleanrl" else str(ROOT / SCRIPT)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
        with subprocess.Popen([sys.executable, program, *words[1:]], cwd=folder, **options) as process:
            for line in process.stdout:
                if line.startswith(LINES.get(arm, "step ")):
                    marks.append((time.perf_counter(), cpu_seconds(process.pid)))
                else:
                    others.append(line)
        if process.returncode or len(marks) < 2:
            sys.exit(f"error: {shlex.join(['python', *words])} failed:\n{''.join(others[-20:])}")
    (began, cpu_began), (ended, cpu_ended) = marks[0], marks[-1]
    num_envs, num_steps = CASES[case]
    return ended - began, cpu_ended - cpu_began, (len(marks) - 1) * num_envs * num_steps


def limit(arm: str, case: str, steps: int) -> tuple[float, float, int]:
    """Seconds, CPU seconds and steps of the bare simulator."""
    import mujoco
    import numpy as np

    from algorithms import unimodal_poisson

    num_envs = CASES[case][0]
    envs = unimodal_poisson.make_envs(unimodal_poisson.Args(env_id=ENV_ID, policy="gaussian"), num_envs)
    envs.reset(seed=1)
    task, count = envs.envs[0].unwrapped, steps // num_envs
    shape = (count, *envs.action_space.shape)
    actions = np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)  # (T,N,A)
    began, cpu_began = time.perf_counter(), time.process_time()
    if arm == "simulator":
        for action in actions:
            envs.step(action)
    else:  # one environment at a time: MuJoCo alone gains nothing from several
        for action in actions.reshape(-1, shape[-1]):
            task.data.ctrl[:] = action
            mujoco.mj_step(task.model, task.data, nstep=task.frame_skip)
    seconds = time.perf_counter() - began, time.process_time() - cpu_began
    envs.close()
    return *seconds, count * num_envs


def summary(rows: list[dict]) -> None:
    """Medians, ratios to CleanRL and goals, on the screen."""
    for case in CASES:
        found = {arm: [r for r in rows if r["case"] == case and r["arm"] == arm] for arm in (r["arm"] for r in rows)}
        for arm, runs in found.items():
            speeds = [float(r["steps_per_second"]) for r in runs]
            line = (
                f"{case:>8}  {arm:<9} {statistics.median(speeds):7,.0f} steps/s ({min(speeds):,.0f}-{max(speeds):,.0f})"
            )
            for name, column in (("time", "steps_per_second"), ("CPU time", "steps_per_cpu_second")):
                ratios = [float(r[column]) / float(peer[column]) for r, peer in zip(runs, found.get("cleanrl", []))]
                if ratios and arm != "cleanrl" and arm not in LIMITS:
                    ratio = statistics.median(ratios)
                    line += f"  x{ratio:.2f} of {name} ({min(ratios):.2f}-{max(ratios):.2f})"
                    if arm == "gaussian" and name == "CPU time":
                        goal, floor = GOALS[case]
                        line += f", goal {goal} {'reached' if ratio >= goal else 'missed'}"
                        line += f", floor {floor} {'reached' if ratio >= floor else 'missed'}"
            print(line)


def main(args: Args) -> None:
    path = Path(args.cleanrl, "cleanrl/ppo_continuous_action.py")
    text = edited(path)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    how = {name: version(name) for name in ("torch", "gymnasium", "mujoco", "numpy")}
    how |= {"python": platform.python_version(), "device": f"CPU ({os.cpu_count()} cores, {platform.machine()})"}
    how |= {"cleanrl": f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}, edited", "threads": 1}
    arms, rows = [*args.arms, *(["compile"] if args.compile else [])], []
    for repeat in range(args.repeats):
        for case in CASES:
            order = arms if repeat % 2 == 0 else arms[::-1]
            for arm in [*order, *LIMITS]:
                load = os.getloadavg()[0]
                if arm in LIMITS:
                    seconds, cpu, steps = limit(arm, case, args.steps)
                else:
                    seconds, cpu, steps = run(arm, case, args.steps, text)
                row = {"case": case, "arm": arm, "repeat": repeat + 1, "steps": steps, "load": f"{load:.2f}"}
                row |= {"seconds": f"{seconds:.3f}", "cpu_seconds": f"{cpu:.3f}", "commit": commit.strip()}
                row |= {"steps_per_second": f"{steps / seconds:.0f}", "steps_per_cpu_second": f"{steps / cpu:.0f}"}
                words = command(arm, case, args.steps) if arm not in LIMITS else ["benchmarks/speed_ppo.py"]
                rows.append(row | how | {"command": f"python {shlex.join(words)}"})
                print(f"{case}  {arm}: {row['steps_per_second']} steps/s, load {load:.1f}", flush=True)
    with (ROOT / args.csv).open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    summary(rows)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(tyro.cli(Args))
