"""Pools and resampling of channels-last images: ours and torch's, in turns.

    python benchmarks/pools.py
    python benchmarks/pools.py --threads 1
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewise.planner.measure import interleaved
from tilewise.runtime import pools
from tilewise.runtime.resampling import upsample

Function = Callable[[Tensor], Tensor | None]


class Case(NamedTuple):
    name: str
    shape: tuple[int, int, int, int]
    ours: Function
    theirs: Function


CASES = (
    Case("max 3x3 stride 2", (1, 64, 112, 112), lambda x: pools.max_pool2d(x, 3, 2, 1),
         lambda x: F.max_pool2d(x, 3, 2, 1)),
    Case("max 5x5 stride 1", (1, 128, 20, 20), lambda x: pools.max_pool2d(x, 5, 1, 2),
         lambda x: F.max_pool2d(x, 5, 1, 2)),
    Case("max 2x2", (1, 64, 56, 56), lambda x: pools.max_pool2d(x, 2),
         lambda x: F.max_pool2d(x, 2)),
    Case("global average", (1, 1280, 7, 7), lambda x: pools.adaptive_avg_pool2d(x, 1),
         lambda x: F.adaptive_avg_pool2d(x, 1)),
    Case("global average", (1, 96, 56, 56), lambda x: pools.adaptive_avg_pool2d(x, 1),
         lambda x: F.adaptive_avg_pool2d(x, 1)),
    Case("global average", (1, 16, 112, 112), lambda x: pools.adaptive_avg_pool2d(x, 1),
         lambda x: F.adaptive_avg_pool2d(x, 1)),
    Case("mean", (1, 1280, 7, 7), lambda x: pools.global_average(x, False),
         lambda x: x.mean((2, 3))),
    Case("mean", (1, 96, 56, 56), lambda x: pools.global_average(x, False),
         lambda x: x.mean((2, 3))),
    Case("mean", (8, 2048, 7, 7), lambda x: pools.global_average(x, False),
         lambda x: x.mean((2, 3))),
    Case("average 3x3", (1, 64, 56, 56), lambda x: pools.avg_pool2d(x, 3, 1, 1),
         lambda x: F.avg_pool2d(x, 3, 1, 1)),
    Case("average 3x3", (1, 768, 17, 17), lambda x: pools.avg_pool2d(x, 3, 1, 1),
         lambda x: F.avg_pool2d(x, 3, 1, 1)),
    Case("average 2x2", (1, 128, 56, 56), lambda x: pools.avg_pool2d(x, 2),
         lambda x: F.avg_pool2d(x, 2)),
    Case("adaptive average 6x6", (1, 256, 13, 13), lambda x: pools.adaptive_avg_pool2d(x, 6),
         lambda x: F.adaptive_avg_pool2d(x, 6)),
    Case("nearest x2", (1, 256, 20, 20), lambda x: upsample(x, scale_factor=2.0),
         lambda x: F.interpolate(x, scale_factor=2.0)),
    Case("nearest x2", (1, 64, 56, 56), lambda x: upsample(x, scale_factor=2.0),
         lambda x: F.interpolate(x, scale_factor=2.0)),
    Case("bilinear x2", (1, 64, 56, 56), lambda x: upsample(x, None, 2.0, "bilinear", False),
         lambda x: F.interpolate(x, None, 2.0, "bilinear", False)),
    Case("bilinear x8", (1, 21, 40, 40), lambda x: upsample(x, None, 8.0, "bilinear", False),
         lambda x: F.interpolate(x, None, 8.0, "bilinear", False)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    torch.set_num_threads(parser.parse_args().threads)
    with torch.no_grad():
        for case in CASES:
            compare(case)


def compare(case: Case) -> None:
    x = torch.randn(case.shape).contiguous(memory_format=torch.channels_last)
    planes = x.contiguous()
    torch.testing.assert_close(case.ours(x), case.theirs(x), rtol=1e-5, atol=1e-5)
    ours, last, first = (timing.minimum * 1e6 for timing in interleaved(
        [lambda: case.ours(x), lambda: case.theirs(x), lambda: case.theirs(planes)], 25, 0.003))
    print(f"{case.name} of {case.shape}: ours {ours:.1f} us, torch channels-last {last:.1f} "
          f"({last / ours:.2f}x), planes {first:.1f} ({first / ours:.2f}x)", flush=True)


if __name__ == "__main__":
    main()
