"""Environment steps a second of unimodal_poisson.py next to CleanRL's ppo_continuous_action.py.

    git clone https://github.com/vwxyzjn/cleanrl
    python benchmarks/machines/speed_ppo.py --cleanrl cleanrl --compile    # 20 minutes; needs a C++ compiler

HalfCheetah-v5, one thread, the same environments and steps a batch, epochs, minibatches and networks
of 2 x 64. Arms: `cleanrl` and `gaussian` (the same policy), `poisson`, `compile` (gaussian with
--compile). A copy of CleanRL's file gets EDITS, without which it does not run on gymnasium 1.x.

Every run is a process of its own; the sides take turns. Time counts from the end of the first batch,
after imports and compiling. Limits beside them: `simulator` makes random steps without learning,
`mj_step` is MuJoCo alone. The CSV has a row a run; make_tables.py takes ratios within a repeat.
"""

import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.about import RESULTS, ROOT, about, edited, timed_lines  # noqa: E402

ENV_ID = "HalfCheetah-v5"
CASES = {"1 x 2048": (1, 2048), "8 x 256": (8, 256)}
LIMITS = ("simulator", "mj_step")
EDITS = {  # to CleanRL's file: old text, new text
    "TransformObservation(env, lambda obs: np.clip(obs, -10, 10))": (
        "TransformObservation(env, lambda obs: np.clip(obs, -10, 10), env.observation_space)"
    ),
    "for i in range(args.num_envs)]\n    )": (
        "for i in range(args.num_envs)],\n        autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,\n    )"
    ),
    'for info in infos["final_info"]:': (
        'for i in np.flatnonzero(infos["_final_info"]):\n' + " " * 20 + "info = "
        '{"episode": {k: v[i] for k, v in infos["final_info"]["episode"].items()}}'
    ),
}


@dataclass
class Args:
    cleanrl: str = ""
    """checkout of CleanRL; without one, only this side is timed"""
    steps: int = 40_960
    """environment steps of a run, 2048 a batch; the first batch is not counted"""
    repeats: int = 5
    """times that every arm is run"""
    arms: tuple[str, ...] = ("gaussian", "poisson")
    """arms of this side"""
    cases: tuple[str, ...] = tuple(CASES)
    """environments x steps of a batch"""
    compile: bool = False
    """also time our gaussian with --compile; needs a C++ compiler"""
    csv: str = str(RESULTS / "speed_ppo.csv")
    """CSV to write"""


def command(arm: str, case: str, steps: int) -> list[str]:
    """Words behind `python`."""
    num_envs, num_steps = CASES[case]
    flags = f"--env-id {ENV_ID} --num-envs {num_envs} --num-steps {num_steps}"
    flags += f" --total-timesteps {steps}"
    if arm == "cleanrl":
        return f"ppo_continuous_action.py {flags} --no-cuda".split()
    policy = "gaussian --compile" if arm == "compile" else arm
    flags += f" --policy {policy} --eval-episodes 0 --save-steps 0"
    return f"{ROOT}/algorithms/unimodal_poisson.py {flags}".split()


def train(arm: str, case: str, steps: int, text: str) -> tuple[float, float, int]:
    """Seconds, CPU seconds and steps of a run of training after its first batch."""
    words = command(arm, case, steps)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "ppo_continuous_action.py").write_text(text)
        marks = timed_lines(words, folder, "SPS: " if arm == "cleanrl" else "step ")
    num_envs, num_steps = CASES[case]
    steps = (len(marks) - 1) * num_envs * num_steps
    return marks[-1][1] - marks[0][1], marks[-1][2] - marks[0][2], steps


def limit(arm: str, case: str, steps: int, text: str) -> tuple[float, float, int]:
    """Seconds, CPU seconds and steps of the bare simulator."""
    import mujoco

    from algorithms import unimodal_poisson as script

    num_envs = CASES[case][0]
    envs = script.make_envs(script.Args(env_id=ENV_ID), num_envs)
    envs.reset(seed=1)
    envs.action_space.seed(1)
    task = envs.envs[0].unwrapped
    count = steps // num_envs
    actions = [envs.action_space.sample() for _ in range(count)]
    began = (time.perf_counter(), time.process_time())
    for action in actions:
        if arm == "simulator":
            envs.step(action)
            continue
        for row in action:  # one environment at a time: MuJoCo alone gains nothing from several
            task.data.ctrl[:] = row
            mujoco.mj_step(task.model, task.data, nstep=task.frame_skip)
    seconds = time.perf_counter() - began[0]
    return seconds, time.process_time() - began[1], count * num_envs


def main(args: Args) -> None:
    arms = [*args.arms, *["compile"] * args.compile]
    text = ""
    how = about("torch", "gymnasium", "mujoco", "numpy")
    if args.cleanrl:
        path = Path(args.cleanrl, "cleanrl", "ppo_continuous_action.py")
        text, how["cleanrl"] = edited(path, EDITS)
        arms.insert(0, "cleanrl")
    rows = []
    for repeat in range(1, args.repeats + 1):
        for case in args.cases:
            for arm in [*arms[:: 1 if repeat % 2 else -1], *LIMITS]:
                run = limit if arm in LIMITS else train
                seconds, cpu, steps = run(arm, case, args.steps, text)
                row = {"case": case, "arm": arm, "repeat": repeat, "steps": steps}
                row |= {"seconds": seconds, "steps_per_second": steps / seconds}
                row |= {"cpu_seconds": cpu, "steps_per_cpu_second": steps / cpu}
                rows.append(row)
                print(f"{case}  {arm}: {steps / cpu:,.0f} steps a CPU second", flush=True)
    pd.DataFrame(rows).round(3).assign(**how).to_csv(args.csv, index=False, lineterminator="\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(tyro.cli(Args))
