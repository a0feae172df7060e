"""Gradients of weights in the Winograd domain, with products on the matrix unit."""

from __future__ import annotations

from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ..conv import winograd_weight
from ..emit import Module
from .outer import OuterOnTiles, TileGeometry


class Geometry(TileGeometry, winograd_weight.Geometry):
    """Every size."""


class _OnTiles(OuterOnTiles, winograd_weight.Gradient):
    pass


def make(p: Problem, s: Schedule, isa: Isa, products: int) -> Module:
    """The module of a weight's gradient on the matrix unit."""
    return _OnTiles(Geometry(p, s, isa.lanes, products), isa).module()
