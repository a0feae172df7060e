"""Stride-1 convolution in the Winograd domain: fewer multiplications than there are products."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from ..core.algorithm import accumulation_error, split_error
from ..core.cost import matrix_cycles, seconds, tile_cycles
from ..core.problem import Problem
from ..core.schedule import Schedule, Space
from ..core.target import Target
from ..kernels.matrix import DEPTH
from ..kernels.winograd_math import Matrix, error_growth, matrices
from .common import (
    MATRIX_PARTS,
    MATRIX_SIDE,
    CpuAlgorithm,
    cpu_f32_forward,
    fits,
    on_matrix,
    products,
    streams,
)

MOST_TAPS = 7
SIZES = (1, 2, 3, 4, 5, 6)  # outputs of a tile along one axis
ROWS = tuple(range(1, 15))
MATRIX_ROWS = (16, 32)
GROUPS = tuple(range(1, 129))
SAFE = 2.3  # with the power below, fitted: admits F(4x4, 3x3), measured at 2.2 of torch's error
FAR = 9.0  # bytes a cycle that a core gets from the last cache
NEAR = 40.0  # and from the second
MATRIX_FAR = 5.5  # the same where the matrix unit waits for it, that is most of the time
MATRIX_FARTHER = 3.6  # and for weights that are too large for a share of the last cache
SHARE = 16 << 20  # bytes of it
STALLS = {1: 1.25, 3: 1.25, 6: 1.7}  # the matrix unit waits for what is near as well
SPLIT = 1.2  # cycles to split off and store a part of a vector


class CpuWinograd(CpuAlgorithm):
    """Any F(m, r) along both axes; fused by block of tiles, or shared by all threads."""

    name = "cpu_winograd"
    version = 5
    kernel = "winograd"
    fuses = CpuAlgorithm.fuses | {"pool2", "mask"}
    exact_on_integers = False

    def reject(self, p: Problem, t: Target) -> list[str]:
        return cpu_f32_forward(p, t) + stride_one(p)

    def error(self, p: Problem, t: Target, s: Any) -> float:
        error = accumulation_error(p.c) + split_error(products(s), p.c)
        return growth(s.tile_h, p.r) * growth(s.tile_w, p.s) * error

    def spreads(self, s: Schedule) -> bool:
        return True

    def space(self, p: Problem, t: Target) -> Space:
        def legal(s: Any) -> bool:
            return (_tile_fits(t, s) and (s.vectors - 1) * t.lanes < p.k
                    and s.tile_h in _axis_sizes(p.r, p.epilogue.pool)
                    and s.tile_w in _axis_sizes(p.s, p.epilogue.pool) and s.tile_h * s.tile_w > 1
                    and (s.order == "shared" or s.k_parts == 1)
                    and s.k_parts <= math.ceil(p.k / (t.lanes * s.vectors))
                    and (not s.streaming or p.k % t.lanes == 0))

        rows = ROWS + MATRIX_ROWS if t.row.matrix else ROWS
        return Space(legal, tile_h=SIZES, tile_w=SIZES, order=("channels", "positions", "shared"),
                     rows=rows, vectors=(1, 2, 3, 4), groups=GROUPS, unroll=(1, 2, 4),
                     k_parts=(1, 2, 4), streaming=(False, True), **on_matrix(t, (0, 1, 3, 6)))

    def default(self, p: Problem, t: Target) -> Schedule:
        return _default(p, t, 0)

    def defaults(self, p: Problem, t: Target) -> tuple[Schedule, ...]:
        # one product alone errs too much after the transforms
        offered = (0, 6, 3) if t.row.matrix else (0,)
        return tuple(_default(p, t, products) for products in offered)

    def prepare(self, p: Problem, t: Target, s: Schedule, weight: Any) -> Any:
        from ..kernels.cpu import winograd_prepare, winograd_prepare_amx

        by = winograd_prepare_amx if products(s) else winograd_prepare
        return by.prepare(self.seen_by_kernel(p), t, s, weight)

    def cost(self, p: Problem, t: Target, s: Any) -> float:
        work = _Work(p, t, s)
        return work.shared() if s.order == "shared" else work.fused()


def _tile_fits(t: Target, s: Any) -> bool:
    """A register tile, or tiles of the matrix unit."""
    if products(s):
        return s.rows in MATRIX_ROWS and s.vectors <= 2 and s.unroll == 1
    return s.rows in ROWS and fits(t, s.rows, s.vectors)


def stride_one(p: Problem) -> list[str]:
    """What Winograd's products ask for, in every direction."""
    reasons = []
    if p.stride != (1, 1):
        reasons.append(f"stride is {p.stride}, needs 1")
    if p.dilation != (1, 1):
        reasons.append(f"dilation is {p.dilation}, needs 1")
    if p.groups > 1:
        reasons.append(f"groups is {p.groups}, needs 1")
    if not 2 <= max(p.r, p.s) <= MOST_TAPS:
        reasons.append(f"filter is {p.r}x{p.s}, needs at least 2 and at most {MOST_TAPS} taps "
                       "along an axis")
    return reasons


