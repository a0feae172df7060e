"""A plan with its kernel, called with tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.activations import SLOPED, is_activation
from ..core.algorithm import Algorithm
from ..core.places import address, address_or_null
from ..core.plan import Plan
from ..core.problem import Problem
from ..core.watching import watcher
from ..kernels import precision
from ..kernels.activations import apart, applied
from ..kernels.cpu import memory
from ..kernels.cpu.emit.threads import alone_after_fork
from ..kernels.cpu.prepare.mirrored import mirrored
from . import masks
from .pooling import max_pool
from .turning import LAYOUTS, copied, laid_out
from .types import DTYPES


class Ready(NamedTuple):
    """A prepared weight, and the weight itself for a kernel that wants it otherwise."""

    values: Tensor
    source: Callable[[], Tensor]


class Executable:
    """Ready to run: y = executable(x, prepared weight, bias, residual).

    Slopes of an activation lie behind the bias: see `kernels.activations.joined`.
    For the gradient of the input, x is that of the output; for the gradient of the weight, the
    prepared weight is the gradient of the output. `out` has the result's strides, and may have
    fewer images than the problem. It must not be the residual: tiles of some kernels overlap, and
    would add it twice. Where results lie on a grid, so does the residual.
    """

    def __init__(self, plan: Plan, algorithm: Algorithm,
                 instead: Callable[[Plan], Executable] | None = None) -> None:
        self.plan, self.algorithm, self._instead = plan, algorithm, instead
        self._spreads = algorithm.spreads
        p, t, s = plan.inner, plan.target, plan.schedule
        # of weights and biases: generated code for CPUs reads them as float32
        self.weight_dtype = (torch.float32 if algorithm.takes == "addresses" else DTYPES[p.dtype])
        built = algorithm.build(p, t, s)
        self._scratch = algorithm.workspace(p, t, s)
        wrap = self._with_tensors if algorithm.takes == "tensors" else self._with_addresses
        self._run: Callable[..., Any] = wrap(built)
        tail = p.epilogue
        self._reads_channels = tail.bias or tail.has_slopes
        self._cuts = plan.problem.epilogue.has_slopes and not tail.has_slopes  # a pass has them
        self._layout, self._of_weight = LAYOUTS[p.layout], p.direction == "backward_weight"
        self._passes = any(not name.startswith("pool") for name in plan.after)
        self._after = tuple(None if name == "mask" else _step(name, plan) for name in plan.after)
        # weights are prepared alike whatever the batch and the image size
        self._weight_of = algorithm.weight_of(p, s)
        self.weight_key = _weight_key(algorithm.name, t.isa, *self._weight_of, plan.mirrors)

    @property
    def is_among(self) -> bool:
        """Whether its results may lie between other channels."""
        return self.plan.inner.grid is not None and self.plan.problem.grid is None

    def prepare(self, weight: Tensor) -> Any:
        """The weight as the kernel wants it."""
        weight = weight.detach()
        if self._of_weight:
            return weight
        weight = weight.to(self.weight_dtype)
        if self.plan.mirrors:
            weight = mirrored(weight, self.plan.problem.groups, self.algorithm.by_strides)
        p, s = self._weight_of
        return self.algorithm.prepare(p, self.plan.target, s, weight)

    def ready(self, weight: Tensor, source: Callable[[], Tensor]) -> Any:
        """The same for a call that may have to be run by another kernel; source() is the weight."""
        return self.with_source(self.prepare(weight), source)

    def with_source(self, values: Any, source: Callable[[], Tensor]) -> Any:
        """A prepared weight with its source, where the call may have to be run by another."""
        return Ready(values, source) if self._spreads and self._instead else values

    def __call__(self, x: Tensor, weight: Any, bias: Tensor | None, residual: Tensor | None,
                 out: Tensor | None = None) -> Tensor:
        if self._of_weight:
            x, weight = (laid_out(t, self._layout) for t in (x, weight))
            return self._run(x, weight, None, None, None)
        y = self.masked(x, weight, bias, residual, out)[0]
        return y if out is None or y is out else out.copy_(y)  # torch's, or a pass's

    def masked(self, x: Tensor, weight: Any, bias: Tensor | None, residual: Tensor | None,
               out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The result, and the mask where the problem asks for one."""
        layout, inner = self._layout, self.plan.inner
        x, fused = x if inner.pitch else laid_out(x, layout), residual
        if residual is not None:
            residual = residual if inner.grid else laid_out(residual, layout)
            fused = residual if inner.epilogue.residual else None
        mask = masks.empty(inner, self.plan.target) if inner.epilogue.mask else None
        ready = type(weight) is Ready
        channels = bias if self._reads_channels else None
        if self._cuts:
            channels = apart(self.plan.problem, channels)[0]
        y = self._run(x, weight.values if ready else weight, channels, fused, mask, ready, out)
        if y is None:
            return self._by_another(x, weight.source(), bias, residual, out)
        if self._passes and (told := watcher()) is not None:
            told.cannot_repeat("a pass of torch's writes to the result")
        for step in self._after:
            if step is None:
                y, mask = masks.pack(self.plan.problem, self.plan.target, y)
            else:
                y = step(y, bias, residual)
        return y, mask

    def _by_another(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
                    out: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """By a kernel that leaves infinities and NaN where they belong."""
        assert self._instead is not None
        if (told := watcher()) is not None:
            told.cannot_repeat("a result is not finite")
        other = self._instead(self.plan)
        with alone_after_fork():
            ready = other.prepare(weight)
        return other.masked(x, ready, bias, residual, None if self.is_among else out)

    def _with_tensors(self, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        p = self.plan.inner
        layout, strides = LAYOUTS[_result_layout(p)], _strides(p)
        if self.plan.held and p.dtype == "f32":
            call = precision.full()(call)

        def run(x: Tensor, weight: Any, bias: Tensor | None, *rest: Any) -> Tensor:
            bias = bias if bias is None else bias.to(x.dtype)
            y = call(x, weight, bias, rest[0]).contiguous(memory_format=layout)
            return y if y.stride() == strides else y.as_strided(y.shape, strides)

        return run

    def _with_addresses(self, launch: Callable[..., int]) -> Callable[..., Tensor | None]:
        p, threads, floats = self.plan.inner, self.plan.target.threads, -(-self._scratch // 4)
        empty = _empty_result(p)

        def run(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
                mask: Tensor | None, may_fail: bool = False,
                out: Tensor | None = None) -> Tensor | None:
            y = empty() if out is None else out
            scratch = memory.empty(floats) if floats else None
            bias = None if bias is None else bias.to(torch.float32).contiguous()
            batch = p.n if out is None else out.shape[0]
            found = launch(address(x), address(weight), address_or_null(bias),
                           address_or_null(residual), address(y), address_or_null(scratch),
                           batch, threads, address_or_null(mask))
            return None if found and may_fail else y

        return run


@lru_cache(maxsize=4096)
def _weight_key(*parts: object) -> str:
    """As a string, which hashes once."""
    return " ".join(map(str, parts))


def _result_layout(p: Problem) -> str:
    """Gradients of weights come as (K, C, R, S), whatever the layout of the images."""
    return "nchw" if p.direction == "backward_weight" else p.layout


def _empty_result(p: Problem) -> Callable[[], Tensor]:
    (a, b, c, d), dtype = p.result_shape, DTYPES[p.dtype]
    if dtype.itemsize * a * b * c * d < memory.SMALL:
        make = partial(torch.empty_strided, p.result_shape, _strides(p), dtype=dtype)
        return lambda: memory.noted(make())
    if _result_layout(p) == "nhwc":
        return lambda: memory.empty(a, c, d, b, dtype=dtype).permute(0, 3, 1, 2)
    return lambda: memory.empty(a, b, c, d, dtype=dtype)


def _strides(p: Problem) -> tuple[int, ...]:
    """Of the result, also where a size of one would allow others."""
    _, k, h, w = p.result_shape
    if _result_layout(p) == "nhwc":
        return (h * w * k, 1, w * k, k)
    return (k * h * w, h * w, w, 1)


Step = Callable[[Tensor, Any, Any], Tensor]  # of the output so far, the bias and the residual


def _step(name: str, plan: Plan) -> Step:
    """A pass after the kernel, by its name."""
    if name.startswith("pool"):
        pool = max_pool(plan)
        return lambda y, bias, residual: pool(y)
    if is_activation(name) and name not in STEPS:
        function, p = applied(name), plan.problem
        if name in SLOPED:
            return lambda y, bias, residual: function(y, apart(p, bias)[1])
        return lambda y, bias, residual: function(y)
    return STEPS[name]


STEPS: dict[str, Step] = {
    # of the ladder's first rungs; slopes may lie behind it
    "bias": lambda y, bias, residual: y.add_(bias[:y.shape[1], None, None]),
    "residual": lambda y, bias, residual: y.add_(residual),
    "relu": lambda y, bias, residual: y.relu_(),
    "to_nchw": lambda y, bias, residual: copied(y, "nchw"),
    "to_nhwc": lambda y, bias, residual: copied(y, "nhwc"),
}
