"""One row per GPU architecture: what schedules, estimates and the audit may know of it."""

from __future__ import annotations

from dataclasses import dataclass

TERA = 1e12


@dataclass(frozen=True)
class Gpu:
    """An architecture, with the figures its maker publishes for one typical board."""

    name: str
    board: str
    backend: str  # Triton's: cuda or hip
    arch: int | str  # as the backend names it
    warp: int  # threads
    units: int  # streaming multiprocessors or compute units
    schedulers: int  # of a unit: warps that can issue in one cycle
    registers: int  # 32-bit registers a scheduler has for its warps
    most_warps: int  # a scheduler can hold
    shared: int  # bytes of shared memory a unit has
    most_shared: int  # bytes of it that one block can have
    l2: int
    bandwidth: float  # bytes a second
    fp32: float  # operations a second outside the matrix units
    half: float  # and inside, fp16 or bf16
    tf32: float  # 0 where there is none
    macs: int  # fp16 multiply-adds a unit does in a cycle
    precisions: tuple[str, ...]  # of tl.dot on float32

    def flops(self, dtype: str, precision: str) -> float:
        """The limit for multiply-adds of a type, in operations a second."""
        if dtype != "f32":
            return self.half
        if precision == "ieee":
            return self.fp32
        unit = self.tf32 if precision.startswith("tf32") else self.half
        return unit / PRODUCTS[precision]


# how many products of the matrix units make one of float32
PRODUCTS = {"ieee": 1, "tf32": 1, "tf32x3": 3, "bf16x3": 3, "bf16x6": 6}
_NVIDIA = ("ieee", "tf32", "tf32x3", "bf16x3", "bf16x6")

GPU_ROWS = (
    Gpu("sm_80", "A100 SXM 80 GB", "cuda", 80, 32, 108, 4, 16384, 16, 164 << 10, 163 << 10,
        40 << 20, 2.04 * TERA, 19.5 * TERA, 312 * TERA, 156 * TERA, 1024, _NVIDIA),
    Gpu("sm_90", "H100 SXM", "cuda", 90, 32, 132, 4, 16384, 16, 228 << 10, 227 << 10,
        50 << 20, 3.35 * TERA, 66.9 * TERA, 989 * TERA, 494 * TERA, 2048, _NVIDIA),
    Gpu("sm_100", "B200", "cuda", 100, 32, 148, 4, 16384, 16, 228 << 10, 227 << 10,
        126 << 20, 8.0 * TERA, 75 * TERA, 2250 * TERA, 1100 * TERA, 4096, _NVIDIA),
    Gpu("gfx942", "MI300X", "hip", "gfx942", 64, 304, 4, 32768, 8, 64 << 10, 64 << 10,
        4 << 20, 5.3 * TERA, 163.4 * TERA, 1307 * TERA, 0.0, 1024,
        ("ieee", "bf16x3", "bf16x6")),
)

GPUS = {row.name: row for row in GPU_ROWS}


def architecture(name: str) -> str:
    """The row that serves an architecture as its driver names it; its own name where none does.

    >>> architecture("sm_90"), architecture("gfx942:sramecc+:xnack-"), architecture("sm_75")
    ('sm_90', 'gfx942', 'sm_75')
    """
    return name.partition(":")[0]
