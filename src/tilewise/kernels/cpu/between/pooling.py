"""Max-pooling of channels-last images, for convolutions that do not pool what they compute.

torch's own vectors hold channels: with few of them it is several times slower than the
convolution before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ..emit import Function, Index, Module, Pointer
from ..emit.threads import BATCH, X, Y, emit_entry, emit_region
from ..emit.tiling import ceil_div
from .epilogue import pool

KINDS: Any = {"frame": "pointer", "task": "index", "worker": "index"}
WORTH = 1 << 14  # floats to read that are worth a task


def make(p: Problem, s: Schedule, isa: Isa) -> Module:
    """x, images of p.conv_h x p.conv_w pixels with p.k channels, to y."""
    m = Module(isa)
    emit_entry(m, [emit_pool(m, p, lambda f: f.frame.load_pointer(X))])
    return m


def emit_pool(m: Module, p: Problem, images: Callable[[Function], Pointer]) -> Function:
    """A parallel region that pools such images to y."""
    size = p.epilogue.pool
    rows = min(p.out_h, ceil_div(WORTH, size * p.conv_w * p.k))
    tasks = ceil_div(p.out_h, rows)
    with m.function("rows", **KINDS) as f:
        image, first = f.task // tasks, f.task % tasks * rows
        with f.loop((first + rows).minimum(p.out_h), start=first) as row:
            source = (image * p.conv_h + row.i * size) * (p.conv_w * p.k)
            target = (image * p.out_h + row.i) * (p.out_w * p.k)
            with f.loop(p.out_w) as col:
                _window(f, p, images(f) + (source + col.i * (size * p.k)), target + col.i * p.k)
    return emit_region(m, "pool", lambda f, frame: frame.load_index(BATCH) * tasks, f)


def _window(f: Function, p: Problem, x: Pointer, target: Index) -> None:
    """All channels of one window, in vectors no wider than they are many."""
    size, lanes = p.epilogue.pool, min(f.isa.lanes, 1 << (p.k - 1).bit_length())
    y = f.frame.load_pointer(Y) + target
    whole = p.k // lanes * lanes

    def vector(k: Any, count: int) -> None:
        values = [(x + k).load((i * p.conv_w + j) * p.k, lanes=lanes, count=count)
                  for i in range(size) for j in range(size)]
        (y + k).store(pool(values), count=count)

    with f.loop(whole, step=lanes) as k:
        vector(k.i, lanes)
    if p.k > whole:
        vector(f.index(whole), p.k - whole)
