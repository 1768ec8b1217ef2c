"""AMPO as people run it: solutions of their own teachers, its controls, its resume and its processes."""

import json
import math
from functools import partial

import pytest
from language_runs import (
    SMALL,
    completions,
    kill_and_resume,
    numbers,
    spy,
    train,
    two_processes_equal_one,
)
from processes import as_flags
from run_folders import assert_tags_of_pages, tags

from algorithms import ampo, grpo
from algorithms.ampo import Args

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

train_here = partial(train, ampo, **SMALL)
REWARD = """
def score(problem, completion):
    return float('9' in completion) / problem.get('worth', 1)

def length(problem, completion):
    return None if problem.get('broken') and 'and 9.' in completion else len(completion) % 3
"""


def solutions_of(n: int) -> list[str]:
    return [f"{n} and 9.", f"First {n}.\nThen\n9", f"{n} is not 9.\n" * 20]


@pytest.fixture
def own_data(tmp_path) -> dict:
    """Flags of a file with solutions of several teachers, of one, and of none, and of a reward."""
    lines = [{"question": f"Say {n}.", "demonstration": solutions_of(n)} for n in range(64)]
    lines[5]["demonstration"] = solutions_of(5)[0]
    del lines[6]["demonstration"]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (tmp_path / "own.py").write_text(REWARD)
    path = str(tmp_path / "own.jsonl")
    return {"dataset": path, "eval_dataset": path, "reward": (f"{tmp_path}/own.py:score",)}


@pytest.mark.quick
def test_command_and_its_files(tmp_path, own_data, monkeypatch, capsys):
    """Own data: solutions stand in the rows of questions without a right rollout, with a reward of 1."""
    values = SMALL | {"max_steps": 2, "eval_steps": 2, "num_prompts_per_step": 8, "beta": 0.04} | own_data
    monkeypatch.setattr(
        "sys.argv", ["ampo.py", *as_flags(values), "--output-dir", str(tmp_path / "run")]
    )
    with spy(ampo) as given:
        ampo.train(ampo.parse_args())
    assert "125 demonstrations fit, of 63 of 64 problems" in capsys.readouterr().out
    found = numbers(tmp_path / "run")
    tokenizer = ampo.load_model(Args(**SMALL))[1]
    tokens = 0
    for step, (_, _, _, rows, advantages, is_teacher, _) in enumerate(given, start=1):
        guided = []
        for question in range(8):
            group = slice(4 * question, 4 * question + 4)
            taught = is_teacher[group].tolist()
            guided.append(any(taught))
            rollouts = [row for row, by_teacher in zip(rows[group], taught) if not by_teacher]
            if not any(taught):
                continue
            assert taught == [False, False, True, True] or taught == [False, False, False, True]
            assert all(row.rewards == (0.0,) for row in rollouts)
            expected = [sum(taught) / -4] * 4
            expected = [share + by_teacher for share, by_teacher in zip(expected, taught)]
            assert advantages[group].tolist() == pytest.approx(expected)
        for row, by_teacher in zip(rows, is_teacher):
            if by_teacher:
                number = int(tokenizer.decode(row.prompt).split("Say ")[1].split(".")[0])
                assert row.text in solutions_of(number)[:2]
                assert tokenizer.decode(row.ids) == row.text + tokenizer.eos_token
                tokens += len(row.ids)
        assert found[step, "train/guided_share"] == sum(guided) / 8
        assert found[step, "train/num_demonstration_tokens"] == tokens > 0
        assert 0 < found[step, "train/comprehension"] < 1
    assert all(map(math.isfinite, found.values()))
    assert_tags_of_pages(tags(tmp_path / "run"), "ampo", "grpo")
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()
    shown = completions(tmp_path / "run")
    taught = [flag for *_, is_teacher, _ in given for flag in is_teacher[:8].tolist()]
    assert [row["teacher"] for row in shown] == taught and any(taught)


