"""Tables and figures of the control family; make_tables.py draws them with its own.

Every function takes `read`, which returns the rows of a CSV in benchmarks/results or raises FileNotFoundError. A table
without its CSV is the empty text, one whose study is still running has the rows that are there.
"""

import random
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

Read = Callable[[str], list[dict]]
POLICIES = {
    "poisson": "Poisson (`--policy poisson`, the default)",
    "poisson_narrow": "Poisson, narrower (`--temperature 0.5 --rate-init 6`)",
    "poisson_repo": "Poisson as in the released code (`poisson_repo`)",
    "gaussian": "Gaussian (`gaussian`)",
    "beta": "Beta (`beta`)",
    "categorical": "softmax over atoms (`categorical`)",
    "ordinal": "ordinal softmax (`ordinal`)",
    "bang_bang": "the two ends only (`--policy categorical --num-atoms 2`)",
}
TASKS = ("InvertedPendulum-v5", "Hopper-v5", "HalfCheetah-v5", "Walker2d-v5", "Humanoid-v5")
FM3Q = {
    "qmix": "FM3Q, one monotone network (`--mixer qmix`, the default)",
    "twin": "FM3Q, one for each team (`--mixer twin`)",
    "vdn": "FM3Q, signed sums (`--mixer vdn`)",
    "pairwise": "FM3Q, pairs of opponents: the released code (`--mixer pairwise`)",
    "selfplay_vdn": "two teams in self-play, sums (`--learner selfplay_vdn`)",
    "selfplay_qmix": "two teams in self-play, QMIX (`--learner selfplay_qmix`)",
    "iql": "every agent alone (`--learner iql`)",
    "joint_minimax": "minimax over all joint actions (a learner of the older script)",
}
FM3Q_PONG = ("qmix", "vdn", "selfplay_qmix", "iql")
FM3Q_GAMES = {"arat": "small: 3 states", "arat_large": "large: 50 states"}
ARAC = {  # the weight of the divergence
    "dual": "adaptive, by a target for the divergence (`--beta-mode dual`, the default)",
    "performance": "adaptive, by success (`performance`)",
    "linear": "falling to 0 by half of the run (`linear`)",
    "exp": "falling exponentially (`exp`)",
    "fixed": "fixed at its first value (`fixed`)",
    "none": "no reference (`none`)",
}
ARAC_TASKS = {  # task: in words, and arms
    "cycle_12": ("cycle of 12, 2 pursuers", tuple(ARAC)),
    "grid_6x6": ("grid 6x6, 2 pursuers, perfect evader", ("dual", "fixed", "none")),
    "confrontation": ("confrontation on a grid 5x5", ("dual", "fixed", "none")),
    "cycle_12_m3": ("cycle of 12, 3 pursuers", ("dual", "none")),
    "cycle_12_m4": ("cycle of 12, 4 pursuers", ("dual", "none")),
}
SPEED_ARMS = {
    "cleanrl": "CleanRL, Gaussian",
    "gaussian": "ours, Gaussian",
    "poisson": "ours, Poisson",
    "compile": "ours, Gaussian, `--compile`",
    "simulator": "the simulator without learning",
    "mj_step": "MuJoCo alone",
}
VARIANCE_ARMS = {
    "poisson": "Poisson, fitted temperature",
    "poisson_2.5": "Poisson, temperature 2.5",
    "poisson_repo": "Poisson as in the released code",
    "categorical": "softmax over atoms",
    "ordinal": "ordinal softmax",
}
VARIANCES = {  # column: in words
    "weights_var": "variance by the weights, in their own units",
    "weights_relative": "by the weights, over the squared mean",
    "head_relative": "by the head's output, over the squared mean",
    "action_relative": "of what it does to the mean action, over the squared mean",
}


# --- Numbers ----------------------------------------------------------------------------------------------------------


def rows_of(read: Read, name: str) -> list[dict]:
    """Rows of a CSV, none if it does not exist."""
    try:
        return read(name)
    except FileNotFoundError:
        return []


