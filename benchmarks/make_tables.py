"""Redraw every table and figure of the README and the pages from the CSVs in benchmarks/results.

    python benchmarks/make_tables.py                # writes the tables between their markers, and the figures
    python benchmarks/make_tables.py --no-figures   # the tables alone
    python benchmarks/make_tables.py --check        # exit code 1 if a table is not up to date (a test compares them)

A table stands between `<!-- table:name -->` and `<!-- end -->` in a Markdown file; TABLES maps names to functions. A
table or figure whose CSV is not there, or not finished, stays as it is, and the program says so.
"""

import csv
import functools
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import tables_claims, tables_control, tables_gpu, tables_scaling, tables_study

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
GDPO_ARM_NAMES = {
    "grpo": "GRPO (`--advantage grpo`)",
    "grpo_no_std": "GRPO without std (`--advantage grpo_no_std`)",
    "grpo_batch_norm": "GRPO + batch norm (`--advantage grpo_batch_norm`)",
    "gdpo_no_batch_norm": "GDPO without batch norm (`--advantage gdpo_no_batch_norm`)",
    "gdpo": "GDPO",
}
IGPO_ARM_NAMES = {
    "f1ig": "IGPO: outcome and gains (`--advantage f1+ig`, the default)",
    "f1": "outcome alone: GRPO (`--advantage f1`)",
    "ig": "gains alone (`--advantage ig`)",
    "log_joint": "one pool (`--normalization joint`)",
    "prob_separate": "gains of probability (`--information-gain prob`)",
    "prob_joint": "v1: both (`--information-gain prob --normalization joint`)",
}
PI_PLAY_ARM_NAMES = {
    "qcp": "pi-Play: the teacher sees the path (`--privileged-context qcp`, the default)",
    "none": "no teacher (`--privileged-context none`)",
    "partial": "it sees half of the path (`--privileged-context partial`)",
    "answer": "it sees the answer (`--privileged-context answer`)",
    "lambda_fixed": "lambda stays 1 (`--lambda-schedule 1`)",
    "lambda_paper": "lambda of the paper (`--lambda-schedule 0.03 0.003 0.002`)",
    "forward_kl": "forward KL (`--divergence forward_kl`)",
    "examiner_frozen": "the examiner does not learn (`--examiner-steps 0`)",
    "one_hop_qcp": "one hop: pi-Play (`--hops 1`)",
    "one_hop_none": "one hop: no teacher (`--hops 1 --privileged-context none`)",
}
PI_PLAY_VERSIONS = ("qcp", "lambda_fixed", "lambda_paper", "forward_kl", "examiner_frozen")
PI_PLAY_OTHER_QUESTIONS = ("examiner_frozen", "one_hop_qcp", "one_hop_none")  # than those of a learning examiner
SPIRAL_ARM_NAMES = {
    "role": "SPIRAL (`--baseline role`, the default)",
    "none": "no baseline (`--baseline none`)",
    "global": "one for both roles (`--baseline global`)",
}
SPIRAL_KUHN_ARM_NAMES = {
    "role": "handicap 3: SPIRAL (`--baseline role`)",
    "none": "handicap 3: no baseline (`--baseline none`)",
    "global": "handicap 3: one for both roles (`--baseline global`)",
    "standard_role": "no handicap: SPIRAL (`--baseline role`)",
    "standard_none": "no handicap: no baseline (`--baseline none`)",
    "fast_role": "handicap 3, fast: SPIRAL (`--baseline role`)",
    "fast_none": "handicap 3, fast: no baseline (`--baseline none`)",
    "fast_global": "handicap 3, fast: one for both roles (`--baseline global`)",
}
SPIRAL_FAST = ("fast_role", "fast_none", "fast_global")
SPIRAL_SLOW = tuple(name for name in SPIRAL_KUHN_ARM_NAMES if name not in SPIRAL_FAST)
GAMES = {"tictactoe": "tic-tac-toe", "kuhn": "Kuhn poker", "negotiation": "negotiation"}
FIGURES = {  # study: names of the arms, the panels of its learning curves (tag, label, factor, arms: none means all), x
    "gdpo": (
        GDPO_ARM_NAMES,
        (
            ("train/rewards/format/mean", "training: format reward, %", 100.0),
            ("eval/mean_at_8", "evaluation: all calls right, of 8 samples, %", 100.0),
        ),
    ),
    "igpo": (
        IGPO_ARM_NAMES,
        (
            ("train/rewards/f1/mean", "training: word F1, %", 100.0),
            ("eval/mean_at_8", "evaluation: right of 8 episodes, %", 100.0),
            ("train/rewards/f1/mean by train/num_tokens", "training: word F1, %", 100.0),
        ),
    ),
    "pi_play": (
        PI_PLAY_ARM_NAMES,
        (
            ("eval/mean_at_8", "evaluation: right of 8 episodes, %", 100.0, "qcp", "none", "partial", "answer"),
            ("eval/mean_at_8", "evaluation: right of 8 episodes, %", 100.0, *PI_PLAY_VERSIONS),
            ("eval/mean_at_8", "one hop: right of 8 episodes, %", 100.0, "one_hop_qcp", "one_hop_none"),
        ),
        "steps of the student",
    ),
    "spiral_rae": (
        SPIRAL_ARM_NAMES,
        (
            ("train/spiral_rae/tictactoe/forfeits", "training: games with a forfeit, %", 100.0),
            ("eval/tictactoe/random/first/win", "wins against random, moving first, %", 100.0),
            ("eval/tictactoe/random/second/win", "wins against random, moving second, %", 100.0),
        ),
    ),
    "spiral_kuhn": (
        SPIRAL_KUHN_ARM_NAMES,
        (
            ("eval/kuhn/nash_conv_average", "NashConv of the average policy", 1.0, *SPIRAL_SLOW),
            ("train/spiral_rae/kuhn/forfeits", "training: games with a forfeit, %", 100.0, *SPIRAL_FAST),
            ("train/completions/mean_length", "training: tokens a turn", 1.0, *SPIRAL_FAST),
            ("train/grad_norm", "training: gradient norm before clipping", 1.0, *SPIRAL_FAST),
        ),
    ),
}
DR_MAS_ARM_NAMES = {
    "agent": "`agent`: Dr. MAS",
    "global": "`global`: GRPO",
    "agent_mean": "`agent_mean`",
    "agent_std": "`agent_std`",
    "call": "`call`",
}
SIMULATED_ARMS = DR_MAS_ARM_NAMES | {"agent_lone_zero": "`agent --lone-call zero`"}
TABULAR_ARM_NAMES = {"role": "`role`: SPIRAL", "global": "`global`", "none": "`none`", "role_only": "by role alone"}
TABULAR_STUDIES = {
    "standard": "Kuhn, 64 hands a step, 3000 steps",
    "small": "Kuhn, 16 hands, 2000 steps",
    "handicap": "handicap 3, 16 hands, 2000 steps",
}


