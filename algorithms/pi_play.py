# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "transformers>=5.0", "tyro>=1.0", "tensorboard>=2.18"]
# ///
"""pi-Play: search agents learn from questions they ask themselves, and from a teacher who saw how each was made.

Zhang et al., Multi-Agent Self-Play via Privileged Self-Distillation without External Data, arXiv 2604.14054.

Differs from grpo.py in:
1. the method: `reverse_kl`, `generalized_jsd`, `update_teacher`, `examiner_rewards`, `hop_advantages` (all groups; for
   `group_advantages`, `advantage`, `scale_rewards`) in `compute_advantages`, `update`, `token_logprobs` (for
   `completion_logprobs`), `Batch`, `pack`, `pack_strips`, `Packed`, `loss_type`
2. no data: an examiner asks, a student answers: `rollout`, `batch_metrics`, `evaluate`, `train`, `load_task`, `env`;
   exact match is the reward, without `reward_weights`, `total_rewards`, `complete`, `sample_batch`, `batch_map`,
   `num_numbers`, `max_number`; smaller default: `max_steps`, `eval_problems`, `num_prompts_per_step`
3. left out, in `check_args` too: several optimizer steps on a batch (`num_iterations`, `epsilon_high`, `delta`,
   `use_bias_correction_kl`, `skip_equal_groups`), DAPO (`dynamic_sampling`, `mask_truncated_completions`,
   `overlong_buffer_len`, `soft_overlong_penalty`), `compile` (`load_model`), `fsdp` (`shard`, `Trained`, `WHOLE`,
   `apply_gradients`), `resume_args` for a run to evaluate, `learning_rate`, `lr_scheduler_type`, `warmup_steps`
Differs from the paper in:
1. a reconstruction, no code is published: pi_play.md says what is read, second-hand or ours
2. lambda is larger, for the tiny model; no KL penalty by default, one optimizer step a batch (as in Dr. Zero's code)

    python algorithms/pi_play.py                                                   # tiny model, CPU, offline, 2-3 min
    python algorithms/pi_play.py --model-name-or-path Qwen/Qwen2.5-1.5B-Instruct --bf16 --dataset nq.jsonl ...
    torchrun --nproc_per_node 8 algorithms/pi_play.py --model-name-or-path Qwen/Qwen2.5-3B-Instruct --bf16 ...

P questions, G answers each, B = P G rows, N documents, T tokens behind a prompt, V vocabulary, K of it or functions."""

import contextlib
import json
import math
import os
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import groupby
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Literal, get_args, get_origin

import torch
import torch.distributed as dist
import transformers
import tyro
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # the repository root, for envs/
from envs.episodes import Episode, padded, reply_ids
from envs.search_qa import SearchQA
from envs.search_text import searches

TINY_MODELS = os.path.join(sys.path[0], "envs", "tiny_lm")
LOGITS_PER_CHUNK = 2**26  # 256 MB in float32
DIVERGENCES = {"reverse_kl": 1.0, "forward_kl": 0.0, "jsd": 0.5}  # the weight of generalized_jsd

# === 2 Args ===========================================================================================================


@dataclass
class Args:
    model_name_or_path: str | None = None
    """policy: a Hugging Face causal language model, by name or folder; None is the env's tiny model (ours)"""
    env: Literal["search_qa"] = "search_qa"
    """task: multi-hop questions, an invented world to search in (ours)"""
    dataset: str | None = None
    """JSON-lines file in place of the env's own problems; its keys are in envs/ (ours)"""
    retriever_url: str | None = None
    """search_qa: a Search-R1 retrieval server, for questions from a file; None searches the env's own world (ours)"""
    hops: tuple[int, ...] = (1, 2)
    """search_qa: hops of the questions, drawn evenly (ours)"""
    max_turns: int = 5
    """turns of an episode; one without an answer by then has failed (ours; IGPO table 4: 10)"""
    privileged_context: Literal["qcp", "partial", "answer", "none"] = "qcp"
    """what only the teacher sees: question construction path, half of it, answer; none: no teacher (Zhang et al. 3)"""
    lambda_schedule: tuple[float, ...] = (1.0, 0.3, 0.1)
    """lambda, weight of the divergence, in each round; the last one stays (ours; Zhang et al.: 0.03 0.003 0.002)"""
    teacher_tau: float = 0.05
    """share of the student in the teacher after each student step (Zhang et al. table 7)"""
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """KL(student || teacher), KL(teacher || student) or the divergence of both from their mean (Zhang et al. eq. 10)"""
    distill_top_k: int | None = None
    """compare within the teacher's k likeliest tokens, renormalised; None: the vocabulary (Revisiting OPD eq. 8: 32)"""
    mask_special_tokens: bool = False
    """leave the first end token and the first of each token of <think> out of the loss (Revisiting OPD code)"""
    examiner_steps: int = 5
    """steps of the examiner at the beginning of a round (ours; Zhang et al.: 50)"""
    student_steps: int = 15
    """steps of the student after it, which end the round (ours; Zhang et al.: 50)"""
    num_documents_per_step: int = 32
    """N, episodes of the examiner in one of its steps over all processes, a document each (ours; Dr. Zero: 256)"""
    num_answers: int = 5
    """n, answers of the student that measure a question of the examiner (Dr. Zero)"""
    num_prompts_per_step: int = 16
    """P, prompts in one step over all processes (ours; DeepSeekMath 4.2: 16)"""
    num_generations: int = 8
    """G, completions of each prompt: one group (TRL 1.16; DeepSeekMath 4.2: 64)"""
    max_completion_length: int = 64
    """T, longest completion in tokens (ours, for the tiny model; DeepSeekMath 4.2: 1024)"""
    temperature: float = 1.0
    """sampling temperature; log-probabilities are taken at this temperature too (TRL 1.16)"""
    top_p: float = 1.0
    """nucleus sampling; below 1 the samples no longer follow the policy that is trained (TRL 1.16)"""
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "dapo"
    """how token losses are averaged, see policy_loss (DeepSeekMath eq. 3; TRL 1.16: dapo)"""
    epsilon: float = 0.2
    """clip range of the probability ratio, below (TRL 1.16, verl 0.9)"""
    beta: float = 0.0
    """weight of the KL penalty to the initial model, loaded only if above 0 (TRL 1.16; DeepSeekMath 4.2: 0.04)"""
    learning_rate: float = 2e-4
    """peak learning rate of AdamW (ours, for the tiny model; DeepSeekMath 4.2: 1e-6)"""
    max_grad_norm: float = 1.0
    """gradients are scaled down to this norm (TRL 1.16)"""
    max_steps: int = 60
    """steps: batches of completions (ours)"""
    seed: int = 1
    """seed of problems, sampling and everything else (ours)"""
    per_device_train_batch_size: int = 32
    """completions in one micro-batch of the update; changes memory and speed, not the result (ours)"""
    max_packed_length: int = 4096
    """longest packed row in tokens: a prompt followed by as many of its completions as fit (ours)"""
    bf16: bool = False
    """compute in bfloat16; weights and optimizer stay float32 (TRL 1.16: yes)"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, slower (TRL 1.16: yes)"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU if there is one (ours)"""
    eval_steps: int = 25
    """steps between evaluations, which also come first and last; 0 is never (ours)"""
    eval_problems: int = 64
    """problems of the evaluation set (ours)"""
    num_generations_eval: int = 8
    """k, sampled completions of each evaluation problem, for pass@k (ours)"""
    save_steps: int = 25
    """steps between checkpoints: at most this many are repeated after a crash (ours)"""
    output_dir: str | None = None
    """run folder; None is runs/<script>__<env>__<seed>__<time> (ours)"""
    resume: str | None = None
    """run folder to continue, with the flags it was started with (ours)"""


