"""IGPO: the numbers of the official code, properties, and episodes from the first token to the update."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from test_grpo import Recorder, assert_close, flat, relative

from algorithms import igpo
from algorithms.igpo import information_gains, pack, play, reply_ids, turn_advantages, update

REFERENCE = json.loads((Path(__file__).parent / "reference" / "igpo.json").read_text())
NORMALIZATIONS = ["separate", "joint"]


def assert_rows_close(actual, expected, tolerance: float = 1e-5) -> None:
    assert [len(row) for row in actual] == [len(row) for row in expected]
    for ours, theirs in zip(actual, expected):
        assert_close(ours, theirs, tolerance)


def advantages_of(gains, outcomes, groups=None, *options, dtype=torch.float64, **named) -> list[torch.Tensor]:
    """turn_advantages of lists; without groups all rows are one."""
    groups = [0] * len(outcomes) if groups is None else groups
    gains = [torch.as_tensor(row, dtype=dtype) for row in gains]
    return turn_advantages(gains, torch.as_tensor(outcomes, dtype=dtype), torch.tensor(groups), *options, **named)


def some_rows(groups: int = 4, size: int = 6, seed: int = 0) -> tuple[list, torch.Tensor, list[int]]:
    """Log-probabilities of the answer at the start of every turn (1 to 5), outcomes, groups; in random order."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 6, (groups * size,), generator=generator).tolist()
    scores = [-5 * torch.rand(count, dtype=torch.float64, generator=generator) for count in counts]
    outcomes = torch.rand(len(counts), dtype=torch.float64, generator=generator)
    order = torch.randperm(len(counts), generator=generator).tolist()
    return [scores[i] for i in order], outcomes[order], [i // size for i in order]


def gains_of(scores) -> list[torch.Tensor]:
    return [information_gains(score) for score in scores]


# Not expressed: norm_adv_by_std_in_grpo False (here a standard deviation always divides); version feb2026, which drops
# the boundary of a turn whose normalised reward is exactly 0; reward_placement and exact_zero_info_gain, because turns
# are numbers here and no reward is put on a token; the mask of vectorised_teacher_forcing (answers are scored from the
# cache, with the same result: test_memory_gives_what_the_plain_forward_pass_gives); early_code_nov2025, another method;
# policy_loss, which has a dual clip. The outcome rewards are taken by test_search_qa.py.


def expressed(case: dict, output: dict) -> bool:
    kept = output["version"] == "later" and output.get("norm_adv_by_std_in_grpo", True)
    return kept and case["name"] != "exact_zero_info_gain_without_1e-10"


CASES = [(case, out) for case in REFERENCE["advantage"]["cases"] for out in case["outputs"] if expressed(case, out)]
assert len(CASES) == 13


def case_name(value) -> str:
    return value["name"] if "name" in value else f"{value['info_gain_norm_mode']} {value['gamma']}"


@pytest.mark.parametrize("case, output", CASES, ids=case_name)
def test_reference_advantages(case, output):
    rewards = [[turn["reward"] for turn in turns] for turns in case["turns"]]
    groups = [sorted(set(case["uid"])).index(uid) for uid in case["uid"]]
    options = {"gamma": output["gamma"], "normalization": output["info_gain_norm_mode"], "dtype": torch.float32}
    ours = advantages_of([row[:-1] for row in rewards], [row[-1] for row in rewards], groups, **options)
    assert_rows_close(ours, output["advantage_per_turn"])


def test_reference_information_gains():
    case = REFERENCE["info_gain_from_logprobs"]
    first, end = case["answer_token_range"]
    scores = torch.tensor(case["wrapped_answer_logprobs_per_state"])[:, first:end].mean(1)
    assert_close(information_gains(scores), case["log_prob_diff"])
    assert_close(information_gains(scores, "prob"), case["prob_diff"])


def test_reference_loss_mask():
    """101, 102: a header; 103: an end token, which the policy writes. The first header is the end of the prompt."""
    written = [[[5, 6, 103], [9, 10, 103]], [[5, 6, 7]], [[5, 103], [9, 9, 9]]]
    read = [[[7, 8, 103, 101, 102]], [], [[8, 103, 101, 102]]]
    case = REFERENCE["loss_mask"]
    for turns, replies, response, mask in zip(written, read, case["responses"], case["mask"]):
        episode = igpo.Episode(None, [101, 102])
        for number, ids in enumerate(turns):
            episode.write(igpo.Completion([], ids, [-0.5] * len(ids), 103 in ids))
            if number < len(replies):
                episode.read(replies[number], "reply")
        padding = [0] * (len(response) - len(episode.ids))
        assert episode.ids + padding == response
        assert [turn >= 0 for turn in episode.turns] + [False] * len(padding) == [bool(x) for x in mask]
        packed = pack([episode], [[0]], torch.device("cpu"))
        assert packed.targets.tolist() == sum(turns, [])
        assert packed.turns.tolist() == [number for number, ids in enumerate(turns) for _ in ids]


def test_reference_worked_example():
    """The numbers of the page."""
    gains, outcomes = [[0.4, -0.1], [0.2, 0.0], [-0.3], []], [1.0, 0.0, 0.5, 1.0]
    expected = [[1.8149, 0.3252, 0.9045], [-1.0110, -1.6731, -1.5076], [-1.7084, -0.3015], [0.9045]]
    assert_rows_close(advantages_of(gains, outcomes), expected, 1e-4)
    gains = [[0.5], [-0.5], [0.25], [0.1]]
    equal = torch.stack(advantages_of(gains, [0.0] * 4))
    assert_close(equal, [[1.1207, 0], [-1.5962, 0], [0.4415, 0], [0.0340, 0]], 1e-4)
    assert (torch.cat(advantages_of(gains, [0.0] * 4, parts="f1")) == 0).all(), "GRPO"


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_parts(normalization):
    """f1: every turn gets the discounted outcome; ig: the rest."""
    scores, outcomes, groups = some_rows()
    gains, options = gains_of(scores), (0.3, normalization)
    parts = "f1+ig", "f1", "ig"
    both, outcome, gain = (advantages_of(gains, outcomes, groups, *options, parts=part) for part in parts)
    for i, score in enumerate(scores):
        powers = torch.tensor([0.3**k for k in range(len(score))][::-1], dtype=torch.float64)
        assert_close(outcome[i], outcome[i][-1] * powers, 1e-12)
        assert_close(outcome[i] + gain[i], both[i], 1e-12)
        assert gain[i][-1] == 0 and outcome[i][-1] == both[i][-1] != 0


@pytest.mark.parametrize("value", [0.9, 1 / 3, -2.0, 1e-4, 12345.678])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_equal_and_lone_values_give_exactly_zero(value, normalization):
    gains, outcomes = [[value] * 2, [value], [], [value] * 4] * 2, [value] * 8
    for dtype in (torch.float32, torch.float64):
        rows = advantages_of(gains, outcomes, None, 1.0, normalization, dtype=dtype)
        assert (torch.cat(rows) == 0).all() and rows[0].dtype == dtype
    assert (torch.cat(advantages_of([[value]], [0.3])) == 0).all()
    assert (torch.cat(advantages_of([[]], [0.3], None, 1.0, normalization)) == 0).all()


ARGS = igpo.Args(max_completion_length=32, num_generations=4, temperature=1.3, hops=(1, 2, 3), max_turns=4)


@pytest.fixture(scope="module")
def played():
    """Model, tokenizer, task, problems and their episodes, hot enough to err."""
    task, _ = igpo.load_task(ARGS)
    model, tokenizer = igpo.load_model(ARGS)
    problems = [task.train_problem(i, 3) for i in range(4)]
    episodes = play(model, tokenizer, task, problems, 4, ARGS, range(4), scorer=model)
    return model, tokenizer, task, problems, episodes


def test_episodes_are_written_turns_and_replies(played):
    model, tokenizer, task, problems, episodes = played
    assert [e.problem for e in episodes] == [problem for problem in problems for _ in range(4)]
    for episode in episodes:
        assert episode.prompt == igpo.encode(tokenizer, task, episode.problem, ARGS)
        rebuilt, count = [], episode.turns[-1] + 1
        assert len(episode.texts) == 2 * count - 1 and len(episode.answer_logprobs) == count <= 4
        for turn in range(count):
            written = [token for token, number in zip(episode.ids, episode.turns) if number == turn]
            assert tokenizer.decode(written, skip_special_tokens=True) == episode.texts[2 * turn]
            rebuilt += written
            (reply,) = task.step([episode.texts[2 * turn]], turn + 1)
            if turn + 1 < count:
                assert written[-1] in model.generation_config.eos_token_id
                assert reply["content"] == episode.texts[2 * turn + 1]
                rebuilt += reply_ids(model, tokenizer, [[reply]], ARGS)[0][1:]  # the end is written
            else:
                assert reply is None or not episode.ended
        assert rebuilt == episode.ids
        expected = [function(episode.problem, "".join(episode.texts)) for function in task.reward_functions.values()]
        assert episode.rewards == tuple(expected)
    assert len({len(episode.texts) for episode in episodes}) > 1


@torch.no_grad()
def plain_logprobs(model, context: list[int], ids: list[int]) -> torch.Tensor:
    """Log-probabilities of ids after a context by one plain call of the model."""
    logits = model(torch.tensor([context + ids])).logits[0, len(context) - 1 : -1]
    return -F.cross_entropy(logits / ARGS.temperature, torch.tensor(ids), reduction="none")


def test_memory_gives_what_the_plain_forward_pass_gives(played):
    """What was written, and the right answer behind every context of which it is told."""
    model, tokenizer, task, _, episodes = played
    for episode in episodes:
        turns = torch.tensor(episode.turns)
        plain = plain_logprobs(model, episode.prompt, episode.ids)
        assert_close(torch.tensor(episode.logprobs), plain[turns >= 0], 1e-4)
        texts = task.right_answer(episode.problem)
        before, answer = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        starts = [episode.turns.index(turn) for turn in range(turns.max() + 1)]
        contexts = [episode.prompt + episode.ids[:start] for start in starts]
        plain = [plain_logprobs(model, context + before, answer).mean() for context in contexts]
        assert_close(torch.tensor(episode.answer_logprobs), torch.stack(plain), 1e-5)
    first = torch.tensor([episode.answer_logprobs[0] for episode in episodes]).view(4, 4)
    assert (first == first[:, :1]).all(), "a group begins with one prompt: equal to the bit"


@torch.no_grad()
def test_answers_are_scored_without_a_memory_too(played):
    """As with --vllm: every context is read anew, in passes of a few."""
    model, tokenizer, task, _, episodes = played
    asked = [igpo.Episode(e.problem, e.prompt, ids=e.ids[: e.turns.index(1)]) for e in episodes if 1 in e.turns]
    assert len({tuple(e.prompt + e.ids) for e in asked}) > 4
    expected = [e.answer_logprobs[1] for e in episodes if 1 in e.turns]
    for tokens in (1, 500, 10**6):
        found = igpo.answer_logprobs(model, tokenizer, task, asked, None, replace(ARGS, micro_batch_tokens=tokens))
        assert_close(torch.tensor(found), torch.tensor(expected), 1e-5)


@torch.no_grad()
def test_right_answers_of_different_lengths(played, monkeypatch):
    """Scored together, each gets the mean over its own tokens."""
    model, tokenizer, _, _, episodes = played
    answers = ["Jodo", "friend of Jodo", "friend"]
    task = SimpleNamespace(right_answer=lambda problem: ("<answer>", answers[problem]))
    asked = [igpo.Episode(number, episodes[4 * number].prompt) for number in range(3)]
    memory = igpo.read(model, [episode.prompt for episode in asked])[0]
    found = igpo.answer_logprobs(model, tokenizer, task, asked, memory, ARGS)
    before, *ids = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ["<answer>", *answers])
    assert len(set(map(len, ids))) == 3
    plain = [plain_logprobs(model, episode.prompt + before, answer).mean() for episode, answer in zip(asked, ids)]
    assert_close(torch.tensor(found), torch.stack(plain), 1e-5)
    monkeypatch.setattr(igpo, "longest_text", lambda model: len(asked[0].prompt) + len(before))
    with pytest.raises(SystemExit, match="^--max-prompt-length: too long for a right answer"):
        igpo.answer_logprobs(model, tokenizer, task, asked, None, ARGS)


