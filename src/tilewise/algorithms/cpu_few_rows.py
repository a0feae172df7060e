"""Linear layers of few rows: all that counts is how many bytes of weights are read."""

from __future__ import annotations

import math
from typing import Any

from ..core.algorithm import accumulation_error, rounding_error, storing_error
from ..core.cost import seconds
from ..core.problem import Problem
from ..core.schedule import Schedule, Space
from ..core.target import Target
from .common import CpuAlgorithm, cpu_f32_forward

# leading bits of a weight's value by those in memory, of which the first is not stored
KEPT = {32: 24, 24: 16, 16: 8}
LEAST = 4 << 20  # bytes of a weight that are worth a call
NARROWEST = 256  # with fewer values a row, adding up lanes takes longer than reading them
TOGETHER = 4  # rows that share the weights in registers
AGAIN = 0.8  # of the time for the first of them that the next take
TORCH = 1.02  # torch reads float32 as fast; it is what a caller had before


EXACT = {"bf16": 16, "f16": 24}  # bits that hold all of such a weight


def _bytes(p: Problem) -> int:
    """Of the weight in float32."""
    return 4 * p.k * p.c


class CpuFewRows(CpuAlgorithm):
    """Reads the weight as it is, or rounded to 24 or 16 bits; products and sums are float32."""

    name = "cpu_few_rows"
    version = 2

    def __init__(self, stored: int = 32) -> None:
        self.stored, self.bits, self.more = stored, KEPT[stored], (stored,)
        if stored < 32:
            self.name = f"{self.name}_{stored}"

    def kernel(self) -> Any:
        from ..kernels.cpu.conv import few_rows

        return few_rows

    def reject(self, p: Problem, t: Target) -> list[str]:
        reasons = cpu_f32_forward(p, t, halves=EXACT.get(p.dtype) == self.stored)
        if not p.is_linear:
            reasons.append(f"filter is {p.r}x{p.s}, image is {p.h}x{p.w}, padding is {p.padding}, "
                           f"groups is {p.groups}, needs 1x1, 1x1, 0 and 1")
        if p.c < NARROWEST:
            reasons.append(f"input channels are {p.c}, needs at least {NARROWEST}")
        if _bytes(p) < LEAST:
            reasons.append(f"weight has {_bytes(p)} bytes, needs at least {LEAST}")
        return reasons

    def error(self, p: Problem, t: Target, s: Schedule) -> float:
        rounded = rounding_error(self.bits, p.c) if p.dtype == "f32" else 0.0
        return accumulation_error(p.c) + rounded + storing_error(p.dtype)

    def weight_of(self, p: Problem, s: Any) -> tuple[Problem, Schedule]:
        return p.weight, Schedule()

    def space(self, p: Problem, t: Target) -> Space:
        return Space(streams=(2, 4, 8))

    def default(self, p: Problem, t: Target) -> Schedule:
        return Schedule(streams=4)

    def cost(self, p: Problem, t: Target, s: Any) -> float:
        cycles = p.n * p.k * p.c / t.lanes / t.starts
        times = 1 + AGAIN * (math.ceil(p.n / TOGETHER) - 1)
        return seconds(t, cycles, p.image_bytes, 0,
                       weights=TORCH * times * _bytes(p) * self.stored / 32)

    def prepare(self, p: Problem, t: Target, s: Schedule, weight: Any) -> Any:
        from ..kernels.cpu.prepare import few_rows as few_rows_prepare

        if self.stored == 32:
            return weight.contiguous()
        return few_rows_prepare.prepare(*self.weight_of(p, s), t, weight, self.stored)
