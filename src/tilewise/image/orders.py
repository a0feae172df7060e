"""Filters that take one of the values under a window: medians, ranks, grey morphology."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from ..core.errors import InvalidProblem
from .arguments import anchors_of, axes_of, border_of, for_each, kept, mirrored, output_for, whole
from .elsewhere import or_scipy
from .windows import NotNative, Window, check_types, in_turn

# places in the order of so many values
PLACES: dict[str, Callable[[int, Any], int]] = {
    "middle": lambda count, _: count // 2,
    "place": lambda count, rank: whole(rank, "rank") + count * (rank < 0),
    "percent": lambda count, share: min(count - 1, int(float(count) * share / 100.0)),
}
# which values are taken, one filter after the other: a place, and whether windows are turned round
Which = tuple[tuple[str, float, bool], ...]
MIDDLE: Which = (("middle", 0, False),)
LEAST: Which = (("place", 0, False),)
LARGEST: Which = (("place", -1, False),)
TURNED: Which = (("place", -1, True),)


@or_scipy("median_filter")
def median(input: Any, size: Any = None, footprint: Any = None, output: Any = None,
           mode: Any = "reflect", cval: float = 0.0, origin: Any = 0, *, axes: Any = None) -> Any:
    """The middle value under a window; of an even number, the upper of the two.

    Arguments and results are those of `scipy.ndimage.median_filter`, as of all filters here.

    >>> int(median(np.array([[9, 1, 2], [3, 200, 4], [5, 6, 7]], np.uint8), 3)[1, 1])
    5
    """
    return _ranked(input, MIDDLE, size, footprint, output, mode, cval, origin, axes)


@or_scipy("rank_filter")
def rank(input: Any, rank: int, size: Any = None, footprint: Any = None, output: Any = None,
         mode: Any = "reflect", cval: float = 0.0, origin: Any = 0, *, axes: Any = None) -> Any:
    """The `rank`-th value under a window, from 0; negative ones count from the largest."""
    return _ranked(input, (("place", rank, False),), size, footprint, output, mode, cval, origin,
                   axes)


@or_scipy("percentile_filter")
def percentile(input: Any, percentile: float, size: Any = None, footprint: Any = None,
               output: Any = None, mode: Any = "reflect", cval: float = 0.0, origin: Any = 0, *,
               axes: Any = None) -> Any:
    """The value under a window that so many percent are below."""
    share = percentile + 100.0 * (percentile < 0)
    if not 0 <= share <= 100:
        raise InvalidProblem(f"percentile is {percentile}, needs one from -100 to 100")
    return _ranked(input, (("percent", share, False),), size, footprint, output, mode, cval, origin,
                   axes)


@or_scipy("minimum_filter")
def minimum(input: Any, size: Any = None, footprint: Any = None, output: Any = None,
            mode: Any = "reflect", cval: float = 0.0, origin: Any = 0, *,
            axes: Any = None) -> Any:
    """The least value under a window."""
    return _ranked(input, LEAST, size, footprint, output, mode, cval, origin, axes)


@or_scipy("maximum_filter")
def maximum(input: Any, size: Any = None, footprint: Any = None, output: Any = None,
            mode: Any = "reflect", cval: float = 0.0, origin: Any = 0, *,
            axes: Any = None) -> Any:
    """The largest value under a window."""
    return _ranked(input, LARGEST, size, footprint, output, mode, cval, origin, axes)


@or_scipy("grey_erosion")
def grey_erosion(input: Any, size: Any = None, footprint: Any = None, structure: Any = None,
                 output: Any = None, mode: Any = "reflect", cval: float = 0.0, origin: Any = 0, *,
                 axes: Any = None) -> Any:
    """The least value under a flat footprint; with a structure, scipy's."""
    _need_flat(structure)
    return _ranked(input, LEAST, size, footprint, output, mode, cval, origin, axes)


@or_scipy("grey_dilation")
def grey_dilation(input: Any, size: Any = None, footprint: Any = None, structure: Any = None,
                  output: Any = None, mode: Any = "reflect", cval: float = 0.0, origin: Any = 0, *,
                  axes: Any = None) -> Any:
    """The largest value under a flat footprint turned round; with a structure, scipy's."""
    _need_flat(structure)
    return _ranked(input, TURNED, size, footprint, output, mode, cval, origin, axes)


@or_scipy("grey_opening")
def grey_opening(input: Any, size: Any = None, footprint: Any = None, structure: Any = None,
                 output: Any = None, mode: Any = "reflect", cval: float = 0.0, origin: Any = 0, *,
                 axes: Any = None) -> Any:
    """An erosion, then a dilation: bright spots smaller than the footprint go."""
    _need_flat(structure)
    return _ranked(input, LEAST + TURNED, size, footprint, output, mode, cval, origin, axes)


