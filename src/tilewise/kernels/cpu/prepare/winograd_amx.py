"""Weights into the Winograd domain as the matrix unit reads them: pairs of channels, in parts.

Computed and split in float64, as `Geometry.pack_weight` does in another order of sums.
"""

from __future__ import annotations

from typing import Any

from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ....core.target import Target
from ...matrix import DEPTH
from ..emit import Index, Module, Vector
from ..emit.amx import TILE
from ..emit.microkernel import LINE
from ..emit.parts import split_pairs
from ..matrix.winograd import Geometry
from . import winograd
from .winograd import Doubles, Panels


def make(p: Problem, s: Schedule, isa: Isa, products: int) -> Module:
    """The module of a preparation; arguments are those of the vector kernel."""
    return winograd.module(Geometry(p, s, isa.lanes, products), isa, _vector)


def _vector(panels: Panels) -> None:
    """Two input channels at a time; the last of an odd number has none beside it."""
    f, g, vectors = panels.f, panels.g, panels.vectors
    assert isinstance(g, Geometry)
    zero = Doubles(f).zero()

    def keep(pair: Index, low: dict[int, Vector], high: dict[int, Vector]) -> None:
        step, line = pair // (DEPTH // 2), pair % (DEPTH // 2)
        to = panels.to + (step * vectors * g.step_floats + panels.within * TILE + line * LINE)
        for position, value in low.items():
            for part, bits in enumerate(split_pairs(f, value, high.get(position, zero), g.parts)):
                (to + panels.apart * position + vectors * (part * TILE)).store(bits)

    with f.loop(panels.c // 2) as pair:
        low: dict[int, Vector] = {}
        high: dict[int, Vector] = {}
        panels.transformed(pair.i * 2, low.__setitem__)
        panels.transformed(pair.i * 2 + 1, high.__setitem__)
        keep(pair.i, low, high)
    with f.when((panels.c % 2).equals(1)):
        low = {}
        panels.transformed(panels.c - 1, low.__setitem__)
        keep(panels.c // 2, low, {})
    with f.loop(panels.depth // 2, start=(panels.c + 1) // 2) as pair:
        keep(pair.i, dict.fromkeys(range(g.positions), zero), {})


def prepare(p: Problem, s: Schedule, t: Target, weight: Any,
            products: int) -> Any:
    """U of a weight (K, C, R, S), in pool memory."""
    return winograd.run(make, Geometry, p, t, s, weight, products)


def floats(p: Problem, s: Schedule, t: Target, products: int) -> int:
    return winograd.floats(make, Geometry, p, t, s, products)


def prepare_into(p: Problem, s: Schedule, t: Target, weight: Any, u: Any, products: int) -> None:
    winograd.run_into(make, Geometry, p, t, s, weight, u, products)
