"""Prepared weights, made once for each weight tensor and its version."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from ..core.lru import Lru
from .executable import Executable

DEFAULT_LIMIT = 2 << 30


class _Prepared:
    """A prepared weight, and what it was made from."""

    def __init__(self, source: Tensor, value: Any, forget: Any) -> None:
        self.source = weakref.ref(source, forget)
        self.version, self.address, self.value = source._version, source.data_ptr(), value

    def is_of(self, weight: Any) -> bool:
        alive = self.source() is weight  # an id can be given again
        return bool(alive and self.version == weight._version
                    and self.address == weight.data_ptr())


def _bytes(entry: _Prepared) -> int:
    value = entry.value
    shares = isinstance(value, Tensor) and value.data_ptr() == entry.address
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
