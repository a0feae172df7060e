"""Reasons and budgets that several CPU algorithms share."""

from __future__ import annotations

from ..core.problem import Problem
from ..core.target import Target


def cpu_f32_forward(p: Problem, t: Target) -> list[str]:
    """What every fp32 forward kernel for CPUs asks for."""
    reasons = []
    if t.device != "cpu":
        reasons.append(f"device is {t.device}, needs cpu")
    if p.dtype != "f32":
        reasons.append(f"dtype is {p.dtype}, needs f32")
    if p.direction != "forward":
        reasons.append(f"direction is {p.direction}, needs forward")
    return reasons


def streams(p: Problem, t: Target) -> bool:
    """Whether outputs should pass the caches by: too large to be found there again."""
    return p.output_bytes > 4 * t.l2


def fits(t: Target, rows: int, vectors: int) -> bool:
    """Whether a register tile's accumulators and operands stay in registers."""
    row = t.row
    broadcast = 0 if row.memory_operands and vectors == 1 else 1
    product = 0 if row.fma else 2  # a separate product, and a copy of what it overwrites
    return rows * vectors + vectors + broadcast + product <= row.registers
