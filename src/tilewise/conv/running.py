"""Calls by the engine: found under a key, built at the first call, run with prepared weights."""

from __future__ import annotations

import torch
from torch import Tensor

from ..algorithms import ALGORITHMS
from ..kernels import precision
from ..runtime.engine import Engine
from ..runtime.executable import Executable
from ..runtime.images import pitch_of
from ..runtime.weights import Norm, channels_of, prepared, prepared_with_norm
from .again import form
from .calls import Call, problem_of
from .devices import target_of

ENGINE = Engine(ALGORITHMS)


def executable_of(call: Call, mask: bool = False, pitch: int = 0,
                  stored: bool = False) -> Executable:
    """With `pitch`, for a result between other channels, so many in all, where that can be;
    `stored`: images may be of another type than the weight."""
    x, weight, bias, residual, stride, padding, dilation, *rest, max_error, slope = call
    key = (form(x), form(weight), bias is None or bias.dtype, slope is None or slope.dtype,
           residual is None or (residual.shape, residual.dtype), *stride, *padding, *dilation,
           *rest, torch.get_num_threads(), x.device,
           precision.asked() if max_error is None else max_error, mask, pitch, stored)
    executable = ENGINE.executables.get(key)
    if executable is None:
        plan = ENGINE.plan(problem_of(call, mask, stored), target_of(x), algorithm=call.algorithm,
                           max_error=max_error)
        plan = ENGINE.among(plan, pitch_of(tuple(x.shape), x.stride()), pitch)
        executable = ENGINE.executables.put(key, ENGINE.build(plan))
    return executable


def run(call: Call) -> Tensor:
    executable = executable_of(call)
    ENGINE.tell(executable.plan)
    return executable(call.x, prepared(call.weight, executable).value,
                      channels_of(call.bias, call.slope, executable), call.residual)


def run_norm(call: Call, norm: Norm) -> Tensor:
    # a bias there will be; under autocast a norm keeps its own type
    executable = executable_of(call._replace(bias=norm[0].to(call.x.dtype)))
    ENGINE.tell(executable.plan)
    weight, bias = prepared_with_norm(call.weight, call.bias, norm, executable).value
    return executable(call.x, weight, channels_of(bias, call.slope, executable), call.residual)


def run_masked(call: Call) -> tuple[Tensor, Tensor]:
    """The result, and which values before ReLU and pooling a gradient passes."""
    executable = executable_of(call, mask=True)
    ENGINE.tell(executable.plan)
    y, mask = executable.masked(call.x, prepared(call.weight, executable).value, call.bias,
                                call.residual)
    assert mask is not None
    return y, mask
