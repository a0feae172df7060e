"""Which taps of a filter see the image; in dilated filters many see nothing but padding."""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby
from typing import Any

from .problem import Problem


def skips(p: Problem) -> bool:
    """Whether direct code leaves out what sees padding alone; dense filters have little of it.

    Images that are not float32 are packed, padding and all.
    """
    return p.is_padded and p.dilation != (1, 1) and p.dtype == "f32"


def taps_inside(at: Any, size: Any, taps: int, apart: int, least: Any, most: Any) -> Any:
    """The first tap that lies inside an axis and the one after the last, if tap 0 lies at `at`.

    Of numbers, or of values of generated code with their `least` and `most`.
    """
    first = (most(0 - at, 0) + (apart - 1)) // apart
    end = (most(size - at, 0) + (apart - 1)) // apart
    return least(first, taps), least(end, taps)


@lru_cache(maxsize=1024)
def stretches(outputs: int, size: int, taps: int, stride: int, before: int,
              apart: int) -> tuple[tuple[int, int], ...]:
    """Neighbouring outputs along an axis that see the same taps: how many, and how many taps."""
    seen = [taps_inside(i * stride - before, size, taps, apart, min, max) for i in range(outputs)]
    return tuple((len(list(same)), end - first) for (first, end), same in groupby(seen))


def rows_seen(p: Problem) -> tuple[tuple[int, int], ...]:
    """Stretches of output rows."""
    return stretches(p.conv_h, p.h, p.r, p.stride[0], p.padding[0], p.dilation[0])


def cols_seen(p: Problem) -> tuple[tuple[int, int], ...]:
    """Stretches of output columns."""
    return stretches(p.conv_w, p.w, p.s, p.stride[1], p.padding[2], p.dilation[1])
