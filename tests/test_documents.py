"""Documents of one's own, searched in the process by BM25: exact ranks, file formats, the flags of three scripts."""

import csv
import importlib
import math
import random
import sys

import pytest
from test_problems import write

from envs import retriever
from envs.retriever import Documents, Retriever, split

SCRIPTS = ("igpo", "critic_search", "pi_play", "dr_mas")  # with a text of its own that loads the task
ROWS = [
    {"title": "Nile", "text": "The Nile is a river.\nIt is long."},
    {"title": "River mouths", "text": "A delta is where a river ends."},
    {"title": "", "text": "Nothing here."},
]
SHOWN = ["Nile: The Nile is a river. It is long.", "River mouths: A delta is where a river ends.", "Nothing here."]
pytest.importorskip("bm25s")


def exact_ranks(texts: list[str], query: str, top_k: int, k1: float = 1.2, b: float = 0.75) -> list[str]:
    """BM25 as in its definition, over all documents."""
    documents = [split(text) for text in texts]
    mean = sum(map(len, documents)) / len(documents)
    scores = [0.0] * len(documents)
    for word in set(split(query)):
        n = sum(word in document for document in documents)
        rarity = math.log(1 + (len(documents) - n + 0.5) / (n + 0.5))
        for i, document in enumerate(documents):
            count = document.count(word)
            scores[i] += rarity * count / (count + k1 * (1 - b + b * len(document) / mean))
    best = sorted(range(len(texts)), key=lambda i: (-round(scores[i], 6), i))[:top_k]
    return [texts[i] for i in best if scores[i] > 0]


def test_the_best_documents_are_the_exact_ones(tmp_path):
    """Words as frequent as in ordinary text, on which the ranking for the invented world misses some."""
    generator = random.Random(0)
    words = [f"word{number}" for number in range(300)]
    frequency = [1 / (number + 1) for number in range(300)]
    texts = [" ".join(generator.choices(words, frequency, k=generator.randint(20, 60))) for _ in range(400)]
    queries = [" ".join(generator.choices(words, frequency, k=6)) for _ in range(40)]
    found = Documents(write(tmp_path / "own.jsonl", [{"text": text} for text in texts]))
    expected = [exact_ranks(texts, query, 5) for query in queries]
    assert found.search_batch(queries, 5) == expected
    fast = Retriever([("", text) for text in texts]).search_batch(queries, 5)
    assert sum(ours != right for ours, right in zip(fast, expected)) > 10, "the test would not see a miss"
    assert found.search("WORD250, nowhere!", 400) == exact_ranks(texts, "word250", 400)
    assert found.search("nowhere") == found.search("") == []


