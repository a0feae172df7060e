"""Activations as torch computes them, by the names of their steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional as F

from ..core.activations import INNER, parsed


def applied(step: str) -> Callable[[Tensor], Tensor]:
    """The function that a step names."""
    row, numbers = parsed(step)
    fixed = {name: value for name, value in row.fixed if name not in INNER}
    return partial(getattr(F, row.function or row.name), **fixed,
                   **dict(zip(row.arguments, numbers, strict=True)))
