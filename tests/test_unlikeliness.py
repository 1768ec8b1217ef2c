"""Unlikeliness reward and RepExp: reference numbers of the official codes, exact reductions, the script as people run it."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import language_runs
import pytest
import torch
import transformers
from language_runs import kill_and_resume, numbers, train, two_processes_equal_one
from processes import ROOT
from run_folders import assert_tags_of_pages, command, refusal, tags

from algorithms import grpo, unlikeliness
from algorithms.unlikeliness import (
    Args,
    add_bonus,
    group_advantages,
    leverage_bonus,
    pass_at_k,
    policy_loss,
    shaped_rewards,
    sparse_projection,
    unlikeliness_rewards,
    uplift,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CASES = {
    name: json.loads((ROOT / "tests" / "reference" / f"{name}.json").read_text())["cases"]
    for name in ("unlikeliness", "rep_exp")
}
SMALL = language_runs.SMALL | {"learning_rate": 1e-3}


def cases(file: str, group: str) -> list:
    return [pytest.param(case, id=case["name"]) for case in CASES[file][group]["items"]]


def by_group(case) -> list[torch.Tensor]:
    """Indices of the rows of each group."""
    groups = case["groups"]
    return [
        torch.tensor([row for row, group in enumerate(groups) if group == name])
        for name in dict.fromkeys(groups)
    ]


def double(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.quick
@pytest.mark.parametrize("case", cases("unlikeliness", "official_advantages"))
def test_reference_official_advantages(case):
    mask = double(case["mask"])
    means = (double(case["old_logprobs"]) * mask).sum(1) / mask.sum(1)
    rewards = double(case["rewards"])
    for rows in by_group(case):
        shaped = unlikeliness_rewards(rewards[rows], means[rows], len(rows), case["rank_penalty"])
        found = group_advantages(shaped, len(rows), std_epsilon=1e-6)
        torch.testing.assert_close(found, double(case["advantages"])[rows], atol=1e-7, rtol=0)


@pytest.mark.quick
@pytest.mark.parametrize("case", cases("unlikeliness", "policy_loss"))
def test_reference_policy_loss(case):
    logprobs = double(case["logprobs"]).requires_grad_()
    old = double(case["old_logprobs"])
    mask = double(case["mask"])
    settings = {"epsilon": case["clip_low"], "epsilon_high": case["clip_high"]}
    losses, clipped = policy_loss(logprobs, old, double(case["advantages"]), **settings)
    loss = (losses * mask).sum() / mask.sum()
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], abs=1e-8)
    assert (clipped * mask).sum() / mask.sum() == pytest.approx(case["clip_fraction"], abs=1e-6)
    torch.testing.assert_close(logprobs.grad, double(case["grad"]), atol=1e-8, rtol=0)


@pytest.mark.quick
@pytest.mark.parametrize("case", cases("unlikeliness", "paper_reward"))
def test_reference_paper_reward(case):
    rewards = double(case["rewards"])
    logprobs = double(case["sequence_logprobs"])
    shaped = unlikeliness_rewards(rewards, logprobs, len(rewards), case["beta"], form="paper")
    torch.testing.assert_close(shaped, double(case["shaped"]), atol=1e-9, rtol=0)
    found = group_advantages(shaped, len(rewards), std_epsilon=1e-6)
    torch.testing.assert_close(found, double(case["advantages_sample_std"]), atol=1e-6, rtol=0)


@pytest.mark.quick
@pytest.mark.parametrize("case", cases("unlikeliness", "pass_at_k"))
def test_reference_pass_at_k(case):
    assert pass_at_k(case["samples"], case["correct"], case["k"]) == pytest.approx(
        case["pass_at_k"], abs=1e-10
    )


@pytest.mark.quick
@pytest.mark.parametrize("case", cases("unlikeliness", "uplift"))
def test_reference_uplift(case):
    tables = [torch.tensor(case[name]) for name in ("logprobs_before", "logprobs_after", "correct")]
    torch.testing.assert_close(
        uplift(*tables), torch.tensor(case["uplift_by_rank"]), equal_nan=True
    )


@pytest.mark.quick
@pytest.mark.parametrize("case", cases("rep_exp", "bonuses"))
def test_reference_bonuses(case):
    """The code also divides by a group's std ("rnd") or centres ("z_score"), which its script does not."""
    hidden = double(case["hidden"])
    if "projection" in case:
        hidden = (hidden.float() @ torch.tensor(case["projection"])).double()
    for rows in by_group(case):
        found = leverage_bonus(hidden[rows], case["lamb"], case["reward_type"])
        torch.testing.assert_close(found, double(case["raw_bonus"])[rows], atol=2e-5, rtol=2e-5)
        if case["normalization"] == "none":
            assert case["bonus"] == case["raw_bonus"]


