"""IGPO as people run it: files, logs, crashes, several processes, every switch, a retrieval server, bad input."""

import http.server
import json
import math
import re
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from processes import ROOT, as_flags, begin_and_interrupt, fork, train_by_two
from run_folders import (
    SMALL,
    assert_close,
    assert_same_run,
    documented_tags,
    events,
    last,
    table,
    tag_matches,
)
from safetensors.torch import load_file

from algorithms import igpo
from algorithms.igpo import Args, Progress, load_model, load_task, load_tokenizer, rollout
from envs.search_qa import world

SCRIPT, PAGE = ROOT / "algorithms" / "igpo.py", ROOT / "algorithms" / "igpo.md"
SMALL = SMALL | {"num_prompts_per_step": 2, "eval_problems": 4, "device": "cpu"}
LONG = SMALL | {"max_steps": 6, "save_steps": 2, "eval_steps": 3}
RATE = Args.learning_rate


# --- Means -----------------------------------------------------------------------------------------------------------


def train_here(run_dir, **values) -> dict[tuple[int, str], float]:
    """train() in this process with small settings; its metrics."""
    igpo.train(Args(**{**SMALL, "max_steps": 1, "output_dir": str(run_dir), **values}))
    return table(run_dir)


def refusal(capsys, **values) -> str:
    """The one sentence with which train() refuses these flags."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        igpo.train(Args(**{**SMALL, "max_steps": 1, **values}))
    errors = capsys.readouterr().err
    assert stopped.value.code == 2 and errors.startswith("error: ") and errors.count("\n") == 1, errors
    return errors


def assert_nearly_same_weights(run_dir, other) -> None:
    """As in run_folders.py: where the gradient is rounding noise AdamW's first step may go either way."""
    ours, theirs = (load_file(Path(folder, "final", "model.safetensors")) for folder in (run_dir, other))
    assert ours.keys() == theirs.keys()
    difference = torch.cat([(ours[name] - theirs[name]).abs().flatten() for name in ours])
    assert difference.max() <= 4 * RATE and difference.mean() < 1e-7, (difference.max(), difference.mean())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder and process of six uninterrupted steps."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    process = fork(SCRIPT, *as_flags(LONG), "--output-dir", run_dir)
    assert process.returncode == 0, process.stderr
    return run_dir, process


@pytest.fixture(scope="module")
def one_step(tmp_path_factory):
    """Folder of one step of one process; what variants are compared with."""
    run_dir = tmp_path_factory.mktemp("runs") / "one"
    train_here(run_dir)
    return run_dir


# --- The command and what it leaves ----------------------------------------------------------------------------------


def test_command_and_its_files(whole):
    run_dir, process = whole
    assert not re.search("warning|traceback|error", process.stderr, re.IGNORECASE), process.stderr
    progress = [line for line in process.stdout.splitlines() if line.startswith("step")]
    assert len(progress) == 6 and max(map(len, progress)) <= 80
    assert "<search>" in process.stdout and "<result>" in process.stdout and "<answer>" in process.stdout
    metrics, perf = table(run_dir), table(run_dir, "perf.csv")
    assert {step for step, tag in metrics if tag.startswith("eval/")} == {0, 3, 6}
    for tag in ("train/reward", "train/grad_norm", "train/igpo/turns", "train/igpo/gain"):
        assert [step for step, name in metrics if name == tag] == [*range(1, 7)]
    assert all(math.isfinite(value) for value in metrics.values())
    assert not [tag for _, tag in metrics if tag.startswith("perf/")], "times differ from run to run"
    board = events(run_dir)
    logged = {(event.step, tag): event.value for tag in board.Tags()["scalars"] for event in board.Scalars(tag)}
    assert_close(logged, metrics | perf, relative=1e-6)
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == ["step_00000004.pt", "step_00000006.pt"]
    before = load_file(Path(igpo.TINY_MODELS, "search_qa", "model.safetensors"))
    after = load_file(run_dir / "final" / "model.safetensors")
    assert max((before[name] - after[name]).abs().max() for name in after) > 1e-4


def test_final_policy_scores_the_same(whole, capsys):
    capsys.readouterr()
    scores = igpo.train(Args(evaluate=str(whole[0]), device="cpu"))
    assert scores == {tag: value for (step, tag), value in table(whole[0]).items() if step == 6 and tag in scores}
    assert {"eval/pass_at_1", "eval/f1_mean_at_2", "eval/rewards/f1", "eval/turns"} <= scores.keys()
    printed = capsys.readouterr().out
    assert all(f"{tag} {value:.4f}" in printed for tag, value in scores.items())


