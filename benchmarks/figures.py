"""Figures of the pages: curves of a study, default runs, and the main claim of each method."""

from types import SimpleNamespace

import matplotlib
import pandas as pd
from matplotlib.transforms import blended_transform_factory

from benchmarks.about import RESULTS
from benchmarks.studies import FIGURES
from benchmarks.verdicts import (
    kind_of,
    load_curves,
    load_rows,
    main_claims,
    paired,
    read,
    scores_of,
    short_name,
    survives,
)

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

COLORS = {"reproduced, ahead": "#2a9d5c", "opposite, behind": "#d1495b", "no difference, level": "#3b82c4", "not settled, open": "#9a9a9a"}


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
    figure = FIGURES[name]
    size = (7 if len(figure.panels) == 1 else 4.6 * len(figure.panels), 3.8)
    picture, axes = plt.subplots(1, len(figure.panels), figsize=size, squeeze=False)
    for axis, (title, task, tag, label, *other) in zip(axes[0], figure.panels):
        points = load_curves(other[0] if other else figure.study)
        points = points[(points.tag == tag) & (points.task == task)]
        points = points.assign(x=points.step.astype(float), y=figure.scale * points.value)
        if figure.bins:
            width = points.x.max() / figure.bins
            points["x"] = (((points.x - 1) // width).clip(0, figure.bins - 1) + 0.5) * width
        for arm, text in figure.grey.items():
            grey = {"color": "0.65", "linewidth": 1.2, "label": text or None}
            draw_line(axis, points[points.arm == arm], band=False, **grey)
        for number, (arm, text) in enumerate(figure.bold.items()):
            bold = {"color": f"C{number}", "linewidth": 2, "label": text}
            draw_line(axis, points[points.arm == arm], **bold)
        axis.set(title=title, xlabel="step", ylabel=label, ylim=(0, None))
    axes[0, 0].legend(frameon=False, fontsize=8)
    save(picture, name)


def rare_answers() -> None:
    """pass@k before and after training, over k, with bands from the lowest to the highest seed."""
    rows = pd.read_csv(RESULTS / "unlikeliness.csv")
    picture, axis = plt.subplots(figsize=(7, 3.8))
    first = rows.assign(**{f"pass_at_{k}": rows[f"first_pass_at_{k}"] for k in (1, 8, 64)})
    lines = [("before training", first, "0.5"), ("GRPO", rows[rows.arm == "none"], "C1")]
    lines.append(("unlikeliness", rows[rows.arm == "unlikeliness"], "C0"))
    for label, group, color in lines:
        wide = group[["seed", "pass_at_1", "pass_at_8", "pass_at_64"]].melt("seed")
        points = wide.assign(x=wide.variable.str.removeprefix("pass_at_").astype(float), y=100 * wide.value)
        draw_line(axis, points, color=color, linewidth=2, marker="o", label=label)
    axis.set(xscale="log", xlabel="answers sampled", ylabel="problems solved, %", ylim=(20, 102))
    axis.set_xticks([1, 8, 64], ["1", "8", "64"])
    axis.minorticks_off()
    axis.legend(frameon=False)
    save(picture, "rare_answers")


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


FARTHEST = 18  # standard deviations that the picture of claims shows


def forest(ink: str, paper: str):
    """The main claim of each method: its interval in standard deviations of the control, turned so that right of zero
    is as claimed. Dots are filled where the interval excludes zero also after Holm's correction."""
    shown = main_claims()
    size = 9  # points; at 860 pixels a point is 1.4 of them
    height = 0.212 * len(shown) + 0.98
    picture, axis = plt.subplots(figsize=(8.6, height), facecolor=paper)
    axis.set_facecolor(paper)
    beside = blended_transform_factory(picture.transFigure, axis.transData)
    text = {"transform": beside, "va": "center", "fontsize": size, "color": ink}
    for row, claim in enumerate(shown):
        ours, theirs = scores_of(claim)
        found = paired(ours, theirs)
        unit = theirs.std() * (1 if claim.better == "higher" else -1)
        color = list(COLORS.values())[kind_of(claim)]
        ends = [found.low / unit, found.high / unit]
        axis.plot(ends, [row, row], color=color, linewidth=2, solid_capstyle="butt")
        inside = color if survives(claim) else paper
        place = found.mean / unit
        mark = "o"
        if abs(place) > FARTHEST:  # an arrow at the edge points to it
            mark = ">" if place > 0 else "<"
            place = FARTHEST if place > 0 else -FARTHEST
        axis.plot(place, row, mark, color=color, markersize=5.5, markerfacecolor=inside)
        axis.text(0.01, row, short_name(claim.method).replace("Advantage Alignment", "AdAlign"), weight="bold", **text)
        label = claim.plot + " (our question)" * bool(claim.asked)
        axis.text(0.125, row, label, style="italic" if claim.asked else "normal", gid="label", **text)
        axis.text(0.87, row, f"{claim.scale.removesuffix(' parameters')}, {len(ours)}", **text)
    axis.text(0.87, -1, "scale, pairs", style="italic", **text)
    axis.axvline(0, color=ink, linewidth=0.8)
    axis.set_xscale("symlog", linthresh=1)
    ticks = [-10, -3, -1, 0, 1, 3, 10]
    axis.set_xticks(ticks, [f"{tick:+d}" if tick else "0" for tick in ticks], fontsize=size - 1, color=ink)
    axis.minorticks_off()
    axis.set(yticks=[], ylim=(len(shown) - 0.4, -0.6), xlim=(-20, 20))
    under = {"xycoords": ("data", "figure points"), "textcoords": "offset points", "fontsize": size, "color": ink}
    axis.annotate("← opposite", (0, 4), (-6, 0), ha="right", **under)
    axis.annotate("as the paper claims →", (0, 4), (6, 0), ha="left", **under)
    what = "difference in standard deviations of the control, 95 % interval"
    picture.text(0.01, 0.02, what, va="bottom", fontsize=size, style="italic", color=ink)
    axis.spines[:].set_visible(False)
    axis.tick_params(color=ink)
    axis.grid(axis="x", alpha=0.25)
    marks = []
    for kind, (word, color) in enumerate(COLORS.items()):
        number = sum(kind_of(claim) == kind for claim in shown)
        marks.append(plt.Line2D([], [], color=color, label=f"{word}: {number}", linewidth=2))
    for inside, word in ((ink, "after correction, too"), (paper, "not after correction")):
        marks.append(plt.Line2D([], [], color=ink, marker="o", linewidth=0, markerfacecolor=inside, label=word))
    place = {"loc": "upper left", "bbox_to_anchor": (0.0, 1.0), "ncols": 3, "frameon": False}
    place |= {"columnspacing": 1.2, "handlelength": 1.4}
    picture.legend(handles=marks, fontsize=size, labelcolor=ink, **place)
    picture.subplots_adjust(left=0.53, right=0.86, top=1 - 0.58 / height, bottom=0.42 / height)
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
    """Pictures of README.md and algorithms/README.md, each for a light and for a dark page."""
    pictures = {"opening": opening, "default_runs": default_runs, "forest": forest}
    for suffix, ink, paper in (("", "#1f2328", "white"), ("_dark", "#e6edf3", "#0d1117")):
        for name, draw in pictures.items():
            picture = draw(ink, paper)
            path = RESULTS / f"{name}{suffix}.png"
            picture.savefig(path, dpi=200, metadata={"Software": None})
            plt.close(picture)
