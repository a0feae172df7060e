"""Two LeNet-like nets for Fashion-MNIST, upscaled: where this project comes from."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LeNet(nn.Module):
    """Two convolutions with max-pools and two linear layers."""

    def __init__(self, size: int, widths: tuple[int, int], filter_size: int,
                 classes: int = 10) -> None:
        super().__init__()
        self.size = size
        self.features = nn.Sequential(
            nn.Conv2d(1, widths[0], filter_size), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(widths[0], widths[1], filter_size), nn.ReLU(), nn.MaxPool2d(2))
        side = ((size - filter_size + 1) // 2 - filter_size + 1) // 2
        self.classifier = nn.Sequential(
            nn.Linear(widths[1] * side * side, 84), nn.ReLU(), nn.Linear(84, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.features(x), 1))


def lenet_a(**options: int) -> LeNet:
    """1 -> 4 -> 16 channels, 7x7 filters, images of 86x86."""
    return LeNet(86, (4, 16), 7, **options)


def lenet_b(**options: int) -> LeNet:
    """1 -> 12 -> 24 channels, 5x5 filters, images of 70x70."""
    return LeNet(70, (12, 24), 5, **options)
