"""The programs of benchmarks/, everything tiny: they run, and compare what they say they compare."""

import importlib
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import tyro
from control_runs import train
from PIL import Image

from algorithms import arac, dr_mas, fm3q, grpo
from benchmarks import about, animate, refiner_team
from benchmarks.machines import gpu, gpu_short, speed_grpo, speed_marl, speed_vllm
from envs.teams import Episode
from envs.two_team import arat_game

ROOT = Path(__file__).resolve().parents[1]


def test_animation(tmp_path):
    """On a cycle shortest paths never catch anybody, so each of three games is shown to its end."""
    train(arac, tmp_path / "run", total_timesteps=64, num_envs=8, learning_starts=32, horizon=4)
    path = tmp_path / "arac.gif"
    animate.main(animate.Args(str(tmp_path / "run"), str(path)))
    with Image.open(path) as picture:
        assert (picture.n_frames, picture.size) == (3 * 5, (560, 330))


def test_refiner_team():
    """The first query is the searcher's, later ones the refiner's."""
    team = refiner_team.load_team(dr_mas.Args(env="search_qa", max_rounds=4), None)
    episode = Episode(team.task.train_problem(0, 1), "router")
    for text in ["<verify>no</verify>", "<search>a</search>"] * 2:
        team.advance([episode], [f"<think>b</think>{text}"])
    assert [agent for agent, _ in episode.calls] == ["router", "searcher", "router", "refiner"]


# --- Speed ----------------------------------------------------------------------------------------


def test_speed_grpo(tmp_path):
    """Without TRL its columns are empty."""
    path = tmp_path / "speed.csv"
    speed_grpo.main(speed_grpo.Args(("few",), 1, str(path), smoke=True))
    table = pd.read_csv(path).set_index("arm")
    assert list(table.index) == ["shipped", "all rows"]
    assert (table.ours_ms > table.rollout_ms).all()


def test_speed_vllm(tmp_path):
    """Without vLLM, which has an environment of its own; the program checks that all write as many tokens."""
    flags = {"contenders": ("ours", "generate"), "prompts": 2, "tokens": (4, 6), "threads": (1,), "dtypes": ("bfloat16",)}
    speed_vllm.main(speed_vllm.Args(**flags, repeats=2, csv=str(tmp_path / "speed.csv")))
    table = pd.read_csv(tmp_path / "speed.csv").set_index(["contender", "workload"])
    assert len(table) == 4 and (table.ratio_median["ours"] == 1).all() and (table.seconds_min > 0).all()
    assert table.ratio_max["generate", "16 x 6"] > 0


def test_speed_marl():
    """Gradient steps for each environment step as its flags say, and rewards of the same tables."""
    args = tyro.cli(fm3q.Args, args=speed_marl.command("vdn", 5, 32, 32, 2048)[1:])
    assert args.num_envs / args.updates_per_step == 5 and args.batch_size == 32
    rewards, _, teams = arat_game("large")
    one = speed_marl.OneGame()
    assert one.n_agents == sum(teams)
    generator = np.random.default_rng(1)
    for number in range(1, speed_marl.HORIZON + 1):
        actions = generator.integers(4, size=6)
        pro, ant = (np.ravel_multi_index(part, (4, 4, 4)) for part in (actions[:3], actions[3:]))
        expected = rewards[one.state, pro, ant].item()
        _, reward, ended, cut, _ = one.step(torch.tensor(actions))
        assert reward == pytest.approx(expected) and not ended
        assert cut == (number == speed_marl.HORIZON)


# --- GPU ------------------------------------------------------------------------------------------


def test_gpu_in_small(tmp_path):
    """A part on the CPU; a row that is repeated is replaced."""
    path = tmp_path / "gpu.csv"
    pd.DataFrame([{"part": "models", "run": "small, 16 x 16"}, {"part": "control"}]).to_csv(path)
    gpu.main(gpu.Args("models", device="cpu", small=True, csv=str(path)))
    control, model = pd.read_csv(path).to_dict("records")
    assert (control["part"], model["part"]) == ("control", "models") and pd.isna(model["error"])
    for name in ("decode_tokens_per_second", "update_tokens_per_second", "peak_memory_gb", "computed_gb", "gap"):
        assert model[name] > 0


def test_gpu_runs_with_an_error(tmp_path, monkeypatch):
    """One fails, one hangs, for one there is no GPU, for one no time, one samples from others' weights: all say so."""
    script = tmp_path / "script.py"
    script.write_text("import sys; sys.exit('one line')")
    assert gpu.in_child([str(script)], 60, "cpu")["error"] == "one line"
    assert gpu.in_child([str(script)], 0, "cpu")["error"] == "stopped after 0 s"
    run = gpu.runs_of("two", "cuda", False)[0]
    assert gpu.measure(run, "", 60, "cuda")["error"].startswith("skipped: needs 2 GPUs")
    assert gpu.measure(run, "", 5, "cpu")["error"].endswith("time of the part is over")
    monkeypatch.setattr(gpu, "in_child", lambda *_: {"error": ""})
    monkeypatch.setattr(gpu, "speeds", lambda _: {"gap": 0.3})
    assert gpu.measure(run, "", 60, "cpu")["error"] == "sampler and learner are 0.300 nats apart"


def test_gpu_short(tmp_path):
    """Decoding beside the plain loop, each call a row; the update's columns; the pages' run, if its model is there."""
    gpu_short.main("decode", "small", str(tmp_path / "gpu.csv"))
    table = pd.read_csv(tmp_path / "gpu.csv")
    assert len(table) == 3 and set(table.part) == {"short"} and (table.ratio > 0).all()
    assert (table.same_rows > 0.5).all(), "bfloat16 rounds otherwise where the cache has another width"
    completions = gpu_short.completions_of(16, 4, 2048)
    args = grpo.Args(advantage="none", micro_batch_tokens=128)
    found = gpu_short.update_columns(gpu_short.model_of("small", torch.float32), completions, args)
    assert found["tokens"] == 64 and found["update_tokens_per_second"] > 0
    page = (about.ROOT / "algorithms" / "README.md").read_text().replace("\\\n", "")
    assert gpu.SMOLLM2.split() == page.split("# CPU\n    python algorithms/grpo.py")[1].split("\n\n")[0].split()


@pytest.mark.parametrize("part", ["short", "defaults", "control", "whole", "models", "two", "lora", "vllm", "trl"])
def test_gpu_flags_exist(part):
    for run in gpu.runs_of(part, "cuda", False):
        if run.writes_rows:
            continue
        script = importlib.import_module(f"algorithms.{'grpo' if '/' in run.script else run.script}")
        assert tyro.cli(script.Args, args=shlex.split(run.flags))
