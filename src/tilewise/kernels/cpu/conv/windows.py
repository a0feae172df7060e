"""Windows of an image, transformed on their way into panels; zeros where they leave the image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...winograd_math import Matrix
from ..emit import Function, Index, Module, Pointer, Vector
from ..emit.elements import FLOAT32, Element
from .transforms import transform


@dataclass(frozen=True)
class Windows:
    """Overlapping rectangles of one image [row][column][channel], `step` apart."""

    h: int
    w: int
    c: int
    rows: int
    cols: int
    step: tuple[int, int]
    padding: tuple[int, int]  # above and to the left of the image
    element: Element = FLOAT32  # what it holds


class WindowReader:
    """down @ window @ across^T of all channels, each value where `at(channel)` says.

    `position` is the distance of the transformed values of one channel.
    """

    def __init__(self, m: Module, name: str, windows: Windows, matrices: tuple[Matrix, Matrix],
                 at: Callable[[Index], Index], position: int) -> None:
        self.windows, self.matrices, self.at, self.position = windows, matrices, at, position
        self.inside = self._reader(m, f"{name}_inside", border=False)
        self.border = self._reader(m, f"{name}_border", border=True)

    def _reader(self, m: Module, name: str, border: bool) -> Function:
        """One window into `to`; a border window comes as a table of addresses."""
        channels = self.windows.c
        with m.function(name, x="pointer", to="pointer") as f:
            lanes = f.isa.lanes
            whole = channels // lanes * lanes
            with f.loop(whole, step=lanes) as c:
                self._vector(f, c.i, lanes, border)
            if channels > whole:
                self._vector(f, f.index(whole), channels - whole, border)
        return f

    def _vector(self, f: Function, c: Index, count: int, border: bool) -> None:
        windows, across = self.windows, len(self.matrices[1])
        to = f.to + self.at(c)

        def load(i: int, j: int) -> Vector:
            if border:
                at = f.x.load_pointer(i * windows.cols + j, windows.element)
                return (at + c).load(count=count)
            return (f.x.of(windows.element) + c).load((i * windows.w + j) * windows.c, count=count)

        def store(i: int, j: int, value: Vector) -> None:
            to.store(value, (i * across + j) * self.position)

        transform(f, *self.matrices, load, store)

    def read(self, f: Function, x: Pointer, place: tuple[Index, Index, Index], to: Pointer,
             zeros: Pointer, table: Pointer) -> None:
        """The window at (image, row, column); `zeros` are as many as there are channels."""
        v = self.windows
        image, row, col = place
        top, left = row * v.step[0] - v.padding[0], col * v.step[1] - v.padding[1]
        corner = x + ((image * v.h + top) * v.w + left) * v.c
        fits = (((top >= 0) & (top < v.h - v.rows + 1))
                & ((left >= 0) & (left < v.w - v.cols + 1)))
        with f.either(fits) as (inside, border):
            with inside:
                f.call(self.inside, corner, to)
            with border:
                cols = [(left + j >= 0) & (left + j < v.w) for j in range(v.cols)]
                for i in range(v.rows):
                    in_row = (top + i >= 0) & (top + i < v.h)
                    for j in range(v.cols):
                        here = corner + (i * v.w + j) * v.c
                        table.store_pointer(i * v.cols + j,
                                            (in_row & cols[j]).select(here, zeros))
                f.call(self.border, table, to)