def test_tags_are_those_of_the_page(tmp_path):
    metrics = train_here(tmp_path / "run", beta=0.04, num_iterations=2, num_generations_eval=8)
    texts = [tag.removesuffix("/text_summary") for tag in events(tmp_path / "run").Tags()["tensors"]]
    logged = {tag for _, tag in [*metrics, *table(tmp_path / "run", "perf.csv")]} | set(texts)
    documented = documented_tags(PAGE.read_text())
    assert {tag for tag in logged if not any(tag_matches(row, tag) for row in documented)} == set()
    assert {row for row in documented if not any(tag_matches(row, tag) for tag in logged)} == set()


# --- Determinism and resuming ----------------------------------------------------------------------------------------


def test_same_seed_same_run_other_seed_another(whole, tmp_path):
    values = LONG | {"max_steps": 1, "eval_steps": 100}  # here, not in a process of its own; resuming repeats the rest
    again, expected = train_here(tmp_path / "again", **values), table(whole[0])
    same = {key for key in expected if key[0] == 0 or key[0] <= 1 and key[1].startswith("train/")}
    assert {key: again[key] for key in same} == {key: expected[key] for key in same} and len(same) > 20
    other = train_here(tmp_path / "other", seed=2, eval_steps=0)
    assert other[1, "train/igpo/gain"] != table(whole[0])[1, "train/igpo/gain"]


def test_terminate_saves_and_resumes(whole, tmp_path):
    values = LONG | {"save_steps": 100}
    status, errors = begin_and_interrupt(signal.SIGTERM, "step    2/", SCRIPT, tmp_path / "run", **values)
    assert status == 128 + signal.SIGTERM and errors.count("\n") == 1, errors
    step = int(re.fullmatch(rf"error: stopped after step (\d+); continue with --resume {tmp_path}/run\n", errors)[1])
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step_{step:08d}.pt"]
    igpo.train(Args(resume=str(tmp_path / "run"), device="cpu"))
    assert_same_run(tmp_path / "run", whole[0])


