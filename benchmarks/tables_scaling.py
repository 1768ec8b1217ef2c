"""Tables of benchmarks/speed.md and tables and the figure of benchmarks/scale.md; make_tables.py draws them.

Every function takes `read`, which returns the rows of a CSV in benchmarks/results or raises FileNotFoundError. A table
without its CSV is the empty text. The limit beside a ratio is a measurement too: of the bare simulator, of stepping
without learning, or of a matrix product.
"""

import statistics
from pathlib import Path
from types import SimpleNamespace

from benchmarks.memory import SPARE, memory_model, parameters
from benchmarks.scaling import CPU_MODELS
from benchmarks.speed_ppo import GOALS as PPO_GOALS
from benchmarks.tables_control import SPEED_ARMS, Read, markdown, numbers, pyplot, rows_of

GRPO_CASES = {  # case: in words, and completions of a step
    "A": ("short, even completions, 64 x 8", 512),
    "B": ("long-tailed completions, 64 x 8", 512),
    "C": ("long-tailed completions, 8 x 8", 64),
    "D": ("prompts of about 150 tokens, 8 x 8", 64),
}
GRPO_ARMS = {"shipped": "as shipped", "all rows": "every row computed"}
GRPO_GOALS = {  # of the rows of speed_grpo.csv
    ("A", "shipped"): 2.0,
    ("A", "all rows"): 1.5,
    ("B", "shipped"): 2.5,
    ("B", "all rows"): 1.7,
    ("C", "shipped"): 1.8,
    ("C", "all rows"): 1.5,
    ("D", "all rows"): 3.5,
}
MARL_GOAL, MARL_OWN = 10, {"vdn": "5", "qmix": "20"}  # of speed_marl.py: at CleanMARL's own steps for each update
AXES = {  # (script, axis): label of the axis
    ("grpo.py", "prompts"): "prompts a step",
    ("grpo.py", "group"): "completions of each",
    ("grpo.py", "length"): "tokens of each",
    ("grpo.py", "size"): "parameters",
    ("dr_mas.py", "models"): "models of a team",
    ("dr_mas.py", "calls"): "calls an episode",
    ("fm3q.py", "agents"): "FM3Q: agents",
    ("arac.py", "agents"): "ARAC: agents",
    ("unimodal_poisson.py", "num_envs"): "PPO: environments",
    ("fm3q.py", "num_envs"): "FM3Q: games at once",
    ("arac.py", "num_envs"): "ARAC: games at once",
    ("arac.py", "nodes"): "ARAC: nodes of the graph",
}


