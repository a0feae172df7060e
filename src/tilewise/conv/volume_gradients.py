"""Gradients of a convolution of volumes: slice by slice, or by torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..algorithms.vendor import seen_pixels, skips_pixels
from .calls import Call
from .devices import target_of
from .gradients import among_unseen, by_engine
from .running import ENGINE
from .slices import Depth, depth_of, images_of, is_ours, slices, volume_of, widened

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def by_slices(call: Call, grad: Tensor, wants: Sequence[bool]) -> Gradients:
    """Of x, weight and bias, as far as they are wanted; `call` has neither bias nor tail."""
    x = call.x
    if not is_ours(x) or not volume_of(call).stretches:
        return by_torch(call, grad, wants)
    if x.dtype != torch.float32:
        dx, dw, db = (g if g is None else g.to(x.dtype)
                      for g in by_slices(widened(call), grad.float(), wants))
        return dx, dw, db
    dx = _of_input(call, grad) if wants[0] else None
    if wants[0] and dx is None:
        dx = by_torch(call, grad, (True, False, False))[0]
    return (dx, _of_weight(call, grad) if wants[1] else None,
            grad.sum((0, 2, 3, 4)) if wants[2] else None)


def _of_input(call: Call, grad: Tensor) -> Tensor | None:
    """A convolution with the weight's channels swapped and its taps reversed, if there is one."""
    weight, groups = call.weight, call.groups
    spans = [d * (taps - 1) for d, taps in zip(call.dilation, weight.shape[2:], strict=True)]
    padding = [span - call.padding[2 * i + side] for i, span in enumerate(spans)
               for side in range(2)]
    if max(call.stride) > 1 or min(padding) < 0:
        return None
    mirrored = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1).flip(2, 3, 4)
    back = call._replace(x=grad, weight=mirrored, padding=tuple(padding))
    volume = volume_of(back)
    if not volume.stretches:
        return None
    for plan in volume.plans.values():
        ENGINE.tell(plan)
    return volume(back)


def _of_weight(call: Call, grad: Tensor) -> Tensor:
    """Tap by tap: the gradient of the images' weight, summed over the slices that it meets."""
    depth = depth_of(call)
    found = [_of_tap(call, grad, depth, tap) for tap in range(depth.taps)]
    return torch.stack(found, 2)


def _of_tap(call: Call, grad: Tensor, depth: Depth, tap: int) -> Tensor:
    k, c, _, r, s = call.weight.shape
    outputs = [i for i in range(depth.outputs) if tap in depth.met(i)]
    if not outputs:
        return call.weight.new_zeros((k, c, r, s))
    first, last = depth.source(outputs[0], tap), depth.source(outputs[-1], tap)
    x = slices(call.x[:, :, first:last + 1:depth.stride])
    dy = slices(grad[:, :, outputs[0]:outputs[-1] + 1])
    p = images_of(call, len(x))
    dw = by_engine(ENGINE, p, target_of(x), dy, x, call.weight[:, :, tap], None,
                   (False, True, False, False), call.max_error)[1]
    assert dw is not None
    return dw


def by_torch(call: Call, grad: Tensor, wants: Sequence[bool]) -> Gradients:
    """In torch's own operators, which autograd knows how to differentiate."""
    if skips_pixels(call.weight.shape[2:], call.stride):
        return _of_seen(call, grad, wants)
    front, back, top, bottom, left, right = call.padding
    even = (front, top, left) == (back, bottom, right)
    wide = call.x if even else F.pad(call.x, (left, right, top, bottom, front, back))
    dx, dw, db = torch.ops.aten.convolution_backward(
        grad, wide, call.weight, [call.weight.shape[0]], call.stride,
        (front, top, left) if even else (0, 0, 0), call.dilation, False, (0, 0, 0), call.groups,
        list(wants))
    return dx if dx is None or even else _inside(call, dx), dw, db


def _of_seen(call: Call, grad: Tensor, wants: Sequence[bool]) -> Gradients:
    """Of a filter of one tap with strides, as a dense one of the pixels that it sees: torch 2.13
    writes beyond its memory in the weight's gradient of such filters of images."""
    seen = seen_pixels(call.x, call.stride, call.padding).contiguous()
    dense = call._replace(x=seen, stride=(1, 1, 1), padding=(0,) * 6)
    dx, dw, db = by_torch(dense, grad, wants)
    if dx is not None:
        sizes = [size + sum(call.padding[2 * i:2 * i + 2])
                 for i, size in enumerate(call.x.shape[2:])]
        dx = _inside(call, among_unseen(dx, sizes, call.stride))
    return dx, dw, db


def _inside(call: Call, dx: Tensor) -> Tensor:
    """Without the padding."""
    (front, _, top, _, left, _), (d, h, w) = call.padding, call.x.shape[2:]
    return dx[..., front:front + d, top:top + h, left:left + w]
