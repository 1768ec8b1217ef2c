"""What the tests of the control scripts share: runs in this process, and one that is stopped and
continued."""

import re
import signal
from pathlib import Path

import pytest
import torch
from processes import ROOT, begin_and_interrupt
from run_folders import table
from torch.utils._pytree import tree_flatten


def column(metrics: dict, tag: str) -> list[float]:
    """Values of a tag, in the order of steps."""
    return [value for (_, name), value in metrics.items() if name == tag]


def train(script, run_dir, **values) -> dict[tuple[int, str], float]:
    """The metrics of a run with these flags."""
    script.train(script.Args(output_dir=str(run_dir), **values))
    return table(run_dir)


def refusal(script, capsys, code: int, **values) -> str:
    """The one sentence with which train() refuses these flags."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        script.train(script.Args(**values))
    errors = capsys.readouterr().err
    assert stopped.value.code == code and errors.startswith("error: "), errors
    assert errors.count("\n") == 1, errors
    return errors


def checkpoints(run_dir) -> list[Path]:
    return sorted(Path(run_dir, "checkpoints").glob("*.pt"))


def saved(run_dir) -> dict:
    """The newest checkpoint."""
    state = torch.load(checkpoints(run_dir)[-1])
    for simulator in state.get("environments", {}).get("simulators", []):
        simulator.pop("mujoco")  # its bytes have addresses and times among them
    return state


def assert_same_run(run_dir, other) -> None:
    """The same metrics, learners, games and random numbers to come, to the bit."""
    ours, theirs = (Path(folder, "metrics.csv").read_bytes() for folder in (run_dir, other))
    assert ours == theirs
    assert table(run_dir, "perf.csv").keys() == table(other, "perf.csv").keys()
    names, other_names = ([x.name for x in checkpoints(folder)] for folder in (run_dir, other))
    assert names == other_names and len(names) == 2
    (ours, structure), (theirs, other_structure) = map(tree_flatten, map(saved, (run_dir, other)))
    assert structure == other_structure
    for x, y in zip(ours, theirs):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


def stop_and_resume(script, number: int, step: int, whole, run_dir, capsys, values: dict) -> None:
    """A run that gets this signal after this step and goes on is `whole`, which was not stopped."""
    path = ROOT / "algorithms" / f"{script.__name__.rpartition('.')[2]}.py"
    text = f"step {step:>9,}/"
    status, errors = begin_and_interrupt(number, text, path, run_dir, **values)
    newest = max((int(file.stem[5:]) for file in checkpoints(run_dir)), default=0)
    if number == signal.SIGTERM:  # it finishes what it is doing, and saves
        sentence = f"error: stopped after step {newest}; continue with --resume {run_dir}\n"
        assert (status, errors) == (128 + number, sentence) and newest >= step
    else:
        assert status == -number and newest >= step - values["save_steps"]
    last = checkpoints(whole)[-1].name
    (run_dir / "checkpoints" / f"{last}.tmp").write_bytes(b"half a checkpoint")
    with open(run_dir / "metrics.csv", "a") as file:
        file.write(f"{int(last[5:-3])},losses/qf")  # half a row
    capsys.readouterr()
    script.train(script.Args(resume=str(run_dir)))
    printed = re.findall(r"^step +([\d,]+)/", capsys.readouterr().out, re.MULTILINE)
    assert int(printed[0].replace(",", "")) > newest, "a step is repeated"
    script.train(script.Args(resume=str(run_dir)))  # of a finished run: changes nothing
    assert_same_run(run_dir, whole)
