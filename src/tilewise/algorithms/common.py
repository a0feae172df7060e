"""What the generated CPU algorithms share: how they are built, reasons and budgets."""

from __future__ import annotations

from typing import Any

from ..core.activations import ACTIVATIONS
from ..core.algorithm import Algorithm, certain_error
from ..core.isa import ISA_ROWS, NATIVE, widens
from ..core.problem import DTYPES, Problem
from ..core.remembered import Remembered
from ..core.schedule import Schedule
from ..core.target import Target

HALVES = ("bf16", "f16")
LARGE = 64 << 10  # bytes of weights that take torch longer to pack than a kernel to start


class CpuAlgorithm(Algorithm):
    """An algorithm whose kernel is a module of kernels/cpu/conv with a `Geometry` and a `make`."""

    fuses = frozenset({"bias", "residual", *ACTIVATIONS})
    products: int = 0  # of parts that stand for one; 0: floats are multiplied as they are
    more: tuple[int, ...] = ()  # what its kernel is told besides problem and schedule

    def kernel(self) -> Any:
        """The module; imported when something is built."""
        raise NotImplementedError

    def seen_by_kernel(self, p: Problem) -> Problem:
        """The problem in the kernel's terms."""
        return p

    def certain(self, p: Problem, t: Target, s: Schedule) -> float:
        return certain_error(p.terms, self.products, self.bits, p.dtype)

    def workspace(self, p: Problem, t: Target, s: Schedule) -> int:
        return int(self._geometry(p, t, s).scratch_bytes(t.threads))

    def prepare(self, p: Problem, t: Target, s: Schedule, weight: Any) -> Any:
        from ..kernels.cpu import memory

        return memory.keep(self._geometry(p, t, s).pack_weight(weight))

    def request(self, p: Problem, t: Target, s: Schedule) -> Any:
        """All that the code is made from; what image sizes decide is not among it."""
        from ..kernels.cpu.emit.requests import Request

        kernel = self.kernel()
        return Request(kernel.make, self.seen_by_kernel(p), s.without(getattr(kernel, "FREE", ())),
                       t.row, self.more, hasattr(kernel, "SIZES"))

    def requests(self, p: Problem, t: Target, s: Schedule) -> list[Any]:
        """The same for all kernels that a first call needs: the weight may have one of its own."""
        return [self.request(p, t, s)]

    def build(self, p: Problem, t: Target, s: Schedule) -> Any:
        from ..kernels.cpu.emit.launch import launch_of

        geometry = self._geometry(p, t, s)
        names = getattr(self.kernel(), "SIZES", ())
        return launch_of(self.request(p, t, s), [getattr(geometry, name) for name in names])

    def _geometry(self, p: Problem, t: Target, s: Schedule) -> Any:
        return self.kernel().Geometry(self.seen_by_kernel(p), s, t.lanes, *self.more)


class PanelAlgorithm(CpuAlgorithm):
    """One whose weights are panels of blocks of output channels; they are packed by generated
    code, small ones only if it is there: they are not worth compiling it."""

    by_strides = True

    def prepare(self, p: Problem, t: Target, s: Schedule, weight: Any) -> Any:
        from ..kernels.cpu.prepare import direct, mirrored

        if p.weight_bytes >= LARGE or direct.is_worth(t.row):
            return PACKERS[self, p, t, s](weight)
        plain = weight.tensor() if isinstance(weight, mirrored.Mirrored) else weight
        return super().prepare(p, t, s, plain)

    def prepared_floats(self, p: Problem, t: Target, s: Schedule) -> int:
        from ..kernels.cpu.prepare import direct

        packs = p.weight_bytes >= LARGE or direct.is_known(t.row)
        return PACKERS[self, p, t, s].floats if packs else 0

    def prepare_into(self, p: Problem, t: Target, s: Schedule, weight: Any, whole: Any) -> None:
        PACKERS[self, p, t, s].into(weight, whole)

    def requests(self, p: Problem, t: Target, s: Schedule) -> list[Any]:
        from ..kernels.cpu.prepare import direct

        packs = [direct.request_of(t.row)] if p.weight_bytes >= LARGE else []
        return [self.request(p, t, s), *packs]


def _packer(self: PanelAlgorithm, p: Problem, t: Target, s: Schedule) -> Any:
    from ..kernels.cpu.prepare import direct

    return direct.Packer(self._geometry(p, t, s), t)


