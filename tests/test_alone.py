"""Every script copied alone into an empty folder, as people take it: on a model and data of their own it runs, and
where it needs envs/ it ends in one sentence. Files of one's own import nothing of this repository either."""

import json
import shutil

import networkx
import numpy as np
import pytest
from processes import ROOT, fork
from run_folders import metrics

SCRIPTS = sorted(path.stem for path in (ROOT / "algorithms").glob("*.py"))
TINY = ROOT / "envs" / "tiny_lm"
ONE_STEP = "--max-steps 1 --max-completion-length 8 --eval-problems 1 --num-generations-eval 0 --eval-steps 0"
GROUPS = f"{ONE_STEP} --num-prompts-per-step 1 --num-generations 2"
LINES = f"--model-name-or-path {TINY}/countdown --dataset train.jsonl --reward own.py:ones {GROUPS}"
AGENT = f"--model-name-or-path {TINY}/search_qa"
TEAM = "--num-envs 4 --learning-starts 8 --batch-size 8 --total-timesteps 64"
RUNS = {  # flags of a short run that needs nothing of this repository but a model
    "grpo": LINES,
    "dapo": LINES,
    "gdpo": LINES.replace("own.py:ones", "own.py:ones own.py:short"),
    "hpt": LINES,
    "nash_preference": f"{LINES.replace('--reward own.py:ones', '--preference own.py:longer')} --micro-batch-size 2 "
    "--num-generations-eval 2",
    "ampo": f"{LINES} --num-replaced 1",
    "unlikeliness": f"{LINES} --method rep_exp".replace("--num-generations 2", "--num-generations 3"),
    "opd": f"{LINES} --teacher {TINY}/countdown",
    "igpo": f"--env calculator.py:Calculator {AGENT} {GROUPS} --max-turns 2",
    "critic_search": f"--env calculator.py:Calculator --critic own.py:judge {AGENT} {GROUPS} --max-turns 2",
    "empg": f"--env calculator.py:Calculator {AGENT} {GROUPS} --max-turns 2",
    "arpo": f"--env calculator.py:Calculator {AGENT} {GROUPS} --max-turns 2",
    "dr_mas": f"--env own.py:Pair {AGENT} {GROUPS} --reward own.py:ones",
    "pi_play": f"--env own.py:Quiz {AGENT} {ONE_STEP} --num-documents-per-step 2 --num-answers 2 --max-turns 2",
    "spiral_rae": f"--games own.py:Coin --model-name-or-path {TINY}/text_games --num-games-per-step 2 --eval-steps 0 "
    "--eval-opponents random --eval-games 2 --max-steps 1 --max-completion-length 5",
    "dipllm": f"--env own.py:Matching --model-name-or-path {TINY}/text_games --num-games-per-step 1 --eval-steps 0 --max-steps 1",
    "advantage_alignment": f"--games own.py:Purse --model-name-or-path {TINY}/dilemma --num-games-per-step 2 --eval-steps 0 "
    "--max-steps 1 --max-completion-length 5",
    "unimodal_poisson": "--env-id Pendulum-v1 --num-envs 2 --num-steps 16 --num-minibatches 2 --eval-episodes 0 "
    "--total-timesteps 64",
    "stream_x": "--env-id CartPole-v1 --algorithm q --hidden-size 8 --total-timesteps 100 --eval-episodes 1",
    "mdpo": "--env-id Pendulum-v1 --num-envs 2 --num-steps 16 --eval-episodes 0 --total-timesteps 64",
    "fm3q": f"--env-id duel.py:make {TEAM}",
    "arac": f"--graph town.graphml {TEAM}",
    "seqwm": "--env-id bar.py:make --num-envs 4 --learning-starts 16 --batch-size 8 --total-timesteps 64 --eval-episodes 2",
    "meta_dt": "--data episodes --env-id own.py:Lever --embed-dim 8 --num-layers 1 --world-model-steps 10 --policy-steps 10 "
    "--no-prompt-steps 0 --log-steps 10 --eval-episodes 1",
}
MODELS = {"grpo": "countdown", "nash_preference": "countdown", "spiral_rae": "text_games", "dipllm": "text_games", "advantage_alignment": "dilemma"}  # load it first
TASKS = ["grpo", "nash_preference", "igpo", "dr_mas", "pi_play", "spiral_rae", "dipllm", "advantage_alignment", "fm3q", "arac", "seqwm", "meta_dt"]  # each loads its own way
OWN = '''\
import random
from dataclasses import dataclass, field
from types import SimpleNamespace


def ones(problem, completion):
    return completion.count("1")


def judge(problem, episode):
    return [len(text) for text in episode.texts[1::2]]


def short(problem, completion):
    return -len(completion)


def longer(problem, a, b):
    return float(len(a) > len(b))


class Sums:
    reward_functions = {"ones": ones}
    reward_weights = (1.0,)

    def __init__(self, dataset=None):
        pass

    def train_problem(self, index, seed):
        return {"question": f"What is {index} + {seed}?"}

    def evaluation_problems(self, count):
        return [self.train_problem(-index, 0) for index in range(1, count + 1)]

    def prompt(self, problem):
        return [{"role": "user", "content": problem["question"]}]


@dataclass
class Episode:
    problem: object
    agent: str | None
    calls: list = field(default_factory=list)
    answer: str = ""
    seed: int | None = None
    completions: list = field(default_factory=list)
    rewards: tuple = ()
    cut: bool = False


class Pair:
    """Two agents, who write one after the other."""

    agents = ("first", "second")

    def __init__(self, dataset, max_rounds, missing_verdict):
        self.task = Sums()

    def start(self, problem):
        return Episode(problem, "first")

    def prompt(self, episode):
        return self.task.prompt(episode.problem)

    def advance(self, episodes, texts):
        for episode, text in zip(episodes, texts):
            episode.calls.append((episode.agent, text))
            episode.agent = "second" if episode.agent == "first" else None
            episode.answer = text
        return [True for _ in texts]


class Quiz(Sums):
    """Whatever the examiner writes is a question."""

    reward_functions = {"any": lambda problem, text: float("1" in text)}

    def evaluation_problems(self, count):
        return [SimpleNamespace(text="What is 1 + 1?", held_out=True) for _ in range(count)]

    def request(self, generator):
        return SimpleNamespace(text=f"Ask about {generator.randint(1, 9)}.", hops=1)

    def prompt(self, problem):
        return [{"role": "user", "content": problem.text}]

    def examined(self, request, texts):
        return 1.0, SimpleNamespace(text=texts[-1], held_out=False)

    def with_privilege(self, question, kind, seed):
        return question

    def traced_problems(self, count):
        return []

    def step(self, texts, turn, episodes):
        return [None for _ in texts]


class Matching:
    """A board of one turn: player 0 wants the order of player 1."""

    def reset(self, generator):
        self.done = False

    def legal_orders(self, player):
        return [["heads", "tails"]]

    def prompt(self, player, orders):
        return [{"role": "user", "content": "Heads or tails?"}]

    def after(self, orders):
        return (1, 0) if orders[0] == orders[1] else (0, 1)

    def play(self, orders):
        self.done = True


class Coin:
    """Who says [heads] wins; a game without the base class."""

    handicap = 0.0

    def reset(self, generator):
        self.player, self.turns, self.done, self.rewards, self.reason = 0, 0, False, [0.0, 0.0], ""

    def legal_actions(self):
        return ["[heads]", "[tails]"]

    def prompt(self, player):
        return [{"role": "user", "content": "Say [heads] or [tails]."}]

    def step(self, text):
        won = "[heads]" in text
        self.turns, self.done, self.reason = 1, True, "win"
        self.rewards = [1.0, -1.0] if won else [-1.0, 1.0]
        return "[heads]" if won else None


class Purse:
    """Two rounds in which both [give] or [keep]; a game without the base class."""

    rounds = 2
    scale = 1.0

    def start(self, generator):
        return []

    def movers(self, state):
        return (0, 1)

    def legal_actions(self, state, player):
        return ["[give]", "[keep]"]

    def prompt(self, state, player):
        return [{"role": "user", "content": "Say [give] or [keep]."}]

    def parse(self, state, player, text):
        return "[give]" if "[give]" in text else None

    def play(self, state, actions):
        return [*state, actions]

    def rewards(self, state):
        given = [action == "[give]" for action in state[-1]]
        return [2.0 * given[1] - given[0], 2.0 * given[0] - given[1]]

    def opponents(self):
        return {}


class Lever:
    """Pull it to the height of the task."""

    def __init__(self, tasks):
        self.tasks = tasks

    def reset(self, seed):
        self.height = 0 * self.tasks
        return self.height

    def step(self, actions):
        self.height = self.height + actions
        return self.height, -abs(self.height - self.tasks)[:, 0], self.height[:, 0] > 9
'''
DUEL = '''\
class Space:
    n = 2


class Duel:
    """PettingZoo's interface: the runner wants to match the adversary's action, in three steps."""

    possible_agents = ["adversary_0", "runner_0"]

    def action_space(self, agent):
        return Space()

    def reset(self, seed=None):
        self.agents, self.clock = list(self.possible_agents), 0
        return dict.fromkeys(self.agents, [0.0]), {agent: {} for agent in self.agents}

    def step(self, actions):
        self.clock += 1
        agents, matched = self.agents, len(set(actions.values())) == 1
        rewards = {"adversary_0": -float(matched), "runner_0": float(matched)}
        ended = dict.fromkeys(agents, self.clock == 3)
        self.agents = [] if self.clock == 3 else agents
        seen, infos = dict.fromkeys(agents, [float(self.clock)]), {agent: {} for agent in agents}
        return seen, rewards, ended, dict.fromkeys(agents, False), infos


make = Duel
'''
BAR = '''\
import numpy as np
from gymnasium.spaces import Box


class Bar:
    """PettingZoo's interface: two agents want the same number, in three steps."""

    possible_agents = ["left", "right"]

    def action_space(self, agent):
        return Box(-1, 1, (1,), np.float32)

    def reset(self, seed=None):
        self.agents, self.clock = list(self.possible_agents), 0
        return dict.fromkeys(self.agents, [0.0]), {agent: {} for agent in self.agents}

    def step(self, actions):
        self.clock += 1
        agents, gap = self.agents, abs(actions["left"][0] - actions["right"][0])
        ended = dict.fromkeys(agents, self.clock == 3)
        self.agents = [] if self.clock == 3 else agents
        seen, infos = dict.fromkeys(agents, [float(self.clock)]), {agent: {} for agent in agents}
        return seen, dict.fromkeys(agents, -gap), ended, dict.fromkeys(agents, False), infos


make = Bar
'''


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A function that copies a script into an empty folder and runs it there, with files of one's own."""
    monkeypatch.chdir(tmp_path)

    def run(script: str, *words: str):
        shutil.copy(ROOT / "algorithms" / f"{script}.py", tmp_path)
        return fork(tmp_path / f"{script}.py", *words)

    return run


