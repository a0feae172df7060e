"""Elementwise operations between convolutions: ours and torch's, in turns.

    python benchmarks/pointwise.py
    python benchmarks/pointwise.py --threads 1 --rounds 30
    python benchmarks/pointwise.py --compiled            # beside torch.compile, too

Images are channels-last; x is the least time of torch's operators over the least of ours.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewise.planner.measure import interleaved
from tilewise.runtime.concatenation import concatenated
from tilewise.runtime.pointwise import Pointwise

SHAPES = ((1, 64, 80, 80), (1, 256, 40, 40), (1, 32, 112, 112), (1, 24, 56, 56), (8, 64, 56, 56))
Case = tuple[str, Callable[[], Tensor], Callable[[], Tensor | None]]


def cases(shape: tuple[int, ...]) -> Iterator[Case]:
    """A name, torch's function and ours."""
    n, c, *_ = shape
    x, y = (torch.randn(shape).contiguous(memory_format=torch.channels_last) for _ in range(2))
    each, scale, shift = torch.rand(n, c, 1, 1), torch.rand(c), torch.randn(c)
    mean, var = torch.zeros(c), torch.ones(c) - 1e-5
    vectors = ("image", "channel", "channel")
    relu, silu, gelu = (Pointwise(((name, 0),)) for name in ("relu", "silu", "gelu"))
    add, mul = (Pointwise(((name, 0, 1),)) for name in ("add", "mul"))
    norm = Pointwise((("fma", 0, 1, 2), ("relu", 3)), vectors)
    chain = Pointwise((("mul", 0, 1), ("add", 4, 2), ("silu", 5), ("add", 6, 3)),
                      ("image", "each", "channel", "image"))
    yield "relu", lambda: F.relu(x), lambda: relu((x,))
    yield "silu", lambda: F.silu(x), lambda: silu((x,))
    yield "gelu", lambda: F.gelu(x), lambda: gelu((x,))
    yield "add", lambda: x + y, lambda: add((x, y))
    yield "mul by each", lambda: x * each, lambda: mul((x, each))
    yield "cat of two", lambda: torch.cat((x, y), 1), lambda: concatenated((x, y))
    yield ("batch norm, relu", lambda: F.relu(F.batch_norm(x, mean, var, scale, shift)),
           lambda: norm((x, scale, shift)))
    yield ("scale, shift, silu, add", lambda: F.silu(x * each + scale.view(c, 1, 1)) + y,
           lambda: chain((x, each, scale, y)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compiled", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    with torch.no_grad():
        for shape in SHAPES:
            for name, theirs, ours in cases(shape):
                found, wanted = ours(), theirs()
                assert found is not None
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
                runs = [theirs, ours, *([torch.compile(theirs)] if args.compiled else [])]
                times = [t.minimum for t in interleaved(runs, args.rounds, 0.003)]
                moved = 4 * (found.numel() + x_floats(name, found.numel())) / times[1] / 1e9
                print(f"{shape!s:18} {name:24} torch {times[0] * 1e6:7.1f} us, ours "
                      f"{times[1] * 1e6:7.1f} us, {times[0] / times[1]:5.2f}x  {moved:5.1f} GB/s"
                      + (f"  compiled {times[2] * 1e6:7.1f} us, {times[2] / times[1]:5.2f}x"
                         if args.compiled else ""), flush=True)


def x_floats(name: str, made: int) -> int:
    """Floats of images that are read."""
    return 2 * made if name.endswith("add") else made


if __name__ == "__main__":
    main()
