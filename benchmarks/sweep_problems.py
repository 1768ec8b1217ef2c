"""Questions that sweeps of learning rates are scored on, so that they never see those of the final runs.

--env benchmarks/sweep_problems.py:SweepQuestions --model-name-or-path envs/tiny_lm/search_qa
"""

from envs.search_qa import SearchQA


class SweepQuestions(SearchQA):
    """The default questions of pi_play.py, except for the evaluation."""

    def __init__(self, dataset: str | None = None):
        super().__init__(dataset, hops=(1, 2))

    def evaluation_problems(self, count: int) -> list:
        """The `count` held-out questions that follow the first `count`."""
        return super().evaluation_problems(2 * count)[count:]
