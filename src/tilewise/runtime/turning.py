"""Tensors in the layout that is asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.isa import ISA, KNOWN
from ..core.places import address
from ..core.problem import Problem
from ..core.remembered import Remembered
from ..core.schedule import Schedule
from ..core.target import Target
from ..core.watching import watcher
from ..kernels.cpu import memory
from ..kernels.cpu.between import turn
from ..kernels.cpu.emit.launch import launch_of
from ..kernels.cpu.emit.requests import Request
from .images import channels_last, pitch_of
from .pointwise import Pointwise
from .sweeps import is_plain
from .types import element_of

LAYOUTS = {"nhwc": torch.channels_last, "nchw": torch.contiguous_format}
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by rank
NAMES = {layout: name for name, layout in LAYOUTS.items()}
FEW = 1 << 15  # floats below which torch's pass is as good

_COPY = Pointwise(())


def laid_out(x: Tensor, layout: torch.memory_format, pooled: bool = True) -> Tensor:
    """x.contiguous(memory_format=layout), for a plain tensor that autograd does not follow.

    What a caller gets and may resize does not come from the pool.
    """
    if x.is_contiguous(memory_format=layout):
        return x
    if x.dim() == 5:
        return _volumes(x, layout, pooled)
    turned = _turned(x, NAMES[layout], pooled)
    if turned is None and layout is torch.channels_last and _is_slice(x):
        turned = _COPY([x])
    return x.contiguous(memory_format=layout) if turned is None else turned


def _is_slice(x: Tensor) -> bool:
    """Whether pixels lie further apart than they have channels."""
    return pitch_of(tuple(x.shape), x.stride()) > 0


def _volumes(x: Tensor, layout: torch.memory_format, pooled: bool) -> Tensor:
    """The same of (N, C, D, H, W), as images of D * H rows."""
    to_last = layout is torch.channels_last_3d
    other = torch.contiguous_format if to_last else torch.channels_last_3d
    if not x.is_contiguous(memory_format=other):
        return x.contiguous(memory_format=layout)
    two = torch.channels_last if to_last else layout
    y = laid_out(x.flatten(2, 3), two, pooled)
    # not unflatten, which gives one volume any stride
    return y.as_strided(*channels_last(tuple(x.shape))) if to_last else y.view(x.shape)


def copied(x: Tensor, layout: str) -> Tensor:
    """A copy with the layout's strides, also where a size of one would allow others."""
    turned = _turned(x, layout)
    if turned is not None:
        return turned
    if layout == "nchw":
        return memory.keep(x)
    return memory.keep(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def _turned(x: Tensor, layout: str, pooled: bool = True) -> Tensor | None:
    """The image in the other of the two layouts; None where that is torch's to do."""
    other = LAYOUTS["nchw" if layout == "nhwc" else "nhwc"]
    recorded = watcher() is not None  # then torch's pass would be a step of its own
    if (not KNOWN or (x.numel() < FEW and not recorded) or element_of(x.dtype) is None
            or not x.is_cpu or x.dim() != 4 or not x.is_contiguous(memory_format=other)):
        return None
    n, c, h, w = x.shape
    target = Target.host(threads=torch.get_num_threads())
    short = 4 if layout == "nchw" and not recorded else 1
    if h * w < target.lanes * short:  # short planes are torch's
        return None
    empty = memory.empty if pooled else _fresh
    shape = (n, h, w, c) if layout == "nhwc" else (n, c, h, w)
    y = empty(*shape, dtype=x.dtype)
    y = y.permute(0, 3, 1, 2) if layout == "nhwc" else y
    launch_of(_requests[c, layout, target.isa, element_of(x.dtype)], (h * w, h * w))(
        address(x), 0, 0, 0, address(y), 0, n, target.threads)
    return y


def joined_planes(parts: Sequence[Tensor]) -> Tensor | None:
    """torch.cat(parts, 2) of (N, C, L), pixels of channels-last images: planes, one behind the
    other. None where that is torch's to do."""
    target = Target.host(threads=torch.get_num_threads())
    if not all(_are_pixels(x, target.lanes) for x in parts) or len(
            {x.shape[:2] for x in parts}) != 1:
        return None
    n, c, _ = parts[0].shape
    whole = sum(x.shape[2] for x in parts)
    y, first = memory.empty(n, c, whole), 0
    for x in parts:
        launch_of(_requests[c, "nchw", target.isa, "f32"], (x.shape[2], whole))(
            address(x), 0, 0, 0, address(y) + 4 * first, 0, n, target.threads)
        first += x.shape[2]
    return y


def _are_pixels(x: Tensor, least: int) -> bool:
    if not is_plain(x) or x.dim() != 3 or 0 in x.shape[:2] or x.shape[2] < least:
        return False
    n, c, length = x.shape
    return c > 1 and x.stride()[1:] == (1, c) and (n == 1 or x.stride(0) == c * length)


def _fresh(*shape: int, dtype: torch.dtype) -> Tensor:
    return memory.noted(torch.empty(shape, dtype=dtype), pooled=False)


def _request(channels: int, layout: str, isa: str, dtype: str) -> Request:
    kernel = Problem(1, channels, 1, 1, 1, 1, 1, dtype=dtype, layout=layout)
    return Request(turn.make, kernel, Schedule(), ISA[isa], (), True)


_requests = Remembered(_request)
