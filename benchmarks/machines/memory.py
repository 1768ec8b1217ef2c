"""How much memory a large model takes on a GPU, computed from the shape of the model and the flags.

    from benchmarks.machines.memory import memory_model
    memory_model("Qwen2.5-1.5B-Instruct", grpo.Args(bf16=True))["peak"]      # GB, 10^9 bytes

count_memory.py counts the bytes of grpo.py's update, tests those of rollouts of small models. vLLM is
taken at its word: awake, it has --vllm-memory of the GPU; asleep, what its CUDA graphs hold.
Prompts and completions are as long as the flags allow, and passes of the update as full. Of scripts
with several turns: every context has grown to --max-prompt-length, and a reply is at most as long as
a turn. --compile is counted in the head only. Not computed: the holes that the allocator leaves,
buffers of NCCL, and what a reward function holds.
"""

from dataclasses import dataclass, replace
from math import ceil, prod, sqrt
from pathlib import Path
from typing import Literal

LOGITS_AT_ONCE = 2**26  # of the scripts; logits in memory during the update
ATTENTION_LENGTH = 3000  # of the scripts; see divide there
MICRO_BATCH_TOKENS = 16384  # of the scripts, on a GPU: most tokens of a pass
BLOCK = 256  # of the scripts, on a GPU: columns by which the cache grows
STEPS_HELD = 2  # a decoding step's temporaries: of the recorded one, and of one that was not
RUNTIME = 1.0  # GB: CUDA with its libraries, or Python and torch
SPARE = 0.1  # share of a GPU that is left free for the holes of the allocator
ASLEEP = 1.0  # GB that vLLM keeps in the update, its CUDA graphs: a guess
TEAMS = {"search_qa": 3, "countdown": 2}  # agents of dr_mas.py; a team of one's own counts as 3


@dataclass(frozen=True)
class Model:
    """The shape of a Llama, of a Qwen 2.5 (with biases), or of a Qwen 3 (norms of queries, keys)."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int = 416
    tied: bool = True  # the head is the embedding
    kind: Literal["llama", "qwen2", "qwen3"] = "qwen3"

    @property
    def query(self) -> int:
        """Numbers of the queries of a token."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Numbers of the keys of a token."""
        return self.kv_heads * self.head_dim


PUBLIC_MODELS = {
    "Qwen2.5-0.5B-Instruct": Model(24, 896, 4864, 14, 2, 64, 151_936, True, "qwen2"),
    "Qwen2.5-1.5B-Instruct": Model(28, 1536, 8960, 12, 2, 128, 151_936, True, "qwen2"),
    "Qwen2.5-3B-Instruct": Model(36, 2048, 11008, 16, 2, 128, 151_936, True, "qwen2"),
    "Qwen2.5-7B-Instruct": Model(28, 3584, 18944, 28, 4, 128, 152_064, False, "qwen2"),
    "Qwen3-0.6B": Model(28, 1024, 3072, 16, 8, 128, 151_936, True, "qwen3"),
    "Qwen3-4B": Model(36, 2560, 9728, 32, 8, 128, 151_936, True, "qwen3"),
    "SmolLM2-135M-Instruct": Model(30, 576, 1536, 9, 3, 64, 49_152, True, "llama"),
    "SmolLM2-360M-Instruct": Model(32, 960, 2560, 15, 5, 64, 49_152, True, "llama"),
    "Llama-3.2-1B-Instruct": Model(16, 2048, 8192, 32, 8, 64, 128_256, True, "llama"),
}


def shape_of(name: str) -> Model | None:
    """The shape of a public model, given its name or a folder with that name, if it is known."""
    name = Path(name).name.lower()
    for known, shape in PUBLIC_MODELS.items():
        if known.lower() in (name, f"{name}-instruct"):
            return shape
    return None


def layer_shapes(model: Model) -> dict[str, list[tuple[int, ...]]]:
    """Shapes of the parameters of one layer: of linear maps with their biases, and of norms."""
    wide = [model.query, model.key, model.key, model.intermediate, model.intermediate]
    linear = [(width, model.hidden) for width in wide]
    linear += [(model.hidden, model.query), (model.hidden, model.intermediate)]
    if model.kind == "qwen2":
        linear += [(model.query,), (model.key,), (model.key,)]  # biases
    norms = [(model.hidden,)] * 2 + [(model.head_dim,)] * 2 * (model.kind == "qwen3")
    return {"linear": linear, "norms": norms}


