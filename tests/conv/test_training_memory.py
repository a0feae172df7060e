"""What a block keeps for its gradients, in bytes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tilewise.core.target import Target
from tilewise.kernels.cpu.between.batch_norm import TABLES
from tilewise.kernels.cpu.between.masks import pixel_bytes
from tilewise.model.nn import Block

LAST = torch.channels_last


def kept(block: Block, *operands: Tensor) -> int:
    """Bytes besides those of operands and parameters, each memory counted once."""
    conv, norm = block.parts
    known = {t.untyped_storage().data_ptr() for t in (
        *operands, *conv.parameters(), *(norm.parameters() if norm else ()))}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor  # held: addresses stay its own
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = block(*operands)
    assert y.requires_grad
    return sum(t.untyped_storage().nbytes() for at, t in found.items() if at not in known)


def tables(channels: int) -> int:
    """Of a batch norm: its channels in whole vectors."""
    lanes = Target.host().lanes
    return 4 * TABLES * math.ceil(channels / lanes) * lanes


@pytest.mark.parametrize("channels", [24, 64])
@pytest.mark.parametrize("with_residual", [False, True])
def test_conv_norm_relu(channels: int, with_residual: bool) -> None:
    """The convolution's result, the tables, and with a residual a bit for each value."""
    n, h, w = 2, 12, 14
    block = Block(nn.Conv2d(16, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
                  "relu").train()
    x, residual = (torch.randn(n, c, h, w).contiguous(memory_format=LAST).requires_grad_()
                   for c in (16, channels))
    values, lanes = n * channels * h * w, Target.host().lanes
    bits = n * h * w * pixel_bytes(channels, lanes)
    assert bits <= math.ceil(channels / lanes) * lanes * n * h * w / min(8, lanes)
    if with_residual:
        assert kept(block, x, residual) == 4 * values + tables(channels) + bits
    else:
        assert kept(block, x) == 4 * values + tables(channels)


def test_conv_relu() -> None:
    """A bit for each value."""
    block = Block(nn.Conv2d(16, 32, 3, padding=1), None, "relu").train()
    x = torch.randn(2, 16, 12, 14).contiguous(memory_format=LAST).requires_grad_()
    assert kept(block, x) == 2 * 12 * 14 * pixel_bytes(32, Target.host().lanes)


def test_a_pool_keeps_a_byte_for_each_result() -> None:
    """Not the values that it read."""
    block = Block(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), "relu",
                  pool=2).train()
    x = torch.randn(2, 16, 12, 14).contiguous(memory_format=LAST).requires_grad_()
    assert kept(block, x) == 4 * 2 * 32 * 12 * 14 + tables(32) + 2 * 32 * 6 * 7
