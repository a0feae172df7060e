"""Batch norm by the statistics of a batch, with what follows it, and its gradients.

All pixels of a batch are those of one image, and a channel is a group: sums and their memory are
those of groups.py. `make` leaves what its gradients need of a channel in TABLES, in its scratch
behind the sums. `make_backward` reads them. docs/numerics.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ..emit import F32, F64, Function, Index, Module, Pointer, Vector, bits_bytes
from ..emit.sizes import InCode
from ..emit.threads import BIAS, MASK, RESIDUAL, WEIGHT, X, Y
from .along import Columns, double_word, each_columns, each_rows
from .derivatives import derived
from .epilogue import activate
from .groups import AHEAD, SIDES, SIZES, Shape, Sums, add_parts, in_passes, part_sums, put
from .groups import sizes as sizes_of_groups

# of a channel: its mean, factor and offset as in (x - mean) * factor + offset, one over the root of
# its variance, and the variance
TABLES = 5
# of a channel: gradients of weight and bias; then dx = factor * g - slope * (x - mean) - offset
GRADIENTS = 4


class Sizes(NamedTuple):
    """The words of a frame; floats of scratch before the tables, and from a table to the next."""

    words: list[int]
    before: int
    padded: int


def sizes(pixels: int, channels: int, eps: float, lanes: int) -> Sizes:
    words, _ = sizes_of_groups(Shape(1, pixels, channels, channels, channels), eps, lanes)
    padded, parts = words[SIZES.index("padded")], words[SIZES.index("parts")]
    return Sizes(words, 4 * parts * padded, padded)


def mask_bytes(pixels: int, channels: int, lanes: int) -> int:
    return pixels * -(-channels // lanes) * bits_bytes(lanes)


def make(p: Problem, s: Schedule, isa: Isa, weight: int, bias: int, masked: int,
         streaming: int = 0) -> Module:
    """x, and a residual, to y; `masked`: and to bits of which values a gradient passes.

    `streaming`: y is written past the caches.
    """
    return in_passes(isa, part_sums, lambda f: _merge(f, weight, bias),
                     lambda f: _sweep(f, p, masked, bool(streaming)))


def _tables(f: Function, count: int) -> list[Pointer]:
    """Those that a pass leaves."""
    return Sums(f).tables(f.index(0), count)


def _merge(f: Function, weight: int, bias: int) -> None:
    tables = _tables(f, TABLES)
    scale = f.frame.load_pointer(WEIGHT) if weight else None
    shift = f.frame.load_pointer(BIAS) if bias else None
    count, eps = double_word(f, SIZES, "count"), double_word(f, SIZES, "eps")
    one, zero = f.vector(1.0, 1, F64), f.vector(0.0, 1, F64)

    def tell(k: Index, total: Vector, square: Vector) -> None:
        mean = total / count
        variance = zero.maximum(square / count - mean * mean)
        rate = one / (variance + eps).root()
        factor = rate if scale is None else rate * scale.load(k, 1).to(F64)
        near = mean.to(F32)
        offset = -((mean - near.to(F64)) * factor)
        offset = offset if shift is None else offset + shift.load(k, 1).to(F64)
        others = (value.to(F32) for value in (factor, offset, rate, variance))
        for place, value in zip(tables, (near, *others), strict=True):
            place.store(value, k)

    _each_channel(f, tell)


def _each_channel(f: Function, tell: Callable[[Index, Vector, Vector], None]) -> None:
    """tell(channel, its two sums) for those of a task, after the parts are added up."""
    z, memory = InCode(f, None, SIZES), Sums(f)
    image, first = f.index(0), f.task * z.merge
    last = (first + z.merge).minimum(z.groups)
    add_parts(f, memory, image, first, last)
    totals = memory.sums(image, 0)
    with f.loop(last, start=first) as k:
        tell(k.i, *(place.load(k.i, 1, work=F64) for place in totals))


def _rows(f: Function) -> tuple[Index, Index]:
    """The pixels of a task of a sweep; what was read last is still in a cache."""
    z = InCode(f, None, SIZES)
    first = (z.tasks - 1 - f.task) * z.task
    return first, (first + z.task).minimum(z.pixels)


class _Bits:
    """The mask of all pixels: a bit for each channel, in whole vectors."""

    def __init__(self, f: Function) -> None:
        self._lanes, self._start = f.isa.lanes, f.frame.load_pointer(MASK)
        self._pixel = InCode(f, None, SIZES).padded // self._lanes * bits_bytes(self._lanes)

    def at(self, pixel: Index, column: Index) -> Pointer:
        return self._start.bytes(
            pixel * self._pixel + column // self._lanes * bits_bytes(self._lanes))


def _sweep(f: Function, p: Problem, masked: int, streaming: bool) -> None:
    (first, last), channels = _rows(f), InCode(f, None, SIZES).channels
    x, y, more = (f.frame.load_pointer(word) for word in (X, Y, RESIDUAL))
    tables, bits = _tables(f, TABLES)[:3], _Bits(f) if masked else None

    def some(parts: list[Columns], row: Index) -> None:
        place, values = row * channels, []
        for at in parts:
            (value,), (near, factor, offset) = at.load([x + place]), at.load(tables)
            value = f.fma(value - near, factor, offset)
            if p.epilogue.residual:
                value = value + at.load([more + place])[0]
            if bits is not None:
                bits.at(row, at.first).store_bits(value.above_or_nan(f.vector(0.0)))
            values.append(activate(f, value, p.epilogue))
        for at, value in zip(parts, values, strict=True):
            at.store([y + place], [value], streaming)

    with f.loop(last, start=first) as row:
        each_columns(f, channels, 2, lambda parts: some(parts, row.i))


# gradients


def make_backward(p: Problem, s: Schedule, isa: Isa, masked: int, kept: int,
                  streaming: int = 0) -> Module:
    """x, the gradient of a result, to y, that of what was normalised, and those of the parameters.

    WEIGHT is what was normalised, BIAS the tables of the forward pass. `kept`: the gradient before
    the norm, which is that of the residual, goes to RESIDUAL.
    """
    return in_passes(isa, lambda f: _part_of_gradients(f, p, masked), _merge_gradients,
                     lambda f: _sweep_gradients(f, p, masked, kept, bool(streaming)))


class _Read:
    """What a gradient is computed from, and it itself: of some columns of a pixel."""

    def __init__(self, f: Function, p: Problem, masked: int) -> None:
        z = InCode(f, None, SIZES)
        self._f, self._epilogue, self._channels = f, p.epilogue, z.channels
        self.grad, self.x = f.frame.load_pointer(X), f.frame.load_pointer(WEIGHT)
        given, padded = f.frame.load_pointer(BIAS), z.padded
        self.tables = [given + padded * i for i in range(TABLES)]
        self._bits = _Bits(f) if masked else None

    def of(self, at: Columns, rows: list[Index]) -> list[tuple[Vector, Vector]]:
        """For each pixel: x less its mean, and the gradient of what the norm gave."""
        near, factor, offset = at.load(self.tables[:3])
        found = []
        for row in rows:
            place = row * self._channels
            (grad,), (x,) = at.load([self.grad + place]), at.load([self.x + place])
            x = x - near
            if self._bits is not None:
                bits = self._bits.at(row, at.first).load_bits()
                grad = bits.select(grad, self._f.vector(0.0))
            else:
                grad = derived(self._f, grad, self._f.fma(x, factor, offset), self._epilogue)
            found.append((x, grad))
        return found

    def ahead(self, at: Columns, rows: list[Index]) -> None:
        for row in rows:
            for place in (self.grad, self.x):
                (place + row * self._channels).prefetch(at.first, level=1)


def _part_of_gradients(f: Function, p: Problem, masked: int) -> None:
    z, read = InCode(f, None, SIZES), _Read(f, p, masked)
    first, channels = f.task * z.part, z.channels
    last = (first + z.part).minimum(z.pixels)
    sums, products = Sums(f).sums(f.index(0), f.task)
    zero = f.vector(0.0, work=F64)
    each_columns(f, z.padded, 1, lambda parts: put(parts[0], (sums, products), (zero, zero)))

    def add(at: Columns, rows: list[Index]) -> None:
        read.ahead(at, [row + AHEAD for row in rows])
        total, product = (place.load(at.first, work=F64) for place in (sums, products))
        for x, grad in read.of(at, rows):
            wide = grad.to(F64)
            total, product = total + wide, f.fma(wide, x.to(F64), product)
        put(at, (sums, products), (total, product))

    def some(row: Index, many: int) -> None:
        rows = [row + i for i in range(many)]
        each_columns(f, channels, 1, lambda parts: add(parts[0], rows))

    each_rows(f, first, last, SIDES, some)


def _merge_gradients(f: Function) -> None:
    tables, padded = _tables(f, GRADIENTS), InCode(f, None, SIZES).padded
    given = f.frame.load_pointer(BIAS)
    factors, rates = given + padded, given + padded * 3
    count = double_word(f, SIZES, "count")

    def tell(k: Index, total: Vector, product: Vector) -> None:
        factor, rate = (place.load(k, 1).to(F64) for place in (factors, rates))
        of_weight, each = product * rate, factor / count
        slope, offset = of_weight * rate * each, total * each
        for place, value in zip(tables, (of_weight, total, slope, offset), strict=True):
            place.store(value.to(F32), k)

    _each_channel(f, tell)


def _sweep_gradients(f: Function, p: Problem, masked: int, kept: int, streaming: bool) -> None:
    read, (first, last), channels = _Read(f, p, masked), _rows(f), InCode(f, None, SIZES).channels
    y, keep = f.frame.load_pointer(Y), f.frame.load_pointer(RESIDUAL)
    factors, others = read.tables[1], _tables(f, GRADIENTS)[2:]

    def one(at: Columns, row: Index) -> tuple[Vector, Vector]:
        ((x, grad),), (factor, slope, offset) = read.of(at, [row]), at.load([factors, *others])
        return f.fma(grad, factor, -f.fma(x, slope, offset)), grad

    def some(parts: list[Columns], row: Index) -> None:
        place, found = row * channels, [one(at, row) for at in parts]
        for at, (value, grad) in zip(parts, found, strict=True):
            at.store([y + place], [value], streaming)
            if kept:
                at.store([keep + place], [grad], streaming)

    with f.loop(last, start=first) as row:
        each_columns(f, channels, 2, lambda parts: some(parts, row.i))
