"""Filters of arrays larger than memory, block by block: np.memmap, zarr, dask."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..core.errors import InvalidProblem, NotInstalled
from .arguments import border_of
from .windows import WATCHERS, Window

BLOCK = 32 << 20  # bytes of the input that a block has, with what lies around it


def reach(filter: Callable[..., Any], *args: Any, ndim: int = 2, dtype: Any = np.uint8,
          **options: Any) -> tuple[int, ...]:
    """How far results depend on pixels around them, along each axis.

    >>> from tilewise import image
    >>> reach(image.median, 5), reach(image.grey_opening, (3, 7))
    ((2, 2), (2, 6))
    """
    seen: list[Window] = []
    WATCHERS.append(seen.append)
    try:
        filter(np.zeros((4,) * ndim, dtype), *args, **options)
    finally:
        WATCHERS.remove(seen.append)
    if not seen:
        raise InvalidProblem(f"{getattr(filter, '__name__', filter)} runs in scipy for these "
                             "arguments, so its reach is not known: give depth=")
    found = [0] * ndim
    for window in seen:
        for axis, size, anchor in zip(window.axes, window.kernel.shape, window.anchor):
            found[axis] += max(anchor, size - 1 - anchor)
    return tuple(found)


def in_blocks(filter: Callable[..., Any], source: Any, out: Any, *args: Any,
              block: int = BLOCK, depth: int | None = None,
              progress: Callable[[int, int], object] | None = None, **options: Any) -> Any:
    """Filter `source` into `out`, some rows at a time; both may be larger than memory.

    They are whatever has a shape and a dtype and can be sliced: np.memmap, zarr, h5py. `block` is
    the number of bytes that are read at once, `depth` the number of rows that a result depends
    on before and after its own. `progress` is called with the rows that are done, and all.

    >>> from tilewise import image
    >>> x = np.arange(600, dtype=np.uint8).reshape(100, 6)
    >>> bool((in_blocks(image.median, x, x.copy(), 3, block=50) == image.median(x, 3)).all())
    True
    """
    if tuple(source.shape) != tuple(out.shape):
        raise InvalidProblem(f"out has shape {out.shape}, needs that of the source, "
                             f"{source.shape}")
    ndim, high = len(source.shape), source.shape[0]
    around = reach(filter, *args, ndim=ndim, dtype=source.dtype, **options)[0] \
        if depth is None else depth
    wraps = border_of(_first(options.get("mode", "reflect"))) == "wrap"
    row = int(np.prod(source.shape[1:])) * np.dtype(source.dtype).itemsize
    for first, last in _bands(high, max(1, block // max(1, row) - 2 * around, around)):
        before, part = _with_rows_around(source, first, last, around, wraps)
        found = filter(part, *args, output=np.dtype(out.dtype), **options)
        out[first:last] = found[before:before + last - first]
        del part, found
        _leave(source)
        _leave(out)
        if progress is not None:
            progress(last, high)
    return out


def on_dask(filter: Callable[..., Any], array: Any, *args: Any, **options: Any) -> Any:
    """A filter of a dask array, chunk by chunk, with as much of the neighbours as it needs."""
    try:
        import dask.array as da
    except ImportError:
        raise NotInstalled("dask is not importable, needs it for arrays in chunks: "
                           "pip install 'dask[array]'") from None
    around = reach(filter, *args, ndim=array.ndim, dtype=array.dtype, **options)
    # at the edges of the array the filter's own border is right; dask wraps around, if asked to
    mode = border_of(_first(options.get("mode", "reflect")))
    dtype = np.dtype(options.get("output") or array.dtype)
    return da.map_overlap(lambda chunk: filter(chunk, *args, **options), array,
                          depth=dict(enumerate(around)),
                          boundary="periodic" if mode == "wrap" else "none", dtype=dtype,
                          meta=np.zeros((0,) * array.ndim, dtype))


def _first(mode: Any) -> Any:
    """The border of the first axis."""
    return mode if isinstance(mode, str) else mode[0]


def _bands(high: int, rows: int) -> Iterator[tuple[int, int]]:
    for first in range(0, high, rows):
        yield first, min(high, first + rows)


def _with_rows_around(source: Any, first: int, last: int, around: int,
                      wraps: bool) -> tuple[int, Any]:
    """Rows in memory, and how many there are before the first; the border is the filter's own."""
    high = source.shape[0]
    if wraps and (first < around or last + around > high):
        rows = np.arange(first - around, last + around) % high
        return around, np.concatenate([source[i:i + 1] for i in rows])
    start = max(0, first - around)
    return first - start, np.asarray(source[start:min(high, last + around)])


def _leave(array: Any) -> None:
    """Pages of a file that were mapped go; what was written stays with the file."""
    if isinstance(array, np.memmap) and array.mode != "c" and hasattr(mmap, "MADV_DONTNEED"):
        pages: Any = array
        pages._mmap.madvise(mmap.MADV_DONTNEED)
