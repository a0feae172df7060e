"""Gradients of images times a number for every channel of each: both in one pass over the images.

Sums are those of groups.py, in float64; a channel is a group.
"""

from __future__ import annotations

from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ..emit import F32, F64, Function, Index, Module
from ..emit.sizes import InCode
from ..emit.threads import BIAS, RESIDUAL, WEIGHT, X, Y, emit_entry, emit_region
from .along import Columns, each_columns, each_rows
from .groups import AHEAD, KINDS, SIDES, SIZES, Shape, Sums, add_parts, put, tasks_of
from .groups import sizes as sizes_of_groups


def sizes(images: int, pixels: int, channels: int, lanes: int) -> tuple[list[int], int]:
    """The words that the kernel reads from its frame, and how many floats of scratch it needs."""
    return sizes_of_groups(Shape(images, pixels, channels, channels, channels), 0.0, lanes)


def make(p: Problem, s: Schedule, isa: Isa) -> Module:
    """x, the gradient of a product, to y, that of the images, and to RESIDUAL, that of the numbers.

    WEIGHT has the images, BIAS the numbers.
    """
    m = Module(isa)
    with m.function("parts", **KINDS) as parts:
        _part(parts)
    with m.function("merge", **KINDS) as merge:
        _merge(merge)
    emit_entry(m, [emit_region(m, "add", tasks_of("parts"), parts),
                   emit_region(m, "tell", tasks_of("merges"), merge)])
    return m


def _part(f: Function) -> None:
    z = InCode(f, None, SIZES)
    image, part, channels = f.task // z.parts, f.task % z.parts, z.channels
    first = part * z.part
    last = (first + z.part).minimum(z.pixels)
    grad, x, y = (f.frame.load_pointer(word) + image * z.pixels * channels
                  for word in (X, WEIGHT, Y))
    factors = f.frame.load_pointer(BIAS) + image * channels
    places, zero = Sums(f).sums(image, part), f.vector(0.0, work=F64)
    each_columns(f, z.padded, 1, lambda parts: put(parts[0], places, (zero, zero)))

    def add(at: Columns, rows: list[Index]) -> None:
        for row in rows:
            for place in (grad, x):
                (place + (row + AHEAD) * channels).prefetch(at.first, level=1)
        total, (factor,) = places[0].load(at.first, work=F64), at.load([factors])
        for row in rows:
            (value,), (other,) = at.load([grad + row * channels]), at.load([x + row * channels])
            total = f.fma(value.to(F64), other.to(F64), total)
            at.store([y + row * channels], [value * factor])
        places[0].store(total, at.first)

    def some(row: Index, many: int) -> None:
        rows = [row + i for i in range(many)]
        each_columns(f, channels, 1, lambda parts: add(parts[0], rows))

    each_rows(f, first, last, SIDES, some)


def _merge(f: Function) -> None:
    z, memory = InCode(f, None, SIZES), Sums(f)
    image, first = f.task // z.merges, f.task % z.merges * z.merge
    last = (first + z.merge).minimum(z.groups)
    add_parts(f, memory, image, first, last)
    totals, found = memory.sums(image, 0)[0], f.frame.load_pointer(RESIDUAL) + image * z.channels
    with f.loop(last, start=first) as k:
        found.store(totals.load(k.i, 1, work=F64).to(F32), k.i)
