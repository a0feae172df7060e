"""Matrix units on processors that lack them: what functions compute in place of instructions.

A sample, for CI, of what the tests of the units run on processors that have them.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from llvmlite import ir
from support import faults, mutations
from support.cases import Jobs, jobs_of, runs
from support.harness import sample
from support.mutations import Mutation

import tilewise
from tilewise.algorithms import ALGORITHMS
from tilewise.bench import health
from tilewise.bench.alike import Case
from tilewise.bench.judged import scatter
from tilewise.bench.machine import facts
from tilewise.bench.selftest import judged
from tilewise.cli.doctor import _limits
from tilewise.core import ISA, Problem, Target
from tilewise.core.errors import TilewiseError
from tilewise.core.isa import EMULATED, available, emulable
from tilewise.core.phases import phases
from tilewise.core.schedule import Schedule
from tilewise.kernels.cpu.emit import F32, Function, Module, amx, jit
from tilewise.kernels.cpu.emit.parts import split, split_pairs
from tilewise.kernels.cpu.emit.unit import Side
from tilewise.kernels.cpu.emit.values import BFLOAT, Vector
from tilewise.planner import Planner
from tilewise.planner.measure import interleaved

ROW = "amx_emulated"
FLOPS = 1e5  # of an image
FEW = sample(300, 4)  # problems for each number of products
SHAPES = 2  # batch sizes of a shape, at least
DEEP = sample(11, 2)  # of the problems of many channels
EVERY = sample(1, 12)  # of the faults that are noticed on AMX
RNG = np.random.default_rng(0)
pytestmark = pytest.mark.skipif(not emulable(), reason="this machine can emulate no unit")


# the instructions, bit by bit


def compiled(write: Callable[[Function], None], *names: str) -> Any:
    """A function of pointers, in code of its own."""
    module = Module(ISA[ROW])
    with module.function("entry", exported=True, **dict.fromkeys(names, "pointer")) as f:
        write(f)
    code = jit.Code(jit.compile_object(module), ("entry",))
    return code.function("entry", *[ctypes.c_void_p] * len(names))


def called(function: Any, *arrays: np.ndarray) -> None:
    function(*(array.ctypes.data for array in arrays))


def flushed(x: np.ndarray) -> np.ndarray:
    """Denormals as zero."""
    return np.where(np.abs(x) < 2.0 ** -126, np.copysign(np.float32(0), x), x).astype(np.float32)


def widened(x: np.ndarray) -> np.ndarray:
    return flushed((x.astype(np.uint32) << 16).view(np.float32))


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c rounded once: sums of these sizes are exact in 64 bits, or no tie."""
    with np.errstate(all="ignore"):
        return flushed((a.astype(np.longdouble) * b + c).astype(np.float32))


def bfloat16s(*shape: int) -> np.ndarray:
    """Numbers of many sizes, zeros, denormals."""
    exponents = RNG.integers(100, 150, shape).astype(np.uint16) << 7
    found = exponents | RNG.integers(0, 128, shape).astype(np.uint16)
    found |= RNG.integers(0, 2, shape).astype(np.uint16) << 15
    return np.where(RNG.random(shape) < 0.1, found & 0x807F, found).astype(np.uint16)


