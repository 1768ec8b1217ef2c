"""pi-Play as people run it: files, logs, crashes in either phase, two processes, switches, a retrieval server."""

import http.server
import json
import math
import os
import re
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
import transformers
import tyro
from processes import ROOT, as_flags, begin_and_interrupt, fork, interrupt, train_by_two
from run_folders import (
    SMALL,
    assert_close,
    assert_same_run,
    documented_tags,
    events,
    table,
    tag_matches,
)
from safetensors.torch import load_file

from algorithms import pi_play
from algorithms.pi_play import Args
from envs.search_qa import SearchQA, world

SCRIPT, PAGE = ROOT / "algorithms" / "pi_play.py", ROOT / "algorithms" / "pi_play.md"
SMALL = SMALL | {"num_prompts_per_step": 2, "num_documents_per_step": 4, "num_answers": 2, "eval_problems": 4}
SMALL |= {"examiner_steps": 1, "student_steps": 2, "device": "cpu"}
LONG = SMALL | {"max_steps": 6, "save_steps": 1, "eval_steps": 3, "lambda_schedule": (0.5, 0.25)}
EXAMINER, STUDENT = (1, 4), (2, 3, 5, 6)  # steps of the two roles in LONG, numbered as in its log
RATE = Args.learning_rate


# --- Means -----------------------------------------------------------------------------------------------------------


def train_here(run_dir, **values) -> dict[tuple[int, str], float]:
    """train() in this process with small settings, a step of each role; its metrics."""
    defaults = {**SMALL, "max_steps": 2, "student_steps": 1, "output_dir": str(run_dir)}
    pi_play.train(Args(**defaults | values))
    return table(run_dir)


def refusal(capsys, **values) -> str:
    """The one sentence with which train() refuses these flags."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        pi_play.train(Args(**{**SMALL, "max_steps": 1, **values}))
    errors = capsys.readouterr().err
    assert stopped.value.code == 2 and errors.startswith("error: ") and errors.count("\n") == 1, errors
    return errors


def assert_same_pi_play_run(run_dir, other) -> None:
    """To the bit, the examiner too."""
    assert_same_run(run_dir, other)
    ours, theirs = (Path(folder, "final", "examiner", "model.safetensors") for folder in (run_dir, other))
    assert ours.read_bytes() == theirs.read_bytes()


def assert_nearly_same_weights(run_dir, other) -> None:
    """As in run_folders.py: where the gradient is rounding noise AdamW's first step may go either way."""
    for place in ("final", "final/examiner"):
        ours, theirs = (load_file(Path(folder, place, "model.safetensors")) for folder in (run_dir, other))
        assert ours.keys() == theirs.keys()
        difference = torch.cat([(ours[name] - theirs[name]).abs().flatten() for name in ours])
        assert difference.max() <= 4 * RATE and difference.mean() < 1e-7, (difference.max(), difference.mean())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder and process of two uninterrupted rounds of an examiner step and two student steps."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    process = fork(SCRIPT, *as_flags(LONG), "--output-dir", run_dir)
    assert process.returncode == 0, process.stderr
    return run_dir, process


@pytest.fixture(scope="module")
def one_round(tmp_path_factory):
    """Folder of a step of each role by one process; what variants are compared with."""
    run_dir = tmp_path_factory.mktemp("runs") / "one"
    train_here(run_dir)
    return run_dir


# --- The command and what it leaves ----------------------------------------------------------------------------------


