"""What the CSVs say: runs of a study, paired differences, and the verdict of every claim.

A claim is a row of claims.csv: two arms of a study, a score, and the smallest difference that matters
(`margin`). `role` is its place, by a rule that looks at pairs and scales and never at a result: `main`,
`cost`, `elsewhere`, `other` (see README.md). `asked` is `us` for a question that no paper answers.
`later` are seeds that ran after a look at the others; `seen` says what was chosen after data were seen.
results/tested.csv keeps the p-value of every claim that was ever tested, also of those that are no
longer in claims.csv (the commit has their rows); Holm's correction counts them all.
"""

import functools
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
from scipy import stats

from benchmarks.about import RESULTS, ROOT

PAIRS = 5  # seeds from which on an interval is given
WORDS = {"us": ("ahead", "behind", "level within", "open")}
WORDS[""] = ("reproduced", "opposite", "no difference larger than", "not settled")


class Unfinished(FileNotFoundError):
    """Runs that a table needs are not there yet."""


# --- Runs -----------------------------------------------------------------------------------------


def read(name: str) -> pd.DataFrame:
    """A CSV in benchmarks/results; learning rates stay text."""
    return pd.read_csv(RESULTS / name, dtype={"learning_rate": str, "commit": str})


@functools.cache
def load_runs(study: str) -> pd.DataFrame:
    """Every run of a study: task, arm, seed, learning_rate, is_sweep, the scores and its csv."""
    name = f"{study}.csv" if (RESULTS / f"{study}.csv").exists() else f"{study}_runs.csv"
    runs = read(name)
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


def verdict(found: Interval, better: str, margin: float, asked: str = "") -> str:
    """What an interval says of the claim that the difference is `higher` or `lower` than 0."""
    as_claimed, against, level, unclear = WORDS[asked]
    if found.low is None:
        return "values shown"
    if found.low > 0 or found.high < 0:
        return as_claimed if (found.low > 0) == (better == "higher") else against
    inside = -margin < found.low and found.high < margin
    return level if inside else unclear


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


# --- Claims ---------------------------------------------------------------------------------------


def load_rows(name: str) -> list[SimpleNamespace]:
    """Rows of claims.csv or methods.csv."""
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
    theirs = scores_by_seed(claim.study, claim.task, claim.theirs, column)
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


def later_alone(claim: SimpleNamespace) -> str:
    """The seeds that ran after a look at the others, and the difference of these alone."""
    ranges = [map(int, seeds.split("-")) for seeds in claim.later.split()]
    later = [seed for first, last in ranges for seed in range(first, last + 1)]
    ours, theirs = (scores[scores.index.isin(later)] for scores in scores_of(claim))
    alone = f"{show_interval(paired(ours, theirs), *form_of(claim))} {unit_of(claim)}".strip()
    return f"seeds {claim.later} were added after a look at the others, and alone have {alone}"


def p_values() -> pd.Series:
    """Of the claims that can be tested: those of claims.csv with at least five pairs."""
    found = {}
    for claim in load_rows("claims.csv"):
        try:
            ours, theirs = scores_of(claim)
        except FileNotFoundError:
            continue
        if len((ours - theirs).dropna()) >= PAIRS:
            found[claim.name] = stats.ttest_rel(ours, theirs, nan_policy="omit").pvalue
    return pd.Series(found, dtype=float)


def load_tested() -> pd.DataFrame:
    """results/tested.csv: the p-value of every claim that was ever tested, and a commit that has its row."""
    return pd.read_csv(RESULTS / "tested.csv", dtype={"commit": str}, index_col="name")


def record_tested(path: Path = RESULTS / "tested.csv") -> None:
    """Add new claims to results/tested.csv; a claim that is there gets its p-value of today."""
    tested = load_tested()
    commit = subprocess.getoutput(f"git -C {ROOT} rev-parse --short HEAD")
    for name, p_value in p_values().items():
        tested.loc[name, "p_value"] = p_value
    tested = tested.fillna({"commit": commit})
    tested.to_csv(path, float_format="%.6g", lineterminator="\n")


@functools.cache
def corrected_errors() -> pd.Series:
    """The error of each claim's corrected interval, by name; every claim that was ever tested counts."""
    tested = load_tested().p_value
    return holm_errors(pd.concat([tested.drop(p_values().index, errors="ignore"), p_values()]))


def survives(claim: SimpleNamespace) -> bool:
    """Whether the corrected interval excludes zero, too."""
    if claim.name not in corrected_errors():
        return False
    wider = paired(*scores_of(claim), corrected_errors()[claim.name])
    return wider.low > 0 or wider.high < 0


def judge(claim: SimpleNamespace) -> tuple[str, str]:
    """Result and verdict of a claim."""
    try:
        ours, theirs = scores_of(claim)
    except FileNotFoundError:
        return "", "declared, not run"
    found = paired(ours, theirs)
    form = form_of(claim)
    result = f"{show_values(ours, *form)} against {show_values(theirs, *form)} {claim.unit}".strip()
    margin = margin_of(claim, theirs)
    said = verdict(found, claim.better, margin, claim.asked)
    if said == WORDS[claim.asked][2]:
        said += f" {form[0] * margin:.3g} {unit_of(claim)}".rstrip()
    result += f": {show_interval(found, *form)}" if found.low is not None else ""
    runs = final_runs(claim.study)
    runs = runs[runs.task == claim.task]
    arms = dict.fromkeys((claim.ours, claim.theirs))
    edges = ", ".join(f"`{arm}`" for arm in arms if "edge" in tuning(runs[runs.arm == arm]))
    edge = f"rate at the edge of the sweep: {edges}" if edges else ""
    return result, "; ".join(filter(None, [f"{said} ({claim.scale})", edge, claim.note]))


def kind_of(claim: SimpleNamespace) -> int | None:
    """0 as claimed or ahead, 1 opposite or behind, 2 level, 3 not settled; None without a verdict."""
    said = judge(claim)[1]
    return next((kind for kind, word in enumerate(WORDS[claim.asked]) if said.startswith(word)), None)


def main_claims() -> list[SimpleNamespace]:
    """The README's picture: one claim of each method."""
    return [claim for claim in load_rows("claims.csv") if claim.role == "main"]


def short_name(script: str) -> str:
    """A method's name in plots and tables."""
    titles = {method.script: method.title for method in load_rows("methods.csv")}
    return titles[script].partition(",")[0].removesuffix(" PPO")
