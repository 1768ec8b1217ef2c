"""pi-Play: the numbers of the libraries it is made from, and its step against one written out."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_grpo
import torch
from test_grpo import Recorder, flat, relative, tensor

from algorithms import pi_play
from algorithms.pi_play import Args, hop_advantages, reverse_kl, token_divergence, update
from envs.search_qa import Problem, render
from envs.search_text import exact_match

REFERENCE = Path(__file__).parent / "reference"
BLOCKS, SUPPORTS = (json.loads((REFERENCE / f"{name}.json").read_text()) for name in ("pi_play", "opd_topk"))
CASES = {case["name"]: case for case in BLOCKS["cases"]}
LSM = {case["name"].split(" (")[0]: case for case in SUPPORTS["cases"]}
KINDS = {1.0: "reverse_kl", 0.0: "forward_kl"}  # GKD's beta, SDPO's alpha


def assert_close(actual, expected, tolerance: float = 1e-9) -> None:
    test_grpo.assert_close(actual, expected, tolerance)


STUDENT, TEACHER, LABELS = (tensor(BLOCKS["inputs_A"][x]) for x in BLOCKS["inputs_A"])  # (3,4,9) twice, (3,4)
MASKS = {"A": LABELS != -100, "all_ignored": LABELS > 100, "none": LABELS == LABELS}


def leaf(values: torch.Tensor) -> torch.Tensor:
    return values.clone().requires_grad_()


# Not expressed of pi_play.json: mixtures of both KLs, a tail bucket beside a support, divergences of sampled tokens
# with their ratio. The format table of the examiner is in test_search_qa.py. Of opd_topk.json: supports without
# renormalisation or with a tail, advantages of sampled tokens, masks of special tokens.


def row_means(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return values.masked_fill(~mask, 0).sum(1) / mask.sum(1).clamp(min=1)


def reduce(values: torch.Tensor, mask: torch.Tensor, settings: dict) -> torch.Tensor:
    """TRL's reductions of (B,T) values; its `mean` counts every entry of the vocabulary."""
    count = len(values) if settings["labels"] == "none" else mask.sum().clamp(min=1)
    sizes = {"sum": 1, "mean": count * STUDENT.size(-1), "batchmean": count, "items": 20}
    return values.masked_fill(~mask, 0).sum() / sizes[settings["reduction"]]


KL_CASES = [case for case in BLOCKS["cases"] if case["name"].startswith(("GKD", "OPSD"))]
KL_CASES = [case for case in KL_CASES if case.get("settings", {}).get("beta", 1.0) in KINDS]


def test_reference_files_are_whole():
    assert len(KL_CASES) == 13 and len(BLOCKS["cases"]) == 45 and len(SUPPORTS["cases"]) == 21
    assert sum("grad_wrt_student_logits" in case for case in KL_CASES) == 5


@pytest.mark.parametrize("case", KL_CASES, ids=lambda case: case["name"])
def test_reference_divergence_and_gradient(case):
    """A temperature divides both logits."""
    plain = {"beta": 1.0, "temperature": 1.0, "labels": "A", "reduction": "items"}
    settings = plain | case.get("settings", {})
    student, mask = leaf(STUDENT), MASKS[settings["labels"]]
    logits = [x / settings["temperature"] for x in (student, TEACHER)]
    values = token_divergence(*logits, KINDS[settings["beta"]], settings.get("top_k"))
    loss = reduce(values, mask, settings)
    assert_close(loss, case["value"])
    loss.backward()
    if "grad_wrt_student_logits" in case:
        assert_close(student.grad, case["grad_wrt_student_logits"])
    if settings["beta"] == 1.0:
        assert_close(reverse_kl(*logits, mask.double(), settings.get("top_k")), row_means(values, mask).detach())


def test_reference_divergence_of_the_vocabulary_and_of_a_support():
    """Sums of SDPO's code; on the student's support the arguments are exchanged."""
    case = CASES["per-token full-vocabulary divergence alpha=1.0"]
    assert_close(token_divergence(STUDENT, TEACHER), case["per_token"])
    case = CASES["per-token student-top-4 divergence alpha=1.0 add_tail=False"]
    assert_close(token_divergence(TEACHER, STUDENT, "forward_kl", case["K"]), case["per_token"])


def test_reference_means():
    names = ["SDPO full alpha=0 (forward KL)", "SDPO full alpha=1, third rollout excluded by self_distillation_mask"]
    for name, kind, kept in ((names[0], "forward_kl", 3), (names[1], "reverse_kl", 2)):
        values, mask = token_divergence(STUDENT, TEACHER, kind)[:kept], MASKS["A"][:kept]
        expected = CASES[name]["loss"]
        assert_close((values * mask).sum() / mask.sum(), expected["token-mean"])
        assert_close(row_means(values, mask).mean(), expected["seq-mean-token-mean"], 1e-7)


