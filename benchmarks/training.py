"""Training steps (forward, backward, SGD with momentum) against torch's best, interleaved.

    python benchmarks/training.py vgg16 --batch 8
    python benchmarks/training.py vgg16 --batch 32 --rounds 2 --no-compile
    python benchmarks/training.py vgg16 --batch 8 --memory tilewise     # peak of one contender

Torch's best is the best of eager contiguous, eager channels-last and torch.compile on
channels-last. Dropout is off, so that all compute the same: their losses are compared first.
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


def stepper(model: nn.Module, x: torch.Tensor, labels: torch.Tensor):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    def step() -> float:
        optimizer.zero_grad()
        loss = criterion(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def contender(name: str, model: nn.Module, x: torch.Tensor, labels: torch.Tensor):
    model = copy.deepcopy(model)
    if name == "tilewise":
        return stepper(tilewise.optimize(model), x, labels)
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
    names = [name for name in CONTENDERS if not (args.no_compile and name == "compiled")]
    steps = {name: contender(name, model, x, labels) for name in names}
    losses = {name: [step() for _ in range(2)] for name, step in steps.items()}
    for name in names:
        for ours, theirs in zip(losses[name], losses[names[0]], strict=True):
            assert abs(ours - theirs) < 1e-3 * abs(theirs), (name, losses)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    for name in names:
        least = min(times[name])
        print(f"{name:12} {least * 1e3:8.0f} ms  median {statistics.median(times[name]) * 1e3:8.0f}"
              f"  {args.batch / least:6.2f} images/s")
    best = min(min(times[name]) for name in names if name != "tilewise")
    print(f"{args.model} batch {args.batch}: {best / min(times['tilewise']):.2f}x torch's best")


if __name__ == "__main__":
    main()
