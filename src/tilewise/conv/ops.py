"""tilewise.conv2d: a drop-in for torch.nn.functional.conv2d, as a torch.library operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..algorithms import ALGORITHMS
from ..core.activations import by_mask
from ..core.errors import InvalidProblem
from ..kernels import precision
from ..kernels.activations import activated, joined
from ..kernels.cpu.between.masks import pixel_bytes
from ..runtime.engine import Engine
from ..runtime.executable import Executable
from ..runtime.weights import Norm, can_change_unnoticed, prepared, prepared_with_norm
from .again import Again, form, is_plain_gradient, is_unwatched
from .calls import (
    GRADIENT,
    KERNEL,
    OPERATOR,
    TORCH,
    Call,
    check,
    check_slope,
    check_tensors,
    gate,
    is_channels_last,
    problem_of,
)
from .devices import target_of
from .gradients import by_engine, by_torch
from .options import Options, options_of, output_shape

ENGINE = Engine(ALGORITHMS)

FEW_PIXELS = 64  # images of one pixel each


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None,
           stride: int | Sequence[int] = 1, padding: int | str | Sequence[int] = 0,
           dilation: int | Sequence[int] = 1, groups: int = 1, *,
           activation: str | None = None, slope: Tensor | None = None,
           residual: Tensor | None = None, pool: int = 1,
           algorithm: str | None = None, max_error: float | None = None) -> Tensor:
    """`torch.nn.functional.conv2d`, then what often follows it, in one call.

    The residual is added first, then comes the activation, then max-pooling. Gradients work, and
    are planned on their own.

    Args:
        x: Images, (N, C, H, W) or (C, H, W).
        weight: Filters, (K, C / groups, R, S).
        bias: One value for each filter.
        stride: As in torch.
        padding: As in torch, or (top, bottom, left, right).
        dilation: As in torch.
        groups: As in torch.
        activation: "relu", "relu6", "leaky_relu", "elu", "silu", "gelu", "gelu_tanh", "mish",
            "sigmoid", "tanh", "hardswish", "hardsigmoid" or "clamp", as in `torch.nn.functional`;
            with numbers, "leaky_relu:0.2", "elu:0.5" or "clamp:-1:1"; "prelu", with `slope`.
        slope: For "prelu", one slope for each filter, or one for all.
        residual: A tensor of the output's shape before pooling.
        pool: Side of the max-pooling windows, and their stride; 1 is none.
        algorithm: One of `tilewise.algorithms()`, instead of the planner's choice.
        max_error: Bound on the relative rms error, instead of the one that
            `torch.set_float32_matmul_precision` stands for.

    Returns:
        The result, (N, K, H, W) or (K, H, W), with the height and width of the output.

    >>> x, weight = torch.randn(1, 8, 16, 16), torch.randn(4, 8, 3, 3)
    >>> conv2d(x, weight, padding=1, activation="relu", pool=2).shape
    torch.Size([1, 4, 8, 8])
    """
    check_tensors(x, weight)
    if x.dim() == 3:
        extra = None if residual is None else residual.unsqueeze(0)
        return conv2d(x.unsqueeze(0), weight, bias, stride, padding, dilation, groups,
                      activation=activation, slope=slope, residual=extra, pool=pool,
                      algorithm=algorithm, max_error=max_error).squeeze(0)
    check(x, weight, bias)
    check_slope(slope, activation, weight.shape[0])
    options = options_of(stride, padding, dilation, groups, activation, pool, weight.shape[2:])
    call = Call(x, weight, bias, residual, *options, algorithm, max_error, slope)
    who = gate(call)
    if who == KERNEL:
        return _run(call)
    if who == OPERATOR:
        result: Tensor = _OP(*call)
        return result
    return _differentiable(call) if who == GRADIENT else _by_torch(call)


def conv2d_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
                padding: Any = 0, dilation: Any = 1, groups: int = 1, *, norm: Norm,
                activation: str | None = None, slope: Tensor | None = None,
                residual: Tensor | None = None, pool: int = 1,
                max_error: float | None = None) -> Tensor:
    """conv2d with a batch norm in eval mode behind it; norm: mean, variance, weight, bias, eps.

    What the norm is multiplied into is remembered from call to call; where a gradient is asked
    for, the norm is torch's.
    """
    check(x, weight, bias)
    check_slope(slope, activation, weight.shape[0])
    options = options_of(stride, padding, dilation, groups, activation, pool, weight.shape[2:])
    call = Call(x, weight, bias, residual, *options, None, max_error, slope)
    who = gate(call, *norm[:4]) if can_fold(weight, norm) else TORCH
    if who == KERNEL:
        return _run_norm(call, norm)
    if who == OPERATOR:
        result: Tensor = _NORM(x, weight, bias, *norm, residual, *options, max_error, slope)
        return result
    y = conv2d(x, weight, bias, stride, padding, dilation, groups, max_error=max_error)
    mean, variance, scale, shift, eps = norm
    y = F.batch_norm(y, mean, variance, scale, shift, eps=eps)
    return then(y if residual is None else y + residual, activation, pool, slope)


def call_again(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
               norm: Norm | None, options: Options, max_error: float | None,
               slope: Tensor | None = None) -> Again | None:
    """The call with all that it needs found; None where each has to be looked at anew."""
    others = () if norm is None else norm[:4]
    call = Call(x, weight, bias, residual, *options, None, max_error, slope)
    if (torch.is_grad_enabled() or x.dim() != 4 or gate(call, *others) != KERNEL
            or (norm is not None and not can_fold(weight, norm))
            or any(map(can_change_unnoticed, (weight, bias, *others)))):
        return None
    check(x, weight, bias)
    check_slope(slope, call.activation, weight.shape[0])
    if norm is None:
        executable = _executable(call)
        return Again(ENGINE, executable, prepared(weight, executable), False)
    executable = _executable(call._replace(bias=norm[0]))  # of the form that the bias will have
    return Again(ENGINE, executable, prepared_with_norm(weight, bias, norm, executable), True)


def can_fold(weight: Tensor, norm: Norm) -> bool:
    """Whether a norm is of the weight's type, and has as many channels."""
    return norm[0].dtype == weight.dtype and norm[0].shape == weight.shape[:1]


