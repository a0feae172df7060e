"""PyTorch's own convolution: always a candidate, so that nothing is slower than it."""

from __future__ import annotations

from typing import Any

from ..core.algorithm import Algorithm, accumulation_error
from ..core.cost import traffic
from ..core.problem import Problem
from ..core.schedule import Schedule
from ..core.target import Target


class Vendor(Algorithm):
    """Whatever torch runs: oneDNN on x86, cuDNN on NVIDIA."""

    name = "vendor"
    fuses = frozenset({"bias"})
    layouts = frozenset({"nhwc", "nchw"})
    baseline = True
    takes = "tensors"

    def reject(self, p: Problem, t: Target) -> list[str]:
        if p.direction != "forward":
            return [f"direction is {p.direction}, needs forward"]
        return []

    def error(self, p: Problem, t: Target, s: Schedule) -> float:
        return accumulation_error(p.group_c * p.r * p.s, p.dtype)

    def cost(self, p: Problem, t: Target, s: Schedule) -> float:
        compute = p.flops / (t.peak * _efficiency(p, t))
        memory = traffic(t, p.bytes + 3 * p.weight_bytes)  # it packs weights anew in every call
        return 12e-6 + max(compute, memory) + 0.3 * min(compute, memory)

    def prepare(self, p: Problem, t: Target, s: Schedule, weight: Any) -> Any:
        import torch

        channels_last = p.layout == "nhwc"
        layout = torch.channels_last if channels_last else torch.contiguous_format
        return weight.contiguous(memory_format=layout)

    def build(self, p: Problem, t: Target, s: Schedule) -> Any:
        import torch
        from torch.nn import functional as F

        top, bottom, left, right = p.padding
        even = top == bottom and left == right
        padding = (top, left) if even else (0, 0)
        layout = torch.channels_last if p.layout == "nhwc" else torch.contiguous_format

        def run(x: Any, weight: Any, bias: Any, residual: Any) -> Any:
            if not even:
                x = F.pad(x, (left, right, top, bottom))
            y = F.conv2d(x, weight, bias, p.stride, padding, p.dilation, p.groups)
            return y.contiguous(memory_format=layout)

        return run


def _efficiency(p: Problem, t: Target) -> float:
    """Share of the multiply-add limit that torch was seen to reach."""
    if p.dtype != "f32":
        return 0.1
    if p.group_c == 1 and p.groups > 1:
        return 0.06
    if p.group_c < 4:
        return 0.045 * p.group_c
    if p.groups > 1:
        return 0.25
    if p.group_c < t.lanes or p.group_k < t.lanes or p.group_k % t.lanes:
        return 0.42
    return 0.78
