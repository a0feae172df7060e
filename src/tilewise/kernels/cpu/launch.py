"""From a module generator to a function that Python can call with addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from ...core.isa import Isa
from . import jit
from .emit import Module
from .threads import Frame, parallel_address

Launch = Callable[..., None]


def launcher(make: Callable[[Isa], Module], key: str, isa: Isa) -> Launch:
    """launch(x, weight, bias, residual, y, scratch, batch, threads), all integers."""
    entry = jit.load(make, key, isa, "entry").function("entry", ctypes.c_void_p)

    def launch(x: int, weight: int, bias: int, residual: int, y: int, scratch: int, batch: int,
               threads: int) -> None:
        frame = Frame(x, weight, bias, residual, y, scratch, batch, threads, parallel_address())
        entry(ctypes.addressof(frame))

    return launch