def test_it_learns_and_its_controls_differ(tmp_path):
    """No rollout is right at first, so that GRPO has the reward of the format alone."""
    values = {"max_steps": 8, "num_prompts_per_step": 4, "learning_rate": 1e-3, "warmup_steps": 0}
    names = ("ampo", "grpo", "one_teacher", "random")
    runs = {name: train_here(tmp_path / name, **values, method=name) for name in names}
    for name in ("ampo", "one_teacher", "random"):
        losses = [runs[name][step, "train/teacher_nll"] for step in range(1, 9)]
        assert min(losses[-3:]) < losses[0] - 0.3, (name, losses)
        assert runs[name][1, "train/guided_share"] == 1
    assert runs["ampo"][1, "train/comprehension"] > runs["random"][1, "train/comprehension"]
    assert {runs["grpo"][step, "train/guided_share"] for step in range(1, 9)} == {0}
    assert runs["grpo"][8, "train/num_demonstration_tokens"] == 0
    assert not {"train/teacher_nll", "train/comprehension"} & {tag for _, tag in runs["grpo"]}
    assert len({runs[name][1, "train/loss"] for name in names}) == 4
    more = train_here(tmp_path / "v2", rule="v2")
    less = train_here(tmp_path / "v1", rule="v1", num_replaced=1)
    assert more[1, "train/num_demonstration_tokens"] > less[1, "train/num_demonstration_tokens"] > 0


def test_its_control_is_grpo(tmp_path, own_data):
    values = (
        SMALL
        | own_data
        | {"max_steps": 2, "loss_type": "grpo", "learning_rate": 1e-3, "scale_rewards": "group"}
        | {"beta": 0.04}
    )
    expected = train(grpo, tmp_path / "grpo", **values)
    found = train(ampo, tmp_path / "ampo", **values, method="grpo")
    same = {key for key in expected if key in found}
    assert len(same) > 20 and {key: found[key] for key in same} == {
        key: expected[key] for key in same
    }
    assert {tag for _, tag in expected.keys() - same} == {"train/clip_ratio"}


def test_rewards_of_teachers(tmp_path, own_data):
    """v1 raises the first one to 1, v2 takes them as they are; both add the others."""
    flags = own_data | {"reward": (*own_data["reward"], f"{tmp_path}/own.py:length")}
    path = tmp_path / "own.jsonl"
    lines = [json.loads(line) | {"worth": 4} for line in path.read_text().splitlines()]
    path.write_text("\n".join(map(json.dumps, lines)))
    for rule, reward in (("v1", 1.0), ("v2", 0.25)):
        with spy(ampo) as given:
            train_here(tmp_path / rule, **flags, rule=rule)
        _, _, _, rows, advantages, is_teacher, _ = given[0]
        group = slice(*(4 * (is_teacher.nonzero()[0].item() // 4) + end for end in (0, 4)))
        totals = [
            (reward if by_teacher else row.rewards[0]) + row.rewards[1]
            for row, by_teacher in zip(rows[group], is_teacher[group])
        ]
        assert advantages[group].tolist() == pytest.approx(
            [total - sum(totals) / 4 for total in totals]
        )


def test_a_killed_run_continues(tmp_path, own_data):
    values = (
        SMALL | own_data | {"max_steps": 3, "save_steps": 1, "eval_steps": 3, "method": "random"}
    )
    train_here(tmp_path / "whole", **values)
    kill_and_resume(ampo, tmp_path / "whole", tmp_path, 2, **values)


def test_two_processes_equal_one(tmp_path, own_data):
    """Also when one of them has more solutions to score than the other, and under FSDP has to wait for it."""
    # With seed 1, one processor that we met rounds so that a token at the edge of two is sampled differently.
    values = (
        SMALL
        | own_data
        | {"num_prompts_per_step": 6, "max_steps": 2, "micro_batch_size": 3, "seed": 3}
    )
    two_processes_equal_one(ampo, tmp_path, **values, loss_type="paper", beta=0.04)
    found = numbers(tmp_path / "one")
    assert 0 < found[1, "train/guided_share"] < 1


def test_data_without_demonstrations_that_fit_gets_one_sentence(tmp_path, own_data):
    path = tmp_path / "own.jsonl"
    path.write_text(
        "".join(
            json.dumps({"question": f"Say {n}.", "demonstration": "9 " * 99}) + "\n"
            for n in range(20)
        )
    )
    with pytest.raises(
        SystemExit, match="^--dataset: no line has a `demonstration`.* at most 32 tokens"
    ):
        ampo.train(Args(**SMALL | own_data))
