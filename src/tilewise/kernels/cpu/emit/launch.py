"""From a module generator to a function that Python can call with addresses."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

from ....core.code import Code
from ....core.errors import TilewiseError
from ....core.isa import Isa
from ....core.lru import Lru
from ....core.problem import Problem
from ....core.schedule import Schedule
from . import jit
from .function import Module
from .threads import FOUND, SIZES, Frame, parallel_address, run_entry

Make = Callable[..., Module]  # of a problem, a schedule, a row of ISA, and what a kernel adds
Entry = Callable[[int], None]
Launch = Callable[..., int]

KERNELS: Lru[Entry] = Lru(limit=512)
MOST = len(Frame()) - SIZES  # words for sizes
# one packing and one copy: an array that is given its words one by one takes 5 us longer
_CALL = struct.Struct(f"13q{8 * (SIZES - 13)}x").pack
_frame = Frame.from_buffer_copy


def launcher(make: Make, p: Problem, s: Schedule, isa: Isa, *more: int,
             sizes: Sequence[int] | None = None) -> Launch:
    """launch(x, weight, bias, residual, y, scratch, batch, threads, mask=0), all integers.

    `sizes` are the words that this kernel's code reads from its frame; without them, the code is
    for images of this size alone. It returns what the kernel found, for those that look; else 0.
    """
    name = str(p.compiled) if sizes is None else p.code
    key = (make, name, s, isa, *more)
    entry = KERNELS.get(key) or KERNELS.put(key, _load(make, name, p, s, isa, *more,
                                                      fixed=sizes is None))
    words = tuple(sizes or ())
    if len(words) > MOST:
        raise TilewiseError(f"a kernel has {len(words)} sizes, needs at most {MOST}")
    packed = struct.pack(f"{MOST}q", *words, *(0,) * (MOST - len(words)))

    def launch(x: int, weight: int, bias: int, residual: int, y: int, scratch: int, batch: int,
               threads: int, mask: int = 0) -> int:
        frame = _frame(_CALL(x, weight, bias, residual, y, scratch, batch, threads,
                             parallel_address(), 0, 0, 0, mask) + packed)
        run_entry(entry, frame)
        return frame[FOUND]

    return launch


def _load(make: Make, name: str, p: Problem, s: Schedule, isa: Isa, *more: int,
          fixed: bool) -> Entry:
    seen: Any = p.compiled if fixed else Code(p)
    key = "|".join([f"{make.__module__}.{make.__qualname__}", name, s.to_json(), *map(str, more)])
    return jit.load(lambda isa: make(seen, s, isa, *more), key, isa,
                    "entry").function("entry", ctypes.c_void_p)
