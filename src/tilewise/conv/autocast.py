"""Convolutions under torch.autocast: operands in the type that it casts them to."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.types import HALVES, element_of
from ..runtime.weights import kept_as
from .again import is_transformed, is_unwatched
from .calls import Call, wants_gradient


def type_of(x: Tensor) -> torch.dtype:
    """Of the result of a convolution of x."""
    if not torch._C._is_any_autocast_enabled() or not _is_cast(x):
        return x.dtype
    kind = x.device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else x.dtype


def _is_cast(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype != torch.float64


def cast(call: Call) -> Call | None:
    """The call with its images, weight and bias cast; None where torch is to do it."""
    if not is_unwatched(*call.tensors) or is_transformed() or not torch.is_autocast_enabled("cpu"):
        return None
    dtype, tensors = type_of(call.x), (call.x, call.weight, call.bias)
    ours = call.x.is_cpu and dtype in HALVES and element_of(dtype) is not None
    if not ours or not all(t is None or _is_cast(t) for t in tensors):
        return None
    # kept, a weight is prepared once
    weight, bias = (t if t is None or t.dtype == dtype
                    else t.to(dtype) if wants_gradient(t) else kept_as(t, dtype)
                    for t in tensors[1:])
    return call._replace(x=call.x.to(dtype), weight=weight, bias=bias)
