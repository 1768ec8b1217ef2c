"""AMPO: what ampo.py has beside grpo.py, whose tests hold for the functions that both share."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_grpo import (
    PROMPTS,
    G,
    Recorder,
    T,
    assert_close,
    flat,
    plain_logprobs,
    relative,
    some_batch,
    tiny_model,
)

from algorithms import ampo
from algorithms.ampo import (
    Args,
    Completion,
    ampo_loss,
    comprehension,
    group_advantages,
    num_replaced,
    split_solution,
    token_weights,
)
from envs import countdown

REFERENCE = json.loads((Path(__file__).parent / "reference" / "ampo.json").read_text())

# --- Reference: the output of the authors' code, SII-Enigma/AMPO ------------------------------------------------------


def advantages_of(vector) -> torch.Tensor:
    """(B,) of groups that stand one after another."""
    scores = torch.tensor(vector["inputs"]["sequence_scores"], dtype=torch.float32)
    groups = torch.tensor(vector["inputs"]["group_index"])
    scale = "group" if vector["options"]["norm_adv_by_std_in_grpo"] else "none"
    return torch.cat(
        [
            group_advantages(scores[groups == group], int((groups == group).sum()), scale, 1e-6)
            for group in groups.unique()
        ]
    )


def named(vector) -> str:
    options = vector["options"]
    how = "/ T" if options["loss_remove_token_mean"] else options["loss_agg_mode"]
    return f"{vector['case']}, {how}, std {options['norm_adv_by_std_in_grpo']}, {vector['function'][8:20]}"


@pytest.mark.parametrize("vector", REFERENCE["loss_vectors"], ids=named)
def test_reference_advantages(vector):
    """compute_grpo_outcome_advantage, with teachers in the group."""
    assert_close(advantages_of(vector), vector["outputs"]["advantage_row"], 1e-6)


LOGITS = {}  # of each case, which its first vector has; of two cases this vector is not among those that are public
for each in REFERENCE["loss_vectors"]:
    if isinstance(each["inputs"]["logits"], list):
        LOGITS[each["case"]] = each["inputs"]["logits"]
WITH_LOGITS = [each for each in REFERENCE["loss_vectors"] if each["case"] in LOGITS]


@pytest.mark.parametrize("vector", WITH_LOGITS, ids=named)
def test_reference_loss(vector):
    """Loss, parts and gradient of mix_core_alg.py; both of its functions have the same."""
    inputs, options, outputs = vector["inputs"], vector["options"], vector["outputs"]
    assert options["off_policy_reshape"] == "p_div_p_0.1" and options["clip"] == 0.2
    logits = torch.tensor(LOGITS[vector["case"]], requires_grad=True)
    logprobs = logits.log_softmax(2).gather(2, torch.tensor(inputs["token_ids"])[:, :, None])[
        :, :, 0
    ]
    old_logprobs = torch.tensor(inputs["old_log_prob"])
    assert (logprobs - old_logprobs).exp().max() < options["clip_ratio_c"], (
        "the bound that ampo.py lacks would act"
    )
    advantages = advantages_of(vector)[:, None].expand(logprobs.shape)
    mask = torch.tensor(inputs["mask"])
    is_teacher = torch.tensor(inputs["teacher_mask"])[:, 0]
    loss_type = {"token-mean": "dapo", "seq-mean-token-mean": "grpo"}[options["loss_agg_mode"]]
    scale = 1.0
    if options["loss_remove_token_mean"]:  # the sum over tokens / padded width
        loss_type, scale = "dr_grpo", len(mask)
    weights = token_weights(
        mask.sum(1),
        loss_type,
        num_rows=len(mask),
        num_tokens=mask.sum(),
        max_completion_length=mask.size(1),
    )
    loss = ampo_loss(
        logprobs, old_logprobs, advantages, scale * weights[:, None] * mask, is_teacher
    )
    assert_close(loss, outputs["pg_loss"], 1e-6)
    loss.backward()
    assert_close(logits.grad.flatten(1).norm(dim=1), outputs["grad_logits_row_l2"], 1e-6)


@pytest.mark.parametrize("vector", REFERENCE["comprehension_vectors"], ids=str)
def test_reference_comprehension(vector):
    """ProbRewardManager.compute_scoreB, which rounds to bfloat16; the two means that rank solutions."""
    logprobs = torch.tensor(vector["log_probs"])[torch.tensor(vector["answer_mask"]) == 1]
    for mean, name in (
        ("arithmetic", "mean_exp_log_softmax"),
        ("geometric", "exp_mean_log_softmax"),
    ):
        (found,) = comprehension([logprobs], mean)
        assert found.bfloat16().item() == pytest.approx(vector["scores"][name], rel=2**-8)
    if len(logprobs):
        assert math.log(found) == pytest.approx(vector["scores"]["mean_log_softmax"], rel=2**-7)


def test_reference_number_of_replaced_rollouts():
    """The authors' README for 8 rollouts and 4 teachers, and v1 with 2 of them."""
    correct = torch.tensor([0, 1, 2, 3, 4, 8])
    assert num_replaced(correct, 4, "v2").tolist() == [4, 3, 2, 1, 0, 0]
    assert num_replaced(correct, 4, "v1").tolist() == [2, 0, 0, 0, 0, 0]
    assert num_replaced(
        torch.zeros(3, dtype=torch.long), torch.tensor([0, 1, 9]), "v1"
    ).tolist() == [0, 1, 2]
    assert num_replaced(
        torch.zeros(3, dtype=torch.long), torch.tensor([0, 1, 9]), "v2", 5
    ).tolist() == [0, 1, 2]


