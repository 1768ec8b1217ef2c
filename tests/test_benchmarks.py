"""The programs of benchmarks/, everything tiny: they run, and compare what they say they compare."""

import importlib
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import tyro

from algorithms import dr_mas, fm3q, grpo
from benchmarks import about, refiner_team
from benchmarks.machines import gpu, gpu_short, speed_marl
from envs.teams import Episode
from envs.two_team import arat_game

ROOT = Path(__file__).resolve().parents[1]


def test_refiner_team():
    """The first query is the searcher's, later ones the refiner's."""
    team = refiner_team.load_team(dr_mas.Args(env="search_qa", max_rounds=4), None)
    episode = Episode(team.task.train_problem(0, 1), "router")
    for text in ["<verify>no</verify>", "<search>a</search>"] * 2:
        team.advance([episode], [f"<think>b</think>{text}"])
    assert [agent for agent, _ in episode.calls] == ["router", "searcher", "router", "refiner"]


# --- Speed ----------------------------------------------------------------------------------------


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
