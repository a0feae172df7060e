"""Strided gradients of inputs and transposed convolutions, phase by phase, on grids."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
from support import faults, harness
from support.cases import ROWS
from support.faults import changed, patched
from support.matrix_unit import needs_amx

from tilewise.algorithms import ALGORITHMS, cpu_phases
from tilewise.algorithms.cpu_phases import CpuPhases
from tilewise.bench.drawn import random_phased
from tilewise.bench.guarded import Mismatch
from tilewise.core import Epilogue, Problem, Target
from tilewise.core.phases import covers, phases
from tilewise.kernels.cpu.conv.geometry import Sizes

PHASED: dict[str, Any] = {a.name: a for a in ALGORITHMS if isinstance(a, CpuPhases)}
ON_VECTORS = ["cpu_phases", "cpu_phases_winograd"]
ON_MATRIX = sorted(set(PHASED) - set(ON_VECTORS))


def random_schedule(a: CpuPhases, p: Problem, t: Target, rng: random.Random) -> Any:
    """Any of its algorithms for each phase, by any schedule."""
    found = []
    for phase in phases(p):
        each = rng.choice(a._able(phase, t))
        found.append((each, harness.random_schedule(each, phase.problem, t, rng)))
    return cpu_phases._schedule(found)


def check_random(name: str, t: Target, count: int) -> None:
    rng, a, seen = random.Random(f"{name} {t}"), PHASED[name], set()
    while count:
        p = random_phased(rng)
        if p is None or a.reject(p, t) or covers(p) == (count % 4 == 0):  # few do not cover
            continue
        s = random_schedule(a, p, t, rng) if count % 2 else a.default(p, t)
        harness.check(a, p, t, s, count)
        seen.add(covers(p))
        count -= 1
    assert seen == {True, False}


def run_random(row: str, count: int) -> dict[str, Any]:
    """So many problems of each algorithm that needs no matrix unit."""
    for name in ON_VECTORS:
        check_random(name, Target.host(row, harness.THREADS), count)
    return {"ran": count * len(ON_VECTORS), "failures": []}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", ON_VECTORS)
def test_random_problems(name: str, row: str) -> None:
    check_random(name, Target.host(row, 2), harness.sample(500, 8))


@needs_amx
@pytest.mark.parametrize("name", ON_MATRIX)
def test_random_problems_on_the_matrix_unit(name: str) -> None:
    check_random(name, Target.host("amx", 2), harness.sample(300, 12))


def test_a_filter_that_misses_pixels_has_no_tail() -> None:
    p = Problem.parse("n1c16h9w9k16r1s1u2_f32_backward_data+bias")
    assert PHASED["cpu_phases"].reject(p, Target.host(threads=2)) == [
        "filter is 1x1 and stride (2, 2), needs a filter that reaches every pixel where something "
        "follows or lies between"]
    assert not PHASED["cpu_phases"].reject(p.with_(epilogue=Epilogue()), Target.host(threads=2))


# deliberate faults


class Fault(NamedTuple):
    """A patch, and what runs with it."""

    apply: Any
    algorithm: str
    problem: str = "n2c21h11w13k5r3s3u2x3p1_f32_backward_data+bias+residual"


def check(fault: Fault) -> None:
    a, p, t = PHASED[fault.algorithm], Problem.parse(fault.problem), Target.host(threads=2)
    with patched(fault.apply):
        harness.check(a, p, t, a.default(p, t))


MUTATIONS = {
    "rows lie too near": Fault(
        changed(Sizes, "y_rows", lambda at: at - 1), "cpu_phases"),
    "images overlap": Fault(
        changed(Sizes, "y_at", lambda at: at - 21), "cpu_phases"),
    "a phase begins elsewhere": Fault(
        changed(cpu_phases, "_bytes_before", lambda at: at + 4), "cpu_phases"),
    "weights of another phase": Fault(
        changed(cpu_phases, "weights", lambda found: found[::-1]), "cpu_phases_winograd"),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    return faults.outcomes("test_grids")


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_is_noticed(outcomes: dict[str, list[str]], name: str) -> None:
    faults.assert_noticed(outcomes[name])


__all__ = ["Mismatch", "check"]  # called by faults
