"""Weights of direct convolutions as a matrix unit reads them: channels side by side, in parts.

Fast enough to do it anew in every step of a training; the bits of `Geometry.pack_weight`. One
kernel packs weights of any size: sizes are words of its frame.
"""

from __future__ import annotations

from typing import Any

import torch

from ....core.isa import Isa
from ....core.places import address
from ....core.problem import Problem
from ....core.remembered import Remembered
from ....core.schedule import Schedule
from ....core.target import Target
from ...matrix import PARTS
from .. import memory
from ..emit import Bits, Function, Index, Module, Pointer, Vector
from ..emit.launch import Launch, launch_of
from ..emit.parts import split_pairs
from ..emit.requests import Request
from ..emit.sizes import InCode
from ..emit.threads import WEIGHT, X, Y, emit_entry, emit_region
from ..emit.transpose import transpose
from ..matrix.direct_geometry import Geometry
from .direct import ANY, FEW, STRIDES

# output channels; values of a pixel, or of a row of taps; input channels; steps of the unit; taps
# down, and across where they are not among the values; vectors of a block, and of all channels
SIZES = ("k", "values", "channels", "chunks", "lines", "columns", "vectors", "k_vectors")


def make(p: Problem, s: Schedule, isa: Isa, products: int) -> Module:
    """A task is a vector of output channels; where those lie side by side, a step of the unit.

    The frame's X is a table of the strides of K, C, R and S.
    """
    m = Module(isa)
    with m.function("body", frame="pointer", task="index", worker="index") as body:
        _pack(body, PARTS[products])

    def tasks(f: Function, frame: Pointer) -> Index:
        z = InCode(f, None, SIZES)
        count: Index = _by_rows(f).select(z.chunks, z.k_vectors)
        return count

    emit_entry(m, [emit_region(m, "prepare", tasks, body)])
    return m


def _by_rows(f: Function) -> Any:
    """Whether output channels lie side by side, and no tap is among the values."""
    z = InCode(f, None, SIZES)
    return f.frame.load_pointer(X).load_index(0).equals(1) & z.channels.equals(z.values)


def _pack(f: Function, parts: int) -> None:
    """By whichever axis lies side by side in memory."""
    z = InCode(f, None, SIZES)
    with f.either(_by_rows(f)) as (filters, others):
        with filters:
            _Rows(f, parts).pack()
        with others, f.either(z.channels.equals(z.values)) as (apart, among):
            with apart:
                _Vector(f, parts).pack()
            with among:
                _Joined(f, parts).gathered()


class _Task:
    """Where values come from, and where they go."""

    def __init__(self, f: Function, parts: int) -> None:
        self.f, self.z, self.parts = f, InCode(f, None, SIZES), parts
        assert f.isa.matrix is not None
        self.unit, self.lanes = f.isa.matrix, f.isa.lanes
        self.k, self.c, self.row, self.column = (
            f.frame.load_pointer(X).load_index(i) for i in range(4))
        self.source = f.frame.load_pointer(WEIGHT)
        self.taps = self.z.lines * self.z.columns

    def block(self, number: Index) -> tuple[Pointer, Index]:
        """Where a block of vectors begins, and how many it has."""
        first, z = number * self.z.vectors, self.z
        whole = z.chunks * self.taps * (self.parts * self.unit.tile)
        return (self.f.frame.load_pointer(Y) + first * whole,
                (z.k_vectors - first).minimum(z.vectors))

    def tap(self, number: Index) -> Index:
        """Floats from the first tap to this one."""
        return number // self.z.columns * self.row + number % self.z.columns * self.column

    def put(self, to: Pointer, width: Index, values: list[Vector]) -> None:
        """What lies side by side in each column of a tile, in parts that are `width` tiles apart.
        """
        pairs = [split_pairs(self.f, low, high, self.parts)
                 for low, high in zip(values[::2], values[1::2], strict=True)]
        for part, bits in enumerate(zip(*pairs, strict=True)):
            for i, floats in enumerate(_zipped(list(bits))):
                (to + width * (part * self.unit.tile)).store(floats, i * self.lanes)

    @property
    def row_floats(self) -> int:
        return self.unit.together // 2 * self.unit.columns


