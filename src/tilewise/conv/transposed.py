"""tilewise.conv_transpose2d and its kin: drop-ins for those of torch.nn.functional.

A transposed convolution is the gradient of the input of another, and is planned as such.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..algorithms.vendor import seen_pixels, skips_pixels
from ..core.activations import by_mask
from ..core.errors import InvalidProblem
from ..core.plan import Plan
from ..core.problem import Epilogue, Problem
from ..kernels import precision
from ..runtime.executable import Executable
from ..runtime.types import element_of
from ..runtime.weights import channels_of, prepared
from .again import form
from .autocast import cast_operands
from .calls import (
    GRADIENT,
    KERNEL,
    NAMES,
    OPERATOR,
    Call,
    check_kinds,
    check_tensors,
    gate,
    is_channels_last,
)
from .devices import target_of
from .lines import as_image
from .operators import as_operator
from .ops import added, then
from .options import numbers, options_of
from .running import ENGINE


class Transposed(NamedTuple):
    """In the order of the operator's arguments."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    stride: Any
    padding: Any  # one number an axis, as torch has it
    output_padding: Any
    groups: int
    dilation: Any
    activation: str | None = None
    max_error: float | None = None

    @property
    def slope(self) -> None:
        """There are none behind a transposed convolution."""
        return None


def conv_transpose2d(x: Tensor, weight: Tensor, bias: Tensor | None = None,
                     stride: int | Sequence[int] = 1, padding: int | Sequence[int] = 0,
                     output_padding: int | Sequence[int] = 0, groups: int = 1,
                     dilation: int | Sequence[int] = 1, *, activation: str | None = None,
                     residual: Tensor | None = None, max_error: float | None = None) -> Tensor:
    """`torch.nn.functional.conv_transpose2d`, then what often follows it, in one call.

    The residual is added first, then comes the activation. Gradients work.

    Args:
        x: Images, (N, K, H, W) or (K, H, W).
        weight: Filters, (K, C / groups, R, S).
        bias: One value for each channel of the result.
        stride: As in torch.
        padding: As in torch.
        output_padding: As in torch.
        groups: As in torch.
        dilation: As in torch.
        activation: As in `conv2d`, but for "prelu".
        residual: A tensor of the result's shape.
        max_error: As in `conv2d`.

    Returns:
        The result, (N, C, H, W) or (C, H, W), with its height and width.

    >>> x, weight = torch.randn(1, 8, 16, 16), torch.randn(8, 4, 2, 2)
    >>> conv_transpose2d(x, weight, stride=2, activation="relu").shape
    torch.Size([1, 4, 32, 32])
    """
    check_tensors(x, weight)
    if x.dim() == 3:
        extra = None if residual is None else residual.unsqueeze(0)
        return conv_transpose2d(x.unsqueeze(0), weight, bias, stride, padding, output_padding,
                                groups, dilation, activation=activation, residual=extra,
                                max_error=max_error).squeeze(0)
    call = call_of(x, weight, bias, stride, padding, output_padding, groups, dilation,
                   activation=activation, residual=residual, max_error=max_error)
    if x.dim() != 4 or weight.dim() != 4 or not is_gradient(call):
        return by_torch(call)  # which says what is wrong, if something is
    call, rest = cast_call(call)
    if rest is not None:
        return rest(conv_transpose2d(*call[:3], *call[4:9], max_error=max_error))
    who = gate(Call(*call[:4]))
    if who == KERNEL:
        return _run(call)
    if who == OPERATOR:
        result: Tensor = _OP(*call)
        return result
    return _differentiable(call) if who == GRADIENT else by_torch(call)


def cast_call(call: Transposed) -> tuple[Transposed, Callable[[Tensor], Tensor] | None]:
    """With operands as autocast casts them, and what is to follow where it is of another type."""
    own = cast_operands(*call[:3])
    if own is None:
        return call, None
    cast = call._replace(x=own[0], weight=own[1], bias=own[2])
    residual = call.residual
    if residual is None or residual.dtype == own[0].dtype:
        return cast, None
    alone = cast._replace(residual=None, activation=None)
    return alone, lambda y: then(added(y, residual), call.activation, 1)


def is_gradient(call: Transposed) -> bool:
    """Whether a convolution of the result would give an image of the input's size."""
    return all(0 <= more < step for more, step in zip(call.output_padding, call.stride))


def call_of(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any,
            output_padding: Any, groups: int, dilation: Any, *, activation: str | None = None,
            residual: Tensor | None = None, max_error: float | None = None) -> Transposed:
    """A call with numbers for all axes; of one axis, as images of one row."""
    axes = weight.dim() - 2 if weight.dim() in (3, 5) else 2
    asked = axes, stride, padding, output_padding, groups, dilation, activation
    try:
        options = _options(*asked) if torch.compiler.is_compiling() else _known_options(*asked)
    except TypeError:  # a list has no hash
        options = _options(*asked)
    if axes == 1:
        x, weight = x.unsqueeze(-2), as_image(weight)
        residual = None if residual is None else residual.unsqueeze(-2)
    steps, around, more, groups, apart = options
    return Transposed(x, weight, bias, residual, steps, around, more, groups, apart, activation,
                      max_error)


