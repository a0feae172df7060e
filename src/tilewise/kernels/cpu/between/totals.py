"""One number of every row: its sum, its mean, its largest value, or its length."""

from __future__ import annotations

from typing import Any

from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ..emit import Function, Index, Module, Pointer, Vector
from ..emit.sizes import InCode
from ..emit.threads import X, Y, emit_entry, emit_region
from ..emit.tiling import ceil_div
from .along import LONG, Columns, added, as_word, each_rows, float_word, reduced
from .softmax import largest

KINDS: Any = {"frame": "pointer", "task": "index", "worker": "index"}
SIZES = ("columns", "rows", "task_rows", "tasks", "pitch", "divisor")
SUM, LARGEST, LENGTH = range(3)  # the length is the root of the sum of squares
TOGETHER = 4  # rows at once: one waits for its sum while others add
WORTH = 1 << 13  # floats that are worth a task


def sizes(rows: int, columns: int, pitch: int, divisor: float = 1.0) -> list[int]:
    """The words that the kernel reads from its frame; the pitch is in floats from row to row."""
    task_rows = min(rows, ceil_div(ceil_div(WORTH, columns), TOGETHER) * TOGETHER)
    return [columns, rows, task_rows, ceil_div(rows, task_rows), pitch, as_word(divisor)]


def make(p: Problem, s: Schedule, isa: Isa, kind: int) -> Module:
    """x, rows, to y, a number for each; a sum is divided."""
    m = Module(isa)
    with m.function("rows", **KINDS) as f:
        z = InCode(f, None, SIZES)
        x, y, pitch = f.frame.load_pointer(X), f.frame.load_pointer(Y), z.pitch
        columns, first = z.columns, f.task * z.task_rows

        def some(row: Index, many: int) -> None:
            found = _totals(f, kind, columns, [x + (row + i) * pitch for i in range(many)])
            for i, value in enumerate(found):
                (y + (row + i)).store(_finished(f, kind, value.slice(0, 1)))

        last = (first + z.task_rows).minimum(z.rows)
        each_rows(f, first, last, TOGETHER, some, columns < LONG)
    emit_entry(m, [emit_region(m, "all", lambda f, frame: InCode(f, None, SIZES).tasks, f)])
    return m


def _totals(f: Function, kind: int, columns: Index, x: list[Pointer]) -> list[Vector]:
    start = f.vector(float("-inf") if kind == LARGEST else 0.0)
    join = largest if kind == LARGEST else added

    def step(at: Columns, known: list[Vector]) -> list[Vector]:
        values = [at.only(value, start) for value in at.load(x)]
        if kind == LENGTH:
            values = [value * value for value in values]
        return [join(old, value) for old, value in zip(known, values, strict=True)]

    return reduced(f, columns, [start] * len(x), 4 // len(x), step, join)


def _finished(f: Function, kind: int, value: Vector) -> Vector:
    if kind == SUM:
        return value / float_word(f, SIZES, "divisor", 1)
    return value.root() if kind == LENGTH else value
