"""--compile: the gradients of the update are those without it."""

import copy
import shutil
from dataclasses import replace

import pytest
import torch
from language_runs import SMALL, numbers, train
from processes import ROOT, train_by_two
from run_folders import assert_close, assert_same_weights
from simulated_cuda import compiler
from test_grpo import ADVANTAGES, BASE, Recorder, relative, some_batch, tiny_model
from transformers import AutoModelForCausalLM

from algorithms import grpo

pytestmark = pytest.mark.skipif(compiler() is None, reason="torch.compile needs a C++ compiler")


@pytest.mark.parametrize("kind", ["layers", "gradient_checkpointing", "lora"])
def test_gradients_are_those_without(kind, monkeypatch):
    monkeypatch.setattr(grpo, "LOGITS_AT_ONCE", 64 * 7)  # several chunks of logits
    model = tiny_model(0)
    batch = some_batch(model)
    args = replace(BASE, lora_rank=4) if kind == "lora" else BASE
    if kind == "lora":
        grpo.add_adapters(model, args)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    expected = gradient_of(model, batch, args)
    compiled = copy.deepcopy(model)
    layers = [layer.forward for layer in compiled.model.layers]
    grpo.compile_layers(compiled)
    assert [layer.forward for layer in compiled.model.layers] != layers
    if kind == "gradient_checkpointing":
        grpo.recompute_layers(compiled)
    found = gradient_of(compiled, batch, replace(args, compile=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert relative(found, expected) < 1e-5
    with torch.no_grad():  # decoding is as before
        plain = [c.ids for c in grpo.generate(model, [[7, 8, 9]] * 4, BASE, range(4))]
        assert [c.ids for c in grpo.generate(compiled, [[7, 8, 9]] * 4, BASE, range(4))] == plain


def gradient_of(model, batch, args) -> torch.Tensor:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    recorder = Recorder(torch.nn.ParameterList(trained))
    grpo.update(model, None, recorder, batch, ADVANTAGES, args)
    return recorder.gradient


def test_sharded_and_recomputed(tmp_path):
    """Two processes with --compile --fsdp --gradient-checkpointing take the step of one without. With one layer of the
    tiny model, because each layer takes some seconds to compile."""
    shutil.copytree(ROOT / "envs" / "tiny_lm" / "countdown", tmp_path / "model")
    fewer = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **fewer)
    model.save_pretrained(tmp_path / "model")
    values = SMALL | {"model_name_or_path": str(tmp_path / "model"), "max_steps": 1}
    flags = {"fsdp": True, "gradient_checkpointing": True, "compile": True}
    train_by_two(tmp_path, "grpo", [values | flags | {"output_dir": str(tmp_path / "two")}])
    expected = train(grpo, tmp_path / "one", **values)
    assert_close(numbers(tmp_path / "two"), expected, relative=1e-3)
    assert_same_weights(tmp_path / "two", tmp_path / "one")