@pytest.mark.quick
def test_reference_persistent():
    """The first call of each problem: the script does not keep covariances, as the released settings."""
    seen = set()
    for case in CASES["rep_exp"]["persistent"]["items"]:
        if case["prompt"] not in seen:
            torch.testing.assert_close(
                leverage_bonus(double(case["hidden"])), double(case["raw_bonus"]), atol=1e-6, rtol=0
            )
        seen.add(case["prompt"])
    assert seen


@pytest.mark.quick
@pytest.mark.parametrize("case", cases("rep_exp", "mixing"))
def test_reference_mixing(case):
    names = {"none_right": "off_if_none_correct", "some_right": "off_if_some_correct"}
    names |= {"all_right": "off_if_all_correct", "wrong": "off_if_rollout_incorrect"}
    off = tuple(name for name, switch in names.items() if case[switch])
    rewards, bonuses = double(case["rewards"]), double(case["bonuses"])
    for rows in by_group(case):
        found = add_bonus(
            case["alpha"] * rewards[rows], bonuses[rows], len(rows), case["beta"], off
        )
        torch.testing.assert_close(found, double(case["total"])[rows], atol=1e-9, rtol=0)


@pytest.mark.quick
@pytest.mark.parametrize("case", cases("rep_exp", "identities"))
def test_reference_identities(case):
    hidden = double(case["hidden"])
    found = leverage_bonus(hidden, case["lamb"])
    torch.testing.assert_close(found, double(case["leverage"]), atol=1e-9, rtol=0)
    assert found.sum() == pytest.approx(case["sum"], abs=1e-9)
    other = leverage_bonus(hidden, case["lamb"], "leave_one_out")
    torch.testing.assert_close(
        other, double(case["leave_one_out_from_leverage"]), atol=1e-7, rtol=0
    )


@pytest.mark.quick
@pytest.mark.parametrize("size", [4, 8, 12])
def test_a_tiny_lambda_gives_the_diagonal_of_the_hat_matrix(size):
    hidden = 100 * torch.randn(8, size, generator=torch.Generator().manual_seed(0))
    x = hidden.double() - hidden.double().mean(0)
    basis = torch.linalg.qr(x)[0] if size < 7 else torch.linalg.svd(x)[0][:, :7]
    expected = basis.square().sum(1)
    torch.testing.assert_close(leverage_bonus(hidden, 1e-12), expected)
    assert leverage_bonus(hidden, 1e-12, "leave_one_out").max() < 7 + 1e-9


@pytest.mark.quick
def test_a_projection_keeps_squared_lengths_in_the_mean():
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(64, generator=generator)
    lengths = torch.stack(
        [(state @ sparse_projection(64, 4, generator)).square().sum() for _ in range(2000)]
    )
    assert lengths.mean() == pytest.approx(state.square().sum().item(), rel=0.1)


@pytest.mark.quick
def test_equal_answers_share_a_rank():
    rewards = torch.ones(4)
    found = unlikeliness_rewards(rewards, torch.tensor([-1.0, -2.0, -1.0, -3.0]), 4, 0.4)
    torch.testing.assert_close(found, torch.tensor([0.75, 0.9, 0.75, 1.0]))
    found = unlikeliness_rewards(
        rewards, torch.tensor([-1.0, -2.0, -1.0, -3.0]), 4, 0.4, form="paper"
    )
    torch.testing.assert_close(found, torch.tensor([0.65, 0.8, 0.65, 0.9]))


