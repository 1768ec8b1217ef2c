"""IGPO: the numbers of the official code, identities and properties, and every step from episodes to the update."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from algorithms import igpo
from algorithms.igpo import (
    Args,
    Batch,
    Progress,
    Samples,
    answer_logprobs,
    batch_metrics,
    compute_advantages,
    encode,
    information_gains,
    kl_estimate,
    load_model,
    load_task,
    load_tokenizer,
    play,
    policy_loss,
    pool_statistics,
    rollout,
    turn_advantages,
    update,
)
from envs.episodes import Episode, padded, reply_ids
from envs.search_qa import Problem, SearchQA, result_message
from envs.search_text import f1

REFERENCE = json.loads((Path(__file__).parent / "reference" / "igpo.json").read_text())
NORMALIZATIONS, REWARDS = ["separate", "joint"], ["f1+ig", "f1", "ig"]


def assert_close(actual, expected, tolerance: float = 1e-5) -> None:
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual.detach(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def assert_rows_close(actual, expected, tolerance: float = 1e-5) -> None:
    assert [len(row) for row in actual] == [len(row) for row in expected]
    for ours, theirs in zip(actual, expected):
        assert_close(ours, theirs, tolerance)


def advantages_of(gains, outcomes, groups=None, *options, dtype=torch.float64, **named) -> list[torch.Tensor]:
    """turn_advantages of lists; without groups all rows are one."""
    groups = [0] * len(outcomes) if groups is None else groups
    gains = [torch.as_tensor(row, dtype=dtype) for row in gains]
    return turn_advantages(gains, torch.as_tensor(outcomes, dtype=dtype), torch.tensor(groups), *options, **named)


def some_episodes(groups: int = 4, size: int = 6, seed: int = 0) -> tuple[list, torch.Tensor, list[int]]:
    """Mean log-probabilities of the answer at the start of every turn (1 to 5), outcomes, groups; in random order."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 6, (groups * size,), generator=generator).tolist()
    scores = [-5 * torch.rand(count, dtype=torch.float64, generator=generator) for count in counts]
    outcomes = torch.rand(len(counts), dtype=torch.float64, generator=generator)
    order = torch.randperm(len(counts), generator=generator).tolist()
    return [scores[i] for i in order], outcomes[order], [i // size for i in order]


def gains_of(scores) -> list[torch.Tensor]:
    return [information_gains(score) for score in scores]


# --- Reference: the output of the official code ----------------------------------------------------------------------

# Not expressed: norm_adv_by_std_in_grpo False (here a standard deviation always divides); version feb2026, which drops
# the boundary of a turn whose normalised reward is exactly 0; reward_placement, because turns are numbers here and no
# reward is put on a token, so that a gain of exactly 0 needs no 1e-10 and gains always are one fewer than turns; the
# mask of vectorised_teacher_forcing (contexts are packed otherwise, with the same result: test_answers_are_scored_as_
# one_by_one); early_code_nov2025, which is another method; ppo_kl and clipfrac_lower, which are not logged. The outcome
# rewards are taken by test_search_qa.py.


def expressed(case: dict, output: dict) -> bool:
    kept = output["version"] == "later" and output.get("norm_adv_by_std_in_grpo", True)
    return kept and case["name"] != "exact_zero_info_gain_without_1e-10"


CASES = [(case, out) for case in REFERENCE["advantage"]["cases"] for out in case["outputs"] if expressed(case, out)]


def case_name(value) -> str:
    return value["name"] if "name" in value else f"{value['info_gain_norm_mode']} {value['gamma']}"


def test_reference_file_is_whole():
    assert len(CASES) == 13 and len({case["name"] for case, _ in CASES}) == 5
    assert {(out["info_gain_norm_mode"], out["gamma"]) for _, out in CASES} == {
        *(("separate", gamma) for gamma in (1.0, 0.9, 0.5)),
        *(("joint", gamma) for gamma in (1.0, 0.5)),
    }
    assert len(REFERENCE["policy_loss"]["outputs"]) == 3 and len(REFERENCE["loss_mask"]["responses"]) == 3


@pytest.mark.parametrize("case, output", CASES, ids=case_name)
def test_reference_advantages(case, output):
    rewards = [[turn["reward"] for turn in turns] for turns in case["turns"]]
    groups = [sorted(set(case["uid"])).index(uid) for uid in case["uid"]]
    options = {"gamma": output["gamma"], "normalization": output["info_gain_norm_mode"], "dtype": torch.float32}
    ours = advantages_of([row[:-1] for row in rewards], [row[-1] for row in rewards], groups, **options)
    assert_rows_close(ours, output["advantage_per_turn"])


def test_reference_exact_zero_gain_is_a_turn_here():
    """The official advantage code takes a gain of 0 for no turn at all; that is its result without the turn, not with
    it. (Its reward code writes 1e-10 instead, and so agrees with us.)"""
    case = next(case for case in REFERENCE["advantage"]["cases"] if case["name"].startswith("exact_zero"))
    for output in case["outputs"]:
        (merged, same), other = output["advantage_per_turn"]
        assert merged == same
        assert_rows_close(advantages_of([[], [0.4]], [1.0, 0.0], gamma=output["gamma"]), [[merged], other])
        first, second = advantages_of([[0.0], [0.4]], [1.0, 0.0], gamma=output["gamma"])
        assert_close(first[0] - output["gamma"] * first[1], -1.0, 1e-4)
        assert_close(second[0] - output["gamma"] * second[1], 1.0, 1e-4)
        tiny = advantages_of([[1e-10], [0.4]], [1.0, 0.0], gamma=output["gamma"])
        assert_rows_close(tiny, [first.tolist(), second.tolist()], 1e-6)


def test_reference_information_gains():
    case = REFERENCE["info_gain_from_logprobs"]
    first, end = case["answer_token_range"]
    scores = torch.tensor(case["wrapped_answer_logprobs_per_state"])[:, first:end].mean(1)
    assert_close(scores, [-3, -1, -1.3, -0.2])
    assert_close(information_gains(scores), case["log_prob_diff"])
    assert_close(information_gains(scores, "log"), [2.0, -0.3, 1.1])
    assert_close(information_gains(scores, "prob"), case["prob_diff"])
    assert_close(information_gains(scores, "prob"), [0.3181, -0.0953, 0.5462], 1e-4)


LOSSES = {
    "token-mean": {"loss_type": "bnpo"},
    "seq-mean-token-sum": {"loss_type": "dr_grpo", "max_completion_length": 1},
    "seq-mean-token-mean": {"loss_type": "grpo"},
}


@pytest.mark.parametrize("case", REFERENCE["policy_loss"]["outputs"], ids=lambda case: case["loss_agg_mode"])
def test_reference_loss_and_kl(case):
    """The official loss with its dual clip, delta = 3, and its KL penalty."""
    names = ("log_prob", "old_log_prob", "advantages", "mask", "ref_log_prob")
    *given, reference = (torch.tensor(REFERENCE["policy_loss"][name]) for name in names)
    options = LOSSES[case["loss_agg_mode"]] | {"epsilon": 0.2, "delta": 3.0}
    loss, metrics = policy_loss(*given, **options)
    assert_close(loss, case["pg_loss"])
    assert_close(metrics["clip_ratio/region_mean"], case["clipfrac"])
    assert (policy_loss(*given, **options | {"delta": None})[0] - loss).abs() > 0.1, "the dual clip is in reach"
    penalised, metrics = policy_loss(*given, **options, beta=0.1, ref_logprobs=reference)
    assert_close((penalised - loss) / 0.1, case["kl_low_var"], 1e-4)
    assert_close(metrics["kl"], REFERENCE["policy_loss"]["outputs"][0]["kl_low_var"])
    assert (kl_estimate(given[0], reference) >= 0).all()


def test_reference_loss_mask():
    """101, 102: a header; 103: an end token, which the policy writes. The first header is the end of the prompt."""
    written = [[[5, 6, 103], [9, 10, 103]], [[5, 6, 7]], [[5, 103], [9, 9, 9]]]
    read = [[[7, 8, 103, 101, 102]], [], [[8, 103, 101, 102]]]
    episodes = []
    for turns, replies in zip(written, read):
        episodes.append(episode := Episode(None, [101, 102]))
        for turn, ids in enumerate(turns):
            episode.add(ids, [-0.5] * 9, "text", 0.0, 103 in ids)
            if turn < len(replies):
                episode.read(replies[turn], "reply")
    case, device = REFERENCE["loss_mask"], torch.device("cpu")
    assert padded(episodes, "ids", 0, device).tolist() == case["responses"]
    mask = padded(episodes, "turns", -1, device) >= 0
    assert mask.tolist() == torch.tensor(case["mask"]).bool().tolist()
    assert_close(padded(episodes, "logprobs", 0.0, device), -0.5 * mask.float())
    assert [episode.starts for episode in episodes] == [[0, 8], [0], [0, 6]]
    assert [episode.ended for episode in episodes] == [True, False, False]
    assert episodes[0].context(1) == [101, 102, *case["responses"][0][:8]]
    assert episodes[0].context(0) == [101, 102] and episodes[1].context() == [101, 102, 5, 6, 7]


def test_reference_worked_example():
    """The numbers of the page."""
    gains, outcomes = [[0.4, -0.1], [0.2, 0.0], [-0.3], []], [1.0, 0.0, 0.5, 1.0]
    expected = [[1.8149, 0.3252, 0.9045], [-1.0110, -1.6731, -1.5076], [-1.7084, -0.3015], [0.9045]]
    assert_rows_close(advantages_of(gains, outcomes), expected, 1e-4)
    pooled = torch.tensor(sum(gains, []), dtype=torch.float64)
    mean, std, size = pool_statistics(pooled, torch.ones(5).double(), torch.zeros(5).long(), ddof=0)
    assert_close(torch.stack([mean[0], std[0], size[0]]), [0.04, 0.2417, 5], 1e-4)
    assert torch.tensor(outcomes).std(unbiased=False).item() == pytest.approx(0.4146, abs=1e-4)
    equal = advantages_of([[0.5], [-0.5], [0.25], [0.1]], [0.0] * 4)
    assert_close(torch.stack(equal)[:, 0], [1.1207, -1.5962, 0.4415, 0.0340], 1e-4)
    assert (torch.stack(equal)[:, 1] == 0).all()
    assert (torch.cat(advantages_of([[0.5], [-0.5], [0.25], [0.1]], [0.0] * 4, reward="f1")) == 0).all(), "GRPO"


# --- Identities ------------------------------------------------------------------------------------------------------


def test_gains_telescope():
    for score in some_episodes()[0]:
        for t in range(len(score)):
            assert_close(information_gains(score[t:]).sum(), score[-1] - score[t], 1e-12)
            assert_close(information_gains(score[t:], "prob").sum(), score[-1].exp() - score[t].exp(), 1e-12)


def test_one_turn_is_grpo_with_the_population_standard_deviation():
    outcomes = torch.rand(12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    groups = [i // 4 for i in range(12)]
    rows = outcomes.view(3, 4)
    expected = (rows - rows.mean(1, keepdim=True)) / rows.std(1, unbiased=False, keepdim=True)
    for normalization in NORMALIZATIONS:
        for gamma in (0.0, 0.5, 1.0):
            ours = advantages_of([[]] * 12, outcomes, groups, gamma, normalization)
            assert_close(torch.cat(ours), expected.flatten(), 1e-4)
            assert (torch.cat(advantages_of([[]] * 12, outcomes, groups, gamma, normalization, "ig")) == 0).all()


def test_closed_form_of_the_return():
    """gamma 1, separate: the return of turn t is what the answer gains until the last turn, less as many mean gains."""
    scores, outcomes, groups = some_episodes()
    ours, gains = advantages_of(gains_of(scores), outcomes, groups), gains_of(scores)
    for i, score in enumerate(scores):
        same = [j for j, group in enumerate(groups) if group == groups[i]]
        pooled, results = torch.cat([gains[j] for j in same]), outcomes[same]
        spread, scale = (((x.var(unbiased=False) + 1e-8).sqrt() + 1e-6) for x in (pooled, results))
        turns = torch.arange(len(score), 0, -1) - 1  # T - t
        expected = (score[-1] - score - turns * pooled.mean()) / spread + (outcomes[i] - results.mean()) / scale
        assert_close(ours[i], expected, 1e-9)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0])
def test_reward_modes(gamma):
    """f1: every turn gets the discounted outcome; ig: no outcome; separate: both add up to f1+ig."""
    scores, outcomes, groups = some_episodes()
    gains = gains_of(scores)
    both, outcome, gain = (advantages_of(gains, outcomes, groups, gamma, reward=reward) for reward in REWARDS)
    alone = torch.cat(advantages_of([[]] * len(outcomes), outcomes, groups))
    for i, score in enumerate(scores):
        powers = torch.tensor([gamma**k for k in range(len(score))][::-1], dtype=torch.float64)
        assert_close(outcome[i], alone[i] * powers, 1e-12)
        assert_close(outcome[i] + gain[i], both[i], 1e-12)
        assert gain[i][-1] == 0
        if gamma == 0 and len(score) > 1:
            pooled = torch.cat([gains[j] for j in range(len(groups)) if groups[j] == groups[i]])
            assert_close(both[i][:-1], (gains[i] - pooled.mean()) / pooled.std(unbiased=False), 1e-4)
            assert_close(gain[i][:-1], both[i][:-1], 0)
    joint = [advantages_of(gains, outcomes, groups, gamma, "joint", reward) for reward in REWARDS]
    for rows in zip(*joint):
        assert_close(rows[1] + rows[2], rows[0], 1e-12)


def test_joint_is_one_pool():
    scores, outcomes, groups = some_episodes(groups=1)
    gains = gains_of(scores)
    values = torch.cat([*gains, outcomes])
    expected = [
        torch.cat([gain, outcome[None]]).sub(values.mean()) / values.std(unbiased=False)
        for gain, outcome in zip(gains, outcomes)
    ]
    assert_rows_close(advantages_of(gains, outcomes, groups, 0.0, "joint"), expected, 1e-5)


# --- Properties ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("reward", REWARDS)
def test_order_and_other_groups_do_not_matter(normalization, reward):
    scores, outcomes, groups = some_episodes()
    gains, options = gains_of(scores), (0.7, normalization, reward)
    whole = advantages_of(gains, outcomes, groups, *options)
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = advantages_of([gains[i] for i in order], outcomes[order], [groups[i] for i in order], *options)
    assert_rows_close(shuffled, [whole[i] for i in order], 1e-12)
    for group in range(4):
        rows = [i for i in range(len(scores)) if groups[i] == group]
        alone = advantages_of([gains[i] for i in rows], outcomes[rows], None, *options)
        assert_rows_close(alone, [whole[i] for i in rows], 1e-12)
    renamed = advantages_of(gains, outcomes, [10**12 - 7 * group for group in groups], *options)
    assert_rows_close(renamed, whole, 1e-12)


def test_shift_and_scale():
    """Separate pools do not know the units of their rewards; one pool does."""
    scores, outcomes, groups = some_episodes()
    gains = gains_of(scores)
    whole = advantages_of(gains, outcomes, groups)
    other = [3 * gain + 1 for gain in gains], 5 * outcomes - 2, groups
    assert_rows_close(advantages_of(*other), whole, 1e-4)
    joint = advantages_of(gains, outcomes, groups, 1.0, "joint"), advantages_of(*other, 1.0, "joint")
    assert max((x - y).abs().max() for x, y in zip(*joint)) > 0.1


@pytest.mark.parametrize("value", [0.9, 0.1, 1 / 3, -2.0, 1e-4, 12345.678])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_values_give_exactly_zero(value, dtype):
    gains, outcomes = [[value] * 2, [value], [], [value] * 4] * 2, [value] * 8
    for normalization in NORMALIZATIONS:
        assert (torch.cat(advantages_of(gains, outcomes, None, 1.0, normalization, dtype=dtype)) == 0).all()
    varied = advantages_of(gains, [0.0, 1.0] * 4, dtype=dtype)
    for row in varied:
        assert (row == row[-1]).all() and row[-1] != 0, "equal gains say nothing, the outcome all there is to say"


def test_a_lone_value_gives_zero():
    lone = advantages_of([[], [0.7], []], [0.0, 1.0, 0.5])
    assert lone[1][0] == lone[1][1] and lone[1][1] > 1, "a gain on its own leaves the outcome alone"
    assert_rows_close(lone, advantages_of([[], [0.7], []], [0.0, 1.0, 0.5], reward="f1"), 0)
    assert (torch.cat(advantages_of([[0.7]], [0.3])) == 0).all()
    assert (torch.cat(advantages_of([[]], [0.3], None, 1.0, "joint")) == 0).all()
    assert_rows_close(advantages_of([[0.7]], [0.3], None, 1.0, "joint"), [[0.0, -1.0]], 1e-4)
    two = advantages_of([[0.2, 0.4]], [0.3], None, 0.0)[0]
    assert_close(two, [-1.0, 1.0, 0.0], 1e-4)


def test_turns_without_gain_are_taken_from_the_mean():
    """Where the mean gain is positive, every further turn costs: the length effect of the page."""
    rows = advantages_of([[1.0], [1.0, 0.5], [1.0, 0.5, 0.5]], [1.0, 1.0, 1.0])
    assert rows[0][0] > rows[1][0] > rows[2][0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtype_and_no_gradient(dtype):
    scores, outcomes, groups = some_episodes()
    gains = [gain.to(dtype) for gain in gains_of(scores)]
    ours = turn_advantages(gains, outcomes.to(dtype), torch.tensor(groups))
    exact = turn_advantages([gain.double() for gain in gains], outcomes.to(dtype).double(), torch.tensor(groups))
    assert all(row.dtype == dtype and not row.requires_grad for row in ours)
    assert_rows_close(ours, [row.tolist() for row in exact], 5e-2 if dtype == torch.bfloat16 else 1e-6)
    mixed = turn_advantages([gain.float() for gain in gains], outcomes, torch.tensor(groups))
    assert all(row.dtype == torch.float64 for row in mixed)


# --- Episodes --------------------------------------------------------------------------------------------------------

ARGS = Args(device="cpu", max_completion_length=32, num_generations=4, temperature=1.3, hops=(1, 2, 3), max_turns=4)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ARGS)


@pytest.fixture(scope="module")
def model(tokenizer):
    return load_model(ARGS, tokenizer, torch.device("cpu"))


@pytest.fixture(scope="module")
def played(model, tokenizer):
    """Task, problems and their episodes, hot enough to err."""
    task = load_task(ARGS)
    problems = [task.train_problem(i, 3) for i in range(6)]
    return task, problems, play(model, tokenizer, task, problems, 4, ARGS, [str(i) for i in range(6)])


def forced(model, context: list[int], ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of ids behind a context by one plain call of the model. -> (T,)"""
    logits = model(torch.tensor([context + ids])).logits[0, len(context) - 1 : -1].float() / temperature
    return logits.log_softmax(1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def test_episodes_are_sampled_turns_and_encoded_replies(played, model, tokenizer):
    task, problems, episodes = played
    assert [e.problem for e in episodes] == [problem for problem in problems for _ in range(4)]
    counts = set()
    for e in episodes:
        assert e.over and len(e.ids) == len(e.turns) == len(e.logprobs)
        assert e.prompt == encode(tokenizer, task.prompt(e.problem)) and e.context() == e.prompt + e.ids
        counts.add(len(e.starts))
        assert len(e.texts) == 2 * len(e.starts) - 1, "what the policy wrote is the first and the last"
        rebuilt = []
        for turn, start in enumerate(e.starts):
            assert start == len(rebuilt) and e.context(turn) == e.prompt + rebuilt
            written = [token for token, number in zip(e.ids, e.turns) if number == turn]
            assert 0 < len(written) <= ARGS.max_completion_length
            assert e.ids[start : start + len(written)] == written
            assert tokenizer.decode(written, skip_special_tokens=True) == e.texts[2 * turn]
            rebuilt += written
            if turn + 1 < len(e.starts):
                assert written[-1] in model.generation_config.eos_token_id
                (reply,) = task.step([e.texts[2 * turn]], turn + 1)
                assert reply["content"] == e.texts[2 * turn + 1]
                rebuilt += reply_ids(tokenizer, reply)
        assert rebuilt == e.ids
        assert all((turn == -1) == (x == 0.0) or x > -1e-6 for turn, x in zip(e.turns, e.logprobs))
    assert len(counts) > 1 and max(counts) <= ARGS.max_turns


def test_whole_episodes_are_what_the_template_writes(played, tokenizer):
    """The same text as the whole chat at once; and the same ids, where the policy wrote as the tokenizer would."""
    task, _, episodes = played
    same = 0
    for e in [e for e in episodes if e.ended]:
        roles = ["assistant", "user"] * len(e.texts)
        messages = [{"role": role, "content": text} for role, text in zip(roles, e.texts)]
        ids = tokenizer.apply_chat_template(task.prompt(e.problem) + messages, return_dict=True)["input_ids"]
        assert tokenizer.decode(ids) == tokenizer.decode(e.context())
        same += ids == e.context()
    assert same > len(episodes) / 2


TEMPLATES = {
    "shipped": None,
    "an end token that is not the tokenizer's": None,
    "line break behind the end token": "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "a message of its own in front": "<|user|>Help.<|end|>{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "a thought in the last message only": "{% for m in messages %}<|{{ m['role'] }}|>{% if loop.last and m['role'] =="
    " 'assistant' %}<think></think>{% endif %}{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}"
    "<|assistant|>{% endif %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_replies_continue_the_chat_of_any_template(name):
    """What stands behind the end token of the assistant's message, however the template treats that message."""
    tokenizer = load_tokenizer(ARGS)
    tokenizer.chat_template = TEMPLATES[name] or tokenizer.chat_template
    if "not the tokenizer's" in name:
        tokenizer.eos_token = tokenizer.pad_token
    reply = result_message("Belis Holard's rival is Fako Varik.")
    behind = "\n" if "line break" in name else ""
    text = f"{behind}<|user|><result>Belis Holard's rival is Fako Varik.</result><|end|>{behind}<|assistant|>"
    assert tokenizer.decode(reply_ids(tokenizer, reply)) == text
    assert reply_ids(tokenizer, reply) == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_recorded_logprobs_equal_teacher_forcing(played, model):
    with torch.no_grad():
        for e in played[2]:
            exact = forced(model, e.prompt, e.ids, ARGS.temperature)
            kept = torch.tensor(e.turns) >= 0
            assert (exact - torch.tensor(e.logprobs))[kept].abs().max() < 1e-4
            assert (torch.tensor(e.logprobs)[~kept] == 0).all()


def test_episodes_belong_to_their_seeds(played, model, tokenizer):
    """The same for the same seeds, whoever else plays; greedy episodes are all alike."""
    task, problems, episodes = played
    alone = play(model, tokenizer, task, problems[2:3], 4, ARGS, ["2"])
    assert [e.ids for e in alone] == [e.ids for e in episodes[8:12]]
    other = play(model, tokenizer, task, problems[2:3], 4, ARGS, ["another"])
    assert [e.ids for e in other] != [e.ids for e in alone]
    greedy = play(model, tokenizer, task, problems[:2], 3, ARGS, None)
    assert greedy[0].ids == greedy[1].ids == greedy[2].ids != greedy[3].ids
    for e in greedy[:1]:
        for turn, start in enumerate(e.starts):
            written = [token for token, number in zip(e.ids, e.turns) if number == turn]
            logits = model(torch.tensor([e.context()])).logits[0]
            first = len(e.prompt) + start - 1
            assert logits[first : first + len(written)].argmax(1).tolist() == written


def test_who_draws_which_random_numbers(monkeypatch, played, model, tokenizer):
    """The first prompt is computed once for its group, later ones a row each; no two turns draw the same numbers."""
    calls, real = [], igpo.generate

    def spy(model, prompts, num_generations, args, generator):
        calls.append((len(prompts), num_generations, [g.initial_seed() for g in generator]))
        return real(model, prompts, num_generations, args, generator)

    monkeypatch.setattr(igpo, "generate", spy)
    task, problems, episodes = played
    play(model, tokenizer, task, problems, 4, ARGS, [str(i) for i in range(6)])
    counts = [sum(len(e.starts) > turn for e in episodes) for turn in range(max(len(e.starts) for e in episodes))]
    assert [call[:2] for call in calls] == [(6, 4), *((count, 1) for count in counts[1:])]
    seeds = [seed for call in calls for seed in call[2]]
    assert len(seeds) == 6 + sum(counts[1:]) == len(set(seeds))


def scripted(monkeypatch, tokenizer, texts: list[list[str]], max_turns: int = 4) -> list[Episode]:
    """play() of rows whose policy writes these texts, a row each; a text with ... at its end has no end token."""
    spoken = []

    def generate(model, prompts, num_generations, args, generator):
        rows = [row for row in texts if len(row) > len(spoken)]
        assert len(prompts) * num_generations == len(rows), "who is through is asked no more"
        texts_now = [row[len(spoken)] for row in rows]
        spoken.append(prompts)
        ids = [tokenizer(x.removesuffix("..."), add_special_tokens=False)["input_ids"] for x in texts_now]
        ids = [row + [tokenizer.eos_token_id] * (not x.endswith("...")) for row, x in zip(ids, texts_now)]
        table = torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, ids)), True)
        mask = torch.arange(table.size(1)) < torch.tensor([len(row) for row in ids])[:, None]
        ended = torch.tensor([not x.endswith("...") for x in texts_now])
        return Samples(table, mask, -0.5 * mask, 0.25 * mask, ended)

    monkeypatch.setattr(igpo, "generate", generate)
    args = replace(ARGS, max_turns=max_turns)
    return play(None, tokenizer, load_task(args), [load_task(args).train_problem(0, 1)], len(texts), args, None)


