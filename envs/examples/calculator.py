"""An agent task of one's own, complete: sums, and a calculator as the tool.

python algorithms/igpo.py --env envs/examples/calculator.py:Calculator --model-name-or-path ...
"""

import random
import re

EXAMPLE = [  # a small model copies what it sees
    {"role": "user", "content": "Use the calculator. What is 12 * (3 + 4)?"},
    {"role": "assistant", "content": "<calc>12*(3+4)</calc>"},
    {"role": "user", "content": "<result>84</result>"},
    {"role": "assistant", "content": "<answer>84</answer>"},
]


def calculate(formula: str) -> str:
    if "**" in formula or not re.fullmatch(r"[\d\s+*()-]{1,50}", formula):
        return "only numbers, + - * and brackets, please"
    try:
        result = eval(formula)
    except (SyntaxError, TypeError, OverflowError):
        result = None
    return str(result) if isinstance(result, int) else "this is no formula"  # () is none


def right(problem: dict, text: str) -> float:
    answers = re.findall(r"<answer>\s*(.*?)\s*</answer>", text)
    return float(answers[-1:] == [problem["answer"]])


class Calculator:
    reward_functions = {"right": right}
    reward_weights = (1.0,)

    def __init__(self, dataset: str | None = None):
        pass  # the problems are generated

    def problem(self, generator: random.Random, for_evaluation: bool) -> dict:
        while True:
            a, b, c = (generator.randint(2, 99) for _ in range(3))
            if ((a + b + c) % 16 == 0) == for_evaluation:  # one in 16 is never trained on
                return {"question": f"{a} * ({b} + {c})", "answer": str(a * (b + c))}

    def train_problem(self, index: int, seed: int) -> dict:
        return self.problem(random.Random(f"train {seed} {index}"), False)

    def evaluation_problems(self, count: int) -> list[dict]:
        return [self.problem(random.Random(f"evaluation {index}"), True) for index in range(count)]

    def prompt(self, problem: dict) -> list[dict]:
        return EXAMPLE + [{"role": "user", "content": f"What is {problem['question']}?"}]

    def step(self, texts: list[str], turn: int, episodes: list) -> list[dict | None]:
        replies = []
        for text in texts:
            formula = re.search(r"<calc>(.*?)</calc>", text)
            result = formula and f"<result>{calculate(formula[1])}</result>"
            replies.append(result and {"role": "user", "content": result})  # None ends the episode
        return replies

    def right_answer(self, problem: dict) -> tuple[str, str]:
        return "<answer>", problem["answer"]
