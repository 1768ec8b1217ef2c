"""How fast is a step of algorithms/grpo.py next to one of TRL's GRPOTrainer? CPU, one thread.

    pip install trl==1.16.0                           # without it, the arm of TRL is left out
    OMP_NUM_THREADS=1 python benchmarks/speed_grpo.py --csv benchmarks/results/speed_grpo.csv
    OMP_NUM_THREADS=1 python benchmarks/speed_grpo.py --against bcac39c    # and an older grpo.py

The arms take turns in one process, and every step gives all of them the same prompts:
  TRL        its own trainer.train() with what is fastest on a CPU: float32, no gradient
             checkpointing, micro-batches of 64
  shipped    the script's rollout, advantages and update; rows without advantage are left out of
             the update, which is exact
  all rows   the same, but every row is computed: advantages of 0 are made 1e-8
  COMMIT, COMMIT all rows      (--against) both with the grpo.py of that commit

Same weights, prompts, limits, rewards, loss (grpo, beta 0) and fused AdamW. The learning rate is 0,
so that all steps have one policy. All decode the completions of a step at once, ours with
--decode-batch-size 512. TRL draws its own completions, and so does an older commit. Times
are CPU time of the process; a ratio is the median over steps of theirs / ours, both of the same
step. Ratios of `all rows` compare equal work; how much `shipped` leaves out depends on the task.

Before a case is timed: greedy completions equal those of transformers' generate, and the gradient
that each arm leaves is within a relative 1e-5 (that of TRL's loss on our completions: 1e-4) of the
one from plain forward passes over single rows. Else there are no times and the exit code is 1.
"""

import csv
import gc
import importlib.util
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
import tyro
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from algorithms import grpo  # noqa: E402
from envs.countdown import Countdown  # noqa: E402

try:
    import datasets
    import trl
except ImportError:
    trl = None

COLUMNS = """case arm ratio_median ratio_min ratio_max peer_ms ours_ms rollout_ms update_ms
against against_median against_min against_max zero_share mean_length std_length
steps torch transformers trl device commit command""".split()


@dataclass
class Args:
    cases: tuple[str, ...] = ("A", "B", "C", "D")
    """cases to run"""
    steps: int = 7
    """timed steps of every arm"""
    warmup_steps: int = 2
    """steps before them"""
    against: str | None = None
    """commit whose grpo.py is timed too"""
    csv: str | None = None
    """file to add the rows to"""
    smoke: bool = False
    """everything tiny: does the program work?"""


class LongPrompts(Countdown):
    """Prompts of 150 tokens instead of 27: worked examples stand in front."""

    def prompt(self, problem, role="solver", teammates=()):
        message = super().prompt(problem, role, teammates)[0]
        examples = "(3+4)*5=35\n(9-2)*4=28\n8*7+6=62\n" * 4
        return [{**message, "content": examples + message["content"]}]


@dataclass
class Case:
    """A step of the tiny Countdown model, with 8 completions of each prompt."""

    model_name_or_path: str
    task: Countdown
    num_prompts_per_step: int
    max_completion_length: int

    def script_args(self, script):
        """Flags of a version of the script."""
        args = script.Args(
            model_name_or_path=self.model_name_or_path,
            num_prompts_per_step=self.num_prompts_per_step,
            max_completion_length=self.max_completion_length,
            learning_rate=0.0,
        )
        args.reward_weights = self.task.reward_weights
        args.decode_batch_size = self.num_prompts_per_step * args.num_generations
        return args


def demonstration(task: Countdown, problem, generator: random.Random) -> str:
    """One try and an answer, the first right one of eight."""
    for _ in range(8):
        text = task.demonstration(problem, generator, max_tries=1)
        if " yes" in text:
            break
    return text


