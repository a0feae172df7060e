"""Depthwise convolutions: one filter a channel, or a few; and groups of few channels."""

from __future__ import annotations

import math
from typing import Any

from ..core.algorithm import accumulation_error, storing_error
from ..core.cost import seconds
from ..core.cut import counts, piece_sizes
from ..core.problem import Problem
from ..core.schedule import Schedule, Space
from ..core.target import Target
from .common import CpuAlgorithm, cpu_f32_forward

WIDTHS = (1, 2, 4, 6, 7, 8, 12, 14)
HEIGHTS = (1, 2, 4, 8, 16, 32)
MOST = 121  # taps of an output
SLOWER = 2.2  # than what units and loads allow, as measured
SHUFFLED, STRIDED = 1.5, 1.9  # the same, for groups of several channels
NEAR = 16  # columns of a tile that stay in the first cache, whatever lies between them


class CpuDepthwise(CpuAlgorithm):
    """Channels in the lanes; every loaded column meets all taps that cover it."""

    name = "cpu_depthwise"
    version = 4

    def kernel(self) -> Any:
        from ..kernels.cpu.conv import depthwise

        return depthwise

    def reject(self, p: Problem, t: Target) -> list[str]:
        return cpu_f32_forward(p, t, pitch=True, halves=True) + (
            _in_lanes(p, t.lanes) if t.device == "cpu" else [])

    def error(self, p: Problem, t: Target, s: Schedule) -> float:
        return accumulation_error(p.group_c * p.r * p.s) + storing_error(p.dtype)

    def space(self, p: Problem, t: Target) -> Space:
        def legal(s: Any) -> bool:
            return bool(s.tile_w + min(p.s, 4) + 1 <= t.registers)

        return Space(legal, tile_w=WIDTHS, block_rows=HEIGHTS)

    def default(self, p: Problem, t: Target) -> Schedule:
        wide = t.with_(threads=4)  # the same for every number of threads
        space = self.space(p, t)
        return min(space, key=lambda s: self.cost(p, wide, s))

    def weight_of(self, p: Problem, s: Any) -> tuple[Problem, Schedule]:
        return p.weight, Schedule()

    def adapted(self, p: Problem, t: Target, s: Schedule) -> Schedule:
        wide = t.with_(threads=4)
        return min((s.with_(block_rows=rows) for rows in HEIGHTS),
                   key=lambda s: self.cost(p, wide, s))

    def cost(self, p: Problem, t: Target, s: Any) -> float:
        rows = p.n * p.conv_h * math.ceil(p.k / t.lanes)
        return seconds(t, _row_cycles(p, t, s.tile_w) * rows, p.bytes,
                       p.n * math.ceil(p.conv_h / s.block_rows))


def _row_cycles(p: Problem, t: Target, tile_w: int) -> float:
    """All tiles of a row, for one vector of channels."""
    pieces = zip(piece_sizes(tile_w), counts(p.conv_w, tile_w), strict=True)
    return sum(count * _tile_cycles(p, t, width) for width, count in pieces)


def _tile_cycles(p: Problem, t: Target, width: int) -> float:
    columns = (width - 1) * p.stride[1] + p.s
    if p.group_c == 1:
        row = max(width * p.s / t.starts, (columns + p.s) / 2) + 3
        return SLOWER * (p.r * row + 3 * width + 12)
    row = (width * p.s + columns) / t.starts + 3  # shuffles take the units that products take
    row += max(0, columns - NEAR)
    slower = SHUFFLED if p.stride == (1, 1) else STRIDED
    return slower * (p.r * p.group_c * row + 3 * width + 12)


def _in_lanes(p: Problem, lanes: int) -> list[str]:
    """What lanes full of channels ask for: whole groups in a vector of outputs."""
    reasons = []
    if lanes % p.group_k or p.group_k % p.group_c or p.groups == 1 < p.c:
        reasons.append(f"groups is {p.groups} for {p.c} input and {p.k} output channels, needs "
                       f"several, each with outputs that divide {lanes} and inputs that divide "
                       "its outputs")
    most = MOST // p.group_c  # taps are unrolled
    if p.r * p.s > most:
        reasons.append(f"filter is {p.r}x{p.s}, needs at most {most} taps")
    return reasons
