"""The optimisations of a convolution, one at a time, as schedules of the same generators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..conv.running import ENGINE
from ..core.errors import InvalidProblem, NoAlgorithm
from ..core.plan import Plan
from ..core.problem import Problem
from ..core.progress import Tell, counting, silent
from ..core.target import Target
from ..planner.measure import Timing, interleaved
from .contenders import torch_contenders, use_huge_pages
from .run import WrongResult, rms_error
from .rungs import STEPS, Rung, Step
from .subjects import Subject, layer

SLOW = 0.3  # estimated seconds from which on two rounds are enough
FLOOR = 5e-6  # an error that no bound needs to be below
ROOM = 0.05  # by which a rung may pass the peak that clocks found
ALIKE = 0.03  # gains smaller than this, by the least times and by the medians, are none


@dataclass(frozen=True)
class Line:
    """One line of the ladder; without times if the rung does not apply."""

    name: str
    kind: str  # rung, torch or limit
    why: str
    minimum: float | None = None
    median: float | None = None
    spread: float | None = None
    gflops: float | None = None
    share: float | None = None  # of the measured multiply-add peak
    bytes: int | None = None
    workspace: int | None = None
    error: float | None = None
    gain: float | None = None  # over the rung before
    algorithm: str = ""
    schedule: str = ""
    barred: str = ""  # why the default precision does not admit it

    @property
    def is_plain(self) -> bool:
        """Whether it does what is counted, on the vector units: it cannot pass their peak."""
        return bool(self.algorithm) and not any(
            word in self.algorithm for word in ("winograd", "bf16"))


def climbable(p: Problem) -> Problem:
    """The problem; complains if no rung can run it."""
    if p.dtype != "f32":
        raise InvalidProblem(f"dtype is {p.dtype}, needs f32: tilewise ladder "
                             f"{p.with_(dtype='f32')}")
    if p.direction != "forward":
        raise InvalidProblem(f"direction is {p.direction}, needs forward")
    return p


def ladder(p: Problem, t: Target, limits: dict[str, float], rounds: int = 7,
           tell: Tell = silent) -> list[Line]:
    """Every rung, checked, then timed in turns with torch; limits are operations and bytes/s."""
    use_huge_pages()
    what = layer(p)
    rungs: list[Rung] = []
    refused: dict[str, str] = {}
    for i, step in enumerate(STEPS):
        tell(f"building: {step.name}", i, len(STEPS))
        try:
            rungs.append(step.make(p, t, rungs))
        except NoAlgorithm as answer:
            refused[step.name] = "; ".join(next(iter(answer.reasons.values())))
    errors = []
    for i, rung in enumerate(rungs):
        tell(f"checking: {rung.name}", i, len(rungs))
        errors.append(_checked(rung, what))
    others = torch_contenders(what)
    runs = [_caller(rung.run, what) for rung in rungs]
    slow = [rung.plan.seconds > SLOW for rung in rungs]
    times = _timed([*runs, *(c.run for c in others)], [*slow, *[False] * len(others)], rounds,
                   tell)
    lines = _rung_lines(p, t, rungs, refused, times, errors, limits["peak"])
    reference = _reference(what)
    for contender, time in zip(others, times[len(rungs):], strict=True):
        error = rms_error(contender.run()[:1], reference)
        lines.append(_line(contender.name, "torch", "torch's own convolution, for comparison", p,
                           time, limits["peak"], error=error, bytes=p.bytes))
    return lines + _limit_lines(p, limits)


def passes_peak(lines: Sequence[Line]) -> bool:
    """Whether the peak was measured too low, because the machine was busy."""
    return any(line.is_plain and (line.share or 0.0) > 1 + ROOM for line in lines)


def rated(lines: Sequence[Line], p: Problem, limits: dict[str, float]) -> list[Line]:
    """The same times beside other limits."""
    timed = [line if line.gflops is None else
             replace(line, share=line.gflops * 1e9 / limits["peak"])
             for line in lines if line.kind != "limit"]
    return timed + _limit_lines(p, limits)


def _caller(run: Callable[..., Any], what: Subject) -> Callable[[], Any]:
    return lambda: run(what.example)


def _timed(runs: Sequence[Callable[[], Any]], slow: Sequence[bool], rounds: int,
           tell: Tell) -> list[Timing]:
    """Times in the order given; what is hopelessly slow gets two rounds of its own."""
    found: dict[int, Timing] = {}
    tick = counting(tell, "measuring", sum(2 if is_slow else rounds for is_slow in slow))
    for which, turns in ((False, rounds), (True, 2)):
        indices = [i for i, is_slow in enumerate(slow) if is_slow == which]
        times = interleaved([runs[i] for i in indices], turns, 0.02, 45, tick=tick)
        found.update(zip(indices, times, strict=True))
    return [found[i] for i in range(len(runs))]


def _reference(what: Subject) -> torch.Tensor:
    import copy

    model: Any = copy.deepcopy(what.model).double()
    if model.residual is not None:
        model.residual = model.residual[:1]
    with torch.no_grad():
        result: torch.Tensor = model(what.example[:1].double())
    return result


def _checked(rung: Rung, what: Subject) -> float:
    """The rung's error; raises if it is not the convolution."""
    error = rms_error(rung.run(what.example)[:1], _reference(what))
    if not error <= max(rung.plan.error, FLOOR):
        raise WrongResult(f"{rung.name}: rms error is {error:.1e}, needs at most "
                          f"{rung.plan.error:.1e}: no speed is told of a wrong result")
    return error


