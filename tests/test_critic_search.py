"""CriticSearch: the numbers of an independent computation, properties of the advantages, critics and their mistakes."""

import json
import math
import random
import re
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_grpo import tensor
from test_igpo import assert_rows_close

from algorithms import critic_search
from algorithms.critic_search import Args, Episode, hybrid_advantages, judge, spoil
from envs import language_critic
from envs.language_critic import LanguageCritic, parse_verdicts
from envs.search_qa import SearchQA, world

pytestmark = pytest.mark.quick
ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "envs" / "tiny_lm" / "search_qa"
CASES = json.loads((Path(__file__).parent / "reference" / "critic_search.json").read_text())["cases"]
name = lambda case: case["name"]  # noqa: E731


@pytest.mark.parametrize("case", CASES["hybrid_advantage"]["items"], ids=name)
def test_reference_hybrid_advantages(case):
    """All of it; its outcome part by alpha 0; its turn part by alpha 1, where convex leaves the outcome out."""
    settings = {key: case[key] for key in ("pool", "ddof", "eps")}
    outcomes, verdicts = tensor(case["outcomes"]), case["verdicts"]
    found = hybrid_advantages(outcomes, verdicts, alpha=case["alpha"], mix=case["mix"], **settings)
    assert_rows_close(found, case["advantages"], 1e-9)
    outcome = hybrid_advantages(outcomes, verdicts, alpha=0, **settings)
    assert_rows_close(outcome, [[z] * (len(row) + 1) for z, row in zip(case["outcome"], verdicts)], 1e-9)
    turn = hybrid_advantages(outcomes, verdicts, alpha=1, **settings)
    assert_rows_close(turn, [[*row, 0.0] for row in case["turn"]], 1e-9)


def question(hops: int, seed: int = 0):
    return SearchQA(hops=(hops,)).sample(random.Random(seed))


def episode_of(problem, results: list[str]) -> Episode:
    """An episode that read these results, and answered."""
    episode = Episode(problem, [])
    for result in results:
        episode.texts += ["<search>who?</search>", f"<result>{result}</result>"]
    episode.texts.append("<answer>nobody</answer>")
    return episode


@pytest.mark.parametrize("case", CASES["toy_critic"]["items"], ids=name)
def test_reference_verdicts_of_the_program(case):
    """The places of a path are facts of the invented world; other letters are facts about others."""
    problem = question(len(case["path"]))
    facts = {letter: world().sentence(*fact[:2]) for letter, fact in zip(case["path"], problem.path)}
    others = [world().sentence(*key) for key in world().order if key[0] not in [fact[0] for fact in problem.path]]
    strangers = [letter for letter in case["found"] if letter and letter not in facts]
    facts |= dict(zip(dict.fromkeys(strangers), others))
    results = [facts[letter] if letter else "nothing found" for letter in case["found"]]
    task = SearchQA()
    assert task.verdicts(problem, episode_of(problem, results)) == case["verdicts"]
    assert task.verdicts(problem, episode_of(problem, results[:1] * 2)) == [*case["verdicts"][:1], 0.0][: 2 * len(results[:1])]


def test_verdicts_look_at_all_documents_of_a_search():
    problem = question(2)
    path = [world().sentence(*fact[:2]) for fact in problem.path]
    task = SearchQA()
    other = "Nobody's friend is Nobody."
    assert task.verdicts(problem, episode_of(problem, [f"{other}\n{path[1]}", f"{path[1]}\n{path[0]}", path[0]])) == [1.0, 1.0, 0.0]
    assert task.verdicts(problem, episode_of(problem, [f"x{path[0]}", path[0].lower()])) == [0.0, 0.0]
    for (query, result), fact in zip(task.path_steps(problem), path):
        assert fact in result.split("\n"), query


def test_an_unreadable_verdict_is_the_mean_of_the_others_of_the_group():
    outcomes = tensor([1.0, 0.0])
    found = hybrid_advantages(outcomes, [[1, None], [0, 0]])
    assert_rows_close(found, [row.tolist() for row in hybrid_advantages(outcomes, [[1, 1 / 3], [0, 0]])], 1e-12)
    assert_rows_close(hybrid_advantages(outcomes, [[1, math.nan], [0, 0]]), [row.tolist() for row in found], 0)


