"""What runs between convolutions of volumes: torch's results, and refusals where it is torch's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tilewise.kernels.cpu import memory
from tilewise.runtime import images, norms, pools, volumes
from tilewise.runtime.concatenation import concatenated
from tilewise.runtime.pointwise import pointwise
from tilewise.runtime.totals import total

LAST = torch.channels_last_3d
SHAPES = [(1, 16, 8, 10, 12), (2, 5, 7, 3, 9), (2, 1, 4, 6, 5), (1, 33, 1, 5, 6), (3, 4, 5, 1, 1),
          (1, 1, 2, 2, 2), (1, 40, 16, 20, 17)]
empty = memory.empty


@pytest.fixture(autouse=True)
def full_of_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "empty", lambda *shape, **k: empty(*shape, **k).fill_(torch.nan))


def drawn(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Channels-last, also where a size of one would allow other strides."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    y = torch.empty_strided(*images.channels_last(shape))
    return y.copy_(values)


def require(found: Tensor | None, expected: Tensor, what: object, error: float = 2e-6) -> None:
    assert found is not None, what
    assert found.shape == expected.shape, what
    assert found.stride() == images.channels_last(tuple(expected.shape))[1], what
    most = float(expected.abs().max())
    assert float((found - expected).abs().max()) <= error * max(1.0, most), what


def three(rng: random.Random, choices: tuple[Any, ...]) -> Any:
    """One number, or three."""
    return rng.choice(choices) if rng.random() < .4 else tuple(rng.choice(choices) for _ in "dhw")


def operation(rng: random.Random) -> tuple[Callable[[Tensor], Any], Callable[[Tensor], Any], float]:
    """A function of ours and torch's, with the same arguments, and the error of one."""
    taps, between = three(rng, (1, 2, 3, 5)), rng.choice((None, three(rng, (1, 2, 3))))
    before, holes = three(rng, (0, 0, 1)), three(rng, (1, 1, 2))
    ceil, counted, size = rng.random() < .5, rng.random() < .5, three(rng, (1, 2, 5))
    mode, corners = rng.choice((("nearest", None), ("trilinear", False), ("trilinear", True)))
    factors = three(rng, (1.0, 2.0, 1.5))
    return rng.choice((
        (lambda x: volumes.max_pool3d(x, taps, between, before, holes, ceil),
         lambda x: F.max_pool3d(x, taps, between, before, holes, ceil), 0.0),
        (lambda x: volumes.avg_pool3d(x, taps, between, before, ceil, counted),
         lambda x: F.avg_pool3d(x, taps, between, before, ceil, counted), 2e-6),
        (lambda x: volumes.adaptive_avg_pool3d(x, size),
         lambda x: F.adaptive_avg_pool3d(x, size), 2e-6),
        (lambda x: volumes.adaptive_max_pool3d(x, size),
         lambda x: F.adaptive_max_pool3d(x, size), 0.0),
        (lambda x: volumes.upsample(x, size, None, mode, corners),
         lambda x: F.interpolate(x, size, None, mode, corners), 4e-6),
        (lambda x: volumes.upsample(x, None, factors, mode, corners),
         lambda x: F.interpolate(x, None, factors, mode, corners), 4e-6)))


@pytest.mark.parametrize("seed", range(6))
def test_pools_and_resampling(seed: int) -> None:
    rng, done = random.Random(seed), 0
    for i in range(60):
        (run, theirs, error), x = operation(rng), drawn(rng.choice(SHAPES), i)
        try:
            expected = theirs(x)
        except RuntimeError:
            assert run(x) is None  # what torch refuses is torch's to refuse
            continue
        require(run(x), expected, (x.shape, i), error)
        done += 1
    assert done > 20


