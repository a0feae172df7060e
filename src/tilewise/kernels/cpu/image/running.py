"""The least or the largest of rectangles: windows are doubled until they are as large as asked.

Two windows of n pixels that lie n or less apart make a larger one. A window of any size takes so
few steps that memory is what it waits for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ....core.filter import Filter
from ....core.isa import Isa
from ....core.schedule import Schedule
from ..emit import Function, Index, Module, Pointer, Vector
from ..emit.threads import WEIGHT
from .common import FilterModule, FilterSizes


class Geometry(FilterSizes):
    """Every size of a running filter."""

    def pack_weight(self, kernel: Any) -> Any:
        """The code knows the rectangle."""
        return np.zeros(1)


def make(p: Filter, s: Schedule, isa: Isa) -> Module:
    """The module of a running filter."""
    return _Running(Geometry(p, s, isa.lanes), isa).module()


def steps(size: int) -> list[int]:
    """How far apart the windows are that make the next larger one.

    >>> steps(7)
    [1, 2, 3]
    """
    found, covered = [], 1
    while covered < size:
        found.append(min(covered, size - covered))
        covered += found[-1]
    return found


class _Running(FilterModule):
    flushes = False

    def prepare_functions(self) -> None:
        self.pick = self.packed.least if self.p.order == 0 else self.packed.largest
        self.fold = self._fold()
        self.writers()

    def _fold(self) -> Function:
        """Some rows in place, each value with the one `apart` bytes behind it."""
        g = self.g
        with self.m.function("fold", x="pointer", rows="index", width="index",
                             apart="index") as f, \
                f.loop(f.rows) as row, f.loop(f.width, step=g.lanes) as column:
            here = f.x.of(self.packed).bytes(row.i * g.pitch) + column.i
            here.store(self._both(here, f.apart))
        return f

    def _both(self, x: Pointer, apart: Index | int) -> Vector:
        first, second = (at.load(lanes=self.g.lanes, work=self.work)
                         for at in (x, x.bytes(apart)))
        return self.pick(first, second)

    def outputs(self, f: Function, x: Pointer, weight: Pointer, rows: int,
                vectors: int) -> list[Vector]:
        """The last step across."""
        g = self.g
        last = [self.p.c * g.bytes * step for step in steps(self.p.s)[-1:]]
        places = [x.of(self.packed).bytes(row * g.pitch + v * g.lanes * g.bytes)
                  for row in range(rows) for v in range(vectors)]
        return [self._both(at, last[0]) if last else at.load(lanes=g.lanes, work=self.work)
                for at in places]

    def tiles(self, f: Function, packed: Pointer, y: Pointer, y_row: Index, rows: Index,
              width: Index, free: Pointer) -> None:
        p, g, tall = self.p, self.g, self.s.rows
        weight, left = f.frame.load_pointer(WEIGHT), p.r - 1
        for step in steps(p.r):
            left -= step
            f.call(self.fold, packed, rows + left, width + g.span, step * g.pitch)
        with f.loop(rows, step=tall) as row:
            here, there = packed.bytes(row.i * g.pitch), y.bytes(row.i * y_row)
            left = p.s - 1
            for step in steps(p.s)[:-1]:
                left -= step
                f.call(self.fold, here, tall, width + left * p.c, step * p.c * g.bytes)
            with f.either(rows - row.i >= tall) as (whole, part):
                with whole:
                    f.call(self.fast, here, weight, there, y_row, width)
                with part:
                    f.call(self.careful, here, weight, there, y_row, width, rows - row.i)
