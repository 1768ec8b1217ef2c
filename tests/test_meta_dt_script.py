"""Meta-DT as people run it."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from control_runs import column, command, kill_and_resume, refusal, results, train
from processes import as_flags
from run_folders import assert_tags_of_pages, begin, tags

from algorithms import meta_dt, unimodal_poisson
from envs import cheetah_velocity, point_robot
from envs.point_robot import make_data, save_data

SMALL = {"embed_dim": 8, "num_layers": 1, "batch_size": 4, "window_length": 6, "eval_episodes": 1, "eval_rounds": 2}
SMALL |= {"world_model_steps": 20, "policy_steps": 30, "no_prompt_steps": 10, "log_steps": 5, "save_steps": 10, "eval_steps": 0}


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Of a small run: six tasks of Point-Robot and two new ones."""
    folder = tmp_path_factory.mktemp("data") / "points"
    save_data(make_data(1, 6, 2, 5), folder)
    return SMALL | {"data": str(folder), "env_id": "point_robot"}


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    return run_dir, begin(meta_dt, run_dir, **flags)


def test_command_and_its_files(whole):
    run_dir, output = whole
    progress = [line for line in output.splitlines() if line.startswith("step")]
    assert len(progress) == 10 and max(map(len, progress)) <= 80
    assert [line.endswith(" left") for line in progress] == [False] * 4 + [True] * 6
    metrics = results(run_dir)
    assert [step for step, name in metrics if name == "losses/world_model_loss"] == [5, 10, 15, 20]
    assert [step for step, name in metrics if name == "losses/policy_loss"] == [25, 30, 35, 40, 45, 50]
    assert all(map(math.isfinite, metrics.values()))
    for part in ("new", "train"):
        found = {name: metrics[50, f"eval/{part}/{name}_return"] for name in ("zero_shot", "few_shot", "optimal", "target")}
        assert max(found["zero_shot"], found["few_shot"], found["target"]) < found["optimal"] < 0


def test_tags_are_those_of_the_page(whole):
    assert_tags_of_pages(tags(whole[0]), "meta_dt")


@pytest.mark.parametrize("number", [1, 4, 8])
def test_kill_and_resume(number, whole, flags, tmp_path, monkeypatch):
    """Before the first checkpoint, in the phase of the world model, and in that of the policy."""
    kill_and_resume(meta_dt, number, whole[0], tmp_path / "run", monkeypatch, flags)


def test_evaluations_change_nothing_and_repeat(whole, flags, tmp_path, monkeypatch, capsys):
    run_dir = whole[0]
    expected = results(run_dir)
    found = train(meta_dt, tmp_path / "run", **flags | {"eval_steps": 10})
    assert len(column(found, "eval/new/few_shot_return")) == 3
    assert {key: found[key] for key in expected} == expected
    scores = command(meta_dt, monkeypatch, "--evaluate", run_dir)
    assert scores == {tag: value for (step, tag), value in expected.items() if "eval/" in tag}
    other = command(meta_dt, monkeypatch, "--evaluate", run_dir, "--target-return", -9)
    assert other["eval/new/target_return"] == -9
    command(meta_dt, monkeypatch, "--resume", run_dir)  # of a finished run: only the evaluation again
    assert "whole: has 50 steps already; a larger --policy-steps goes on\n" in capsys.readouterr().out
    assert results(run_dir) == expected


def test_a_longer_run_goes_on_from_a_shorter_one(whole, flags, tmp_path, monkeypatch):
    train(meta_dt, tmp_path / "run", **flags | {"policy_steps": 10})
    command(meta_dt, monkeypatch, "--resume", tmp_path / "run", "--policy-steps", 30)
    found = results(tmp_path / "run")
    assert {key: found[key] for key in results(whole[0])} == results(whole[0])


SWITCHES = [{"context": "episode"}, {"context": "goal"}, {"context": "none"}, {"prompt": "released"}, {"prompt": "random"}]
SWITCHES += [{"few_shot": "recorded"}, {"prompt": "none"}, {"world_model": "state"}, {"horizon": 3}, {"prompt_length": 3}, {"return_scale": 10.0}]