@pytest.mark.quick
def test_solved_groups_keep_their_rewards_unless_asked():
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0])
    values = (rewards, torch.tensor([-1.0, -2.0, -1.0, -2.0]), torch.tensor([0.2, 0.4, 0.6, 0.8]))
    args = Args(num_generations=2, rank_penalty=0.5, bonus_weight=1.0)
    assert shaped_rewards(*values, args).tolist() == [1.0, 1.0, 0.75, 0.0]
    args.solved_groups = "shaped"
    assert shaped_rewards(*values, args).tolist() == [0.75, 1.0, 0.75, 0.0]
    args.method = "rep_exp"
    torch.testing.assert_close(shaped_rewards(*values, args), torch.tensor([1.2, 1.4, 1.6, 0.8]))
    args.solved_groups = "plain"
    torch.testing.assert_close(shaped_rewards(*values, args), torch.tensor([1.0, 1.0, 1.6, 0.8]))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Flags and folder of two steps of RepExp."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    values = SMALL | {
        "method": "rep_exp",
        "max_steps": 2,
        "save_steps": 1,
        "eval_steps": 2,
        "shuffle_bonus": True,
    }
    train(unlikeliness, run_dir, **values | {"num_generations_eval": 12})
    return values | {"num_generations_eval": 12}, run_dir


def test_metrics(whole):
    found = numbers(whole[1])
    assert all(map(math.isfinite, found.values()))
    assert_tags_of_pages(tags(whole[1]), "unlikeliness", "grpo")
    assert found[1, "train/rep_exp/spread"] > 0.01
    assert found[1, "train/rep_exp/mean"] == pytest.approx(0.5, abs=0.05), "D / G"
    scores = [found[2, f"eval/pass_at_{k}"] for k in (1, 8)]
    assert scores[0] == pytest.approx(found[2, "eval/mean_at_12"]) and scores[0] <= scores[1]


def test_a_killed_run_continues(whole, tmp_path):
    kill_and_resume(unlikeliness, whole[1], tmp_path, 2, **whole[0])


@pytest.mark.parametrize("values", [{}, {"method": "rep_exp", "beta": 0.1}])
def test_two_processes_equal_one(values, tmp_path):
    two_processes_equal_one(
        unlikeliness, tmp_path, **SMALL | values | {"max_steps": 1, "eval_steps": 1}
    )


def test_none_is_grpo_to_the_bit_and_so_is_no_penalty(tmp_path):
    values = SMALL | {"max_steps": 2, "num_prompts_per_step": 8}
    kinds = {
        "none": {"method": "none"},
        "zero": {"rank_penalty": 0.0},
        "no_bonus": {"method": "rep_exp", "bonus_weight": 0.0},
    }
    ends = []
    for name, script, more in [
        ("grpo", grpo, {}),
        *((name, unlikeliness, more) for name, more in kinds.items()),
        ("shaped", unlikeliness, {}),
    ]:
        train(script, tmp_path / name, **values | more)
        ends.append((tmp_path / name / "final" / "model.safetensors").read_bytes())
    assert ends[0] == ends[1] == ends[2] == ends[3] != ends[4]


@pytest.mark.quick
@pytest.mark.parametrize("rank_form", ["code", "paper"])
def test_a_step_is_as_computed_anew(rank_form, monkeypatch, tmp_path):
    """Advantages, uplift and the share pushed down, where the reward has the weight 2 and some groups are all right."""
    (tmp_path / "own.py").write_text(
        "import zlib\ndef right(problem, completion):\n    return float(zlib.crc32(completion.encode()) % 6 > 0)\n"
    )
    given = []
    original = unlikeliness.update

    def likelihoods(model, completions, args):
        sums = unlikeliness.answer_logprobs(model, completions, True, replace(args, rank_form="paper")).tolist()
        return [total / (len(c.ids) if rank_form == "code" else 1) for total, c in zip(sums, completions)]

    def spy(model, reference, optimizer, completions, advantages, args):
        before = likelihoods(model, completions, args)
        found = original(model, reference, optimizer, completions, advantages, args)
        given.extend([completions, advantages, before, likelihoods(model, completions, args)])
        return found

    monkeypatch.setattr(unlikeliness, "update", spy)
    values = SMALL | {"num_prompts_per_step": 8, "num_generations": 4, "eval_steps": 1, "rank_penalty": 0.9}
    values |= {"reward": (f"{tmp_path}/own.py:right",), "reward_weights": (2.0,), "rank_form": rank_form}
    found = train(unlikeliness, tmp_path / "run", **values)
    train(unlikeliness, tmp_path / "sampler", **values | {"eval_steps": 0})  # with what the sampler gave each answer
    completions, advantages, before, after, _, of_sampler, *_ = given
    torch.testing.assert_close(of_sampler, advantages, atol=1e-3, rtol=1e-3)
    paid, risen, below = [], [[] for _ in range(4)], 0
    for start in range(0, 32, 4):
        group = range(start, start + 4)
        right = {row: completions[row].rewards[0] > 0 for row in group}
        by_likelihood = sorted(group, key=lambda row: -before[row])
        for row in group:
            rarer = sum(before[other] < before[row] for other in group)
            rank = rarer + (sum(before[other] == before[row] for other in group) - 1) / 2
            rank = rank if rank_form == "code" else rank + 1  # the paper's G - rank from the likeliest
            paid.append(2 * right[row] * (1 if all(right.values()) else 1 - 0.9 * rank / 4))
        expected = group_advantages(torch.tensor(paid[-4:]), 4)
        torch.testing.assert_close(advantages[start : start + 4], expected, atol=1e-5, rtol=1e-5)
        below += sum(right[row] and expected[row - start] < 0 for row in group)
        for place, row in enumerate(by_likelihood):
            if right[row] and expected[row - start] != 0:
                risen[place].append(after[row] > before[row])
    for place, rose in enumerate(risen):
        assert found[1, f"train/uplift/{place}"] == pytest.approx(sum(rose) / len(rose))
    assert found[1, "train/right_below_zero"] == pytest.approx(below / 32) and below > 0
    assert 0 < sum(advantage == 0 for advantage in advantages) < 32, "some groups are all right"


