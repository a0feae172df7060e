"""Gradients of weights by unrolling: any filter, stride, padding, dilation and grouping."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from ..core.algorithm import EPS32, split_error
from ..core.cost import seconds
from ..core.problem import Problem
from ..core.schedule import Schedule, Space
from ..core.target import Target
from . import matrix_weight
from .common import CpuAlgorithm, cpu_f32_weight, fits, on_matrix, products
from .cpu_winograd import FAR, NEAR
from .cpu_winograd_weight import PARTS, all_tiles, block_cycles, even, padded, tile_fits

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
        split = split_error(products(s), max(1, p.terms))
        return EPS32 * (2 + math.sqrt(s.tiles) + math.sqrt(blocks)) + split

    def space(self, p: Problem, t: Target) -> Space:
        def legal(s: Any) -> bool:
            columns = p.r * p.s * p.group_c
            return tile_fits(t, s) and (s.vectors - 1) * t.lanes < columns

        return Space(legal, order=("parts",), tiles=all_tiles(t), blocks=(1,), parts=PARTS,
                     rows=(1, 2, 4, 8, 16), vectors=(1, 2, 3, 4, 5, 6), unroll=(1, 2, 4),
                     **on_matrix(t, (0, 1, 3, 6)))

    def default(self, p: Problem, t: Target) -> Schedule:
        return _default(p, t, 0)

    def defaults(self, p: Problem, t: Target) -> tuple[Schedule, ...]:
        offered = (0, 6, 3, 1) if t.row.matrix else (0,)
        return tuple(_default(p, t, products) for products in offered)

    def cost(self, p: Problem, t: Target, s: Any) -> float:
        c, k = padded(t, s, p.r * p.s * p.group_c, p.group_k)
        part = p.terms / s.parts
        blocks = max(1, math.ceil(part / s.tiles))  # of a part
        sums = 4.0 * p.groups * c * k
        multiplied = s.parts * blocks * p.groups * block_cycles(t, s, c, k, part / blocks)
        speed = NEAR if sums + 4.0 * s.tiles * p.groups * (c + k) < t.l2 else FAR
        unrolled = p.terms * p.groups * (10.0 * p.r + 3.0 * (c + k) / t.lanes)
        travels = 2 * s.parts * blocks * sums / speed
        cycles = multiplied + unrolled + travels + sums * s.parts / 4
        return matrix_weight.GAIN[products(s)] * seconds(t, cycles, p.bytes, s.parts, 2)


@lru_cache(maxsize=4096)
def _default(p: Problem, t: Target, products: int) -> Schedule:
    """The tile by the cost model; all threads with a part each."""
    sums = 4 * p.r * p.s * p.group_c * p.k  # of one part
    parts = max(part for part in PARTS if part == 1 or (part <= t.threads
                                                        and part * sums <= MOST_SCRATCH))
    algorithm, columns = CpuDirectWeight(), p.r * p.s * p.group_c
    common: Any = {"order": "parts", "blocks": 1, "parts": parts}
    if products:
        likely = [Schedule(tiles=tiles, **common, **matrix_weight.tile(t, columns),
                           products=products) for tiles in matrix_weight.TILES]
        return min(likely, key=lambda s: algorithm.cost(p, t, s))
    tiles = even(math.ceil(max(1, p.terms) / parts), 112)
    likely = [Schedule(tiles=tiles, **common, rows=rows, vectors=vectors, unroll=4,
                       **on_matrix(t, 0))
              for rows in {min(4, t.lanes), min(8, t.lanes)} for vectors in (1, 2, 3, 4, 5, 6)
              if t.lanes % rows == 0 and fits(t, rows, vectors)
              and (vectors - 1) * t.lanes < columns]
    return min(likely, key=lambda s: algorithm.cost(p, t, s))
