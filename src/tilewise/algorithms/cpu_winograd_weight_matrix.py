"""Gradients of weights in the Winograd domain, with products on the matrix unit."""

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
from .cpu_winograd import certain_in_domain, dense, growth, stride_one, tile_sizes
from .cpu_winograd_weight import BLOCKS, ORDERS, PARTS, SIZES, is_legal, near_cost, tiles_of
from .matrix import MatrixAlgorithm
from .matrix_outer import GAIN, TILES, block_cycles, width


class CpuWinogradWeightMatrix(MatrixAlgorithm):
    """As the vector algorithm, mostly in bands; not with one product, which errs too much."""

    name = "cpu_winograd_weight"
    version = 1
    directions = frozenset({"backward_weight"})
    fuses = frozenset()
    exact_on_integers = False

    def kernel(self) -> Any:
        from ..kernels.cpu.matrix import winograd_weight

        return winograd_weight

    def reject(self, p: Problem, t: Target) -> list[str]:
        return cpu_f32_weight(p, t) + stride_one(p) + dense(p) + self.no_unit(t)

    def error(self, p: Problem, t: Target, s: Any) -> float:
        tiles = p.n * tiles_of(p, s)
        depth = math.sqrt(s.tiles) + math.sqrt(tiles / s.tiles)
        error = EPS32 * (2 + depth) + split_error(self.products, max(1, tiles))
        return growth(s.tile_h, p.r) * growth(s.tile_w, p.s) * error

    def certain(self, p: Problem, t: Target, s: Any) -> float:
        return certain_in_domain(p, s, p.n * tiles_of(p, s), self.products, p.dtype)

    def space(self, p: Problem, t: Target) -> Space:
        return Space(lambda s: is_legal(p, t, s), tile_h=SIZES, tile_w=SIZES, order=ORDERS,
                     tiles=TILES, blocks=BLOCKS, parts=PARTS, rows=(SIDE,), vectors=(1, 2))

    def default(self, p: Problem, t: Target) -> Schedule:
        return _default(p, t, self.products)

    def cost(self, p: Problem, t: Target, s: Any) -> float:
        return GAIN[self.products] * near_cost(
            p, t, s, lambda *block: block_cycles(self.products, s, *block))


@lru_cache(maxsize=4096)
def _default(p: Problem, t: Target, products: int) -> Schedule:
    algorithm = CpuWinogradWeightMatrix(products)
    return min((s for size in tile_sizes(p) for s in _likely(p, t, *size)),
               key=lambda s: algorithm.cost(p, t, s))


def _likely(p: Problem, t: Target, tile_h: int, tile_w: int) -> list[Schedule]:
    """Bands, or whole parts that fit near a core."""
    parts = [part for part in PARTS if part <= t.threads]
    positions = (tile_h + p.r - 1) * (tile_w + p.s - 1)
    near = [("parts", tiles, parts[-1]) for tiles in TILES[1:]
            if 4 * positions * (p.c * p.k + tiles * (p.c + p.k)) <= t.l2]
    bands = [("bands", tiles, part) for tiles in TILES for part in parts]
    return [Schedule(tile_h=tile_h, tile_w=tile_w, order=order, tiles=tiles, blocks=1, parts=part,
                     rows=SIDE, vectors=width(t, p.c)) for order, tiles, part in near + bands]
