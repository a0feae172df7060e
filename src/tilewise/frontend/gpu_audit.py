"""tilewise.gpu_audit: every schedule shipped for GPUs, compiled and judged without a GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from multiprocessing import get_context

from ..algorithms.gpu_implicit_gemm import GpuImplicitGemm
from ..algorithms.gpu_table import KINDS, rows
from ..core.errors import TilewiseError
from ..core.gpu import GPUS
from ..core.problem import DIRECTIONS, Problem
from ..core.progress import Tell, silent
from ..core.schedule import Schedule
from ..core.target import Target

# what a schedule is compiled for; the second where it takes few channels
LAYERS = {"forward": ("n32c128h28w28k128r3s3p1_{}_forward+bias+relu",
                      "n32c3h56w56k64r7s7u2p3_{}_forward+bias+relu"),
          "backward_data": ("n32c128h28w28k128r3s3p1_{}_backward_data",
                            "n32c64h28w28k12r7s7p3_{}_backward_data"),
          "backward_weight": ("n32c128h28w28k128r3s3p1_{}_backward_weight",
                              "n32c3h56w56k64r7s7u2p3_{}_backward_weight")}


@dataclass(frozen=True)
class Entry:
    """One schedule for one GPU, not compiled yet."""

    gpu: str
    direction: str
    dtype: str
    precision: str
    schedule: Schedule
    is_default: bool

    @property
    def problem(self) -> Problem:
        text = LAYERS[self.direction][bool(self.schedule["flat"])]
        return Problem.parse(text.format(self.dtype))


@dataclass(frozen=True)
class Row:
    """A line of the audit."""

    gpu: str
    direction: str
    dtype: str
    precision: str
    schedule: str
    is_default: bool
    registers: int
    spills: int
    shared: int
    occupancy: float
    loop: int
    products: int
    load_bits: int
    math_cycles: float
    issue_cycles: float

    @property
    def gathers(self) -> bool:
        """Whether loads cannot be wide: few channels, or a transposed operand of 32 bits."""
        turned = self.direction == "backward_weight" and self.dtype == "f32"
        return "flat" in self.schedule or (turned and self.precision != "ieee")

    @property
    def complaints(self) -> list[str]:
        """What breaks the budget of a shipped schedule."""
        gpu, found = GPUS[self.gpu], []
        if self.spills:
            found.append(f"{self.spills} spills, needs none")
        if self.shared > gpu.most_shared:
            found.append(f"{self.shared} bytes of shared memory, needs {gpu.most_shared}")
        if self.occupancy <= 0:
            found.append("no block fits on a unit")
        if not self.products:
            found.append("no product in the main loop")
        if not self.gathers and self.load_bits < 128:
            found.append(f"loads {self.load_bits} bits at a time, needs 128")
        return found


def entries(gpus: Sequence[str] = tuple(GPUS), defaults_only: bool = False) -> list[Entry]:
    """Every shipped schedule; bfloat16 is compiled like float16, so only its default is."""
    found = []
    for gpu in gpus:
        for direction in DIRECTIONS:
            for kind in KINDS:
                half = kind == "half"
                for i, s in enumerate(rows(direction, kind, gpu)):
                    precision, first = "ieee" if half else kind, i == 0
                    for dtype in ("f16", "bf16")[:1 + first] if half else ("f32",):
                        found.append(Entry(gpu, direction, dtype, precision, s, first))
    return [entry for entry in found if entry.is_default or not defaults_only]


def audit_entry(entry: Entry) -> Row:
    """Compile one schedule and read what became of it."""
    from ..kernels.gpu import conv
    from ..kernels.gpu.audit import audit

    gpu, s = GPUS[entry.gpu], entry.schedule
    launch = conv.launches(entry.problem, s, entry.precision)[0]
    limit = gpu.macs * gpu.flops(entry.dtype, entry.precision) / gpu.half
    found = audit(launch, gpu, s.bm * s.bn * s.bk / limit)
    return Row(entry.gpu, entry.direction, entry.dtype, entry.precision, short(s),
               entry.is_default, **asdict(found))


def short(s: Schedule) -> str:
    """A schedule as the table writes it."""
    words = [f"{s.bm}x{s.bn}x{s.bk}", f"w{s.warps}", f"s{s.stages}"]
    words += [str(s["weight"])] if "weight" in s else []
    return " ".join(words + (["flat"] if s["flat"] else []))


def gpu_audit(gpus: Sequence[str] = tuple(GPUS), defaults_only: bool = False,
              workers: int | None = None, tell: Tell = silent) -> list[Row]:
    """Compile all shipped GPU schedules, on any machine that has Triton; nothing is timed.

    `gpus` are some of sm_80, sm_90, sm_100 and gfx942; `tell(what, done, total)` is told how far
    it is.

    >>> rows = gpu_audit(["sm_90"], defaults_only=True)  # doctest: +SKIP
    """
    unknown = [name for name in gpus if name not in GPUS]
    if unknown:
        raise TilewiseError(f"gpu is {', '.join(unknown)}, needs some of {', '.join(GPUS)}")
    if find_spec("triton") is None:
        raise TilewiseError("the audit compiles Triton kernels, needs triton: pip install triton")
    work = entries(gpus, defaults_only)
    count = min(workers or os.cpu_count() or 1, len(work))
    if count == 1:
        return _told(map(audit_entry, work), len(work), tell)
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        return _told(pool.map(audit_entry, work, chunksize=4), len(work), tell)


def _told(rows: Iterable[Row], total: int, tell: Tell) -> list[Row]:
    found: list[Row] = []
    tell("compiling", 0, total)
    for row in rows:
        found.append(row)
        tell(f"compiled {row.gpu} {row.direction} {row.dtype}", len(found), total)
    return found


COLUMNS = ("GPU", "direction", "type", "products", "schedule", "registers", "spills", "shared",
           "occupancy", "loop", "multiplying", "load bits", "math cycles", "issue cycles")


def cells(row: Row) -> tuple[str, ...]:
    """A row as text; the default of its kind has a star."""
    products = row.precision if row.dtype == "f32" else "matrix"
    return (row.gpu, row.direction, row.dtype, products,
            row.schedule + (" *" if row.is_default else ""), str(row.registers), str(row.spills),
            f"{row.shared / 1024:.0f} K", f"{row.occupancy:.0%}", str(row.loop),
            f"{row.products / max(1, row.loop):.0%}", str(row.load_bits),
            f"{row.math_cycles:.0f}", f"{row.issue_cycles:.0f}")


def as_text(found: Iterable[Row]) -> str:
    table = [COLUMNS, *map(cells, found)]
    widths = [max(len(line[i]) for line in table) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths)).rstrip()
                     for line in table)


def as_markdown(found: Iterable[Row]) -> str:
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *map(cells, found)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace(" *", " \\*")


def as_json(found: Iterable[Row]) -> str:
    return json.dumps([asdict(row) for row in found], indent=1)


def planned(problem: Problem, gpu: str) -> Schedule:
    """What would run for a problem on a GPU, in float32's own precision or a half type's."""
    return GpuImplicitGemm().default(problem, Target.gpu(gpu))
