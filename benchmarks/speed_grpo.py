r"""How fast is a step of algorithms/grpo.py next to a step of TRL's GRPOTrainer on the same work? On a CPU, one thread.

    pip install trl==1.16.0                                      # needed only here
    OMP_NUM_THREADS=1 python benchmarks/speed_grpo.py --compile --naive --peer-micro-batches 16 32 64 128 \
        --csv benchmarks/results/speed_grpo.csv                  # about 15 minutes; nothing else should run

TRL runs its own `trainer.train()`. Between its steps a callback runs our arms on the same prompts, so that both sides
meet the same state of the machine; the order of our arms rotates. Same weights, prompts, completion limit, rewards,
loss (dapo, beta 0, one iteration), clipping at 1.0 and fused AdamW; the learning rate is 0, so that the policy of every
step is the policy of the first. Each side samples its own completions. A TRL step is the time from the end of our
callback to its next `on_step_end`; our step is rollout, metrics, advantages and update: the functions that the script
runs, imported from it. TRL runs as fast as it can on a CPU: float32, no gradient checkpointing, plain generate, and the
fastest of `--peer-micro-batches`. A row of the table is the median over steps of (TRL / ours) in process CPU time.

Arms:
  default   as shipped: groups whose rewards are all equal are left out of the update, which is exact
  no_skip   --no-skip-equal-groups: all rows are trained, so that the ratio does not depend on the rewards
  compile, compile_no_skip   (--compile) the same with the body of the update compiled
  naive     (--naive) what one would write first: `generate`, padded forward in micro-batches of 64

Cases, all on the tiny Countdown model:
  A  short, even completions: 64 prompts x 8, the model tuned for a minute on demonstrations with one try
  B  long-tailed completions: 64 prompts x 8, the model as shipped, which tries one to three times
  C  as B with 8 prompts x 8
  D  long prompts: the model of A with worked examples in front (144 tokens or more), 8 prompts x 8

Gate, in the same process before the times of a case; where it fails the exit code is 1 and nothing is timed:
  greedy tokens of our `generate` equal those of `model.generate`, all of them
  recorded log-probabilities against teacher forcing, one row at a time: 99.9 % within 1e-5, all within 1e-4
  gradient left by our `update` against a plain padded forward over all rows: relative L2 below 1e-5
The last two run twice: with the weights in float64, where rounding hides no mistake, and in float32 as timed. A sharp
model can round more than that in float32 whatever the code; so where plain float32 code is itself further than half
the limit from plain float64 code (printed as `floor`), the float32 limit is twice the floor.
The distance to the gradient of TRL's own loss on the same completions is printed too: the two do the same work.

The last line is one JSON object with every number. Goals are those of the project, printed as reached or not.
"""

import contextlib
import copy
import csv
import gc
import importlib.metadata
import json
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from typing import Literal

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one thread
import torch
import transformers
import tyro

try:
    import datasets
    import trl
except ImportError:
    sys.exit("error: the peer is missing; pip install trl==1.16.0 first")

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # the repository root
import algorithms.grpo as grpo
from envs.countdown import Countdown

GOALS = {
    ("A", "default"): 2.0,
    ("A", "no_skip"): 1.5,
    ("A", "compile"): 2.3,
    ("B", "default"): 2.5,
    ("B", "no_skip"): 1.7,
    ("B", "compile"): 2.8,
    ("C", "default"): 1.8,
    ("C", "no_skip"): 1.5,
    ("D", "no_skip"): 3.5,
}
COLUMNS = (
    "case arm ratio_median ratio_min ratio_max peer_ms ours_ms rollout_ms update_ms zero_share mean_length std_length"
)
COLUMNS = f"{COLUMNS} steps threads load torch transformers trl device minutes commit command".split()


@dataclass
class Args:
    model_name_or_path: str = os.path.join(grpo.TINY_MODELS, "countdown")
    """the tiny Countdown model"""
    cases: tuple[Literal["A", "B", "C", "D"], ...] = ("A", "B", "C", "D")
    """cases to run, see above"""
    steps: int = 7
    """timed steps of every arm; 5 or more for numbers that are quoted"""
    warmup_steps: int = 2
    """steps before them that are not timed"""
    compile: bool = False
    """also time the update with a compiled body (about a minute of compiling for each case)"""
    naive: bool = False
    """also time a plain loop"""
    peer_micro_batches: tuple[int, ...] = (64,)
    """completions in a micro-batch of TRL; of several the fastest in 2 steps is taken, case by case"""
    tuning_steps: int = 150
    """supervised steps on demonstrations with one try, which make the policy of cases A and D"""
    long_prompt_tokens: int = 144
    """case D: worked examples are put in front until the shortest prompt has this many tokens"""
    threads: int = 1
    """threads of torch"""
    csv: str | None = None
    """file to which the rows are appended"""


