"""Gradients of tilewise.conv1d and tilewise.conv3d beside torch's, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.convolutions import assert_close, draw
from torch import Tensor
from torch.nn import functional as F

import tilewise
from tilewise.conv import slices, volume_gradients
from tilewise.conv.running import ENGINE
from tilewise.kernels.activations import applied

OURS: Any = {1: tilewise.conv1d, 3: tilewise.conv3d}
THEIRS: Any = {1: F.conv1d, 3: F.conv3d}


@pytest.fixture(autouse=True)
def by_slices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch is never faster with a whole volume."""
    ENGINE.executables.clear()  # what was planned otherwise
    monkeypatch.setattr(slices, "pays", lambda *_: True)
    yield
    ENGINE.executables.clear()


def operands(axes: int, groups: int = 1, batch: int = 2) -> list[Tensor]:
    sizes, taps = [7, 6, 5][:axes], [3, 2, 3][:axes]
    return [draw(batch, 8, *sizes), draw(12, 8 // groups, *taps), draw(12)]


def leaves(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [t.to(dtype).requires_grad_() for t in tensors]


def check(axes: int, tensors: list[Tensor], activation: str | None = None, residual: bool = False,
          layout: Any = torch.contiguous_format, **options: Any) -> None:
    ours, theirs = leaves(tensors, torch.float32), leaves(tensors, torch.float64)
    x = ours[0].contiguous(memory_format=layout)
    wanted = THEIRS[axes](*theirs, **options)
    extra = draw(*wanted.shape, seed=5)
    mine, its = leaves([extra], torch.float32), leaves([extra], torch.float64)
    y = OURS[axes](x, *ours[1:], activation=activation, residual=mine[0] if residual else None,
                   **options)
    wanted = wanted + its[0] if residual else wanted
    wanted = wanted if activation is None else applied(activation)(wanted)
    grad = draw(*y.shape, seed=6)
    inputs = (ours + mine, theirs + its) if residual else (ours, theirs)
    found = torch.autograd.grad(y, inputs[0], grad)
    for one, other in zip(found, torch.autograd.grad(wanted, inputs[1], grad.double()),
                          strict=True):
        assert_close(one.double(), other)


@pytest.mark.parametrize("axes", [1, 3])
@pytest.mark.parametrize("options", [
    {"padding": 1}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": 2},
    {"padding": 3}], ids=str)
def test_gradients(axes: int, options: dict[str, Any]) -> None:
    check(axes, operands(axes), **options)


@pytest.mark.parametrize("axes", [1, 3])
def test_gradients_of_groups(axes: int) -> None:
    check(axes, operands(axes, groups=2), groups=2, padding=1)


@pytest.mark.parametrize("axes", [1, 3])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_gradients_behind_a_residual_and_an_activation(axes: int, activation: str) -> None:
    check(axes, operands(axes), activation, residual=True, padding="valid")


@pytest.mark.parametrize("options", [{"padding": 1}, {"stride": (2, 1, 1)}], ids=str)
def test_gradients_of_channels_last_volumes(options: dict[str, Any]) -> None:
    check(3, operands(3, batch=1), layout=torch.channels_last_3d, **options)


def test_uneven_padding() -> None:
    x, weight, _ = operands(3)
    ours, theirs = leaves([x, weight], torch.float32), leaves([x, weight], torch.float64)
    y = tilewise.conv3d(*ours, padding=(1, 0, 2, 1, 0, 1))
    wanted = F.conv3d(F.pad(theirs[0], (0, 1, 2, 1, 1, 0)), theirs[1])
    for one, other in zip(torch.autograd.grad(y.square().sum(), ours),
                          torch.autograd.grad(wanted.square().sum(), theirs), strict=True):
        assert_close(one.double(), other)


def test_gradients_of_gradients_are_torchs() -> None:
    x, weight, _ = operands(3)
    results = []
    for run, dtype in ((tilewise.conv3d, torch.float32), (F.conv3d, torch.float64)):
        tensors = leaves([x, weight], dtype)
        (dx,) = torch.autograd.grad(run(*tensors, padding=1).square().sum(), tensors[0],
                                    create_graph=True)
        results.append(torch.autograd.grad(dx.square().sum(), tensors))
    for one, other in zip(*results, strict=True):
        assert_close(one.double(), other)


def test_slices_are_what_computes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("by torch")

    monkeypatch.setattr(volume_gradients, "by_torch", fail)
    check(3, operands(3), padding=1)
    with pytest.raises(AssertionError, match="by torch"):
        check(3, operands(3), stride=2)  # the input's


@pytest.mark.parametrize("axes", [1, 3])
def test_a_result_may_be_changed_in_place(axes: int) -> None:
    ours = leaves(operands(axes), torch.float32)
    y = OURS[axes](*ours)
    y.relu_().sum().backward()
    theirs = leaves(operands(axes), torch.float64)
    THEIRS[axes](*theirs).relu().sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one.grad.double(), other.grad)


def test_the_operator_is_one() -> None:
    x, weight, bias = leaves(operands(3), torch.float32)
    options = ([1, 1, 1], [1] * 6, [1, 1, 1], 1, "relu", 1, None, None, None)
    torch.library.opcheck(torch.ops.tilewise.conv3d.default, (x, weight, bias, None, *options))
    last = x.detach().contiguous(memory_format=torch.channels_last_3d)
    torch.library.opcheck(torch.ops.tilewise.conv3d.default,
                          (last, weight.detach(), None, None, *options))
