"""A filter as it is defined: every packed vector meets all kernel rows that cover it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....core.filter import Filter
from ....core.isa import Isa
from ....core.schedule import Schedule
from ..emit import Function, Module, Pointer, Vector
from .common import FilterModule, FilterSizes


class Geometry(FilterSizes):
    """Every size of a direct filter."""

    def pack_weight(self, kernel: Any) -> Any:
        """[chunk of kernel rows][column][row of the chunk]."""
        kernel = np.asarray(kernel)
        parts = [kernel[chunk].T.ravel() for chunk in self.chunks(self.p.r)]
        return np.concatenate(parts).astype(self.dtype)


def make(p: Filter, s: Schedule, isa: Isa) -> Module:
    """The module of a direct filter."""
    return _Direct(Geometry(p, s, isa.lanes), isa).module()


class _Direct(FilterModule):
    def prepare_functions(self) -> None:
        self.writers()

    def outputs(self, f: Function, x: Pointer, weight: Pointer, rows: int,
                vectors: int) -> list[Vector]:
        return self.sums(f, x, weight, rows, vectors, (self.p.r, self.p.s))