class _Work:
    """Cycles of the steps of a schedule."""

    def __init__(self, p: Problem, t: Target, s: Any) -> None:
        self.p, self.t, self.s = p, t, s
        self.n_h, self.n_w = s.tile_h + p.r - 1, s.tile_w + p.s - 1
        self.positions = self.n_h * self.n_w
        self.tiles = (p.n * math.ceil(p.conv_h / s.tile_h) * math.ceil(p.conv_w / s.tile_w))
        self.c_vectors, self.k_vectors = math.ceil(p.c / t.lanes), math.ceil(p.k / t.lanes)
        self.block = s.rows * s.groups
        self.blocks = max(1, math.ceil(self.tiles / self.block))
        self.products_, self.parts = products(s), MATRIX_PARTS[products(s)]
        self.steps = math.ceil(p.c / DEPTH)
        # bytes of V of one tile at one position; weights are as deep
        self.v_bytes = (2.0 * self.parts * self.steps * DEPTH if self.products_
                        else 4.0 * self.c_vectors * t.lanes)

    def transforms(self) -> float:
        """Input and output transforms of all tiles."""
        p, s, n = self.p, self.s, self.positions
        (in_h, out_h), (in_w, out_w) = operations(s.tile_h, p.r), operations(s.tile_w, p.s)
        into = (self.n_w * in_h + self.n_h * in_w) / 2 + (1.5 + SPLIT * self.parts) * n
        back = (self.n_w * out_h + s.tile_h * out_w) / 2 + 0.5 * n + 2 * s.tile_h * s.tile_w
        return 1.5 * self.tiles * (self.c_vectors * into + self.k_vectors * back + 30)

    def products(self) -> float:
        """All multiplications, with the rows that fill up the last group of every block."""
        s, t = self.s, self.t
        last = self.tiles - (self.blocks - 1) * self.block
        groups = (self.blocks - 1) * s.groups + math.ceil(last / s.rows)
        tile = (STALLS[self.products_] * matrix_cycles(s.rows // MATRIX_SIDE, s.vectors, self.steps,
                                                       self.products_)
                if self.products_ else
                tile_cycles(t, s.rows, s.vectors, self.c_vectors * t.lanes))
        one = tile * self.k_vectors / s.vectors
        return groups * self.positions * one

    @property
    def weight_bytes(self) -> float:
        return self.v_bytes * self.positions * self.k_vectors * self.t.lanes

    @property
    def far(self) -> float:
        """Bytes a cycle that a core gets from the last cache."""
        if not self.products_:
            return FAR
        return MATRIX_FAR if self.weight_bytes < SHARE else MATRIX_FARTHER

    def fused(self) -> float:
        """Weights pass for every block; V and M stay in a core's caches if they fit."""
        s, t = self.s, self.t
        k_live = s.vectors if s.order == "channels" else self.k_vectors
        live = self.block * self.positions * (self.v_bytes + 4.0 * t.lanes * k_live)
        speed = NEAR if self.weight_bytes + live < t.l2 else self.far
        weights = self.blocks * self.weight_bytes / speed
        spilled = max(0.0, live - 0.75 * t.l2) / live
        passes = self.k_vectors / s.vectors if s.order == "channels" else 2.0
        moved = self.v_bytes
        if self.products_ and s.order == "positions":
            moved += 4.0 * t.lanes * self.k_vectors  # M goes the same way
        far = spilled * self.tiles * self.positions * moved * passes / self.far
        cycles = self.transforms() + max(self.products(), weights) + 0.25 * weights + far
        return seconds(t, cycles, self.p.image_bytes, self.blocks, weights=self.weight_bytes)

    def shared(self) -> float:
        """Weights pass once a chunk; V and M travel through the last cache."""
        t = self.t
        weights = self.blocks * self.weight_bytes / self.far
        moved = 2.0 * self.tiles * self.positions * (self.v_bytes
                                                     + 4.0 * t.lanes * self.k_vectors)
        cycles = self.transforms() + max(self.products(), weights) + moved / self.far
        tasks = self.positions * self.s.k_parts
        return seconds(t, cycles, self.p.image_bytes, tasks, 3 * self.blocks,
                       self.weight_bytes)


@lru_cache(maxsize=64)
def growth(m: int, taps: int) -> float:
    return error_growth(matrices(m, taps), matrices(1, 1))


