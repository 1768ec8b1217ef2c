"""What is run, and what tables and figures show of it: studies, their arms, labels of arms.

`Study` is a command with arms and tasks: study.py runs it. `Table` and `Figure` are drawn by make_tables.py
from results/NAME.csv and results/NAME_curves.csv, on the pages that have their marker. A comparison is a study,
a table here, and a row of claims.csv.
"""

from dataclasses import dataclass, field, replace

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
DIPLLM = ("2.5e-4", "5e-4", "1e-3", "2e-3", "4e-3", "8e-3")
TINY = ("2.5e-5", "5e-5", "1e-4", "2e-4", "4e-4", "8e-4", "1.6e-3")  # the shipped models
META_DT = ("1e-3", "3e-3", "1e-2")
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
    best: str = ""  # column that the sweep goes by
    sweep: str = ""  # flags of the sweep alone: problems of its own
    rate_flag: str = "--learning-rate"
    lowest: bool = False  # whether the best is the lowest
    minutes: float = 3.0  # of a run, about


@dataclass(frozen=True)
class Table:
    """Scores of the arms of a study, by their labels. It is drawn once every arm has `seeds` seeds; the first arm is
    compared with the others by the first score."""

    study: str
    arms: dict[str, str]
    scores: list  # keys of COLUMNS, or (column, label, factor, digits)
    seeds: int = 0
    fewer: dict[str, int] = field(default_factory=dict)  # arms that need fewer seeds
    tasks: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class Figure:
    """Curves of a study: arms in colour with a band over their seeds, others in grey."""

    study: str
    panels: list[tuple]  # title, task, tag, label, and its study if that is another
    bold: dict[str, str]
    grey: dict[str, str] = field(default_factory=dict)
    scale: float = 1.0
    bins: int = 0  # of steps: where episodes end at steps of their own


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
BOARD = {name: (f"eval/{name}", "last") for name in ("exploitability", "objective", "score")}
BOARD |= {f"{who}_{name}": (f"eval/{who}/{name}", "last") for who in ("search", "anchor") for name in BOARD}
KUHN_CURVES = ("eval/kuhn/nash_conv_average", "train/spiral_rae/kuhn/forfeits")
RARE = ("greedy", "pass_at_1", "pass_at_8", "pass_at_64")
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
SPREAD = {"eval_return": ("eval/return_mean", "last"), "train_return": ("charts/episodic_return", "late")}
SPREAD |= {"reward_loss": ("losses/reward_loss", "late"), "dynamics_loss": ("losses/dynamics_loss", "late")}
TEAMS = {mixer: f"--mixer {mixer}" for mixer in ("qmix", "twin", "vdn", "pairwise")}
TEAMS |= {learner: f"--learner {learner}" for learner in ("selfplay_vdn", "selfplay_qmix", "iql")}
POLICIES = ("poisson", "poisson_repo", "gaussian", "categorical", "ordinal")
QUIET = "--end-e 0.02 --buffer-size 10000"  # fewer random moves in the end, and early ones are forgotten
PONG = "qmix vdn selfplay_qmix iql".split()
PONG_SCORES = "exploitability exploiter_pro exploiter_ant tracker/pro/return tracker/ant/return".split()
TAG_SCORES = (*PONG_SCORES[:3], "wanderer/pro/return", "wanderer/ant/return")
ADAPTED = ("few_shot_return", "zero_shot_return", "optimal_return")
SCRIPTS = "grpo dapo gdpo nash_preference dr_mas igpo arpo empg spiral_rae advantage_alignment pi_play hpt ampo opd unlikeliness"
SCRIPTS += " dipllm critic_search unimodal_poisson mdpo stream_x fm3q arac seqwm meta_dt"
STUDIES = {
    "defaults": Study(
        command="algorithms/{arm}.py",
        arms={name: Arm(seeds=(2, 3)) for name in SCRIPTS.split()},
        curves="eval/mean_at_8 eval/tictactoe/random/first/win eval/nash_conv_mean eval/sampled/success"
        " eval/exploitability charts/episodic_return charts/success eval/new/few_shot_return".split(),
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
    "critic_search": Study(  # from the model of sparse_search, where many groups have equal outcomes at first
        command=f"algorithms/critic_search.py {THREE_HOPS}",
        arms={
            "critic": Arm("--critic-mix add", TINY, "1e-4", EIGHT),
            "outcome": Arm("--critic-alpha 0", TINY, "4e-4", EIGHT),
            "shuffled": Arm("--critic-mix add --shuffle-verdicts", TINY, "4e-4"),
            "convex": Arm("--learning-rate 1e-4", seeds=THREE),
            "flip_10": Arm("--critic-mix add --flip-verdicts 0.1 --learning-rate 1e-4", seeds=THREE),
            "flip_30": Arm("--critic-mix add --flip-verdicts 0.3 --learning-rate 1e-4", seeds=THREE),
        },
        scores=MEAN_AT_8
        | {f"silent_{when}": ("train/frac_reward_zero_std", when) for when in ("early", "late")}
        | {f"no_signal_{when}": ("train/critic/frac_no_signal", when) for when in ("early", "late")}
        | {f"searches_{when}": ("train/critic/searches", when) for when in ("early", "late")}
        | {f"train_{when}": ("train/rewards/exact_match/mean", when) for when in ("early", "late")}
        | {"good_late": ("train/critic/good_share", "late")}  # not of the outcome alone
        # In the pilot (seed 1, 4e-4) the outcome alone had a mean of 0.12 over 5 steps at step 14, 0.15 at step 33 only.
        | {"steps_to_10": ("train/rewards/exact_match/mean", "reach 0.1")},
        curves=("eval/mean_at_8", "train/rewards/exact_match/mean", "train/critic/searches", "train/critic/good_share"),
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
    "opd": Study(  # a student's tokens; GRPO samples as many, and the page shows it beside
        command="",
        tasks={"": "--max-steps 30 --eval-steps 10"},
        arms={
            "top_k": Arm("algorithms/opd.py", TINY, "4e-4", EIGHT),
            "sampled": Arm("algorithms/opd.py --divergence sampled", TINY, "4e-4", EIGHT),
            "grpo": Arm("algorithms/grpo.py", TINY, "2e-4", EIGHT),
        },
        scores=MEAN_AT_8
        | {f"mean_at_8_{step}": ("eval/mean_at_8", f"at {step}") for step in (10, 20)}
        | {"train_late": ("train/rewards/correctness/mean", "last 10")}
        | {"entropy": ("train/entropy", "last 10")},
        curves=("eval/mean_at_8", "train/rewards/correctness/mean"),
        best="train_late",  # of training problems, which are new at every step
        minutes=1.0,
    ),
    "unlikeliness": Study(  # at the rate at which GRPO is best; pass@64 and pass@1 stand beside each other
        command="algorithms/unlikeliness.py --max-steps 100 --eval-steps 100 --num-generations-eval 64"
        " --learning-rate 2e-4",
        arms={
            "unlikeliness": Arm("--rank-penalty 0.5", seeds=EIGHT),
            "none": Arm("--method none", seeds=EIGHT),
            "kl": Arm("--method none --beta 0.1", seeds=FIVE),
            "rep_exp": Arm("--method rep_exp --bonus-weight 0.5", seeds=FIVE),
            "shuffled": Arm("--method rep_exp --bonus-weight 0.5 --shuffle-bonus", seeds=FIVE),
        },
        scores={f"{when}{name}": (f"eval/{name}", which) for when, which in (("first_", "first"), ("", "last")) for name in RARE}
        | {"train_late": ("train/rewards/correctness/mean", "last 10")},
        curves=("eval/pass_at_1", "eval/pass_at_64", "train/rewards/correctness/mean"),
        minutes=5.0,
    ),
    "dipllm": Study(  # a seed is a board
        command="algorithms/dipllm.py --max-steps 60 --eval-steps 20",
        arms={
            "soft": Arm("--label soft", DIPLLM, "1e-3", TEN),
            "argmax": Arm("--label argmax", DIPLLM, "1e-3", TEN),
            "weighted": Arm("--label weighted --learning-rate 1e-3", seeds=TEN),
            "anchor": Arm("--label anchor --learning-rate 1e-3", seeds=TEN),
        },
        scores=BOARD,
        curves=("eval/exploitability", "eval/objective"),
        best="objective",
        minutes=2.0,
    ),
    "advantage_alignment": Study(  # a rate that hardly learns keeps the 2.3 of the start, in favour of naive
        command="algorithms/advantage_alignment.py",
        arms={
            "alignment": Arm("", HPT, "5e-4"),
            "naive": Arm("--advantage naive", HPT, "5e-4"),
        }
        | {arm: Arm(f"--advantage {arm}") for arm in ("sum", "no_baseline", "marshal")},
        scores={
            "self": ("eval/ipd/self/payoff", "last"),
            "defect": ("eval/ipd/defect/payoff", "last"),
            "defect_gets": ("eval/ipd/defect/other", "last"),
        },
        curves=("eval/ipd/self/payoff", "eval/ipd/defect/payoff"),
        best="self",
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
    "seqwm": Study(
        command="algorithms/seqwm.py --eval-steps 0 --eval-episodes 500",
        arms={
            "seq": Arm("", CONTROL, "1e-3"),
            "independent": Arm("--model independent", CONTROL, "1e-3"),
            "joint": Arm("--model joint"),
            "no_plan": Arm("--planner none"),
        },
        scores=SPREAD,
        curves=("charts/episodic_return",),
        best="eval_return",
        minutes=2.5,
    ),
    "meta_dt": Study(  # Point-Robot; data and new goals are drawn anew from each seed. Both rates are swept on seed 1
        command="algorithms/meta_dt.py --eval-steps 0 --eval-episodes 8",
        arms={
            "running": Arm("", META_DT, "3e-3"),
            "none": Arm("--context none", META_DT, "3e-3"),
            "no_prompt": Arm("--prompt none", seeds=(2, 3)),
            "episode": Arm("--context episode --learning-rate 1e-3"),  # the best rate of both above
            "goal": Arm("--context goal --learning-rate 1e-3"),
        },
        scores={f"{part}_{name}": (f"eval/{part}/{name}", "last") for part in ("new", "train") for name in ADAPTED},
        best="train_few_shot_return",
        minutes=2.7,
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
    "poisson_humanoid": Study(  # the Gaussian is to run again: its actions were not stretched to the task's range
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
COLUMNS = {  # of tables: what a score is called, its factor, its digits
    "mean_at_8": ("right of 8 samples, %", 100, 1),
    "pass_at_8": ("a right one among 8, %", 100, 1),
    "mean_at_2": ("right of 2 samples, %", 100, 1),
    "greedy": ("greedy answer right, %", 100, 1),
    "length": ("tokens of an answer", 1, 0),
    "num_tokens": ("sampled tokens, thousands", 0.001, 0),
    "mean_at_2_12": ("right after 12 steps, %", 100, 1),
    "num_tokens_12": ("tokens by then, thousands", 0.001, 1),
    "mean_at_2_18": ("after 18 steps, %", 100, 1),
    "num_tokens_18": ("tokens, thousands", 0.001, 1),
    "demonstration_tokens": ("tokens of demonstrations", 1, 0),
    "exploitability": ("win rate of the best reply, minus 1/2", 1, 3),
    "nash_distance": ("distance from the regularised Nash policy", 1, 3),
    "win_rate": ("win rate against the initial model", 1, 3),
    "sum": ("sums, %", 100, 0),
    "difference": ("differences, %", 100, 0),
    "product": ("products, %", 100, 0),
    "right": ("greedy answer right, %", 100, 1),
    "short": ("words left of 32, all greedy answers", 1, 1),
    "well_formed": ("0.1 if it is well-formed", 1, 3),
    "refiner_norm_max": ("largest gradient norm of the refiner", 1, 1),
    "router_norm_max": ("of the router", 1, 1),
    "searcher_norm_max": ("of the searcher", 1, 1),
    "responder_norm_max": ("of the responder", 1, 1),
    "train_late": ("right in the last ten steps, %", 100, 1),
    "refiner_calls": ("refiner's calls an episode, %", 100, 1),
    "critic_norm_max": ("of the critic", 1, 1),
    "solver_norm_max": ("of the solver", 1, 1),
    "steps_to_f1": ("steps to F1 0.8 in training", 1, 1),
    "silent_early": ("groups with equal outcomes, first 4 steps, %", 100, 0),
    "silent_late": ("the same, last 4 steps, %", 100, 0),
    "steps_to_15": ("steps to 15 % in training (mean of 5 steps)", 1, 1),
    "silent_first": ("groups with equal outcomes, first 3 steps, %", 100, 0),
    "silent_last": ("the same, last 3 steps, %", 100, 0),
    "tool_calls": ("tool calls a step", 1, 0),
    "change_early": ("rise of entropy after a result, first 4 steps, nats", 1, 2),
    "change_late": ("the same, last 4 steps", 1, 2),
    "forfeits": ("games with a forfeit in the end, %", 100, 1),
    "illegal": ("illegal moves in the last evaluation, %", 100, 1),
    "nash_conv_average": ("NashConv of the average policy (lower is better)", 1, 2),
    "nash_conv_last": ("of the last policy", 1, 2),
    "train_return": ("return in the last tenth of training", 1, 0),
    "eval_sampled": ("return with sampled actions in the end", 1, 0),
    "eval_deterministic": ("return with the likeliest actions", 1, 0),
    "steps_to_005": ("steps to a NashConv below 0.05", 1, 0),
    "late_nash_conv": ("NashConv in the last tenth of training (lower is better)", 1, 2),
    "exploiter_pro": ("of it, against our antagonists", 1, 2),
    "exploiter_ant": ("against our protagonists", 1, 2),
    "tracker_pro_return": ("reward against ball followers, as protagonists", 1, 2),
    "tracker_ant_return": ("as antagonists", 1, 2),
    "value_error": ("largest error of a state's value in the end (lower is better)", 1, 2),
    "sampled_success": ("games won in the end, sampled actions, %", 100, 0),
    "mean_success": ("games won in training, %", 100, 0),
    "beta": ("weight in the end", 1, 4),
    "greedy_success": ("won in the end, likeliest actions, %", 100, 0),
    "new_few_shot_return": ("few-shot return on new tasks", 1, 1),
    "new_zero_shot_return": ("zero-shot return on new tasks", 1, 1),
    "new_optimal_return": ("the best return on new tasks", 1, 1),
    "train_few_shot_return": ("few-shot return on training tasks", 1, 1),
}
TABLES = {
    "grpo_learning": Table(
        "grpo_countdown",
        {
            "grpo": "GRPO, at 2e-4",
            "no_baseline": "no baseline: REINFORCE (`--advantage none`), at 2e-4",
        },
        "mean_at_8 pass_at_8".split(),
        seeds=5,
    ),
    "grpo_135m": Table(
        "grpo_135m",
        {
            "grpo": "GRPO",
            "no_baseline": "no baseline: REINFORCE (`--advantage none`)",
        },
        "mean_at_2 greedy length".split(),
        seeds=20,
    ),
    "dapo_135m": Table(
        "dapo_135m",
        {
            "dapo": "DAPO",
            "grpo_4e-5": "GRPO at 4e-5",
            "grpo_2e-5": "GRPO at 2e-5",
            "none_2e-5": "no baseline: REINFORCE at 2e-5",
        },
        "mean_at_2 greedy num_tokens length".split(),
        seeds=21,
        fewer={"grpo_4e-5": 20, "none_2e-5": 13},
    ),
    "grpo_13_135m": Table(
        "grpo_13_135m",
        {
            "grpo_13": "GRPO, 13 questions a step, at 4e-5",
            "grpo_6": "GRPO, 6 questions a step, at 4e-5",
        },
        "mean_at_2 greedy num_tokens length".split(),
        seeds=8,
    ),
    "dapo_steps": Table(
        "dapo_135m",
        {
            "dapo": "DAPO",
            "grpo_4e-5": "GRPO at 4e-5",
        },
        [
            "mean_at_2_12",
            "num_tokens_12",
            "mean_at_2_18",
            "num_tokens_18",
            ("mean_at_2", "after 30 steps, %", 100, 1),
            ("num_tokens", "all tokens, thousands", 0.001, 1),
        ],
        seeds=20,
    ),
    "hpt_learning": Table(
        "hpt",
        {
            "hpt": "HPT",
            "hpt_length": "HPT, RL weighed as in its code (`--normalizer length`)",
            "grpo": "GRPO alone (`--method grpo`)",
            "sft": "demonstrations alone (`--method sft`)",
            "srft": "SRFT (`--method srft`) at 1e-3",
        },
        "mean_at_8 greedy demonstration_tokens".split(),
        seeds=5,
        fewer={"srft": 3},
    ),
    "opd": Table(
        "opd",
        {
            "top_k": "OPD, the teacher's 32 likeliest tokens",
            "sampled": "OPD, written tokens (`--divergence sampled`)",
            "grpo": "GRPO (`grpo.py`)",
        },
        [
            "mean_at_8",
            ("mean_at_8_10", "after 10 steps, %", 100, 1),
            "greedy",
            "num_tokens",
        ],
        seeds=8,
    ),
    "critic_search": Table(
        "critic_search",
        {
            "critic": "verdicts and outcome (`--critic-mix add`)",
            "outcome": "outcome alone (`--critic-alpha 0`)",
        },
        [
            ("steps_to_10", "steps to 10 % right", 1, 0),
            "mean_at_8",
            ("searches_late", "searches of an episode, last tenth", 1, 2),
        ],
        seeds=8,
    ),
    "unlikeliness": Table(
        "unlikeliness",
        {
            "unlikeliness": "unlikeliness (`--rank-penalty 0.5`)",
            "none": "GRPO (`--method none`)",
        },
        [("pass_at_64", "pass@64, %", 100, 1), ("pass_at_8", "pass@8, %", 100, 1), ("pass_at_1", "pass@1, %", 100, 1)],
        seeds=8,
    ),
    "dipllm": Table(
        "dipllm",
        {
            "soft": "unit policies (`--label soft`)",
            "argmax": "the likeliest joint order (`--label argmax`)",
        },
        [
            ("objective", "regularised objective (higher is better)", 1, 3),
            ("exploitability", "exploitability", 1, 3),
            ("score", "score against the anchor", 1, 2),
            ("search_objective", "objective of the search", 1, 3),
        ],
        seeds=10,
    ),
    "advantage_alignment": Table(
        "advantage_alignment",
        {"alignment": "alignment", "naive": "plain policy gradient (`--advantage naive`)"},
        [
            ("self", "payoff a round in self-play", 1, 2),
            ("defect", "against always-defect", 1, 2),
            ("defect_gets", "which gets", 1, 2),
        ],
        seeds=5,
    ),
    "ampo_learning": Table(
        "ampo",
        {
            "ampo": "AMPO",
            "grpo": "GRPO (`--method grpo`) at 4e-4",
            "one_teacher": "one teacher (`--method one_teacher`)",
            "random": "random solutions (`--method random`)",
            "v2": "AMPO with `--rule v2`",
        },
        [
            "mean_at_8",
            "greedy",
            ("demonstration_tokens", "tokens of solutions", 1, 0),
        ],
        seeds=5,
        fewer={"one_teacher": 3, "random": 3, "v2": 3},
    ),
    "nash_preference_learning": Table(
        "nash_preference",
        {
            "inpo": "INPO",
            "grpo": "reward: win rate against the initial model (`--method grpo`)",
            "grpo_kl": "the same with a pull of 0.1 towards it (`--beta 0.1`)",
            "mnpo": "MNPO with two policies (`--method mnpo`)",
            "nash_mp": "Nash-MP (`--method nash_mp`)",
            "spo": "SPO (`--method spo`)",
        },
        "exploitability nash_distance win_rate sum difference product".split(),
        seeds=5,
        fewer={"grpo_kl": 3, "mnpo": 3, "nash_mp": 3, "spo": 3},
    ),
    "gdpo_learning": Table(
        "gdpo_tools",
        {
            "gdpo": "GDPO at 2e-4",
            "grpo": "GRPO (`--advantage grpo`) at 4e-4",
            "grpo_batch_norm": "GRPO + batch norm (`grpo_batch_norm`) at 4e-4",
        },
        "mean_at_8 greedy pass_at_8".split(),
        seeds=20,
    ),
    "gdpo_135m": Table(
        "gdpo_135m",
        {
            "gdpo_conditioned": "GDPO",
            "grpo_conditioned": "GRPO (`--advantage grpo`)",
        },
        [
            "mean_at_2",
            "right",
            "short",
            "well_formed",
            ("length", "tokens of an answer", 1, 1),
        ],
        seeds=5,
    ),
    "gdpo_135m_plain": Table(
        "gdpo_135m",
        {
            "gdpo": "GDPO",
            "grpo": "GRPO (`--advantage grpo`)",
            "grpo_batch_norm": "GRPO with batch norm (`--advantage grpo_batch_norm`)",
        },
        [
            "mean_at_2",
            "right",
            "short",
            "well_formed",
            ("length", "tokens of an answer", 1, 1),
        ],
        seeds=5,
        fewer={"grpo_batch_norm": 3},
    ),
    "dr_mas_learning": Table(
        "dr_mas",
        {
            "agent": "Dr. MAS (`--normalization agent`)",
            "global": "GRPO (`global`)",
            "agent_mean": "`agent_mean`",
            "agent_std": "`agent_std`",
            "call": "`call`",
        },
        "mean_at_8 refiner_norm_max router_norm_max searcher_norm_max responder_norm_max".split(),
    ),
    "dr_mas_135m": Table(
        "dr_mas_135m",
        {
            "agent": "Dr. MAS (`--normalization agent`)",
            "global": "GRPO (`global`)",
        },
        "train_late refiner_calls refiner_norm_max critic_norm_max solver_norm_max mean_at_8".split(),
        seeds=5,
    ),
    "igpo_learning": Table(
        "igpo",
        {
            "f1ig": "IGPO: outcome and gains",
            "f1": "outcome alone: GRPO (`--advantage f1`)",
        },
        "mean_at_8 steps_to_f1".split(),
        seeds=5,
    ),
    "igpo_135m": Table(
        "igpo_135m",
        {
            "f1ig": "IGPO: outcome and gains",
            "f1": "outcome alone: GRPO (`--advantage f1`)",
        },
        "mean_at_2 greedy".split(),
        seeds=5,
    ),
    "sparse_search_empg": Table(
        "sparse_search",
        {
            "empg": "EMPG",
            "empg_2e-4": "EMPG at 2e-4",
            "outcome": "outcome alone: GRPO (`igpo.py --advantage f1`)",
        },
        "mean_at_8 greedy silent_early silent_late".split(),
        seeds=8,
    ),
    "two_hops_135m": Table(
        "two_hops_135m",
        {
            "igpo": "IGPO: outcome and gains",
            "outcome": "outcome alone: GRPO (`--advantage f1`)",
        },
        "mean_at_2 greedy steps_to_15 silent_first silent_last".split(),
        seeds=5,
    ),
    "two_hops_135m_empg": Table(
        "two_hops_135m",
        {
            "empg": "EMPG",
            "outcome": "outcome alone: GRPO (`igpo.py --advantage f1`)",
        },
        "mean_at_2 greedy steps_to_15 silent_first silent_last".split(),
        seeds=5,
    ),
    "arpo_learning": Table(
        "arpo",
        {
            "arpo": "ARPO: 4 of 8 episodes begin from the prompt",
            "grpo": "no branches: GRPO (`--initial-rollouts 8`)",
            "grpo_equal_calls": "GRPO with as many tool calls: 11 problems a step",
            "grpo_equal_tokens": "GRPO with as many sampled tokens: 13 problems a step",
            "random": "branches at random (`--entropy-weight 0`)",
            "strong": "more by entropy (`--entropy-weight 5`)",
            "hard": "shared turns get the mean (`--advantage hard`)",
        },
        "mean_at_8 steps_to_f1 tool_calls num_tokens".split(),
        seeds=5,
        fewer={"random": 3, "strong": 3, "hard": 3},
    ),
    "arpo_sparse": Table(
        "arpo_sparse",
        {
            "arpo": "ARPO: 4 of 8 episodes begin from the prompt",
            "grpo": "no branches: GRPO (`--initial-rollouts 8`)",
            "grpo_equal_calls": "GRPO with as many tool calls: 12 problems a step",
            "random": "branches at random (`--entropy-weight 0`)",
            "random_2e-4": "branches at random at 2e-4",
            "strong": "more by entropy (`--entropy-weight 5`)",
        },
        "mean_at_8 greedy tool_calls change_early change_late".split(),
        seeds=8,
    ),
    "pi_play_learning": Table(
        "pi_play_teacher",
        {
            "teacher": "pi-Play",
            "none": "no teacher (`--privileged-context none`)",
        },
        [
            "mean_at_8",
            "greedy",
            ("silent_early", "groups with equal outcomes, first student step, %", 100, 0),
            ("silent_late", "the same, last six, %", 100, 0),
        ],
        seeds=5,
    ),
    "spiral_kuhn_g1": Table(
        "spiral_kuhn_g1",
        {
            "fast_role": "SPIRAL at 4e-4 (`--baseline role`)",
            "fast_none": "no baseline at 4e-4 (`none`)",
            "fast_global": "one for both roles at 4e-4 (`global`)",
        },
        "forfeits illegal".split(),
        seeds=5,
    ),
    "spiral_135m": Table(
        "spiral_135m",
        {
            "role4e-5": "SPIRAL at 4e-5 (`--baseline role`)",
            "none4e-5": "no baseline at 4e-5 (`none`)",
            "role1e-5": "SPIRAL at 1e-5",
            "none1e-5": "no baseline at 1e-5",
            "global4e-5": "one for both roles at 4e-5 (`global`)",
        },
        [
            "forfeits",
            "illegal",
            "nash_conv_average",
            "nash_conv_last",
            ("length", "tokens of a turn", 1, 0),
        ],
        seeds=5,
        fewer={"role1e-5": 3, "none1e-5": 3, "global4e-5": 3},
    ),
    "stream_x_learning": Table(
        "stream_x",
        {
            "stream": "stream AC (`stream_x.py`)",
            "ppo": "PPO (`unimodal_poisson.py --policy gaussian`)",
            "ppo_1e-3": "PPO at 1e-3",
            "ppo_batch_1": "PPO with batches of one transition",
        },
        "train_return eval_sampled".split(),
        seeds=5,
        tasks=("Hopper-v5", "HalfCheetah-v5"),
    ),
    "stream_million": Table(
        "stream_million",
        {
            "stream": "stream AC (`stream_x.py`)",
            "ppo": "PPO (`unimodal_poisson.py --policy gaussian`)",
        },
        "train_return eval_sampled".split(),
        seeds=5,
        tasks=("Hopper-v5", "HalfCheetah-v5"),
    ),
    "mdpo_million": Table(
        "mdpo_million",
        {
            "mdpo": "MDPO, m = 10",
            "one_step": "m = 1: policy gradient (`--sgd-steps 1`)",
            "ppo": "PPO (`unimodal_poisson.py --policy gaussian`)",
        },
        "train_return eval_deterministic".split(),
        seeds=10,
        tasks=("HalfCheetah-v5", "Hopper-v5"),
    ),
    "mdpo_ten_million": Table(
        "mdpo_ten_million",
        {
            "mdpo": "MDPO, m = 10, at 3e-4",
            "one_step": "m = 1: policy gradient (`--sgd-steps 1`) at 3e-3",
        },
        "train_return eval_deterministic".split(),
        seeds=5,
        tasks=("Hopper-v5",),
    ),
    "fm3q_small": Table(
        "fm3q_small",
        {
            "qmix": "FM3Q",
            "selfplay_qmix": "self-play, QMIX (`--learner selfplay_qmix`)",
        },
        [
            "steps_to_005",
            ("late_nash_conv", "NashConv in the last tenth", 1, 3),
        ],
        seeds=20,
    ),
    "fm3q_pong": Table(
        "fm3q_pong",
        {
            "qmix": "FM3Q, one monotone network (`--mixer qmix`)",
            "vdn": "FM3Q, signed sums (`vdn`)",
            "selfplay_qmix": "self-play, QMIX (`--learner selfplay_qmix`)",
            "iql": "every agent alone (`iql`)",
        },
        [
            ("exploitability", "exploitability, rewards of a game (lower is better)", 1, 2),
            "exploiter_pro",
            "exploiter_ant",
            "tracker_pro_return",
            "tracker_ant_return",
        ],
        seeds=5,
    ),
    "fm3q_games_quiet": Table(
        "fm3q_games",
        {
            "qmix_quiet": "FM3Q, one monotone network (`--mixer qmix`)",
            "selfplay_qmix_quiet": "self-play, QMIX (`--learner selfplay_qmix`)",
            "iql_quiet": "every agent alone (`iql`)",
        },
        "late_nash_conv value_error".split(),
        seeds=20,
        tasks=("arat_random",),
    ),
    "seqwm": Table(
        "seqwm",
        {
            "seq": "SeqWM (`--model seq`)",
            "independent": "independent models (`--model independent`)",
        },
        [
            ("eval_return", "return in the end (higher is better)", 1, 2),
            ("train_return", "return in training, last tenth", 1, 2),
            ("reward_loss", "loss of the reward model", 1, 3),
            ("dynamics_loss", "loss of the dynamics", 1, 5),
        ],
        seeds=5,
    ),
    "meta_dt": Table(
        "meta_dt",
        {
            "running": "Meta-DT: context of the running episode",
            "none": "no context (`--context none`)",
            "episode": "context of another episode (`--context episode`), at 1e-3",
            "goal": "the goal itself (`--context goal`), at 1e-3",
        },
        "new_few_shot_return new_zero_shot_return new_optimal_return train_few_shot_return".split(),
        seeds=5,
    ),
    "arac_weight": Table(
        "arac_weight",
        {
            "adaptive": "adaptive weight from 0.2 (`--beta-mode dual`)",
            "adaptive_low": "adaptive from 0.0067 (`--beta 0.0067`)",
            "by_time": "falling by time (`exp`)",
            "fixed": "fixed at 0.003 (`fixed`)",
            "none": "no reference (`none`)",
        },
        "sampled_success mean_success beta".split(),
        seeds=5,
    ),
    "arac_large": Table(
        "arac_large",
        {
            "adaptive": "adaptive weight from 0.2 (`--beta-mode dual`)",
            "adaptive_low": "adaptive from 0.0067 (`--beta 0.0067`)",
            "by_time": "falling by time (`exp`)",
            "fixed": "fixed at 0.003 (`fixed`)",
            "none": "no reference (`none`)",
        },
        "sampled_success mean_success greedy_success beta".split(),
        seeds=5,
    ),
    "arac_imperfect": Table(
        "arac_imperfect",
        {
            "adaptive": "adaptive weight from 0.2 (`--beta-mode dual`)",
            "fixed": "fixed at 0.003 (`fixed`)",
            "none": "no reference (`none`)",
        },
        "sampled_success mean_success greedy_success beta".split(),
        seeds=5,
    ),
    "poisson_cheetah": Table(
        "poisson_cheetah",
        {
            "poisson": "Poisson at 1e-3",
            "gaussian": "Gaussian at 1e-3",
        },
        "train_return eval_deterministic".split(),
        seeds=20,
    ),
    "poisson_heads": Table(
        "poisson_heads",
        {
            "poisson": "Poisson",
            "poisson_softplus": "Poisson, `--second-activation softplus`",
            "poisson_repo": "Poisson as in the released code",
            "gaussian": "Gaussian",
            "categorical": "softmax over atoms",
            "ordinal": "ordinal softmax",
        },
        "train_return eval_deterministic".split(),
        seeds=5,
        fewer={"poisson_softplus": 0},
        tasks=("Hopper-v5", "HalfCheetah-v5"),
    ),
}
FIGURES = {
    "grpo_learning": Figure(
        "grpo_countdown",
        [
            ("", "", "eval/mean_at_8", "right of 8 samples, %"),
        ],
        {"grpo": "GRPO", "no_baseline": "no baseline: REINFORCE"},
        scale=100,
    ),
    "pi_play_learning": Figure(
        "pi_play_teacher",
        [
            ("", "", "eval/mean_at_8", "right of 8 samples, %"),
        ],
        {"teacher": "pi-Play", "none": "no teacher"},
        scale=100,
    ),
    "stream_million": Figure(
        "stream_million",
        [
            ("Hopper-v5", "Hopper-v5", "charts/episodic_return", "return in training"),
            ("HalfCheetah-v5", "HalfCheetah-v5", "charts/episodic_return", ""),
        ],
        {"stream": "stream AC", "ppo": "PPO"},
        bins=50,
    ),
    "mdpo_million": Figure(
        "mdpo_million",
        [
            ("HalfCheetah-v5", "HalfCheetah-v5", "charts/episodic_return", "return in training"),
            ("Hopper-v5", "Hopper-v5", "charts/episodic_return", ""),
        ],
        {"mdpo": "MDPO, m = 10", "ppo": "PPO"},
        grey={"one_step": "one gradient step"},
        bins=50,
    ),
    "two_hops": Figure(
        "two_hops_135m",
        [
            ("right answers to training questions", "", "train/rewards/exact_match/mean", "share"),
            ("turns of an episode, at most 4", "", "train/igpo/turns", "turns"),
        ],
        {"igpo": "IGPO", "outcome": "outcome alone: GRPO"},
    ),
    "arac_learning": Figure(
        "arac_weight",
        [
            ("cycle of 12: a bad reference", "", "charts/success", "games won in training, %"),
            ("grid 10x10: a good one", "", "charts/success", "", "arac_large"),
        ],
        {"adaptive": "adaptive weight from 0.2", "none": "no reference", "fixed": "fixed at 0.003", "adaptive_low": "adaptive from 0.0067"},
        grey={"by_time": "falling by time"},
        scale=100,
    ),
}
