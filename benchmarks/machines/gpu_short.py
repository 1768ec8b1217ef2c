"""What `gpu.py --part short` measures within a process: decoding, the update, and a model too large to save first.

    python benchmarks/machines/gpu_short.py decode SHAPE CSV      # SHAPE is one of gpu.SHAPES; rows are added to CSV
    python benchmarks/machines/gpu_short.py update SHAPE CSV
    python benchmarks/machines/gpu_short.py train FLAGS           # grpo.py; the last part of the model's name is SHAPE

decode: `generate` of grpo.py beside the loop that the scripts had before, tests/plain_decode.py, on one
model in bfloat16, with prompts of 77 tokens in groups of 8. Each first writes four tokens of all rows,
which loads kernels. Then the allocator's memory is given back, and it makes its calls before the other
begins. Where the old loop would take minutes it writes plain_length tokens of a row, which favours it.
Tokens a second include the prompts. gap is the mean difference between log-probabilities of the first
group as sampled and as the learner computes them; same_tokens is how many tokens of a row both write
before they first differ, as bfloat16 rounds otherwise where the cache has another width.

update: `update` of grpo.py, weights in float32 and --bf16, on completions of random tokens: the mean
of two calls after a first one, whose seconds stand in first_seconds (with --compile it compiles).
"""

import gc
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import transformers

folder = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(folder), str(folder / "tests")]
import plain_decode  # noqa: E402

from algorithms import grpo  # noqa: E402
from benchmarks.machines import gpu  # noqa: E402

PROMPT = 77  # tokens, as those of Countdown with a public tokenizer
GROUP = 8
ENDS_EVERY = {"small": 20}  # 1 token in so many ends a row where rows end early
# Rows, tokens of a row, those that the old loop writes, whether rows end early, calls.
DECODE = {
    "0.5B": [(256, 256, 256, False, ("first", "second")), (256, 512, 512, True, ("first",))],
    "1.5B": [(64, 1024, 256, False, ("first",))],
    "small": [(16, 16, 8, False, ("first", "second")), (16, 64, 64, True, ("first",))],
}
UPDATE = {"0.5B": (256, 256), "small": (16, 16)}  # rows, tokens of a row
PASSES = {"0.5B": (4096, 16384, 65536), "small": (128, 256, 1024)}  # --micro-batch-tokens
COMPILED = {"0.5B": 16384, "small": 256}


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def model_of(shape: str, dtype: torch.dtype):
    """A model as load_model of grpo.py returns it, but random, and made on the device."""
    model = gpu.random_model(shape, device(), dtype).eval()
    model.generation_config.eos_token_id = [gpu.SHAPES[shape].vocab - 1]
    grpo.add_methods(model)
    return model


