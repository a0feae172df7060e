"""unsharp_mask, with the arguments and the results of scikit-image's; scipy has none."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.errors import InvalidProblem
from .arguments import axes_of, whole
from .linear import gaussian


def unsharp_mask(image: Any, radius: Any = 1.0, amount: float = 1.0,
                 preserve_range: bool = False, *, channel_axis: int | None = None) -> Any:
    """The image and `amount` times what a blur takes away, in floats.

    Without `preserve_range`, integers are scaled to 0..1, and results are cut off at 0 and 1, or
    at -1 and 1 if the image has negative values.

    >>> unsharp_mask(np.eye(3, dtype=np.float32), 0.5)[1]
    array([0., 1., 0.], dtype=float32)
    """
    given = np.asarray(image)
    floats = given if given.dtype in (np.float32, np.float64) else given.astype(np.float64)
    if given.dtype.kind != "f" and not preserve_range:
        floats /= _white(given.dtype)
    colours = () if channel_axis is None else axes_of(whole(channel_axis, "channel_axis"),
                                                      given.ndim)
    axes = [axis for axis in range(given.ndim) if axis not in colours]
    result = gaussian(floats, radius, axes=axes)
    np.subtract(floats, result, result)
    result *= amount
    result += floats
    if preserve_range:
        return result
    return np.clip(result, -1.0 if (floats < 0).any() else 0.0, 1.0, result)


def _white(dtype: Any) -> float:
    """The brightest value of a type."""
    if dtype.kind != "u":
        raise InvalidProblem(f"image is {dtype}, needs uint8, uint16 or floats, or "
                             "preserve_range=True")
    return float(np.iinfo(dtype).max)
