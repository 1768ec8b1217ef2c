"""The files around the code: citation, requirements, links, commands, the glossary of metrics, no path of a machine."""

import ast
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from test_house_rules import FAMILIES, SCRIPTS, code_tags, page_rows, page_tags, tag_matches

ROOT = Path(__file__).resolve().parents[1]


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


def test_citation_file():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software" and citation["license"] == "MIT"
    assert citation["title"] and citation["message"] and all(author["name"] for author in citation["authors"])
    papers = set()
    for reference in citation["references"]:
        assert reference["type"] and reference["title"] and reference["authors"]
        assert all(author["family-names"] and author["given-names"] for author in reference["authors"])
        (arxiv,) = re.findall(r"^arXiv:(\d{4}\.\d{5})$", reference["identifiers"][0]["value"])
        assert reference["url"] == f"https://arxiv.org/abs/{arxiv}"
        papers.add(arxiv)
    assert len(papers) == len(citation["references"]) == 11  # nine methods, Dr. GRPO and DAPO


def test_requirements_are_pinned():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    for line in lines:
        assert re.fullmatch(r"[a-z0-9-]+(\[[a-z0-9,-]+\])?==[0-9]+(\.[0-9]+)*", line), line
    names = {re.split(r"[\[=]", line)[0] for line in lines}
    assert {"torch", "transformers", "numpy", "tyro", "tensorboard", "gymnasium", "matplotlib", "pytest"} <= names


def test_ci_runs_the_test_command_of_the_readme():
    command = "python -m pytest -n 2 --dist loadfile"
    assert command in (ROOT / ".ci" / "run").read_text() and command in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_relative_links_resolve(page):
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(<?([^)\s>]+)", text) + re.findall(r"(?:src|href)=\"([^\"]+)\"", text)
    links += re.findall(r"^\[[^\]]+\]: *(\S+)", text, flags=re.MULTILINE)
    local = [link.split("#")[0] for link in links if not re.match(r"[a-z]+:|#", link)]
    missing = [link for link in local if link.startswith("/") or not (page.parent / link).exists()]
    assert not missing, f"links of {page.name} that lead nowhere: {missing}"


GUIDES = ["README.md", "CONTRIBUTING.md", "algorithms/README.md", "benchmarks/README.md"]
EXAMPLE = "rloo"  # the method that CONTRIBUTING.md adds; its files do not exist


def shown_commands(text: str) -> list[list[str]]:
    """Words of the commands of a page that run a program of the repository, in blocks or in backticks."""
    text = re.sub(r"\\\n\s*", " ", text)
    spans = re.findall(r"^ {4,}(\S.*)$", text, flags=re.MULTILINE) + re.findall(r"`([^`\n]+)`", text)
    spans = [part.strip() for span in spans for part in span.partition(" # ")[0].split("&&")]
    return [shlex.split(span) for span in spans if re.match(r"(python|torchrun|uv run|diff) [^|]*\w\.py\b", span)]


def flags_of(path: Path) -> set[str] | None:
    """Flags of a program that has Args, as they are typed."""
    nodes = [n for n in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(n, ast.ClassDef)]
    names = [n.target.id for node in nodes if node.name == "Args" for n in node.body if isinstance(n, ast.AnnAssign)]
    return {f"--{no}{name.replace('_', '-')}" for name in names for no in ("", "no-")} | {"--help"} if names else None


@pytest.mark.parametrize("page", GUIDES)
def test_commands_exist(page):
    """Programs, their flags, and the studies named by --study."""
    found = shown_commands((ROOT / page).read_text(encoding="utf-8"))
    assert found
    for words in found:
        programs = [word for word in words if word.endswith(".py")]
        if any("*" in program or Path(program).stem == EXAMPLE for program in programs):
            continue
        paths = [ROOT / program if "/" in program else ROOT / "benchmarks" / program for program in programs]
        assert all(path.is_file() for path in paths), f"{page}: {shlex.join(words)}"
        program, path = programs[0], paths[0]
        flags, options = flags_of(path), words[words.index(program) + 1 :]
        for word in options if flags else []:
            assert not word.startswith("--") or word.partition("=")[0] in flags, f"{page}: {shlex.join(words)}: {word}"
        if "--study" in options:
            study = options[options.index("--study") + 1]
            assert f'"{study}"' in path.read_text(encoding="utf-8"), f"{page}: --study {study}"


