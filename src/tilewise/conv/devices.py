"""Which machine holds a tensor."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from ..core.target import Target


def target_of(x: Tensor) -> Target:
    """The machine that holds a tensor."""
    if x.device.type == "cuda":
        return _gpu(x.device.index)
    host = Target.host(threads=torch.get_num_threads())
    return host if x.is_cpu else host.with_(device=x.device.type)


@lru_cache(maxsize=64)
def _gpu(index: int | None) -> Target:
    """A GPU as its driver describes it; without Triton, torch's own convolution serves it."""
    found = torch.cuda.get_device_properties(index)
    name = found.gcnArchName if torch.version.hip else f"sm_{found.major}{found.minor}"
    if find_spec("triton") is None:
        return Target("cuda", f"{name} without triton", 1)
    return Target.gpu(name)
