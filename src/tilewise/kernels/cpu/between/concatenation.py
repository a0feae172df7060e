"""Channels of several images behind each other: every row of the result is written in one go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....core.isa import Isa
from ....core.schedule import Schedule
from ..emit import ELEMENTS, Module
from ..emit.elements import MOVED
from ..emit.sizes import InCode
from ..emit.threads import Y, emit_entry, emit_region
from ..emit.tiling import ceil_div
from .pointwise import KINDS, PLACES, WORTH, Chain, emit_row

MOST = len(PLACES)  # parts of a launch
SIZES = ("rows", "task_rows", "tasks", "pitch", *(f"columns{i}" for i in range(MOST)),
         *(f"pitch{i}" for i in range(MOST)))
COPY = Chain(("image",))


@dataclass(frozen=True)
class Parts:
    """What code depends on: how many parts there are, what they hold, and what the result does."""

    count: int
    dtype: str = "f32"
    made: str = ""  # where that is another type

    @property
    def code(self) -> str:
        held = "" if self.dtype == "f32" else f" of {self.dtype}"
        return f"{self.count} parts{held}" + (f" as {self.made}" if self.made else "")


def sizes(rows: int, columns: Sequence[int], pitches: Sequence[int], pitch: int) -> list[int]:
    """The words that the kernel reads from its frame: of each part its columns and its pitch."""
    task_rows = min(rows, ceil_div(WORTH, sum(columns)))
    more = [0] * (MOST - len(columns))
    return [rows, task_rows, ceil_div(rows, task_rows), pitch, *columns, *more, *pitches, *more]


def make(parts: Parts, s: Schedule, isa: Isa) -> Module:
    """Parts at X, WEIGHT, BIAS and RESIDUAL to y; a task is some rows."""
    m = Module(isa)
    with m.function("rows", **KINDS) as f:
        z: Any = InCode(f, parts, SIZES)
        count, pitch, first = range(parts.count), z.pitch, f.task * z.task_rows
        columns = [getattr(z, f"columns{i}") for i in count]
        pitches = [getattr(z, f"pitch{i}") for i in count]
        element = (ELEMENTS if parts.made else MOVED)[parts.dtype]
        given = [f.frame.load_pointer(PLACES[i], element) for i in count]
        y = f.frame.load_pointer(Y, ELEMENTS[parts.made] if parts.made else element)
        with f.loop((first + z.task_rows).minimum(z.rows), start=first) as row:
            to = y + row.i * pitch
            for own, x, step in zip(columns, given, pitches, strict=True):
                emit_row(f, COPY, [x + row.i * step], to, own)
                to = to + own
    emit_entry(m, [emit_region(m, "all", lambda f, frame: InCode(f, parts, SIZES).tasks, f)])
    return m
