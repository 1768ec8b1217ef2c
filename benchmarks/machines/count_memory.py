"""Count the memory of one update of grpo.py, for large models, without their weights.

    python benchmarks/machines/count_memory.py            # 10 minutes on one core; writes results/memory.csv

The update is the script's own, on fake tensors, which have a shape and no numbers, so that a model of
any size fits; torch.distributed._tools.mem_tracker adds up their bytes. With --fsdp, the other
processes are fake too. The peak is compared with memory_model (memory.py).
"""

import shlex
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path
from unittest import mock

import pandas as pd
import torch
import torch.distributed as dist
import transformers
import tyro
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from algorithms import grpo  # noqa: E402
from benchmarks.about import RESULTS, about  # noqa: E402
from benchmarks.machines.memory import Model, memory_model, packed_shape, shape_of  # noqa: E402

LENGTHS = "512 512 16384"  # tokens of prompts, of completions, and of a pass of the update
SAVING = "--bf16 --gradient-checkpointing"
CASES = []
for name in ("Qwen2.5-0.5B-Instruct", "Qwen3-0.6B", "Qwen2.5-1.5B-Instruct"):
    for flags in ("", "--gradient-checkpointing", "--bf16", SAVING, f"{SAVING} --beta 0.04"):
        CASES.append((name, 1, LENGTHS, flags))
CASES += [("Qwen2.5-0.5B-Instruct", 8, LENGTHS, f"--fsdp {SAVING}")]
for flags in ("--fsdp --bf16", f"--fsdp {SAVING}"):
    CASES.append(("Qwen2.5-1.5B-Instruct", 8, LENGTHS, flags))
for flags in (f"--fsdp {SAVING}", f"--fsdp {SAVING} --beta 0.04"):
    CASES.append(("Qwen2.5-7B-Instruct", 8, LENGTHS, flags))
# The formulas were written with the cases above in view, and not with these.
CASES += [
    ("Qwen2.5-1.5B-Instruct", 1, "256 2048 8192", SAVING),
    ("Qwen2.5-1.5B-Instruct", 1, "2048 256 16384", "--bf16"),
    ("Llama-3.2-1B-Instruct", 1, "512 128 8192", "--gradient-checkpointing --num-iterations 2"),
    ("SmolLM2-360M-Instruct", 1, "100 80 4096", "--bf16 --temperature 0.7"),
    ("Qwen3-4B", 8, "2048 4096 6144", f"--fsdp {SAVING}"),
    ("Qwen2.5-3B-Instruct", 8, "512 1024 16384", "--fsdp --bf16 --micro-batch-size 8"),
]
# LoRA: again first those in view.
LORA = "--lora-rank 16"
for flags in (LORA, f"--bf16 {LORA}", f"{SAVING} {LORA}"):
    CASES.append(("Qwen2.5-0.5B-Instruct", 1, LENGTHS, flags))
for flags in (f"--gradient-checkpointing {LORA}", f"{SAVING} {LORA} --vllm", f"{SAVING} {LORA} --beta 0.04"):
    CASES.append(("Qwen2.5-1.5B-Instruct", 1, LENGTHS, flags))
CASES += [
    ("Qwen3-0.6B", 1, LENGTHS, f"--bf16 {LORA}"),
    ("Qwen2.5-7B-Instruct", 1, LENGTHS, f"{SAVING} {LORA} --vllm"),
    ("Qwen2.5-7B-Instruct", 8, LENGTHS, f"--fsdp {SAVING} {LORA}"),
    ("Qwen2.5-3B-Instruct", 1, "512 1024 4096", f"{SAVING} {LORA}"),
    ("Llama-3.2-1B-Instruct", 1, "512 128 8192", "--bf16 --lora-rank 64"),
    ("Qwen3-4B", 8, "2048 4096 6144", f"--fsdp {SAVING} {LORA}"),
]


def args_of(lengths: str, flags: str):
    """The flags of grpo.py."""
    prompt, completion, tokens = lengths.split()
    words = ["--max-prompt-length", prompt, "--max-completion-length", completion]
    words += ["--micro-batch-tokens", tokens, *shlex.split(flags)]
    return tyro.cli(grpo.Args, args=words)


class Tracker(MemTracker):
    """MemTracker without its statistics by module, which allow only one call of a module."""

    def _pre_fw_hook(self, *_):
        pass

    _post_fw_hook = _pre_bw_hook = _post_bw_hook = _pre_fw_hook

    @property
    def peak(self) -> int:
        """Largest number of bytes so far."""
        return sum(snapshot["Total"] for snapshot in self.get_tracker_snapshot("peak").values())


