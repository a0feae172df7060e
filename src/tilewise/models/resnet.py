"""ResNet-18, 34 and 50."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def _conv3x3(channels: int, width: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)


def _conv1x1(channels: int, width: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, width, 1, stride, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int,
                 downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv3x3(channels, width, stride), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = _conv3x3(width, width), nn.BatchNorm2d(width)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + shortcut)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut; the stride is on the 3x3."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int,
                 downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv1x1(channels, width), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv3x3(width, width, stride), nn.BatchNorm2d(width)
        self.conv3 = _conv1x1(width, width * self.expansion)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + shortcut)


class ResNet(nn.Module):
    """A 7x7 stem and four stages of blocks."""

    def __init__(self, block: type[BasicBlock] | type[Bottleneck], depths: tuple[int, ...],
                 classes: int = 1000) -> None:
        super().__init__()
        self._channels = 64
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(64), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        self.layer1 = self._stage(block, 64, depths[0], 1)
        self.layer2 = self._stage(block, 128, depths[1], 2)
        self.layer3 = self._stage(block, 256, depths[2], 2)
        self.layer4 = self._stage(block, 512, depths[3], 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * block.expansion, classes)
        self.apply(_initialise)

    def _stage(self, block: type[BasicBlock] | type[Bottleneck], width: int, depth: int,
               stride: int) -> nn.Sequential:
        out, shortcut = width * block.expansion, None
        if stride != 1 or self._channels != out:
            shortcut = nn.Sequential(_conv1x1(self._channels, out, stride), nn.BatchNorm2d(out))
        blocks = [block(self._channels, width, stride, shortcut)]
        self._channels = out
        blocks += [block(out, width, 1, None) for _ in range(depth - 1)]
        return nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def resnet18(**options: int) -> ResNet:
    """ResNet-18."""
    return ResNet(BasicBlock, (2, 2, 2, 2), **options)


def resnet34(**options: int) -> ResNet:
    """ResNet-34."""
    return ResNet(BasicBlock, (3, 4, 6, 3), **options)


def resnet50(**options: int) -> ResNet:
    """ResNet-50."""
    return ResNet(Bottleneck, (3, 4, 6, 3), **options)
