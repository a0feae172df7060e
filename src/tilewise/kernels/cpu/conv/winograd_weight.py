"""Gradients of weights in the Winograd domain: U = sum over tiles of M^T V, then G^T U G.

V are tiles of the input, M tiles of the gradient, both transformed; input channels lie in the
lanes.
"""

from __future__ import annotations

from ....core.cached import cached
from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ...winograd_math import Matrix, Transform, matrices
from ..emit import Function, Index, Module, Pointer, Vector
from ..emit.threads import SCRATCH, WEIGHT, X, Y
from ..emit.tiling import ceil_div, emit_zero
from ..emit.transpose import interleave
from .outer import KINDS, OuterGeometry, OuterSums
from .transforms import transform
from .windows import WindowReader, Windows


class Geometry(OuterGeometry):
    """Every size of the gradient of a weight; the items are tiles."""

    @cached
    def down(self) -> Transform:
        return matrices(self.s.tile_h, self.p.r)

    @cached
    def across(self) -> Transform:
        return matrices(self.s.tile_w, self.p.s)

    @cached
    def positions(self) -> int:
        return self.down.n * self.across.n

    @cached
    def bands(self) -> int:
        """Rows of positions, where each is read on its own."""
        return self.down.n if self.s.order == "bands" else 1

    @cached
    def tile_cols(self) -> int:
        return ceil_div(self.p.conv_w, self.s.tile_w)

    @cached
    def items(self) -> int:
        return ceil_div(self.p.conv_h, self.s.tile_h) * self.tile_cols

    @cached
    def columns(self) -> int:
        return self.p.c

    @cached
    def rows(self) -> int:
        return self.p.k

    @cached
    def own_floats(self) -> int:
        """A pixel of zeros for what lies outside."""
        return max(self.c_padded, self.k_padded)


def make(p: Problem, s: Schedule, isa: Isa) -> Module:
    """The module of a weight's gradient."""
    return Gradient(Geometry(p, s, isa.lanes), isa).module()


def _transposed(matrix: Matrix) -> Matrix:
    return tuple(zip(*matrix, strict=True))


class Gradient(OuterSums):
    def __init__(self, geometry: Geometry, isa: Isa) -> None:
        super().__init__(geometry, isa)
        rows = self.g.down.n // self.g.bands
        self.readers = [self._readers(str(band) if self.g.bands > 1 else "",
                                      slice(band * rows, (band + 1) * rows))
                        for band in range(self.g.bands)]

    def _readers(self, name: str, rows: slice) -> tuple[WindowReader, WindowReader]:
        """Of V and of M: so many rows of their transforms."""
        g, p, s = self.g, self.p, self.s
        step, start = (s.tile_h, s.tile_w), (p.padding[0], p.padding[2])
        inputs = WindowReader(
            self.m, f"input{name}",
            Windows(p.h, p.w, p.c, g.down.n, g.across.n, step, start, g.image),
            (g.down.BT[rows], g.across.BT), lambda c: g.v_at(c.f.index(0), c), g.v_position)
        gradients = WindowReader(
            self.m, f"gradient{name}",
            Windows(p.conv_h, p.conv_w, p.k, *step, step, (0, 0), g.image),
            (_transposed(g.down.AT)[rows], _transposed(g.across.AT)),
            lambda k: g.m_at(k.f.index(0), k), g.m_position)
        return inputs, gradients

    def read(self, f: Function, scratch: Pointer, first: Index, start: Index | int,
             stop: Index, band: int = 0) -> None:
        g, (inputs, gradients) = self.g, self.readers[band]
        zeros, table = scratch + g.own_start, f.words(g.positions)
        emit_zero(f, zeros, f.index(g.own_floats))
        x, grad = (f.frame.load_pointer(place, g.image) for place in (X, WEIGHT))
        with f.loop(stop, start=start) as t:
            image, rest = (first + t.i) // g.items, (first + t.i) % g.items
            place = image, rest // g.tile_cols, rest % g.tile_cols
            inputs.read(f, x, place, scratch + g.v_at(t.i, 0), zeros, table)
            gradients.read(f, grad, place, scratch + (g.m_at(t.i, 0) + g.m_start), zeros, table)

    def finish(self) -> Function:
        """dW of one output channel: the sums of all parts, transformed back."""
        g, p = self.g, self.p
        with self.m.function("finish", **KINDS) as f:
            to, whole = self._result(f, f.task), p.c // g.lanes * g.lanes
            u = f.frame.load_pointer(SCRATCH)
            with f.loop(whole, step=g.lanes) as c:
                self._finish_vector(f, u + g.u_at(c.i, f.task), g.u_position, to, c.i, g.lanes)
            if p.c > whole:
                last = f.index(whole)
                self._finish_vector(f, u + g.u_at(last, f.task), g.u_position, to, last,
                                    p.c - whole)
        return f

    def finish_square(self, f: Function, u: Pointer, k: Index, c: Index) -> None:
        g, p = self.g, self.p
        whole = p.c // g.lanes * g.lanes
        with f.loop((p.k - k).minimum(g.square_k)) as row:
            to = self._result(f, k + row.i)

            def one(at: Index, count: int) -> None:
                here = u + (at // g.width * (g.square_k * g.width) + at % g.width
                            + row.i * g.width)
                self._finish_vector(f, here, g.square_position, to, c + at, count)

            with f.loop((whole - c).minimum(g.square_c), step=g.lanes) as at:
                one(at.i, g.lanes)
            if p.c > whole:
                rest = whole - c
                with f.when((rest >= 0) & (rest < g.square_c)):
                    one(rest, p.c - whole)

    def _result(self, f: Function, k: Index) -> Pointer:
        """dW of one output channel."""
        to: Pointer = f.frame.load_pointer(Y, self.g.image) + k * (self.p.c * self.p.r * self.p.s)
        return to

    def _finish_vector(self, f: Function, at: Pointer, apart: int, to: Pointer, c: Index,
                       count: int) -> None:
        """Some input channels, whose sums at the positions lie so far apart."""
        g, p, taps = self.g, self.p, self.p.r * self.p.s
        found: dict[int, Vector] = {}

        def load(i: int, j: int) -> Vector:
            here = at + (i * g.across.n + j) * apart
            total = here.load()
            for part in range(1, self.s.parts):
                total = total + here.load(part * g.part_floats)
            return total

        def keep(i: int, j: int, value: Vector) -> None:
            found[i * p.s + j] = value

        transform(f, _transposed(g.down.G), _transposed(g.across.G), load, keep)
        for i, value in enumerate(interleave([found[tap] for tap in range(taps)])):
            left = count * taps - i * g.lanes
            if left > 0:
                (to + c * taps).store(value, i * g.lanes, count=min(left, g.lanes))
