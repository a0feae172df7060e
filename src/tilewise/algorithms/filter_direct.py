"""A filter as it is defined: all taps of all pixels."""

from __future__ import annotations

import math
from typing import Any

from ..core.algorithm import accumulation_error
from ..core.cost import seconds
from ..core.schedule import Schedule
from ..core.target import Target
from .filter_common import CpuFilter, can_stream, fits, strip, tile


class FilterDirect(CpuFilter):
    """Neighbouring pixels in the lanes; every vector loaded meets all its kernel rows."""

    name = "filter_direct"
    version = 1
    forms = frozenset({"sum", "whole"})

    def kernel(self) -> Any:
        from ..kernels.cpu.image import direct

        return direct

    def seen_by_kernel(self, p: Any) -> Any:
        return p.with_(rank=0)

    def error(self, p: Any, t: Target, s: Schedule) -> float:
        return accumulation_error(p.r * p.s, p.work)

    def default(self, p: Any, t: Target) -> Schedule:
        rows, vectors = tile(p, t)
        chunk = max(n for n in range(1, 17) if n <= p.r and fits(t, rows, vectors, n))
        return Schedule(rows=rows, vectors=vectors, strip=strip(p, 2048), chunk=chunk,
                        stream=can_stream(p, t))

    def cost(self, p: Any, t: Target, s: Any) -> float:
        per_column = max(s.rows * s.chunk * s.vectors / t.starts,
                         (s.rows + s.chunk - 1) * s.vectors + s.chunk / 2) + 2
        slow = 1.0 if t.row.fma else 2.0
        lanes = t.lanes // (2 if p.work == "f64" else 1)
        columns = p.s * p.r / s.chunk
        cycles = slow * per_column * columns / s.rows / s.vectors + 4  # a vector of outputs
        return seconds(t, cycles * p.pixels / lanes, p.bytes, max(1, math.ceil(p.n * p.h / 32)))
