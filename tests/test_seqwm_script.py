"""SeqWM as people run it: files, logs, crashes, every model and planner, PettingZoo tasks, bad input, learning."""

import json
import math
import shutil
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from control_runs import checkpoints, column, command, kill_and_resume, refusal, results, train
from processes import as_flags
from run_folders import assert_tags_of_pages, begin, tags

from algorithms import seqwm
from algorithms.seqwm import Args

SMALL = {"total_timesteps": 250, "num_agents": 3, "num_envs": 5, "learning_starts": 50, "latent_dim": 16, "hidden_dim": 8}
SMALL |= {"batch_size": 8, "eval_episodes": 2, "num_samples": 6, "num_policy_samples": 2, "num_elites": 3}
SMALL |= {"horizon": 2, "iterations": 2, "updates_per_step": 0.5, "eval_steps": 0}
LONG = SMALL | {"total_timesteps": 1000, "buffer_size": 402, "save_steps": 250, "eval_steps": 400}
TEAM = '''\
import numpy as np
from gymnasium.spaces import Box, Discrete


class Team:
    """PettingZoo's interface: two agents carry a bar; the second sees less, and leaves in step 3 of 4."""

    possible_agents = ["front", "back"]

    def __init__(self, high=2.0, discrete=False, sizes=(2, 2)):
        self.high, self.discrete, self.sizes = high, discrete, dict(zip(self.possible_agents, sizes))

    def action_space(self, agent):
        return Discrete(3) if self.discrete else Box(0, self.high, (self.sizes[agent],), np.float32)

    def reset(self, seed=None):
        self.agents, self.clock = list(self.possible_agents), 0
        return self.see(), {agent: {} for agent in self.agents}

    def see(self):
        seen = {"front": {"clock": np.array([self.clock]), "place": np.ones((1, 2))}, "back": np.array([3.0])}
        return {agent: seen[agent] for agent in self.agents}

    def step(self, actions):
        assert actions.keys() == set(self.agents)
        for agent, action in actions.items():
            assert self.action_space(agent).contains(action), action
        self.clock += 1
        self.actions = actions
        ended = {agent: agent == "back" and self.clock == 3 for agent in self.agents}
        cut = {agent: self.clock == 4 for agent in self.agents}
        rewards = {agent: 1.0 + (agent == "back") for agent in self.agents}
        seen, infos = self.see(), {agent: {} for agent in self.agents}
        self.agents = [agent for agent in self.agents if not ended[agent] and not cut[agent]]
        return seen, rewards, ended, cut, infos


class Broken(Team):
    def step(self, actions):
        seen, rewards, *rest = super().step(actions)
        return seen, dict.fromkeys(rewards, float("nan")), *rest


class OneNumber(Team):
    def step(self, actions):
        seen, rewards, *rest = super().step(actions)
        return seen, 1.0, *rest


class LastUnseen(Team):
    def step(self, actions):
        seen, *rest = super().step(actions)
        return seen if self.agents else {}, *rest


class RowOfOne(Team):
    def step(self, actions):
        seen, rewards, *rest = super().step(actions)
        return seen, {agent: np.array([reward]) for agent, reward in rewards.items()}, *rest


class Growing(Team):
    def see(self):
        return super().see() | {"front": np.ones(3 + self.clock)}


class Raises(Team):
    def __init__(self):
        raise ValueError("no licence")


class Blind(Team):
    def reset(self, *words, **names):
        seen, infos = super().reset(*words, **names)
        return {agent: np.full(3, np.nan) for agent in seen}, infos


class Nobody:
    pass
'''


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder of a run that is not stopped, its metrics, and what it printed."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    output = begin(seqwm, run_dir, **LONG)
    return run_dir, results(run_dir), output


@pytest.fixture
def team(tmp_path):
    (tmp_path / "team.py").write_text(TEAM)
    return f"{tmp_path / 'team.py'}:Team"


def test_command_and_its_files(whole):
    run_dir, found, output = whole
    assert "seq, 5 games of 3 agents on cpu" in output
    progress = [line for line in output.splitlines() if line.startswith("step")]
    assert len(progress) == 50 and max(map(len, progress)) <= 80
    assert {step for step, tag in found if tag == "eval/return_mean"} == {0, 400, 800, 1000}
    learned = [step for step, tag in found if tag == "losses/qf_loss"]
    assert learned == list(range(60, 1001, 20))
    assert all(map(math.isfinite, found.values()))
    names = [path.name for path in checkpoints(run_dir)]
    assert names == ["step_000000000760.pt", "step_000000001000.pt"]
    state = torch.load(checkpoints(run_dir)[-1])["learner"]
    assert state["count"] == 1000 and len(state["columns"]["rewards"]) == 400, "whole steps of the games"


def test_tags_are_those_of_the_page(whole):
    assert_tags_of_pages(tags(whole[0]), "seqwm")


def test_kill_and_resume(whole, tmp_path, monkeypatch):
    """With a full replay, plans that go on, and a fraction of an update after each step."""
    kill_and_resume(seqwm, 35, whole[0], tmp_path / "run", monkeypatch, LONG)


