# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "transformers>=5.0", "tyro>=1.0", "tensorboard>=2.18"]
# ///
"""Dr. MAS: GRPO for a team of language-model agents, with the advantage normalised for every agent by itself.

Feng et al., Dr. MAS: Stable Reinforcement Learning for Multi-Agent LLM Systems, arXiv 2602.08847.

Differs from grpo.py in:
1. the method: `agent_advantages` (with `pool_statistics`) for `group_advantages` and `scale_rewards`, in
   `compute_advantages` with `normalization` (for `advantage`), `lone_call`, `invalid_penalty`; `inflation_factor`
2. a row is an agent's call: `play` lets a team write (`env`, `load_task`, `retriever_url`, `max_rounds`,
   `missing_verdict`); `rollout`, `batch_metrics`, `evaluate`; the first reward function is the reward, without
   `reward_weights`, `total_rewards`, `complete`, `sample_batch`; `max_steps`, `eval_problems`, `num_prompts_per_step`
3. a model for all or for each: `Player`, `load_players`, `train`, `share_model`, `agent_models`, `agent_learning_rates`
4. left out, in `check_args` too: DAPO (`dynamic_sampling`, `mask_truncated_completions`, `overlong_buffer_len`,
   `soft_overlong_penalty`), `top_p` (`sample_tokens`, `generate`), `compile` (`load_model`, `resume_args`), schedules
   (`learning_rate`, `lr_scheduler_type`, `warmup_steps`), `num_numbers`, `max_number`
Differs from the paper in:
1. as its code: ddof 1, std + 1e-6, a lone call keeps its score, invalid calls are fined before normalising
2. one update on all calls of a step; its search recipe makes 5, and duplicates rows to even out batches

    python algorithms/dr_mas.py                                                    # tiny models, CPU, offline, 2-3 min
    python algorithms/dr_mas.py --dataset nq.jsonl --retriever-url http://127.0.0.1:8000/retrieve \
        --model-name-or-path Qwen/Qwen2.5-1.5B-Instruct --bf16 --learning-rate 1e-6 ...  # one GPU
    torchrun --nproc_per_node 8 algorithms/dr_mas.py --model-name-or-path Qwen/Qwen2.5-7B-Instruct --fsdp ...

P prompts, G episodes a prompt, R rows (calls of agents), S prompt tokens, T completion tokens, V vocabulary, K reward
functions, L tokens of a packed row, N predicted tokens. A group is the episodes of a prompt. The rest is in dr_mas.md.
"""

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
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.utils.tensorboard import SummaryWriter

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # the repository root, for envs/
from envs.countdown import Countdown
from envs.math_jsonl import MathJsonl
from envs.search_qa import SearchQA
from envs.teams import RouterSearcherResponder, SolverVerifier

TINY_MODELS = os.path.join(sys.path[0], "envs", "tiny_lm")
LOGITS_PER_CHUNK = 2**26  # 256 MB in float32
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # of checkpoints, under FSDP too

# === 2 Args ===========================================================================================================


