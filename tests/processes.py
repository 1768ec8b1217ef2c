"""Scripts in processes of their own: started as people start them, or forked, which saves seconds of imports.

`run` starts a script as its README says. `fork` gives the same result, but its process is forked from a server that has
imported the libraries, and nothing of this repository: importing them takes longer than most runs of a test. The server
is this file, started once by whoever first asks for it. Two forked processes find each other as those of torchrun do,
by variables of their environment.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
ENVIRONMENT |= {"CUDA_VISIBLE_DEVICES": ""}  # the numbers that tests compare are those of a CPU
SECONDS = 300  # after which a process counts as hung
LIBRARIES = ["torch", "torch.distributed.checkpoint", "torch.distributed.checkpoint.state_dict"]
LIBRARIES += ["torch.distributed.fsdp", "torch.utils.tensorboard", "tyro", "imageio", "gymnasium.vector", "mujoco"]
LIBRARIES += ["transformers", "transformers.models.auto.modeling_auto", "transformers.models.qwen3.modeling_qwen3"]
DRIVER = """\
import json, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests"]
import torch.distributed as dist
from algorithms import {script} as script
dist.init_process_group("gloo")
dist.init_process_group = lambda *_, **options: None  # one group for all runs
dist.destroy_process_group = lambda: None
for values in json.loads(sys.argv[2]):
    script.train(script.Args(**values))
"""
KILLER = """\
import os, sys
root, script, name, number = sys.argv[1:5]
sys.argv[1:5] = []
sys.path.insert(0, root)
import importlib
from torch.distributed.checkpoint import FileSystemWriter
script = importlib.import_module("algorithms." + script)
owner = script if hasattr(script, name) else FileSystemWriter
original, calls = getattr(owner, name), []
def deadly(*words, **named):
    calls.append(name)
    if len(calls) == int(number):
        os.kill(os.getpid(), 9)
    return original(*words, **named)
setattr(owner, name, deadly)
script.train(script.parse_args())
"""


def as_flags(values: dict) -> list[str]:
    """Fields of Args as words of a command line."""
    words = []
    for name, value in values.items():
        words.append(f"--{name.replace('_', '-')}")
        words += [] if value is True else map(str, value) if isinstance(value, tuple) else [str(value)]
    return words


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@functools.cache
def server() -> subprocess.Popen:
    """It ends with this process, which closes its stdin."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, __file__], env=ENVIRONMENT, bufsize=0, **pipes)


def fork(script: Path, *words, processes: int = 1) -> subprocess.CompletedProcess:
    """What `run` returns, sooner.

    Several processes are those of one torchrun; the status is that of the first which failed.
    """
    world = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "stdout"), Path(folder, "stderr")  # they cannot fill up, as a pipe can that nobody reads
        request = {"argv": [str(script), *map(str, words)], "cwd": os.getcwd(), "files": [*map(str, files)]}
        request |= {"environments": ranks if processes > 1 else [{}]}
        server().stdin.write(json.dumps(request).encode() + b"\n")
        pids = json.loads(server().stdout.readline())
        in_time = select.select([server().stdout], [], [], SECONDS)[0]
        for pid in [] if in_time else pids:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(pid, signal.SIGKILL)
        status = next(filter(None, json.loads(server().stdout.readline())), 0)
        output, errors = (path.read_text() for path in files)
    assert in_time, f"killed, as it took too long: {output}{errors}"
    return subprocess.CompletedProcess(request["argv"], status, output, errors)


def train_by_two(folder: Path, script: str, runs: list[dict], driver: str = DRIVER) -> None:
    """These runs of train() by two processes, one after the other; leaves their stderr."""
    (folder / "driver.py").write_text(driver.format(script=script))
    (folder / "stderr").write_text(fork(folder / "driver.py", ROOT, json.dumps(runs), processes=2).stderr)


def kill_at(folder: Path, script: str, name: str, number: int, *words) -> None:
    """This command, killed by SIGKILL when it calls a function of the script, or of torch's writer, for that time."""
    (folder / "killer.py").write_text(KILLER)
    process = fork(folder / "killer.py", ROOT, script, name, number, *words)
    assert process.returncode == -signal.SIGKILL, process.stdout + process.stderr


def serve() -> dict:
    """Forks the processes of each request, in which it returns; writes down their numbers, and how they ended."""
    replies = os.dup(1)
    os.dup2(2, 1)
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    while line := sys.stdin.readline():
        request, pids = json.loads(line), []
        for environment in request["environments"]:
            if (pid := os.fork()) == 0:
                os.close(replies)
                return request | {"environment": environment}
            pids.append(pid)
        os.write(replies, json.dumps(pids).encode() + b"\n")
        ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        os.write(replies, json.dumps(ends).encode() + b"\n")
    sys.exit()


if __name__ == "__main__":  # the rest is what Python does for `python script words`, and so is what happens at the end
    request = serve()
    os.chdir(request["cwd"])
    os.environ |= request["environment"]
    for number, name in enumerate([os.devnull, *request["files"]]):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
    sys.argv, sys.path[0] = request["argv"], os.path.dirname(request["argv"][0])
    for library in (sys.modules["torch"], sys.modules["numpy"].random):
        library.seed()  # by chance, as after an import; Python does so for its own generator
    runpy.run_path(sys.argv[0], run_name="__main__")
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # Python would take 0.3 s to take its modules down
