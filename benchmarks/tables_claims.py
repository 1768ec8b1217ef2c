"""The table of methods and the curves of the README, and the table of all claims; make_tables.py draws them.

Numbers are read from the CSVs, verdicts are written here: `reproduced`, `partly`, `not at this size`, `open`, `not run`.
Every function takes `read`, which returns the rows of a CSV in benchmarks/results.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import tables_study
from benchmarks.tables_control import Read, markdown, mean_std, pyplot

# Of the README's table of methods, in a few words: what the method's study shows.
GRPO_SHOWS = "learns; 7 points above the bare reward (95 %: 4 to 10)"
DAPO_SHOWS = "learns; not compared with GRPO over seeds yet"


@dataclass(frozen=True)
class Method:
    """A row of the README's table, and a panel of its curves."""

    script: str
    title: str
    paper: str  # arXiv id
    shows: str  # what of the paper shows here
    result: str  # what the default run teaches
    unit: str
    tags: tuple[str, ...]  # the metric; its first row is the beginning, the last row of the last tag the end
    scale: float = 100.0
    digits: int = 0
    x: str = "steps"


METHODS = (
    Method(
        "grpo",
        "GRPO, with Dr. GRPO as two flags",
        "2402.03300",
        GRPO_SHOWS,
        "number games solved",
        "%",
        ("eval/mean_at_8",),
    ),
    Method(
        "dapo",
        "DAPO: clip-higher, dynamic sampling, token-level loss, overlong penalty",
        "2503.14476",
        DAPO_SHOWS,
        "number games solved",
        "%",
        ("eval/mean_at_8",),
    ),
    Method(
        "gdpo",
        "GDPO: several rewards, each normalised by itself",
        "2601.05242",
        "rescaling a reward leaves the advantages as they are; no better than GRPO in the end",
        "tool calls right",
        "%",
        ("eval/mean_at_8",),
    ),
    Method(
        "dr_mas",
        "Dr. MAS: teams of language-model agents",
        "2602.08847",
        "no more gradient spikes of a rarely called agent; same success",
        "questions right",
        "%",
        ("eval/mean_at_8",),
    ),
    Method(
        "igpo",
        "IGPO: information-gain turn rewards",
        "2510.14967",
        "equal-outcome groups still yield gradients; no better than the outcome alone in the end",
        "questions right",
        "%",
        ("eval/mean_at_8",),
    ),
    Method(
        "spiral_rae",
        "SPIRAL: self-play with a baseline for each role",
        "2506.24119",
        "less gradient noise where roles differ; play is no better where both are stable (3 seeds)",
        "wins against random, moving first",
        "%",
        ("eval/tictactoe/random/first/win",),
    ),
    Method(
        "pi_play",
        "pi-Play: self-play with privileged distillation (a reconstruction)",
        "2604.14054",
        "far better where the control hardly ever gets a reward; elsewhere hardly better",
        "questions right",
        "%",
        ("eval/mean_at_8",),
    ),
    Method(
        "unimodal_poisson",
        "PPO with the unimodal Poisson policy",
        "2408.00309",
        "not settled: the comparison ran with a wrong start and is to be repeated",
        "HalfCheetah-v5 return in training",
        "",
        ("charts/episodic_return",),
        1.0,
        x="thousand environment steps",
    ),
    Method(
        "fm3q",
        "FM3Q: two-team minimax Q-learning",
        "2402.00738",
        "reaches equilibrium in small games with exact answers; no settled lead over self-play",
        "NashConv",
        "",
        ("eval/nash_conv_mean",),
        1.0,
        1,
        x="thousand environment steps",
    ),
    Method(
        "arac",
        "ARAC: soft actor-critic on graphs (a reconstruction)",
        "2511.08412",
        "a good reference speeds up the start; whether the weight has to adapt is open",
        "evaders caught",
        "%",
        ("eval/sampled/success",),
        x="thousand environment steps",
    ),
)


# --- The default runs -------------------------------------------------------------------------------------------------


