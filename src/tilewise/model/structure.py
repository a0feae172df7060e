"""Values of any structure: tensors in tuples, lists, dictionaries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

NUMBERS = (int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device,
           torch.layout, torch.memory_format)


class _Hole:
    """Where a tensor belongs."""


_HOLE = _Hole()


def leaves(value: Any) -> Iterator[Any]:
    """Tensors in a value, and all else that is no container and no plain number."""
    if isinstance(value, tuple | list):
        for part in value:
            yield from leaves(part)
    elif isinstance(value, dict):
        yield from leaves(tuple(value.values()))
    elif isinstance(value, slice):
        yield from leaves((value.start, value.stop, value.step))
    elif not isinstance(value, NUMBERS):
        yield value


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def hollow(value: Any) -> Any:
    """A value without its tensors, which would be kept alive."""
    return filled(value, None)


def filled(value: Any, tensors: Iterator[Tensor] | None) -> Any:
    """A hollow value with the next of these tensors wherever it had one."""
    if isinstance(value, Tensor | _Hole):
        return _HOLE if tensors is None else next(tensors)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(filled(part, tensors) for part in value))
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, tuple | list):
        return type(value)(filled(part, tensors) for part in value)
    if isinstance(value, dict):
        return {key: filled(part, tensors) for key, part in value.items()}
    return value