@pytest.mark.parametrize("probability, slope", [(1e-4, 1e-3), (0.1, 0.25), (1.0, 0.1 / 1.21)])
def test_reference_gradient_of_a_teacher_token(probability, slope):
    """In closed form A 0.1 p / (p + 0.1)^2: largest at p = 0.1, 0 for tokens that the policy never writes."""
    logprobs = torch.tensor([[math.log(probability)]], requires_grad=True)
    ampo_loss(
        logprobs,
        logprobs.detach() - 3,
        torch.tensor([[1.0]]),
        torch.ones(1, 1),
        torch.tensor([True]),
    ).backward()
    assert logprobs.grad.item() == pytest.approx(-slope, rel=5e-3)


# --- Properties -------------------------------------------------------------------------------------------------------


def random_rows():
    """log-probabilities, old ones, advantages, mask (6,5), and which rows are a teacher's."""
    generator = torch.Generator().manual_seed(4)
    logprobs, old = (-3 * torch.rand(2, 6, 5, generator=generator)).unbind()
    advantages = torch.randn(6, 1, generator=generator).expand(6, 5)
    mask = (torch.arange(5) < torch.tensor([[5], [2], [1], [4], [5], [3]])).float()
    return logprobs, old, advantages, mask, torch.tensor([False, False, True, False, False, True])


def test_a_teacher_s_token_ignores_what_it_was_before_and_the_penalty():
    logprobs, old, advantages, mask, _ = random_rows()
    everybody = torch.ones(6, dtype=torch.bool)
    words = (advantages, mask, everybody)
    plain = ampo_loss(logprobs, old, *words)
    assert ampo_loss(logprobs, old - 1, *words, beta=0.3, ref_logprobs=old, epsilon=0.01) == plain


def test_a_teacher_s_token_that_becomes_much_likelier_keeps_the_gradient_finite():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    ones = torch.ones(2)
    ampo_loss(logprobs, torch.tensor([-1.0, -120.0]), ones, ones, torch.tensor([False, True])).backward()
    p = math.exp(-2)
    assert_close(logprobs.grad, [-1.0, -0.1 * p / (p + 0.1) ** 2])


@pytest.mark.parametrize(
    "text, reasoning, answer",
    [
        ("3+4=7 yes\n<answer>3+4</answer>", "3+4=7 yes\n<answer>", "3+4"),
        ("<answer>1</answer> no, <answer>2</answer>.", "<answer>1</answer> no, <answer>", "2"),
        ("So it is\n#### 72\n", "So it is\n", "#### 72"),
        ("<answer></answer>", "", "<answer></answer>"),
        ("72", "", "72"),
    ],
)
def test_split_of_a_solution(text, reasoning, answer):
    assert split_solution(text) == (reasoning, answer)


# --- Choice of solutions ----------------------------------------------------------------------------------------------

BASE = Args(
    temperature=0.9,
    num_generations=G,
    num_prompts_per_step=6,
    max_completion_length=T,
    max_grad_norm=math.inf,
)


