"""Winograd on GPUs: F(2x2, 3x3) and F(4x4, 3x3), in three kernels."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from ..core.gpu import GPUS
from ..core.problem import DTYPES, Problem
from ..core.schedule import Schedule, Space
from ..core.target import Target
from .cpu_winograd import dense, growth, stride_one
from .gpu_common import MOST_ELEMENTS, GpuAlgorithm, roofline
from .gpu_implicit_gemm import GpuImplicitGemm
from .gpu_table import products_between, transform

TAPS = 3
EFFICIENCY = 0.5  # of the published limit; assumed
MOST_SCRATCH = 256 << 20  # bytes; more images than fit take turns
# rms of roundings of transformed values to a half type
ROUNDED = {"f32": 0.0, "f16": 2.0 ** -11 / math.sqrt(6), "bf16": 2.0 ** -8 / math.sqrt(6)}


class GpuWinograd(GpuAlgorithm):
    """Transforms, multiplies by position and transforms back; Triton, channels-last."""

    name = "gpu_winograd"
    version = 1
    directions = frozenset({"forward"})  # gradients of the input are mirrored
    exact_on_integers = False

    def reject(self, p: Problem, t: Target) -> list[str]:
        found = self.reasons(p, t) + stride_one(p) + dense(p)
        if p.direction != "forward":
            found.append(f"direction is {p.direction} with stride {p.stride} and padding "
                         f"{p.padding}, needs forward, or backward_data that can be mirrored")
        if (p.r, p.s) != (TAPS, TAPS):
            found.append(f"filter is {p.r}x{p.s}, needs {TAPS}x{TAPS}")
        elif not found and _elements(p.with_(n=1), min(sizes(p))) >= MOST_ELEMENTS:
            found.append("one transformed image has 2**31 elements or more, needs fewer")
        elif not found and (max(sizes(p)) + TAPS - 1) ** 2 * p.c * p.k >= MOST_ELEMENTS:
            found.append("the transformed weight has 2**31 elements or more, needs fewer")
        return found

    def error(self, p: Problem, t: Target, s: Any) -> float:
        grown = growth(s.tile, TAPS) ** 2
        # as for split products: in short sums all roundings can be as large as they get
        rounded = math.sqrt(2) * ROUNDED[p.dtype] * (2.0 + 8.0 / math.sqrt(p.c))
        stored = self.sum_error(p.c, p.dtype) - self.sum_error(p.c, "f32")
        return grown * (self.sum_error(p.c, "f32") + rounded) + stored

    def space(self, p: Problem, t: Target) -> Space:
        shipped = _rows(self.kind(p), t.isa)
        tunables = {name: tuple(sorted({row[name] for row in shipped})) for name in shipped[0]}
        return Space(lambda s: _row(s) in shipped,
                     **{**tunables, "swizzle": (1, 8), "tile": sizes(p)})

    def default(self, p: Problem, t: Target) -> Schedule:
        return _default(self.precision, p, t)

    def cost(self, p: Problem, t: Target, s: Any) -> float:
        # not below a direct sum's: vendors have Winograd, too, and nothing was measured
        direct = GpuImplicitGemm(self.precision)
        return max(self._seconds(p, t, s), direct.cost(p, t, direct.default(p, t)))

    def _seconds(self, p: Problem, t: Target, s: Any) -> float:
        tiles = p.n * math.ceil(p.conv_h / s.tile) * math.ceil(p.conv_w / s.tile)
        positions = (s.tile + TAPS - 1) ** 2
        columns = math.ceil(p.k / s.bn)
        flops = 2.0 * tiles * positions * p.c * columns * s.bn
        shape = min(1.0, math.sqrt(s.bm * s.bn) / 128) * min(1.0, p.c / s.bk)
        blocks = positions * math.ceil(max(1, tiles) / s.bm) * columns
        moved = p.bytes + 2 * positions * tiles * (p.c * DTYPES[p.dtype] + 4 * p.k)
        return roofline(t, p, s, flops / GPUS[t.isa].flops(p.dtype, self.precision),
                        EFFICIENCY * shape, blocks, moved, 3 * math.ceil(p.n / images(p, s)))

    def workspace(self, p: Problem, t: Target, s: Schedule) -> int:
        return min(p.n, images(p, s)) * _scratch(p, s)

    def prepare(self, p: Problem, t: Target, s: Schedule, weight: Any) -> Any:
        from ..kernels.gpu.winograd_conv import prepare_weight

        return prepare_weight(p, s, weight)

    def build(self, p: Problem, t: Target, s: Schedule) -> Any:
        from ..kernels.gpu.winograd_conv import runner

        return runner(p, s, self.precision, images(p, s))


def sizes(p: Problem) -> tuple[int, ...]:
    """Outputs of a tile along an axis; values rounded to a half type admit only the smaller."""
    return (2, 4) if p.dtype == "f32" else (2,)


def images(p: Problem, s: Any) -> int:
    """Images that are transformed at a time."""
    return max(1, MOST_SCRATCH // _scratch(p, s))


def _scratch(p: Problem, s: Any) -> int:
    """Bytes of one image and of its products, transformed."""
    values = _elements(p.with_(n=1, c=1, k=1), s.tile)
    return values * (p.c * DTYPES[p.dtype] + 4 * p.k)


def _elements(p: Problem, tile: int) -> int:
    """Of the larger of the transformed images."""
    tiles = p.n * math.ceil(p.conv_h / tile) * math.ceil(p.conv_w / tile)
    return tiles * (tile + TAPS - 1) ** 2 * max(p.c, p.k)


def _rows(kind: str, arch: str) -> list[Schedule]:
    """The table's products with its transforms."""
    return [s.with_(**transform(kind, arch)) for s in products_between(kind, arch)]


def _row(s: Schedule) -> Schedule:
    """A schedule as the table has it."""
    return Schedule(**{name: value for name, value in s.items() if name != "tile"}).with_(swizzle=8)


@lru_cache(maxsize=4096)
def _default(precision: str, p: Problem, t: Target) -> Schedule:
    """The cheapest row of the table with the cheapest tile."""
    algorithm = GpuWinograd(precision)
    rows = [s.with_(tile=tile) for s in _rows(algorithm.kind(p), t.isa) for tile in sizes(p)]
    return min(rows, key=lambda s: algorithm._seconds(p, t, s))
