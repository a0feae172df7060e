"""All channels of a pixel, for kernels that do not know how many there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..emit import Function, Index, Pointer, Vector


class Block(NamedTuple):
    """Some vectors of channels side by side; only one that stands alone may be cut short."""

    first: Index
    vectors: int
    rest: Index | None = None  # channels, where they do not fill a vector

    def constant(self, f: Function, value: float) -> list[Vector]:
        return [f.vector(value) for _ in range(self.vectors)]

    def load(self, pixel: Pointer) -> list[Vector]:
        """These channels of a pixel whose first channel is pointed at."""
        at = pixel + self.first
        return [at.load(i * at.f.isa.lanes, count=self.rest) for i in range(self.vectors)]

    def store(self, pixel: Pointer, values: list[Vector]) -> None:
        at = pixel + self.first
        for i, value in enumerate(values):
            at.store(value, i * value.lanes, count=self.rest)


def each_block(f: Function, first: Index, last: Index, widths: Sequence[int],
               body: Callable[[Block], None]) -> None:
    """body(block) for blocks of so many vectors, the widest first, then for the rest."""
    lanes, done = f.isa.lanes, first
    for width in widths:
        wide = lanes * width
        end = done + (last - done) // wide * wide
        with f.loop(end, start=done, step=wide) as k:
            body(Block(k.i, width))
        done = end
    if lanes > 1:
        with f.when(done < last):
            body(Block(done, 1, last - done))
