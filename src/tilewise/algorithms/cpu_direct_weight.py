"""Gradients of weights by unrolling: any filter, stride, padding, dilation and grouping."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ..core.algorithm import EPS32, storing_error
from ..core.cost import seconds
from ..core.problem import Problem
from ..core.schedule import Schedule, Space
from ..core.target import Target
from .common import CpuAlgorithm, cpu_f32_weight, fits
from .cpu_winograd import FAR, NEAR
from .cpu_winograd_weight import PARTS, TILES, block_cycles, even, padded, tile_fits

MOST_SCRATCH = 256 << 20  # bytes for the sums of all parts


class CpuDirectWeight(CpuAlgorithm):
    """Chunks of pixels, unrolled, against their gradients, summed in blocks."""

    name = "cpu_direct_weight"
    version = 2
    directions = frozenset({"backward_weight"})
    fuses = frozenset()

    def kernel(self) -> Any:
        from ..kernels.cpu.conv import direct_weight

        return direct_weight

    def reject(self, p: Problem, t: Target) -> list[str]:
        return cpu_f32_weight(p, t, halves=True)

    def error(self, p: Problem, t: Target, s: Any) -> float:
        depth = math.sqrt(s.tiles) + math.sqrt(p.terms / s.tiles)
        return EPS32 * (2 + depth) + storing_error(p.dtype)

    def space(self, p: Problem, t: Target) -> Space:
        def legal(s: Any) -> bool:
            columns = p.r * p.s * p.group_c
            return tile_fits(t, s) and (s.vectors - 1) * t.lanes < columns

        return Space(legal, order=("parts",), tiles=TILES, blocks=(1,), parts=PARTS,
                     rows=(1, 2, 4, 8, 16), vectors=(1, 2, 3, 4, 5, 6), unroll=(1, 2, 4))

    def default(self, p: Problem, t: Target) -> Schedule:
        return _default(p, t)

    def cost(self, p: Problem, t: Target, s: Any) -> float:
        return outer_cost(p, t, s, lambda *block: block_cycles(t, s, *block))


def outer_cost(p: Problem, t: Target, s: Any,
               block_cycles: Callable[[int, int, float], float]) -> float:
    """Unrolling, multiplying, and sums that travel."""
    c, k = padded(t, s, p.r * p.s * p.group_c, p.group_k)
    part = p.terms / s.parts
    blocks = max(1, math.ceil(part / s.tiles))  # of a part
    sums = 4.0 * p.groups * c * k
    multiplied = s.parts * blocks * p.groups * block_cycles(c, k, part / blocks)
    speed = NEAR if sums + 4.0 * s.tiles * p.groups * (c + k) < t.l2 else FAR
    unrolled = p.terms * p.groups * (10.0 * p.r + 3.0 * (c + k) / t.lanes)
    travels = 2 * s.parts * blocks * sums / speed
    cycles = multiplied + unrolled + travels + sums * s.parts / 4
    return seconds(t, cycles, p.bytes, s.parts, 2)


def most_parts(p: Problem, t: Target) -> int:
    """A part for each thread, where the sums of all fit."""
    sums = 4 * p.r * p.s * p.group_c * p.k  # of one part
    return max(part for part in PARTS
               if part == 1 or (part <= t.threads and part * sums <= MOST_SCRATCH))


@lru_cache(maxsize=4096)
def _default(p: Problem, t: Target) -> Schedule:
    """The tile by the cost model; all threads with a part each."""
    parts, columns = most_parts(p, t), p.r * p.s * p.group_c
    tiles = even(math.ceil(max(1, p.terms) / parts), 112)
    algorithm = CpuDirectWeight()
    likely = [Schedule(order="parts", tiles=tiles, blocks=1, parts=parts, rows=rows,
                       vectors=vectors, unroll=4)
              for rows in {min(4, t.lanes), min(8, t.lanes)} for vectors in (1, 2, 3, 4, 5, 6)
              if t.lanes % rows == 0 and fits(t, rows, vectors)
              and (vectors - 1) * t.lanes < columns]
    return min(likely, key=lambda s: algorithm.cost(p, t, s))
