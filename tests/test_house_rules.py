"""The house rules, written once for every script in algorithms/.

A check is a plain function that takes a Script (or the scripts of a family) and returns its breaches as sentences with
file and line. The first group of tests asserts that the real scripts have none. The second proves that each check can
fail: one small good script, and a table of changes to it, each of which breaks one rule.
"""

import ast
import builtins
import difflib
import functools
import importlib.util
import inspect
import io
import itertools
import json
import os
import re
import subprocess
import symtable
import sys
import tokenize
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = {  # the first of a family is its root
    "language": ["grpo", "gdpo", "dr_mas", "igpo", "spiral_rae", "pi_play"],
    "control": ["unimodal_poisson", "fm3q", "arac"],
}
MAX_CODE_LINES = {"language": 600, "control": 500}
# Language Args are compared field by field; the control scripts are roots without a sibling.
FREE = {"language": {"Args"}, "control": {"Args", "check_args", "evaluate", "score_run", "train"}}
TITLES = ["2 Args", "3 The method", "4 Model and tokenizer", "5 Rollout", "6 Checkpoint", "7 Evaluation"]
TITLES += ["8 Training loop"]
HOME = {"Args": 2, "load_model": 4, "load_tokenizer": 4, "generate": 5, "rollout": 5, "evaluate": 7, "train": 8}
HOME |= {"save_checkpoint": 6, "load_checkpoint": 6}
TAG = re.compile(r"(train|eval|perf|charts|losses)/[\w/<>@.-]+")
SHAPE = re.compile(r"\([A-Z](_\w)?( ?[-+*] ?\w+)*,|scalar")  # (B,), (B, T), (T_i - 1,), (P*G, T) or the word
IMPURE_NAMES = {"open", "print", "input", "breakpoint", "exec", "eval", "logging", "sys", "os", "subprocess", "shutil"}
IMPURE_NAMES |= {"Path", "SummaryWriter", "dist"}
IMPURE_METHODS = {"save", "load", "write", "write_text", "add_scalar"}


# --- Reading a script ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Script:
    name: str
    source: str
    page: str = ""  # text of algorithms/<name>.md
    requirements: str = ""  # text of requirements.txt
    env_sources: dict[str, str] = field(default_factory=dict)  # module of envs/ -> source

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @property
    def family(self) -> str:
        return next(family for family, names in FAMILIES.items() if self.name in names)

    @property
    def essay(self) -> str:
        return ast.get_docstring(self.tree) or ""

    @functools.cached_property
    def banners(self) -> list[tuple[int, str]]:
        """Line and text of every comment that looks like a banner (by token, so that strings do not count)."""
        tokens = tokenize.generate_tokens(io.StringIO(self.source).readline)
        return [(t.start[0], t.line.rstrip("\n")) for t in tokens if t.string.startswith("# ===")]

    def section(self, line: int) -> int:
        """Number of the section that a line stands in; 1 before the first banner."""
        above = [text for start, text in self.banners if start < line]
        return int(match[1]) if above and (match := re.match(r"# === (\d)", above[-1])) else 1

    def at(self, node, text: str) -> str:
        return f"algorithms/{self.name}.py:{node if isinstance(node, int) else node.lineno}: {text}"

    @property
    def args_body(self) -> list[ast.stmt]:
        return next((n.body for n in self.tree.body if isinstance(n, ast.ClassDef) and n.name == "Args"), [])

    @property
    def fields(self) -> list[tuple[ast.AnnAssign, str]]:
        """Fields of Args with their docstrings ("" where there is none)."""
        pairs = itertools.pairwise([*self.args_body, ast.Pass()])
        return [(n, inspect.cleandoc(string(after) or "")) for n, after in pairs if isinstance(n, ast.AnnAssign)]


def string(node) -> str | None:
    """Text of a statement that is a bare string (a docstring), else None."""
    is_string = (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )
    return node.value.value if is_string else None


