"""benchmarks/make_tables.py and verdicts.py: tables on the pages are those of the CSVs, verdicts those of the data."""

import statistics

import pandas as pd
import pytest
from scipy import stats

from benchmarks import make_tables, verdicts
from benchmarks.make_tables import load_rows, pages, paired, redraw
from benchmarks.studies import TABLES, Table

T_95 = {5: 2.7764, 7: 2.446912, 8: 2.3646, 10: 2.2622, 12: 2.2010, 13: 2.1788, 20: 2.0930}  # of Student's t, two-sided, for as many pairs
CLAIMS = {claim.name: claim for claim in load_rows("claims.csv")}


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_tables_agree_with_the_csvs(path):
    assert redraw(path) == path.read_text(), "run python benchmarks/make_tables.py --no-figures"


def test_paired_difference():
    """By hand: differences 1 to 5, mean 3, deviation sqrt(2.5), half width 2.776 sqrt(2.5 / 5)."""
    found = paired(pd.Series([11, 12, 13, 14, 15]), pd.Series([10] * 5))
    assert (found.mean, found.low, found.high) == pytest.approx((3, 1.03676, 4.96324), abs=1e-4)
    assert paired(pd.Series([2.0, 1.0]), pd.Series([1.0, 1.0], index=[1, 0])).mean == 0.5


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=list(CLAIMS))
def test_verdicts(claim):
    """Again from the scores, by other lines; our own questions have words of their own."""
    ours, theirs = verdicts.scores_of(claim)
    sign = 1 if claim.better == "higher" else -1
    differences = [sign * (a - b) for a, b in zip(ours, theirs) if a == a and b == b]
    mean = statistics.mean(differences)
    half = T_95[len(differences)] * statistics.stdev(differences) / len(differences) ** 0.5
    margin = {"3": 0.03, "5": 0.05, "2": 2.0, "0.02": 0.02, "10 %": 0.1 * abs(statistics.mean(theirs))}[claim.margin]
    expected = 3
    if abs(mean) > half:
        expected = 0 if mean > 0 else 1
    elif abs(mean) + half < margin:
        expected = 2
    words = {"": ["reproduced", "opposite", "no difference", "not settled"], "us": ["ahead", "behind", "level", "open"]}
    assert verdicts.judge(claim)[1].startswith(words[claim.asked][expected])
    assert verdicts.kind_of(claim) == expected


def test_holm_corrected_intervals_exclude_zero_if_the_test_rejects():
    """Four p-values by hand (the third stops the procedure), then all that were ever tested against adjusted p-values."""
    errors = verdicts.holm_errors(pd.Series({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}))
    assert errors.to_dict() == pytest.approx({"d": 0.05 / 4, "a": 0.05 / 3, "c": 0.05 / 2, "b": 0.05 / 2})
    tested = verdicts.load_tested().p_value.sort_values()
    adjusted = (tested * [*range(len(tested), 0, -1)]).cummax()
    errors = verdicts.corrected_errors()
    assert set(errors.index) == set(tested.index) and len(tested) >= 115
    for name, claim in CLAIMS.items():
        scores = verdicts.scores_of(claim)
        assert tested[name] == pytest.approx(stats.ttest_rel(*scores, nan_policy="omit").pvalue, rel=1e-4)
        found = paired(*scores, errors[name])
        assert (found.low > 0 or found.high < 0) == (adjusted[name] < 0.05) == verdicts.survives(claim), name


def study_file(folder, rows) -> None:
    columns = ["task", "arm", "seed", "learning_rate", "score", "first_score", "commit"]
    table = pd.DataFrame(rows, columns=columns[:5]).assign(first_score=1.0, commit="abc")
    table.to_csv(folder / "try.csv", index=False)


def test_a_study(tmp_path, monkeypatch):
    """The rate that ran last counts, an edge is marked, and an unfinished study is not drawn."""
    monkeypatch.setattr(verdicts, "RESULTS", tmp_path)
    monkeypatch.setitem(TABLES, "try", Table("try", {"a": "A (new)", "b": "B"}, [("score", "score", 1, 1)], seeds=5))
    rows = [["", "a", 1, rate, 5] for rate in ("1e-4", "2e-4")]  # the sweep
    rows += [["", "a", 2, "1e-4", 99]]  # before it was widened
    rows += [["", "a", seed, "2e-4", 10 + seed] for seed in range(2, 7)]
    rows += [["", "b", seed, "", 10] for seed in range(2, 6)]
    study_file(tmp_path, rows)
    with pytest.raises(verdicts.Unfinished):
        make_tables.study_table("try", "results")
    verdicts.load_runs.cache_clear()
    study_file(tmp_path, [*rows, ["", "b", 6, "", 10]])
    text = make_tables.study_table("try", "results")
    verdicts.load_runs.cache_clear()
    assert "| arm | learning rate | seeds | score | A minus this (95 %) |" in text
    assert "| before training |  |  | 1.0 | +13.0 (+11.0 to +15.0) |" in text
    assert "| A (new) | 2e-4 (edge) | 5 | 14.0 ± 1.6 |  |" in text
    assert "| B |  | 5 | 10.0 | +4.0 (+2.0 to +6.0) |" in text


def test_a_method_has_one_main_claim_in_the_order_of_the_table_and_at_most_two_more():
    mains = [claim.method for claim in verdicts.main_claims()]
    assert mains == [method.script for method in load_rows("methods.csv") if method.script in mains]
    for script in mains:
        roles = [claim.role for claim in CLAIMS.values() if claim.method == script]
        assert roles[0] == "main" and len(roles) <= 3 and roles.count("main") == 1
    assert {claim.method for claim in CLAIMS.values()} == set(mains)
