"""Modules that call F.conv2d with their own tensors: the same blocks as those of nn.Conv2d."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tilewise
from tilewise.model.captured import all_captured
from tilewise.model.nn import Block


class Same(nn.Conv2d):
    """Pads by itself, as EfficientNets that came from TensorFlow do."""

    def forward(self, x):
        return F.conv2d(F.pad(x, (0, 1, 0, 1)), self.weight, self.bias, self.stride, self.padding,
                        self.dilation, self.groups)


class Listed(nn.Conv2d):
    """With a list where torch has a tuple."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.stride = list(self.stride)

    def forward(self, x):
        return torch.conv2d(x, self.weight, self.bias, self.stride, self.padding)


class Other(nn.Conv2d):
    """Not with its own options."""

    def forward(self, x):
        return F.conv2d(x, self.weight, self.bias, padding=2)


class Scaled(nn.Conv2d):
    """Not with its own weight."""

    def forward(self, x):
        return F.conv2d(x, self.weight * 2, self.bias, self.stride, self.padding)


def blocks(model):
    return [step for captured in all_captured(model) for captures in captured.captures.values()
            for capture in captures for step in capture.steps.values() if isinstance(step, Block)]


def net(kind):
    torch.manual_seed(0)
    made = nn.Sequential(kind(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
                         kind(8, 8, 3, bias=False, padding=1), nn.SiLU(), nn.Conv2d(8, 4, 1))
    nn.init.uniform_(made[1].running_mean)
    return made.eval()


@pytest.mark.parametrize(("kind", "count"), [(Same, 3), (Listed, 3), (Other, 1), (Scaled, 1)])
def test_they_are_blocks(kind, count):
    model = net(kind)
    fast = tilewise.optimize(model)
    with torch.inference_mode():
        for size in (15, 15, 15, 22, 22, 22):
            x = torch.randn(2, 3, size, size)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert len(blocks(fast)) == count
    assert [block.activation for block in blocks(fast)] == (["relu", "silu", None][-count:])


def test_changes_are_followed():
    model = net(Same)
    fast = tilewise.optimize(model)
    x = torch.randn(2, 3, 15, 15)
    with torch.inference_mode():
        for _ in range(3):
            fast(x)
    for layer in (0, 3):
        fast[layer].weight.data.mul_(1.5)  # the same tensors
    with torch.inference_mode():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    for one in (fast, model):
        one[0].stride = (1, 1)
        one[3].padding = (0, 0)
    with torch.inference_mode():
        for _ in range(3):
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    for one in (fast, model):
        torch.manual_seed(5)
        one[3].weight = nn.Parameter(torch.randn(8, 8, 3, 3))
        one[3].bias = nn.Parameter(torch.randn(8))
    with torch.inference_mode():
        for _ in range(3):
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


def test_gradients():
    model = net(Same)
    fast = tilewise.optimize(copy.deepcopy(model))
    x = torch.randn(2, 3, 15, 15)
    for one in (model, fast):
        one.train()
        one(x).square().sum().backward()
    for own, other in zip(model.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(other.grad, own.grad, rtol=1e-3, atol=1e-3)


def test_released():
    model = net(Same)
    fast = tilewise.optimize(copy.deepcopy(model), torch.randn(2, 3, 15, 15), keep_original=False)
    with torch.inference_mode():
        for _ in range(3):
            x = torch.randn(2, 3, 15, 15)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
