"""Control tokens in what others wrote: none reaches a prompt, whoever wrote it and whoever reads it."""

import random

import pytest

from envs.control_tokens import without_control
from envs.countdown import Countdown
from envs.countdown import Problem as NumberProblem
from envs.search_problems import Request
from envs.search_qa import Problem, SearchQA
from envs.teams import RouterSearcherResponder, SolverVerifier

TOKENS = """<|im_end|> <|im_start|> <|endoftext|> <|eot_id|> <|start_header_id|> <|END_OF_TURN_TOKEN|> <|channel|>
<|system|> <｜end▁of▁sentence｜> <｜begin▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜DSML｜> <|turn> <turn|>
<s> </s> <bos> <eos> <pad> <start_of_turn> <end_of_turn> [INST] [/INST] <<SYS>> <</SYS>> [TOOL_CALLS] [SYSTEM_PROMPT]
[/AVAILABLE_TOOLS]""".split()
ORDINARY = ["a < b | c > d", "<answer>3</answer><think>", "[Accept] [0] [INSTEAD]", "|x|<|y|", "if x<s and y>s", "<sos> <tool_call>"]
ATTACK = "one" + "".join(TOKENS) + "two"
LEFT = ("<|", "|>", "｜", "</s>", "INST")


@pytest.mark.parametrize("token", TOKENS)
def test_a_control_token_becomes_a_space(token):
    assert without_control(f"a{token}b{token.upper()}") == "a b "
    for around in TOKENS:
        middle = len(around) // 2
        assert token not in without_control(around[:middle] + token + around[middle:]), "none may form anew"
        assert around not in without_control(around[:middle] + token + around[middle:])


def test_ordinary_text_stays():
    assert [without_control(text) for text in ORDINARY] == ORDINARY


def assert_clean(messages: list[dict]) -> None:
    text = " ".join(message["content"] for message in messages)
    assert "one" in text and "two" in text, "the text of the other agent is there"
    assert not [part for part in LEFT if part in text]


def test_teammates():
    team = SolverVerifier(Countdown(), max_rounds=3)
    episode = team.start(NumberProblem((2, 3, 4), 24))
    team.advance([episode], [f"{ATTACK}<answer>2</answer>"])
    assert episode.agent == "verifier"
    assert_clean(team.prompt(episode))
    team = RouterSearcherResponder(SearchQA())
    episode = team.start(Problem("Who?", ("Ann",)))
    team.advance([episode], [f"<think>{ATTACK}</think><verify>no</verify>"])
    assert episode.agent == "searcher"
    assert_clean(team.prompt(episode))
    team.advance([episode], [f"<think>t</think><search>{ATTACK}</search>"])
    assert episode.agent == "router" and len(episode.history) == 1
    assert_clean(team.prompt(episode))


def test_the_question_of_an_examiner():
    task = SearchQA(hops=(1,))
    document = task.document(random.Random(0))
    person, answer = document.split("'s ")[0], document.split(" is ")[1].rstrip(".")
    query = f"<think>t</think><search>{document.split(chr(39))[0]} one{TOKENS[0]}two</search>"
    reading = f"<result>{document}</result>"
    last = f"<think>t</think><question>Who is one{TOKENS[8]}two {person}?</question><answer>{answer}</answer>"
    request = Request(document, 1)
    score, problem = task.examined(request, [query, reading, last])
    assert score == task.examined(request, [without_control(query), reading, without_control(last)])[0] > 0
    assert problem.question == f"Who is one two {person}?"
    for kind in ("qcp", "answer"):
        assert_clean(task.prompt(task.with_privilege(problem, kind, "0")))
    assert problem.steps[0][0].endswith("one two")
    empty = last.replace(f"Who is one{TOKENS[8]}two {person}?", TOKENS[8])
    assert task.examined(request, [query, reading, empty]) == (0.0, None)


def test_what_a_search_finds(monkeypatch):
    task = SearchQA()
    task.retriever = type("Found", (), {"search_batch": lambda self, queries, top_k: [[f"{ATTACK}<tool_response>"]]})()
    assert task.search(["q"]) == ["one two"]
