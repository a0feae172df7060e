"""A register tile alone, as a module."""

from __future__ import annotations

from tilewise.core import Isa
from tilewise.kernels.cpu.emit import Module
from tilewise.kernels.cpu.emit.microkernel import Walk, multiply

UNROLL = 4
APART = 16  # a line between two rows: else 28 share few places of a first cache of 32 KB


def tile_module(isa: Isa, rows: int, vectors: int, depth: int) -> Module:
    """tile(a, b, c): c = a @ b; again(a, b, c, times): the same many times."""
    module = Module(isa)
    with module.function("tile", a="pointer", b="pointer", c="pointer") as f:
        walk = Walk.packed(vectors * isa.lanes, (depth, 1))
        offsets = [i * (depth + APART) for i in range(rows)]
        acc = multiply(f, f.a, f.b, offsets, vectors, walk, UNROLL)
        for i, row in enumerate(acc):
            for j, value in enumerate(row):
                f.c.store(value, (i * vectors + j) * isa.lanes)
    with module.function("again", exported=True, a="pointer", b="pointer", c="pointer",
                         times="index") as driver, driver.loop(driver.times):
        driver.call(f, driver.a, driver.b, driver.c)
    return module
