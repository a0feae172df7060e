"""The multiply of a matrix unit: some tiles of sums are held while it walks over the depth.

What a tile is, and how its operands are loaded, a unit says: amx.py, bfmmla.py, dpbf16.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...matrix import PAIRS
from .elements import FLOAT32
from .function import Function
from .microkernel import LINE, Step
from .pointers import Pointer


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


class Unit:
    """A multiply in the making; loops carry the sums that are held in values."""

    def __init__(self, f: Function, left: Side, right: Side, products: int,
                 starts: Sequence[tuple[Step, int]] = ((0, 0),),
                 rows: Sequence[Rows] = (Rows(),), level: int = 2) -> None:
        self.f, self.left, self.right, self.pairs = f, left, right, PAIRS[products]
        self.starts, self.rows, self.level = starts, rows, level
        self.sums: list[Any] = []  # none where they lie in tiles that have numbers

    # what a unit says

    @staticmethod
    def configure(f: Function) -> None:
        """Make it usable by this thread, where it is not."""

    @staticmethod
    def release(f: Function) -> None:
        """Give it back."""

    def begin(self, c: Pointer, out: Side, fresh: bool) -> None:
        """Sums from zero, or from what is there."""
        raise NotImplementedError

    def store(self, c: Pointer, out: Side) -> None:
        """The sums, row by row."""
        raise NotImplementedError

    def load_left(self, a: Pointer, part: int) -> None:
        """Hold a part of a."""
        raise NotImplementedError

    def load_right(self, b: Pointer, part: int) -> None:
        """Hold a part of b."""
        raise NotImplementedError

    def multiply(self) -> None:
        """Add what is held of a times what is held of b."""
        raise NotImplementedError

    # what all do

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
        with self.f.loop(count, carry=[a, b, ahead, *self.sums]) as turn:
            a, b, ahead, *self.sums = turn.values
            turn.values = [a + a_step, b + b_step, body(a, b, ahead), *self.sums]
        self.sums = turn.values[3:]
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
        """One depth of the unit: all pairs of parts, each operand loaded when it changes."""
        held: tuple[int | None, int | None] = self.pairs[0] if loaded else (None, None)
        for pair in self.pairs:
            if pair[0] != held[0]:
                self.load_left(a, pair[0])
            if pair[1] != held[1]:
                self.load_right(b, pair[1])
            held = pair
            self.multiply()

    def load_first(self, a: Pointer, b: Pointer) -> None:
        """What a step begins with."""
        self.load_left(a, self.pairs[0][0])
        self.load_right(b, self.pairs[0][1])


def part_of(at: Pointer, side: Side, part: int) -> Pointer:
    """Where a part of an operand begins."""
    return at + (part * side.part if part else 0)
