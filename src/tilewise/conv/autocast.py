"""Convolutions under torch.autocast: operands in the type that it casts them to."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from ..runtime.types import HALVES, element_of
from ..runtime.weights import kept_as
from .again import is_transformed, is_unwatched
from .calls import Call, wants_gradient

Operands = tuple[Tensor, Tensor, Tensor | None]
T = TypeVar("T")


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
    if not is_unwatched(call.residual, call.slope):
        return None
    found = cast_operands(call.x, call.weight, call.bias)
    return None if found is None else call._replace(x=found[0], weight=found[1], bias=found[2])


def cast_operands(x: Tensor, weight: Tensor, bias: Tensor | None) -> Operands | None:
    """The operands of a convolution or a linear layer as autocast casts them; None where it does
    not, or where torch is to do it."""
    tensors = x, weight, bias
    if not torch._C._is_any_autocast_enabled() or not torch.is_autocast_enabled("cpu"):
        return None
    if not is_unwatched(*tensors) or is_transformed():
        return None
    dtype = type_of(x)
    ours = x.is_cpu and dtype in HALVES and element_of(dtype) is not None
    if not ours or not all(t is None or _is_cast(t) for t in tensors):
        return None
    return x.to(dtype), kept(weight, dtype), kept(bias, dtype)


def kept(tensor: T, dtype: torch.dtype) -> T:
    """A parameter in another type; kept, it is prepared once."""
    if not isinstance(tensor, Tensor) or tensor.dtype == dtype:
        return tensor
    return tensor.to(dtype) if wants_gradient(tensor) else kept_as(tensor, dtype)
