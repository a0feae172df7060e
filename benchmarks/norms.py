"""Norms, softmax and channel shuffle: ours and torch's, in turns.

    python benchmarks/norms.py
    python benchmarks/norms.py --threads 1
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewise.planner.measure import interleaved
from tilewise.runtime import norms
from tilewise.runtime.shuffling import channel_shuffle
from tilewise.runtime.softmax import softmax

Function = Callable[[Tensor, Tensor, Tensor], Tensor | None]


class Case(NamedTuple):
    """`axis`: how many values the weight and the bias have."""

    name: str
    shape: tuple[int, ...]
    ours: Function
    theirs: Function
    axis: int


def layer(*shape: int) -> Case:
    return Case("layer norm", shape, lambda x, w, b: norms.layer_norm(x, shape[-1:], w, b),
                lambda x, w, b: F.layer_norm(x, shape[-1:], w, b), -1)


def group(groups: int, *shape: int) -> Case:
    return Case(f"group norm ({groups})", shape, lambda x, w, b: norms.group_norm(x, groups, w, b),
                lambda x, w, b: F.group_norm(x, groups, w, b), 1)


def group_silu(groups: int, *shape: int) -> Case:
    return Case(f"group norm ({groups}) and SiLU", shape,
                lambda x, w, b: norms.group_norm(x, groups, w, b, activation="silu"),
                lambda x, w, b: F.silu(F.group_norm(x, groups, w, b)), 1)


def instance(*shape: int) -> Case:
    return Case("instance norm and LeakyReLU", shape,
                lambda x, w, b: norms.instance_norm(x, w, b, activation="leaky_relu"),
                lambda x, w, b: F.leaky_relu(F.instance_norm(x, None, None, w, b)), 1)


def shuffled(groups: int, *shape: int) -> Case:
    return Case(f"channel shuffle ({groups})", shape, lambda x, w, b: channel_shuffle(x, groups),
                lambda x, w, b: _torch_shuffle(x, groups), 1)


def _torch_shuffle(x: Tensor, groups: int) -> Tensor:
    n, c, h, w = x.shape
    return x.view(n, groups, c // groups, h, w).transpose(1, 2).reshape(n, c, h, w)


def softened(dim: int, *shape: int) -> Case:
    return Case(f"softmax ({dim})", shape, lambda x, w, b: softmax(x, dim),
                lambda x, w, b: torch.softmax(x, dim), 1)


CASES = (
    layer(1, 56, 56, 96), layer(1, 14, 14, 384), layer(8, 197, 768), layer(1, 7, 7, 768),
    group(32, 1, 128, 128, 128), group(32, 1, 256, 64, 64), group(1, 1, 64, 56, 56),
    group_silu(32, 1, 128, 128, 128), group_silu(32, 1, 256, 64, 64),
    instance(1, 32, 128, 128), instance(1, 256, 16, 16),
    shuffled(2, 1, 116, 28, 28), shuffled(2, 1, 48, 56, 56), shuffled(3, 1, 240, 28, 28),
    shuffled(4, 1, 272, 28, 28), shuffled(2, 1, 464, 7, 7),
    softened(-1, 1, 12, 197, 197), softened(-1, 8, 1000), softened(1, 1, 21, 128, 128),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    torch.set_num_threads(parser.parse_args().threads)
    with torch.no_grad():
        for case in CASES:
            compare(case)


def compare(case: Case) -> None:
    """Channels-last images where the second axis is that of channels, against both layouts."""
    planes = torch.randn(case.shape)
    is_image = len(case.shape) == 4 and case.axis == 1 and "(-1)" not in case.name
    x = planes.contiguous(memory_format=torch.channels_last) if is_image else planes
    weight, bias = torch.randn(2, case.shape[case.axis])
    torch.testing.assert_close(case.ours(x, weight, bias), case.theirs(x, weight, bias),
                               rtol=1e-4, atol=1e-4)
    functions = [lambda: case.ours(x, weight, bias), lambda: case.theirs(x, weight, bias)]
    if is_image:
        functions.append(lambda: case.theirs(planes, weight, bias))
    ours, *theirs = (timing.minimum * 1e6 for timing in interleaved(functions, 25, 0.003))
    told = ", ".join(f"{time:.1f} ({time / ours:.2f}x)" for time in theirs)
    layouts = "torch channels-last, planes" if is_image else "torch"
    print(f"{case.name} of {case.shape}: ours {ours:.1f} us, {layouts} {told}", flush=True)


if __name__ == "__main__":
    main()