def _by_torch(call: Call) -> Tensor:
    top, bottom, left, right = call.padding
    x, even = call.x, top == bottom and left == right
    y = F.conv2d(x if even else F.pad(x, (left, right, top, bottom)), call.weight, call.bias,
                 call.stride, [top, left] if even else 0, call.dilation, call.groups)
    y = y if call.residual is None else y + call.residual
    return then(y, call.activation, call.pool, call.slope)


def _differentiable(call: Call) -> Tensor:
    """With as much of the tail fused as a gradient allows."""
    if call.algorithm is None and call.max_error is None and _has_few_pixels(call):
        return _by_torch(call)
    activation, pool = _with_gradient(call.activation, call.pool)
    plain = is_unwatched(*call.tensors)
    if (activation, pool) != (None, 1) and _can_mask(call.x, call.weight):
        run = _Masked.apply if plain else _MASKED
        y = run(*call._replace(activation=activation, pool=pool))[0]
    else:
        pool = 1
        run = _Convolved.apply if plain else _OP
        y = run(*call._replace(activation=activation, pool=pool, slope=None))
    return then(y, None if activation else call.activation, 1 if pool == call.pool else call.pool,
                call.slope)


def _has_few_pixels(call: Call) -> bool:
    """Whether to prepare a weight that learns takes longer than what is done with it."""
    n, _, h, w = call.x.shape
    return h * w == 1 and n <= FEW_PIXELS


def _with_gradient(activation: str | None, pool: int) -> tuple[str | None, int]:
    """The beginning of the tail that can be fused where a gradient is asked for."""
    if not by_mask(activation):
        return None, 1
    return activation, pool if pool == 2 else 1


