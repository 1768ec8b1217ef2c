"""HPT as people run it: demonstrations of their own, its controls, its resume and its processes."""

import json
import math
from functools import partial
from pathlib import Path

import pytest
from language_runs import SMALL, kill_and_resume, numbers, train
from processes import as_flags, train_by_two
from run_folders import assert_close, assert_same_weights, assert_tags_of_pages, tags

from algorithms import hpt
from algorithms.hpt import Args

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

train_here = partial(train, hpt, **SMALL)
REWARD = "def score(problem, completion):\n    return float('9' in completion)\n"


@pytest.fixture
def own_data(tmp_path) -> dict:
    """Flags of a file with demonstrations, and of a reward."""
    lines = [{"question": f"Say {n}.", "demonstration": f"{n} and 9."} for n in range(64)]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (tmp_path / "own.py").write_text(REWARD)
    path = str(tmp_path / "own.jsonl")
    return {"dataset": path, "eval_dataset": path, "reward": (f"{tmp_path}/own.py:score",)}


def test_command_and_its_files(tmp_path, own_data, monkeypatch):
    """Own data: what is trained on are the demonstrations of the questions without a right rollout."""
    given, update = [], hpt.update
    monkeypatch.setattr(hpt, "update", lambda *words: given.append(words[3:5]) or update(*words))
    values = SMALL | {"max_steps": 2, "eval_steps": 2, "num_prompts_per_step": 8, "beta": 0.04} | own_data
    words = ["hpt.py", *as_flags(values), "--output-dir", str(tmp_path / "run")]
    monkeypatch.setattr("sys.argv", words)
    hpt.train(hpt.parse_args())
    found = numbers(tmp_path / "run")
    tokens = 0
    for step, (rows, (_, weights, _, in_sft)) in enumerate(given, start=1):
        assert len(rows) == 8 * 4 + 8
        taught = []
        for question in range(8):
            *group, demonstration = rows[5 * question : 5 * question + 5]
            taught.append(float(all(row.rewards == (0.0,) for row in group)))
            assert demonstration.prompt == group[0].prompt
            tokens += taught[-1] * len(demonstration.ids)
        assert in_sft.view(8, 5).tolist() == [[0.0] * 4 + [share] for share in taught]
        assert ((weights > 0) == (in_sft > 0))[4::5].all()
        assert found[step, "train/sft_share"] == sum(taught) / 8
        assert found[step, "train/num_demonstration_tokens"] == tokens > 0
    tokenizer = hpt.load_model(Args(**SMALL))[1]
    text = tokenizer.decode(given[0][0][4].ids)
    assert text.endswith("and 9." + tokenizer.eos_token)
    assert text.split()[0] in tokenizer.decode(given[0][0][4].prompt)
    assert all(map(math.isfinite, found.values()))
    assert_tags_of_pages(tags(tmp_path / "run"), "hpt", "grpo")
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()


def test_it_learns_and_its_controls_differ(tmp_path):
    """No rollout is right at first, so that GRPO has the reward of the format alone."""
    values = {"max_steps": 8, "num_prompts_per_step": 4, "learning_rate": 2e-3, "warmup_steps": 0}
    runs = {name: train_here(tmp_path / name, **values, method=name) for name in ("hpt", "srft", "grpo", "sft")}
    for name in ("hpt", "srft", "sft"):
        losses = [runs[name][step, "train/sft_loss"] for step in range(1, 9)]
        assert losses[0] > 2 and min(losses) < 1.3, (name, losses)
        assert runs[name][1, "train/sft_share"] == 1
    assert runs["hpt"][1, "train/loss"] == runs["sft"][1, "train/loss"]
    assert runs["srft"][1, "train/loss"] != runs["hpt"][1, "train/loss"]
    assert {runs["grpo"][step, "train/sft_share"] for step in range(1, 9)} == {0}
    assert not any(tag == "train/sft_loss" for _, tag in runs["grpo"]), "no demonstration, no loss"
    assert runs["grpo"][8, "train/num_demonstration_tokens"] == 0
    demonstrations_alone = train_here(tmp_path / "kl", **values | {"max_steps": 1}, method="sft", beta=0.04)
    assert (1, "train/kl") not in demonstrations_alone, "no token of RL, no distance"


def test_a_killed_run_continues(tmp_path, own_data):
    values = SMALL | own_data | {"max_steps": 3, "save_steps": 1, "eval_steps": 3}
    train_here(tmp_path / "whole", **values)
    kill_and_resume(hpt, tmp_path / "whole", tmp_path, 2, **values)


def test_two_processes_equal_one(tmp_path, own_data):
    """Also when one of them has more demonstrations than the other."""
    # With seed 1, one processor that we met rounds so that a token at the edge of two is sampled differently.
    values = SMALL | own_data | {"num_prompts_per_step": 6, "max_steps": 2, "micro_batch_size": 3, "seed": 3}
    runs = {"plain": {}, "kl": {"fsdp": True, "beta": 0.04}, "srft": {"method": "srft"}}
    train_by_two(tmp_path, "hpt", [values | runs[name] | {"output_dir": str(tmp_path / name)} for name in runs])
    for name, more in runs.items():
        expected = train_here(tmp_path / f"{name}_one", **values | more | {"fsdp": False})
        assert (tmp_path / name / "final").exists(), (tmp_path / "stderr").read_text()
        assert_close(numbers(tmp_path / name), expected, relative=1e-3)
        assert_same_weights(tmp_path / name, tmp_path / f"{name}_one")
        if name != "srft":
            assert 0 < expected[1, "train/sft_share"] < 1


@pytest.mark.quick
@pytest.mark.parametrize("rest", ["", ', "demonstration": [" "]'])
def test_a_line_without_demonstration_gets_one_sentence(tmp_path, own_data, rest):
    with open(own_data["dataset"], "a") as file:
        file.write(f'\n{{"question": "Say 99."{rest}}}\n')
    with pytest.raises(SystemExit, match="^no `demonstration` .* in {'question': 'Say 99.'"):
        hpt.train(Args(**SMALL | own_data))


@pytest.mark.parametrize("graded", ["own reward", "by rule"])
def test_long_demonstrations_are_dropped(own_data, capsys, graded):
    """So that what is left ends with the end token."""
    texts = ["1 and 9.", "9 and 1.", "2 and 9. " * 32]
    lines = [{"question": f"Say {text}", "answer": "9", "demonstration": text} for text in texts]
    lines[0]["demonstration"] = [texts[0], "9"]  # the first one counts
    Path(own_data["dataset"]).write_text("\n".join(map(json.dumps, lines)))
    if graded == "by rule":
        own_data["reward"] = ()
    args = Args(**SMALL | own_data)
    task, _ = hpt.load_task(args)
    _, tokenizer = hpt.load_model(args)
    kept = hpt.drop_long_demonstrations(task.train_rows, tokenizer, args)
    assert "2 of 3 demonstrations fit into --max-completion-length" in capsys.readouterr().out
    found = {tokenizer.decode(hpt.demonstration(problem, tokenizer)) for problem in kept}
    assert found == {text + tokenizer.eos_token for text in texts[:2]}
    long = [problem for problem in task.train_rows if problem not in kept]
    with pytest.raises(SystemExit, match="no demonstration fits"):
        hpt.drop_long_demonstrations(long, tokenizer, args)


