"""Nearest and bilinear resampling: torch's values, no byte beside them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from support import faults
from support.images import require_same, run_guarded
from torch import Tensor
from torch.nn import functional as F

from tilewise.core.isa import ISA
from tilewise.core.target import Target
from tilewise.kernels.cpu.between import channels, resample
from tilewise.runtime import resampling, sweeps
from tilewise.runtime.resampling import upsample

HOST = Target.host(threads=2)
ROWS = [name for name, row in ISA.items() if row.lanes <= HOST.lanes
        and HOST.row.machines == row.machines and not row.matrix and name != "scalar"]
NARROW = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 21, 31, 33, 40, 48, 63, 65, 70, 130]


class Mutation(NamedTuple):
    apply: faults.Patch
    mode: str = "nearest"


def small_tasks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(resampling, "ALONE", 0)
    patch.setattr(resampling, "WORTH", 64)
    patch.setattr(torch, "get_num_threads", lambda: 3)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    sweeps._known.clear()
    small_tasks(monkeypatch)
    yield
    sweeps._known.clear()


def options(generator: random.Random, mode: str) -> dict[str, Any]:
    found: dict[str, Any] = {"mode": mode}
    if generator.random() < 0.5:
        found["size"] = [generator.randint(1, 40) for _ in "hw"]
    else:
        found["scale_factor"] = generator.choice(
            (2, 2.0, 0.5, [2.0, 3.0], (1.3, 2.6), generator.uniform(0.3, 4)))
        found["recompute_scale_factor"] = generator.choice((None, True, False))
    if mode == "bilinear":
        found["align_corners"] = generator.choice((None, True, False))
    return found


def check_one(generator: random.Random, mode: str, c: int) -> None:
    x = torch.randn(generator.randint(1, 2), c, generator.randint(4, 17), generator.randint(4, 17),
                    generator=torch.Generator().manual_seed(generator.randrange(1 << 30)))
    if mode == "nearest":
        x.view(-1)[generator.randrange(x.numel())] = float(generator.choice(("nan", "inf")))
    chosen = options(generator, mode)
    expected = F.interpolate(x, **chosen)
    gap = generator.choice((0, 0, 1, 5))
    for side in ("start", "end"):
        found = run_guarded(lambda x, out: upsample(x, **chosen, out=out), x,
                            tuple(expected.shape), gap, side)
        require_same(found, expected, f"{tuple(x.shape)}, {chosen}",
                     0.0 if mode == "nearest" else 1e-6)


def check(mutation: Mutation) -> None:
    with faults.patched(mutation.apply), pytest.MonkeyPatch.context() as patch:
        small_tasks(patch)
        sweeps._known.clear()
        for c in (3, 16, 37):
            for seed in range(8):
                check_one(random.Random(seed), mutation.mode, c)


def swapped(sources: list[resample.Source]) -> list[resample.Source]:
    return [source._replace(share=source.other, other=source.share) for source in sources]


MUTATIONS = {
    "a pixel too far": Mutation(faults.changed(
        resampling, "_nearest", lambda sources: [sources[0], *sources[:-1]])),
    "the rest is a whole vector": Mutation(faults.replaced(
        channels.Block, "store", lambda self, pixel, values: [
            (pixel + self.first).store(value, i * value.lanes)
            for i, value in enumerate(values)])),
    "shares are swapped": Mutation(faults.changed(resampling, "_bilinear", swapped), "bilinear"),
    "three of four corners": Mutation(faults.replaced(
        resample, "_weighted", lambda f, values, shares, of=resample._weighted: of(
            f, values[:3], shares[:3])), "bilinear"),
    "fewer rows in a task": Mutation(faults.replaced(
        resampling, "ceil_div", lambda a, b: max(1, a // b))),
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_between_unmapped_pages(row: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_ISA", row)
    generator = random.Random(f"{row} {mode}")
    for c in NARROW:
        for _ in range(4):
            check_one(generator, mode, c)


@pytest.mark.parametrize("align_corners", [False, True])
def test_bilinear_beside_float64(align_corners: bool) -> None:
    """With torch's places, which are float32, sums round little."""
    x = torch.rand(1, 21, 40, 37, generator=torch.Generator().manual_seed(3)) + 1
    last = x.contiguous(memory_format=torch.channels_last)
    found = upsample(last, None, 8.0, "bilinear", align_corners)
    assert found is not None
    rows, columns = (_matrix(resampling._bilinear(size, 8 * size, 8.0, align_corners, 1), size)
                     for size in x.shape[2:])
    exact = rows @ x.double() @ columns.T
    assert ((found - exact).abs() / exact).max() < 1e-6
    require_same(found, F.interpolate(x, None, 8.0, "bilinear", align_corners), "torch", 1e-6)


def _matrix(sources: list[resample.Source], size: int) -> Tensor:
    matrix = torch.zeros(len(sources), size, dtype=torch.float64)
    for i, source in enumerate(sources):
        matrix[i, source.first] += source.share
        matrix[i, source.second] += source.other
    return matrix


def test_nearest_moves_bits() -> None:
    """Denormals and all kinds of NaN."""
    bits = torch.randint(-2**31, 2**31 - 1, (1, 5, 5, 19), dtype=torch.int32)
    x = bits.view(torch.float32).permute(0, 3, 1, 2)
    found = upsample(x, scale_factor=2.0)
    assert found is not None
    expected = bits.repeat_interleave(2, 1).repeat_interleave(2, 2)
    assert torch.equal(found.permute(0, 2, 3, 1).contiguous().view(torch.int32), expected)


def test_places_of_every_size_are_torchs() -> None:
    for size in (1, 2, 3, 7, 10, 23, 64):
        x = torch.arange(size, dtype=torch.float32).view(1, 1, 1, size)
        for outputs in range(1, 150):
            places = [source.first for source in
                      resampling._nearest(size, outputs, None, False, 1)]
            assert places == F.interpolate(x, (1, outputs)).flatten().tolist()
        for scale in torch.linspace(0.31, 5.7, 83).tolist():
            if int(size * scale):
                places = [source.first for source in
                          resampling._nearest(size, int(size * scale), scale, False, 1)]
                expected = F.interpolate(x, scale_factor=(1.0, scale))
                assert places == expected.flatten().tolist()


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    return faults.outcomes("test_resample")


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_is_noticed(outcomes: dict[str, list[str]], name: str) -> None:
    faults.assert_noticed(outcomes[name])
