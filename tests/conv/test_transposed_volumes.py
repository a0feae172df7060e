"""conv_transpose3d: torch's results, slice by slice, wherever they lie."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.harness import sample
from torch import Tensor, nn
from torch.nn import functional as F

import tilewise
from tilewise.conv import slices, transposed_volumes
from tilewise.conv.running import ENGINE
from tilewise.conv.slices import Spread
from tilewise.core import InvalidProblem
from tilewise.kernels.cpu import memory
from tilewise.model.captured import blocks
from tilewise.model.nn import TransposedBlock

ACTIVATIONS: dict[str | None, Any] = {None: lambda x: x, "relu": F.relu,
                                      "leaky_relu:0.5": lambda x: F.leaky_relu(x, 0.5)}
BEHIND = 1 << 14  # floats behind every memory that nobody may write to


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """By slices wherever that can be, in memory full of NaN, with sevens behind it."""
    made: list[Tensor] = []

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        whole = torch.full((math.prod(shape) + BEHIND,), 7.0, dtype=dtype)
        made.append(whole[-BEHIND:])
        return memory.noted(whole[:-BEHIND].fill_(torch.nan).view(shape))

    monkeypatch.setattr(transposed_volumes, "SHARE", 1e9)
    monkeypatch.setattr(memory, "empty", empty)
    ENGINE.executables.clear()
    yield
    assert all(bool((behind == 7.0).all()) for behind in made)


def integers(rng: random.Random, *shape: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(
        rng.randrange(1 << 30))).float()


def three(rng: random.Random, *choices: int) -> tuple[int, ...]:
    return tuple(rng.choice(choices) for _ in range(3))


def drawn(rng: random.Random) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """An input, a weight, and options that torch takes."""
    while True:
        k, c = rng.choice((1, 3, 8, 17)), rng.choice((1, 4, 16, 19))
        stride, taps = three(rng, 1, 2, 2, 3), three(rng, 1, 2, 3, 4)
        options = {"stride": stride, "padding": three(rng, 0, 0, 1),
                   "dilation": three(rng, 1, 1, 2),
                   "output_padding": tuple(rng.randrange(s) for s in stride)}
        x = integers(rng, rng.choice((1, 1, 2)), k, *three(rng, 1, 2, 4, 7))
        if rng.random() < .6:
            x = x.contiguous(memory_format=torch.channels_last_3d)
        weight = integers(rng, k, c, *taps)
        try:
            F.conv_transpose3d(x.double(), weight.double(), **options)
        except RuntimeError:
            continue
        return x, weight, options


def volume(*call: Any, **options: Any) -> slices.Volume:
    given = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1, **options}
    return transposed_volumes.volume_of(transposed_volumes.call_of(*call, **given))


@pytest.mark.parametrize("seed", range(1, 5))
@torch.inference_mode()
def test_random_calls(seed: int) -> None:
    """Values are integers, so that sums have no error; Winograd's have a small one."""
    rng, by_slices, taps = random.Random(seed), 0, set()
    for _ in range(sample(250, 30)):
        x, weight, options = drawn(rng)
        bias = integers(rng, weight.shape[1]) if rng.random() < .5 else None
        y = F.conv_transpose3d(x.double(), weight.double(),
                               None if bias is None else bias.double(), **options)
        residual = integers(rng, *y.shape) if rng.random() < .4 else None
        activation = rng.choice(tuple(ACTIVATIONS))
        expected = ACTIVATIONS[activation](y if residual is None else y + residual.double())
        found = tilewise.conv_transpose3d(x, weight, bias, **options, activation=activation,
                                          residual=residual)
        how = volume(x, weight, bias, **options, activation=activation, residual=residual)
        by_slices += bool(how.stretches)
        taps |= {len(stretch.taps) for stretch in how.stretches}
        exact = not any(plan.algorithm != "cpu_phases" for plan in how.plans.values())
        assert found.shape == expected.shape
        most = 0 if exact and how.stretches else 2e-6 * float(expected.abs().max()) + 1e-12
        assert float((found - expected).abs().max()) <= most, (x.shape, weight.shape, options)
    assert by_slices >= 5
    assert taps >= {1, 2}


def test_the_depth_reaches_what_torch_reaches() -> None:
    """With a filter of ones, an output is the sum of the slices whose taps reach it."""
    rng = random.Random(0)
    for _ in range(50):
        size, taps, step = rng.randint(1, 9), rng.randint(1, 5), rng.randint(1, 3)
        before, dilation = rng.randrange(2), rng.randint(1, 2)
        x, weight = torch.rand(1, 1, size, dtype=torch.float64), torch.rand(1, 1, taps).double()
        try:
            y = F.conv_transpose1d(x, weight, None, step, before, 0, 1, dilation)[0, 0]
        except RuntimeError:
            continue
        depth = Spread(size, len(y), taps, step, before, dilation)
        sums = [sum(float(x[0, 0, depth.source(i, tap)] * weight[0, 0, tap])
                    for tap in depth.met(i)) for i in range(len(y))]
        assert torch.allclose(torch.tensor(sums, dtype=torch.float64), y)
        covered = [stretch.first + i * step for stretch in depth.stretches(3)
                   for i in range(stretch.size)]
        assert sorted(covered) == list(range(len(y)))


