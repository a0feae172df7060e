"""Images times a number for every channel of each, and the gradients, on channels-last tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.places import address
from ..core.remembered import Remembered
from ..core.schedule import Schedule
from ..core.target import Target
from ..kernels.cpu import memory
from ..kernels.cpu.between import excitation
from ..kernels.cpu.emit.launch import Launch, launcher
from .pointwise import FEW
from .sweeps import ANY, is_plain


class _Run(NamedTuple):
    launch: Launch
    scratch: int
    threads: int


def takes(x: Tensor, scale: Tensor) -> bool:
    """Whether the kernel can compute the gradients; whether autograd follows does not matter."""
    with torch.no_grad():
        return (x.dim() == 4 and x.numel() > 0 and scale.shape == (*x.shape[:2], 1, 1)
                and x.is_contiguous(memory_format=torch.channels_last)
                and scale.is_contiguous() and is_plain(x) and is_plain(scale))


def backward(grad: Tensor, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the scale, from that of their product."""
    n, c, h, w = x.shape
    grad = grad.contiguous(memory_format=torch.channels_last)
    run = _runs[n, h * w, c, torch.get_num_threads()]
    of_x, of_scale = memory.empty(n, h, w, c).permute(0, 3, 1, 2), torch.empty(
        n, c, 1, 1, dtype=torch.float32)
    scratch = memory.empty(run.scratch)
    run.launch(address(grad), address(x), address(scale), address(of_scale), address(of_x),
               address(scratch), 1, run.threads)
    return of_x, of_scale


def _run_of(images: int, pixels: int, channels: int, threads: int) -> _Run:
    target = Target.host(threads=threads)
    words, scratch = excitation.sizes(images, pixels, channels, target.lanes)
    launch = launcher(excitation.make, ANY, Schedule(), target.row, sizes=words)
    return _Run(launch, scratch, threads if images * pixels * channels >= FEW else 1)


_runs = Remembered(_run_of)
