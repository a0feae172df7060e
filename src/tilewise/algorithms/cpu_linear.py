"""Linear layers on the matrix unit: a 1x1 convolution over as many pixels as there are rows."""

from __future__ import annotations

from ..core.problem import Problem
from ..core.target import Target
from .cpu_direct_matrix import CpuDirectMatrix, is_pixelwise

LEAST = 4 << 20  # bytes of a weight that are worth a call


class CpuLinear(CpuDirectMatrix):
    """Weights as bfloat16 parts, prepared once: no more bytes to read than float32 has.

    Not with six products: they would read, and keep, half as much again.
    """

    name = "cpu_linear"

    def reject(self, p: Problem, t: Target) -> list[str]:
        reasons = super().reject(p, t)
        if not is_pixelwise(p):
            reasons.append(f"filter is {p.r}x{p.s}, stride is {p.stride}, padding is {p.padding}, "
                           "needs 1x1, 1 and 0")
        if p.weight_bytes < LEAST:
            reasons.append(f"weight has {p.weight_bytes} bytes, needs at least {LEAST}")
        return reasons