def _options(axes: int, stride: Any, padding: Any, output_padding: Any, groups: int,
             dilation: Any, activation: str | None) -> tuple[Any, ...]:
    """Numbers for all axes, checked, in the order of the operator's arguments."""
    if activation == "prelu":
        raise InvalidProblem("activation is 'prelu', needs one without slopes")
    steps, around, more, apart = (
        numbers(value, name, axes) for value, name in (
            (stride, "stride"), (padding, "padding"), (output_padding, "output_padding"),
            (dilation, "dilation")))
    options_of(steps, 0, apart, groups, activation, 1, (1,) * axes)  # says what is wrong
    if axes == 1:
        steps, around, more, apart = (1, *steps), (0, *around), (0, *more), (1, *apart)
    return steps, around, more, groups, apart


_known_options = lru_cache(maxsize=1024)(_options)


def conv_transpose1d(x: Tensor, weight: Tensor, bias: Tensor | None = None,
                     stride: int | Sequence[int] = 1, padding: int | Sequence[int] = 0,
                     output_padding: int | Sequence[int] = 0, groups: int = 1,
                     dilation: int | Sequence[int] = 1, *, activation: str | None = None,
                     residual: Tensor | None = None, max_error: float | None = None) -> Tensor:
    """`torch.nn.functional.conv_transpose1d`, by images of one row; see `conv_transpose2d`.

    >>> x, weight = torch.randn(1, 8, 100), torch.randn(8, 4, 4)
    >>> conv_transpose1d(x, weight, stride=2, padding=1).shape
    torch.Size([1, 4, 200])
    """
    check_tensors(x, weight)
    if weight.dim() != 3 or x.dim() not in (2, 3):
        return F.conv_transpose1d(x, weight)  # which says what is wrong
    call = call_of(x, weight, bias, stride, padding, output_padding, groups, dilation,
                   activation=activation, residual=residual, max_error=max_error)
    return conv_transpose2d(*call[:3], *call[4:9], activation=activation, residual=call.residual,
                            max_error=max_error).squeeze(-2)


def _differentiable(call: Transposed) -> Tensor:
    """A gradient goes through ReLU by the result; other activations are torch's."""
    if by_mask(call.activation):
        result: Tensor = _OP(*call)
        return result
    return then(_OP(*call._replace(activation=None)), call.activation, 1)


def by_torch(call: Transposed) -> Tensor:
    run = F.conv_transpose3d if len(call.stride) == 3 else F.conv_transpose2d
    y = run(call.x, call.weight, call.bias, call.stride, call.padding, call.output_padding,
            call.groups, call.dilation)
    return then(y if call.residual is None else y + call.residual, call.activation, 1)


def _run(call: Transposed) -> Tensor:
    x, weight = call.x, call.weight
    if len(x) == 0 or not x.is_cpu or element_of(x.dtype) is None:
        return by_torch(call)
    check(call)
    executable = _executable(call)
    ENGINE.tell(executable.plan)
    return executable(x, prepared(weight, executable).value,
                      channels_of(call.bias, None, executable), call.residual)


def into(out: Tensor | None, pitch: int, call: Transposed, stored: bool = False) -> Tensor | None:
    """The result in a slice of channels, of so many, if one is given; None where that cannot be.

    `stored`: images may be of another type than the weight.
    """
    if not is_gradient(call) or call.x.dim() != 4 or element_of(call.x.dtype) is None or (
            gate(Call(*call[:4])) != KERNEL):
        return None
    check(call, stored)
    executable = _executable(call, pitch)
    if out is not None and not executable.is_among:
        return None
    ENGINE.tell(executable.plan)
    return executable(call.x, prepared(call.weight, executable).value,
                      channels_of(call.bias, None, executable), None, out)


def _executable(call: Transposed, pitch: int = 0) -> Executable:
    key = ("transposed", form(call.x), form(call.weight), call.bias is None,
           call.residual is None or call.residual.shape, *call[4:], torch.get_num_threads(),
           precision.asked(), pitch)
    found = ENGINE.executables.get(key)
    if found is None:
        found = ENGINE.executables.put(key, ENGINE.build(ENGINE.among(plan_of(call), 0, pitch)))
    return found


def plan_of(call: Transposed) -> Plan:
    return ENGINE.plan(problem_of(call), target_of(call.x), max_error=call.max_error)


def problem_of(call: Transposed) -> Problem:
    """The gradient of the input that a call is."""
    x, weight = call.x, call.weight
    shape = result_shape(call)
    layout = "nhwc" if is_channels_last(x) or is_channels_last(weight) else "nchw"
    (top, left), (dh, dw), (down, across) = call.padding, call.dilation, call.stride
    return Problem(x.shape[0], shape[1], shape[2], shape[3], weight.shape[0], weight.shape[2],
                   weight.shape[3], (down, across), (top, top, left, left), (dh, dw), call.groups,
                   NAMES[x.dtype], layout, "backward_data",
                   Epilogue(call.bias is not None, call.residual is not None, call.activation))


