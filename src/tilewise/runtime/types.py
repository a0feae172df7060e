"""Types of tensors that kernels of this machine read and write."""

from __future__ import annotations

from functools import lru_cache

import torch

from ..core.isa import ISA, KNOWN
from ..core.target import Target

HALVES = {torch.bfloat16: "bf16", torch.float16: "f16"}


@lru_cache(maxsize=16)
def element_of(dtype: torch.dtype) -> str | None:
    """The name of a type's element, if kernels take it; what they compute is float32."""
    if not KNOWN:
        return None
    if dtype == torch.float32:
        return "f32"
    return HALVES.get(dtype) if ISA[Target.host().isa].widens else None
