"""Softmax of rows: exp(x - the largest), divided by the sum of all."""

from __future__ import annotations

from typing import Any

from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ..emit import Function, Index, Module, Pointer, Vector
from ..emit.sizes import InCode
from ..emit.threads import X, Y, emit_entry, emit_region
from ..emit.tiling import ceil_div
from .along import LONG, Columns, added, each_columns, each_rows, reduced
from .elementary import exp

KINDS: Any = {"frame": "pointer", "task": "index", "worker": "index"}
SIZES = ("columns", "rows", "task_rows", "tasks", "pitch", "to")
TOGETHER = 2  # rows at once, where they are short
WORTH = 1 << 12  # floats that are worth a task


def sizes(rows: int, columns: int, pitch: int, to: int) -> list[int]:
    """The words that the kernel reads from its frame; pitches are floats from row to row."""
    task_rows = min(rows, ceil_div(ceil_div(WORTH, columns), TOGETHER) * TOGETHER)
    return [columns, rows, task_rows, ceil_div(rows, task_rows), pitch, to]


def make(p: Problem, s: Schedule, isa: Isa) -> Module:
    """x to y, rows of each."""
    m = Module(isa)
    with m.function("rows", **KINDS) as f:
        z = InCode(f, None, SIZES)
        x, y, pitch, to = f.frame.load_pointer(X), f.frame.load_pointer(Y), z.pitch, z.to
        columns, first = z.columns, f.task * z.task_rows

        def some(row: Index, many: int) -> None:
            _softmax(f, columns, [x + (row + i) * pitch for i in range(many)],
                     [y + (row + i) * to for i in range(many)])

        last = (first + z.task_rows).minimum(z.rows)
        each_rows(f, first, last, TOGETHER, some, columns < LONG)
    emit_entry(m, [emit_region(m, "all", lambda f, frame: InCode(f, None, SIZES).tasks, f)])
    return m


def largest(a: Vector, b: Vector) -> Vector:
    return a.maximum_or_nan(b)


def _softmax(f: Function, columns: Index, x: list[Pointer], y: list[Pointer]) -> None:
    """Powers are left in y, and divided there."""
    lowest, zero = f.vector(float("-inf")), f.vector(0.0)

    def higher(at: Columns, known: list[Vector]) -> list[Vector]:
        return [largest(old, at.only(value, lowest)) for old, value in zip(known, at.load(x))]

    tops = reduced(f, columns, [lowest] * len(x), 4 // len(x), higher, largest)

    def power(at: Columns, sums: list[Vector]) -> list[Vector]:
        powers = [exp(f, value - top) for value, top in zip(at.load(x), tops)]
        at.store(y, powers)
        return [known + at.only(value, zero) for known, value in zip(sums, powers)]

    sums = reduced(f, columns, [zero] * len(x), 4 // len(x), power, added)
    shares = [_inverse(f, total) for total in sums]

    def divide(parts: list[Columns]) -> None:
        for at in parts:
            at.store(y, [value * share for value, share in zip(at.load(y), shares)])

    each_columns(f, columns, 4 // len(x), divide)


def _inverse(f: Function, total: Vector) -> Vector:
    """Computed for one lane."""
    one = total.slice(0, 1)
    one = one.same(1.0) / one
    return one.shuffle(one, [0] * f.isa.lanes)
