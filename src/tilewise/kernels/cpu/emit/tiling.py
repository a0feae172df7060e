"""Cutting an axis into pieces, and moving rectangles of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .function import Function
from .pointers import Pointer
from .values import Index


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Partition:
    """An axis in as few pieces of at most `limit` as possible, equal to within one.

    The first `bigs` pieces have size `big`, the others one less.
    """

    total: int
    limit: int

    @property
    def count(self) -> int:
        return ceil_div(self.total, self.limit)

    @property
    def big(self) -> int:
        return ceil_div(self.total, self.count)

    @property
    def bigs(self) -> int:
        return self.total - self.count * (self.big - 1)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The different sizes that occur."""
        return (self.big,) if self.bigs == self.count else (self.big, self.big - 1)

    def start(self, piece: Index) -> Index:
        """Where a piece begins; the one past the last begins at the end."""
        if self.bigs == self.count:
            return piece * self.big
        return piece * self.big - (piece - self.bigs).maximum(0)

    def widest(self, pieces: int) -> int:
        """The most that so many neighbouring pieces can cover."""
        return min(self.total, pieces * self.big)

    def pieces(self, f: Function, first: Index, last: Index) -> Iterator[tuple[int, Index]]:
        """Emit a loop over pieces first..last; yields the size and the piece, once per size."""
        for size in self.sizes:
            low = first if size == self.big else first.maximum(self.bigs)
            high = last if size != self.big else last.minimum(self.bigs)
            with f.loop(high, start=low) as loop:
                yield size, loop.i


def emit_pieces(f: Function, sizes: Sequence[int], counts: Sequence[Index], first: Index,
                last: Index) -> Iterator[tuple[int, Index, Index]]:
    """Emit loops over pieces of an axis; yields size, start and number, once per size.

    So many pieces of each size follow each other; none goes beyond `last`.
    """
    number = f.index(0)
    for size, count in zip(sizes, counts, strict=True):
        with f.loop(count) as loop:
            yield size, (first + loop.i * size).minimum(last - size), number + loop.i
        first, number = first + count * size, number + count


def emit_copy(f: Function, to: Pointer, source: Pointer, count: Index | int) -> None:
    """Copy `count` floats."""
    lanes = f.isa.lanes
    whole = count // lanes * lanes
    with f.loop(whole, step=lanes) as loop:
        (to + loop.i).store((source + loop.i).load())
    rest = count - whole
    if isinstance(rest, int) and rest == 0:
        return
    (to + whole).store((source + whole).load(count=rest), count=rest)


def emit_zero(f: Function, to: Pointer, count: Index) -> None:
    """Clear `count` floats."""
    lanes = f.isa.lanes
    whole = count // lanes * lanes
    with f.loop(whole, step=lanes) as loop:
        (to + loop.i).store(f.vector(0.0))
    (to + whole).store(f.vector(0.0), count=count - whole)
