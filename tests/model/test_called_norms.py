"""Batch norms that learn and that a module calls as a function: with their convolution, as torch's.

timm writes its models so: a norm with its activation, which counts the batches itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tilewise
from tilewise.conv import batch_norm, learned
from tilewise.conv.batch_norm import CalledNorm


class NormAct(nn.BatchNorm2d):
    """A norm with the activation behind it, written as torch writes its own."""

    def __init__(self, channels: int, act: nn.Module, **options: Any) -> None:
        super().__init__(channels, **options)
        self.drop, self.act = nn.Identity(), act

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, "expected images")
        share = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                share = 1.0 / float(self.num_batches_tracked)
        own = not self.training or self.track_running_stats
        y = F.batch_norm(x, self.running_mean if own else None, self.running_var if own else None,
                         self.weight, self.bias,
                         self.training or (self.running_mean is None and self.running_var is None),
                         share, self.eps)
        return self.act(self.drop(y))


class Read(NormAct):
    """What it moves is read before the activation."""

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)
        y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True,
                         self.momentum, self.eps)
        return self.act(y) * self.running_mean.sum()


def model_of(norm: Callable[..., nn.Module], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), norm(8, nn.ReLU(inplace=True), **options),
        nn.Conv2d(8, 8, 3, padding=1), norm(8, nn.SiLU(inplace=True), **options),
        nn.Conv2d(8, 16, 1, bias=False), norm(16, nn.Identity(), **options),
        nn.Dropout(0.0), nn.Flatten(), nn.Linear(16 * 64, 5))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether norms were called with their convolution, or alone, by us."""
    found: list[bool] = []

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            y = function(*args)
            found.append(y is not None)
            return y
        return call

    monkeypatch.setattr("tilewise.model.nn.trained", watched(learned.trained))
    monkeypatch.setattr("tilewise.model.nn.normalised", watched(batch_norm.normalised))
    return found


def compare(theirs: nn.Module, steps: int = 4) -> None:
    """So many steps of ours and of torch's in float64: losses, gradients, numbers of norms."""
    x, labels = torch.randn(6, 3, 10, 10), torch.randint(5, (6,))
    ours, theirs = tilewise.optimize(copy.deepcopy(theirs)), theirs.double()
    optimizers = [torch.optim.SGD(model.parameters(), 0.05, 0.9) for model in (ours, theirs)]
    for _ in range(steps):
        losses = []
        for model, optimizer, image in zip((ours, theirs), optimizers, (x, x.double()),
                                           strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(image), labels)
            loss.backward()
            losses.append(loss.item())
        assert abs(losses[0] - losses[1]) < 1e-4
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(one.grad.double(), other.grad, atol=1e-4)
        for optimizer in optimizers:
            optimizer.step()
    for name, buffer in ours.named_buffers():
        right = theirs.get_buffer(name)
        assert torch.allclose(buffer.double(), right.double(), atol=1e-4), name
        assert buffer.dtype == right.dtype or buffer.is_floating_point()


@pytest.mark.parametrize("options", [
    {}, {"momentum": 0.3, "eps": 1e-3}, {"affine": False}, {"track_running_stats": False}],
    ids=str)
def test_they_learn_as_torchs(calls: list[bool], options: dict[str, Any]) -> None:
    compare(model_of(NormAct, **options))
    assert calls
    assert all(calls)


@pytest.mark.parametrize(("norm", "options"), [(Read, {}), (NormAct, {"momentum": None})],
                         ids=["read", "a mean of all batches"])
def test_what_is_torchs(calls: list[bool], norm: Any, options: dict[str, Any]) -> None:
    compare(model_of(norm, **options))
    assert not calls


def test_without_gradients_statistics_move(calls: list[bool]) -> None:
    theirs = model_of(NormAct)
    ours, x = tilewise.optimize(copy.deepcopy(theirs)), torch.randn(4, 3, 10, 10)
    with torch.no_grad():
        for _ in range(5):
            assert torch.allclose(ours(x), theirs(x), atol=1e-4)
    for name, buffer in ours.named_buffers():
        assert torch.allclose(buffer, theirs.get_buffer(name), atol=1e-5), name
    assert theirs[1].num_batches_tracked == 5
    assert calls


