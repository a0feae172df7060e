"""What `core/algorithm.py` asks of an algorithm, for every entry of ALGORITHMS.

Nothing here names an algorithm's own tunables or kernels: a new entry of the list is tested as
it stands.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import pytest
import torch

from tilewise.algorithms import ALGORITHMS
from tilewise.algorithms.reference import solve
from tilewise.bench.alike import accepted
from tilewise.bench.selftest import able_on
from tilewise.core import Algorithm, Epilogue, NoAlgorithm, Plan, Problem, Target
from tilewise.core.problem import DIRECTIONS
from tilewise.kernels.activations import apart, joined
from tilewise.kernels.cpu import memory
from tilewise.planner import Planner
from tilewise.planner.planner import inner_problem
from tilewise.runtime.executable import LAYOUTS, Executable

TARGET = Target.host(threads=2)
DTYPES = {"f32": torch.float32, "f64": torch.float64}
# by bits; above it, nobody would call the result a convolution
DRAWN = 100  # problems of each algorithm
LARGEST_ERROR = {8: 3e-2, 16: 1e-3, 24: 1e-3}
PROBLEMS = tuple(map(Problem.parse, (
    # dense filters
    "n2c8h9w11k16r3s3p1_f32_forward",
    "n2c8h9w11k16r3s3p1_f32_nchw_forward+bias+relu",
    "n1c33h12w13k70r3s3p1_f32_forward+bias+residual+relu",
    "n1c5h20w18k7r5s5p2_f32_nchw_forward+residual",
    "n2c1h19w23k4r7s7_f32_nchw_forward+bias",
    "n1c3h15w17k64r3s3p1_f32_forward+bias+relu+pool2",
    "n1c6h9w9k10r3s3_f32_nchw_forward+pool3",
    "n1c16h8w8k16r3s3p1_f32_forward+bias+gelu",
    "n1c16h8w8k19r3s3p1_f32_forward+bias+residual+prelu+pool2",
    "n2c8h9w9k12r3s3p1g4_f32_nchw_forward+prelu",
    "n1c16h8w8k16r3s3p1_f32_forward+bias+relu6+pool2",
    # every parameter differs between the two axes
    "n2c6h11w14k9r3s2u2x1p2x0d1x3_f32_forward+bias",
    "n1c4h7w6k5r2s3p0-1x2-0_f32_forward",
    "n1c4h7w6k5r2s3p1-0x0-2_f32_nchw_forward+bias+residual+relu",
    "n1c7h13w17k12r3s3u2p1_f32_forward+relu",
    "n1c7h13w17k12r3s3p2d2_f32_nchw_forward",
    # a linear layer with a large weight
    "n1c1031h1w1k1021r1s1_f32_forward+bias+relu",
    # 1x1 filters
    "n2c24h7w9k40r1s1_f32_forward+bias+relu",
    "n1c24h8w9k40r1s1u2_f32_nchw_forward",
    "n1c12h5w5k20r1s1p1_f32_forward+bias",
    "n1c24h8w9k40r1s1_f32_forward+bias+residual+relu6",
    # groups and depthwise
    "n2c12h8w9k18r3s3p1g3_f32_forward+bias+relu",
    "n1c21h10w11k21r3s3p1g21_f32_forward+bias+residual",
    "n1c18h12w9k18r5s3u2p2x1g18_f32_nchw_forward",
    "n1c21h10w11k21r3s3u2p0-1x0-1g21_f32_forward+bias+relu6",
    # sizes at the edge
    "n0c8h6w6k8r3s3p1_f32_forward+bias",
    "n3c1h1w1k1r1s1_f32_forward",
    "n1c3h1w40k8r1s5_f32_nchw_forward",
    "n1c5h2w2k6r3s3p3_f32_forward+bias",
    # gradients of the input
    "n2c8h9w11k16r3s3p1_f32_backward_data",
    "n2c8h9w11k16r3s3p1_f32_nchw_backward_data",
    "n1c6h11w14k9r3s2u2x1p2x0d1x3_f32_backward_data",
    "n1c12h8w9k18r3s3p0-1x2-1g3_f32_backward_data",
    "n1c21h10w11k21r3s3p1g21_f32_backward_data",
    "n1c12h5w5k20r1s1p1_f32_backward_data",
    "n2c24h7w9k40r1s1_f32_nchw_backward_data",
    "n0c8h6w6k8r3s3p1_f32_backward_data",
    # gradients of the weight
    "n2c8h9w11k16r3s3p1_f32_backward_weight",
    "n2c33h9w11k20r3s3p1_f32_nchw_backward_weight",
    "n1c6h11w14k9r3s2u2x1p2x0d1x3_f32_backward_weight",
    "n1c12h8w9k18r3s3p0-1x2-1g3_f32_backward_weight",
    "n2c21h10w11k21r3s3p1g21_f32_backward_weight",
    "n2c24h7w9k40r1s1_f32_backward_weight",
    "n2c12h7w6k20r1s1u2x3p1x0_f32_backward_weight",
    "n0c8h6w6k8r3s3p1_f32_backward_weight",
    # what few can run
    "n1c8h8w8k8r3s3p1_f64_forward+bias",
    "n1c8h8w8k8r3s3p1_f64_backward_data",
    "n1c8h8w8k8r3s3p1_f64_backward_weight",
)))


def reasons(algorithm: Algorithm, p: Problem, t: Target = TARGET) -> list[str]:
    """The algorithm's answer to the problem it would be handed."""
    return algorithm.reject(inner_problem(algorithm, p), t)


