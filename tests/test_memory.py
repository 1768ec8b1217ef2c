"""The memory model of large models against bytes that are counted: of grpo.py's update on fake
tensors, and of the rollouts of small models."""

import gc
import importlib
import inspect
import multiprocessing
import random
import shlex
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import tyro

from algorithms import grpo, igpo
from benchmarks.machines import memory
from benchmarks.machines.count_memory import Tracker, counted_update, random_model
from benchmarks.machines.memory import PUBLIC_MODELS, Model, engine_rows, memory_model, parameters

LANGUAGE = "grpo dapo gdpo nash_preference hpt ampo opd unlikeliness dr_mas igpo critic_search empg arpo spiral_rae advantage_alignment pi_play".split()
# From the model cards and the weights' files.
KNOWN = {
    "Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen3-0.6B": 0.6e9,
    "Qwen3-4B": 4.02e9,
    "SmolLM2-135M-Instruct": 134_515_008,
    "SmolLM2-360M-Instruct": 361_821_120,
    "Llama-3.2-1B-Instruct": 1_235_814_400,
}
# The layers count most, the logits do, and the head is not the embedding.
LONG = Model(4, 128, 320, 8, 2, 32, 300, True, "qwen2")
WIDE = Model(4, 128, 320, 8, 2, 32, 20_000, True, "llama")
UNTIED = Model(4, 128, 320, 8, 2, 32, 20_000, False, "qwen3")


def flags(given: str = "", script=grpo):
    """Two groups of four completions in a pass, and as many rows in the rollout."""
    lengths = "--max-prompt-length 60 --max-completion-length 40 --eval-steps 0"
    batches = "--num-generations 4 --decode-batch-size 8 --micro-batch-size 8"
    return tyro.cli(script.Args, args=shlex.split(f"{lengths} {batches} {given}"))


@pytest.mark.parametrize("name", PUBLIC_MODELS)
def test_sizes_are_those_of_the_models_that_people_use(name):
    assert parameters(PUBLIC_MODELS[name]) == pytest.approx(KNOWN[name], rel=0.02)


