"""Training steps (forward, backward, SGD with momentum) against torch's best, interleaved.

    python benchmarks/training.py vgg16 --batch 8
    python benchmarks/training.py vgg16 --batch 32 --rounds 2 --no-compile
    python benchmarks/training.py vgg16 --batch 8 --precision highest high --no-compile
    python benchmarks/training.py vgg16 --batch 8 --memory tilewise     # peak of one contender
    python benchmarks/training.py resnet50 mobilenet_v2:16              # of the zoo; batch 8, 16
    python benchmarks/training.py resnet50 unet:2 -o training.json      # what FILE has is kept
    python benchmarks/training.py resnet18 --losses 20                  # no times: losses alone

Torch's best is the best of eager contiguous, eager channels-last and torch.compile on
channels-last; of nets that it cannot train in channels-last, it is eager contiguous. Dropout
and stochastic depth are off, so that all compute the same: their losses are compared first, with
those of torch in float64. Nets that end in images learn to make zeros. The ratio by rounds is the
median of the ratios within a round.
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
import shlex
import statistics
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
from torch import nn
from zoo_models import ZOO, tensors

import tilewise
from tilewise.bench import machine
from tilewise.bench.results import Result
from tilewise.models import MODELS

CONTENDERS = ("eager nchw", "eager nhwc", "compiled", "tilewise")
SPREAD = 4  # times that torch's forms differ, which is admitted after the first step
EQUAL = 1e-4  # losses of the first steps, relative
# PyTorch 2.13's training in channels-last ends the process of two: "corrupted size vs. prev_size".
# Signals have no such layout.
PLANES = {"repvgg_a2", "fastvit_t8", "audio1d"}
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
    last = torch.channels_last_3d if x.dim() == 5 else torch.channels_last
    model, x = model.to(memory_format=last), x.contiguous(memory_format=last)
    return stepper(torch.compile(model) if name == "compiled" else model, x, labels)


def made(name: str) -> nn.Module:
    """In training mode, without what draws random numbers."""
    torch.manual_seed(0)
    model = (MODELS[name]() if name in MODELS else ZOO[name].make()).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout) or type(module).__name__ == "StochasticDepth":
            module.p = 0.0
    return model


def data(name: str, batch: int, args) -> tuple[torch.Tensor, torch.Tensor]:
    side = args.size or (224 if name in MODELS else 0)
    shape = (3, side, side) if side else ZOO[name].shape
    return torch.randn(batch, *shape), torch.randint(0, 1000, (batch,))


def exact_losses(model: nn.Module, x: torch.Tensor, labels: torch.Tensor,
                 steps: int) -> list[float]:
    """Of torch in float64."""
    step = stepper(copy.deepcopy(model).double(), x.double(), labels)
    return [step() for _ in range(steps)]


def apart(losses: list[float], right: list[float]) -> float:
    return max(abs(one - other) / abs(other) for one, other in zip(losses, right, strict=True))


def check(losses: dict[str, list[float]], theirs: int, right: list[float]) -> None:
    """Ours are as near to float64 as torch's forms are, or near enough.

    Some nets make much of a rounding: after a step, torch's own forms differ by thousandths.
    """
    spread = SPREAD * max(apart(found, right) for found in list(losses.values())[:theirs])
    for one, found in losses.items():
        assert apart(found, right) < max(APART[precision_of(one)], spread), (one, losses, right)


def compare_losses(name: str, batch: int, args) -> None:
    """Of so many steps from the same weights, on the same images."""
    model, (x, labels) = made(name), data(name, batch, args)
    right = exact_losses(model, x, labels, args.losses)

    def far(one: str) -> float:
        step = contender(one, model, x, labels)
        return apart([step() for _ in right], right)

    theirs, ours = max(map(far, torchs(name, no_compile=True))), far("tilewise")
    print(f"{name} batch {batch}, {args.losses} steps from loss {right[0]:.4f} to "
          f"{right[-1]:.4f} in float64: ours within {ours:.1e}, torch's within {theirs:.1e}",
          flush=True)
    assert ours < max(EQUAL, SPREAD * theirs)


def torchs(name: str, no_compile: bool) -> list[str]:
    """Its forms that are compared with: those that run."""
    return [one for one in CONTENDERS[:3] if not (no_compile and one == "compiled")
            and (one == "eager nchw" or name not in PLANES)]


def compare(name: str, batch: int, args) -> list[dict[str, Any]]:
    """A row for each precision of ours."""
    model, (x, labels) = made(name), data(name, batch, args)
    ours = ["tilewise" if one == "highest" else f"tilewise {one}" for one in args.precision]
    names = [*torchs(name, args.no_compile), *ours]
    steps = {one: contender(one, model, x, labels) for one in names}
    losses = {one: [step() for _ in range(2)] for one, step in steps.items()}
    check(losses, len(names) - len(ours), exact_losses(model, x, labels, 2))
    times: dict[str, list[float]] = {one: [] for one in names}
    for _ in range(args.rounds):
        for one, step in steps.items():
            start = time.perf_counter()
            step()
            times[one].append(time.perf_counter() - start)
    for one in names:
        least = min(times[one])
        print(f"{one:16} {least * 1e3:8.0f} ms  median {statistics.median(times[one]) * 1e3:8.0f}"
              f"  {batch / least:6.2f} images/s", flush=True)
    theirs = {one: found for one, found in times.items() if one not in ours}
    return [row_of(name, batch, one, times[one], theirs) for one in ours]


def row_of(name: str, batch: int, one: str, own: list[float],
           theirs: dict[str, list[float]]) -> dict[str, Any]:
    """Seconds by the minimum, beside the quickest of torch's forms."""
    best = min(theirs, key=lambda other: min(theirs[other]))
    ratio = min(theirs[best]) / min(own)
    rounds = statistics.median(min(found) / mine
                               for mine, *found in zip(own, *theirs.values(), strict=True))
    print(f"{name} batch {batch}: {one} {ratio:.2f}x torch's best, {rounds:.2f}x by rounds",
          flush=True)
    return {"model": name, "batch": batch, "precision": precision_of(one), "seconds": min(own),
            "best": best, "torch": min(theirs[best]), "ratio": ratio, "rounds": rounds}


