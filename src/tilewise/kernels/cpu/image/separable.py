"""A filter of low rank: columns of the kernel first, into scratch, then its rows.

A tile of rows is filtered downwards once for each term of the kernel; the sums across go through
all terms before anything is written.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ....core.cached import cached
from ....core.filter import Filter
from ....core.isa import Isa
from ....core.lowrank import factors
from ....core.schedule import Schedule
from ..emit import Function, Index, Module, Pointer, Vector
from ..emit.threads import WEIGHT
from .common import FilterModule, FilterSizes


class Geometry(FilterSizes):
    """Every size of a separable filter."""

    @cached
    def plane(self) -> int:
        """Bytes of a tile filtered downwards."""
        return int(self.s.rows) * self.pitch

    def worker_bytes(self, band: int) -> int:
        return super().worker_bytes(band) + self.p.rank * self.plane

    def pack_weight(self, kernel: Any) -> Any:
        """[term][row of the kernel], then [term][column]."""
        columns, rows = factors(kernel, self.p.rank)
        return np.concatenate([columns.T.ravel(), rows.ravel()]).astype(self.dtype)


def make(p: Filter, s: Schedule, isa: Isa) -> Module:
    """The module of a separable filter."""
    return _Separable(Geometry(p, s, isa.lanes), isa).module()


class _Separable(FilterModule):
    def prepare_functions(self) -> None:
        self.writers()
        self.down = self._down()

    def outputs(self, f: Function, x: Pointer, weight: Pointer, rows: int,
                vectors: int) -> list[Vector]:
        """Sums across."""
        return self.sums(f, x, weight, rows, vectors, (1, self.p.s), self.p.rank, self.g.plane)

    def _down(self) -> Function:
        """One term of a tile's rows, over all columns that the sums across will read."""
        g, s = self.g, self.s
        with self.m.function("down", x="pointer", weight="pointer", y="pointer",
                             width="index") as f, f.loop(f.width, step=g.lanes) as column:
            at = column.i * g.bytes
            sums = self.sums(f, f.x.bytes(at), f.weight, s.rows, 1, (self.p.r, 1))
            for row, value in enumerate(sums):
                f.y.of(self.packed).bytes(at + row * g.pitch).store(value)
        return f

    def tiles(self, f: Function, packed: Pointer, y: Pointer, y_row: Index, rows: Index,
              width: Index, free: Pointer) -> None:
        p, g, tall = self.p, self.g, self.s.rows
        down = f.frame.load_pointer(WEIGHT)
        across = down.bytes(p.rank * p.r * g.bytes)
        with f.loop(rows, step=tall) as row:
            with f.loop(p.rank) as term:
                f.call(self.down, packed.bytes(row.i * g.pitch),
                       down.bytes(term.i * (p.r * g.bytes)), free.bytes(term.i * g.plane),
                       width + g.span)
            here = y.bytes(row.i * y_row)
            with f.either(rows - row.i >= tall) as (whole, part):
                with whole:
                    f.call(self.fast, free, across, here, y_row, width)
                with part:
                    f.call(self.careful, free, across, here, y_row, width, rows - row.i)
