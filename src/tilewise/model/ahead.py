"""What a graph's first call will need is compiled by other processes while the call begins.

The graph runs once without its convolutions: blocks plan, ask for code and give memory as they
find it. What such values become does not matter, their shapes do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..conv.again import is_transformed, is_unwatched
from ..conv.axes import plans_of, shape_of
from ..conv.batch_norm import CalledNorm
from ..conv.calls import Call
from ..conv.linear import Linear, plan_of
from ..conv.options import options_of
from ..conv.running import ENGINE
from ..conv.transposed import call_of
from ..conv.transposed_axes import plans_of as plans_of_transposed
from ..conv.transposed_axes import shape_of as shape_of_transposed
from ..core.plan import Plan
from ..core.watching import telling
from ..kernels.cpu.emit.launch import is_compiled
from ..kernels.cpu.emit.workers import AHEAD
from ..runtime.images import pitch_of
from ..runtime.types import element_of
from .effects import name_of, torch_module
from .graphs import Graph, Names
from .layout import PLAIN
from .native import Native
from .nn import Block, TransposedBlock
from .tracer import is_hooked


class Found:
    """What a call needs: code that is not compiled yet by its keys, and plans."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.plans: list[Plan] = []
        self.blocks = 0  # that were met
        self.is_all = False  # whether the graph was run to its end

    def ask(self, plan: Plan) -> None:
        """Note the code that a plan needs, if it has to be compiled."""
        algorithm = ENGINE.planner.algorithm(plan.algorithm)
        for request in algorithm.requests(plan.inner, plan.target, plan.schedule):
            if request.key not in self.requests and not is_compiled(request):
                self.requests[request.key] = request


def look(capture: Graph, tensors: Iterable[Tensor]) -> int:
    """Ask for all kernels that a call with such tensors needs and that are not compiled yet.

    As far as the graph can be run like this: what the rest needs is compiled when it is called.
    Returns the number of processes that compile.
    """
    return AHEAD.ask(list(seen(capture, tensors).requests.values()))


def seen(capture: Graph, tensors: Iterable[Tensor]) -> Found:
    """What a call with such tensors needs."""
    tensors, found = list(tensors), Found()
    if not _may_run(capture, tensors):
        return found
    with contextlib.suppress(Exception):
        steps = {name: _looking(step, found) for name, step in capture.steps.items()}
        capture.run(_Names(steps, capture.tensors), map(torch.empty_like, tensors))
        found.is_all = True
    return found


def _may_run(capture: Graph, tensors: list[Tensor]) -> bool:
    """Whether nobody would notice: no mode watches, and all that runs is known to compute only."""
    quiet = not (torch.is_grad_enabled() or is_transformed()
                 or torch._C._is_any_autocast_enabled()) and is_unwatched(*tensors)
    return quiet and all(x.is_floating_point() for x in tensors) and all(
        name_of(node) in PLAIN for node in capture.graph.nodes
        if node.op in ("call_function", "call_method"))


class _Names(Names):
    """A graph may write to what it finds by name: it is given something else to write to."""

    def __getattr__(self, name: str) -> Any:
        return torch.empty_like(super().__getattr__(name))


class _Stop(Exception):
    """Here is something that might do more than compute."""


def _looking(step: Any, found: Found) -> Any:
    """A step without its arithmetic, if that is known."""
    if isinstance(step, TransposedBlock):
        return lambda x: _of_transposed(step, found, x)
    if isinstance(step, Block):
        return lambda x, residual=None, slope=None: _of_block(step, found, x, residual, slope)
    if isinstance(step, Linear):
        return lambda x, slope=None: _of_linear(step, found, x, slope)
    if isinstance(step, Native):
        return lambda *operands: _of_native(step, found, operands)
    if isinstance(step, nn.Module) and torch_module(step) is not None and not (
            step.training or is_hooked(step)):
        return step

    def stop(*_: Any, **__: Any) -> None:
        raise _Stop

    return stop


def _as_stored(block: Block, x: Tensor, tensor: Tensor | None) -> Tensor | None:
    """A tensor of a block's modules as plans see it: of the type of what is stored."""
    if tensor is None or not block.stores:
        return tensor
    return torch.empty_like(tensor, dtype=x.dtype)


def _of_block(block: Block, found: Found, x: Tensor, residual: Tensor | None,
              slope: Tensor | None) -> Tensor:
    conv, norm = block._parts
    found.blocks += 1
    options = options_of(conv.stride, block.padding, conv.dilation, conv.groups, block.activation,
                         block.pool, conv.weight.shape[2:])
    bias = conv.bias if norm is None else norm.running_mean
    weight, bias, slope = (_as_stored(block, x, t) for t in (conv.weight, bias, slope))
    assert weight is not None
    call = Call(x, weight, bias, residual, *options, None, block.max_error, slope)
    if element_of(x.dtype) is not None:
        read, written = pitch_of(tuple(x.shape), x.stride()), conv.out_channels * block.is_part
        for plan in plans_of(call):
            found.plans.append(plan)
            found.ask(ENGINE.among(plan, read, written))
            if block.reads_part:
                found.ask(ENGINE.among(plan, conv.in_channels + 1, written))
    return shape_of(call)


def _of_linear(layer: Linear, found: Found, x: Tensor, slope: Tensor | None) -> Tensor:
    plan = plan_of(layer, x, slope)
    if plan is not None:
        found.ask(plan)
    return x.new_empty((*x.shape[:-1], layer.parts[0].out_features))


def _of_transposed(block: TransposedBlock, found: Found, x: Tensor) -> Tensor:
    found.blocks += 1
    x, weight, bias, *rest = block.call(x)
    norm = block._parts[1]
    bias = bias if norm is None else norm.running_mean
    weight, bias = (_as_stored(block, x, t) for t in (weight, bias))
    call = call_of(x, weight, bias, *rest, activation=block.activation, max_error=block.max_error)
    if element_of(x.dtype) is not None:
        for plan in plans_of_transposed(call):
            found.plans.append(plan)
            found.ask(plan)
            if block.is_part:
                found.ask(ENGINE.among(plan, 0, block._parts[0].out_channels))
    y = shape_of_transposed(call)
    return y.squeeze(-2) if block.axes == 1 else y


class _Later(Exception):
    """A kernel would have to be compiled."""

    def __init__(self, request: Any) -> None:
        self.request = request


class _Asking:
    """A watcher that lets nothing be compiled."""

    def loads(self, request: Any) -> None:
        if not is_compiled(request):
            raise _Later(request)

    def launched(self, entry: Any, frame: Any) -> None: ...
    def took(self, tensor: Any, pooled: bool) -> None: ...
    def relies_on(self, made: Any) -> None: ...
    def keeps(self, tensor: Any) -> None: ...
    def cannot_repeat(self, why: str) -> None: ...


def _of_native(step: Native, found: Found, operands: tuple[Any, ...]) -> Any:
    """The kernel where it is there, else what torch had: as long as it takes to compile it."""
    if any(isinstance(part, _NormBase | CalledNorm) and part.training for part in step.parts):
        raise _Stop  # its statistics would move
    try:
        with telling(_Asking()):
            return step(*operands)
    except _Later as later:
        found.requests.setdefault(later.request.key, later.request)
        return step.original(*operands)
