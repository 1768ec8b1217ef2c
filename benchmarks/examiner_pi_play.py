"""Do the examiner's questions get harder from round to round of pi-Play? results/pi_play_examiner.csv.

    python benchmarks/examiner_pi_play.py      # about 3 minutes a seed on one core

The default run of algorithms/pi_play.py is stopped after the steps of the examiner in every round and continued with
--resume. What examiner/final holds then writes a question about each of some documents, for one hop and for two; the
shipped model, which stays the same, and the student of that round, whom this examiner measured its questions by, answer
each well-formed one n times. Documents and random numbers are the same in all rounds of a seed. Round 0 is the shipped
model as its own examiner and student.
"""

import csv
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from algorithms import pi_play
from benchmarks.score_search_qa import answer_of, share
from envs.search_text import searches

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Args:
    seeds: tuple[int, ...] = (1, 2, 3)
    """seeds of training, each with documents of its own"""
    rounds: int = 3
    """rounds of training"""
    documents: int = 128
    """documents for each seed, round and number of hops"""
    hops: tuple[int, ...] = (1, 2)
    """hops asked for, one after the other"""
    extra: str = ""
    """further flags of training, as in --extra="--num-documents-per-step 4" to try the program"""
    out: str = "benchmarks/results/pi_play_examiner.csv"
    """CSV to write"""


def train(run_dir: str, seed: int, steps: int, extra: list[str]) -> None:
    """Train up to a step, from where the folder is."""
    resume = Path(run_dir, "args.json").exists()
    words = ["algorithms/pi_play.py", "--max-steps", str(steps), "--eval-steps", "0", "--seed", str(seed), *extra]
    command = [sys.executable, *words, "--resume" if resume else "--output-dir", run_dir]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} failed:\n{done.stderr}")


def answered(student, tokenizer, task, problems: list, seeds: list[int], args) -> torch.Tensor:
    """How many of n answers to each question are right. -> (N,)"""
    episodes = pi_play.answer(student, tokenizer, task, problems, args.num_answers, args, seeds)
    return torch.tensor([episode.reward for episode in episodes]).view(-1, args.num_answers).sum(1)


def measure(models: dict, tokenizer, seed: int, count: int, args) -> dict[str, float]:
    """What the questions of an examiner are like; `models` are examiner, student and base, the shipped model."""
    (task, _), n = pi_play.load_task(args), args.num_answers
    seeds = [pi_play.random_seed(seed, "examined", i) for i in range(count)]
    episodes, _, problems = pi_play.examine(models["examiner"], tokenizer, task, seeds, args)
    questions = [problem for problem in problems if problem]
    seeds = [pi_play.random_seed(seed, "answer") for seed, problem in zip(seeds, problems) if problem]
    correct = {"student": answered(models["student"], tokenizer, task, questions, seeds, args)}  # (N,) each
    correct["base"] = correct["student"]
    if models["student"] is not models["base"]:
        correct["base"] = answered(models["base"], tokenizer, task, questions, seeds, args)
    right = torch.tensor([answer_of(problem.question) == problem.answers[0] for problem in questions])  # (N,)
    row = {"well_formed": len(questions) / count, "searches": share(len(searches(e.texts)) for e in episodes)}
    row |= {"right": right.float().mean().item(), "distinct": len({p.question for p in questions}) / len(questions)}
    row |= {"question_hops": share(problem.question.count(" of ") for problem in questions)}
    row |= {"base_pass_rate_right": correct["base"][right].mean().item() / n}
    for prefix, role in (("base_", "base"), ("", "student")):
        k = correct[role]  # (N,)
        row |= {f"{prefix}pass_rate": k.mean().item() / n, f"{prefix}between": share((0 < x < n) for x in k.tolist())}
        row |= {f"{prefix}difficulty": pi_play.examiner_rewards(k, n).mean().item()}
    return row


def seed_rows(seed: int, args: Args, common: dict) -> list[dict]:
    """Rows of one training run, each with what is common to all."""
    extra, rows = shlex.split(args.extra), []
    defaults = tyro.cli(pi_play.Args, args=[*extra, "--seed", str(seed)])
    base, tokenizer = pi_play.load_model(defaults)
    length = defaults.examiner_steps + defaults.student_steps
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds + 1):
            start, models, steps = time.perf_counter(), {"examiner": base, "student": base, "base": base}, 0
            if number:
                steps = (number - 1) * length + defaults.examiner_steps
                train(f"{folder}/run", seed, steps, extra)
                for role, place in (("examiner", "examiner/final"), ("student", "final")):
                    trained = replace(defaults, model_name_or_path=f"{folder}/run/{place}")
                    if role == "examiner" or number > 1:  # in the first round the student is the shipped model
                        models[role] = pi_play.load_model(trained)[0]
            for hops in args.hops:
                values = measure(models, tokenizer, seed, args.documents, replace(defaults, hops=(hops,)))
                row = {"seed": seed, "round": number, "max_steps": steps, "hops": hops, "documents": args.documents}
                row |= {name: f"{value:.4f}" for name, value in values.items()}
                rows.append(row | {"minutes": f"{(time.perf_counter() - start) / 60:.2f}", **common})
                shown = ("well_formed", "right", "base_pass_rate", "pass_rate", "difficulty")
                print(seed, number, hops, *(f"{name} {values[name]:.3f}" for name in shown), flush=True)
                start = time.perf_counter()  # the minutes of training stand in the first row
    return rows


def main(args: Args) -> None:
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    common = {"device": f"CPU ({os.cpu_count()} cores, {platform.machine()})", "threads": torch.get_num_threads()}
    common |= {"torch": version("torch"), "transformers": version("transformers"), "python": platform.python_version()}
    common |= {"commit": commit.strip()}
    common |= {"command": shlex.join(["python", "benchmarks/examiner_pi_play.py", *sys.argv[1:]])}
    rows = []
    for seed in args.seeds:
        rows += seed_rows(seed, args, common)
        with (ROOT / args.out).open("w", newline="") as file:  # with every seed, so that a crash costs one
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main(tyro.cli(Args))
