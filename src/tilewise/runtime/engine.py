"""From a problem to an executable, remembered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..core.algorithm import Algorithm
from ..core.errors import TilewiseError
from ..core.grid import Grid
from ..core.lru import Lru
from ..core.plan import Plan
from ..core.problem import Problem
from ..core.schedule import Schedule
from ..core.target import Target
from ..kernels import precision
from ..kernels.activations import joined
from ..kernels.cpu.emit.jit import LLVMLITE
from ..planner.classes import VERSION as CLASSES
from ..planner.families import Family, family_path
from ..planner.planner import Planner
from ..planner.wisdom import Wisdom, default_path, system_path
from .executable import Executable
from .types import DTYPES

# the largest error that each of torch.set_float32_matmul_precision's settings admits
PRECISIONS = {"highest": 2e-5, "high": 2e-4, "medium": 2e-2}
BITS = {"highest": 24, "high": 16, "medium": 8}  # that products keep, as torch describes them
# on GPUs, torch's "high" also means tf32
GPU_PRECISIONS, GPU_BITS = {**PRECISIONS, "high": 2e-3}, {**BITS, "high": 11}
HALVES = {"f16": 4e-3, "bf16": 2e-2}  # storing a result in them errs by 2**-11 and 2**-8 alone


class Engine:
    """Plans problems with the given algorithms and keeps what was built."""

    def __init__(self, algorithms: Sequence[Algorithm], limit: int = 1024) -> None:
        versions = {"torch": torch.__version__, "llvmlite": LLVMLITE, "classes": CLASSES}
        self.planner = Planner(algorithms, start=self.start, wisdom=Wisdom(versions),
                               family=Family(family_path()))
        self.executables: Lru[Any] = Lru(limit)  # by whatever key a caller has at hand
        self.observers: list[Callable[[Plan], None]] = []  # told of every plan that is run
        self._read_wisdom = self._read_system = False

    def plan(self, p: Problem, t: Target, effort: str = "estimate", algorithm: str | None = None,
             max_error: float | None = None) -> Plan:
        """The best plan within the error that the caller, or torch's setting, admits."""
        if not self._read_system:
            self._load_system()
        if not self._read_wisdom:
            self.load_wisdom(default_path())
        return self.planner.plan(p, t, effort, algorithm, max_error=self.admitted(max_error, p, t),
                                 bits=self.bits(max_error, p, t))

    def admitted(self, max_error: float | None, p: Problem, t: Target) -> float:
        """The error bound in force: the caller's, or that of torch's precision setting."""
        if max_error is not None:
            if not max_error >= 0:
                raise TilewiseError(f"max_error is {max_error!r}, needs a number such as 1e-5 "
                                    "that is not negative, or None")
            return max_error
        table = GPU_PRECISIONS if t.device == "cuda" else PRECISIONS
        return max(table[precision.asked()], HALVES.get(p.dtype, 0.0))

    def bits(self, max_error: float | None, p: Problem, t: Target) -> int:
        """The bits that products must keep: as torch's setting says, unless the caller bounds."""
        if max_error is not None or p.dtype in HALVES:
            return 0
        table = GPU_BITS if t.device == "cuda" else BITS
        return table[precision.asked()]

    def _load_system(self) -> None:
        self._read_system, path = True, system_path()
        if path is not None:
            self.planner.system.load(path, or_roots=True)

    def forget(self) -> None:
        """All plans; files stay, and those of the system and the package are not read again."""
        self.planner.forget()
        self.executables.clear()

    def load_wisdom(self, path: Path) -> int:
        """Merge a file of plans; what was planned without it is planned anew."""
        self._read_wisdom = True
        found = self.planner.wisdom.load(path)
        if found:
            self.executables.clear()
        return found

    def read_wisdom(self, text: str, origin: str) -> None:
        """The same for what came with something else."""
        if self.planner.wisdom.read(text, Path(origin)):
            self.executables.clear()

    def among(self, plan: Plan, read: int, written: int) -> Plan:
        """The same with images or results between other channels, so many in all; 0: they are
        whole. As it is where that cannot be."""
        p = plan.inner
        if plan.before or p.layout != "nhwc" or p.direction == "backward_weight":
            return plan
        if read > p.c and p.direction == "forward":
            plan = self._changed(plan, p.with_(pitch=read), plan.schedule)
        tail = p.epilogue
        if written and not (plan.after or tail.residual or tail.pool > 1 or tail.mask):
            # such stores are of whole lines, which a slice of channels may not begin with
            s = plan.schedule.with_(**{"streaming": False} if "streaming" in plan.schedule else {})
            grid = Grid(1, 1, *p.result_shape[2:], written)
            plan = self._changed(plan, plan.inner.with_(grid=grid), s)
        return plan

    def _changed(self, plan: Plan, inner: Problem, s: Schedule) -> Plan:
        """The plan for another problem of its kernel, if the algorithm takes that."""
        t, algorithm = plan.target, self.planner.algorithm(plan.algorithm)
        if algorithm.takes == "tensors" or algorithm.reject(inner, t) or (
                s not in algorithm.space(inner, t)):
            return plan
        return replace(plan, inner=inner, schedule=s)

    def build(self, plan: Plan) -> Executable:
        return Executable(plan, self.planner.algorithm(plan.algorithm), self.unspread)

    def unspread(self, plan: Plan) -> Executable:
        """For the same problem, what leaves infinities and NaN where they belong."""
        key = ("unspread", plan.problem, plan.target, plan.held)
        found = self.executables.get(key)
        if found is None:
            found = self.executables.put(key, self.build(self._unspread_plan(plan)))
        return found

    def _unspread_plan(self, plan: Plan) -> Plan:
        """All bits of float32: parts of floats make NaN of infinities."""
        p, t = plan.problem, plan.target
        answers = self.planner.candidates(p, t)
        plans = [answer.plan for answer in answers if answer.plan
                 for algorithm in [self.planner.algorithm(answer.algorithm)]
                 if not algorithm.spreads and algorithm.keeps_infinities]
        return replace(plans[0], held=plan.held)

    def tell(self, plan: Plan) -> None:
        """Let those who watch know what is about to run."""
        for note in self.observers:
            note(plan)

    def start(self, plan: Plan) -> Callable[[], object]:
        """The plan on random data, ready to be timed."""
        device, args = plan.target.device, random_operands(plan.problem)
        if device == "cuda":
            return self._start_on_gpu(plan, args)
        run = self.build(plan)
        weight = run.prepare(args[1])
        return lambda: run(args[0], weight, *args[2:])

    def _start_on_gpu(self, plan: Plan, args: tuple[torch.Tensor, ...]) -> Callable[[], object]:
        """A call that ends when the GPU has ended."""
        if not torch.cuda.is_available():
            raise TilewiseError(f"timing on {plan.target} needs a GPU and its driver; torch finds "
                                "none on this machine")
        x, weight, *rest = (None if arg is None else arg.cuda() for arg in args)
        run = self.build(plan)
        ready = run.prepare(weight)

        def call() -> None:
            run(x, ready, *rest)
            torch.cuda.synchronize()

        return call


def random_operands(p: Problem, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Operands of a problem with normal values: x, weight, bias or None, residual or None.

    Where the activation has slopes, they lie behind the bias.
    """
    rng = torch.Generator().manual_seed(seed)
    layout = torch.channels_last if p.layout == "nhwc" else torch.contiguous_format

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float32).to(DTYPES[p.dtype])

    x = normal(p.n, p.c, p.h, p.w).contiguous(memory_format=layout)
    weight = normal(p.k, p.group_c, p.r, p.s) * (p.group_c * p.r * p.s) ** -0.5
    if p.direction != "forward":
        grad = normal(p.n, p.k, p.conv_h, p.conv_w).contiguous(memory_format=layout)
        first, second = (grad, weight) if p.direction == "backward_data" else (x, grad)
        return first, second, None, None  # type: ignore[return-value]
    bias = normal(p.k) if p.epilogue.bias else None
    bias = joined(bias, normal(p.k) if p.epilogue.has_slopes else None, p.k)
    shape = (p.n, p.k, p.conv_h, p.conv_w)
    residual = normal(*shape).contiguous(memory_format=layout) if p.epilogue.residual else None
    return x, weight, bias, residual  # type: ignore[return-value]
