"""Generated kernels against float64, with every buffer next to an unmapped page."""

from __future__ import annotations

import ctypes
import math
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import harness
from support.cases import ROWS, Jobs, check_counts, check_variety, jobs_of, run_cases, runs
from support.harness import GENERATED, LONG, ON_MATRIX, Crash, Mismatch, in_process, sample
from torch.nn import functional as F

import tilewise
from tilewise.algorithms.reference import convolve
from tilewise.bench.guarded import ARENA
from tilewise.core import ISA, Algorithm, Problem, Schedule, Target
from tilewise.planner.planner import inner_problem

CHUNKS = 1  # under pytest-xdist jobs take turns, and each imports torch
SHAPES = 400  # that are drawn for each row of ISA
COUNT = sample(SHAPES, 44)  # of these are run
BATCHES = 8  # sizes that share a shape, and so a kernel; some shapes are also run empty
LEAST = sample(3000, 345)  # distinct problems on each row, empty ones not counted
FLOOR = sample(150, 40)  # problems each algorithm runs on each row
EMPTY = sample(50, 5)
EVERY = 64  # spaces of so many combinations are run in full, with TILEWISE_LONG
SOME = sample(40, 10)  # schedules of larger ones

MUST_ACCEPT = {
    "cpu_direct": ("n1c3h224w224k64r7s7u2p3_f32_forward+bias+relu",
                   "n8c64h56w56k64r3s3p1_f32_forward+bias+residual+relu",
                   "n0c1h1w1k1r1s1_f32_forward",
                   "n1c64h28w28k64r3s3p2d2g4_f32_forward",
                   "n2c30h9w17k20r11s2u4x3p0-5x2-1d1x3g10_f32_forward"),
    "cpu_pixels": ("n1c3h224w224k64r7s7u2x1p3_f32_forward+bias+relu",
                   "n1c1h512w512k1r5s5p2_f32_nchw_forward",
                   "n2c6h9w17k9r4s2p0-5x2-1d1x3g3_f32_nchw_forward+residual"),
    "cpu_pointwise": ("n1c512h28w28k128r1s1_f32_forward+bias+relu",
                      "n1c256h56w56k512r1s1u2_f32_forward",
                      "n3c5h7w1k9r1s1_f32_forward+bias+residual"),
    "cpu_winograd": ("n8c64h224w224k64r3s3p1_f32_forward+bias+relu+pool2",
                     "n1c512h14w14k512r3s3p1_f32_forward+bias+residual+relu",
                     "n1c1h4w9k1r2s5_f32_forward",
                     "n1c2048h40w40k256r3s3p12d12_f32_forward+bias+relu",
                     "n2c5h3w9k7r3s5p8d4x2_f32_forward+bias+residual+silu"),
    "cpu_depthwise": ("n1c32h112w112k32r3s3p1g32_f32_forward+bias+relu",
                      "n1c96h56w56k96r5s5u2p2g96_f32_forward",
                      "n2c1h9w17k1r11s11p20d3_f32_forward+bias+residual"),
}
SMALL = ("n2c8h9w15k70r3s3p1_f32_forward+bias+residual+relu",
         "n2c8h9w15k70r3s3p1_f32_forward+bias+relu+pool2",
         "n2c8h9w15k70r1s1_f32_forward+bias+residual+relu",
         "n2c21h9w15k21r3s3p1g21_f32_forward+bias+residual+relu")
LARGER = ("n2c64h28w28k70r3s3p1_f32_forward+bias+relu",
          "n3c32h7w7k33r5s5p2_f32_forward+bias+residual",
          "n2c200h30w30k100r1s1_f32_forward",
          "n2c64h57w57k64r3s3p1g16_f32_forward",
          "n2c60h57w57k60r3s3p1g60_f32_forward+relu")
REPEATED = {"cpu_direct": 9}  # two schedules, where four divides the channels of a group


# in processes of their own: a kernel may crash