def plan_of(algorithm: Algorithm, p: Problem, t: Target = TARGET) -> Plan:
    return Planner([algorithm]).plan(p, t, algorithm=algorithm.name)


def name(value: object) -> str:
    return value.name if isinstance(value, Algorithm) else str(value)


ACCEPTED = [(a, p) for a in ALGORITHMS for p in PROBLEMS if not reasons(a, p)]
REFUSED = [(a, p) for a in ALGORITHMS for p in PROBLEMS if reasons(a, p)]
each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=name)
each_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=name)
each_accepted = pytest.mark.parametrize("algorithm, problem", ACCEPTED, ids=name)
each_refused = pytest.mark.parametrize("algorithm, problem", REFUSED, ids=name)
each_kind = pytest.mark.parametrize("kind", ["integers", "floats"])


# data


@dataclass(frozen=True)
class Operands:
    """What a problem is computed from; what its epilogue lacks is None.

    For the gradient of the input, x is that of the output; for the gradient of the weight, the
    weight is.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None

    @property
    def all(self) -> tuple[torch.Tensor | None, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    def changed(self, change: Any) -> Operands:
        return Operands(*(None if value is None else change(value) for value in self.all))


@cache
def operands(p: Problem, kind: str) -> Operands:
    """Integers, small enough for exact float32 sums, or normal floats, in the problem's layout."""
    rng = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        if kind == "integers":
            return torch.randint(-4, 5, shape, generator=rng).to(DTYPES[p.dtype])
        return torch.randn(shape, generator=rng, dtype=torch.float64).to(DTYPES[p.dtype])

    def images(*shape: int) -> torch.Tensor:
        return draw(*shape).contiguous(memory_format=LAYOUTS[p.layout])

    x, weight = images(p.n, p.c, p.h, p.w), draw(p.k, p.group_c, p.r, p.s)
    if p.direction != "forward":
        grad = images(p.n, p.k, p.conv_h, p.conv_w)
        return Operands(*((grad, weight) if p.direction == "backward_data" else (x, grad)),
                        None, None)
    return Operands(
        x, weight,
        joined(draw(p.k) if p.epilogue.bias else None,
               draw(p.k) if p.epilogue.has_slopes else None, p.k),
        images(p.n, p.k, p.conv_h, p.conv_w) if p.epilogue.residual else None)


@cache
def expected(p: Problem, kind: str) -> torch.Tensor:
    return solve(p, *operands(p, kind).all)


@cache
def scale(p: Problem, kind: str) -> float:
    """Rms size of the result, or of sums of so many terms where their values cancel."""
    sums = p.with_(epilogue=Epilogue(p.epilogue.bias, p.epilogue.residual))
    squared = operands(p, kind).changed(lambda value: value.double() ** 2)
    squared = replace(squared, bias=apart(p, squared.bias)[0])
    squares = solve(sums, *squared.all)
    return max(rms(expected(p, kind)), rms(squares.sqrt()))


def rms(values: torch.Tensor) -> float:
    return math.sqrt(values.square().mean()) if values.numel() else 0.0


