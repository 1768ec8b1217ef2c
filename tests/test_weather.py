"""The example with JSON tools: what its API does, and a chat that is the template's, token for token."""

import json
import sys
import time
from types import SimpleNamespace

import pytest
from language_runs import SMALL
from processes import ROOT

from algorithms import igpo
from envs.examples import weather

# As Qwen's: tools in front, a tool's reply inside a message of the user.
TEMPLATE = """\
{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|end|>{% endif %}\
{% for message in messages %}{% if message['role'] == 'tool' %}<|user|><tool_response>{{ message['content'] }}\
</tool_response><|end|>{% else %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def wish(name: str, **arguments) -> str:
    return f"<think>t</think><tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answers(texts: list[str], turn: int = 1) -> list[dict | None]:
    episodes = [SimpleNamespace(problem={"cities": ("Cairo", "Oslo")}) for _ in texts]
    replies = weather.Weather().step(texts, turn, episodes)
    assert all(reply is None or reply["role"] == "tool" for reply in replies)
    return [reply and json.loads(reply["content"]) for reply in replies]


def test_answers_of_the_tool(monkeypatch):
    monkeypatch.setattr(weather.random.Random, "random", lambda self: 0.5)
    wrong = "expected JSON with name and arguments"
    texts = [wish("temperature", city="Oslo"), "<answer>3</answer>", wish("rain", city="Oslo"), wish("temperature", city=["Oslo"])]
    texts += ["<tool_call>[]</tool_call>", "<tool_call>{</tool_call>", wish("temperature", town="Oslo"), wish("<|im_end|>", city=1)]
    assert answers(texts) == [
        {"celsius": 6},
        None,
        {"error": "no rain of Oslo"},
        {"error": "no temperature of ['Oslo']"},
        *3 * [{"error": wrong}],
        {"error": "no   of 1"},
    ]


def test_a_service_that_fails_or_hangs(monkeypatch):
    """The others of the batch get their answers, in the time of one timeout."""
    monkeypatch.setattr(weather, "SECONDS", 0.3)
    luck = iter([0.05, 0.11, 0.5] * 8)
    monkeypatch.setattr(weather.random.Random, "random", lambda self: next(luck))
    began = time.perf_counter()
    found = answers(24 * [wish("temperature", city="Cairo")])
    assert time.perf_counter() - began < 1.5, "eight that hang one after another take 4.8 seconds"
    for result in ({"error": "the service is busy, try again"}, {"error": "no answer in time, try again"}, {"celsius": 33}):
        assert found.count(result) == 8
    monkeypatch.undo()
    rates = [answers([wish("temperature", city="Cairo")], turn)[0].get("celsius") for turn in range(3, 9)]
    assert rates == [answers([wish("temperature", city="Cairo")], turn)[0].get("celsius") for turn in range(3, 9)]


def test_an_error_of_one_s_own_is_not_an_answer(monkeypatch):
    monkeypatch.setattr(weather, "temperature", lambda city, luck: [][1])
    with pytest.raises(IndexError):
        answers([wish("temperature", city="Cairo")])


def test_a_chat_is_what_the_template_writes(tmp_path, monkeypatch):
    """Tools from --chat-template-kwargs, two calls, an answer: the ids are those of the whole chat in one piece."""
    (tmp_path / "hermes.jinja").write_text(TEMPLATE)
    args = igpo.Args(
        **SMALL,
        env=str(ROOT / "envs" / "examples" / "weather.py:Weather"),
        model_name_or_path=str(ROOT / "envs" / "tiny_lm" / "search_qa"),
        chat_template_path=str(tmp_path / "hermes.jinja"),
        chat_template_kwargs=json.dumps({"tools": weather.TOOLS}),
    )
    task, (problem, *_) = igpo.load_task(args)
    model, tokenizer = igpo.load_model(args)
    ends, generate = model.generation_config.eos_token_id[:1], igpo.generate
    texts = [*(wish("temperature", city=city) for city in problem["cities"]), f"<answer>{problem['answer']}</answer>"]

    def scripted(model, contexts, args, seeds=None, memory=None):
        completions, memory = generate(model, contexts, args, seeds, memory)
        for completion in completions:
            text = texts[tokenizer.decode(completion.prompt).count("<tool_response>")]
            completion.ids = tokenizer(text, add_special_tokens=False)["input_ids"] + ends
            completion.logprobs, completion.ended = [-1.0] * len(completion.ids), True
        return completions, memory

    monkeypatch.setattr(igpo, "generate", scripted)
    monkeypatch.setattr(sys.modules[type(task).__module__], "temperature", lambda city, luck: weather.DEGREES[city])
    (episode,) = igpo.play(model, tokenizer, task, [problem], 1, args, [1])
    messages = task.prompt(problem)
    for text, city in zip(texts, problem["cities"]):
        messages += [{"role": "assistant", "content": text}]
        messages += [{"role": "tool", "content": json.dumps({"celsius": weather.DEGREES[city]})}]
    messages += [{"role": "assistant", "content": texts[-1]}]
    whole = tokenizer.apply_chat_template(messages, tools=weather.TOOLS, return_dict=True)["input_ids"]
    assert episode.prompt + episode.ids == whole
    assert tokenizer.decode(whole).startswith('<|system|>{"type": "function"')
    assert episode.rewards == (1.0,)
