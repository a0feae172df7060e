"""tilewise.conv_transpose3d: a drop-in for torch.nn.functional.conv_transpose3d.

Slices are images. Each tap of the depth is a transposed convolution of some slices. Its results go
to every so many slices of the result, where they add to those of other taps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.errors import NoAlgorithm
from ..core.grid import Grid
from ..core.problem import Epilogue, Problem
from ..core.target import Target
from ..kernels import precision
from ..runtime.weights import as_floats
from .again import form
from .calls import KERNEL, Call, check_tensors, gate, is_channels_last
from .devices import target_of
from .running import ENGINE
from .slices import Spread, Volume, by_taps, is_ours, planes
from .transposed import Transposed, by_torch, call_of, cast_call, check, is_gradient, result_shape

# of torch's estimate that ours may take: that is for images, and torch is slower with volumes
SHARE = 3.0


def conv_transpose3d(x: Tensor, weight: Tensor, bias: Tensor | None = None,
                     stride: int | Sequence[int] = 1, padding: int | Sequence[int] = 0,
                     output_padding: int | Sequence[int] = 0, groups: int = 1,
                     dilation: int | Sequence[int] = 1, *, activation: str | None = None,
                     residual: Tensor | None = None, max_error: float | None = None) -> Tensor:
    """`torch.nn.functional.conv_transpose3d`, then what often follows it; see `conv_transpose2d`.

    It is computed slice by slice, as images, where that should be faster than torch. Calls that
    need gradients are torch's.

    >>> x, weight = torch.randn(1, 8, 6, 16, 16), torch.randn(8, 4, 2, 2, 2)
    >>> conv_transpose3d(x, weight, stride=2, activation="relu").shape
    torch.Size([1, 4, 12, 32, 32])
    """
    check_tensors(x, weight)
    if x.dim() == 4:
        extra = None if residual is None else residual.unsqueeze(0)
        return conv_transpose3d(x.unsqueeze(0), weight, bias, stride, padding, output_padding,
                                groups, dilation, activation=activation, residual=extra,
                                max_error=max_error).squeeze(0)
    call = call_of(x, weight, bias, stride, padding, output_padding, groups, dilation,
                   activation=activation, residual=residual, max_error=max_error)
    fits = x.dim() == weight.dim() == 5 and is_gradient(call)
    call, rest = cast_call(call) if fits else (call, None)
    if rest is not None:
        return rest(conv_transpose3d(*call[:3], *call[4:9], max_error=max_error))
    if not fits or gate(Call(*call[:4])) != KERNEL:
        return by_torch(call)  # which says what is wrong, if something is
    return _run(call)


def _run(call: Transposed) -> Tensor:
    x = call.x
    if len(x) == 0 or not is_ours(x):
        return by_torch(call)
    check(call)
    volume = volume_of(call)
    last = is_channels_last(x) or is_channels_last(call.weight)
    if not volume.stretches:
        return by_torch(call).contiguous(
            memory_format=torch.channels_last_3d if last else torch.contiguous_format)
    for plan in volume.plans.values():
        ENGINE.tell(plan)
    y = volume(_widened(call)).to(x.dtype)
    return y if last else planes(y)


def _widened(call: Transposed) -> Transposed:
    """In float32: sums go from tap to tap through memory, and must not be rounded there."""
    if call.x.dtype == torch.float32:
        return call
    residual = None if call.residual is None else call.residual.float()
    return call._replace(x=call.x.float(), weight=as_floats(call.weight), residual=residual,
                         bias=None if call.bias is None else as_floats(call.bias))


def volume_of(call: Transposed) -> Volume:
    """How a call is run, planned once; without stretches, torch does it."""
    key = ("transposed volume", form(call.x), form(call.weight), call.bias is None,
           call.residual is None, *call[4:], torch.get_num_threads(), precision.asked())
    found: Volume | None = ENGINE.executables.get(key)
    return ENGINE.executables.put(key, _planned(call)) if found is None else found


def _planned(call: Transposed) -> Volume:
    """By the slices, unless torch should be faster with the whole, or some slice has no tap."""
    depth, t = depth_of(call), target_of(call.x)
    p = images_of(call, len(call.x) * depth.outputs)
    none = Volume(p, depth)
    if p.groups > 1 or not all(map(depth.met, range(depth.outputs))) or (
            depth.step > 1 and p.stride == (1, 1)):
        return none
    apart = Grid(1, 1, depth.step * p.h, p.w) if depth.step > 1 else None
    try:
        volume, seconds = by_taps(p, depth, lambda q: ENGINE.plan(
            q.with_(grid=apart), t, max_error=call.max_error))
    except NoAlgorithm:
        return none
    return volume if len(call.x) * seconds < SHARE * _theirs(p, t, call, depth) else none


def _theirs(p: Problem, t: Target, call: Transposed, depth: Spread) -> float:
    """The seconds of torch's convolution with as many products."""
    whole = p.with_(n=len(call.x) * depth.size, k=p.k * depth.taps, epilogue=Epilogue())
    return ENGINE.plan(whole, t, algorithm="vendor").seconds


def depth_of(call: Transposed) -> Spread:
    return Spread(call.x.shape[2], result_shape(call)[2], call.weight.shape[2], call.stride[0],
                  call.padding[0], call.dilation[0])


def images_of(call: Transposed, count: int) -> Problem:
    """So many slices of the result as one problem."""
    _, c, _, h, w = result_shape(call)
    k, _, _, r, s = call.weight.shape
    (_, down, across), (_, top, left), (_, dh, dw) = call.stride, call.padding, call.dilation
    tail = Epilogue(call.bias is not None, call.residual is not None, call.activation)
    return Problem(count, c, h, w, k, r, s, (down, across), (top, top, left, left), (dh, dw),
                   call.groups, direction="backward_data", epilogue=tail)


def shape_of(call: Transposed) -> Tensor:
    """A tensor like the result of a call."""
    check(call)
    y = call.x.new_empty(result_shape(call))
    last = is_channels_last(call.x) or is_channels_last(call.weight)
    return y.to(memory_format=torch.channels_last_3d) if last else y
