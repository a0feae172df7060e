"""What a convolution is asked for besides its tensors, in one form."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import index
from typing import Any, cast

import torch
from torch import Tensor

from ..core.errors import InvalidProblem
from ..core.problem import Epilogue

# stride, padding (top, bottom, left, right), dilation, groups, activation, pool; of one or three
# axes, as many of each
Options = tuple[Any, Any, Any, int, str | None, int]
COUNTS = {1: "one number", 2: "one or two numbers", 3: "one or three numbers"}


def options_of(stride: Any, padding: Any, dilation: Any, groups: int, activation: str | None,
               pool: int, taps: Sequence[int]) -> Options:
    """What a convolution is asked for besides its tensors, checked, in full."""
    if torch.compiler.is_compiling():  # which sees no caches
        return _options(stride, padding, dilation, groups, activation, pool, taps)
    try:
        return _known_options(stride, padding, dilation, groups, activation, pool, taps)
    except TypeError:  # a list has no hash
        return _options(stride, padding, dilation, groups, activation, pool, taps)


def _options(stride: Any, padding: Any, dilation: Any, groups: int, activation: str | None,
             pool: int, taps: Sequence[int]) -> Options:
    if activation is not None or pool != 1:
        Epilogue(activation=activation, pool=pool)  # says what is wrong with either
    steps = numbers(stride, "stride", len(taps))
    dilations = numbers(dilation, "dilation", len(taps))
    sides = _padding(padding, taps, steps, dilations)
    return steps, sides, dilations, _whole(groups, "groups"), activation, _whole(pool, "pool")


_known_options = lru_cache(maxsize=1024, typed=True)(_options)  # 2.0 is no stride, 2 is


def numbers(value: int | Sequence[int], name: str, axes: int) -> tuple[int, ...]:
    """A number for each axis."""
    given = value if isinstance(value, Sequence) else (value,)
    values = tuple(_whole(number, name) for number in given)
    if len(values) == 1:
        return values * axes
    if len(values) != axes:
        raise InvalidProblem(f"{name} is {value}, needs {COUNTS[axes]}")
    return values


def _whole(number: Any, name: str) -> int:
    """As int: what is equal must also be the same, for it is remembered."""
    if torch.compiler.is_compiling():
        return cast(int, number)  # a symbol, perhaps, that stays one
    try:
        return index(number) + 0  # also of numpy, and True as 1
    except TypeError:
        raise InvalidProblem(f"{name} has {number!r}, needs whole numbers") from None


def _padding(padding: Any, taps: Sequence[int], stride: tuple[int, ...],
             dilation: tuple[int, ...]) -> tuple[int, ...]:
    """As (top, bottom, left, right): both sides of each axis."""
    if isinstance(padding, str):
        return _named_padding(padding, taps, stride, dilation)
    if isinstance(padding, Sequence) and len(padding) == 2 * len(taps):
        return tuple(_whole(side, "padding") for side in padding)
    return tuple(side for side in numbers(padding, "padding", len(taps)) for _ in range(2))


def _named_padding(padding: str, taps: Sequence[int], stride: tuple[int, ...],
                   dilation: tuple[int, ...]) -> tuple[int, ...]:
    if padding == "valid":
        return (0, 0) * len(taps)
    if padding != "same":
        raise InvalidProblem(f"padding is {padding!r}, needs 'same', 'valid' or numbers")
    if max(stride) > 1:
        raise InvalidProblem(f"padding is 'same' with stride {list(stride)}, needs stride 1")
    totals = [d * (size - 1) for d, size in zip(dilation, taps, strict=True)]
    return tuple(side for total in totals for side in (total // 2, total - total // 2))


def output_shape(x: Tensor, weight: Tensor, stride: Any, padding: Any,
                 dilation: Any) -> tuple[int, ...]:
    """Shape of a convolution's result, with the arguments of `conv2d` and its kin."""
    taps = weight.shape[2:]
    steps, sides, dilations, *_ = options_of(stride, padding, dilation, 1, None, 1, taps)
    axes = len(taps)
    wide = [x.shape[i - axes] + sides[2 * i] + sides[2 * i + 1] for i in range(axes)]
    sizes = [(wide[i] - dilations[i] * (taps[i] - 1) - 1) // steps[i] + 1 for i in range(axes)]
    return (*x.shape[:-axes - 1], weight.shape[0], *sizes)
