"""What lies beyond the edge of an image, with the meanings of scipy.ndimage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .errors import InvalidProblem

CONSTANT = -1  # stands for "no pixel, the constant"

Map = Callable[[Any, int], Any]


def _reflect(i: Any, size: int) -> Any:
    """d c b a | a b c d | d c b a"""
    folded = i % (2 * size)
    return np.minimum(folded, 2 * size - 1 - folded)


def _mirror(i: Any, size: int) -> Any:
    """d c b | a b c d | c b a"""
    period = max(1, 2 * size - 2)
    folded = i % period
    return np.minimum(folded, period - folded)


def _constant(i: Any, size: int) -> Any:
    """k k k | a b c d | k k k"""
    return np.where((i >= 0) & (i < size), i, CONSTANT)


BORDERS: dict[str, Map] = {
    "reflect": _reflect,
    "nearest": lambda i, size: np.clip(i, 0, size - 1),  # a a a | a b c d | d d d
    "mirror": _mirror,
    "wrap": lambda i, size: i % size,  # b c d | a b c d | a b c
    "constant": _constant,
}
ELSEWHERE = {  # what others call a border, which is not accepted: one word has several meanings
    "symmetric": "numpy's symmetric is 'reflect' here", "edge": "numpy's edge is 'nearest' here",
    "circular": "torch's circular is 'wrap' here",
    "grid-wrap": "scipy's grid-wrap is 'wrap' here",
    "grid-mirror": "scipy's grid-mirror is 'reflect' here",
    "grid-constant": "scipy's grid-constant is 'constant' here",
}
SYNONYMS = {"zero": "constant", "replicate": "nearest"}


def meaning(border: str, value: float | None) -> tuple[str, float]:
    """The border by its name in scipy.ndimage, and its constant.

    >>> meaning("replicate", None), meaning("constant", 7)
    (('nearest', 0.0), ('constant', 7.0))
    """
    if value is not None and border != "constant":
        raise InvalidProblem(f'value is {value} and border is "{border}", which has none; '
                             'pass border="constant" or leave value out')
    name = SYNONYMS.get(str(border), border)
    if not isinstance(name, str) or name not in BORDERS:
        hint = ELSEWHERE.get(str(border))
        raise InvalidProblem(f"border is {border!r}, needs one of {', '.join(BORDERS)}"
                             + (f": {hint}" if hint else ""))
    return name, float(value or 0.0)


def sources(size: int, before: int, after: int, border: str) -> Any:
    """For each place of an axis with `before` and `after` more of them, the index it shows.

    >>> sources(4, 2, 3, "mirror").tolist()
    [2, 1, 0, 1, 2, 3, 2, 1, 0]
    """
    return BORDERS[border](np.arange(-before, size + after), size).astype(np.int64)
