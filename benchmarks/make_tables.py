"""Redraw every table and figure of the README and the pages from the CSVs in benchmarks/results.

    python benchmarks/make_tables.py             # writes the tables between their markers, and the figures
    python benchmarks/make_tables.py --check     # exit code 1 if a table differs from the CSVs (a test runs this)

A table stands between `<!-- table:name -->` and `<!-- end -->` in a Markdown file; TABLES maps names to functions.
"""

import csv
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
ARM_NAMES = {
    "grpo": "GRPO, loss averaged row by row (`--loss-type grpo`, the default)",
    "dapo_loss": "GRPO, loss averaged over tokens (`--loss-type dapo`)",
    "reinforce": "no baseline: REINFORCE (`--loss-type dapo --advantage none`)",
    "shuffled": "shuffled rewards (`--loss-type dapo --advantage shuffled`)",
    "dr_grpo": "Dr. GRPO (`--loss-type dr_grpo --scale-rewards none`)",
}
SPEED_CASES = {
    "A": "short, even completions, 64 x 8",
    "B": "long-tailed completions, 64 x 8",
    "C": "long-tailed completions, 8 x 8",
    "D": "prompts of about 150 tokens, 8 x 8",
}


@dataclass
class Args:
    check: bool = False
    """compare only; write nothing"""