@dataclass
class Args:
    check: bool = False
    """compare only; write nothing"""
    figures: bool = True
    """draw the figures, too"""


def read(name: str) -> list[dict]:
    """Rows of a CSV in benchmarks/results."""
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def mean_std(values: list[float], digits: int = 1, scale: float = 100.0) -> str:
    """Mean and sample standard deviation, in percent by default; a single value stands alone."""
    spread = f" ± {scale * statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{scale * statistics.mean(values):.{digits}f}{spread}"


def markdown(header: list[str], rows: list[list]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def final_runs(study: str, names: dict[str, str]) -> dict[str, list[dict]]:
    """Runs of the comparison by arm, in the order of the names."""
    rows = [row for row in read(f"{study}_runs.csv") if row["stage"] == "final"]
    return {arm: found for arm in names if (found := [row for row in rows if row["arm"] == arm])}


def sweep_table(study: str, names: dict[str, str], score: str = "mean_at_8", digits: int = 1, scale=100.0) -> str:
    """Learning-rate sweep: right of 8 samples, or another score."""
    sweep = [row for row in read(f"{study}_runs.csv") if row["stage"] == "sweep"]
    rates = sorted({row["learning_rate"] for row in sweep}, key=float)
    cells = {(row["arm"], row["learning_rate"]): f"{scale * float(row[score]):.{digits}f}" for row in sweep}
    arms = [arm for arm in names if any(row["arm"] == arm for row in sweep)]
    return markdown(["arm", *rates], [[names[arm], *(cells.get((arm, rate), "") for rate in rates)] for arm in arms])


def table_gdpo_sweep() -> str:
    """Learning-rate sweep of GDPO and its controls."""
    return sweep_table("gdpo", GDPO_ARM_NAMES)


def runs_table(runs: list[dict]) -> str:
    """Cost of runs."""
    minutes, memory = [float(r["minutes"]) for r in runs], max(float(r["peak_memory_gb"]) for r in runs)
    versions = {f"torch {r['torch']}, transformers {r['transformers']}, Python {r['python']}" for r in runs}
    device = {f"{r['device']}, {r['threads']} thread a run" for r in runs}
    commits = sorted({r["commit"] for r in runs})
    table = [["runs", len(runs)], ["minutes a run", mean_std(minutes, 1, 1)], ["peak memory", f"{memory:.2f} GB"]]
    table += [["device", "; ".join(device)], ["versions", "; ".join(versions)], ["commit", ", ".join(commits)]]
    return markdown(["", ""], table)


def table_gdpo_runs() -> str:
    """Cost of the runs of GDPO's comparison, the sweep included."""
    return runs_table(read("gdpo_runs.csv"))


def curve(study: str, tag: str) -> dict[str, list[float]]:
    """A metric of every run, in the order of the log."""
    values: dict[str, list[float]] = {}
    for row in read(f"{study}_curves.csv"):
        if row["tag"] == tag:
            values.setdefault(row["run"], []).append(float(row["value"]))
    return values


def recent(study: str, tag: str, steps: slice = slice(-10, None), of=statistics.mean) -> dict[str, float]:
    """Mean of a training metric over the last steps of every run, or over other ones, or their largest value."""
    return {run: of(found[steps]) for run, found in curve(study, tag).items()}


def table_gdpo_learning() -> str:
    """Final scores of GDPO and its controls on tool calls, and how fast the easy reward was learned."""
    arms, form, rows = final_runs("gdpo", GDPO_ARM_NAMES), recent("gdpo", "train/rewards/format/mean"), []
    for row in [row for runs in arms.values() for row in runs][:1]:
        base = read("tiny_tool_calls.csv")[0]
        start = ["before training", "", "", f"{100 * float(row['first_mean_at_8']):.1f}"]
        rows.append([*start, f"{float(row['first_correctness']):.2f}", f"{100 * float(base['format']):.1f}", "", ""])
    for arm, runs in arms.items():
        exact, correctness = ([float(row[name]) for row in runs] for name in ("mean_at_8", "correctness"))
        steps = [float(row["steps_to_90"]) for row in runs if row["converged"] == "1"]
        scores = [mean_std(exact), mean_std(correctness, 2, 1), mean_std([form[row["run"]] for row in runs])]
        scores += [mean_std(steps, 0, 1) if steps else "", f"{len(steps)} of {len(runs)}"]
        rows.append([GDPO_ARM_NAMES[arm], runs[0]["learning_rate"], len(runs), *scores])
    header = ["arm", "learning rate", "seeds", "all calls right, of 8 samples, %", "correctness, greedy, -3 to 3"]
    return markdown(
        [*header, "format in training, last 10 steps, %", "steps to 90 % format", "runs that got there"], rows
    )


def table_gdpo_scale() -> str:
    """GDPO and GRPO when the correctness reward is in another unit, seed 1."""
    runs = {row["arm"]: row for row in read("gdpo_runs.csv") if row["stage"] == "final" and row["seed"] == "1"}
    form, rows = recent("gdpo", "train/rewards/format/mean"), []
    for arm in ("grpo", "gdpo"):
        cells = [GDPO_ARM_NAMES[arm]]
        for name in (f"{arm}_scale_0.1", arm, f"{arm}_scale_3.0"):
            row = runs.get(name)
            cells.append(f"{100 * float(row['mean_at_8']):.1f} / {100 * form[row['run']]:.1f}" if row else "")
        rows.append(cells)
    header = ["all calls right, of 8 samples / format in training, last 10 steps, %", "correctness x 0.1", "x 1", "x 3"]
    return markdown(header, rows)


def table_gdpo_weights() -> str:
    """Weight of the length reward on Countdown, plain and conditioned, seed 1."""
    runs, tokens = {row["arm"]: row for row in read("gdpo_runs.csv")}, recent("gdpo", "train/completions/mean_length")
    rows = []
    for weight in ("1", "0.5", "0.25"):
        cells = [weight]
        for row in (runs.get(f"{kind}_weight_{weight}") for kind in ("plain", "conditioned")):
            scores = [f"{100 * float(row[name]):.1f}" for name in ("mean_at_8", "length")] if row else ["", ""]
            cells += [*scores, f"{tokens[row['run']]:.1f}" if row else ""]
        rows.append(cells)
    columns = ["right of 8 samples, %", "short enough, greedy, %", "tokens in training, last 10 steps"]
    header = [f"{kind}: {column}" for kind in ("plain", "conditioned") for column in columns]
    return markdown(["weight of the length reward", *header], rows)


def bandit_cell(rows: list[dict], name: str, **chosen) -> str:
    """Mean and standard deviation over seeds of the rows with these values."""
    return mean_std([float(row[name]) for row in rows if all(row[k] == str(v) for k, v in chosen.items())])


def table_gdpo_bandit() -> str:
    """Probability of the right hard choice, by the scale of its reward."""
    rows, scales, table = read("bandit_gdpo.csv"), ("1.0", "0.1", "3.0"), []
    for arm, name in GDPO_ARM_NAMES.items():
        cells = [bandit_cell(rows, "hard", study="equal", arm=arm, scale=scale) for scale in scales]
        for scale in scales:
            found = [row for row in rows if row["study"] == "best" and row["arm"] == arm and row["scale"] == scale]
            cells.append(f"{bandit_cell(found, 'hard')} ({float(found[0]['learning_rate']):g})")
        table.append([name, *cells])
    scales = [f"x {float(scale):g}" for scale in scales]
    header = [*(f"rate 0.5, {scale}" for scale in scales), *(f"best rate, {scale}" for scale in scales)]
    return markdown(["hard choice right, %", *header], table)


def table_gdpo_bandit_weights() -> str:
    """Probability of the right easy and hard choice, by the weight of the easy reward, plain and conditioned."""
    rows, table = [row for row in read("bandit_gdpo.csv") if row["study"] == "weights"], []
    for arm in ("grpo", "gdpo"):
        for conditioned, kind in enumerate(("plain", "conditioned")):
            cells = [GDPO_ARM_NAMES[arm], kind]
            for weight in ("1.0", "0.5", "0.25"):
                chosen = {"arm": arm, "conditioned": conditioned, "weight": weight}
                cells.append(" / ".join(bandit_cell(rows, name, **chosen) for name in ("easy", "hard")))
            table.append(cells)
    header = ["easy / hard choice right, %", "easy reward", "weight 1", "weight 0.5", "weight 0.25"]
    return markdown(header, table)


def table_dr_mas_learning() -> str:
    """Success of the team with a refiner, and gradient norms of its agents."""
    table, agents = [], ("router", "searcher", "refiner", "responder")
    for arm, runs in final_runs("dr_mas", DR_MAS_ARM_NAMES).items():
        cells = [DR_MAS_ARM_NAMES[arm], runs[0]["learning_rate"], len(runs)]
        cells.append(mean_std([float(row["mean_at_8"]) for row in runs]))
        columns = [*(f"{agent}_norm_max" for agent in agents), "refiner_norm_mean", "refiner_inflation"]
        table.append([*cells, *(mean_std([float(row[name]) for row in runs], 2, 1) for name in columns)])
    header = ["`--normalization`", "learning rate", "seeds", "right of 8 episodes, %"]
    header += [f"largest gradient norm: {agent}" for agent in agents]
    return markdown([*header, "mean gradient norm: refiner", "inflation factor: refiner"], table)


def table_dr_mas_sweep() -> str:
    """Learning-rate sweep of the team with a refiner."""
    return sweep_table("dr_mas", DR_MAS_ARM_NAMES)


def table_dr_mas_runs() -> str:
    """Cost of the runs of the team with a refiner."""
    return runs_table([row for rows in final_runs("dr_mas", DR_MAS_ARM_NAMES).values() for row in rows])


def table_dr_mas_simulation() -> str:
    """The refiner of the simulated team while nobody learns: inflation factor, and gradient norm under each arm."""
    rows = [row for row in read("simulate_dr_mas.csv") if row["study"] == "fixed"]
    table = []
    for first_try in sorted({row["first_try"] for row in rows}):
        found = {arm: [r for r in rows if (r["first_try"], r["arm"]) == (first_try, arm)] for arm in SIMULATED_ARMS}

        def mean(name: str, arm: str = "agent", found=found) -> float:
            return statistics.mean(float(row[name]) for row in found[arm])

        cells = [first_try, f"{mean('success'):.2f}", *(f"{mean(f'refiner_factor_{k}'):.2f}" for k in ("mean", "q99"))]
        cells.append(f"{100 * mean('refiner_varied'):.0f} %")
        for arm in SIMULATED_ARMS:
            cells.append(f"{mean('refiner_norm_mean', arm):.2f} ({mean('refiner_norm_q99', arm):.2f})")
        table.append(cells)
    header = ["first answer right", "success", "factor, mean", "factor, 99 %", "its rewards differ"]
    return markdown([*header, *SIMULATED_ARMS.values()], table)


def table_dr_mas_simulation_learning() -> str:
    """What the simulated team has learned: success, the refiner's own, and the refiner's gradient norm."""
    rows = [row for row in read("simulate_dr_mas.csv") if row["study"] == "learning"]
    choices, table = sorted({row["first_try"] for row in rows}), []
    for arm, name in SIMULATED_ARMS.items():
        cells = [name]
        for first_try in choices:
            found = [row for row in rows if (row["first_try"], row["arm"]) == (first_try, arm)]
            right, own = (mean_std([float(row[key]) for row in found]) for key in ("success", "refiner_right"))
            cells.append(f"{right} / {own} / {mean_std([float(row['refiner_norm_q99']) for row in found], 2, 1)}")
        table.append(cells)
    header = "success, % / refiner right, % / its gradient norm, 99 %"
    return markdown([header, *(f"first answer right {first_try}" for first_try in choices)], table)


def steps_to(study: str, tag: str, level: float, window: int = 5) -> dict[str, float]:
    """First step of every run at which the mean of a metric over the last steps reaches a level; NaN if none does."""
    values = curve(study, tag).items()
    means = {run: [statistics.mean(v[i - window : i]) for i in range(window, len(v) + 1)] for run, v in values}
    return {run: next((i + window for i, m in enumerate(v) if m >= level), float("nan")) for run, v in means.items()}


def table_igpo_learning() -> str:
    """Scores of IGPO, its versions and its controls, half-way and in the end."""
    arms, fast = final_runs("igpo", IGPO_ARM_NAMES), steps_to("igpo", "train/rewards/f1/mean", 0.8)
    curves = [row for row in read("igpo_curves.csv") if row["tag"] == "eval/mean_at_8" and row["step"] == "20"]
    middle = {row["run"]: float(row["value"]) for row in curves}
    names, rows = {"mean_at_8": 100.0, "f1_mean_at_8": 100.0, "turns": 1.0}, []
    for row in [row for runs in arms.values() for row in runs][:1]:
        start = [f"{scale * float(row[f'first_{name}']):.{1 if scale > 1 else 2}f}" for name, scale in names.items()]
        rows.append(["before training", "", "", "", "", *start])
    for arm, runs in arms.items():
        cells = [IGPO_ARM_NAMES[arm], runs[0]["learning_rate"], len(runs)]
        steps = [fast[row["run"]] for row in runs if fast[row["run"]] == fast[row["run"]]]
        missed = f" ({len(steps)} of {len(runs)} runs)" if 0 < len(steps) < len(runs) else ""
        cells.append(mean_std(steps, 1, 1) + missed if steps else "not reached")
        cells.append(mean_std([middle[row["run"]] for row in runs]))
        for name, scale in names.items():
            cells.append(mean_std([float(row[name]) for row in runs], 1 if scale > 1 else 2, scale))
        rows.append(cells)
    header = ["arm", "learning rate", "seeds", "steps to F1 0.8 in training", "right of 8 episodes at step 20, %"]
    return markdown([*header, "right of 8 episodes, %", "word F1 of 8 episodes, %", "turns, greedy"], rows)


def table_igpo_sweep() -> str:
    """Learning-rate sweep of IGPO and of GRPO."""
    return sweep_table("igpo", IGPO_ARM_NAMES)


def table_igpo_signal() -> str:
    """Share of groups that teach nothing on the same rollouts: by their outcomes alone, and with the gains."""
    tags = ("train/frac_reward_zero_std", "train/igpo/frac_no_signal")
    parts = {"first": slice(10), "last": slice(-10, None)}
    shares = [recent("igpo", tag, part) for part in parts.values() for tag in tags]
    header = ["arm", "seeds"]
    header += [f"{kind}, {part} 10 steps, %" for part in parts for kind in ("outcomes alone", "with gains")]
    return markdown(
        header,
        [
            [IGPO_ARM_NAMES[arm], len(runs), *(mean_std([share[row["run"]] for row in runs]) for share in shares)]
            for arm, runs in final_runs("igpo", IGPO_ARM_NAMES).items()
        ],
    )


def table_igpo_runs() -> str:
    """Cost of the runs of IGPO's comparison."""
    return runs_table([row for rows in final_runs("igpo", IGPO_ARM_NAMES).values() for row in rows])


def pi_play_evaluations() -> dict[str, list[tuple[int, float, float]]]:
    """Evaluations of every run: steps of the student so far, tokens so far, right of 8 episodes. The log counts tokens
    of both roles in one counter, and has train/reward for the steps of the student only."""
    found, students, tokens = {}, {}, {}
    for row in read("pi_play_curves.csv"):  # in the order of the log: a step's evaluation comes after its metrics
        run, tag, value = row["run"], row["tag"], float(row["value"])
        students[run] = students.get(run, 0) + (tag == "train/reward")
        if tag in ("train/num_tokens", "train/pi_play/examiner/num_tokens"):
            tokens[run] = value
        if tag == "eval/mean_at_8":
            found.setdefault(run, []).append((students[run], tokens.get(run, 0.0), value))
    return found


def table_pi_play_learning() -> str:
    """Scores of pi-Play, its versions and its controls, after a round and in the end, and how soon an arm is as right
    as its control is in the end."""
    arms, evaluations, rows = final_runs("pi_play", PI_PLAY_ARM_NAMES), pi_play_evaluations(), []
    names = {"mean_at_8": 100.0, "pass_at_1": 100.0, "turns": 1.0}
    for arm, runs in arms.items():
        kind, digits = "one_hop_" if arm.startswith("one_hop") else "", {100.0: 1, 1.0: 2}
        if arm == f"{kind}qcp":  # the first of those with the same questions in the evaluation
            first = [f"{scale * float(runs[0][f'first_{name}']):.{digits[scale]}f}" for name, scale in names.items()]
            rows.append(["one hop: before training" if kind else "before training", "", "", "", *first, "", ""])
        cells = [PI_PLAY_ARM_NAMES[arm], runs[0]["learning_rate"], len(runs)]
        found = [evaluations[row["run"]] for row in runs]
        cells.append(mean_std([next(value for steps, _, value in row if steps == 15) for row in found]))
        for name, scale in names.items():
            cells.append(mean_std([float(row[name]) for row in runs], digits[scale], scale))
        level = statistics.mean(float(row["mean_at_8"]) for row in arms[f"{kind}none"])
        reached = [evaluation for row in found if (evaluation := next((e for e in row if e[2] >= level), None))]
        missed = f" ({len(reached)} of {len(runs)} runs)" if 0 < len(reached) < len(runs) else ""
        for place, scale in ((0, 1.0), (1, 1e-3)):
            cells.append(mean_std([e[place] for e in reached], 0, scale) + missed if reached else "not reached")
        rows.append(cells)
    header = ["arm", "learning rate", "seeds", "right of 8 episodes after 15 student steps, %"]
    header += ["right of 8 episodes in the end, %", "pass@1 greedy, %", "turns, greedy"]
    return markdown([*header, "student steps to the control's final level", "thousand tokens to it"], rows)


def table_pi_play_sweep() -> str:
    """Learning-rate sweep of pi-Play and of self-play without a teacher."""
    return sweep_table("pi_play", PI_PLAY_ARM_NAMES)


def table_pi_play_behaviour() -> str:
    """The last 10 student steps of training, of arms whose examiners learn and write one and two hops: how it searches,
    and how many questions teach nothing by reward."""
    tags = [f"train/{name}" for name in ("pi_play/searches", "pi_play/repeated_searches", "entropy")]
    searches, repeated, entropy, equal = (recent("pi_play", tag) for tag in (*tags, "train/frac_reward_zero_std"))
    rows = []
    for arm, runs in final_runs("pi_play", PI_PLAY_ARM_NAMES).items():
        if arm not in PI_PLAY_OTHER_QUESTIONS:
            ids = [row["run"] for row in runs]
            cells = [mean_std([searches[run] for run in ids], 2, 1)]
            cells.append(mean_std([repeated[run] / searches[run] for run in ids]))
            cells += [mean_std([entropy[run] for run in ids], 3, 1), mean_std([equal[run] for run in ids])]
            rows.append([PI_PLAY_ARM_NAMES[arm], len(runs), *cells])
    header = ["arm", "seeds", "searches an episode", "repeated searches, %", "entropy, nats a token"]
    return markdown([*header, "questions with 8 equal rewards, %"], rows)


def table_pi_play_examiner() -> str:
    """Questions of the examiner of every round: are they well-formed, right, and hard for a student."""
    rows, table = read("pi_play_examiner.csv"), []
    columns = {"well_formed": "well-formed, %", "right": "its answer is right, %", "searches": "searches"}
    columns |= {"question_hops": "relations in the question", "base_pass_rate": "shipped model right, %"}
    columns |= {"base_pass_rate_right": "on questions with the right answer, %"}
    columns |= {"base_between": "right 1 to 4 times of 5, %", "pass_rate": "student of the round right, %"}
    columns |= {"between": "right 1 to 4 times of 5, %", "difficulty": "difficulty reward"}
    for hops, number in sorted({(row["hops"], row["round"]) for row in rows}):
        found = [row for row in rows if (row["hops"], row["round"]) == (hops, number)]
        cells = [hops, "before training" if number == "0" else number]
        for name in columns:
            plain = name in ("question_hops", "difficulty", "searches")
            values = [float(row[name]) for row in found]
            known = not any(value != value for value in values)  # NaN: none of a seed's questions has the right answer
            cells.append(mean_std(values, 2 if plain else 1, 1 if plain else 100) if known else "")
        table.append(cells)
    return markdown(["hops asked for", "round", *columns.values()], table)


def table_pi_play_runs() -> str:
    """Cost of the runs of pi-Play's comparison."""
    return runs_table([row for rows in final_runs("pi_play", PI_PLAY_ARM_NAMES).values() for row in rows])


def table_spiral_tabular_variance() -> str:
    """Variance of one hand's gradient, exactly, by the kind of baseline."""
    names = {"none": "none (`--baseline none`)", "mean": "exact mean of each role"}
    names |= {"role": "moving average of each role (`--baseline role`)", "global": "of both (`--baseline global`)"}
    rows = {(row["baseline"], row["handicap"]): row for row in read("tabular_spiral_variance.csv")}
    table = []
    for baseline, name in names.items():
        cells = [f"{float(rows[baseline, handicap]['variance']):.3f}" for handicap in "03"]
        table.append([name, *cells, f"{float(rows[baseline, '3']['squared_mean']):.4f}"])
    header = ["baseline", "variance, Kuhn", "variance, handicap 3", "squared norm of the mean, both games"]
    return markdown(header, table)


def tabular_runs(study: str) -> dict[str, list[dict]]:
    """Runs of a study of the tabular policies by arm."""
    rows = [row for row in read("tabular_spiral_runs.csv") if row["study"] == study]
    return {arm: [row for row in rows if row["arm"] == arm] for arm in dict.fromkeys(row["arm"] for row in rows)}


def tabular_cells(runs: list[dict]) -> tuple[list[str], list[str]]:
    """Seeds and gradient norm; NashConv in the end of the average and of the last policy, and the moving averages."""
    scores = [[float(row[name]) for row in runs] for name in ("squared_norm", "nash_conv_average", "nash_conv_last")]
    norm, *scores = (mean_std(values, 3, 1) for values in scores)
    last = [statistics.mean(map(float, column)) for column in zip(*(row["baselines"].split() for row in runs))]
    return [len(runs), norm], [*scores, ", ".join(f"{value:.2f}".replace("-0.00", "0.00") for value in last)]


def table_spiral_tabular_learning() -> str:
    """Tabular self-play on Kuhn: gradient norm, and NashConv of the average policy over the steps."""
    table, steps, found = [], ("100", "300", "1000"), {}
    for row in read("tabular_spiral_curves.csv"):
        if row["tag"] == "nash_conv_average" and row["step"] in steps:
            found[row["run"], row["step"]] = float(row["value"])
    for study, game in TABULAR_STUDIES.items():
        for arm, runs in tabular_runs(study).items():
            middle = [mean_std([found[row["run"], step] for row in runs], 3, 1) for step in steps]
            start, end = tabular_cells(runs)
            table.append([game, TABULAR_ARM_NAMES[arm], *start, *middle, *end])
    header = ["game", "`--baseline`", "seeds", "squared gradient norm, first 100 steps"]
    header += [f"NashConv of the average policy: {step} steps" for step in steps]
    return markdown([*header, "in the end", "of the last policy", "moving averages in the end"], table)


def table_spiral_tabular_rates() -> str:
    """NashConv of the average policy by learning rate."""
    runs, table = tabular_runs("rates"), []
    rates = sorted({row["learning_rate"] for row in runs["role"]}, key=float)
    for handicap, game in (("0", "Kuhn"), ("3", "handicap 3")):
        for arm, rows in runs.items():
            values = {rate: [] for rate in rates}
            for row in rows:
                if row["handicaps"] == handicap:
                    values[row["learning_rate"]].append(float(row["nash_conv_average"]))
            table.append([game, TABULAR_ARM_NAMES[arm], *(mean_std(x, 3, 1) for x in values.values())])
    return markdown(["game", "`--baseline`", *(f"rate {float(rate):g}" for rate in rates)], table)


def table_spiral_tabular_games() -> str:
    """Two handicap games at once, by what the moving averages are kept for."""
    names, table = TABULAR_ARM_NAMES | {"role": "by game and role: SPIRAL", "none": "none"}, []
    for arm, runs in tabular_runs("games").items():
        start, end = tabular_cells(runs)
        table.append([names[arm], *start, *end])
    header = ["moving average", "seeds", "squared gradient norm, first 100 steps", "NashConv of the average policy"]
    return markdown([*header, "of the last policy", "moving averages in the end"], table)


def table_spiral_default() -> str:
    """The default run of spiral_rae.py: its evaluations."""
    values = {(row["tag"], int(row["step"])): float(row["value"]) for row in read("spiral_rae_default_metrics.csv")}
    rows, steps = [], sorted({step for tag, step in values if tag.startswith("eval/")})
    for who, score in (("random", "win"), ("minimax", "draw"), ("start", "win")):
        name = f"{score}s against {who.replace('start', 'the first policy')}"
        for seat in ("first", "second"):
            cells = [f"{100 * values[f'eval/tictactoe/{who}/{seat}/{score}', step]:.0f}" for step in steps]
            rows.append([f"{name}, moving {seat}", *cells])
    return markdown(["share of games, %", "before", *(f"after {step} steps" for step in steps[1:])], rows)


def table_spiral_learning() -> str:
    """Self-play on tic-tac-toe: scores in both seats, and forfeits in training."""
    arms, rows = final_runs("spiral_rae", SPIRAL_ARM_NAMES), []
    names = {"points": "points against random, %"}
    for who, x in (("random", "win"), ("random", "loss"), ("minimax", "draw")):
        for seat in ("first", "second"):
            names[f"{who}_{seat}_{x}"] = f"{x.replace('loss', 'losse')}s against {who}, moving {seat}, %"
    for row in [row for runs in arms.values() for row in runs][:1]:
        rows.append(
            ["before training", "", "", *(f"{100 * float(row[f'first_{name}']):.1f}" for name in names), "", ""]
        )
    tag = "train/spiral_rae/tictactoe/forfeits"
    forfeits = [recent("spiral_rae", tag, part) for part in (slice(3), slice(-3, None))]
    for arm, runs in arms.items():
        cells = [SPIRAL_ARM_NAMES[arm], runs[0]["learning_rate"], len(runs)]
        cells += [mean_std([float(row[name]) for row in runs]) for name in names]
        rows.append([*cells, *(mean_std([part[row["run"]] for row in runs]) for part in forfeits)])
    header = ["arm", "learning rate", "seeds", *names.values()]
    return markdown([*header, "forfeits in training, first 3 steps, %", "last 3 steps, %"], rows)


def table_spiral_sweep() -> str:
    """Learning-rate sweep on tic-tac-toe: points against random."""
    return sweep_table("spiral_rae", SPIRAL_ARM_NAMES, "points")


def table_spiral_kuhn_sweep() -> str:
    """Learning-rate sweep on Kuhn poker: NashConv of the average policy."""
    return sweep_table("spiral_kuhn", SPIRAL_KUHN_ARM_NAMES, "nash_conv_average", 3, 1.0)


def table_spiral_kuhn() -> str:
    """Self-play on Kuhn poker: distance from equilibrium."""
    arms, rows = final_runs("spiral_kuhn", SPIRAL_KUHN_ARM_NAMES), []
    for row in [row for runs in arms.values() for row in runs][:1]:
        first = f"{float(row['first_nash_conv_last']):.3f}"
        rows.append(["before training", "", "", first, first, f"{100 * float(row['first_illegal']):.1f}", ""])
    best = {run: min(values) for run, values in curve("spiral_kuhn", "eval/kuhn/nash_conv_last").items()}
    for arm, runs in arms.items():
        cells = [SPIRAL_KUHN_ARM_NAMES[arm], runs[0]["learning_rate"], len(runs)]
        cells += [mean_std([float(r[name]) for r in runs], 3, 1) for name in ("nash_conv_average", "nash_conv_last")]
        cells.append(mean_std([float(r["illegal"]) for r in runs]))
        rows.append([*cells, mean_std([best[r["run"]] for r in runs], 3, 1)])
    header = ["game and arm", "learning rate", "seeds", "NashConv of the average policy", "of the last policy"]
    return markdown([*header, "illegal output, %", "lowest NashConv of a read-out"], rows)


def table_spiral_kuhn_training() -> str:
    """Self-play on Kuhn poker: do thoughts or gradients collapse."""
    arms, ends, rows = final_runs("spiral_kuhn", SPIRAL_KUHN_ARM_NAMES), (slice(5), slice(-5, None)), []
    found = [recent("spiral_kuhn", "train/spiral_rae/kuhn/forfeits", part) for part in ends]
    found += [recent("spiral_kuhn", "train/completions/mean_length", part) for part in ends]
    found += [recent("spiral_kuhn", "train/entropy", part) for part in ends]
    found += [recent("spiral_kuhn", "train/grad_norm", part) for part in (slice(10), slice(-10, None))]
    found.append(recent("spiral_kuhn", "train/grad_norm", slice(None), max))
    for arm, runs in arms.items():
        formats = [(1, 100.0), (1, 100.0), (1, 1.0), (1, 1.0), *[(3, 1.0)] * (len(found) - 4)]
        cells = [mean_std([values[row["run"]] for row in runs], *how) for values, how in zip(found, formats)]
        rows.append([SPIRAL_KUHN_ARM_NAMES[arm], len(runs), *cells])
    header = ["game and arm", "seeds", "games with a forfeit, first 5 steps, %", "last 5", "tokens a turn, first 5"]
    header += ["last 5", "entropy, nats a token, first 5", "last 5", "gradient norm, first 10", "last 10", "largest"]
    return markdown(header, rows)


def table_spiral_runs() -> str:
    """Cost of SPIRAL's runs, the sweeps included."""
    return runs_table([row for study in ("spiral_rae", "spiral_kuhn") for row in read(f"{study}_runs.csv")])


def table_spiral_head_to_head() -> str:
    """Policies trained on one game, on all, and the base model: points against the others in both seats, by game."""
    points: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for row in read("spiral_head_to_head.csv"):
        share = (int(row["win"]) + int(row["draw"]) / 2) / int(row["games"])
        for one, other, value in ((row["player"], row["opponent"], share), (row["opponent"], row["player"], 1 - share)):
            points.setdefault((one.partition("-")[0], row["game"]), []).append((other, value))
    names, table = {"base": "nothing"} | {name: f"{label} alone" for name, label in GAMES.items()}, []
    for name, label in (names | {"all": "all three"}).items():
        found = [points[name, game] for game in GAMES]
        cells = [f"{100 * statistics.mean(value for _, value in pairs):.1f}" for pairs in found]
        base = [[value for other, value in pairs if other == "base"] for pairs in found]
        table.append([label, *cells, *(f"{100 * statistics.mean(values):.1f}" if values else "" for values in base)])
    header = [f"{label}: {who}" for who in ("all others", "shipped model") for label in GAMES.values()]
    return markdown(["points against, %; trained on", *header], table)


def table_tiny_countdown() -> str:
    """Scores of the shipped model."""
    row = read("tiny_countdown.csv")[0]
    names = {
        "format": "well-formed, sampled",
        "mean_at_8": "right, sampled",
        "pass_at_8": "right at least once in 8 samples",
    }
    names |= {"pass_at_1": "right, greedy", "verifier": "verifier's verdict right, sampled"}
    return markdown(["score", "%"], [[name, f"{100 * float(row[key]):.1f}"] for key, name in names.items()])


def table_tiny_search_qa() -> str:
    """Scores of the shipped search model by the number of hops."""
    values = {(row["score"], row["hops"]): float(row["value"]) for row in read("tiny_search_qa.csv")}
    names = {
        "exact_match": "right, sampled",
        "greedy": "right, greedy",
        "f1": "word F1, sampled",
        "format": "well-formed, sampled",
        "searches": "searches an episode",
        "privileged": "right with the construction path in front, sampled",
        "no_search": "right without a search, sampled",
        "router": "router's verdict right, sampled",
        "searcher": "last query finds the fact, sampled",
        "responder": "answer right after the right searches, sampled",
        "question": "examiner writes a question and an answer, sampled",
        "question_right": "and the answer is right",
    }
    rows = [
        [name, *(f"{values[key, hops] * (1 if key == 'searches' else 100):.1f}" for hops in "1234")]
        for key, name in names.items()
    ]
    return markdown(["score, %", "1 hop", "2 hops", "3 hops", "4 hops"], rows)


def table_tiny_tool_calls() -> str:
    """Scores of the shipped tool-calling model."""
    row = read("tiny_tool_calls.csv")[0]
    names = {
        "format": "well-formed, sampled",
        "mean_at_8": "right, sampled",
        "pass_at_8": "right at least once in 8 samples",
        "pass_at_1": "right, greedy",
        "length": "short thinking, sampled",
    }
    rows = [[name, f"{100 * float(row[key]):.1f} %"] for key, name in names.items()]
    rows.append(["mean correctness, from -3 to 3, sampled", f"{float(row['correctness']):.2f}"])
    return markdown(["score", ""], rows)


def table_tiny_text_games() -> str:
    """Scores of the shipped player of text games."""
    values = {(row["game"], row["score"]): float(row["value"]) for row in read("tiny_text_games.csv")}
    games = {"tictactoe": "tic-tac-toe", "kuhn": "Kuhn poker, one hand", "kuhn_spiral": "Kuhn poker, five hands"}
    games |= {"kuhn_textarena": "Kuhn poker, three hands", "negotiation": "negotiation"}
    names = {"legal": "legal moves, self-play", "finished": "games without a forfeit, self-play"}
    outcomes = ("win", "draw", "loss")
    for who in ("random", "minimax"):
        names |= {f"{who}_seat{seat}": f"win / draw / loss as player {seat} against {who}" for seat in (0, 1)}
    names |= {"nash_conv": "NashConv, x 100", "illegal_mass": "samples that name no legal action"}
    names |= {"lines": "winning or threatening cells named rightly, where a thought names them and there are some"}
    rows = []
    for score, name in names.items():
        cells = []
        for game in games:
            keys = [score] if (game, score) in values else [f"{score}_{x}" for x in outcomes]
            cells.append(" / ".join(f"{100 * values[game, key]:.1f}" for key in keys if (game, key) in values))
        rows.append([name, *cells])
    return markdown(["score, %", *games.values()], rows)


def table_waits() -> str:
    """How often the host waits for a GPU, by function of the scripts."""
    lines = ["| function | a call is | scripts | waits of a call | and more |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for row in read("waits.csv"):
        scripts = ", ".join(f"`{name}`" for name in row["scripts"].split())
        more = f"{row['waits_of_a_step']} each {row['step']}" if row["step"] else ""
        cells = [f"`{row['function']}`", row["call"], scripts, row["waits"], more]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


TABLES = {
    name.removeprefix("table_"): function for name, function in list(globals().items()) if name.startswith("table_")
}
for module in (tables_control, tables_claims, tables_scaling, tables_study, tables_gpu):
    TABLES |= {name: functools.partial(table, read) for name, table in module.TABLES.items()}


def drawable(name: str) -> bool:
    """False for a table whose CSV is not there yet."""
    try:
        return bool(TABLES[name]())
    except FileNotFoundError:
        return False


def redraw(text: str, missing: list[str] | None = None) -> str:
    """The text with every table drawn anew. One without its CSV stays as it is, and `missing` gets the reason; unknown
    names are an error."""

    def draw(match: re.Match) -> str:
        try:
            return f"{match[1]}{TABLES[match[2]]()}\n{match[3]}"
        except FileNotFoundError as error:
            if missing is not None:
                missing.append(f"{match[2]}: {error}")
            return match[0]

    return re.sub(r"(<!-- table:(\w+) -->\n).*?(<!-- end -->)", draw, text, flags=re.DOTALL)


def pages() -> list[Path]:
    """Markdown files that hold a table."""
    paths = [
        ROOT / "README.md",
        *ROOT.glob("algorithms/*.md"),
        *ROOT.glob("benchmarks/*.md"),
        *ROOT.glob("envs/tiny_lm/*/*.md"),
    ]
    return [path for path in paths if "<!-- table:" in path.read_text()]


def draw_learning(study: str, names: dict[str, str], panels: tuple[tuple, ...], x: str = "step") -> None:
    """Learning curves: mean over seeds with one standard deviation, against steps, steps of the student, or the mean
    over seeds of another tag (`tag by other`). A panel is tag, label, factor and its arms (none means all)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    arms = {row["run"]: row["arm"] for runs in final_runs(study, names).values() for row in runs}
    curves = read(f"{study}_curves.csv")
    if x != "step":
        points = [(run, *point) for run, found in pi_play_evaluations().items() for point in found]
        curves = [{"run": run, "tag": "eval/mean_at_8", "step": step, "value": value} for run, step, _, value in points]
    figure, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 3.8))
    for axis, (tag, label, scale, *chosen) in zip(axes, panels):
        tag, _, across = tag.partition(" by ")
        for number, arm in enumerate(dict.fromkeys(arms.values())):
            if arm not in (chosen or names):
                continue
            found: dict[int, dict[str, float]] = {}
            places: dict[int, list[float]] = {}
            for row in curves:
                if arms.get(row["run"]) == arm and row["tag"] == tag:
                    found.setdefault(int(row["step"]), {})[row["run"]] = scale * float(row["value"])
                if arms.get(row["run"]) == arm and row["tag"] == across:
                    places.setdefault(int(row["step"]), []).append(float(row["value"]))
            steps, points = sorted(found), {step: list(values.values()) for step, values in found.items()}
            mean = [statistics.mean(points[step]) for step in steps]
            spread = [statistics.stdev(points[step]) if len(points[step]) > 1 else 0.0 for step in steps]
            steps = [statistics.mean(places[step]) for step in steps] if across else steps
            (line,) = axis.plot(steps, mean, f"C{number}", label=names[arm].partition(" (`")[0], linewidth=1.8)
            low, high = [m - s for m, s in zip(mean, spread)], [m + s for m, s in zip(mean, spread)]
            axis.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        if "nash_conv" in tag:
            cfr = [
                (int(row["step"]), float(row["value"]))
                for row in read("tabular_spiral_curves.csv")
                if row["run"] == "cfr"
            ]
            axis.plot(*zip(*(point for point in cfr if point[0] <= steps[-1])), color="gray", linewidth=1, label="CFR")
        axis.set_xlabel("tokens that the model wrote" if across else x)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        if chosen or axis is axes[0]:
            axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(RESULTS / f"{study}_learning.png", dpi=110, metadata={"Software": None})


def draw_spiral_tabular() -> None:
    """NashConv of the average policy against steps, and CFR's, and in the end by learning rate: mean over seeds, lowest
    and highest."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves: dict[str, dict[int, float]] = {}
    for row in read("tabular_spiral_curves.csv"):
        if row["tag"] == "nash_conv_average":
            curves.setdefault(row["run"], {})[int(row["step"])] = float(row["value"])
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8))
    for axis, study in zip(axes, ("standard", "handicap", "rates")):
        title, label = TABULAR_STUDIES.get(study, TABULAR_STUDIES["handicap"]), "step (CFR: iteration)"
        for arm, runs in tabular_runs(study).items():
            points: dict[float, list[float]] = {}
            if study == "rates":
                label, runs = "learning rate", [row for row in runs if row["handicaps"] == "3"]
            for row in runs:
                end = {float(row["learning_rate"]): float(row["nash_conv_average"])}
                for x, value in (end if study == "rates" else curves[row["run"]]).items():
                    points.setdefault(x, []).append(value)
            mean, low, high = ([f(values) for values in points.values()] for f in (statistics.mean, min, max))
            name = TABULAR_ARM_NAMES[arm].replace("`", "")
            (line,) = axis.plot(list(points), mean, label=name, linewidth=1.8)
            axis.fill_between(list(points), low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        if study != "rates":
            reference = {step: value for step, value in curves["cfr"].items() if step <= max(points)}
            axis.plot(list(reference), list(reference.values()), label="CFR", color="gray", linewidth=1, zorder=0)
        axis.set(xscale="log", yscale="log", xlabel=label, ylabel="NashConv of the average policy")
        axis.set_title(title, fontsize=9)
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(RESULTS / "spiral_tabular.png", dpi=110, metadata={"Software": None})


def main(args: Args) -> None:
    different, missing = [], []
    for path in pages():
        old = path.read_text()
        new = redraw(old, missing)
        if new != old:
            different.append(str(path.relative_to(ROOT)))
            if not args.check:
                path.write_text(new)
    if args.figures and not args.check:
        for study, figure in FIGURES.items():
            if (RESULTS / f"{study}_runs.csv").exists():
                draw_learning(study, *figure)
        if (RESULTS / "tabular_spiral_runs.csv").exists():
            draw_spiral_tabular()
        for module in (tables_control, tables_claims, tables_scaling, tables_study):
            for draw in module.FIGURES:
                try:
                    draw(read, RESULTS)
                except FileNotFoundError as error:
                    missing.append(f"{draw.__name__}: {error}")
    for line in missing:
        print(f"not drawn: {line}")
    print("\n".join(different) or "nothing has changed")
    sys.exit(int(args.check and bool(different)))


if __name__ == "__main__":
    main(tyro.cli(Args))