def code_lines(source: str) -> set[int]:
    """Numbers of the lines that hold code: no blank line, comment or docstring."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type not in skipped]
    strings = [n for n in ast.walk(ast.parse(source)) if string(n) is not None]
    docs = {line for n in strings for line in range(n.lineno, n.end_lineno + 1)}
    return {line for t in tokens for line in range(t.start[0], t.end[0] + 1)} - docs


@dataclass(frozen=True)
class Block:
    first: int  # line numbers, from 1, comments directly above included
    last: int
    text: str


def blocks(source: str) -> dict[str, Block]:
    """Top-level functions, classes and constants by name, and the fields and methods of Args as `Args.<name>`."""
    lines, found = source.splitlines(), {}

    def add(name: str, node: ast.stmt, last: int):
        first = min(n.lineno for n in [node, *getattr(node, "decorator_list", [])])
        while first > 1 and re.match(" " * node.col_offset + "#(?! ===)", lines[first - 2]):
            first -= 1
        found[name] = Block(first, last, "\n".join(line.rstrip() for line in lines[first - 1 : last]))

    script = Script("", source)
    for node in script.tree.body:
        for name in defined_names(node):
            add(name, node, node.end_lineno)
    for node, after in itertools.pairwise([*script.args_body, ast.Pass()]):
        for name in defined_names(node):
            add(f"Args.{name}", node, node.end_lineno if string(after) is None else after.end_lineno)
    return found


def defined_names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = (
        getattr(node, "targets", [getattr(node, "target", None)])
        if isinstance(node, ast.Assign | ast.AnnAssign)
        else []
    )
    return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]


def essay_list(essay: str, heading: str) -> list[str]:
    """Lines of the list under a heading of the essay: up to the first line that is neither numbered nor indented."""
    lines = essay.partition(heading)[2].splitlines()[1:]
    return list(itertools.takewhile(lambda line: re.match(r"\s*\d+\. |\s+\S", line), lines))


def declared_differences(script: Script) -> tuple[str, set[str]]:
    """The sibling that the essay names in `Differs from <sibling>.py in:` and the names in backticks in that list."""
    if not (heading := re.search(r"Differs from (\w+)\.py in:", script.essay)):
        return "", set()
    spans = re.findall(r"`([^`]+)`", " ".join(essay_list(script.essay, heading[0])))
    return heading[1], {span for span in spans if span.isidentifier()}


# --- Checks of one script --------------------------------------------------------------------------------------------


def check_sections(script: Script) -> list[str]:
    """Banners, imports and the root on sys.path before section 2, definitions in their sections, the main guard."""
    breaches, body = [], script.tree.body
    expected = [f"# === {title} ".ljust(120, "=") for title in TITLES]
    for (line, text), wanted in itertools.zip_longest(script.banners, expected, fillvalue=(1, "nothing")):
        wanted = wanted if isinstance(wanted, str) else "no further banner"
        if text != wanted:
            breaches.append(script.at(line, f"the banner should be '{wanted}' (120 columns), it is '{text}'"))
    head = [n for n in body if script.section(n.lineno) == 1][1:]  # without the essay
    path_lines = [n for n in head if ast.unparse(n).startswith("sys.path.insert(0, ") and n.lineno == n.end_lineno]
    if len(path_lines) != 1:
        breaches.append(script.at(1, "one line before section 2 should put the repository root on sys.path"))
    for node in body:
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        if is_import and node not in head:
            breaches.append(script.at(node, "imports stand between the essay and section 2"))
        if is_import and "envs" in ast.unparse(node) and path_lines and node.lineno < path_lines[0].lineno:
            breaches.append(script.at(node, "envs is imported before the line that puts the root on sys.path"))
        constant = bool(defined_names(node)) and all(name.isupper() for name in defined_names(node))
        if node in head and not (is_import or constant or node in path_lines):
            breaches.append(script.at(node, "only imports, the sys.path line and constants stand before section 2"))
        for name in defined_names(node):
            if script.section(node.lineno) != HOME.get(name, script.section(node.lineno)):
                breaches.append(script.at(node, f"`{name}` belongs in section {HOME[name]}"))
    for name in {"Args", "train"} - {name for node in body for name in defined_names(node)}:
        breaches.append(script.at(1, f"`{name}` is not defined"))
    if ast.unparse(body[-1]) != "if __name__ == '__main__':\n    train(tyro.cli(Args))":
        breaches.append(script.at(body[-1], "the last statement is not the guard with train(tyro.cli(Args)) alone"))
    return breaches


def check_essay(script: Script) -> list[str]:
    """PEP 723 block on line 1, then the essay: length, paper, lists of differences, three commands."""
    breaches, essay, path = [], script.essay, f"algorithms/{script.name}.py"
    if not re.match(r"# /// script\n(#.*\n)*?# ///\n\s*r?\"\"\"", script.source):
        breaches.append(script.at(1, "a script starts with its PEP 723 block, and the essay follows it"))
    if (length := len(essay.splitlines())) > 25:
        breaches.append(script.at(1, f"the essay has {length} lines, 25 are allowed"))
    if not re.search(r"arXiv[: ]\d{4}\.\d{4,5}", essay):
        breaches.append(script.at(1, "the essay names no arXiv id (arXiv 2402.03300)"))
    headings = ["Differs from the paper in:"]
    headings += ["Differs from grpo.py in:"] if script.name in FAMILIES["language"][1:] else []
    for heading in headings:
        lines = essay_list(essay, heading)
        numbers = [int(match[1]) for line in lines if (match := re.match(r"\s*(\d+)\. ", line))]
        if not numbers or numbers != list(range(1, len(numbers) + 1)):
            breaches.append(script.at(1, f"the essay lacks '{heading}' with a list numbered from 1, an item a line"))
    found = commands(essay, path)
    single = [c for c in found if "torchrun" not in c]
    if f"python {path}" not in found:
        breaches.append(script.at(1, f"the essay lacks the default command 'python {path}'"))
    if not any("--model-name-or-path " in c or (script.family == "control" and " --" in c) for c in single):
        breaches.append(script.at(1, "the essay lacks a command for real use (--model-name-or-path or a real env)"))
    if script.family == "language" and not any(re.match(r"torchrun .*--nproc[_-]per[_-]node", c) for c in found):
        breaches.append(script.at(1, "the essay lacks a torchrun command"))
    if len(found) < 3:
        breaches.append(script.at(1, f"the essay shows {len(found)} commands, three are wanted"))
    return breaches


def commands(text: str, path: str) -> list[str]:
    """Commands that run the script: one a line, `\\` continues, a comment after # or ` is cut off."""
    joined = re.sub(r"\\\n\s*", " ", text)
    found = re.findall(rf"(?:\bpython|\btorchrun|\buv run)\b[^\n`]*{re.escape(path)}[^\n`#]*", joined)
    return [" ".join(command.split()) for command in found]


def check_flags(script: Script) -> list[str]:
    """Every field is read, has a docstring with its source, is there once; every args.<x> is a field."""
    breaches, seen = [], {}
    methods = {n.name: n for n in script.args_body if isinstance(n, ast.FunctionDef)}
    used = {n.attr: n for n in ast.walk(script.tree) if isinstance(n, ast.Attribute) and owner(n) == "args"}
    read = {n.attr for n in ast.walk(script.tree) if is_read(n) and owner(n) == "args"}
    for name, method in methods.items():  # a property may combine fields; a field that is only validated is not alive
        read |= {n.attr for n in ast.walk(method) if is_read(n) and owner(n) == "self" and name != "__post_init__"}
    for node, doc in script.fields:
        name = node.target.id
        if name not in read:
            breaches.append(script.at(node, f"flag `{name}` is never read as args.{name}"))
        if not doc:
            breaches.append(script.at(node, f"flag `{name}` has no docstring under it"))
        elif not re.search(r"\((ours|[A-Z]\w[^()]*(\([^()]*\)[^()]*)*|verl\b[^()]*)[^()]*\)\.?$", doc):
            breaches.append(script.at(node, f"docstring of `{name}` does not end with its source, as in (TRL 1.16)"))
        if name in seen or (doc and doc in seen):
            breaches.append(script.at(node, f"flag `{name}` repeats the name or docstring of another flag"))
        seen |= {name: node, doc: node}
    for name in used.keys() - {node.target.id for node, _ in script.fields} - methods.keys():
        breaches.append(script.at(used[name], f"args.{name} is not a field of Args"))
    return breaches


