"""Gradients of images times numbers of their channels, between unmapped pages: integers are exact.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from support import faults
from support.faults import Patch, changed, patched, replaced
from torch import Tensor

from tilewise.bench.guarded import Mismatch, launch_guarded
from tilewise.core.isa import ISA
from tilewise.core.problem import Problem
from tilewise.core.schedule import Schedule
from tilewise.core.target import Target
from tilewise.kernels.cpu.between import excitation
from tilewise.kernels.cpu.emit.launch import launcher

HOST = Target.host(threads=2)
ROWS = [name for name, row in ISA.items() if row.lanes <= HOST.lanes
        and HOST.row.machines == row.machines and not row.matrix]
SHAPES = [(1, 1, 1), (3, 1, 5), (2, 7, 16), (5, 100, 17), (1, 513, 33), (2, 4096, 3), (3, 900, 130),
          (1, 5000, 64)]


class Case(NamedTuple):
    images: int
    pixels: int
    channels: int
    row: str = ROWS[0]


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def check_case(case: Case) -> None:
    """At the start and at the end of a page, on one thread and on two."""
    n, pixels, c, row = case
    grad, x, scale = draw(0, n, pixels, c), draw(1, n, pixels, c), draw(2, n, c)
    words, scratch = excitation.sizes(n, pixels, c, ISA[row].lanes)
    kernel = launcher(excitation.make, Problem(1, 1, 1, 1, 1, 1, 1), Schedule(), ISA[row],
                      sizes=words)
    for threads, side in ((1, "start"), (2, "end")):
        given = {"x": grad.flatten(), "weight": x.flatten(), "bias": scale.flatten()}
        found = launch_guarded(kernel, given, {"y": x.numel(), "residual": n * c,
                                               "scratch": scratch}, 1, threads, side)
        of_x, of_scale = grad * scale[:, None], (grad * x).sum(1)
        if not torch.equal(found["y"].view(x.shape), of_x):
            raise Mismatch(f"{case}: the gradient of the images")
        if not torch.equal(found["residual"].view(n, c), of_scale):
            raise Mismatch(f"{case}: the gradient of the numbers")


@pytest.mark.parametrize("row", ROWS)
def test_shapes(row: str) -> None:
    for shape in SHAPES:
        check_case(Case(*shape, row))


def test_many_pixels_cost_no_digits() -> None:
    """Sums are float64: a sum of 2^24 and ones keeps all of them."""
    pixels = 5000
    grad, x = torch.ones(1, pixels, 1), torch.ones(1, pixels, 1)
    grad[0, 0] = x[0, 0] = 4096.0
    grad[0, -1] = -x[0, -1]
    words, scratch = excitation.sizes(1, pixels, 1, HOST.lanes)
    kernel = launcher(excitation.make, Problem(1, 1, 1, 1, 1, 1, 1), Schedule(), HOST.row,
                      sizes=words)
    found = launch_guarded(kernel, {"x": grad.flatten(), "weight": x.flatten(),
                                    "bias": torch.ones(1)},
                           {"y": pixels, "residual": 1, "scratch": scratch}, 1, 2, "end")
    assert float(found["residual"]) == float((grad.double() * x.double()).sum().float())


# deliberate faults


class Fault(NamedTuple):
    apply: Patch
    case: Case


def check(fault: Fault) -> None:
    with patched(fault.apply):
        check_case(fault.case)


MUTATIONS = {
    "sums do not begin at zero": Fault(
        replaced(excitation, "put", lambda *_: None), Case(2, 100, 17)),
    "parts are not added": Fault(
        replaced(excitation, "add_parts", lambda *_: None), Case(1, 5000, 64)),
    "rows are cut at half": Fault(
        changed(excitation, "sizes_of_groups", lambda found: (
            [*found[0][:7], found[0][7] // 2, *found[0][8:]], found[1])), Case(1, 513, 33)),
    "a pixel beyond the end": Fault(
        changed(excitation, "sizes_of_groups", lambda found: (
            [found[0][0], found[0][1] + 1, *found[0][2:]], found[1])), Case(1, 513, 33)),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    return faults.outcomes("test_excitation")


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_is_noticed(outcomes: dict[str, list[str]], name: str) -> None:
    faults.assert_noticed(outcomes[name])