@dataclass
class Args:
    model_name_or_path: str | None = None
    """policy: a Hugging Face causal language model, by name or folder; None is the env's tiny model (ours)"""
    env: Literal["countdown", "search_qa"] = "search_qa"
    """task and team: solver and verifier on the number game, or router, searcher, responder on questions (Dr. MAS 5)"""
    dataset: str | None = None
    """JSON-lines file in place of the env's own problems; its keys are in envs/ (ours)"""
    retriever_url: str | None = None
    """search_qa: a Search-R1 retrieval server, for questions from a file; None searches the env's own world (ours)"""
    max_rounds: int | None = None
    """solutions of the solver, or steps of the search team; None: 2 and 4 (Dr. MAS)"""
    missing_verdict: Literal["approve", "reject"] = "approve"
    """what a verifier or router without a verdict has said (Dr. MAS code: approve)"""
    share_model: bool = False
    """one model and optimizer for all agents, or one each (Dr. MAS: both)"""
    agent_models: tuple[str, ...] | None = None
    """one model for each agent, in the team's order; None: all as --model-name-or-path (Dr. MAS fig. 5)"""
    agent_learning_rates: tuple[float, ...] | None = None
    """one learning rate for each agent; None: all as --learning-rate (Dr. MAS code)"""
    normalization: Literal["agent", "global", "agent_mean", "agent_std", "call"] = "agent"
    """agent: the method; controls: see agent_advantages, global is GRPO (Dr. MAS table 3; call: ours)"""
    lone_call: Literal["raw", "zero"] = "raw"
    """advantage of an agent's only call in a group: its score, or 0 (Dr. MAS code: raw)"""
    invalid_penalty: float = 0.1
    """taken off the score of a call without the tags that its role asks for (Dr. MAS: 0.1 math, 0.01 search)"""
    num_prompts_per_step: int = 16
    """P, prompts in one step over all processes (ours; DeepSeekMath 4.2: 16)"""
    num_generations: int = 8
    """G, completions of each prompt: one group (TRL 1.16; DeepSeekMath 4.2: 64)"""
    max_completion_length: int = 64
    """T, longest completion in tokens (ours, for the tiny model; DeepSeekMath 4.2: 1024)"""
    temperature: float = 1.0
    """sampling temperature; log-probabilities are taken at this temperature too (TRL 1.16)"""
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "grpo"
    """how token losses are averaged, see policy_loss (DeepSeekMath eq. 3; TRL 1.16: dapo)"""
    epsilon: float = 0.2
    """clip range of the probability ratio, below (TRL 1.16, verl 0.9)"""
    epsilon_high: float | None = None
    """clip range above; None is epsilon (TRL 1.16; DAPO 3.1: 0.28)"""
    delta: float | None = None
    """upper bound of the ratio before the minimum, also for negative advantages (TRL 1.16; verl 0.9: 3 as dual clip)"""
    beta: float = 0.0
    """weight of the KL penalty to the initial model, loaded only if above 0 (TRL 1.16; DeepSeekMath 4.2: 0.04)"""
    use_bias_correction_kl: bool = False
    """multiply the KL estimate by the ratio (DeepSeekMath eq. 4: no; TRL 1.16: yes)"""
    num_iterations: int = 1
    """mu, optimizer steps on each batch of completions (DeepSeekMath 4.2)"""
    skip_equal_groups: bool = True
    """leave groups without advantage out of the update when nothing else acts on them: exact, only faster (ours)"""
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
    fsdp: bool = False
    """shard weights, gradients and optimizer state over the processes of torchrun with FSDP2 (ours)"""
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
    evaluate: str | None = None
    """run folder whose policy is scored; nothing is trained (ours)"""


# === 3 The method =====================================================================================================


def pool_statistics(values: Tensor, weights: Tensor, *ids: Tensor, ddof: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, standard deviation and size of the pool of each row: the rows whose ids all agree. (R,) each -> 3 x (R,)

    A row counts `weights` times. Equal values have a standard deviation of exactly 0, however they are rounded.
    """
    pools = torch.stack(ids).unique(dim=1, return_inverse=True)[1]  # (R,) number of each row's pool
    size, total = (torch.zeros_like(x).index_add(0, pools, x)[pools] for x in (weights, weights * values))  # (R,) each
    squares = weights * (values - total / size).square()  # (R,)
    std = (torch.zeros_like(squares).index_add(0, pools, squares)[pools] / (size - ddof).clamp(min=1)).sqrt()  # (R,)
    return total / size, std.masked_fill(std < 1e-9 * (1 + (total / size).abs()), 0.0), size.round()


# fmt: off
def agent_advantages(scores: Tensor, group_ids: Tensor, agent_ids: Tensor, trajectory_ids: Tensor,
                     normalization="agent", std_epsilon=1e-6, lone_call="raw") -> Tensor:  # fmt: on
    """Advantage of every call: its score minus a mean, over a standard deviation (ddof 1). (R,) each -> (R,)

    `agent`: mean and std of the agent's calls in the group (Dr. MAS eq. 5). `global`: of the group's trajectories, each
    with the mean score of its calls, which all its rows take (eq. 2). `agent_mean`, `agent_std`: only that one is the
    agent's (table 3). `call`: of all calls in the group. A pool without variance gives exactly 0; the only call of its
    agent in a group keeps its score, or gets 0 with lone_call="zero". Trajectory ids differ between groups.
    """
    values, once = scores.double(), torch.ones_like(scores, dtype=torch.double)  # (R,)
    of_trajectory, _, calls = pool_statistics(values, once, trajectory_ids)  # (R,) each
    pooled = (values, once) if normalization == "call" else (of_trajectory, 1 / calls)  # (R,) each: scores, weights
    own, team = pool_statistics(values, once, group_ids, agent_ids), pool_statistics(*pooled, group_ids)  # 3 x (R,)
    values = of_trajectory if normalization == "global" else values  # (R,)
    mean = (own if normalization in ("agent", "agent_mean") else team)[0]  # (R,)
    std = (own if normalization in ("agent", "agent_std") else team)[1]  # (R,)
    advantages = ((values - mean) / (std + std_epsilon)).masked_fill(std == 0, 0.0)  # (R,)
    lone = (own if normalization.startswith("agent") else team)[2] == 1  # (R,)
    return torch.where(lone, values * (lone_call == "raw"), advantages).to((scores * 1.0).dtype)


def inflation_factor(mean_agent: Tensor, std_agent: Tensor, mean_global: Tensor, std_global: Tensor) -> Tensor:
    """Dr. MAS lemma 4.2: how much the global baseline inflates an agent's squared gradient; 1 with its own baseline.

    Of rewards, with population standard deviations; any shape, e.g. (R,). At most N - 1 for N binary rewards.
    """
    return torch.as_tensor((std_agent**2 + (mean_agent - mean_global) ** 2) / std_global**2)


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


def shard(model, args: Args) -> None:
    """FSDP2 in place: every block of layers, then the rest. With bf16 the sharded weights stay float32."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.bf16 else MixedPrecisionPolicy()
    blocks = [block for module in model.modules() if isinstance(module, torch.nn.ModuleList) for block in module]
    for module in [*blocks, model]:  # gathered by the first forward pass, kept until the end of the backward pass:
        fully_shard(module, mp_policy=policy, reshard_after_forward=False)  # decoding needs no communication
    model.completion_logprobs = completion_logprobs.__get__(model)  # a forward pass of its own, see token_logprobs
    register_fsdp_forward_method(model, "completion_logprobs")


class Player:
    """A model with what trains it, for one agent or for all."""

    def __init__(self, args: Args, device: torch.device):
        self.tokenizer = load_tokenizer(args)
        self.model = load_model(args, self.tokenizer, device)
        self.reference = load_model(args, self.tokenizer, device).requires_grad_(False) if args.beta > 0 else None
        if args.fsdp:
            shard(self.model, args)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), args.learning_rate, weight_decay=0.0, fused=True)


