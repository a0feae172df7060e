"""Group norm of channels-last images: statistics of every group of channels, then one sweep.

Sums are float64 throughout, so a part of an image adds to them without regard to its mean. How an
image is cut into parts depends on its size alone, and so do all results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ..emit import ELEMENTS, F32, F64, Element, Function, Index, Module, Pointer, Vector
from ..emit.sizes import InCode
from ..emit.threads import BIAS, SCRATCH, WEIGHT, X, Y, emit_entry, emit_region
from ..emit.tiling import ceil_div
from .along import Columns, as_double, double_word, each_columns, each_rows
from .epilogue import activate

KINDS: Any = {"frame": "pointer", "task": "index", "worker": "index"}
DOUBLE = ELEMENTS["f64"]
PART, PARTS = 1 << 14, 32  # floats that are worth sums of their own, and how many of an image are
SIDES, AHEAD = 4, 8  # pixels that are added to a sum at once, and how far on others are asked for
WORTH = 1 << 14  # floats that are worth a task of the sweep
MERGED = 64  # channels that are worth a task between

# per image: pixels, parts of some pixels, tasks of some pixels, tasks of some groups;
# `padded`: channels, in whole vectors; `members`: of a group; `count`: of a group's values
SIZES = ("images", "pixels", "channels", "pitch", "to", "padded", "parts", "part", "tasks", "task",
         "members", "groups", "merges", "merge", "count", "eps")


class Shape(NamedTuple):
    """Images of so many pixels and channels, a pitch apart, in groups of channels."""

    images: int
    pixels: int
    channels: int
    pitch: int
    groups: int


def sizes(shape: Shape, eps: float, lanes: int) -> tuple[list[int], int]:
    """The words that the kernel reads from its frame, and how many floats of scratch it needs."""
    images, pixels, channels, pitch, groups = shape
    members, padded = channels // groups, ceil_div(channels, lanes) * lanes
    parts = max(1, min(PARTS, pixels * channels // PART))
    part = ceil_div(ceil_div(pixels, parts), SIDES) * SIDES
    parts = ceil_div(pixels, part)
    task = min(pixels, ceil_div(WORTH, channels))
    merge = min(groups, ceil_div(MERGED, members))
    words = [images, pixels, channels, pitch, channels, padded, parts, part,
             ceil_div(pixels, task), task, members, groups, ceil_div(groups, merge), merge,
             as_double(members * pixels), as_double(eps)]
    return words, images * padded * (4 * parts + 3)


class Sums:
    """Scratch: sums of every part, [image][part][sums, squares][channel] in float64; then tables,
    [image][mean, factor, offset][channel]."""

    def __init__(self, f: Function) -> None:
        self._z = InCode(f, None, SIZES)
        self._start, self._padded, self._parts = (
            f.frame.load_pointer(SCRATCH), self._z.padded, self._z.parts)

    def sums(self, image: Index, part: Index | int) -> tuple[Pointer, Pointer]:
        at = self._start.of(DOUBLE) + (image * self._parts + part) * (self._padded * 2)
        return at, at + self._padded

    def tables(self, image: Index, count: int = 3) -> list[Pointer]:
        behind = self._start + self._z.images * self._parts * (self._padded * 4)
        return [behind + (image * count + i) * self._padded for i in range(count)]


def make(p: Problem, s: Schedule, isa: Isa, weight: int, bias: int) -> Module:
    """x to y; with a weight and a bias of as many values as channels, or without."""
    return in_passes(isa, lambda f: part_sums(f, ELEMENTS[p.dtype]),
                     lambda f: _merge(f, weight, bias), lambda f: _sweep(f, p))


def in_passes(isa: Isa, *bodies: Callable[[Function], None]) -> Module:
    """Sums of parts, then what follows from them for some channels, then a sweep over pixels."""
    m, functions = Module(isa), []
    for name, body in zip(("parts", "merge", "sweep"), bodies, strict=True):
        with m.function(name, **KINDS) as f:
            body(f)
        functions.append(f)
    names = (("add", "parts"), ("statistics", "merges"), ("normalise", "tasks"))
    emit_entry(m, [emit_region(m, name, tasks_of(count), f)
                   for (name, count), f in zip(names, functions, strict=True)])
    return m


def tasks_of(name: str) -> Callable[[Function, Pointer], Index]:
    def count(f: Function, frame: Pointer) -> Index:
        z = InCode(f, None, SIZES)
        each: Index = getattr(z, name)
        return z.images * each

    return count


# sums of a part


def part_sums(f: Function, element: Element = ELEMENTS["f32"]) -> None:
    """Of the values and their squares, over a part of an image."""
    z = InCode(f, None, SIZES)
    image, part = f.task // z.parts, f.task % z.parts
    first, channels, pitch = part * z.part, z.channels, z.pitch
    last = (first + z.part).minimum(z.pixels)
    x = f.frame.load_pointer(X, element) + image * z.pixels * pitch
    sums, squares = Sums(f).sums(image, part)
    zero = f.vector(0.0, work=F64)
    each_columns(f, z.padded, 1, lambda parts: put(parts[0], (sums, squares), (zero, zero)))

    def some(row: Index, many: int) -> None:
        pixels = [x + (row + i) * pitch for i in range(many)]
        ahead = [pixel + pitch * AHEAD for pixel in pixels]
        each_columns(f, channels, 1, lambda parts: _add(
            f, parts[0], pixels, ahead, sums, squares))

    each_rows(f, first, last, SIDES, some)


def put(at: Columns, places: tuple[Pointer, Pointer], values: tuple[Vector, Vector]) -> None:
    """Sums of a whole vector: memory of them is padded."""
    for place, value in zip(places, values, strict=True):
        place.store(value, at.first)


def _add(f: Function, at: Columns, pixels: list[Pointer], ahead: list[Pointer], sums: Pointer,
         squares: Pointer) -> None:
    for pixel in ahead:
        pixel.prefetch(at.first, level=1)
    values = [value.to(F64) for value in at.load(pixels)]
    total, square = (place.load(at.first, work=F64) for place in (sums, squares))
    for value in values:
        total, square = total + value, f.fma(value, value, square)
    put(at, (sums, squares), (total, square))


# statistics of some groups


def _merge(f: Function, weight: int, bias: int) -> None:
    z, memory = InCode(f, None, SIZES), Sums(f)
    image, first = f.task // z.merges, f.task % z.merges * z.merge
    members, last = z.members, (first + z.merge).minimum(z.groups)
    add_parts(f, memory, image, first * members, last * members)
    totals, tables = memory.sums(image, 0), memory.tables(image)
    given = (f.frame.load_pointer(WEIGHT) if weight else None,
             f.frame.load_pointer(BIAS) if bias else None)
    count, eps = double_word(f, SIZES, "count"), double_word(f, SIZES, "eps")
    with f.loop(last, start=first) as group:
        start, end = group.i * members, (group.i + 1) * members
        mean, factor = _statistics(f, totals, start, end, count, eps)
        near = mean.to(F32)
        with f.loop(end, start=start) as k:
            _tell(k.i, tables, near, mean - near.to(F64), factor, given)


def add_parts(f: Function, memory: Sums, image: Index, first: Index, last: Index) -> None:
    """To the first part's, for some channels."""
    totals, parts = memory.sums(image, 0), InCode(f, None, SIZES).parts

    def one(at: Columns) -> None:
        begin = [place.load(at.first, count=at.rest, work=F64) for place in totals]
        with f.loop(parts, start=1, carry=begin) as part:
            more = [place.load(at.first, count=at.rest, work=F64)
                    for place in memory.sums(image, part.i)]
            part.values = [a + b for a, b in zip(part.values, more)]
        for place, value in zip(totals, part.values):
            place.store(value, at.first, count=at.rest)

    each_columns(f, last - first, 1, lambda at: one(Columns(first + at[0].first, at[0].rest)))


