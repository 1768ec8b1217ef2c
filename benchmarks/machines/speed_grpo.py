"""How fast is a step of algorithms/grpo.py next to one of TRL's GRPOTrainer? CPU, one thread.

    pip install trl==1.16.0                           # without it, only our arms are timed
    OMP_NUM_THREADS=1 python benchmarks/machines/speed_grpo.py

The arms take turns in one process, and every step gives all of them the same prompts:
  TRL        its own trainer.train() with what is fastest on a CPU: float32, no gradient
             checkpointing, micro-batches of 64
  shipped    the script's rollout, advantages and update, which leaves out rows without advantage
  all rows   the same, but every row is computed: advantages of 0 are made 1e-8

Same weights, prompts, limits, rewards, loss (grpo, beta 0) and AdamW; the learning rate is 0. Before
a case is timed, the gradients of our update and of TRL's loss on the same completions are compared;
they may differ by a relative 1e-4. Times are CPU time; a ratio is of the same step.
"""

import gc
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
import transformers
import tyro
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from algorithms import grpo  # noqa: E402
from benchmarks.about import RESULTS, about  # noqa: E402
from envs.countdown import Countdown  # noqa: E402

try:
    import datasets
    import trl
except ImportError:
    trl = None


@dataclass
class Args:
    cases: tuple[str, ...] = ("many", "few", "long prompts")
    """cases to run"""
    steps: int = 7
    """timed steps of every arm, after one that is not"""
    csv: str = str(RESULTS / "speed_grpo.csv")
    """CSV to write"""
    smoke: bool = False
    """everything tiny: does the program work?"""


class LongPrompts(Countdown):
    """Prompts of 150 tokens instead of 27: worked examples stand in front."""

    def prompt(self, problem, role="solver", teammates=()):
        message = super().prompt(problem, role, teammates)[0]
        examples = "(3+4)*5=35\n(9-2)*4=28\n8*7+6=62\n" * 4
        return [{**message, "content": examples + message["content"]}]


CASES = {  # task, prompts of a step, tokens of a completion; 8 completions of each prompt
    "many": (Countdown(), 64, 64),
    "few": (Countdown(), 8, 64),
    "long prompts": (LongPrompts(), 8, 32),
}


def flags(case: str, smoke: bool):
    """Flags of the script."""
    task, prompts, length = CASES[case]
    args = grpo.Args(num_prompts_per_step=2 if smoke else prompts, learning_rate=0.0)
    args.max_completion_length = 24 if smoke else length
    args.decode_batch_size = args.num_prompts_per_step * args.num_generations
    args.reward_weights = task.reward_weights
    return args


class Script:
    """A step as the loop of grpo.py does it, without its logging."""

    def __init__(self, case: str, smoke: bool, all_rows: bool):
        self.task = CASES[case][0]
        self.all_rows = all_rows
        self.args = flags(case, smoke)
        self.model, self.tokenizer = grpo.load_model(self.args)
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, 0.0, weight_decay=0.0, fused=True)
        self.times = []  # CPU milliseconds of each step: rollout, all

    def step(self, number: int) -> None:
        """One timed step on the prompts of this number."""
        share = self.args.num_prompts_per_step
        indices = range(number * share, (number + 1) * share)
        gc.collect()
        began = time.process_time()
        problems = [self.task.train_problem(i, self.args.seed) for i in indices]
        seeds = [grpo.random_seed(self.args.seed, i) for i in indices]
        work = (self.model, self.tokenizer, self.task, problems, self.args.num_generations)
        self.completions = grpo.complete(*work, self.args, seeds)
        sampled = time.process_time()
        rewards = torch.tensor([completion.rewards for completion in self.completions])  # (B,K)
        totals = rewards @ torch.tensor(self.task.reward_weights)  # (B,)
        self.advantages = grpo.group_advantages(totals, self.args.num_generations)
        if self.all_rows:
            self.advantages = self.advantages.masked_fill(self.advantages == 0, 1e-8)
        work = (self.completions, self.advantages, self.args)
        grpo.update(self.model, None, self.optimizer, *work)
        ended = time.process_time()
        self.times.append((1e3 * (sampled - began), 1e3 * (ended - began)))


# --- TRL ------------------------------------------------------------------------------------------


