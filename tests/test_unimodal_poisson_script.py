"""PPO with the unimodal Poisson policy as people run it: files, logs, crashes, every policy and switch, bad input."""

import json
import math
import os
import re
import shutil
import signal
import textwrap
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from processes import ROOT, as_flags, begin_and_interrupt, fork, run
from run_folders import documented_tags, events, table, tag_matches

from algorithms import unimodal_poisson
from algorithms.unimodal_poisson import Args, load_policy, load_run, play

SCRIPT = ROOT / "algorithms" / "unimodal_poisson.py"
PAGE = (ROOT / "algorithms" / "unimodal_poisson.md").read_text(encoding="utf-8")
SMALL = {"env_id": "Pendulum-v1", "num_envs": 2, "num_steps": 128, "num_minibatches": 4, "update_epochs": 2}
SMALL |= {"eval_episodes": 1, "total_timesteps": 256}
LONG = SMALL | {"total_timesteps": 256 * 8, "save_steps": 512, "eval_steps": 1024}
HOPPER = LONG | {"env_id": "Hopper-v5", "num_steps": 64, "total_timesteps": 128 * 8, "save_steps": 256, "eval_steps": 0}
THREE = SMALL | {"total_timesteps": 768, "eval_episodes": 0}
POLICIES = ["poisson", "poisson_repo", "gaussian", "tanh_gaussian", "beta", "categorical", "ordinal", "bang_bang"]
ATOMS = ["poisson", "poisson_repo", "categorical", "ordinal", "bang_bang"]  # the policies over atoms
LOOKS = "train/unimodal_poisson/"


# --- Means -----------------------------------------------------------------------------------------------------------


def train_here(run_dir, **values) -> dict[tuple[int, str], float]:
    """train() in this process with small settings; its metrics."""
    unimodal_poisson.train(Args(**{**SMALL, "output_dir": str(run_dir), **values}))
    return table(run_dir)


