"""The program that measures how cost grows: its points and its CSV."""

import pytest
import tyro

from algorithms import arac, dr_mas, fm3q, grpo, unimodal_poisson
from benchmarks import scaling
from benchmarks.memory import parameters
from benchmarks.scaling import CPU_MODELS

SCRIPTS = {"grpo.py": grpo, "dr_mas.py": dr_mas, "fm3q.py": fm3q, "arac.py": arac}
SCRIPTS["unimodal_poisson.py"] = unimodal_poisson
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
    args = grpo.Args(model_name_or_path=str(tmp_path), max_completion_length=40)
    model, tokenizer = grpo.load_model(args)
    assert parameters(CPU_MODELS["0.8M"]) == sum(x.numel() for x in model.parameters())
    assert min(model.generation_config.eos_token_id) >= model.config.vocab_size
    completions = grpo.generate(model, [[3, 4]] * 4, args, seeds=range(4))
    assert [len(completion.ids) for completion in completions] == [40] * 4
    assert not any(completion.ended for completion in completions)
    assert len(tokenizer.batch_decode([completion.ids for completion in completions])) == 4
