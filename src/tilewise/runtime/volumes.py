"""Pools and resampling of channels-last volumes: of their slices, then along the depth.

Slices are images. What they became is, seen from the depth, an image with a row for each slice.
Each returns None where torch is to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import pools, resampling
from .images import channels_last
from .sweeps import is_plain

Three = int | Sequence[int]
Pass = Callable[[Tensor], Tensor | None]


def max_pool3d(x: Tensor, kernel_size: Three, stride: Three | None = None, padding: Three = 0,
               dilation: Three = 1, ceil_mode: bool = False) -> Tensor | None:
    """torch.nn.functional.max_pool3d, without indices."""
    return _pooled(pools.max_pool2d, x, (kernel_size, stride, padding, dilation), ceil_mode)


def avg_pool3d(x: Tensor, kernel_size: Three, stride: Three | None = None, padding: Three = 0,
               ceil_mode: bool = False, count_include_pad: bool = True,
               divisor_override: int | None = None) -> Tensor | None:
    """torch.nn.functional.avg_pool3d."""
    windows = _three(kernel_size)
    if divisor_override is not None or windows is None or x.dim() != 5 or any(
            size < own for size, own in zip(x.shape[2:], windows)):  # which torch refuses
        return None
    return _pooled(pools.avg_pool2d, x, (kernel_size, stride, padding), ceil_mode,
                   count_include_pad)


def adaptive_avg_pool3d(x: Tensor, output_size: int | Sequence[int | None]) -> Tensor | None:
    """torch.nn.functional.adaptive_avg_pool3d."""
    return _adaptive(pools.adaptive_avg_pool2d, x, output_size)


def adaptive_max_pool3d(x: Tensor, output_size: int | Sequence[int | None]) -> Tensor | None:
    """torch.nn.functional.adaptive_max_pool3d, without indices."""
    return _adaptive(pools.adaptive_max_pool2d, x, output_size)


def upsample(x: Tensor, size: Any, scale_factor: Any, mode: str,
             align_corners: bool | None) -> Tensor | None:
    """torch.nn.functional.interpolate: nearest and trilinear."""
    sizes, factors = _three(size), _three(scale_factor)
    if (sizes is None) == (factors is None) or mode not in ("nearest", "trilinear"):
        return None
    if mode == "nearest" and factors is not None and any(
            int(size * factor) == 2 * size and factor != 2
            for size, factor in zip(x.shape[2:], factors)):
        return None  # torch takes this for a factor of two, or not: that depends on the layout
    plane = "nearest" if mode == "nearest" else "bilinear"

    def along(axes: slice) -> Pass:
        return lambda y: resampling.upsample(
            y, None if sizes is None else _with_columns(sizes[axes], y),
            None if factors is None else _with_columns(factors[axes], None), plane, align_corners)

    return _by_slices(x, along(slice(1, 3)), along(slice(0, 1)))


def _with_columns(depth: tuple[Any, ...], y: Tensor | None) -> tuple[Any, ...]:
    """Of both axes; along the depth columns stay as they are, in number or by their factor."""
    if len(depth) == 2:
        return depth
    return (*depth, 1.0 if y is None else y.shape[3])


def _pooled(pool: Callable[..., Tensor | None], x: Tensor, windows: Sequence[Any],
            *rest: Any) -> Tensor | None:
    """`windows` are sizes, steps, paddings and holes, each one number or three."""
    kernel, stride, *others = map(_three, windows)
    if kernel is None or (windows[1] not in (None, ()) and stride is None) or None in others:
        return None
    given = [kernel, stride or kernel, *others]
    flat = (1, 1, 0, 1)  # of a window that is a pixel
    down = [(sizes[0], none) for sizes, none in zip(given, flat) if sizes is not None]
    plane = [sizes[1:] for sizes in given if sizes is not None]
    return _by_slices(x, lambda y: pool(y, *plane, *rest), lambda y: pool(y, *down, *rest))


def _adaptive(pool: Callable[..., Tensor | None], x: Tensor, size: Any) -> Tensor | None:
    sizes = _three(size)
    if sizes is None:
        return None
    return _by_slices(x, lambda y: pool(y, sizes[1:]), lambda y: pool(y, (sizes[0], y.shape[3])))


def _by_slices(x: Tensor, plane: Pass, down: Pass) -> Tensor | None:
    """Every slice by one pass, and what they became along the depth by another."""
    if x.dim() != 5 or not is_plain(x) or 0 in x.shape or not x.is_contiguous(
            memory_format=torch.channels_last_3d):
        return None
    n, _, d, _, _ = x.shape
    y = plane(x.transpose(1, 2).flatten(0, 1))
    if y is None:
        return None
    _, c, h, w = y.shape
    stack = y.as_strided((n, c, d, h * w), (d * h * w * c, 1, h * w * c, c))
    z = down(stack)
    return None if z is None else z.as_strided(*channels_last((n, c, z.shape[2], h, w)))


def _three(value: Any) -> tuple[Any, ...] | None:
    """For depth, height and width, if it is one number or three."""
    if isinstance(value, int | float):
        return (value,) * 3
    return tuple(value) if isinstance(value, tuple | list) and len(value) == 3 else None
