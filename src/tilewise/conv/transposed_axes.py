"""A transposed convolution of one, two or three axes with what follows it, as models have it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ..core.plan import Plan
from ..runtime.images import pitch_of
from ..runtime.weights import Norm, folded_transposed
from . import transposed, transposed_volumes
from .autocast import cast_operands
from .calls import KERNEL, Call, gate
from .lines import in_planes
from .ops import is_of_type, then
from .transposed import Transposed, conv_transpose1d, conv_transpose2d, plan_of
from .transposed_volumes import conv_transpose3d, volume_of

TRANSPOSED: dict[int, Any] = {1: conv_transpose1d, 2: conv_transpose2d, 3: conv_transpose3d}


def normed(x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, norm: Norm | None,
           activation: str | None = None, max_error: float | None = None,
           inside: bool = False) -> Tensor:
    """`conv_transpose2d` or its kin with a batch norm in eval mode behind it; `inside` as in
    `convolve`.

    It is multiplied into the weight, which is remembered, where nobody watches.
    """
    x, weight, bias = cast_operands(x, weight, bias) or (x, weight, bias)
    run: Any = _lines if weight.dim() == 3 and not inside else TRANSPOSED[weight.dim() - 2]
    if norm is None:
        return run(x, weight, bias, *args, activation=activation, max_error=max_error)
    if weight.dim() > 3 and x.dim() != weight.dim():  # as torch's norm says
        raise ValueError(f"expected {weight.dim()}D input (got {x.dim()}D input)")
    groups = args[3]
    fits = x.dim() == weight.dim() and _fits(weight, norm, groups)
    if fits and gate(Call(x, weight, bias), *norm[:4]) == KERNEL:
        weight, bias = folded_transposed(weight, bias, norm, groups)
        return run(x, weight, bias, *args, activation=activation, max_error=max_error)
    mean, variance, scale, shift, eps = norm
    y = run(x, weight, bias, *args, max_error=max_error)
    return then(F.batch_norm(y, mean, variance, scale, shift, eps=eps), activation, 1)


def _fits(weight: Tensor, norm: Norm, groups: int) -> bool:
    """Whether a norm can be multiplied into a weight, as `can_fold`."""
    channels = weight.shape[1] * groups
    return is_of_type(weight, norm) and norm[0].shape == (channels,)


def into(out: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any,
         norm: Norm | None, activation: str | None, max_error: float | None,
         stored: bool = False) -> Tensor | None:
    """`normed` of images into a slice of channels, if one is given; None where that cannot be.

    `stored`: images may be of another type than the weight.
    """
    x, weight, bias = cast_operands(x, weight, bias) or (x, weight, bias)
    if norm is not None:
        if not _fits(weight, norm, args[3]) or gate(Call(x, weight, bias), *norm[:4]) != KERNEL:
            return None
        weight, bias = folded_transposed(weight, bias, norm, args[3])
    call = transposed.call_of(x, weight, bias, *args, activation=activation, max_error=max_error)
    pitch = 0 if out is None else pitch_of(tuple(out.shape), out.stride())
    return transposed.into(out, pitch, call, stored)


def _lines(*args: Any, **options: Any) -> Tensor:
    """As models expect signals: contiguous."""
    return in_planes(conv_transpose1d(*args, **options))


def plans_of(call: Transposed) -> list[Plan]:
    """Those of all that a call runs by generated code."""
    if len(call.stride) == 3:
        return list(volume_of(call).plans.values())
    return [plan_of(call)]


def shape_of(call: Transposed) -> Tensor:
    """A tensor like the result of such a call."""
    of = transposed_volumes if len(call.stride) == 3 else transposed
    return of.shape_of(call)
