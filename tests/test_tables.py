"""Tables in the Markdown files are those that benchmarks/make_tables.py draws from the committed CSVs and the scripts;
its programs."""

import importlib
import shlex
import subprocess
import sys

import pytest
import tyro

from benchmarks import learning, make_tables, tables_diff
from benchmarks.make_tables import FIGURES, RESULTS, TABLES, drawable, pages, read, redraw

STUDIES = learning.STUDIES


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_tables_agree_with_the_csvs(path):
    text = path.read_text()
    assert redraw(text) == text, f"run python benchmarks/make_tables.py: {path.name} differs from CSVs or scripts"


def test_every_table_stands_on_a_page():
    text = "".join(path.read_text() for path in pages())
    assert [name for name in TABLES if drawable(name) and f"<!-- table:{name} -->" not in text] == []


def test_a_table_without_its_csv_is_not_wanted(monkeypatch, tmp_path):
    monkeypatch.setattr(make_tables, "RESULTS", tmp_path)
    assert not any(map(drawable, TABLES.keys() - tables_diff.TABLES.keys()))  # the scripts are always there


def test_a_changed_number_is_noticed():
    page = next(path for path in pages() if "<!-- table:grpo_learning -->" in path.read_text()).read_text()
    assert redraw(page.replace(" ± ", " ± 1")) == page


# --- The diffs of the scripts -------------------------------------------------------------------------------------


SIBLINGS = [name.removeprefix("diff_") for name in tables_diff.TABLES if name.startswith("diff_")]


def test_every_script_has_its_diff_or_says_what_it_shares():
    """On its own page, directly before the hyper-parameters; only grpo.py, the sibling of others, has none."""
    names = {path.stem for path in tables_diff.ALGORITHMS.glob("*.py")}
    assert names - {table.partition("_")[2] for table in tables_diff.TABLES} == {"grpo"}
    for table, drawn in tables_diff.TABLES.items():
        kind, _, name = table.partition("_")
        title = "The diff against grpo.py" if kind == "diff" else "What is the same in other scripts"
        section = f"## {title}\n\n<!-- table:{table} -->\n{drawn()}\n<!-- end -->\n\n## Hyper-parameters\n"
        if section not in (tables_diff.ALGORITHMS / f"{name}.md").read_text(encoding="utf-8"):
            text = f"'## {title}' with '<!-- table:{table} -->' and '<!-- end -->', drawn by benchmarks/make_tables.py"
            pytest.fail(f"algorithms/{name}.md: before '## Hyper-parameters' stands no {text}", pytrace=False)


@pytest.mark.parametrize("table", tables_diff.TABLES)
def test_a_changed_script_is_noticed(table, monkeypatch):
    """A definition more or a word in one that is shared, there or in the sibling, and the page is out of date."""
    (kind, _, name), read = table.partition("_"), tables_diff.read
    page = f"<!-- table:{table} -->\n{TABLES[table]()}\n<!-- end -->\n"
    assert redraw(page) == page
    for changed in [name, "grpo"] if kind == "diff" else [name]:
        for old, new in (("# === 4", "def new():\n    pass\n\n\n# === 4"), ("code 2 for what", "code 3 for what")):
            source = read(changed).replace(old, new)
            assert source != read(changed)
            sources = {changed: source}
            monkeypatch.setattr(tables_diff, "read", lambda n, sources=sources: sources.get(n) or read(n))
            assert redraw(page) != page


@pytest.mark.parametrize("name", SIBLINGS)
def test_the_diff_makes_the_script_from_its_sibling(name):
    """Every definition follows from the sibling's by the lines of the diff, and the table names what differs."""
    old, new = (tables_diff.blocks(tables_diff.read(script)) for script in ("grpo", name))
    found = tables_diff.differences(old, new)
    for n in new:
        before, after = old[n].lines if n in old else (), new[n].lines
        rows = tables_diff.unified(before, after, context=1000)
        assert [row[1:] for row in rows if row[:1] != "-"] == [line for line in after if rows]
        assert [row[1:] for row in rows if row[:1] != "+"] == [line for line in before if rows]
        assert bool(rows) == (n in found)
    assert {n for n, kind in found.items() if kind == "left out"} == old.keys() - new.keys()
    table = tables_diff.TABLES[f"diff_{name}"]()
    assert all(f"\n| {n} | " in table for n in found if not n.startswith("Args."))
    assert all(f"\n@@ {n} @@\n" in table for n, kind in found.items() if kind == "changed")


@pytest.mark.parametrize("path", sorted(tables_diff.ALGORITHMS.glob("*.py")), ids=lambda path: path.name)
def test_definitions_are_those_of_the_house_rules(path):
    import test_house_rules

    rules = test_house_rules.blocks(path.read_text(encoding="utf-8"))
    found = tables_diff.blocks(path.read_text(encoding="utf-8"))
    assert {name: "\n".join(block.lines) for name, block in found.items()} == {
        name: block.text for name, block in rules.items() if name != "Args"
    }


# --- The runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("study", [name for name in STUDIES if learning.runs_file(name).exists()])
def test_every_run_says_how_it_was_made(study):
    for row in read(f"{study}_runs.csv"):
        assert all(row[name] for name in ("command", "commit", "seed", "torch", "transformers", "device", "minutes"))
        arm = STUDIES[study].arms[row["arm"]]
        assert (
            list(row) == STUDIES[study].columns and shlex.join(learning.program(STUDIES[study], arm)) in row["command"]
        )
    assert study not in FIGURES or (RESULTS / f"{study}_learning.png").stat().st_size > 10_000


