"""The matrix unit's multiply as a share of its peak, measured in turns on one thread.

    python benchmarks/amx.py             # speed of the multiply
    python benchmarks/amx.py --errors    # of whole convolutions, against float64; times nothing
    python benchmarks/amx.py --errors benchmarks/results/amx_errors.json    # and kept
    python benchmarks/amx.py --bfloat16  # torch on bfloat16 tensors beside one product of floats

Both operands are packed; every multiplication of bfloat16 parts counts. The result is written once,
or, as by kernels that go on with it at once, each block of columns over the one before.
"""

from __future__ import annotations

import ctypes
import sys
from datetime import date
from pathlib import Path

import torch
from torch.nn import functional as F

from tilewise.bench import machine
from tilewise.bench.results import Result
from tilewise.conv.running import ENGINE
from tilewise.core import Problem, Target
from tilewise.core.isa import ISA
from tilewise.kernels.cpu import memory, peak
from tilewise.kernels.cpu.emit import Module, amx, jit
from tilewise.kernels.cpu.emit.microkernel import Walk
from tilewise.kernels.cpu.emit.parts import pack_columns, split_tensor
from tilewise.kernels.matrix import DEPTH, PARTS
from tilewise.planner.measure import interleaved

SIZES = ((256, 256, 256), (512, 512, 512), (256, 1024, 1024), (1024, 1024, 256))
LAYERS = ("n1c64h56w56k64r3s3p1_f32_forward", "n1c512h14w14k512r3s3p1_f32_forward",
          "n1c256h28w28k256r3s3u2p1_f32_forward", "n1c2048h7w7k512r1s1_f32_forward")
NAMES = ("vendor", "cpu_direct", "cpu_pointwise", "cpu_winograd")
HALVES = ("n8c64h56w56k64r3s3p1_f32_forward", "n8c256h28w28k256r3s3p1_f32_forward",
          "n8c512h14w14k512r3s3p1_f32_forward", "n8c256h14w14k1024r1s1_f32_forward",
          "n8c1024h14w14k256r1s1_f32_forward", "n8c128h56w56k128r3s3u2p1_f32_forward")
ROUNDS, BUDGET = 999, 3.0
PANEL = 32 << 10  # bytes of a panel of B that is used again and again