# === 3 The method =====================================================================================================


def generalized_jsd(student_logits: Tensor, teacher_logits: Tensor, weight: float = 1.0, top_k: int | None = None):
    """Divergence of two next-token distributions, exact over their support. (B,T,V), (B,T,V) -> (B,T), or (N,V) -> (N,)

    weight w of the mixture m = (1 - w) student + w teacher: w KL(teacher || m) + (1 - w) KL(student || m), by its ends
    1 KL(student || teacher) and 0 KL(teacher || student) (GKD's beta). The teacher gets no gradient. top_k: both are
    renormalised on the teacher's k likeliest tokens (Revisiting OPD eq. 6-8).
    """
    if top_k and top_k < teacher_logits.size(-1):
        teacher_logits, support = teacher_logits.topk(top_k)  # (...,K) twice
        student_logits = student_logits.gather(-1, support)  # (...,K)
    student, teacher = student_logits.log_softmax(-1), teacher_logits.detach().log_softmax(-1)  # (...,V) or (...,K)

    def kl(p, q):
        return (p.exp() * (p - q)).sum(-1)  # (...)

    if weight in (0, 1):
        return kl(student, teacher) if weight else kl(teacher, student)
    mixture = torch.logaddexp(student + math.log(1 - weight), teacher + math.log(weight))  # (...,V) or (...,K)
    return weight * kl(teacher, mixture) + (1 - weight) * kl(student, mixture)


def row_means(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of each row over its tokens, 0 for a row without any. (B,T), (B,T) -> (B,)"""
    return values.masked_fill(~mask, 0).sum(1) / mask.sum(1).clamp(min=1)


def reverse_kl(student_logits: Tensor, teacher_logits: Tensor, mask: Tensor, top_k: int | None = None) -> Tensor:
    """pi-Play eq. 10, KL(student || teacher) at every token, mean over a row's. (B,T,V), (B,T,V), (B,T) -> (B,)"""
    mask = mask.bool()  # (B,T)
    student_logits, teacher_logits = (x.masked_fill(~mask[..., None], 0) for x in (student_logits, teacher_logits))
    return row_means(generalized_jsd(student_logits, teacher_logits, top_k=top_k), mask)


@torch.no_grad()
def update_teacher(teacher: torch.nn.Module, student: torch.nn.Module, tau: float) -> None:
    """pi-Play eq. 11 in place: teacher <- (1 - tau) teacher + tau student, each parameter (of any shape (A,B,...))."""
    for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
        old.mul_(1 - tau).add_(new, alpha=tau)


def examiner_rewards(num_correct: Tensor, num_answers: int) -> Tensor:
    """pi-Play eq. 4 without its format term: (n - k) / (n - 1) if 0 < k < n of the answers are right. (N,) -> (N,)"""
    difficulty = (num_answers - num_correct) / max(num_answers - 1, 1)  # (N,)
    return difficulty * ((num_correct > 0) & (num_correct < num_answers))


def pool_statistics(values: Tensor, weights: Tensor, *ids: Tensor, ddof: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, standard deviation and size of the pool of each row: the rows whose ids all agree. (R,) each -> 3 x (R,)

    A row counts `weights` times. Equal values have a standard deviation of exactly 0, however they are rounded.
    """
    pools = torch.stack(ids).unique(dim=1, return_inverse=True)[1]  # (R,) number of each row's pool
    size, total = (torch.zeros_like(x).index_add(0, pools, x)[pools] for x in (weights, weights * values))  # (R,) each
    squares = weights * (values - total / size).square()  # (R,)
    std = (torch.zeros_like(squares).index_add(0, pools, squares)[pools] / (size - ddof).clamp(min=1)).sqrt()  # (R,)
    return total / size, std.masked_fill(std < 1e-9 * (1 + (total / size).abs()), 0.0), size.round()


def hop_advantages(rewards: Tensor, hops: Tensor, epsilon=1e-6, ddof=0, outside=False, lone="zero") -> Tensor:
    """pi-Play eq. 6 and 9: (r - mean) / sqrt(variance + epsilon) within the rows of equal `hops`. (N,), (N,) -> (N,)

    For the student `hops` is the number of the question, which makes a group of its answers. Population variance; equal
    rewards and a lone one give exactly 0. Dr. Zero's code: ddof=1, outside=True (std + epsilon), lone="raw".
    """
    values = rewards.double()  # (N,)
    mean, std, size = pool_statistics(values, torch.ones_like(values), hops, ddof=ddof)  # (N,) each
    scores = ((values - mean) / (std + epsilon if outside else (std**2 + epsilon).sqrt())).masked_fill(std == 0, 0.0)
    advantages = torch.where((size == 1) & (lone == "raw"), values / (1 + epsilon), scores)  # (N,)
    return advantages.to(torch.promote_types(rewards.dtype, torch.float32))


def special_token_mask(ids: Tensor, mask: Tensor, special: list[int]) -> Tensor:
    """The mask without the first token of each id in `special`, which may be masked already. (B,T), (B,T) -> (B,T)

    Revisiting OPD's code: student and teacher differ most there, and only in style.
    """
    found = ids[..., None] == torch.tensor(special, device=ids.device)  # (B,T,S) of S special ids
    return mask & ~(found & (found.cumsum(1) == 1)).any(-1)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate of KL(policy || reference) at each sampled token, never negative. (B,T), (B,T) -> (B,T)

    DeepSeekMath eq. 4, known as k3; not clamped (verl's low_var_kl clamps at 10).
    """
    log_ratio = ref_logprobs - logprobs  # (B,T)
    return log_ratio.exp() - log_ratio - 1


# fmt: off
def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, loss_type: str = "dapo",
    epsilon: float = 0.2, epsilon_high: float | None = None, delta: float | None = None, beta: float = 0.0,
    ref_logprobs: Tensor | None = None, use_bias_correction_kl: bool = False,
    max_completion_length: int | None = None, num_tokens: Tensor | float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: on
    """Clipped policy loss of DeepSeekMath eq. 3, to be minimised. (B,T) tensors, advantages (B,) or (B,T) -> scalar

    loss_type averages the token losses as TRL 1.16 does: `grpo` each row over its tokens, then over rows; `bnpo` over
    the tokens given; `dapo` over `num_tokens`, the tokens of the whole step (default: the tokens given); `dr_grpo` over
    B max_completion_length (default T). Masked positions have no influence on the loss and get exactly zero gradient.
    """
    mask = mask.bool()  # (B,T)
    logprobs, old_logprobs = logprobs.masked_fill(~mask, 0), old_logprobs.masked_fill(~mask, 0)  # (B,T)
    advantages = advantages[:, None] if advantages.dim() == 1 else advantages  # (B,1) or (B,T)
    low, high = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)
    ratio = (logprobs - old_logprobs).exp()  # (B,T)
    losses = -torch.min(ratio.clamp(max=delta or math.inf) * advantages, ratio.clamp(low, high) * advantages)  # (B,T)
    tokens = mask.sum().clamp(min=1)  # scalar
    metrics = {"clip_ratio/low_mean": ((ratio < low) & (advantages < 0) & mask).sum() / tokens}  # scalars
    metrics["clip_ratio/high_mean"] = ((ratio > high) & (advantages > 0) & mask).sum() / tokens
    metrics["clip_ratio/region_mean"] = metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]
    if beta > 0:
        kl = kl_estimate(logprobs, ref_logprobs.where(mask, 0)) * (ratio if use_bias_correction_kl else 1)  # (B,T)
        losses = losses + beta * kl  # (B,T)
        metrics["kl"] = kl.detach().sum() / tokens
    losses = losses.masked_fill(~mask, 0)  # (B,T)
    if loss_type == "grpo":
        return (losses.sum(1) / mask.sum(1).clamp(min=1)).mean(), metrics
    if loss_type == "dr_grpo":
        return losses.sum() / (len(losses) * (max_completion_length or losses.size(1))), metrics
    return losses.sum() / (tokens if num_tokens is None or loss_type == "bnpo" else num_tokens), metrics


