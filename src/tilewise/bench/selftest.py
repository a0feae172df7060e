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
from ..algorithms.cpu_few_rows import CpuFewRows
from ..algorithms.cpu_phases import CpuPhases
from ..core.algorithm import Algorithm
from ..core.epilogue import Epilogue
from ..core.errors import InvalidProblem
from ..core.problem import Problem
from ..core.progress import Tell, silent
from ..core.schedule import Schedule
from ..core.target import Target
from ..planner.planner import inner_problem
from .drawn import random_linear, random_phased, random_problem, random_schedule
from .guarded import launch_guarded
from .judged import (
    ADVERSE,
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
SHARED = 25  # batch sizes, and then image sizes, that share the code of a weight
SECONDS = 56.0  # of all; an algorithm gets its share
LATE = 120.0  # seconds beyond its share until an algorithm is given up: code may never end
FLOPS = 1e5  # of an image
TRIES = 500  # draws until an algorithm takes one; a tenth is taken of the rarest
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


def tried(name: str, t: Target, problems: int, seconds: float, seed: str = "") -> Outcome:
    """One algorithm; a seed draws other problems."""
    found = Outcome()
    algorithm = next(a for a in ALGORITHMS if a.name == name)
    rng = random.Random(f"selftest of {algorithm.name}{seed}")
    _try(algorithm, t, problems, time.monotonic() + seconds, found, rng)
    return found


def _try(algorithm: Algorithm, t: Target, problems: int, end: float, found: Outcome,
         rng: random.Random) -> None:
    """One algorithm, until it has had so many problems or its time is up."""
    ran = 0
    while ran < problems and time.monotonic() < end:
        p = _accepted(algorithm, t, rng)
        if p is None:
            break
        inner = inner_problem(algorithm, p)
        s = random_schedule(algorithm, inner, t, rng) if rng.random() < 0.5 else (
            algorithm.default(inner, t))
        for q, s_ in _like(algorithm, p, s, t, rng):
            if ran == problems or time.monotonic() > end:
                break
            try:
                found.worst = max(found.worst, _check(algorithm, q, t, s_, ran))
            except Exception as problem:  # also of a compiler that does not know the machine
                found.wrong.append(f"{algorithm.name}: {q} {s_.to_json()}: {problem}")
            ran += 1
    if ran:
        found.ran[algorithm.name] = ran


def _accepted(algorithm: Algorithm, t: Target, rng: random.Random) -> Problem | None:
    """A problem that an algorithm takes, in any of its directions and layouts, if it takes any."""
    if isinstance(algorithm, CpuFewRows):  # it refuses small ones because they are slow
        return random_linear(rng)
    for _ in range(TRIES):
        p = random_phased(rng) if isinstance(algorithm, CpuPhases) else _random(algorithm, rng)
        if p is not None and not algorithm.reject(inner_problem(algorithm, p), t):
            return p
    return None


def _random(algorithm: Algorithm, rng: random.Random) -> Problem:
    p = random_problem(rng, FLOPS).with_(layout=rng.choice(sorted(algorithm.layouts)))
    if "forward" not in algorithm.directions:
        return p.with_(direction="backward_weight", epilogue=Epilogue())
    if rng.random() < 0.3:
        return p.with_(direction="backward_data", epilogue=Epilogue())
    return p.with_(epilogue=inner_problem(algorithm, p).epilogue)


def _like(algorithm: Algorithm, p: Problem, s: Schedule, t: Target,
          rng: random.Random) -> Iterator[tuple[Problem, Schedule]]:
    """Problems with the same code: with more images, and of other sizes where code knows none."""
    batches = [p.with_(n=n) for n in range(SHARED)]
    yield from ((q, s) for q in batches if q.n < 3 or q.flops < SHARED * FLOPS)
    code = _code(algorithm, inner_problem(algorithm, p), t, s)
    for number in range(SHARED):
        try:
            q = p.with_(n=number % 4, h=rng.randint(1, 20), w=rng.randint(1, 20))
        except InvalidProblem:
            continue
        inner = inner_problem(algorithm, q)
        if q.with_(n=1).flops > FLOPS or algorithm.reject(inner, t):
            continue
        s_ = algorithm.adapted(inner, t, s)
        if s_ in algorithm.space(inner, t) and _code(algorithm, inner, t, s_) == code:
            yield q, s_


def _code(algorithm: Algorithm, p: Problem, t: Target, s: Schedule) -> set[str]:
    return {request.key for request in algorithm.requests(p, t, s)}


def _check(algorithm: Algorithm, p: Problem, t: Target, s: Schedule, seed: int) -> float:
    """The share of its bound that a result's error takes; integers, floats and adverse data take
    turns."""
    kind = "floats" if seed % 2 else "integers"
    if seed % 4 == 3 and suits_any(p):
        kind = list(ADVERSE)[seed // 4 % len(ADVERSE)]
    return judged(algorithm, p, t, s, kind, seed)


def judged(algorithm: Algorithm, p: Problem, t: Target, s: Schedule, kind: str,
           seed: int) -> float:
    """The same with data of a kind."""
    o = operands(p, kind, seed)
    inner = inner_problem(algorithm, p)
    prepared = prepare(algorithm, p, t, s, o.weight)
    y = _run(algorithm, inner, t, s, o, prepared, "start" if seed % 2 else "end")
    a, b, c, d = inner.result_shape
    if inner.layout == "nchw" or inner.direction == "backward_weight":
        y = y.view(a, b, c, d)
    else:
        y = y.view(a, c, d, b).permute(0, 3, 1, 2)
    if kind in ADVERSE:
        return compare_any(algorithm, inner, t, s, kind, y, exact(p, o), reach(p, o) if p.n else y)
    return compare(algorithm, inner, t, s, kind, y, exact(p, o), spread(p, o))


def _run(algorithm: Algorithm, p: Problem, t: Target, s: Schedule, o: Operands, prepared: Any,
         side: str) -> torch.Tensor:
    """What a kernel makes of its operands, between pages that cannot be touched."""
    given = {"x": laid_out(o.x, p), "weight": prepared.flatten(), "bias": o.bias,
             "residual": laid_out(o.residual, p)}
    made = {"y": math.prod(p.result_shape), "scratch": -(-algorithm.workspace(p, t, s) // 4)}
    return launch_guarded(algorithm.build(p, t, s), given, made, p.n, t.threads, side)["y"]


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
