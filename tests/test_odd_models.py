"""Models as people bring them: ends of turns, templates that refuse or open a thought, adapters, broken files."""

import dataclasses
import json
import shutil

import pytest
import safetensors.torch
import torch
import transformers
from language_runs import SMALL, completions, numbers, train
from processes import ROOT
from run_folders import refusal

from algorithms import advantage_alignment, ampo, grpo, hpt, igpo, spiral_rae

TINY = ROOT / "envs" / "tiny_lm" / "countdown"
TEMPLATE = (TINY / "chat_template.jinja").read_text()
REFUSES_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system message here') }}{% endif %}"
OPENS_THOUGHT = TEMPLATE.replace("<|assistant|>{% endif", "<|assistant|><think>\n{% endif")
END, USER = 1, 3  # <|end|> and <|user|>


@pytest.fixture
def odd(tmp_path):
    """A function that copies the tiny model with some files changed."""

    def copy(folder=TINY, **files) -> str:
        target = tmp_path / "model"
        shutil.copytree(folder, target)
        for name, change in files.items():
            path = target / name.replace("__", ".")
            if isinstance(change, dict):
                path.write_text(json.dumps(json.loads(path.read_text()) | change))
            else:
                path.write_text(change)
        return str(target)

    return copy


def base_model(odd, folder=TINY) -> str:
    """A model for which texts end with a token that its chat template never writes, as Qwen2.5-Base."""
    other = {"tokenizer_config__json": {"eos_token": "<|user|>"}}
    return odd(folder, **other, config__json={"eos_token_id": USER}, generation_config__json={"eos_token_id": USER})


