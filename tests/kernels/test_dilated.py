"""Dilated convolutions: Winograd by phases, and direct sums without the taps that see padding."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support import faults, harness
from support.cases import ROWS
from support.faults import changed, replaced
from support.harness import GENERATED, ON_MATRIX
from support.matrix_unit import needs_amx
from support.mutations import Mutation, check

from tilewise.algorithms.cpu_winograd import tiles_of
from tilewise.core import Epilogue, InvalidProblem, Problem, Schedule, Target
from tilewise.core.cut import fitted, piece_sizes
from tilewise.core.taps import cols_seen, rows_seen
from tilewise.kernels.cpu.conv import (
    direct,
    direct_taps,
    winograd_geometry,
    winograd_output,
    winograd_tiles,
)
from tilewise.kernels.cpu.emit import Index
from tilewise.kernels.cpu.emit.launch import KERNELS
from tilewise.planner.planner import inner_problem

__all__ = ["check"]  # called by faults

SIDES = ((1, 1), (1, 40), (2, 3), (7, 8), (13, 11), (40, 40))
ENDS = ("+bias+residual+relu", "+bias+silu")
WINOGRAD = Schedule(tile_h=4, tile_w=2, order="channels", rows=3, vectors=1, groups=2, unroll=1,
                    k_parts=1, streaming=False)
DIRECT = Schedule(tile_h=1, tile_w=8, vectors=1, unroll=2, block_rows=2, block_cols=4, split=1,
                  k_parts=1, streaming=False)
ON_UNIT = Schedule(tile_h=2, tile_w=4, order="positions", rows=16, vectors=1, groups=1, k_parts=1,
                   streaming=False)


def every_size(dilation: tuple[int, int], epilogue: str) -> list[Problem]:
    """Images of one pixel to 40x40, padding up to twice the dilation."""
    rng, (down, across) = random.Random(str(dilation)), dilation
    found = []
    for h, w in SIDES:
        while True:
            top, bottom, left, right = (rng.randint(0, 2 * d) for d in (down, down, across, across))
            try:
                p = Problem.parse(f"n2c5h{h}w{w}k21r3s3p{top}-{bottom}x{left}-{right}"
                                  f"d{down}x{across}_f32_forward{epilogue}")
            except InvalidProblem:
                continue
            if p.is_padded:
                found.append(p)
                break
    return found


def check_sizes(algorithm: Any, t: Target, s: Schedule, dilation: tuple[int, int],
                epilogue: str) -> None:
    """All sizes and paddings, by one compiled kernel."""
    before = None
    for number, p in enumerate(every_size(dilation, epilogue)):
        assert s in algorithm.space(p, t)
        assert harness.check(algorithm, p, t, s, number) == 2
        before = before or len(KERNELS)
        assert len(KERNELS) == before, f"{p} was compiled for itself"


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(("name", "s"), [("cpu_winograd", WINOGRAD), ("cpu_direct", DIRECT)])
def test_one_kernel_serves_all_sizes(row: str, name: str, s: Schedule) -> None:
    for dilation, end in zip(((5, 2), (12, 12)), ENDS, strict=True):
        check_sizes(GENERATED[name], Target.host(row, 2), s, dilation, end)


@needs_amx
def test_one_kernel_of_the_matrix_unit_serves_all_sizes() -> None:
    check_sizes(ON_MATRIX["cpu_winograd_bf16x6"], Target.host("amx", 2), ON_UNIT, (3, 1), ENDS[0])


def random_dilated(rng: random.Random, algorithm: Any, t: Target) -> Problem:
    """Any filter, dilation and padding; stride and groups if the algorithm has them."""
    while True:
        p = _drawn(rng)
        if p and p.dilation != (1, 1) and p.flops < 2e7 and not algorithm.reject(p, t):
            return p


def _drawn(rng: random.Random) -> Problem | None:
    dilation = rng.randint(1, 4), rng.randint(1, 6)
    r, s = rng.choice(((3, 3), (3, 3), (2, 5), (1, 3), (4, 1), (7, 2)))
    pads = [rng.randint(0, 2 * d) for d in (dilation[0],) * 2 + (dilation[1],) * 2]
    stride = rng.choice(((1, 1), (1, 1), (2, 3)))
    groups = rng.choice((1, 1, 1, 2))
    end = Epilogue(rng.random() < .5, rng.random() < .5, rng.choice((None, "relu", "silu")))
    try:
        return Problem(rng.randint(1, 3), groups * rng.randint(1, 17), rng.randint(1, 24),
                       rng.randint(1, 24), groups * rng.randint(1, 40), r, s, stride, tuple(pads),
                       dilation, groups, epilogue=end)
    except InvalidProblem:
        return None


def check_random(algorithm: Any, t: Target, count: int) -> None:
    rng = random.Random(f"{algorithm.name} {t}")
    for number in range(count):
        p = random_dilated(rng, algorithm, t)
        s = (harness.random_schedule(algorithm, p, t, rng) if number % 2
             else algorithm.default(p, t))
        harness.check(algorithm, p, t, s, number)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", ["cpu_winograd", "cpu_direct"])
def test_random_dilated_problems(name: str, row: str) -> None:
    check_random(GENERATED[name], Target.host(row, 2), harness.sample(500, 5))


@needs_amx
@pytest.mark.parametrize("name", ["cpu_winograd_bf16x3", "cpu_winograd_bf16x6"])
def test_random_dilated_problems_on_the_matrix_unit(name: str) -> None:
    check_random(ON_MATRIX[name], Target.host("amx", 2), harness.sample(40, 3))


@pytest.mark.parametrize("end", ["+bias+relu+pool2", "+relu+mask"])
def test_windows_and_masks_are_refused(end: str) -> None:
    p = Problem.parse("n1c16h16w16k16r3s3p2d2_f32_forward" + end)
    for algorithm in (GENERATED["cpu_winograd"], ON_MATRIX["cpu_winograd_bf16x3"]):
        reasons = algorithm.reject(inner_problem(algorithm, p), Target("cpu", "amx", 2))
        assert reasons == ["dilation is (2, 2) with a pool or a mask, needs 1"]


@pytest.mark.parametrize("line", ["n1c8h64w64k8r3s3p4d4", "n3c8h40w40k8r3s3p12d12",
                                  "n2c8h3w50k8r3s3p36d36", "n1c8h7w9k8r3s3p2d3x2"])
def test_costs_count_the_tiles_that_run(line: str) -> None:
    p = Problem.parse(line + "_f32_forward")
    g = winograd_geometry.Geometry(p, WINOGRAD, 16)
    assert tiles_of(p, 4, 2) == p.n * g.phases * g.tiles


@pytest.mark.parametrize("line", ["n1c8h40w40k8r3s3p24d24", "n1c8h11w9k8r3s5u2x3p4x7d3x4",
                                  "n1c8h3w2k8r3s3p9d4", "n1c8h20w20k8r3s3p1d2"])
def test_costs_count_the_taps_that_see_the_image(line: str) -> None:
    p = Problem.parse(line + "_f32_forward")
    down, across = (sum(n * taps for n, taps in seen(p)) for seen in (rows_seen, cols_seen))
    every = p.conv_h * p.conv_w * p.r * p.s
    assert down * across / every == pytest.approx(p.share_inside)
    assert sum(n for n, _ in cols_seen(p)) == p.conv_w


@pytest.mark.parametrize("limit", [1, 3, 8, 14])
def test_pieces_cover_a_stretch(limit: int) -> None:
    sizes = piece_sizes(limit)
    for length in range(1, 60):
        pieces = list(zip(sizes, fitted(length, sizes), strict=True))
        covered = sum(size * n for size, n in pieces)
        assert length <= covered < length + limit
        assert all(size <= length for size, n in pieces if n)


SEEN = "n2c5h9w21k21r3s3p4x5d4x5_f32_forward+bias+residual"
NARROW = {"tile_w": 4, "vectors": 1}
DILATED = "n2c5h11w19k21r3s3p2x3d2x3_f32_forward+bias+residual"
TILES = {"tile_h": 2, "tile_w": 2}
FIRST_COL = winograd_tiles.first_col


def other_phase(z: Any, tile: Any) -> Index:
    """The column of the phase below."""
    return FIRST_COL(z, winograd_tiles.Place(tile.image + z.phase_cols - 1, tile.row, tile.col))


def one_more(first: Index, end: Index, apart: int) -> Index:
    return winograd_tiles.outputs_from(first, end, apart) + 1


def late(column: Index, step: int) -> Index:
    return REACHES(column, step) + 1


def above(z: Any, row: Index) -> Any:
    """Also a tap that lies in the last row of padding above the image."""
    return direct_taps.Taps(SEEN_ROWS(z, row + 1).first, SEEN_ROWS(z, row).end)


def below(z: Any, row: Index) -> Any:
    """Also a tap that lies in the first row of padding below the image."""
    return direct_taps.Taps(SEEN_ROWS(z, row).first, SEEN_ROWS(z, row - 1).end)


REACHES, SEEN_ROWS = direct_taps._reaches, direct_taps.seen_by_row
MUTATIONS = {
    "a stretch ends late": Mutation(
        replaced(direct_taps, "_reaches", late), "cpu_direct", SEEN, NARROW),
    "a tap above the image": Mutation(
        replaced(direct, "seen_by_row", above), "cpu_direct", SEEN, NARROW),
    "a tap below the image": Mutation(
        replaced(direct, "seen_by_row", below), "cpu_direct", SEEN, NARROW),
    "weights of another tap": Mutation(
        changed(direct.Geometry, "tap_floats", lambda at: at + 1), "cpu_direct", SEEN, NARROW),
    "a stretch has a piece too few": Mutation(
        replaced(direct_taps, "fitted", lambda length, *more: fitted(length - 1, *more)),
        "cpu_direct", SEEN, NARROW),
    "a phase is left out": Mutation(
        changed(winograd_geometry.Geometry, "phases", lambda phases: phases - 1), "cpu_winograd",
        DILATED, TILES),
    "phases are counted in shorter rows": Mutation(
        changed(winograd_geometry.Geometry, "phase_cols", lambda cols: cols - 1), "cpu_winograd",
        DILATED, TILES),
    "outputs of another phase": Mutation(
        replaced(winograd_output, "first_col", other_phase), "cpu_winograd", DILATED, TILES),
    "an output beyond the end of a phase": Mutation(
        replaced(winograd_output, "outputs_from", one_more), "cpu_winograd", DILATED, TILES),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    return faults.outcomes("test_dilated")


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_is_noticed(outcomes: dict[str, list[str]], name: str) -> None:
    faults.assert_noticed(outcomes[name])
