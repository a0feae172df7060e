"""Data for which errors are not independent: every result keeps to the bound for any data."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import pytest
import torch

import tilewise
from tilewise.algorithms import ALGORITHMS
from tilewise.bench import selftest
from tilewise.bench.alike import Case, accepted
from tilewise.bench.judged import ADVERSE, Mismatch, compare_any, exact, operands, reach, suits_any
from tilewise.core.algorithm import certain_error
from tilewise.core.problem import Problem
from tilewise.core.schedule import Schedule
from tilewise.core.target import Target
from tilewise.kernels.winograd_math import POINTS, amplification, matrices
from tilewise.planner.planner import inner_problem

HERE = Target.host(threads=1)
ABLE = selftest.able_on(HERE)
LONG = Problem.parse("n1c2048h3w3k4r3s3_f32_forward")


def drawn(algorithm: Any) -> Problem | None:
    """A small problem of an algorithm that any data suits."""
    rng = random.Random(f"any data, {algorithm.name}")
    for _ in range(20):
        p = accepted(algorithm, HERE, rng)
        if p is None or (p.n and suits_any(p)):
            return p
    return None


@pytest.mark.parametrize("algorithm", ABLE, ids=lambda algorithm: algorithm.name)
def test_every_kind_of_data_keeps_to_the_bound(algorithm: Any) -> None:
    p = drawn(algorithm)
    if p is None:
        pytest.skip("it takes no problem here")
    inner = inner_problem(algorithm, p)
    case = Case(p, inner, HERE, algorithm.default(inner, HERE))
    shares = [selftest.judged(algorithm, case, kind, 3) for kind in ADVERSE]
    assert max(shares) > 0


def test_all_kinds_are_drawn_by_the_self_test() -> None:
    p, kinds = Problem.parse("n1c3h4w4k5r1s1_f32_forward"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selftest, "judged", lambda *args: kinds.append(args[2]) or 0.0)
        for seed in range(4 * len(ADVERSE)):
            selftest._check(ABLE[0], Case(p, p, HERE, Schedule()), seed)
    assert set(kinds) == {"integers", "floats", *ADVERSE}


@pytest.mark.parametrize("name", ["cpu_direct", "cpu_pointwise"])
def test_a_long_sum_of_equal_terms_breaks_one_bound_and_not_the_other(name: str) -> None:
    """What docs/numerics.md says: the first is for independent errors."""
    p = LONG if name == "cpu_direct" else LONG.with_(c=2048 * 9, r=1, s=1)
    algorithm = next(a for a in ALGORITHMS if a.name == name)
    o = operands(p, "alike", 1)
    y = tilewise.conv2d(o.x, o.weight, algorithm=name)
    expected = exact(p, o)
    s = algorithm.default(p, HERE)
    relative = float((y - expected).norm() / expected.norm())
    assert relative > algorithm.bound(p, HERE, s)
    assert 0 < compare_any(algorithm, p, HERE, s, "alike", y, expected, reach(p, o)) < 1


def test_what_is_beyond_the_bound_is_noticed() -> None:
    p = Problem.parse("n1c3h4w4k5r1s1_f32_forward")
    algorithm = next(a for a in ALGORITHMS if a.name == "cpu_pointwise")
    s, o = algorithm.default(p, HERE), operands(p, "one sign", 1)
    y = exact(p, o)
    off = 2 * algorithm.certain(p, HERE, s) * reach(p, o)
    for wrong in (y + off, y - off, y * float("nan")):
        with pytest.raises(Mismatch, match="of what is certain"):
            compare_any(algorithm, p, HERE, s, "one sign", wrong, y, reach(p, o))


def test_reach_is_the_largest_result_there_can_be() -> None:
    for direction in ("forward", "backward_data", "backward_weight"):
        p = Problem.parse("n2c6h5w5k4r3s3p1g2_f32_forward").with_(direction=direction)
        o = operands(p, "floats", 2)
        most = operands(p, "floats", 2)
        most = type(o)(o.x.abs().amax().expand_as(o.x), o.weight.abs(), None, None)
        assert (exact(p, most).abs() <= reach(p, most) * (1 + 1e-12)).all(), direction


def test_parts_and_bits_add_what_they_leave_out() -> None:
    plain = certain_error(100)
    assert plain < certain_error(100, 6) < certain_error(100, 3) < certain_error(100, 1)
    assert certain_error(100, bits=16) - plain == pytest.approx(2 ** -16)
    assert certain_error(200) < 2 * plain


def test_transforms_amplify_what_they_add() -> None:
    assert amplification(matrices(3, 1)) == amplification(matrices(1, 3)) == 1
    sizes = [m for m in range(2, 7) if m + 1 in POINTS]
    grown = [amplification(matrices(m, 3)) for m in sizes]
    assert all(isinstance(one, Fraction) and one > 1 for one in grown)
    row = matrices(4, 3)
    out, taps, inputs = (torch.tensor([[float(abs(x)) for x in line] for line in matrix])
                         for matrix in (row.AT, row.G, row.BT))
    worst = torch.einsum("oi,it,i->ot", out, taps, inputs.sum(1))
    assert float(worst.max()) == pytest.approx(float(amplification(row)))