def _rung_lines(p: Problem, t: Target, rungs: Sequence[Rung], refused: dict[str, str],
                times: Sequence[Timing], errors: Sequence[float], peak: float) -> list[Line]:
    made = {rung.name: (rung, time, error) for rung, time, error in zip(rungs, times, errors)}
    lines: list[Line] = []
    before: float | None = None
    best: Timing | None = None  # a rung can be a detour: what it teaches is told by the best so far
    for step in STEPS:
        if step.name in refused:
            lines.append(Line(step.name, "rung", f"not here: {refused[step.name]}"))
            continue
        rung, time, error = made[step.name]
        gain = None if before is None else before / time.minimum
        lines.append(_line(step.name, "rung", _sentence(step, best, time), p, time, peak,
                           error=error, gain=gain, bytes=rung.bytes, workspace=rung.workspace,
                           algorithm=rung.plan.algorithm, schedule=str(rung.plan.schedule),
                           barred=_barred(rung.plan)))
        before = time.minimum
        best = time if best is None else min(best, time, key=lambda t: t.minimum)
    return lines


def _barred(plan: Plan) -> str:
    """Why the planner may not choose it; empty means it may."""
    p, t = plan.problem, plan.target
    keeps, needs = ENGINE.planner.algorithm(plan.algorithm).bits, ENGINE.bits(None, p, t)
    if keeps < needs:
        return f"its products keep {keeps} bits, and the default precision asks for {needs}"
    if plan.error > ENGINE.admitted(None, p, t):
        return f"its error is up to {plan.error:.1e}, more than the default precision admits"
    return ""


def _sentence(step: Step, best: Timing | None, time: Timing) -> str:
    """Why it is faster or slower than the best before; for what clocks cannot tell, only how."""
    if best is None:
        return step.why
    gains = best.minimum / time.minimum, best.median / time.median
    apart, noise = max(*gains, *(1 / gain for gain in gains)) - 1, max(best.spread, time.spread)
    if min(gains) >= 1 + ALIKE and apart > noise:
        return step.why
    if max(gains) <= 1 - ALIKE and apart > noise:
        return step.why_not
    beside = f", with rounds {noise:.0%} apart" if noise >= apart else ""
    return (f"no clear difference from the best before it ({gains[0]:.2f}x by the least times, "
            f"{gains[1]:.2f}x by the medians{beside}). The idea: {step.why}")


def _line(name: str, kind: str, why: str, p: Problem, time: Timing, peak: float,
          **more: Any) -> Line:
    rate = p.flops / time.minimum
    return Line(name, kind, why, time.minimum, time.median, time.spread, rate / 1e9, rate / peak,
                **more)


def _limit_lines(p: Problem, limits: dict[str, float]) -> list[Line]:
    compute, memory = p.flops / limits["peak"], p.bytes / limits["bandwidth"]
    return [
        Line("limit: multiply-adds", "limit", "the direct method's operations at the measured "
             "peak; Winograd does fewer and can pass it", compute, gflops=limits["peak"] / 1e9,
             share=1.0),
        Line("limit: memory", "limit", "everything read and written once at the measured "
             "bandwidth", memory, gflops=p.flops / memory / 1e9, bytes=p.bytes),
    ]
