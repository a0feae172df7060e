"""Runs kernels between unmapped pages and judges what they leave behind."""

from __future__ import annotations

import ctypes
import json
import math
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tilewise.algorithms import ALGORITHMS
from tilewise.algorithms.cpu_few_rows import CpuFewRows
from tilewise.bench import drawn
from tilewise.bench.drawn import STEPS, more_filters, quickest, random_problem
from tilewise.bench.guarded import among, launch_guarded
from tilewise.bench.judged import (
    STORED,
    Mismatch,
    Operands,
    compare,
    exact,
    keeps_integers,
    laid_out,
    operands,
    prepare,
    rms,
    spread,
)
from tilewise.core import Algorithm, Problem, Schedule, Target
from tilewise.kernels.cpu.emit import launch, threads
from tilewise.planner.planner import inner_problem
from tilewise.runtime import masks

from . import forks

# for tests, beside what is used here
__all__ = ["STEPS", "keeps_integers", "more_filters", "quickest", "random_problem", "rms"]

WRITTEN = [a for a in ALGORITHMS if a.takes == "addresses"]
# without those for large weights alone, which have tests of their own
GENERATED: dict[str, Algorithm] = {
    a.name: a for a in WRITTEN if "forward" in a.directions and a.unit is None
    and not isinstance(a, CpuFewRows)}
WEIGHT_GRADIENTS: dict[str, Algorithm] = {
    a.name: a for a in WRITTEN if "backward_weight" in a.directions and a.unit is None}
ON_MATRIX: dict[str, Any] = {a.name: a for a in WRITTEN if a.unit == "matrix"}
DIRECTIONS = {"forward": GENERATED, "backward_data": GENERATED,
              "backward_weight": WEIGHT_GRADIENTS}
THREADS = 2
LONG = "TILEWISE_LONG" in os.environ  # random tests in full; CI runs a sample of each


def sample(whole: Any, part: Any) -> Any:
    """What is run, or how much of it."""
    return whole if LONG else part


def random_schedule(algorithm: Algorithm, p: Problem, t: Target, rng: random.Random) -> Schedule:
    """One of the space; of a sample the quickest of three, since some take 20 s to compile."""
    return quickest([drawn.random_schedule(algorithm, p, t, rng) for _ in range(sample(1, 3))], p)


# running


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
def _as_last_worker(region: int, frame: int, workers: int, flags: int) -> None:
    threads.Frame.from_address(frame)[threads.WORKER] = workers - 1
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(region)(frame)


LAST_WORKER = ctypes.cast(_as_last_worker, ctypes.c_void_p).value


def last_worker_alone() -> Any:
    """A context where the last worker does all tasks: on small problems it often gets none."""
    return mock.patch.object(launch, "parallel_address", return_value=LAST_WORKER)


def run(algorithm: Algorithm, p: Problem, t: Target, s: Schedule, o: Operands, prepared: Any,
        side: str = "end") -> torch.Tensor:
    """The output of a kernel, every buffer of which touches an unmapped page."""
    return run_masked(algorithm, p, t, s, o, prepared, side)[0]


def run_masked(algorithm: Algorithm, p: Problem, t: Target, s: Schedule, o: Operands,
               prepared: Any, side: str = "end") -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output and, where the problem asks for one, its mask."""
    given = {"x": among(laid_out(o.x, p), p.c, p.pitch), "weight": prepared.flatten(),
             "bias": o.bias, "residual": laid_out(o.residual, p)}
    made = {"y": math.prod(p.result_shape), "scratch": -(-algorithm.workspace(p, t, s) // 4)}
    if p.epilogue.mask:
        made["mask"] = math.prod(masks.shape(p, t))
    kind = STORED.get(p.dtype, torch.float32)
    found = launch_guarded(algorithm.build(p, t, s), given, made, p.n, t.threads, side, kind)
    mask = found["mask"].view(masks.shape(p, t)) if p.epilogue.mask else None
    a, b, c, d = p.result_shape
    if p.layout == "nchw" or p.direction == "backward_weight":
        return found["y"].view(a, b, c, d), mask
    return found["y"].view(a, c, d, b).permute(0, 3, 1, 2), mask

def check(algorithm: Algorithm, p: Problem, t: Target, s: Schedule, seed: int = 0,
          batches: Sequence[int] | None = None) -> int:
    """Run a shape with each batch size on both kinds of data; the number of comparisons.

    Integers end at an unmapped page and are the last worker's, floats start at one.
    """
    batches = (p.n,) if batches is None else batches
    largest, compared = p.with_(n=max(batches)), 0
    for kind, side, workers in (("integers", "end", last_worker_alone),
                                ("floats", "start", nullcontext)):
        o = operands(largest, kind, seed, non_negative=seed % 3 == 0)
        for q, part, expected, scale in _answers(largest, o, batches):
            inner = inner_problem(algorithm, q)
            prepared = prepare(algorithm, q, t, s, part.weight)
            try:
                with workers():
                    y = run(algorithm, inner, t, s, part, prepared, side)
                compare(algorithm, inner, t, s, kind, y, expected, scale)
            except Mismatch as mismatch:
                raise Mismatch(f"{describe(algorithm, q, t, s)}: {mismatch}") from None
            compared += 1
    return compared


def _answers(p: Problem, o: Operands, batches: Sequence[int]) -> Iterator[
        tuple[Problem, Operands, torch.Tensor, torch.Tensor]]:
    """For each batch size: the problem, its operands, what is exact and how large sums are."""
    sums = p.direction == "backward_weight"  # over the images
    expected, scale = (None, None) if sums else (exact(p, o), spread(p, o))
    for n in batches:
        q = p.with_(n=n)
        part = o.first(q)
        if sums:
            yield q, part, exact(q, part), spread(q, part)
        else:
            yield q, part, expected[:n], scale[:n]


def describe(algorithm: Algorithm, p: Problem, t: Target, s: Schedule) -> str:
    return f"{p} on {t}: {algorithm.name} {s.to_json()}"

# processes

TESTS = Path(__file__).parents[1]
# where a process finds `support` and the modules of all rooms
PLACES = [str(TESTS), *sorted(str(path) for path in TESTS.iterdir()
                               if path.is_dir() and path.name != "support")]


class Crash(AssertionError):
    """A process did not come to the end of its function."""


def in_process(function: str, *args: object, limit: float = 900) -> Any:
    """The JSON-able result of `module:function` of a test module, run in a process of its own.

    Lines printed by the function say what it is about to do: after a crash, the last is shown.
    """
    module, name = function.split(":")
    code = (f"import sys, json; sys.path[:0] = {PLACES!r}; import {module}; "
            f"print(json.dumps({module}.{name}(*json.loads({json.dumps(args)!r}))))")
    try:
        done = forks.run(code, limit)
    except forks.Late as late:
        raise Crash(f"not done after {limit} s: {str(late)[-1000:]}") from None
    last = (done.stdout.splitlines() or ["the import"])[-1]
    if done.returncode:
        raise Crash(f"ended with {done.returncode} at {last}\n{done.stderr[-3000:]}")
    return json.loads(last)
