"""What the tests of several scripts use: reading a run, comparing two of them, and the tags that a page documents."""

import csv
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SMALL = {"num_prompts_per_step": 4, "num_generations": 4, "max_completion_length": 32}
SMALL |= {"eval_problems": 8, "num_generations_eval": 2}
EXACT = ("reward", "reward_std", "frac_reward_zero_std", "num_tokens", "completions/", "rewards/")
TAG = re.compile(r"(train|eval|seconds|charts|losses)/[\w/<>@.-]+")


# --- Reading ----------------------------------------------------------------------------------------------------------


def table(run_dir, file: str = "metrics.csv") -> dict[tuple[int, str], float]:
    """(step, tag) -> value of a run that was never interrupted, or whose script cleans up after that."""
    with open(Path(run_dir, file), newline="") as lines:
        head, *rows = csv.reader(lines)
    assert head == ["step", "tag", "value"]
    found = {(int(step), tag): float(value) for step, tag, value in rows}
    assert len(found) == len(rows), "a row was written twice"
    return found


def metrics(run_dir) -> dict[tuple[int, str], str]:
    """(step, tag) -> value as it was written, without times; of a step that was repeated, the last row counts."""
    lines = Path(run_dir, "metrics.csv").read_text().splitlines()[1:]
    rows = [line.split(",") for line in lines]
    return {(int(step), tag): value for step, tag, value in rows if "seconds/" not in tag}


def last(found: dict, tag: str) -> float:
    return [value for (_, name), value in found.items() if name == tag][-1]


def events(run_dir) -> EventAccumulator:
    return EventAccumulator(str(run_dir), size_guidance={"tensors": 0, "scalars": 0}).Reload()


# --- Comparing --------------------------------------------------------------------------------------------------------


def assert_same_run(run_dir, other) -> None:
    """The same metrics and the same final policy, to the bit."""
    for name in ("metrics.csv", "final/model.safetensors"):
        assert Path(run_dir, name).read_bytes() == Path(other, name).read_bytes(), name


def assert_close(
    found: dict, expected: dict, relative: float = 1e-4, absolute: float = 1e-5
) -> None:
    """`train/sampling/logprob_difference` is rounding and nothing else: there only its size, below 1e-4, is checked."""
    assert found.keys() == expected.keys()
    for (step, tag), value in expected.items():
        allowed = 1e-4 if tag.startswith("train/sampling/logprob_difference") else absolute
        assert found[step, tag] == pytest.approx(value, rel=relative, abs=allowed, nan_ok=True), (
            step,
            tag,
        )


def assert_same_weights(run_dir, other) -> None:
    """AdamW's first steps move a weight by up to the learning rate however small its gradient is, so that a weight
    whose gradient is rounding noise may go either way; hardly any does."""
    ours, theirs = (
        load_file(Path(folder, "final", "model.safetensors")) for folder in (run_dir, other)
    )
    rate = max(
        float(value) for (_, tag), value in metrics(run_dir).items() if tag == "train/learning_rate"
    )
    assert ours.keys() == theirs.keys()
    difference = torch.cat([(ours[name] - theirs[name]).abs().flatten() for name in ours])
    assert difference.max() <= 4 * rate and difference.mean() < 1e-8, (
        difference.max(),
        difference.mean(),
    )


# --- Pages ------------------------------------------------------------------------------------------------------------


def documented_tags(page: str) -> set[str]:
    """Tags in backticks in the first column of a page's tables; what stands between < and > is left out."""
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("|")]
    spans = [span for cell in cells for span in re.findall(r"`([^`]+)`", cell)]
    return {re.sub("<[^<>]*>", "<>", span) for span in spans if TAG.fullmatch(span)}


def tag_matches(documented: str, tag: str) -> bool:
    """The same, or a name (eval/pass_at_8) for a placeholder of the page (eval/pass_at_<>)."""
    return bool(re.fullmatch(re.escape(documented).replace("<>", r"(<>|[^/\s]+)"), tag))
