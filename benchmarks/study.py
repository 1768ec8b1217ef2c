"""The studies: a queue of training runs, two at a time with one thread each.

    python benchmarks/study.py            # every study: runs that are done, left, hours of a thread
    python benchmarks/study.py fm3q_games          # runs it; continues where it was stopped
    python benchmarks/study.py defaults --arms fm3q arac --seeds 2 3
    python benchmarks/study.py --repeat 10 --results FOLDER    # the ten claims that are cheapest to repeat

A finished run is a row of results/<study>.csv: task, arm, seed, learning rate, scores, minutes,
device, versions, commit and command. Its metrics go to results/<study>_curves.csv. A run
that was stopped starts again. --keep keeps the folders of runs, with their last checkpoints.

An arm with rates sweeps its learning rate first, on seed 1 and on each task by itself: three rates,
and more as long as the best one is at the edge. Its other seeds run at the best rate. Seeds go first
and arms second, so that the arms can be compared as soon as one seed is through.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock

import pandas as pd
import torch
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.about import RESULTS, about  # noqa: E402

SWEEP_SEED = 1
THREE = (2, 3, 4)
FIVE = (2, 3, 4, 5, 6)
SIX = (*FIVE, 7)
EIGHT = tuple(range(2, 10))
FRESH = (4, 5, 6, 7, 8)
TEN = tuple(range(2, 12))
TWELVE = tuple(range(2, 14))
TWENTY = tuple(range(2, 22))
TWENTY_ONE = tuple(range(2, 23))
OTHER_TWENTY = tuple(range(6, 26))
LADDER = ("2.5e-6", "5e-6", "1e-5", "2e-5", "4e-5", "8e-5", "1.6e-4", "3.2e-4")  # a public model
HPT = ("2.5e-4", "5e-4", "1e-3", "2e-3", "4e-3")
TINY = ("2.5e-5", "5e-5", "1e-4", "2e-4", "4e-4", "8e-4", "1.6e-3")  # the shipped models
STEP_SIZES = ("1e-6", "1e-5", "1e-4", "1e-3", "1e-2", "1e-1")
CONTROL = ("3e-5", "1e-4", "3e-4", "1e-3", "3e-3", "1e-2", "3e-2", "1e-1")


@dataclass(frozen=True)
class Arm:
    """Flags, and which runs: `rates` is a ladder, and the sweep starts around `start` on it."""

    flags: str = ""
    rates: tuple[str, ...] = ()  # none: the script's default, or what the flags say
    start: str = ""
    seeds: tuple[int, ...] = FIVE
    tasks: tuple[str, ...] = ()  # none: all


@dataclass(frozen=True)
class Study:
    """A command, its tasks and arms; flags of arm and task follow the command, which is empty where
    arms have scripts of their own. `{arm}` and `{seed}` are replaced."""

    command: str
    arms: dict[str, Arm]
    tasks: dict[str, str] = field(default_factory=lambda: {"": ""})
    scores: dict[str, tuple[str, str]] = field(default_factory=dict)  # column: (tag, which value)
    curves: tuple[str, ...] | list[str] = ()  # tags
    interval: int = 1  # steps; a point of a curve is the mean over so many, at their last step
    best: str = ""  # column that the sweep goes by
    sweep: str = ""  # flags of the sweep alone: problems of its own
    rate_flag: str = "--learning-rate"
    lowest: bool = False  # whether the best is the lowest
    minutes: float = 3.0  # of a run, about


def mean_at(k: int) -> dict[str, tuple[str, str]]:
    """Scores before and after training, with k samples of each problem."""
    tags = {"greedy": "eval/greedy", f"mean_at_{k}": f"eval/mean_at_{k}"}
    before = {f"first_{name}": (tag, "first") for name, tag in tags.items()}
    return before | {name: (tag, "last") for name, tag in tags.items()}


SAMPLED = "train/num_tokens"
MEAN_AT_8 = mean_at(8) | {"pass_at_8": ("eval/pass_at_8", "last"), "num_tokens": (SAMPLED, "last")}
LENGTH = "train/completions/mean_length"
MEAN_AT_2 = mean_at(2) | {"first_length": (LENGTH, "first"), "length": (LENGTH, "late")}
RETURNS = {"train_return": ("charts/episodic_return", "late")}
RETURNS |= {f"eval_{how}": (f"eval/{how}/return_mean", "last") for how in ("deterministic", "sampled")}
KUHN = {name: (f"eval/kuhn/{name}", "last") for name in ("nash_conv_last", "nash_conv_average", "illegal")}
KUHN |= {"forfeits": ("train/spiral_rae/kuhn/forfeits", "late"), "length": (LENGTH, "late")}
KUHN_CURVES = ("eval/kuhn/nash_conv_average", "train/spiral_rae/kuhn/forfeits")
ARITHMETIC = """--model-name-or-path smollm2 --bf16 --env reasoning_gym --task chain_sum
 --task-config '{"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}'
 --system-prompt "Think briefly, then end with the answer."
 --num-prompts-per-step 6 --max-completion-length 32 --micro-batch-size 16
 --max-steps 30 --eval-steps 30 --eval-problems 128 --num-generations-eval 2"""
THIRTEEN = ARITHMETIC.replace("--num-prompts-per-step 6", "--num-prompts-per-step 13")
LARGER_BATCHES = f"{ARITHMETIC} --decode-batch-size 192"  # faster on a GPU
# The overlong buffer is a fifth of the limit, as in the paper; GRPO makes one optimizer step a batch, too.
DAPO = "--overlong-buffer-len 6 --num-iterations 1 --eval-steps 6"
TWO_NUMBERS = """--model-name-or-path smollm2 --bf16 --env reasoning_gym --task chain_sum
 --task-config '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}'
 --system-prompt "Think briefly, then end with the answer."
 --num-prompts-per-step 8 --max-completion-length 48 --micro-batch-size 16
 --max-steps 40 --eval-steps 20 --eval-problems 100 --num-generations-eval 2"""
PRODUCTS = """algorithms/grpo.py --bf16 --system-prompt "Think briefly, then end with the answer."
 --max-completion-length 32 --num-generations-eval 8"""
THREE_HOPS = """--model-name-or-path runs/search_start/final --hops 3 --max-turns 6 --reward-weights 1 0 0 0
 --max-completion-length 64 --max-steps 40 --eval-steps 10"""
TWO_HOPS = """--model-name-or-path smollm2_two_hops --bf16 --max-turns 4 --hops 2 --reward-weights 1 0 0 0
 --num-prompts-per-step 4 --micro-batch-size 4 --max-completion-length 40 --max-steps 14 --eval-steps 14
 --eval-problems 64 --num-generations-eval 2 --learning-rate 2e-5"""
GOALS = ("right", "short", "well_formed")
TRIES = ("solver", "critic", "refiner")
SEARCHERS = ("router", "searcher", "refiner", "responder")
REWARDS = " ".join(f"envs/examples/arithmetic_rewards.py:{name}" for name in GOALS)
PPO = "algorithms/unimodal_poisson.py --policy gaussian"
PPO_BATCH_1 = f"{PPO} --num-envs 1 --num-steps 64 --num-minibatches 64 --update-epochs 1 --no-norm-adv"
BASELINES = {"role": "", "none": "--baseline none", "global": "--baseline global"}
FIXED = [(name, *run) for name in ("role", "none") for run in (("1e-5", (2, 5, 6)), ("4e-5", TEN))]
FIXED.append(("global", "4e-5", THREE))
VARIANTS = {"ig": "--advantage ig", "log_joint": "--normalization joint"}
VARIANTS |= {"prob_separate": "--information-gain prob"}
VARIANTS |= {"prob_joint": "--information-gain prob --normalization joint"}
START = "--second-activation {} --rate-init {} --temperature {}"
MUJOCO = ("HalfCheetah-v5", "Hopper-v5")
TWO_TASKS = ("Hopper-v5", "InvertedPendulum-v5")
WEIGHTS = ("0.001", "0.003", "0.01", "0.03", "0.1", "0.2")
ARAC = {"adaptive": Arm(), "by_time": Arm("--beta-mode exp"), "none": Arm("--beta-mode none")}
ARAC |= {f"fixed_{beta}": Arm(f"--beta-mode fixed --beta {beta}", seeds=(1,)) for beta in WEIGHTS}
WON = {f"{which}_success": ("charts/success", which) for which in ("mean", "early", "late")}
WON |= {f"{who}_success": (f"eval/{who}/success", "last") for who in ("sampled", "greedy", "reference")}
WON |= {"beta": ("train/arac/beta", "last")}
TEAMS = {mixer: f"--mixer {mixer}" for mixer in ("qmix", "twin", "vdn", "pairwise")}
TEAMS |= {learner: f"--learner {learner}" for learner in ("selfplay_vdn", "selfplay_qmix", "iql")}
POLICIES = ("poisson", "poisson_repo", "gaussian", "categorical", "ordinal")
QUIET = "--end-e 0.02 --buffer-size 10000"  # fewer random moves in the end, and early ones are forgotten
PONG = "qmix vdn selfplay_qmix iql".split()
PONG_SCORES = "exploitability exploiter_pro exploiter_ant tracker/pro/return tracker/ant/return".split()
TAG_SCORES = (*PONG_SCORES[:3], "wanderer/pro/return", "wanderer/ant/return")
SCRIPTS = "grpo dapo gdpo nash_preference dr_mas igpo arpo empg spiral_rae pi_play hpt ampo unimodal_poisson"
SCRIPTS += " mdpo stream_x fm3q arac"
STUDIES = {
    "defaults": Study(
        command="algorithms/{arm}.py",
        arms={name: Arm(seeds=(2, 3)) for name in SCRIPTS.split()},
        curves="eval/mean_at_8 eval/tictactoe/random/first/win eval/nash_conv_mean eval/sampled/success"
        " eval/exploitability charts/episodic_return charts/success".split(),
    ),
    "grpo_countdown": Study(  # at the best rate of both sweeps in grpo_runs.csv, whose runs are of a script before 1.0
        command="algorithms/grpo.py --max-steps 60 --eval-steps 20 --learning-rate 2e-4",
        arms={"grpo": Arm(), "no_baseline": Arm("--advantage none")},
        scores=MEAN_AT_8,
        curves=("eval/greedy", "eval/mean_at_8"),
        minutes=2.7,
    ),
    "grpo_second_rate": Study(  # both arms of grpo_runs.csv nearly tied at two rates; grpo_countdown has the other
        command="algorithms/grpo.py --max-steps 60 --eval-steps 20 --learning-rate 1e-4",
        arms={"grpo": Arm(), "no_baseline": Arm("--advantage none")},
        scores=MEAN_AT_8,
        curves=("eval/greedy", "eval/mean_at_8"),
        minutes=2.7,
    ),
    "grpo_135m": Study(
        command="",
        arms={
            "grpo": Arm(f"algorithms/grpo.py {ARITHMETIC}", LADDER, "4e-5", TWENTY),
            "no_baseline": Arm(f"algorithms/grpo.py {ARITHMETIC} --advantage none", LADDER, "4e-5", TWENTY),
        },
        scores=MEAN_AT_2 | {"train_late": ("train/rewards/correctness/mean", "last 10")},
        curves=("eval/greedy", "eval/mean_at_2", "train/rewards/correctness/mean"),
        best="train_late",
        minutes=6.0,
    ),
    "grpo_13_135m": Study(  # about as many samples as DAPO takes in dapo_135m
        command="",
        arms={"grpo_13": Arm(f"algorithms/grpo.py {THIRTEEN} --learning-rate 4e-5", seeds=EIGHT)}
        | {"grpo_6": Arm(f"algorithms/grpo.py {ARITHMETIC} --learning-rate 4e-5", seeds=EIGHT)},
        scores=MEAN_AT_2
        | {"num_tokens": (SAMPLED, "last"), "train_late": ("train/rewards/correctness/mean", "last 10")}
        | {f"silent_{when}": ("train/frac_reward_zero_std", when) for when in ("early", "late")},
        curves=("eval/greedy", "eval/mean_at_2", "train/rewards/correctness/mean", SAMPLED),
        minutes=11.0,
    ),
    "dapo_135m": Study(  # GRPO and REINFORCE have the rates of grpo_135m; seeds to 17 ran on a GPU, the others on a CPU
        command="",
        arms={
            "dapo": Arm(f"algorithms/dapo.py {LARGER_BATCHES} {DAPO}", LADDER, "4e-5", TWENTY_ONE),
            "grpo_4e-5": Arm(f"algorithms/grpo.py {LARGER_BATCHES} --learning-rate 4e-5", seeds=TWENTY_ONE),
            "grpo_2e-5": Arm(f"algorithms/grpo.py {LARGER_BATCHES} --learning-rate 2e-5", seeds=TWENTY_ONE),
            "none_2e-5": Arm(f"algorithms/grpo.py {LARGER_BATCHES} --advantage none --learning-rate 2e-5", seeds=TWENTY_ONE),
        },
        scores=MEAN_AT_2
        | {f"mean_at_2_{step}": ("eval/mean_at_2", f"at {step}") for step in (12, 18)}
        | {f"num_tokens_{step}": (SAMPLED, f"at {step}") for step in (12, 18)}
        | {"num_tokens": (SAMPLED, "last"), "train_late": ("train/rewards/correctness/mean", "last 10")}
        | {f"silent_{when}": ("train/frac_reward_zero_std", when) for when in ("early", "late")},
        curves=("eval/greedy", "eval/mean_at_2", "train/rewards/correctness/mean", SAMPLED),
        best="train_late",
        minutes=8.0,
    ),
    "products_135m": Study(
        command=f"{PRODUCTS} --model-name-or-path smollm2 --env reasoning_gym --task products"
        """ --task-config '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}'"""
        " --num-prompts-per-step 8 --micro-batch-size 16 --max-steps 40 --eval-steps 10",
        arms={"grpo": Arm("", LADDER, "4e-5")},
        scores=MEAN_AT_8
        | {f"silent_{when}": ("train/frac_reward_zero_std", when) for when in ("early", "late")}
        | {"train_late": ("train/rewards/correctness/mean", "late")},
        curves=("eval/greedy", "eval/mean_at_8", "train/rewards/correctness/mean"),
        best="train_late",
        minutes=3.0,
    ),
    "products_harder": Study(  # of one digit and two: the models that products_135m made with --keep runs/products
        command=f"{PRODUCTS} --eval-dataset benchmarks/two_digit_products.jsonl --max-steps 0"
        " --reward envs/examples/arithmetic_rewards.py:right --model-name-or-path",
        arms={
            "before": Arm("smollm2", seeds=(2,)),
            "after": Arm("runs/products/grpo_{seed}_2e-5/final"),
        },
        scores={name: (f"eval/{name}", "last") for name in ("greedy", "mean_at_8", "pass_at_8")},
        minutes=1.5,
    ),
    "grpo_vllm": Study(  # these two run in the environment with vLLM, of which the page says how it is made
        command="algorithms/grpo.py",
        arms={"generate": Arm("", seeds=THREE), "vllm": Arm("--vllm", seeds=THREE)},
        scores=MEAN_AT_8,
        curves=("eval/mean_at_8",),
        best="mean_at_8",
        minutes=4.0,
    ),
    "dr_mas_team": Study(  # at the best rate of both sweeps in dr_mas_runs.csv, whose runs are of a script before 1.0
        command="benchmarks/refiner_team.py --max-steps 40 --num-prompts-per-step 16 --eval-steps 20 --eval-problems 64"
        " --learning-rate 2e-4",
        arms={"agent": Arm(), "global": Arm("--normalization global")},
        scores=MEAN_AT_8
        | {f"{name}_norm_max": (f"train/dr_mas/{name}/grad_norm", "max") for name in SEARCHERS}
        | {f"{name}_calls": (f"train/dr_mas/{name}/calls", "mean") for name in SEARCHERS}
        | {"refiner_inflation": ("train/dr_mas/refiner/inflation_factor", "mean")},
        curves=("eval/mean_at_8", *(f"train/dr_mas/{name}/grad_norm" for name in SEARCHERS)),
        minutes=2.8,
    ),
    "dr_mas_135m": Study(  # after a cold start, see dr_mas.md
        command="algorithms/dr_mas.py --env envs/examples/retry.py:Retry --bf16"
        ' --system-prompt "Think briefly, then end with the answer."'
        " --model-name-or-path runs/products_start/final --num-prompts-per-step 8 --micro-batch-size 16"
        " --max-completion-length 32 --max-steps 15 --eval-steps 15",
        arms={
            "agent": Arm("", LADDER, "2e-5"),
            "global": Arm("--normalization global", LADDER, "2e-5"),
        },
        scores=MEAN_AT_8
        | {f"{name}_norm_max": (f"train/dr_mas/{name}/grad_norm", "max") for name in TRIES}
        | {f"{name}_calls": (f"train/dr_mas/{name}/calls", "mean") for name in TRIES}
        | {f"{name}_inflation": (f"train/dr_mas/{name}/inflation_factor", "mean") for name in TRIES}
        | {"train_mean": ("train/rewards/correctness/mean", "mean")}
        | {"train_late": ("train/rewards/correctness/mean", "last 10")},
        curves=(
            "eval/mean_at_8",
            "train/rewards/correctness/mean",
            *(f"train/dr_mas/{name}/{tag}" for name in TRIES for tag in ("grad_norm", "calls")),
        ),
        best="train_late",
        minutes=4.0,
    ),
    "smollm2_lora": Study(
        command=f"algorithms/grpo.py {TWO_NUMBERS}",
        arms={
            "full": Arm("--learning-rate 2e-5", seeds=THREE),
            "vllm_lora": Arm("--vllm --lora-rank 16 --learning-rate 2e-4", seeds=THREE),
        },
        scores=MEAN_AT_2,
        curves=("eval/greedy", "eval/mean_at_2"),
        best="mean_at_2",
        minutes=6.0,
    ),
    "gdpo_135m": Study(
        command=f"algorithms/gdpo.py {ARITHMETIC} --reward {REWARDS}",
        arms={
            "gdpo": Arm("", LADDER, "4e-5"),
            "grpo": Arm("--advantage grpo", LADDER, "4e-5"),
            "grpo_batch_norm": Arm("--advantage grpo_batch_norm", LADDER, "4e-5", seeds=THREE),
            "gdpo_conditioned": Arm("--conditioned-rewards short", LADDER, "4e-5", TWENTY),
            "grpo_conditioned": Arm("--advantage grpo --conditioned-rewards short", LADDER, "4e-5", TWENTY),
        },
        scores=MEAN_AT_2 | {name: (f"eval/rewards/{name}", "last") for name in GOALS},
        best="mean_at_2",
        minutes=3.0,
    ),
    "gdpo_tools": Study(  # at the best rates of the sweep in gdpo_runs.csv
        command="algorithms/gdpo.py --max-steps 60 --num-prompts-per-step 16 --eval-steps 30",
        arms={
            "gdpo": Arm("--learning-rate 2e-4", seeds=TWENTY),
            "grpo": Arm("--advantage grpo --learning-rate 4e-4", seeds=TWENTY),
            "grpo_batch_norm": Arm("--advantage grpo_batch_norm --learning-rate 4e-4", seeds=TWENTY),
        },
        scores=MEAN_AT_8,
        curves=("eval/mean_at_8",),
        minutes=2.5,
    ),
    "spiral_135m": Study(  # after a cold start, see README.md
        command="algorithms/spiral_rae.py --model-name-or-path smollm2_games --bf16 --games kuhn"
        """ --game-options '{"kuhn": {"handicap": 3}}' --num-games-per-step 12 --micro-batch-size 16"""
        " --max-completion-length 40 --max-steps 20 --eval-steps 5 --eval-games 1 --eval-samples 16",
        arms={name: Arm(flags, LADDER, "2e-5", seeds=THREE) for name, flags in BASELINES.items()}
        | {name + rate: Arm(f"{BASELINES[name]} --learning-rate {rate}", seeds=seeds) for name, rate, seeds in FIXED},
        scores={f"first_{name}": (tag, "first") for name, (tag, _) in KUHN.items()} | KUHN,
        curves=KUHN_CURVES,
        best="nash_conv_average",
        lowest=True,
        minutes=7.0,
    ),
    "igpo_135m": Study(  # after a cold start, see README.md
        command="algorithms/igpo.py --model-name-or-path smollm2_search --bf16 --max-turns 4"
        " --num-prompts-per-step 4 --micro-batch-size 8 --max-completion-length 40 --max-steps 30"
        " --eval-steps 30 --eval-problems 64 --num-generations-eval 2",
        arms={"f1ig": Arm("", LADDER, "2e-5"), "f1": Arm("--advantage f1", LADDER, "2e-5")},
        scores=MEAN_AT_2,
        curves=("eval/greedy", "eval/mean_at_2", "train/rewards/f1/mean"),
        best="mean_at_2",
        minutes=18.0,
    ),
    "two_hops_135m": Study(  # after a longer cold start, see README.md; rewards are exact matches alone
        command="",
        tasks={"": TWO_HOPS},
        arms={
            "igpo": Arm("algorithms/igpo.py"),
            "outcome": Arm("algorithms/igpo.py --advantage f1"),
            "empg": Arm("algorithms/empg.py"),
        },
        scores=MEAN_AT_2
        | {f"silent_{when}": ("train/frac_reward_zero_std", f"{when} 3") for when in ("first", "last")}
        | {f"train_{when}": ("train/rewards/exact_match/mean", f"{when} 3") for when in ("first", "last")}
        | {"first_turns": ("eval/turns", "first"), "turns": ("eval/turns", "last")}  # of the greedy episode
        | {"steps_to_15": ("train/rewards/exact_match/mean", "reach 0.15")},
        curves=("eval/greedy", "eval/mean_at_2", "train/rewards/exact_match/mean", "train/igpo/turns", "train/empg/turns"),
        minutes=28.0,
    ),
    "igpo": Study(
        command="algorithms/igpo.py --max-steps 40 --eval-steps 20",
        arms={
            "f1ig": Arm("", TINY, "4e-4"),
            "f1": Arm("--advantage f1", TINY, "4e-4"),
            **{name: Arm(f"{flags} --learning-rate 4e-4", seeds=THREE) for name, flags in VARIANTS.items()},
        },
        scores=MEAN_AT_8
        | {"steps_to_f1": ("train/rewards/f1/mean", "reach 0.8")}
        | {"equal_outcomes": ("train/frac_reward_zero_std", "last 10")}
        | {"no_signal": ("train/igpo/frac_no_signal", "last 10")},
        curves=("eval/mean_at_8", "train/rewards/f1/mean"),
        best="mean_at_8",
        minutes=1.2,
    ),
    "sparse_search": Study(  # from a model that igpo.md makes; rewards are exact matches alone
        command="",
        tasks={"": THREE_HOPS},
        arms={
            "igpo": Arm("algorithms/igpo.py", TINY, "4e-4", EIGHT),
            "outcome": Arm("algorithms/igpo.py --advantage f1", TINY, "4e-4", EIGHT),
            "empg": Arm("algorithms/empg.py", TINY, "4e-4", EIGHT),
            "empg_2e-4": Arm("algorithms/empg.py --learning-rate 2e-4", seeds=EIGHT),
        },
        scores=MEAN_AT_8
        | {f"silent_{when}": ("train/frac_reward_zero_std", when) for when in ("early", "late")}
        | {f"train_{when}": ("train/rewards/exact_match/mean", when) for when in ("early", "late")}
        | {"steps_to_15": ("train/rewards/exact_match/mean", "reach 0.15")},
        curves=("eval/mean_at_8", "train/rewards/exact_match/mean", "train/frac_reward_zero_std"),
        best="train_late",  # of training problems, which are new at every step
        minutes=2.5,
    ),
    "pi_play_teacher": Study(
        command="algorithms/pi_play.py --max-steps 60 --eval-steps 5",
        arms={
            "teacher": Arm("", TINY, "4e-4"),
            "none": Arm("--privileged-context none", TINY, "2e-4"),
        },
        scores=MEAN_AT_8
        | {f"silent_{when}": ("train/frac_reward_zero_std", when) for when in ("early", "late")},
        curves=("eval/greedy", "eval/mean_at_8", "train/frac_reward_zero_std"),
        best="mean_at_8",
        sweep="--env benchmarks/sweep_problems.py:SweepQuestions --model-name-or-path envs/tiny_lm/search_qa"
        " --max-completion-length 64 --lambda-schedule 1 0.3 0.1",  # that of the shipped model, which other models do not have as default
    ),
    "hpt": Study(
        command="algorithms/hpt.py --max-steps 60 --eval-steps 30",
        arms={
            "hpt": Arm("--method hpt", HPT, "1e-3"),
            "grpo": Arm("--method grpo", ("1e-4", "4e-4", "1.6e-3", "6.4e-3"), "4e-4"),
            "sft": Arm("--method sft", HPT, "1e-3", TWENTY),
            "srft": Arm("--method srft --learning-rate 1e-3", seeds=THREE),
            "hpt_length": Arm("--method hpt --normalizer length", HPT, "1e-3", TWENTY),  # RL weighs more, as in HPT's code
        },
        scores=MEAN_AT_8 | {"demonstration_tokens": ("train/num_demonstration_tokens", "last")},
        curves=("eval/greedy", "eval/mean_at_8", "train/sft_share"),
        best="mean_at_8",
        minutes=2.0,
    ),
    "ampo": Study(
        command="algorithms/ampo.py --max-steps 60 --eval-steps 30",
        arms={
            "ampo": Arm("", HPT, "1e-3"),
            "grpo": Arm("--method grpo --learning-rate 4e-4"),  # its best rate in the study hpt
            "one_teacher": Arm("--method one_teacher --learning-rate 1e-3", seeds=THREE),
            "random": Arm("--method random --learning-rate 1e-3", seeds=THREE),
            "v2": Arm("--rule v2 --learning-rate 1e-3", seeds=THREE),
        },
        scores=MEAN_AT_8 | {"demonstration_tokens": ("train/num_demonstration_tokens", "last")},
        curves=("eval/greedy", "eval/mean_at_8", "train/guided_share", "train/comprehension"),
        best="mean_at_8",
        minutes=2.0,
    ),
    "nash_preference": Study(  # one rate for all arms; its sweep was a pilot on seed 1
        command="algorithms/nash_preference.py",
        arms={name: Arm(f"--method {name}") for name in ("inpo", "grpo")}
        | {"grpo_kl": Arm("--method grpo --beta 0.1", seeds=THREE)}  # pulls as --tau 0.1 does
        | {name: Arm(f"--method {name}", seeds=THREE) for name in ("mnpo", "nash_mp", "spo")},
        scores={tag: (f"eval/{tag}", "last") for tag in ("exploitability", "nash_distance", "win_rate")}
        | {kind: (f"train/kind/{kind}", "late") for kind in ("sum", "difference", "product", "other")},
        curves=[f"eval/{tag}" for tag in ("exploitability", "nash_distance", "win_rate")]
        + [f"train/kind/{kind}" for kind in ("sum", "difference", "product", "other")],
        best="exploitability",
        lowest=True,
        minutes=5.0,
    ),
    "empg": Study(
        command="algorithms/empg.py --max-steps 40 --eval-steps 20",
        arms={
            "empg": Arm("", TINY, "2e-4"),
            "grpo": Arm("--advantage grpo", TINY, "2e-4"),
            "scaling": Arm("--zeta 0 --learning-rate 8e-4", seeds=THREE),
            "bonus": Arm("--k 0 --learning-rate 8e-4", seeds=THREE),
        },
        scores=MEAN_AT_8,
        curves=("eval/mean_at_8", "train/empg/entropy/mean", "train/entropy", "train/grad_norm"),
        best="mean_at_8",
    ),
    "arpo": Study(
        command="algorithms/arpo.py --max-steps 40 --eval-steps 20 --learning-rate 4e-4",  # best in the study igpo
        arms={
            "arpo": Arm(),
            "grpo": Arm("--initial-rollouts 8"),
            "grpo_equal_calls": Arm("--initial-rollouts 8 --num-prompts-per-step 11"),
            "grpo_equal_tokens": Arm("--initial-rollouts 8 --num-prompts-per-step 13"),
            "random": Arm("--entropy-weight 0", seeds=THREE),
            "strong": Arm("--entropy-weight 5", seeds=THREE),
            "hard": Arm("--advantage hard", seeds=THREE),
        },
        scores=MEAN_AT_8
        | {"steps_to_f1": ("train/rewards/f1/mean", "reach 0.8")}
        | {"tool_calls": ("train/arpo/tool_calls", "mean"), "branched": ("train/arpo/branched", "mean")},
        curves=("eval/mean_at_8", "train/rewards/f1/mean", "train/arpo/tool_calls", "train/arpo/sampled_tokens"),
        minutes=1.5,
    ),
    "arpo_sparse": Study(  # three hops, from the model of sparse_search; 12 problems need as many calls as ARPO's 16
        command=f"algorithms/arpo.py {THREE_HOPS}",
        arms={
            "arpo": Arm("", TINY, "2e-4", EIGHT),
            "grpo": Arm("--initial-rollouts 8", TINY, "2e-4", EIGHT),
            "grpo_equal_calls": Arm("--initial-rollouts 8 --num-prompts-per-step 12", TINY, "2e-4", EIGHT),
            "random": Arm("--entropy-weight 0", TINY, "2e-4", EIGHT),
            "random_2e-4": Arm("--entropy-weight 0 --learning-rate 2e-4", seeds=EIGHT),
            "strong": Arm("--entropy-weight 5", TINY, "2e-4", EIGHT),
        },
        scores=MEAN_AT_8
        | {"mean_at_8_20": ("eval/mean_at_8", "at 20")}
        | {name: (f"train/arpo/{name}", "mean") for name in ("tool_calls", "sampled_tokens", "branched")}
        | {f"change_{when}": ("train/arpo/entropy_change", when) for when in ("early", "late")}
        | {f"silent_{when}": ("train/frac_reward_zero_std", when) for when in ("early", "late")},
        curves=("eval/mean_at_8", "train/arpo/entropy_change"),
        best="mean_at_8",
        sweep="--env benchmarks/sweep_problems.py:SweepThreeHops",
        minutes=2.2,
    ),
    "stream_x": Study(
        command="",
        tasks={name: f"--env-id {name} --total-timesteps 200000" for name in MUJOCO},
        arms={
            "stream": Arm("algorithms/stream_x.py", seeds=TWENTY),
            "ppo": Arm(PPO, CONTROL, "3e-4", TWENTY),
            "ppo_1e-3": Arm(f"{PPO} --learning-rate 1e-3", seeds=TWENTY),  # nearly tied in the sweeps
            "ppo_batch_1": Arm(PPO_BATCH_1, ("1e-6", "3e-6", "1e-5", *CONTROL), "3e-5"),
        },
        scores={name: RETURNS[name] for name in ("train_return", "eval_sampled")},
        curves=("charts/episodic_return",),
        best="train_return",
        minutes=4.0,
    ),
    "stream_parts": Study(  # a control's run that diverges counts with what it returned before that
        command="algorithms/stream_x.py",
        tasks={name: f"--env-id {name} --total-timesteps 100000" for name in MUJOCO},
        arms={
            "stream": Arm(seeds=SIX),
            "no_bound": Arm("--optimizer sgd", STEP_SIZES, "1e-4", SIX),
            "no_layer_norm": Arm("--no-layer-norm", seeds=SIX),
            "no_sparse_init": Arm("--no-sparse-init", seeds=SIX),
            "none": Arm("--optimizer sgd --no-layer-norm --no-sparse-init", STEP_SIZES, "1e-4", SIX),
        },
        scores={name: RETURNS[name] for name in ("train_return", "eval_sampled")},
        curves=("charts/episodic_return",),
        best="train_return",
        rate_flag="--lr",
        minutes=2.0,
    ),
    "stream_million": Study(
        command="",
        tasks={name: f"--env-id {name} --total-timesteps 1000000" for name in MUJOCO},
        arms={
            "stream": Arm("algorithms/stream_x.py"),
            "ppo": Arm(PPO, CONTROL, "3e-4"),
        },
        scores={name: RETURNS[name] for name in ("train_return", "eval_sampled")},
        curves=("charts/episodic_return",),
        best="train_return",
        minutes=7.0,
    ),
    "mdpo_cheetah": Study(  # at the best rates of mdpo, on seeds that it has not used
        command="",
        arms={
            name: Arm(f"{flags} --env-id HalfCheetah-v5 --total-timesteps 300000", seeds=tuple(range(7, 27)))
            for name, flags in {
                "mdpo": "algorithms/mdpo.py --learning-rate 1e-3",
                "one_step": "algorithms/mdpo.py --sgd-steps 1 --learning-rate 1e-2",
                "ppo": f"{PPO} --learning-rate 1e-3",
            }.items()
        },
        scores={name: RETURNS[name] for name in ("train_return", "eval_deterministic")},
        curves=("charts/episodic_return",),
        minutes=1.0,
    ),
    "mdpo": Study(
        command="",
        tasks={name: f"--env-id {name} --total-timesteps 300000" for name in MUJOCO},
        arms={
            "mdpo": Arm("algorithms/mdpo.py", CONTROL, "3e-3"),
            "one_step": Arm("algorithms/mdpo.py --sgd-steps 1", CONTROL, "3e-3"),
            "one_step_1e-2": Arm("algorithms/mdpo.py --sgd-steps 1 --learning-rate 1e-2", tasks=MUJOCO[1:]),  # nearly tied
            "ppo": Arm(PPO, CONTROL, "3e-4"),  # the rows of its sweep are from poisson_heads
        },
        scores={name: RETURNS[name] for name in ("train_return", "eval_deterministic")},
        curves=("charts/episodic_return",),
        best="train_return",
        minutes=1.0,
    ),
    "mdpo_million": Study(
        command="",
        tasks={name: f"--env-id {name} --total-timesteps 1000000" for name in MUJOCO},
        arms={
            "mdpo": Arm("algorithms/mdpo.py", CONTROL, "3e-3", TEN),
            "one_step": Arm("algorithms/mdpo.py --sgd-steps 1", CONTROL, "1e-2", TEN),
            "ppo": Arm(PPO, CONTROL, "3e-4", TEN),
        },
        scores={name: RETURNS[name] for name in ("train_return", "eval_deterministic")},
        curves=("charts/episodic_return",),
        best="train_return",
        minutes=3.3,
    ),
    "mdpo_ten_million": Study(  # as long as its authors train, at their rate; the others at the best one of mdpo_million
        command="",
        tasks={"Hopper-v5": "--env-id Hopper-v5 --total-timesteps 10000000"},
        arms={
            name: Arm(flags, seeds=tuple(range(12, 17)))
            for name, flags in {
                "mdpo": "algorithms/mdpo.py --learning-rate 3e-4",
                "one_step": "algorithms/mdpo.py --sgd-steps 1 --learning-rate 3e-3",
                "ppo": f"{PPO} --learning-rate 3e-4",
            }.items()
        },
        scores={name: RETURNS[name] for name in ("train_return", "eval_deterministic")},
        curves=("charts/episodic_return",),
        interval=100_000,
        minutes=34.0,
    ),
    "fm3q_games": Study(  # a seed is a game
        command="algorithms/fm3q.py --env-id arat_random --num-pro 3 --num-ant 3 --num-states 50"
        " --total-timesteps 50000 --eval-steps 2500",
        tasks={"arat_random": "--game-seed {seed}"},
        arms={name: Arm(flags, CONTROL, "3e-3", TEN) for name, flags in TEAMS.items()}
        | {f"{name}_quiet": Arm(f"{TEAMS[name]} {QUIET}", CONTROL, "3e-3", TWENTY) for name in ("qmix", "selfplay_qmix", "iql")},
        scores={"nash_conv": ("eval/nash_conv_mean", "last"), "late_nash_conv": ("eval/nash_conv_mean", "late")}
        | {"value_error": ("eval/value_error_max", "last")},
        curves=("eval/nash_conv_mean",),
        best="late_nash_conv",
        lowest=True,
        minutes=0.4,
    ),
    "fm3q_small": Study(  # seeds that the earlier runs of this game have not used
        command="algorithms/fm3q.py --env-id arat --total-timesteps 40000 --eval-steps 800",
        arms={name: Arm(TEAMS[name], CONTROL, "1e-3", OTHER_TWENTY) for name in ("qmix", "selfplay_qmix")}
        | {f"{name}_quiet": Arm(f"{TEAMS[name]} {QUIET}", CONTROL, "1e-3", OTHER_TWENTY) for name in ("qmix", "selfplay_qmix")}
        | {"selfplay_3e-2": Arm(f"{TEAMS['selfplay_qmix']} --learning-rate 3e-2", seeds=OTHER_TWENTY)}  # nearly tied
        | {"selfplay_quiet_3e-2": Arm(f"{TEAMS['selfplay_qmix']} {QUIET} --learning-rate 3e-2", seeds=OTHER_TWENTY)},
        scores={"steps_to_005": ("eval/nash_conv_mean", "below 0.05")}
        | {f"{which}_nash_conv": ("eval/nash_conv_mean", which) for which in ("late", "mean")},
        curves=("eval/nash_conv_mean",),
        best="mean_nash_conv",  # speed and what comes after
        lowest=True,
        minutes=0.3,
    ),
    "fm3q_pong": Study(
        command="algorithms/fm3q.py --env-id pong --gamma 0.99 --num-envs 256 --updates-per-step 4"
        " --total-timesteps 1000000 --eval-steps 250000 --exploiter-steps 400000",
        arms={name: Arm(TEAMS[name], CONTROL, "1e-3") for name in PONG},
        scores={tag.replace("/", "_"): (f"eval/{tag}", "last") for tag in PONG_SCORES},
        best="exploitability",
        lowest=True,
    ),
    "fm3q_tag": Study(  # pip install pettingzoo mpe2
        command="algorithms/fm3q.py --env-id mpe2.simple_tag_v3 --num-envs 16 --gamma 0.95 --eval-games 64"
        " --total-timesteps 300000 --eval-steps 100000 --exploiter-steps 100000",
        arms={name: Arm(TEAMS[name], seeds=(1,)) for name in ("qmix", "selfplay_qmix")},
        scores={tag.replace("/", "_"): (f"eval/{tag}", "last") for tag in TAG_SCORES},
        minutes=8.0,
    ),
    "arac_weight": Study(  # weights of the control are swept on seed 1
        command="algorithms/arac.py --graph cycle_12 --horizon 24 --total-timesteps 60000 --eval-steps 0",
        arms=ARAC
        | {"fixed": Arm("--beta-mode fixed --beta 0.003")}  # the best weight
        | {"adaptive_low": Arm("--beta 0.0067")},  # an unused first weight of EPG, for a reward of 1
        scores=WON,
        curves=("charts/success", "train/arac/beta"),
        minutes=1.5,
    ),
    "arac_large": Study(  # the same with a good reference; seeds that arac_grid has not used
        command="algorithms/arac.py --graph grid_10x10 --evader dp --start far --horizon 128"
        " --total-timesteps 60000 --eval-steps 0 --batch-size 32",
        arms={name: replace(arm, seeds=FRESH) if len(arm.seeds) > 1 else arm for name, arm in ARAC.items()}
        | {"fixed": Arm("--beta-mode fixed --beta 0.003", seeds=FRESH)}  # the best weight by training
        | {"fixed_low": Arm("--beta-mode fixed --beta 0.001", seeds=FRESH)}  # the best weight in the end
        | {"adaptive_low": Arm("--beta 0.0067", seeds=FRESH)},
        scores=WON,
        curves=("charts/success", "train/arac/beta"),
        minutes=4.0,
    ),
    "arac_imperfect": Study(  # games of 80 steps, in which the reference wins some and chance few
        command="algorithms/arac.py --graph grid_10x10 --evader dp --start far --horizon 80"
        " --total-timesteps 60000 --eval-steps 0 --batch-size 32",
        arms={"adaptive": Arm(), "none": Arm("--beta-mode none")}
        | {name: arm for name, arm in ARAC.items() if name in ("fixed_0.001", "fixed_0.003", "fixed_0.01")}
        | {"fixed": Arm("--beta-mode fixed --beta 0.003")},  # the best weight
        scores=WON,
        curves=("charts/success", "train/arac/beta"),
        minutes=5.0,
    ),
    "arac_grid": Study(
        command="algorithms/arac.py --graph grid_10x10 --evader dp --start far --horizon 128"
        " --total-timesteps 60000 --eval-steps 0 --batch-size 32",
        tasks={"shortest": "--reference shortest", "dp": "--reference dp"},
        arms={name: Arm(f"--beta-mode {name}", seeds=(1, 2, 3)) for name in ("dual", "exp", "fixed")}
        | {"none": Arm("--beta-mode none", seeds=(1, 2, 3), tasks=("shortest",))},
        scores={
            **{f"{which}_success": ("charts/success", which) for which in ("early", "late")},
            **{f"{who}_success": (f"eval/{who}/success", "last") for who in ("sampled", "greedy", "reference")},
            "beta": ("train/arac/beta", "last"),
        },
        curves=("charts/success", "train/arac/beta"),
        minutes=4.0,
    ),
    "poisson_start": Study(
        command="algorithms/unimodal_poisson.py --total-timesteps 300000",
        tasks={name: f"--env-id {name}" for name in TWO_TASKS},
        arms={
            "_".join(start): Arm(START.format(*start), seeds=(1,))
            for layer in ("tanh", "softplus")
            for start in ((layer, "0.6931", "2.5"), *((layer, "6", t) for t in ("0.5", "1", "2.5")))
        }
        | {"exp_link": Arm("--rate-link exp", seeds=(1,))},
        scores=RETURNS,
        minutes=2.5,
    ),
    "poisson_heads": Study(
        command="algorithms/unimodal_poisson.py --total-timesteps 300000",
        tasks={name: f"--env-id {name}" for name in (*TWO_TASKS, "HalfCheetah-v5")},
        arms={name: Arm(f"--policy {name}", CONTROL, "3e-4") for name in POLICIES}  # on Hopper three have 20 seeds
        | {"poisson_softplus": Arm("--second-activation softplus", CONTROL, "3e-4", tasks=TWO_TASKS)}
        | {"poisson_3e-4": Arm("--policy poisson --learning-rate 3e-4", tasks=("Hopper-v5",))},
        scores=RETURNS,
        curves=("charts/episodic_return",),
        best="train_return",
        minutes=2.5,
    ),
    "poisson_cheetah": Study(  # both at their best rate of poisson_heads
        command="algorithms/unimodal_poisson.py --env-id HalfCheetah-v5 --total-timesteps 300000 --learning-rate 1e-3",
        arms={name: Arm(f"--policy {name}", seeds=TWENTY) for name in ("poisson", "gaussian")},
        scores=RETURNS,
        curves=("charts/episodic_return",),
        minutes=1.0,
    ),
    "poisson_humanoid": Study(
        command="algorithms/unimodal_poisson.py --env-id Humanoid-v5 --total-timesteps 500000",
        arms={name: Arm(f"--policy {name}", CONTROL, "3e-4", TWELVE) for name in ("poisson", "gaussian")},
        scores=RETURNS,
        curves=("charts/episodic_return",),
        best="train_return",
        minutes=8.0,
    ),
    "spiral_kuhn_g1": Study(
        command="algorithms/spiral_rae.py --games kuhn --num-games-per-step 64 --max-steps 25"
        """ --game-options '{"kuhn": {"handicap": 3}}' --eval-steps 5 --eval-games 1""",
        arms={
            speed + name: Arm(f"{flags} --learning-rate {rate}")
            for speed, rate in (("", "6e-5"), ("fast_", "4e-4"))
            for name, flags in BASELINES.items()
        },
        scores=KUHN,
        curves=KUHN_CURVES,
        minutes=1.5,
    ),
}


@dataclass
class Args:
    study: tyro.conf.Positional[str] = ""
    """which study to run; none lists them all"""
    arms: tuple[str, ...] = ()
    """arms to run; none means all"""
    tasks: tuple[str, ...] = ()
    """tasks to run; none means all"""
    seeds: tuple[int, ...] = ()
    """seeds to run; none means those of each arm"""
    jobs: int = 2
    """runs at the same time, one thread each"""
    keep: str = ""
    """folder in which the runs of a study stay with their last checkpoints, as TASK_ARM_SEED_RATE"""
    repeat: int = 0
    """in place of a study: run so many claims of claims.csv again, the cheapest ones, and compare"""
    extra: str = ""
    """further flags for every run, to try the program: --extra="--max-steps 1" --results FOLDER"""
    results: str = str(RESULTS)
    """folder of the CSVs"""


@dataclass(frozen=True)
class Run:
    """What tells a run of a study from its others."""

    task: str
    arm: str
    seed: int
    learning_rate: str = ""  # empty: the default, or what the flags say


lock = Lock()  # of the CSVs and of what is printed


def score(metrics: pd.DataFrame, tag: str, which: str) -> float:
    """First or last value of a tag, or its mean over the first or last tenth of the steps, or NaN.
    `at 12` is the value at step 12. `mean`, `max`, `first 3`, `last 10`: mean or largest of all, or mean
    of so many values. `reach 0.8`: first step whose last five have this mean; `below 0.05`: first
    step with a lower value, the last step if there is none."""
    rows = metrics[metrics.tag == tag]
    end = metrics.step.max()
    if which.startswith("reach"):
        return rows.step[rows.value.rolling(5).mean() >= float(which.split()[1])].min()
    if which.startswith("below"):
        return min(rows.step[rows.value < float(which.split()[1])], default=end)
    if which.startswith("at"):
        return rows.value[rows.step == int(which.split()[1])].mean()
    if which == "max":
        return rows.value.max()
    word, _, count = which.partition(" ")
    chosen = {
        "first": rows.head(int(count or 1)),
        "last": rows.tail(int(count or 1)),
        "mean": rows,
        "early": rows[rows.step <= 0.1 * end],
        "late": rows[rows.step > 0.9 * end],
    }
    return chosen[word].value.mean()


def thin(metrics: pd.DataFrame, interval: int) -> pd.DataFrame:
    """Rows (step, tag, value): means over the logged values of each interval, at its last logged step."""
    rows = metrics[["step", "tag", "value"]]
    if interval == 1 or rows.empty:
        return rows
    parts = rows.groupby([rows.tag, (rows.step - 1) // interval], sort=False)
    return parts.agg(step=("step", "last"), tag=("tag", "first"), value=("value", "mean"))


def finished(args: Args) -> pd.DataFrame:
    """Rows of the study's CSV, as text."""
    path = Path(args.results, f"{args.study}.csv")
    if not path.exists():
        return pd.DataFrame(columns=["task", "arm", "seed", "learning_rate"])
    with lock:
        return pd.read_csv(path, dtype=str, keep_default_na=False)


