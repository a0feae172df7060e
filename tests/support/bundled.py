"""A small model for bundles, in a module that other processes can import."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Small(nn.Module):
    """Winograd, direct, pointwise and depthwise layers, a residual, a pool and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(32)
        self.wide = nn.Conv2d(32, 32, 3, padding=1)
        self.depth = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.point = nn.Conv2d(32, 64, 1)
        self.head = nn.Linear(64, 10)
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(self.wide(x) + x)
        x = torch.relu(self.point(self.depth(x)))
        return self.head(x.mean((2, 3))) * self.scale


def small() -> nn.Module:
    """Always the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = Small().eval()
        model.norm.running_mean.normal_()
        model.norm.running_var.uniform_(0.5, 2.0)
    return model


def image(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 40, 40, generator=torch.Generator().manual_seed(3))
