"""Linear layers with large weights, read in fewer bytes, or fewer times, than torch reads them."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..algorithms import LINEAR
from ..core.isa import KNOWN
from ..core.problem import Epilogue, Problem
from ..core.target import Target
from ..kernels import precision
from ..runtime.engine import Engine
from ..runtime.executable import Executable
from ..runtime.weights import made
from .again import is_transformed, is_unwatched
from .calls import wants_gradient
from .ops import then

ENGINE = Engine(LINEAR)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
           activation: str | None = None, max_error: float | None = None) -> Tensor:
    """`torch.nn.functional.linear`, then an activation.

    Torch's own where it is faster, or more exact than what its precision setting, or `max_error`,
    admits, and for everything but plain float32 tensors of a CPU without gradients, outside of
    compilers. With `max_error`, torch keeps all bits of a float32; what a compiler or autograd
    runs later follows its precision setting.

    >>> linear(torch.randn(2, 8), torch.randn(4, 8), activation="relu").shape
    torch.Size([2, 4])
    """
    run = None
    if _is_plain(x, weight, bias):
        run = _executable(x, weight, bias, activation, max_error)
    if run is None:
        held = max_error is not None and not torch.compiler.is_compiling()
        with precision.full() if held else nullcontext():
            y = F.linear(x, weight, bias)
        return then(y, activation, 1)
    ready = made(run.weight_key, lambda: run.prepare(weight[:, :, None, None]), weight).value
    y = run(x.reshape(-1, x.shape[-1], 1, 1), ready, bias, None)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def is_worth(layer: nn.Linear) -> bool:
    """Whether there is a setting in which this machine would not leave the layer to torch."""
    c, k = layer.in_features, layer.out_features
    return bool(c and k and layer.weight.is_cpu and KNOWN) and not all(
        a.baseline or a.reject(Problem(1, c, 1, 1, k, 1, 1), Target.host()) for a in LINEAR)


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

    def forward(self, x: Tensor) -> Tensor:
        (layer,) = self._parts
        return linear(x, layer.weight, layer.bias, activation=self.activation,
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


def _is_plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether these are numbers in memory that nobody traces, transforms or differentiates."""
    tensors = [t for t in (x, weight, bias) if t is not None]
    if (not KNOWN or not is_unwatched(*tensors) or is_transformed()
            or torch.is_autocast_enabled("cpu") or wants_gradient(*tensors)
            or any(t.dtype != torch.float32 for t in tensors)):
        return False
    followed = weight.is_contiguous()  # else prepared in every call
    shapes = (weight.dim() == 2 and weight.shape[0] > 0 and x.dim() > 0 and x.numel() > 0
              and x.shape[-1] == weight.shape[1]
              and (bias is None or bias.shape == weight.shape[:1]))
    return followed and shapes


def _executable(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None,
                max_error: float | None) -> Executable | None:
    """What runs the call, or None where torch should."""
    key: Any = (x.numel() // x.shape[-1], weight.shape, bias is None, activation, max_error,
                torch.get_num_threads(), precision.asked())
    found = ENGINE.executables.get(key)
    if found is None:
        k, c = weight.shape
        p = Problem(x.numel() // c, c, 1, 1, k, 1, 1,
                    epilogue=Epilogue(bias=bias is not None, activation=activation))
        t = Target.host(threads=torch.get_num_threads())
        found = ENGINE.executables.put(key, ENGINE.build(ENGINE.plan(p, t, max_error=max_error)))
    return None if found.algorithm.baseline else found
