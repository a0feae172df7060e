"""Glances at a tensor's memory, to notice changes that no version counter tells.

A memory is looked at in places of 16 floats. A glance sees the end of every even filter and the
beginning of the odd one behind it, a place for two: what takes time is to find a place. And it
sees some places that move from glance to glance until they have been everywhere. What each turn
saw at the beginning is kept, as a vector of sums. Small memories are read as a whole.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

from ....core.isa import ISA, Isa
from ....core.locks import fork_safe_lock
from ....core.target import Target
from ..emit import Function, Index, Module, Pointer, Words, jit
from ..emit.elements import FLOAT32
from ..emit.threads import BATCH, CHUNK, TASK, Frame, X
from ..emit.tiling import ceil_div

LINE = 16  # floats
SMALL = 512 * LINE  # floats that are read as a whole
EDGES = 256  # places between filters, in one glance: each waits 30 ns for its address
MOVING = 32  # places that move
MIXER = 0x9E3779B1  # odd: a change of a single place always changes the sum
# words of a row of the table: a Row, and where its sums are kept
MEMORY, STEP, PLACES, REST, TURNS, MOVE, FARTHEST, KEPT = range(8)
ROW = 8 * 8  # bytes
_lock = fork_safe_lock()
_CHANGED = attrgetter("_changed")


class Row(NamedTuple):
    """How a memory is looked at: `places`, `step` floats apart, and `rest` floats behind them."""

    address: int
    step: int
    places: int
    rest: int
    turns: int  # until they are where they began
    move: int  # floats from one turn to the next
    farthest: int  # floats that they may move in all


def _is_small(floats: int, filters: int) -> bool:
    return floats <= SMALL or floats < LINE * filters


def resting(address: int, floats: int, filters: int) -> Row:
    """The places of every glance in a memory of filters that all have the same size.

    All that there are, or half in one filter and half in the next; with an odd number of filters,
    one in each.
    """
    if _is_small(floats, filters):
        return Row(address, LINE, floats // LINE, floats % LINE, 1, 0, 0)
    size = floats // filters
    if filters % 2 == 0:
        address += FLOAT32.bytes * (size - LINE // 2)
        size, filters = 2 * size, filters // 2
    together = ceil_div(filters, EDGES)
    places = filters // together
    turns = filters - (places - 1) * together  # the last place has what is left over as well
    return Row(address, together * size, places, 0, turns, size, (turns - 1) * size)


def moving(address: int, floats: int, filters: int) -> Row | None:
    """Those that go everywhere, where not all is seen anyway."""
    if _is_small(floats, filters):
        return None
    step = floats // MOVING
    farthest = floats - LINE - (MOVING - 1) * step
    return Row(address, step, MOVING, 0, ceil_div(farthest, LINE) + 1, LINE, farthest)


def _mixed(sums: Words, value: Words) -> Words:
    """Sixteen sums with another line."""
    return sums.times(sums.same(MIXER)).plus(value)


def _line(at: Pointer) -> Words:
    return at.load(lanes=LINE).words()


def _moved(row: Pointer, turn: Index) -> Index:
    """How far the places have moved in a turn."""
    return (turn * row.load_index(MOVE)).minimum(row.load_index(FARTHEST))


def _with_rest(f: Function, row: Pointer, sums: Words) -> Words:
    """Floats behind the last place, one by one."""
    behind = row.load_pointer(MEMORY) + row.load_index(PLACES) * LINE
    with f.loop(row.load_index(REST), carry=[sums]) as one:
        one.values = [_mixed(one.values[0], behind.broadcast(one.i, LINE).words())]
    result: Words = one.values[0]
    return result


@contextmanager
def _each_row(f: Function) -> Iterator[tuple[Pointer, Pointer]]:
    """Every row of the table, and where its sums are kept."""
    table = f.frame.load_pointer(X)
    with f.loop(f.frame.load_index(BATCH)) as row:
        here = table.bytes(row.i * ROW)
        yield here, here.load_pointer(KEPT)


def _emit_keep(f: Function) -> None:
    """The sums of all turns, in the order of the memory."""
    with _each_row(f) as (row, kept):
        start, step = row.load_pointer(MEMORY), row.load_index(STEP)
        with f.loop(row.load_index(PLACES)) as place, f.loop(row.load_index(TURNS)) as turn:
            sums, there = kept + turn.i * LINE, start + place.i * step + _moved(row, turn.i)
            sums.store(_mixed(_line(sums), _line(there)).floats())
        kept.store(_with_rest(f, row, _line(kept)).floats())


def _emit_glance(f: Function) -> None:
    """Whether a turn's sums are others than they were."""
    f.frame.store_index(TASK, 0)
    with _each_row(f) as (row, kept):
        turns = row.load_index(TURNS)
        turn = f.frame.load_index(CHUNK) % turns
        start, step = row.load_pointer(MEMORY) + _moved(row, turn), row.load_index(STEP)
        zero = f.vector(0.0, LINE).words()
        with f.loop(row.load_index(PLACES), carry=[zero]) as place:
            place.values = [_mixed(place.values[0], _line(start + place.i * step))]
        found, then = _with_rest(f, row, place.values[0]), _line(kept + turn * LINE)
        f.frame.store_index(TASK, f.frame.load_index(TASK) | found.differs(then).packed())


