"""A glance at a tensor's memory, to notice changes that no version counter tells."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from llvmlite import ir

from ...core.isa import ISA, Isa
from ...core.target import Target
from . import jit
from .emit import I64, Index, Module
from .threads import BATCH, TASK, Frame, X

SAMPLES = 64
ROW = 24  # bytes of a row of the table
MIXER = 6364136223846793005  # Knuth's: every sample moves every later bit


def _module(isa: Isa) -> Module:
    """For each row (address, step, count) of a table: count pairs of floats, step floats apart."""
    module = Module(isa)
    with module.function("entry", exported=True, frame="pointer") as f:
        table, rows = f.frame.load_pointer(X), f.frame.load_index(BATCH)
        with f.loop(rows, carry=[f.index(0)]) as row:
            entry = table.bytes(row.i * ROW)
            memory, step = entry.load_pointer(0), entry.load_index(1)
            with f.loop(entry.load_index(2), carry=row.values) as sample:
                here = f.ll.gep((memory + sample.i * step).ir, [ir.Constant(I64, 0)],
                                source_etype=I64)
                word = Index(f, f.ll.load(here, align=4, typ=I64))
                sample.values = [sample.values[0] * MIXER + word]
            row.values = sample.values
        f.frame.store_index(TASK, row.values[0])
    return module


@lru_cache(maxsize=1)
def _entry() -> Any:
    code = jit.load(_module, "fingerprint", ISA[Target.host().isa], "entry")
    return code.function("entry", ctypes.c_void_p)


class Fingerprint:
    """Up to 64 pairs of floats, spread over each of some memories, in one number.

    A memory is an address and a number of floats.
    """

    def __init__(self, memories: Sequence[tuple[int, int]]) -> None:
        rows = [row for address, floats in memories for row in _row(address, floats)]
        self._table = (ctypes.c_int64 * len(rows))(*rows)  # kept: the call reads it
        self._call = (ctypes.addressof(self._table), 0, 0, 0, 0, 0, len(rows) // 3)
        self._entry = _entry()

    def read(self) -> int:
        """The number that the memories give now."""
        frame = Frame(*self._call)  # one a call: several threads may read at once
        self._entry(ctypes.addressof(frame))
        return int(frame[TASK])


def _row(address: int, floats: int) -> tuple[int, int, int]:
    """From the first pair of floats to the last."""
    samples = min(SAMPLES, floats // 2)
    return address, (floats - 2) // max(1, samples - 1) or 1, samples