@pytest.mark.parametrize("shape", SHAPES)
def test_norms(shape: tuple[int, ...]) -> None:
    x, (weight, bias) = drawn(shape), torch.randn(2, shape[1])
    found = norms.instance_norm(x, weight, bias, 1e-5, "leaky_relu:0.01")
    require(found, F.leaky_relu(F.instance_norm(x, weight=weight, bias=bias), 0.01), shape, 2e-5)
    require(norms.group_norm(x, 1, weight, bias), F.group_norm(x, 1, weight, bias), shape, 2e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_concatenation(shape: tuple[int, ...]) -> None:
    parts = [drawn((shape[0], c, *shape[2:]), c) for c in (shape[1], 3, 17)]
    require(concatenated(parts), torch.cat(parts, 1), shape, 0)
    assert concatenated([parts[0], parts[1].contiguous()[:, :, :0]]) is None


@pytest.mark.parametrize("shape", SHAPES)
def test_steps(shape: tuple[int, ...]) -> None:
    """Whatever broadcasts is either as torch has it, or torch's."""
    x, (n, c, d, h, w) = drawn(shape), shape
    ours = [(1, c, 1, 1, 1), (n, c, 1, 1, 1), (n, 1, d, h, w), shape, (1, 1, 1, 1, 1)]
    for other in ours:
        y = drawn(other, 1)
        require(pointwise([("mul", 0, 1), ("add", 2, 0)], [x, y]), x * y + x, other)
    for other in [(n, c, d, 1, 1), (n, c, 1, h, w), (1, 1, 1, h, 1), (1, 1, d, 1, 1), (d, 1, 1),
                  (n, c, 1, 1, w), (n, 1, 1, h, w)]:
        y = torch.randn(other)
        found = pointwise([("mul", 0, 1)], [x, y])
        assert found is None or torch.equal(found, x * y), other


def test_sizes_that_only_seem_to_fit() -> None:
    """Two rows of one slice are not one row of two slices."""
    a, b = drawn((1, 4, 2, 1, 3)), drawn((1, 4, 1, 2, 3), 1)
    found = pointwise([("mul", 0, 1)], [a, b])
    assert found is None or torch.equal(found, a * b)


def test_vectors_for_channels() -> None:
    x, scale = drawn((2, 6, 3, 4, 5)), torch.randn(6)
    found = pointwise([("mul", 0, 1)], [x, scale], kinds=(None, "channel"))
    require(found, x * scale.view(6, 1, 1, 1), "channels")


def test_other_layouts_are_torchs() -> None:
    x = torch.randn(1, 3, 4, 5, 6)
    for run in (lambda y: volumes.max_pool3d(y, 2), lambda y: volumes.upsample(y, 2, None,
                                                                               "nearest", None)):
        assert run(x) is None
        assert run(drawn((1, 3, 4, 5, 6)).double()) is None
        assert run(drawn((1, 3, 4, 5, 6)).requires_grad_()) is None
        assert run(drawn((1, 3, 4, 5, 6))[:, :, ::2]) is None
        assert run(drawn((1, 3, 4, 5, 6))) is not None


@pytest.mark.parametrize("kind", ["sum", "mean", "amax", "norm"])
@pytest.mark.parametrize("keepdim", [True, False])
def test_totals(kind: str, keepdim: bool) -> None:
    for shape in SHAPES:
        x = drawn(shape)
        found = total(kind, x, (2, -2, 4), keepdim)
        options = {"dim": (2, 3, 4), "keepdim": keepdim}
        expected = (torch.linalg.vector_norm(x.double(), **options) if kind == "norm"
                    else getattr(torch, kind)(x.double(), **options))
        assert found is not None
        assert found.shape == expected.shape
        assert torch.allclose(found.double(), expected, atol=1e-5, rtol=1e-5)
        assert total(kind, x[:, :, ::2] if shape[2] > 2 else x.double(), (2, 3, 4)) is None


def test_windows_without_a_value() -> None:
    """Along one axis, or along several: the largest of nothing is below everything."""
    x, options = drawn((1, 8, 1, 4, 4)), (2, None, 1, (2, 1, 1), True)
    require_equal(volumes.max_pool3d(x, *options), F.max_pool3d(x, *options))
    flat, windows = x[:, :, 0], ((2, 1), None, (1, 0), (2, 1), True)
    flat = flat[:, :, :1]
    require_equal(pools.max_pool2d(flat, *windows), F.max_pool2d(flat, *windows))


def require_equal(found: Tensor | None, expected: Tensor) -> None:
    assert found is not None
    assert torch.equal(found, expected)


def test_a_factor_that_is_nearly_two() -> None:
    """Whether torch takes it for two depends on the layout and the channels."""
    for channels in (2, 8):
        x = drawn((1, channels, 3, 3, 3))
        assert volumes.upsample(x, None, 2.3, "nearest", None) is None
        require(volumes.upsample(x, None, 2.0, "nearest", None),
                F.interpolate(x, scale_factor=2.0), channels, 0)
