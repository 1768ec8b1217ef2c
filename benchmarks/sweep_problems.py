"""Questions that sweeps of learning rates are scored on, so that they never see those of the final runs.

--env benchmarks/sweep_problems.py:SweepQuestions --model-name-or-path envs/tiny_lm/search_qa
"""

from functools import partial

from envs.search_qa import SearchQA, f1


class SweepQuestions(SearchQA):
    """The default questions of pi_play.py, except for the evaluation."""

    def __init__(self, dataset: str | None = None):
        super().__init__(dataset, hops=(1, 2))

    def evaluation_problems(self, count: int) -> list:
        """The `count` held-out questions that follow the first `count`."""
        return super().evaluation_problems(2 * count)[count:]


class SweepThreeHops(SweepQuestions):
    """Those of three hops, with the four rewards of search_qa in the scripts."""

    def __init__(self, dataset: str | None = None):
        SearchQA.__init__(self, dataset, hops=(3,), max_turns=6)
        self.reward_functions = SearchQA.reward_functions | {"outcome": partial(f1, invalid=-2.0)}
