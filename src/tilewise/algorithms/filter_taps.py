"""Filters tap by tap: any footprint, and sums in the order and the type of scipy's."""

from __future__ import annotations

import math
from typing import Any

from ..core.algorithm import accumulation_error
from ..core.cost import seconds
from ..core.schedule import Schedule, Space
from ..core.target import Target
from .filter_common import CpuFilter, can_stream, fits, narrow_strip, ordered_lanes


class FilterTaps(CpuFilter):
    """Taps from a table; a tap meets a tile of outputs."""

    name = "filter_taps"
    version = 1
    forms = frozenset({"order", "taps", "line", "even", "odd", "mean"})

    def kernel(self) -> Any:
        from ..kernels.cpu.image import taps

        return taps

    def seen_by_kernel(self, p: Any) -> Any:
        last = p.form == "order" and p.order > 0
        if p.form == "mean":
            return p.with_(rank=0)
        return p.with_(rank=0, footprint="", order=p.r * p.s - 1 if last else 0)

    def reject(self, p: Any, t: Target) -> list[str]:
        reasons = super().reject(p, t)
        if p.form == "order" and not p.is_extreme:
            reasons.append(f"order is {p.order} of {p.taps}, needs the first or the last")
        return reasons

    def error(self, p: Any, t: Target, s: Schedule) -> float:
        return 0.0 if p.form == "order" else accumulation_error(p.taps, "f64")

    def space(self, p: Any, t: Target) -> Space:
        streams = (False, True) if can_stream(p, t) else (False,)
        return Space(lambda s: fits(t, s.rows, s.vectors, 2), rows=(1, 2, 4, 8),
                     vectors=(1, 2, 4), strip=(256, 512, 1024, 2048), stream=streams)

    def default(self, p: Any, t: Target) -> Schedule:
        rows, vectors = next(size for size in ((8, 2), (4, 2), (4, 1), (2, 1))
                             if fits(t, *size, 2))
        # a strip of bytes that become float64 is wide: few lines of each row would be read
        strip = narrow_strip(p, 1024) if p.form == "order" else 1024
        return Schedule(rows=rows, vectors=vectors, strip=strip, stream=can_stream(p, t))

    def cost(self, p: Any, t: Target, s: Any) -> float:
        cycles = (6 + p.taps * (0.8 if p.form == "order" else 1.2)) * p.pixels
        return seconds(t, cycles / ordered_lanes(p, t), p.bytes,
                       max(1, math.ceil(p.n * p.h / 32)))
