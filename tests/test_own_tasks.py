"""Agent tasks, teams and games of one's own: what mistakes end in, and what their methods may do."""

import random
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from language_runs import CALCULATOR, SMALL, completions, train
from processes import ROOT

from algorithms import arpo, dr_mas, empg, igpo, pi_play, spiral_rae

OWN = '''
import random

from envs.game import Game
from envs.teams import Episode


def one(problem, text):
    return 1.0


class Task:
    reward_functions = {"one": one}

    def __init__(self, dataset):
        random.seed(3)

    def train_problem(self, index, seed):
        return index

    def evaluation_problems(self, count):
        return list(range(-count, 0))

    def prompt(self, problem):
        return [{"role": "user", "content": f"What is {problem}?"}]

    def step(self, texts, turn, episodes):
        random.random()
        return [None for _ in texts]

    def right_answer(self, problem):
        return "<answer>", str(problem)


class WrongType(Task):
    def prompt(self, problem):
        return "What is it?"


class NoMethod(Task):
    step = property()


class FewReplies(Task):
    def step(self, texts, turn, episodes):
        return [None]


class IntAnswer(Task):
    def right_answer(self, problem):
        return "<answer>", 84


class ShortStep(Task):
    def step(self, texts, turn):
        return [None for _ in texts]


class NoSeed(Task):
    def train_problem(self, index):
        return index


class SeedFirst(Task):
    def train_problem(self, seed, index):
        return index


class NoRewards(Task):
    def turn_rewards(self, problem, episode):
        pass


class BrokenTool(Task):
    def step(self, texts, turn, episodes):
        raise ValueError("the tool is broken")


class NoneInTheMiddle(Task):
    def step(self, texts, turn, episodes):
        message = {"role": "tool", "content": "x"}
        return [[message, None, message] for _ in texts]


class NoneLater(Task):
    def step(self, texts, turn, episodes):
        return [{"role": "user", "content": "x"} for _ in texts] if turn == 1 else None


class Team:
    agents = ("solver", "judge")

    def __init__(self, dataset, max_rounds, missing_verdict):
        self.task = Task(dataset)

    def start(self, problem):
        return Episode(problem, "solver")

    def prompt(self, episode):
        return self.task.prompt(episode.problem)

    def advance(self, episodes, texts):
        for episode in episodes:
            episode.agent = self.after(episode)
        return [True for _ in texts]

    def after(self, episode):
        return None


class UnknownAgent(Team):
    def after(self, episode):
        return "critic"


class OneName(Team):
    agents = "solver"


class Endless(Team):
    def after(self, episode):
        return "judge"


class Coin(Game):
    """Heads wins."""

    listed = ["[heads]", "[tails]"]

    def start(self, generator):
        random.random()

    def legal_actions(self):
        return self.listed

    def observation(self, player):
        return f"You are Player {player}."

    def play(self, action):
        self.end(self.player, 1.0, -1.0, "win")
        return True


class NoBrackets(Coin):
    listed = ["heads", "tails"]


class NoReturn(Coin):
    def play(self, action):
        self.end(self.player, 1.0, -1.0, "win")


class Forbidden(Coin):
    def play(self, action):
        return False


class OwnInit(Coin):
    def __init__(self, **options):
        self.rounds = 3


class BrokenGame(Coin):
    def play(self, action):
        raise TypeError("the coin is lost")


class NeedsPackage(Coin):
    def start(self, generator):
        import no_such_package
'''


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """The path of a file with tasks, teams and games."""
    path = tmp_path_factory.mktemp("own") / "tasks_of_my_own.py"
    path.write_text(OWN)
    yield path
    sys.modules.pop(path.stem, None)


def begin(script, name: str):
    """What a run does before it loads a model, or after it has loaded one."""
    if script is spiral_rae:
        return script.first_prompt(None, script.Args(games=(name,)))
    return script.load_task(script.Args(env=name, model_name_or_path="m"))


