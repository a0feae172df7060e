"""Winograd convolution whose products run on the matrix unit, on bfloat16 parts.

The input transform splits what it stores. V lies as [position][16 tiles][32 channels][part] of
tiles of the unit, the weights as [32 channels][part][16 output channels]; M and all else are
those of the vector kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....core.cached import cached
from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ...matrix import DEPTH, PARTS, SIDE
from ..conv import winograd, winograd_geometry
from ..conv.winograd_geometry import APART
from ..emit import Function, Index, Module, Pointer, Vector
from ..emit.amx import TILE, multiply_column
from ..emit.elements import FLOAT32
from ..emit.microkernel import LINE, Walk
from ..emit.parts import pack_columns, split
from ..emit.tiling import ceil_div
from ..emit.unit import Side
from .passes import Passes

SIZES = winograd_geometry.SIZES
PANEL = 64 << 10  # bytes of weights that a pass over the tiles uses again and again


@dataclass(frozen=True)
class Geometry(winograd_geometry.Geometry):
    """Every size; the depth is a multiple of 32 channels."""

    products: int

    @cached
    def parts(self) -> int:
        return PARTS[self.products]

    @cached
    def steps(self) -> int:
        """Operations along the depth."""
        return ceil_div(self.p.c, DEPTH)

    @cached
    def c_vectors(self) -> int:
        return self.steps * DEPTH // self.lanes

    @cached
    def step_floats(self) -> int:
        """Floats of one step of 16 tiles or 16 output channels."""
        return self.parts * TILE

    @cached
    def v_rows(self) -> int:
        """Floats of V of 16 tiles at one position."""
        return self.steps * self.step_floats

    @cached
    def v_position(self) -> int:
        return self.block // SIDE * self.v_rows + APART

    def panel_of(self, width: Any, depth: Any) -> Any:
        return (width // SIDE) * (depth // DEPTH) * self.step_floats

    @cached
    def weight_floats(self) -> int:
        return self.positions * self.panel_floats(self.k_vectors * self.lanes)

    def pack_panels(self, panels: Any) -> Any:
        return pack_columns(panels, self.parts)

    @cached
    def passes(self) -> Passes:
        """Over the tiles."""
        step = FLOAT32.bytes * self.step_floats * self.s.vectors
        return Passes(self.steps, max(1, PANEL // step))

    @cached
    def lines_ahead(self) -> int:
        """Cache lines of the next panel that one group of rows fetches per step."""
        return ceil_div(self.panel, LINE * self.s.groups * self.steps)


def make(p: Problem, s: Schedule, isa: Isa, products: int) -> Module:
    """The module of a Winograd convolution on the matrix unit."""
    return _OnTiles(Geometry(p, s, isa.lanes, products), isa).module()


class _OnTiles(winograd.Winograd):
    tiles = True
    g: Geometry

    def _v_of_channels(self, f: Function, c: Index) -> Pointer:
        return f.v + ((c // DEPTH) * self.g.step_floats + (c % DEPTH) // 2)

    def _store_v(self, to: Pointer, at: int, value: Vector) -> None:
        for part, bits in enumerate(split(to.f, value, self.g.parts)):
            to.store(bits, at + part * TILE)

    def _fill_up(self, f: Function) -> None:
        g = self.g
        for c in range(ceil_div(self.p.c, g.lanes) * g.lanes, g.depth, g.lanes):
            to = self._v_of_channels(f, f.index(c))
            for position in range(g.positions):
                self._store_v(to, position * g.v_position, f.vector(0.0))

    def _v_of_tile(self, tile: Index) -> Index:
        return (tile // SIDE) * self.g.v_rows + (tile % SIDE) * LINE

    def _product(self, end: bool) -> Any:
        """For each kind of pass: groups of tiles times so many steps of a panel."""
        return {kind: self._one_pass(end, *kind) for kind in self.g.passes.kinds}

    def _one_pass(self, end: bool, first: bool, length: int) -> Function:
        g, columns = self.g, self.g.vectors(end)
        rows = range(self.s.rows // SIDE)
        left = Side(tuple(i * g.v_rows for i in rows), TILE)
        right = Side(tuple(j * TILE for j in range(columns)), columns * TILE)
        out = Side(tuple(i * SIDE * columns * SIDE for i in rows), SIDE,
                   FLOAT32.bytes * columns * SIDE)
        walk = Walk(((length, g.step_floats, columns * g.step_floats),))
        name = f"product_{'first' if first else 'next'}{length}{'_end' if end else ''}"
        kinds: Any = {"v": "pointer", "u": "pointer", "m": "pointer", "ahead": "pointer",
                      "groups": "index"}
        with self.m.function(name, **kinds) as f:
            multiply_column(f, f.v, f.u, f.m, left, right, out, walk, self.g.products, first,
                            (f.ahead, g.lines_ahead), f.groups, len(rows) * g.v_rows,
                            self.s.rows * columns * g.lanes)
        return f

    def _multiply(self, f: Function, scratch: Pointer, u: Pointer, m: Pointer, position: Index,
                  groups: Index, end: bool) -> None:
        g, columns = self.g, self.g.vectors(end)
        v, step = scratch + position * g.v_position, columns * g.step_floats
        fetched = g.lines_ahead * LINE  # of the next panel, by one group in one step
        products: Any = self.products[end]
        for one in g.passes.each(f):
            here, ahead = v + one.start * g.step_floats, u + g.panel
            ahead = ahead + one.start * (self.s.groups * fetched)
            f.call(products[one.kind], here, u + one.start * step, m, ahead, groups)
