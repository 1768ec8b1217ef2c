"""Data files of every format, and rows that are no prompts: by the reader that scripts and envs/ share word for word."""

import json
import re

import pytest
import sync_shared_blocks

from algorithms import dapo, grpo
from envs import data_files
from envs.math_jsonl import MathJsonl
from envs.search_problems import read_questions

ROWS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(40)]


def test_the_reader_is_the_same_text_in_envs():
    source = open(data_files.__file__, encoding="utf-8").read()
    texts = sync_shared_blocks.texts("grpo")
    assert texts["read_file"] in source and texts["read_rows"] in source


def write(folder, kind: str) -> str:
    """ROWS in a file of this kind."""
    path = folder / f"train.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    if kind == "json":
        path.write_text(json.dumps(ROWS, indent=2))
    if kind == "csv":
        path.write_bytes(b"\xef\xbb\xbfquestion,answer\r\n" + "".join(f'"{row["question"]}",{row["answer"]}\r\n' for row in ROWS).encode())
    if kind in ("parquet", "hub"):
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "train.parquet")
    if kind == "hub":
        pytest.importorskip("datasets")
        return f"hub:{folder}:default:train"
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "hub"])
def test_every_format_gives_the_same_rows(kind, tmp_path):
    name = write(tmp_path, kind)
    assert [row for _, row in grpo.read_rows(name)] == ROWS
    assert grpo.JsonLines(name).rows == ROWS
    assert [(row.question, row.answer) for row in MathJsonl(name).rows] == [tuple(row.values()) for row in ROWS]
    train, evaluation = read_questions(name)
    assert {row.answers for row in train + evaluation} == {(row["answer"],) for row in ROWS}