def test_resume_with_another_learning_rate(whole, tmp_path):
    """The rates of all networks are those of the flags, also after a checkpoint."""
    saved = seqwm.load_checkpoint(str(whole[0]), torch.device("cpu"))
    args = replace(Args(**json.loads((whole[0] / "args.json").read_text())), learning_rate=0.5)
    game = seqwm.make_game(args, args.num_envs, 0, "cpu")
    learner = seqwm.Learner(seqwm.WorldModel(game, args), seqwm.WorldModel(game, args), args)
    learner.load(saved["learner"])
    assert [group["lr"] for group in learner.optimizer.param_groups] == [0.15, 0.5, 0.5, 0.5]
    assert [optimizer.param_groups[0]["lr"] for optimizer in learner.actor_optimizers] == [0.5] * 3


def test_evaluations_and_their_number_do_not_change_a_run(whole, tmp_path):
    found = train(seqwm, tmp_path / "run", **LONG | {"eval_steps": 0})
    assert found.keys() < whole[1].keys()
    assert all(whole[1][key] == value for key, value in found.items())


def test_evaluation_of_a_run(whole, monkeypatch):
    """The scores at the end of the training; with other flags, others."""
    scores = command(seqwm, monkeypatch, "--evaluate", whole[0])
    assert scores == {tag: value for (step, tag), value in whole[1].items() if (step, tag[:5]) == (1000, "eval/")}
    actors = command(seqwm, monkeypatch, "--evaluate", whole[0], "--planner", "none")
    assert actors.keys() == {"eval/return_mean", "eval/return_std"}
    assert actors["eval/return_mean"] == scores["eval/actor/return_mean"] != scores["eval/return_mean"]


def test_a_run_with_no_steps_left(whole, tmp_path, monkeypatch, capsys):
    shutil.copytree(whole[0], tmp_path / "run")
    command(seqwm, monkeypatch, "--resume", tmp_path / "run", "--total-timesteps", 250)
    assert "run: has 1000 steps already; a larger --total-timesteps goes on\n" in capsys.readouterr().out


KINDS = [{"model": "joint"}, {"model": "independent"}, {"planner": "none"}, {"message": "actions"}]
KINDS += [{"log_density": "released"}, {"plan_value": "released"}, {"horizon": 1}, {"num_policy_samples": 0}, {"mppi_temperature": 5.0}, {"entropy_coef": 0.1}]
KINDS += [{"num_agents": 2, "total_timesteps": 100}, {"num_elites": 1}, {"tau": 0.5}, {"gamma": 0.5}]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return train(seqwm, tmp_path_factory.mktemp("runs") / "small", **SMALL)


@pytest.mark.parametrize("values", KINDS, ids=lambda values: " ".join(as_flags(values)))
def test_every_switch_changes_the_run(values, small, tmp_path):
    found = train(seqwm, tmp_path / "run", **SMALL | values)
    assert all(map(math.isfinite, found.values()))
    assert column(found, "losses/actor_loss") != column(small, "losses/actor_loss")


def test_one_agent_needs_no_order(tmp_path):
    """With nobody to see, the three models are one, to the bit."""
    runs = [train(seqwm, tmp_path / model, **SMALL | {"num_agents": 1, "model": model}) for model in ("seq", "joint", "independent")]
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.quick
def test_own_environment(team, tmp_path):
    """A parallel environment of a file: observations of two shapes, bounds from 0, an agent that leaves."""
    values = SMALL | {"env_id": team, "env_kwargs": '{"high": 3.0}'}
    found = train(seqwm, tmp_path / "run", **values)
    assert all(map(math.isfinite, found.values()))
    assert set(column(found, "charts/episodic_return")) == {(3 * 3 + 1) / 2}
    assert found[250, "eval/return_mean"] == 5
    game = seqwm.make_game(Args(**values), 2, 0, torch.device("cpu"))
    assert game.observations.tolist() == [[[0, 1, 1], [3, 0, 0]]] * 2
    _, ended, over, seen = game.step(torch.tensor([[[-1.0, 1.0], [0.0, 0.5]]] * 2))
    assert game.envs[0].actions["front"].tolist() == [0, 3] and game.envs[1].actions["back"].tolist() == [1.5, 2.25]
    assert not ended.any() and not over.any() and torch.equal(seen, game.observations)
    game.step(torch.zeros(2, 2, 2))
    _, _, over, seen = game.step(torch.zeros(2, 2, 2))
    assert not over.any() and seen[0].tolist() == [[3, 1, 1], [0, 0, 0]], "zeros for an agent that has left"
    _, ended, over, seen = game.step(torch.zeros(2, 2, 2))
    assert over.all() and not ended.any() and seen[0, 0, 0] == 4 and game.observations[0, 0, 0] == 0


def test_a_reward_in_an_array(team):
    game = seqwm.make_game(Args(env_id=team.replace(":Team", ":RowOfOne")), 2, 0, torch.device("cpu"))
    assert game.step(torch.zeros(2, 2, 2))[0].tolist() == [1.5, 1.5]