def curve(read: Read, method: Method, tag: str) -> list[tuple[int, float]]:
    """Steps and scaled values of a metric of the default run."""
    rows = [row for row in read(f"{method.script}_default_metrics.csv") if row["tag"] == tag]
    return [(int(row["step"]), method.scale * float(row["value"])) for row in rows]


def default_minutes(read: Read, script: str) -> float:
    """Minutes that the default run has trained, without start and evaluations."""
    rows = read(f"{script}_default_metrics.csv")
    steps = [row for row in rows if row["tag"].endswith("seconds/step")]
    if steps:
        return sum(float(row["value"]) for row in steps) / 60
    speeds = [(int(row["step"]), float(row["value"])) for row in rows if row["tag"] == "charts/SPS"]
    return sum((step - before) / speed for (before, _), (step, speed) in zip([(0, 0), *speeds], speeds)) / 60


def methods(read: Read) -> str:
    """The README's table of methods."""
    rows = []
    for method in METHODS:
        first, last = (curve(read, method, tag) for tag in (method.tags[0], method.tags[-1]))
        name = method.script
        links = f"[{name}.py](algorithms/{name}.py), [page](algorithms/{name}.md)"
        paper = f"[{method.paper}](https://arxiv.org/abs/{method.paper})"
        result = f"{method.result}: {first[0][1]:,.{method.digits}f} → {last[-1][1]:,.{method.digits}f} {method.unit}"
        minutes = f"{default_minutes(read, name):.1f}"
        rows.append([method.title, links, paper, minutes, result.strip(), method.shows])
    return markdown(["method", "script", "arXiv", "minutes", "default run: first → last", "what shows"], rows)


