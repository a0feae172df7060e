"""What algorithms on the matrix unit share: floats as sums of bfloat16 parts, in some products."""

from __future__ import annotations

from ..core.algorithm import split_bits
from ..core.problem import Problem
from ..core.target import Target
from ..kernels.matrix import PARTS
from .common import CpuAlgorithm

PRECISIONS = {1: "bf16", 3: "bf16x3", 6: "bf16x6"}  # by the number of products, as on GPUs


class MatrixAlgorithm(CpuAlgorithm):
    """One number of products each, so that each has its own error, and its own name."""

    unit = "matrix"
    keeps_infinities = False

    def __init__(self, products: int) -> None:
        self.products, self.parts, self.more = products, PARTS[products], (products,)
        self.name = f"{self.name}_{PRECISIONS[products]}"
        self.bits = split_bits(products)

    def seen_by_kernel(self, p: Problem) -> Problem:
        """Each pixel as a row of its own, which the next image continues, where none is skipped."""
        return p.with_(h=p.h * p.w, w=1) if is_pixelwise(p) else p


def is_pixelwise(p: Problem) -> bool:
    """Whether every pixel gives an output and sees nothing but itself."""
    return ((p.r, p.s, p.stride, p.groups, p.epilogue.pool) == (1, 1, (1, 1), 1, 1)
            and not any(p.padding) and p.grid is None)


def no_unit(t: Target) -> list[str]:
    """Why a target cannot run it."""
    if t.device != "cpu" or t.row.matrix:
        return []
    return [f"instructions are {t.isa}, needs a matrix unit"]