@pytest.mark.parametrize("size", [4, 1])
def test_reference_teacher_support(size):
    """Values and gradients of the mean over tokens; none outside the support and where masked."""
    student, teacher = (tensor(SUPPORTS["inputs"][f"{who}_logits"]) for who in ("student", "teacher"))  # (2,5,12)
    mask, case = tensor(SUPPORTS["inputs"]["response_mask"]).bool(), LSM[f"LSM_teacher_topK{size}_renorm"]
    student, teacher = leaf(student), leaf(teacher)
    values = token_divergence(student, teacher, top_k=size)
    assert_close(values, case["per_token_head_L1"])
    values[mask].mean().backward()
    assert_close(student.grad, case["grad_wrt_student_logits"])
    support = torch.zeros_like(student).scatter(-1, torch.tensor(case["support_token_ids"]), 1.0).bool()
    assert (student.grad[~support] == 0).all() and (student.grad[~mask] == 0).all() and teacher.grad is None
    if size == 4:
        means = LSM["aggregation modes applied to LSM K=4 per-token values"]["result"]
        assert_close(reverse_kl(student, teacher, mask, 4).mean(), means["seq-mean-token-mean"])
        full = token_divergence(student, teacher, top_k=12)
        assert full[mask].mean().item() == pytest.approx(2.40866449231, abs=1e-7)  # the card's number


def test_reference_moving_average():
    case = next(case for name, case in CASES.items() if name.startswith("EMA"))
    student, teacher = (torch.nn.Linear(2, 2, dtype=torch.float64).requires_grad_(False) for _ in range(2))
    for module, values in ((student, case["student_init"]), (teacher, case["teacher_init"])):
        for parameter, value in zip(module.parameters(), values, strict=True):
            parameter.copy_(tensor(value))
    for expected in case["teacher_after_each"]:
        pi_play.update_teacher(teacher, student, case["tau"])
        for parameter, value in zip(teacher.parameters(), expected, strict=True):
            assert_close(parameter, value, 1e-12)
        for parameter in student.parameters():
            parameter.add_(0.1)


@pytest.mark.parametrize("expected", [[0, 1, 0], [0, 1, 1 / 2, 0], [0, 1, 0.75, 0.5, 0.25, 0]])
def test_reference_examiner_rewards(expected):
    """Eq. 4 by hand: nothing for what nobody or everybody can answer, most for what one can."""
    n = len(expected) - 1
    assert_close(pi_play.examiner_rewards(torch.arange(n + 1.0), n), expected, 1e-6)


HOP_CASE = next(case for name, case in CASES.items() if name.startswith("hop-grouped"))


def test_reference_hop_advantages_of_dr_zero():
    """Deviation of the sample, epsilon behind the root, a lone question keeps its reward."""
    hops = torch.tensor([int(label[-1]) for label in HOP_CASE["hop_label"]])
    ours = hop_advantages(torch.tensor(HOP_CASE["rewards"]), hops, ddof=1, outside=True, lone="raw")
    assert_close(ours[:, None] * torch.tensor(HOP_CASE["response_mask"]), HOP_CASE["advantage(bs,T)"], 1e-6)


def test_reference_hop_advantages_of_the_paper():
    """Eq. 6 by hand: population variance inside the root; the first is the worked example of the page."""
    rewards, hops = tensor(HOP_CASE["rewards"]), torch.tensor([1, 1, 1, 2, 2, 2, 3, 3, 3, 4])
    ours = hop_advantages(rewards, hops)
    groups = rewards[:9].view(3, 3)
    scale = (groups.var(1, unbiased=False, keepdim=True) + 1e-6).sqrt()
    assert_close(ours[:9].view(3, 3), (groups - groups.mean(1, keepdim=True)) / scale)
    assert_close(ours[:3], [1.3728, -0.3922, -0.9806], 1e-4)
    assert (ours[6:] == 0).all(), "equal rewards and a lone one say nothing"
    assert_close(hop_advantages(tensor([0.0, 1.0]), torch.tensor([0, 0]), epsilon=0.75), [-0.5, 0.5])


ARGS = Args(num_generations=4, num_answers=3, max_completion_length=32, temperature=1.1, hops=(1, 2, 3), max_turns=4)
ARGS = replace(ARGS, max_grad_norm=1e9)
NUMBERS = range(3, 9)


