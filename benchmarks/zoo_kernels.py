"""How many kernels all models of the zoo need together, from an empty cache.

    python benchmarks/zoo_kernels.py
    PYTHONPATH=/path/to/another/src python benchmarks/zoo_kernels.py

Each model is optimised and run once at its own size; what several need is compiled once.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from time import perf_counter


def main() -> None:
    import torch
    from zoo_models import ZOO

    import tilewise

    start, directory = perf_counter(), Path(os.environ["TILEWISE_CACHE_DIR"])
    for name, entry in ZOO.items():
        with torch.inference_mode():
            tilewise.optimize(entry.make().eval())(torch.randn(1, *entry.shape))
        found = len(list(directory.rglob("*.o")))
        print(f"{name}: {found} kernels so far, {perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        os.environ["TILEWISE_CACHE_DIR"] = directory
        main()