def read(name: str) -> list[dict]:
    """Rows of a CSV in benchmarks/results."""
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def mean_std(values: list[float], digits: int = 1, scale: float = 100.0) -> str:
    """Mean and sample standard deviation, in percent by default."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{scale * statistics.mean(values):.{digits}f} ± {scale * spread:.{digits}f}"


def markdown(header: list[str], rows: list[list]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def final_runs() -> dict[str, list[dict]]:
    """Runs of the comparison by arm, in the order of ARM_NAMES."""
    rows = [row for row in read("grpo_runs.csv") if row["stage"] == "final"]
    return {arm: found for arm in ARM_NAMES if (found := [row for row in rows if row["arm"] == arm])}


def table_grpo_learning() -> str:
    """Final scores of every arm."""
    first = [float(row["first_mean_at_8"]) for runs in final_runs().values() for row in runs]
    base = read("tiny_countdown.csv")[0]
    rows = [
        ["before training", "", "", *(f"{100 * float(base[k]):.1f}" for k in ("pass_at_1", "mean_at_8", "pass_at_8"))]
    ]
    assert max(first) == min(first), "all runs start from the same model"
    for arm, runs in final_runs().items():
        scores = [mean_std([float(row[k]) for row in runs]) for k in ("pass_at_1", "mean_at_8", "pass_at_8")]
        rows.append([ARM_NAMES[arm], runs[0]["learning_rate"], len(runs), *scores])
    return markdown(["arm", "learning rate", "seeds", "pass@1 greedy, %", "right of 8 samples, %", "pass@8, %"], rows)


def table_grpo_sweep() -> str:
    """Learning-rate sweep: right of 8 samples."""
    sweep = [row for row in read("grpo_runs.csv") if row["stage"] == "sweep"]
    rates = sorted({row["learning_rate"] for row in sweep}, key=float)
    score = {(row["arm"], row["learning_rate"]): f"{100 * float(row['mean_at_8']):.1f}" for row in sweep}
    arms = [arm for arm in ARM_NAMES if any(row["arm"] == arm for row in sweep)]
    return markdown(
        ["arm", *rates], [[ARM_NAMES[arm], *(score.get((arm, rate), "") for rate in rates)] for arm in arms]
    )


def table_grpo_runs() -> str:
    """Cost of the runs."""
    runs = [row for rows in final_runs().values() for row in rows]
    minutes, memory = [float(r["minutes"]) for r in runs], max(float(r["peak_memory_gb"]) for r in runs)
    versions = {f"torch {r['torch']}, transformers {r['transformers']}, Python {r['python']}" for r in runs}
    device = {f"{r['device']}, {r['threads']} thread a run" for r in runs}
    commits = sorted({r["commit"] for r in runs})
    table = [["runs", len(runs)], ["minutes a run", mean_std(minutes, 1, 1)], ["peak memory", f"{memory:.2f} GB"]]
    table += [["device", "; ".join(device)], ["versions", "; ".join(versions)], ["commit", ", ".join(commits)]]
    return markdown(["", ""], table)


def table_grpo_speed() -> str:
    """Ratios against TRL."""
    rows = []
    for row in read("speed_grpo.csv"):
        ratio = f"{float(row['ratio_median']):.2f} ({float(row['ratio_min']):.2f}-{float(row['ratio_max']):.2f})"
        ours = f"{float(row['rollout_ms']):.0f} + {float(row['update_ms']):.0f}"
        share, length = (
            f"{100 * float(row['zero_share']):.0f} %",
            f"{float(row['mean_length']):.0f} ± {float(row['std_length']):.0f}",
        )
        arm = row["arm"].replace("default", "as shipped").replace("no_skip", "`--no-skip-equal-groups`")
        rows.append(
            [SPEED_CASES[row["case"]], arm, f"**{ratio}**", f"{float(row['peer_ms']):.0f}", ours, share, length]
        )
    header = ["case", "arm", "times as fast as TRL", "TRL, ms", "ours, ms: rollout + update"]
    return markdown([*header, "rows without advantage", "tokens a completion"], rows)


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


TABLES = {
    name.removeprefix("table_"): function for name, function in list(globals().items()) if name.startswith("table_")
}


def redraw(text: str) -> str:
    """The text with every table drawn anew; unknown names are an error."""
    pattern = re.compile(r"(<!-- table:(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}", text)


def pages() -> list[Path]:
    """Markdown files that hold a table."""
    paths = [
        ROOT / "README.md",
        *ROOT.glob("algorithms/*.md"),
        *ROOT.glob("benchmarks/*.md"),
        *ROOT.glob("envs/tiny_lm/*/*.md"),
    ]
    return [path for path in paths if "<!-- table:" in path.read_text()]


def draw_grpo_learning() -> None:
    """Learning curves: mean over seeds with one standard deviation."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves, names = read("grpo_curves.csv"), {row["run"]: row["arm"] for runs in final_runs().values() for row in runs}
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8))
    panels = (
        ("eval/mean_at_8", "evaluation: right of 8 samples, %", 100.0),
        ("train/completions/mean_length", "training: tokens a completion", 1.0),
    )
    for axis, (tag, label, scale) in zip(axes, panels):
        for arm in dict.fromkeys(names.values()):
            points: dict[int, list[float]] = {}
            for row in curves:
                if names.get(row["run"]) == arm and row["tag"] == tag:
                    points.setdefault(int(row["step"]), []).append(scale * float(row["value"]))
            steps = sorted(points)
            mean = [statistics.mean(points[step]) for step in steps]
            spread = [statistics.stdev(points[step]) if len(points[step]) > 1 else 0.0 for step in steps]
            (line,) = axis.plot(steps, mean, label=ARM_NAMES[arm].partition(" (`")[0], linewidth=1.8)
            low, high = [m - s for m, s in zip(mean, spread)], [m + s for m, s in zip(mean, spread)]
            axis.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        axis.set_xlabel("step")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(RESULTS / "grpo_learning.png", dpi=110, metadata={"Software": None})


def main(args: Args) -> None:
    different = []
    for path in pages():
        old = path.read_text()
        if (new := redraw(old)) != old:
            different.append(str(path.relative_to(ROOT)))
            if not args.check:
                path.write_text(new)
    if not args.check:
        draw_grpo_learning()
    print("\n".join(different) or "all tables agree with the CSVs")
    sys.exit(int(args.check and bool(different)))


if __name__ == "__main__":
    main(tyro.cli(Args))
