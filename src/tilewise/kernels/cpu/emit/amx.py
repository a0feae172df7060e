"""The matrix unit: eight tiles of sixteen rows of 64 bytes, and products of bfloat16 pairs.

One operation adds A (16 rows of 32 values) times B (32 x 16, pairs of rows side by side) to
C (16 x 16 floats). The multiply keeps two by two tiles of C and walks over the depth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from ...matrix import PAIRS
from .checks import safe_rows
from .elements import FLOAT32
from .function import Function
from .microkernel import LINE, Step, Walk
from .pointers import Pointer
from .values import I8, I64, PTR, VOID, Index

TILE = 256  # floats in the memory of a tile
ROWS, ROW_BYTES = 16, 64  # of a tile
MOST = 2  # tiles of C along an axis: two by two of them, two of A and two of B fill all eight
# eight words: palette one, rows of 64 bytes, sixteen rows, in all eight tiles
CONFIGURATION = (1, 0, 0x0040_0040_0040_0040, 0x0040_0040_0040_0040, 0, 0,
                 0x1010_1010_1010_1010, 0)


def configure(f: Function) -> None:
    """Make the tiles of this thread usable."""
    table = f.words(len(CONFIGURATION))
    for i, word in enumerate(CONFIGURATION):
        table.store_index(i, word)
    f.ll.call(f.intrinsic("llvm.x86.ldtilecfg", VOID, [PTR]), [table.ir])


def release(f: Function) -> None:
    """Give the tiles back: others configure them as they need them."""
    f.ll.call(f.intrinsic("llvm.x86.tilerelease", VOID, []), [])


@dataclass(frozen=True)
class Side:
    """Tiles of one operand: where each begins, how far apart parts (floats) and rows (bytes).

    One that is `passing` is not soon read again, and should leave the first cache to the other.
    """

    tiles: tuple[int, ...]
    part: Step
    pitch: int = FLOAT32.bytes * LINE
    passing: bool = False


@dataclass(frozen=True)
class Rows:
    """Rows of steps: where the first begins in a and b, and a loop over them as of a walk."""

    start: tuple[Step, int] = (0, 0)
    loop: tuple[int, Step, int] = (1, 0, 0)


def multiply(f: Function, a: Pointer, b: Pointer, c: Pointer, left: Side, right: Side, out: Side,
             walk: Walk, products: int, fresh: bool = True,
             ahead: tuple[Pointer, Step] | None = None,
             starts: Sequence[tuple[Step, int]] = ((0, 0),), rows: Sequence[Rows] = (Rows(),),
             level: int = 2) -> None:
    """c = a @ b over the walk, or c += a @ b where c is not `fresh`.

    `out` has the rows of tiles of c; its part is the way from one tile of a row to the next.
    `ahead` is memory to bring into a level of cache meanwhile: where it begins, and how many
    cache lines in each step. Every turn of the innermost loop does `rows`, and of each row the
    steps at these offsets in a and b.
    """
    unit = _Unit(f, left, right, products, starts, rows, level)
    sums = _sums(right, out)
    for tile, where in sums.items():
        unit.begin(tile, c + where, out.pitch, fresh)
    unit.walk(a, b, ahead[0] if ahead else a, walk.loops, ahead[1] if ahead else 0)
    for tile, where in sums.items():
        unit.call("tilestored64", tile, c + where, out.pitch)


def multiply_column(f: Function, a: Pointer, b: Pointer, c: Pointer, left: Side, right: Side,
                    out: Side, walk: Walk, products: int, fresh: bool,
                    ahead: tuple[Pointer, int], blocks: Index | int, next_a: int,
                    next_c: int) -> None:
    """As many multiplies of the same b, over a walk of one loop, as there are `blocks` of a and c.

    Sums wait for the last operations before they are stored, and all that stands behind them waits
    as well: the first operands of the next block stand before them.
    """
    unit, sums = _Unit(f, left, right, products), _sums(right, out)
    (here, lines), ((count, a_step, b_step),) = ahead, walk.loops
    unit.load_first(a, b)
    for tile, where in sums.items():
        unit.begin(tile, c + where, out.pitch, fresh)
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
            unit.begin(tile, then + where, out.pitch, fresh)
        block.values = [a, then, here]


def _sums(right: Side, out: Side) -> dict[int, Step]:
    """Tiles of c, and where each begins."""
    return {(i * MOST + j): row + j * out.part
            for i, row in enumerate(out.tiles) for j in range(len(right.tiles))}


def only_multiply(f: Function, data: Pointer, turns: int) -> None:
    """The operations of a multiply alone, on four tiles of data: the unit's clock minds values."""
    unit = _Unit(f, Side((0, TILE), 0), Side((2 * TILE, 3 * TILE), 0), 1)
    for tile in range(4):
        unit.call("tilezero", tile)
        unit.load(4 + tile, data + tile * TILE, FLOAT32.bytes * LINE)
    with f.loop(turns):
        unit.multiply()


