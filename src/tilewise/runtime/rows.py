"""Tensors as rows: the last axis side by side, all others evenly apart."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.places import address, address_or_null
from ..core.remembered import Remembered
from ..kernels.cpu import memory
from ..kernels.cpu.emit.launch import Launch
from .images import pitch_of
from .sweeps import is_plain, plain_element

POOLED = 2 << 20  # bytes from which memory of the pool is worth what it takes to get it
MOST = 512  # runs that are remembered
Sizes = tuple[int, ...]


class Rows(NamedTuple):
    """So many rows of columns, a pitch apart, and threads; `made` is a result's form."""

    rows: int
    columns: int
    pitch: int
    threads: int
    made: tuple[Sizes, Sizes]


def rows_of(shape: Sizes, strides: Sizes, threads: int) -> Rows | None:
    """Along the last axis; strides of a size of one say nothing."""
    if not shape or 0 in shape or (shape[-1] > 1 and strides[-1] != 1):
        return None
    columns, rows = shape[-1], 1
    pitch: int | None = None
    for size, stride in zip(shape[-2::-1], strides[-2::-1]):
        if size == 1:
            continue
        pitch = stride if pitch is None else pitch
        if stride != pitch * rows:
            return None
        rows *= size
    pitch = columns if pitch is None else pitch
    dense = tuple(prod(shape[axis + 1:]) for axis in range(len(shape)))
    return Rows(rows, columns, pitch, threads, (shape, dense)) if pitch >= columns else None


def pixels_of(shape: Sizes, strides: Sizes, threads: int) -> Rows | None:
    """Channels of channels-last images, or of slices of their channels; so is the result."""
    pitch = pitch_of(shape, strides)
    if not pitch:
        return None
    n, c, h, w = shape
    return Rows(n * h * w, c, pitch, threads, (shape, (h * w * c, 1, w * c, c)))


class Run(NamedTuple):
    """A launch for tensors of one form."""

    launch: Launch
    threads: int
    made: tuple[Sizes, Sizes]
    scratch: int = 0  # floats
    dtype: torch.dtype = torch.float32  # of x and y

    def __call__(self, x: Tensor, weight: Tensor | None = None,
                 bias: Tensor | None = None) -> Tensor:
        y = _empty(*self.made, self.dtype)
        between = memory.empty(self.scratch) if self.scratch else None
        self.launch(address(x), address_or_null(weight), address_or_null(bias), 0, address(y),
                    address_or_null(between), 1, self.threads)
        return y


def _empty(shape: Sizes, strides: Sizes, dtype: torch.dtype) -> Tensor:
    """A result without gaps, not yet written."""
    count = prod(shape)
    if dtype.itemsize * count < POOLED:
        return memory.noted(torch.empty_strided(shape, strides, dtype=dtype))
    return memory.empty(count, dtype=dtype).as_strided(shape, strides)


class Runs:
    """What make(shape, strides, threads, *arguments) gave for such tensors and arguments.

    With `halves`, those of 16 bits too: the last argument says what they hold.
    """

    def __init__(self, make: Callable[..., Run | None], halves: bool = False) -> None:
        self._known, self._halves = Remembered(make, MOST), halves

    def __call__(self, x: Tensor, *arguments: Any) -> Run | None:
        element = plain_element(x)
        if element is None or not (self._halves or element == "f32"):
            return None
        key = (tuple(x.shape), x.stride(), torch.get_num_threads(), *arguments)
        return self._known[(*key, element) if self._halves else key]


def is_vector(x: Tensor | None, size: int) -> bool:
    """Whether there is none, or one that a kernel can read."""
    return x is None or (is_plain(x) and not x.is_neg() and x.shape == (size,)
                         and (size == 1 or x.stride(0) == 1))
