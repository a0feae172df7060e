"""Windows over some axes of an array of any shape, as filters of images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ..core.errors import InvalidProblem, TilewiseError
from ..kernels.cpu.emit.tiling import ceil_div
from ..runtime.filters import NAMES, Passes, Step, address, bits_of, empty, token
from ..runtime.spare import SPARE
from .arguments import number
from .arrays import ENGINE, on_arrays, run_at

COLOURS = 4  # at most so many values of the last axis are those of a pixel


INSTEAD = {"e": "float32", "g": "float64", "G": "complex128"}  # of types by their characters
SMALL = tuple(np.dtype(kind) for kind in ("uint8", "uint16", "int16"))


WATCHERS: list[Callable[[Any], object]] = []  # told of every pass


class NotNative(TilewiseError):
    """What generated code does not do; the message says what was found and what was needed."""


class Key(tuple[object, ...]):
    """A tuple that is hashed once."""

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, eq=False)
class Window:
    """Taps over some axes, and what is made of the values under them."""

    axes: tuple[int, ...]
    kernel: Any  # float64, an axis of it for each of the axes
    anchor: tuple[int, ...]
    border: str
    value: float = 0.0
    form: str = "sum"
    order: int = 0

    @cached_property
    def key(self) -> Key:
        """All of it, without the kernel itself, which a cache would keep."""
        return Key((self.axes, self.anchor, self.border, self.value, self.form, self.order,
                    self.kernel.shape, token(self.kernel)))


def in_turn(image: Any, out: Any, windows: list[Window]) -> None:
    """Passes one after the other; what lies between them has the type of the output.

    Both arrays have types that code is written for.
    """
    if len(windows) == 1 and np.may_share_memory(image, out):
        apart = empty(out.shape, out.dtype)
        in_turn(image, apart, windows)
        out[...] = apart
        return
    for watcher in WATCHERS:
        for window in windows:
            watcher(window)
    flags = out.flags
    key = (image.shape, image.strides, image.dtype, out.strides, out.dtype, flags.aligned,
           flags.writeable, torch.get_num_threads(), *[window.key for window in windows])
    passes = ENGINE.steps.get(key)
    if passes:
        _again(passes, address(image), address(out), ceil_div(out.nbytes, 4))
        return
    found = _for_the_first_time(image, out, windows)
    if passes is None:
        ENGINE.steps.put(key, found)


def _again(passes: Passes, x: int, y: int, floats: int) -> None:
    """All steps of passes; arrays begin at these addresses, those between have so many floats."""
    before = None
    for steps in passes[:-1]:
        block = SPARE.take(floats)
        for step in steps:
            run_at(step, x, block[0])
        if before is not None:
            SPARE.give(floats, before)
        before, x = block, block[0]
    for step in passes[-1]:
        run_at(step, x, y)
    if before is not None:
        SPARE.give(floats, before)


def _for_the_first_time(image: Any, out: Any, windows: list[Window]) -> Passes:
    """What was done, if it can be done again without a look; else nothing."""
    found = []
    for left, window in zip(reversed(range(len(windows))), windows):
        to = empty(out.shape, out.dtype) if left else out
        found.append(_run(image, to, window))
        image = to
    passes = tuple(tuple(step for step in steps if step) for steps in found)
    return passes if all(map(all, found)) else ()


def _run(image: Any, out: Any, window: Window) -> list[Step | None]:
    """One pass; steps of which none is missing can be taken again."""
    x0, y0 = address(image), address(out)
    if image.ndim == 1:
        image, out = image[None], out[None]
        window = replace(window, axes=(1,))
    rows, columns, kernel, anchor = _on_a_plane(window, _columns(image.shape))
    value, found = _constant(window, image.dtype), []
    for x, y in zip(_batches(image, rows, columns), _batches(out, rows, columns)):
        call = on_arrays(x, kernel, window.border, value, anchor, False, y, None, None,
                         window.form, window.order, told=True)
        found.append(call and Step(call, address(x) - x0, address(y) - y0, bits_of(value)))
    return found


def is_whole(given: Any, dtype: Any, windows: list[Window]) -> bool:
    """Whether all sums are integers that float32 holds.

    Then no order of summing rounds, and what passes leave out above the output's bits is nothing
    that a later one could need.
    """
    if given not in SMALL or dtype not in SMALL:
        return False
    gain = 1.0
    for window in windows:
        constant = window.value if window.border == "constant" else 0.0
        if (window.kernel % 1).any() or constant % 1 or abs(constant) > 2 ** 15:
            return False
        gain *= abs(window.kernel).sum()
    return bool(gain < 2 ** 24 / 65536)


def check_types(*arrays: Any) -> None:
    for array in arrays:
        if array.dtype.kind in "OSUVMm" or array.dtype.char in INSTEAD:
            better = INSTEAD.get(array.dtype.char, "")
            raise InvalidProblem(f"an array is {array.dtype}, which scipy does not take either, "
                                 f"needs one of {', '.join(map(str, NAMES))}"
                                 f"{better and f': array.astype(np.{better})'}")
        if array.dtype not in NAMES:
            raise NotNative(f"an array is {array.dtype}, needs one of {', '.join(map(str, NAMES))}")
        if not array.ndim:
            raise NotNative("an array has no axes, needs at least one")


def _constant(window: Window, dtype: Any) -> float:
    """The border's, as an image of this type could have it."""
    value = number(window.value, "cval")
    if window.border != "constant" or dtype.kind == "f" or window.form != "order":
        return value
    bounds = np.iinfo(dtype)
    if not bounds.min <= value <= bounds.max:  # also where it is NaN
        raise NotNative(f"cval is {value}, needs a value of {dtype}")
    return float(int(value))


