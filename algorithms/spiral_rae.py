# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "transformers>=5.0", "tyro>=1.0", "tensorboard>=2.18"]
# ///
"""SPIRAL: self-play on zero-sum text games; each role of each game has a baseline of its own (RAE).

Liu et al., SPIRAL: Self-Play on Zero-Sum Games Incentivizes Reasoning via Multi-Agent Multi-Turn Reinforcement
Learning, arXiv 2506.24119 (v3, ICLR 2026).

Differs from grpo.py in:
1. the method: `RoleBaseline` and the control `mars_advantages` in `compute_advantages`, with `gamma`, for
   `group_advantages`, `scale_rewards`, `advantage`; another default: `loss_type`, `num_iterations`
2. games, not problems: a row is a turn of one seat: `play`, `rollout`, `match_options`, `batch_metrics`, `train`, with
   `env`, `evaluate` (and `kuhn_readout`, `kuhn_scores`); without `load_task`, `dataset`, `reward_weights`,
   `total_rewards`, `complete`, `sample_batch`, `batch_map`, `eval_problems`, `num_generations_eval`, `num_numbers`,
   `max_number`; other default: `max_steps`, `num_prompts_per_step`, `eval_steps`, `per_device_train_batch_size`
3. left out, in `check_args` and `update` too: DAPO (`dynamic_sampling`, `mask_truncated_completions`,
   `overlong_buffer_len`, `soft_overlong_penalty`), `delta`, `use_bias_correction_kl`, `top_p` (`sample_tokens`,
   `generate`), `compile` (`load_model`), `resume_args` of a run to evaluate, schedules (`learning_rate`,
   `lr_scheduler_type`, `warmup_steps`)
Differs from the paper in:
1. all turns of a fixed number of games are learned from; its code draws 128 turns and drops the rest
2. Kuhn poker is the standard game of one hand; in theirs bets move no chips, see spiral_rae.md

    python algorithms/spiral_rae.py                                                # tiny model, CPU, offline, 2-4 min
    python algorithms/spiral_rae.py --model-name-or-path Qwen/Qwen3-4B --bf16 --games tictactoe kuhn negotiation ...
    torchrun --nproc_per_node 8 algorithms/spiral_rae.py --model-name-or-path Qwen/Qwen3-4B --fsdp --bf16 ...

P starts, G games from each, E = P G games, B rows (turns), S prompt tokens, T tokens of a turn, V vocabulary."""

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
from torch.nn.utils.rnn import pad_sequence
from torch.utils.tensorboard import SummaryWriter

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # the repository root, for envs/
from envs.game_solvers import kuhn_decision_points, kuhn_nash_conv
from envs.matches import OPPONENTS, Match, new_match

TINY_MODELS = os.path.join(sys.path[0], "envs", "tiny_lm")
LOGITS_PER_CHUNK = 2**26  # 256 MB in float32
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # of checkpoints, under FSDP too

# === 2 Args ===========================================================================================================


