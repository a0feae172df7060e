"""Layers that people have, planned by estimate, beside torch as a user runs it.

    python benchmarks/layers.py
    python benchmarks/layers.py deeplab patchify      # those whose names begin so
    python benchmarks/layers.py -o layers.json
    python benchmarks/layers.py --save times.jsonl    # every candidate's time, to fit costs to
    python benchmarks/layers.py --fine times.jsonl > tests/support/layers.json

Both get the same input and weight, in one layout, and make a fresh output in every call. The ratio
is torch's least time over ours, of rounds in turns. `benchmarks/planner.py --again` reads what
--save writes. --fine lists the algorithms that reach .9 of torch's, called in the same way, by the
least times of some such files: a test asks estimates to choose one of them.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from datetime import date
from pathlib import Path

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
from torch.nn import functional as F

import tilewise
from tilewise.bench import machine
from tilewise.bench.results import Result
from tilewise.conv.running import ENGINE
from tilewise.core import Problem, Target
from tilewise.planner.measure import interleaved
from tilewise.runtime.engine import random_operands

ENOUGH = 0.9  # of torch's speed
LAYERS = {
    "stem resnet": "n1c3h224w224k64r7s7u2p3",
    "stem resnet, planes": "n1c3h224w224k64r7s7u2p3_nchw",
    "stem resnet, batch 8": "n8c3h224w224k64r7s7u2p3",
    "stem resnet, batch 8, planes": "n8c3h224w224k64r7s7u2p3_nchw",
    "stem mobilenet": "n1c3h224w224k32r3s3u2p1",
    "stem mobilenet, planes": "n1c3h224w224k32r3s3u2p1_nchw",
    "stem vgg": "n1c3h224w224k64r3s3p1",
    "stem vgg, planes": "n1c3h224w224k64r3s3p1_nchw",
    "stem of grey digits, planes": "n64c1h28w28k32r5s5p2_nchw",
    "stem yolo, large": "n1c3h640w640k32r6s6u2p2_nchw",
    "patchify convnext": "n1c3h224w224k96r4s4u4",
    "patchify convnext, large, planes": "n1c3h512w512k96r4s4u4_nchw",
    "patchify vit": "n1c3h224w224k768r16s16u16",
    "patchify vit, planes": "n1c3h224w224k768r16s16u16_nchw",
    "patchify vit, batch 8, planes": "n8c3h224w224k768r16s16u16_nchw",
    "downsample convnext": "n1c96h56w56k192r2s2u2",
    "downsample convnext, planes": "n1c384h14w14k768r2s2u2_nchw",
    "1x1 resnet, first": "n1c64h56w56k256r1s1",
    "1x1 resnet, first, planes": "n1c64h56w56k256r1s1_nchw",
    "1x1 resnet, last": "n1c2048h7w7k512r1s1",
    "1x1 resnet, last, planes": "n1c512h7w7k2048r1s1_nchw",
    "1x1 resnet, stride 2": "n1c256h56w56k512r1s1u2",
    "1x1 resnet, stride 2, planes": "n1c1024h14w14k2048r1s1u2_nchw",
    "1x1 mobilenet": "n1c144h56w56k24r1s1",
    "1x1 on one pixel": "n1c960h1w1k240r1s1",
    "1x1 on one pixel, planes": "n1c1280h1w1k320r1s1_nchw",
    "1x1 large, few outputs": "n1c32h512w512k2r1s1_nchw",
    "3x3 resnet, 56": "n1c64h56w56k64r3s3p1",
    "3x3 resnet, 56, planes": "n1c64h56w56k64r3s3p1_nchw",
    "3x3 resnet, 14": "n1c256h14w14k256r3s3p1",
    "3x3 resnet, 7, planes": "n1c512h7w7k512r3s3p1_nchw",
    "3x3 resnet, stride 2": "n1c128h56w56k128r3s3u2p1",
    "3x3 resnet, stride 2, planes": "n1c256h28w28k256r3s3u2p1_nchw",
    "3x3 resnet, batch 32": "n32c64h56w56k64r3s3p1",
    "3x3 unet, 512": "n1c64h512w512k64r3s3p1",
    "3x3 unet, 1024, planes": "n1c16h1024w1024k16r3s3p1_nchw",
    "3x3 on 2x2 pixels": "n1c512h2w2k512r3s3p1",
    "3x3 on 4x4 pixels, planes": "n1c256h4w4k256r3s3p1_nchw",
    "5x5 alexnet, planes": "n1c64h27w27k192r5s5p2_nchw",
    "5x5 inception": "n1c48h35w35k64r5s5p2",
    "1x7 inception": "n1c192h17w17k192r1s7p0x3",
    "7x1 inception, planes": "n1c160h17w17k192r7s1p3x0_nchw",
    "last of super-resolution": "n1c64h512w512k3r3s3p1",
    "last of super-resolution, planes": "n1c64h512w512k3r3s3p1_nchw",
    "last of a style net, 9x9": "n1c32h256w256k3r9s9p4_nchw",
    "last of a depth net": "n1c32h256w256k1r3s3p1",
    "last of a depth net, planes": "n1c64h256w256k1r3s3p1_nchw",
    "first of a mask, 1 channel": "n1c1h512w512k16r3s3p1",
    "few channels, 4 to 32": "n1c4h256w256k32r3s3p1",
    "depthwise 3x3": "n1c144h56w56k144r3s3p1g144",
    "depthwise 3x3, planes": "n1c384h14w14k384r3s3p1g384_nchw",
    "depthwise 3x3, stride 2": "n1c96h112w112k96r3s3u2p1g96",
    "depthwise 3x3, stride 2, planes": "n1c96h112w112k96r3s3u2p1g96_nchw",
    "depthwise 5x5": "n1c240h28w28k240r5s5p2g240",
    "depthwise 5x5, stride 2, planes": "n1c672h14w14k672r5s5u2p2g672_nchw",
    "depthwise 7x7": "n1c96h56w56k96r7s7p3g96",
    "depthwise 7x7, batch 8, planes": "n8c192h28w28k192r7s7p3g192_nchw",
    "depthwise 3x3 on 7x7 pixels": "n1c960h7w7k960r3s3p1g960",
    "grouped resnext": "n1c128h56w56k128r3s3p1g32",
    "grouped resnext, planes": "n1c256h28w28k256r3s3p1g32_nchw",
    "grouped resnext, stride 2": "n1c256h56w56k256r3s3u2p1g32",
    "grouped resnext, stride 2, planes": "n1c256h56w56k256r3s3u2p1g32_nchw",
    "grouped resnext, stride 2, last": "n1c1024h14w14k1024r3s3u2p1g32_nchw",
    "grouped regnet": "n1c224h28w28k224r3s3p1g4",
    "grouped regnet, planes": "n1c448h14w14k448r3s3p1g8_nchw",
    "grouped regnet, batch 8": "n8c64h56w56k64r3s3u2p1g4",
    "grouped shufflenet, 1x1": "n1c240h28w28k240r1s1g3",
    "grouped shufflenet, 1x1, planes": "n1c240h28w28k240r1s1g3_nchw",
    "dilated by 2": "n1c512h28w28k512r3s3p2d2",
    "dilated by 2, planes": "n1c256h28w28k256r3s3p2d2_nchw",
    "dilated by 4": "n1c512h28w28k512r3s3p4d4",
    "dilated by 6, depthwise": "n1c320h33w33k320r3s3p6d6g320",
    "deeplab by 6": "n1c320h33w33k256r3s3p6d6",
    "deeplab by 12": "n1c2048h28w28k256r3s3p12d12",
    "deeplab by 12, planes": "n1c2048h28w28k256r3s3p12d12_nchw",
    "deeplab by 18": "n1c320h33w33k256r3s3p18d18",
    "deeplab by 24": "n1c2048h28w28k256r3s3p24d24",
    "deeplab by 24, planes": "n1c2048h28w28k256r3s3p24d24_nchw",
    "deeplab by 36": "n1c2048h28w28k256r3s3p36d36",
    "deeplab by 36, planes": "n1c2048h28w28k256r3s3p36d36_nchw",
}


def problem(name: str) -> Problem:
    """A layer by its name."""
    shape, _, layout = LAYERS[name].partition("_")
    return Problem.parse(f"{shape}_f32{'_nchw' if layout else ''}_forward")


def calls(p: Problem) -> tuple:
    """torch and ours on the same tensors, the weight laid out as in a model of that layout."""
    x, weight, *_ = random_operands(p)
    if p.layout == "nhwc":
        weight = weight.contiguous(memory_format=torch.channels_last)
    options = (None, p.stride, (p.padding[0], p.padding[2]), p.dilation, p.groups)
    return (lambda: F.conv2d(x, weight, *options), lambda: tilewise.conv2d(x, weight, *options))


def compared(name: str, target: Target, rounds: int) -> dict:
    """A layer's times, and what was chosen."""
    p = problem(name)
    plan = ENGINE.plan(p, target)
    theirs, ours = interleaved(calls(p), rounds, 0.01, 4)
    return {"subject": name, "problem": str(p), "algorithm": plan.algorithm,
            "estimate": plan.seconds, "torch": theirs.minimum, "tilewise": ours.minimum,
            "ratio": theirs.minimum / ours.minimum}