def make_trainer(case: str, args, steps: int, folder: str, run_arms) -> tuple:
    """TRL's trainer on the prompts that our script draws, and the times of its steps. Our arms run
    in between."""
    task = CASES[case][0]
    problems = [task.train_problem(i, args.seed) for i in range(steps * args.num_prompts_per_step)]
    prompts = [{"prompt": task.prompt(problem), "i": i} for i, problem in enumerate(problems)]
    times = []

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
            times.append(1e3 * (time.process_time() - self.began))
            run_arms(state.global_step - 1)
            self.on_train_begin(args, state, control)

    rows = args.num_prompts_per_step * args.num_generations
    work = {"per_device_train_batch_size": min(64, rows), "max_steps": steps, "beta": 0.0}
    work["gradient_accumulation_steps"] = max(1, rows // 64)
    fast = {"bf16": False, "gradient_checkpointing": False, "use_cpu": True}
    quiet = {"logging_strategy": "no", "save_strategy": "no", "report_to": "none"}
    same = {"learning_rate": 0.0, "loss_type": "grpo", "shuffle_dataset": False}
    for name in ("num_generations", "max_completion_length", "max_grad_norm"):
        same[name] = getattr(args, name)
    path = grpo.model_path(args)
    trainer = trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        processing_class=transformers.AutoTokenizer.from_pretrained(path),
        reward_funcs=reward,
        args=trl.GRPOConfig(output_dir=folder, disable_tqdm=True, **work, **fast, **quiet, **same),
        train_dataset=datasets.Dataset.from_list(prompts),
        callbacks=[Interleave()],
    )
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    return trainer, times


def gradient_error(script: Script, trainer) -> float:
    """How far our gradient is from that of TRL's own loss on the same completions."""

    def gradient(model) -> Tensor:
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    kept = []
    hook = script.optimizer.register_step_pre_hook(lambda *_: kept.append(gradient(script.model)))
    script.args.max_grad_norm = 1e9
    script.step(0)
    script.args.max_grad_norm = flags("few", True).max_grad_norm
    script.times.clear()
    hook.remove()
    inputs = {"advantages": script.advantages}
    for name, side in (("prompt", "left"), ("completion", "right")):
        rows = [c.prompt if name == "prompt" else c.ids for c in script.completions]
        rows = [torch.tensor(row) for row in rows]
        masks = [torch.ones_like(row) for row in rows]
        inputs[f"{name}_ids"] = pad_sequence(rows, True, 0, side)
        inputs[f"{name}_mask"] = pad_sequence(masks, True, 0, side)
    trainer.current_gradient_accumulation_steps = 1
    trainer._compute_loss(trainer.model.train(), inputs).backward()
    trainer._metrics["train"].clear()
    theirs = gradient(trainer.model)
    trainer.model.zero_grad()
    return ((kept[0] - theirs).norm() / theirs.norm()).item()


# --- Measurement ----------------------------------------------------------------------------------


def run_case(case: str, args: Args, folder: str) -> list[dict]:
    """Check, then time. A row for each of our arms."""
    arms = {"shipped": Script(case, args.smoke, False), "all rows": Script(case, args.smoke, True)}

    def run_arms(step: int) -> None:
        order = list(arms.values())
        turn = step % len(order)  # each is first in turn
        for script in order[turn:] + order[:turn]:
            script.step(step)

    theirs = []
    if trl:
        our_flags = flags(case, args.smoke)
        trainer, theirs = make_trainer(case, our_flags, 1 + args.steps, folder, run_arms)
        error = gradient_error(arms["all rows"], trainer)
        if error > 1e-4:
            sys.exit(f"{case}: our gradient is {error:.1e} from TRL's: no times")
        trainer.train()
    else:
        for step in range(1 + args.steps):
            run_arms(step)
    theirs = pd.Series(theirs[1:], dtype=float)
    rows = []
    names = ["rollout", "all"]
    times = {arm: pd.DataFrame(script.times[1:], columns=names) for arm, script in arms.items()}
    for arm, own in times.items():
        row = {"case": case, "arm": arm, "ours_ms": own["all"].median()}
        row |= {"rollout_ms": own.rollout.median(), "peer_ms": theirs.median()}
        ratios = theirs / own["all"]  # of the same steps
        row |= {f"ratio_{name}": getattr(ratios, name)() for name in ("median", "min", "max")}
        rows.append(row)
    return rows


def main(args: Args) -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)  # of TRL
    rows = []
    for case in args.cases:
        with tempfile.TemporaryDirectory() as folder:
            rows += run_case(case, args, folder)
    how = about("torch", "transformers", *["trl"] * bool(trl))
    table = pd.DataFrame(rows).round(3)
    print(table.to_string())
    table.assign(**how).to_csv(args.csv, index=False, lineterminator="\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
