"""Mistakes that people make, and the one sentence that each of them gets."""

import importlib
import json
import shlex
import shutil
import sys

import pytest
from processes import ROOT

LANGUAGE = "--max-steps 1 --eval-steps 0 --save-steps 0 --max-completion-length 8"
OWN = "--dataset train.jsonl --reward own.py:"
SERVER = "--retriever-url http://127.0.0.1:1/x"
MISTAKES = [  # script, words of the command line, part of the sentence
    ("grpo", "--dataset nothing.jsonl --reward own.py:ones", "nothing.jsonl: no such file"),
    ("grpo", "--dataset broken.jsonl --reward own.py:ones", "broken.jsonl, line 3: not JSON, Expecting value: column 13"),
    ("grpo", "--dataset keyless.jsonl --reward own.py:ones", "keyless.jsonl, line 1: "),
    ("grpo", "--dataset list.json --reward own.py:ones", "list.json, row 2: found ['Who?'], expected names and values"),
    ("grpo", "--dataset hub:none/such:main:train --reward own.py:ones", "hub:none/such:main:train: cannot be read (Couldn't reach"),
    ("grpo", "--dataset short.csv --reward own.py:ones", "short.csv, row 2: found ['Who?'], expected names and values"),
    ("grpo", "--dataset text.parquet --reward own.py:ones", "text.parquet: cannot be read (Could not open Parquet"),
    ("grpo", "--dataset questions.jsonl --reward own.py:ones", "--dataset: too few problems to train on"),
    ("grpo", OWN.replace("train", "empty") + "ones --eval-dataset train.jsonl", "--dataset: too few problems to train on"),
    ("grpo", "--dataset train.jsonl --reward nothing.py:ones", "--reward nothing.py:ones: "),
    ("grpo", OWN + "nowhere", "--reward own.py:nowhere: "),
    ("grpo", OWN + "ones own.py:ones", "--reward: functions need different names"),
    ("grpo", OWN + "trl", "--reward own.py:trl: cannot be called as trl(problem, completion), too many positional arguments"),
    ("grpo", OWN + "verl", "cannot be called as verl(problem, completion), missing a required argument: 'extra'"),
    ("grpo", OWN + "swapped", "cannot be called as swapped(problem, completion), its parameters are completion, problem"),
    ("grpo", OWN + "batch", "cannot be called as batch(problem, completion), its parameters are completions, problems"),
    ("grpo", "--task leg_counting", "--task: needs --env reasoning_gym"),
    ("grpo", OWN + "number", "--reward own.py:number: cannot be called as number(problem, completion), 3 is not a callable"),
    ("grpo", OWN + "short", "reward function short: returned 1 numbers for 256 answers"),
    ("grpo", OWN + "nothing --num-prompts-per-step 1", "reward function nothing: returned None"),
    ("grpo", "--eval-dataset train.jsonl", "--eval-dataset: needs --dataset"),
    ("grpo", "--reward-weights 1", "--reward-weights: expected one for each name of"),
    ("grpo", "--chat-template-kwargs {", "--chat-template-kwargs: expected JSON"),
    ("grpo", "--num-generations 1", "--num-generations: a group needs at least 2"),
    ("igpo", "--advantage ig --max-turns 1", "--advantage ig: needs --max-turns of 2 or more"),
    ("grpo", "--fsdp", "--fsdp: nothing to shard over"),
    ("grpo", "--temperature 0", "--temperature: must be above 0"),
    ("igpo", '--stop ""', "--stop: an empty text would end every turn"),
    ("grpo", "--num-generations 0", "--num-generations 0: expected a finite number from 1"),
    ("grpo", "--learning-rate nan", "--learning-rate nan: expected a finite number from 0"),
    ("grpo", "--max-steps -1", "--max-steps -1: expected a finite number from 0"),
    ("grpo", "--reward-weights nan 1 1", "--reward-weights: expected one for each name of"),
    ("grpo", "--chat-template-kwargs []", "--chat-template-kwargs: expected JSON in braces, found []"),
    ("grpo", "--output-dir own.py/run", "--output-dir own.py/run: cannot be made (Not a directory)"),
    ("grpo", "--resume other_version", "other_version/args.json: cannot be read, perhaps of another version"),
    ("grpo", "--resume cut_version", "cut_version/args.json: cannot be read, perhaps of another version"),
    ("grpo", "--model-name-or-path nothing", "--model-name-or-path nothing: cannot be loaded"),
    ("grpo", "--model-name-or-path model", "has no chat template"),
    ("grpo", "--env reasoning_gym", "--env reasoning_gym: needs --model-name-or-path"),
    ("grpo", "--max-completion-length 2000", "--max-completion-length"),
    ("grpo", "--resume nothing", "--resume nothing: no args.json"),
    ("grpo", "--output-dir run", "--output-dir run: holds a run; continue it with --resume run"),
    ("gdpo", "--conditioned-rewards lenght", "--conditioned-rewards: "),
    ("ampo", "--num-replaced 8", "--num-replaced: must be below --num-generations"),
    ("dapo", "--overlong-buffer-len 4096", "--overlong-buffer-len 4096: more than the 8 tokens of --max-completion-length"),
    ("nash_preference", "--dataset train.jsonl", "--dataset: needs --preference FILE.py:function"),
    ("nash_preference", "--dataset train.jsonl --preference own.py:nowhere", "--preference own.py:nowhere: "),
    ("nash_preference", "--preference own.py:three", "preference function: returned 3, expected a probability from 0 to 1"),
    ("nash_preference", "--num-generations 5 --micro-batch-size 32", "--micro-batch-size: must be a multiple of --num-generations"),
    ("nash_preference", "--alpha 1", "--tau, --alpha: expected one above 0 and one between 0 and 1"),
    ("igpo", "--env nothing.py:Task --model-name-or-path m", "there is no file 'nothing.py'"),
    ("igpo", "--env own.py:Nothing --model-name-or-path m", "own.py:Nothing: the file does not define 'Nothing'"),
    ("igpo", "--env own.py:Task", "--env own.py:Task: needs --model-name-or-path"),
    ("arpo", "--initial-rollouts 9", "--initial-rollouts: give 1 to --num-generations"),
    ("igpo", "--hops 5", "hops from 1 to 4"),
    ("igpo", "--normalization joint --advantage f1", "--normalization joint: needs gains and outcomes"),
    ("igpo", "--dataset questions.jsonl", "--retriever-url"),
    ("igpo", f"--dataset nothing.jsonl {SERVER}", "nothing.jsonl: no such file"),
    ("dr_mas", "--env own.py:Task --model-name-or-path m", "cannot be called as Task(dataset, max_rounds, missing_verdict)"),
    ("dr_mas", "--agent-models a b", "--agent-models: expected one for each of router, searcher, responder"),
    ("dr_mas", "--agent-models nothing nothing nothing", "--model-name-or-path nothing: cannot be loaded"),
    ("dr_mas", "--dataset questions.jsonl", "questions.jsonl: questions from a file need a file to search in"),
    ("spiral_rae", "--games kuhn --eval-opponents minimax --eval-steps 1", "--eval-opponents minimax: only plays tictactoe"),
    ("spiral_rae", "--games", "--games: expected one game or more"),
    ("advantage_alignment", "--games", "--games: expected one game or more"),
    ("pi_play", "--hops", "search_qa needs hops from 1 to 4"),
    ("spiral_rae", "--games chess", "--games: there is no text game chess"),
    ("spiral_rae", "--games nothing.py:Chess", "--games nothing.py:Chess: expected FILE.py:name, but there is no file"),
    ("spiral_rae", """--games kuhn --game-options '{"kuhn":{"rounds":3}}'""", "--games: kuhn has no option rounds"),
    ("spiral_rae", "--games own.py:Task", "--game-options: own.py:Task missing a required argument: 'dataset'"),
    ("spiral_rae", "--num-minibatches 65", "--num-games-per-step: at least two of each of --games in each of"),
    ("spiral_rae", "--baseline none --baseline-decay 0.9", "--baseline-decay, --update-first: --baseline none does not use them"),
    ("spiral_rae", "--baseline role_mean --update-first", "--baseline-decay, --update-first: --baseline role_mean does not"),
    ("spiral_rae", "--baseline-decay 1", "--baseline-decay 1.0: expected a number from 0 and below 1"),
    ("spiral_rae", "--game-options rounds=3", "--game-options: expected JSON"),
    ("spiral_rae", "--games kuhn --max-prompt-length 10", "--max-prompt-length: kuhn begins with"),
    ("pi_play", "--max-completion-length 5000", "--max-prompt-length + --max-completion-length"),
    ("pi_play", "--max-prompt-length 1024", "the teacher reads up to twice this"),
    ("pi_play", "--lambda-schedule -1", "--lambda-schedule: expected finite numbers from 0"),
    ("pi_play", "--distill-top-k 1", "--distill-top-k: teaches nothing below 2"),
    ("pi_play", "--teacher-tau 3", "--teacher-tau 3.0: expected a number from 0 to 1"),
    ("pi_play", "--examiner-steps 0 --student-steps 0", "expected at least one step in a round"),
    ("fm3q", "--env-id chess", "or a module of PettingZoo, see --help"),
    ("fm3q", "--env-id ./nothing.py:make", "there is no file './nothing.py'"),
    ("fm3q", "--env-id own.py:nowhere", "the file has no function 'nowhere'"),
    ("fm3q", "--env-id pong --num-pro 11", "--num-pro, --num-ant: at most 10 paddles fit on a side"),
    ("fm3q", "--gamma 1", "--gamma 1: must be from 0 to below 1, as this game does not end"),
    ("fm3q", "--buffer-size 8", "--buffer-size 8: must be at least"),
    ("fm3q", "--env-id pong --num-ant 3 --mixer pairwise", "2 against 3"),
    ("arac", "--gamma 1.01", "--gamma 1.01: must be from 0 to 1"),
    ("arac", "--total-timesteps -100", "--total-timesteps -100: must be at least 0"),
    ("arac", "--target-network-frequency 0", "--target-network-frequency 0: must be at least 1"),
    ("arac", "--graph cycle_8 cycle_12 --num-envs 8 --buffer-size 15", "--buffer-size 15: must be at least 16"),
    ("arac", "--graph heptagon_7", "names have the forms cycle_8"),
    ("arac", "--graph town.graphml", "town.graphml: no such file"),
    ("arac", "--graph complete_4", "no start at which the evader is not captured"),
    ("arac", "--graph grid_30x30 --evader dp", "too many for exact capture times"),
    ("arac", "--env-id graph_confrontation --reference dp", "only pursuit is solved"),
    ("arac", "--env-id graph_confrontation --num-agents 5", "cycle_8 has 8 nodes, 10 players need one each"),
    ("arac", "--evader learned --asynchronous", "moves at the same time"),
    ("arac", "--output-dir run", "holds a run; continue it with --resume"),
    ("arac", "--resume nothing", "nothing: no run folder, or of another version"),
    ("unimodal_poisson", "--env-id Hoper-v5", "--env-id Hoper-v5: Environment"),
    ("unimodal_poisson", "--env-id nothing.py:make", "there is no file nothing.py"),
    ("unimodal_poisson", "--env-id CartPole-v1 --policy gaussian", "Discrete(2); use categorical"),
    ("unimodal_poisson", "--num-envs 2 --num-steps 16", "normalized, the advantage of a single row is 0"),
    ("unimodal_poisson", "--temperature 0.5 --rate-init 0.5", "--rate-init: must be from 0.67 to 33, else"),
    ("unimodal_poisson", "--env-id CartPole-v1 --policy poisson --rate-init 50", "--rate-init: must be from 0.22 to 18, else"),
    ("unimodal_poisson", "--num-minibatches 7", "does not divide 2048"),
    ("unimodal_poisson", "--total-timesteps 100", "fewer than the 2048 steps"),
    ("unimodal_poisson", "--num-minibatches 0", "--num-minibatches 0: must be at least 1"),
    ("unimodal_poisson", "--video", "--video: goes with --evaluate RUN"),
    ("mdpo", "--method off_policy --ent-coef 2", "--kl-coef 1: must be at least --ent-coef, 2"),
    ("unimodal_poisson", "--evaluate run --eval-episodes 0", "--eval-episodes 0: must be at least 1"),
    ("mdpo", "--evaluate run --eval-episodes 0", "--eval-episodes 0: must be at least 1"),
    ("mdpo", "--tsallis-q 0.5", "--tsallis-q 0.5: must be from 1 to 2"),
    ("meta_dt", "--data nothing --env-id none", "--data: nothing/train holds no .npz file"),
    ("mdpo", "--env-id CartPole-v1", "actions must be Box"),
    ("mdpo", "--output-dir own.py/run --env-id Pendulum-v1", "--output-dir own.py/run: cannot be made (Not a directory)"),
    ("mdpo", "--resume other_version", "other_version: no run folder, or of another version of this script ("),
    ("arac", "--resume cut_version", "cut_version: no run folder, or of another version of this script ("),
]
RESUMED = {  # flags that change what saved weights mean, or what a curve measures, so that they cannot change on resume
    "unimodal_poisson": "--temperature 2, --gamma 0.5",
    "mdpo": "--tsallis-q 1.5, --gamma 0.5",
    "fm3q": "--gamma 0.5",
    "arac": "--start far, --horizon 9, --eval-graphs petersen, --gamma 0.5",
    "seqwm": "--planner none, --num-samples 30, --num-policy-samples 4, --num-elites 4, --iterations 3"
    ", --mppi-temperature 1, --log-density released, --plan-value released, --gamma 0.5",
    "meta_dt": "--target-return -3, --eval-rounds 2, --few-shot recorded",
    "dipllm": "--lamb 0.2, --eta 5, --search-steps 9, --explore-eps 0.1, --max-joint-orders 9, --num-samples 9, --num-candidates 9",
}
for script, flags in RESUMED.items():
    MISTAKES += [(script, f"--resume run {words}", "cannot change") for words in flags.split(", ")]
