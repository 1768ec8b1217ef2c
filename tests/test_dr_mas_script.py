"""Dr. MAS as people run it: both teams, models of their own and shared, resume, processes, a team of one's own."""

import json
import math
import shutil
from functools import partial
from pathlib import Path

import language_runs
import pytest
import torch
from language_runs import completions, kill_and_resume, numbers, spy, train, two_processes_equal_one
from processes import ROOT
from run_folders import assert_close, assert_tags_of_pages, tags
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from algorithms import dr_mas
from algorithms.dr_mas import Args, agent_advantages

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TINY = ROOT / "envs" / "tiny_lm" / "search_qa"
SMALL = {"num_prompts_per_step": 2, "num_generations": 4, "max_completion_length": 48, "max_steps": 1}
SMALL |= {"eval_problems": 2, "num_generations_eval": 2, "eval_steps": 0, "save_steps": 0, "max_rounds": 2}
SMALL |= {"reward": (f"{Path(__file__).resolve()}:parity",)}  # few answers of the tiny models are right
LONG = SMALL | {"max_steps": 2, "save_steps": 1, "eval_steps": 2, "beta": 0.04, "num_iterations": 2}
train_here = partial(train, dr_mas, **SMALL)
whole = language_runs.whole_run(dr_mas, LONG)
AGENTS = ("router", "searcher", "responder")
TEAM = """\
from envs.search_qa import SearchQA
from envs.teams import Episode

class Pair:
    agents = ("first", "second")

    def __init__(self, dataset, max_rounds, missing_verdict):
        self.task = SearchQA(hops=(1,))

    def start(self, problem):
        return Episode(problem, "first")

    def prompt(self, episode):
        return self.task.prompt(episode.problem, teammates=episode.calls)

    def advance(self, episodes, texts):
        for episode, text in zip(episodes, texts):
            episode.calls.append((episode.agent, text))
            episode.agent = "second" if episode.agent == "first" else None
            episode.answer = text
        return ["search" in text for text in texts]

def length(problem, answer):
    return float(len(answer))
"""


def parity(problem, answer: str) -> float:
    """Of the length."""
    return float(len(answer) % 2)


def weights(run_dir, name: str) -> dict[str, torch.Tensor]:
    return load_file(Path(run_dir, "final", name, "model.safetensors"))


def moved(ours: dict, theirs: dict) -> float:
    """Largest difference of two sets of weights."""
    return max((ours[name] - theirs[name]).abs().max().item() for name in theirs)


def written(given) -> list[tuple]:
    """(agent, prompt, completion) of the calls that an update was given."""
    return [(call.agent, call.prompt, call.text) for call in given[3]]


