"""Types of tensors that kernels of this machine read and write."""

from __future__ import annotations

from functools import lru_cache

import torch

from ..core.isa import ISA, KNOWN, widens
from ..core.target import Target

DTYPES = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16,
          "bf16": torch.bfloat16}
HALVES = {torch.bfloat16: "bf16", torch.float16: "f16"}


@lru_cache(maxsize=16)
def is_on_unit(dtype: torch.dtype) -> bool:
    """Whether a unit of this machine multiplies it, for torch too: what we would compute in float32
    is better left to torch."""
    return dtype == torch.bfloat16 and KNOWN and ISA[Target.host().isa].reads_bf16


@lru_cache(maxsize=16)
def element_of(dtype: torch.dtype) -> str | None:
    """The name of a type's element, if kernels take it; what they compute is float32."""
    if not KNOWN:
        return None
    if dtype == torch.float32:
        return "f32"
    name = HALVES.get(dtype)
    return name if name is not None and widens(ISA[Target.host().isa], name) else None