@dataclass
class Case:
    name: str
    model: str  # folder
    task: Countdown
    num_prompts: int
    max_completion_length: int


@dataclass
class Sample:
    """One step of one arm. CPU milliseconds unless said otherwise."""

    total: float
    rollout: float
    wall: float
    zero_share: float  # rows whose advantage is zero
    lengths: list[int]


# --- Work ---------------------------------------------------------------------------------------------------------


class WorkedExamples(Countdown):
    """Countdown with worked examples, lines like (3+4)*5=35, in front of every prompt."""

    examples = ""

    def prompt(self, problem, role="solver", teammates=()):
        messages = super().prompt(problem, role, teammates)
        return [{**messages[0], "content": self.examples + messages[0]["content"]}]


def short_demonstration(task: Countdown, problem, generator: random.Random) -> str:
    """A demonstration with one try, the first right one of eight: short, even, and right now and then."""
    for _ in range(8):
        text = task.demonstration(problem, generator, max_tries=1)
        if " yes" in text:
            break
    return text


def worked_examples(tokenizer, tokens: int) -> WorkedExamples:
    """A task whose shortest prompt has at least this many tokens."""
    task, generator = WorkedExamples(), random.Random("worked examples")
    problems = [task.train_problem(index, 1) for index in range(64)]
    while min(len(grpo.encode(tokenizer, task.prompt(problem))) for problem in problems) < tokens:
        problem = task.sample(generator)
        task.examples += short_demonstration(task, problem, generator).split()[0] + "\n"
    return task


