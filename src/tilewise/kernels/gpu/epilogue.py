"""What follows the sum, written once for all kernels of this package."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def larger(a, b):
    """The maximum; NaN wins, as in torch."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def finish(acc, bias, residual, offsets, mask, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
           RELU: tl.constexpr, POOL: tl.constexpr):
    """Bias, residual, ReLU and 2x2 max-pooling; with pooling, rows come in fours."""
    if BIAS:
        acc += bias[None, :].to(tl.float32)
    if RESIDUAL:
        acc += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    if RELU:
        acc = tl.where(acc < 0, 0.0, acc)  # NaN stays
    if POOL:
        fours = tl.reshape(acc, (acc.shape[0] // 4, 4, acc.shape[1]))
        acc = tl.reduce(fours, 1, larger)
    return acc