def test_command_and_its_files(whole):
    run_dir, process = whole
    assert not re.search("warning|traceback|error", process.stderr, re.IGNORECASE), process.stderr
    progress = [line for line in process.stdout.splitlines() if line.startswith("step")]
    assert len(progress) == 6 and max(map(len, progress)) <= 80
    assert [line.split()[2] for line in progress] == ["examiner", "student", "student"] * 2
    assert "<search>" in process.stdout and "<result>" in process.stdout and "<answer>" in process.stdout
    metrics, perf = table(run_dir), table(run_dir, "perf.csv")
    assert {step for step, tag in metrics if tag.startswith("eval/")} == {0, 3, 6}
    steps = {tag: tuple(step for step, name in metrics if name == tag) for _, tag in metrics}
    for tag in ("reward", "grad_norm", "pi_play/divergence", "pi_play/lambda", "pi_play/searches"):
        assert steps[f"train/{tag}"] == STUDENT
    for tag in ("reward", "grad_norm", "well_formed", "format", "pass_rate", "searches"):
        assert steps[f"train/pi_play/examiner/{tag}"] == EXAMINER
    assert steps["eval/pi_play/gate_with"] == steps["eval/pi_play/gate_without"] == (0,)
    assert all(math.isfinite(value) for value in metrics.values())
    assert not [tag for _, tag in metrics if tag.startswith("perf/")], "times differ from run to run"
    tokens = [value for (_, tag), value in sorted(metrics.items()) if tag.endswith("/num_tokens")]
    assert len(tokens) == 6 and all(before < after for before, after in zip(tokens, tokens[1:]))
    board = events(run_dir)
    logged = {(event.step, tag): event.value for tag in board.Tags()["scalars"] for event in board.Scalars(tag)}
    assert_close(logged, metrics | perf, relative=1e-6)
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == ["step_00000005.pt", "step_00000006.pt"]


def test_final_policies_load_and_score_the_same(whole, tmp_path):
    """The student and the examiner as any Hugging Face model; the student's score as at the end of its run."""
    before = load_file(Path(pi_play.TINY_MODELS, "search_qa", "model.safetensors"))
    weights = [before]
    for place in ("final", "final/examiner"):
        transformers.AutoModelForCausalLM.from_pretrained(whole[0] / place)
        assert transformers.AutoTokenizer.from_pretrained(whole[0] / place).chat_template
        weights.append(load_file(whole[0] / place / "model.safetensors"))
    for i, j in [(0, 1), (0, 2), (1, 2)]:
        assert max((weights[i][name] - weights[j][name]).abs().max() for name in before) > 1e-4
    values = {"model_name_or_path": str(whole[0] / "final"), "max_steps": 0}
    metrics = train_here(tmp_path / "scored", **values)
    expected = {tag: value for (step, tag), value in table(whole[0]).items() if step == 6 and tag.startswith("eval/")}
    scores = {tag: value for (step, tag), value in metrics.items() if "gate" not in tag}
    assert scores == expected and {step for step, _ in metrics} == {0}
    assert {"eval/pass_at_1", "eval/pass_at_2", "eval/mean_at_2", "eval/f1_mean_at_2", "eval/turns"} <= scores.keys()


def test_tags_are_those_of_the_page(tmp_path):
    metrics = train_here(tmp_path / "run", beta=0.04, num_generations_eval=8)
    texts = [tag.removesuffix("/text_summary") for tag in events(tmp_path / "run").Tags()["tensors"]]
    logged = {tag for _, tag in [*metrics, *table(tmp_path / "run", "perf.csv")]} | set(texts)
    documented = documented_tags(PAGE.read_text())
    assert {tag for tag in logged if not any(tag_matches(row, tag) for row in documented)} == set()
    assert {row for row in documented if not any(tag_matches(row, tag) for tag in logged)} == set()


# --- Rounds ----------------------------------------------------------------------------------------------------------

ROUNDS = [  # flags, the role of each step, lambda of the student's
    ({"student_steps": 2, "lambda_schedule": (0.5, 0.25)}, "ESSESS", [0.5, 0.5, 0.25, 0.25]),
    ({"lambda_schedule": (0.5, 0.25)}, "ESESES", [0.5, 0.25, 0.25]),
    ({"examiner_steps": 0, "lambda_schedule": (1.0, 0.0, 0.5)}, "SSSS", [1.0, 0.0, 0.5, 0.5]),
    ({"examiner_steps": 2, "privileged_context": "none"}, "EESEES", [0.0, 0.0]),
]