@pytest.mark.quick
@pytest.mark.parametrize("values", SWITCHES, ids=str)
def test_switches_change_the_run(values, whole, flags, tmp_path):
    found = train(meta_dt, tmp_path, **flags | values | {"save_steps": 0})
    assert all(map(math.isfinite, found.values()))
    changed = "eval/new/few_shot_return" if "few_shot" in values else "losses/policy_loss"
    assert found[50, changed] != results(whole[0])[50, changed]
    assert ((50, "eval/new/few_shot_return") in found) == (values != {"prompt": "none"})


def test_what_nobody_looks_at_is_not_trained(flags, tmp_path):
    """Prompt-DT has no world model, and its length or seed of steps does not matter."""
    plain = flags | {"context": "none", "prompt": "random", "save_steps": 0}
    found = train(meta_dt, tmp_path / "a", **plain)
    assert {step for step, _ in found} == {5, 10, 15, 20, 25, 30}
    assert not column(found, "losses/world_model_loss")
    assert found == train(meta_dt, tmp_path / "b", **plain | {"world_model_steps": 500})


OWN = """
import numpy as np


class Levers:
    '''Pull the lever to the height of the task; the episode ends when it is there.'''

    def __init__(self, tasks):
        self.tasks = tasks

    def reset(self, seed):
        self.height = np.random.default_rng(seed).uniform(-1, 1, (len(self.tasks), 1))
        return self.height.copy()

    def step(self, actions):
        self.height += actions
        distance = np.abs(self.height - self.tasks)[:, 0]
        return self.height.copy(), -distance, distance < 0.05


class Broken(Levers):
    def step(self, actions):
        return super().step(actions)[:2]


class Lost(Levers):
    def reset(self, seed):
        return super().reset(seed) * np.nan

    def step(self, actions):
        super().reset(0)
        return super().step(np.zeros_like(self.height))


class Gymnasium(Levers):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed), {}


class Info(Levers):
    def reset(self, seed=None):
        return super().reset(seed), {}


class Alone(Levers):
    def __init__(self):
        pass


class Two(Levers):
    def step(self, actions, others):
        pass


class Best(Levers):
    def best_returns(self):
        return 0


class Counted(Levers):
    def best_returns(self):
        return np.arange(len(self.tasks))


class Fails(Levers):
    def reset(self, seed):
        return seed + "1"
"""


@pytest.fixture
def own(tmp_path):
    """Data and environment of one's own: episodes of 10 to 19 steps."""
    (tmp_path / "own.py").write_text(OWN)
    random = np.random.default_rng(0)
    for part, count in (("train", 5), ("new", 2)):
        (tmp_path / "data" / part).mkdir(parents=True)
        for i in range(count):
            heights, actions, dones = [], [], []
            for _ in range(6):
                length = int(random.integers(10, 20))
                actions.append(random.uniform(-2, 2, (length, 1)))
                heights.append(np.cumsum(np.concatenate([[[0.0]], actions[-1]]), 0))
                dones.append(np.arange(length) == length - 1)
            task = random.uniform(-1, 1, 1)
            following = np.concatenate([x[1:] for x in heights])
            steps = {"observations": np.concatenate([x[:-1] for x in heights]), "next_observations": following}
            steps |= {"actions": np.concatenate(actions), "dones": np.concatenate(dones)}
            steps["rewards"] = -np.abs(following - task)[:, 0]
            np.savez(tmp_path / "data" / part / f"{i}.npz", task=task, **steps)
    return SMALL | {"data": str(tmp_path / "data"), "env_id": f"{tmp_path}/own.py:Levers"}


def test_own_data_and_environment(own, tmp_path, monkeypatch):
    found = train(meta_dt, tmp_path / "run", **own)
    assert found[50, "eval/new/few_shot_return"] < 0
    assert not column(found, "eval/new/optimal_return")
    found = train(meta_dt, tmp_path / "none", **own | {"env_id": "none"})
    assert {tag for _, tag in found if tag.startswith("eval/")} == {f"eval/{part}/world_model_error" for part in ("new", "train")}
    found = train(meta_dt, tmp_path / "counted", **own | {"env_id": f"{tmp_path}/own.py:Counted"})
    assert found[50, "eval/train/optimal_return"] == 2 and found[50, "eval/new/optimal_return"] == 5.5


