"""CriticSearch as people run it: its control, its critics, its resume and its processes, tools of one's own."""

import json
import math
from functools import partial

import language_runs
import pytest
import torch
from language_runs import (
    assert_same_run,
    completions,
    kill_and_resume,
    numbers,
    train,
    two_processes_equal_one,
    whole_run,
)
from run_folders import assert_tags_of_pages, refusal, tags

from algorithms import critic_search, igpo
from algorithms.critic_search import Args, hybrid_advantages, load_task, spoil
from envs.search_qa import SearchQA

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SMALL, CALCULATOR = language_runs.SMALL, language_runs.CALCULATOR
LONG = SMALL | {"max_steps": 2, "save_steps": 1, "eval_steps": 2, "beta": 0.04, "hops": (1, 2, 3)}
SPOILED = LONG | {"shuffle_verdicts": True, "flip_verdicts": 0.3}
train_here = partial(train, critic_search, **SMALL)
whole = whole_run(critic_search, SPOILED)  # its verdicts are spoiled


@pytest.mark.quick
def test_what_the_update_gets_is_what_completions_show(whole):
    """The verdicts of the task, spoiled; their hybrid advantages; the metrics."""
    run_dir, given = whole
    found, rows = numbers(run_dir), completions(run_dir)
    assert all(map(math.isfinite, found.values()))
    assert_tags_of_pages(tags(run_dir), "critic_search", "grpo")
    assert len(rows) == 2 * 8, "both groups of both steps"
    for step, first in ((1, 0), (2, 2)):
        batch = [row for row in rows if row["step"] == step]
        episodes = given[step - 1][3]
        said = [SearchQA().verdicts(episode.problem, episode) for episode in episodes]
        assert [row["turns"] for row in batch] == [episode.texts for episode in episodes]
        outcomes = torch.tensor([row["rewards"]["outcome"] for row in batch])
        expected = []
        for group in (0, 4):
            rows_of_group = slice(group, group + 4)
            seed = critic_search.random_seed(1, "verdicts", first + group // 4)
            verdicts = spoil(said[rows_of_group], seed, True, 0.3)
            assert [row["verdicts"] for row in batch[rows_of_group]] == verdicts
            expected += hybrid_advantages(outcomes[rows_of_group], verdicts)
        for row, advantages, own in zip(batch, expected, given[step - 1][4]):
            assert len(row["turns"]) == 2 * len(advantages) - 1
            torch.testing.assert_close(own[: len(advantages)], advantages, rtol=0, atol=0)
            assert (own[len(advantages) :] == 0).all()
            torch.testing.assert_close(torch.tensor(row["advantages"]), advantages)
        flat = sum(said, [])
        assert found[step, "train/critic/good_share"] == pytest.approx(sum(flat) / len(flat)), "before it is spoiled"
        assert found[step, "train/critic/searches"] == pytest.approx(len(flat) / 8)
        assert found[step, "train/critic/unreadable"] == 0


def test_a_killed_run_continues(whole, tmp_path):
    """With the same draws of the controls."""
    kill_and_resume(critic_search, whole[0], tmp_path, 2, **SPOILED)


def test_two_processes_equal_one(tmp_path):
    """They play episodes of other lengths, and the controls draw for a problem, not for a process."""
    values = {"hops": (1, 3), "shuffle_verdicts": True, "flip_verdicts": 0.3}
    two_processes_equal_one(critic_search, tmp_path, **SMALL, max_steps=2, **values)


def never(*_):
    raise AssertionError("no critic is called")


def test_alpha_0_is_grpo_to_the_bit(tmp_path, monkeypatch):
    """igpo.py --advantage f1 with the std of a sample, as GRPO has it: the same metrics and weights, and no critic."""

    def of_a_sample(values, pool):
        if (pool == pool[:1]).all():
            return torch.zeros_like(values)
        return (values - pool.mean()) / (pool.std(correction=1) + 1e-6)

    flags = SMALL | {"max_steps": 3, "eval_steps": 3, "hops": (1, 2, 3), "num_generations": 6}
    monkeypatch.setattr(igpo, "standardize", of_a_sample)
    monkeypatch.setattr(SearchQA, "verdicts", never)
    train(critic_search, tmp_path / "ours", **flags, critic_alpha=0.0)
    train(igpo, tmp_path / "igpo", **flags, advantage="f1")
    for name in ("ours", "igpo"):  # what each script logs alone
        path = tmp_path / name / "metrics.csv"
        lines = [line for line in path.read_text().splitlines(True) if "critic/" not in line and "igpo/" not in line]
        path.write_text("".join(lines))
    assert len(numbers(tmp_path / "ours")) > 60
    assert_same_run(tmp_path / "ours", tmp_path / "igpo")


def test_controls_see_the_same_episodes_and_have_advantages_of_their_own(tmp_path):
    flags = [{}, {"critic_alpha": 0.0}, {"critic_mix": "add"}, {"critic_pool": "episodes"}]
    flags += [{"shuffle_verdicts": True}, {"flip_verdicts": 0.5}]
    runs = []
    for number, values in enumerate(flags):
        train_here(tmp_path / str(number), **values, num_generations=8, hops=(1, 2, 3), temperature=1.3)
        runs.append(completions(tmp_path / str(number)))
    assert len({json.dumps([row["turns"] for row in rows]) for rows in runs}) == 1
    assert len({json.dumps([row["advantages"] for row in rows]) for rows in runs}) == len(flags)
    assert all(len(set(row["advantages"])) == 1 for row in runs[1]), "GRPO: one advantage for a whole episode"
    assert all(row["verdicts"] == [None] * (len(row["turns"]) // 2) for row in runs[1])


def test_episodes_that_are_cut_have_one_verdict_less_than_turns(tmp_path):
    """A search in the last turn is not carried out, and has the outcome's part alone."""
    train_here(tmp_path, hops=(3,), max_turns=2, num_generations=8)
    rows = completions(tmp_path)
    assert all(len(row["verdicts"]) == len(row["advantages"]) - 1 == len(row["turns"]) // 2 for row in rows)
    cut = [row for row in rows if "</search>" in row["turns"][-1]]
    assert any(len(row["verdicts"]) == 1 for row in cut), "its second search was not carried out"


def test_own_questions_and_critic(tmp_path, monkeypatch):
    files = language_runs.question_files(tmp_path, monkeypatch)
    (tmp_path / "own.py").write_text(
        "def judge(problem, episode):\n    return [float(problem.answers[0] in text) for text in episode.texts[1::2]]\n"
    )
    words = [word for name, value in files.items() for word in (f"--{name.replace('_', '-')}", value)]
    assert "has no verdicts (on questions of a file)" in refusal(critic_search, monkeypatch, *words, "--output-dir", tmp_path / "no")
    found = train_here(tmp_path / "run", **files, critic=str(tmp_path / "own.py:judge"))
    rows = completions(tmp_path / "run")
    said = [verdict for row in rows for verdict in row["verdicts"]]
    assert found[1, "train/critic/good_share"] == pytest.approx(sum(said) / len(said)) and 0 < sum(said)


def test_a_language_critic(tmp_path):
    """The tiny model says nothing that can be read, so what remains is the outcome's part."""
    model = str(language_runs.CALCULATOR["model_name_or_path"])
    found = train_here(tmp_path, critic_model=model, hops=(1, 2))
    assert found[1, "train/critic/unreadable"] == 1 and (1, "train/critic/good_share") not in found
    assert found[1, "train/critic/frac_no_signal"] == found[1, "train/frac_reward_zero_std"]


JUDGED = '''
from calculator import Calculator


class Judged(Calculator):
    def verdicts(self, problem, episode):
        return [float("only" not in text) for text in episode.texts[1::2]]


class OneTooMany(Judged):
    def verdicts(self, problem, episode):
        return [1.0] * (len(episode.texts) // 2 + 1)


class Replies(Judged):
    """Its step answers the empty text of the check, too."""

    def step(self, texts, turn, episodes):
        return [{"role": "user", "content": "on"} for _ in texts]


class NoneOfThem(Replies):
    def verdicts(self, problem, episode):
        return []


class Batched(Replies):
    def verdicts(self, problems, episodes):
        return [[1.0] * episode.num_searches for episode in episodes]

    verdicts.batched = True


class OneList(Batched):
    def verdicts(self, problems, episodes):
        return [1.0] * episodes[0].num_searches

    verdicts.batched = True


class NoList(Batched):
    def verdicts(self, problems, episodes):
        return []

    verdicts.batched = True


class PlainAnswer(Judged):
    def right_answer(self, problem):
        return "10735"


class Broken(Judged):
    def verdicts(self, problem, episode):
        return problem["score"]
'''


def own_task(folder, name: str, **values) -> Args:
    example = CALCULATOR["env"].partition(":")[0]
    (folder / "judged.py").write_text(f"import sys\nsys.path.insert(0, {example.rpartition('/')[0]!r})\n{JUDGED}")
    return Args(**SMALL | CALCULATOR | {"env": f"{folder / 'judged.py'}:{name}"} | values)


def test_own_task(tmp_path):
    args = own_task(tmp_path, "Judged", max_completion_length=40)
    found = train(critic_search, tmp_path / "run", **SMALL | {"env": args.env, "model_name_or_path": args.model_name_or_path})
    assert all(map(math.isfinite, found.values())) and (1, "train/critic/unreadable") in found
    load_task(own_task(tmp_path, "Replies"))
    load_task(own_task(tmp_path, "Batched"))


TASKS = {
    "OneTooMany": "verdicts: returned [1.0] for [''], expected a list of 0 numbers, one for each search",
    "NoneOfThem": "verdicts: returned [] for ['', 'on', ''], expected a list of 1 numbers, one for each search",
    "NoList": "verdicts: returned [] for one episode, expected a list of one list",
    "OneList": "verdicts: returned 1.0 for ['', 'on', ''], expected a list of 1 numbers, one for each search",
}


@pytest.mark.quick
@pytest.mark.parametrize("name", TASKS)
def test_an_own_task_is_tried_at_the_start(name, tmp_path):
    with pytest.raises(SystemExit) as stop:
        load_task(own_task(tmp_path, name))
    assert stop.value.code == TASKS[name]
    load_task(own_task(tmp_path, name, critic_alpha=0.0))
    load_task(own_task(tmp_path, name, critic="own.py:judge"))


@pytest.mark.quick
def test_the_right_answer_that_a_critic_is_told_is_tried_at_the_start(tmp_path):
    with pytest.raises(SystemExit) as stop:
        load_task(own_task(tmp_path, "PlainAnswer", critic_model="m"))
    assert stop.value.code == "right_answer: returned '10735', expected two texts, what comes before the answer and the answer"
    load_task(own_task(tmp_path, "PlainAnswer"))
    load_task(own_task(tmp_path, "Judged", critic_model="m"))


@pytest.mark.quick
def test_an_own_task_without_verdicts_and_one_that_fails(tmp_path):
    with pytest.raises(SystemExit, match="Calculator: has no verdicts, see envs/README.md$"):
        load_task(Args(**SMALL | CALCULATOR))
    with pytest.raises(KeyError, match="score"):
        load_task(own_task(tmp_path, "Broken"))
