"""The files around the code: citation, requirements, links, and no path of somebody's machine."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

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