def _statistics(f: Function, totals: tuple[Pointer, Pointer], start: Index, end: Index,
                count: Vector, eps: Vector) -> tuple[Vector, Vector]:
    """The mean of a group, and one over the root of its variance."""
    zero = f.vector(0.0, 1, F64)
    with f.loop(end, start=start, carry=[zero, zero]) as k:
        k.values = [known + place.load(k.i, 1, work=F64)
                    for known, place in zip(k.values, totals)]
    mean, square = (value / count for value in k.values)
    variance = zero.maximum(square - mean * mean)
    return mean, variance.same(1.0) / (variance + eps).root()


def _tell(k: Index, tables: list[Pointer], near: Vector, rest: Vector, factor: Vector,
          given: tuple[Pointer | None, Pointer | None]) -> None:
    """What the sweep needs of a channel: (x - near) * factor + offset."""
    weight, bias = (None if place is None else place.load(k, 1).to(F64) for place in given)
    factor = factor if weight is None else factor * weight
    offset = -(rest * factor)
    offset = offset if bias is None else offset + bias
    for place, value in zip(tables, (near, factor.to(F32), offset.to(F32))):
        place.store(value, k)


# the sweep


def _sweep(f: Function, p: Problem) -> None:
    z = InCode(f, None, SIZES)
    task = z.images * z.tasks - 1 - f.task  # what was read last is still in a cache
    image, first, channels, pitch, to = task // z.tasks, task % z.tasks * z.task, z.channels, (
        z.pitch), z.to
    last = (first + z.task).minimum(z.pixels)
    x, y = (f.frame.load_pointer(place, ELEMENTS[p.dtype]) + image * z.pixels * apart
            for place, apart in ((X, pitch), (Y, to)))
    tables = Sums(f).tables(image)
    with f.loop(last, start=first) as row:  # one pixel after the other, as memory likes it
        read, written = x + row.i * pitch, y + row.i * to
        each_columns(f, channels, 2, lambda parts: _normalise(
            f, p, parts, tables, read, written))


def _normalise(f: Function, p: Problem, parts: list[Columns], tables: list[Pointer], x: Pointer,
               y: Pointer) -> None:
    values = []
    for at in parts:
        (value,), (near, factor, offset) = at.load([x]), at.load(tables)
        values.append(activate(f, f.fma(value - near, factor, offset), p.epilogue))
    for at, value in zip(parts, values, strict=True):
        at.store([y], [value])