def test_resume_from_an_older_checkpoint(whole, tmp_path, capsys):
    shutil.copytree(whole[0], tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step_00000006.pt").unlink()
    sentence = refusal(capsys, **LONG, resume=str(tmp_path / "run"), normalization="joint")
    assert "the run began with --normalization separate, not joint" in sentence
    igpo.train(Args(resume=str(tmp_path / "run"), device="cpu"))  # from step 4
    assert_same_run(tmp_path / "run", whole[0])


# --- Several processes -----------------------------------------------------------------------------------------------

VARIANTS = {  # trained by two processes, and by one
    "plain": {},
    "fsdp": {"fsdp": True},
    "uneven_fsdp": {"fsdp": True, "hops": (1, 4), "max_turns": 6, "eval_steps": 0},  # episodes of other lengths
}


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Folder with the runs of VARIANTS by two processes."""
    folder = tmp_path_factory.mktemp("two")
    runs = [{**SMALL, "max_steps": 1, "output_dir": str(folder / name), **VARIANTS[name]} for name in VARIANTS]
    train_by_two(folder, "igpo", runs)
    return folder


@pytest.mark.parametrize("name", VARIANTS)
def test_two_processes_equal_one(two_processes, name, tmp_path):
    assert (two_processes / name / "final").exists(), (two_processes / "stderr").read_text()
    expected, found = train_here(tmp_path / "one", **VARIANTS[name] | {"fsdp": False}), table(two_processes / name)
    assert_close(found, expected, relative=1e-3 if "fsdp" in name else 1e-4)
    for tag in ("train/reward", "train/num_tokens", "train/igpo/turns", "train/completions/max_length"):
        assert found[1, tag] == pytest.approx(expected[1, tag], abs=1e-12), "the same problems and the same texts"
    assert_nearly_same_weights(two_processes / name, tmp_path / "one")


def test_every_process_draws_its_share_of_the_same_problems(monkeypatch):
    """The episodes of a step by one process and by each of two, and the advantages that follow."""
    args = replace(Args(**SMALL), num_prompts_per_step=4)
    task, tokenizer = load_task(args), load_tokenizer(args)
    model, found = load_model(args, tokenizer, torch.device("cpu")), []
    for rank, world_size in [(0, 1), (0, 2), (1, 2)]:
        monkeypatch.setattr(igpo, "rank_and_world_size", lambda given=(rank, world_size): given)
        progress = Progress(problems=10)
        batch = rollout(model, tokenizer, task, args, progress)
        assert progress["problems"] == 14
        advantages = igpo.compute_advantages(batch, args, progress)
        rows = zip(batch.prompts, batch.completion_ids, batch.mask, advantages)
        found.append([(prompt, ids[kept].tolist(), row[kept].tolist()) for prompt, ids, kept, row in rows])
    both = found[1] + found[2]
    assert [row[:2] for row in found[0]] == [row[:2] for row in both]
    for ours, theirs in zip(found[0], both):
        assert ours[2] == pytest.approx(theirs[2], rel=1e-3, abs=1e-3)


# --- Switches --------------------------------------------------------------------------------------------------------


def advantages_of(monkeypatch, run_dir, **values) -> list[list[float]]:
    """Advantages of the tokens of the first step."""
    found = []

    def spy(model, optimizer, batch, advantages, args, reference=None):
        found.extend(advantages.tolist())
        return {"grad_norm": 0.0}

    with monkeypatch.context() as patch:
        patch.setattr(igpo, "update", spy)
        train_here(run_dir, **values, eval_steps=0)
    return found


METHODS = [
    {},
    {"reward": "f1"},
    {"reward": "ig"},
    {"information_gain": "prob"},
    {"normalization": "joint"},
    {"information_gain": "prob", "normalization": "joint"},
    {"gamma": 0.5},
    {"reward": "ig", "normalization": "joint"},
]


def test_each_method_has_advantages_of_its_own(monkeypatch, tmp_path):
    options = {"num_generations": 8}
    found = [advantages_of(monkeypatch, tmp_path / str(i), **options | values) for i, values in enumerate(METHODS)]
    assert all(len(rows) == 16 for rows in found)
    assert len({json.dumps(rows) for rows in found}) == len(METHODS)
    assert [len({len(row) for row in rows}) for rows in found] == [1] * len(METHODS), "the same episodes"
    for row in found[1]:
        assert len({x for x in row if x}) <= 1, "GRPO: one advantage for a whole episode"
    assert any(len({x for x in row if x}) > 1 for row in found[0])


SWITCHES = [
    {"reward": "f1"},
    {"reward": "ig", "information_gain": "prob"},
    {"information_gain": "prob", "normalization": "joint"},
    {"gamma": 0.0, "format_penalty": 0.0},
    {"max_turns": 1},
    {"max_completion_length": 4},  # too short for a turn
    {"hops": (4,), "max_turns": 6, "loss_type": "dapo", "delta": 3.0, "num_iterations": 2},
    {"beta": 0.04, "use_bias_correction_kl": True},
    {"gradient_checkpointing": True, "bf16": True, "loss_type": "dr_grpo", "epsilon_high": 0.28},
]


@pytest.mark.parametrize("values", SWITCHES, ids=lambda values: " ".join(as_flags(values)))
def test_switches_log_finite_metrics(values, tmp_path, recwarn):
    metrics = train_here(tmp_path / "run", eval_steps=0, **values)
    assert all(math.isfinite(value) for value in metrics.values()), metrics
    assert not [str(warning.message) for warning in recwarn if issubclass(warning.category, UserWarning)]
    turns = last(metrics, "train/igpo/turns")
    if "max_completion_length" in values:
        assert turns == 1 and last(metrics, "train/completions/clipped_ratio") == 1
        assert last(metrics, "train/reward") == -2 and last(metrics, "train/grad_norm") == 0
        assert last(metrics, "train/igpo/frac_no_signal") == 1 and last(metrics, "train/frac_tokens_trained") == 0
    elif "max_turns" in values:
        assert turns == 1 or turns > 2 and values["max_turns"] > 1
    else:
        assert 1 < turns <= Args.max_turns and last(metrics, "train/grad_norm") > 0


NEUTRAL = [{"per_device_train_batch_size": 1}, {"max_packed_length": 128}, {"skip_equal_groups": False}]


@pytest.mark.parametrize("values", NEUTRAL, ids=lambda values: " ".join(as_flags(values)))
def test_switches_that_change_nothing(values, one_step, tmp_path):
    metrics = [train_here(tmp_path / "run", **values, eval_steps=0), table(one_step)]
    kept = [{key: x for key, x in found.items() if key[1][:4] != "eval"} for found in metrics]
    if "skip_equal_groups" in values:  # which this tag is about
        kept = [{key: x for key, x in found.items() if "frac_tokens" not in key[1]} for found in kept]
    assert_close(*kept, 1e-4, 1e-5)
    assert_nearly_same_weights(tmp_path / "run", one_step)


def test_no_steps_only_evaluates(tmp_path):
    metrics = train_here(tmp_path / "run", max_steps=0)
    assert {step for step, _ in metrics} == {0} and all(tag.startswith("eval/") for _, tag in metrics)
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()


# --- Questions from a file, a retrieval server -----------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch):
    """A retrieval server that searches in the world."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.server.requests.append(request)
            rows = [world().search(query, request["topk"]) for query in request["queries"]]
            rows = [[{"document": {"contents": f'"{text.split(chr(39))[0]}"\n{text}'}} for text in row] for row in rows]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"result": rows}).encode())

        def log_message(self, *args):
            pass

    monkeypatch.setenv("no_proxy", "*")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.requests, server.url = [], f"http://127.0.0.1:{server.server_port}/retrieve"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def test_dataset_and_retrieval_server(tmp_path, server):
    task = load_task(Args(hops=(1,)))
    problems = [task.train_problem(i, 1) for i in range(12)]
    lines = [{"question": problem.question, "golden_answers": [*problem.answers, "nobody"]} for problem in problems]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = {"dataset": str(tmp_path / "questions.jsonl"), "retriever_url": server.url}
    metrics = train_here(tmp_path / "run", **given)
    assert metrics[1, "train/igpo/turns"] > 1 and {(1, "eval/pass_at_1"), (0, "eval/turns")} <= metrics.keys()
    assert {request["topk"] for request in server.requests} == {3}
    assert max(len(request["queries"]) for request in server.requests) > 2, "one batch of searches a turn"
    scores = igpo.train(Args(evaluate=str(tmp_path / "run"), device="cpu"))
    assert scores == {tag: value for (step, tag), value in metrics.items() if step == 1 and tag in scores}


