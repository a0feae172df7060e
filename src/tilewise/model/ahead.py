"""What a graph's first call will need is compiled by other processes while the call begins.

The graph runs once on tensors without data. Its blocks plan and ask for code; nothing is computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..conv.calls import Call, problem_of
from ..conv.linear import Linear
from ..conv.ops import ENGINE, shape_of
from ..conv.options import options_of
from ..core.target import Target
from ..kernels.cpu.emit.workers import AHEAD
from .capture import Capture, Names
from .effects import torch_module
from .nn import Block


def look(capture: Capture, tensors: Iterable[Tensor]) -> int:
    """Ask for all kernels that a call with such tensors needs and that are not compiled yet.

    As far as the graph can be run without data: what the rest needs is compiled when it is
    called. Returns the number of processes that compile.
    """
    tensors = list(tensors)
    if torch.is_grad_enabled() or not all(x.is_cpu for x in tensors):
        return 0
    found: dict[str, Any] = {}
    steps = {name: _looking(step, found) for name, step in capture.steps.items()}
    with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]):
        capture.run(Names(steps, capture.tensors), [x.to("meta") for x in tensors])
    return AHEAD.ask(list(found.values()))


class _Stop(Exception):
    """Here is something that might do more than compute."""


def _looking(step: Any, found: dict[str, Any]) -> Any:
    """A step for tensors without data."""
    if isinstance(step, Block):
        return lambda x, residual=None: _of_block(step, x, residual, found)
    if isinstance(step, Linear):
        return lambda x: x.new_empty((*x.shape[:-1], step._parts[0].out_features))
    if torch_module(step) is not None and not step.training:
        return step

    def stop(*_: Any, **__: Any) -> None:
        raise _Stop

    return stop


def _of_block(block: Block, x: Tensor, residual: Tensor | None, found: dict[str, Any]) -> Tensor:
    conv, norm = block._parts
    weight = conv.weight.detach().to("meta")
    bias = conv.bias if norm is None else norm.running_mean
    options = options_of(conv.stride, conv.padding, conv.dilation, conv.groups, block.activation,
                         block.pool, weight.shape[2:])
    call = Call(x, weight, None if bias is None else bias.detach().to("meta"), residual, *options,
                None, block.max_error)
    if x.dtype == torch.float32:
        _ask(call, found)
    return shape_of(call)


def _ask(call: Call, found: dict[str, Any]) -> None:
    """Note the code that a call needs, if it has to be compiled."""
    target = Target.host(threads=torch.get_num_threads())
    plan = ENGINE.plan(problem_of(call), target, max_error=call.max_error)
    algorithm: Any = ENGINE.planner.algorithm(plan.algorithm)
    what = plan.inner, plan.target, plan.schedule
    if not algorithm.is_compiled(*what):
        request = algorithm.request(*what)
        found[request.key] = request