def short_policy(args: Args, tasks: list[Countdown], folder: str) -> None:
    """Tune the model on demonstrations with one try, with the prompts of all tasks in turn, and save it."""
    script_args = grpo.Args(model_name_or_path=args.model_name_or_path)
    tokenizer = grpo.load_tokenizer(script_args)
    model = grpo.load_model(script_args, tokenizer, torch.device("cpu"))
    optimizer, generator = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True), random.Random("short policy")
    for step in range(args.tuning_steps):
        task, ids, labels = tasks[step % len(tasks)], [], []
        for _ in range(32):
            problem = task.sample(generator)
            completion = short_demonstration(task, problem, generator)
            prompt = grpo.encode(tokenizer, task.prompt(problem))
            completion = tokenizer(completion, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
            ids.append(torch.tensor(prompt + completion))
            labels.append(torch.tensor([-100] * len(prompt) + completion))
        ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)  # (B,S)
        labels = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)  # (B,S)
        model(ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_case(name: str, args: Args, short: str) -> Case:
    if name == "A":
        return Case("A", short, Countdown(), 64, 32)
    if name == "D":
        tokenizer = transformers.AutoTokenizer.from_pretrained(short)
        return Case("D", short, worked_examples(tokenizer, args.long_prompt_tokens), 8, 32)
    return Case(name, args.model_name_or_path, Countdown(), 64 if name == "B" else 8, grpo.Args().max_completion_length)


# --- Plain code to compare with: nothing here is shared with the script ---------------------------------------------


def right_padded(batch: grpo.Batch, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prompts and completions side by side. -> ids (b,S+T), position of each token's prediction (b,T), mask (b,T)"""
    lengths = batch.mask.sum(1)
    width = int(lengths[rows].max())
    ids = [torch.tensor(batch.prompts[row] + batch.completion_ids[row, : lengths[row]].tolist()) for row in rows]
    starts = torch.tensor([len(batch.prompts[row]) - 1 for row in rows])  # (b,)
    ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)  # (b,S+T)
    positions = (starts[:, None] + torch.arange(width)).clamp(max=ids.size(1) - 1)  # (b,T)
    return ids, positions, batch.mask[rows, :width]


def plain_logprobs(model, batch: grpo.Batch, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Teacher-forced log-probabilities by one padded forward, causal and without a mask. -> (b,T), mask (b,T)"""
    ids, positions, mask = right_padded(batch, rows)
    logprobs = model(ids, use_cache=False).logits.log_softmax(2)  # (b,S+T,V)
    logprobs = logprobs.gather(1, positions[:, :, None].expand(-1, -1, logprobs.size(2)))  # (b,T,V)
    return logprobs.gather(2, batch.completion_ids[rows, : mask.size(1), None])[:, :, 0], mask


def plain_gradient(model, batch: grpo.Batch, advantages: torch.Tensor) -> torch.Tensor:
    """The gradient of `plain_backward` in one vector."""
    model.zero_grad()
    plain_backward(model, batch, advantages)
    return gradient(model)


def plain_backward(model, batch: grpo.Batch, advantages: torch.Tensor) -> None:
    """Gradient of the step by padded forwards over all rows, in micro-batches of 64."""
    for start in range(0, len(advantages), 64):
        rows = list(range(start, min(start + 64, len(advantages))))
        logprobs, mask = plain_logprobs(model, batch, rows)  # (b,T), (b,T)
        ratio = (logprobs - logprobs.detach()).exp()  # (b,T) one iteration: 1
        losses = -torch.min(ratio * advantages[rows, None], ratio.clamp(0.8, 1.2) * advantages[rows, None])  # (b,T)
        (losses[mask].sum() / batch.mask.sum()).backward()


def plain_generate(model, tokenizer, prompts: list[list[int]], limit: int, sample: bool) -> list[list[int]]:
    """Completions by `model.generate`, each up to its first end token."""
    inputs = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    options = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False}
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=limit, pad_token_id=tokenizer.pad_token_id, **options)
    ends, rows = set(model.generation_config.eos_token_id), []
    for row in out[:, inputs["input_ids"].size(1) :].tolist():
        length = next((index + 1 for index, token in enumerate(row) if token in ends), len(row))
        rows.append(row[:length])
    return rows


def plain_step(model, optimizer, tokenizer, task, args: grpo.Args, first: int):
    """A whole step as one would write it first. -> CPU time at the end of the rollout, lengths, advantages"""
    problems = [task.train_problem(first + index, args.seed) for index in range(args.num_prompts_per_step)]
    problems = [problem for problem in problems for _ in range(args.num_generations)]
    prompts = [grpo.encode(tokenizer, task.prompt(problem)) for problem in problems]
    completions = plain_generate(model, tokenizer, prompts, args.max_completion_length, sample=True)
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    functions = list(zip(args.reward_weights, task.reward_functions.values()))
    rewards = [sum(w * function(problem, text) for w, function in functions) for problem, text in zip(problems, texts)]
    rewards = torch.tensor(rewards)  # (B,)
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in completions], batch_first=True)  # (B,T)
    lengths = torch.tensor([len(ids) for ids in completions])  # (B,)
    mask = torch.arange(ids.size(1)) < lengths[:, None]  # (B,T)
    rolled_out = time.process_time()
    advantages = grpo.group_advantages(rewards, args.num_generations)  # (B,)
    optimizer.zero_grad()
    plain_backward(model, grpo.Batch(prompts, ids, mask, ids, rewards[:, None]), advantages)
    torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    optimizer.step()
    return rolled_out, lengths, advantages


# --- Our arms -----------------------------------------------------------------------------------------------------


class Ours:
    """The arms of one case: name -> flags of the script and a model."""

    def __init__(self, case: Case, args: Args):
        self.case = case
        script_args = grpo.Args(
            model_name_or_path=case.model,
            num_prompts_per_step=case.num_prompts,
            max_completion_length=case.max_completion_length,
            learning_rate=0.0,
        )
        self.tokenizer = grpo.load_tokenizer(script_args)
        eager = grpo.load_model(script_args, self.tokenizer, torch.device("cpu"))
        no_skip = replace(script_args, skip_equal_groups=False)
        self.arms = {"default": (script_args, eager), "no_skip": (no_skip, eager)}
        if args.compile:
            compiled_args = replace(script_args, compile=True)
            compiled = grpo.load_model(compiled_args, self.tokenizer, torch.device("cpu"))
            self.arms["compile"] = (compiled_args, compiled)
            self.arms["compile_no_skip"] = (replace(no_skip, compile=True), compiled)
        if args.naive:
            self.arms["naive"] = (script_args, eager)
        self.optimizers = {
            name: torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
            for name, (_, model) in self.arms.items()
        }

    def step(self, name: str, step: int) -> Sample:
        """One timed step of an arm on the prompts of this step."""
        (script_args, model), optimizer, task = self.arms[name], self.optimizers[name], self.case.task
        first = step * script_args.num_prompts_per_step  # problem
        progress = grpo.Progress(step=step, problems=first, tokens=0)
        gc.collect()
        wall, start = time.perf_counter(), time.process_time()
        if name == "naive":
            rolled_out, lengths, advantages = plain_step(model, optimizer, self.tokenizer, task, script_args, first)
        else:
            batch = grpo.rollout(model, self.tokenizer, task, script_args, progress)
            grpo.batch_metrics(batch, task, script_args, progress)
            rolled_out, lengths = time.process_time(), batch.info["length"]
            advantages = grpo.compute_advantages(batch, script_args, progress)
            grpo.update(model, optimizer, batch, advantages, script_args)
        end, wall = time.process_time(), time.perf_counter() - wall
        zero_share = advantages.eq(0).float().mean().item()
        return Sample((end - start) * 1e3, (rolled_out - start) * 1e3, wall * 1e3, zero_share, lengths.tolist())


# --- Gate ---------------------------------------------------------------------------------------------------------


def gradient(model) -> torch.Tensor:
    """All gradients in one vector, which are cleared."""
    vector = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    return vector


def trl_gradient(trainer, batch: grpo.Batch, advantages: torch.Tensor) -> torch.Tensor:
    """Gradient of TRL's own loss on our completions, all rows in one micro-batch, padded as TRL pads them."""
    tokenizer = trainer.processing_class
    prompts = tokenizer.pad({"input_ids": batch.prompts}, padding_side="left", return_tensors="pt")
    inputs = {"prompt_ids": prompts["input_ids"], "prompt_mask": prompts["attention_mask"]}
    inputs |= {"completion_ids": batch.completion_ids, "completion_mask": batch.mask.int(), "advantages": advantages}
    accumulation, trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation, 1
    trainer.args.steps_per_generation = 1
    trainer.model.train()
    trainer._compute_loss(trainer.model, inputs | {"num_items_in_batch": batch.mask.sum()}).backward()
    trainer.args.steps_per_generation = accumulation
    trainer._metrics["train"].clear()
    return gradient(trainer.model)


def logprob_differences(model, batch: grpo.Batch) -> torch.Tensor:
    """Recorded log-probabilities against teacher forcing by this model, one row at a time. -> (tokens,)"""
    differences = []
    with torch.no_grad():
        for row in range(len(batch.prompts)):
            logprobs, mask = plain_logprobs(model, batch, [row])  # (1,T), (1,T)
            differences.append((logprobs.float() - batch.logprobs[[row], : mask.size(1)]).abs()[mask])  # (tokens,)
    return torch.cat(differences)


def check_logprobs(model, exact_model, batch: grpo.Batch, script_args: grpo.Args) -> dict:
    """The second line of the gate."""
    prompts = batch.prompts[:: script_args.num_generations]
    generators = [torch.Generator().manual_seed(index) for index in range(len(prompts))]
    samples = grpo.generate(exact_model, prompts, script_args.num_generations, script_args, generators)
    exact = grpo.Batch(batch.prompts, samples.completion_ids, samples.mask, samples.logprobs, batch.rewards)
    plain = torch.zeros_like(batch.logprobs)  # (B,T)
    with torch.no_grad():
        for row in range(len(plain)):
            logprobs, mask = plain_logprobs(model, batch, [row])  # (1,T), (1,T)
            plain[row, : mask.size(1)] = logprobs[0]
    pairs = {"logprob": (model, batch), "logprob64": (exact_model, exact)}
    pairs["floor"] = (exact_model, replace(batch, logprobs=plain))
    errors = {}
    for name, (judge, rows) in pairs.items():
        differences = logprob_differences(judge, rows)
        errors |= {f"{name}_p999": differences.quantile(0.999).item(), f"{name}_max": differences.max().item()}
    return errors


def check(ours: Ours, trainer) -> dict:
    """The gate of the docstring, on the first prompts of the case."""
    (script_args, model), start = ours.arms["default"], grpo.Progress(step=0, problems=0, tokens=0)
    batch = grpo.rollout(model, ours.tokenizer, ours.case.task, script_args, start)
    prompts = batch.prompts[:: script_args.num_generations]
    samples = grpo.generate(model, prompts, 2, script_args, None)  # two of each: the cache of the prompt is repeated
    greedy = [ids[: sum(mask)] for ids, mask in zip(samples.completion_ids.tolist(), samples.mask.tolist())]
    expected = plain_generate(model, ours.tokenizer, prompts, script_args.max_completion_length, sample=False)
    expected = [row for row in expected for _ in range(2)]
    gate = {"greedy_equal": sum(a == b for a, b in zip(greedy, expected)) / len(expected)}
    exact_model = copy.deepcopy(model).double()
    gate |= check_logprobs(model, exact_model, batch, script_args)
    advantages, unclipped = grpo.compute_advantages(batch, script_args, start), replace(script_args, max_grad_norm=1e9)
    plain, exact = (plain_gradient(judge, batch, advantages) for judge in (model, exact_model))
    gate["floor_gradient"] = ((plain - exact).norm() / exact.norm()).item()
    grpo.update(exact_model, torch.optim.AdamW(exact_model.parameters(), lr=0.0), batch, advantages, unclipped)
    gate["gradient64"] = ((gradient(exact_model) - exact).norm() / exact.norm()).item()
    for name, (arm_args, arm_model) in ours.arms.items():
        if name != "naive":
            unclipped, optimizer = replace(arm_args, max_grad_norm=1e9), ours.optimizers[name]
            grpo.update(arm_model, optimizer, batch, advantages, unclipped)
            gate[f"gradient_{name}"] = ((gradient(arm_model) - plain).norm() / plain.norm()).item()
        if name == "compile":  # every number of packed rows in a micro-batch compiles anew: do it before timing
            for rows in range(arm_args.num_generations, arm_args.per_device_train_batch_size, arm_args.num_generations):
                some = torch.arange(len(advantages)).lt(rows).float()  # (B,)
                grpo.update(arm_model, optimizer, batch, some, unclipped)
    limits = {"logprob_p999": max(1e-5, 2 * gate["floor_p999"]), "logprob_max": max(1e-4, 2 * gate["floor_max"])}
    limits |= {"logprob64_p999": 1e-5, "logprob64_max": 1e-4}
    gradients = [name for name in gate if name.startswith("gradient_")]
    limits |= {"gradient64": 1e-5, **dict.fromkeys(gradients, max(1e-5, 2 * gate["floor_gradient"]))}
    gate["passed"] = gate["greedy_equal"] == 1 and all(gate[name] < limit for name, limit in limits.items())
    gate["trl_gradient"] = ((trl_gradient(trainer, batch, advantages) - plain).norm() / plain.norm()).item()
    return gate


# --- TRL ----------------------------------------------------------------------------------------------------------


class Interleave(transformers.TrainerCallback):
    """Times TRL's steps and runs our arms between them."""

    def __init__(self, ours: Ours | None):
        self.ours, self.peer, self.samples = ours, [], {name: [] for name in (ours.arms if ours else ())}

    def on_train_begin(self, args, state, control, **kwargs):
        self.resume()

    def on_step_end(self, args, state, control, **kwargs):
        end, wall = time.process_time(), time.perf_counter() - self.wall
        metrics = self.trainer._metrics["train"]
        zero_share, length = metrics["frac_reward_zero_std"][-1], metrics["completions/mean_length"][-1]
        self.peer.append(Sample((end - self.start) * 1e3, self.rollout * 1e3, wall * 1e3, zero_share, [length]))
        names = list(self.samples)
        turn = state.global_step % max(1, len(names))
        for name in names[turn:] + names[:turn]:
            self.samples[name].append(self.ours.step(name, state.global_step - 1))
        self.resume()

    def resume(self):
        gc.collect()
        self.rollout, self.wall, self.start = 0.0, time.perf_counter(), time.process_time()


def make_trainer(case: Case, micro_batch: int, steps: int, callback: Interleave, folder: str) -> trl.GRPOTrainer:
    """TRL's trainer on the prompts that our script would draw, in the same order."""
    args, task = grpo.Args(), case.task
    problems = [task.train_problem(index, args.seed) for index in range(steps * case.num_prompts)]
    rows = [{"prompt": task.prompt(problem), "index": index} for index, problem in enumerate(problems)]

    def reward_function(name):
        function = task.reward_functions[name]

        def reward(completions, index, **kwargs):
            return [function(problems[i], completion[0]["content"]) for i, completion in zip(index, completions)]

        reward.__name__ = name
        return reward

    micro_batch = min(micro_batch, case.num_prompts * args.num_generations)
    config = trl.GRPOConfig(
        output_dir=folder,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=case.num_prompts * args.num_generations // micro_batch,
        num_generations=args.num_generations,
        max_completion_length=case.max_completion_length,
        loss_type="dapo",
        beta=0.0,
        num_iterations=1,
        reward_weights=list(args.reward_weights),
        learning_rate=0.0,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        max_grad_norm=args.max_grad_norm,
        max_steps=steps,
        shuffle_dataset=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32),
        processing_class=transformers.AutoTokenizer.from_pretrained(case.model),
        reward_funcs=[reward_function(name) for name in task.reward_functions],
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        callbacks=[callback],
    )
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    callback.trainer, generate = trainer, trainer._generate_and_score_completions

    def timed_generate(inputs):
        start = time.process_time()
        result = generate(inputs)
        callback.rollout += time.process_time() - start
        return result

    trainer._generate_and_score_completions = timed_generate
    return trainer


def best_micro_batch(case: Case, args: Args, folder: str) -> int:
    """The micro-batch with which TRL is fastest: median CPU time of 2 steps after one that is not timed."""
    if len(args.peer_micro_batches) == 1:
        return args.peer_micro_batches[0]
    times = {}
    for micro_batch in args.peer_micro_batches:
        callback = Interleave(None)
        make_trainer(case, micro_batch, 3, callback, folder).train()
        times[micro_batch] = statistics.median(sample.total for sample in callback.peer[1:])
    print(f"case {case.name}: TRL by micro-batch", *(f"{size}: {value:.0f} ms" for size, value in times.items()))
    return min(times, key=times.get)


# --- Report -------------------------------------------------------------------------------------------------------


def summary(case: Case, name: str, ours: list[Sample], peer: list[Sample]) -> dict:
    """A row of the table: medians, and ratios paired step by step."""
    ratios = [theirs.total / own.total for theirs, own in zip(peer, ours)]
    walls = [theirs.wall / own.wall for theirs, own in zip(peer, ours)]
    median = statistics.median
    lengths = torch.tensor([float(length) for sample in ours for length in sample.lengths])
    goal = GOALS.get((case.name, name))
    return {
        "case": case.name,
        "arm": name,
        "ratio_median": median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "wall_ratio_median": median(walls),
        "goal": goal,
        "reached": None if goal is None else median(ratios) >= goal,
        "peer_ms": median(sample.total for sample in peer),
        "peer_rollout_ms": median(sample.rollout for sample in peer),
        "peer_update_ms": median(sample.total - sample.rollout for sample in peer),
        "ours_ms": median(sample.total for sample in ours),
        "rollout_ms": median(sample.rollout for sample in ours),
        "update_ms": median(sample.total - sample.rollout for sample in ours),
        "zero_share": statistics.mean(sample.zero_share for sample in ours),
        "peer_zero_share": statistics.mean(sample.zero_share for sample in peer),
        "mean_length": lengths.mean().item(),
        "std_length": lengths.std().item(),
        "peer_mean_length": statistics.mean(sample.lengths[0] for sample in peer),
        "steps": len(ours),
        "ratios": ratios,
    }


def run_case(case: Case, args: Args, folder: str) -> tuple[dict, list[dict]]:
    """Gate, then times. Without a passed gate there are no rows."""
    began, ours = time.perf_counter(), Ours(case, args)
    micro_batch, callback = best_micro_batch(case, args, folder), Interleave(ours)
    trainer = make_trainer(case, micro_batch, args.warmup_steps + args.steps, callback, folder)
    gate = {"case": case.name, **check(ours, trainer)}
    print(f"\ncase {case.name}: gate {'passed' if gate['passed'] else 'FAILED'}", end="")
    print("".join(f"  {name} {gate[name]:.2g}" for name in gate if name not in ("case", "passed")), flush=True)
    if not gate["passed"]:
        return gate, []
    trainer.train()
    peer, rows = callback.peer[args.warmup_steps :], []
    prompts = [len(grpo.encode(ours.tokenizer, case.task.prompt(case.task.train_problem(i, 1)))) for i in range(8)]
    minutes, load = (time.perf_counter() - began) / 60, os.getloadavg()[0]
    for name, samples in callback.samples.items():
        rows.append(summary(case, name, samples[args.warmup_steps :], peer))
        rows[-1] |= {"load": load, "minutes": minutes, "peer_micro_batch": micro_batch}
        rows[-1] |= {"prompt_tokens": statistics.mean(prompts), "first_step_s": samples[0].wall / 1e3}
    print_case(case, rows)
    return gate, rows


def print_case(case: Case, rows: list[dict]) -> None:
    """The table of a case."""
    first = rows[0]
    sizes = f"{case.num_prompts} prompts of {first['prompt_tokens']:.0f} tokens x {grpo.Args().num_generations}"
    print(f"case {case.name}: {sizes}, limit {case.max_completion_length}, ", end="")
    print(f"{first['steps']} steps, load {first['load']:.1f}, {first['minutes']:.1f} min")
    print(f"{'arm':16} {'ratio (range)':18} {'goal':>15} {'CPU ms':>8} {'rollout':>8} {'update':>8}  zero  length")
    peer = "".join(f" {first[name]:8.0f}" for name in ("peer_ms", "peer_rollout_ms", "peer_update_ms"))
    name, share = f"TRL {first['peer_micro_batch']}", f"{first['peer_zero_share']:4.2f}"
    print(f"{name:16} {'':18} {'':>15}{peer}  {share}  {first['peer_mean_length']:.1f}")
    for row in rows:
        ratio = f"{row['ratio_median']:.2f} ({row['ratio_min']:.2f}-{row['ratio_max']:.2f})"
        goal = "-" if row["goal"] is None else f"{row['goal']:.1f} {'reached' if row['reached'] else 'NOT reached'}"
        times = "".join(f" {row[name]:8.0f}" for name in ("ours_ms", "rollout_ms", "update_ms"))
        lengths = f"{row['mean_length']:.1f} s.d. {row['std_length']:.1f}"
        print(f"{row['arm']:16} {ratio:18} {goal:>15}{times}  {row['zero_share']:4.2f}  {lengths}")
    sys.stdout.flush()


def environment(args: Args) -> dict:
    """What the numbers depend on."""
    device = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        device = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), device)
    described = ["git", "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"]
    commit = subprocess.run(described, cwd=sys.path[0], capture_output=True, text=True).stdout.strip()
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "trl")}
    command = shlex.join(["python", "benchmarks/speed_grpo.py", *sys.argv[1:]])
    return {**versions, "threads": args.threads, "device": device, "commit": commit or "none", "command": command}


