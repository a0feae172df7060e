"""What the first forward costs after optimize(model), and the memory that it adds.

    python benchmarks/first_forward.py vgg16 --batch 8
    python benchmarks/first_forward.py resnet50 --release

Two processes with one fresh cache directory: the first compiles every kernel, the second loads
them. Memory is what the process holds more than before, activations aside, as a share of the
model's weights.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
from time import perf_counter


def resident() -> int:
    """Bytes of memory that this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(args) -> str:
    import torch

    import tilewise
    from tilewise.models import MODELS
    from tilewise.runtime.weights import MADE

    torch.manual_seed(0)
    model = MODELS[args.model]().eval()
    weights = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    x = torch.randn(args.batch, *((1, model.size, model.size) if hasattr(model, "size")
                                  else (3, 224, 224)))
    tilewise.set_memory_limit(pool=0)  # outputs are not kept, and so not counted
    with torch.no_grad():
        model(x[:1])
        gc.collect()
        before, start = resident(), perf_counter()
        model = tilewise.optimize(model, keep_original=not args.release)
        model(x)
        seconds = perf_counter() - start
        gc.collect()
    return (f"{seconds:.2f} s, {(resident() - before) / weights:.2f} of the weights' "
            f"{weights / 1e6:.0f} MB more memory, {MADE.total / weights:.2f} in prepared weights")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=8)
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
                                   stdout=subprocess.PIPE).stdout.strip()
            print(f"{args.model} batch {args.batch}, first forward, {name} cache: {found}")


if __name__ == "__main__":
    main()
