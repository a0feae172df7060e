"""Weights into the Winograd domain, fast enough to do it anew in every step of a training.

Computed in float64 and rounded once, like the weights of inference.
"""

from __future__ import annotations

import torch
from llvmlite import ir

from ...core.isa import Isa
from ...core.problem import Problem
from ...core.schedule import Schedule
from ...core.target import Target
from . import memory
from .emit import F32, I32, Function, Index, Module, Pointer, Vector
from .launch import launcher
from .threads import WEIGHT, X, Y, emit_entry, emit_region
from .transforms import Lanes, transform
from .winograd_geometry import Geometry

F64 = ir.DoubleType()


class _Doubles(Lanes):
    """The arithmetic of programs on vectors of float64."""

    def constant(self, value: float) -> Vector:
        lanes = self.f.isa.lanes
        return Vector(self.f, ir.Constant(ir.VectorType(F64, lanes), [value] * lanes))

    def fma(self, a: Vector, c: float, b: Vector, /) -> Vector:
        return a * self.constant(c) + b


def make(p: Problem, s: Schedule, isa: Isa) -> Module:
    """From a weight of any strides to U; a task is a vector of output channels.

    The frame's X is a table of the strides of K, C, R and S.
    """
    m, g = Module(isa), Geometry(p, s, isa.lanes)
    whole = (g.k_blocks - g.has_tail) * s.vectors  # vectors in blocks of full width
    with m.function("body", frame="pointer", task="index", worker="index") as body:
        with body.when(body.task < whole):
            _vector(body, g, body.task, False, g.lanes)
        rest = p.k % g.lanes
        if g.has_tail:
            full = g.k_vectors - (rest > 0)
            with body.when((body.task >= whole) & (body.task < full)):
                _vector(body, g, body.task, True, g.lanes)
            if rest:
                with body.when(body.task >= full):
                    _vector(body, g, body.task, True, rest)
    emit_entry(m, [emit_region(m, "prepare", lambda f, frame: g.k_vectors, body)])
    return m


def _vector(f: Function, g: Geometry, vector: Index, end: bool, count: int) -> None:
    """All input channels of one vector of output channels, `count` of which there are."""
    p, width = g.p, g.vectors(end) * g.lanes
    strides = [f.frame.load_pointer(X).load_index(i) for i in range(4)]
    source = f.frame.load_pointer(WEIGHT) + vector * g.lanes * strides[0]
    block, within = vector // g.s.vectors, vector % g.s.vectors * g.lanes
    to = f.frame.load_pointer(Y) + within
    if g.s.order == "channels":
        to, apart = to + block * (g.positions * g.panel), g.depth * width
    else:
        to, apart = to + block * g.panel, g.depth * g.k_vectors * g.lanes

    with f.loop(p.c) as c:
        def load(i: int, j: int) -> Vector:
            return _gather(f, source + (c.i * strides[1] + strides[2] * i + strides[3] * j),
                           strides[0], count)

        def store(i: int, j: int, value: Vector) -> None:
            at = c.i * width + (i * g.across.n + j) * apart
            single = f.ll.fptrunc(value.ir, ir.VectorType(F32, g.lanes))
            (to + at).store(Vector(f, single))

        transform(f, g.down.G, g.across.G, load, store, _Doubles(f))
    with f.loop(g.depth, start=p.c) as c, f.loop(g.positions) as position:
        (to + (c.i * width + position.i * apart)).store(f.vector(0.0))


def _gather(f: Function, source: Pointer, stride: Index, count: int) -> Vector:
    """The first `count` lanes from floats `stride` apart, as float64; the others zero."""
    lanes = f.isa.lanes
    value = ir.Constant(ir.VectorType(F32, lanes), [0.0] * lanes)
    for lane in range(count):
        one = f.ll.load((source + stride * lane).ir, align=4, typ=F32)
        value = f.ll.insert_element(value, one, ir.Constant(I32, lane))
    return Vector(f, f.ll.fpext(value, ir.VectorType(F64, lanes)))


def prepare(p: Problem, t: Target, s: Schedule, weight: torch.Tensor) -> torch.Tensor:
    """U of a weight (K, C, R, S), in pool memory."""
    # only what U depends on, so that other problems and schedules find the same kernel
    p = Problem(1, p.c, p.r, p.s, p.k, p.r, p.s)
    s = Schedule(**{name: s[name] for name in ("tile_h", "tile_w", "order", "vectors")})
    u = memory.empty(Geometry(p, s, t.lanes).weight_floats)
    strides = torch.tensor(weight.stride())
    launcher(make, p, s, t.row)(strides.data_ptr(), weight.data_ptr(), 0, 0, u.data_ptr(), 0, 1,
                                t.threads)
    return u