@pytest.mark.quick
def test_pettingzoo_is_the_shipped_game(tmp_path):
    """mpe2's simple_spread from one state gives the observations and rewards of the script's own."""
    pytest.importorskip("mpe2")
    kwargs = '{"continuous_actions": true}'
    args = Args(env_id="mpe2.simple_spread_v3", env_kwargs=kwargs)
    theirs, ours = (seqwm.make_game(a, 2, 0, torch.device("cpu")) for a in (args, Args(num_agents=3)))
    assert theirs.observation_dim == ours.observation_dim and theirs.action_dim == ours.action_dim
    ours.positions = theirs.observations[..., 2:4].clone()
    ours.landmarks = theirs.observations[:, 0, 4:10].view(2, 3, 2) + ours.positions[:, :1]
    for _ in range(25):
        actions = 2 * torch.rand(2, 3, 5) - 1
        for found, expected in zip(ours.step(actions), theirs.step(actions)):
            torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    found = train(seqwm, tmp_path / "run", **SMALL | {"env_id": args.env_id, "env_kwargs": kwargs, "total_timesteps": 150})
    assert all(map(math.isfinite, found.values()))


@pytest.mark.quick
def test_what_cannot_be_run(tmp_path, monkeypatch, team, capsys):
    say = partial(refusal, seqwm, monkeypatch)
    own = partial(say, "--env-id", team, "--env-kwargs")
    assert 'take --env-kwargs \'{"continuous_actions": true}\'' in own('{"discrete": true}')
    assert "actions of one size, not {'front': 2, 'back': 3}" in own('{"sizes": [2, 3]}')
    assert "--env-kwargs {high" in own("{high: 3}")
    assert "unexpected keyword argument 'low'" in own('{"low": 3}')
    assert "has no possible_agents" in say("--env-id", team.replace(":Team", ":Nobody"))
    assert "step() leaves out 'front'" in say("--env-id", team.replace(":Team", ":LastUnseen"), "--output-dir", tmp_path / "last")
    assert "step() must return five dicts" in say("--env-id", team.replace(":Team", ":OneNumber"), "--output-dir", tmp_path / "one")
    assert "front observes 4 numbers, in the first game at most 3" in say("--env-id", team.replace(":Team", ":Growing"), "--output-dir", tmp_path / "more")
    with pytest.raises(ValueError, match="no licence"):  # of the user's own code
        command(seqwm, monkeypatch, "--env-id", team.replace(":Team", ":Raises"))
    for flag in ("--gamma", "--tau"):
        assert f"{flag} 1.5: must be from 0 to 1" in say(flag, 1.5)
    assert "--updates-per-step 0.0: must be above 0" in say("--updates-per-step", 0)
    assert "--learning-rate nan: must be above 0" in say("--learning-rate", "nan")
    assert "--hidden-dim 0: must be at least 1" in say("--hidden-dim", 0)
    assert "rewards are not finite numbers" in say("--env-id", team.replace(":Team", ":Broken"), "--output-dir", tmp_path / "nan")
    assert "must be a multiple of 8" in say("--latent-dim", 20)
    assert "--num-samples 4: elites and those of the actors" in say("--num-samples", 4)
    assert "--total-timesteps 0: must be at least 1" in say("--total-timesteps", 0)
    assert "--env-kwargs: is for tasks of PettingZoo" in say("--env-kwargs", '{"N": 3}', "--output-dir", tmp_path / "kw")
    assert "observations are not finite numbers" in say("--env-id", team.replace(":Team", ":Blind"))
    assert "--learning-starts 0: must be at least" in say("--learning-starts", 0)
    assert "--buffer-size 8: must be at least" in say("--buffer-size", 8)
    words = as_flags(SMALL | {"entropy_coef": 1e39})
    assert "lower --learning-rate" in say(*words, "--output-dir", tmp_path / "run")
    assert not checkpoints(tmp_path / "run") and "no checkpoint" in say("--evaluate", tmp_path / "run")
    assert "cannot change on resume" in say("--resume", tmp_path / "run", "--model", "joint")
    say("--resume", tmp_path / "run")
    assert "run: has no checkpoint, so the run begins at step 0\n" in capsys.readouterr().out
    with monkeypatch.context() as patch:  # a folder envs/ of the user's own
        patch.setitem(sys.modules, "envs.simple_spread", None)
        assert "--env-id simple_spread: needs the folder envs/ of the repository" in say()
    words = as_flags(SMALL | {"env_id": team})
    command(seqwm, monkeypatch, *words, "--output-dir", tmp_path / "team")
    path = tmp_path / "team.py"
    path.write_text(path.read_text().replace("np.array([3.0])", "np.ones(5)"))
    for flag in ("--evaluate", "--resume"):
        assert "the networks of this run do not fit the task" in say(flag, tmp_path / "team")
    assert "--model joint: cannot change with --evaluate" in say("--evaluate", tmp_path / "run", "--model", "joint")