def between(values: list[float]) -> str:
    """Median, lowest and highest of ratios."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})" if values else ""


def verdict(ratio: float, goal: float | None) -> str:
    """A goal and whether it was reached."""
    return f"{goal:g}: {'reached' if ratio >= goal else '**missed**'}" if goal else ""


def matmul_flops(read: Read, device: str = "cpu") -> float | None:
    """Floating-point operations a second of the fastest matrix product; None if there is none."""
    rows = [row for row in rows_of(read, "scaling.csv") if row["script"] == "torch.matmul" and row["on"] == device]
    return max(numbers(rows, "flops_per_second"), default=None)


# --- Speed next to others ---------------------------------------------------------------------------------------------


def grpo_rows(read: Read) -> list[list]:
    """GRPO against TRL, the goals, and the time that the matrix products of the completions would take by themselves:
    2 operations a parameter and token in the rollout, 6 in the update for the rows that are trained."""
    rows, flops, size = [], matmul_flops(read), parameters(CPU_MODELS["0.8M"])
    for row in rows_of(read, "speed_grpo.csv"):
        case, arm = row["case"], row["arm"]
        if arm not in GRPO_ARMS:
            continue
        name, completions = GRPO_CASES[case]
        ratio = f"{float(row['ratio_median']):.2f} ({float(row['ratio_min']):.2f} to {float(row['ratio_max']):.2f})"
        trained = 1 - float(row["zero_share"]) if arm == "shipped" else 1.0
        cells = ["", "", ""]
        if flops:
            least = 1000 * completions * float(row["mean_length"]) * size * (2 + 6 * trained) / flops
            shares = [f"{100 * least / float(row[f'{side}_ms']):.0f}" for side in ("ours", "peer")]
            cells = [f"{least:.0f}", *shares]
        goal = verdict(float(row["ratio_median"]), GRPO_GOALS.get((case, arm)))
        times = [f"{float(row[f'{side}_ms']):,.0f}" for side in ("peer", "ours")]
        rows.append([name, GRPO_ARMS[arm], ratio, goal, *times, *cells])
    return rows


def ppo_rows(read: Read) -> list[list]:
    """PPO against CleanRL, in CPU time, and what would be left if learning cost nothing."""
    found, rows = rows_of(read, "speed_ppo.csv"), []
    for case in dict.fromkeys(row["case"] for row in found):
        speeds: dict[str, dict[str, float]] = {}
        for arm in SPEED_ARMS:
            here = [row for row in found if (row["case"], row["arm"]) == (case, arm)]
            speeds[arm] = {row["repeat"]: float(row["steps_per_cpu_second"]) for row in here}
        peers = speeds["cleanrl"]
        for arm, runs in speeds.items():
            if not runs:
                continue
            ratios = [value / peers[repeat] for repeat, value in runs.items() if repeat in peers]
            cells = [between(ratios) if arm != "cleanrl" else "", ""]
            if arm == "gaussian" and case in PPO_GOALS and ratios:
                goal, floor = (verdict(statistics.median(ratios), x) for x in PPO_GOALS[case])
                cells[1] = f"{goal}; floor {floor}"
            bare = speeds["simulator"]
            shares = [100 * value / bare[repeat] for repeat, value in runs.items() if repeat in bare]
            share = between(shares) if arm not in ("simulator", "mj_step") else ""
            rows.append([case, SPEED_ARMS[arm], f"{statistics.median(runs.values()):,.0f}", *cells, share])
    return rows


def marl_rows(read: Read) -> list[list]:
    """Two teams against CleanMARL, in CPU time; `without learning` is the limit of a ratio."""
    found, rows = rows_of(read, "speed_marl.csv"), []

    def speeds(mixer: str, every: str, batch: str, side: str, games: str) -> dict[str, float]:
        key = (mixer, every, batch, side, games)
        here = [r for r in found if (r["mixer"], r["every"], r["batch"], r["side"], r["games"]) == key]
        return {row["repeat"]: float(row["steps_per_cpu_second"]) for row in here}

    arms = dict.fromkeys((r["mixer"], r["every"], r["batch"]) for r in found)
    for mixer, every, batch in sorted(arms, key=lambda arm: (arm[0] != "vdn", int(arm[1] or 0), int(arm[2] or 0))):
        peers = speeds(mixer, every, batch, "cleanmarl", "1")
        work = f"{batch} transitions every {every} steps" if every else "acting and stepping alone"
        games = {row["games"] for row in found if (row["mixer"], row["every"], row["batch"]) == (mixer, every, batch)}
        for count in sorted(games, key=int):
            runs, bare = speeds(mixer, every, batch, "fm3q", count), speeds(mixer, "", "", "fm3q", count)
            ratios = [value / peers[repeat] for repeat, value in runs.items() if repeat in peers]
            limits = [value / peers[repeat] for repeat, value in bare.items() if repeat in peers]
            if not ratios:
                continue
            goal = MARL_GOAL if every == MARL_OWN[mixer] else None
            cells = [between(ratios), verdict(statistics.median(ratios), goal), between(limits) if every else ""]
            rows.append([f"`{mixer}.py`", work, count, f"{statistics.median(runs.values()):,.0f}", *cells])
    return rows


def limit_grpo(read: Read) -> str:
    """GRPO against TRL."""
    header = ["case", "arm", "times as fast as TRL", "goal", "TRL, ms", "ours, ms", "matrix products alone, ms"]
    return markdown([*header, "of our time, %", "of TRL's time, %"], grpo_rows(read))


def limit_ppo(read: Read) -> str:
    """PPO against CleanRL."""
    header = ["environments x steps", "program", "steps a CPU second", "times CleanRL", "goal"]
    return markdown([*header, "of the bare simulator's speed, %"], ppo_rows(read))


def limit_marl(read: Read) -> str:
    """Two teams against CleanMARL."""
    header = ["CleanMARL's program", "work", "games", "steps a CPU second", "times CleanMARL", "goal"]
    return markdown([*header, "times CleanMARL if learning were free"], marl_rows(read))


def limit_goals(read: Read) -> str:
    """Everything that has a goal."""
    rows = [["GRPO, TRL 1.16", f"{case}, {arm}", ratio, goal] for case, arm, ratio, goal, *_ in grpo_rows(read)]
    rows += [["PPO, CleanRL", f"{case}, {arm}", ratio, goal] for case, arm, _, ratio, goal, *_ in ppo_rows(read)]
    for program, work, games, _, ratio, goal, _ in marl_rows(read):
        rows.append([f"two teams, CleanMARL's {program}", f"{work}, games at once: {games}", ratio, goal])
    return markdown(["what, next to", "case", "times as fast", "goal"], [row for row in rows if row[-1]])


# --- How cost grows ---------------------------------------------------------------------------------------------------


def points(read: Read, script: str, axis: str) -> list[dict]:
    """Rows of an axis on the CPU, by its number."""
    rows = [r for r in rows_of(read, "scaling.csv") if (r["script"], r["axis"], r["on"]) == (script, axis, "cpu")]
    return sorted(rows, key=number)


def shown(rows: list[dict]) -> list[dict]:
    """The first, middle and last point of an axis, for a table; the figure has all."""
    return [rows[i] for i in sorted({0, len(rows) // 2, len(rows) - 1})] if rows else []


def number(row: dict) -> float:
    """Where a row stands on its axis: the value, or the number of parameters for a model's name."""
    return float(row["parameters"] if row["axis"] == "size" else row["value"])


