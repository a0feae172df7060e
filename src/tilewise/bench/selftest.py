"""Random problems of every algorithm that writes code here, against float64.

`tilewise doctor --selftest` runs it: the first thing to do on a machine that nobody has tried.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import torch

from ..algorithms import ALGORITHMS
from ..algorithms.cpu_phases import CpuPhases
from ..core.algorithm import Algorithm
from ..core.problem import Problem
from ..core.progress import Tell, silent
from ..core.schedule import Schedule
from ..core.target import Target
from .alike import Case, cases
from .guarded import among, extent, launch_guarded, taken_from
from .judged import (
    ADVERSE,
    STORED,
    Operands,
    compare,
    compare_any,
    exact,
    laid_out,
    operands,
    prepare,
    reach,
    spread,
    suits_any,
)

PROBLEMS = 500  # of an algorithm
SHARED = 50  # problems that share their code
SECONDS = 56.0  # of all; an algorithm gets its share
LATE = 120.0  # seconds beyond its share until an algorithm is given up: code may never end
POLICY = "OMP_WAIT_POLICY"


@dataclass
class Outcome:
    """What was run, and what was wrong."""

    ran: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    worst: float = 0.0  # share of a declared bound that an error took
    seconds: float = 0.0


def selftest(t: Target, tell: Tell = silent, problems: int = PROBLEMS,
             processes: int = 0) -> Outcome:
    """So many problems of every algorithm that is for a target; side by side in processes, or here.

    Code that ends its process counts as wrong, and in processes code that never ends does as well.
    """
    found, start = Outcome(), time.monotonic()
    able = able_on(t)
    able.sort(key=lambda a: isinstance(a, CpuPhases))  # the slow ones get what others leave

    def share(waiting: int) -> float:
        """Seconds of the next, while so many have not ended."""
        left = SECONDS - (time.monotonic() - start)
        return min(left, left * max(processes, 1) / waiting)

    ends = _side_by_side(able, t, problems, processes, share) if processes else (
        tried(a.name, t, problems, share(len(able) - i)) for i, a in enumerate(able))
    for number, part in enumerate(ends):
        tell("testing", number, len(able))
        found.ran |= part.ran
        found.wrong += part.wrong
        found.worst = max(found.worst, part.worst)
    found.ran = {a.name: found.ran[a.name] for a in ALGORITHMS if a.name in found.ran}
    found.seconds = time.monotonic() - start
    return found


def able_on(t: Target) -> list[Algorithm]:
    """Those that write code for a target."""
    return [a for a in ALGORITHMS if a.takes == "addresses" and a.device == "cpu" and a.is_for(t)]


def _side_by_side(able: list[Algorithm], t: Target, problems: int, processes: int,
                  share: Callable[[int], float]) -> Iterator[Outcome]:
    """What became of each algorithm, as they end."""
    waiting, running = [a.name for a in able], dict[Future[Outcome], tuple[str, float]]()
    with _patient_threads():
        pool = _pool(processes)
        while waiting or running:
            while waiting and len(running) < processes:
                seconds = share(len(waiting) + len(running))
                name = waiting.pop(0)
                limit = time.monotonic() + max(seconds, 0) + LATE
                running[pool.submit(tried, name, t, problems, seconds)] = name, limit
            first = min(limit for _, limit in running.values())
            done, _ = wait(running, max(0, first - time.monotonic()), FIRST_COMPLETED)
            late = "" if done else f"not done {LATE:.0f} s after its time"
            if late:
                done = _ended(pool, running)
            if any(isinstance(end.exception(), BrokenProcessPool) for end in done):
                done, pool = set(running), _pool(processes)  # all that shared it are lost
            for end in done:
                name, _ = running.pop(end)
                if end.exception() is None:
                    yield end.result()
                else:
                    yield Outcome({name: 1},
                                  [f"{name}, or one beside it: {late or end.exception()}"])
        pool.shutdown()


def _ended(pool: ProcessPoolExecutor, running: Iterable[Future[Outcome]]) -> set[Future[Outcome]]:
    """What ran in a pool whose processes had to be stopped."""
    for process in list(pool._processes.values()):
        process.kill()
    return wait(running).done


def _pool(processes: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(processes, mp_context=get_context("spawn"))


@contextmanager
def _patient_threads() -> Iterator[None]:
    """Threads of processes that start now do not spin while they wait: others need the cores."""
    before = os.environ.get(POLICY)
    os.environ[POLICY] = "passive"
    try:
        yield
    finally:
        if before is None:
            del os.environ[POLICY]
        else:
            os.environ[POLICY] = before


def tried(name: str, t: Target, problems: int, seconds: float, seed: str = "",
          shared: int = SHARED) -> Outcome:
    """One algorithm, so many problems for one code; a seed draws others."""
    found = Outcome()
    algorithm = next(a for a in ALGORITHMS if a.name == name)
    rng = random.Random(f"selftest of {algorithm.name}{seed}")
    _try(algorithm, t, problems, time.monotonic() + seconds, found, rng, shared)
    return found


def _try(algorithm: Algorithm, t: Target, problems: int, end: float, found: Outcome,
         rng: random.Random, shared: int) -> None:
    """One algorithm, until it has had so many problems or its time is up."""
    ran, before = 0, -1
    while before < ran < problems and time.monotonic() < end:
        before = ran
        for case in cases(algorithm, t, rng, min(shared, problems - ran)):
            if time.monotonic() > end:
                break
            try:
                found.worst = max(found.worst, _check(algorithm, case, ran))
            except Exception as problem:  # also of a compiler that does not know the machine
                found.wrong.append(f"{algorithm.name}: {case.inner} on {case.t} "
                                   f"{case.s.to_json()}: {problem}")
            ran += 1
    if ran:
        found.ran[algorithm.name] = ran


def _check(algorithm: Algorithm, case: Case, seed: int) -> float:
    """The share of its bound that a result's error takes; integers, floats and adverse data take
    turns."""
    kind = "floats" if seed % 2 else "integers"
    if seed % 4 == 3 and suits_any(case.p):
        kind = list(ADVERSE)[seed // 4 % len(ADVERSE)]
    return judged(algorithm, case, kind, seed)


def judged(algorithm: Algorithm, case: Case, kind: str, seed: int) -> float:
    """The same with data of a kind."""
    p, inner, t, s = case
    o = operands(p, kind, seed)
    prepared = prepare(algorithm, p, t, s, o.weight)
    y = _run(algorithm, inner, t, s, o, prepared, "start" if seed % 2 else "end")
    if kind in ADVERSE:
        return compare_any(algorithm, inner, t, s, kind, y, exact(p, o), reach(p, o) if p.n else y)
    return compare(algorithm, inner, t, s, kind, y, exact(p, o), spread(p, o))


def _run(algorithm: Algorithm, p: Problem, t: Target, s: Schedule, o: Operands, prepared: Any,
         side: str) -> torch.Tensor:
    """What a kernel makes of its operands, between pages that cannot be touched."""
    given = {"x": among(laid_out(o.x, p), p.c, p.pitch), "weight": prepared.flatten(),
             "bias": o.bias, "residual": laid_out(o.residual, p)}
    n, channels, *size = p.result_shape
    pitch = p.grid.pitch if p.grid else 0
    made = {"y": extent(n * math.prod(size), channels, pitch),
            "scratch": -(-algorithm.workspace(p, t, s) // 4)}
    y = launch_guarded(algorithm.build(p, t, s), given, made, p.n, t.threads, side,
                       STORED.get(p.dtype, torch.float32), wanted=("y",))["y"]
    if p.layout == "nchw" or p.direction == "backward_weight":
        return y.view(n, channels, *size)
    return taken_from(y, channels, pitch).view(n, *size, channels).permute(0, 3, 1, 2)


def line(found: Outcome, machine: dict[str, Any]) -> str:
    """All of it in one line, for a report."""
    versions = ", ".join(f"{name} {machine['versions'][name]}"
                         for name in ("python", "torch", "llvmlite"))
    if not found.ran:
        return (f"tilewise {machine['versions']['tilewise']} selftest: no code is written for "
                f"{machine['system']}, {machine['processor']}: torch computes everything; "
                f"{versions}")
    counts = sorted(set(found.ran.values()))
    each = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return (f"tilewise {machine['versions']['tilewise']} selftest: "
            f"{len(found.ran)} algorithms, {each} problems each, {len(found.wrong)} wrong, "
            f"largest error {found.worst:.2f} of its bound, {found.seconds:.0f} s; "
            f"{machine['system']}, {machine['processor']}, {machine['isa']}, "
            f"{machine['threads']} threads; {versions}")
