"""What a GPU owner runs: correctness against the vendor's library, then interleaved timing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..conv.devices import target_of
from ..conv.running import ENGINE
from ..core.errors import TilewiseError
from ..core.problem import Problem
from ..core.progress import Tell, silent
from ..runtime.engine import random_operands

LAYERS = tuple(f"n32c{c}h{h}w{h}k{k}r3s3p1_{dtype}_forward+bias+relu" for dtype in ("f16", "f32")
               for c, k, h in ((64, 64, 224), (128, 128, 112), (256, 256, 56), (512, 512, 28),
                               (512, 512, 14)))
WARM_UP = 3


@dataclass(frozen=True)
class Timed:
    """One algorithm on one problem."""

    problem: str
    algorithm: str
    schedule: str
    difference: float  # from the vendor's result, relative rms
    bound: float  # on both errors together
    minimum: float  # seconds
    median: float
    ratio: float  # the vendor's median over this one


def measure(problems: Sequence[str] = LAYERS, rounds: int = 30,
            tell: Tell = silent) -> list[Timed]:
    """Every algorithm that accepts a problem; a wrong result ends it before anything is timed."""
    if not torch.cuda.is_available():
        raise TilewiseError("bench --device cuda needs a GPU and its driver; torch finds none on "
                            "this machine")
    target = target_of(torch.empty(0, device="cuda"))
    rows: list[Timed] = []
    for i, text in enumerate(problems):
        tell(f"measuring {text}", i, len(problems))
        rows += _problem(Problem.parse(text), target, rounds)
    return rows


def _problem(p: Problem, target: Any, rounds: int) -> list[Timed]:
    found = ENGINE.planner.candidates(p, target)
    plans = [c.plan for c in found if c.plan and c.algorithm != "reference"]
    given = [None if arg is None else arg.cuda() for arg in random_operands(p)]
    calls = [_call(plan, given) for plan in plans]
    vendor = next(i for i, plan in enumerate(plans) if plan.algorithm == "vendor")
    differences = _differences([call() for call in calls], vendor)
    bounds = [plan.error + plans[vendor].error for plan in plans]
    for plan, difference, bound in zip(plans, differences, bounds, strict=True):
        if not difference <= bound:
            raise TilewiseError(f"{plan} differs from the vendor's result by {difference:.1e}, "
                                f"needs at most {bound:.1e}")
    times = _interleaved(calls, rounds)
    base = statistics.median(times[vendor])
    return [Timed(str(p), plan.algorithm, str(plan.schedule), difference, bound, min(seen),
                  statistics.median(seen), base / statistics.median(seen))
            for plan, difference, bound, seen in zip(plans, differences, bounds, times,
                                                     strict=True)]


def _call(plan: Any, given: Sequence[Any]) -> Callable[[], torch.Tensor]:
    run = ENGINE.build(plan)
    weight = run.prepare(given[1])
    return lambda: run(given[0], weight, *given[2:])


def _differences(results: Sequence[torch.Tensor], vendor: int) -> list[float]:
    want = results[vendor].double()
    scale = float(want.square().mean().sqrt())
    return [float((y.double() - want).square().mean().sqrt()) / scale for y in results]


def _interleaved(calls: Sequence[Callable[[], torch.Tensor]], rounds: int) -> list[list[float]]:
    """Seconds of every call, taken in turns between events of the GPU itself."""
    for _ in range(WARM_UP):
        for call in calls:
            call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, seen in zip(calls, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            seen.append(start.elapsed_time(end) / 1e3)
    return times