@pytest.mark.quick
def test_ranks_do_not_depend_on_evaluations(monkeypatch, tmp_path):
    """Steps before an evaluation recompute log-probabilities for uplift: ranks remain those of the sampler."""
    original = unlikeliness.answer_logprobs

    def turned_by_the_learner(model, completions, recompute, args):
        return original(model, completions, recompute, args) * (-1 if recompute else 1)

    monkeypatch.setattr(unlikeliness, "answer_logprobs", turned_by_the_learner)
    with language_runs.spy(unlikeliness) as given:
        for eval_steps in (0, 1):
            values = SMALL | {"num_prompts_per_step": 8, "eval_steps": eval_steps, "rank_penalty": 0.9}
            train(unlikeliness, tmp_path / str(eval_steps), **values)
    assert torch.equal(given[0][4], given[1][4]) and len(given[0][4].unique()) > 2


@pytest.mark.quick
def test_bonuses_are_of_the_mean_states_that_predict_an_answer():
    """Those of Transformers, projected anew in each step; then leave-one-out by its definition."""
    args = Args(method="rep_exp", num_generations=4, bonus_dim=3, bonus_lambda=2.0, bonus_kind="leave_one_out")
    model, _ = unlikeliness.load_model(args)
    plain = transformers.AutoModelForCausalLM.from_pretrained(unlikeliness.model_path(args))
    generator = torch.Generator().manual_seed(0)
    answers, means = [], []
    for length in (1, 5, 9, 3, 2, 7, 4, 6):
        prompt = [5, 6, 7] if len(answers) < 4 else [8, 9]
        ids = torch.randint(3, 20, (length,), generator=generator).tolist()
        answers.append(unlikeliness.Completion(prompt, ids, [0.0] * length, True))
        states = plain(torch.tensor([prompt + ids]), output_hidden_states=True).hidden_states[-1][0]
        means.append(states[len(prompt) - 1 : -1].mean(0))
    means = torch.stack(means).detach()
    for step in (0, 7):
        generator.manual_seed(unlikeliness.random_seed("projection", args.seed, step))
        projected = means @ sparse_projection(means.size(1), 3, generator)
        expected = []
        for states in projected.double().split(4):
            states = states - states.mean(0)
            for row in range(4):
                others = torch.cat([states[:row], states[row + 1 :]])
                inverse = torch.linalg.inv(2.0 * torch.eye(3) + others.mT @ others)
                expected.append((states[row] @ inverse @ states[row]).item())
        found = unlikeliness.state_bonuses(model, answers, step, [0, 1], args).tolist()
        assert found == pytest.approx(expected, rel=1e-4)
    mixed = unlikeliness.state_bonuses(model, answers, 7, [0, 1], replace(args, shuffle_bonus=True)).tolist()
    for group in (slice(0, 4), slice(4, 8)):
        assert sorted(mixed[group]) == sorted(found[group]) and mixed[group] != found[group]


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_bonus_is_of_the_initial_model(lora_rank, monkeypatch, tmp_path):
    """After a large step, states are still those of the model at the start."""
    states = []
    original = unlikeliness.leverage_bonus
    monkeypatch.setattr(
        unlikeliness,
        "leverage_bonus",
        lambda hidden, *rest: states.append(hidden) or original(hidden, *rest),
    )
    values = SMALL | {"method": "rep_exp", "max_steps": 2, "lora_rank": lora_rank, "seed": 3}
    monkeypatch.setattr(
        unlikeliness, "sparse_projection", lambda width, size, _: torch.eye(width)[:, :size]
    )
    seen = []
    complete = unlikeliness.complete

    def same(sampler, tokenizer, task, problems, size, args, seeds=None):
        if not seen:
            seen.append(complete(sampler, tokenizer, task, problems, size, args, seeds))
        return seen[0]

    monkeypatch.setattr(unlikeliness, "complete", same)
    train(unlikeliness, tmp_path, **values | {"learning_rate": 1e-2, "warmup_steps": 1})
    torch.testing.assert_close(states[0], states[1])
    assert states[0].std() > 0.01


