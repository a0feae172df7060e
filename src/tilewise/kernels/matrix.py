"""What estimates and kernels both have to know of the matrix unit."""

from __future__ import annotations

from ..core.problem import Problem

DEPTH = 32  # values along the reduction in one operation


def joins_taps(p: Problem) -> bool:
    """Whether a row of the filter, neighbours in memory, is reduced in one operation."""
    return p.s > 1 and p.dilation[1] == 1 and p.c * p.s <= DEPTH
