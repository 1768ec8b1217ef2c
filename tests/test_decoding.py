"""Decoding over a static cache writes the tokens of the plain loop, see plain_decode.py, and survives where a GPU
cannot record its step."""

import itertools
import json
from dataclasses import replace

import plain_decode
import pytest
import torch
from processes import ROOT, fork
from simulated_cuda import compiler
from test_grpo import END, PROMPTS, tiny_model

from algorithms import arpo, empg, grpo, igpo

ARGS = grpo.Args(max_completion_length=60)
ROWS = [prompt for prompt in PROMPTS for _ in range(4)]


@pytest.fixture(scope="module")
def model():
    return tiny_model(0)


def assert_same(found, expected) -> None:
    for one, other in itertools.zip_longest(found, expected):
        assert (one.prompt, one.ids, one.ended) == (other.prompt, other.ids, other.ended)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("seeds", [None, range(16)])
@pytest.mark.parametrize("length", [1, 2, 60])
def test_tokens_are_those_of_the_plain_loop(model, length, seeds, temperature):
    args = replace(ARGS, max_completion_length=length, temperature=temperature)
    found = grpo.generate(model, ROWS, args, seeds)
    assert_same(found, plain_decode.generate(model, ROWS, args, seeds))
    assert length < 60 or len({len(completion.ids) for completion in found}) > 3


def test_rows_that_end_at_once(model, monkeypatch):
    """Some of them, and all."""
    first = grpo.generate(model, ROWS, ARGS, range(16))[0].ids[0]
    monkeypatch.setattr(model.generation_config, "eos_token_id", [END, first])
    found = grpo.generate(model, ROWS, ARGS, range(16))
    assert_same(found, plain_decode.generate(model, ROWS, ARGS, range(16)))
    assert 0 < sum(len(completion.ids) == 1 for completion in found) < 16
    monkeypatch.setattr(model.generation_config, "eos_token_id", [*range(64)])
    assert [len(completion.ids) for completion in grpo.generate(model, ROWS, ARGS, range(16))] == [1] * 16


def test_width_and_rows_of_the_buffers(model, monkeypatch):
    """Buffers grow by blocks, and rows that have ended leave them."""
    shapes = []
    original = grpo.Decoder.allocate

    def allocate(decoder, places, width):
        original(decoder, places, width)
        shapes.append((len(places), width))
        assert {layer.keys.shape[::2] for layer in decoder.cache.layers} == {(len(places), width)}

    monkeypatch.setattr(grpo.Decoder, "allocate", allocate)
    grpo.generate(model, ROWS, ARGS, range(16))
    rows, widths = zip(*shapes)
    assert rows[0] == 16 and rows == tuple(sorted(rows, reverse=True)) and rows[-1] < 16
    assert widths == tuple(sorted(widths)) and widths[0] == 9 + 24 and set(widths) <= {33, 57, 69}


@pytest.mark.parametrize("script", [igpo, empg, arpo])
def test_several_turns(model, script):
    """Each turn continues from what is in memory, with the tokens of a decoding from nothing; so do entropies."""
    args = script.Args(max_completion_length=30, temperature=0.7)
    contexts = [list(row) for row in ROWS]
    memory = None
    for turn in range(3):
        seeds = [100 * turn + row for row in range(len(contexts))]
        found, memory = script.generate(model, contexts, args, seeds, memory)
        assert_same(found, plain_decode.generate(model, contexts, args, seeds))
        if script is not igpo:
            entropies = plain_decode.decode(model, contexts, args, seeds)[2]
            longest = getattr(script, "ENTROPY_TOKENS", 30)
            for row, completion in enumerate(found):
                length = min(len(completion.ids), longest)
                expected = entropies[row, :length].tolist()
                assert completion.entropies[:length] == pytest.approx(expected, rel=1e-4, abs=1e-5)
        rows = [row for row in range(len(contexts)) if row % 3 != turn]
        contexts = [contexts[row] + found[row].ids + [40 + turn, 41] * (row % 2 + 1) for row in rows]
        memory = memory.select(rows)


PROGRAM = """\
import json, sys
sys.path[:0] = sys.argv.pop(1).split(":")
import simulated_cuda
simulated_cuda.install()
import torch
import plain_decode
from test_decoding import ARGS, ROWS
from test_grpo import tiny_model
from algorithms import grpo

model = tiny_model(0).to("cuda")
plain = plain_decode.generate(model, ROWS, ARGS, range(16))
steps = []
original = grpo.Decoder.step

def step(decoder):
    steps.append(simulated_cuda.Graph.recording is not None)
    original(decoder)
    if sys.argv[1] == "raises" and steps[-1]:
        raise RuntimeError("operation not permitted")
    if sys.argv[1] == "waits":
        decoder.count.item()

grpo.Decoder.step = step
for _ in range(2):
    found = grpo.generate(model, ROWS, ARGS, range(16))
    assert [c.ids for c in found] == [c.ids for c in plain]
print(json.dumps([len(steps), sum(steps), hasattr(model, "unrecorded")]))
"""


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler for the pretend CUDA device")
@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has a CUDA device of its own")
@pytest.mark.parametrize("what", ["is recorded", "raises", "waits"])
def test_a_step_is_recorded_or_called(what, tmp_path):
    """On the pretend GPU: Python runs a step twice for each recording; where recording fails, it runs all of them,
    is told so once, and the tokens stay the same."""
    (tmp_path / "program.py").write_text(PROGRAM)
    process = fork(tmp_path / "program.py", f"{ROOT}:{ROOT / 'tests'}", what)
    assert process.returncode == 0, process.stderr
    calls, recordings, unrecorded = json.loads(process.stdout.splitlines()[-1])
    assert process.stdout.count("decoding is not recorded") == (what != "is recorded")
    if what == "is recorded":
        assert not unrecorded and 2 <= recordings <= 8 and calls == 2 * recordings
    else:
        assert unrecorded and calls > 60
        assert recordings == (what == "raises"), "what waits is found before anything is recorded"
