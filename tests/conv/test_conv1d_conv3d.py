"""tilewise.conv1d and tilewise.conv3d beside torch's, in float64."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.convolutions import assert_close, draw
from support.harness import sample
from torch import Tensor
from torch.nn import functional as F

import tilewise
from tilewise.conv import lines, slices
from tilewise.conv.running import ENGINE
from tilewise.kernels.activations import applied
from tilewise.kernels.cpu import memory
from tilewise.runtime.weights import MADE

OURS: Any = {1: tilewise.conv1d, 3: tilewise.conv3d}
THEIRS: Any = {1: F.conv1d, 3: F.conv3d}
LAST3 = torch.channels_last_3d
# channels, filters, groups; taps, stride and dilation but those of the depth; activation. Few,
# since code is compiled for each; the depth is no part of it
LAYERS: Any = {
    1: [(8, 16, 1, (3,), (1,), (1,), None), (16, 8, 2, (5,), (2,), (1,), "relu"),
        (6, 6, 6, (4,), (1,), (2,), "silu"), (20, 33, 1, (1,), (1,), (1,), None),
        (1, 5, 1, (2,), (3,), (1,), "relu")],
    3: [(8, 16, 1, (3, 3), (1, 1), (1, 1), None), (16, 8, 2, (1, 3), (1, 2), (1, 1), "relu"),
        (6, 6, 6, (2, 2), (1, 1), (2, 1), None), (20, 33, 1, (1, 1), (1, 1), (1, 1), "relu")]}


@pytest.fixture
def by_slices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch is never faster with a whole volume."""
    ENGINE.executables.clear()  # what was planned otherwise
    monkeypatch.setattr(slices, "pays", lambda *_: True)
    yield
    ENGINE.executables.clear()


def expected(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, axes: int,
             residual: Tensor | None = None, activation: str | None = None,
             padding: Any = 0, **options: Any) -> Tensor:
    """What torch makes of it in float64; (left, right) for each axis, the last axis last."""
    x, weight = x.double(), weight.double()
    if isinstance(padding, tuple) and len(padding) == 2 * axes:
        pairs = [padding[2 * i:2 * i + 2] for i in reversed(range(axes))]
        x, padding = F.pad(x, [side for pair in pairs for side in pair]), 0
    y = THEIRS[axes](x, weight, None if bias is None else bias.double(), padding=padding,
                     **options)
    y = y if residual is None else y + residual.double()
    return y if activation is None else applied(activation)(y)


def laid(x: Tensor, how: int) -> Tensor:
    """In planes, channels-last, every second value of something larger, or turned around."""
    last = (0, *range(2, x.dim()), 1)
    if how == 1:
        return x.permute(last).contiguous().permute(0, x.dim() - 1, *range(1, x.dim() - 1))
    if how == 2:
        return torch.stack((x, x), -1).flatten(-2)[..., ::2]
    return x.flip(-1).contiguous().flip(-1) if how == 3 else x


