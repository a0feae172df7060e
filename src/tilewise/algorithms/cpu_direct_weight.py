"""Gradients of weights by unrolling: any filter, stride, padding, dilation and grouping."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from ..core.algorithm import EPS32
from ..core.cost import seconds, tile_cycles
from ..core.problem import Problem
from ..core.schedule import Schedule, Space
from ..core.target import Target
from .common import CpuAlgorithm, cpu_f32_weight, fits
from .cpu_winograd import FAR, NEAR
from .cpu_winograd_weight import PARTS, TILES, even

MOST_SCRATCH = 256 << 20  # bytes for the sums of all parts


class CpuDirectWeight(CpuAlgorithm):
    """Chunks of pixels, unrolled, against their gradients, summed in blocks."""

    name = "cpu_direct_weight"
    version = 1
    kernel = "direct_weight"
    directions = frozenset({"backward_weight"})
    fuses = frozenset()

    def reject(self, p: Problem, t: Target) -> list[str]:
        return cpu_f32_weight(p, t)

    def error(self, p: Problem, t: Target, s: Any) -> float:
        blocks = p.terms / s.tiles
        return EPS32 * (2 + math.sqrt(s.tiles) + math.sqrt(blocks))

    def space(self, p: Problem, t: Target) -> Space:
        def legal(s: Any) -> bool:
            columns = p.r * p.s * p.group_c
            return (fits(t, s.rows, s.vectors) and t.lanes % s.rows == 0
                    and (s.vectors - 1) * t.lanes < columns)

        return Space(legal, order=("parts",), tiles=TILES, blocks=(1,), parts=PARTS,
                     rows=(1, 2, 4, 8, 16), vectors=(1, 2, 3, 4, 5, 6), unroll=(1, 2, 4))

    def default(self, p: Problem, t: Target) -> Schedule:
        return _default(p.with_(frozen=False), t)

    def cost(self, p: Problem, t: Target, s: Any) -> float:
        width, k = s.vectors * t.lanes, math.ceil(p.group_k / t.lanes) * t.lanes
        c = math.ceil(p.r * p.s * p.group_c / width) * width
        blocks = s.parts * max(1, math.ceil(p.terms / s.parts / s.tiles))
        sums = 4.0 * p.groups * c * k
        calls = blocks * p.groups * (c / width) * (k / s.rows)
        product = tile_cycles(t, s.rows, s.vectors, s.tiles) + 2 * s.rows * s.vectors
        speed = NEAR if sums + 4.0 * s.tiles * p.groups * (c + k) < t.l2 else FAR
        unrolled = p.terms * p.groups * (10.0 * p.r + 3.0 * (c + k) / t.lanes)
        cycles = calls * product + unrolled + 2 * blocks * sums / speed + sums * s.parts / 4
        return seconds(t, cycles, p.bytes, s.parts, 2)


@lru_cache(maxsize=4096)
def _default(p: Problem, t: Target) -> Schedule:
    """The register tile by the cost model; all threads with a part each."""
    sums = 4 * p.r * p.s * p.group_c * p.k  # of one part
    parts = max(part for part in PARTS if part == 1 or (part <= t.threads
                                                        and part * sums <= MOST_SCRATCH))
    tiles = even(math.ceil(max(1, p.terms) / parts), 112)
    columns = p.r * p.s * p.group_c
    algorithm = CpuDirectWeight()
    likely = [Schedule(order="parts", tiles=tiles, blocks=1, parts=parts, rows=rows,
                       vectors=vectors, unroll=4)
              for rows in {min(4, t.lanes), min(8, t.lanes)} for vectors in (1, 2, 3, 4, 5, 6)
              if t.lanes % rows == 0 and fits(t, rows, vectors)
              and (vectors - 1) * t.lanes < columns]
    return min(likely, key=lambda s: algorithm.cost(p, t, s))
