"""What tests of the matrix unit share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tilewise.algorithms import ALGORITHMS
from tilewise.core import Problem, Target
from tilewise.core.isa import available
from tilewise.planner import Planner
from tilewise.runtime.engine import BITS, PRECISIONS

from .harness import ON_MATRIX

HERE = "amx" in [row.name for row in available()]
needs_amx = pytest.mark.skipif(not HERE, reason="this machine has no matrix unit")


def planned(text: str, precision: str) -> Any:
    target = Target("cpu", "amx", 2, l1=48 << 10, l2=2 << 20, l3=32 << 20)
    return Planner(ALGORITHMS).plan(Problem.parse(text), target, max_error=PRECISIONS[precision],
                                    bits=BITS[precision])


def products_of(plan: Any) -> int:
    """Of a plan; 0 is plain float32."""
    return ON_MATRIX[plan.algorithm].products if plan.algorithm in ON_MATRIX else 0


@contextmanager
def precision(setting: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
