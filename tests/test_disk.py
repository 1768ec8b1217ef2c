"""Full disks, files that were cut off, consoles that lack letters: one sentence each, and the run goes on."""

import json
import shutil
import sys

import pytest
from language_runs import numbers
from processes import as_flags, fork
from run_folders import command, metrics, path_of, refusal

from algorithms import grpo, mdpo, stream_x, unimodal_poisson

SMALL = {"num_prompts_per_step": 2, "num_generations": 4, "max_completion_length": 8, "eval_steps": 0, "save_steps": 1}
CONTROL = {
    unimodal_poisson: "--env-id Pendulum-v1 --num-envs 2 --num-steps 16 --num-minibatches 2 --eval-episodes 0 --save-steps 32",
    mdpo: "--env-id Pendulum-v1 --num-envs 2 --num-steps 16 --eval-episodes 0 --save-steps 32",
    stream_x: "--env-id CartPole-v1 --algorithm q --hidden-size 8 --eval-episodes 0 --save-steps 50",
}
LIMITED = """\
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of three steps with two checkpoints."""
    run_dir = tmp_path_factory.mktemp("disk") / "whole"
    grpo.train(grpo.Args(**SMALL, max_steps=3, output_dir=str(run_dir)))
    return run_dir


@pytest.fixture
def run_dir(whole, tmp_path):
    """A copy of it."""
    return shutil.copytree(whole, tmp_path / "run")


@pytest.mark.parametrize("most", [100, 1000, 1_000_000])  # bytes of a file: args.json, metrics.csv, a checkpoint fail
def test_a_full_disk_is_one_sentence_and_the_run_goes_on(whole, most, tmp_path):
    (tmp_path / "limited.py").write_text(LIMITED)
    words = [*as_flags(SMALL), "--max-steps", 3, "--output-dir", tmp_path / "run"]
    process = fork(tmp_path / "limited.py", most, path_of(grpo), *words)
    (sentence,) = process.stderr.splitlines()
    assert sentence.startswith("the disk is full (") and "--resume" in sentence and process.returncode == 1
    if most == 1_000_000:
        command_line = fork(path_of(grpo), "--resume", tmp_path / "run")
        assert command_line.returncode == 0, command_line.stderr
        assert metrics(tmp_path / "run") == metrics(whole)


@pytest.mark.parametrize("script", CONTROL)
def test_a_full_disk_of_control_scripts(script, tmp_path):
    (tmp_path / "limited.py").write_text(LIMITED)
    words = [*CONTROL[script].split(), "--total-timesteps", 400, "--output-dir", tmp_path / "run"]
    process = fork(tmp_path / "limited.py", 3000, path_of(script), *words)
    assert process.stderr.splitlines()[-1].startswith("the disk is full ("), process.stderr
    assert "Traceback" not in process.stderr


def test_a_damaged_checkpoint_names_the_older_one(run_dir, monkeypatch):
    for path in run_dir.glob("checkpoints/step_00000003/*.distcp"):
        path.write_bytes(path.read_bytes()[:1000])
    sentence = refusal(grpo, monkeypatch, "--resume", run_dir)
    assert "step_00000003: damaged; delete it, and the run goes on from step_00000002" in sentence
    shutil.rmtree(run_dir / "checkpoints" / "step_00000003")
    command(grpo, monkeypatch, "--resume", run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step_00000002")
    (run_dir / "checkpoints" / "step_00000003" / ".metadata").write_bytes(b"no pickle")
    assert "and the run begins anew" in refusal(grpo, monkeypatch, "--resume", run_dir)


def test_a_row_that_was_cut_off_does_not_merge_with_the_next(run_dir, whole, monkeypatch):
    for name in ("metrics.csv", "completions.jsonl"):
        text = (run_dir / name).read_text()
        (run_dir / name).write_text(text[: text.rstrip().rfind("\n") + 5])
    command(grpo, monkeypatch, "--resume", run_dir, "--max-steps", 4)
    rows = (run_dir / "metrics.csv").read_text().splitlines()
    assert all(row.count(",") == 2 for row in rows) and numbers(run_dir)[4, "train/loss"] is not None
    for line in (run_dir / "completions.jsonl").read_text().splitlines():
        json.loads(line)


@pytest.mark.parametrize("script", CONTROL)
def test_a_cut_row_and_a_damaged_checkpoint_of_control_scripts(script, tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    words = [*CONTROL[script].split(), "--total-timesteps", 200]
    assert fork(path_of(script), *words, "--output-dir", run_dir).returncode == 0
    (run_dir / "metrics.csv").open("a").write("200,charts/epi")
    process = fork(path_of(script), "--resume", run_dir)
    assert process.returncode == 0, process.stderr
    assert all(row.count(",") == 2 for row in (run_dir / "metrics.csv").read_text().splitlines())
    newest = sorted(run_dir.rglob("*step_*.pt") if script is not stream_x else run_dir.glob("checkpoint.pt"))[-1]
    newest.write_bytes(newest.read_bytes()[:100])
    process = fork(path_of(script), "--resume", run_dir)
    assert "Traceback" not in process.stderr and "damaged" in process.stderr


def test_a_console_that_lacks_letters(tmp_path):
    """On Windows it often has some 200 of them, here those of ASCII."""
    (tmp_path / "train.jsonl").write_text("".join(f'{{"question": "What is π times {n}?"}}\n' for n in range(99)), encoding="utf-8")
    (tmp_path / "own.py").write_text("def ones(problem, completion):\n    return 1.0\n")
    driver = "import runpy, sys\nsys.stdout.reconfigure(encoding='ascii')\nsys.argv = sys.argv[1:]\n"
    (tmp_path / "driver.py").write_text(driver + "runpy.run_path(sys.argv[0], run_name='__main__')\n")
    words = ["--dataset", tmp_path / "train.jsonl", "--reward", f"{tmp_path}/own.py:ones", "--max-steps", 1]
    words += [*as_flags(SMALL | {"eval_steps": 1, "eval_problems": 1}), "--output-dir", tmp_path / "run"]
    process = fork(tmp_path / "driver.py", path_of(grpo), *words)
    assert process.returncode == 0, process.stderr
    assert "What is ? times " in process.stdout


@pytest.mark.quick
def test_a_judge_that_speaks_of_large_files_is_no_full_disk():
    """What the user's own code raises comes with its text and its traceback."""
    with pytest.raises(SystemExit, match="^reward function f: failed") as stop, grpo.one_sentence_for_a_full_disk():
        sys.exit("reward function f: failed for 'a'\n\nValueError: HTTP 413: File too large")
    assert "HTTP 413" in stop.value.code