def parameters(model: Model, processes: int = 1) -> int:
    """Number of parameters, or of those that one of several processes keeps under FSDP2, which cuts
    every tensor along its first dimension into equal pieces, rounded up."""
    layer = layer_shapes(model)["linear"] + layer_shapes(model)["norms"]
    embeddings = [(model.vocab, model.hidden)] * (1 if model.tied else 2)
    shapes = layer * model.layers + [(model.hidden,)] + embeddings
    return sum(ceil(shape[0] / processes) * prod(shape[1:]) for shape in shapes)


def adapter_parameters(model: Model, rank: int, processes: int = 1) -> int:
    """The same of adapters: two matrices for each linear map."""
    maps = [shape for shape in layer_shapes(model)["linear"] if len(shape) == 2]
    shapes = [pair for width, height in maps for pair in ((rank, height), (width, rank))]
    return model.layers * sum(ceil(shape[0] / processes) * shape[1] for shape in shapes)


def memory_model(
    shape: Model | str, flags, world_size: int = 1, script: str = "grpo", gpu: float = 80
) -> dict[str, float]:
    """GB on each GPU by part, and the sums at the worst moments: `start`, `rollout` (evaluations
    too), `update`, and `peak`, the largest of them with RUNTIME. flags: the Args of the script; gpu:
    GB of the GPU, of which vLLM has a share."""
    if isinstance(shape, str):
        shape = shape_of(shape)
    if flags.max_completion_length is None:
        flags = replace(flags, max_completion_length=1024)  # as the scripts have it
    fsdp = world_size > 1 and getattr(flags, "fsdp", False)
    shards = world_size if fsdp else 1
    compute = 2 if flags.bf16 else 4  # bytes of what linear maps take and give
    whole = parameters(shape)
    kept = parameters(shape, shards)
    adapters = adapter_parameters(shape, flags.lora_rank, shards)
    trained = adapters or kept

    policies = 1
    if script == "pi_play":
        policies = 2
    if script == "dr_mas" and not flags.share_model:
        policies = TEAMS.get(flags.env, 3)
    bases = 1 if script == "pi_play" else policies  # below the adapters
    held = {
        "weights": 4 * trained * policies + compute * kept * bases * (adapters > 0),
        "moments": 8 * trained * policies,
        "copies": 0,
    }
    if (flags.bf16 or fsdp) and not flags.vllm:  # they decode
        copied = whole * policies * (fsdp or not adapters)  # else frozen weights are shared
        held["copies"] += compute * (copied + adapter_parameters(shape, flags.lora_rank) * policies)
    if needs_reference(script, flags) and not adapters:
        held["copies"] += 4 * kept * bases
    if script == "nash_preference":
        held["copies"] += preference_copies(flags, compute * whole, 4 * kept, 4 * trained, held["copies"])
    if script == "pi_play":
        held["copies"] += 4 * whole  # the teacher
    if script == "spiral_rae":
        held["copies"] += compute * whole * start_plays(flags)
    if script == "opd":
        held["copies"] += compute * teacher_parameters(flags, shape, shards)
    if script == "critic_search" and flags.critic_model:  # whole on every process
        held["copies"] += compute * parameters(shape_of(flags.critic_model) or shape)
    gradients = 4 * trained  # of one policy, from the beginning of its update to the end

    engine = {"engine": flags.vllm_memory * gpu * 1e9} if flags.vllm else {}
    if flags.vllm:
        moments = [engine | moment for moment in engine_moments(script, shape, flags, compute, fsdp)]
    elif script in ("igpo", "critic_search", "empg", "arpo", "pi_play"):
        moments = turn_moments(script, shape, flags, compute)
    else:
        moments = rollout_moments(script, shape, flags, compute)
    rollout = max(moments, key=lambda moment: sum(moment.values()))
    moments = update_moments(script, shape, flags, compute, shards)
    update = max(moments, key=lambda moment: sum(moment.values()))
    # Until it is sharded, a model with adapters shares its frozen weights with the copy that decodes.
    shared = compute * whole * policies * (fsdp and adapters > 0 and not flags.vllm)
    first = held | {"copies": held["copies"] - shared}
    sums = {
        "start": start_bytes(script, shape, flags, first, trained, policies, sum(engine.values())),
        "rollout": sum(held.values()) + sum(rollout.values()),
        "update": sum(held.values()) + gradients + sum(update.values()),
    }
    found = held | {"gradients": gradients} | rollout | update | sums
    found = {name: size / 1e9 for name, size in found.items()}
    found["runtime"] = RUNTIME
    found["asleep"] = ASLEEP * flags.vllm
    found["peak"] = RUNTIME + max(found["start"], found["rollout"], found["update"] + found["asleep"])
    return found


