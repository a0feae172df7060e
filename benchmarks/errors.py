"""Errors of the float32 algorithms on two layers, against float64; times nothing.

    python benchmarks/errors.py
    python benchmarks/errors.py -o errors.json
    python benchmarks/errors.py --alike    # data that rounds alike everywhere, which breaks bounds
"""

from __future__ import annotations

import argparse
import shlex
import sys
from datetime import date
from pathlib import Path

import torch
from torch.nn import functional as F

from tilewise.bench import machine
from tilewise.bench.results import Result
from tilewise.conv.running import ENGINE
from tilewise.core import Problem, Target

LAYERS = ("n1c64h56w56k64r3s3p1_f32_forward", "n1c512h14w14k512r3s3p1_f32_forward")
# name, algorithm, layout, what its schedule must be like, what its error grows with
METHODS = (
    ("PyTorch, channels-last", "vendor", "nhwc", {}, "the square root of the number of products"),
    ("PyTorch, planes", "vendor", "nchw", {}, "less: it sums in blocks"),
    ("`cpu_direct`", "cpu_direct", "nhwc", {}, "the square root of the number of products"),
    ("`cpu_winograd`, F(2x2, 3x3)", "cpu_winograd", "nhwc", {"tile_h": 2, "tile_w": 2},
     "the same, with fewer products in a sum"),
    ("`cpu_winograd`, F(4x4, 3x3)", "cpu_winograd", "nhwc", {"tile_h": 4, "tile_w": 4},
     "the same, times what the transforms add"),
)


def plan(p: Problem, t: Target, algorithm: str, layout: str, tiles: dict):
    method = ENGINE.planner.algorithm(algorithm)
    default = method.default(p, t)
    offers = [default.with_(**tiles, order=order, groups=groups)
              for order in ("channels", "positions", "shared") for groups in (1, 2, 4, 8)
              ] if tiles else [default]
    schedule = next(s for s in offers if s in method.space(p, t))
    return ENGINE.planner.plan(p.with_(layout=layout), t, algorithm=algorithm, schedule=schedule)


@torch.no_grad()
def rows(text: str) -> list[dict]:
    p, t = Problem.parse(text), Target.host(threads=torch.get_num_threads())
    torch.manual_seed(0)
    images = torch.randn(p.n, p.c, p.h, p.w).relu()
    weight = torch.randn(p.k, p.c, p.r, p.s)
    exact = F.conv2d(images.double(), weight.double(), padding=1)
    found = []
    for name, algorithm, layout, tiles, grows in METHODS:
        chosen = plan(p, t, algorithm, layout, tiles)
        x = images.contiguous(memory_format=torch.channels_last) if layout == "nhwc" else images
        run = ENGINE.build(chosen)
        error = (run(x, run.prepare(weight), None, None) - exact).norm() / exact.norm()
        found.append({"subject": text, "name": name, "grows": grows, "error": float(error),
                      "declared": chosen.error})
    return found


@torch.no_grad()
def alike(text: str = "n1c2048h7w7k64r3s3_f32_forward") -> None:
    """All inputs and all weights 0.1: every rounding goes the same way."""
    p, t = Problem.parse(text), Target.host(threads=torch.get_num_threads())
    x, weight = torch.full((p.n, p.c, p.h, p.w), 0.1), torch.full((p.k, p.c, p.r, p.s), 0.1)
    x = x.contiguous(memory_format=torch.channels_last)
    exact = F.conv2d(x.double(), weight.double())
    for algorithm in ("vendor", "cpu_direct", "cpu_winograd"):
        run = ENGINE.build(ENGINE.planner.plan(p, t, algorithm=algorithm))
        error = (run(x, run.prepare(weight), None, None) - exact).norm() / exact.norm()
        print(f"{text} {algorithm}: {float(error) / run.plan.error:.1f} times what is declared")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", "--output", type=Path, help="a result file to write")
    parser.add_argument("--alike", action="store_true")
    args = parser.parse_args()
    if args.alike:
        return alike()
    found = [row for text in LAYERS for row in rows(text)]
    for row in found:
        print(f"{row['subject']} {row['name']}: {row['error']:.1e}, declared {row['declared']:.1e}")
    if args.output:
        Result("algorithms", shlex.join(["python", *sys.argv]), date.today().isoformat(),
               machine.facts(torch.get_num_threads(), limits=False), {}, found).save(args.output)


if __name__ == "__main__":
    main()