class _Rows(_Task):
    """Of a step of the unit, all output channels, which lie side by side: few pages are read from
    end to end, and not a line of each."""

    def pack(self) -> None:
        f, unit, beside = self.f, self.unit, self.unit.together
        with f.loop(self.taps) as tap:
            number = f.task * self.taps + tap.i
            with f.loop(unit.depth // beside) as row:
                first = f.task * unit.depth + row.i * beside
                self._row(self.source + first * self.c + self.tap(tap.i), self.z.values - first,
                          number, row.i * self.row_floats)

    def _row(self, at: Pointer, left: Index, number: Index, beyond: Index) -> None:
        """Some values of all output channels; those that are not left are zero."""
        f, z, lanes = self.f, self.z, self.lanes
        with f.loop((z.k_vectors + z.vectors - 1) // z.vectors) as block:
            to, width = self.block(block.i)
            to += number * self.parts * width * self.unit.tile + beyond
            with f.loop(width) as vector:
                k = (block.i * z.vectors + vector.i) * lanes
                count = (z.k - k).minimum(lanes)
                values = [(at + (self.c * i + k)).load(count=(f.index(i) < left).select(
                    count, f.index(0))) for i in range(self.unit.together)]
                self.put(to + vector.i * self.unit.tile, width, values)


class _Vector(_Task):
    """Of some output channels, as many as a vector has, all values."""

    def __init__(self, f: Function, parts: int) -> None:
        super().__init__(f, parts)
        z, lanes, vector = self.z, self.lanes, f.task
        self.to, self.width = self.block(vector // z.vectors)
        self.to += vector % z.vectors * self.unit.tile
        self.source += vector * lanes * self.k
        count = (z.k - vector * lanes).minimum(lanes)  # channels that there are
        self.there = Bits(f, f.leading(count, lanes))
        self.places = [f.index(lane).minimum(count - 1) * self.k for lane in range(lanes)]

    def pack(self) -> None:
        with self.f.either(self.c.equals(1)) as (channels, none):
            with channels:
                self._turned()
            with none:
                self.gathered()

    def _turned(self) -> None:
        """Squares of filters and channels, turned in registers."""
        f, lanes = self.f, self.lanes
        whole = self.z.values // lanes * lanes
        with f.loop(self.taps) as tap:
            at = self.source + self.tap(tap.i)
            with f.loop(whole, step=lanes) as value:
                rows = [(at + (place + value.i)).load() for place in self.places]
                turned = [self._only(column) for column in transpose(f, rows)]
                for i in range(0, lanes, self.unit.together):
                    self._put(value.i + i, tap.i, turned[i:i + self.unit.together])
        self.gathered(whole)

    def gathered(self, start: Index | int = 0) -> None:
        """One value of a channel after the other; what lies beyond them is zero."""
        f, beside = self.f, self.unit.together
        with f.loop(self.taps) as tap:
            at = self.source + self.tap(tap.i)
            with f.loop(self.z.chunks * self.unit.depth, start=start, step=beside) as value:
                self._put(value.i, tap.i, [self._gather(at, value.i + i) for i in range(beside)])

    def _gather(self, at: Pointer, value: Index) -> Vector:
        at += self._place(value.minimum(self.z.values - 1))
        found = self._only(at.gather_at(self.places))
        kept: Vector = (value < self.z.values).select(found, self.f.vector(0.0))
        return kept

    def _place(self, value: Index) -> Index:
        return value * self.c

    def _only(self, value: Vector) -> Vector:
        """Lanes without a channel are zero."""
        chosen: Vector = self.there.select(value, self.f.vector(0.0))
        return chosen

    def _put(self, value: Index, tap: Index, values: list[Vector]) -> None:
        """`value` is the first of those that lie side by side."""
        depth, z = self.unit.depth, self.z
        tile = (value // depth * (z.lines * z.columns) + tap) * self.parts * self.width
        row = value % depth // self.unit.together * self.row_floats
        self.put(self.to + (tile * self.unit.tile + row), self.width, values)


class _Joined(_Vector):
    """Of a row of taps, the values are those of one column after the other."""

    def _place(self, value: Index) -> Index:
        channels = self.z.channels
        return value % channels * self.c + value // channels * self.column


def _zipped(vectors: list[Vector]) -> list[Vector]:
    """A lane of each in turn; there are one or two."""
    if len(vectors) == 1:
        return vectors
    first, second = vectors
    lanes = [half * first.lanes + lane for lane in range(first.lanes) for half in (0, 1)]
    return [first.shuffle(second, lanes[start:start + first.lanes])
            for start in (0, first.lanes)]


def prepare(p: Problem, s: Schedule, t: Target, weight: Any, products: int) -> torch.Tensor:
    """Panels of a weight (K, C, R, S), or of what has its address and strides, in pool memory."""
    panels = memory.empty(floats(p, s, t, products))
    prepare_into(p, s, t, weight, panels, products)
    return panels


def floats(p: Problem, s: Schedule, t: Target, products: int) -> int:
    """Of all panels."""
    return RUNS[p, s, t.row, products][1]


def prepare_into(p: Problem, s: Schedule, t: Target, weight: Any, panels: torch.Tensor,
                 products: int) -> None:
    """`s` has no more than the panels depend on."""
    launch, floats = RUNS[p, s, t.row, products]
    strides = STRIDES[tuple(weight.stride())]
    launch(address(strides), address(weight), 0, 0, address(panels), 0, 1,
           t.threads if 4 * floats > FEW else 1)


def launch_for(g: Geometry, isa: Isa) -> Launch:
    """Code of any size, for the weights of this geometry."""
    words = (g.p.k, g.values, g.p.c, g.chunks, g.p.r, 1 if g.joins_taps else g.p.s, g.s.vectors,
             g.k_vectors)
    return launch_of(Request(make, ANY, Schedule(), isa, (g.products,), True), words)


def _run(p: Problem, s: Schedule, isa: Isa, products: int) -> tuple[Launch, int]:
    """The function, and how many floats it writes."""
    assert isa.matrix is not None
    g = Geometry(p, s, isa.lanes, products, isa.matrix)
    return launch_for(g, isa), g.weight_floats


RUNS = Remembered(_run)  # a weight that learns is prepared in every step
