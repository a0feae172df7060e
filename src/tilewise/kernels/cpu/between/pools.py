"""Pools of channels-last images: the largest or the mean value of every window.

Code depends on the kind alone. A table says where windows lie: an entry for every row of the
result, then one for every column, each with its first value, how many there are of it and the
size to divide by. So padding, strides and windows of changing size are the table's business.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ..emit import ELEMENTS, F32, F64, Element, Function, Index, Module, Pointer, Vector
from ..emit.elements import MOVED
from ..emit.sizes import InCode
from ..emit.threads import BATCH, WEIGHT, X, Y, emit_entry, emit_region
from .channels import Block, each_block

KINDS: Any = {"frame": "pointer", "task": "index", "worker": "index"}
# MEAN: an average of windows so large that sums round too often; LENGTH: the root of the sum of
# the squares in such
MAX, AVERAGE, MEAN, LENGTH = range(4)
TABLE = WEIGHT  # there is no weight
ENTRY = struct.Struct("=qqf4x")
SIDES = 16  # neighbours that MEAN adds up in float32
CHUNK = 64  # vectors of channels that it has sums of

# floats of an image and from a place to the next; rows and channels that are a task's
SIZES = ("x_image", "y_image", "y_row", "y_col", "tap_row", "tap_col", "out_h", "out_w",
         "channels", "rows", "row_tasks", "group", "groups")


class Line(NamedTuple):
    """A row or a column of the result: its window begins so many floats into an image."""

    first: int
    taps: int
    size: float


def table(rows: Sequence[Line], columns: Sequence[Line]) -> bytes:
    return b"".join(ENTRY.pack(*line) for line in (*rows, *columns))


class _Entry:
    """A line inside a function."""

    def __init__(self, table: Pointer, line: Index) -> None:
        at = table.bytes(line * ENTRY.size)
        self.first, self.taps = at.load_index(0), at.load_index(1)
        self.size = at.bytes(16).broadcast()


class Window(NamedTuple):
    """What a window lies over: its first pixel, its extents, and the steps inside it."""

    x: Pointer
    down: _Entry
    across: _Entry
    tap_row: Index
    tap_col: Index


def make(p: Problem, s: Schedule, isa: Isa, kind: int, taps_h: int, taps_w: int) -> Module:
    """x, images, to y, pooled images, by the table.

    Windows of so many taps are unrolled, where there are any; all others are looped over.
    """
    m = Module(isa)
    with m.function("rows", **KINDS) as f:
        element = (MOVED if kind == MAX else ELEMENTS)[p.dtype]
        each_window(f, partial(_pixel, f, kind, (taps_h, taps_w)), element)
    emit_entry(m, [emit_region(m, "pool", tasks, f)])
    return m


def tasks(f: Function, frame: Pointer) -> Index:
    z = InCode(f, None, SIZES)
    count: Index = frame.load_index(BATCH) * z.row_tasks * z.groups
    return count


def each_window(f: Function, body: Callable[[Window, Pointer, tuple[Index, Index]], None],
                element: Element = ELEMENTS["f32"]) -> None:
    """body(window, pixel of the result, first and last channel) for the rows and channels of a
    task."""
    z = InCode(f, None, SIZES)
    part, out_h, out_w = f.task // z.groups, z.out_h, z.out_w
    image, first = part // z.row_tasks, part % z.row_tasks * z.rows
    begin = f.task % z.groups * z.group
    end = (begin + z.group).minimum(z.channels)
    x = f.frame.load_pointer(X, element) + image * z.x_image
    y = f.frame.load_pointer(Y, element) + image * z.y_image
    table, steps = f.frame.load_pointer(TABLE), (z.tap_row, z.tap_col)
    y_row, y_col = z.y_row, z.y_col
    with f.loop((first + z.rows).minimum(out_h), start=first) as row:
        down = _Entry(table, row.i)
        with f.loop(out_w) as col:
            across = _Entry(table, out_h + col.i)
            window = Window(x + (down.first + across.first), down, across, *steps)
            body(window, y + (row.i * y_row + col.i * y_col), (begin, end))


def _pixel(f: Function, kind: int, taps: tuple[int, int], window: Window, y: Pointer,
           channels: tuple[Index, Index]) -> None:
    def emit(pooled: Pooled) -> None:
        # what is carried through a loop stays in registers
        each_block(f, *channels, (f.isa.registers // 8, 1),
                   lambda block: block.store(y, pooled(f, window, block)))

    if kind in (MEAN, LENGTH):
        _mean(f, window, y, channels, kind == LENGTH)
        return
    if taps == (0, 0):
        emit(POOLED[kind])
        return
    whole = window.down.taps.equals(taps[0]) & window.across.taps.equals(taps[1])
    with f.either(whole) as (yes, no):
        with yes:
            emit(lambda f, window, block: UNROLLED[kind](window, _taps(window, taps, block)))
        with no:
            emit(POOLED[kind])


def _taps(window: Window, taps: tuple[int, int], block: Block) -> Iterator[list[Vector]]:
    """All values of a window, one after the other."""
    for i in range(taps[0]):
        line = window.x + window.tap_row * i
        for j in range(taps[1]):
            yield block.load(line + window.tap_col * j)


def _unrolled_largest(window: Window, taps: Iterator[list[Vector]]) -> list[Vector]:
    return reduce(_largest_of, taps)


def _unrolled_average(window: Window, taps: Iterator[list[Vector]]) -> list[Vector]:
    return _divided(reduce(_sums, taps), window)


def _largest(f: Function, window: Window, block: Block) -> list[Vector]:
    """NaN wins; of no values it is -infinity."""
    with f.loop(window.down.taps, carry=block.constant(f, float("-inf"))) as row:
        line = window.x + row.i * window.tap_row
        with f.loop(window.across.taps, carry=row.values) as col:
            col.values = _largest_of(col.values, block.load(line + col.i * window.tap_col))
        row.values = col.values
    return row.values


def larger(known: Vector, value: Vector) -> Vector:
    """NaN where either is; the known one where they are equal."""
    picked: Vector = value.is_nan().select(value, value.maximum(known))
    return picked


def _average(f: Function, window: Window, block: Block) -> list[Vector]:
    with f.loop(window.down.taps, carry=block.constant(f, 0.0)) as row:
        line = window.x + row.i * window.tap_row
        with f.loop(window.across.taps, carry=row.values) as col:
            col.values = _sums(col.values, block.load(line + col.i * window.tap_col))
        row.values = col.values
    return _divided(row.values, window)


def _mean(f: Function, window: Window, y: Pointer, channels: tuple[Index, Index],
          squared: bool) -> None:
    """Sums of some neighbours in float32, and of those in float64, which lie on the stack."""
    lanes = f.isa.lanes
    size = (window.down.size * window.across.size).to(F64)
    sums = f.words(CHUNK * lanes).of(ELEMENTS["f64"])
    with f.loop(channels[1], start=channels[0], step=CHUNK * lanes) as chunk:
        part = chunk.i, (chunk.i + CHUNK * lanes).minimum(channels[1])

        def each(body: Callable[[Block, Pointer], None]) -> None:
            each_block(f, *part, (1,), lambda block: body(block, sums + (block.first - part[0])))

        each(lambda block, at: at.store(f.vector(0.0, work=F64)))
        with f.loop(window.down.taps) as row:
            line, count = window.x + row.i * window.tap_row, window.across.taps
            whole = count // SIDES * SIDES
            with f.loop(whole, step=SIDES) as col:
                each(_adding([line + (col.i + i) * window.tap_col for i in range(SIDES)], squared))
            with f.loop(count, start=whole) as col:
                each(_adding([line + col.i * window.tap_col], squared))

        def finish(block: Block, at: Pointer) -> None:
            value = at.load(work=F64) / size
            block.store(y, [(value.root() if squared else value).to(F32)])

        each(finish)


def _adding(pixels: list[Pointer], squared: bool) -> Callable[[Block, Pointer], None]:
    """Adds a vector of these pixels, or of their squares, to its sum."""
    def add(block: Block, sums: Pointer) -> None:
        values = [block.load(pixel)[0] for pixel in pixels]
        values = [value * value for value in values] if squared else values
        while len(values) > 1:
            values = [a + b for a, b in zip(values[::2], values[1::2])]
        sums.store(sums.load(work=F64) + values[0].to(F64))

    return add


def _largest_of(a: list[Vector], b: list[Vector]) -> list[Vector]:
    return [larger(known, value) for known, value in zip(a, b)]


def _sums(a: list[Vector], b: list[Vector]) -> list[Vector]:
    return [left + right for left, right in zip(a, b)]


def _divided(sums: list[Vector], window: Window) -> list[Vector]:
    size = window.down.size * window.across.size
    return [value / size for value in sums]


Pooled = Callable[[Function, Window, Block], list[Vector]]
POOLED: dict[int, Pooled] = {MAX: _largest, AVERAGE: _average}
UNROLLED = {MAX: _unrolled_largest, AVERAGE: _unrolled_average}
