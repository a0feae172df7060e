"""Runs before any test module, and so before tilewise is imported."""

import os
import tempfile
from pathlib import Path

import pytest

# Tests start cold and leave the user's caches alone; the directory goes when the process ends. One
# that is given is shared by processes, which then have a directory of their own in it.
if "TILEWISE_CACHE_DIR" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="tilewise-tests-", ignore_cleanup_errors=True)
    os.environ["TILEWISE_CACHE_DIR"] = _cache.name
elif Path(os.environ["TILEWISE_CACHE_DIR"]).name != "tests":
    os.environ["TILEWISE_CACHE_DIR"] = str(Path(os.environ["TILEWISE_CACHE_DIR"], "tests"))

# What one test measures of the machine must not change another's plans: with a directory in its
# place, the file of limits cannot be written.
(Path(os.environ["TILEWISE_CACHE_DIR"]) / "limits.json").mkdir(parents=True, exist_ok=True)

# `.ci/run` names these: GPU kernels are interpreted and compiled in processes of their own, and
# kernels for Arm need an emulator and a compiler.
collect_ignore = ["gpu", "arm"]

# These take longest: first and in this order, so that no core waits for them at the end.
LONG = ("test_corpus.py", "test_gradients.py", "test_kernels.py", "test_optimize.py",
        "test_autograd.py", "test_training_ranks.py", "test_conv2d.py", "test_training_blocks.py",
        "test_runtime.py", "test_filter2d.py", "test_amx.py", "test_image_mutations.py",
        "test_bfloat16.py", "test_training_norm.py", "test_norms.py", "test_amx_mutations.py",
        "test_object_cache.py", "test_activations.py", "test_training_killed.py",
        "test_mutations.py", "test_amx_weight.py", "test_conv2d_operator.py", "test_pointwise.py",
        "test_memory.py", "test_conv1d_conv3d.py", "test_adding_an_activation.py")


@pytest.fixture
def by_our_kernels(monkeypatch):
    """Torch never looks faster: what it costs beside ours differs from machine to machine."""
    from tilewise.algorithms.vendor import Vendor
    from tilewise.conv.running import ENGINE

    monkeypatch.setattr(Vendor, "cost", lambda *_: 1.0)
    ENGINE.forget()
    yield
    ENGINE.forget()


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: (
        LONG.index(item.path.name) if item.path.name in LONG else len(LONG)))
