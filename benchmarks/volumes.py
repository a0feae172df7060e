"""conv1d and conv3d against torch's better layout, interleaved.

    python benchmarks/volumes.py                  # a speech front end, and patches of volumes
    python benchmarks/volumes.py --only conv1d
    python benchmarks/volumes.py --only conv3d --gradients
    python benchmarks/volumes.py --only conv3d --taps 3 1 1

No speed is printed for a result that is wrong. Both run in both layouts; the speed is torch's
better time over our better time, beside it ours in planes alone, outputs included.
"""

from __future__ import annotations

import argparse
import math
import os

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
from torch.nn import functional as F

import tilewise
from tilewise.conv.ops import ENGINE
from tilewise.planner.measure import interleaved

# channels, filters, taps and frames of a speech front end
LINES = [(80, 384, 3, 1500), (80, 384, 5, 1500), (384, 384, 3, 1500), (384, 384, 5, 1500)]
# channels and the side of a patch
VOLUMES = [(32, 32), (32, 64), (32, 96), (64, 32), (64, 64), (64, 96), (128, 32), (128, 48),
           (256, 32)]
RUNS = {"conv1d": (tilewise.conv1d, F.conv1d), "conv3d": (tilewise.conv3d, F.conv3d)}


def last(x: torch.Tensor) -> torch.Tensor:
    """Channels side by side, as torch's channels-last formats have them."""
    axes = range(1, x.dim() - 1)
    return x.permute(0, *range(2, x.dim()), 1).contiguous().permute(0, x.dim() - 1, *axes)


def problems(name: str, depth: list[int]):
    """A title, the shape of the input and that of the weight; `depth` are the taps of volumes."""
    if name == "conv1d":
        for c, k, taps, frames in LINES:
            yield f"{c:3} -> {k:3}, {taps} taps, {frames} frames", (1, c, frames), (k, c, taps)
    else:
        for c, side in VOLUMES:
            yield f"{c:3} -> {c:3}, {side} cubed", (1, c, *[side] * 3), (c, c, *depth)


def calls(name: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor):
    """Ours in planes and channels-last, then torch's; padded to the size of the input."""
    ours, theirs = RUNS[name]
    pad, near = [taps // 2 for taps in weight.shape[2:]], last(x)
    packed = last(weight) if name == "conv3d" else weight
    return [lambda: ours(x, weight, bias, padding=pad),
            lambda: ours(near, weight, bias, padding=pad),
            lambda: theirs(x, weight, bias, padding=pad),
            lambda: theirs(near, packed, bias, padding=pad)]


def steps(name: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor):
    """The same with all gradients."""
    made = []
    for place, run in enumerate((*RUNS[name][:1] * 2, *RUNS[name][1:] * 2)):
        mine = (last(x) if place % 2 else x).clone().requires_grad_()
        leaves = [mine, *(t.clone().requires_grad_() for t in (weight, bias))]

        def step(run=run, leaves=leaves):
            with torch.enable_grad():
                y = run(*leaves, padding=[taps // 2 for taps in weight.shape[2:]])
                return torch.autograd.grad(y, leaves, torch.ones_like(y))[1]

        made.append(step)
    return made


def compare(name: str, title: str, shape, taps, args) -> float:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(shape), torch.randn(taps), torch.randn(taps[0])
    plans: list[str] = []
    ENGINE.observers.append(lambda plan: plans.append(plan.algorithm))
    runs = (steps if args.gradients else calls)(name, x, weight, bias)
    results = [run() for run in runs]
    ENGINE.observers.clear()
    apart = max(float((y - results[2]).norm() / results[2].norm()) for y in results[:2])
    assert apart < 1e-4, f"{title}: differs from torch's by {apart:.1e}"
    del results
    times = interleaved(runs, args.rounds, 0.02, args.budget)
    planes, near, *theirs = [time.minimum for time in times]
    medians = [time.median for time in times]
    ratio, median = min(theirs) / min(planes, near), min(medians[2:]) / min(medians[:2])
    print(f"{name} {title}: {near * 1e3:7.2f} ms channels-last, {planes * 1e3:7.2f} in planes; "
          f"torch {theirs[1] * 1e3:7.2f} and {theirs[0] * 1e3:7.2f}; {ratio:.2f}x (median "
          f"{median:.2f}x, planes {min(theirs) / planes:.2f}x)  "
          f"{', '.join(dict.fromkeys(plans)) or 'torch'}", flush=True)
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=RUNS)
    parser.add_argument("--gradients", action="store_true", help="forward and backward")
    parser.add_argument("--taps", type=int, nargs=3, default=[3, 3, 3], help="of volumes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=20, help="seconds for a problem")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    for name in [args.only] if args.only else RUNS:
        ratios = [compare(name, *problem, args) for problem in problems(name, args.taps)]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"{name}: geometric mean {mean:.2f}x, least {min(ratios):.2f}x", flush=True)


if __name__ == "__main__":
    main()
