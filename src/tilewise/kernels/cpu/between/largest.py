"""Max-pools that tell, in a byte, which value of a window was the largest; and their gradient.

Values of a window are numbered row by row, those in the padding too. A table as that of pools.py
says where windows lie. There the size of a line is a number: of its first value, in the forward
pass; in the backward pass a line is a row or a column of the images, its window lies over the
results that it is part of, and its size is its own number in the first of them.
"""

from __future__ import annotations

from collections.abc import Callable

from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ..emit import ELEMENTS, Function, Index, Module, Pointer, Vector
from ..emit.threads import MASK, X, Y, emit_entry, emit_region
from .channels import Block, each_block
from .pools import KINDS, Window, each_window, tasks

BYTE, FLOAT = ELEMENTS["u8"], ELEMENTS["f32"]
MOST = 256  # values of a window that a byte can tell apart
Pixel = Callable[[Function, Window, Pointer, Block], None]


def make(p: Problem, s: Schedule, isa: Isa, row: int) -> Module:
    """x, images, to y, the largest of every window, and to MASK, which it is.

    `row`: how many values a row of a window has.
    """
    return _module(isa, lambda f, window, y, block: _largest(f, window, y, block, row))


def make_backward(p: Problem, s: Schedule, isa: Isa, down: int, across: int) -> Module:
    """x, the gradient of a result, to y, that of the images; MASK has the bytes.

    The number of a value is so much less in the next window below, and in the next to the right.
    """
    return _module(isa, lambda f, window, y, block: _spread(f, window, y, block, down, across))


def _module(isa: Isa, pixel: Pixel) -> Module:
    m = Module(isa)
    with m.function("rows", **KINDS) as f:
        # a value and its number are carried for every vector
        each_window(f, lambda window, y, channels: each_block(
            f, *channels, (f.isa.registers // 8, 1),
            lambda block: pixel(f, window, y, block)))
    emit_entry(m, [emit_region(m, "pool", tasks, f)])
    return m


def _beside(f: Function, pixel: Pointer, word: int) -> Pointer:
    """The bytes of a pixel of what a word of the frame points at."""
    behind: Index = pixel.address() - f.frame.load_pointer(word).address()
    return f.frame.load_pointer(MASK, BYTE) + behind // FLOAT.bytes


def _largest(f: Function, window: Window, y: Pointer, block: Block, row: int) -> None:
    """The first of the largest; the last NaN if there is any, as torch has it."""
    many, first = block.vectors, window.down.size + window.across.size
    start = [*block.constant(f, float("-inf")), *[first] * many, first]
    with f.loop(window.down.taps, carry=start) as down:
        line, number = window.x + down.i * window.tap_row, down.values[-1]
        with f.loop(window.across.taps, carry=down.values) as across:
            values = block.load(line + across.i * window.tap_col)
            across.values = _picked(across.values, values)
        down.values = [*across.values[:-1], number + f.vector(float(row))]
    block.store(y, down.values[:many])
    block.store(_beside(f, y, Y), down.values[many:-1])


def _picked(known: list[Vector], values: list[Vector]) -> list[Vector]:
    """The largest so far, their numbers, and the number of the next value."""
    many, number = len(values), known[-1]
    wins = [value.above(old) | value.is_nan() for value, old in zip(values, known)]
    return [*(win.select(value, old) for win, value, old in zip(wins, values, known)),
            *(win.select(number, old) for win, old in zip(wins, known[many:-1])),
            number + number.same(1.0)]


def _spread(f: Function, window: Window, y: Pointer, block: Block, less_down: int,
            less_across: int) -> None:
    """The sum over the windows in which the value was the largest, as torch adds them up."""
    bytes_, zero = _beside(f, window.x, X), f.vector(0.0)
    number = window.down.size + window.across.size
    with f.loop(window.down.taps, carry=[*block.constant(f, 0.0), number]) as down:
        number = down.values[-1]
        with f.loop(window.across.taps, carry=down.values) as across:
            at = down.i * window.tap_row + across.i * window.tap_col
            own, now = block.load(bytes_ + at), across.values[-1]
            parts = [here.equals(now).select(part, zero)
                     for here, part in zip(own, block.load(window.x + at))]
            across.values = [*(sum_ + part for sum_, part in zip(across.values, parts)),
                             now - f.vector(float(less_across))]
        down.values = [*across.values[:-1], number - f.vector(float(less_down))]
    block.store(y, down.values[:-1])
