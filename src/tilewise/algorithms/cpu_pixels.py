"""Direct convolution with neighbouring pixels in the lanes, for layers with few channels."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from ..core.algorithm import accumulation_error
from ..core.cost import LINE, seconds, tile_cycles
from ..core.cut import counts, piece_sizes
from ..core.problem import Problem
from ..core.schedule import Schedule, Space
from ..core.target import Target
from .common import CpuAlgorithm, cpu_f32_forward, fits, weight_traffic

ROWS = (1, 2, 4, 8, 16, 32, 64)
VECTORS = (1, 2, 3, 4, 5, 6)
PLANES_FAR = 1.0  # cycles to read a value of planes that do not fit the second cache
NEAR, FAR = 2.0, 5.0  # cycles to read a value between those of other channels, by its row's size


class CpuPixels(CpuAlgorithm):
    """Rows of pixels in vectors, weights broadcast; at home in planes, turns for channels-last."""

    name = "cpu_pixels"
    version = 2
    layouts = frozenset({"nhwc", "nchw"})

    def kernel(self) -> Any:
        from ..kernels.cpu.conv import pixels

        return pixels

    def reject(self, p: Problem, t: Target) -> list[str]:
        reasons = cpu_f32_forward(p, t)
        if p.stride[1] != 1:
            reasons.append(f"horizontal stride is {p.stride[1]}, needs 1")
        return reasons

    def error(self, p: Problem, t: Target, s: Schedule) -> float:
        return accumulation_error(p.group_c * p.r * p.s)

    def space(self, p: Problem, t: Target) -> Space:
        def legal(s: Any) -> bool:
            return fits(t, s.tile_k, s.vectors) and s.tile_k <= p.group_k

        return Space(legal, tile_k=tuple(range(1, t.lanes + 1)), vectors=VECTORS,
                     unroll=(1, 2, 4, 8), block_rows=ROWS)

    def default(self, p: Problem, t: Target) -> Schedule:
        return _default(p, t.with_(threads=1))

    def weight_of(self, p: Problem, s: Any) -> tuple[Problem, Schedule]:
        return p.weight, Schedule(tile_k=s.tile_k)

    def adapted(self, p: Problem, t: Target, s: Schedule) -> Schedule:
        return s.with_(block_rows=_block_rows(p, t))

    def cost(self, p: Problem, t: Target, s: Any) -> float:
        tiles_k = math.ceil(p.group_k / s.tile_k)
        big = math.ceil(p.group_k / tiles_k)  # other tiles have one channel less
        smaller = tiles_k * big - p.group_k
        row = (tiles_k - smaller) * _row_cycles(p, t, s, big)
        row += smaller * _row_cycles(p, t, s, big - 1) if smaller else 0.0
        # a pixel that is written in pieces travels more than once
        pieces = p.output_bytes / 3 if p.layout == "nhwc" and tiles_k > 1 else 0.0
        cycles = row * p.n * p.groups * p.conv_h + _unpack(p, t, s) + pieces
        tasks = p.n * p.groups * math.ceil(p.conv_h / s.block_rows)
        return seconds(t, cycles, p.image_bytes, tasks, weights=weight_traffic(p, t))


def _row_cycles(p: Problem, t: Target, s: Any, channels: int) -> float:
    """All register tiles of a row, for one tile of output channels."""
    turn, crossing = _turn(p, t, channels), 1.12  # most loads cross a cache line
    found = counts(math.ceil(p.conv_w / t.lanes), s.vectors, channels)
    pieces = zip(piece_sizes(s.vectors), found, strict=True)
    return sum(count * (turn * size + crossing * tile_cycles(t, channels, size,
                                                             p.r * p.s * p.group_c))
               for size, count in pieces if count)


def _turn(p: Problem, t: Target, channels: int) -> float:
    """Cycles to transpose and store one vector of pixels."""
    if p.layout == "nchw":
        return channels
    width = 1 << (channels - 1).bit_length()
    return width * math.log2(width) + 1.5 * (width if width == p.k else t.lanes)


def _unpack(p: Problem, t: Target, s: Any) -> float:
    """Cycles to bring the input into planes; blocks unpack the rows between them twice."""
    blocks, between = math.ceil(p.conv_h / s.block_rows), max(0, p.span_h - p.stride[0])
    values = p.n * p.c * (p.padded_h + (blocks - 1) * between) * p.padded_w
    if p.layout == "nchw" or p.c == 1:
        return values * (2 / t.lanes if 4 * p.c * p.h * p.w <= t.l2 else PLANES_FAR)
    # a row is read once for every channel, and tasks of other groups need the same cache lines
    near = 4 * p.c * p.w <= t.l1 and (p.groups == 1 or 4 * p.group_c >= LINE)
    return values * (NEAR if near else FAR)


@lru_cache(maxsize=4096)
def _default(p: Problem, t: Target) -> Schedule:
    """The cheapest by the cost model; the same for every number of threads."""
    algorithm, wide, rows = CpuPixels(), t.with_(threads=4), _block_rows(p, t)
    likely = [Schedule(tile_k=tile_k, vectors=vectors, unroll=8, block_rows=rows)
              for tile_k in range(1, min(t.lanes, p.group_k) + 1)
              for vectors in VECTORS[:math.ceil(p.conv_w / t.lanes)] if fits(t, tile_k, vectors)]
    return min(likely, key=lambda s: algorithm.cost(p, wide, s))


def _block_rows(p: Problem, t: Target) -> int:
    """The highest block whose planes fit an eighth of the second cache."""
    row_bytes = 4 * p.group_c * p.padded_w * p.stride[0]
    return max(b for b in ROWS if b == 1 or (b // 2 < p.conv_h and b * row_bytes <= t.l2 / 8))
