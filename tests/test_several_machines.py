"""Several machines: two torchrun agents, as two machines have them, train as one process does."""

import subprocess
import sys

import pytest
from language_runs import SMALL, numbers, train
from processes import ENVIRONMENT, SECONDS, as_flags, free_port
from run_folders import assert_close, assert_same_weights, path_of

from algorithms import grpo

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
VALUES = SMALL | {"max_steps": 2, "save_steps": 2}


def train_by_two_agents(run_dir, **values) -> None:
    """The command of benchmarks/scale.md, once on each of two machines, which are this one."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
    command += [path_of(grpo), *as_flags(values), "--output-dir", run_dir]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    agents = [subprocess.Popen(command, env=ENVIRONMENT, **pipes) for _ in range(2)]
    try:
        printed = [agent.communicate(timeout=SECONDS)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(printed)


def test_two_agents_equal_one_process(tmp_path):
    """With sharded weights; each process writes its shard of the checkpoint, the first one the logs."""
    train_by_two_agents(tmp_path / "two", **VALUES, fsdp=True)
    expected = train(grpo, tmp_path / "one", **VALUES)
    assert_close(numbers(tmp_path / "two"), expected, relative=1e-3)
    assert_same_weights(tmp_path / "two", tmp_path / "one")
    shards = tmp_path.glob("two/checkpoints/*/*.distcp")
    assert sorted(path.name for path in shards) == ["__0_0.distcp", "__1_0.distcp"]
    assert len(list(tmp_path.glob("two/events.*"))) == 1