def refusal(capsys, code: int = 2, **values) -> str:
    """The one sentence with which train() refuses these flags."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        unimodal_poisson.train(Args(**values))
    errors = capsys.readouterr().err
    assert stopped.value.code == code and errors.startswith("error: ") and errors.count("\n") == 1, errors
    return errors


def column(metrics: dict, tag: str) -> list[float]:
    """Values of a tag, in the order of steps."""
    return [value for (_, name), value in metrics.items() if name == tag]


def assert_same(ours, theirs) -> None:
    """Two nested state_dicts are the same to the bit."""
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
    if isinstance(ours, dict | list):
        for key in ours if isinstance(ours, dict) else range(len(theirs)):
            assert_same(ours[key], theirs[key])
    else:
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


def assert_same_run(run_dir, other) -> None:
    """The same metrics, weights, optimizer, statistics and random numbers to come, to the bit."""
    assert Path(run_dir, "metrics.csv").read_bytes() == Path(other, "metrics.csv").read_bytes()
    assert table(run_dir, "perf.csv").keys() == table(other, "perf.csv").keys()
    (*_, ours), (*_, theirs) = (sorted(Path(folder, "checkpoints").iterdir()) for folder in (run_dir, other))
    assert ours.name == theirs.name
    ours, theirs = torch.load(ours), torch.load(theirs)
    assert ours.keys() == theirs.keys() >= {"agent", "optimizer", "environments", "observation_stats", "random"}
    for found in (ours, theirs):
        for simulator in found["environments"]["simulators"]:
            simulator.pop("mujoco")  # its bytes have addresses and times among them
    assert_same(ours, theirs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder and process of eight uninterrupted batches."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    process = run(SCRIPT, *as_flags(LONG), "--output-dir", run_dir)
    assert process.returncode == 0, process.stderr
    return run_dir, process


@pytest.fixture(scope="module")
def three_batches(tmp_path_factory):
    """Metrics of the first three batches; what switches are compared with."""
    return train_here(tmp_path_factory.mktemp("runs") / "three", **THREE)


# --- The command and what it leaves ----------------------------------------------------------------------------------


def test_command_and_its_files(whole):
    run_dir, process = whole
    assert not re.search("warning|traceback|error", process.stderr, re.IGNORECASE), process.stderr
    progress = [line for line in process.stdout.splitlines() if line.startswith("step")]
    assert len(progress) == 8 and max(map(len, progress)) <= 80
    metrics, perf = table(run_dir), table(run_dir, "perf.csv")
    assert {step for step, tag in metrics if tag.startswith("eval/")} == {0, 1024, 2048}
    batches = [256 * i for i in range(1, 9)]
    for tag in ("losses/policy_loss", "losses/grad_norm", f"{LOOKS}extreme_mass", "charts/learning_rate"):
        assert [step for step, name in metrics if name == tag] == batches
    assert [step for step, name in perf if name == "charts/SPS"] == batches
    assert all(map(math.isfinite, [*metrics.values(), *perf.values()]))
    board = events(run_dir)
    logged = {(event.step, tag): event.value for tag in board.Tags()["scalars"] for event in board.Scalars(tag)}
    assert logged.keys() == (metrics | perf).keys()
    for key, value in (metrics | perf).items():
        assert logged[key] == pytest.approx(value, rel=1e-6), key
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == ["step_000000001536.pt", "step_000000002048.pt"]
    saved = json.loads((run_dir / "args.json").read_text())
    assert {name: saved[name] for name in LONG} == LONG and saved.keys() == Args.__dataclass_fields__.keys()


def test_episodes_in_the_log(whole):
    """Pendulum's are 200 steps, so they end in every second batch of 128 steps, in both environments."""
    metrics = table(whole[0])
    assert [step for step, tag in metrics if tag == "charts/episodic_length"][:2] == [512, 1024]
    assert set(column(metrics, "charts/episodic_length")) == {200.0}
    assert all(-200 * 17 < value < 0 for value in column(metrics, "charts/episodic_return")), "the task's own unit"
    assert f"return {column(metrics, 'charts/episodic_return')[-1]:9.1f}" in whole[1].stdout


def test_tags_are_those_of_the_page(whole):
    logged = {tag for _, tag in [*table(whole[0]), *table(whole[0], "perf.csv")]}
    documented = documented_tags(PAGE)
    assert {tag for tag in logged if not any(tag_matches(row, tag) for row in documented)} == set()
    assert {row for row in documented if not any(tag_matches(row, tag) for tag in logged)} == set()


def test_help_lists_every_flag():
    process = fork(SCRIPT, "--help")
    assert process.returncode == 0 and process.stderr == ""
    for name in Args.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in process.stdout, name


def test_evaluation_of_a_run(whole, capsys):
    """The same episodes as at the end of the training give the same scores."""
    capsys.readouterr()
    scores = unimodal_poisson.train(Args(evaluate=str(whole[0]), eval_episodes=1))
    assert len(scores) == 4
    assert scores == {tag: value for (step, tag), value in table(whole[0]).items() if step == 2048 and tag in scores}
    assert all(f"{tag} {value:.1f}" in capsys.readouterr().out for tag, value in [*scores.items()][:1])


def test_load_policy(whole):
    """As the page shows it: an episode played by hand has the return of the evaluation's first episode."""
    policy, env = load_policy(str(whole[0])), gym.make("Pendulum-v1")
    observation, _ = env.reset(seed=10_001)
    total, over = 0.0, False
    while not over:
        observation, reward, terminated, truncated, _ = env.step(policy(observation))
        total, over = total + reward, terminated or truncated
    returns, _ = play(*load_run(str(whole[0])), 2, True)
    assert total == pytest.approx(returns[0], rel=1e-5) and returns[0] != returns[1]
    action = policy(observation)
    assert env.action_space.contains(action) and np.array_equal(action, policy(observation))
    sampling = load_policy(str(whole[0]), deterministic=False)
    assert len({sampling(observation).item() for _ in range(50)}) > 3, "samples"


