"""A byte by its place in the order of a large window, by histograms.

Every column of a band has a histogram of the rows under the window, which gains one value and loses
one from row to row. The histogram of a window gains one column and loses one from pixel to pixel.
The place is looked up among sums over sixteen values each, then among the sixteen.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ....core.cached import cached
from ....core.filter import Filter
from ....core.isa import Isa
from ....core.schedule import Schedule
from ..emit import Function, Index, Module, Pointer, counts
from .common import FilterModule, FilterSizes

LEVELS, COARSE = 256, 16
WIDE = 32  # counts that are added at a time
COLUMN = -(-(LEVELS + COARSE) // WIDE) * WIDE * counts.BYTES  # bytes of a histogram
SUMS = 64  # bytes for sums, from a zero on


class Geometry(FilterSizes):
    """Every size of a filter by histograms."""

    def pack_weight(self, kernel: Any) -> Any:
        """The code knows the rectangle."""
        return np.zeros(1)

    @cached
    def columns(self) -> int:
        """Histograms of a worker: empty ones before the first column, and those of a strip."""
        return int(self.p.c + self.s.strip + self.span)

    def worker_bytes(self, band: int) -> int:
        """The packed rectangle, the columns, the window's histogram and its sums."""
        return super().worker_bytes(band) + (self.columns + 1) * COLUMN + SUMS


def make(p: Filter, s: Schedule, isa: Isa) -> Module:
    """The module of a filter by histograms."""
    return _Histogram(Geometry(p, s, isa.lanes), isa).module()


class _Histogram(FilterModule):
    def prepare_functions(self) -> None:
        self.clear, self.count = self._clear(), self._count()
        self.slide = self._slide()

    def _clear(self) -> Function:
        """Histograms, all counts zero."""
        with self.m.function("clear", x="pointer", bytes="index") as f, \
                f.loop(f.bytes, step=WIDE * counts.BYTES) as i:
            counts.store(f.x.bytes(i.i), counts.zeros(f.x, WIDE))
        return f

    def _count(self) -> Function:
        """A row of bytes into the histograms of its columns, or out of them."""
        with self.m.function("count", x="pointer", columns="pointer", width="index",
                             number="index") as f, f.loop(f.width) as i:
            value, column = counts.load_byte(f.x.bytes(i.i)), f.columns.bytes(i.i * COLUMN)
            counts.add(column, value, f.number)
            counts.add(column, value // COARSE + LEVELS, f.number)
        return f

    def _slide(self) -> Function:
        """A row of outputs of one colour; the window's histogram lies before the sums."""
        p, apart = self.p, self.p.c * COLUMN
        with self.m.function("slide", columns="pointer", window="pointer", y="pointer",
                             width="index") as f:
            f.call(self.clear, f.window, COLUMN)
            with f.loop(p.s - 1) as first:
                self._move(f.window, f.columns.bytes(first.i * apart), None)
            with f.loop(f.width, step=p.c) as i:
                here = f.columns.bytes(i.i * COLUMN)
                # the empty columns before the first are what the first window loses
                self._move(f.window, here.bytes((p.s - 1) * apart), here.bytes(-apart))
                counts.store_byte(f.y.bytes(i.i), self._found(f, f.window))
        return f

    def _move(self, window: Pointer, gained: Pointer, lost: Pointer | None) -> None:
        for at in range(0, COLUMN, WIDE * counts.BYTES):
            found = counts.load(window.bytes(at), WIDE).plus(counts.load(gained.bytes(at), WIDE))
            if lost is not None:
                found = found.minus(counts.load(lost.bytes(at), WIDE))
            counts.store(window.bytes(at), found)

    def _found(self, f: Function, window: Pointer) -> Index:
        """The value at the place that is asked for."""
        place, sums = f.index(self.p.order), window.bytes(COLUMN)
        coarse = counts.load(window.bytes(LEVELS * counts.BYTES), COARSE).summed_up()
        counts.store(sums.bytes(counts.BYTES), coarse)
        group = coarse.at_most(place)
        before = counts.load_one(sums, group)  # the sum of the groups below
        fine = counts.load(window.bytes(group * (COARSE * counts.BYTES)), COARSE).summed_up()
        return group * COARSE + fine.at_most(place - before)

    def tiles(self, f: Function, packed: Pointer, y: Pointer, y_row: Index, rows: Index,
              width: Index, free: Pointer) -> None:
        p, g = self.p, self.g
        columns, window = free.bytes(p.c * COLUMN), free.bytes(g.columns * COLUMN)
        f.call(self.clear, free, g.columns * COLUMN)
        f.call(self.clear, window.bytes(COLUMN), SUMS)
        with f.loop(p.r - 1) as row:
            f.call(self.count, packed.bytes(row.i * g.pitch), columns, width + g.span, 1)
        with f.loop(rows) as row:
            gained = packed.bytes((row.i + (p.r - 1)) * g.pitch)
            f.call(self.count, gained, columns, width + g.span, 1)
            for colour in range(p.c):
                f.call(self.slide, columns.bytes(colour * COLUMN), window,
                       y.bytes(row.i * y_row + colour), width - colour)
            f.call(self.count, packed.bytes(row.i * g.pitch), columns, width + g.span, -1)
