"""What the generated CPU algorithms share: how they are built, reasons and budgets."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..core.activations import ACTIVATIONS
from ..core.algorithm import Algorithm, split_bits
from ..core.problem import Problem
from ..core.schedule import Schedule
from ..core.target import Target

MATRIX_SIDE = 16  # rows of a tile of the matrix unit
MATRIX_PARTS = {0: 0, 1: 1, 3: 2, 6: 3}  # bfloat16 parts of a float, by the products of them


class CpuAlgorithm(Algorithm):
    """An algorithm whose kernel is a module of kernels/cpu with a `Geometry` and a `make`."""

    fuses = frozenset({"bias", "residual", *ACTIVATIONS})
    kernel: str  # the module's name; imported when something is built

    def seen_by_kernel(self, p: Problem) -> Problem:
        """The problem in the kernel's terms."""
        return p

    def workspace(self, p: Problem, t: Target, s: Schedule) -> int:
        return int(self._geometry(p, t, s).scratch_bytes(t.threads))

    def prepare(self, p: Problem, t: Target, s: Schedule, weight: Any) -> Any:
        from ..kernels.cpu import direct_prepare_amx, memory

        if products(s):
            return direct_prepare_amx.prepare(p, t, self.weight_form(s), weight)
        return memory.keep(self._geometry(p, t, s).pack_weight(weight))

    def build(self, p: Problem, t: Target, s: Schedule) -> Any:
        from ..kernels.cpu.launch import launcher

        return launcher(self._module(s).make, self._seen(p, s), s, t.row)

    def bits(self, s: Schedule) -> int:
        return split_bits(products(s))

    def _geometry(self, p: Problem, t: Target, s: Schedule) -> Any:
        return self._module(s).Geometry(self._seen(p, s), s, t.lanes)

    def _seen(self, p: Problem, s: Schedule) -> Problem:
        return as_pixels(p) if products(s) else self.seen_by_kernel(p)

    def _module(self, s: Schedule) -> Any:
        name = f"{self.kernel}_amx" if products(s) else self.kernel
        return import_module(f"..kernels.cpu.{name}", __package__)


def as_pixels(p: Problem) -> Problem:
    """Each pixel as a row of its own, which the next image continues, where none is skipped."""
    return p.with_(h=p.h * p.w, w=1) if is_pixelwise(p) else p


def is_pixelwise(p: Problem) -> bool:
    """Whether every pixel gives an output and sees nothing but itself."""
    return ((p.r, p.s, p.stride, p.groups, p.epilogue.pool) == (1, 1, (1, 1), 1, 1)
            and not any(p.padding))


def on_matrix(t: Target, products: Any) -> dict[str, Any]:
    """The tunable that only targets with a matrix unit have."""
    return {"products": products} if t.row.matrix else {}


def products(s: Schedule) -> int:
    """Products of bfloat16 parts that make one product of floats; 0: none, plain float32."""
    return int(s.get("products", 0))


def cpu_f32_forward(p: Problem, t: Target) -> list[str]:
    """What every fp32 forward kernel for CPUs asks for."""
    reasons = cpu_f32(p, t)
    if p.direction == "backward_data":
        reasons.append(f"direction is backward_data with stride {p.stride} and padding "
                       f"{p.padding}, needs stride 1 and padding within the filter")
    elif p.direction != "forward":
        reasons.append(f"direction is {p.direction}, needs forward")
    return reasons


def cpu_f32_weight(p: Problem, t: Target) -> list[str]:
    """What every fp32 kernel for gradients of weights asks for."""
    reasons = cpu_f32(p, t)
    if p.direction != "backward_weight":
        reasons.append(f"direction is {p.direction}, needs backward_weight")
    return reasons


def cpu_f32(p: Problem, t: Target) -> list[str]:
    """What every fp32 kernel for CPUs asks for."""
    reasons = []
    if t.device != "cpu":
        reasons.append(f"device is {t.device}, needs cpu")
    if p.dtype != "f32":
        reasons.append(f"dtype is {p.dtype}, needs f32")
    return reasons


def streams(p: Problem, t: Target) -> bool:
    """Whether outputs should pass the caches by: too large to be found there again.

    Only where a vector is a whole cache line: parts of lines reach memory one by one.
    """
    return 4 * t.lanes >= 64 and p.output_bytes > 4 * t.l2


def fits(t: Target, rows: int, vectors: int) -> bool:
    """Whether a register tile's accumulators and operands stay in registers."""
    row = t.row
    broadcast = 0 if row.memory_operands and vectors == 1 else 1
    product = 0 if row.fma else 2  # a separate product, and a copy of what it overwrites
    return rows * vectors + vectors + broadcast + product <= row.registers
