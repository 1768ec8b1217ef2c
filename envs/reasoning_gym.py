"""Generated problems with verifiers from the optional package `reasoning-gym`, some 90 tasks.

Sums, puzzles, logic, graphs, games: Stojanovski et al., Reasoning Gym, arXiv 2505.24760; examples of
each in GALLERY.md of github.com/open-thought/reasoning-gym. A problem is the package's dict. Where
answers have several lines (sudoku), let `--system-prompt` ask for <answer> </answer>.

The reward is 1 for the right answer, else 0. The task's own score is logged with weight 0: in some
tasks it is 0.01 for any wrong answer, in others 0.6 for a lucky one ("0" for "38 days"), and GRPO,
which divides by the group's std, would make as much of that as of a right answer.
"""

import dataclasses
import difflib
import random
import re
import zlib

LEFT_OUT = {
    "its verifier runs what the model wrote as Python": "binary_matrix countdown n_queens puzzle24 "
    "intermediate_integration polynomial_multiplication simple_integration spiral_matrix "
    "string_insertion",
    "its verifier gives the full score to wrong answers": "coin_flip complex_arithmetic game_of_life "
    "game_of_life_halting gsm_symbolic number_sorting",
    "its verifier is content with a premise of the question": "propositional_logic",
    "its verifier may not end": "rubiks_cube rush_hour",
    "its problems differ from process to process": "isomorphic_strings list_functions ransom_note",
    "it is a mixture of tasks": "composite",
}
NUMBER = re.compile(
    r"(?:(?<![0-9])-|(?<![\w/^.]))"  # the minus of 3-5 is no sign
    r"(?:[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?|\.[0-9]+)"  # 12, 1,000, 0.5, .5
    r"(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
    r"(?![0-9]|\.[0-9]|,[0-9]{3}|[/^]|[a-zA-Z]\b|[a-fA-F]+\b)"  # 3/43, 7^43 and 348f are others
)
SIGN = re.compile(r"(?:\A|(?<=[=(:])|(?<=[=(:] )|(?<=\bis ))- +(?=[0-9.])")  # - 5 alone, = - 5
DASHES = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212"), "-")  # that are written for a minus
BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")


def extract_answer(completion: str, numeric: bool) -> str:
    """The last <answer> of a completion, else its last \\boxed{}, else its last line; "" if empty.

    If the answer is a number: the last number in the tags or box, else in the whole completion.
    """
    before, end, _ = completion.rpartition("</answer>")
    _, start, tagged = before.rpartition("<answer>")
    boxed = BOXED.findall(completion)
    text = completion.strip()
    if start and end:
        text = tagged
    elif boxed:
        text = boxed[-1]
    elif not numeric:
        text = text.split("\n")[-1]
    if not numeric:
        return text.strip()
    text = SIGN.sub("-", text.strip().translate(DASHES))
    numbers = NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else ""


class ReasoningGym:
    """One task with some of its settings, such as chain_sum with {"max_terms": 2}.

    ValueError of one sentence: package missing, task unknown or left out, settings refused.
    """

    reward_weights = (1.0, 0.0)

    def __init__(self, task: str, config: dict | None = None):
        try:
            from reasoning_gym.factory import DATASETS, create_dataset
        except ImportError:
            raise ValueError("reasoning-gym is not installed: pip install reasoning-gym") from None
        for reason, tasks in LEFT_OUT.items():
            if task in tasks.split():
                raise ValueError(f"reasoning-gym task {task}: left out, {reason}")
        if task not in DATASETS:
            names = difflib.get_close_matches(task, DATASETS) or sorted(DATASETS)
            raise ValueError(f"reasoning-gym task {task}: unknown, there is {', '.join(names)}")
        self.reward_functions = {"correctness": self.correctness, "score": self.score}
        try:
            self.dataset = create_dataset(task, seed=0, size=1000, **(config or {}))
            self.draw("check")  # some bad values break only here
        except Exception as error:
            fields = [field.name for field in dataclasses.fields(DATASETS[task][1])]
            names = ", ".join(name for name in fields if name not in ("seed", "size"))
            reason = str(error) or type(error).__name__
            message = f"settings refused ({reason}), it has {names}"
            raise ValueError(f"reasoning-gym task {task}: {message}") from None

    def draw(self, stream: str) -> dict:
        """The problem of a stream. The package makes item i of a data set by Random(seed + i)."""
        generator = random.Random(stream)
        self.dataset.seed = generator.randrange(2**31)
        self.dataset.config.seed = self.dataset.seed  # one task reads it there
        return self.dataset[generator.randrange(1000)]

    def held_out(self, problem: dict) -> bool:
        """1 question in 4 is for evaluation, by a hash; with a smaller share, slow tasks start too slowly."""
        return zlib.crc32(problem["question"].encode()) % 4 == 0

    def train_problem(self, index: int, seed: int) -> dict:
        """Problem `index` of training stream `seed`: same on all processes and after a resume."""
        for attempt in range(100):
            problem = self.draw(f"train {seed} {index} {attempt}")
            if not self.held_out(problem):
                return problem
        raise ValueError("reasoning-gym: these settings leave too few questions to train on")

    def evaluation_problems(self, count: int) -> list[dict]:
        """The first `count` different held-out questions, fewer if the task has few."""
        problems = {}
        for index in range(20 * count):
            if len(problems) == count:
                break
            problem = self.draw(f"evaluation {index}")
            if self.held_out(problem):
                problems[problem["question"]] = problem
        return list(problems.values())

    def prompt(self, problem: dict) -> list[dict]:
        """Chat messages: the question as it is."""
        return [{"role": "user", "content": problem["question"]}]

    def score(self, problem: dict, completion: str) -> float:
        """The task's own score of the answer, from 0 to 1."""
        numeric = NUMBER.fullmatch(problem["answer"] or "") is not None
        answer = extract_answer(completion, numeric)
        try:
            return float(self.dataset.score_answer(answer, problem))
        except Exception:  # some verifiers raise on an answer that they cannot read
            return 0.0

    def correctness(self, problem: dict, completion: str) -> float:
        """1.0 if the answer has the task's full score, else 0.0."""
        return float(self.score(problem, completion) == 1)
