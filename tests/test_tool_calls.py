"""Tool calls: both rewards against the official code, hostile text, the held-out split, demonstrations, files."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from test_problems import write

from envs import tool_calls
from envs.tool_calls import TOOLS, Problem, ToolCalls, parse_calls, tool_call_correctness

REFERENCE = json.loads((Path(__file__).parent / "reference/gdpo.json").read_text())["vectors"]
CORRECTNESS = [vector for vector in REFERENCE if vector["id"].startswith("tool_correctness/")]
SCORE = [vector for vector in REFERENCE if vector["id"].startswith("tool_score/")]
THINK, CALL = "<think>x</think>\n", '{"name": "w", "parameters": {"city": "A"}}'
TOOL, RESPONSE = f"<tool_call>\n{CALL}\n</tool_call>", "<response>b</response>"
GOLD = {"tool": THINK + TOOL, "response": THINK + RESPONSE, "both": f"{THINK}{TOOL}\n{RESPONSE}", "neither": THINK[:-1]}


@pytest.mark.parametrize("vector", CORRECTNESS, ids=lambda vector: vector["id"])
def test_reference_tool_correctness(vector):
    reward = tool_call_correctness(vector["inputs"]["ground_truth"], vector["inputs"]["predicted"])
    assert reward == pytest.approx(vector["outputs"]["reward"], abs=1e-6)


@pytest.mark.parametrize("vector", SCORE, ids=lambda vector: vector["id"])
def test_reference_tool_score(vector):
    problem, response = Problem(vector["inputs"]["answer"]), vector["inputs"]["response"]
    correctness, well_formed = tool_calls.correctness(problem, response), tool_calls.format(problem, response)
    assert (correctness, well_formed) == (vector["outputs"]["correctness"], vector["outputs"]["format"])
    assert correctness + well_formed == vector["outputs"]["total"]


def call(name: str, **parameters) -> dict:
    return {"name": name, "parameters": parameters}


@pytest.mark.parametrize(
    "gold, predicted, reward",
    [
        ([call("w", a=1)], [call("w", a="1")], 6 * 2 / 3 - 3),  # 1 is not "1"
        ([call("w", a=1), call("w", a=1)], [call("w", a=1)], 6 * 2.5 / 5 - 3),  # a multiset of names; used once
        ([call("w")], [call("w"), call("v")], 6 * (1 / 2 + 1) / 2 - 3),  # no parameters: the same names of parameters
        # Greedy: the first gold call takes the second prediction for 1.5, where it is worth 3 to the second gold call.
        ([call("w", a=1), call("w", a=1, b=2)], [call("w", c=1), call("w", a=1, b=2)], 6 * (1 + 1.5) / 6 - 3),
    ],
)
def test_correctness_by_hand(gold, predicted, reward):
    assert tool_call_correctness(gold, predicted) == pytest.approx(reward, abs=1e-12)


@pytest.mark.parametrize("predicted", [None, 5, {}, ["w"], [{"name": "w"}], [{"name": "w", "parameters": []}]])
def test_json_that_is_no_list_of_calls_gets_the_least(predicted):
    assert tool_call_correctness([call("w", a=1)], predicted) == -3


def test_parse_calls():
    assert parse_calls(TOOL) == [json.loads(CALL)]
    assert parse_calls(f"<tool_call>{CALL}\n 7 \r\n[]</tool_call><tool_call>x</tool_call>") == [json.loads(CALL), 7, []]
    for text in ("", CALL, f"<tool_call>{CALL}", f"{CALL}</tool_call>", "<tool_call></tool_call>"):
        assert parse_calls(text) is None
    for block in (f"{CALL}\n\n{CALL}", CALL[:-1], f"{CALL} {CALL}", "{'name': 'w'}"):
        assert parse_calls(f"<tool_call>{block}</tool_call>") is None


@pytest.mark.parametrize("gold", GOLD)
@pytest.mark.parametrize("response", GOLD)
def test_the_tags_of_the_gold_text_decide_the_format(gold, response):
    problem = Problem(GOLD[gold])
    assert tool_calls.format(problem, GOLD[response]) == float(gold == response)
    due, made = "<tool_call>" in GOLD[gold], "<tool_call>" in GOLD[response]
    assert tool_calls.correctness(problem, GOLD[response]) == ((3.0 if made else -3.0) if due else 0.0)
    assert tool_calls.exact(problem, GOLD[response]) == (made if due else gold == response)


@pytest.mark.parametrize(
    "gold, response, well_formed",
    [
        ("tool", f" {THINK}{TOOL}\n", 1),  # outer spaces do not count
        ("tool", f"{THINK}<tool_call>\nno JSON\n</tool_call>", 1),
        ("tool", f"{THINK}<tool_call>\n{CALL}</tool_call>", 0),  # the block needs both of its line ends
        ("tool", f"{THINK}{TOOL}\nDone.", 0),
        ("tool", f"{THINK}{TOOL}\n{TOOL}", 0),
        ("response", f"{THINK}<response>a\nb</response>", 1),
        ("both", f"{THINK}{RESPONSE}\n{TOOL}", 0),  # in this order only
    ],
)
def test_format(gold, response, well_formed):
    assert tool_calls.format(Problem(GOLD[gold]), response) == well_formed


def test_gold_texts_answer_their_queries():
    task, counts = ToolCalls(), Counter()
    for index in range(1000):
        problem = task.train_problem(index, seed=0)
        calls = parse_calls(problem.answer) or []
        counts[len(calls)] += 1
        shown = re.findall(r"(\w+)\(([^)]*)\)", problem.tools)
        assert len(shown) == 4 and all(parameters.split(", ") == TOOLS[name][0].split() for name, parameters in shown)
        assert {item["name"] for item in calls} <= {name for name, _ in shown}
        for item in calls:
            assert list(item["parameters"]) == TOOLS[item["name"]][0].split()
            assert all(str(value) in problem.query for value in item["parameters"].values())
        assert [task.reward_functions[name](problem, problem.answer) for name in ("exact", "format")] == [1, 1]
    assert counts[0] > 50 and min(counts[1], counts[2]) > 350 and len(counts) == 3


def test_copies_of_the_only_held_out_query_are_not_trained_on(tmp_path):
    queries = [query for query in map(str, range(60)) if not Problem("", query).held_out][:5]
    queries += [queries[0] + " A", queries[0] + "  a "]
    assert not any(Problem("", query).held_out for query in queries)
    task = ToolCalls(write(tmp_path / "data.jsonl", [{"query": query, "answer": GOLD["tool"]} for query in queries]))
    seen = [{row.plain_query for row in rows} for rows in (task.train_rows, task.evaluation_rows)]
    assert len(seen[1]) == 1 and not seen[0] & seen[1]


def test_a_file_without_calls_is_a_sentence(tmp_path):
    """Else no answer could earn anything. That no tool fits is said by <response> </response>."""
    with pytest.raises(ValueError, match="found no <tool_call> and no <response> in any answer, expected"):
        ToolCalls(write(tmp_path / "bare.jsonl", [{"query": f"{i}", "answer": f"[{CALL}]"} for i in range(50)]))
    ToolCalls(write(tmp_path / "silent.jsonl", [{"query": f"{i}", "answer": GOLD["response"]} for i in range(50)]))


@pytest.mark.parametrize(
    "row, query, tools",
    [
        ({"query": "q", "answer": GOLD["tool"]}, "q", ""),
        ({"system": "s", "question": "q", "output": GOLD["response"]}, "q", "s"),
        ({"instruction": "s", "input": "q", "output": GOLD["both"]}, "q", "s"),  # rlla_4k
        ({"instruction": "q", "input": "", "output": GOLD["neither"]}, "q", ""),
        ({"tools": [{"name": "w"}], "instruction": "q", "answer": GOLD["tool"]}, "q", '[{"name": "w"}]'),
    ],
)
def test_keys_of_a_row(tmp_path, row, query, tools):
    path = write(tmp_path / "data.jsonl", [row, "", *({"query": f"{i}", "answer": GOLD["tool"]} for i in range(50))])
    task = ToolCalls(path)
    assert Problem(row.get("answer", row.get("output")), query, tools) in task.train_rows + task.evaluation_rows
