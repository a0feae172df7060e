"""Memory of a process that meets one image size after the other, and of torch doing the same.

    python benchmarks/sizes_memory.py
    python benchmarks/sizes_memory.py --model resnet18 --sizes 64 96 128 --batch 8

Each in a process of its own: megabytes resident after every size, above those before the model's
first call; of ours also what the pool and the prepared weights say they hold.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys


def resident() -> float:
    """Megabytes of memory that this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def serve(args, engine: str) -> None:
    import torch

    import tilewise
    from tilewise.kernels.cpu.memory import POOL
    from tilewise.models import MODELS
    from tilewise.runtime.weights import MADE

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = MODELS[args.model]().eval()
    model = tilewise.optimize(model) if engine == "tilewise" else model.to(
        memory_format=torch.channels_last)
    gc.collect()
    before = resident()
    for size in args.sizes:
        x = torch.randn(args.batch, 3, size, size).contiguous(memory_format=torch.channels_last)
        with torch.no_grad():
            for _ in range(3):
                model(x)
        gc.collect()
        print(f"{resident() - before:.0f} {POOL.kept / 1e6:.0f} {MADE.total / 1e6:.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(range(224, 800, 32)))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        return serve(args, args.engine)
    print(f"{args.model} batch {args.batch}: MB more than before the first call")
    with start("tilewise") as ours, start("torch") as theirs:
        for size, mine, other in zip(args.sizes, ours.stdout, theirs.stdout):
            total, free, weights = mine.split()
            print(f"{size:4}: tilewise {total:>5} (pool's free blocks {free}, prepared weights "
                  f"{weights}), torch {other.split()[0]:>5}", flush=True)


def start(engine: str) -> subprocess.Popen:
    """This script in a process of its own, with one engine."""
    return subprocess.Popen([sys.executable, *sys.argv, "--engine", engine], text=True,
                            stdout=subprocess.PIPE)


if __name__ == "__main__":
    main()
