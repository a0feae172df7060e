"""Where the windows of a pool lie along one axis, by torch's rules."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from ..kernels.cpu.between.pools import Line
from ..kernels.cpu.emit.tiling import ceil_div


class Windows(NamedTuple):
    """Windows of one size; `padded`: an average counts the padding that they reach into."""

    taps: int
    stride: int
    padding: int = 0
    dilation: int = 1
    ceil_mode: bool = False
    padded: bool = False

    @property
    def span(self) -> int:
        return (self.taps - 1) * self.dilation + 1

    def lines(self, size: int) -> list[Line]:
        """None at all where torch would complain."""
        if (min(self.taps, self.stride, self.dilation) < 1 or self.padding < 0
                or self.padding > self.taps // 2):
            return []
        return [self._line(i * self.stride - self.padding, size)
                for i in range(self._outputs(size))]

    def numbered(self, size: int, row: int = 1) -> list[Line]:
        """The same, with the number of its first value: those of a line are `row` apart."""
        return [line._replace(size=row * max(0, self.padding - i * self.stride))
                for i, line in enumerate(self.lines(size))]

    def turned(self, size: int, row: int = 1) -> list[Line]:
        """For each value the windows that it is in, and its number in the first of them."""
        outputs = len(self.lines(size))
        return [self._windows_of(i + self.padding, outputs, row) for i in range(size)]

    def _windows_of(self, place: int, outputs: int, row: int) -> Line:
        first = max(0, ceil_div(place - self.taps + 1, self.stride))
        count = max(0, min(outputs - 1, place // self.stride) - first + 1)
        return Line(first if count else 0, count, row * (place - first * self.stride))

    def _outputs(self, size: int) -> int:
        room = size + 2 * self.padding - self.span
        if not self.ceil_mode:
            return room // self.stride + 1
        outputs = ceil_div(room, self.stride) + 1
        # the last window begins inside the image or the padding before it
        return outputs - ((outputs - 1) * self.stride >= size + self.padding)

    def _line(self, start: int, size: int) -> Line:
        before = max(0, -(start // self.dilation))  # taps that lie in the padding
        behind = min(self.taps, -((start - size) // self.dilation))
        count = max(0, behind - before)
        divisor = min(start + self.span, size + self.padding) - start if self.padded else count
        return Line(start + before * self.dilation if count else 0, count, divisor)


def adaptive(size: int, outputs: int) -> list[Line]:
    """So many windows over the whole axis; neighbours may share a value."""
    bounds = [(i * size // outputs, ceil_div((i + 1) * size, outputs)) for i in range(outputs)]
    return [Line(first, last - first, last - first) for first, last in bounds]


def stretches(size: int, outputs: int) -> list[Line]:
    """Sums of parts that share nothing."""
    bounds = [i * size // outputs for i in range(outputs + 1)]
    return [Line(first, last - first, 1) for first, last in pairwise(bounds)]


def whole(size: int, divisor: int) -> list[Line]:
    return [Line(0, size, divisor)]


def each(size: int) -> list[Line]:
    """Every value by itself."""
    return [Line(i, 1, 1) for i in range(size)]
