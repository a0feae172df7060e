"""1x1 layers of ResNet-50 on the row `avx512_bf16`: products of bfloat16 beside our own float32.

    python benchmarks/vdpbf16ps.py                     # wants a quiet machine
    python benchmarks/vdpbf16ps.py --taps              # its 3x3 layers
    python benchmarks/vdpbf16ps.py -o vdpbf16ps.json

For processors with AVX-512 BF16. A matrix unit, if there is one, is left aside, by torch as well
(ONEDNN_MAX_CPU_ISA). Contenders take turns: float32 by the planner's choice on `avx512`, one
product of bfloat16 from float32 images, the same from bfloat16 images, and torch on the latter. The
ratio is the least time of float32 over that with bfloat16 images, kernels alone.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import statistics
import sys
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"

import torch

from tilewise.bench import machine
from tilewise.bench.results import Result
from tilewise.bench.rungs import ENGINE
from tilewise.core import Problem, Target
from tilewise.core.isa import cpu_flags
from tilewise.planner.measure import interleaved

POINTWISE = ("c64h56w56k64", "c64h56w56k256", "c256h56w56k64", "c256h56w56k128", "c128h28w28k512",
             "c512h28w28k128", "c512h28w28k256", "c256h14w14k1024", "c1024h14w14k256",
             "c1024h14w14k512", "c512h7w7k2048", "c2048h7w7k512")
TAPS = ("c64h56w56k64", "c128h28w28k128", "c256h14w14k256", "c512h7w7k512")
ROW, ONE = "avx512_bf16", "cpu_direct_bf16"


def measured(layer: str, taps: bool, threads: int) -> dict[str, Any]:
    """Seconds of each contender."""
    p = Problem.parse(f"n1{layer}{'r3s3p1' if taps else 'r1s1'}_f32_forward+bias+relu")
    half, plain = p.with_(dtype="bf16"), Target.host("avx512", threads)
    row = Target.host(ROW, threads)
    plans = {"float32": ENGINE.planner.plan(p, plain, algorithm="cpu_direct" if taps else None),
             "float32 images": ENGINE.planner.plan(p, row, algorithm=ONE),
             "bfloat16 images": ENGINE.planner.plan(half, row, algorithm=ONE),
             "torch bfloat16": ENGINE.planner.plan(half, row, algorithm="vendor")}
    times = interleaved([ENGINE.start(plan) for plan in plans.values()], 21, 0.004, 8.0)
    seconds = {who: time.minimum for who, time in zip(plans, times, strict=True)}
    return {"layer": layer, "float32 by": plans["float32"].algorithm, "seconds": seconds,
            "ratio": seconds["float32"] / seconds["bfloat16 images"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--taps", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    if ROW not in cpu_flags():
        print(f"needs a processor with {ROW}", file=sys.stderr)
        return 2
    torch.set_num_threads(args.threads)
    rows = []
    for layer in TAPS if args.taps else POINTWISE:
        rows.append(measured(layer, args.taps, args.threads))
        print(f"{layer:18} " + ", ".join(f"{who} {1e6 * took:.0f} us" for who, took
                                         in rows[-1]["seconds"].items())
              + f": {rows[-1]['ratio']:.2f}x", flush=True)
    mean = math.exp(statistics.fmean(math.log(row["ratio"]) for row in rows))
    print(f"geometric mean {mean:.2f}x")
    if args.output:
        Result("vdpbf16ps", shlex.join(["python", *sys.argv]), date.today().isoformat(),
               machine.facts(args.threads, limits=False), {}, rows).save(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
