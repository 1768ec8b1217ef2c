"""The files around the code: citation, requirements, links, commands and flags on pages, no path of a machine."""

import ast
import itertools
import re
import shlex
import subprocess
from pathlib import Path

import pytest
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
        files = [
            path for path in ROOT.rglob("*") if not hidden.search(path.relative_to(ROOT).as_posix())
        ]
    return sorted(path for path in files if path.is_file())


FILES = repository_files()
PAGES = [path for path in FILES if path.suffix == ".md"]
LANGUAGE = ["grpo", "dapo", "gdpo", "dr_mas", "igpo", "spiral_rae", "pi_play"]
NEW = [f"algorithms/{name}.md" for name in LANGUAGE]  # the pages of the control scripts follow
NEW += ["envs/README.md", *(f"benchmarks/{name}.md" for name in LANGUAGE[2:])]
GUIDES = ["README.md", "CONTRIBUTING.md", "algorithms/README.md", "benchmarks/README.md", *NEW]
GUIDES = [ROOT / name for name in GUIDES if (ROOT / name).exists()]
EXAMPLE = "rloo"  # the method that CONTRIBUTING.md adds; its files do not exist


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_citation_file():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0" and citation["license"] == "MIT"
    for reference in citation["references"]:
        assert reference["title"] and all(author["family-names"] for author in reference["authors"])
        (arxiv,) = re.findall(r"^arXiv:(\d{4}\.\d{5})$", reference["identifiers"][0]["value"])
        assert reference["url"] == f"https://arxiv.org/abs/{arxiv}"
    assert len(citation["references"]) == 11  # nine methods, Dr. GRPO and DAPO


def test_requirements_are_pinned():
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        assert re.fullmatch(r"[a-z0-9-]+(\[[a-z0-9,-]+\])?==[0-9]+(\.[0-9]+)*", line), line


def test_ci_runs_the_test_command_of_the_readme():
    command = "python -m pytest -n 2 --dist loadfile"
    assert (
        command in (ROOT / ".ci" / "run").read_text()
        and command in (ROOT / "README.md").read_text()
    )


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_resolve(page):
    text = re.sub(
        r"^```.*?^```|`[^`\n]*`",
        "",
        page.read_text(encoding="utf-8"),
        flags=re.DOTALL | re.MULTILINE,
    )
    links = re.findall(r"\]\(<?([^)\s>]+)", text) + re.findall(r"(?:src|href)=\"([^\"]+)\"", text)
    links += re.findall(r"^\[[^\]]+\]: *(\S+)", text, flags=re.MULTILINE)
    local = [link.split("#")[0] for link in links if not re.match(r"[a-z]+:|#", link)]
    missing = [link for link in local if link.startswith("/") or not (page.parent / link).exists()]
    assert not missing, f"links of {page.name} that lead nowhere: {missing}"


# --- Flags and commands -----------------------------------------------------------------------------------------------


def fields(path: Path) -> dict[str, str]:
    """Fields of a program's Args with the docstring under each."""
    body = [
        node.body
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if getattr(node, "name", "") == "Args"
    ]
    found = {}
    for node, after in itertools.pairwise([*itertools.chain(*body), ast.Pass()]):
        if isinstance(node, ast.AnnAssign):
            documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            found[node.target.id] = after.value.value if documented else ""
    return found


def flags_of(path: Path) -> set[str]:
    """Flags of a program that has Args, as they are typed."""
    names = [name.replace("_", "-") for name in fields(path)]
    return {f"--{no}{name}" for name in names for no in ("", "no-")} | (
        {"--help"} if names else set()
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_every_flag_has_a_docstring(script):
    assert [name for name, text in fields(script).items() if not text] == []


def shown_commands(text: str) -> list[list[str]]:
    """Words of the commands of a text that run a program of the repository: in blocks, or in backticks."""
    text = re.sub(r"\\\n\s*", " ", text)
    spans = re.findall(r"^(?: {4,})?(\S.*)$", text, flags=re.MULTILINE) + re.findall(
        r"`([^`\n]+)`", text
    )
    parts = [part.strip() for span in spans for part in re.split(r" +# ", span)[0].split("&&")]
    return [
        shlex.split(part)
        for part in parts
        if re.match(r"(python|torchrun|uv run|diff) [^|`]*\w\.py\b", part)
    ]


@pytest.mark.parametrize("page", [*GUIDES, *SCRIPTS], ids=name_of)
def test_commands_exist(page):
    """Programs, their flags, and the studies named by --study."""
    text = page.read_text(encoding="utf-8")
    found = shown_commands(ast.get_docstring(ast.parse(text)) if page.suffix == ".py" else text)
    assert found
    for words in found:
        programs = [word for word in words if word.endswith(".py") and not word.startswith("my_")]
        if not programs or any(
            "*" in program or Path(program).stem == EXAMPLE for program in programs
        ):
            continue
        paths = [
            ROOT / program if "/" in program else ROOT / "benchmarks" / program
            for program in programs
        ]
        assert all(path.is_file() for path in paths), shlex.join(words)
        options = words[words.index(programs[0]) + 1 :]
        known = flags_of(paths[0])
        unknown = [
            word
            for word in options
            if word.startswith("--") and word.partition("=")[0] not in known
        ]
        assert not known or not unknown, f"{shlex.join(words)}: {unknown}"
        if "--study" in options:
            study = options[options.index("--study") + 1]
            assert f'"{study}"' in paths[0].read_text(encoding="utf-8"), f"--study {study}"


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_flags_and_files_in_backticks_exist(page):
    """A flag without its command, as `--resume RUN`, is one of a script or of another program."""
    programs = [path for path in FILES if path.suffix == ".py" and path.parent.name != "tests"]
    known = {"--nproc_per_node"}.union(*map(flags_of, programs))
    spans = re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))
    flags = {flag for span in spans for flag in re.findall(r"(?<!\S)--[a-z][\w-]*", span)}
    assert flags <= known, flags - known
    files = {
        name
        for span in spans
        for name in re.findall(r"\b(?:algorithms|benchmarks|envs|tests)/[\w/.]+\w", span)
    }
    assert not [name for name in files if EXAMPLE not in name and not (ROOT / name).exists()]


def test_no_file_names_a_path_of_a_machine():
    machine = re.compile(
        r"(?<![\w.:/])/(?:home|root|work|tmp|mnt|opt|scratch|Users)/\w|[A-Z]:\\Users"
    )
    found = []
    for path in FILES:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:  # weights and pictures
            continue
        found += [
            f"{name_of(path)}:{number}"
            for number, line in enumerate(lines, 1)
            if machine.search(line)
        ]
    assert not found, f"absolute paths at {found}"
