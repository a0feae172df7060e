"""The machine a plan is made for."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import lru_cache

from .errors import TilewiseError
from .gpu import GPUS, architecture
from .isa import ISA, NO_ISA, Isa, available, emulable
from .limits import Limits, keep, kept
from .platforms import HERE

HERTZ = 2.5e9  # where no clock was measured
FLOW = 6e9  # bytes a second to and from memory that a thread gets
SHARED_FLOW = 96e9  # and all of them together
FOUR_UNITS = (0xD40, 0xD4F, 0xD83, 0xD84)  # Neoverse V1, V2, V3AE, V3: of 128 bits each


@dataclass(frozen=True)
class Target:
    """A machine as the planner sees it; `Target.host()` is this one.

    Attributes:
        device: "cpu" or "cuda".
        isa: The instruction set, such as "avx2", "avx512" or "amx"; of a GPU, its architecture.
        threads: Threads that share a call.
        l1: Bytes of the first cache of a core.
        l2: Bytes of the second cache of a core.
        l3: Bytes of the shared cache.
        hertz: Clock rate that is assumed, or was measured.
        bandwidth: Bytes a second to and from memory, of all threads; 0 is what is usual.
        units: Multiply-adds that can start in a cycle; 0 is what is usual for the instruction set.

    >>> str(Target("cpu", "avx2", threads=2))
    'cpu:avx2:t2'
    """

    device: str
    isa: str
    threads: int
    l1: int = 32 << 10  # bytes a core
    l2: int = 1 << 20
    l3: int = 32 << 20  # bytes shared
    hertz: float = HERTZ
    bandwidth: float = 0.0  # bytes a second to and from memory; 0 is usual for so many threads
    units: int = 0  # multiply-adds that can start in a cycle; 0 is what is usual for the row

    @property
    def row(self) -> Isa:
        return NO_ISA if self.isa == NO_ISA.name else ISA[self.isa]

    @property
    def lanes(self) -> int:
        return self.row.lanes

    @property
    def registers(self) -> int:
        return self.row.registers

    @property
    def starts(self) -> int:
        """Multiply-add instructions that can start in a cycle."""
        return self.units or self.row.units

    @property
    def flow(self) -> float:
        """Bytes a second to and from memory, of all threads."""
        return self.bandwidth or min(FLOW * self.threads, SHARED_FLOW)

    @property
    def core_peak(self) -> float:
        """Multiply-add limit of one core in operations a second."""
        return 2 * self.row.lanes * self.starts * self.hertz

    @property
    def peak(self) -> float:
        """Multiply-add limit of all threads, or of a GPU in fp32, in operations a second."""
        if self.device == "cuda":
            return GPUS[self.isa].fp32 if self.isa in GPUS else 1e13
        return self.core_peak * self.threads

    @property
    def on_two(self) -> Target:
        """The machine with two threads, by which choices are made whatever the number: what was
        measured with more of them is not theirs."""
        return _on_two(self)

    @property
    def is_here(self) -> bool:
        """Whether this machine is meant, and not one like it or another."""
        return _is_here(self)

    def with_(self, **changes: object) -> Target:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def __str__(self) -> str:
        if self.device == "cuda":
            return f"{self.device}:{self.isa}"
        return f"{self.device}:{self.isa}:t{self.threads}"

    @staticmethod
    def gpu(name: str) -> Target:
        """A GPU by its architecture, which need not be present; torch calls ROCm cuda as well.

        >>> str(Target.gpu("sm_90"))
        'cuda:sm_90'
        """
        name = architecture(name)
        row = GPUS.get(name)
        if row is None:  # nothing is known of it: torch's own convolution serves it
            return Target("cuda", name, 1)
        return Target("cuda", name, 1, l1=row.shared, l2=row.l2, l3=row.l2,
                      bandwidth=row.bandwidth)

    @staticmethod
    def host(isa: str | None = None, threads: int | None = None) -> Target:
        """This machine, or a narrower view of it; TILEWISE_ISA narrows it for a whole process.

        On a machine without a row of instructions, the row is "none", and all is left to torch.
        """
        return _host(isa or os.environ.get("TILEWISE_ISA"), threads or os.cpu_count() or 1)


def refuse_times(t: Target) -> None:
    """Times of emulated instructions say nothing of real ones: nobody gets to see them."""
    if t.device == "cpu" and t.row.emulated:
        raise TilewiseError(f"isa is {t.isa!r}, whose instructions are emulated here: no times are "
                            "taken; choose another by TILEWISE_ISA, or none")


def learn(t: Target, peak: float, copied: float) -> bool:
    """Keep what was measured of this machine, for estimates from now on; whether it was kept.

    Args:
        t: The machine, with the threads that took part.
        peak: Operations a second, of multiply-adds on registers.
        copied: Bytes a second that a copy reads and writes.
    """
    if t.row is NO_ISA:  # no kernels, no estimates
        return False
    done = keep(t.isa, t.threads, Limits(peak / (2 * t.lanes * t.starts * t.threads), copied))
    for known in (_host, _on_two, _is_here):
        known.cache_clear()
    return done


@lru_cache(maxsize=256)
def _on_two(t: Target) -> Target:
    if t.threads == 2:
        return t
    return _host(t.isa, 2) if t.is_here and t == _host(t.isa, t.threads) else t.with_(threads=2)


@lru_cache(maxsize=256)
def _is_here(t: Target) -> bool:
    if t.device != "cpu" or t.isa not in (row.name for row in (*available(), *emulable())):
        return False
    here = _host(t.isa, t.threads)  # whatever was measured of it
    return t == here.with_(hertz=t.hertz, bandwidth=t.bandwidth)


def units_of(isa: str, identity: str) -> int:
    """Of a processor by Arm's number of it, if the system tells; 0 where the row's holds.

    >>> units_of("neon", "0x00000000410fd4f0")
    4
    """
    try:
        part = int(identity, 16) >> 4 & 0xFFF
    except ValueError:
        return 0
    return 4 if isa in ("neon", "neon_bf16") and part in FOUR_UNITS else 0


def _fastest(rows: list[str]) -> str:
    """The widest row that this processor is made for."""
    here = HERE.family()
    return next((row for row in rows if row in ISA and not here.startswith(ISA[row].slow_on)),
                rows[0])


@lru_cache(maxsize=64)
def _host(isa: str | None, threads: int) -> Target:
    rows = [row.name for row in available()] or [NO_ISA.name]
    name = isa or _fastest(rows)
    others = [row.name for row in emulable()]  # not chosen unless they are asked for
    if name not in rows + others:
        raise TilewiseError(f"isa is {name!r}, this machine has {', '.join(rows)}"
                            + (f"; it can emulate {', '.join(others)}" if others else ""))
    limits = kept(name, threads)
    return Target("cpu", name, threads, l1=HERE.cache_bytes(1) or 32 << 10,
                  l2=HERE.cache_bytes(2) or 1 << 20, l3=HERE.cache_bytes(3) or 32 << 20,
                  hertz=limits.hertz if limits else HERTZ,
                  bandwidth=limits.bandwidth if limits else 0.0,
                  units=units_of(name, HERE.part()))