# a weight that learns is packed in every step, and to find out how would take longer
PACKERS: Remembered[Any] = Remembered(_packer, most=1024)


def cpu_f32_forward(p: Problem, t: Target, grid: bool = False, pitch: bool = False,
                    halves: bool = False) -> list[str]:
    """What every fp32 forward kernel for CPUs asks for; `grid`: it can leave places between
    results; `pitch`: it can read slices; `halves`: images may be bfloat16 or float16."""
    types = cpu_images(p, t) if halves and p.dtype in HALVES else cpu_f32(p, t)
    reasons = types + ([] if grid else no_grid(p)) + ([] if pitch else no_pitch(p))
    if p.direction == "backward_data":
        reasons.append(f"direction is backward_data with stride {p.stride} and padding "
                       f"{p.padding}, needs stride 1 and padding within the filter")
    elif p.direction != "forward":
        reasons.append(f"direction is {p.direction}, needs forward")
    return reasons


def cpu_f32_weight(p: Problem, t: Target, halves: bool = False) -> list[str]:
    """What every fp32 kernel for gradients of weights asks for; `halves` as above."""
    reasons = cpu_images(p, t) if halves and p.dtype in HALVES else cpu_f32(p, t)
    if p.dtype == "bf16" and t.device == "cpu" and t.row.reads_bf16:
        reasons.append(f"dtype is bf16 on {t.isa}, needs f32: torch multiplies it on the unit")
    if p.direction != "backward_weight":
        reasons.append(f"direction is {p.direction}, needs backward_weight")
    return reasons


def no_grid(p: Problem) -> list[str]:
    """What a method asks for that writes whole results."""
    return [] if p.grid is None else [f"results go to a {p.grid}, need to be all of it"]


def no_pitch(p: Problem) -> list[str]:
    """What a method asks for that reads whole images."""
    return [f"the input is {p.c} of {p.pitch} channels, needs to be all of them"] * bool(p.pitch)


def cpu_f32(p: Problem, t: Target) -> list[str]:
    """What every fp32 kernel for CPUs asks for."""
    reasons = []
    if t.device != "cpu":
        reasons.append(f"device is {t.device}, needs cpu")
    if p.dtype != "f32":
        reasons.append(f"dtype is {p.dtype}, needs f32")
    return reasons + no_code(t)


def cpu_images(p: Problem, t: Target) -> list[str]:
    """What kernels ask for that multiply in float32 what images hold in 16 bits.

    Where a processor multiplies such numbers itself and the row has no unit for them, torch is
    faster.
    """
    if t.device != "cpu":
        return [f"device is {t.device}, needs cpu"]
    if not t.row.is_written:
        return no_code(t)
    if widens(t.row, p.dtype):
        return []
    native = [row.name for row in ISA_ROWS if row.reads_bf16 and p.dtype == "bf16"]
    plain = [row.name for row in ISA_ROWS if row.widens and row.name not in native
             and NATIVE[p.dtype] not in row.needs]
    rows = " or ".join([*native, " or ".join(plain) + f" without {NATIVE[p.dtype]}"])
    return [f"dtype is {p.dtype} on {t.isa}, needs f32, or {rows}"]


def no_code(t: Target) -> list[str]:
    """Why code cannot be written for a target, of those that write some for CPUs."""
    if t.device != "cpu" or t.row.is_written:
        return []
    return [f"isa is {t.isa}, needs x86-64 or 64-bit Arm"]


def streams(p: Problem, t: Target) -> bool:
    """Whether outputs should pass the caches by: too large to be found there again.

    Only where a vector is a whole cache line: parts of lines reach memory one by one.
    """
    return DTYPES[p.dtype] * t.lanes >= 64 and p.output_bytes > 4 * t.l2


def fits(t: Target, rows: int, vectors: int) -> bool:
    """Whether a register tile's accumulators and operands stay in registers."""
    row = t.row
    broadcast = rows if row.by_element else int(not row.memory_operands or vectors > 1)
    product = 0 if row.fma else 2  # a separate product, and a copy of what it overwrites
    return rows * vectors + vectors + broadcast + product <= row.registers


def weight_traffic(p: Problem, t: Target) -> float:
    """Bytes of weights that come from memory; images of one pixel pass large ones one by one."""
    return p.weight_bytes * (p.n if p.is_linear and p.weight_bytes > t.l2 else 1)