class _Unit:
    """Instructions of the matrix unit; tile numbers are part of them."""

    def __init__(self, f: Function, left: Side, right: Side, products: int,
                 starts: Sequence[tuple[Step, int]] = ((0, 0),),
                 rows: Sequence[Rows] = (Rows(),), level: int = 2) -> None:
        self.f, self.left, self.right, self.pairs = f, left, right, PAIRS[products]
        self.starts, self.rows, self.level = starts, rows, level

    def walk(self, a: Pointer, b: Pointer, ahead: Pointer,
             loops: Sequence[tuple[int, Step, Step]], lines: Step) -> Pointer:
        """Emit the loops from the outermost inwards; where the prefetch has come to."""
        if loops:
            return self.repeated(loops[0], a, b, ahead,
                                 lambda a, b, ahead: self.walk(a, b, ahead, loops[1:], lines))
        for rows in self.rows:
            ahead = self.repeated(rows.loop, a + rows.start[0], b + rows.start[1], ahead,
                                  lambda a, b, ahead: self.steps(a, b, ahead, lines))
        return ahead

    def repeated(self, loop: tuple[int, Step, Step], a: Pointer, b: Pointer, ahead: Pointer,
                 body: Callable[[Pointer, Pointer, Pointer], Pointer]) -> Pointer:
        """A loop of a walk; where the prefetch has come to."""
        count, a_step, b_step = loop
        if count == 1:
            return body(a, b, ahead)
        with self.f.loop(count, carry=[a, b, ahead]) as turn:
            a, b, ahead = turn.values
            turn.values = [a + a_step, b + b_step, body(a, b, ahead)]
        return turn.values[2]

    def steps(self, a: Pointer, b: Pointer, ahead: Pointer, lines: Step,
              loaded: bool = False) -> Pointer:
        """The steps of a row; where the prefetch has come to."""
        for a_start, b_start in self.starts:
            self.fetch(ahead, lines)
            self.step(a + a_start, b + b_start, loaded)
            ahead = ahead + lines * LINE
        return ahead

    def fetch(self, ahead: Pointer, lines: Step) -> None:
        """Ask for so many cache lines."""
        if isinstance(lines, int):
            for line in range(lines):
                ahead.prefetch(line * LINE, level=self.level)
            return
        with self.f.loop(lines) as one:
            (ahead + one.i * LINE).prefetch(level=self.level)

    def step(self, a: Pointer, b: Pointer, loaded: bool) -> None:
        """32 values of the depth: all pairs of parts, each operand loaded when it changes."""
        held: tuple[int | None, int | None] = self.pairs[0] if loaded else (None, None)
        for pair in self.pairs:
            if pair[0] != held[0]:
                self.load_side(4, a, self.left, pair[0])
            if pair[1] != held[1]:
                self.load_side(6, b, self.right, pair[1])
            held = pair
            self.multiply()

    def load_first(self, a: Pointer, b: Pointer) -> None:
        """What a step begins with."""
        self.load_side(4, a, self.left, self.pairs[0][0])
        self.load_side(6, b, self.right, self.pairs[0][1])

    def begin(self, tile: int, where: Pointer, pitch: int, fresh: bool) -> None:
        """Sums from zero, or from what is there."""
        if fresh:
            self.call("tilezero", tile)
        else:
            self.load(tile, where, pitch)

    def load_side(self, first: int, at: Pointer, side: Side, part: int) -> None:
        """A part of an operand into the tiles from `first` on."""
        name = "tileloaddt164" if side.passing else "tileloadd64"
        for i, tile in enumerate(side.tiles):
            self.call(name, first + i, at + (part * side.part if part else 0) + tile, side.pitch)

    def multiply(self) -> None:
        """The held tiles of A times those of B."""
        for i in range(len(self.left.tiles)):
            for j in range(len(self.right.tiles)):
                self.call("tdpbf16ps", i * MOST + j, 4 + i, 6 + j)

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
            values += safe_rows(memory[0], operands[2], ROWS, ROW_BYTES, verb)
        self.f.ll.call(self.f.intrinsic(f"llvm.x86.{name}", VOID, types), values)