# === 4 Model and tokenizer ============================================================================================


def fail(message: str, code: int = 2) -> None:
    """Stop with one sentence: code 2 for what the user can mend, 1 for a run that went wrong."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(code)


@contextlib.contextmanager
def or_fail(message: str, code: int = 2):
    """What goes wrong inside the with-block stops the program with this sentence."""
    try:
        yield
    except Exception as error:  # torch, safetensors, templates and file systems raise dozens of types
        fail(f"{message} ({error!r:.300})", code)


def setup(args: Args) -> torch.device:
    """Device, seed, and the other processes if torchrun started several."""
    if args.device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: this machine, or this build of torch, has no CUDA device; use --device auto or cpu")
    torch.manual_seed(args.seed)
    cuda = torch.cuda.is_available() and args.device != "cpu"
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) if cuda else -1)  # -1 does nothing
    if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo")
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def rank_and_world_size() -> tuple[int, int]:
    """Number of this process and count of processes; (0, 1) without torchrun."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather(values: Tensor) -> tuple[Tensor, slice]:
    """The rows of all processes in rank order, and where this process's rows stand among them. (b,...) -> (B,...)"""
    rank, world_size = rank_and_world_size()
    if world_size == 1:
        return values, slice(None)
    pieces = [None] * world_size
    dist.all_gather_object(pieces, values.cpu())  # processes may hold different numbers of rows
    start = sum(map(len, pieces[:rank]))
    return torch.cat(pieces).to(values.device), slice(start, start + len(values))


def load_pretrained(kind, args: Args, **options):
    """kind.from_pretrained(--model-name-or-path), or one sentence."""
    with or_fail(f"--model-name-or-path {args.model_name_or_path or args.env}: not found or not usable"):
        return kind.from_pretrained(args.model_name_or_path or os.path.join(TINY_MODELS, args.env), **options)


def load_tokenizer(args: Args):
    """The policy's tokenizer; load_model tries it."""
    return load_pretrained(transformers.AutoTokenizer, args)


def load_model(args: Args, tokenizer, device: torch.device):
    """The policy: any Hugging Face causal language model, in float32 (bf16 is a matter of autocast)."""
    model, log = load_pretrained(transformers.AutoModelForCausalLM, args, dtype=torch.float32, output_loading_info=True)
    # weights that are drawn at random, or tokens that only another model knows
    if missing := [*sorted(log["missing_keys"]), *range(len(model.get_input_embeddings().weight), len(tokenizer))]:
        fail(f"--model-name-or-path {args.model_name_or_path}: has no weights or no embedding for {missing[0]}")
    ends = model.to(device).generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    model.generation_config.eos_token_id = sorted(ends)
    with torch.no_grad(), or_fail(f"--model-name-or-path {args.model_name_or_path}: unfit chat template or tokenizer"):
        ids = torch.tensor([encode(tokenizer, [{"role": "user", "content": "1"}])], device=device)  # (1,S)
        # the update applies the head itself, so nothing may come after the head
        logits = model.get_output_embeddings()(model.base_model(ids).last_hidden_state)
        if not torch.allclose(logits, model(ids).logits, atol=1e-3):
            fail(f"--model-name-or-path {args.model_name_or_path}: changes its logits after the head; not supported")
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def encode(tokenizer, messages: list[dict]) -> list[int]:
    """Token ids of a chat, up to where the assistant begins."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


# === 5 Rollout ========================================================================================================


@dataclass
class Samples:
    """What `generate` returns, a group's rows contiguous."""

    completion_ids: Tensor  # (B,T) int64, 0 where nothing was written
    mask: Tensor  # (B,T) bool: up to and including the first end token
    logprobs: Tensor  # (B,T) of the sampled tokens, at the sampling temperature, over the whole vocabulary
    entropy: Tensor  # (B,T) nats, of the distribution that each token was drawn from
    ended: Tensor  # (B,) bool: an end token was written


@dataclass
class Batch:
    """What a step learns from: B rows, in `info` too."""

    prompts: list[list[int]]  # ids; consecutive rows with equal prompts share one copy of it in the update
    completion_ids: Tensor  # (B,T)
    mask: Tensor  # (B,T) bool: tokens that count
    logprobs: Tensor  # (B,T) as sampled
    rewards: Tensor  # (B,K), NaN where a reward function has no opinion
    info: dict[str, Tensor] = field(default_factory=dict)
    private: list[list[int]] = field(default_factory=list)  # prompts behind which the teacher reads the completions


class Progress(dict):
    """Counters that a resumed run continues: steps, problems drawn (the cursor in the data), tokens sampled."""

    state_dict, load_state_dict = dict.copy, dict.update


def load_task(args: Args):
    """The task: `train_problem`, `evaluation_problems`, `prompt`, `step`, `reward_functions`."""
    try:
        return SearchQA(args.dataset, args.retriever_url, args.hops, max_turns=args.max_turns)
    except ValueError as error:
        fail(str(error))


