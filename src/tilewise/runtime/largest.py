"""Max-pools with gradients, on channels-last images: a byte for each result says which value it is.

Callers pass plain float32 tensors without gaps; `windows_of` says which windows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.places import address
from ..core.remembered import Remembered
from ..core.schedule import Schedule
from ..core.target import Target
from ..kernels.cpu import memory
from ..kernels.cpu.between import largest
from ..kernels.cpu.between.pools import Line, table
from ..kernels.cpu.emit.launch import Launch, launcher
from .pools import apart, two, words
from .sweeps import ALONE, ANY, Images, as_tuple
from .windows import Windows

Shape = tuple[int, ...]
Both = tuple[Windows, Windows]


class _Run(NamedTuple):
    launch: Launch
    table: Tensor
    shape: tuple[int, int, int, int]  # of what it makes
    threads: int


def windows_of(x: Tensor, kernel_size: Any, stride: Any, padding: Any, dilation: Any,
               ceil_mode: bool) -> Both | None:
    """Down and across; None where kernels or torch cannot do it."""
    if x.dim() != 4 or not x.numel() or two(as_tuple(dilation)) != (1, 1):
        return None
    taps, before = two(as_tuple(kernel_size)), two(as_tuple(padding))
    steps = taps if stride in (None, (), []) else two(as_tuple(stride))
    if taps[0] * taps[1] > largest.MOST:
        return None
    both = tuple(Windows(taps[i], steps[i], before[i], 1, bool(ceil_mode)) for i in (0, 1))
    found = both[0], both[1]
    return found if all(one.lines(size) for one, size in zip(found, x.shape[2:])) else None


def forward(x: Tensor, windows: Both) -> tuple[Tensor, Tensor]:
    """The largest value of every window, and which it is, as (N, H, W, C) bytes."""
    run = _forward[x.shape, windows, torch.get_num_threads()]
    n, c, h, w = run.shape
    y, bytes_ = memory.empty(n, h, w, c), torch.empty(n, h, w, c, dtype=torch.uint8)
    _launch(run, x, y, bytes_)
    return y.permute(0, 3, 1, 2), bytes_


def backward(grad: Tensor, bytes_: Tensor, shape: Shape, windows: Both) -> Tensor:
    """The gradient of images of this shape."""
    run = _backward[tuple(shape), windows, torch.get_num_threads()]
    n, c, h, w = run.shape
    dx = memory.empty(n, h, w, c)
    _launch(run, grad.contiguous(memory_format=torch.channels_last), dx, bytes_)
    return dx.permute(0, 3, 1, 2)


def indices(bytes_: Tensor, shape: Shape, windows: Both) -> Tensor:
    """The places in images of this shape, as torch's max-pool tells them."""
    down, across = windows
    _, h, w, _ = bytes_.shape
    rows = torch.arange(h).view(-1, 1, 1) * down.stride - down.padding
    columns = torch.arange(w).view(-1, 1) * across.stride - across.padding
    number = bytes_.long()
    places = (rows + number // across.taps) * shape[3] + columns + number % across.taps
    return places.permute(0, 3, 1, 2)


def _launch(run: _Run, x: Tensor, y: Tensor, bytes_: Tensor) -> None:
    run.launch(address(x), address(run.table), 0, 0, address(y), 0, len(x), run.threads,
               address(bytes_))


def _forward_run(shape: Shape, windows: Both, threads: int) -> _Run:
    down, across = windows
    lines = down.numbered(shape[2], across.taps), across.numbered(shape[3])
    return _run(largest.make, (across.taps,), _images(shape, threads), lines)


def _backward_run(shape: Shape, windows: Both, threads: int) -> _Run:
    down, across = windows
    h, w = (len(one.lines(size)) for one, size in zip(windows, shape[2:]))
    lines = down.turned(shape[2], across.taps), across.turned(shape[3])
    return _run(largest.make_backward, (across.taps * down.stride, across.stride),
                _images((*shape[:2], h, w), threads), lines)


def _images(shape: Shape, threads: int) -> Images:
    n, c, h, w = shape
    return Images(n, c, h, w, c, c, threads)


def _run(make: Callable[..., Any], more: Shape, x: Images,
         lines: tuple[list[Line], list[Line]]) -> _Run:
    rows, columns = lines
    work = x.n * x.c * sum(line.taps for line in rows) * sum(line.taps for line in columns)
    launch = launcher(make, ANY, Schedule(), Target.host().row, *more,
                      sizes=words(x, len(rows), len(columns), (1, 1), work))
    packed = table(apart(rows, x.w * x.pitch), apart(columns, x.pitch))
    return _Run(launch, torch.frombuffer(bytearray(packed), dtype=torch.int64),
                (x.n, x.c, len(rows), len(columns)), x.threads if work > ALONE else 1)


_forward, _backward = Remembered(_forward_run), Remembered(_backward_run)