def candidates(name: str, target: Target, rounds: int) -> dict:
    """Seconds of every candidate of a layer, as benchmarks/planner.py saves them."""
    p = problem(name)
    found = {c.plan.algorithm: c.plan for c in tilewise.explain(p, target=target).candidates
             if c.plan and c.algorithm != "reference"}
    least = min(plan.seconds for plan in found.values())
    found = {key: plan for key, plan in found.items() if plan.seconds < 6 * least}
    torch_, _ = calls(p)
    runs = [torch_, *(ENGINE.start(plan) for plan in found.values())]
    first, *times = interleaved(runs, rounds, 0.0, 4)
    seconds = {key: time.minimum for key, time in zip(found, times, strict=True)}
    best = min(seconds, key=seconds.__getitem__)
    return {"subject": name, "problem": str(p), "seconds": seconds, "torch": first.minimum,
            "measure": best, "estimate": ENGINE.plan(p, target).algorithm}


def fine(paths: list[Path]) -> dict[str, list[str]]:
    """By layer, the algorithms that were not slower than .9 of torch's."""
    least: dict[str, dict[str, float]] = {}
    for line in (line for path in paths for line in path.read_text().splitlines()):
        row = json.loads(line)
        known = least.setdefault(row["subject"], {})
        for key, time in row["seconds"].items():
            known[key] = min(time, known.get(key, time))
    return {name: sorted(key for key, time in least[name].items()
                         if ENOUGH * time <= least[name]["vendor"]) for name in LAYERS}


