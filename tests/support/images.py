"""Channels-last images between unmapped pages, dense or as a slice of the channels of others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.bench.guarded import ARENA, UNTOUCHED, Buffer, Mismatch

Run = Callable[[Tensor, Tensor], Tensor | None]


def strides(shape: tuple[int, ...], pitch: int) -> tuple[int, int, int, int]:
    """Of channels-last images whose pixels lie so many floats apart."""
    return shape[2] * shape[3] * pitch, 1, shape[3] * pitch, pitch


def sliced(x: Tensor, pitch: int) -> Tensor:
    """The same values as the first channels of larger pixels, NaN behind them."""
    n, c, h, w = x.shape
    whole = torch.full((n, h, w, pitch), float("nan"))
    whole[..., :c] = x.permute(0, 2, 3, 1)
    return whole.permute(0, 3, 1, 2)[:, :c]


def run_guarded(run: Run, x: Tensor, shape: tuple[int, ...], gap: int, side: str) -> Tensor:
    """What run(x, out) writes to `out`; `gap` floats that are nobody's lie behind each pixel."""
    with ARENA.buffers([_extent(x.shape, gap), _extent(shape, gap)], side) as (source, target):
        given, out = _images(source, x.shape, gap).copy_(x), _images(target, shape, gap)
        before = source.values.clone().view(torch.int32)
        if run(given, out) is not out:
            raise Mismatch("the result is not the tensor that was given")
        if not (source.around_untouched() and target.around_untouched()):
            raise Mismatch("wrote beside an image")
        if not torch.equal(before, source.values.view(torch.int32)):
            raise Mismatch("wrote to what it reads")
        found = out.clone()
        out.view(torch.int32).fill_(UNTOUCHED)
        if not bool((target.values.view(torch.int32) == UNTOUCHED).all()):
            raise Mismatch("wrote between pixels")
        return found


def _extent(shape: tuple[int, ...], gap: int) -> int:
    """Floats from the first to the last, without the last gap."""
    return shape[0] * shape[2] * shape[3] * (shape[1] + gap) - gap


def _images(buffer: Buffer, shape: tuple[int, ...], gap: int) -> Tensor:
    return buffer.values.as_strided(shape, strides(shape, shape[1] + gap))


def require_same(found: Tensor, expected: Tensor, what: str, error: float = 0.0) -> None:
    """NaN is NaN; else within some share of the largest value."""
    far = (found.double() - expected.double()).abs() > error * expected.double().nan_to_num(
        0, 0, 0).abs().max()
    same = (found == expected) | (found.isnan() & expected.isnan())
    if not bool((same | ((error > 0) & ~far & ~found.isnan() & ~expected.isnan())).all()):
        raise Mismatch(f"{what}: not torch's values")
