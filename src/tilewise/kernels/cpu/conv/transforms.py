"""Two-dimensional transforms of tiles, from the straight-line programs of their matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ...winograd_math import Arithmetic, Matrix, straight_line
from ..emit import Function, Vector


class Lanes:
    """The arithmetic of programs on vectors."""

    def __init__(self, f: Function) -> None:
        self.f = f

    def constant(self, value: float) -> Vector:
        return self.f.vector(value)

    def zero(self) -> Vector:
        return self.constant(0.0)

    def add(self, a: Vector, b: Vector, /) -> Vector:
        return a + b

    def sub(self, a: Vector, b: Vector, /) -> Vector:
        return a - b

    def neg(self, a: Vector, /) -> Vector:
        return -a

    def scale(self, a: Vector, c: float, /) -> Vector:
        return a * self.constant(c)

    def fma(self, a: Vector, c: float, b: Vector, /) -> Vector:
        return self.f.fma(a, self.constant(c), b)


class _Late(Sequence[Vector]):
    """Values that are loaded when they are first asked for."""

    def __init__(self, count: int, load: Callable[[int], Vector]) -> None:
        self._count, self._load = count, load

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i):  # type: ignore[no-untyped-def]
        return self._load(i)


def _swapped(load: Callable[[int, int], Vector], j: int, i: int) -> Vector:
    return load(i, j)


def transform(f: Function, down: Matrix, across: Matrix, load: Callable[[int, int], Vector],
              store: Callable[[int, int, Vector], None],
              arithmetic: Arithmetic[Vector] | None = None) -> None:
    """store(down @ load @ across^T), first along columns, then along rows."""
    ops = arithmetic or Lanes(f)
    vertical, horizontal = straight_line(down), straight_line(across)
    columns = [vertical.run(_Late(vertical.inputs, partial(_swapped, load, j)), ops)
               for j in range(horizontal.inputs)]
    for i in range(len(down)):
        row = [column[i] for column in columns]
        for j, value in horizontal.stream(row, ops):
            store(i, j, value)
