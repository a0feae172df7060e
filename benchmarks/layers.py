"""Single layers against torch's better layout, interleaved in one run.

    python benchmarks/layers.py vgg --batch 8 --algorithm cpu_direct
    python benchmarks/layers.py vgg --batch 8 --relu
    python benchmarks/layers.py vgg_pool --batch 8 --relu --pool 2
    python benchmarks/layers.py lenet --batch 1000
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 TILEWISE_ISA=avx2 \\
        python benchmarks/layers.py vgg --batch 8 --relu

Torch runs with huge pages (THP_MEM_ALLOC_ENABLE=1, set before it is imported), in both layouts.
No speed is printed for a result that is wrong.
"""

from __future__ import annotations

import argparse
import math
import os

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
from torch.nn import functional as F

import tilewise
from tilewise.kernels.cpu import peak
from tilewise.planner.measure import interleaved

SUITES = {
    "vgg": ["c64h224w224k64", "c64h112w112k128", "c128h112w112k128", "c128h56w56k256",
            "c256h56w56k256", "c256h28w28k512", "c512h28w28k512", "c512h14w14k512"],
    "vgg_pool": ["c64h224w224k64", "c128h112w112k128"],
    "vgg_first": ["c3h224w224k64"],
    "lenet": ["c1h86w86k4r7s7", "c4h40w40k16r7s7", "c1h70w70k12r5s5", "c12h33w33k24r5s5"],
    "wide_filters": ["c32h56w56k32r5s5p2", "c64h56w56k64r5s5p2", "c32h56w56k32r7s7p3",
                     "c64h56w56k64r7s7p3"],
    "pointwise": ["c64h56w56k256r1s1", "c256h56w56k64r1s1", "c512h28w28k128r1s1",
                  "c256h56w56k512r1s1u2", "c1024h14w14k256r1s1", "c512h7w7k2048r1s1"],
    "depthwise": ["c32h112w112k32r3s3p1g32", "c96h112w112k96r3s3u2p1g96",
                  "c144h56w56k144r3s3p1g144", "c576h14w14k576r3s3p1g576",
                  "c960h7w7k960r3s3p1g960"],
}


def problem(layer: str, batch: int, epilogue: str) -> tilewise.Problem:
    shape = layer if "r" in layer else layer + "r3s3p1"
    return tilewise.Problem.parse(f"n{batch}{shape}_f32_forward{epilogue}")


def contenders(p, args):
    """Torch in both layouts, and tilewise, as callables."""
    x = torch.randn(p.n, p.c, p.h, p.w).relu_()
    weight = torch.randn(p.k, p.group_c, p.r, p.s) * math.sqrt(2 / (p.group_c * p.r * p.s))
    bias = torch.randn(p.k) * 0.1
    padding = (p.padding[0], p.padding[2])
    x_last = x.contiguous(memory_format=torch.channels_last)
    weight_last = weight.contiguous(memory_format=torch.channels_last)
    relu = p.epilogue.activation

    def torch_run(x, weight):
        y = F.conv2d(x, weight, bias, p.stride, padding, p.dilation, p.groups)
        y = y.relu_() if relu else y
        return F.max_pool2d(y, args.pool) if args.pool > 1 else y

    def ours():
        return tilewise.conv2d(x_last, weight, bias, p.stride, padding, p.dilation, p.groups,
                               activation=relu, pool=args.pool, algorithm=args.algorithm)

    return {"nchw": lambda: torch_run(x, weight), "nhwc": lambda: torch_run(x_last, weight_last),
            "tilewise": ours}, (x_last, weight, bias)


def rms_error(y, reference):
    return float(((y.double() - reference).square().mean() / reference.square().mean()).sqrt())


def gate(p, runs, operands):
    """Errors of torch and tilewise on the first image, against float64."""
    x, weight, bias = operands
    reference = F.conv2d(x[:1].double(), weight.double(), bias.double(), p.stride,
                         (p.padding[0], p.padding[2]), p.dilation, p.groups)
    reference = reference.relu() if p.epilogue.activation else reference
    pool = p.epilogue.pool
    reference = F.max_pool2d(reference, pool) if pool > 1 else reference
    theirs, ours = (rms_error(runs[name]()[:1], reference) for name in ("nhwc", "tilewise"))
    if not ours < 2e-5:
        raise SystemExit(f"{p}: rms error {ours:.1e}: no speed for a wrong result")
    return theirs, ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--algorithm")
    parser.add_argument("--relu", action="store_true")
    parser.add_argument("--pool", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    target = tilewise.Target.host(threads=args.threads)
    multiply_add, operations = peak.runner(target.isa, args.threads)
    ratios, shares = [], []
    for layer in SUITES[args.suite]:
        steps = "+bias" + "+relu" * args.relu + f"+pool{args.pool}" * (args.pool > 1)
        p = problem(layer, args.batch, steps)
        runs, operands = contenders(p, args)
        theirs, ours = gate(p, runs, operands)
        times = interleaved([*runs.values(), multiply_add], rounds=args.rounds, sample=0.03,
                            budget=60)
        nchw, nhwc, mine, top = times
        best = min(nchw.minimum, nhwc.minimum)
        middle = min(nchw.median, nhwc.median)
        ratios.append(best / mine.minimum)
        shares.append(p.flops / mine.minimum / (operations / top.minimum))
        print(f"{p!s:52} torch {nchw.minimum * 1e3:8.2f} / {nhwc.minimum * 1e3:8.2f} ms, "
              f"tilewise {mine.minimum * 1e3:8.2f} ms: {ratios[-1]:5.2f}x "
              f"(median {middle / mine.median:5.2f}x, spread {mine.spread:.0%}), "
              f"{shares[-1]:.2f} of peak, error {ours:.1e} (torch {theirs:.1e})", flush=True)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    share = math.exp(sum(map(math.log, shares)) / len(shares))
    print(f"geometric mean {mean:.2f}x of torch's better layout, {share:.2f} of the FMA peak; "
          f"least {min(ratios):.2f}x; {target}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
