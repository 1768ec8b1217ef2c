# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.6", "numpy>=2", "transformers>=5.23", "tyro>=1.0", "tensorboard>=2.18"]
# ///
"""DipLLM: a joint action as a sequence of unit orders, learned from a search that stays near an
anchor. Xu et al., DipLLM: Fine-Tuning LLM for Strategic Decision-making in Diplomacy, 2506.09655.

    search    Q(a)  payoff of a = (a1, .., aD) against the opponent's average policy in piKL-Hedge
    backup    Q_D = Q; Q_d(a1 .. ad) = lamb * log E exp(Q_{d+1} / lamb), over the anchor's a{d+1}
    label     pi_d = anchor_d * exp(Q_d / lamb) / Z; their product is anchor * exp(Q / lamb) / Z
    loss      cross-entropy between the label and the model, for each unit and the orders before it

One query asks for one unit's order; its prompt has the orders before it, and only legal orders are
scored. The method is pikl_hedge and soft_backup, the step of unit_policies and, for candidates, of
by_prefix, all called in plan; make_labels; and unit_loss, called in update.

Differs from supervised fine-tuning:
1. A row is a query with all its legal orders. The probability of an order is that of its text,
   divided by the sum over the legal ones; nothing is sampled from the model, so there is no vLLM.
2. Labels are distributions. They come from self-play of the search on boards as text.
3. Evaluation is exact where joint orders can be listed: exploitability and regularised objective.

A reconstruction: the paper's equations were not at hand, and its code has neither training nor
weights by Q. It differs from what is known of them:
1. The backup above is the one whose product is the joint policy; the paper's Q_d may be another.
2. `--label weighted` draws joint orders from the anchor and weighs them by exp((Q - V) / lamb),
   where notes on the paper have exp(Q_d) of each unit. Without a cap on weights its optimum is that
   of `soft`. `argmax` is what the released pipeline makes, one joint order.
3. The search looks one turn ahead, at the score after it. The game is Blotto, not Diplomacy.

    python algorithms/dipllm.py                                # tiny model, CPU, offline
    torchrun --nproc_per_node 8 algorithms/dipllm.py ...

Your own board: `--env FILE.py:Class`, a class with reset, legal_orders, prompt, after, play and
done, as Blotto in envs/blotto.py. `--lora-rank 16` trains adapters.

Letters in shapes: D units, A orders of one, J joint orders (Jx and Jy of the two players), R
queries of a pass, L tokens of a query with all its orders, N predicted tokens, H hidden size.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import inspect
import json
import math
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from functools import partial
from itertools import groupby, product
from pathlib import Path
from types import MethodType, SimpleNamespace
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
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint as recompute_in_backward
from torch.utils.tensorboard import SummaryWriter
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

ROOT = Path(__file__).resolve().parents[1]  # the repository root
sys.path.insert(0, str(ROOT))  # for envs/, imported where they are chosen

LOGITS_AT_ONCE = 2**26  # logits in memory during the update: 256 MB in float32
# Flags that cannot change when a run is resumed.
FIXED = "seed env game_options max_prompt_length system_prompt chat_template_path"
FIXED += " chat_template_kwargs model_name_or_path num_games_per_step num_boards anchor"
FIXED += " anchor_temperature lamb eta search_steps explore_eps max_joint_orders num_samples"
FIXED += " num_candidates output_dir lora_rank weight_decay"
AT_LEAST_ONE = "num_games_per_step num_plays num_iterations search_steps max_joint_orders"
AT_LEAST_ONE += " num_samples num_candidates max_prompt_length micro_batch_tokens eval_games"
MAY_BE_NEGATIVE = "seed"
STOP = threading.Event()  # set by SIGTERM: save a checkpoint after this step, and end

# torch.distributed.checkpoint warns of this in runs with one process, where it is harmless.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


@dataclass
class Args:
    temperature = 1.0  # no flag: over_temperature, which is shared, reads it
    max_completion_length = -math.inf  # no flag: load_model reads it, but check_model counts orders
    # model, board
    model_name_or_path: str | None = None
    """Hugging Face causal language model to train; None is a tiny model that knows other games"""
    env: str = "blotto"
    """blotto, or FILE.py:Class for a board of your own"""
    game_options: str = "{}"
    """settings of the board as JSON, such as '{"num_units": 4, "num_turns": 1}'"""
    num_boards: int = 1
    """train and evaluate on so many boards, drawn from --seed; 0 is a new board for every game, and
    evaluations on boards of their own"""
    max_prompt_length: int = 1024
    """longest prompt in tokens"""
    system_prompt: str | None = None
    """system message of every prompt; replaces the one it has, if any"""
    chat_template_path: str | None = None
    """file with a chat template, in place of the one that comes with the model"""
    chat_template_kwargs: str = "{}"
    """settings of the chat template as JSON, such as '{"enable_thinking": false}'"""
    # search and self-play
    anchor: Literal["model", "uniform"] = "model"
    """the policy that the search stays near: all legal orders alike, or that of the model in
    --model-name-or-path, even if it is RUN/final; with --resume RUN, the run's"""
    anchor_temperature: float | None = None
    """the initial model's log-probabilities of legal orders are divided by this; None is 10 for the
    tiny model, which has never seen an order, and 1 for others"""
    lamb: float = 0.1
    """lambda, what a nat of distance from the anchor costs in payoff, which is from -1 to 1"""
    eta: float = 10.0
    """step size of piKL-Hedge"""
    search_steps: int = 300
    """iterations of piKL-Hedge; the paper's code has 2048"""
    num_games_per_step: int = 4
    """games of self-play in one step, over all processes"""
    explore_eps: float = 0.05
    """probability with which a unit of self-play gets any of the searched orders"""
    max_joint_orders: int = 256
    """a player with more joint orders than this searches among candidates, drawn from the anchor"""
    num_samples: int = 250
    """joint orders that are drawn for candidates"""
    num_candidates: int = 50
    """candidates that are kept, the most frequent ones"""
    # method
    label: Literal["soft", "weighted", "argmax", "anchor"] = "soft"
    """soft: the unit policies; weighted: orders of the anchor, weighted by exp((Q - V) / lambda);
    argmax: the likeliest joint order, as in the released pipeline; anchor: a control, which learns
    nothing from the search that plays"""
    num_plays: int = 4
    """joint orders drawn for a player at each position; each unit along them is a query. argmax has
    one joint order"""
    weight_cap: float = 20.0
    """weighted: largest weight; 0 is no limit"""
    num_iterations: int = 4
    """optimizer steps on the labels of a step; the paper makes 5 epochs"""
    # optimizer
    learning_rate: float | None = None
    """learning rate of AdamW; None is 1e-3 for the tiny model and 2e-5 for others, and ten times
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
    """training steps, one batch of games each; 0 only evaluates"""
    seed: int = 1
    """seed of boards (of evaluations, too, but for --num-boards 0), of self-play and of labels"""
    # memory and speed; these change results by rounding only
    micro_batch_tokens: int | None = None
    """most tokens in one forward pass, prompts and padding counted; None is 16384 on a GPU and 1024
    on a CPU; a query is never divided"""
    bf16: bool = False
    """compute in bfloat16; trained weights and optimizer stay in float32"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass"""
    compile: bool = False
    """torch.compile for layers and head in the update; costs a minute or more in the first step"""
    lora_rank: int = 0
    """rank of adapters in linear layers but the head (pip install peft); 0 trains all weights"""
    # bookkeeping
    eval_steps: int = 15
    """steps between evaluations; 0 disables them"""
    eval_games: int = 8
    """games of self-play whose positions are evaluated, on one board after the other. Games of a
    board begin alike, so its first position counts for each. Boards past this number are unused"""
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


