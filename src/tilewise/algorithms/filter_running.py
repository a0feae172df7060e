"""Least and largest values of rectangles, in a few steps whatever their size."""

from __future__ import annotations

import math
from typing import Any

from ..core.cost import seconds
from ..core.schedule import Schedule, Space
from ..core.target import Target
from .filter_common import CpuFilter, can_stream, narrow_strip, ordered_lanes


class FilterRunning(CpuFilter):
    """Windows that double: down in place, then across."""

    name = "filter_running"
    version = 1
    forms = frozenset({"order"})

    def kernel(self) -> Any:
        from ..kernels.cpu.image import running

        return running

    def seen_by_kernel(self, p: Any) -> Any:
        return p.with_(rank=0)

    def reject(self, p: Any, t: Target) -> list[str]:
        reasons = super().reject(p, t)
        if not p.is_extreme:
            reasons.append(f"order is {p.order} of {p.taps}, needs the first or the last")
        if p.footprint:
            reasons.append("footprint has gaps, needs a whole rectangle")
        return reasons

    def error(self, p: Any, t: Target, s: Schedule) -> float:
        return 0.0

    def space(self, p: Any, t: Target) -> Space:
        streams = (False, True) if can_stream(p, t) else (False,)
        return Space(rows=(1, 4, 8), vectors=(1, 2, 4), strip=(256, 512, 1024, 2048, 4096),
                     stream=streams)

    def default(self, p: Any, t: Target) -> Schedule:
        return Schedule(rows=4, vectors=2, strip=narrow_strip(p, 2048), stream=can_stream(p, t))

    def cost(self, p: Any, t: Target, s: Any) -> float:
        doublings = sum(math.ceil(math.log2(size)) for size in (p.r, p.s))
        cycles = (5 + 2 * doublings) * p.pixels / ordered_lanes(p, t)
        return seconds(t, cycles, p.bytes, max(1, math.ceil(p.n * p.h / 32)))
