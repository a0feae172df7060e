"""Means of small rectangles of bytes, in 16-bit integers."""

from __future__ import annotations

import math
from typing import Any

from ..core.cost import seconds
from ..core.quotients import is_exact
from ..core.schedule import Schedule, Space
from ..core.target import Target
from .filter_common import BytesFilter, strip


class FilterMeans(BytesFilter):
    """Down, then across; quotients are upper halves of products."""

    name = "filter_means"
    version = 1
    forms = frozenset({"means"})

    def kernel(self) -> Any:
        from ..kernels.cpu.image import means

        return means

    def reject(self, p: Any, t: Target) -> list[str]:
        reasons = super().reject(p, t)
        if p.form == "means" and not all(map(is_exact, (p.r, p.s))):
            reasons.append(f"window is {p.r}x{p.s}, needs sizes whose 16-bit quotients are exact, "
                           "such as 2 to 16")
        return reasons

    def space(self, p: Any, t: Target) -> Space:
        return Space(rows=(1, 4, 8), vectors=(1, 2), strip=(256, 512, 1024, 2048), stream=(False,))

    def default(self, p: Any, t: Target) -> Schedule:
        return Schedule(rows=8, vectors=1, strip=strip(p, 1024), stream=False)

    def cost(self, p: Any, t: Target, s: Any) -> float:
        cycles = (10 + p.r + p.s) * p.pixels / (2 * t.lanes)
        return seconds(t, cycles, p.bytes, max(1, math.ceil(p.n * p.h / 32)))