@dataclass
class Args:
    model_name_or_path: str | None = None
    """policy: a Hugging Face causal language model, by name or folder; None is the env's tiny model (ours)"""
    env: Literal["text_games"] = "text_games"
    """task: zero-sum games of two players (ours)"""
    games: tuple[Literal["tictactoe", "kuhn", "negotiation"], ...] = ("tictactoe",)
    """games that are mixed in equal shares (SPIRAL: one, or all three)"""
    kuhn_variant: Literal["standard", "spiral", "textarena"] = "standard"
    """kuhn: one hand for chips, or one of the published versions, in which bets move no chips (ours)"""
    handicap: float = 0.0
    """kuhn: chips that player 0 gets and player 1 pays in every game, whatever they do (ours)"""
    zero_sum_forfeits: bool = False
    """a forfeit counts -1 and +1, in place of -1.5 and +0.5 (SPIRAL code: no)"""
    opponent: Literal["self", "past", "random", "fixed"] = "self"
    """self: the method, both seats learn; past: the policy some steps ago; random; fixed: the first one (SPIRAL 4)"""
    opponent_lag: int = 16
    """past: the opponent becomes the present policy after this many steps (SPIRAL table 3)"""
    baseline: Literal["role", "global", "none", "mars"] = "role"
    """role: the method; controls: global = one for both roles, none = the bare return; mars: MARSHAL (SPIRAL eq. 2)"""
    baseline_decay: float = 0.95
    """decay of the moving average (SPIRAL table 6)"""
    update_first: bool = False
    """move the average before it is subtracted (SPIRAL eq. 2; SPIRAL code: no)"""
    gamma: float = 1.0
    """discount per turn (IGPO table 4; SPIRAL code)"""
    num_prompts_per_step: int = 16
    """P, prompts in one step over all processes (ours; DeepSeekMath 4.2: 16)"""
    num_generations: int = 8
    """G, completions of each prompt: one group (TRL 1.16; DeepSeekMath 4.2: 64)"""
    max_completion_length: int = 64
    """T, longest completion in tokens (ours, for the tiny model; DeepSeekMath 4.2: 1024)"""
    temperature: float = 1.0
    """sampling temperature; log-probabilities are taken at this temperature too (TRL 1.16)"""
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "dr_grpo"
    """how token losses are averaged, see policy_loss (DeepSeekMath eq. 3; TRL 1.16: dapo)"""
    epsilon: float = 0.2
    """clip range of the probability ratio, below (TRL 1.16, verl 0.9)"""
    epsilon_high: float | None = None
    """clip range above; None is epsilon (TRL 1.16; DAPO 3.1: 0.28)"""
    beta: float = 0.0
    """weight of the KL penalty to the initial model, loaded only if above 0 (TRL 1.16; DeepSeekMath 4.2: 0.04)"""
    num_iterations: int = 2
    """mu, optimizer steps on each batch of completions (DeepSeekMath 4.2)"""
    skip_equal_groups: bool = True
    """leave groups without advantage out of the update when nothing else acts on them: exact, only faster (ours)"""
    learning_rate: float = 4e-4
    """peak learning rate of AdamW (ours, for the tiny model; DeepSeekMath 4.2: 1e-6)"""
    max_grad_norm: float = 1.0
    """gradients are scaled down to this norm (TRL 1.16)"""
    max_steps: int = 16
    """steps: batches of completions (ours)"""
    seed: int = 1
    """seed of problems, sampling and everything else (ours)"""
    per_device_train_batch_size: int = 128
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
    eval_steps: int = 8
    """steps between evaluations, which also come first and last; 0 is never (ours)"""
    eval_opponents: tuple[Literal["random", "minimax", "start"], ...] = ("random", "minimax", "start")
    """whom the policy meets: minimax plays tictactoe only, start is the first policy (ours)"""
    eval_games: int = 32
    """games of an evaluation against each opponent, from each seat (ours)"""
    eval_thoughts: int = 16
    """kuhn: thoughts sampled at each information set to read out the policy; 0 is none, it acts at once (ours)"""
    save_steps: int = 25
    """steps between checkpoints: at most this many are repeated after a crash (ours)"""
    output_dir: str | None = None
    """run folder; None is runs/<script>__<env>__<seed>__<time> (ours)"""
    resume: str | None = None
    """run folder to continue, with the flags it was started with (ours)"""


# === 3 The method =====================================================================================================


class RoleBaseline:
    """Moving average of the return of each role in each game: the baseline of SPIRAL eq. 2. Takes and gives scalars."""

    def __init__(self, decay: float = 0.95, update_first: bool = False):
        self.decay, self.update_first, self.values = decay, update_first, {}

    def advantage(self, game: str, role: int, reward: float) -> float:
        """The return less the average, which begins at 0 and moves afterwards (the code), or before (the paper)."""
        before = self.values.get((game, role), 0.0)
        after = self.values[game, role] = self.decay * before + (1 - self.decay) * reward
        return reward - (after if self.update_first else before)

    def state_dict(self) -> dict:
        """The averages by (game, role)."""
        return {"values": dict(self.values)}

    def load_state_dict(self, state: dict) -> None:
        """Continue with the averages of state_dict."""
        self.values = dict(state["values"])


def mars_advantages(returns: Tensor, roles: Tensor) -> Tensor:
    """MARSHAL: what follows each turn, less the mean over all turns of its role in the batch. (B,), (B,) -> (B,)"""
    roles = roles.unique(return_inverse=True)[1]  # (B,)
    sums, counts = (torch.zeros_like(returns).index_add(0, roles, x) for x in (returns, torch.ones_like(returns)))
    return returns - (sums / counts)[roles]


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


