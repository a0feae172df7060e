"""Layer norm: every row by its own mean and variance.

A row is read three times, which its cache makes cheap. First a mean, rounded; then what values are
away from it, and the squares of that, so that nothing large is subtracted from something large.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ..emit import ELEMENTS, Function, Index, Module, Pointer, Vector
from ..emit.sizes import InCode
from ..emit.threads import BIAS, WEIGHT, X, Y, emit_entry, emit_region
from ..emit.tiling import ceil_div
from .along import LONG, Columns, added, as_word, each_columns, each_rows, float_word, reduced

KINDS: Any = {"frame": "pointer", "task": "index", "worker": "index"}
SIZES = ("columns", "rows", "task_rows", "tasks", "pitch", "to", "share", "eps")
TOGETHER = 4  # rows at once: one waits for its sums while others add
WORTH = 1 << 13  # floats that are worth a task


def sizes(rows: int, columns: int, pitch: int, to: int, eps: float) -> list[int]:
    """The words that the kernel reads from its frame; pitches are floats from row to row."""
    task_rows = min(rows, ceil_div(ceil_div(WORTH, columns), TOGETHER) * TOGETHER)
    return [columns, rows, task_rows, ceil_div(rows, task_rows), pitch, to,
            as_word(1 / columns), as_word(eps)]


class _Rows(NamedTuple):
    """What all rows have in common."""

    columns: Index
    share: Vector  # one row's of each of its values
    eps: Vector
    weight: Pointer | None
    bias: Pointer | None


def make(p: Problem, s: Schedule, isa: Isa, weight: int, bias: int) -> Module:
    """x to y, rows of each; with a weight and a bias of as many columns, or without."""
    m = Module(isa)
    with m.function("rows", **KINDS) as f:
        z = InCode(f, None, SIZES)
        common = _Rows(z.columns, float_word(f, SIZES, "share"), float_word(f, SIZES, "eps", 1),
                       f.frame.load_pointer(WEIGHT) if weight else None,
                       f.frame.load_pointer(BIAS) if bias else None)
        x, y = (f.frame.load_pointer(place, ELEMENTS[p.dtype]) for place in (X, Y))
        pitch, to = z.pitch, z.to
        first = f.task * z.task_rows

        def some(row: Index, many: int) -> None:
            _normalise(f, common, [x + (row + i) * pitch for i in range(many)],
                       [y + (row + i) * to for i in range(many)], pitch * many)

        last = (first + z.task_rows).minimum(z.rows)
        each_rows(f, first, last, TOGETHER, some, common.columns < LONG)
    emit_entry(m, [emit_region(m, "all", lambda f, frame: InCode(f, None, SIZES).tasks, f)])
    return m


def _normalise(f: Function, common: _Rows, x: list[Pointer], y: list[Pointer],
               ahead: Index) -> None:
    """Some rows; others, so many floats on, are asked for meanwhile."""
    near = _means(f, common, x)
    apart, squares = _moments(f, common, x, near)
    factors, offsets = [], []
    for away, square in zip(apart, squares):
        away, variance = away * common.share, square * common.share - (away * common.share) * (
            away * common.share)
        factor = _factor(f, variance, common.eps)
        factors.append(factor)
        offsets.append(-(away * factor))
    later = [row + ahead for row in x]
    each_columns(f, common.columns, 2, lambda parts: _store(
        f, common, parts, x, y, later, list(zip(near, factors, offsets))))


def _factor(f: Function, variance: Vector, eps: Vector) -> Vector:
    """One over the root, computed for one lane."""
    one = variance.slice(0, 1)
    one = one.same(0.0).maximum(one) + eps
    factor = one.same(1.0) / one.root()
    return factor.shuffle(factor, [0] * f.isa.lanes)


def _means(f: Function, common: _Rows, x: list[Pointer]) -> list[Vector]:
    """The first value and the mean of what others are away from it: exact where all are equal."""
    firsts, zero = [row.broadcast() for row in x], f.vector(0.0)

    def step(at: Columns, sums: list[Vector]) -> list[Vector]:
        return [known + at.only(value - first, zero)
                for known, value, first in zip(sums, at.load(x), firsts)]

    sums = reduced(f, common.columns, [zero] * len(x), _wide(f, len(x)), step, added)
    return [first + away * common.share for first, away in zip(firsts, sums)]


def _moments(f: Function, common: _Rows, x: list[Pointer],
             near: list[Vector]) -> tuple[list[Vector], list[Vector]]:
    """Sums of differences to a mean that was rounded, and of their squares."""
    zero, many = f.vector(0.0), len(x)

    def step(at: Columns, sums: list[Vector]) -> list[Vector]:
        away = [at.only(value - mean, zero) for value, mean in zip(at.load(x), near)]
        return [*(known + value for known, value in zip(sums, away)),
                *(f.fma(value, value, known) for known, value in zip(sums[many:], away))]

    found = reduced(f, common.columns, [zero] * (2 * many), _wide(f, 2 * many), step, added)
    return found[:many], found[many:]


def _wide(f: Function, sums: int) -> int:
    """Vectors at once, such that all sums stay in registers."""
    return max(1, min(4, f.isa.registers // 2 // sums))


def _store(f: Function, common: _Rows, parts: list[Columns], x: list[Pointer], y: list[Pointer],
           later: list[Pointer], by: list[tuple[Vector, Vector, Vector]]) -> None:
    for at in parts:
        for row in later:
            row.prefetch(at.first, level=1)
        weight = at.load([common.weight])[0] if common.weight else None
        bias = at.load([common.bias])[0] if common.bias else None
        values = []
        for value, (near, factor, offset) in zip(at.load(x), by, strict=True):
            values.append(_affine(f, f.fma(value - near, factor, offset), weight, bias))
        at.store(y, values)


def _affine(f: Function, value: Vector, weight: Vector | None, bias: Vector | None) -> Vector:
    if weight is None:
        return value if bias is None else value + bias
    return value * weight if bias is None else f.fma(value, weight, bias)
