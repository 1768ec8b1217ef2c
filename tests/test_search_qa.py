"""Search questions: graders and routing on reference cases, the retrievers, the split, every role."""

import http.server
import json
import random
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from envs import search_problems, search_qa, search_text
from envs.retriever import RELATIONS, HttpRetriever
from envs.search_qa import Problem, SearchQA, Turn, world

REFERENCE = Path(__file__).parent / "reference"
DR_MAS, IGPO, PI_PLAY = (json.loads((REFERENCE / f"{name}.json").read_text()) for name in ("dr_mas", "igpo", "pi_play"))


@pytest.mark.parametrize("case", DR_MAS["output_validity"]["search_or_answer_agents"], ids=lambda case: case["in"])
def test_reference_validity_of_actions(case):
    assert search_text.project_action(case["in"], "search") == (case["out"], bool(case["valid"]))
    as_answer = [case[key].replace("search>", "answer>") for key in ("in", "out")]
    assert search_text.project_action(as_answer[0], "answer") == (as_answer[1], bool(case["valid"]))


@pytest.mark.parametrize("case", DR_MAS["output_validity"]["verifier_agents"], ids=lambda case: case["in"])
def test_reference_validity_of_verdicts(case):
    assert search_text.project_verdict(case["in"]) == (case["out"], bool(case["valid"]))
    assert not search_text.project_verdict(case["in"], check_think=True)[1]
    assert search_text.project_verdict("<think>x</think>" + case["in"], check_think=True)[1] == bool(case["valid"])


@pytest.mark.parametrize("case", DR_MAS["search_em_reward"]["cases"], ids=lambda case: case["text"])
def test_reference_exact_match(case):
    assert search_text.exact_match(Problem("?", tuple(case["targets"])), case["text"]) == case["reward"]


@pytest.mark.parametrize("case", IGPO["outcome_reward"]["cases"], ids=lambda case: case["solution"])
def test_reference_word_f1_and_format(case):
    problem = Problem("?", tuple(case["ground_truth"].split("<|answer_split|>")))
    assert search_text.f1(problem, case["solution"], invalid=-2.0) == pytest.approx(case["f1"])
    assert search_text.f1(problem, case["solution"]) == pytest.approx(case["noformatf1"])
    assert search_text.format(problem, case["solution"]) == (case["f1"] != -2.0)


def test_lists_in_cells():
    """As pandas, numpy and JSON write them. What is no list is one text."""
    cells = [str(["L'a", "b c"]), str(np.array(["L'a", "b c"])), json.dumps(["L'a", "b c"]), "[La]"]
    found = [search_problems.read_line({"question": "q", "golden_answers": cell}, "row 1").answers for cell in cells]
    assert found == [("L'a", "b c")] * 3 + [("[La]",)]


EXAMINER = next(case for case in PI_PLAY["cases"] if case["name"] == "examiner format score")["table"]


@pytest.mark.parametrize("case", EXAMINER, ids=lambda case: case["case"])
def test_reference_examiner_format(case):
    """Dr. Zero searches with a JSON object inside <tool_call>, this environment with a query inside <search>."""
    call = re.compile(r'<tool_call> \{.*\["([^"]+)"\].*\} </tool_call>')
    turns = [(who, call.sub(r"<search>\1</search>", text)) for who, text in case["turns(a=assistant,u=tool result)"]]
    texts, results = ([text for who, text in turns if who == wanted] for wanted in "au")
    assert sum("<search>" in text for text in texts) == case["valid_tool_calls"]
    score = search_text.examiner_format(case["source_document"], case["hop"], texts, results)
    assert score == pytest.approx(case["format_score"])
    written = search_text.parse_question(texts[-1]) or ("", "Arbor")
    assert written == (case["question"], case["answer"])


@pytest.mark.parametrize(
    "text, turn",
    [
        ("<think>x</think><search> q </search>", ("search", "q")),
        ("<think>x</think><answer>a</answer>", ("answer", "a")),
        ("<search>q</search><answer>a</answer>", ("search", "q")),  # the first one
        ("<answer>a</answer><search>q</search>", ("answer", "a")),
        ("<search>q<answer>a</answer>", ("answer", "a")),
        ("</search>q<search>", (None, "")),
        (Turn("next: rival", "search", "rival of Aldra Bruby").text, ("search", "rival of Aldra Bruby")),
    ],
)
def test_turns(text, turn):
    assert search_text.parse_turn(text) == turn


