# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "transformers>=5.0", "tyro>=1.0", "tensorboard>=2.18"]
# ///
"""GRPO: policy gradients for language models. The baseline of an answer is the mean reward of all
answers to the same prompt. Shao et al., DeepSeekMath, arXiv 2402.03300.

Dr. GRPO (arXiv 2503.20783) is `--loss-type dr_grpo --scale-rewards none`. DAPO is dapo.py.

Differs from the paper:
1. There is no KL penalty by default, as in TRL 1.16, DAPO and Dr. GRPO; the paper has --beta 0.04.
2. The paper names no clip range; 0.2 is common. It names no ddof either; here std has ddof 1 and
   1e-4 is added to it, as in TRL 1.16.
3. A prompt is computed once for its group, in the rollout and in the update, and rows without
   advantage are left out of the update. Both are exact.

    python algorithms/grpo.py                                # tiny model, CPU, offline, 3 minutes
    python algorithms/grpo.py --model-name-or-path Qwen/Qwen2.5-0.5B-Instruct --bf16 \
        --env gsm8k --dataset gsm8k_train.jsonl --eval-dataset gsm8k_test.jsonl \
        --learning-rate 1e-6 --max-completion-length 512
    torchrun --nproc_per_node 8 algorithms/grpo.py --fsdp ...

For your own reward: `--reward FILE.py:function`, a function of (problem, completion text).

Letters in shapes: P prompts, G completions of each, B = P G, S prompt tokens, T completion tokens,
V vocabulary, K reward functions; R packed rows of L tokens, in which N tokens are predicted.
"""

import copy
import json
import math
import os
import random
import runpy
import shutil
import sys
import time
import warnings
import zlib
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path
from types import MethodType
from typing import Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import transformers
import tyro
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.utils.checkpoint import checkpoint as recompute_in_backward
from torch.utils.tensorboard import SummaryWriter
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

ROOT = Path(__file__).resolve().parents[1]  # the repository root
sys.path.insert(0, str(ROOT))  # for envs/, imported where they are chosen

MASKED_LAYERS = {"full_attention", "sliding_attention"}  # all that they need is a mask
PACKED_LENGTH = 4096  # longest packed row in tokens: its attention mask is L x L
LOGITS_AT_ONCE = 2**26  # of the update: 256 MB in float32
GROUPS_SHOWN = 2  # groups a step that are written to completions.jsonl

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # of one process


@dataclass
class Args:
    # model, problems, rewards
    model_name_or_path: str | None = None
    """policy: a Hugging Face causal language model; None is the env's tiny model"""
    env: Literal["countdown", "gsm8k", "tool_calls", "reasoning_gym"] = "countdown"
    """task; with --dataset, countdown stands for questions and answers of any kind"""
    task: str = "chain_sum"
    """reasoning_gym: the task's name"""
    task_config: str = "{}"
    """reasoning_gym: the task's settings as JSON"""
    dataset: str | None = None
    """JSON-lines file of problems"""
    eval_dataset: str | None = None
    """JSON-lines file to evaluate on, whole; without it, 1 in 16 of --dataset is held out"""
    system_prompt: str | None = None
    """system message before every prompt"""
    chat_template_kwargs: str = "{}"
    """settings of the chat template as JSON, such as '{"enable_thinking": false}'"""
    reward: tuple[str, ...] = ()
    """FILE.py:function of (problem, completion), one or several, in place of the env's rewards;
    with --dataset, a problem is the dict of its JSON line"""
    reward_weights: tuple[float, ...] = ()
    """weights of the reward functions; () is the env's own, or 1 for each --reward"""
    # rollout
    num_prompts_per_step: int = 32
    """P, prompts in one step over all processes"""
    num_generations: int = 8
    """G, completions of each prompt"""
    max_prompt_length: int = 1024
    """longest prompt of a dataset in tokens; longer ones are left out"""
    max_completion_length: int = 64
    """T, longest completion in tokens"""
    temperature: float = 1.0
    """sampling temperature; log-probabilities are taken at it too"""
    # method
    advantage: Literal["group", "none", "shuffled"] = "group"
    """the method; controls: none is the bare reward, shuffled deals the rewards out anew"""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """divide advantages by the std of the group, of the batch, or not (Dr. GRPO)"""
    loss_type: Literal["grpo", "dr_grpo", "dapo"] = "grpo"
    """how the losses of tokens are averaged, see token_weights"""
    epsilon: float = 0.2
    """clip range of the probability ratio"""
    beta: float = 0.0
    """weight of the KL penalty to the initial model, kept in memory if above 0 (paper: 0.04)"""
    num_iterations: int = 1
    """mu, optimizer steps on each batch of completions"""
    # optimizer
    learning_rate: float = 2e-4
    """learning rate of AdamW (tiny model; real models: 1e-6)"""
    warmup_steps: int = 5
    """steps over which the learning rate rises"""
    max_grad_norm: float = 1.0
    """gradients are scaled down to this norm"""
    max_steps: int = 150
    """steps: batches of completions; 0 evaluates only"""
    seed: int = 1
    """seed of problems and sampling"""
    # memory and speed, not the result
    decode_batch_size: int = 256
    """completions decoded at once, but at least one group"""
    micro_batch_size: int = 32
    """completions in one forward pass of the update"""
    bf16: bool = False
    """compute in bfloat16; weights and optimizer stay float32"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass"""
    fsdp: bool = False
    """shard weights, gradients and optimizer state over the processes of torchrun"""
    # bookkeeping
    eval_steps: int = 25
    """steps between evaluations; 0 is never"""
    eval_problems: int = 128
    """problems of the evaluation set, unless --eval-dataset is given"""
    num_generations_eval: int = 8
    """k, samples of each evaluation problem beside the greedy one"""
    save_steps: int = 25
    """steps between checkpoints; 0 is never"""
    output_dir: str | None = None
    """run folder; None is runs/<script>__<env>__<seed>__<time>"""
    resume: str | None = None
    """run folder to continue with its own flags; flags given now win"""