def test_server_and_world_search_alike(tmp_path, server, one_step):
    """The world's own questions, answered by a server that knows the same facts: the same run."""
    assert train_here(tmp_path / "run", retriever_url=server.url) == table(one_step)
    assert_same_run(tmp_path / "run", one_step)
    assert server.requests


# --- Bad input -------------------------------------------------------------------------------------------------------

BAD_FLAGS = [  # flags, parts of the sentence
    ({"max_turns": 0}, ["--max-turns 0", "1 or more"]),
    ({"gamma": -0.1}, ["--gamma -0.1", "0 or more"]),
    ({"gamma": math.nan}, ["--gamma nan"]),
    ({"hops": (5,)}, ["hops from 1 to 4"]),
    ({"hops": ()}, ["hops from 1 to 4"]),
    ({"num_generations": 1}, ["--num-generations 1", "2 or more"]),
    ({"num_prompts_per_step": 0}, ["--num-prompts-per-step 0", "1 or more"]),
    ({"per_device_train_batch_size": 6}, ["--per-device-train-batch-size 6", "--num-generations 4"]),
    ({"temperature": 0.0}, ["--temperature 0.0", "1e-06 or more"]),
    ({"fsdp": True}, ["--fsdp", "torchrun"]),
    ({"model_name_or_path": "no/such/folder"}, ["no/such/folder", "not found"]),
    ({"dataset": "no/such.jsonl"}, ["no/such.jsonl", "--retriever-url"]),
    ({"dataset": "no/such.jsonl", "retriever_url": "http://127.0.0.1:1/x"}, ["no/such.jsonl", "cannot be read"]),
    ({"retriever_url": "somewhere"}, ["retriever url", "somewhere"]),
]


@pytest.mark.parametrize("values, words", BAD_FLAGS, ids=lambda value: " ".join(value))
def test_bad_flags_get_one_sentence(values, words, capsys, tmp_path):
    errors = refusal(capsys, output_dir=str(tmp_path / "run"), **values)
    assert all(word in errors for word in words), errors
    assert not (tmp_path / "run").exists(), "nothing is left of a run that never began"


def test_choices_are_refused_by_the_command():
    process = fork(SCRIPT, "--reward", "f2")
    assert process.returncode == 2 and "f1+ig" in process.stderr and "Traceback" not in process.stderr


def test_a_folder_of_another_script(tmp_path, capsys):
    (tmp_path / "args.json").write_text(json.dumps({"model_name_or_path": None, "top_p": 1.0}))
    for flag in ("resume", "evaluate"):
        assert f"{tmp_path}: not a run folder of this script" in refusal(capsys, **{flag: str(tmp_path)})


# --- Learning --------------------------------------------------------------------------------------------------------


def test_learning(tmp_path):
    """A short run of the default task: the share of right answers rises."""
    values = {"num_prompts_per_step": 8, "num_generations": 8, "max_completion_length": 64, "learning_rate": 4e-4}
    metrics = train_here(tmp_path / "run", **values, max_steps=7, eval_problems=32, num_generations_eval=2)
    # Seeds 1 to 3: +0.125, 0.203, 0.094; seed 1 with advantages negated: -0.234, which is down to 0. With 10 steps
    # seeds 1 to 5: 0.164 to 0.422; seeds 1 to 3 with advantages dealt out to other episodes: +0.016, -0.148, -0.070.
    assert metrics[7, "eval/mean_at_2"] - metrics[0, "eval/mean_at_2"] > 0.05
