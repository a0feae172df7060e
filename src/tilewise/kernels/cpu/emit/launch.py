"""From a module generator to a function that Python can call with addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from ....core.isa import Isa
from ....core.lru import Lru
from ....core.problem import Problem
from ....core.schedule import Schedule
from . import jit
from .function import Module
from .threads import FOUND, Frame, parallel_address, run_entry

Make = Callable[..., Module]  # of a problem, a schedule, a row of ISA, and what a kernel adds
Launch = Callable[..., int]

KERNELS: Lru[Launch] = Lru(limit=512)


def launcher(make: Make, p: Problem, s: Schedule, isa: Isa, *more: int) -> Launch:
    """launch(x, weight, bias, residual, y, scratch, batch, threads, mask=0), all integers.

    It returns what the kernel found, for those that look; else 0.
    """
    p = p.compiled
    key = (make, p, s, isa, *more)
    return KERNELS.get(key) or KERNELS.put(key, _load(make, p, s, isa, *more))


def _load(make: Make, p: Problem, s: Schedule, isa: Isa, *more: int) -> Launch:
    name = "|".join([f"{make.__module__}.{make.__qualname__}", str(p), s.to_json(),
                     *map(str, more)])
    code = jit.load(lambda isa: make(p, s, isa, *more), name, isa, "entry")
    entry = code.function("entry", ctypes.c_void_p)

    def launch(x: int, weight: int, bias: int, residual: int, y: int, scratch: int, batch: int,
               threads: int, mask: int = 0) -> int:
        frame = Frame(x, weight, bias, residual, y, scratch, batch, threads, parallel_address(),
                      0, 0, 0, mask)
        run_entry(entry, frame)
        return frame[FOUND]

    return launch
