"""Implicit GEMM: any filter, stride, padding, dilation and grouping, no unrolled input."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from ..core.algorithm import accumulation_error, storing_error
from ..core.cost import REGION, seconds, tile_cycles, traffic
from ..core.cut import counts, fitted, piece_sizes
from ..core.problem import Problem
from ..core.schedule import Schedule, Space
from ..core.taps import cols_seen, rows_seen, skips
from ..core.target import Target
from .common import CpuAlgorithm, PanelAlgorithm, cpu_f32_forward, fits, streams, weight_traffic

TILES = ((1, 14), (1, 12), (1, 8), (1, 6), (1, 4), (1, 28), (1, 24), (1, 16), (1, 2), (1, 1),
         (2, 14), (2, 12), (2, 8), (2, 7), (2, 6), (2, 4), (2, 3), (2, 2), (4, 7), (4, 3), (3, 4))
ROWS = (1, 2, 4, 7, 8, 14, 16, 28)
MET = 4  # tiles with the fewest cycles whose costs are compared
ROWS_APART = 1.05  # times as long as a tile of one row that has as many pixels
GATHER = 8.0  # cycles to find the channels of a group in a pixel
FAR = 18.0  # bytes a cycle of weights that stay outside the second cache


class CpuDirect(PanelAlgorithm):
    """Packs padded rectangles of the input, multiplies them in register tiles."""

    name = "cpu_direct"
    version = 6
    fuses = CpuAlgorithm.fuses | {"pool2"}

    def kernel(self) -> Any:
        from ..kernels.cpu.conv import direct

        return direct

    def reject(self, p: Problem, t: Target) -> list[str]:
        return cpu_f32_forward(p, t, grid=True, pitch=not skips(p), halves=True)

    def error(self, p: Problem, t: Target, s: Schedule) -> float:
        return accumulation_error(p.group_c * p.r * p.s) + storing_error(p.dtype)

    def space(self, p: Problem, t: Target) -> Space:
        def legal(s: Any) -> bool:
            return (fits(t, s.tile_h * s.tile_w, s.vectors) and s.tile_h <= _highest(p)
                    and p.group_c % s.split == 0 and (s.split == 1 or p.grid is None)
                    and s.k_parts <= math.ceil(p.group_k / (t.lanes * s.vectors))
                    and not (s.streaming and (p.group_k % t.lanes or s.split > 1)))

        rows, cols = sorted({h for h, _ in TILES}), sorted({w for _, w in TILES})
        return Space(legal, tile_h=tuple(rows), tile_w=tuple(cols), vectors=(1, 2, 3, 4),
                     unroll=(1, 2, 4, 8), block_rows=ROWS, block_cols=(1, 4, 16, 64, 1024),
                     split=(1, 2, 4, 8), k_parts=(1, 2, 4, 8), streaming=(False, True))

    def default(self, p: Problem, t: Target) -> Schedule:
        return _default(p, t.with_(threads=1))

    def weight_of(self, p: Problem, s: Any) -> tuple[Problem, Schedule]:
        return p.weight, Schedule(vectors=s.vectors, split=s.split)

    def adapted(self, p: Problem, t: Target, s: Schedule) -> Schedule:
        return _with_blocks(p, t, s, s.split)

    def cost(self, p: Problem, t: Target, s: Schedule) -> float:
        return _cost(p, t, s)


def _highest(p: Problem) -> int:
    """Rows of a register tile; those that see different taps are not in one."""
    return 1 if skips(p) else p.conv_h


def _most_cols(p: Problem, tile_w: int) -> int:
    tiles = math.ceil(p.conv_w / tile_w)
    return 1024 if tiles > 64 else next(b for b in (1, 4, 16, 64) if b >= tiles)


@lru_cache(maxsize=4096)
def _default(p: Problem, t: Target) -> Schedule:
    """The cheapest of a few by the cost model; the same for every number of threads."""
    wide, k_vectors = t.with_(threads=4), math.ceil(p.group_k / t.lanes)

    def cycles(tile: tuple[int, int, int]) -> float:
        """Of all register tiles."""
        return math.ceil(k_vectors / tile[2]) * _image_cycles(p, t, tile, 1)

    best = sorted(_tiles(p, t), key=cycles)[:MET]
    return min((s for tile in best for s in _with_tile(p, t, *tile)),
               key=lambda s: _cost(p, wide, s))


def _tiles(p: Problem, t: Target) -> list[tuple[int, int, int]]:
    """Register tiles that fit: height, width, vectors of output channels."""
    widest = math.ceil(p.group_k / t.lanes)
    return [(tile_h, tile_w, vectors) for tile_h, tile_w in TILES if tile_h <= _highest(p)
            for vectors in range(1, min(4, widest) + 1) if fits(t, tile_h * tile_w, vectors)]


def _with_tile(p: Problem, t: Target, tile_h: int, tile_w: int, vectors: int) -> list[Schedule]:
    s = Schedule(tile_h=tile_h, tile_w=tile_w, vectors=vectors, unroll=_unroll(p), block_rows=1,
                 block_cols=1, split=1, k_parts=1,
                 streaming=streams(p, t) and p.group_k % t.lanes == 0)
    if not skips(p):
        return [_with_blocks(p, t, s)]
    # taps far apart use a weight seldom, so that fewer channels at a time may pay
    splits = (1, 2, 4, 8) if p.grid is None else (1,)
    return [_with_blocks(p, t, s, split) for split in splits if p.group_c % split == 0]


def _unroll(p: Problem) -> int:
    """Of few steps, a rest that is not unrolled takes longer than unrolling saves."""
    steps = p.group_c * (p.s if p.dilation[1] == 1 else 1)
    if steps % 4 == 0 or steps > 16:
        return 4
    return 2 if steps > 4 else 1


def _with_blocks(p: Problem, t: Target, s: Any, split: int | None = None) -> Schedule:
    """The highest block whose input fits half the second cache and still feeds eight threads."""
    k_blocks = math.ceil(p.group_k / (t.lanes * s.vectors))
    tile_rows, images = math.ceil(p.conv_h / s.tile_h), p.n * p.groups
    row_bytes = 4 * p.group_c * p.padded_w * s.tile_h * p.stride[0]
    if skips(p):
        row_bytes = 4 * p.group_c // (split or 1) * p.w * p.stride[0]
    high = 1
    for block in ROWS[1:]:
        if (block // 2 < tile_rows and block * row_bytes <= t.l2 / 2
                and images * math.ceil(tile_rows / block) * min(8, k_blocks) >= 8):
            high = block
    tasks = images * math.ceil(tile_rows / high)
    parts = next((k for k in (1, 2, 4, 8) if k * tasks >= 8 or 2 * k > k_blocks), 1)
    if split is None:
        split = 1
        few = parts * tasks < 4 and p.grid is None  # tiles
        if few and p.group_c * p.r * p.s >= 1024:  # and long sums
            split = next(x for x in (4, 2, 1) if p.group_c % x == 0)
    return s.with_(block_rows=high, block_cols=_most_cols(p, s.tile_w), k_parts=parts, split=split,
                   streaming=s.streaming and split == 1)


def row_cycles(t: Target, width: int, tile: tuple[int, int, int], steps: int,
               pitch: int) -> float:
    """All register tiles of a row of tiles, each against one block of output channels.

    Pixels that are neighbours in a tile lie `pitch` bytes apart.
    """
    tile_h, tile_w, vectors = tile
    pieces = zip(piece_sizes(tile_w), counts(width, tile_w, vectors * tile_h), strict=True)
    slower = 1.0 if tile_h == 1 else ROWS_APART
    return slower * sum(count * tile_cycles(t, tile_h * size, vectors, steps, pitch)
                        for size, count in pieces if count)


def apart(p: Problem) -> int:
    """Bytes from a pixel that an output sees to the one that the next sees."""
    return 4 * p.group_c * p.stride[1]


def _image_cycles(p: Problem, t: Target, tile: tuple[int, int, int], split: int) -> float:
    """All register tiles of an image, each against one block of output channels."""
    steps = p.r * p.s * p.group_c // split
    if not skips(p):
        return math.ceil(p.conv_h / tile[0]) * row_cycles(t, p.conv_w, tile, steps,
                                                                   apart(p))
    _, tile_w, vectors = tile
    sizes, total = piece_sizes(tile_w), 0.0
    for columns, across in cols_seen(p):
        pieces = [(size, n) for size, n in zip(sizes, fitted(columns, sizes), strict=True) if n]
        for rows, down in rows_seen(p):
            steps = p.group_c // split * down * across
            total += rows * sum(n * tile_cycles(t, size, vectors, steps, apart(p))
                                for size, n in pieces)
    return total


def _far_cycles(p: Problem, t: Target, s: Any) -> float:
    """To bring weights to every register tile, where those of a row of tiles do not stay near."""
    if not skips(p):
        return 0.0
    down = sum(rows * taps for rows, taps in rows_seen(p))  # taps of a column of outputs
    tap = 4.0 * p.group_c // s.split * s.vectors * t.lanes
    if tap * p.s * down / p.conv_h < t.l2 / 2:
        return 0.0
    sizes = piece_sizes(s.tile_w)
    across = sum(taps * sum(fitted(columns, sizes)) for columns, taps in cols_seen(p))
    blocks = p.n * p.groups * math.ceil(p.group_k / t.lanes / s.vectors) * s.split
    return blocks * tap * down * across / FAR


def _cost(p: Problem, t: Target, s: Any) -> float:
    k_vectors = math.ceil(p.group_k / t.lanes)
    tile_rows = math.ceil(p.conv_h / s.tile_h)
    image = _image_cycles(p, t, (s.tile_h, s.tile_w, s.vectors), s.split)
    images = p.n * p.groups * k_vectors / s.vectors * s.split
    row_blocks = math.ceil(tile_rows / s.block_rows)
    overlap = 1 + (p.span_h - p.stride[0]) / max(1, s.block_rows * s.tile_h * p.stride[0])
    read = max(1.0, overlap) * s.k_parts
    packed = 0.0
    if (p.is_padded or p.dtype != "f32") and not skips(p):
        packed = 4 * p.n * p.c * p.padded_h * p.padded_w * read / 16
    if p.groups > 1 and not skips(p):
        packed += GATHER * p.n * p.groups * p.h * p.w * read
    stream = p.weight_bytes * p.n * row_blocks / t.lanes / 2  # weights pass once for every block
    apart = p.output_bytes / 8 if s.k_parts > 1 else 0  # tasks write into each other's pixels
    tasks = p.n * p.groups * row_blocks * s.k_parts * s.split
    extra = 2 * p.output_bytes * s.split if s.split > 1 else 0
    pooling = 0.0
    if p.epilogue.pool > 1:
        whole = p.output_bytes * p.epilogue.pool ** 2
        extra, pooling = extra + whole - p.output_bytes, REGION + traffic(t, 2 * whole)
    products, far = image * images, _far_cycles(p, t, s)
    cycles = max(products, far) + 0.3 * min(products, far) + packed + stream + apart
    return pooling + seconds(t, cycles, p.image_bytes + extra, tasks, 1 if s.split == 1 else 2,
                             weight_traffic(p, t))
