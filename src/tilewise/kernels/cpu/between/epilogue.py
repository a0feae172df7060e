"""The fused tail of every kernel, written once."""

from __future__ import annotations

from collections.abc import Callable

from ....core.activations import ROUNDED, parsed
from ....core.problem import Epilogue, Problem
from ..emit import Function, Index, Pointer, Vector
from . import elementary

Operand = tuple[Pointer, Index | int]  # where an operand lies: base and offset


def finish(f: Function, value: Vector, p: Problem, bias: Operand, residual: Operand,
           count: int | None = None) -> Vector:
    """bias, then residual, then activation, on one vector of outputs; slopes lie K values on."""
    epilogue, slope = p.epilogue, None
    if epilogue.bias:
        value = value + bias[0].load(bias[1], count=count)
    if epilogue.residual:
        value = value + residual[0].load(residual[1], count=count)
    if epilogue.has_slopes:
        slope = bias[0].load(bias[1] + p.k, count=count)
    return activate(f, value, epilogue, slope)


def is_long(epilogue: Epilogue) -> bool:
    """Whether its code is better looped over than written once for every vector of a tile."""
    return epilogue.activation is not None and parsed(epilogue.activation)[0].error >= ROUNDED


def pool(window: list[Vector]) -> Vector:
    """The largest of a window; NaN wins, as in torch."""
    largest = window[0]
    for value in window[1:]:
        largest = largest.maximum_or_nan(value)
    return largest


def activate(f: Function, value: Vector, epilogue: Epilogue,
             slope: Vector | None = None) -> Vector:
    """The activation; NaN stays NaN, as in torch."""
    if epilogue.activation is None:
        return value
    row, numbers = parsed(epilogue.activation)
    return EMITTERS[row.name](f, value, *((slope,) if row.operand else ()), *numbers)


def relu(f: Function, x: Vector) -> Vector:
    return f.vector(0.0, x.lanes).maximum(x)


def clamp(f: Function, x: Vector, low: float, high: float) -> Vector:
    return f.vector(high, x.lanes).minimum(f.vector(low, x.lanes).maximum(x))


def relu6(f: Function, x: Vector) -> Vector:
    return clamp(f, x, 0.0, 6.0)


def prelu(f: Function, x: Vector, slope: Vector) -> Vector:
    return x.above(f.vector(0.0, x.lanes)).select(x, x * slope)


def leaky_relu(f: Function, x: Vector, slope: float) -> Vector:
    return prelu(f, x, f.vector(slope, x.lanes))


def elu(f: Function, x: Vector, alpha: float) -> Vector:
    below = elementary.expm1(f, x) * f.vector(alpha, x.lanes)
    return x.above(f.vector(0.0, x.lanes)).select(x, below)


def hardsigmoid(f: Function, x: Vector) -> Vector:
    shifted = relu6(f, x + f.vector(3.0, x.lanes))
    return shifted * f.vector(1 / 6, x.lanes)


def hardswish(f: Function, x: Vector) -> Vector:
    return x * hardsigmoid(f, x)


EMITTERS: dict[str, Callable[..., Vector]] = {
    "relu": relu, "relu6": relu6, "leaky_relu": leaky_relu, "clamp": clamp,
    "clip": clamp, "prelu": prelu,
    "silu": elementary.silu, "gelu": elementary.gelu, "gelu_tanh": elementary.gelu_tanh,
    "mish": elementary.mish, "sigmoid": elementary.sigmoid, "tanh": elementary.tanh, "elu": elu,
    "hardswish": hardswish, "hardsigmoid": hardsigmoid}
