"""A convolution as it was asked for, and who runs it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.activations import SLOPED
from ..core.errors import InvalidProblem
from ..core.isa import KNOWN
from ..core.problem import Epilogue, Problem
from ..runtime.types import DTYPES
from .again import is_transformed, is_unwatched
from .checks import kind_of
from .options import output_shape

NAMES = {dtype: name for name, dtype in DTYPES.items()}
TORCH, KERNEL, OPERATOR, GRADIENT = "torch", "kernel", "operator", "gradient"
# of an input and of a filter, by the number of axes
SHAPES = {1: ("L", "S"), 2: ("H, W", "R, S"), 3: ("D, H, W", "T, R, S")}


class Call(NamedTuple):
    """In the order of the operator's arguments; options as `options_of` gives them."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None
    stride: Any = (1, 1)
    padding: Any = (0, 0, 0, 0)
    dilation: Any = (1, 1)
    groups: int = 1
    activation: str | None = None
    pool: int = 1
    algorithm: str | None = None
    max_error: float | None = None
    slope: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return *self[:4], self.slope


def gate(call: Call, *others: Tensor | None) -> str:
    """Who runs a call: torch, our operator, which modes of torch watch, the kernel itself, or
    what has a gradient; `others` are tensors of a norm behind it."""
    if _only_torch_can(call):
        return TORCH
    if wants_gradient(*call.tensors, *others):
        return GRADIENT if call.x.shape[0] else TORCH  # of no images, torch's is as good
    return KERNEL if is_unwatched(*call.tensors, *others) else OPERATOR


def _only_torch_can(call: Call) -> bool:
    """Types and sizes no problem describes, modes that an operator of ours cannot see, and CPUs
    that no code is written for."""
    x, weight = call.x, call.weight
    if x.dtype not in NAMES or 0 in x.shape[1:] or 0 in weight.shape or not KNOWN:
        return True
    if torch._C._is_any_autocast_enabled() and _is_cast(call):
        return True
    return not torch.compiler.is_compiling() and is_transformed()


def _is_cast(call: Call) -> bool:
    """Whether autocast makes other operands of these."""
    device = call.x.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return False
    dtype = torch.get_autocast_dtype(device)
    return not call.x.is_cpu or any(t is not None and t.dtype != dtype for t in call.tensors)


def wants_gradient(*operands: Any) -> bool:
    """Whether autograd will ask for a gradient through these."""
    # Dynamo cannot ask for the second, under which nothing is recorded even where gradients are on
    records = torch.is_grad_enabled() and (
        torch.compiler.is_compiling() or not torch.is_inference_mode_enabled())
    return records and any(isinstance(t, Tensor) and t.requires_grad for t in operands)


def check(x: Tensor, weight: Tensor, bias: Tensor | None, axes: int = 2) -> None:
    """Complain about shapes that are none of a convolution."""
    if x.dim() != axes + 2 or weight.dim() != axes + 2:
        _complain(x, weight, *SHAPES[axes])
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InvalidProblem(f"bias has shape {tuple(bias.shape)}, needs ({weight.shape[0]},)")


def _complain(x: Tensor, weight: Tensor, sizes: str, taps: str) -> None:
    axes = sizes.count(",") + 1
    if x.dim() == axes + 1:  # only where a batch norm follows, which torch refuses too
        raise InvalidProblem(f"input has shape {tuple(x.shape)}, needs (N, C, {sizes}) for the "
                             "batch norm behind the convolution: x.unsqueeze(0)")
    if x.dim() != axes + 2:
        raise InvalidProblem(f"input has shape {tuple(x.shape)}, needs (N, C, {sizes}) or "
                             f"(C, {sizes})")
    raise InvalidProblem(f"weight has shape {tuple(weight.shape)}, needs (K, C/groups, {taps})")


def check_tensors(x: object, weight: object) -> None:
    """Complain about what is no tensor."""
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor):
        raise InvalidProblem(f"x is {kind_of(x)} and weight is {kind_of(weight)}, needs "
                             "torch.Tensor: torch.from_numpy(array)")