def sum_of_squares(centres) -> list[float]:
    """Each player's share of the score: squares of supply centres over their sum.

    As result_process/sos_score.py of the paper's code; without any centre all shares are equal.
    """
    squares = [float(count) ** 2 for count in centres]
    total = sum(squares)
    return [square / total if total else 1 / len(squares) for square in squares]


def pikl_hedge(
    payoff: Tensor, anchor_x: Tensor, anchor_y: Tensor, lamb: float, eta: float, steps: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both players of a zero-sum game (Jx,Jy) play piKL-Hedge, Jacob et al., arXiv 2112.07544.

    Iterate t answers the mean of the t - 1 before it, and stays near the anchor; the first is the
    anchor. Returns the last iterates and the averages of both, x (Jx,), y (Jy,), average x, average
    y. lamb 0 is Hedge.
    """
    log_x, log_y = anchor_x.log(), anchor_y.log()
    x, y = anchor_x, anchor_y
    sum_x, sum_y = x.clone(), y.clone()
    for t in range(1, steps):  # the next iterate answers the mean of t
        utility_x = payoff @ sum_y / t
        utility_y = -(sum_x @ payoff) / t
        sharpness = 1 / (lamb + 1 / (eta * t))
        x = (sharpness * (utility_x + lamb * log_x)).softmax(0)
        y = (sharpness * (utility_y + lamb * log_y)).softmax(0)
        sum_x += x
        sum_y += y
    return x, y, sum_x / steps, sum_y / steps


def soft_backup(values: Tensor, anchor: Tensor, lamb: float) -> tuple[Tensor, Tensor]:
    """A unit's policy, and what the orders before it are worth. (..,A) twice -> (..,A), (..,)"""
    scores = anchor.log() + values / lamb
    return scores.softmax(-1), lamb * scores.logsumexp(-1)


def unit_policies(
    q: Tensor, anchors, lamb: float, backup: str = "soft"
) -> tuple[list[Tensor], list[Tensor]]:
    """Q and policy of each unit, given the orders of the units before it.

    q (A1*..*AD,) belongs to joint orders in lexicographic order. anchors has for each unit its
    policy (Ad,), or one for each prefix of orders, (A1,..,Ad). Returns two lists of D tables (A1,),
    (A1,A2), ... With the soft backup, the product of the policies is anchor * exp(q / lamb) / Z;
    `mean` takes a mean over later units, and its product is another.
    """
    values = q.view([anchor.size(-1) for anchor in anchors])
    unit_q = []
    policies = []
    for anchor in reversed(list(anchors)):
        unit_q.insert(0, values)
        policy, soft_values = soft_backup(values, anchor, lamb)
        policies.insert(0, policy)
        values = soft_values if backup == "soft" else (anchor * values).sum(-1)
    return unit_q, policies


def joint_policy(policies) -> Tensor:
    """The product of unit policies, as unit_policies takes and returns them. -> (J,)"""
    joint = policies[0]
    for policy in policies[1:]:
        joint = joint[..., None] * policy
    return joint.flatten()


def state_value(q: Tensor, anchor: Tensor, lamb: float) -> Tensor:
    """V = lamb * log E exp(q / lamb) under the anchor, the largest regularised objective."""
    return lamb * (anchor.log() + q / lamb).logsumexp(0)


def order_weights(q: Tensor, value, lamb: float) -> Tensor:
    """exp((q - value) / lamb). With state_value, the mean under the anchor is 1."""
    return ((q - value) / lamb).exp()


def regularised_objective(policy: Tensor, q: Tensor, anchor: Tensor, lamb: float) -> Tensor:
    """E[q] - lamb * KL(policy || anchor), what piKL maximises. (J,) three times -> scalar"""
    divergence = (torch.xlogy(policy, policy) - torch.xlogy(policy, anchor)).sum()
    return (policy * q).sum() - lamb * divergence


def exploitability(payoff: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Mean of what both could gain by answering the other best; 0 at an equilibrium."""
    return ((payoff @ y).max() - (x @ payoff).min()) / 2


def order_logprobs(token_logprobs: Tensor, packed: Packed) -> Tensor:
    """Log-probability of each legal order of a query among the legal ones. (N,) -> (R,A)

    An order's text has the sum of its tokens, see Packed. Orders that a query lacks get about -1e9,
    a probability of 0.
    """
    sums = token_logprobs.new_zeros(sum(packed.num_orders))
    sums = sums.index_add(0, packed.order_index, token_logprobs)
    rows = sums.split(packed.num_orders)
    return pad_sequence(rows, batch_first=True, padding_value=-1e9).log_softmax(1)


def unit_loss(logprobs: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each query: a label is a distribution, or a weighted order. (R,A) -> (R,)"""
    return -(labels * logprobs).sum(1)


# --- Search and labels --------------------------------------------------------------------------


@dataclass
class Seat:
    """One player at one position. An order is a text, a prefix a tuple with the orders of the first
    units. Dictionaries have an entry for each prefix that leads to a candidate. Candidates are all
    joint orders, or some; then some legal orders lead to none."""

    candidates: list[tuple[str, ...]]  # J joint orders; the last unit's order changes first
    options: dict[tuple, list[str]]  # the legal orders of the next unit, A of them
    prompts: dict[tuple, list[int]]  # token ids
    tree: set[tuple] = field(default_factory=set)  # candidates and all their prefixes
    unit_anchors: dict[tuple, Tensor] = field(default_factory=dict)  # (A,) probabilities
    unit_policies: dict[tuple, Tensor] = field(default_factory=dict)  # (A,) of the search
    anchor: Tensor | None = None  # (J,) probabilities
    q: Tensor | None = None  # (J,)
    policy: Tensor | None = None  # (J,) of the search


@dataclass
class Position:
    """A board when it was met, its payoffs (Jx,Jy) to player 0, and both seats."""

    payoff: Tensor
    seats: list[Seat]
    seed: str  # of what is drawn for its labels


def as_tensor(numbers: list) -> Tensor:
    """In double precision, as all of the search."""
    return torch.tensor(numbers, dtype=torch.float64)


def new_seat(candidates: list[tuple[str, ...]], player: int, board, tokenizer, args: Args) -> Seat:
    """A player whose joint orders are these candidates, before any search."""
    legal = board.legal_orders(player)
    options = {}
    for candidate in candidates:
        options |= {candidate[:unit]: legal[unit] for unit in range(len(legal))}
    prompts = {prefix: ask(tokenizer, board, player, prefix, args) for prefix in options}
    return Seat(candidates, options, prompts, {*options, *candidates})


def ask(tokenizer, board, player: int, prefix: tuple[str, ...], args: Args) -> list[int]:
    """Token ids that ask for the order of a player's next unit, after those of the prefix."""
    task = SimpleNamespace(prompt=partial(board.prompt, player))  # what encode wants
    ids = encode(tokenizer, task, prefix, args)
    if len(ids) > args.max_prompt_length:
        sys.exit(f"--max-prompt-length {args.max_prompt_length}: a prompt has {len(ids)} tokens")
    return ids


def joint_probabilities(tables: dict[tuple, Tensor], seat: Seat) -> Tensor:
    """Of each candidate among the candidates: the product over its units, divided by the sum of
    all products. -> (J,)"""
    numbers = {(): 1.0}  # of a joint order or a prefix
    for prefix in sorted(seat.options, key=len):
        for order, value in zip(seat.options[prefix], tables[prefix].tolist()):
            numbers[*prefix, order] = numbers[prefix] * value
    products = as_tensor([numbers[candidate] for candidate in seat.candidates])
    products = products.clamp(min=1e-300)  # not 0, whose logarithm would make objectives infinite
    return products / products.sum()


def plan(position: Position, args: Args) -> None:
    """Search: fills in Q and the policies of both seats, whose anchors are known."""
    first, second = position.seats
    for seat in position.seats:
        seat.anchor = joint_probabilities(seat.unit_anchors, seat)
        # With Q = 0 the backup is the anchor, given that the joint order is a candidate.
        if not has_all(seat):
            seat.unit_anchors = by_prefix(replace(seat, q=0 * seat.anchor), args.lamb)
    _, _, x, y = pikl_hedge(
        position.payoff, first.anchor, second.anchor, args.lamb, args.eta, args.search_steps
    )
    first.q = position.payoff @ y  # against the average policy
    second.q = -(x @ position.payoff)
    for seat in position.seats:
        seat.policy = (seat.anchor.log() + seat.q / args.lamb).softmax(0)
        seat.unit_policies = by_prefix(seat, args.lamb)


def has_all(seat: Seat) -> bool:
    """Whether the candidates are all joint orders."""
    widths = {len(prefix): len(orders) for prefix, orders in seat.options.items()}  # by unit
    return len(seat.candidates) == math.prod(widths.values())


def by_prefix(seat: Seat, lamb: float) -> dict[tuple, Tensor]:
    """The policy of each unit after each prefix, by soft backups. Where some joint orders are no
    candidates, a legal order that leads to none of them gets 0."""
    prefixes = sorted(seat.options, key=len)
    if has_all(seat):  # q is a full table
        anchors = []
        shape = ()
        for _, level in groupby(prefixes, key=len):
            table = torch.stack([seat.unit_anchors[prefix] for prefix in level]).view(*shape, -1)
            shape = table.shape
            anchors.append(table)
        _, tables = unit_policies(seat.q, anchors, lamb)
        rows = [row for table in tables for row in table.view(-1, table.size(-1))]
        return dict(zip(prefixes, rows))
    values = dict(zip(seat.candidates, seat.q.tolist()))
    found = {}
    for prefix in reversed(prefixes):
        longer = [(*prefix, order) for order in seat.options[prefix]]
        next_values = as_tensor([values.get(orders, -math.inf) for orders in longer])
        found[prefix], value = soft_backup(next_values, seat.unit_anchors[prefix], lamb)
        values[prefix] = value.item()
    return found


def draw(tables, seat: Seat, generator: random.Random, epsilon: float = 0.0) -> tuple[str, ...]:
    """A candidate, unit by unit. With probability epsilon a unit takes any order that leads to
    one."""
    orders = ()
    while orders in seat.options:  # a whole joint order is no prefix
        options = seat.options[orders]
        weights = [float((*orders, order) in seat.tree) for order in options]
        if generator.random() >= epsilon:
            table = tables[orders].tolist()
            weights = [weight * value for weight, value in zip(weights, table)]
        orders += tuple(generator.choices(options, weights))
    return orders


def make_labels(seat: Seat, args: Args, generator: random.Random) -> dict[tuple, Tensor]:
    """What the model learns at each prefix, (A,): each of --num-plays joint orders (of one, with
    argmax) adds a label, divided by their number, at every prefix on its way.

    soft and anchor follow joint orders drawn from the policy that they teach, so that the expected
    loss is the cross-entropy of the joint policies.
    """
    tables = seat.unit_policies if args.label == "soft" else seat.unit_anchors
    if args.label == "argmax":
        drawn = [seat.candidates[seat.policy.argmax()]]
    else:
        drawn = [draw(tables, seat, generator) for _ in range(args.num_plays)]
    weights = dict.fromkeys(drawn, 1.0)
    if args.label == "weighted":
        value = state_value(seat.q, seat.anchor, args.lamb)
        capped = order_weights(seat.q, value, args.lamb).clamp(max=args.weight_cap or math.inf)
        weights = dict(zip(seat.candidates, capped.tolist()))
    labels = {}
    for orders in drawn:
        for unit, order in enumerate(orders):
            prefix = orders[:unit]
            if args.label in ("soft", "anchor"):
                label = tables[prefix]
            else:
                label = as_tensor([0.0] * len(seat.options[prefix]))
                label[seat.options[prefix].index(order)] = weights[orders]
            labels[prefix] = labels.get(prefix, 0) + label / len(drawn)
    return labels


def collect(
    anchor, tokenizer, seeds: list[str], board_seeds: list[str], args: Args
) -> list[Position]:
    """Play games to their ends by search, and return all positions. anchor is a model, or None.

    A game's board depends on one seed, and its orders on another.
    """
    games = []
    for seed, board_seed in zip(seeds, board_seeds):
        board = new_board(args)
        board.reset(random.Random(board_seed))
        games.append((board, random.Random(seed), seed))
    positions = []
    turn = 0
    while games:
        met = []
        for board, generator, seed in games:
            listed = []
            for player in (0, 1):
                listed.append(list_candidates(anchor, tokenizer, board, player, generator, args))
            payoff = [[payoff_of(board, (x, y)) for y in listed[1]] for x in listed[0]]
            seats = [new_seat(listed[p], p, board, tokenizer, args) for p in (0, 1)]
            met.append(Position(as_tensor(payoff), seats, f"{seed} turn {turn}"))
        seats = [seat for position in met for seat in position.seats]
        tables = model_policies(anchor, tokenizer, seats, args, args.anchor_temperature)
        for seat, table in zip(seats, tables):
            seat.unit_anchors = table
        for position, (board, generator, _) in zip(met, games):
            plan(position, args)
            chosen = []
            for seat in position.seats:
                chosen.append(draw(seat.unit_policies, seat, generator, args.explore_eps))
            board.play(tuple(chosen))
        positions += met
        games = [game for game in games if not game[0].done]
        turn += 1
    return positions


def payoff_of(board, orders: tuple) -> float:
    """Payoff to player 0: its score after these orders minus that of the other."""
    mine, theirs = sum_of_squares(board.after(orders))
    return mine - theirs


def list_candidates(anchor, tokenizer, board, player: int, generator, args: Args) -> list[tuple]:
    """The joint orders that search looks at: all, or the most frequent of some drawn from the
    anchor."""
    legal = board.legal_orders(player)
    if math.prod(map(len, legal)) <= args.max_joint_orders:
        return list(product(*legal))
    drawn = [()] * args.num_samples
    for options in legal:  # of one unit
        different = list(dict.fromkeys(drawn))
        prompts = {prefix: ask(tokenizer, board, player, prefix, args) for prefix in different}
        seat = Seat([], dict.fromkeys(different, options), prompts)  # of this unit alone
        (tables,) = model_policies(anchor, tokenizer, [seat], args, args.anchor_temperature)
        weights = {prefix: table.tolist() for prefix, table in tables.items()}
        drawn = [(*prefix, *generator.choices(options, weights[prefix])) for prefix in drawn]
    kept = [orders for orders, _ in Counter(drawn).most_common(args.num_candidates)]
    # In the order of product(*legal): if all are kept, by_prefix reads their Q as a full table.
    return sorted(kept, key=lambda joint: [texts.index(o) for texts, o in zip(legal, joint)])


@torch.no_grad()
def model_policies(
    model, tokenizer, seats: list[Seat], args: Args, temperature: float = 1.0
) -> list[dict[tuple, Tensor]]:
    """The probabilities of all options of each seat, by prefix. model None is uniform."""
    if model is None:
        found = []
        for seat in seats:
            sizes = {prefix: len(orders) for prefix, orders in seat.options.items()}
            found.append({prefix: as_tensor([1 / size] * size) for prefix, size in sizes.items()})
        return found
    queries = []
    for seat in seats:
        queries += [new_query(tokenizer, seat, prefix) for prefix in seat.options]
    found = [None] * len(queries)
    for packed in micro_batches(queries, args, model.device):
        logprobs = order_logprobs(model.token_logprobs(packed, args), packed).double().cpu()
        for number, row, size in zip(packed.numbers, logprobs, packed.num_orders):
            found[number] = (row[:size] / temperature).softmax(0)
    found = iter(found)
    return [{prefix: next(found) for prefix in seat.options} for seat in seats]


# --- Training -----------------------------------------------------------------------------------


def train(args: Args) -> dict[str, float]:
    """Train as the flags say. Returns the scores of the last evaluation."""
    if args.learning_rate is None:
        rate = 2e-5 if args.model_name_or_path else 1e-3
        args = replace(args, learning_rate=10 * rate if args.lora_rank else rate)
    if args.anchor_temperature is None and args.anchor == "model":
        args = replace(args, anchor_temperature=1.0 if args.model_name_or_path else 10.0)
    rank, world_size, device = setup(args)
    warn_of_slow_bfloat16(args, rank, device)
    check_env(args)
    model, tokenizer = load_model(args)
    model.to(device)
    check_model(model, first_query(tokenizer, args), args)
    anchor = None  # uniform
    if args.anchor == "model":  # with LoRA it is the model itself, its adapters off
        anchor = model if args.lora_rank else copy_model(model, torch.float32)
    if args.lora_rank:
        add_adapters(model, args)
    if args.compile:
        compile_layers(model)
    if args.gradient_checkpointing:
        recompute_layers(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, weight_decay=args.weight_decay, fused=True)
    run_dir = open_run(args, rank)
    progress = {"step": 0, "num_games": 0, "num_positions": 0, "num_tokens": 0}
    eval_positions = []
    if args.eval_steps:
        numbers = range(rank, args.eval_games, world_size)
        seeds = [f"evaluation {i}" for i in numbers]
        board_seeds = seeds  # of boards of their own
        if args.num_boards:
            board_seeds = [board_seed(i, args) for i in numbers]
        with adapters_off(model, args):
            eval_positions = collect(anchor, tokenizer, seeds, board_seeds, args)
    load_checkpoint(run_dir, model, optimizer, progress)
    if rank == 0:
        board = open_board(run_dir, progress["step"], args)
        print(f"{run_dir}: {args.num_games_per_step} games a step on {device}")

    scores = {}
    while True:
        step = progress["step"]
        last = step >= args.max_steps
        if args.eval_steps and (last or step % args.eval_steps == 0):
            scores, answers = evaluate(model, tokenizer, eval_positions, args)
            if rank == 0:
                log_answers(run_dir, step, answers)
                log(run_dir, board, step, scores)
                print("  ".join(f"{tag} {value:.3f}" for tag, value in scores.items()), flush=True)
        if last:
            break

        # 1. self-play of the search, near the initial model; processes have different games
        began = time.perf_counter()
        share = args.num_games_per_step // world_size
        first = progress["num_games"] + rank * share
        numbers = range(first, first + share)
        seeds = [f"{args.seed} game {i}" for i in numbers]
        board_seeds = [board_seed(i, args) for i in numbers]
        with adapters_off(model, args):
            positions = collect(anchor, tokenizer, seeds, board_seeds, args)
        progress["num_games"] += args.num_games_per_step
        searched = time.perf_counter()

        # 2. labels: for each seat some joint orders, cut into a query for each unit
        queries = []
        gains = []  # in Q - lambda * KL, by search
        num_units = 0
        for position in positions:
            generator = random.Random(f"{position.seed} labels")
            for seat in position.seats:
                for prefix, label in make_labels(seat, args, generator).items():
                    queries.append(new_query(tokenizer, seat, prefix, label))
                value = state_value(seat.q, seat.anchor, args.lamb)
                gains.append((value - seat.anchor @ seat.q).item())
                num_units += len(seat.candidates[0])

        # 3. gradient steps on the queries
        rate = scheduled_rate(step, args)
        optimizer.param_groups[0]["lr"] = rate
        metrics = update(model, optimizer, queries, num_units, args)

        # 4. log and save
        gains = gather(gains)
        progress["step"] = step = step + 1
        progress["num_positions"] += len(gains) // 2
        progress["num_tokens"] += metrics.pop("num_tokens")
        metrics |= {
            "dipllm/search_gain": sum(gains) / len(gains),
            "learning_rate": rate,
            "num_positions": progress["num_positions"],
            "num_tokens": progress["num_tokens"],
            "seconds/search": searched - began,
            "seconds/step": time.perf_counter() - began,
        }
        if rank == 0:
            log(run_dir, board, step, {f"train/{tag}": value for tag, value in metrics.items()})
            log_queries(run_dir, step, queries, tokenizer)
            report(step, metrics, args)
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
    if dist.is_initialized():
        dist.destroy_process_group()
    return scores


def update(model, optimizer, queries: list[Query], num_units: int, args: Args) -> dict:
    """num_iterations optimizer steps on the queries of all processes.

    Queries and num_units, the units of all seats, are those of this process. The loss is a sum over
    queries divided by the units of all processes, so its gradient depends neither on micro-batches
    nor on the number of processes.
    """
    device = model.device
    parameters = optimizer.param_groups[0]["params"]
    num_units = sum(gather([num_units]))
    batches = micro_batches(queries, args, device)
    loss_sum = torch.zeros((), device=device)
    for _ in range(args.num_iterations):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)  # not None, even where no token uses it
        for packed in batches:
            logprobs = order_logprobs(model.token_logprobs(packed, args), packed)  # (R,A)
            loss = unit_loss(logprobs, packed.labels).sum() / num_units
            loss_sum += loss.detach()
            loss.backward()
        if dist.is_initialized():
            for parameter in parameters:
                dist.all_reduce(parameter.grad)
        norm = torch.nn.utils.clip_grad_norm_(parameters, args.max_grad_norm or math.inf).item()
        if not math.isfinite(norm):
            sys.exit(f"gradient norm {norm}: try a lower --learning-rate; checkpoints are kept")
        optimizer.step()
    optimizer.zero_grad()  # the search needs the memory

    entropy = sum(label_entropy(query.label) for query in queries)
    num_tokens = sum(len(order) for query in queries for order in query.orders)
    row = [loss_sum.item() / args.num_iterations, entropy, num_tokens, len(queries)]
    mean_loss, entropy, num_tokens, num_queries = as_tensor(gather([row])).sum(0).tolist()
    return {
        "loss": mean_loss,
        "grad_norm": norm,
        "dipllm/label_kl": mean_loss - entropy / num_units,
        "dipllm/num_queries": num_queries,
        "num_tokens": int(num_tokens),
    }


def label_entropy(label: Tensor) -> float:
    """Entropy of a label times its sum: what no model can take off its loss. (A,)"""
    return -torch.xlogy(label, label / label.sum().clamp(min=1e-300)).sum().item()


@torch.no_grad()
def evaluate(
    model, tokenizer, positions: list[Position], args: Args
) -> tuple[dict[str, float], list[dict]]:
    """Scores of the model's joint policy, the product over its units, and of the search and the
    anchor beside it: means over the positions of all processes. Exact; with candidates in place of
    all joint orders, among them. Also returns the likeliest joint orders for log_answers, in whose
    words they are turns, and their Q is the reward."""
    seats = [seat for position in positions for seat in position.seats]
    tables = iter(model_policies(model, tokenizer, seats, args))
    rows = []
    answers = []
    for position in positions:
        joint = [joint_probabilities(next(tables), seat) for seat in position.seats]
        searched = [seat.policy for seat in position.seats]
        anchors = [seat.anchor for seat in position.seats]
        row = {}
        for name, pair in (("eval", joint), ("eval/search", searched), ("eval/anchor", anchors)):
            found = position_scores(position, *pair, args.lamb)
            row |= {f"{name}/{score}": value for score, value in found.items()}
        rows.append(list(row.values()))
        for policy, seat in zip(joint, position.seats):
            if not seat.prompts:
                continue  # the player has no units left
            best = policy.argmax()
            prompt = tokenizer.decode(seat.prompts[()])
            answer = {"prompt": prompt, "turns": list(seat.candidates[best])}
            answers.append(answer | {"reward": seat.q[best].item()})
    means = as_tensor(gather(rows)).mean(0).tolist()
    return dict(zip(row, means)), gather(answers)


def position_scores(position: Position, x: Tensor, y: Tensor, lamb: float) -> dict[str, float]:
    """Scores of two joint policies (Jx,), (Jy,) that play each other.

    objective is the mean over both seats, with the Q of the search: the search's is the largest,
    and another policy's misses lamb * KL(policy || search) of it. score is the expected share, sum
    of squares, against the anchor.
    """
    first, second = position.seats
    objectives = regularised_objective(x, first.q, first.anchor, lamb)
    objectives = objectives + regularised_objective(y, second.q, second.anchor, lamb)
    against_anchor = x @ position.payoff @ second.anchor - first.anchor @ position.payoff @ y
    return {
        "exploitability": exploitability(position.payoff, x, y).item(),
        "objective": objectives.item() / 2,
        "score": 0.5 + against_anchor.item() / 4,  # a payoff of 1 is all of the score
    }


# ================================================================================================
# Below: boards, models, log-probabilities, adapters, checkpoints and logs. All language scripts
# share this, word for word, except where the method itself needs another text.
# ================================================================================================


# --- Processes and boards -----------------------------------------------------------------------


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
    if args.num_games_per_step % world_size:
        sys.exit(f"--num-games-per-step: not divisible by the {world_size} processes")
    if args.eval_steps and args.eval_games < world_size:
        sys.exit(f"--eval-games: fewer than the {world_size} processes")
    for name in ("lamb", "eta", "anchor_temperature"):
        if getattr(args, name) == 0:
            sys.exit(f"--{name.replace('_', '-')}: must be above 0")
    if args.anchor == "uniform" and args.anchor_temperature is not None and not args.resume:
        sys.exit("--anchor-temperature: is of --anchor model; the uniform one has none")
    if args.weight_cap != Args.weight_cap and args.label != "weighted" and not args.resume:
        sys.exit("--weight-cap: needs --label weighted")
    if args.explore_eps > 1:
        sys.exit(f"--explore-eps {args.explore_eps}: a probability is at most 1")
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
        # The default is too short where processes wait for the one that searches longest.
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


def new_board(args: Args):
    """A board, before its reset."""
    options = json.loads(args.game_options)
    if ".py:" in args.env:
        return from_file("--env", args.env)(**options)
    from envs.blotto import Blotto

    return Blotto(**options)


def board_seed(game: int, args: Args) -> str:
    """What the board of a game of training depends on."""
    return f"{args.seed} {game % args.num_boards if args.num_boards else game}"


def check_env(args: Args) -> None:
    """Exit if there is no such board, or if it cannot be played."""
    if args.env != "blotto" and ".py:" not in args.env:
        sys.exit(f"--env {args.env}: expected blotto or FILE.py:Class")
    if ".py:" in args.env:
        board = from_file("--env", args.env)
        try:
            inspect.signature(board).bind(**json.loads(args.game_options))
        except ValueError:
            pass  # built in: it does not say what it takes
        except TypeError as error:
            sys.exit(f"--game-options {args.game_options}: {args.env} takes others, {error}")
    try:
        new_board(args)
        if ".py:" in args.env and Path(ROOT, "envs", "checks.py").is_file():  # a board of one's own
            from envs.checks import check_board

            check_board(args.env, partial(new_board, args))
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("envs"):
            raise  # in a file of one's own
        sys.exit(f"{error}: needs the folder envs/ of the repository, or --env FILE.py:Class")
    except (TypeError, ValueError) as error:
        if ".py:" in args.env:
            raise
        sys.exit(f"--game-options: {error}")


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


def is_due(interval: int, step: int, args: Args) -> bool:
    """At every interval steps, 0 never, and after the last step."""
    return interval > 0 and (step % interval == 0 or step == args.max_steps)


def scheduled_rate(step: int, args: Args) -> float:
    """The learning rate: a linear warm-up, then constant, a line or half a cosine down to 0."""
    warm_up = min(1.0, (step + 1) / max(1, args.warmup_steps))
    done = max(0, step - args.warmup_steps) / max(1, args.max_steps - args.warmup_steps)
    falls = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return args.learning_rate * warm_up * falls[args.lr_scheduler_type]


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
    return args.model_name_or_path or str(ROOT / "envs" / "tiny_lm" / "text_games")


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


def first_query(tokenizer, args: Args) -> Query:
    """The first unit of player 0 on the first board."""
    board = new_board(args)
    board.reset(random.Random(f"{args.seed} 0"))
    prompt = ask(tokenizer, board, 0, (), args)
    seat = Seat([], {(): board.legal_orders(0)[0]}, {(): prompt})
    return new_query(tokenizer, seat, ())


@torch.no_grad()
def logprob_gap(model, queries: list[Query], args: Args) -> float:
    """Largest difference of log-probabilities, in nats, from those of the plain forward pass."""
    packed = pack(queries, list(range(len(queries))), model.device)
    plain = []
    for query in queries:
        for order in query.orders:
            ids = torch.tensor([query.prompt + order], device=model.device)
            logits = model(ids).logits[0, len(query.prompt) - 1 : -1]
            targets = ids[0, len(query.prompt) :]
            plain.append(-F.cross_entropy(logits, targets, reduction="none"))
    return (model.token_logprobs(packed, args) - torch.cat(plain)).abs().max().item()


def check_model(model, query: Query, args: Args) -> None:
    """Exit unless prompts and orders fit into the model, and packing equals the plain forward pass;
    else gradients are wrong."""
    name = type(model).__name__
    longest = args.max_prompt_length + max(map(len, query.orders))
    if longest > longest_text(model) and not args.resume:
        words = f"with an order up to {longest} tokens, more than the model's positions"
        sys.exit(f"--max-prompt-length: {words}, {longest_text(model)}")
    args = replace(args, bf16=False, compile=False)
    # A query with several orders, and one with a shorter prompt, which is padded.
    queries = [query, replace(query, prompt=query.prompt[len(query.prompt) // 2 :])]
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if window:
        config.sliding_window = 4  # shorter than the texts of this check
    try:
        gap = logprob_gap(model, queries, args)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the code of an architecture raises
        sys.exit(f"{name}: not supported ({type(error).__name__}: {error})")
    if window:
        config.sliding_window = window
    if not gap < 1e-3:  # also if it is NaN
        sys.exit(f"{name}: not supported, log-probabilities of packing off by {gap:.2g}")


# --- Log-probabilities of packed queries --------------------------------------------------------


@dataclass
class Query:
    """Which order comes next for a unit? Token ids of the prompt and of each legal order."""

    prompt: list[int]
    orders: list[list[int]]  # A of them, with the end token
    label: Tensor | None = None  # (A,)


def new_query(tokenizer, seat: Seat, prefix: tuple, label: Tensor | None = None) -> Query:
    """The query of a seat after these orders."""
    orders = []
    for order in seat.options[prefix]:
        ids = tokenizer.encode(order, add_special_tokens=False)
        orders.append([*ids, tokenizer.eos_token_id])
    return Query(seat.prompts[prefix], orders, label)


@dataclass
class Packed:
    """A micro-batch. A row is a query: a prompt, and orders, which see the prompt and themselves:

        tokens     p1 p2 | p3 a1 a2 | p3 b1        prompt p1 p2 p3, orders a1 a2 a3 and b1 b2
        owners      0  0 |  1  1  1 |  2  2
        positions   0  1 |  2  3  4 |  2  3        as if each order stood alone
        targets          | a1 a2 a3 | b1 b2

    p3 starts every order, because it predicts their first tokens.
    """

    numbers: list[int]  # of the queries, R
    num_orders: list[int]  # of each query
    input_ids: Tensor  # (R,L)
    position_ids: Tensor  # (R,L)
    owners: Tensor  # (R,L) 0 prompt, 1.. orders, -1 padding
    predicting: Tensor  # (N,) the tokens with owner 1.., as indices into R*L
    targets: Tensor  # (N,) the tokens that they predict
    order_index: Tensor  # (N,) the order of the micro-batch that each target belongs to
    labels: Tensor | None  # (R,A), 0 where a query has fewer orders


def pack(queries: list[Query], numbers: list[int], device) -> Packed:
    """Pack the queries with these numbers."""
    chosen = [queries[number] for number in numbers]
    width = max(map(packed_length, chosen))
    table = []  # rows as lists of (token, position, owner)
    for query in chosen:
        row = [(token, position, 0) for position, token in enumerate(query.prompt[:-1])]
        for owner, order in enumerate(query.orders, start=1):
            inputs = [query.prompt[-1]] + order[:-1]
            for position, token in enumerate(inputs, start=len(query.prompt) - 1):
                row.append((token, position, owner))
        table.append(row + [(0, 0, -1)] * (width - len(row)))
    # numpy reads lists ten times as fast as torch does.
    input_ids, position_ids, owners = torch.from_numpy(np.array(table)).unbind(2)  # (R,L)
    orders = [order for query in chosen for order in query.orders]
    targets = [token for order in orders for token in order]
    order_index = [number for number, order in enumerate(orders) for _ in order]
    labels = None
    if chosen[0].label is not None:
        labels = pad_sequence([query.label.float() for query in chosen], batch_first=True)
        labels = labels.to(device)
    return Packed(
        numbers=numbers,
        num_orders=[len(query.orders) for query in chosen],
        input_ids=input_ids.to(device),
        position_ids=position_ids.to(device),
        owners=owners.to(device),
        predicting=(owners > 0).flatten().nonzero()[:, 0].to(device),
        targets=torch.from_numpy(np.array(targets, np.int64)).to(device),
        order_index=torch.from_numpy(np.array(order_index, np.int64)).to(device),
        labels=labels,
    )


def packed_length(query: Query) -> int:
    """Tokens of a packed row, rounded up to a multiple of 8, which attention kernels want."""
    length = len(query.prompt) - 1 + sum(map(len, query.orders))
    return math.ceil(length / 8) * 8


def tokens_at_once(args: Args, device) -> int:
    """Most tokens in a forward pass: enough to keep a GPU busy, or what suits a CPU's caches."""
    return args.micro_batch_tokens or (16384 if device.type == "cuda" else 1024)


def micro_batches(queries: list[Query], args: Args, device) -> list[Packed]:
    """The queries, packed for one forward pass after another. A query is never divided, because
    its orders share a probability of 1."""
    limit = tokens_at_once(args, device)
    # Longest first: a lack of memory shows at once, and neighbours need little padding.
    order = sorted(range(len(queries)), key=lambda n: packed_length(queries[n]), reverse=True)
    passes = [[]]
    for number in order:
        wider = [*passes[-1], number]
        if passes[-1] and len(wider) * packed_length(queries[wider[0]]) > limit:
            passes.append([])
        passes[-1].append(number)
    return [pack(queries, numbers, device) for numbers in passes if numbers]


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


# --- Adapters and copies ------------------------------------------------------------------------


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


def log_queries(run_dir: str, step: int, queries: list[Query], tokenizer) -> None:
    """Add the first eight queries of a step to completions.jsonl, for people to read."""
    with open(f"{run_dir}/completions.jsonl", "a", encoding="utf-8") as file:
        for query in queries[:8]:
            texts = [tokenizer.decode(order, skip_special_tokens=True) for order in query.orders]
            row = {"step": step, "prompt": tokenizer.decode(query.prompt)}
            row["label"] = dict(zip(texts, query.label.tolist()))
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


def report(step: int, metrics: dict, args: Args) -> None:
    """Print a summary of under 80 columns."""
    left = timedelta(seconds=round(metrics["seconds/step"] * (args.max_steps - step)))
    line = f"step {step:>4}/{args.max_steps}  loss {metrics['loss']:.3f}"
    line += f"  label_kl {metrics['dipllm/label_kl']:.3f}"
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
