"""The kernels of vdpbf16ps with another instruction in its place, beside float32's, on one thread.

    python benchmarks/vdpbf16ps.py          # 1x1 layers of ResNet-50
    python benchmarks/vdpbf16ps.py --taps   # its 3x3 layers

For processors that have AVX-512 VNNI and no AVX-512 BF16, on which the row `avx512_bf16` cannot be
timed. `vpdpwssds` reads the same operands and starts as often as a multiply-add there; results mean
nothing. It shows what loads, packing and writing leave of two products a cycle and lane, if
vdpbf16ps is as fast.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from dataclasses import replace

from llvmlite import ir

# code that computes nothing useful stays out of the user's cache
CACHE = tempfile.TemporaryDirectory(prefix="tilewise-stand-in-")
os.environ["TILEWISE_CACHE_DIR"] = CACHE.name

from tilewise.bench.rungs import ENGINE  # noqa: E402
from tilewise.core import ISA, Problem, Target  # noqa: E402
from tilewise.core.isa import cpu_flags  # noqa: E402
from tilewise.kernels.cpu.emit import F32, I32, dpbf16, parts  # noqa: E402
from tilewise.kernels.cpu.emit.values import I16, Vector  # noqa: E402
from tilewise.planner.measure import interleaved  # noqa: E402

POINTWISE = ("c64h56w56k64", "c64h56w56k256", "c256h56w56k64", "c256h56w56k128", "c128h28w28k512",
             "c512h28w28k128", "c512h28w28k256", "c256h14w14k1024", "c1024h14w14k256",
             "c1024h14w14k512", "c512h7w7k2048", "c2048h7w7k512")
TAPS = ("c64h56w56k64", "c128h28w28k128", "c256h14w14k256", "c512h7w7k512")
ROW = replace(ISA["avx512_bf16"], name="stand_in", features="+avx512vnni,-prefer-256-bit")
FLOATS, WORDS = ir.VectorType(F32, 16), ir.VectorType(I32, 16)
PAIRS, HALVES = ir.VectorType(I16, 32), ir.VectorType(I16, 16)


def product(self, sums, a, b):
    f = self.f
    call = f.intrinsic("llvm.x86.avx512.vpdpwssds.512", WORDS, [WORDS, PAIRS, PAIRS])
    found = f.ll.call(call, [f.ll.bitcast(sums.ir, WORDS), f.ll.bitcast(a, PAIRS),
                             f.ll.bitcast(b, PAIRS)])
    return Vector(f, f.ll.bitcast(found, FLOATS))


def rounded(f, value):
    """To float16, in one instruction as well."""
    call = f.intrinsic("llvm.x86.avx512.mask.vcvtps2ph.512", HALVES, [FLOATS, I32, HALVES, I16])
    return f.ll.call(call, [value, ir.Constant(I32, 8), ir.Constant(HALVES, None),
                            ir.Constant(I16, -1)])


def rounded_both(f, low, high):
    every = ir.Constant(ir.VectorType(I32, 32), list(range(32)))
    return f.ll.shuffle_vector(rounded(f, low), rounded(f, high), every)


def main() -> int:
    if "avx512_vnni" not in cpu_flags() or "avx512_bf16" in cpu_flags():
        print("needs a processor with avx512_vnni and without avx512_bf16", file=sys.stderr)
        return 2
    ISA[ROW.name] = ROW
    dpbf16.Vectors._product, parts._rounded_both = product, rounded_both
    parts._rounded = lambda f, value: rounded(f, value.ir)
    taps = "--taps" in sys.argv
    t, ratios = Target.host("avx512", 1), []
    for layer in TAPS if taps else POINTWISE:
        p = Problem.parse(f"n1{layer}{'r3s3p1' if taps else 'r1s1'}_f32_forward+bias+relu")
        plans = (ENGINE.planner.plan(p, t, algorithm="cpu_direct"),
                 ENGINE.planner.plan(p, t.with_(isa=ROW.name), algorithm="cpu_direct_bf16"))
        ours, standing_in = interleaved([ENGINE.start(plan) for plan in plans], 21, 0.004, 8.0)
        ratios.append(ours.minimum / standing_in.minimum)
        print(f"{layer:18} float32 {1e6 * ours.minimum:7.0f} us, in its place "
              f"{1e6 * standing_in.minimum:7.0f} us: {ratios[-1]:.2f}x", flush=True)
    print(f"geometric mean {math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
