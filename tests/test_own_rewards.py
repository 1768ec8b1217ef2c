"""Reward functions of one's own: several at once, in batches, async, in files of any name, failing."""

import asyncio
import importlib
import threading
import time
import types

import pytest

from algorithms import grpo, nash_preference

INPUTS = [({"question": str(n)}, f"text {n}") for n in range(24)]


def args(threads: int):
    return types.SimpleNamespace(reward_threads=threads)


class Counter:
    """Counts how many calls run at once, which end in another order than they began."""

    def __init__(self):
        self.lock = threading.Lock()
        self.running = self.most = 0

    def enter(self, change: int):
        with self.lock:
            self.running += change
            self.most = max(self.most, self.running)

    def __call__(self, problem, text):
        self.enter(1)
        time.sleep(0.002 * (int(problem["question"]) % 3 + 1))
        self.enter(-1)
        return float(problem["question"])


class AsyncCounter(Counter):
    async def __call__(self, problem, text):
        self.enter(1)
        await asyncio.sleep(0.002 * (int(problem["question"]) % 3 + 1))
        self.enter(-1)
        return float(problem["question"])


@pytest.mark.parametrize("kind", [Counter, AsyncCounter])
@pytest.mark.parametrize("threads", [1, 6])
def test_several_at_once_in_the_same_order(kind, threads):
    function = kind()
    assert grpo.call_each("f", function, INPUTS, args(threads)) == [float(n) for n in range(24)]
    assert function.most == threads


def test_one_at_a_time_stays_in_the_main_thread():
    """There signals work, by which some functions limit their time."""
    caller = threading.current_thread()
    assert sum(grpo.call_each("f", lambda *_: threading.current_thread() is caller, INPUTS, args(1))) == 24
    assert sum(grpo.call_each("f", lambda *_: threading.current_thread() is caller, INPUTS, args(3))) == 0


def test_async_functions_share_one_event_loop():
    """A client of a server belongs to the loop in which it was made."""
    loops = set()

    async def score(problem, text):
        loops.add(asyncio.get_running_loop())
        return 1.0

    for _ in range(2):
        grpo.call_each("f", score, INPUTS, args(3))
    assert len(loops) == 1


def test_batches():
    calls = []

    def score(problems, texts):
        calls.append((problems, texts))
        return [float(problem["question"]) for problem in problems]

    async def later(problems, texts):
        return score(problems, texts)

    score.batched = later.batched = True
    for function in (score, later):
        assert grpo.call_each("f", function, INPUTS, args(4)) == [float(n) for n in range(24)]
    assert calls == 2 * [([row for row, _ in INPUTS], [text for _, text in INPUTS])]
    assert grpo.call_each("f", score, [], args(1)) == []


def test_a_function_cannot_change_the_problem():
    problem = {"question": "a", "parts": []}

    def careless(problem, text):
        problem["question"] += " again"
        problem["parts"].append(1)
        return float(len(problem["question"]))

    assert grpo.call_each("f", careless, [(problem, "x")] * 3, args(1)) == [7.0, 7.0, 7.0]
    assert problem == {"question": "a", "parts": []}


def failing(problem, text):
    return 1 / (0 if text == "text 7" else 1)


async def failing_later(problem, text):
    return failing(problem, text)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("function", [failing, failing_later])
def test_an_exception_names_its_text_and_keeps_its_traceback(function, threads):
    with pytest.raises(SystemExit) as stop:
        grpo.call_each("reward function f", function, INPUTS, args(threads))
    sentence, _, rest = stop.value.code.partition("\n")
    assert sentence == "reward function f: failed for 'text 7'"
    assert "ZeroDivisionError" in rest and "in failing" in rest and 'text == "text 7"' in rest


@pytest.mark.parametrize("value, shown", [("1", "'1'"), (None, "None"), ([1.0], "[1.0]"), (float("nan"), "nan"), (1e30, "1e+30"), (10**400, "a huge number")])
def test_what_is_no_number_is_shown(value, shown):
    with pytest.raises(SystemExit) as stop:
        grpo.call_each("reward function f", lambda problem, text: value, INPUTS, args(1))
    assert stop.value.code == f"reward function f: returned {shown} for 'text 0', expected a number of at most 15 digits"


def test_preferences_are_asked_for_at_once():
    function = Counter()
    task = types.SimpleNamespace(preference=lambda problem, a, b: function(problem, a) / 24)
    pairs = [(problem, text, text if n % 5 == 0 else "b") for n, (problem, text) in enumerate(INPUTS)]
    expected = [0.5 if n % 5 == 0 else n / 24 for n in range(24)]
    assert nash_preference.prefer(task, pairs, args(4)) == expected
    assert function.most == 4


def test_files_of_any_name(tmp_path, monkeypatch):
    """Also of a module that Python has, and two of one name in two folders."""
    for name in ("math.py", "rewards.v2.py", "my-rewards.py", "a/score.py", "b/score.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"def f(problem, completion):\n    return {name!r}\n")
        found = grpo.from_file("--reward", f"{tmp_path / name}:f", "problem", "completion")
        assert found({}, "") == name
        assert grpo.from_file("--reward", f"{tmp_path / name}:f") is found, "imported once"
    import math

    assert math.pi > 3
    for name in ("time", "envs"):  # one that has no file, and the folder of this repository
        (tmp_path / f"{name}.py").write_text(f"def f(problem, completion):\n    return {name!r}\n")
        importlib.import_module(name)
        assert grpo.from_file("--reward", f"{tmp_path / name}.py:f", "problem", "completion")({}, "") == name
