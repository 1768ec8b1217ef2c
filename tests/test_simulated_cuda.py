"""Every script on a pretend CUDA device, see simulated_cuda.py. The metrics are those of a CPU run,
checkpoints continue on either device, and the host waits as often as benchmarks/speed.md says.
"""

import csv
import functools
import math
import shutil
from pathlib import Path

import pytest
import torch
from control_runs import results
from processes import ROOT, fork
from run_folders import assert_close
from simulated_cuda import compiler

SIMULATED = ROOT / "tests" / "simulated_cuda.py"
WAITS = ROOT / "benchmarks" / "results" / "waits.csv"
# Functions that run at the beginning, in evaluations and for checkpoints only.
SELDOM = {"load_player", "load_teacher", "logprob_gap", "logprob_gaps", "make_game", "make_games", "first_alpha"}
SELDOM |= {"evaluate", "solve", "save_checkpoint", "load_checkpoint", "save_final"}
SELDOM |= {"load_data", "to_episodes", "check_env"}

GROUPS = "--num-prompts-per-step 2 --num-generations 2 --eval-problems 1 "
GROUPS += "--num-generations-eval 0 --eval-steps 0 --max-steps 1 --max-completion-length 17 "
TEAMS = "--num-envs 4 --learning-starts 0 --batch-size 8 --eval-steps 0 "
FIRST = {  # flags of a run with gradients that are not 0: one step, or one of each role
    "grpo": GROUPS,
    "dapo": GROUPS + "--num-prompts-per-step 1 --seed 4",
    "gdpo": GROUPS,
    "hpt": GROUPS,
    "ampo": GROUPS + "--num-replaced 1",
    "opd": GROUPS,
    "unlikeliness": GROUPS + "--method rep_exp --num-generations 4 --bonus-weight 1",
    "nash_preference": GROUPS + "--method nash_mp --num-generations-eval 2 --max-completion-length 33",
    "dr_mas": GROUPS + "--num-prompts-per-step 1 --max-rounds 1 --share-model",
    "igpo": GROUPS + "--num-prompts-per-step 1 --max-turns 2",
    "critic_search": GROUPS + "--num-prompts-per-step 1 --max-turns 2",
    "empg": GROUPS + "--num-prompts-per-step 1 --max-turns 2",
    "arpo": GROUPS + "--num-prompts-per-step 1 --max-turns 2 --branch-probability 1",
    "spiral_rae": "--num-games-per-step 2 --eval-games 2 --eval-opponents start --eval-steps 0 "
    "--max-steps 1 --max-completion-length 5",
    "dipllm": "--num-games-per-step 1 --eval-games 1 --eval-steps 0 --max-steps 1 --search-steps 20 --num-plays 2",
    "advantage_alignment": "--num-games-per-step 2 --eval-games 2 --eval-steps 0 --max-steps 1 --max-completion-length 5",
    "pi_play": GROUPS + "--num-documents-per-step 2 --num-answers 2 --examiner-steps 1 "
    "--student-steps 1 --max-turns 2 --hops 1 --max-steps 2 --seed 2",
    "unimodal_poisson": "--env-id Pendulum-v1 --num-envs 2 --num-steps 110 --num-minibatches 4 "
    "--update-epochs 1 --eval-episodes 1 --total-timesteps 660 --save-steps 220",
    "mdpo": "--env-id Pendulum-v1 --num-envs 2 --num-steps 110 --sgd-steps 3 --eval-episodes 1 "
    "--total-timesteps 660 --save-steps 220",
    "mdpo_off_policy": "--method off_policy --env-id Pendulum-v1 --num-envs 2 --num-steps 8 --sgd-steps 20 "
    "--learning-starts 0 --eval-episodes 1 --total-timesteps 64 --save-steps 16",
    "fm3q": TEAMS + "--hidden-size 8 --embed-dim 4 --total-timesteps 100 --save-steps 60",
    "arac": TEAMS + "--embed-dim 8 --horizon 4 --total-timesteps 60 --save-steps 40",
    "seqwm": "--num-agents 3 --num-envs 4 --learning-starts 8 --batch-size 8 --eval-steps 0 --latent-dim 8 --hidden-dim 8 --horizon 2 "
    "--num-samples 4 --num-policy-samples 2 --num-elites 2 --iterations 2 --eval-episodes 2 --total-timesteps 100 --save-steps 60",
    "meta_dt": "--embed-dim 8 --num-layers 1 --batch-size 4 --world-model-steps 4 --policy-steps 8 --no-prompt-steps 4 "
    "--log-steps 2 --save-steps 4 --eval-steps 0 --eval-episodes 1 --eval-rounds 1",
}
SCRIPTS = {"mdpo_off_policy": "mdpo", "nash_preference_grpo": "nash_preference"}  # other names are those of scripts
LANGUAGE = [name for name in FIRST if "--max-steps" in FIRST[name]]
CONTROL = [name for name in FIRST if name not in LANGUAGE]
SHORT = "--max-completion-length 9 "
CONTINUED = {  # flags with which one more step is made
    "grpo": SHORT + "--max-steps 2 --num-iterations 2 --gradient-checkpointing",
    "gdpo": SHORT + "--max-steps 2 --advantage grpo_batch_norm",
    "hpt": "--max-steps 2 --gate -1",
    "ampo": "--max-steps 2 --rule v2 --loss-type paper",
    "unlikeliness": SHORT + "--max-steps 2",
    "opd": "--max-steps 2 --support student --tail --top-p 0.9",
    "nash_preference": SHORT + "--max-steps 2",
    "dr_mas": SHORT + "--max-steps 2 --normalization global",
    "igpo": "--max-steps 2 --normalization joint --information-gain prob",
    "critic_search": "--max-steps 2 --critic-pool episodes --critic-mix add",
    "empg": "--max-steps 2 --zeta 0",
    "arpo": "--max-steps 2 --advantage hard",
    "spiral_rae": "--max-steps 2 --max-completion-length 5 --baseline role_mean",
    "dipllm": "--max-steps 2 --label weighted --gradient-checkpointing",
    "advantage_alignment": "--max-steps 2 --max-completion-length 5 --advantage marshal_released",
    "pi_play": SHORT + "--max-steps 3 --divergence forward_kl --distill-top-k 4",
}
OTHERS = {  # flags of runs that go other ways
    "nash_preference": GROUPS + SHORT + "--num-generations-eval 2 --method mnpo --max-steps 2 --bf16",
    "nash_preference_grpo": GROUPS + SHORT + "--num-generations-eval 2 --method grpo --beta 0.04",
    "unimodal_poisson": FIRST["unimodal_poisson"] + " --policy beta --eval-episodes 0",
    "mdpo": FIRST["mdpo"] + " --tsallis-q 1.5 --eval-episodes 0",
    "mdpo_off_policy": FIRST["mdpo_off_policy"] + " --tsallis-q 1.5 --eval-episodes 0",
    "fm3q": FIRST["fm3q"] + " --env-id pong --num-pro 1 --eval-games 1",
    "meta_dt": FIRST["meta_dt"] + " --world-model state --prompt released --context episode",
    "arac": FIRST["arac"] + " --env-id graph_confrontation --graph grid_3x3 --opponent self --beta-mode exp",
    "seqwm": FIRST["seqwm"] + " --planner none --model joint --message actions",
}
STEPS = {  # how many of the steps that waits.csv names are in a call
    "grpo": {"16 tokens": 1, "optimizer step": 1},
    "dapo": {"16 tokens": 1, "optimizer step": 2},
    "gdpo": {"16 tokens": 1, "optimizer step": 1},
    "hpt": {"16 tokens": 1, "optimizer step": 1},
    "ampo": {"16 tokens": 1, "optimizer step": 1, "micro-batch": 1},
    "opd": {"16 tokens": 1, "optimizer step": 1},
    "unlikeliness": {"16 tokens": 1, "optimizer step": 1, "micro-batch": 1},
    "nash_preference": {"16 tokens": 3, "optimizer step": 4},
    "dr_mas": {"16 tokens": 1, "optimizer step": 1},
    "igpo": {"16 tokens": 1, "optimizer step": 1, "further turn": 1, "different episode": 1},
    "critic_search": {"16 tokens": 1, "optimizer step": 1, "further turn": 1},
    "empg": {"16 tokens": 1, "optimizer step": 1, "further turn": 1},
    "arpo": {"16 tokens": 1, "optimizer step": 1, "further turn": 1},
    "spiral_rae": {"16 tokens": 0, "optimizer step": 2},
    "dipllm": {"micro-batch": 1, "optimizer step": 4},
    "advantage_alignment": {"16 tokens": 0, "optimizer step": 1},
    "pi_play": {"16 tokens": 1, "further turn": 1},
    "unimodal_poisson": {"environment step": 110, "rollout": 3, "evaluation step": 200},
    "mdpo": {"environment step": 110, "rollout": 3},
    "mdpo_off_policy": {"environment step": 8, "rollout": 4},
    "fm3q": {"logged line": 25},
    "arac": {"logged line": 15, "evaluation step": 4},
    "seqwm": {"logged line": 25, "evaluation step": 25},
    "meta_dt": {"logged line": 6, "evaluation step": 20},
}
pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler for the pretend CUDA device"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="torch has a CUDA device of its own"),
]


