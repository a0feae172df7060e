"""Strided gradients of inputs, and transposed convolutions: a dense convolution for each phase."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

from ..core.activations import SLOPED
from ..core.algorithm import Algorithm
from ..core.cost import CALL, traffic
from ..core.phases import Phase, covers, phases, weights
from ..core.problem import DTYPES, Epilogue, Problem
from ..core.schedule import Schedule, Space, Tunable
from ..core.target import Target
from .common import HALVES, CpuAlgorithm, cpu_f32, cpu_images

LINE = 64  # bytes: where the weights of a phase begin
WORD, FLOAT = 8, 4
Choice = tuple[Algorithm, Schedule]


class Parts(Space):
    """All choices for the phases, of which one is listed: each algorithm has a space of its own."""

    def __init__(self, legal: Callable[[Schedule], bool], listed: Callable[[], Schedule]) -> None:
        super().__init__(legal)
        self._listed = listed

    @property
    def tunables(self) -> dict[str, tuple[Tunable, ...]]:
        """Found when they are looked at, which takes longer than to judge a schedule."""
        return {"parts": (self._listed()["parts"],)}

    def __contains__(self, schedule: Schedule) -> bool:
        return set(schedule) == {"parts"} and isinstance(schedule["parts"], str) and (
            self.admits(schedule))


class CpuPhases(Algorithm):
    """Runs the phases one after the other, each by the best of some algorithms.

    Its schedule names them with their own schedules.
    """

    directions = frozenset({"backward_data"})
    fuses = CpuAlgorithm.fuses - SLOPED

    def __init__(self, name: str, algorithms: Sequence[Algorithm]) -> None:
        self.name, self.algorithms = name, {each.name: each for each in algorithms}
        self.bits = min(each.bits for each in algorithms)
        self.spreads = any(each.spreads for each in algorithms)
        self.keeps_infinities = all(each.keeps_infinities for each in algorithms)
        self.exact_on_integers = all(each.exact_on_integers for each in algorithms)

    def is_for(self, t: Target) -> bool:
        """One with products of bfloat16 is for machines that have them."""
        units = [each for each in self.algorithms.values() if each.unit]
        return super().is_for(t) and (not units or any(each.is_for(t) for each in units))

    def reject(self, p: Problem, t: Target) -> list[str]:
        reasons = cpu_images(p, t) if p.dtype in HALVES else cpu_f32(p, t)
        if p.direction != "backward_data":
            reasons.append(f"direction is {p.direction}, needs backward_data")
        return reasons or self._no_phases(p) or next(
            (self._reasons(phase, t) for phase in phases(p) if not self._able(phase, t)), [])

    def _no_phases(self, p: Problem) -> list[str]:
        if not phases(p):
            return [f"stride is {p.stride} and the image {p.h}x{p.w}, needs a stride above 1 and "
                    "an image as large"]
        if (p.grid or p.epilogue != Epilogue()) and not covers(p):
            return [f"filter is {p.r}x{p.s} and stride {p.stride}, needs a filter that reaches "
                    "every pixel where something follows or lies between"]
        if p.dtype != "f32" and not covers(p):
            return [f"dtype is {p.dtype}, filter {p.r}x{p.s}, stride {p.stride}, needs f32, or "
                    "a filter that reaches every pixel"]
        if p.grid and ((p.grid.down, p.grid.across) != (1, 1) or p.grid.w != p.w):
            return [f"results go to a {p.grid}, need to be whole images"]
        return []

    def _able(self, phase: Phase, t: Target) -> list[Algorithm]:
        return [each for each in self.algorithms.values()
                if each.is_for(t) and not each.reject(phase.problem, t)]

    def _reasons(self, phase: Phase, t: Target) -> list[str]:
        return [reason for each in self.algorithms.values()
                for reason in each.reject(phase.problem, t)]

    def space(self, p: Problem, t: Target) -> Space:
        def legal(s: Any) -> bool:
            try:
                choices = self._choices(s)
            except (ValueError, TypeError, KeyError):  # a file may say anything
                return False
            parts = phases(p)
            return len(choices) == len(parts) and all(
                a in self._able(phase, t) and s_ in a.space(phase.problem, t)
                for phase, (a, s_) in zip(parts, choices))

        return Parts(legal, lambda: self.default(p, t))

    def default(self, p: Problem, t: Target) -> Schedule:
        return _default(self, p, t)

    def best(self, phase: Phase, t: Target) -> Choice:
        """The algorithm that takes the least time, for any number of threads."""
        q, common = phase.problem, t.on_two
        best = min(self._able(phase, t), key=lambda a: a.cost(q, common, a.default(q, common)))
        return best, best.default(q, t)

    def adapted(self, p: Problem, t: Target, s: Schedule) -> Schedule:
        return _schedule([(a, a.adapted(phase.problem, t, s_))
                          for phase, a, s_ in self._parts(p, s)])

    def _choices(self, s: Any) -> list[Choice]:
        return [(self.algorithms[name], Schedule(**tunables))
                for name, tunables in json.loads(s.parts)]

    def _known(self, s: Schedule) -> list[Choice]:
        """The same, read once: weights that learn are prepared in every step."""
        return _read(self, s)

    def _parts(self, p: Problem, s: Schedule) -> list[tuple[Phase, Algorithm, Schedule]]:
        return [(phase, a, s_)
                for phase, (a, s_) in zip(phases(p), self._choices(s), strict=True)]

    def error(self, p: Problem, t: Target, s: Schedule) -> float:
        return max(a.error(phase.problem, t, s_) for phase, a, s_ in self._parts(p, s))

    def certain(self, p: Problem, t: Target, s: Schedule) -> float:
        return max(a.certain(phase.problem, t, s_) for phase, a, s_ in self._parts(p, s))

    def cost(self, p: Problem, t: Target, s: Schedule) -> float:
        total = sum(a.cost(phase.problem, t, s_) for phase, a, s_ in self._parts(p, s))
        return total if covers(p) else total + CALL + traffic(t, p.input_bytes)

    def workspace(self, p: Problem, t: Target, s: Schedule) -> int:
        return max(a.workspace(phase.problem, t, s_) for phase, a, s_ in self._parts(p, s))

    def weight_of(self, p: Problem, s: Schedule) -> tuple[Problem, Schedule]:
        """A small image with the same phases, and what their weights depend on."""
        bare = p.with_(n=1, h=p.span_h + p.stride[0], w=p.span_w + p.stride[1],
                       epilogue=Epilogue(), grid=None)
        return bare, _schedule([(a, a.weight_of(phase.problem, s_)[1])
                                for phase, a, s_ in self._parts(p, s)])

    def prepare(self, p: Problem, t: Target, s: Schedule, weight: Any) -> Any:
        """The weights of all phases behind a table of where each begins."""
        from ..kernels.cpu.prepare.mirrored import mirrored

        made: list[tuple[int, Any]] = []  # floats of a phase, and what writes or has them
        for phase, (a, s_) in zip(weights(p), self._known(s), strict=True):
            own = mirrored(weight[:, :, _forward(phase.rows), _forward(phase.cols)], p.groups,
                           a.by_strides)
            floats = a.prepared_floats(phase.problem, t, s_)
            write = partial(a.prepare_into, phase.problem, t, s_, own)
            made.append((floats, write) if floats else
                        _copied(a.prepare(phase.problem, t, s_, own)))
        return _joined(made)

    def requests(self, p: Problem, t: Target, s: Schedule) -> list[Any]:
        from ..kernels.cpu.between import cleared

        first = [] if covers(p) else [cleared.request_of(t.row)]
        return first + [request for phase, a, s_ in self._parts(p, s)
                        for request in a.requests(phase.problem, t, s_)]

    def build(self, p: Problem, t: Target, s: Schedule) -> Any:
        parts = [(a.build(phase.problem, t, s_), _bytes_before(p, phase.offset))
                 for phase, a, s_ in self._parts(p, s)]
        clear = None if covers(p) else _cleared(p, t)
        table = ctypes.c_int64 * len(parts)

        def launch(x: int, weight: int, bias: int, residual: int, y: int, scratch: int, batch: int,
                   threads: int, mask: int = 0) -> int:
            if clear is not None:
                clear(0, 0, 0, 0, y, 0, batch, threads)
            found = 0
            for (run, at), start in zip(parts, table.from_address(weight)):
                found |= run(x, weight + start, bias, residual + at if residual else 0, y + at,
                             scratch, batch, threads)
            return found

        return launch


@lru_cache(maxsize=1024)
def _read(self: CpuPhases, s: Schedule) -> list[Choice]:
    return self._choices(s)


@lru_cache(maxsize=4096)
def _default(self: CpuPhases, p: Problem, t: Target) -> Schedule:
    return _schedule([self.best(phase, t) for phase in phases(p)])


def _schedule(choices: Sequence[Choice]) -> Schedule:
    return Schedule(parts=json.dumps([[a.name, dict(s)] for a, s in choices]))


def _forward(taps: tuple[int, ...]) -> slice:
    """Taps that are evenly spaced and have the last first, in their order."""
    return slice(taps[-1], taps[0] + 1, taps[0] - taps[1] if len(taps) > 1 else 1)


def _copied(one: Any) -> tuple[int, Any]:
    """As `_joined` wants a tensor that is made already."""
    flat = one.contiguous().flatten()
    return flat.numel(), lambda place: place.copy_(flat)


def _joined(made: list[tuple[int, Any]]) -> Any:
    """Weights behind each other, after a table of their places in bytes."""
    import torch

    from ..kernels.cpu import memory

    starts, at = [], -(-WORD * len(made) // LINE) * LINE
    for floats, _ in made:
        starts.append(at)
        at += -(-FLOAT * floats // LINE) * LINE
    whole = memory.empty(at // FLOAT)
    whole[:WORD * len(made) // FLOAT].view(torch.int64).copy_(torch.tensor(starts))
    for (floats, write), start in zip(made, starts, strict=True):
        write(whole[start // FLOAT:start // FLOAT + floats])
    return whole


def _cleared(p: Problem, t: Target) -> Any:
    """Launches what writes zeros where no phase does, and elsewhere."""
    from ..kernels.cpu.between import cleared
    from ..kernels.cpu.emit.launch import launch_of

    return launch_of(cleared.request_of(t.row), cleared.sizes(p.c * p.h * p.w))


def _bytes_before(p: Problem, offset: tuple[int, int]) -> int:
    row, col = offset
    pixel = p.grid.pitch if p.grid and p.grid.pitch else p.c
    return DTYPES[p.dtype] * (row * p.w + col) * pixel
