"""Linear layers with large weights, by every algorithm that takes them, interleaved.

    python benchmarks/linear.py                         # VGG16's three, with 1, 2, 4 and 8 rows
    python benchmarks/linear.py 1 16 --layers 4096x4096 --isa avx512
    python benchmarks/linear.py 1 --streams             # and more and fewer streams

A turn of a contender is all layers, one after the other, so that weights come from memory as in a
model. The share is that of the bytes a second that torch reads of float32.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
from torch.nn import functional as F

from tilewise.algorithms import ALGORITHMS
from tilewise.conv.linear import ENGINE
from tilewise.core import Problem, Target
from tilewise.planner.measure import interleaved

VGG16 = ("25088x4096", "4096x4096", "4096x1000")


def plans(p, t, streams):
    """By name: the default of every algorithm that is not torch, and schedules beside them."""
    for a in ALGORITHMS:
        if a.baseline or a.name == "reference" or a.reject(p, t):
            continue
        s = a.default(p, t)
        others = [s.with_(streams=n) for n in (2, 4, 8)] if streams and "streams" in s else [s]
        for other in others:
            name = f"{a.name} streams={other.streams}" if len(others) > 1 else a.name
            yield name, ENGINE.planner.plan(p, t, algorithm=a.name, schedule=other)


def contenders(rows, layers, weights, t, streams):
    """Callables by name; each runs all layers."""
    xs = [torch.randn(rows, c) for c, _ in layers]
    runs = {"torch": lambda: [F.linear(x, weight) for x, weight in zip(xs, weights, strict=True)]}
    calls = {}
    for x, weight in zip(xs, weights, strict=True):
        (k, c) = weight.shape
        for name, plan in plans(Problem(rows, c, 1, 1, k, 1, 1), t, streams):
            run = ENGINE.build(plan)
            ready = run.prepare(weight[:, :, None, None])
            calls.setdefault(name, []).append((run, x[:, :, None, None], ready))
    for name, steps in calls.items():
        runs[name] = lambda steps=steps: [run(x, ready, None, None) for run, x, ready in steps]
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--layers", nargs="+", default=VGG16, help="inputs x outputs")
    parser.add_argument("--isa")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--streams", action="store_true", help="try other numbers of streams")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    layers = [tuple(map(int, layer.split("x"))) for layer in args.layers]
    weights = [torch.randn(k, c) for c, k in layers]
    size = sum(weight.numel() * 4 for weight in weights)
    for rows in args.rows:
        runs = contenders(rows, layers, weights, Target.host(args.isa, args.threads), args.streams)
        times = interleaved(list(runs.values()), args.rounds, 0.05, 60)
        theirs = times[0]
        for name, time in zip(runs, times, strict=True):
            print(f"{rows} rows, {name:32} {time.minimum * 1e3:7.2f} ms (median "
                  f"{time.median * 1e3:7.2f}), {theirs.minimum / time.minimum:5.2f}x of torch "
                  f"(median {theirs.median / time.median:5.2f}x), "
                  f"{size / time.minimum / 1e9:5.1f} GB/s of float32", flush=True)


if __name__ == "__main__":
    main()