def run_random_cases(row: str, chunk: int) -> dict[str, Any]:
    """One chunk of the cases of a row: what ran, and what was wrong."""
    return run_cases(row, "forward", SHAPES, BATCHES, chunk, CHUNKS, COUNT)


def run_spaces(row: str) -> dict[str, Any]:
    """What every algorithm did with the schedules of a small problem."""
    return {name: _run_space(name, Target.host(row, harness.THREADS)) for name in GENERATED}


def _run_space(name: str, target: Target) -> dict[str, Any]:
    """Every schedule, or some where there are many."""
    algorithm, failures, rng = GENERATED[name], [], random.Random(f"{name} on {target}")
    points = _points(algorithm, target, rng)
    for number, (p, s) in enumerate(points):
        print(harness.describe(algorithm, p, target, s))
        try:
            harness.check(algorithm, p, target, s, number)
        except Mismatch as mismatch:
            failures.append(str(mismatch))
    return {"ran": len(set(points)), "failures": failures}


def _points(algorithm: Algorithm, target: Target,
            rng: random.Random) -> list[tuple[Problem, Schedule]]:
    """Schedules of small problems, in all layouts, with and without a pool where that is fused."""
    asked = [p.with_(layout=layout) for p in map(Problem.parse, SMALL)
             for layout in sorted(algorithm.layouts)]
    inner = dict.fromkeys(inner_problem(algorithm, p) for p in asked)
    problems = [p for p in inner if not algorithm.reject(p, target)]
    space = algorithm.space(problems[0], target)
    if math.prod(len(values) for values in space.tunables.values()) <= EVERY:
        every = [(problems[0], s) for s in space]
        return every if LONG else rng.sample(every, min(SOME, len(every)))
    turns = (problems[number % len(problems)] for number in range(SOME))
    return [(p, harness.random_schedule(algorithm, p, target, rng)) for p in turns]


def run_repeatedly(row: str) -> dict[str, Any]:
    """Whether a plan gives the same bits in every run, on one thread and on two."""
    return {name: _run_repeatedly(name, Target.host(row, harness.THREADS)) for name in GENERATED}


def _run_repeatedly(name: str, target: Target) -> dict[str, Any]:
    algorithm, failures, ran = GENERATED[name], [], 0
    for p in (p for p in map(Problem.parse, LARGER) if not algorithm.reject(p, target)):
        o = harness.operands(p, "floats", seed=1)
        for s in _default_and_split(algorithm, p, target):
            prepared, what = algorithm.prepare(p, target, s, o.weight), harness.describe(
                algorithm, p, target, s)
            print(what)
            first, *others = [
                harness.run(algorithm, p, target.with_(threads=threads), s, o, prepared)
                for threads in (1, 1, 2, 2, 2)]
            failures += [what for y in others if not torch.equal(first, y)]
            ran += 1
    return {"ran": ran, "failures": failures}


def _default_and_split(algorithm: Any, p: Problem, target: Target) -> list[Any]:
    """The default, and where sums can be split over tasks, a split one."""
    s = algorithm.default(p, target)
    split = s.with_(split=4)
    return [s, split] if split in algorithm.space(p, target) and split != s else [s]


def read_beside(side: str, offset: int) -> float:
    """Read a float next to a guarded buffer of five."""
    with ARENA.buffers([5], side) as (buffer,):
        buffer.values.fill_(1.0)
        print(f"reading at {side}{offset:+d}")
        return ctypes.c_float.from_address(buffer.address + 4 * offset).value


# jobs run side by side while pytest waits for the first


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    with jobs_of(request) as found:
        yield found


# the tests


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("row", ROWS)
@runs("run_random_cases")
def test_random_problems(jobs: Jobs, row: str, chunk: int) -> None:
    result = jobs.result("run_random_cases", row, chunk)
    assert result["failures"] == []


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_random_problems_are_many_and_reach_every_algorithm(jobs: Jobs, row: str) -> None:
    results = [jobs.result("run_random_cases", row, chunk) for chunk in range(CHUNKS)]
    check_counts(results, LEAST, FLOOR, EMPTY)
    check_variety(results, Target.host(row).lanes)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