def module(isa, m, n, k, products, near):
    """c[column block][row][32] = a @ b, in chunks of the depth whose panel stays near.

    With `near`, column blocks of c lie over each other.
    """
    out, parts = Module(isa), PARTS[products]
    steps, groups = k // DEPTH, m // 32
    chunk = max(1, min(steps, PANEL // (parts * 4 * 2 * amx.TILE)))
    row, panel = steps * parts * amx.TILE, 2 * steps * parts * amx.TILE
    lines = -(-2 * parts * 16 // groups)  # of the next panel, fetched in a step
    kinds = {"a": "pointer", "b": "pointer", "c": "pointer"}
    left = amx.Side((0, row), amx.TILE, passing=True)
    right, c = amx.Side((0, amx.TILE), 2 * amx.TILE), amx.Side((0, 16 * 32), 16, 128)
    columns = {}
    for first in range(0, steps, chunk):
        count = min(chunk, steps - first)
        with out.function(f"column{first}", **kinds, ahead="pointer") as f:
            walk = Walk(((count, parts * amx.TILE, 2 * parts * amx.TILE),))
            amx.multiply_column(
                f, f.a + first * parts * amx.TILE, f.b + first * parts * 2 * amx.TILE, f.c, left,
                right, c, walk, products, first == 0, (f.ahead, lines), groups, 2 * row, 32 * 32)
        columns[first] = f
    with out.function("many", exported=True, **kinds, count="index") as g:
        amx.configure(g)
        with g.loop(g.count), g.loop(n // 32) as j:
            b = g.b + j.i * panel
            for first, f in columns.items():
                count = min(chunk, steps - first)
                g.call(f, g.a, b, g.c + j.i * (0 if near else m * 32),
                       b + (first + count) * parts * 2 * amx.TILE)
        amx.release(g)
    return out


def pack_rows(a, parts):
    m, k = a.shape
    tiles = split_tensor(a, parts).reshape(parts, m // 16, 16, k // 32, 32)
    return tiles.permute(1, 3, 0, 2, 4).contiguous().view(torch.float32)


def in_huge_pages(values):
    """A copy in memory as the engine's own: aligned, in huge pages."""
    flat = memory.empty(max(values.numel(), memory.HUGE_PAGE))[:values.numel()]
    return flat.copy_(values.flatten()).view(values.shape)


def compiled(*options):
    code = jit.load(lambda isa: module(isa, *options), f"benchmark amx {options}", ISA["amx"],
                    "many")
    return code, code.function("many", *[ctypes.c_void_p] * 3, ctypes.c_int64)


def share(m, n, k, products):
    """Speed over that of the unit alone, also with sums that stay near; the relative rms error."""
    held = [compiled(m, n, k, products, near) for near in (False, True)]
    many, near = (function for _, function in held)
    a, b, c = torch.randn(m, k), torch.randn(k, n), torch.empty(n // 32, m, 32)
    left = in_huge_pages(pack_rows(a, PARTS[products]))
    right = in_huge_pages(pack_columns(b.unflatten(1, (-1, 32)).transpose(0, 1), PARTS[products]))
    c = in_huge_pages(c)
    many(left.data_ptr(), right.data_ptr(), c.data_ptr(), 1)
    exact = a.double() @ b.double()
    error = (c.transpose(0, 1).reshape(m, n) - exact).square().mean().sqrt()
    error /= exact.square().mean().sqrt()
    operations = 2.0 * m * n * k * products
    count = int(5e9 / operations) + 1
    top, most = peak.tile_runner(1)
    where = [operand.data_ptr() for operand in (left, right, c)]
    *mine, best = interleaved([lambda: many(*where, count), lambda: near(*where, count), top],
                              rounds=ROUNDS, sample=0.002, budget=BUDGET)
    peak_speed = most / best.minimum
    return *(operations * count / time.minimum / peak_speed for time in mine), float(error)


def errors(path: str | None) -> None:
    """Of each algorithm with each number of products, on non-negative inputs; and torch's."""
    rows = [row for text in LAYERS for row in errors_of(Problem.parse(text))]
    for row in rows:
        print(f"{row['subject']} {row['algorithm']}, {row['products']} products: "
              f"{row['error']:.1e}, declared {row['declared']:.1e}")
    if path:
        Result("errors", f"python benchmarks/amx.py --errors {path}", date.today().isoformat(),
               machine.facts(2, limits=False), {}, rows).save(Path(path))


def errors_of(p):
    t = Target.host("amx", 2)
    x = torch.randn(p.n, p.c, p.h, p.w).relu().contiguous(memory_format=torch.channels_last)
    weight = torch.randn(p.k, p.c, p.r, p.s)
    exact = F.conv2d(x.double(), weight.double(), None, p.stride, p.padding[0])
    offers = [answer.plan for answer in ENGINE.planner.candidates(p, t)
              if answer.plan and answer.algorithm.startswith(NAMES)]
    for plan in sorted(offers, key=lambda plan: (plan.algorithm, plan.error)):
        run = ENGINE.build(plan)
        error = (run(x, run.prepare(weight), None, None) - exact).norm() / exact.norm()
        products = getattr(ENGINE.planner.algorithm(plan.algorithm), "products", 0)
        name = plan.algorithm.rpartition("_")[0] if products else plan.algorithm
        yield {"subject": str(p), "algorithm": name, "products": products,
               "error": float(error), "declared": plan.error}


def bfloat16() -> None:
    """Layers of torch on bfloat16, of the engine with one product of float32, and of both."""
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    t = Target.host("amx", 2)
    for p in map(Problem.parse, HALVES):
        print(f"{p}: {bfloat16_of(p, t)}", flush=True)


def bfloat16_of(p, t):
    x = torch.randn(p.n, p.c, p.h, p.w).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(p.k, p.c, p.r, p.s).contiguous(memory_format=torch.channels_last)
    half, half_weight = x.bfloat16(), weight.bfloat16()
    offers = [answer.plan for answer in ENGINE.planner.candidates(p, t) if answer.plan]
    plan = next(plan for plan in offers if plan.algorithm == "cpu_direct_bf16")
    run = ENGINE.build(plan)
    ready, padding = run.prepare(weight), p.padding[0]
    theirs, ours, between = interleaved(
        [lambda: F.conv2d(half, half_weight, None, p.stride, padding),
         lambda: run(x, ready, None, None),
         lambda: run(half.float(), ready, None, None).bfloat16()], 9, 0.003, 2.0)
    return (f"torch on bfloat16 {theirs.minimum * 1e3:.2f} ms, one product of float32 "
            f"{ours.minimum * 1e3:.2f}, with conversions {between.minimum * 1e3:.2f}")


def main() -> None:
    torch.manual_seed(0)
    if "--bfloat16" in sys.argv:
        return bfloat16()
    if "--errors" in sys.argv:
        return errors(next((name for name in sys.argv[1:] if name.endswith(".json")), None))
    for threads in (1, 2):
        top, operations = peak.tile_runner(threads)
        best = interleaved([top], rounds=200, budget=2)[0].minimum
        print(f"peak of {threads} threads: {operations / best / 1e12:.2f} Tflop/s")
    for products in (1, 3, 6):
        for m, n, k in SIZES:
            speed, near, error = share(m, n, k, products)
            print(f"{products} products, M={m} N={n} K={k}: {speed:.3f} of peak, {near:.3f} with "
                  f"sums that stay near, rms error {error:.1e}", flush=True)


if __name__ == "__main__":
    main()