def rounded(row: dict, column: str, scale: float = 1.0) -> str:
    """Three digits."""
    value = float(row[column]) * scale if row[column] else 0.0
    return "" if not row[column] else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def scaling_language(read: Read) -> str:
    """Cost of a step of the language scripts."""
    flops, rows = matmul_flops(read), []
    for (script, axis), label in AXES.items():
        for row in shown(points(read, script, axis)) if script in ("grpo.py", "dr_mas.py") else []:
            cells = [rounded(row, f"{name}_tokens_per_second") for name in ("rollout", "update")]
            share = f"{100 * float(row['flops_per_second']) / flops:.0f}" if flops else ""
            cells = [rounded(row, "tokens"), rounded(row, "step_seconds"), *cells]
            rows.append([f"`{script}`", f"{label}: {row['value']}", *cells, rounded(row, "peak_memory_gb"), share])
    header = ["script", "point", "tokens a step", "seconds a step", "rollout, tokens/s", "update, tokens/s"]
    return markdown([*header, "peak memory, GB", "of a matrix product's speed, %"], rows)


def scaling_control(read: Read) -> str:
    """Cost of a step of the control scripts."""
    rows = []
    for (script, axis), label in AXES.items():
        for row in shown(points(read, script, axis)) if script not in ("grpo.py", "dr_mas.py") else []:
            cells = [rounded(row, name) for name in ("steps_per_second", "updates_per_second", "peak_memory_gb")]
            rows.append([f"`{script}`", f"{label.partition(': ')[2]}: {row['value']}", *cells])
    header = ["script", "point", "environment steps a second", "gradient steps a second", "peak memory, GB"]
    return markdown(header, rows)


