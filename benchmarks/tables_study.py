"""Tables and figures of what benchmarks/study.py has run; make_tables.py draws them with its own.

Every function takes `read`, which returns the rows of a CSV in benchmarks/results. An arm's runs are
those at the best rate of its sweep. As long as an arm lacks one of its seeds, nothing is drawn.
"""

import statistics
from pathlib import Path

from benchmarks.tables_control import Read, markdown, mean_std, pyplot, rows_of

GRPO = {
    "grpo": "GRPO",
    "no_baseline": "no baseline: REINFORCE (`--advantage none`)",
    "shuffled": "shuffled rewards (`--advantage shuffled`)",
}
SCORES = {"greedy": "greedy, %", "mean_at_8": "mean@8, %", "pass_at_8": "pass@8, %"}
SWEEP_SEED = "1"
SEEDS = ("2", "3", "4", "5", "6")
T_95 = 2.776  # of Student's t with 4 degrees of freedom: 95 % lie within


class Unfinished(FileNotFoundError):
    """A study has not run all of its seeds."""


def sweep(read: Read, study: str, arm: str) -> dict[str, float]:
    """Learning rate -> mean@8 on the first seed, in percent."""
    rows = [row for row in rows_of(read, f"{study}_runs.csv") if (row["arm"], row["seed"]) == (arm, SWEEP_SEED)]
    return {row["learning_rate"]: 100 * float(row["mean_at_8"]) for row in rows}


def final_runs(read: Read, study: str, arm: str) -> list[dict]:
    """The arm's run of each seed at its best rate."""
    rates = sweep(read, study, arm)
    best = max(rates, key=rates.get, default=None)
    rows = [row for row in rows_of(read, f"{study}_runs.csv") if (row["arm"], row["learning_rate"]) == (arm, best)]
    runs = {row["seed"]: row for row in rows if row["seed"] in SEEDS}
    if len(runs) < len(SEEDS):
        raise Unfinished(f"{study}_runs.csv: {arm} has {len(runs)} of {len(SEEDS)} seeds at its best rate")
    return [runs[seed] for seed in SEEDS]


def percent(rows: list[dict], column: str) -> list[float]:
    """A score of every run."""
    return [100 * float(row[column]) for row in rows]


