"""filter2d as an operator of torch, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..conv.calls import wants_gradient
from ..conv.checks import kind_of
from ..conv.operators import LIBRARY
from ..core.borders import CONSTANT, sources
from ..core.errors import InvalidProblem
from .arrays import is_interleaved, is_planar, needed, on_arrays


def on_tensors(image: Tensor, kernel: Any, border: str, value: float, anchor: Any, flip: bool,
               out: Any, dtype: Any, algorithm: str | None) -> Any:
    """filter2d of a torch tensor."""
    kernel = torch.as_tensor(kernel, device=image.device)
    _check(image, kernel, anchor, out, dtype)
    if image.dtype == torch.bool:
        dtype = torch.float32 if dtype is None and out is None else dtype
        image = image.view(torch.uint8)
    row, column = (size // 2 for size in kernel.shape) if anchor is None else anchor
    if flip:
        row, column = kernel.shape[0] - 1 - row, kernel.shape[1] - 1 - column
        kernel = kernel.flip(0, 1)
    if out is None:
        return _OP(image, kernel, border, value, [int(row), int(column)], dtype, algorithm)
    if wants_gradient(image, kernel, out):
        raise InvalidProblem("out is given where a gradient is asked for, needs torch.no_grad()")
    found = _OP(image, kernel, border, value, [int(row), int(column)],
                dtype or out.dtype, algorithm) if not image.is_cpu else None
    if found is not None:
        return out.copy_(found)
    on_arrays(_array(image), _weights(kernel), border, value, (row, column), False,
              _array(out), None, algorithm)
    return out


def _check(image: Tensor, kernel: Tensor, anchor: Any, out: Any, dtype: Any) -> None:
    if out is not None and not isinstance(out, Tensor):
        raise InvalidProblem(f"out is {kind_of(out)}, needs a torch.Tensor for an image that is "
                             "one")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise InvalidProblem(f"dtype is {dtype!r}, needs a torch.dtype such as torch.uint8 for an "
                             "image that is a tensor")
    if image.dim() not in (2, 3, 4):
        raise InvalidProblem(f"image has shape {tuple(image.shape)}, needs (H, W), (H, W, C) or "
                             "(N, H, W, C)")
    if kernel.dim() != 2 or 0 in kernel.shape:
        raise InvalidProblem(f"kernel has shape {tuple(kernel.shape)}, "
                             f"{needed(tuple(kernel.shape))}")
    if anchor is not None:
        for place, size, axis in zip(anchor, kernel.shape, ("row", "column")):
            if not 0 <= place < size:
                raise InvalidProblem(f"the anchor's {axis} is {place}, needs one of the kernel's "
                                     f"{size}")


def _array(tensor: Tensor) -> Any:
    return tensor.detach().resolve_neg().numpy()


def _weights(kernel: Tensor) -> Any:
    return kernel.detach().to(torch.float64).cpu().numpy()


def _filter2d(image: Tensor, kernel: Tensor, border: str, value: float, anchor: list[int],
              dtype: Any, algorithm: str | None) -> Tensor:
    if not image.is_cpu:
        return _by_torch(image, kernel, border, value, anchor, dtype)
    wanted = None if dtype is None else _array(torch.empty(0, dtype=dtype)).dtype
    found = on_arrays(_array(image), _weights(kernel), border, value, anchor, False, None,
                      wanted, algorithm)
    return torch.from_numpy(found)


def _by_torch(image: Tensor, kernel: Tensor, border: str, value: float, anchor: list[int],
              dtype: Any) -> Tensor:
    """On other devices: padded, then torch's convolution."""
    dtype = dtype or image.dtype
    double = bool({torch.int32, torch.float64} & {image.dtype, dtype})
    work = torch.float64 if double else torch.float32
    wide = _padded(_planes(image.to(work)), kernel, border, value, anchor)
    found = F.conv2d(wide, kernel.to(work)[None, None])
    if not dtype.is_floating_point:
        bounds = torch.iinfo(dtype)
        found = found.round().clamp(bounds.min, bounds.max)
    return _images(found, image).to(dtype)


