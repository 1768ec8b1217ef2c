"""PPO with the unimodal Poisson policy as people run it: files, logs, crashes, policies, switches, own tasks."""

import json
import math
import re
import signal
import textwrap

import gymnasium as gym
import pytest
from control_runs import column, refusal, stop_and_resume, train
from processes import ROOT, as_flags, run
from run_folders import documented_tags, table, tag_matches

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
    return train(unimodal_poisson, tmp_path_factory.mktemp("runs") / "three", **THREE)


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
    # Pendulum's episodes are 200 steps, so they end in every second batch of 128 steps, in both environments
    assert [step for step, tag in metrics if tag == "charts/episodic_length"][:2] == [512, 1024]
    assert set(column(metrics, "charts/episodic_length")) == {200.0}
    assert all(-200 * 17 < value < 0 for value in column(metrics, "charts/episodic_return")), "the task's own unit"
    assert set(column(metrics, f"{LOOKS}frac_multimodal")) == {0.0}
    assert column(metrics, "charts/learning_rate") == pytest.approx([3e-4 * (1 - i / 8) for i in range(8)])
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == ["step_000000001536.pt", "step_000000002048.pt"]
    saved = json.loads((run_dir / "args.json").read_text())
    assert {name: saved[name] for name in LONG} == LONG and saved.keys() == Args.__dataclass_fields__.keys()


def test_tags_are_those_of_the_page(whole):
    logged = {tag for _, tag in [*table(whole[0]), *table(whole[0], "perf.csv")]}
    documented = documented_tags(PAGE)
    assert {tag for tag in logged if not any(tag_matches(row, tag) for row in documented)} == set()
    assert {row for row in documented if not any(tag_matches(row, tag) for tag in logged)} == set()


def test_evaluation_of_a_run(whole, capsys):
    """The same episodes as at the end of the training give the same scores."""
    capsys.readouterr()
    scores = unimodal_poisson.train(Args(evaluate=str(whole[0]), eval_episodes=1))
    assert len(scores) == 4
    assert scores == {tag: value for (step, tag), value in table(whole[0]).items() if step == 2048 and tag in scores}
    printed = capsys.readouterr().out
    assert all(f"{tag} {value:.1f}" in printed for tag, value in scores.items())


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
    sampling = load_policy(str(whole[0]), deterministic=False)
    assert len({sampling(observation).item() for _ in range(50)}) > 3, "samples"


# --- Determinism and resuming ----------------------------------------------------------------------------------------


def test_same_seed_same_run_other_seed_another(whole, tmp_path, capsys):
    """Here, not in a process of its own, and with fewer evaluations, which must not disturb the training."""
    again = train(unimodal_poisson, tmp_path / "again", **LONG | {"eval_steps": 0})
    expected = table(whole[0])
    assert again.keys() < expected.keys() and all(expected[key] == value for key, value in again.items())
    other = train(unimodal_poisson, tmp_path / "other", **SMALL | {"seed": 2, "eval_episodes": 0})
    assert other[256, "losses/value_loss"] != expected[256, "losses/value_loss"]
    errors = refusal(unimodal_poisson, capsys, 2, **SMALL, output_dir=str(tmp_path / "other"))
    assert "holds a run already" in errors and table(tmp_path / "other") == other


@pytest.mark.parametrize("number, step", [(signal.SIGKILL, 256), (signal.SIGKILL, 768), (signal.SIGTERM, 768)])
def test_stop_and_resume(number, step, whole, tmp_path, capsys):
    """Without a checkpoint yet the run begins anew."""
    stop_and_resume(unimodal_poisson, number, step, whole[0], tmp_path / "run", capsys, LONG)


def test_stop_and_resume_with_mujoco(tmp_path, capsys):
    """Hopper falls after 7 steps or so: checkpoints are in the middle of an episode, and episodes end after them."""
    lengths = column(train(unimodal_poisson, tmp_path / "whole", **HOPPER), "charts/episodic_length")
    assert len(lengths) == 8 and max(lengths) < 40
    stop_and_resume(unimodal_poisson, signal.SIGKILL, 384, tmp_path / "whole", tmp_path / "run", capsys, HOPPER)


# --- Policies and switches -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_takes_a_batch(policy, tmp_path):
    metrics = train(unimodal_poisson, tmp_path / "run", **SMALL, policy=policy)
    assert all(map(math.isfinite, metrics.values())) and metrics[256, "losses/grad_norm"] > 0
    assert ((256, f"{LOOKS}extreme_mass") in metrics) == (policy in ATOMS)
    entropy = metrics[256, "losses/entropy"]  # in the beginning that of a uniform policy over 11 and 2 atoms
    expected = {"categorical": math.log(11), "bang_bang": math.log(2), "poisson_repo": 0.754}
    assert entropy == pytest.approx(expected.get(policy, entropy), abs=0.05)


