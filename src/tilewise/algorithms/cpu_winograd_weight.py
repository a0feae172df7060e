"""Gradients of the weights of stride-1 convolutions in the Winograd domain."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ..core.algorithm import EPS32, storing_error
from ..core.cost import seconds, tile_cycles
from ..core.problem import Problem
from ..core.schedule import Schedule, Space
from ..core.target import Target
from .common import CpuAlgorithm, cpu_f32_weight, fits
from .cpu_winograd import (
    FAR,
    NEAR,
    certain_in_domain,
    dense,
    growth,
    operations,
    stride_one,
    tile_sizes,
)

SIZES = (1, 2, 3, 4, 5, 6)
SHARE = 64 << 20  # bytes of images that stay in the last cache
FARTHER = 4.5  # bytes a cycle that a core gets of larger ones
TILES = tuple(range(1, 129))  # a longer sum in registers would round worse
BLOCKS = (1, 2, 4, 8, 16)
ORDERS = ("parts", "bands", "shared")
SQUARES = (1, 2, 3, 4, 6, 8)  # sides, in vectors
FEW = 64  # tiles: their sums are larger than they, and are not to travel
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


class CpuWinogradWeight(CpuAlgorithm):
    """Tiles of the input against tiles of the gradient, summed in blocks."""

    name = "cpu_winograd_weight"
    version = 3
    directions = frozenset({"backward_weight"})
    fuses = frozenset()
    exact_on_integers = False

    def kernel(self) -> Any:
        from ..kernels.cpu.conv import winograd_weight

        return winograd_weight

    def reject(self, p: Problem, t: Target) -> list[str]:
        return cpu_f32_weight(p, t, halves=True) + stride_one(p) + dense(p)

    def error(self, p: Problem, t: Target, s: Any) -> float:
        tiles = p.n * tiles_of(p, s)
        depth = math.sqrt(s.tiles) + math.sqrt(tiles / s.tiles)
        grown = growth(s.tile_h, p.r) * growth(s.tile_w, p.s)
        return grown * EPS32 * (2 + depth) + storing_error(p.dtype)

    def certain(self, p: Problem, t: Target, s: Any) -> float:
        return certain_in_domain(p, s, p.n * tiles_of(p, s), self.products, p.dtype)

    def space(self, p: Problem, t: Target) -> Space:
        def legal(s: Any) -> bool:
            return tile_fits(t, s) and is_legal(p, t, s) and is_square(p.n * tiles_of(p, s), s)

        return Space(legal, tile_h=SIZES, tile_w=SIZES, order=(*ORDERS, "squares"), tiles=TILES,
                     blocks=BLOCKS, parts=PARTS, rows=(1, 2, 4, 8, 16),
                     vectors=(1, 2, 3, 4, 5, 6), unroll=(1, 2, 4), square=SQUARES)

    def default(self, p: Problem, t: Target) -> Schedule:
        return _default(p, t)

    def cost(self, p: Problem, t: Target, s: Any) -> float:
        if s.order == "squares":
            return _squares_cost(p, t, s)
        if s.order == "bands":
            return near_cost(p, t, s, lambda *block: block_cycles(t, s, *block))
        return _cost(p, t, s)


def is_legal(p: Problem, t: Target, s: Any) -> bool:
    """All that is asked of a schedule, but that its tile fits."""
    return ((s.vectors - 1) * t.lanes < p.c and s.tile_h * s.tile_w > 1
            and (p.r > 1 or s.tile_h == 1) and (p.s > 1 or s.tile_w == 1)
            and (s.order in ("shared", "squares") or s.blocks == 1)
            and (s.order not in ("shared", "squares") or s.parts == 1))


def is_square(items: int, s: Any) -> bool:
    """Whether squares hold all items at once; in other orders there are none."""
    return items <= s.tiles * s.blocks if s.order == "squares" else bool(s.square == 1)


def _cost(p: Problem, t: Target, s: Any) -> float:
    """Plain floats in parts, or shared."""
    tiles, positions = p.n * tiles_of(p, s), (s.tile_h + p.r - 1) * (s.tile_w + p.s - 1)
    c, k = padded(t, s, p.c, p.k)
    blocks = max(1, math.ceil(tiles / s.tiles)) if s.order == "shared" else (
        s.parts * max(1, math.ceil(tiles / s.parts / s.tiles)))
    u = 4.0 * positions * c * k
    moved = 4.0 * s.tiles * s.blocks * positions * (c + k)  # V and M of a chunk
    near = u + moved if s.order == "parts" else (u + moved) / positions
    speed = NEAR if near < t.l2 else FAR
    travels = 2 * (blocks * u / (s.blocks if s.order == "shared" else 1)
                   + 4.0 * tiles * positions * (c + k)) / speed
    if s.order == "shared" and u + moved > t.l2:  # read by others than wrote it
        travels += 8.0 * tiles * positions * (c + k) / FAR
    cycles = (_transforms(p, t, s) * tiles + blocks * positions * block_cycles(t, s, c, k, s.tiles)
              + travels + u * s.parts / FAR)
    tasks, regions = (s.parts, 2) if s.order == "parts" else (
        positions, 3 * max(1, math.ceil(tiles / (s.tiles * s.blocks))))
    return seconds(t, cycles, p.bytes, tasks, regions)


def _squares_cost(p: Problem, t: Target, s: Any) -> float:
    """Items travel once for each row or column of squares, sums hardly."""
    items, positions = p.n * tiles_of(p, s), (s.tile_h + p.r - 1) * (s.tile_w + p.s - 1)
    c, k = padded(t, s, p.c, p.k)
    blocks, side = max(1, math.ceil(items / s.tiles)), s.square * t.lanes
    squares = math.ceil(k / side) * math.ceil(c / side)
    near = 4.0 * positions * side * side
    panels = 4.0 * items * positions  # of one channel
    far = (panels * 2 * side * squares + 2 * panels * (c + k)) / FAR
    far += squares * near * min(1.0, max(0.0, near / t.l2 - 0.75)) / FAR
    cycles = (_transforms(p, t, s) * items + blocks * positions * block_cycles(t, s, c, k, s.tiles)
              + 0.5 * far + 9.0 * positions * c * k / t.lanes)
    return seconds(t, cycles, p.bytes, squares, 2)


def near_cost(p: Problem, t: Target, s: Any,
              block_cycles: Callable[[int, int, float], float]) -> float:
    """Where products are quick, and so what is near or far decides."""
    n_h, n_w = s.tile_h + p.r - 1, s.tile_w + p.s - 1
    tiles, positions, bands = p.n * tiles_of(p, s), n_h * n_w, n_h if s.order == "bands" else 1
    c, k = padded(t, s, p.c, p.k)
    part = tiles / s.parts
    blocks = max(1, math.ceil(part / s.tiles))  # of a part
    multiplied = s.parts * positions * blocks * block_cycles(c, k, part / blocks)
    u = 4.0 * positions * c * k
    panels = 4.0 * positions * (c + k)  # of one tile
    if s.order == "shared":
        chunks = max(1, math.ceil(tiles / (s.tiles * s.blocks)))
        travels = ((2 * chunks - 1) * u + 2 * panels * tiles) / FAR
        tasks, regions = positions, 3 * chunks
    else:
        near = (u + panels * s.tiles) / bands + panels * s.tiles / positions
        lost = min(1.0, max(0.0, near / t.l2 - 0.75) / 2)
        travels = (((2 * blocks - 1) * u * s.parts + 2 * panels * tiles)
                   * (lost / FAR + (1 - lost) / NEAR))
        tasks, regions = bands * s.parts, 2
    transforms = _transforms(p, t, s) * tiles * (1.25 if bands > 1 else 1.0)
    cycles = transforms + multiplied + travels + 6 * u * s.parts / FAR
    if bands > 1:
        cycles += _read_again(p, n_h)
    return seconds(t, cycles, p.bytes, tasks, regions)


def _read_again(p: Problem, rows: int) -> float:
    """Cycles of reading images for every band: each sees about so many of the rows of a tile."""
    inputs, gradients = 4.0 * p.n * p.c * p.h * p.w, 4.0 * p.n * p.k * p.conv_h * p.conv_w
    speed = FAR if inputs + gradients < SHARE else FARTHER
    return ((0.6 * rows - 1) * inputs + (0.75 * rows - 1) * gradients) / speed


def tile_fits(t: Target, s: Any) -> bool:
    """A register tile and its sums."""
    return fits(t, s.rows, s.vectors) and t.lanes % s.rows == 0


def padded(t: Target, s: Any, columns: int, rows: int) -> tuple[int, int]:
    """Columns and rows of the sums, filled up to whole tiles and vectors."""
    width = s.vectors * t.lanes
    return math.ceil(columns / width) * width, math.ceil(rows / t.lanes) * t.lanes


def block_cycles(t: Target, s: Any, c: int, k: int, items: float) -> float:
    """A block of so many items at one position: all columns against all rows."""
    one = tile_cycles(t, s.rows, s.vectors, s.tiles) + 2 * s.rows * s.vectors
    return one * (c / (s.vectors * t.lanes)) * (k / s.rows)


def tiles_of(p: Problem, s: Any) -> int:
    """Tiles of one image."""
    return math.ceil(p.conv_h / s.tile_h) * math.ceil(p.conv_w / s.tile_w)


def _transforms(p: Problem, t: Target, s: Any) -> float:
    """Cycles of reading one tile of the input and one of the gradient."""
    n_h, n_w = s.tile_h + p.r - 1, s.tile_w + p.s - 1
    (in_h, out_h), (in_w, out_w) = operations(s.tile_h, p.r), operations(s.tile_w, p.s)
    into = (n_w * in_h + n_h * in_w) / 2 + 1.5 * n_h * n_w
    grad = (s.tile_w * out_h + n_h * out_w) / 2 + n_h * n_w
    return 1.5 * (math.ceil(p.c / t.lanes) * into + math.ceil(p.k / t.lanes) * grad + 30)


@lru_cache(maxsize=4096)
def _default(p: Problem, t: Target) -> Schedule:
    algorithm = CpuWinogradWeight()
    return min((s for size in tile_sizes(p) for s in _likely(p, t, *size)),
               key=lambda s: algorithm.cost(p, t, s))


def _likely(p: Problem, t: Target, tile_h: int, tile_w: int) -> list[Schedule]:
    """By rules fitted to the layers of VGG16: sums that fit near a core are a core's own."""
    rows = min(8 if t.lanes >= 16 else 4, t.lanes)
    vectors = max(v for v in (1, 2, 3, 4) if fits(t, rows, v) and (v - 1) * t.lanes < p.c)
    vectors = min(range(1, vectors + 1), key=lambda v: (-(-p.c // (v * t.lanes)) * v, -v))
    common: Any = {"tile_h": tile_h, "tile_w": tile_w, "rows": rows, "vectors": vectors,
                   "unroll": 4, "square": 1}
    total = max(1, p.n * math.ceil(p.conv_h / tile_h) * math.ceil(p.conv_w / tile_w))
    sums = 4 * (tile_h + p.r - 1) * (tile_w + p.s - 1) * p.c * p.k
    if sums <= 2.5 * t.l2:
        parts = max(part for part in PARTS if part <= t.threads)
        return [Schedule(order="parts", tiles=even(math.ceil(total / parts), 56), blocks=1,
                         parts=parts, **common)]
    if total <= FEW:
        return [Schedule(order="squares", tiles=total, parts=1, blocks=1,
                         **{**common, "square": square}) for square in (2, 4)]
    tiles = even(total, 56)
    needed = math.ceil(total / tiles)
    blocks = min(needed, BLOCKS[-1]) if sums > 12 * t.l2 else 1
    return [Schedule(order="shared", tiles=tiles, parts=1,
                     blocks=next(b for b in BLOCKS if b >= blocks), **common)]


def even(total: int, wanted: int) -> int:
    """About so many items a block, at most 128, so that blocks come out full."""
    return min(TILES[-1], math.ceil(total / max(1, round(total / wanted))))
