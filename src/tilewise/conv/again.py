"""A call that was made before, made again without looking anything up."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.parameter import Parameter

from ..kernels import precision
from ..runtime.engine import Engine
from ..runtime.executable import Executable
from ..runtime.weights import Made, Once, channels_of

PLAIN = (Tensor, Parameter)  # whose calls nobody overrides
CALLS = 8  # that a block remembers
_clock = count()


class Again:
    """again(sources, x, bias, residual, slope, out): the result, or None if something has changed.

    Operands have the forms, and torch the settings, that they had then: see `Calls`. `sources` are
    the tensors that the weight was made from; with `folded`, the bias as well. The call holds on
    to nothing that the caches of executables and weights let go.
    """

    def __init__(self, engine: Engine, executable: Executable, made: Made | Once,
                 folded: bool) -> None:
        self._engine, self._folded, self.used = engine, folded, 0
        self._executable, self._made = weakref.ref(executable), weakref.ref(made)

    def __call__(self, sources: Sequence[Tensor | None], x: Tensor, bias: Tensor | None,
                 residual: Tensor | None, slope: Tensor | None = None,
                 out: Tensor | None = None) -> Tensor | None:
        executable, made = self._executable(), self._made()
        if executable is None or made is None or not made.is_of(sources):
            return None
        self._engine.tell(executable.plan)
        weight, bias = made.value if self._folded else (made.value, bias)
        return executable(x, weight, channels_of(bias, slope, executable), residual, out)

    @property
    def is_among(self) -> bool:
        """Whether its result may be given a place between other channels."""
        executable = self._executable()
        return executable is not None and executable.is_among


class Calls:
    """The last few calls by all that they depend on; the least recently used goes first.

    Several threads may share it. There is no lock: every step is one operation of a dict, and a
    call that another thread pushed out meanwhile is looked up anew.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def __len__(self) -> int:
        return len(self._known)

    def find(self, key: Hashable) -> Any:
        try:
            again = self._known.get(key)
        except TypeError:  # a list among the modules' settings
            return None
        if again is not None:
            again.used = next(_clock)
        return again

    def keep(self, key: Hashable, again: Any) -> None:
        again.used = next(_clock)
        try:
            self._known[key] = again
        except TypeError:
            return
        while len(known := self._known.copy()) > CALLS:
            self._known.pop(min(known, key=lambda key: known[key].used), None)


def can_repeat(*tensors: Tensor | None) -> bool:
    """Whether torch is in no mode that a repeated call would miss."""
    return not (torch.is_grad_enabled() or not is_unwatched(*tensors) or is_transformed())


def form(tensor: Tensor | None) -> object:
    """All of a tensor that a plan can depend on."""
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype)


def settings() -> tuple[Any, ...]:
    """Torch's, which plans and types depend on."""
    return torch.get_num_threads(), precision.asked(), autocast_type()


def autocast_type() -> torch.dtype | None:
    """What torch.autocast casts to on CPUs; None where it does not."""
    if not torch._C._is_any_autocast_enabled() or not torch.is_autocast_enabled("cpu"):
        return None
    return torch.get_autocast_dtype("cpu")


def is_transformed() -> bool:
    """Whether torch differentiates forward, or maps over a batch and the like."""
    return (forward_ad._current_level >= 0
            or torch._C._functorch.peek_interpreter_stack() is not None)


def is_plain_gradient(grad: Tensor, *saved: Tensor | None) -> bool:
    """Whether a backward pass is of one gradient, and nobody watches it."""
    return is_unwatched(grad, *saved) and not (
        is_transformed() or torch._C._functorch.is_legacy_batchedtensor(grad))


def is_unwatched(*tensors: Tensor | None) -> bool:
    """Whether nobody would notice that torch's dispatcher is left out, which takes longest."""
    if torch.compiler.is_compiling():
        return False
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in PLAIN or not tensor.is_cpu
                                   or tensor.is_neg() or tensor._is_zerotensor()):
            return False
    return not (torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
                or torch._C._is_tracing() or torch.autograd.profiler._is_profiler_enabled)
