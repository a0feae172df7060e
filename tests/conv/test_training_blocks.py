"""A sample of benchmarks/training_blocks.py, and deliberate faults that it must notice."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness import sample
from torch import nn
from torch.nn import functional as F

import tilewise
from tilewise.conv import batch_norm, excitation, gradients, learned, operators
from tilewise.runtime import masks, weights

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import training_blocks

SEEDS = (42, 309, *range(1000, 1000 + sample(200, 10)))  # 42, 309: instance norms of one image
NORMED, EXCITED, MASKED, MEAN, JOINED = 20, 24, 26, 45, 398
PARTS = {NORMED: {"batch norm", "relu activation", "residual"},
         EXCITED: {"batch norm", "silu activation", "excitation"},
         MASKED: {"no norm", "relu activation", "residual"},
         MEAN: {"mean of images"}, JOINED: {"concatenation", "relu activation"}}


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_of_a_block(seed: int) -> None:
    assert not training_blocks.judge(seed).wrong


def changed_backward(**changes: Callable[[Any], Any]) -> Callable[..., Any]:
    """The kernels of batch norm, some of their results spoilt."""
    backward = batch_norm.kernels.backward

    def run(*args: Any) -> Any:
        found = backward(*args)
        return found._replace(**{name: change(getattr(found, name))
                                 for name, change in changes.items()})

    return run


def once_more(function: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda *args, **named: change(function(*args, **named))


def shifted(x: torch.Tensor) -> torch.Tensor:
    return x.roll(1, 1)


def unmasked() -> Callable[..., Any]:
    """Gradients also of what a ReLU has cut."""
    unpack = masks.unpack
    return lambda p, t, grad, mask: unpack(p, t, grad, torch.full_like(mask, 255))


FAULTS: dict[str, tuple[int, Any, str, Callable[[], Any]]] = {
    "images a little large": (NORMED, batch_norm.kernels, "backward", lambda: changed_backward(
        x=lambda g: g * 1.001)),
    "without the mean": (NORMED, batch_norm.kernels, "backward", lambda: changed_backward(
        x=lambda g: g + 0.01)),
    "another channel's scale": (NORMED, batch_norm.kernels, "backward", lambda: changed_backward(
        weight=lambda g: g.roll(1))),
    "a shift too many": (NORMED, batch_norm.kernels, "backward", lambda: changed_backward(
        bias=lambda g: g * 1.01)),
    "residual of another channel": (NORMED, batch_norm.kernels, "backward",
                                    lambda: changed_backward(residual=shifted)),
    "statistics that stay": (NORMED, learned, "follow", lambda: lambda *_: None),
    "second gradients of silu": (EXCITED, batch_norm.SMOOTH, "silu", lambda: (
        lambda grad, y: grad * y.sigmoid())),
    "a scale's gradient": (EXCITED, excitation.kernels, "backward", lambda: once_more(
        excitation.kernels.backward, lambda g: (g[0], g[1] * 1.01))),
    "no mask": (MASKED, gradients.masks, "unpack", unmasked),
    "mean of one pixel more": (MEAN, excitation._Averaged, "backward", lambda: staticmethod(
        once_more(excitation._Averaged.backward, lambda g: g * 1.01))),
    "weights of the step before": (MASKED, weights.Made, "is_of", lambda: lambda *_: True),
    "gradients that are differentiated": (JOINED, operators, "by_torch", lambda: once_more(
        operators.by_torch, lambda found: (found[0] * 1.01, *found[1:]))),
}


@pytest.mark.usefixtures("by_our_kernels")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seed, place, attribute, fault = FAULTS[name]
    assert PARTS[seed] <= set(training_blocks.Block(seed).parts)
    if isinstance(place, dict):
        monkeypatch.setitem(place, attribute, fault())
    else:
        monkeypatch.setattr(place, attribute, fault())
    assert training_blocks.judge(seed).wrong


@pytest.mark.usefixtures("by_our_kernels")
@pytest.mark.parametrize("seed", PARTS)
def test_blocks_that_faults_are_put_into_are_right(seed: int) -> None:
    judged = training_blocks.judge(seed)
    assert not judged.wrong
    assert judged.directions == training_blocks.DIRECTIONS


def test_residuals_in_planes_have_their_gradient_in_planes() -> None:
    """Torch's instance norm of one image misreads a channels-last gradient."""
    torch.manual_seed(0)
    x = torch.randn(1, 8, 19, 19).contiguous(memory_format=torch.channels_last)
    weight, before = torch.randn(16, 8, 3, 3), torch.randn(1, 16, 19, 19)

    def step(x: torch.Tensor, weight: torch.Tensor, before: torch.Tensor, conv: Any) -> Any:
        leaves = [weight.clone().requires_grad_(), before.clone().requires_grad_()]
        y = conv(x, leaves[0], F.instance_norm(leaves[1]))
        torch.manual_seed(1)
        return torch.autograd.grad(y, leaves, torch.randn(y.shape).to(x))

    found = step(x, weight, before, lambda x, weight, more: tilewise.conv2d(
        x, weight, padding=1, residual=more, activation="silu"))
    expected = step(x.double(), weight.double(), before.double(), lambda x, weight, more: F.silu(
        F.conv2d(x, weight, padding=1) + more))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-3)


class Small(nn.Module):
    """All that torch differentiates twice, small enough for finite differences."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), norm
        self.last = nn.Conv2d(6, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.norm(self.conv(x)) + x.repeat(1, 2, 1, 1))
        y = torch.cat((F.avg_pool2d(y, 2), F.max_pool2d(x, 2)), 1)
        return self.last(F.interpolate(y * y.mean((2, 3), keepdim=True), scale_factor=2))


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4, momentum=0), nn.GroupNorm(2, 4),
                                  nn.InstanceNorm2d(4)], ids=lambda n: type(n).__name__)
def test_gradgradcheck(norm: nn.Module) -> None:
    torch.manual_seed(0)
    model = tilewise.optimize(Small(norm)).double().train()
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(model, x)
    assert torch.autograd.gradgradcheck(model, x)
