"""Implicit GEMM on GPUs: any filter, stride, padding, dilation and grouping, all directions."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from ..core.gpu import GPUS
from ..core.problem import Problem
from ..core.schedule import Schedule, Space
from ..core.target import Target
from .gpu_common import GpuAlgorithm, roofline
from .gpu_table import rows

EFFICIENCY = 0.6  # of the published limit; assumed
FEW = 16  # channels below which a step within one tap is mostly empty


class GpuImplicitGemm(GpuAlgorithm):
    """Gathers both operands while it multiplies them; Triton, channels-last."""

    name = "gpu_implicit_gemm"
    version = 1

    def reject(self, p: Problem, t: Target) -> list[str]:
        return self.reasons(p, t)

    def error(self, p: Problem, t: Target, s: Schedule) -> float:
        return self.sum_error(math.ceil(p.terms / split(p, t, s)), p.dtype)

    def space(self, p: Problem, t: Target) -> Space:
        table = rows(p.direction, self.kind(p), t.isa)
        shipped = set(table)
        last: dict[str, Any] = ({"split": ("parts", "atomic")} if p.direction == "backward_weight"
                                else {"weight": ("krsc", "rsck")})
        same = {"swizzle": 8} | ({"split": "parts"} if "split" in last else {})
        tunables = {name: tuple(sorted({row[name] for row in table}))
                    for name in ("bm", "bn", "bk", "warps", "stages")}
        return Space(lambda s: s.with_(**same) in shipped, **tunables, flat=(False, True),
                     swizzle=(1, 8), **last)

    def default(self, p: Problem, t: Target) -> Schedule:
        return _default(self.precision, p, t)

    def cost(self, p: Problem, t: Target, s: Any) -> float:
        columns, tiles = _tiles(p, s)
        parts = split(p, t, s)
        wasted = math.ceil(columns / s.bn) * s.bn / columns
        flops = p.flops * wasted / GPUS[t.isa].flops(p.dtype, self.precision)
        shape = min(1.0, math.sqrt(s.bm * s.bn) / 128)  # smaller tiles load more for a product
        gather = 0.5 if s.flat else min(1.0, _depth(p) / s.bk)
        extra = 8 * parts * p.weight_bytes if parts > 1 else 0
        return roofline(t, p, s, flops, EFFICIENCY * shape * gather, tiles * parts,
                        p.bytes + extra, 1 + (parts > 1))

    def workspace(self, p: Problem, t: Target, s: Schedule) -> int:
        parts = split(p, t, s)
        return 4 * parts * p.k * p.group_c * p.r * p.s if parts > 1 else 0

    def prepare(self, p: Problem, t: Target, s: Schedule, weight: Any) -> Any:
        from ..kernels.gpu.conv import prepare_weight

        return weight if p.direction == "backward_weight" else prepare_weight(s, weight)

    def build(self, p: Problem, t: Target, s: Schedule) -> Any:
        from ..kernels.gpu.conv import runner

        return runner(p, s, self.precision, split(p, t, s))


def split(p: Problem, t: Target, s: Any) -> int:
    """Parts of a weight gradient's sum: enough to fill the GPU, each long enough to be worth it."""
    if p.direction != "backward_weight":
        return 1
    _, tiles = _tiles(p, s)
    steps = math.ceil(max(1, p.n * p.conv_h * p.conv_w) / s.bk)
    return max(1, min(2 * GPUS[t.isa].units // tiles, steps // 8))


def _depth(p: Problem) -> int:
    """Terms that lie side by side in memory."""
    return p.group_k if p.direction == "backward_data" else p.group_c


def _tiles(p: Problem, s: Any) -> tuple[int, int]:
    """Columns of the product, and tiles of all groups."""
    if p.direction == "forward":
        m, columns = p.n * p.conv_h * p.conv_w, p.group_k
    elif p.direction == "backward_data":
        m, columns = p.n * p.h * p.w, p.group_c
    else:
        wide = p.group_c if s.flat else math.ceil(p.group_c / s.bn) * s.bn
        m, columns = p.group_k, p.r * p.s * wide
    return columns, p.groups * math.ceil(max(1, m) / s.bm) * math.ceil(columns / s.bn)


@lru_cache(maxsize=4096)
def _default(precision: str, p: Problem, t: Target) -> Schedule:
    """The cheapest row of the table; flat ones only for few channels, and then only they."""
    algorithm = GpuImplicitGemm(precision)
    table = rows(p.direction, algorithm.kind(p), t.isa)
    fitting = [row for row in table if row["flat"] == (_depth(p) < FEW)]
    return min(fitting, key=lambda s: algorithm.cost(p, t, s))