def load_players(args: Args, agents: tuple[str, ...], device: torch.device) -> dict[str, Player]:
    """Name -> player: one named team for all agents, or one for each agent under the agent's name."""
    names = ["team"] if args.share_model else list(agents)
    models = args.agent_models or [args.model_name_or_path] * len(names)
    models = [os.path.join(args.evaluate, "final", name) for name in names] if args.evaluate else models
    rates = args.agent_learning_rates or [args.learning_rate] * len(names)
    if len(models) != len(names) or len(rates) != len(names) or not all(0 <= rate < 2**31 for rate in rates):
        fail(f"--agent-models {models} --agent-learning-rates {rates}: expected one for each of {names}, rates >= 0")
    flags = zip(names, models, rates)
    return {n: Player(replace(args, model_name_or_path=m, learning_rate=rate), device) for n, m, rate in flags}


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


class Progress(dict):
    """Counters that a resumed run continues: steps, problems drawn (the cursor in the data), tokens sampled."""

    state_dict, load_state_dict = dict.copy, dict.update


def load_task(args: Args):
    """The team: `agents`, `start`, `prompt`, `advance`, `rewards`, and its `task`, the source of problems."""
    options = args.max_rounds, args.missing_verdict
    try:
        if args.env == "search_qa":
            return RouterSearcherResponder(SearchQA(args.dataset, args.retriever_url), *options)
        return SolverVerifier(MathJsonl(args.dataset) if args.dataset else Countdown(), *options)
    except ValueError as error:
        fail(str(error))


