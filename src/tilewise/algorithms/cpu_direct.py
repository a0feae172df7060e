"""Implicit GEMM: any filter, stride, padding, dilation and grouping, no unrolled input."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from ..core.algorithm import Algorithm, accumulation_error
from ..core.cost import seconds, tile_cycles
from ..core.problem import Problem
from ..core.schedule import Schedule, Space
from ..core.target import Target
from .common import cpu_f32_forward, fits

TILES = ((1, 14), (1, 12), (1, 8), (1, 6), (1, 4), (1, 28), (1, 24), (1, 16), (1, 2), (1, 1),
         (2, 14), (2, 12), (2, 8), (2, 7), (2, 6), (2, 4), (2, 3), (2, 2), (4, 7), (4, 3), (3, 4))


class CpuDirect(Algorithm):
    """Packs padded rectangles of the input, multiplies them in register tiles."""

    name = "cpu_direct"
    version = 1
    fuses = frozenset({"bias", "residual", "relu"})

    def reject(self, p: Problem, t: Target) -> list[str]:
        return cpu_f32_forward(p, t)

    def error(self, p: Problem, t: Target, s: Schedule) -> float:
        return accumulation_error(p.group_c * p.r * p.s)

    def space(self, p: Problem, t: Target) -> Space:
        return _channel_space(p, t) | _pixel_space(p, t)

    def default(self, p: Problem, t: Target) -> Schedule:
        return _default(p.with_(frozen=False), t.with_(threads=1))

    def cost(self, p: Problem, t: Target, s: Schedule) -> float:
        return _pixel_cost(p, t, s) if s["lanes"] == "pixels" else _channel_cost(p, t, s)

    def workspace(self, p: Problem, t: Target, s: Schedule) -> int:
        return int(_kernels(s).Geometry(p, s, t.lanes).scratch_bytes(t.threads))

    def prepare(self, p: Problem, t: Target, s: Schedule, weight: Any) -> Any:
        from ..kernels.cpu import memory

        return memory.keep(_kernels(s).Geometry(p, s, t.lanes).pack_weight(weight))

    def build(self, p: Problem, t: Target, s: Schedule) -> Any:
        from ..kernels.cpu.launch import launcher

        return launcher(_kernels(s).make, p, s, t.row)


def _kernels(s: Schedule) -> Any:
    from ..kernels.cpu import direct, direct_pixels

    return direct_pixels if s["lanes"] == "pixels" else direct


def _channel_space(p: Problem, t: Target) -> Space:
    def legal(s: Any) -> bool:
        return (fits(t, s.tile_h * s.tile_w, s.vectors) and s.tile_h <= p.conv_h
                and s.tile_w <= p.conv_w and p.group_c % s.split == 0
                and s.k_parts <= math.ceil(p.group_k / (t.lanes * s.vectors))
                and _rows(p, s.tile_h, s.block_rows) and s.block_cols <= _most_cols(p, s.tile_w))

    rows, cols = sorted({h for h, _ in TILES}), sorted({w for _, w in TILES})
    return Space(legal, lanes=("channels",), tile_h=tuple(rows), tile_w=tuple(cols),
                 vectors=(1, 2, 3, 4), unroll=(1, 2, 4, 8), block_rows=(1, 2, 4, 7, 8, 14, 16, 28),
                 block_cols=(1, 4, 16, 64, 1024), split=(1, 2, 4, 8), k_parts=(1, 2, 4, 8))


def _rows(p: Problem, tile_h: int, block_rows: int) -> bool:
    """Blocks higher than the image are the same as one as high."""
    return block_rows == 1 or block_rows // 2 < math.ceil(p.conv_h / tile_h)


def _most_cols(p: Problem, tile_w: int) -> int:
    tiles = math.ceil(p.conv_w / tile_w)
    return 1024 if tiles > 64 else next(b for b in (1, 4, 16, 64) if b >= tiles)


def _pixel_space(p: Problem, t: Target) -> Space:
    def legal(s: Any) -> bool:
        return (p.stride[1] == 1 and fits(t, s.tile_k, s.vectors) and s.tile_k <= p.group_k
                and s.vectors <= math.ceil(p.conv_w / t.lanes)
                and (s.block_rows == 1 or s.block_rows // 2 < p.conv_h))

    return Space(legal, lanes=("pixels",), tile_k=tuple(range(1, t.lanes + 1)),
                 vectors=(1, 2, 3, 4, 5, 6), unroll=(1, 2, 4, 8),
                 block_rows=(1, 2, 4, 8, 16, 32, 64))


@lru_cache(maxsize=4096)
def _default(p: Problem, t: Target) -> Schedule:
    """The cheapest of a few by the cost model; the same for every number of threads."""
    algorithm, wide = CpuDirect(), t.with_(threads=4)
    return min(_likely(p, t), key=lambda s: algorithm.cost(p, wide, s))


def _likely(p: Problem, t: Target) -> list[Schedule]:
    found = [s for tile in TILES for s in _channel_schedules(p, t, *tile)]
    if p.stride[1] == 1 and p.group_c <= 16 and p.group_k <= 4 * t.lanes:
        found += _pixel_schedules(p, t)
    return found


def _channel_schedules(p: Problem, t: Target, tile_h: int, tile_w: int) -> list[Schedule]:
    if tile_h > p.conv_h or tile_w > p.conv_w:
        return []
    found = []
    for vectors in (1, 2, 3, 4):
        if not fits(t, tile_h * tile_w, vectors) or (vectors - 1) * t.lanes >= p.group_k:
            continue
        s = Schedule(lanes="channels", tile_h=tile_h, tile_w=tile_w, vectors=vectors, unroll=4,
                     block_rows=1, block_cols=_most_cols(p, tile_w), split=1, k_parts=1)
        found.append(_with_blocks(p, t, s))
    return found


def _with_blocks(p: Problem, t: Target, s: Any) -> Schedule:
    """The highest block whose input fits half the second cache and still feeds eight threads."""
    k_blocks = math.ceil(p.group_k / (t.lanes * s.vectors))
    row_bytes = 4 * p.group_c * p.padded_w * s.tile_h * p.stride[0]
    high = 1
    for block in (2, 4, 7, 8, 14, 16, 28):
        blocks = math.ceil(math.ceil(p.conv_h / s.tile_h) / block)
        if (_rows(p, s.tile_h, block) and block * row_bytes <= t.l2 / 2
                and p.n * p.groups * blocks * min(8, k_blocks) >= 8):
            high = block
    tasks = p.n * p.groups * math.ceil(math.ceil(p.conv_h / s.tile_h) / high)
    parts = next((k for k in (1, 2, 4, 8) if k * tasks >= 8 or 2 * k > k_blocks), 1)
    split = 1
    if parts * tasks < 4 and p.group_c * p.r * p.s >= 1024:  # few tiles, long sums
        split = next(x for x in (4, 2, 1) if p.group_c % x == 0)
    return s.with_(block_rows=high, k_parts=parts, split=split)


def _pixel_schedules(p: Problem, t: Target) -> list[Schedule]:
    found = []
    for tile_k in range(1, min(t.lanes, p.group_k) + 1):
        for vectors in range(1, min(6, math.ceil(p.conv_w / t.lanes)) + 1):
            if fits(t, tile_k, vectors):
                found.append(Schedule(lanes="pixels", tile_k=tile_k, vectors=vectors, unroll=8,
                                      block_rows=_pixel_rows(p, t)))
    return found


def _pixel_rows(p: Problem, t: Target) -> int:
    row_bytes = 4 * p.group_c * p.padded_w * p.stride[0]
    return max(b for b in (1, 2, 4, 8, 16, 32, 64)
               if b == 1 or (b // 2 < p.conv_h and b * row_bytes <= t.l2 / 8))


def _channel_cost(p: Problem, t: Target, s: Any) -> float:
    k_vectors = math.ceil(p.group_k / t.lanes)
    tile_rows, tile_cols = math.ceil(p.conv_h / s.tile_h), math.ceil(p.conv_w / s.tile_w)
    pixels = p.conv_h * p.conv_w / (tile_rows * tile_cols)  # tiles are evened out
    steps = p.r * p.s * p.group_c
    one = tile_cycles(t, max(1, round(pixels)), s.vectors, steps // s.split)
    tiles = p.n * p.groups * tile_rows * tile_cols * k_vectors / s.vectors * s.split
    row_blocks = math.ceil(tile_rows / s.block_rows)
    overlap = 1 + (p.span_h - p.stride[0]) / max(1, s.block_rows * s.tile_h * p.stride[0])
    packed = p.input_bytes * max(1.0, overlap) * s.k_parts / 16 if any(p.padding) else 0
    stream = p.weight_bytes * p.n * row_blocks / t.lanes / 2  # weights pass once for every block
    tasks = p.n * p.groups * row_blocks * s.k_parts * s.split
    extra = 2 * p.output_bytes * s.split if s.split > 1 else 0
    return seconds(t, one * tiles + packed + stream, p.bytes + extra, tasks,
                   1 if s.split == 1 else 2)


def _pixel_cost(p: Problem, t: Target, s: Any) -> float:
    row_vectors = math.ceil(p.conv_w / t.lanes)
    strips, tiles_k = math.ceil(row_vectors / s.vectors), math.ceil(p.group_k / s.tile_k)
    vectors, channels = row_vectors / strips, p.group_k / tiles_k
    unaligned = 1.12  # most loads cross a cache line
    one = tile_cycles(t, max(1, round(channels)), max(1, round(vectors)),
                      p.r * p.s * p.group_c) * unaligned
    width = 1 << max(0, math.ceil(channels) - 1).bit_length()
    turn = vectors * (width * math.log2(width) + 1.5 * (width if width == p.k else t.lanes))
    tiles = p.n * p.groups * p.conv_h * strips * tiles_k
    unpack = p.n * p.c * p.padded_h * p.padded_w * 1.3
    tasks = p.n * p.groups * math.ceil(p.conv_h / s.block_rows)
    return seconds(t, (one + turn) * tiles + unpack, p.bytes, tasks)
