"""The program that measures how cost grows: its memory model against counted tensors, its points and its CSV."""

import weakref

import pytest
import torch
import transformers
import tyro
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from algorithms import arac, dapo, dr_mas, fm3q, grpo, unimodal_poisson
from benchmarks import scaling
from benchmarks.scaling import CPU_MODELS, PUBLIC_MODELS, Model, memory_model, parameters

SCRIPTS = {"grpo.py": grpo, "dr_mas.py": dr_mas, "fm3q.py": fm3q, "arac.py": arac}
SCRIPTS["unimodal_poisson.py"] = unimodal_poisson


class Live(TorchDispatchMode):
    """Bytes of all tensors that are there, and the most that there were."""

    def __init__(self, tensors):
        super().__init__()
        self.now = self.peak = 0
        self.seen = {}
        for tensor in tensors:
            self.add(tensor)
        self.before = self.now

    def add(self, tensor):
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen:
            return

        def gone(_):
            self.seen.pop(key, None)
            self.now -= size

        self.seen[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor)
        return result


def network(model: Model, device: str = "cpu"):
    """A random model of that shape."""
    names = {"hidden_size": model.hidden, "intermediate_size": model.intermediate, "vocab_size": model.vocab}
    names |= {"num_hidden_layers": model.layers, "num_attention_heads": model.heads, "head_dim": model.head_dim}
    names |= {"num_key_value_heads": model.kv_heads, "tie_word_embeddings": model.tied}
    configs = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config}
    with torch.device(device):
        config = configs[model.kind](**names, bos_token_id=None, eos_token_id=None)
        found = transformers.AutoModelForCausalLM.from_config(config)
    found.generation_config.eos_token_id = [model.vocab]  # never written
    grpo.add_methods(found)
    return found.eval()


# --- Memory -----------------------------------------------------------------------------------------------------------

# From the model cards and the weights' files.
KNOWN = {
    "Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen3-0.6B": 0.6e9,
    "Qwen3-1.7B": 1.72e9,
    "Qwen3-4B": 4.02e9,
    "SmolLM2-135M-Instruct": 134_515_008,
    "SmolLM2-360M-Instruct": 361_821_120,
    "SmolLM2-1.7B-Instruct": 1_711_376_384,
    "Llama-3.2-1B-Instruct": 1_235_814_400,
    "Llama-3.2-3B-Instruct": 3_212_749_824,
}


@pytest.mark.parametrize("name", PUBLIC_MODELS)
def test_sizes_are_those_of_the_models_that_people_use(name):
    assert parameters(PUBLIC_MODELS[name]) == pytest.approx(KNOWN[name], rel=0.02)


@pytest.mark.parametrize("shape", [PUBLIC_MODELS[n] for n in ("Qwen2.5-7B-Instruct", "Qwen3-4B", "Llama-3.2-1B-Instruct")])
def test_number_of_parameters(shape):
    assert parameters(shape) == sum(x.numel() for x in network(shape, "meta").parameters())


def flags(**given):
    """Args with two groups of four in the rollout and in a micro-batch."""
    common = {"max_prompt_length": 60, "max_completion_length": 40, "num_generations": 4, "eval_steps": 0}
    return grpo.Args(**common | {"decode_batch_size": 8, "micro_batch_size": 8} | given)


def texts(args) -> list:
    """Completions as long as the flags allow, two groups of them."""
    lengths = args.max_prompt_length, args.max_completion_length
    return [grpo.Completion([g] * lengths[0], [2] * lengths[1], [-1.0] * lengths[1], 0.0, False) for g in (1,) * 4 + (3,) * 4]


LONG = Model(4, 128, 320, 8, 2, 32, 300, True, "qwen2")  # layers are what counts
WIDE = Model(4, 128, 320, 8, 2, 32, 20_000, True, "llama")  # logits are
UNTIED = Model(4, 128, 320, 8, 2, 32, 20_000, False, "qwen3")


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("shape, at_once", [(LONG, 2**26), (WIDE, 2**26), (WIDE, 2**20), (UNTIED, 2**20)])
def test_memory_of_an_update(shape, at_once, checkpointing, bf16, monkeypatch):
    """All tensors of one micro-batch, forward and backward, within 5 %; with logits at once and in chunks."""
    for module in (grpo, scaling):
        monkeypatch.setattr(module, "LOGITS_AT_ONCE", at_once)
    args, net = flags(bf16=bf16, gradient_checkpointing=checkpointing), network(shape)
    if checkpointing:
        grpo.recompute_layers(net)
    packed = grpo.pack(texts(args), list(range(8)), torch.device("cpu"))
    assert scaling.packed_shape(args) == (*packed.input_ids.shape, len(packed.targets))
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    live = Live(x for parameter in net.parameters() for x in (parameter, parameter.grad))
    with live:
        net.token_logprobs(packed, args).sum().backward()
    expected = memory_model(shape, args)
    added = expected["update"] - sum(expected[name] for name in ("weights", "gradients", "moments", "decoding copy"))
    assert added * 1e9 == pytest.approx(live.peak - live.before, rel=0.05)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("length, shape", [(30, LONG), (4, LONG), (30, WIDE)])