def scaling_runs(read: Read) -> str:
    """Cost and circumstances of the measurement itself, a sentence."""
    found = rows_of(read, "scaling.csv")
    if not found:
        return ""
    packages = ("torch", "transformers", "gymnasium", "numpy")
    versions = {", ".join(f"{name} {r[name]}" for name in packages) + f", Python {r['python']}" for r in found}
    devices = {f"{r['device']}, {r['threads']} thread" for r in found}
    commits = {r["commit"] for r in found}
    text = f"{len(found)} points in {sum(numbers(found, 'minutes')):.0f} minutes on {'; '.join(sorted(devices))}"
    text += f" (load of the machine before a point: at most {max(numbers(found, 'load')):.1f})"
    if flops := matmul_flops(read):
        text += f", whose float32 matrix product makes {flops / 1e9:.0f} · 10⁹ operations a second"
    return f"{text}; {'; '.join(sorted(versions))}; commit {', '.join(sorted(commits))}."


# --- Memory -----------------------------------------------------------------------------------------------------------


def memory_counted(read: Read) -> str:
    """Bytes of one update, counted and computed: models in columns, flags in rows."""
    rows = [row for row in rows_of(read, "memory.csv") if row["lengths"] == "512 512 8"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    cells: dict[tuple, dict[str, str]] = {}
    for row in rows:
        numbers = f"{float(row['counted_gb']):.1f}, {float(row['computed_gb']):.1f}"
        cells.setdefault((row["gpus"], row["flags"]), {})[row["model"]] = numbers
    found = []
    for (gpus, flags), by_model in cells.items():
        label = f"`{flags}`" if flags else "none of these"
        found.append([gpus, label, *(by_model.get(model, "") for model in models)])
    return markdown(["GPUs", "flags", *models], found)


def memory_added(read: Read) -> str:
    """How far the model is off, of the whole and of what the update adds."""
    rows = rows_of(read, "memory.csv")
    if not rows:
        return ""
    ranges = []
    for part in ("", "added_"):
        ratios = [float(row[f"computed_{part}gb"]) / float(row[f"counted_{part}gb"]) for row in rows]
        ranges.append(f"{min(ratios):.3f} to {max(ratios):.3f}")
    return f"Computed divided by counted: {ranges[0]}; of what comes on top of weights, moments, gradients and copies, {ranges[1]}."


FIT_MODELS = ("Qwen2.5-0.5B-Instruct", "Qwen2.5-1.5B-Instruct", "Qwen2.5-3B-Instruct", "Qwen3-4B", "Qwen2.5-7B-Instruct")
FIT_FLAGS = {  # label: --gradient-checkpointing, --micro-batch-size, --decode-batch-size
    "none": (False, 8, 128),
    "checkpointing": (True, 8, 128),
    "checkpointing, small batches": (True, 1, 32),
}


def memory_fit(read: Read) -> str:
    """GB a GPU of grpo.py with --bf16, and the smallest of three GPUs on which it fits."""
    if not rows_of(read, "memory.csv"):
        return ""
    rows = []
    for name in FIT_MODELS:
        for label, (checkpointing, micro, decode) in FIT_FLAGS.items():
            cells = []
            for gpus in (1, 8):
                flags = SimpleNamespace(bf16=True, beta=0.0, eval_steps=25, num_generations=8, fsdp=gpus > 1)
                flags.max_prompt_length, flags.max_completion_length = 512, 1024
                flags.micro_batch_size, flags.decode_batch_size = micro, decode
                flags.gradient_checkpointing = checkpointing
                peak = memory_model(name, flags, gpus)["peak"]
                sizes = [size for size in (24, 40, 80) if peak <= (1 - SPARE) * size]
                cells.append(f"{peak:.1f}: {f'{sizes[0]} GB' if sizes else '**none**'}")
            rows.append([name, label, *cells])
    return markdown(["model", "flags", "one GPU", "eight GPUs, `--fsdp`"], rows)


def scaling_figure(read: Read) -> str:
    """The picture, once there is something on it."""
    return "![Speed and memory along every axis](results/scaling.png)" if rows_of(read, "scaling.csv") else ""


TABLES = {
    function.__name__: function
    for function in (
        limit_goals,
        limit_grpo,
        limit_ppo,
        limit_marl,
        scaling_language,
        scaling_control,
        scaling_runs,
        scaling_figure,
        memory_counted,
        memory_added,
        memory_fit,
    )
}


# --- Figure -----------------------------------------------------------------------------------------------------------


def draw_scaling(read: Read, folder: Path) -> None:
    """Small multiples: for each axis speed above and peak memory below it, all scales logarithmic."""
    if not rows_of(read, "scaling.csv"):
        return
    language = {"rollout_tokens_per_second": "rollout", "update_tokens_per_second": "update"}
    control = {"steps_per_second": "environment steps", "updates_per_second": "gradient steps"}
    keys = list(AXES)
    figure, axes = pyplot().subplots(
        6, 4, figsize=(8.6, 10.5), gridspec_kw={"height_ratios": [3, 2] * 3}, layout="constrained"
    )
    shown = {}
    for place, (script, axis) in enumerate(keys):
        row, column = 2 * (place // 4), place % 4
        lines, found = (language if script in ("grpo.py", "dr_mas.py") else control), points(read, script, axis)
        speed, memory = axes[row, column], axes[row + 1, column]
        if not found:  # a CSV that is not complete yet
            speed.set_axis_off()
            memory.set_axis_off()
            continue
        colours = ("C0", "C1") if lines is language else ("C2", "C3")
        for (name, label), colour in zip(lines.items(), colours):
            xs = [number(r) for r in found if r[name]]
            style = {"color": colour, "markersize": 3, "linewidth": 1.4}
            (shown[label],) = speed.plot(xs, numbers(found, name), "o-", **style)
        memory.plot([number(r) for r in found], numbers(found, "peak_memory_gb"), "ks-", markersize=3, linewidth=1.4)
        for panel in (speed, memory):
            panel.set(xscale="log", yscale="log")
            panel.grid(alpha=0.3)
            panel.tick_params(labelsize=7)
            if axis != "size":
                panel.set_xticks([number(r) for r in found], [r["value"] for r in found])
                panel.xaxis.set_minor_formatter("")
                panel.tick_params(axis="x", which="minor", length=0)
            plain_ticks(panel)
        speed.tick_params(labelbottom=False)
        memory.set_xlabel(AXES[script, axis], fontsize=8)
        if column == 0 or (column == 2 and row == 2):  # where the unit changes
            speed.set_ylabel("tokens a second" if lines is language else "steps a second", fontsize=8)
        if column == 0:
            memory.set_ylabel("peak memory, GB", fontsize=8)
    options = {"frameon": False, "fontsize": 8, "ncol": len(shown)}
    figure.legend(list(shown.values()), list(shown), loc="outside upper center", **options)
    figure.savefig(folder / "scaling.png", dpi=100, metadata={"Software": None})


def plain_ticks(axis) -> None:
    """Numbers such as 0.5 and 3,000 on a logarithmic scale, which spans at least a factor of two."""
    low, high = axis.get_ylim()
    middle = (low * high) ** 0.5
    low, high = min(low, middle / 2**0.5), max(high, middle * 2**0.5)
    ticks = [digit * 10.0**power for power in range(-2, 8) for digit in range(1, 10)]
    ticks = [x for x in ticks if low <= x <= high]
    if len(ticks) > 5:
        ticks = [x for x in ticks if f"{x:e}"[0] in "1235"]
    if len(ticks) > 5:
        ticks = [x for x in ticks if f"{x:e}"[0] == "1"] if high / low > 1000 else ticks[:: -(-len(ticks) // 5)]
    axis.set_ylim(low, high)
    axis.set_yticks(ticks, [f"{x:,.0f}" if x >= 1 else f"{x:g}" for x in ticks])
    axis.yaxis.set_minor_formatter("")
    axis.tick_params(axis="y", which="minor", length=0)


FIGURES = (draw_scaling,)