@pytest.mark.parametrize("gold", ["A", "The", "!!!", "+", "The A"])
def test_a_gold_of_which_nothing_is_left_needs_an_answer(gold):
    """SQuAD's normalisation drops articles and punctuation."""
    problem = Problem("Which option?", (gold,))
    texts = [gold, "", "B", "-", "an"]
    scores = [search_text.exact_match(problem, f"<answer>{text}</answer>") for text in texts]
    assert scores == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_the_last_answer_of_an_episode_counts_everywhere():
    """In training (f1, exact match) and in evaluation; IGPO's own function takes the first."""
    problem = Problem("?", ("a",))
    text = "<think>x</think><answer>b</answer><answer>a</answer>"
    assert search_text.f1(problem, text) == 0.0
    functions = [*SearchQA.reward_functions.values(), search_qa.f1]
    assert [function(problem, text) for function in functions] == [1.0] * 4
    assert search_qa.f1(problem, "<answer>a", invalid=-2.0) == -2.0


def test_an_empty_query_is_answered_here(server):
    task = SearchQA()
    task.retriever = HttpRetriever(server.url)
    texts = ["<search></search>", "<search>friend of Aldra Bruby</search>", "<search>  </search>"]
    replies = [reply["content"] for reply in task.step(texts, turn=1)]
    assert replies[0] == replies[2] == "<result>nothing found</result>"
    assert "Aldra Bruby's friend is" in replies[1]
    assert [request["queries"] for request in server.requests] == [["friend of Aldra Bruby"]]
    assert task.step(["<search></search>"], turn=1) and len(server.requests) == 1


def test_the_exact_sentence_comes_first():
    facts = random.Random(0).sample(sorted(world().facts), 300)
    first = [world().search(f"{relation} of {person}")[0] for person, relation in facts]
    assert first == [world().sentence(*fact) for fact in facts]
    results = world().search("teacher of Midra Oslen")
    assert len(results) == 3 and all(text.startswith("Midra Oslen's ") for text in results)
    assert world().lookup("Midra Oslen", "teacher") in results[0]
    assert world().lookup("Midra Oslen", "boss") is world().lookup("Midra", "teacher") is None