@pytest.fixture(scope="module")
def tools():
    """Tokenizer and task."""
    return pi_play.load_model(ARGS)[1], pi_play.load_task(ARGS)[0]


@pytest.fixture(scope="module")
def models():
    """A policy, and a teacher that differs from it, as after some steps."""
    policy = pi_play.load_model(ARGS)[0]
    teacher, generator = pi_play.copy_model(policy, torch.float32), torch.Generator().manual_seed(0)
    for parameter in teacher.parameters():
        parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    return {"student": policy, "examiner": policy, "teacher": teacher}


@pytest.fixture(scope="module")
def policies(models):
    return {role: pi_play.Policy(model, model) for role, model in models.items()}


@pytest.fixture(scope="module")
def episodes(policies, tools):
    return pi_play.student_rollout(policies, *tools, NUMBERS, ARGS)


def plain_logits(model, episode, prompt) -> torch.Tensor:
    """Log-distributions of the written tokens by one plain call of the model. -> (T,V)"""
    ids = torch.tensor([prompt + episode.ids])
    logits = model(ids).logits[0, len(prompt) - 1 : -1] / ARGS.temperature
    return logits[torch.tensor(episode.turns) >= 0].log_softmax(1)


def written(episode) -> torch.Tensor:
    return torch.tensor([token for token, turn in zip(episode.ids, episode.turns) if turn >= 0])


@pytest.mark.parametrize("kind", ["qcp", "partial", "answer", "none"])
def test_the_teacher_sees_the_path_of_the_same_question(policies, tools, episodes, kind):
    tokenizer, task = tools
    found = pi_play.student_rollout(policies, *tools, NUMBERS, replace(ARGS, privileged_context=kind))
    assert [e.ids for e in found] == [e.ids for e in episodes]
    assert [e.pool for e in found] == [number for number in NUMBERS for _ in range(4)]
    for e in found:
        assert e.prompt == pi_play.encode(tokenizer, task, e.problem, ARGS)
        assert e.reward == exact_match(e.problem, e.texts[-1])
        shown = {"qcp": render(e.problem.steps), "answer": f"The answer is {e.problem.answers[0]}.", "none": ""}
        if kind in shown:
            text = f"How the question was made:\n{shown[kind]}\n" * (shown[kind] != "")
            assert f"{text}Question: {e.problem.question}" in tokenizer.decode(e.teacher_prompt)
    assert (found[0].teacher_prompt == found[0].prompt) == (kind == "none")


def test_a_question_that_never_succeeds_is_left_out(monkeypatch, tools):
    """Number 1 is malformed twice, number 2 always, number 3 belongs to the evaluation once, and the path of number 4
    is too long for the teacher once."""
    tokenizer, task = tools
    good, held_out = Problem("Who is it?", ("x",)), task.evaluation_problems(1)[0]
    assert held_out.held_out and not good.held_out
    bad, asked = {1: [None, None], 2: [None] * 99, 3: [held_out]}, []
    bad[4] = [replace(good, steps=(("rival of Joko", "Jodo " * 960),))]
    monkeypatch.setattr(pi_play, "random_seed", lambda seed, kind, number, draw: (number, draw))

    def stub(policy, tokenizer, task, seeds, args):
        asked.append(len(seeds))
        return [], [], [bad[n][draw] if draw < len(bad.get(n, [])) else good for n, draw in seeds]

    monkeypatch.setattr(pi_play, "examine", stub)
    found = pi_play.draw_questions(None, tokenizer, task, range(5), ARGS)
    assert {number: draws for number, (_, _, draws) in found.items()} == {0: 0, 1: 2, 3: 1, 4: 1}
    assert all(question is good for question, _, _ in found.values()) and asked == [5, 8, 4, 8, 16]
    with pytest.raises(SystemExit, match="no usable question in 31 draws for each number"):
        pi_play.draw_questions(None, tokenizer, task, range(2, 3), ARGS)


def test_examiner_rewards_by_hand(monkeypatch, policies, tools):
    """Half the format score, and how many of the student's answers are right."""
    played, answer = [], pi_play.answer
    monkeypatch.setattr(pi_play, "answer", lambda *words: played.append(answer(*words)) or played[-1])
    found = pi_play.examiner_rollout(policies, *tools, range(20, 44), ARGS)
    groups = iter([played[0][i : i + 3] for i in range(0, len(played[0]), 3)])
    worth = set()
    for e in found:
        score, question = tools[1].examined(e.problem, e.texts)
        k, rate = 0, None  # nobody was asked
        if question:
            group = next(groups)
            assert all(one.problem == question for one in group)
            k = sum(exact_match(question, one.texts[-1]) for one in group)
            rate = k / 3
        worth.add([0, 1, 0.5, 0][int(k)])
        assert e.reward == pytest.approx(0.5 * score + [0, 1, 0.5, 0][int(k)])
        assert e.pool == e.problem.hops and e.teacher_prompt == []
        assert e.info["pi_play/pass_rate"] == pytest.approx(rate)
    assert next(groups, None) is None and worth == {0, 1, 0.5}


