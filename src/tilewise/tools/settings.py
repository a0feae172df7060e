"""Bounds on what tilewise keeps."""

from __future__ import annotations

from ..conv.running import ENGINE
from ..core.cores import cores
from ..core.errors import TilewiseError
from ..core.target import Target
from ..kernels.cpu.emit.launch import KERNELS
from ..kernels.cpu.memory import POOL
from ..runtime.spare import SPARE
from ..runtime.weights import MADE


def set_memory_limit(pool: int | None = None, weights: int | None = None) -> None:
    """How much memory is kept for later calls; 2 GiB each at the start.

    Args:
        pool: Bytes of free blocks, for outputs and scratch. Blocks in use are not limited.
        weights: Bytes of weights that were packed or transformed for the kernels.

    >>> set_memory_limit(pool=1 << 30, weights=1 << 30)
    """
    if pool is not None:
        POOL.limit = pool
        SPARE.clear()
    if weights is not None:
        MADE.limit = weights


def set_cache_limit(kernels: int | None = None, executables: int | None = None) -> None:
    """How many compiled kernels and how many planned calls are kept in this process.

    Args:
        kernels: Compiled kernels, 512 at the start.
        executables: Planned calls, 1024 at the start.

    >>> set_cache_limit(kernels=512, executables=1024)
    """
    if kernels is not None:
        KERNELS.limit = kernels
    if executables is not None:
        ENGINE.executables.limit = executables


def threads(workers: int = 1) -> int:
    """How many threads a process should use here; `torch.set_num_threads` sets them.

    It counts the cores that the process may run on. A quota of its control groups, as of
    `docker run --cpus`, counts by whole cores. PyTorch itself does not know of quotas.

    Args:
        workers: Processes like this one that share those cores.

    Returns:
        At least 1.

    >>> threads() >= threads(workers=2) >= 1
    True
    """
    if workers < 1:
        raise TilewiseError(f"workers is {workers}, needs at least 1")
    return max(1, cores() // workers)


def algorithms(direction: str = "forward", device: str = "cpu") -> list[str]:
    """Names of the algorithms that `conv2d` can use here, in the order in which they are asked.

    Args:
        direction: "forward", also for gradients of inputs, or "backward_weight".
        device: "cpu", or "cuda" for GPUs of NVIDIA and AMD, as in torch.

    >>> "vendor" in algorithms(), "cpu_winograd_weight" in algorithms("backward_weight")
    (True, True)
    """
    here = Target.host() if device == "cpu" else None
    return [algorithm.name for algorithm in ENGINE.planner.algorithms
            if direction in algorithm.directions
            and (algorithm.is_for(here) if here else algorithm.device in (None, device))]