MISTAKES = [
    (igpo, "WrongType", "prompt: returned 'What is it?', expected a list of messages"),
    (empg, "NoMethod", "NoMethod: has no step, see envs/README.md"),
    (arpo, "FewReplies", "step: returned [None] for 2 texts, expected a list with one for each"),
    (spiral_rae, "NoBrackets", "legal_actions: lists 'tails', which is forfeit, expected actions that play carries out, in square"),
    (dr_mas, "UnknownAgent", "advance: set 'critic' as episode.agent, expected one of solver, judge, or None"),
    (dr_mas, "Endless", "advance: the team still writes after 1000 turns; set episode.agent to None"),
    (igpo, "IntAnswer", "right_answer: returned ('<answer>', 84), expected two texts"),
    (arpo, "ShortStep", "step: cannot be called as step(texts, turn, episodes), too many positional arguments"),
    (igpo, "NoSeed", "train_problem: cannot be called as train_problem(index, seed), too many positional arguments"),
    (igpo, "SeedFirst", "train_problem: cannot be called as train_problem(index, seed), its parameters are seed, index"),
    (dr_mas, "OneName", "OneName: its agents are 'solver', expected a tuple of texts; of one agent it is ('writer',)"),
    (spiral_rae, "NoReturn", "NoReturn.play: returned None, expected True, or False to reject the action"),
    (igpo, "NoRewards", "turn_rewards: returned None for"),
    (igpo, "BrokenTool", "the tool is broken"),
    (igpo, "NoneInTheMiddle", "step: replied None, expected messages with role and content"),
    (spiral_rae, "Forbidden", "legal_actions: lists '[tails]', which is rejected"),
    (spiral_rae, "OwnInit", "its __init__ sets no handicap; call super().__init__(**options)"),
    (spiral_rae, "BrokenGame", "the coin is lost"),
    (spiral_rae, "NeedsPackage", "No module named 'no_such_package'"),
]


@pytest.mark.quick
@pytest.mark.parametrize("script, name, words", MISTAKES, ids=[name for _, name, _ in MISTAKES])
def test_a_mistake_ends_in_a_sentence_or_in_ones_own_traceback(script, name, words, own):
    with pytest.raises(BaseException) as stop:
        begin(script, f"{own}:{name}")
    assert words in str(stop.value)
    own_frames = [frame for frame in traceback.extract_tb(stop.tb) if frame.filename == str(own)]
    assert isinstance(stop.value, SystemExit) != bool(own_frames)


def test_the_check_leaves_randomness_as_it_was_and_accepts_what_is_right(own):
    for script, name in ((igpo, "Task"), (arpo, "Task"), (dr_mas, "Team")):
        begin(script, f"{own}:{name}")
        assert random.random() == random.Random(3).random(), "only __init__ has touched the generator"
    random.seed(5)
    with pytest.raises(SystemExit, match="chat template: refuses"):  # there is no tokenizer: the game itself is right
        begin(spiral_rae, f"{own}:Coin")
    generator = random.Random(5)
    generator.random()
    assert random.getstate() == generator.getstate(), "the real game draws once, the checked one leaves no trace"


def test_weights_are_one_where_a_task_has_none(own):
    task, _ = begin(igpo, f"{own}:Task")
    assert task.reward_weights == (1.0,)
    assert task.max_turns == 5


def test_a_step_that_takes_long_is_said(monkeypatch, capsys):
    """Here long is 0.01 seconds. A step that is quick is not said."""
    timer = threading.Timer
    monkeypatch.setattr(threading, "Timer", lambda _, *rest: timer(0.01, *rest))
    episode = SimpleNamespace(texts=["hello"])
    for seconds, said in ((0.2, True), (0.0, False)):
        task = SimpleNamespace(step=lambda *rest, seconds=seconds: time.sleep(seconds) or [None])
        igpo.ask(task, [episode], 1, None, igpo.Args())
        time.sleep(0.05)
        assert ("no replies after 60 seconds" in capsys.readouterr().out) == said


TURNS = ["Let me see <calc>1+1</calc> and more of it", "<calc>2*3</calc>", "<answer>6</answer>"]


def spoken(script, task, args, patch, **more):
    """Episodes of one problem in which the model writes TURNS, and the tokenizer."""
    model, tokenizer = script.load_model(args)
    end = model.generation_config.eos_token_id[0]

    def generate(model, contexts, args, seeds=None, memory=None):
        made = []
        for context in contexts:
            turn = tokenizer.decode(context).count("<|assistant|>") - 3  # two are of the example
            ids = tokenizer(TURNS[turn], add_special_tokens=False)["input_ids"] + [end]
            made.append(script.Completion(context, ids, [-1.0] * len(ids), True))
            script.cut_at_stop(tokenizer, made[-1], args)
        return made, None

    patch.setattr(script, "generate", generate)
    problem = {"question": "1+1 * 3", "answer": "6"}
    return script.play(model, tokenizer, task, [problem], 2, args, [1], **more), tokenizer


