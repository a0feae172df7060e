"""Medians and other places in the order of large windows of bytes, by histograms."""

from __future__ import annotations

import math
from typing import Any

from ..core.cost import seconds
from ..core.schedule import Schedule, Space
from ..core.target import Target
from .filter_common import CpuFilter

MOST = 2 ** 16 - 1  # taps, which a count can hold
STEP = 40.0  # cycles of a pixel, whatever its window
COLUMN = 6.0  # cycles of a value that a column gains or loses


class FilterHistogram(CpuFilter):
    """A histogram a column, and one that moves along with the window."""

    name = "filter_histogram"
    version = 1
    forms = frozenset({"order"})

    def kernel(self) -> Any:
        from ..kernels.cpu.image import histogram

        return histogram

    def seen_by_kernel(self, p: Any) -> Any:
        return p.with_(rank=0)

    def reject(self, p: Any, t: Target) -> list[str]:
        reasons = super().reject(p, t)
        if p.dtype != "u8":
            reasons.append(f"dtype is {p.dtype}, needs u8")
        if p.footprint:
            reasons.append("footprint has gaps, needs a whole rectangle")
        if p.taps > MOST:
            reasons.append(f"footprint has {p.taps} taps, needs at most {MOST}")
        return reasons

    def error(self, p: Any, t: Target, s: Schedule) -> float:
        return 0.0

    def space(self, p: Any, t: Target) -> Space:
        return Space(rows=(1, 8), strip=(256, 512, 1024, 2048), vectors=(1,), stream=(False,))

    def default(self, p: Any, t: Target) -> Schedule:
        # the histograms of columns stay in the second cache; wide windows share more of a strip
        return Schedule(rows=8, strip=512 if p.s * p.c < 256 else 1024, vectors=1, stream=False)

    def cost(self, p: Any, t: Target, s: Any) -> float:
        band = min(p.h, 64)
        again = (band + p.r) / band  # rows that a band counts before its first outputs
        wide = (s.strip + p.s * p.c) / s.strip
        cycles = (STEP + COLUMN * (1 + again) * wide + 9.0 * p.s * p.c / s.strip) * p.pixels
        return seconds(t, cycles, p.bytes, max(1, math.ceil(p.n * p.h / 32)))
