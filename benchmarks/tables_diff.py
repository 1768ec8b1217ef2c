"""What a script has in common with its sibling, and where it differs, read from the scripts; make_tables.py draws it.

A script whose essay says `Differs from grpo.py in:` is compared with that sibling. The others of algorithms/ are roots,
whose page says which of its definitions are word for word the same elsewhere. grpo.py is the sibling of others itself.
"""

import ast
import difflib
import functools
import itertools
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ALGORITHMS = Path(__file__).resolve().parents[1] / "algorithms"
WHOLE_DIFF = 250  # lines; of a longer diff a page shows only the definitions that both scripts have
KINDS = {"changed": "differ", "new": "new", "left out": "left out"}


@dataclass(frozen=True)
class Block:
    """A definition: top-level function, class or constant, or a flag as `Args.name`; comments above it included."""

    section: str
    lines: tuple[str, ...]


def blocks(source: str) -> dict[str, Block]:
    """Definitions by name, in the order of the script; tests/test_tables.py compares them with the house rules'."""
    lines, found = source.splitlines(), {}
    banners = [(number, line) for number, line in enumerate(lines, 1) if line.startswith("# === ")]

    def add(name: str, node: ast.stmt, last: int) -> None:
        first = min(n.lineno for n in [node, *getattr(node, "decorator_list", [])])
        while first > 1 and re.match(" " * node.col_offset + "#(?! ===)", lines[first - 2]):
            first -= 1
        above = [line.strip("# =") for number, line in banners if number < first]
        found[name] = Block(above[-1] if above else "1 Essay", tuple(lines[first - 1 : last]))

    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            for field, after in itertools.pairwise([*node.body, ast.Pass()]):
                docstring = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                for name in defined(field):
                    add(f"Args.{name}", field, (after if docstring else field).end_lineno)
        else:
            for name in defined(node):
                add(name, node, node.end_lineno)
    return found


def defined(node: ast.stmt) -> list[str]:
    """Names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]


def unified(old: tuple[str, ...], new: tuple[str, ...], context: int = 2) -> list[str]:
    """Lines of a unified diff, a bare @@ between its hunks: line numbers would change with every line far above."""
    rows: list[str] = []
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for group in matcher.get_grouped_opcodes(context):
        rows += ["@@"] if rows else []
        for kind, a, b, c, d in group:
            rows += [f" {line}" for line in old[a:b]] if kind == "equal" else [f"-{line}" for line in old[a:b]]
            rows += [f"+{line}" for line in new[c:d]] if kind != "equal" else []
    return [row.rstrip() for row in rows]


def counts(rows: list[str]) -> tuple[int, int]:
    """Lines added and removed by a diff."""
    return sum(row.startswith("+") for row in rows), sum(row.startswith("-") for row in rows)


def differences(old: dict[str, Block], new: dict[str, Block]) -> dict[str, str]:
    """Name -> changed, new or left out, in the new script's order; what it lacks stands where the old one has it."""
    order = list(new)
    for before, name in zip([None, *old], old):
        if name not in new:
            order.insert(order.index(before) + 1 if before else 0, name)
    kinds = {name: "new" if name not in old else "left out" if name not in new else "changed" for name in order}
    return {name: kind for name, kind in kinds.items() if kind != "changed" or old[name].lines != new[name].lines}


def listed(names: list[str]) -> str:
    return ", ".join(name.removeprefix("Args.") for name in names)


def number_of(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)


def difference_table(old: dict[str, Block], new: dict[str, Block], found: dict[str, str], sibling: str) -> str:
    """The definitions that are not the same. Names stand bare: backticks would count as documented flags of a page."""
    rows = [["definition", "section", f"against {sibling}.py"], ["---"] * 3]
    flags = [
        f"{number_of(len(names), 'flag')} {word}: {listed(names)}"
        for kind, word in KINDS.items()
        if (names := [name for name, k in found.items() if k == kind and name.startswith("Args.")])
    ]
    for name, kind in found.items():
        if name.startswith("Args."):
            rows += [["Args", "2 Args", "; ".join(flags)]] if flags else []
            flags = []
            continue
        block = new.get(name) or old[name]
        added, removed = counts(unified(old[name].lines if name in old else (), new[name].lines if name in new else ()))
        sizes = {
            "changed": f"+{added} -{removed}",
            "new": f"new, {added} lines",
            "left out": f"left out, {removed} lines",
        }
        rows.append([name, block.section, sizes[kind].replace(" 1 lines", " 1 line")])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def read(name: str) -> str:
    """Source of a script."""
    return (ALGORITHMS / f"{name}.py").read_text(encoding="utf-8")