@pytest.fixture
def nan_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and scratch hold NaN until somebody writes to them."""
    empty = memory.empty
    monkeypatch.setattr(memory, "empty", lambda *shape, **k: empty(*shape, **k).fill_(math.nan))


# names


def test_names_are_unique():
    names = [algorithm.name for algorithm in ALGORITHMS]
    assert len(set(names)) == len(names)


@each_algorithm
def test_name_and_version_can_be_stored(algorithm):
    assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", algorithm.name)
    assert type(algorithm.version) is int
    assert algorithm.version >= 1


@each_algorithm
def test_declarations_use_known_words(algorithm):
    assert algorithm.takes in ("addresses", "tensors")
    assert set() < set(algorithm.layouts) <= set(LAYOUTS)
    assert set() < set(algorithm.directions) <= set(DIRECTIONS)
    if "forward" in algorithm.directions:
        assert "bias" in algorithm.fuses, "there is no separate pass that adds a bias"


# refusals


@each_refused
def test_a_refusal_says_what_is_needed(algorithm, problem):
    why = reasons(algorithm, problem)
    assert isinstance(why, list)
    assert all(isinstance(reason, str) and "needs" in reason for reason in why)
    with pytest.raises(NoAlgorithm) as error:
        plan_of(algorithm, problem)
    assert f"{algorithm.name}: {'; '.join(why)}" in str(error.value)


@each_algorithm
def test_acceptance_is_an_empty_list(algorithm):
    machine = TARGET if algorithm.device != "cuda" else Target.gpu("sm_90")
    if algorithm.device == "cpu" and "bf16" in algorithm.name:
        machine = Target("cpu", "amx", 2)  # which need not be this one
    accepted = [p for p in PROBLEMS if not reasons(algorithm, p, machine) and p.n]
    assert len(accepted) >= 1
    assert [reasons(algorithm, p, machine) for p in accepted] == [[]] * len(accepted)


@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if a.takes == "addresses"], ids=name)
def test_kernels_for_cpus_refuse_other_devices(algorithm):
    elsewhere = TARGET.with_(device="cuda")
    assert "device is cuda, needs cpu" in reasons(algorithm, PROBLEMS[0], elsewhere)


def test_the_baseline_accepts_every_problem():
    baselines = [algorithm for algorithm in ALGORITHMS if algorithm.baseline]
    assert len(baselines) == 1
    assert [p for p in PROBLEMS if reasons(baselines[0], p)] == []


def test_a_refusal_reads_as_documented():
    found = {algorithm.name: algorithm for algorithm in ALGORITHMS}
    planner = Planner([found["cpu_winograd"], found["cpu_direct"]])
    with pytest.raises(NoAlgorithm) as error:
        planner.plan(Problem.parse("n1c8h8w8k8r3s3p1_f64_forward"), Target("cpu", "avx512", 2))
    assert str(error.value) == (
        "no algorithm can run n1c8h8w8k8r3s3p1_f64_forward on cpu:avx512:t2:\n"
        "  cpu_winograd: dtype is f64, needs f32\n"
        "  cpu_direct:   dtype is f64, needs f32")


# estimates: nothing is run


@each_accepted
def test_estimates_are_numbers(algorithm, problem):
    p, plan = inner_problem(algorithm, problem), plan_of(algorithm, problem)
    space, schedule = algorithm.space(p, TARGET), plan.schedule
    assert not space.tunables or schedule in space
    assert 0 < algorithm.error(p, TARGET, schedule) < LARGEST_ERROR[algorithm.bits]
    cost, workspace = (f(p, TARGET, schedule) for f in (algorithm.cost, algorithm.workspace))
    assert math.isfinite(cost)
    assert cost > 0
    assert isinstance(workspace, int)
    assert workspace >= 0


@pytest.mark.parametrize("row", ["amx", "avx512", "avx2", "generic", "neon"])
def test_defaults_of_random_problems_are_in_their_space(row):
    t, rng = Target("cpu", row, 2), random.Random(row)  # no code is written, so any row will do
    able = able_on(t)
    for algorithm in able:
        drawn = [accepted(algorithm, t, rng) for _ in range(DRAWN)]
        inner = [inner_problem(algorithm, p) for p in drawn if p]
        outside = [(p, s) for p in inner
                   if (s := algorithm.default(p, t)) not in algorithm.space(p, t)]
        assert not outside, algorithm.name
        assert len(inner) > DRAWN // 2, algorithm.name
    assert len(able) > 10


@each_accepted
def test_cost_grows_with_the_batch(algorithm, problem):
    one, many = (plan_of(algorithm, problem.with_(n=n)).seconds for n in (1, 1000))
    assert one < many


@each_problem
def test_the_choice_does_not_depend_on_the_number_of_threads(problem):
    names = {Planner(ALGORITHMS).plan(problem, TARGET.with_(threads=threads)).algorithm
             for threads in (1, 2, 3, 64)}
    assert len(names) == 1


# results


@each_accepted
@each_kind
def test_result_equals_the_reference(algorithm, problem, kind, nan_memory):
    plan, kept = plan_of(algorithm, problem), operands(problem, kind)
    given = kept.changed(torch.clone)
    run = Executable(plan, algorithm)
    y = run(given.x, run.prepare(given.weight), given.bias, given.residual)
    assert same(given, kept), "an operand was changed"
    assert y.shape == problem.result_shape
    assert y.dtype == DTYPES[problem.dtype]
    weight = problem.direction == "backward_weight"
    assert y.is_contiguous(memory_format=LAYOUTS["nchw" if weight else problem.layout])
    close_enough(y, plan, algorithm, kind)


def same(one: Operands, other: Operands) -> bool:
    return all(a is b is None or torch.equal(a, b) for a, b in zip(one.all, other.all))


def close_enough(y: torch.Tensor, plan: Plan, algorithm: Algorithm, kind: str) -> None:
    p = plan.problem
    error = rms(y.double() - expected(p, kind)) / max(scale(p, kind), 1e-30)
    assert error <= plan.error  # also fails where it is NaN
    sums_only = p.epilogue.activation in (None, "relu", "relu6")
    if kind == "integers" and algorithm.exact_on_integers and sums_only:
        assert torch.equal(y.double(), expected(p, kind))
