"""Planes to channels-last and back: every value in its place, no byte beside them."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from support import faults
from support.convolutions import LAST, PLANES

import tilewise
from tilewise.bench.guarded import Mismatch, launch_guarded
from tilewise.core.isa import ISA
from tilewise.core.problem import Problem
from tilewise.core.schedule import Schedule
from tilewise.core.target import Target
from tilewise.kernels.cpu.between import turn
from tilewise.kernels.cpu.emit import transpose
from tilewise.kernels.cpu.emit.launch import launcher
from tilewise.runtime import turning

HOST = Target.host(threads=2)
ROWS = [name for name, row in ISA.items() if row.lanes <= HOST.lanes
        and HOST.row.machines == row.machines and not row.matrix]
CHANNELS = (2, 3, 4, 7, 8, 13, 16, 17, 31, 40, 512)
PIXELS = (16, 17, 31, 49, 640, 2500)


class Mutation(NamedTuple):
    apply: faults.Patch


def check(mutation: Mutation) -> None:
    with faults.patched(mutation.apply):
        for channels in (3, 17):
            check_guarded("avx512" if "avx512" in ROWS else ROWS[0], channels)


MUTATIONS = {
    "squares are not turned": Mutation(
        faults.replaced(turn, "transpose", lambda f, rows: rows)),
    "few channels are not mixed": Mutation(
        faults.replaced(turn, "interleave", lambda vectors: vectors)),
    "few channels are mixed the other way": Mutation(
        faults.replaced(turn, "separate", transpose.interleave)),
}


def check_guarded(row: str, channels: int) -> None:
    for layout, pixels in ((layout, pixels) for layout in ("nhwc", "nchw") for pixels in PIXELS):
        n = 2
        x = torch.arange(n * channels * pixels, dtype=torch.float32).view(n, channels, pixels)
        planes, last = x.flatten(), x.transpose(1, 2).flatten()
        source, expected = (planes, last) if layout == "nhwc" else (last, planes)
        launch = launcher(turn.make, Problem(1, channels, 1, 1, 1, 1, 1, layout=layout), Schedule(),
                          ISA[row], sizes=[pixels, pixels])
        for side in ("start", "end"):
            y = launch_guarded(launch, {"x": source}, {"y": x.numel()}, n, 2, side)["y"]
            if not torch.equal(y, expected):
                raise Mismatch(f"{row}: {channels} channels, {pixels} pixels, to {layout}")


@pytest.mark.parametrize("row", [row for row in ROWS if ISA[row].lanes > 1])
@pytest.mark.parametrize("channels", CHANNELS)
def test_every_value_in_its_place(row, channels):
    check_guarded(row, channels)


@pytest.mark.parametrize("row", [row for row in ROWS if ISA[row].lanes > 1])
@pytest.mark.parametrize("channels", [3, 17])
def test_planes_further_apart_than_they_are_large(row, channels):
    n, pixels, plane = 2, 37, 50
    x = torch.arange(n * channels * pixels, dtype=torch.float32).view(n, channels, pixels)
    launch = launcher(turn.make, Problem(1, channels, 1, 1, 1, 1, 1, layout="nchw"), Schedule(),
                      ISA[row], sizes=[pixels, plane])
    for side in ("start", "end"):
        floats = (n * channels - 1) * plane + pixels
        given = {"x": x.transpose(1, 2).flatten()}
        y = launch_guarded(launch, given, {"y": floats}, n, 2, side)["y"]
        found = torch.nn.functional.pad(y, (0, plane - pixels)).view(n, channels, plane)
        assert torch.equal(found[..., :pixels], x)
        assert found[..., pixels:].flatten()[:-(plane - pixels)].isnan().all()


def test_pixels_of_several_images_become_planes():
    def pixels(n, c, *sizes):
        images = torch.randn(n, c, *sizes).contiguous(memory_format=LAST)
        return images.flatten(2)

    for n, c in ((1, 64), (2, 17), (3, 5)):
        parts = [pixels(n, c, 9, 8), pixels(n, c, 4, 5), pixels(n, c, 16, 1)]
        found = turning.joined_planes(parts)
        assert torch.equal(found, torch.cat(parts, 2))
        assert found.stride() == torch.cat(parts, 2).stride()
    for odd in ([parts[0].contiguous()], [parts[0], parts[1].double()], [parts[0][..., :3]],
                [parts[0], pixels(3, 6, 4, 4)], [parts[0], pixels(2, 5, 4, 4)],
                [parts[0][..., ::2]], [pixels(3, 1, 4, 4)]):
        assert turning.joined_planes(odd) is None


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_noticed(name):
    with pytest.raises(Mismatch):
        check(MUTATIONS[name])


def test_small_tasks_give_the_same():
    check(Mutation(faults.replaced(turn, "WORTH", 1 << 4)))


@pytest.mark.parametrize("shape", [(2, 3, 96, 97), (1, 64, 30, 31), (3, 300, 7, 7), (2, 1, 200, 99),
                                   (40, 900, 1, 1), (1, 5000, 2, 5), (0, 3, 9, 9), (1, 2, 3, 4)])
def test_as_torch_lays_them_out(shape):
    x = torch.randn(shape)
    for layout, other in ((LAST, PLANES), (PLANES, LAST)):
        given = x.contiguous(memory_format=other)
        found, expected = turning.laid_out(given, layout), given.contiguous(memory_format=layout)
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()


def test_bits_stay_as_they_are():
    x = torch.randint(-2**31, 2**31 - 1, (1, 64, 32, 32), dtype=torch.int32).view(torch.float32)
    found = turning.laid_out(x, LAST)  # denormals, infinities and all kinds of NaN
    assert torch.equal(found.contiguous().view(torch.int32), x.view(torch.int32))


@pytest.mark.parametrize("change", [lambda x: x.double(), lambda x: x.bfloat16(),
                                    lambda x: x[:, :, ::2], lambda x: x[:, ::2],
                                    lambda x: x.transpose(2, 3)])
def test_others_are_torchs(change):
    x = change(torch.randn(2, 32, 40, 40))
    found = turning.laid_out(x, LAST)
    assert torch.equal(found, x)
    assert found.is_contiguous(memory_format=LAST)


def test_gradients_pass_through_an_optimised_model():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.Conv2d(32, 8, 3)).eval()
    x = torch.randn(1, 3, 128, 128, requires_grad=True)
    tilewise.optimize(model)(x).square().sum().backward()
    found, x.grad = x.grad, None
    model(x).square().sum().backward()
    torch.testing.assert_close(found, x.grad, rtol=1e-3, atol=1e-4)


def test_results_are_the_callers_to_change():
    """Neither a view made without gradients, nor memory of the pool that cannot grow."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.Conv2d(32, 32, 3)).eval()
    with torch.no_grad():
        y = tilewise.optimize(model)(torch.randn(1, 3, 128, 128))
    assert y._base is None
    y.mul_(torch.ones(1, requires_grad=True))
    y.detach_().resize_(2, 32, 128, 128)


@pytest.mark.parametrize("shape", [(2, 3, 13, 12), (1, 2, 1, 5), (2, 64, 40, 40)])
def test_what_is_laid_out_lies_so(shape: tuple[int, ...]) -> None:
    whole = torch.randn(shape[0], shape[1] + 2, *shape[2:])
    for x in (whole, whole.contiguous(memory_format=LAST)[:, 1:-1], whole[:, 1:-1],
              whole.permute(2, 1, 0, 3).contiguous(memory_format=LAST).permute(2, 1, 0, 3)):
        for layout in (LAST, PLANES):
            y = turning.laid_out(x, layout)
            assert torch.equal(x, y)
            assert y.is_contiguous(memory_format=layout)
