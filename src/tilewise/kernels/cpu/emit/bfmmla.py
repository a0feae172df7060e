"""Arm's products of bfloat16 matrices: sums of two rows and two columns in a register.

One instruction adds A (2 rows of 4 values) times B (4 values of 2 columns) to them. A tile is two
rows and four columns: one register of A, two of B, two of sums.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ....core.isa import BFMMLA
from .elements import FLOAT32
from .pointers import Pointer
from .unit import Side, Unit, part_of
from .values import BFLOAT, F32, Vector

SIDE = 2  # rows and columns of a register of sums
HALVES = BFMMLA.columns // SIDE  # registers of a tile
LANES = 4  # floats of a register
# left and right halves of two rows from the rows, and the rows from them
TURNED = ((0, 1, 4, 5), (2, 3, 6, 7))
OPERAND = ir.VectorType(BFLOAT, 2 * LANES)
SUMS = ir.VectorType(F32, LANES)


class Registers(Unit):
    """Sums are values: tile by tile, as [row of tiles][column of tiles][half]."""

    a: list[Any]
    b: list[Any]

    def begin(self, c: Pointer, out: Side, fresh: bool) -> None:
        for top, below in self._rows(c, out):
            self.sums += [self.f.vector(0.0)] * HALVES if fresh else self._turned(
                top.load(), below.load())

    def store(self, c: Pointer, out: Side) -> None:
        for number, rows in enumerate(self._rows(c, out)):
            halves = self.sums[number * HALVES:(number + 1) * HALVES]
            for to, value in zip(rows, self._turned(*halves), strict=True):
                to.store(value)

    def load_left(self, a: Pointer, part: int) -> None:
        at = part_of(a, self.left, part)
        self.a = [self._operand(at + tile) for tile in self.left.tiles]

    def load_right(self, b: Pointer, part: int) -> None:
        at = part_of(b, self.right, part)
        self.b = [self._operand(at + (tile + half * LANES)) for tile in self.right.tiles
                  for half in range(HALVES)]

    def multiply(self) -> None:
        call = self.f.intrinsic("llvm.aarch64.neon.bfmmla", SUMS, [SUMS, OPERAND, OPERAND])
        pairs = [(a, b) for a in self.a for b in self.b]
        self.sums = [Vector(self.f, self.f.ll.call(call, [sums.ir, a, b]))
                     for sums, (a, b) in zip(self.sums, pairs, strict=True)]

    def _rows(self, c: Pointer, out: Side) -> list[tuple[Pointer, Pointer]]:
        """Both rows of every tile of c."""
        floats = out.pitch // FLOAT32.bytes
        starts = [c + (row + j * out.part) for row in out.tiles
                  for j in range(len(self.right.tiles))]
        return [(start, start + floats) for start in starts]

    def _turned(self, first: Vector, second: Vector) -> list[Vector]:
        return [first.shuffle(second, lanes) for lanes in TURNED]

    def _operand(self, at: Pointer) -> Any:
        return self.f.ll.bitcast(at.load(lanes=LANES).ir, OPERAND)
