"""Groups of few channels, of which whole ones share a vector: between guard pages, on every row."""

from __future__ import annotations

import random

import pytest
from support import harness
from support.cases import ROWS
from support.harness import GENERATED

from tilewise.core import InvalidProblem, Problem, Target
from tilewise.core.problem import Epilogue

DEPTHWISE = GENERATED["cpu_depthwise"]


def drawn(rng: random.Random, lanes: int) -> Problem | None:
    outputs = rng.choice([k for k in (1, 2, 4, 8, 16) if k <= lanes])
    inputs = rng.choice([c for c in (2, 4, 8) if c <= outputs] or [1])
    groups, (r, s) = rng.randint(2, 9), rng.choice(((3, 3), (1, 1), (2, 4), (3, 5), (1, 6), (5, 3)))
    end = Epilogue(rng.random() < .5, rng.random() < .4, rng.choice((None, "relu", "silu")))
    try:
        return Problem(rng.randint(1, 3), groups * inputs, rng.randint(1, 20), rng.randint(1, 40),
                       groups * outputs, r, s, rng.choice(((1, 1), (2, 2), (1, 3))),
                       tuple(rng.randint(0, 3) for _ in range(4)),
                       rng.choice(((1, 1), (1, 1), (2, 1), (1, 2))), groups, epilogue=end)
    except InvalidProblem:
        return None


@pytest.mark.parametrize("row", ROWS)
def test_random_problems(row: str) -> None:
    t, rng, seen = Target.host(row, 2), random.Random(row), set()
    for number in range(harness.sample(1000, 40)):
        p = None
        while p is None or DEPTHWISE.reject(p, t):
            p = drawn(rng, t.lanes)
        s = (harness.random_schedule(DEPTHWISE, p, t, rng) if number % 2
             else DEPTHWISE.default(p, t))
        harness.check(DEPTHWISE, p, t, s, number)
        seen.add((p.group_k, p.group_c))
    assert seen >= {(k, c) for k in (2, 4) for c in (2, 4) if c <= k <= t.lanes}


@pytest.mark.parametrize("shape, needs", [
    ("c36h9w9k36r3s3g3", "outputs that divide"), ("c16h9w9k8r3s3g2", "inputs that divide"),
    ("c8h9w9k8r3s3", "several"), ("c64h9w9k64r5s5g8", "at most 15 taps")])
def test_others_are_refused(shape: str, needs: str) -> None:
    reasons = DEPTHWISE.reject(Problem.parse(f"n1{shape}_f32_forward"), Target.host(threads=2))
    assert any(needs in reason for reason in reasons), reasons
