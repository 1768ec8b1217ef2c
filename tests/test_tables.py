"""benchmarks/make_tables.py: tables on the pages are those of the CSVs, verdicts those of the data."""

import re
import statistics

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from benchmarks import make_tables
from benchmarks.make_tables import DECLARED, RESULTS, TABLES, load_rows, pages, paired, redraw

T_95 = {5: 2.7764, 6: 2.5706, 7: 2.4469, 8: 2.3646, 9: 2.3060, 10: 2.2622, 12: 2.2010, 13: 2.1788, 20: 2.0930}  # of Student's t, two-sided, for as many pairs
NUMBER = r"[-+]?\d[\d,]*\.?\d*"
INTERVAL = re.compile(rf"(?<![\w-])({NUMBER}) to ({NUMBER})")
QUOTES = load_rows("quoted.csv")
# Of runs at earlier commits (DAPO, GDPO), from single steps (Dr. MAS, twice), and an example (IGPO).
ELSEWHERE = {(7.3, 18.1), (1.9, 6.7), (8.0, 27.1), (0.1, 19.9), (7, 8)}
CLAIMS = {claim.name: claim for claim in load_rows("claims.csv")}
STANDING = set(re.findall(r"<!-- table:(\w+) -->", "".join(path.read_text() for path in pages())))


def tables_in(path) -> list[str]:
    return re.findall(r"<!-- table:.*?<!-- end -->", path.read_text(), re.DOTALL)


def plain_text(path) -> str:
    """A page without its drawn tables, and without line breaks."""
    text = path.read_text()
    for table in tables_in(path):
        text = text.replace(table, "")
    return " ".join(text.split())


def ends(found: re.Match) -> tuple[float, ...]:
    """Both numbers of an interval without signs: a text may say how much lower something is."""
    return tuple(sorted(abs(float(number.replace(",", ""))) for number in found.groups()))


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_tables_agree_with_the_csvs(path):
    assert redraw(path) == path.read_text(), "run python benchmarks/make_tables.py --no-figures"


def quoted_scores(quote, arm: str, column: str, study: str) -> pd.Series:
    scores = make_tables.scores_by_seed(study, quote.task, arm, column)
    if quote.seeds:
        ranges = [map(int, seeds.split("-")) for seeds in quote.seeds.split()]
        scores = scores[scores.index.isin([seed for first, last in ranges for seed in range(first, last + 1)])]
    return scores


@pytest.mark.parametrize("quote", QUOTES, ids=lambda quote: f"{quote.page.partition('/')[2]} {quote.quote}")
def test_intervals_in_the_text(quote):
    """Each is on its page, and is that of its CSV."""
    assert quote.quote in plain_text(make_tables.ROOT / quote.page)
    ours = quoted_scores(quote, quote.ours, quote.column, quote.study)
    theirs = quoted_scores(quote, quote.theirs, quote.other_column or quote.column, quote.other_study or quote.study)
    found = paired(ours, theirs)
    low, high = INTERVAL.findall(quote.quote)[-1]
    half_a_digit = 0.501 * 10.0 ** -len(low.partition(".")[2])
    assert float(low) == pytest.approx(float(quote.scale) * found.low, abs=half_a_digit)
    assert float(high) == pytest.approx(float(quote.scale) * found.high, abs=half_a_digit)
    assert float(low) < float(quote.scale) * found.mean < float(high)


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_an_interval_in_the_text_has_a_source(path):
    """A table of some page, or quoted.csv; an interval is known by its signs, as in -1.3 to +2 or -3 to -1."""
    sources = {ends(found) for page in pages() for found in INTERVAL.finditer(" ".join(tables_in(page)))}
    sources |= {ends(found) for quote in QUOTES for found in INTERVAL.finditer(quote.quote)}
    for found in INTERVAL.finditer(plain_text(path)):
        if found[1][0] in "+-" and found[2][0] in "+-":
            assert ends(found) in sources | ELSEWHERE, f"{found[0]}: add a row to quoted.csv"


def test_a_table_without_a_page_is_not_finished():
    for name in set(TABLES) - STANDING:
        with pytest.raises(FileNotFoundError):
            TABLES[name]("results")


def test_paired_difference():
    """By hand: differences 1 to 5, mean 3, deviation sqrt(2.5), half width 2.776 sqrt(2.5 / 5)."""
    found = paired(pd.Series([11, 12, 13, 14, 15]), pd.Series([10] * 5))
    assert (found.mean, found.low, found.high) == pytest.approx((3, 1.03676, 4.96324), abs=1e-4)
    assert paired(pd.Series([2.0, 1.0]), pd.Series([1.0, 1.0], index=[1, 0])).mean == 0.5


