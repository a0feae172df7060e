"""Convolutions of images that are a slice of the channels of others."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from support.images import require_same, run_guarded, sliced
from support.problems import convolve, error, expected, random_problem

import tilewise
from tilewise.bench.guarded import Mismatch
from tilewise.conv.running import ENGINE
from tilewise.core import Problem, Target
from tilewise.core.isa import available
from tilewise.kernels.cpu.conv.geometry import Sizes
from tilewise.model.tuning import observed
from tilewise.runtime.engine import random_operands

ROWS = [row.name for row in available() if row.name in ("generic", "avx2", "avx512", "neon")]
PROBLEMS = {
    "cpu_direct": ["n2c20h9w11k24r3s3p1_f32_forward+bias+relu", "n1c7h8w8k5r3s2u2_f32_forward",
                   "n1c24h6w7k12r3s3p1g2_f32_forward+bias", "n2c33h5w5k40r1s1_f32_forward"],
    "cpu_pointwise": ["n2c33h5w9k40r1s1_f32_forward+bias", "n1c16h8w8k17r1s1u2_f32_forward"],
    "cpu_winograd": ["n2c20h13w11k24r3s3p1_f32_forward+bias+silu", "n1c16h9w20k33r5s5_f32_forward",
                     "n1c17h12w12k16r3s3p2d2_f32_forward"],
    "cpu_depthwise": ["n2c35h9w30k35r3s3p1g35_f32_forward+bias+relu",
                      "n1c16h9w9k16r5s5u2p2g16_f32_forward"]}
CASES = [(algorithm, name) for algorithm, names in PROBLEMS.items() for name in names]


def both(p: Problem, algorithm: str, isa: str, gap: int):
    """What the kernel makes of whole images, and one for slices that writes slices if it can."""
    t = Target.host(isa, 2)
    plan = ENGINE.plan(p, t, algorithm=algorithm)
    apart = ENGINE.among(plan, p.c + gap, p.k + gap)
    return ENGINE.build(plan), ENGINE.build(apart)


def given(run, weight, bias, x, out):
    return run(x, weight, bias, None, out)


@pytest.mark.parametrize("isa", ROWS)
@pytest.mark.parametrize(("algorithm", "name"), CASES)
def test_slices_give_what_whole_images_give(algorithm, name, isa):
    p = Problem.parse(name)
    x, weight, bias, _ = random_operands(p)
    for gap in (1, 16):
        whole, apart = both(p, algorithm, isa, gap)
        assert apart.plan.inner.pitch == p.c + gap
        wanted = whole(x, whole.prepare(weight), bias, None)
        ready = apart.prepare(weight)
        if not apart.is_among:
            found = apart(sliced(x, p.c + gap), ready, bias, None)
            assert torch.equal(found, wanted)
            continue
        for side in ("start", "end"):
            found = run_guarded(partial(given, apart, ready, bias), x, wanted.shape, gap, side)
            require_same(found, wanted, f"{name} {side}")


@pytest.mark.usefixtures("by_our_kernels")
def test_random_calls_of_slices():
    rng, found = random.Random(5), set()
    made = []
    with observed(made.append):
        for seed in range(60):
            p = random_problem(rng).with_(layout="nhwc")
            x, *rest = random_operands(p, seed)
            given = (sliced(x, p.c + rng.choice((1, 3, 16, 40))), *rest)
            assert error(convolve(p, given), expected(p, (x, *rest))) < 1e-5, p
            found |= {plan.algorithm for plan in made if plan.inner.pitch}
    assert found >= {"cpu_direct", "cpu_pointwise", "cpu_depthwise"}


def test_what_cannot_read_slices_says_so():
    p = Problem.parse("n1c16h9w9k16r3s3p1_f32_forward_of40")
    assert Problem.parse(str(p)) == p
    assert p.pitch == 40
    assert p.code != p.with_(pitch=0).code
    assert p.code == p.with_(pitch=50).code  # how far apart, is a word of the frame
    for name in ("vendor", "reference", "cpu_few_rows", "cpu_pixels"):
        reasons = ENGINE.planner.algorithm(name).reject(p, Target.host())
        assert any("16 of 40 channels" in reason for reason in reasons), name
    with pytest.raises(tilewise.TilewiseError, match="pitch is 8 with 16 channels"):
        p.with_(pitch=8)
    with pytest.raises(tilewise.TilewiseError, match="nchw"):
        p.with_(layout="nchw")


@pytest.mark.parametrize(("algorithm", "name"), CASES)
def test_a_fault_is_seen(algorithm, name, monkeypatch):
    """Code that takes the channels of a slice for all there are."""
    p = Problem.parse(name)
    x, weight, bias, _ = random_operands(p)
    monkeypatch.setattr(Sizes, "x_pixel", property(lambda sizes: sizes.p.c))
    whole, apart = both(p, algorithm, Target.host().isa, 3)
    wanted = whole(x, whole.prepare(weight), bias, None)
    out = sliced(torch.zeros_like(wanted), p.k + 3) if apart.is_among else None
    found = apart(sliced(x, p.c + 3), apart.prepare(weight), bias, None, out)
    with pytest.raises(Mismatch):
        require_same(found, wanted, name)