def test_a_table_of_chats_with_null_columns(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    rows = [{"prompt": chat, "question": "not this", "answer": 3.0}, {"prompt": None, "question": "this", "answer": 4.0}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "chats.parquet")
    task = grpo.JsonLines(str(tmp_path / "chats.parquet"))
    assert [task.prompt(row) for row in task.rows] == [chat, [{"role": "user", "content": "this"}]]


def test_a_file_for_verl(tmp_path):
    """Chat messages, of which the last is the question, and the answer in reward_model."""
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 2?"}]
    rows = [{"prompt": chat, "reward_model": {"style": "rule", "ground_truth": "3"}}]
    rows += [{"problem": "What is 2 + 2?", "reward_model": {"ground_truth": 5}, "solution": "#### 4"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = MathJsonl(tmp_path / "rows.jsonl")
    assert [row.answer for row in task.rows] == ["3", "4"]
    first, last = task.prompt(task.rows[0])
    assert first == chat[0] and last["role"] == "user" and last["content"].startswith("What is 1 + 2?\nReason")
    rows = [{"prompt": [*chat[:1], {"role": "user", "content": f"{n}?"}, chat[1]], "ground_truth": n} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert len(MathJsonl(tmp_path / "rows.jsonl").train_rows) in range(30, 40), "what was said before makes another question"
    for prompt, sentence in (
        (["What?"], "found 'What?', expected a text or messages as prompt"),
        ([{"from": "human", "value": "What?"}], "found {'from': 'human', 'value': 'What?'}, expected a text or messages"),
        ([], "found [], expected a user's message at the end of prompt"),
        ([*chat, {"role": "assistant", "content": "3"}], "expected a user's message at the end of prompt"),
    ):
        (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": prompt, "answer": 3}))
        with pytest.raises(ValueError, match=re.escape(sentence)):
            MathJsonl(tmp_path / "rows.jsonl")


def test_a_prompt_wins(tmp_path):
    row = {"question": "not this", "problem": "nor this", "prompt": "this", "answer": "3"}
    (tmp_path / "all.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(ROWS[0]))
    task = grpo.JsonLines(str(tmp_path / "all.jsonl"))
    assert task.prompt(task.rows[0])[0]["content"] == "this"
    assert MathJsonl(tmp_path / "all.jsonl").rows[0].question == "this"


BROKEN = [  # the third line of a file, part of the sentence
    ('{"question": null}', "line 3: found {'role': 'user', 'content': None}, expected text or chat messages"),
    ('{"question": ["What", "is"]}', "line 3: found 'What', expected text or chat messages"),
    ('{"question": " "}', "line 3: found [{'role': 'user', 'content': ' '}], expected something to answer"),
    ('{"prompt": []}', "line 3: found [], expected something to answer"),
    ('{"prompt": [{"role": "user"}]}', "line 3: found {'role': 'user'}"),
    ('{"prompt": [{"content": "Who?"}]}', "line 3: found {'content': 'Who?'}"),
    ('{"prompt": [{"from": "human", "value": "Who?"}]}', "line 3: found {'from': 'human'"),
    ('{"prompt": [{"role": "human", "content": "Who?"}]}', "line 3: found {'role': 'human'"),
    ('{"prompt": [{"role": "user", "content": [{"type": "text", "text": "Who?"}]}]}', "line 3: found {'role': 'user', 'content': [{"),
    ('{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}', "expected something to answer"),
    ('{"question": "half \\ud83d of a pair"}', "line 3: not UTF-8 text of a .jsonl, .json, .csv or .parquet file, or half a surrogate pair"),
    (b'{"question": "caf\xe9?"}', "line 3: not UTF-8 text of a .jsonl, .json, .csv or .parquet file, or half a surrogate pair"),
    ('{"question": "a", "meta": ' + "[" * 200_000 + "]" * 200_000 + "}", "line 3: not JSON, maximum recursion depth"),
    ('{"question": "a", "n": 1' + "0" * 5000 + "}", "line 3: not JSON, Exceeds the limit (4300 digits)"),
    ("{'question': 'a'}", "line 3: not JSON, Expecting property name"),
    ('["a"]', "line 3: found ['a'], expected names and values"),
]


@pytest.mark.parametrize("line, sentence", BROKEN, ids=lambda value: str(value)[:30])
def test_a_broken_row_is_named(line, sentence, tmp_path):
    line = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "rows.jsonl").write_bytes(b'{"question": "first"}\n\n' + line + b"\n")
    with pytest.raises(ValueError) as error:
        dapo.JsonLines(str(tmp_path / "rows.jsonl"))
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_lines_end_as_they_do_on_a_mac_of_old_and_on_windows(tmp_path):
    for end in ("\r", "\r\n"):
        (tmp_path / "rows.jsonl").write_bytes(end.join(json.dumps(row) for row in ROWS).encode())
        assert grpo.JsonLines(str(tmp_path / "rows.jsonl")).rows == ROWS


def test_a_file_named_json_may_have_an_object_a_line(tmp_path):
    (tmp_path / "rows.json").write_text("\n".join(json.dumps(row) for row in ROWS))
    assert grpo.JsonLines(str(tmp_path / "rows.json")).rows == ROWS


def test_a_sorted_file_is_not_judged_by_its_beginning(tmp_path):
    """Held-out rows come from all parts of the file; copies of a prompt are on one side, and no side is empty."""
    for size in (2, 3, 10, 400):
        rows = [{"question": f"question {n}", "level": n} for n in range(size)]
        (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows + rows))
        task = grpo.JsonLines(str(tmp_path / "rows.jsonl"))
        held, train = ({row["level"] for row in side} for side in (task.evaluation_rows, task.train_rows))
        assert held and train and not held & train and len(task.evaluation_rows) == 2 * len(held)
    first = [row["level"] for row in task.evaluation_problems(16)]
    assert 100 < sum(first) / len(first) < 300 and 10 <= len(held) <= 40  # a 16th of 400 is 25


def test_names_and_contents_that_people_bring(tmp_path):
    """Endings in capitals, an array in a .jsonl, long fields, an empty table, a name of the Hub without hub:."""
    (tmp_path / "UP.CSV").write_text("question,answer\nWho?,Ann\n")
    assert list(data_files.read_rows(str(tmp_path / "UP.CSV"))) == [(f"{tmp_path / 'UP.CSV'}, row 1", {"question": "Who?", "answer": "Ann"})]
    (tmp_path / "array.jsonl").write_text(json.dumps(ROWS, indent=1))
    assert [row for _, row in data_files.read_rows(str(tmp_path / "array.jsonl"))] == ROWS
    (tmp_path / "long.csv").write_text(f"question\n{'a' * 200_000}\n")
    assert [len(row["question"]) for _, row in data_files.read_rows(str(tmp_path / "long.csv"))] == [200_000]
    (tmp_path / "empty.csv").write_text("")
    assert list(data_files.read_rows(str(tmp_path / "empty.csv"))) == []
    with pytest.raises(ValueError, match="of the Hugging Face Hub: hub:NAME:CONFIG:SPLIT"):
        list(data_files.read_rows("openai/gsm8k"))
