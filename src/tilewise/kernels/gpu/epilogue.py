"""What follows the sum, written once for all kernels of this package."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ...core.activations import parsed
from ...core.problem import Epilogue


def constants(epilogue: Epilogue) -> dict[str, Any]:
    """An epilogue as kernels take it; numbers that an activation lacks are never read."""
    row, numbers = parsed(epilogue.activation) if epilogue.activation else (None, ())
    a, b = (*numbers, 0.0, 0.0)[:2]
    return {"BIAS": epilogue.bias, "RESIDUAL": epilogue.residual,
            "ACT": row.name if row else "none", "ACT_A": a, "ACT_B": b,
            "POOL": epilogue.pool == 2}


def roles(epilogue: Epilogue) -> dict[str, str]:
    """The tensors that kernels read behind the sum; what lacks is never read: any will do."""
    return {"bias": "bias" if epilogue.bias or epilogue.has_slopes else "y",
            "residual": "residual" if epilogue.residual else "y"}


@triton.jit
def larger(a, b):
    """The maximum; NaN wins, as in torch."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def clamp(x, low, high):
    x = tl.where(x < low, low, x)  # NaN stays
    return tl.where(x > high, high, x)


@triton.jit
def tanh(x):
    """By exp of what is not positive, so that nothing overflows."""
    size = tl.abs(x)
    shrunk = tl.exp(-2.0 * size)
    far = (1.0 - shrunk) / (1.0 + shrunk)
    near = size - size * size * size * (1.0 / 3.0)  # where the difference would lose digits
    y = tl.where(size < 0.015, near, far)
    return tl.where(x < 0, -y, y)


@triton.jit
def mish(x):
    grown = tl.exp(tl.where(x > 20.0, 20.0, x))
    part = grown * (grown + 2.0)
    return x * (part / (part + 2.0))


@triton.jit
def by_channel(bias, k, kept, K: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr):
    """Bias and slopes of these channels, as far as there are some; slopes lie K values on."""
    added = k
    slope = k
    if BIAS:
        added = tl.load(bias + k, mask=kept, other=0.0)
    if ACT == "prelu":
        slope = tl.load(bias + K + k, mask=kept, other=0.0)
    return added, slope


@triton.jit
def activate(x, slope, ACT: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """The activation of that name, with its numbers; NaN stays NaN."""
    if ACT == "relu":
        x = tl.where(x < 0, 0.0, x)
    elif ACT == "relu6":
        x = clamp(x, 0.0, 6.0)
    elif ACT == "clamp" or ACT == "clip":
        x = clamp(x, A, B)
    elif ACT == "leaky_relu":
        x = tl.where(x > 0, x, x * A)
    elif ACT == "prelu":
        x = tl.where(x > 0, x, x * slope[None, :].to(tl.float32))
    elif ACT == "elu":
        x = tl.where(x > 0, x, (tl.exp(x) - 1.0) * A)
    elif ACT == "sigmoid":
        x = 1.0 / (1.0 + tl.exp(-x))
    elif ACT == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif ACT == "tanh":
        x = tanh(x)
    elif ACT == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        x = x / (1.0 + tl.exp(-x * (1.5957691216057308 + 0.07135481282553 * x * x)))
    elif ACT == "mish":
        x = mish(x)
    elif ACT == "hardsigmoid":
        x = clamp(x + 3.0, 0.0, 6.0) * (1.0 / 6.0)
    elif ACT == "hardswish":
        x = x * clamp(x + 3.0, 0.0, 6.0) * (1.0 / 6.0)
    else:
        tl.static_assert(ACT == "none", "an activation without a branch here")
    return x


@triton.jit
def finish(acc, bias, slope, residual, offsets, mask, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
           ACT: tl.constexpr, ACT_A: tl.constexpr, ACT_B: tl.constexpr, POOL: tl.constexpr):
    """Bias, residual, activation and 2x2 max-pooling; with pooling, rows come in fours."""
    if BIAS:
        acc += bias[None, :].to(tl.float32)
    if RESIDUAL:
        acc += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    acc = activate(acc, slope, ACT, ACT_A, ACT_B)
    if POOL:
        fours = tl.reshape(acc, (acc.shape[0] // 4, 4, acc.shape[1]))
        acc = tl.reduce(fours, 1, larger)
    return acc