OWN_FILE = """\
class Task:
    def __init__(self, dataset):
        pass

def trl(completions, **columns):
    return [1.0 for _ in completions]

def verl(source, solution, extra):
    return 1.0

number = 3

def swapped(completion, problem):
    return 1.0

def batch(completions, problems):
    return [1.0 for _ in completions]

batch.batched = True

def short(problems, completions):
    return [1.0]

short.batched = True

def ones(problem, completion):
    return completion.count("1")

def nothing(problem, completion):
    return None

def three(problem, a, b):
    return 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with a few files."""
    question = json.dumps({"question": "Who?", "answers": ["Ann"]}) + "\n"
    (tmp_path / "train.jsonl").write_text("".join(f'{{"question": "Who is {n}?"}}\n' for n in range(40)))
    (tmp_path / "questions.jsonl").write_text(question)
    (tmp_path / "broken.jsonl").write_text(f'{question}\n{{"question": \n')
    (tmp_path / "keyless.jsonl").write_text('{"text": "Who?"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "list.json").write_text('[{"question": "Who?"}, ["Who?"]]\n')
    (tmp_path / "short.csv").write_text("question,answer\nWho?,Ann\nWho?\n")
    (tmp_path / "text.parquet").write_text(question)
    for name, text in (("other_version", '{"no_such_flag": 1}'), ("cut_version", '{"seed": ')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "args.json").write_text(text)
    (tmp_path / "own.py").write_text(OWN_FILE)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "args.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refuse(script: str, words: str, sentence: str, monkeypatch, capsys) -> None:
    module = importlib.import_module(f"algorithms.{script}")
    is_control = script in ("fm3q", "arac", "unimodal_poisson", "mdpo", "meta_dt")
    more = "" if is_control or "--resume" in words else LANGUAGE
    monkeypatch.setattr(sys, "argv", [script, *more.split(), *shlex.split(words)])
    with pytest.raises(SystemExit) as stop:
        module.train(module.parse_args())
    shown = f"{stop.value.code}\n{capsys.readouterr().err}"
    assert stop.value.code not in (0, None)
    assert sentence in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("script, words, sentence", MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_gets_one_sentence(script, words, sentence, folder, monkeypatch, capsys):
    if words == "--model-name-or-path model":
        shutil.copytree(ROOT / "envs" / "tiny_lm" / "countdown", folder / "model")
        (folder / "model" / "chat_template.jinja").unlink()
    refuse(script, words, sentence, monkeypatch, capsys)
    assert not list(folder.glob("runs/*/metrics.csv"))


@pytest.mark.parametrize(
    "script, processes, words, sentence",
    [
        ("grpo", 3, "", "not divisible by the 3 processes"),
        ("dr_mas", 2, "--fsdp", "--fsdp: shards one model, so it needs --share-model"),
    ],
)
def test_a_mistake_of_several_processes(script, processes, words, sentence, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    refuse(script, words, sentence, monkeypatch, capsys)


def test_each_process_needs_a_gpu(monkeypatch):
    """And attention by cuDNN, whose gradients under a mask can be NaN (pytorch issue 196678), is off on a GPU."""
    import torch

    grpo = importlib.import_module("algorithms.grpo")
    cuda = {"is_available": lambda: True, "device_count": lambda: 2, "set_device": lambda device: None}
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert str(grpo.setup(grpo.Args())[2]) == "cuda:1" and not torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(SystemExit, match="--nproc_per_node: more than the 2 GPUs in sight"):
        grpo.setup(grpo.Args())