def prompts_of(rows: int, vocab: int) -> list[list[int]]:
    """Random prompts, the same for every group."""
    generator = random.Random(1)
    prompts = [[generator.randrange(vocab) for _ in range(PROMPT)] for _ in range(rows // GROUP)]
    return [prompt for prompt in prompts for _ in range(GROUP)]


def seconds(call) -> tuple[float, object]:
    """The seconds of a call, and what it returns."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    result = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began, result


def give_memory_back() -> None:
    """What the allocator holds and no tensor uses."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def count_anew() -> None:
    """The next peak is that of what comes now."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak() -> dict[str, float]:
    """Of torch's tensors, on a GPU only."""
    return {"peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9} if torch.cuda.is_available() else {}


# --- Decoding -------------------------------------------------------------------------------------


def calls(generate, model, rows: int, length: int, names: tuple[str, ...]) -> dict[str, tuple]:
    """Seconds and completions of each call."""
    prompts = prompts_of(rows, model.config.vocab_size)
    seeds = range(1, rows + 1)
    generate(model, prompts, grpo.Args(max_completion_length=4), seeds)
    give_memory_back()
    count_anew()
    args = grpo.Args(max_completion_length=length)
    return {name: seconds(lambda: generate(model, prompts, args, seeds)) for name in names}


@torch.no_grad()
def gap(model, group: list[grpo.Completion]) -> float:
    """Mean difference between log-probabilities of a group as sampled and as the learner has them."""
    packed = grpo.pack(group, [list(range(len(group)))], model.device)
    learner = model.token_logprobs(packed, grpo.Args())
    return (packed.sampled_logprobs - learner).abs().mean().item()


def speed(prefix: str, duration: float, completions: list[grpo.Completion]) -> dict[str, float]:
    """Columns of a call."""
    tokens = sum(len(completion.ids) for completion in completions)
    return {f"{prefix}_tokens": tokens, f"{prefix}_tokens_per_second": tokens / duration}


def same_tokens(one: list[grpo.Completion], other: list[grpo.Completion]) -> float:
    """Tokens of a row before the first difference, mean over rows."""
    found = []
    for a, b in zip(one, other):
        pairs = list(zip(a.ids, b.ids))
        found.append(next((n for n, (x, y) in enumerate(pairs) if x != y), len(pairs)))
    return sum(found) / len(found)


def measure_decoding(shape: str, write) -> None:
    """A row for each case and call, written as soon as ours is measured, and again beside the old loop."""
    model = model_of(shape, torch.bfloat16)
    for rows, length, plain_length, early, names in DECODE[shape]:
        if early:
            vocab = model.config.vocab_size
            model.generation_config.eos_token_id = list(range(0, vocab, ENDS_EVERY.get(shape, 200)))
        title = f"decode {shape}, {rows} x {length}" + ", rows end early" * early
        ours = calls(grpo.generate, model, rows, length, names)
        columns = peak() | {"recorded": not hasattr(model, "unrecorded") and model.device.type == "cuda"}
        found = {}
        for name, (duration, completions) in ours.items():
            found[name] = {"run": f"{title}, {name} call"} | columns | {"seconds": duration}
            found[name] |= speed("decode", duration, completions) | {"gap": gap(model, completions[:GROUP])}
            write(found[name])
        plain = calls(plain_decode.generate, model, rows, plain_length, names)
        for name, (duration, completions) in plain.items():
            row = found[name] | {"plain_length": plain_length} | speed("plain", duration, completions)
            row["ratio"] = row["decode_tokens_per_second"] / row["plain_tokens_per_second"]
            write(row | {"same_tokens": same_tokens(ours[name][1], completions)})


# --- The update -----------------------------------------------------------------------------------


def completions_of(rows: int, length: int, vocab: int) -> list[grpo.Completion]:
    """Completions of random tokens, which a policy that knows nothing might have sampled."""
    generator = random.Random(2)
    logprobs = [-torch.tensor(float(vocab)).log().item()] * length
    completions = []
    for prompt in prompts_of(rows, vocab):
        ids = [generator.randrange(vocab) for _ in range(length)]
        completions.append(grpo.Completion(prompt, ids, logprobs, False))
    return completions


def update_columns(model, completions, args: grpo.Args) -> dict:
    """Three updates with new moments of AdamW; an error where memory runs out."""
    give_memory_back()
    count_anew()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6, weight_decay=0.0, fused=True)
    advantages = torch.ones(len(completions))

    def update():
        return grpo.update(model, None, optimizer, completions, advantages, args)

    try:
        first, _ = seconds(update)
        later = [seconds(update)[0] for _ in range(2)]
    except torch.OutOfMemoryError as error:
        return {"error": f"out of memory: {error}"[:300]}
    finally:
        optimizer.zero_grad()
    tokens = sum(len(completion.ids) for completion in completions)
    found = {"tokens": tokens, "first_seconds": first, "seconds": first + sum(later)}
    return found | {"update_tokens_per_second": 2 * tokens / sum(later)} | peak()


def measure_update(shape: str, write) -> None:
    """A row for each number of tokens a pass, and one for --compile, which the model keeps."""
    rows, length = UPDATE[shape]
    model = model_of(shape, torch.float32)
    completions = completions_of(rows, length, gpu.SHAPES[shape].vocab)
    args = grpo.Args(advantage="none", max_completion_length=length, bf16=True)
    for tokens in PASSES[shape]:
        name = f"update {shape}, {rows} x {length} --micro-batch-tokens {tokens}"
        write({"run": name} | update_columns(model, completions, replace(args, micro_batch_tokens=tokens)))
    args = replace(args, micro_batch_tokens=COMPILED[shape], compile=True)
    grpo.compile_layers(model)
    name = f"update {shape}, {rows} x {length} --micro-batch-tokens {COMPILED[shape]} --compile"
    write({"run": name} | update_columns(model, completions, args))


# --- A large model --------------------------------------------------------------------------------


def train(words: list[str]) -> None:
    """grpo.py with these flags on a model that has no file: it is neither loaded nor saved."""

    def load_model(args: grpo.Args):
        model = model_of(Path(args.model_name_or_path).name, torch.float32)
        return model, gpu.tokenizer()

    def load_checkpoint(*state) -> None:
        count_anew()  # the model that was made here in float32 is not the run's peak
        restore(*state)

    restore = grpo.load_checkpoint
    grpo.load_checkpoint = load_checkpoint
    grpo.load_model = load_model
    grpo.save_final = lambda *_: None
    sys.argv = ["algorithms/grpo.py", *words]
    grpo.train(grpo.parse_args())


def main(what: str, *words: str) -> None:
    """Measure; every row is written at once."""
    transformers.logging.disable_progress_bar()
    torch.backends.cuda.enable_cudnn_sdp(False)  # as setup of grpo.py
    if what == "train":
        return train(list(words))
    shape, csv = words
    same = gpu.described("short", "cuda" if torch.cuda.is_available() else "cpu")
    same["command"] = f"python benchmarks/machines/gpu_short.py {what} {shape}"
    measures = {"decode": measure_decoding, "update": measure_update}
    measures[what](shape, lambda row: gpu.write_row(Path(csv), same | row))


if __name__ == "__main__":
    main(*sys.argv[1:])
