"""What the tests of several scripts use: a command line, reading a run, comparing two of them, the tags of pages."""

import re
import sys
from pathlib import Path

import pytest
import torch
from processes import ROOT, as_flags, fork
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TAG = re.compile(r"(train|eval|seconds|charts|losses)/[\w/<>@.-]+")


def name_of(script) -> str:
    return script.__name__.rpartition(".")[2]


def path_of(script) -> Path:
    return ROOT / "algorithms" / f"{name_of(script)}.py"


def begin(script, run_dir, **values) -> str:
    """What a run in a process of its own prints."""
    process = fork(path_of(script), *as_flags(values), "--output-dir", run_dir)
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    return process.stdout


def command(script, monkeypatch, *words):
    """`python script.py words` in this process."""
    monkeypatch.setattr(sys, "argv", ["script.py", *map(str, words)])
    return script.train(script.parse_args())


def refusal(script, monkeypatch, *words) -> str:
    """The one sentence with which a command line is refused."""
    with pytest.raises(SystemExit) as stopped:
        command(script, monkeypatch, *words)
    assert isinstance(stopped.value.code, str) and "\n" not in stopped.value.code
    return stopped.value.code


def metrics(run_dir) -> dict[tuple[int, str], str]:
    """(step, tag) -> value as it was written, without times; of a step that was repeated, the last row counts."""
    lines = Path(run_dir, "metrics.csv").read_text().splitlines()[1:]
    rows = [line.split(",") for line in lines]
    return {(int(step), tag): value for step, tag, value in rows if "seconds/" not in tag}


def tags(run_dir) -> set[str]:
    """All tags of a run, those of times too."""
    return {line.split(",")[1] for line in Path(run_dir, "metrics.csv").read_text().splitlines()[1:]}


def events(run_dir) -> dict[tuple[int, str], float]:
    """(step, tag) -> value as TensorBoard shows it."""
    board = EventAccumulator(str(run_dir), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    return {(event.step, tag): event.value for tag in board.Tags()["scalars"] for event in board.Scalars(tag)}


def assert_close(found: dict, expected: dict, relative: float = 1e-4, absolute: float = 1e-5) -> None:
    """`train/sampling/logprob_difference` is rounding and nothing else: there only its size, below 1e-4, is checked."""
    assert found.keys() == expected.keys()
    for (step, tag), value in expected.items():
        allowed = 1e-4 if tag.startswith("train/sampling/logprob_difference") else absolute
        assert found[step, tag] == pytest.approx(value, rel=relative, abs=allowed, nan_ok=True), (step, tag)


def final_models(run_dir) -> dict[str, Path]:
    """The trained models by their place in the folder; some scripts have several."""
    found = {path.relative_to(run_dir).as_posix(): path for path in Path(run_dir).rglob("final/**/*.safetensors")}
    assert found, "the run has not ended"
    return found


def assert_same_weights(run_dir, other) -> None:
    """AdamW's first steps move a weight by up to the learning rate however small its gradient is, so that a weight
    whose gradient is rounding noise may go either way; hardly any does. On the mean they agree to a thousandth of the
    rate; LoRA in processes that do not add up their gradients differs by a quarter of it or more."""
    rate = max(float(value) for (_, tag), value in metrics(run_dir).items() if tag == "train/learning_rate")
    ours, theirs = final_models(run_dir), final_models(other)
    assert ours.keys() == theirs.keys()
    for name in ours:
        one, two = load_file(ours[name]), load_file(theirs[name])
        difference = torch.cat([(one[key] - two[key]).abs().flatten() for key in two])
        assert difference.max() <= 4 * rate and difference.mean() < 1e-3 * rate, (difference.max(), difference.mean())


def documented_tags(page: str) -> set[str]:
    """Tags in backticks in the first column of a page's tables; what stands between < and > is left out."""
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("|")]
    spans = [span for cell in cells for span in re.findall(r"`([^`]+)`", cell)]
    return {re.sub("<[^<>]*>", "<>", span) for span in spans if TAG.fullmatch(span)}


def tag_matches(documented: str, tag: str) -> bool:
    """The same, or a name (eval/pass_at_8) for a placeholder of the page (eval/pass_at_<>)."""
    return bool(re.fullmatch(re.escape(documented).replace("<>", r"(<>|[^/\s]+)"), tag))


def assert_tags_of_pages(logged: set[str], page: str, *others: str) -> None:
    """What was logged stands on one of these pages of algorithms/, and all of the first one was logged."""
    pages = [(ROOT / "algorithms" / f"{name}.md").read_text(encoding="utf-8") for name in (page, *others)]
    rows = set().union(*map(documented_tags, pages))
    assert {tag for tag in logged if not any(tag_matches(row, tag) for row in rows)} == set()
    own = documented_tags(pages[0])
    assert {row for row in own if not any(tag_matches(row, tag) for tag in logged)} == set()