def match_options(name: str, args: Args) -> dict:
    """How a game is played."""
    options = {"zero_sum_forfeits": args.zero_sum_forfeits}
    return options | ({"variant": args.kuhn_variant, "handicap": args.handicap} if name == "kuhn" else {})


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


def play(players: dict, tokenizer, matches: list[Match], num_generations: int, args: Args) -> list[tuple]:
    """All games to their end. players: name -> a model, or (game, random) -> text. G games begin with equal prompts.

    Every model writes in all games that wait for it at once. Returns its turns: match, role, prompt, ids, logprobs,
    entropy, ended.
    """
    turns = []
    while any(match.seat for match in matches):
        for name, player in players.items():
            due = [i for i, match in enumerate(matches) if match.seat == name]
            names = [f"{matches[i].seed} {matches[i].game.turns}" for i in due]
            if not isinstance(player, torch.nn.Module):
                texts = [player(matches[i].game, random.Random(seed)) for i, seed in zip(due, names)]
            elif due:
                copies = 1 if any(matches[i].game.turns for i in due) else num_generations
                prompts = [encode(tokenizer, matches[i].game.prompt(matches[i].game.player)) for i in due[::copies]]
                seeds = [torch.Generator().manual_seed(random.Random(x).getrandbits(63)) for x in names[::copies]]
                samples = generate(player, prompts, copies, args, seeds)
                pairs = zip(samples.completion_ids.tolist(), samples.logprobs.tolist(), samples.mask.sum(1).tolist())
                ids, logprobs = zip(*((ids[:size], logprobs[:size]) for ids, logprobs, size in pairs))
                columns = [matches[i].game.player for i in due], [p for p in prompts for _ in range(copies)], ids
                turns += zip(due, *columns, logprobs, samples.entropy.sum(1).tolist(), samples.ended.tolist())
                texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
            for i, text in zip(due, texts if due else ()):
                matches[i].move(text)
    return turns