@pytest.fixture
def server(monkeypatch):
    """A local server that speaks Search-R1's protocol, or says what `server.answer` holds."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.server.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            queries, top_k = self.server.requests[-1]["queries"], self.server.requests[-1]["topk"]
            answer = self.server.answer
            if answer is None:
                texts = [world().search(query, top_k) for query in queries]
                rows = [[f'"{text.split(chr(39))[0]}"\n{text}' for text in row] for row in texts]
                rows = [[{"document": {"id": "1", "contents": text}, "score": 0.5} for text in row] for row in rows]
                answer = json.dumps({"result": rows}).encode()
            self.send_response(self.server.status)
            if self.server.status == 307:
                self.send_header("Location", "http://elsewhere/")
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args):
            pass

    monkeypatch.setenv("no_proxy", "*")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.requests, server.answer, server.status = [], None, 200
        server.url = f"http://127.0.0.1:{server.server_port}/retrieve"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def test_http_client_gives_what_the_local_retriever_gives(server):
    queries = [f"{relation} of {person}" for person, relation in sorted(world().facts)[:5]]
    client = HttpRetriever(server.url)
    assert client.search_batch(queries, 2) == world().search_batch(queries, 2)
    assert server.requests == [{"queries": queries, "topk": 2, "return_scores": True}]  # one batch
    assert client.search_batch([]) == [] and len(server.requests) == 1
    task = SearchQA()
    task.retriever = HttpRetriever(server.url)
    assert task.search(queries) == SearchQA().search(queries)


def test_a_server_that_is_broken_or_down_is_one_sentence(server):
    with pytest.raises(ValueError, match="expected something like http"):
        HttpRetriever("localhost:8000")
    client = HttpRetriever(server.url, pause=0.0)
    server.answer = b"<html>"
    with pytest.raises(ValueError, match=r"^retriever http://.+: answered b.+, expected \{.+\} with 1 lists of .+$"):
        client.search_batch(["q"])
    server.status = 500
    with pytest.raises(ConnectionError, match=r"no answer in eight attempts \(HTTP Error 500: .+\)$"):
        client.search_batch(["q"])
    for code in (408, 429):  # a busy server
        server.status = code
        with pytest.raises(ConnectionError, match=rf"no answer in eight attempts \(HTTP Error {code}: .+\)$"):
            client.search_batch(["q"])
    assert len(server.requests) == 1 + 8 + 16
    server.answer = b"no key\nof yours " + 300 * b"x"
    for code in (400, 401, 404, 413, 422, 451):
        server.status = code
        with pytest.raises(ConnectionError, match=rf"^retriever http://.+: HTTP Error {code}: .*no key of yours x+$") as stop:
            client.search_batch(["q"])
        assert str(stop.value).count("x") == 200 - len("no key of yours ")
    server.status = 307
    with pytest.raises(ConnectionError, match="HTTP Error 307: .*, it is at http://elsewhere/$"):
        client.search_batch(["q"])
    assert len(server.requests) == 1 + 8 + 16 + 7, "no second attempt"
    server.shutdown()
    server.server_close()
    with pytest.raises(ConnectionError, match=r"^retriever http://.+: no answer in eight attempts \(.+refused.*\)$"):
        client.search_batch(["q"])


@pytest.mark.parametrize("hops", [1, 2, 3, 4])
def test_questions_follow_a_chain(hops):
    task = SearchQA(hops=(hops,))
    for index in range(50):
        problem = task.train_problem(index, seed=0)
        person = re.search(r"[A-Z]\w+ [A-Z]\w+(?=\?)", problem.question).group()
        relations = re.findall("|".join(RELATIONS), problem.question)
        met = [person]
        for relation in relations[::-1]:
            met.append(world().lookup(met[-1], relation))
        assert len(relations) == problem.hops == hops and len(set(met)) == hops + 1
        assert problem.answers == (met[-1],) and problem.answers[0] not in problem.question
        results = [result for _, result in task.path_steps(problem)]
        assert [world().sentence(a, r) in text for (a, r, _), text in zip(problem.path, results)] == [True] * hops


def test_steps_end_with_an_answer_without_a_tag_and_at_the_limit():
    task = SearchQA(max_turns=3)
    search, answer = "<search>friend of Aldra Bruby</search>", "<answer>x</answer>"
    replies = task.step([search, answer, "neither", "<search>", f"{search}{answer}"], turn=2)
    assert [reply is None for reply in replies] == [False, True, True, True, True]  # an answer after a search ends it, too
    assert replies[0] == {"role": "user", "content": f"<result>{task.search(['friend of Aldra Bruby'])[0]}</result>"}
    assert task.step([search], turn=3) == [None]
    assert task.step(["<search>unknown words</search>"], turn=1)[0]["content"] == "<result>nothing found</result>"


def test_punctuation_makes_no_new_question():
    """pi-Play's examiner must not write a question of the evaluation without its question mark."""
    places = {Problem(text, ("x",)).place for text in ("Who is  it?", "who is it", "Who is it ?", "Who is it.")}
    assert len(places) == 1


def test_a_retrieved_document_cannot_break_the_format():
    """IGPO's format check counts tags over the whole episode, results too: none may come from a document."""
    task = SearchQA()
    task.retriever = type("", (), {"search_batch": lambda self, queries, top_k: [["<code>x <tool_call> <think> y"]]})()
    (found,) = task.search(["anything"])
    assert "<" not in found
    turns = f"<think>a</think><search>b</search><result>{found}</result><think>c</think><answer>d</answer>"
    assert search_text.f1(Problem("q", ("d",)), turns, -2.0) == 1.0
    assert search_text.f1(Problem("q", ("d",)), turns.replace("</search>", ""), -2.0) == -2.0