@torch.inference_mode()
def test_a_slice_that_no_tap_reaches_is_torchs() -> None:
    x, weight = torch.randn(1, 8, 3, 4, 4), torch.randn(8, 8, 1, 2, 2)
    assert not volume(x, weight, None, stride=2).stretches
    assert torch.allclose(tilewise.conv_transpose3d(x, weight, stride=2),
                          F.conv_transpose3d(x, weight, stride=2), atol=1e-5)


@torch.inference_mode()
def test_infinities_stay_where_they_belong() -> None:
    x = torch.randn(1, 32, 4, 12, 12).contiguous(memory_format=torch.channels_last_3d)
    x[0, 3, 1, 5, 5] = torch.inf
    weight = torch.randn(32, 32, 4, 4, 4)
    found = tilewise.conv_transpose3d(x, weight, stride=2, padding=1)
    expected = F.conv_transpose3d(x, weight, stride=2, padding=1)
    assert torch.equal(found.isfinite(), expected.isfinite())


def test_gradients_are_torchs() -> None:
    x, weight = torch.randn(1, 4, 3, 5, 5, requires_grad=True), torch.randn(4, 6, 2, 2, 2)
    found, expected = (torch.autograd.grad(run(x, weight, stride=2).square().sum(), x)[0]
                       for run in (tilewise.conv_transpose3d, F.conv_transpose3d))
    assert torch.allclose(found, expected, atol=1e-4)


def test_one_volume_without_a_batch() -> None:
    x, weight = torch.randn(4, 3, 5, 5), torch.randn(4, 6, 2, 2, 2)
    assert torch.allclose(tilewise.conv_transpose3d(x, weight, stride=2),
                          F.conv_transpose3d(x, weight, stride=2), atol=1e-5)


@pytest.mark.parametrize(("change", "says"), [
    ({"weight": torch.randn(5, 4, 3, 3, 3)}, "input has 8 channels, needs 5"),
    ({"bias": torch.randn(3)}, r"bias has shape \(3,\), needs \(4,\)"),
    ({"residual": torch.randn(1, 4, 2, 2, 2)}, "residual has shape"),
    ({"activation": "prelu"}, "activation is 'prelu'"),
])
def test_complaints(change: dict[str, Any], says: str) -> None:
    given = {"x": torch.randn(1, 8, 6, 6, 6), "weight": torch.randn(8, 4, 3, 3, 3), **change}
    with pytest.raises(InvalidProblem, match=says):
        tilewise.conv_transpose3d(**given)


class Net(nn.Module):
    """As nets for volumes are built."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up = nn.Conv3d(2, 32, 3, padding=1), nn.ConvTranspose3d(32, 16, 2, 2)
        self.norm, self.batch = nn.InstanceNorm3d(16, affine=True), nn.BatchNorm3d(32)
        self.then, self.pool = nn.ConvTranspose3d(16, 32, 3, 2, 1, 1, bias=False), nn.MaxPool3d(2)
        self.last = nn.Conv3d(34, 3, 3, padding=1)
        self.batch.running_mean.normal_()
        self.batch.running_var.uniform_(.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.leaky_relu(self.norm(self.up(self.pool(self.first(x).relu()))), 0.01)
        y = F.avg_pool3d(self.batch(self.then(y)).relu(), 2)
        y = y * y.mean((2, 3, 4), keepdim=True).sigmoid()
        return self.last(torch.cat((y, x), 1)) + F.interpolate(F.max_pool3d(x, 2)[:, :1],
                                                               scale_factor=2)


@pytest.mark.parametrize("keep", [True, False])
def test_in_models(keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(1, 2, 8, 12, 12)
    monkeypatch.setattr(slices, "MARGIN", 1e9)
    with torch.inference_mode():
        expected = model.double()(x.double())
        model.float()
        fast = tilewise.optimize(model, x, keep_original=keep)
        assert sum(isinstance(block, TransposedBlock) for block in blocks(fast)) == 2
        for _ in range(4):
            assert float((fast(x) - expected).abs().max()) < 1e-4
        steps = tilewise.profile(fast, x)
        assert {"instance norm leaky_relu", "max pool", "average pool", "cat"} <= {
            step.step for step in steps.lines if step.by == "tilewise"}