@pytest.mark.parametrize("values, roles, weights", ROUNDS, ids=lambda value: value if type(value) is str else "")
def test_roles_and_weights_of_the_steps(monkeypatch, tmp_path, values, roles, weights):
    """Who is trained at which step, on what, and with which lambda; the teacher follows the student's steps alone."""
    calls, loaded = [], []

    def keep(name, real):
        def spy(*given):
            result = real(*given)
            calls.append((name, given, result))
            return result

        monkeypatch.setattr(pi_play, name, spy)

    real = pi_play.load_model
    monkeypatch.setattr(pi_play, "load_model", lambda *given: loaded.append(real(*given)) or loaded[-1])
    monkeypatch.setattr(pi_play, "update", lambda *given: {"grad_norm": 0.0})
    for name in ("rollout", "examiner_rollout", "update", "update_teacher"):
        keep(name, getattr(pi_play, name))
    options = {"hops": (1,), "eval_steps": 0, "max_steps": len(roles)}
    metrics = train_here(tmp_path / "run", **options | values)
    student, examiner, teacher = loaded
    updates = [given for name, given, _ in calls if name == "update"]
    batches = [result for name, _, result in calls if name.endswith("rollout")]
    numbers = {name: [given[3] for kind, given, _ in calls if kind == name] for name in ("rollout", "examiner_rollout")}
    assert "".join("S" if given[0] is student else "E" if given[0] is examiner else "?" for given in updates) == roles
    assert [given[-1] for given in updates if given[0] is student] == weights
    assert [given[-1] for given in updates if given[0] is examiner] == [0.0] * roles.count("E")
    assert all(given[2] is batch and given[-2] is teacher for given, batch in zip(updates, batches))
    assert all(
        {id(p) for group in given[1].param_groups for p in group["params"]} == {*map(id, given[0].parameters())}
        for given in updates
    )
    order = "".join({"update": "u", "update_teacher": "t"}.get(name, "r") for name, *_ in calls)
    assert order == "".join("rut" if role == "S" else "ru" for role in roles)
    assert all(given[:2] == (teacher, student) for name, given, _ in calls if name == "update_teacher")
    assert [*map(list, numbers["rollout"])] == [[2 * i, 2 * i + 1] for i in range(roles.count("S"))], "each number once"
    assert [*map(list, numbers["examiner_rollout"])] == [[*range(4 * i, 4 * i + 4)] for i in range(roles.count("E"))]
    found = [metrics[step, "train/pi_play/lambda"] for step, role in enumerate(roles, 1) if role == "S"]
    assert found == weights and len([tag for _, tag in metrics if tag == "train/pi_play/lambda"]) == roles.count("S")
    assert not any(parameter.requires_grad for parameter in teacher.parameters())


def test_teacher_follows_and_the_other_role_rests(tmp_path):
    """Weights after an examiner step, and after a student step: eq. 11."""
    train_here(tmp_path / "run", save_steps=1, eval_steps=0, num_documents_per_step=8)
    names = ("step_00000001.pt", "step_00000002.pt")
    first, second = (torch.load(tmp_path / "run" / "checkpoints" / name, weights_only=True) for name in names)
    before = load_file(Path(pi_play.TINY_MODELS, "search_qa", "model.safetensors"))

    def distance(one, other):
        return max((one[name] - other[name]).abs().max().item() for name in before)

    assert (
        distance(first["student"], before)
        == distance(first["teacher"], before)
        == 0
        < distance(first["examiner"], before)
    )
    assert distance(second["examiner"], first["examiner"]) == 0
    moved = distance(second["student"], before)
    expected = {name: 0.95 * before[name] + 0.05 * second["student"][name] for name in before}
    assert moved > 1e-4 and distance(second["teacher"], expected) < 1e-6 < 1e-2 * moved
    assert distance(second["teacher"], before) == pytest.approx(0.05 * moved, rel=0.02)
    assert first["progress"] == {"step": 1, "student": 0, "examiner": 8, "tokens": first["progress"]["tokens"]}
    assert second["progress"]["student"] == 2 and second["progress"]["examiner"] == 8


# --- Determinism and resuming ----------------------------------------------------------------------------------------


def test_same_seed_same_run_other_seed_another(whole, tmp_path):
    values = LONG | {"max_steps": 2, "eval_steps": 100}  # here, not in a process of its own; resuming repeats the rest
    again, expected = train_here(tmp_path / "again", **values), table(whole[0])
    same = {key for key in expected if key[0] == 0 or key[0] <= 2 and key[1].startswith("train/")}
    assert {key: again[key] for key in same} == {key: expected[key] for key in same} and len(same) > 20
    other = train_here(tmp_path / "other", seed=2, eval_steps=0)
    assert other[2, "train/pi_play/divergence"] != table(whole[0])[2, "train/pi_play/divergence"]