def test_bandit_says_how_it_was_made():
    rows = read("bandit_gdpo.csv")
    assert len(rows) == 915 and all(all(row.values()) for row in rows)


# --- The program that makes the runs ------------------------------------------------------------------------------


@pytest.mark.parametrize("study", STUDIES)
def test_flags_of_a_study_are_those_of_its_script(study):
    script = importlib.import_module(STUDIES[study].script.removesuffix(".py").replace("/", "."))
    script, names = script if hasattr(script, "Args") else getattr(script, study), STUDIES[study].arms  # or its driver
    for arm in names.values():
        args = tyro.cli(script.Args, args=[*(arm.common or STUDIES[study].common), *arm.flags])
        assert args.max_steps > 0 and len(set(arm.seeds)) == len(arm.seeds)
        assert not arm.rate or arm.rate in names or float(arm.rate) > 0
    if study in FIGURES:
        assert set(FIGURES[study][0]) - {"gdpo_no_batch_norm"} <= names.keys()


def test_driver_that_scales_a_reward(tmp_path):
    """It trains with the correctness of tool_calls times a factor and changes nothing else; --help says it parses."""
    words = learning.program(STUDIES["gdpo"], learning.Arm(scale=0.1))
    done = subprocess.run([sys.executable, *words, "--help"], cwd=learning.ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "--conditioned-rewards" in done.stdout, done.stderr
    from envs.tool_calls import Problem, ToolCalls

    functions = dict(ToolCalls.reward_functions)
    problem = Problem(query="q", tools="", answer='<tool_call>\n{"name": "a", "parameters": {}}\n</tool_call>')
    texts = [problem.answer, "nothing"]
    before = [{name: function(problem, text) for name, function in functions.items()} for text in texts]
    try:
        exec(words[1].partition("script.train")[0], {})
        after = [{name: f(problem, text) for name, f in ToolCalls.reward_functions.items()} for text in texts]
    finally:
        ToolCalls.reward_functions.update(functions)
    for old, new in zip(before, after):
        assert new.pop("correctness") == pytest.approx(0.1 * old.pop("correctness")) != 0
        assert new == old


def test_steps_to_a_level():
    values = [0.0, 1, 1, 1, 1, 0.9, 0, 0]
    assert learning.steps_to(values, 0.9, 5) == 6 and learning.steps_to(values, 0.8, 5) == 5
    assert learning.steps_to(values, 0.99, 5) is None and learning.steps_to([1.0] * 4, 0.9, 5) is None
    assert learning.steps_to(values, 0.9, 1) == 2


def test_scores_of_a_run(tmp_path):
    """Last and first evaluation, scaled rewards in their own unit, steps until the easy reward is learned."""
    study, tags = STUDIES["gdpo"], STUDIES["gdpo"].scores.values()
    metrics = [{"step": step, "tag": tag, "value": str(value)} for step, value in ((0, 0.25), (9, 0.5)) for tag in tags]
    metrics += [{"step": step, "tag": study.fast, "value": str(step >= 2)} for step in range(1, 9)]
    metrics = [row | {"value": {"True": "1.0", "False": "0.0"}.get(row["value"], row["value"])} for row in metrics]
    row = learning.scores(study, learning.Arm(scale=0.1), metrics)
    assert (row["mean_at_8"], row["first_mean_at_8"]) == ("0.5000", "0.2500")
    assert (row["correctness"], row["first_correctness"], row["format"]) == ("5.0000", "2.5000", "0.5000")
    assert (row["steps_to_90"], row["converged"]) == (6, 1)
    assert row.keys() == set(study.columns) - {"run", "arm", "stage", "seed", "learning_rate", *learning.COLUMNS}


def test_a_score_may_be_a_sum_of_tags():
    """Points against random: wins, and half of the draws, in both seats."""
    study = STUDIES["spiral_rae"]
    values = dict.fromkeys(learning.TICTACTOE.values(), 0.0)
    values |= {"eval/tictactoe/random/first/win": 0.5, "eval/tictactoe/random/first/draw": 0.25}
    values |= {"eval/tictactoe/random/second/win": 0.2, "eval/tictactoe/random/second/draw": 0.1}
    row = learning.scores(study, study.arms["role"], [{"tag": tag, "value": str(x)} for tag, x in values.items()])
    assert row["points"] == row["first_points"] == "0.4375" and row["random_second_win"] == "0.2000"


@pytest.mark.parametrize("study, chosen", [("spiral_kuhn", "5e-5"), ("spiral_rae", "1e-4")])
def test_the_sweep_chooses_by_the_score_of_its_study(study, chosen, monkeypatch):
    """The lowest NashConv of Kuhn poker, the most points of tic-tac-toe; an arm may go by another arm's sweep."""
    rows = [{"arm": "role", "stage": "sweep", "learning_rate": "1e-4", STUDIES[study].best: "0.7"}]
    rows += [{"arm": "role", "stage": "sweep", "learning_rate": "5e-5", STUDIES[study].best: "0.4"}]
    monkeypatch.setattr(learning, "read", lambda path: rows)
    assert learning.learning_rate(study, "role") == learning.learning_rate(study, "global") == chosen
