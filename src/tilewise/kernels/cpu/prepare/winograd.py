"""Weights into the Winograd domain, fast enough to do it anew in every step of a training.

Computed in float64 and rounded once, like the weights of inference.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ....core.target import Target
from .. import memory
from ..conv.transforms import Lanes, transform
from ..conv.winograd_geometry import Geometry
from ..emit import F64, Function, Index, Module, Vector
from ..emit.launch import launcher
from ..emit.threads import WEIGHT, X, Y, emit_entry, emit_region


class Doubles(Lanes):
    """The arithmetic of programs on vectors of float64."""

    def constant(self, value: float) -> Vector:
        return self.f.vector(value, work=F64)

    def fma(self, a: Vector, c: float, b: Vector, /) -> Vector:
        return a * self.constant(c) + b


def make(p: Problem, s: Schedule, isa: Isa) -> Module:
    """From a weight of any strides to U; a task is a vector of output channels.

    The frame's X is a table of the strides of K, C, R and S.
    """
    return module(Geometry(p, s, isa.lanes), isa, _vector)


def module(g: Geometry, isa: Isa, vector: Callable[[Function, Panels, bool, int], None]) -> Module:
    """With `vector` for all input channels of one vector of output channels."""
    m, p = Module(isa), g.p
    whole = (g.k_blocks - g.has_tail) * g.s.vectors  # vectors in blocks of full width
    with m.function("body", frame="pointer", task="index", worker="index") as body:
        with body.when(body.task < whole):
            vector(body, Panels(body, g, False), False, g.lanes)
        rest = p.k % g.lanes
        if g.has_tail:
            full = g.k_vectors - (rest > 0)
            with body.when((body.task >= whole) & (body.task < full)):
                vector(body, Panels(body, g, True), True, g.lanes)
            if rest:
                with body.when(body.task >= full):
                    vector(body, Panels(body, g, True), True, rest)
    emit_entry(m, [emit_region(m, "prepare", lambda f, frame: g.k_vectors, body)])
    return m


class Panels:
    """What a task reads and writes; the task is a vector of output channels."""

    def __init__(self, f: Function, g: Geometry, end: bool) -> None:
        self.f, self.g = f, g
        self.strides = [f.frame.load_pointer(X).load_index(i) for i in range(4)]
        self.source = f.frame.load_pointer(WEIGHT) + f.task * g.lanes * self.strides[0]
        block, self.within = f.task // g.s.vectors, f.task % g.s.vectors
        to = f.frame.load_pointer(Y)
        if g.s.order == "channels":
            self.to = to + block * (g.positions * g.panel)
            self.apart = g.panel_floats(g.vectors(end) * g.lanes)  # from a position to the next
        else:
            self.to, self.apart = to + block * g.panel, g.panel_floats(g.k_vectors * g.lanes)

    def transformed(self, c: Index, count: int, store: Callable[[int, Vector], None]) -> None:
        """The filters of one input channel, `count` of which there are: store(position, value)."""
        f, g, strides = self.f, self.g, self.strides

        def load(i: int, j: int) -> Vector:
            at = self.source + (c * strides[1] + strides[2] * i + strides[3] * j)
            return at.gather(strides[0], count).to(F64)

        transform(f, g.down.G, g.across.G, load,
                  lambda i, j, value: store(i * g.across.n + j, value), Doubles(f))


def _vector(f: Function, panels: Panels, end: bool, count: int) -> None:
    g = panels.g
    to, width = panels.to + panels.within * g.lanes, g.vectors(end) * g.lanes
    with f.loop(g.p.c) as c:
        def store(position: int, value: Vector) -> None:
            (to + (c.i * width + position * panels.apart)).store(value)

        panels.transformed(c.i, count, store)
    with f.loop(g.depth, start=g.p.c) as c, f.loop(g.positions) as position:
        (to + (c.i * width + position.i * panels.apart)).store(f.vector(0.0))


def prepare(p: Problem, s: Schedule, t: Target, weight: torch.Tensor) -> torch.Tensor:
    """U of a weight (K, C, R, S), in pool memory."""
    return run(make, Geometry, p, t, s, weight)


def run(make: Callable[..., Module], geometry: type[Geometry], p: Problem, t: Target, s: Schedule,
        weight: torch.Tensor, *more: int) -> torch.Tensor:
    """Call what `make` gives."""
    u = memory.empty(geometry(p, s, t.lanes, *more).weight_floats)
    strides = torch.tensor(weight.stride())
    launch = launcher(make, p, s, t.row, *more)
    launch(strides.data_ptr(), weight.data_ptr(), 0, 0, u.data_ptr(), 0, 1, t.threads)
    return u
