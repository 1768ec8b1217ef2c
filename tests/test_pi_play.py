"""pi-Play: the numbers of the libraries it is made from, identities, and every step from questions to the update."""

import json
import math
import random
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from algorithms import pi_play
from algorithms.pi_play import (
    DIVERGENCES,
    Args,
    Batch,
    Progress,
    batch_metrics,
    compute_advantages,
    draw_problems,
    encode,
    examine,
    examiner_rewards,
    examiner_rollout,
    generalized_jsd,
    hop_advantages,
    kl_estimate,
    load_model,
    load_task,
    load_tokenizer,
    pack,
    play,
    policy_loss,
    reverse_kl,
    rollout,
    row_means,
    score_episodes,
    special_token_mask,
    start_gate,
    token_logprobs,
    update,
    update_teacher,
)
from envs.episodes import Episode
from envs.search_qa import Problem, SearchQA, render
from envs.search_text import exact_match, parse_turn

REFERENCE = Path(__file__).parent / "reference"
BLOCKS, SUPPORTS = (json.loads((REFERENCE / f"{name}.json").read_text()) for name in ("pi_play", "opd_topk"))
CASES = {case["name"]: case for case in BLOCKS["cases"]}
LSM = {case["name"].split(" (")[0]: case for case in SUPPORTS["cases"]}
LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo"]


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_close(actual, expected, tolerance: float = 1e-9) -> None:
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual.detach(), expected, rtol=tolerance, atol=tolerance)


STUDENT, TEACHER, LABELS = (tensor(BLOCKS["inputs_A"][x]) for x in (*BLOCKS["inputs_A"],))  # (3,4,9) twice, (3,4)
MASKS = {"A": LABELS != -100, "all_ignored": LABELS > 100, "none": LABELS == LABELS}


def leaf(values: torch.Tensor) -> torch.Tensor:
    return values.clone().requires_grad_()


