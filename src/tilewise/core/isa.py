"""One row per instruction set: what kernels may know of a machine."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field, replace
from functools import lru_cache

from .platforms import HERE
from .platforms.linux import ARM


@dataclass(frozen=True)
class MatrixUnit:
    """Products of small matrices of bfloat16, which are added to tiles of float32 sums.

    A step adds A (rows x depth) times B (depth x columns) to a tile. Rows of A lie one after the
    other. Of B, `together` values of a column lie side by side, then those of the next column.
    """

    name: str
    rows: int  # of a tile
    columns: int  # of a tile: a vector of floats
    depth: int  # values that a step sums
    together: int
    most_rows: int  # tiles of sums that are held at once, down
    most_columns: int  # and across
    products: tuple[int, ...]  # numbers of products that can be faster than float32's own
    cycles: float  # of a tile in a step
    moved: float  # cycles to begin and store a tile of sums
    # whether it is apart from the vectors: the operating system has to admit it, and it is as fast
    # wherever it is
    apart: bool
    fetches: bool  # whether code asks for operands ahead of need
    images: bool  # whether kernels take images of bfloat16 as they are: tested for it
    in_flight: int = 1  # tiles of sums that have to be held for that speed
    near: int = 32 << 10  # bytes of weights that a pass over the pixels uses again and again
    # the same where they may come from the second cache: taps find the input in the first, and sums
    # that leave the unit would cost more
    far: int = 512 << 10

    @property
    def line(self) -> int:
        """Floats of memory that a row of A fills."""
        return self.depth // 2

    @property
    def tile(self) -> int:
        """Floats of memory that a tile of B fills."""
        return self.depth * self.columns // 2


@dataclass(frozen=True)
class Isa:
    """An instruction set; kernels read lanes and registers from it and nothing else."""

    name: str
    machines: tuple[str, ...]  # values of platform.machine() that have it
    # CPU flags that must be present; not printed, since a set's order differs between processes
    needs: frozenset[str] = field(repr=False)
    lanes: int  # floats in a vector
    registers: int  # vector registers
    fma: bool  # fused multiply-add
    memory_operands: bool  # arithmetic can take a broadcast from memory, without a register
    cpu: str  # LLVM's name of the baseline
    features: str  # LLVM feature string on top of it
    units: int = 2  # multiply-add instructions that can start in a cycle
    matrix: MatrixUnit | None = None  # products of bfloat16, beside the vectors
    by_element: bool = False  # arithmetic can take one lane of a register for all lanes
    attributes: tuple[str, ...] = ()  # of every function, in LLVM's words
    # whether kernels that widen bfloat16 and float16 to float32 were measured there
    widens: bool = field(default=False, repr=False)
    # whether functions stand for the unit's instructions: for tests, and far too slow for all else
    emulated: bool = False
    # makers of processors that have a faster row: there it is not chosen unless it is asked for
    slow_on: tuple[str, ...] = ()

    @property
    def is_written(self) -> bool:
        """Whether there is a machine that code can be written for."""
        return bool(self.machines)

    @property
    def reads_bf16(self) -> bool:
        """Whether its unit multiplies images of bfloat16 as they lie in memory."""
        return self.matrix is not None and self.matrix.images


_X86 = ("x86_64", "AMD64")
_AVX2 = frozenset({"avx2", "fma"})
_AVX512 = _AVX2 | {"avx512f", "avx512vl", "avx512bw", "avx512dq"}
_AVX512_BF16 = _AVX512 | {"avx512_bf16"}
_AMX = _AVX512_BF16 | {"amx_tile", "amx_bf16"}
_NONE = frozenset({"no machine has this flag"})
_WIDE = "-prefer-256-bit"  # full vectors, also where LLVM would halve them
# eight tiles of 16 rows of 64 bytes: four of sums, two of each operand. An operation takes 16
# cycles of a clock that is lower under this load
AMX = MatrixUnit("amx", 16, 16, 32, 2, 2, 2, (1, 3, 6), 21.0, 60.0, True, True, True)
# two registers of 2 x 2 sums; six products take longer than float32's own multiply-adds
BFMMLA = MatrixUnit("bfmmla", 2, 4, 4, 4, 4, 2, (1, 3), 1.0, 4.0, False, False, False)
# four vectors of columns, five rows, a step of eight pairs. Two products in the time of one of
# float32: three products take longer than float32's own
DPBF16 = MatrixUnit("dpbf16", 1, 16, 16, 2, 5, 4, (1,), 4.0, 2.0, False, True, True, in_flight=12,
                    near=16 << 10, far=16 << 10)
_TILES = "+amx-tile,+amx-bf16,+avx512bf16," + _WIDE
# the model whose scheduler keeps sums in registers; of no other does it say anything
_CALM = '"tune-cpu"="apple-m1"'


def _sve(bits: int, lanes: int) -> Isa:
    """Vectors of one length: code for it is wrong on a machine with another."""
    scale = bits // 128
    return Isa(f"sve{bits}", ARM, frozenset({"sve", f"sve{bits}"}), lanes, 32, True, False,
               "generic", "+sve", attributes=(f"vscale_range({scale},{scale})", _CALM))


ISA_ROWS = (
    Isa("amx", _X86, _AMX, 16, 32, True, True, "x86-64-v4", _TILES, matrix=AMX,
        widens=True),
    Isa("avx512_bf16", _X86, _AVX512_BF16, 16, 32, True, True, "x86-64-v4", "+avx512bf16," + _WIDE,
        matrix=DPBF16, widens=True,
        slow_on=("GenuineIntel",)),  # vdpbf16ps starts half as often as a multiply-add there
    Isa("avx512", _X86, _AVX512, 16, 32, True, True, "x86-64-v4", _WIDE, widens=True),
    Isa("avx2", _X86, _AVX2, 8, 16, True, False, "x86-64-v3", "", widens=True),
    _sve(512, 16),
    _sve(256, 8),
    Isa("neon_bf16", ARM, frozenset({"bf16"}), 4, 32, True, False, "generic", "+neon,+bf16",
        by_element=True, matrix=BFMMLA, attributes=(_CALM,)),
    Isa("neon", ARM, frozenset(), 4, 32, True, False, "generic", "+neon",
        by_element=True, attributes=(_CALM,)),
    Isa("generic", _X86, frozenset(), 4, 16, False, False, "x86-64", "", 1),
    # one float at a time: never chosen, the lowest rung of the ladder
    Isa("scalar", _X86, _NONE, 1, 16, False, False, "x86-64", "", 1),
)

# x86's units on processors that lack them; never chosen, and never timed
EMULATED = tuple(replace(row, name=f"{row.name}_emulated", needs=_AVX512, features=_WIDE,
                         emulated=True)
                 for row in ISA_ROWS if row.matrix and row.machines == _X86)
ISA = {row.name: row for row in (*ISA_ROWS, *EMULATED)}
# flags of processors on which torch multiplies them faster than it does float32
NATIVE = {"bf16": "amx_bf16", "f16": "avx512_fp16"}
NO_ISA = Isa("none", (), _NONE, 1, 1, False, False, "", "", 1)  # of machines without a row
# whether this machine has any of them; where not, models and conv2d are torch's
KNOWN = any(platform.machine() in row.machines and not row.needs for row in ISA_ROWS)


@lru_cache(maxsize=1)
def cpu_flags() -> frozenset[str]:
    """Flags that the system reports; empty where it reports none."""
    return HERE.cpu_flags(platform.machine())


def widens(row: Isa, dtype: str) -> bool:
    """Whether kernels read such images and compute in float32; where the processor multiplies such
    numbers itself and the row does not, torch is faster."""
    native = dtype == "bf16" and row.reads_bf16
    return row.widens and (native or NATIVE[dtype] not in cpu_flags())


@lru_cache(maxsize=1)
def may_use_tiles() -> bool:
    """Ask for the matrix unit's registers, once a process; a fork inherits the answer."""
    return HERE.may_use_tiles()


def available(machine: str | None = None, flags: frozenset[str] | None = None) -> tuple[Isa, ...]:
    """Rows this machine, or one with these flags, can run, widest first."""
    here = flags is None
    machine = platform.machine() if machine is None else machine
    flags = cpu_flags() if flags is None else flags
    rows = [row for row in ISA_ROWS if machine in row.machines and row.needs <= flags]
    return tuple(row for row in rows if not (here and asks_leave(row)) or may_use_tiles())


def emulable() -> tuple[Isa, ...]:
    """Rows that this machine can emulate, for those who name them."""
    if not HERE.can_emulate or platform.machine() not in _X86:
        return ()
    return tuple(row for row in EMULATED if row.needs <= cpu_flags())


def asks_leave(row: Isa) -> bool:
    """Whether it has registers that the operating system gives only to those who ask."""
    return row.matrix is not None and row.matrix.apart and not row.emulated