def owner(node: ast.Attribute) -> str:
    """`args` for args.x and self.args.x, `self` for self.x."""
    return getattr(node.value, "id", "") or getattr(node.value, "attr", "")


def is_read(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)


def code_tags(script: Script) -> dict[str, int]:
    """Tags in the code with their lines; what an f-string fills in is written <>."""
    inside = {id(part) for n in ast.walk(script.tree) if isinstance(n, ast.JoinedStr) for part in n.values}
    tags = {}
    for node in ast.walk(script.tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else "<>" for part in node.values)
        else:
            text = node.value if isinstance(node, ast.Constant) and id(node) not in inside else None
        if isinstance(text, str) and TAG.fullmatch(text):
            tags.setdefault(text, node.lineno)
    return tags


def page_rows(page: str) -> list[tuple[int, list[str]]]:
    """Line number and cells of every table row of a page."""
    rows = [(number, line.strip()) for number, line in enumerate(page.splitlines(), 1)]
    return [(n, [c.strip() for c in re.split(r"(?<!\\)\|", r.strip("|"))]) for n, r in rows if r.startswith("|")]


def page_tags(text: str) -> list[str]:
    """Tags in backticks, what stands between < and > left out."""
    return [re.sub("<[^<>]*>", "<>", tag) for tag in re.findall(r"`([^`]+)`", text) if TAG.fullmatch(tag)]


def tag_matches(in_code: str, in_page: str) -> bool:
    """The same shape, or a page's concrete name (eval/pass_at_8) for a placeholder in the code (eval/pass_at_<>)."""
    if re.fullmatch(r"\w+/<>", in_code):  # f"train/{name}": names put together elsewhere, of any depth
        return in_page.startswith(in_code[:-2])
    return bool(re.fullmatch(re.escape(in_code).replace("<>", r"(<>|[^/\s]+)"), in_page))


def check_tags(script: Script) -> list[str]:
    """Every tag has a table row on the page (tag, meaning, healthy range), and every tag in a row is in the code."""
    breaches, tags, documented = [], code_tags(script), []
    for line, cells in page_rows(script.page):
        documented += page_tags(cells[0])
        if page_tags(cells[0]) and (len(cells) < 3 or "" in cells):
            breaches.append(f"algorithms/{script.name}.md:{line}: the row needs tag, meaning and healthy range")
        for tag in page_tags("|".join(cells)):
            if not any(tag_matches(in_code, tag) for in_code in tags):
                breaches.append(f"algorithms/{script.name}.md:{line}: tag `{tag}` is not in the script")
    for tag, line in tags.items():
        # `train/<>` is a name put together elsewhere; test_<name>_script.py compares what a run logs with the page.
        if not re.fullmatch(r"\w+/[<>/]+", tag) and not any(tag_matches(tag, in_page) for in_page in documented):
            breaches.append(script.at(line, f"tag `{tag}` has no table row in algorithms/{script.name}.md"))
    return breaches


def check_page(script: Script) -> list[str]:
    """Every flag is named on the page, and the commands of essay and page use no other flag."""
    breaches, names = [], [node.target.id for node, _ in script.fields]
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", script.page, flags=re.DOTALL))
    words = {word.removeprefix("--").replace("-", "_") for span in spans for word in re.findall(r"[\w-]+", span)}
    for node, _ in script.fields:
        if node.target.id not in words:
            breaches.append(script.at(node, f"flag `{node.target.id}` is not in algorithms/{script.name}.md"))
    path = f"algorithms/{script.name}.py"
    for command in commands(f"{script.essay}\n{script.page}", path):
        for flag in re.findall(r" --([\w-]+)", command.partition(path)[2]):
            if flag.replace("-", "_") not in {*names, *(f"no_{name}" for name in names), "help"}:
                breaches.append(script.at(1, f"essay or page shows a command with the unknown flag --{flag}"))
    return breaches


def third_party(source: str, env_sources: dict[str, str], seen: set[str]) -> set[str]:
    """Distributions imported by a source and by the modules of envs/ that it imports."""
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    found = {"tensorboard" for module in modules if module.startswith("torch.utils.tensorboard")}
    for package, *rest in (module.split(".") for module in modules):
        if package == "envs" and rest and rest[0] not in seen:
            seen.add(rest[0])
            found |= third_party(env_sources.get(rest[0], ""), env_sources, seen)
        elif package != "envs" and package not in sys.stdlib_module_names:
            found.add(canonicalize_name(package))
    return found


def check_inline_metadata(script: Script) -> list[str]:
    """PEP 723: the dependencies are the imports, with lower bounds that the pins of requirements.txt meet."""
    match = re.search(r"(?m)^# /// script$\n((?:#(?:| .*)$\n)+?)# ///$", script.source)
    try:
        metadata = tomllib.loads("".join(line[2:] + "\n" for line in match[1].splitlines()))
        listed = {canonicalize_name(r.name): r for r in map(Requirement, metadata["dependencies"])}
    except (TypeError, KeyError, ValueError) as error:
        return [script.at(1, f"no valid PEP 723 block with dependencies ({error})")]
    breaches = [] if "requires-python" in metadata else [script.at(1, "requires-python is missing")]
    imported = third_party(script.source, script.env_sources, set())
    breaches += [script.at(1, f"'{n}' is imported but no dependency") for n in sorted(imported - listed.keys())]
    breaches += [script.at(1, f"'{n}' is a dependency but not imported") for n in sorted(listed.keys() - imported)]
    lines = [line.partition("#")[0].strip() for line in script.requirements.splitlines()]
    pins = {canonicalize_name(r.name): r for r in map(Requirement, filter(None, lines))}
    for name, requirement in listed.items():
        versions = [s.version for s in pins[name].specifier if s.operator == "=="] if name in pins else []
        if [s.operator for s in requirement.specifier] != [">="]:
            breaches.append(script.at(1, f"dependency '{requirement}' should have one lower bound (>=)"))
        elif not versions:
            breaches.append(script.at(1, f"'{name}' has no pin (==) in requirements.txt"))
        elif not requirement.specifier.contains(versions[0], prereleases=True):
            breaches.append(script.at(1, f"'{requirement}' excludes the pin {versions[0]} of requirements.txt"))
    return breaches