# --- The method ---------------------------------------------------------------------------------


def group_advantages(
    rewards: Tensor,
    num_generations: int,
    scale_rewards: str = "group",
    std_epsilon: float = 1e-4,
    ddof: int = 1,
) -> Tensor:
    """Compare each reward with its group, DeepSeekMath sec. 4.1.2. (B,) -> (B,)

    Groups of equal rewards get exactly 0. The defaults are TRL 1.16's (verl 0.9: 1e-6 and 1).
    """
    groups = rewards.float().view(-1, num_generations)  # (P,G)
    advantages = groups - groups.mean(1, keepdim=True)
    if scale_rewards == "group":
        advantages = advantages / (groups.std(1, keepdim=True, correction=ddof) + std_epsilon)
    if scale_rewards == "batch":
        advantages = advantages / (groups.std(correction=ddof) + std_epsilon)
    # Rounding leaves noise in a group of equal rewards, and a tiny std would blow it up.
    equal = (groups == groups[:, :1]).all(1, keepdim=True)  # (P,1)
    return advantages.masked_fill(equal, 0.0).flatten()


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
) -> tuple[Tensor, Tensor]:
    """Loss of each token, DeepSeekMath eq. 3, and whether clipping made it constant.

    All tensors have one shape, say (N,), or broadcast to it. The clip range of the probability
    ratio is 1 - epsilon to 1 + epsilon_high; None is epsilon.
    """
    if epsilon_high is None:
        epsilon_high = epsilon
    ratio = (logprobs - old_logprobs).exp()
    unclipped_gain = ratio * advantages
    clipped_gain = ratio.clamp(1 - epsilon, 1 + epsilon_high) * advantages
    losses = -torch.min(unclipped_gain, clipped_gain)
    if beta > 0:
        losses = losses + beta * kl_estimate(logprobs, ref_logprobs)
    return losses, clipped_gain < unclipped_gain


def token_weights(
    lengths: Tensor,
    loss_type: str,
    *,
    num_rows: int,
    num_tokens: int,
    max_completion_length: int,
) -> Tensor:
    """What a token of each row weighs in the loss of a step, which is a sum over all its tokens.

    num_rows and num_tokens count those of all processes and micro-batches. (B,) -> (B,)
    """
    ones = torch.ones_like(lengths, dtype=torch.float32)
    if loss_type == "grpo":  # mean over a row's tokens, then over rows (DeepSeekMath eq. 3)
        return ones / (lengths.clamp(min=1) * num_rows)
    if loss_type == "dr_grpo":  # a constant, so that length does not matter (Dr. GRPO)
        return ones / (num_rows * max_completion_length)
    return ones / num_tokens  # mean over all tokens (DAPO eq. 8)


# --- Processes, problems, model -----------------------------------------------------------------


