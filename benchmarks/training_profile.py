"""Where a training step's time goes: the quickest of some steps, by kind of work.

    python benchmarks/training_profile.py resnet50
    python benchmarks/training_profile.py mobilenet_v2:16 --precision high
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from training import contender, data, made, model_and_batch

from tilewise.runtime import batch_norm
from tilewise.runtime.executable import Executable

Spent = Counter[str]


def timed(call: Callable[..., Any], spent: Spent, kind: Callable[..., str]) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args, **options)
        finally:
            spent[kind(*args)] += time.perf_counter() - start

    return run


def kind_of(executable: Executable, *_: Any) -> str:
    """A transposed convolution computes its result as others do the gradient of their images."""
    if executable.plan.problem.direction == "backward_weight":
        return "gradients of weights"
    in_backward = torch._C._current_graph_task_id() != -1
    return "gradients of images" if in_backward else "convolutions forward"


def watch(spent: Spent) -> None:
    """Everything that a step calls by these names."""
    call, masked = Executable.__call__, timed(Executable.masked, spent, kind_of)
    of_weights = timed(call, spent, kind_of)

    def either(executable: Executable, *args: Any, **options: Any) -> Any:
        own = executable.plan.problem.direction == "backward_weight"  # others end in `masked`
        return (of_weights if own else call)(executable, *args, **options)

    Executable.__call__, Executable.masked = either, masked
    Executable.prepare = timed(Executable.prepare, spent, lambda *_: "weights packed")
    for name in ("forward", "backward"):
        setattr(batch_norm, name, timed(getattr(batch_norm, name), spent, lambda *_: "batch norms"))
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
