"""Images in another type, by the kernel of concatenations: of one part, stored as the other."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.places import address
from ..core.remembered import Remembered
from ..core.schedule import Schedule
from ..kernels.cpu.between.concatenation import MOST, Parts, make, sizes
from ..kernels.cpu.emit.launch import Launch, launch_of
from ..kernels.cpu.emit.requests import Request
from .images import Layout, channels_last, is_dense, pitch_of
from .pointwise import Layouts, empty, host, layouts_of
from .types import element_of

WIDE = 1 << 10  # columns of a row, where all values are neighbours


class Run(NamedTuple):
    """The launch for such an image."""

    launch: Launch
    threads: int
    made: Layout
    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        y = empty(*self.made, self.dtype)
        self.launch(address(x), *[0] * (MOST - 1), address(y), 0, 1, self.threads)
        return y


def cast(x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """x.to(dtype) of values without gaps, or of a slice of channels; None where it is torch's."""
    layouts = layouts_of([x])
    run = layouts and _runs[layouts, dtype, torch.get_num_threads()]
    return run(x) if run else None


def _made(layouts: Layouts, dtype: torch.dtype, threads: int) -> Run | None:
    (shape, strides, own), = layouts
    shape, count, types = tuple(shape), prod(shape), (element_of(own), element_of(dtype))
    if own == dtype or None in types or count == 0:
        return None
    if is_dense(shape, strides):
        made, columns = (shape, strides), _columns(shape, strides)
        pitch = columns
    elif pitch := pitch_of(shape, strides):
        made, columns = channels_last(shape), shape[1]
    else:
        return None
    target, threads = host(count)
    request = Request(make, Parts(1, *map(str, types)), Schedule(), target.row, (), True)
    words = sizes(count // columns, [columns], [pitch], columns)
    return Run(launch_of(request, words), threads, made, dtype)


def _columns(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Of dense values in rows: enough to be worth one."""
    columns = 1
    for _, size in sorted(zip(strides, shape)):
        if columns >= WIDE:
            break
        columns *= size
    return columns


_runs = Remembered(_made)
