"""Sums of integers that equal scipy's, mostly in a narrower type."""

from __future__ import annotations

import math
from typing import Any

from ..core.cost import seconds
from ..core.filter import ELEMENTS, FUSED, SMALL
from ..core.schedule import Schedule, Space
from ..core.target import Target
from .filter_common import CpuFilter, fits, strip, tile


class FilterGuarded(CpuFilter):
    """With a bound on the error; what lies too near an integer is summed again, as scipy does."""

    name = "filter_guarded"
    version = 2
    forms = frozenset({"taps", "line", "even", "odd", "mean", *FUSED})
    bounds_constant = True

    def kernel(self) -> Any:
        from ..kernels.cpu.image import guarded

        return guarded

    def seen_by_kernel(self, p: Any) -> Any:
        return p.with_(rank=0)

    def reject(self, p: Any, t: Target) -> list[str]:
        reasons = super().reject(p, t)
        if not {p.dtype, p.out} <= SMALL:
            reasons.append(f"types are {p.dtype} and {p.out}, needs two of "
                           f"{', '.join(sorted(SMALL))}")
        elif p.form in ("mean", "means") and not p.has_sure_means:
            reasons.append(f"mean is of {p.r}x{p.s} {p.dtype} and {p.out}, needs unsigned ones "
                           "and fewer taps")
        return reasons

    def error(self, p: Any, t: Target, s: Schedule) -> float:
        return 0.0

    def space(self, p: Any, t: Target) -> Space:
        return Space(lambda s: s.chunk <= p.r and fits(t, s.rows, s.vectors, s.chunk),
                     rows=(1, 2, 4, 8), vectors=(1, 2, 4), strip=(256, 512, 1024, 2048),
                     chunk=tuple(range(1, 17)), stream=(False,))

    def default(self, p: Any, t: Target) -> Schedule:
        rows, vectors = tile(p, t)
        chunk = max(n for n in range(1, 17) if n <= p.r and fits(t, rows, vectors, n))
        widest = 2048 if p.guarded == "f32" else 1024
        return Schedule(rows=rows, vectors=vectors, strip=strip(p, widest), chunk=chunk,
                        stream=False)

    def cost(self, p: Any, t: Target, s: Any) -> float:
        slow = 1.0 if t.row.fma else 2.0
        taps = p.r + p.s if p.form in FUSED else p.taps
        lanes = t.lanes * 4 / ELEMENTS[p.guarded]
        again = 30 if p.form == "bells" else 0  # in photos, most vectors have flat windows
        cycles = (16 + again + taps * slow) * p.pixels / lanes
        return seconds(t, cycles, p.bytes, max(1, math.ceil(p.n * p.h / 32)))
