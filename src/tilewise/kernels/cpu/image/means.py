"""Means of bytes down, then across, in 16-bit integers.

A sum of so few bytes fits in 16 bits. Its quotient is the upper half of a product with a reciprocal
that is rounded up: never too small, and not so large that it reaches the next integer.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np

from ....core.cached import cached
from ....core.filter import Filter
from ....core.isa import Isa
from ....core.quotients import reciprocal
from ....core.schedule import Schedule
from ..emit import Function, Index, Module, Pointer, Vector, counts
from ..emit.counts import Counts
from ..emit.threads import WEIGHT
from .common import FilterModule, FilterSizes


class Geometry(FilterSizes):
    """Every size of such means."""

    @cached
    def work(self) -> str:
        return "u16"

    def pack_weight(self, kernel: Any) -> Any:
        """The code knows the rectangle."""
        return np.zeros(1)

    def worker_bytes(self, band: int) -> int:
        """The packed rectangle, and a tile of means down."""
        return super().worker_bytes(band) + int(self.s.rows) * self.pitch


def make(p: Filter, s: Schedule, isa: Isa) -> Module:
    """The module of means."""
    return _Means(Geometry(p, s, isa.lanes), isa).module()


def sums(values: list[Counts], size: int) -> list[Counts]:
    """Of every `size` neighbours, from sums of powers of two of them."""
    found: list[Counts] = []
    power, wide, done = values, 1, 0
    while done < size:
        if size & wide:
            part = power[done:]
            found = [a.plus(b) for a, b in zip(found, part)] if done else part
            done += wide
        power = [a.plus(b) for a, b in zip(power, power[wide:])]
        wide *= 2
    return found


class _Means(FilterModule):
    def prepare_functions(self) -> None:
        self.down = self._down()
        self.writers()

    def _at(self, x: Pointer) -> Counts:
        return counts.load(x, self.g.lanes)

    def _down(self) -> Function:
        """A tile of rows, each the mean of its window."""
        g, p = self.g, self.p
        with self.m.function("down", x="pointer", y="pointer", width="index") as f, \
                f.loop(f.width, step=g.lanes) as column:
            at = column.i * g.bytes
            values = [self._at(f.x.bytes(at + row * g.pitch))
                      for row in range(self.s.rows + p.r - 1)]
            for row, total in enumerate(sums(values, p.r)[:self.s.rows]):
                mean = total.upper_of(reciprocal(p.r))
                counts.store(f.y.bytes(at + row * g.pitch), mean)
        return f

    def outputs(self, f: Function, x: Pointer, weight: Pointer, rows: int,
                vectors: int) -> list[Vector]:
        """Means across."""
        g, p = self.g, self.p
        places = [x.bytes(row * g.pitch + v * g.lanes * g.bytes)
                  for row in range(rows) for v in range(vectors)]
        totals = [reduce(Counts.plus, [self._at(at.bytes(i * p.c * g.bytes)) for i in range(p.s)])
                  for at in places]
        return [total.upper_of(reciprocal(p.s)).bytes() for total in totals]

    def tiles(self, f: Function, packed: Pointer, y: Pointer, y_row: Index, rows: Index,
              width: Index, free: Pointer) -> None:
        g, tall, weight = self.g, self.s.rows, f.frame.load_pointer(WEIGHT)
        with f.loop(rows, step=tall) as row:
            f.call(self.down, packed.bytes(row.i * g.pitch), free, width + g.span)
            here = y.bytes(row.i * y_row)
            with f.either(rows - row.i >= tall) as (whole, part):
                with whole:
                    f.call(self.fast, free, weight, here, y_row, width)
                with part:
                    f.call(self.careful, free, weight, here, y_row, width, rows - row.i)
