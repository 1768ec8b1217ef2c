"""An agent task with JSON tools as Hermes and Qwen write them, and an API that fails now and then.

The chat template shows the tools, so they come with a flag; this file prints them:

python algorithms/igpo.py --env envs/examples/weather.py:Weather --model-name-or-path Qwen/Qwen2.5-1.5B-Instruct \
    --chat-template-kwargs "$(python -m envs.examples.weather)"
"""

import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor

from envs.control_tokens import without_control

DEGREES = {"Accra": 29, "Bern": 11, "Cairo": 33, "Delhi": 36, "Lima": 19, "London": 14, "Oslo": 6, "Quito": 16, "Tokyo": 22}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TEMPERATURE = {"name": "temperature", "description": "Degrees Celsius in a city now.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": TEMPERATURE}]
SECONDS = 2.0  # that all calls of a turn may take together
THREADS = ThreadPoolExecutor(64)  # calls at once


def temperature(city: str, luck: random.Random) -> int:
    """Stands for a request to a server. Give yours a timeout, too, so that its thread comes back."""
    chance = luck.random()
    if chance < 0.1:
        raise ConnectionError("the service is busy, try again")
    if chance < 0.12:
        time.sleep(2 * SECONDS)
    return DEGREES[city]


def call(text: str, luck: random.Random) -> dict:
    """What a call of a tool returns. What the model or the service does wrong is an answer, too; errors of this file are
    not caught, and end the run."""
    try:
        wanted = json.loads(text)
        name, city = wanted["name"], wanted["arguments"]["city"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {"error": "expected JSON with name and arguments"}
    if name != "temperature" or city not in list(DEGREES):
        return {"error": f"no {name} of {city}"}
    try:
        return {"celsius": temperature(city, luck)}
    except ConnectionError as error:
        return {"error": str(error)}


def right(problem: dict, text: str) -> float:
    answers = re.findall(r"<answer>\s*(.*?)\s*</answer>", text)
    return float(answers[-1:] == [problem["answer"]])


class Weather:
    reward_functions = {"right": right}
    reward_weights = (1.0,)

    def __init__(self, dataset: str | None = None):
        pairs = [(warm, cold) for warm in DEGREES for cold in DEGREES if DEGREES[warm] > DEGREES[cold]]
        self.pairs = random.Random(0).sample(pairs, len(pairs))

    def problem(self, warm: str, cold: str) -> dict:
        return {"cities": (warm, cold), "answer": str(DEGREES[warm] - DEGREES[cold])}

    def train_problem(self, index: int, seed: int) -> dict:
        return self.problem(*random.Random(f"train {seed} {index}").choice(self.pairs[8:]))

    def evaluation_problems(self, count: int) -> list[dict]:
        return [self.problem(*pair) for pair in self.pairs[:8][:count]]

    def prompt(self, problem: dict) -> list[dict]:
        warm, cold = problem["cities"]
        question = f"By how many degrees is {warm} warmer than {cold}? Call one tool at a time."
        return [{"role": "user", "content": f"{question} Write the number inside <answer> </answer>."}]

    def step(self, texts: list[str], turn: int, episodes: list) -> list[dict | None]:
        """All calls run at once, and who is too slow gets an error; a turn without a call ends the episode."""
        waiting = []
        for text, episode in zip(texts, episodes):
            found = re.search("<tool_call>(.*?)</tool_call>", text, re.DOTALL)
            luck = random.Random(f"{episode.problem} {turn} {text}")  # a resumed run has the same
            waiting.append(THREADS.submit(call, found[1], luck) if found else None)
        end = time.monotonic() + SECONDS
        replies = []
        for future in waiting:
            try:
                result = future and future.result(timeout=max(0.0, end - time.monotonic()))
            except TimeoutError:
                result = {"error": "no answer in time, try again"}
            content = without_control(json.dumps(result, ensure_ascii=False))  # a model may ask for <|im_end|>
            replies.append(result and {"role": "tool", "content": content})
        return replies

    def right_answer(self, problem: dict) -> tuple[str, str]:
        return "<answer>", problem["answer"]


if __name__ == "__main__":
    print(json.dumps({"tools": TOOLS}))
