"""The choice among algorithms: in order, with reasons, and right whatever is chosen."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from support.problems import convolve, error, expected, random_problem

import tilewise
from tilewise.algorithms import ALGORITHMS
from tilewise.conv.running import ENGINE
from tilewise.core import (
    Algorithm,
    InvalidSchedule,
    NoAlgorithm,
    Problem,
    Schedule,
    Target,
    TilewiseError,
)
from tilewise.planner import Planner
from tilewise.planner.classes import representative
from tilewise.planner.layers import MANY, NEAR, SOON
from tilewise.planner.measure import interleaved
from tilewise.runtime.engine import random_operands

HOST = Target.host(threads=2).with_(hertz=2.5e9 + 1, bandwidth=0.0)  # whatever tests measure
PROBLEMS = [Problem.parse(name) for name in (
    "n1c64h28w28k64r3s3p1_f32_forward+bias+relu",
    "n1c3h60w60k16r5s5p2_f32_nchw_forward",
    "n2c32h14w14k32r3s3p1g32_f32_forward+relu",
    "n1c128h14w14k64r1s1_f32_forward+bias+residual",
    "n1c8h8w8k8r3s3p1_f64_forward",
)]
each_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=str)


@pytest.fixture
def planner() -> Planner:
    """One that can run plans and has learned nothing."""
    return Planner(ALGORITHMS, start=ENGINE.start)


# estimates


@each_problem
def test_candidates_are_in_order(planner: Planner, problem: Problem) -> None:
    found = planner.candidates(problem, HOST)
    assert {c.algorithm for c in found} == {a.name for a in ALGORITHMS}
    planned = [c.plan is not None for c in found]
    assert planned == sorted(planned, reverse=True)  # refusals last
    times = [c.plan.seconds for c in found if c.plan]
    assert times == sorted(times)
    assert len(times) >= 2
    for c in found:
        assert bool(c.reasons) == (c.plan is None)
        assert all("needs" in reason for reason in c.reasons)
    assert planner.plan(problem, HOST) == found[0].plan


def test_the_cheapest_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    for cheapest in ("reference", "vendor", "cpu_direct"):
        for algorithm in ALGORITHMS:
            seconds = 1e-6 if algorithm.name == cheapest else 1.0
            monkeypatch.setattr(algorithm, "cost", lambda p, t, s, seconds=seconds: seconds)
        assert Planner(ALGORITHMS).plan(PROBLEMS[0], HOST).algorithm == cheapest


def test_passes_are_paid_for(planner: Planner) -> None:
    """The same kernel with more around it costs more."""
    bare = Problem.parse("n1c64h28w28k64r3s3p1_f32_forward")
    costs = [planner.plan(p, HOST, algorithm="vendor").seconds for p in (
        bare, Problem.parse(f"{bare}+relu"), Problem.parse(f"{bare}+residual+relu"),
        Problem.parse(f"{bare}+residual+relu+pool2"))]
    assert costs == sorted(set(costs))
    planes, last = (planner.plan(bare.with_(layout=layout), HOST, algorithm="cpu_direct")
                    for layout in ("nchw", "nhwc"))
    assert planes.before == ("to_nhwc",)
    assert planes.after == ("to_nchw",)
    assert last.before == last.after == ()
    assert planes.seconds > last.seconds


def test_nothing_can_run() -> None:
    planner = Planner([a for a in ALGORITHMS if a.name in ("cpu_direct", "cpu_pointwise")])
    with pytest.raises(NoAlgorithm) as caught:
        planner.plan(PROBLEMS[-1], Target("cpu", "avx512", 2))
    assert str(caught.value) == (
        "no algorithm can run n1c8h8w8k8r3s3p1_f64_forward on cpu:avx512:t2:\n"
        "  cpu_pointwise: dtype is f64, needs f32; filter is 3x3, needs 1x1; "
        "padding is (1, 1, 1, 1), needs 0\n"
        "  cpu_direct:    dtype is f64, needs f32")
    assert set(caught.value.reasons) == {"cpu_direct", "cpu_pointwise"}


def test_a_direction_that_nobody_runs() -> None:
    forward = [a for a in ALGORITHMS if a.directions == {"forward"} and a.device == "cpu"]
    with pytest.raises(NoAlgorithm) as caught:
        Planner(forward).plan(Problem.parse("n1c8h8w8k8r3s3p1_f32_backward_weight"), HOST)
    assert all(f"{a.name}:" in str(caught.value) for a in forward)
    assert str(caught.value).count("direction is backward_weight, needs forward") == len(forward)


def test_a_gradient_of_the_input_is_a_forward_convolution(planner: Planner) -> None:
    plan = planner.plan(Problem.parse("n1c8h9w7k4r3s5p1-0x4_f32_backward_data"), HOST,
                        algorithm="cpu_direct")
    assert str(plan.inner) == "n1c4h8w11k8r3s5p1-2x0_f32_forward"
    strided = Problem.parse("n1c8h9w7k4r3s3u2_f32_backward_data")
    able = {a.algorithm for a in planner.candidates(strided, HOST) if a.plan}
    assert able >= {"vendor", "reference", "cpu_phases", "cpu_phases_winograd"}
    assert all(name.startswith("cpu_phases") for name in able - {"vendor", "reference"})


def test_a_schedule_that_does_not_exist(planner: Planner) -> None:
    with pytest.raises(InvalidSchedule, match=r"tile_h=999 is not in the space of cpu_direct"):
        planner.plan(PROBLEMS[0], HOST, algorithm="cpu_direct", schedule=Schedule(tile_h=999))


def test_an_effort_that_does_not_exist(planner: Planner) -> None:
    with pytest.raises(TilewiseError, match=r"effort is 'mesure', needs one of estimate, "):
        planner.plan(PROBLEMS[0], HOST, effort="mesure")


def test_max_error_excludes(planner: Planner) -> None:
    found = planner.candidates(PROBLEMS[0], HOST, max_error=3e-7)
    by_name = {c.algorithm: c for c in found}
    assert by_name["reference"].plan is not None
    assert by_name["cpu_direct"].reasons[0].startswith("error is up to ")
    assert by_name["cpu_direct"].reasons[0].endswith(", needs at most 3.0e-07")
    kept = {c.algorithm for c in found if c.plan}
    assert kept == {"reference", *(a.name for a in ALGORITHMS if a.baseline)}
    assert planner.plan(PROBLEMS[0], HOST, max_error=3e-7).algorithm in kept


def test_code_that_serves_another_size_errs_no_more() -> None:
    """Sums of a weight's gradient are as long as the image is large."""
    p = Problem.parse("n1c64h14w14k64r3s3p1_f32_backward_weight")
    planner = Planner(ALGORITHMS)
    asked = planner.plan(p, HOST).error
    for side in (14, 20, 28, 56, 112):
        plan = planner.plan(p.with_(h=side, w=side), HOST, max_error=asked)
        assert plan.error <= asked or planner.algorithm(plan.algorithm).baseline, side