def as_lines(table: dict[str, list[str]]) -> str:
    """JSON, a line a layer."""
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {json.dumps(names)}"
                              for name, names in table.items()) + "\n}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="beginnings of names; all without")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", type=Path, help="file for times of all candidates, a line each")
    parser.add_argument("--fine", type=Path, nargs="+", help="such files: print what is fine")
    parser.add_argument("-o", "--output", type=Path, help="a result file to write")
    args = parser.parse_args()
    if args.fine:
        print(as_lines(fine(args.fine)))
        return
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    target = Target.host(threads=args.threads)
    chosen = [name for name in LAYERS if name.startswith(tuple(args.names) or "")]
    if args.save:
        save(chosen, target, args.rounds, args.save)
        return
    rows = []
    for name in chosen:
        rows.append(compared(name, target, args.rounds))
        show(rows[-1])
    slow = [row["subject"] for row in rows if row["ratio"] < ENOUGH]
    print(f"{len(rows)} layers, {len(slow)} below {ENOUGH} of torch: {'; '.join(slow)}")
    if args.output:
        Result("layers", shlex.join(["python", *sys.argv]), date.today().isoformat(),
               machine.facts(args.threads), {"rounds": args.rounds}, rows).save(args.output)


def show(row: dict) -> None:
    print(f"{row['subject']:36} {row['algorithm']:14} torch {row['torch'] * 1e3:8.3f} ms, ours "
          f"{row['tilewise'] * 1e3:8.3f} (estimate {row['estimate'] * 1e3:8.3f}), "
          f"{row['ratio']:5.2f}", flush=True)


def save(names: list[str], target: Target, rounds: int, path: Path) -> None:
    for name in names:
        row = candidates(name, target, rounds)
        with path.open("a") as file:
            print(json.dumps(row), file=file)
        rest = " ".join(f"{key}={time * 1e6:.0f}" for key, time in row["seconds"].items())
        print(f"{name:36} torch={row['torch'] * 1e6:.0f} estimate {row['estimate']}: {rest}",
              flush=True)


if __name__ == "__main__":
    main()
