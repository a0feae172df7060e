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
ROWS = 16  # input channels, at least, of a task that packs rows
FEW = 64 << 10  # bytes that a thread packs sooner than others could begin
ANY = Problem(1, 1, 1, 1, 1, 1, 1)
# of a panel: filters, input channels, taps down and across; panels of a group; vectors of a block
SIZES = ("slices", "group_k", "slice_c", "r", "s", "split", "vectors", "k_vectors")


def make(p: Problem, s: Schedule, isa: Isa) -> Module:
    """A task is a vector of output channels of one panel; where those lie side by side, it is
    as large a share of the input channels.

    The frame's X is a table of the strides of groups, K, C, R and S.
    """
    m = Module(isa)
    with m.function("body", frame="pointer", task="index", worker="index") as body:
        _pack(body)

    def tasks(f: Function, frame: Pointer) -> Index:
        z = InCode(f, None, SIZES)
        count: Index = z.slices * z.k_vectors
        return count

    emit_entry(m, [emit_region(m, "pack", tasks, body)])
    return m


def _pack(f: Function) -> None:
    """By whichever axis lies side by side in memory."""
    with f.either(f.frame.load_pointer(X).load_index(1).equals(1)) as (filters, others):
        with filters:
            _Rows(f).pack()
        with others:
            _Vector(f).pack()


class _Task:
    """The panel of a task, its number there, and where the panel's weights come from."""

    def __init__(self, f: Function) -> None:
        self.f, self.z = f, InCode(f, None, SIZES)
        z, self.lanes = self.z, f.isa.lanes
        between, self.k, self.c, self.row, self.column = (
            f.frame.load_pointer(X).load_index(i) for i in range(5))
        panel, self.number = f.task // z.k_vectors, f.task % z.k_vectors
        group, part = panel // z.split, panel % z.split
        self.depth = z.r * z.s * z.slice_c
        self.to = f.frame.load_pointer(Y) + panel * self.depth * z.k_vectors * self.lanes
        self.source = (f.frame.load_pointer(WEIGHT) + group * between
                       + part * z.slice_c * self.c)

    def block(self, number: Index) -> tuple[Pointer, Index]:
        """Where a block of vectors begins, and how many the panel still has from there."""
        first = number * self.z.vectors
        return self.to + first * self.lanes * self.depth, self.z.k_vectors - first

    def each_tap(self, body: Callable[[Pointer, Index], None]) -> None:
        """body(the weights of a tap, input channels of the taps before it)."""
        f, z = self.f, self.z
        with f.loop(z.r) as down, f.loop(z.s) as across:
            body(self.source + (down.i * self.row + across.i * self.column),
                 (down.i * z.s + across.i) * z.slice_c)


class _Rows(_Task):
    """Of some input channels, all output channels, which lie side by side: few pages are read
    from end to end, and not a line of each."""

    def pack(self) -> None:
        f, z = self.f, self.z
        some = ((z.slice_c + z.k_vectors - 1) // z.k_vectors).maximum(ROWS)
        first = self.number * some
        last = (first + some).minimum(z.slice_c)

        def tap(at: Pointer, before: Index) -> None:
            with f.loop((z.k_vectors + z.vectors - 1) // z.vectors) as block:
                to, left = self.block(block.i)
                width = left.minimum(z.vectors)  # the last block may have fewer vectors
                with f.loop(last, start=first) as c:
                    self._row(at + c.i * self.c, block.i * z.vectors,
                              to + (before + c.i) * width * self.lanes, width)

        self.each_tap(tap)

    def _row(self, at: Pointer, before: Index, to: Pointer, width: Index) -> None:
        """Of one input channel; a block of vectors."""
        lanes = self.lanes
        with self.f.loop(width) as vector:
            k = (before + vector.i) * lanes
            value = (at + k).load(count=(self.z.group_k - k).minimum(lanes))
            (to + vector.i * lanes).store(value)


class _Vector(_Task):
    """The weights of some output channels, as many as a vector has."""

    def __init__(self, f: Function) -> None:
        super().__init__(f)
        z, lanes, vector = self.z, self.lanes, self.number
        self.to, left = self.block(vector // z.vectors)
        self.to += vector % z.vectors * lanes
        self.width = left.minimum(z.vectors) * lanes
        self.source += vector * lanes * self.k
        self.count = (z.group_k - vector * lanes).minimum(lanes)  # channels that there are
        self.there = Bits(f, f.leading(self.count, lanes))
        self.places = [f.index(lane).minimum(self.count - 1) * self.k for lane in range(lanes)]

    def pack(self) -> None:
        with self.f.either(self.c.equals(1)) as (channels, none):
            with channels:
                self.each_tap(self._turned)
            with none:
                self.each_tap(self._gathered)

    def _gathered(self, at: Pointer, before: Index, first: Index | int = 0) -> None:
        with self.f.loop(self.z.slice_c, start=first) as c:
            (self.to + (before + c.i) * self.width).store(self._gather(at + c.i * self.c))

    def _gather(self, at: Pointer) -> Vector:
        return self._only(at.gather_at(self.places))

    def _only(self, value: Vector) -> Vector:
        """Lanes without a channel are zero."""
        chosen: Vector = self.there.select(value, self.f.vector(0.0))
        return chosen

    def _turned(self, at: Pointer, before: Index) -> None:
        """Squares of filters and channels, turned in registers."""
        lanes = self.lanes
        whole = self.z.slice_c // lanes * lanes
        with self.f.loop(whole, step=lanes) as c:
            rows = [(at + place + c.i).load() for place in self.places]
            for i, value in enumerate(transpose(self.f, rows)):
                (self.to + (before + c.i + i) * self.width).store(self._only(value))
        self._gathered(at, before, whole)


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


def is_known(isa: Isa) -> bool:
    """The same without counting: whoever asks may not pack."""
    return _asked[isa] > OFTEN


class Packer:
    """Packs weights of one geometry; what that needs is found once."""

    def __init__(self, g: Geometry, t: Target) -> None:
        self.panels = g.p.groups * g.s.split, g.panel_floats
        self.floats = self.panels[0] * self.panels[1]
        self._filters, self._threads = g.p.group_k, t.threads if 4 * self.floats > FEW else 1
        words = (self.panels[0], g.p.group_k, g.slice_c, g.p.r, g.p.s, g.s.split, g.s.vectors,
                 g.k_vectors)
        self._launch = launch.launch_of(request_of(t.row), words)

    def __call__(self, weight: Any) -> Any:
        """A weight (K, C, R, S), or what has its address and strides, in pool memory."""
        from .. import memory

        panels = memory.empty(*self.panels)
        self.into(weight, panels)
        return panels

    def into(self, weight: Any, panels: Any) -> None:
        steps = weight.stride()
        between = (weight.group_stride() if isinstance(weight, Mirrored)
                   else self._filters * steps[0])
        ways = (between, *steps)
        strides = STRIDES[ways]
        self._launch(address(strides), address(weight), 0, 0, address(panels), 0, 1,
                     self._threads)


def _strides(*steps: int) -> Any:
    import torch  # workers that only compile do without it

    return torch.tensor(steps)


STRIDES = Remembered(_strides, most=1024)
