"""Images of bfloat16 that a matrix unit multiplies as they are, with emulated instructions."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from support import faults, harness, mutations
from support.cases import Jobs, jobs_of, runs
from support.faults import replaced
from support.harness import ON_MATRIX, Mismatch, sample
from support.mutations import Mutation
from torch.nn import functional as F

import tilewise
from tilewise.algorithms import ALGORITHMS
from tilewise.core import Epilogue, Problem, Target
from tilewise.core.isa import EMULATED, emulable
from tilewise.kernels.cpu.conv import geometry
from tilewise.kernels.cpu.matrix import direct
from tilewise.planner import Planner
from tilewise.planner.planner import inner_problem

ROWS = [row.name for row in EMULATED]
ONE = ON_MATRIX["cpu_direct_bf16"]
COUNT = sample(300, 4)  # problems of a row
FLOPS = 1e5  # of an image
LAYER = Problem.parse("n1c64h14w14k64r3s3p1_bf16_forward+bias+relu")
pytestmark = pytest.mark.skipif(not emulable(), reason="this machine can emulate no unit")


def run_random(row: str) -> dict[str, Any]:
    """Between unmapped pages, against float64; by default and by random schedules."""
    target, rng = Target.host(row, harness.THREADS), random.Random(f"images on {row}")
    ran, failures = 0, []
    while ran < COUNT:
        p = harness.more_filters(harness.random_problem(rng, FLOPS))
        end = replace(p.epilogue, bias=ran % 4 < 2, residual=ran % 2 == 0)
        p = inner_problem(ONE, p.with_(dtype="bf16", n=rng.randint(1, 3), epilogue=end))
        if ONE.reject(p, target):
            continue
        s = (ONE.default(p, target) if ran % 2
             else harness.random_schedule(ONE, p, target, rng))
        print(harness.describe(ONE, p, target, s))
        try:
            harness.check(ONE, p, target, s, ran)
        except Mismatch as mismatch:
            failures.append(str(mismatch))
        ran += 1
    return {"ran": ran, "failures": failures}


def run_pixels(row: str) -> dict[str, Any]:
    """Filters of one tap over whole steps of channels, which are multiplied where they lie; slices
    of channels, which are packed."""
    target, rng = Target.host(row, harness.THREADS), random.Random(f"pixels on {row}")
    kinds, failures = {True: 0, False: 0}, []
    for number in range(max(COUNT, 8)):
        c, taps = rng.choice((32, 64, 96)), rng.choice((1, 3)) if number % 2 else 1
        end = Epilogue(bias=number % 4 < 2, residual=number % 3 == 0, activation="relu")
        p = Problem(rng.randint(1, 3), c, rng.choice((1, 2, 7)), rng.randint(1, 30),
                    rng.randint(1, 80), taps, taps, padding=(taps // 2,) * 4, dtype="bf16",
                    epilogue=end, pitch=c + rng.choice((1, 8, 40)) if number % 2 else 0)
        s = (ONE.default(p, target) if number % 3
             else harness.random_schedule(ONE, p, target, rng))
        kinds[ONE._geometry(p, target, s).in_place] += 1
        print(harness.describe(ONE, p, target, s))
        try:
            harness.check(ONE, p, target, s, number)
        except Mismatch as mismatch:
            failures.append(str(mismatch))
    return {"in place": kinds[True], "packed": kinds[False], "failures": failures}


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    with jobs_of(request) as found:
        yield found


@pytest.mark.parametrize("row", ROWS)
@runs("run_random")
def test_random_problems(jobs: Jobs, row: str) -> None:
    result = jobs.result("run_random", row)
    assert result["failures"] == []
    assert result["ran"] == COUNT


@pytest.mark.parametrize("row", ROWS)
@runs("run_pixels")
def test_pixels_where_they_lie_and_slices(jobs: Jobs, row: str) -> None:
    result = jobs.result("run_pixels", row)
    assert result["failures"] == []
    assert min(result["in place"], result["packed"]) >= 4


@pytest.mark.parametrize("row", ROWS)
def test_every_number_passes_as_it_is(row: str) -> None:
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = every.view(1, 1, 256, 256).float()
    p, t = Problem(1, 1, 256, 256, 1, 1, 1, dtype="bf16"), Target.host(row, 2)
    o, s = harness.Operands(x, torch.ones(1, 1, 1, 1), None, None), ONE.default(p, t)
    y = harness.run(ONE, p, t, s, o, harness.prepare(ONE, p, t, s, o.weight)).float()
    assert torch.equal(y.isnan(), x.isnan())
    plain = ~x.isnan() & (x.abs() >= 2.0 ** -126)
    assert torch.equal(y[plain], x[plain])
    assert not y[x.abs() < 2.0 ** -126].any()


@pytest.mark.parametrize("row", ROWS)
def test_nan_and_infinity_are_where_torch_has_them(row: str,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_ISA", row)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 21, 9, 11, generator=generator).bfloat16()
    x[0, 3, 4, 5], x[0, 7, 1, 1], x[1, 2, 8, 10] = torch.inf, -torch.inf, torch.nan
    x = x.contiguous(memory_format=torch.channels_last)
    weight = torch.randn(19, 21, 3, 3, generator=generator).bfloat16()
    y = tilewise.conv2d(x, weight, padding=1, algorithm=ONE.name)
    expected = F.conv2d(x.float(), weight.float(), padding=1).bfloat16()
    assert y.dtype == torch.bfloat16
    assert torch.equal(y.isnan(), expected.isnan())
    infinite = expected.isinf()
    assert infinite.any()
    assert torch.equal(y[infinite], expected[infinite])
    finite = expected.isfinite()
    torch.testing.assert_close(y[finite], expected[finite], rtol=2.0 ** -7, atol=1e-2)


# who gets them


PIXELWISE = Problem.parse("n1c256h14w14k256r1s1_bf16_forward")
SMALL = Problem.parse("n1c16h8w8k16r3s3p1_bf16_forward")
TAILS = (Epilogue(bias=True, activation="relu"), Epilogue(activation="silu"), Epilogue(pool=2))


def test_estimates_take_them() -> None:
    for row in ("amx", "avx512_bf16"):
        t = Target("cpu", row, 2, l1=48 << 10, l2=2 << 20, l3=32 << 20)
        planner = Planner(ALGORITHMS)
        assert any(a.algorithm == ONE.name and a.plan for a in planner.candidates(LAYER, t))
        for p in (LAYER, *(SMALL.with_(epilogue=tail) for tail in (Epilogue(), *TAILS))):
            assert planner.plan(p, t).algorithm.startswith("cpu_")
        assert planner.plan(PIXELWISE, t).algorithm == ONE.name


def test_other_types_parts_and_units_are_refused() -> None:
    t = Target("cpu", "amx", 2)
    assert ONE.reject(LAYER, t) == []
    assert ONE.reject(LAYER.with_(dtype="f16"), t) == ["dtype is f16, needs f32"]
    three = ON_MATRIX["cpu_direct_bf16x3"]
    assert three.reject(LAYER, t) == ["dtype is bf16, needs f32"]
    assert "dtype is bf16, needs f32" in ONE.reject(LAYER, Target("cpu", "neon_bf16", 2))


# deliberate faults


def check(mutation: Mutation) -> None:
    with mock.patch.dict(os.environ, TILEWISE_ISA="avx512_bf16_emulated"):
        mutations.check(mutation)


PADDED = "n2c5h9w19k21r3s3p1_bf16_forward+bias+residual+relu"
PIXELS = "n1c32h1w47k21r1s1_bf16_forward+bias"  # no whole number of multiplies
SINGLE = "n1c32h1w1k21r1s1_bf16_forward+bias"  # fewer pixels than a multiply takes
SLICE = "n1c32h3w7k21r1s1_bf16_forward_of40"
FEW = "n2c3h9w19k21r3s3u1x2p1_bf16_forward"  # rows of taps are copied first
LAST = {"tile_w": 5, "block_rows": 64}


def later(a: Any, sums: Any, latest: Any = None, make: Any = direct.Operand) -> Any:
    return make(a, sums, None if latest is None else latest + 1)


MUTATIONS = {
    "the last group of pixels begins one too late": Mutation(
        replaced(direct, "Operand", later), ONE.name, PIXELS, LAST),
    "few pixels are not copied": Mutation(
        replaced(direct, "emit_copy", lambda *_: None), ONE.name, SINGLE),
    "pixels of a slice lie side by side": Mutation(replaced(
        geometry.Sizes, "x_pixel", 32), ONE.name, SLICE),
    "channels beyond the last are read": Mutation(
        mutations.whole_vectors("load"), ONE.name, PADDED),
    "results are stored beyond the last": Mutation(
        mutations.whole_vectors("store"), ONE.name, PADDED),
    "the bias is the neighbour's": Mutation(
        replaced(direct, "finish", mutations.next_bias), ONE.name, PADDED),
    "padding beside joined taps is not cleared": Mutation(
        replaced(direct, "emit_zero", lambda *_: None), ONE.name, FEW),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    return faults.outcomes("test_bf16_on_units")


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_noticed(outcomes: dict[str, list[str]], name: str) -> None:
    faults.assert_noticed(outcomes[name])
