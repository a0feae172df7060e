"""Gradients of weights by unrolling, with products on the matrix unit."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from ..core.algorithm import EPS32, split_error
from ..core.problem import Problem
from ..core.schedule import Schedule, Space
from ..core.target import Target
from ..kernels.matrix import SIDE
from .common import cpu_f32_weight
from .cpu_direct_weight import most_parts, outer_cost
from .cpu_winograd_weight import PARTS
from .matrix import MatrixAlgorithm
from .matrix_outer import GAIN, TILES, block_cycles, width


class CpuDirectWeightMatrix(MatrixAlgorithm):
    """As the vector algorithm; chunks of pixels are packed as parts."""

    name = "cpu_direct_weight"
    version = 2
    directions = frozenset({"backward_weight"})
    fuses = frozenset()

    def kernel(self) -> Any:
        from ..kernels.cpu.matrix import direct_weight

        return direct_weight

    def reject(self, p: Problem, t: Target) -> list[str]:
        return cpu_f32_weight(p, t) + self.no_unit(t)

    def error(self, p: Problem, t: Target, s: Any) -> float:
        depth = math.sqrt(s.tiles) + math.sqrt(p.terms / s.tiles)
        return EPS32 * (2 + depth) + split_error(self.products, max(1, p.terms))

    def space(self, p: Problem, t: Target) -> Space:
        columns = p.r * p.s * p.group_c
        return Space(lambda s: (s.vectors - 1) * t.lanes < columns, order=("parts",), tiles=TILES,
                     blocks=(1,), parts=PARTS, rows=(SIDE,), vectors=(1, 2))

    def default(self, p: Problem, t: Target) -> Schedule:
        return _default(p, t, self.products)

    def cost(self, p: Problem, t: Target, s: Any) -> float:
        return GAIN[self.products] * outer_cost(
            p, t, s, lambda *block: block_cycles(self.products, s, *block))


@lru_cache(maxsize=4096)
def _default(p: Problem, t: Target, products: int) -> Schedule:
    """The chunk by the cost model; all threads with a part each."""
    algorithm, columns = CpuDirectWeightMatrix(products), p.r * p.s * p.group_c
    likely = [Schedule(order="parts", tiles=tiles, blocks=1, parts=most_parts(p, t), rows=SIDE,
                       vectors=width(t, columns)) for tiles in TILES]
    return min(likely, key=lambda s: algorithm.cost(p, t, s))