def problem(axes: int, number: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Random operands and options."""
    rng = random.Random(1000 * axes + number)
    c, k, groups, taps, stride, dilation, activation = rng.choice(LAYERS[axes])
    if axes == 3:
        taps, stride = (rng.randint(1, 4), *taps), (rng.choice((1, 1, 2, 3)), *stride)
        dilation = (rng.choice((1, 1, 2)), *dilation)
    padding: Any = [rng.choice((0, 1, 2)) for _ in taps]
    if rng.random() < 0.2:
        padding = tuple(rng.choice((0, 1, 3)) for _ in range(2 * axes))
    elif rng.random() < 0.3 and max(stride) == 1:
        padding = rng.choice(("same", "valid"))
    spans = [(tap - 1) * d + 1 for tap, d in zip(taps, dilation, strict=True)]
    sizes = [rng.randint(span, span + (30 if axes == 1 else 5)) for span in spans]
    x = laid(draw(rng.choice((1, 1, 2, 3)), c, *sizes, seed=number), rng.randrange(4))
    weight = laid(draw(k, c // groups, *taps, seed=number + 1), rng.choice((0, 0, 1)))
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups,
               "bias": draw(k)}
    y = expected(x, weight, axes=axes, **options)
    if rng.random() < 0.4:
        options["residual"] = laid(draw(*y.shape, seed=number), rng.randrange(3))
    return x, weight, {**options, "activation": activation}


@pytest.mark.parametrize("axes", [1, 3])
def test_random_problems(axes: int, by_slices: None) -> None:
    for number in range(sample(1000, 100)):
        x, weight, options = problem(axes, number)
        with torch.inference_mode(number % 2 == 0), torch.no_grad():
            y = OURS[axes](x, weight, **options)
        assert_close(y.double(), expected(x, weight, axes=axes, **options))


@pytest.mark.parametrize("axes", [1, 3])
def test_an_input_without_a_batch(axes: int, by_slices: None) -> None:
    x, weight = draw(8, *[7] * axes), draw(16, 8, *[3] * axes)
    extra = draw(16, *[7] * axes)
    y = OURS[axes](x, weight, padding="same", residual=extra)
    assert_close(y.double(), expected(x, weight, axes=axes, padding=1, residual=extra))


@pytest.mark.parametrize("axes", [1, 3])
@pytest.mark.parametrize("activation", ["prelu", "leaky_relu:0.2", "gelu", "clamp:-1:1"])
def test_activations(axes: int, activation: str, by_slices: None) -> None:
    x, weight, bias = draw(2, 8, *[6] * axes), draw(16, 8, *[3] * axes), draw(16)
    slope = draw(16, seed=3) if activation == "prelu" else None
    y = OURS[axes](x, weight, bias, padding=1, activation=activation, slope=slope)
    sums = expected(x, weight, bias, axes=axes, padding=1)
    wanted = (applied(activation)(sums) if slope is None
              else applied(activation)(sums, slope.double()))
    assert_close(y.double(), wanted)


@pytest.mark.parametrize("axes", [1, 3])
@pytest.mark.parametrize("how", [0, 1])
def test_the_layout_is_that_of_the_input(axes: int, how: int, by_slices: None) -> None:
    x, weight = laid(draw(2, 8, *[6] * axes), how), draw(16, 8, *[3] * axes)
    y = OURS[axes](x, weight, padding=1)
    assert y.stride() == laid(torch.empty(y.shape), how).stride()


@pytest.mark.parametrize("axes", [1, 3])
def test_no_images(axes: int) -> None:
    x, weight = torch.randn(0, 8, *[6] * axes), draw(16, 8, *[3] * axes)
    assert OURS[axes](x, weight).shape == (0, 16, *[4] * axes)
    weight.requires_grad_()
    OURS[axes](x, weight).sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("axes", [1, 3])
def test_other_types_are_torchs(axes: int, dtype: torch.dtype) -> None:
    x, weight = draw(2, 8, *[6] * axes).to(dtype), draw(16, 8, *[3] * axes).to(dtype)
    y = OURS[axes](x, weight, padding=1)
    assert y.dtype == dtype
    assert_close(y.double(), expected(x, weight, axes=axes, padding=1), 2e-2)


@pytest.mark.parametrize("axes, shape, weight, options, said", [
    (1, (2, 8, 9, 9), (4, 8, 3), {}, "input has shape .*needs \\(N, C, L\\) or \\(C, L\\)"),
    (3, (2, 8, 9), (4, 8, 3, 3, 3), {}, "needs \\(N, C, D, H, W\\) or \\(C, D, H, W\\)"),
    (1, (2, 8, 9), (4, 8, 3, 3), {}, "weight has shape .*needs \\(K, C/groups, S\\)"),
    (3, (2, 8, 9, 9, 9), (4, 8, 3, 3), {}, "weight has shape .*needs \\(K, C/groups, T, R, S\\)"),
    (1, (2, 8, 9), (4, 6, 3), {}, "input has 8 channels, needs 6"),
    (3, (2, 8, 9, 9, 9), (4, 6, 3, 3, 3), {}, "input has 8 channels, needs 6"),
    (1, (2, 8, 9), (4, 8, 3), {"stride": (1, 1)}, "stride is .*needs one number"),
    (3, (2, 8, 9, 9, 9), (4, 8, 3, 3, 3), {"dilation": (1, 1)}, "needs one or three numbers"),
    (1, (2, 8, 9), (4, 8, 10), {}, "does not fit into the padded input"),
    (3, (2, 8, 2, 9, 9), (4, 8, 3, 3, 3), {}, "filter \\(3 slices\\) does not fit .*\\(2\\)"),
    (3, (2, 8, 9, 9, 2), (4, 8, 3, 3, 3), {}, "does not fit into the padded input"),
    (1, (2, 8, 9), (4, 8, 3), {"padding": "same", "stride": 2}, "needs stride 1"),
    (3, (2, 8, 9, 9, 9), (4, 8, 3, 3, 3), {"padding": "some"}, "needs 'same', 'valid'"),
    (1, (2, 8, 9), (4, 8, 3), {"residual": torch.zeros(2, 4, 9)}, "needs \\(2, 4, 7\\)"),
    (3, (2, 8, 9, 9, 9), (4, 8, 3, 3, 3), {"residual": torch.zeros(1)}, "residual has shape"),
    (3, (2, 8, 9, 9, 9), (4, 8, 3, 3, 3), {"bias": torch.zeros(4).double()}, "need one dtype"),
    (3, (2, 8, 9, 9, 9), (4, 8, 3, 3, 3), {"bias": torch.zeros(5)}, "bias has shape"),
])
def test_errors(axes: int, shape: Any, weight: Any, options: dict[str, Any], said: str) -> None:
    """They are also what torch raises."""
    with pytest.raises(RuntimeError, match=said) as found:
        OURS[axes](torch.randn(shape), torch.randn(weight), **options)
    assert isinstance(found.value, tilewise.TilewiseError)


@pytest.mark.parametrize("axes", [1, 3])
def test_weights_are_prepared_once_and_again_when_they_change(axes: int, by_slices: None) -> None:
    x, weight = draw(2, 8, *[6] * axes), draw(16, 8, *[3] * axes)
    OURS[axes](x, weight)
    before = {key for key, _ in MADE.items()}
    OURS[axes](x, weight)
    assert {key for key, _ in MADE.items()} == before
    weight.mul_(2)
    assert_close(OURS[axes](x, weight).double(), expected(x, weight, axes=axes))
    weight.data = draw(16, 8, *[3] * axes, seed=9)
    assert_close(OURS[axes](x, weight).double(), expected(x, weight, axes=axes))


def test_views_of_weights_go_with_them() -> None:
    weight = draw(16, 8, 3)
    tilewise.conv1d(draw(2, 8, 9), weight)
    key = id(weight)
    assert key in lines._images
    del weight
    assert key not in lines._images


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_where_it_belongs(value: float, by_slices: None) -> None:
    x, weight = draw(1, 32, 4, 14, 14), draw(32, 32, 3, 3, 3)
    x[0, 3, 1, 2, 2] = value
    y = tilewise.conv3d(x, weight, padding=1, algorithm="cpu_winograd", max_error=1e-3)
    wanted = expected(x, weight, axes=3, padding=1)
    assert torch.equal(y.isfinite(), wanted.isfinite())
    assert_close(y[y.isfinite()].double(), wanted[wanted.isfinite()])


def test_slices_of_padding_are_left_out() -> None:
    depth = slices.Depth(size=5, taps=3, stride=1, before=1, after=1, dilation=1)
    assert [tuple(some) for some in depth.stretches(2)] == [
        (0, 1, (1, 2)), (1, 1, (0, 1, 2)), (2, 2, (0, 1, 2)), (4, 1, (0, 1))]
    strided = slices.Depth(size=6, taps=2, stride=2, before=0, after=0, dilation=3)
    assert [tuple(some) for some in strided.stretches(8)] == [(0, 1, (0, 1)), (1, 1, (0, 1))]


def test_memory_that_was_not_written_is_not_read(monkeypatch: pytest.MonkeyPatch,
                                                 by_slices: None) -> None:
    plain = memory.empty

    def poisoned(*shape: int) -> Tensor:
        return plain(*shape).fill_(float("nan"))

    monkeypatch.setattr(memory, "empty", poisoned)
    monkeypatch.setattr(slices, "TOGETHER", 3 * 4 * 16 * 36)  # three slices
    x, weight = laid(draw(2, 8, 8, 6, 6), 1), draw(16, 8, 3, 3, 3)
    y = tilewise.conv3d(x, weight, padding=1, residual=draw(2, 16, 8, 6, 6))
    assert_close(y.double(), expected(x, weight, axes=3, padding=1,
                                      residual=draw(2, 16, 8, 6, 6)))


def test_torch_runs_what_it_is_faster_at() -> None:
    x, weight = draw(64, 2, 2, 3, 3), draw(2, 2, 3, 3, 3)
    call = slices.Call(x, weight, None, None, (1, 1, 1), (1,) * 6, (1, 1, 1))
    assert not slices.volume_of(call).stretches
    large = draw(1, 64, 16, 64, 64), draw(64, 64, 3, 3, 3)
    call = slices.Call(*large, None, None, (1, 1, 1), (1,) * 6, (1, 1, 1))
    assert slices.volume_of(call).stretches


@pytest.mark.parametrize(("channels", "sides"), [(64, (8, 28, 28)), (4, (5, 5, 5))])
def test_the_layout_of_volumes_does_not_depend_on_who_runs_them(channels, sides):
    """Slices or torch: channels-last where the input is, as the operator's shape says."""
    weight = torch.randn(channels, channels, 3, 3, 3)
    for layout in (torch.contiguous_format, torch.channels_last_3d):
        x = torch.randn(1, channels, *sides).contiguous(memory_format=layout)
        args = (x, weight, None, None, [1] * 3, [1] * 6, [1] * 3, 1, None, 1, None, None)
        torch.library.opcheck(torch.ops.tilewise.conv3d.default, args,
                              test_utils=("test_faketensor",))
        assert tilewise.conv3d(x, weight, padding=1).is_contiguous(memory_format=layout)