def difference(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Mean of the paired differences over the seeds, and its 95 % interval by a paired t."""
    differences = [our - their for our, their in zip(ours, theirs, strict=True)]
    assert len(differences) == len(SEEDS)  # else T_95 is another
    mean = statistics.mean(differences)
    half = T_95 * statistics.stdev(differences) / len(differences) ** 0.5
    return mean, mean - half, mean + half


def show(found: tuple[float, float, float]) -> str:
    """A difference and its interval."""
    return "{:+.1f} ({:+.1f} to {:+.1f})".format(*found)


def grpo_learning(read: Read) -> str:
    """Scores before and after training, and how far GRPO is ahead."""
    grpo = final_runs(read, "grpo", "grpo")
    ahead = difference(percent(grpo, "mean_at_8"), percent(grpo, "first_mean_at_8"))
    first = [f"{percent(grpo, f'first_{name}')[0]:.1f}" for name in SCORES]
    rows = [["before training", "", "", *first, show(ahead)]]
    for arm, name in GRPO.items():
        runs = final_runs(read, "grpo", arm)
        scores = [mean_std(percent(runs, score), 1) for score in SCORES]
        ahead = difference(percent(grpo, "mean_at_8"), percent(runs, "mean_at_8"))
        ahead = show(ahead) if arm != "grpo" else ""
        rows.append([name, runs[0]["learning_rate"], len(runs), *scores, ahead])
    header = ["arm", "learning rate", "seeds", *SCORES.values()]
    return markdown([*header, "GRPO minus this, mean@8, points (95 %)"], rows)


def grpo_sweep(read: Read) -> str:
    """mean@8 on the first seed by learning rate."""
    found = {arm: sweep(read, "grpo", arm) for arm in GRPO}
    for arm in found:
        final_runs(read, "grpo", arm)  # a sweep that goes on is not shown
    rates = sorted(set().union(*found.values()), key=float)
    rows = []
    for arm, scores in found.items():
        rows.append([GRPO[arm], *(f"{scores[rate]:.1f}" if rate in scores else "" for rate in rates)])
    return markdown(["mean@8 on seed 1, %; learning rate", *rates], rows)


def grpo_runs(read: Read) -> str:
    """What the runs cost, and how they were made."""
    runs = [row for arm in GRPO for row in final_runs(read, "grpo", arm)]
    every = read("grpo_runs.csv")
    versions = {f"torch {row['torch']}, transformers {row['transformers']}, Python {row['python']}" for row in every}
    rows = [
        ["runs", f"{len(every)}, {len(runs)} of them in the table of results"],
        ["minutes a run", mean_std([float(row["minutes"]) for row in every], 1)],
        ["device", ", ".join(sorted({row["device"] for row in every}))],
        ["versions", "; ".join(sorted(versions))],
        ["commit", ", ".join(sorted({row["commit"] for row in every}))],
        ["a run", f"`{runs[0]['command']}`"],
        ["CSV", "[runs](results/grpo_runs.csv), [curves](results/grpo_curves.csv)"],
    ]
    return markdown(["", ""], rows)


def draw_grpo_learning(read: Read, folder: Path) -> None:
    """mean@8 over steps: mean and range over the seeds."""
    figure, axis = pyplot().subplots(figsize=(7, 4))
    values: dict[tuple[str, str], dict[int, list[float]]] = {}  # of an arm at a rate: step -> one of each seed
    for row in read("grpo_curves.csv"):
        if row["tag"] == "eval/mean_at_8" and row["seed"] in SEEDS:
            steps = values.setdefault((row["arm"], row["learning_rate"]), {})
            steps.setdefault(int(row["step"]), []).append(100 * float(row["value"]))
    for (arm, name), color in zip(GRPO.items(), ("C0", "C1", "gray")):
        points = values[arm, final_runs(read, "grpo", arm)[0]["learning_rate"]]
        steps = sorted(points)
        low, mean, high = ([f(points[step]) for step in steps] for f in (min, statistics.mean, max))
        axis.plot(steps, mean, color, linewidth=2, label=name.partition(" (")[0])
        axis.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
    axis.set(xlabel="step", ylabel="mean@8 on unseen problems, %", ylim=(0, None))
    axis.margins(x=0.01)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(folder / "grpo_learning.png", dpi=130, metadata={"Software": None})


def draw_smollm2(read: Read, folder: Path) -> None:
    """The README's run of a public model: samples of each step, and the evaluations."""
    values: dict[str, dict[int, float]] = {}
    for row in read("smollm2_chain_sum_metrics.csv"):
        values.setdefault(row["tag"], {})[int(row["step"])] = 100 * float(row["value"])
    figure, axis = pyplot().subplots(figsize=(7, 4))
    samples = values["train/rewards/correctness/mean"]
    axis.plot(samples.keys(), samples.values(), "C0", linewidth=1, alpha=0.5, label="samples of a step")
    for tag, color, label in (
        ("eval/greedy", "C1", "100 unseen problems, greedy"),
        ("eval/mean_at_2", "C0", "100 unseen problems, two samples each"),
    ):
        axis.plot(values[tag].keys(), values[tag].values(), f"{color}o-", linewidth=2, label=label)
    axis.set(xlabel="step (64 completions)", ylabel="right answers, %", ylim=(0, None))
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(folder / "smollm2_chain_sum.png", dpi=130, metadata={"Software": None})


TABLES = {table.__name__: table for table in (grpo_learning, grpo_sweep, grpo_runs)}
FIGURES = (draw_grpo_learning, draw_smollm2)
