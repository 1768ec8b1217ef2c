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
    chats = [task.prompt(problem, "verifier", (("Solver", text),)) for problem, text, _ in cases]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)["input_ids"]
    samples = grpo.generate(model, prompts, flags, range(len(prompts)))
    texts = tokenizer.batch_decode([sample.ids for sample in samples])
    return sum(verdict(text) is right for text, (_, _, right) in zip(texts, cases)) / len(cases)


def main(args: Args) -> None:
    flags = grpo.Args(env=args.env, model_name_or_path=args.model, eval_problems=128, num_generations_eval=8)
    task, problems = grpo.load_task(flags)
    model, tokenizer = grpo.load_model(flags)
    greedy = grpo.complete(model, tokenizer, task, problems, 1, flags)
    seeds = [grpo.random_seed("evaluation", i) for i in range(len(problems))]
    samples = grpo.complete(model, tokenizer, task, problems, 8, flags, seeds)
    right = torch.tensor([sample.rewards[0] for sample in samples]).view(-1, 8)
    rewards = torch.tensor([sample.rewards for sample in samples]).mean(0).tolist()
    rewards = dict(zip(task.reward_functions, rewards))

    scores = {"pass_at_1": sum(one.rewards[0] for one in greedy) / len(greedy), "mean_at_8": right.mean().item()}
    scores |= {"pass_at_8": right.amax(1).mean().item()}
    row = {name: f"{value:.4f}" for name, value in scores.items()}
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
