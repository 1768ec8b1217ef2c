"""What the programs of this folder share: how the row of a CSV was made, and timed processes."""

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def about(*packages: str) -> dict[str, str]:
    """Versions, device, commit and command."""
    found = {package: version(package) for package in packages}
    found["python"] = platform.python_version()
    found["device"] = f"CPU ({platform.machine()}), one thread"
    found["commit"] = subprocess.getoutput(f"git -C {ROOT} describe --always --dirty --exclude '*'")
    program = Path(sys.argv[0]).resolve()
    program = program.relative_to(ROOT) if program.is_relative_to(ROOT) else program.name
    return found | {"command": shlex.join(["python", str(program), *sys.argv[1:]])}


def edited(path: Path, edits: dict[str, str]) -> tuple[str, str]:
    """A program of others with old texts replaced by new ones, and which version it was."""
    text = path.read_text()
    for old, new in edits.items():
        if text.count(old) != 1:
            sys.exit(f"{path}: the text to be edited is not there once: {old.splitlines()[0]}")
        text = text.replace(old, new)
    return text, f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}, edited"


def timed_lines(words: list[str], folder: str, prefix: str) -> list[tuple[str, float, float]]:
    """Run `python WORDS` in a folder with one thread. For each printed line that begins with the
    prefix: the line, the time and the CPU time of the process."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    marks = []
    others = []
    command = [sys.executable, *words]
    with subprocess.Popen(command, cwd=folder, env=environment, **pipes) as process:
        for line in process.stdout:
            if line.startswith(prefix):
                fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
                cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                marks.append((line, time.perf_counter(), cpu))
            else:
                others.append(line)
    if process.returncode or len(marks) < 2:
        sys.exit(f"{shlex.join(words)} failed:\n{''.join(others[-20:])}")
    return marks