def needs_reference(script: str, flags) -> bool:
    """Whether log-probabilities of the initial model are in the loss."""
    if script == "unlikeliness" and flags.method == "rep_exp":
        return True  # its hidden states
    return getattr(flags, "beta", 0) > 0 or (script == "nash_preference" and flags.method in ("inpo", "mnpo", "nash_mp"))


def teacher_parameters(flags, shape: Model, shards: int) -> int:
    """Those of the teacher of opd.py, whose head is not sharded; of one that is not known, the student's."""
    teacher = shape_of(flags.teacher or "") or shape
    head = teacher.vocab * teacher.hidden * (1 if teacher.tied else 2)
    return head + ceil((parameters(teacher) - head) / shards)


def preference_copies(flags, sampler: int, initial: int, trained: int, copies: int) -> int:
    """Bytes that nash_preference.py keeps beside those: weights to go back to after a trial step, or
    those of earlier policies; for the control the initial model, which takes turns in the sampler."""
    if flags.method == "nash_mp":
        return trained
    if flags.method == "mnpo":
        return trained * (flags.num_policies - 1)
    if flags.method != "grpo":
        return 0
    has_initial = flags.beta > 0 and not flags.lora_rank
    needs_sampler = copies == 0 and not flags.vllm and not flags.lora_rank  # adapters are small
    return sampler * needs_sampler + initial * (not has_initial)


def start_plays(flags) -> bool:
    """Whether spiral_rae.py needs the initial policy as an opponent."""
    return flags.opponent == "start" or bool(flags.eval_steps and "start" in flags.eval_opponents)


def start_bytes(
    script: str, shape: Model, flags, held: dict, trained: int, policies: int, engine: float
) -> float:
    """Before the first step. Models are whole and in float32 when they are loaded, checked and copied;
    then they get adapters, and vLLM starts."""
    whole = 4 * parameters(shape)
    copies = held["copies"]
    if script == "pi_play":  # the state of the optimizer is made with gradients of both policies
        return max(whole + copies, sum(held.values()) + 4 * trained * policies + engine)
    others = held["weights"] * (policies - 1) / policies  # of agents that were loaded before
    check = 12 * shape.vocab * flags.max_prompt_length  # logits of one prompt
    reference = whole * (needs_reference(script, flags) and not flags.lora_rank)
    # vLLM starts after the first model of a team, and before the others are loaded.
    return others + whole + max(check, reference, copies) + engine * (policies > 1)


# --- Rollout --------------------------------------------------------------------------------------


def sizes_of(flags) -> tuple[int, int, int]:
    """Tokens of a prompt and of a completion, and rows decoded at once."""
    return flags.max_prompt_length, flags.max_completion_length or 1024, flags.decode_batch_size


def cache_bytes(shape: Model, compute: int) -> int:
    """Keys and values of one token."""
    return shape.layers * 2 * shape.key * compute


def forward_bytes(shape: Model, compute: int) -> int:
    """What a layer holds at a time of one token, without gradients."""
    mlp = 3 * shape.intermediate * compute + shape.hidden * (2 * compute + 4)
    attention = (6 * shape.query + 2 * shape.hidden) * compute
    return max(mlp, attention)


