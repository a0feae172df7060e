"""Generated kernels of gradients against float64, with every buffer next to an unmapped page."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import harness
from support.cases import ROWS, Jobs, check_counts, check_variety, jobs_of, run_cases, runs
from support.gradients import check_fused_mask, check_pack, check_prepared
from support.harness import DIRECTIONS, GENERATED, WEIGHT_GRADIENTS, Mismatch, sample
from torch.nn import functional as F

from tilewise.algorithms.reference import solve
from tilewise.core import ISA, Epilogue, Problem, Schedule, Target
from tilewise.planner.planner import inner_problem

GRADIENTS = ("backward_data", "backward_weight")
CHUNKS = 1  # under pytest-xdist jobs take turns, and each imports torch
SHAPES = 128  # that are drawn for each direction, on each row of ISA
COUNT = sample(SHAPES, 32)  # of these are run
BATCHES = 10  # sizes that share a shape, and so a kernel; some shapes are also run empty
LEAST = sample(1000, 310)  # distinct problems of a direction on each row, empty ones not counted
# problems each algorithm runs on each row
FLOOR = {"backward_data": sample(60, 45), "backward_weight": sample(90, 45)}
EMPTY = sample(15, 5)
MASKS = sample(60, 18)  # problems on each row, for each way to make a mask
FUSED = MASKS // 2  # shapes of those whose mask a kernel makes; each runs with two batch sizes
TAILS = (("relu", 1), ("relu", 2), (None, 2))  # activation, pool
LARGEST = 5  # filter of those: masks know nothing of it, and large ones take seconds to compile
WAYS = ("contiguous", "channels_last", "turned", "taps_first")  # strides, which share a kernel
PREPARED = sample(24, 18)  # shapes of weights on each row; each is prepared from all these strides
FILTERS = ((3, 3), (5, 5), (2, 3), (1, 4), (7, 1), (3, 3))
REPEATED = ("n2c20h19w17k24r3s3p1_f32_backward_weight",
            "n3c24h30w30k40r1s1_f32_backward_weight",
            "n2c12h17w15k18r3s3u2p1g3_f32_backward_weight",
            "n3c21h20w21k21r3s3p1g21_f32_backward_weight")


# in processes of their own: a kernel may crash


def run_random_cases(row: str, direction: str, chunk: int) -> dict[str, Any]:
    """One chunk of the cases of a row: what ran, and what was wrong."""
    return run_cases(row, direction, SHAPES, BATCHES, chunk, CHUNKS, COUNT)


def run_repeatedly(row: str) -> dict[str, Any]:
    """Whether a schedule gives the same bits in every run, on one thread and on two."""
    target, failures = Target.host(row, harness.THREADS), []
    ran = dict.fromkeys(WEIGHT_GRADIENTS, 0)
    for p in map(Problem.parse, REPEATED):
        o = harness.operands(p, "floats", seed=1)
        for name, a in WEIGHT_GRADIENTS.items():
            if a.reject(p, target):
                continue
            prepared = harness.prepare(a, p, target, Schedule(), o.weight)
            for s in _default_and_others(a, p, target):
                what = harness.describe(a, p, target, s)
                print(what)
                first, *others = [harness.run(a, p, target.with_(threads=threads), s, o, prepared)
                                  for threads in (1, 1, 2, 2, 2)]
                failures += [what for y in others if not torch.equal(first, y)]
                ran[name] += 1
    return {"ran": ran, "failures": failures}


def _default_and_others(algorithm: Any, p: Problem, target: Target) -> list[Schedule]:
    rng = random.Random(f"{algorithm.name} of {p}")
    return [algorithm.default(p, target),
            *(harness.random_schedule(algorithm, p, target, rng) for _ in range(2))]


def _mask_problem(rng: random.Random, able: Any = None) -> Problem:
    """A small problem that asks for a mask; sizes are odd as often as even."""
    while True:
        p = harness.random_problem(rng)
        activation, pool = rng.choice(TAILS)
        if p.conv_h < pool or p.conv_w < pool:
            continue
        p = p.with_(n=rng.randint(0, 3), epilogue=replace(p.epilogue, activation=activation,
                                                          pool=pool, mask=True))
        if able is None or able(p):
            return p


def run_masks(row: str) -> dict[str, Any]:
    """Masks of separate passes."""
    target, rng, failures = Target.host(row, harness.THREADS), random.Random(f"masks {row}"), []
    for seed in range(MASKS):
        p = _mask_problem(rng)
        print(what := f"pack {p}")
        try:
            check_pack(p, target, seed)
        except Mismatch as mismatch:
            failures.append(f"{what}: {mismatch}")
    return {"ran": MASKS, "failures": failures}


def run_fused_masks(row: str) -> dict[str, Any]:
    """Masks of a kernel: each shape without images or with some, and with other ones."""
    target, rng, failures = Target.host(row, harness.THREADS), random.Random(f"fused {row}"), []
    winograd, ran = GENERATED["cpu_winograd"], []

    def able(p: Problem) -> bool:
        return (max(p.r, p.s) <= LARGEST and _has_its_turn(p, seed, target.lanes)
                and not winograd.reject(inner_problem(winograd, p), target))

    for seed in range(FUSED):
        p = _mask_problem(rng, able)
        s = (winograd.default(p, target) if seed % 2 else
             harness.random_schedule(winograd, p, target, rng))
        for q in (p.with_(n=n) for n in rng.sample(range(4), 2)):
            print(what := harness.describe(winograd, q, target, s))
            try:
                check_fused_mask(q, target, s, seed)
                ran.append(str(q))
            except Mismatch as mismatch:
                failures.append(f"{what}: {mismatch}")
    return {"ran": ran, "failures": failures}


def _has_its_turn(p: Problem, turn: int, lanes: int) -> bool:
    """Tails, odd and even sizes and whole vectors take turns, so that few problems show all."""
    return ((p.epilogue.activation, p.epilogue.pool) == TAILS[turn % 3]
            and (p.conv_h % 2, p.conv_w % 2) == divmod(turn % 4, 2)
            and (turn % 5 != 1 or p.k % lanes == 0))


def run_prepared(row: str) -> dict[str, Any]:
    target, rng, failures = Target.host(row, harness.THREADS), random.Random(f"U {row}"), []
    for seed in range(PREPARED):
        r, taps = FILTERS[seed % len(FILTERS)]
        p = Problem(1, rng.randint(1, 40), r, taps, rng.randint(1, 70), r, taps)
        s = Schedule(tile_h=1 if r == 1 else rng.randint(1, 4),
                     tile_w=1 if taps == 1 else rng.randint(2, 4),
                     order=("channels", "positions", "shared")[seed // len(FILTERS) % 3],
                     vectors=rng.randint(1, min(4, -(-p.k // target.lanes))))
        for number, how in enumerate(WAYS):
            print(what := f"{p} {s.to_json()} {how}")
            try:
                check_prepared(p, target, s, how, len(WAYS) * seed + number)
            except Mismatch as mismatch:
                failures.append(f"{what}: {mismatch}")
    return {"ran": PREPARED * len(WAYS), "failures": failures}


# the tests


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    with jobs_of(request) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("direction", GRADIENTS)
@pytest.mark.parametrize("row", ROWS)
@runs("run_random_cases")
def test_random_gradients(jobs: Jobs, row: str, direction: str, chunk: int) -> None:
    assert jobs.result("run_random_cases", row, direction, chunk)["failures"] == []


@pytest.mark.slow
@pytest.mark.parametrize("direction", GRADIENTS)
@pytest.mark.parametrize("row", ROWS)
def test_random_gradients_are_many_and_reach_every_algorithm(jobs: Jobs, row: str,
                                                             direction: str) -> None:
    results = [jobs.result("run_random_cases", row, direction, chunk) for chunk in range(CHUNKS)]
    check_counts(results, LEAST, FLOOR[direction], EMPTY)
    check_variety(results, Target.host(row).lanes)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
@runs("run_repeatedly")
def test_runs_are_equal_on_any_number_of_threads(jobs: Jobs, row: str) -> None:
    result = jobs.result("run_repeatedly", row)
    assert result["failures"] == []
    assert min(result["ran"].values()) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
@runs("run_masks")
def test_masks_are_those_of_autograd(jobs: Jobs, row: str) -> None:
    assert jobs.result("run_masks", row) == {"ran": MASKS, "failures": []}


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
@runs("run_fused_masks")
def test_masks_of_a_kernel_are_those_of_autograd(jobs: Jobs, row: str) -> None:
    result = jobs.result("run_fused_masks", row)
    assert result["failures"] == []
    assert len(set(result["ran"])) >= MASKS
    problems = [Problem.parse(text) for text in result["ran"]]
    assert {p.n for p in problems} == {0, 1, 2, 3}
    assert {(p.epilogue.activation, p.epilogue.pool) for p in problems} == set(TAILS)
    assert {(p.conv_h % 2, p.conv_w % 2) for p in problems if p.epilogue.pool == 2} == {
        (0, 0), (0, 1), (1, 0), (1, 1)}
    lanes = Target.host(row).lanes
    for tail in (True, False):
        assert any(bool(p.k % lanes) is tail and p.k >= lanes for p in problems)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
@runs("run_prepared")
def test_prepared_weights_are_those_of_float64(jobs: Jobs, row: str) -> None:
    assert jobs.result("run_prepared", row) == {"ran": PREPARED * len(WAYS), "failures": []}


@pytest.mark.parametrize("direction", GRADIENTS)
@pytest.mark.parametrize("row", ISA)
def test_defaults_are_in_their_space(row: str, direction: str) -> None:
    rng, target = random.Random(f"{direction} of {row}"), Target("cpu", row, 2)
    seen = dict.fromkeys(DIRECTIONS[direction], 0)
    for flops in [1e6, 1e9] * sample(150, 70):
        p = harness.random_problem(rng, flops).with_(direction=direction, epilogue=Epilogue())
        for name, algorithm in DIRECTIONS[direction].items():
            q = inner_problem(algorithm, p)
            if not algorithm.reject(q, target):
                seen[name] += 1
                s = algorithm.default(q, target)
                assert s in algorithm.space(q, target), harness.describe(algorithm, q, target, s)
    assert min(seen.values()) >= sample(10, 4), seen


# the harness itself


@pytest.mark.parametrize("direction", GRADIENTS)
def test_exact_gradients_are_those_of_autograd(direction: str) -> None:
    rng = random.Random("exact gradients")
    for seed in range(60):
        p = harness.random_problem(rng, flops=2e5).with_(direction=direction, epilogue=Epilogue())
        if not p.n:
            continue
        o = harness.operands(p, "floats", seed)
        x = (o.x if direction == "backward_weight" else torch.zeros(p.n, p.c, p.h, p.w)).double()
        w = (o.weight if direction == "backward_data"
             else torch.zeros(p.k, p.group_c, p.r, p.s)).double()
        grad = (o.weight if direction == "backward_weight" else o.x).double()
        top, bottom, left, right = p.padding
        y = F.conv2d(F.pad(x.requires_grad_(), (left, right, top, bottom)), w.requires_grad_(),
                     None, p.stride, 0, p.dilation, p.groups)
        expected, = torch.autograd.grad(y, x if direction == "backward_data" else w, grad)
        for found in (harness.exact(p, o), solve(p, o.x, o.weight)):
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
