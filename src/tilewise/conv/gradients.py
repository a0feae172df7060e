"""Gradients of a convolution and of what it fuses: by the engine, or by torch where they are
themselves to be differentiated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..algorithms.vendor import of_seen_pixels
from ..core.problem import Problem
from ..core.target import Target
from ..kernels import precision
from ..runtime import masks
from ..runtime.engine import Engine
from ..runtime.weights import forget, prepared
from .again import is_transformed

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def by_engine(engine: Engine, p: Problem, t: Target, grad: Tensor, x: Tensor, weight: Tensor,
              mask: Tensor | None, wants: Sequence[bool], max_error: float | None) -> Gradients:
    """Of x, weight, bias and residual, as far as they are wanted.

    `p` is the forward problem; `grad` belongs to its result.
    """
    bias = None
    if mask is not None:
        grad, bias = masks.unpack(p, t, grad, mask)
    elif wants[2]:
        bias = grad.sum((0, 2, 3))
    bare = p.bare
    if wants[1]:
        forget(weight)  # a step follows, and prepared weights take several times their memory

    def run(direction: str, first: Tensor, second: Tensor) -> Tensor:
        admitted = precision.asked() if max_error is None else max_error
        key = (direction, bare, t, admitted)
        executable = engine.executables.get(key)
        if executable is None:
            plan = engine.plan(bare.with_(direction=direction), t, max_error=max_error)
            executable = engine.executables.put(key, engine.build(plan))
        engine.tell(executable.plan)
        if direction == "backward_data":
            second = (executable.ready(second, lambda: weight) if wants[1]
                      else prepared(second, executable).value)
        return executable(first, second, None, None)

    return (run("backward_data", grad, weight) if wants[0] else None,
            run("backward_weight", x, grad) if wants[1] else None,
            bias if wants[2] else None, _own(grad, mask) if wants[3] else None)


def _own(grad: Tensor, mask: Tensor | None) -> Tensor:
    """A gradient that is nobody else's: an operator may not return what it was given."""
    return grad if mask is not None else grad.clone(memory_format=torch.channels_last)


def by_torch(p: Problem, grad: Tensor, x: Tensor, weight: Tensor, mask: Tensor | None,
             wants: Sequence[bool]) -> Gradients:
    """The same in torch's own operators, which autograd knows how to differentiate."""
    if mask is not None:
        grad = _spread(p, grad, mask)
    q, seen = of_seen_pixels(p, x)
    top, bottom, left, right = q.padding
    even = top == bottom and left == right
    wide = seen if even else F.pad(seen, (left, right, top, bottom))
    dx, dw, db = torch.ops.aten.convolution_backward(
        grad, wide, weight, [p.k], q.stride, (top, left) if even else (0, 0), q.dilation, False,
        (0, 0), p.groups, list(wants[:3]))
    if dx is not None and q is not p:
        dx, even = among_unseen(dx, (p.padded_h, p.padded_w), p.stride), False
    if dx is not None and not even:
        top, _, left, _ = p.padding
        dx = dx.narrow(2, top, p.h).narrow(3, left, p.w)
    return dx, dw, db, grad if wants[3] else None


def among_unseen(dx: Tensor, sizes: Sequence[int], stride: Sequence[int]) -> Tensor:
    """The gradient of the pixels that a filter of one tap sees, among zeros."""
    for axis, (size, step) in enumerate(zip(sizes, stride, strict=True), 2):
        shape = [*dx.shape[:axis], size, *dx.shape[axis + 1:]]
        dx = torch.ops.aten.slice_backward(dx, shape, axis, 0, size, step)
    return dx


class _Tied(torch.autograd.Function):
    """(gradient, others): the gradient, of which the others' are zeros."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *others: Tensor) -> Tensor:
        ctx.others = [(other.shape, other.dtype) for other in others]
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(grad.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.others)


def tied(grad: Tensor, *others: Tensor | None) -> Tensor:
    """A gradient that depends on what moves an activation's edge, as torch's does: where it is
    differentiated alone, optimizers find zeros and not nothing."""
    wanted = [other for other in others if other is not None and other.requires_grad]
    if not wanted or not torch.is_grad_enabled() or is_transformed():
        return grad
    result: Tensor = _Tied.apply(grad, *wanted)
    return result


def _spread(p: Problem, grad: Tensor, mask: Tensor) -> Tensor:
    """A gradient at the values it passes, zero elsewhere."""
    size = p.epilogue.pool
    if size > 1:
        grad = grad.repeat_interleave(size, 2).repeat_interleave(size, 3)
        grad = F.pad(grad, (0, p.conv_w % size, 0, p.conv_h % size))
    return grad * _unpacked(mask, p.k).to(grad.dtype)


def _unpacked(mask: Tensor, channels: int) -> Tensor:
    """The bits as (N, K, H, W); narrow vectors leave the upper half of their byte empty."""
    lanes = min(8, Target.host().lanes)
    bits = mask[..., None] >> torch.arange(lanes, dtype=torch.uint8) & 1
    return bits.flatten(-2)[..., :channels].permute(0, 3, 1, 2)