def test_what_does_not_go_is_one_sentence(monkeypatch, tmp_path, capsys):
    (tmp_path / "own.py").write_text("def fine(problem, completion):\n    return -1.0\n")
    own = ("--reward", f"{tmp_path}/own.py:fine", "--eval-steps", "0", "--output-dir", tmp_path / "run")
    found = refusal(unlikeliness, monkeypatch, *own)
    assert found.startswith("reward function fine: returned -1; --method unlikeliness needs rewards from 0")
    rep_exp = ("--method", "rep_exp")
    found = refusal(unlikeliness, monkeypatch, *rep_exp, "--bonus-dim", "0", "--output-dir", tmp_path / "a")
    assert found.startswith("--bonus-dim 0: expected a finite number from 1")
    found = refusal(unlikeliness, monkeypatch, *rep_exp, "--num-generations", "2")
    assert found.startswith("--num-generations: at least 3 with --method rep_exp")
    found = refusal(unlikeliness, monkeypatch, "--num-generations", "1", "--advantage", "none")
    assert found.startswith("--num-generations: at least 2 with --method unlikeliness")
    for values in ({"scale_rewards": "none"}, {"advantage": "none"}, {"solved_groups": "shaped"}, {"method": "none"}):
        capsys.readouterr()
        unlikeliness.check_method(Args(num_generations=2, **values))
        assert not capsys.readouterr().out
    monkeypatch.setenv("RANK", "1")
    unlikeliness.check_method(Args(num_generations=2))
    assert not capsys.readouterr().out
    monkeypatch.delenv("RANK")
    unlikeliness.check_method(Args(num_generations=2))
    assert capsys.readouterr().out.startswith("--num-generations 2: the std hides what")
    for values in ({"shuffle_bonus": True}, {"method": "rep_exp", "rank_penalty": 0.5}):
        with pytest.raises(SystemExit, match="^--(shuffle-bonus|rank-penalty): not used by --method"):
            unlikeliness.check_method(Args(**values))
    unlikeliness.check_method(Args(method="none", rank_penalty=0.5, shuffle_bonus=True))
    tools = ("--env", "tool_calls", "--model-name-or-path", str(ROOT / "envs" / "tiny_lm" / "tool_calls"), "--output-dir", tmp_path / "b")
    found = refusal(unlikeliness, monkeypatch, *tools)
    advice = "give --reward-weights, the first above 0, or --method none"
    assert found == f"--method unlikeliness: shapes the reward exact, whose weight is 0; {advice}"
    found = refusal(unlikeliness, monkeypatch, *tools, "--reward-weights", "-1", *"1 1 1".split())
    assert found == f"--method unlikeliness: shapes the reward exact, whose weight is -1; {advice}"
    command(unlikeliness, monkeypatch, *tools, "--max-steps", "0", "--eval-steps", "0")  # shapes nothing


def test_answers_that_are_equal_share_what_rounding_makes_of_them():
    answers = [SimpleNamespace(prompt=[1, 2], ids=ids) for ids in ([3], [4], [3], [3, 4], [4])]
    answers.append(SimpleNamespace(prompt=[1], ids=[3]))
    assert unlikeliness.first_of_equals(answers) == [0, 1, 0, 3, 1, 5]
