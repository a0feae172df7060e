"""Random problems for generated kernels, and the processes that run them."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from tilewise.core import Epilogue, Problem, Target
from tilewise.core.isa import available
from tilewise.planner.planner import inner_problem

from . import harness
from .harness import DIRECTIONS, Mismatch, in_process

ROWS = [pytest.param(row, marks=pytest.mark.skipif(
    row not in [isa.name for isa in available()], reason=f"this machine has no {row}"))
    for row in ("generic", "avx2", "avx512")]


class Case(NamedTuple):
    """A shape with its batch sizes, and what runs it."""

    number: int
    problem: Problem
    batches: list[int]
    algorithm: str


def random_cases(row: str, direction: str, shapes: int, sizes: int) -> list[Case]:
    """So many cases of a row, with so many batch sizes each, some of them also empty.

    Algorithms take turns on what they accept, with what they fuse.
    """
    seed = "cases" if direction == "forward" else direction
    rng, target = random.Random(f"{seed} of {row}"), Target.host(row, harness.THREADS)
    cases: list[Case] = []
    turns: Counter[tuple[str, ...]] = Counter()
    while len(cases) < shapes:
        p = _problem(rng, direction)
        able = tuple(name for name, a in DIRECTIONS[direction].items()
                     if not a.reject(inner_problem(a, p), target))
        if not able:
            continue  # left to torch: a gradient of the input through a stride
        name = able[turns[able] % len(able)]
        algorithm = DIRECTIONS[direction][name]
        layouts = sorted(algorithm.layouts)
        p = p.with_(layout=layouts[turns[able] // len(able) % len(layouts)],
                    epilogue=inner_problem(algorithm, p).epilogue)
        turns[able] += 1
        empty = [0] if rng.random() < 0.15 else []
        cases.append(Case(len(cases), p, empty + rng.sample(range(1, sizes + 3), sizes), name))
    return cases


def _problem(rng: random.Random, direction: str) -> Problem:
    """A forward problem, or the gradient of one without an epilogue."""
    p = harness.random_problem(rng)
    if direction == "forward":
        return harness.more_filters(p)
    return p.with_(direction=direction, epilogue=Epilogue())


def sampled(cases: list[Case], lanes: int, count: int) -> list[Case]:
    """So many of the cases: in turns the one that shows most of what is still rare."""
    if count >= len(cases):
        return cases
    left = {case.number: _shows(case, lanes) for case in cases}
    seen: Counter[tuple[Any, ...]] = Counter()
    for _ in range(count):
        best = max(left, key=lambda number: sum(
            seen[what] < OFTEN.get(what[0], 2) for what in left[number]))
        seen.update(left.pop(best))
    return [case for case in cases if case.number not in left]


# cases that show the same, where not all are run; two of all else
OFTEN = {"kind": 5, "algorithm": 5, "empty": 6}


def _shows(case: Case, lanes: int) -> set[tuple[Any, ...]]:
    """What `check_variety` and `check_counts` ask for."""
    p = case.problem
    end = p.epilogue
    found = {("algorithm", case.algorithm), ("layout", case.algorithm, p.layout),
             ("ends", end.bias, end.residual), ("activation", end.activation), ("pool", end.pool)}
    found |= {("size", size) for size in (p.r, p.s)}
    found |= {(axis, p.stride[axis], "stride") for axis in (0, 1)}
    found |= {(axis, p.dilation[axis], "dilation") for axis in (0, 1)}
    found |= {("kind", kind) for kind, asked in KINDS.items() if asked(p, lanes)}
    return found | ({("empty",)} if 0 in case.batches else set())


def run_cases(row: str, direction: str, shapes: int, sizes: int, chunk: int, chunks: int,
              count: int) -> dict[str, Any]:
    """Every so many-th of so many cases of a row: what ran, and what was wrong."""
    target, known = Target.host(row, harness.THREADS), DIRECTIONS[direction]
    ran: dict[str, list[str]] = {name: [] for name in known}
    failures, compared = [], 0
    cases = sampled(random_cases(row, direction, shapes, sizes), target.lanes, count)
    for number, p, batches, name in cases[chunk::chunks]:
        algorithm, rng = known[name], random.Random(f"schedule {number} of {row}")
        p = p.with_(n=rng.choice(batches))
        inner = inner_problem(algorithm, p)
        s = (harness.random_schedule(algorithm, inner, target, rng) if number // chunks % 2
             else algorithm.default(inner, target))
        print(harness.describe(algorithm, p, target, s), batches)
        try:
            compared += harness.check(algorithm, p, target, s, number, batches)
            ran[name] += [str(p.with_(n=n)) for n in batches]
        except Mismatch as mismatch:
            failures.append(str(mismatch))
    return {"ran": ran, "failures": failures, "compared": compared}


def check_counts(results: list[dict[str, Any]], least: int, floor: int, empty: int) -> None:
    """At least so many distinct problems, so many of each algorithm, and so many without images."""
    for result in results:
        assert result["compared"] == 2 * sum(len(ran) for ran in result["ran"].values())
    for name in results[0]["ran"]:
        assert len({p for result in results for p in result["ran"][name]}) >= floor, name
    problems = {p for result in results for ran in result["ran"].values() for p in ran}
    assert sum(p.startswith("n0") for p in problems) >= empty
    assert sum(not p.startswith("n0") for p in problems) >= least


def _reach(p: Problem, axis: int) -> int:
    """Pixels that a filter spans."""
    return ((p.r, p.s)[axis] - 1) * p.dilation[axis] + 1


SIZES = {1, 2, 3, 4, 5, 6, 7, 9, 11}
KINDS = {  # what code treats apart; asked of a problem and the lanes of a vector
    "no padding": lambda p, lanes: not any(p.padding),
    "uneven padding": lambda p, lanes: p.padding[0] != p.padding[1]
        or p.padding[2] != p.padding[3],
    "padding that no filter leaves": lambda p, lanes: p.direction == "backward_data"
        or p.padding[0] >= _reach(p, 0) or p.padding[2] >= _reach(p, 1),
    "an image below the filter's size": lambda p, lanes: p.h < _reach(p, 0) or p.w < _reach(p, 1),
    "one row or column of outputs": lambda p, lanes: 1 in (p.conv_h, p.conv_w),
    "groups": lambda p, lanes: 1 < p.groups < p.c,
    "a channel a group": lambda p, lanes: 1 < p.groups == p.c,
    "less than a vector of channels": lambda p, lanes: p.k < lanes,
    "a tail after whole vectors": lambda p, lanes: p.k > lanes and p.k % lanes,
    "whole vectors": lambda p, lanes: p.k % lanes == 0,
    "input channels in whole vectors": lambda p, lanes: p.c % lanes == 0,
}


def check_variety(results: list[dict[str, Any]], lanes: int) -> None:
    """Every size, every stride and dilation along both axes, every kind, and every epilogue."""
    shapes = {Problem.parse(text).with_(n=1) for result in results
              for ran in result["ran"].values() for text in ran}
    direction, = {p.direction for p in shapes}
    assert {size for p in shapes for size in (p.r, p.s)} == SIZES
    for axis in (0, 1):
        assert {p.stride[axis] for p in shapes} == (
            {1} if direction == "backward_data" else {1, 2, 3, 4})
        assert {p.dilation[axis] for p in shapes} == {1, 2, 3}
    for kind, asked in KINDS.items():
        assert sum(bool(asked(p, lanes)) for p in shapes) >= 5, kind
    if direction == "forward":
        ends = [p.epilogue for p in shapes]
        assert len({(end.bias, end.residual) for end in ends}) == 2 * 2
        assert {end.activation for end in ends} == {None, *harness.STEPS}
        assert {end.pool for end in ends} == {1, 2}


class Jobs:
    """Functions of a test module running in processes, as many at a time as there are cores."""

    def __init__(self, module: str, pool: ThreadPoolExecutor) -> None:
        self._module, self._pool = module, pool
        self._started: dict[tuple[Any, ...], Future[Any]] = {}

    def start(self, *job: Any) -> Future[Any]:
        if job not in self._started:
            function, *args = job
            self._started[job] = self._pool.submit(
                in_process, f"{self._module}:{function}", *args)
        return self._started[job]

    def result(self, *job: Any) -> Any:
        return self.start(*job).result()


@contextmanager
def jobs_of(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """The jobs that a module's tests wait for: all are started before the first waits."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))  # each has its share of cores
    pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // workers))
    found = Jobs(request.module.__name__, pool)
    for item in request.session.items:
        job = getattr(getattr(item, "function", None), "job", None)
        skipped = any(mark.args[0] for mark in item.iter_markers("skipif"))
        if job and not skipped and item.module is request.module:
            found.start(job, *item.callspec.params.values())
    yield found
    pool.shutdown(cancel_futures=True)


def runs(job: str) -> Any:
    """Mark a test as one that waits for a job with its own parameters."""
    def mark(test: Any) -> Any:
        test.job = job
        return test
    return mark