SENTENCES = {"Broken": "step gives no (observations", "No": "no function", "Info": "reset gives tuple"}
SENTENCES |= {"Gymnasium": "the call reset(seed) must", "Alone": "the call CLASS(tasks) must", "Two": "the call step(actions) must"}
SENTENCES |= {"Best": "best_returns gives (), expected (2,)", "Lost": "its observations are not finite"}


@pytest.mark.parametrize("name", SENTENCES)
def test_an_environment_that_does_not_fit(name, own, tmp_path, monkeypatch):
    words = as_flags(own | {"env_id": f"{tmp_path}/own.py:{name}"})
    assert SENTENCES[name] in refusal(meta_dt, monkeypatch, *words, "--output-dir", tmp_path / "bad")


def test_errors_inside_an_environment_are_its_own(own, tmp_path):
    with pytest.raises(TypeError, match="unsupported operand"):
        train(meta_dt, tmp_path / "bad", **own | {"env_id": f"{tmp_path}/own.py:Fails"})


def test_what_cannot_be_run(whole, flags, tmp_path, monkeypatch):
    assert "--context goal: cannot change" in refusal(meta_dt, monkeypatch, "--resume", whole[0], "--context", "goal")
    assert "holds a run" in refusal(meta_dt, monkeypatch, *as_flags(flags), "--output-dir", whole[0])
    assert "expected point_robot" in refusal(meta_dt, monkeypatch, "--env-id", "ant")
    assert "--env-id cheetah_velocity: needs --data" in refusal(meta_dt, monkeypatch, "--env-id", "cheetah_velocity")
    for flag, value in (("horizon", 0), ("save-steps", -1), ("eval-steps", -1)):
        assert f"--{flag} {value}: must be" in refusal(meta_dt, monkeypatch, f"--{flag}", value)
    assert "--eval-episodes 0: must be" in refusal(meta_dt, monkeypatch, "--evaluate", whole[0], "--eval-episodes", 0)
    values = as_flags(flags | {"learning_rate": 1e30})
    assert "not finite" in refusal(meta_dt, monkeypatch, *values, "--output-dir", tmp_path)
    words = as_flags(flags | {"env_id": "cheetah_velocity"})
    assert "the data ask for (2, 2)" in refusal(meta_dt, monkeypatch, *words, "--output-dir", tmp_path / "run")
    assert "needs --env-id point_robot, " in refusal(meta_dt, monkeypatch, *as_flags(flags | {"env_id": None}))
    words = [*as_flags(flags), "--output-dir", tmp_path / "run"]
    for flag, value in (("return-scale", 0.0), ("return-scale", -1.0), ("learning-rate", 0.0)):
        assert f"--{flag} {value}: must be above 0" in refusal(meta_dt, monkeypatch, *words, f"--{flag}", value)
    assert "--dropout 1.0: must be at least 0" in refusal(meta_dt, monkeypatch, *words, "--dropout", 1.0)
    words += ["--prompt", "none", "--few-shot", "recorded"]
    assert "--few-shot recorded: no effect" in refusal(meta_dt, monkeypatch, *words)


def test_prompts_that_a_run_can_be_scored_with(whole, flags, tmp_path, monkeypatch, capsys):
    """Any if it has learned from prompts and has a world model, or none."""
    scores = command(meta_dt, monkeypatch, "--evaluate", whole[0], "--prompt", "random")
    shown = capsys.readouterr().out
    assert all(f"{part}/few_shot_return {scores[f'eval/{part}/few_shot_return']:.2f}" in shown for part in ("new", "train"))
    assert "eval/new/few_shot_return" not in command(meta_dt, monkeypatch, "--evaluate", whole[0], "--prompt", "none")
    for context, prompt, other in (("none", "random", "self_guided"), ("running", "none", "random")):
        run_dir = tmp_path / context
        train(meta_dt, run_dir, **flags | {"context": context, "prompt": prompt, "policy_steps": 5})
        sentence = f"--prompt {other}: cannot change with --evaluate, the run began with {prompt}"
        assert sentence in refusal(meta_dt, monkeypatch, "--evaluate", run_dir, "--prompt", other)
        if prompt != "none":
            assert "has not learned from prompts (--no-prompt-steps 10)" in refusal(meta_dt, monkeypatch, "--evaluate", run_dir)
        command(meta_dt, monkeypatch, "--evaluate", run_dir, "--prompt", "none")