def decoding_moments(shape: Model, flags, compute: int, read: int) -> list[dict[str, float]]:
    """Bytes by part: when the buffers of the cache grow for the last time, and in the last step.
    read: rows of the cache of the prompts."""
    S, T, rows = sizes_of(flags)
    old = S + BLOCK * ((T - 1) // BLOCK)  # columns before
    old_tokens = old * (rows if old > S else read)
    new_tokens = rows * (S + T)
    # Of one layer there are old keys and values, the rows chosen of one or both, and wider ones.
    one = 2 * old_tokens + max(2 * old * rows + new_tokens, old * rows + 2 * new_tokens)
    others = 2 * (shape.layers - 1) * max(old_tokens, new_tokens)
    growing = (one + others) * shape.key * compute
    # The logits of the prompts stay; of those of a step, three float32 tensors are made.
    first = rows * shape.vocab * compute
    step = rows * shape.vocab * (compute + 12)
    return [
        {"cache": growing, "sampling": first + (STEPS_HELD - 1) * step},
        {"cache": new_tokens * cache_bytes(shape, compute), "sampling": first + STEPS_HELD * step},
    ]


def rollout_moments(script: str, shape: Model, flags, compute: int) -> list[dict[str, float]]:
    """Bytes by part: while completions are written, and in the forward pass of the prompts."""
    S, _, rows = sizes_of(flags)
    group = 1  # completions of one prompt
    if script in ("grpo", "dapo", "gdpo", "nash_preference", "hpt", "ampo", "opd", "unlikeliness") and not flags.eval_steps:
        group = flags.num_generations
    prompts = ceil(rows / group)  # greedy evaluation writes one completion of each
    moments = decoding_moments(shape, flags, compute, prompts)
    prefill = prompts * S * forward_bytes(shape, compute) + S * S * (2 + compute)  # one mask
    moments.append({"cache": prompts * S * cache_bytes(shape, compute), "prefill": prefill})
    return moments


def turn_moments(script: str, shape: Model, flags, compute: int) -> list[dict[str, float]]:
    """Bytes by part in the last turn of scripts that keep a Memory of the context: while they read
    what is new, while they write, and while igpo.py scores the right answer."""
    S, T, rows = sizes_of(flags)
    new = min(S, 2 * T)  # of a turn: what was written, and the reply
    cell = cache_bytes(shape, compute)
    read = rows * new * forward_bytes(shape, compute) + rows * new * (S + new) * (2 + compute)
    first = rows * S * forward_bytes(shape, compute) + rows * S * S * (2 + compute)
    moments = [
        {"cache": rows * S * cell, "prefill": first},
        {"cache": rows * (2 * S + new) * cell, "prefill": read},
    ]
    for moment in decoding_moments(shape, flags, compute, rows):
        # The memory of the turn before, and that of this turn, stand beside the buffers.
        moments.append(moment | {"memory": rows * 2 * S * cell})
    if script == "igpo":
        moments.append({"cache": rows * 4 * (S + 0.5 * T) * cell})
    return moments


def engine_moments(script: str, shape: Model, flags, compute: int, fsdp: bool) -> list[dict[str, float]]:
    """Bytes by part beside vLLM: when it takes the embedding, the largest of the weights; while a
    copy of the initial policy plays; and while igpo.py scores the right answers with the policy."""
    head = shape.vocab * shape.hidden
    stored = compute if flags.lora_rank else 4
    moments = [{"loading": (compute + stored * fsdp) * head}]
    if script == "spiral_rae" and start_plays(flags):
        moments += rollout_moments(script, shape, flags, compute)
    if script == "igpo":
        S = flags.max_prompt_length
        tokens = max(flags.micro_batch_tokens or MICRO_BATCH_TOKENS, S)
        scoring = tokens * (forward_bytes(shape, compute) + cache_bytes(shape, compute))
        cast = 2 * parameters(shape) * (compute == 2 and not flags.lora_rank)
        moments.append({"scoring": scoring + tokens * S * (2 + compute), "cast weights": cast})
    return moments


def engine_rows(shape: Model | str, flags, gpu: float = 80) -> float:
    """Completions, with their prompts, whose cache vLLM has room for in its share of the GPU. Below
    1 it does not start; above --decode-batch-size more are of no use."""
    if isinstance(shape, str):
        shape = shape_of(shape)
    compute = 2 if flags.bf16 else 4
    S, T, rows = sizes_of(flags)
    tokens = min(16_384 if gpu >= 75 else 8_192, rows * (S + T))  # of a forward pass, in vLLM 0.32
    work = tokens * forward_bytes(shape, compute) + rows * shape.vocab * 12
    room = flags.vllm_memory * gpu * 1e9 - compute * parameters(shape) - work
    return room / ((S + T) * cache_bytes(shape, compute))


# --- Update ---------------------------------------------------------------------------------------


def packed_shape(script: str, flags) -> tuple[int, int, int]:
    """Tokens R * L, length L and predicted tokens N of the fullest pass. R * L is all that a pass
    may have, also where no whole number of rows of this length would have as many."""
    prompt, length, _ = sizes_of(flags)
    shared, own, predicted = prompt - 1, length, length  # tokens of a row: of all, of each completion
    group = getattr(flags, "num_generations", 1)
    if script in ("igpo", "critic_search", "empg", "arpo", "pi_play"):  # an episode ends when its context has S tokens, or a turn on
        shared, own = 0, prompt + length
        predicted = min(own, flags.max_turns * length)
    elif script in ("dr_mas", "spiral_rae", "advantage_alignment"):  # prompts differ
        group = 1
    limit = flags.micro_batch_tokens or MICRO_BATCH_TOKENS
    size = flags.micro_batch_size or limit  # a completion has a token or more

    best = prompt + sqrt(prompt * (prompt + ATTENTION_LENGTH))
    room = int(min(limit, best)) // 8 * 8 - shared
    fitting = max(1, room // own)  # completions in a row

    def parts(count: int) -> int:
        return ceil(count / fitting)

    groups, rest = divmod(size, group)
    largest = group if groups else rest
    in_row = min(largest, fitting)
    width = eights(shared + in_row * own)
    widest = max(width, eights(min(limit, int(best), shared + largest * own)))  # shorter ones may fill a row
    tokens = (groups * parts(group) + parts(rest)) * width
    if tokens <= limit:
        return tokens, widest, size * predicted
    tokens = max(limit, widest)
    if script == "nash_preference":  # a group is not divided over passes
        tokens = max(tokens, parts(group) * width)
    return tokens, widest, tokens * in_row * predicted // width


def eights(length: int) -> int:
    """Length of a row, padded to a multiple of 8."""
    return ceil(length / 8) * 8


def saved_bytes(shape: Model, compute: int, stream: int, autocast: bool, rank: int) -> int:
    """What autograd keeps of one layer and token. stream: bytes of a number between layers; rank: of
    the adapters, 0 without."""
    # Two norms keep their input and, for their own gradient, the normalised input; autocast casts
    # what they give for each linear map.
    normalised = 0 if rank else stream
    saved = shape.hidden * (2 * (4 + normalised) + (10 if autocast else 2 * compute))
    # Gate, up, their product and the activation; query, key and value for all heads, and output.
    saved += 4 * compute * (shape.intermediate + shape.query)
    saved += 4 * shape.heads  # logarithm of the sum of the softmax
    if shape.kind == "qwen3":  # norms of queries and keys
        saved += (4 + (0 if rank else compute)) * (shape.query + shape.key)
    saved += compute * (7 * rank + shape.query * (rank > 0 and autocast))
    return saved


def update_moments(script: str, shape: Model, flags, compute: int, shards: int) -> list[dict[str, float]]:
    """Bytes by part, of the fullest pass: at the end of the forward pass; in the backward
    pass at its logits, in its last layer, and where the gradients of a tied head and the embedding
    meet; while the teacher of pi_play.py reads."""
    tokens, L, N = packed_shape(script, flags)
    fsdp = shards > 1
    recomputed = flags.gradient_checkpointing
    taught = script == "opd" or (script == "pi_play" and flags.privileged_context != "none")
    linear = sum(map(prod, layer_shapes(shape)["linear"]))  # parameters of a layer
    head = shape.vocab * shape.hidden
    rank = flags.lora_rank
    trained = adapter_parameters(shape, rank) / shape.layers if rank else linear  # of a layer
    trained_head = 0 if rank else head
    # Autocast leaves the sums of layers in float32 and casts what a linear map needs. FSDP's mixed
    # precision casts the weights, and so everything; below adapters, they are in bfloat16.
    autocast = compute == 2 and not fsdp
    stream = compute if fsdp or rank else 4

    # Activations: inputs of layers, last norm and head, or all that the layers keep.
    layer = tokens * saved_bytes(shape, compute, stream, autocast, rank)
    layer_inputs = tokens * shape.hidden * stream
    activations = 3 * layer_inputs + N * shape.hidden * compute
    activations += shape.layers * (layer_inputs if recomputed else layer)
    base = {"masks": tokens * L * (1 + compute), "activations": activations}

    # Logits, divided by the temperature unless it is 1, and as log-probabilities. A compiled head
    # has larger chunks, and no more than logits with their gradients.
    chunk = min(N, max(1, LOGITS_AT_ONCE // shape.vocab) * (4 if flags.compile else 1)) * shape.vocab
    forward_logits = (8 if flags.temperature == 1 else 12) * chunk
    backward_logits = 12 * chunk
    if flags.compile:
        forward_logits = backward_logits = 2 * compute * chunk
    if N * shape.vocab > chunk:  # the sum of the head's gradients grows beside a chunk
        backward_logits = max(backward_logits + compute * trained_head, 3 * compute * trained_head)
    if taught:  # also those of the teacher, and what their divergence needs
        forward_logits += 20 * chunk
        backward_logits += 20 * chunk

    # Weights in bfloat16. Autocast keeps those of a forward pass until it ends, and without
    # checkpointing until their gradient. FSDP gathers embedding and head, and two layers.
    cast = 2 * trained * shape.layers * autocast
    cast_later = 0 if recomputed else cast
    cast_head = 2 * (trained_head + head * taught) * autocast
    gathered = compute * head * (1 if shape.tied else 2) * fsdp
    gathered_layers = 2 * compute * linear * fsdp

    # Gradients of a layer, and of the head, which wait for those of the embedding.
    inner = tokens * shape.intermediate * compute
    in_layer = inner * (2 if recomputed or rank else 1)  # of factors of an activation; of an adapter's input
    if recomputed:
        # What the head kept is gone by then, and one layer's input: the last layer's with --fsdp,
        # else it is one of those that the layer keeps.
        in_layer += layer - 4 * layer_inputs - N * shape.hidden * compute
    if rank and autocast:  # which made the gradient of an adapter's input float32
        in_layer = layer + 3 * inner if recomputed else 4 * inner
    own = shape.hidden * shape.intermediate if recomputed and not rank else trained  # not yet reduced
    in_layer += 2 * trained * autocast + (compute * own + 4 * trained + 2 * compute * linear) * fsdp
    waiting = (compute if fsdp else 4) * trained_head * (shape.tied or fsdp)
    if rank:
        meeting = 0
    elif fsdp and shape.tied:  # a float32 copy is reduced, after the weights were let go
        meeting = max(4 * compute, compute + 4 + 4 / shards) * head
    elif fsdp:
        meeting = (compute + 8 + 8 / shards) * head
    else:
        meeting = 12 * head * shape.tied

    moments = [
        base | {"cast weights": cast + cast_head + gathered + gathered_layers} | {"logits": forward_logits},
        base | {"cast weights": cast_later + cast_head + gathered, "logits": backward_logits},
        base | {"cast weights": cast_later + gathered, "layer": in_layer, "head": waiting},
        {"head": meeting},
    ]
    if taught:
        longest = 2 * flags.max_prompt_length + flags.max_completion_length
        read = max(longest, min(ceil(tokens / L) * longest, flags.micro_batch_tokens or MICRO_BATCH_TOKENS))
        teacher = read * (forward_bytes(shape, compute) + longest * (1 + compute))
        teacher += 2 * linear * autocast
        moments.append(base | {"cast weights": cast, "teacher": teacher})
    return moments
