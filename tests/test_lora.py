"""LoRA and truncated importance sampling: reference numbers, the gradient of an adapter, the script as people run it."""

import math
import sys

import language_runs
import peft
import pytest
import torch
import transformers
from language_runs import kill_and_resume, numbers, train, two_processes_equal_one
from run_folders import name_of, refusal

from algorithms import (
    advantage_alignment,
    ampo,
    arpo,
    critic_search,
    dapo,
    dr_mas,
    empg,
    gdpo,
    grpo,
    hpt,
    igpo,
    nash_preference,
    opd,
    pi_play,
    spiral_rae,
    unlikeliness,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
LORA = language_runs.SMALL | {"max_steps": 2, "lora_rank": 4, "learning_rate": 1e-2, "max_completion_length": 48}
OWN = {  # flags of scripts with several models, or with another model to sample from or to compare with
    grpo: {},
    opd: {},
    dr_mas: {"max_rounds": 2, "share_model": True},
    nash_preference: {"method": "nash_mp", "learning_rate": 1e-3},
    pi_play: {"num_documents_per_step": 8, "num_answers": 2, "examiner_steps": 1, "student_steps": 1},
}
SCRIPTS = {script: LORA | own for script, own in OWN.items()}
ONE_STEP = LORA | {"max_steps": 1, "bf16": True}
OTHERS = {script: ONE_STEP for script in (dapo, gdpo, hpt, ampo, unlikeliness, igpo, critic_search, empg, arpo)}
OTHERS[spiral_rae] = {key: ONE_STEP[key] for key in ("max_steps", "lora_rank", "bf16", "eval_steps", "save_steps")}
OTHERS[spiral_rae] |= {"games": ("kuhn",), "num_games_per_step": 6, "max_completion_length": 32}
OTHERS[advantage_alignment] = OTHERS[spiral_rae] | {"games": ("split",), "num_games_per_step": 4}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Flags and folder of two uninterrupted steps with a KL penalty."""
    folder = tmp_path_factory.mktemp("runs")
    values = LORA | {"save_steps": 1, "beta": 0.04}
    train(grpo, folder / "whole", **values)
    return values, folder / "whole"


def test_the_reference_is_the_base_and_the_sampler_the_merged_policy(whole):
    found = numbers(whole[1])
    assert found[1, "train/kl"] == 0, "before the first step"
    assert found[2, "train/kl"] > 1e-5
    assert 0 < found[2, "train/sampling/logprob_difference/max"] < 1e-3


def test_final_is_the_merged_model_and_the_adapter_is_pefts(whole):
    """The adapter says what model it is for."""
    base = transformers.AutoModelForCausalLM.from_pretrained(grpo.model_path(grpo.Args()))
    final = transformers.AutoModelForCausalLM.from_pretrained(whole[1] / "final")
    ids = torch.arange(5, 25)[None]
    before = base(ids).logits
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(whole[1] / "final" / "adapter")(ids).logits
    torch.testing.assert_close(final(ids).logits, adapted, atol=1e-4, rtol=1e-4)
    assert (adapted - before).abs().max() > 0.01


def test_a_checkpoint_holds_adapters_only(whole):
    files = whole[1].glob("checkpoints/*/*")
    weights = grpo.load_model(grpo.Args())[0].num_parameters()
    assert sum(path.stat().st_size for path in files) < 4 * weights, "one copy of the weights in bytes"


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_goes_on_after_a_kill(script, tmp_path):
    """Its second step samples with the merged weights that the first one left."""
    values = SCRIPTS[script] | {"save_steps": 1}
    found = train(script, tmp_path / "whole", **values)
    gaps = [value for (_, tag), value in found.items() if tag.endswith("sampling/logprob_difference/max")]
    assert gaps and max(gaps) < 1e-3
    kill_and_resume(script, tmp_path / "whole", tmp_path, 2, **values)


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_two_processes_equal_one(script, tmp_path):
    kinds, steps = (("plain",), 2) if script is pi_play else (("plain", "fsdp"), 1)  # examiner, student; no FSDP
    values = SCRIPTS[script] | {"max_steps": steps, "learning_rate": 1e-3}
    two_processes_equal_one(script, tmp_path, kinds, **values)


def test_under_fsdp_the_reference_is_the_base(tmp_path):
    two_processes_equal_one(grpo, tmp_path, ("fsdp",), **LORA | {"beta": 0.04, "num_iterations": 2, "max_steps": 1})


@pytest.mark.parametrize("script", OTHERS, ids=name_of)
def test_bfloat16_corrects_for_the_sampler(script, tmp_path):
    """In hpt.py and ampo.py also with demonstrations, which nobody sampled."""
    found = train(script, tmp_path / "run", **OTHERS[script])
    ratio = found[1, "train/sampling/importance_sampling_ratio/mean"]
    assert ratio != 1 and math.isclose(ratio, 1, abs_tol=0.02)
    assert (tmp_path / "run" / "final" / "adapter" / "adapter_config.json").exists()


@pytest.mark.parametrize("package, flag", [("vllm", ("--vllm",)), ("peft", ("--lora-rank", "4"))])
def test_a_missing_package_is_named_with_the_command_that_installs_it(package, flag, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    found = refusal(grpo, monkeypatch, *flag, "--output-dir", tmp_path / "run")
    assert found.startswith(flag[0]) and f"pip install {package}" in found
