"""What a call costs besides computing: dispatch, the first convolution, denormals.

    python benchmarks/overhead.py
"""

from __future__ import annotations

import subprocess
import sys

import torch
from torch.nn import functional as F

import tilewise
from tilewise.planner.measure import interleaved

FIRST = """
import time
import torch, tilewise
from tilewise.kernels.cpu.emit import jit
torch.set_num_threads(2)
x = torch.randn(1, 64, 56, 56).contiguous(memory_format=torch.channels_last)
weight = torch.randn(64, 64, 3, 3)
with torch.no_grad():
    start = time.perf_counter()
    tilewise.conv2d(x, weight, padding=1)
    print((time.perf_counter() - start) * 1e3, jit.compiled)
"""


def dispatch() -> None:
    x = torch.randn(1, 8, 8, 8).contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(8, 8, 3, 3), torch.randn(8)
    ours, torch_ = interleaved([lambda: tilewise.conv2d(x, weight, bias, padding=1),
                                lambda: F.conv2d(x, weight, bias, padding=1)], rounds=40)
    print(f"1x8x8x8: tilewise {ours.minimum * 1e6:.1f} us, torch {torch_.minimum * 1e6:.1f} us, "
          f"{(ours.minimum - torch_.minimum) * 1e6:.1f} us more")


def first_convolution() -> None:
    runs = [subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True,
                           check=True).stdout.split() for _ in range(6)]
    warm = [float(time) for time, compiled in runs[1:]]
    print(f"first convolution of a second process: {min(warm):.0f} ms at best of {len(warm)}, "
          f"{max(warm):.0f} ms at worst, {runs[-1][1]} kernels compiled "
          f"(the process before: {float(runs[0][0]):.0f} ms, {runs[0][1]} compiled)")


def denormals() -> None:
    weight = torch.randn(64, 64, 3, 3)
    normal = torch.randn(1, 64, 56, 56).contiguous(memory_format=torch.channels_last)
    tiny = normal * 1e-39
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for algorithm in ("cpu_direct", "cpu_winograd"):
            def run(x, algorithm=algorithm):
                return tilewise.conv2d(x, weight, padding=1, algorithm=algorithm)

            slow, fast = interleaved([lambda: run(tiny), lambda: run(normal)], rounds=30)
            print(f"denormal input, {algorithm}, {threads} threads: "
                  f"{slow.minimum / fast.minimum:.2f} of the time of normal input")


def main() -> None:
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    dispatch()
    first_convolution()
    denormals()


if __name__ == "__main__":
    main()
