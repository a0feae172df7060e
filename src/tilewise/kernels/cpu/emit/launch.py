"""From a module generator to a function that Python can call with addresses."""

from __future__ import annotations

import ctypes
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
from .threads import FOUND, MASK, PARALLEL, SIZES, Frame, parallel_address, run_entry

Make = Callable[..., Module]  # of a problem, a schedule, a row of ISA, and what a kernel adds
Entry = Callable[[int], None]
Launch = Callable[..., int]

KERNELS: Lru[Entry] = Lru(limit=512)
MOST = len(Frame()) - SIZES  # words for sizes
OPERANDS = PARALLEL + 1  # words that every call writes


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
    blank = bytes(Frame(*(0,) * SIZES, *words))  # copied faster than written word by word

    def launch(x: int, weight: int, bias: int, residual: int, y: int, scratch: int, batch: int,
               threads: int, mask: int = 0) -> int:
        frame = Frame.from_buffer_copy(blank)
        frame[:OPERANDS] = [x, weight, bias, residual, y, scratch, batch, threads,
                            parallel_address()]
        frame[MASK] = mask
        run_entry(entry, frame)
        return frame[FOUND]

    return launch


def _load(make: Make, name: str, p: Problem, s: Schedule, isa: Isa, *more: int,
          fixed: bool) -> Entry:
    seen: Any = p.compiled if fixed else Code(p)
    key = "|".join([f"{make.__module__}.{make.__qualname__}", name, s.to_json(), *map(str, more)])
    return jit.load(lambda isa: make(seen, s, isa, *more), key, isa,
                    "entry").function("entry", ctypes.c_void_p)
