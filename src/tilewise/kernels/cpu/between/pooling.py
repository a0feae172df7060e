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
from ..emit.elements import ELEMENTS
from ..emit.sizes import InCode
from ..emit.threads import BATCH, X, Y, emit_entry, emit_region
from ..emit.tiling import ceil_div
from .epilogue import pool

KINDS: Any = {"frame": "pointer", "task": "index", "worker": "index"}
WORTH = 1 << 14  # floats to read that are worth a task


SIZES = ("conv_h", "conv_w", "out_h", "out_w", "pool_rows", "pool_tasks")
Sizes = Callable[[Function], Any]  # a geometry inside a function


def rows_a_task(p: Problem) -> int:
    return min(p.out_h, ceil_div(WORTH, p.epilogue.pool * p.conv_w * p.k))


def sizes(p: Problem) -> list[int]:
    """The words that the kernel reads from its frame."""
    rows = rows_a_task(p)
    return [p.conv_h, p.conv_w, p.out_h, p.out_w, rows, ceil_div(p.out_h, rows)]


def make(p: Problem, s: Schedule, isa: Isa) -> Module:
    """x, images of p.conv_h x p.conv_w pixels with p.k channels, to y."""
    m = Module(isa)
    emit_entry(m, [emit_pool(m, p, lambda f: InCode(f, p, SIZES),
                             lambda f: f.frame.load_pointer(X, ELEMENTS[p.dtype]))])
    return m


def emit_pool(m: Module, p: Problem, sizes: Sizes,
              images: Callable[[Function], Pointer]) -> Function:
    """A parallel region that pools such images to y."""
    size = p.epilogue.pool
    with m.function("rows", **KINDS) as f:
        z = sizes(f)
        rows, width = z.pool_rows, z.conv_w
        image, first = f.task // z.pool_tasks, f.task % z.pool_tasks * rows
        with f.loop((first + rows).minimum(z.out_h), start=first) as row:
            source = (image * z.conv_h + row.i * size) * width * p.k
            target = (image * z.out_h + row.i) * z.out_w * p.k
            with f.loop(z.out_w) as col:
                _window(f, p, width, images(f) + (source + col.i * (size * p.k)),
                        target + col.i * p.k)
    return emit_region(
        m, "pool", lambda f, frame: frame.load_index(BATCH) * sizes(f).pool_tasks, f)


def _window(f: Function, p: Problem, width: Index, x: Pointer, target: Index) -> None:
    """All channels of one window, in vectors no wider than they are many."""
    size, lanes = p.epilogue.pool, min(f.isa.lanes, 1 << (p.k - 1).bit_length())
    y = f.frame.load_pointer(Y, ELEMENTS[p.dtype]) + target
    whole = p.k // lanes * lanes

    def vector(k: Any, count: int) -> None:
        rows = [x + k + width * (i * p.k) for i in range(size)]
        values = [row.load(j * p.k, lanes=lanes, count=count) for row in rows
                  for j in range(size)]
        (y + k).store(pool(values), count=count)

    with f.loop(whole, step=lanes) as k:
        vector(k.i, lanes)
    if p.k > whole:
        vector(f.index(whole), p.k - whole)
