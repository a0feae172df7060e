"""Where a training step's time goes: the quickest of some steps, by kind of work.

    python benchmarks/training_profile.py resnet50
    python benchmarks/training_profile.py mobilenet_v2:16 --precision high
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from training import contender, data, made, model_and_batch

from tilewise.runtime import batch_norm, weights
from tilewise.runtime.executable import Executable

KINDS = {"forward": "convolutions forward", "backward_data": "gradients of images",
         "backward_weight": "gradients of weights"}
Spent = Counter[str]


def timed(call: Callable[..., Any], spent: Spent, kind: Callable[..., str]) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args, **options)
        finally:
            spent[kind(*args)] += time.perf_counter() - start

    return run


def watch(spent: Spent) -> None:
    """Everything that a step calls by these names."""
    def of_plan(executable: Executable, *_: Any) -> str:
        return KINDS[executable.plan.problem.direction]

    Executable.__call__ = timed(Executable.__call__, spent, of_plan)
    for name in ("forward", "backward"):
        setattr(batch_norm, name, timed(getattr(batch_norm, name), spent, lambda *_: "batch norms"))
    packed = weights.prepared
    for module in list(sys.modules.values()):  # those that imported it by name
        if getattr(module, "prepared", None) is packed:
            module.prepared = timed(packed, spent, lambda *_: "weights packed")
    torch.optim.SGD.step = timed(torch.optim.SGD.step, spent, lambda *_: "optimizer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=model_and_batch, help="such as resnet50:4")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=0, help="of images; the zoo's if not said")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--precision", choices=("highest", "high", "medium"), default="highest")
    args = parser.parse_args()
    name, batch = args.model
    spent: Spent = Counter()
    watch(spent)
    batch = batch or args.batch
    step = contender(f"tilewise {args.precision}", made(name), *data(name, batch, args))
    least, parts = float("inf"), spent
    for _ in range(args.steps):
        spent.clear()
        start = time.perf_counter()
        step()
        if (took := time.perf_counter() - start) < least:
            least, parts = took, spent.copy()
    print(f"{name}, batch {batch}: {1e3 * least:.0f} ms")
    for kind, seconds in [*parts.most_common(), ("the rest", least - parts.total())]:
        print(f"{kind:22} {1e3 * seconds:8.1f} ms {seconds / least:6.0%}")


if __name__ == "__main__":
    main()
