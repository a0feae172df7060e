"""1x1 convolutions: a matrix product whose rows are pixels."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from ..core.algorithm import accumulation_error, storing_error
from ..core.cost import seconds
from ..core.grid import Grid
from ..core.problem import Problem
from ..core.schedule import Schedule, Space
from ..core.target import Target
from .common import PanelAlgorithm, cpu_f32_forward, fits, streams, weight_traffic
from .cpu_direct import MET, apart, row_cycles

WIDTHS = (1, 2, 4, 6, 8, 12, 14, 24, 28)  # pixels of a register tile
ALONE = 1.2  # times as long as cpu_direct takes to read the weights of one pixel, as measured


class CpuPointwise(PanelAlgorithm):
    """Lays all pixels of an image in one row; the kernel is that of cpu_direct."""

    name = "cpu_pointwise"
    version = 5

    def kernel(self) -> Any:
        from ..kernels.cpu.conv import direct

        return direct

    def reject(self, p: Problem, t: Target) -> list[str]:
        reasons = cpu_f32_forward(p, t, grid=_is_whole(p), pitch=True, halves=True)
        if (p.r, p.s) != (1, 1):
            reasons.append(f"filter is {p.r}x{p.s}, needs 1x1")
        if any(p.padding):
            reasons.append(f"padding is {p.padding}, needs 0")
        if p.groups > 1:
            reasons.append(f"groups is {p.groups}, needs 1")
        return reasons

    def seen_by_kernel(self, p: Problem) -> Problem:
        return _in_a_row(p)

    def error(self, p: Problem, t: Target, s: Schedule) -> float:
        return accumulation_error(p.c) + storing_error(p.dtype)

    def space(self, p: Problem, t: Target) -> Space:
        def legal(s: Any) -> bool:
            return (fits(t, s.tile_w, s.vectors)
                    and s.k_parts <= math.ceil(p.k / (t.lanes * s.vectors))
                    and not (s.streaming and p.k % t.lanes))

        return Space(legal, tile_h=(1,), tile_w=WIDTHS, vectors=(1, 2, 3, 4),
                     unroll=(1, 2, 4, 8), block_rows=(1,), block_cols=(1, 2, 4, 8, 16, 32),
                     split=(1,), k_parts=(1, 2, 4, 8), streaming=(False, True))

    def default(self, p: Problem, t: Target) -> Schedule:
        return _default(p, t.with_(threads=1))

    def weight_of(self, p: Problem, s: Any) -> tuple[Problem, Schedule]:
        return p.weight, Schedule(vectors=s.vectors, split=s.split)

    def adapted(self, p: Problem, t: Target, s: Schedule) -> Schedule:
        return _with_blocks(p, t, s)

    def cost(self, p: Problem, t: Target, s: Any) -> float:
        q = _in_a_row(p)
        k_vectors, cols = math.ceil(p.k / t.lanes), math.ceil(q.conv_w / s.tile_w)
        row = row_cycles(t, q.conv_w, (1, s.tile_w, s.vectors), p.c, apart(p))
        rows = p.n * q.conv_h * k_vectors / s.vectors
        blocks = p.n * q.conv_h * math.ceil(cols / s.block_cols)
        stream = p.weight_bytes * blocks / t.lanes / 2
        weights = weight_traffic(p, t) * (ALONE if q.conv_w == 1 else 1.0)
        packed = 0.0 if p.dtype == "f32" else p.n * p.c * p.h * p.w * s.k_parts / 4
        return seconds(t, row * rows + stream + packed, p.image_bytes, blocks * s.k_parts,
                       weights=weights)


def _is_whole(p: Problem) -> bool:
    """Whether no row or column lies between those of the outputs."""
    return p.grid is not None and (p.grid.down, p.grid.across, p.grid.w) == (1, 1, p.conv_w)


@lru_cache(maxsize=256)
def _in_a_row(p: Problem) -> Problem:
    """The same pixels as one long row, where no pixel is skipped."""
    if p.stride != (1, 1):
        return p
    grid = p.grid and Grid(1, 1, 1, p.grid.h * p.grid.w, p.grid.pitch)
    return p.with_(h=1, w=p.h * p.w, grid=grid)


@lru_cache(maxsize=4096)
def _default(p: Problem, t: Target) -> Schedule:
    """The cheapest of a few by the cost model; the same for every number of threads."""
    wide, k_vectors, width = t.with_(threads=4), math.ceil(p.k / t.lanes), _in_a_row(p).conv_w
    tiles = [(tile, vectors) for tile in WIDTHS if tile <= width
             for vectors in range(1, min(4, k_vectors) + 1) if fits(t, tile, vectors)]
    best = sorted(tiles, key=lambda tile: row_cycles(t, width, (1, *tile), p.c, apart(p))
                  * math.ceil(k_vectors / tile[1]))[:MET]
    streaming = streams(p, t) and p.k % t.lanes == 0
    found = [_with_blocks(p, t, Schedule(
        tile_h=1, tile_w=tile, vectors=vectors, unroll=4, block_rows=1, block_cols=1, split=1,
        k_parts=1, streaming=streaming)) for tile, vectors in best]
    return min(found, key=lambda s: CpuPointwise().cost(p, wide, s))


def _with_blocks(p: Problem, t: Target, s: Any) -> Schedule:
    """The widest block whose input fits half the second cache and still feeds eight threads."""
    q, k_blocks = _in_a_row(p), math.ceil(p.k / (t.lanes * s.vectors))
    tiles = math.ceil(q.conv_w / s.tile_w)
    block = max(b for b in (1, 2, 4, 8, 16, 32)
                if b == 1 or (b * s.tile_w * p.c * 4 <= t.l2 / 2 and b < 2 * tiles
                              and p.n * q.conv_h * math.ceil(tiles / b) >= 8))
    tasks = p.n * q.conv_h * math.ceil(tiles / block)
    parts = next((k for k in (1, 2, 4, 8) if k * tasks >= 8 or 2 * k > k_blocks), 1)
    return s.with_(block_cols=block, k_parts=parts)
