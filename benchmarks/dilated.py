"""Dilated convolutions beside torch: 3x3 filters, DeepLabV3's branches, and the model as a whole.

    python benchmarks/dilated.py
    python benchmarks/dilated.py --rounds 25 --no-model

torch runs in both layouts, ours channels-last, as in a model. All take turns on the same threads.
The ratio is the least time of torch's better layout over ours; by rounds it is the median of the
ratios within a round. No speed is told where our result is wrong.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
from collections.abc import Callable
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
from torch.nn import functional as F

import tilewise
from tilewise.core import Problem, Target
from tilewise.planner.measure import interleaved
from tilewise.runtime.engine import random_operands

LAYERS = {  # by what is wanted of them
    "3x3 by 2, 64x64": ("n1c256h64w64k256r3s3p2d2", 2.4),
    "3x3 by 4, 64x64": ("n1c256h64w64k256r3s3p4d4", 2.4),
    "DeepLabV3 by 12, 40x40": ("n1c2048h40w40k256r3s3p12d12", 1.2),
    "DeepLabV3 by 24, 40x40": ("n1c2048h40w40k256r3s3p24d24", 1.2),
    "DeepLabV3 by 36, 40x40": ("n1c2048h40w40k256r3s3p36d36", 1.2),
}
MODEL = "deeplabv3", 1.4
RIGHT = 1e-5  # error of a result; that of a model may be ten times as large


def error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


def compared(name: str, runs: dict[str, Callable[[], Any]], wanted: float, by: str,
             rounds: int) -> None:
    """Time all in turns and print a line."""
    times = dict(zip(runs, interleaved(list(runs.values()), rounds, 0.02, 90), strict=True))
    ours = times["tilewise"]
    best = min((who for who in times if who != "tilewise"), key=lambda who: times[who].minimum)
    paired = statistics.median(theirs / mine for theirs, mine in zip(
        times[best].samples, ours.samples, strict=True))
    told = "  ".join(f"{who} {time.minimum * 1e3:7.2f}" for who, time in times.items())
    print(f"{name:24} {times[best].minimum / ours.minimum:5.2f}x ({paired:5.2f}x by rounds, "
          f"wanted {wanted})  {told} ms  {by}", flush=True)


def layer(name: str, rounds: int) -> None:
    text, wanted = LAYERS[name]
    p = Problem.parse(text + "_f32_forward")
    x, weight, *_ = random_operands(p)
    x_last, last = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    x, weight = x.contiguous(), weight.contiguous()
    options = None, p.stride, p.padding[::2], p.dilation
    runs = {"planes": lambda: F.conv2d(x, weight, *options),
            "channels_last": lambda: F.conv2d(x_last, last, *options),
            "tilewise": lambda: tilewise.conv2d(x_last, last, *options)}
    found = error(runs["tilewise"](), F.conv2d(x.double(), weight.double(), *options))
    assert found < RIGHT, f"{name}: error is {found:.1e}"
    compared(name, runs, wanted, tilewise.explain(p).plan.algorithm, rounds)


def model(rounds: int) -> None:
    from zoo_models import ZOO, settle

    name, wanted = MODEL
    eager = settle(ZOO[name].make()).eval()
    x = torch.randn(1, *ZOO[name].shape)
    last = copy.deepcopy(eager).to(memory_format=torch.channels_last)
    x_last, ours = x.contiguous(memory_format=torch.channels_last), tilewise.optimize(eager, x)
    exact = copy.deepcopy(eager).double()(x.double())
    found = error(ours(x), exact)
    assert found < max(RIGHT, 10 * error(eager(x), exact)), f"{name}: error is {found:.1e}"
    compared(f"{name} {x.shape[2]}x{x.shape[3]}", {
        "eager": lambda: eager(x), "channels_last": lambda: last(x_last),
        "tilewise": lambda: ours(x)}, wanted, "optimize", rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="beginnings of layers' names; all without")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-model", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    print(Target.host(threads=args.threads))
    for name in LAYERS:
        if name.startswith(tuple(args.names) or ""):
            layer(name, args.rounds)
    if not args.no_model:
        model(args.rounds)


if __name__ == "__main__":
    main()
