"""gpu_winograd in the interpreter: hundreds of problems of both directions and all types."""

from __future__ import annotations

import random

import pytest
import torch
from running import check, drawn, expected, run
from support.harness import sample

from tilewise.algorithms import gpu_winograd
from tilewise.algorithms.gpu_winograd import GpuWinograd
from tilewise.core import Epilogue, InvalidProblem, Problem, Schedule, Target
from tilewise.core.gpu import GPUS
from tilewise.planner.planner import inner_problem

COUNT = sample(200, 20)  # problems of a direction and type
SPLIT = ("tf32x3", "bf16x6")
PLAIN = GpuWinograd()
each_direction = pytest.mark.parametrize("direction", ["forward", "backward_data"])


def problems(direction: str, dtypes: tuple[str, ...], seed: int = 0) -> list[Problem]:
    """Small ones: odd sizes, few channels, any padding that the filter reaches."""
    rng, found = random.Random(f"{direction} {dtypes} {seed}"), []
    while len(found) < COUNT:
        try:
            found.append(_problem(rng, direction, dtypes[len(found) % len(dtypes)]))
        except InvalidProblem:
            continue
    return found


def _problem(rng: random.Random, direction: str, dtype: str) -> Problem:
    c, k = (rng.choice((1, 2, 3, 5, 8, 16, 17, 24, 33)) for _ in range(2))
    forward = direction == "forward"
    epilogue = Epilogue(forward and rng.random() < 0.5, forward and rng.random() < 0.3,
                        rng.choice((None, "relu")) if forward else None,
                        rng.choice((1, 1, 2)) if forward else 1)
    sides = tuple(rng.randint(0, 3 if forward else 2) for _ in range(4))
    return Problem(rng.choice((1, 1, 2)), c, rng.randint(1, 7), rng.randint(1, 7), k, 3, 3,
                   padding=sides, dtype=dtype, direction=direction, epilogue=epilogue)


def any_schedule(algorithm: GpuWinograd, p: Problem, t: Target, seed: int) -> Schedule:
    """One of the space; now and then with programs so small that they have neighbours."""
    rng, inner = random.Random(seed), inner_problem(algorithm, p)
    s = algorithm.space(inner, t).sample(rng, algorithm.default(inner, t))
    assert s in algorithm.space(inner, t)
    return s if seed % 4 else s.with_(tiles=rng.choice((4, 8)), channels=rng.choice((16, 32)))


@each_direction
@pytest.mark.parametrize("dtypes", [("f32",), ("f16", "bf16")], ids="+".join)
def test_results_are_within_the_declared_bound(direction, dtypes):
    worst = dict.fromkeys(dtypes, 0.0)
    for seed, p in enumerate(problems(direction, dtypes)):
        t = Target.gpu(tuple(GPUS)[seed // 2 % len(GPUS)])
        error = check(PLAIN, p, t, any_schedule(PLAIN, p, t, seed), seed=seed)
        worst[p.dtype] = max(worst[p.dtype], error)
    assert min(worst.values()) > 0.1, f"a bound is far from what is measured: {worst}"


@each_direction
def test_split_precisions_are_within_their_bounds(direction):
    worst = dict.fromkeys(SPLIT, 0.0)
    for seed, p in enumerate(problems(direction, ("f32",), seed=1)):
        precision = SPLIT[seed % len(SPLIT)]
        algorithm, t = GpuWinograd(precision), Target.gpu("sm_90")
        s = any_schedule(algorithm, p, t, seed)
        worst[precision] = max(worst[precision], check(algorithm, p, t, s, seed=seed))
    assert min(worst.values()) > 0.02, f"a bound is far from what is measured: {worst}"


@pytest.mark.parametrize("tile", [2, 4])
def test_images_that_do_not_fit_into_scratch_take_turns(tile, monkeypatch):
    p = Problem.parse("n5c3h6w5k4r3s3p1_f32_forward+bias+residual+relu+pool2")
    t = Target.gpu("sm_90")
    s = PLAIN.default(p, t).with_(tile=tile)
    assert gpu_winograd.images(p, s) >= 5
    monkeypatch.setattr(gpu_winograd, "MOST_SCRATCH", 2 * gpu_winograd._scratch(p, s) + 7)
    assert gpu_winograd.images(p, s) == 2
    check(PLAIN, p, t, s)


def test_nan_and_infinity_stay_where_a_tile_sees_them():
    p = Problem.parse("n1c8h6w6k16r3s3p1_f32_forward+bias+relu+pool2")
    t = Target.gpu("sm_90")
    o, dy = drawn(p, "floats", 0)
    o.x[0, 0, 0, 0] = torch.nan
    y = run(PLAIN, p, t, PLAIN.default(p, t).with_(tile=2), o, dy)
    want, _ = expected(p, o, dy)
    assert y[..., 0, 0].isnan().all()
    torch.testing.assert_close(y[..., 1:, 1:].double(), want[..., 1:, 1:], rtol=1e-5, atol=1e-5)


def test_an_empty_batch_is_empty():
    p = Problem.parse("n0c8h6w6k16r3s3p1_f32_forward+bias")
    o, dy = drawn(p, "floats", 0)
    t = Target.gpu("sm_90")
    assert run(PLAIN, p, t, PLAIN.default(p, t), o, dy).shape == (0, 16, 6, 6)