def test_a_loss_that_is_not_a_number(tmp_path, capsys):
    values = SMALL | {"policy": "gaussian", "learning_rate": 2e9, "total_timesteps": 1024, "save_steps": 10**6}
    errors = refusal(unimodal_poisson, capsys, 1, **values, output_dir=str(tmp_path / "run"))
    assert "not a number" in errors and not [*(tmp_path / "run" / "checkpoints").iterdir()]


SWITCHES = [{x: False} for x in ("norm_adv", "clip_vloss", "norm_obs", "norm_reward", "bootstrap_truncation", "anneal_lr")]
SWITCHES += [{name: 0.1} for name in ("gamma", "gae_lambda", "vf_coef", "ent_coef", "max_grad_norm")]
SWITCHES += [{"clip_coef": 0.001}, {"target_kl": 0.0}, {"num_atoms": 5}, {"temperature": 1.0}, {"rate_init": 6.0}]
SWITCHES += [{"hidden_size": 32}, {"num_minibatches": 8}, {"update_epochs": 1}]


@pytest.mark.parametrize("values", SWITCHES, ids=lambda values: " ".join(as_flags(values)))
def test_switches_change_the_run(values, three_batches, tmp_path):
    """Every one of them does something, and leaves finite numbers."""
    metrics = train(unimodal_poisson, tmp_path / "run", **THREE | values)
    assert all(map(math.isfinite, metrics.values())) and metrics.keys() == three_batches.keys()
    losses = [key for key in metrics if key[1].startswith("losses/")]
    assert [metrics[key] for key in losses] != [three_batches[key] for key in losses]


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

        class Unbounded(Reach):
            action_space = gym.spaces.Box(-np.inf, np.inf, (1,))

        class Nested(Reach):
            observation_space = gym.spaces.Dict(x=Reach.observation_space, n=gym.spaces.Discrete(3))
            def reset(self, **options):
                return {"x": super().reset(**options)[0], "n": 1}, {}
            def step(self, action):
                x, *others = super().step(action)
                return {"x": x, "n": 2}, *others

        for task in (Seen, Unbounded, Nested):
            gym.register(f"{task.__name__}-v0", task, max_episode_steps=50)
    """)
    (tmp_path / "own_tasks_of_a_test.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    return "own_tasks_of_a_test:"


def test_own_task(own_tasks, tmp_path):
    metrics = train(unimodal_poisson, tmp_path / "run", **SMALL | {"env_id": f"{own_tasks}Reach-v0"})
    assert set(column(metrics, "charts/episodic_length")) == {50.0} and (256, "eval/sampled/return_mean") in metrics
    for task in ("Nested", "Unbounded"):  # observations are laid out flat; a Gaussian needs no bounds
        values = SMALL | {"env_id": f"{own_tasks}{task}-v0", "policy": "gaussian"}
        train(unimodal_poisson, tmp_path / task, **values)


def test_video(own_tasks, tmp_path, capsys):
    train(unimodal_poisson, tmp_path / "run", **SMALL | {"env_id": f"{own_tasks}Seen-v0", "eval_episodes": 0})
    capsys.readouterr()
    unimodal_poisson.train(Args(evaluate=str(tmp_path / "run"), video=True, eval_episodes=0))
    path = tmp_path / "run" / "episode.gif"
    assert str(path) in capsys.readouterr().out and path.read_bytes()[:4] == b"GIF8"


def test_unbounded_actions_need_a_gaussian(own_tasks, capsys):
    for policy in ("poisson", "tanh_gaussian", "beta"):
        errors = refusal(unimodal_poisson, capsys, 2, env_id=f"{own_tasks}Unbounded-v0", policy=policy)
        assert f"--policy {policy}: needs bounded actions" in errors


# --- Learning --------------------------------------------------------------------------------------------------------


def test_learning(tmp_path):
    """Balancing a pole from 7 steps to hundreds, in 8,192 steps of eight environments."""
    values = {"env_id": "InvertedPendulum-v5", "num_envs": 8, "num_steps": 64, "update_epochs": 8, "save_steps": 10**6}
    values |= {"learning_rate": 3e-3, "rate_init": 6.0, "temperature": 0.5, "total_timesteps": 8192, "eval_episodes": 5}
    metrics = train(unimodal_poisson, tmp_path / "run", **SMALL | values)
    assert metrics[512, "charts/episodic_return"] < 20
    # Seeds 1, 2, 3: 1000 each, which is the most there is, with the likeliest actions; 863, 781, 473 with samples.
    assert metrics[8192, "eval/deterministic/return_mean"] > 400
    assert metrics[8192, "eval/sampled/return_mean"] > 150