def test_kill_9_in_either_phase_and_resume(whole, tmp_path):
    """Killed as soon as a step is logged, so in the next: an examiner's, and after resuming a student's."""
    run_dir = tmp_path / "run"
    assert begin_and_interrupt(signal.SIGKILL, "step    3/", SCRIPT, run_dir, **LONG)[0] == -signal.SIGKILL
    assert interrupt(signal.SIGKILL, "step    4/", SCRIPT, "--resume", run_dir)[0] == -signal.SIGKILL
    pi_play.train(Args(resume=str(run_dir), device="cpu"))
    assert_same_pi_play_run(run_dir, whole[0])


@pytest.mark.parametrize("step", [3, 4], ids=["in a phase of the examiner", "in a phase of the student"])
def test_terminate_saves_and_resumes(whole, tmp_path, monkeypatch, capsys, step):
    """A signal in the step after this one, which is finished and saved."""
    number, real = iter(range(6)), pi_play.compute_advantages

    def compute_advantages(*given):
        if next(number) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*given)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(pi_play, "compute_advantages", compute_advantages)
        train_here(tmp_path / "run", **LONG | {"save_steps": 100})
    sentence = f"error: stopped after step {step + 1}; continue with --resume {tmp_path}/run\n"
    assert stopped.value.code == 128 + signal.SIGTERM and capsys.readouterr().err == sentence
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step_{step + 1:08d}.pt"]
    pi_play.train(Args(resume=str(tmp_path / "run"), device="cpu"))
    assert_same_pi_play_run(tmp_path / "run", whole[0])


def test_resume_from_an_older_checkpoint(whole, tmp_path, capsys):
    shutil.copytree(whole[0], tmp_path / "run")
    sentence = refusal(capsys, **LONG, resume=str(tmp_path / "run"), privileged_context="answer")
    assert "the run began with --privileged-context qcp, not answer" in sentence
    (tmp_path / "run" / "checkpoints" / "step_00000006.pt").unlink()
    pi_play.train(Args(resume=str(tmp_path / "run"), device="cpu"))
    assert_same_pi_play_run(tmp_path / "run", whole[0])


# --- Several processes -----------------------------------------------------------------------------------------------