def test_memory_of_a_rollout(length, shape, bf16):
    """The cache, the forward pass of the prompts, and sampling."""
    args, net = flags(max_prompt_length=100, max_completion_length=length), network(shape)
    net.to(torch.bfloat16 if bf16 else torch.float32)
    live = Live(net.parameters())
    with live:
        grpo.generate(net, [[3] * 100] * 4 + [[4] * 100] * 4, args, seeds=range(8))
    moments = scaling.rollout_moments(shape, args, 2 if bf16 else 4)
    assert max(sum(moment.values()) for moment in moments) == pytest.approx(live.peak - live.before, rel=0.12)


def test_what_stays_is_counted_to_the_byte():
    """Weights, gradients and the moments of the optimizer, but for a step count of each tensor."""
    net = network(LONG)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=0.0, fused=True)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    found = memory_model(LONG, flags())
    assert found["weights"] * 1e9 == sum(x.nbytes for x in net.parameters()) == found["gradients"] * 1e9
    moments = [x for state in optimizer.state.values() for x in state.values() if x.ndim]
    assert found["moments"] * 1e9 == sum(x.nbytes for x in moments)


def test_fsdp_divides_what_it_cuts():
    """The rest is whole: the copy that decodes. dapo.py has the same flags."""
    names = ("weights", "gradients", "moments", "reference", "decoding copy")
    args = dapo.Args(bf16=True, fsdp=True, beta=0.1)
    one, eight = (memory_model("Qwen/Qwen2.5-7B-Instruct", args, processes) for processes in (1, 8))
    assert [round(one[name] / eight[name], 2) for name in names] == [8, 8, 8, 8, 1]


def test_the_page_has_the_computed_table():
    text = scaling.PAGE.read_text()
    assert scaling.page_with_memory(text) == text, "run python benchmarks/scaling.py --memory"
    assert scaling.memory_table() in text


def test_limits_are_those_of_the_script():
    assert (scaling.LOGITS_AT_ONCE, scaling.PACKED_LENGTH) == (grpo.LOGITS_AT_ONCE, grpo.PACKED_LENGTH)
    assert (scaling.LOGITS_AT_ONCE, scaling.PACKED_LENGTH) == (dapo.LOGITS_AT_ONCE, dapo.PACKED_LENGTH)


# --- Points and CSV ---------------------------------------------------------------------------------------------------

POINTS = scaling.cpu_points()


@pytest.mark.parametrize("point", [p for p in POINTS if p.part != "limit"], ids=lambda p: p.name)
def test_flags_are_those_of_the_scripts(point):
    """The scripts take them, and they say what the axis says."""
    script, words = SCRIPTS[point.script], scaling.command(point, "MODEL")
    args = tyro.cli(script.Args, args=words[1:])
    value = {"prompts": "num_prompts_per_step", "group": "num_generations", "length": "max_completion_length"}
    if name := {**value, "num_envs": "num_envs"}.get(point.axis):
        assert getattr(args, name) == int(point.value)
    if point.part == "language":
        assert args.model_name_or_path == "MODEL" and args.max_steps == point.steps and not args.eval_steps
        assert args.advantage == "none" if script is grpo else args.reward
    if point.axis == "size":
        assert point.model == point.value
    if point.script == "unimodal_poisson.py":
        assert args.num_envs * args.num_steps == 2048 and args.num_minibatches * args.update_epochs == 320


def test_metrics_of_grpo(tmp_path):
    """It has one file for all metrics; tokens are summed over steps there."""
    rows = [("num_tokens", 10), ("seconds/step", 2), ("seconds/rollout", 1), ("num_tokens", 40), ("seconds/step", 3)]
    lines = [f"{1 + n // 3},train/{tag},{value}\n" for n, (tag, value) in enumerate([*rows, ("seconds/rollout", 2)])]
    (tmp_path / "metrics.csv").write_text("step,tag,value\n" + "".join(lines))
    found = scaling.language_metrics(scaling.perf_of(tmp_path), 10)
    assert found["tokens"] == 30 and found["step_seconds"] == 3 and found["update_seconds"] == 1


def test_a_random_model_writes_to_the_end(tmp_path):
    """Every completion has exactly T tokens: the end token is outside the vocabulary."""
    scaling.make_model("0.8M", str(tmp_path))
    args = flags(model_name_or_path=str(tmp_path))
    model, tokenizer = grpo.load_model(args)
    assert parameters(CPU_MODELS["0.8M"]) == sum(x.numel() for x in model.parameters())
    assert min(model.generation_config.eos_token_id) >= model.config.vocab_size
    completions = grpo.generate(model, [[3, 4]] * 4, args, seeds=range(4))
    assert [len(completion.ids) for completion in completions] == [40] * 4
    assert not any(completion.ended for completion in completions)
    assert len(tokenizer.batch_decode([completion.ids for completion in completions])) == 4


# --- Tables -----------------------------------------------------------------------------------------------------------

