"""A value by its place in the order of its window, by networks of least and largest.

Windows of a whole rectangle share work: columns are sorted once for all windows that they are in,
and so are pairs of columns merged. Values that cannot be the one are dropped on the way.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ....core.cached import cached
from ....core.filter import Filter
from ....core.isa import Isa
from ....core.schedule import Schedule
from ....core.selection import (
    Pick,
    candidates,
    merged,
    of_grid,
    selected,
    sorted_,
    sorted_windows,
)
from ..emit import Function, Index, Module, Pointer, Vector
from ..emit.threads import WEIGHT
from .common import FilterModule, FilterSizes


class Geometry(FilterSizes):
    """Every size of a network, and which values it keeps."""

    def pack_weight(self, kernel: Any) -> Any:
        """The code knows the footprint."""
        return np.zeros(1)

    @cached
    def column(self) -> slice:
        """What is kept of a sorted column."""
        return candidates(self.p.r, self.p.r * self.p.s, self.p.order)

    @cached
    def high(self) -> int:
        """Values that are kept of a column."""
        return self.column.stop - self.column.start

    @cached
    def order_of_columns(self) -> int:
        """The place of the value among what is kept of all columns."""
        return self.p.order - self.p.s * self.column.start

    @cached
    def pair(self) -> slice:
        """What is kept of two columns merged."""
        return candidates(2 * self.high, self.high * self.p.s, self.order_of_columns)

    @cached
    def planes(self) -> int:
        """Rows of scratch for a row of outputs: columns, then pairs."""
        if self.p.footprint:
            return 0
        return self.high + (self.pair.stop - self.pair.start) * self.has_pairs

    @cached
    def has_pairs(self) -> bool:
        """Whether pairs are worth their place: of three columns, each is in few of them."""
        return self.p.s > 3

    def worker_bytes(self, band: int) -> int:
        return super().worker_bytes(band) + self.s.rows * self.planes * self.pitch


def make(p: Filter, s: Schedule, isa: Isa) -> Module:
    """The module of a network."""
    kind = _Scattered if p.footprint else _Rectangle
    return kind(Geometry(p, s, isa.lanes), isa).module()


class _Network(FilterModule):
    flushes = False

    @property
    def pick(self) -> Pick:
        return Pick(self.packed.least, self.packed.largest)

    def at(self, x: Pointer, row: int, column: int = 0) -> Vector:
        """A vector of packed values, so many rows and columns further."""
        place = row * self.g.pitch + column * self.p.c * self.g.bytes
        return x.of(self.packed).bytes(place).load(lanes=self.g.lanes, work=self.work)


class _Scattered(_Network):
    """Any footprint: every window by itself."""

    def prepare_functions(self) -> None:
        self.writers()

    def outputs(self, f: Function, x: Pointer, weight: Pointer, rows: int,
                vectors: int) -> list[Vector]:
        p = self.p
        columns = [[i for i in range(p.r) if p.footprint[i * p.s + j] == "1"]
                   for j in range(p.s)]
        return [selected([sorted_([self.at(x.bytes(v * self.g.lanes * self.g.bytes), row + i, j)
                                   for i in taps], self.pick)
                          for j, taps in enumerate(columns)], p.order, self.pick)
                for row in range(rows) for v in range(vectors)]


class _Rectangle(_Network):
    """The scratch of a tile has, for each of its rows, planes of columns and of pairs."""

    def prepare_functions(self) -> None:
        self.sort, self.pairs = self._sort(), self._pairs()
        self.writers()

    def _sort(self) -> Function:
        """Columns of all rows of a tile."""
        g, p = self.g, self.p
        with self.m.function("sort", x="pointer", y="pointer", width="index") as f, \
                f.loop(f.width, step=g.lanes) as column:
            at = column.i * g.bytes
            values = [self.at(f.x.bytes(at), i) for i in range(self.s.rows + p.r - 1)]
            for row, found in enumerate(sorted_windows(values, p.r, self.pick)):
                self._keep(f.y.bytes(at + row * g.planes * g.pitch), found[g.column])
        return f

    def _keep(self, y: Pointer, values: list[Vector]) -> None:
        for i, value in enumerate(values):
            y.of(self.packed).bytes(i * self.g.pitch).store(value)

    def _pairs(self) -> Function:
        """Of one row of a tile, columns merged with their right neighbours."""
        g = self.g
        with self.m.function("pairs", x="pointer", width="index") as f, \
                f.loop(f.width, step=g.lanes) as column:
            here = f.x.bytes(column.i * g.bytes)
            left, right = ([self.at(here, i, j) for i in range(g.high)] for j in (0, 1))
            self._keep(here.bytes(g.high * g.pitch), merged(left, right, self.pick)[g.pair])
        return f

    def outputs(self, f: Function, x: Pointer, weight: Pointer, rows: int,
                vectors: int) -> list[Vector]:
        return [self._chosen(x.bytes(row * self.g.planes * self.g.pitch
                                     + v * self.g.lanes * self.g.bytes))
                for row in range(rows) for v in range(vectors)]

    def _chosen(self, x: Pointer) -> Vector:
        g, s = self.g, self.p.s
        if not g.has_pairs:
            columns = [[self.at(x, i, j) for i in range(g.high)] for j in range(s)]
            return of_grid(columns, g.order_of_columns, self.pick)
        pairs = [[self.at(x, i, j) for i in range(g.high, g.planes)] for j in range(0, s - 1, 2)]
        last = [[self.at(x, i, s - 1) for i in range(g.high)]] * (s % 2)
        return selected([*pairs, *last], g.order_of_columns - len(pairs) * g.pair.start,
                        self.pick)

    def tiles(self, f: Function, packed: Pointer, y: Pointer, y_row: Index, rows: Index,
              width: Index, free: Pointer) -> None:
        p, g, tall = self.p, self.g, self.s.rows
        weight = f.frame.load_pointer(WEIGHT)
        with f.loop(rows, step=tall) as row:
            f.call(self.sort, packed.bytes(row.i * g.pitch), free, width + g.span)
            if g.has_pairs:
                with f.loop(tall) as each:
                    f.call(self.pairs, free.bytes(each.i * (g.planes * g.pitch)),
                           width + (g.span - p.c))
            here = y.bytes(row.i * y_row)
            with f.either(rows - row.i >= tall) as (whole, part):
                with whole:
                    f.call(self.fast, free, weight, here, y_row, width)
                with part:
                    f.call(self.careful, free, weight, here, y_row, width, rows - row.i)