def check_budget(script: Script) -> list[str]:
    """Lines of code and columns."""
    count, limit = len(code_lines(script.source)), MAX_CODE_LINES[script.family]
    breaches = [script.at(1, f"{count} lines of code, {limit} are allowed")] if count > limit else []
    lines = enumerate(script.source.splitlines(), 1)
    return breaches + [script.at(n, f"{len(line)} columns, 120 are allowed") for n, line in lines if len(line) > 120]


def check_method(script: Script) -> list[str]:
    """Section 3: short, pure functions whose docstrings state shapes."""
    nodes = [n for n in script.tree.body if defined_names(n) and script.section(n.lineno) == 3]
    definitions = {n.name: n for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    breaches, code = [] if definitions else [script.at(1, "section 3 is empty")], code_lines(script.source)
    imports = {(a.asname or a.name).split(".")[0] for n in script.tree.body for a in getattr(n, "names", [])}
    known = (imports | definitions.keys() | set(dir(builtins))) - IMPURE_NAMES
    for node in definitions.values():
        if not node.name.startswith("_") and not SHAPE.search(ast.get_docstring(node) or ""):
            breaches.append(script.at(node, f"docstring of `{node.name}` states no shape such as (B, T) or scalar"))
        for inner in ast.walk(node):
            if isinstance(inner, ast.FunctionDef):
                length = len(code.intersection(range(inner.lineno, inner.end_lineno + 1)))
                if length > 40:
                    breaches.append(script.at(inner, f"`{inner.name}` has {length} lines of code, 40 are allowed"))
            if isinstance(inner, ast.Attribute) and inner.attr in IMPURE_METHODS:
                breaches.append(script.at(inner, f"section 3 does no input or output, `.{inner.attr}` does"))
    scopes = [s for s in symtable.symtable(script.source, "", "exec").get_children() if s.get_name() in definitions]
    for scope in scopes:
        inner_scopes = [scope]
        for inner in inner_scopes:  # grows while it is walked: methods, lambdas, comprehensions
            inner_scopes += inner.get_children()
        names = {s.get_name() for inner in inner_scopes for s in inner.get_symbols() if s.is_global()}
        for name in sorted(n for n in names - known if n in IMPURE_NAMES or not n.isupper()):
            text = f"`{scope.get_name()}` uses `{name}`: section 3 has no input or output and no module globals"
            breaches.append(script.at(scope.get_lineno(), text))
    return breaches


def check_docstrings(script: Script) -> list[str]:
    """Every public top-level function and class has a docstring; of Args, each field has one (check_flags)."""
    public = [n for n in script.tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name[0] != "_"]
    public = [n for n in public if n.name != "Args"]
    return [script.at(n, f"`{n.name}` has no docstring") for n in public if not ast.get_docstring(n)]


# --- Checks of a family ----------------------------------------------------------------------------------------------


def check_same_definitions(scripts: list[Script]) -> list[str]:
    """Definitions with the same name are the same text, and flags of language scripts agree, unless declared."""
    breaches, found = [], {script.name: blocks(script.source) for script in scripts}
    for a, b in itertools.combinations(scripts, 2):
        declared = declared_differences(a)[1] | declared_differences(b)[1]
        flags = {f"Args.{node.target.id}" for node, _ in a.fields}  # compared by compare_flags
        for name, block in found[b.name].items():
            other, free = found[a.name].get(name), FREE[a.family] | declared | flags
            if other and block.text != other.text and name not in free and name.removeprefix("Args.") not in free:
                where = f"algorithms/{a.name}.py:{other.first}"
                breaches.append(b.at(block.first, f"`{name}` differs from {where} and no essay declares it"))
        if a.family == "language":
            breaches += compare_flags(a, b, declared)
    return breaches


def compare_flags(a: Script, b: Script, declared: set[str]) -> list[str]:
    """Flags with one name: same type and meaning; default and source too unless the flag is declared. A declared choice
    may have other values."""
    breaches, flags = [], {node.target.id: (node, doc) for node, doc in a.fields}
    for node, doc in b.fields:
        if (name := node.target.id) in flags:
            other, other_doc = flags[name]
            cut = (lambda text: text.rpartition("(")[0]) if name in declared else str
            same = [ast.unparse(node.annotation) == ast.unparse(other.annotation), cut(doc) == cut(other_doc)]
            if name in declared and all(ast.unparse(n.annotation).startswith("Literal[") for n in (node, other)):
                same = [True, True]  # a declared choice, e.g. of controls, may have its own values and say what they do
            same += [name in declared or ast.dump(node.value or node.target) == ast.dump(other.value or other.target)]
            for part, equal in zip(["type", "docstring", "default"], same, strict=True):
                if not equal:
                    text = f"{part} of flag `{name}` differs from algorithms/{a.name}.py:{other.lineno}"
                    breaches.append(b.at(node, text))
    return breaches


def check_declared(scripts: list[Script]) -> list[str]:
    """What an essay declares as different from a sibling is a definition or flag, and it does differ."""
    breaches, found = [], {script.name: blocks(script.source) for script in scripts}
    for script in scripts:
        sibling, names = declared_differences(script)
        if sibling and sibling not in found:
            breaches.append(script.at(1, f"the essay compares with {sibling}.py, which is not in the family"))
            continue
        for name in sorted(names):
            here, there = (found[s].get(name) or found[s].get(f"Args.{name}") for s in (script.name, sibling))
            if not here and not there:
                breaches.append(script.at(1, f"the essay declares `{name}`, which neither script defines"))
            elif here and there and here.text == there.text:
                breaches.append(script.at(1, f"the essay declares `{name}`, which does not differ from {sibling}.py"))
    return breaches


def skeleton(node: ast.FunctionDef) -> tuple[str, ...]:
    """Tokens of a function without its docstring and layout, its own names replaced by one placeholder.

    One placeholder, not a number per name: a single added argument would renumber all and hide the copy.
    """
    node = ast.parse(ast.unparse(node)).body[0]
    node.body = [n for n in node.body if string(n) is None] or [ast.Pass()]
    own = {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)} | {node.name}
    own |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return tuple("_" if token in own else token for token in re.findall(r"\w+|[^\w\s]", ast.unparse(node)))