@pytest.mark.parametrize("pool", ["turns", "episodes"])
def test_silent_groups(pool):
    """Equal outcomes and equal verdicts, one verdict, none: exactly 0, and no NaN."""
    for verdicts in ([[1 / 3], [1 / 3] * 3], [[0.1], [0.1] * 3], [[1], []], [[], []], [[None], [None]]):
        for row in hybrid_advantages(tensor([0.7, 0.7]), verdicts, pool=pool):
            assert (row == 0).all()
    wrong = hybrid_advantages(tensor([0.0, 0.0]), [[1, 0], [0]], pool=pool)
    assert wrong[0][0] > 0 > wrong[1][0] and wrong[0][-1] == wrong[1][-1] == 0


def test_controls():
    """Deterministic in the seed; shuffled verdicts are the same ones; None is not turned round."""
    verdicts = [[1.0, 0.0, None], [], [0.25] * 5, [1.0] * 992]
    assert spoil(verdicts, 3, False, 0.0) == verdicts
    assert spoil(verdicts, 3, False, 1.0) == [[0.0, 1.0, None], [], [0.75] * 5, [0.0] * 992]
    flipped = spoil(verdicts, 3, False, 0.3)
    assert 0.25 < flipped[3].count(0.0) / 992 < 0.35
    shuffled = spoil(verdicts, 3, True, 0.0)
    assert [len(row) for row in shuffled] == [3, 0, 5, 992]
    assert shuffled != verdicts and sorted(map(str, sum(shuffled, []))) == sorted(map(str, sum(verdicts, [])))
    assert spoil(verdicts, 3, True, 0.3) == spoil(verdicts, 3, True, 0.3) != spoil(verdicts, 4, True, 0.3)


def broken(problem, episode):
    return problem["score"]


SENTENCES = {
    "own.py:few: returned [1, 0] for ['<search>who": lambda problem, episode: [1, 0],
    "own.py:few: returned 1 for": lambda problem, episode: 1,
    "own.py:few: returned {0: 1.0} for": lambda problem, episode: {0: 1.0},
    "own.py:few: returned [nan] for": lambda problem, episode: [math.nan],
    "own.py:few: returned [1e+308] for": lambda problem, episode: [1e308],
}


@pytest.mark.parametrize("words", SENTENCES)
def test_a_critic_that_returns_something_else_ends_in_a_sentence(words):
    with pytest.raises(SystemExit) as stop:
        judge(SENTENCES[words], [episode_of({}, ["x"])], Args(critic="own.py:few"))
    assert stop.value.code.startswith(f"critic {words}") and "\n" not in stop.value.code
    assert stop.value.code.endswith("expected 1 numbers of at most 15 digits, or None, one for each search")


@pytest.mark.parametrize("threads", [1, 4])
def test_a_critic_that_raises_keeps_its_traceback(threads):
    args = Args(critic="own.py:broken", reward_threads=threads)
    with pytest.raises(SystemExit) as stop:
        judge(broken, [episode_of({"score": [1]}, ["x"]), episode_of({}, ["y"])], args)
    sentence, _, reason = stop.value.code.partition("\n\n")
    assert sentence.startswith("critic own.py:broken: failed for ['<search>who?</search>', '<result>y</result>'")
    assert 'return problem["score"]' in reason and reason.strip().endswith("KeyError: 'score'")


def test_a_slow_critic_is_called_for_several_episodes_at_once():
    together = threading.Barrier(3, timeout=20)
    episodes = [episode_of(number, ["x"]) for number in range(3)]
    slow = lambda problem, episode: [together.wait() * 0 + problem]  # noqa: E731
    assert judge(slow, episodes, Args(reward_threads=3)) == [[0.0], [1.0], [2.0]]


def test_what_a_critic_may_return():
    episodes = [episode_of({}, ["x", "y"]), episode_of({}, [])]
    for given in ([1, None], (True, None), [torch.tensor(1.0), None]):
        assert judge(lambda problem, episode: given[: episode.num_searches], episodes, Args()) == [[1.0, None], []]  # noqa: B023

    def both(problems, episodes):
        return [[len(episode.texts)] * episode.num_searches for episode in episodes]

    both.batched = True
    assert judge(both, episodes, Args()) == [[5.0, 5.0], []]
    assert judge(None, episodes, Args()) == [[None, None], []]
    both = lambda problems, episodes: []  # noqa: E731
    both.batched = True
    with pytest.raises(SystemExit, match="^critic verdicts: returned 0 lists for 2 episodes$"):
        judge(both, episodes, Args())


