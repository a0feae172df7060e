"""gpu_implicit_gemm in the interpreter: hundreds of problems of every direction and type."""

from __future__ import annotations

import math
import random

import pytest
import torch
from running import check, drawn, expected, problems, run
from support.harness import sample

from tilewise.algorithms.gpu_implicit_gemm import GpuImplicitGemm, split
from tilewise.algorithms.gpu_table import rows
from tilewise.core import Problem, Schedule, Target
from tilewise.core.gpu import GPUS

DIRECTIONS = ("forward", "backward_data", "backward_weight")
COUNT = sample(200, 24)  # of a direction and type; the interpreter takes 5 ms a loop step
SPLIT = ("tf32", "tf32x3", "bf16x3", "bf16x6")
PLAIN = GpuImplicitGemm()
each_direction = pytest.mark.parametrize("direction", DIRECTIONS)


def any_schedule(algorithm: GpuImplicitGemm, p: Problem, t: Target, seed: int) -> Schedule:
    """One of the space, or, so that tiles have neighbours, one with small tiles."""
    rng = random.Random(seed)
    s = algorithm.space(p, t).sample(rng, algorithm.default(p, t))
    small = s.with_(bm=rng.choice((16, 32, 64)), bn=rng.choice((16, 32)))
    return small if steps(p, small) <= 24 else s


def steps(p: Problem, s: Schedule) -> int:
    """Of all programs and loops."""
    if p.direction == "backward_weight":
        rows, columns, terms = p.group_k, p.group_c * p.r * p.s, p.n * p.conv_h * p.conv_w
    elif p.direction == "forward":
        rows, columns, terms = p.n * p.conv_h * p.conv_w, p.group_k, p.r * p.s * s.bk
    else:
        rows, columns, terms = p.n * p.h * p.w, p.group_c, p.r * p.s * s.bk
    return p.groups * math.ceil(rows / s.bm) * math.ceil(columns / s.bn) * math.ceil(terms / s.bk)


@each_direction
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_results_are_within_the_declared_bound(direction, dtype):
    worst = 0.0
    for seed, p in enumerate(problems(direction, dtype, COUNT)):
        t = Target.gpu(tuple(GPUS)[seed % len(GPUS)])
        s = any_schedule(PLAIN, p, t, seed)
        kind = "integers" if seed % 3 == 0 else "floats"
        worst = max(worst, check(PLAIN, p, t, s, kind, seed))
    assert worst > 0.02, "the bound is far from what is measured"


@each_direction
def test_split_precisions_are_within_their_bounds(direction):
    worst = dict.fromkeys(SPLIT, 0.0)
    for seed, p in enumerate(problems(direction, "f32", COUNT, seed=1)):
        precision = SPLIT[seed % len(SPLIT)]
        algorithm, t = GpuImplicitGemm(precision), Target.gpu("sm_90")
        s = any_schedule(algorithm, p, t, seed)
        worst[precision] = max(worst[precision], check(algorithm, p, t, s, "floats", seed))
    assert min(worst.values()) > 0.02, f"a bound is far from what is measured: {worst}"


@each_direction
def test_every_shipped_schedule_gives_exact_integers(direction):
    p = Problem.parse(f"n2c17h5w6k19r3s2u1x2p1x0_f16_{direction}")
    seen = {s for arch in GPUS for kind in ("half", "ieee") for s in rows(direction, kind, arch)}
    assert len(seen) >= 5
    for s in seen:
        check(PLAIN, p, Target.gpu("sm_90"), s, "integers")


def test_weight_gradients_are_split_and_added_in_order():
    p = Problem.parse("n3c8h13w12k16r3s3p1_f32_backward_weight")
    t, s = Target.gpu("sm_90"), rows("backward_weight", "ieee", "sm_90")[1].with_(bm=16, bn=16)
    assert split(p, t, s) > 2
    o, dy = drawn(p, "floats", 0)
    first, second = (run(PLAIN, p, t, s, o, dy) for _ in range(2))
    assert torch.equal(first, second)
    check(PLAIN, p, t, s, "integers")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_atomic_sums_are_right_and_off_where_determinism_is_asked_for(dtype, monkeypatch):
    p = Problem.parse(f"n3c8h13w12k16r3s3p1_{dtype}_backward_weight")
    t = Target.gpu("sm_90")
    s = rows("backward_weight", "ieee", "sm_90")[1].with_(split="atomic")
    check(PLAIN, p, t, s, "integers")
    check(PLAIN, p, t, s, "floats")
    o, dy = drawn(p, "floats", 0)
    want = run(PLAIN, p, t, s.with_(split="parts"), o, dy)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert torch.equal(run(PLAIN, p, t, s, o, dy), want)


def test_nan_and_infinity_pass_as_in_torch():
    p = Problem.parse("n1c8h6w6k16r3s3p1_f32_forward+bias+relu+pool2")
    t = Target.gpu("sm_90")
    o, dy = drawn(p, "floats", 0)
    o.x[0, 0, 2, 2] = torch.nan
    o.x[0, 1, 5, 0] = torch.inf
    y = run(PLAIN, p, t, PLAIN.default(p, t), o, dy)
    want, _ = expected(p, o, dy)
    assert y.isnan().any()
    torch.testing.assert_close(y.double(), want, equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("text", ["n2c17h5w6k19r3s2u1x2p1x0_f32_forward+bias+residual+prelu",
                                  "n1c12h5w5k42r1s1g3_f32_forward+prelu",
                                  "n1c8h6w6k17r3s3p1_f16_forward+bias+prelu"])
def test_slopes_lie_behind_the_bias(text):
    p, t = Problem.parse(text), Target.gpu("sm_90")
    s = PLAIN.default(p, t).with_(bm=16, bn=16)
    assert check(PLAIN, p, t, s, "integers") < 1
    check(PLAIN, p, t, s, "floats")
    o, dy = drawn(p, "floats", 0)
    o.x[0, :, 2, 2] = torch.nan
    want, _ = expected(p, o, dy)
    assert want.isnan().any()
    assert torch.equal(run(PLAIN, p, t, s, o, dy).isnan(), want.isnan())


def test_an_empty_batch_is_empty():
    p = Problem.parse("n0c8h6w6k16r3s3p1_f32_forward+bias")
    o, dy = drawn(p, "floats", 0)
    t = Target.gpu("sm_90")
    assert run(PLAIN, p, t, PLAIN.default(p, t), o, dy).shape == (0, 16, 6, 6)
