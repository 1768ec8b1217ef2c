"""What the tests of the control scripts share: runs in this process, and one that is killed and continued."""

from pathlib import Path

import torch
from processes import as_flags, kill_at
from run_folders import command, metrics, name_of
from run_folders import refusal as refusal  # the tests of the control scripts find it here
from torch.utils._pytree import tree_flatten


def column(metrics: dict, tag: str) -> list[float]:
    """Values of a tag, in the order of steps."""
    return [value for (_, name), value in metrics.items() if name == tag]


def train(script, run_dir, **values) -> dict[tuple[int, str], float]:
    """The metrics of a run with these flags, but for what the clock says."""
    script.train(script.Args(output_dir=str(run_dir), **values))
    return results(run_dir)


def results(run_dir) -> dict[tuple[int, str], float]:
    """The metrics of a run without seconds and speed; of a step that was repeated, the last row counts."""
    rows = metrics(run_dir).items()
    return {key: float(value) for key, value in rows if key[1] != "charts/SPS"}


def checkpoints(run_dir) -> list[Path]:
    return sorted(Path(run_dir, "checkpoints").glob("*.pt"))


def assert_same_run(run_dir, other) -> None:
    """The same metrics, learners and replays, to the bit."""
    assert results(run_dir) == results(other)
    names, other_names = ([x.name for x in checkpoints(folder)] for folder in (run_dir, other))
    assert names == other_names and len(names) == 2
    states = [torch.load(checkpoints(folder)[-1]) for folder in (run_dir, other)]
    (ours, structure), (theirs, other_structure) = map(tree_flatten, states)
    assert structure == other_structure
    for x, y in zip(ours, theirs):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


def kill_and_resume(script, number: int, whole, run_dir, monkeypatch, values: dict) -> None:
    """A run that is killed when it logs for that time, and goes on, is `whole`, which was not stopped."""
    kill_at(run_dir.parent, name_of(script), "log", number, *as_flags(values), "--output-dir", run_dir)
    (run_dir / "checkpoints").mkdir(exist_ok=True)
    (run_dir / "checkpoints" / f"{checkpoints(whole)[-1].stem}.tmp").write_bytes(b"half a checkpoint")
    command(script, monkeypatch, "--resume", run_dir)
    assert_same_run(run_dir, whole)