def _planes(image: Tensor) -> Tensor:
    """(planes, 1, H, W)."""
    if image.dim() == 2:
        return image[None, None]
    batch = image if image.dim() == 4 else image[None]
    return batch.permute(0, 3, 1, 2).flatten(0, 1)[:, None]


def _images(planes: Tensor, like: Tensor) -> Tensor:
    """Planes as images of the shape of `like`."""
    if like.dim() == 2:
        return planes[0, 0]
    n, c = (1 if like.dim() == 3 else like.shape[0]), like.shape[-1]
    batch = planes[:, 0].unflatten(0, (n, c)).permute(0, 2, 3, 1)
    return batch[0] if like.dim() == 3 else batch


def _maps(planes: Tensor, kernel: Tensor, border: str, anchor: list[int]) -> list[Tensor]:
    """Which row and which column every place of the padded image shows."""
    return [torch.from_numpy(sources(size, at, taps - 1 - at, border)).to(planes.device)
            for size, taps, at in zip(planes.shape[2:], kernel.shape, anchor, strict=True)]


def _padded(planes: Tensor, kernel: Tensor, border: str, value: float,
            anchor: list[int]) -> Tensor:
    rows, columns = _maps(planes, kernel, border, anchor)
    wide = planes.index_select(2, rows.clamp(min=0)).index_select(3, columns.clamp(min=0))
    outside = (rows == CONSTANT)[:, None] | (columns == CONSTANT)
    return wide.masked_fill(outside, value)


def _folded(wide: Tensor, planes: Tensor, maps: list[Tensor]) -> Tensor:
    """The adjoint of padding: what lies beyond an edge is added to where it came from."""
    for axis, places in zip((2, 3), maps):
        shape = list(wide.shape)
        shape[axis] = planes.shape[axis]
        inside = (places != CONSTANT).nonzero()[:, 0]
        wide = wide.new_zeros(shape).index_add(axis, places[inside],
                                               wide.index_select(axis, inside))
    return wide


def _fake(image: Tensor, kernel: Tensor, border: str, value: float, anchor: list[int],
          dtype: Any, algorithm: str | None) -> Tensor:
    """Shape and strides of the result, without computing it."""
    if image.dim() == 2:
        return image.new_empty(image.shape, dtype=dtype)
    batch = image if image.dim() == 4 else image[None]
    n, h, w, c = batch.shape
    if is_planar(batch.shape, batch.stride(), 1) and not is_interleaved(
            batch.shape, batch.stride(), 1):
        found = image.new_empty((n, c, h, w), dtype=dtype).permute(0, 2, 3, 1)
    else:
        found = image.new_empty(batch.shape, dtype=dtype)
    return found if image.dim() == 4 else found[0]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    image, kernel, border, value, anchor, *_ = inputs
    ctx.save_for_backward(image, kernel)
    ctx.options = border, value, anchor


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """By the convolution: of the gradient, and of the image with the gradient."""
    (image, kernel), (border, value, anchor) = ctx.saved_tensors, ctx.options
    work = image.dtype if image.is_floating_point() else grad.dtype
    planes, slopes = _planes(image.to(work)), _planes(grad.to(work))
    weight = kernel.to(work)
    wide = _padded(planes, weight, border, value, anchor)
    needs = [*ctx.needs_input_grad[:2], False]
    dwide, dkernel, _ = torch.ops.aten.convolution_backward(
        slopes, wide, weight[None, None], None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1, needs)
    dimage = None
    if dwide is not None:
        dimage = _images(_folded(dwide, planes, _maps(planes, weight, border, anchor)), image)
    dkernel = None if dkernel is None else dkernel[0, 0].to(kernel.dtype)
    return dimage, dkernel, *[None] * 5


LIBRARY.define("filter2d(Tensor image, Tensor kernel, str border, float value, int[] anchor, "
                "ScalarType? dtype, str? algorithm) -> Tensor")
LIBRARY.impl("filter2d", _filter2d, "CompositeExplicitAutograd")
torch.library.register_fake("tilewise::filter2d", _fake, lib=LIBRARY)
torch.library.register_autograd("tilewise::filter2d", _backward, setup_context=_save,
                                lib=LIBRARY)
_OP = torch.ops.tilewise.filter2d.default
