"""Weights in panels, fast enough to do it anew in every step; the bits of `Geometry.pack_weight`.

One kernel packs weights of any size: sizes are words of its frame.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from ....core.isa import Isa
from ....core.places import address
from ....core.problem import Problem
from ....core.remembered import Remembered
from ....core.schedule import Schedule
from ....core.target import Target
from ..conv.direct_geometry import Geometry
from ..emit import Bits, Function, Index, Module, Pointer, Vector, launch
from ..emit.requests import Request
from ..emit.sizes import InCode
from ..emit.threads import WEIGHT, X, Y, emit_entry, emit_region
from ..emit.transpose import transpose
from .mirrored import Mirrored

OFTEN = 256  # weights that torch packs before code is made for the next
FEW = 64 << 10  # bytes that a thread packs sooner than others could begin
ANY = Problem(1, 1, 1, 1, 1, 1, 1)
# of a panel: filters, input channels, taps down and across; panels of a group; vectors of a block
SIZES = ("slices", "group_k", "slice_c", "r", "s", "split", "vectors", "k_vectors")


def make(p: Problem, s: Schedule, isa: Isa) -> Module:
    """A task is a vector of output channels of one panel.

    The frame's X is a table of the strides of groups, K, C, R and S.
    """
    m = Module(isa)
    with m.function("body", frame="pointer", task="index", worker="index") as body:
        _Vector(body).pack()

    def tasks(f: Function, frame: Pointer) -> Index:
        z = InCode(f, None, SIZES)
        count: Index = z.slices * z.k_vectors
        return count

    emit_entry(m, [emit_region(m, "pack", tasks, body)])
    return m


class _Vector:
    """The weights of some output channels, as many as a vector has."""

    def __init__(self, f: Function) -> None:
        self.f, self.z = f, InCode(f, None, SIZES)
        z, lanes = self.z, f.isa.lanes
        between, self.k, self.c, self.row, self.column = (
            f.frame.load_pointer(X).load_index(i) for i in range(5))
        panel, vector = f.task // z.k_vectors, f.task % z.k_vectors
        group, part = panel // z.split, panel % z.split
        depth, block = z.r * z.s * z.slice_c, vector // z.vectors
        # the last block may have fewer vectors
        self.width = (z.k_vectors - block * z.vectors).minimum(z.vectors) * lanes
        self.to = (f.frame.load_pointer(Y) + panel * depth * z.k_vectors * lanes
                   + block * z.vectors * lanes * depth + vector % z.vectors * lanes)
        self.source = (f.frame.load_pointer(WEIGHT) + group * between
                       + vector * lanes * self.k + part * z.slice_c * self.c)
        self.count = (z.group_k - vector * lanes).minimum(lanes)  # channels that there are
        self.there = Bits(f, f.leading(self.count, lanes))
        self.places = [f.index(lane).minimum(self.count - 1) * self.k for lane in range(lanes)]

    def pack(self) -> None:
        """By whichever axis lies side by side in memory."""
        f = self.f
        with f.either(self.k.equals(1)) as (filters, others):
            with filters:
                self._each_tap(lambda at, to: self._each(at, to, self._load))
            with others, f.either(self.c.equals(1)) as (channels, none):
                with channels:
                    self._each_tap(self._turned)
                with none:
                    self._each_tap(lambda at, to: self._each(at, to, self._gather))

    def _each_tap(self, body: Callable[[Pointer, Pointer], None]) -> None:
        """body(the weights of a tap, where they go)."""
        f, z = self.f, self.z
        with f.loop(z.r) as down, f.loop(z.s) as across:
            body(self.source + (down.i * self.row + across.i * self.column),
                 self.to + (down.i * z.s + across.i) * z.slice_c * self.width)

    def _each(self, at: Pointer, to: Pointer, read: Callable[[Pointer], Vector],
              first: Index | int = 0) -> None:
        with self.f.loop(self.z.slice_c, start=first) as c:
            (to + c.i * self.width).store(read(at + c.i * self.c))

    def _load(self, at: Pointer) -> Vector:
        return at.load(count=self.count)

    def _gather(self, at: Pointer) -> Vector:
        return self._only(at.gather_at(self.places))

    def _only(self, value: Vector) -> Vector:
        """Lanes without a channel are zero."""
        chosen: Vector = self.there.select(value, self.f.vector(0.0))
        return chosen

    def _turned(self, at: Pointer, to: Pointer) -> None:
        """Squares of filters and channels, turned in registers."""
        lanes = self.f.isa.lanes
        whole = self.z.slice_c // lanes * lanes
        with self.f.loop(whole, step=lanes) as c:
            rows = [(at + place + c.i).load() for place in self.places]
            for i, value in enumerate(transpose(self.f, rows)):
                (to + (c.i + i) * self.width).store(self._only(value))
        self._each(at, to, self._gather, whole)


def request_of(isa: Isa) -> Request:
    return Request(make, ANY, Schedule(), isa, (), True)


_asked = Counter[Isa]()


def is_worth(isa: Isa) -> bool:
    """Whether the code is there, or was missed so often that it is to be made: weights that learn
    are packed in every step."""
    if _asked[isa] > OFTEN:
        return True
    _asked[isa] += 1
    if launch.is_loaded(request_of(isa)):
        _asked[isa] = OFTEN + 1
    return _asked[isa] > OFTEN


PACKERS = Remembered(lambda isa, *words: launch.launch_of(request_of(isa), words))


def prepare(g: Geometry, t: Target, weight: Any) -> Any:
    """A weight (K, C, R, S), or what has its address and strides, in pool memory."""
    import torch  # workers that only compile do without it

    from .. import memory

    p, s = g.p, g.s
    slices = p.groups * s.split
    between = (weight.group_stride() if isinstance(weight, Mirrored)
               else p.group_k * weight.stride(0))
    panels = memory.empty(slices, g.panel_floats)
    strides = torch.tensor((between, *weight.stride()))
    pack = PACKERS[t.row, slices, p.group_k, g.slice_c, p.r, p.s, s.split, s.vectors, g.k_vectors]
    pack(address(strides), address(weight), 0, 0, address(panels), 0, 1,
         t.threads if panels.nbytes > FEW else 1)
    return panels
