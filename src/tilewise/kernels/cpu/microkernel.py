"""The register-tile multiply: rows of a broadcast operand times vectors of a packed one.

It serves every algorithm whose inner loop is a matrix product; how the left operand lies in
memory is all that differs, and a `Walk` says it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.isa import Isa
from .emit import Function, Pointer, Vector


@dataclass(frozen=True)
class Walk:
    """The order of a reduction: loops (count, stride in floats) around runs of neighbours."""

    loops: tuple[tuple[int, int], ...]
    run: int

    @property
    def steps(self) -> int:
        steps = self.run
        for count, _ in self.loops:
            steps *= count
        return steps


def fits(isa: Isa, rows: int, vectors: int) -> bool:
    """Whether a tile's accumulators and operands stay in registers."""
    broadcast = 0 if isa.memory_operands and vectors == 1 else 1
    product = 0 if isa.fma else 1
    return rows * vectors + vectors + broadcast + product <= isa.registers


def multiply(f: Function, a: Pointer, b: Pointer, rows: Sequence[int], vectors: int, walk: Walk,
             unroll: int) -> list[list[Vector]]:
    """acc[i][j] = sum over the walk of a[rows[i] + step] * b[step][j]; b is read in order."""
    zeros = [f.vector(0.0) for _ in range(len(rows) * vectors)]
    tile = _Tile(f, tuple(rows), vectors, unroll)
    _, acc = tile.walk(a, b, zeros, walk.loops, walk.run)
    return [acc[i * vectors:(i + 1) * vectors] for i in range(len(rows))]


@dataclass(frozen=True)
class _Tile:
    f: Function
    rows: tuple[int, ...]
    vectors: int
    unroll: int

    def walk(self, a: Pointer, b: Pointer, acc: list[Vector], loops: Sequence[tuple[int, int]],
             run: int) -> tuple[Pointer, list[Vector]]:
        """Emit the loops from the outermost inwards; returns where b has come to."""
        if not loops:
            return self.run(a, b, acc, run)
        (count, stride), *inner = loops
        if count == 1:
            return self.walk(a, b, acc, inner, run)
        with self.f.loop(count, carry=[a, b, *acc]) as loop:
            a, b, *acc = loop.values
            b, acc = self.walk(a, b, acc, inner, run)
            loop.values = [a + stride, b, *acc]
        _, b, *acc = loop.values
        return b, acc

    def run(self, a: Pointer, b: Pointer, acc: list[Vector],
            length: int) -> tuple[Pointer, list[Vector]]:
        turns, rest = divmod(length, self.unroll)
        if turns <= 1:
            turns, rest = 0, length
        if turns:
            with self.f.loop(turns, carry=[a, b, *acc]) as loop:
                a, b, *acc = loop.values
                acc = self.steps(a, b, acc, self.unroll)
                loop.values = [a + self.unroll, b + self.unroll * self.width, *acc]
            a, b, *acc = loop.values
        return b + rest * self.width, self.steps(a, b, acc, rest)

    @property
    def width(self) -> int:
        return self.vectors * self.f.isa.lanes

    def steps(self, a: Pointer, b: Pointer, acc: list[Vector], count: int) -> list[Vector]:
        """`count` unrolled steps: each a row of b, against every row of the tile."""
        acc = list(acc)
        for step in range(count):
            right = [b.load(step * self.width + j * self.f.isa.lanes) for j in range(self.vectors)]
            for i, row in enumerate(self.rows):
                left = a.broadcast(row + step)
                for j in range(self.vectors):
                    at = i * self.vectors + j
                    acc[at] = self.f.fma(left, right[j], acc[at])
        return acc
