"""From a problem to an executable, remembered."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..core.algorithm import Algorithm
from ..core.lru import Lru
from ..core.plan import Plan
from ..core.problem import Problem
from ..planner.planner import Planner
from .executable import Executable

DTYPES = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16,
          "bf16": torch.bfloat16}


class Engine:
    """Plans problems with the given algorithms and keeps what was built."""

    def __init__(self, algorithms: Sequence[Algorithm], limit: int = 1024) -> None:
        self.planner = Planner(algorithms, start=self.start)
        self.executables: Lru[Executable] = Lru(limit)  # by whatever key a caller has at hand

    def build(self, plan: Plan) -> Executable:
        return Executable(plan, self.planner.algorithm(plan.algorithm))

    def start(self, plan: Plan) -> Callable[[], object]:
        """The plan on random data, ready to be timed."""
        run, args = self.build(plan), random_operands(plan.problem)
        weight = run.prepare(args[1])
        return lambda: run(args[0], weight, *args[2:])


def random_operands(p: Problem, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Operands of a problem with normal values: x, weight, bias or None, residual or None."""
    rng = torch.Generator().manual_seed(seed)
    layout = torch.channels_last if p.layout == "nhwc" else torch.contiguous_format

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float32).to(DTYPES[p.dtype])

    x = normal(p.n, p.c, p.h, p.w).contiguous(memory_format=layout)
    weight = normal(p.k, p.group_c, p.r, p.s) * (p.group_c * p.r * p.s) ** -0.5
    bias = normal(p.k) if p.epilogue.bias else None
    shape = (p.n, p.k, p.conv_h, p.conv_w)
    residual = normal(*shape).contiguous(memory_format=layout) if p.epilogue.residual else None
    return x, weight, bias, residual  # type: ignore[return-value]