def test_formats_equal_scores_and_broken_rows(tmp_path):
    paths = [tmp_path / "own.jsonl", tmp_path / "own.csv"]
    write(paths[0], ROWS)
    with open(paths[1], "w", newline="") as file:
        csv.writer(file).writerows([("title", "text"), *(row.values() for row in ROWS)])
    contents = [{"id": "1", "contents": f'"{row["title"]}"\n{row["text"]}'} for row in ROWS]  # of Search-R1
    for path in (*map(str, paths), write(tmp_path / "contents.jsonl", contents)):
        assert Documents(path).texts == SHOWN, path
    titled = Documents(write(tmp_path / "titled.jsonl", [{"text": "Ann knows Bo."}, {"title": "Bo", "text": "Bo knows Ann."}]))
    assert titled.search("Bo", 1) == ["Bo knows Ann."], "a title counts, also where the text begins with it"
    same = [{"title": "A", "text": f"twin {n}"} for n in "dcab"] + [{"text": "x " * 600}]
    twins = Documents(write(tmp_path / "same.jsonl", same))
    assert twins.search("twin", 3) == ["A: twin d", "A: twin c", "A: twin a"]
    assert len(twins.search("x")[0]) == 1000, "a long document is cut"
    for row in ({"title": "A"}, {"text": 3}, {"title": 3, "text": "b"}):
        with pytest.raises(ValueError, match=r"^.+own.jsonl, line 1: found .+, expected title and text$"):
            Documents(write(paths[0], [row]))
    with pytest.raises(ValueError, match="own.jsonl: found no words"):
        Documents(write(paths[0], [{"text": "..."}]))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_searches_them_without_a_server(name, tmp_path, monkeypatch, capsys):
    """Questions from two files, a file to search in, by flags alone; the index is made once."""
    monkeypatch.chdir(tmp_path)
    script = importlib.import_module(f"algorithms.{name}")
    questions = [{"question": f"Who is number {number}?", "answers": ["Ann"]} for number in range(40)]
    write(tmp_path / "train.jsonl", questions)
    write(tmp_path / "test.jsonl", questions)
    write(tmp_path / "own.jsonl", ROWS)
    retriever.read_documents.cache_clear()
    words = "--dataset train.jsonl --eval-dataset test.jsonl --documents own.jsonl --retriever-top-k"
    words += " 1 --env search_qa"

    def load(more: str = ""):
        monkeypatch.setattr(sys, "argv", [name, *words.split(), *more.split()])
        args = script.parse_args()
        script.check_flags(args)
        return script.load_task(args)[0]

    task = load()
    task = getattr(task, "task", task)
    assert task.search(["river delta", "sea"]) == [SHOWN[1], "nothing found"]
    assert retriever.read_documents.cache_info().misses == 1
    with pytest.raises(SystemExit, match="^--documents: searched in this process, so not with --retriever-url"):
        load("--retriever-url http://127.0.0.1:1/x")
    retriever.read_documents.cache_clear()
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(SystemExit, match="^--documents: .*bm25s.*; pip install bm25s$"):
        load()
    words = "--documents own.jsonl --env search_qa"
    with pytest.raises(SystemExit, match="^--documents, --retriever-url: need --dataset"):
        load()
    words += " --retriever-timeout 0"
    with pytest.raises(SystemExit, match="^--retriever-timeout 0.0: expected a finite number from 1"):
        load()


def test_a_resumed_run_finds_its_files_elsewhere_and_another_server(tmp_path, monkeypatch, capsys):
    """The same contents under another name, in scripts of each kind; other contents are refused."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "train.jsonl", ROWS)
    write(tmp_path / "moved.jsonl", ROWS)
    write(tmp_path / "other.jsonl", ROWS[:2])

    def resume(script, words: str = ""):
        monkeypatch.setattr(sys, "argv", ["x", "--resume", script.__name__, *words.split()])
        return script.parse_args()

    for name in (*SCRIPTS, "grpo", "spiral_rae"):
        script = importlib.import_module(f"algorithms.{name}")
        files = {flag: "train.jsonl" for flag in ("dataset", "eval_dataset") if hasattr(script.Args, flag)}
        server = {"retriever_url": "http://a:1/x"} if name in SCRIPTS else {}
        script.open_run(script.Args(**files, **server, output_dir=script.__name__), rank=0)
        assert resume(script).output_dir == script.__name__
        for flag in files:
            word = f"--{flag.replace('_', '-')}"
            assert getattr(resume(script, f"{word} moved.jsonl"), flag) == "moved.jsonl"
            sentence = f"^{word} other.jsonl: the run began with train.jsonl, which had other contents$"
            with pytest.raises(SystemExit, match=sentence):
                resume(script, f"{word} other.jsonl")
        if server:
            assert resume(script, "--retriever-url http://b:2/x").retriever_url == "http://b:2/x"
            assert "--retriever-url http://b:2/x: the run began with http://a:1/x" in capsys.readouterr().out
            with pytest.raises(SystemExit, match="^--documents moved.jsonl: the run began with None, which cannot"):
                resume(script, "--documents moved.jsonl")
            with pytest.raises(SystemExit, match="^--retriever-top-k 4: the run began with 3, which cannot change"):
                resume(script, "--retriever-top-k 4")

    script = importlib.import_module("algorithms.igpo")
    script.open_run(script.Args(dataset="train.jsonl", documents="train.jsonl", output_dir="own"), rank=0)
    monkeypatch.setattr(sys, "argv", "igpo --resume own --documents moved.jsonl --dataset moved.jsonl".split())
    script.open_run(script.parse_args(), rank=0)
    monkeypatch.setattr(sys, "argv", "igpo --resume own".split())
    assert script.parse_args().documents == "moved.jsonl", "a second resume knows the new place"
    write(tmp_path / "moved.jsonl", ROWS[1:])  # the same name
    with pytest.raises(SystemExit, match="the run began with moved.jsonl, which had other contents"):
        script.parse_args()