def check_residual(residual: Tensor, x: Tensor, weight: Tensor, *options: Any) -> None:
    """Complain about a residual of another shape than the output's; options as in torch."""
    shape = output_shape(x, weight, *options)
    if tuple(residual.shape) != shape:
        raise InvalidProblem(f"residual has shape {tuple(residual.shape)}, needs {shape}")


def check_slope(slope: Tensor | None, activation: str | None, k: int) -> None:
    """Complain about slopes that lack, that nothing reads, or that are not one or k."""
    if activation not in SLOPED:
        if slope is not None:
            raise InvalidProblem(f"slope is given with activation {activation}, needs "
                                 f"{', '.join(SLOPED)}")
    elif not isinstance(slope, Tensor):
        raise InvalidProblem(f"activation is {activation} and slope is {slope!r}, needs a tensor "
                             f"of {k} slopes, or of one for all: slope=torch.full(({k},), 0.25)")
    elif slope.dim() > 1 or slope.numel() not in (1, k):
        raise InvalidProblem(f"slope has shape {tuple(slope.shape)}, needs ({k},) or (1,)")


def is_by_filter(x: Tensor, weight: Tensor, slope: Tensor | None) -> bool:
    """Whether torch has a slope for each filter as well: it goes by the second axis."""
    return slope is None or x.dim() == weight.dim() or slope.numel() == 1


def is_channels_last(tensor: Tensor) -> bool:
    """Whether torch takes a tensor for channels-last: strides that grow over C, W, H (, D), N."""
    shape, strides = tensor.shape, tensor.stride()
    reach = 0
    for axis in (1, *range(tensor.dim() - 1, 1, -1)):
        if strides[axis] < max(reach, 1):
            return False
        reach = shape[axis] * strides[axis]
    return bool(strides[0] >= reach != strides[1] and 0 not in shape)


def problem_of(call: Call, mask: bool = False, stored: bool = False) -> Problem:
    """The problem that a call asks for; `stored` as in `check_operands`."""
    x, weight, bias, residual = call[:4]
    check_operands(call, stored)
    layout = "nhwc" if is_channels_last(x) or is_channels_last(weight) else "nchw"
    (down, across), (top, bottom, left, right), (dh, dw) = call[4:7]
    p = Problem(x.shape[0], x.shape[1], x.shape[2], x.shape[3], weight.shape[0], weight.shape[2],
                weight.shape[3], (down, across), (top, bottom, left, right), (dh, dw), call.groups,
                NAMES.get(x.dtype, str(x.dtype)), layout,
                epilogue=Epilogue(bias is not None, residual is not None, call.activation,
                                  call.pool, mask))
    shape = (p.n, p.k, p.conv_h, p.conv_w)
    if residual is not None and residual.shape != shape:
        raise InvalidProblem(f"residual has shape {tuple(residual.shape)}, needs {shape}")
    return p


def check_operands(call: Call, stored: bool = False) -> None:
    """Complain about operands that do not fit each other; `stored`: images may be of another type
    than the weight."""
    x, weight = call.x, call.weight
    if x.shape[1] != weight.shape[1] * call.groups:
        raise InvalidProblem(f"input has {x.shape[1]} channels, needs "
                             f"{weight.shape[1] * call.groups} for a weight of shape "
                             f"{tuple(weight.shape)} and groups={call.groups}")
    check_kinds(x, weight, call.bias, call.residual, call.slope, stored)


def check_kinds(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
                slope: Tensor | None = None, stored: bool = False) -> None:
    """Complain about operands on different devices, or of different types."""
    given = [t for t in (x, weight, bias, residual, slope) if t is not None]
    devices = {t.device for t in given}
    dtypes = {t.dtype for t in given if not (stored and (t is x or t is residual))}
    if len(devices) > 1:
        raise InvalidProblem(f"operands are on {', '.join(sorted(map(str, devices)))}, need one "
                             "device")
    if len(dtypes) > 1:
        raise InvalidProblem(f"operands are {', '.join(sorted(map(str, dtypes)))}, need one dtype")