@lru_cache(maxsize=64)
def operations(m: int, taps: int) -> tuple[float, float]:
    """About the operations of one input and of one output transform along an axis."""
    def shared(matrix: Matrix) -> float:  # mirrored points share a quarter; counting takes longer
        return 0.75 * sum(sum(map(bool, row)) - 1 for row in matrix)

    return shared(matrices(m, taps).BT), shared(matrices(m, taps).AT)


@lru_cache(maxsize=4096)
def _default(p: Problem, t: Target, products: int) -> Schedule:
    """The cheapest of a few by the cost model; the tile, and so the bits, for any threads."""
    algorithm, common = CpuWinograd(), t.with_(threads=2)
    likely = _likely_on_matrix if products else _likely
    best = min((s for size in tile_sizes(p) for s in likely(p, common, *size, (2,), products)),
               key=lambda s: algorithm.cost(p, common, s))
    return min(likely(p, t, best.tile_h, best.tile_w, (1, 2, 3, 4), products),
               key=lambda s: algorithm.cost(p, t, s))


def tile_sizes(p: Problem) -> list[tuple[int, int]]:
    """Tiles whose error stays near that of a direct sum; the smallest where none does."""
    heights, widths = (_axis_sizes(taps, p.epilogue.pool) for taps in (p.r, p.s))
    sizes = [(h, w) for h in heights for w in widths if h * w > 1]
    grown = {(h, w): growth(h, p.r) * growth(w, p.s) for h, w in sizes}
    # fitted to few layers: refuses F(1x4, 7x7), measured at 2.1 to 2.6 of torch's error
    safe = [size for size in sizes if grown[size] <= SAFE * (p.r * p.s) ** 0.375]
    return safe or [min(sizes, key=lambda size: grown[size])]


def _axis_sizes(taps: int, pool: int) -> list[int]:
    """Outputs of a tile along an axis; one stands for no transform along it."""
    return [m for m in SIZES if m % pool == 0 and (taps > 1 or m == pool)]


def _likely(p: Problem, t: Target, tile_h: int, tile_w: int, widths: tuple[int, ...],
            products: int) -> list[Schedule]:
    tiles = p.n * math.ceil(p.conv_h / tile_h) * math.ceil(p.conv_w / tile_w)
    streaming = p.k % t.lanes == 0 and streams(p, t)
    found = []
    for vectors in sorted({min(width, math.ceil(p.k / t.lanes)) for width in widths}):
        rows = max(r for r in ROWS if fits(t, r, vectors))
        for order, wanted in (("channels", 28), ("channels", 56), ("positions", 28),
                              ("positions", 56), ("positions", 112), ("shared", 200),
                              ("shared", 400)):
            rows_, groups = _even(max(1, tiles), wanted, rows)
            parts = _parts(p, t, vectors) if order == "shared" else 1
            found.append(Schedule(tile_h=tile_h, tile_w=tile_w, order=order, rows=rows_,
                                  vectors=vectors, groups=groups, unroll=4, k_parts=parts,
                                  streaming=streaming, **on_matrix(t, 0)))
    return found


def _likely_on_matrix(p: Problem, t: Target, tile_h: int, tile_w: int, widths: tuple[int, ...],
                      products: int) -> list[Schedule]:
    tiles = p.n * math.ceil(p.conv_h / tile_h) * math.ceil(p.conv_w / tile_w)
    vectors = min(2, math.ceil(p.k / t.lanes))
    found = []
    for order, wanted in (("channels", 32), ("channels", 64), ("positions", 32),
                          ("positions", 64), ("positions", 96), ("positions", 160),
                          ("shared", 200), ("shared", 400)):
        blocks = max(1, round(tiles / wanted))
        rows = 16 if tiles <= 16 else 32
        groups = min(GROUPS[-1], math.ceil(tiles / blocks / rows) or 1)
        parts = _parts(p, t, vectors) if order == "shared" else 1
        found.append(Schedule(tile_h=tile_h, tile_w=tile_w, order=order, rows=rows,
                              vectors=vectors, groups=groups, unroll=1, k_parts=parts,
                              streaming=p.k % t.lanes == 0 and streams(p, t),
                              products=products))
    return found


def _even(tiles: int, wanted: int, most_rows: int) -> tuple[int, int]:
    """Rows and groups of a block near `wanted` tiles, so that blocks come out full."""
    blocks = max(1, round(tiles / wanted))
    block = math.ceil(tiles / blocks)
    groups = min(math.ceil(block / most_rows), GROUPS[-1])
    return min(math.ceil(block / groups), most_rows), groups


def _parts(p: Problem, t: Target, vectors: int) -> int:
    blocks = math.ceil(p.k / (t.lanes * vectors))
    return max(k for k in (1, 2, 4) if k == 1 or (k <= blocks and k <= t.threads))
