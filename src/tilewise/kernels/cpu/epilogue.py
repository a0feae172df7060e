"""The fused tail of every kernel, written once."""

from __future__ import annotations

from collections.abc import Callable

from ...core.problem import Epilogue
from .emit import Function, Vector

Operand = Callable[[], Vector]


def finish(f: Function, value: Vector, epilogue: Epilogue, bias: Operand,
           residual: Operand) -> Vector:
    """bias, then residual, then activation, on one vector of outputs."""
    if epilogue.bias:
        value = value + bias()
    if epilogue.residual:
        value = value + residual()
    return activate(f, value, epilogue)


def activate(f: Function, value: Vector, epilogue: Epilogue) -> Vector:
    """The activation; NaN stays NaN, as in torch."""
    if epilogue.activation == "relu":
        return f.vector(0.0, value.lanes).maximum(value)
    return value