def markdown(header: list[str], rows: list[list]) -> str:
    """A Markdown table; the empty text if it has no rows."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) if rows else ""


def mean_std(values: list[float], digits: int = 0) -> str:
    """Mean and sample standard deviation; a single value stands alone."""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}" if values else ""


def between(values: list[float], digits: int = 0) -> str:
    """Median, lowest and highest."""
    low, high = (f"{f(values):,.{digits}f}" for f in (min, max))
    return f"{statistics.median(values):,.{digits}f} ({low} to {high})"


def interquartile_mean(values: list[float]) -> float:
    """Mean without the lowest and the highest quarter, rounded down: of 5 values the middle 3, of 3 all."""
    cut = len(values) // 4
    return statistics.mean(sorted(values)[cut : len(values) - cut])


def interval(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """95 % of the interquartile means of samples drawn from the values with replacement; always the same draws."""
    generator = random.Random(0)
    found = sorted(interquartile_mean(generator.choices(values, k=len(values))) for _ in range(draws))
    return found[round(0.025 * draws)], found[round(0.975 * draws) - 1]


def numbers(rows: list[dict], column: str) -> list[float]:
    """A column, without the rows where it is empty."""
    return [float(row[column]) for row in rows if row[column]]


def percent(rows: list[dict], column: str) -> str:
    """Mean and standard deviation of shares, in percent."""
    return mean_std([100 * value for value in numbers(rows, column)], 1)


def final_runs(read: Read, study: str, names: Iterable[str], tasks=TASKS) -> dict[tuple[str, str], list[dict]]:
    """Runs of the comparison by task and arm, in the order of the tasks and the names; only those that there are."""
    rows = [row for row in rows_of(read, f"{study}_runs.csv") if row["stage"] == "final"]
    keys = [(env, arm) for env in tasks for arm in names]
    return {key: found for key in keys if (found := [r for r in rows if (r["env"], r["policy"]) == key])}


def planned_runs(read: Read, study: str, names: dict[str, str], tasks: dict[str, Iterable[str]]) -> list[tuple]:
    """(task, arm, runs) of all arms of the tasks that have begun, the empty list where an arm did not run."""
    found = final_runs(read, study, names, tasks)
    begun = [env for env, arms in tasks.items() if any(found.get((env, arm)) for arm in arms)]
    return [(env, arm, found.get((env, arm), [])) for env in begun for arm in tasks[env]]


def sweep_table(read: Read, study: str, names: dict[str, str], label: str, score: str, digits: int = 0) -> str:
    """A score by arm and learning rate."""
    sweep = [row for row in rows_of(read, f"{study}_runs.csv") if row["stage"] == "sweep"]
    rates = sorted({row["learning_rate"] for row in sweep}, key=float)
    cells = {(r["policy"], r["learning_rate"]): f"{x:.{digits}f}" for r in sweep for x in numbers([r], score)}
    arms = [arm for arm in names if any(row["policy"] == arm for row in sweep)]
    rows = [[names[arm], *(cells.get((arm, rate), "") for rate in rates)] for arm in arms]
    return markdown([label, *rates], rows)


def runs_table(read: Read, study: str) -> str:
    """Cost of the runs, the sweep included."""
    runs = rows_of(read, f"{study}_runs.csv")
    if not runs:
        return ""
    packages = [name for name in ("torch", "gymnasium", "mujoco", "numpy") if name in runs[0]]
    versions = {", ".join(f"{name} {r[name]}" for name in packages) + f", Python {r['python']}" for r in runs}
    devices = {f"{r['device']}, {r['threads']} thread a run" for r in runs}
    rows = [["runs", len(runs)], ["hours, added up", f"{sum(numbers(runs, 'minutes')) / 60:.1f}"]]
    rows += [["steps a second", between(numbers(runs, "steps_per_second"))]]
    if memory := numbers(runs, "peak_memory_gb"):
        rows += [["peak memory", f"{max(memory):.2f} GB"]]
    rows += [["device", "; ".join(sorted(devices))], ["versions", "; ".join(sorted(versions))]]
    return markdown(["", ""], [*rows, ["commit", ", ".join(sorted({r["commit"] for r in runs}))]])


# --- PPO with the unimodal Poisson policy -----------------------------------------------------------------------------


def unimodal_poisson_returns(read: Read) -> str:
    """Returns in training, last tenth of the steps."""
    rows = []
    for (env, arm), runs in final_runs(read, "unimodal_poisson", POLICIES).items():
        returns = numbers(runs, "train_return")
        cells = ["", ""]
        if len(returns) >= 3:
            cells = [f"{interquartile_mean(returns):.0f}", " to ".join(f"{x:.0f}" for x in interval(returns))]
        rows.append([env, POLICIES[arm], runs[0]["learning_rate"], len(runs), mean_std(returns), *cells])
    header = ["task", "policy", "learning rate", "seeds", "return", "interquartile mean", "95 % interval of it"]
    return markdown(header, rows)


def poisson_start(read: Read) -> str:
    """The default start on Hopper: every seed, and their mean."""
    rows = []
    found = rows_of(read, "poisson_start_runs.csv")
    for row in found:
        cells = [row["train_return"], row["eval_deterministic"], row["eval_sampled"]]
        rows.append([row["seed"], *(f"{float(cell):.0f}" for cell in cells), row["minutes"]])
    if len(found) > 1:
        columns = ("train_return", "eval_deterministic", "eval_sampled")
        rows.append(["mean", *(mean_std(numbers(found, column)) for column in columns), ""])
    header = ["seed", "last tenth of training", "likeliest actions", "sampled actions", "minutes"]
    return markdown(header, rows)


def unimodal_poisson_sweep(read: Read) -> str:
    """Learning-rate sweep: returns in training, last fifth of the steps."""
    return sweep_table(read, "unimodal_poisson", POLICIES, "policy", "train_return")


def unimodal_poisson_evaluation(read: Read) -> str:
    """The last policy: returns of the likeliest and of sampled actions."""
    rows = []
    for (env, arm), runs in final_runs(read, "unimodal_poisson", POLICIES).items():
        scores = [mean_std(numbers(runs, f"eval_{name}")) for name in ("deterministic", "sampled")]
        rows.append([env, POLICIES[arm], len(runs), *scores])
    return markdown(["task", "policy", "seeds", "likeliest actions", "sampled actions"], rows)


def unimodal_poisson_shape(read: Read) -> str:
    """Policies over atoms in the last fiftieth of training: mass on both ends, share with several peaks, and entropy,
    this in the first fiftieth too."""
    curves: dict[str, list[dict]] = {}
    for row in rows_of(read, "unimodal_poisson_curves.csv"):
        curves.setdefault(row["run"], []).append(row)
    rows = []
    for (env, arm), runs in final_runs(read, "unimodal_poisson", POLICIES).items():
        found = [curves[run["run"]] for run in runs if run["run"] in curves]
        first, last = [points[0] for points in found], [points[-1] for points in found]
        if numbers(last, "extreme_mass"):
            cells = [percent(last, name) for name in ("extreme_mass", "frac_multimodal")]
            cells += [mean_std(numbers(points, "entropy"), 2) for points in (first, last)]
            rows.append([env, POLICIES[arm], len(found), *cells])
    header = ["task", "policy", "seeds", "mass on the two ends, %", "several peaks, %"]
    return markdown([*header, "entropy, nats, at first", "in the end"], rows)


def unimodal_poisson_cleanrl(read: Read) -> str:
    """Our Gaussian policy with the default flags beside CleanRL's published returns, on the older version of a task."""
    published = {row["env"]: row for row in rows_of(read, "cleanrl_ppo_v4.csv")}
    rows = []
    for (env, _), runs in final_runs(read, "unimodal_poisson", {"gaussian_1m": ""}).items():
        peer = published.get(env.replace("-v5", "-v4"))
        theirs = [f"{float(peer['return_mean']):.0f} ± {float(peer['return_std']):.0f}", peer["seeds"]] if peer else []
        name = env.removesuffix("-v5")
        rows.append([name, mean_std(numbers(runs, "train_return")), len(runs), *(theirs or ["", ""])])
    return markdown(["task", "ours, v5", "seeds", "CleanRL, v4, as published", "seeds"], rows)


