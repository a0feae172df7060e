"""Phases of strided gradients: each pixel in one of them, each with the taps that reach it."""

from __future__ import annotations

import random

import pytest

from tilewise.core import Epilogue, InvalidProblem, Problem
from tilewise.core.grid import Grid
from tilewise.core.phases import Phase, covers, phases, weights


def gradient(rng: random.Random) -> Problem:
    while True:
        try:
            return Problem(1, 2, rng.randint(1, 14), rng.randint(1, 14), 3, rng.randint(1, 6),
                           rng.randint(1, 6), (rng.randint(1, 4), rng.randint(1, 4)),
                           tuple(rng.randint(0, 3) for _ in range(4)),
                           (rng.randint(1, 3), rng.randint(1, 3)), direction="backward_data")
        except InvalidProblem:
            continue


def by_definition(p: Problem, row: int, axis: int) -> set[tuple[int, int]]:
    """Taps that reach a row (or column) of the input, each with the output that it belongs to."""
    taps, outputs = ((p.r, p.conv_h), (p.s, p.conv_w))[axis]
    found = set()
    for tap in range(taps):
        for output in range(outputs):
            at = output * p.stride[axis] + tap * p.dilation[axis] - p.padding[2 * axis]
            found |= {(tap, output)} if at == row else set()
    return found


def by_phase(phase: Phase, place: int, axis: int) -> set[tuple[int, int]]:
    """The same of one output of a phase's own convolution, without what is padding there."""
    q = phase.problem
    size, taps = (q.h, phase.rows) if axis == 0 else (q.w, phase.cols)
    seen = [(tap, place + i * q.dilation[axis] - q.padding[2 * axis])
            for i, tap in enumerate(taps)]
    return {(tap, at) for tap, at in seen if 0 <= at < size}


def test_every_pixel_has_its_taps() -> None:
    rng, checked = random.Random(0), 0
    for p in (gradient(rng) for _ in range(400)):
        found = phases(p)
        reached = set()
        for phase in found:
            q = phase.problem
            assert q.grid == Grid(*p.stride, p.h, p.w)
            for i in range(q.conv_h):
                for j in range(q.conv_w):
                    row, col = (phase.offset[0] + i * p.stride[0],
                                phase.offset[1] + j * p.stride[1])
                    assert (row, col) not in reached
                    reached.add((row, col))
                    assert by_phase(phase, i, 0) == by_definition(p, row, 0)
                    assert by_phase(phase, j, 1) == by_definition(p, col, 1)
                    checked += 1
        if found:
            others = {(i, j) for i in range(p.h) for j in range(p.w)} - reached
            assert covers(p) == (not others)
            assert not any(by_definition(p, i, 0) and by_definition(p, j, 1) for i, j in others)
    assert checked > 4000


def test_weights_do_not_depend_on_sizes() -> None:
    rng = random.Random(1)
    for p in (gradient(rng) for _ in range(200)):
        if phases(p):
            assert [(one.rows, one.cols, one.problem.dilation) for one in phases(p)] == [
                (one.rows, one.cols, one.problem.dilation) for one in weights(p)]


@pytest.mark.parametrize("text", ["n1c8h9w9k8r3s3p1_f32_backward_data",
                                  "n1c8h9w9k8r3s3u2p1_f32_forward",
                                  "n1c8h9w9k8r3s3u2p1_f32_backward_weight"])
def test_others_have_none(text: str) -> None:
    assert phases(Problem.parse(text)) == ()


def test_a_grid_is_written_and_read() -> None:
    p = Problem.parse("n1c8h9w9k8r3s3p1_f32_forward+bias").with_(grid=Grid(2, 3, 20, 27))
    assert Problem.parse(str(p)) == p
    assert p.result_shape == (1, 8, 20, 27)
    assert p.code != p.with_(grid=None).code
    assert p.code == p.with_(grid=Grid(5, 7, 50, 70, 24)).code  # where, is in words of the frame


@pytest.mark.parametrize("change", [{"direction": "backward_weight"}, {"layout": "nchw"},
                                    {"epilogue": Epilogue(pool=2)}])
def test_a_grid_is_of_channels_last_images(change: dict[str, object]) -> None:
    p = Problem.parse("n1c8h9w9k8r3s3p1_f32_forward").with_(grid=Grid(2, 2, 18, 18))
    with pytest.raises(InvalidProblem, match="grid is asked for with"):
        p.with_(**change)
