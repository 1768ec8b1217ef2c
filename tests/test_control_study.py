"""The program that runs the control family's comparisons, what its CSVs must say, and tables of unfinished studies."""

import importlib
import shlex
from dataclasses import replace

import pytest
import tyro

from benchmarks import control, tables_control

STUDIES = control.STUDIES


def script_of(study: str):
    return importlib.import_module(STUDIES[study].script.removesuffix(".py").replace("/", "."))


@pytest.mark.parametrize("study", STUDIES)
def test_flags_of_a_study_are_those_of_its_script(study):
    made, script = STUDIES[study], script_of(study)
    for stage, env, name in [(s, e, a) for s in ("sweep", "final") for e in made.tasks for a in made.arms]:
        arm, task = made.arms[name], made.tasks[env]
        job = control.Job(stage, name, env, 3, task.rate or arm.rate or made.rates[0], 10_000)
        program, *flags = control.words(made, job, "")
        args = tyro.cli(script.Args, args=flags)
        assert program == made.script and args.seed == 3 and args.total_timesteps == 10_000
        assert args.learning_rate == float(job.rate)
        script.check_args(args)


@pytest.mark.parametrize("study", STUDIES)
def test_runs_of_a_study(study):
    """Seed by seed, late ones last; no run twice; every arm on the tasks that name it, and no other."""
    made, args = STUDIES[study], control.Args(study=study, results="none")
    arms = {name: replace(arm, rate=arm.rate or "1e-3") for name, arm in made.arms.items()}
    jobs = control.final_jobs(args, replace(made, arms=arms), list(arms))
    late = [made.arms[job.arm].late or made.tasks[job.env].late for job in jobs]
    assert late == sorted(late) and len({job.name for job in jobs}) == len(jobs)
    for part in (False, True):
        seeds = [job.seed for job, last in zip(jobs, late) if last == part]
        assert seeds == sorted(seeds)
    for env, task in made.tasks.items():
        found = {job.arm for job in jobs if job.env == env}
        assert found == (made.arms.keys() if task.seeds is None else task.seeds.keys())


def test_rows_of_a_study_that_has_begun_stay_as_they_are():
    """Names of runs and commands of unimodal_poisson: its CSV is continued, not begun anew."""
    study = STUDIES["unimodal_poisson"]
    rows = control.read(control.ROOT / "benchmarks/results/unimodal_poisson_runs.csv")
    assert rows
    for row in rows:
        steps = int(row["command"].split("--total-timesteps ")[1].split()[0])
        job = control.Job(row["stage"], row["policy"], row["env"], int(row["seed"]), row["learning_rate"], steps)
        extra = "--compile" * row["command"].endswith(" --compile")  # later runs, the same method a fifth faster
        assert job.name == row["run"] and f"python {shlex.join(control.words(study, job, extra))}" == row["command"]


@pytest.mark.parametrize(
    "study", [name for name in STUDIES if (control.ROOT / f"benchmarks/results/{name}_runs.csv").exists()]
)
def test_every_run_says_how_it_was_made(study):
    for row in control.read(control.ROOT / f"benchmarks/results/{study}_runs.csv"):
        assert list(row) == STUDIES[study].columns
        needed = ("command", "commit", "seed", *STUDIES[study].packages, "device", "minutes")
        assert all(row[name] for name in needed) and any(row[name] for name in STUDIES[study].scores), row["run"]
        assert f"--learning-rate {row['learning_rate']}" in row["command"] and f"--seed {row['seed']}" in row["command"]


def rows(tag: str, values: dict[int, float]) -> list[dict]:
    return [{"step": str(step), "tag": tag, "value": str(value)} for step, value in values.items()]


def test_tail_curves_and_settled():
    """tail: the mean over the last share of the steps, the last value if there is none. curves: means of bins of a
    fiftieth. settled: the first step below the level after the last one that was not."""
    metrics = rows("a", {10: 1.0, 90: 2.0, 95: 4.0, 100: 6.0}) + rows("b", {20: 7.0})
    assert control.tail(metrics, "a", 0.1) == 5.0 and control.tail(metrics, "a", 0.2) == 4.0
    assert control.tail(metrics, "b", 0.1) == 7.0 and control.tail(metrics, "c", 0.1) is None
    metrics = rows("a", {1: 1.0, 2: 3.0, 50: 4.0, 100: 8.0}) + rows("b", {3: 9.0})
    expected = [(2, 2.0, None), (4, None, 9.0), (50, 4.0, None), (100, 8.0, None)]
    found = control.curves(metrics, {"x": "a", "y": "b"})
    assert [(row["step"], row["x"], row["y"]) for row in found] == expected
    cases = [({0: 0.01, 5: 0.2, 9: 0.04, 20: 0.01}, 9, 0), ({0: 0.01, 9: 0.05}, None, 0), ({}, None, None)]
    for values, last, first in cases:
        assert control.settled(rows("a", values), "a", 0.05, 0.1) == last
        assert control.reached(rows("a", values), "a", 0.05, 0.1) == first