VARIANTS = {  # trained by two processes, and by one
    "plain": {"num_documents_per_step": 8},
    "uneven": {"hops": (1, 3), "loss_type": "grpo", "divergence": "jsd", "distill_top_k": 20, "eval_steps": 0},
    "control": {"privileged_context": "none", "examiner_steps": 0, "beta": 0.04, "eval_steps": 0},
}


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Folder with the runs of VARIANTS by two processes."""
    folder = tmp_path_factory.mktemp("two")
    runs = [
        {**SMALL, "max_steps": 2, "student_steps": 1, "output_dir": str(folder / name), **VARIANTS[name]}
        for name in VARIANTS
    ]
    train_by_two(folder, "pi_play", runs)
    return folder


@pytest.mark.parametrize("name", VARIANTS)
def test_two_processes_equal_one(two_processes, name, tmp_path):
    assert (two_processes / name / "final").exists(), (two_processes / "stderr").read_text()
    expected, found = train_here(tmp_path / "one", **VARIANTS[name]), table(two_processes / name)
    assert_close(found, expected, relative=1e-4)
    exact = ("reward", "num_tokens", "turns", "max_length", "well_formed", "pass_rate")
    for key in expected:
        if key[1].endswith(exact) and not key[1].startswith("eval"):
            assert found[key] == pytest.approx(expected[key], abs=1e-7), "the same questions and the same texts"
    assert_nearly_same_weights(two_processes / name, tmp_path / "one")


# --- Switches --------------------------------------------------------------------------------------------------------

SWITCHES = [
    {"privileged_context": "partial", "divergence": "forward_kl"},
    {"privileged_context": "answer", "divergence": "jsd", "distill_top_k": 8},
    {"privileged_context": "none"},
    {"distill_top_k": 32, "top_p": 0.9, "mask_special_tokens": True},
    {"distill_top_k": 1, "teacher_tau": 1.0},
    {"max_turns": 2, "hops": (1,), "examiner_steps": 0},
    {"hops": (4,), "max_turns": 6, "loss_type": "grpo", "lambda_schedule": (0.0,)},
    {"beta": 0.04, "loss_type": "bnpo"},
    {"gradient_checkpointing": True, "bf16": True, "loss_type": "dr_grpo"},
]


@pytest.mark.parametrize("values", SWITCHES, ids=lambda values: " ".join(as_flags(values)))
def test_switches_log_finite_metrics(values, tmp_path, recwarn):
    metrics = train_here(tmp_path / "run", eval_steps=0, **values)
    assert all(math.isfinite(value) for value in metrics.values()), metrics
    assert not [str(warning.message) for warning in recwarn if issubclass(warning.category, UserWarning)]
    distance, turns = metrics.get((2, "train/pi_play/divergence")), metrics[2, "train/pi_play/turns"]
    if values.get("privileged_context") == "none" or "lambda_schedule" in values:
        assert distance is None and metrics[2, "train/pi_play/lambda"] == 0
    elif values.get("distill_top_k") == 1:
        assert distance == 0 and metrics[2, "train/frac_tokens_trained"] == 1
    else:
        assert distance > 1e-3 and metrics[2, "train/grad_norm"] > 1e-3
    assert 1 <= turns <= values.get("max_turns", Args.max_turns)


@pytest.mark.parametrize("kind", ["divergence", "privileged_context"])
def test_each_choice_is_another_method(one_round, tmp_path, kind):
    """The same episodes, another step."""
    others = {"divergence": ["forward_kl", "jsd"], "privileged_context": ["partial", "answer", "none"]}[kind]
    found = [table(one_round)]
    for other in others:
        found.append(train_here(tmp_path / other, eval_steps=0, **{kind: other}))
    for tag in ("train/reward", "train/num_tokens", "train/pi_play/examiner/reward"):
        assert len({metrics[1 + (tag.count("/") == 1), tag] for metrics in found}) == 1
    assert len({metrics[2, "train/grad_norm"] for metrics in found}) == len(found)


NEUTRAL = [{"per_device_train_batch_size": 1}, {"max_packed_length": 128}, {"gradient_checkpointing": True}]


@pytest.mark.parametrize("values", NEUTRAL, ids=lambda values: " ".join(as_flags(values)))
def test_switches_that_change_nothing(values, one_round, tmp_path):
    metrics = [train_here(tmp_path / "run", **values, eval_steps=0), table(one_round)]
    kept = [{key: x for key, x in found.items() if key[1][:4] != "eval"} for found in metrics]
    assert_close(*kept, 1e-4, 1e-5)
    assert_nearly_same_weights(tmp_path / "run", one_round)


def test_an_examiner_that_writes_nothing_well_formed(tmp_path, capsys):
    """Turns of four tokens: one sentence, and the checkpoints stay."""
    with pytest.raises(SystemExit) as stopped:
        train_here(tmp_path / "run", max_completion_length=4, eval_steps=0, save_steps=1)
    errors = capsys.readouterr().err
    assert stopped.value.code == 1 and errors.count("\n") == 1 and "no well-formed questions" in errors
    assert table(tmp_path / "run")[1, "train/pi_play/examiner/well_formed"] == 0
    assert table(tmp_path / "run")[1, "train/pi_play/examiner/frac_tokens_trained"] == 0
    assert (tmp_path / "run" / "checkpoints" / "step_00000001.pt").exists()


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


def test_dataset_and_retrieval_server(tmp_path, server, monkeypatch):
    """The file gives evaluation questions and first documents, never a question to train on."""
    task, asked, real = SearchQA(hops=(1,)), [], pi_play.draw_problems
    problems = [task.train_problem(i, 1) for i in range(12)]
    lines = [{"question": problem.question, "golden_answers": [*problem.answers, "nobody"]} for problem in problems]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(pi_play, "draw_problems", lambda *given: asked.extend(found := real(*given)) or found)
    given = {"dataset": str(tmp_path / "questions.jsonl"), "retriever_url": server.url}
    metrics = train_here(tmp_path / "run", **given)
    assert {(2, "train/pi_play/divergence"), (2, "eval/pass_at_1"), (0, "eval/pi_play/gate_with")} <= metrics.keys()
    assert len(asked) == 2 and all(problem.answers[1:] == () for problem in asked), "none is of the file"
    assert {request["topk"] for request in server.requests} == {3}
    queries = [query for request in server.requests for query in request["queries"]]
    assert {problem.question for problem in problems} & set(queries), "documents that a question of the file finds"


def test_server_and_world_search_alike(tmp_path, server, one_round):
    """The world's own questions, searched by a server that knows the same facts: the same run."""
    assert train_here(tmp_path / "run", retriever_url=server.url) == table(one_round)
    assert_same_pi_play_run(tmp_path / "run", one_round)
    assert server.requests


