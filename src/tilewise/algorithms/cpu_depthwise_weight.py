"""Gradients of depthwise weights: one filter a channel."""

from __future__ import annotations

import math
from typing import Any

from ..core.algorithm import EPS32, storing_error
from ..core.cost import seconds
from ..core.problem import Problem
from ..core.schedule import Schedule, Space
from ..core.target import Target
from .common import CpuAlgorithm, cpu_f32_weight
from .cpu_depthwise import is_depthwise
from .cpu_winograd_weight import PARTS


class CpuDepthwiseWeight(CpuAlgorithm):
    """Channels in the lanes; every tap has a sum of its own."""

    name = "cpu_depthwise_weight"
    version = 1
    directions = frozenset({"backward_weight"})
    fuses = frozenset()

    def kernel(self) -> Any:
        from ..kernels.cpu.conv import depthwise_weight

        return depthwise_weight

    def reject(self, p: Problem, t: Target) -> list[str]:
        return cpu_f32_weight(p, t, halves=True) + is_depthwise(p)

    def error(self, p: Problem, t: Target, s: Any) -> float:
        depth = math.sqrt(p.conv_w) + math.sqrt(p.n * p.conv_h)
        return EPS32 * (2 + depth) + storing_error(p.dtype)

    def space(self, p: Problem, t: Target) -> Space:
        def legal(s: Any) -> bool:
            return (s.vectors - 1) * t.lanes < p.c

        return Space(legal, vectors=(1, 2, 3, 4, 6), parts=PARTS)

    def default(self, p: Problem, t: Target) -> Schedule:
        vectors = max(v for v in (1, 2, 3, 4, 6) if (v - 1) * t.lanes < p.c)
        return Schedule(vectors=vectors, parts=max(n for n in PARTS if n <= t.threads))

    def cost(self, p: Problem, t: Target, s: Any) -> float:
        vectors = math.ceil(p.c / t.lanes)
        taps = p.n * p.conv_h * p.r * p.s * vectors
        cycles = taps * (p.conv_w * max(1.2, 4 / s.vectors) + 8)
        return seconds(t, cycles, p.bytes, s.parts, 2)