def tune(model, tokenizer, tasks: list[Countdown], steps: int) -> None:
    """Supervised steps on demonstrations with one try, of all tasks in turn."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
    generator = random.Random("short policy")
    for step in range(steps):
        task = tasks[step % len(tasks)]
        ids, labels = [], []
        for _ in range(32):
            problem = task.sample(generator)
            text = demonstration(task, problem, generator) + tokenizer.eos_token
            answer = tokenizer(text, add_special_tokens=False)["input_ids"]
            prompt = grpo.encode(tokenizer, task, problem, grpo.Args())
            ids.append(torch.tensor(prompt + answer))
            labels.append(torch.tensor([-100] * len(prompt) + answer))
        ids = pad_sequence(ids, batch_first=True)
        labels = pad_sequence(labels, batch_first=True, padding_value=-100)
        model(ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def make_cases(tuning_steps: int, folder: str) -> dict[str, Case]:
    """A short and even completions, B long-tailed ones, C few of these, D long prompts.

    A and D have a model that is tuned on demonstrations with one try; it is saved in the folder.
    """
    model, tokenizer = grpo.load_model(grpo.Args())
    tasks = [Countdown(), LongPrompts()]
    tune(model, tokenizer, tasks, tuning_steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shipped = grpo.model_path(grpo.Args())
    return {
        "A": Case(folder, tasks[0], 64, 32),
        "B": Case(shipped, tasks[0], 64, 64),
        "C": Case(shipped, tasks[0], 8, 64),
        "D": Case(folder, tasks[1], 8, 32),
    }


# --- Our arms -----------------------------------------------------------------------------------


@dataclass
class Sample:
    """One step; CPU time in milliseconds."""

    total: float
    rollout: float = 0.0
    zero_share: float = 0.0  # rows without advantage
    lengths: list[int] | None = None


class Script:
    """A step as the loop of grpo.py does it, without its logging."""

    def __init__(self, module, case: Case, all_rows: bool):
        self.module = module
        self.task = case.task
        self.all_rows = all_rows
        self.args = case.script_args(module)
        self.load()
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, 0.0, weight_decay=0.0, fused=True)
        self.samples: list[Sample] = []

    def step(self, number: int) -> None:
        """One timed step on the prompts of this number."""
        gc.collect()
        began = time.process_time()
        self.rollout(number)
        sampled = time.process_time()
        advantages = self.advantages()
        zero = advantages == 0
        self.update(advantages.masked_fill(zero, 1e-8) if self.all_rows else advantages)
        ended = time.process_time()
        sample = Sample((ended - began) * 1e3, (sampled - began) * 1e3)
        sample.zero_share = zero.float().mean().item()
        sample.lengths = [len(completion.ids) for completion in self.completions]
        self.samples.append(sample)

    def load(self) -> None:
        self.model, self.tokenizer = self.module.load_model(self.args)

    def rollout(self, number: int) -> None:
        share = self.args.num_prompts_per_step
        indices = range(number * share, (number + 1) * share)
        problems = [self.task.train_problem(i, self.args.seed) for i in indices]
        seeds = [self.module.random_seed(self.args.seed, i) for i in indices]
        size = self.args.num_generations
        self.completions = self.module.complete(
            self.model, self.tokenizer, self.task, problems, size, self.args, seeds
        )

    def advantages(self) -> Tensor:
        rewards = torch.tensor([completion.rewards for completion in self.completions])  # (B,K)
        totals = rewards @ torch.tensor(self.task.reward_weights)  # (B,)
        return self.module.group_advantages(totals, self.args.num_generations)

    def update(self, advantages: Tensor) -> None:
        work = (self.completions, advantages, self.args)
        self.module.update(self.model, None, self.optimizer, *work)


@dataclass
class Written:
    """What OldScript knows of a completion."""

    prompt: list[int]
    ids: list[int]


class OldScript(Script):
    """The functions that grpo.py had up to commit bcac39c."""

    def load(self) -> None:
        self.tokenizer = self.module.load_tokenizer(self.args)
        self.model = self.module.load_model(self.args, self.tokenizer, torch.device("cpu"))

    def rollout(self, number: int) -> None:
        first = number * self.args.num_prompts_per_step
        self.progress = self.module.Progress(step=number, problems=first, tokens=0)
        work = (self.model, self.tokenizer, self.task, self.args)
        self.batch = self.module.rollout(*work, self.progress)
        rows = zip(self.batch.prompts, self.batch.completion_ids, self.batch.mask)
        self.completions = [Written(prompt, ids[mask].tolist()) for prompt, ids, mask in rows]

    def advantages(self) -> Tensor:
        return self.module.compute_advantages(self.batch, self.args, self.progress)

    def update(self, advantages: Tensor) -> None:
        self.module.update(self.model, self.optimizer, self.batch, advantages, self.args)


def load_commit(commit: str, folder: str):
    """grpo.py as it was."""
    show = ["git", "show", f"{commit}:algorithms/grpo.py"]
    text = subprocess.run(show, cwd=ROOT, capture_output=True, check=True).stdout
    path = Path(folder, "algorithms", "grpo.py")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text)
    spec = importlib.util.spec_from_file_location("grpo_before", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def make_arms(case: Case, against: str | None, folder: str) -> dict[str, Script]:
    """Name of each arm -> the script that it runs."""
    arms = {"shipped": Script(grpo, case, False), "all rows": Script(grpo, case, True)}
    if against:
        module = load_commit(against, folder)
        kind = OldScript if hasattr(module, "rollout") else Script
        arms[against] = kind(module, case, False)
        arms[f"{against} all rows"] = kind(module, case, True)
    return arms


# --- TRL ----------------------------------------------------------------------------------------


def make_trainer(case: Case, steps: int, folder: str, run_arms):
    """TRL's trainer on the prompts that our script draws; its samples. Our arms run in between."""
    args = case.script_args(grpo)
    task = case.task
    problems = [task.train_problem(i, args.seed) for i in range(steps * args.num_prompts_per_step)]
    prompts = [{"prompt": task.prompt(problem), "i": i} for i, problem in enumerate(problems)]
    samples: list[Sample] = []

    def reward(completions, i, **kwargs) -> list[float]:
        rewards = []
        for completion, index in zip(completions, i):
            text = completion[0]["content"]
            values = [f(problems[index], text) for f in task.reward_functions.values()]
            rewards.append(sum(w * value for w, value in zip(task.reward_weights, values)))
        return rewards

    class Interleave(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            gc.collect()
            self.began = time.process_time()

        def on_step_end(self, args, state, control, **kwargs):
            samples.append(Sample((time.process_time() - self.began) * 1e3))
            run_arms(state.global_step - 1)
            self.on_train_begin(args, state, control)

    rows = args.num_prompts_per_step * args.num_generations
    micro_batch = min(64, rows)
    config = trl.GRPOConfig(
        output_dir=folder,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=rows // micro_batch,
        num_generations=args.num_generations,
        max_completion_length=args.max_completion_length,
        loss_type="grpo",
        beta=0.0,
        learning_rate=0.0,
        max_grad_norm=args.max_grad_norm,
        max_steps=steps,
        shuffle_dataset=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    path = grpo.model_path(args)
    trainer = trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        processing_class=transformers.AutoTokenizer.from_pretrained(path),
        reward_funcs=reward,
        args=config,
        train_dataset=datasets.Dataset.from_list(prompts),
        callbacks=[Interleave()],
    )
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    return trainer, samples


# --- Check --------------------------------------------------------------------------------------


def gradient(model) -> Tensor:
    """All gradients in one vector."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def plain_gradient(model, completions, advantages: Tensor) -> Tensor:
    """Of the loss of DeepSeekMath eq. 3 where the ratio is 1, one plain forward pass a row."""
    model.zero_grad()
    for completion, advantage in zip(completions, advantages.tolist()):
        ids = torch.tensor([completion.prompt + completion.ids])
        logits = model(ids).logits[0, len(completion.prompt) - 1 : -1]
        loss = advantage * F.cross_entropy(logits, torch.tensor(completion.ids))
        (loss / len(completions)).backward()
    return gradient(model)


def trl_gradient(trainer, completions, advantages: Tensor) -> Tensor:
    """Of TRL's own loss on our completions, padded as TRL pads them."""
    prompts = [torch.tensor(completion.prompt) for completion in completions]
    answers = [torch.tensor(completion.ids) for completion in completions]
    inputs = {
        "prompt_ids": pad_sequence(prompts, True, 0, "left"),
        "prompt_mask": pad_sequence([torch.ones_like(x) for x in prompts], True, 0, "left"),
        "completion_ids": pad_sequence(answers, True),
        "completion_mask": pad_sequence([torch.ones_like(x) for x in answers], True),
        "advantages": advantages,
    }
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.zero_grad()
    trainer._compute_loss(trainer.model.train(), inputs).backward()
    trainer._metrics["train"].clear()
    return gradient(trainer.model)


def greedy_share(script: Script) -> float:
    """Share of greedy completions that equal those of transformers' generate."""
    prompts = [c.prompt for c in script.completions[:: script.args.num_generations]]
    ours = grpo.generate(script.model, prompts, script.args)
    padded = script.tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    limit = script.args.max_completion_length
    theirs = script.model.generate(**padded, max_new_tokens=limit, do_sample=False)
    theirs = theirs[:, padded["input_ids"].size(1) :].tolist()
    equal = [a.ids == b[: len(a.ids)] for a, b in zip(ours, theirs)]
    return sum(equal) / len(equal)


def check(arms: dict[str, Script], trainer) -> bool:
    """Run a step of all arms; compare their gradients and completions with plain ones."""
    found = {}  # arm: script with the completions, gradient
    for name, script in arms.items():

        def keep(*_, name=name, script=script):
            found[name] = script, gradient(script.model)

        script.args.max_grad_norm = 1e9
        hook = script.optimizer.register_step_pre_hook(keep)
        script.step(0)
        hook.remove()
        script.args.max_grad_norm = 1.0
        script.samples.clear()
    shipped = arms["shipped"]
    if trainer is not None:
        theirs = trl_gradient(trainer, shipped.completions, shipped.advantages())
        found["TRL"] = shipped, theirs
    share = greedy_share(shipped)
    print(f"  greedy completions equal to transformers' generate: {share:.0%}")
    passed = share == 1
    plain = {}  # rounding may make another token of another version: each has its own completions
    for name, (script, vector) in found.items():
        ids = str([completion.ids for completion in script.completions])
        if ids not in plain:
            work = (script.completions, script.advantages())
            plain[ids] = plain_gradient(shipped.model, *work)
        error = ((vector - plain[ids]).norm() / plain[ids].norm()).item()
        print(f"  gradient of {name}: {error:.1e} from the plain one")
        passed = passed and error < (1e-4 if name == "TRL" else 1e-5)
    return passed


# --- Measurement --------------------------------------------------------------------------------


def run_case(name: str, case: Case, args: Args, folder: str) -> list[dict]:
    """Check, then time. A row for each arm, none if the check fails."""
    print(f"case {name}", flush=True)
    arms = make_arms(case, args.against, folder)
    steps = args.warmup_steps + args.steps

    def run_arms(step: int) -> None:
        turn = step % len(arms)  # each is first in turn
        order = list(arms.values())
        for script in order[turn:] + order[:turn]:
            script.step(step)

    trainer, theirs = None, []
    if trl:
        trainer, theirs = make_trainer(case, steps, folder, run_arms)
    if not check(arms, trainer):
        print("  CHECK FAILED: no times")
        return []
    if trl:
        trainer.train()
    else:
        for step in range(steps):
            run_arms(step)

    samples = {arm: script.samples[args.warmup_steps :] for arm, script in arms.items()}
    theirs = theirs[args.warmup_steps :]
    rows = []
    for arm, own in samples.items():
        row = {"case": name, "arm": arm, "steps": args.steps, **summary(own)}
        if trl:
            row |= ratios("ratio", theirs, own)
            row["peer_ms"] = statistics.median(sample.total for sample in theirs)
        if args.against and arm in ("shipped", "all rows"):
            old = args.against if arm == "shipped" else f"{args.against} all rows"
            row |= {"against": args.against, **ratios("against", samples[old], own)}
        rows.append(row)
        print_row(row)
    return rows


def ratios(prefix: str, theirs: list[Sample], own: list[Sample]) -> dict:
    """How many times as fast as theirs, of the same steps."""
    values = [a.total / b.total for a, b in zip(theirs, own)]
    names = (f"{prefix}_median", f"{prefix}_min", f"{prefix}_max")
    return dict(zip(names, (statistics.median(values), min(values), max(values))))


def summary(samples: list[Sample]) -> dict:
    """Medians of the steps, means of the completions."""
    lengths = [length for sample in samples for length in sample.lengths]
    return {
        "ours_ms": statistics.median(s.total for s in samples),
        "rollout_ms": statistics.median(s.rollout for s in samples),
        "update_ms": statistics.median(s.total - s.rollout for s in samples),
        "zero_share": statistics.mean(s.zero_share for s in samples),
        "mean_length": statistics.mean(lengths),
        "std_length": statistics.stdev(lengths),
    }


def print_row(row: dict) -> None:
    """One line on an arm."""
    line = f"  {row['arm']:16} {row['rollout_ms']:6.0f} + {row['update_ms']:.0f} ms"
    line += f", {row['zero_share']:.0%} without advantage, length {row['mean_length']:.0f}"
    for prefix, peer in (("ratio", "TRL"), ("against", row.get("against"))):
        if f"{prefix}_median" in row:
            line += f"; {row[f'{prefix}_median']:.2f} times {peer}"
            line += f" ({row[f'{prefix}_min']:.2f} to {row[f'{prefix}_max']:.2f})"
    print(line, flush=True)


def write(path: str, rows: list[dict]) -> None:
    """Add rows to the CSV, with what the numbers depend on."""
    git = ["git", "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"]
    about = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trl": trl.__version__ if trl else "",
        "device": re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1],
        "commit": subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip(),
        "command": shlex.join(["python", "benchmarks/speed_grpo.py", *sys.argv[1:]]),
    }
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        for row in rows:
            row = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
            writer.writerow(row | about)


def main(args: Args) -> int:
    """All cases; 1 if a check failed."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)  # of TRL
    if trl is None:
        print("TRL is left out: it is not installed (pip install trl==1.16.0)")
    tuning_steps = 150 if {"A", "D"} & set(args.cases) else 0
    if args.smoke:
        cases = tuple(name for name in args.cases if name in "CD")  # A and B would be like C
        args = replace(args, cases=cases, steps=1, warmup_steps=0)
        tuning_steps = min(1, tuning_steps)
    passed = True
    with tempfile.TemporaryDirectory() as folder:
        cases = make_cases(tuning_steps, folder)
        for name in args.cases:
            case = cases[name]
            if args.smoke:
                case = replace(case, num_prompts_per_step=2, max_completion_length=24)
            rows = run_case(name, case, args, folder)
            passed = passed and len(rows) > 0
            if args.csv:
                write(args.csv, rows)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