@runs("run_spaces")
def test_schedules_of_a_space(jobs: Jobs, row: str) -> None:
    for name, result in jobs.result("run_spaces", row).items():
        assert result["failures"] == []
        assert result["ran"] >= sample(20, 8), name


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
@runs("run_repeatedly")
def test_runs_are_equal_on_any_number_of_threads(jobs: Jobs, row: str) -> None:
    for name, result in jobs.result("run_repeatedly", row).items():
        assert result["failures"] == []
        assert result["ran"] >= REPEATED.get(name, 1), name


@pytest.mark.parametrize("name, problem", [(name, problem) for name, problems
                                           in MUST_ACCEPT.items() for problem in problems])
@pytest.mark.parametrize("row", ISA)
def test_problems_that_must_be_accepted(row: str, name: str, problem: str) -> None:
    assert GENERATED[name].reject(Problem.parse(problem), Target("cpu", row, 2)) == []


@pytest.mark.parametrize("row", ISA)
def test_defaults_are_in_their_space(row: str) -> None:
    rng, target, seen = random.Random(f"defaults of {row}"), Target("cpu", row, 2), Counter()
    able = GENERATED | {name: algorithm for name, algorithm in ON_MATRIX.items()
                        if algorithm.is_for(target) and "forward" in algorithm.directions}
    for flops in [1e6, 1e9] * sample(200, 70):
        p = harness.random_problem(rng, flops)
        for name, algorithm in able.items():
            q = inner_problem(algorithm, p)
            if not algorithm.reject(q, target):
                seen[name] += 1
                s = algorithm.default(q, target)
                assert s in algorithm.space(q, target), harness.describe(algorithm, q, target, s)
    assert min(seen[name] for name in able) >= sample(20, 7), seen


# the harness itself


def test_exact_answers_are_those_of_the_definition() -> None:
    rng = random.Random("exact answers")
    for seed in range(60):
        p = harness.random_problem(rng, flops=2e5)
        for kind in ("integers", "floats"):
            o = harness.operands(p, kind, seed)
            defined = convolve(p, o.x, o.weight, o.bias, o.residual)
            torch.testing.assert_close(harness.exact(p, o), defined, rtol=1e-12,
                                       atol=0 if kind == "integers" else 1e-11)


@pytest.mark.parametrize("side, offset", [("end", 5), ("start", -1)])
def test_buffers_touch_an_unmapped_page(side: str, offset: int) -> None:
    assert in_process("test_kernels:read_beside", side, offset + (1 if offset < 0 else -1)) == 1.0
    with pytest.raises(Crash, match=f"ended with -11 at reading at {side}"):
        in_process("test_kernels:read_beside", side, offset)


def test_a_process_that_does_not_end_is_noticed() -> None:
    with pytest.raises(Crash, match="not done after"):
        in_process("time:sleep", 60, limit=0.2)


def test_processes_have_the_environment_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("first", "second"):
        monkeypatch.setenv("TILEWISE_OF_A_TEST", value)
        assert in_process("os:getenv", "TILEWISE_OF_A_TEST") == value


def test_writes_within_the_page_are_noticed() -> None:
    for side in ("start", "end"):
        with ARENA.buffers([5], side) as (buffer,):
            buffer.values.fill_(1.0)
            assert buffer.around_untouched()
            beside = buffer.last if side == "start" else buffer.first - 1
            buffer.region.floats[beside] = 1.0
            assert not buffer.around_untouched()


