"""Weights of direct convolutions as the matrix unit reads them: pairs of channels, in parts.

Fast enough to do it anew in every step of a training; the bits of `Geometry.pack_weight`.
"""

from __future__ import annotations

from typing import Any

import torch

from ....core.isa import Isa
from ....core.places import address
from ....core.problem import Problem
from ....core.schedule import Schedule
from ....core.target import Target
from ...matrix import DEPTH
from .. import memory
from ..emit import Function, Index, Module, Pointer, Vector
from ..emit.amx import TILE
from ..emit.launch import launcher
from ..emit.microkernel import LINE
from ..emit.parts import split_pairs
from ..emit.threads import WEIGHT, X, Y, emit_entry, emit_region
from ..matrix.direct_geometry import Geometry

KINDS: Any = {"frame": "pointer", "task": "index", "worker": "index"}


def make(p: Problem, s: Schedule, isa: Isa, products: int) -> Module:
    """From a weight of any strides to panels; a task is a vector of output channels.

    The frame's X is a table of the strides of K, C, R and S.
    """
    g, m = Geometry(p, s, isa.lanes, products), Module(isa)
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
        self.f, self.g, self.count, self.width = f, g, count, g.vectors(end)
        self.k, self.c, self.r, self.s = (
            f.frame.load_pointer(X).load_index(i) for i in range(4))
        self.source = f.frame.load_pointer(WEIGHT) + f.task * g.lanes * self.k
        block, within = f.task // g.s.vectors, f.task % g.s.vectors
        self.to = (f.frame.load_pointer(Y)
                   + (block * g.panel_floats(g.block_k) + within * TILE))

    def emit(self) -> None:
        """Chunk by chunk, tap by tap; what no value fills is zero."""
        f, g = self.f, self.g
        whole, rest = g.values // DEPTH, g.values % DEPTH
        with f.loop(whole) as chunk:
            self._chunk(chunk.i, DEPTH)
        if rest:
            self._chunk(f.index(whole), rest)

    def _chunk(self, chunk: Index, values: int) -> None:
        f, g = self.f, self.g
        taps = len(g.taps)
        with f.loop(taps) as tap:
            to = self.to + (chunk * taps + tap.i) * (g.parts * self.width * TILE)
            with f.loop(values // 2) as pair:
                first = chunk * DEPTH + pair.i * 2
                self._pair(to + pair.i * LINE, self._gather(first, tap.i),
                           self._gather(first + 1, tap.i))
            if values % 2:
                last = self._gather(chunk * DEPTH + (values - 1), tap.i)
                self._pair(to + values // 2 * LINE, last, f.vector(0.0))
            with f.loop(DEPTH // 2, start=(values + 1) // 2) as pair:
                self._pair(to + pair.i * LINE, f.vector(0.0), f.vector(0.0))

    def _pair(self, to: Pointer, low: Vector, high: Vector) -> None:
        for part, bits in enumerate(split_pairs(self.f, low, high, self.g.parts)):
            to.store(bits, part * self.width * TILE)

    def _gather(self, value: Index, tap: Index) -> Vector:
        """One value of all these channels at a tap; lanes without a channel are zero."""
        p = self.g.p
        if self.g.joins_taps:  # a tap is a row, its values those of one column after the other
            at = value % p.c * self.c + tap * self.r + value // p.c * self.s
        else:
            at = value * self.c + tap // p.s * self.r + tap % p.s * self.s
        return (self.source + at).gather(self.k, self.count)


def prepare(p: Problem, s: Schedule, t: Target, weight: torch.Tensor,
            products: int) -> torch.Tensor:
    """Panels of a weight (K, C, R, S), in pool memory; `s` has no more than they depend on."""
    panels = memory.empty(Geometry(p, s, t.lanes, products).weight_floats)
    strides = torch.tensor(weight.stride())
    launch = launcher(make, p, s, t.row, products)
    launch(address(strides), address(weight), 0, 0, address(panels), 0, 1, t.threads)
    return panels