def test_when_episodes_end(monkeypatch, tokenizer):
    """After an answer, without either tag, without an end token, or at the limit."""
    search, answer, neither = "<search>rival</search>", "<answer>Fako Varik</answer>", "I know the answer."
    texts = [[answer], [neither], [search, neither], [search, search, answer], [search] * 4]
    texts += [[search + "..."], [search, answer + "..."], [search + answer], [answer + search]]
    texts[7].append(answer)  # what comes first counts
    episodes = scripted(monkeypatch, tokenizer, texts)
    assert [len(e.starts) for e in episodes] == [len(row) for row in texts]
    assert [e.texts[::2] for e in episodes] == [[x.removesuffix("...") for x in row] for row in texts]
    assert [e.ended for e in episodes] == [not row[-1].endswith("...") for row in texts]
    assert all(e.over for e in episodes)
    for e in episodes:
        written = sum(turn >= 0 for turn in e.turns)
        assert sum(e.logprobs) == -0.5 * written and e.entropy == pytest.approx(0.25 * written)
    assert [len(e.starts) for e in scripted(monkeypatch, tokenizer, [[search]] * 2, max_turns=1)] == [1, 1]


# --- Scores of the right answer --------------------------------------------------------------------------------------


def one_by_one(model, tokenizer, episode: Episode, temperature: float) -> list[float]:
    """Mean log-probability of the right answer in each context, a call of the model each."""
    thought = tokenizer(f"<think>{igpo.KNOWN}</think><answer>", add_special_tokens=False)["input_ids"]
    gold = tokenizer(episode.problem.answers[0], add_special_tokens=False)["input_ids"]
    contexts = [episode.context(turn) for turn in range(len(episode.starts))]
    with torch.no_grad():
        return [forced(model, x, thought + gold, temperature)[len(thought) :].mean().item() for x in contexts]