# properties, through the function that users call


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def direct(x: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
    return tilewise.conv2d(x, weight, algorithm="cpu_direct", **options)


def test_an_impulse_returns_the_filter() -> None:
    weight = integers(5, 3, 3, 5)
    for channel in range(3):
        x = torch.zeros(1, 3, 7, 11)
        x[0, channel, 3, 5] = 1.0
        y = direct(x, weight, padding=(1, 2))
        assert torch.equal(y[0, :, 2:5, 3:8], weight[:, channel].flip(1, 2))
        assert y.count_nonzero() == weight[:, channel].count_nonzero()


def test_a_shifted_input_shifts_the_output() -> None:
    x, weight = integers(2, 4, 13, 15), integers(9, 4, 3, 3)
    y = direct(x, weight)
    moved = direct(x.roll((2, 3), (2, 3)), weight)
    assert torch.equal(moved[..., 2:, 3:], y[..., :-2, :-3])


def test_convolution_is_linear() -> None:
    x, other, weight = integers(2, 6, 9, 10), integers(2, 6, 9, 10, seed=1), integers(7, 6, 3, 3)
    y = direct(2 * x - 3 * other, weight, padding=1)
    assert torch.equal(y, 2 * direct(x, weight, padding=1) - 3 * direct(other, weight, padding=1))


def test_channels_can_be_permuted() -> None:
    x, weight, bias = integers(2, 19, 8, 9), integers(37, 19, 3, 3), integers(37)
    y = direct(x, weight, bias=bias, padding=1)
    ins, outs = (torch.randperm(n, generator=torch.Generator().manual_seed(n)) for n in (19, 37))
    assert torch.equal(direct(x[:, ins], weight[:, ins], bias=bias, padding=1), y)
    assert torch.equal(direct(x, weight[outs], bias=bias[outs], padding=1), y[:, outs])


@pytest.mark.parametrize("stride, padding, dilation, groups",
                         [(1, 1, 1, 1), (2, 0, 1, 3), ((1, 3), (2, 1), (2, 1), 1)])
def test_the_transposed_convolution_is_the_adjoint(stride: Any, padding: Any, dilation: Any,
                                                   groups: int) -> None:
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    x, weight = integers(2, 6, 13, 13), integers(9, 6 // groups, 3, 3)
    y = direct(x, weight, **options)
    z = integers(*y.shape, seed=1)
    # rows and columns that no filter reaches have no share
    back = F.conv_transpose2d(z.double(), weight.double(), **options)
    reached = x.double()[..., :back.shape[2], :back.shape[3]]
    assert (z.double() * y.double()).sum() == (back * reached).sum()


def test_operands_need_not_be_contiguous() -> None:
    x, weight = integers(2, 7, 8, 18)[..., ::2], integers(7, 9, 3, 3).transpose(0, 1)
    bias, residual = integers(18)[::2], integers(2, 9, 9, 8).mT
    y = direct(x, weight, bias=bias, padding=1, residual=residual)
    assert torch.equal(y, F.conv2d(x, weight, bias, padding=1) + residual)


@pytest.mark.parametrize("name", [name for name, a in GENERATED.items() if a.exact_on_integers])
def test_nan_reaches_what_it_reaches_in_torch(name: str) -> None:
    groups, size = (19, 3) if name == "cpu_depthwise" else (1, 1 if name == "cpu_pointwise" else 3)
    x, weight = torch.randn(2, 19, 9, 21), torch.randn(19, 19 // groups, size, size)
    x[0, 3, 4, 5], x[1, 18, 0, 20] = float("nan"), float("inf")
    options = {"padding": size // 2, "groups": groups}
    y = tilewise.conv2d(x, weight, algorithm=name, activation="relu", **options)
    expected = F.conv2d(x, weight, **options).relu()
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.isinf(), expected.isinf())


def test_the_caller_keeps_its_denormals() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the kernel then runs on this very thread
    try:
        tiny = direct(torch.full((1, 1, 4, 4), 1e-30), torch.full((1, 1, 1, 1), 1e-10))
    finally:
        torch.set_num_threads(before)
    assert (tiny == 0).all()  # kernels count them as zero
    assert (torch.full((4,), 1e-30) * 1e-10 != 0).all()
