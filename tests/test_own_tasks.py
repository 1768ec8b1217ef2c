"""Own agent tasks, teams and games: the mistakes that people make in them, and what such a class may do."""

import importlib
import json
import sys
from types import SimpleNamespace

import pytest
import transformers
from language_runs import CALCULATOR, SMALL, completions, numbers
from processes import ROOT

from algorithms import igpo

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TINY = ROOT / "envs" / "tiny_lm"
GROUPS = "--max-steps 1 --eval-steps 0 --save-steps 0 --max-completion-length 4 --num-prompts-per-step 1"
FLAGS = {
    "igpo": f"--env own.py:Own --model-name-or-path {TINY}/search_qa --num-generations 2 {GROUPS}",
    "dr_mas": f"--env own.py:Own --model-name-or-path {TINY}/search_qa --num-generations 2 {GROUPS}",
    "spiral_rae": f"--games own.py:Own --model-name-or-path {TINY}/text_games {GROUPS} --num-games-per-step 2",
}
FLAGS["spiral_rae"] = FLAGS["spiral_rae"].replace("--num-prompts-per-step 1 ", "")
FLAGS["empg"] = FLAGS["igpo"]
TASK = '''
import re


def right(problem, text):
    return float(problem["answer"] in text)


class Own:
    reward_functions = {"right": right}

    def __init__(self, dataset=None):
        pass

    def train_problem(self, index, seed):
        return {"question": "1 + 1?", "answer": "2"}

    def evaluation_problems(self, count):
        return [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(count)]

    def prompt(self, problem):
        return [{"role": "user", "content": problem["question"]}]

    def step(self, texts, turn, episodes):
        return [{"role": "user", "content": "Go on."} for text in texts]

    def right_answer(self, problem):
        return "<answer>", problem["answer"]
'''
TEAM = '''
class Problems:
    reward_functions = {"length": lambda problem, answer: float(len(answer))}

    def train_problem(self, index, seed):
        return "1 + 1?"

    def evaluation_problems(self, count):
        return ["2 + 2?"] * count


class Episode:
    def __init__(self, problem, agent):
        self.problem, self.agent, self.answer, self.seed = problem, agent, "", None
        self.completions, self.rewards, self.cut = [], (), False


class Own:
    agents = ("first", "second")

    def __init__(self, dataset, max_rounds, missing_verdict):
        self.task = Problems()

    def start(self, problem):
        return Episode(problem, "first")

    def prompt(self, episode):
        return [{"role": "user", "content": episode.problem}]

    def advance(self, episodes, texts):
        for episode, text in zip(episodes, texts):
            episode.answer = text
            episode.agent = "second" if episode.agent == "first" else None
        return [True for text in texts]
'''
GAME = '''
from envs.game import Game


class Own(Game):
    def start(self, generator):
        self.left = 3

    def legal_actions(self):
        return ["[1]", "[2]"]

    def observation(self, player):
        return f"{self.left} are left. {self.available()}"

    def play(self, action):
        if not action:
            return False
        self.left -= 1
        if self.left == 0:
            self.end(self.player, 1.0, -1.0, "win")
        self.player = 1 - self.player
        return True
'''
MISTAKES = [  # script, a text of the file, what stands in its place, part of the sentence
    ("igpo", 'return [{"role": "user", "content": problem["question"]}]', 'return problem["question"]', "own.py:Own: prompt returned '0 + 1?', expected a list of {"),
    ("empg", '{"role": "user", "content": "Go on."} for', '"Go on." for', "own.py:Own: step returned 'Go on.', expected a list of {"),
    ("igpo", '{"role": "user", "content": "Go on."} for', '{"role": "user", "content": 3} for', "own.py:Own: step returned [{'role': 'user', 'content': 3}], expected"),
    ("igpo", "def step(", "def reply(", "own.py:Own: has no step, see envs/README.md"),
    ("empg", "reward_functions =", "rewards =", "own.py:Own: has no reward_functions, see envs/README.md"),
    ("igpo", "for text in texts]", "for text in texts[1:]]", "own.py:Own: step returned [{'role': 'user', 'content': 'Go on.'}], expected a list of 2 replies"),
    ("empg", "for text in texts]", "for text in []] or None", "own.py:Own: step returned None, expected a list of 2 replies"),
    ("igpo", 'problem["answer"]\n', 'int(problem["answer"])\n', "own.py:Own: right_answer returned ('<answer>', 1), expected a text"),
    ("igpo", 'return float(problem["answer"] in text)', 'return "yes"', "reward function right: returned 'yes' for "),
    ("igpo", "    def right_answer", "    def turn_rewards(self, problem, episode):\n        return [1.0]\n\n    def right_answer", "own.py:Own: turn_rewards returned [1.0], expected 0 numbers"),
    ("dr_mas", "def advance(", "def reply(", "own.py:Own: has no advance, see envs/teams.py"),
    ("dr_mas", 'return [{"role": "user", "content": episode.problem}]', "return episode.problem", "own.py:Own: prompt returned '2 + 2?', expected a list of {"),
    ("dr_mas", '"second" if', '"third" if', "own.py:Own: episode.agent is 'third' after 1 calls, expected one of ('first', 'second'), or None"),
    ("dr_mas", "else None", 'else "first"', "own.py:Own: episode.agent is 'first' after 1000 calls; advance must set it to None"),
    ("dr_mas", "[True for text in texts]", "[]", "own.py:Own: advance returned [], expected a list that says of 1 texts"),
    ("dr_mas", "episode.answer = text", "episode.answer = 2", "own.py:Own: episode.answer is 2, expected a text"),
    ("spiral_rae", '["[1]", "[2]"]', '["1", "2"]', "own.py:Own: \\boxed{1} of ['1', '2'] ends the game, forfeit; play must take what legal_actions lists"),
    ("spiral_rae", "if not action:", 'if action == "[1]":', "own.py:Own: \\boxed{[1]} of ['[1]', '[2]'] ends the game, rejected; play must"),
    ("spiral_rae", "def play(", "def go(", "own.py:Own: has no play, see envs/game.py"),
    ("spiral_rae", '["[1]", "[2]"]', '"[1]"', "own.py:Own: legal_actions returned '[1]', expected a list of texts"),
    ("spiral_rae", "class Own(Game):", "class Own(Game):\n    def prompt(self, player):\n        return 'Go on.'\n", "own.py:Own: prompt returned 'Go on.', expected a list of messages"),
]
FILES = {"igpo": TASK, "empg": TASK, "dr_mas": TEAM, "spiral_rae": GAME}


