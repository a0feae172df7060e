"""A plan with its kernel, called with tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.algorithm import Algorithm
from ..core.plan import Plan
from ..core.problem import ACTIVATIONS, Problem
from ..kernels.cpu import memory

LAYOUTS = {"nhwc": torch.channels_last, "nchw": torch.contiguous_format}


class Executable:
    """Ready to run: y = executable(x, prepared weight, bias, residual)."""

    def __init__(self, plan: Plan, algorithm: Algorithm) -> None:
        self.plan, self.algorithm = plan, algorithm
        p, t, s = plan.inner, plan.target, plan.schedule
        built = algorithm.build(p, t, s)
        self._scratch = algorithm.workspace(p, t, s)
        wrap = self._with_tensors if algorithm.takes == "tensors" else self._with_addresses
        self._run = wrap(built)
        self._layout = LAYOUTS[p.layout]
        self._after = tuple(_step(name) for name in plan.after)
        # weights are prepared alike whatever the batch and the image size; a string hashes once
        parts = (algorithm.name, t.isa, s, p.layout, p.c, p.k, p.r, p.s, p.groups)
        self.weight_key = " ".join(map(str, parts))

    def prepare(self, weight: Tensor) -> Any:
        """The weight as the kernel wants it."""
        return self.algorithm.prepare(self.plan.inner, self.plan.target, self.plan.schedule,
                                      weight.detach())

    def __call__(self, x: Tensor, weight: Any, bias: Tensor | None,
                 residual: Tensor | None) -> Tensor:
        layout = self._layout
        x = x.contiguous(memory_format=layout)
        fused = residual
        if residual is not None:
            residual = residual.contiguous(memory_format=layout)
            fused = residual if self.plan.inner.epilogue.residual else None
        y = self._run(x, weight, bias if self.plan.inner.epilogue.bias else None, fused)
        for step in self._after:
            y = step(y, bias, residual)
        return y

    def _with_tensors(self, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        p = self.plan.inner
        layout, strides = LAYOUTS[p.layout], _strides(p)

        def run(*operands: Any) -> Tensor:
            y = call(*operands).contiguous(memory_format=layout)
            return y if y.stride() == strides else y.as_strided(y.shape, strides)

        return run

    def _with_addresses(self, launch: Callable[..., None]) -> Callable[..., Tensor]:
        p, threads, floats = self.plan.inner, self.plan.target.threads, -(-self._scratch // 4)
        empty = _empty_output(p)

        def run(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
            y = empty()
            scratch = memory.empty(floats) if floats else None
            bias = None if bias is None else bias.contiguous()
            launch(x.data_ptr(), weight.data_ptr(), _address(bias), _address(residual),
                   y.data_ptr(), _address(scratch), p.n, threads)
            return y

        return run


def _empty_output(p: Problem) -> Callable[[], Tensor]:
    if p.layout == "nhwc":
        return lambda: memory.empty(p.n, p.out_h, p.out_w, p.k).permute(0, 3, 1, 2)
    return lambda: memory.empty(p.n, p.k, p.out_h, p.out_w)


def _strides(p: Problem) -> tuple[int, ...]:
    """Of the output, also where a size of one would allow others."""
    h, w, k = p.out_h, p.out_w, p.k
    return (h * w * k, 1, w * k, k) if p.layout == "nhwc" else (k * h * w, h * w, w, 1)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


Step = Callable[[Tensor, Any, Any], Tensor]  # of the output so far, the bias and the residual


def _step(name: str) -> Step:
    """A pass after the kernel, by its name."""
    if name.startswith("pool"):
        return lambda y, bias, residual: F.max_pool2d(y, int(name[4:]))
    if name in ACTIVATIONS and name not in STEPS:
        function = getattr(F, name)
        return lambda y, bias, residual: function(y)
    return STEPS[name]


STEPS: dict[str, Step] = {
    "bias": lambda y, bias, residual: y.add_(bias[:, None, None]),
    "residual": lambda y, bias, residual: y.add_(residual),
    "relu": lambda y, bias, residual: y.relu_(),
    # copies, since a size of one would let contiguous() keep the strides of the other layout
    "to_nchw": lambda y, bias, residual: memory.keep(y),
    "to_nhwc": lambda y, bias, residual: memory.keep(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
}
