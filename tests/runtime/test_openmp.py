"""Kernels run on the threads of torch's OpenMP library, whichever others are loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")

# Two libraries have threads of their own: a kernel on another one than torch's starts new ones.
NEW_THREADS = """
import os
{before}
import torch
{after}
import tilewise
from tilewise.kernels.cpu.emit.threads import uses_openmp

torch.set_num_threads(2)
x, weight = torch.randn(1, 8, 28, 28), torch.randn(8, 8, 3, 3)
torch.randn(1 << 20).exp()
before = len(os.listdir("/proc/self/task"))
tilewise.conv2d(x, weight, algorithm="cpu_direct")
print(uses_openmp(), len(os.listdir("/proc/self/task")) - before)
"""
SKLEARN = "import sklearn.utils._openmp_helpers"  # brings a libgomp that comes first by name


@pytest.mark.parametrize("before, after", [(SKLEARN, ""), ("", SKLEARN)],
                         ids=["before torch", "after torch"])
def test_kernels_start_no_threads_besides_those_of_torch(before: str, after: str) -> None:
    code = NEW_THREADS.format(before=before, after=after)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          timeout=120, check=False)
    assert done.stdout.split() == ["True", "0"], done.stderr[-2000:]
