"""The matrix unit of a row of instructions."""

from __future__ import annotations

from collections.abc import Sequence

from . import amx, bfmmla, dpbf16
from .function import Function
from .microkernel import Step, Walk
from .pointers import Pointer
from .unit import Rows, Side, Unit

UNITS: dict[str, type[Unit]] = {"amx": amx.Tiles, "bfmmla": bfmmla.Registers,
                                "dpbf16": dpbf16.Vectors}


def multiply(f: Function, a: Pointer, b: Pointer, c: Pointer, left: Side, right: Side, out: Side,
             walk: Walk, products: int, fresh: bool = True,
             ahead: tuple[Pointer, Step] | None = None,
             starts: Sequence[tuple[Step, int]] = ((0, 0),), rows: Sequence[Rows] = (Rows(),),
             level: int = 2) -> None:
    """c = a @ b over the walk, or c += a @ b where c is not `fresh`.

    `out` has the rows of tiles of c; its part is the way from one tile of a row to the next.
    `ahead` is memory to bring into a level of cache meanwhile: where it begins, and how many
    cache lines in each step. Every turn of the innermost loop does `rows`, and of each row the
    steps at these offsets in a and b.
    """
    unit = unit_of(f)(f, left, right, products, starts, rows, level)
    unit.begin(c, out, fresh)
    unit.walk(a, b, ahead[0] if ahead else a, walk.loops, ahead[1] if ahead else 0)
    unit.store(c, out)


def unit_of(f: Function) -> type[Unit]:
    """That of the instructions for which a function is written."""
    assert f.isa.matrix is not None, f"{f.isa.name} has no matrix unit"
    return UNITS[f.isa.matrix.name]