def long_functions(script: Script) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Line and skeleton of top-level functions and methods with more than 8 lines of code, by qualified name."""
    scopes = [("", script.tree)] + [(f"{n.name}.", n) for n in script.tree.body if isinstance(n, ast.ClassDef)]
    nodes = [(p + n.name, n) for p, scope in scopes for n in scope.body if isinstance(n, ast.FunctionDef)]
    code = code_lines(script.source)
    return {
        name: (n.lineno, skeleton(n)) for name, n in nodes if len(code & set(range(n.lineno, n.end_lineno + 1))) > 8
    }


def check_near_duplicates(scripts: list[Script]) -> list[str]:
    """No function is the copy of another script's function under another name."""
    breaches, reported = [], set()
    functions = {script.name: long_functions(script) for script in scripts}
    for a, b in itertools.permutations(scripts, 2):
        # A name that both scripts have is held by check_same_definitions; only what is new in b can be a copy.
        new = functions[b.name].keys() - functions[a.name].keys()
        for name, other in itertools.product(sorted(new), functions[a.name]):
            if (b.name, name) in reported or (a.name, other) in reported:
                continue
            (line, tokens), (other_line, other_tokens) = functions[b.name][name], functions[a.name][other]
            matcher = difflib.SequenceMatcher(None, tokens, other_tokens, autojunk=False)
            if min(matcher.real_quick_ratio(), matcher.quick_ratio()) >= 0.9 and (ratio := matcher.ratio()) >= 0.9:
                reported.add((b.name, name))
                where = f"`{other}` at algorithms/{a.name}.py:{other_line}"
                breaches.append(b.at(line, f"`{name}` is {ratio:.0%} the same as {where}: give both one name"))
    return breaches


def difference_sizes(scripts: list[Script]) -> list[str]:
    """One line per declared difference: how many lines it removes from and adds to the sibling."""
    rows, found = [], {script.name: blocks(script.source) for script in scripts}
    for script in scripts:
        sibling, names = declared_differences(script)
        for name in sorted(names) if sibling in found else []:
            both = (found[s].get(name) or found[s].get(f"Args.{name}") for s in (sibling, script.name))
            lines = list(difflib.ndiff(*(block.text.splitlines() if block else [] for block in both)))
            removed, added = (sum(line.startswith(sign) for line in lines) for sign in ("- ", "+ "))
            rows.append(f"{script.name}.py against {sibling}.py: {name} -{removed} +{added} lines")
    return rows


# --- Import and --help, in one process because torch takes seconds to import ------------------------------------------

PROBE = """
import ast, contextlib, hashlib, importlib.util, io, json, os, random, runpy, signal, sys, threading
import numpy, torch

def state():
    randoms = {"torch": torch.get_rng_state(), "numpy": numpy.random.get_state(), "Python": random.getstate()}
    return {f"the random state of {k}": hashlib.md5(str([*v]).encode()).hexdigest() for k, v in randoms.items()} | {
        "torch's default dtype": str(torch.get_default_dtype()), "torch's threads": torch.get_num_threads(),
        "torch's default device": str(torch.get_default_device()), "CUDA": torch.cuda.is_initialized(),
        "gradient mode": torch.is_grad_enabled(), "deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "float32 precision": torch.get_float32_matmul_precision(), "the environment": dict(os.environ),
        "signal handlers": str([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]),
        "the working directory": os.getcwd(), "running threads": threading.active_count()}

def audit(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        touched.append(f"writes {arguments[0]}")
    elif event in ("os.mkdir", "socket.connect", "subprocess.Popen"):
        touched.append(f"{event} {arguments[:2]}")

result, touched, path = {}, [], list(sys.path)
for script in sys.argv[1:]:  # the libraries' own side effects come before the first look
    for node in ast.parse(open(script).read()).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)) and "envs" not in ast.unparse(node):
            exec(compile(ast.Module([node], []), script, "exec"), {})
scripts, sys.argv = sys.argv[1:], ["x", "--bad"]
sys.addaudithook(audit)
for script in scripts:
    name = os.path.basename(script)[:-3]
    before, breaches, shown = state(), [], io.StringIO()
    touched.clear()
    spec = importlib.util.spec_from_file_location(name, script)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            breaches.append(f"import raises {error!r}")
    breaches += [f"import changes {key}" for key, value in state().items() if value != before[key]]
    breaches += [f"import: {text}" for text in touched]
    breaches += [f"import prints {shown.getvalue()[:80]!r}"] if shown.getvalue() else []
    sys.path[:], sys.argv, shown, code = path, [script, "--help"], io.StringIO(), None
    for loaded in [m for m in sys.modules if m.split(".")[0] == "envs"]:
        del sys.modules[loaded]  # so that --help has to find envs/ by itself, too
    with contextlib.redirect_stdout(shown):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as error:
            code = error.code
        except BaseException as error:
            code = repr(error)
    sys.path[:], sys.argv = path, ["x", "--bad"]
    result[name] = {"import": breaches, "code": code, "help": shown.getvalue()}
print(json.dumps(result))
"""


@functools.cache
def probe(paths: tuple[Path, ...], folder: Path) -> dict[str, dict]:
    """Import each script and run it with --help, in an empty folder, within a time limit."""
    if importlib.util.find_spec("torch") is None and "CI" not in os.environ:  # the other rules only read text
        pytest.skip("importing the scripts needs torch: python -m pip install -r requirements.txt")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", PROBE, *map(str, paths)]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=180)
    assert run.returncode == 0, run.stderr
    *printed, last = run.stdout.splitlines()
    assert not printed and not list(folder.iterdir()), (printed, list(folder.iterdir()))
    return json.loads(last)


