"""Filters of NumPy arrays: what a call needs, planned once and remembered."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ..algorithms import FILTERS
from ..conv.checks import kind_of
from ..core.errors import InvalidProblem
from ..core.filter import WIDE, Filter
from ..core.target import Target
from ..runtime.filters import (
    NAMES,
    FilterCall,
    FilterEngine,
    FilterExecutable,
    Step,
    View,
    empty,
    token,
)

ENGINE = FilterEngine(FILTERS)
# what to do about an image of a type that is refused
FITTING = dict.fromkeys(("int64", "uint64", "uint32"), ("int32", ", if the values fit"))
OTHER = {**FITTING, "int8": ("int16", ""), "float16": ("float32", "")}


def on_arrays(image: Any, kernel: Any, border: str, value: float, anchor: Any, flip: bool,
              out: Any, dtype: Any, algorithm: str | None, form: str = "sum",
              order: int = 0, told: bool = False) -> Any:
    """A NumPy array filtered with a float64 kernel; of form "order", ones are the footprint.

    With `told`, the answer is the call that any others of these shapes would make with these
    arguments, or None where it depends on values or addresses.
    """
    image = np.asarray(image)
    if out is not None and not isinstance(out, np.ndarray):
        raise InvalidProblem(f"out is {kind_of(out)}, needs a NumPy array for a NumPy image")
    if image.dtype.kind == "b":
        dtype = np.float32 if dtype is None and out is None else dtype
        image = image.view(np.uint8)
    anchor = anchor if anchor is None else tuple(anchor)
    key = (image.shape, image.strides, image.dtype, _signature(out), kernel.shape,
           token(kernel), border, anchor, flip, dtype, algorithm, form, order,
           torch.get_num_threads())
    call = ENGINE.calls.get(key)
    if call is None:
        call = ENGINE.calls.put(key, _call(image, kernel, border, anchor, flip, out, dtype,
                                           algorithm, form, order))
    if out is not None and (call.through_another or np.may_share_memory(image, out)):
        out[...] = on_arrays(image, kernel, border, value, anchor, flip, None, out.dtype,
                             algorithm, form, order)
        return None if told else out
    x = as_batch(image)
    y = output_like(x, call.dtype) if out is None else as_batch(out)
    if call.run is not None:
        instead = _instead(call.run.algorithm, x, border, value)
        if instead:
            found = on_arrays(image, kernel, border, value, anchor, flip, out, dtype, instead,
                              form, order)
            return None if told else found
        ENGINE.tell(call.run.plan)
        call.run(x, y, call.kernel, value)
    if told:
        return call if call.run and call.run.at else None
    return out if out is not None else y.reshape(image.shape) if image.ndim < 4 else y


def run_at(step: Step, x: int, y: int) -> None:
    """A call that was told of, for arrays that begin at these addresses."""
    run: Any = step.call.run
    if ENGINE.observers:
        ENGINE.tell(run.plan)
    run.at(x + step.x, y + step.y, step.call.weight, step.bits)


def _instead(algorithm: Any, x: Any, border: str, value: float) -> str:
    """The method for values that the chosen one is not for; mostly none."""
    if algorithm.spreads and not _is_finite(x, border, value):
        return "filter_direct"
    if getattr(algorithm, "bounds_constant", False) and border == "constant" and not holds(
            x.dtype, value):
        return "filter_taps"
    return ""


def holds(dtype: Any, value: float) -> bool:
    """Whether an integer type has this value."""
    bounds = np.iinfo(dtype)
    return bool(bounds.min <= value <= bounds.max) and value == int(value)


def _is_finite(x: Any, border: str, value: float) -> bool:
    """Whether a method that spreads infinities and NaN finds none."""
    return (border != "constant" or math.isfinite(value)) and (
        x.dtype.kind != "f" or bool(np.isfinite(x).all()))


def _signature(out: Any) -> object:
    """All of an output that a call can depend on."""
    return None if out is None else (out.shape, out.strides, out.dtype, out.flags.aligned,
                                     out.flags.writeable)


def _call(image: Any, kernel: Any, border: str, anchor: Any, flip: bool, out: Any, dtype: Any,
          algorithm: str | None, form: str, order: int) -> FilterCall:
    """What is the same for every call with these arguments, whatever the pixels."""
    dtype = None if dtype is None else _as_dtype(dtype)
    _check(image, kernel, out, dtype)
    x = as_batch(image)
    kernel, at = oriented(kernel, anchor, flip)
    y = output_like(x, dtype or image.dtype) if out is None else as_batch(out)
    if not _is_plain(y):
        return FilterCall(y.dtype, through_another=True)
    if not y.size:
        return FilterCall(y.dtype)
    run = _executable(x, y, kernel, border, at, algorithm, form, order)
    return FilterCall(y.dtype, run, run.prepare(kernel))


def _as_dtype(dtype: Any) -> Any:
    try:
        return np.dtype(dtype)
    except TypeError:
        raise InvalidProblem(f"dtype is {dtype}, needs a NumPy type such as np.uint8 for a NumPy "
                             "image") from None


def _check(image: Any, kernel: Any, out: Any, dtype: Any) -> None:
    if image.ndim not in (2, 3, 4):
        raise InvalidProblem(f"image has shape {image.shape}, needs (H, W), (H, W, C) or "
                             "(N, H, W, C)")
    if kernel.ndim != 2 or 0 in kernel.shape:
        raise InvalidProblem(f"kernel has shape {kernel.shape}, {needed(kernel.shape)}")
    if out is not None and out.shape != image.shape:
        raise InvalidProblem(f"out has shape {out.shape}, needs that of the image, {image.shape}")
    if out is not None and dtype is not None and dtype != out.dtype:
        raise InvalidProblem(f"dtype is {dtype} and out is {out.dtype}, need one type")
    if out is not None and not out.flags.writeable:
        raise InvalidProblem("out is read-only, needs an array to write to")
    for name, found in (("image", image.dtype),
                        ("the result", dtype or (image if out is None else out).dtype)):
        if found not in NAMES:
            known = ["bool"] * (name == "image") + [*map(str, NAMES)]
            advice = _conversion(str(found)) if name == "image" else ""
            raise InvalidProblem(f"{name} is {found}, needs one of {', '.join(known)}{advice}")


def _conversion(found: str) -> str:
    if found not in OTHER:
        return ""
    better, where = OTHER[found]
    return f": image.astype(np.{better}), or image.to(torch.{better}) for a tensor{where}"


def needed(shape: tuple[int, ...]) -> str:
    """Of a kernel that has another shape."""
    if len(shape) == 1 and shape[0]:
        return "needs (rows, columns): a row is kernel[None, :], a column kernel[:, None]"
    if len(shape) == 3 and shape[2] == 1:
        return "needs (rows, columns), and is applied to every channel: kernel[:, :, 0]"
    return "needs (rows, columns), at least 1 of each; it is applied to every channel"


def as_batch(image: Any) -> Any:
    """As (N, H, W, C), without a copy."""
    if image.ndim == 2:
        return image[None, :, :, None]
    return image[None] if image.ndim == 3 else image


def oriented(kernel: Any, anchor: Any, flip: bool) -> tuple[Any, tuple[int, int]]:
    """Kernel and anchor of the correlation that is asked for."""
    r, s = kernel.shape
    row, column = (r // 2, s // 2) if anchor is None else map(int, anchor)
    if flip:
        return kernel[::-1, ::-1], (r - 1 - row, s - 1 - column)
    return kernel, (row, column)


def is_interleaved(shape: Any, strides: Any, item: int) -> bool:
    """Whether the channels of a pixel, and the pixels of a row, lie side by side."""
    _, _, w, c = shape
    return (c == 1 or strides[3] == item) and (w == 1 or strides[2] == c * item)


def is_planar(shape: Any, strides: Any, item: int) -> bool:
    """Whether every channel is a plane of its own, with its pixels side by side."""
    return shape[2] == 1 or strides[2] == item


def _is_plain(y: Any) -> bool:
    """Whether kernels can write it."""
    return y.flags.aligned and (is_interleaved(y.shape, y.strides, y.itemsize) or is_planar(
        y.shape, y.strides, y.itemsize))


def output_like(x: Any, dtype: Any) -> Any:
    """An array for the result, laid out like the image: channels in pixels, or in planes."""
    n, h, w, c = x.shape
    apart = is_planar(x.shape, x.strides, x.itemsize) and not is_interleaved(
        x.shape, x.strides, x.itemsize)
    return empty((n, c, h, w), dtype).transpose(0, 2, 3, 1) if apart else empty(x.shape, dtype)


def _executable(x: Any, y: Any, kernel: Any, border: str, anchor: tuple[int, int],
                algorithm: str | None, form: str, order: int) -> FilterExecutable:
    threads = torch.get_num_threads()
    shape = _shape(x, y, kernel, form, order)
    key = (x.shape, x.strides, x.dtype, y.strides, y.dtype, kernel.shape, *shape.values(), border,
           anchor, algorithm, threads)
    found = ENGINE.ready.get(key)
    if found is None:
        p = _problem(x, y, kernel.shape, border, anchor, shape)
        plan = ENGINE.plan_filter(p, Target.host(threads=threads), algorithm)
        planes = x.shape[3] // p.c
        found = ENGINE.ready.put(
            key, ENGINE.build_for(plan, View(x.strides, planes), View(y.strides, planes)))
    return found


def _shape(x: Any, y: Any, kernel: Any, form: str, order: int) -> dict[str, Any]:
    """What a plan may know of the kernel's values."""
    if form == "sum":
        wide = WIDE & {NAMES[x.dtype], NAMES[y.dtype]}
        return {"form": form, "rank": ENGINE.rank(kernel, "f64" if wide else "f32")}
    gaps = form == "order" and not kernel.all()
    taps = "".join("1" if tap else "0" for tap in kernel.ravel()) if gaps else ""
    return {"form": form, "order": order, "footprint": taps}


def _problem(x: Any, y: Any, sizes: tuple[int, int], border: str, anchor: tuple[int, int],
             shape: dict[str, Any]) -> Filter:
    """The filter in the order of its output: by pixels if it can be, else by planes."""
    n, h, w, c = x.shape
    together = is_interleaved(y.shape, y.strides, y.itemsize)
    n, c = (n, c) if together else (n * c, 1)
    side_by_side = is_interleaved if together else is_planar
    return Filter(n, h, w, c, *sizes, anchor, border, NAMES[x.dtype], NAMES[y.dtype],
                  strided=not side_by_side(x.shape, x.strides, x.itemsize),
                  in_lines=y.strides[1] % 64 == 0, **shape)