def scores(study: str, metrics: list[dict]) -> dict[str, float | None]:
    return {name: score(metrics, share=0.1) for name, score in STUDIES[study].scores.items()}


def test_scores_of_fm3q():
    """Of a game that is solved exactly, and of pong."""
    metrics = rows("eval/nash_conv_max", {0: 4.0, 50: 0.04, 100: 0.02}) + rows(
        "eval/nash_conv_mean", {0: 2.0, 100: 0.01}
    )
    solved = {name: value for name, value in scores("fm3q", metrics).items() if value is not None}
    expected = {"samples_to_equilibrium": 50, "samples_to_first": 50, "late_nash_conv": 0.01}
    assert solved == expected | {"nash_conv_max": 0.02, "nash_conv_mean": 0.01}
    metrics = rows("eval/exploitability", {100: 0.5})
    for tag, value in {"tracker/left/win": 0.5, "tracker/right/win": 1.0, "wanderer/left/win": 0.25}.items():
        metrics += rows(f"eval/{tag}", {0: 0.0, 100: value})
    pong = {name: value for name, value in scores("fm3q", metrics).items() if value is not None}
    assert pong == {"win_tracker": 0.75, "exploitability": 0.5}, "one side alone is no score"


@pytest.mark.parametrize("lowest, chosen", [(False, "1e-3"), (True, "3e-4")])
def test_the_sweep_chooses_by_the_score_of_its_study(lowest, chosen, monkeypatch):
    found = [
        {"policy": "iql", "stage": "sweep", "learning_rate": rate, "x": x}
        for rate, x in (("3e-4", "0.5"), ("1e-3", "9"), ("3e-3", ""))
    ]
    monkeypatch.setattr(control, "read", lambda path: found)
    study = replace(STUDIES["fm3q"], best="x", lowest=lowest)
    assert control.learning_rate(control.Args(study="fm3q"), study, "iql") == chosen
    assert control.learning_rate(control.Args(study="fm3q"), study, "vdn") == "", "its sweep has not run"


# --- Tables of a study that is not finished -----------------------------------------------------------------------


def test_tables_name_what_the_studies_run():
    fm3q, arac = STUDIES["fm3q"], STUDIES["arac"]
    assert list(tables_control.FM3Q) == list(fm3q.arms) and list(tables_control.ARAC) == list(arac.arms)
    assert [*tables_control.FM3Q_GAMES, "pong"] == list(fm3q.tasks)
    assert set(tables_control.FM3Q_PONG) == fm3q.tasks["pong"].seeds.keys()
    arms = {env: set(arms) for env, (_, arms) in tables_control.ARAC_TASKS.items()}
    assert arms == {env: set(task.seeds) for env, task in arac.tasks.items()}


def unfinished(study: str, stage: str, runs: list[dict], curves: list[dict]):
    """A reader of the CSVs of a study: these rows, every other column filled."""
    made = STUDIES[study]
    empty = dict.fromkeys(made.columns, "1") | dict.fromkeys(made.scores, "") | {"stage": stage}
    found = {f"{study}_runs.csv": [empty | row for row in runs]}
    found[f"{study}_curves.csv"] = [dict.fromkeys(made.tags, "") | row for row in curves]

    def read(name: str) -> list[dict]:
        if name not in found:
            raise FileNotFoundError(name)
        return found[name]

    return read


def cells(text: str, *names: str) -> list[str]:
    """Cells of the one row of a table that begins so."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {' | '.join(names)} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][len(names) :]


def test_tables_of_fm3q_with_some_runs(tmp_path):
    score = {"policy": "vdn", "env": "arat", "learning_rate": "1e-3", "nash_conv_mean": "0.01", "nash_conv_max": "0.02"}
    runs = [score | {"run": str(n), "samples_to_equilibrium": x} for n, x in enumerate(("1000", "3000", ""))]
    runs = [row | {"samples_to_first": "800", "late_nash_conv": "0.03"} for row in runs]
    curves = [{"run": str(n), "step": str(step), "nash_conv_mean": "0"} for n in range(3) for step in (0, 800)]
    read, vdn = unfinished("fm3q", "final", runs, curves), tables_control.FM3Q["vdn"]
    table, small, large = tables_control.fm3q_equilibrium(read), *tables_control.FM3Q_GAMES.values()
    expected = ["1e-3", "3", "800 ± 0 (3 of 3)", "2000 ± 1414 (2 of 3)"]
    expected += [f"{x} ± 0.000" for x in ("0.030", "0.010", "0.020")]
    assert cells(table, small, vdn) == expected
    assert cells(table, small, tables_control.FM3Q["iql"]) == ["", "0", *["not run"] * 5]
    assert large not in table and tables_control.fm3q_pong(read) == "", "games that have not begun are left out"
    tables_control.draw_fm3q_learning(read, tmp_path)
    assert (tmp_path / "fm3q_learning.png").stat().st_size > 5_000