def check_import(script: Script, found: dict) -> list[str]:
    """Importing changes nothing outside the module."""
    return [script.at(1, text) for text in found["import"]]


def check_help(script: Script, found: dict) -> list[str]:
    """--help exits with 0 and lists every flag."""
    breaches = [] if found["code"] == 0 else [script.at(1, f"--help ends with {found['code']}, not with 0")]
    for node, _ in script.fields:
        flag = "--" + node.target.id.replace("_", "-")
        if not re.search(rf"{flag}(?![\w-])", found["help"]):
            breaches.append(script.at(node, f"--help does not list {flag}"))
    return breaches


# --- The scripts -----------------------------------------------------------------------------------------------------


def load_scripts() -> list[Script]:
    """The scripts of algorithms/, in the order of the families."""
    order = [name for names in FAMILIES.values() for name in names]
    paths = {path.stem: path for path in (ROOT / "algorithms").glob("*.py")}
    assert not paths.keys() - set(order), f"scripts without a family: {paths.keys() - set(order)}"
    envs = {path.stem: path.read_text() for path in (ROOT / "envs").glob("*.py")}
    requirements = (ROOT / "requirements.txt").read_text()
    pages = {name: paths[name].with_suffix(".md") for name in order if name in paths}
    texts = {name: page.read_text() if page.exists() else "" for name, page in pages.items()}
    return [Script(name, paths[name].read_text(), texts[name], requirements, envs) for name in pages]


SCRIPTS = load_scripts()
CHECKS = [check_sections, check_essay, check_flags, check_tags, check_page, check_inline_metadata]
CHECKS += [check_budget, check_method, check_docstrings]
FAMILY_CHECKS = [check_same_definitions, check_declared, check_near_duplicates]
PROBE_CHECKS = [check_import, check_help]


def report(breaches: list[str]) -> None:
    if breaches:
        pytest.fail("\n".join(breaches), pytrace=False)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_script(script, check):
    report(check(script))


@pytest.mark.parametrize("check", FAMILY_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family, check):
    report(check([script for script in SCRIPTS if script.family == family]))


def test_sizes_of_the_declared_differences(capsys):
    families = [[script for script in SCRIPTS if script.family == family] for family in FAMILIES]
    rows = [row for scripts in families for row in difference_sizes(scripts)]
    with capsys.disabled():
        print("", *rows, sep="\n", end="\n" if rows else "")


@pytest.fixture(scope="module")
def empty_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("empty")


@pytest.mark.parametrize("check", PROBE_CHECKS, ids=lambda check: check.__name__)
def test_import_and_help(check, empty_folder):
    found = probe(tuple(ROOT / "algorithms" / f"{script.name}.py" for script in SCRIPTS), empty_folder)
    report([breach for script in SCRIPTS for breach in check(script, found[script.name])])


# --- Proof that every check can fail ---------------------------------------------------------------------------------

BANNERS = {f"@{title[0]}": f"# === {title} ".ljust(120, "=") for title in TITLES}
GOOD = '''\
# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.6", "tyro>=1.0", "tensorboard>=2.18", "numpy>=2.0"]
# ///
"""One sentence. Shao et al., arXiv 2402.03300.

Differs from the paper in:
1. one thing
2. another, which
   needs two lines

    python algorithms/grpo.py    # default
    python algorithms/grpo.py --model-name-or-path Qwen/Qwen3-0.6B
    torchrun --nproc_per_node 2 algorithms/grpo.py --beta 0.1
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch.utils.tensorboard import SummaryWriter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from envs.toy import prompts

@2
SEEDS = 3


@dataclass
class Args:
    model_name_or_path: str = "tiny"
    """policy (TRL 1.16)"""
    beta: float = 0.0
    """weight of the KL penalty (DeepSeekMath 4.2: 0.04)"""


@3
def scale(rewards, epsilon=1e-4):
    """Rewards (B,) to advantages (B,)."""
    return (rewards - rewards.mean()) / (torch.stack([r for r in rewards]).std() + epsilon * SEEDS)


@4
def load_model(args):
    """Model."""
    return args.model_name_or_path


@5
@6
# the reason
def save_checkpoint(folder, state):
    """Write."""
    path = Path(folder)
    path.mkdir()
    names = sorted(state)
    for name in names:
        value = state[name]
        if value is None:
            continue
        torch.save(value, path / name)
    return path


@7
@8
def train(args: Args):
    """Train."""
    board, rewards = SummaryWriter(), scale(torch.ones(4))
    board.add_scalar("train/reward", rewards.mean() * args.beta)
    for name in load_model(args):
        board.add_scalar(f"train/rewards/{name}/mean", len(prompts))


if __name__ == "__main__":
    train(tyro.cli(Args))
'''
for mark, text in BANNERS.items():
    GOOD = re.sub(rf"(?m)^{mark}$", text + "\n\n", GOOD)
PAGE = """\
Flags: `--model-name-or-path`, `beta`.

| tag | meaning | healthy |
|---|---|---|
| `train/reward` | mean reward | rises |
| `train/rewards/<name>/mean` | one reward | rises |

    python algorithms/grpo.py --no-beta
"""
REQUIREMENTS = "torch==2.13.0\ntyro==1.0.17\ntensorboard==2.21.0\nnumpy==2.4.6\n"
GRPO = Script("grpo", GOOD, PAGE, REQUIREMENTS, {"toy": "import numpy\nprompts = []\n"})
LIST = "Differs from grpo.py in:\n1. `scale` halves, `beta` is on, `new` is new\n\nDiffers from the paper in:"
GDPO = (
    GOOD.replace("Differs from the paper in:", LIST).replace("grpo.py\n", "gdpo.py\n").replace("grpo.py ", "gdpo.py ")
)
GDPO = GDPO.replace("from gdpo.py", "from grpo.py").replace("return (rewards", "return 0.5 * (rewards")
GDPO = GDPO.replace("beta: float = 0.0", "beta: float = 0.1").replace("4.2: 0.04)", "4.3)")
GDPO = GDPO.replace("SEEDS = 3\n", "SEEDS = 3\nnew = 4\n")
GDPO = replace(GRPO, name="gdpo", source=GDPO, page=PAGE.replace("grpo", "gdpo"))

