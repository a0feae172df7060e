"""Pools of any window: torch's values, no byte beside them, and faults that are noticed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from support import faults
from support.harness import sample
from support.images import require_same, run_guarded
from torch import Tensor
from torch.nn import functional as F

from tilewise.core.isa import ISA
from tilewise.core.target import Target
from tilewise.kernels.cpu.between import channels, pools
from tilewise.runtime import pools as tensors
from tilewise.runtime import sweeps, windows

HOST = Target.host(threads=2)
ROWS = [name for name, row in ISA.items() if row.lanes <= HOST.lanes
        and HOST.row.machines == row.machines and not row.matrix and name != "scalar"]
NARROW = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 23, 31, 33, 40, 48, 63, 65, 70]


class Mutation(NamedTuple):
    apply: faults.Patch
    kind: str = "max"


def small_tasks(patch: pytest.MonkeyPatch) -> None:
    """Many tasks, and several threads, for little work."""
    for name, value in {"ALONE": 0, "WORTH": 64, "TASKS": 3}.items():
        patch.setattr(tensors, name, value)
    patch.setattr(torch, "get_num_threads", lambda: 3)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    sweeps._known.clear()
    small_tasks(monkeypatch)
    yield
    sweeps._known.clear()


def integers(generator: random.Random, shape: tuple[int, ...]) -> Tensor:
    """Whole numbers: their sums are exact."""
    seeded = torch.Generator().manual_seed(generator.randrange(1 << 30))
    return torch.randint(-99, 100, shape, generator=seeded).float()


def check_max(generator: random.Random, c: int) -> None:
    taps, between, holes = ([generator.randint(1, most) for _ in "hw"] for most in (5, 3, 2))
    before = [generator.randint(0, t // 2) for t in taps]
    options: Any = (taps, between, before, holes, generator.random() < 0.5)
    x = integers(generator, (generator.randint(1, 2), c, *_sizes(generator, taps, holes)))
    for value in ("nan", "inf", "-inf"):
        x.view(-1)[generator.randrange(x.numel())] = float(value)
    expected = F.max_pool2d(x, *options)
    check_one(generator, lambda x, out: tensors.max_pool2d(x, *options, out=out), x, expected)


def check_steps(generator: random.Random, c: int) -> None:
    """Windows so large that columns follow rows."""
    options: Any = generator.choice(((5, 1, 2), (9, 1, 4), ((6, 7), 1, (0, 3)), (13, 1, 6)))
    x = integers(generator, (2, c, generator.randint(13, 20), generator.randint(13, 20)))
    x[0, c // 2, 7, 8], x[1, c // 3, 0, 0] = float("nan"), float("-inf")
    check_one(generator, lambda x, out: tensors.max_pool2d(x, *options, out=out), x,
              F.max_pool2d(x, *options))


def check_average(generator: random.Random, c: int) -> None:
    most = generator.choice((5, 5, 12))  # the largest are summed up in float64
    taps = [generator.randint(1, most) for _ in "hw"]
    options: Any = (taps, [generator.randint(1, 3) for _ in "hw"],
                    [generator.randint(0, t // 2) for t in taps], generator.random() < 0.5,
                    generator.random() < 0.5, generator.choice((None, None, 7, -3)))
    x = integers(generator, (generator.randint(1, 2), c, *_sizes(generator, taps, [1, 1])))
    x[0, 0, 0, 0] = float(generator.choice(("inf", "nan", "1")))
    expected = F.avg_pool2d(x, *options)
    check_one(generator, lambda x, out: tensors.avg_pool2d(x, *options, out=out), x, expected,
              3e-7)


def check_powers(generator: random.Random, c: int) -> None:
    """Averages of 1, 2, 4 and 8 pixels are exact."""
    taps = [generator.choice((1, 2)), generator.choice((1, 2, 4))]
    x = integers(generator, (2, c, *_sizes(generator, taps, [1, 1])))
    expected = F.avg_pool2d(x, taps, 1)
    check_one(generator, lambda x, out: tensors.avg_pool2d(x, taps, 1, out=out), x, expected)


def check_adaptive(generator: random.Random, c: int) -> None:
    x = integers(generator, (generator.randint(1, 2), c, *(
        generator.randint(1, 24) for _ in "hw")))
    size = [generator.choice((1, 2, 3, 7, 9)) for _ in "hw"]
    check_one(generator, lambda x, out: tensors.adaptive_max_pool2d(x, size, out=out), x,
              F.adaptive_max_pool2d(x, size))
    check_one(generator, lambda x, out: tensors.adaptive_avg_pool2d(x, size, out=out), x,
              F.adaptive_avg_pool2d(x, size), 3e-7)


def check_global(generator: random.Random, c: int) -> None:
    x = integers(generator, (generator.randint(1, 3), c, *(
        generator.choice((1, 2, 7, 16, 19)) for _ in "hw")))
    check_one(generator, lambda x, out: tensors.global_average(x, out=out), x,
              x.double().mean((2, 3), keepdim=True).float())


CHECKS = {"max": check_max, "steps": check_steps, "average": check_average,
          "powers": check_powers, "adaptive": check_adaptive, "global": check_global}


def _sizes(generator: random.Random, taps: list[int], holes: list[int]) -> list[int]:
    """At least as large as a window."""
    return [(t - 1) * hole + 1 + generator.randint(0, 8) for t, hole in zip(taps, holes)]


def check_one(generator: random.Random, run: Any, x: Tensor, expected: Tensor,
              error: float = 0.0) -> None:
    gap = generator.choice((0, 0, 1, 5))
    for side in ("start", "end"):
        found = run_guarded(run, x, tuple(expected.shape), gap, side)
        require_same(found, expected, f"{tuple(x.shape)} to {tuple(expected.shape)}", error)


def check(mutation: Mutation) -> None:
    with faults.patched(mutation.apply), pytest.MonkeyPatch.context() as patch:
        small_tasks(patch)
        sweeps._known.clear()
        for c in (3, 16, 37):
            for seed in range(sample(12, 6)):
                CHECKS[mutation.kind](random.Random(seed), c)


MUTATIONS = {
    "NaN loses": Mutation(faults.replaced(
        pools, "larger", lambda known, value: value.maximum(known))),
    "padding is zero": Mutation(faults.replaced(
        channels.Block, "constant", lambda self, f, value: [f.vector(0.0)] * self.vectors)),
    "the rest is a whole vector": Mutation(faults.replaced(
        channels.Block, "store", lambda self, pixel, values: [
            (pixel + self.first).store(value, i * value.lanes)
            for i, value in enumerate(values)])),
    "the rest is forgotten": Mutation(faults.replaced(
        pools, "each_block", lambda f, first, last, widths, body: channels.each_block(
            f, first, first + (last - first) // f.isa.lanes * f.isa.lanes, widths, body))),
    "a window is a row short": Mutation(faults.changed(
        windows.Windows, "_line", lambda line: line._replace(taps=max(1, line.taps - 1)))),
    "a window begins a pixel late": Mutation(faults.changed(
        windows.Windows, "_line", lambda line: line._replace(first=line.first + 1))),
    "sums are not divided": Mutation(faults.replaced(
        pools, "_divided", lambda sums, window: sums), "average"),
    "neighbours are added once": Mutation(faults.replaced(
        pools, "_adding", lambda pixels, squared, add=pools._adding: add(pixels[:1], squared)),
        "global"),
    "the second of two steps is a column late": Mutation(faults.changed(
        tensors, "each", lambda lines: [*lines[1:], lines[0]]), "steps"),
    "a stretch is a row short": Mutation(faults.changed(
        tensors, "stretches", lambda lines: [
            line._replace(taps=line.taps - 1) for line in lines]), "global"),
    "the mean is of one pixel more": Mutation(faults.changed(
        tensors, "whole", lambda lines: [lines[0]._replace(size=lines[0].size + 1)]), "global"),
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("kind", CHECKS)
def test_between_unmapped_pages(row: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_ISA", row)
    generator = random.Random(f"{row} {kind}")
    for c in NARROW:
        for _ in range(sample(3, 1)):
            CHECKS[kind](generator, c)


def test_many_channels() -> None:
    """More than the sums on the stack, and groups that end inside a block."""
    generator = random.Random(5)
    for c in (130, 1024, 1029, 2053):
        for kind in ("max", "powers", "global"):
            CHECKS[kind](generator, c)


def test_large_windows_are_pooled_in_two_steps() -> None:
    images = sweeps.Images(2, 21, 20, 20, 21, 21, 2)
    lines = windows.Windows(5, 1, 2).lines(20)
    assert tensors._in_two_steps(images, lines, lines, (1, 1), (5, 5))
    lines = windows.Windows(3, 2, 1).lines(20)
    assert not tensors._in_two_steps(images, lines, lines, (1, 1), (3, 3))


def test_windows_without_a_pixel_are_minus_infinity() -> None:
    x = torch.ones(1, 3, 3, 3)
    options: Any = (2, 1, 1, 4)
    expected = F.max_pool2d(x, *options)
    assert torch.equal(expected, torch.full_like(expected, float("-inf")))
    check_one(random.Random(1), lambda x, out: tensors.max_pool2d(x, *options, out=out), x,
              expected)


def test_sums_are_as_accurate_as_torchs() -> None:
    """Of values far from zero, whose sums lose digits."""
    for shape in ((1, 64, 7, 7), (1, 96, 56, 56), (1, 5, 300, 301), (1, 16, 112, 112)):
        x = (torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 100).contiguous(
            memory_format=torch.channels_last)
        exact = x.double().mean((2, 3))
        found = tensors.global_average(x, keepdim=False)
        assert found is not None
        mine = (found - exact).abs().max()
        theirs = min((x.mean((2, 3)) - exact).abs().max(),
                     (F.adaptive_avg_pool2d(x, 1)[:, :, 0, 0] - exact).abs().max())
        assert mine <= theirs + 100 * 2**-24


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    return faults.outcomes("test_pools")


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_is_noticed(outcomes: dict[str, list[str]], name: str) -> None:
    faults.assert_noticed(outcomes[name])
