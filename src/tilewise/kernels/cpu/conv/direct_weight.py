"""Gradients of weights by unrolling: every pixel of the gradient against the inputs it saw.

V[pixel] are the inputs under the filter at that pixel, all taps and channels of a group side by
side in the lanes, so that few channels fill them too; M[pixel] is the gradient. Only a chunk of
pixels is ever unrolled at a time. A group is a position.
"""

from __future__ import annotations

from ....core.cached import cached
from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ..emit import Function, Index, Module, Pointer
from ..emit.threads import SCRATCH, WEIGHT, X, Y
from ..emit.tiling import emit_copy, emit_zero
from .outer import KINDS, OuterGeometry, OuterSums


class Geometry(OuterGeometry):
    """Every size of the gradient of a weight; the items are pixels."""

    @cached
    def positions(self) -> int:
        return self.p.groups

    @cached
    def items(self) -> int:
        return self.p.conv_h * self.p.conv_w

    @cached
    def columns(self) -> int:
        return self.p.r * self.p.s * self.p.group_c

    @cached
    def rows(self) -> int:
        return self.p.group_k

    @cached
    def own_floats(self) -> int:
        """One unrolled pixel of one group, in whole vectors."""
        return self.c_padded


def make(p: Problem, s: Schedule, isa: Isa) -> Module:
    """The module of a weight's gradient."""
    return Gradient(Geometry(p, s, isa.lanes), isa).module()


class Gradient(OuterSums):
    def __init__(self, geometry: Geometry, isa: Isa) -> None:
        super().__init__(geometry, isa)
        self.unroll = self._unroll()

    def _unroll(self) -> Function:
        """The inputs of one group under the filter, [r][s][c]; zeros outside the image."""
        p = self.p
        with self.m.function("unroll", x="pointer", to="pointer", top="index",
                             left="index") as f:
            for r in range(p.r):
                row, to = f.top + r * p.dilation[0], f.to + r * p.s * p.group_c
                with f.either((row >= 0) & (row < p.h)) as (inside, outside):
                    with inside:
                        self._unroll_row(f, f.x.of(self.g.image) + row * (p.w * p.c), to)
                    with outside:
                        emit_zero(f, to, f.index(p.s * p.group_c))
        return f

    def _unroll_row(self, f: Function, x: Pointer, to: Pointer) -> None:
        p, c = self.p, self.p.group_c
        if p.dilation[1] == 1 and p.groups == 1:  # neighbouring taps are neighbours in memory
            start = (0 - f.left).maximum(0).minimum(p.s)
            stop = (p.w - f.left).maximum(start).minimum(p.s)
            emit_zero(f, to, start * c)
            emit_copy(f, to + start * c, x + (f.left + start) * p.c, (stop - start) * c)
            emit_zero(f, to + stop * c, (p.s - stop) * c)
            return
        for s in range(p.s):
            col, here = f.left + s * p.dilation[1], to + s * c
            with f.either((col >= 0) & (col < p.w)) as (inside, outside):
                with inside:
                    emit_copy(f, here, x + col * p.c, c)
                with outside:
                    emit_zero(f, here, f.index(c))

    def read(self, f: Function, scratch: Pointer, first: Index, start: Index | int,
             stop: Index, band: int = 0) -> None:
        g, p = self.g, self.p
        row = scratch + g.own_start
        emit_zero(f, row, f.index(g.own_floats))  # also the lanes that hold nothing
        with f.loop(stop, start=start) as t, f.loop(p.groups) as group:
            pixel = first + t.i
            image, place = pixel // g.items, pixel % g.items
            top = place // p.conv_w * p.stride[0] - p.padding[0]
            left = place % p.conv_w * p.stride[1] - p.padding[2]
            x = f.frame.load_pointer(X, g.image) + (image * (p.h * p.w * p.c)
                                                    + group.i * p.group_c)
            f.call(self.unroll, x, row, top, left)
            v = scratch + group.i * g.v_position
            with f.loop(g.c_padded, step=g.lanes) as c:
                v.store((row + c.i).load(), g.v_at(t.i, c.i))
            self._read_gradient(f, scratch + (group.i * g.m_position + g.m_start), t.i,
                                pixel * p.k + group.i * p.group_k)

    def _read_gradient(self, f: Function, mm: Pointer, item: Index, at: Index) -> None:
        g, grad = self.g, f.frame.load_pointer(WEIGHT, self.g.image) + at
        whole = g.rows // g.lanes * g.lanes
        with f.loop(whole, step=g.lanes) as k:
            mm.store((grad + k.i).load(), g.m_at(item, k.i))
        if g.rows > whole:
            mm.store((grad + whole).load(count=g.rows - whole), g.m_at(item, whole))

    def finish(self) -> Function:
        """dW of one output channel: from [r][s][c] to [c][r][s], a number at a time."""
        g, p, taps = self.g, self.p, self.p.r * self.p.s
        with self.m.function("finish", **KINDS) as f:
            group, k = f.task // p.group_k, f.task % p.group_k
            u = f.frame.load_pointer(SCRATCH) + group * g.u_position
            to = f.frame.load_pointer(Y, g.image) + f.task * (p.group_c * taps)
            with f.loop(taps) as tap, f.loop(p.group_c) as c:
                here = u + g.u_at(tap.i * p.group_c + c.i, k)
                total = here.load(lanes=1)
                for part in range(1, self.s.parts):
                    total = total + here.load(part * g.part_floats, lanes=1)
                to.store(total, c.i * taps + tap.i)
        return f
