"""Every family of models, tiny and random: its log-probabilities are right, or it is refused."""

import copy
import math
from dataclasses import replace

import plain_decode
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from algorithms import grpo
from algorithms.grpo import Args, check_model, generate, longest_text, pack, refuse_unsupported

ARGS = Args(max_completion_length=12)
ONE_STEP = Args(max_completion_length=2)
PROMPTS = [list(range(10, 27)), list(range(40, 45)), list(range(70, 81))]  # longer than WINDOW
ROWS = [prompt for prompt in PROMPTS for _ in range(2)]
GROUPS = [[0, 1], [2, 3], [4, 5]]
WINDOW = 6
TWO_KINDS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
FOUR_LAYERS = TWO_KINDS | {"layer_types": TWO_KINDS["layer_types"] * 2, "num_hidden_layers": 4}
FOUR_LAYERS |= {"num_kv_shared_layers": 2}
QWEN_KINDS = {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
LATENT |= {"v_head_dim": 8, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1}
LATENT |= {"topk_group": 1, "first_k_dense_replace": 1, **EXPERTS}
OLD_NAMES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}

# name: type of model, and what its configuration has beyond SMALL
RIGHT = {
    "llama": ("llama", {}),
    "llama, eager": ("llama", {"attn_implementation": "eager"}),
    "qwen2": ("qwen2", {}),
    "qwen2, window not used": ("qwen2", QWEN_KINDS | {"use_sliding_window": False}),
    "qwen2, window": ("qwen2", QWEN_KINDS),
    "qwen2, window, eager": ("qwen2", QWEN_KINDS | {"attn_implementation": "eager"}),
    "qwen2_moe": ("qwen2_moe", EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 24}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "qwen3, window": ("qwen3", QWEN_KINDS | {"head_dim": 8}),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"num_experts": 4, "head_dim": 8}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "smollm3, window": ("smollm3", TWO_KINDS | {"use_sliding_window": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": WINDOW}),
    "ministral, all sliding": ("ministral", {"sliding_window": WINDOW, "head_dim": 8}),
    "ministral3": ("ministral3", {"head_dim": 8}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": WINDOW}),
    "phi": ("phi", {}),
    "phi3": ("phi3", {}),
    "phi3, window": ("phi3", {"sliding_window": WINDOW}),
    "phimoe": ("phimoe", {"num_local_experts": 4}),
    "gemma": ("gemma", {"head_dim": 8}),
    "gemma2": ("gemma2", TWO_KINDS | {"head_dim": 8, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", TWO_KINDS | {"head_dim": 8}),
    "gemma3, images": ("gemma3", TWO_KINDS | {"head_dim": 8}),
    "gemma3n": ("gemma3n_text", FOUR_LAYERS | {"head_dim": 8}),
    "gemma4": ("gemma4_text", FOUR_LAYERS | {"head_dim": 8}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", TWO_KINDS),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "exaone4": ("exaone4", TWO_KINDS),
    "gpt_oss": ("gpt_oss", TWO_KINDS | {"num_local_experts": 4, "head_dim": 8}),
    "gptj": ("gptj", OLD_NAMES | {"rotary_dim": 4}),
    "gpt2": ("gpt2", OLD_NAMES),
    "gpt_bigcode": ("gpt_bigcode", OLD_NAMES),
    "gpt_neox": ("gpt_neox", {}),
    "granite": ("granite", {"logits_scaling": 3.0}),
    "granitemoe": ("granitemoe", {"num_local_experts": 4}),
    "cohere": ("cohere", {"logit_scale": 0.5}),
    "cohere2": ("cohere2", TWO_KINDS | {"logit_scale": 0.5}),
    "stablelm": ("stablelm", {}),
    "starcoder2": ("starcoder2", {"sliding_window": WINDOW}),
    "deepseek_v2": ("deepseek_v2", LATENT | {"topk_method": "greedy"}),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "glm4": ("glm4", {"head_dim": 8}),
    "glm4_moe": ("glm4_moe", EXPERTS | {"n_routed_experts": 4, "head_dim": 8}),
    "falcon": ("falcon", {}),
    "nemotron": ("nemotron", {"head_dim": 8}),
    "ernie4_5": ("ernie4_5", {"head_dim": 8}),
    "seed_oss": ("seed_oss", {"head_dim": 8}),
}
# name: type of model, its configuration, words of the refusal
REFUSED = {
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}, "conv"),
    "window that the model ignores": ("llama", {"sliding_window": 4096}, "of decoding off by"),
    "layers that the model ignores": ("llama", TWO_KINDS, "AttributeError"),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}, "ValueError"),
    "falcon, alibi": ("falcon", {"alibi": True}, "ValueError"),
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}, "of decoding off by"),
    "opt": ("opt", {"ffn_dim": 32, "word_embed_proj_dim": 32}, "AttributeError"),
    "bert, sees both sides": ("bert", {}, "of decoding off by"),
}
# The configuration of these is enough, so they are not computed.
REFUSED_BY_CONFIGURATION = {
    "gpt_neo": "window_size",
    "doge": "keep_window_size",
    "llama4_text": "chunked_attention",
    "deepseek_v32": "indexed_attention",
    "lfm3": "conv",
}
REFUSED_BY_CONFIGURATION |= dict.fromkeys(["falcon_h1", "zamba2"], "hybrid")
REFUSED_BY_CONFIGURATION |= dict.fromkeys(["rwkv", "xlstm"], "recurrent layers")
LINEAR = "mamba2 qwen3_next qwen3_5_text jamba bamba granitemoehybrid nemotron_h minimax recurrent_gemma"
REFUSED_BY_CONFIGURATION |= dict.fromkeys(LINEAR.split(), "linear_attention")


