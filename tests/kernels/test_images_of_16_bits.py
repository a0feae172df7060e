"""Kernels on bfloat16 and float16 images, between unmapped pages, against float64."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from support import harness
from support.cases import ROWS, Jobs, jobs_of, runs
from support.harness import GENERATED, WEIGHT_GRADIENTS, Mismatch, sample

from tilewise.algorithms.common import HALVES as ALL
from tilewise.core import ISA, Problem, Target
from tilewise.core.algorithm import accumulation_error, storing_error
from tilewise.core.isa import widens
from tilewise.core.problem import Epilogue
from tilewise.planner.planner import inner_problem

WIDE = [row for row in ROWS if any(widens(ISA[row.values[0]], dtype) for dtype in ALL)]
HALVES = [dtype for dtype in ALL if any(widens(ISA[row.values[0]], dtype) for row in WIDE)]
pytestmark = pytest.mark.skipif(not HALVES, reason="this machine multiplies both itself")
GRADIENTS = ("cpu_direct_weight", "cpu_winograd_weight", "cpu_depthwise_weight")
KERNELS = ("cpu_direct", "cpu_pointwise", "cpu_depthwise", "cpu_winograd", *GRADIENTS)
COUNT = sample(400, 2)  # problems of each kernel, type and row
ALGORITHMS = {**GENERATED, **WEIGHT_GRADIENTS}
MUST_ACCEPT = {
    "cpu_direct": "n1c3h224w224k64r7s7u2p3_bf16_forward+bias+relu",
    "cpu_pointwise": "n1c256h56w56k512r1s1u2_bf16_forward+bias+residual",
    "cpu_depthwise": "n1c96h56w56k96r5s5u2p2g96_bf16_forward+bias+relu6",
    "cpu_winograd": "n1c512h14w14k512r3s3p1_bf16_forward+bias+residual+relu",
    "cpu_direct_weight": "n2c3h224w224k64r7s7u2p3_bf16_backward_weight",
    "cpu_winograd_weight": "n2c64h56w56k64r3s3p1_bf16_backward_weight",
    "cpu_depthwise_weight": "n2c96h56w56k96r3s3p1g96_bf16_backward_weight"}


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest) -> Any:
    with jobs_of(request) as found:
        yield found


def kinds_of(t: Target) -> list[tuple[str, str]]:
    """Kernels and types of a row; weights' gradients are torch's where it has a unit for them."""
    return [(name, dtype) for name in KERNELS for dtype in HALVES if widens(t.row, dtype)
            and not (name in GRADIENTS and dtype == "bf16" and t.row.reads_bf16)]


def run_halves(row: str) -> dict[str, Any]:
    """Random problems of both types for every kernel, in turns."""
    target, rng = Target.host(row, harness.THREADS), random.Random(f"halves on {row}")
    ran: Counter[str] = Counter()
    failures: list[str] = []
    kinds = kinds_of(target)
    while min((ran[f"{name} {dtype}"] for name, dtype in kinds), default=0) < COUNT:
        p = harness.more_filters(harness.random_problem(rng, 4e5))
        name, dtype = min(kinds, key=lambda kind: ran[" ".join(kind)] + rng.random())
        algorithm = ALGORITHMS[name]
        if name in GRADIENTS:
            p = p.with_(direction="backward_weight", epilogue=Epilogue())
        p = inner_problem(algorithm, p.with_(dtype=dtype, n=rng.randint(1, 3)))
        if algorithm.reject(p, target):
            continue
        s = (algorithm.default(p, target) if ran[f"{name} {dtype}"] % 2
             else harness.random_schedule(algorithm, p, target, rng))
        print(harness.describe(algorithm, p, target, s))
        try:
            harness.check(algorithm, p, target, s, sum(ran.values()))
        except Mismatch as mismatch:
            failures.append(str(mismatch))
        ran[f"{name} {dtype}"] += 1
    return {"ran": dict(ran), "failures": failures}


@runs("run_halves")
@pytest.mark.parametrize("row", WIDE)
def test_random_problems_are_within_the_declared_bound(row: str, jobs: Jobs) -> None:
    found = jobs.result("run_halves", row)
    assert not found["failures"], "\n".join(found["failures"])
    kinds = kinds_of(Target.host(row, 2))
    assert len(kinds) >= 4
    assert set(found["ran"]) == set(map(" ".join, kinds))
    assert min(found["ran"].values()) >= COUNT


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("row", WIDE)
def test_layers_of_models_are_accepted(name: str, row: str) -> None:
    p = Problem.parse(MUST_ACCEPT[name])
    t = Target.host(row, 2)
    for dtype in (dtype for dtype in HALVES if widens(t.row, dtype)):
        refused = (name, dtype) not in kinds_of(t)
        assert bool(ALGORITHMS[name].reject(p.with_(dtype=dtype), t)) == refused


@pytest.mark.parametrize("name", KERNELS)
def test_rows_that_were_not_measured_are_refused(name: str) -> None:
    p = Problem.parse(MUST_ACCEPT[name])
    reasons = ALGORITHMS[name].reject(p, Target.host("generic", 2))
    assert reasons == ["dtype is bf16 on generic, needs f32, or amx or avx512_bf16 or avx512 or "
                       "avx2 without amx_bf16"]


def test_the_bound_is_that_of_float32_and_half_a_unit_in_the_last_place() -> None:
    p = Problem.parse("n1c16h8w8k16r3s3p1_bf16_forward")
    algorithm, t = GENERATED["cpu_direct"], Target.host(threads=2)
    error = algorithm.error(p, t, algorithm.default(p, t))
    assert error == accumulation_error(16 * 9) + 2.0 ** -8
    largest = 1 + 2.0 ** -8  # halfway between 1 and the next bfloat16
    assert abs(torch.tensor(largest).bfloat16().double() - largest) == storing_error("bf16")


def _answers(name: str, x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Images through filters that pass every channel on, as a kernel stores them."""
    n, c, h, w = x.shape
    depthwise = name == "cpu_depthwise"
    size = 3 if depthwise or name == "cpu_winograd" else 1
    p = Problem(n, c, h, w, c, size, size, padding=(size // 2,) * 4, dtype=dtype,
                groups=c if depthwise else 1)
    weight = torch.zeros(c, 1 if depthwise else c, size, size)
    for k in range(c):
        weight[k, 0 if depthwise else k, size // 2, size // 2] = 1.0
    algorithm, t = GENERATED[name], Target.host(threads=2)
    s = algorithm.default(p, t)
    o = harness.Operands(x, weight, None, None)
    prepared = harness.prepare(algorithm, p, t, s, weight)
    return harness.run(algorithm, p, t, s, o, prepared)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["cpu_direct", "cpu_pointwise", "cpu_depthwise"])
def test_every_number_passes_as_it_is(name: str, dtype: str) -> None:
    """Of one channel a filter, so that infinities meet no zero; subnormals may become zero."""
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(
        harness.STORED[dtype])
    x = every.view(1, 1, 256, 256).float()
    if name == "cpu_depthwise":  # which adds nine products: a finite neighbour times zero is zero
        x = x.where(x.isfinite(), torch.zeros(()))
    y = _answers(name, x, dtype).float()
    tiny = x.abs() < (2.0 ** -126 if dtype == "bf16" else 0.0)
    assert torch.equal(y.isnan(), x.isnan())
    assert torch.equal(torch.where(tiny | x.isnan(), 0.0, y), torch.where(tiny | x.isnan(), 0.0, x))
