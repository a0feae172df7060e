"""A convolution with the batch norm behind it in training mode, as one differentiable step.

What a call needs is found once, and remembered under all that it depends on: what torch does for a
small layer takes less time than to look all of that up.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.problem import Problem
from ..runtime import batch_norm as kernels
from ..runtime.batch_norm import Statistics
from ..runtime.executable import Executable
from ..runtime.weights import channels_of, prepared
from .again import Calls, form, is_plain_gradient, is_transformed, is_unwatched, settings
from .batch_norm import SMOOTH, as_they_were, by_torch, follow, is_hooked, is_ours
from .calls import TORCH, Call, check, gate, problem_of
from .devices import target_of
from .gradients import by_engine
from .gradients import by_torch as gradients_by_torch
from .operators import shape_of, whole
from .ops import has_few_pixels
from .options import Options
from .running import ENGINE, executable_of

NAMES = {"weight", "bias"}


class Learned:
    """Such a call; without an executable, one that is not ours to make."""

    def __init__(self, problem: Problem | None = None, executable: Executable | None = None,
                 eps: float = 0.0, activation: str | None = None,
                 max_error: float | None = None) -> None:
        self.problem, self.eps, self.activation = problem, eps, activation
        self.max_error, self.used = max_error, 0
        # it holds on to nothing that the cache of executables lets go
        self.executable = None if executable is None else weakref.ref(executable)


def trained(calls: Calls, asks: Hashable, conv: Any, norm: Any, x: Tensor,
            residual: Tensor | None, activation: str | None, max_error: float | None,
            options: Callable[[], Options]) -> Tensor | None:
    """activation(norm(conv(x)) + residual) in training mode; None where that is not ours to do.

    `asks` is all that the modules say. Running statistics move as torch moves them.
    """
    if type(norm) is not nn.BatchNorm2d or is_hooked(norm):
        return None
    own, values, buffers = conv._parameters, norm._parameters, norm._buffers.get
    if not (own.keys() >= NAMES and values.keys() >= NAMES):  # some are plain attributes now
        return None
    weight, bias = own["weight"], own["bias"]
    operands = (x, residual, weight, bias, values["weight"], values["bias"])
    tensors = (*operands, buffers("running_mean"), buffers("running_var"))
    if weight is None or not _is_quiet(tensors):
        return None
    key = ("learns", asks, settings(), norm.track_running_stats, *map(form, tensors))
    found: Any = calls.find(key)
    if found is None:
        found = _found(Call(x, weight, bias, None, *options(), None, max_error), norm, residual,
                       activation)
        calls.keep(key, found)
    executable = None if found.executable is None else found.executable()
    if executable is None:
        if found.executable is not None:
            calls.drop(key)  # the next call finds it anew
        return None
    y: Tensor = _Trained.apply(*operands, found, executable, norm)
    return y


def _is_quiet(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether nobody watches, and all have strides."""
    return is_unwatched(*tensors) and not (
        is_transformed() or torch._C._is_any_autocast_enabled()) and all(
        t is None or t.layout is torch.strided for t in tensors)


def _found(call: Call, norm: Any, residual: Tensor | None, activation: str | None) -> Learned:
    check(call.x, call.weight, call.bias)
    if gate(call) == TORCH or has_few_pixels(call) or not is_ours(
            norm, shape_of(call), residual, activation):
        return Learned()
    return Learned(problem_of(call), executable_of(call), norm.eps, activation, call.max_error)


class _Trained(torch.autograd.Function):
    """(x, residual, weight and bias of the convolution, those of the norm, learned, executable,
    norm): the result; running statistics move."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None,
                scale: Tensor | None, shift: Tensor | None, learned: Learned,
                executable: Executable, norm: Any) -> Tensor:
        ENGINE.tell(executable.plan)
        between = executable(x, prepared(weight, executable).value,
                             channels_of(bias, None, executable), None)
        y, statistics = kernels.forward(between, residual, scale, shift, learned.eps,
                                        learned.activation)
        follow(norm, statistics, y)
        ctx.learned = learned
        ctx.save_for_backward(x, weight, bias, between, scale,
                              shift if learned.activation in SMOOTH else None, *statistics)
        return whole(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """By our kernels; by torch where the gradients are themselves to be differentiated."""
        learned, wants = ctx.learned, ctx.needs_input_grad[:6]
        x, weight, bias, *saved = ctx.saved_tensors
        of_x, of_residual, of_weight, of_bias, *of_norm = wants
        asked = (of_x, of_weight, of_bias, False)
        if torch.is_grad_enabled() or not is_plain_gradient(grad, x, weight, saved[0]):
            between, residual, *norms = _norm_by_torch(learned, of_norm, grad, x, weight, bias,
                                                       saved)
            parts: Any = gradients_by_torch(learned.problem, between, x, weight, None, asked)
        else:
            between, _, _, tables, mask = as_they_were(*saved)
            x, weight = x.to(torch.float32), weight.to(torch.float32)  # likewise
            found = kernels.backward(grad, between, Statistics(tables, mask), learned.activation,
                                     learned.eps, of_residual)
            residual, norms = found.residual, [found.weight, found.bias]
            parts = by_engine(ENGINE, learned.problem, target_of(x), found.x, x, weight, None,
                              asked, learned.max_error)
        all_ = (parts[0], residual, parts[1], parts[2], *norms)
        return *(part if wanted else None for part, wanted in zip(all_, wants, strict=True)), \
            None, None, None


def _norm_by_torch(learned: Learned, wants: Any, grad: Tensor, x: Tensor, weight: Tensor,
                   bias: Tensor | None, saved: Any) -> tuple[Tensor | None, ...]:
    """Gradients of what is before the norm, of the residual, and of the norm's own weights, as
    functions that autograd knows."""
    p = learned.problem
    assert p is not None
    top, bottom, left, right = p.padding
    even = top == bottom and left == right
    between = F.conv2d(x if even else F.pad(x, (left, right, top, bottom)), weight, bias, p.stride,
                       (top, left) if even else 0, p.dilation, p.groups)
    _, *others = as_they_were(*saved)
    return by_torch(learned.activation, learned.eps, (True, True, *wants), grad, (between, *others))