@pytest.mark.parametrize("script", [igpo, empg, arpo])
def test_tools_reply_in_several_messages_cut_and_after_a_stop(script, monkeypatch):
    args = script.Args(**SMALL | CALCULATOR, stop=("</calc>",), max_reply_length=5)
    task, _ = script.load_task(args)
    seen = []

    def step(texts, turn, episodes):
        seen.append((turn, texts[0], task.max_turns))
        for episode in episodes:
            episode.notes = getattr(episode, "notes", 0) + 1
        called = [{"role": "tool", "content": "2"}, {"role": "user", "content": "=".join("123456789")}]
        return [called if "calc" in text else None for text in texts]

    def counted(problem, episode):
        return 10 * episode.notes + sum("</calc>" in text for text in episode.texts[::2])

    def length(problem, text):
        return len(text)

    task.step = step
    task.reward_functions = {"counted": counted, "length": length}
    (episode, _), tokenizer = spoken(script, task, args, monkeypatch)
    assert [text for _, text, _ in seen] == ["Let me see <calc>1+1</calc>", *TURNS[1:]]
    assert {limit for *_, limit in seen} == {args.max_turns}
    assert episode.texts[1] == episode.texts[3] == "21=2=3", "the second message has five tokens"
    assert episode.rewards == (32.0, float(len("".join(episode.texts)))), "three turns, two of them with a call"
    replies = "<|tool|>2<|end|><|user|>1=2=3<|end|>"
    chat = "".join(f"{text}<|end|>{replies}<|assistant|>" for text in (seen[0][1], TURNS[1])) + f"{TURNS[2]}<|end|>"
    assert episode.ids == tokenizer(chat, add_special_tokens=False)["input_ids"]
    written = [token for token, turn in zip(episode.ids, episode.turns) if turn >= 0]
    assert len(written) == len(episode.logprobs)
    # With --stop the end token is the chat's, not the model's; only the last turn has its own.
    assert tokenizer.decode(written) == "".join([seen[0][1], *TURNS[1:]]) + "<|end|>"