def same(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_products_of_tiles() -> None:
    """Of pairs, lower and upper ones apart; all of it is added to what was there at the end."""
    def write(f: Function) -> None:
        unit = amx.Tiles(f, Side((0,), 0), Side((0,), 0), 1)
        unit.configure(f)
        unit.load(0, f.c, 80)
        unit.load_left(f.a, 0)
        unit.load_right(f.b, 0)
        unit.multiply()
        unit.call("tilestored64", 0, f.c, 80)
        unit.release(f)

    a, b = bfloat16s(16, 32), bfloat16s(16, 32)
    c = RNG.standard_normal((16, 20)).astype(np.float32)
    c[3, :4] = (np.inf, 1e-40, -np.inf, -1e-39)
    found = c.copy()
    called(compiled(write, "a", "b", "c"), a, b, found)
    sums = np.zeros((2, 16, 16), np.float32)
    for k in range(16):
        for half in (0, 1):
            left, right = widened(a[:, 2 * k + half]), widened(b[k, half::2])
            sums[half] = fused(left[:, None], right[None, :], sums[half])
    expected = c.copy()
    expected[:, :16] = flushed(flushed(c[:, :16]) + flushed(sums[0] + sums[1]))
    same(found, expected)


def test_products_of_pairs() -> None:
    """The upper ones first."""
    def write(f: Function) -> None:
        pairs, sums = ir.VectorType(BFLOAT, 32), ir.VectorType(F32, 16)
        call = f.intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", sums, [sums, pairs, pairs])
        a, b = (f.ll.bitcast(at.load().ir, pairs) for at in (f.a, f.b))
        f.c.store(Vector(f, f.ll.call(call, [f.c.load().ir, a, b])))

    a, b, c = bfloat16s(32), bfloat16s(32), RNG.standard_normal(16).astype(np.float32)
    c[:4] = (np.inf, 1e-40, -np.inf, 2.0 ** 24)
    a[6:8], b[6:8] = (0x4000, 0x3F80), 0x3F80  # 2 and 1 times 1: the order decides the rounding
    expected = flushed(c)
    for half in (1, 0):
        expected = fused(widened(a[half::2]), widened(b[half::2]), expected)
    called(compiled(write, "a", "b", "c"), a, b, c)
    same(c, expected)


def test_rounding_to_bfloat16() -> None:
    """To nearest even; denormals are zero, and NaN stays NaN."""
    def write(f: Function) -> None:
        part, = split(f, f.x.load(), 1)
        f.y.store(part)
        both, = split_pairs(f, f.x.load(), f.x.load(16), 1)
        f.z.store(both)

    x = RNG.standard_normal(32).astype(np.float32)
    x[:5] = (1 + 2.0 ** -8, 1 + 3 * 2.0 ** -8, np.inf, -np.inf, 3.3e38)
    x[5:7] = (1e-40, -1e-39)
    x.view(np.uint32)[7:10] = nan = np.array([0x7F80_0001, 0x7FFF_FFFF, 0xFFC0_0000], np.uint32)
    y, z = np.zeros(16, np.uint16), np.zeros(32, np.uint16)
    called(compiled(write, "x", "y", "z"), x, y, z)
    expected = torch.tensor(flushed(x)).bfloat16().view(torch.int16).numpy().view(np.uint16)
    quiet = expected.copy()
    quiet[7:10] = (nan >> 16) | 0x40
    np.testing.assert_array_equal(y, quiet[:16])
    np.testing.assert_array_equal(z.reshape(16, 2), quiet.reshape(2, 16).T)


def unconfigured() -> None:
    def write(f: Function) -> None:
        amx.Tiles(f, Side((0,), 0), Side((0,), 0), 1).call("tilezero", 0)

    called(compiled(write, "c"), np.zeros(16))


def test_tiles_that_nobody_configured_are_an_illegal_instruction() -> None:
    child = os.fork()
    if not child:
        faulthandler.disable()
        unconfigured()
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == 4  # SIGILL


# who gets it


def test_it_is_never_chosen() -> None:
    assert not {row.name for row in EMULATED} & {row.name for row in available()}
    assert not Target.host().row.emulated
    assert Target.host(ROW, 2).row.emulated
    assert Target.host(ROW, 2).is_here
    with pytest.raises(TilewiseError, match=f"it can emulate .*{ROW}"):
        Target.host("sve512")


def test_its_code_is_not_mixed_with_real_code() -> None:
    real = replace(ISA[ROW], emulated=False)  # also if all else were the same
    assert len({jit._place("key", row)[1] for row in (ISA[ROW], ISA["amx"], real)}) == 3


def test_no_times_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    p = Problem.parse("n1c8h8w8k8r3s3p1_f32_forward")
    planner = Planner(ALGORITHMS, lambda plan: int)
    with pytest.raises(TilewiseError, match="no times are taken"):
        planner.plan(p, Target.host(ROW, 2), "measure")
    assert planner.plan(p, Target.host(ROW, 2)).source != "measured"
    monkeypatch.setenv("TILEWISE_ISA", ROW)
    with pytest.raises(TilewiseError, match="no times are taken"):
        interleaved([int])
    fast = tilewise.optimize(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3)).eval())
    with pytest.raises(TilewiseError, match="no times are taken"):
        tilewise.profile(fast, torch.randn(1, 3, 8, 8))


