"""Softmax of tensors whose axis lies side by side; None where torch is to compute."""

from __future__ import annotations

from torch import Tensor

from ..core.schedule import Schedule
from ..core.target import Target
from ..kernels.cpu.between import softmax as kernels
from ..kernels.cpu.emit.launch import launcher
from .rows import Run, Runs, Sizes, pixels_of, rows_of
from .sweeps import ANY

FEW = 1 << 15  # floats below which one thread is done before another began


def softmax(x: Tensor, dim: int) -> Tensor | None:
    """torch.softmax over the last axis, or over the channels of channels-last images.

    The result of those is channels-last too.
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
        return None
    words = kernels.sizes(rows.rows, rows.columns, rows.pitch, rows.columns)
    launch = launcher(kernels.make, ANY, Schedule(), Target.host().row, sizes=words)
    return Run(launch, threads if rows.rows * rows.columns >= FEW else 1, rows.made)


_runs = Runs(_made)
