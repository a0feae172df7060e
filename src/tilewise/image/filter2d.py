"""tilewise.filter2d: one kernel over images, for NumPy arrays and torch tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ..core.borders import meaning
from ..core.errors import InvalidProblem
from .arrays import on_arrays
from .tensors import on_tensors


def filter2d(image: Any, kernel: Any, *, border: str = "reflect", value: float | None = None,
             anchor: tuple[int, int] | None = None, flip: bool = False, out: Any = None,
             dtype: Any = None, algorithm: str | None = None) -> Any:
    """Correlate images with one small kernel; with `flip`, convolve them.

    Images have shape (H, W), (H, W, C) or (N, H, W, C) and type bool, uint8, uint16, int16,
    int32, float32 or float64. The result has the same shape. Its type is `dtype`, or else that of
    the image, or float32 for bool. Integer results are rounded, ties to even, and saturated.

    `border` says what lies beyond the edges, with the names, meanings and default of
    scipy.ndimage: "reflect" (b a | a b), "nearest" (a a | a b), "mirror" (c b | a b), "wrap" or
    "constant" (`value`, 0 if not given). `anchor` is the (row, column) of the kernel that meets
    the pixel itself; the default is the centre. `out` is an array to write to. `algorithm` names
    one of the methods instead of letting the planner choose.

    >>> image = np.arange(12, dtype=np.uint8).reshape(3, 4)
    >>> filter2d(image, np.ones((3, 3)) / 9)[1]
    array([4, 5, 6, 7], dtype=uint8)
    """
    border, constant = meaning(border, value)
    if isinstance(image, Tensor):
        return on_tensors(image, kernel, border, constant, anchor, flip, out, dtype, algorithm)
    return on_arrays(image, _numbers(kernel), border, constant, anchor, flip, out, dtype,
                     algorithm)


def _numbers(kernel: Any) -> Any:
    try:
        return np.asarray(kernel, np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidProblem(f"kernel is no array of numbers, needs two sizes: {error}") from None
