"""The files around the code: citation, BibTeX, links, commands and flags on pages, no path of a machine."""

import ast
import functools
import importlib
import itertools
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import tyro
import yaml

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted((ROOT / "algorithms").glob("*.py"))


def repository_files() -> list[Path]:
    """Tracked and new files, without what .gitignore names; without git, everything but hidden folders and runs."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listing.returncode == 0:
        files = [ROOT / name for name in listing.stdout.split("\0") if name]
    else:
        hidden = re.compile(r"(^|/)(\.(?!ci/|gitignore)|runs/|__pycache__/)")
        files = [path for path in ROOT.rglob("*") if not hidden.search(path.relative_to(ROOT).as_posix())]
    return sorted(path for path in files if path.is_file())


FILES = repository_files()
PAGES = [path for path in FILES if path.suffix == ".md"]
GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
for folder in ("algorithms", "benchmarks", "envs"):
    GUIDES += [path for path in PAGES if path.parent == ROOT / folder]


README = (ROOT / "README.md").read_text(encoding="utf-8")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_citation_file():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0" and citation["license"] == "MIT"
    version = citation["version"]
    assert f"{{Version {version}, commit" in README and f"{{{citation['title']}}}" in README
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for reference in citation["references"]:
        assert reference["title"] and all(author["family-names"] for author in reference["authors"])
        (arxiv,) = re.findall(r"^arXiv:(\d{4}\.\d{5})$", reference["identifiers"][0]["value"])
        assert reference["url"] == f"https://arxiv.org/abs/{arxiv}"
    cited = {reference["notes"].split()[-1] for reference in citation["references"]}
    assert cited == {name_of(script) for script in SCRIPTS}


def bibtex_entries() -> list:
    """Every BibTeX block of a page, with the page's name."""
    found = []
    for page in PAGES:
        blocks = re.findall(r"^```bibtex\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
        found += [pytest.param(block, id=name_of(page)) for block in blocks]
    return found


@pytest.mark.parametrize("block", bibtex_entries())
def test_bibtex_parses(block):
    """One entry, fields with a comma between two, authors as BibTeX splits them."""
    assert block.count("{") == block.count("}")
    body = re.fullmatch(r"@\w+\{[\w:-]+,\n(.*)\n\}\n", block, re.S)[1]
    parts = re.split(r",\n(?=  \w+ *=)", body)
    value = r"\{((?:[^{}]|\{[^{}]*\})*)\}"  # braces once inside the value's own
    fields = dict(re.fullmatch(rf"  (\w+) *= {value}", part).groups() for part in parts)
    assert {"title", "author", "year"} <= fields.keys()
    for author in re.split(r"\s+and\s+", fields["author"]):
        assert author == "others" or author.startswith("{") or author.count(",") == 1, author


def test_lines_of_the_readme_are_those_of_grpo():
    """In its order, without their indentation."""
    shown = re.search(r"^```python\n(groups = .*?)^```", README, re.M | re.S)[1].split("\n")
    lines = iter(line.strip() for line in (ROOT / "algorithms" / "grpo.py").read_text(encoding="utf-8").splitlines())
    missing = [line for line in shown if line.strip() and line.strip() not in lines]
    assert not missing and len(shown) > 8


@pytest.mark.parametrize(
    "gold, text, expected",
    [
        (84, "The answer is **84**", 1.0),
        ("1234", "so there are 1,234.", 1.0),
        ("Natalia sold 48/2 = <<48/2=24>>24 clips.\n#### 72", "24 + 48 = 72", 1.0),
        ("#### 1,080", "<answer>1080</answer>", 1.0),
        ("-3", "x = -3", 1.0),
        ("0.5", "1.5", 0.0),
        ("72", "72, no: 73", 0.0),
        ("none", "none", 0.0),
    ],
)
def test_reward_of_the_readme(gold, text, expected):
    names = {}
    exec(re.search(r"^```python\n(import re\n.*?)^```", README, re.M | re.S)[1], names)
    assert names["score"]({"prompt": "", "answer": gold}, text) == expected


def anchors(page: Path) -> set[str]:
    """What a link to the page may have behind #: its headings as GitHub writes them, and ids."""
    text = page.read_text(encoding="utf-8")
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    return slugs | set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_anchors_resolve(page):
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(<?([^)\s>]+)", text) + re.findall(r"(?:src|href)=\"([^\"]+)\"", text)
    links += re.findall(r"^\[[^\]]+\]: *(\S+)", text, flags=re.MULTILINE)
    wrong = []
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if path.startswith("/") or not target.exists():
            wrong.append(link)
        elif anchor and anchor not in anchors(target):
            wrong.append(link)
    assert not wrong, f"links of {page.name} that lead nowhere: {wrong}"


