"""Channel shuffle of channels-last images: groups of channels, interleaved in registers."""

from __future__ import annotations

from typing import Any

from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ..emit import Function, Index, Module, Pointer
from ..emit.sizes import InCode
from ..emit.threads import X, Y, emit_entry, emit_region
from ..emit.tiling import ceil_div
from ..emit.transpose import interleave
from .along import Columns, each_columns

KINDS: Any = {"frame": "pointer", "task": "index", "worker": "index"}
SIZES = ("members", "rows", "task_rows", "tasks", "pitch", "to")
WORTH = 1 << 13  # floats that are worth a task


def sizes(rows: int, channels: int, groups: int, pitch: int, to: int) -> list[int]:
    """The words that the kernel reads from its frame; pitches are floats from pixel to pixel."""
    task_rows = min(rows, ceil_div(WORTH, channels))
    return [channels // groups, rows, task_rows, ceil_div(rows, task_rows), pitch, to]


def make(p: Problem, s: Schedule, isa: Isa, groups: int) -> Module:
    """x to y, pixels of each; a group has so many members side by side."""
    m = Module(isa)
    with m.function("rows", **KINDS) as f:
        z = InCode(f, None, SIZES)
        x, y, pitch, to = f.frame.load_pointer(X), f.frame.load_pointer(Y), z.pitch, z.to
        members, first = z.members, f.task * z.task_rows
        with f.loop((first + z.task_rows).minimum(z.rows), start=first) as row:
            at, written = x + row.i * pitch, y + row.i * to
            sources = [at + members * group for group in range(groups)]
            each_columns(f, members, 1, lambda parts: _mix(f, parts[0], sources, written))
    emit_entry(m, [emit_region(m, "all", lambda f, frame: InCode(f, None, SIZES).tasks, f)])
    return m


def _mix(f: Function, at: Columns, sources: list[Pointer], y: Pointer) -> None:
    """A vector of every group, to as many vectors side by side."""
    groups, lanes = len(sources), f.isa.lanes
    for i, mixed in enumerate(interleave(at.load(sources))):
        rest: Index | None = None if at.rest is None else at.rest * groups - i * lanes
        y.store(mixed, at.first * groups + i * lanes, count=rest)
