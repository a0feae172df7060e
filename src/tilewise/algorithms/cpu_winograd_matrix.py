"""Stride-1 convolution in the Winograd domain, with products on the matrix unit."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from ..core.algorithm import accumulation_error, split_error
from ..core.cost import matrix_cycles
from ..core.problem import Problem
from ..core.schedule import Schedule, Space
from ..core.target import Target
from ..kernels.matrix import DEPTH, PARTS, SIDE
from .common import cpu_f32_forward, streams
from .cpu_winograd import (
    GROUPS,
    ORDERS,
    SIZES,
    CpuWinograd,
    Work,
    certain_in_domain,
    chosen,
    growth,
    is_legal,
    k_parts,
    shared,
    stride_one,
    tiles_of,
    undivided,
    weight_of,
)
from .matrix import MatrixAlgorithm

ROWS = (SIDE, 2 * SIDE)  # tiles that are multiplied together
FAR = 5.5  # bytes a cycle that a core gets from the last cache, for which the unit mostly waits
FARTHER = 3.6  # the same for weights that are too large for a share of that cache
SHARE = 16 << 20  # bytes of it
STALLS = {3: 1.25, 6: 1.7}  # the unit waits for what is near as well
SPLIT = 1.2  # cycles to split off and store a part of a vector


class CpuWinogradMatrix(MatrixAlgorithm):
    """As the vector algorithm; the input transform stores parts, and the unit multiplies them.

    Not with one product: that errs too much after the transforms.
    """

    name = "cpu_winograd"
    version = 2
    fuses = CpuWinograd.fuses
    exact_on_integers = False
    spreads = True
    by_strides = True

    def kernel(self) -> Any:
        from ..kernels.cpu.matrix import winograd

        return winograd

    def reject(self, p: Problem, t: Target) -> list[str]:
        return (cpu_f32_forward(p, t, grid=True, pitch=True) + stride_one(p) + undivided(p)
                + self.no_unit(t))

    def error(self, p: Problem, t: Target, s: Any) -> float:
        error = accumulation_error(p.c) + split_error(self.products, p.c)
        return growth(s.tile_h, p.r) * growth(s.tile_w, p.s) * error

    def certain(self, p: Problem, t: Target, s: Any) -> float:
        return certain_in_domain(p, s, p.c, self.products)

    def space(self, p: Problem, t: Target) -> Space:
        return Space(lambda s: is_legal(p, t, s), tile_h=SIZES, tile_w=SIZES, order=ORDERS,
                     rows=ROWS, vectors=(1, 2), groups=GROUPS, k_parts=(1, 2, 4),
                     streaming=(False, True))

    def default(self, p: Problem, t: Target) -> Schedule:
        return _default(p, t, self.products)

    def shared_by(self, p: Problem, t: Target, s: Schedule) -> Schedule:
        return shared(p, t, s, _likely, self.cost)

    def prepare(self, p: Problem, t: Target, s: Schedule, weight: Any) -> Any:
        from ..kernels.cpu.prepare import winograd_amx

        return winograd_amx.prepare(*self.weight_of(p, s), t, weight, self.products)

    def prepared_floats(self, p: Problem, t: Target, s: Schedule) -> int:
        from ..kernels.cpu.prepare import winograd_amx

        return winograd_amx.floats(*self.weight_of(p, s), t, self.products)

    def prepare_into(self, p: Problem, t: Target, s: Schedule, weight: Any, whole: Any) -> None:
        from ..kernels.cpu.prepare import winograd_amx

        winograd_amx.prepare_into(*self.weight_of(p, s), t, weight, whole, self.products)

    def requests(self, p: Problem, t: Target, s: Schedule) -> list[Any]:
        from ..kernels.cpu.prepare import winograd, winograd_amx

        return [self.request(p, t, s),
                winograd.request_of(winograd_amx.make, *self.weight_of(p, s), t.row,
                                    self.products)]

    def weight_of(self, p: Problem, s: Any) -> tuple[Problem, Schedule]:
        return weight_of(p, s)

    def cost(self, p: Problem, t: Target, s: Any) -> float:
        return _Work(p, t, s, self.products).seconds()


class _Work(Work):
    """Cycles of the steps of a schedule, on the unit."""

    moves_sums = True

    def __init__(self, p: Problem, t: Target, s: Any, products: int) -> None:
        super().__init__(p, t, s)
        self.products_, self.parts = products, PARTS[products]
        self.split, self.steps = SPLIT * self.parts, math.ceil(p.c / DEPTH)

    @property
    def v_bytes(self) -> float:
        return 2.0 * self.parts * self.steps * DEPTH

    def tile(self) -> float:
        one = matrix_cycles(self.s.rows // SIDE, self.s.vectors, self.steps, self.products_)
        return STALLS[self.products_] * one

    @property
    def far(self) -> float:
        return FAR if self.weight_bytes < SHARE else FARTHER


@lru_cache(maxsize=4096)
def _default(p: Problem, t: Target, products: int) -> Schedule:
    return chosen(p, t, _likely, lambda t, s: _Work(p, t, s, products).seconds())


def _likely(p: Problem, t: Target, tile_h: int, tile_w: int,
            widths: tuple[int, ...]) -> list[Schedule]:
    tiles = tiles_of(p, tile_h, tile_w)
    vectors = min(2, math.ceil(p.k / t.lanes))
    found = []
    for order, wanted in (("channels", 32), ("channels", 64), ("positions", 32),
                          ("positions", 64), ("positions", 96), ("positions", 160),
                          ("shared", 200), ("shared", 400)):
        blocks = max(1, round(tiles / wanted))
        rows = 16 if tiles <= 16 else 32
        groups = min(GROUPS[-1], math.ceil(tiles / blocks / rows) or 1)
        parts = k_parts(p, t, vectors) if order == "shared" else 1
        found.append(Schedule(tile_h=tile_h, tile_w=tile_w, order=order, rows=rows,
                              vectors=vectors, groups=groups, k_parts=parts,
                              streaming=p.k % t.lanes == 0 and streams(p, t)))
    return found
