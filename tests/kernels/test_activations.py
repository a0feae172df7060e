"""Every activation behind every kernel, on every instruction set, between guard pages."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import pytest
import torch
from support import harness
from support.harness import GENERATED, LONG, STEPS, Mismatch, in_process
from torch import nn
from torch.nn import functional as F

import tilewise
from tilewise.core import Epilogue, InvalidProblem, Problem, Target
from tilewise.core.activations import ACTIVATIONS, SLOPED, parsed
from tilewise.core.isa import available
from tilewise.kernels.activations import activated, applied
from tilewise.kernels.cpu.between.epilogue import EMITTERS
from tilewise.model.activations import of_call, of_module
from tilewise.planner.planner import inner_problem

# channels that fill no whole vector; every algorithm accepts one of them
SHAPES = [Problem.parse(f"n1{text}_f32_forward") for text in (
    "c5h6w7k19r3s3p1", "c19h6w7k19r3s3p1g19", "c19h5w6k21r1s1", "c1031h1w1k1021r1s1")]
ROWS = [isa.name for isa in available()]
TURNS = 2 * len(ROWS)  # pairs of a kernel and an activation are one of so many on a row, in CI
TAILS = list(itertools.product((1, 2), (False, True)))  # pool, residual
MODULES = {
    "relu": nn.ReLU(), "relu6": nn.ReLU6(), "leaky_relu": nn.LeakyReLU(), "silu": nn.SiLU(),
    "leaky_relu:0.2": nn.LeakyReLU(0.2), "clamp": nn.Hardtanh(), "gelu": nn.GELU(),
    "clamp:-2.0:3.0": nn.Hardtanh(-2, 3), "gelu_tanh": nn.GELU("tanh"), "mish": nn.Mish(),
    "sigmoid": nn.Sigmoid(), "tanh": nn.Tanh(), "elu": nn.ELU(), "elu:0.5": nn.ELU(0.5),
    "hardswish": nn.Hardswish(), "hardsigmoid": nn.Hardsigmoid(), "prelu": nn.PReLU()}
FALLING = {"leaky_relu": "leaky_relu:-1.0", "elu": "elu:-1.0"}  # with numbers that make it fall


# kernels


def able(row: str) -> dict[str, Any]:
    """Algorithms that a row of instructions has."""
    return {a.name: a for a in harness.WRITTEN if "forward" in a.directions
            and a.is_for(Target.host(row, harness.THREADS))}


def pairs(row: str) -> list[tuple[str, str]]:
    """(algorithm, step): all with TILEWISE_LONG, else every second one, on the rows in turn."""
    every = itertools.product(enumerate(able(row)), enumerate(STEPS))
    return [(name, step) for (i, name), (j, step) in every
            if LONG or (i + j) % TURNS == ROWS.index(row)]


def cases(row: str) -> list[tuple[str, Problem, Any]]:
    """(algorithm, problem, schedule) of every pair; tails take turns where not all are asked for"""
    target, found = Target.host(row, harness.THREADS), []
    turns = itertools.count()
    for name, step in pairs(row):
        algorithm = able(row)[name]
        p = next(p for p in SHAPES if not algorithm.reject(p, target))
        for pool, residual in TAILS if LONG else [TAILS[next(turns) % len(TAILS)]]:
            bias = step not in SLOPED or pool == 1  # slopes lie where they do, with a bias or not
            after = Epilogue(bias, residual, step, 1 if p.is_linear else pool)
            q = inner_problem(algorithm, p.with_(epilogue=after))
            found.append((name, q, schedule(algorithm, q, target)))
    return found


def schedule(algorithm: Any, p: Problem, target: Target) -> Any:
    """The default; without TILEWISE_LONG one that is quick to compile, as tails are the same."""
    default = algorithm.default(p, target)
    if LONG:
        return default
    rng = random.Random(str(p))
    return harness.quickest(
        [default, *(algorithm.space(p, target).sample(rng, default) for _ in range(8))], p)


def run_row(row: str) -> dict[str, Any]:
    target, failures, ran = Target.host(row, harness.THREADS), [], []
    for number, (name, p, s) in enumerate(cases(row)):
        print(harness.describe(able(row)[name], p, target, s))
        try:
            harness.check(able(row)[name], p, target, s, number)
        except Mismatch as mismatch:
            failures.append(str(mismatch))
        ran.append(f"{name} {p.epilogue.activation}")
    return {"failures": failures, "ran": ran}


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_every_activation_behind_every_kernel(row: str) -> None:
    result = in_process("test_activations:run_row", row)
    assert result["failures"] == []
    assert set(result["ran"]) == {f"{name} {step}" for name, step in pairs(row)}


def test_a_sample_has_every_activation_and_every_kernel() -> None:
    names, steps = map(set, zip(*(pair for row in ROWS for pair in pairs(row))))
    assert names == {name for row in ROWS for name in able(row)}
    assert steps == set(STEPS)


def test_every_row_has_its_emitter_its_function_and_its_module() -> None:
    assert set(EMITTERS) == set(ACTIVATIONS)
    assert {parsed(step)[0].name for step in MODULES} == set(ACTIVATIONS) - {"clip"}
    assert {type(module).__name__ for module in MODULES.values()} == {
        name for row in ACTIVATIONS.values() for name in row.modules}
    x = torch.linspace(-8, 8, 1001, dtype=torch.float64)
    for step, module in MODULES.items():
        exact = copy.deepcopy(module).double()
        slopes = [getattr(exact, name) for name in (parsed(step)[0].operand,) if name]
        assert torch.equal(applied(step)(x, *slopes), exact(x)), step


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_monotone_means_that_the_largest_stays_the_largest(name: str) -> None:
    """On what float32 can tell apart; the one that is said not to be must have a counterexample."""
    row = ACTIVATIONS[name]
    x = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    slope = -torch.ones(1, dtype=x.dtype) if row.operand else None
    y = activated(x, FALLING.get(name, name), slope)  # numbers and slopes are not looked at
    assert bool((y.diff() < 0).any()) != row.monotone


@pytest.mark.parametrize("name", GENERATED)
def test_pooling_is_fused_only_behind_what_keeps_the_order(name: str) -> None:
    algorithm = GENERATED[name]
    for step in STEPS:
        fused, rest = Epilogue(activation=step, pool=2).split(algorithm.fuses)
        assert fused.activation == step
        if not parsed(step)[0].monotone:
            assert rest == ("pool2",)


# words


@pytest.mark.parametrize("step", MODULES)
def test_modules_and_functions_are_known_in_graphs(step: str) -> None:
    assert of_module(MODULES[step]) == step
    row, numbers = parsed(step)
    form = getattr(F, row.function or row.name)
    options = {"approximate": "tanh"} if row.name == "gelu_tanh" else {}
    slopes = ("a node",) if row.operand else ()
    assert of_call(form, (*slopes, *(numbers if step != row.name else ())), options) == step


@pytest.mark.parametrize("rest, options, step", [
    ((0, 1), {}, "clip:0.0:1.0"), ((), {"max": 2}, "clip:-inf:2.0"), ((0, 6), {}, "clip:0.0:6.0"),
    ((0,), {}, "clip:0.0:inf"), ((), {"min": -1.0, "max": 1.0}, "clip:-1.0:1.0"), ((), {}, None),
    ((None, 2), {}, "clip:-inf:2.0"), ((None, None), {}, None), ((), {"min": None}, None),
    ((torch.ones(1),), {}, None), ((0, 1), {"out": 3}, None),
    ((), {"low": 0}, None)])
def test_clamps(rest: Any, options: Any, step: str | None) -> None:
    forms = (torch.clamp, torch.clip_, "clamp_", "clip")
    assert {of_call(form, rest, options) for form in forms} == {step}
    if step is not None:
        x = torch.linspace(-8, 8, 17).requires_grad_()  # all ends are among them
        ours, theirs = applied(step)(x), torch.clamp(x, *rest, **options)
        assert torch.equal(ours, theirs)
        gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (ours, theirs)]
        assert torch.equal(*gradients)


@pytest.mark.parametrize("call", [
    (F.leaky_relu, (torch.ones(1),), {}), (F.elu, (1.0, 2.0), {}), (F.gelu, (), {"approximate": 3}),
    (F.leaky_relu, (float("nan"),), {}), (F.softplus, (), {}), (F.silu, (), {"other": 1}),
    (F.prelu, (), {}), (F.prelu, ("a node",), {"other": 1})])
def test_what_is_no_activation_of_ours(call: Any) -> None:
    assert of_call(*call) is None


@pytest.mark.parametrize("step", ["softplus", "leaky_relu:x", "clamp:1", "relu:1", "elu:1:2",
                                  "clamp:nan:1", ""])
def test_wrong_steps_are_refused(step: str) -> None:
    with pytest.raises(InvalidProblem, match="activation is"):
        Epilogue(activation=step)


@pytest.mark.parametrize("step", STEPS)
def test_problems_are_parsed_from_what_they_print(step: str) -> None:
    p = SHAPES[0].with_(epilogue=Epilogue(True, True, step, 2))
    assert Problem.parse(str(p)) == p


# users


@pytest.mark.parametrize("step", [*STEPS, "clip:-1.0:1.0"])
def test_conv2d_and_its_gradients(step: str) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 8, 9, 9), torch.randn(12, 8, 3, 3), torch.randn(12)
    slopes = [torch.randn(12)] if step in SLOPED else []

    def run(function: Any, *operands: torch.Tensor) -> list[torch.Tensor]:
        leaves = [operand.clone().requires_grad_() for operand in operands]
        y = function(*leaves)
        y.square().sum().backward()
        with torch.no_grad():
            return [function(*leaves), y.detach(), *(leaf.grad for leaf in leaves)]

    def ours(x: Any, weight: Any, bias: Any, slope: Any = None) -> torch.Tensor:
        return tilewise.conv2d(x, weight, bias, padding=1, activation=step, slope=slope)

    def theirs(x: Any, weight: Any, bias: Any, slope: Any = None) -> torch.Tensor:
        return activated(F.conv2d(x, weight, bias, padding=1), step, slope)

    operands = (x, weight, bias, *slopes)
    found = run(ours, *operands)
    want = run(theirs, *(operand.double() for operand in operands))
    for one, exact in zip(found, want, strict=True):
        assert (one - exact).norm() <= 1e-5 * exact.norm(), step


@pytest.mark.parametrize("step", MODULES)
def test_models_fuse_it(step: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), MODULES[step],
                          nn.Conv2d(16, 8, 1), MODULES[step]).eval()
    x = torch.randn(1, 3, 12, 12)
    with torch.no_grad():
        fast = tilewise.optimize(model, x)
        assert torch.allclose(fast(x), model(x), atol=1e-5)
        told = tilewise.explain(fast, x)
    assert [e.problem.epilogue.activation for _, e in told.layers] == [step, step]


def test_a_module_whose_numbers_change_is_followed() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.LeakyReLU(0.1)).eval()
    x = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        fast = tilewise.optimize(model, x)
        fast(x)
        for changed in (model, fast):
            changed[1].negative_slope = 0.7
        assert torch.allclose(fast(x), model(x), atol=1e-5)
