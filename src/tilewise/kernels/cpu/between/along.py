"""Values along rows, for kernels that do not know how long a row is.

Sums are made of parts: one for every lane and every stretch of a row, so that none rounds often.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..emit import ELEMENTS, Bits, Flag, Function, Index, Pointer, Vector
from ..emit.threads import SIZES

STRETCH = 1 << 10  # columns that one sum of a lane goes through
LONG = 512  # columns from which one row is enough at once, and several would fill a cache

Join = Callable[[Vector, Vector], Vector]


class Columns(NamedTuple):
    """A vector of columns, the same for some rows; `rest` where they do not fill it."""

    first: Index
    rest: Index | None = None

    def load(self, rows: Sequence[Pointer]) -> list[Vector]:
        return [row.load(self.first, count=self.rest) for row in rows]

    def store(self, rows: Sequence[Pointer], values: Sequence[Vector],
              streaming: bool = False) -> None:
        for row, value in zip(rows, values, strict=True):
            row.store(value, self.first, count=self.rest,
                      streaming=streaming and self.rest is None)

    def only(self, value: Vector, other: Vector) -> Vector:
        """A value, and another where there are no columns."""
        if self.rest is None:
            return value
        inside = Bits(value.f, value.f.leading(self.rest, value.lanes))
        chosen: Vector = inside.select(value, other)
        return chosen


Step = Callable[[Columns, list[Vector]], list[Vector]]  # joins some columns with what is known


def reduced(f: Function, columns: Index, starts: Sequence[Vector], wide: int, step: Step,
            join: Join) -> list[Vector]:
    """Each of `starts` with all columns joined to it by `step`, the same value in every lane.

    So many vectors go on at once: `join` makes one of theirs.
    """
    lanes, starts = f.isa.lanes, list(starts)
    with f.loop(columns, step=STRETCH, carry=starts) as stretch:
        end = (stretch.i + STRETCH).minimum(columns)
        wides = stretch.i + (end - stretch.i) // (lanes * wide) * (lanes * wide)
        with f.loop(wides, start=stretch.i, step=lanes * wide, carry=starts * wide) as at:
            at.values = [value for i in range(wide) for value in step(
                Columns(at.i + i * lanes), at.values[i * len(starts):(i + 1) * len(starts)])]
        parts = [_folded(at.values[i::len(starts)], join) for i in range(len(starts))]
        whole = wides + (end - wides) // lanes * lanes
        with f.loop(whole, start=wides, step=lanes, carry=parts) as at:
            at.values = step(Columns(at.i), at.values)
        parts = at.values
        if lanes > 1:
            with f.maybe(whole < end, parts) as last:
                last.values = step(Columns(whole, end - whole), parts)
            parts = last.values
        stretch.values = [join(known, part)
                          for known, part in zip(stretch.values, parts, strict=True)]
    return [across(value, join) for value in stretch.values]


def _folded(values: list[Vector], join: Join) -> Vector:
    while len(values) > 1:
        half = len(values) // 2
        values = [join(a, b) for a, b in zip(values[:half], values[half:])] + values[2 * half:]
    return values[0]


def across(value: Vector, join: Join) -> Vector:
    """All lanes joined, in every lane."""
    apart = value.lanes // 2
    while apart:
        value = join(value, value.shuffle(value, [i ^ apart for i in range(value.lanes)]))
        apart //= 2
    return value


def added(a: Vector, b: Vector) -> Vector:
    return a + b


def each_columns(f: Function, columns: Index, wide: int,
                 body: Callable[[list[Columns]], None]) -> None:
    """body(vectors of columns) for all columns, so many vectors at once where there are."""
    lanes = f.isa.lanes
    wides, whole = columns // (lanes * wide) * (lanes * wide), columns // lanes * lanes
    with f.loop(wides, step=lanes * wide) as at:
        body([Columns(at.i + i * lanes) for i in range(wide)])
    if wide > 1:
        with f.loop(whole, start=wides, step=lanes) as at:
            body([Columns(at.i)])
    if lanes > 1:
        with f.when(whole < columns):
            body([Columns(whole, columns - whole)])


def each_rows(f: Function, first: Index, last: Index, together: int,
              body: Callable[[Index, int], None], where: Flag | None = None) -> None:
    """body(row, how many) for rows, so many at once where there are and where a flag holds."""
    count = last - first if where is None else where.select(last - first, f.index(0))
    whole = first + count // together * together
    with f.loop(whole, start=first, step=together) as row:
        body(row.i, together)
    with f.loop(last, start=whole) as row:
        body(row.i, 1)


# floats among a frame's sizes


def as_word(value: float) -> int:
    """A float32 as a word of a frame."""
    word: int = struct.unpack("=q", struct.pack("=f4x", value))[0]
    return word


def as_double(value: float) -> int:
    """A float64 as a word of a frame."""
    word: int = struct.unpack("=q", struct.pack("=d", value))[0]
    return word


def float_word(f: Function, names: Sequence[str], name: str, lanes: int | None = None) -> Vector:
    """What `as_word` packed, in every lane."""
    found: Vector = f.frame.bytes(8 * (SIZES + names.index(name))).broadcast(lanes=lanes)
    return found


def double_word(f: Function, names: Sequence[str], name: str) -> Vector:
    """What `as_double` packed, in a vector of one lane."""
    at: Pointer = f.frame.bytes(8 * (SIZES + names.index(name)))
    return at.of(ELEMENTS["f64"]).broadcast(lanes=1)
