"""Under torch.autocast: torch's types for all that our kernels run, and who runs it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.plans import ran
from torch import Tensor, nn
from torch.nn import functional as F

import tilewise
from tilewise.conv.linear import linear
from tilewise.model.captured import all_captured
from tilewise.runtime.types import element_of, is_on_unit

TYPES = [t for t in (torch.bfloat16, torch.float16) if element_of(t)]
types = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
ours = pytest.mark.skipif(not TYPES, reason="torch multiplies both on this machine")
UNIT = {torch.bfloat16: 2.0 ** -8, torch.float16: 2.0 ** -11}
LAST = torch.channels_last


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def check(found: Tensor, want: Tensor, dtype: torch.dtype, times: float = 4.0) -> None:
    assert (found.dtype, found.shape) == (want.dtype, want.shape)
    far = float((found.double() - want.double()).norm() / want.double().norm())
    assert far < times * UNIT[dtype]


CONVOLUTIONS = {  # ours, torch's, shapes of input and weight, channels of the result
    "linear": (linear, F.linear, (40, 256), (96, 256), 96),
    "conv1d": (tilewise.conv1d, F.conv1d, (2, 16, 50), (24, 16, 3), 24),
    "conv3d": (tilewise.conv3d, F.conv3d, (1, 16, 6, 12, 12), (24, 16, 3, 3, 3), 24),
    "conv_transpose1d": (tilewise.conv_transpose1d, F.conv_transpose1d, (1, 64, 900), (64, 64, 3),
                         64),
    "conv_transpose2d": (tilewise.conv_transpose2d, F.conv_transpose2d, (1, 16, 14, 14),
                         (16, 24, 3, 3), 24),
    "conv_transpose3d": (tilewise.conv_transpose3d, F.conv_transpose3d, (1, 32, 6, 20, 20),
                         (32, 32, 2, 2, 2), 32)}
OPERANDS = {  # types of x, weight, bias; None is the type of autocast
    "float32": (torch.float32,) * 3, "mixed": (None, torch.float32, torch.float32),
    "cast already": (None,) * 3}
named = pytest.mark.parametrize("name", CONVOLUTIONS)


@types
@named
@pytest.mark.parametrize("kinds", OPERANDS.values(), ids=OPERANDS)
def test_convolutions_have_torchs_types(name: str, kinds: tuple[Any, ...],
                                        dtype: torch.dtype) -> None:
    mine, theirs, shape, filters, k = CONVOLUTIONS[name]
    tensors = draw(*shape), draw(*filters) / 16, draw(k)
    x, weight, bias = (t.to(kind or dtype) for t, kind in zip(tensors, kinds, strict=True))
    with torch.no_grad(), torch.autocast("cpu", dtype):
        want, found = theirs(x, weight, bias), mine(x, weight, bias, activation="relu")
    check(found, want.relu(), dtype)


@ours
@named
def test_they_run_by_our_kernels(name: str) -> None:
    mine, _, shape, filters, k = CONVOLUTIONS[name]
    x, weight, bias = draw(*shape), draw(*filters) / 16, draw(k)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plans = ran(lambda: mine(x, weight, bias))
    assert bool(plans) != (len(shape) == 5 and is_on_unit(torch.bfloat16))  # volumes are torch's
    assert all(plan.algorithm.startswith("cpu_") for plan in plans)


@types
@named
def test_gradients_are_those_of_torch(name: str, dtype: torch.dtype) -> None:
    found = []
    for run in CONVOLUTIONS[name][:2]:
        *_, shape, filters, k = CONVOLUTIONS[name]
        tensors = [t.requires_grad_() for t in (draw(*shape), draw(*filters), draw(k))]
        with torch.autocast("cpu", dtype):
            y = run(*tensors)
        y.float().square().mean().backward()
        found.append([t.grad for t in tensors])
    for grad, want in zip(*found, strict=True):
        check(grad, want, dtype, 8.0)


@types
@pytest.mark.parametrize("name", ["conv3d", "conv_transpose2d", "conv_transpose3d"])
def test_a_residual_of_another_type_is_added_as_torch_does(name: str, dtype: torch.dtype) -> None:
    mine, theirs, shape, filters, _ = CONVOLUTIONS[name]
    x, weight = draw(*shape), draw(*filters) / 16
    with torch.no_grad(), torch.autocast("cpu", dtype):
        plain = theirs(x, weight)
        for kind in (torch.float32, dtype):
            residual = draw(*plain.shape).to(kind)
            check(mine(x, weight, residual=residual, activation="relu"),
                  F.relu(plain + residual), dtype)


class Between(nn.Module):
    """A step between two convolutions."""

    def __init__(self, step: Callable[..., Tensor], channels: int = 16) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(channels, 8, 1)
        self.step = step

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.step(self.first(x))
        return y, self.last(y)


STEPS: dict[str, Any] = {
    "max pool": lambda: nn.MaxPool2d(2), "average pool": lambda: nn.AvgPool2d(3, 2, 1),
    "adaptive": lambda: nn.AdaptiveAvgPool2d(4), "largest": lambda: nn.AdaptiveMaxPool2d(4),
    "nearest": lambda: nn.Upsample(scale_factor=2),
    "bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "silu": nn.SiLU, "batch norm": lambda: nn.Sequential(nn.SiLU(), nn.BatchNorm2d(16)),
    "group norm": lambda: nn.GroupNorm(4, 16), "instance norm": lambda: nn.InstanceNorm2d(16),
    "prelu": lambda: nn.Sequential(nn.SiLU(), nn.PReLU(16))}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda y: y * y.sigmoid(), "mean": lambda y: y * y.mean((2, 3), keepdim=True),
    "wide": lambda y: y * torch.ones(16, 1, 1), "number": lambda y: (y - 0.5) / 2,
    "cat": lambda y: torch.cat((y, F.relu(y)), 1)[:, 8:24], "largest": lambda y: y.amax((2, 3),
                                                                                        True) + y,
    "wide cat": lambda y: torch.cat((y[:, :8], torch.ones(y.shape)[:, :8]), 1),
    "softmax": lambda y: y.softmax(1), "length": lambda y: y / torch.norm(y, dim=1, keepdim=True),
    "wider": lambda y: y.float() + y, "layer norm": lambda y: F.layer_norm(y, y.shape[-1:])}
CASES = {**STEPS, **{f"function {name}": (lambda run=run: run) for name, run in OTHERS.items()}}


@types
@pytest.mark.parametrize("name", CASES)
def test_steps_between_have_torchs_types(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Between(CASES[name]()).eval(), draw(2, 3, 16, 16)
    fast = tilewise.optimize(copy.deepcopy(model))
    with torch.inference_mode(), torch.autocast("cpu", dtype):
        want = model(x)
        for _ in range(4):  # node by node, bound, and as a program
            for a, b in zip(fast(x), want, strict=True):
                check(a, b, dtype, 8.0)
    with torch.inference_mode():  # and without
        for a, b in zip(fast(x), model(x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@ours
def test_a_model_is_a_program_of_our_kernels() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
                          nn.MaxPool2d(2), nn.Conv2d(32, 32, 3, padding=1), nn.SiLU(),
                          nn.Upsample(scale_factor=2), nn.Conv2d(32, 4, 1)).eval()
    fast, x = tilewise.optimize(model), draw(1, 3, 24, 24)
    for dtype in TYPES * 2:
        with torch.inference_mode(), torch.autocast("cpu", dtype):
            found = [fast(x) for _ in range(4)]
        assert all(torch.equal(y, found[0]) and y.dtype == dtype for y in found)
        bound = [bound for captured in all_captured(fast) for captures in
                 captured.captures.values() for capture in captures
                 for bound in capture.programs.bound]
        assert max(one.program.kernels for one in bound) >= 4
    with torch.inference_mode():
        torch.testing.assert_close(fast(x), model(x))


@ours
def test_changes_are_followed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(),
                          nn.ConvTranspose2d(16, 8, 2, 2), nn.BatchNorm2d(8)).eval()
    fast, x = tilewise.optimize(model), draw(1, 3, 12, 12)
    def compare() -> None:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # torch keeps casts inside
            check(fast(x), model(x), torch.bfloat16)

    for tensor in (model[0].weight, model[0].bias, model[1].running_mean, model[3].weight,
                   model[4].bias):
        for _ in range(3):
            compare()
        tensor.data.mul_(3.0)
    compare()