def some_logits(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a student and of a teacher."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(2 * torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))


# --- Reference: the output of the libraries' code --------------------------------------------------------------------

# Not expressed of pi_play.json: a tail bucket beside a support, add_tail (the supports here are the whole vocabulary or
# renormalised); SDPO's divergence of sampled tokens and its clipped ratio on it (the divergence here is exact, without
# ratio). The cases on the student's support have no flag, but are the same function with arguments exchanged. The
# format table of the examiner is taken by test_search_qa.py. Of opd_topk.json: supports without renormalisation, with
# the sampled token, with a tail; the clipped log-ratio where it is in reach; advantages of sampled tokens, which are
# another method; the entropy mask, which is inert in the code it comes from.


def reduce(values: torch.Tensor, mask: torch.Tensor, case: dict) -> torch.Tensor:
    """TRL's reductions of (B,T) values; its `mean` counts every entry of the vocabulary."""
    total, settings = values.masked_fill(~mask, 0).sum(), case.get("settings", {"labels": "A", "reduction": "items"})
    count = len(values) if settings["labels"] == "none" else mask.sum().clamp(min=1)
    sizes = {"sum": 1, "mean": count * STUDENT.size(-1), "batchmean": count, "items": 20}
    return total / sizes[settings["reduction"]]


JSD_CASES = [case for case in BLOCKS["cases"] if case["name"].startswith(("GKD", "OPSD"))]


def test_reference_files_are_whole():
    assert len(JSD_CASES) == 27 and sum("grad_wrt_student_logits" in case for case in JSD_CASES) == 11
    assert {case.get("settings", {}).get("beta", 1.0) for case in JSD_CASES} == {0.0, 0.1, 0.5, 0.9, 1.0}
    assert len(BLOCKS["cases"]) == 45 and len(SUPPORTS["cases"]) == 21


@pytest.mark.parametrize("case", JSD_CASES, ids=lambda case: case["name"])
def test_reference_generalized_jsd(case):
    """GKD's beta is our weight; a temperature divides both logits."""
    settings = case.get("settings", {"beta": 1.0, "temperature": 1.0, "labels": "A"})
    student, mask = leaf(STUDENT), MASKS[settings["labels"]]
    logits = [x / settings["temperature"] for x in (student, TEACHER)]
    values = generalized_jsd(*logits, settings["beta"], settings.get("top_k"))
    loss = reduce(values, mask, case)
    assert_close(loss, case["value"])
    loss.backward()
    if "grad_wrt_student_logits" in case:
        assert_close(student.grad, case["grad_wrt_student_logits"])
    if settings["beta"] == 1.0:
        ours = reverse_kl(*(x.detach() for x in logits), mask.double())
        assert_close(ours, row_means(values, mask))
        counts = mask.sum(1)
        assert_close((ours * counts).sum(), values.masked_fill(~mask, 0).sum())


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_reference_divergence_of_the_vocabulary(alpha):
    case = CASES[f"per-token full-vocabulary divergence alpha={alpha}"]
    assert_close(generalized_jsd(STUDENT, TEACHER, alpha), case["per_token"])
    flat = generalized_jsd(STUDENT.flatten(0, 1), TEACHER.flatten(0, 1), alpha)
    assert_close(flat, tensor(case["per_token"]).flatten())


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_reference_divergence_on_the_student_s_support(alpha):
    """Arguments exchanged: the support is that of the second one."""
    case = CASES[f"per-token student-top-4 divergence alpha={alpha} add_tail=False"]
    assert_close(generalized_jsd(TEACHER, STUDENT, 1 - alpha, case["K"]), case["per_token"])
    assert (generalized_jsd(STUDENT, TEACHER, alpha, case["K"]) - tensor(case["per_token"])).abs().max() > 0.01


@pytest.mark.parametrize(
    "name, weight, kept",
    [
        ("SDPO full alpha=0 (forward KL)", 0.0, 3),
        ("SDPO full alpha=1, third rollout excluded by self_distillation_mask", 1.0, 2),
    ],
)
def test_reference_means(name, weight, kept):
    values, mask = generalized_jsd(STUDENT, TEACHER, weight)[:kept], MASKS["A"][:kept]
    expected = CASES[name]["loss"]
    assert_close((values * mask).sum() / mask.sum(), expected["token-mean"])
    assert_close(row_means(values, mask).mean(), expected["seq-mean-token-mean"], 1e-7)


SUPPORT_LOGITS = [tensor(SUPPORTS["inputs"][f"{who}_logits"]) for who in ("student", "teacher")]  # (2,5,12) each
SUPPORT_MASK = tensor(SUPPORTS["inputs"]["response_mask"]).bool()  # (2,5)


@pytest.mark.parametrize("name", ["LSM_teacher_topK4_renorm", "LSM_teacher_topK1_renorm"])
def test_reference_teacher_support(name):
    """Values, and gradients of the mean over tokens: exactly zero outside the support and where masked."""
    case, student = LSM[name], leaf(SUPPORT_LOGITS[0])
    size = case["settings"]["K"]
    values = generalized_jsd(student, SUPPORT_LOGITS[1], top_k=size)
    assert_close(values, case["per_token_head_L1"])
    loss = values[SUPPORT_MASK].mean()
    assert_close(loss, case["loss_token_mean"])
    loss.backward()
    assert_close(student.grad, case["grad_wrt_student_logits"])
    support = torch.zeros_like(student).scatter(-1, torch.tensor(case["support_token_ids"]), 1.0).bool()
    assert (student.grad[~support] == 0).all() and (student.grad[~SUPPORT_MASK] == 0).all()
    inside = student.grad[support & SUPPORT_MASK[..., None]]
    assert (inside == 0).all() if size == 1 else (inside != 0).all()
    assert_close(reverse_kl(*SUPPORT_LOGITS, SUPPORT_MASK, size), row_means(values, SUPPORT_MASK))


def test_reference_support_of_everything_and_means():
    values = generalized_jsd(*SUPPORT_LOGITS, top_k=12)
    assert values[SUPPORT_MASK].mean().item() == pytest.approx(2.40866449231, abs=1e-7)  # the card's number
    assert torch.equal(values, generalized_jsd(*SUPPORT_LOGITS))
    clipped = LSM["LSM_teacher_topK4_renorm_clip_log_ratio_at_5"]  # at 5 the clip is out of reach
    four = generalized_jsd(*SUPPORT_LOGITS, top_k=4)
    assert_close(four, clipped["per_token_head_L1"])
    assert_close(four, LSM["legacy compute_topk_kl_divergence from full-vocab log-probs"]["per_token"], 1e-7)
    means = LSM["aggregation modes applied to LSM K=4 per-token values"]["result"]
    assert_close(reverse_kl(*SUPPORT_LOGITS, SUPPORT_MASK, 4).mean(), means["seq-mean-token-mean"])


def test_reference_special_token_mask():
    """The first of each, also where it is masked already."""
    case = LSM["special-token mask"]
    ids, mask = torch.tensor(case["responses"]), torch.tensor(case["response_mask"]).bool()
    assert special_token_mask(ids, mask, case["masked_ids"]).int().tolist() == case["kl_mask"]
    assert torch.equal(special_token_mask(ids, mask, []), mask)


def test_reference_moving_average():
    case = next(case for name, case in CASES.items() if name.startswith("EMA"))
    student, teacher = (torch.nn.Linear(2, 2, dtype=torch.float64) for _ in range(2))

    def fill(module, values):
        with torch.no_grad():
            for parameter, value in zip(module.parameters(), values, strict=True):
                parameter.copy_(tensor(value))

    fill(student, case["student_init"])
    fill(teacher, case["teacher_init"])
    for expected in case["teacher_after_each"]:
        assert update_teacher(teacher.requires_grad_(False), student, case["tau"]) is None
        for parameter, value in zip(teacher.parameters(), expected, strict=True):
            assert_close(parameter, value, 1e-12)
            assert not parameter.requires_grad
        with torch.no_grad():
            for parameter in student.parameters():
                parameter.add_(0.1)
    update_teacher(teacher, student, 1.0)
    assert all(torch.equal(x, y) for x, y in zip(teacher.parameters(), student.parameters()))
    with pytest.raises(ValueError):
        update_teacher(torch.nn.Linear(2, 2, bias=False), student, 0.5)


EXAMINER_REWARDS = {
    2: [0, 1, 0],
    3: [0, 1, 1 / 2, 0],
    5: [0, 1, 0.75, 0.5, 0.25, 0],
    8: [0, *(k / 7 for k in range(7, 0, -1)), 0],
}


@pytest.mark.parametrize("n", EXAMINER_REWARDS)
def test_reference_examiner_rewards(n):
    """Eq. 4 by hand: nothing for what nobody or everybody can answer, most for what one can."""
    ours = examiner_rewards(torch.arange(n + 1.0), n)
    assert_close(ours, EXAMINER_REWARDS[n], 1e-6)
    assert ours[0] == 0 == ours[n] and ours[1] == 1
    assert (examiner_rewards(torch.tensor([0.0, 1.0]), 1) == 0).all(), "one answer is none or all"


HOP_CASE = next(case for name, case in CASES.items() if name.startswith("hop-grouped"))


def test_reference_hop_advantages_of_dr_zero():
    """Deviation of the sample, epsilon behind the root, a lone question keeps its reward."""
    rewards = torch.tensor(HOP_CASE["rewards"])
    hops = torch.tensor([int(label[-1]) for label in HOP_CASE["hop_label"]])
    ours = hop_advantages(rewards, hops, ddof=1, outside=True, lone="raw")
    assert ours.dtype == rewards.dtype
    rows = ours[:, None] * torch.tensor(HOP_CASE["response_mask"])
    assert_close(rows, HOP_CASE["advantage(bs,T)"], 1e-6)


def test_reference_hop_advantages_of_the_paper():
    """Eq. 6 by hand: population variance inside the root; the first is the worked example of the page."""
    rewards, hops = tensor(HOP_CASE["rewards"]), torch.tensor([1, 1, 1, 2, 2, 2, 3, 3, 3, 4])
    expected = []
    for group in rewards[:9].view(3, 3):
        expected += ((group - group.mean()) / (group.var(unbiased=False) + 1e-6).sqrt()).tolist()
    ours = hop_advantages(rewards, hops)
    assert_close(ours, [*expected, 0.0])
    assert_close(ours[:3], [1.3728, -0.3922, -0.9806], 1e-4)
    assert (ours[6:] == 0).all(), "equal rewards and a lone one say nothing"
    assert_close(hop_advantages(tensor([0.0, 1.0]), torch.tensor([0, 0]), epsilon=0.75), [-0.5, 0.5])


ASSEMBLED = CASES["pi-Play student loss, Eq. 7-10 assembled"]


def assembled(rewards: torch.Tensor, loss_type: str, **options) -> tuple[torch.Tensor, torch.Tensor, list]:
    """Logits, loss and its three terms from the functions that the script runs."""
    given = {name.split("(")[0]: value for name, value in ASSEMBLED["inputs"].items()}
    names = ("student_logits", "teacher_logits", "ref_logits" if "ref_logits" in given else "reference_logits")
    student, teacher, reference = (tensor(given[name]) for name in names)
    student, ids, mask = leaf(student), torch.tensor(given["sampled_ids"]), tensor(given["mask"]).bool()
    logprobs, ref = (x.log_softmax(-1).gather(-1, ids[..., None])[..., 0] for x in (student, reference))
    advantages = hop_advantages(rewards, torch.zeros(len(ids)).long(), given["delta"], **options)
    settings = {"loss_type": loss_type, "epsilon": given["clip_eps"], "beta": given["beta"], "ref_logprobs": ref}
    loss, metrics = policy_loss(logprobs, tensor(given["old_logp"]), advantages, mask, **settings)
    distance = reverse_kl(student, teacher, mask).mean()
    plain = policy_loss(logprobs, tensor(given["old_logp"]), advantages, mask, **settings | {"beta": 0.0})[0]
    assert_close(generalized_jsd(student, teacher), ASSEMBLED["per_token_reverse_kl"])
    penalty = kl_estimate(logprobs, ref)
    penalty = row_means(penalty, mask).mean() if loss_type == "grpo" else penalty[mask].mean()
    return student, loss + given["lambda"] * distance, [plain, penalty, distance, mask]


CONVENTIONS = {
    "paper_eq9_var_population_plus_delta_inside_sqrt": {},
    "verl_ddof1_eps_outside": {"ddof": 1, "outside": True, "lone": "raw"},
}


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_reference_student_loss(convention, loss_type):
    """Policy loss, KL penalty and divergence together, and the gradient of all."""
    rewards, options = tensor(ASSEMBLED["inputs"]["rewards"]), CONVENTIONS[convention]
    assert_close(hop_advantages(rewards, torch.zeros(4).long(), **options), ASSEMBLED["advantages"][convention])
    student, loss, (plain, penalty, distance, mask) = assembled(rewards, loss_type, **options)
    case = ASSEMBLED["results"][f"{convention}|{loss_type}"]
    assert_close(plain, case["pg_loss"])
    assert_close(penalty, case["kl_to_ref_k3"])
    assert_close(distance, case["distill_loss(reverse KL, per-sequence mean then mean)"])
    assert_close(loss, case["total"])
    loss.backward()
    assert_close(student.grad, case["grad_wrt_student_logits"])
    assert (student.grad[~mask] == 0).all()


def test_reference_equal_rewards_leave_the_distillation():
    """Advantages are exactly 0, the gradient is that of the other two terms."""
    case = next(case for name, case in CASES.items() if name.startswith("zero-variance"))
    rewards = tensor(case["rewards"])
    assert hop_advantages(rewards, torch.zeros(4).long()).tolist() == case["advantages"]
    student, loss, (plain, penalty, distance, _) = assembled(rewards, "grpo")
    (whole,) = torch.autograd.grad(loss, student, retain_graph=True)
    (alone,) = torch.autograd.grad(plain, student, retain_graph=True)
    beta, weight = (ASSEMBLED["inputs"][name] for name in ("beta", "lambda"))
    (others,) = torch.autograd.grad(beta * penalty + weight * distance, student)
    assert (alone == 0).all() and whole.abs().max() > 1e-4
    assert_close(whole, others, 1e-12)


# --- Properties ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("top_k", [None, 1, 3, 7, 99])
def test_divergence_is_a_divergence(weight, top_k):
    """Never negative, 0 of equals, the same for shifted logits; its gradient against finite differences."""
    student, teacher = some_logits(2, 3, 7)
    values = generalized_jsd(student, teacher, weight, top_k)
    assert values.shape == (2, 3) and (values >= -1e-12).all()
    assert (values.abs() < 1e-15).all() if top_k == 1 else (values > 1e-3).all()
    if top_k in (None, 7, 99):
        assert torch.equal(values, generalized_jsd(student, teacher, weight)), "K = V is the vocabulary"
    assert_close(generalized_jsd(teacher, teacher, weight, top_k), torch.zeros(2, 3), 1e-12)
    assert_close(generalized_jsd(student + 5, teacher - 3, weight, top_k), values, 1e-10)
    assert torch.autograd.gradcheck(lambda x: generalized_jsd(x, teacher, weight, top_k), leaf(student))
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    assert torch.autograd.gradcheck(lambda x: reverse_kl(x, teacher, mask, top_k), leaf(student))


def test_gradient_of_the_page():
    """p_v (log p_v / q_v - KL)."""
    student, teacher = some_logits(6, 9)
    student = leaf(student)
    values = generalized_jsd(student, teacher)
    values.sum().backward()
    p, ratio = student.softmax(-1), student.log_softmax(-1) - teacher.log_softmax(-1)
    assert_close(student.grad, p * (ratio - values[:, None]))


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_the_teacher_gets_no_gradient(weight):
    student, teacher = map(leaf, some_logits(2, 3, 7))
    (
        generalized_jsd(student, teacher, weight, 4).sum() + reverse_kl(student, teacher, torch.ones(2, 3)).sum()
    ).backward()
    assert teacher.grad is None and student.grad.abs().max() > 1e-3


def test_direction():
    """KL(student || teacher) is large where the student goes and the teacher does not."""
    narrow, wide = tensor([[9.0, 0.0]]).log_softmax(-1), tensor([[1.0, 1.0]])
    p = math.exp(narrow[0, 0])
    towards_wide = p * math.log(2 * p) + (1 - p) * math.log(2 * (1 - p))
    towards_narrow = 0.5 * math.log(0.5 / p) + 0.5 * math.log(0.5 / (1 - p))
    assert towards_narrow > 5 * towards_wide
    assert_close(reverse_kl(narrow[None], wide[None], torch.ones(1, 1)), [towards_wide])
    assert_close(reverse_kl(wide[None], narrow[None], torch.ones(1, 1)), [towards_narrow])
    assert_close(generalized_jsd(wide, narrow, DIVERGENCES["reverse_kl"]), [towards_narrow])
    assert_close(generalized_jsd(wide, narrow, DIVERGENCES["forward_kl"]), [towards_wide])
    assert_close(generalized_jsd(wide, narrow, DIVERGENCES["jsd"]), generalized_jsd(narrow, wide, 0.5))
    assert_close(generalized_jsd(wide, narrow, 0.0), generalized_jsd(narrow, wide, 1.0))


def test_masked_tokens():
    """No influence on the value, exactly no gradient; a row without tokens is 0; not even NaN gets through."""
    student, teacher = some_logits(3, 4, 6)
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]])
    expected = torch.tensor(
        [generalized_jsd(student, teacher)[0, [0, 1, 3]].mean(), 0, generalized_jsd(student, teacher)[2, 1]]
    )
    for hole in (0.0, 1e9, math.inf, math.nan):
        logits = [leaf(x.masked_fill(~mask[..., None].bool(), hole)) for x in (student, teacher)]
        values = reverse_kl(*logits, mask)
        assert_close(values, expected.double(), 1e-12)
        assert values[1] == 0
        values.sum().backward()
        assert (logits[0].grad[mask == 0] == 0).all() and (logits[0].grad[mask == 1] != 0).all()
    for dtype in (torch.bool, torch.float32, torch.int64):
        assert_close(reverse_kl(student, teacher, mask.to(dtype)), expected.double(), 1e-12)


