"""Sums, means, largest values and lengths over some axes; None where torch is to compute."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from ..core.schedule import Schedule
from ..core.target import Target
from ..kernels.cpu.between import totals as kernels
from ..kernels.cpu.between.totals import LARGEST, LENGTH, SUM
from ..kernels.cpu.emit.launch import launcher
from .images import as_images
from .pointwise import pointwise
from .pools import global_average, global_largest, global_length, global_sum
from .rows import Run, Runs, Sizes, pixels_of, rows_of
from .sweeps import ANY, is_plain

FEW = 1 << 15  # floats below which one thread is done before another began
MOST = 4  # parts that one kernel adds
MEAN = -1  # a sum that is divided

KINDS = {"sum": SUM, "mean": MEAN, "amax": LARGEST, "norm": LENGTH}
OF_PIXELS = {"sum": global_sum, "mean": global_average, "amax": global_largest,
             "norm": global_length}


def total(kind: str, x: Tensor, dim: int | Sequence[int], keepdim: bool = False) -> Tensor | None:
    """x.sum(dim, keepdim), or its mean, amax or norm.

    Over the pixels of channels-last images or volumes, over the channels of images, over the last
    axis, over the first of two axes that share the channels, or over that of a few images in a
    stack.
    """
    rank = x.dim()
    given = (dim,) if isinstance(dim, int) else tuple(dim)
    axes = {axis % rank for axis in given if -rank <= axis < rank}
    if len(axes) != len(given):
        return None  # which torch refuses
    if rank == 4 and axes == {2, 3}:
        return OF_PIXELS[kind](x, keepdim)
    if rank == 4 and axes == {1, 2}:
        y = OF_PIXELS[kind](x.permute(0, 3, 1, 2), keepdim)
        return y.permute(0, 2, 3, 1) if keepdim and y is not None else y
    if rank == 5 and axes == {2, 3, 4}:
        return _of_volumes(kind, x, keepdim)
    if rank == 5 and axes <= {0, 1} and len(axes) == 1:
        return _of_parts(kind, x, min(axes), keepdim)
    run = _runs(x, KINDS[kind], min(axes), keepdim) if len(axes) == 1 else None
    return None if run is None else run(x)


def _of_volumes(kind: str, x: Tensor, keepdim: bool) -> Tensor | None:
    """Over all of a volume, as an image of the rows of all slices."""
    images = as_images(tuple(x.shape), x.stride())
    if len(images[0]) != 4 or not is_plain(x):
        return None
    y = OF_PIXELS[kind](x.as_strided(*images, x.storage_offset()), keepdim)
    return y.unsqueeze(-1) if keepdim and y is not None else y


def _of_parts(kind: str, x: Tensor, axis: int, keepdim: bool) -> Tensor | None:
    """The sum of images whose channels lie side by side, or that lie one behind the other."""
    count = x.shape[axis]
    if kind != "sum" or not 2 <= count <= MOST:
        return None
    steps = [("add", count + i - 1 if i else 0, i + 1) for i in range(count - 1)]
    y = pointwise(steps, x.unbind(axis))
    return y.unsqueeze(axis) if keepdim and y is not None else y


def _made(shape: Sizes, strides: Sizes, threads: int, kind: int, axis: int,
          keepdim: bool) -> Run | None:
    rows = rows_of(shape, strides, threads) if axis == len(shape) - 1 else None
    if rows is None and axis == 1:
        rows = pixels_of(shape, strides, threads)
    if rows is None:
        return None
    words = kernels.sizes(rows.rows, rows.columns, rows.pitch,
                          rows.columns if kind == MEAN else 1.0)
    launch = launcher(kernels.make, ANY, Schedule(), Target.host().row, max(kind, SUM),
                      sizes=words)
    left = tuple(1 if i == axis else size for i, size in enumerate(shape)
                 if keepdim or i != axis)
    dense = tuple(prod(left[i + 1:]) for i in range(len(left)))
    return Run(launch, threads if rows.rows * rows.columns >= FEW else 1, (left, dense))


_runs = Runs(_made)
