"""tilewise.gpu_audit: every schedule shipped for GPUs, compiled and judged without a GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from multiprocessing import get_context

from ..algorithms.gpu_table import KINDS, rows
from ..algorithms.gpu_winograd import GpuWinograd
from ..core.errors import NotInstalled, TilewiseError
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
WINOGRAD = "n32c1024h28w28k1024r3s3p1_{}_forward+bias+residual+relu+pool2"
STEPS = ("winograd_input", "winograd_products", "winograd_output")  # in the order of its launches
TRANSFORMS = (STEPS[0], STEPS[2])


@dataclass(frozen=True)
class Entry:
    """One schedule for one GPU, not compiled yet."""

    gpu: str
    kernel: str  # a direction of gpu_implicit_gemm or a step of gpu_winograd
    dtype: str
    precision: str
    schedule: Schedule
    is_default: bool

    @property
    def problem(self) -> Problem:
        text = (WINOGRAD if self.kernel in STEPS
                else LAYERS[self.kernel][bool(self.schedule["flat"])])
        return Problem.parse(text.format(self.dtype))


@dataclass(frozen=True)
class Row:
    """A line of the audit."""

    gpu: str
    kernel: str
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
        turned = self.kernel == "backward_weight" and self.dtype == "f32"
        return "flat" in self.schedule or (turned and self.precision != "ieee")

    @property
    def transforms(self) -> bool:
        """Whether it multiplies nothing and has no loop."""
        return self.kernel in TRANSFORMS

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
        if not self.products and not self.transforms:
            found.append("no product in the main loop")
        if not self.gathers and self.load_bits < 128:
            found.append(f"loads {self.load_bits} bits at a time, needs 128")
        return found


def entries(gpus: Sequence[str] = tuple(GPUS), defaults_only: bool = False) -> list[Entry]:
    """Every shipped schedule; bfloat16 is compiled like float16, so only its default is."""
    found = [entry for gpu in gpus for entry in (*_directions(gpu), *_winograd(gpu))]
    return [entry for entry in found if entry.is_default or not defaults_only]


def _directions(gpu: str) -> Iterator[Entry]:
    for direction in DIRECTIONS:
        for kind in KINDS:
            half = kind == "half"
            for i, s in enumerate(rows(direction, kind, gpu)):
                precision, first = "ieee" if half else kind, i == 0
                for dtype in ("f16", "bf16")[:1 + first] if half else ("f32",):
                    yield Entry(gpu, direction, dtype, precision, s, first)


def _winograd(gpu: str) -> Iterator[Entry]:
    """Transforms are the same in all precisions; the products with the defaults and others."""
    for dtype, precision in (("f16", "ieee"), ("bf16", "ieee"), ("f32", "ieee"),
                             ("f32", "tf32x3"), ("f32", "bf16x6")):
        algorithm, target = GpuWinograd(precision), Target.gpu(gpu)
        p = Problem.parse(WINOGRAD.format(dtype))
        if algorithm.reject(p, target):
            continue
        default = algorithm.default(p, target)
        for s in algorithm.space(p, target):
            first = s.with_(tile=default.tile) == default
            if first and precision == "ieee":
                yield from (Entry(gpu, kernel, dtype, precision, s, s == default)
                            for kernel in TRANSFORMS)
            if s["swizzle"] == default.swizzle and s["tile"] == default.tile and (
                    first or dtype != "bf16"):
                yield Entry(gpu, STEPS[1], dtype, precision, s, s == default)


def audit_entry(entry: Entry) -> Row:
    """Compile one schedule and read what became of it."""
    from ..kernels.gpu import conv, winograd_conv
    from ..kernels.gpu.audit import audit

    gpu, s, p = GPUS[entry.gpu], entry.schedule, entry.problem
    if entry.kernel in STEPS:
        launch = winograd_conv.launches(p, s, entry.precision)[STEPS.index(entry.kernel)]
    else:
        launch = conv.launches(p, s, entry.precision)[0]
    limit = gpu.macs * gpu.flops(entry.dtype, entry.precision) / gpu.half
    macs = 0 if entry.kernel in TRANSFORMS else s.bm * s.bn * s.bk
    found = audit(launch, gpu, macs / limit)
    return Row(entry.gpu, entry.kernel, entry.dtype, entry.precision, short(entry.kernel, s),
               entry.is_default, **asdict(found))


def short(kernel: str, s: Schedule) -> str:
    """A schedule as the table writes it."""
    tile = [f"F{s.tile}"] if "tile" in s else []
    if kernel in TRANSFORMS:
        return " ".join([*tile, f"{s.tiles}x{s.channels}", f"w{s.transform_warps}"])
    words = [*tile, f"{s.bm}x{s.bn}x{s.bk}", f"w{s.warps}", f"s{s.stages}"]
    words += [str(s["weight"])] if "weight" in s else []
    return " ".join(words + (["flat"] if s.get("flat") else []))


def gpu_audit(gpus: Sequence[str] = tuple(GPUS), defaults_only: bool = False,
              workers: int | None = None, tell: Tell = silent) -> list[Row]:
    """Compile all shipped GPU schedules, on any machine that has Triton; nothing is timed.

    Args:
        gpus: Some of sm_80, sm_90, sm_100 and gfx942.
        defaults_only: Only the first schedule of each kind.
        workers: Processes that compile; the cores, if not said.
        tell: A function `(what, done, total)` that is told how far it is.

    Returns:
        A row for each schedule.

    >>> rows = gpu_audit(["sm_90"], defaults_only=True)  # doctest: +SKIP
    """
    unknown = [name for name in gpus if name not in GPUS]
    if unknown:
        raise TilewiseError(f"gpu is {', '.join(unknown)}, needs some of {', '.join(GPUS)}")
    if find_spec("triton") is None:
        raise NotInstalled("the audit compiles Triton kernels, needs triton: "
                           "pip install 'tilewise[gpu]'")
    return audited(entries(gpus, defaults_only), workers, tell)


def audited(work: Sequence[Entry], workers: int | None = None, tell: Tell = silent) -> list[Row]:
    """What became of every entry; in as many processes as there are cores, if not said."""
    count = min(workers or os.cpu_count() or 1, len(work))
    if count <= 1:
        return _told(map(audit_entry, work), len(work), tell)
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        return _told(pool.map(audit_entry, work, chunksize=4), len(work), tell)


def _told(rows: Iterable[Row], total: int, tell: Tell) -> list[Row]:
    found: list[Row] = []
    tell("compiling", 0, total)
    for row in rows:
        found.append(row)
        tell(f"compiled {row.gpu} {row.kernel} {row.dtype}", len(found), total)
    return found


COLUMNS = ("GPU", "kernel", "type", "products", "schedule", "registers", "spills", "shared",
           "occupancy", "loop", "multiplying", "load bits", "math cycles", "issue cycles")


def cells(row: Row) -> tuple[str, ...]:
    """A row as text; the default of its kind has a star."""
    products = row.precision if row.dtype == "f32" else "matrix"
    products = "none" if row.transforms else products
    return (row.gpu, row.kernel, row.dtype, products,
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
