"""The register-tile multiply: rows of a broadcast operand times vectors of another.

It serves every algorithm whose inner loop is a matrix product; how the two operands lie in
memory is all that differs, and a `Walk` says it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .function import Function
from .pointers import Pointer
from .values import Index, Vector

LINE = 16  # floats in a cache line
Step = int | Index  # constant, or known when the code runs


@dataclass(frozen=True)
class Walk:
    """The order of a reduction: loops of (count, step of a, step of b), the outermost first."""

    loops: tuple[tuple[int, Step, Step], ...]

    @staticmethod
    def packed(width: int, *a_loops: tuple[int, Step]) -> Walk:
        """Loops of (count, step of a) against rows of `width` floats read in order."""
        loops: list[tuple[int, Step, Step]] = []
        step = width
        for count, stride in reversed(a_loops):
            loops.insert(0, (count, stride, step))
            step *= count
        return Walk(tuple(loops))


def multiply(f: Function, a: Pointer, b: Pointer, rows: Sequence[Step], vectors: int, walk: Walk,
             unroll: int, ahead: tuple[Pointer, Step] | None = None,
             last: Index | None = None,
             sums: list[Vector] | None = None) -> list[list[Vector]]:
    """acc[i][j] = sum over the walk of a[rows[i]] * b[j-th vector], added to `sums` row by row.

    Vectors lie side by side, but for the last one if `last` says where that is. `ahead` is memory
    to bring into the second cache meanwhile: where it begins, and how many cache lines before
    each innermost loop.
    """
    sums = sums or [f.vector(0.0) for _ in range(len(rows) * vectors)]
    tile = _Tile(f, tuple(rows), vectors, unroll, last)
    if ahead:
        _, acc = tile.walk_fetching(a, b, sums, walk.loops, *ahead)
    else:
        acc = tile.walk(a, b, sums, walk.loops)
    return [acc[i * vectors:(i + 1) * vectors] for i in range(len(rows))]


@dataclass(frozen=True)
class _Tile:
    f: Function
    rows: tuple[Step, ...]
    vectors: int
    unroll: int
    last: Index | None

    def walk_fetching(self, a: Pointer, b: Pointer, acc: list[Vector],
                      loops: Sequence[tuple[int, Step, Step]], ahead: Pointer,
                      lines: Step) -> tuple[Pointer, list[Vector]]:
        """The walk, with a share of other memory prefetched before every innermost loop."""
        (count, a_step, b_step), *inner = loops
        if count == 1 and len(inner) > 1:
            return self.walk_fetching(a, b, acc, inner, ahead, lines)
        with self.f.loop(count, carry=[ahead, a, b, *acc]) as loop:
            ahead, a, b, *acc = loop.values
            if len(inner) > 1:
                ahead, acc = self.walk_fetching(a, b, acc, inner, ahead, lines)
            else:
                self.fetch(ahead, lines)
                acc, ahead = self.walk(a, b, acc, inner), ahead + lines * LINE
            loop.values = [ahead, a + a_step, b + b_step, *acc]
        return loop.values[0], loop.values[3:]

    def fetch(self, ahead: Pointer, lines: Step) -> None:
        if isinstance(lines, int):
            for line in range(lines):
                ahead.prefetch(line * LINE, level=2)
            return
        with self.f.loop(lines) as line_:
            (ahead + line_.i * LINE).prefetch(level=2)

    def walk(self, a: Pointer, b: Pointer, acc: list[Vector],
             loops: Sequence[tuple[int, Step, Step]]) -> list[Vector]:
        """Emit the loops from the outermost inwards."""
        (count, a_step, b_step), *inner = loops
        if not inner:
            return self.innermost(a, b, acc, count, a_step, b_step)
        if count == 1:
            return self.walk(a, b, acc, inner)
        with self.f.loop(count, carry=[a, b, *acc]) as loop:
            a, b, *acc = loop.values
            loop.values = [a + a_step, b + b_step, *self.walk(a, b, acc, inner)]
        return loop.values[2:]

    def innermost(self, a: Pointer, b: Pointer, acc: list[Vector], count: int, a_step: Step,
                  b_step: Step) -> list[Vector]:
        """The innermost loop, `unroll` steps a turn, and what is left over."""
        turns, rest = divmod(count, self.unroll)
        if turns <= 1:
            turns, rest = 0, count
        if turns:
            with self.f.loop(turns, carry=[a, b, *acc]) as loop:
                a, b, *acc = loop.values
                acc = self.steps(a, b, acc, self.unroll, a_step, b_step)
                loop.values = [a + self.unroll * a_step, b + self.unroll * b_step, *acc]
            a, b, *acc = loop.values
        return self.steps(a, b, acc, rest, a_step, b_step)

    def steps(self, a: Pointer, b: Pointer, acc: list[Vector], count: int, a_step: Step,
              b_step: Step) -> list[Vector]:
        """`count` unrolled steps: the vectors of b against every row of the tile."""
        acc = list(acc)
        for steps in self.groups(count, a_step):
            left = self.left(a, steps, a_step)
            for step in steps:
                right = self.right(b, step * b_step)
                for i in range(len(self.rows)):
                    value = left(i, step)
                    for j in range(self.vectors):
                        at = i * self.vectors + j
                        acc[at] = self.f.fma(value, right[j], acc[at])
        return acc

    def right(self, b: Pointer, at: Step) -> list[Vector]:
        """The vectors of one step."""
        lanes, beside = self.f.isa.lanes, self.vectors - (self.last is not None)
        found = [b.load(at + j * lanes) for j in range(beside)]
        return found if self.last is None else [*found, (b + self.last).load(at)]

    def groups(self, count: int, a_step: Step) -> Iterator[range]:
        """Steps whose floats of `a` are loaded together, where lanes can be taken one by one."""
        lanes, first = self.f.isa.lanes, 0
        together = lanes if self.f.isa.by_element and a_step == 1 else 1
        while first < count:
            size = together if count - first >= together else 1
            yield range(first, first + size)
            first += size

    def left(self, a: Pointer, steps: range, a_step: Step) -> Callable[[int, int], Vector]:
        """left(row, step): a float of `a` in every lane, from memory or from a vector."""
        rows, lanes, first = self.rows, self.f.isa.lanes, steps[0]
        if len(steps) > 1:
            loaded = [a.load(row + first) for row in rows]
            return lambda i, step: loaded[i].spread(step - first)
        neighbours = self.f.isa.by_element and rows == tuple(range(len(rows)))
        whole = len(rows) // lanes if neighbours else 0
        beside = [a.load(i * lanes + first * a_step) for i in range(whole)]
        return lambda i, step: (beside[i // lanes].spread(i % lanes) if i < whole * lanes
                                else a.broadcast(rows[i] + step * a_step))