def configuration(model_type: str, **more):
    small = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    small |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if model_type == "gemma3n_text":
        small |= {"activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0]}
        small |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}
    if model_type == "gemma4_text":
        small |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}
        small |= {"global_head_dim": 16, "num_global_key_value_heads": 1}
    if model_type == "gemma3":
        vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
        vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
        return AutoConfig.for_model("gemma3", text_config=small | more, vision_config=vision)
    return AutoConfig.for_model(model_type, **small | more)


def random_model(model_type: str, more: dict):
    """Weights larger than those of a new model, so that attention and positions matter."""
    more = dict(more)
    attention = more.pop("attn_implementation", None)
    config = configuration(model_type, **more)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.data = noise * 1.5 / math.sqrt(parameter.shape[-1])
        else:
            parameter.data += 0.2 * noise  # norms, biases, attention sinks
    model.generation_config.eos_token_id = [2]
    grpo.add_methods(model)
    return model.eval()


def gradients(model, packed) -> torch.Tensor:
    model.zero_grad()
    model.token_logprobs(packed, ARGS).sum().backward()
    parameters = [p for p in model.parameters() if p.grad is not None]
    return torch.cat([p.grad.flatten() for p in parameters])


@pytest.mark.parametrize("family", RIGHT)
def test_family_is_right(family):
    model_type, more = RIGHT[family]
    model = random_model(model_type, more)
    refuse_unsupported(model)
    check_model(model, PROMPTS[0], ARGS)  # with a window of 4
    if "sliding_window" in more:
        assert max(grpo.logprob_gaps(model, ROWS[:3], ARGS).values()) < 1e-3  # with its own

    for seeds in (None, range(6)):
        found = generate(model, ROWS, ARGS, seeds)
        plain = plain_decode.generate(model, ROWS, ARGS, seeds)
        assert [c.ids for c in found] == [c.ids for c in plain]

    completions = generate(model, ROWS, ONE_STEP, seeds=range(6))
    packed = pack(completions, GROUPS, model.device)
    kept = gradients(model, packed)
    grpo.recompute_layers(model)
    torch.testing.assert_close(gradients(model, packed), kept)

    bf16 = replace(ARGS, bf16=True)
    assert torch.isfinite(model.token_logprobs(packed, bf16)).all()
    generate(model.bfloat16(), ROWS, ONE_STEP, seeds=range(6))
    assert torch.isfinite(model.token_logprobs(packed, ARGS)).all()


@pytest.mark.parametrize("family", REFUSED)
def test_refused_by_the_check_in_one_sentence(family):
    model_type, more, words = REFUSED[family]
    model = random_model(model_type, more)
    with pytest.raises(SystemExit, match=words) as stop:
        refuse_unsupported(model)
        check_model(model, PROMPTS[0], ARGS)
    assert "\n" not in str(stop.value)


@pytest.mark.parametrize("model_type", REFUSED_BY_CONFIGURATION)
def test_refused_by_configuration_in_one_sentence(model_type):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type))
    with pytest.raises(SystemExit, match=REFUSED_BY_CONFIGURATION[model_type]) as stop:
        refuse_unsupported(model)
    assert "\n" not in str(stop.value)


def test_rope_that_stretches_sets_the_longest_text():
    more = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}
    assert longest_text(random_model("llama", {})) == 128
    assert longest_text(random_model("phi3", more)) == 64


def test_a_copied_model_has_a_head_of_its_own():
    model = random_model("llama", {})
    reference = copy.deepcopy(model)
    packed = pack(generate(model, ROWS, ARGS), GROUPS, model.device)
    before = reference.token_logprobs(packed, ARGS)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert torch.equal(reference.token_logprobs(packed, ARGS), before)