@pytest.mark.parametrize("longest, micro", [(4096, 32), (4096, 1), (150, 4), (1, 2)])
def test_answers_are_scored_as_one_by_one(played, model, tokenizer, longest, micro):
    """Packed together or not: what a plain loop over contexts gives."""
    args = replace(ARGS, max_packed_length=longest, per_device_train_batch_size=micro)
    scores = answer_logprobs(model, tokenizer, played[2], args)
    for e, score in zip(played[2], scores):
        assert len(score) == len(e.starts) and not score.requires_grad
        assert_close(score, one_by_one(model, tokenizer, e, args.temperature), 1e-5)
    first = torch.stack([score[0] for score in scores]).view(6, 4)
    assert torch.equal(first, first[:, :1].expand(6, 4)), "a group begins with one prompt: equal to the bit"


def test_only_the_first_answer_and_its_tokens_count(played, model, tokenizer):
    task, problems, episodes = played
    others = [replace(e.problem, answers=(e.problem.answers[0], "Midra Oslen")) for e in episodes]
    scores = answer_logprobs(model, tokenizer, episodes, ARGS)
    again = answer_logprobs(model, tokenizer, [replace(e, problem=p) for e, p in zip(episodes, others)], ARGS)
    assert_rows_close(again, [score.tolist() for score in scores], 0)
    answers = ["Fako", "Fako Varik", "Fako Varik Fako Varik, Midra Oslen"]  # of different lengths, in one batch
    mixed = [replace(e, problem=Problem("?", (answers[i % 3],))) for i, e in enumerate(episodes)]
    for e, score in zip(mixed, answer_logprobs(model, tokenizer, mixed, ARGS)):
        assert_close(score, one_by_one(model, tokenizer, e, ARGS.temperature), 1e-5)