def _module(isa: Isa) -> Module:
    module = Module(isa)
    for name, emit in (("keep", _emit_keep), ("glance", _emit_glance)):
        with module.function(name, exported=True, frame="pointer") as f:
            emit(f)
    return module


@lru_cache(maxsize=1)
def _code() -> tuple[Any, Any]:
    code = jit.load(_module, "fingerprint", ISA[Target.host().isa], "keep", "glance")
    return code.function("keep", ctypes.c_void_p), code.function("glance", ctypes.c_void_p)


class Fingerprint:
    """What some memories held when it was made.

    A memory is an address, a number of floats and a number of filters. What the moving places
    hold, which is everything, is read at once only where that is asked for, else before the first
    glance: much is made for one use.
    """

    def __init__(self, memories: Sequence[tuple[int, int, int]], at_once: bool = False) -> None:
        rows = [resting(*memory) for memory in memories]
        first = len(rows)
        rows += [row for memory in memories if (row := moving(*memory))]
        self._kept = [(ctypes.c_int32 * (LINE * row.turns))() for row in rows]
        words = [word for row, kept in zip(rows, self._kept, strict=True)
                 for word in (*row, ctypes.addressof(kept))]
        self._table = (ctypes.c_int64 * len(words))(*words)  # kept: calls read it
        self._call = (ctypes.addressof(self._table), 0, 0, 0, 0, 0, len(rows), 0, 0, 0, 0)
        self._turn, self._changed = 0, False
        self._keep, self._glance = _code()
        self._waiting = (first, len(rows)) if len(rows) > first and not at_once else None
        self._keep_rows(0, first if self._waiting else len(rows))

    def _keep_the_rest(self) -> None:
        with _lock:  # one thread; the others may look only when it is done
            if self._waiting:
                self._keep_rows(*self._waiting)
                self._waiting = None

    def _keep_rows(self, first: int, last: int) -> None:
        frame = Frame(ctypes.addressof(self._table) + first * ROW, 0, 0, 0, 0, 0, last - first)
        self._keep(ctypes.addressof(frame))

    def still_holds(self) -> bool:
        """Whether the places of the next turn are as they were, and all before them have been."""
        if self._changed:  # the next turn looks elsewhere
            return False
        if self._waiting:
            self._keep_the_rest()
        frame = Frame(*self._call, self._turn)  # one a call: several threads may look at once
        self._turn += 1
        self._glance(ctypes.addressof(frame))
        if frame[TASK]:
            self._changed = True
        return not self._changed


class Joint:
    """Many fingerprints, looked at in one call."""

    def __init__(self, parts: Sequence[Fingerprint]) -> None:
        self._parts = list(parts)  # whose sums it reads
        for part in parts:
            part._keep_the_rest()
        words = [word for part in parts for word in part._table]
        self._table = (ctypes.c_int64 * len(words))(*words)
        self._call = (ctypes.addressof(self._table), 0, 0, 0, 0, 0, 8 * len(words) // ROW,
                      0, 0, 0, 0)
        self._turn, self._glance = 0, _code()[1]

    def still_holds(self) -> bool:
        """As that of each; what has changed is told to the part that it belongs to."""
        if any(map(_CHANGED, self._parts)):
            return False
        turn = self._turn
        self._turn += 1
        frame = Frame(*self._call, turn)
        self._glance(ctypes.addressof(frame))
        if not frame[TASK]:
            return True
        for part in self._parts:
            part._turn = turn
            part.still_holds()
        return False
