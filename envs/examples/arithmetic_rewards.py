r"""Three rewards of one's own for sums, in three units: right, short, and well-formed.

python algorithms/gdpo.py --env reasoning_gym --task chain_sum --reward \
    envs/examples/arithmetic_rewards.py:right envs/examples/arithmetic_rewards.py:short \
    envs/examples/arithmetic_rewards.py:well_formed --model-name-or-path ...
"""

import re


def right(problem: dict, completion: str) -> float:
    """1.0 if the last number of the completion is the answer, else 0.0."""
    number = r"(?:(?<![0-9])-)?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?"  # -5, 1,234, 3.5; the minus of 8-5 is no sign
    numbers = re.findall(number, completion)
    return float(bool(numbers) and float(numbers[-1].replace(",", "")) == float(problem["answer"]))


def short(problem: dict, completion: str) -> float:
    """How many words of 32 are left."""
    return max(0.0, 32.0 - len(completion.split()))


def well_formed(problem: dict, completion: str) -> float:
    """0.1 if the completion ends with an equation, as in "3 + 4 = 7", else 0.0."""
    return 0.1 if re.search(r"= ?-?[0-9]+\.?$", completion.strip()) else 0.0
