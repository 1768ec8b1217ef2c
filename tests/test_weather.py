"""The example with JSON tools: what its API does when it works, fails or hangs."""

import json
import time
from types import SimpleNamespace

from envs.examples import weather


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
