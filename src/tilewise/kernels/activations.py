"""Activations as torch computes them, by the names of their steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.activations import INNER, parsed
from ..core.problem import Problem


def applied(step: str) -> Callable[..., Tensor]:
    """The function that a step names, of the sums and, where it has them, the slopes."""
    row, numbers = parsed(step)
    fixed = {name: value for name, value in row.fixed if name not in INNER}
    name = row.function or row.name
    return partial(getattr(F if hasattr(F, name) else torch, name), **fixed,
                   **dict(zip(row.arguments, numbers, strict=True)))


def activated(y: Tensor, step: str | None, slope: Tensor | None = None) -> Tensor:
    """What a step makes of sums, in torch's operators."""
    if step is None:
        return y
    return applied(step)(y) if slope is None else applied(step)(y, slope)


def joined(bias: Tensor | None, slope: Tensor | None, k: int) -> Tensor | None:
    """What kernels read for each of k channels: the bias, and behind it the slopes, if any."""
    if slope is None:
        return bias
    slope = slope.expand(k)
    return torch.cat((slope if bias is None else bias, slope))  # a bias that lacks is never read


def apart(p: Problem, channels: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Bias and slopes of a problem, which `joined` put together."""
    if channels is None or not p.epilogue.has_slopes:
        return channels, None
    return channels[:p.k] if p.epilogue.bias else None, channels[p.k:]
