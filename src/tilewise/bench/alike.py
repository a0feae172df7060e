"""Random problems of an algorithm, many of them for one code: compiling takes longer than running.

Code takes image sizes, padding, batches, threads and pitches at run time. All are drawn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from ..algorithms.cpu_few_rows import CpuFewRows
from ..algorithms.cpu_phases import CpuPhases
from ..core.algorithm import Algorithm
from ..core.epilogue import Epilogue
from ..core.errors import InvalidProblem
from ..core.grid import Grid
from ..core.problem import Problem
from ..core.schedule import Schedule
from ..core.target import Target
from ..planner.planner import inner_problem
from .drawn import random_linear, random_padding, random_phased, random_problem, random_schedule

FLOPS = 1e5  # of an image
IMAGES = 120_000  # bytes; larger ones are fresh pages in every call, which takes most of the time
TRIES = 500  # draws until an algorithm takes one; a tenth is taken of the rarest
DRAWS = 3  # for each problem that is wanted of a code: some need other code
BATCHES = {0: 2, 1: 12, 2: 8, 3: 6, 4: 2, 5: 1, 7: 1, 8: 1, 12: 1, 16: 1, 17: 1, 24: 1}
THREADS = (1, 1, 1, 2, 2, 2, 3, 4)  # more than there are cores take long
ROWS = 200  # of a linear layer
FEW = [(n, threads) for n in range(41) for threads in range(1, 5)]  # for code of one size
GAPS = (1, 3, 8, 16, 40)  # channels beside those that are read or written


class Case(NamedTuple):
    """A problem as it is asked for, and as the kernel is: its images may be slices of others."""

    p: Problem
    inner: Problem
    t: Target
    s: Schedule


class Views(NamedTuple):
    """What lies among other channels."""

    read: bool = False
    written: bool = False

    def of(self, inner: Problem, rng: random.Random) -> Problem:
        if self.read:
            inner = inner.with_(pitch=inner.c + rng.choice(GAPS))
        if self.written:
            _, channels, h, w = inner.result_shape
            inner = inner.with_(grid=Grid(1, 1, h, w, channels + rng.choice(GAPS)))
        return inner


def cases(algorithm: Algorithm, t: Target, rng: random.Random, most: int) -> Iterator[Case]:
    """At most so many problems of one code, all different; none if none is accepted."""
    p = accepted(algorithm, t, rng)
    if p is None:
        return
    inner = inner_problem(algorithm, p)
    s = random_schedule(algorithm, inner, t, rng) if rng.random() < 0.5 else (
        algorithm.default(inner, t))
    views, s = _views(algorithm, inner, t, s, rng)
    first = Case(p, views.of(inner, rng), t, s)
    code, any_size = _code(algorithm, *first[1:])
    yield first
    found = {first}
    for q, threads in _others(p, rng, any_size or p.is_linear, DRAWS * most):
        if len(found) == most:
            return
        case = _taken(algorithm, q, replace(t, threads=threads), s, views, rng)
        if case and case not in found and _code(algorithm, *case[1:])[0] == code:
            yield case
            found.add(case)


def accepted(algorithm: Algorithm, t: Target, rng: random.Random) -> Problem | None:
    """A problem that an algorithm takes, in any of its directions and layouts, if it takes any."""
    for _ in range(TRIES):
        p = _random(algorithm, rng)
        if p is not None and (isinstance(algorithm, CpuFewRows)  # it refuses small ones as slow
                              or not algorithm.reject(inner_problem(algorithm, p), t)):
            return p
    return None


def _random(algorithm: Algorithm, rng: random.Random) -> Problem | None:
    if isinstance(algorithm, CpuFewRows):
        return random_linear(rng)
    if isinstance(algorithm, CpuPhases):
        phased = random_phased(rng)
        return phased if phased and phased.flops <= 10 * FLOPS else None
    p = random_problem(rng, FLOPS).with_(layout=rng.choice(sorted(algorithm.layouts)),
                                         dtype=rng.choice(("f32",) * 6 + ("bf16", "f16")))
    if "forward" not in algorithm.directions:
        return p.with_(direction="backward_weight", epilogue=Epilogue())
    if rng.random() < 0.3:
        return p.with_(direction="backward_data", epilogue=Epilogue())
    return p.with_(epilogue=inner_problem(algorithm, p).epilogue)


def _views(algorithm: Algorithm, inner: Problem, t: Target, s: Schedule,
           rng: random.Random) -> tuple[Views, Schedule]:
    """Random ones that the algorithm takes, and a schedule for them."""
    views = Views(rng.random() < 0.3, rng.random() < 0.3)
    if isinstance(algorithm, CpuFewRows) or views == Views():
        return Views(), s
    # such stores are of whole lines, which a slice of channels may not begin with
    apart = s.with_(streaming=False) if views.written and "streaming" in s else s
    try:
        q = views.of(inner, rng)
    except InvalidProblem:  # gradients of weights, for one
        return Views(), s
    tail = q.epilogue
    taken = not (views.written and (tail.residual or tail.pool > 1)) and (
        not algorithm.reject(q, t)) and apart in algorithm.space(q, t)
    return (views, apart) if taken else (Views(), s)


def _others(p: Problem, rng: random.Random, any_size: bool,
            most: int) -> Iterator[tuple[Problem, int]]:
    """Other sizes, paddings, batches and numbers of threads; of one size, each once."""
    if not any_size:
        yield from ((p.with_(n=n), threads) for n, threads in rng.sample(FEW, min(most, len(FEW))))
        return
    for _ in range(most):
        try:
            yield _resized(p, rng), rng.choice(THREADS)
        except InvalidProblem:
            continue


def _taken(algorithm: Algorithm, p: Problem, t: Target, s: Schedule, views: Views,
           rng: random.Random) -> Case | None:
    """The problem with random pitches and a schedule for it, if the algorithm takes it."""
    if _is_large(p, p.n, p.h, p.w, p.padding, max(FLOPS, p.compiled.flops)):
        return None
    try:
        inner = views.of(inner_problem(algorithm, p), rng)
    except InvalidProblem:
        return None
    if isinstance(algorithm, CpuFewRows):
        return Case(p, inner, t, s)
    if algorithm.reject(inner, t):
        return None
    s = algorithm.adapted(inner, t, s)
    return Case(p, inner, t, s) if s in algorithm.space(inner, t) else None


def _resized(p: Problem, rng: random.Random) -> Problem:
    if p.is_linear:
        return p.with_(n=rng.randint(0, ROWS))
    n = rng.choices(tuple(BATCHES), tuple(BATCHES.values()))[0]
    h, w = (rng.choice((old, rng.randint(1, 9), rng.randint(1, 20), rng.randint(1, 70)))
            for old in (p.h, p.w))
    some = any(p.padding) and rng.random() < 0.7
    padding = random_padding(rng, p.span_h, p.span_w) if some else p.padding
    most = max(FLOPS, p.flops)
    while h * w > 1 and _is_large(p, n, h, w, padding, most):
        h, w = (h, w // 2) if w > h else (h // 2, w)
    return p.with_(n=n, h=h, w=w, padding=padding)


def _is_large(p: Problem, n: int, h: int, w: int, padding: tuple[int, ...], most: float) -> bool:
    """Whether it takes long, by numbers alone: problems are made slowly."""
    outputs = (((h + padding[0] + padding[1] - p.span_h) // p.stride[0] + 1)
               * ((w + padding[2] + padding[3] - p.span_w) // p.stride[1] + 1))
    flops = 2 * outputs * p.k * p.group_c * p.r * p.s
    return max(flops, n * flops / 10) > most or 8 * n * (p.c * h * w + p.k * outputs) > IMAGES


def _code(algorithm: Algorithm, p: Problem, t: Target, s: Schedule) -> tuple[set[str], bool]:
    """What a problem's code is kept under, and whether it is for images of any size."""
    requests = algorithm.requests(p, t, s)
    return {request.key for request in requests}, all(request.any_size for request in requests)