def check(call: Transposed, stored: bool = False) -> None:
    """What torch would complain about, and a residual that does not fit; in every call."""
    x, weight, bias, residual = call[:4]
    shape = result_shape(call)
    check_kinds(x, weight, bias, residual, stored=stored)
    if x.shape[1] != weight.shape[0]:
        raise InvalidProblem(f"input has {x.shape[1]} channels, needs {weight.shape[0]} for a "
                             f"weight of shape {tuple(weight.shape)}")
    if bias is not None and tuple(bias.shape) != shape[1:2]:
        raise InvalidProblem(f"bias has shape {tuple(bias.shape)}, needs ({shape[1]},)")
    if residual is not None and tuple(residual.shape) != shape:
        raise InvalidProblem(f"residual has shape {tuple(residual.shape)}, needs {shape}")


def result_shape(call: Transposed) -> tuple[int, ...]:
    x, weight = call.x, call.weight
    sizes = [(x.shape[2 + i] - 1) * call.stride[i] - 2 * call.padding[i]
             + call.dilation[i] * (weight.shape[2 + i] - 1) + call.output_padding[i] + 1
             for i in range(len(call.stride))]
    return x.shape[0], weight.shape[1] * call.groups, *sizes


# as the operator has them


def _conv_transpose2d(*args: Any) -> Tensor:
    known: Any = (tuple(arg) if isinstance(arg, list) else arg for arg in args)
    return _run(Transposed(*known))


def _fake(*args: Any) -> Tensor:
    """Shape and strides of the result, without computing it."""
    call = Transposed(*args)
    check(call)
    n, c, h, w = result_shape(call)
    if is_channels_last(call.x) or is_channels_last(call.weight):
        return call.x.new_empty((n, h, w, c)).permute(0, 3, 1, 2)
    return call.x.new_empty((n, c, h, w))


def shape_of(call: Transposed) -> Tensor:
    """A tensor like the result of a call."""
    return _fake(*call)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    call = Transposed(*inputs)
    if not by_mask(call.activation):
        raise InvalidProblem(f"activation is {call.activation}, needs relu where the operator "
                             "itself is to be differentiated; conv_transpose2d takes all of them")
    ctx.save_for_backward(call.x, call.weight, output if call.activation else None)
    ctx.options, ctx.max_error = call[4:9], call.max_error


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Of the input a convolution, of the weight the gradient of one; by torch where these are
    themselves to be differentiated."""
    x, weight, output = ctx.saved_tensors
    of_x, of_weight, of_bias, of_residual = ctx.needs_input_grad[:4]
    stride, padding, more, groups, dilation = ctx.options
    if output is not None:
        grad = torch.ops.aten.threshold_backward(grad, output, 0)
    sides = [side for side in padding for _ in range(2)]
    if torch.is_grad_enabled():
        seen = grad
        if skips_pixels(weight.shape[2:], stride):  # torch's own gradient leaves its memory
            seen = seen_pixels(grad, stride, sides)
            stride, padding, more = [1, 1], [0, 0], [0, 0]
        dx, dw, _ = torch.ops.aten.convolution_backward(
            seen, x, weight, None, stride, padding, dilation, True, more, groups,
            [of_x, of_weight, False])
        return (dx, dw, grad.sum((0, 2, 3)) if of_bias else None, grad if of_residual else None,
                *[None] * 7)
    dx = dw = None
    if of_x:
        dx = torch.ops.tilewise.conv2d(grad, weight, None, None, stride, sides, dilation, groups,
                                       None, 1, None, ctx.max_error)
    if of_weight:
        dw = torch.ops.tilewise.conv2d_backward(
            x, grad, weight, None, stride, sides, dilation, groups, None, 1,
            [False, True, False, False], ctx.max_error)[1]
    return (dx, dw, grad.sum((0, 2, 3)) if of_bias else None, grad if of_residual else None,
            *[None] * 7)


_LIBRARY = torch.library.Library("tilewise", "FRAGMENT")
_LIBRARY.define("conv_transpose2d(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, "
                "SymInt[] stride, SymInt[] padding, SymInt[] output_padding, SymInt groups, "
                "SymInt[] dilation, str? activation=None, float? max_error=None) -> Tensor")
_LIBRARY.impl("conv_transpose2d", as_operator(_conv_transpose2d), "CompositeExplicitAutograd")
torch.library.register_fake("tilewise::conv_transpose2d", _fake, lib=_LIBRARY)
torch.library.register_autograd("tilewise::conv_transpose2d", _backward, setup_context=_save,
                                lib=_LIBRARY)
_OP = torch.ops.tilewise.conv_transpose2d.default
