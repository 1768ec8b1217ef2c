"""What the tests of the language scripts share: a small run in this process, a killed one, two processes."""

import contextlib
import json
from pathlib import Path

import pytest
from processes import ROOT, as_flags, fork, kill_at, train_by_two
from run_folders import assert_close, assert_same_weights, final_models, metrics, name_of, path_of

from envs import search_qa

SMALL = {"num_prompts_per_step": 2, "num_generations": 4, "max_completion_length": 32}
SMALL |= {"eval_problems": 4, "num_generations_eval": 2, "eval_steps": 0, "save_steps": 0}
CALCULATOR = {"env": str(ROOT / "envs" / "examples" / "calculator.py:Calculator")}
CALCULATOR |= {"model_name_or_path": str(ROOT / "envs" / "tiny_lm" / "search_qa")}


def numbers(run_dir) -> dict[tuple[int, str], float]:
    """The metrics of a run, without times."""
    return {key: float(value) for key, value in metrics(run_dir).items()}


def train(script, run_dir, **values) -> dict[tuple[int, str], float]:
    """The metrics of a run of one step in this process, or of more."""
    script.train(script.Args(**{"max_steps": 1} | values, output_dir=str(run_dir)))
    return numbers(run_dir)


@contextlib.contextmanager
def spy(script):
    """A list of what every call of update() is given."""
    given, update = [], script.update
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "update", lambda *words: given.append(words) or update(*words))
        yield given


def whole_run(script, values: dict):
    """A fixture: the folder of an uninterrupted run with these flags, and what its updates were given."""

    @pytest.fixture(scope="module")
    def whole(tmp_path_factory):
        run_dir = tmp_path_factory.mktemp("runs") / "whole"
        with spy(script) as given:
            train(script, run_dir, **values)
        return run_dir, given

    return whole


def completions(run_dir) -> list[dict]:
    """Those that were trained on."""
    rows = [json.loads(line) for line in Path(run_dir, "completions.jsonl").open()]
    return [row for row in rows if "evaluation" not in row]


def evaluation_answers(run_dir) -> list[dict]:
    rows = [json.loads(line) for line in Path(run_dir, "completions.jsonl").open()]
    return [row for row in rows if "evaluation" in row]


def assert_same_run(run_dir, other) -> None:
    """The same metrics and the same weights, to the bit."""
    assert metrics(run_dir) == metrics(other)
    ours, theirs = final_models(run_dir), final_models(other)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].read_bytes() == theirs[name].read_bytes(), name


def kill_and_resume(script, whole, folder, step: int, **values) -> None:
    """A run that is killed before it prints this step, and goes on, is `whole`, which was not stopped."""
    run_dir = folder / "killed"
    kill_at(folder, name_of(script), "report", step, *as_flags(values), "--output-dir", run_dir)
    process = fork(path_of(script), "--resume", run_dir)
    assert process.returncode == 0, process.stderr
    assert_same_run(run_dir, whole)


def two_processes_equal_one(script, folder, kinds=("plain", "fsdp"), **values) -> None:
    """Two processes with a part of the rows each, also with sharded weights, take the step of one. -> folder / KIND"""
    more = {"plain": {}, "fsdp": {"fsdp": True}}
    runs = [values | more[kind] | {"output_dir": str(folder / kind)} for kind in kinds]
    train_by_two(folder, name_of(script), runs)
    expected = train(script, folder / "one", **values)
    for kind in kinds:
        assert (folder / kind / "final").exists(), (folder / "stderr").read_text()
        assert_close(numbers(folder / kind), expected, relative=1e-3)
        assert_same_weights(folder / kind, folder / "one")


def question_files(folder, monkeypatch) -> dict[str, str]:
    """Flags for twelve questions to train on, five to evaluate on, and a server that searches the invented world."""
    monkeypatch.setattr(search_qa, "HttpRetriever", lambda url, timeout: search_qa.world())
    task = search_qa.SearchQA(hops=(1,))
    for name, problems in (("train", range(12)), ("test", range(20, 25))):
        rows = [task.train_problem(index, 1) for index in problems]
        lines = [json.dumps({"question": row.question, "golden_answers": [*row.answers, "nobody"]}) for row in rows]
        Path(folder, f"{name}.jsonl").write_text("\n".join(lines))
    files = {"dataset": str(folder / "train.jsonl"), "eval_dataset": str(folder / "test.jsonl")}
    return files | {"retriever_url": "http://127.0.0.1:1/retrieve"}
