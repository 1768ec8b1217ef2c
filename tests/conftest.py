"""Shared by all tests: the repository root on sys.path, one thread, no network, the order of the files."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch
os.environ["HF_HUB_OFFLINE"] = "1"  # a model that does not exist is not looked for on the net


def pytest_configure(config):
    """xdist deals out files in the order of collection, the one below, and not by their numbers of tests."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items):
    """The files that start scripts come first: they take longest, and what is dealt out last should be short.
    Tests of reference numbers are quick; the quick runs of scripts have the mark in their files."""
    items.sort(key=lambda item: not item.path.stem.endswith(("_script", "_cuda")))
    for item in items:
        if item.name.startswith("test_reference"):
            item.add_marker("quick")


@pytest.fixture(autouse=True)
def forget_files_of_the_test(tmp_path_factory):
    """A script imports the file of --reward or --env, and the next test has another file of that name."""
    yield
    folder = str(tmp_path_factory.getbasetemp())
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(folder):
            del sys.modules[name]
    sys.path[:] = [path for path in sys.path if not path.startswith(folder)]