def test_a_run_without_a_policy_is_not_scored(flags, tmp_path, monkeypatch):
    train(meta_dt, tmp_path / "run", **flags | {"policy_steps": 0})
    command(meta_dt, monkeypatch, "--evaluate", tmp_path / "run")  # the world model alone was wanted
    path = tmp_path / "run" / "args.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"policy_steps": 5}))
    for words in ([], ["--prompt", "none"], ["--world-model-steps", 5]):
        assert "stopped at step 20, before" in refusal(meta_dt, monkeypatch, "--evaluate", tmp_path / "run", *words)


def test_scores_on_data_of_other_sizes(whole, tmp_path, monkeypatch):
    """Shorter episodes are padded, and played as short; longer ones and other tasks are refused."""
    data = {"long": make_data(1, 2, 1, 2), "wide": make_data(1, 2, 1, 2)}
    for length in (8, 25):
        monkeypatch.setattr(point_robot, "NUM_STEPS", length)
        data["short" if length == 8 else "long"] = make_data(1, 2, 1, 2)
    for file in data["wide"]["train"] + data["wide"]["new"]:
        file["actions"] = file["actions"][:, :1]
    for name, files in data.items():
        save_data(files, tmp_path / name)
    played = []
    play = meta_dt.play
    with monkeypatch.context() as patch:
        patch.setattr(meta_dt, "play", lambda *given: played.append(play(*given)) or played[-1])
        command(meta_dt, patch, "--evaluate", whole[0], "--data", tmp_path / "short")
    assert len(played) == 3 and all((episodes.lengths == 8).all() for episodes in played)
    for name, sentence in (("long", "up to 25 steps, the run knows at most 20"), ("wide", "actions of 1 numbers, the run has learned from 2")):
        assert sentence in refusal(meta_dt, monkeypatch, "--evaluate", whole[0], "--data", tmp_path / name)


def test_a_window_longer_than_all_episodes(flags, tmp_path, monkeypatch):
    """It is cut to them, and the command that began the run continues it."""
    values = flags | {"policy_steps": 10, "world_model_steps": 5}
    expected = train(meta_dt, tmp_path / "whole", **values | {"window_length": 20})
    assert train(meta_dt, tmp_path / "run", **values | {"window_length": 30}) == expected
    command(meta_dt, monkeypatch, *as_flags(values | {"window_length": 30}), "--resume", tmp_path / "run")
    assert results(tmp_path / "run") == expected


def test_no_evaluations(flags, tmp_path, capsys):
    """Nor their world model's errors, nor an empty line where there is nothing to show."""
    values = flags | {"policy_steps": 5, "world_model_steps": 5, "save_steps": 0}
    found = train(meta_dt, tmp_path / "run", **values | {"eval_episodes": 0})
    assert not [tag for _, tag in found if "eval/" in tag]
    assert "--no-prompt-steps 10: the run ends before" in capsys.readouterr().out
    values |= {"policy_steps": 8, "no_prompt_steps": 9}  # 10 steps, in multiples of 5
    train(meta_dt, tmp_path / "none", **values | {"context": "none", "prompt": "random", "env_id": "none"})
    shown = capsys.readouterr().out
    assert "\n\n" not in shown and "the run ends before" not in shown


def test_learning(flags, tmp_path):
    """With the goal given: from -20, which is standing still, to more than half of the way (-7 to -10 in six seeds)."""
    values = flags | {"context": "goal", "prompt": "none", "embed_dim": 32, "batch_size": 16, "window_length": 20}
    values |= {"policy_steps": 400, "log_steps": 50, "save_steps": 0, "warmup_steps": 50, "learning_rate": 3e-3}
    found = train(meta_dt, tmp_path / "run", **values)
    step = max(step for step, _ in found)
    assert found[step, "eval/train/zero_shot_return"] > -13


