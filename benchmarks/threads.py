"""A server in Python threads: one model, several image sizes, beside torch in the same setting.

    python benchmarks/threads.py
    python benchmarks/threads.py --model resnet50 --sizes 96 128 160 224 --threads 4 --inner 1

Every thread sends single images through the same model. "one size": all threads have the first
size. "a size each": every thread has a size of its own. "all sizes": every thread goes through all
sizes in turns, each beginning with another. Torch runs in channels-last. A call of either uses
--inner threads of OpenMP, torch's default if it is not said. Processor time, of all threads and
with their waiting in OpenMP, tells more than the rate where other processes want the processor.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import threading
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter, process_time

import torch

import tilewise
from tilewise.models import MODELS

LAST = torch.channels_last


def orders(sizes: list[int], threads: int) -> dict[str, list[list[int]]]:
    """Of each setting: the sizes that each thread goes through."""
    return {"one size": [[sizes[0]] * len(sizes)] * threads,
            "a size each": [[sizes[i % len(sizes)]] * len(sizes) for i in range(threads)],
            "all sizes": [[sizes[(i + j) % len(sizes)] for j in range(len(sizes))]
                          for i in range(threads)]}


def rate(pool: ThreadPoolExecutor, model, images, order, repeats: int) -> tuple[float, float]:
    """Images a second, of all threads together, and milliseconds of processor time an image."""
    barrier = threading.Barrier(len(order) + 1)

    def serve(sizes: list[int]) -> None:
        with torch.inference_mode():
            barrier.wait()
            for _ in range(repeats):
                for size in sizes:
                    model(images[size])

    waiting = [pool.submit(serve, sizes) for sizes in order]
    barrier.wait()
    start, spent = perf_counter(), process_time()
    for done in waiting:
        done.result()
    count = repeats * sum(map(len, order))
    return count / (perf_counter() - start), (process_time() - spent) / count * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18", choices=MODELS)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 80, 96, 112])
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--inner", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=8, help="rounds of the sizes in a sample")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.inner)
    torch.manual_seed(0)
    model = MODELS[args.model]().eval()
    ours, theirs = tilewise.optimize(model), copy.deepcopy(model).to(memory_format=LAST)
    images = {size: torch.randn(1, 3, size, size).contiguous(memory_format=LAST)
              for size in args.sizes}
    print(f"{args.model}, {args.threads} Python threads with {args.inner} of torch's each, "
          f"sizes {args.sizes}; images a second, median of {args.rounds}")
    with ThreadPoolExecutor(args.threads) as pool:
        for name, order in orders(args.sizes, args.threads).items():
            seen = ([], [])
            for turn in range(args.rounds + 1):
                for rates, contender in zip(seen, (ours, theirs)):
                    found = rate(pool, contender, images, order, args.repeats if turn else 1)
                    rates.extend([found] if turn else [])  # the first warms up
            (fast, cheap), (slow, dear) = ([*map(statistics.median, zip(*found))] for found in seen)
            print(f"{name:12} tilewise {fast:6.1f} ({cheap:.1f} ms of processors)  "
                  f"torch {slow:6.1f} ({dear:.1f} ms)  ratio {fast / slow:.2f}")


if __name__ == "__main__":
    main()
