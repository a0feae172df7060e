"""From a module generator to a function that Python can call with addresses."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

from ....core import places
from ....core.errors import TilewiseError
from ....core.isa import Isa
from ....core.lru import Lru
from ....core.problem import Problem
from ....core.schedule import Schedule
from ....core.watching import watcher
from . import jit
from .function import Module
from .guarding import run_guarded
from .requests import Request
from .threads import (
    BIAS,
    FOUND,
    MASK,
    RESIDUAL,
    SCRATCH,
    SIZES,
    WEIGHT,
    Frame,
    X,
    Y,
    parallel_address,
    run_entry,
)
from .workers import AHEAD

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
    """`launch_of` with the parts of its request; without `sizes`, code is for images of this size
    alone."""
    return launch_of(Request(make, p, s, isa, more, sizes is not None), sizes or ())


def launch_of(request: Request, sizes: Sequence[int] = ()) -> Launch:
    """launch(x, weight, bias, residual, y, scratch, batch, threads, mask=0), all integers.

    `sizes` are the words that this kernel's code reads from its frame. It returns what the kernel
    found, for those that look; else 0.
    """
    entry, words = _entry(request), tuple(sizes)
    if len(words) > MOST:
        raise TilewiseError(f"a kernel has {len(words)} sizes, needs at most {MOST}")
    packed = struct.pack(f"{MOST}q", *words, *(0,) * (MOST - len(words)))

    def launch(x: int, weight: int, bias: int, residual: int, y: int, scratch: int, batch: int,
               threads: int, mask: int = 0) -> int:
        frame = _frame(_CALL(x, weight, bias, residual, y, scratch, batch, threads,
                             parallel_address(), 0, 0, 0, mask) + packed)
        if (told := watcher()) is not None:
            told.launched(entry, frame)
        if places.CHECKED:
            given = {X: x, WEIGHT: weight, BIAS: bias, RESIDUAL: residual, Y: y, SCRATCH: scratch,
                     MASK: mask}
            run_guarded(request, lambda: run_entry(entry, frame), frame, given)
        else:
            run_entry(entry, frame)
        return frame[FOUND]

    return launch


def _entry(request: Request) -> Entry:
    """From the process, a worker, the disk or the compiler."""
    key = _place(request)
    entry = KERNELS.get(key)
    if entry is not None:
        return entry
    if (told := watcher()) is not None:
        told.loads(request)
    return KERNELS.put(key, _loaded(request))


def _loaded(request: Request) -> Entry:
    code = jit.load(lambda isa: request.module(), request.key, request.isa, "entry",
                    ahead=lambda: AHEAD.take(request))
    entry: Any = code.function("entry", ctypes.c_void_p)
    entry.request = request  # for those who run it without its launcher
    return entry


def _place(request: Request) -> tuple[object, ...]:
    return request.make, request.name, request.s, request.isa, *request.more


def is_loaded(request: Request) -> bool:
    """Whether this process has the code."""
    return KERNELS.get(_place(request)) is not None


def is_compiled(request: Request) -> bool:
    """Whether a launcher has nothing to compile."""
    return is_loaded(request) or jit.is_kept(request.key, request.isa)