TEXTS = {
    "1: good\n2: bad": [1.0, 0.0],
    "Sure:\n1. Good\n**2**: bad.": [1.0, 0.0],
    "<think>1: bad\n2: bad</think>\n1: good": [1.0, None],
    "1: good\n2: bad\n3: good\n2: good": [1.0, 1.0],
    "good, bad": [None, None],
    "11: good\n2: badly": [None, None],
    "": [None, None],
}


@pytest.mark.parametrize("text", TEXTS)
def test_what_a_language_critic_writes_is_read(text):
    assert parse_verdicts(text, 2) == TEXTS[text]


def test_a_language_critic_reads_the_episode_and_the_right_answer(monkeypatch):
    """In batches, episodes without a search are not shown; the control tokens of the critic are taken out."""
    args = Args(critic_model=str(TINY))
    critic = critic_search.load_critic(SearchQA(), torch.device("cpu"), args)
    problem = question(2)
    episodes = [episode_of(problem, results) for results in (["a", "b<|end|>c"], [], ["d"])]
    chats = []
    write = critic.write
    monkeypatch.setattr(critic, "write", lambda texts: chats.extend(texts) or ["2: bad\n1: good"] * len(texts))
    assert judge(critic, episodes, args) == [[1.0, 0.0], [], [1.0]]
    assert len(chats) == 2 and sum("a</result>" in chat for chat in chats) == 1
    (first,) = [chat for chat in chats if "a</result>" in chat]
    assert problem.question in first and f"The right answer is: {problem.answers[0]}\n" in first
    assert "b c" in first and first.count("<|end|>") == 1 and "Judge each of its 2 searches." in first
    either = critic.prompt(replace(problem, answers=("Ann", "Bob")), episodes[0])
    assert "The right answer is: Ann or Bob\n" in either
    monkeypatch.setattr(critic, "write", write)
    assert judge(critic, episodes, args) == [[None, None], [], [None]], "the tiny model does not know what is asked"
    critic.longest = 10
    monkeypatch.setattr(critic, "write", None)
    assert judge(critic, episodes, args) == [[None, None], [], [None]], "too long for the critic"


def test_a_batch_is_written_as_each_chat_alone():
    """Greedily, whatever stands beside it and however short it is."""
    critic = LanguageCritic(str(TINY), SearchQA(), torch.device("cpu"), Args())
    critic.new_tokens = 12
    messages = [SearchQA().prompt(question(hops)) for hops in (1, 3)]
    chats = [critic.tokenizer.apply_chat_template(chat, **critic.settings) for chat in messages]
    together = critic.write(chats)
    assert together == [critic.write([chat])[0] for chat in chats]
    assert together[0].startswith("<think>next: ")


def thinker(**values) -> LanguageCritic:
    """A critic whose template opens <think> and shows tools."""
    critic = LanguageCritic(str(TINY), SearchQA(), torch.device("cpu"), Args(**values))
    critic.tokenizer.chat_template = "{{ tools }}{{ messages[0].content }}\n<think>\n"
    return critic


def test_thoughts_that_the_template_opened_do_not_count(monkeypatch):
    critic = thinker()
    thought = "Let me see. Is search 1: good? Search 2: bad maybe, as"
    monkeypatch.setattr(critic.tokenizer, "batch_decode", lambda ids, **_: [thought, f"{thought}</think>2: good"])
    chats = [critic.prompt(problem, episode_of(problem, ["a", "b"])) for problem in (question(1), question(2))]
    assert [parse_verdicts(text, 2) for text in critic.write(chats)] == [[None, None], [None, 1.0]]
    assert critic.write(["Judge.", "Judge."])[0] == thought


def test_a_critic_does_not_get_the_tools_of_the_agent():
    assert "my_tool" not in thinker(chat_template_kwargs='{"tools": ["my_tool"]}').prompt(question(1), episode_of({}, ["a"]))


def test_a_critic_is_greedy_whatever_its_settings_say():
    critic = LanguageCritic(str(TINY), SearchQA(), torch.device("cpu"), Args())
    critic.new_tokens = 12
    chat = critic.tokenizer.apply_chat_template(SearchQA().prompt(question(1)), **critic.settings)
    expected = critic.write([chat])
    critic.model.generation_config.repetition_penalty = 5.0
    assert critic.write([chat]) == expected


