"""Weights of direct convolutions as a matrix unit reads them: channels side by side, in parts.

Fast enough to do it anew in every step of a training; the bits of `Geometry.pack_weight`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....core.isa import Isa
from ....core.places import address
from ....core.problem import Problem
from ....core.remembered import Remembered
from ....core.schedule import Schedule
from ....core.target import Target
from .. import memory
from ..emit import Function, Index, Module, Pointer, Vector
from ..emit.launch import Launch, launcher
from ..emit.parts import split_pairs
from ..emit.threads import WEIGHT, X, Y, emit_entry, emit_region
from ..matrix.direct_geometry import Geometry

KINDS: Any = {"frame": "pointer", "task": "index", "worker": "index"}


def make(p: Problem, s: Schedule, isa: Isa, products: int) -> Module:
    """From a weight of any strides to panels; a task is a vector of output channels.

    The frame's X is a table of the strides of K, C, R and S.
    """
    assert isa.matrix is not None
    g, m = Geometry(p, s, isa.lanes, products, isa.matrix), Module(isa)
    whole = (g.k_blocks - g.has_tail) * g.s.vectors  # vectors in blocks of full width
    rest = p.k % g.lanes
    full = g.k_vectors - (rest > 0)
    with m.function("body", **KINDS) as f:
        with f.when(f.task < whole):
            _Vector(f, g, False, g.lanes).emit()
        if full > whole:
            with f.when((f.task >= whole) & (f.task < full)):
                _Vector(f, g, True, g.lanes).emit()
        if rest:
            with f.when(f.task >= full):
                _Vector(f, g, True, rest).emit()
    emit_entry(m, [emit_region(m, "prepare", lambda f, frame: g.k_vectors, f)])
    return m


class _Vector:
    """All values of `count` output channels, in the last block of them or in another."""

    def __init__(self, f: Function, g: Geometry, end: bool, count: int) -> None:
        self.f, self.g, self.count, self.unit = f, g, count, g.unit
        self.part = g.vectors(end) * g.unit.tile  # floats from a part to the next
        self.k, self.c, self.r, self.s = (
            f.frame.load_pointer(X).load_index(i) for i in range(4))
        self.source = f.frame.load_pointer(WEIGHT) + f.task * g.lanes * self.k
        block, within = f.task // g.s.vectors, f.task % g.s.vectors
        self.to = (f.frame.load_pointer(Y)
                   + (block * g.panel_floats(g.block_k) + within * g.unit.tile))

    def emit(self) -> None:
        """Chunk by chunk, tap by tap; what no value fills is zero."""
        f, g = self.f, self.g
        whole, rest = g.values // g.unit.depth, g.values % g.unit.depth
        with f.loop(whole) as chunk:
            self._chunk(chunk.i, g.unit.depth)
        if rest:
            self._chunk(f.index(whole), rest)

    def _chunk(self, chunk: Index, values: int) -> None:
        f, g, unit = self.f, self.g, self.unit
        taps, beside = len(g.taps), self.unit.together
        row = beside // 2 * unit.columns  # floats
        with f.loop(taps) as tap:
            to = self.to + (chunk * taps + tap.i) * (g.parts * self.part)
            with f.loop(values // beside) as some:
                first = chunk * unit.depth + some.i * beside
                self._row(to + some.i * row,
                          [self._gather(first + i, tap.i) for i in range(beside)])
            if rest := values % beside:
                last = [self._gather(chunk * unit.depth + (values - rest + i), tap.i)
                        for i in range(rest)]
                self._row(to + values // beside * row,
                          last + [f.vector(0.0) for _ in range(beside - rest)])
            with f.loop(unit.depth // beside, start=-(-values // beside)) as some:
                self._row(to + some.i * row, [f.vector(0.0) for _ in range(beside)])

    def _row(self, to: Pointer, values: list[Vector]) -> None:
        """Some values of all columns of a tile, those of a column side by side."""
        pairs = [split_pairs(self.f, low, high, self.g.parts)
                 for low, high in zip(values[::2], values[1::2], strict=True)]
        for part, bits in enumerate(zip(*pairs, strict=True)):
            for i, floats in enumerate(_zipped(bits)):
                to.store(floats, part * self.part + i * self.g.lanes)

    def _gather(self, value: Index, tap: Index) -> Vector:
        """One value of all these channels at a tap; lanes without a channel are zero."""
        p = self.g.p
        if self.g.joins_taps:  # a tap is a row, its values those of one column after the other
            at = value % p.c * self.c + tap * self.r + value // p.c * self.s
        else:
            at = value * self.c + tap // p.s * self.r + tap % p.s * self.s
        return (self.source + at).gather(self.k, self.count)


def _zipped(vectors: Sequence[Vector]) -> list[Vector]:
    """A lane of each in turn; there are one or two."""
    if len(vectors) == 1:
        return list(vectors)
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
    launch, _ = RUNS[p, s, t.row, products]
    strides = torch.tensor(weight.stride())
    launch(address(strides), address(weight), 0, 0, address(panels), 0, 1, t.threads)


def _run(p: Problem, s: Schedule, isa: Isa, products: int) -> tuple[Launch, int]:
    """The function, and how many floats it writes."""
    assert isa.matrix is not None
    g = Geometry(p, s, isa.lanes, products, isa.matrix)
    return launcher(make, p, s, isa, products), g.weight_floats


RUNS = Remembered(_run)  # a weight that learns is prepared in every step
