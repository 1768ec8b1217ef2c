"""Search questions: graders and routing on reference cases, the retrievers, the split, every role."""

import http.server
import json
import random
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from envs import search_qa, search_text
from envs.retriever import FIRST_NAMES, LAST_NAMES, RELATIONS, HttpRetriever, Retriever, World
from envs.search_demonstrations import SHARES, demonstration
from envs.search_qa import INSTRUCTIONS, Problem, SearchQA, Turn, result_message, world

REFERENCE = Path(__file__).parent / "reference"
DR_MAS, IGPO, PI_PLAY = (json.loads((REFERENCE / f"{name}.json").read_text()) for name in ("dr_mas", "igpo", "pi_play"))
NILE = Problem("Which river is the longest?", ("Nile", "the Nile River"))


# --- Grading -----------------------------------------------------------------------------------------------------


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


def test_reference_routing():
    case = DR_MAS["search_routing"]
    routed = [active and search_text.sufficient(text) for text, active in zip(case["in"], case["active"])]
    assert routed == case["sufficient"]


@pytest.mark.parametrize("case", DR_MAS["search_em_reward"]["cases"], ids=lambda case: case["text"])
def test_reference_exact_match(case):
    assert search_text.exact_match(Problem("?", tuple(case["targets"])), case["text"]) == case["reward"]


@pytest.mark.parametrize("case", IGPO["outcome_reward"]["cases"], ids=lambda case: case["solution"])
def test_reference_word_f1_and_format(case):
    problem = Problem("?", tuple(case["ground_truth"].split("<|answer_split|>")))
    assert search_text.f1(problem, case["solution"], invalid=-2.0) == pytest.approx(case["f1"])
    assert search_text.f1(problem, case["solution"]) == pytest.approx(case["noformatf1"])
    assert search_text.format(problem, case["solution"]) == (case["f1"] != -2.0)


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
    "completion, exact, f1, well_formed",
    [
        ("<think>x</think><answer>Nile</answer>", 1, 1, 1),
        ("<answer> the NILE. </answer>", 1, 4 / 5, 1),  # the, nile against the, nile, river
        ("<answer>Nile River</answer>", 1, 4 / 5, 1),  # exact match drops the article, word F1 keeps it
        ("<answer>Nile Nile Nile</answer>", 0, 1, 1),  # sets of words
        ("<answer>river</answer>", 0, 1 / 2, 1),
        ("<answer>Blue Nile</answer>", 0, 2 / 3, 1),
        ("<answer>Amazon</answer>", 0, 0, 1),
        ("<answer>Ni-le</answer>", 1, 0, 1),  # punctuation is dropped there and separates words here
        ("<answer></answer>", 0, 0, 1),
        ("<answer>Amazon</answer> no, <answer>Nile</answer>", 1, 0, 1),  # the last there, the first here
        ("<answer>Nile", 0, 0, 0),
        ("Nile</answer>", 0, 0, 0),
        ("Nile", 0, 0, 0),
        ("<think><answer>Nile</answer>", 1, 0, 0),
        ("<search>longest river<answer>Nile</answer>", 1, 0, 0),
        ("<think>x</think><search>q</search><think>y</think><answer>Nile</answer>", 1, 1, 1),
        ("", 0, 0, 0),
    ],
)
def test_grades(completion, exact, f1, well_formed):
    assert search_text.exact_match(NILE, completion) == exact
    assert search_text.f1(NILE, completion) == pytest.approx(f1)
    assert search_text.format(NILE, completion) == well_formed


@pytest.mark.parametrize(
    "text, turn",
    [
        ("<think>x</think><search> q </search>", ("search", "q")),
        ("<think>x</think><answer>a</answer>", ("answer", "a")),
        ("<search>q</search><answer>a</answer>", ("search", "q")),  # the first one
        ("<answer>a</answer><search>q</search>", ("answer", "a")),
        ("<search>q<answer>a</answer>", ("answer", "a")),
        ("</search>q<search>", (None, "")),
        ("q", (None, "")),
        ("<search></search>", ("search", "")),
        (Turn("next: rival", "search", "rival of Aldra Bruby").text, ("search", "rival of Aldra Bruby")),
    ],
)
def test_turns(text, turn):
    assert search_text.parse_turn(text) == turn