def test_modes_take_turns() -> None:
    theirs = model_of(NormAct)
    ours, x = tilewise.optimize(copy.deepcopy(theirs)), torch.randn(4, 3, 10, 10)
    for mode in (True, False, True, True, False):
        assert torch.allclose(ours.train(mode)(x), theirs.train(mode)(x), atol=1e-4)


def test_a_norm_follows_what_becomes_of_its_module(calls: list[bool]) -> None:
    """Parameters that are replaced, frozen or gone, statistics that are replaced."""
    theirs = model_of(NormAct)
    ours, x = tilewise.optimize(copy.deepcopy(theirs)), torch.randn(4, 3, 10, 10)
    changes: list[Callable[[Any], Any]] = [
        lambda norm: setattr(norm, "weight", nn.Parameter(torch.full((8,), 0.5))),
        lambda norm: norm.bias.requires_grad_(False),
        lambda norm: setattr(norm, "running_mean", torch.ones(8)),
        lambda norm: setattr(norm, "eps", 0.1),
        lambda norm: setattr(norm, "momentum", 0.9),
        lambda norm: setattr(norm, "act", nn.Hardswish()),
        lambda norm: norm.train(False)]
    for change in changes:
        for model in (ours, theirs):
            change(model[1])
            model.zero_grad()
            model(x).square().sum().backward()
        for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None), name
            assert one.grad is None or torch.allclose(one.grad, other.grad, atol=2e-2,
                                                      rtol=1e-3), name
        for name, buffer in ours.named_buffers():
            assert torch.allclose(buffer, theirs.get_buffer(name), atol=1e-4), name
    assert all(calls)


def test_a_norm_that_is_called_twice() -> None:
    """Its statistics are moved in the order of its calls."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)
            self.norm = NormAct(8, nn.ReLU())
            self.last = nn.Linear(8 * 64, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.last((self.norm(self.a(x)) + self.norm(self.b(x) * 3)).flatten(1))

    torch.manual_seed(0)
    compare(Twice())


def test_it_is_in_training_mode_and_counts_nothing() -> None:
    module = NormAct(8, nn.ReLU()).eval()
    norm = CalledNorm(module)
    x = torch.randn(2, 8, 4, 4)
    y = norm(x)
    assert module.num_batches_tracked == 0
    assert torch.allclose(y, F.batch_norm(x, None, None, training=True))
    assert not torch.equal(module.running_mean, torch.zeros(8))


# dropouts that drop nothing


@pytest.mark.parametrize("drop", [nn.Dropout(0.0), nn.Dropout2d(0), nn.AlphaDropout(0.0)], ids=str)
def test_a_dropout_of_nothing_is_left_out_until_it_drops(drop: nn.Module) -> None:
    theirs = nn.Sequential(nn.Conv2d(3, 8, 3), drop, nn.Conv2d(8, 8, 3), copy.deepcopy(drop))
    ours, x = tilewise.optimize(copy.deepcopy(theirs)), torch.randn(2, 3, 9, 9)
    for p in (0.0, 0.5, 0.0):
        for model in (ours, theirs):
            model[1].p = p
        found = []
        for model in (ours, theirs):
            torch.manual_seed(1)
            found.append((model(x), torch.rand(1)))
        assert torch.allclose(found[0][0], found[1][0], atol=1e-5)
        assert found[0][1] == found[1][1]  # as many numbers were drawn


@pytest.mark.parametrize("drop", [F.dropout, F.dropout2d, F.alpha_dropout])
def test_a_call_that_drops_nothing(drop: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.p = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), 0.0

        def forward(self, x: Tensor) -> Tensor:
            return self.b(drop(self.a(x), self.p, True))

    theirs = Net()
    ours, x = tilewise.optimize(copy.deepcopy(theirs)), torch.randn(2, 3, 9, 9)
    for p in (0.0, 0.5, 0.0):
        found = []
        for model in (ours, theirs):
            model.p = p
            torch.manual_seed(1)
            found.append((model(x), torch.rand(1)))
        assert torch.allclose(found[0][0], found[1][0], atol=1e-5)
        assert found[0][1] == found[1][1]
