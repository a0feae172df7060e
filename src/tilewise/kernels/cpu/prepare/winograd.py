"""Weights into the Winograd domain, fast enough to do it anew in every step of a training.

Computed in float64 and rounded once, like the weights of inference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....core.isa import Isa
from ....core.places import address
from ....core.problem import Problem
from ....core.remembered import Remembered
from ....core.schedule import Schedule
from ....core.target import Target
from ..conv.transforms import Lanes, transform
from ..conv.winograd_geometry import FILTERS, Geometry
from ..emit import F64, Bits, Function, Index, Module, Vector
from ..emit.launch import Launch, launch_of
from ..emit.requests import Request
from ..emit.sizes import InCode
from ..emit.threads import WEIGHT, X, Y, emit_entry, emit_region


class Doubles(Lanes):
    """The arithmetic of programs on vectors of float64."""

    def constant(self, value: float) -> Vector:
        return self.f.vector(value, work=F64)

    def fma(self, a: Vector, c: float, b: Vector, /) -> Vector:
        return a * self.constant(c) + b


AHEAD = 8  # input channels whose filters are asked for before they are read
LARGE = 1 << 20  # bytes that are written faster past the caches than into them
SIZES = ("c", "k", "depth", "k_vectors")  # of the weight: one kernel prepares them all


def make(p: Problem, s: Schedule, isa: Isa) -> Module:
    """From a weight of any strides to U; a task is a vector of output channels.

    The frame's X is a table of the strides of K, C, R and S.
    """
    return module(Geometry(p, s, isa.lanes), isa, _vector)


def module(g: Geometry, isa: Isa, vector: Callable[[Panels], None]) -> Module:
    """With `vector` for all input channels of one vector of output channels."""
    m = Module(isa)
    with m.function("body", frame="pointer", task="index", worker="index") as body:
        vector(Panels(body, g))
    emit_entry(m, [emit_region(
        m, "prepare", lambda f, frame: InCode(f, g, SIZES).k_vectors, body)])
    return m


class Panels:
    """What a task reads and writes; the task is a vector of output channels."""

    def __init__(self, f: Function, g: Geometry) -> None:
        z = InCode(f, g, SIZES)
        self.f, self.g, self.c, self.depth = f, g, z.c, z.depth
        stride, *self.strides = (f.frame.load_pointer(X).load_index(i) for i in range(4))
        self.source = f.frame.load_pointer(WEIGHT) + f.task * g.lanes * stride
        self.count = (z.k - f.task * g.lanes).minimum(g.lanes)  # channels that there are
        self.lanes = [f.index(lane).minimum(self.count - 1) * stride for lane in range(g.lanes)]
        block, self.within = f.task // g.s.vectors, f.task % g.s.vectors
        self.vectors = (z.k_vectors - block * g.s.vectors).minimum(g.s.vectors)  # of its block
        whole = g.panel_of(f.index(g.block_k), self.depth)
        self.values = g.positions  # of an input channel and an output channel
        self.step = self.vectors * g.lanes  # between input channels
        if g.s.order == FILTERS:
            self.values, self.apart = g.taps, self.step
            self.step = self.step * g.taps
            self.to = f.frame.load_pointer(Y) + block * whole * g.taps
        elif g.s.order == "channels":
            self.to = f.frame.load_pointer(Y) + block * whole * g.positions
            self.apart = g.panel_of(self.vectors * g.lanes, self.depth)  # between positions
        else:
            self.to = f.frame.load_pointer(Y) + block * whole
            self.apart = g.panel_of(z.k_vectors * g.lanes, self.depth)

    def fetch(self, c: Index) -> None:
        """Ask for the filters of an input channel: those of a gradient's lie pages apart."""
        for lane in self.lanes:
            (self.source + c * self.strides[0]).prefetch(lane, level=1)

    def transformed(self, c: Index, store: Callable[[int, Vector], None]) -> None:
        """The filters of one input channel: store(position, value)."""
        f, g, (channel, row, column) = self.f, self.g, self.strides
        there = Bits(f, f.leading(self.count, g.lanes))

        def load(i: int, j: int) -> Vector:
            found = (self.source + (c * channel + row * i + column * j)).gather_at(self.lanes)
            return there.select(found, f.vector(0.0)).to(F64)

        if g.s.order == FILTERS:
            for tap in range(g.taps):
                store(tap, load(*divmod(tap, g.p.s)))
            return
        transform(f, g.down.G, g.across.G, load,
                  lambda i, j, value: store(i * g.across.n + j, value), Doubles(f))


