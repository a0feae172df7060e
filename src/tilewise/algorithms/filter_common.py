"""What the generated filters share: how they are built, and what they cost."""

from __future__ import annotations

from typing import Any

from ..core.algorithm import Algorithm
from ..core.filter import ELEMENTS
from ..core.schedule import Schedule, Space
from ..core.target import Target
from .common import no_code

STRIPS = (256, 512, 1024, 2048, 4096)  # elements of a row that a task takes


class CpuFilter(Algorithm):
    """A filter whose kernel is a module of kernels/cpu/image with a `Geometry` and a `make`."""

    forms: frozenset[str] = frozenset({"sum"})  # what it makes of a window
    bounds_constant = False  # whether a border's constant must be a value of the image's type

    def kernel(self) -> Any:
        """The module; imported when something is built."""
        raise NotImplementedError

    def seen_by_kernel(self, p: Any) -> Any:
        """The problem in the kernel's terms."""
        return p

    def reject(self, p: Any, t: Target) -> list[str]:
        reasons = no_code(t) if t.device == "cpu" else [f"device is {t.device}, needs cpu"]
        return reasons + wrong_form(p, self.forms)

    def space(self, p: Any, t: Target) -> Space:
        def legal(s: Any) -> bool:
            return s.chunk <= p.r and fits(t, s.rows, s.vectors, s.chunk)

        streams = (False, True) if can_stream(p, t) else (False,)
        return Space(legal, rows=(1, 2, 4, 8, 12, 16), vectors=(1, 2, 4), strip=STRIPS,
                     chunk=tuple(range(1, 17)), stream=streams)

    def workspace(self, p: Any, t: Target, s: Schedule) -> int:
        g = self.geometry(p, t, s)
        return int(g.worker_bytes(g.band(p.h, t.l2, t.threads)) * t.threads)

    def prepare(self, p: Any, t: Target, s: Schedule, weight: Any) -> Any:
        return self.geometry(p, t, s).pack_weight(weight)

    def build(self, p: Any, t: Target, s: Schedule) -> Any:
        from ..kernels.cpu.emit.launch import launcher

        return launcher(self.kernel().make, self.seen_by_kernel(p), s, t.row)

    def geometry(self, p: Any, t: Target, s: Schedule) -> Any:
        return self.kernel().Geometry(self.seen_by_kernel(p), s, t.lanes)


def wrong_form(p: Any, forms: frozenset[str]) -> list[str]:
    """A reason, where a filter makes something else of its windows."""
    known = ", ".join(sorted(forms))
    return [] if p.form in forms else [f"form is {p.form}, needs {known}"]


def fits(t: Target, rows: int, vectors: int, chunk: int) -> bool:
    """Whether sums, taps and the vector they meet stay in registers."""
    product = 0 if t.row.fma else 1
    return rows * vectors + chunk + vectors + product <= t.registers


def tile(p: Any, t: Target) -> tuple[int, int]:
    """Rows and vectors of a register tile: large, with room for a few kernel rows beside it."""
    return next((rows, vectors) for rows, vectors in ((8, 2), (4, 2), (8, 1), (4, 1))
                if fits(t, rows, vectors, min(p.r, 5)))


def strip(p: Any, widest: int) -> int:
    """Elements of a row that a task takes: few where rows are short, for less scratch."""
    return min(512, widest) if p.w * p.c <= 512 else widest


def narrow_strip(p: Any, bytes_: int) -> int:
    """Elements of a row that a task takes, so that packed rows stay in the first cache."""
    return max(256, bytes_ // ELEMENTS[p.work])


def ordered_lanes(p: Any, t: Target) -> float:
    """Values of the type that is computed with in a vector."""
    return t.lanes * 4 / ELEMENTS[p.work]


def can_stream(p: Any, t: Target) -> bool:
    """Whether outputs should pass the caches by: a vector is a whole line, and they are large."""
    line = t.lanes * 4 // ELEMENTS[p.work] * ELEMENTS[p.out] >= 64
    return p.in_lines and line and p.output_bytes > 4 * t.l2


class BytesFilter(CpuFilter):
    """One that reads and writes bytes, down and then across, without an error."""

    bounds_constant = True

    def seen_by_kernel(self, p: Any) -> Any:
        return p.with_(rank=0)

    def reject(self, p: Any, t: Target) -> list[str]:
        reasons = super().reject(p, t)
        if {p.dtype, p.out} != {"u8"}:
            reasons.append(f"types are {p.dtype} and {p.out}, needs u8")
        return reasons

    def error(self, p: Any, t: Target, s: Schedule) -> float:
        return 0.0