@or_scipy("grey_closing")
def grey_closing(input: Any, size: Any = None, footprint: Any = None, structure: Any = None,
                 output: Any = None, mode: Any = "reflect", cval: float = 0.0, origin: Any = 0, *,
                 axes: Any = None) -> Any:
    """A dilation, then an erosion: dark spots smaller than the footprint go."""
    _need_flat(structure)
    return _ranked(input, TURNED + LEAST, size, footprint, output, mode, cval, origin, axes)


def _need_flat(structure: Any) -> None:
    if structure is not None:
        raise NotNative("structure is given, needs a flat footprint or a size")


def _footprint(size: Any, footprint: Any, count: int) -> Any:
    if footprint is None and size is None:
        raise InvalidProblem("neither size nor footprint is given, needs one of them")
    if footprint is None:
        sizes = [whole(one, "size") for one in for_each(size, count, "size")]
        if min(sizes, default=1) < 0:
            raise InvalidProblem(f"size is {size}, needs at least 1")
        taps = np.ones(sizes, bool)
    else:
        taps = np.asarray(footprint, bool)
    if taps.ndim != count or not taps.any():
        raise InvalidProblem(f"footprint has shape {taps.shape} and {int(taps.sum())} taps, needs "
                             f"{count} axes, those that are filtered, and at least one tap")
    return taps


def _ranked(input: Any, which: Which, size: Any, footprint: Any, output: Any, mode: Any,
            cval: float, origin: Any, axes: Any) -> Any:
    """Values under windows, by their places in the windows' order."""
    image = np.asarray(input)
    out = output_for(output, image)
    if out.dtype != image.dtype:
        raise NotNative(f"output is {out.dtype}, needs the type of the image, {image.dtype}")
    is_bool = image.dtype.kind == "b"
    x, y = (image.view(np.uint8), out.view(np.uint8)) if is_bool else (image, out)
    check_types(x)
    given = (size, footprint, mode, cval, origin, axes)
    try:
        windows = _windows(image.ndim, which, *given)
    except TypeError:  # an argument that is no key as it is, such as a list
        windows = _windows(image.ndim, which, *map(kept, given))
    in_turn(x, y, windows)
    return out


@lru_cache(maxsize=256)
def _windows(ndim: int, which: Which, size: Any, footprint: Any, mode: Any, cval: float,
             origin: Any, axes: Any) -> list[Window]:
    """The passes of a call."""
    axes = axes_of(axes, ndim)
    taps = _footprint(size, footprint, len(axes))
    borders = [border_of(one) for one in for_each(mode, len(axes), "mode")]
    origins = for_each(origin, len(axes), "origin")
    return [window for one in which
            for window in _of_place(axes, taps, borders, cval, origins, *one)]


def _of_place(axes: tuple[int, ...], taps: Any, borders: list[str], cval: float,
              origins: list[Any], place: str, number: float, turned: bool) -> list[Window]:
    count = int(taps.sum())
    order = PLACES[place](count, number)
    if not 0 <= order < count:
        raise InvalidProblem(f"rank is {number}, needs one of the footprint's {count} values")
    if turned:
        taps, origins = np.flip(taps), mirrored(origins, taps.shape)
    return _passes(axes, taps, anchors_of(origins, taps.shape), borders, cval, order)


def _passes(axes: tuple[int, ...], taps: Any, anchor: tuple[int, ...], borders: list[str],
            cval: float, order: int) -> list[Window]:
    """One window; of the least and the largest of boxes, one for two axes at a time."""
    is_box = order in (0, taps.size - 1) and bool(taps.all())
    groups = _groups(taps.shape, borders) if is_box else [list(range(len(axes)))]
    found = []
    for group in groups:
        used = {borders[i] for i in group if taps.shape[i] > 1} or {"reflect"}
        if len(used) > 1:
            raise NotNative(f"mode is {borders}, needs one for all axes of this footprint")
        part = np.ones([taps.shape[i] for i in group]) if is_box else taps.astype(np.float64)
        found.append(Window(tuple(axes[i] for i in group), part, tuple(anchor[i] for i in group),
                            used.pop(), cval, "order",
                            part.size - 1 if is_box and order else order))
    return found


def _groups(sizes: Any, borders: list[str]) -> list[list[int]]:
    """Axes that are filtered together: neighbours with one border, at most two."""
    groups: list[list[int]] = []
    for i in reversed([i for i, size in enumerate(sizes) if size > 1]):
        if groups and len(groups[-1]) == 1 and borders[groups[-1][0]] == borders[i]:
            groups[-1].insert(0, i)
        else:
            groups.append([i])
    return groups or [list(range(len(sizes)))[-1:]]
