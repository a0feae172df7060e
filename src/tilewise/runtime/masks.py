"""Masks of ReLU and max-pooling: made after a convolution, used by its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.errors import TilewiseError
from ..core.places import address
from ..core.problem import Problem
from ..core.schedule import Schedule
from ..core.target import Target
from ..kernels.cpu import memory
from ..kernels.cpu.between.masks import make_pack, make_unpack, pixel_bytes, unpack_scratch
from ..kernels.cpu.emit.launch import launcher


def shape(p: Problem, t: Target) -> tuple[int, int, int, int]:
    return p.n, p.conv_h, p.conv_w, pixel_bytes(p.k, t.lanes)


def empty(p: Problem, t: Target) -> Tensor:
    return torch.empty(shape(p, t), dtype=torch.uint8)


def _bare(p: Problem) -> Problem:
    """All of a problem that the passes depend on."""
    return Problem(p.n, 1, p.conv_h, p.conv_w, p.k, 1, 1,
                   epilogue=type(p.epilogue)(activation=p.epilogue.activation,
                                             pool=p.epilogue.pool, mask=True))


def _images(p: Problem, h: int, w: int) -> Tensor:
    return memory.empty(p.n, h, w, p.k).permute(0, 3, 1, 2)


def pack(p: Problem, t: Target, sums: Tensor) -> tuple[Tensor, Tensor]:
    """ReLU and pooling of a convolution's channels-last result, in place where sizes allow."""
    p = _bare(p)
    y = sums if p.epilogue.pool == 1 else _images(p, p.out_h, p.out_w)
    mask = empty(p, t)
    launcher(make_pack, p, Schedule(), t.row)(
        address(sums), 0, 0, 0, address(y), 0, p.n, t.threads, address(mask))
    return y, mask


def unpack(p: Problem, t: Target, grad: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the sums before ReLU and pooling, and that of the bias."""
    mask = mask.to(torch.uint8).contiguous()  # hooks may have saved it in another form
    p = _bare(p)
    if mask.shape != shape(p, t):
        raise TilewiseError(f"mask has shape {tuple(mask.shape)}, needs {shape(p, t)} on {t}: it "
                            "was made for other vectors")
    grad = grad.contiguous(memory_format=torch.channels_last)
    sums, bias = _images(p, p.conv_h, p.conv_w), memory.empty(p.k)
    scratch = memory.empty(unpack_scratch(p, t.lanes))
    launcher(make_unpack, p, Schedule(), t.row)(
        address(grad), 0, address(bias), 0, address(sums), address(scratch), p.n,
        t.threads, address(mask))
    return sums, bias
