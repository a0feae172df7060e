"""conv1d, conv3d and conv_transpose3d against torch's better layout, interleaved.

    python benchmarks/volumes.py                  # a speech front end, and patches of volumes
    python benchmarks/volumes.py --only conv1d
    python benchmarks/volumes.py --only conv3d --gradients
    python benchmarks/volumes.py --only conv3d --taps 3 1 1
    python benchmarks/volumes.py --only transposed
    python benchmarks/volumes.py --only net --side 96   # a net as those for medical images

No speed is printed for a result that is wrong. Both run in both layouts; the speed is torch's
better time over our better time, beside it ours in planes alone, outputs included.
"""

from __future__ import annotations

import argparse
import math
import os
from functools import partial

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
from torch import nn
from torch.nn import functional as F

import tilewise
from tilewise.conv.running import ENGINE
from tilewise.planner.measure import interleaved

# channels, filters, taps and frames of a speech front end
LINES = [(80, 384, 3, 1500), (80, 384, 5, 1500), (384, 384, 3, 1500), (384, 384, 5, 1500)]
# channels and the side of a patch
VOLUMES = [(32, 32), (32, 64), (32, 96), (64, 32), (64, 64), (64, 96), (128, 32), (128, 48),
           (256, 32)]
# channels, filters, the side of a patch, taps, padding and output padding, all with stride 2
SPREAD = [(64, 32, 12, 2, 0, 0), (32, 16, 24, 2, 0, 0), (128, 64, 12, 2, 0, 0),
          (320, 256, 6, 2, 0, 0), (256, 128, 12, 2, 0, 0), (64, 32, 48, 2, 0, 0),
          (64, 32, 24, 3, 1, 1), (128, 64, 12, 3, 1, 1), (64, 32, 24, 4, 1, 0)]
RUNS = {"conv1d": (tilewise.conv1d, F.conv1d), "conv3d": (tilewise.conv3d, F.conv3d)}
WIDTHS = (32, 64, 128, 256)


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


def spread(c: int, k: int, side: int, taps: int, *more: int):
    """Ours and torch's, each in planes and channels-last."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(1, c, *[side] * 3), torch.randn(c, k, *[taps] * 3), torch.randn(k)
    return [partial(run, image, weight, bias, 2, *more)
            for run in (tilewise.conv_transpose3d, F.conv_transpose3d) for image in (x, last(x))]


def transposed(args) -> list[float]:
    return [raced(f"transposed {c:3} -> {k:3}, {taps} taps, {side} cubed",
                  spread(c, k, side, taps, *more), args) for c, k, side, taps, *more in SPREAD]


def raced(title: str, runs, args) -> float:
    """Two of ours, then two of torch's: torch's better time over our better one."""
    results = [run() for run in runs]
    apart = max(float((y - results[2]).norm() / results[2].norm()) for y in results[:2])
    assert apart < 1e-4, f"{title}: differs from torch's by {apart:.1e}"
    times = interleaved(runs, args.rounds, 0.02, args.budget)
    ours, theirs = times[:2], times[2:]
    ratio, median = (min(getattr(t, kind) for t in theirs) / min(getattr(t, kind) for t in ours)
                     for kind in ("minimum", "median"))
    print(f"{title}: {min(t.minimum for t in ours) * 1e3:.2f} ms, torch "
          f"{min(t.minimum for t in theirs) * 1e3:.2f} ms; {ratio:.2f}x (median {median:.2f}x)",
          flush=True)
    return ratio


def step(i: int, o: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv3d(i, o, 3, stride, 1), nn.InstanceNorm3d(o, affine=True),
                         nn.LeakyReLU(0.01, True))


class Net(nn.Module):
    """A U-Net of volumes: strided convolutions down, transposed ones up, instance norms."""

    def __init__(self) -> None:
        super().__init__()
        ends = list(zip((1, *WIDTHS), WIDTHS))
        self.down = nn.ModuleList(nn.Sequential(step(i, o, 1 if i == 1 else 2), step(o, o))
                                  for i, o in ends)
        self.up = nn.ModuleList(nn.ConvTranspose3d(o, i, 2, 2) for i, o in ends[:0:-1])
        self.join = nn.ModuleList(nn.Sequential(step(2 * i, i), step(i, i))
                                  for i, _ in ends[:0:-1])
        self.out = nn.Conv3d(WIDTHS[0], 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for down in self.down:
            x = down(x)
            kept.append(x)
        for up, join, other in zip(self.up, self.join, kept[-2::-1]):
            x = join(torch.cat((up(x), other), 1))
        return self.out(x)


def net(args) -> list[float]:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(1, 1, *[args.side] * 3)
    fast = tilewise.optimize(model, x)
    for _ in range(3):
        fast(x)
    near = last(x)
    runs = [lambda: fast(x), lambda: fast(near), lambda: model(x), lambda: model(near)]
    return [raced(f"net, {args.side} cubed", runs, args)]


def convolutions(name: str, args) -> list[float]:
    return [compare(name, *problem, args) for problem in problems(name, args.taps)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=[*RUNS, "transposed", "net"])
    parser.add_argument("--side", type=int, default=96, help="of the net's volume")
    parser.add_argument("--gradients", action="store_true", help="forward and backward")
    parser.add_argument("--taps", type=int, nargs=3, default=[3, 3, 3], help="of volumes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=20, help="seconds for a problem")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    others = {"transposed": transposed, "net": net}
    for name in [args.only] if args.only else (*RUNS, *others):
        ratios = others[name](args) if name in others else convolutions(name, args)
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"{name}: geometric mean {mean:.2f}x, least {min(ratios):.2f}x", flush=True)


if __name__ == "__main__":
    main()
