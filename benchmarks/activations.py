"""A convolution with its activation in one call, beside the convolution and then torch's function.

    python benchmarks/activations.py                     # YOLOv8n at 640x640, SiLU
    python benchmarks/activations.py --model yolov8s --activation silu --rounds 15

The layers are those of the zoo's model, which needs its package. Both take turns; the ratio is the
time of two calls over that of one: the least times, and the median of the ratios within a round.
"""

from __future__ import annotations

import argparse
import os
import statistics

import torch
from zoo_models import ZOO, settle

import tilewise
from tilewise.core import Problem
from tilewise.kernels.activations import activated, apart
from tilewise.planner.measure import interleaved
from tilewise.runtime.engine import random_operands


def layers(name: str, activation: str) -> dict[str, int]:
    """The distinct convolutions of a model that have the activation behind them, and how often."""
    model, x = settle(ZOO[name].make()).eval(), torch.randn(1, *ZOO[name].shape)
    with torch.no_grad():
        told = tilewise.explain(tilewise.optimize(model, x), x)
    found: dict[str, int] = {}
    for _, explanation in told.layers:
        if explanation.problem.epilogue.activation == activation:
            text = str(explanation.problem)
            found[text] = found.get(text, 0) + 1
    return found


def ratio(text: str, rounds: int) -> tuple[float, float, float, float, str]:
    """Seconds of two calls and of one, how many times less that is, by rounds too, and by what."""
    p = Problem.parse(text)
    x, weight, channels, residual = (t if t is None or t.dim() == 1 else t.contiguous(
        memory_format=torch.channels_last) for t in random_operands(p))
    options = {"stride": p.stride, "padding": p.padding, "dilation": p.dilation,
               "groups": p.groups, "residual": residual}
    (bias, slope), step = apart(p, channels), p.epilogue.activation

    def one() -> torch.Tensor:
        return tilewise.conv2d(x, weight, bias, activation=step, slope=slope, **options)

    def two() -> torch.Tensor:
        return activated(tilewise.conv2d(x, weight, bias, **options), step, slope)

    sums = torch.nn.functional.conv2d(
        x.double(), weight.double(), None if bias is None else bias.double(), p.stride,
        p.padding[::2], p.dilation, p.groups) + (0 if residual is None else residual.double())
    exact = activated(sums, step, None if slope is None else slope.double())
    error = float((one() - exact).norm() / exact.norm())
    assert error < 1e-5, f"{text}: error is {error:.1e}: no speed is told of a wrong result"
    ours, theirs = interleaved([one, two], rounds, 0.02, 20)
    paired = statistics.median(b / a for a, b in zip(ours.samples, theirs.samples, strict=True))
    chosen = tilewise.explain(p).plan
    return theirs.minimum, ours.minimum, theirs.minimum / ours.minimum, paired, chosen.algorithm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="yolov8n", choices=ZOO)
    parser.add_argument("--activation", default="silu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    ratios, sums = [], [0.0, 0.0]
    with torch.no_grad():
        for text, count in layers(args.model, args.activation).items():
            two, one, least, paired, by = ratio(text, args.rounds)
            ratios.append(paired)
            sums = [sums[0] + count * two, sums[1] + count * one]
            print(f"{text:62} {count}x  {two * 1e6:8.0f} -> {one * 1e6:8.0f} us  {least:5.2f}x  "
                  f"{paired:5.2f}x by rounds  {by}", flush=True)
    print(f"{len(ratios)} layers: {statistics.geometric_mean(ratios):.2f}x in the geometric mean, "
          f"{min(ratios):.2f}x at least, {sums[0] / sums[1]:.2f}x in all")


if __name__ == "__main__":
    main()