def append_rows(path: str, rows: list[dict]) -> None:
    """Append to the CSV, with a header where there is none."""
    new = not os.path.exists(path)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        if new:
            writer.writeheader()
        for row in rows:
            writer.writerow({name: round(x, 4) if isinstance(x, float) else x for name, x in row.items()})


def main(args: Args) -> int:
    if trl.__version__ != "1.16.0":
        print(f"note: written for trl 1.16.0, found {trl.__version__}")
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)  # TRL's use of transformers
    facts, gates, rows = environment(args), [], []
    print(", ".join(f"{name} {value}" for name, value in facts.items() if name != "command"), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        short = os.path.join(folder, "short")
        if {"A", "D"} & set(args.cases):
            tokenizer = transformers.AutoTokenizer.from_pretrained(args.model_name_or_path)
            short_policy(args, [Countdown(), worked_examples(tokenizer, args.long_prompt_tokens)], short)
        for name in args.cases:
            gate, case_rows = run_case(make_case(name, args, short), args, folder)
            gates.append(gate)
            rows += [row | facts for row in case_rows]
    if args.csv:
        append_rows(args.csv, rows)
    passed = all(gate["passed"] for gate in gates)
    print(f"\ngate: {'passed' if passed else 'FAILED'}")
    print(json.dumps({"passed": passed, **facts, "gates": gates, "rows": rows}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