def setup(args: Args) -> tuple[int, int, torch.device]:
    """Rank, number of processes, device."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets these
    rank = int(os.environ.get("RANK", 0))
    if args.num_prompts_per_step % world_size:
        sys.exit(f"--num-prompts-per-step: not divisible by the {world_size} processes")
    if args.fsdp and world_size == 1:
        sys.exit("--fsdp: nothing to shard over; start with torchrun --nproc_per_node 2 or more")
    if args.num_generations < 2 and args.advantage != "none":
        sys.exit("--num-generations: a group needs at least 2 completions to compare")
    for name in ("task_config", "chat_template_kwargs"):
        try:
            json.loads(getattr(args, name))
        except ValueError as error:
            sys.exit(f"--{name.replace('_', '-')}: expected JSON, found {error}")
    transformers.utils.logging.disable_progress_bar()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return rank, world_size, device


def gather(items: list) -> list:
    """The items of all processes, in rank order."""
    if not dist.is_initialized():
        return items
    pieces = [None] * dist.get_world_size()
    dist.all_gather_object(pieces, items)
    return [item for piece in pieces for item in piece]


class JsonLines:
    """Problems of a JSON-lines file, to be scored by --reward.

    A line is an object with the user's text, or a list of chat messages, under `prompt`,
    `question` or `problem`. One line in 16 is held out for evaluation, by a hash of its prompt.
    """

    def __init__(self, path: str):
        self.rows = []
        self.train_rows = []
        self.evaluation_rows = []
        try:
            lines = list(open(path, encoding="utf-8-sig"))
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                held_out = zlib.crc32(repr(self.prompt(row)).encode()) % 16 == 0
            except (ValueError, IndexError, TypeError):
                wanted = "a JSON object with a prompt, question or problem"
                raise ValueError(f"{path}, line {number}: expected {wanted}") from None
            self.rows.append(row)
            (self.evaluation_rows if held_out else self.train_rows).append(row)

    def prompt(self, row: dict) -> list[dict]:
        """Chat messages."""
        texts = [row[key] for key in ("prompt", "question", "problem") if key in row]
        return texts[0] if isinstance(texts[0], list) else [{"role": "user", "content": texts[0]}]

    def train_problem(self, index: int, seed: int) -> dict:
        """Row number `index` of endless epochs, each in an order of its own."""
        epoch, position = divmod(index, len(self.train_rows))
        return self.train_rows[epoch_order(len(self.train_rows), epoch, seed)[position]]

    def evaluation_problems(self, count: int) -> list[dict]:
        """The first of the rows that are held out."""
        return self.evaluation_rows[:count]


@lru_cache(maxsize=2)
def epoch_order(size: int, epoch: int, seed: int) -> list[int]:
    """The numbers below size, shuffled."""
    return random.Random(f"{seed} {epoch}").sample(range(size), size)


def load_problems(args: Args, dataset: str | None):
    """An env: train_problem, evaluation_problems, prompt, reward_functions, reward_weights."""
    try:
        if dataset and args.reward:
            return JsonLines(dataset)
        if args.env == "reasoning_gym":
            from envs.reasoning_gym import ReasoningGym

            return ReasoningGym(args.task, json.loads(args.task_config))
        if args.env == "tool_calls":
            from envs.tool_calls import ToolCalls

            return ToolCalls(dataset)
        if args.env == "countdown" and dataset is None:
            from envs.countdown import Countdown

            return Countdown()
        from envs.math_jsonl import MathJsonl

        return MathJsonl(dataset, args.env)
    except ValueError as error:  # a file that is missing, or a line that is broken
        sys.exit(str(error))


def load_reward(name: str):
    """The function that FILE.py:function names."""
    path, _, function = name.rpartition(":")
    sys.path.append(os.path.dirname(path))  # what the file imports may stand beside it
    try:
        return runpy.run_path(path)[function]
    except (OSError, KeyError) as error:
        sys.exit(f"--reward {name}: expected FILE.py:function, found no {error}")


def load_task(args: Args):
    """The env with the rewards of the flags, and the problems that it is evaluated on."""
    if args.eval_dataset and not args.dataset and args.max_steps > 0:
        sys.exit("--eval-dataset: needs --dataset, problems of the same kind to train on")
    if args.eval_dataset and args.env == "reasoning_gym":
        sys.exit("--eval-dataset: reasoning_gym makes its own problems")
    task = load_problems(args, args.dataset or args.eval_dataset)
    problems = task.evaluation_problems(args.eval_problems)
    if args.eval_dataset:
        problems = load_problems(args, args.eval_dataset).rows
        task.train_rows = task.rows  # nothing needs to be held out
    if args.reward:
        task.reward_functions = {name.rpartition(":")[2]: load_reward(name) for name in args.reward}
        task.reward_weights = (1.0,) * len(task.reward_functions)
    task.reward_weights = args.reward_weights or task.reward_weights
    if len(task.reward_weights) != len(task.reward_functions):
        sys.exit(f"--reward-weights: expected one for each of {list(task.reward_functions)}")
    if not problems:
        sys.exit("--dataset: too few problems to hold some out; give --eval-dataset as well")
    return task, problems


def model_path(args: Args) -> str:
    """Name or folder of the model that training starts from."""
    return args.model_name_or_path or str(ROOT / "envs" / "tiny_lm" / args.env)


def load_model(args: Args):
    """The policy in float32 and its tokenizer."""
    path = model_path(args)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        sys.exit(f"--model-name-or-path {path}: cannot be loaded ({error})")
    if tokenizer.chat_template is None:
        sys.exit(f"--model-name-or-path {path}: has no chat template; use an instruct model")
    refuse_unsupported(model)
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    ends = {tokenizer.eos_token_id, *ends} - {None}
    if not ends:
        sys.exit(f"--model-name-or-path {path}: neither model nor tokenizer names an end token")
    model.generation_config.eos_token_id = sorted(ends)
    longest = longest_text(model)
    if args.max_prompt_length + args.max_completion_length > longest:
        sys.exit(
            f"--max-prompt-length and --max-completion-length: {path} ends at {longest} tokens"
        )
    add_methods(model)
    return model, tokenizer


def encode(tokenizer, task, problem, args: Args) -> list[int]:
    """Token ids of a prompt, up to where the assistant begins."""
    messages = task.prompt(problem)
    if args.system_prompt:
        messages = [{"role": "system", "content": args.system_prompt}] + messages
    encoded = tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=True,
        return_dict=True,
        **json.loads(args.chat_template_kwargs),
    )
    return encoded["input_ids"]


def without_long_prompts(problems: list, tokenizer, task, args: Args) -> list:
    """The problems whose prompts fit; how many do not is said."""
    fitting = []
    for problem in problems:
        if len(encode(tokenizer, task, problem, args)) <= args.max_prompt_length:
            fitting.append(problem)
    left_out = len(problems) - len(fitting)
    if left_out and os.environ.get("RANK", "0") == "0":
        print(f"{left_out} of {len(problems)} prompts are left out: over --max-prompt-length")
    return fitting


# --- What models differ in ----------------------------------------------------------------------


def refuse_unsupported(model) -> None:
    """Stop if the configuration names what masks cannot say; check_model finds the rest."""
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or [])
    reasons = [f"has layers of type {kind}" for kind in sorted(layers - MASKED_LAYERS)]
    for limit in ("window_size", "keep_window_size", "attention_chunk_size"):
        if getattr(config, limit, None):
            reasons.append(f"limits attention by {limit}")
    if model._is_stateful:
        reasons.append("is recurrent")
    if reasons:
        sys.exit(f"{type(model).__name__}: not supported, because it {' and '.join(reasons)}")


def longest_text(model) -> float:
    """Tokens of prompt and completion that a model can hold.

    Beyond it, learned positions end, and some rotary ones change for all texts of a batch.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return rope["original_max_position_embeddings"]
    return getattr(config, "max_position_embeddings", None) or math.inf


def attention_masks(model, visible: Tensor, query_positions: Tensor, key_positions: Tensor):
    """What the model takes as its mask, given which keys each query may see, (B,Q,K) bool.

    Masks (B,1,Q,K) of 0 and -inf are right for every kind of attention; eager attention would add
    a bool. A mask replaces the model's own, so windows are ours to draw, by position, not column.
    Models with two kinds of layers take a dict. Every query must see something, or it is NaN.
    """
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None)
    layers = layers or ["sliding_attention" if window else "full_attention"]
    dtype = model.dtype
    if torch.is_autocast_enabled(visible.device.type):
        dtype = torch.bfloat16  # else every layer makes and keeps a copy
    masks = {}
    for kind in set(layers):
        seen = visible
        if kind == "sliding_attention":
            distance = query_positions[:, :, None] - key_positions[:, None, :]  # (B,Q,K)
            seen = visible & (distance < window)
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        masks[kind] = mask.masked_fill_(~seen, -math.inf)[:, None]
    return masks if len(masks) > 1 else masks[kind]


class Hidden(BaseModelOutputWithPast):
    """Hidden states as a model's layers return them, without anything beside them."""

    def __getattr__(self, name):
        return None  # router_logits, cross_attentions and the like


