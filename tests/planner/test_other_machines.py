"""Estimates for machines that are not this one: choices that make sense, and times within reason.

Sizes and clocks are those that makers publish; bandwidths are what a few cores are assumed to get.
"""

from __future__ import annotations

from typing import Any

import pytest

from tilewise.algorithms import ALGORITHMS
from tilewise.core import Problem, Target
from tilewise.core.target import units_of
from tilewise.planner import Planner
from tilewise.runtime.engine import BITS, PRECISIONS

KB, MB = 1 << 10, 1 << 20
MACHINES = {
    "Zen 2": Target("cpu", "avx2", 8, 32 * KB, 512 * KB, 16 * MB, 3.3e9, 40e9),
    "Zen 3": Target("cpu", "avx2", 8, 32 * KB, 512 * KB, 32 * MB, 3.5e9, 50e9),
    "Zen 4": Target("cpu", "avx512", 8, 32 * KB, 1 * MB, 32 * MB, 3.7e9, 60e9),
    "Zen 5": Target("cpu", "avx512", 8, 48 * KB, 1 * MB, 32 * MB, 4.0e9, 70e9),
    "Ice Lake": Target("cpu", "avx512", 8, 48 * KB, 1280 * KB, 48 * MB, 2.9e9, 60e9),
    "Graviton 2": Target("cpu", "neon", 8, 64 * KB, 1 * MB, 32 * MB, 2.5e9, 50e9),
    "Graviton 3": Target("cpu", "sve256", 8, 64 * KB, 1 * MB, 32 * MB, 2.6e9, 80e9),
    "Graviton 4": Target("cpu", "neon_bf16", 8, 64 * KB, 2 * MB, 36 * MB, 2.8e9, 100e9, units=4),
    "Neoverse V2": Target("cpu", "neon_bf16", 8, 64 * KB, 1 * MB, 114 * MB, 3.2e9, 150e9,
                          units=4),
    "Apple M1": Target("cpu", "neon", 4, 128 * KB, 12 * MB, 12 * MB, 3.2e9, 58e9, units=4),
}
# of which one must be chosen
CHOSEN = {
    "n8c64h56w56k64r3s3p1_f32_forward+bias+relu": {"cpu_winograd"},
    "n1c256h14w14k256r3s3p1_f32_forward+bias+relu": {"cpu_winograd"},
    "n8c64h56w56k256r1s1_f32_forward+bias+relu": {"cpu_pointwise", "cpu_direct"},
    "n1c3h224w224k64r7s7u2p3_f32_forward+bias+relu": {"cpu_direct", "cpu_pixels"},
    "n1c96h56w56k96r3s3p1g96_f32_forward+bias+relu": {"cpu_depthwise"},
    "n8c128h28w28k128r3s3u2p1_f32_forward+bias+relu": {"cpu_direct"},
    "n8c64h56w56k64r3s3p1_f32_backward_weight": {"cpu_winograd_weight", "cpu_direct_weight"},
}
# with all bits of float32, as is usual
EXACT: Any = {"max_error": PRECISIONS["highest"], "bits": BITS["highest"]}
SAVED = 5.0  # products that Winograd's largest tiles save
SLOW = 12.0  # times as long as the machine's limits


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("problem", CHOSEN)
def test_choices_are_sane(name: str, problem: str) -> None:
    p, t = Problem.parse(problem), MACHINES[name]
    planner = Planner(ALGORITHMS)
    plan = planner.plan(p, t, **EXACT)
    if t.units == 4 and plan.algorithm == "vendor":  # torch's, where ours is hardly faster
        plan = next(c.plan for c in planner.candidates(p, t, **EXACT)
                    if c.algorithm in CHOSEN[problem])
        assert plan.seconds < planner.plan(p, t, **EXACT).seconds
    algorithm = next(a for a in ALGORITHMS if a.name == plan.algorithm)
    assert plan.algorithm in CHOSEN[problem]
    assert plan.schedule in algorithm.space(plan.inner, t)
    least = max(p.flops / t.peak / SAVED, p.bytes / t.flow / 8)
    assert least <= plan.seconds <= SLOW * max(p.flops / t.peak, p.bytes / t.flow) + 50e-6


@pytest.mark.parametrize("name", [name for name, t in MACHINES.items() if t.units == 4])
def test_four_units_have_tiles_that_feed_them(name: str) -> None:
    """A tile as small as two units need would leave two of four waiting for sums."""
    t, planner = MACHINES[name], Planner(ALGORITHMS)
    assert t.peak == 2 * t.with_(units=0).peak
    for problem, algorithms in CHOSEN.items():
        p = Problem.parse(problem)
        plan = planner.plan(p, t, **EXACT)
        slower = planner.plan(p, t.with_(units=0), **EXACT).seconds
        assert plan.seconds <= slower, problem
        if "cpu_winograd" in algorithms:  # whose time goes into register tiles
            assert plan.seconds < 0.9 * slower or p.bytes / t.flow > 0.3 * slower, problem
            tile = plan.schedule.rows * plan.schedule.vectors
            assert 4 * 4 <= tile < t.registers, plan  # four units, and four cycles until a sum


@pytest.mark.parametrize("isa, identity, units", [
    ("neon", "0x00000000413fd0c1", 0),  # Neoverse N1
    ("neon", "0x00000000411fd401", 4), ("sve256", "0x00000000411fd401", 0),  # Neoverse V1
    ("neon", "0x00000000410fd4f0", 4), ("neon_bf16", "0x00000000410fd4f0", 4),  # V2
    ("neon", "", 0), ("avx2", "nonsense", 0)])
def test_units_follow_from_the_number_of_the_processor(isa: str, identity: str,
                                                       units: int) -> None:
    assert units_of(isa, identity) == units
    assert Target("cpu", isa, 1, units=units).starts == (units or 2)


@pytest.mark.parametrize("problem", CHOSEN)
def test_wider_vectors_and_more_threads_take_less_time(problem: str) -> None:
    p, planner = Problem.parse(problem), Planner(ALGORITHMS)
    v1 = MACHINES["Graviton 3"]
    narrow, wide = (planner.plan(p, v1.with_(isa=isa)).seconds for isa in ("neon", "sve256"))
    assert wide < 1.02 * narrow
    alone, together = (planner.plan(p, v1.with_(threads=threads)).seconds for threads in (1, 8))
    assert together < alone


@pytest.mark.parametrize("name", ["Graviton 4", "Neoverse V2"])
def test_products_of_bfloat16_are_chosen_where_they_are_admitted(name: str) -> None:
    """Strided 3x3: no Winograd saves as much. Six products are never faster there."""
    p = Problem.parse("n8c128h28w28k128r3s3u2p1_f32_forward+bias+relu")
    found = {}
    for precision in ("highest", "high", "medium"):
        plan = Planner(ALGORITHMS).plan(p, MACHINES[name], max_error=PRECISIONS[precision],
                                        bits=BITS[precision])
        found[precision] = plan.algorithm
        assert plan.error <= PRECISIONS[precision]
    assert found["highest"] in ("cpu_direct", "vendor")
    assert (found["high"], found["medium"]) == ("cpu_direct_bf16x3", "cpu_direct_bf16")