@pytest.mark.parametrize("top_k", [None, 3])
def test_as_an_advantage_the_divergence_would_teach_nothing(top_k):
    """Its value does not depend on the token that was drawn: the expected gradient is zero, that of itself is not."""
    student, teacher = some_logits(9)
    student = leaf(student)
    value = generalized_jsd(student[None], teacher[None], top_k=top_k)[0]
    logprobs = student.log_softmax(-1)
    expected = (logprobs.detach().exp() * value.detach() * logprobs).sum()  # every token, as often as it is drawn
    (nothing,) = torch.autograd.grad(expected, student, retain_graph=True)
    (something,) = torch.autograd.grad(value, student)
    assert nothing.abs().max() < 1e-14 and something.abs().max() > 0.1


@pytest.mark.parametrize("value", [0.9, 1 / 3, -2.0, 1e-4, 12345.678])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(value, dtype):
    rewards, hops = torch.full((12,), value, dtype=dtype), torch.arange(12) % 3
    for options in ({}, {"ddof": 1, "outside": True, "lone": "raw"}):
        assert (hop_advantages(rewards, hops, **options) == 0).all()


def test_order_shift_scale_and_other_hops():
    generator = torch.Generator().manual_seed(0)
    rewards, hops = torch.rand(20, dtype=torch.float64, generator=generator), torch.arange(20) % 3
    whole, order = hop_advantages(rewards, hops), torch.randperm(20, generator=generator)
    assert_close(hop_advantages(rewards[order], hops[order]), whole[order])
    assert_close(hop_advantages(3 * rewards + 1, 7 - hops), whole, 1e-4)
    for hop in range(3):
        assert_close(hop_advantages(rewards[hops == hop], hops[hops == hop]), whole[hops == hop])
    assert (hop_advantages(rewards, torch.zeros(20)) - whole).abs().max() > 0.1


