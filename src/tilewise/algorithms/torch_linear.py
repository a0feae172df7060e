"""PyTorch's own linear layer, the baseline of the other."""

from __future__ import annotations

from typing import Any

from ..core.problem import Problem
from ..core.schedule import Schedule
from ..core.target import Target
from .vendor import Vendor

CALL = 5e-6  # seconds
FEW = 3  # rows up to which it multiplies without packing the weight


class TorchLinear(Vendor):
    """Reads the weight, for more than a few rows also writes it packed and reads that."""

    name = "torch_linear"
    kinds = ("matmul",)

    def cost(self, p: Problem, t: Target, s: Schedule) -> float:
        compute = p.flops / t.peak
        memory = p.weight_bytes / t.bandwidth * (1 if p.n <= FEW else 3)
        return CALL + max(compute, memory) + 0.3 * min(compute, memory)

    def build(self, p: Problem, t: Target, s: Schedule) -> Any:
        from torch.nn import functional as F

        def run(x: Any, weight: Any, bias: Any, residual: Any) -> Any:
            return F.linear(x.flatten(1), weight.flatten(1), bias)[:, :, None, None]

        return run
