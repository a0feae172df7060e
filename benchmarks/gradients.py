"""Gradients of the eight 3x3 layers of VGG16 against torch's better layout, interleaved.

    python benchmarks/gradients.py --batch 8
    python benchmarks/gradients.py --direction backward_weight --errors
    python benchmarks/gradients.py --direction backward_weight --precision high

No speed is printed for a result that is wrong. --errors also prints the rms error of both.
--precision is torch's setting; what is planned under "highest" then runs beside it.
"""

from __future__ import annotations

import argparse
import math
import os

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch

from tilewise.algorithms.reference import solve
from tilewise.conv.running import ENGINE
from tilewise.core import Problem, Target
from tilewise.planner.measure import interleaved
from tilewise.runtime.engine import PRECISIONS, random_operands

LAYERS = [(64, 64, 224), (64, 128, 112), (128, 128, 112), (128, 256, 56), (256, 256, 56),
          (256, 512, 28), (512, 512, 28), (512, 512, 14)]


def layer(c: int, k: int, size: int, batch: int, direction: str, layout: str) -> Problem:
    return Problem(batch, c, size, size, k, 3, 3, padding=(1, 1, 1, 1), direction=direction,
                   layout=layout)


def prepared_call(p: Problem, algorithm: str | None, precision: str = "highest"):
    """The plan's function on random data, inputs as after a ReLU, and its plan."""
    torch.set_float32_matmul_precision(precision)
    plan = ENGINE.plan(p, Target.host(threads=torch.get_num_threads()), algorithm=algorithm)
    torch.set_float32_matmul_precision("highest")  # of torch's own kernels
    run = ENGINE.build(plan)
    first, second, *_ = random_operands(p)
    if p.direction == "backward_weight":
        first = first.relu()
    weight = run.prepare(second)
    return (lambda: run(first, weight, None, None)), plan, (first, second)


def rms_error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


def compare(c: int, k: int, size: int, args, direction: str) -> float:
    p, q = (layer(c, k, size, args.batch, direction, layout) for layout in ("nhwc", "nchw"))
    ours, plan, operands = prepared_call(p, None, args.precision)
    plain = [] if args.precision == "highest" else [prepared_call(p, None)[0]]
    torchs = [prepared_call(problem, "vendor")[0] for problem in (p, q)]
    apart, admitted = rms_error(ours(), torchs[0]().double()), max(1e-4, PRECISIONS[args.precision])
    assert apart < admitted, f"{p}: differs from torch's by {apart:.1e}"
    mine, *others = interleaved([ours, *plain, *torchs])
    theirs = others[len(plain):]
    ratio = min(time.minimum for time in theirs) / mine.minimum
    line = (f"{p}  {mine.minimum * 1e3:7.2f} ms (median {mine.median * 1e3:.2f})  torch "
            f"{theirs[0].minimum * 1e3:.1f} / {theirs[1].minimum * 1e3:.1f}  {ratio:.2f}x  "
            f"{plan.algorithm}")
    if plain:
        line += (f"  highest {others[0].minimum * 1e3:.2f} (median {others[0].median * 1e3:.2f}), "
                 f"{others[0].minimum / mine.minimum:.2f}x")
    if args.errors:
        exact = solve(p, *operands)
        line += f"  error {rms_error(ours(), exact):.1e}, torch {rms_error(torchs[0](), exact):.1e}"
    print(line, flush=True)
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--direction", nargs="+", default=["backward_data", "backward_weight"])
    parser.add_argument("--precision", choices=PRECISIONS, default="highest")
    parser.add_argument("--errors", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for direction in args.direction:
        ratios = [compare(*sizes, args, direction) for sizes in LAYERS]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"{direction}: geometric mean {mean:.2f}x, least {min(ratios):.2f}x")


if __name__ == "__main__":
    main()