def test_the_space_before_a_text_is_not_put_before_the_answer(played):
    """Tokenizers as that of Llama 2 put one before every text; the model writes none after <answer>."""
    model, tokenizer, _, _, episodes = played
    spaced = MagicMock(decode=tokenizer.decode, side_effect=lambda text, **more: tokenizer(" " + text, **more))
    task = SimpleNamespace(right_answer=lambda problem: ("<answer>", "Jodo"))
    asked = [igpo.Episode(0, episodes[0].prompt)]
    memory = igpo.read(model, [episodes[0].prompt])[0]
    (found,) = igpo.answer_logprobs(model, spaced, task, asked, memory, ARGS)
    before, answer = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (" <answer>", "Jodo"))
    assert len(answer) < len(tokenizer(" Jodo", add_special_tokens=False)["input_ids"])
    assert found == pytest.approx(plain_logprobs(model, asked[0].prompt + before, answer).mean().item(), abs=1e-5)


def test_an_answer_stands_behind_one_opening_of_a_thought(played):
    """Where the template has opened it, right_answer's own is left out."""
    model, tokenizer, _, _, episodes = played
    task = SimpleNamespace(right_answer=lambda problem: ("<think>so</think><answer>", "Jodo"))
    opened = episodes[0].prompt + tokenizer("<think>", add_special_tokens=False)["input_ids"]
    (found,) = igpo.answer_logprobs(model, tokenizer, task, [igpo.Episode(0, opened)], None, ARGS)
    before, answer = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("so</think><answer>", "Jodo"))
    assert found == pytest.approx(plain_logprobs(model, opened + before, answer).mean().item(), abs=1e-5)