# measurements


@each_problem
def test_measured_plans(planner: Planner, problem: Problem) -> None:
    plan = planner.plan(problem, HOST, effort="measure")
    assert plan.source == "measured"
    timed = planner.measure([c.plan for c in planner.candidates(problem, HOST) if c.plan])
    assert [p.seconds for p in timed] == sorted(p.seconds for p in timed)
    assert all(p.source == "measured" and 0 < p.seconds < 10 for p in timed)
    vendor = [p.seconds for p in timed if p.algorithm == "vendor"]
    assert len(vendor) == 1  # always timed
    assert timed[0].seconds <= vendor[0]


def test_vendor_is_timed_however_slow_it_looks(planner: Planner,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates that are wrong by any factor cannot make a measured plan slower than torch."""
    for algorithm in ALGORITHMS:
        seconds = 1e-9 if algorithm.name == "reference" else 1.0
        monkeypatch.setattr(algorithm, "cost", lambda p, t, s, seconds=seconds: seconds)
    assert planner.plan(PROBLEMS[0], HOST).algorithm == "reference"
    assert planner.plan(PROBLEMS[0], HOST, effort="measure").algorithm == "vendor"


def test_a_planner_that_cannot_run_plans() -> None:
    with pytest.raises(TilewiseError, match="needs a planner that can run plans"):
        Planner(ALGORITHMS).plan(PROBLEMS[0], HOST, effort="measure")


# whatever is chosen is right


class Bare(Algorithm):
    """Delegates to another algorithm, and fuses nothing but what it must."""

    name, fuses, layouts, takes = "bare", frozenset({"bias"}), frozenset({"nhwc"}), "addresses"

    def __init__(self, inner: Algorithm) -> None:
        for part in ("reject", "error", "space", "default", "cost", "workspace", "prepare",
                     "build"):
            setattr(self, part, getattr(inner, part))


@pytest.mark.parametrize("steps", ["relu", "residual", "residual+relu", "bias+residual+relu",
                                   "bias+residual+relu+pool2", "gelu+pool3", "bias+silu"])
@pytest.mark.parametrize("layout", ["", "_nchw"])
def test_what_is_not_fused_is_a_pass_of_its_own(monkeypatch: pytest.MonkeyPatch, steps: str,
                                                layout: str) -> None:
    p = Problem.parse(f"n2c8h9w10k12r3s3p1_f32{layout}_forward+{steps}")
    bare = Bare(next(a for a in ALGORITHMS if a.name == "cpu_direct"))
    monkeypatch.setattr(ENGINE.planner, "algorithms", [*ALGORITHMS, bare])
    plan = ENGINE.planner.plan(p, HOST, algorithm="bare")
    rest = tuple(step for step in steps.split("+") if step != "bias")
    assert plan.inner.epilogue.steps == (("bias",) if "bias" in steps else ())
    assert plan.after == rest + (("to_nchw",) if layout else ())
    operands = random_operands(p)
    assert error(convolve(p, operands, "bare"), expected(p, operands)) < 1e-5
    ENGINE.executables.clear()


@pytest.fixture
def random_costs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Every algorithm's estimate is drawn by lot; counts the plans that are built."""
    rng, built = random.Random(0), Counter[str]()
    for algorithm in ALGORITHMS:
        monkeypatch.setattr(algorithm, "cost", lambda p, t, s: rng.random())

    def counted(plan: tilewise.Plan) -> object:
        built[plan.algorithm] += 1
        return build(plan)

    build = ENGINE.build
    monkeypatch.setattr(ENGINE, "build", counted)
    ENGINE.executables.clear()
    yield built
    ENGINE.executables.clear()


def test_any_choice_is_right(random_costs: Counter[str]) -> None:
    rng = random.Random("any choice")
    for _ in range(120):
        p = random_problem(rng)
        operands = random_operands(p)
        assert error(convolve(p, operands), expected(p, operands)) < 2e-5, p
    # every one that keeps all bits was reached; one is for large weights alone
    assert set(random_costs) == {name for name in tilewise.algorithms() if name != "cpu_few_rows"
                                 and ENGINE.planner.algorithm(name).bits == 24}
    assert sum(random_costs.values()) >= 50


# the clock


def sleeper(seconds: float) -> Callable[[], None]:
    return lambda: time.sleep(seconds)


def test_interleaved_ranks_by_time() -> None:
    slow, fast = interleaved([sleeper(0.004), sleeper(0.001)], rounds=5, sample=0.001)
    assert 0.004 <= slow.minimum <= slow.median
    assert 0.001 <= fast.minimum < slow.minimum
    assert slow.spread >= 0
    assert math.isfinite(fast.spread)


def test_interleaved_takes_turns() -> None:
    calls: list[int] = []
    interleaved([lambda i=i: calls.append(i) or time.sleep(0.002) for i in range(3)],
                rounds=4, sample=0.001)
    assert calls[-12:] == [0, 1, 2] * 4
    assert interleaved([]) == []


def test_interleaved_stops_in_time() -> None:
    start = time.perf_counter()
    (timing,) = interleaved([sleeper(0.02)], rounds=1000, sample=0.01, budget=0.1)
    assert time.perf_counter() - start < 2
    assert timing.minimum >= 0.02


def test_interleaved_repeats_short_calls() -> None:
    count = 0

    def run() -> None:
        nonlocal count
        count += 1

    interleaved([run], rounds=2, sample=0.002)
    assert count > 200


RESNET = ("n1c3h224w224k64r7s7u2p3_f32_forward+bias+relu",
          "n1c64h56w56k64r3s3p1_f32_forward+bias+relu",
          "n1c64h56w56k64r3s3p1_f32_forward+bias+residual+relu",
          "n1c64h56w56k128r3s3u2p1_f32_forward+bias+relu", "n1c64h56w56k128r1s1u2_f32_forward+bias",
          "n1c128h28w28k128r3s3p1_f32_forward+bias+relu",
          "n1c256h14w14k256r3s3p1_f32_forward+bias+relu",
          "n1c256h14w14k512r1s1u2_f32_forward+bias", "n1c512h7w7k512r3s3p1_f32_forward+bias+relu")


def test_batches_share_code():
    """A server with batches of 1 to 8 stalls for few of them."""
    planner, known = Planner(ALGORITHMS), set()
    new = {}
    for n in (1, 8, 4, 2, 3, 5, 6, 7):
        before = len(known)
        for text in RESNET:
            plan = planner.plan(Problem.parse(text).with_(n=n), HOST, max_error=2e-5, bits=24)
            known.add((text, plan.algorithm, plan.schedule))
        new[n] = len(known) - before
    assert new[1] == len(RESNET)
    assert new[8] + new[4] + new[2] <= len(RESNET) * 4 // 3  # without sharing nearly thrice as many
    assert new[3] + new[5] + new[6] + new[7] == 0


def test_sizes_of_a_class_share_code():
    """A little larger or smaller, or another aspect ratio: nothing new to compile."""
    for text in RESNET:
        p, planner = Problem.parse(text), Planner(ALGORITHMS)
        h, w = p.h, p.w
        plans = [planner.plan(p.with_(h=height, w=width), HOST)
                 for height, width in ((h, w), (h + 1, w), (h - 1, w + 1), (h, w - 1))]
        assert len({(plan.algorithm, plan.schedule) for plan in plans}) == 1, p


def test_code_that_a_layer_has_is_preferred_if_it_is_nearly_as_good():
    """As many sizes as a layer looks at, in one order: few codes, each within what it may cost."""
    for text in RESNET[1:]:
        p, planner, used = Problem.parse(text), Planner(ALGORITHMS), {}
        for h in (56, 28, 112, 14, 80, 40, 7, 10):
            like = p.with_(h=h, w=h)
            plan = planner.plan(like, HOST, max_error=2e-5, bits=24)
            best = Planner(ALGORITHMS).plan(like, HOST, max_error=2e-5, bits=24)
            assert plan.seconds <= max(NEAR * best.seconds, best.seconds + SOON) * 1.001, plan
            inner = plan.inner, plan.target, plan.schedule
            used[planner.algorithm(plan.algorithm).request(*inner).key] = plan
        assert len(used) <= 6, p


@pytest.mark.parametrize("text", RESNET[1:])
def test_a_layer_that_met_many_sizes_takes_what_it_has(text: str, monkeypatch):
    """Whatever comes next: a thin image, a tiny one. Twice the largest is looked at anew."""
    p, planner, looked = Problem.parse(text), Planner(ALGORITHMS), []

    def code_of(h: int, w: int) -> str:
        plan = planner.plan(p.with_(h=h, w=w), HOST, max_error=2e-5, bits=24)
        what = plan.inner, plan.target, plan.schedule
        return planner.algorithm(plan.algorithm).request(*what).key

    keys = {code_of(40 + 7 * i, 30 + 5 * i) for i in range(MANY)}
    ranked = planner._ranked
    monkeypatch.setattr(planner, "_ranked", lambda *a, **k: looked.append(a) or ranked(*a, **k))
    for h, w in ((1, 90), (90, 2), (3, 3), (31, 17), (80, 60), (1, 1), (17, 150), (7, 7)):
        assert code_of(h, w) in keys, (h, w)
    assert not looked
    code_of(300, 300)
    assert looked, "an image that is far larger may need other code"


def test_strided_gradients_are_planned_for_their_own_size():
    """Their phases are small images: as one of the class next to it, this one took far longer."""
    p = Problem.parse("n1c512h32w32k1024r2s2u2_f32_backward_data")
    plan = Planner(ALGORITHMS).plan(p, HOST, max_error=2e-5, bits=24)
    best = min(answer.plan.seconds for answer in
               Planner(ALGORITHMS).candidates(p, HOST, 2e-5, 24) if answer.plan)
    assert plan.seconds <= best * 1.001


def test_what_torch_ran_for_one_pixel_is_ours_for_more():
    """A squeeze-and-excitation's layer, then one of the same channels on an image."""
    pixel = Problem.parse("n1c64h1w1k64r1s1_f32_forward+bias").with_(layout="nhwc")
    planner, t = Planner(ALGORITHMS), Target("cpu", "avx512", 2, l2=2 << 20)
    assert planner.plan(pixel, t).algorithm == "vendor"
    assert planner.plan(pixel.with_(h=14, w=14), t).algorithm != "vendor"


def test_a_layer_that_met_many_sizes_may_still_be_torchs():
    p = Problem.parse("n8c64h31w31k16r1s1g8_f32_forward").with_(layout="nhwc")
    planner, t = Planner(ALGORITHMS), Target("cpu", "avx512", 2, l2=2 << 20)
    assert planner.plan(p, t).algorithm == "vendor"
    for size in range(2, 14):
        planner.plan(p.with_(n=1, h=size, w=size), t)
    assert planner.plan(p.with_(h=45, w=45), t).algorithm == "vendor"


@pytest.mark.parametrize(("channels", "l1", "most"), [
    (1024, 32 << 10, 8), (1024, 48 << 10, 12), (2048, 32 << 10, 8), (512, 32 << 10, 16),
    (1000, 32 << 10, 28)])
def test_pixels_of_a_tile_have_room_in_the_first_cache(channels: int, l1: int, most: int):
    """Those of a power of two of channels share places; 14 of 1024 took 1.26 times as long."""
    p = Problem.parse(f"n1c{channels}h28w28k256r1s1_f32_forward").with_(layout="nhwc")
    t = Target("cpu", "avx512", 2, l1=l1)
    for name in ("cpu_direct", "cpu_pointwise"):
        schedule = Planner(ALGORITHMS).plan(p, t, algorithm=name).schedule
        assert schedule.tile_h * schedule.tile_w <= most


def test_the_same_size_again_is_not_another():
    p, planner = Problem.parse(RESNET[1]), Planner(ALGORITHMS)
    for _ in range(2 * MANY):
        planner.plan(p, HOST, max_error=2e-5, bits=24)
    (_, layer), = planner._layers.items()
    assert len(layer.sizes) == 1
    assert not layer.is_versed(p)


def test_shared_code_is_the_same_for_any_number_of_threads():
    """And so are the bits of a result."""
    rng, problems = random.Random(0), [Problem.parse(text) for text in RESNET]
    problems += [random_problem(rng) for _ in range(25)]
    for p in (p.with_(n=n) for p in problems for n in (2, 6)):
        plans = [Planner(ALGORITHMS).plan(p, HOST.with_(threads=threads))
                 for threads in (1, 2, 16)]
        assert len({(plan.algorithm, plan.schedule.get("tile_h"), plan.schedule.get("tile_w"))
                    for plan in plans}) == 1, p


def test_no_answer_is_lost_to_shared_code():
    rng = random.Random(1)
    for _ in range(40):
        p = random_problem(rng).with_(n=2)
        asked = {"max_error": 2e-4, "bits": 16}
        planner = Planner(ALGORITHMS)
        kinds = [sorted(a.algorithm for a in answers)
                 for answers in (planner.candidates(p, HOST, **asked),
                                 planner._ranked(p, HOST, **asked))]
        assert kinds[0] == kinds[1], p


def test_a_long_image_is_not_planned_as_a_square():
    """One row of twenty thousand pixels: three quarters of a Winograd tile would be wasted."""
    p = Problem.parse("n1c64h1w20000k64r3s3p1_f32_forward")
    found = Planner(ALGORITHMS).plan(p, HOST, max_error=2e-5, bits=24)
    exact = min(answer.plan.seconds for answer in
                Planner(ALGORITHMS).candidates(p, HOST, 2e-5, 24) if answer.plan)
    assert found.seconds <= NEAR * exact


def test_sizes_share_a_prepared_weight_where_they_share_code():
    """Blocks are chosen for a size; the form of the weight is not."""
    planner, forms = Planner(ALGORITHMS), {}
    for h in (14, 28, 56, 112, 224):
        plan = planner.plan(Problem.parse(f"n1c64h{h}w{h}k128r3s3u2p1_f32_forward"), HOST)
        algorithm = planner.algorithm(plan.algorithm)
        what = plan.inner, plan.target, plan.schedule
        forms.setdefault(algorithm.request(*what).key, set()).add(
            str(algorithm.weight_of(plan.inner, plan.schedule)))
    assert all(len(form) == 1 for form in forms.values())


def test_numbers_of_threads_share_what_a_layer_has():
    """And so the bits of a result, whatever sizes were met with one of them."""
    asked = {"max_error": 2e-5, "bits": 24}
    for text in (RESNET[1], RESNET[5]):
        p = Problem.parse(text)
        for first, second in ((5, 7), (5, 10), (56, 10), (10, 28), (20, 5)):
            planner = Planner(ALGORITHMS)
            planner.plan(p.with_(h=first, w=first), HOST, **asked)
            forms = set()
            for threads in (2, 1, 16):
                plan = planner.plan(p.with_(h=second, w=second), HOST.with_(threads=threads),
                                    **asked)
                algorithm = planner.algorithm(plan.algorithm)
                forms.add((plan.algorithm, str(algorithm.weight_of(plan.inner, plan.schedule))))
            assert len(forms) == 1, (str(p), first, second)


@pytest.mark.parametrize(("line", "own"), [
    ("n1c8h64w64k8r3s3p4d4", True), ("n1c8h64w64k8r3s3p1x2d1x4", True),
    ("n1c8h10w64k8r3s3p1x2d1x2", False), ("n1c8h64w64k8r3s3p2d2", False),
    ("n1c8h64w64k8r3s3p1", False)])
def test_images_of_few_pixels_a_phase_are_planned_for_their_own_size(line: str, own: bool) -> None:
    p = Problem.parse(line + "_f32_forward")
    assert (representative(p) == p) is own


@pytest.mark.parametrize("width", [1, 100, 2560, 25088, 441000])
def test_a_class_is_about_as_long_as_its_lines(width: int) -> None:
    p = Problem.parse(f"n1c96h1w{width}k384r1s1_f32_forward")
    assert 0.7 <= representative(p).w / width <= 1.5
