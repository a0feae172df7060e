"""What the first forward costs after optimize(model), and the memory that it adds.

    python benchmarks/first_forward.py vgg16 --batch 8
    python benchmarks/first_forward.py resnet50 --release

Two processes with one fresh cache directory: the first compiles every kernel, the second loads
them. Seconds "for codes" are those in which the call waits for code: its own compiling, that of
helpers, or reading. Memory is what the process holds more than before, activations aside, as a
share of the model's weights.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
from time import perf_counter
from typing import Any


def resident() -> int:
    """Bytes of memory that this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def waiting() -> list[float]:
    """Seconds of each time that code is asked for, from now on."""
    from tilewise.kernels.cpu.emit import jit

    found, load = [], jit.load

    def timed(*args: Any, **options: Any) -> Any:
        start = perf_counter()
        try:
            return load(*args, **options)
        finally:
            found.append(perf_counter() - start)

    jit.load = timed
    return found


def made(name: str) -> tuple[Any, tuple[int, ...]]:
    """A model and the shape of its images: one of ours, which need no package, or of the zoo."""
    from zoo_models import ZOO

    from tilewise.models import MODELS

    if name not in MODELS:
        return ZOO[name].make().eval(), ZOO[name].shape
    model = MODELS[name]().eval()
    return model, (1, model.size, model.size) if hasattr(model, "size") else (3, 224, 224)


def measure(args) -> str:
    import torch

    import tilewise
    from tilewise.runtime.weights import MADE

    torch.manual_seed(0)
    (model, shape), waited = made(args.model), waiting()
    weights = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    x = torch.randn(args.batch, *shape)
    tilewise.set_memory_limit(pool=0)  # outputs are not kept, and so not counted
    with torch.no_grad():
        model(x[:1])
        gc.collect()
        before, start = resident(), perf_counter()
        model = tilewise.optimize(model, keep_original=not args.release)
        model(x)
        seconds = perf_counter() - start
        gc.collect()
    return (f"{seconds:.2f} s, {sum(waited):.2f} of them for {len(waited)} codes, "
            f"{(resident() - before) / weights:.2f} of the weights' "
            f"{weights / 1e6:.0f} MB more memory, {MADE.total / weights:.2f} in prepared weights")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--release", action="store_true", help="keep_original=False")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(measure(args))
        return
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm"):
            found = subprocess.run([sys.executable, *sys.argv, "--worker"], check=True, text=True,
                                   env={**os.environ, "TILEWISE_CACHE_DIR": cache},
                                   stdout=subprocess.PIPE).stdout.splitlines()[-1]
            print(f"{args.model} batch {args.batch}, first forward, {name} cache: {found}")


if __name__ == "__main__":
    main()
