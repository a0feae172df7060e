"""What tests of convolutions share: data, torch's answer and how near to it an answer must be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import tilewise
from tilewise.algorithms import ALGORITHMS
from tilewise.kernels.activations import applied

BY_NAME = {algorithm.name: algorithm for algorithm in ALGORITHMS}

PLANES, LAST = torch.contiguous_format, torch.channels_last


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32,
         integers: bool = False) -> Tensor:
    """Normal values, or small integers, which tie often."""
    rng = torch.Generator().manual_seed(seed + sum(shape))
    if integers:
        return torch.randint(-2, 3, shape, generator=rng).to(dtype)
    return torch.randn(shape, generator=rng).to(dtype)


def leaf(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return draw(*shape, dtype=dtype, seed=seed).requires_grad_()


def theirs(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
           padding: Any = 0, dilation: Any = 1, groups: int = 1, *, activation: str | None = None,
           residual: Tensor | None = None, pool: int = 1) -> Tensor:
    """What torch makes of the arguments of tilewise.conv2d."""
    if isinstance(padding, tuple) and len(padding) == 4:
        top, bottom, left, right = padding
        x, padding = F.pad(x, (left, right, top, bottom)), 0
    y = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    y = y if residual is None else y + residual
    y = y if activation is None else applied(activation)(y)
    return y if pool == 1 else F.max_pool2d(y, pool)


def assert_close(y: Tensor, expected: Tensor, bound: float = 1e-5) -> None:
    """Root mean square of the difference, beside that of the answer."""
    assert y.shape == expected.shape
    assert y.dtype == expected.dtype
    y, expected = y.detach().double(), expected.detach().double()
    error, scale = float((y - expected).norm()), float(expected.norm())
    apart = (y - expected).abs().flatten()
    # whether a few values are far off or all a little tells a wrong address from a wrong rounding
    assert error <= bound * scale, (
        f"{error:.2e} > {bound:.0e} * {scale:.2e}; {int((apart > bound).sum())} of {len(apart)} "
        f"values differ by more than {bound:.0e}, the most {float(apart.max()):.2e}")


def bound_of(algorithm: str | None) -> float:
    """By the leading bits that its products keep; the planner's own choice keeps all of them."""
    return {8: 1e-2, 16: 1e-4, 24: 1e-5}[BY_NAME[algorithm].bits if algorithm else 24]


def assert_same(x: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any,
                **options: Any) -> None:
    """Numbers and strides as torch's."""
    algorithm = options.pop("algorithm", None)
    y = tilewise.conv2d(x, weight, bias, *args, algorithm=algorithm, **options)
    expected = theirs(x, weight, bias, *args, **options)
    assert_close(y, expected, bound_of(algorithm))
    if x.dim() == 4 and len(x) and "activation" not in options:
        assert y.stride() == expected.stride()


def rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def relative(found: Tensor, expected: Tensor) -> float:
    return rms(found.double() - expected) / max(rms(expected), 1e-30)