@pytest.mark.parametrize("tokens, sizes", [(1, [1, 1, 1, 1]), (1000, [1, 3]), (2**15, [4])])
def test_all_episodes_that_fit_are_judged_in_any_batches(tokens, sizes, monkeypatch):
    """What the critic says goes back to the episode that it is about. One of five is too long, and one long."""
    monkeypatch.setattr(language_critic, "TOKENS_AT_ONCE", tokens)
    critic = thinker()
    episodes = [episode_of(question(1), ["a " * size, "b"]) for size in (3, 1, 900, 200, 2)]
    critic.longest = 1000
    batches = []

    def write(chats: list[str]) -> list[str]:
        batches.append(len(chats))
        lengths = [len(critic.tokenizer(chat)["input_ids"]) for chat in chats]
        assert len(chats) == 1 or len(chats) * (max(lengths) + critic.new_tokens) <= tokens
        return ["1: good" if len(re.search("(a )+", chat)[0]) > 4 else "1: bad" for chat in chats]

    monkeypatch.setattr(critic, "write", write)
    found = critic([question(1)] * 5, episodes)
    assert found == [[1.0, None], [0.0, None], [None, None], [1.0, None], [0.0, None]]
    assert batches == sizes


def refused(**values) -> str:
    with pytest.raises(SystemExit) as stop:
        task = values.pop("task", SearchQA())
        critic_search.load_critic(task, torch.device("cpu"), Args(**values))
    return stop.value.code


def test_which_critic(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text("def judge(problem, episode):\n    return []\ndef one(problem):\n    return []\n")
    load = lambda **values: critic_search.load_critic(SearchQA(), torch.device("cpu"), Args(**values))  # noqa: E731
    own = str(tmp_path / "own.py")
    assert load(critic_alpha=0) is None and load(max_steps=0) is None
    assert load().__func__ is SearchQA.verdicts and load(critic=f"{own}:judge").__name__ == "judge"
    assert refused(critic=f"{own}:one").startswith(f"--critic {own}:one: cannot be called as one(problem, episode)")
    assert refused(critic=f"{own}:none").endswith("does not define 'none'")
    assert refused(dataset="questions.jsonl").startswith("--env search_qa: has no verdicts (on questions of a file)")
    assert refused(critic_model=str(tmp_path)).startswith(f"--critic-model {tmp_path}: cannot be loaded")
    assert refused(critic_model=str(TINY), task=SimpleNamespace()).endswith("has no right_answer, which --critic-model is told")
    assert refused(max_turns=1) == "--max-turns 1: no search is answered, so none is judged; give --critic-alpha 0"
    assert load(max_turns=1, critic_alpha=0) is None
    monkeypatch.setattr(critic_search, "ROOT", tmp_path)
    assert refused(critic_model="m") == "--critic-model: needs the folder envs/ of the repository"


@pytest.mark.quick
def test_an_episode_that_nobody_could_judge_is_neutral_in_the_pool_of_episodes():
    """Means 1 and 0, and of the third the mean of both: z-scores 1, -1 and 0."""
    found = hybrid_advantages(torch.zeros(3), [[1, 1, 1], [0], [None]], alpha=1.0, pool="episodes")
    torch.testing.assert_close(torch.stack([row[0] for row in found]), torch.tensor([1.0, -1.0, 0.0]), atol=1e-5, rtol=0)


@pytest.mark.quick
@pytest.mark.parametrize(
    "flags, said",
    [
        ({"critic_alpha": 2.0}, "--critic-alpha 2.0: at most 1, or give --critic-mix add"),
        ({"critic": "own.py:judge", "critic_model": "m"}, "--critic, --critic-model: give one of them"),
        ({"critic_alpha": 0.0, "critic": "own.py:judge"}, "--critic-alpha 0: calls no critic, so leave out flags of critics and verdicts"),
        ({"critic_alpha": 0.0, "shuffle_verdicts": True}, "--critic-alpha 0: calls no critic, so leave out flags of critics and verdicts"),
        ({"critic_alpha": 0.0, "flip_verdicts": 0.1}, "--critic-alpha 0: calls no critic, so leave out flags of critics and verdicts"),
        ({"flip_verdicts": 1.5}, "--flip-verdicts 1.5: at most 1, it is a probability"),
    ],
)
def test_flags_that_contradict_each_other(flags, said):
    with pytest.raises(SystemExit) as stop:
        critic_search.train(Args(**flags))
    assert stop.value.code == said