class KnownValues(TorchDispatchMode):
    """Fake tensors have no values: numbers that are read are 1, and every element is nonzero."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        if function is torch.ops.aten.nonzero.default:
            return torch.zeros(args[0].numel(), args[0].dim(), dtype=torch.long)
        return function(*args, **(kwargs or {}))


def random_model(shape: Model):
    """A model of this shape with random weights, which cannot end a completion."""
    kinds = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    sizes = {"num_hidden_layers": shape.layers, "hidden_size": shape.hidden}
    sizes |= {"intermediate_size": shape.intermediate, "num_attention_heads": shape.heads}
    sizes |= {"num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim}
    sizes |= {"vocab_size": shape.vocab, "tie_word_embeddings": shape.tied}
    config = getattr(transformers, f"{kinds[shape.kind]}Config")
    config = config(**sizes, bos_token_id=None, eos_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = []
    grpo.add_methods(model)
    return model.eval()


def fullest_pass(args) -> tuple[list, list[list[int]]]:
    """Completions that fill one pass, and its packed rows. Prompts are as long as the flags allow;
    completions too if their number is bounded, else each packed row has a prompt of its own."""
    lengths = []  # of completions, by prompt
    if args.micro_batch_size:
        for first in range(0, args.micro_batch_size, args.num_generations):
            count = min(args.num_generations, args.micro_batch_size - first)
            lengths.append([args.max_completion_length] * count)
    else:
        tokens, width, _ = packed_shape("grpo", args)
        rows = ceil(tokens / width)
        written = tokens // rows // 8 * 8 - args.max_prompt_length
        count = ceil(written / args.max_completion_length)
        lengths = [[(written + part) // count for part in range(count)]] * rows
    completions = []
    for number, group in enumerate(lengths):
        for length in group:
            prompt = [1 + number] * args.max_prompt_length
            completions.append(grpo.Completion(prompt, [2] * length, [-1.0] * length, False))
    rows = list(range(len(completions)))
    (packed_rows,) = grpo.divide(completions, rows, args, torch.device("cpu"))
    return completions, packed_rows


def counted_update(shape: Model, args, world_size: int = 1) -> int:
    """Bytes at the worst moment of grpo.update, with weights, moments and all copies."""
    args = replace(args, max_completion_length=args.max_completion_length or 1024)
    completions, packed_rows = fullest_pass(args)
    packed = grpo.pack(completions, packed_rows, torch.device("cpu"))
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    tensors = {name: x for name, x in vars(packed).items() if x is not None}
    packed = replace(packed, **{name: fake.from_tensor(x) for name, x in tensors.items()})
    tracker = Tracker()
    with ExitStack() as stack:
        patch = partial(mock.patch.object, grpo)
        stack.enter_context(patch("micro_batches", lambda *_: [packed]))
        stack.enter_context(patch("gather", list))
        stack.enter_context(patch("sampling_metrics", lambda *_: {}))  # no numbers to compare
        if args.fsdp:
            dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
            stack.callback(dist.destroy_process_group)
            mesh = init_device_mesh("cpu", (world_size,))
            fully_shard = partial(grpo.fully_shard, mesh=mesh)
            stack.enter_context(patch("fully_shard", fully_shard))
        stack.enter_context(fake)
        stack.enter_context(KnownValues())
        # As in grpo.train.
        model = random_model(shape)
        copies = []
        reference = None
        if args.beta > 0:
            reference = model if args.lora_rank else grpo.copy_model(model, torch.float32)
            if args.fsdp and reference is not model:
                grpo.shard(reference, args)
            copies += [reference] * (reference is not model)
        if args.lora_rank:
            # A module of fake tensors cannot move; adapters are made in float32, where they stay.
            with mock.patch.object(torch.nn.Module, "to", lambda module, *_, **__: module):
                grpo.add_adapters(model, args)
        if (args.bf16 or args.fsdp) and not args.vllm:
            dtype = torch.bfloat16 if args.bf16 else torch.float32
            copies.append(grpo.copy_model(model, dtype))
        if args.gradient_checkpointing:
            grpo.recompute_layers(model)
        if args.fsdp:
            grpo.shard(model, args)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, 1e-6, weight_decay=0.0, fused=True)
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        # Makes the moments; DTensor plans both once, with whole tensors that are not real.
        torch.nn.utils.clip_grad_norm_(trained, args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        tracker.track_external(model, optimizer, *copies)
        stack.enter_context(tracker)
        grpo.update(model, reference, optimizer, completions, torch.ones(len(completions)), args)
    return tracker.peak


def main() -> None:
    """Count all cases; the CSV is written anew. What is added to weights, gradients, moments and
    copies stands alone, too."""
    rows = []
    for name, gpus, lengths, flags in CASES:
        args = args_of(lengths, flags)
        began = time.perf_counter()
        counted = counted_update(shape_of(name), args, gpus) / 1e9
        seconds = time.perf_counter() - began
        computed = memory_model(name, args, gpus)
        held = sum(computed[part] for part in ("weights", "moments", "copies", "gradients"))
        row = {"model": name, "gpus": gpus, "lengths": lengths, "flags": flags}
        row |= {"counted_gb": counted, "computed_gb": computed["update"]}
        row |= {"counted_added_gb": counted - held, "computed_added_gb": computed["update"] - held}
        rows.append(row | {"seconds": seconds})
        print(f"{name} {gpus} {flags}: {counted:.2f} GB, computed {computed['update']:.2f}")
    table = pd.DataFrame(rows).round(2).assign(**about("torch", "transformers"))
    table.to_csv(RESULTS / "memory.csv", index=False, lineterminator="\n")


if __name__ == "__main__":
    main()