def test_equal_episodes_have_exactly_equal_scores(played, model, tokenizer):
    """So that their gains are equal to the bit, and their advantages 0."""
    copies = [replace(e) for e in played[2] for _ in range(2)]
    scores = answer_logprobs(model, tokenizer, copies, ARGS)
    assert all(torch.equal(one, other) for one, other in zip(scores[::2], scores[1::2]))
    several = [i for i, e in enumerate(copies) if len(e.starts) == 2][:2]
    gains = [information_gains(scores[i]) for i in several]
    assert (torch.cat(turn_advantages(gains, torch.zeros(2), torch.tensor([0, 0]))) == 0).all()


def test_finding_the_answer_is_a_gain(model, tokenizer):
    """The tiny model can read: a result that names the answer makes it much likelier."""
    args = replace(ARGS, hops=(1,), temperature=1.0)
    task = load_task(args)
    problems = task.evaluation_problems(8)
    episodes = play(model, tokenizer, task, problems, 1, args, None)
    found = [e for e in episodes if len(e.starts) == 2 and e.problem.answers[0] in e.texts[1]]
    assert len(found) >= 4
    for score in answer_logprobs(model, tokenizer, found, args):
        assert information_gains(score) > 1 and information_gains(score, "prob") > 0.3


# --- From episodes to the update -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def batch(model, tokenizer) -> Batch:
    return rollout(model, tokenizer, load_task(ARGS), replace(ARGS, num_prompts_per_step=6), Progress(problems=5))


