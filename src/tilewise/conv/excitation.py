"""Squeeze and excitation with gradients: the mean of an image's channels, and the product with it.

Each gives None where that is torch's to do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..runtime import excitation as kernels
from ..runtime import pools
from ..runtime.pointwise import pointwise
from .again import is_plain_gradient, is_transformed, is_unwatched
from .operators import whole


def scaled(a: Any, b: Any) -> Tensor | None:
    """a * b, where one is images and the other has a number for every channel of each."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return None
    x, scale = (a, b) if a.numel() > b.numel() else (b, a)
    if not (_is_quiet(x, scale) and kernels.takes(x, scale)):
        return None
    result: Tensor = _Scaled.apply(x, scale)
    return result


def averaged(x: Any) -> Tensor | None:
    """The mean of every channel of each image, as an image of one pixel."""
    if not (isinstance(x, Tensor) and x.dim() == 4 and x.numel() and x.dtype == torch.float32
            and _is_quiet(x) and x.is_contiguous(memory_format=torch.channels_last)):
        return None
    result: Tensor = _Averaged.apply(x)
    return result


def _is_quiet(*tensors: Tensor) -> bool:
    """Whether a gradient is asked for, and nobody else watches."""
    return (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
            and is_unwatched(*tensors)
            and not (is_transformed() or torch._C._is_any_autocast_enabled()))


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        needs_x, needs_scale = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_scale else None, scale if needs_x else None)
        y = pointwise([("mul", 0, 1)], [x.detach(), scale.detach()])
        return x * scale if y is None else whole(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        # hooks may have saved them otherwise
        if all(ctx.needs_input_grad) and not torch.is_grad_enabled() and (
                is_plain_gradient(grad, x, scale) and kernels.takes(x, scale)):
            return kernels.backward(grad, x, scale)
        return (None if scale is None else grad * scale,
                None if x is None else (grad * x).sum((2, 3), keepdim=True))


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        y = pools.global_average(x.detach())
        return x.mean((2, 3), keepdim=True) if y is None else whole(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """One number for all pixels of a channel, in memory of its own as torch's is."""
        each = grad / (ctx.shape[2] * ctx.shape[3])
        if not is_plain_gradient(grad):  # of many at once: such memory has no layout of four axes
            return each.expand(ctx.shape).contiguous()
        return each.expand(ctx.shape).contiguous(memory_format=torch.channels_last)
