"""A filter as it is defined: every packed vector meets all kernel rows that cover it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....core.filter import Filter
from ....core.isa import Isa
from ....core.schedule import Schedule
from ..emit import Function, Index, Module, Pointer
from ..emit.threads import WEIGHT
from .common import FilterModule, FilterSizes


class Geometry(FilterSizes):
    """Every size of a direct filter."""

    def pack_weight(self, kernel: Any) -> Any:
        """[chunk of kernel rows][column][row of the chunk]."""
        parts = [kernel[chunk].T.ravel() for chunk in self.chunks(self.p.r)]
        return np.concatenate(parts).astype(self.dtype)


def make(p: Filter, s: Schedule, isa: Isa) -> Module:
    """The module of a direct filter."""
    return _Direct(Geometry(p, s, isa.lanes), isa).module()


class _Direct(FilterModule):
    def prepare_functions(self) -> None:
        self.writers((self.p.r, self.p.s))

    def tiles(self, f: Function, packed: Pointer, y: Pointer, y_row: Index, rows: Index,
              width: Index, free: Pointer) -> None:
        weight, tall = f.frame.load_pointer(WEIGHT), self.s.rows
        whole = rows // tall * tall
        with f.loop(whole, step=tall) as row:
            f.call(self.fast, packed.bytes(row.i * self.g.pitch), weight,
                   y.bytes(row.i * y_row), y_row, width)
        with f.when(whole < rows):
            f.call(self.careful, packed.bytes(whole * self.g.pitch), weight,
                   y.bytes(whole * y_row), y_row, width, rows - whole)
