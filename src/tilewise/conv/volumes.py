"""tilewise.conv3d: a drop-in for torch.nn.functional.conv3d, as a torch.library operator."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.activations import by_mask
from ..core.errors import InvalidProblem
from ..kernels import precision
from .autocast import cast
from .calls import (
    GRADIENT,
    KERNEL,
    OPERATOR,
    Call,
    check,
    check_operands,
    check_residual,
    check_slope,
    check_tensors,
    gate,
    is_channels_last,
)
from .operators import as_operator
from .ops import added, can_fuse, then
from .options import options_of, output_shape
from .running import ENGINE
from .slices import is_ours, planes, volume_of, widened
from .volume_gradients import by_slices, by_torch


def conv3d(x: Tensor, weight: Tensor, bias: Tensor | None = None,
           stride: int | Sequence[int] = 1, padding: int | str | Sequence[int] = 0,
           dilation: int | Sequence[int] = 1, groups: int = 1, *,
           activation: str | None = None, slope: Tensor | None = None,
           residual: Tensor | None = None, algorithm: str | None = None,
           max_error: float | None = None) -> Tensor:
    """`torch.nn.functional.conv3d`, then what often follows it, in one call.

    The residual is added first, then comes the activation. Gradients work. It is computed slice
    by slice, as images, where that should be faster than torch.

    Args:
        x: Volumes, (N, C, D, H, W) or (C, D, H, W).
        weight: Filters, (K, C / groups, T, R, S).
        bias: One value for each filter.
        stride: As in torch.
        padding: As in torch, or (front, back, top, bottom, left, right).
        dilation: As in torch.
        groups: As in torch.
        activation: As in `conv2d`.
        slope: As in `conv2d`.
        residual: A tensor of the output's shape.
        algorithm: One of `tilewise.algorithms()` for the slices; "vendor" is torch's convolution
            of the whole.
        max_error: As in `conv2d`.

    Returns:
        The result, (N, K, D, H, W) or (K, D, H, W), with the sizes of the output.

    >>> x, weight = torch.randn(1, 8, 6, 16, 16), torch.randn(4, 8, 3, 3, 3)
    >>> conv3d(x, weight, padding=1, activation="relu").shape
    torch.Size([1, 4, 6, 16, 16])
    """
    check_tensors(x, weight)
    if x.dim() == 4:
        extra = None if residual is None else residual.unsqueeze(0)
        return conv3d(x.unsqueeze(0), weight, bias, stride, padding, dilation, groups,
                      activation=activation, slope=slope, residual=extra, algorithm=algorithm,
                      max_error=max_error).squeeze(0)
    check(x, weight, bias, 3)
    check_slope(slope, activation, weight.shape[0])
    options = options_of(stride, padding, dilation, groups, activation, 1, weight.shape[2:])
    call = Call(x, weight, bias, residual, *options, algorithm, max_error, slope)
    own = cast(call)
    if own is not None and not can_fuse(own):
        y = conv3d(*own[:3], *own[4:8], algorithm=algorithm, max_error=max_error)
        return then(added(y, residual), activation, 1, slope)
    call = own or call
    who = gate(call)
    if who == KERNEL:
        return _run(call)
    if who == OPERATOR:
        result: Tensor = _OP(*call)
        return result
    return _differentiable(call) if who == GRADIENT else _by_torch(call)


def _differentiable(call: Call) -> Tensor:
    """A gradient goes through ReLU by the result; other activations are torch's."""
    if by_mask(call.activation):
        result: Tensor = _OP(*call)
        return result
    return then(_OP(*call._replace(activation=None, slope=None)), call.activation, 1, call.slope)


def _by_torch(call: Call) -> Tensor:
    front, back, top, bottom, left, right = call.padding
    even = (front, top, left) == (back, bottom, right)
    x = call.x if even else F.pad(call.x, (left, right, top, bottom, front, back))
    held = call.max_error is not None and not torch.compiler.is_compiling()
    with precision.full() if held else nullcontext():
        y = F.conv3d(x, call.weight, call.bias, call.stride, (front, top, left) if even else 0,
                     call.dilation, call.groups)
    return then(y if call.residual is None else y + call.residual, call.activation, 1, call.slope)


def _run(call: Call) -> Tensor:
    x = call.x
    if len(x) == 0 or not is_ours(x):
        return _placed(_by_torch(call), x, call.weight)
    check_operands(call)
    if call.residual is not None:
        check_residual(call.residual, x, call.weight, *call[4:7])
    volume = volume_of(call)
    if not volume.stretches:
        return _placed(_by_torch(call), x, call.weight)
    for plan in volume.plans.values():
        ENGINE.tell(plan)
    y = volume(widened(call)).to(x.dtype)
    return y if _is_last(x, call.weight) else planes(y)