def unimodal_poisson_runs(read: Read) -> str:
    """Cost of the runs, the sweep included."""
    return runs_table(read, "unimodal_poisson")


# --- FM3Q -------------------------------------------------------------------------------------------------------------


def fm3q_equilibrium(read: Read) -> str:
    """Games that are solved exactly: steps until NashConv is below 0.05 in every state, the first time and for good, in
    how many runs that is, and NashConv in the end."""
    rows = []
    for env, arm, runs in planned_runs(read, "fm3q", FM3Q, dict.fromkeys(FM3Q_GAMES, FM3Q)):
        cells = ["", 0, *["not run"] * 4]
        if runs:
            cells = [runs[0]["learning_rate"], len(runs)]
            for steps in (numbers(runs, f"samples_to_{x}") for x in ("first", "equilibrium")):
                cells.append(f"{mean_std(steps)} ({len(steps)} of {len(runs)})" if steps else "never")
            cells += [mean_std(numbers(runs, x), 3) for x in ("late_nash_conv", "nash_conv_mean", "nash_conv_max")]
        rows.append([FM3Q_GAMES[env], FM3Q[arm], *cells])
    header = ["game", "learner", "learning rate", "seeds", "steps until NashConv < 0.05 (runs)", "for good (runs)"]
    return markdown([*header, "NashConv, last tenth", "NashConv, last", "NashConv, last, worst state"], rows)