def test_cheetah_data_and_run(tmp_path, monkeypatch):
    """From saved policies to a run. Episodes start apart. Rewards are those of gymnasium's own numbers, at each task's target."""
    ppo = {"num_envs": 2, "num_steps": 64, "num_minibatches": 2, "total_timesteps": 128}
    train(unimodal_poisson, tmp_path / "ppo", **ppo | {"eval_episodes": 0})
    parts = []
    record = cheetah_velocity.record
    monkeypatch.setattr(cheetah_velocity, "record", lambda *given: parts.append(record(*given)) or parts[-1])
    cheetah_velocity.main([str(tmp_path / "ppo")] * 2, str(tmp_path / "data"), num_train=2, num_new=1, num_episodes=2)
    assert len(np.unique(np.concatenate([part["observations"][:, 0] for part in parts]), axis=0)) == 4
    file = dict(np.load(tmp_path / "data" / "train" / "001.npz"))
    assert file["observations"].shape == (400, 17) and np.flatnonzero(file["dones"]).tolist() == [199, 399]
    for folder, sentence in ((tmp_path / "data", "no args.json"), (tmp_path / "other", "not a run of unimodal_poisson"), (tmp_path / "early", "no checkpoint")):
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / "args.json").write_text('{"horizon": 4}')
        (tmp_path / "early").mkdir(exist_ok=True)
        (tmp_path / "early" / "args.json").write_text((tmp_path / "ppo" / "args.json").read_text())
        with pytest.raises(SystemExit, match=sentence):
            cheetah_velocity.main([str(tmp_path / "ppo"), str(folder)], str(tmp_path / "more"))
    with pytest.raises(SystemExit, match="train holds data; take another folder"):
        cheetah_velocity.main(["nothing"], str(tmp_path / "data"))
    envs = cheetah_velocity.CheetahVelocity(np.array([[0.5], [2.0]]))
    envs.reset(0)
    before = [env.unwrapped.data.qpos[0] for env in envs.envs.envs]
    actions = np.random.default_rng(0).uniform(-1, 1, (2, 6))
    _, rewards, _ = envs.step(actions)
    for i, target in enumerate((0.5, 2.0)):
        env = envs.envs.envs[i].unwrapped
        speed = (env.data.qpos[0] - before[i]) / env.dt
        assert rewards[i] == pytest.approx(-abs(speed - target) - 0.05 * np.square(actions[i]).sum(), rel=1e-4)
    values = SMALL | {"world_model_steps": 5, "policy_steps": 5, "no_prompt_steps": 0, "eval_rounds": 1}
    found = train(meta_dt, tmp_path / "run", **values | {"data": str(tmp_path / "data"), "env_id": "cheetah_velocity"})
    assert -200 * 6 < found[10, "eval/new/few_shot_return"] < 0


@pytest.mark.quick
def test_a_run_is_scored_on_its_own_scales(whole, flags, tmp_path, monkeypatch, capsys):
    """On other data the networks see what they learned to see; other networks are refused."""
    run_dir = whole[0]
    other = make_data(2, 3, 2, 4)
    for task in other["train"]:
        task["rewards"] = 7 * task["rewards"]
    save_data(other, tmp_path / "other")
    args = replace(meta_dt.Args(**flags), evaluate=str(run_dir), data=str(tmp_path / "other"))
    saved = meta_dt.load_checkpoint(run_dir, torch.device("cpu"))["agent"]
    seen = []
    monkeypatch.setattr(meta_dt, "evaluate", lambda agent, data, make_env, args: seen.append((agent, data)) or {})
    meta_dt.train(args)
    agent, data = seen[0]
    for name in meta_dt.SCALES:
        assert torch.equal(getattr(agent, name), saved[name]) and torch.equal(data.scales[name], saved[name])
    copy = tmp_path / "run"  # also when it is resumed
    shutil.copytree(run_dir, copy)
    monkeypatch.setattr(meta_dt, "read_folder", lambda folder, read=meta_dt.read_folder: read(tmp_path / "other" / folder.name))
    meta_dt.train(meta_dt.Args(**flags, resume=str(copy)))
    agent, data = seen[1]
    for name in meta_dt.SCALES:
        assert torch.equal(getattr(agent, name), saved[name]) and torch.equal(data.scales[name], saved[name])
    assert "--embed-dim 16: cannot change with --evaluate" in refusal(meta_dt, monkeypatch, "--evaluate", run_dir, "--embed-dim", 16)
    assert meta_dt.spread(np.ones(5)) == 1 and meta_dt.spread(np.arange(2.0)) == 0.5 + 1e-6
