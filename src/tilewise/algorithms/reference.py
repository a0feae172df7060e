"""The obvious convolution in float64: what every other algorithm is measured against."""

from __future__ import annotations

from typing import Any

from ..core.algorithm import Algorithm, accumulation_error
from ..core.problem import Problem
from ..core.schedule import Schedule
from ..core.target import Target


class Reference(Algorithm):
    """Sums shifted inputs in float64; exact to the last rounding and slow."""

    name = "reference"
    fuses = frozenset({"bias", "residual", "relu"})
    layouts = frozenset({"nhwc", "nchw"})
    takes = "tensors"

    def reject(self, p: Problem, t: Target) -> list[str]:
        if p.direction != "forward":
            return [f"direction is {p.direction}, needs forward"]
        return []

    def error(self, p: Problem, t: Target, s: Schedule) -> float:
        return accumulation_error(1, p.dtype)

    def cost(self, p: Problem, t: Target, s: Schedule) -> float:
        return 1e-3 + p.flops / 1e9 + p.bytes / 1e9

    def build(self, p: Problem, t: Target, s: Schedule) -> Any:
        return lambda x, weight, bias, residual: convolve(p, x, weight, bias, residual).to(x.dtype)


def convolve(p: Problem, x: Any, weight: Any, bias: Any = None, residual: Any = None) -> Any:
    """The problem in float64, term by term as it is defined."""
    import torch

    top, bottom, left, right = p.padding
    x = torch.nn.functional.pad(x.double(), (left, right, top, bottom))
    x = x.unflatten(1, (p.groups, p.group_c))
    w = weight.double().unflatten(0, (p.groups, p.group_k))
    y = torch.zeros(x.shape[0], p.groups, p.group_k, p.conv_h, p.conv_w, dtype=torch.float64)
    for r in range(p.r):
        for s in range(p.s):
            rows = slice(r * p.dilation[0], None, p.stride[0])
            cols = slice(s * p.dilation[1], None, p.stride[1])
            seen = x[..., rows, cols][..., :p.conv_h, :p.conv_w]
            y += torch.einsum("ngchw,gkc->ngkhw", seen, w[..., r, s])
    y = y.flatten(1, 2)
    if p.epilogue.bias:
        y += bias.double()[:, None, None]
    if p.epilogue.residual:
        y += residual.double()
    if p.epilogue.activation:
        y = getattr(torch.nn.functional, p.epilogue.activation)(y)
    return torch.nn.functional.max_pool2d(y, p.epilogue.pool) if p.epilogue.pool > 1 else y
