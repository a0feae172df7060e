"""Zeros, for results that no phase of a strided gradient writes."""

from __future__ import annotations

from typing import Any

from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ..emit import Function, Index, Module, Pointer
from ..emit.requests import Request
from ..emit.sizes import InCode
from ..emit.threads import BATCH, Y, emit_entry, emit_region
from ..emit.tiling import ceil_div

KINDS: Any = {"frame": "pointer", "task": "index", "worker": "index"}
SIZES = ("values", "parts", "part")  # of an image, its parts, and what a part has
WORTH, LINE = 1 << 14, 16  # floats that are worth a task, and that a line of the cache has
ANY = Problem(1, 1, 1, 1, 1, 1, 1)


def sizes(values: int) -> list[int]:
    """The words that the kernel reads from its frame."""
    parts = ceil_div(values, WORTH)
    return [values, parts, ceil_div(ceil_div(values, parts), LINE) * LINE]


def make(p: Problem, s: Schedule, isa: Isa) -> Module:
    """Nothing to y, as many images as the batch has; a task is a part of one."""
    m = Module(isa)
    with m.function("part", **KINDS) as f:
        z = InCode(f, None, SIZES)
        image, first = f.task // z.parts, f.task % z.parts * z.part
        count = (z.values - first).minimum(z.part).maximum(0)
        to, zero = f.frame.load_pointer(Y) + (image * z.values + first), f.vector(0.0)
        whole = count // isa.lanes * isa.lanes
        with f.loop(whole, step=isa.lanes) as at:
            (to + at.i).store(zero)
        (to + whole).store(zero, count=count - whole)

    def tasks(f: Function, frame: Pointer) -> Index:
        count: Index = InCode(f, None, SIZES).parts * frame.load_index(BATCH)
        return count

    emit_entry(m, [emit_region(m, "all", tasks, f)])
    return m


def request_of(isa: Isa) -> Request:
    return Request(make, ANY, Schedule(), isa, (), True)
