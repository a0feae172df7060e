"""Does PyTorch's own gradient of a convolution write beyond its memory? No tilewise is involved.

    python scripts/torch_heap.py                     # 100 random shapes of every class
    python scripts/torch_heap.py "strided 1x1 of more" --count 1000 --threads 4
    ONEDNN_MAX_CPU_ISA=AVX2 python scripts/torch_heap.py

Torch 2.13 writes behind its memory in the gradient of the weight of 1x1 filters with stride 2, over
2 to 15 input channels, of channels-last images with even sides (torch_heap_least.py is the smallest
such program). Every class of shapes runs in a process whose blocks of memory end at pages that
cannot be touched. Needs Linux and a C compiler.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("guard_allocator.c")
# input channels, sides of the filter, strides, padding, groups
FEW, MANY, ALL = (2, 15), (16, 80), (1, 80)
CLASSES: dict[str, tuple[tuple[int, int], Any, Any, Any, Any]] = {
    "strided 1x1 of 2 to 15 channels": (FEW, (1,), (2, 3, 4), (0,), (1,)),
    "strided 1x1 of more": (MANY, (1,), (2, 3, 4), (0,), (1,)),
    "strided 1x1, padded": (ALL, (1,), (2, 3), (1, 2), (1,)),
    "strided 1x1, groups": (ALL, (1,), (2, 3), (0,), (2, 4)),
    "dense 1x1": (ALL, (1,), (1,), (0,), (1,)),
    "strided 3x3": (ALL, (3,), (2, 3), (0, 1), (1,)),
    "strided 2x2": (ALL, (2,), (2,), (0,), (1,)),
}
BROKEN = "a block that is written behind its end"  # the guard itself must notice it


def shapes(name: str, count: int, seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(f"{name} {seed}")
    channels, sides, strides, paddings, groups = CLASSES[name]
    return [(rng.randint(1, 5), rng.randint(*channels), rng.randint(3, 30), rng.randint(3, 30),
             rng.randint(1, 70), rng.choice(sides), rng.choice(strides), rng.choice(paddings),
             rng.choice(groups), rng.randrange(2)) for _ in range(count)]


def child(name: str, count: int, threads: int, seed: int) -> None:
    """One class, between guards; each shape is said before it runs."""
    import torch

    guard = ctypes.CDLL(None).guard
    if name == BROKEN:
        guard(1)
        block = torch.ones(33)
        ctypes.memset(block.data_ptr(), 0, 4 * 33 + 1)
        return
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    for shape in shapes(name, count, seed):
        n, c, h, w, k, r, u, pad, groups, last = shape
        print(f"n{n}c{c * groups}h{h}w{w}k{k * groups}r{r}s{r}u{u}p{pad}g{groups}"
              f"_{'nhwc' if last else 'nchw'}", flush=True)
        layout = torch.channels_last if last else torch.contiguous_format
        out = [(side + 2 * pad - r) // u + 1 for side in (h, w)]
        guard(1)
        x, weight, grad = (torch.randn(size).contiguous(memory_format=layout) for size in (
            (n, c * groups, h, w), (k * groups, c, r, r), (n, k * groups, *out)))
        for wanted in ((False, True, False), (True, False, False)):
            torch.ops.aten.convolution_backward(grad, x, weight, None, (u, u), (pad, pad), (1, 1),
                                                False, (0, 0), groups, wanted)
        del x, weight, grad
        guard(0)


def run(name: str, args: argparse.Namespace, library: Path) -> tuple[str, bool]:
    """What became of a class, and whether it came to its end."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", name, "--count", str(args.count), "--threads",
         str(args.threads), "--seed", str(args.seed)], capture_output=True, text=True, timeout=600,
        env={**os.environ, "LD_PRELOAD": str(library)})
    said = done.stdout.splitlines()
    if done.returncode == 0:
        return f"{len(said)} shapes, nothing found", True
    ended = (signal.Signals(-done.returncode).name if done.returncode < 0
             else f"exit code {done.returncode}")
    told = [line for line in done.stderr.splitlines() if line.startswith("guard:")]
    return f"{ended} at {said[-1] if said else 'the start'} {' '.join(told)}".rstrip(), False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", default=[], help="; ".join(CLASSES))
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.count, args.threads, args.seed)
        return 0
    with tempfile.TemporaryDirectory() as place:
        library = Path(place) / "guard.so"
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE)],
                       check=True)
        told, ended = run(BROKEN, args, library)
        print(f"{BROKEN}: {told}", flush=True)
        if ended:
            print("the guard does not work here: nothing can be said")
            return 2
        found = False
        for name in args.classes or CLASSES:
            told, ended = run(name, args, library)
            print(f"{name}: {told}", flush=True)
            found |= not ended
    return int(found)


if __name__ == "__main__":
    sys.exit(main())
