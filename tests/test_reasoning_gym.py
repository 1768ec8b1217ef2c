"""reasoning-gym's tasks: which answer is read, who gets the reward, two streams that never meet."""

import sys

import pytest

pytest.importorskip("reasoning_gym")

from envs.reasoning_gym import ReasoningGym, extract_answer


@pytest.mark.parametrize(
    "completion, answer",
    [
        ("The answer is 12", "12"),
        ("3 + 9 = 12.", "12"),
        ("5 - 17 = \u221212", "-12"),
        ("it lies in 3-5", "5"),
        ("17 - 5", "5"),
        ("$1,234,567.50!", "1234567.50"),
        (".5", ".5"),
        ("about 7.6e-06", "7.6e-06"),
        ("<answer>The sum is 12</answer> as 9 + 3", "12"),
        ("<answer>11</answer> no <answer>12</answer>", "12"),
        ("\\boxed{11} <answer>12</answer>", "12"),
        ("<answer>12", "12"),
        ("<answer>- 5</answer>", "-5"),
        ("<answer>\n\u20135\n</answer>", "-5"),
        ("3 - 8 = - 5.", "-5"),
        ("\\boxed{- 5}", "-5"),
        ("pages 3\u20135", "5"),
        ("The terms:\n- 2\n- 5", "5"),  # a list
        ("<answer>348f</answer>", ""),  # another number in base 16
        ("<answer>ab348</answer>", ""),
        ("<answer>3/43</answer>", ""),
        ("7^43", ""),
        ("38days", "38"),
        ("twelve", ""),
        ("<answer></answer> 12", ""),
    ],
)
def test_the_last_number_is_the_answer(completion, answer):
    assert extract_answer(completion, numeric=True) == answer


def test_a_text_answer():
    answers = {
        "It lies there.\n\n off \n\n": "off",
        "<answer>\n1 2\n3 4\n</answer> is it": "1 2\n3 4",
        "\\boxed{\\frac{1}{2}} is it": "\\frac{1}{2}",
        "no end \\boxed{off": "no end \\boxed{off",
        "": "",
    }
    assert {text: extract_answer(text, numeric=False) for text in answers} == answers


@pytest.mark.parametrize(
    "task, wrong, score",
    [
        ("chain_sum", "123456", 0.0),
        ("syllogism", "perhaps", 0.0),
        ("power_function", "123456", 0.01),  # any number has that
        ("prime_factorization", "perhaps", 0.0),  # the package raises a ValueError
    ],
)
def test_right_and_wrong_answers(task, wrong, score):
    task = ReasoningGym(task)
    problem = task.train_problem(0, seed=1)
    right = f"So it is <answer>{problem['answer']}</answer>."
    wrong = f"So it is <answer>{wrong}</answer>."
    assert (task.correctness(problem, right), task.score(problem, right)) == (1.0, 1.0)
    assert (task.correctness(problem, wrong), task.score(problem, wrong)) == (0.0, score)
    assert task.correctness(problem, "") == 0.0


UNSAFE = "binary_matrix coin_flip game_of_life gsm_symbolic number_sorting propositional_logic rubiks_cube rush_hour".split()


@pytest.mark.parametrize(
    "task, config, sentence",
    [
        ("chain_sums", None, "task chain_sums: unknown, there is chain_sum, "),
        ("xyz", None, "task xyz: unknown, there is ab, acre, "),
        *((task, None, f"task {task}: left out, its verifier ") for task in UNSAFE),
        ("n_queens", None, "task n_queens: left out, its verifier runs what the model wrote as "),
        ("chain_sum", {"terms": 2}, "unexpected keyword argument 'terms'), it has min_terms, max_"),
        ("chain_sum", {"min_terms": 9}, "refused (max_terms must be >= min_terms), it has "),
    ],
)
def test_mistakes_give_a_sentence(task, config, sentence):
    with pytest.raises(ValueError) as error:
        ReasoningGym(task, config)
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_a_missing_package_gives_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ValueError, match="not installed: pip install reasoning-gym$"):
        ReasoningGym("chain_sum")
