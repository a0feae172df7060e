"""Activations as torch computes them, by the names of their steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional as F

from ..core.activations import parsed

NUMBERS = {"leaky_relu": ("negative_slope",), "elu": ("alpha",), "clamp": ("min_val", "max_val")}
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "clamp": F.hardtanh, "gelu_tanh": partial(F.gelu, approximate="tanh")}


def applied(step: str) -> Callable[[Tensor], Tensor]:
    """The function that a step names."""
    row, numbers = parsed(step)
    function = FUNCTIONS.get(row.name) or getattr(F, row.name)
    return partial(function, **dict(zip(NUMBERS.get(row.name, ()), numbers)))
