"""Training steps (forward, backward, SGD with momentum) against torch's best, interleaved.

    python benchmarks/training.py vgg16 --batch 8
    python benchmarks/training.py vgg16 --batch 32 --rounds 2 --no-compile
    python benchmarks/training.py vgg16 --batch 8 --precision highest high --no-compile
    python benchmarks/training.py vgg16 --batch 8 --memory tilewise     # peak of one contender

Torch's best is the best of eager contiguous, eager channels-last and torch.compile on
channels-last. Dropout is off, so that all compute the same: their losses are compared first.
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

import tilewise
from tilewise.models import MODELS

CONTENDERS = ("eager nchw", "eager nhwc", "compiled", "tilewise")
APART = {"highest": 1e-3, "high": 1e-3, "medium": 2e-2}  # losses, relative


def stepper(model: nn.Module, x: torch.Tensor, labels: torch.Tensor, precision: str = "highest"):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    def step() -> float:
        torch.set_float32_matmul_precision(precision)
        optimizer.zero_grad()
        loss = criterion(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--precision", nargs="+", choices=APART, default=["highest"])
    parser.add_argument("--memory", choices=CONTENDERS, help="run one alone, print its peak")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = MODELS[args.model]().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    x = torch.randn(args.batch, 3, args.size, args.size)
    labels = torch.randint(0, 1000, (args.batch,))
    if args.memory:
        step = contender(args.memory, model, x, labels)
        for _ in range(3):
            step()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(f"{args.memory}: peak resident memory {peak:.2f} GB")
        return
    ours = ["tilewise" if one == "highest" else f"tilewise {one}" for one in args.precision]
    names = [*(name for name in CONTENDERS[:3] if not (args.no_compile and name == "compiled")),
             *ours]
    steps = {name: contender(name, model, x, labels) for name in names}
    losses = {name: [step() for _ in range(2)] for name, step in steps.items()}
    for name in names:
        for found, theirs in zip(losses[name], losses[names[0]], strict=True):
            assert abs(found - theirs) < APART[precision_of(name)] * abs(theirs), (name, losses)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    for name in names:
        least = min(times[name])
        print(f"{name:16} {least * 1e3:8.0f} ms  median {statistics.median(times[name]) * 1e3:8.0f}"
              f"  {args.batch / least:6.2f} images/s")
    best = min(min(times[name]) for name in names if name not in ours)
    for name in ours:
        ratio = best / min(times[name])
        print(f"{args.model} batch {args.batch}: {name} {ratio:.2f}x torch's best")


if __name__ == "__main__":
    main()