def start(script: str, text: str, folder, monkeypatch, *more: str):
    """Train for a step with this text as own.py."""
    folder.mkdir(exist_ok=True)
    (folder / "own.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [script, *FLAGS[script].split(), "--output-dir", str(folder / "run"), *more])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own", raising=False)
    module = importlib.import_module(f"algorithms.{script}")
    if script == "spiral_rae":
        module.game_maker.cache_clear()
    return module.train(module.parse_args())


@pytest.mark.parametrize("script, old, new, sentence", MISTAKES, ids=[f"{row[0]}-{row[1][:20]}-{row[2][:20]}" for row in MISTAKES])
def test_a_mistake_names_the_method(script, old, new, sentence, tmp_path, monkeypatch):
    assert FILES[script].count(old) == 1
    with pytest.raises(SystemExit) as stop:
        start(script, FILES[script].replace(old, new), tmp_path, monkeypatch)
    assert sentence in str(stop.value) and "\n" not in str(stop.value)
    assert not (tmp_path / "run" / "metrics.csv").exists()


@pytest.mark.parametrize("script", FILES)
def test_without_a_mistake_they_run(script, tmp_path, monkeypatch):
    start(script, FILES[script], tmp_path, monkeypatch)
    assert numbers(tmp_path / "run")


ERRORS = [("igpo", "return [{", "return 1 / 0\n        return [{"), ("igpo", "import re", "import no_such_thing")]
ERRORS += [("spiral_rae", "self.left -= 1", "self.right -= 1"), ("spiral_rae", "from envs.game", "import no_such_thing\nfrom envs.game")]
ERRORS += [("dr_mas", "episode.answer = text", "episode.answer = text[9]")]


@pytest.mark.parametrize("script, old, new", ERRORS)
def test_an_error_of_ones_own_keeps_its_traceback(script, old, new, tmp_path, monkeypatch):
    with pytest.raises((ZeroDivisionError, ModuleNotFoundError, AttributeError, IndexError)) as stop:
        start(script, FILES[script].replace(old, new, 1), tmp_path, monkeypatch)
    assert stop.traceback[-1].path == tmp_path / "own.py"


@pytest.fixture(scope="module")
def tiny():
    """The search model, its tokenizer, and a function that makes flags."""
    model, tokenizer = igpo.load_model(igpo.Args(max_completion_length=64))
    model.tokenizer = tokenizer
    return model, tokenizer, lambda **values: igpo.Args(**SMALL | CALCULATOR | {"max_completion_length": 64} | values)


