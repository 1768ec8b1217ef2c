# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.6", "numpy>=2.0", "transformers>=5.0", "tyro>=1.0", "tensorboard>=2.18",
#     "gymnasium[mujoco]>=1.1",  # only for --env-id cheetah_velocity
# ]
# ///
"""Meta-DT: offline meta-RL. From recorded episodes of training tasks a policy learns to act on new
tasks that differ in their reward, or in their dynamics. Nobody tells it the task: a world model's
encoder sees the last steps and gives a context, and a decision transformer acts by that context, by
the return that is still wanted, and by a prompt, a piece of an earlier episode of the same task.

Wang, Zhang, Wu, Zhu, Zhao & Chen, Meta-DT: Offline Meta-RL as Conditional Sequence Modeling with
World Model Disentanglement, NeurIPS 2024, arXiv 2410.11448, after the authors' code.

1. World model: a GRU reads the last h steps and gives z; a decoder predicts the reward from
   (s, a, s', z), or the next state from (s, a, z). Then both are frozen.
2. Policy: tokens (return-to-go, [state; z], action) go through GPT-2's blocks, which predict the
   action at the token of the state. The prompt comes first, with embeddings of its own.
3. Self-guided prompt: the segment in which the world model was most wrong. At evaluation it is cut
   from the policy's own earlier episodes on the task, so few-shot needs no demonstration.

With --context none --prompt none this is a decision transformer, with --context none --prompt
random --few-shot recorded Prompt-DT; with --context none alone, the world model only chooses the
prompt. Two more arms ask what a context could give: --context episode (that of the prompt's
episode, the same for all steps) and --context goal (the task itself is given).

Differs from the authors' code:
1. Inputs are on one scale: states standardized, actions divided by their largest size (as tanh
   ends at -1 and 1), rewards of the world model by their std. Theirs are raw in the world model.
2. The world model's errors compare like with like; theirs compare raw with standardized states.
3. In evaluations, contexts and errors of a window are computed as in training. Theirs see nothing
   during the first steps, and sum errors to the end of the episode.
4. A training prompt comes from any other episode of the task. Theirs, from one of three.
5. After the first --no-prompt-steps a tenth of the rows still goes without prompt, so that one
   policy can also act zero-shot. Theirs always has a prompt then, and zero-shot is a second policy.
6. Each evaluation begins with no episode of its own. Theirs keeps those of all evaluations before.
7. A quarter of the width, fewer steps, no dropout. meta_dt.md lists smaller differences.

    python algorithms/meta_dt.py                         # Point-Robot, CPU, 3 minutes
    python algorithms/meta_dt.py --context none          # the control: prompts, but no context
    python algorithms/meta_dt.py --prompt none           # zero-shot only
    python algorithms/meta_dt.py --data FOLDER --env-id FILE.py:Class

Shapes: E episodes of up to T steps, N episodes played at once, B rows of a batch, K steps of a
window, k of a prompt, h of a context; S numbers in a state, A in an action, Z in a context, G in
the description of a task; D is the width of the transformer.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import random
import runpy
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from transformers import GPT2Config, GPT2Model

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository root, for envs/

SCALES = "state_mean state_std action_scale reward_scale return_scale task_mean task_std".split()
BEST = 3  # episodes with the highest returns, of which one gives the prompt
NO_PROMPT = 0.1  # share of rows that see no earlier episode, also after --no-prompt-steps
HIDDEN_DIM = 128  # of the world model (authors)
NUM_TRANSITIONS = 128  # in a step of the world model (authors)
ENVS = {
    "point_robot": ("envs.point_robot", "PointRobot"),
    "cheetah_velocity": ("envs.cheetah_velocity", "CheetahVelocity"),
}
# Flags that cannot change when a run is resumed.
FIXED = "data env_id world_model context prompt horizon prompt_length window_length context_dim"
FIXED += " embed_dim num_layers dropout world_model_steps no_prompt_steps warmup_steps batch_size"
FIXED += " learning_rate return_scale target_return eval_rounds few_shot log_steps seed output_dir"
SILENT = "resume evaluate"  # flags whose change is not announced


@dataclass
class Args:
    # data and tasks
    data: str | None = None
    """folder with train/*.npz and new/*.npz, one file a task, see meta_dt.md; None makes data of
    Point-Robot: 45 goals to train on, 5 new ones, 60 episodes each"""
    env_id: str | None = None
    """where evaluations act: point_robot, cheetah_velocity, FILE.py:Class, or none; None is
    point_robot, and with --data it has to be given"""
    # method
    context: Literal["running", "episode", "goal", "none"] = "running"
    """z of the running episode's last steps, the mean z of the prompt's episode, the task itself
    (an oracle), or zeros (a decision transformer)"""
    prompt: Literal["self_guided", "released", "random", "none"] = "self_guided"
    """segment after the first h steps: where the world model errs most (the paper), drawn by its
    errors (the released code), any, or no prompt (zero-shot only, but for --context episode)"""
    world_model: Literal["reward", "state"] = "reward"
    """what tells tasks apart, and is predicted: the reward, or the next state"""
    horizon: int = 4
    """h, steps that a context sees"""
    prompt_length: int = 5
    """k, steps of a prompt (authors: 5; 3 for Hopper and Walker)"""
    window_length: int = 20
    """K, steps that the policy sees of its episode, at most all of the longest one (authors: 20; 8
    for Hopper and Walker)"""
    target_return: float | None = None
    """return that evaluations ask for; None is the highest one in the task's data, also for new
    tasks, of which it tells something"""
    return_scale: float | None = None
    """returns are divided by it; None is the largest size of a return in the data (authors: 10 for
    Point-Robot, else 500)"""
    # training
    world_model_steps: int = 4_000
    """gradient steps of the world model"""
    policy_steps: int = 6_000
    """gradient steps of the policy (authors: 100,000 and more)"""
    no_prompt_steps: int = 1_000
    """policy steps at the start that see no prompt (authors: 20,000)"""
    warmup_steps: int = 200
    """policy steps in which the learning rate rises from 0 (authors: 10,000)"""
    batch_size: int = 32
    """B, windows in a step of the policy (authors: 128); the world model takes 128 transitions"""
    learning_rate: float = 3e-3
    """AdamW's, of the policy (authors: 1e-4 for Point-Robot)"""
    context_dim: int = 16
    """Z, also the features of each input of the world model"""
    embed_dim: int = 32
    """D, width of the transformer (authors: 128)"""
    num_layers: int = 2
    """blocks of the transformer, with one head each (authors: 3)"""
    dropout: float = 0.0
    """in the transformer (authors: 0.1)"""
    # bookkeeping
    seed: int = 1
    """seed of networks, batches, evaluations, and of the data that is made here"""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """device of networks and data; auto takes a GPU if there is one"""
    eval_steps: int = 2_000
    """gradient steps between evaluations (none before the policy's first steps); 0 evaluates at the
    end only"""
    eval_episodes: int = 4
    """learners that meet each task in an evaluation; 0 disables evaluations"""
    eval_rounds: int = 5
    """episodes with a prompt that each learner plays, after a first one without"""
    few_shot: Literal["own", "recorded"] = "own"
    """whose episodes give the prompt: the policy's own ones (the authors), or the task's best ones
    in the data, which real use would have to record (Prompt-DT's setting)"""
    log_steps: int = 50
    """gradient steps between log lines; the steps of both phases are rounded up to multiples"""
    save_steps: int = 1_000
    """gradient steps between checkpoints; 0 keeps none, nor the trained policy"""
    output_dir: str | None = None
    """run folder; None is runs/<script>__<task>__<seed>__<time>_<process>"""
    resume: str | None = None
    """run folder to continue; its flags are used unless given anew"""
    evaluate: str | None = None
    """run folder to score instead of training; its flags are used unless given anew"""


# --- The method ---------------------------------------------------------------------------------


def returns_to_go(rewards) -> Tensor:
    """What is still to come, with the step's own reward, undiscounted. (...,T) -> (...,T)"""
    return torch.as_tensor(rewards).flip(-1).cumsum(-1).flip(-1)


def prompt_start_probabilities(errors, horizon, prompt_length, max_ep_len, to_end=False) -> Tensor:
    """How likely a prompt starts at the steps horizon, ..., T - prompt_length. -> (...,starts)

    errors (...,T,D) are the world model's, max_ep_len the length of the episode, a number or (...).
    Each window's error is the sum over its steps, and the probability is its share (the released
    code); the paper takes the likeliest. to_end sums to the end of the episode instead, as the
    released code does in evaluations. If the episode is too short, the first start gets 1.
    """
    errors = torch.as_tensor(errors).sum(-1)
    num_starts = errors.shape[-1] - prompt_length + 1 - horizon
    starts = horizon + torch.arange(num_starts, device=errors.device)
    length = torch.as_tensor(max_ep_len, device=errors.device)[..., None]
    errors = errors * (torch.arange(errors.shape[-1], device=errors.device) < length)
    if to_end:
        sums = returns_to_go(errors)[..., horizon : horizon + num_starts]  # to the end
    else:
        sums = errors.unfold(-1, prompt_length, 1).sum(-1)[..., horizon:]
    # Too short for any: the first start, which make_prompt moves back.
    fits = (starts <= length - prompt_length) | (starts == horizon)
    sums = (sums + 1e-30) * fits  # also where all errors are 0, shares add up to 1
    return sums / sums.sum(-1, keepdim=True)


def policy_loss(predicted, actions, mask) -> Tensor:
    """Mean squared error over steps and dimensions. (B,K,A), (B,K,A), (B,K) -> scalar"""
    squares = (predicted - actions).square().mean(-1)
    return (squares * mask).sum() / mask.sum()


def features(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU())


def init_linear_(module: nn.Module) -> None:
    """Weights as the authors draw them: Xavier-uniform, orthogonal in a GRU, zero biases."""
    for name, values in module.named_parameters():
        if "bias" in name:
            nn.init.zeros_(values)
        elif "gru" in name:
            nn.init.orthogonal_(values)
        else:
            nn.init.xavier_uniform_(values)


class ContextEncoder(nn.Module):
    """The last h steps -> a context z of the task."""

    def __init__(self, state_dim: int, action_dim: int, context_dim: int, hidden_dim: int):
        super().__init__()
        self.state_encoder = features(state_dim, context_dim)
        self.action_encoder = features(action_dim, context_dim)
        self.reward_encoder = features(1, context_dim)
        self.gru = nn.GRU(3 * context_dim, hidden_dim, batch_first=True)
        self.context_output = nn.Linear(hidden_dim, context_dim)
        init_linear_(self)

    def forward(self, states, actions, rewards):
        """(B,h,S), (B,h,A), (B,h) -> (B,Z); steps before the episode are zeros"""
        a, s = self.action_encoder(actions), self.state_encoder(states)
        r = self.reward_encoder(rewards[..., None])
        outputs, _ = self.gru(torch.cat([a, s, r], -1))
        return self.context_output(outputs[:, -1])

    def every_step(self, states, actions, rewards, horizon: int):
        """Contexts of all steps, each of the `horizon` steps before it. (E,T,...) -> (E,T,Z)"""
        num_episodes, num_steps, _ = states.shape
        windows = []
        for values in (states, actions, rewards[..., None]):
            before = F.pad(values, (0, 0, horizon, -1))  # zeros first, without the last step
            windows.append(before.unfold(1, horizon, 1).transpose(2, 3).flatten(0, 1))
        s, a, r = windows
        return self(s, a, r[..., 0]).view(num_episodes, num_steps, -1)


class RewardDecoder(nn.Module):
    """(s, a, s', z) -> reward. One encoder serves s and s'."""

    def __init__(self, state_dim: int, action_dim: int, context_dim: int, hidden_dim: int):
        super().__init__()
        self.state_encoder = features(state_dim, context_dim)
        self.action_encoder = features(action_dim, context_dim)
        self.linear1 = nn.Linear(4 * context_dim, hidden_dim)
        self.linear2 = nn.Linear(hidden_dim, hidden_dim)
        self.linear3 = nn.Linear(hidden_dim, 1)
        init_linear_(self)

    def forward(self, states, actions, next_states, contexts):
        """(...,S), (...,A), (...,S), (...,Z) -> (...,1)"""
        s, a = self.state_encoder(states), self.action_encoder(actions)
        x = torch.cat([s, a, self.state_encoder(next_states), contexts], -1)
        return self.linear3(self.linear2(self.linear1(x).relu()).relu())


class StateDecoder(nn.Module):
    """(s, a, z) -> next state."""

    def __init__(self, state_dim: int, action_dim: int, context_dim: int, hidden_dim: int):
        super().__init__()
        self.state_encoder = features(state_dim, context_dim)
        self.action_encoder = features(action_dim, context_dim)
        self.reward_encoder = features(1, context_dim)  # unused, as the authors' weights have it
        self.linear1 = nn.Linear(3 * context_dim, hidden_dim)
        self.linear2 = nn.Linear(hidden_dim, hidden_dim)
        self.linear3 = nn.Linear(hidden_dim, state_dim)
        init_linear_(self)

    def forward(self, states, actions, contexts):
        """(...,S), (...,A), (...,Z) -> (...,S)"""
        s, a = self.state_encoder(states), self.action_encoder(actions)
        x = torch.cat([s, a, contexts], -1)
        return self.linear3(self.linear2(self.linear1(x).relu()).relu())


class NoPositions(nn.Module):
    """In place of GPT-2's position embeddings: each token has the embedding of its step instead."""

    def forward(self, positions):
        return torch.zeros((), device=positions.device)


class MetaDecisionTransformer(nn.Module):
    """(return-to-go, state with context, action) of each step, after a prompt -> actions."""

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        context_dim: int,
        hidden_size: int,
        max_ep_len: int,
        n_layer: int = 3,
        n_head: int = 1,
        n_inner: int | None = None,
        dropout: float = 0.1,
    ):
        super().__init__()
        config = GPT2Config(
            vocab_size=1,
            n_embd=hidden_size,
            n_layer=n_layer,
            n_head=n_head,
            n_inner=n_inner,
            activation_function="relu",
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.transformer = GPT2Model(config)
        self.transformer.wpe = NoPositions()
        self.embed_timestep = nn.Embedding(max_ep_len, hidden_size)
        self.embed_return = nn.Linear(1, hidden_size)
        self.embed_action = nn.Linear(action_dim, hidden_size)
        self.state_encoder = nn.Linear(state_dim, context_dim)
        self.embed_state = nn.Linear(2 * context_dim, hidden_size)
        self.prompt_embed_timestep = nn.Embedding(max_ep_len, hidden_size)
        self.prompt_embed_return = nn.Linear(1, hidden_size)
        self.prompt_embed_state = nn.Linear(state_dim, hidden_size)
        self.prompt_embed_action = nn.Linear(action_dim, hidden_size)
        self.embed_ln = nn.LayerNorm(hidden_size)
        self.predict_action = nn.Sequential(nn.Linear(hidden_size, action_dim), nn.Tanh())
        # Unused, as the authors' weights have them.
        self.predict_state = nn.Linear(hidden_size, state_dim)
        self.predict_return = nn.Linear(hidden_size, 1)
        self.register_load_state_dict_pre_hook(drop_causal_masks)

    def forward(self, states, contexts, actions, rtg, timesteps, mask=None, prompt=None):
        """-> actions (B,K,A), each from the tokens up to its own state.

        states (B,K,S), contexts (B,K,Z), actions (B,K,A), rtg (B,K,1), timesteps (B,K). prompt has
        states, actions, rtg, timesteps of k steps, and optionally a mask. Steps whose mask is 0 are
        not seen by others.
        """
        step = self.embed_timestep(timesteps)
        state_and_context = torch.cat([self.state_encoder(states), contexts], -1)
        r = self.embed_return(rtg) + step
        s = self.embed_state(state_and_context) + step
        a = self.embed_action(actions) + step
        tokens = self.embed_ln(interleave(r, s, a))
        mask = torch.ones_like(timesteps) if mask is None else mask
        if prompt is not None:
            step = self.prompt_embed_timestep(prompt["timesteps"])
            r = self.prompt_embed_return(prompt["rtg"]) + step
            s = self.prompt_embed_state(prompt["states"]) + step
            a = self.prompt_embed_action(prompt["actions"]) + step
            tokens = torch.cat([interleave(r, s, a), tokens], 1)  # no LayerNorm, as the authors
            prompt_mask = prompt.get("mask", torch.ones_like(prompt["timesteps"]))
            mask = torch.cat([prompt_mask.to(mask.dtype), mask], 1)
        attention = attention_mask(mask.repeat_interleave(3, 1), tokens.dtype)
        hidden = self.transformer(inputs_embeds=tokens, attention_mask=attention, use_cache=False)
        hidden = hidden.last_hidden_state[:, -3 * states.shape[1] :]
        return self.predict_action(hidden[:, 1::3])


def interleave(*tokens) -> Tensor:
    """(B,K,D) of each kind -> (B,3K,D), step by step."""
    return torch.stack(tokens, 2).flatten(1, 2)


def attention_mask(visible, dtype) -> Tensor:
    """Added to scores: each token sees itself, and earlier visible ones. (B,L) -> (B,1,L,L)"""
    length = visible.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=visible.device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=visible.device)
    allowed = causal & (visible.bool()[:, None] | itself)
    return (~allowed[:, None]).to(dtype) * torch.finfo(dtype).min


def drop_causal_masks(module, state_dict, prefix, *_) -> None:
    """Before weights are loaded: older versions of GPT-2 kept masks, which are no weights."""
    for name in list(state_dict):
        if name.startswith(prefix) and name.endswith((".attn.bias", ".attn.masked_bias")):
            del state_dict[name]


# --- Training -----------------------------------------------------------------------------------


def train(args: Args) -> dict[str, float]:
    """Train as the flags say. Returns the scores of the last evaluation."""
    lowest = {"horizon": 1, "prompt_length": 1, "window_length": 1, "context_dim": 1}
    lowest |= {"embed_dim": 1, "num_layers": 1, "batch_size": 1, "log_steps": 1, "eval_rounds": 0}
    lowest |= {"world_model_steps": 0, "policy_steps": 0, "no_prompt_steps": 0, "warmup_steps": 0}
    lowest |= {"save_steps": 0, "eval_steps": 0, "eval_episodes": 1 if args.evaluate else 0}
    device = setup(args, **lowest)
    check_flags(args)
    args.env_id = args.env_id or "point_robot"
    world_model_steps = count_world_model_steps(args)
    policy_steps = up_to_multiple(args.policy_steps, args.log_steps)
    last_step = world_model_steps + policy_steps
    make_env = load_env(args)
    state = None  # on the CPU; load_state_dict copies it to the device, but for Adam's step counts
    if args.evaluate:
        state = load_evaluated(args)
    elif args.resume:
        state = load_checkpoint(args.resume, torch.device("cpu"))
    data = load_data(args, device, None if state is None else state["agent"])
    check_env(args, make_env, data)
    torch.manual_seed(args.seed)
    agent = Agent(data, args).to(device)
    if args.evaluate:
        agent.load_state_dict(state["agent"])
        return evaluate(agent, data, make_env, args)
    world_model_parameters = [*agent.encoder.parameters(), *agent.decoder.parameters()]
    policy_parameters = agent.policy.parameters()
    optimizers = {  # the numbers are the authors'
        "world_model": torch.optim.Adam(world_model_parameters, 1e-3),
        "policy": torch.optim.AdamW(policy_parameters, args.learning_rate, weight_decay=1e-4),
    }
    run_dir = open_run(args, Path(args.env_id).name.replace(":", "_"))
    step = 0
    if state is not None:
        step = state["step"]
        agent.load_state_dict(state["agent"])
        for name, optimizer in optimizers.items():
            optimizer.load_state_dict(state[name])
    board = SummaryWriter(run_dir, purge_step=step + 1)
    board.add_text("hyperparameters", f"```\n{json.dumps(asdict(args), indent=1)}\n```")
    counts = f"{data.num_train} tasks, {data.num_new} new ones, {len(data.train.lengths)} episodes"
    print(f"{run_dir}: context {args.context}, prompt {args.prompt}, {counts}, {device}")
    if args.resume and step >= last_step:
        print(f"{run_dir}: has {step} steps already; a larger --policy-steps goes on")
    if args.prompt != "none" and 0 < policy_steps <= args.no_prompt_steps:
        flag = f"--no-prompt-steps {args.no_prompt_steps}"
        print(f"{flag}: the run ends before it learns from prompts")

    scores = {}
    while True:
        due = step > world_model_steps and is_due(args.eval_steps, step, args.log_steps)
        last = step >= last_step
        if last or due:
            scores = evaluate(agent, data, make_env, args)
            log(run_dir, board, step, scores)
        if last:
            return scores
        began = time.perf_counter()
        sums = {}
        for i in range(step, step + args.log_steps):
            torch.manual_seed(random_seed(args.seed, i))  # so that a resumed run goes on the same

            # 1. train the world model
            if i < world_model_steps:
                losses = update_world_model(agent, optimizers["world_model"], data.train, args)

            # 2. no optimizer touches it any more: contexts of all episodes, errors for prompts
            else:
                if data.train.contexts is None:
                    agent.encode(data.train)

                # 3. train the policy
                policy_step = i - world_model_steps
                losses = update_policy(agent, optimizers["policy"], data, policy_step, args)
            for name, value in losses.items():
                sums[name] = sums.get(name, 0) + value

        # 4. log and save
        step += args.log_steps
        metrics = {f"losses/{name}": float(value) / args.log_steps for name, value in sums.items()}
        if not math.isfinite(sum(metrics.values())):
            sys.exit("a loss is not finite: try a lower --learning-rate; checkpoints are kept")
        metrics["charts/SPS"] = args.log_steps / (time.perf_counter() - began)
        log(run_dir, board, step, metrics)
        report(step, last_step, metrics)
        due = is_due(args.save_steps, step, args.log_steps)
        if args.save_steps and (step == last_step or due):
            state = {"step": step, "agent": agent.state_dict()}
            state |= {name: optimizer.state_dict() for name, optimizer in optimizers.items()}
            save_checkpoint(run_dir, step, state)


def uses_world_model(args: Args) -> bool:
    """Whether contexts or prompts come from it."""
    return args.prompt in ("self_guided", "released") or args.context in ("running", "episode")


def count_world_model_steps(args: Args) -> int:
    """Gradient steps of the world model, after which the policy is trained."""
    return up_to_multiple(args.world_model_steps, args.log_steps) if uses_world_model(args) else 0


def looks_back(args: Args) -> bool:
    """Whether the policy acts by an earlier episode of the task."""
    return args.prompt != "none" or args.context == "episode"


def update_world_model(agent, optimizer, episodes, args):
    """One gradient step with B transitions and the steps before them. -> metrics"""
    device = episodes.lengths.device
    rows = torch.randint(len(episodes.lengths), (NUM_TRANSITIONS,), device=device)
    now = (torch.rand(NUM_TRANSITIONS, device=device) * episodes.lengths[rows]).long()
    earlier = now[:, None] + torch.arange(-args.horizon, 0, device=device)  # (B,h)
    exists = earlier >= 0
    at = rows[:, None], earlier.clamp(min=0)
    states = episodes.states[at] * exists[..., None]
    actions = episodes.actions[at] * exists[..., None]
    contexts = agent.encoder(states, actions, episodes.rewards[at] * exists)  # (B,Z)

    errors = agent.prediction_errors(episodes, (rows, now), contexts)
    loss = errors.square().mean()
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()
    return {"world_model_loss": loss.detach(), "world_model_grad_norm": norm}


def update_policy(agent, optimizer, data, policy_step, args):
    """One gradient step with windows of B episodes, and prompts from other ones. -> metrics"""
    episodes = data.train
    device = episodes.lengths.device
    K = min(args.window_length, data.num_steps)
    rows = torch.randint(len(episodes.lengths), (args.batch_size,), device=device)
    # the window: any that lies in the episode, all of it if it is short
    latest = (episodes.lengths[rows] - K).clamp(min=0)
    starts = (torch.rand(len(rows), device=device) * (latest + 1)).long()
    window = segments(episodes, rows, starts, K)

    # any other episode of the same task: go 1 to count - 1 places on, in a circle
    count = data.counts[rows]
    shift = 1 + (torch.rand(len(rows), device=device) * (count - 1)).long()
    others = data.firsts[rows] + (rows - data.firsts[rows] + shift) % count
    has_prompt = torch.rand(len(rows), device=device) >= NO_PROMPT
    prompt = None
    if args.prompt != "none" and policy_step >= args.no_prompt_steps:
        prompt = make_prompt(episodes, others, args)
        prompt["mask"] &= has_prompt[:, None]

    # what the policy knows of the task
    if args.context == "running":
        contexts = window["contexts"]
    elif args.context == "episode":
        contexts = episodes.mean_contexts[others] * has_prompt[:, None]
    elif args.context == "goal":
        contexts = agent.goal_contexts(episodes.tasks[rows])
    else:
        contexts = torch.zeros(len(rows), args.context_dim, device=device)
    if contexts.dim() == 2:  # the same in all steps
        contexts = contexts[:, None].expand(-1, K, -1)

    inputs = {name: window[name] for name in ("states", "actions", "rtg", "timesteps", "mask")}
    predicted = agent.policy(contexts=contexts, prompt=prompt, **inputs)
    loss = policy_loss(predicted, window["actions"], window["mask"])
    for group in optimizer.param_groups:
        group["lr"] = args.learning_rate * min(1, (policy_step + 1) / max(1, args.warmup_steps))
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(agent.policy.parameters(), 0.25)
    optimizer.step()
    return {"policy_loss": loss.detach(), "policy_grad_norm": norm}


def make_prompt(episodes, rows, args) -> dict[str, Tensor]:
    """k steps of each of these episodes, rows (B,)."""
    errors = episodes.errors[rows]  # (B,T,D)
    if args.prompt == "random":
        errors = torch.ones_like(errors)
    lengths = episodes.lengths[rows]
    probabilities = prompt_start_probabilities(errors, args.horizon, args.prompt_length, lengths)
    if args.prompt == "self_guided":
        choice = probabilities.argmax(-1)
    else:
        choice = probabilities.multinomial(1)[:, 0]
    # where an episode is too short for these starts, its last k steps, or all of it
    starts = torch.minimum(args.horizon + choice, (lengths - args.prompt_length).clamp(min=0))
    return segments(episodes, rows, starts, args.prompt_length)


@torch.no_grad()
def evaluate(agent, data, make_env, args) -> dict[str, float]:
    """Learners meet training tasks and new ones: a first episode without prompt (zero-shot), then
    some with a prompt from one of the best of their own episodes so far, or of the recorded ones.
    -> returns, means over tasks
    """
    if args.eval_episodes == 0:
        return {}
    agent.eval()
    scores = {}
    for part, episodes in (("new", data.new), ("train", data.train)):
        if episodes.contexts is None:
            agent.encode(episodes)
        if uses_world_model(args):
            error = episodes.errors[episodes.mask].mean() * agent.error_unit
            scores[f"eval/{part}/world_model_error"] = error.item()
    if make_env is not None:
        torch.manual_seed(random_seed(args.seed, "evaluation"))
        tasks = data.tasks.repeat(args.eval_episodes, 1)  # (N,G)
        targets = data.targets.repeat(args.eval_episodes)  # (N,)
        envs = make_env(tasks.cpu().numpy())
        columns = torch.arange(len(tasks), device=tasks.device)
        own = play(agent, envs, tasks, targets, None, None, data, args)
        rounds = [own.returns]
        for _ in range(args.eval_rounds if looks_back(args) else 0):
            if args.few_shot == "own":
                best = torch.stack(rounds).topk(min(BEST, len(rounds)), 0).indices  # (best,N)
                pool = own
                candidates = best * len(tasks) + columns  # round r of robot n is row r * N + n
            else:
                pool = join([data.train, data.new])
                candidates = data.best.repeat(1, args.eval_episodes)  # (best,N)
            drawn = torch.randint(len(candidates), columns.shape, device=columns.device)
            rows = candidates[drawn, columns]
            prompt = make_prompt(pool, rows, args) if args.prompt != "none" else None
            contexts = pool.mean_contexts[rows]
            new = play(agent, envs, tasks, targets, prompt, contexts, data, args, len(rounds))
            rounds.append(new.returns)
            own = join([own, new])
        returns = torch.stack(rounds).view(len(rounds), args.eval_episodes, -1).mean(1)  # of tasks
        values = {"zero_shot_return": returns[0], "target_return": data.targets}
        if len(rounds) > 1:
            values["few_shot_return"] = returns[-1]
        if hasattr(envs, "best_returns"):
            best = np.float64(envs.best_returns()[: len(data.tasks)])
            values["optimal_return"] = torch.from_numpy(best)
        for name, value in values.items():
            scores[f"eval/new/{name}"] = value[data.num_train :].mean().item()
            scores[f"eval/train/{name}"] = value[: data.num_train].mean().item()
    agent.train()
    for part in ("new", "train"):
        shown = [f"{k[5:]} {v:.2f}" for k, v in scores.items() if k.startswith(f"eval/{part}/")]
        if shown:
            print("  ".join(shown), flush=True)
    return scores


@torch.no_grad()
def play(agent, envs, tasks, targets, prompt, other_contexts, data, args, turn=0) -> Episodes:
    """One episode in each of N environments. tasks (N,G), targets (N,), prompt of N rows or None,
    other_contexts (N,Z) or None, those of the prompts' episodes; each turn has a seed of its own
    """
    device = tasks.device
    N, T, K = len(tasks), data.train.states.shape[1], args.window_length
    observations = envs.reset(random_seed(args.seed, "episodes", turn) % 2**31)
    states = torch.zeros(N, T + 1, observations.shape[1], device=device)
    states[:, 0] = agent.normalize(observations)
    actions = torch.zeros(N, T, len(agent.action_scale), device=device)
    rewards = torch.zeros(N, T, device=device)
    wanted = torch.zeros(N, T + 1, 1, device=device)  # return-to-go that the policy is asked for
    wanted[:, 0, 0] = targets / agent.return_scale
    contexts = torch.zeros(N, T, args.context_dim, device=device)
    if args.context == "goal":
        contexts += agent.goal_contexts(tasks)[:, None]
    if args.context == "episode" and other_contexts is not None:
        contexts += other_contexts[:, None]
    timesteps = torch.arange(T, device=device).expand(N, T)
    unfinished = np.full(N, True)
    lengths = np.zeros(N, np.int64)
    for t in range(data.num_steps):
        if args.context == "running":
            earlier = slice(max(0, t - args.horizon), t)
            # zeros in place of steps before the first
            missing = (0, 0, max(0, args.horizon - t), 0)
            s, a = F.pad(states[:, earlier], missing), F.pad(actions[:, earlier], missing)
            r = F.pad(rewards[:, earlier, None], missing)[..., 0]
            contexts[:, t] = agent.encoder(s, a, r)
        window = slice(max(0, t + 1 - K), t + 1)
        steps = states[:, window], contexts[:, window], actions[:, window], wanted[:, window]
        chosen = agent.policy(*steps, timesteps[:, window], prompt=prompt)[:, -1]
        actions[:, t] = chosen  # zeros stood there, in a token after the one that was read
        observations, reward, dones = envs.step((chosen * agent.action_scale).cpu().numpy())
        check_finite(args.env_id, observations=observations, rewards=reward)
        reward = torch.as_tensor(reward * unfinished).float().to(device)
        states[:, t + 1] = agent.normalize(observations)
        rewards[:, t] = reward / agent.reward_scale
        wanted[:, t + 1, 0] = wanted[:, t, 0] - reward / agent.return_scale
        lengths += unfinished
        unfinished &= ~np.asarray(dones, bool)
        if not unfinished.any():
            break
    gained = rewards * agent.reward_scale
    episodes = Episodes(
        states=states[:, :-1],
        actions=actions,
        rewards=rewards,
        next_states=states[:, 1:],
        lengths=torch.as_tensor(lengths).to(device),
        tasks=tasks,
        returns=gained.sum(1),
        rtg=returns_to_go(gained)[..., None] / agent.return_scale,  # what it got, for prompts
    )
    agent.encode(episodes)
    return episodes


# ================================================================================================
# Below: networks together, data and its checks, environments, checkpoints and logs.
# ================================================================================================


# --- Episodes and networks ----------------------------------------------------------------------


@dataclass
class Episodes:
    """E episodes of up to T steps, on one scale; what lies past an episode's end does not count."""

    states: Tensor  # (E,T,S)
    actions: Tensor  # (E,T,A)
    rewards: Tensor  # (E,T)
    next_states: Tensor  # (E,T,S)
    lengths: Tensor  # (E,)
    tasks: Tensor  # (E,G)
    returns: Tensor  # (E,), in the task's unit
    rtg: Tensor  # (E,T,1)
    # what the world model makes of them, see Agent.encode
    contexts: Tensor | None = None  # (E,T,Z)
    mean_contexts: Tensor | None = None  # (E,Z)
    errors: Tensor | None = None  # (E,T,1), or (E,T,S) of states

    @property
    def mask(self) -> Tensor:
        """Which steps exist. (E,T)"""
        steps = torch.arange(self.states.shape[1], device=self.lengths.device)
        return steps < self.lengths[:, None]


def join(parts: list[Episodes]) -> Episodes:
    """The episodes of all parts, one after the other."""
    names = [field.name for field in fields(Episodes)]
    return Episodes(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def segments(episodes: Episodes, rows: Tensor, starts: Tensor, length: int) -> dict[str, Tensor]:
    """`length` steps of these episodes, rows and starts (B,). The mask is 0 past an end."""
    steps = starts[:, None] + torch.arange(length, device=starts.device)
    mask = steps < episodes.lengths[rows][:, None]
    steps = steps.clamp(max=episodes.states.shape[1] - 1)
    at = rows[:, None], steps
    return {
        "states": episodes.states[at],
        "actions": episodes.actions[at],
        "rtg": episodes.rtg[at],
        "timesteps": steps,
        "mask": mask,
        "contexts": episodes.contexts[at],
    }


class Agent(nn.Module):
    """World model and policy, and the numbers that bring data and tasks to one scale."""

    def __init__(self, data: Data, args: Args):
        super().__init__()
        self.predicts_reward = args.world_model == "reward"
        self.horizon = args.horizon
        state_dim, action_dim = data.train.states.shape[-1], data.train.actions.shape[-1]
        sizes = state_dim, action_dim, args.context_dim
        decoder = RewardDecoder if self.predicts_reward else StateDecoder
        T = data.train.states.shape[1]
        self.encoder = ContextEncoder(*sizes, HIDDEN_DIM)
        self.decoder = decoder(*sizes, HIDDEN_DIM)
        self.policy = MetaDecisionTransformer(
            *sizes, args.embed_dim, T, n_layer=args.num_layers, dropout=args.dropout
        )
        for name, values in data.scales.items():
            self.register_buffer(name, values.clone())

    @property
    def error_unit(self) -> Tensor | float:
        """Errors of rewards in the task's unit; of states in stds."""
        return self.reward_scale if self.predicts_reward else 1.0

    def normalize(self, observations: np.ndarray) -> Tensor:
        """(N,S) of the task -> (N,S) on the device"""
        states = torch.as_tensor(np.float32(observations)).to(self.state_mean.device)
        return (states - self.state_mean) / self.state_std

    def goal_contexts(self, tasks: Tensor) -> Tensor:
        """The task itself in the place of z. (N,G) -> (N,Z)"""
        goals = (tasks - self.task_mean) / self.task_std
        missing = self.encoder.context_output.out_features - goals.shape[-1]
        return F.pad(goals, (0, missing))

    def prediction_errors(self, episodes: Episodes, at, contexts: Tensor) -> Tensor:
        """Of the world model at these places of the episodes. -> (...,1), or (...,S) of states"""
        states, actions = episodes.states[at], episodes.actions[at]
        if self.predicts_reward:
            predicted = self.decoder(states, actions, episodes.next_states[at], contexts)
            return predicted - episodes.rewards[at][..., None]
        return self.decoder(states, actions, contexts) - episodes.next_states[at]

    @torch.no_grad()
    def encode(self, episodes: Episodes) -> None:
        """Fill in contexts, their means over an episode, and absolute errors, in batches of 100."""
        contexts, errors = [], []
        for rows in torch.arange(len(episodes.lengths)).split(100):
            at = slice(int(rows[0]), int(rows[-1]) + 1)
            steps = episodes.states[at], episodes.actions[at], episodes.rewards[at]
            contexts.append(self.encoder.every_step(*steps, self.horizon))
            errors.append(self.prediction_errors(episodes, at, contexts[-1]).abs())
        episodes.contexts = torch.cat(contexts)
        episodes.errors = torch.cat(errors)
        weights = episodes.mask[..., None] / episodes.lengths[:, None, None]
        episodes.mean_contexts = (episodes.contexts * weights).sum(1)


# --- Data ---------------------------------------------------------------------------------------


@dataclass
class Data:
    """Episodes of training tasks and of new ones, and their tasks."""

    train: Episodes
    new: Episodes
    num_train: int
    num_new: int
    tasks: Tensor  # (tasks,G), first those of training
    targets: Tensor  # (tasks,), returns to ask for
    firsts: Tensor  # (E,), the first episode of the same task, in train
    counts: Tensor  # (E,), how many episodes that task has
    best: Tensor  # (best,tasks), episodes with the highest returns, those of new tasks after train
    num_steps: int  # of the longest episode; T, unless the run of --evaluate knows longer ones
    scales: dict[str, Tensor]  # see Agent


COLUMNS = "observations actions rewards next_observations dones task".split()


def load_data(args: Args, device: torch.device, trained: dict[str, Tensor] | None = None) -> Data:
    """The files of --data, or Point-Robot, on their own scales, or on those of a trained agent."""
    if args.data is None:
        files = make_point_robot(args)
    else:
        files = {part: read_folder(Path(args.data, part)) for part in ("train", "new")}
    for part, named in files.items():
        for name, file in named:
            check_file(part, name, file, files["train"][0], args)
    tasks = {part: [file for _, file in named] for part, named in files.items()}
    every = tasks["train"] + tasks["new"]
    T = num_steps = max(int(np.diff(episode_ends(file), prepend=-1).max()) for file in every)

    train = {name: np.concatenate([file[name] for file in tasks["train"]]) for name in COLUMNS[:3]}
    parameters = np.float32([file["task"] for file in every])
    returns = [[rewards.sum() for rewards in in_episodes(file, "rewards")] for file in every]
    largest = max(np.abs(np.concatenate(returns[: len(tasks["train"])])).max(), 1e-6)
    numbers = {
        "state_mean": train["observations"].mean(0),
        "state_std": spread(train["observations"]),
        "action_scale": np.abs(train["actions"]).max(0) + 1e-6,
        "reward_scale": spread(train["rewards"]),
        "return_scale": args.return_scale or largest,
        "task_mean": parameters[: len(tasks["train"])].mean(0),
        "task_std": spread(parameters[: len(tasks["train"])]),
    }
    scales = {name: torch.tensor(np.float32(numbers[name])) for name in SCALES}
    if trained is not None:
        T = check_sizes(T, scales, trained)
        scales = {name: trained[name] for name in SCALES}
    if args.prompt != "none" and T < args.horizon + args.prompt_length:
        sys.exit(f"--horizon + --prompt-length: the longest episode has {T} steps, too few")
    if args.target_return is None:
        targets = [max(values) for values in returns]
    else:
        targets = [args.target_return] * len(every)
    counts = torch.tensor([len(values) for values in returns])
    firsts = counts.cumsum(0) - counts
    best = [np.argsort(values)[::-1][:BEST] + int(i) for values, i in zip(returns, firsts)]
    best = [np.resize(rows, BEST) for rows in best]  # fewer episodes are repeated
    train_counts, train_firsts = counts[: len(tasks["train"])], firsts[: len(tasks["train"])]
    return Data(
        train=to_episodes(tasks["train"], scales, T, device),
        new=to_episodes(tasks["new"], scales, T, device),
        num_train=len(tasks["train"]),
        num_new=len(tasks["new"]),
        tasks=torch.from_numpy(parameters).to(device),
        targets=torch.tensor(targets, dtype=torch.float32, device=device),
        firsts=train_firsts.repeat_interleave(train_counts).to(device),
        counts=train_counts.repeat_interleave(train_counts).to(device),
        best=torch.tensor(np.stack(best, 1), device=device),
        num_steps=num_steps,
        scales=scales,
    )


def spread(values: np.ndarray):
    """Standard deviation of the rows, or 1 where all are equal."""
    std = values.std(0)
    return np.where(std < 1e-6, 1.0, std + 1e-6)


def check_sizes(T: int, scales: dict[str, Tensor], trained: dict[str, Tensor]) -> int:
    """The length of episodes that a trained agent knows. Exit if it does not fit the data."""
    known = len(trained["policy.embed_timestep.weight"])
    if T > known:
        sys.exit(f"--data: episodes of up to {T} steps, the run knows at most {known}")
    names = {"state_mean": "observations", "action_scale": "actions", "task_mean": "task"}
    for name, column in names.items():
        if len(scales[name]) != len(trained[name]):
            counts = f"{len(scales[name])} numbers, the run has learned from {len(trained[name])}"
            sys.exit(f"--data: {column} of {counts}")
    return known


def check_flags(args: Args) -> None:
    """Exit if a flag has a value that makes no sense, or needs another flag."""
    for name in ("return_scale", "learning_rate"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            sys.exit(f"--{name.replace('_', '-')} {value}: must be above 0")
    if not 0 <= args.dropout < 1:
        sys.exit(f"--dropout {args.dropout}: must be at least 0 and below 1")
    if args.data is not None and args.env_id is None:
        names = ", ".join(ENVS)
        sys.exit(f"--data {args.data}: needs --env-id {names}, FILE.py:Class, or none")
    if args.data is None and args.env_id == "cheetah_velocity":
        sys.exit("--env-id cheetah_velocity: needs --data, the default data are Point-Robot's")
    starts = not (args.evaluate or args.resume)
    if args.few_shot == "recorded" and not looks_back(args) and starts:
        sys.exit("--few-shot recorded: no effect with --prompt none; take --few-shot own")


def load_evaluated(args: Args) -> dict:
    """The checkpoint of --evaluate. Exit if it does not have these flags, or no trained policy."""
    saved = Args(**json.loads(Path(args.evaluate, "args.json").read_text()))
    names = "world_model context horizon prompt_length window_length context_dim embed_dim"
    names += " num_layers return_scale" + " seed" * (args.data is None)  # of the data made here
    if saved.prompt == "none" or not uses_world_model(saved):
        names += " prompt" * (args.prompt != "none")  # else it knows any, as well as none
    for name in names.split():
        before = getattr(saved, name)
        if getattr(args, name) != before:
            flag = f"--{name.replace('_', '-')} {getattr(args, name)}"
            sys.exit(f"{flag}: cannot change with --evaluate, the run began with {before}")
    state = load_checkpoint(args.evaluate, torch.device("cpu"))
    if state is None:
        sys.exit(f"{args.evaluate}: no checkpoint; --save-steps 0 keeps none, or too early")
    if saved.policy_steps and state["step"] <= count_world_model_steps(saved):
        sys.exit(
            f"{args.evaluate}: stopped at step {state['step']}, before the policy's first step; "
            f"go on with --resume {args.evaluate}"
        )
    num_policy_steps = state["step"] - count_world_model_steps(saved)
    if args.prompt != "none" and 0 < num_policy_steps <= saved.no_prompt_steps:
        flag = f"--no-prompt-steps {saved.no_prompt_steps}"
        sys.exit(f"{args.evaluate}: has not learned from prompts ({flag}); take --prompt none")
    return state


def make_point_robot(args: Args) -> dict[str, list]:
    """Data of the repository's task, from the seed."""
    if find_spec("envs") is None:
        sys.exit(
            "the default data needs the folder envs/ of the repository beside this script; "
            "without it, give --data FOLDER and --env-id FILE.py:Class or none"
        )
    from envs.point_robot import make_data

    data = make_data(args.seed)
    return {part: [(f"{part}/{i}", x) for i, x in enumerate(tasks)] for part, tasks in data.items()}


def read_folder(folder: Path) -> list[tuple[str, dict]]:
    """Name and arrays of every file."""
    paths = sorted(folder.glob("*.npz"))
    if not paths:
        sys.exit(f"--data: {folder} holds no .npz file; tasks lie in its folders train and new")
    files = []
    for path in paths:
        try:
            with np.load(path) as arrays:
                file = {name: arrays[name] for name in COLUMNS if name in arrays}
        except Exception as error:  # of zip files, of pickle
            sys.exit(f"{path}: cannot be read as arrays of NumPy ({error!s:.100})")
        missing = [name for name in COLUMNS if name not in file]
        if missing:
            sys.exit(f"{path}: has no {missing[0]}; it needs {', '.join(COLUMNS)}")
        files.append((str(path), file))
    return files


def check_file(part: str, name: str, file: dict, compared: tuple[str, dict], args: Args) -> None:
    """Exit in a sentence if something is wrong with the data of a task, or unlike the first's."""
    first_name, first = compared
    for key, dimensions in zip(COLUMNS, (2, 2, 1, 2, 1, 1)):
        values = file[key] = np.asarray(file[key])
        if values.dtype.kind not in "fiub" or not np.isfinite(values.astype(np.float64)).all():
            sys.exit(f"{name}: the numbers of {key} are not all finite")
        if values.ndim != dimensions:
            advice = "a file has the steps of all its episodes in one row: states and actions, "
            advice += "one-hot if discrete, are (steps,numbers), rewards and dones (steps,)"
            if key == "task":
                advice = "a single number has the shape (1,)"
            sys.exit(
                f"{name}: the shape of {key} is {values.shape}, expected {dimensions} dimensions; "
                f"{advice}"
            )
        if key != "task" and len(values) != len(file["observations"]):
            count = len(file["observations"])
            sys.exit(f"{name}: {len(values)} {key}, but {count} observations; one of each a step")
        if values.shape[1:] != first[key].shape[1:] or (
            key == "task" and values.shape != first[key].shape
        ):
            shapes = f"{values.shape}, in {first_name} it is {first[key].shape}"
            sys.exit(f"{name}: the shape of {key} is {shapes}")
    file["dones"] = file["dones"].astype(bool)
    if file["observations"].shape != file["next_observations"].shape:
        sys.exit(f"{name}: observations and next_observations differ in their shapes")
    if len(file["dones"]) == 0 or not file["dones"][-1]:
        sys.exit(f"{name}: its last step is not done; mark the end of every episode")
    if part == "train" and looks_back(args) and file["dones"].sum() < 2:
        sys.exit(f"{name}: one episode only; a prompt needs another one of the task")
    inside = ~file["dones"][:-1]
    if not np.allclose(
        file["next_observations"][:-1][inside], file["observations"][1:][inside], atol=1e-4
    ):
        sys.exit(f"{name}: next_observations must be the next step's observations, except at dones")
    if args.context == "goal" and file["task"].size > args.context_dim:
        sys.exit(
            f"{name}: task has {file['task'].size} numbers, above --context-dim {args.context_dim}"
        )


def episode_ends(file: dict) -> np.ndarray:
    """Numbers of the last steps."""
    return np.flatnonzero(file["dones"])


def in_episodes(file: dict, name: str) -> list[np.ndarray]:
    """A column, cut into episodes."""
    return np.split(file[name], episode_ends(file)[:-1] + 1)


def to_episodes(files: list[dict], scales: dict[str, Tensor], T: int, device) -> Episodes:
    """Steps of tasks -> their episodes, padded with zeros to T steps."""

    def padded(name: str) -> Tensor:
        episodes = [torch.from_numpy(np.float32(x)) for f in files for x in in_episodes(f, name)]
        rows = nn.utils.rnn.pad_sequence(episodes, batch_first=True)
        return F.pad(rows, (0, 0) * (rows.dim() - 2) + (0, T - rows.shape[1]))

    rewards = padded("rewards")
    lengths = torch.tensor([len(x) for file in files for x in in_episodes(file, "rewards")])
    mask = torch.arange(T) < lengths[:, None]
    tasks = [np.float32(file["task"]) for file in files for _ in episode_ends(file)]
    mean, std = scales["state_mean"], scales["state_std"]
    episodes = Episodes(
        states=(padded("observations") - mean) / std * mask[..., None],
        actions=padded("actions") / scales["action_scale"],
        rewards=rewards / scales["reward_scale"],
        next_states=(padded("next_observations") - mean) / std * mask[..., None],
        lengths=lengths,
        tasks=torch.from_numpy(np.stack(tasks)),
        returns=rewards.sum(1),
        rtg=returns_to_go(rewards)[..., None] / scales["return_scale"],
    )
    tensors = {field.name: getattr(episodes, field.name) for field in fields(Episodes)}
    return Episodes(**{k: None if v is None else v.to(device) for k, v in tensors.items()})


# --- Environments -------------------------------------------------------------------------------


def load_env(args: Args):
    """The class of --env-id: called with tasks (N,G), it has reset(seed) and step(actions)."""
    if args.env_id == "none":
        return None
    if args.env_id not in ENVS:
        if ".py:" not in args.env_id:
            names = ", ".join(ENVS)
            sys.exit(f"--env-id {args.env_id}: expected {names}, FILE.py:Class, or none")
        return load_function(args.env_id)
    if find_spec("envs") is None:
        sys.exit(
            f"--env-id {args.env_id}: needs the folder envs/ of the repository beside this script; "
            "without it, take FILE.py:Class, or none"
        )
    module, name = ENVS[args.env_id]
    return getattr(importlib.import_module(module), name)


def check_env(args: Args, make_env, data: Data) -> None:
    """Exit if the environment does not fit the data, after a first step of two robots."""
    if make_env is None:
        return
    tasks = data.tasks[[0, -1]].cpu().numpy()
    S, A = data.train.states.shape[-1], data.train.actions.shape[-1]
    check_call(args, make_env, "CLASS(tasks)")
    envs = make_env(tasks)
    start = f"--env-id {args.env_id}: for 2 tasks"
    check_call(args, getattr(envs, "reset", None), "reset(seed)")
    check_call(args, getattr(envs, "step", None), "step(actions)")
    first = envs.reset(0)
    shape = getattr(first, "shape", type(first).__name__)
    if shape != (2, S):
        sys.exit(
            f"{start} reset gives {shape}, the data ask for {(2, S)}, "
            "an array of observations; --env-id none trains without an environment"
        )
    check_finite(args.env_id, observations=first)
    result = envs.step(np.zeros((2, A), np.float32))
    if not isinstance(result, tuple) or len(result) != 3:
        sys.exit(f"--env-id {args.env_id}: step gives no (observations, rewards, dones)")
    found = [np.shape(values) for values in result]
    if found != [(2, S), (2,), (2,)]:
        sys.exit(f"{start} step gives {found}, expected {[(2, S), (2,), (2,)]}")
    check_finite(args.env_id, observations=result[0], rewards=result[1])
    if hasattr(envs, "best_returns"):
        best = envs.best_returns()
        if np.shape(best) != (2,):
            sys.exit(f"{start} best_returns gives {np.shape(best)}, expected (2,)")
        check_finite(args.env_id, best_returns=best)


def check_call(args: Args, function, call: str) -> None:
    """Exit if it cannot be called like this."""
    try:
        inspect.signature(function).bind(None)
    except ValueError:
        pass  # built in: it does not say what it takes
    except TypeError:
        sys.exit(f"--env-id {args.env_id}: the call {call} must be possible, see meta_dt.md")


def load_function(path: str):
    """The function of FILE.py:function."""
    file, name = path.rsplit(":", 1)
    if not os.path.isfile(file):
        sys.exit(f"{path}: there is no file {file}")
    sys.path.append(os.path.dirname(file))  # so that the file can import its neighbours
    names = runpy.run_path(file)
    if name not in names:
        sys.exit(f"{path}: the file has no function {name!r}")
    return names[name]


def check_finite(env_id: str, **arrays) -> None:
    """Exit if a task gives NaN, infinity or None."""
    for name, values in arrays.items():
        if not np.isfinite(np.asarray(values, np.float64)).all():
            sys.exit(f"--env-id {env_id}: its {name} are not finite numbers; mend the task")


# --- Processes, checkpoints, logs ---------------------------------------------------------------


def setup(args: Args, **lowest: int) -> torch.device:
    """The device. Exit if a flag is below its lowest value.

    One thread: small networks are slower with more of them.
    """
    for name, least in lowest.items():
        value = getattr(args, name)
        if value is not None and not value >= least:  # also if it is NaN
            sys.exit(f"--{name.replace('_', '-')} {value}: must be at least {least}")
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: torch finds no CUDA device here; use --device auto or cpu")
    torch.set_num_threads(1)
    use_cuda = args.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if use_cuda else "cpu")


def random_seed(*names) -> int:
    """A seed made of names: the same in a run that was stopped and continued."""
    return random.Random(" ".join(map(str, names))).getrandbits(63)


def checkpoints(run_dir: str) -> list[Path]:
    """Checkpoint files, oldest first."""
    return sorted(Path(run_dir).glob("checkpoints/step_*.pt"))


def save_checkpoint(run_dir: str, step: int, state: dict) -> None:
    """Write a new file; the newest two are kept. A kill leaves no half file under a good name.

    Random states are not saved: after a checkpoint, games and random numbers start anew from a
    seed made of --seed and the step, in a run that goes on as in one that is resumed.
    """
    path = Path(run_dir, "checkpoints", f"step_{step:012d}.pt")
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    torch.save(state, unfinished)
    os.replace(unfinished, path)
    for old in checkpoints(run_dir)[:-2]:
        old.unlink()


def load_checkpoint(run_dir: str, device: torch.device) -> dict | None:
    """The newest checkpoint, or None if the run was stopped before its first."""
    found = checkpoints(run_dir)
    if not found:
        return None
    try:
        return torch.load(found[-1], map_location=device, weights_only=True)
    except Exception as error:  # of the disk, of zip files, of pickle
        rest = f"goes on from {found[-2].name}" if len(found) > 1 else "begins anew"
        sys.exit(f"{found[-1]}: damaged; delete it, and the run {rest} ({error!s:.200})")


def open_run(args: Args, game: str) -> str:
    """The run folder, made if it is new."""
    name = f"{Path(__file__).stem}__{game}__{args.seed}__{time.time():.0f}_{os.getpid()}"
    run_dir = args.resume or args.output_dir or f"runs/{name}"
    path = Path(run_dir, "args.json")
    if not args.resume and (path.exists() or checkpoints(run_dir)):
        sys.exit(f"--output-dir {run_dir}: holds a run; continue it with --resume {run_dir}")
    try:
        os.makedirs(run_dir, exist_ok=True)
    except OSError as error:
        sys.exit(f"--output-dir {run_dir}: cannot be made ({error.strerror})")
    if args.resume and not checkpoints(run_dir):
        print(f"--resume {run_dir}: has no checkpoint, so the run begins at step 0")
    metrics = Path(run_dir, "metrics.csv")
    if metrics.exists():  # its last row may be cut off
        os.truncate(metrics, metrics.read_bytes().rfind(b"\n") + 1)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(asdict(replace(args, resume=None)), indent=1))
    os.replace(unfinished, path)
    return run_dir


def log(run_dir: str, board: SummaryWriter, step: int, values: dict[str, float]) -> None:
    """Add to TensorBoard and metrics.csv. A resumed run may repeat steps: their last rows count."""
    with open(f"{run_dir}/metrics.csv", "a", encoding="utf-8") as file:
        if file.tell() == 0:
            file.write("step,tag,value\n")
        for tag, value in values.items():
            file.write(f"{step},{tag},{value}\n")
            board.add_scalar(tag, value, step)
    board.flush()


def is_due(every: int, step: int, size: int) -> bool:
    """Whether a multiple of `every`, also 0, lies in the last `size` steps; 0 is never."""
    return every > 0 and step // every > (step - size) // every


def up_to_multiple(count: int, size: int) -> int:
    """Rounded up."""
    return -(-count // size) * size


def report(step: int, last_step: int, metrics: dict[str, float]) -> None:
    """Print a summary of under 80 columns; once the policy trains, with the time that is left."""
    ((name, loss),) = [(k, v) for k, v in metrics.items() if k.endswith("_loss")]
    speed = metrics["charts/SPS"]
    left = round((last_step - step) / speed)
    name = name.removeprefix("losses/").replace("_", " ")
    line = f"step {step:>7,}/{last_step:,}  {name} {loss:.5f}  {speed:6,.1f} steps/s"
    if name == "policy loss":  # the world model's steps are quicker
        line += f"  {left // 60:.0f}:{left % 60:02.0f} left"
    print(line, flush=True)


# --- Command line -------------------------------------------------------------------------------


def parse_args() -> Args:
    """The command line; with --resume or --evaluate, the flags of that run are its defaults."""
    args = tyro.cli(Args)
    run_dir = args.resume or args.evaluate
    if not run_dir:
        return args
    if args.resume and args.evaluate:
        sys.exit("--resume and --evaluate: give one of them")
    try:
        saved = Args(**json.loads(Path(run_dir, "args.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        sys.exit(f"{run_dir}: no run folder, or of another version of this script ({error})")
    args = tyro.cli(Args, default=saved)
    for name, before in asdict(saved).items():
        now = getattr(args, name)
        flag = "--" + name.replace("_", "-")
        if now != before and args.resume and name in FIXED.split():
            sys.exit(f"{flag} {now}: cannot change on resume, the run began with {before}")
        if now != before and name not in SILENT.split():
            print(f"{flag} {now}: the run began with {before}", flush=True)
    return args


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a console may lack a letter
    try:
        train(parse_args())
    except Exception as error:  # checkpoints and logs can fail for lack of space
        reasons = ["No space left on device", "Disk quota exceeded", "File too large"]
        reasons += ["unexpected pos", "failed writing"]  # what torch.save says
        if any(reason in str(error) for reason in reasons):
            sys.exit(f"the disk is full ({error!s:.99}): make room, go on with --resume RUN_DIR")
        raise
