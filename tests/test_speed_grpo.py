"""The program that compares grpo.py with TRL and with older versions of itself, everything tiny."""

import csv
import subprocess

import pytest
from processes import run

from algorithms import grpo
from benchmarks import speed_grpo
from benchmarks.speed_grpo import ROOT, Args

OLD = "bcac39c"  # the last grpo.py with the functions of OldScript
SHOWN = subprocess.run(["git", "cat-file", "-e", f"{OLD}:algorithms/grpo.py"], cwd=ROOT)


@pytest.fixture(autouse=True)
def without_trl(monkeypatch):
    monkeypatch.setattr(speed_grpo, "trl", None)


def test_smoke(tmp_path, capsys):
    """Long prompts and short ones: the checks pass, and the CSV has a row for each arm."""
    path = tmp_path / "speed.csv"
    args = Args(smoke=True, csv=str(path))
    assert speed_grpo.main(args) == 0
    assert "TRL is left out" in capsys.readouterr().out
    rows = list(csv.DictReader(path.open()))
    arms = [(row["case"], row["arm"]) for row in rows]
    assert arms == [(case, arm) for case in "CD" for arm in ("shipped", "all rows")]
    for row in rows:
        assert float(row["ours_ms"]) > float(row["rollout_ms"]) > 0
        assert row["ratio_median"] == ""


@pytest.mark.skipif(SHOWN.returncode != 0, reason="a checkout without history")
def test_an_older_commit_leaves_the_same_gradient(tmp_path):
    path = tmp_path / "speed.csv"
    words = ["--cases", "C", "--smoke", "--against", OLD, "--csv", path]
    process = run(ROOT / "benchmarks" / "speed_grpo.py", *words)
    assert process.returncode == 0, process.stderr
    rows = list(csv.DictReader(path.open()))
    assert [row["arm"] for row in rows] == ["shipped", "all rows", OLD, f"{OLD} all rows"]
    assert float(rows[0]["against_median"]) > 0
    lengths = [float(row["mean_length"]) for row in rows]
    assert max(lengths) < 1.25 * min(lengths)  # of the same prompts, by other random numbers


def test_a_wrong_gradient_is_noticed(monkeypatch):
    weights = grpo.token_weights
    monkeypatch.setattr(grpo, "token_weights", lambda *a, **k: 1.0001 * weights(*a, **k))
    assert speed_grpo.main(Args(cases=("C",), smoke=True)) == 1


def test_a_wrong_greedy_completion_is_noticed(monkeypatch):
    generate = grpo.generate

    def wrong(model, prompts, args, seeds=None):
        completions = generate(model, prompts, args, seeds)
        if not seeds:
            completions[0].ids[0] += 1
        return completions

    monkeypatch.setattr(grpo, "generate", wrong)
    assert speed_grpo.main(Args(cases=("C",), smoke=True)) == 1