def diff_section(name: str, sibling: str) -> str:
    """Numbers, the table of differences, and the diff itself, folded."""
    sources = read(sibling), read(name)
    old, new = map(blocks, sources)
    found, lines = differences(old, new), [tuple(source.splitlines()) for source in sources]
    definitions, flags = ([n for n in {**old, **new} if n.startswith("Args.") == flag] for flag in (False, True))
    sizes = []
    for names, noun in ((definitions, "definitions"), (flags, "flags")):
        kinds = [found.get(n, "same") for n in names]
        differing = [f"{kinds.count('changed')} differ", f"{kinds.count('new')} are new"]
        sizes.append(f"{kinds.count('same')} {noun} are the same text, {', '.join(differing)}")
        sizes[-1] += f" and {kinds.count('left out')} of {sibling}.py's are left out"
    added, removed = counts(unified(*lines))
    numbers = f"{sizes[0]}; {sizes[1]}. All of it is in `diff algorithms/{sibling}.py algorithms/{name}.py`: some "
    numbers += (
        f"{added} lines of {len(lines[1])} added and {removed} of {len(lines[0])} removed, essay and imports included."
    )
    numbers, whole = textwrap.fill(numbers, 120, break_on_hyphens=False), added + removed <= WHOLE_DIFF
    title = "The diff, without essay and imports" if whole else "The diff of the definitions that both scripts have"
    rows = []
    for n, kind in found.items():
        if whole or kind == "changed":
            rows.append(f"@@ {n} @@")
            rows += unified(old[n].lines if n in old else (), new[n].lines if n in new else ())
    shown = "\n".join(["```diff", *rows, "```"])
    folded = f"<details>\n<summary>{title}: {len(rows)} lines</summary>\n\n{shown}\n\n</details>"
    return f"{numbers}\n\n{difference_table(old, new, found, sibling)}\n\n{folded}"


def same_section(name: str, others: list[str]) -> str:
    """Numbers and a table of a root's definitions that other roots have word for word."""
    own, found = blocks(read(name)), {other: blocks(read(other)) for other in others}
    definitions = [n for n in own if not n.startswith("Args.")]
    same = {n: [o for o in others if n in found[o] and found[o][n].lines == own[n].lines] for n in definitions}
    lines = sum(len(own[n].lines) for n in definitions if same[n])
    numbers = f"{name}.py is a root: no script is its sibling, and its flags and training loop are its own. Of its "
    numbers += (
        f"{len(definitions)} definitions {sum(map(bool, same.values()))}, of {lines} lines together, are the same "
    )
    numbers = textwrap.fill(numbers + "text elsewhere:", 120)
    rows = [["definition", "section", "lines", "word for word the same in"], ["---"] * 4]
    for n in definitions:
        if same[n]:
            where = ", ".join(f"{other}.py" for other in same[n])
            rows.append([n, own[n].section, str(len(own[n].lines)), where])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    namesakes = [n for n in definitions if not same[n] and any(n in found[other] for other in others)]
    return f"{numbers}\n\n{table}\n\nOf the same name there, but with a text of their own: {listed(namesakes)}."


def tables() -> dict[str, Callable[[], str]]:
    """Table name -> function, for every script but those that others are compared with."""
    essays = {path.stem: ast.get_docstring(ast.parse(path.read_text())) or "" for path in ALGORITHMS.glob("*.py")}
    found = {name: re.search(r"Differs from (\w+)\.py in:", essay) for name, essay in sorted(essays.items())}
    siblings = {name: match[1] for name, match in found.items() if match}
    roots = [name for name, match in found.items() if not match and name not in siblings.values()]
    drawn = {f"diff_{name}": functools.partial(diff_section, name, sibling) for name, sibling in siblings.items()}
    others = sorted({*roots, *siblings.values()})
    return drawn | {f"same_{n}": functools.partial(same_section, n, [o for o in others if o != n]) for n in roots}


TABLES = tables()