def test_rollout(monkeypatch, model, tokenizer):
    """Rows of the batch, and what is known of them, from the episodes."""
    kept, args = [], replace(ARGS, num_prompts_per_step=3, format_penalty=-1.5)
    real = igpo.play
    monkeypatch.setattr(igpo, "play", lambda *given: kept.extend(real(*given)) or kept)
    progress, task = Progress(problems=7), load_task(args)
    found = rollout(model, tokenizer, task, args, progress)
    assert progress["problems"] == 10 and len(kept) == 12 == len(found.prompts)
    assert [e.problem for e in kept[::4]] == [task.train_problem(i, args.seed) for i in (7, 8, 9)]
    scores = answer_logprobs(model, tokenizer, kept, args)
    for i, e in enumerate(kept):
        length = len(e.ids)
        assert found.prompts[i] == e.prompt and found.completion_ids[i, :length].tolist() == e.ids
        assert found.mask[i].tolist() == [turn >= 0 for turn in e.turns] + [False] * (found.mask.size(1) - length)
        assert_close(found.logprobs[i, :length], e.logprobs, 0)
        gains = found.info["gains"][i]
        assert_close(gains[~gains.isnan()], information_gains(scores[i]), 1e-6)
        assert found.info["turns"][i] == len(e.starts) == 1 + (~gains.isnan()).sum()
        assert found.info["outcome"][i].item() == pytest.approx(f1(e.problem, "".join(e.texts), invalid=-1.5))
        rewards = [function(e.problem, e.texts[-1]) for function in task.reward_functions.values()]
        assert_close(found.rewards[i], rewards, 1e-6)
    monkeypatch.undo()
    other = rollout(model, tokenizer, task, replace(args, information_gain="prob"), Progress(problems=7))
    assert torch.equal(other.completion_ids, found.completion_ids)
    assert other.info["gains"].nan_to_num().abs().max() <= 1 < found.info["gains"].nan_to_num().abs().max()


