"""Tables in the Markdown files are those that benchmarks/make_tables.py draws from the committed CSVs."""

import pytest

from benchmarks.make_tables import RESULTS, TABLES, pages, read, redraw


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_tables_agree_with_the_csvs(path):
    text = path.read_text()
    assert redraw(text) == text, f"run python benchmarks/make_tables.py: {path.name} differs from the CSVs"


def test_every_table_stands_on_a_page():
    text = "".join(path.read_text() for path in pages())
    assert [name for name in TABLES if f"<!-- table:{name} -->" not in text] == []


def test_a_changed_number_is_noticed():
    page = next(path for path in pages() if "<!-- table:grpo_learning -->" in path.read_text()).read_text()
    assert redraw(page.replace(" ± ", " ± 1")) == page


def test_every_run_says_how_it_was_made():
    for row in read("grpo_runs.csv"):
        assert all(row[name] for name in ("command", "commit", "seed", "torch", "transformers", "device", "minutes"))


def test_figures_are_there():
    assert (RESULTS / "grpo_learning.png").stat().st_size > 10_000