class GivenHidden(torch.nn.Module):
    """Takes the place of a model's layers: what it is given counts as what they computed."""

    def forward(self, *_, inputs_embeds: Tensor, **__) -> Hidden:
        return Hidden(last_hidden_state=inputs_embeds)


def add_methods(model) -> None:
    """Methods, not functions: copy.deepcopy binds them to the copy, and FSDP can wrap them."""
    head = copy.copy(model)  # the model without its layers
    head._modules = {**model._modules, model.base_model_prefix: GivenHidden()}
    model.head = head.forward  # the model's own: Granite scales its logits, Gemma caps them
    model.token_logprobs = MethodType(token_logprobs, model)


def recompute_layers(model) -> None:
    """Gradient checkpointing. The switch of transformers needs training mode, thus dropout."""
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.forward = partial(recompute_in_backward, layer.forward, use_reentrant=False)


@torch.no_grad()
def logprob_gaps(model, prompts: list[list[int]], args: Args) -> dict[str, float]:
    """Nats by which sampler and learner are off the plain forward pass, largest of all tokens."""
    completions = generate(model, prompts, 2, args, seeds=range(len(prompts)))
    packed = pack(completions, list(range(len(completions))), model.device)
    plain = []
    for completion in completions:
        ids = torch.tensor([completion.prompt + completion.ids], device=model.device)
        logits = model(ids).logits[0, len(completion.prompt) - 1 : -1]
        targets = ids[0, len(completion.prompt) :]
        plain.append(-F.cross_entropy(logits, targets, reduction="none"))
    plain = torch.cat(plain)  # (N,)
    learner = model.token_logprobs(packed, args)
    return {
        "decoding": (packed.sampled_logprobs - plain).abs().max().item(),
        "packing": (learner - plain).abs().max().item(),
    }