@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_every_token_has_the_advantage_of_its_turn(batch, normalization, reward):
    args = replace(ARGS, reward=reward, normalization=normalization, gamma=0.9)
    advantages = compute_advantages(batch, args, Progress())
    gains = [row[~row.isnan()] for row in batch.info["gains"]]
    groups = torch.arange(24) // 4
    rows = turn_advantages(gains, batch.info["outcome"], groups, 0.9, normalization, reward)
    assert advantages.shape == batch.mask.shape and (advantages[~batch.mask] == 0).all()
    for i, row in enumerate(rows):
        assert len(row) == batch.info["turns"][i]
        for turn, value in enumerate(row):
            tokens = advantages[i, batch.info["turn"][i] == turn]
            assert len(tokens) > 0 and (tokens == value).all()
    assert advantages.abs().max() > 0.5


def gradients(monkeypatch, model, batch, advantages, args) -> list[torch.Tensor]:
    """What update() would step along."""
    with monkeypatch.context() as patch:
        patch.setattr(igpo, "apply_gradients", lambda *given: 0.0)
        update(model, torch.optim.SGD(model.parameters(), 0.0), batch, advantages, args)
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


def test_what_was_read_gets_no_gradient(monkeypatch, model, batch):
    """Exactly zero at every token that was read, not zero at those that were sampled."""
    advantages, kept, real = compute_advantages(batch, ARGS, Progress()), [], igpo.token_logprobs

    def spy(model, packed, args):
        logprobs = real(model, packed, args)
        logprobs.retain_grad()
        kept.append((packed.rows, logprobs))
        return logprobs

    monkeypatch.setattr(igpo, "token_logprobs", spy)
    gradients(monkeypatch, model, batch, advantages, ARGS)
    assert sorted(row for rows, _ in kept for row in rows) == advantages.ne(0).any(1).nonzero()[:, 0].tolist()
    read = 0
    for rows, logprobs in kept:
        mask = batch.mask[rows]
        assert (logprobs.grad[~mask] == 0).all() and (logprobs.grad[mask & (advantages[rows] != 0)] != 0).all()
        read += ((batch.info["turn"][rows] == -1) & (logprobs != 0)).sum()
    assert read > 100, "what was read is in the packed rows, or the policy would not see it"


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_update_gradient_equals_the_naive_one(monkeypatch, model, batch, loss_type):
    """Against one plain call of the model for every episode, and one loss over all."""
    args = replace(ARGS, loss_type=loss_type, per_device_train_batch_size=4)
    advantages = compute_advantages(batch, args, Progress())
    found = gradients(monkeypatch, model, batch, advantages, args)
    rows = []
    for prompt, ids in zip(batch.prompts, batch.completion_ids):
        rows.append(forced(model, prompt, ids.tolist(), args.temperature))
    logprobs = torch.stack(rows)
    options = {"loss_type": loss_type, "max_completion_length": args.max_completion_length}
    policy_loss(logprobs, logprobs.detach(), advantages, batch.mask, **options)[0].backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    difference, size = (
        torch.cat([x.flatten() for x in tensors]).norm()
        for tensors in ([x - y for x, y in zip(found, expected)], expected)
    )
    assert size > 1e-3 and difference / size < 1e-4