@pytest.mark.parametrize("page", GUIDES)
def test_flags_in_backticks_exist(page):
    """A flag without its command, as `--resume RUN_DIR`, is one of a script or of another program."""
    programs = [path for path in FILES if path.suffix == ".py" and path.parent.name != "tests"]
    known = {"--nproc_per_node", *(flag for path in programs for flag in flags_of(path) or ())}
    spans = re.findall(r"`([^`\n]+)`", (ROOT / page).read_text(encoding="utf-8"))
    found = {flag for span in spans for flag in re.findall(r"(?<!\S)--[a-z][\w-]*", span)}
    assert found <= known, found - known


@pytest.mark.parametrize("page", GUIDES[1:3])
def test_names_in_backticks_exist(page):
    """Files, and identifiers of the code, in the guides."""
    spans = re.findall(r"`([^`\n]+)`", (ROOT / page).read_text(encoding="utf-8"))
    sources = "\n".join(path.read_text(encoding="utf-8") for path in FILES if path.suffix == ".py")
    words = {span for span in spans if EXAMPLE not in span}
    for name in {
        match for span in words for match in re.findall(r"(?:algorithms|benchmarks|envs|tests)/[\w/.]+", span)
    }:
        assert (ROOT / name.rstrip(".")).exists(), name
    for name in {span.partition("(")[0] for span in words if re.fullmatch(r"[A-Za-z_]+(\(.*\))?", span)}:
        assert re.search(rf"\b{name}", sources), f"{page}: nothing in the code is called {name}"


def test_messages_of_contributing_are_those_of_the_tests():
    """Every message of its table is one of a test or of make_tables.py, numbers and names aside."""
    paths = [*(ROOT / "tests").glob("*.py"), ROOT / "benchmarks" / "make_tables.py"]
    sources = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    rows = [cells for _, cells in page_rows((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))[2:]]
    assert len(rows) >= 8
    for message in (message for cells in rows for message in re.findall(r"`([^`]+)`", cells[0])):
        for part in re.split(r"\.\.\.|\d+%?|rloo_default_metrics.csv", message):
            assert part.strip(" ,") in sources, message


def test_glossary_of_metrics():
    """algorithms/README.md has every metric that two pages or more document, and says which scripts log it."""
    names, documented = {script.name for script in SCRIPTS}, {}
    for script in SCRIPTS:
        for tag in {tag for _, cells in page_rows(script.page) for tag in page_tags(cells[0])}:
            documented.setdefault(tag, set()).add(script.name)
    glossary = {}
    for line, cells in page_rows((ROOT / "algorithms" / "README.md").read_text(encoding="utf-8")):
        for tag in page_tags(cells[0]):
            assert len(cells) == 6 and tag not in glossary and cells[1] and cells[3], f"line {line}: {tag}"
            kept, _, left_out = cells[5].partition(" but ")
            words, without = re.findall(r"\w+", kept), re.findall(r"\w+", left_out)
            scripts = {name for word in words for name in FAMILIES.get(word, [word])}
            assert scripts | set(without) <= names, f"line {line}: {cells[5]}"
            glossary[tag] = scripts - set(without)
    assert glossary == {tag: scripts for tag, scripts in documented.items() if len(scripts) > 1}
    for script in SCRIPTS:  # the pages are held to the code by the house rules; this once more, from here
        tags = code_tags(script)
        wanted = [tag for tag, scripts in glossary.items() if script.name in scripts]
        assert not [tag for tag in wanted if not any(tag_matches(in_code, tag) for in_code in tags)]


def test_no_file_names_a_path_of_a_machine():
    machine = re.compile(r"(?<![\w.:/])/(?:home|root|work|tmp|mnt|opt|scratch|Users)/\w|[A-Z]:\\Users")
    found = []
    for path in FILES:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:  # weights and pictures
            continue
        found += [f"{path.relative_to(ROOT)}:{number}" for number, line in enumerate(lines, 1) if machine.search(line)]
    assert not found, f"absolute paths at {found}"
