"""Gradients of weights of few channels a group: channels in the lanes, a sum for every tap.

Each input of a group meets all gradients of the group. Where several groups share a vector, a
vector of gradients is shuffled, so that every lane has one of its own group's; else a vector
belongs to one group, and gradients are spread over it one by one. A group a channel is the
depthwise case.

A row of the gradient meets, for each tap, the part of an input row that the tap saw: which part
is known when the code is written. Sums run over a few rows in registers, then in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ....core.cached import cached
from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ..emit import Function, Index, Module, Pointer, Vector
from ..emit.elements import FLOAT32
from ..emit.threads import BATCH, SCRATCH, WEIGHT, X, Y, emit_entry, emit_region
from ..emit.tiling import ceil_div, emit_zero
from ..emit.transpose import interleave
from .geometry import Sizes

KINDS: Any = {"frame": "pointer", "task": "index", "worker": "index"}
PIXELS = 192  # of the gradient that are summed in registers, if a row has not more


class Block(NamedTuple):
    """Vectors of channels that are summed together, by the channels that each has."""

    first: int  # channel of the first such block
    times: int  # blocks like this, one behind the other
    counts: tuple[int, ...]


class Geometry(Sizes):
    """Every size of the gradient of such a weight."""

    @cached
    def shares(self) -> bool:
        """Whether several groups share a vector."""
        return self.p.group_c == self.p.group_k < self.lanes and self.lanes % self.p.group_c == 0

    @cached
    def units(self) -> int:
        """Runs of channels that begin with a vector: groups, or all of them as one."""
        return 1 if self.shares else self.p.groups

    @cached
    def unit_c(self) -> int:
        return self.p.c // self.units

    @cached
    def unit_padded(self) -> int:
        return ceil_div(self.unit_c, self.lanes) * self.lanes

    @cached
    def padded(self) -> int:
        return self.units * self.unit_padded

    @cached
    def group_places(self) -> int:
        """Floats from the channels of a group to those of the next."""
        return self.p.group_c if self.shares else self.unit_padded

    @cached
    def blocks(self) -> tuple[Block, ...]:
        """All channels of a unit."""
        width = int(self.s.vectors) * self.lanes
        whole, rest = divmod(self.unit_c, width)
        first = Block(0, whole, (self.lanes,) * int(self.s.vectors))
        last = Block(whole * width, 1, tuple(
            min(self.lanes, rest - at) for at in range(0, rest, self.lanes)))
        return tuple(block for block in (first, last) if block.times and block.counts)

    @cached
    def rows(self) -> tuple[tuple[int, int, int], ...]:
        """Filters of a group whose sums are in registers together: the first, how often, how
        many."""
        together = self.p.group_k if self.shares else int(self.s.rows)
        whole, rest = divmod(self.p.group_k, together)
        found = ((0, whole, together), (whole * together, 1, rest))
        return tuple(each for each in found if each[1] and each[2])

    @cached
    def chunk(self) -> int:
        """Rows of the gradient that are summed in registers."""
        return max(1, PIXELS // max(1, self.p.conv_w))

    @cached
    def part_floats(self) -> int:
        """The sums of one part: [tap][filter of its group][channel]."""
        return self.p.r * self.p.s * self.p.group_k * self.padded

    def scratch_bytes(self, threads: int) -> int:
        return FLOAT32.bytes * self.part_floats * int(self.s.parts)

    def columns(self, s: int) -> tuple[int, int]:
        """The columns of the gradient that saw an input through this tap."""
        return self._seen(s, 1, self.p.padding[2], self.p.w, self.p.conv_w)

    def lines(self, r: int) -> tuple[int, int]:
        """The same of its rows."""
        return self._seen(r, 0, self.p.padding[0], self.p.h, self.p.conv_h)

    def _seen(self, tap: int, axis: int, before: int, size: int, outputs: int) -> tuple[int, int]:
        p = self.p
        offset = tap * p.dilation[axis] - before
        first = max(0, ceil_div(-offset, p.stride[axis]))
        return first, max(first, min(outputs, (size - 1 - offset) // p.stride[axis] + 1))


def make(p: Problem, s: Schedule, isa: Isa) -> Module:
    """The module of such a weight's gradient."""
    return _Gradient(Geometry(p, s, isa.lanes), isa).module()