# --- Flags and commands -----------------------------------------------------------------------------------------------


def fields(path: Path) -> dict[str, str]:
    """Fields of a program's Args with the docstring under each."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    body = [node for kind in tree.body if getattr(kind, "name", "") == "Args" for node in kind.body]
    found = {}
    for node, after in itertools.pairwise([*body, ast.Pass()]):
        if isinstance(node, ast.AnnAssign):
            documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            found[node.target.id] = after.value.value if documented else ""
    return found


@functools.cache
def flags_of(path: Path) -> set[str]:
    """Flags of a program that has Args, as they are typed."""
    names = [name.replace("_", "-") for name in fields(path)]
    return {f"--{no}{name}" for name in names for no in ("", "no-")} | ({"--help"} if names else set())


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_every_flag_has_a_docstring(script):
    assert [name for name, text in fields(script).items() if not text] == []


def shown_commands(text: str) -> list[list[str]]:
    """Words of the commands of a text that run a program of the repository: in blocks, or in backticks."""
    text = re.sub(r"\\\n\s*", " ", text)
    spans = re.findall(r"^(?: {4,})?(\S.*)$", text, flags=re.MULTILINE) + re.findall(r"`([^`\n]+)`", text)
    parts = [part.strip() for span in spans for part in re.split(r" +# ", span)[0].split("&&")]
    return [shlex.split(part) for part in parts if re.match(r"(python|torchrun|uv run|diff) [^|`]*\w\.py\b", part)]


def wrong_flags(program: Path, options: list[str]) -> str:
    """Why a command does not parse: a script parses it, of other programs flags are compared."""
    if program.parent.name != "algorithms":
        known = flags_of(program)
        flags = [word.partition("=")[0] for word in options if word.startswith("--")]
        return " ".join(flag for flag in flags if known and flag not in known)
    module = importlib.import_module(f"algorithms.{program.stem}")
    try:
        tyro.cli(module.Args, args=[word for word in options if word != "..."])
    except SystemExit as stop:
        return f"exit status {stop.code}" * bool(stop.code)
    return ""


@pytest.mark.parametrize("page", [*GUIDES, *SCRIPTS], ids=name_of)
def test_commands_parse(page):
    """Programs exist and take these flags and values; study.py knows the studies."""
    text = page.read_text(encoding="utf-8")
    text = ast.get_docstring(ast.parse(text)) if page.suffix == ".py" else text
    for words in shown_commands(text):
        programs = [word for word in words if word.endswith(".py") and not word.startswith("my_")]
        if not programs or any("*" in program for program in programs):
            continue
        paths = [ROOT / name if "/" in name else ROOT / "benchmarks" / name for name in programs]
        assert paths[0].is_file(), shlex.join(words)
        if words[0] == "diff":
            assert paths[1].is_file(), shlex.join(words)
            continue
        options = words[words.index(programs[0]) + 1 :]
        assert not wrong_flags(paths[0], options), shlex.join(words)
        if paths[0].name == "study.py":
            names = itertools.takewhile(lambda word: not word.startswith("--"), options)
            studies = paths[0].with_name("studies.py").read_text(encoding="utf-8")
            assert all(f'"{name}"' in studies for name in names), shlex.join(words)


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_flags_and_files_in_backticks_exist(page):
    """A flag without its command, as `--resume RUN`, is one of a script or of another program."""
    programs = [path for path in FILES if path.suffix == ".py" and path.parent.name != "tests"]
    known = {"--nproc_per_node"}.union(*map(flags_of, programs))
    spans = re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))
    flags = {flag for span in spans for flag in re.findall(r"(?<!\S)--[a-z][\w-]*", span)}
    assert flags <= known, flags - known
    files = re.findall(r"\b(?:algorithms|benchmarks|envs|tests)/[\w/.]+\w", "\n".join(spans))
    assert not [name for name in files if not (ROOT / name).exists()]


def test_no_file_names_a_path_of_a_machine():
    machine = re.compile(r"(?<![\w.:/])/(?:home|root|work|tmp|mnt|opt|scratch|Users)/\w|[A-Z]:\\Users")
    found = []
    for path in FILES:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:  # weights and pictures
            continue
        found += [f"{name_of(path)}:{number}" for number, line in enumerate(lines, 1) if machine.search(line)]
    assert not found, f"absolute paths at {found}"