def own_files(folder) -> None:
    rows = [{"question": f"What is {n} + 1?", "demonstration": str(n + 1)} for n in range(40)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own.py").write_text(OWN)
    (folder / "duel.py").write_text(DUEL)
    (folder / "bar.py").write_text(BAR)
    shutil.copy(ROOT / "envs" / "examples" / "calculator.py", folder)
    for part in ("train", "new"):
        (folder / "episodes" / part).mkdir(parents=True)
        heights = np.arange(40.0)[:, None]
        steps = {"observations": heights, "actions": np.ones((40, 1)), "next_observations": heights + 1}
        dones = np.arange(40) % 20 == 19
        np.savez(folder / "episodes" / part / "a.npz", task=np.ones(1), rewards=-heights[:, 0], dones=dones, **steps)
    networkx.write_graphml(networkx.florentine_families_graph(), folder / "town.graphml")


@pytest.mark.parametrize("script", SCRIPTS)
def test_flags_are_explained(script, alone):
    process = alone(script, "--help")
    assert process.returncode == 0, process.stderr
    assert "--output-dir" in process.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs_alone(script, alone, tmp_path):
    own_files(tmp_path)
    process = alone(script, *RUNS[script].split(), "--output-dir", "run")
    assert process.returncode == 0, process.stderr
    assert metrics(tmp_path / "run")


@pytest.mark.parametrize("script", TASKS)
def test_a_task_of_the_repository_is_asked_for(script, alone):
    words = ["--model-name-or-path", TINY / MODELS[script]] if script in MODELS else []
    process = alone(script, *words)
    assert process.returncode == 1
    (sentence,) = process.stderr.splitlines()
    assert "needs the folder envs/ of the repository" in sentence


def test_pettingzoo_alone(alone, tmp_path):
    pytest.importorskip("mpe2")
    process = alone("fm3q", "--env-id", "mpe2.simple_tag_v3", *TEAM.split(), "--eval-games", "2", "--output-dir", "run")
    assert process.returncode == 0, process.stderr
    assert (64, "eval/wanderer/ant/return") in metrics(tmp_path / "run")
