"""Weights along lines: how scipy sums them, and two lines that stand for their product."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

EPSILON = 2.0 ** -52  # weights that differ by less are equal, as scipy compares them
CLOSE = 1e-9  # to one, sums of weights


@dataclass(frozen=True, eq=False)
class Lines:
    """A kernel that is a column times a row; where one is asked for, an array.

    >>> Lines(np.ones(2), np.arange(3.0)).shape
    (2, 3)
    """

    down: Any
    across: Any

    ndim = 2

    @property
    def shape(self) -> tuple[int, int]:
        return self.down.size, self.across.size

    @property
    def nbytes(self) -> int:
        return int(self.down.nbytes + self.across.nbytes)

    def tobytes(self) -> bytes:
        return b"".join(line.tobytes() for line in (self.down, self.across))

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.outer(self.down, self.across).astype(dtype or np.float64)


def form_of(weights: Any) -> str:
    """How scipy sums a line.

    >>> form_of(np.array([1.0, 2.0, 1.0])), form_of(np.array([-1.0, 0.0, 1.0]))
    ('even', 'odd')
    """
    if weights.size % 2:
        middle = weights.size // 2
        left, right = weights[:middle], weights[:middle:-1]
        if (abs(right - left) <= EPSILON).all():
            return "even"
        if (abs(right + left) <= EPSILON).all():
            return "odd"
    return "line"


def is_bell(weights: Any) -> bool:
    """Whether weights are symmetric and not negative, and their sum is one but for rounding.

    >>> is_bell(np.array([0.25, 0.5, 0.25])), is_bell(np.array([0.25, 0.25, 0.25]))
    (True, False)
    """
    return bool(weights.size > 2 and form_of(weights) == "even" and (weights >= 0).all()
                and abs(math.fsum(weights) - 1.0) < CLOSE)
