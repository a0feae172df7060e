"""What algorithms on the matrix unit share: floats as sums of bfloat16 parts, in some products."""

from __future__ import annotations

from ..core.algorithm import split_bits
from ..core.isa import AMX
from ..core.problem import Problem
from ..core.target import Target
from ..kernels.matrix import PARTS
from .common import CpuAlgorithm

PRECISIONS = {1: "bf16", 3: "bf16x3", 6: "bf16x6"}  # by the number of products, as on GPUs


class MatrixAlgorithm(CpuAlgorithm):
    """One number of products each, so that each has its own error, and its own name."""

    unit = "matrix"
    units: tuple[str, ...] = ("amx",)  # those that its kernel is written for
    keeps_infinities = False

    def __init__(self, products: int) -> None:
        self.products, self.parts, self.more = products, PARTS[products], (products,)
        self.name = f"{self.name}_{PRECISIONS[products]}"
        self.bits = split_bits(products)

    def is_for(self, t: Target) -> bool:
        return super().is_for(t) and not self.no_unit(t)

    def no_unit(self, t: Target) -> list[str]:
        """Why a target cannot run it."""
        unit = t.row.matrix if t.device == "cpu" else AMX
        if unit is None:
            return [f"instructions are {t.isa}, needs a matrix unit"]
        if unit.name not in self.units:
            return [f"matrix unit is {unit.name}, needs {' or '.join(self.units)}"]
        if self.products not in unit.products:
            return [f"products are {self.products}, needs fewer on {unit.name}: there so many are "
                    "slower than float32's own"]
        return []

    def seen_by_kernel(self, p: Problem) -> Problem:
        """Each pixel as a row of its own, which the next image continues, where none is skipped."""
        return p.with_(h=p.h * p.w, w=1) if is_pixelwise(p) else p


def is_pixelwise(p: Problem) -> bool:
    """Whether every pixel gives an output and sees nothing but itself."""
    return ((p.r, p.s, p.stride, p.groups, p.epilogue.pool) == (1, 1, (1, 1), 1, 1)
            and not any(p.padding) and p.grid is None)

