"""Arguments as scipy.ndimage takes them, brought into one form."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..core.borders import BORDERS, SYNONYMS
from ..core.errors import InvalidProblem
from ..runtime.filters import empty

# scipy's names for interpolation, which mean the same for filters
GRIDS = {"grid-mirror": "reflect", "grid-wrap": "wrap", "grid-constant": "constant"}


def axes_of(axes: Any, ndim: int) -> tuple[int, ...]:
    """Which axes are filtered: all of them, one, or some.

    >>> axes_of(None, 3), axes_of((0, -1), 3)
    ((0, 1, 2), (0, 2))
    """
    if axes is None:
        return tuple(range(ndim))
    given = tuple(axes) if isinstance(axes, Iterable) else (axes,)
    given = tuple(whole(axis, "axes") for axis in given)
    found = tuple(axis % max(1, ndim) for axis in given)
    wrong = any(not -ndim <= axis < ndim for axis in given) or len({*found}) < len(found)
    if wrong:
        raise InvalidProblem(f"axes is {axes}, needs different ones of the image's {ndim}")
    return found


def whole(value: Any, name: str) -> int:
    """A number without a point.

    >>> whole(np.int16(3), "size")
    3
    """
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidProblem(f"{name} is {value!r}, needs an integer") from None


def number(value: Any, name: str) -> float:
    """A real number, not its digits.

    >>> number(np.float32(0.5), "cval")
    0.5
    """
    try:
        return math.ldexp(value, 0)
    except TypeError:
        raise InvalidProblem(f"{name} is {value!r}, needs a real number") from None


def for_each(value: Any, count: int, name: str) -> list[Any]:
    """One value for each of so many axes.

    >>> for_each(3, 2, "size"), for_each((3, 5), 2, "size")
    ([3, 3], [3, 5])
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        return [value] * count
    found = list(value)
    if len(found) != count:
        raise InvalidProblem(f"{name} has {len(found)} entries, needs one, or one for each of the "
                             f"{count} axes that are filtered")
    return found


def border_of(mode: Any) -> str:
    """A border by its name here."""
    name = SYNONYMS.get(str(mode), GRIDS.get(str(mode), mode))
    if name not in BORDERS:
        raise InvalidProblem(f"mode is {mode!r}, needs one of {', '.join((*BORDERS, *GRIDS))}")
    return str(name)


def anchors_of(origins: Any, sizes: Any) -> tuple[int, ...]:
    """The taps that meet a pixel itself: those in the middle, moved by scipy's origins."""
    found = []
    for origin, size in zip(origins, sizes, strict=True):
        if not 0 <= size // 2 + origin < size:
            raise InvalidProblem(f"origin is {origin} for {size} taps, needs one from "
                                 f"{-(size // 2)} to {(size - 1) // 2}")
        found.append(int(size // 2 + origin))
    return tuple(found)


def mirrored(origins: Any, sizes: Any) -> list[int]:
    """Origins of windows that are turned round, as scipy's convolutions and dilations are."""
    return [-origin - (size % 2 == 0) for origin, size in zip(origins, sizes, strict=True)]


def kept(value: Any) -> Any:
    """An argument as something that can be a key, and is taken as the argument is."""
    if value is None or type(value) in (int, float, str):
        return value
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return tuple(map(kept, value)) if isinstance(value, list | tuple) else value


def output_for(output: Any, image: Any) -> Any:
    """The array to write to: the caller's, or a new one of the image's or the given type."""
    if output is None:
        return empty(image.shape, image.dtype)
    if not isinstance(output, np.ndarray):
        return empty(image.shape, np.dtype(output))
    if output.shape != image.shape:
        raise InvalidProblem(f"output has shape {output.shape}, needs that of the image, "
                             f"{image.shape}")
    return output
