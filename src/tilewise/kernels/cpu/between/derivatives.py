"""Gradients of activations, from the value before them; an emitter a row of core/activations.py."""

from __future__ import annotations

from collections.abc import Callable

from ....core.activations import parsed
from ....core.problem import Epilogue
from ..emit import Function, Vector
from .elementary import sigmoid


def derived(f: Function, grad: Vector, value: Vector, epilogue: Epilogue) -> Vector:
    """The gradient of a value, from that of its activation."""
    if epilogue.activation is None:
        return grad
    row, numbers = parsed(epilogue.activation)
    return DERIVATIVES[row.name](f, grad, value, *numbers)


def has_derivative(activation: str | None) -> bool:
    return activation is None or parsed(activation)[0].name in DERIVATIVES


def relu(f: Function, grad: Vector, x: Vector) -> Vector:
    """As torch: what is NaN passes."""
    zero = f.vector(0.0)
    passed: Vector = x.above_or_nan(zero).select(grad, zero)
    return passed


def relu6(f: Function, grad: Vector, x: Vector) -> Vector:
    zero = f.vector(0.0)
    passes = x.above_or_nan(zero) & f.vector(6.0).above_or_nan(x)
    passed: Vector = passes.select(grad, zero)
    return passed


def leaky_relu(f: Function, grad: Vector, x: Vector, slope: float) -> Vector:
    passed: Vector = x.above(f.vector(0.0)).select(grad, grad * f.vector(slope))
    return passed


def silu(f: Function, grad: Vector, x: Vector) -> Vector:
    share, one = sigmoid(f, x), f.vector(1.0)
    return grad * share * f.fma(x, one - share, one)


def hardswish(f: Function, grad: Vector, x: Vector) -> Vector:
    three = f.vector(3.0)
    inner = grad * f.fma(x, f.vector(1 / 3), f.vector(0.5))
    lower: Vector = (-three).above(x).select(f.vector(0.0), inner)
    upper: Vector = x.above(three).select(grad, lower)
    return upper


DERIVATIVES: dict[str, Callable[..., Vector]] = {
    "relu": relu, "relu6": relu6, "leaky_relu": leaky_relu, "silu": silu, "hardswish": hardswish}