# --- Update ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other_process():
    """Where updates on fake tensors run: with torch 2.13 they leave objects behind that can crash a
    later garbage collection, and with it all other tests of the process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=gc.disable) as executor:
        yield executor


def update_bytes(shape, given: str, processes: int) -> int:
    """Counted with logits in several chunks."""
    with mock.patch.object(grpo, "LOGITS_AT_ONCE", 2**20):
        return counted_update(shape, flags(given), processes)


@pytest.mark.parametrize(
    "shape, given, processes",
    [
        (LONG, "--gradient-checkpointing --beta 0.1", 1),
        (WIDE, "--bf16 --gradient-checkpointing", 1),
        (WIDE, "--fsdp --bf16 --gradient-checkpointing", 4),
        (LONG, "--bf16 --gradient-checkpointing --lora-rank 4 --vllm", 1),
        (UNTIED, "--fsdp --bf16 --lora-rank 4", 4),
    ],
)
def test_update_of_small_models(shape, given, processes, other_process, monkeypatch):
    """Within 10 %."""
    counted = other_process.submit(update_bytes, shape, given, processes).result() / 1e9
    monkeypatch.setattr(memory, "LOGITS_AT_ONCE", 2**20)
    computed = memory_model(shape, flags(given), processes)["update"]
    assert computed == pytest.approx(counted, rel=0.1)


def test_vllm_has_its_share_while_it_is_awake():
    """By hand: 12 bytes of each parameter are held, of a frozen one 2, and 4 before the engine starts."""
    name, size = "Qwen2.5-1.5B-Instruct", KNOWN["Qwen2.5-1.5B-Instruct"] / 1e9
    found = memory_model(name, flags("--vllm --vllm-memory 0.5 --bf16"), gpu=40)
    assert found["rollout"] == pytest.approx(12 * size + 20, rel=0.02)
    assert found["start"] == pytest.approx(4 * size, rel=0.03)  # and the logits of the check
    assert found["copies"] == 0
    adapted = memory_model(name, flags("--vllm --vllm-memory 0.5 --bf16 --lora-rank 16"), gpu=40)
    assert adapted["rollout"] == pytest.approx(2 * size + 12 * 0.0185 + 20, rel=0.05)
    less, some, more = [engine_rows(name, flags(f"--bf16 --vllm-memory {share}"), 40) for share in (0.07, 0.1, 0.2)]
    assert less < 0 < some
    assert more - some == pytest.approx(0.1 * 40e9 / (100 * 28 * 2 * 256 * 2))  # 100 tokens, 28 layers, keys and values


def test_limits_are_those_of_the_scripts():
    for script in LANGUAGE:
        module = importlib.import_module(f"algorithms.{script}")
        assert module.LOGITS_AT_ONCE == memory.LOGITS_AT_ONCE
        assert module.ATTENTION_LENGTH == memory.ATTENTION_LENGTH
        assert module.tokens_at_once(flags(), SimpleNamespace(type="cuda")) == memory.MICRO_BATCH_TOKENS
        assert f"block = {memory.BLOCK} if on_gpu" in inspect.getsource(module.Decoder)


def episodes_of(lengths) -> list:
    """Groups of four episodes whose contexts have grown to their limit."""
    episodes = []
    for row, length in enumerate(lengths):
        episode = igpo.Episode(None, [row // 4] * 20)
        episode.read([1] * 40, "")
        episode.write(igpo.Completion([], [1] * length, [-1.0] * length, True))
        episodes.append(episode)
    return episodes


@pytest.mark.parametrize("given", ["", "--micro-batch-size 3", "--micro-batch-size 50 --micro-batch-tokens 600"])
@pytest.mark.parametrize("script", ["grpo", "nash_preference", "igpo"])
def test_packed_shape(script, given):
    """No pass is larger, whatever the lengths; rows of unequal episodes may need another row for padding."""
    module = importlib.import_module(f"algorithms.{script}")
    if script == "nash_preference":
        given = given.replace("3", "4")  # whole groups
    args = flags(given, module)
    tokens, width, predicted = memory.packed_shape(script, args)
    for seed in range(5):
        lengths = [random.Random(f"{seed} {row}").randint(1, 40) for row in range(48)] if seed else [40] * 48
        batch = [grpo.Completion([row // 4] * 60, [1] * n, [-1.0] * n, True) for row, n in enumerate(lengths)]
        batch = episodes_of(lengths) if script == "igpo" else batch
        for packed in module.micro_batches(batch, list(range(48)), args, torch.device("cpu")):
            assert packed.input_ids.numel() <= tokens + (width if script == "igpo" else 0)
            assert packed.input_ids.size(1) <= width
            assert len(packed.targets) <= predicted


# --- Rollout --------------------------------------------------------------------------------------


@pytest.fixture
def on_a_cpu(monkeypatch):
    """Where buffers grow by fewer columns, and no step is recorded."""
    monkeypatch.setattr(memory, "BLOCK", 24)
    monkeypatch.setattr(memory, "STEPS_HELD", 1)


def added(model, work) -> int:
    """Bytes that a function adds to those of the model, at its worst moment."""
    tracker = Tracker()
    tracker.track_external(model)
    with tracker:
        work()
    return tracker.peak - sum(x.nbytes for x in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("length, shape, bf16", [(30, LONG, ""), (120, LONG, "--bf16"), (30, WIDE, "--bf16")])
def test_rollout(length, shape, bf16, on_a_cpu):
    """The cache, the forward pass of the prompts, and sampling, within 5 %."""
    args = flags(f"--max-prompt-length 100 --max-completion-length {length} {bf16}")
    model = random_model(shape).to(torch.bfloat16 if args.bf16 else torch.float32)
    prompts = [[3] * 100] * 4 + [[4] * 100] * 4
    counted = added(model, lambda: grpo.generate(model, prompts, args, seeds=range(8)))
    moments = memory.rollout_moments("grpo", shape, args, 2 if args.bf16 else 4)
    expected = max(sum(moment.values()) for moment in moments)
    assert expected == pytest.approx(counted, rel=0.05)
