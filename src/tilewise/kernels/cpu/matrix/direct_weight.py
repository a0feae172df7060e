"""Gradients of weights by unrolling, with products on the matrix unit.

Where a filter sees one pixel and every pixel gives an output, nothing is unrolled: pixels are
packed from where they lie.
"""

from __future__ import annotations

from typing import Any

from ....core.cached import cached
from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ...matrix import DEPTH, PARTS, SIDE
from ..conv import direct_weight
from ..conv.outer import KINDS
from ..emit import Function, Index, Module, Pointer, Vector
from ..emit.amx import TILE
from ..emit.microkernel import LINE
from ..emit.parts import split_pairs
from ..emit.threads import SCRATCH, WEIGHT, X, Y
from ..emit.transpose import interleave
from .outer import OuterOnTiles, TileGeometry


class Geometry(TileGeometry, direct_weight.Geometry):
    """Every size; without V and M where pixels are packed from where they lie."""

    @cached
    def is_pixelwise(self) -> bool:
        p = self.p
        return (p.r, p.s, p.stride, p.groups) == (1, 1, (1, 1), 1) and not any(p.padding)

    @cached
    def v_position(self) -> int:
        return 0 if self.is_pixelwise else super().v_position

    @cached
    def m_position(self) -> int:
        return 0 if self.is_pixelwise else super().m_position

    @cached
    def own_floats(self) -> int:
        return 0 if self.is_pixelwise else super().own_floats


class _OnTiles(OuterOnTiles, direct_weight.Gradient):
    def finish(self) -> Function:
        """The same in vectors, where channels fill them: products no longer hide it."""
        g, p, taps = self.g, self.p, self.p.r * self.p.s
        if p.group_c % g.lanes:
            return super().finish()
        with self.m.function("finish", **KINDS) as f:
            group, k = f.task // p.group_k, f.task % p.group_k
            u = f.frame.load_pointer(SCRATCH) + group * g.u_position
            to = f.frame.load_pointer(Y) + f.task * (p.group_c * taps)

            def total(tap: int) -> Vector:
                here = u + g.u_at(c.i + tap * p.group_c, k)
                found = here.load()
                for part in range(1, self.s.parts):
                    found = found + here.load(part * g.part_floats)
                return found

            with f.loop(p.group_c, step=g.lanes) as c:
                for i, value in enumerate(interleave([total(tap) for tap in range(taps)])):
                    (to + c.i * taps).store(value, i * g.lanes)
        return f


class _OfPixels(_OnTiles):
    """Packs rows of channels, two pixels at a time, and nothing else is kept of them."""

    def module(self) -> Module:
        g, p = self.g, self.p
        self.rows = self._rows("rows_m", p.k, 1, g.k_padded // SIDE)
        self.columns = self._rows("rows_v", p.c, self.s.vectors, g.c_blocks)
        return super().module()

    def _rows(self, name: str, channels: int, vectors: int, blocks: int) -> Function:
        """Pixels [item][channel] as panels [block][step][part][vector] of pairs of items; what
        no pixel and no channel fills is zero."""
        g = self.g
        step = vectors * g.step_floats
        last = channels - (blocks - 1) * vectors * g.lanes  # channels of the last block
        with self.m.function(name, source="pointer", to="pointer", items="index") as f:

            def pair(index: Index, there: int) -> None:
                """One, of which so many are there."""
                source = f.source + index * (2 * channels)
                to = f.to + (index // (DEPTH // 2) * step + index % (DEPTH // 2) * LINE)

                def block(number: Index | int, count: int) -> None:
                    at, here = to + number * (g.steps * step), source + number * (
                        vectors * g.lanes)
                    for j in range(vectors):
                        lanes = min(g.lanes, count - j * g.lanes)
                        low, high = (
                            _some(f, here + (i * channels + j * g.lanes), lanes)
                            if i < there and lanes > 0 else f.vector(0.0) for i in range(2))
                        for part, bits in enumerate(split_pairs(f, low, high,
                                                                PARTS[g.products])):
                            at.store(bits, (part * vectors + j) * TILE)

                with f.loop(blocks - 1) as number:
                    block(number.i, vectors * g.lanes)
                block(blocks - 1, last)

            with f.loop(f.items // 2) as whole:
                pair(whole.i, 2)
            with f.when((f.items % 2).equals(1)):
                pair(f.items // 2, 1)
            steps = (f.items + (DEPTH - 1)) // DEPTH
            with f.loop(steps * (DEPTH // 2), start=(f.items + 1) // 2) as none:
                pair(none.i, 0)
        return f

    def read(self, f: Function, scratch: Pointer, first: Index, start: Index | int,
             stop: Index, band: int = 0) -> None:
        g, p, packed = self.g, self.p, self._packed(f)
        f.call(self.rows, f.frame.load_pointer(WEIGHT) + first * p.k, packed, stop)
        f.call(self.columns, f.frame.load_pointer(X) + first * p.c, packed + g.m_packed, stop)
        steps = (stop + (DEPTH - 1)) // DEPTH * PARTS[g.products]
        with f.loop(g.k_padded // SIDE) as k:
            f.call(self.turn, packed + k.i * (g.steps * g.step_floats), steps)

    def _multiply(self, f: Function, scratch: Pointer, u: Pointer, position: Index, count: Index,
                  first: Any) -> None:
        steps, packed = (count + (DEPTH - 1)) // DEPTH, self._packed(f)
        with f.either(first) as (fill, add):
            with fill:
                self._multiply_block(f, packed, u, steps, self.products[True])
            with add:
                self._multiply_block(f, packed, u, steps, self.products[False])


def _some(f: Function, at: Pointer, lanes: int) -> Vector:
    """The first lanes of a vector; the others are zero."""
    return at.load() if lanes == f.isa.lanes else at.load(count=lanes)


def make(p: Problem, s: Schedule, isa: Isa, products: int) -> Module:
    """The module of a weight's gradient on the matrix unit."""
    g = Geometry(p, s, isa.lanes, products)
    return (_OfPixels if g.is_pixelwise else _OnTiles)(g, isa).module()
