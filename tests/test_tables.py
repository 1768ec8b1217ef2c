"""Tables in the Markdown files are those that benchmarks/make_tables.py draws from the committed CSVs; its programs."""

import importlib
import shlex
import subprocess
import sys

import pytest
import tyro

from benchmarks import learning, make_tables, tables_claims, tables_study
from benchmarks.make_tables import FIGURES, RESULTS, TABLES, drawable, pages, read, redraw

STUDIES = learning.STUDIES


AWAITED = set()


def test_every_table_can_be_drawn():
    text = "".join(path.read_text() for path in pages())
    missing: list[str] = []
    redraw(text, missing)
    assert {line.partition(":")[0] for line in missing} <= AWAITED, missing
    if missing:
        pytest.skip("no runs yet: " + "; ".join(missing))


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_tables_agree_with_the_csvs(path):
    text = path.read_text()
    assert redraw(text) == text, f"run python benchmarks/make_tables.py: {path.name} differs from CSVs"


def test_every_table_stands_on_a_page():
    text = "".join(path.read_text() for path in pages())
    assert [name for name in TABLES if drawable(name) and f"<!-- table:{name} -->" not in text] == []


def test_a_table_without_its_csv_is_not_wanted(monkeypatch, tmp_path):
    monkeypatch.setattr(make_tables, "RESULTS", tmp_path)
    assert not any(map(drawable, TABLES))


def test_a_changed_number_is_noticed():
    page = next(path for path in pages() if "<!-- table:gdpo_learning -->" in path.read_text()).read_text()
    assert redraw(page.replace(" ± ", " ± 1")) == page


# --- What benchmarks/study.py has run -----------------------------------------------------------------------------


def study_rows(arm: str, rate: str, scores: dict[int, float]) -> list[dict]:
    """Rows of study.py's CSV; every score of a run is the same number."""
    start = {f"first_{name}": "0.1" for name in tables_study.SCORES}
    rows = []
    for seed, score in scores.items():
        row = {"arm": arm, "seed": str(seed), "learning_rate": rate} | start
        rows.append(row | dict.fromkeys(tables_study.SCORES, str(score)))
    return rows


def test_paired_difference():
    """By hand: differences 1 2 3 4 5, mean 3, deviation sqrt(2.5), half of the interval 2.776 sqrt(2.5 / 5)."""
    mean, low, high = tables_study.difference([11, 12, 13, 14, 15], [10, 10, 10, 10, 10])
    assert (mean, low, high) == pytest.approx((3, 3 - 1.96293, 3 + 1.96293), abs=1e-4)


def test_study_takes_the_seeds_at_the_best_rate():
    rows = study_rows("grpo", "1e-4", {1: 0.2, 2: 0.9}) + study_rows("grpo", "2e-4", {1: 0.3})  # a seed from before
    rows += study_rows("grpo", "2e-4", {2: 0.30, 3: 0.31, 4: 0.32, 5: 0.33, 6: 0.34})
    rows += study_rows("no_baseline", "1e-4", {1: 0.2, 2: 0.29, 3: 0.29, 4: 0.29, 5: 0.29, 6: 0.29})
    rows += study_rows("shuffled", "4e-4", {1: 0.05, 2: 0.0, 3: 0.0, 4: 0.0, 5: 0.0})
    with pytest.raises(tables_study.Unfinished, match="shuffled has 4 of 5 seeds"):
        tables_study.grpo_learning(lambda name: rows)
    rows += study_rows("shuffled", "4e-4", {6: 0.0})
    before, grpo, none, shuffled = tables_study.grpo_learning(lambda name: rows).splitlines()[2:]
    assert before == "| before training |  |  | 10.0 | 10.0 | 10.0 | +22.0 (+20.0 to +24.0) |"
    assert grpo == "| GRPO | 2e-4 | 5 | 32.0 ± 1.6 | 32.0 ± 1.6 | 32.0 ± 1.6 |  |"
    assert none.endswith("| 29.0 ± 0.0 | +3.0 (+1.0 to +5.0) |") and " 1e-4 | 5 |" in none
    assert shuffled.endswith("| +32.0 (+30.0 to +34.0) |")
    assert "| GRPO | 20.0 | 30.0 |  |" in tables_study.grpo_sweep(lambda name: rows)
    assert tables_claims.by_interval(tables_claims.ahead(lambda name: rows, "grpo", "grpo", "no_baseline")) == "reproduced"


# --- The runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("study", [name for name in STUDIES if learning.runs_file(name).exists()])
def test_every_run_says_how_it_was_made(study):
    for row in read(f"{study}_runs.csv"):
        assert all(row[name] for name in ("command", "commit", "seed", "torch", "transformers", "device", "minutes"))
        arm = STUDIES[study].arms[row["arm"]]
        program = learning.program(STUDIES[study], arm)
        assert list(row) == STUDIES[study].columns
        command = row["command"].replace(" --reward ", " --advantage ")  # IGPO's flag since
        assert arm.scale != 1 or shlex.join(program) in command  # the driver has changed since
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