# --- Three models and what they play ---------------------------------------------------------------------------------

ARGS = Args(
    device="cpu",
    max_completion_length=32,
    num_generations=4,
    temperature=1.1,
    hops=(1, 2, 3),
    max_turns=4,
    num_answers=3,
)
CPU = torch.device("cpu")
ROWS = 16  # of the batch


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ARGS)


@pytest.fixture(scope="module")
def task():
    return load_task(ARGS)


@pytest.fixture(scope="module")
def models(tokenizer):
    """Student, examiner and a teacher that differs from the student, as after some steps."""
    student = load_model(ARGS, tokenizer, CPU)
    teacher, generator = deepcopy(student).requires_grad_(False), torch.Generator().manual_seed(0)
    for parameter in teacher.parameters():
        parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    return {"student": student, "examiner": deepcopy(student), "teacher": teacher}


@pytest.fixture(scope="module")
def batch(models, tokenizer, task) -> Batch:
    return rollout(models, tokenizer, task, range(3, 7), ARGS)


@pytest.fixture
def plays(monkeypatch):
    """(arguments, episodes) of every call of play()."""
    kept, real = [], pi_play.play

    def spy(*given):
        kept.append((given, real(*given)))
        return kept[-1][1]

    monkeypatch.setattr(pi_play, "play", spy)
    return kept


def forced(model, prompt: list[int], ids: list[int], temperature: float) -> torch.Tensor:
    """Logits of ids behind a prompt by one plain call of the model. -> (T,V)"""
    return model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float() / temperature


def test_examiner_s_questions_are_as_sampled(models, tokenizer, task):
    """Nothing is filled in: question, answer and queries stand in what was sampled, results in what was read."""
    seeds = [str(i) for i in range(24)]
    episodes, formats, problems = examine(models["examiner"], tokenizer, task, seeds, ARGS)
    assert len(episodes) == len(formats) == len(problems) == 24
    assert 8 < sum(problem is not None for problem in problems) < 24
    for seed, e, score, problem in zip(seeds, episodes, formats, problems):
        request = task.request(random.Random(f"document {seed}"))
        assert e.problem == request and e.prompt == encode(tokenizer, task.prompt(request))
        assert f"Document: {request.document}\nSearches: {request.hops}\n" in tokenizer.decode(e.prompt)
        assert (score, problem) == task.examined(request, e.texts) and (score > 0) == (problem is not None)
        written = [[x for x, turn in zip(e.ids, e.turns) if turn == number] for number in range(len(e.starts))]
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in written]
        assert texts == e.texts[::2]
        if problem:
            assert problem.question in texts[-1] and problem.answers[0] in texts[-1].split("<answer>")[-1]
            assert problem.hops == request.hops and len(problem.steps) == len(texts) - 1
            for (query, result), text, read in zip(problem.steps, texts, e.texts[1::2]):
                assert f"<search>{query}</search>" in text and read == f"<result>{result}</result>"
                assert result == task.search([query])[0]


def test_questions_depend_on_their_numbers_alone(models, tokenizer, task):
    """The same again, in other parts, in another order; well-formed and never of the evaluation; from the examiner."""
    numbers, examiner = range(5, 15), models["examiner"]
    whole = draw_problems(examiner, tokenizer, task, numbers, ARGS)
    assert len(whole) == 10 and len(set(whole)) > 5 and all(isinstance(problem, Problem) for problem in whole)
    assert not any(problem.held_out for problem in whole)
    even, odd = (draw_problems(examiner, tokenizer, task, part, ARGS) for part in (numbers[::2], numbers[1::2]))
    assert [problem for pair in zip(even, odd) for problem in pair] == whole
    assert [problem.steps for problem in even] == [problem.steps for problem in whole[::2]]
    assert draw_problems(examiner, tokenizer, task, numbers, replace(ARGS, seed=2)) != whole


def test_what_is_malformed_or_held_out_is_drawn_again(monkeypatch, tokenizer, task, capsys):
    """Three numbers: good at once, malformed twice, of the evaluation once."""
    good = [Problem(f"Who is number {i}?", ("x",)) for i in range(40)]
    good, held_out = [p for p in good if not p.held_out], task.evaluation_problems(1)[0]
    assert held_out.held_out
    given = {0: [good[0]], 1: [None, None, good[1]], 2: [held_out, good[2]]}
    asked = []

    def stub(examiner, tokenizer, task, seeds, args):
        asked.append(seeds)
        problems = [given[int(number)][int(attempt)] for number, attempt in (seed.split()[-2:] for seed in seeds)]
        return [], (), tuple(problems)

    monkeypatch.setattr(pi_play, "examine", stub)
    assert draw_problems(None, tokenizer, task, range(3), ARGS) == good[:3]
    assert [[int(seed.split()[-2]) for seed in seeds] for seeds in asked] == [[0, 1, 2], [1, 2], [1]]
    assert len({seed for seeds in asked for seed in seeds}) == 6
    given[1] = [None] * 99
    with pytest.raises(SystemExit) as stopped:
        draw_problems(None, tokenizer, task, range(3), ARGS)
    errors = capsys.readouterr().err
    assert stopped.value.code == 1 and errors.count("\n") == 1 and "no well-formed questions" in errors


@pytest.fixture(scope="module")
def questions(models, tokenizer, task) -> list[Problem]:
    return draw_problems(models["examiner"], tokenizer, task, range(3, 9), ARGS)


