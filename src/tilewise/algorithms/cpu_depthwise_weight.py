"""Gradients of weights of depthwise convolutions, and of groups of few channels."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from ..core.algorithm import EPS32, storing_error
from ..core.cost import seconds
from ..core.problem import Problem
from ..core.schedule import Schedule, Space
from ..core.target import Target
from .common import CpuAlgorithm, cpu_f32_weight
from .cpu_depthwise import MOST
from .cpu_winograd_weight import PARTS

VECTORS, ROWS = (1, 2, 3, 4, 6), (1, 2, 3, 4, 6, 8, 12, 16, 24)
WIDEST = 4  # vectors of a group's channels
PIXELS = 192  # summed in registers
LATENCY = 4  # cycles until a sum can be added to again
LINE, SUMS = 12.0, 3.0  # cycles beside the products: of a row of pixels, and to add up a vector


class CpuDepthwiseWeight(CpuAlgorithm):
    """Channels in the lanes; every tap has a sum of its own with each filter of the group."""

    name = "cpu_depthwise_weight"
    version = 2
    directions = frozenset({"backward_weight"})
    fuses = frozenset()

    def kernel(self) -> Any:
        from ..kernels.cpu.conv import depthwise_weight

        return depthwise_weight

    def reject(self, p: Problem, t: Target) -> list[str]:
        reasons = cpu_f32_weight(p, t, halves=True)
        if p.groups == 1 < p.c:
            reasons.append("groups is 1, needs several")
        if t.device == "cpu" and p.group_c > WIDEST * t.lanes:
            reasons.append(f"{p.group_c} channels in a group, needs at most {WIDEST * t.lanes}")
        if p.r * p.s > MOST:
            reasons.append(f"filter is {p.r}x{p.s}, needs at most {MOST} taps")
        return reasons

    def error(self, p: Problem, t: Target, s: Any) -> float:
        items = max(PIXELS, p.conv_w)
        depth = math.sqrt(items) + math.sqrt(p.terms / items)
        return EPS32 * (2 + depth) + storing_error(p.dtype)

    def space(self, p: Problem, t: Target) -> Space:
        return Space(lambda s: _fits(p, t, s), vectors=VECTORS, rows=_rows(p), parts=PARTS)

    def default(self, p: Problem, t: Target) -> Schedule:
        return _default(p, t)

    def cost(self, p: Problem, t: Target, s: Any) -> float:
        vectors, rows = int(s.vectors), int(s.rows)
        pixel = max(_products(p, t, s), LATENCY)  # of a block
        chunk = max(1, PIXELS // p.conv_w) * p.conv_w
        block = pixel + LINE / p.conv_w + SUMS * vectors * rows / chunk
        channels = p.c if _shares(p, t) else p.group_c
        blocks = (1 if _shares(p, t) else p.groups * math.ceil(p.group_k / rows)) * max(
            1.0, math.ceil(channels / t.lanes) / vectors)
        cycles = p.terms * p.r * p.s * blocks * block + p.k * p.group_c * p.r * p.s * 2
        return seconds(t, cycles, p.bytes, s.parts, 2)


def _shares(p: Problem, t: Target) -> bool:
    """Whether several groups share a vector."""
    return p.group_c == p.group_k < t.lanes and t.lanes % p.group_c == 0


def _rows(p: Problem) -> tuple[int, ...]:
    """Also all filters of a group at once."""
    return tuple(sorted({*ROWS, p.group_k}))


def _products(p: Problem, t: Target, s: Any) -> float:
    """Cycles of a pixel in a block: shuffles take the units that products take."""
    vectors, rows = int(s.vectors), int(s.rows)
    if not _shares(p, t):
        return max(vectors * rows / t.starts, (vectors + rows) / 2)
    both = 1 if rows == 1 else 2
    return max(both * vectors * rows / t.starts, float(vectors))


def _fits(p: Problem, t: Target, s: Any) -> bool:
    """Sums, inputs, and a gradient in registers; no block is wider than its channels."""
    vectors, rows = int(s.vectors), int(s.rows)
    if not _shares(p, t):
        return (vectors - 1) * t.lanes < p.group_c and rows <= p.group_k and (
            vectors * (rows + 1) + 1 <= t.registers)
    return rows == p.group_c and (vectors - 1) * t.lanes < p.c and (
        vectors * (rows + 2) + 1 <= t.registers or vectors == 1)


@lru_cache(maxsize=4096)
def _default(p: Problem, t: Target) -> Schedule:
    """The cheapest block by the cost model; all threads with a part each."""
    algorithm, parts = CpuDepthwiseWeight(), max(n for n in PARTS if n <= t.threads)
    found = [Schedule(vectors=vectors, rows=rows, parts=parts) for vectors in VECTORS
             for rows in _rows(p)
             if _fits(p, t, Schedule(vectors=vectors, rows=rows, parts=parts))]
    return min(found, key=lambda s: algorithm.cost(p, t, s))
