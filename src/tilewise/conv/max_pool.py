"""Max-pooling with gradients: neither images nor indices of eight bytes are kept for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..runtime import largest as kernels
from ..runtime.sweeps import is_plain
from .again import is_plain_gradient, is_transformed, is_unwatched
from .operators import whole

LAST = torch.channels_last


def pooled(x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
           ceil_mode: bool = False) -> Tensor | None:
    """torch.nn.functional.max_pool2d where a gradient is asked for; None where it is torch's."""
    if not (isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()
            and is_unwatched(x) and x.is_contiguous(memory_format=LAST) and is_plain(x.detach())):
        return None
    if is_transformed() or torch._C._is_any_autocast_enabled():
        return None
    windows = kernels.windows_of(x, kernel_size, stride, padding, dilation, ceil_mode)
    if windows is None:
        return None
    result: Tensor = _Pooled.apply(x, windows)
    return result


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, windows: kernels.Both) -> Tensor:
        y, bytes_ = kernels.forward(x, windows)
        ctx.save_for_backward(bytes_)
        ctx.shape, ctx.windows = tuple(x.shape), windows
        return whole(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """By our kernel; by torch where the gradient is itself to be differentiated."""
        bytes_ = ctx.saved_tensors[0].to(torch.uint8).contiguous()  # hooks may save it otherwise
        if torch.is_grad_enabled() or not is_plain_gradient(grad, bytes_):
            return _by_torch(ctx, grad, bytes_), None
        return whole(kernels.backward(grad, bytes_, ctx.shape, ctx.windows)), None


def _by_torch(ctx: Any, grad: Tensor, bytes_: Tensor) -> Tensor:
    """In an operator that autograd knows how to differentiate; it reads the images' form alone."""
    down, across = ctx.windows
    like = torch.empty(ctx.shape, dtype=grad.dtype, memory_format=LAST)  # of no vmap
    found: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(
        grad, like, [down.taps, across.taps], [down.stride, across.stride],
        [down.padding, across.padding], [1, 1], down.ceil_mode,
        kernels.indices(bytes_, ctx.shape, ctx.windows))
    return found
