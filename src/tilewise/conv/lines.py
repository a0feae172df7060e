"""tilewise.conv1d: a drop-in for torch.nn.functional.conv1d, by images of one row."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .again import form, is_unwatched
from .calls import Call, check, check_residual, check_tensors, wants_gradient
from .ops import conv2d
from .options import options_of

_images: dict[int, tuple[Any, Tensor]] = {}  # by a weight's id: a reference to it, and its view


def conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None,
           stride: int | Sequence[int] = 1, padding: int | str | Sequence[int] = 0,
           dilation: int | Sequence[int] = 1, groups: int = 1, *,
           activation: str | None = None, slope: Tensor | None = None,
           residual: Tensor | None = None, algorithm: str | None = None,
           max_error: float | None = None) -> Tensor:
    """`torch.nn.functional.conv1d`, then what often follows it, in one call.

    The residual is added first, then comes the activation. Gradients work. The result's channels
    lie side by side in memory where those of `x` do.

    Args:
        x: Signals, (N, C, L) or (C, L).
        weight: Filters, (K, C / groups, S).
        bias: One value for each filter.
        stride: As in torch.
        padding: As in torch, or (left, right).
        dilation: As in torch.
        groups: As in torch.
        activation: As in `conv2d`.
        slope: As in `conv2d`.
        residual: A tensor of the output's shape.
        algorithm: As in `conv2d`.
        max_error: As in `conv2d`.

    Returns:
        The result, (N, K, L) or (K, L), with the length of the output.

    >>> import torch
    >>> x, weight = torch.randn(1, 8, 100), torch.randn(4, 8, 3)
    >>> conv1d(x, weight, padding=1, activation="relu").shape
    torch.Size([1, 4, 100])
    """
    check_tensors(x, weight)
    if x.dim() == 2:
        extra = None if residual is None else residual.unsqueeze(0)
        return conv1d(x.unsqueeze(0), weight, bias, stride, padding, dilation, groups,
                      activation=activation, slope=slope, residual=extra, algorithm=algorithm,
                      max_error=max_error).squeeze(0)
    check(x, weight, bias, 1)
    (step,), sides, (apart,), *_ = options_of(stride, padding, dilation, groups, activation, 1,
                                              weight.shape[2:])
    if residual is not None:
        check_residual(residual, x, weight, step, sides, apart)
        residual = residual.unsqueeze(2)
    return conv2d(x.unsqueeze(2), as_image(weight), bias, (1, step), (0, 0, *sides), (1, apart),
                  groups, activation=activation, slope=slope, residual=residual,
                  algorithm=algorithm, max_error=max_error).squeeze(2)


def in_planes(signal: Tensor) -> Tensor:
    """As torch lays signals, also where a size of one would allow other strides."""
    plain = signal.contiguous()
    if plain.numel() == 0 or plain.stride()[-2:] == (plain.shape[-1], 1):
        return plain
    return plain.view(-1).view(plain.shape)


def as_images(call: Call) -> Call:
    """The same call of images of one row."""
    residual = None if call.residual is None else call.residual.unsqueeze(2)
    return call._replace(x=call.x.unsqueeze(2), weight=call.weight.unsqueeze(2), residual=residual,
                         stride=(1, *call.stride), padding=(0, 0, *call.padding),
                         dilation=(1, *call.dilation))


def as_image(weight: Tensor) -> Tensor:
    """Filters of one row; the same tensor in every call, since prepared weights are kept by it."""
    if wants_gradient(weight) or not is_unwatched(weight):
        return weight.unsqueeze(2)
    key = id(weight)
    source, image = _images.get(key, (None, weight))
    if source is None or source() is not weight or _place(image) != _place(weight.unsqueeze(2)):
        image = weight.detach().unsqueeze(2)  # which shares the counter of changes
        _images[key] = (weakref.ref(weight, lambda _: _images.pop(key, None)), image)
    return image


def image_of(weight: Tensor) -> Tensor | None:
    """What `as_image` keeps of a weight, if it was asked for."""
    source, image = _images.get(id(weight), (None, None))
    return image if source is not None and source() is weight else None


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), form(tensor)
