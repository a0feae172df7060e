"""Batch norm by the statistics of a batch, and its gradients, on channels-last tensors.

Callers pass plain float32 tensors without gaps; `takes` says which.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.places import address, address_or_null
from ..core.problem import Epilogue, Problem
from ..core.remembered import Remembered
from ..core.schedule import Schedule
from ..core.target import Target
from ..kernels.cpu import memory
from ..kernels.cpu.between import batch_norm
from ..kernels.cpu.between.derivatives import has_derivative
from ..kernels.cpu.emit.launch import Launch, launcher
from .pointwise import FEW
from .rows import is_vector
from .sweeps import ANY, is_plain

FLOAT, LINE = 4, 64  # bytes
LARGE = 4 << 20  # bytes of a result that the next step does not find near


class Statistics(NamedTuple):
    """What gradients need of the forward pass: its tables, and what a gradient passes."""

    tables: Tensor  # (TABLES, channels in whole vectors)
    mask: Tensor | None  # where a residual was added before ReLU

    def mean(self, channels: int) -> Tensor:
        return self.tables[0, :channels]

    def variance(self, channels: int) -> Tensor:
        """Of the pixels at hand, not of all that there might be."""
        return self.tables[4, :channels]


class Gradients(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor
    residual: Tensor | None


class _Run(NamedTuple):
    launch: Launch
    sizes: batch_norm.Sizes
    mask_bytes: int
    threads: int


def takes(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
          activation: str | None) -> bool:
    """Whether the kernels can compute it; whether autograd follows does not matter."""
    with torch.no_grad():
        images = x.dim() == 4 and x.numel() > 0 and all(
            part.is_contiguous(memory_format=torch.channels_last) and is_plain(part)
            and part.shape == x.shape for part in (x, residual) if part is not None)
        return images and all(is_vector(part, x.shape[1]) for part in (weight, bias)) and (
            activation in (None, "relu") if residual is not None else has_derivative(activation))


def forward(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
            eps: float, activation: str | None) -> tuple[Tensor, Statistics]:
    """activation(norm(x) + residual), and what its gradients need."""
    n, c, h, w = x.shape
    masked = residual is not None and activation is not None
    run = _forward[n * h * w, c, eps, weight is not None, bias is not None,
                   residual is not None, activation, masked, torch.get_num_threads()]
    y, scratch = _like(x), _scratch(run.sizes, batch_norm.TABLES)
    mask = torch.empty(run.mask_bytes, dtype=torch.uint8) if masked else None
    run.launch(address(x), address_or_null(weight), address_or_null(bias),
               address_or_null(residual), address(y), address(scratch), 1, run.threads,
               address_or_null(mask))
    tables = scratch[run.sizes.before:].view(batch_norm.TABLES, -1).clone()
    return y, Statistics(tables, mask)


def backward(grad: Tensor, x: Tensor, statistics: Statistics, activation: str | None,
             eps: float, of_residual: bool) -> Gradients:
    """Of all that `forward` was given; that of a residual without an activation is `grad`."""
    n, c, h, w = x.shape
    grad = grad.contiguous(memory_format=torch.channels_last)
    mask, tables = statistics.mask, statistics.tables
    kept = of_residual and mask is not None
    run = _backward[n * h * w, c, eps, None if mask is not None else activation, mask is not None,
                    kept, torch.get_num_threads()]
    dx, scratch = _like(x), _scratch(run.sizes, batch_norm.GRADIENTS)
    before = _like(x) if kept else None
    run.launch(address(grad), address(x), address(tables), address_or_null(before), address(dx),
               address(scratch), 1, run.threads, address_or_null(mask))
    found = scratch[run.sizes.before:].view(batch_norm.GRADIENTS, -1)
    return Gradients(dx, found[0, :c].clone(), found[1, :c].clone(),
                     (before if kept else grad) if of_residual else None)


def unpacked(mask: Tensor, x: Tensor) -> Tensor:
    """A mask as ones and zeros of the shape of x."""
    n, c, h, w = x.shape
    lanes = Target.host().lanes
    bits = mask[:, None] >> torch.arange(min(8, lanes), dtype=torch.uint8) & 1
    return bits.view(n, h, w, -1)[..., :c].permute(0, 3, 1, 2).to(x.dtype)


def _forward_run(pixels: int, channels: int, eps: float, weight: bool, bias: bool, residual: bool,
                 activation: str | None, masked: bool, threads: int) -> _Run:
    target = Target.host(threads=threads)
    sizes = batch_norm.sizes(pixels, channels, eps, target.lanes)
    launch = launcher(batch_norm.make, _problem(activation, residual), Schedule(), target.row,
                      int(weight), int(bias), int(masked), _streams(pixels, channels, target),
                      sizes=sizes.words)
    return _Run(launch, sizes, batch_norm.mask_bytes(pixels, channels, target.lanes),
                threads if pixels * channels >= FEW else 1)


def _backward_run(pixels: int, channels: int, eps: float, activation: str | None, masked: bool,
                  kept: bool, threads: int) -> _Run:
    target = Target.host(threads=threads)
    sizes = batch_norm.sizes(pixels, channels, eps, target.lanes)
    launch = launcher(batch_norm.make_backward, _problem(activation, False), Schedule(),
                      target.row, int(masked), int(kept), _streams(pixels, channels, target),
                      sizes=sizes.words)
    return _Run(launch, sizes, batch_norm.mask_bytes(pixels, channels, target.lanes),
                threads if pixels * channels >= FEW else 1)


def _streams(pixels: int, channels: int, target: Target) -> int:
    """Whether results are too large to be found in a cache again; vectors must be whole lines."""
    whole = target.lanes * FLOAT == LINE and channels % target.lanes == 0
    return int(whole and FLOAT * pixels * channels >= LARGE)


_forward, _backward = Remembered(_forward_run), Remembered(_backward_run)


def _problem(activation: str | None, residual: bool) -> Problem:
    """All that code depends on."""
    return ANY.with_(epilogue=Epilogue(activation=activation, residual=residual))


def _like(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    return memory.empty(n, h, w, c).permute(0, 3, 1, 2)


def _scratch(sizes: batch_norm.Sizes, tables: int) -> Tensor:
    return memory.empty(sizes.before + tables * sizes.padded)
