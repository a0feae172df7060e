"""Kernels compiled for GPUs that are not there; TRITON_INTERPRET must not be set."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    raise pytest.UsageError("run these in a process of their own: pytest tests/gpu/compiled")