def make_streaming(p: Problem, s: Schedule, isa: Isa) -> Module:
    """The same past the caches: for what they could not keep anyway."""
    return module(Geometry(p, s, isa.lanes), isa, lambda panels: _vector(panels, True))


def _vector(panels: Panels, streaming: bool = False) -> None:
    f, g = panels.f, panels.g
    to, step = panels.to + panels.within * g.lanes, panels.step
    with f.loop(panels.c) as c:
        if streaming:
            panels.fetch(c.i + AHEAD)

        def store(position: int, value: Vector) -> None:
            (to + (c.i * step + panels.apart * position)).store(value, streaming=streaming)

        panels.transformed(c.i, store)
    with f.loop(panels.depth, start=panels.c) as c, f.loop(panels.values) as position:
        (to + (c.i * step + panels.apart * position.i)).store(f.vector(0.0))


def prepare(p: Problem, s: Schedule, t: Target, weight: Any) -> Any:
    """U of a weight (K, C, R, S), in pool memory."""
    return run(maker(p, s, t.row), Geometry, p, t, s, weight)


def prepared_floats(p: Problem, s: Schedule, t: Target) -> int:
    return floats(maker(p, s, t.row), Geometry, p, t, s)


def prepare_into(p: Problem, s: Schedule, t: Target, weight: Any, u: Any) -> None:
    run_into(maker(p, s, t.row), Geometry, p, t, s, weight, u)


def maker(p: Problem, s: Schedule, isa: Isa) -> Callable[..., Module]:
    return MAKERS[p, s, isa]


def _maker(p: Problem, s: Schedule, isa: Isa) -> Callable[..., Module]:
    return make_streaming if 4 * Geometry(p, s, isa.lanes).weight_floats >= LARGE else make


def request_of(make: Callable[..., Module], p: Problem, s: Schedule, isa: Isa,
               *more: int) -> Request:
    """The code for weights of any number of channels."""
    return Request(make, p.with_(c=1, k=1), s, isa, more, True)


def launch_for(make: Callable[..., Module], g: Geometry, isa: Isa, *more: int) -> Launch:
    return launch_of(request_of(make, g.p, g.s, isa, *more), [getattr(g, name) for name in SIZES])


def run(make: Callable[..., Module], geometry: type[Geometry], p: Problem, t: Target, s: Schedule,
        weight: Any, *more: int) -> Any:
    """Call what `make` gives."""
    from .. import memory

    u = memory.empty(floats(make, geometry, p, t, s, *more))
    run_into(make, geometry, p, t, s, weight, u, *more)
    return u


def floats(make: Callable[..., Module], geometry: type[Geometry], p: Problem, t: Target,
           s: Schedule, *more: int) -> int:
    """Of U."""
    key = (make, geometry, p, s, t.row, *more)
    return RUNS[key][1]


def run_into(make: Callable[..., Module], geometry: type[Geometry], p: Problem, t: Target,
             s: Schedule, weight: Any, u: Any, *more: int) -> None:
    import torch  # workers that only compile do without it

    key = (make, geometry, p, s, t.row, *more)
    launch, _ = RUNS[key]
    strides = torch.tensor(weight.stride())
    launch(address(strides), address(weight), 0, 0, address(u), 0, 1, t.threads)


def _run(make: Callable[..., Module], geometry: type[Geometry], p: Problem, s: Schedule, isa: Isa,
         *more: int) -> tuple[Launch, int]:
    """The function, and how many floats it writes."""
    g = geometry(p, s, isa.lanes, *more)
    return launch_for(make, g, isa, *more), g.weight_floats


# weights that learn are prepared in every step, and geometries take longer than small weights
MAKERS, RUNS = Remembered(_maker), Remembered(_run)