def sample_tokens(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token a row by inverting the cumulative distribution. (B,V), (B,) in [0,1) -> (B,)"""
    cumulative = logprobs.exp().cumsum(1)  # (B,V)
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
            tokens = sample_tokens(logp, uniform[rows, t]) if generator else logp.argmax(1)  # (B,)
            completion_ids[rows, t], logprobs[rows, t] = tokens, logp.gather(1, tokens[:, None])[:, 0]
            entropy[rows, t] = -(logp.exp() * logp).nan_to_num(0).sum(1)
            live = live & ~torch.isin(tokens, ends)  # (B,)
    is_end = torch.isin(completion_ids, ends)  # (B,T)
    counted = is_end.cumsum(1) - is_end.long() == 0  # (B,T) nothing after a row's first end token
    completion_ids, logprobs, entropy = (x.masked_fill(~counted, 0) for x in (completion_ids, logprobs, entropy))
    return Samples(completion_ids, counted, logprobs, entropy, is_end.any(1))


def play(players: dict[str, Player], team, problems: list, num_generations: int, args: Args, seeds: list[str] | None):
    """G episodes of each problem: (episodes, rewards (P G,K), calls), a Batch of calls for every `generate`.

    In each round one agent writes in all the episodes that wait for it, in the team's order. The first prompts are
    those of the problems, the same for a group; later ones hold what was written. No seeds: greedily.
    """
    episodes, calls = [team.start(problem) for problem in problems for _ in range(num_generations)], []
    for player in players.values() if args.fsdp else ():  # all gather weights in one order, needed or not
        generate(player.model, [[0]], 1, replace(args, max_completion_length=1), None)
    while agent := next((name for name in team.agents if any(e.agent == name for e in episodes)), None):
        due = [i for i, episode in enumerate(episodes) if episode.agent == agent]
        player, copies = players.get(agent) or players["team"], 1 if calls else num_generations
        prompts = [encode(player.tokenizer, team.prompt(episodes[i])) for i in due[::copies]]
        names = seeds and [f"{seeds[i // num_generations]} {i % num_generations} {len(episodes[i].calls)}" for i in due]
        generator = names and [torch.Generator().manual_seed(random.Random(x).getrandbits(63)) for x in names[::copies]]
        samples = generate(player.model, prompts, copies, args, generator)
        rows = [row[:length] for row, length in zip(samples.completion_ids.tolist(), samples.mask.sum(1).tolist())]
        texts = player.tokenizer.batch_decode(rows, skip_special_tokens=True)
        valid = team.advance([episodes[i] for i in due], texts)
        info = {"agent": [team.agents.index(agent)] * len(due), "episode": due, "valid": valid}  # (R,) each
        info = {name: torch.tensor(values, device=samples.mask.device) for name, values in info.items()}
        info |= {"length": samples.mask.sum(1), "ended": samples.ended, "entropy": samples.entropy.sum(1)}
        prompts = [prompt for prompt in prompts for _ in range(copies)]  # a list for each row
        calls.append(Batch(prompts, samples.completion_ids, samples.mask, samples.logprobs, samples.logprobs, info))
    return episodes, torch.tensor([e.rewards(team.task) for e in episodes], device=samples.mask.device), calls


def rollout(players: dict[str, Player], team, args: Args, progress: Progress) -> Batch:
    """The calls of a step: G episodes of the next P problems, of which every process takes its share."""
    rank, world_size = rank_and_world_size()
    first = progress["problems"] + rank * (share := args.num_prompts_per_step // world_size)
    progress["problems"] += args.num_prompts_per_step
    problems = [team.task.train_problem(i, args.seed) for i in range(first, first + share)]
    seeds = [f"{args.seed} {i}" for i in range(first, first + share)]
    _, rewards, calls = play(players, team, problems, args.num_generations, args, seeds)
    batch = batch_map(lambda *xs: torch.cat(xs) if isinstance(xs[0], Tensor) else sum(xs, []), *calls)
    batch.rewards = rewards[batch.info["episode"]]  # (R,K) every call has the rewards of its episode
    batch.info["trajectory"] = batch.info.pop("episode") + first * args.num_generations  # (R,)
    batch.info["group"] = batch.info["trajectory"] // args.num_generations  # (R,)
    return batch


def batch_map(function, *batches: Batch) -> Batch:
    """Apply a function to every field of the batches, and to every entry of info."""
    columns = [{**vars(batch), **batch.info} for batch in batches]
    result = {name: function(*(column[name] for column in columns)) for name in columns[0] if name != "info"}
    return Batch(*(result.pop(f.name) for f in fields(Batch) if f.name != "info"), result)


def compute_advantages(batch: Batch, args: Args, progress: Progress) -> Tensor:
    """Advantages of this process's rows, from the first reward less the fine for invalid calls. -> (R,)"""
    scores = batch.rewards[:, 0].nan_to_num() - args.invalid_penalty * ~batch.info["valid"]  # (R,)
    ids = batch.info["group"], batch.info["agent"], batch.info["trajectory"]  # (R,) each; no group is divided
    return agent_advantages(scores, *ids, args.normalization, lone_call=args.lone_call)


@dataclass
class Packed:
    """One micro-batch of b rows: R packed rows of L tokens, of which N predict a token of a completion."""

    rows: list[int]  # b rows of the batch
    input_ids: Tensor  # (R,L)
    position_ids: Tensor  # (R,L) restart for every completion
    owners: Tensor  # (R,L) 0 prompt, 1.. the completions, -1 padding
    filled: Tensor  # (b,T) bool: where the N predicted tokens stand in the batch
    targets: Tensor  # (N,) the predicted tokens


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
    for prompt, group in ((prompt, list(group)) for prompt, group in groupby(rows, key=lambda row: batch.prompts[row])):
        room = (args.max_packed_length - len(prompt)) // max(lengths[row] for row in group)
        most = max(1, min(room, args.per_device_train_batch_size, args.num_generations))
        strips += [group[i : i + most] for i in range(0, len(group), most)]  # one strip, one packed row
    strips.sort(key=lambda strip: sum(lengths[row] for row in strip))
    count = max(1, args.per_device_train_batch_size // args.num_generations)
    return [pack_strips(strips[i : i + count], batch, filled, lengths, ids) for i in range(0, len(strips), count)]


def pack_strips(strips: list[list[int]], batch: Batch, filled: Tensor, lengths: list[int], ids: list) -> Packed:
    """One micro-batch of packed rows, one for each list of rows with equal prompts."""
    columns = []
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
    return Packed(rows, input_ids.clamp(0), position_ids.clamp(0), owners, filled, targets)


def completion_logprobs(model, packed: Packed, temperature: float) -> Tensor:
    """Log-probability of every predicted token. The head works on these positions only, and in chunks. -> (N,)"""
    query, key = packed.owners[:, :, None], packed.owners[:, None]  # (R,L,1), (R,1,L)
    sees = ((key == query) | (key == 0)).tril()  # (R,L,L)
    inputs = {"attention_mask": sees[:, None], "position_ids": packed.position_ids, "use_cache": False}
    body, head = model.__dict__.get("training_body", model.base_model), model.get_output_embeddings()
    hidden = body(input_ids=packed.input_ids, **inputs).last_hidden_state[packed.owners > 0]  # (N,H)

    def chunk_logprobs(hidden, targets):
        return -torch.nn.functional.cross_entropy(head(hidden).float() / temperature, targets, reduction="none")

    parts = (x.split(max(1, LOGITS_PER_CHUNK // model.config.vocab_size)) for x in (hidden, packed.targets))
    if len(chunks := list(zip(*parts))) == 1:
        return chunk_logprobs(*chunks[0])
    return torch.cat([torch.utils.checkpoint.checkpoint(chunk_logprobs, *part, use_reentrant=False) for part in chunks])


def token_logprobs(model, packed: Packed, args: Args) -> Tensor:
    """Log-probabilities of the completions of a micro-batch, 0 where there is no token. -> (b,T)"""
    forward = getattr(model, "completion_logprobs", None) or completion_logprobs.__get__(model)  # FSDP has its own
    with torch.autocast(model.device.type, torch.bfloat16, enabled=args.bf16):
        logprobs = forward(packed, args.temperature)  # (N,)
    return torch.zeros(packed.filled.shape, device=logprobs.device).masked_scatter(packed.filled, logprobs)


def update(model, optimizer, batch: Batch, advantages: Tensor, args: Args, reference=None) -> dict[str, float]:
    """num_iterations optimizer steps on a batch; returns metrics, the same on all processes. `reference`: for beta > 0.

    The loss of a step is the sum over micro-batches and processes, each with its share in normalisers that are global:
    neither changes the gradient. Rows on which nothing acts are left out, but still count in the normalisers.
    """
    world_size, device = rank_and_world_size()[1], batch.mask.device
    acts = advantages[:, None].ne(0).flatten(1).any(1) | (args.beta > 0 or not args.skip_equal_groups)  # (B,)
    micro_batches = pack(batch, acts.nonzero()[:, 0].tolist(), args)
    counts = [batch.mask.sum(), len(acts), len(micro_batches), batch.mask[acts].sum()]
    all_counts = gather(torch.tensor([counts], device=device))[0]  # (processes,4)
    num_tokens, num_rows, _, num_trained = all_counts.sum(0).clamp(min=1)  # scalars
    if args.fsdp:  # forward and backward are collective: a process with less to do joins in with one idle token
        token = torch.zeros(1, 1, dtype=torch.long, device=device)
        idle = Packed([], token, token, token, batch.mask[:0], token[0, :0])
        micro_batches += [idle] * (max(1, int(all_counts[:, 2].max())) - len(micro_batches))
    options = {"loss_type": args.loss_type, "epsilon": args.epsilon, "epsilon_high": args.epsilon_high}
    options |= {"delta": args.delta, "beta": args.beta, "use_bias_correction_kl": args.use_bias_correction_kl}
    options |= {"max_completion_length": args.max_completion_length, "num_tokens": num_tokens}
    names = ["loss", "gap", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"]
    sums = dict.fromkeys(names + ["kl"] * (args.beta > 0), torch.zeros((), device=device))
    old_logprobs, ref_logprobs, largest = *torch.zeros(2, *batch.mask.shape, device=device), sums["gap"]  # (B,T) twice
    model.train(args.gradient_checkpointing)  # else without dropout, which would make learner and sampler differ
    for iteration in range(args.num_iterations):
        optimizer.zero_grad(set_to_none=True)
        for packed in micro_batches:
            logprobs, rows = token_logprobs(model, packed, args), packed.rows  # (b,T)
            if not rows:  # idle
                logprobs.sum().backward()
                continue
            mask, tokens = batch.mask[rows], batch.mask[rows].sum()  # (b,T), scalar
            if iteration == 0:  # the weights are those that sampled: the ratio is exactly 1
                old_logprobs[rows] = logprobs.detach()
                if args.beta > 0:
                    ref_logprobs[rows] = token_logprobs(reference, packed, args).detach()
                gap = (logprobs.detach() - batch.logprobs[rows]).abs() * mask  # (b,T)
                sums["gap"], largest = sums["gap"] + gap.sum() / num_trained, torch.maximum(largest, gap.max())
            options["ref_logprobs"] = ref_logprobs[rows]
            loss, metrics = policy_loss(logprobs, old_logprobs[rows], advantages[rows], mask, **options)
            share = {"dapo": 1.0, "bnpo": tokens / num_tokens}.get(args.loss_type, len(rows) / num_rows)
            (loss * share * (world_size if args.fsdp else 1)).backward()  # FSDP takes the mean where we want the sum
            sums["loss"] = sums["loss"] + loss.detach() * share / args.num_iterations
            for name, value in metrics.items():
                sums[name] = sums[name] + value * tokens / num_tokens / args.num_iterations
        grad_norm = apply_gradients(model, optimizer, args)
    metrics = dict(zip(sums, gather(torch.stack(list(sums.values()))[None])[0].sum(0).tolist()))
    metrics["sampling/logprob_difference/mean"] = metrics.pop("gap")
    metrics["sampling/logprob_difference/max"] = gather(largest[None])[0].max().item()
    return metrics | {"grad_norm": grad_norm, "frac_tokens_trained": (all_counts[:, 3].sum() / num_tokens).item()}


def apply_gradients(model, optimizer, args: Args) -> float:
    """Add the gradients of all processes, clip, step. Returns the norm before clipping."""
    for parameter in model.parameters():
        if parameter.grad is None:  # nothing acted: AdamW's momentum still moves the weights, so it gets a zero
            parameter.grad = parameter.detach() * 0  # and NaN for a broken weight, which is noticed below
        if dist.is_initialized() and not args.fsdp:
            dist.all_reduce(parameter.grad)
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    grad_norm = (grad_norm.full_tensor() if args.fsdp else grad_norm).item()
    if not math.isfinite(grad_norm):
        fail(f"the gradient norm is {grad_norm}: lower --learning-rate, check rewards and weights; checkpoints stay", 1)
    optimizer.step()
    return grad_norm


# === 6 Checkpoint =====================================================================================================


@dataclass
class Trained:
    """State of a model and its optimizer as if on one device, so that a checkpoint fits any number of them."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def state_dict(self) -> dict:
        """Whole tensors in the memory of process 0; all processes must call."""
        return dict(zip(("model_state_dict", "optim_state_dict"), get_state_dict(*vars(self).values(), options=WHOLE)))

    def load_state_dict(self, state: dict) -> None:
        """Every process takes what it holds of the whole tensors."""
        set_state_dict(self.model, self.optimizer, **state, options=WHOLE)


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
    """The flags of the run to continue or to score. A flag given now must agree, unless the training ignores it."""
    run_dir = args.evaluate or args.resume
    if args.evaluate and args.resume:
        fail("--evaluate and --resume: one of them, please; a finished run is scored, an unfinished one is continued")
    with or_fail(f"{run_dir}: not a run folder of this script, or nothing to --evaluate yet: finish it with --resume"):
        saved = json.loads(Path(run_dir, "args.json").read_text())
        saved = Args(**{name: tuple(x) if isinstance(x, list) else x for name, x in saved.items()})
        os.stat(os.path.join(run_dir, "final" if args.evaluate else ""))
    free = ["resume", "save_steps", "device", "max_steps", "retriever_url"]
    # a flag on the command line counts as given with its default value, too
    words = {w.split("=")[0].replace("_", "-").replace("--no-", "--") for w in sys.argv if __name__ == "__main__"}
    given = {x: now for x, now in vars(args).items() if now != getattr(Args, x) or f"--{x.replace('_', '-')}" in words}
    for name, now in given.items():
        if now != (before := getattr(saved, name)) and name not in free and not args.evaluate:
            fail(f"--resume {run_dir}: the run began with --{name.replace('_', '-')} {before}, not {now}")
    model = {"model_name_or_path": os.path.join(run_dir, "final"), "fsdp": False} if args.evaluate else {}
    return replace(saved, **given | {"output_dir": run_dir} | model)


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


def evaluate(players: dict[str, Player], team, args: Args) -> tuple[dict[str, float], str]:
    """Greedy pass@1 and pass@k of k episodes on problems that training never sees; three episodes as text."""
    rank, world_size = rank_and_world_size()
    problems, k = team.task.evaluation_problems(args.eval_problems), args.num_generations_eval
    mine = list(range(rank, len(problems), world_size)) or [0]
    problems, seeds = [problems[i] for i in mine], [f"evaluation {i}" for i in mine]
    episodes, rewards, _ = play(players, team, problems, 1, args, None)  # rewards (P,K)
    right = play(players, team, problems, k, args, seeds)[1][:, 0].view(-1, k)  # (P,k) is it right
    means = torch.cat([rewards[:, :1], right.mean(1, True), right.amax(1, True), rewards], 1)
    names = ["pass_at_1", f"mean_at_{k}", f"pass_at_{k}", *(f"rewards/{name}" for name in team.task.reward_functions)]
    shown = "\n".join(episode.transcript(team.task) for episode in episodes[:3])
    return {f"eval/{name}": value for name, value in zip(names, gather(means)[0].nanmean(0).tolist())}, shown


# === 8 Training loop ==================================================================================================


def check_args(args: Args) -> None:
    """One sentence for every combination of flags that cannot work."""
    ranks, group, micro = int(os.environ.get("WORLD_SIZE", 1)), args.num_generations, args.per_device_train_batch_size
    least = {"max_steps": 0, "eval_steps": 0, "seed": 0, "num_generations": 2, "max_rounds": 1}
    least |= {"temperature": 1e-6, "delta": 1}
    for f in fields(Args):
        x, low = getattr(args, f.name), least.get(f.name, int(f.type is int))
        kinds = [getattr(k, "__name__", k) for k in get_args(f.type) * (get_origin(f.type) is not tuple) or (f.type,)]
        unfit = x not in kinds and not {*kinds, "int", "list"} & {kind.__name__ for kind in type(x).__mro__}
        if x == "" or unfit or (isinstance(x, (int, float)) and not low <= x <= 2**31):
            wanted = "a name" if x == "" else " or ".join(kinds) if unfit else f"{low} or more, at most {2**31}"
            fail(f"--{f.name.replace('_', '-')} {x!r}: expected {wanted}")
    if args.num_prompts_per_step % ranks:
        fail(f"--num-prompts-per-step {args.num_prompts_per_step}: not divisible by the {ranks} processes")
    if micro % group and group % micro:
        fail(f"--per-device-train-batch-size {micro}: expected a multiple or a divisor of --num-generations {group}")
    if args.fsdp and ranks == 1:
        fail("--fsdp: nothing to shard over; start with torchrun --nproc_per_node 2 or more")


def batch_metrics(batch: Batch, team, args: Args, progress: Progress) -> dict[str, float]:
    """What the calls of a step say, over all processes. Counts their tokens in progress."""
    info = {name: gather(values)[0].double() for name, values in batch.info.items()}  # (R,) each, of all processes
    group, agent, trajectory, lengths = (info[name] for name in ("group", "agent", "trajectory", "length"))
    rewards = gather(batch.rewards)[0].double()  # (R,K)
    once, reward = torch.ones_like(group), rewards[:, 0].nan_to_num()  # (R,) each
    calls = pool_statistics(reward, once, trajectory)[2]  # (R,) of its trajectory
    mean, std, _ = pool_statistics(reward, 1 / calls, group, ddof=0)  # (R,) each, over trajectories
    own_mean, own_std, own_calls = pool_statistics(reward, once, group, agent, ddof=0)  # (R,) each
    factor = inflation_factor(own_mean, own_std, mean, std).masked_fill(std == 0, math.nan)  # (R,)
    progress["tokens"] += int(lengths.sum())

    def average(values, weights):
        return (values * weights).nansum() / (weights * ~values.isnan()).sum()

    metrics = {"reward": average(reward, 1 / calls), "frac_reward_zero_std": average((std == 0).double(), 1 / calls)}
    metrics |= {f"rewards/{k}/mean": average(x, 1 / calls) for k, x in zip(team.task.reward_functions, rewards.T)}
    metrics |= {"completions/mean_length": lengths.mean(), "completions/max_length": lengths.max()}
    metrics |= {"completions/clipped_ratio": 1 - info["ended"].mean(), "entropy": info["entropy"].sum() / lengths.sum()}
    values = {"inflation_factor": factor, "frac_zero_std": (own_std == 0).double(), "valid": info["valid"]}  # (R,) each
    for number, name in enumerate(team.agents):
        weights = (agent == number) / own_calls  # (R,) every group counts once
        metrics |= {f"dr_mas/{name}/{key}": average(value, weights) for key, value in values.items()}
        metrics[f"dr_mas/{name}/calls"] = (agent == number).sum() / (1 / calls).sum()
    return {name: float(value) for name, value in metrics.items()} | {"num_tokens": progress["tokens"]}


def train(args: Args) -> dict[str, float]:
    """Train as the flags say, or score a run for --evaluate. Returns the last evaluation. Steps as in dr_mas.md."""
    transformers.logging.disable_progress_bar()
    getattr(sys.stdout, "reconfigure", dict)(errors="replace")  # a terminal may not know all that a model writes
    args = resume_args(args) if args.resume or args.evaluate else args
    check_args(args)
    device, rank = setup(args), rank_and_world_size()[0]
    team = load_task(args)
    players = load_players(args, team.agents, device)
    if args.evaluate:
        scores, shown = evaluate(players, team, args)
        if rank == 0:
            print(shown, *(f"{tag} {value:.4f}" for tag, value in scores.items()), sep="\n")
        return scores
    progress = Progress(step=0, problems=0, tokens=0)
    state = {name: Trained(player.model, player.optimizer) for name, player in players.items()} | {"progress": progress}
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
            scores, shown = evaluate(players, team, args)
            if rank == 0:
                if last or step == 0:
                    print(shown)
                    logger.board.add_text("eval/completions", "    " + shown.replace("\n", "\n    "), step)  # as code
                logger.scalars(step, scores)
                print("  ".join(f"{tag} {value:.3f}" for tag, value in list(scores.items())[:3]), flush=True)
        if step not in (0, loaded) and (last or stop or step % args.save_steps == 0):
            save_checkpoint(run_dir, step, state)
        if last or stop:
            break
        began, tokens = time.perf_counter(), progress["tokens"]
        batch = rollout(players, team, args, progress)  # 1. play G episodes of each problem, score them
        metrics = batch_metrics(batch, team, args, progress)
        sampled = time.perf_counter()
        advantages = compute_advantages(batch, args, progress)  # 2. compare each call with its agent's
        for number, (name, player) in enumerate(players.items()):  # 3. clipped policy-gradient steps
            rows = ((batch.info["agent"] == number) | args.share_model).nonzero()[:, 0]  # (rows,)
            part = batch_map(lambda x, rows=rows: x[rows] if isinstance(x, Tensor) else [x[i] for i in rows], batch)
            if len(gather(rows)[0]):  # else nothing to learn from; the momentum must not move the weights either
                learned = update(player.model, player.optimizer, part, advantages[rows], args, player.reference)
                metrics |= {f"dr_mas/{name}/{tag}": value for tag, value in learned.items()}
        progress["step"] += 1
        now = time.perf_counter()  # 4. log; evaluate and save above
        if rank == 0:
            logger.scalars(step + 1, {f"train/{name}": value for name, value in metrics.items()})
            gpu, speed = device.type == "cuda", (progress["tokens"] - tokens) / (now - began)
            memory = torch.cuda.max_memory_allocated() if gpu else getrusage(RUSAGE_SELF).ru_maxrss * 1024  # bytes
            perf = {"perf/step_seconds": now - began, "perf/rollout_seconds": sampled - began}
            perf |= {"perf/tokens_per_second": speed, "perf/peak_memory_gb": memory / 1e9}
            logger.scalars(step + 1, perf, "perf.csv")
            left = (now - start) / (step + 1 - first) * (args.max_steps - step - 1)
            line = f"step {step + 1:>4}/{args.max_steps}  reward {metrics['reward']:.3f}"
            line += f"  length {metrics['completions/mean_length']:3.0f}  {speed / 1000:4.1f}k tok/s"
            print(f"{line}  {left // 60:.0f}:{left % 60:02.0f} left", flush=True)
    if stop and not last:
        fail(f"stopped after step {step}; continue with --resume {run_dir}", 128 + stop)
    for name, player in players.items():
        weights = state[name].state_dict()["model_state_dict"]  # all processes must call
        weights = {key: weight for key, weight in weights.items() if key not in player.model.all_tied_weights_keys}
        if rank == 0:
            player.model.save_pretrained(os.path.join(run_dir, "final", name), state_dict=weights)
            player.tokenizer.save_pretrained(os.path.join(run_dir, "final", name))
    if dist.is_initialized():
        dist.destroy_process_group()
    return scores


if __name__ == "__main__":
    train(tyro.cli(Args))