def sample_tokens(logprobs: Tensor, uniform: Tensor, top_p: float) -> Tensor:
    """Draw one token a row by inverting the cumulative distribution. (B,V), (B,) in [0,1) -> (B,)"""
    probs = logprobs.exp()  # (B,V)
    if top_p < 1:
        ranked, order = probs.sort(descending=True)  # (B,V)
        beyond = ranked.cumsum(1) - ranked >= top_p  # (B,V) the most probable token always stays
        probs = torch.zeros_like(probs).scatter(1, order, ranked.masked_fill(beyond, 0))  # (B,V)
    cumulative = probs.cumsum(1)  # (B,V)
    tokens = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)  # (B,1)
    return tokens[:, 0].clamp(max=logprobs.size(1) - 1)


def generate(model, prompts: list[list[int]], num_generations: int, args: Args, generator: list | None) -> Samples:
    """Sample G completions of each prompt; `generator` holds one torch.Generator a prompt, None decodes greedily.

    Each prompt is computed once, then its keys and values are repeated for the group. Finished rows are dropped when a
    quarter has finished. Random numbers belong to (row, position), so dropping a row does not change the others.
    """
    device, width, steps = model.device, max(map(len, prompts)), args.max_completion_length
    size = len(prompts) * num_generations
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)  # (P,S)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)  # (P,S)
    uniform = generator and torch.cat([torch.rand(num_generations, steps, generator=g) for g in generator]).to(device)
    ends = torch.tensor(model.generation_config.eos_token_id, device=device)
    completion_ids = torch.zeros(size, steps, dtype=torch.long, device=device)  # (B,T)
    logprobs, entropy, tokens = *torch.zeros(2, size, steps, device=device), completion_ids[:, 0]  # (B,T) twice, (B,)
    rows, live = torch.arange(size, device=device), torch.ones(size, dtype=torch.bool, device=device)  # (B,), (B,)
    model.eval()
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
        inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}  # (P,S) each
        out = model(ids, use_cache=True, logits_to_keep=1, **inputs)
        cache, logits = out.past_key_values, out.logits[:, -1].repeat_interleave(num_generations, 0)  # (B,V)
        cache.batch_repeat_interleave(num_generations)  # in place
        positions, mask = mask.sum(1).repeat_interleave(num_generations), mask.repeat_interleave(num_generations, 0)
        mask = torch.cat([mask, mask.new_ones(size, steps)], 1)  # (B,S+T)
        for t in range(steps):
            if t > 0:
                if device.type == "cpu" or t % 8 == 0:  # counting waits for a GPU, so there only now and then
                    keep = live.nonzero()[:, 0]
                    if len(keep) == 0:
                        break
                    if len(keep) <= 0.75 * len(live):
                        cache.batch_select_indices(keep)
                        rows, tokens, positions, mask, live = (x[keep] for x in (rows, tokens, positions, mask, live))
                inputs = {"attention_mask": mask[:, : width + t], "position_ids": positions[:, None] + (t - 1)}
                out = model(tokens[:, None], past_key_values=cache, use_cache=True, **inputs)
                logits = out.logits[:, -1]  # (B,V)
            logp = (logits.float() / args.temperature).log_softmax(1)  # (B,V)
            tokens = sample_tokens(logp, uniform[rows, t], args.top_p) if generator else logp.argmax(1)  # (B,)
            completion_ids[rows, t], logprobs[rows, t] = tokens, logp.gather(1, tokens[:, None])[:, 0]
            entropy[rows, t] = -(logp.exp() * logp).nan_to_num(0).sum(1)
            live = live & ~torch.isin(tokens, ends)  # (B,)
    is_end = torch.isin(completion_ids, ends)  # (B,T)
    counted = is_end.cumsum(1) - is_end.long() == 0  # (B,T) nothing after a row's first end token
    completion_ids, logprobs, entropy = (x.masked_fill(~counted, 0) for x in (completion_ids, logprobs, entropy))
    return Samples(completion_ids, counted, logprobs, entropy, is_end.any(1))


def play(model, tokenizer, task, problems: list, num_generations: int, args: Args, seeds: list[str] | None):
    """G episodes of each problem, a group's contiguous: the policy's turns, answered by the task. No seeds: greedily.

    The first prompt is computed once for its group. Contexts are the sampled ids, never text that is encoded again.
    """
    prompts = [encode(tokenizer, task.prompt(problem)) for problem in problems]
    episodes = [Episode(*pair) for pair in zip(problems, prompts) for _ in range(num_generations)]
    while due := [i for i, episode in enumerate(episodes) if not episode.over]:
        copies = 1 if (turn := len(episodes[due[0]].starts)) else num_generations
        names = seeds and [f"{seeds[i // num_generations]} {i % num_generations} {turn}" for i in due]
        generator = names and [torch.Generator().manual_seed(random.Random(x).getrandbits(63)) for x in names[::copies]]
        samples = generate(model, [episodes[i].context() for i in due[::copies]], copies, args, generator)
        rows = [row[:length] for row, length in zip(samples.completion_ids.tolist(), samples.mask.sum(1).tolist())]
        texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
        columns = [samples.logprobs.tolist(), texts, samples.entropy.sum(1).tolist(), samples.ended.tolist()]
        for i, reply, *written in zip(due, task.step(texts, turn + 1), rows, *columns):
            episodes[i].add(*written)
            episodes[i].over = reply is None or not written[-1]
            if not episodes[i].over:
                episodes[i].read(reply_ids(tokenizer, reply), reply["content"])
    return episodes


def examine(examiner, tokenizer, task, seeds: list[str], args: Args) -> tuple[list[Episode], tuple, tuple]:
    """An episode of the examiner for each seed, its format score, and its question with the searches behind it, None if
    it is not well-formed. The document is drawn; everything else is as sampled, nothing is filled in."""
    requests = [task.request(random.Random(f"document {seed}")) for seed in seeds]
    episodes = play(examiner, tokenizer, task, requests, 1, args, seeds)
    return episodes, *zip(*(task.examined(episode.problem, episode.texts) for episode in episodes))


def examiner_rollout(models: dict, tokenizer, task, numbers: range, args: Args) -> Batch:
    """A step of the examiner: a question about each of N documents, n answers of the student to measure it."""
    seeds, n = [f"{args.seed} examiner {number}" for number in numbers], args.num_answers
    episodes, formats, problems = examine(models["examiner"], tokenizer, task, seeds, args)
    formats, correct = torch.tensor(formats), torch.zeros(len(seeds))  # (N,) each
    if asked := {i: problem for i, problem in enumerate(problems) if problem}:
        names = [f"{seeds[i]} answer" for i in asked]
        answers = play(models["student"], tokenizer, task, list(asked.values()), n, args, names)
        correct[list(asked)] = score_episodes(task, answers)[:, 0].view(-1, n).sum(1)
    rewards, hops = 0.5 * formats + examiner_rewards(correct, n), [episode.problem.hops for episode in episodes]  # (N,)
    info = {"well_formed": (formats > 0).float(), "format": formats, "pass_rate": correct / n}  # (N,) each
    return episode_batch(episodes, rewards[:, None], hops, info, models["examiner"].device)


