"""The program that runs the control family's comparisons, and what its CSVs must say."""

import importlib

import pytest
import tyro

from benchmarks import control

STUDIES = control.STUDIES


def script_of(study: str):
    return importlib.import_module(STUDIES[study].script.removesuffix(".py").replace("/", "."))


@pytest.mark.parametrize("study", STUDIES)
def test_flags_of_a_study_are_those_of_its_script(study):
    made, script = STUDIES[study], script_of(study)
    for name, arm in made.arms.items():
        job = control.Job("final", name, next(iter(made.tasks)), 3, arm.rate or made.rates[0], 10_000)
        program, *flags = control.words(made, job, "")
        args = tyro.cli(script.Args, args=flags)
        assert program == made.script and args.seed == 3 and args.total_timesteps == 10_000
        script.check_args(args)


def test_every_head_is_compared():
    """All policies of the script but the variant of the Gaussian, each on the same tasks and rates."""
    arms = STUDIES["unimodal_poisson"].arms
    flags = {arm.flags[1] for arm in arms.values()}
    policies = script_of("unimodal_poisson").Args.__annotations__["policy"].__args__
    assert flags == set(policies) - {"tanh_gaussian"}
    assert all(not arm.rate and arm.seeds == (1, 2, 3, 4, 5) for name, arm in arms.items() if not arm.late)


@pytest.mark.parametrize(
    "study", [name for name in STUDIES if (control.ROOT / f"benchmarks/results/{name}_runs.csv").exists()]
)
def test_every_run_says_how_it_was_made(study):
    for row in control.read(control.ROOT / f"benchmarks/results/{study}_runs.csv"):
        assert list(row) == control.COLUMNS
        needed = ("command", "commit", "seed", "torch", "gymnasium", "mujoco", "device", "minutes", "train_return")
        assert all(row[name] for name in needed), row["run"]
        assert f"--learning-rate {row['learning_rate']}" in row["command"] and f"--seed {row['seed']}" in row["command"]


def rows(tag: str, values: dict[int, float]) -> list[dict]:
    return [{"step": str(step), "tag": tag, "value": str(value)} for step, value in values.items()]


def test_tail_of_a_metric():
    """The mean over the last share of the steps; the last value if there is none; None if it was never logged."""
    metrics = rows("a", {10: 1.0, 90: 2.0, 95: 4.0, 100: 6.0}) + rows("b", {20: 7.0})
    assert control.tail(metrics, "a", 0.1) == 5.0 and control.tail(metrics, "a", 0.2) == 4.0
    assert control.tail(metrics, "b", 0.1) == 7.0 and control.tail(metrics, "c", 0.1) is None


def test_curves_are_means_of_bins():
    """Bins are a fiftieth of the run; a metric that is missing in a bin is None there."""
    metrics = rows("a", {1: 1.0, 2: 3.0, 50: 4.0, 100: 8.0}) + rows("b", {3: 9.0})
    found = control.curves(metrics, {"x": "a", "y": "b"})
    expected = [(2, 2.0, None), (4, None, 9.0), (50, 4.0, None), (100, 8.0, None)]
    assert [(row["step"], row["x"], row["y"]) for row in found] == expected