def test_episodes_belong_to_their_seeds(played):
    """Whoever else plays, and however many at once; greedy episodes are all alike."""
    model, tokenizer, task, problems, episodes = played
    args = replace(ARGS, decode_batch_size=3)
    alone = play(model, tokenizer, task, problems[2:3], 4, args, [2])
    assert [e.ids for e in alone] == [e.ids for e in episodes[8:12]]
    seeds, generate = [], igpo.generate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(igpo, "generate", lambda *words: seeds.extend(words[3]) or generate(*words))
        other = play(model, tokenizer, task, problems[2:3], 4, args, [5])
    assert [e.ids for e in other] != [e.ids for e in alone]
    assert len(set(seeds)) == len(seeds) == sum(e.turns[-1] + 1 for e in other), "a seed for each turn"
    greedy = play(model, tokenizer, task, problems[:1], 3, args)
    assert greedy[0].ids == greedy[1].ids == greedy[2].ids


def test_an_episode_ends_before_its_context_is_too_long(played):
    model, tokenizer, task, problems, episodes = played
    longest = len(episodes[0].prompt) + 40
    args = replace(ARGS, max_prompt_length=longest)
    cut = play(model, tokenizer, task, problems, 4, args, range(4))
    for short, whole in zip(cut, episodes):
        context = short.prompt + [token for token, turn in zip(short.ids, short.turns) if turn < short.turns[-1]]
        assert len(context) <= longest and whole.ids[: len(short.ids)] == short.ids
        assert short.ended == (whole.ended and short.ids == whole.ids)
    assert 0 < sum(episode.ended for episode in cut) < len(cut)


def test_update_gradient_equals_the_written_out_one(played):
    """The policy gradient of eq. 7 at ratio 1, an episode at a time; what was read is not in it."""
    model, *_, episodes = played
    gains = gains_of([torch.tensor(episode.answer_logprobs) for episode in episodes])
    outcomes = torch.tensor([episode.rewards[-1] for episode in episodes])
    rows = turn_advantages(gains, outcomes, torch.arange(16) // 4)
    recorder = Recorder(model)
    advantages = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    args = replace(ARGS, micro_batch_size=6, max_grad_norm=1e9)
    update(model, None, recorder, episodes, advantages, args)
    for episode, row in zip(episodes, rows):
        logits = model(torch.tensor([episode.prompt + episode.ids])).logits[0, len(episode.prompt) - 1 : -1]
        logprobs = (logits / ARGS.temperature).log_softmax(1)
        terms = [row[turn] * x[token] for x, token, turn in zip(logprobs, episode.ids, episode.turns) if turn >= 0]
        (-torch.stack(terms).mean() / len(episodes)).backward()
    expected = flat(p.grad for p in model.parameters())
    model.zero_grad()
    assert expected.norm() > 1e-3 and relative(recorder.gradient, expected) < 1e-4
