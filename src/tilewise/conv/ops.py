"""tilewise.conv2d: a drop-in for torch.nn.functional.conv2d, as a torch.library operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.activations import by_mask
from ..core.watching import watcher
from ..kernels.activations import activated
from ..runtime.weights import Norm, can_change_unnoticed, prepared, prepared_with_norm
from .again import Again, is_unwatched
from .autocast import cast
from .calls import (
    GRADIENT,
    KERNEL,
    OPERATOR,
    TORCH,
    Call,
    check,
    check_slope,
    check_tensors,
    gate,
    is_channels_last,
)
from .max_pool import pooled
from .operators import CONV2D, MASKED, NORM, Convolved, Masked
from .options import Options, options_of
from .running import ENGINE, executable_of, run, run_norm

FEW_PIXELS = 64  # images of one pixel each


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None,
           stride: int | Sequence[int] = 1, padding: int | str | Sequence[int] = 0,
           dilation: int | Sequence[int] = 1, groups: int = 1, *,
           activation: str | None = None, slope: Tensor | None = None,
           residual: Tensor | None = None, pool: int = 1,
           algorithm: str | None = None, max_error: float | None = None) -> Tensor:
    """`torch.nn.functional.conv2d`, then what often follows it, in one call.

    The residual is added first, then comes the activation, then max-pooling. Gradients work, and
    are planned on their own.

    Args:
        x: Images, (N, C, H, W) or (C, H, W).
        weight: Filters, (K, C / groups, R, S).
        bias: One value for each filter.
        stride: As in torch.
        padding: As in torch, or (top, bottom, left, right).
        dilation: As in torch.
        groups: As in torch.
        activation: "relu", "relu6", "leaky_relu", "elu", "silu", "gelu", "gelu_tanh", "mish",
            "sigmoid", "tanh", "hardswish" or "hardsigmoid", as in `torch.nn.functional`; with
            numbers, "leaky_relu:0.2" or "elu:0.5"; "clamp:-1:1" is its `hardtanh`, "clip:-1:1" is
            `torch.clamp`; "prelu", with `slope`.
        slope: For "prelu", one slope for each filter, or one for all.
        residual: A tensor of the output's shape before pooling.
        pool: Side of the max-pooling windows, and their stride; 1 is none.
        algorithm: One of `tilewise.algorithms()`, instead of the planner's choice.
        max_error: Bound on the relative rms error, instead of the one that
            `torch.set_float32_matmul_precision` stands for.

    Returns:
        The result, (N, K, H, W) or (K, H, W), with the height and width of the output.

    >>> x, weight = torch.randn(1, 8, 16, 16), torch.randn(4, 8, 3, 3)
    >>> conv2d(x, weight, padding=1, activation="relu", pool=2).shape
    torch.Size([1, 4, 8, 8])
    """
    check_tensors(x, weight)
    if x.dim() == 3:
        extra = None if residual is None else residual.unsqueeze(0)
        return conv2d(x.unsqueeze(0), weight, bias, stride, padding, dilation, groups,
                      activation=activation, slope=slope, residual=extra, pool=pool,
                      algorithm=algorithm, max_error=max_error).squeeze(0)
    check(x, weight, bias)
    check_slope(slope, activation, weight.shape[0])
    options = options_of(stride, padding, dilation, groups, activation, pool, weight.shape[2:])
    call = Call(x, weight, bias, residual, *options, algorithm, max_error, slope)
    own = cast(call) if torch._C._is_any_autocast_enabled() else None
    return _run(call) if own is None else _run_cast(own)


def _run(call: Call) -> Tensor:
    who = gate(call)
    if who == KERNEL:
        return run(call)
    if who == OPERATOR:
        result: Tensor = CONV2D(*call)
        return result
    return _differentiable(call) if who == GRADIENT else _by_torch(call)


def _run_cast(call: Call) -> Tensor:
    """What follows is in the same call if it is of the type that autocast chose."""
    if can_fuse(call):
        return _run(call)
    y = _run(call._replace(residual=None, activation=None, pool=1, slope=None))
    return then(added(y, call.residual), call.activation, call.pool, call.slope)


def can_fuse(call: Call) -> bool:
    """Whether what is added, and slopes, have the type of the images."""
    return all(t is None or t.dtype == call.x.dtype for t in (call.residual, call.slope))


def conv2d_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
                padding: Any = 0, dilation: Any = 1, groups: int = 1, *, norm: Norm,
                activation: str | None = None, slope: Tensor | None = None,
                residual: Tensor | None = None, pool: int = 1,
                max_error: float | None = None) -> Tensor:
    """conv2d with a batch norm in eval mode behind it; norm: mean, variance, weight, bias, eps.

    What the norm is multiplied into is remembered from call to call; where a gradient is asked
    for, the norm is torch's.
    """
    check(x, weight, bias)
    check_slope(slope, activation, weight.shape[0])
    options = options_of(stride, padding, dilation, groups, activation, pool, weight.shape[2:])
    call = Call(x, weight, bias, residual, *options, None, max_error, slope)
    own = cast(call) if torch._C._is_any_autocast_enabled() else None
    if own is not None and can_fuse(own):
        call = own
    who = gate(call, *norm[:4]) if can_fold(weight, norm) else TORCH
    if who == KERNEL:
        return run_norm(call, norm)
    if who == OPERATOR:
        result: Tensor = NORM(x, weight, bias, *norm, residual, *options, max_error, slope)
        return result
    y = conv2d(x, weight, bias, stride, padding, dilation, groups, max_error=max_error)
    mean, variance, scale, shift, eps = norm
    y = F.batch_norm(y, mean, variance, scale, shift, eps=eps)
    return then(added(y, residual), activation, pool, slope)


def call_again(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
               norm: Norm | None, options: Options, max_error: float | None,
               slope: Tensor | None = None, pitch: int = 0, stored: bool = False) -> Again | None:
    """The call with all that it needs found; None where each has to be looked at anew.

    With `pitch`, its result may be given a place between other channels, so many in all. `stored`:
    images are stored in another type than the weight.
    """
    others = () if norm is None else norm[:4]
    call = Call(x, weight, bias, residual, *options, None, max_error, slope)
    if (torch.is_grad_enabled() or x.dim() != 4 or gate(call, *others) != KERNEL
            or (norm is not None and not can_fold(weight, norm))
            or any(map(can_change_unnoticed, (weight, bias, *others)))):
        return None
    check(x, weight, bias)
    check_slope(slope, call.activation, weight.shape[0])
    if norm is None:
        executable = executable_of(call, pitch=pitch, stored=stored)
        return Again(ENGINE, executable, prepared(weight, executable), False)
    # of the form that the bias will have
    own = call._replace(bias=norm[0].to(weight.dtype))
    executable = executable_of(own, pitch=pitch, stored=stored)
    return Again(ENGINE, executable, prepared_with_norm(weight, bias, norm, executable), True)


def can_fold(weight: Tensor, norm: Norm) -> bool:
    """Whether a norm has as many channels, and a type that gives results of the weight's."""
    return is_of_type(weight, norm) and norm[0].shape == weight.shape[:1]


