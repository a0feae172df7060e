"""The max-pool after a convolution that does not fuse it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from ..core.isa import NATIVE, widens
from ..core.places import address
from ..core.plan import Plan
from ..core.problem import Epilogue, Problem
from ..core.schedule import Schedule
from ..kernels.cpu import memory
from ..kernels.cpu.between import pooling
from ..kernels.cpu.emit.launch import launcher

LARGEST = 4  # windows whose values are all loaded at once


def max_pool(plan: Plan) -> Callable[[Tensor], Tensor]:
    """By a kernel of ours where images are channels-last and of a type it reads, else by torch."""
    p, t, size = plan.problem, plan.target, plan.problem.epilogue.pool
    known = p.dtype == "f32" or (p.dtype in NATIVE and widens(t.row, p.dtype))
    ours = (t.device == "cpu" and known and plan.inner.layout == "nhwc"
            and size <= LARGEST and p.out_h * p.out_w > 0)
    if not ours:
        return lambda y: F.max_pool2d(y, size)
    bare = Problem(p.n, 1, p.conv_h, p.conv_w, p.k, 1, 1, dtype=p.dtype,
                   epilogue=Epilogue(pool=size))
    launch = launcher(pooling.make, bare, Schedule(), t.row, sizes=pooling.sizes(bare))

    def run(y: Tensor) -> Tensor:
        pooled = memory.empty(p.n, p.out_h, p.out_w, p.k, dtype=y.dtype)
        launch(address(y), 0, 0, 0, address(pooled), 0, p.n, t.threads)
        return pooled.permute(0, 3, 1, 2)

    return run