def test_batch_metrics_by_hand():
    """Three groups of two: outcomes differ; equal, and two gains; equal, and one gain, which says nothing by itself."""
    turn = [[0, 0, 0, -1, -1], [0] * 5, [0, -1, 1, -1, -1], [0, -1, -1, 1, -1], [0, 0, -1, 1, 1], [0, 0, -1, -1, -1]]
    info = {"outcome": [1.0, 0.0, -2.0, -2.0, 0.5, 0.5], "turns": [1, 1, 2, 2, 2, 1], "entropy": [1.0] * 6}
    info |= {"ended": [True] * 5 + [False], "turn": turn}
    info = {name: torch.tensor(values) for name, values in info.items()}
    info["gains"] = torch.tensor([[math.nan], [math.nan], [0.5], [-0.25], [1.0], [math.nan]])
    rewards = torch.tensor([[1.0, 1.0]] * 3 + [[0.0, 0.5]] * 3)
    batch = Batch([[0]] * 6, torch.zeros(6, 5).long(), info["turn"] >= 0, torch.zeros(6, 5), rewards, info)
    task, progress = SimpleNamespace(reward_functions={"right": None, "other": None}), Progress(tokens=100)
    metrics = batch_metrics(batch, task, Args(num_generations=2), progress)
    assert metrics["num_tokens"] == progress["tokens"] == 118
    expected = {"reward": -2 / 6, "reward_std": 0.5**0.5 / 3, "rewards/right/mean": 0.5, "rewards/other/mean": 0.75}
    expected |= {"frac_reward_zero_std": 2 / 3, "igpo/frac_no_signal": 1 / 3, "igpo/turns": 1.5, "igpo/gain": 1.25 / 6}
    expected |= {"completions/mean_length": 3.0, "completions/max_length": 5.0, "completions/clipped_ratio": 1 / 6}
    expected |= {"entropy": 6 / 18, "num_tokens": 118}
    assert metrics == pytest.approx(expected, abs=1e-6)
    assert {type(value) for value in metrics.values()} <= {float, int}
    for reward in REWARDS:  # what the method could use, also where a control does not
        others = batch_metrics(batch, task, Args(num_generations=2, reward=reward, normalization="joint"), progress)
        assert others["igpo/frac_no_signal"] == 0, "in one pool a lone gain differs from the outcomes"


def test_the_limit_of_turns_is_that_of_the_task():
    assert load_task(replace(ARGS, max_turns=3)).max_turns == 3 and isinstance(load_task(ARGS), SearchQA)
