"""Gradients of weights by unrolling, with products on the matrix unit."""

from __future__ import annotations

from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ..conv import direct_weight
from ..conv.outer import KINDS
from ..emit import Function, Module, Vector
from ..emit.threads import SCRATCH, Y
from ..emit.transpose import interleave
from .outer import OuterOnTiles, TileGeometry


class Geometry(TileGeometry, direct_weight.Geometry):
    """Every size."""


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


def make(p: Problem, s: Schedule, isa: Isa, products: int) -> Module:
    """The module of a weight's gradient on the matrix unit."""
    return _OnTiles(Geometry(p, s, isa.lanes, products), isa).module()