def is_of_type(weight: Tensor, norm: Norm) -> bool:
    """Whether torch takes the two: a norm of 16-bit images may be float32."""
    return norm[0].dtype == weight.dtype or (
        norm[0].dtype == torch.float32 and weight.dtype in (torch.bfloat16, torch.float16))


def _by_torch(call: Call) -> Tensor:
    if _is_linear(call):
        y = F.linear(call.x.flatten(1), call.weight.flatten(1), call.bias)[..., None, None]
        return then(added(y, call.residual), call.activation, call.pool, call.slope)
    top, bottom, left, right = call.padding
    x, even = call.x, top == bottom and left == right
    y = F.conv2d(x if even else F.pad(x, (left, right, top, bottom)), call.weight, call.bias,
                 call.stride, [top, left] if even else 0, call.dilation, call.groups)
    return then(added(y, call.residual), call.activation, call.pool, call.slope)


def _differentiable(call: Call) -> Tensor:
    """With as much of the tail fused as a gradient allows."""
    if call.algorithm is None and call.max_error is None and has_few_pixels(call):
        return _by_torch(call)
    activation, pool = _with_gradient(call.activation, call.pool)
    plain = is_unwatched(*call.tensors)
    if (activation, pool) != (None, 1) and _can_mask(call.x, call.weight):
        how = Masked.apply if plain else MASKED
        y = how(*call._replace(activation=activation, pool=pool))[0]
    else:
        pool = 1
        how = Convolved.apply if plain else CONV2D
        y = how(*call._replace(activation=activation, pool=pool, slope=None))
    return then(y, None if activation else call.activation, 1 if pool == call.pool else call.pool,
                call.slope)


def has_few_pixels(call: Call) -> bool:
    """Whether to prepare a weight that learns takes longer than what is done with it."""
    n, _, h, w = call.x.shape
    return h * w == 1 and n <= FEW_PIXELS


def _is_linear(call: Call) -> bool:
    """Whether images of one pixel meet filters of one tap: torch's convolution takes ten times as
    long as its product of matrices."""
    return (call.x.dim() == 4 and call.x.shape[2:] == call.weight.shape[2:] == (1, 1)
            and call.x.shape[1] == call.weight.shape[1] and call.groups == 1
            and not any(call.padding) and call.x.dtype == torch.float32 and call.x.is_cpu)


def _with_gradient(activation: str | None, pool: int) -> tuple[str | None, int]:
    """The beginning of the tail that can be fused where a gradient is asked for."""
    if not by_mask(activation):
        return None, 1
    return activation, pool if pool == 2 else 1


def _can_mask(x: Tensor, weight: Tensor) -> bool:
    """Whether the engine can note which values a gradient passes."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and (
        is_channels_last(x) or is_channels_last(weight))


def added(y: Tensor, residual: Tensor | None, in_place: bool = False) -> Tensor:
    """With the residual; in place, the sum keeps the type and the shape, or torch refuses it."""
    if residual is None:
        return y
    if not in_place:
        return y + residual
    if (told := watcher()) is not None:
        told.cannot_repeat("torch writes to the result")
    return y.add_(residual)


def then(y: Tensor, activation: str | None, pool: int, slope: Tensor | None = None) -> Tensor:
    y = activated(y, activation, slope)
    found = y if pool == 1 else pooled(y, pool)
    return F.max_pool2d(y, pool) if found is None else found