# --- Determinism and resuming ----------------------------------------------------------------------------------------


def test_same_seed_same_run_other_seed_another(whole, tmp_path):
    """Here, not in a process of its own, and with fewer evaluations, which must not disturb the training."""
    train_here(tmp_path / "again", **LONG | {"eval_steps": 0})
    lines = (whole[0] / "metrics.csv").read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if b",eval/" not in line or line.startswith(b"2048,")]
    assert len(lines) == len(kept) + 8
    assert (tmp_path / "again" / "metrics.csv").read_bytes() == b"".join(kept)
    other = train_here(tmp_path / "other", seed=2, eval_episodes=0)
    assert other[256, "losses/value_loss"] != table(whole[0])[256, "losses/value_loss"]


def test_kill_9_and_resume(whole, tmp_path, capsys):
    run_dir = tmp_path / "run"
    assert begin_and_interrupt(signal.SIGKILL, "step       768/", SCRIPT, run_dir, **LONG)[0] == -signal.SIGKILL
    saved = max(int(path.stem[5:]) for path in (run_dir / "checkpoints").glob("*.pt"))
    assert 512 <= saved < 2048
    (run_dir / "checkpoints" / "step_000000002048.pt.tmp").write_bytes(b"half a checkpoint")
    with open(run_dir / "metrics.csv", "a") as file:
        file.write("2048,losses/pol")  # half a row
    capsys.readouterr()
    unimodal_poisson.train(Args(resume=str(run_dir)))
    assert len(re.findall("^step ", capsys.readouterr().out, re.MULTILINE)) == (2048 - saved) / 256, "none is repeated"
    assert_same_run(run_dir, whole[0])
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == ["step_000000001536.pt", "step_000000002048.pt"]


def test_kill_9_and_resume_with_mujoco(tmp_path):
    """Hopper falls after 7 steps or so: checkpoints are in the middle of an episode, and episodes end after them."""
    lengths = column(train_here(tmp_path / "whole", **HOPPER), "charts/episodic_length")
    assert len(lengths) == 8 and max(lengths) < 40
    status, _ = begin_and_interrupt(signal.SIGKILL, "step       384/", SCRIPT, tmp_path / "run", **HOPPER)
    assert status == -signal.SIGKILL
    unimodal_poisson.train(Args(resume=str(tmp_path / "run")))
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_terminate_saves_and_resumes(whole, tmp_path, monkeypatch, capsys):
    """The batch in which the signal comes is finished and saved."""
    collect = unimodal_poisson.collect

    def terminate(envs, agent, buffer, times=[]):  # noqa: B006
        times.append(None)
        if len(times) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return collect(envs, agent, buffer)

    monkeypatch.setattr(unimodal_poisson, "collect", terminate)
    run_dir = tmp_path / "run"
    errors = refusal(capsys, 128 + signal.SIGTERM, **LONG | {"save_steps": 10**6}, output_dir=str(run_dir))
    assert errors == f"error: stopped after step 768; continue with --resume {run_dir}\n"
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_000000000768.pt"]
    unimodal_poisson.train(Args(resume=str(run_dir)))
    assert_same_run(run_dir, whole[0])


@pytest.mark.parametrize("policy", ["gaussian", "beta"])
def test_resume_before_and_after_a_checkpoint(policy, tmp_path, monkeypatch):
    """A crash in the first batch leaves a run without a checkpoint; one in the fourth leaves that of the second."""

    def crash(*inputs):
        raise ZeroDivisionError

    values = LONG | {"policy": policy, "num_steps": 32, "save_steps": 128, "total_timesteps": 320, "eval_episodes": 0}
    train_here(tmp_path / "whole", **values)
    collect, args = unimodal_poisson.collect, Args(**values, output_dir=str(tmp_path / "run"))
    for batches in (1, 4):
        left = [collect] * batches
        monkeypatch.setattr(
            unimodal_poisson, "collect", lambda *inputs, left=left: (left.pop() if left else crash)(*inputs)
        )
        with pytest.raises(ZeroDivisionError):
            unimodal_poisson.train(args)
        args = Args(resume=str(tmp_path / "run"))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()][-1].startswith("step_00000000")
    monkeypatch.setattr(unimodal_poisson, "collect", collect)
    unimodal_poisson.train(args)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_resume_of_a_finished_run_changes_nothing(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "run")
    unimodal_poisson.train(Args(resume=str(tmp_path / "run")))
    assert_same_run(tmp_path / "run", whole[0])