def test_questions_of_an_examiner():
    parse = search_text.parse_question
    assert parse("<think>x</think><question> Who? </question><answer>Al</answer>") == ("Who?", "Al")
    for text in ("<question>Who?</question>", "<question></question><answer>a</answer>", "<answer>a</answer>", ""):
        assert parse(text) is None


# --- Retrievers --------------------------------------------------------------------------------------------------


def test_the_exact_sentence_comes_first():
    facts = random.Random(0).sample(sorted(world().facts), 3000)
    start = time.process_time()
    first = [world().search(f"{relation} of {person}")[0] for person, relation in facts]
    assert time.process_time() - start < 3.0, "fewer than a thousand searches a second"
    assert first == [world().sentence(*fact) for fact in facts]
    results = world().search("teacher of Midra Oslen")
    assert len(results) == 3 and all(text.startswith("Midra Oslen's ") for text in results)
    assert world().lookup("Midra Oslen", "teacher") in results[0]
    assert world().lookup("Midra Oslen", "boss") is world().lookup("Midra", "teacher") is None


def test_search_is_deterministic_and_ranks_by_bm25():
    documents = [("Nile", "The Nile is a river."), ("Rhine", "The Rhine is a river."), ("Delta", "Nile delta delta.")]
    retriever = Retriever(documents)
    assert retriever.search("nile delta", 2)[0] == "Nile delta delta."
    assert retriever.search("river", 9) == ["The Nile is a river.", "The Rhine is a river."]  # equal: in order
    assert retriever.search("RHINE, please?", 1) == ["The Rhine is a river."]
    assert retriever.search("unknown") == retriever.search("") == Retriever([]).search("nile") == []
    assert retriever.search_batch(["rhine", "x"], 1) == [["The Rhine is a river."], []]
    queries = ["rival", "Midra", "Midra Midra", "friend of Oslen", "is", "Oslen Bruby rival"]
    assert World().search_batch(queries) == [world().search(query) for query in queries]


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
    task = SearchQA(retriever_url=server.url)
    assert task.search(queries) == SearchQA().search(queries)


@pytest.mark.parametrize(
    "answer",
    [b"<html>", b'{"result": []}'],
)
def test_an_answer_of_another_protocol_is_one_sentence(server, answer):
    server.answer = answer
    with pytest.raises(ValueError, match=r"^retriever http://.+: answered b.+, expected \{.+\} with 1 lists of .+$"):
        HttpRetriever(server.url).search_batch(["q"])


def test_a_server_that_is_down_or_broken_is_one_sentence(server):
    server.status = 500
    with pytest.raises(ConnectionError, match=r"no answer in three attempts \(HTTP Error 500: .+\)$"):
        HttpRetriever(server.url, pause=0.0).search_batch(["q"])
    assert len(server.requests) == 3
    server.shutdown()
    server.server_close()
    with pytest.raises(ConnectionError, match=r"^retriever http://.+: no answer in three attempts \(.+refused.*\)$"):
        HttpRetriever(server.url, pause=0.0).search_batch(["q"])