@pytest.fixture(scope="module")
def model():
    model = tiny_model(0)
    ampo.add_methods(model)
    return model


class Letters:
    """A tokenizer of single characters."""

    eos_token_id = 2

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [6 + ord(letter) % 58 for letter in text]


class Task:
    """The first reward is 1, the second the length."""

    def __init__(self):
        self.reward_functions = {
            "right": lambda problem, text: 1.0,
            "length": lambda problem, text: len(text),
        }


POOL = ["a\n11", "b\n11", "a\n2", "long\n22", "much too long for this test", "  "]
RIGHT = 0.7 + 0.2 + 0.1  # 1 - 1e-16, which is 1 in single precision
PROBLEMS = [{"demonstration": POOL}, {"demonstration": "c\n3"}, {}, {"demonstration": POOL[:2]}]


def replaced(model, args: Args, right: tuple = (0, 0, 0, 1)):
    """Rows, rollouts and scores of four questions with so many right rollouts."""
    rollouts = [
        Completion(PROMPTS[i], [7, 8], [-1.0, -1.0], True, "x", (RIGHT * (g < count), 0.0))
        for i, count in enumerate(right)
        for g in range(G)
    ]
    rows, scores = ampo.replace_failures(
        model, Letters(), Task(), PROBLEMS, rollouts, range(4), args
    )
    return rows, rollouts, scores


def plain_scores(model, prompt, mean: str) -> dict[str, float]:
    """Comprehension of the solutions that fit, by plain forward passes."""
    found = {}
    for text in POOL[:4]:
        reasoning, answer = (Letters().encode(part, False) for part in split_solution(text))
        logprobs = plain_logprobs(
            model, Completion(prompt + reasoning, answer, [], True), BASE.temperature
        )
        chosen = logprobs.gather(1, torch.tensor(answer)[:, None])
        found[text] = (chosen.exp().mean() if mean == "arithmetic" else chosen.mean().exp()).item()
    return found


@pytest.mark.parametrize("mean", ["arithmetic", "geometric"])
@pytest.mark.parametrize("size", [1, 3, 64])
def test_the_best_solutions_take_the_place_of_wrong_rollouts(model, mean, size):
    args = replace(BASE, comprehension=mean, micro_batch_size=size)
    rows, rollouts, scores = replaced(model, args)
    expected = plain_scores(model, PROMPTS[0], mean)
    best = sorted(expected, key=expected.get, reverse=True)[:2]
    assert [row.text for row in reversed(rows[:G]) if row.text != "x"] == best
    assert_close(torch.tensor(scores[:2]), [expected[text] for text in best], 1e-5)
    taught = [i for i, (row, rollout) in enumerate(zip(rows, rollouts)) if row is not rollout]
    assert taught == [G - 2, G - 1, 2 * G - 1], (
        "one question has one solution, one has none, one has a right rollout"
    )
    for i in taught:
        assert rows[i].prompt == rollouts[i].prompt
        assert rows[i].ids == [*Letters().encode(rows[i].text, False), 2]
        assert rows[i].rewards == (1.0, len(rows[i].text))