class Talk:
    """Answers every turn but those of the second episode, and keeps what it was called with."""

    reward_functions = {"right": lambda problem, text: 1.0}

    def __init__(self, *replies):
        self.replies, self.calls = replies, []

    def prompt(self, problem):
        return [{"role": "user", "content": problem}]

    def step(self, texts, turn, episodes):
        self.calls.append((turn, len(texts)))
        for episode in episodes:
            episode.notes = (episode.notes or 0) + 1
        return [None if episode.problem == "b" else list(self.replies) for episode in episodes]


def play(tiny, task, problems="abc", **values):
    model, tokenizer, args_of = tiny
    return igpo.play(model, tokenizer, task, list(problems), 1, args_of(**values), [1] * len(problems))


def test_none_in_the_middle_ends_that_episode_alone(tiny):
    task = Talk({"role": "user", "content": "Go on."})
    episodes = play(tiny, task, max_turns=3, max_completion_length=200)
    assert [len(episode.texts) for episode in episodes] == [5, 1, 5]
    assert task.calls == [(1, 3), (2, 2), (3, 2)]
    assert [episode.notes for episode in episodes] == [3, 1, 3]
    assert all(episode.tool_seconds > 0 for episode in episodes)


def test_a_reply_of_several_messages(tiny):
    tokenizer = tiny[1]
    episode = play(tiny, Talk({"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}), "a", max_turns=2)[0]
    assert episode.texts[1] == "one\ntwo"
    read = [token for token, turn in zip(episode.ids, episode.turns) if turn == -1]
    assert tokenizer.decode(read) == "<|tool|>one<|end|><|tool|>two<|end|><|assistant|>"


def test_a_long_reply_is_cut(tiny):
    """In place of the end of the episode."""
    tokenizer = tiny[1]
    text = "The friend of Jodo Wesard is Midra Oslen. " * 40
    limits = {"max_turns": 2, "max_prompt_length": 200}
    assert not play(tiny, Talk({"role": "user", "content": text}), "a", **limits)[0].ended
    episode = play(tiny, Talk({"role": "user", "content": text}), "a", **limits, max_reply_length=30)[0]
    assert text.startswith(episode.texts[1]) and len(episode.texts) == 3
    assert len(tokenizer.encode(episode.texts[1], add_special_tokens=False)) == 30


def test_a_text_of_stop_ends_a_turn(tiny):
    """The turn is what it is without --stop up to there, and the model reads the end of the message."""
    model, tokenizer, args_of = tiny
    task = igpo.load_task(igpo.Args())[0]
    prompts = [igpo.encode(tokenizer, task, task.train_problem(number, 1), args_of()) for number in range(6)]
    whole, _ = igpo.generate(model, prompts, args_of(), range(6))
    cut, _ = igpo.generate(model, prompts, args_of(stop=("</think>", "nobody")), range(6))
    stopped = 0
    for before, after in zip(whole, cut):
        text = tokenizer.decode(before.ids)
        length = len(after.ids)
        assert (after.ids, after.logprobs) == (before.ids[:length], before.logprobs[:length])
        if "</think>" in text:
            stopped += 1
            assert after.ended and length < len(before.ids)
            assert "</think>" in tokenizer.decode(after.ids)
            assert "</think>" not in tokenizer.decode(after.ids[:-1])
    assert stopped >= 3
    episode = play(tiny, Talk({"role": "user", "content": "Go on."}), [task.prompt(task.train_problem(0, 1))[0]["content"]], stop=("</think>",), max_turns=2)[0]
    assert "</think><|end|><|user|>Go on.<|end|><|assistant|>" in tokenizer.decode(episode.ids)
    ends = [turn for token, turn in zip(episode.ids, episode.turns) if token == tokenizer.eos_token_id]
    assert ends[0] == -1, "it was not written, so it is not trained on"


@pytest.mark.parametrize("script", ["igpo", "empg", "arpo", "pi_play"])
def test_stop_ends_decoding(script, tiny, monkeypatch):
    """No step of the model is spent on what comes after."""
    module = importlib.import_module(f"algorithms.{script}")
    model, tokenizer, _ = tiny
    args = module.Args(max_completion_length=64, stop=("</think>",))
    steps = []
    step = module.Decoder.step
    monkeypatch.setattr(module.Decoder, "step", lambda decoder: steps.append(1) or step(decoder))
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Question: Who is the friend of Jodo Wesard?\n" + "Think."}], add_generation_prompt=True)["input_ids"]
    (completion,), _ = module.generate(model, [prompt], args)
    text = tokenizer.decode(completion.ids)
    assert text.endswith("</think>") and len(steps) == len(completion.ids) - 1 > 0


def test_turn_rewards_take_the_place_of_gains(tmp_path, monkeypatch):
    """And the right answer is not asked for; a class without weights has 1 for each reward."""
    text = TASK.replace("    def right_answer", "    def turn_rewards(self, problem, episode):\n        return [float(len(text)) for text in episode.texts[::2]][:-1]\n\n    def wrong")
    more = ["--max-turns", "3", "--max-completion-length", "64", "--stop", "e", "--num-generations", "4"]
    start("igpo", text, tmp_path, monkeypatch, *more)
    rows = completions(tmp_path / "run")
    gains = [row["gains"] for row in rows]
    assert gains == [[float(len(text)) for text in row["turns"][::2]][:-1] for row in rows]
    assert any(gains)
    found = numbers(tmp_path / "run")
    assert found[1, "train/igpo/gain"] == pytest.approx(sum(map(sum, gains)) / 4)
    assert found[1, "train/reward"] == found[1, "train/rewards/right/mean"]


def test_a_reward_may_take_the_episode(tmp_path, monkeypatch):
    """With what the task stored there; the task knows the last turn."""
    text = TASK.replace("def right(problem, text):\n    return float(problem[\"answer\"] in text)", "def right(problem, episode):\n    return float(len(episode.notes or ()) + 10 * len(episode.texts[::2]))")
    note = "        for episode in episodes:\n            episode.notes = (episode.notes or []) + [turn] * (turn < self.max_turns)\n"
    text = text.replace("turn, episodes):\n", f"turn, episodes):\n{note}")
    assert note in text and "len(episode.notes" in text
    found = {}
    for script in ("igpo", "empg"):
        start(script, text, tmp_path / script, monkeypatch, "--max-turns", "2", "--stop", "e", "--max-completion-length", "64")
        found[script] = numbers(tmp_path / script / "run")[1, "train/reward"]
    assert found == {"igpo": 21.0, "empg": 21.0}


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
TEMPLATES = {  # and the token that ends a turn
    "shipped": (None, "<|end|>"),
    "chatml": (CHATML, "<|im_end|>"),
    "tools": ("{{ tools | tojson }}" + CHATML.replace("{{ m.role }}", "{{ 'user' if m.role == 'tool' else m.role }}"), "<|im_end|>"),
    "llama": ("<s>{% for m in messages %}<|h|>{{ m.role }}<|/h|>\n\n{{ m.content }}<|eot|>{% endfor %}<|h|>assistant<|/h|>\n\n", "<|eot|>"),
    "mistral": (
        "<s>{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}",
        "</s>",
    ),
    "space before the end": (CHATML.replace("<|im_end|>", " \n<|im_end|>"), "<|im_end|>"),
}
REPLIES = ["Hi.", "\n\n  two lines\n ", "", "Xyzzy Xyzzy", "Ünï — 数", "<result>Jodo Wesard</result>"]


def common_end(tokenizer, end: int, reply: list[dict], settings: dict) -> list[int]:
    """What two chats that differ in the assistant's text have in common after the end token of its turn."""
    chats = []
    for text in "bc":
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}, *reply]
        chats.append(tokenizer.apply_chat_template(chat, add_generation_prompt=True, **settings)["input_ids"])
    length = 0
    while chats[0][-length - 1] == chats[1][-length - 1]:
        length += 1
    rest = chats[0][-length:]
    return rest[rest.index(end) + 1 :]


@pytest.mark.quick
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_reply_has_the_tokens_of_the_whole_chat(name, tiny):
    template, end = TEMPLATES[name]
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY / "search_qa")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|eot|>", "<|h|>", "<|/h|>", "<s>", "</s>"]})
    tokenizer.chat_template = template or tokenizer.chat_template
    settings = {"tools": [{"name": "calculate"}]}
    args = SimpleNamespace(chat_template_kwargs=json.dumps(settings))
    end = tokenizer.convert_tokens_to_ids(end)
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[end]))
    for content in REPLIES:
        for reply in ([("user", content)], [("tool", content), ("tool", "x")], [("user", "Hi."), ("assistant", content), ("user", content)]):
            messages = [{"role": role, "content": text} for role, text in reply]
            expected = common_end(tokenizer, end, messages, settings)
            assert igpo.reply_ids(model, tokenizer, messages, args) == expected != []
