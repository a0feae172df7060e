"""Channel shuffle of channels-last tensors; None where torch is to compute."""

from __future__ import annotations

from torch import Tensor

from ..core.schedule import Schedule
from ..core.target import Target
from ..kernels.cpu.between import shuffle
from ..kernels.cpu.emit.launch import launcher
from .rows import Run, Runs, Sizes, pixels_of
from .sweeps import ANY

FEW = 1 << 17  # floats below which one thread is done before another began
MOST = 8  # groups that code is written for


def channel_shuffle(x: Tensor, groups: int) -> Tensor | None:
    """x.view(n, groups, c // groups, h, w).transpose(1, 2).reshape(n, c, h, w).

    Images are channels-last, or slices of the channels of such; the result is channels-last.
    """
    run = _runs(x, groups)
    return None if run is None else run(x)


def _made(shape: Sizes, strides: Sizes, threads: int, groups: int) -> Run | None:
    rows = pixels_of(shape, strides, threads)
    if rows is None or not 1 <= groups <= MOST or rows.columns % groups:
        return None
    words = shuffle.sizes(rows.rows, rows.columns, groups, rows.pitch, rows.columns)
    launch = launcher(shuffle.make, ANY, Schedule(), Target.host().row, groups, sizes=words)
    return Run(launch, threads if rows.rows * rows.columns >= FEW else 1, rows.made)


_runs = Runs(_made)