def test_v2_replaces_until_half_is_right_and_only_wrong_ones(model):
    rows, rollouts, _ = replaced(model, replace(BASE, rule="v2"), right=(1, G // 2, 0, 0))
    taught = [
        sum(row is not rollout for row, rollout in zip(rows[i : i + G], rollouts[i : i + G]))
        for i in range(0, 4 * G, G)
    ]
    assert taught == [G // 2 - 1, 0, 0, min(2, G // 2)]
    assert all(row is rollout for row, rollout in zip(rows, rollouts) if rollout.rewards[0] > 0)


def test_controls(model):
    """grpo has no solutions, one_teacher the first, random each of them at times."""
    rows, rollouts, _ = replaced(model, replace(BASE, method="grpo"))
    assert all(row is rollout for row, rollout in zip(rows, rollouts))
    rows, _, _ = replaced(model, replace(BASE, method="one_teacher"))
    assert [row.text for row in rows[:G] if row.text != "x"] == POOL[:1]
    found = set()
    for seed in range(20):
        args = replace(BASE, method="random")
        rollouts = [Completion(PROMPTS[0], [7], [-1.0], True, "x", (0.0,))] * G
        rows, _ = ampo.replace_failures(
            model, Letters(), Task(), PROBLEMS[:1], rollouts, [seed], args
        )
        found |= {row.text for row in rows} - {"x"}
    assert found == set(POOL[:4])


def test_an_answer_that_the_tokenizer_drops_is_not_understood(model):
    tokenizer = Letters()
    tokenizer.encode = lambda text, add_special_tokens: Letters().encode(text.replace("~", ""), False)
    pool = [Completion(PROMPTS[0], [7], [-1.0], True, text) for text in ("a\n~", "a\n11", "b\n~~")]
    logprobs = ampo.answer_logprobs(model, tokenizer, pool, BASE)
    assert list(map(len, logprobs)) == [0, 2, 0]
    scores = ampo.comprehension(logprobs)
    assert scores[1] > scores[0] == scores[2] == 0


def test_teachers_of_countdown_are_right_and_of_different_length():
    task = countdown.Countdown(num_numbers=2, max_number=25)
    for i in range(50):
        problem = task.sample(random.Random(i))
        texts = problem.demonstrations
        assert texts[0] == problem.demonstration and texts == problem.demonstrations
        assert sorted(text.count("\n") for text in texts) == [0, 1, 2, 3]
        assert all(
            countdown.correctness(problem, text) == countdown.format(problem, text) == 1
            for text in texts
        )
    one = countdown.Problem((1, 1), 1, "1*1")
    assert len(set(one.demonstrations)) == 4, "few expressions are wrong"


# --- The update -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def batch(model):
    """Of six questions the rows, of which a third are teachers', with advantages."""
    generator = torch.Generator().manual_seed(8)
    rows = some_batch(model)
    is_teacher = torch.zeros(len(rows), dtype=torch.bool)
    for row in range(G - 1, 4 * G, G):
        for place in (row, row - 1):
            length = int(torch.randint(2, T, (), generator=generator))
            ids = torch.randint(6, 64, (length,), generator=generator).tolist()
            rows[place] = Completion(rows[place].prompt, ids, [math.nan] * length, True)
            is_teacher[place] = True
    advantages = group_advantages(torch.rand(len(rows), generator=generator), G, "none")
    return rows, advantages, is_teacher


def updated_gradient(model, batch, args: Args):
    """Gradient that `update` gives to the optimizer, and its metrics."""
    recorder = Recorder(model)
    metrics = ampo.update(model, None, recorder, *batch, args)
    return recorder.gradient, metrics


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "paper"])
def test_update_has_the_gradient_of_the_loss_of_the_whole_batch(model, batch, loss_type):
    """Written out from plain forward passes."""
    rows, advantages, is_teacher = batch
    num_prompts = len(rows) // G
    lengths = torch.tensor([len(row.ids) for row in rows])
    expected, log_likelihood = 0.0, 0.0
    for row, completion in enumerate(rows):
        logprobs = plain_logprobs(model, completion, BASE.temperature).gather(
            1, torch.tensor(completion.ids)[:, None]
        )[:, 0]
        ratio = (
            logprobs.exp() / (logprobs.exp() + 0.1)
            if is_teacher[row]
            else (logprobs - logprobs.detach()).exp()
        )
        group = slice(row - row % G, row - row % G + G)
        divisor = {
            "grpo": len(rows) * lengths[row],
            "dr_grpo": len(rows) * T,
            "dapo": lengths.sum(),
            "paper": num_prompts
            * (
                is_teacher[group].sum() * lengths[row]
                if is_teacher[row]
                else lengths[group][~is_teacher[group]].sum()
            ),
        }[loss_type]
        expected = expected - (ratio * advantages[row]).sum() / divisor
        log_likelihood += logprobs.sum().item() * is_teacher[row].item()
    gradient = flat(torch.autograd.grad(expected, list(model.parameters())))
    for size in (1, 5, 64):
        args = replace(
            BASE, loss_type=loss_type, micro_batch_size=size, num_prompts_per_step=num_prompts
        )
        found, metrics = updated_gradient(model, batch, args)
        assert relative(found, gradient) < 1e-5, size
        assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-5)
    assert metrics["num_teacher_tokens"] == lengths[is_teacher].sum()
    assert metrics["teacher_nll"] == pytest.approx(
        -log_likelihood / lengths[is_teacher].sum().item(), rel=1e-4
    )
    assert metrics["sampling/logprob_difference/max"] < 1e-4, "solutions were not sampled"