def fm3q_sweep(read: Read) -> str:
    """Learning-rate sweep: the last NashConv, mean over states."""
    return sweep_table(read, "fm3q", FM3Q, "learner", "nash_conv_mean", 3)


def fm3q_pong(read: Read) -> str:
    """Pong: games won and lost against scripted teams, both sides together."""
    rows, opponents = [], ("tracker", "wanderer")
    for _, arm, runs in planned_runs(read, "fm3q", FM3Q, {"pong": FM3Q_PONG}):
        cells = ["", 0, *["not run"] * 4]
        if runs:
            shares = [percent(runs, f"{x}_{name}") for name in opponents for x in ("win", "loss")]
            cells = [runs[0]["learning_rate"], len(runs), *shares]
        rows.append([FM3Q[arm], *cells])
    games = [f"{outcome} against the {name}, %" for name in opponents for outcome in ("won", "lost")]
    return markdown(["learner", "learning rate", "seeds", *games], rows)


def fm3q_runs(read: Read) -> str:
    """Cost of the runs, the sweep included."""
    return runs_table(read, "fm3q")


# --- ARAC -------------------------------------------------------------------------------------------------------------


def arac_learning(read: Read) -> str:
    """Success early and late in training and in the last evaluation, the reference's, and the weight in the end."""
    rows, columns = [], [f"{name}_success" for name in ("early", "late", "sampled", "greedy", "reference")]
    for env, arm, runs in planned_runs(read, "arac", ARAC, {env: arms for env, (_, arms) in ARAC_TASKS.items()}):
        cells = [0, *["not run"] * 6]
        if runs:
            weight = "" if arm == "none" else mean_std(numbers(runs, "beta"), 4)  # there it weighs nothing
            cells = [len(runs), *(percent(runs, column) for column in columns), weight]
        rows.append([ARAC_TASKS[env][0], ARAC[arm], *cells])
    header = ["game", "weight of the divergence", "seeds", "first tenth of training, %", "last tenth, %"]
    header += ["in the end: sampled, %", "likeliest actions, %", "reference alone, %", "weight in the end"]
    return markdown(header, rows)


def arac_transfer(read: Read) -> str:
    """One policy, trained on a cycle of 8, on other graphs."""
    players, rows = {"sampled": "sampled", "greedy": "likeliest actions", "reference": "reference"}, []
    for row in rows_of(read, "arac_transfer.csv"):
        shares = [percent([row], f"{player}_success") for player in players]
        rows.append([f"`{row['flags']}`" if row["flags"] else "its own", *shares])
    return markdown(["game", *(f"{name}, %" for name in players.values())], rows) if rows else ""


def arac_runs(read: Read) -> str:
    """Cost of the runs."""
    return runs_table(read, "arac")


# --- Speed and variance -----------------------------------------------------------------------------------------------