def is_done(rows: pd.DataFrame, run: Run) -> bool:
    """Whether a run has its row."""
    key = {name: str(value) for name, value in vars(run).items()}
    return bool((rows[[*key]] == key).all(axis=1).any())


def append(path: Path, rows: pd.DataFrame) -> None:
    """Add rows to a CSV, with a header if it is new."""
    rows.to_csv(path, mode="a", header=not path.exists(), index=False, lineterminator="\n")


def commit() -> str:
    """The commit that is checked out; marked where the scripts or tasks differ from it."""
    changed = subprocess.getoutput(f"git -C {ROOT} status --porcelain algorithms envs")
    head = subprocess.getoutput(f"git -C {ROOT} rev-parse --short HEAD")
    return f"{head}-modified" if changed else head


def command_of(name: str, run: Run) -> str:
    """Script and flags of a run, without its seed."""
    study = STUDIES[name]
    command = f"{study.command} {study.arms[run.arm].flags} {study.tasks[run.task]}"
    if run.learning_rate:
        command += f" {study.rate_flag} {run.learning_rate}"
        command += f" {study.sweep}" if run.seed == SWEEP_SEED else ""
    return command.replace("{arm}", run.arm).replace("{seed}", str(run.seed))


def train(args: Args, run: Run) -> None:
    """One run in a process of its own, unless it has its row; adds its rows."""
    study = STUDIES[args.study]
    if is_done(finished(args), run):
        return
    words = shlex.split(command_of(args.study, run))
    kept = "2000" if "stream_x.py" in words[0] else "1000000000"  # there they are also the steps of a row
    words += ["--seed", str(run.seed), "--save-steps", kept if args.keep else "0"]
    words += shlex.split(args.extra)
    made = commit()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        name = "_".join(str(part) for part in vars(run).values() if part != "")
        folder = Path(args.keep or temporary, name).absolute()
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped
        command = [sys.executable, *words, "--output-dir", str(folder)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
        diverged = "not finite" in process.stderr  # a result: its scores are from before that
        if process.returncode and not diverged:
            sys.stderr.write(f"{shlex.join(words)} failed:\n{process.stderr}")
            return
        if (folder / "metrics.csv").exists():
            metrics = pd.read_csv(folder / "metrics.csv")
        else:  # it diverged before its first row
            metrics = pd.DataFrame({"step": [], "tag": [], "value": []})
    scores = {name: f"{score(metrics, *which):.5g}" for name, which in study.scores.items()}
    row = vars(run) | scores
    row["minutes"] = f"{(time.perf_counter() - start) / 60:.2f}"
    how = about("torch")
    if " on cuda" in process.stdout:
        how["device"] = torch.cuda.get_device_name()
    row |= {name: how[name] for name in ("device", "torch", "python")}
    row |= {"commit": made, "command": shlex.join(["python", *words])}
    curve = thin(metrics[metrics.tag.isin(study.curves)], study.interval)
    curve = pd.DataFrame([vars(run)]).merge(curve, "cross")
    with lock:
        append(Path(args.results, f"{args.study}_curves.csv"), curve)
        append(Path(args.results, f"{args.study}.csv"), pd.DataFrame([row]))
        shown = "  ".join(f"{name} {row[name]}" for name in scores)
        print(f"{run.task} {run.arm} {run.learning_rate} seed {run.seed}:  {shown}", flush=True)


def sweep(args: Args, task: str, name: str) -> str:
    """The arm's best learning rate on a task, widening while it is at the edge of what was tried."""
    study = STUDIES[args.study]
    rates = study.arms[name].rates
    if not rates:
        return ""
    center = rates.index(study.arms[name].start)
    low, high = center - 1, center + 1
    while True:
        for rate in rates[low : high + 1]:
            train(args, Run(task, name, SWEEP_SEED, rate))
        rows = finished(args)
        rows = rows[(rows.task == task) & (rows.arm == name) & (rows.seed == str(SWEEP_SEED))]
        failed = set(rates[low : high + 1]) - set(rows.learning_rate)
        if failed:
            sys.exit(f"{name}: no run at {', '.join(failed)}, so the sweep has no best rate; start it again")
        scores = rows.set_index("learning_rate")[study.best].astype(float)
        best = rates.index(scores.idxmin() if study.lowest else scores.idxmax())
        if best <= low and low > 0:
            low = max(0, best - 1)
        elif best >= high and high < len(rates) - 1:
            high = min(len(rates) - 1, best + 1)
        else:
            return rates[best]


def chosen(args: Args) -> list[tuple[str, str]]:
    """Tasks and arms to run."""
    study = STUDIES[args.study]
    return [
        (task, name)
        for task in args.tasks or study.tasks
        for name in args.arms or study.arms
        if task in (study.arms[name].tasks or study.tasks)
    ]


def main(args: Args) -> None:
    """The sweeps, then the seeds."""
    if args.study not in STUDIES:
        sys.exit(f"no study {args.study}: expected one of {', '.join(STUDIES)}")
    if args.extra and args.results == str(RESULTS):
        sys.exit("--extra: give --results as well, or a trial counts as a run of the study")
    pairs = chosen(args)
    with ThreadPoolExecutor(args.jobs) as pool:
        rates = list(pool.map(lambda pair: sweep(args, *pair), pairs))
        runs = [
            Run(task, name, seed, rate)
            for (task, name), rate in zip(pairs, rates)
            for seed in args.seeds or STUDIES[args.study].arms[name].seeds
        ]
        runs.sort(key=lambda run: run.seed)
        begin = time.perf_counter()
        waiting = [run for run in runs if not is_done(finished(args), run)]
        for number, _ in enumerate(pool.map(lambda run: train(args, run), waiting), 1):
            left = (time.perf_counter() - begin) / number * (len(waiting) - number) / 60
            print(f"{number}/{len(waiting)} runs, {left:.0f} minutes left", flush=True)


def repeat(args: Args) -> None:
    """Run both sides of the cheapest claims again, at the same rates and seeds, and compare the differences."""
    if args.results == str(RESULTS):
        sys.exit("--repeat: give --results FOLDER as well, where the new runs go")
    from benchmarks import make_tables as tables

    plans = []  # minutes, claim, its runs
    for claim in tables.load_rows("claims.csv"):
        is_simple = not claim.other_study and " at " not in claim.other_column  # one study, columns of its CSV
        if claim.study in STUDIES and claim.kind != "exact" and is_simple and tables.judge(claim)[0]:
            rows = tables.final_runs(claim.study)
            rows = rows[(rows.task == claim.task) & rows.arm.isin([claim.ours, claim.theirs])]
            rows = rows[rows.seed.isin(args.seeds)] if args.seeds else rows
            if not rows.empty:
                plans.append((rows.minutes.sum(), claim, rows))
    plans.sort(key=lambda plan: plan[0])
    os.makedirs(args.results, exist_ok=True)
    for minutes, claim, rows in plans[: args.repeat]:
        print(f"{claim.name}: {claim.claim} ({claim.run}); {minutes:.0f} minutes of a thread", flush=True)
        args.study = claim.study
        runs = [Run(row.task, row.arm, row.seed, row.learning_rate) for row in rows.itertuples()]
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(lambda run: train(args, run), runs))
        again = pd.read_csv(Path(args.results, f"{args.study}.csv"))
        again = again[again.task.fillna("") == claim.task]
        for when, found in (("before", rows), ("again ", again)):
            ours = found[found.arm == claim.ours].set_index("seed")[claim.column]
            theirs = found[found.arm == claim.theirs].set_index("seed")[claim.other_column or claim.column]
            difference = tables.paired(ours, theirs)
            margin = tables.margin_of(claim, theirs)
            said = tables.verdict(difference, claim.better, margin)
            said += f" {margin:.3g}" * said.startswith("no difference")
            low, high = (f"{x:.4g}" if x is not None else "-" for x in (difference.low, difference.high))
            print(f"  {when} {difference.mean:.4g} ({low} to {high}): {said}", flush=True)


def overview() -> None:
    """Runs that are done and left, and the hours that those need."""
    for name, study in STUDIES.items():
        args = Args(name)
        rows = finished(args)
        left = 0
        for task, name_of_arm in chosen(args):
            arm = study.arms[name_of_arm]
            own = rows[(rows.task == task) & (rows.arm == name_of_arm)]
            swept = own[(own.seed == str(SWEEP_SEED)) & (own.learning_rate != "")]
            left += len(set(map(str, arm.seeds)) - set(own.seed))
            left += max(0, 3 - len(swept)) * bool(arm.rates)
        hours = left * study.minutes / 60
        print(f"{name:18} {len(rows):3} runs done, {left:3} left, about {hours:.1f} hours")


if __name__ == "__main__":
    arguments = tyro.cli(Args)
    if arguments.repeat:
        repeat(arguments)
    elif arguments.study:
        main(arguments)
    else:
        overview()
