"""Medians and other places in the order of small windows, by networks of least and largest."""

from __future__ import annotations

import math
from typing import Any

from ..core.cost import seconds
from ..core.schedule import Schedule, Space
from ..core.target import Target
from .filter_common import CpuFilter, can_stream, narrow_strip, ordered_lanes

MOST = 81  # taps; networks grow faster than windows, and so does the time to compile them


class FilterNetwork(CpuFilter):
    """Columns sorted and merged once for all windows that they are in."""

    name = "filter_network"
    version = 1
    forms = frozenset({"order"})

    def kernel(self) -> Any:
        from ..kernels.cpu.image import network

        return network

    def seen_by_kernel(self, p: Any) -> Any:
        return p.with_(rank=0)

    def reject(self, p: Any, t: Target) -> list[str]:
        reasons = super().reject(p, t)
        if p.taps > MOST:
            reasons.append(f"footprint has {p.taps} taps, needs at most {MOST}")
        return reasons

    def error(self, p: Any, t: Target, s: Schedule) -> float:
        return 0.0

    def space(self, p: Any, t: Target) -> Space:
        streams = (False, True) if can_stream(p, t) else (False,)
        return Space(rows=(1, 2, 4), vectors=(1, 2), strip=(256, 512, 1024, 2048),
                     stream=streams)

    def default(self, p: Any, t: Target) -> Schedule:
        return Schedule(rows=1 if p.footprint or p.taps > 25 else 2, vectors=1,
                        strip=narrow_strip(p, 1024), stream=can_stream(p, t))

    def cost(self, p: Any, t: Target, s: Any) -> float:
        alone = 2.0 if p.footprint else 1.0  # nothing is shared
        cycles = (8 + alone * p.taps * math.log2(p.taps + 1)) * p.pixels / ordered_lanes(p, t)
        return seconds(t, cycles, p.bytes, max(1, math.ceil(p.n * p.h / 32)))
