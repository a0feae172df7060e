"""A convolution with the batch norm behind it in training mode, as one differentiable step.

What a call needs is found once, and remembered under all that it depends on: what torch does for a
small layer takes less time than to look all of that up.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..algorithms.vendor import of_seen_pixels
from ..core.problem import Problem
from ..runtime import batch_norm as kernels
from ..runtime.batch_norm import Statistics
from ..runtime.executable import Executable
from ..runtime.weights import channels_of, prepared
from .again import Calls, form, is_plain_gradient, is_transformed, is_unwatched, settings
from .batch_norm import NORMS, SMOOTH, as_they_were, by_torch, follow, is_hooked, is_ours
from .calls import TORCH, Call, check, gate, problem_of
from .devices import target_of
from .gradients import by_engine, tied
from .gradients import by_torch as gradients_by_torch
from .operators import shape_of, whole
from .ops import has_few_pixels
from .options import Options
from .running import ENGINE, executable_of

NAMES = {"weight", "bias"}


class Learned:
    """Such a call; without a problem, one that is not ours to make."""

    def __init__(self, problem: Problem | None = None, executable: Executable | None = None,
                 eps: float = 0.0, activation: str | None = None,
                 max_error: float | None = None) -> None:
        self.problem, self.eps, self.activation = problem, eps, activation
        self.max_error, self.used = max_error, 0
        # it holds on to nothing that the cache of executables lets go
        self.executable = _nothing if executable is None else weakref.ref(executable)

    @property
    def is_ours(self) -> bool:
        return self.problem is not None


def _nothing() -> None:
    """Where a weak reference would be."""


def trained(calls: Calls, asks: Hashable, conv: Any, norm: Any, x: Tensor,
            residual: Tensor | None, activation: str | None, max_error: float | None,
            options: Callable[[], Options]) -> Tensor | None:
    """activation(norm(conv(x)) + residual) in training mode; None where that is not ours to do.

    `asks` is all that the modules say. Running statistics move as torch moves them.
    """
    if type(norm) not in NORMS or is_hooked(norm):
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
    executable = None if found is None else found.executable()
    if found is None or (executable is None and found.is_ours):  # the cache let it go
        executable, found = _found(Call(x, weight, bias, None, *options(), None, max_error), norm,
                                   residual, activation)
        calls.keep(key, found)
    if executable is None:
        return None
    y: Tensor = _Trained.apply(*operands, found, executable, norm)
    return y


def _is_quiet(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether nobody watches, and all have strides."""
    return is_unwatched(*tensors) and not (
        is_transformed() or torch._C._is_any_autocast_enabled()) and all(
        t is None or t.layout is torch.strided for t in tensors)


def _found(call: Call, norm: Any, residual: Tensor | None,
           activation: str | None) -> tuple[Executable | None, Learned]:
    check(call.x, call.weight, call.bias)
    if gate(call) == TORCH or has_few_pixels(call):
        return None, Learned()
    problem = problem_of(call)  # which says what is wrong with shapes
    if not is_ours(norm, shape_of(call), residual, activation):
        return None, Learned()
    executable = executable_of(call)
    return executable, Learned(problem, executable, norm.eps, activation, call.max_error)


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
        # as torch does: nothing of what is frozen, and of the bias nothing that may not change
        of_x, _, of_weight, of_bias, *_ = ctx.needs_input_grad
        kept = (x, weight) if of_x or of_weight or of_bias else (None, None)
        ctx.bias, ctx.shift = bias if of_bias else None, shift
        ctx.save_for_backward(*kept, between, scale,
                              shift if learned.activation in SMOOTH else None, *statistics)
        return whole(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """By our kernels; by torch where the gradients are themselves to be differentiated."""
        learned, wants = ctx.learned, ctx.needs_input_grad[:6]
        x, weight, *saved = ctx.saved_tensors
        of_x, of_residual, of_weight, of_bias, *of_norm = wants
        asked = (of_x, of_weight, of_bias, False)
        parts: Any = (None,) * 4
        if torch.is_grad_enabled() or not is_plain_gradient(grad, x, weight, saved[0]):
            between, *others = as_they_were(*saved)
            if torch.is_grad_enabled() and x is not None:
                between = _as_a_function(learned, between, x, weight, ctx.bias)
            between, residual, *norms = by_torch(learned.activation, learned.eps,
                                                 (True, True, *of_norm), tied(grad, ctx.shift),
                                                 (between, *others))
            if x is not None:
                parts = gradients_by_torch(learned.problem, between, x, weight, None, asked)
        else:
            between, _, _, tables, mask = as_they_were(*saved)
            found = kernels.backward(grad, between, Statistics(tables, mask), learned.activation,
                                     learned.eps, of_residual)
            residual, norms = found.residual, [found.weight, found.bias]
            if x is not None:
                x, weight = x.to(torch.float32), weight.to(torch.float32)  # likewise
                parts = by_engine(ENGINE, learned.problem, target_of(x), found.x, x, weight, None,
                                  asked, learned.max_error)
        all_ = (parts[0], residual, parts[1], parts[2], *norms)
        return *(part if wanted else None for part, wanted in zip(all_, wants, strict=True)), \
            None, None, None


def _as_a_function(learned: Learned, between: Tensor, x: Tensor, weight: Tensor,
                   bias: Tensor | None) -> Tensor:
    """The convolution's result, with what autograd needs to differentiate it once more.

    Its values stay those that the statistics were made of.
    """
    assert learned.problem is not None
    p, seen = of_seen_pixels(learned.problem, x)
    top, bottom, left, right = p.padding
    even = top == bottom and left == right
    with torch.autocast("cpu", enabled=False):
        y = F.conv2d(seen if even else F.pad(seen, (left, right, top, bottom)), weight, bias,
                     p.stride, (top, left) if even else 0, p.dilation, p.groups)
        return between + (y - y.detach())
