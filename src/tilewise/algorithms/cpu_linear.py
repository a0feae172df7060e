"""Linear layers on the matrix unit: a 1x1 convolution over as many pixels as there are rows."""

from __future__ import annotations

from ..core.problem import Problem
from ..core.schedule import Schedule
from ..core.target import Target
from . import matrix_direct
from .common import products
from .cpu_pointwise import CpuPointwise

LEAST = 4 << 20  # bytes of a weight that are worth a call


class CpuLinear(CpuPointwise):
    """Weights as bfloat16 parts, prepared once: no more bytes to read than float32 has."""

    name = "cpu_linear"
    version = 1

    def reject(self, p: Problem, t: Target) -> list[str]:
        reasons = super().reject(p, t)
        if not t.row.matrix:
            reasons.append(f"instructions are {t.isa}, needs a matrix unit")
        if p.weight_bytes < LEAST:
            reasons.append(f"weight has {p.weight_bytes} bytes, needs at least {LEAST}")
        return reasons

    def default(self, p: Problem, t: Target) -> Schedule:
        return self.defaults(p, t)[0]

    def defaults(self, p: Problem, t: Target) -> tuple[Schedule, ...]:
        # six products would read, and keep, half as much again as float32
        return tuple(s for s in matrix_direct.defaults(p, t) if products(s) < 6)
