"""Zeros that are put around images before a convolution are the convolution's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tilewise
from tilewise.model.captured import all_captured
from tilewise.model.nn import Block


class Padded(nn.Module):
    """As networks do that came from TensorFlow, and autoencoders before they halve an image."""

    def __init__(self, pad=(0, 1, 0, 1), first=None) -> None:
        super().__init__()
        self.pad = pad
        self.first = first or nn.ZeroPad2d((1, 2, 0, 3))
        self.a = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU())
        self.b, self.c = nn.Conv2d(16, 16, 3, stride=2), nn.Conv2d(16, 8, 3)

    def forward(self, x):
        x = self.a(self.first(x))
        return self.c(F.silu(self.b(F.pad(x, self.pad))))


def blocks(model):
    return [step for captured in all_captured(model) for captures in captured.captures.values()
            for capture in captures for step in capture.steps.values() if isinstance(step, Block)]


def check(net, x, times=3):
    net = net.eval()
    model = tilewise.optimize(net)
    exact = copy.deepcopy(net).double()
    for _ in range(times):
        with torch.inference_mode():
            found, expected = model(x), exact(x.double())
        assert found.shape == expected.shape
        assert (found - expected).norm() <= 1e-5 * expected.norm()
    return model


def test_zeros_before_are_the_convolutions(monkeypatch):
    model = check(Padded(), torch.randn(2, 3, 30, 33))
    assert [block.around for block in blocks(model)] == [(0, 3, 1, 2), (0, 1, 0, 1), None]
    assert "pad" not in str(tilewise.explain(model, torch.randn(2, 3, 30, 33), stage="lowered"))
    assert "ZeroPad2d" not in str(tilewise.explain(model, torch.randn(1, 3, 30, 33), stage="fused"))


@pytest.mark.parametrize("first", [nn.ConstantPad2d(1, 0.5), nn.ReflectionPad2d(1),
                                   nn.ZeroPad2d((-1, 1, 0, 0)), nn.ZeroPad2d(2)])
def test_other_paddings_stay_what_they_are(first):
    model = check(Padded(first=first), torch.randn(1, 3, 24, 24))
    expected = (2, 2, 2, 2) if type(first) is nn.ZeroPad2d and first.padding[0] == 2 else None
    assert blocks(model)[0].around == expected


def test_zeros_that_somebody_else_reads_stay():
    class Net(Padded):
        def forward(self, x):
            y = self.first(x)
            return self.a(y), y.sum()

    net = Net().eval()
    model, x = tilewise.optimize(net), torch.randn(1, 3, 20, 20)
    with torch.inference_mode():
        for a, b in zip(model(x), net(x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert blocks(model)[0].around is None


def test_a_padding_that_changes_counts():
    net = Padded().eval()
    model, x = tilewise.optimize(net), torch.randn(1, 3, 30, 30)
    with torch.inference_mode():
        for change in (lambda m: None, lambda m: setattr(m.first, "padding", (2, 2, 2, 2)),
                       lambda m: setattr(m.b, "padding", (1, 1)),
                       lambda m: setattr(m, "pad", (3, 0, 0, 0))):
            for m in (net, model):
                change(m)
            for _ in range(3):
                torch.testing.assert_close(model(x), net(x), rtol=1e-4, atol=1e-5)


def test_gradients_pass():
    net = Padded()
    model, x = tilewise.optimize(net), torch.randn(2, 3, 30, 30, requires_grad=True)
    model(x).square().sum().backward()
    found, x.grad = x.grad, None
    net(x).square().sum().backward()
    torch.testing.assert_close(found, x.grad, rtol=1e-3, atol=1e-4)


def test_a_released_model_keeps_them(tmp_path):
    net, x = Padded().eval(), torch.randn(1, 3, 30, 30)
    model = tilewise.optimize(net, x, keep_original=False)
    torch.save(model, tmp_path / "m.pt")
    loaded = torch.load(tmp_path / "m.pt", weights_only=False)
    with torch.inference_mode():
        for m in (model, loaded):
            torch.testing.assert_close(m(x), net(x), rtol=1e-4, atol=1e-5)
