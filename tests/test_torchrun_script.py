"""torchrun as the essays print it: two processes run the language scripts of the older design, and find what one process finds.

One torchrun runs all, because starting takes longest. More about two processes is in each script's own test file.
"""

import importlib
import json

import pytest
from processes import ROOT, as_flags, torchrun
from run_folders import assert_close, table

SMALL = {"num_prompts_per_step": 4, "num_generations": 4, "max_completion_length": 32, "max_steps": 1, "eval_steps": 0}
PAIR = SMALL | {"num_prompts_per_step": 2}
VALUES = {
    "gdpo": SMALL,
    "dr_mas": PAIR | {"env": "countdown"},
    "igpo": PAIR,
    "pi_play": PAIR | {"num_documents_per_step": 4, "num_answers": 2, "examiner_steps": 1, "max_steps": 2},
    "spiral_rae": PAIR | {"games": ("kuhn",)},
}
DRIVER = """\
import json, runpy, sys
import torch.distributed as dist
dist.init_process_group("gloo")
dist.destroy_process_group = lambda: None  # one group for all runs
for sys.argv in json.loads(sys.argv[1]):
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Folder of the runs by name, and the process."""
    folder = tmp_path_factory.mktemp("torchrun")
    commands = [
        [str(ROOT / "algorithms" / f"{name}.py"), *as_flags(values), "--output-dir", str(folder / name)]
        for name, values in VALUES.items()
    ]
    (folder / "driver.py").write_text(DRIVER)
    return folder, torchrun(folder / "driver.py", json.dumps(commands))


def test_torchrun_succeeds_and_one_process_speaks(two_processes):
    folder, process = two_processes
    assert process.returncode == 0 and "Traceback" not in process.stderr, process.stderr
    steps = sum(values["max_steps"] for values in VALUES.values())
    assert sum(line.startswith("step ") for line in process.stdout.splitlines()) == steps, process.stdout
    for name in VALUES:
        assert (folder / name / "final").exists(), name


@pytest.mark.parametrize("name", VALUES)
def test_torchrun_equals_one_process(two_processes, name, tmp_path):
    script = importlib.import_module(f"algorithms.{name}")
    script.train(script.Args(**VALUES[name], device="cpu", output_dir=str(tmp_path)))
    found, expected = table(two_processes[0] / name), table(tmp_path)
    assert_close(found, expected)
    for (step, tag), value in expected.items():
        if tag.endswith(("train/reward", "num_tokens", "completions/max_length")):
            assert found[step, tag] == pytest.approx(value, abs=1e-12), "the same problems and the same texts"
