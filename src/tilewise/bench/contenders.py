"""Who is measured: torch in its best forms, and tilewise."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.problem import Problem
from ..core.progress import Tell, silent
from ..kernels.activations import activated
from ..model.dynamo import has_compiler
from ..model.optimize import optimize
from .subjects import Layer, Subject


@dataclass(frozen=True)
class Contender:
    """Something that computes the subject's result when called."""

    name: str
    family: str  # torch, tilewise or the peer's name
    run: Callable[[], Any]  # returns the result, or leaves it for `result`
    result: Callable[[Any], Tensor] = lambda y: y  # as a tensor of torch
    keep: Any = None  # memory that an engine reads without owning it


def use_huge_pages() -> None:
    """Let torch's allocator ask for huge pages; it looks when it allocates for the first time."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def torch_contenders(s: Subject, compile_: bool = True) -> list[Contender]:
    """Eager in both layouts, and with the weights packed once: compiled, or by oneDNN's op."""
    planes = s.example.contiguous()
    last = s.example.contiguous(memory_format=torch.channels_last)
    in_planes = copy.deepcopy(s.model).to(memory_format=torch.contiguous_format)
    in_last = copy.deepcopy(s.model).to(memory_format=torch.channels_last)
    found = [Contender("torch nchw", "torch", lambda: in_planes(planes)),
             Contender("torch nhwc", "torch", lambda: in_last(last))]
    if s.problem is not None:
        packed = _prepacked(s.problem, s.model, last)
        found += [Contender("torch prepacked", "torch", packed)] if packed else []
    elif compile_ and has_compiler():
        compiled = _compiled(in_last)
        found.append(Contender("torch compiled", "torch", lambda: compiled(last)))
    return found


def _compiled(model: nn.Module) -> Callable[[Tensor], Any]:
    import torch._inductor.config as inductor

    inductor.freezing = True  # weights become constants, packed once
    return torch.compile(copy.deepcopy(model), dynamic=False)


def _prepacked(p: Problem, model: Any, x: Tensor) -> Callable[[], Tensor] | None:
    """What frozen compiled code calls for a convolution, without compiling anything."""
    assert isinstance(model, Layer)
    if model.pad is not None or p.dtype != "f32" or not torch.backends.mkldnn.is_available():
        return None
    top, _, left, _ = p.padding
    fused = "relu" if p.epilogue.activation == "relu" and not p.epilogue.residual else "none"
    weight = torch._C._nn.mkldnn_reorder_conv2d_weight(
        model.conv.weight.detach().to_mkldnn(), [top, left], list(p.stride), list(p.dilation),
        p.groups, list(x.shape))
    activation = None if fused == "relu" else p.epilogue.activation

    def run() -> Tensor:
        y = torch.ops.mkldnn._convolution_pointwise(
            x, weight, model.conv.bias, [top, left], list(p.stride), list(p.dilation), p.groups,
            fused, [], "")
        y = y if model.residual is None else y.add_(model.residual)
        y = activated(y, activation, model.slope)
        return y if p.epilogue.pool == 1 else F.max_pool2d(y, p.epilogue.pool)

    return run


def tilewise_contender(s: Subject, effort: str = "estimate", max_error: float | None = None,
                       algorithm: str | None = None, tell: Tell = silent) -> Contender:
    """The model as `tilewise.optimize` returns it, called as the original is."""
    if s.problem is not None:
        return Contender("tilewise", "tilewise", _one_layer(s, effort, max_error, algorithm))
    fast = optimize(s.model, s.example, effort=effort, max_error=max_error, tell=tell)
    return Contender("tilewise", "tilewise", lambda: fast(s.example))


def _one_layer(s: Subject, effort: str, max_error: float | None,
               algorithm: str | None) -> Callable[[], Tensor]:
    from ..conv.devices import target_of
    from ..conv.ops import conv2d
    from ..conv.running import ENGINE

    p, model = s.problem, s.model
    assert p is not None
    assert isinstance(model, Layer)
    if effort != "estimate" and algorithm is None:  # leaves its answer in the wisdom
        ENGINE.plan(p, target_of(s.example), effort, max_error=max_error)
        ENGINE.executables.clear()
    return lambda: conv2d(
        s.example, model.conv.weight, model.conv.bias, p.stride, p.padding, p.dilation, p.groups,
        activation=p.epilogue.activation, slope=model.slope, residual=model.residual,
        pool=p.epilogue.pool, max_error=max_error, algorithm=algorithm)