def known(path: Path | None) -> list[dict[str, Any]]:
    return Result.load(path).of("training-steps", path=path).rows if path and path.exists() else []


def keep(args, rows: list[dict[str, Any]]) -> None:
    """After each model: a long run can be cut off and goes on."""
    if args.output:
        Result("training-steps", shlex.join(["python", *sys.argv]), date.today().isoformat(),
               machine.facts(torch.get_num_threads(), limits=False), {"rounds": args.rounds},
               rows).save(args.output)


def model_and_batch(text: str) -> tuple[str, int | None]:
    name, _, batch = text.partition(":")
    if name not in {*MODELS, *ZOO} or not (batch or "1").isdigit():
        raise argparse.ArgumentTypeError(f"model is {text!r}, needs one of "
                                         f"{', '.join(sorted({*MODELS, *ZOO}))}, and :BATCH if "
                                         "it has one of its own")
    return name, int(batch) if batch else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=model_and_batch, help="such as resnet50:4")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=0, help="of images; the zoo's if not said")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--precision", nargs="+", choices=APART, default=["highest"])
    parser.add_argument("--losses", type=int, default=0, help="steps whose losses are compared")
    parser.add_argument("--memory", choices=CONTENDERS, help="run one alone, print its peak")
    parser.add_argument("-o", "--output", type=Path, help="keep rows here; those it has stay")
    args = parser.parse_args()
    rows = known(args.output)
    for name, own in args.models:
        batch = own or args.batch
        if args.losses:
            compare_losses(name, batch, args)
        elif args.memory:
            print_peak(name, batch, args)
        elif not any((row["model"], row["batch"]) == (name, batch) for row in rows):
            rows += compare(name, batch, args)
            keep(args, rows)


def print_peak(name: str, batch: int, args) -> None:
    step = contender(args.memory, made(name), *data(name, batch, args))
    for _ in range(3):
        step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{name}, {args.memory}: peak resident memory {peak:.2f} GB")


if __name__ == "__main__":
    main()
