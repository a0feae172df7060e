"""Planes to channels-last and back: ours and torch's, in turns.

    python benchmarks/turn.py
    python benchmarks/turn.py --threads 1
"""

from __future__ import annotations

import argparse
import os

import torch

from tilewise.planner.measure import interleaved
from tilewise.runtime.turning import laid_out

SHAPES = ((1, 3, 224, 224), (1, 3, 640, 640), (1, 64, 80, 80), (1, 256, 20, 20), (1, 64, 224, 224),
          (8, 64, 56, 56), (4, 2048, 7, 7))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    torch.set_num_threads(parser.parse_args().threads)
    for shape in SHAPES:
        planes = torch.randn(shape)
        for x, to in ((planes, torch.channels_last),
                      (planes.contiguous(memory_format=torch.channels_last),
                       torch.contiguous_format)):
            assert torch.equal(laid_out(x, to), x)
            theirs, ours = interleaved([lambda x=x, to=to: x.contiguous(memory_format=to),
                                        lambda x=x, to=to: laid_out(x, to)], 15, 0.005)
            print(f"{shape} to {to}: torch {theirs.minimum * 1e3:.3f} ms, ours "
                  f"{ours.minimum * 1e3:.3f}, {theirs.minimum / ours.minimum:.1f}x", flush=True)


if __name__ == "__main__":
    main()
