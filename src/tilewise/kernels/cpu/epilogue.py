"""The fused tail of every kernel, written once."""

from __future__ import annotations

from ...core.problem import Epilogue
from .emit import Function, Index, Pointer, Vector

Operand = tuple[Pointer, Index | int]  # where an operand lies: base and offset


def finish(f: Function, value: Vector, epilogue: Epilogue, bias: Operand, residual: Operand,
           count: int | None = None) -> Vector:
    """bias, then residual, then activation, on one vector of outputs."""
    if epilogue.bias:
        value = value + bias[0].load(bias[1], count=count)
    if epilogue.residual:
        value = value + residual[0].load(residual[1], count=count)
    return activate(f, value, epilogue)


def pool(window: list[Vector]) -> Vector:
    """The largest of a window; NaN wins, as in torch."""
    largest = window[0]
    for value in window[1:]:
        largest = largest.maximum_or_nan(value)
    return largest


def activate(f: Function, value: Vector, epilogue: Epilogue) -> Vector:
    """The activation; NaN stays NaN, as in torch."""
    if epilogue.activation in ("relu", "relu6"):
        value = f.vector(0.0, value.lanes).maximum(value)
    if epilogue.activation == "relu6":
        value = f.vector(6.0, value.lanes).minimum(value)
    return value