def draw_problems(examiner, tokenizer, task, numbers: range, args: Args) -> list:
    """Questions of the frozen examiner by number, for the student to train on. What is not well-formed, or belongs to
    the evaluation, is drawn again. Numbers decide: the same after a resume, and on any number of processes."""
    problems, attempts = dict.fromkeys(numbers), iter(range(20))
    while missing := [number for number, problem in problems.items() if problem is None]:
        if (attempt := next(attempts, None)) is None:
            fail("no well-formed questions: raise --max-turns or --max-completion-length, or lower --learning-rate", 1)
        found = examine(examiner, tokenizer, task, [f"{args.seed} question {i} {attempt}" for i in missing], args)[2]
        problems |= {i: problem for i, problem in zip(missing, found) if problem and not problem.held_out}
    return list(problems.values())


def rollout(models: dict, tokenizer, task, numbers: range, args: Args) -> Batch:
    """A step of the student: G episodes for each of P questions, and the prompts with which its teacher reads them."""
    student, group = models["student"], range(args.num_generations)
    problems = draw_problems(models["examiner"], tokenizer, task, numbers, args)
    seeds, pools = [f"{args.seed} {number}" for number in numbers], [number for number in numbers for _ in group]
    episodes = play(student, tokenizer, task, problems, len(group), args, seeds)
    batch = episode_batch(episodes, score_episodes(task, episodes), pools, {}, student.device)
    if args.mask_special_tokens:
        special = tokenizer("<think>", add_special_tokens=False)["input_ids"] + student.generation_config.eos_token_id
        batch.mask = special_token_mask(batch.completion_ids, batch.mask, special)
    if args.privileged_context != "none":
        problems = [task.with_privilege(p, args.privileged_context, seed) for p, seed in zip(problems, seeds)]
        batch.private = [ids for ids in (encode(tokenizer, task.prompt(p)) for p in problems) for _ in group]
    return batch


def episode_batch(episodes: list[Episode], rewards: Tensor, pools: list[int], info: dict, device) -> Batch:
    """Episodes as rows to learn from. rewards (B,K), pools (B,): a row is compared with the others of its pool."""
    ids, logprobs = padded(episodes, "ids", 0, device), padded(episodes, "logprobs", 0.0, device)  # (B,T) each
    queries = [searches(episode.texts) for episode in episodes]
    info |= {"ended": [e.ended for e in episodes], "entropy": [e.entropy for e in episodes], "pool": pools}
    info |= {"turns": [len(e.starts) for e in episodes], "searches": [len(row) for row in queries]}
    info |= {"repeated_searches": [len(row) - len(set(row)) for row in queries]}
    info = {name: torch.as_tensor(value, device=device) for name, value in info.items()}  # (B,) each
    mask = padded(episodes, "turns", -1, device) >= 0  # (B,T)
    return Batch([e.prompt for e in episodes], ids, mask, logprobs, rewards.to(device), info)


def score_episodes(task, episodes: list[Episode]) -> Tensor:
    """The task's reward functions on the last turn of each episode. -> (B,K)"""
    functions = task.reward_functions.values()
    return torch.tensor([[f(e.problem, e.texts[-1]) for f in functions] for e in episodes])


def compute_advantages(batch: Batch, args: Args, progress: Progress) -> Tensor:
    """Advantages of this process's rows from the first reward, in pools that may span processes. -> (B,)"""
    (rewards, own), pools = gather(batch.rewards[:, 0]), gather(batch.info["pool"])[0]
    return hop_advantages(rewards, pools)[own]


@dataclass
class Packed:
    """One micro-batch of b rows: R packed rows of L tokens, of which N predict a token of a completion."""

    rows: list[int]  # b rows of the batch
    input_ids: Tensor  # (R,L)
    position_ids: Tensor  # (R,L) restart for every completion
    owners: Tensor  # (R,L) 0 prompt, 1.. the completions, -1 padding
    filled: Tensor  # (b,T) bool: where the N predicted tokens stand in the batch
    targets: Tensor  # (N,) the predicted tokens
    private: "Packed | None" = None  # the same behind the teacher's prompts


