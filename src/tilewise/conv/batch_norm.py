"""A batch norm in training mode with what follows it, as one differentiable step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as modules

from ..core.activations import parsed
from ..runtime import batch_norm as kernels
from ..runtime.batch_norm import Statistics
from .again import is_plain_gradient, is_transformed, is_unwatched
from .gradients import tied
from .operators import whole

# hooks of all modules
EVERYWHERE = (modules._global_forward_hooks, modules._global_forward_pre_hooks,
              modules._global_backward_hooks, modules._global_backward_pre_hooks)


class CalledNorm(nn.Module):
    """What a function normalises with: the tensors of a module, where that has them now.

    Mode, momentum and eps are those of the call, whatever the module's are.
    """

    num_batches_tracked = None  # the graph counts
    of: Any

    def __init__(self, module: nn.Module, training: bool, momentum: float, eps: float) -> None:
        self.__dict__.update(of=module, training=training, momentum=momentum, eps=eps)

    def __getattr__(self, name: str) -> Any:
        if name == "of":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.of, name)

    @property
    def track_running_stats(self) -> bool:
        return self.of.running_mean is not None

    def train(self, mode: bool = True) -> CalledNorm:
        """It stays as it is."""
        return self

    def forward(self, x: Tensor) -> Tensor:
        of = self.of
        return F.batch_norm(x, of.running_mean, of.running_var, of.weight, of.bias, self.training,
                            self.momentum, self.eps)


NORMS = (nn.BatchNorm2d, CalledNorm)


def normalised(norm: Any, x: Tensor, residual: Tensor | None,
               activation: str | None) -> Tensor | None:
    """activation(norm(x) + residual) in training mode; None where that is torch's to do.

    Running statistics move as torch moves them.
    """
    if not is_ours(norm, x, residual, activation):
        return None
    y: Tensor = _Normalised.apply(x, residual, norm.weight, norm.bias, norm.eps, activation, norm)
    return y


def is_ours(norm: Any, x: Tensor, residual: Tensor | None, activation: str | None) -> bool:
    """Whether nobody watches, and the kernels can take it."""
    if type(norm) not in NORMS or is_hooked(norm) or x.dim() != 4 or (
            x.shape[1] != norm.num_features or x.numel() == x.shape[1]):
        return False
    tensors = (x, residual, norm.weight, norm.bias, norm.running_mean, norm.running_var)
    quiet = is_unwatched(*tensors) and not (
        is_transformed() or torch._C._is_any_autocast_enabled())
    plain = norm.eps > 0 and all(t is None or t.dtype == torch.float32 for t in tensors) and (
        not norm.track_running_stats or _has_room(norm, x))
    return quiet and plain and kernels.takes(x, residual, norm.weight, norm.bias, activation)


def _has_room(norm: Any, x: Tensor) -> bool:
    """For the statistics of all channels."""
    kept = (norm.running_mean, norm.running_var)
    return all(t is not None and t.numel() == x.shape[1] for t in kept)


def is_hooked(norm: Any) -> bool:
    return bool(norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks
                or norm._backward_pre_hooks or any(EVERYWHERE))


@torch.no_grad()
def follow(norm: Any, statistics: Statistics, y: Tensor) -> None:
    """The running statistics, as nn.BatchNorm2d has them.

    They move before anything is saved for the gradient: a checkpoint may end the call there.
    """
    if not norm.track_running_stats:
        return
    share, channels = norm.momentum, y.shape[1]
    pixels = y.numel() // channels
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if share is None:
            share = 1.0 / float(norm.num_batches_tracked)
    share = 0.0 if share is None else share
    for running, found, scale in (
            (norm.running_mean, statistics.mean(channels), 1.0),
            (norm.running_var, statistics.variance(channels), pixels / (pixels - 1))):
        # as torch's norm, which keeps them for its gradient, and whose versions do not count this
        running.data.mul_(1.0 - share).add_(found, alpha=share * scale)


class _Normalised(torch.autograd.Function):
    """(x, residual, weight, bias, eps, activation, norm): the result; running statistics move."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None,
                bias: Tensor | None, eps: float, activation: str | None,
                norm: Any) -> Tensor:
        y, statistics = kernels.forward(x, residual, weight, bias, eps, activation)
        follow(norm, statistics, y)
        ctx.save_for_backward(x, weight, bias if activation in SMOOTH else None,
                              statistics.tables, statistics.mask)
        ctx.eps, ctx.activation, ctx.bias = eps, activation, bias
        return whole(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """By our kernels; by torch where the gradients are themselves to be differentiated."""
        saved = as_they_were(*ctx.saved_tensors)
        x, *_, tables, mask = saved
        wants = ctx.needs_input_grad[:4]
        if torch.is_grad_enabled() or not is_plain_gradient(grad, x):
            parts = by_torch(ctx.activation, ctx.eps, wants, tied(grad, ctx.bias), saved)
        else:
            found = kernels.backward(grad, x, Statistics(tables, mask), ctx.activation, ctx.eps,
                                     wants[1])
            parts = (found.x, found.residual, found.weight, found.bias)
        return *(part if wanted else None for part, wanted in zip(parts, wants, strict=True)), \
            None, None, None


def as_they_were(x: Tensor, weight: Tensor | None, bias: Tensor | None, tables: Tensor,
                  mask: Tensor | None) -> tuple[Any, ...]:
    """What kernels read by its address: hooks may have saved it in another form."""
    x = x.to(torch.float32).contiguous(memory_format=torch.channels_last)
    tables = tables.to(torch.float32).contiguous()
    return x, weight, bias, tables, None if mask is None else mask.to(torch.uint8).contiguous()


def by_torch(activation: str | None, eps: float, wants: tuple[bool, ...], grad: Tensor,
             saved: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    """In torch's own operators, which autograd knows how to differentiate."""
    x, weight, bias, tables, mask = saved
    channels = x.shape[1]
    mean, factor, offset, rate, _ = (table[:channels] for table in tables)
    if mask is not None:
        grad = grad * kernels.unpacked(mask, x)
    elif activation in SMOOTH:
        y = F.batch_norm(x, None, None, weight, bias, True, eps=eps)
        grad = SMOOTH[activation](grad, y)
    elif activation is not None:  # pieces of lines: where they end does not move
        wide = (1, channels, 1, 1)
        y = (x.detach() - mean.view(wide)) * factor.view(wide) + offset.view(wide)
        grad = _through_lines(activation, grad, y)
    dx, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
        grad, x, weight, None, None, mean, rate, True, eps, [wants[0], wants[2], wants[3]])
    return dx, grad, of_weight, of_bias


def _through_lines(activation: str, grad: Tensor, y: Tensor) -> Tensor:
    """The gradient before an activation that is made of lines."""
    row, numbers = parsed(activation)
    if row.name == "leaky_relu":
        return grad * torch.where(y > 0, 1.0, numbers[0])
    cut = y <= 0 if row.name == "relu" else (y <= 0) | (y >= 6)
    return grad * (~cut).to(grad.dtype)


def _through_silu(grad: Tensor, y: Tensor) -> Tensor:
    share = y.sigmoid()
    return grad * share * (1 + y * (1 - share))


SMOOTH: dict[str | None, Any] = {"silu": _through_silu,
                                 "hardswish": torch.ops.aten.hardswish_backward}
