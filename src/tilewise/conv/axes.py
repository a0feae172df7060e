"""A convolution of one, two or three axes with what follows it, as models have it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ..core.plan import Plan
from ..runtime.weights import Norm, folded
from . import operators, volumes
from .autocast import cast_operands
from .calls import KERNEL, Call, check, gate, problem_of
from .devices import target_of
from .lines import as_images, conv1d, in_planes
from .ops import added, can_fold, conv2d, conv2d_norm, then
from .running import ENGINE
from .slices import volume_of
from .volumes import conv3d

CONVOLUTIONS: dict[int, Any] = {1: conv1d, 2: conv2d, 3: conv3d}


def convolve(x: Tensor, weight: Tensor, *args: Any, norm: Norm | None = None, pool: int = 1,
             inside: bool = False, **options: Any) -> Tensor:
    """`conv2d` or its kin, by the rank of the weight; `norm` as in `conv2d_norm`.

    Signals are never channels-last in torch; with `inside` they may be.
    """
    axes = weight.dim() - 2
    if axes == 2:
        if norm is None:
            return conv2d(x, weight, *args, pool=pool, **options)
        return conv2d_norm(x, weight, *args, norm=norm, pool=pool, **options)
    if norm is None:
        result: Tensor = CONVOLUTIONS[axes](x, weight, *args, **options)
    else:
        result = _normed(x, weight, *args, norm=norm, **options)
    return in_planes(result) if axes == 1 and not inside else result


def plans_of(call: Call) -> list[Plan]:
    """Those of all that a call runs by generated code; options as `options_of` gives them."""
    axes = call.weight.dim() - 2
    if axes == 3:
        return list(volume_of(call).plans.values())
    p = problem_of(as_images(call) if axes == 1 else call)
    return [ENGINE.plan(p, target_of(call.x), max_error=call.max_error)]


def shape_of(call: Call) -> Tensor:
    """A tensor like the result of such a call."""
    if call.weight.dim() == 5:
        return volumes.shape_of(call)
    if call.weight.dim() == 3:
        return operators.shape_of(as_images(call)).squeeze(2).contiguous()
    return operators.shape_of(call)


def _normed(x: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, norm: Norm,
            activation: str | None = None, slope: Tensor | None = None,
            residual: Tensor | None = None, max_error: float | None = None,
            **options: Any) -> Tensor:
    """With the norm multiplied into the weight, which is remembered, where nobody watches."""
    axes = weight.dim() - 2
    if axes == 3:  # of a signal without a batch, torch's norm takes another axis
        check(x, weight, bias, axes)
    own = cast_operands(x, weight, bias)
    if own is not None and all(t is None or t.dtype == own[0].dtype for t in (residual, slope)):
        x, weight, bias = own
    call = Call(x, weight, bias, residual, slope=slope)
    whole = x.dim() == weight.dim() and can_fold(weight, norm)
    if whole and gate(call, *norm[:4]) == KERNEL:
        weight, bias = folded(weight, bias, norm)
        return convolve(x, weight, bias, *args, activation=activation, slope=slope,
                        residual=residual, max_error=max_error, inside=True, **options)
    mean, variance, scale, shift, eps = norm
    y = convolve(x, weight, bias, *args, max_error=max_error, inside=True, **options)
    y = F.batch_norm(y, mean, variance, scale, shift, eps=eps)
    return then(added(y, residual), activation, 1, slope)
