"""Tap by tap, in the order of a table that comes at run time: one code for every footprint.

A table has the number of entries, the first tap, and the others. A tap is its offset in bytes
and, where the form has weights, a float64; of a symmetric line, two offsets share one.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from ....core.filter import Filter
from ....core.isa import Isa
from ....core.schedule import Schedule
from ..emit import ELEMENTS, Function, Module, Pointer, Vector
from .common import FilterModule, FilterSizes

WEIGHTED = ("taps", "line", "even", "odd")
PAIRED = {"even": 1.0, "odd": -1.0}  # the sign of the second of a pair
EPSILON = 2.0 ** -52  # scipy leaves out smaller weights of filters that are no lines


Entry = tuple[list[tuple[int, int]], float, float]  # places, their weight, the second's sign


class Geometry(FilterSizes):
    """Every size of such a filter."""

    def pack_weight(self, kernel: Any) -> Any:
        """The table as 64-bit words."""
        form, words = self.p.form, [0]
        for places, weight, _ in self.entries(kernel):
            words += [row * self.pitch + column * self.p.c * self.bytes for row, column in places]
            words += [_bits(weight)] * (form in WEIGHTED)
            words[0] += 1
        return np.array(words, np.int64)

    def entries(self, kernel: Any) -> list[Entry]:
        """Places of the kernel that share a weight, in the order of the sums."""
        return ordered(kernel, self.p.form)


def ordered(kernel: Any, form: str) -> list[Entry]:
    """scipy's order of sums."""
    if form not in WEIGHTED:
        return [([(int(i), int(j))], 1.0, 0.0) for i, j in np.argwhere(kernel)]
    taps: list[Entry] = [([divmod(i, kernel.shape[1])], float(weight), 0.0)
                         for i, weight in enumerate(kernel.ravel())]
    if form == "line":
        return [taps[-1], *taps[:-1]]
    if form == "taps":
        return [tap for tap in taps if abs(tap[1]) > EPSILON] or taps[:1]
    middle, sign = len(taps) // 2, PAIRED[form]
    return [taps[middle], *(([*taps[i][0], *taps[-1 - i][0]], taps[i][1], sign)
                            for i in range(middle))]


def _bits(weight: float) -> int:
    return int(struct.unpack("q", struct.pack("d", weight))[0])


def make(p: Filter, s: Schedule, isa: Isa) -> Module:
    """The module of a filter that goes tap by tap."""
    return _Taps(Geometry(p, s, isa.lanes), isa).module()


class _Taps(FilterModule):
    flushes = False

    def prepare_functions(self) -> None:
        self.writers()

    def outputs(self, f: Function, x: Pointer, weight: Pointer, rows: int,
                vectors: int) -> list[Vector]:
        g, form = self.g, self.p.form
        places = [row * g.pitch + v * g.lanes * g.bytes
                  for row in range(rows) for v in range(vectors)]

        def loaded(table: Pointer, word: int) -> list[Vector]:
            at = x.of(self.packed).bytes(table.load_index(word))
            return [at.bytes(place).load(lanes=g.lanes, work=self.work) for place in places]

        found = loaded(weight, 1)
        if form in WEIGHTED:
            by = weight.of(ELEMENTS["f64"]).broadcast(2, g.lanes)
            found = [value * by for value in found]
        words = 1 + (form in PAIRED) + (form in WEIGHTED)
        start = weight.bytes(8 * (2 + (form in WEIGHTED)))
        with f.loop(weight.load_index(0), start=1, carry=[start, *found]) as tap:
            table, *sums = tap.values
            terms = loaded(table, 0)
            if form in PAIRED:
                terms = [a + b if form == "even" else a - b
                         for a, b in zip(terms, loaded(table, 1))]
            if form in WEIGHTED:
                by = table.of(ELEMENTS["f64"]).broadcast(words - 1, g.lanes)
                terms = [value * by for value in terms]
            tap.values = [table.bytes(8 * words),
                          *(self._joined(a, b) for a, b in zip(sums, terms))]
        return list(tap.values[1:])

    def _joined(self, a: Vector, b: Vector) -> Vector:
        if self.p.form != "order":
            return a + b
        return (self.packed.least if self.p.order == 0 else self.packed.largest)(a, b)

    def stored(self, value: Vector) -> Vector:
        if self.p.form == "order":
            return value
        if self.p.form == "mean":
            value = value / value.same(self.p.taps)
        return self.target.cut_off(value)