def test_damaged_checkpoint(whole, tmp_path, capsys):
    run_dir, newest = tmp_path / "run", tmp_path / "run" / "checkpoints" / "step_000000002048.pt"
    shutil.copytree(whole[0], run_dir)
    with open(newest, "r+b") as file:
        file.truncate(10_000)
    for flag in ("resume", "evaluate"):
        assert f"{newest}: damaged" in refusal(capsys, code=1, **{flag: str(run_dir)})
    newest.write_bytes(b"")
    assert f"{newest}: damaged" in refusal(capsys, code=1, resume=str(run_dir))
    torch.save({"weights": torch.zeros(3)}, newest)
    assert "of another script" in refusal(capsys, code=1, resume=str(run_dir))
    assert (run_dir / "metrics.csv").read_bytes() == (whole[0] / "metrics.csv").read_bytes(), "nothing is destroyed"
    newest.unlink()
    unimodal_poisson.train(Args(resume=str(run_dir)))  # from step 1536
    assert_same_run(run_dir, whole[0])


def test_resume_refuses_changed_flags(whole, capsys):
    before = (whole[0] / "metrics.csv").read_bytes()
    changed = [{"learning_rate": 1e-3}, {"seed": 7}, {"policy": "gaussian"}, {"num_steps": 512}, {"norm_obs": False}]
    for values in [*changed, {"total_timesteps": 4096}, {"env_id": "Hopper-v5"}, {"output_dir": "elsewhere"}]:
        ((name, value),) = values.items()
        errors = refusal(capsys, resume=str(whole[0]), **values)
        assert f"--{name.replace('_', '-')} " in errors and str(value) in errors
    assert (whole[0] / "metrics.csv").read_bytes() == before


def test_evaluation_refuses_changed_flags(whole, capsys):
    """They would do nothing; --eval-episodes and --device may differ."""
    assert "--temperature 2.5, not 1.0" in refusal(capsys, evaluate=str(whole[0]), temperature=1.0, eval_episodes=1)


# --- Policies and switches -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_takes_a_batch(policy, tmp_path, recwarn):
    metrics = train_here(tmp_path / "run", policy=policy)
    assert all(map(math.isfinite, metrics.values()))
    assert metrics[256, "losses/grad_norm"] > 0 and metrics[256, "losses/value_loss"] > 0
    assert ((256, f"{LOOKS}extreme_mass") in metrics) == (policy in ATOMS)
    if policy in ATOMS:  # what each is in the beginning; entropies of a uniform policy over 11 and 2 atoms
        mass, multimodal = metrics[256, f"{LOOKS}extreme_mass"], metrics[256, f"{LOOKS}frac_multimodal"]
        entropy = metrics[256, "losses/entropy"]
        assert (policy, multimodal) != ("poisson", 1) and (policy != "poisson_repo" or (multimodal == 1 and mass > 0.9))
        expected = {"categorical": math.log(11), "bang_bang": math.log(2), "poisson_repo": 0.754}
        assert entropy == pytest.approx(expected.get(policy, entropy), abs=0.05)
        assert (policy == "bang_bang") == (mass == pytest.approx(1))
    assert not [str(warning.message) for warning in recwarn if issubclass(warning.category, UserWarning)]


def test_poisson_stays_unimodal(whole):
    assert set(column(table(whole[0]), f"{LOOKS}frac_multimodal")) == {0.0}