# --- Bad input -------------------------------------------------------------------------------------------------------

BAD_FLAGS = [  # flags, parts of the sentence
    ({"lambda_schedule": ()}, ["--lambda-schedule ()"]),
    ({"lambda_schedule": (1.0, -0.1)}, ["--lambda-schedule (1.0, -0.1)", "0 or more"]),
    ({"lambda_schedule": (1.0, math.nan)}, ["--lambda-schedule (1.0, nan)"]),
    ({"teacher_tau": 1.5}, ["--teacher-tau 1.5", "at most 1"]),
    ({"teacher_tau": -0.5}, ["--teacher-tau -0.5", "0 or more"]),
    ({"teacher_tau": math.nan}, ["--teacher-tau nan"]),
    ({"distill_top_k": 0}, ["--distill-top-k 0", "1 or more"]),
    ({"examiner_steps": -1}, ["--examiner-steps -1", "0 or more"]),
    ({"student_steps": 0}, ["--student-steps 0", "1 or more"]),
    ({"num_answers": 1}, ["--num-answers 1", "2 or more"]),
    ({"num_documents_per_step": 0}, ["--num-documents-per-step 0", "1 or more"]),
    ({"num_generations": 1}, ["--num-generations 1", "2 or more"]),
    ({"top_p": 0.0}, ["--top-p 0.0"]),
    ({"top_p": 1.5}, ["--top-p 1.5", "at most 1"]),
    ({"temperature": 0.0}, ["--temperature 0.0"]),
    ({"max_turns": 0}, ["--max-turns 0", "1 or more"]),
    ({"hops": (5,)}, ["hops from 1 to 4"]),
    ({"per_device_train_batch_size": 6}, ["--per-device-train-batch-size 6", "--num-generations 4"]),
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


def test_bad_commands_exit_with_2(capsys):
    with pytest.raises(SystemExit) as stopped:
        tyro.cli(Args, args=["--divergence", "kl"])
    assert stopped.value.code == 2 and "reverse_kl" in capsys.readouterr().err
    process = fork(SCRIPT, "--num-answers", "1", "--device", "cpu")
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == "error: --num-answers 1: expected 2 or more, at most 2147483648\n"


@pytest.mark.parametrize("name", ["num_prompts_per_step", "num_documents_per_step"])
def test_work_is_divided_among_processes(monkeypatch, capsys, name):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "not divisible by the 2 processes" in refusal(capsys, **{name: 3})


def test_folders_that_are_no_runs(whole, tmp_path, capsys):
    (tmp_path / "args.json").write_text(json.dumps({"model_name_or_path": None, "gamma": 1.0}))
    assert f"{tmp_path}: not a run folder of this script" in refusal(capsys, resume=str(tmp_path))
    assert f"--output-dir {whole[0]}: holds a run already" in refusal(capsys, output_dir=str(whole[0]))


# --- Learning --------------------------------------------------------------------------------------------------------


def test_learning(tmp_path):
    """A step of the examiner and four of the student: right answers become many more, by the teacher."""
    values = {"num_prompts_per_step": 8, "num_generations": 4, "max_completion_length": 64, "learning_rate": 8e-4}
    values |= {"num_documents_per_step": 4, "num_answers": 5, "eval_problems": 24, "num_generations_eval": 4}
    metrics = train_here(tmp_path / "run", **values, student_steps=4, max_steps=5, eval_steps=100)
    # Seeds 1, 2, 3: +0.562, 0.552, 0.490. --privileged-context none: +0.094, 0.094, 0.104. The contexts of other
    # questions: +0.115, 0.219, 0.167. Advantages negated: +0.521, 0.417, 0.292, so here it is the teacher who counts.
    assert metrics[5, "eval/mean_at_4"] - metrics[0, "eval/mean_at_4"] > 0.35
    assert metrics[5, "train/pi_play/divergence"] < 0.5 * metrics[2, "train/pi_play/divergence"]
