"""A batch norm in training mode with what follows it, as one differentiable step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as modules

from ..kernels.activations import activated
from ..runtime import batch_norm as kernels
from ..runtime.batch_norm import Statistics
from .again import is_transformed, is_unwatched


def normalised(norm: Any, x: Tensor, residual: Tensor | None,
               activation: str | None) -> Tensor | None:
    """activation(norm(x) + residual) in training mode; None where that is torch's to do.

    Running statistics move as torch moves them.
    """
    if not _is_ours(norm, x, residual, activation):
        return None
    told: list[Statistics] = []
    y: Tensor = _Normalised.apply(x, residual, norm.weight, norm.bias, norm.eps, activation, told)
    if norm.track_running_stats:
        _follow(norm, told[0], x.numel() // x.shape[1], x.shape[1])
    return y


def _is_ours(norm: Any, x: Tensor, residual: Tensor | None, activation: str | None) -> bool:
    """Whether nobody watches, and the kernels can take it."""
    if type(norm) is not nn.BatchNorm2d or _is_hooked(norm) or x.dim() != 4 or (
            x.shape[1] != norm.num_features or x.numel() == x.shape[1]):
        return False
    tensors = (x, residual, norm.weight, norm.bias, norm.running_mean, norm.running_var)
    quiet = is_unwatched(*tensors) and not (
        is_transformed() or torch._C._is_any_autocast_enabled())
    plain = all(t is None or t.dtype == torch.float32 for t in tensors) and (
        not norm.track_running_stats or norm.running_mean is not None)
    return quiet and plain and kernels.takes(x, residual, norm.weight, norm.bias, activation)


def _is_hooked(norm: Any) -> bool:
    return bool(norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks
                or norm._backward_pre_hooks or modules._has_any_global_hook())


@torch.no_grad()
def _follow(norm: Any, statistics: Statistics, pixels: int, channels: int) -> None:
    """The running statistics, as nn.BatchNorm2d has them."""
    share = norm.momentum
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if share is None:
            share = 1.0 / float(norm.num_batches_tracked)
    share = 0.0 if share is None else share
    for running, found, scale in (
            (norm.running_mean, statistics.mean(channels), 1.0),
            (norm.running_var, statistics.variance(channels), pixels / (pixels - 1))):
        running.mul_(1.0 - share).add_(found, alpha=share * scale)


class _Normalised(torch.autograd.Function):
    """(x, residual, weight, bias, eps, activation, told): the result; `told` gets statistics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None,
                bias: Tensor | None, eps: float, activation: str | None,
                told: list[Statistics]) -> Tensor:
        y, statistics = kernels.forward(x, residual, weight, bias, eps, activation)
        told.append(statistics)
        ctx.save_for_backward(x, weight, bias, statistics.tables, statistics.mask)
        ctx.eps, ctx.activation = eps, activation
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """By our kernels; by torch where the gradients are themselves to be differentiated."""
        x, *_, tables, mask = ctx.saved_tensors
        wants = ctx.needs_input_grad[:4]
        if torch.is_grad_enabled():
            return *_by_torch(ctx, grad), None, None, None
        found = kernels.backward(grad, x, Statistics(tables, mask), ctx.activation, ctx.eps,
                                 wants[1])
        parts = (found.x, found.residual, found.weight, found.bias)
        return *(part if wanted else None for part, wanted in zip(parts, wants, strict=True)), \
            None, None, None


def _by_torch(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    """In torch's own operators, which autograd knows how to differentiate."""
    x, weight, bias, _, mask = ctx.saved_tensors
    y = F.batch_norm(x, None, None, weight, bias, True, eps=ctx.eps)
    if mask is not None:
        grad = grad * kernels.unpacked(mask, x)
    else:
        y = activated(y, ctx.activation, None)
    given = [x, None, weight, bias]
    wanted = [t for t, wants in zip(given, ctx.needs_input_grad) if wants and t is not None]
    found = iter(torch.autograd.grad(y, wanted, grad, create_graph=True))
    gradients = [next(found) if wants and t is not None else None
                 for t, wants in zip(given, ctx.needs_input_grad)]
    gradients[1] = grad if ctx.needs_input_grad[1] else None
    return gradients
