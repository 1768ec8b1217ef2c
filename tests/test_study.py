"""benchmarks/study.py: its rows, its sweeps, and that it continues where it was stopped."""

import importlib
import math
import shlex
import subprocess
from types import SimpleNamespace

import pandas as pd
import pytest
import tyro
from processes import ROOT, fork

from benchmarks import study
from benchmarks.studies import Arm, Study
from benchmarks.study import Args, Run
from benchmarks.sweep_problems import SweepQuestions, SweepThreeHops
from envs.search_qa import SearchQA

RATES = ("1e-4", "1e-3", "1e-2", "1e-1", "1")


@pytest.fixture
def sweep_of(tmp_path, monkeypatch):
    """A function from scores by rate to the rates that are tried, and the one that is chosen."""
    monkeypatch.setitem(study.STUDIES, "try", Study("", {"a": Arm("", RATES, "1e-2")}, best="score"))
    args = Args("try", results=str(tmp_path))
    tried = []

    def sweep(scores: dict[str, float]) -> tuple[list[str], str]:
        def train(args, run):
            if scores.get(run.learning_rate, 0) is not None and not study.is_done(study.finished(args), run):
                tried.append(run.learning_rate)
                row = {"task": run.task, "arm": run.arm, "seed": run.seed}
                row |= {"learning_rate": run.learning_rate, "score": scores[run.learning_rate]}
                study.append(tmp_path / "try.csv", pd.DataFrame([row]))

        monkeypatch.setattr(study, "train", train)
        return tried, study.sweep(args, "", "a")

    return sweep


def test_a_sweep_widens_at_its_edge_and_continues(sweep_of):
    scores = {"1e-3": 1, "1e-2": 2, "1e-1": 3, "1": 2}
    assert sweep_of(scores) == (["1e-3", "1e-2", "1e-1", "1"], "1e-1")
    assert sweep_of({}) == (["1e-3", "1e-2", "1e-1", "1"], "1e-1")  # nothing runs twice


def test_a_sweep_with_a_failed_run_chooses_nothing(sweep_of):
    with pytest.raises(SystemExit, match="a: no run at 1e-1"):
        sweep_of({"1e-3": 1, "1e-2": 2, "1e-1": None})


def test_a_sweep_ends_with_its_ladder(sweep_of):
    tried, best = sweep_of({"1e-4": 9, "1e-3": 3, "1e-2": 2, "1e-1": 1})
    assert (sorted(tried), best) == (["1e-1", "1e-2", "1e-3", "1e-4"], "1e-4")


@pytest.mark.parametrize(
    ("which", "value"),
    [("first", 1), ("last", 4), ("early", 1), ("late", 3.5), ("first 2", 5), ("last 10", 4.25), ("at 50", 9), ("below 4", 95)],
)
def test_score(which, value):
    rows = [(0, "x", 1.0), (50, "x", 9.0), (95, "x", 3.0), (100, "x", 4.0), (100, "y", 7.0)]
    metrics = pd.DataFrame(rows, columns=["step", "tag", "value"])
    assert study.score(metrics[metrics.step > 0] if which == "below 4" else metrics, "x", which) == value
    assert math.isnan(study.score(metrics, "z", which)) or which == "below 4"


def test_first_step_that_reaches_a_score():
    """Means of five values: 2, 3 and 4 at steps 5, 6 and 7."""
    metrics = pd.DataFrame({"step": range(1, 8), "tag": "x", "value": [0, 1, 2, 3, 4, 5, 6]})
    assert study.score(metrics, "x", "reach 3") == 6


@pytest.fixture
def forked(monkeypatch):
    run_forked = lambda words, **_: fork(ROOT / words[1], *words[2:])  # noqa: E731
    monkeypatch.setattr(study, "subprocess", SimpleNamespace(**vars(subprocess) | {"run": run_forked}))


def test_a_run_and_its_row(tmp_path, forked):
    """A short run of a real arm; a second start finds its row."""
    args = Args("fm3q_games", ("iql",), results=str(tmp_path), jobs=1)
    args.extra = "--total-timesteps 2000 --num-states 3 --learning-starts 1000"
    run = Run("arat_random", "iql", 2, "3e-3")
    study.train(args, run)
    study.train(args, run)
    rows = study.finished(args)
    assert len(rows) == 1 and study.is_done(rows, run)
    assert float(rows.nash_conv[0]) > 0 and "--game-seed 2" in rows.command[0]
    curves = pd.read_csv(tmp_path / "fm3q_games_curves.csv")
    assert set(curves.tag) == {"eval/nash_conv_mean"}


def test_the_cheapest_claim_again(tmp_path, forked, capsys):
    """Two seeds of each side, cut short; their differences stand beside those of the committed runs."""
    args = Args(repeat=1, seeds=(2, 3), results=str(tmp_path), jobs=1)
    args.extra = "--total-timesteps 2000 --num-states 3 --learning-starts 1000"
    study.repeat(args)
    told = capsys.readouterr().out.splitlines()
    rows = pd.read_csv(tmp_path / "fm3q_games.csv")
    arms = ("qmix_quiet", "selfplay_qmix_quiet")
    assert sorted(zip(rows.arm, rows.seed)) == [(arm, seed) for arm in arms for seed in (2, 3)]
    sides = rows.set_index(["arm", "seed"]).late_nash_conv
    assert told[-1].startswith(f"  again  {(sides[arms[0]] - sides[arms[1]]).mean():.4g} (- to -): values shown")
    assert told[0].startswith("fm3q_games_quiet: ") and told[-2].startswith("  before ")
    with pytest.raises(SystemExit, match="--repeat: give --results"):
        study.repeat(Args(repeat=1))


def test_every_command_of_every_study_parses():
    """The scripts know the flags of all arms on all tasks."""
    for name in study.STUDIES:
        for task, arm in study.chosen(Args(name)):
            script, *flags = shlex.split(study.command_of(name, Run(task, arm, 1)))
            module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
            tyro.cli(module.Args, args=flags)


@pytest.mark.parametrize(("sweep", "hops"), [(SweepQuestions, (1, 2)), (SweepThreeHops, (3,))])
def test_a_sweep_has_questions_of_its_own(sweep, hops):
    """None of them is among those of the final runs, and they need as many hops."""
    tried, final = sweep().evaluation_problems(64), SearchQA(hops=hops).evaluation_problems(64)
    assert len({problem.question for problem in tried + final}) == 128
    assert {problem.hops for problem in tried} == set(hops)
