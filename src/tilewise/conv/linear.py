"""Linear layers: of many rows as 1x1 convolutions, of few rows where the weight is large."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..algorithms.cpu_few_rows import LEAST
from ..core.isa import KNOWN
from ..core.plan import Plan
from ..core.problem import Epilogue, Problem
from ..core.target import Target
from ..kernels import precision
from ..runtime.executable import Executable
from ..runtime.types import HALVES, element_of
from ..runtime.weights import channels_of, made
from .autocast import cast_operands
from .calls import KERNEL, Call, check_slope, gate
from .ops import then
from .running import ENGINE

FEW = 16  # rows for which a weight is streamed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
           activation: str | None = None, slope: Tensor | None = None,
           max_error: float | None = None) -> Tensor:
    """`torch.nn.functional.linear`, then an activation; `slope` is that of "prelu".

    Torch's own where it is faster, or more exact than what its precision setting, or `max_error`,
    admits, and for everything but plain tensors of a CPU in float32, bfloat16 or float16 without
    gradients, outside of compilers. With `max_error`, torch keeps all bits of a float32; what a
    compiler or autograd runs later follows its precision setting.

    >>> linear(torch.randn(2, 8), torch.randn(4, 8), activation="relu").shape
    torch.Size([2, 4])
    """
    x, weight, bias = cast_operands(x, weight, bias) or (x, weight, bias)
    run = None
    plain = not torch.compiler.is_compiling() and _is_plain(x, weight, bias, slope)
    if plain and gate(Call(x, weight, bias, slope=slope)) == KERNEL:
        check_slope(slope, activation, weight.shape[0])
        run = _executable(x, weight, bias, activation, max_error)
        ENGINE.tell(run.plan)
    if run is None or run.algorithm.baseline:  # which needs no other shapes
        held = max_error is not None and not torch.compiler.is_compiling()
        with precision.full() if held else nullcontext():
            y = F.linear(x, weight, bias)
        return then(y, activation, 1, slope)
    ready = made(run.weight_key, lambda: run.prepare(weight[:, :, None, None]), weight).value
    channels = channels_of(bias, slope, run)
    y = run(_image(x), ready, channels, None)
    return y.permute(0, 2, 3, 1).reshape(*x.shape[:-1], weight.shape[0])


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def _image(x: Tensor) -> Tensor:
    """Few rows as images of one pixel, more as the pixels of one image, channels-last."""
    if _rows(x) <= FEW:
        return x.reshape(-1, x.shape[-1], 1, 1)
    return x.reshape(1, 1, -1, x.shape[-1]).permute(0, 3, 1, 2)


def is_worth(layer: nn.Linear) -> bool:
    """Whether another than torch might run a layer."""
    return bool(KNOWN) and layer.weight.is_cpu


def is_planned(layer: nn.Linear) -> bool:
    """Whether it is planned for any number of rows."""
    return is_worth(layer) and _is_large(layer.weight)


def _is_large(weight: Tensor) -> bool:
    return 4 * weight.numel() >= LEAST


class Linear(nn.Module):
    """A linear layer (+ activation), in one call. It owns no parameters.

    >>> Linear(torch.nn.Linear(8, 4), activation="relu")(torch.randn(2, 8)).shape
    torch.Size([2, 4])
    """

    is_fresh = True  # its result shares memory with nothing

    def __init__(self, layer: nn.Linear, activation: str | None = None,
                 max_error: float | None = None) -> None:
        super().__init__()
        self._parts = (layer,)  # in a tuple, and so not in the state_dict
        self.activation, self.max_error = activation, max_error

    @property
    def parts(self) -> tuple[Any, ...]:
        return self._parts

    def forward(self, x: Tensor, slope: Tensor | None = None) -> Tensor:
        (layer,) = self._parts
        return linear(x, layer.weight, layer.bias, activation=self.activation, slope=slope,
                      max_error=self.max_error)

    def own(self) -> None:
        """Replace the layer by one of its own, around the same values."""
        (layer,) = self._parts
        mine = copy.deepcopy(layer, {id(t): None for t in layer.parameters()})
        mine.weight = nn.Parameter(layer.weight.detach(), requires_grad=False)
        mine.bias = (None if layer.bias is None
                     else nn.Parameter(layer.bias.detach(), requires_grad=False))
        self._parts, self.layer = (mine,), mine

    def extra_repr(self) -> str:
        return " + ".join(step for step in (repr(self._parts[0]), self.activation) if step)


def _is_plain(x: Tensor, weight: Tensor, bias: Tensor | None, slope: Tensor | None) -> bool:
    """Whether these are of one type, worth it and fit each other; the rest is torch's."""
    tensors = [t for t in (x, weight, bias, slope) if t is not None]
    if slope is not None and x.dim() != 2 and slope.numel() != 1:
        return False  # torch has one for each index of the second axis
    followed = weight.is_contiguous()  # else prepared in every call
    shapes = (weight.dim() == 2 and x.dim() > 0 and x.numel() > 0
              and x.shape[-1] == weight.shape[1] and (_rows(x) > FEW or _is_large(weight))
              and (bias is None or bias.shape == weight.shape[:1]))
    alike = element_of(x.dtype) is not None and all(t.dtype == x.dtype for t in tensors)
    return followed and shapes and alike


def _executable(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None,
                max_error: float | None) -> Executable:
    key: Any = ("linear", _rows(x), weight.shape, x.dtype, bias is None, activation,
                max_error, torch.get_num_threads(), precision.asked())
    found = ENGINE.executables.get(key)
    if found is None:
        plan = _plan(_rows(x), weight, bias, activation, max_error)
        found = ENGINE.executables.put(key, ENGINE.build(plan))
    return found


def _plan(rows: int, weight: Tensor, bias: Tensor | None, activation: str | None,
          max_error: float | None) -> Plan:
    k, c = weight.shape
    n, w = (rows, 1) if rows <= FEW else (1, rows)
    p = Problem(n, c, 1, w, k, 1, 1, dtype=HALVES.get(weight.dtype, "f32"),
                epilogue=Epilogue(bias=bias is not None, activation=activation))
    return ENGINE.plan(p, Target.host(threads=torch.get_num_threads()), max_error=max_error)


def plan_of(layer: Linear, x: Tensor, slope: Tensor | None) -> Plan | None:
    """What such a call would run; None where it is torch's."""
    (of,) = layer.parts
    if not _is_plain(x, of.weight, of.bias, slope):
        return None
    return _plan(_rows(x), of.weight, of.bias, layer.activation, layer.max_error)
