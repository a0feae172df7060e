"""Sizes that are plain: PyTorch's meta kernels are written in Python, and most of a net is this."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..conv.options import output_shape

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# whose results have the sizes and the type of their argument
ALIKE = (nn.ReLU, nn.ReLU6, nn.SiLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Hardswish, nn.Hardsigmoid,
         nn.Hardtanh, nn.LeakyReLU, nn.ELU, nn.Mish, nn.Softplus, nn.Identity, nn.LayerNorm,
         nn.GroupNorm)
KEEPING = {"relu", "relu6", "leaky_relu", "silu", "gelu", "hardswish", "hardsigmoid", "sigmoid",
           "tanh", "mish", "elu", "layer_norm", "group_norm"}
ARITHMETIC = {"add", "iadd", "sub", "isub", "mul", "imul", "div", "idiv", "truediv", "itruediv"}


def of_module(module: Any, x: Any = None, *more: Any) -> Tensor | None:
    """A tensor without values, or None where only PyTorch tells it, or an error."""
    if more or not isinstance(x, Tensor) or not x.is_floating_point():
        return None
    if type(module) in ALIKE:
        return _dense(x)
    if type(module) is nn.BatchNorm2d and x.dim() == 4 and x.shape[1] == module.num_features:
        return _dense(x)
    if type(module) is nn.Upsample:
        return _interpolated(x, module.size, module.scale_factor)
    if type(module) not in CONVOLUTIONS or module.padding_mode != "zeros":
        return None
    return _convolved(x, module.weight, module.stride, module.padding, module.dilation,
                      module.groups)


def of_function(name: str, args: Any, kwargs: Any) -> Tensor | None:
    first = args[0] if args else None
    if name in KEEPING:
        keeps = isinstance(first, Tensor) and first.is_floating_point() and "out" not in kwargs
        return _dense(first) if keeps else None
    if name == "interpolate" and isinstance(first, Tensor) and first.is_floating_point():
        size, factor = (*args[1:3], None, None)[:2]
        return _interpolated(first, kwargs.get("size", size), kwargs.get("scale_factor", factor))
    return _sum(*args) if name in ARITHMETIC and len(args) == 2 and not kwargs else None


def _sum(a: Any, b: Any) -> Tensor | None:
    tensors = [part for part in (a, b) if isinstance(part, Tensor)]
    numbers = [part for part in (a, b) if type(part) in (int, float)]
    if len(tensors) + len(numbers) != 2 or not all(x.is_floating_point() for x in tensors) or (
            len({x.dtype for x in tensors}) != 1):
        return None
    if len(tensors) == 1 or a.shape == b.shape:
        return _dense(tensors[0])
    return torch.empty(np.broadcast_shapes(a.shape, b.shape), dtype=a.dtype, device="meta")


def _interpolated(x: Tensor, size: Any, factor: Any) -> Tensor | None:
    """As many pixels as are said, or so many times as many, rounded down."""
    axes = x.dim() - 2
    said = size if factor is None else factor
    each = tuple(said) if isinstance(said, tuple | list) else (said,) * axes
    if axes < 1 or len(each) != axes or (size is None) == (factor is None) or not all(
            type(part) in (int, float) for part in each):
        return None
    sizes = each if factor is None else [
        math.floor(float(side) * by) for side, by in zip(x.shape[2:], each)]
    if min(sizes) < 1 or not all(type(side) is int for side in sizes):
        return None
    return torch.empty((*x.shape[:2], *sizes), dtype=x.dtype, device="meta")


def _dense(x: Tensor) -> Tensor:
    """As results lie."""
    return x if x.is_contiguous() else torch.empty_like(x)


def _convolved(x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any,
               groups: int) -> Tensor | None:
    fits = (x.dim() == weight.dim() and x.shape[1] == weight.shape[1] * groups
            and x.dtype == weight.dtype)
    shape = output_shape(x, weight, stride, padding, dilation) if fits else ()
    return torch.empty(shape, dtype=x.dtype, device="meta") if shape and min(shape) > 0 else None
