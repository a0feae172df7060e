"""The least or the largest of rectangles: windows are doubled until they are as large as asked.

Two windows of n pixels that lie n or less apart make a larger one. A window of any size takes so
few steps that memory is what it waits for.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np

from ....core.filter import Filter
from ....core.isa import Isa
from ....core.schedule import Schedule
from ..emit import Function, Index, Module, Pointer, Vector
from ..emit.threads import WEIGHT
from .common import FilterModule, FilterSizes

NEAR = 16  # rows, or columns, of a window that are folded in registers


class Geometry(FilterSizes):
    """Every size of a running filter."""

    def pack_weight(self, kernel: Any) -> Any:
        """The code knows the rectangle."""
        return np.zeros(1)

    def worker_bytes(self, band: int) -> int:
        """The packed rectangle, and a tile that is folded down."""
        return super().worker_bytes(band) + int(self.s.rows) * self.pitch


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
        self.down = self._down()
        self.writers()

    def _fold(self) -> Function:
        """Some rows in place, each value with the one `apart` bytes behind it."""
        g = self.g
        with self.m.function("fold", x="pointer", rows="index", width="index",
                             apart="index") as f, \
                f.loop(f.rows) as row, f.loop(f.width, step=g.lanes) as column:
            here = f.x.of(self.packed).bytes(row.i * g.pitch) + column.i
            here.store(self.pick(self._at(here), self._at(here.bytes(f.apart))))
        return f

    def _down(self) -> Function:
        """A tile of rows, each with those of its window below it, in registers."""
        g, high = self.g, self.s.rows
        with self.m.function("down", x="pointer", y="pointer", width="index") as f, \
                f.loop(f.width, step=g.lanes) as column:
            at = column.i * g.bytes
            values = [self._at(f.x.bytes(at + row * g.pitch))
                      for row in range(high + self.near_rows - 1)]
            for row, value in enumerate(self._folded(values, self.near_rows)):
                f.y.of(self.packed).bytes(at + row * g.pitch).store(value)
        return f

    @property
    def near_rows(self) -> int:
        return self.p.r if self.p.r <= NEAR else 1

    def _at(self, x: Pointer) -> Vector:
        return x.of(self.packed).load(lanes=self.g.lanes, work=self.work)

    def _folded(self, values: list[Vector], size: int) -> list[Vector]:
        """Of every `size` neighbours, the one that counts."""
        for step in steps(size):
            values = [self.pick(a, b) for a, b in zip(values, values[step:])]
        return values

    def outputs(self, f: Function, x: Pointer, weight: Pointer, rows: int,
                vectors: int) -> list[Vector]:
        """Across: all columns of a small window, or the last step of a large one."""
        p, g = self.p, self.g
        apart = range(p.s) if p.s <= NEAR else (0, steps(p.s)[-1])
        places = [x.bytes(row * g.pitch + v * g.lanes * g.bytes)
                  for row in range(rows) for v in range(vectors)]
        return [reduce(self.pick, [self._at(at.bytes(step * p.c * g.bytes)) for step in apart])
                for at in places]

    def tiles(self, f: Function, packed: Pointer, y: Pointer, y_row: Index, rows: Index,
              width: Index, free: Pointer) -> None:
        p, g, tall = self.p, self.g, self.s.rows
        weight, left = f.frame.load_pointer(WEIGHT), p.r - 1
        for step in steps(p.r) if p.r > NEAR else ():
            left -= step
            f.call(self.fold, packed, rows + left, width + g.span, step * g.pitch)
        with f.loop(rows, step=tall) as row:
            there, left = y.bytes(row.i * y_row), p.s - 1
            f.call(self.down, packed.bytes(row.i * g.pitch), free, width + g.span)
            for step in steps(p.s)[:-1] if p.s > NEAR else ():
                left -= step
                f.call(self.fold, free, tall, width + left * p.c, step * p.c * g.bytes)
            with f.either(rows - row.i >= tall) as (whole, part):
                with whole:
                    f.call(self.fast, free, weight, there, y_row, width)
                with part:
                    f.call(self.careful, free, weight, there, y_row, width, rows - row.i)
