"""Passes of the matrix unit over all rows of a task.

Each does as much of the depth as keeps that part of the weights in the first cache while the rows
pass by; sums wait in memory from one to the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..emit import Function, Index
from ..emit.tiling import Partition

Kind = tuple[bool, int]  # whether a pass is the first, and its length: all that code depends on


@dataclass(frozen=True)
class Pass:
    """Steps `start`.. of the depth."""

    start: Index
    length: int
    first: bool
    last: bool

    @property
    def kind(self) -> Kind:
        return self.first, self.length


class Passes(Partition):
    """A depth in passes of at most `limit` steps."""

    @property
    def kinds(self) -> list[Kind]:
        later = [(False, size) for size in self.sizes] if self.count > 1 else []
        return [(True, self.big), *later]

    def each(self, f: Function) -> Iterator[Pass]:
        """Emit all passes: the first, a loop over those of each length between, and the last."""
        final = self.count - 1
        yield Pass(f.index(0), self.big, True, final == 0)
        if final > 1:
            for size, piece in self.pieces(f, f.index(1), f.index(final)):
                yield Pass(self.start(piece), size, False, False)
        if final:
            size = self.sizes[-1]
            yield Pass(f.index(self.total - size), size, False, True)
