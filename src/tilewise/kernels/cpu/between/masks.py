"""Which values a gradient passes: a bit for each, made where ReLU and max-pooling are applied.

A mask lies as [image][row][column][vector of K], in the rows and columns before pooling. `pack`
applies both steps to a convolution's result and makes the mask; `unpack` spreads a gradient over
the values it passes and sums it for the bias.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....core.isa import Isa
from ....core.problem import Epilogue, Problem
from ....core.schedule import Schedule
from ..emit import Bits, Function, Index, Module, Pointer, Vector, bits_bytes
from ..emit.threads import BATCH, BIAS, MASK, SCRATCH, X, Y, emit_entry, emit_region
from ..emit.tiling import ceil_div
from .epilogue import activate, pool

KINDS: Any = {"frame": "pointer", "task": "index", "worker": "index"}


def pixel_bytes(channels: int, lanes: int) -> int:
    """Bytes of a mask for one pixel."""
    return ceil_div(channels, lanes) * bits_bytes(lanes)


def place(mask: Pointer, k: Index, channels: int, pixel: Index | int = 0) -> Pointer:
    """The flags of the vector that begins at channel k."""
    lanes = mask.f.isa.lanes
    return mask.bytes(k // lanes * bits_bytes(lanes) + pixel * pixel_bytes(channels, lanes))


def passes(f: Function, values: list[Vector], biased: Vector, epilogue: Epilogue) -> list[Bits]:
    """For each value of a window: whether it is the first largest, or NaN, and not cut off."""
    largest, left = pool(values), biased.above_or_nan(f.vector(0.0))
    if epilogue.activation is None:
        left = left | ~left
    found = []
    for value in values:
        first = (value.equals(largest) | value.is_nan()) & left
        left = left & ~first
        found.append(first)
    return found


def _each_vector(f: Function, channels: int, body: Callable[[Index, int], None]) -> None:
    """body(first channel, how many) for all vectors of a pixel."""
    lanes = f.isa.lanes
    whole = channels // lanes * lanes
    with f.loop(whole, step=lanes) as k:
        body(k.i, lanes)
    if channels > whole:
        body(f.index(whole), channels - whole)


def make_pack(p: Problem, s: Schedule, isa: Isa) -> Module:
    """x, a convolution's result, to y and its mask; without pooling y may be x itself."""
    m, size = Module(isa), p.epilogue.pool
    rows = ceil_div(p.conv_h, size)
    with m.function("rows", **KINDS) as f:
        image, row = f.task // rows, f.task % rows
        for height in sorted({min(size, p.conv_h), p.conv_h % size or size}):
            with f.when((p.conv_h - row * size).minimum(size).equals(height)):
                with f.loop(p.conv_w // size) as col:
                    _pack_window(f, p, image, row, col.i, (height, size))
                if p.conv_w % size:
                    _pack_window(f, p, image, row, f.index(p.conv_w // size), (height, 1))
    emit_entry(m, [emit_region(
        m, "pack", lambda f, frame: frame.load_index(BATCH) * rows, f)])
    return m


def _pack_window(f: Function, p: Problem, image: Index, row: Index, col: Index,
                 shape: tuple[int, int]) -> None:
    """One window; one that is not whole passes nothing."""
    size = p.epilogue.pool
    first = (image * p.conv_h + row * size) * p.conv_w + col * size
    pixels = [first + (i * p.conv_w + j) for i in range(shape[0]) for j in range(shape[1])]
    to = f.frame.load_pointer(Y) + ((image * p.out_h + row) * p.out_w + col) * p.k
    x, mask = f.frame.load_pointer(X), f.frame.load_pointer(MASK)

    def one(k: Index, count: int) -> None:
        if len(pixels) < size * size:
            zero = f.vector(0.0)
            for pixel in pixels:
                place(mask, k, p.k, pixel).store_bits(zero.above(zero))
            return
        values = [(x + pixel * p.k + k).load(count=count) for pixel in pixels]
        value = activate(f, pool(values), p.epilogue)
        for pixel, bits in zip(pixels, passes(f, values, value, p.epilogue), strict=True):
            place(mask, k, p.k, pixel).store_bits(bits)
        (to + k).store(value, count=count)

    _each_vector(f, p.k, one)


def make_unpack(p: Problem, s: Schedule, isa: Isa) -> Module:
    """x, the gradient of a result, to y, that of the sums before ReLU and pooling, and to bias."""
    m = Module(isa)
    with m.function("row", **KINDS) as f1:
        _unpack_row(f1, p)
    with m.function("add", **KINDS) as f2:
        _add_rows(f2, p)
    vectors = ceil_div(p.k, isa.lanes)
    emit_entry(m, [
        emit_region(m, "unpack", lambda f, frame: frame.load_index(BATCH) * p.conv_h, f1),
        emit_region(m, "sum", lambda f, frame: vectors, f2)])
    return m


def unpack_scratch(p: Problem, lanes: int) -> int:
    """Floats: the sums of every row."""
    return p.n * p.conv_h * ceil_div(p.k, lanes) * lanes


def _unpack_row(f: Function, p: Problem) -> None:
    size, lanes = p.epilogue.pool, f.isa.lanes
    image, row = f.task // p.conv_h, f.task % p.conv_h
    grad = f.frame.load_pointer(X) + (image * p.out_h + row // size) * (p.out_w * p.k)
    to = f.frame.load_pointer(Y) + f.task * (p.conv_w * p.k)
    mask = f.frame.load_pointer(MASK).bytes(f.task * (p.conv_w * pixel_bytes(p.k, lanes)))
    sums = f.frame.load_pointer(SCRATCH) + f.task * (ceil_div(p.k, lanes) * lanes)

    def one(k: Index, count: int) -> None:
        with f.loop(p.conv_w, carry=[f.vector(0.0)]) as col:
            bits = place(mask, k, p.k, col.i).load_bits()
            if count < lanes:
                bits = bits & Bits(f, f.leading(count, lanes))  # channels there are none of
            value = (grad + (col.i // size * p.k + k)).load_where(bits)
            (to + (col.i * p.k + k)).store(value, count=count)
            col.values = [col.values[0] + value]
        (sums + k).store(col.values[0])

    _each_vector(f, p.k, one)


def _add_rows(f: Function, p: Problem) -> None:
    """Rows of an image, then images: short sums round less."""
    lanes = f.isa.lanes
    padded = ceil_div(p.k, lanes) * lanes
    sums = f.frame.load_pointer(SCRATCH) + f.task * lanes
    with f.loop(f.frame.load_index(BATCH), carry=[f.vector(0.0)]) as image:
        with f.loop(p.conv_h, carry=[f.vector(0.0)]) as row:
            at = (image.i * p.conv_h + row.i) * padded
            row.values = [row.values[0] + (sums + at).load()]
        image.values = [image.values[0] + row.values[0]]
    to = f.frame.load_pointer(BIAS) + f.task * lanes
    to.store(image.values[0], count=(p.k - f.task * lanes).minimum(lanes))
