"""Gradients of depthwise weights: channels in the lanes, a sum for every tap.

A row of the gradient meets, for each tap, the part of an input row that the tap saw: which part
is known when the code is written. Sums run over a row in registers, over rows in memory.
"""

from __future__ import annotations

from typing import Any

from ....core.cached import cached
from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ..emit import Function, Index, Module, Pointer, Vector
from ..emit.elements import FLOAT32
from ..emit.threads import BATCH, SCRATCH, WEIGHT, X, Y, emit_entry, emit_region
from ..emit.tiling import ceil_div, emit_zero
from .geometry import Sizes

KINDS: Any = {"frame": "pointer", "task": "index", "worker": "index"}


class Geometry(Sizes):
    """Every size of the gradient of a depthwise weight."""

    @cached
    def padded(self) -> int:
        return ceil_div(self.p.c, self.lanes) * self.lanes

    @cached
    def part_floats(self) -> int:
        """The sums of one part: [tap][channel]."""
        return self.p.r * self.p.s * self.padded

    def scratch_bytes(self, threads: int) -> int:
        return FLOAT32.bytes * self.part_floats * int(self.s.parts)

    def columns(self, s: int) -> tuple[int, int]:
        """The columns of the gradient that saw an input through this tap."""
        p = self.p
        offset = s * p.dilation[1] - p.padding[2]
        first = max(0, ceil_div(-offset, p.stride[1]))
        return first, max(first, min(p.conv_w, (p.w - 1 - offset) // p.stride[1] + 1))


def make(p: Problem, s: Schedule, isa: Isa) -> Module:
    """The module of a depthwise weight's gradient."""
    m, g = Module(isa), Geometry(p, s, isa.lanes)
    row = _row(m, g)
    with m.function("body", **KINDS) as f:
        sums = f.frame.load_pointer(SCRATCH) + f.task * g.part_floats
        emit_zero(f, sums, f.index(g.part_floats))
        total = f.frame.load_index(BATCH) * p.conv_h
        with f.loop((f.task + 1) * total // s.parts, start=f.task * total // s.parts) as line:
            _each_tap_row(f, g, row, sums, line.i)
    with m.function("finish", **KINDS) as last:
        _finish(last, g)
    emit_entry(m, [emit_region(m, "sum", lambda f, frame: s.parts, f),
                   emit_region(m, "results", lambda f, frame: p.c, last)])
    return m


def _each_tap_row(f: Function, g: Geometry, row: Function, sums: Pointer, line: Index) -> None:
    """One row of the gradient against every input row that it saw."""
    p = g.p
    image, top = line // p.conv_h, line % p.conv_h * p.stride[0] - p.padding[0]
    grad = f.frame.load_pointer(WEIGHT, g.image) + line * (p.conv_w * p.c)
    for r in range(p.r):
        y = top + r * p.dilation[0]
        with f.when((y >= 0) & (y < p.h)):
            x = f.frame.load_pointer(X, g.image) + (image * p.h + y) * (p.w * p.c)
            f.call(row, x, grad, sums + r * p.s * g.padded)


def _row(m: Module, g: Geometry) -> Function:
    """A row of inputs and one of gradients: adds to the sums of a row of taps."""
    p, block = g.p, g.s.vectors * g.lanes
    with m.function("row", x="pointer", grad="pointer", sums="pointer") as f:
        whole = p.c // block * block
        for s in range(p.s):
            with f.loop(whole, step=block) as c:
                _tap(f, g, s, c.i, [g.lanes] * g.s.vectors)
            with f.loop(p.c // g.lanes * g.lanes, start=whole, step=g.lanes) as c:
                _tap(f, g, s, c.i, [g.lanes])
            if p.c % g.lanes:
                _tap(f, g, s, f.index(p.c // g.lanes * g.lanes), [p.c % g.lanes])
    return f


def _tap(f: Function, g: Geometry, s: int, c: Index, counts: list[int]) -> None:
    """One tap of some vectors of channels."""
    p, (first, last) = g.p, g.columns(s)
    column = first * p.stride[1] + s * p.dilation[1] - p.padding[2]
    x, grad = (f.x.of(g.image) + (c + column * p.c), f.grad.of(g.image) + (c + first * p.c))
    zeros: list[Vector] = [f.vector(0.0) for _ in counts]
    with f.loop(last - first, carry=[x, grad, *zeros]) as col:
        x, grad, *acc = col.values
        for i, count in enumerate(counts):
            a, b = (at.load(i * g.lanes, count=count) for at in (x, grad))
            acc[i] = f.fma(a, b, acc[i])
        col.values = [x + p.stride[1] * p.c, grad + p.c, *acc]
    for i, value in enumerate(col.values[2:]):
        at = f.sums + (c + (s * g.padded + i * g.lanes))
        at.store(at.load() + value)


def _finish(f: Function, g: Geometry) -> None:
    """All taps of one channel, the parts in their order."""
    taps = g.p.r * g.p.s
    sums = f.frame.load_pointer(SCRATCH) + f.task
    to = f.frame.load_pointer(Y, g.image) + f.task * taps
    with f.loop(taps) as tap:
        here = sums + tap.i * g.padded
        total = here.load(lanes=1)
        for part in range(1, g.s.parts):
            total = total + here.load(part * g.part_floats, lanes=1)
        to.store(total, tap.i)