SWITCHES = [
    *({name: False} for name in ("norm_adv", "clip_vloss", "norm_obs", "norm_reward", "bootstrap_truncation")),
    *({name: 0.1} for name in ("gamma", "gae_lambda", "vf_coef", "ent_coef", "max_grad_norm")),
    {"clip_coef": 0.001},
    {"target_kl": 0.0},
    {"num_atoms": 5},
    {"temperature": 1.0},
    {"rate_init": 6.0},
    {"hidden_size": 32},
    {"num_minibatches": 8},
    {"update_epochs": 1},
]


@pytest.mark.parametrize("values", SWITCHES, ids=lambda values: " ".join(as_flags(values)))
def test_switches_change_the_run(values, three_batches, tmp_path):
    """Every one of them does something, and leaves finite numbers."""
    metrics = train_here(tmp_path / "run", **THREE | values)
    assert all(map(math.isfinite, metrics.values())) and metrics.keys() == three_batches.keys()
    losses = [key for key in metrics if key[1].startswith("losses/")]
    assert [metrics[key] for key in losses] != [three_batches[key] for key in losses]
    if "bootstrap_truncation" in values:  # the first time limit is in the second batch
        assert metrics[256, "losses/value_loss"] == three_batches[256, "losses/value_loss"]
        assert metrics[512, "losses/value_loss"] != three_batches[512, "losses/value_loss"]


def test_learning_rate(whole, three_batches, tmp_path):
    """Along a line from the first batch to 0 after the last, or constant."""
    expected = [3e-4 * (1 - i / 8) for i in range(8)]
    assert column(table(whole[0]), "charts/learning_rate") == pytest.approx(expected)
    metrics = train_here(tmp_path / "run", **THREE, anneal_lr=False)
    assert column(metrics, "charts/learning_rate") == [3e-4] * 3
    assert metrics[256, "losses/value_loss"] == three_batches[256, "losses/value_loss"]
    assert metrics[512, "losses/value_loss"] != three_batches[512, "losses/value_loss"]


# --- Tasks of one's own ----------------------------------------------------------------------------------------------


