"""Sizes of inputs that a model compares with numbers, as in `channels != self.channels`.

Where one is the number now, the graph is one for all inputs of which this size is the same.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from .effects import name_of

Place = tuple[int, int]  # which input, and which of its axes


def compared(node: fx.Node, places: Sequence[fx.Node], inputs: Sequence[Tensor]) -> Place | None:
    """Whether a comparison is of an input's size with a number that it is now."""
    if node.target not in (operator.eq, operator.ne) or len(node.args) != 2:
        return None
    sizes = [_size(part) for part in node.args if isinstance(part, fx.Node)]
    numbers = [part for part in node.args if type(part) is int]
    if len(numbers) != 1 or len(sizes) != 1 or sizes[0] is None:
        return None
    source, axis = sizes[0]
    if source not in places or type(axis) is not int:
        return None
    which = places.index(source)
    shape = inputs[which].shape
    if not -len(shape) <= axis < len(shape) or shape[axis] != numbers[0]:
        return None
    return which, axis % len(shape)


def _size(node: fx.Node) -> tuple[Any, Any] | None:
    """Of which tensor along which axis a number is the size."""
    if node.op == "call_method" and node.target == "size":
        return (node.args[0], node.args[1]) if len(node.args) == 2 and not node.kwargs else None
    if node.target is not operator.getitem:
        return None
    whole, axis = node.args
    while isinstance(whole, fx.Node) and name_of(whole) == "exactly":  # as it is unpacked
        whole = whole.args[0]
    is_shape = isinstance(whole, fx.Node) and (
        (whole.target is getattr and whole.args[1] == "shape")
        or (whole.op == "call_method" and whole.target == "size" and len(whole.args) == 1
            and not whole.kwargs))
    return (whole.args[0], axis) if is_shape else None


def size_of(tensors: Sequence[Tensor], place: Place) -> int | None:
    which, axis = place
    return tensors[which].shape[axis] if axis < tensors[which].dim() else None
