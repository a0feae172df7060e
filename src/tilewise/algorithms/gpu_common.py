"""What the GPU algorithms share: reasons, errors of the matrix units, and a roofline."""

from __future__ import annotations

import math

from ..core.activations import ACTIVATIONS
from ..core.algorithm import EPS32, Algorithm, accumulation_error
from ..core.cost import traffic
from ..core.gpu import GPUS
from ..core.problem import DIRECTIONS, Problem
from ..core.schedule import Schedule
from ..core.target import Target

MOST_ELEMENTS = 1 << 31  # offsets are 32 bits
LAUNCH = 8e-6  # seconds to start a kernel from Python
# error of a product of operands that were cut to the matrix units' types, before any sum
CUT = {"ieee": 0.0, "tf32": 1.5 * 2.0 ** -10, "tf32x3": 2.0 ** -20, "bf16x3": 2.0 ** -15,
       "bf16x6": 2.0 ** -22}
BITS = {"ieee": 24, "tf32": 11, "tf32x3": 22, "bf16x3": 16, "bf16x6": 24}


class GpuAlgorithm(Algorithm):
    """Triton kernels; on float32 one precision of tl.dot each, so that each has its own error."""

    device = "cuda"
    directions = frozenset(DIRECTIONS)
    fuses = frozenset({"bias", "residual", *ACTIVATIONS, "pool2"})
    takes = "tensors"

    def __init__(self, precision: str = "ieee") -> None:
        self.precision, self.bits = precision, BITS[precision]
        if precision != "ieee":
            self.name = f"{self.name}_{precision}"

    def kind(self, p: Problem) -> str:
        """The kind of product, as the table of schedules names it."""
        return self.precision if p.dtype == "f32" else "half"

    def reasons(self, p: Problem, t: Target) -> list[str]:
        """Why a problem cannot run at all."""
        if t.device != "cuda":
            return [f"device is {t.device}, needs cuda (CUDA or ROCm)"]
        if t.isa not in GPUS:
            return [f"architecture is {t.isa}, needs one of {', '.join(GPUS)}"]
        found = []
        if p.dtype not in ("f32", "f16", "bf16"):
            found.append(f"dtype is {p.dtype}, needs f32, f16 or bf16")
        if p.dtype != "f32" and self.precision != "ieee":
            found.append(f"dtype is {p.dtype}, needs f32 for products in {self.precision}")
        if self.precision not in GPUS[t.isa].precisions:
            found.append(f"precision is {self.precision}, needs one that {t.isa} has: "
                         f"{', '.join(GPUS[t.isa].precisions)}")
        if p.direction != "forward" and p.epilogue.steps:
            found.append(f"epilogue is {p.epilogue}, needs none backward")
        largest = max(p.n * p.c * p.h * p.w, p.n * p.k * p.conv_h * p.conv_w)
        if largest >= MOST_ELEMENTS:
            found.append(f"the largest tensor has {largest} elements, needs fewer than 2**31")
        return found

    def sum_error(self, terms: int, dtype: str) -> float:
        """Of sums of so many products; matrix units cut where others round, every 8 terms."""
        cut = 0.0 if self.precision == "ieee" and dtype == "f32" else EPS32 * terms / 8
        return accumulation_error(terms, dtype) + CUT[self.precision] + cut


def roofline(t: Target, p: Problem, s: Schedule, flops: float, efficiency: float,
             tiles: int, bytes_: float, launches: int = 1) -> float:
    """Seconds, for whole waves of tiles; assumed and never measured, so it is kept modest."""
    units = GPUS[t.isa].units
    uneven = math.ceil(tiles / units) * units / max(1, tiles)
    compute, memory = flops / efficiency * uneven, traffic(t, bytes_)
    return LAUNCH * launches + max(compute, memory) + 0.3 * min(compute, memory)
