"""Softmax of tensors whose axis, or what is behind it, lies side by side; else it is torch's."""

from __future__ import annotations

from math import prod

from torch import Tensor

from ..core.schedule import Schedule
from ..core.target import Target
from ..kernels.cpu.between import softmax as kernels
from ..kernels.cpu.between import softmax_across as across
from ..kernels.cpu.emit.launch import launcher
from .rows import Run, Runs, Sizes, pixels_of, rows_of
from .sweeps import ANY

FEW = 1 << 15  # floats below which one thread is done before another began


def softmax(x: Tensor, dim: int) -> Tensor | None:
    """torch.softmax over the last axis, over the channels of channels-last images, or over planes.

    The result of those lies as x does.
    """
    run = _runs(x, dim)
    return None if run is None else run(x)


def _made(shape: Sizes, strides: Sizes, threads: int, dim: int) -> Run | None:
    if not -len(shape) <= dim < len(shape):
        return None
    axis = dim % len(shape)
    rows = rows_of(shape, strides, threads) if axis == len(shape) - 1 else None
    if rows is None and axis == 1:
        rows = pixels_of(shape, strides, threads)
    if rows is None:
        return _across(shape, strides, threads, axis)
    words = kernels.sizes(rows.rows, rows.columns, rows.pitch, rows.columns)
    launch = launcher(kernels.make, ANY, Schedule(), Target.host().row, sizes=words)
    return Run(launch, threads if rows.rows * rows.columns >= FEW else 1, rows.made)


def _across(shape: Sizes, strides: Sizes, threads: int, axis: int) -> Run | None:
    """Over planes whose pixels lie side by side; the result has no gaps, as torch's."""
    dense = tuple(prod(shape[i + 1:]) for i in range(len(shape)))
    count, planes, lanes = prod(shape), shape[axis], Target.host().lanes
    if count == 0 or not (strides == dense or _is_turned(shape, strides, axis)):
        return None
    pixels = strides[axis]
    beside = dense[axis] // pixels
    if pixels < across.TOGETHER * lanes:
        return None
    words = across.sizes(count // (planes * pixels), beside, planes, pixels, lanes)
    launch = launcher(across.make, ANY, Schedule(), Target.host().row, sizes=words)
    return Run(launch, threads if count >= FEW else 1, (shape, dense))


def _is_turned(shape: Sizes, strides: Sizes, axis: int) -> bool:
    """Whether the planes of several images lie image by image: x.transpose(1, 2) of such."""
    if len(shape) != 4 or axis != 1:
        return False
    n, planes, images, pixels = shape
    behind = (pixels, planes * pixels, 1)
    return strides[1:] == behind and (n == 1 or strides[0] == planes * images * pixels)


_runs = Runs(_made)