def speed_ppo(read: Read) -> str:
    """Steps a second beside CleanRL; a ratio is that of two runs of the same repeat."""
    found, rows = rows_of(read, "speed_ppo.csv"), []
    for case in dict.fromkeys(row["case"] for row in found):
        of = {arm: [r for r in found if (r["case"], r["arm"]) == (case, arm)] for arm in SPEED_ARMS}
        peers = {r["repeat"]: r for r in of["cleanrl"]}
        for arm, runs in ((arm, runs) for arm, runs in of.items() if runs):
            ratios = []
            for column in ("steps_per_second", "steps_per_cpu_second"):
                pairs = [(r, peers[r["repeat"]]) for r in runs if r["repeat"] in peers and arm != "cleanrl"]
                ratios.append(between([float(r[column]) / float(p[column]) for r, p in pairs], 2) if pairs else "")
            rows.append([case, SPEED_ARMS[arm], between(numbers(runs, "steps_per_second")), *ratios])
            rows[-1].append(between(numbers(runs, "load"), 1))
    header = ["environments x steps", "program", "steps a second", "times CleanRL", "times CleanRL, CPU time", "load"]
    return markdown(header, rows)


def variance_cells(rows: list[dict], arm: str, column: str) -> dict[int, list[float]]:
    """Number of atoms -> a value for each seed."""
    found = [row for row in rows if row["arm"] == arm]
    return {k: numbers([r for r in found if int(r["num_atoms"]) == k], column) for k in atoms(rows)}


def atoms(rows: list[dict]) -> list[int]:
    """The numbers of atoms, in order."""
    return sorted({int(row["num_atoms"]) for row in rows})


def significant(values: list[float]) -> str:
    """Mean with three significant digits, and nothing behind them."""
    if not values:
        return ""
    mean = statistics.mean(values)
    return f"{mean:,.0f}" if mean >= 100 else f"{mean:.3g}" if mean >= 0.001 else f"{mean:.1e}"


def variance_poisson(read: Read) -> str:
    """Variance of the gradient under every policy over atoms, by the number of atoms."""
    found = rows_of(read, "variance_poisson.csv")
    rows = [
        [name, title, *map(significant, variance_cells(found, arm, column).values())]
        for column, name in VARIANCES.items()
        for arm, title in VARIANCE_ARMS.items()
        if found
    ]
    return markdown(["variance", "policy", *(f"K = {k}" for k in atoms(found))], rows)


def variance_poisson_fit(read: Read) -> str:
    """How well the policies of that comparison were matched, and the size of their scores, sampled and exact."""
    found, rows = rows_of(read, "variance_poisson.csv"), []
    columns = ("temperature", "mean_error", "std", "std_error", "kl", "score", "score_exact")
    for k in [k for k in atoms(found) if k in (5, 11, 31)]:
        for arm, title in VARIANCE_ARMS.items():
            runs = [row for row in found if row["arm"] == arm and int(row["num_atoms"]) == k]
            rows.append([k, title, *(significant(numbers(runs, column)) for column in columns)])
    header = ["K", "policy", "temperature", "error of means", "std", "error of std", "KL", "score²", "score², exact"]
    return markdown(header, rows)


TABLES = {
    function.__name__: function
    for function in (
        poisson_start,
        unimodal_poisson_returns,
        unimodal_poisson_shape,
        unimodal_poisson_sweep,
        unimodal_poisson_evaluation,
        unimodal_poisson_cleanrl,
        unimodal_poisson_runs,
        fm3q_equilibrium,
        fm3q_sweep,
        fm3q_pong,
        fm3q_runs,
        arac_learning,
        arac_transfer,
        arac_runs,
        speed_ppo,
        variance_poisson,
        variance_poisson_fit,
    )
}


# --- Figures ----------------------------------------------------------------------------------------------------------


