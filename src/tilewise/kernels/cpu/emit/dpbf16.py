"""AVX-512's products of bfloat16 pairs: sums of one row and sixteen columns in a register.

One instruction adds a pair of A, the same in all lanes, times a pair of each column of B to them.
A tile is one row: A is read pair by pair where it lies, and B is loaded for all rows.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ....core.isa import DPBF16
from .pointers import Pointer
from .unit import Side, Unit, part_of
from .values import BFLOAT, F32, Vector

PAIRS = DPBF16.depth // 2  # of a row of A in a step
LANES = DPBF16.columns
OPERAND = ir.VectorType(BFLOAT, 2 * LANES)
SUMS = ir.VectorType(F32, LANES)


class Vectors(Unit):
    """Sums are values: as [row][column of tiles]."""

    a: list[Pointer]
    b: list[Pointer]

    def begin(self, c: Pointer, out: Side, fresh: bool) -> None:
        self.sums = [self.f.vector(0.0) if fresh else at.load() for at in self._places(c, out)]

    def store(self, c: Pointer, out: Side) -> None:
        for to, value in zip(self._places(c, out), self.sums, strict=True):
            to.store(value)

    def load_left(self, a: Pointer, part: int) -> None:
        """Where it is: registers hold sums."""
        self.a = [part_of(a, self.left, part) + tile for tile in self.left.tiles]

    def load_right(self, b: Pointer, part: int) -> None:
        self.b = [part_of(b, self.right, part) + tile for tile in self.right.tiles]

    def multiply(self) -> None:
        for pair in range(PAIRS):
            right = [self._operand(at.load(pair * LANES)) for at in self.b]
            for i, at in enumerate(self.a):
                # no instruction: LLVM would load ahead, or keep what taps share, and spill sums
                self.f.ll.fence("acquire", "singlethread")
                left = self._operand(at.broadcast(pair))
                for j, columns in enumerate(right, start=i * len(right)):
                    self.sums[j] = self._product(self.sums[j], left, columns)

    def _product(self, sums: Vector, a: Any, b: Any) -> Vector:
        call = self.f.intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", SUMS, [SUMS, OPERAND, OPERAND])
        return Vector(self.f, self.f.ll.call(call, [sums.ir, a, b]))

    def _places(self, c: Pointer, out: Side) -> list[Pointer]:
        """Where sums lie in c."""
        return [c + (row + j * out.part) for row in out.tiles
                for j in range(len(self.right.tiles))]

    def _operand(self, floats: Vector) -> Any:
        return self.f.ll.bitcast(floats.ir, OPERAND)