def test_the_examiner_is_paid_by_rewards_of_0_or_1(policies, tools):
    task = copy.copy(tools[1])
    task.reward_functions = {"half": lambda problem, text: 0.5}
    with pytest.raises(SystemExit, match="--env: the first reward function must return 0 or 1, but gave 0.5"):
        pi_play.examiner_rollout(policies, tools[0], task, range(20, 30), ARGS)


def test_long_documents_are_drawn_again_and_long_questions_count_as_malformed(monkeypatch):
    """A problem is its length here; every second document is too long."""
    task = SimpleNamespace(request=lambda generator: generator.choice([900, 961]))
    task.examined = lambda request, texts: (0.5, texts[0])
    monkeypatch.setattr(pi_play, "encode", lambda tokenizer, task, problem, args: [0] * problem)
    lengths = [960, 961, None] * 4
    monkeypatch.setattr(pi_play, "play", lambda _, __, task, requests, *rest: [
        SimpleNamespace(problem=request, texts=[length]) for request, length in zip(requests, lengths, strict=True)
    ])
    episodes, formats, questions = pi_play.examine(None, None, task, range(12), ARGS)
    assert {episode.problem for episode in episodes} == {900}
    assert formats == [0.5] * 12 and questions == [960, None, None] * 4
    task.request = lambda generator: 961
    with pytest.raises(SystemExit, match="--max-prompt-length: 100 documents"):
        pi_play.examine(None, None, task, range(12), ARGS)


def test_without_a_usable_question_there_are_no_gates(monkeypatch, capsys):
    task = SimpleNamespace(traced_problems=lambda count: [])
    monkeypatch.setattr(pi_play, "examine", lambda *words: ([], [], [None] * 4))
    assert pi_play.teacher_gap(None, None, task, ARGS, 0, 1) == {}
    assert capsys.readouterr().out.endswith("well-formed and short enough: no gates\n")


def test_gates_ask_the_same_on_any_number_of_processes(monkeypatch):
    """A question keeps its seed when others are malformed or too long."""
    monkeypatch.setattr(pi_play, "encode", lambda tokenizer, task, problem, args: [0] * (9_999 if problem.endswith("4") else 5))
    monkeypatch.setattr(pi_play, "examine", lambda policy, tokenizer, task, seeds, args: ([], [], [f"of {seed % 7}" if seed % 3 else None for seed in seeds]))
    asked = []

    def answer(policy, tokenizer, task, problems, count, args, seeds):
        asked.extend(zip(problems, seeds))
        return [SimpleNamespace(reward=0.0)] * len(problems)

    monkeypatch.setattr(pi_play, "answer", answer)
    task = SimpleNamespace(traced_problems=lambda count: [], with_privilege=lambda problem, kind, seed: problem)
    found = []
    for world_size in (1, 2, 3):
        asked.clear()
        for rank in range(world_size):
            pi_play.teacher_gap(None, None, task, replace(ARGS, eval_problems=24), rank, world_size)
        found.append(sorted(asked))
        assert all(problem == f"of {seed % 7}" for problem, seed in asked) and len(asked) > 10
    assert found[0] == found[1] == found[2]


def test_a_teacher_that_does_not_see_the_question_is_refused(episodes):
    blind = [replace(episode, teacher_prompt=[1, 2, 3]) for episode in episodes]
    with pytest.raises(SystemExit, match="with_privilege: gives the teacher the same prompt for different questions"):
        pi_play.micro_batches(blind, [0], True, ARGS, torch.device("cpu"))
    assert pi_play.micro_batches(blind, [0], False, ARGS, torch.device("cpu"))


def test_the_teacher_of_the_tiny_model_knows_more(policies, tools, capsys):
    args = replace(ARGS, temperature=1.0, eval_problems=24, hops=Args.hops)
    tokenizer, task = tools[0], pi_play.load_task(args)[0]
    shares = pi_play.teacher_gap(policies["student"], tokenizer, task, args, 0, 1)
    assert shares["eval/pi_play/gate_with"] - shares["eval/pi_play/gate_without"] > 0.25
    assert capsys.readouterr().out == ""
    assert pi_play.answer(policies["student"], tokenizer, task, [], 2, args, []) == [], "of a process without a question"
    pi_play.teacher_gap(policies["student"], tokenizer, task, replace(args, privileged_context="none"), 0, 1)
    assert "the teacher has little to teach" in capsys.readouterr().out