@pytest.mark.parametrize("url", ["localhost:8000", "file:///etc/hosts"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ValueError, match="expected something like http"):
        HttpRetriever(url)


# --- Problems ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hops", [1, 2, 3, 4])
def test_questions_follow_a_chain(hops):
    task = SearchQA(hops=(hops,))
    for index in range(200):
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


def test_the_evaluation_set_is_fixed_and_never_in_training():
    task = SearchQA()
    problems = task.evaluation_problems(512)
    assert len(set(problems)) == 512 and problems[:64] == task.evaluation_problems(64)
    assert problems[1] == Problem("Who is the friend of the friend of Cortta Holik?", ("Milis Varer",))
    assert problems[511].question == "Who is the neighbour of the mother of the rival of Altta Tamer?"
    drawn = {task.train_problem(index, seed) for seed in range(3) for index in range(3000)}
    assert not drawn & set(problems) and len(drawn) > 5000
    assert not any(problem.held_out for problem in drawn) and all(problem.held_out for problem in problems)
    one_hop = SearchQA(hops=(1,)).evaluation_problems(2000)
    assert 1300 < len(one_hop) < 1800  # ends, with what there is: one in 16 of the facts


def test_steps_end_with_an_answer_without_a_tag_and_at_the_limit():
    task = SearchQA(max_turns=3)
    search, answer = "<search>friend of Aldra Bruby</search>", "<answer>x</answer>"
    replies = task.step([search, answer, "neither", "<search>", f"{search}{answer}"], turn=2)
    assert [reply is None for reply in replies] == [False, True, True, True, False]
    assert replies[0] == {"role": "user", "content": f"<result>{task.search(['friend of Aldra Bruby'])[0]}</result>"}
    assert task.step([search], turn=3) == [None]
    assert task.step(["<search>unknown words</search>"], turn=1)[0]["content"] == "<result>nothing found</result>"


# --- Questions from a file -----------------------------------------------------------------------------------------


def write(path, rows) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def test_questions_from_a_file(tmp_path, server):
    rows = [{"question": f"question {i}?", "golden_answers": [f"{i}", "x"]} for i in range(320)]
    rows += [{"question": "QUESTION  7?", "answers": "7"}, {"question": "other", "answer": "o"}]
    task = SearchQA(write(tmp_path / "nq.jsonl", rows), server.url)
    evaluation, training = task.evaluation_problems(1000), set(task.train_rows)
    assert len(evaluation) + len(training) == 321 and 5 < len(evaluation) < 40  # copies of a question are one
    assert all(problem.held_out for problem in evaluation) and not any(problem.held_out for problem in training)
    epoch = [task.train_problem(index, seed=0) for index in range(len(training))]
    assert set(epoch) == training and epoch[5] == task.train_problem(5, seed=0)
    assert task.train_problem(len(training), 0) != epoch[0] or task.train_problem(len(training) + 1, 0) != epoch[1]
    generator = random.Random(0)
    assert task.sample(generator) in training and task.sample(generator, held_out=True) in evaluation
    problem = next(problem for problem in task.train_rows if len(problem.answers) == 2)
    assert search_text.exact_match(problem, "<answer>X</answer>") == 1.0
    assert task.document(generator) == "nothing found"
    write(tmp_path / "nq.jsonl", rows[::-1])
    assert SearchQA(str(tmp_path / "nq.jsonl"), server.url).evaluation_problems(9) == evaluation[:9]
    with pytest.raises(ValueError, match="need a retrieval server"):
        SearchQA(str(tmp_path / "nq.jsonl"))


@pytest.mark.parametrize(
    "line, sentence",
    [
        (b"question,answer", "found text that is not valid JSON, expected one JSON object"),
        (b'{"answer": "1"}', "found no question, expected a key question"),
        (b'{"question": "q"}', "found no answer, expected a key golden_answers or answers or answer"),
        (b'{"question": "q", "answer": 5}', "found answer of type int, expected a string"),
    ],
)
def test_a_broken_line_gives_its_sentence(tmp_path, line, sentence):
    path = tmp_path / "broken.jsonl"
    path.write_bytes(b'{"question": "first", "answer": "1"}\n\n' + line + b'\n{"question": "last", "answer": "2"}\n')
    with pytest.raises(ValueError) as error:
        search_qa.read_questions(str(path))
    assert str(error.value) == f"{path}, line 3: {sentence}"


# --- Prompts and demonstrations ------------------------------------------------------------------------------------


def test_prompts_show_what_the_role_may_see():
    task, generator = SearchQA(hops=(2,)), random.Random(0)
    problem = task.sample(generator)
    steps = task.path_steps(problem)
    for role in ("answerer", "router", "searcher", "responder"):
        (message,) = task.prompt(replace(problem, privileged="SECRET"), role, steps, (("Router", "go on"),))
        assert message["role"] == "user" and message["content"].endswith("\nRouter: go on\n" + INSTRUCTIONS[role])
        assert message["content"].startswith("How the question was made:\nSECRET\nQuestion: ")
        assert all(text in message["content"] for step in steps for text in step)
    (message,) = task.prompt(problem)
    assert message["content"] == f"Question: {problem.question}\n{INSTRUCTIONS['answerer']}"
    assert task.qcp(problem) in task.prompt(replace(problem, privileged=task.qcp(problem)))[0]["content"]
    assert task.qcp(problem) == search_qa.render(steps) and problem.answers[0] in task.qcp(problem)
    document = task.document(generator)
    assert document in [world().sentence(*fact) for fact in world().facts]
    assert f"{document}\nSearches: 2\n" in task.prompt(search_qa.Request(document, 2))[0]["content"]


def test_demonstrations_cover_every_role_and_are_short():
    task, generator, seen = SearchQA(), random.Random(0), []
    for _ in range(4000):
        messages, completion = demonstration(task, generator)
        assert messages[0]["role"] == messages[-1]["role"] == "user" and len(completion.split()) < 40
        assert all(a["role"] != b["role"] for a, b in zip(messages, messages[1:]))
        text = messages[0]["content"]
        role = next(role for role, instruction in INSTRUCTIONS.items() if text.endswith(instruction))
        seen.append("privileged" if text.startswith("How the question was made") else role)
        tag = {"router": "verify", "searcher": "search", "responder": "answer"}.get(role)
        assert tag is None or f"{tag}>" in completion
    assert {role: seen.count(role) / 4000 for role in seen} == pytest.approx(SHARES, abs=0.03)
    assert demonstration(task, random.Random(5)) == demonstration(task, random.Random(5))


def test_demonstrations_never_show_a_held_out_question():
    task, generator = SearchQA(hops=(1, 1, 1, 2, 2, 3)), random.Random(0)
    for _ in range(2000):
        messages, completion = demonstration(task, generator)
        for question in re.findall(r"Who is the [^?\n]+\?", messages[0]["content"]):
            assert not Problem(question, ()).held_out


# --- The shipped model ---------------------------------------------------------------------------------------------


def test_the_tokenizer_keeps_names_whole_and_chats_grow_by_appending():
    """A multi-turn script appends to the sampled ids: what was written before must not be tokenised anew."""
    folder = Path(__file__).parents[1] / "envs" / "tiny_lm" / "search_qa"
    tokenizer, task = AutoTokenizer.from_pretrained(folder), SearchQA(hops=(2,))
    for first, last in zip(FIRST_NAMES, LAST_NAMES[::-1]):
        assert len(tokenizer.encode(f"{first} {last}")) == len(tokenizer.encode(f"is {first} {last}.")) - 2 == 2
    assert all(len(tokenizer.encode(f"<{slash}{tag}>")) == 1 for tag in search_qa.TAGS for slash in ("", "/"))
    problem = task.evaluation_problems(1)[0]
    messages, ids = task.prompt(problem), []
    for query, result in task.path_steps(problem):
        for message in ({"role": "assistant", "content": Turn("next", "search", query).text}, result_message(result)):
            longer = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
            assert longer[: len(ids)] == ids and len(longer) > len(ids)
            messages, ids = [*messages, message], longer
    assert len(ids) < 150


def test_a_retrieved_document_cannot_break_the_format():
    """IGPO's format check counts tags over the whole episode, results too: none may come from a document."""
    task = SearchQA()
    task.retriever = type("", (), {"search_batch": lambda self, queries, top_k: [["<code>x <tool_call> <think> y"]]})()
    (found,) = task.search(["anything"])
    assert "<" not in found
    turns = f"<think>a</think><search>b</search><result>{found}</result><think>c</think><answer>d</answer>"
    assert search_text.f1(Problem("q", ("d",)), turns, -2.0) == 1.0


def test_a_server_that_is_gone_ends_a_run_with_one_sentence():
    task = SearchQA(retriever_url="http://127.0.0.1:9/retrieve")
    task.retriever.pause = 0.0
    with pytest.raises(SystemExit, match="error: .*127.0.0.1:9"):
        task.search(["anything"])