@pytest.mark.parametrize("name", [name for name, claim in CLAIMS.items() if claim.study])
def test_verdicts(name):
    """Again from the scores, by other lines."""
    claim = CLAIMS[name]
    _, said = make_tables.judge(claim)
    if said.startswith("open"):
        return
    ours, theirs = make_tables.scores_of(claim)
    sign = 1 if claim.better == "higher" else -1
    differences = [sign * (a - b) for a, b in zip(ours, theirs) if a == a and b == b]
    mean = statistics.mean(differences)
    if claim.kind == "exact":
        expected = "exact: holds" if mean > 0 else "exact: fails"
    elif len(differences) < 5:
        expected = "values shown"
    else:
        half = T_95[len(differences)] * statistics.stdev(differences) / len(differences) ** 0.5
        margin = {"3": 0.03, "5": 0.05, "10 %": 0.1 * abs(statistics.mean(theirs))}[claim.margin]
        expected = "not settled"
        if abs(mean) > half:
            expected = "reproduced" if mean > 0 else "opposite"
        elif abs(mean) + half < margin:
            points = f"{100 * margin:.3g} points"
            expected = f"no difference larger than {points if claim.unit == '%' else f'{margin:.3g}'}"
    assert said.partition(" (")[0] == expected


def test_verdict_within_a_margin():
    """By hand: 1 to 5 less 3 is 0 with a half width of 1.963, which 2 holds and 1.9 does not."""
    found = paired(pd.Series([1, 2, 3, 4, 5]), pd.Series([3] * 5))
    assert make_tables.verdict(found, "higher", 2.0) == "no difference larger than"
    assert make_tables.verdict(found, "higher", 1.9) == "not settled"
    assert make_tables.verdict(make_tables.Interval(1, 0.5, 1.5), "lower", 2.0) == "opposite"


