"""Resampling of channels-last tensors, with the arguments of torch.nn.functional.interpolate."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from ..core.schedule import Schedule
from ..core.target import Target
from ..kernels.cpu.between import resample
from ..kernels.cpu.between.resample import BILINEAR, NEAREST, Source
from ..kernels.cpu.emit.launch import launcher
from ..kernels.cpu.emit.tiling import ceil_div
from .sweeps import ALONE, Images, Sweep, as_tuple, run, sweep

Scale = float | Sequence[float] | None
WORTH = 1 << 14  # floats to write that are worth a task
single = np.float32  # torch finds places in float32


def upsample(x: Tensor, size: int | Sequence[int] | None = None, scale_factor: Scale = None,
             mode: str = "nearest", align_corners: bool | None = None,
             recompute_scale_factor: bool | None = None, *,
             out: Tensor | None = None) -> Tensor | None:
    """torch.nn.functional.interpolate with mode "nearest" or "bilinear".

    None where torch is to compute: other types, devices or layouts, gradients, arguments that
    torch refuses. `out` may be a slice of the channels of a larger result.
    """
    return run(_resampled, x, out, as_tuple(size), as_tuple(scale_factor), mode, align_corners,
               recompute_scale_factor)


def _resampled(x: Images, size: int | tuple[int, int] | None, scale: Scale, mode: str,
               align_corners: bool | None, recompute: bool | None) -> Sweep | None:
    known = {"nearest": NEAREST, "bilinear": BILINEAR}.get(mode)
    if known is None or (size is None) == (scale is None) or (recompute and scale is None):
        return None
    if known == NEAREST and align_corners is not None:
        return None
    scales = scale if isinstance(scale, tuple) else (scale, scale)
    if size is None:
        sizes = tuple(int(there * by) for there, by in zip((x.h, x.w), scales))
    else:
        sizes = size if isinstance(size, tuple) else (size, size)
    if len(scales) != 2 or len(sizes) != 2 or min(sizes) < 1:
        return None
    if recompute:
        scales = None, None
    find: Callable[..., list[Source]] = _nearest if known == NEAREST else _bilinear
    rows, columns = (find(there, made, by, bool(align_corners), step) for there, made, by, step in
                     zip((x.h, x.w), sizes, scales, (x.w * x.pitch, x.pitch)))
    return _sweep(x, known, rows, columns)


def _nearest(size: int, outputs: int, scale: float | None, align_corners: bool,
             step: int) -> list[Source]:
    # with as many or twice as many, torch looks at no scale
    ratio = _ratio(size, outputs, None if outputs in (size, 2 * size) else scale)
    places = [min(int(single(i) * ratio), size - 1) * step for i in range(outputs)]
    return [Source(place, place) for place in places]


def _bilinear(size: int, outputs: int, scale: float | None, align_corners: bool,
              step: int) -> list[Source]:
    if size == outputs:
        return [Source(i * step, i * step) for i in range(outputs)]
    if align_corners:
        ratio = single(size - 1) / single(outputs - 1) if outputs > 1 else single(0)
        places = [ratio * single(i) for i in range(outputs)]
    else:
        # rounded once, as the fused operation of torch's code
        ratio = float(_ratio(size, outputs, scale))
        places = [max(single(0), single(ratio * (i + 0.5) - 0.5)) for i in range(outputs)]
    return [_between(place, size, step) for place in places]


def _between(place: np.float32, size: int, step: int) -> Source:
    first = min(int(place), size - 1)
    other = min(max(place - single(first), single(0)), single(1))
    return Source(first * step, min(first + 1, size - 1) * step, float(single(1) - other),
                  float(other))


def _ratio(size: int, outputs: int, scale: float | None) -> np.float32:
    ratio: np.float32 = single(1.0 / scale) if scale else single(size) / single(outputs)
    return ratio


def _sweep(x: Images, kind: int, rows: list[Source], columns: list[Source]) -> Sweep:
    out_h, out_w = len(rows), len(columns)
    row = out_w * x.c
    some = min(out_h, ceil_div(WORTH, row))
    sizes = [x.h * x.w * x.pitch, out_h * out_w * x.to, out_w * x.to, x.to, out_h, out_w, x.c,
             some, ceil_div(out_h, some)]
    launch = launcher(resample.make, x.code, Schedule(), Target.host().row, kind, sizes=sizes)
    return sweep(launch, resample.table(rows, columns), (x.n, x.c, out_h, out_w),
                 x.threads if x.n * out_h * row > ALONE else 1, dtype=x.dtype)
