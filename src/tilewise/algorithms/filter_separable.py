"""Filters whose kernel is a sum of few products of a column and a row."""

from __future__ import annotations

import math
from typing import Any

from ..core.algorithm import accumulation_error
from ..core.cost import seconds
from ..core.lowrank import TOLERANCE
from ..core.schedule import Schedule
from ..core.target import Target
from .filter_common import CpuFilter, can_stream, fits, strip, tile


class FilterSeparable(CpuFilter):
    """Down, then across: rank * (r + s) taps instead of r * s."""

    name = "filter_separable"
    version = 1

    def kernel(self) -> Any:
        from ..kernels.cpu.image import separable

        return separable

    def reject(self, p: Any, t: Target) -> list[str]:
        reasons = super().reject(p, t)
        if not 0 < p.rank * (p.r + p.s) < p.r * p.s:
            reasons.append(f"rank is {p.rank or 'unknown'} for a kernel of {p.r}x{p.s}, needs "
                           f"at most {max(1, (p.r * p.s - 1) // (p.r + p.s))}")
        return reasons

    def error(self, p: Any, t: Target, s: Schedule) -> float:
        return 2 * accumulation_error(p.rank * (p.r + p.s), p.work) + 2 * TOLERANCE[p.work]

    def default(self, p: Any, t: Target) -> Schedule:
        rows, vectors = tile(p, t)
        chunk = max(n for n in range(1, 17) if n <= p.r and fits(t, rows, vectors, n))
        return Schedule(rows=rows, vectors=vectors, strip=strip(p, 1024), chunk=chunk,
                        stream=can_stream(p, t))

    def cost(self, p: Any, t: Target, s: Any) -> float:
        slow = 1.0 if t.row.fma else 2.0
        down = p.r * max(slow / t.starts, 0.5 * (s.rows + s.chunk - 1) / s.rows / s.chunk) + 3
        across = p.s * 1.1 * slow + 1  # a load that crosses cache lines for each tap
        lanes = t.lanes // (2 if p.work == "f64" else 1)
        cycles = p.rank * (down + across) + 4
        return seconds(t, cycles * p.pixels / lanes, p.bytes, max(1, math.ceil(p.n * p.h / 32)))
