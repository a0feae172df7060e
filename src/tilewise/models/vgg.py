"""VGG-11, 13, 16 and 19, with and without batch normalisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# output channels of the convolutions between two max-pools
STAGES: dict[int, tuple[tuple[int, ...], ...]] = {
    11: ((64,), (128,), (256,) * 2, (512,) * 2, (512,) * 2),
    13: ((64,) * 2, (128,) * 2, (256,) * 2, (512,) * 2, (512,) * 2),
    16: ((64,) * 2, (128,) * 2, (256,) * 3, (512,) * 3, (512,) * 3),
    19: ((64,) * 2, (128,) * 2, (256,) * 4, (512,) * 4, (512,) * 4),
}


class VGG(nn.Module):
    """Five stages of 3x3 convolutions, each ended by a max-pool, then three linear layers."""

    def __init__(self, depth: int, batch_norm: bool = False, classes: int = 1000,
                 channels: int = 3) -> None:
        super().__init__()
        self.features = nn.Sequential(*_features(depth, batch_norm, channels))
        self.avgpool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(512 * 49, 4096), nn.ReLU(inplace=True), nn.Dropout(),
            nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, classes))
        self.apply(_initialise)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


def _features(depth: int, batch_norm: bool, channels: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for stage in STAGES[depth]:
        for width in stage:
            layers.append(nn.Conv2d(channels, width, 3, padding=1))
            layers += [nn.BatchNorm2d(width)] if batch_norm else []
            layers.append(nn.ReLU(inplace=True))
            channels = width
        layers.append(nn.MaxPool2d(2))
    return layers


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0, 0.01)
    if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def vgg11(**options: Any) -> VGG:
    """VGG-11."""
    return VGG(11, **options)


def vgg11_bn(**options: Any) -> VGG:
    """VGG-11 with batch normalisation."""
    return VGG(11, batch_norm=True, **options)


def vgg13(**options: Any) -> VGG:
    """VGG-13."""
    return VGG(13, **options)


def vgg13_bn(**options: Any) -> VGG:
    """VGG-13 with batch normalisation."""
    return VGG(13, batch_norm=True, **options)


def vgg16(**options: Any) -> VGG:
    """VGG-16."""
    return VGG(16, **options)


def vgg16_bn(**options: Any) -> VGG:
    """VGG-16 with batch normalisation."""
    return VGG(16, batch_norm=True, **options)


def vgg19(**options: Any) -> VGG:
    """VGG-19."""
    return VGG(19, **options)


def vgg19_bn(**options: Any) -> VGG:
    """VGG-19 with batch normalisation."""
    return VGG(19, batch_norm=True, **options)
