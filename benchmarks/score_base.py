"""Scores of a shipped model before any training, for Countdown in both of its roles: results/tiny_<env>.csv.

python benchmarks/score_base.py --minutes 12.3         # minutes that envs/tiny_lm/pretrain.py took, as it printed
python benchmarks/score_base.py --env tool_calls --minutes 20 --command "python envs/tiny_lm/pretrain.py ..."
"""

import csv
import random
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from algorithms import grpo
from envs.countdown import Countdown, correctness, verdict

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Args:
    minutes: float
    """minutes of pretraining"""
    env: Literal["countdown", "tool_calls"] = "countdown"
    """environment of the model"""
    command: str | None = None
    """command of pretraining; default: with --env alone"""
    device: str = "CPU, 2 cores"
    """machine of pretraining"""
    model: str | None = None
    """model to score; default envs/tiny_lm/<env>"""
    out: str | None = None
    """CSV to write; default benchmarks/results/tiny_<env>.csv"""


def score_verifier(model, tokenizer, task: Countdown, problems: list, flags) -> float:
    """Share of right verdicts, on problems with a right and with a wrong solution in equal parts."""
    generator, cases = random.Random("verifier"), []
    for problem in problems * 4:
        attempts = [task.demonstration(problem, generator) for _ in range(30)]
        right = [text for text in attempts if correctness(problem, text)]
        wrong = [text for text in attempts if not correctness(problem, text)]
        cases += [(problem, pool[0], pool is right) for pool in (right, wrong) if pool and right and wrong]
    prompts = [task.prompt(problem, "verifier", (("Solver", text),)) for problem, text, _ in cases]
    prompts = [grpo.encode(tokenizer, messages) for messages in prompts]
    generators = [torch.Generator().manual_seed(i) for i in range(len(prompts))]
    samples = grpo.generate(model, prompts, 1, flags, generators)
    lengths = samples.mask.sum(1).tolist()
    texts = tokenizer.batch_decode([ids[:n] for ids, n in zip(samples.completion_ids.tolist(), lengths)])
    return sum(verdict(text) is right for text, (_, _, right) in zip(texts, cases)) / len(cases)


def main(args: Args) -> None:
    flags = grpo.Args(env=args.env, model_name_or_path=args.model, eval_problems=128, num_generations_eval=8)
    tokenizer = grpo.load_tokenizer(flags)
    model = grpo.load_model(flags, tokenizer, torch.device("cpu"))
    task = grpo.load_task(flags)
    scores, _ = grpo.evaluate(model, tokenizer, task, flags)
    problems = task.evaluation_problems(flags.eval_problems)
    seeds = [f"evaluation {i}" for i in range(len(problems))]
    rewards = grpo.complete(model, tokenizer, task, problems, 8, flags, seeds)[2].mean(0).tolist()
    rewards = dict(zip(task.reward_functions, rewards))

    row = {name: f"{scores[f'eval/{name}']:.4f}" for name in ("pass_at_1", "mean_at_8", "pass_at_8")}
    row |= {"format": f"{rewards['format']:.4f}"}
    if args.env == "countdown":
        row |= {"verifier": f"{score_verifier(model, tokenizer, task, problems, flags):.4f}"}
    else:
        row |= {name: f"{rewards[name]:.4f}" for name in ("correctness", "length")}
    row |= {"minutes": args.minutes}
    row |= {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    row |= {"torch": version("torch"), "transformers": version("transformers")}
    row |= {"command": args.command or f"python envs/tiny_lm/pretrain.py --env {args.env}", "device": args.device}
    with (ROOT / (args.out or f"benchmarks/results/tiny_{args.env}.csv")).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        writer.writeheader()
        writer.writerow(row)
    print(row)


if __name__ == "__main__":
    main(tyro.cli(Args))
