"""The matrix unit: eight tiles of sixteen rows of 64 bytes, and products of bfloat16 pairs.

One operation adds A (16 rows of 32 values) times B (32 x 16, pairs of rows side by side) to
C (16 x 16 floats). The multiply keeps two by two tiles of C and walks over the depth.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ....core.isa import AMX
from .checks import safe_rows
from .elements import FLOAT32
from .function import Function
from .microkernel import LINE, Step, Walk
from .pointers import Pointer
from .unit import Side, Unit, part_of
from .values import I8, I64, PTR, VOID, Index

TILE = AMX.tile  # floats in the memory of a tile
MOST = AMX.most_rows  # tiles of C along an axis
A, B = MOST ** 2, MOST ** 2 + MOST  # the first tiles of both operands, behind those of C
ROW_BYTES = FLOAT32.bytes * LINE  # of a tile
# eight words: palette one, rows of 64 bytes, sixteen rows, in all eight tiles
CONFIGURATION = (1, 0, 0x0040_0040_0040_0040, 0x0040_0040_0040_0040, 0, 0,
                 0x1010_1010_1010_1010, 0)


def multiply_column(f: Function, a: Pointer, b: Pointer, c: Pointer, left: Side, right: Side,
                    out: Side, walk: Walk, products: int, fresh: bool,
                    ahead: tuple[Pointer, int], blocks: Index | int, next_a: int,
                    next_c: int) -> None:
    """As many multiplies of the same b, over a walk of one loop, as there are `blocks` of a and c.

    Sums wait for the last operations before they are stored, and all that stands behind them waits
    as well: the first operands of the next block stand before them.
    """
    unit, sums = Tiles(f, left, right, products), _sums(right, out)
    (here, lines), ((count, a_step, b_step),) = ahead, walk.loops
    unit.load_first(a, b)
    for tile, where in sums.items():
        unit.begin_tile(tile, c + where, out.pitch, fresh)
    first = c
    with f.loop(blocks, carry=[a, c, here]) as block:
        a, c, here = block.values
        here = unit.steps(a, b, here, lines, loaded=True)
        here = unit.walk(a + a_step, b + b_step, here, ((count - 1, a_step, b_step),), lines)
        last = (block.i + 1).equals(blocks)
        # after the last: what can be read, and was not just written
        a, then = last.select(a, a + next_a), last.select(first, c + next_c)
        unit.load_first(a, b)
        for tile, where in sums.items():
            unit.call("tilestored64", tile, c + where, out.pitch)
            unit.begin_tile(tile, then + where, out.pitch, fresh)
        block.values = [a, then, here]


def _sums(right: Side, out: Side) -> dict[int, Step]:
    """Tiles of c, and where each begins."""
    return {(i * MOST + j): row + j * out.part
            for i, row in enumerate(out.tiles) for j in range(len(right.tiles))}


def only_multiply(f: Function, data: Pointer, turns: int) -> None:
    """The operations of a multiply alone, on four tiles of data: the unit's clock minds values."""
    unit = Tiles(f, Side((0, TILE), 0), Side((2 * TILE, 3 * TILE), 0), 1)
    for tile in range(4):
        unit.call("tilezero", tile)
        unit.load(4 + tile, data + tile * TILE, FLOAT32.bytes * LINE)
    with f.loop(turns):
        unit.multiply()


class Tiles(Unit):
    """Instructions of the matrix unit; tile numbers are part of them."""

    @staticmethod
    def configure(f: Function) -> None:
        table = f.words(len(CONFIGURATION))
        for i, word in enumerate(CONFIGURATION):
            table.store_index(i, word)
        f.ll.call(f.intrinsic("llvm.x86.ldtilecfg", VOID, [PTR]), [table.ir])

    @staticmethod
    def release(f: Function) -> None:
        """Others configure the tiles as they need them."""
        f.ll.call(f.intrinsic("llvm.x86.tilerelease", VOID, []), [])

    def begin(self, c: Pointer, out: Side, fresh: bool) -> None:
        for tile, where in _sums(self.right, out).items():
            self.begin_tile(tile, c + where, out.pitch, fresh)

    def store(self, c: Pointer, out: Side) -> None:
        for tile, where in _sums(self.right, out).items():
            self.call("tilestored64", tile, c + where, out.pitch)

    def load_left(self, a: Pointer, part: int) -> None:
        self.load_side(A, a, self.left, part)

    def load_right(self, b: Pointer, part: int) -> None:
        self.load_side(B, b, self.right, part)

    def begin_tile(self, tile: int, where: Pointer, pitch: int, fresh: bool) -> None:
        """Sums from zero, or from what is there."""
        if fresh:
            self.call("tilezero", tile)
        else:
            self.load(tile, where, pitch)

    def load_side(self, first: int, at: Pointer, side: Side, part: int) -> None:
        """A part of an operand into the tiles from `first` on."""
        name = "tileloaddt164" if side.passing else "tileloadd64"
        for i, tile in enumerate(side.tiles):
            self.call(name, first + i, part_of(at, side, part) + tile, side.pitch)

    def multiply(self) -> None:
        """The held tiles of A times those of B."""
        for i in range(len(self.left.tiles)):
            for j in range(len(self.right.tiles)):
                self.call("tdpbf16ps", i * MOST + j, A + i, B + j)

    def load(self, tile: int, where: Pointer, pitch: int) -> None:
        self.call("tileloadd64", tile, where, pitch)

    def call(self, name: str, *operands: Any) -> None:
        """Tile numbers first; memory is an address and a pitch in bytes."""
        memory = [o for o in operands if isinstance(o, Pointer)]
        tiles = operands[:1] if memory else operands
        types: list[Any] = [I8] * len(tiles)
        values = [ir.Constant(I8, tile) for tile in tiles]
        if memory:
            types += [PTR, I64]
            verb = "stores" if name == "tilestored64" else "loads"
            values += safe_rows(memory[0], operands[2], AMX.rows, ROW_BYTES, verb)
        self.f.ll.call(self.f.intrinsic(f"llvm.x86.{name}", VOID, types), values)