BREAKS = [  # check, text of the good script, page or requirements, what replaces it, part of the sentence expected
    (check_sections, BANNERS["@5"], BANNERS["@6"], "the banner should be '# === 5 Rollout"),
    (check_sections, BANNERS["@5"], BANNERS["@5"][:-1], "120 columns"),
    (check_sections, BANNERS["@8"] + "\n", "", "it is 'nothing'"),
    (check_sections, "if __name__", BANNERS["@8"] + "\nif __name__", "no further banner"),
    (check_sections, "@dataclass\nclass", "import csv\n@dataclass\nclass", "imports stand between"),
    (check_sections, "import torch\n", "import torch\ntorch.manual_seed(1)\n", "stand before section 2"),
    (check_sections, "sys.path.insert(0, str(Path(__file__).resolve().parents[1]))\n", "", "the repository root"),
    (check_sections, "import sys\n", "import sys\nimport envs.toy\n", "before the line that puts"),
    (check_sections, "def load_model", "def train", "`train` belongs in section 8"),
    (check_sections, "class Args", "class Arguments", "`Args` is not defined"),
    (check_sections, "train(tyro.cli(Args))", "train(Args())", "the last statement"),
    (check_essay, "# /// script", "import os\n# /// script", "starts with its PEP 723 block"),
    (check_essay, "One sentence.", "One sentence.\n" * 20, "the essay has"),
    (check_essay, "arXiv", "paper", "arXiv id"),
    (check_essay, "Differs from the paper", "Departures", "lacks 'Differs from the paper in:'"),
    (check_essay, "2. another", "3. another", "numbered from 1"),
    (check_essay, "grpo.py    # default", "grpo.py --beta 1", "lacks the default command"),
    (check_essay, "--model-name-or-path Q", "--beta Q", "real use"),
    (check_essay, "torchrun --n", "mpirun --n", "torchrun"),
    (check_essay, "    python algorithms/grpo.py    # default\n", "", "shows 2 commands"),
    (check_flags, "rewards.mean() * args.beta", "rewards.mean() * asdict(args)['beta']", "never read as args.beta"),
    (check_flags, "* args.beta)", ")\n    args.beta = 1", "never read as args.beta"),
    (check_flags, '    """policy (TRL 1.16)"""\n', "", "no docstring under it"),
    (check_flags, "policy (TRL 1.16)", "policy", "does not end with its source"),
    (check_flags, "policy (TRL 1.16)", "policy (by name)", "does not end with its source"),
    (check_flags, "    beta: float", '    beta: int = 1\n    """int (ours)"""\n    beta: float', "repeats the name"),
    (check_flags, "weight of the KL penalty (DeepSeekMath 4.2: 0.04)", "policy (TRL 1.16)", "repeats the name"),
    (check_flags, "args.beta)", "args.beta * args.rate)", "args.rate is not a field"),
    (check_tags, '"train/reward"', '"train/kl"', "tag `train/kl` has no table row"),
    (check_tags, '"train/reward"', '"train/kl"', "grpo.md:5: tag `train/reward` is not in the script"),
    (check_tags, "{name}/mean", "{name}/max", "has no table row"),
    (check_tags, "| mean reward | rises |", "| mean reward |", "healthy range"),
    (check_tags, "| mean reward |", "| |", "healthy range"),
    (check_page, "`beta`", "beta", "flag `beta` is not in"),
    (check_page, "--no-beta", "--alpha 1", "unknown flag --alpha"),
    (check_page, "2 algorithms/grpo.py --beta", "2 algorithms/grpo.py --alpha", "unknown flag --alpha"),
    (check_inline_metadata, "# dependencies = [", "# dependencies = ", "no valid PEP 723 block"),
    (check_inline_metadata, '# requires-python = ">=3.11"\n', "", "requires-python is missing"),
    (check_inline_metadata, ', "numpy>=2.0"', "", "'numpy' is imported"),
    (check_inline_metadata, ', "tensorboard>=2.18"', "", "'tensorboard' is imported"),
    (check_inline_metadata, '"tyro>=1.0"', '"tyro>=1.0", "gymnasium>=1.0"', "'gymnasium' is a dependency but"),
    (check_inline_metadata, "tyro>=1.0", "tyro==1.0", "one lower bound"),
    (check_inline_metadata, "tyro>=1.0", "tyro>=9", "excludes the pin"),
    (check_inline_metadata, "tyro==1.0.17\n", "", "has no pin"),
    (check_budget, "SEEDS = 3\n", "SEEDS = 3\n" * 601, "lines of code, 600 are allowed"),
    (check_budget, "# the reason", "# " + "x" * 119, "121 columns"),
    (check_method, "(B,) to advantages (B,)", "to advantages", "states no shape"),
    (check_method, "    return (rewards", "    rewards += 1\n" * 40 + "    return (rewards", "has 42 lines"),
    (check_method, "    return (rewards", "    print(1)\n    return (rewards", "uses `print`"),
    (check_method, "for r in rewards]", "for r in load_model(rewards)]", "uses `load_model`"),
    (check_method, "    return (rewards", "    torch.save(1, 2)\n    return (rewards", "`.save` does"),
    (check_method, GOOD[GOOD.index("def scale") : GOOD.index(BANNERS["@4"])], "", "section 3 is empty"),
    (check_docstrings, '    """Model."""\n', "", "`load_model` has no docstring"),
]
LONG = GOOD[GOOD.index("def save_checkpoint") : GOOD.index(BANNERS["@7"])]
COPY = (
    LONG.replace("save_checkpoint", "dump").replace("value", "item").replace("folder", "where").replace("Write", "Put")
)
FAMILY_BREAKS = [  # the same for gdpo beside a good grpo
    (check_same_definitions, "# the reason", "# another reason", "`save_checkpoint` differs from algorithms/grpo.py"),
    (check_same_definitions, "Write.", "Writes.", "`save_checkpoint` differs"),
    (check_same_definitions, "SEEDS = 3", "SEEDS = 4", "`SEEDS` differs"),
    (check_same_definitions, "`scale` halves", "it halves", "`scale` differs"),
    (check_same_definitions, "beta: float", "beta: int", "type of flag `beta`"),
    (check_same_definitions, "weight of", "share of", "docstring of flag `beta`"),
    (check_same_definitions, "`beta` is on", "it is on", "default of flag `beta`"),
    (check_same_definitions, "policy (TRL", "policy (verl", "docstring of flag `model_name_or_path`"),
    (check_declared, "`beta` is on", "`train` is on", "declares `train`, which does not differ"),
    (check_declared, "`beta` is on", "`model_name_or_path` too", "which does not differ"),
    (check_declared, "`beta` is on", "`gone` is on", "which neither script defines"),
    (check_declared, "from grpo.py", "from other.py", "not in the family"),
    (check_near_duplicates, BANNERS["@7"], COPY + BANNERS["@7"], "`dump` is 100% the same as `save_checkpoint`"),
    (check_near_duplicates, LONG, COPY.replace("where, state", "where, state, more=1"), "give both one name"),
]