def test_answers_of_a_base_model_end_where_its_template_ends_a_turn(odd, tmp_path):
    path = base_model(odd)
    values = SMALL | {"max_completion_length": 80}
    found = train(grpo, tmp_path / "base", **values, model_name_or_path=path, learning_rate=1e-4)
    assert found == train(grpo, tmp_path / "tiny", **values)
    assert found[1, "train/completions/clipped_ratio"] < 1
    settings = json.loads((tmp_path / "base" / "final" / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [END, USER], "whoever serves the trained model has to know, too"


def test_episodes_of_a_base_model_go_on_after_a_turn(odd):
    args = igpo.Args(model_name_or_path=base_model(odd, ROOT / "envs" / "tiny_lm" / "search_qa"), max_completion_length=64)
    model, tokenizer = igpo.load_model(args)
    ids = igpo.reply_ids(model, tokenizer, [[{"role": "user", "content": "x"}]], args)[0]
    assert tokenizer.decode(ids) == "<|end|><|user|>x<|end|><|assistant|>"


def test_demonstrations_end_as_answers_do(odd):
    path = base_model(odd)
    for script in (hpt, ampo):
        model, tokenizer = script.load_model(script.Args(model_name_or_path=path, max_completion_length=64))
        problem = {"question": "q", "demonstration": "1+1"}
        args = script.Args(max_completion_length=64)
        if script is hpt:
            ids = hpt.demonstration(problem, tokenizer)
        else:
            ids = ampo.solutions(problem, [5], tokenizer, args)[0].ids
        assert ids[-1] == END


def test_a_model_without_any_end_is_refused(odd, monkeypatch):
    config = {"config__json": {"eos_token_id": None}, "generation_config__json": {"eos_token_id": None}}
    template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    path = odd(**config, chat_template__jinja=template, tokenizer_config__json={"eos_token": None})
    assert "has no token that ends a turn" in refusal(grpo, monkeypatch, "--model-name-or-path", path)


def test_a_base_model_is_told_what_ends_its_turns(odd, capsys):
    grpo.load_model(grpo.Args(model_name_or_path=base_model(odd), max_completion_length=80))
    assert capsys.readouterr().out == "chat template: a turn ends by <|end|>; the tokenizer's end is <|user|>\n"


def test_a_template_whose_end_is_no_token_is_told(odd, tmp_path, capsys):
    (tmp_path / "chatml.jinja").write_text(TEMPLATE.replace("<|end|>", "<|im_end|>"))
    grpo.load_model(grpo.Args(chat_template_path=str(tmp_path / "chatml.jinja")))
    assert capsys.readouterr().out.startswith("chat template: a turn ends without a token that ends it; ")


@pytest.mark.parametrize("kept, lost", [("message['role'] != 'system'", "system"), ("loop.first", "user")])
def test_a_template_that_leaves_out_messages(odd, kept, lost, monkeypatch):
    path = odd(chat_template__jinja=TEMPLATE.replace("{% for message in messages %}", f"{{% for message in messages if {kept} %}}".replace("loop.first", "message == messages[0]")))
    words = ["--model-name-or-path", path, "--system-prompt", "Be brief.", "--max-completion-length", "80"]
    assert refusal(grpo, monkeypatch, *words).startswith(f"chat template: leaves out what {lost} says")


def test_a_template_that_refuses_a_system_message(odd, monkeypatch):
    path = odd(chat_template__jinja=REFUSES_SYSTEM + TEMPLATE)
    found = refusal(grpo, monkeypatch, "--model-name-or-path", path, "--system-prompt", "Be brief.", "--max-completion-length", "80")
    assert found.startswith("chat template: refuses messages of system, user (no system message here)")


@pytest.mark.parametrize("template", [TEMPLATE + "{% if %}", "{{ tools | length }}" + TEMPLATE, "Hello."])
def test_a_broken_template(odd, monkeypatch, template):
    path = odd(chat_template__jinja=template)
    assert refusal(grpo, monkeypatch, "--model-name-or-path", path).startswith("chat template: ")


def test_a_template_of_ones_own(odd, tmp_path, monkeypatch):
    path = odd(chat_template__jinja="{{ raise_exception('broken') }}")
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    own = {"model_name_or_path": path, "chat_template_path": str(tmp_path / "own.jinja"), "learning_rate": 1e-4}
    assert train(grpo, tmp_path / "own", **SMALL | own) == train(grpo, tmp_path / "tiny", **SMALL)
    assert (tmp_path / "own" / "final" / "chat_template.jinja").read_text() == TEMPLATE
    words = ("--model-name-or-path", path, "--chat-template-path", tmp_path / "nothing.jinja")
    assert "nothing.jinja" in refusal(grpo, monkeypatch, *words)


def test_a_thought_that_the_template_opens_belongs_to_the_answer(odd):
    args = grpo.Args(model_name_or_path=odd(chat_template__jinja=OPENS_THOUGHT), max_completion_length=8)
    model, tokenizer = grpo.load_model(args)
    task, _ = grpo.load_task(grpo.Args())
    seen = []
    task.reward_functions = {"seen": lambda problem, text: seen.append(text) or 0.0}
    problems = task.evaluation_problems(2)
    found = grpo.complete(model, tokenizer, task, problems, 1, args)
    assert seen == [completion.text for completion in found]
    for completion in found:
        assert completion.text == "<think>\n" + tokenizer.decode(completion.ids, skip_special_tokens=True)


@pytest.mark.parametrize("script", [advantage_alignment, spiral_rae], ids=lambda s: s.__name__[11:])
def test_a_thought_that_the_template_closes_is_no_part_of_a_move(script, tmp_path, monkeypatch):
    """As of Qwen3 without thinking: an action without a box is legal, in games and in read-outs."""
    (tmp_path / "closes.jinja").write_text(OPENS_THOUGHT.replace("<think>\n", "<think>\n\n</think>\n\n"))
    args = script.Args(chat_template_path=str(tmp_path / "closes.jinja"), max_completion_length=8, eval_samples=1)
    args = dataclasses.replace(args, games=("ipd" if script is advantage_alignment else "kuhn",))
    model, tokenizer = script.load_model(args)

    def write(sampler, prompts, args, seeds):
        texts = [tokenizer.decode(prompt) for prompt in prompts]
        assert all(text.endswith("<think>\n\n</think>\n\n") for text in texts)
        words = ["[call]" if "[call]" in text else "[bet]" if "[bet]" in text else "[A]" for text in texts]
        rows = zip(prompts, tokenizer(words, add_special_tokens=False)["input_ids"])
        return [script.Completion(prompt, ids, [0.0] * len(ids), True) for prompt, ids in rows]

    monkeypatch.setattr(script, "generate", write)
    match = script.training_match(0, args)
    if script is advantage_alignment:
        script.play(model, tokenizer, [match], args)
        assert match.illegal == 0
        assert script.evaluate_ipd(model, tokenizer, args, 0, 0, 1)["eval/ipd/exact/self"] == pytest.approx(3)
    else:
        script.play({"policy": model}, tokenizer, [match], args)
        assert match.game.reason == "win"
        assert script.evaluate_kuhn(model, tokenizer, args, {"kuhn": []}, 0, 1)["eval/kuhn/illegal"] == 0


@pytest.mark.parametrize(
    "prompt, opening",
    [
        ("<|user|>a<|end|><|assistant|>", ""),
        ("<|user|>a<|end|><|assistant|><think>\n", "<think>\n"),
        ("<|user|>a<|end|><|assistant|><think>\n\n</think>\n\n", "<think>\n\n</think>\n\n"),  # Qwen3 without thinking
        ("<|user|>write <think><|end|><|assistant|>", ""),
    ],
)
def test_what_a_prompt_opens(prompt, opening):
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    ids = tokenizer.encode("2+1", add_special_tokens=False)
    assert grpo.answer_text(tokenizer, tokenizer.encode(prompt), [*ids, END]) == opening + "2+1"


def test_tags_that_are_special_tokens(odd, monkeypatch):
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["special"] = True
    path = odd(tokenizer__json=json.dumps(tokenizer))
    assert "its tokenizer loses <answer>, which rewards read" in refusal(grpo, monkeypatch, "--model-name-or-path", path, "--max-completion-length", "80")


def test_weights_that_were_cut_off(odd, monkeypatch):
    path = odd(model__safetensors="version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    assert "a pointer of Git LFS?" in refusal(grpo, monkeypatch, "--model-name-or-path", path)


def test_defaults_that_depend_on_the_model(tmp_path, monkeypatch):
    """The tiny model has 2048 positions, as many as prompts and answers of the default lengths."""
    train(grpo, tmp_path / "tiny", num_prompts_per_step=2, num_generations=4, eval_steps=0, save_steps=0)
    assert json.loads((tmp_path / "tiny" / "args.json").read_text())["max_completion_length"] == 80
    words = ("--model-name-or-path", TINY, "--max-prompt-length", "1025")
    assert "has 2048 positions" in refusal(grpo, monkeypatch, *words)


def test_a_run_is_not_its_model(tmp_path, monkeypatch):
    train(grpo, tmp_path / "run", **SMALL | {"save_steps": 1, "lora_rank": 2})
    (checkpoint,) = (tmp_path / "run").glob("checkpoints/*")
    for folder, kind in ((tmp_path / "run", "a run"), (checkpoint, "a checkpoint"), (tmp_path / "run" / "final" / "adapter", "an adapter")):
        found = refusal(grpo, monkeypatch, "--model-name-or-path", folder)
        assert found.endswith(f"{kind}; the trained model is in RUN/final")


def test_a_small_adapter_reaches_the_sampler_in_bfloat16():
    """Merged into weights in bfloat16, nearly all of it would be lost to rounding."""
    args = grpo.Args(lora_rank=2, bf16=True)
    model, _ = grpo.load_model(args)
    model.to(torch.bfloat16).to(torch.float32)
    grpo.add_adapters(model, args)
    sampler = grpo.copy_model(model, torch.bfloat16)
    for name, weight in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(weight, std=1e-6)
    grpo.refresh(sampler, model)
    name = "model.layers.0.mlp.up_proj"
    layers = [policy.get_submodule(name) for policy in (model, sampler)]
    changes = [layer.get_delta_weight("default").float() for layer in layers]
    assert 1e-8 < changes[0].abs().mean() < 1e-4
    survives = (changes[0] * changes[1]).sum() / changes[0].square().sum()
    assert 0.99 < survives < 1.01
    weight = layers[0].base_layer.weight.float()
    merged = (weight + changes[0]).bfloat16().float() - weight
    assert (changes[0] * merged).sum() / changes[0].square().sum() < 0.5
    shared = [policy.get_submodule(name).base_layer.weight.data_ptr() for policy in (model, sampler)]
    assert shared[0] == shared[1], "frozen weights are in memory once"


def test_answers_in_the_file_of_completions_are_whole(odd, tmp_path):
    path = odd(chat_template__jinja=OPENS_THOUGHT)
    values = SMALL | {"max_completion_length": 16, "model_name_or_path": path}
    train(grpo, tmp_path / "run", **values)
    assert all(row["completion"].startswith("<think>\n") for row in completions(tmp_path / "run"))
    assert numbers(tmp_path / "run")[1, "train/completions/mean_length"] <= 16


def test_a_model_without_some_of_its_weights(odd, monkeypatch):
    """transformers would draw them at random and say so in a report."""
    path = odd()
    weights = safetensors.torch.load_file(f"{path}/model.safetensors")
    name = next(name for name in sorted(weights) if "layers.0" in name)
    bad = weights | {name: weights[name] * torch.nan}
    safetensors.torch.save_file(bad, f"{path}/model.safetensors", {"format": "pt"})
    assert "some of its weights are not finite" in refusal(grpo, monkeypatch, "--model-name-or-path", path)
    del weights[name]
    safetensors.torch.save_file(weights, f"{path}/model.safetensors", {"format": "pt"})
    assert f"without weights for {name}; is it complete?" in refusal(grpo, monkeypatch, "--model-name-or-path", path)