def check_model(model, prompt: list[int], args: Args) -> None:
    """Stop unless decoding and packing equal the plain forward pass: else noise is learned."""
    name = type(model).__name__
    args = replace(args, max_completion_length=8, temperature=1.0, bf16=False)
    prompts = [prompt, prompt[len(prompt) // 2 :]]  # two lengths, so that there is padding
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    try:
        if window:
            config.sliding_window = 4  # so that short texts are longer than it
        gaps = logprob_gaps(model, prompts, args)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        sys.exit(f"{name}: not supported ({type(error).__name__}: {str(error).splitlines()[0]})")
    finally:
        if window:
            config.sliding_window = window
    for way, gap in gaps.items():
        if not gap < 1e-3:  # NaN too
            sys.exit(f"{name}: not supported, {way} is {gap:.2g} nats off the plain forward pass")


# --- Rollout ------------------------------------------------------------------------------------


@dataclass
class Completion:
    """One answer; those to one prompt stand side by side."""

    prompt: list[int]
    ids: list[int]  # with the end token
    logprobs: list[float]  # as sampled
    entropy: float  # nats, sum over tokens
    ended: bool
    text: str = ""
    rewards: tuple[float, ...] = ()


def sample_tokens(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Invert the cumulative distribution, (B,V), at numbers in [0, 1), (B,). -> (B,)"""
    cumulative = logprobs.exp().cumsum(1)  # (B,V)
    target = uniform[:, None] * cumulative[:, -1:]  # rounding lets the last be 0.999999
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return tokens.clamp(max=logprobs.size(1) - 1)


@torch.no_grad()
def generate(model, prompts, num_generations, args: Args, seeds=None) -> list[Completion]:
    """G completions of each prompt, with one seed a prompt; greedy without seeds.

    A prompt is computed once and its keys and values are repeated. Finished rows leave the cache.
    Random numbers belong to (row, position), so nothing depends on which rows have left.
    """
    device = model.device
    size = len(prompts) * num_generations
    steps = args.max_completion_length
    ends = torch.tensor(model.generation_config.eos_token_id, device=device)
    if seeds:
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        uniform = [torch.rand(num_generations, steps, generator=g) for g in generators]
        uniform = torch.cat(uniform).to(device)  # (B,T)

    # What is written, in the order of the batch.
    written = torch.zeros(size, steps, dtype=torch.long, device=device)  # (B,T)
    logprobs = torch.zeros(size, steps, device=device)  # (B,T)
    entropy = torch.zeros(size, steps, device=device)  # (B,T)

    # The prompts, padded on the left. Padding sees itself, because seeing nothing makes NaN.
    width = max(len(prompt) for prompt in prompts)
    padded = [[-1] * (width - len(prompt)) + prompt for prompt in prompts]
    ids = torch.tensor(padded, device=device)  # (P,S)
    filled = ids >= 0
    positions = (filled.cumsum(1) - 1).clamp(min=0)  # (P,S)
    causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    itself = torch.eye(width, dtype=torch.bool, device=device)
    visible = filled[:, None, :] & causal | itself  # (P,S,S)
    cache = transformers.DynamicCache()  # without a window of its own: the mask has it
    out = model(
        ids.clamp(min=0),
        attention_mask=attention_masks(model, visible, positions, positions),
        position_ids=positions,
        past_key_values=cache,
        logits_to_keep=1,
    )
    cache.batch_repeat_interleave(num_generations)
    logits = out.logits[:, -1].repeat_interleave(num_generations, 0)  # (B,V)

    # The rows still in the cache: all at first, fewer later. Columns are those of the end.
    filled = F.pad(filled, (0, steps), value=True).repeat_interleave(num_generations, 0)  # (B,S+T)
    positions = filled.cumsum(1) - 1  # (B,S+T)
    rows = torch.arange(size, device=device)  # where they stand in the batch
    live = torch.ones(size, dtype=torch.bool, device=device)

    for t in range(steps):
        logp = (logits.float() / args.temperature).log_softmax(1)  # (B,V)
        tokens = sample_tokens(logp, uniform[rows, t]) if seeds else logp.argmax(1)  # (B,)
        written[rows, t] = tokens
        logprobs[rows, t] = logp.gather(1, tokens[:, None])[:, 0]
        entropy[rows, t] = -(logp.exp() * logp).nan_to_num(0).sum(1)  # 0 log 0 = 0
        live = live & ~torch.isin(tokens, ends)
        if t == steps - 1:
            break
        if device.type == "cpu" or t % 8 == 7:  # counting makes a GPU wait, so only now and then
            keep = live.nonzero()[:, 0]
            if len(keep) == 0:
                break
            if len(keep) <= 0.75 * len(live):  # dropping copies the cache, so only if it pays
                cache.batch_select_indices(keep)
                rows = rows[keep]
                tokens = tokens[keep]
                filled = filled[keep]
                positions = positions[keep]
                live = live[keep]
        column = width + t  # where the new tokens stand
        visible = filled[:, None, : column + 1]  # (B,1,column+1)
        here = positions[:, column : column + 1]  # (B,1)
        out = model(
            tokens[:, None],
            attention_mask=attention_masks(model, visible, here, positions[:, : column + 1]),
            position_ids=here,
            past_key_values=cache,
        )
        logits = out.logits[:, -1]

    # A row counts up to and including its first end token; a dead row may have been written on.
    is_end = torch.isin(written, ends)  # (B,T)
    ends_before = is_end.cumsum(1) - is_end.long()
    lengths = (ends_before == 0).sum(1).tolist()
    ended = is_end.any(1).tolist()
    written = written.tolist()
    logprobs = logprobs.tolist()
    entropy = entropy.tolist()
    completions = []
    for row, length in enumerate(lengths):
        completion = Completion(
            prompt=prompts[row // num_generations],
            ids=written[row][:length],
            logprobs=logprobs[row][:length],
            entropy=sum(entropy[row][:length]),
            ended=ended[row],
        )
        completions.append(completion)
    return completions


def complete(
    sampler, tokenizer, task, problems, num_generations, args: Args, seeds=None
) -> list[Completion]:
    """G completions of each problem with their rewards."""
    prompts = [encode(tokenizer, task, problem, args) for problem in problems]
    size = max(1, args.decode_batch_size // num_generations)  # prompts decoded at once
    completions = []
    for i in range(0, len(prompts), size):
        some = slice(i, i + size)
        some_seeds = seeds[some] if seeds else None
        completions += generate(sampler, prompts[some], num_generations, args, some_seeds)
    for row, completion in enumerate(completions):
        problem = problems[row // num_generations]
        completion.text = tokenizer.decode(completion.ids, skip_special_tokens=True)
        for name, function in task.reward_functions.items():
            reward = function(problem, completion.text)
            if reward is None or not math.isfinite(reward):
                sys.exit(f"reward function {name}: returned {reward} for {completion.text!r:.200}")
            completion.rewards += (float(reward),)
    return completions


def problem_seed(*names) -> int:
    """Where a problem's random numbers begin: after a resume, and on any number of processes."""
    return random.Random(" ".join(map(str, names))).getrandbits(63)


# --- Log-probabilities of packed groups ---------------------------------------------------------


@dataclass
class Packed:
    """A micro-batch. A row is a prompt and its completions, which see the prompt and themselves:

        tokens     p1 p2 | p3 a1 a2 | p3 b1        prompt p1 p2 p3, completions a1 a2 a3 and b1 b2
        owners      0  0 |  1  1  1 |  2  2
        positions   0  1 |  2  3  4 |  2  3        as if each completion stood alone
        targets          | a1 a2 a3 | b1 b2

    The prompt's last token is repeated, so that every token behind the prompt predicts one.
    """

    input_ids: Tensor  # (R,L)
    position_ids: Tensor  # (R,L)
    owners: Tensor  # (R,L) 0 prompt, 1.. completions, -1 padding
    predicting: Tensor  # (N,) the tokens behind prompts, as indices into R*L
    targets: Tensor  # (N,) what they predict
    sampled_logprobs: Tensor  # (N,) what the sampler said of the targets
    rows: Tensor  # (N,) which completion of the batch each belongs to
    old_logprobs: Tensor | None = None  # (N,) before the first of num_iterations steps
    ref_logprobs: Tensor | None = None  # (N,)


def pack(completions: list[Completion], rows: list[int], device: torch.device) -> Packed:
    """Some rows of the batch; neighbours with the same prompt share it, up to PACKED_LENGTH."""
    all_tokens, all_positions, all_owners = [], [], []
    order = []  # the rows as they are packed
    for prompt, group in groupby(rows, key=lambda row: completions[row].prompt):
        group = list(group)
        num_tokens = sum(len(completions[row].ids) for row in group)
        num_parts = math.ceil(num_tokens / max(1, PACKED_LENGTH - len(prompt)))
        for part in range(num_parts):
            context = prompt[:-1]
            tokens = list(context)
            positions = list(range(len(context)))
            owners = [0] * len(context)
            for owner, row in enumerate(group[part::num_parts], start=1):
                ids = completions[row].ids
                tokens += [prompt[-1]] + ids[:-1]
                positions += range(len(context), len(context) + len(ids))
                owners += [owner] * len(ids)
                order.append(row)
            all_tokens.append(tokens)
            all_positions.append(positions)
            all_owners.append(owners)

    width = max(len(tokens) for tokens in all_tokens)
    width = math.ceil(width / 8) * 8  # attention kernels would copy other masks

    def pad(lists: list[list[int]], value: int) -> Tensor:
        return torch.tensor([x + [value] * (width - len(x)) for x in lists])  # (R,L)

    owners = pad(all_owners, -1)
    targets = [token for row in order for token in completions[row].ids]
    sampled_logprobs = [logprob for row in order for logprob in completions[row].logprobs]
    repeated_rows = [row for row in order for _ in completions[row].ids]
    return Packed(
        input_ids=pad(all_tokens, 0).to(device),
        position_ids=pad(all_positions, 0).to(device),
        owners=owners.to(device),
        predicting=(owners > 0).flatten().nonzero()[:, 0].to(device),
        targets=torch.tensor(targets, device=device),
        sampled_logprobs=torch.tensor(sampled_logprobs, device=device),
        rows=torch.tensor(repeated_rows, device=device),
    )


def token_logprobs(model, packed: Packed, args: Args) -> Tensor:
    """Log-probability of every predicted token. -> (N,)"""
    query = packed.owners[:, :, None]
    key = packed.owners[:, None, :]
    visible = ((key == query) | (key == 0)).tril()  # (R,L,L)
    positions = packed.position_ids

    def chunk_logprobs(hidden, targets):
        logits = model.head(inputs_embeds=hidden[None]).logits[0].float() / args.temperature
        return -F.cross_entropy(logits, targets, reduction="none")

    with torch.autocast(visible.device.type, torch.bfloat16, enabled=args.bf16):
        hidden = model.base_model(
            packed.input_ids,
            attention_mask=attention_masks(model, visible, positions, positions),
            position_ids=positions,
            use_cache=False,
        ).last_hidden_state  # (R,L,H)
        hidden = hidden.flatten(0, 1)[packed.predicting]  # (N,H)
        # A vocabulary of 152,000 makes 10 GB of logits out of 16,000 tokens: never hold them all.
        size = max(1, LOGITS_AT_ONCE // model.config.get_text_config().vocab_size)
        if len(hidden) <= size:
            return chunk_logprobs(hidden, packed.targets)
        logprobs = []
        for chunk in zip(hidden.split(size), packed.targets.split(size)):
            logprobs.append(recompute_in_backward(chunk_logprobs, *chunk, use_reentrant=False))
        return torch.cat(logprobs)


# --- Update -------------------------------------------------------------------------------------


def micro_batches(completions, rows: list[int], args: Args, device) -> list[Packed]:
    """The rows, packed. Groups of similar length share a micro-batch, so that little is padded."""

    def group_length(row: int) -> int:
        first = row - row % args.num_generations
        return sum(len(c.ids) for c in completions[first : first + args.num_generations])

    rows = sorted(rows, key=group_length)  # rows of a group stay side by side
    # A group that does not fit is cut; then its prompt is computed twice, which changes nothing.
    size = args.micro_batch_size
    return [pack(completions, rows[i : i + size], device) for i in range(0, len(rows), size)]


def update(model, reference, optimizer, completions, advantages: Tensor, args: Args) -> dict:
    """num_iterations optimizer steps on the batch of all processes; advantages are those of ours.

    A step's loss is a sum over tokens, so neither micro-batches nor processes change its gradient.
    """
    device = model.device
    lengths = torch.tensor([len(c.ids) for c in completions])  # (B,)
    all_lengths = gather(lengths.tolist())
    num_tokens = sum(all_lengths)
    weights = token_weights(
        lengths,
        args.loss_type,
        num_rows=len(all_lengths),
        num_tokens=num_tokens,
        max_completion_length=args.max_completion_length,
    ).to(device)  # (B,)
    rows = list(range(len(completions)))
    if args.beta == 0 and not args.fsdp:
        # Rows without advantage add exactly nothing. FSDP wants as many passes on all processes.
        rows = advantages.nonzero()[:, 0].tolist()
    advantages = advantages.to(device)
    batches = micro_batches(completions, rows, args, device)

    loss_sum = torch.zeros((), device=device)
    num_clipped = torch.zeros((), device=device)
    kl_sum = torch.zeros((), device=device)
    largest_gap = torch.zeros((), device=device)
    for iteration in range(args.num_iterations):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for batch in batches:
            logprobs = model.token_logprobs(batch, args)  # (N,)
            if iteration == 0:  # the weights are still those that sampled: the ratio is exactly 1
                batch.old_logprobs = logprobs.detach()
                gap = (batch.old_logprobs - batch.sampled_logprobs).abs().max()
                largest_gap = torch.maximum(largest_gap, gap)
                if reference is not None:
                    with torch.no_grad():
                        batch.ref_logprobs = reference.token_logprobs(batch, args)
            losses, clipped = policy_loss(
                logprobs,
                batch.old_logprobs,
                advantages[batch.rows],
                epsilon=args.epsilon,
                beta=args.beta,
                ref_logprobs=batch.ref_logprobs,
            )
            loss = (losses * weights[batch.rows]).sum()
            loss_sum += loss.detach()
            num_clipped += clipped.sum()
            if reference is not None:
                kl_sum += kl_estimate(logprobs.detach(), batch.ref_logprobs).sum()
            if args.fsdp:
                loss = loss * dist.get_world_size()  # FSDP averages over processes, we want a sum
            loss.backward()
        if dist.is_initialized() and not args.fsdp:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        norm = (norm.full_tensor() if args.fsdp else norm).item()
        if not math.isfinite(norm):
            sys.exit(f"the gradient norm is {norm}: lower --learning-rate; checkpoints are kept")
        optimizer.step()
    optimizer.zero_grad()  # the rollout needs the memory

    own_sums = torch.stack([loss_sum, num_clipped, kl_sum]) / args.num_iterations
    sums = torch.tensor(gather([own_sums.tolist()])).sum(0).tolist()
    metrics = {
        "loss": sums[0],
        "clip_ratio": sums[1] / num_tokens,
        "grad_norm": norm,
        "sampling/logprob_difference/max": max(gather([largest_gap.item()])),
    }
    if reference is not None:
        metrics["kl"] = sums[2] / num_tokens
    return metrics


def shard(model, args: Args) -> None:
    """FSDP2 in place: every layer, then the rest."""
    dtype = torch.bfloat16 if args.bf16 else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in model.modules():
        if type(module).__name__ in model._no_split_modules:
            fully_shard(module, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mp_policy=policy, reshard_after_forward=True)
    register_fsdp_forward_method(model, "token_logprobs")


def copy_model(model, dtype: torch.dtype):
    """The model with its weights, and only these, in another dtype; not to be trained."""
    weights = {}
    for parameter in model.parameters():
        weight = parameter.detach().to(dtype, copy=True)
        weights[id(parameter)] = torch.nn.Parameter(weight, requires_grad=False)
    return copy.deepcopy(model, weights)  # deepcopy takes what it finds there as already copied


@torch.no_grad()
def refresh(sampler, model, args: Args) -> None:
    """Give the model that decodes the weights of the policy."""
    if sampler is model:
        return
    weights = dict(model.named_parameters())
    for name, parameter in sampler.named_parameters():
        weight = weights[name]
        parameter.copy_(weight.full_tensor() if args.fsdp else weight)


# --- Checkpoints and logs -----------------------------------------------------------------------


def checkpoints(run_dir: str) -> list[Path]:
    """Finished checkpoints, oldest first: torch writes .metadata last."""
    return sorted(path.parent for path in Path(run_dir).glob("checkpoints/*/.metadata"))


def save_checkpoint(run_dir: str, model, optimizer, progress: dict, rank: int) -> None:
    """Every process writes its shard; the newest two are kept.

    Nothing else is needed: problems and sampling follow from the seed and the progress.
    """
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "progress": progress}
    dcp.save(state, checkpoint_id=f"{run_dir}/checkpoints/step_{progress['step']:08d}")
    if rank == 0:
        for old in checkpoints(run_dir)[:-2]:
            shutil.rmtree(old)


def load_checkpoint(run_dir: str, model, optimizer, progress: dict) -> None:
    """Restore the newest checkpoint, if there is one; every process reads its shard."""
    if not checkpoints(run_dir):
        return  # at once: asking a new AdamW for its state would count a step
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "progress": progress}
    dcp.load(state, checkpoint_id=str(checkpoints(run_dir)[-1]))
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    progress.update(state["progress"])


def save_final(run_dir: str, model, tokenizer, args: Args, rank: int) -> None:
    """The trained model in Hugging Face format and in its own dtype."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=whole)  # all processes take part
    if rank == 0:
        final = transformers.AutoModelForCausalLM.from_pretrained(model_path(args), dtype="auto")
        final.load_state_dict(weights)
        final.save_pretrained(f"{run_dir}/final")
        tokenizer.save_pretrained(f"{run_dir}/final")
        print(f"{run_dir}/final: the trained model", flush=True)


def open_run(args: Args, rank: int) -> str:
    """The run folder, the same for all processes; the first one makes it."""
    run_dir = args.resume or args.output_dir
    if run_dir is None:
        run_dir = f"runs/{Path(__file__).stem}__{args.env}__{args.seed}__{time.time():.0f}"
        run_dir = gather([run_dir])[0]  # clocks differ
    path = Path(run_dir, "args.json")
    if rank == 0:
        if path.exists() and not args.resume:
            sys.exit(f"--output-dir {run_dir}: holds a run; continue it with --resume {run_dir}")
        os.makedirs(run_dir, exist_ok=True)
        path.write_text(json.dumps(asdict(replace(args, resume=None)), indent=1))
    return run_dir


def log(run_dir: str, board: SummaryWriter, step: int, values: dict[str, float]) -> None:
    """Add to TensorBoard and metrics.csv; where a resume repeats a step, the last row counts."""
    with open(f"{run_dir}/metrics.csv", "a") as file:
        if file.tell() == 0:
            file.write("step,tag,value\n")
        for tag, value in values.items():
            file.write(f"{step},{tag},{value}\n")
            board.add_scalar(tag, value, step)
    board.flush()


def log_completions(run_dir: str, step: int, completions, advantages, tokenizer, task, args: Args):
    """Add the first groups of a step to completions.jsonl, for reading."""
    shown = completions[: GROUPS_SHOWN * args.num_generations]
    with open(f"{run_dir}/completions.jsonl", "a") as file:
        for completion, advantage in zip(shown, advantages.tolist()):
            row = {
                "step": step,
                "prompt": tokenizer.decode(completion.prompt),
                "completion": completion.text,
                "rewards": dict(zip(task.reward_functions, completion.rewards)),
                "advantage": advantage,
            }
            file.write(json.dumps(row) + "\n")


def report(step: int, metrics: dict, task, args: Args) -> None:
    """One line on a step, under 80 columns."""
    name = next(iter(task.reward_functions))
    left = metrics["seconds/step"] * (args.max_steps - step)
    line = f"step {step:>4}/{args.max_steps}  reward {metrics['reward']:.3f}"
    line += f"  {name[:12]} {metrics[f'rewards/{name}/mean']:.2f}"
    line += f"  length {metrics['completions/mean_length']:.0f}"
    line += f"  {metrics['seconds/step']:.1f} s"
    print(f"{line}  {left // 60:.0f}:{left % 60:02.0f} left", flush=True)


# --- Evaluation and training --------------------------------------------------------------------


def evaluate(
    sampler, tokenizer, task, problems, args: Args, rank: int, world_size: int
) -> tuple[dict[str, float], str]:
    """First reward on problems that training never sees: of the greedy completion, and mean and
    best of k samples. Also the first problem with its greedy completion, for reading."""
    k = args.num_generations_eval
    mine = range(rank, len(problems), world_size)
    seeds = [problem_seed("evaluation", i) for i in mine]
    problems = [problems[i] for i in mine]
    greedy = complete(sampler, tokenizer, task, problems, 1, args)
    scores = {"eval/greedy": [completion.rewards[0] for completion in greedy]}
    if k > 0:
        sampled = complete(sampler, tokenizer, task, problems, k, args, seeds)
        rewards = torch.tensor([completion.rewards[0] for completion in sampled]).view(-1, k)
        scores[f"eval/mean_at_{k}"] = rewards.mean(1).tolist()
        scores[f"eval/pass_at_{k}"] = rewards.amax(1).tolist()
    means = {tag: torch.tensor(gather(values)).mean().item() for tag, values in scores.items()}
    return means, f"{task.prompt(problems[0])[-1]['content']}\n>>> {greedy[0].text}"


def train(args: Args) -> dict[str, float]:
    """Sample, compare, update, log; again. Returns the last evaluation."""
    rank, world_size, device = setup(args)
    task, eval_problems = load_task(args)
    model, tokenizer = load_model(args)
    model.to(device)
    eval_problems = without_long_prompts(eval_problems, tokenizer, task, args)
    if hasattr(task, "train_rows"):
        task.train_rows = without_long_prompts(task.train_rows, tokenizer, task, args)
    if len(eval_problems) < world_size:
        sys.exit(f"{len(eval_problems)} evaluation problems: fewer than processes")
    check_model(model, encode(tokenizer, task, eval_problems[0], args), args)
    reference = copy_model(model, torch.float32) if args.beta > 0 else None
    # The sampler is the policy itself, or a copy: whole under FSDP, half the bytes with --bf16.
    sampler = model
    if args.bf16 or args.fsdp:
        sampler = copy_model(model, torch.bfloat16 if args.bf16 else torch.float32)
    if args.gradient_checkpointing:
        recompute_layers(model)
    if args.fsdp:
        shard(model, args)
        if reference is not None:
            shard(reference, args)
    optimizer = torch.optim.AdamW(
        model.parameters(), args.learning_rate, weight_decay=0.0, fused=True
    )
    run_dir = open_run(args, rank)
    progress = {"step": 0, "num_prompts": 0, "num_tokens": 0}
    load_checkpoint(run_dir, model, optimizer, progress)
    if rank == 0:
        board = SummaryWriter(run_dir, purge_step=progress["step"] + 1)
        print(f"{run_dir}: {args.num_prompts_per_step} x {args.num_generations} on {device}")

    scores = {}
    while True:
        step = progress["step"]
        last = step >= args.max_steps
        refresh(sampler, model, args)
        if args.eval_steps and (last or step % args.eval_steps == 0):
            scores, example = evaluate(
                sampler, tokenizer, task, eval_problems, args, rank, world_size
            )
            if rank == 0:
                log(run_dir, board, step, scores)
                if last or step == 0:
                    print(example)
                print("  ".join(f"{tag} {value:.3f}" for tag, value in scores.items()), flush=True)
        if last:
            break

        # 1. sample G completions of each prompt and score them; every process has its own prompts
        began = time.perf_counter()
        share = args.num_prompts_per_step // world_size
        first = progress["num_prompts"] + rank * share
        indices = range(first, first + share)
        problems = [task.train_problem(i, args.seed) for i in indices]
        seeds = [problem_seed(args.seed, i) for i in indices]
        completions = complete(
            sampler, tokenizer, task, problems, args.num_generations, args, seeds
        )
        progress["num_prompts"] += args.num_prompts_per_step
        sampled = time.perf_counter()

        # 2. compare each completion with its group; here B counts the rows of all processes
        table = gather([(c.rewards, len(c.ids), c.ended, c.entropy) for c in completions])
        rewards, lengths, ended, entropy = zip(*table)
        rewards = torch.tensor(rewards)  # (B,K)
        totals = rewards @ torch.tensor(task.reward_weights)  # (B,)
        advantages = totals
        if args.advantage == "shuffled":
            order = random.Random(f"{args.seed} {step}").sample(range(len(totals)), len(totals))
            advantages = totals[order]
        if args.advantage != "none":
            advantages = group_advantages(advantages, args.num_generations, args.scale_rewards)
        own_advantages = advantages.chunk(world_size)[rank]

        # 3. clipped policy-gradient steps
        rate = args.learning_rate * min(1.0, (step + 1) / max(1, args.warmup_steps))
        optimizer.param_groups[0]["lr"] = rate
        metrics = update(model, reference, optimizer, completions, own_advantages, args)

        # 4. log and save
        progress["step"] = step = step + 1
        progress["num_tokens"] += sum(lengths)
        groups = totals.view(-1, args.num_generations)  # (P,G)
        for name, mean in zip(task.reward_functions, rewards.mean(0).tolist()):
            metrics[f"rewards/{name}/mean"] = mean
        metrics |= {
            "reward": totals.mean().item(),
            "frac_reward_zero_std": (groups == groups[:, :1]).all(1).float().mean().item(),
            "entropy": sum(entropy) / sum(lengths),
            "completions/mean_length": sum(lengths) / len(lengths),
            "completions/clipped_ratio": 1 - sum(ended) / len(ended),
            "learning_rate": rate,
            "num_tokens": progress["num_tokens"],
            "seconds/rollout": sampled - began,
            "seconds/step": time.perf_counter() - began,
        }
        if rank == 0:
            log(run_dir, board, step, {f"train/{tag}": value for tag, value in metrics.items()})
            log_completions(run_dir, step, completions, own_advantages, tokenizer, task, args)
            report(step, metrics, task, args)
        if args.save_steps and (step % args.save_steps == 0 or step == args.max_steps):
            save_checkpoint(run_dir, model, optimizer, progress, rank)

    if args.max_steps > 0:
        save_final(run_dir, model, tokenizer, args, rank)
    if dist.is_initialized():
        dist.destroy_process_group()
    return scores


def parse_args() -> Args:
    """The command line; with --resume, the flags of that run are its defaults."""
    args = tyro.cli(Args)
    if not args.resume:
        return args
    path = Path(args.resume, "args.json")
    if not path.is_file():
        sys.exit(f"--resume {args.resume}: no args.json, so not a run folder")
    saved = json.loads(path.read_text())
    lists = {name: tuple(value) for name, value in saved.items() if isinstance(value, list)}
    saved = Args(**saved | lists)  # JSON has no tuples
    args = tyro.cli(Args, default=saved)
    for name, before in asdict(saved).items():
        now = getattr(args, name)
        if now == before or name == "resume":
            continue
        flag = "--" + name.replace("_", "-")
        if name in ("seed", "env", "task", "dataset", "model_name_or_path", "num_prompts_per_step"):
            sys.exit(f"{flag} {now}: the run began with {before}, and this cannot change")
        if os.environ.get("RANK", "0") == "0":
            print(f"{flag} {now}: the run began with {before}", flush=True)
    return args


if __name__ == "__main__":
    train(parse_args())