def draw_default_runs(read: Read, folder: Path) -> None:
    """A small learning curve of every default run: the language scripts above, the control scripts below."""
    figure, axes = pyplot().subplots(3, 4, figsize=(11, 7.2))
    for axis in axes[1:, 3]:
        axis.set_visible(False)
    for axis, method in zip((axis for axis in axes.flat if axis.get_visible()), METHODS):
        unit = 1000 if method.x.startswith("thousand") else 1
        points = [(step / unit, value) for step, value in curve(read, method, method.tags[0])]
        axis.plot(*zip(*points), color="C0", linewidth=1.8, marker="o" if len(points) < 20 else "", markersize=4)
        if method.script == "arac":
            (_, reference), *_ = curve(read, method, "eval/reference/success")
            axis.axhline(reference, linestyle="--", color="gray", linewidth=1)
            axis.annotate("the reference", (0.97, 0.08), xycoords="axes fraction", ha="right", color="gray", fontsize=8)
        axis.set_title(f"{method.script}.py", fontsize=10, loc="left", family="monospace")
        axis.set_ylabel(f"{method.result}, {method.unit}".removesuffix(", "), fontsize=8)
        axis.set_xlabel(method.x, fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(folder / "default_runs.png", dpi=110, metadata={"Software": None})


# --- Claims -----------------------------------------------------------------------------------------------------------


def scores(rows: list[dict], column: str, digits: int = 1, unit: float = 100.0, **chosen: str) -> str:
    """Mean and standard deviation over the rows with these values, in percent by default."""
    found = [row for row in rows if all(row[name] == value for name, value in chosen.items())]
    return mean_std([unit * float(row[column]) for row in found if row[column]], digits)


def final(read: Read, study: str) -> list[dict]:
    """Runs of a comparison, without its sweep."""
    return [row for row in read(f"{study}_runs.csv") if row["stage"] == "final"]


def arms(read: Read, study: str, column: str, *names: str, digits: int = 1, unit: float = 100.0, **chosen) -> list:
    """A score of several arms. Runs of a language study are by `arm`, those of a control study by `policy`."""
    rows = final(read, study)
    key = "arm" if "arm" in rows[0] else "policy"
    return [scores(rows, column, digits, unit, **{key: name}, **chosen) for name in names]


def silent_groups(read: Read, tag: str) -> str:
    """Share of IGPO's groups without a signal over the last ten steps, in percent."""
    runs = {row["run"]: [] for row in final(read, "igpo") if row["arm"] == "f1ig"}
    for row in read("igpo_curves.csv"):
        if row["run"] in runs and row["tag"] == tag:
            runs[row["run"]].append(100 * float(row["value"]))
    return mean_std([statistics.mean(values[-10:]) for values in runs.values()], 1)


def bandit(read: Read, arm: str, **chosen: str) -> str:
    """Right hard choices on GDPO's bandit at equal learning rate, in percent."""
    return scores(read("bandit_gdpo.csv"), "hard", arm=arm, **({"study": "equal"} | chosen))


def easy(read: Read, arm: str, conditioned: str) -> str:
    """Right easy choices on GDPO's bandit when the easy reward counts a quarter, in percent."""
    rows = read("bandit_gdpo.csv")
    return scores(rows, "easy", study="weights", arm=arm, weight="0.25", conditioned=conditioned)


def simulated(read: Read, column: str, arm: str, scale: float = 1.0) -> str:
    """A number of Dr. MAS's simulated team in which nine of ten first answers are right."""
    return scores(read("simulate_dr_mas.csv"), column, 2, scale, study="fixed", arm=arm, first_try="0.9")


def tabular(read: Read, baseline: str) -> str:
    """Variance of a hand's gradient, exactly, with a handicap of 3."""
    rows = [row for row in read("tabular_spiral_variance.csv") if row["handicap"] == "3"]
    return next(f"{float(row['variance']):.2f}" for row in rows if row["baseline"] == baseline)


def distance(read: Read, arm: str) -> str:
    """NashConv of tabular self-play with a handicap of 3."""
    return scores(read("tabular_spiral_runs.csv"), "nash_conv_average", 3, 1.0, study="handicap", arm=arm)


def forfeits(read: Read, arm: str) -> str:
    """Forfeited hands of Kuhn poker in the last five steps at a fast rate, in percent."""
    runs = {row["run"]: [] for row in final(read, "spiral_kuhn") if row["arm"] == arm}
    for row in read("spiral_kuhn_curves.csv"):
        if row["run"] in runs and row["tag"] == "train/spiral_rae/kuhn/forfeits":
            runs[row["run"]].append(100 * float(row["value"]))
    return mean_std([statistics.mean(values[-5:]) for values in runs.values()], 1)


def variance(read: Read, arm: str, column: str) -> str:
    """Gradient variance of a head over 11 atoms, over the squared mean."""
    return scores(read("variance_poisson.csv"), column, 0, 1.0, arm=arm, num_atoms="11")


def study_score(read: Read, study: str, arm: str) -> str:
    """mean@8 before and after training, in percent."""
    runs = tables_study.final_runs(read, study, arm)
    first = tables_study.percent(runs, "first_mean_at_8")[0]
    return f"{first:.1f} → {mean_std(tables_study.percent(runs, 'mean_at_8'), 1)}"


def ahead(read: Read, study: str, arm: str, other: str, column: str = "mean_at_8") -> tuple[float, float, float]:
    """By how much an arm's mean@8 is above another's score, with its interval."""
    runs, others = (tables_study.final_runs(read, study, name) for name in (arm, other))
    return tables_study.difference(tables_study.percent(runs, "mean_at_8"), tables_study.percent(others, column))


def by_interval(found: tuple[float, float, float]) -> str:
    """The verdict on a difference: reproduced only if its interval is above 0."""
    return "reproduced" if found[1] > 0 else "not at this size"


Text = Callable[[Read], str]
CLAIMS: tuple[tuple[str, str, str, Text, str | Text, str], ...] = (
    (
        "GRPO",
        "rewards compared in a group teach a language model to solve problems",
        "Countdown, 5 seeds, 0.8 M parameters",
        lambda read: f"{study_score(read, 'grpo', 'grpo')} % of samples right",
        lambda read: by_interval(ahead(read, "grpo", "grpo", "grpo", "first_mean_at_8")),
        "study.py grpo",
    ),
    (
        "GRPO",
        "the group's mean is a baseline that helps",
        "the same without a baseline, each at its best rate: paired difference, points",
        lambda read: tables_study.show(ahead(read, "grpo", "grpo", "no_baseline")),
        lambda read: by_interval(ahead(read, "grpo", "grpo", "no_baseline")),
        "study.py grpo",
    ),
    (
        "DAPO",
        "its changes to GRPO raise AIME 2024 from 30 to 50 points (32B)",
        "",
        lambda read: "",
        "not run",
        "",
    ),
    (
        "GDPO",
        "rewards of different size do not drown each other",
        "bandit, 20 seeds, the hard reward x 1 and x 0.1",
        lambda read: "GDPO {}, {} %; GRPO {}, {} %".format(
            *(bandit(read, arm, scale=scale) for arm in ("gdpo", "grpo") for scale in ("1.0", "0.1"))
        ),
        "reproduced; batch norm is most of the gap at equal unit",
        "bandit_gdpo.py",
    ),
    (
        "GDPO",
        "a small weight works once the easy reward is conditioned on the hard one",
        "bandit, 20 seeds, weight 0.25: easy choice right",
        lambda read: "plain {} %, conditioned {} %".format(*(easy(read, "gdpo", flag) for flag in "01")),
        "reproduced",
        "bandit_gdpo.py",
    ),
    (
        "GDPO",
        "tool calling ends higher than with GRPO",
        "tool calls, 5 seeds, each at its best rate",
        lambda read: "{} against {} %, GRPO + batch norm {} %".format(
            *arms(read, "gdpo", "mean_at_8", "gdpo", "grpo", "grpo_batch_norm")
        ),
        "not at this size",
        "learning.py --study gdpo",
    ),
    (
        "Dr. MAS",
        "one baseline for all inflates the gradient of a rare agent (lemma 4.2)",
        "simulated team, 20 seeds: the refiner's gradient norm",
        lambda read: "{} with its own, {} with one for all".format(
            *(simulated(read, "refiner_norm_mean", arm) for arm in ("agent", "global"))
        ),
        "reproduced",
        "simulate_dr_mas.py",
    ),
    (
        "Dr. MAS",
        "its gradient spikes in training",
        "team with a refiner, 5 seeds: its largest norm",
        lambda read: "{} against {}".format(
            *arms(read, "dr_mas", "refiner_norm_max", "agent", "global", digits=1, unit=1.0)
        ),
        "reproduced",
        "learning.py --study dr_mas",
    ),
    (
        "Dr. MAS",
        "the team ends better",
        "the same",
        lambda read: "{} against {} % right".format(*arms(read, "dr_mas", "mean_at_8", "agent", "global")),
        "not at this size",
        "learning.py --study dr_mas",
    ),
    (
        "IGPO",
        "groups without a difference in outcome still teach",
        "its own groups, last 10 steps, 5 seeds",
        lambda read: "silent: {} % by outcome, {} % with gains".format(
            *(silent_groups(read, tag) for tag in ("train/frac_reward_zero_std", "train/igpo/frac_no_signal"))
        ),
        "reproduced",
        "learning.py --study igpo",
    ),
    (
        "IGPO",
        "gains and outcome teach more than the outcome or the gains alone",
        "search questions, 5, 5 and 3 seeds",
        lambda read: "{}, {}, {} % right".format(*arms(read, "igpo", "mean_at_8", "f1ig", "f1", "ig")),
        "partly: gains alone fail; not better than the outcome alone",
        "learning.py --study igpo",
    ),
    (
        "pi-Play",
        "two to three times as fast as self-play without a teacher",
        "search questions, 5 seeds",
        lambda read: "{} against {} % in the end".format(*arms(read, "pi_play", "mean_at_8", "qcp", "none")),
        "partly: the control is hardly ever rewarded for two hops",
        "learning.py --study pi_play",
    ),
    (
        "pi-Play",
        "the same with one hop",
        "3 seeds",
        lambda read: "{} against {} %".format(*arms(read, "pi_play", "mean_at_8", "one_hop_qcp", "one_hop_none")),
        "hardly better",
        "learning.py --study pi_play",
    ),
    (
        "pi-Play",
        "the path teaches more than half of it, that more than the answer, that no more than nothing",
        "5, 3, 3, 5 seeds",
        lambda read: "{}, {}, {}, {} %".format(*arms(read, "pi_play", "mean_at_8", "qcp", "partial", "answer", "none")),
        "partly: the order, but the answer is worth much",
        "learning.py --study pi_play",
    ),
    (
        "pi-Play",
        "a lambda that decays is better than a fixed one",
        "5 and 3 seeds, the fixed one at the same rate",
        lambda read: "{} against {} %".format(*arms(read, "pi_play", "mean_at_8", "qcp", "lambda_fixed")),
        "reproduced",
        "learning.py --study pi_play",
    ),
    (
        "pi-Play",
        "questions get harder, searches are repeated less",
        "every round, [table](pi_play.md)",
        lambda read: "slightly easier; nobody repeats",
        "not at this size",
        "examiner_pi_play.py",
    ),
    (
        "SPIRAL",
        "a baseline for each role takes noise away where roles are worth different amounts",
        "Kuhn, handicap 3, tables of logits: variance, exactly",
        lambda read: "{} with, {} without, {} with one for both".format(
            *(tabular(read, arm) for arm in ("role", "none", "global"))
        ),
        "reproduced",
        "tabular_spiral.py",
    ),
    (
        "SPIRAL",
        "so it learns better",
        "the same, 20 seeds: NashConv",
        lambda read: "{} with, {} without".format(*(distance(read, arm) for arm in ("role", "none"))),
        "reproduced; no difference without the handicap",
        "tabular_spiral.py",
    ),
    (
        "SPIRAL",
        "without it thoughts shrink and the gradient collapses",
        "language model, fast rate, 3 seeds: forfeited hands",
        lambda read: "{} % with, {} % without".format(*(forfeits(read, arm) for arm in ("fast_role", "fast_none"))),
        "partly: play falls apart, thoughts get longer",
        "learning.py --study spiral_kuhn",
    ),
    (
        "SPIRAL",
        "it plays better",
        "tic-tac-toe, language model, 3 seeds: points against random",
        lambda read: "{} with, {} % without".format(*arms(read, "spiral_rae", "points", "role", "none")),
        "not at this size",
        "learning.py --study spiral_rae",
    ),
    (
        "SPIRAL",
        "several games teach more than one",
        "one seed, [table](spiral_rae.md#several-games-against-one)",
        lambda read: "specialists win at home, all-rounders come second",
        "not at this size",
        "head_to_head_spiral.py",
    ),
    (
        "Poisson",
        "a unimodal head has less gradient variance than other heads over atoms",
        "bandit, 5 seeds, K = 11: Poisson, softmax, ordinal",
        lambda read: "in the head {}, {}, {}; in actions {}, {}, {}".format(
            *(variance(read, arm, f"{x}_relative") for x in ("head", "action") for arm in HEADS)
        ),
        "partly: in its own parameters, not in actions",
        "variance_poisson.py",
    ),
    (
        "Poisson",
        "it returns more",
        "7 heads on 3 tasks, 5 seeds, older script, start at ln 2 ([all returns](unimodal_poisson.md))",
        lambda read: "HalfCheetah-v5: Poisson {}, Gaussian {}, softmax {}; Hopper-v5: {}, {}, {}".format(
            *(
                arms(read, "unimodal_poisson", "train_return", arm, digits=0, unit=1.0, env=env)[0]
                for env in ("HalfCheetah-v5", "Hopper-v5")
                for arm in ("poisson", "gaussian", "categorical")
            )
        ),
        "withdrawn: the start was wrong; open with the new one",
        "control.py --study unimodal_poisson",
    ),
    (
        "FM3Q",
        "fewer samples to the equilibrium than self-play",
        "one additive game of 3 states, 5 seeds, older script: steps to NashConv < 0.05",
        lambda read: "{} against {} (QMIX in self-play)".format(
            *arms(read, "fm3q", "samples_to_first", "qmix", "selfplay_qmix", digits=0, unit=1.0, env="arat")
        ),
        "withdrawn: this is the best pair only, and with sums self-play is sooner; open over many games",
        "control.py --study fm3q",
    ),
    (
        "FM3Q",
        "and it stays there",
        "the same: NashConv in the last tenth",
        lambda read: "{} against {}; independent agents {}".format(
            *arms(read, "fm3q", "late_nash_conv", "qmix", "selfplay_qmix", "iql", digits=3, unit=1.0, env="arat")
        ),
        "partly: independent agents stay too",
        "control.py --study fm3q",
    ),
    (
        "FM3Q",
        "and a larger game is learned better",
        "additive game of 50 states, 5 seeds, 100,000 steps, each at its best rate: NashConv in the last tenth",
        lambda read: "QMIX {}, sums {}; in self-play {}, {}; independent agents {}".format(
            *arms(
                read,
                "fm3q",
                "late_nash_conv",
                *("qmix", "vdn", "selfplay_qmix", "selfplay_vdn", "iql"),
                digits=2,
                unit=1.0,
                env="arat_large",
            )
        ),
        "reproduced, but for `twin`; below 0.05 in no run",
        "control.py --study fm3q",
    ),
    (
        "FM3Q",
        "harder to exploit, in pong",
        "a million steps, 3 seeds, older script: what fresh opponents got",
        lambda read: "QMIX {}, sums {}; QMIX in self-play {}, independent agents {}".format(
            *arms(
                read,
                "fm3q",
                "exploitability",
                *("qmix", "vdn", "selfplay_qmix", "iql"),
                digits=2,
                unit=1.0,
                env="pong",
            )
        ),
        "withdrawn: the opponents lost, so they measured nothing; open with better ones",
        "control.py --study fm3q",
    ),
    (
        "ARAC",
        "a reference helps early",
        "grid 6x6, 3 seeds, cycle of 12, 5 seeds: won in the first tenth of training, with and without one",
        lambda read: "{} against {} %; cycle {} against {} %".format(
            *arms(read, "arac", "early_success", "dual", "none", digits=0, env="grid_6x6"),
            *arms(read, "arac", "early_success", "dual", "none", digits=0, env="cycle_12"),
        ),
        "partly: on the grid, where the reference is good; on the cycle it is of no use",
        "control.py --study arac",
    ),
    (
        "ARAC",
        "an adaptive weight does not inherit the reference's fault",
        "cycle of 12, 5 seeds, and confrontation, 3 seeds: won in the end, adaptive and fixed weight",
        lambda read: "{} against {} %; confrontation {} against {} %".format(
            *arms(read, "arac", "sampled_success", "dual", "fixed", digits=0, env="cycle_12"),
            *arms(read, "arac", "sampled_success", "dual", "fixed", digits=0, env="confrontation"),
        ),
        "open: in all runs the weight fell like an exponential schedule, a control that was missing",
        "control.py --study arac",
    ),
    (
        "ARAC",
        "more is won in the end than without a reference",
        "grid 6x6 and confrontation, 3 seeds each",
        lambda read: "{} against {} %; confrontation {} against {} %".format(
            *arms(read, "arac", "sampled_success", "dual", "none", digits=0, env="grid_6x6"),
            *arms(read, "arac", "sampled_success", "dual", "none", digits=0, env="confrontation"),
        ),
        "not at this size",
        "control.py --study arac",
    ),
    (
        "ARAC",
        "a policy works on graphs that it has not seen",
        "a policy of a cycle of 8 on 11 games",
        lambda read: "[table](arac.md)",
        "partly: on smaller cycles and paths, not on large grids",
        "transfer_arac.py",
    ),
)
HEADS = ("poisson", "categorical", "ordinal")


def claims(read: Read) -> str:
    """What the papers say, what was run, what came out; `open` as long as a study is not finished."""
    rows = []
    for *said, numbers, verdict, program in CLAIMS:
        try:
            found = [numbers(read), verdict(read) if callable(verdict) else verdict]
        except tables_study.Unfinished:
            found = ["", "open"]
        rows.append([*said, *found, f"`{program}`" if program else ""])
    return markdown(["method", "the paper says", "we ran", "result", "verdict", "program"], rows)


TABLES = {"methods": methods, "claims": claims}
FIGURES = (draw_default_runs,)
