"""Prepared weights, made once for each weight tensor and its version."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..core.lru import Lru
from .executable import Executable

DEFAULT_LIMIT = 2 << 30


class _Prepared:
    """A prepared weight, and what it was made from."""

    def __init__(self, source: Tensor, value: Any, forget: Any) -> None:
        self.source = weakref.ref(source, forget)
        self.state, self.value = _state(source), value

    def is_of(self, weight: Any) -> bool:
        alive = self.source() is weight  # an id can be given again
        return alive and self.state == _state(weight)


def _state(weight: Tensor) -> tuple[int, ...]:
    """What changes when a weight does; fused optimizers tell no version counter."""
    return weight._version, weight.data_ptr(), _steps


def _count_step(*_: object) -> None:
    global _steps
    _steps += 1


_steps = 0  # of all optimizers
register_optimizer_step_post_hook(_count_step)


def _bytes(entry: _Prepared) -> int:
    value = entry.value
    shares = isinstance(value, Tensor) and value.data_ptr() == entry.state[1]
    return 0 if shares or not isinstance(value, Tensor) else value.numel() * value.element_size()


PREPARED: Lru[_Prepared] = Lru(DEFAULT_LIMIT, weigh=_bytes)


def prepared(weight: Tensor, executable: Executable) -> Any:
    """The weight as the executable's kernel wants it."""
    if weight.is_inference():  # has no version counter: nobody would notice a change
        return executable.prepare(weight)
    key = (id(weight), executable.weight_key)
    entry = PREPARED.get(key)
    if entry is None or not entry.is_of(weight):
        value = executable.prepare(weight)
        entry = PREPARED.put(key, _Prepared(weight, value, lambda _: PREPARED.drop(key)))
    return entry.value
