"""A model that meets one image size after the other: what the first call of each costs.

    python benchmarks/any_size.py
    python benchmarks/any_size.py --model yolov8n --sizes 200 --largest 800

Random heights and widths, half of them multiples of 32. After the first ten sizes it counts the
kernels that are compiled, the growth of memory and of the cache on disk, and how much longer the
first call of a size takes than its second; torch, in the same process, after it.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

KNOWN = 10  # sizes that a process may take to know a model


def resident() -> float:
    """Megabytes of memory that this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def on_disk(directory: str) -> int:
    return sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file())


def sizes(args: argparse.Namespace) -> list[tuple[int, int]]:
    rng, found = random.Random(args.seed), []
    while len(found) < args.sizes:
        step = rng.choice((1, 32)) if args.step is None else args.step
        least = -(-args.least // step)
        size = tuple(step * rng.randint(least, max(least, args.largest // step)) for _ in "hw")
        if size not in found:
            found.append(size)
    return found


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def late(run: Any, images: list[Any], known: Any = lambda: None) -> list[float]:
    """Milliseconds that the first call of each size takes longer than the next ones."""
    found = []
    for number, x in enumerate(images):
        if number == KNOWN:
            known()
        took = []
        for _ in range(3):
            start = perf_counter()
            run(x())
            took.append(perf_counter() - start)
        found.append(1e3 * (took[0] - min(took[1:])))
    return found[KNOWN:]


def state() -> tuple[int, float, int]:
    """Kernels compiled, memory and disk."""
    from tilewise.kernels.cpu.emit import jit

    gc.collect()
    return jit.compiled, resident(), on_disk(os.environ["TILEWISE_CACHE_DIR"])


def measure(args: argparse.Namespace) -> None:
    import torch
    from zoo_models import ZOO

    import tilewise

    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    model, channels = ZOO[args.model].make().eval(), ZOO[args.model].shape[0]
    images = [partial(torch.randn, 1, channels, h, w) for h, w in sizes(args)]
    states: list[tuple[int, float, int]] = []
    with torch.inference_mode():
        # one after the other: memory that torch keeps is not tilewise's
        ours = late(tilewise.optimize(model), images, lambda: states.append(state()))
        (kernels, memory, disk), (kernels_then, memory_then, disk_then) = states[0], state()
        torchs = late(model, images)
    print(f"{args.model}, {args.sizes} sizes from {args.least} to {args.largest}, after the first "
          f"{KNOWN}: {kernels_then - kernels} kernels compiled, {memory_then - memory:+.0f} MB of "
          f"memory, {(disk_then - disk) / 1e6:+.1f} MB on disk")
    for name, found in (("tilewise", ours), ("torch", torchs)):
        print(f"  {name}: the first call of a size takes {statistics.median(found):.1f} ms longer "
              f"than the next in the median, {quantile(found, 0.99):.1f} ms at the 99th percentile")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--sizes", type=int, default=1000)
    parser.add_argument("--least", type=int, default=32)
    parser.add_argument("--largest", type=int, default=1333)
    parser.add_argument("--step", type=int, help="all sizes are multiples of it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        os.environ["TILEWISE_CACHE_DIR"] = directory
        measure(args)


if __name__ == "__main__":
    main()
