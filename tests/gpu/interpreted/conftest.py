"""Kernels run in Triton's interpreter, on the CPU; TRITON_INTERPRET must be set from outside."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("run these as: TRITON_INTERPRET=1 pytest tests/gpu/interpreted")

import interpreter

interpreter.install()


def pytest_collection_modifyitems(items):
    """Those of Winograd take longest: first, so that no core waits for them at the end."""
    items.sort(key=lambda item: item.path.name != "test_winograd.py")