class _Gradient:
    def __init__(self, geometry: Geometry, isa: Isa) -> None:
        self.g, self.p, self.s, self.isa = geometry, geometry.p, geometry.s, isa

    def module(self) -> Module:
        self.m = Module(self.isa)
        self.taps = {(s, block.counts, rows): self._tap(s, block.counts, rows)
                     for s in range(self.p.s) for block in self.g.blocks
                     for _, _, rows in self.g.rows}
        emit_entry(self.m, [
            emit_region(self.m, "sum", lambda f, frame: self.s.parts, self._body()),
            emit_region(self.m, "results", lambda f, frame: self.p.k, self._finish())])
        return self.m

    def _body(self) -> Function:
        """A task takes its part of the rows of the gradient, a few at a time."""
        g, parts = self.g, self.s.parts
        with self.m.function("body", **KINDS) as f:
            sums = f.frame.load_pointer(SCRATCH) + f.task * g.part_floats
            emit_zero(f, sums, f.index(g.part_floats))
            total = f.frame.load_index(BATCH) * self.p.conv_h
            last = (f.task + 1) * total // parts
            with f.loop(last, start=f.task * total // parts, step=g.chunk) as line:
                stop = (line.i + g.chunk).minimum(last)
                with f.loop(g.units) as unit:
                    self._unit(f, sums, unit.i, line.i, stop)
        return f

    def _unit(self, f: Function, sums: Pointer, unit: Index, start: Index, stop: Index) -> None:
        """Some rows of the gradient and all taps, for the channels of a unit."""
        g, p = self.g, self.p
        x = f.frame.load_pointer(X, g.image) + unit * g.unit_c
        grad = f.frame.load_pointer(WEIGHT, g.image) + unit * (p.k // g.units)
        sums = sums + unit * g.unit_padded
        for block, channel in self._each_block(f):
            for first, times, rows in g.rows:
                with f.loop(times) as some:
                    row = some.i * rows + first
                    for r in range(p.r):
                        for s in range(p.s):
                            here = sums + ((r * p.s + s) * (p.group_k * g.padded) + channel
                                           + row * g.padded)
                            f.call(self.taps[s, block.counts, rows], x + channel,
                                   grad + (channel if g.shares else row), here, start, stop,
                                   *map(f.index, g.lines(r)),
                                   f.index(r * p.dilation[0] - p.padding[0]))

    def _each_block(self, f: Function) -> Iterator[tuple[Block, Index]]:
        """The blocks of a unit, with their first channel in it."""
        for block in self.g.blocks:
            with f.loop(block.times) as number:
                yield block, number.i * (len(block.counts) * self.g.lanes) + block.first

    def _tap(self, s: int, counts: tuple[int, ...], rows: int) -> Function:
        """Rows start..stop of the gradient, of which low..high of an image saw the input: sums of
        a tap. `shift` leads from a row to the one of the input that it saw."""
        g, p, image = self.g, self.p, self.g.image
        first, last = g.columns(s)
        column = first * p.stride[1] + s * p.dilation[1] - p.padding[2]
        with self.m.function(f"tap_{s}_{sum(counts)}_{rows}", x="pointer", grad="pointer",
                             sums="pointer", start="index", stop="index", low="index",
                             high="index", shift="index") as f:
            x, grad = f.x.of(image) + column * p.c, f.grad.of(image) + first * p.k
            zeros: list[Any] = [f.vector(0.0)] * (len(counts) * rows)
            images = (f.stop + (p.conv_h - 1)) // p.conv_h
            with f.loop(images, start=f.start // p.conv_h, carry=zeros) as one:
                top = one.i * p.conv_h
                with f.loop((f.stop - top).minimum(f.high),
                            start=(f.start - top).maximum(f.low), carry=one.values) as line:
                    y = line.i * p.stride[0] + f.shift
                    line.values = self._row(
                        f, x + (one.i * p.h + y) * (p.w * p.c),
                        grad + (top + line.i) * (p.conv_w * p.k), last - first, line.values,
                        counts)
                one.values = line.values
            for i, value in enumerate(one.values):
                at = f.sums + (i // len(counts) * g.padded + i % len(counts) * g.lanes)
                at.store(at.load() + value)
        return f

    def _row(self, f: Function, x: Pointer, grad: Pointer, columns: int, acc: list[Any],
             counts: tuple[int, ...]) -> list[Any]:
        p, lanes = self.p, self.g.lanes
        with f.loop(columns, carry=[x, grad, *acc]) as col:
            x, grad, *acc = col.values
            inputs = [x.load(i * lanes, count=count) for i, count in enumerate(counts)]
            met = self._gradients(grad, counts, len(acc) // len(counts))
            for row, values in enumerate(met):
                for i, (value, other) in enumerate(zip(inputs, values, strict=True)):
                    at = row * len(counts) + i
                    acc[at] = f.fma(value, other, acc[at])
            col.values = [x + p.stride[1] * p.c, grad + p.k, *acc]
        return col.values[2:]

    def _gradients(self, grad: Pointer, counts: tuple[int, ...],
                   rows: int) -> Iterator[list[Vector]]:
        """For each filter of a group, what the vectors of inputs meet."""
        g, lanes, size = self.g, self.g.lanes, self.p.group_c
        if not g.shares:
            for row in range(rows):
                yield [grad.broadcast(row)] * len(counts)
            return
        loaded = [grad.load(i * lanes, count=count) for i, count in enumerate(counts)]
        for row in range(rows):
            where = [lane // size * size + row for lane in range(lanes)]
            yield loaded if size == 1 else [value.shuffle(value, where) for value in loaded]

    def _finish(self) -> Function:
        """All taps of one filter, the parts in their order."""
        g, p, taps = self.g, self.p, self.p.r * self.p.s
        with self.m.function("finish", **KINDS) as f:
            group, row = f.task // p.group_k, f.task % p.group_k
            sums = f.frame.load_pointer(SCRATCH) + (row * g.padded + group * g.group_places)
            to = f.frame.load_pointer(Y, g.image) + f.task * (p.group_c * taps)

            def total(channel: Index | int, tap: Index | int, lanes: int) -> Vector:
                here = sums + channel + tap * (p.group_k * g.padded)
                found = here.load(lanes=lanes)
                for part in range(1, self.s.parts):
                    found = found + here.load(part * g.part_floats, lanes=lanes)
                return found

            def results(c: Index | int, count: int) -> None:
                """Those of so many channels, which lie side by side."""
                found = interleave([total(c, tap, g.lanes) for tap in range(taps)])
                for i, value in enumerate(found[:ceil_div(count * taps, g.lanes)]):
                    at = i * g.lanes
                    (to + c * taps).store(value, at, count=min(g.lanes, count * taps - at))

            if g.shares:
                with f.loop(p.group_c) as c, f.loop(taps) as tap:
                    to.store(total(c.i, tap.i, 1), c.i * taps + tap.i)
                return f
            whole, rest = p.group_c // g.lanes * g.lanes, p.group_c % g.lanes
            with f.loop(whole, step=g.lanes) as c:
                results(c.i, g.lanes)
            if rest:
                results(whole, rest)
        return f