def rollout(players: dict, tokenizer, args: Args, progress: Progress) -> tuple[Batch, Tensor]:
    """The games of a step: G from each of P starts, of which every process has its share. Rows are the policy's turns.

    Also for every game its number in `games`, both results, which roles learn, turns, draw, forfeit: (E,8).
    """
    rank, world_size = rank_and_world_size()
    first = progress["problems"] + rank * (share := args.num_prompts_per_step // world_size)
    progress["problems"] += args.num_prompts_per_step
    matches, group, device = [], args.num_generations, players["policy"].device
    other = {"self": "policy", "fixed": "start"}.get(args.opponent, args.opponent)
    for number in range(first, first + share):
        name, side, seed = args.games[number % len(args.games)], number // len(args.games) % 2, f"{args.seed} {number}"
        seats = (other, "policy") if side else ("policy", other)  # games and seats in turn
        matches += [new_match(name, seats, f"{seed} {i}", seed, **match_options(name, args)) for i in range(group)]
    turns = play(players, tokenizer, matches, group, args)  # if every opponent forfeits at once, a turn of
    turns = [t for t in turns if matches[t[0]].seats[t[1]] == "policy"] or turns[:1]  # theirs, which gets no advantage
    match, role, prompts, ids, logprobs, entropy, ended = zip(*turns)
    results = torch.tensor([[args.games.index(m.name), *m.row("policy")] for m in matches], device=device)  # (E,8)
    info = {"match": match, "role": role, "ended": ended, "entropy": entropy}
    info = {name: torch.tensor(values, device=device) for name, values in info.items()}  # (B,) each
    info["left"] = ((seat := 2 * info["match"] + info["role"])[:, None] == seat).triu(1).sum(1)  # own turns to come
    rewards = results[info["match"], 1 + info["role"]][:, None]  # (B,1)
    info |= {"game": results[info["match"], 0], "match": info["match"] + rank * len(matches)}  # among all processes'
    ids, logprobs = (pad_sequence([torch.tensor(row) for row in rows], True).to(device) for rows in (ids, logprobs))
    mask = pad_sequence([torch.ones(len(turn[3]), dtype=torch.bool) for turn in turns], True).to(device)  # (B,T)
    return Batch(list(prompts), ids, mask, logprobs, rewards, info), results


def compute_advantages(batch: Batch, results: Tensor, args: Args, baseline: RoleBaseline) -> Tensor:
    """Advantages of this process's turns: their role's, discounted. The averages see all games, in order. -> (B,)"""
    if args.baseline == "mars":  # rewards come at the end only, so what follows a turn is the result
        (returns, own), roles = gather(batch.rewards[:, 0]), gather(2 * batch.info["game"] + batch.info["role"])[0]
        return mars_advantages(returns, roles)[own]
    table = gather(results)[0]
    advantages = torch.zeros(len(table), 2, device=table.device)  # (E,2)
    for i, (game, *values) in enumerate(table.tolist()):
        for role in (role for role in (0, 1) if values[2 + role]):  # the roles that learn, whether they moved or not
            keys = args.games[int(game)], role if args.baseline == "role" else -1
            advantages[i, role] = values[role] if args.baseline == "none" else baseline.advantage(*keys, values[role])
    return advantages[batch.info["match"], batch.info["role"]] * args.gamma ** batch.info["left"]  # (B,)


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
    options |= {"beta": args.beta, "max_completion_length": args.max_completion_length, "num_tokens": num_tokens}
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


def evaluate(players: dict, tokenizer, args: Args) -> tuple[dict[str, float], str]:
    """Shares of wins, draws and losses against each opponent, from each seat; one game of each kind as text."""
    rank, world_size = rank_and_world_size()
    pairs = [(game, who, role) for game in args.games for who in args.eval_opponents for role in ("first", "second")]
    pairs = [pair for pair in pairs if pair[0] == "tictactoe" or pair[1] != "minimax"]
    matches, count = [], args.eval_games
    for game, other, role in pairs:
        seats, options = ("policy", other) if role == "first" else (other, "policy"), match_options(game, args)
        matches += [new_match(game, seats, f"evaluation {i}", f"evaluation {i}", **options) for i in range(count)]
    mine = range(rank, len(matches), world_size)
    play(players, tokenizer, matches[rank::world_size] or matches[:1], 1, args)  # with FSDP every process must play
    table = torch.zeros(len(pairs), 3)  # wins, draws, losses
    for i in mine:
        gain = matches[i].gain(int(pairs[i // count][2] == "second"))
        table[i // count] += torch.tensor([gain > 0, gain == 0, gain < 0])
    names = [f"eval/{game}/{who}/{role}/{x}" for game, who, role in pairs for x in ("win", "draw", "loss")]
    shown = [matches[i * count] for i, pair in enumerate(pairs) if pair[1:] == pairs[0][1:] and i * count in mine]
    shown = "\n".join("\n".join([f"{match.name}:", *match.texts]) for match in shown)
    return dict(zip(names, (gather(table[None])[0].sum(0) / count).flatten().tolist())), shown


def kuhn_readout(model, tokenizer, args: Args) -> Tensor:
    """Probability of passing and of betting at the 12 information sets; what is missing to 1 is illegal. -> (12,2)

    Thoughts are sampled, then both actions are scored in the box behind each: exact but for the choice of thoughts.
    """
    games, count = [game for _, game in kuhn_decision_points(handicap=args.handicap)], max(args.eval_thoughts, 1)
    prompts, thoughts = [encode(tokenizer, game.prompt(game.player)) for game in games], ["\\boxed{"] * len(games)
    if args.eval_thoughts:
        samples = generate(model, prompts, count, args, [torch.Generator().manual_seed(i) for i in range(len(games))])
        thoughts = tokenizer.batch_decode(samples.completion_ids * samples.mask, skip_special_tokens=True)
    heads = [thought[: max(thought.rfind("\\boxed{"), 0)] for thought in thoughts]  # up to the action
    tails = [f"\\boxed{{{action}}}{tokenizer.eos_token}" for game in games for action in game.legal_actions()]
    heads, tails = (tokenizer(texts, add_special_tokens=False)["input_ids"] for texts in (heads, tails))
    pairs = [(head, tails[2 * (i // count) + bet]) for i, head in enumerate(heads) for bet in (0, 1)]
    start = len(os.path.commonprefix(tails))  # the box's own tokens are given: they were sampled with the thought
    rows = ((torch.tensor(head + tail), torch.arange(len(head + tail)) >= len(head) + start) for head, tail in pairs)
    ids, mask = (pad_sequence(column, True).to(model.device) for column in zip(*rows))  # (B,T) each
    batch = Batch([prompts[i // (2 * count)] for i in range(len(pairs))], ids, mask, ids, ids)
    logprobs = torch.zeros(len(pairs), device=model.device)  # (B,)
    with torch.no_grad():
        for packed in pack(batch, list(range(len(pairs))), args):
            logprobs[packed.rows] = (token_logprobs(model, packed, args) * mask[packed.rows]).sum(1)
    wrote = torch.tensor(["\\boxed{" in thought for thought in thoughts], device=model.device)  # (12 count,)
    return (logprobs.exp().view(-1, 2) * wrote[:, None]).view(len(games), count, 2).mean(1)


def kuhn_scores(model, tokenizer, args: Args, progress: Progress) -> dict[str, float]:
    """How far the policy is from an equilibrium, and the mean of all policies so far, which `progress` keeps."""
    policy = kuhn_readout(model, tokenizer, args).cpu()  # (12,2)
    bets = (policy[:, 1] / policy.sum(1)).nan_to_num(0.5)  # (12,)
    progress.update(readouts=progress["readouts"] + 1, bets=(torch.tensor(progress["bets"]) + bets).tolist())
    policies = {"last": bets.tolist(), "average": [bet / progress["readouts"] for bet in progress["bets"]]}
    found = {f"eval/kuhn/nash_conv_{name}": kuhn_nash_conv(bets) for name, bets in policies.items()}
    return found | {"eval/kuhn/illegal": 1 - policy.sum(1).mean().item(), "eval/kuhn/thoughts": 12 * args.eval_thoughts}


# === 8 Training loop ==================================================================================================


def check_args(args: Args) -> None:
    """One sentence for every combination of flags that cannot work."""
    ranks, group, micro = int(os.environ.get("WORLD_SIZE", 1)), args.num_generations, args.per_device_train_batch_size
    least = {"handicap": -(2**31), "temperature": 1e-6, "max_steps": 0, "eval_steps": 0, "seed": 0, "eval_thoughts": 0}
    for f in fields(Args):
        x, low, high = getattr(args, f.name), least.get(f.name, int(f.type is int)), 1 if "decay" in f.name else 2**31
        kinds = [getattr(k, "__name__", k) for k in get_args(f.type) * (get_origin(f.type) is not tuple) or (f.type,)]
        unfit = x not in kinds and not {*kinds, "int", "list"} & {kind.__name__ for kind in type(x).__mro__}
        if x in ("", ()) or unfit or (isinstance(x, (int, float)) and not low <= x < high):
            wanted = "a name" if x in ("", ()) else " or ".join(kinds) if unfit else f"{low} or more, below {high}"
            fail(f"--{f.name.replace('_', '-')} {x!r}: expected {wanted}")
    if args.num_prompts_per_step % ranks:
        fail(f"--num-prompts-per-step {args.num_prompts_per_step}: not divisible by the {ranks} processes")
    if micro % group and group % micro:
        fail(f"--per-device-train-batch-size {micro}: expected a multiple or a divisor of --num-generations {group}")
    if args.fsdp and (ranks == 1 or args.opponent in ("past", "fixed")):
        fail("--fsdp: start with torchrun --nproc_per_node 2 or more, and not with --opponent past or fixed")


def batch_metrics(batch: Batch, results: Tensor, advantages: Tensor, args: Args, progress: Progress) -> dict:
    """What the games of a step say, over all processes. Counts their tokens in progress."""
    values = {name: gather(value)[0].float() for name, value in batch.info.items()}  # (B,) each
    lengths, table = gather(batch.mask.sum(1))[0].float(), gather(results)[0]  # (B,), (E,8)
    progress["tokens"] += int(lengths.sum())
    metrics = {"reward": gather(batch.rewards)[0].mean(), "completions/mean_length": lengths.mean()}
    metrics |= {"completions/max_length": lengths.amax(), "completions/clipped_ratio": 1 - values["ended"].mean()}
    metrics |= {"entropy": values["entropy"].sum() / lengths.sum()}
    metrics |= {"spiral_rae/advantage_std": gather(advantages)[0].std(correction=0)}
    for number, game in enumerate(args.games):
        means = table[table[:, 0] == number].mean(0).tolist()  # NaN if no process has played it
        names = [(1, "return_0"), (2, "return_1"), (5, "turns"), (6, "draws"), (7, "forfeits")]
        metrics |= {f"spiral_rae/{game}/{name}": means[column] for column, name in names}
    return {name: float(value) for name, value in metrics.items()} | {"num_tokens": progress["tokens"]}


def train(args: Args) -> dict[str, float]:
    """Train as the flags say. Returns the last evaluation. Steps as in spiral_rae.md."""
    transformers.logging.disable_progress_bar()
    getattr(sys.stdout, "reconfigure", dict)(errors="replace")  # a terminal may not know all that a model writes
    args = resume_args(args) if args.resume else args
    check_args(args)
    device, rank = setup(args), rank_and_world_size()[0]
    model = load_model(args, tokenizer := load_tokenizer(args), device)
    wanted = {*args.eval_opponents, args.opponent, "start" if args.beta > 0 or args.opponent == "fixed" else ""}
    frozen = {name: load_model(args, tokenizer, device).requires_grad_(False) for name in wanted & {"past", "start"}}
    players, reference = {"policy": model, **OPPONENTS, **frozen}, frozen.get("start")
    if args.fsdp:
        shard(model, args)
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, weight_decay=0.0, fused=True)
    progress = Progress(step=0, problems=0, tokens=0, readouts=0, bets=[0.0] * 12)
    baseline = RoleBaseline(args.baseline_decay, args.update_first)
    state = {"policy": Trained(model, optimizer), "progress": progress, "baseline": baseline}
    state |= {name: frozen[name] for name in wanted & {"past"}}
    run_dir = args.output_dir or f"runs/{Path(__file__).stem}__{args.env}__{args.seed}__{time.time():.0f}"
    if rank == 0 and not args.resume and any(os.path.exists(f"{run_dir}/{x}") for x in ("args.json", "metrics.csv")):
        fail(f"--output-dir {run_dir}: holds a run already; continue it with --resume {run_dir} or name another folder")
    loaded = progress["step"] if args.resume and load_checkpoint(run_dir, state) else -1
    if rank == 0:
        logger = Logger(run_dir, args, loaded)
        print(f"{run_dir}: {args.num_prompts_per_step} x {args.num_generations} games a step, {device}")
    signals = []  # the step is finished and saved before the run leaves; a second signal leaves at once
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os._exit(128 + number) if signals else signals.append(number))
    start, first, scores = time.perf_counter(), progress["step"], {}
    while True:
        step, last = progress["step"], progress["step"] >= args.max_steps
        stop = int(gather(torch.tensor([max(signals, default=0)]))[0].max())  # a signal to any process
        if step != loaded and args.eval_steps and (last or step % args.eval_steps == 0):
            scores, shown = evaluate(players, tokenizer, args)
            if "kuhn" in args.games and args.kuhn_variant == "standard":
                scores |= kuhn_scores(model, tokenizer, args, progress)
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
        if args.opponent == "past" and step % args.opponent_lag == 0:
            frozen["past"].load_state_dict(model.state_dict())
        batch, results = rollout(players, tokenizer, args, progress)  # 1. play games, both seats
        advantages = compute_advantages(batch, results, args, baseline)  # 2. subtract the role's average, move it
        metrics, sampled = batch_metrics(batch, results, advantages, args, progress), time.perf_counter()
        metrics |= {f"spiral_rae/{game}/baseline_{role}": x for (game, role), x in sorted(baseline.values.items())}
        metrics |= update(model, optimizer, batch, advantages, args, reference)  # 3. clipped policy-gradient steps
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
            line = f"step {step + 1:>4}/{args.max_steps}  length {metrics['completions/mean_length']:3.0f}"
            print(f"{line}  {speed / 1000:4.1f}k tok/s  {left // 60:.0f}:{left % 60:02.0f} left", flush=True)
    if stop and not last:
        fail(f"stopped after step {step}; continue with --resume {run_dir}", 128 + stop)
    weights = state["policy"].state_dict()["model_state_dict"]  # all processes must call
    weights = {name: weight for name, weight in weights.items() if name not in model.all_tied_weights_keys}
    if rank == 0:
        model.save_pretrained(os.path.join(run_dir, "final"), state_dict=weights)
        tokenizer.save_pretrained(os.path.join(run_dir, "final"))
    if dist.is_initialized():
        dist.destroy_process_group()
    return scores


if __name__ == "__main__":
    train(tyro.cli(Args))
