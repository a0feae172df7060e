"""Bounds on what tilewise keeps."""

from __future__ import annotations

from ..kernels.cpu.launch import KERNELS
from ..kernels.cpu.memory import POOL
from ..runtime.weights import MADE
from .linear import ENGINE as LINEAR
from .ops import ENGINE


def set_memory_limit(pool: int | None = None, weights: int | None = None) -> None:
    """Bytes kept for later calls: free blocks of the pool, and prepared weights.

    >>> set_memory_limit(pool=1 << 30, weights=1 << 30)
    """
    if pool is not None:
        POOL.limit = pool
    if weights is not None:
        MADE.limit = weights


def set_cache_limit(kernels: int | None = None, executables: int | None = None) -> None:
    """How many compiled kernels and how many planned calls are kept in this process.

    >>> set_cache_limit(kernels=512, executables=1024)
    """
    if kernels is not None:
        KERNELS.limit = kernels
    if executables is not None:
        for engine in (ENGINE, LINEAR):
            engine.executables.limit = executables


def algorithms(direction: str = "forward", device: str = "cpu") -> list[str]:
    """Names of the algorithms that `conv2d` can use, in the order in which they are asked.

    Device "cuda" stands for NVIDIA's GPUs and for AMD's, as in torch.

    With "backward_weight", those for gradients of weights; gradients of inputs are computed by
    those of the forward direction.

    >>> "vendor" in algorithms(), "cpu_winograd_weight" in algorithms("backward_weight")
    (True, True)
    """
    return [algorithm.name for algorithm in ENGINE.planner.algorithms
            if direction in algorithm.directions and algorithm.device in (None, device)]
