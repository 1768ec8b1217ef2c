"""Mistakes that people make, and the one sentence that each of them gets. Those of grpo.py and unimodal_poisson.py
are in their own files."""

import importlib
import sys

import pytest

TEXT = "--max-steps 1 --eval-steps 0"
MISTAKES = [
    ("gdpo", "--dataset nothing.jsonl", "nothing.jsonl: "),
    ("gdpo", "--reward nothing.py:score", "--reward nothing.py:score: "),
    ("gdpo", "--model-name-or-path nothing", "--model-name-or-path nothing: cannot be loaded"),
    ("gdpo", "--num-generations 1", "--num-generations: a group needs at least 2"),
    ("gdpo", "--resume nothing", "--resume nothing: no args.json"),
    (
        "igpo",
        "--env nothing.py:Task --model-name-or-path m",
        "--env nothing.py:Task: expected search_qa or FILE.py:ClassName",
    ),
    ("igpo", "--env own.py:Nothing --model-name-or-path m", "own.py has no class 'Nothing'"),
    ("igpo", "--env own.py:Task", "--env own.py:Task: needs --model-name-or-path"),
    ("igpo", "--dataset broken.jsonl", "broken.jsonl"),
    ("igpo", "--output-dir run", "--output-dir run: holds a run; continue it with --resume run"),
    ("dr_mas", "--env own.py:Nothing", "own.py has no class 'Nothing'"),
    ("dr_mas", "--model-name-or-path nothing", "--model-name-or-path nothing: cannot be loaded"),
    (
        "dr_mas",
        "--chat-template-kwargs enable_thinking=false",
        "--chat-template-kwargs: expected JSON",
    ),
    ("spiral_rae", "--games chess", "chess"),
    ("spiral_rae", "--max-prompt-length 8", "--max-prompt-length"),
    ("spiral_rae", "--fsdp", "--fsdp: nothing to shard over"),
    ("pi_play", "--dataset questions.jsonl", "--retriever-url"),
    ("pi_play", "--max-completion-length 5000", "--max-prompt-length + --max-completion-length"),
    ("pi_play", "--resume nothing", "--resume nothing: no args.json"),
    ("fm3q", "--env-id chess", "chess"),
    ("fm3q", "--output-dir run", "run: holds a run"),
    ("arac", "--graph heptagon_7", "heptagon_7"),
    (
        "arac",
        "--env-id graph_confrontation --num-agents 5",
        "cycle_8 has 8 nodes, 10 players need one each",
    ),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with a few files."""
    (tmp_path / "broken.jsonl").write_text(
        '{"question": "Who?", "answers": ["Ann"]}\n{"question": \n'
    )
    (tmp_path / "questions.jsonl").write_text('{"question": "Who?", "answers": ["Ann"]}\n')
    (tmp_path / "own.py").write_text("class Task:\n    pass\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "args.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("script, words, sentence", MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_gets_one_sentence(script, words, sentence, folder, monkeypatch, capsys):
    module = importlib.import_module(f"algorithms.{script}")
    is_control = script in ("fm3q", "arac")
    more = [] if is_control or "--resume" in words else TEXT.split()
    monkeypatch.setattr(sys, "argv", [script, *more, *words.split()])
    with pytest.raises(SystemExit) as stop:
        module.train(module.parse_args())
    shown = f"{stop.value.code}\n{capsys.readouterr().err}"
    assert stop.value.code not in (0, None)
    assert sentence in shown
    assert "Traceback" not in shown
    assert not list(folder.glob("runs/*/metrics.csv"))