@pytest.fixture
def own_tasks(tmp_path, monkeypatch):
    """A module with the page's task, and the same task with other spaces."""
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "gym.register" in block]
    code += textwrap.dedent("""
        class Seen(Reach):
            metadata = {"render_modes": ["rgb_array"]}
            def __init__(self, render_mode=None):
                self.render_mode = render_mode
            def render(self):
                return np.full((64, 48, 3), 200, np.uint8)

        class Unseen(Seen):
            def render(self):
                raise ImportError("no screen")

        class Unbounded(Reach):
            action_space = gym.spaces.Box(-np.inf, np.inf, (1,))

        class Square(Reach):
            action_space = gym.spaces.Box(-1, 1, (2, 2))

        class Nested(Reach):
            observation_space = gym.spaces.Dict(x=Reach.observation_space, n=gym.spaces.Discrete(3))
            def reset(self, **options):
                return {"x": super().reset(**options)[0], "n": 1}, {}
            def step(self, action):
                x, *others = super().step(action)
                return {"x": x, "n": 2}, *others

        class Broken(Reach):
            def __init__(self):
                raise OSError("the robot\\nis not at home")

        for task in (Seen, Unseen, Unbounded, Square, Nested, Broken):
            gym.register(f"{task.__name__}-v0", task, max_episode_steps=50)
    """)
    (tmp_path / "own_tasks_of_a_test.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    return "own_tasks_of_a_test:"


def test_own_task(own_tasks, tmp_path):
    metrics = train_here(tmp_path / "run", env_id=f"{own_tasks}Reach-v0")
    assert set(column(metrics, "charts/episodic_length")) == {50.0} and (256, "eval/sampled/return_mean") in metrics
    for task in ("Nested", "Unbounded"):  # observations are laid out flat; a Gaussian needs no bounds
        train_here(tmp_path / task, env_id=f"{own_tasks}{task}-v0", policy="gaussian")


def test_own_task_resumes_to_the_bit(own_tasks, tmp_path):
    values = {"env_id": f"{own_tasks}Reach-v0", "num_steps": 32, "save_steps": 64, "eval_episodes": 0}
    train_here(tmp_path / "run", **values)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    (tmp_path / "copy" / "checkpoints" / "step_000000000256.pt").unlink()
    unimodal_poisson.train(Args(resume=str(tmp_path / "copy")))
    assert_same_run(tmp_path / "copy", tmp_path / "run")


@pytest.mark.filterwarnings("ignore:.*render_mode")  # gymnasium, of the task that cannot be rendered
def test_video(own_tasks, tmp_path, capsys):
    values = {"env_id": f"{own_tasks}Seen-v0", "eval_episodes": 0}
    train_here(tmp_path / "run", **values)
    capsys.readouterr()
    unimodal_poisson.train(Args(evaluate=str(tmp_path / "run"), video=True, eval_episodes=0))
    path = tmp_path / "run" / "episode.gif"
    assert str(path) in capsys.readouterr().out and path.read_bytes()[:4] == b"GIF8"
    for task, code, words in (("Unseen", 1, "--video: the task cannot be rendered"), ("Reach", 2, "render_mode")):
        train_here(tmp_path / task, env_id=f"{own_tasks}{task}-v0", eval_episodes=0)
        assert words in refusal(capsys, code, evaluate=str(tmp_path / task), video=True, eval_episodes=0)


# --- Bad input -------------------------------------------------------------------------------------------------------

BAD_FLAGS = [  # flags, parts of the sentence
    ({"env_id": "NoSuchTask-v0"}, ["--env-id NoSuchTask-v0", "cannot be made"]),
    ({"env_id": ""}, ["--env-id ''", "a name"]),
    ({"env_id": "no_such_module:Task-v0"}, ["--env-id no_such_module:Task-v0", "no_such_module"]),
    ({"env_id": "CartPole-v1"}, ["--env-id CartPole-v1", "Discrete(2)", "Box"]),
    ({"num_minibatches": 3}, ["--num-minibatches 3", "256"]),
    ({"num_minibatches": 256}, ["--num-minibatches 256", "256"]),
    ({"num_minibatches": 0}, ["--num-minibatches 0"]),
    ({"total_timesteps": 255}, ["--total-timesteps 255", "256"]),
    ({"policy": "gaussian", "rate_init": 6.0}, ["--rate-init 6.0", "--policy gaussian"]),
    ({"rate_init": 0.0}, ["--rate-init 0.0"]),
    ({"rate_init": math.nan}, ["--rate-init nan"]),
    ({"temperature": 0.0}, ["--temperature 0.0"]),
    ({"temperature": -1.0}, ["--temperature -1.0"]),
    ({"num_atoms": 1}, ["--num-atoms 1", "from 2 to"]),
    ({"learning_rate": math.nan}, ["--learning-rate nan"]),
    ({"learning_rate": math.inf}, ["--learning-rate inf"]),
    ({"learning_rate": -1e-4}, ["--learning-rate -0.0001", "from 0 to"]),
    ({"gamma": 1.01}, ["--gamma 1.01", "0 to 1"]),
    ({"gae_lambda": -0.1}, ["--gae-lambda -0.1", "0 to 1"]),
    ({"clip_coef": -0.2}, ["--clip-coef -0.2"]),
    ({"target_kl": -1.0}, ["--target-kl -1.0"]),
    *(({name: 0}, [f"--{name.replace('_', '-')} 0", "from 1 to"]) for name in ("num_envs", "num_steps", "hidden_size")),
    *(({name: 0}, [f"--{name.replace('_', '-')} 0", "from 1 to"]) for name in ("update_epochs", "num_threads")),
    ({"save_steps": 0}, ["--save-steps 0", "from 1 to"]),
    ({"eval_episodes": -1}, ["--eval-episodes -1", "from 0 to"]),
    ({"eval_steps": -1}, ["--eval-steps -1", "from 0 to"]),
    ({"seed": -1}, ["--seed -1", "from 0 to"]),
    ({"video": True}, ["--video", "--evaluate"]),
]


@pytest.mark.parametrize("values, words", BAD_FLAGS, ids=lambda value: " ".join(map(str, value)))
def test_bad_flags_get_one_sentence(values, words, capsys, tmp_path):
    errors = refusal(capsys, **SMALL | {"output_dir": str(tmp_path / "run")} | values)
    assert all(word in errors for word in words), errors
    assert not (tmp_path / "run").exists(), "nothing is left of a run that never began"


def test_unsuitable_tasks(own_tasks, capsys):
    for policy in POLICIES:
        if policy != "gaussian":
            errors = refusal(capsys, env_id=f"{own_tasks}Unbounded-v0", policy=policy)
            assert f"--policy {policy}: needs bounded actions" in errors
    assert "expected a Box of one dimension" in refusal(capsys, env_id=f"{own_tasks}Square-v0")
    assert "OSError('the robot\\nis not at home')" in refusal(capsys, env_id=f"{own_tasks}Broken-v0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_missing_device(capsys, tmp_path):
    errors = refusal(capsys, **SMALL, device="cuda", output_dir=str(tmp_path / "run"))
    assert "--device cuda" in errors and not (tmp_path / "run").exists()


def test_bad_commands_exit_with_2():
    process = fork(SCRIPT, "--env-id", "NoSuchTask-v0")
    assert process.returncode == 2 and process.stdout == "" and process.stderr.count("\n") == 1
    assert process.stderr.startswith("error: --env-id NoSuchTask-v0: cannot be made")
    process = fork(SCRIPT, "--policy", "poison")
    assert process.returncode == 2
    assert "poison_repo" in process.stderr.replace("poisson", "poison"), "tyro names the choices"


def test_folders_that_are_no_runs(whole, tmp_path, capsys):
    for flag in ("resume", "evaluate"):
        for text in (None, "not JSON", "[]", "null", '{"model_name_or_path": null, "top_p": 1.0}'):
            if text is not None:
                (tmp_path / "args.json").write_text(text)
            assert f"{tmp_path}: not a run folder" in refusal(capsys, **{flag: str(tmp_path)})
        (tmp_path / "args.json").unlink()
    before = (whole[0] / "metrics.csv").read_bytes()
    assert f"--output-dir {whole[0]}: holds a run already" in refusal(capsys, **SMALL, output_dir=str(whole[0]))
    assert (whole[0] / "metrics.csv").read_bytes() == before
    shutil.copy(whole[0] / "args.json", tmp_path)
    assert f"--resume {tmp_path}" in refusal(capsys, evaluate=str(tmp_path)), "no checkpoint yet"


def test_a_loss_that_is_not_a_number(tmp_path, capsys):
    values = SMALL | {"policy": "gaussian", "learning_rate": 2e9, "total_timesteps": 1024, "save_steps": 10**6}
    errors = refusal(capsys, code=1, **values, output_dir=str(tmp_path / "run"))
    assert "not a number" in errors and not [*(tmp_path / "run" / "checkpoints").iterdir()]


# --- Learning --------------------------------------------------------------------------------------------------------


def test_learning(tmp_path):
    """Balancing a pole from 7 steps to hundreds, in 8,192 steps of eight environments."""
    values = {"env_id": "InvertedPendulum-v5", "num_envs": 8, "num_steps": 64, "update_epochs": 8, "save_steps": 10**6}
    values |= {"learning_rate": 3e-3, "rate_init": 6.0, "temperature": 0.5, "total_timesteps": 8192, "eval_episodes": 5}
    metrics = train_here(tmp_path / "run", **values)
    assert metrics[512, "charts/episodic_return"] < 20
    # Seeds 1, 2, 3: 1000 each, which is the most there is, with the likeliest actions; 863, 781, 473 with samples.
    assert metrics[8192, "eval/deterministic/return_mean"] > 400
    assert metrics[8192, "eval/sampled/return_mean"] > 150
