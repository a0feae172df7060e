"""Taps of dilated filters that see the image: those that see nothing but padding are left out.

A row of outputs is cut into stretches that see the same taps. So all pixels of a register tile
have each tap inside the image or outside, no padding is multiplied, and nothing is packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ....core.cut import fitted
from ....core.taps import taps_inside
from ..emit import Function, Index
from ..emit.sizes import InCode


@dataclass(frozen=True)
class Taps:
    """Taps first..end along an axis; all values are emitted ones."""

    first: Index
    end: Index

    @property
    def count(self) -> Index:
        return self.end - self.first


def seen(at: Index, size: Index, taps: int, apart: int) -> Taps:
    return Taps(*taps_inside(at, size, taps, apart, Index.minimum, Index.maximum))


def seen_by_row(z: InCode, row: Index) -> Taps:
    p = z.p
    return seen(row * p.stride[0] - z.top, z.h, p.r, p.dilation[0])


@dataclass(frozen=True)
class Stretch:
    """Output columns start..stop that see the same taps, and the register tiles that cover it."""

    start: Index
    stop: Index
    taps: Taps
    pieces: list[Index]


@contextmanager
def each_stretch(f: Function, z: InCode, first: Index, last: Index) -> Iterator[Stretch]:
    """Emit a loop over the stretches of output columns first..last."""
    p, step, left, w = z.p, z.p.stride[1], z.left, z.w
    with f.repeat(lambda start: start < last, [first]) as turn:
        start = turn.values[0]
        taps = seen(start * step - left, w, p.s, p.dilation[1])
        # the last tap on the left comes in, or the last inside goes out
        enters = _reaches(left - (taps.first - 1) * p.dilation[1], step)
        leaves = _reaches(left + w - (taps.end - 1) * p.dilation[1], step)
        stop = last.minimum((taps.first >= 1).select(enters, last))
        stop = stop.minimum((taps.end >= 1).select(leaves, last))
        pieces = fitted(stop - start, z.widths, lambda enough, n: enough.select(n, f.index(0)))
        yield Stretch(start, stop, taps, pieces)
        turn.values = [stop]


def _reaches(column: Index, step: int) -> Index:
    """The first output whose first tap lies at an input column, padding counted, or behind it."""
    return (column + (step - 1)) // step