def test_doctor_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_ISA", ROW)
    assert any("functions stand for" in finding.what for finding in health.examine(2))
    said, = _limits(facts(2, limits=False))
    assert said == ("limits", "not measured: instructions are emulated")


# kernels, in processes of their own


def run_products(row: str, products: int) -> dict[str, Any]:
    amx_tests = import_module("test_amx")
    with mock.patch.object(amx_tests, "BATCHES", SHAPES):
        return amx_tests.run_random(products, 0, row, FEW, FLOPS)


def run_deep(row: str, count: int) -> dict[str, Any]:
    return import_module("test_amx").run_deep(row, count)


def run_weights(products: int) -> dict[str, Any]:
    return import_module("test_amx_weight").run_random(products, ROW, FEW, SHAPES)


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    with jobs_of(request) as found:
        yield found


@pytest.mark.parametrize("row, products", [(row.name, products) for row in EMULATED
                                           for products in row.matrix.products])
@runs("run_products")
def test_random_problems(jobs: Jobs, row: str, products: int) -> None:
    result = jobs.result("run_products", row, products)
    assert result["failures"] == []
    assert sum(result["ran"].values()) >= FEW / 2


@pytest.mark.parametrize("row", [row.name for row in EMULATED])
@pytest.mark.parametrize("count", [DEEP])
@runs("run_deep")
def test_many_channels(jobs: Jobs, count: int, row: str) -> None:
    result = jobs.result("run_deep", row, count)
    assert result["failures"] == []
    assert "cpu_direct_bf16" in result["ran"]


@pytest.mark.parametrize("products", [1, 3])
@runs("run_weights")
def test_random_gradients_of_weights(jobs: Jobs, products: int) -> None:
    result = jobs.result("run_weights", products)
    assert result["failures"] == []
    assert sum(result["ran"].values()) >= FEW


# deliberate faults


def check(mutation: Mutation) -> None:
    with mock.patch.dict(os.environ, TILEWISE_ISA=ROW):
        mutations.check(mutation)


MUTATIONS = dict(list(import_module("test_amx_mutations").MUTATIONS.items())[::-1][::EVERY])


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    return faults.outcomes("test_emulated_units")


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_noticed(outcomes: dict[str, list[str]], name: str) -> None:
    faults.assert_noticed(outcomes[name])


# phases of a stride that begin behind the image's first pixel


LEAVE_OUT = ["n2c21h8w3k2r4s4u2p2-6x3-2", "n1c21h35w3k2r4s4u2p6-3x4", "n3c2h9w2k2r1s4u2p4-2x3",
             "n1c34h3w3k16r3s5u2x3p0-1x7-1"]


@pytest.mark.parametrize("row", ["amx_emulated", "avx512_bf16_emulated"])
@pytest.mark.parametrize("text", LEAVE_OUT)
def test_phases_that_leave_pixels_out(row: str, text: str) -> None:
    """Copies of rows with their padding once began in front of their memory."""
    p, t = Problem.parse(f"{text}_f32_backward_data"), Target.host(isa=row, threads=2)
    algorithm = next(a for a in ALGORITHMS if a.name == "cpu_phases_bf16x1")
    unit = algorithm.algorithms["cpu_direct_bf16"]
    s = Schedule(parts=json.dumps([
        [unit.name, {**unit.default(q, t), "block_rows": 1 + (q.r > 1)}]
        for q in (phase.problem for phase in phases(p))]))
    for seed in range(2):
        judged(algorithm, Case(p, p, t, s), ("integers", "floats")[seed], seed)


def test_the_bound_holds_for_a_single_sum() -> None:
    """Its error is now and then larger than the mean of many."""
    p = Problem.parse("n31c1h6w11k1r1s1_f32_backward_weight")
    t = Target.host(isa=ROW, threads=1)
    algorithm = next(a for a in ALGORITHMS if a.name == "cpu_direct_weight_bf16")
    case = Case(p, p, t, algorithm.default(p, t))
    shares = [judged(algorithm, case, "floats", seed) for seed in (153, 231, 349)]
    assert max(shares) * scatter(1) > 1  # of the bound for many