def _can_mask(x: Tensor, weight: Tensor) -> bool:
    """Whether the engine can note which values a gradient passes."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and (
        is_channels_last(x) or is_channels_last(weight))


def then(y: Tensor, activation: str | None, pool: int, slope: Tensor | None = None) -> Tensor:
    y = activated(y, activation, slope)
    return y if pool == 1 else F.max_pool2d(y, pool)


def _executable(call: Call, mask: bool = False) -> Executable:
    x, weight, bias, residual, stride, padding, dilation, *rest, max_error, slope = call
    key = (form(x), form(weight), bias is None or bias.dtype, slope is None or slope.dtype,
           residual is None or (residual.shape, residual.dtype), *stride, *padding, *dilation,
           *rest, torch.get_num_threads(), x.device,
           precision.asked() if max_error is None else max_error, mask)
    executable = ENGINE.executables.get(key)
    if executable is None:
        plan = ENGINE.plan(problem_of(call, mask), target_of(x), algorithm=call.algorithm,
                           max_error=max_error)
        executable = ENGINE.executables.put(key, ENGINE.build(plan))
    return executable


def _run(call: Call) -> Tensor:
    executable = _executable(call)
    ENGINE.tell(executable.plan)
    return executable(call.x, prepared(call.weight, executable).value,
                      joined(call.bias, call.slope, call.weight.shape[0]), call.residual)


def _run_norm(call: Call, norm: Norm) -> Tensor:
    executable = _executable(call._replace(bias=norm[0]))  # a bias there will be
    ENGINE.tell(executable.plan)
    weight, bias = prepared_with_norm(call.weight, call.bias, norm, executable).value
    return executable(call.x, weight, joined(bias, call.slope, call.weight.shape[0]),
                      call.residual)


def _run_masked(call: Call) -> tuple[Tensor, Tensor]:
    """The result, and which values before ReLU and pooling a gradient passes."""
    executable = _executable(call, mask=True)
    ENGINE.tell(executable.plan)
    y, mask = executable.masked(call.x, prepared(call.weight, executable).value, call.bias,
                                call.residual)
    assert mask is not None
    return y, mask


# as the operators have them


def _conv2d(*args: Any) -> Tensor:
    return _run(Call(*args))


def _conv2d_masked(*args: Any) -> tuple[Tensor, Tensor]:
    return _run_masked(Call(*args))


def _conv2d_backward(grad: Tensor, x: Tensor, weight: Tensor, mask: Tensor | None,
                     stride: list[int], padding: list[int], dilation: list[int], groups: int,
                     activation: str | None, pool: int, wants: list[bool],
                     max_error: float | None) -> tuple[Tensor, ...]:
    p = problem_of(Call(x, weight, None, None, stride, padding, dilation, groups, activation, pool))
    found = by_engine(ENGINE, p, target_of(x), grad, x, weight, mask, wants, max_error)
    return tuple(grad.new_empty(0) if part is None else part for part in found)


def _conv2d_norm(x: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor, variance: Tensor,
                 scale: Tensor | None, shift: Tensor | None, eps: float,
                 residual: Tensor | None, *rest: Any) -> Tensor:
    options, more = rest[:6], rest[6:]  # a slope that lacks is not handed on
    call = Call(*(x, weight, bias, residual, *options, None, *more))
    return _run_norm(call, (mean, variance, scale, shift, eps))


def _fake_norm(x: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor, variance: Tensor,
               scale: Tensor | None, shift: Tensor | None, eps: float, residual: Tensor | None,
               *options: Any) -> Tensor:
    shape: Any = _fake
    return shape(x, weight, bias, residual, *options[:6], None, *options[6:])


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
          stride: list[int], padding: list[int], dilation: list[int], groups: int,
          activation: str | None, pool: int, algorithm: str | None,
          max_error: float | None, slope: Tensor | None = None) -> Tensor:
    """Shape and strides of the result, without computing it."""
    n, k, h, w = output_shape(x, weight, stride, padding, dilation)
    h, w = h // pool, w // pool
    if is_channels_last(x) or is_channels_last(weight):
        return x.new_empty((n, h, w, k)).permute(0, 3, 1, 2)
    return x.new_empty((n, k, h, w))


def shape_of(call: Call) -> Tensor:
    """A tensor like the result of a call."""
    return _fake(*call)


def _fake_masked(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
                 stride: list[int], padding: list[int], dilation: list[int], groups: int,
                 activation: str | None, pool: int, algorithm: str | None,
                 max_error: float | None, slope: Tensor | None = None) -> tuple[Tensor, Tensor]:
    y = _fake(x, weight, bias, residual, stride, padding, dilation, groups, activation, pool,
              algorithm, max_error)
    n, k, h, w = output_shape(x, weight, stride, padding, dilation)
    bytes_ = pixel_bytes(k, target_of(x).lanes)
    return y, x.new_empty((n, h, w, bytes_), dtype=torch.uint8)


def _fake_backward(grad: Tensor, x: Tensor, weight: Tensor, mask: Tensor | None,
                   stride: list[int], padding: list[int], dilation: list[int], groups: int,
                   activation: str | None, pool: int, wants: list[bool],
                   max_error: float | None) -> tuple[Tensor, ...]:
    n, k, h, w = output_shape(x, weight, stride, padding, dilation)
    last = is_channels_last(x) or is_channels_last(weight)

    def images(n: int, c: int, h: int, w: int) -> Tensor:
        if last:
            return x.new_empty((n, h, w, c)).permute(0, 3, 1, 2)
        return x.new_empty((n, c, h, w))

    shapes = (lambda: images(*x.shape), lambda: weight.new_empty(weight.shape),
              lambda: x.new_empty((k,)), lambda: images(n, k, h, w))
    return tuple(shape() if wanted else grad.new_empty(0)
                 for shape, wanted in zip(shapes, wants, strict=True))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, _, _, *options = inputs
    activation, pool, _, max_error = options[4:8]
    y, mask = output if isinstance(output, tuple) else (output, None)
    if mask is not None:
        ctx.mark_non_differentiable(mask)
    if mask is None and (not by_mask(activation) or pool != 1):
        raise InvalidProblem(f"activation is {activation} and pool is {pool}, needs relu and no "
                             "pool where the operator itself is to be differentiated; "
                             "tilewise.conv2d takes all of them")
    cut = y if mask is None and activation == "relu" else None
    ctx.save_for_backward(x, weight, mask, cut)
    ctx.options, ctx.tail, ctx.max_error = options[:4], (activation, pool), max_error


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    """By the engine; by torch where the gradients are themselves to be differentiated."""
    x, weight, mask, output = ctx.saved_tensors
    wants = list(ctx.needs_input_grad[:4])
    if output is not None:
        grad = torch.ops.aten.threshold_backward(grad, output, 0)
    tail = ctx.tail if mask is not None else (None, 1)
    if torch.is_grad_enabled():
        p = problem_of(Call(x, weight, None, None, *ctx.options, *tail))
        return *by_torch(p, grad, x, weight, mask, wants), *[None] * 9
    # an operator may not return what it was given: without a mask, that is the residual's gradient
    asked = [*wants[:3], wants[3] and mask is not None]
    run: Any = _conv2d_backward if is_plain_gradient(grad, x, weight) else _BACKWARD
    found = run(grad, x, weight, mask, *ctx.options, *tail, asked, ctx.max_error)
    *parts, residual = (part if wanted else None
                        for part, wanted in zip(found, asked, strict=True))
    return *parts, grad if wants[3] and mask is None else residual, *[None] * 9


class _Convolved(torch.autograd.Function):
    """The operator without torch's dispatcher, which takes longer than a small convolution."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        y = whole(_run(Call(*args)))
        _save(ctx, args, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *grads)


