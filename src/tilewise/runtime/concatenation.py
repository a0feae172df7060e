"""torch.cat of channels, by a kernel that writes the result once from its start to its end."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.places import address
from ..core.remembered import Remembered
from ..core.schedule import Schedule
from ..kernels.cpu.between.concatenation import MOST as TOGETHER
from ..kernels.cpu.between.concatenation import Parts, make, sizes
from ..kernels.cpu.emit.launch import Launch, launch_of
from ..kernels.cpu.emit.requests import Request
from .images import Layout, as_images, channels_last, extent, pitch_of
from .pointwise import Layouts, empty, host, layouts_of
from .types import element_of


class Run(NamedTuple):
    """Launches for parts of these shapes and strides: at which column each begins, and its parts"""

    launches: tuple[tuple[Launch, int, slice], ...]
    threads: int
    made: Layout  # of a result that the caller does not give
    dtype: torch.dtype

    def __call__(self, parts: Sequence[Tensor], y: Tensor) -> Tensor:
        start = address(y)
        for launch, column, which in self.launches:
            places = [address(part) for part in parts[which]]
            places += [0] * (TOGETHER - len(places))
            launch(*places, start + self.dtype.itemsize * column, 0, 1, self.threads)
        return y


def concatenated(parts: Sequence[Tensor], out: Tensor | None = None) -> Tensor | None:
    """torch.cat(parts, 1) of channels-last images or volumes, or slices of channels of such.

    None where that is torch's to do. `out` has the result's shape, and may be such a slice too.
    """
    layouts = layouts_of(parts if out is None else (*parts, out))
    if layouts is None:
        return None
    run = _runs[layouts, out is None, torch.get_num_threads()]
    # a part must not be written over before it is read
    if run is None or (out is not None and any(_share(part, out) for part in parts)):
        return None
    return run(parts, empty(*run.made, run.dtype) if out is None else out)


def _made(layouts: Layouts, is_new: bool, threads: int) -> Run | None:
    count = len(layouts) if is_new else len(layouts) - 1
    dtype = layouts[0][2] if count else torch.float64
    element = element_of(dtype)
    if element is None or any(own != dtype or len(shape) not in (4, 5) or 0 in shape
                              for shape, _, own in layouts):
        return None
    n, _, *pixels = layouts[0][0]
    columns = [shape[1] for shape, _, _ in layouts[:count]]
    made = channels_last((n, sum(columns), *pixels))
    to = layouts[count][:2] if len(layouts) > count else made
    whole = [(n, own, *pixels) for own in columns] + [made[0]] * (len(layouts) - count)
    pitches = [pitch_of(*as_images(shape, strides)) for shape, strides, _ in layouts[:count]]
    pitch = pitch_of(*as_images(*to))
    if [tuple(shape) for shape, *_ in layouts] != whole or not all((pitch, *pitches)):
        return None
    rows = n * prod(pixels)
    target, threads = host(rows * sum(columns))
    launches = []
    for first in range(0, count, TOGETHER):
        which = slice(first, first + TOGETHER)
        parts = Parts(len(columns[which]), element)
        request = Request(make, parts, Schedule(), target.row, (), True)
        words = sizes(rows, columns[which], pitches[which], pitch)
        launches.append((launch_of(request, words), sum(columns[:first]), which))
    return Run(tuple(launches), threads, made, dtype)


def _share(a: Tensor, b: Tensor) -> bool:
    """Whether some memory may be of both; not of different channels of the same pixels."""
    ahead = b.data_ptr() - a.data_ptr()
    if not -extent(b) < ahead < extent(a):
        return False
    pitch = pitch_of(tuple(a.shape), a.stride())
    size = a.element_size()
    if pitch == 0 or pitch != pitch_of(tuple(b.shape), b.stride()) or ahead % size:
        return True
    channel = ahead // size % pitch
    return not a.shape[1] <= channel <= pitch - b.shape[1]


_runs = Remembered(_made)