def _on_a_plane(window: Window, columns: int) -> tuple[int, int, Any, tuple[int, int]]:
    """Two axes as rows and columns, the kernel and the anchor over these two."""
    used = [i for i, size in enumerate(window.kernel.shape) if size > 1]
    if len(used) > 2:
        shape = "x".join(map(str, window.kernel.shape))
        raise NotNative(f"the window is {shape}, needs at most two axes with more than one tap")
    axes = [window.axes[i] for i in used]
    sizes = [window.kernel.shape[i] for i in used]
    kernel = window.kernel if len(sizes) == window.kernel.ndim else np.reshape(window.kernel, sizes)
    anchor = [window.anchor[i] for i in used]
    if len(axes) == 2:
        if axes[0] > axes[1]:
            axes, kernel, anchor = axes[::-1], kernel.T, anchor[::-1]
        return axes[0], axes[1], kernel, (anchor[0], anchor[1])
    if not axes:
        return columns - 1, columns, kernel.reshape(1, 1), (0, 0)
    if axes[0] >= columns:
        return axes[0] - 1, axes[0], kernel[None], (0, anchor[0])
    return axes[0], columns, kernel[:, None], (anchor[0], 0)


def _columns(shape: Any) -> int:
    """The last axis that is not colour."""
    return len(shape) - (2 if len(shape) > 2 and shape[-1] <= COLOURS else 1)


def _batches(image: Any, rows: int, columns: int) -> Iterator[Any]:
    """(N, H, W, C) views that make up the array."""
    last = image.ndim - 1
    others = [axis for axis in range(image.ndim) if axis not in (rows, columns)]
    colour = [axis for axis in others if axis == last and image.shape[last] <= COLOURS]
    outer = [axis for axis in others if axis not in colour]
    view = image.transpose(*outer, rows, columns, *colour)
    view = view if colour else view[..., None]
    view = view if outer else view[None]
    if view.ndim == 4:
        yield view
        return
    for index in np.ndindex(view.shape[:-4]):
        yield view[index]
