"""What people use every day: minibatches, schedules, weight decay, exports, SIGTERM, wandb, answers of evaluations."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import language_runs
import pytest
import torch
import transformers
from language_runs import assert_same_run, completions, evaluation_answers, numbers, train
from processes import ENVIRONMENT, ROOT
from run_folders import command
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_grpo import ADVANTAGES, BASE, G, some_batch, tiny_model

from algorithms import (
    advantage_alignment,
    ampo,
    arpo,
    critic_search,
    dapo,
    dipllm,
    dr_mas,
    empg,
    gdpo,
    grpo,
    hpt,
    igpo,
    nash_preference,
    opd,
    pi_play,
    spiral_rae,
    unlikeliness,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SMALL = language_runs.SMALL
OWN = {
    dr_mas: {"max_rounds": 2},
    pi_play: {"num_documents_per_step": 2, "num_answers": 2, "examiner_steps": 1, "student_steps": 1},
}
FLAGS = {s: SMALL | OWN.get(s, {}) for s in (grpo, dapo, gdpo, hpt, ampo, opd, unlikeliness, nash_preference, igpo, critic_search, empg, arpo, pi_play, dr_mas)}
FLAGS[spiral_rae] = {key: SMALL[key] for key in ("eval_steps", "save_steps", "max_completion_length")}
FLAGS[spiral_rae] |= {"games": ("kuhn",), "num_games_per_step": 4}
FLAGS[dipllm] = {"eval_steps": 0, "save_steps": 0, "num_games_per_step": 1, "search_steps": 20}
FLAGS[advantage_alignment] = FLAGS[spiral_rae] | {"games": ("ipd",), "max_completion_length": 8}


def weights(model) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_a_step_for_each_minibatch_with_ratios_to_the_model_before_the_first():
    """Every second group, then the others, twice: the same four steps written out."""
    model, by_hand = tiny_model(0), tiny_model(0)
    batch = some_batch(model)
    args = replace(BASE, num_minibatches=2, num_iterations=2, epsilon=1e-3, loss_type="grpo", beta=0.0, max_grad_norm=0)
    metrics = grpo.update(model, None, torch.optim.SGD(model.parameters(), 0.1), batch, ADVANTAGES, args)
    optimizer = torch.optim.SGD(by_hand.parameters(), 0.1)
    old = None
    for part in (0, 1, 0, 1):
        packed = grpo.pack(batch, [[row] for row in range(6 * G)], "cpu")
        logprobs = by_hand.token_logprobs(packed, args)
        old = logprobs.detach() if old is None else old
        losses, _ = grpo.policy_loss(logprobs, old, ADVANTAGES[packed.completion_index], epsilon=1e-3)
        own = packed.completion_index // G % 2 == part
        optimizer.zero_grad()
        lengths = torch.tensor([len(completion.ids) for completion in batch])[packed.completion_index]
        (losses / lengths)[own].sum().div(3 * G).backward()
        optimizer.step()
    torch.testing.assert_close(weights(model), weights(by_hand), rtol=1e-4, atol=1e-6)
    assert metrics["clip_ratio"] > 0.1, "the second part is behind a step"


@pytest.mark.parametrize("script", [dapo, igpo, dr_mas], ids=lambda s: s.__name__[11:])
def test_minibatches_take_other_steps_on_the_same_batch(script, tmp_path):
    values = FLAGS[script] | {"num_iterations": 1, "epsilon": 1e-6, "learning_rate": 1e-2, "warmup_steps": 0}
    values |= {"num_prompts_per_step": 8, "env": "countdown"} if script is dr_mas else {}  # a reward that is not 0
    one = train(script, tmp_path / "one", **values)
    two = train(script, tmp_path / "two", **values, num_minibatches=2)
    assert completions(tmp_path / "one") == completions(tmp_path / "two")
    clipped = [tag for _, tag in one if tag.endswith("clip_ratio") and "sampling" not in tag]
    assert clipped and all(one[1, tag] == 0 for tag in clipped) and any(two[1, tag] > 0 for tag in clipped)


def test_minibatches_by_two_processes(tmp_path):
    values = SMALL | {"num_prompts_per_step": 4, "num_minibatches": 2, "epsilon": 1e-4, "max_steps": 1}
    language_runs.two_processes_equal_one(grpo, tmp_path, **values)
    assert numbers(tmp_path / "one")[1, "train/clip_ratio"] > 0


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_schedules_are_those_of_transformers(kind):
    args = grpo.Args(lr_scheduler_type=kind, warmup_steps=4, max_steps=20, learning_rate=3e-4)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=3e-4)
    name = "constant_with_warmup" if kind == "constant" else kind
    theirs = transformers.get_scheduler(name, optimizer, 4, 20)
    expected = []
    for _ in range(20):
        expected.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    found = [grpo.scheduled_rate(step, args) for step in range(20)]
    assert found[4:] == pytest.approx(expected[4:])
    assert found[:4] == pytest.approx([3e-4 * step / 4 for step in (1, 2, 3, 4)]), "theirs wastes step 0"


@pytest.mark.parametrize("script", FLAGS, ids=lambda script: script.__name__[11:])
def test_every_script_has_them(script, tmp_path):
    """The rate falls, weights decay, the model after step 1 is exported, and that of step 2 is the final one."""
    values = {"max_steps": 2, "lr_scheduler_type": "linear", "warmup_steps": 0, "export_steps": 1}
    values |= {"learning_rate": 1e-6, "weight_decay": 1e5}  # so Adam moves a weight by much less than decay
    found = train(script, tmp_path / "run", **FLAGS[script] | values)
    rates = sorted(value for (_, tag), value in found.items() if tag.endswith("learning_rate"))
    assert rates == pytest.approx([5e-7, 1e-6])
    models = sorted((tmp_path / "run").rglob("*.safetensors"))
    final = [path.read_bytes() for path in models if "final" in path.parts]
    assert final and final == [path.read_bytes() for path in models if "step_00000002" in path.parts]
    exported = [path for path in models if "step_00000001" in path.parts]
    assert len(exported) == len(final)
    if script not in (dr_mas, pi_play):
        before = load_file(Path(script.model_path(script.Args()), "model.safetensors"))
        after = load_file(exported[0])
        norms = [math.sqrt(sum(w.square().sum().item() for w in model.values())) for model in (before, after)]
        steps = math.log(norms[1] / norms[0], 0.9)  # each takes a tenth away
        assert steps >= 0.99 and steps == pytest.approx(round(steps), abs=0.01)


@pytest.mark.quick
@pytest.mark.parametrize("script", [grpo, dapo, gdpo], ids=lambda script: script.__name__[11:])
def test_another_clip_range_above(script, monkeypatch, tmp_path):
    given = []
    loss = script.policy_loss
    monkeypatch.setattr(script, "policy_loss", lambda *words, **named: given.append(named) or loss(*words, **named))
    train(script, tmp_path / "run", **SMALL, epsilon=0.1, epsilon_high=0.3)
    assert {(named["epsilon"], named["epsilon_high"]) for named in given} == {(0.1, 0.3)}


LONG = SMALL | {"max_steps": 4, "save_steps": 2, "eval_steps": 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    train(grpo, run_dir, **LONG)
    return run_dir


def test_answers_of_evaluations_can_be_read(whole):
    answers = evaluation_answers(whole)
    assert [row["step"] for row in answers] == [0] * 4 + [2] * 4 + [4] * 4
    for step in (0, 2, 4):
        rewards = [row["reward"] for row in answers if row["step"] == step]
        assert sum(rewards) / 4 == pytest.approx(numbers(whole)[step, "eval/greedy"])
    assert len({row["prompt"] for row in answers}) == 4 and all(row["turns"][0] for row in answers)


def test_flags_stand_in_tensorboard(whole):
    board = EventAccumulator(str(whole), size_guidance={"tensors": 0}).Reload()
    (event,) = board.Tensors("hyperparameters/text_summary")
    assert "|num_prompts_per_step|2|" in event.tensor_proto.string_val[0].decode()


def test_a_resume_that_trains_nothing_does_not_shorten_the_run(whole, monkeypatch, capsys):
    before = (whole / "args.json").read_text()
    command(grpo, monkeypatch, "--resume", whole, "--max-steps", 2)
    assert "continues after step 4" in capsys.readouterr().out
    assert (whole / "args.json").read_text() == before
    command(grpo, monkeypatch, "--resume", whole, "--max-steps", 5)
    assert json.loads((whole / "args.json").read_text())["max_steps"] == 5


def test_sigterm_under_torchrun_leaves_a_checkpoint(tmp_path):
    """Of the scheduler and of torchrun: twice here, and in one process only. The other one stops after the same step."""
    flags = language_runs.as_flags(SMALL | {"max_steps": 60})
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2]
    words += [ROOT / "algorithms" / "grpo.py", *flags, "--output-dir", tmp_path / "run"]
    process = subprocess.Popen(list(map(str, words)), stdout=-1, stderr=-2, text=True, env=ENVIRONMENT)
    try:
        for line in process.stdout:
            if line.startswith("step "):
                *_, worker = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                for _ in range(2):
                    os.kill(int(worker), signal.SIGTERM)
                    time.sleep(0.05)
                break
        output, _ = process.communicate(timeout=120)
    finally:
        process.terminate()  # and with it its workers, should they wait for each other
    (done, *_) = re.findall(r"stopped by SIGTERM after step (\d+)", output)
    found = [path.parent.name for path in (tmp_path / "run" / "checkpoints").glob("*/.metadata")]
    assert found == [f"step_{int(done):08d}"]


def test_sigterm_leaves_a_checkpoint(tmp_path):
    values = SMALL | {"max_steps": 60}
    flags = language_runs.as_flags(values)
    words = [sys.executable, ROOT / "algorithms" / "grpo.py", *flags, "--output-dir", tmp_path / "run"]
    process = subprocess.Popen(list(map(str, words)), stdout=-1, stderr=-1, text=True, env=ENVIRONMENT)
    for line in process.stdout:
        if line.startswith("step "):
            process.send_signal(signal.SIGTERM)
            break
    _, errors = process.communicate(timeout=120)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    done = int(checkpoint.name.removeprefix("step_"))
    assert process.returncode == 1 and 1 <= done < 60
    assert errors.strip().endswith(f"stopped by SIGTERM after step {done}: go on with --resume {tmp_path / 'run'}")
    with pytest.MonkeyPatch.context() as patch:
        command(grpo, patch, "--resume", tmp_path / "run", "--max-steps", done + 2)
    train(grpo, tmp_path / "whole", **values | {"max_steps": done + 2})
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.quick
def test_track_sends_what_tensorboard_gets(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(SystemExit, match="^--track: .*; pip install wandb$"):
        train(grpo, tmp_path / "none", **SMALL, track=True)
    began = []
    fake = types.SimpleNamespace(init=lambda **named: began.append(named))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    train(grpo, tmp_path / "run", **SMALL, track=True)
    (named,) = began
    assert named["sync_tensorboard"] is True and named["config"]["num_generations"] == 4
    assert named["name"] == "run" and named["dir"] == str(tmp_path / "run")