def updated(models, episodes, advantages, weight, args, reference=None):
    recorder = Recorder(models["student"])
    metrics = update(models["student"], reference, models["teacher"], recorder, episodes, advantages, weight, args)
    return recorder.gradient, metrics


def written_out(models, episodes, advantages, weight, args) -> tuple[torch.Tensor, float]:
    """Gradient and divergence of the same loss, an episode at a time."""
    model, loss, distances = copy.deepcopy(models["student"]), 0.0, []
    tokens = sum(len(e.logprobs) for e in episodes)
    for e, advantage in zip(episodes, advantages):
        student = plain_logits(model, e, e.prompt)
        teacher = plain_logits(models["teacher"], e, e.teacher_prompt).detach()
        chosen = student.gather(1, written(e)[:, None])
        length = {"grpo": len(chosen) * len(episodes), "dr_grpo": 32 * len(episodes), "dapo": tokens}[args.loss_type]
        loss = loss - (advantage * (chosen - chosen.detach()).exp()).sum() / length
        if args.beta:  # to the teacher, which is another model here
            gap = plain_logits(models["teacher"], e, e.prompt).detach().gather(1, written(e)[:, None]) - chosen
            loss = loss + args.beta * (gap.exp() - gap - 1).sum() / length
        if args.distill_top_k:
            support = teacher.topk(args.distill_top_k)[1]
            student, teacher = (x.gather(1, support).log_softmax(1) for x in (student, teacher))
        p, q = (student, teacher) if args.divergence == "reverse_kl" else (teacher, student)
        distances.append((p.exp() * (p - q)).sum() / len(chosen))
    divergence = torch.stack(distances).mean()
    (loss + weight * divergence).backward()
    return flat(parameter.grad for parameter in model.parameters()), divergence.item()


@pytest.fixture(scope="module")
def advantages(episodes):
    """Random ones, a third of them zero."""
    values = torch.randn(len(episodes), generator=torch.Generator().manual_seed(0))
    return values * (torch.arange(len(episodes)) % 3 > 0)


WAYS = [(0.0, {"loss_type": "grpo"}), (0.7, {"micro_batch_size": 5})]
WAYS += [(0.7, {"loss_type": "dr_grpo", "divergence": "forward_kl"}), (0.7, {"loss_type": "grpo", "distill_top_k": 5})]
WAYS += [(0.7, {"beta": 0.5}), (0.0, {"beta": 0.5, "loss_type": "grpo"})]


@pytest.mark.parametrize("weight, options", WAYS)
def test_gradient_equals_that_of_the_loss_written_out(monkeypatch, models, episodes, advantages, weight, options):
    """With packed rows that are split differently behind the two prompts, and logits in chunks."""
    args = replace(ARGS, **options)
    expected, divergence = written_out(models, episodes, advantages, weight, args)
    monkeypatch.setattr(pi_play, "ATTENTION_LENGTH", 0)
    monkeypatch.setattr(pi_play, "LOGITS_AT_ONCE", 50 * 680)
    reference = models["teacher"] if args.beta else None
    gradient, metrics = updated(models, episodes, advantages, weight, args, reference)
    assert relative(gradient, expected) < 1e-4
    assert weight == 0 or metrics["pi_play/divergence"] == pytest.approx(divergence, rel=1e-4)


def test_with_lora_the_penalty_is_towards_the_model_without_its_adapters(models, episodes, advantages):
    args, model = replace(ARGS, lora_rank=4, beta=0.5), copy.deepcopy(models["student"])
    pi_play.add_adapters(model, args)
    for name, weight in model.named_parameters():
        if "lora_B" in name:  # as after some steps
            torch.nn.init.normal_(weight, std=0.1)
    found = []
    for reference in (models["student"], model):
        optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], 0.0)
        found.append(update(model, reference, None, optimizer, episodes, advantages, 0.0, args))
    assert found[0]["kl"] > 1e-3 and found[1] == pytest.approx(found[0], rel=1e-3)


def test_lambdas_one_after_another_on_the_command_line(monkeypatch):
    monkeypatch.setattr("sys.argv", ["pi_play.py", "--lambda-schedule", "1", "--lambda-schedule", "0.3"])
    assert pi_play.parse_args().lambda_schedule == (1.0, 0.3)