def expected_advantages(rows: list[dict], normalization: str) -> list[float]:
    """From completions.jsonl of one step, in which all groups are shown."""
    calls = []
    for i, row in enumerate(rows):
        for call in row["calls"]:
            score = row["rewards"]["parity"] - 0.1 * (not call["valid"])
            calls.append((score, i // 4, AGENTS.index(call["agent"]), i))
    return agent_advantages(*map(torch.tensor, zip(*calls)), normalization).tolist()


def test_command_and_its_files(whole):
    """A model for each agent: it gets the agent's calls with their advantages, and nothing else."""
    run_dir, given = whole
    assert len(given) == 6 and len({id(words[0]) for words in given}) == 3
    rows = [row for row in completions(run_dir) if row["step"] == 1]
    assert len(rows) == 8 and len({row["rewards"]["parity"] for row in rows}) == 2
    calls = [call for row in rows for call in row["calls"]]
    assert [call["advantage"] for call in calls] == pytest.approx(expected_advantages(rows, "agent"))
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    found, base = numbers(run_dir), load_file(TINY / "model.safetensors")
    for agent, words in zip(AGENTS, given):
        shown = [call for call in calls if call["agent"] == agent]
        texts = [(agent, tokenizer.encode(call["prompt"]), call["completion"]) for call in shown]
        assert written(words) == texts and words[4].tolist() == [call["advantage"] for call in shown]
        assert found[1, f"train/dr_mas/{agent}/calls"] == pytest.approx(len(shown) / 8)
        norms = [found[step, f"train/dr_mas/{agent}/grad_norm"] for step in (1, 2)]
        assert (moved(weights(run_dir, agent), base) > 1e-5) == (max(norms) > 0)
    assert found[1, "train/reward"] == pytest.approx(sum(row["rewards"]["parity"] for row in rows) / 8)
    assert all(map(math.isfinite, found.values())) and {(0, "eval/greedy"), (2, "eval/pass_at_2")} <= found.keys()
    assert_tags_of_pages(tags(run_dir), "dr_mas", "grpo")


def test_a_shared_model_gets_all_calls(whole, tmp_path):
    """Here with the advantages of the control."""
    with spy(dr_mas) as given:
        found = train_here(tmp_path, share_model=True, normalization="global")
    assert sorted(written(given[0])) == sorted(sum(map(written, whole[1][:3]), []))
    assert given[0][4].tolist() == pytest.approx(expected_advantages(completions(tmp_path), "global"))
    assert len(given) == 1 and [path.name for path in (tmp_path / "final").iterdir()] == ["team"]
    assert (1, "train/dr_mas/team/grad_norm") in found and (1, "train/dr_mas/router/calls") in found


def test_decoding_in_chunks_changes_nothing(whole, tmp_path):
    """Not the episodes, and not what is learned from them."""
    found = train(dr_mas, tmp_path, **LONG, decode_batch_size=5, micro_batch_size=5)
    assert_close(found, numbers(whole[0]))


def test_a_killed_run_continues(whole, tmp_path):
    kill_and_resume(dr_mas, whole[0], tmp_path, 2, **LONG)


@pytest.mark.parametrize("kind, more", [("plain", {}), ("fsdp", {"share_model": True, "beta": 0.1})])
def test_two_processes_equal_one(kind, more, tmp_path):
    """They have different numbers of calls, and so of micro-batches, which FSDP must make up for."""
    values = SMALL | {"micro_batch_size": 2} | more
    two_processes_equal_one(dr_mas, tmp_path, (kind,), **values)


def test_minibatches_are_made_of_problems(tmp_path):
    """So they are the same on any number of processes, and lone calls are those of an agent in all of a problem."""
    values = SMALL | {"num_prompts_per_step": 4, "num_minibatches": 2, "epsilon": 1e-4, "lone_call": "zero"}
    with spy(dr_mas) as given:
        two_processes_equal_one(dr_mas, tmp_path, ("plain",), **values)
    assert {call.group for words in given for call in words[3]} == {0, 1, 2, 3}
    rows = completions(tmp_path / "one")
    assert sum(map(len, (words[4] for words in given))) >= len(rows)


def test_a_step_without_any_prompt_that_fits(tmp_path):
    with pytest.raises(SystemExit, match="--max-prompt-length: all prompts of this step are longer"):
        train_here(tmp_path, max_prompt_length=31, num_prompts_per_step=1)


def test_models_of_the_agents_in_the_order_of_the_team(tmp_path):
    """Without a learning rate each ends as it began; who is never asked stays as it is with one, too."""
    other = {name: 0.9 * weight for name, weight in load_file(TINY / "model.safetensors").items()}
    models = tuple(str(tmp_path / str(i)) for i in range(3))
    for path in models:
        shutil.copytree(TINY, path)
    save_file(other, tmp_path / "1" / "model.safetensors", {"format": "pt"})
    train_here(tmp_path / "run", agent_models=models, learning_rate=0.0)
    base = load_file(TINY / "model.safetensors")
    assert [moved(weights(tmp_path / "run", agent), base) > 0 for agent in AGENTS] == [False, True, False]
    assert moved(weights(tmp_path / "run", "searcher"), other) == 0
    found = train_here(tmp_path / "one", env="countdown", max_rounds=1, learning_rate=1e-3, invalid_penalty=0.3)
    assert found[1, "train/dr_mas/verifier/calls"] == 0
    assert moved(weights(tmp_path / "one", "verifier"), load_file(TINY.parent / "countdown" / "model.safetensors")) == 0


@pytest.mark.quick
def test_a_team_and_a_reward_of_ones_own(tmp_path):
    """The second agent's prompts, which hold what the first wrote, are too long: those episodes end there."""
    (tmp_path / "own.py").write_text(TEAM)
    own = {"env": f"{tmp_path}/own.py:Pair", "reward": (f"{tmp_path}/own.py:length",), "model_name_or_path": str(TINY)}
    own = SMALL | own
    found = train_here(tmp_path / "all", **own)
    assert found[1, "train/dr_mas/first/calls"] == found[1, "train/dr_mas/second/calls"] == 1
    assert found[1, "train/rewards/length/mean"] == found[1, "train/reward"] > 5
    args = Args(**own)
    team, (problem, *_) = dr_mas.load_task(args)
    first = len(dr_mas.encode(AutoTokenizer.from_pretrained(TINY), team.prompt(team.start(problem)), args))
    found = train_here(tmp_path / "cut", **own, max_prompt_length=first + 3)
    assert found[1, "train/dr_mas/cut_ratio"] == 1 and found[1, "train/dr_mas/second/calls"] == 0


def test_a_dataset_and_a_whole_file_for_evaluation(tmp_path):
    lines = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(5) for b in range(4)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = str(tmp_path / "sums.jsonl")
    team, problems = dr_mas.load_task(Args(env="countdown", dataset=path, eval_dataset=path))
    assert len(problems) == len(team.task.train_rows) == 20
    episode = team.start(problems[0])
    team.advance([episode], ["<answer>no</answer>"])
    assert f"{problems[0].question}\nSolver: <answer>no</answer>\n" in team.prompt(episode)[-1]["content"]
    team, problems = dr_mas.load_task(Args(env="countdown", dataset=path))
    assert len(problems) + len(team.task.train_rows) == 20 and problems
