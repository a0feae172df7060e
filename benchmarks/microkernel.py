"""The register-tile multiply as a share of the FMA peak, measured in turns on one thread.

    python benchmarks/microkernel.py
"""

from __future__ import annotations

import ctypes

import torch

from tilewise.core.isa import ISA, available
from tilewise.kernels.cpu import peak
from tilewise.kernels.cpu.emit import Module, jit
from tilewise.kernels.cpu.emit.microkernel import Walk, multiply
from tilewise.planner.measure import interleaved

TILES = {"avx512": ((14, 2), (12, 2), (6, 4)), "avx2": ((6, 2), (4, 3))}


def module(isa, rows, vectors, depth):
    m = Module(isa)
    kinds = {"a": "pointer", "b": "pointer", "c": "pointer"}
    with m.function("tile", **kinds) as f:
        walk = Walk.packed(vectors * isa.lanes, (depth, 1))
        for i, row in enumerate(multiply(f, f.a, f.b, [i * depth for i in range(rows)], vectors,
                                         walk, 4)):
            for j, value in enumerate(row):
                f.c.store(value, (i * vectors + j) * isa.lanes)
    with m.function("many", exported=True, **kinds, count="index") as g, g.loop(g.count):
        g.call(f, g.a, g.b, g.c)
    return m


def share(name, rows, vectors, depth):
    """Speed of one tile over the speed of the multiply-add loop."""
    isa = ISA[name]
    code = jit.load(lambda isa: module(isa, rows, vectors, depth),
                    f"benchmark {rows} {vectors} {depth}", isa, "many")
    many = code.function("many", *[ctypes.c_void_p] * 3, ctypes.c_int64)
    a, b = torch.randn(rows, depth), torch.randn(depth, vectors * isa.lanes)
    c = torch.empty(rows, vectors * isa.lanes)
    many(a.data_ptr(), b.data_ptr(), c.data_ptr(), 1)
    torch.testing.assert_close(c, a @ b, rtol=1e-4, atol=1e-3)
    flops = 2 * rows * depth * vectors * isa.lanes
    count = int(2e7 / flops) + 1
    top, operations = peak.runner(name, 1)
    mine, most = interleaved(
        [lambda: many(a.data_ptr(), b.data_ptr(), c.data_ptr(), count), top], rounds=60,
        sample=0.002, budget=10)
    return flops * count / mine.minimum / (operations / most.minimum)


def main() -> None:
    for name in [row.name for row in available() if row.name in TILES]:
        for rows, vectors in TILES[name]:
            shares = {depth: share(name, rows, vectors, depth) for depth in (64, 128, 256, 512)}
            print(f"{name} {rows}x{vectors * ISA[name].lanes}: " + ", ".join(
                f"K={depth} {value:.3f}" for depth, value in shares.items()) + " of peak")


if __name__ == "__main__":
    main()