def pack(batch: Batch, rows: list[int], args: Args) -> list[Packed]:
    """Micro-batches of these rows of the batch, in which consecutive rows with equal prompts share the prompt.

    A packed row is a prompt without its last token, then for each completion that last token and the completion without
    its own last: every token behind the prompt predicts one token. A completion sees the prompt and itself, at the
    positions it would have alone, so nothing differs from separate rows. Sorting by length avoids padding.
    """
    columns = torch.arange(1, batch.mask.size(1) + 1, device=batch.mask.device)  # (T,)
    lengths = (batch.mask * columns).amax(1)  # (B,) up to the last token that counts
    filled, lengths, ids, strips = columns <= lengths[:, None], lengths.tolist(), batch.completion_ids.tolist(), []
    rows = [row for row in rows if lengths[row] > 0]
    prompts = list(zip(batch.prompts, batch.private or batch.prompts))
    for pair, group in ((pair, list(group)) for pair, group in groupby(rows, key=lambda row: prompts[row])):
        room = (args.max_packed_length - max(map(len, pair))) // max(lengths[row] for row in group)
        most = max(1, min(room, args.per_device_train_batch_size, args.num_generations))
        strips += [group[i : i + most] for i in range(0, len(group), most)]  # one strip, one packed row
    strips.sort(key=lambda strip: sum(lengths[row] for row in strip))
    count = max(1, args.per_device_train_batch_size // args.num_generations)
    return [pack_strips(strips[i : i + count], batch, filled, lengths, ids) for i in range(0, len(strips), count)]


def pack_strips(strips: list[list[int]], batch: Batch, filled: Tensor, lengths: list[int], ids: list) -> Packed:
    """One micro-batch of packed rows, one for each list of rows with equal prompts, and the same for the teacher."""
    private = replace(batch, prompts=batch.private, private=[])
    columns, private = [], pack_strips(strips, private, filled, lengths, ids) if batch.private else None
    for strip in strips:
        *prompt, last = batch.prompts[strip[0]]
        tokens, positions, owners = list(prompt), list(range(len(prompt))), [0] * len(prompt)
        for owner, row in enumerate(strip, 1):
            tokens += [last, *ids[row][: lengths[row] - 1]]
            positions += range(len(prompt), len(prompt) + lengths[row])
            owners += [owner] * lengths[row]
        columns.append((tokens, positions, owners))
    size, rows = max(len(tokens) for tokens, _, _ in columns), [row for strip in strips for row in strip]  # L, b rows
    padded = [[x + [-1] * (size - len(x)) for x in column] for column in zip(*columns)]  # 3 x R x L
    input_ids, position_ids, owners = torch.tensor(padded, device=filled.device)  # (R,L) each
    filled, targets = filled[rows], batch.completion_ids[rows][filled[rows]]  # (b,T), (N,)
    return Packed(rows, input_ids.clamp(0), position_ids.clamp(0), owners, filled, targets, private)


def hidden_states(model, packed: Packed) -> Tensor:
    """Last hidden state at every position that predicts a token. -> (N,H)"""
    query, key = packed.owners[:, :, None], packed.owners[:, None]  # (R,L,1), (R,1,L)
    sees = ((key == query) | (key == 0)).tril()  # (R,L,L)
    inputs = {"attention_mask": sees[:, None], "position_ids": packed.position_ids, "use_cache": False}
    return model.base_model(input_ids=packed.input_ids, **inputs).last_hidden_state[packed.owners > 0]


def token_logprobs(model, packed: Packed, args: Args, teacher=None) -> list[Tensor]:
    """Log-probabilities of the completions of a micro-batch, 0 where there is no token; with a teacher the divergence
    from it too. The heads work on predicted tokens only, and in chunks. -> 1 or 2 x (b,T)"""

    def chunk_values(targets, hidden, *states):
        logits = model.get_output_embeddings()(hidden).float() / args.temperature  # (n,V)
        values = [-torch.nn.functional.cross_entropy(logits, targets, reduction="none")]  # (n,)
        if teacher:
            taught = teacher.get_output_embeddings()(*states).float() / args.temperature  # (n,V)
            values.append(generalized_jsd(logits, taught, DIVERGENCES[args.divergence], args.distill_top_k))  # (n,)
        return torch.stack(values)

    with torch.autocast(model.device.type, torch.bfloat16, enabled=args.bf16):
        parts = [packed.targets, hidden_states(model, packed)]
        if teacher:  # its parameters need no gradient, so no graph is built
            parts.append(hidden_states(teacher, packed.private))  # (N,H)
        chunks = list(zip(*(part.split(max(1, LOGITS_PER_CHUNK // model.config.vocab_size)) for part in parts)))
        values = [torch.utils.checkpoint.checkpoint(chunk_values, *chunk, use_reentrant=False) for chunk in chunks[1:]]
        values = torch.cat([chunk_values(*chunks[0]), *values], 1)  # (1,N) or (2,N)
    return [torch.zeros(packed.filled.shape, device=x.device).masked_scatter(packed.filled, x) for x in values]


# fmt: off
def update(model, optimizer, batch: Batch, advantages: Tensor, args: Args, reference=None, teacher=None,
           weight: float = 0.0) -> dict[str, float]:  # fmt: on
    """One optimizer step on a batch; returns metrics, the same on all processes. `reference`: for beta > 0. `weight` is
    lambda, for the divergence from the `teacher`, who reads the completions behind their private prompts.

    The loss of a step is the sum over micro-batches and processes, each with its share in normalisers that are global:
    neither changes the gradient. Rows on which nothing acts are left out, but still count in the normalisers.
    """
    acts = advantages[:, None].ne(0).flatten(1).any(1) | (args.beta > 0 or weight > 0)  # (B,)
    micro_batches = pack(batch, acts.nonzero()[:, 0].tolist(), args)
    counts = gather(torch.tensor([[batch.mask.sum(), len(acts), batch.mask[acts].sum()]], device=batch.mask.device))[0]
    num_tokens, num_rows, num_trained = counts.sum(0).clamp(min=1)  # scalars
    options = {"loss_type": args.loss_type, "epsilon": args.epsilon, "beta": args.beta, "num_tokens": num_tokens}
    options |= {"max_completion_length": args.max_completion_length}
    names = ["loss", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"] + ["kl"] * (args.beta > 0)
    names += ["sampling/logprob_difference/mean"] + ["pi_play/divergence"] * (weight > 0)
    sums = dict.fromkeys(names, torch.zeros((), device=batch.mask.device))
    model.train(args.gradient_checkpointing)  # else without dropout, which would make learner and sampler differ
    optimizer.zero_grad(set_to_none=True)
    for packed in micro_batches:
        logprobs, *divergence = token_logprobs(model, packed, args, teacher if weight > 0 else None)  # (b,T) each
        rows, mask, old_logprobs = packed.rows, batch.mask[packed.rows], batch.logprobs[packed.rows]  # (b,T) each
        if args.beta > 0:
            options["ref_logprobs"] = token_logprobs(reference, packed, args)[0].detach()  # (b,T)
        loss, metrics = policy_loss(logprobs, old_logprobs, advantages[rows], mask, **options)
        loss = loss * {"dapo": 1.0, "bnpo": mask.sum() / num_tokens}.get(args.loss_type, len(rows) / num_rows)
        metrics = {name: value * mask.sum() / num_tokens for name, value in metrics.items()}
        if weight > 0:  # eq. 7: the gradient of the divergence itself, which is never an advantage
            metrics["pi_play/divergence"] = row_means(divergence[0], mask).sum() / num_rows  # scalar
            loss = loss + weight * metrics["pi_play/divergence"]
        loss.backward()
        gap = (logprobs - old_logprobs).abs() * mask / num_trained  # (b,T)
        metrics |= {"loss": loss, "sampling/logprob_difference/mean": gap.sum()}
        sums |= {name: sums[name] + value.detach() for name, value in metrics.items()}
    grad_norm = apply_gradients(model, optimizer, args)
    metrics = dict(zip(sums, gather(torch.stack(list(sums.values()))[None])[0].sum(0).tolist()))
    return metrics | {"grad_norm": grad_norm, "frac_tokens_trained": (counts[:, 2].sum() / num_tokens).item()}


def apply_gradients(model, optimizer, args: Args) -> float:
    """Add the gradients of all processes, clip, step. Returns the norm before clipping."""
    for parameter in model.parameters():
        if parameter.grad is None:  # nothing acted: AdamW's momentum still moves the weights, so it gets a zero
            parameter.grad = torch.zeros_like(parameter)
        if dist.is_initialized():
            dist.all_reduce(parameter.grad)
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm).item()
    if not math.isfinite(grad_norm):
        fail(f"the gradient norm is {grad_norm}: lower --learning-rate or check the rewards; checkpoints are kept", 1)
    optimizer.step()
    return grad_norm


# === 6 Checkpoint =====================================================================================================


def checkpoints(run_dir: str) -> list[str]:
    """Checkpoint files of a run, oldest first."""
    return sorted(map(str, Path(run_dir, "checkpoints").glob("step_*[0-9].pt")))


def save_checkpoint(run_dir: str, step: int, state: dict, keep: int = 2) -> None:
    """Write state (name -> object with a state_dict). A crash leaves either the old files or the new one."""
    payload = {name: thing.state_dict() for name, thing in state.items()} | {"random": torch.get_rng_state()}
    if rank_and_world_size()[0] == 0:
        path = os.path.join(run_dir, "checkpoints", f"step_{step:08d}.pt")
        with or_fail(f"{path}: cannot be written; the checkpoints before it are kept", 1):
            torch.save(payload, path + ".tmp")
            os.replace(path + ".tmp", path)
        for old in checkpoints(run_dir)[:-keep]:
            os.remove(old)


def load_checkpoint(run_dir: str, state: dict) -> bool:
    """Restore the newest checkpoint into the objects of state; False if the run was stopped before its first."""
    for path in checkpoints(run_dir)[-1:]:
        with or_fail(f"{path}: damaged, or of another script; delete it to continue from the one before", 1):
            payload = torch.load(path, map_location="cpu", weights_only=True)
            for name, thing in state.items():
                thing.load_state_dict(payload[name])
            torch.set_rng_state(payload["random"])
    return bool(checkpoints(run_dir))


def resume_args(args: Args) -> Args:
    """The flags of the run to continue. A flag given now must agree, unless the training ignores it."""
    with or_fail(f"--resume {args.resume}: not a run folder of this script"):
        saved = json.loads(Path(args.resume, "args.json").read_text())
        saved = Args(**{name: tuple(x) if isinstance(x, list) else x for name, x in saved.items()})
    # a flag on the command line counts as given with its default value, too
    words = {w.split("=")[0].replace("_", "-").replace("--no-", "--") for w in sys.argv if __name__ == "__main__"}
    given = {x: now for x, now in vars(args).items() if now != getattr(Args, x) or f"--{x.replace('_', '-')}" in words}
    for name, now in given.items():
        if now != (before := getattr(saved, name)) and name not in ("resume", "save_steps", "device", "max_steps"):
            fail(f"--resume {args.resume}: the run began with --{name.replace('_', '-')} {before}, not {now}")
    return replace(saved, **given | {"output_dir": args.resume})


class Logger:
    """metrics.csv (the same for the same seed), perf.csv (time, speed, memory) and TensorBoard in the run folder."""

    def __init__(self, run_dir: str, args: Args, step: int):
        """`step` is the last one whose rows stay when a run is resumed; -1 for a new run."""
        with or_fail(f"{run_dir}: cannot be used as a run folder"):
            os.makedirs(os.path.join(run_dir, "checkpoints"), exist_ok=True)
            Path(run_dir, "args.tmp").write_text(json.dumps(asdict(replace(args, resume=None)), indent=1))
            os.replace(os.path.join(run_dir, "args.tmp"), os.path.join(run_dir, "args.json"))
            self.files = {x: open(os.path.join(run_dir, x), "a+", 1, newline="") for x in ("metrics.csv", "perf.csv")}
            for file in self.files.values():
                file.seek(0)  # what is cut off, a line half written too, is what the resumed run writes again
                kept = [x for x in file if x[-1] == "\n" and (x[0] == "s" or int(x.split(",")[0]) <= step)]
                file.truncate(sum(map(len, kept)))
                file.write("" if kept else "step,tag,value\n")
            self.board = SummaryWriter(run_dir, purge_step=step + 1)

    def scalars(self, step: int, values: dict[str, float], file: str = "metrics.csv") -> None:
        """Write tag -> value."""
        self.files[file].writelines(f"{step},{tag},{value}\n" for tag, value in values.items())
        for tag, value in values.items():
            self.board.add_scalar(tag, value, step)
        self.board.flush()


# === 7 Evaluation =====================================================================================================


def evaluate(model, tokenizer, task, args: Args) -> tuple[dict[str, float], str]:
    """Scores of greedy and of k sampled episodes on problems that training never sees; three of them as text."""
    rank, world_size = rank_and_world_size()
    problems, k = task.evaluation_problems(args.eval_problems), args.num_generations_eval
    mine = list(range(rank, len(problems), world_size)) or [0]
    problems, seeds = [problems[i] for i in mine], [f"evaluation {i}" for i in mine]
    episodes = play(model, tokenizer, task, problems, 1, args, None)
    rewards, turns = score_episodes(task, episodes), torch.tensor([[len(e.starts)] for e in episodes])  # (P,K), (P,1)
    sampled = score_episodes(task, play(model, tokenizer, task, problems, k, args, seeds)).view(len(problems), k, -1)
    columns = [rewards[:, :1], sampled.amax(1)[:, :1], sampled.mean(1)[:, :2], rewards, turns]
    names = ["pass_at_1", f"pass_at_{k}", f"mean_at_{k}", f"f1_mean_at_{k}"]
    names += [*(f"rewards/{name}" for name in task.reward_functions), "turns"]
    shown = "\n".join("\n".join([e.problem.question, *e.texts]) for e in episodes[:3])
    return {f"eval/{name}": x for name, x in zip(names, gather(torch.cat(columns, 1))[0].mean(0).tolist())}, shown


def start_gate(model, tokenizer, task, args: Args) -> dict[str, float]:
    """How often the first policy is right without and with what the teacher sees: on evaluation questions whose path
    the task knows, else on the examiner's own. Says so if the teacher has little to teach."""
    kind, seeds = args.privileged_context, [f"gate {i}" for i in range(args.eval_problems)]
    problems = task.traced_problems(args.eval_problems) or examine(model, tokenizer, task, seeds, args)[2]
    pairs = [(p, task.with_privilege(p, kind, seed)) for p, seed in zip(problems, seeds) if p and kind != "none"]
    played = [play(model, tokenizer, task, list(asked), args.num_answers, args, seeds) for asked in zip(*pairs)]
    means = [score_episodes(task, episodes)[:, 0].mean().item() for episodes in played]
    if pairs and means[1] - means[0] < 0.2 and rank_and_world_size()[0] == 0:
        print(f"start gate: right {means[0]:.3f}, with {kind} {means[1]:.3f}: the teacher has little to teach")
    return dict(zip(("eval/pi_play/gate_without", "eval/pi_play/gate_with"), means))


# === 8 Training loop ==================================================================================================


def check_args(args: Args) -> None:
    """One sentence for every combination of flags that cannot work."""
    ranks, group, micro = int(os.environ.get("WORLD_SIZE", 1)), args.num_generations, args.per_device_train_batch_size
    least = dict.fromkeys(["max_steps", "eval_steps", "seed", "examiner_steps"], 0) | {"distill_top_k": 1}
    least |= dict.fromkeys(["num_generations", "num_answers"], 2) | dict.fromkeys(["temperature", "top_p"], 1e-6)
    for f in fields(Args):
        x, low, flag = getattr(args, f.name), least.get(f.name, int(f.type is int)), f.name.replace("_", "-")
        high, numbers = 1 if f.name in ("top_p", "teacher_tau") else 2**31, x if isinstance(x, tuple) else (x,)
        kinds = [getattr(k, "__name__", k) for k in get_args(f.type) * (get_origin(f.type) is not tuple) or (f.type,)]
        unfit = x not in kinds and not {*kinds, "int", "list"} & {kind.__name__ for kind in type(x).__mro__}
        if x in ("", ()) or unfit or not all(low <= n <= high for n in numbers if isinstance(n, (int, float))):
            wanted = "a name" if x == "" else " or ".join(kinds) if unfit else f"{low} or more, at most {high}"
            fail(f"--{flag} {x!r}: expected {wanted}")
        if flag in ("num-prompts-per-step", "num-documents-per-step") and x % ranks:
            fail(f"--{flag} {x}: not divisible by the {ranks} processes")
    if micro % group and group % micro:
        fail(f"--per-device-train-batch-size {micro}: expected a multiple or a divisor of --num-generations {group}")


def batch_metrics(batch: Batch, progress: Progress) -> dict[str, float]:
    """What the episodes of a step say, over all processes. Counts their tokens in progress."""
    values = {name: gather(value)[0].float() for name, value in batch.info.items()}  # (B,) each
    lengths, reward = gather(batch.mask.sum(1))[0].float(), gather(batch.rewards[:, 0])[0]  # (B,) each
    progress["tokens"] += int(lengths.sum())
    std = pool_statistics(reward.double(), torch.ones_like(reward).double(), values.pop("pool"))[1]  # (B,)
    metrics = {"reward": reward, "reward_std": std, "frac_reward_zero_std": (std == 0).float()}
    metrics |= {"completions/mean_length": lengths, "completions/max_length": lengths.amax()}
    metrics |= {"completions/clipped_ratio": 1 - values.pop("ended"), "entropy": values.pop("entropy") / lengths.mean()}
    metrics |= {f"pi_play/{name}": value for name, value in values.items()}
    return {name: value.mean().item() for name, value in metrics.items()} | {"num_tokens": progress["tokens"]}


def train(args: Args) -> dict[str, float]:
    """Train as the flags say. Returns the last evaluation. Steps as in pi_play.md."""
    transformers.logging.disable_progress_bar()
    getattr(sys.stdout, "reconfigure", dict)(errors="replace")  # a terminal may not know all that a model writes
    args = resume_args(args) if args.resume else args
    check_args(args)
    device, (rank, world_size) = setup(args), rank_and_world_size()
    task, tokenizer = load_task(args), load_tokenizer(args)
    models = {role: load_model(args, tokenizer, device) for role in ("student", "examiner", "teacher")}
    student, teacher = models["student"], models["teacher"].requires_grad_(False)
    reference = load_model(args, tokenizer, device).requires_grad_(False) if args.beta > 0 else None
    counts = {"student": args.num_prompts_per_step, "examiner": args.num_documents_per_step}
    optimizers = {role: torch.optim.Adam(models[role].parameters(), args.learning_rate, fused=True) for role in counts}
    progress = Progress(step=0, student=0, examiner=0, tokens=0)
    state = models | {f"{role} optimizer": x for role, x in optimizers.items()} | {"progress": progress}
    run_dir = args.output_dir or f"runs/{Path(__file__).stem}__{args.env}__{args.seed}__{time.time():.0f}"
    if rank == 0 and not args.resume and any(os.path.exists(f"{run_dir}/{x}") for x in ("args.json", "metrics.csv")):
        fail(f"--output-dir {run_dir}: holds a run already; continue it with --resume {run_dir} or name another folder")
    loaded = progress["step"] if args.resume and load_checkpoint(run_dir, state) else -1
    if rank == 0:
        logger = Logger(run_dir, args, loaded)
        print(f"{run_dir}: {args.num_prompts_per_step} x {args.num_generations} episodes a step, {device}")
    signals = []  # the step is finished and saved before the run leaves; a second signal leaves at once
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os._exit(128 + number) if signals else signals.append(number))
    start, first, scores = time.perf_counter(), progress["step"], {}
    while True:
        step, last = progress["step"], progress["step"] >= args.max_steps
        stop = int(gather(torch.tensor([max(signals, default=0)]))[0].max())  # a signal to any process
        if step != loaded and args.eval_steps and (last or step % args.eval_steps == 0):
            scores, shown = evaluate(student, tokenizer, task, args)
            gate = start_gate(student, tokenizer, task, args) if step == 0 else {}
            if rank == 0:
                if last or step == 0:
                    print(shown)
                    logger.board.add_text("eval/completions", "    " + shown.replace("\n", "\n    "), step)  # as code
                logger.scalars(step, scores | gate)
                print("  ".join(f"{tag} {value:.3f}" for tag, value in list(scores.items())[:3]), flush=True)
        if step not in (0, loaded) and (last or stop or step % args.save_steps == 0):
            save_checkpoint(run_dir, step, state)
        if last or stop:
            break
        began, tokens = time.perf_counter(), progress["tokens"]
        number, position = divmod(step, args.examiner_steps + args.student_steps)
        role = "examiner" if position < args.examiner_steps else "student"
        weights = args.lambda_schedule if role == "student" and args.privileged_context != "none" else (0.0,)
        weight = weights[min(number, len(weights) - 1)]
        numbers = range(progress[role] + rank, progress[role] + counts[role], world_size)
        progress[role] += counts[role]
        # 1. questions about documents, measured by answers of the student; 2. answers to questions of the examiner
        batch = (examiner_rollout if role == "examiner" else rollout)(models, tokenizer, task, numbers, args)
        metrics, sampled = batch_metrics(batch, progress), time.perf_counter()
        advantages = compute_advantages(batch, args, progress)
        metrics |= update(models[role], optimizers[role], batch, advantages, args, reference, teacher, weight)
        if role == "student":  # 3. the teacher follows
            update_teacher(teacher, student, args.teacher_tau)
            metrics["pi_play/lambda"] = weight
        progress["step"] += 1
        now = time.perf_counter()  # 4. log; evaluate and save above
        if rank == 0:
            line = f"step {step + 1:>4}/{args.max_steps}  {role:<8}  reward {metrics['reward']:.3f}"
            if role == "examiner":
                metrics = {f"pi_play/examiner/{name.removeprefix('pi_play/')}": x for name, x in metrics.items()}
            logger.scalars(step + 1, {f"train/{name}": value for name, value in metrics.items()})
            gpu, speed = device.type == "cuda", (progress["tokens"] - tokens) / (now - began)
            memory = torch.cuda.max_memory_allocated() if gpu else getrusage(RUSAGE_SELF).ru_maxrss * 1024  # bytes
            perf = {"perf/step_seconds": now - began, "perf/rollout_seconds": sampled - began}
            perf |= {"perf/tokens_per_second": speed, "perf/peak_memory_gb": memory / 1e9}
            logger.scalars(step + 1, perf, "perf.csv")
            left = (now - start) / (step + 1 - first) * (args.max_steps - step - 1)
            print(f"{line}  {speed / 1000:4.1f}k tok/s  {left // 60:.0f}:{left % 60:02.0f} left", flush=True)
    if stop and not last:
        fail(f"stopped after step {step}; continue with --resume {run_dir}", 128 + stop)
    if rank == 0:
        for role, place in (("student", "final"), ("examiner", "final/examiner")):
            models[role].save_pretrained(os.path.join(run_dir, place))
            tokenizer.save_pretrained(os.path.join(run_dir, place))
    if dist.is_initialized():
        dist.destroy_process_group()
    return scores


if __name__ == "__main__":
    train(tyro.cli(Args))