def changed(script: Script, old: str, new: str) -> Script:
    texts = {name: getattr(script, name) for name in ("source", "page", "requirements")}
    name = next(name for name, text in texts.items() if old in text)
    return replace(script, **{name: texts[name].replace(old, new, 1)})


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("script", [GRPO, GDPO], ids=lambda script: script.name)
def test_good_script_passes(script, check):
    assert check(script) == []


@pytest.mark.parametrize("check", FAMILY_CHECKS, ids=lambda check: check.__name__)
def test_good_family_passes(check):
    assert check([GRPO, GDPO]) == []


@pytest.mark.parametrize("check, old, new, expected", BREAKS, ids=lambda value: getattr(value, "__name__", ""))
def test_check_can_fail(check, old, new, expected):
    breaches = check(changed(GRPO, old, new))
    assert any(expected in breach and re.match(r"algorithms/grpo\.(py|md):\d+: ", breach) for breach in breaches), (
        breaches
    )


@pytest.mark.parametrize("check, old, new, expected", FAMILY_BREAKS, ids=lambda value: getattr(value, "__name__", ""))
def test_family_check_can_fail(check, old, new, expected):
    breaches = check([GRPO, changed(GDPO, old, new)])
    assert any(expected in breach and breach.startswith("algorithms/gdpo.py:") for breach in breaches), breaches


def test_gdpo_must_list_its_differences_from_grpo():
    assert check_essay(GDPO) == [] and "Differs from grpo.py" in check_essay(changed(GDPO, LIST, LIST[-27:]))[0]


def test_sizes_of_synthetic_differences():
    rows = ["beta -2 +2", "new -0 +1", "scale -1 +1"]
    assert difference_sizes([GRPO, GDPO]) == [f"gdpo.py against grpo.py: {row} lines" for row in rows]


def test_import_and_help_checks_can_fail(tmp_path):
    mess = "torch.set_num_threads(3)\ntorch.manual_seed(5)\ntorch.set_default_dtype(torch.float64)\n"
    mess += "torch.set_grad_enabled(False)\nprint(sys.argv)\nPath(__file__ + '.log').write_text('')\n@dataclass"
    bad = changed(changed(GRPO, "@dataclass", mess), "tyro.cli(Args)", "tyro.cli(Args), 1")
    scripts = {"gdpo": GRPO, "grpo": bad}
    for folder in ("algorithms", "envs", "empty"):
        (tmp_path / folder).mkdir()
    (tmp_path / "envs" / "toy.py").write_text("import numpy\nprompts = []\n")
    for name, script in scripts.items():
        source = (
            script.source.replace("    beta: float", "    beta: tyro.conf.Suppress[float]")
            if script is bad
            else script.source
        )
        (tmp_path / "algorithms" / f"{name}.py").write_text(source)
    found = probe(tuple(tmp_path / "algorithms" / f"{name}.py" for name in scripts), tmp_path / "empty")
    assert check_import(GRPO, found["gdpo"]) == check_help(GRPO, found["gdpo"]) == []
    breaches = "\n".join(check_import(bad, found["grpo"]))
    for text in ("threads", "random state of torch", "default dtype", "gradient mode", "prints \"['x'", "writes /"):
        assert text in breaches, (text, breaches)
    assert "--help does not list --beta" in check_help(bad, found["grpo"])[0]
    assert "--help ends with 3" in check_help(bad, {"code": 3, "help": ""})[0]


def test_control_scripts_share_functions_but_not_flags_and_training():
    a, b = (replace(script, name=name) for script, name in ((GRPO, "unimodal_poisson"), (GDPO, "fm3q")))
    b = replace(b, source=b.source.replace("from grpo.py", "from unimodal_poisson.py").replace("`scale` ", "scale "))
    b = changed(changed(b, "Train.", "Train it."), "beta: float", "beta: int")
    assert ["`scale` differs" in breach for breach in check_same_definitions([a, b])] == [True]
    commands_of_b = "python algorithms/fm3q.py\n    python algorithms/fm3q.py --beta 1\n    uv run algorithms/fm3q.py\n"
    b = replace(b, source=re.sub(r"( +\S.*algorithms/.*\n)+", f"    {commands_of_b}", b.source))
    assert check_essay(b) == []
    assert "real env" in check_essay(changed(b, " --beta 1", ""))[0]
    assert "500 are allowed" in check_budget(changed(b, "SEEDS = 3\n", "SEEDS = 3\n" * 501))[0]


def test_sync_carries_shared_blocks_and_leaves_declared_ones():
    from sync_shared_blocks import shared_text  # imports this file

    stale = changed(changed(GDPO, "# the reason", "# an old reason"), "policy (TRL", "the policy (TRL")
    assert shared_text(GRPO, stale) == (GDPO.source, ["save_checkpoint", "Args.model_name_or_path"])
