"""The operators of torch.library: their shapes without values, gradients, and registration.

Where nobody watches, `Convolved` and `Masked` do the same without torch's dispatcher.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.activations import by_mask
from ..core.errors import InvalidProblem
from ..core.problem import Problem
from ..kernels.cpu.between.masks import pixel_bytes
from .again import form, is_plain_gradient
from .calls import Call, is_channels_last, problem_of
from .devices import target_of
from .gradients import by_engine, by_torch, tied
from .options import output_shape
from .running import ENGINE, run, run_masked, run_norm


def _conv2d(*args: Any) -> Tensor:
    return run(Call(*args))


def _conv2d_masked(*args: Any) -> tuple[Tensor, Tensor]:
    return run_masked(Call(*args))


def _conv2d_backward(grad: Tensor, x: Tensor, weight: Tensor, mask: Tensor | None,
                     stride: list[int], padding: list[int], dilation: list[int], groups: int,
                     activation: str | None, pool: int, wants: list[bool],
                     max_error: float | None) -> tuple[Tensor, ...]:
    p = _problem_of(Call(x, weight, None, None, tuple(stride), tuple(padding), tuple(dilation),
                         groups, activation, pool))
    found = by_engine(ENGINE, p, target_of(x), grad, x, weight, mask, wants, max_error)
    return tuple(grad.new_empty(0) if part is None else part for part in found)


_PROBLEMS: dict[Any, Problem] = {}
MOST = 1024  # problems that are remembered


def _problem_of(call: Call) -> Problem:
    """The same each time: to make one takes as long as to run a small one."""
    key = form(call.x), form(call.weight), call.x.device, call.weight.device, *call[4:10]
    found = _PROBLEMS.get(key)
    if found is None:
        if len(_PROBLEMS) >= MOST:
            _PROBLEMS.clear()
        found = _PROBLEMS[key] = problem_of(call)
    return found


def _conv2d_norm(x: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor, variance: Tensor,
                 scale: Tensor | None, shift: Tensor | None, eps: float,
                 residual: Tensor | None, *rest: Any) -> Tensor:
    options, more = rest[:6], rest[6:]  # a slope that lacks is not handed on
    call = Call(*(x, weight, bias, residual, *options, None, *more))
    return run_norm(call, (mean, variance, scale, shift, eps))


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
    x, weight, _, residual, *options = inputs
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
    ctx.in_planes = residual is not None and residual.is_contiguous()


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    """By the engine; by torch where the gradients are themselves to be differentiated."""
    x, weight, mask, output = ctx.saved_tensors
    wants = list(ctx.needs_input_grad[:4])
    if output is not None:
        grad = torch.ops.aten.threshold_backward(grad, output, 0)
    tail = ctx.tail if mask is not None else (None, 1)
    if torch.is_grad_enabled():
        p = problem_of(Call(x, weight, None, None, *ctx.options, *tail))
        grad = tied(grad, getattr(ctx, "bias", None))
        *parts, residual = by_torch(p, grad, x, weight, mask, wants)
        return *parts, _like_residual(ctx, residual), *[None] * 9
    # an operator may not return what it was given: without a mask, that is the residual's gradient
    asked = [*wants[:3], wants[3] and mask is not None]
    how: Any = _conv2d_backward if is_plain_gradient(grad, x, weight) else _BACKWARD
    found = how(grad, x, weight, mask, *ctx.options, *tail, asked, ctx.max_error)
    *parts, residual = (part if wanted else None
                        for part, wanted in zip(found, asked, strict=True))
    residual = grad if wants[3] and mask is None else residual
    return *parts, _like_residual(ctx, residual), *[None] * 9


def _like_residual(ctx: Any, grad: Tensor | None) -> Tensor | None:
    """In the residual's layout: torch's instance norm of one image misreads another."""
    return grad.contiguous() if grad is not None and ctx.in_planes else grad


class Convolved(torch.autograd.Function):
    """The operator without torch's dispatcher, which takes longer than a small convolution."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        y = whole(run(Call(*args)))
        _save(ctx, args, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *grads)


class Masked(torch.autograd.Function):
    """The same with a mask."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        y, mask = run_masked(Call(*args))
        found = whole(y), mask
        _save(ctx, args, found)
        ctx.bias = args[2]  # of which no value is needed
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


def shape_of(call: Call) -> Tensor:
    """A tensor like the result of a call."""
    return _fake(*call)


# defined at this level and not by custom_op: a third of the time of a call
LIBRARY = torch.library.Library("tilewise", "DEF")
_CALL = ("(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, SymInt[] stride, "
         "SymInt[] padding, SymInt[] dilation, SymInt groups, str? activation, int pool, "
         "str? algorithm, float? max_error, Tensor? slope=None)")
LIBRARY.define(f"conv2d{_CALL} -> Tensor")
LIBRARY.define(f"conv2d_masked{_CALL} -> (Tensor, Tensor)")
LIBRARY.define("conv2d_backward(Tensor grad, Tensor x, Tensor weight, Tensor? mask, "
                "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups, "
                "str? activation, int pool, bool[] wants, float? max_error) "
                "-> (Tensor, Tensor, Tensor, Tensor)")
LIBRARY.define("conv2d_norm(Tensor x, Tensor weight, Tensor? bias, Tensor mean, Tensor variance, "
                "Tensor? scale, Tensor? shift, float eps, Tensor? residual, SymInt[] stride, "
                "SymInt[] padding, SymInt[] dilation, SymInt groups, str? activation, int pool, "
                "float? max_error, Tensor? slope=None) -> Tensor")
_OPERATORS: dict[str, tuple[Any, Any]] = {
    "conv2d": (_conv2d, _fake), "conv2d_norm": (_conv2d_norm, _fake_norm),
    "conv2d_masked": (_conv2d_masked, _fake_masked),
    "conv2d_backward": (_conv2d_backward, _fake_backward)}
for _name, (_impl, _shape) in _OPERATORS.items():
    LIBRARY.impl(_name, as_operator(_impl), "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilewise::{_name}", _shape, lib=LIBRARY)
for _name in ("conv2d", "conv2d_masked"):
    torch.library.register_autograd(f"tilewise::{_name}", _backward, setup_context=_save,
                                    lib=LIBRARY)
CONV2D = torch.ops.tilewise.conv2d.default
NORM = torch.ops.tilewise.conv2d_norm.default
MASKED = torch.ops.tilewise.conv2d_masked.default
_BACKWARD = torch.ops.tilewise.conv2d_backward.default