def _placed(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """In the layout that does not depend on who ran it."""
    last = _is_last(x, weight)
    return y.contiguous(memory_format=torch.channels_last_3d if last else torch.contiguous_format)


def _is_last(x: Tensor, weight: Tensor) -> bool:
    return is_channels_last(x) or is_channels_last(weight)


# as the operators have them


def _conv3d(*args: Any) -> Tensor:
    return _run(Call(*args))


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
          stride: list[int], padding: list[int], dilation: list[int], *_: Any) -> Tensor:
    """Shape and strides of the result, without computing it."""
    return _like(output_shape(x, weight, stride, padding, dilation), x, weight)


def _like(shape: Sequence[int], x: Tensor, weight: Tensor) -> Tensor:
    y = x.new_empty(tuple(shape))
    return y.to(memory_format=torch.channels_last_3d) if _is_last(x, weight) else y


def shape_of(call: Call) -> Tensor:
    """A tensor like the result of a call."""
    return _fake(*call)


def _conv3d_backward(grad: Tensor, x: Tensor, weight: Tensor, stride: list[int],
                     padding: list[int], dilation: list[int], groups: int, wants: list[bool],
                     max_error: float | None) -> tuple[Tensor, ...]:
    call = Call(x, weight, None, None, stride, padding, dilation, groups, max_error=max_error)
    dx, *others = by_slices(call, grad, wants)
    found = (None if dx is None else _placed(dx, x, weight), *others)
    return tuple(grad.new_empty(0) if part is None else part for part in found)


def _fake_backward(grad: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int],
                   dilation: list[int], groups: int, wants: list[bool],
                   max_error: float | None) -> tuple[Tensor, ...]:
    shapes = (lambda: _like(x.shape, x, weight), lambda: weight.new_empty(weight.shape),
              lambda: x.new_empty(weight.shape[:1]))
    return tuple(shape() if wanted else grad.new_empty(0)
                 for shape, wanted in zip(shapes, wants, strict=True))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, _, *options = inputs
    activation, max_error = options[4], options[7]
    if not by_mask(activation):
        raise InvalidProblem(f"activation is {activation}, needs relu where the operator itself "
                             "is to be differentiated; tilewise.conv3d takes all of them")
    ctx.save_for_backward(x, weight, output if activation else None)
    ctx.options, ctx.max_error = options[:4], max_error


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """By slices; by torch where the gradients are themselves to be differentiated."""
    x, weight, output = ctx.saved_tensors
    *wants, residual = ctx.needs_input_grad[:4]
    if output is not None:
        grad = torch.ops.aten.threshold_backward(grad, output, 0)
    if torch.is_grad_enabled():
        found = by_torch(Call(x, weight, None, None, *ctx.options), grad, wants)
    else:
        found = _BACKWARD(grad, x, weight, *ctx.options, list(wants), ctx.max_error)
    parts = [part if wanted else None for part, wanted in zip(found, wants, strict=True)]
    return *parts, grad if residual else None, *[None] * 9


_LIBRARY = torch.library.Library("tilewise", "FRAGMENT")
_LIBRARY.define("conv3d(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, SymInt[] stride, "
                "SymInt[] padding, SymInt[] dilation, SymInt groups, str? activation, int pool, "
                "str? algorithm, float? max_error, Tensor? slope=None) -> Tensor")
_LIBRARY.define("conv3d_backward(Tensor grad, Tensor x, Tensor weight, SymInt[] stride, "
                "SymInt[] padding, SymInt[] dilation, SymInt groups, bool[] wants, "
                "float? max_error) -> (Tensor, Tensor, Tensor)")
_OPERATORS: dict[str, tuple[Any, Any]] = {"conv3d": (_conv3d, _fake),
                                          "conv3d_backward": (_conv3d_backward, _fake_backward)}
for _name, (_impl, _shape) in _OPERATORS.items():
    _LIBRARY.impl(_name, as_operator(_impl), "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilewise::{_name}", _shape, lib=_LIBRARY)
torch.library.register_autograd("tilewise::conv3d", _backward, setup_context=_save, lib=_LIBRARY)
_OP = torch.ops.tilewise.conv3d.default
_BACKWARD = torch.ops.tilewise.conv3d_backward.default