class _Masked(torch.autograd.Function):
    """The same with a mask."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        y, mask = _run_masked(Call(*args))
        found = whole(y), mask
        _save(ctx, args, found)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *grads)


def as_operator(run: Any) -> Any:
    """Results that are no views: autograd refuses to change those in place that it did not make."""

    def impl(*args: Any) -> Any:
        found = run(*args)
        return tuple(map(whole, found)) if isinstance(found, tuple) else whole(found)

    return impl


def whole(y: Tensor) -> Tensor:
    """The same memory as no view."""
    if not y._is_view() or y.device.type != "cpu":
        return y
    return y.new_empty(0).set_(y.untyped_storage(), y.storage_offset(), y.shape, y.stride())


# defined at this level and not by custom_op: a third of the time of a call
_LIBRARY = torch.library.Library("tilewise", "DEF")
_CALL = ("(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, SymInt[] stride, "
         "SymInt[] padding, SymInt[] dilation, SymInt groups, str? activation, int pool, "
         "str? algorithm, float? max_error, Tensor? slope=None)")
_LIBRARY.define(f"conv2d{_CALL} -> Tensor")
_LIBRARY.define(f"conv2d_masked{_CALL} -> (Tensor, Tensor)")
_LIBRARY.define("conv2d_backward(Tensor grad, Tensor x, Tensor weight, Tensor? mask, "
                "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups, "
                "str? activation, int pool, bool[] wants, float? max_error) "
                "-> (Tensor, Tensor, Tensor, Tensor)")
_LIBRARY.define("conv2d_norm(Tensor x, Tensor weight, Tensor? bias, Tensor mean, Tensor variance, "
                "Tensor? scale, Tensor? shift, float eps, Tensor? residual, SymInt[] stride, "
                "SymInt[] padding, SymInt[] dilation, SymInt groups, str? activation, int pool, "
                "float? max_error, Tensor? slope=None) -> Tensor")
_OPERATORS: dict[str, tuple[Any, Any]] = {
    "conv2d": (_conv2d, _fake), "conv2d_norm": (_conv2d_norm, _fake_norm),
    "conv2d_masked": (_conv2d_masked, _fake_masked),
    "conv2d_backward": (_conv2d_backward, _fake_backward)}
for _name, (_impl, _shape) in _OPERATORS.items():
    _LIBRARY.impl(_name, as_operator(_impl), "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilewise::{_name}", _shape, lib=_LIBRARY)
for _name in ("conv2d", "conv2d_masked"):
    torch.library.register_autograd(f"tilewise::{_name}", _backward, setup_context=_save,
                                    lib=_LIBRARY)
_OP = torch.ops.tilewise.conv2d.default
_NORM = torch.ops.tilewise.conv2d_norm.default
_MASKED = torch.ops.tilewise.conv2d_masked.default
_BACKWARD = torch.ops.tilewise.conv2d_backward.default
