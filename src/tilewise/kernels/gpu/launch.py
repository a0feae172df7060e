"""A kernel with everything but its tensors: started on a device, or compiled without one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ...core.gpu import Gpu

POINTERS = {"f32": "*fp32", "f16": "*fp16", "bf16": "*bf16"}
empty = torch.empty  # by a name of its own, so that tests can fill it with NaN
ALIGNED = [["tt.divisibility", 16]]  # what Triton infers from addresses and sizes


@dataclass(frozen=True)
class Launch:
    """One kernel of a plan; tensors are named by the role they have in it."""

    kernel: Any
    grid: tuple[int, ...]
    pointers: Mapping[str, tuple[str, str]]  # parameter: role and dtype
    sizes: Mapping[str, int]  # known when it is started
    constants: Mapping[str, Any]  # known when it is compiled
    warps: int = 4
    stages: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    def start(self, tensors: Mapping[str, Any]) -> None:
        """Run it; a tensor that has no role in it is left out."""
        if 0 in self.grid:
            return
        given = {name: tensors[role] for name, (role, _) in self.pointers.items()}
        self.kernel[self.grid](**given, **self.sizes, **self.constants, num_warps=self.warps,
                               num_stages=self.stages, **self.options)

    def compile(self, gpu: Gpu) -> Any:
        """Machine code as a launch would compile it, for a GPU that need not be there."""
        source = ASTSource(self.kernel, self._signature(), dict(self.constants), self._attributes())
        target = GPUTarget(gpu.backend, gpu.arch, gpu.warp)
        return triton.compile(source, target=target, options={
            "num_warps": self.warps, "num_stages": self.stages, **self.options})

    def _signature(self) -> dict[str, str]:
        def kind(name: str) -> str:
            if name in self.pointers:
                return POINTERS[self.pointers[name][1]]
            return "i32" if name in self.sizes else "constexpr"

        return {name: kind(name) for name in self.kernel.arg_names}

    def _attributes(self) -> dict[tuple[int], list[list[Any]]]:
        aligned = [*self.pointers, *(n for n, value in self.sizes.items() if value % 16 == 0)]
        return {(self.kernel.arg_names.index(name),): ALIGNED for name in aligned}
