"""Images from planes to channels-last, and back.

torch's pass moves value by value, and writes planes one after the other. Here a square of lanes x
lanes values turns inside registers, and every load and store is a whole vector.
"""

from __future__ import annotations

from typing import Any

from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ..emit import Function, Index, Module, Pointer
from ..emit.elements import MOVED
from ..emit.threads import BATCH, SIZES, X, Y, emit_entry, emit_region
from ..emit.transpose import interleave, separate, transpose

# words that say how many pixels an image has, and floats from one of its planes to the next
PIXELS, PLANE = SIZES, SIZES + 1
KINDS: Any = {"frame": "pointer", "task": "index", "worker": "index"}
WORTH = 1 << 13  # floats that are worth a task


def make(p: Problem, s: Schedule, isa: Isa) -> Module:
    """x, images of p.c channels in the other layout, to y in p.layout.

    An image has at least as many pixels as a vector has lanes.
    """
    m = Module(isa)
    size = max(isa.lanes, WORTH // p.c // isa.lanes * isa.lanes)  # pixels of a task

    def tasks(frame: Pointer) -> Index:
        return (frame.load_index(PIXELS) + (size - 1)) // size

    with m.function("turn", **KINDS) as f:
        pixels, plane, count = *map(f.frame.load_index, (PIXELS, PLANE)), tasks(f.frame)
        image, first = f.task // count, f.task % count * size
        whole = [image * (pixels * p.c), image * (plane * p.c)]  # of points, and of planes
        before, behind = whole[::-1] if p.layout == "nhwc" else whole
        element = MOVED[p.dtype]
        x, y = f.frame.load_pointer(X, element) + before, f.frame.load_pointer(Y, element) + behind
        turn = _few if p.c < isa.lanes else _many
        turn(f, p, x, y, (pixels, plane), first, (first + size).minimum(pixels))
    emit_entry(m, [emit_region(m, "all", lambda f, frame: frame.load_index(BATCH) * tasks(frame),
                               f)])
    return m


def _many(f: Function, p: Problem, x: Pointer, y: Pointer, size: tuple[Index, Index],
          first: Index, last: Index) -> None:
    """Squares of pixels and channels; the last of each end at the border."""
    lanes, (pixels, plane) = f.isa.lanes, size
    with (f.loop(p.c, step=lanes) as group,
          f.loop(last, start=first, step=lanes) as square):
        channel, pixel = group.i.minimum(p.c - lanes), square.i.minimum(pixels - lanes)
        planes, points = channel * plane + pixel, pixel * p.c + channel
        if p.layout == "nhwc":
            _square(x + planes, plane, y + points, f.index(p.c))
        else:
            _square(x + points, f.index(p.c), y + planes, plane)


def _square(x: Pointer, across: Index, y: Pointer, down: Index) -> None:
    rows = [x.load(across * i) for i in range(x.f.isa.lanes)]
    for i, row in enumerate(transpose(x.f, rows)):
        y.store(row, down * i)


def _few(f: Function, p: Problem, x: Pointer, y: Pointer, size: tuple[Index, Index],
         first: Index, last: Index) -> None:
    """All channels of as many pixels as a vector has lanes."""
    lanes, (pixels, plane) = f.isa.lanes, size
    with f.loop(last, start=first, step=lanes) as square:
        pixel = square.i.minimum(pixels - lanes)
        if p.layout == "nhwc":
            planes = [x.load(plane * i + pixel) for i in range(p.c)]
            for i, vector in enumerate(interleave(planes)):
                y.store(vector, pixel * p.c + i * lanes)
        else:
            points = [x.load(pixel * p.c + i * lanes) for i in range(p.c)]
            for i, vector in enumerate(separate(points)):
                y.store(vector, plane * i + pixel)