def test_sign_flips():
    """By scipy's permutation test, and by hand: of eight signs of 1, 2 and 4 only +++ and --- reach a sum of 7."""
    assert make_tables.sign_flip_p_value(pd.Series([1.0, 2.0, 4.0])) == 2 / 8
    difference = pd.Series([0.3, -0.1, 0.5, 0.2, 0.4, -0.2, 0.6, 0.1])
    expected = stats.permutation_test((difference,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert make_tables.sign_flip_p_value(difference) == pytest.approx(expected.pvalue)


@pytest.mark.parametrize(("effect", "pairs"), [(0.2, 199), (0.5, 34), (0.8, 15)])
def test_pairs_that_show_an_effect(effect, pairs):
    """Sizes of Cohen (1988), small, medium and large, with the pairs that G*Power gives for them."""
    assert make_tables.pairs_to_show(effect) == make_tables.pairs_to_show(-effect) == pairs
    assert make_tables.pairs_to_show(0.1) is None


@pytest.mark.parametrize("margin", [0.4, 1.0])
def test_pairs_that_rule_out_a_margin(margin):
    """Simulated: so many pairs suffice in 80 % of the cases without a difference, one pair fewer does not."""
    pairs = make_tables.pairs_to_rule_out(margin)
    shares = []
    for count in (pairs - 1, pairs):
        draws = np.random.default_rng(1).normal(size=(40_000, count))
        half = stats.t.ppf(0.975, count - 1) * draws.std(axis=1, ddof=1) / count**0.5
        shares.append((abs(draws.mean(axis=1)) + half < margin).mean())
    assert shares[0] < 0.805 and shares[1] > 0.795 and shares[0] < shares[1]
    assert make_tables.pairs_to_rule_out(0.1) is None


def test_holm_corrected_intervals_exclude_zero_if_the_test_rejects():
    """Four p-values by hand (the third stops the procedure), then all claims against adjusted p-values."""
    errors = make_tables.holm_errors(pd.Series({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}))
    assert errors.to_dict() == pytest.approx({"d": 0.05 / 4, "a": 0.05 / 3, "c": 0.05 / 2, "b": 0.05 / 2})
    errors = make_tables.corrected_errors()
    scores = {name: make_tables.scores_of(CLAIMS[name]) for name in errors.index}
    p_values = pd.Series({name: stats.ttest_rel(*pair, nan_policy="omit").pvalue for name, pair in scores.items()})
    p_values = p_values.sort_values()
    adjusted = (p_values * [*range(len(p_values), 0, -1)]).cummax()
    for name, pair in scores.items():
        found = paired(*pair, errors[name])
        assert (found.low > 0 or found.high < 0) == (adjusted[name] < 0.05), name
    assert 0 < (adjusted < 0.05).sum() < len(adjusted)


def study_file(folder, rows) -> None:
    columns = ["task", "arm", "seed", "learning_rate", "score", "first_score", "commit"]
    table = pd.DataFrame(rows, columns=columns[:5]).assign(first_score=1.0, commit="abc")
    table.to_csv(folder / "try.csv", index=False)


def test_a_study(tmp_path, monkeypatch):
    """The rate that ran last counts, an edge is marked, and an unfinished study is not drawn."""
    monkeypatch.setattr(make_tables, "RESULTS", tmp_path)
    monkeypatch.setitem(DECLARED["tables"], "try", table := {"study": "try", "seeds": 5})
    table |= {"arms": {"a": "A (new)", "b": "B"}, "scores": [["score", "score", 1, 1]]}
    rows = [["", "a", 1, rate, 5] for rate in ("1e-4", "2e-4")]  # the sweep
    rows += [["", "a", 2, "1e-4", 99]]  # before it was widened
    rows += [["", "a", seed, "2e-4", 10 + seed] for seed in range(2, 7)]
    rows += [["", "b", seed, "", 10] for seed in range(2, 6)]
    study_file(tmp_path, rows)
    with pytest.raises(make_tables.Unfinished):
        make_tables.study_table("try", "results")
    make_tables.load_runs.cache_clear()
    study_file(tmp_path, [*rows, ["", "b", 6, "", 10]])
    text = make_tables.study_table("try", "results")
    make_tables.load_runs.cache_clear()
    assert "| arm | learning rate | seeds | score | A minus this (95 %) |" in text
    assert "| before training |  |  | 1.0 | +13.0 (+11.0 to +15.0) |" in text
    assert "| A (new) | 2e-4 (edge) | 5 | 14.0 ± 1.6 |  |" in text
    assert "| B |  | 5 | 10.0 | +4.0 (+2.0 to +6.0) |" in text


def test_every_run_says_how_it_was_made():
    studies = {table["study"] for table in DECLARED["tables"].values()}
    studies |= {claim.study for claim in CLAIMS.values()} - {""}
    for study in studies:
        for path in filter(lambda path: path.exists(), (RESULTS / f"{study}.csv", RESULTS / f"{study}_runs.csv")):
            assert pd.read_csv(path, dtype=str).commit.notna().all(), path


def test_figures(monkeypatch):
    saved = {}
    monkeypatch.setattr(make_tables, "save", lambda picture, name: saved.update({name: picture}))
    make_tables.draw_study("grpo_learning")
    lines = saved["grpo_learning"].axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["GRPO", "no baseline: REINFORCE"]
    assert {"grpo.py", "fm3q.py"} <= {axis.get_title(loc="left") for axis in make_tables.default_runs("black", "white").axes}


def test_forest_has_a_row_for_each_labelled_claim():
    """Intervals in standard deviations of the control, turned so that the claim's direction is to the right."""
    labelled = [claim for claim in CLAIMS.values() if claim.plot]
    picture = make_tables.forest("black", "white", labelled)
    lines = [line for line in picture.axes[0].get_lines() if len(line.get_xdata()) == 2 and line.get_linewidth() == 2]
    assert len(lines) == len(labelled) > 20
    for row, (claim, line) in enumerate(zip(labelled, lines)):
        ours, theirs = make_tables.scores_of(claim)
        found = paired(ours, theirs)
        spread = statistics.stdev(theirs.dropna())
        ends = sorted([found.low / spread, found.high / spread])
        ends = ends if claim.better == "higher" else [-ends[1], -ends[0]]
        assert sorted(line.get_xdata()) == pytest.approx(ends) and list(line.get_ydata()) == [row, row]
        color = {"reproduced": "#2a9d5c", "opposite": "#d1495b", "no": "#3b82c4", "not": "#9a9a9a"}
        assert line.get_color() == color[make_tables.judge(claim)[1].split()[0]]


def test_main_claims_follow_the_rule():
    """One of each method and script: no claim with a number has a larger scale, or as large a one and more pairs."""
    chosen = make_tables.main_claims()
    assert {claim.method for claim in chosen} == {claim.method for claim in CLAIMS.values() if claim.main}
    assert len(chosen) == len(load_rows("methods.csv"))
    order = list(CLAIMS)
    for mine in chosen:
        assert make_tables.pairs_of(mine) >= 5 and mine.plot
        for other in CLAIMS.values():
            pairs = make_tables.pairs_of(other) if other.main and other.method == mine.method else 0
            if pairs >= 5:
                sizes = [(int(claim.main), make_tables.pairs_of(claim)) for claim in (mine, other)]
                assert sizes[0] > sizes[1] or sizes[0] == sizes[1] and order.index(mine.name) <= order.index(other.name)


def test_no_label_of_the_short_forest_reaches_into_its_axis():
    picture = make_tables.forest("black", "white", make_tables.main_claims())
    picture.canvas.draw()
    labels = [text for text in picture.axes[0].texts if text.get_gid() == "label"]
    assert len(labels) == len(make_tables.main_claims())
    assert max(text.get_window_extent().x1 for text in labels) < picture.axes[0].get_window_extent().x0
