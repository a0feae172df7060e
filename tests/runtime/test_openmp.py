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
import time
{before}
import torch
{after}
import tilewise
from tilewise.kernels.cpu.emit.threads import uses_openmp

torch.set_num_threads(2)
x, weight = torch.randn(1, 8, 28, 28), torch.randn(8, 8, 3, 3)
torch.randn(1 << 20).exp()

def threads():
    return len(os.listdir("/proc/self/task"))

before = threads()
tilewise.conv2d(x, weight, algorithm="cpu_direct")
{fault}
end = time.monotonic() + 5
while threads() > before and time.monotonic() < end:  # who compiled is listed until it is gone
    time.sleep(.01)
print(uses_openmp(), threads() - before)
"""
# free(NULL), by two threads of a libgomp that is not torch's
SECOND_TEAM = """
import ctypes, re
maps = open("/proc/self/maps").read()
other = next(path for path in re.findall(r"/.*libgomp.*", maps) if "/torch/" not in path)
ctypes.CDLL(other).GOMP_parallel(ctypes.CDLL(None).free, None, 2, 0)
"""
SKLEARN = "import sklearn.utils._openmp_helpers"  # brings a libgomp that comes first by name


@pytest.mark.parametrize("before, after", [(SKLEARN, ""), ("", SKLEARN)],
                         ids=["before torch", "after torch"])
def test_kernels_start_no_threads_besides_those_of_torch(before: str, after: str) -> None:
    assert _told(before, after) == ["True", "0"]


def test_threads_of_another_library_are_noticed() -> None:
    """sklearn's own libgomp starts a second team, which stays."""
    assert _told(SKLEARN, "", fault=SECOND_TEAM) == ["True", "1"]


def _told(before: str, after: str, fault: str = "") -> list[str]:
    code = NEW_THREADS.format(before=before, after=after, fault=fault)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()
