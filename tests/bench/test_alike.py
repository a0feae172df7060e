"""Many random problems for one code: all different, and faults in what differs are noticed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.faults import patched, replaced

from tilewise.algorithms import ALGORITHMS
from tilewise.algorithms.reference import solve
from tilewise.bench import selftest
from tilewise.bench.alike import Case, _code, cases
from tilewise.bench.drawn import random_phased, random_problem
from tilewise.bench.guarded import ARENA, Mismatch, among, extent, taken_from
from tilewise.bench.judged import exact, operands
from tilewise.core import Problem, Target
from tilewise.core.epilogue import Epilogue
from tilewise.core.isa import NATIVE, widens
from tilewise.kernels.cpu.conv import geometry
from tilewise.kernels.cpu.emit import launch

HERE = Target.host(threads=2)
ABLE = [a for a in selftest.able_on(HERE) if a.name != "cpu_phases_bf16x3"]
DIRECT = next(a for a in ALGORITHMS if a.name == "cpu_direct")


def drawn(algorithm: Any, seed: str, most: int = 40) -> list[Case]:
    return list(cases(algorithm, HERE, random.Random(seed), most))


@pytest.mark.parametrize("algorithm", ABLE, ids=lambda algorithm: algorithm.name)
def test_all_have_one_code_and_differ(algorithm: Any) -> None:
    for seed in "abc":
        found = drawn(algorithm, seed)
        codes = {frozenset(_code(algorithm, *case[1:])[0]) for case in found}
        assert len(codes) == bool(found)
        assert len(set(found)) == len(found)


def test_sizes_batches_threads_padding_types_and_views_are_drawn() -> None:
    found = [case for seed in range(30) for case in drawn(DIRECT, f"{seed}", 10)]
    assert {case.t.threads for case in found} == {1, 2, 3, 4}
    able = {dtype for dtype in NATIVE if widens(HERE.row, dtype)}
    assert {case.inner.dtype for case in found} == {"f32", *able}
    assert any(case.inner.pitch for case in found)
    assert any(case.inner.grid for case in found)
    one = next(some for seed in "klmn" if len(some := drawn(DIRECT, seed)) > 20
               and any(some[0].p.padding))
    for name in ("n", "h", "w", "padding"):
        assert len({getattr(case.p, name) for case in one}) > 2


def test_code_for_one_size_has_other_batches_and_threads() -> None:
    algorithm = next(a for a in ALGORITHMS if a.name == "cpu_direct_weight")
    found = drawn(algorithm, "a", 200)
    assert 10 < len(found) < 200
    assert len({(case.p.h, case.p.w) for case in found}) == 1


@pytest.fixture
def _own_kernels() -> Iterator[None]:
    yield
    launch.KERNELS.clear()  # wrong ones are not for other tests


@pytest.mark.usefixtures("_own_kernels")
@pytest.mark.parametrize("fault", [
    pytest.param(replaced(geometry.Sizes, "x_pixel", property(
        lambda self: self.p.pitch - 1 if self.p.pitch else self.p.c)), id="read"),
    pytest.param(replaced(geometry.Sizes, "y_pixel", property(
        lambda self: 0 if self.p.grid is None else self.p.grid.pitch - 1)), id="written")])
def test_a_wrong_pitch_is_told(fault: Any) -> None:
    assert not selftest.tried("cpu_pointwise", HERE, 60, math.inf, shared=6).wrong
    with patched(fault):
        found = selftest.tried("cpu_pointwise", HERE, 60, math.inf, shared=6)
    assert found.wrong


def test_what_lies_between_pixels_is_left_alone() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        pixels = torch.arange(6, dtype=dtype)
        whole = among(pixels, 2, 5)
        assert whole.numel() == extent(3, 2, 5) == 12
        with pytest.raises(Mismatch, match="between pixels"):
            taken_from(whole, 2, 5)  # its gaps are another NaN
        for side in ("start", "end"):
            with ARENA.buffers([12], side, [dtype]) as (buffer,):
                for at in (0, 5, 10):
                    buffer.values[at:at + 2] = pixels[at // 5 * 2:at // 5 * 2 + 2]
                assert torch.equal(taken_from(buffer.values.clone(), 2, 5), pixels)
    assert among(pixels, 2, 0) is pixels
    assert extent(0, 2, 5) == 0


def test_the_quick_reference_is_the_definition() -> None:
    rng = random.Random(3)
    for seed in range(60):
        p: Problem = random_phased(rng) or random_problem(rng, 1e5)
        if seed % 3 == 0:
            p = random_problem(rng, 1e5).with_(direction="backward_data", epilogue=Epilogue())
        o = operands(p, "floats", seed)
        torch.testing.assert_close(exact(p, o), solve(p, o.x, o.weight, o.bias, o.residual))