def test_rewards_of_turns_take_the_place_of_gains(tmp_path, monkeypatch):
    Calculator = igpo.from_file("--env", CALCULATOR["env"])
    given = []

    def turn_rewards(self, problem, episode):
        given.append(episode.texts)
        return [0.5 + turn for turn in range(len(episode.texts) // 2)]

    def step(self, texts, turn, episodes):
        return [{"role": "user", "content": "on"} for _ in texts]

    def never(*_):
        raise AssertionError("no answer is scored where the task rewards turns")

    monkeypatch.setattr(Calculator, "turn_rewards", turn_rewards, raising=False)
    monkeypatch.setattr(Calculator, "right_answer", property())  # not needed
    monkeypatch.setattr(Calculator, "step", step)
    monkeypatch.setattr(igpo, "answer_logprobs", never)
    found = train(igpo, tmp_path, **SMALL | CALCULATOR | {"max_turns": 3, "max_completion_length": 40})
    rows = completions(tmp_path)
    assert [row["gains"] for row in rows] == [[0.5, 1.5][: len(row["turns"]) // 2] for row in rows]
    assert {len(row["turns"]) for row in rows} == {3, 5}, "some are cut off"
    assert found[1, "train/igpo/gain"] == pytest.approx(sum(sum(row["gains"]) for row in rows) / len(rows))
    episode = igpo.Episode(None, [], texts=["a", "b", "c"])
    monkeypatch.setattr(Calculator, "turn_rewards", lambda *_: [0.5, 1.0])
    with pytest.raises(SystemExit, match=r"turn_rewards: returned \[0.5, 1.0\], expected 1 numbers"):
        igpo.turn_gains(Calculator(), episode, None)
    monkeypatch.setattr(Calculator, "turn_rewards", lambda *_: [np.float32(0.5)])
    assert igpo.turn_gains(Calculator(), episode, None) == [0.5]
    for wrong in (None, ["much"], [float("nan")], [1e300], [torch.zeros(2)]):
        monkeypatch.setattr(Calculator, "turn_rewards", lambda *_, wrong=wrong: wrong)
        with pytest.raises(SystemExit, match="turn_rewards: returned .* expected 1 numbers, one for each turn but the last"):
            igpo.turn_gains(Calculator(), episode, None)


def test_a_wrong_reply_in_a_later_turn_is_a_sentence(own, monkeypatch):
    args = igpo.Args(**SMALL | CALCULATOR)
    task, _ = begin(igpo, f"{own}:NoneLater")
    task.prompt = igpo.load_task(args)[0].prompt
    with pytest.raises(SystemExit, match="step: returned None for 2 texts"):
        spoken(igpo, task, args, monkeypatch)


def test_a_team_that_ends_in_the_check_alone(own, monkeypatch):
    """What the empty texts of the check do not show is found when the team plays."""
    args = dr_mas.Args()
    team, (problem, *_) = begin(dr_mas, f"{own}:Team")
    player = dr_mas.Player("team", team.agents, args, *[None] * 5)
    monkeypatch.setattr(dr_mas, "encode", lambda *_: [1])
    monkeypatch.setattr(dr_mas, "own_text", lambda *_: "text")
    monkeypatch.setattr(dr_mas, "generate", lambda _, prompts, *__: [dr_mas.Completion(p, [1], [0.0], True) for p in prompts])
    for agent, words in (("critic", "advance: set episode.agent to {'critic'}"), ("judge", "still writes after 1000 turns")):
        team.after = lambda episode, agent=agent: agent
        with pytest.raises(SystemExit, match=words):
            dr_mas.play([player], team, [team.start(problem)], args)
    team.advance = lambda episodes, texts: []
    with pytest.raises(SystemExit, match=r"advance: returned \[\] for 1 texts"):
        dr_mas.play([player], team, [team.start(problem)], args)


HEADERS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
LAST = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ '<|end|>' if loop.last and m.role == 'assistant' else '<|other|>' }}"
LAST += "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
CASES = [  # template, ends, --stop, what the model writes last, what stands between turn and reply
    (HEADERS, ["<|end|>", "<|user|>"], (), "<|end|>", "<|end|><|user|>"),  # as GLM-4: a header ends a turn, which has no end
    (HEADERS, ["<|end|>", "<|user|>"], (), "<|user|>", "<|user|>"),
    (HEADERS, ["<|end|>", "<|user|>"], ("</calc>",), None, "<|user|>"),
    (LAST, ["<|end|>"], (), "<|end|>", "<|end|><|other|><|user|>"),  # as GPT-OSS: only the last turn ends by an end token
]


@pytest.mark.parametrize("script", [igpo, empg, arpo])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_what_stands_between_a_turn_and_its_reply(case, script, monkeypatch):
    template, ends, stop, last, between = CASES[case]
    args = script.Args(**SMALL | CALCULATOR, stop=stop)
    model, tokenizer = script.load_model(args)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|other|>"]})
    tokenizer.chat_template = template
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(ends)
    task, _ = script.load_task(args)
    task.step = lambda texts, turn, episodes: [{"role": "user", "content": "2"} if turn == 1 else None for _ in texts]
    task.reward_functions = {"none": lambda problem, text: 0.0}

    def generate(model, contexts, args, seeds=None, memory=None):
        ids = tokenizer("<calc>1+1</calc>", add_special_tokens=False)["input_ids"]
        ids = ids + tokenizer.convert_tokens_to_ids([last] if last else [])
        return [script.Completion(context, ids, [-1.0] * len(ids), True) for context in contexts], None

    monkeypatch.setattr(script, "generate", generate)
    problem = {"question": "1+1", "answer": "2"}
    more = {"num_generations": 1} if script is not arpo else {}
    episode, *_ = script.play(model, tokenizer, task, [problem], *more.values() or [1], args, [1])
    assert tokenizer.decode(episode.ids).startswith(f"<calc>1+1</calc>{between}2")


def test_a_stop_that_no_text_has():
    with pytest.raises(SystemExit, match=r"--stop .<\|user\|>.: the tokenizer loses it"):
        igpo.load_model(igpo.Args(**SMALL | CALCULATOR, stop=("<|user|>",)))


@pytest.mark.parametrize("script", [dr_mas, pi_play])
def test_a_think_block_of_the_template_is_not_the_agents(script):
    """Opened and closed by the prompt it is none of theirs; opened alone, they close it."""
    tokenizer = igpo.load_model(igpo.Args(**SMALL | CALCULATOR))[1]
    ids = tokenizer("<think>a</think>b", add_special_tokens=False)["input_ids"]
    for opening, expected in (("<think>\n\n</think>\n\n", "<think>a</think>b"), ("<think>", "<think><think>a</think>b"), ("", "<think>a</think>b")):
        prompt = tokenizer(f"<|assistant|>{opening}", add_special_tokens=False)["input_ids"]
        assert script.own_text(tokenizer, script.Completion(prompt, ids, [], True)) == expected


TEMPLATES = [
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "<|system|>You help.<|end|>{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|end|>{% else %}[{{ m.content }}] {% endif %}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|><think></think>{{ m.content }}\n<|end|>{% else %}"
    "<|user|>{{ '<result>' + m.content + '</result>' if m.role == 'tool' else m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}",
]


DEAF = "{% for m in messages %}{% if m.role != 'tool' %}<|{{ m.role }}|>{{ m.content }}{% endif %}<|end|>{% endfor %}<|assistant|>"
STRICT = "{% for m in messages %}{{ raise_exception('no tools') if m.role == 'tool' }}{{ m.content }}<|end|>{% endfor %}"


@pytest.mark.quick
def test_a_template_that_drops_or_refuses_a_reply():
    """Else the model would never see the result that rewards and completions.jsonl have."""
    args = igpo.Args(**SMALL | CALCULATOR)
    model, tokenizer = igpo.load_model(args)
    reply = [[{"role": "tool", "content": '{"sum": "8 \n"}'}]]
    words = ["leaves out what tool says", r"refuses a reply of tool \(no tools\); give --chat-template-path"]
    for tokenizer.chat_template, said in zip([DEAF, STRICT], words):
        with pytest.raises(SystemExit, match="chat template: " + said):
            igpo.reply_ids(model, tokenizer, reply, args)
    tokenizer.chat_template = DEAF.replace("m.content", "m.content | tojson").replace("!= 'tool'", "!= 'x'")
    assert igpo.reply_ids(model, tokenizer, reply, args)[0]


@pytest.mark.parametrize("template", range(len(TEMPLATES)))
def test_replies_have_the_tokens_that_they_have_in_the_whole_chat(template):
    args = igpo.Args(**SMALL | CALCULATOR)
    model, tokenizer = igpo.load_model(args)
    tokenizer.chat_template = TEMPLATES[template]
    end = model.generation_config.eos_token_id[0]
    texts = ["", " ", "b", "c", "\n1+1 = 2\n", "  x", "é 漢字 🙂", "a</result> b<|user|>c", "b"]
    replies = [[{"role": role, "content": text}] for role in ("user", "tool") for text in texts] + [[]]
    replies.append([{"role": "tool", "content": "b"}, {"role": "tool", "content": "c"}])
    found = igpo.reply_ids(model, tokenizer, replies, args)
    for messages, ids in zip(replies, found, strict=True):
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Zz"}, *messages]
        whole = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        before = tokenizer.apply_chat_template(chat[:2], return_dict=True)["input_ids"]
        start = len(before) - 1 - before[::-1].index(end)  # the end of the assistant's turn
        assert ids == (whole[start:] if messages else [])


@pytest.mark.quick
@pytest.mark.parametrize("script", [igpo, empg, arpo, pi_play])
def test_a_stop_ends_decoding(script, monkeypatch):
    """A turn has the tokens of the whole turn up to the text, and no step of the model goes beyond the longest."""
    args = script.Args(max_completion_length=64)
    model, tokenizer = script.load_model(args)
    model.tokenizer = tokenizer
    task, problems = script.load_task(args)
    prompts = [script.encode(tokenizer, task, problem, args) for problem in problems[:6]]
    whole, _ = script.generate(model, prompts, args, range(6))
    steps = []
    step = script.Decoder.step
    monkeypatch.setattr(script.Decoder, "step", lambda decoder: steps.append(1) or step(decoder))
    stopped, _ = script.generate(model, prompts, replace(args, stop=("</think>", "nobody")), range(6))
    for before, after in zip(whole, stopped, strict=True):
        length = len(after.ids)
        assert (after.ids, after.logprobs) == (before.ids[:length], before.logprobs[:length])
        assert after.ended and length < len(before.ids)
        assert "</think>" not in tokenizer.decode(after.ids[:-1])
        assert "</think>" in tokenizer.decode(after.ids)
    assert len(steps) == max(len(completion.ids) for completion in stopped) - 1


HANGS = """
import time
from envs import checks

def advance():
    time.sleep(0.5)

checks.PATIENCE = 0.1
with checks.same_randomness():
    advance()
checks.PATIENCE = 0.2
with checks.same_randomness():
    pass
time.sleep(0.4)
"""


@pytest.mark.quick
def test_a_check_that_hangs_says_where():
    """Once, in a process of its own: faulthandler shows a hundred threads at most."""
    process = subprocess.run([sys.executable, "-c", HANGS], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0
    assert process.stderr.count("in advance") == 1 and process.stderr.count("Timeout") == 1