@pytest.mark.parametrize("kind", ["qcp", "partial", "answer", "none"])
def test_rollout(models, tokenizer, task, plays, questions, kind):
    """Rows of a student's batch from its episodes; the private prompts belong to the same questions."""
    args = replace(ARGS, privileged_context=kind)
    found = rollout(models, tokenizer, task, range(3, 9), args)
    (model, *_, problems, group, _, seeds), episodes = plays[-1]
    assert model is models["student"] and problems == questions and group == 4
    assert all(given[0] is models["examiner"] for given, _ in plays[:-1])
    assert len(episodes) == len(found.prompts) == 24 and len(set(seeds)) == 6
    for i, e in enumerate(episodes):
        assert e.problem == questions[i // 4] and found.prompts[i] == e.prompt == encode(
            tokenizer, task.prompt(e.problem)
        )
        assert found.completion_ids[i, : len(e.ids)].tolist() == e.ids
        assert found.mask[i, : len(e.ids)].tolist() == [turn >= 0 for turn in e.turns]
        assert not found.mask[i, len(e.ids) :].any()
        assert_close(found.logprobs[i, : len(e.ids)], e.logprobs, 1e-6)
        assert found.rewards[i, 0] == exact_match(questions[i // 4], e.texts[-1])
        queries = [parse_turn(text)[1] for text in e.texts[::2] if parse_turn(text)[0] == "search"]
        assert found.info["searches"][i] == len(queries)
        assert found.info["repeated_searches"][i] == len(queries) - len(set(queries))
        assert found.info["turns"][i] == len(e.starts) and found.info["ended"][i] == e.ended
    assert found.info["pool"].tolist() == [3 + i // 4 for i in range(24)]
    contexts = [task.with_privilege(problem, kind, seed) for problem, seed in zip(questions, seeds)]
    if kind == "none":
        assert found.private == []
    else:
        assert found.private == [encode(tokenizer, task.prompt(contexts[i // 4])) for i in range(24)]
    if kind in ("qcp", "answer"):
        shown = [render(p.steps) if kind == "qcp" else f"The answer is {p.answers[0]}." for p in questions]
        assert [context.privileged for context in contexts] == shown and any(shown)
        for i, text in enumerate(shown):
            expected = f"How the question was made:\n{text}\n" * (text != "") + f"Question: {questions[i].question}"
            assert expected in tokenizer.decode(found.private[4 * i])
    assert found.mask.any(1).all()


def test_half_of_the_searches_are_partial():
    """Each with chance one half, one draw for a question; their order stays."""
    task, steps = SearchQA(), tuple((f"query {i}", f"result {i}") for i in range(4))
    problem, seen = Problem("Who?", ("x",), steps=steps), Counter()
    for i in range(2000):
        shown = task.with_privilege(problem, "partial", f"1 {i}")
        assert shown == task.with_privilege(problem, "partial", f"1 {i}")
        kept = tuple(step for step in steps if step[0] in shown.privileged)
        assert shown.privileged == render(kept) and shown.question == "Who?"
        seen[kept] += 1
    assert len(seen) == 16 and all(80 < count < 175 for count in seen.values())  # 125 expected
    assert task.with_privilege(problem, "qcp", "").privileged == render(steps)


def test_special_tokens_are_masked(models, tokenizer, task, batch):
    """The first end token and the first of each token of <think>: out of the loss, still in the sequence."""
    found = rollout(models, tokenizer, task, range(3, 7), replace(ARGS, mask_special_tokens=True))
    assert torch.equal(found.completion_ids, batch.completion_ids) and not (found.mask & ~batch.mask).any()
    special = [*tokenizer("<think>", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    for row, before, after in zip(batch.completion_ids.tolist(), batch.mask, found.mask):
        first = {row.index(token) for token in special if token in row}
        assert set((before & ~after).nonzero()[:, 0].tolist()) == {i for i in first if before[i]} and first
    assert found.mask.any()


def test_examiner_rollout(models, tokenizer, task, plays):
    """Rewards by hand: half the format score, and how many of the student's answers are right."""
    numbers = range(20, 44)
    found = examiner_rollout(models, tokenizer, task, numbers, ARGS)
    (examiner, *_, requests, _, _, seeds), episodes = plays[0]
    (student, *_, asked, n, _, names), answers = plays[1]
    assert examiner is models["examiner"] and student is models["student"] and n == 3 and len(plays) == 2
    assert len(set(seeds)) == 24 == len(requests) and len({*seeds, *names}) == 24 + len(asked)
    assert 0 < len(asked) < 24 and len(answers) == 3 * len(asked)
    asked, counts = (
        iter(asked),
        iter(torch.tensor([exact_match(e.problem, e.texts[-1]) for e in answers]).view(-1, 3).sum(1)),
    )
    for i, e in enumerate(episodes):
        score, problem = task.examined(e.problem, e.texts)
        k = 0
        if problem:
            assert next(asked) == problem
            k = int(next(counts))
        expected = 0.5 * score + (0 if k in (0, 3) else (3 - k) / 2)
        assert found.rewards[i].tolist() == pytest.approx([expected]) and found.info["format"][i] == score
        assert found.info["well_formed"][i] == (problem is not None) and found.info["pass_rate"][
            i
        ].item() == pytest.approx(k / 3)
        assert found.prompts[i] == e.prompt and found.completion_ids[i, : len(e.ids)].tolist() == e.ids
        assert found.mask[i, : len(e.ids)].tolist() == [turn >= 0 for turn in e.turns]
    assert next(asked, None) is None and found.private == []
    assert found.info["pool"].tolist() == [request.hops for request in requests]
    parts = [examiner_rollout(models, tokenizer, task, numbers[i::2], ARGS) for i in range(2)]
    for i, part in enumerate(parts):
        assert torch.equal(part.rewards, found.rewards[i::2]) and part.prompts == found.prompts[i::2]


@pytest.mark.parametrize("k, expected", [*enumerate(EXAMINER_REWARDS[3])])
def test_rewards_of_every_number_of_right_answers(monkeypatch, models, tokenizer, task, k, expected):
    monkeypatch.setattr(
        pi_play, "score_episodes", lambda task, es: torch.tensor([[float(i % 3 < k)] for i in range(len(es))])
    )
    monkeypatch.setattr(pi_play, "play", lambda *given: [Episode(p, [0]) for p in given[3] for _ in range(given[4])])
    problem, episode = (
        Problem("Who?", ("x",)),
        Episode(task.request(random.Random(0)), [1], [2], [0], [-1.0], [0], ["t"]),
    )
    scores, problems = (1.0, 0.75, 0.0), (problem, problem, None)
    monkeypatch.setattr(pi_play, "examine", lambda *given: ([episode] * 3, scores, problems))
    found = examiner_rollout(models, tokenizer, task, range(3), ARGS)
    assert_close(found.rewards[:, 0], [0.5 + expected, 0.375 + expected, 0.0], 1e-6)
    monkeypatch.setattr(pi_play, "examine", lambda *given: ([episode] * 2, (0.0, 0.0), (None, None)))
    assert (examiner_rollout(models, tokenizer, task, range(2), ARGS).rewards == 0).all()


def test_advantages_are_taken_among_equal_hops_and_among_answers(batch):
    """Of the examiner among questions of as many hops, of the student among answers to a question."""
    rewards = torch.tensor([[1.0, 5.0], [0.0, 9.0], [0.5, 1.0], [0.25, 0.0], [0.25, 0.0], [0.9, 0.0]])
    given = replace(batch, rewards=rewards, info={"pool": torch.tensor([1, 2, 1, 3, 3, 4])})
    ours = compute_advantages(given, ARGS, Progress())
    assert_close(ours[[0, 2]], [1.0, -1.0], 1e-4)
    assert (ours[[1, 3, 4, 5]] == 0).all()
    given = replace(given, info={"pool": torch.tensor([2, 2, 2, 5, 5, 5])})
    first, second = rewards[:3, 0], rewards[3:, 0]
    expected = torch.cat([(x - x.mean()) / (x.var(unbiased=False) + 1e-6).sqrt() for x in (first, second)])
    assert_close(compute_advantages(given, ARGS, Progress()), expected, 1e-5)
    of_batch = compute_advantages(batch, ARGS, Progress()).view(4, 4)
    right = batch.rewards[:, 0].view(4, 4)
    mixed = right.std(1) > 0
    assert mixed.any() and (of_batch[~mixed] == 0).all() and (of_batch[mixed].sign() == (2 * right[mixed] - 1)).all()


def test_batch_metrics_by_hand():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 0, 1, 1], [1, 1, 1, 1]]).bool()
    info = {"ended": [True, True, True, False], "entropy": [1.0, 2.0, 3.0, 5.0], "pool": [7, 7, 8, 8]}
    info |= {"turns": [1, 2, 2, 4], "searches": [0, 1, 1, 3], "repeated_searches": [0, 0, 0, 2]}
    info = {name: torch.tensor(values) for name, values in info.items()}
    rewards = torch.tensor([[1.0, 9.0], [0.0, 9.0], [0.5, 9.0], [0.5, 9.0]])
    progress = Progress(tokens=100)
    metrics = batch_metrics(Batch([[0]] * 4, mask.long(), mask, mask.float(), rewards, info), progress)
    expected = {"reward": 0.5, "reward_std": 0.5**0.5 / 2, "frac_reward_zero_std": 0.5, "num_tokens": 111}
    expected |= {"completions/mean_length": 2.75, "completions/max_length": 4.0, "completions/clipped_ratio": 0.25}
    expected |= {"entropy": 1.0, "pi_play/turns": 2.25, "pi_play/searches": 1.25, "pi_play/repeated_searches": 0.5}
    assert metrics == pytest.approx(expected, abs=1e-6) and progress["tokens"] == 111


@pytest.mark.parametrize("kind", ["qcp", "partial", "answer"])
def test_start_gate(models, tokenizer, task, plays, kind):
    """Right answers to evaluation questions, without and with what the teacher sees."""
    args = replace(ARGS, eval_problems=8, privileged_context=kind)
    gate = start_gate(models["student"], tokenizer, task, args)
    (_, without), (given, seeing) = plays
    problems = task.evaluation_problems(8)
    assert [e.problem for e in without] == [e.problem for e in seeing] == [p for p in problems for _ in range(3)]
    assert all(e.problem.privileged == "" for e in without)
    shown = [e.problem.privileged for e in seeing[::3]]
    if kind == "partial":
        assert any(shown) and all(line in task.qcp(p) for p, x in zip(problems, shown) for line in x.split("\n"))
        assert shown != [task.qcp(p) for p in problems]
    else:
        assert shown == [task.qcp(p) if kind == "qcp" else f"The answer is {p.answers[0]}." for p in problems]
    assert all(tokenizer.decode(e.prompt).find(text) >= 0 for e, text in zip(seeing[::3], shown))
    means = [sum(exact_match(e.problem, e.texts[-1]) for e in es) / 24 for es in (without, seeing)]
    assert gate == pytest.approx({"eval/pi_play/gate_without": means[0], "eval/pi_play/gate_with": means[1]})
    assert given[0] is models["student"] and given[4] == 3


def test_the_tiny_model_reads_the_path_and_the_gate_is_open(models, tokenizer, capsys):
    args = replace(ARGS, temperature=1.0, hops=Args.hops, eval_problems=32)
    gate = start_gate(models["student"], tokenizer, load_task(args), args)
    assert gate["eval/pi_play/gate_with"] - gate["eval/pi_play/gate_without"] > 0.25
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("means, kind", [((0.5, 0.75), "qcp"), ((0.5, 0.65), "partial"), ((0.75, 0.25), "answer")])
def test_sentence_of_the_start_gate(monkeypatch, tokenizer, task, capsys, means, kind):
    values = iter(means)
    monkeypatch.setattr(pi_play, "play", lambda *given: given[3])
    monkeypatch.setattr(pi_play, "score_episodes", lambda task, episodes: torch.full((9, 3), next(values)))
    start_gate(None, tokenizer, task, replace(ARGS, privileged_context=kind))
    sentence = f"start gate: right {means[0]:.3f}, with {kind} {means[1]:.3f}: the teacher has little to teach\n"
    assert capsys.readouterr().out == (sentence if means[1] - means[0] < 0.2 else "")


def test_start_gate_without_a_teacher_and_without_a_world(monkeypatch, models, tokenizer, task, plays, capsys):
    assert start_gate(models["student"], tokenizer, task, replace(ARGS, privileged_context="none")) == {}
    assert plays == []
    monkeypatch.setattr(task, "traced_problems", lambda count: [])  # as for questions from a file
    args = replace(ARGS, eval_problems=12, num_answers=2)
    gate = start_gate(models["student"], tokenizer, task, args)
    (_, written), (asked, _), (privileged, _) = plays
    problems = [problem for e in written if (problem := task.examined(e.problem, e.texts)[1])]
    assert asked[3] == problems == privileged[3] and set(gate) == {
        "eval/pi_play/gate_without",
        "eval/pi_play/gate_with",
    }
    assert [p.privileged for p in privileged[3]] == [render(p.steps) for p in problems]
    monkeypatch.setattr(pi_play, "examine", lambda *given: ([], (), (None,) * 12))
    assert start_gate(models["student"], tokenizer, task, args) == {}, "nothing well-formed: nothing to measure"


def test_nucleus(models, tokenizer, task):
    """Sampled within the most probable tokens that make up top_p; log-probabilities over the whole vocabulary."""
    args, outside = replace(ARGS, top_p=0.6, temperature=1.5), 0
    problems = [task.train_problem(i, 1) for i in range(3)]
    for given, inside in ((args, True), (replace(args, top_p=1.0), False)):
        for e in play(models["student"], tokenizer, task, problems, 4, given, ["a", "b", "c"]):
            logprobs = forced(models["student"], e.prompt, e.ids, 1.5).log_softmax(-1).detach()
            chosen = logprobs.gather(1, torch.tensor(e.ids)[:, None])
            more = (logprobs.exp() * (logprobs > chosen + 1e-4)).sum(1)  # of what is likelier
            written = torch.tensor(e.turns) >= 0
            outside += int((more[written] > 0.6 + 1e-3).sum())
            assert_close(torch.tensor(e.logprobs)[written], chosen[written, 0], 1e-3)
        assert (outside == 0) == inside


# --- Log-probabilities and divergences of packed rows ----------------------------------------------------------------


def naive(models, batch: Batch, args: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and divergences (B,T), each episode behind each of its prompts by a plain call of a model."""
    logprobs, divergences = [], []
    for prompt, private, ids in zip(batch.prompts, batch.private or batch.prompts, batch.completion_ids):
        student = forced(models["student"], prompt, ids.tolist(), args.temperature).log_softmax(-1)
        teacher = forced(models["teacher"], private, ids.tolist(), args.temperature).log_softmax(-1)
        logprobs.append(student.gather(1, ids[:, None])[:, 0])
        if args.distill_top_k:
            support = teacher.argsort(descending=True)[:, : args.distill_top_k]
            student, teacher = (x.gather(1, support).log_softmax(-1) for x in (student, teacher))
        mean = ((student.exp() + teacher.exp()) / 2).log()
        values = {
            "reverse_kl": student.exp() * (student - teacher),
            "forward_kl": teacher.exp() * (teacher - student),
            "jsd": (student.exp() * (student - mean) + teacher.exp() * (teacher - mean)) / 2,
        }
        divergences.append(values[args.divergence].sum(-1))
    return torch.stack(logprobs), torch.stack(divergences)


def packed_values(models, batch: Batch, args: Args, teacher=True) -> list[torch.Tensor]:
    """The same (B,T) from the script's micro-batches; NaN where there is none."""
    found = [torch.full(batch.mask.shape, math.nan) for _ in range(1 + teacher)]
    for packed in pack(batch, range(len(batch.prompts)), args):
        values = token_logprobs(models["student"], packed, args, models["teacher"] if teacher else None)
        for whole, part in zip(found, values, strict=True):
            whole[packed.rows] = part.detach()
    return found


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("top_k", [None, 5])
def test_token_values_equal_plain_passes(monkeypatch, models, batch, divergence, top_k):
    """Episodes of several turns behind prompts of different lengths: packed, in several chunks and packed rows."""
    assert len(set(map(len, batch.prompts))) > 1 < len(set(map(len, batch.private))) and (batch.info["turns"] > 1).any()
    args = replace(ARGS, divergence=divergence, distill_top_k=top_k)
    with torch.no_grad():
        expected = naive(models, batch, args)
        plain = packed_values(models, batch, args, teacher=False)
        monkeypatch.setattr(pi_play, "LOGITS_PER_CHUNK", 37 * models["student"].config.vocab_size)
        for longest, micro in [(4096, 32), (400, 4), (1, 1)]:
            given = replace(args, max_packed_length=longest, per_device_train_batch_size=micro)
            found = packed_values(models, batch, given)
            for ours, theirs in zip(found, expected):
                assert_close(ours[batch.mask], theirs[batch.mask], 2e-4)
            assert_close(found[0], plain[0], 1e-5)
    assert expected[1][batch.mask].max() > 0.05


def test_equal_questions_with_different_contexts(models, batch):
    """Two neighbours that the examiner wrote on different paths: one prompt of the student, two of the teacher."""
    rows = [*range(8)]
    prompts = [batch.prompts[0]] * 8
    private = [batch.private[0]] * 3 + [batch.private[-1]] * 5  # not where a strip of four ends
    assert private[0] != private[-1]
    part = Batch(
        prompts, batch.completion_ids[rows], batch.mask[rows], batch.logprobs[rows], batch.rewards[rows], {}, private
    )
    with torch.no_grad():
        expected, found = naive(models, part, ARGS), packed_values(models, part, ARGS)
    for ours, theirs in zip(found, expected):
        assert_close(ours[part.mask], theirs[part.mask], 2e-4)


def test_no_context_and_the_same_weights_have_no_divergence(models, batch, tokenizer):
    """c empty and psi = theta: D is 0 to the bit, its gradient rounding noise, the parameters stay where they are."""
    student = deepcopy(models["student"])
    before, empty = deepcopy(student.state_dict()), replace(batch, private=batch.prompts)
    metrics = update(student, SGD(student), empty, torch.zeros(ROWS), ARGS, None, models["student"], 1.0)
    assert metrics["pi_play/divergence"] == 0 == metrics["loss"] and metrics["grad_norm"] < 1e-6  # measured: 2e-7
    assert all((before[name] - value).abs().max() < 1e-7 for name, value in student.state_dict().items())
    seeing = update(student, SGD(student), batch, torch.zeros(ROWS), ARGS, None, models["student"], 1.0)
    assert seeing["pi_play/divergence"] > 0.01 and seeing["grad_norm"] > 0.01, "the gap is due to the context alone"


# --- The update ------------------------------------------------------------------------------------------------------


def SGD(model):
    return torch.optim.SGD(model.parameters(), 1.0)


def gradients(monkeypatch, models, batch, advantages, args, weight, reference=None) -> tuple[torch.Tensor, dict]:
    """What update() would step along, and its metrics."""
    model = models["student"]
    with monkeypatch.context() as patch:
        patch.setattr(pi_play, "apply_gradients", lambda *given: 0.0)
        metrics = update(model, SGD(model), batch, advantages, args, reference, models["teacher"], weight)
    found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return torch.cat([x.flatten() for x in found]), metrics


@pytest.fixture(scope="module")
def advantages(batch) -> torch.Tensor:
    """Random ones, a third of them zero."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, generator=generator) * (torch.arange(ROWS) % 3 > 0)


@pytest.fixture(scope="module")
def expected_gradients(models, batch, advantages) -> dict:
    """Gradient of each term by itself, from plain calls: the policy loss by loss type, the divergence by kind."""
    found, student = {}, models["student"]
    logprobs, _ = naive(models, batch, ARGS)
    for loss_type in LOSS_TYPES:
        options = {"loss_type": loss_type, "max_completion_length": ARGS.max_completion_length}
        policy_loss(logprobs, batch.logprobs, advantages, batch.mask, **options)[0].backward(retain_graph=True)
        found[loss_type] = torch.cat([p.grad.flatten().clone() for p in student.parameters()])
        student.zero_grad(set_to_none=True)
    for kind in DIVERGENCES:
        values = naive(models, batch, replace(ARGS, divergence=kind))[1]
        means = [row[kept].mean() for row, kept in zip(values, batch.mask)]
        torch.stack(means).mean().backward()
        found[kind] = torch.cat([p.grad.flatten().clone() for p in student.parameters()])
        found[f"{kind} value"] = torch.stack(means).mean().item()
        student.zero_grad(set_to_none=True)
    return found


def assert_same_gradient(found, expected) -> None:
    assert expected.norm() > 1e-3 and (found - expected).norm() / expected.norm() < 1e-4


@pytest.mark.parametrize("weight", [0.0, 0.7])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_update_gradient_equals_the_naive_one(
    monkeypatch, models, batch, advantages, expected_gradients, loss_type, weight
):
    """J = policy gradient - weight D, whatever the micro-batches."""
    expected = expected_gradients[loss_type] + weight * expected_gradients["reverse_kl"]
    for micro in (4, 2, 32) if loss_type in ("grpo", "dapo") else (4,):
        args = replace(ARGS, loss_type=loss_type, per_device_train_batch_size=micro)
        found, metrics = gradients(monkeypatch, models, batch, advantages, args, weight)
        assert_same_gradient(found, expected)
        assert metrics["frac_tokens_trained"] == 1 or weight == 0
        assert ("pi_play/divergence" in metrics) == (weight > 0)
        if weight > 0:
            assert metrics["pi_play/divergence"] == pytest.approx(expected_gradients["reverse_kl value"], rel=1e-4)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_update_follows_the_divergence_that_is_asked_for(monkeypatch, models, batch, expected_gradients, divergence):
    """All advantages 0: plain RL has exactly no gradient, pi-Play that of its divergence."""
    args, nothing = replace(ARGS, divergence=divergence), torch.zeros(ROWS)
    found, metrics = gradients(monkeypatch, models, batch, nothing, args, 0.25)
    assert_same_gradient(found, 0.25 * expected_gradients[divergence])
    assert metrics["loss"] == pytest.approx(0.25 * expected_gradients[f"{divergence} value"], rel=1e-4)
    found, metrics = gradients(monkeypatch, models, batch, nothing, args, 0.0)
    assert (found == 0).all() and metrics["loss"] == 0 == metrics["frac_tokens_trained"]


def test_all_rewards_zero(models, batch):
    """The whole chain: rewards, advantages, update. With weight 0 no parameter moves."""
    given = replace(batch, rewards=torch.zeros_like(batch.rewards))
    advantages = compute_advantages(given, ARGS, Progress())
    for weight in (0.0, 0.1):
        student, teacher = deepcopy(models["student"]), deepcopy(models["teacher"])
        metrics = update(student, SGD(student), given, advantages, ARGS, None, teacher, weight)
        same = [torch.equal(x, y) for x, y in zip(student.parameters(), models["student"].parameters())]
        assert (
            (metrics["grad_norm"] == 0 and all(same))
            if weight == 0
            else (metrics["grad_norm"] > 0.01 and not any(same))
        )
        assert all(torch.equal(x, y) for x, y in zip(teacher.parameters(), models["teacher"].parameters()))
        assert all(parameter.grad is None for parameter in teacher.parameters()), "the teacher is not trained"


def test_penalty_and_divergence_together(monkeypatch, models, batch, advantages, expected_gradients):
    """beta > 0: the KL to the initial model is a third term."""
    reference, args = models["examiner"], replace(ARGS, beta=0.3)
    shifted = deepcopy(models["teacher"]).requires_grad_(False)
    with torch.no_grad():
        ref = naive({"student": shifted, "teacher": shifted}, batch, ARGS)[0]
    logprobs = naive(models, batch, ARGS)[0]
    (0.3 * kl_estimate(logprobs, ref)[batch.mask].mean()).backward()
    penalty = torch.cat([p.grad.flatten().clone() for p in models["student"].parameters()])
    models["student"].zero_grad(set_to_none=True)
    expected = expected_gradients["dapo"] + penalty + 0.5 * expected_gradients["reverse_kl"]
    found, metrics = gradients(monkeypatch, models, batch, advantages, args, 0.5, shifted)
    assert_same_gradient(found, expected)
    assert metrics["kl"] == pytest.approx(kl_estimate(logprobs, ref)[batch.mask].mean().item(), rel=1e-3)
    _, metrics = gradients(monkeypatch, models, batch, torch.zeros(ROWS), args, 0.0, reference)
    assert metrics["kl"] < 1e-6 and metrics["frac_tokens_trained"] == 1


def test_what_was_read_gets_no_gradient(monkeypatch, models, batch, advantages):
    """Exactly zero at every token that was read, from either term; not zero at those that were sampled."""
    kept, real = [], pi_play.token_logprobs

    def spy(model, packed, args, teacher=None):
        values = real(model, packed, args, teacher)
        for x in values:
            x.retain_grad()
        kept.append((packed.rows, *values))
        return values

    monkeypatch.setattr(pi_play, "token_logprobs", spy)
    gradients(monkeypatch, models, batch, advantages, ARGS, 0.5)
    assert sorted(row for rows, *_ in kept for row in rows) == [*range(ROWS)]
    read = 0
    for rows, logprobs, divergence in kept:
        mask = batch.mask[rows]
        acting = mask & (advantages[rows] != 0)[:, None]
        assert (logprobs.grad[~acting] == 0).all() and (logprobs.grad[acting] != 0).all()
        assert (divergence.grad[~mask] == 0).all() and (divergence.grad[mask] > 0).all()
        read += int(((divergence > 0) & ~mask).sum())
    assert read > 100, "what was read is in the packed rows, or the policy would not see it"


def test_a_row_without_tokens_counts_as_zero(monkeypatch, models, batch, advantages):
    """A row whose tokens are all masked adds nothing, but is one of the B rows of the mean."""
    mask = batch.mask.clone()
    mask[5] = False
    found, metrics = gradients(monkeypatch, models, replace(batch, mask=mask), torch.zeros(ROWS), ARGS, 1.0)
    rest = [row for row in range(ROWS) if row != 5]
    part = replace(batch, prompts=[batch.prompts[i] for i in rest], private=[batch.private[i] for i in rest])
    names = ("completion_ids", "mask", "logprobs", "rewards")
    part = replace(part, **{name: getattr(batch, name)[rest] for name in names})
    alone, others = gradients(monkeypatch, models, part, torch.zeros(ROWS - 1), ARGS, 1.0)
    assert_same_gradient(found, alone * (ROWS - 1) / ROWS)
    assert metrics["pi_play/divergence"] == pytest.approx(others["pi_play/divergence"] * (ROWS - 1) / ROWS, rel=1e-5)


def test_a_step_moves_the_student_towards_its_teacher(models, batch):
    student = deepcopy(models["student"])
    optimizer = torch.optim.Adam(student.parameters(), 5e-4)
    values = [
        update(student, optimizer, batch, torch.zeros(ROWS), ARGS, None, models["teacher"], 1.0)["pi_play/divergence"]
        for _ in range(6)
    ]
    assert all(after < before for before, after in zip(values, values[1:])) and values[-1] < 0.8 * values[0]


def test_scores_are_those_of_the_last_turn(batch, task):
    answer = Episode(
        Problem("Who?", ("Fako Varik",)), [0], texts=["<answer>x</answer>", "read", "<answer>Fako Varik</answer>"]
    )
    other = replace(answer, texts=["<answer>Fako Varik</answer>", "read", "<answer>Fako</answer>"])
    assert_close(score_episodes(task, [answer, other]), [[1.0, 1.0, 1.0], [0.0, 2 / 3, 1.0]], 1e-6)
    assert list(task.reward_functions) == ["exact_match", "f1", "format"]
