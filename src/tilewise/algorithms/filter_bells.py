"""Gaussian blurs of bytes, equal to scipy's, in float32."""

from __future__ import annotations

import math
from typing import Any

from ..core.cost import seconds
from ..core.schedule import Schedule, Space
from ..core.target import Target
from .filter_common import BytesFilter, strip


def registers(rows: int, vectors: int) -> int:
    """A sum, its differences and its middle for each output, a pair and its weight."""
    return 3 * rows * vectors + 2


class FilterBells(BytesFilter):
    """Down, then across; flat windows are noticed beside their sums, which pays for few taps."""

    name = "filter_bells"
    version = 1
    forms = frozenset({"bells"})

    def kernel(self) -> Any:
        from ..kernels.cpu.image import blurs

        return blurs

    def space(self, p: Any, t: Target) -> Space:
        return Space(lambda s: registers(s.rows, s.vectors) <= t.registers, rows=(1, 2, 4, 8),
                     vectors=(1, 2), strip=(256, 512, 1024, 2048), chunk=(1,), stream=(False,))

    def default(self, p: Any, t: Target) -> Schedule:
        vectors = 2 if registers(4, 2) <= t.registers else 1
        return Schedule(rows=4, vectors=vectors, strip=strip(p, 2048), chunk=1, stream=False)

    def cost(self, p: Any, t: Target, s: Any) -> float:
        slow = 1.8 if t.row.fma else 2.2  # of a tap of `filter_guarded`
        cycles = (18 + (p.r + p.s) * slow) * p.pixels / t.lanes
        return seconds(t, cycles, p.bytes, max(1, math.ceil(p.n * p.h / 32)))