def on_device(name: str, *words) -> str:
    """Output of a script that runs on the pretend device."""
    if name in CONTROL:
        words = [*words, "--device", "cuda"]
    process = fork(SIMULATED, SCRIPTS.get(name, name), *words)
    assert process.returncode == 0, process.stdout + process.stderr
    assert " on cuda" in process.stdout or ", cuda" in process.stdout
    return process.stdout


def on_cpu(name: str, *words) -> None:
    if name in CONTROL:
        words = [*words, "--device", "cpu"]
    process = fork(ROOT / "algorithms" / f"{SCRIPTS.get(name, name)}.py", *words)
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A function from a script to the folder of its runs, `device` and `cpu`, and what the first of
    them printed."""

    @functools.cache
    def run(name: str) -> tuple[Path, str]:
        folder = tmp_path_factory.mktemp(name)
        on_cpu(name, *FIRST[name].split(), "--output-dir", folder / "cpu")
        output = on_device(name, *FIRST[name].split(), "--output-dir", folder / "device")
        return folder, output

    return run


@pytest.mark.parametrize("name", FIRST)
def test_metrics_are_those_of_the_cpu(name, runs):
    folder, _ = runs(name)
    found = results(folder / "device")
    assert_close(found, results(folder / "cpu"))
    moved = [value for (_, tag), value in found.items() if "grad_norm" in tag or tag == "losses/kl"]
    assert max(map(abs, moved)) > 0


@pytest.mark.parametrize("name", CONTINUED)
def test_resume_in_bfloat16_on_another_path(name, runs, tmp_path):
    """With a reference model, and an evaluation in the end."""
    shutil.copytree(runs(name)[0] / "device", tmp_path / "run")
    words = [*CONTINUED[name].split(), "--bf16", "--eval-steps", "100"]
    words += ["--beta", "0.04"] if name not in ("opd", "dipllm") else []
    on_device(name, "--resume", tmp_path / "run", *words)
    found = results(tmp_path / "run")
    assert all(map(math.isfinite, found.values()))
    last = max(step for step, _ in found)
    tags = {tag for step, tag in found if step == last}
    for part in ("eval/", "learning_rate", "kl"):
        assert any(part in tag for tag in tags), tags


@pytest.mark.parametrize("name", OTHERS)
def test_other_paths(name, tmp_path):
    on_device(name, *OTHERS[name].split(), "--output-dir", tmp_path)
    assert all(map(math.isfinite, results(tmp_path).values()))


@pytest.mark.parametrize("name", ["grpo", "unimodal_poisson", "mdpo", "mdpo_off_policy", "arac", "meta_dt"])
def test_a_checkpoint_continues_on_the_other_device(name, runs, tmp_path):
    """A language script makes one more step, a control script those after its first checkpoint."""
    folder, _ = runs(name)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for run_dir in (tmp_path / "cpu", tmp_path / "device"):
        (run_dir / "metrics.csv").unlink()
        if name in CONTROL:
            max((run_dir / "checkpoints").iterdir()).unlink()
    words = ["--max-steps", "2"] if name in LANGUAGE else []
    on_cpu(name, "--resume", tmp_path / "device", *words)
    on_device(name, "--resume", tmp_path / "cpu", *words)
    found = results(tmp_path / "cpu")
    if name == "grpo":
        assert_close(found, results(tmp_path / "device"))
    else:
        whole = results(folder / "cpu")
        assert_close(found, {key: whole[key] for key in found})
    assert len(found) > 0


def waits_of(output: str) -> dict[str, int]:
    """How often each function of a script waited, in the call that waited most."""
    table = output.partition("   most\n")[2].partition("\n\n")[0]
    rows = [line.split() for line in table.splitlines()]
    return {name: int(most) for name, _, _, most in rows if int(most) > 0}


def expected_waits(name: str) -> dict[str, int]:
    """The same of waits.csv, from which the table on benchmarks/speed.md is drawn."""
    with WAITS.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if name in row["scripts"].split()]
    expected = {}
    for row in rows:
        steps = STEPS[name].get(row["step"], 0)
        expected[row["function"]] = int(row["waits"]) + steps * int(row["waits_of_a_step"] or 0)
    return {function: waits for function, waits in expected.items() if waits > 0}


@pytest.mark.parametrize("name", FIRST)
def test_waits_are_those_of_the_table(name, runs):
    found = waits_of(runs(name)[1])
    assert {key: value for key, value in found.items() if key not in SELDOM} == expected_waits(name)


PLANTED = """\
import sys
sys.path[:0] = sys.argv.pop(1).split(":")
import simulated_cuda
from algorithms import grpo
original = grpo.policy_loss
grpo.policy_loss = lambda new, old, advantages, **named: original(new, old, advantages.cpu(), **named)
simulated_cuda.run("grpo")
"""


def test_a_cpu_tensor_in_the_update_is_found(tmp_path):
    (tmp_path / "program.py").write_text(PLANTED)
    paths = f"{ROOT}:{SIMULATED.parent}"
    process = fork(tmp_path / "program.py", paths, *FIRST["grpo"].split(), "--output-dir", tmp_path / "run")
    assert process.returncode == 1
    assert "be on the same device" in process.stderr.splitlines()[-1]