def pyplot():
    """matplotlib, which only the figures need."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def plain(name: str) -> str:
    """A name without the flag in it."""
    return name.partition(" (`")[0]


def draw_curves(
    read: Read,
    folder: Path,
    study: str,
    names: dict[str, str],
    panels: dict[str, str],
    column: str,
    label: str,
    least: float | None = None,
) -> None:
    """A metric against steps: mean over seeds, lowest and highest; a panel for each task with runs. First arm: bold.

    With `least` the scale is logarithmic, what is below it is drawn there, and a mean is that of the last 7 points.
    """
    found = final_runs(read, study, names, panels)
    runs = {row["run"]: key for key, rows in found.items() for row in rows}
    curves: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for row in rows_of(read, f"{study}_curves.csv"):
        if row["run"] in runs and row[column]:
            points = curves.setdefault(runs[row["run"]], {})
            points.setdefault(int(row["step"]), {})[row["run"]] = float(row[column])
    shown = [env for env in panels if any(key[0] == env for key in curves)]
    if not shown:
        return
    figure, axes = pyplot().subplots(1, len(shown), figsize=(max(7, 14 / 3 * len(shown)), 4.6), squeeze=False)
    for axis, env in zip(axes[0], shown):
        for number, (arm, name) in enumerate(names.items()):
            points, seeds = dict(sorted(curves.get((env, arm), {}).items())), len(found.get((env, arm), []))
            points = {step / 1000: list(values.values()) for step, values in points.items() if len(values) == seeds}
            mean, low, high = ([f(values) for values in points.values()] for f in (statistics.mean, min, max))
            if least:
                mean = [max(statistics.mean(mean[max(0, n - 6) : n + 1]), least) for n in range(len(mean))]
            style = {"color": f"C{number}", "linewidth": 2.4 if arm == next(iter(names)) else 1.4}
            axis.plot(list(points), mean, label=plain(name), **style)
            if not least:
                axis.fill_between(list(points), low, high, color=style["color"], alpha=0.1, linewidth=0)
        axis.set(
            title=panels[env], xlabel="thousand environment steps", ylabel=label, yscale="log" if least else "linear"
        )
        axis.grid(alpha=0.3)
    names_shown = axes[0, 0].get_legend_handles_labels()
    columns = max(2, len(shown) + 1)
    figure.legend(*names_shown, loc="lower center", ncol=columns, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.02 + 0.05 * -(-len(names_shown[0]) // columns), 1, 1))
    figure.savefig(folder / f"{study}_learning.png", dpi=110, metadata={"Software": None})


def draw_unimodal_poisson_learning(read: Read, folder: Path) -> None:
    """Returns in training."""
    panels = {env: env for env in TASKS}
    draw_curves(read, folder, "unimodal_poisson", POLICIES, panels, "return", "return in training")


def draw_fm3q_learning(read: Read, folder: Path) -> None:
    """NashConv of the games that are solved exactly; what is below 0.005 is drawn there."""
    label = "NashConv of greedy play, running mean"
    draw_curves(read, folder, "fm3q", FM3Q, FM3Q_GAMES, "nash_conv_mean", label, least=5e-3)


def draw_arac_learning(read: Read, folder: Path) -> None:
    """Success in training with an adaptive weight, a fixed one and no reference."""
    names = {arm: ARAC[arm] for arm in ("dual", "fixed", "none")}
    panels = {env: ARAC_TASKS[env][0] for env in ("cycle_12", "grid_6x6", "confrontation")}
    draw_curves(read, folder, "arac", names, panels, "success", "share of games won in training")


def draw_variance_poisson(read: Read, folder: Path) -> None:
    """Variance of the gradient against the number of atoms: mean over seeds, lowest and highest."""
    rows = rows_of(read, "variance_poisson.csv")
    if not rows:
        return
    figure, axes = pyplot().subplots(1, len(VARIANCES), figsize=(4 * len(VARIANCES), 3.8))
    for axis, (column, title) in zip(axes, VARIANCES.items()):
        shown: list[float] = []
        for arm, name in VARIANCE_ARMS.items():
            points = variance_cells(rows, arm, column)
            mean, low, high = ([f(values) for values in points.values()] for f in (statistics.mean, min, max))
            style = "--" if arm == "poisson_repo" else "-"
            (line,) = axis.plot(list(points), mean, style, marker="o", markersize=3, label=name)
            if arm != "poisson_repo":  # which is not matched, and off the scale
                shown += mean
                axis.fill_between(list(points), low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        limits = 0.5 * min(shown), 2 * max(shown)
        axis.set(xscale="log", yscale="log", xlabel="K, number of atoms", ylim=limits)
        axis.set_xticks(atoms(rows), list(map(str, atoms(rows))))
        axis.minorticks_off()
        axis.set_title(title, fontsize=8)
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncol=len(VARIANCE_ARMS), frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(folder / "variance_poisson.png", dpi=110, metadata={"Software": None})


FIGURES = (draw_unimodal_poisson_learning, draw_fm3q_learning, draw_arac_learning, draw_variance_poisson)
