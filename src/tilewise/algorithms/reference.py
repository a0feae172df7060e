"""The obvious convolution in float64: what every other algorithm is measured against."""

from __future__ import annotations

from typing import Any

from ..core.activations import ACTIVATIONS
from ..core.algorithm import Algorithm, accumulation_error
from ..core.problem import DIRECTIONS, Problem
from ..core.schedule import Schedule
from ..core.target import Target
from .common import no_grid, no_pitch


class Reference(Algorithm):
    """Sums shifted inputs in float64; exact to the last rounding and slow."""

    name = "reference"
    device = None
    directions = frozenset(DIRECTIONS)
    fuses = frozenset({"bias", "residual", *ACTIVATIONS})
    layouts = frozenset({"nhwc", "nchw"})
    takes = "tensors"

    def reject(self, p: Problem, t: Target) -> list[str]:
        return no_grid(p) + no_pitch(p)

    def error(self, p: Problem, t: Target, s: Schedule) -> float:
        return accumulation_error(1, p.dtype)

    def cost(self, p: Problem, t: Target, s: Schedule) -> float:
        return 1e-3 + p.flops / 1e9 + p.bytes / 1e9

    def build(self, p: Problem, t: Target, s: Schedule) -> Any:
        return lambda x, *operands: solve(p, x, *operands).to(x.dtype)


def solve(p: Problem, *operands: Any) -> Any:
    """The problem in float64, whatever its direction."""
    run: Any = {"forward": convolve, "backward_data": data_gradient,
                "backward_weight": weight_gradient}[p.direction]
    return run(p, *operands)


def taps(p: Problem, padded: Any) -> Any:
    """The inputs under every tap: r, s, and a view of (n, group, c, conv_h, conv_w)."""
    for r in range(p.r):
        for s in range(p.s):
            rows = slice(r * p.dilation[0], None, p.stride[0])
            cols = slice(s * p.dilation[1], None, p.stride[1])
            yield r, s, padded[..., rows, cols][..., :p.conv_h, :p.conv_w]


def _padded(p: Problem, x: Any) -> Any:
    """(n, group, c, h, w) in float64 with its border of zeros."""
    from torch.nn import functional as F

    top, bottom, left, right = p.padding
    return F.pad(x.double(), (left, right, top, bottom)).unflatten(1, (p.groups, p.group_c))


def convolve(p: Problem, x: Any, weight: Any, bias: Any = None, residual: Any = None) -> Any:
    """The problem in float64, term by term as it is defined."""
    import torch

    w = weight.double().unflatten(0, (p.groups, p.group_k))
    y = torch.zeros(x.shape[0], p.groups, p.group_k, p.conv_h, p.conv_w, dtype=torch.float64)
    for r, s, seen in taps(p, _padded(p, x)):
        y += torch.einsum("ngchw,gkc->ngkhw", seen, w[..., r, s])
    return finished(p, y.flatten(1, 2), bias, residual)


def finished(p: Problem, y: Any, bias: Any, residual: Any) -> Any:
    """What follows a convolution, or the gradient that a transposed one is."""
    import torch

    from ..kernels.activations import activated, apart

    added, slope = apart(p, None if bias is None else bias.double())
    if added is not None:
        y = y + added[:, None, None]
    if p.epilogue.residual:
        y = y + residual.double()
    y = activated(y, p.epilogue.activation, slope)
    return torch.nn.functional.max_pool2d(y, p.epilogue.pool) if p.epilogue.pool > 1 else y


def data_gradient(p: Problem, grad: Any, weight: Any, bias: Any = None,
                  residual: Any = None) -> Any:
    """The gradient of the input, term by term; also a transposed convolution."""
    import torch

    top, left = p.padding[0], p.padding[2]
    w = weight.double().unflatten(0, (p.groups, p.group_k))
    grad = grad.double().unflatten(1, (p.groups, p.group_k))
    dx = torch.zeros(grad.shape[0], p.groups, p.group_c, p.padded_h, p.padded_w,
                     dtype=torch.float64)
    for r, s, seen in taps(p, dx):
        seen += torch.einsum("ngkhw,gkc->ngchw", grad, w[..., r, s])
    return finished(p, dx[..., top:top + p.h, left:left + p.w].flatten(1, 2), bias, residual)


def weight_gradient(p: Problem, x: Any, grad: Any, *nothing: Any) -> Any:
    """The gradient of the weight, term by term."""
    import torch

    grad = grad.double().unflatten(1, (p.groups, p.group_k))
    dw = torch.zeros(p.groups, p.group_k, p.group_c, p.r, p.s, dtype=torch.float64)
    for r, s, seen in taps(p, _padded(p, x)):
        dw[..., r, s] = torch.einsum("ngchw,ngkhw->gkc", seen, grad)
    return dw.flatten(0, 1)
