"""Words anywhere in memory, read and compared in one native call."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from ....core.isa import ISA, Isa
from ....core.target import Target
from . import jit
from .function import Module
from .pointers import Pointer
from .threads import BATCH, TASK, Frame, X
from .values import Index

ROW = 16  # bytes of a row: an address, and what was there


def _there(table: Pointer, i: Index) -> Index:
    """What is at the address of a row."""
    return table.bytes(i * ROW).load_pointer(0).load_index(0)


def _module(isa: Isa) -> Module:
    """X is the table, BATCH its rows."""
    module = Module(isa)
    kinds: Any = {"exported": True, "frame": "pointer"}
    with module.function("take", **kinds) as f:
        table = f.frame.load_pointer(X)
        with f.loop(f.frame.load_index(BATCH)) as row:
            table.bytes(row.i * ROW).store_index(1, _there(table, row.i))
    with module.function("compare", **kinds) as f:
        table = f.frame.load_pointer(X)
        # a branch for each: no address is read before those in front of it are known to be right
        with f.repeat(lambda i: _there(table, i).equals(table.bytes(i * ROW).load_index(1)),
                      [f.index(0)]) as row:
            row.values = [row.values[0] + 1]
        f.frame.store_index(TASK, row.values[0])
    return module


@lru_cache(maxsize=1)
def _code() -> tuple[Any, Any]:
    code = jit.load(_module, "words", ISA[Target.host().isa], "take", "compare")
    kinds: Any = {"kind": ctypes.PYFUNCTYPE}  # no other thread's Python runs meanwhile
    return (code.function("take", ctypes.c_void_p, **kinds),
            code.function("compare", ctypes.c_void_p, **kinds))


def take(table: int, rows: int) -> None:
    """Note what is at the addresses of a table."""
    frame = Frame(table, 0, 0, 0, 0, 0, rows)
    _code()[0](ctypes.addressof(frame))


def first_other(table: int) -> int:
    """The first row whose address holds something else; there must be one."""
    frame = Frame(table)
    _code()[1](ctypes.addressof(frame))
    return int(frame[TASK])
