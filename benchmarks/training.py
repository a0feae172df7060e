"""Training steps (forward, backward, SGD with momentum) against torch's best, interleaved.

    python benchmarks/training.py vgg16 --batch 8
    python benchmarks/training.py vgg16 --batch 32 --rounds 2 --no-compile
    python benchmarks/training.py vgg16 --batch 8 --precision highest high --no-compile
    python benchmarks/training.py vgg16 --batch 8 --memory tilewise     # peak of one contender
    python benchmarks/training.py resnet50 mobilenet_v2 --batch 8       # of the zoo
    python benchmarks/training.py resnet18 --losses 20                  # no times: losses alone

Torch's best is the best of eager contiguous, eager channels-last and torch.compile on
channels-last. Dropout and stochastic depth are off, so that all compute the same: their losses are
compared first. Nets that end in images learn to make zeros. The ratio by rounds is the median of
the ratios within a round.
--losses compares the losses of the first steps with those of torch in float64. It fails where ours
are further from them than EQUAL and than SPREAD times as far as torch's in float32: steps amplify
roundings, also torch's.
--precision are settings of torch.set_float32_matmul_precision that tilewise runs under; torch runs
under "highest", float32.
"""

from __future__ import annotations

import argparse
import copy
import os
import resource
import statistics
import time

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
from torch import nn
from zoo_models import ZOO, tensors

import tilewise
from tilewise.models import MODELS

CONTENDERS = ("eager nchw", "eager nhwc", "compiled", "tilewise")
SPREAD = 4  # times that torch's forms differ, which is admitted after the first step
EQUAL = 1e-4  # losses of the first steps, relative
APART = {"highest": 1e-3, "high": 1e-3, "medium": 2e-2}  # losses, relative


def stepper(model: nn.Module, x: torch.Tensor, labels: torch.Tensor, precision: str = "highest"):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> float:
        torch.set_float32_matmul_precision(precision)
        optimizer.zero_grad()
        loss = loss_of(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def loss_of(result, labels: torch.Tensor) -> torch.Tensor:
    """Of classes; of images, their mean square."""
    outputs = list(tensors(result))
    if outputs[0].dim() == 2:
        return sum(nn.functional.cross_entropy(y, labels) for y in outputs)
    return sum(y.square().mean() for y in outputs)


def precision_of(name: str) -> str:
    """Of a contender named "tilewise" or "tilewise high"."""
    return name.partition("tilewise ")[2] or "highest"


def contender(name: str, model: nn.Module, x: torch.Tensor, labels: torch.Tensor):
    model = copy.deepcopy(model)
    if name.startswith("tilewise"):
        return stepper(tilewise.optimize(model), x, labels, precision_of(name))
    if name == "eager nchw":
        return stepper(model, x, labels)
    model, x = model.to(memory_format=torch.channels_last), x.contiguous(
        memory_format=torch.channels_last)
    return stepper(torch.compile(model) if name == "compiled" else model, x, labels)


def made(name: str) -> nn.Module:
    """In training mode, without what draws random numbers."""
    torch.manual_seed(0)
    model = (MODELS[name]() if name in MODELS else ZOO[name].make()).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout) or type(module).__name__ == "StochasticDepth":
            module.p = 0.0
    return model


def data(name: str, args) -> tuple[torch.Tensor, torch.Tensor]:
    side = args.size or (224 if name in MODELS else 0)
    shape = (3, side, side) if side else ZOO[name].shape
    return torch.randn(args.batch, *shape), torch.randint(0, 1000, (args.batch,))


def check(losses: dict[str, list[float]], theirs: int) -> None:
    """Losses as torch's first form has them, or as near as torch's forms are to each other.

    Some nets make much of a rounding: after a step, torch's own forms differ by thousandths.
    """
    for step, first in enumerate(next(iter(losses.values()))):
        known = [found[step] for found in list(losses.values())[:theirs]]
        spread = SPREAD * (max(known) - min(known)) if step else 0.0
        for one, found in losses.items():
            most = max(APART[precision_of(one)] * abs(first), spread)
            assert abs(found[step] - first) < most, (one, losses)


def compare_losses(name: str, args) -> None:
    """Of so many steps from the same weights, on the same images."""
    model, (x, labels) = made(name), data(name, args)
    exact = stepper(copy.deepcopy(model).double(), x.double(), labels)
    right = [exact() for _ in range(args.losses)]

    def far(one: str) -> float:
        step = contender(one, model, x, labels)
        return max(abs(step() - loss) / abs(loss) for loss in right)

    theirs, ours = max(far("eager nchw"), far("eager nhwc")), far("tilewise")
    print(f"{name} batch {args.batch}, {args.losses} steps from loss {right[0]:.4f} to "
          f"{right[-1]:.4f} in float64: ours within {ours:.1e}, torch's within {theirs:.1e}",
          flush=True)
    assert ours < max(EQUAL, SPREAD * theirs)


def compare(name: str, args) -> None:
    model, (x, labels) = made(name), data(name, args)
    ours = ["tilewise" if one == "highest" else f"tilewise {one}" for one in args.precision]
    names = [*(one for one in CONTENDERS[:3] if not (args.no_compile and one == "compiled")),
             *ours]
    steps = {one: contender(one, model, x, labels) for one in names}
    losses = {one: [step() for _ in range(2)] for one, step in steps.items()}
    check(losses, len(names) - len(ours))
    times: dict[str, list[float]] = {one: [] for one in names}
    for _ in range(args.rounds):
        for one, step in steps.items():
            start = time.perf_counter()
            step()
            times[one].append(time.perf_counter() - start)
    for one in names:
        least = min(times[one])
        print(f"{one:16} {least * 1e3:8.0f} ms  median {statistics.median(times[one]) * 1e3:8.0f}"
              f"  {args.batch / least:6.2f} images/s", flush=True)
    theirs = [one for one in names if one not in ours]
    for one in ours:
        ratio = min(min(times[other]) for other in theirs) / min(times[one])
        rounds = statistics.median(
            min(times[other][i] for other in theirs) / times[one][i] for i in range(args.rounds))
        print(f"{name} batch {args.batch}: {one} {ratio:.2f}x torch's best, {rounds:.2f}x by "
              "rounds", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", choices=sorted({*MODELS, *ZOO}))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=0, help="of images; the zoo's if not said")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--precision", nargs="+", choices=APART, default=["highest"])
    parser.add_argument("--losses", type=int, default=0, help="steps whose losses are compared")
    parser.add_argument("--memory", choices=CONTENDERS, help="run one alone, print its peak")
    args = parser.parse_args()
    for name in args.models:
        if args.losses:
            compare_losses(name, args)
            continue
        if not args.memory:
            compare(name, args)
            continue
        step = contender(args.memory, made(name), *data(name, args))
        for _ in range(3):
            step()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(f"{name}, {args.memory}: peak resident memory {peak:.2f} GB")


if __name__ == "__main__":
    main()
