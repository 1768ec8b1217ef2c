"""The memory model of large models against bytes that are counted: of grpo.py's update on fake
tensors, and of the rollouts of small models."""

import gc
import importlib
import inspect
import multiprocessing
import random
import shlex
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pandas as pd
import pytest
import torch
import tyro

from algorithms import grpo, igpo
from benchmarks.machines import count_memory, memory
from benchmarks.machines.count_memory import Tracker, counted_update, random_model
from benchmarks.machines.memory import PUBLIC_MODELS, Model, engine_rows, memory_model, parameters

LANGUAGE = "grpo dapo gdpo nash_preference hpt ampo opd dr_mas igpo critic_search empg arpo spiral_rae pi_play".split()
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
        (LONG, "--bf16", 1),
        (LONG, "--gradient-checkpointing --beta 0.1", 1),
        (WIDE, "--bf16 --gradient-checkpointing", 1),
        (WIDE, "--fsdp --bf16 --gradient-checkpointing", 4),
        (UNTIED, "--fsdp", 4),
        (WIDE, "--lora-rank 4 --beta 0.1", 1),
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


def test_rows_of_the_csv():
    """They were computed by the model as it is now, and lie within 1 % of what was counted."""
    rows = pd.read_csv(count_memory.RESULTS / "memory.csv", keep_default_na=False)
    assert [tuple(row) for row in rows.iloc[:, :4].values.tolist()] == count_memory.CASES
    for row in rows.itertuples():
        args = count_memory.args_of(row.lengths, row.flags)
        computed = memory_model(row.model, args, row.gpus)["update"]
        assert computed == pytest.approx(row.computed_gb, abs=0.01)
        assert computed == pytest.approx(row.counted_gb, rel=0.01)


def test_adapters_are_those_of_peft():
    model = random_model(UNTIED)
    grpo.add_adapters(model, flags("--lora-rank 4"))
    trained = sum(x.numel() for x in model.parameters() if x.requires_grad)
    assert memory.adapter_parameters(UNTIED, 4) == trained


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


@pytest.mark.parametrize("script", LANGUAGE)
def test_limits_are_those_of_the_scripts(script):
    module = importlib.import_module(f"algorithms.{script}")
    assert module.LOGITS_AT_ONCE == memory.LOGITS_AT_ONCE
    assert module.PACKED_LENGTH == memory.PACKED_LENGTH
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
    """No pass is larger, whatever the lengths of the completions."""
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
            assert packed.input_ids.numel() <= tokens
            assert packed.input_ids.size(1) <= width
            assert len(packed.targets) <= predicted


def test_packed_shape_of_longest_completions():
    """It is exactly that of two groups, and as full as the tokens allow."""
    completions, packed_rows = count_memory.fullest_pass(flags())
    packed = grpo.pack(completions, packed_rows, torch.device("cpu"))
    assert memory.packed_shape("grpo", flags()) == (packed.input_ids.numel(), 224, len(packed.targets))
    args = count_memory.args_of("60 40 4000", "--num-generations 4")
    completions, packed_rows = count_memory.fullest_pass(args)
    packed = grpo.pack(completions, packed_rows, torch.device("cpu"))
    tokens, width, predicted = memory.packed_shape("grpo", args)
    assert (tokens, width) == (4000, 224)
    assert packed.input_ids.numel() == pytest.approx(tokens, rel=0.05)
    assert len(packed.targets) == pytest.approx(predicted, rel=0.05)


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


@pytest.mark.parametrize("length, shape, bf16", [(30, LONG, ""), (120, LONG, "--bf16"), (4, LONG, "--bf16"), (30, WIDE, "--bf16"), (30, WIDE, "")])
def test_rollout(length, shape, bf16, on_a_cpu):
    """The cache, the forward pass of the prompts, and sampling, within 5 %."""
    args = flags(f"--max-prompt-length 100 --max-completion-length {length} {bf16}")
    model = random_model(shape).to(torch.bfloat16 if args.bf16 else torch.float32)
    prompts = [[3] * 100] * 4 + [[4] * 100] * 4
    counted = added(model, lambda: grpo.generate(model, prompts, args, seeds=range(8)))
    moments = memory.rollout_moments("grpo", shape, args, 2 if args.bf16 else 4)
    expected = max(sum(moment.values()) for moment in moments)
    assert expected == pytest.approx(counted, rel=0.05)


class Tokenizer:
    """A word of six letters is four tokens."""

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [5] * (len(text) // 6 * 4)}


@pytest.mark.parametrize("script", ["pi_play", "igpo"])
def test_turns_of_episodes(script, on_a_cpu):
    """The second turn continues from the memory of the first, which is still there; igpo.py scores
    the right answer then. What is computed is not less than what is counted, and hardly more."""
    args = flags("--max-prompt-length 200 --max-completion-length 12", script=igpo)
    deep = replace(LONG, layers=16)
    model = random_model(deep)
    task = SimpleNamespace(right_answer=lambda problem: ("before", "answer"))

    def play() -> None:
        contexts = [[row] * 188 for row in range(8)]
        completions, found = igpo.generate(model, contexts, args, range(8))
        contexts = [c.prompt + c.ids for c in completions]
        completions, found = igpo.generate(model, contexts, args, range(8), found)
        if script == "igpo":
            episodes = [igpo.Episode(None, context) for context in contexts]
            igpo.answer_logprobs(model, Tokenizer(), task, episodes, found, args)

    counted = added(model, play)
    moments = memory.turn_moments(script, deep, args, 4)
    expected = max(sum(moment.values()) for moment in moments)
    assert counted <= expected <= 1.1 * counted
