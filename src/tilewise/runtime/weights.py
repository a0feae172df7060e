"""Weights made ready once: prepared for a kernel, or with a normalisation multiplied in."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..core.lru import Lru
from ..kernels.cpu.fingerprint import fingerprint
from .executable import Executable

DEFAULT_LIMIT = 2 << 30
HIDDEN = object()  # the state of a tensor that can change without anybody noticing


def state_of(tensor: Tensor | None) -> object:
    """What changes when a tensor does: its version, its place, and a sample of its values.

    Fused optimizers tell no version counter, so the steps of all are counted. Nor do writes
    through `.data`; the sample sees them where they change the tensor as a whole.
    """
    if tensor is None:
        return None
    if tensor.is_inference():
        return HIDDEN
    sample = 0
    if tensor.is_cpu:
        if not _can_sample(tensor):
            return HIDDEN
        sample = fingerprint(tensor.data_ptr(), tensor.numel())
    return tensor._version, tensor.data_ptr(), sample, _steps


def _can_sample(tensor: Tensor) -> bool:
    """Whether it is float32 whose values lie side by side, in whatever order."""
    return tensor.dtype == torch.float32 and (tensor.is_contiguous() or (
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)))


def _count_step(*_: object) -> None:
    global _steps
    _steps += 1


_steps = 0  # of all optimizers
register_optimizer_step_post_hook(_count_step)


class _Made:
    """Something made from tensors, as long as they live and do not change."""

    def __init__(self, sources: tuple[Tensor | None, ...], states: list[object], value: Any,
                 forget: Any) -> None:
        self.sources = [None if t is None else weakref.ref(t, forget) for t in sources]
        self.states, self.value = states, value

    def is_of(self, sources: tuple[Tensor | None, ...], states: list[object]) -> bool:
        for ref, tensor in zip(self.sources, sources, strict=True):
            if ref is not None and ref() is not tensor:  # an id can be given again
                return False
        return self.states == states


def _bytes(entry: _Made) -> int:
    values = entry.value if isinstance(entry.value, tuple) else (entry.value,)
    owned = {v.data_ptr(): v.numel() * v.element_size() for v in values if isinstance(v, Tensor)}
    for source in (ref() for ref in entry.sources if ref is not None):
        owned.pop(source.data_ptr() if source is not None else 0, None)
    return sum(owned.values())


MADE: Lru[_Made] = Lru(DEFAULT_LIMIT, weigh=_bytes)


def made_once(name: object, make: Callable[[], Any], *sources: Tensor | None) -> Any:
    """make(), or what it gave before if the sources are as they were then."""
    states = [state_of(tensor) for tensor in sources]
    if any(state is HIDDEN for state in states):
        return make()
    key = (name, *map(id, sources))
    entry = MADE.get(key)
    if entry is None or not entry.is_of(sources, states):
        entry = MADE.put(key, _Made(sources, states, make(), lambda _: MADE.drop(key)))
    return entry.value


def prepared(weight: Tensor, executable: Executable) -> Any:
    """The weight as the executable's kernel wants it."""
    return made_once(executable.weight_key, lambda: executable.prepare(weight), weight)


def forget(weight: Tensor) -> None:
    """Let go of all that was made from a weight: it is about to change."""
    for key in MADE.held():
        if isinstance(key, tuple) and id(weight) in key[1:]:
            MADE.drop(key)


def folded(weight: Tensor, bias: Tensor | None, mean: Tensor, variance: Tensor,
           scale: Tensor | None, shift: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Weight and bias of one convolution that also does the batch norm behind it."""
    sources = (weight, bias, mean, variance, scale, shift)
    found: tuple[Tensor, Tensor] = made_once(
        ("fold", eps), lambda: fold(weight, bias, mean, variance, scale, shift, eps), *sources)
    return found


@torch.no_grad()
def fold(weight: Tensor, bias: Tensor | None, mean: Tensor, variance: Tensor,
         scale: Tensor | None, shift: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """A batch norm in eval mode, multiplied into weight and bias in float64."""
    factor = (variance.double() + eps).rsqrt()
    factor = factor if scale is None else factor * scale.double()
    offset = -mean.double() if bias is None else bias.double() - mean.double()
    offset = offset * factor
    offset = offset if shift is None else offset + shift.double()
    whole = weight.double() * factor[:, None, None, None]
    return whole.to(weight.dtype), offset.to(weight.dtype)
