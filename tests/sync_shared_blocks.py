"""Carry shared blocks from one script to the others of its family: `python tests/sync_shared_blocks.py grpo`.

It prints what it replaced; look at `git diff` before committing.
"""

import ast
import sys
from pathlib import Path

ALGORITHMS = Path(__file__).resolve().parents[1] / "algorithms"


def blocks(source: str) -> dict[str, tuple[int, int]]:
    """First and last line, counted from 0 and exclusive, of every function and class with its decorators."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min(n.lineno for n in [node, *node.decorator_list]) - 1
            found[node.name] = (first, node.end_lineno)
    return found


def texts(script: str) -> dict[str, str]:
    """Name and source of every block of algorithms/<script>.py."""
    source = (ALGORITHMS / f"{script}.py").read_text(encoding="utf-8")
    lines = source.splitlines()
    return {name: "\n".join(lines[slice(*span)]) for name, span in blocks(source).items()}


def carry(origin: str, script: str, names: list[str]) -> list[str]:
    """Give a script the blocks of the origin; the names of those that were replaced."""
    new, old = texts(origin), texts(script)
    source = (ALGORITHMS / f"{script}.py").read_text(encoding="utf-8")
    replaced = [name for name in names if name in new and name in old and new[name] != old[name]]
    for name in replaced:
        source = source.replace(old[name], new[name])
    (ALGORITHMS / f"{script}.py").write_text(source, encoding="utf-8")
    return replaced


if __name__ == "__main__":
    from test_shared_blocks import FAMILIES

    origin = sys.argv[-1]
    for scripts, names in FAMILIES:
        if origin in scripts:
            for script in scripts:
                print(f"{script}.py: {', '.join(carry(origin, script, names)) or 'nothing to do'}")
